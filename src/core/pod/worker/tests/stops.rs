//! The order in which containers stop, and when their preStop hooks run.

use super::*;
use crate::pod::actions::Kill;

/// A pod with two sidecars that has run and is deleted with this grace period in seconds, and the turn that follows.
fn deleted(grace: i64) -> (Run, Turn) {
    let mut run = Run::new(a_pod(with_sidecar("Always"), json!({})));
    run.settle();
    let metadata = json!({"deletionTimestamp": "2023-11-14T22:13:20Z", "deletionGracePeriodSeconds": grace, "resourceVersion": "2"});
    let turn = run.input(Input::Update(a_pod(with_sidecar("Always"), metadata)));
    (run, turn)
}

#[test]
fn the_terminal_phase_waits_for_sidecars_which_stop_in_reverse_order() {
    let mut run = Run::new(a_pod(with_sidecar("Never"), json!({})));
    run.settle();
    run.exit("c0", 0);
    run.input(Input::Hint);
    run.settle_but(|op| matches!(op, Op::Stop { .. }));
    assert_eq!(run.phase(), "Running", "its sidecars are running");
    let stopping = |run: &Run| run.waiting.iter().map(Op::key).collect::<Vec<_>>();
    assert_eq!(stopping(&run), [Key::Stop("t0".into())]);
    let op = run.waiting[0].clone();
    let outcome = run.outcome(&op);
    run.done(&op.key(), outcome);
    run.settle_but(|op| matches!(op, Op::Stop { .. }));
    assert_eq!(stopping(&run), [Key::Stop("s0".into())]);
    run.settle();
    assert_eq!(run.phase(), "Succeeded");
    let early = run
        .published
        .iter()
        .filter(|s| s.phase.as_deref() == Some("Succeeded"))
        .filter(|s| format!("{s:?}").contains("running: Some"));
    assert_eq!(early.count(), 0);
}

/// Simulation seed 1533: the runtime may carry out a start that was cancelled.
#[test]
fn the_terminal_phase_waits_for_a_restarting_sidecar() {
    let mut run = Run::new(a_pod(with_sidecar("Never"), json!({})));
    run.settle();
    let is_start = |op: &Op| matches!(op, Op::Start { .. });
    run.exit("s0", 0);
    run.exit("t0", 0);
    run.input(Input::Hint);
    run.settle_but(is_start);
    // After its back-off.
    run.now = 10_000;
    run.input(Input::Tick);
    run.settle_but(is_start);
    assert!(run.waiting.iter().any(is_start), "{:?}", run.waiting);
    run.exit("c0", 0);
    run.input(Input::Hint);
    run.settle_but(|op| matches!(op, Op::Observe { .. }) || is_start(op));
    let observe = Key::Observe;
    let op = run.waiting.iter().find(|op| op.key() == observe).cloned();
    let outcome = run.outcome(&op.expect("an observation"));
    let turn = run.done(&observe, outcome);
    assert!(
        turn.cancel.contains(&start("s")),
        "its start is no longer needed"
    );
    assert_eq!(run.phase(), "Running", "it may nevertheless run");
    run.settle();
    assert_eq!(run.phase(), "Succeeded");
}

#[test]
fn sidecar_hooks_start_together_and_signals_wait_for_hook_and_order() {
    let (mut run, turn) = deleted(30);
    let keys = |ops: &[Op]| ops.iter().map(Op::key).collect::<Vec<_>>();
    let hook = |name: &str| Key::PreStop(name.into());
    let stop = |name: &str| Key::Stop(name.into());
    assert_eq!(
        keys(&turn.begin),
        [stop("c0"), hook("t0"), hook("s0")],
        "all start at once"
    );
    // The last sidecar's hook still runs when it is the sidecar's turn: its signal waits for the hook.
    run.settle_but(|op| op.key() == hook("t0"));
    assert_eq!(keys(&run.waiting), [hook("t0")]);
    run.now = 10_000;
    let turn = run.done(&hook("t0"), Outcome::Done);
    assert!(
        matches!(&turn.begin[..], [Op::Stop { first: false, until, .. }] if *until == at(30_000)),
        "without a second hook: {:?}",
        turn.begin
    );
    run.settle();
    assert_eq!((run.count(&hook("s0")), run.count(&stop("s0"))), (1, 1));
}

