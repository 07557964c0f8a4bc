//! Times and durations as the API and its configuration files write them. Pure.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// A time as the API keeps it: whole seconds.
#[must_use]
pub fn seconds(time: Timestamp) -> Time {
    Time(Timestamp::from_second(time.as_second()).unwrap_or(time))
}

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
}

/// A duration in whole seconds as Go writes it: `10s`, `2m40s`, `1h0m0s`.
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
    fn durations_are_read_as_go_writes_them() {
        for (text, millis) in [
            ("0", Some(0)),
            ("1m30s", Some(90_000)),
            ("100ms", Some(100)),
            ("1.5h", Some(5_400_000)),
            ("", None),
            ("5", None),
            ("x", None),
        ] {
            assert_eq!(duration(text).map(|d| d.as_millis()), millis, "{text}");
        }
    }

    #[test]
    fn durations_are_shown_as_go_shows_them() {
        for (seconds, text) in [(0, "0s"), (10, "10s"), (160, "2m40s"), (3600, "1h0m0s")] {
            assert_eq!(shown(Duration::from_secs(seconds)), text);
        }
    }
}
