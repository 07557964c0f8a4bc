//! Back-off before a job replaces a failed pod (`pkg/controller/job/backoff_utils.go`).

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

use holdfast_core::backoff::Doubling;

/// Initial and maximum back-off.
const PAUSES: Doubling = Doubling::new(Duration::from_secs(10), Duration::from_secs(600));

/// The pod failures of a job since its last success.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Backoff {
    failures: u32,
    last: Option<Timestamp>,
}

impl Backoff {
    /// Adds pods that have terminated. Failures before the latest success are dropped.
    pub(super) fn with(self, succeeded: &[&Pod], failed: &[&Pod]) -> Backoff {
        let success = succeeded.iter().map(|p| finished(p)).max();
        let before = if success.is_some() {
            Backoff::default()
        } else {
            self
        };
        let later = failed.iter().map(|p| finished(p));
        let later: Vec<Timestamp> = later.filter(|t| success.is_none_or(|s| *t > s)).collect();
        Backoff {
            failures: before
                .failures
                .saturating_add(u32::try_from(later.len()).unwrap_or(u32::MAX)),
            last: later.into_iter().max().or(before.last),
        }
    }

    /// The time until pods may be created again.
    pub(super) fn remaining(self, now: Timestamp) -> Duration {
        self.last
            .map_or(Duration::ZERO, |last| remaining(self.failures, last, now))
    }
}

/// The remaining back-off after a number of failures, the last of which was at `last`.
pub(super) fn remaining(failures: u32, last: Timestamp, now: Timestamp) -> Duration {
    if failures == 0 {
        return Duration::ZERO;
    }
    let pause = SignedDuration::try_from(PAUSES.after(failures)).unwrap_or(SignedDuration::MAX);
    Duration::try_from(pause.saturating_sub(now.duration_since(last))).unwrap_or(Duration::ZERO)
}

/// When a pod terminated: when its last container exited, else when it became not ready, else
/// when it was deleted, else when it was created.
pub(super) fn finished(pod: &Pod) -> Timestamp {
    let meta = &pod.metadata;
    let deleted = || {
        let grace = meta.deletion_grace_period_seconds.unwrap_or(0);
        let at = meta.deletion_timestamp.as_ref()?.0;
        at.checked_sub(SignedDuration::from_secs(grace)).ok()
    };
    let created = meta.creation_timestamp.as_ref().map(|t| t.0);
    of_containers(pod)
        .or_else(|| not_ready(pod))
        .or_else(deleted)
        .or(created)
        .unwrap_or(Timestamp::UNIX_EPOCH)
}

fn of_containers(pod: &Pod) -> Option<Timestamp> {
    let status = pod.status.as_ref()?;
    let sidecars: Vec<&str> = pod
        .spec
        .iter()
        .flat_map(|s| s.init_containers.iter().flatten())
        .filter(|c| c.restart_policy.as_deref() == Some("Always"))
        .map(|c| c.name.as_str())
        .collect();
    let first = status.init_container_statuses.iter().flatten();
    let first = first.filter(|s| sidecars.contains(&s.name.as_str()));
    let containers = status.container_statuses.iter().flatten().chain(first);
    let ended = |s: &ContainerStatus| {
        let ended = s.state.as_ref()?.terminated.as_ref()?;
        Some(ended.finished_at.as_ref()?.0)
    };
    let ends: Option<Vec<Timestamp>> = containers.map(ended).collect();
    ends?.into_iter().max()
}

fn not_ready(pod: &Pod) -> Option<Timestamp> {
    let mut conditions = pod.status.as_ref()?.conditions.iter().flatten();
    let ready = conditions.find(|c| c.type_ == "Ready" && c.status == "False")?;
    Some(ready.last_transition_time.as_ref()?.0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn ended(second: i64) -> Pod {
        let at = Timestamp::from_second(second).expect("a time").to_string();
        serde_json::from_value(json!({"metadata": {}, "status": {"containerStatuses": [{"name": "c", "image": "", "imageID": "",
            "ready": false, "restartCount": 0, "state": {"terminated": {"exitCode": 1, "finishedAt": at}}}]}}))
        .expect("a pod")
    }

    #[test]
    fn the_back_off_doubles_until_a_pod_succeeds() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        let (one, two, three) = (ended(100), ended(130), ended(160));
        let first = Backoff::default().with(&[], &[&one]);
        assert_eq!(first.remaining(at(103)), Duration::from_secs(7));
        assert_eq!(first.remaining(at(111)), Duration::ZERO);
        let second = first.with(&[], &[&two]);
        assert_eq!(second.remaining(at(130)), Duration::from_secs(20));
        assert_eq!(second.with(&[], &[]), second);
        let both = Backoff::default().with(&[], &[&two, &one]);
        assert_eq!(
            both, second,
            "failures observed together count like successive ones"
        );
        let after = second.with(&[&two], &[&one, &three]);
        assert_eq!(after.remaining(at(160)), Duration::from_secs(10));
        let fine = second.with(&[&three], &[]);
        assert_eq!(fine.remaining(at(160)), Duration::ZERO);
        let many = (0..20).fold(Backoff::default(), |b, _| b.with(&[], &[&one]));
        assert_eq!(many.remaining(at(100)), Duration::from_secs(600));
    }

    #[test]
    fn a_pod_without_terminated_containers_finished_when_it_became_unready() {
        let pod = |status| {
            let meta = json!({"creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": "2026-01-01T00:01:30Z",
                "deletionGracePeriodSeconds": 30});
            let pod = json!({"metadata": meta, "status": status});
            finished(&serde_json::from_value(pod).expect("a pod")).to_string()
        };
        let ready = json!({"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:40Z"}]});
        assert_eq!(pod(ready), "2026-01-01T00:00:40Z");
        assert_eq!(pod(json!({})), "2026-01-01T00:01:00Z");
    }
}
