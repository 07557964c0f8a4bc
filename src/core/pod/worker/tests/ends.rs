//! Pods with a terminal status in the API that their worker has not published.

use super::*;

fn spec() -> Value {
    json!({"restartPolicy": "Always", "terminationGracePeriodSeconds": 1, "containers": [{"name": "c", "image": "i"}]})
}

/// A pod with this status in the API.
fn with_status(version: u32, status: Value) -> Update {
    of_api(spec(), version, status)
}

fn of_api(spec: Value, version: u32, status: Value) -> Update {
    let mut update = a_pod(spec, json!({"resourceVersion": version.to_string()}));
    let mut pod = Pod::clone(&update.pod);
    pod.status = Some(serde_json::from_value(status).expect("a status"));
    update.pod = Arc::new(pod);
    update.object = Some(Arc::clone(&update.pod));
    update
}

fn ended(phase: &str) -> Value {
    let state = json!({"terminated": {"exitCode": 7, "containerID": "containerd://old", "reason": "Error"}});
    json!({"phase": phase, "reason": "Evicted", "message": "m", "startTime": "2023-11-14T22:13:20Z", "conditions": [],
        "containerStatuses": [{"name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 3,
            "containerID": "containerd://old", "state": state}]})
}

/// A container of the pod runs that was started after the pod's terminal status.
fn running() -> ObservedPod {
    ObservedPod {
        sandboxes: vec![sandbox(1, 0)],
        containers: vec![container("c", 4, "box1", 0)],
    }
}

fn is_published_as_terminal(run: &Run, phase: &str) {
    let status = run.worker.status();
    assert_eq!(run.phase(), phase);
    assert_eq!(status.reason.as_deref(), Some("Evicted"));
    assert_eq!(status.message.as_deref(), Some("m"));
    let container = &status.container_statuses.as_ref().expect("statuses")[0];
    assert_eq!(container.container_id.as_deref(), Some("containerd://old"));
    assert_eq!(container.restart_count, 3);
    let ended = container.state.as_ref().and_then(|s| s.terminated.as_ref());
    assert_eq!(ended.map(|t| t.exit_code), Some(7));
    let phases = run.published.iter().map(|s| s.phase.as_deref());
    assert!(phases.clone().all(|p| p == Some(phase)), "{phases:?}");
}

/// A virtual node lost power: the runtime may have nothing of the pod, or may have started it again.
#[test]
fn a_pod_with_a_terminal_phase_is_not_started_by_the_next_agent() {
    for phase in ["Failed", "Succeeded"] {
        for runtime in [ObservedPod::default(), running()] {
            let lives = !runtime.is_empty();
            let mut run = Run::over(runtime, with_status(1, ended(phase)));
            run.settle();
            is_published_as_terminal(&run, phase);
            assert_eq!(run.runtime.live().count(), 0, "{phase}");
            let begins = |key: &Key| matches!(key, Key::Start(_) | Key::Sandbox | Key::Admit);
            assert!(!run.begun.iter().any(begins), "{:?}", run.begun);
            assert_eq!(run.count(&Key::Stop("c4".into())), usize::from(lives));
        }
    }
}

/// The agent started the pod with an outdated view of the API.
#[test]
fn a_terminal_phase_that_arrives_late_is_kept() {
    for phase in ["Failed", "Succeeded"] {
        let mut run = Run::new(with_status(1, json!({"phase": "Running"})));
        run.settle();
        assert_eq!(run.phase(), "Running");
        run.published.clear();
        run.input(Input::Update(with_status(2, ended(phase))));
        run.settle_but(|op| matches!(op, Op::Stop { .. }));
        is_published_as_terminal(&run, phase);
        assert!(
            !run.worker.terminal_status_published(),
            "its resources are still allocated"
        );
        run.settle();
        assert!(run.worker.terminal_status_published());
        is_published_as_terminal(&run, phase);
        assert_eq!((run.runtime.live().count(), run.count(&start("c"))), (0, 1));
        // If another client overwrites the terminal status, the worker ignores that.
        run.input(Input::Update(with_status(3, json!({"phase": "Running"}))));
        run.settle();
        is_published_as_terminal(&run, phase);
    }
}

