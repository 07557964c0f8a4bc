//! Explains the state of a pod from its journal: as a sentence, or as a timeline in text, JSON or SVG. Pure.

use std::fmt::Write as _;
use std::path::PathBuf;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::journal::{Entry, Journal, Progress, Step};
use super::lifecycle::{Cause, State};
use crate::node::doctor::UNHIDE;
use crate::time;

/// The width of the bars in a terminal, in columns.
const WIDTH: usize = 40;

/// The answer of an agent about one pod.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name. Several pods may have had this name, one after the other.
    pub name: String,
    /// The pod's uid, which distinguishes it from other pods with the same name.
    pub uid: String,
    /// One sentence that describes the pod's state and its cause.
    pub sentence: String,
    /// The step that blocks the pod, if any.
    pub blocking: Option<Entry>,
    /// The progress of the image pull that the pod waits for. `None` if it waits for none, or if the runtime does not
    /// report progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetching: Option<Fetching>,
    /// The steps in order, and the decisions that led to them.
    #[serde(flatten)]
    pub journal: Journal,
}

/// Progress of the image pulls of a runtime at one moment. Parts that have been downloaded completely are not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fetching {
    /// Number of parts (mostly layers) that are being downloaded.
    pub parts: usize,
    /// Bytes of these parts that have been downloaded.
    pub bytes: u64,
    /// Total size of these parts in bytes.
    pub of_bytes: u64,
    /// Number of pulls that the parts belong to. The runtime does not attribute parts to pulls.
    pub pulls: usize,
}

impl std::fmt::Display for Fetching {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let parts = if self.parts == 1 {
            "1 part".to_owned()
        } else {
            format!("{} parts", self.parts)
        };
        write!(
            f,
            "{:.1} of {:.1} MiB of {parts} in progress",
            mib(self.bytes),
            mib(self.of_bytes)
        )?;
        if self.pulls > 1 {
            write!(f, ", for {} pulls in total", self.pulls)
        } else {
            Ok(())
        }
    }
}

impl Journal {
    /// Whether an image pull blocks the pod.
    #[must_use]
    pub fn is_pulling(&self) -> bool {
        self.blocking()
            .is_some_and(|e| e.step == Step::Image && e.progress == Progress::Running)
    }
}

impl Step {
    /// A description of the step for users.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Step::Admission => "admission",
            Step::Observe => "runtime query",
            Step::Network => "node network",
            Step::Cgroup => "cgroup",
            Step::Mirror => "mirror pod",
            Step::Directories => "directories",
            Step::Volume => "volume",
            Step::Objects => "references",
            Step::Claims => "resource claims",
            Step::Sandbox => "sandbox",
            Step::Image => "image",
            Step::Create => "create",
            Step::Start => "start",
            Step::PostStart => "postStart hook",
            Step::BackOff => "back-off",
            Step::Startup => "startup probe",
            Step::Readiness => "readiness probe",
            Step::Liveness => "liveness probe",
            Step::Resize => "resize",
            Step::PreStop => "preStop hook",
            Step::Stop => "stop",
            Step::StopSandbox => "stop sandbox",
            Step::UnprepareClaims => "unprepare resource claims",
            Step::Release => "release",
            Step::Finalise => "finalise",
        }
    }

    /// Whether no container can run while this step fails. The condition `PodReadyToStartContainers` covers the same
    /// steps.
    #[must_use]
    pub(crate) fn before_containers(self) -> bool {
        matches!(
            self,
            Step::Observe
                | Step::Network
                | Step::Cgroup
                | Step::Directories
                | Step::Volume
                | Step::Objects
                | Step::Claims
                | Step::Sandbox
        )
    }
}

