//! Columns that tables of several kinds share, and kubectl's format of times (`pkg/printers/internalversion/printers.go`,
//! `staging/src/k8s.io/apimachinery/pkg/util/duration`).

use serde_json::Value;

use super::object::{at, list};

pub(super) type Column = (&'static str, &'static str, u8);

pub(super) const NAME: Column = ("Name", "string", 0);

pub(super) const AGE: Column = ("Age", "string", 0);

pub(super) fn workload(object: &Value) -> (Value, Value, Value) {
    let containers = list(object, &["spec", "template", "spec", "containers"]);
    let join = |key: &str| {
        containers
            .iter()
            .filter_map(|c| c[key].as_str())
            .collect::<Vec<_>>()
            .join(",")
    };
    (
        join("name").into(),
        join("image").into(),
        pairs(at(object, &["spec", "selector", "matchLabels"])).into(),
    )
}

/// Labels as `key=value`, or `<none>`.
pub(super) fn pairs(map: Option<&Value>) -> String {
    let pairs: Vec<String> = map
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .map(|(k, v)| format!("{k}={}", v.as_str().unwrap_or_default()))
        .collect();
    if pairs.is_empty() {
        "<none>".into()
    } else {
        pairs.join(",")
    }
}

/// The age of an RFC 3339 time in kubectl's format.
#[must_use]
pub(crate) fn age_of(time: Option<&str>, now: jiff::Timestamp) -> String {
    let Some(then) = time.and_then(|t| t.parse::<jiff::Timestamp>().ok()) else {
        return "<unknown>".into();
    };
    duration(now.as_second() - then.as_second())
}

/// A duration in seconds in kubectl's format.
#[must_use]
pub fn duration(s: i64) -> String {
    let (m, h, d) = (s / 60, s / 3600, s / 86_400);
    let two = |a: i64, unit_a: &str, b: i64, unit_b: &str| {
        if b == 0 {
            format!("{a}{unit_a}")
        } else {
            format!("{a}{unit_a}{b}{unit_b}")
        }
    };
    match s {
        ..=-2 => "<invalid>".into(),
        -1 => "0s".into(),
        0..120 => format!("{s}s"),
        120..600 => two(m, "m", s % 60, "s"),
        600..10_800 => format!("{m}m"),
        10_800..28_800 => two(h, "h", m % 60, "m"),
        28_800..172_800 => format!("{h}h"),
        172_800..691_200 => two(d, "d", h % 24, "h"),
        691_200..63_072_000 => format!("{d}d"),
        63_072_000..252_288_000 => two(d / 365, "y", d % 365, "d"),
        _ => format!("{}y", d / 365),
    }
}