/// The pod garbage collector and `kubectl` set only the phase. The agent then reports how the containers exited.
#[test]
fn container_exits_are_reported_after_a_foreign_terminal_phase() {
    let mut run = Run::new(with_status(1, json!({"phase": "Pending"})));
    run.settle();
    run.published.clear();
    run.input(Input::Update(with_status(2, json!({"phase": "Failed"}))));
    run.settle();
    let status = run.worker.status();
    assert_eq!((run.phase(), run.runtime.live().count()), ("Failed", 0));
    let container = &status.container_statuses.as_ref().expect("statuses")[0];
    let ended = container.state.as_ref().and_then(|s| s.terminated.as_ref());
    assert_eq!(ended.map(|t| t.exit_code), Some(143));
    let mut phases = run.published.iter().map(|s| s.phase.as_deref());
    assert!(phases.all(|p| p == Some("Failed")));
}

/// Simulation seed 1898: while the watch was delayed, another client wrote a terminal status. That status has container
/// statuses from before the containers started. Meanwhile the worker published its own terminal status, which the
/// status writer merged.
#[test]
fn a_late_foreign_terminal_status_does_not_revert_container_statuses() {
    let with = |version, status| {
        let mut spec = spec();
        spec["restartPolicy"] = "OnFailure".into();
        of_api(spec, version, status)
    };
    let mut run = Run::new(with(1, json!({"phase": "Pending"})));
    run.settle();
    run.exit("c0", 1);
    run.input(Input::Hint);
    run.settle();
    // After its back-off.
    run.now = 10_000;
    run.input(Input::Tick);
    run.settle();
    run.exit("c1", 0);
    run.input(Input::Hint);
    let is_held = |op: &Op| matches!(op, Op::StopSandbox(_));
    run.settle_but(is_held);
    // A status waits for the stop of the sandbox no longer than this.
    let later = |run: &mut Run| {
        run.now += 2000;
        run.input(Input::Tick);
    };
    later(&mut run);
    let own = run.worker.published().and_then(|own| own.phase.as_deref());
    assert_eq!(own, Some("Succeeded"));
    run.published.clear();
    let waits = json!({"name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": {"waiting": {}}});
    let foreign = json!({"phase": "Failed", "reason": "NodeLost", "message": "m", "startTime": "2023-11-14T22:13:20Z",
        "conditions": [{"type": "Initialized", "status": "False"}], "containerStatuses": [waits]});
    run.input(Input::Update(with(2, foreign)));
    later(&mut run);
    run.settle();
    assert!(run.worker.terminal_status_published());
    assert!(!run.published.is_empty());
    for status in &run.published {
        let end = [&status.phase, &status.reason, &status.message].map(Option::as_deref);
        assert_eq!(end, [Some("Failed"), Some("NodeLost"), Some("m")]);
        let container = &status.container_statuses.as_ref().expect("statuses")[0];
        assert_eq!(container.container_id.as_deref(), Some("containerd://c1"));
        assert_eq!(container.restart_count, 1);
        let mut conditions = status.conditions.iter().flatten();
        let initialized = conditions.find(|c| c.type_ == "Initialized");
        assert_eq!(initialized.map(|c| c.status.as_str()), Some("True"));
    }
}

/// Upstream computes the phase again when the containers have stopped. The status that it set before for a preempted
/// pod survives only if they have failed (`SyncTerminatingPod` in `pkg/kubelet/kubelet.go`, critical_pod_test.go).
#[test]
fn a_preempted_pods_phase_follows_its_containers() {
    for (cause, code, phase, reason) in [
        (Cause::Preempted, 0, "Succeeded", None),
        (Cause::Preempted, 137, "Failed", Some("R")),
        (Cause::Evicted, 0, "Failed", Some("R")),
        (Cause::NodeShutdown, 0, "Failed", Some("R")),
    ] {
        let spec = json!({"containers": [{"name": "c", "image": "i"}]});
        let mut run = Run::new(a_pod(spec, json!({})));
        run.settle();
        run.input(Input::Terminate(Verdict {
            cause,
            reason: "R".into(),
            message: "M".into(),
            disruption: Some("D".into()),
            grace: None,
        }));
        run.settle_but(|op| matches!(op, Op::Stop { .. }));
        run.exit("c0", code);
        run.done(&Key::Stop("c0".into()), Outcome::Done);
        run.settle();
        let status = run.worker.status();
        assert_eq!(run.phase(), phase, "{cause:?} {code}");
        assert_eq!(status.reason.as_deref(), reason, "{cause:?} {code}");
        assert_eq!(status.message.is_some(), reason.is_some());
        let mut conditions = status.conditions.iter().flatten();
        assert!(conditions.any(|c| c.type_ == "DisruptionTarget" && c.status == "True"));
    }
}
