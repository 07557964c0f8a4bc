//! Graceful node shutdown (KEP-2000, KEP-2712, `pkg/kubelet/nodeshutdown`): order and grace periods of the pods that
//! terminate when the machine shuts down, and their status. Pure.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::pod;
use crate::pod::lifecycle::Cause;
use crate::pod::lifecycle::Verdict;
use crate::pod::priority::CRITICAL;
use crate::time;

/// Message of the Ready condition during a shutdown.
pub const NOT_READY: &str = "node is shutting down";
/// Status reason of a pod that arrives during a shutdown.
pub const REJECTED: &str = "NodeShutdown";
/// Status message that belongs to [`REJECTED`].
pub(crate) const REJECTED_MESSAGE: &str = "Pod was rejected as the node is shutting down.";
/// Status reason of a pod that the shutdown terminated.
pub const TERMINATED: &str = "Terminated";
/// Status message that belongs to [`TERMINATED`], also used for the condition `DisruptionTarget`.
const TERMINATED_MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";
/// File below the root directory with the start and end of the last shutdown, in the kubelet's format.
pub const STATE_FILE: &str = "graceful_node_shutdown_state";
/// Go's zero time, which stands for an unknown time.
const NO_TIME: &str = "0001-01-01T00:00:00Z";

/// Grace period for pods with at least this priority, up to the priority of the next period.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Period {
    /// The lowest priority.
    #[serde(default)]
    pub priority: i32,
    /// The grace period in seconds.
    #[serde(default)]
    pub shutdown_grace_period_seconds: i64,
}

/// Shutdown settings of the configuration.
#[derive(Debug, Clone, Default)]
pub struct ShutdownSettings {
    /// `shutdownGracePeriod`: total time for all pods.
    pub all: Duration,
    /// `shutdownGracePeriodCriticalPods`: the part of that time reserved for critical pods, which terminate last.
    pub critical: Duration,
    /// `shutdownGracePeriodByPodPriority`, which replaces both.
    pub by_priority: Vec<Period>,
}

/// An invalid setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    /// The configuration field.
    pub field: &'static str,
    /// The value of the field.
    pub value: String,
    /// How to correct it.
    pub remedy: &'static str,
}

/// The periods of a shutdown, lowest priority first. If there are none, a shutdown waits for no pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Periods(Vec<Period>);

/// Pods that terminate together.
#[derive(Debug, Clone, PartialEq)]
pub struct Phase {
    /// The lowest priority of the phase.
    pub priority: i32,
    /// Maximum duration; the next phase starts after it even if pods still run.
    pub period: Duration,
    /// The pods.
    pub pods: Vec<Arc<Pod>>,
}

impl Periods {
    /// Validates the configuration by the kubelet's rules.
    pub fn new(settings: &ShutdownSettings) -> Result<Periods, Invalid> {
        let ShutdownSettings { all, critical, .. } = *settings;
        let invalid = |field, value: String, remedy| Invalid {
            field,
            value,
            remedy,
        };
        for (field, period) in [
            ("shutdownGracePeriod", all),
            ("shutdownGracePeriodCriticalPods", critical),
        ] {
            if !period.is_zero() && period < Duration::from_secs(1) {
                let value = format!("{period:?}");
                return Err(invalid(field, value, "use 0s, or 1s or more"));
            }
        }
        if critical > all {
            return Err(invalid(
                "shutdownGracePeriodCriticalPods",
                format!("{critical:?}"),
                "it is a part of shutdownGracePeriod: use at most that period",
            ));
        }
        let mut periods = settings.by_priority.clone();
        if periods.is_empty() {
            return Ok(Periods(simple(all, critical)));
        }
        let field = "shutdownGracePeriodByPodPriority";
        if !all.is_zero() {
            let remedy = "use it without shutdownGracePeriod and shutdownGracePeriodCriticalPods, or only those";
            return Err(invalid(field, format!("{periods:?}"), remedy));
        }
        if let Some(wrong) = periods.iter().find(|p| p.shutdown_grace_period_seconds < 0) {
            let value = wrong.shutdown_grace_period_seconds.to_string();
            return Err(invalid(field, value, "use 0 seconds or more"));
        }
        periods.sort_by_key(|period| period.priority);
        Ok(Periods(periods))
    }

    /// Whether a shutdown waits for no pod.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Total duration of all periods.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.0.iter().map(|p| p.length()).sum()
    }

    /// Groups pods into phases, in order. A priority below all periods belongs to the first one. Phases without pods
    /// are omitted and take no time.
    #[must_use]
    pub fn phases(&self, pods: Vec<Arc<Pod>>) -> Vec<Phase> {
        let empty = |period: &Period| Phase {
            priority: period.priority,
            period: period.length(),
            pods: vec![],
        };
        let mut phases: Vec<Phase> = self.0.iter().map(empty).collect();
        for pod in pods {
            let priority = pod::spec(&pod).priority.unwrap_or(0);
            let above = self.0.partition_point(|p| p.priority <= priority);
            if let Some(phase) = phases.get_mut(above.saturating_sub(1)) {
                phase.pods.push(pod);
            }
        }
        phases.retain(|phase| !phase.pods.is_empty());
        phases
    }
}

