//! Static pods: what their mirrors report of earlier runs.

use super::*;

/// A static pod whose mirror has this status. Without a status the pod has no mirror yet.
fn with_mirror(policy: &str, version: u32, status: Option<Value>) -> Update {
    let annotations =
        json!({"kubernetes.io/config.hash": "h", "kubernetes.io/config.source": "file"});
    let spec = json!({"restartPolicy": policy, "terminationGracePeriodSeconds": 1, "containers": [{"name": "c", "image": "i"}]});
    let mut update = a_pod(spec.clone(), json!({"annotations": annotations}));
    update.object = status.map(|status| {
        let metadata = json!({"uid": "m", "resourceVersion": version.to_string(), "annotations": {"kubernetes.io/config.mirror": "h"}});
        let mut mirror = Pod::clone(&a_pod(spec, metadata).pod);
        mirror.status = Some(serde_json::from_value(status).expect("a status"));
        Arc::new(mirror)
    });
    update
}

fn status_of(phase: &str, reason: Option<&str>, containers: &Value) -> Value {
    json!({"phase": phase, "reason": reason, "message": reason, "startTime": "2023-11-14T00:00:00Z", "conditions": [],
        "containerStatuses": containers})
}

/// The statuses of a container with restart count 4 in the mirror.
fn the_fourth(state: &Value) -> Value {
    let before =
        json!({"terminated": {"exitCode": 9, "containerID": "containerd://c3", "reason": "Error"}});
    json!([{"name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 4,
        "containerID": "containerd://c4", "state": state, "lastState": before}])
}

fn runtime(state: ContainerState, exit_code: i32) -> ObservedPod {
    let runs = state == ContainerState::Running;
    let instance = Container {
        state,
        exit_code,
        finished_at: (!runs).then(|| at(0)),
        ..container("c", 4, "box0", 0)
    };
    let sandbox = Sandbox {
        ready: runs,
        ..sandbox(0, 0)
    };
    ObservedPod {
        sandboxes: vec![sandbox],
        containers: vec![instance],
    }
}

/// Checks what a new agent makes of a static pod: the phase, the number of starts of its container, and the restart
/// count.
fn comes_to(
    case: &str,
    (policy, mirror): (&str, Value),
    runtime: ObservedPod,
    expected: (&str, usize, i32),
) {
    let goes_on = !runtime.is_empty() && !mirror["containerStatuses"].is_null();
    let mut run = Run::over(runtime, with_mirror(policy, 1, Some(mirror)));
    run.settle();
    // A lost sandbox is recreated after its back-off.
    run.now = 60_000;
    run.input(Input::Tick);
    run.settle();
    let status = run.worker.status();
    let container = &status.container_statuses.as_ref().expect("statuses")[0];
    let found = (run.phase(), run.count(&start("c")), container.restart_count);
    assert_eq!(found, expected, "{case}");
    assert_eq!(container.last_state.is_some(), goes_on, "{case}");
    assert_eq!((&status.reason, &status.message), (&None, &None), "{case}");
    for status in &run.published {
        let is_whole = status.phase.is_some() && status.reason.is_none();
        assert!(is_whole, "{case}: {status:?}");
    }
}

/// As with the kubelet after its start, the manifest determines what should run, and the runtime what has run. The
/// mirror determines nothing.
#[test]
fn a_static_pod_unknown_to_the_runtime_starts_from_scratch() {
    let ended = json!({"terminated": {"exitCode": 0, "containerID": "containerd://c4"}});
    let (none, ended) = (json!(null), the_fourth(&ended));
    for (policy, mirror) in [
        ("Always", status_of("Failed", Some("NodeAffinity"), &none)),
        ("Never", status_of("Failed", Some("Evicted"), &ended)),
        ("Never", status_of("Succeeded", None, &ended)),
    ] {
        let case = mirror.to_string();
        let nothing = ObservedPod::default();
        comes_to(&case, (policy, mirror), nothing, ("Running", 1, 0));
    }
}

#[test]
fn a_static_pod_resumes_from_the_runtimes_state() {
    let ended = json!({"terminated": {"exitCode": 0, "containerID": "containerd://c4"}});
    let (none, ended) = (json!(null), the_fourth(&ended));
    let running = the_fourth(&json!({"running": {"startedAt": "2023-11-14T00:00:00Z"}}));
    let has_ended = || status_of("Succeeded", None, &ended);
    let with_machine = || status_of("Failed", Some("Terminated"), &ended);
    let runs = || status_of("Running", None, &running);
    let refused = || status_of("Failed", Some("NodeAffinity"), &none);
    let exited = |code| runtime(ContainerState::Exited, code);
    let lives = || runtime(ContainerState::Running, 0);
    let over = ("Succeeded", 0, 4);
    comes_to(
        "it has a terminal phase",
        ("Never", has_ended()),
        exited(0),
        over,
    );
    comes_to(
        "its terminal phase was not published",
        ("Never", runs()),
        exited(0),
        over,
    );
    let again = ("Running", 1, 5);
    let always = ("Always", with_machine());
    comes_to("it exited with the machine", always, exited(143), again);
    let badly = ("OnFailure", with_machine());
    comes_to("it exited with an error", badly, exited(143), again);
    let on = ("Running", 0, 4);
    comes_to("it is running", ("Always", runs()), lives(), on);
    comes_to(
        "it was rejected and is running",
        ("Always", refused()),
        lives(),
        on,
    );
}

/// The API becomes available after the containers.
#[test]
fn a_late_mirror_reverts_nothing() {
    let ended = json!({"terminated": {"exitCode": 0, "containerID": "containerd://c4"}});
    let mirror = || Some(status_of("Succeeded", Some("old"), &the_fourth(&ended)));
    for (runtime, restarts) in [
        (ObservedPod::default(), 0),
        (runtime(ContainerState::Running, 0), 4),
    ] {
        let mut run = Run::over(runtime, with_mirror("Never", 1, None));
        run.settle();
        assert_eq!(run.phase(), "Running");
        run.input(Input::Update(with_mirror("Never", 2, mirror())));
        run.settle();
        let status = run.worker.status();
        assert_eq!((run.phase(), &status.reason), ("Running", &None));
        let container = &status.container_statuses.as_ref().expect("statuses")[0];
        assert_eq!(container.restart_count, restarts);
        assert_eq!(run.runtime.live().count(), 1);
    }
}