/// Describes a step that is running or has failed. The text has no times, so that it stays the same while nothing
/// changes.
#[must_use]
pub fn sentence(entry: &Entry) -> String {
    let subject = &entry.subject;
    let Progress::Failed(error) = &entry.progress else {
        return match entry.step {
            Step::Image => format!("the image of container {subject} is being pulled"),
            Step::Startup => {
                format!("the startup probe of container {subject} has not succeeded yet")
            }
            Step::Readiness => {
                format!("the readiness probe of container {subject} has not succeeded yet")
            }
            Step::PostStart => format!("the postStart hook of container {subject} is running"),
            Step::PreStop => format!("the preStop hook of container {subject} is running"),
            Step::Stop => format!("container {subject} is being stopped"),
            Step::Volume => format!("volume {subject} is being set up"),
            step if subject.is_empty() => format!("step in progress: {}", step.label()),
            step => format!("step in progress: {} {subject}", step.label()),
        };
    };
    match entry.step {
        Step::Admission => format!("the node does not admit the pod: {error}"),
        Step::Observe | Step::Network => error.clone(),
        Step::Cgroup => format!("the pod's cgroup cannot be created: {error}"),
        Step::Mirror => format!("the mirror pod cannot be created: {error}"),
        Step::Directories => format!("the pod's directories cannot be created: {error}"),
        Step::Volume => format!("volume {subject} cannot be set up: {error}"),
        Step::Objects => format!("objects that the pod refers to cannot be read: {error}"),
        Step::Claims => format!("the pod's resource claims cannot be prepared: {error}"),
        Step::Sandbox => format!("the pod's sandbox cannot be created: {error}"),
        Step::Image => format!("the image of container {subject} cannot be pulled: {error}"),
        Step::Create => format!("container {subject} cannot be created: {error}"),
        Step::Start => format!("container {subject} cannot be started: {error}"),
        Step::PostStart => format!("the postStart hook of container {subject} failed: {error}"),
        Step::BackOff => format!("container {subject} keeps exiting: {error}"),
        Step::Startup => format!("the startup probe of container {subject} fails: {error}"),
        Step::Readiness => format!("the readiness probe of container {subject} fails: {error}"),
        Step::Liveness => format!("the liveness probe of container {subject} fails: {error}"),
        Step::Resize => format!("the pod cannot be resized: {error}"),
        Step::PreStop => format!("the preStop hook of container {subject} failed: {error}"),
        Step::Stop => format!("container {subject} cannot be stopped: {error}"),
        Step::StopSandbox => format!("the pod's sandbox cannot be stopped: {error}"),
        Step::UnprepareClaims => format!("the pod's resource claims cannot be unprepared: {error}"),
        Step::Release => format!("the pod's resources cannot be released: {error}"),
        Step::Finalise => error.clone(),
    }
}

/// The message in the status of a pod whose containers cannot be started yet because a step fails. Retries must not
/// change the message. It therefore has no error text, and if several steps fail, it names the first one in the order
/// of steps and subjects.
#[must_use]
pub fn blocking_reason(journal: &Journal) -> Option<String> {
    let fails =
        |e: &&Entry| e.step.before_containers() && matches!(e.progress, Progress::Failed(_));
    let order = |e: &&Entry| (e.step, e.subject.clone());
    let entry = journal.steps.iter().filter(fails).min_by_key(order)?;
    let subject = &entry.subject;
    let failure = match entry.step {
        Step::Observe => "the container runtime does not list the pod".into(),
        Step::Network => "the network of the node is not ready".into(),
        Step::Cgroup => "the pod's cgroup cannot be created".into(),
        Step::Directories => "the pod's directories cannot be created".into(),
        Step::Volume => format!("volume {subject} cannot be set up"),
        Step::Objects => "objects that the pod refers to cannot be read".into(),
        Step::Claims => "the pod's resource claims cannot be prepared".into(),
        _ => "the pod's sandbox cannot be created".to_owned(),
    };
    Some(format!("{failure}; the pod's events have the error"))
}

