//! Times and durations in the formats of the API and of configuration files. Pure.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp, TimestampArithmetic};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// A time in the precision of the API: whole seconds.
#[must_use]
pub fn seconds(time: Timestamp) -> Time {
    Time(Timestamp::from_second(time.as_second()).unwrap_or(time))
}

/// Maximum number of seconds accepted from pods, probes and requests, about 68 years. The apiserver has no upper limit
/// for grace periods. In nanoseconds, the maximum fits Go's `time.Duration`, which runtimes use.
pub const MAX_SECONDS: i64 = i32::MAX as i64;

/// Limits an untrusted number of seconds to the range from 0 to [`MAX_SECONDS`].
#[must_use]
pub fn bounded(seconds: i64) -> i64 {
    seconds.clamp(0, MAX_SECONDS)
}

/// An untrusted number of seconds as a duration between 0 and [`MAX_SECONDS`].
#[must_use]
pub fn span(seconds: i64) -> Duration {
    Duration::from_secs(bounded(seconds).unsigned_abs())
}

/// The time `by` after `at`, limited to the calendar (years -9999 to 9999), because the operators of jiff panic there.
#[must_use]
pub fn later(at: Timestamp, by: impl Into<TimestampArithmetic>) -> Timestamp {
    // Only spans with days or months are errors.
    at.saturating_add(by).unwrap_or(at)
}

/// The time an untrusted number of seconds after `at`: at least `at`, and at most [`MAX_SECONDS`] later.
#[must_use]
pub(crate) fn in_seconds(at: Timestamp, seconds: i64) -> Timestamp {
    later(at, SignedDuration::from_secs(bounded(seconds)))
}

/// Go's maximum duration, about 292 years. Go rejects longer ones too.
const MAX_DURATION: Duration = Duration::from_nanos(i64::MAX.unsigned_abs());

/// Parses a Go duration such as `1m30s` or `100ms`.
#[must_use]
pub fn duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut total = 0.0;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let unit = rest
            .find(|c: char| c.is_ascii_digit() || c == '.')
            .unwrap_or(rest.len());
        total += number
            * match &rest[..unit] {
                "h" => 3600.0,
                "m" => 60.0,
                "s" => 1.0,
                "ms" => 1e-3,
                "us" | "µs" => 1e-6,
                "ns" => 1e-9,
                _ => return None,
            };
        rest = &rest[unit..];
    }
    (!text.is_empty())
        .then(|| Duration::try_from_secs_f64(total).ok())
        .flatten()
        .filter(|duration| *duration <= MAX_DURATION)
}

/// Formats a duration in whole seconds as Go does: `10s`, `2m40s`, `1h0m0s`.
#[must_use]
pub fn shown(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s}s"),
        (0, m, s) => format!("{m}m{s}s"),
        (h, m, s) => format!("{h}h{m}m{s}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_durations_are_parsed() {
        for (text, millis) in [
            ("0", Some(0)),
            ("1m30s", Some(90_000)),
            ("100ms", Some(100)),
            ("1.5h", Some(5_400_000)),
            ("2562047h", Some(9_223_369_200_000)),
            ("2562048h", None),
            ("99999999999999999999999999h", None),
            ("", None),
            ("5", None),
            ("x", None),
        ] {
            assert_eq!(duration(text).map(|d| d.as_millis()), millis, "{text}");
        }
    }

    #[test]
    fn every_number_of_seconds_yields_a_valid_time() {
        let now: Timestamp = "2026-11-20T00:00:00Z".parse().expect("a time");
        for (seconds, expected) in [
            (i64::MIN, 0),
            (-1, 0),
            (0, 0),
            (30, 30),
            (250_000_000_000, MAX_SECONDS),
            (1_000_000_000_000, MAX_SECONDS),
            (i64::MAX, MAX_SECONDS),
        ] {
            let at = in_seconds(now, seconds);
            assert_eq!(at.duration_since(now).as_secs(), expected, "{seconds}");
            assert_eq!(span(seconds).as_secs(), expected.unsigned_abs());
            assert!(in_seconds(Timestamp::MAX, seconds) <= Timestamp::MAX);
        }
        assert_eq!(later(now, SignedDuration::MAX), Timestamp::MAX);
        assert_eq!(later(now, SignedDuration::MIN), Timestamp::MIN);
    }

    #[test]
    fn durations_are_printed_as_by_go() {
        for (seconds, text) in [(0, "0s"), (10, "10s"), (160, "2m40s"), (3600, "1h0m0s")] {
            assert_eq!(shown(Duration::from_secs(seconds)), text);
        }
    }
}
