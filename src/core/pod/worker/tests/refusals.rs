//! Pods that the node rejects.

use super::*;

/// Simulation seed 67: the agent restarted, and the labels of the Node had changed.
#[test]
fn a_rejected_running_pod_stops_before_it_is_failed() {
    let mut run = Run::new(a_pod(with_sidecar("Always"), json!({})));
    run.settle();
    let mut run = run.restarted();
    let refused = Outcome::Refused {
        reason: "NodeAffinity".into(),
        message: "no".into(),
    };
    run.settle_but(|op| matches!(op, Op::Admit));
    run.done(&Key::Admit, refused);
    run.settle_but(|op| matches!(op, Op::Stop { .. }));
    assert_eq!(run.phase(), "Running", "its containers are running");
    run.settle();
    let status = run.worker.status();
    assert_eq!(run.phase(), "Failed");
    assert_eq!(status.reason.as_deref(), Some("NodeAffinity"));
    assert_eq!(status.message.as_deref(), Some("Pod was rejected: no"));
    let ready = status
        .conditions
        .iter()
        .flatten()
        .find(|c| c.type_ == "Ready");
    assert_eq!(ready.map(|c| c.status.as_str()), Some("False"));
    assert_eq!(run.runtime.live().count(), 0);
}

/// Simulation seeds 475 and 747: only sidecars had been started. If an earlier agent could not publish which containers
/// it had started, the runtime is observed first.
#[test]
fn a_rejected_pending_pod_stops_before_it_is_failed() {
    for written in [true, false] {
        let mut run = Run::new(a_pod(with_sidecar("Always"), json!({})));
        run.settle_but(|op| op.key() == start("c"));
        assert_eq!((run.phase(), run.runtime.live().count()), ("Pending", 2));
        let mut run = run.restarted();
        if !written {
            let status = PodStatus::clone(run.worker.status());
            run.worker.publication.apply_status(PodStatus {
                init_container_statuses: None,
                container_statuses: None,
                ..status
            });
        }
        run.settle_but(|op| matches!(op, Op::Admit | Op::Observe { .. }));
        let refused = Outcome::Refused {
            reason: "NodeAffinity".into(),
            message: "no".into(),
        };
        run.done(&Key::Admit, refused);
        run.settle_but(|op| matches!(op, Op::Stop { .. }));
        assert_eq!(run.phase(), "Pending", "its sidecars are running");
        run.settle();
        assert_eq!((run.phase(), run.runtime.live().count()), ("Failed", 0));
    }
}

/// Simulation seed 38: the runtime was down, so the status had no conditions yet, and the agent restarted later.
#[test]
fn a_rejected_pod_keeps_its_start_time() {
    let mut run = Run::new(a_pod(with_sidecar("Always"), json!({})));
    let refused = Outcome::Refused {
        reason: "NodeAffinity".into(),
        message: "no".into(),
    };
    run.settle_but(|op| matches!(op, Op::Admit | Op::Observe { .. }));
    run.done(&Key::Admit, refused);
    let started = run.worker.status().start_time.clone();
    let mut run = run.restarted();
    run.now += 100_000;
    run.settle();
    assert!(started.is_some());
    assert_eq!(run.worker.status().start_time, started);
}

/// `kubectl get` shows the reason of a terminated container rather than the pod's. If a pod was rejected before it was
/// started, no container is therefore reported as lost, even by the next agent.
#[test]
fn a_rejected_pod_has_no_container_statuses() {
    let mut run = Run::new(a_pod(with_sidecar("Always"), json!({})));
    let refused = Outcome::Refused {
        reason: "SysctlForbidden".into(),
        message: "no".into(),
    };
    run.settle_but(|op| matches!(op, Op::Admit | Op::Observe { .. }));
    run.done(&Key::Admit, refused);
    run.settle();
    let mut run = {
        let status = run.worker.status();
        assert_eq!(run.phase(), "Failed");
        assert_eq!(status.reason.as_deref(), Some("SysctlForbidden"));
        assert!(status.container_statuses.is_none() && status.init_container_statuses.is_none());
        assert!(status.qos_class.is_some());
        run.restarted()
    };
    run.settle();
    let status = run.worker.status();
    assert_eq!(status.reason.as_deref(), Some("SysctlForbidden"));
    assert!(status.container_statuses.is_none() && status.init_container_statuses.is_none());
}

/// The volumes show that the pod cannot run on the node. The pod is rejected even if it already has a sandbox, which is
/// released.
#[test]
fn a_pod_is_rejected_for_its_volumes() {
    let mut run = Run::new(a_pod(with_sidecar("Always"), json!({})));
    run.settle_but(|op| op.key() == Key::Volumes);
    assert!(!run.runtime.sandboxes.is_empty());
    let refused = Outcome::Refused {
        reason: "VolumeAttachmentLimitExceeded".into(),
        message: "full".into(),
    };
    run.done(&Key::Volumes, refused);
    run.settle();
    let status = run.worker.status();
    assert_eq!(run.phase(), "Failed");
    assert_eq!(
        status.reason.as_deref(),
        Some("VolumeAttachmentLimitExceeded")
    );
    assert_eq!(status.message.as_deref(), Some("Pod was rejected: full"));
    assert!(status.container_statuses.is_none() && status.init_container_statuses.is_none());
    assert!(matches!(
        run.worker.state,
        State::Finished {
            cause: Cause::Rejected
        }
    ));
    assert!(run.runtime.sandboxes.iter().all(|sandbox| !sandbox.ready));
}