/// Builds the answer for one pod. `fetching` is the progress of the runtime's image pulls.
#[must_use]
pub fn explain(
    namespace: &str,
    name: &str,
    uid: &str,
    journal: Journal,
    fetching: Option<Fetching>,
) -> Explanation {
    let blocking = journal.blocking().cloned();
    let state = journal.decisions.back().map_or(State::Syncing, |d| d.state);
    let why = |cause: Cause| match cause {
        Cause::Deleted => "the pod was deleted",
        Cause::Removed => "the pod was removed from its source",
        Cause::Completed => "all containers have finished",
        Cause::Rejected => "the node rejected the pod",
        Cause::Preempted => "a critical pod preempted the pod",
        Cause::Evicted => "the node evicted the pod",
        Cause::DeadlineExceeded => "the pod was active for longer than activeDeadlineSeconds",
        Cause::NodeShutdown => "the node is shutting down",
    };
    let fetching = fetching.filter(|f| f.parts > 0 && journal.is_pulling());
    let progress = fetching.map_or(String::new(), |f| format!(" ({f})"));
    let blocked = blocking
        .as_ref()
        .map(|entry| format!("{}{progress}", sentence(entry)));
    let sentence = match (state, blocked) {
        (State::Syncing, None) => match &journal.waiting {
            None => "Running as specified; nothing is pending.".to_owned(),
            Some(waiting) => format!("Not yet running as specified: {waiting}."),
        },
        (State::Syncing, Some(step)) => format!("Blocked: {step}."),
        (State::Terminating { cause, .. } | State::Terminated { cause }, blocked) => {
            let step = blocked.map_or(String::new(), |step| format!(" Now: {step}."));
            format!("Terminating: {}.{step}", why(cause))
        }
        (State::Finished { cause }, _) => format!("Terminated: {}.", why(cause)),
    };
    let (namespace, name, uid) = (namespace.to_owned(), name.to_owned(), uid.to_owned());
    Explanation {
        namespace,
        name,
        uid,
        sentence,
        blocking,
        fetching,
        journal,
    }
}

impl Explanation {
    /// Whether stopping the pod's sandbox fails. Hidden network namespaces are one cause.
    #[must_use]
    pub fn fails_to_stop_sandbox(&self) -> bool {
        let blocking = self.blocking.as_ref();
        blocking.is_some_and(|entry| {
            entry.step == Step::StopSandbox && matches!(entry.progress, Progress::Failed(_))
        })
    }

    /// Appends to the sentence that a mount hides network namespaces, with the remedy.
    #[must_use]
    pub fn with_hidden_namespaces(mut self, hidden: &[PathBuf]) -> Explanation {
        if let Some(first) = hidden.first() {
            let _ = write!(
                self.sentence,
                " A mount over /run/netns hides network namespaces of pods, among them {}; remedy: {UNHIDE}.",
                first.display()
            );
        }
        self
    }
}

/// A step as a bar of the chart: label, start and length in milliseconds.
struct Bar {
    label: String,
    start: i64,
    length: i64,
    failed: bool,
}

/// One bar for each step of the journal. The bar of a running step ends at `now`.
fn bars(journal: &Journal, now: Timestamp) -> Vec<Bar> {
    let Some(first) = journal.steps.iter().map(|e| e.since).min() else {
        return vec![];
    };
    let bar = |entry: &Entry| {
        let end = entry
            .ended
            .filter(|_| !matches!(entry.progress, Progress::Running))
            .unwrap_or(now);
        let label = if entry.subject.is_empty() {
            entry.step.label().to_owned()
        } else {
            format!("{} {}", entry.step.label(), entry.subject)
        };
        Bar {
            label,
            start: milliseconds(entry.since.duration_since(first)),
            length: milliseconds(end.duration_since(entry.since)).max(0),
            failed: matches!(entry.progress, Progress::Failed(_)),
        }
    };
    journal.steps.iter().map(bar).collect()
}

