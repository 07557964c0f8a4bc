//! Limits repeated warnings. A failure that lasts is retried every few seconds, and most code that warns of it does not
//! know that it has warned before. Here no caller has to remember: the same warning of the same subject is written after
//! pauses that grow from 1 minute to 1 hour, with the number of repetitions that were left out.

use std::fmt::Debug;
use std::hash::{Hash as _, Hasher as _};
use std::sync::Mutex;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use holdfast_core::digest::Fnv64;
use holdfast_core::lock::lock;
use holdfast_core::repeated::RepeatedFailures;
use holdfast_core::varying::masked;

/// The field with the number of repetitions. A warning that has it is limited where it arises.
const REPETITIONS: &str = "repetitions";
/// Fields with the text of an error. Identifiers and times in it vary between attempts.
const TEXTS: [&str; 4] = ["error", "message", "why", "failure"];

/// Formats lines as `inner` does, without warnings that repeat too soon.
pub(super) struct Limited<F> {
    inner: F,
    /// Adds the number of repetitions to a line.
    count: fn(&mut String, u32),
    logged: Mutex<RepeatedFailures<u64>>,
}

impl<F> Limited<F> {
    pub(super) fn new(inner: F, count: fn(&mut String, u32)) -> Limited<F> {
        Limited {
            inner,
            count,
            logged: Mutex::default(),
        }
    }

    /// The number of repetitions since this warning was written; `None` if it is not written now.
    fn due<S, N>(&self, context: &FmtContext<'_, S, N>, event: &Event<'_>) -> Option<u32>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
        N: for<'a> FormatFields<'a> + 'static,
    {
        if *event.metadata().level() > Level::WARN {
            return Some(0);
        }
        let mut subject = Subject::default();
        event.metadata().callsite().hash(&mut subject.key);
        for span in context.event_scope().into_iter().flatten() {
            if !span.metadata().target().starts_with("trace") {
                let extensions = span.extensions();
                let fields = extensions.get::<FormattedFields<N>>();
                fields.map(|fields| fields.as_str()).hash(&mut subject.key);
            }
        }
        event.record(&mut subject);
        if subject.is_limited {
            return Some(0);
        }
        let now = jiff::Timestamp::now();
        lock(&self.logged).record(subject.key.finish(), &subject.text, now)
    }
}

/// What a warning is about, and its text.
#[derive(Default)]
struct Subject {
    key: Fnv64,
    text: String,
    is_limited: bool,
}

impl Subject {
    fn record(&mut self, field: &Field, value: &str) {
        let name = field.name();
        if TEXTS.contains(&name) {
            self.text.push_str(value);
        } else if masked(value) != "#" || !value.ends_with('s') {
            // Anything but a duration.
            (name, value).hash(&mut self.key);
        }
    }
}

impl Visit for Subject {
    fn record_f64(&mut self, _: &Field, _: f64) {}

    fn record_i64(&mut self, field: &Field, _: i64) {
        self.is_limited |= field.name() == REPETITIONS;
    }

    fn record_u64(&mut self, field: &Field, _: u64) {
        self.is_limited |= field.name() == REPETITIONS;
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.record(field, &format!("{value:?}"));
    }
}

impl<S, N, F> FormatEvent<S, N> for Limited<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        match self.due(context, event) {
            None => Ok(()),
            Some(0) => self.inner.format_event(context, writer, event),
            Some(repetitions) => {
                let mut line = String::new();
                let own = Writer::new(&mut line);
                self.inner.format_event(context, own, event)?;
                (self.count)(&mut line, repetitions);
                writer.write_str(&line)
            }
        }
    }
}

/// Adds the number to a line of text.
pub(super) fn count_in_text(line: &mut String, repetitions: u32) {
    let end = line.trim_end().len();
    line.insert_str(end, &format!(" {REPETITIONS}={repetitions}"));
}

/// Adds the number to a line with a JSON object.
pub(super) fn count_in_json(line: &mut String, repetitions: u32) {
    if let Some(end) = line.rfind('}') {
        line.insert_str(end, &format!(",\"{REPETITIONS}\":{repetitions}"));
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Kept;
    use super::*;
    use std::time::Duration;
    use tracing_subscriber::layer::SubscriberExt as _;

    fn logged(work: impl FnOnce()) -> Vec<String> {
        let kept = Kept::default();
        let writer = kept.clone();
        let format = tracing_subscriber::fmt::format().without_time();
        let layer = tracing_subscriber::fmt::layer()
            .with_ansi(false)
            .event_format(Limited::new(format, count_in_text))
            .with_writer(move || writer.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), work);
        kept.lines()
    }

    #[test]
    fn a_repeated_warning_about_one_subject_is_logged_once_a_minute() {
        let lines = logged(|| {
            for pod in ["n/a", "n/b"] {
                for tries in 0..50_u64 {
                    let (error, pause) = (format!("busy for {tries}s"), Duration::from_secs(tries));
                    tracing::warn!(error, pod, tries, ?pause, "cannot be mounted");
                }
            }
            tracing::warn!(error = "gone", pod = "n/a", "cannot be mounted");
        });
        let about = |what: &str| lines.iter().filter(|line| line.contains(what)).count();
        assert_eq!((about("busy for 0s"), about("gone")), (2, 1), "{lines:?}");
        assert_eq!(lines.len(), 3, "{lines:?}");
    }

    #[test]
    fn the_subject_includes_the_span() {
        let lines = logged(|| {
            for _ in 0..3 {
                for pod in ["n/a", "n/b"] {
                    let span = tracing::info_span!("pod", pod);
                    span.in_scope(|| tracing::warn!("no network"));
                }
            }
        });
        assert_eq!(lines.len(), 2, "{lines:?}");
    }

    #[test]
    fn only_warnings_without_a_limit_of_their_own_are_suppressed() {
        let lines = logged(|| {
            for _ in 0..3 {
                tracing::info!("a container exited");
                tracing::warn!(repetitions = 0_u32, "limited by the caller");
                tracing::error!("this repeats");
            }
        });
        assert_eq!(lines.len(), 7, "{lines:?}");
    }

    #[test]
    fn lines_contain_the_number_of_repetitions() {
        let (mut text, mut json) = ("WARN busy\n".to_owned(), "{\"msg\":\"busy\"}\n".to_owned());
        count_in_text(&mut text, 7);
        count_in_json(&mut json, 7);
        assert_eq!(text, "WARN busy repetitions=7\n");
        assert_eq!(json, "{\"msg\":\"busy\",\"repetitions\":7}\n");
    }
}