impl Period {
    fn length(&self) -> Duration {
        time::span(self.shutdown_grace_period_seconds)
    }
}

/// Two periods in whole seconds: critical pods terminate after all others.
fn simple(all: Duration, critical: Duration) -> Vec<Period> {
    if all.is_zero() {
        return vec![];
    }
    let period = |priority, length: Duration| Period {
        priority,
        shutdown_grace_period_seconds: i64::try_from(length.as_secs()).unwrap_or(i64::MAX),
    };
    vec![
        period(0, all.saturating_sub(critical)),
        period(CRITICAL, critical),
    ]
}

impl Phase {
    /// Termination of a pod in this phase: the grace period is the pod's own, or the `remaining` time if that is
    /// shorter.
    #[must_use]
    pub fn verdict(&self, pod: &Pod, remaining: Duration) -> Verdict {
        // Rounds, so that the agent's own delay does not shorten the grace period.
        let remaining = i64::try_from(
            remaining
                .saturating_add(Duration::from_millis(500))
                .as_secs(),
        );
        Verdict {
            cause: Cause::NodeShutdown,
            reason: TERMINATED.into(),
            message: TERMINATED_MESSAGE.into(),
            disruption: Some(TERMINATED_MESSAGE.into()),
            grace: Some(pod::grace_seconds(pod).min(remaining.unwrap_or(i64::MAX))),
        }
    }
}

/// Start and end of a shutdown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Times {
    /// When the shutdown was announced.
    pub start: Option<Timestamp>,
    /// When all pods had terminated or timed out.
    pub end: Option<Timestamp>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Checkpoint {
    start_time: String,
    end_time: String,
}

impl Times {
    /// The content of [`STATE_FILE`].
    #[must_use]
    pub fn checkpoint(&self) -> String {
        let text = |time: Option<Timestamp>| time.map_or(NO_TIME.into(), |t| t.to_string());
        let checkpoint = Checkpoint {
            start_time: text(self.start),
            end_time: text(self.end),
        };
        // Two strings always serialise to JSON.
        serde_json::to_string(&checkpoint).unwrap_or_default()
    }