fn milliseconds(time: SignedDuration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

pub(crate) fn duration_text(ms: i64) -> String {
    if ms < 10_000 {
        format!("{ms} ms")
    } else {
        time::shown(std::time::Duration::from_millis(ms.unsigned_abs()))
    }
}

/// Splits the bars into those of the pod's start and those of later steps. Late restarts would make a chart of the
/// start unreadable, so they are listed below it.
fn split(bars: Vec<Bar>) -> (Vec<Bar>, Vec<Bar>) {
    let mut end = 0_i64;
    let mut bars = bars.into_iter();
    let mut start = vec![];
    for bar in bars.by_ref() {
        // A minute in which no step began separates the start from later steps.
        if !start.is_empty() && bar.start > end.saturating_add(60_000) {
            return (start, std::iter::once(bar).chain(bars).collect());
        }
        end = end.max(bar.start.saturating_add(bar.length.min(60_000)));
        start.push(bar);
    }
    (start, vec![])
}

/// The answer as text for a terminal.
#[must_use]
pub fn text(explanation: &Explanation, now: Timestamp) -> String {
    let mut out = format!(
        "Pod {}/{} (uid {})\n{}\n",
        explanation.namespace, explanation.name, explanation.uid, explanation.sentence
    );
    if let Some(entry) = &explanation.blocking {
        let since = time::shown(
            std::time::Duration::try_from(now.duration_since(entry.since)).unwrap_or_default(),
        );
        let _ = write!(
            out,
            "  since {} ({since} ago)",
            time::seconds(entry.since).0
        );
        if entry.attempts > 1 {
            let _ = write!(out, ", tried {} times", entry.attempts);
        }
        match entry.next {
            Some(next) if next > now => {
                let left = time::shown(
                    std::time::Duration::try_from(next.duration_since(now)).unwrap_or_default(),
                );
                let _ = write!(out, ", next try in {left}");
            }
            Some(_) => out.push_str(", next try now"),
            None => {}
        }
        out.push('\n');
    }
    let (start, later) = split(bars(&explanation.journal, now));
    let whole = start
        .iter()
        .map(|b| b.start.saturating_add(b.length))
        .max()
        .unwrap_or(0)
        .max(1);
    if !start.is_empty() {
        let _ = writeln!(
            out,
            "\nDuration of the start ({} in total):",
            duration_text(whole)
        );
    }
    let width = start
        .iter()
        .map(|b| b.label.chars().count())
        .max()
        .unwrap_or(0);
    for bar in &start {
        let columns = |ms: i64| {
            usize::try_from(
                ms.saturating_mul(i64::try_from(WIDTH).unwrap_or(40))
                    .div_euclid(whole),
            )
            .unwrap_or(0)
        };
        let (before, length) = (
            columns(bar.start).min(WIDTH - 1),
            columns(bar.length).max(1),
        );
        let length = length.min(WIDTH.saturating_sub(before));
        let (fill, mark) = if bar.failed {
            ("░", " failing")
        } else {
            ("█", "")
        };
        let line = format!(
            "{}{}{}",
            " ".repeat(before),
            fill.repeat(length),
            " ".repeat(WIDTH.saturating_sub(before).saturating_sub(length))
        );
        let _ = writeln!(
            out,
            "  {:<width$} │{line}│ {:>8}{mark}",
            bar.label,
            duration_text(bar.length)
        );
    }
    if !later.is_empty() {
        out.push_str("\nLater:\n");
    }
    for bar in &later {
        let _ = writeln!(
            out,
            "  {:<width$}  after {:>8}, took {}{}",
            bar.label,
            duration_text(bar.start),
            duration_text(bar.length),
            if bar.failed { ", failing" } else { "" }
        );
    }
    out
}

pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// The answer as an SVG chart.
#[must_use]
pub fn svg(explanation: &Explanation, now: Timestamp) -> String {
    let (start, _) = split(bars(&explanation.journal, now));
    let whole = start
        .iter()
        .map(|b| b.start.saturating_add(b.length))
        .max()
        .unwrap_or(0)
        .max(1);
    let height = start.len().saturating_mul(22).saturating_add(60);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"900\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"10\" y=\"20\" font-weight=\"bold\">{}/{}</text>\n<text x=\"10\" y=\"40\">{}</text>\n",
        escape(&explanation.namespace),
        escape(&explanation.name),
        escape(&explanation.sentence)
    );
    for (row, bar) in start.iter().enumerate() {
        let y = row.saturating_mul(22).saturating_add(56);
        let baseline = y.saturating_add(13);
        let scale = |ms: i64| ms as f64 * 560.0 / whole as f64;
        let (x, width) = (220.0 + scale(bar.start), scale(bar.length).max(1.0));
        let colour = if bar.failed { "#c0392b" } else { "#2e7d6b" };
        let _ = writeln!(
            out,
            "<text x=\"10\" y=\"{}\">{}</text><rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"16\" fill=\"{colour}\"/><text x=\"890\" y=\"{}\" text-anchor=\"end\">{}</text>",
            baseline,
            escape(&bar.label),
            baseline,
            duration_text(bar.length)
        );
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::lifecycle::Input;

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_millisecond(1_800_000_000_000 + ms).expect("a time")
    }

    fn failed(error: &str) -> Progress {
        Progress::Failed(error.into())
    }

    /// The journal of a pod's start. `image` is the result of the pull, which ends after half a second.
    fn start(image: Progress) -> Journal {
        let mut journal = Journal::default();
        for (step, subject, from, to) in [
            (Step::Admission, "", 0, 0),
            (Step::Volume, "data", 5, 40),
            (Step::Sandbox, "", 0, 300),
        ] {
            journal.begin(step, subject, at(from));
            journal.end(step, subject, Progress::Done, at(to));
        }
        journal.begin(Step::Image, "web", at(10));
        journal.end(Step::Image, "web", image, at(500));
        journal
    }

    /// The journal of a pod whose container has started after 0.6 s.
    fn running() -> Journal {
        let mut journal = start(Progress::Done);
        journal.begin(Step::Start, "web", at(500));
        journal.end(Step::Start, "web", Progress::Done, at(600));
        journal
    }

    fn explained(journal: &Journal, fetching: Option<Fetching>) -> Explanation {
        explain("default", "web-1", "u", journal.clone(), fetching)
    }

    fn shown(journal: &Journal, ms: i64) -> String {
        text(&explained(journal, None), at(ms))
    }

    #[test]
    fn a_pod_that_waits_for_an_image_shows_the_progress() {
        let mut journal = start(Progress::Done);
        journal.begin(Step::Image, "log", at(600));
        let far = Fetching {
            parts: 2,
            bytes: 1 << 20,
            of_bytes: 5 << 19,
            pulls: 3,
        };
        let pulling = text(&explained(&journal, Some(far)), at(30_000));
        insta::assert_snapshot!("image_is_pulled", pulling);
        // A runtime that downloads nothing for this pod adds nothing to the text.
        assert_eq!(
            explained(&journal, Some(Fetching::default())),
            explained(&journal, None)
        );
        journal.end(Step::Image, "log", Progress::Done, at(30_000));
        assert_eq!(
            explained(&journal, Some(far)),
            explained(&journal, None),
            "the pull has finished"
        );
    }

    #[test]
    fn a_blocked_pod_shows_the_cause_since_when_and_the_next_retry() {
        let mut journal = start(failed("ErrImagePull: <no such host>"));
        journal.set_next_of_failed(at(40_000));
        insta::assert_snapshot!("image_pull_fails", shown(&journal, 30_010));
        let explanation = explained(&journal, None);
        insta::assert_snapshot!("image_pull_fails_as_svg", svg(&explanation, at(30_010)));
        let json = serde_json::to_string(&explanation).expect("json");
        assert_eq!(
            serde_json::from_str::<Explanation>(&json).expect("the same JSON"),
            explanation
        );
    }

    #[test]
    fn a_failing_volume_shows_its_error_and_the_number_of_tries() {
        let mut journal = Journal::default();
        for second in 0..3 {
            journal.begin(Step::Volume, "data", at(second * 1000));
            let error = failed("configmaps \"settings\" not found");
            journal.end(Step::Volume, "data", error, at(second * 1000 + 20));
        }
        journal.set_next_of_failed(at(9000));
        insta::assert_snapshot!("volume_fails", shown(&journal, 9500));
    }

    #[test]
    fn a_crash_loop_lists_late_restarts_below_the_start() {
        let mut journal = running();
        for minute in [2, 5] {
            let from = minute * 60_000;
            journal.begin(Step::Start, "web", at(from));
            journal.end(Step::Start, "web", Progress::Done, at(from + 80));
        }
        journal.begin(Step::BackOff, "web", at(301_000));
        let error = failed("exit code 1, 2 restarts");
        journal.end(Step::BackOff, "web", error, at(301_000));
        journal.set_next(Step::BackOff, "web", at(341_000));
        insta::assert_snapshot!("crash_loop", shown(&journal, 311_000));
    }

    #[test]
    fn a_running_pod_shows_how_long_each_step_of_its_start_took() {
        let mut journal = running();
        insta::assert_snapshot!("running", shown(&journal, 100_000));
        journal.waiting = Some("waiting for admission".into());
        let waiting = explained(&journal, None).sentence;
        assert_eq!(
            waiting,
            "Not yet running as specified: waiting for admission."
        );
    }

    #[test]
    fn a_terminating_pod_shows_the_cause_and_the_step() {
        let mut text = String::new();
        for cause in [
            Cause::Deleted,
            Cause::Removed,
            Cause::Completed,
            Cause::Rejected,
            Cause::Preempted,
            Cause::Evicted,
            Cause::DeadlineExceeded,
            Cause::NodeShutdown,
        ] {
            let (mut journal, mut state) = (running(), State::Syncing);
            let inputs = [
                Input::Terminate { cause, grace: 30 },
                Input::Stopped,
                Input::Released,
            ];
            for (input, step) in inputs
                .into_iter()
                .zip([Step::Stop, Step::Release, Step::Finalise])
            {
                let next = state.step(input);
                journal.record_decision(at(1000), state, input, next);
                state = next;
                let subject = if step == Step::Stop { "web" } else { "" };
                journal.begin(step, subject, at(1000));
                let _ = writeln!(text, "{}", explained(&journal, None).sentence);
                journal.end(step, subject, Progress::Done, at(1000));
            }
        }
        insta::assert_snapshot!("terminating", text);
    }

    #[test]
    fn each_step_has_a_sentence_for_its_run_and_its_failure() {
        let mut text = String::new();
        for step in [
            Step::Admission,
            Step::Observe,
            Step::Network,
            Step::Cgroup,
            Step::Mirror,
            Step::Directories,
            Step::Volume,
            Step::Objects,
            Step::Claims,
            Step::Sandbox,
            Step::Image,
            Step::Create,
            Step::Start,
            Step::PostStart,
            Step::BackOff,
            Step::Startup,
            Step::Readiness,
            Step::Liveness,
            Step::Resize,
            Step::PreStop,
            Step::Stop,
            Step::StopSandbox,
            Step::UnprepareClaims,
            Step::Release,
            Step::Finalise,
        ] {
            let mut journal = Journal::default();
            journal.begin(step, "SUBJECT", at(0));
            let running = sentence(&journal.steps[0]);
            journal.end(step, "SUBJECT", failed("ERROR"), at(0));
            let fails = sentence(&journal.steps[0]);
            let _ = writeln!(text, "{}\n  {running}\n  {fails}", step.label());
            if let Some(reason) = blocking_reason(&journal) {
                let _ = writeln!(text, "  status: {reason}");
            }
        }
        insta::assert_snapshot!("steps", text);
    }

    #[test]
    fn a_sandbox_that_cannot_be_stopped_names_hidden_namespaces() {
        let failing = |step: Step| {
            let mut journal = Journal::default();
            journal.begin(step, "", at(0));
            journal.end(step, "", failed("device or resource busy"), at(1));
            explained(&journal, None)
        };
        assert!(!failing(Step::Release).fails_to_stop_sandbox());
        let explanation = failing(Step::StopSandbox);
        assert!(explanation.fails_to_stop_sandbox());
        assert_eq!(explanation.clone().with_hidden_namespaces(&[]), explanation);
        let hidden = explanation.with_hidden_namespaces(&["/run/netns/cni-1".into()]);
        insta::assert_snapshot!("hidden_namespaces", hidden.sentence);
    }

    #[test]
    fn only_failures_before_containers_set_the_sandbox_condition() {
        assert_eq!(blocking_reason(&start(failed("ErrImagePull"))), None);
        let mut journal = Journal::default();
        journal.begin(Step::Sandbox, "", at(0));
        assert_eq!(
            blocking_reason(&journal),
            None,
            "a running step is no failure"
        );
        journal.end(Step::Sandbox, "", failed("cni says no"), at(1));
        assert!(blocking_reason(&journal).is_some());
    }

    #[test]
    fn retries_do_not_change_the_status_message() {
        let mut journal = Journal::default();
        let fail = |journal: &mut Journal, subject: &str, second: i64| {
            journal.begin(Step::Volume, subject, at(second * 1000));
            let error = format!("no answer for {second}s");
            journal.end(
                Step::Volume,
                subject,
                Progress::Failed(error),
                at(second * 1000),
            );
        };
        fail(&mut journal, "b", 0);
        fail(&mut journal, "a", 1);
        let first = blocking_reason(&journal);
        assert_eq!(
            first.as_deref(),
            Some("volume a cannot be set up; the pod's events have the error")
        );
        for second in 2..100 {
            let subject = if second % 2 == 0 { "a" } else { "b" };
            journal.begin(Step::Volume, subject, at(second * 1000));
            assert_eq!(blocking_reason(&journal), first, "during the retry");
            fail(&mut journal, subject, second);
            assert_eq!(blocking_reason(&journal), first);
        }
    }
}
