//! Which containers start again, and where.

use super::*;
use crate::core::pod::probe::Kind;

fn probed_pod(policy: &str) -> Value {
    let probe = json!({"exec": {"command": ["x"]}});
    json!({"restartPolicy": policy, "terminationGracePeriodSeconds": 30,
        "containers": [{"name": "c", "image": "i", "livenessProbe": probe, "startupProbe": probe}]})
}

/// A container of which a probe has failed, which is being stopped, and exits with 0 at SIGTERM.
fn stopped_by(kind: Kind, policy: &str) -> Run {
    let mut run = Run::new(a_pod(probed_pod(policy), json!({})));
    run.settle();
    run.input(Input::Probed {
        id: "c0".into(),
        kind,
        result: false,
    });
    run.settle_but(|op| matches!(op, Op::Stop { .. }));
    let stop = Key::Stop("c0".into());
    assert_eq!(run.waiting.iter().map(Op::key).collect::<Vec<_>>(), [stop]);
    run.exit("c0", 0);
    run
}

/// Upstream starts it in the pass of `SyncPod` that stops it; its exit code says nothing about the work that was cut off.
#[test]
fn a_container_that_is_stopped_for_a_failed_probe_starts_again_whatever_its_exit_code() {
    for (kind, policy, again) in [
        (Kind::Liveness, "OnFailure", true),
        (Kind::Startup, "OnFailure", true),
        (Kind::Liveness, "Always", true),
        (Kind::Liveness, "Never", false),
        (Kind::Startup, "Never", false),
    ] {
        let mut run = stopped_by(kind, policy);
        // Its exit may be seen before the call that stops it returns.
        run.input(Input::Hint);
        run.settle_but(|op| matches!(op, Op::Stop { .. }));
        run.done(&Key::Stop("c0".into()), Outcome::Done);
        run.settle();
        run.now += 20_000;
        run.input(Input::Tick);
        run.settle();
        let started = run.count(&start("c"));
        assert_eq!(started, 1 + usize::from(again), "{kind:?} {policy}");
        let phase = if again { "Running" } else { "Succeeded" };
        assert_eq!(run.phase(), phase, "{kind:?} {policy}");
        let has_ended = |status: &PodStatus| pod::is_final(status);
        assert_eq!(run.published.iter().any(has_ended), !again, "{kind:?}");
    }
}

/// The decision lives as long as the agent, as upstream's does: the next one has the exit code alone.
#[test]
fn another_agent_decides_by_the_exit_code() {
    let mut run = stopped_by(Kind::Liveness, "OnFailure").restarted();
    run.settle();
    assert_eq!((run.phase(), run.count(&start("c"))), ("Succeeded", 0));
}

/// `crictl stopp`: the containers end before their sandbox does, and one of them is about to be started again by then.
#[test]
fn nothing_is_started_in_a_sandbox_that_is_being_stopped() {
    let spec = json!({"restartPolicy": "OnFailure", "containers": [{"name": "a", "image": "i"}, {"name": "b", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    run.settle();
    run.exit("a0", 0);
    run.input(Input::Hint);
    run.settle();
    run.now += 60_000;
    run.exit("b0", 137);
    run.input(Input::Hint);
    let is_start = |op: &Op| matches!(op, Op::Start { .. });
    run.settle_but(is_start);
    assert_eq!(
        run.waiting.iter().map(Op::key).collect::<Vec<_>>(),
        [start("b")]
    );
    run.lose_sandbox();
    run.input(Input::Hint);
    let seen = run.outcome(&Op::Observe { logs: false });
    let turn = run.done(&Key::Observe, seen);
    assert_eq!(turn.cancel, [start("b")]);
    let stops = |op: &Op| matches!(op, Op::StopSandbox(_));
    assert!(
        !turn.begin.iter().any(stops),
        "what the start did is seen before"
    );
    run.settle_but(|op| matches!(op, Op::StopSandbox(_)));
    assert!(!run.waiting.iter().any(is_start), "{:?}", run.waiting);
    run.settle();
    run.now += 60_000;
    run.input(Input::Tick);
    run.settle();
    assert_eq!(
        run.runtime.newest("b").map(|c| c.sandbox.as_str()),
        Some("box1")
    );
    assert_eq!(
        run.count(&start("a")),
        1,
        "what has succeeded does not run again"
    );
    assert_eq!(
        (run.phase(), run.worker.waiting.as_deref()),
        ("Running", None)
    );
    run.exit(&run.runtime.newest("b").expect("b").id.clone(), 0);
    run.input(Input::Hint);
    run.settle();
    assert_eq!(run.phase(), "Succeeded");
}
