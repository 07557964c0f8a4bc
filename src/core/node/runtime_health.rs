//! Whether the container runtime is healthy (`pkg/kubelet/runtime.go`). A single failed call is tolerated; a runtime
//! that has not answered for 30 seconds is down. Pure.

use std::time::Duration;

/// Time without a successful call after which the runtime counts as down.
pub(crate) const DOWN_AFTER: Duration = Duration::from_secs(30);

/// Time without a list of pods after which the node is not ready (the kubelet's PLEG threshold).
const LISTED_WITHIN: Duration = Duration::from_secs(180);

/// The runtime's status; each field says why the condition is not met, `None` if it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeConditions {
    /// `RuntimeReady`.
    pub runtime: Option<String>,
    /// `NetworkReady`.
    pub network: Option<String>,
}

/// History of the runtime's status. Times are durations since an arbitrary fixed moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeHealth {
    /// The last status and when it was received.
    last: Option<(Duration, RuntimeConditions)>,
    /// Why the last call failed; `None` if it succeeded.
    failure: Option<String>,
    /// Time since the last list of pods.
    since_last_list: Duration,
}

impl RuntimeHealth {
    /// Records a successful status call.
    pub fn record_status(&mut self, at: Duration, conditions: RuntimeConditions) {
        self.last = Some((at, conditions));
        self.failure = None;
    }

    /// Records a failed status call.
    pub fn record_failure(&mut self, why: String) {
        self.failure = Some(why);
    }

    /// Records how long ago the pods were last listed.
    pub fn record_list(&mut self, ago: Duration) {
        self.since_last_list = ago;
    }

    /// Why changes of pods may go unnoticed; `None` if they do not. The text is constant, because every change of it
    /// updates the Node.
    fn unobserved_reason(&self) -> Option<String> {
        (self.since_last_list > LISTED_WITHIN).then(|| {
            format!(
                "PLEG is not healthy: the runtime's pods were not listed for {}s",
                LISTED_WITHIN.as_secs()
            )
        })
    }

    /// Whether everything is healthy, so that the next check can wait.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.failure.is_none()
            && matches!(&self.last, Some((_, conditions)) if *conditions == RuntimeConditions::default())
    }

    /// Why the runtime is down; `None` if it is not.
    #[must_use]
    pub fn down(&self, at: Duration) -> Option<String> {
        let (last_success, _) = self.last.as_ref()?;
        let failure = self.failure.as_ref()?;
        (at.saturating_sub(*last_success) >= DOWN_AFTER)
            .then(|| format!("container runtime is down: {failure}"))
    }

    /// Why the node is not ready because of the runtime, in the kubelet's words; empty if the runtime is healthy.
    #[must_use]
    pub fn problems(&self, at: Duration) -> Vec<String> {
        let Some((_, conditions)) = &self.last else {
            let text = "container runtime status check may not have completed yet";
            return vec![match &self.failure {
                None => text.to_owned(),
                Some(why) => format!("{text}: {why}"),
            }];
        };
        let runtime = conditions.runtime.as_ref();
        let network = conditions.network.as_ref();
        self.down(at)
            .into_iter()
            .chain(self.unobserved_reason())
            .chain(runtime.map(|why| format!("container runtime not ready: {why}")))
            .chain(network.map(|why| format!("container runtime network not ready: {why}")))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::conditions::joined;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn problem(health: &RuntimeHealth, seconds: u64) -> Option<String> {
        joined(&health.problems(at(seconds)))
    }

    #[test]
    fn a_runtime_is_down_half_a_minute_after_its_last_answer() {
        let mut health = RuntimeHealth::default();
        assert!(problem(&health, 0).is_some_and(|p| p.contains("may not have completed yet")));
        health.record_failure("refused".into());
        assert!(problem(&health, 60).is_some_and(|p| p.ends_with("yet: refused")));
        health.record_status(at(60), RuntimeConditions::default());
        assert_eq!(problem(&health, 61), None);
        assert!(health.is_healthy());
        health.record_failure("refused".into());
        assert!(!health.is_healthy());
        for (seconds, expected) in [
            (61, None),
            (89, None),
            (90, Some("container runtime is down: refused")),
        ] {
            assert_eq!(problem(&health, seconds).as_deref(), expected, "{seconds}");
        }
        health.record_status(at(91), RuntimeConditions::default());
        assert_eq!(problem(&health, 91), None);
    }

    #[test]
    fn a_runtime_whose_pod_list_fails_makes_the_node_not_ready() {
        let mut health = RuntimeHealth::default();
        health.record_status(at(1), RuntimeConditions::default());
        for (ago, is_ready) in [(30, true), (180, true), (181, false), (0, true)] {
            health.record_list(at(ago));
            let problem = problem(&health, 1);
            assert_eq!(problem.is_none(), is_ready, "{ago}");
            let expected = "PLEG is not healthy: the runtime's pods were not listed for 180s";
            assert!(problem.is_none_or(|p| p == expected));
        }
    }

    #[test]
    fn a_not_ready_response_applies_immediately() {
        let mut health = RuntimeHealth::default();
        let conditions = RuntimeConditions {
            runtime: None,
            network: Some("no CNI config".into()),
        };
        health.record_status(at(1), conditions);
        let network = "container runtime network not ready: no CNI config";
        assert_eq!(problem(&health, 1).as_deref(), Some(network));
        health.record_failure("refused".into());
        assert_eq!(
            problem(&health, 31),
            Some(format!("[container runtime is down: refused, {network}]"))
        );
    }
}
