//! Which containers restart, and in which sandbox.

use super::*;
use crate::pod::probe::Kind;

fn probed_pod(policy: &str) -> Value {
    let probe = json!({"exec": {"command": ["x"]}});
    json!({"restartPolicy": policy, "terminationGracePeriodSeconds": 30,
        "containers": [{"name": "c", "image": "i", "livenessProbe": probe, "startupProbe": probe}]})
}

/// A container that is being stopped because of a failed probe, and that exits with 0 on SIGTERM.
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

/// Upstream restarts the container in the `SyncPod` call that stops it. Its exit code does not show whether its work
/// was finished.
#[test]
fn a_container_stopped_for_a_failed_probe_restarts_whatever_its_exit_code() {
    for (kind, policy, again) in [
        (Kind::Liveness, "OnFailure", true),
        (Kind::Startup, "OnFailure", true),
        (Kind::Liveness, "Always", true),
        (Kind::Liveness, "Never", false),
        (Kind::Startup, "Never", false),
    ] {
        let mut run = stopped_by(kind, policy);
        // The exit may be observed before the call that stops the container returns.
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

/// As upstream, the agent does not store the decision: the next agent has only the exit code.
#[test]
fn the_next_agent_decides_by_the_exit_code() {
    let mut run = stopped_by(Kind::Liveness, "OnFailure").restarted();
    run.settle();
    assert_eq!((run.phase(), run.count(&start("c"))), ("Succeeded", 0));
}

/// `crictl stopp`: the containers exit before their sandbox stops, while one of them is about to be restarted.
#[test]
fn no_container_starts_in_a_stopping_sandbox() {
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
        "the outcome of the start is observed first"
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
        "a succeeded container does not run again"
    );
    assert_eq!((run.phase(), run.worker.waiting()), ("Running", None));
    run.exit(&run.runtime.newest("b").expect("b").id.clone(), 0);
    run.input(Input::Hint);
    run.settle();
    assert_eq!(run.phase(), "Succeeded");
}