#[test]
fn a_hook_that_outlasts_the_grace_period_runs_until_its_container_exits() {
    let (mut run, _) = deleted(30);
    let hook = Key::PreStop("t0".into());
    run.settle_but(|op| op.key() == hook);
    run.now = 30_000;
    let turn = run.input(Input::Tick);
    assert!(!turn.cancel.contains(&hook), "{turn:?}");
    let begun: Vec<Key> = turn.begin.iter().map(Op::key).collect();
    assert_eq!(begun, [Key::Stop("t0".into()), Key::Stop("s0".into())]);
    run.settle_but(|op| op.key() == hook || matches!(op, Op::StopSandbox(_)));
    assert!(
        !run.waiting.iter().any(|op| op.key() == hook),
        "the hook ends with its container"
    );
    run.settle();
    assert!(matches!(run.worker.state, State::Finished { .. }));
}

#[test]
fn after_the_grace_period_all_containers_are_stopped() {
    let (mut run, turn) = deleted(5);
    assert_eq!(
        turn.begin.iter().map(Op::key).collect::<Vec<_>>(),
        [
            Key::Stop("c0".into()),
            Key::PreStop("t0".into()),
            Key::PreStop("s0".into())
        ],
        "hooks start at once"
    );
    assert_eq!(turn.wake_at, Some(at(5000)));
    run.now = 5000;
    let turn = run.input(Input::Tick);
    let begun: Vec<Key> = turn.begin.iter().map(Op::key).collect();
    assert_eq!(begun, [Key::Stop("t0".into()), Key::Stop("s0".into())]);
}

/// The runtime briefly reported the sandbox as not ready. When the sandbox is lost much later, its containers get their
/// full grace period.
#[test]
fn each_stop_of_a_pod_has_the_full_grace_period() {
    let spec =
        json!({"containers": [{"name": "c", "image": "i"}], "terminationGracePeriodSeconds": 30});
    let mut run = Run::new(a_pod(spec, json!({})));
    run.settle();
    let until = |run: &Run| {
        run.waiting.iter().find_map(|op| match op {
            Op::Stop { until, .. } => Some(*until),
            _ => None,
        })
    };
    for _ in 0..2 {
        run.runtime.sandboxes[0].ready = false;
        run.input(Input::Hint);
        run.settle_but(|op| matches!(op, Op::Stop { .. }));
        assert_eq!(until(&run), Some(at(run.now + 30_000)));
        run.runtime.sandboxes[0].ready = true;
        run.input(Input::Hint);
        run.settle();
        assert!(run.worker.observed().is_some_and(|o| o.runs("c")));
        run.now += 3_600_000;
        run.input(Input::Tick);
        run.settle();
    }
    assert_eq!(run.count(&Key::Sandbox), 1);
}

