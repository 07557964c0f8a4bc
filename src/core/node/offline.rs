//! What an agent does with the pods of its node if no apiserver is reachable when the agent starts.
//!
//! While this node was offline, a pod of a StatefulSet may have been force-deleted and recreated on another node, and
//! only the apiserver knows. So by default such pods wait for the apiserver, as with the kubelet.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::time::{duration, shown};

/// `--offline-start`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OfflineStart {
    /// Starts static pods. Nothing is kept on disk, not even the API objects that static pods need.
    Never,
    /// Starts static pods with the last known API objects that they need (services for their environment, runtime
    /// classes). Nothing of other pods is kept.
    #[default]
    StaticOnly,
    /// Starts all pods of this node if no apiserver has answered for this long since the agent started.
    After(Duration),
}

/// Minimum time that a start waits for an apiserver, also for [`OfflineStart::After`].
pub const GRACE: Duration = Duration::from_secs(3);

impl OfflineStart {
    /// Whether any API objects are kept on disk.
    #[must_use]
    pub fn keeps_any(self) -> bool {
        self != OfflineStart::Never
    }

    /// How long after the start of the agent the known pods are started; `None` if they wait for the apiserver.
    #[must_use]
    pub fn pods_after(self) -> Option<Duration> {
        match self {
            OfflineStart::Never | OfflineStart::StaticOnly => None,
            OfflineStart::After(wait) => Some(wait.max(GRACE)),
        }
    }
}

impl FromStr for OfflineStart {
    type Err = &'static str;

    /// The error is the remedy.
    fn from_str(text: &str) -> Result<OfflineStart, &'static str> {
        match text {
            "never" => Ok(OfflineStart::Never),
            "static-only" => Ok(OfflineStart::StaticOnly),
            "always" => Ok(OfflineStart::After(Duration::ZERO)),
            _ => text
                .strip_prefix("after=")
                .and_then(duration)
                .map(OfflineStart::After)
                .ok_or("use never, static-only, always, or a duration such as after=5m"),
        }
    }
}

impl fmt::Display for OfflineStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OfflineStart::Never => f.write_str("never"),
            OfflineStart::StaticOnly => f.write_str("static-only"),
            OfflineStart::After(wait) if wait.is_zero() => f.write_str("always"),
            OfflineStart::After(wait) => write!(f, "after={}", shown(*wait)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offline_start_values_round_trip_and_invalid_ones_get_a_remedy() {
        let of = |text: &str| text.parse::<OfflineStart>();
        for (text, keeps, pods_after) in [
            ("never", false, None),
            ("static-only", true, None),
            ("always", true, Some(3)),
            ("after=1s", true, Some(3)),
            ("after=5m", true, Some(300)),
            ("after=1h30m", true, Some(5400)),
        ] {
            let parsed = of(text).expect(text);
            assert_eq!(parsed.keeps_any(), keeps, "{text}");
            assert_eq!(parsed.pods_after().map(|d| d.as_secs()), pods_after);
            assert_eq!(of(&parsed.to_string()), Ok(parsed), "{text}");
        }
        for text in ["", "after", "after=", "after 5m", "after=5", "static", "5m"] {
            assert!(
                of(text).is_err_and(|remedy| remedy.contains("after=5m")),
                "{text}"
            );
        }
        assert_eq!(OfflineStart::default().pods_after(), None);
    }
}
