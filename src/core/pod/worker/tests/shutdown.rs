//! The effect of a node shutdown on a pod, and of the boot after it.

use std::time::Duration;

use super::*;
use crate::node::ledger::Eviction;
use crate::node::shutdown::Phase;

/// The verdict that workers receive when the node is shut down.
pub(super) fn verdict(seconds: u64) -> Verdict {
    let phase = Phase {
        priority: 0,
        period: Duration::from_secs(seconds),
        pods: vec![],
    };
    phase.verdict(&Pod::default(), phase.period)
}

#[test]
fn a_shutdown_stops_pods_and_shortens_running_grace_periods() {
    let spec = || json!({"terminationGracePeriodSeconds": 600, "restartPolicy": "Always", "containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec(), json!({})));
    run.settle();
    let turn = run.input(Input::Terminate(verdict(10)));
    assert_eq!(turn.wake_at, Some(at(10_000)));
    run.settle();
    let status = run.worker.status();
    assert_eq!(
        (status.phase.as_deref(), status.reason.as_deref()),
        (Some("Failed"), Some("Terminated"))
    );
    let condition = |s: &PodStatus| {
        s.conditions
            .iter()
            .flatten()
            .any(|c| c.type_ == "DisruptionTarget")
    };
    assert!(condition(status));
    assert!(matches!(
        run.worker.state,
        State::Finished {
            cause: Cause::NodeShutdown
        }
    ));
    let stopped = run.count(&Key::Stop("c0".into()));
    // After the boot the pod stays terminated, and keeps its logs.
    let mut after = run.restarted();
    after.settle();
    assert_eq!((after.phase(), stopped), ("Failed", 1));
    assert_eq!(after.count(&start("c")), 0);

    let mut run = Run::new(a_pod(spec(), json!({})));
    run.settle();
    let deleted = json!({"deletionTimestamp": "2023-11-14T22:13:20Z", "deletionGracePeriodSeconds": 600, "resourceVersion": "2"});
    let turn = run.input(Input::Update(a_pod(spec(), deleted)));
    assert_eq!(turn.wake_at, Some(at(600_000)));
    run.now = 1000;
    let turn = run.input(Input::Terminate(verdict(10)));
    assert_eq!(
        turn.wake_at,
        Some(at(11_000)),
        "the grace period is shorter now"
    );
    assert!(matches!(
        run.worker.state,
        State::Terminating {
            cause: Cause::Deleted,
            ..
        }
    ));
}

/// As with the kubelet, an eviction shortens the grace period of a terminating pod, and the pod's status has the
/// reason.
#[test]
fn an_eviction_shortens_the_grace_period_of_a_terminating_pod() {
    let evicted = |grace| {
        Input::Terminate(
            Eviction::under_pressure("u", "memory.available", "low".into(), grace).verdict,
        )
    };
    let spec =
        json!({"terminationGracePeriodSeconds": 600, "containers": [{"name": "c", "image": "i"}]});
    let deleted = json!({"deletionTimestamp": "2023-11-14T22:13:20Z", "deletionGracePeriodSeconds": 600, "resourceVersion": "2"});
    for (first, wake) in [
        (Input::Update(a_pod(spec.clone(), deleted)), 600_000),
        (evicted(90), 90_000),
    ] {
        let is_deleted = matches!(first, Input::Update(_));
        let mut run = Run::new(a_pod(spec.clone(), json!({})));
        run.settle();
        let turn = run.input(first);
        assert_eq!(turn.wake_at, Some(at(wake)));
        assert_eq!(turn.events.len(), usize::from(!is_deleted));
        run.now = 1000;
        let turn = run.input(evicted(1));
        assert_eq!(
            turn.wake_at,
            Some(at(2000)),
            "the grace period is shorter now"
        );
        // The first eviction emits the event.
        assert_eq!(turn.events.len(), usize::from(is_deleted));
        assert_eq!(run.input(evicted(60)).wake_at, Some(at(2000)));
        run.settle();
        let status = run.worker.status();
        assert_eq!(
            (status.phase.as_deref(), status.reason.as_deref()),
            (Some("Failed"), Some("Evicted"))
        );
    }
}
