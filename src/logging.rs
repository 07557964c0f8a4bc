//! The process's log: its format, and its verbosity, which may change at run time. Also its traces, over OpenTelemetry:
//! spans whose target begins with `trace` are traced and not logged.

mod repetitions;

use std::sync::OnceLock;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
use repetitions::Limited;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::{JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, reload};

/// Timeout of the trace collector.
const COLLECTOR_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the log level for a kubelet's verbosity (`--v`).
#[must_use]
pub fn level(verbosity: u8) -> &'static str {
    match verbosity {
        0..=2 => "info",
        3..=4 => "debug",
        _ => "trace",
    }
}

fn filter(level: &str) -> EnvFilter {
    // This program reports an unavailable server once; the client library would report it at every attempt.
    EnvFilter::new(format!(
        "warn,kube_client=off,kube_runtime=off,holdfast={level}"
    ))
}

/// The destination of traces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traces {
    /// A collector for OTLP over gRPC, `host:port`.
    pub endpoint: String,
    /// Number of traces of a million that are sampled.
    pub per_million: u32,
    /// The node's name.
    pub node: String,
}

static PROVIDER: OnceLock<SdkTracerProvider> = OnceLock::new();

/// Creates the exporter of traces. Nothing is sent yet, and a collector that does not answer blocks no caller.
fn provider(traces: &Traces) -> Result<SdkTracerProvider, String> {
    let endpoint = if traces.endpoint.contains("://") {
        traces.endpoint.clone()
    } else {
        format!("http://{}", traces.endpoint)
    };
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .with_timeout(COLLECTOR_TIMEOUT)
        .build();
    let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(
        f64::from(traces.per_million) / 1e6,
    )));
    let resource = Resource::builder()
        .with_service_name("kubelet")
        .with_attribute(KeyValue::new("host.name", traces.node.clone()))
        .build();
    let exporter =
        exporter.map_err(|e| format!("traces cannot be sent to {}: {e}", traces.endpoint))?;
    Ok(SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_sampler(sampler)
        .with_resource(resource)
        .build())
}

/// Starts logging to standard error at the level `initial`, or as `HOLDFAST_LOG` specifies, as text or JSON. With `traces` also
/// starts exporting traces; this needs a tokio runtime.
pub fn start(initial: &str, json: bool, traces: Option<&Traces>) -> Result<(), String> {
    let (limit, handle) = reload::Layer::new(
        EnvFilter::try_from_env("HOLDFAST_LOG").unwrap_or_else(|_| filter(initial)),
    );
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .with_writer(std::io::stderr);
    let lines = if json {
        lines
            .fmt_fields(JsonFields::new())
            .event_format(Limited::new(Json, repetitions::count_in_json))
            .boxed()
    } else {
        let format = tracing_subscriber::fmt::format().with_ansi(false);
        lines
            .event_format(Limited::new(format, repetitions::count_in_text))
            .boxed()
    };
    let traced = match traces {
        None => None,
        Some(traces) => {
            let provider = provider(traces)?;
            // Kept so that the remaining traces can be sent at exit.
            let _ = PROVIDER.set(provider.clone());
            let layer = tracing_opentelemetry::layer()
                .with_tracer(provider.tracer("holdfast"))
                .with_location(false)
                .with_threads(false);
            Some(layer.with_filter(Targets::new().with_target("trace", Level::INFO)))
        }
    };
    tracing_subscriber::registry()
        .with(lines.with_filter(limit))
        .with(traced)
        .init();
    holdfast_sys::verbosity::provide(move |verbosity| {
        let changed = handle.reload(filter(level(verbosity)));
        changed.map_err(|e| e.to_string())
    });
    Ok(())
}

/// Sends the remaining traces.
pub fn finish() {
    if let Some(Err(error)) = PROVIDER.get().map(SdkTracerProvider::shutdown) {
        tracing::debug!(%error, "sending the last traces failed");
    }
}

/// Formats lines as the kubelet's JSON format does: `ts` in milliseconds, `msg`, `v` or `level`, and the fields of the
/// event and of its spans.
struct Json;

/// The fields of an event.
struct Fields<'a>(&'a mut Map<String, Value>);

impl Visit for Fields<'_> {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let name = match field.name() {
            "message" => "msg",
            "error" => "err",
            name => name,
        };
        self.0.insert(name.into(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

/// Formats one line; `around` are the fields of the event's spans.
fn line(
    at: jiff::Timestamp,
    level: Level,
    target: &str,
    around: Vec<Map<String, Value>>,
    own: impl FnOnce(&mut Fields<'_>),
) -> Value {
    let mut line = Map::new();
    line.insert("ts".into(), (at.as_microsecond() as f64 / 1000.0).into());
    line.insert("caller".into(), target.into());
    match level {
        Level::ERROR => line.insert("level".into(), "error".into()),
        Level::WARN => line.insert("level".into(), "warning".into()),
        Level::INFO => line.insert("v".into(), 0.into()),
        Level::DEBUG => line.insert("v".into(), 4.into()),
        Level::TRACE => line.insert("v".into(), 6.into()),
    };
    line.extend(around.into_iter().flatten());
    own(&mut Fields(&mut line));
    Value::Object(line)
}

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let spans = context
            .event_scope()
            .into_iter()
            .flat_map(tracing_subscriber::registry::Scope::from_root);
        let around = spans
            .filter_map(|span| {
                serde_json::from_str(span.extensions().get::<FormattedFields<N>>()?.as_str()).ok()
            })
            .collect();
        let metadata = event.metadata();
        let line = line(
            jiff::Timestamp::now(),
            *metadata.level(),
            metadata.target(),
            around,
            |fields| event.record(fields),
        );
        writeln!(writer, "{line}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    /// Where a test's log goes.
    #[derive(Clone, Default)]
    pub(super) struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Kept {
        pub(super) fn lines(&self) -> Vec<String> {
            let text = String::from_utf8(self.0.lock().expect("kept").clone()).expect("text");
            text.lines().map(str::to_owned).collect()
        }
    }

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("kept").write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn json_lines_contain_the_fields_of_the_event_and_of_its_spans() {
        let kept = Kept::default();
        let writer = kept.clone();
        let layer = tracing_subscriber::fmt::layer()
            .fmt_fields(JsonFields::new())
            .event_format(Json)
            .with_writer(move || writer.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let pod = tracing::info_span!("pod", pod = "n/p");
            let _in_pod = pod.enter();
            tracing::info_span!("container", container = "c")
                .in_scope(|| tracing::warn!(error = "it \"broke\"", tries = 3, "a line"));
            tracing::info!("another");
        });
        let lines: Vec<Value> = kept
            .lines()
            .iter()
            .map(|l| serde_json::from_str(l).expect("JSON"))
            .collect();
        let first = &lines[0];
        assert_eq!(
            (&first["msg"], &first["err"], &first["tries"]),
            (&"a line".into(), &"it \"broke\"".into(), &3.into())
        );
        assert_eq!(
            (&first["pod"], &first["container"], &first["level"]),
            (&"n/p".into(), &"c".into(), &"warning".into())
        );
        assert!(first["ts"].as_f64() > Some(1.6e12));
        assert_eq!(
            (&lines[1]["pod"], &lines[1]["container"], &lines[1]["v"]),
            (&"n/p".into(), &Value::Null, &0.into())
        );
    }

    #[test]
    fn verbosities_map_to_log_levels() {
        assert_eq!(
            [0, 2, 3, 4, 5, 10].map(level),
            ["info", "info", "debug", "debug", "trace", "trace"]
        );
    }
}