/// A pod with two containers. The first one has a postStart hook that has just failed.
fn with_failed_hook() -> Run {
    let spec = json!({"restartPolicy": "Always", "terminationGracePeriodSeconds": 7,
        "containers": [{"name": "a", "image": "i"}, {"name": "b", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    run.settle_but(|op| op.key() == start("a"));
    let [op] = &run.waiting[..] else {
        panic!("expected only the start of a: {:?}", run.waiting);
    };
    let op = op.clone();
    let Outcome::Started { id, .. } = run.outcome(&op) else {
        panic!("expected the start to succeed");
    };
    let message = "command \"x\" exited with 1".into();
    run.done(&op.key(), Outcome::HookFailed { id, message });
    run
}

#[test]
fn a_container_whose_post_start_hook_failed_is_stopped_before_the_next_one_starts() {
    let mut run = with_failed_hook();
    run.settle_but(|op| matches!(op, Op::Stop { .. }));
    let stop = Op::Stop {
        kill: Kill {
            id: "a0".into(),
            name: "a".into(),
            message: "FailedPostStartHook".into(),
            grace: None,
        },
        first: true,
        until: at(7_000),
    };
    assert_eq!(run.waiting, [stop], "b is not started");
    let all = run.worker.status().container_statuses.as_ref();
    let container = &all.expect("statuses")[0];
    assert!(
        !container.ready && container.started != Some(true),
        "{container:?}"
    );
    run.settle();
    assert!(run.count(&start("b")) == 1 && run.count(&start("a")) > 1);
}

#[test]
fn a_container_stopped_for_a_failed_hook_is_stopped_once_when_its_pod_terminates() {
    let mut run = with_failed_hook();
    run.settle_but(|op| matches!(op, Op::Stop { .. }));
    let metadata = json!({"deletionTimestamp": "2023-11-14T22:13:20Z", "deletionGracePeriodSeconds": 3, "resourceVersion": "2"});
    let spec = serde_json::to_value(&run.worker.update().pod.spec).expect("a spec");
    let turn = run.input(Input::Update(a_pod(spec, metadata)));
    let again = turn
        .begin
        .iter()
        .filter(|op| matches!(op, Op::Stop { first: true, .. }));
    assert_eq!(again.count(), 0, "{:?}", turn.begin);
    run.settle();
    assert_eq!(run.count(&start("b")), 0);
}

/// `kubectl delete`, then `--force`: the last grace period arrives together with the removal.
#[test]
fn the_last_object_of_a_removed_pod_shortens_the_running_stop() {
    let mut spec = with_sidecar("Always");
    spec["terminationGracePeriodSeconds"] = 500.into();
    let deleted = |version: u32, grace: i64| json!({"deletionTimestamp": "2023-11-14T22:13:20Z", "deletionGracePeriodSeconds": grace, "resourceVersion": version.to_string()});
    for is_deleted_before in [false, true] {
        let mut run = Run::new(a_pod(spec.clone(), json!({})));
        run.settle();
        let deaf = |op: &Op| matches!(op, Op::Stop { .. } | Op::PreStop { .. });
        if is_deleted_before {
            run.input(Input::Update(a_pod(spec.clone(), deleted(2, 500))));
            run.settle_but(deaf);
        }
        let stops = run.waiting.len();
        run.now += 5_000;
        let mut last = a_pod(spec.clone(), deleted(3, 0));
        last.removed = true;
        let turn = run.input(Input::Update(last));
        let stop = Key::Stop("c0".into());
        assert_eq!(turn.cancel.contains(&stop), is_deleted_before, "{turn:?}");
        assert_eq!(turn.wake_at, Some(at(6_000)));
        let until = |op: &Op| match op {
            Op::Stop { until, first, .. } => Some((*until, *first)),
            _ => None,
        };
        let begun: Vec<_> = turn.begin.iter().filter_map(until).collect();
        assert_eq!(begun, [(at(6_000), !is_deleted_before)]);
        assert!(run.waiting.len() >= stops);
        // When the grace period expires, the sidecars are stopped too, including those whose hook is still running.
        run.now += 1_000;
        run.input(Input::Tick);
        let left: Vec<Key> = run.waiting.iter().map(Op::key).collect();
        let all = ["c0", "s0", "t0"].map(|id| Key::Stop(id.into()));
        assert!(all.iter().all(|stop| left.contains(stop)), "{left:?}");
        let hooks = left.iter().filter(|key| matches!(key, Key::PreStop(_)));
        assert_eq!(hooks.count() + 3, left.len(), "{left:?}");
        run.settle();
        assert!(run.gone);
        assert!(run.worker.update().status_object().is_none());
    }
}

/// A relist that lacks the pod does not contain a grace period. As with the kubelet, that of the spec applies.
#[test]
fn a_pod_missing_from_a_relist_has_the_grace_period_of_its_spec() {
    let spec =
        json!({"terminationGracePeriodSeconds": 500, "containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec.clone(), json!({})));
    run.settle();
    let mut vanished = a_pod(spec, json!({}));
    vanished.removed = true;
    let turn = run.input(Input::Update(vanished));
    assert_eq!(turn.wake_at, Some(at(500_000)));
}

#[test]
fn a_terminating_pod_is_audited_until_the_api_removes_it() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let deleted = |finalizers: Value| json!({"deletionTimestamp": "2023-11-14T22:13:20Z", "deletionGracePeriodSeconds": 3, "finalizers": finalizers, "resourceVersion": "2"});
    for (finalizers, requests) in [(Value::Null, 4), (json!(["x"]), 1)] {
        let mut run = Run::new(a_pod(spec.clone(), json!({})));
        run.settle();
        run.input(Input::Update(a_pod(spec.clone(), deleted(finalizers))));
        run.settle();
        for _ in 0..3 {
            run.now += 60_000;
            run.input(Input::Tick);
            run.settle();
        }
        assert_eq!(run.count(&Key::Finalise), requests);
        assert!(!run.gone);
    }
}