    /// Parses the content of [`STATE_FILE`].
    pub fn parse(text: &str) -> Result<Times, String> {
        let read: Checkpoint = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let time = |text: &str| -> Result<Option<Timestamp>, String> {
            let time: Timestamp = text.parse().map_err(|e| format!("{text:?}: {e}"))?;
            Ok(Some(time).filter(|t| *t > Timestamp::UNIX_EPOCH))
        };
        Ok(Times {
            start: time(&read.start_time)?,
            end: time(&read.end_time)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(name: &str, priority: Option<i32>, grace: i64) -> Arc<Pod> {
        let spec =
            json!({"priority": priority, "terminationGracePeriodSeconds": grace, "containers": []});
        let pod = json!({"metadata": {"name": name}, "spec": spec});
        Arc::new(serde_json::from_value(pod).expect("a pod"))
    }

    fn by_priority(periods: &[(i32, i64)]) -> ShutdownSettings {
        let period = |(priority, seconds): &(i32, i64)| Period {
            priority: *priority,
            shutdown_grace_period_seconds: *seconds,
        };
        ShutdownSettings {
            by_priority: periods.iter().map(period).collect(),
            ..ShutdownSettings::default()
        }
    }

    fn simple(all: &str, critical: &str) -> ShutdownSettings {
        let time = |text| crate::time::duration(text).expect("a duration");
        ShutdownSettings {
            all: time(all),
            critical: time(critical),
            by_priority: vec![],
        }
    }

    fn shown(phases: &[Phase]) -> Vec<(i32, u64, String)> {
        let of = |phase: &Phase| {
            let names = phase.pods.iter().filter_map(|p| p.metadata.name.clone());
            let names: Vec<String> = names.collect();
            (phase.priority, phase.period.as_secs(), names.join(" "))
        };
        phases.iter().map(of).collect()
    }

    fn of_all_priorities() -> Vec<Arc<Pod>> {
        vec![
            pod("critical", Some(CRITICAL), 30),
            pod("none", None, 30),
            pod("negative", Some(-7), 30),
            pod("high", Some(100_000), 30),
            pod("node-critical", Some(CRITICAL + 1000), 30),
            pod("middle", Some(99_999), 30),
        ]
    }

    #[test]
    fn a_shutdown_stops_pods_in_phases_by_priority() {
        type Expected<'a> = &'a [(i32, u64, &'a [&'a str])];
        let two: Expected<'_> = &[
            (0, 20, &["none", "negative", "high", "middle"]),
            (CRITICAL, 10, &["critical", "node-critical"]),
        ];
        let three: Expected<'_> = &[
            (0, 5, &["none", "negative"]),
            (10_000, 15, &["middle"]),
            (100_000, 60, &["critical", "high", "node-critical"]),
        ];
        let one: Expected<'_> = &[(
            500,
            5,
            &[
                "critical",
                "none",
                "negative",
                "high",
                "node-critical",
                "middle",
            ],
        )];
        let above: Expected<'_> = &[
            (50, 1, &["none", "negative"]),
            (CRITICAL, 7, &["critical", "node-critical"]),
        ];
        let above = &[above[0], (100, 2, &["high", "middle"]), above[1]];
        for (settings, expected, total) in [
            (simple("30s", "10s"), two, 30),
            // Fractions of a second are dropped.
            (simple("30.5s", "10.2s"), two, 30),
            (
                by_priority(&[(100_000, 60), (0, 5), (10_000, 15)]),
                three,
                80,
            ),
            (by_priority(&[(500, 5)]), one, 5),
            // A period without pods takes no time, but still counts towards the total.
            (
                by_priority(&[(50, 1), (100, 2), (1_000_000, 9), (CRITICAL, 7)]),
                above,
                19,
            ),
        ] {
            let periods = Periods::new(&settings).expect("periods");
            assert_eq!(periods.total().as_secs(), total, "{settings:?}");
            let shown = shown(&periods.phases(of_all_priorities()));
            let expected: Vec<_> = expected
                .iter()
                .map(|(priority, period, names)| (*priority, *period, names.join(" ")))
                .collect();
            assert_eq!(shown, expected, "{settings:?}");
        }
        let none = Periods::new(&simple("0s", "0s")).expect("periods");
        assert!(none.is_empty() && none.phases(of_all_priorities()).is_empty());
    }

    #[test]
    fn each_pod_gets_its_grace_period_or_the_rest_of_the_phase() {
        let phase = Phase {
            priority: 0,
            period: Duration::from_secs(10),
            pods: vec![],
        };
        for (own, remaining, expected) in [
            (30, 10_000, 10),
            (10, 10_000, 10),
            (3, 10_000, 3),
            (0, 10_000, 1),
            (30, 9_998, 10),
            (30, 9_100, 9),
            (30, 0, 0),
        ] {
            let verdict = phase.verdict(&pod("p", None, own), Duration::from_millis(remaining));
            assert_eq!(
                verdict.grace,
                Some(expected),
                "{own} s, {remaining} ms left"
            );
            assert_eq!(
                (verdict.reason.as_str(), verdict.cause),
                ("Terminated", Cause::NodeShutdown)
            );
            let message = "Pod was terminated in response to imminent node shutdown.";
            assert_eq!(verdict.message, message);
            assert_eq!(verdict.disruption.as_deref(), Some(message));
        }
    }

    #[test]
    fn invalid_grace_periods_are_rejected_by_field() {
        let both = ShutdownSettings {
            all: Duration::from_secs(5),
            ..by_priority(&[(0, 5)])
        };
        for (settings, field) in [
            (simple("500ms", "0s"), "shutdownGracePeriod"),
            (simple("5s", "10ms"), "shutdownGracePeriodCriticalPods"),
            (simple("5s", "6s"), "shutdownGracePeriodCriticalPods"),
            (simple("0s", "6s"), "shutdownGracePeriodCriticalPods"),
            (both, "shutdownGracePeriodByPodPriority"),
            (
                by_priority(&[(0, 5), (1, -1)]),
                "shutdownGracePeriodByPodPriority",
            ),
        ] {
            let refused = Periods::new(&settings).expect_err(field);
            assert_eq!(refused.field, field, "{refused:?}");
        }
    }

    #[test]
    fn the_shutdown_state_file_has_the_kubelets_format() {
        let at = |text: &str| Some(text.parse().expect("a time"));
        let under_way = Times {
            start: at("2026-11-23T00:00:01.5Z"),
            end: None,
        };
        let text = r#"{"startTime":"2026-11-23T00:00:01.5Z","endTime":"0001-01-01T00:00:00Z"}"#;
        assert_eq!(under_way.checkpoint(), text);
        assert_eq!(Times::parse(text), Ok(under_way));
        // As Go writes it in a time zone east of Greenwich.
        let go = r#"{"startTime":"2026-11-23T01:00:01.5+01:00","endTime":"2026-11-23T01:00:09.123456789+01:00"}"#;
        let ended = Times {
            end: at("2026-11-23T00:00:09.123456789Z"),
            ..under_way
        };
        assert_eq!(Times::parse(go), Ok(ended));
        assert_eq!(Times::parse(&ended.checkpoint()), Ok(ended));
        assert!(Times::parse("{}").is_err() && Times::parse("").is_err());
    }
}
