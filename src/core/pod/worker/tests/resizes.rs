//! Resizes of running pods (KEP-1287).

use super::*;

/// A pod with this generation and CPU request. `policy` is the restart policy for CPU resizes.
fn sized(generation: i64, cpu: &str, policy: &str) -> Update {
    let container = json!({"name": "c", "image": "i", "resources": {"requests": {"cpu": cpu}},
        "resizePolicy": [{"resourceName": "cpu", "restartPolicy": policy}]});
    let metadata = json!({"generation": generation, "resourceVersion": generation.to_string()});
    a_pod(json!({"containers": [container]}), metadata)
}

fn running(policy: &str) -> Run {
    let mut run = Run::new(sized(1, "1", policy));
    run.settle();
    assert_eq!(run.phase(), "Running");
    run
}

/// The observed generation, and the status's conditions about the resize: type, reason and message.
fn resize_status(run: &Run) -> (i64, Vec<(String, String, String)>) {
    let status = run.worker.status();
    let conditions = status.conditions.iter().flatten();
    let resizes = conditions.filter(|c| c.type_.starts_with("PodResize"));
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let shown = resizes.map(|c| (c.type_.clone(), text(&c.reason), text(&c.message)));
    (
        status.observed_generation.unwrap_or_default(),
        shown.collect(),
    )
}

fn one(kind: &str, reason: &str, message: &str) -> Vec<(String, String, String)> {
    vec![(kind.into(), reason.into(), message.into())]
}

fn no_room() -> Outcome {
    Outcome::Deferred {
        reason: "Deferred".into(),
        message: "no room".into(),
    }
}

fn updated(run: &mut Run, update: Update) {
    run.input(Input::Update(update));
}

#[test]
fn the_observed_generation_follows_the_resize_decision() {
    let mut run = running("NotRequired");
    updated(&mut run, sized(2, "2", "NotRequired"));
    run.settle_but(|op| matches!(op, Op::RequestResize));
    assert_eq!(
        resize_status(&run),
        (1, vec![]),
        "a client that waits would think it is done"
    );
    run.settle_but(|op| matches!(op, Op::Resize { .. }));
    assert_eq!(resize_status(&run), (2, one("PodResizeInProgress", "", "")));
    run.done(&Key::Resize, Outcome::Failed(Fault::later("too small")));
    let error = one("PodResizeInProgress", "Error", "too small");
    assert_eq!(resize_status(&run), (2, error));
    // Another agent takes over during the resize.
    let mut run = run.restarted();
    run.settle();
    assert_eq!(resize_status(&run), (2, vec![]));
    let resources = run.worker.status().container_statuses.as_ref();
    let resources = resources.and_then(|all| all[0].resources.clone());
    assert_eq!(json!(resources), json!({"requests": {"cpu": "2"}}));
}

#[test]
fn a_deferred_resize_is_observed_and_the_old_size_stays() {
    let mut run = running("NotRequired");
    updated(&mut run, sized(2, "64", "NotRequired"));
    run.done(&Key::ResizeRequest, no_room());
    run.settle();
    let pending = one("PodResizePending", "Deferred", "no room");
    assert_eq!(resize_status(&run), (2, pending));
    assert_eq!(run.count(&Key::Resize), 0);
    // The request is withdrawn.
    updated(&mut run, sized(3, "1", "NotRequired"));
    run.settle();
    assert_eq!(
        (resize_status(&run), run.count(&Key::Resize)),
        ((3, vec![]), 0)
    );
}

/// The node's ledger is an actor: it may queue or allocate a size that the pod no longer requests.
#[test]
fn the_node_is_notified_of_a_withdrawn_resize() {
    let cancellations = |run: &Run| {
        run.waiting
            .iter()
            .filter(|op| **op == Op::CancelResize)
            .count()
    };
    for deferred in [true, false] {
        let mut run = running("NotRequired");
        assert_eq!(cancellations(&run), 0);
        updated(&mut run, sized(2, "64", "NotRequired"));
        assert!(run.waiting.contains(&Op::RequestResize));
        if deferred {
            run.done(&Key::ResizeRequest, no_room());
        }
        updated(&mut run, sized(3, "1", "NotRequired"));
        assert_eq!(cancellations(&run), 1, "deferred: {deferred}");
        assert!(!run.waiting.contains(&Op::RequestResize));
        // Resources that were freed meanwhile are not requested.
        run.input(Input::ResourcesFreed);
        let requests = run.count(&Key::ResizeRequest);
        run.settle();
        assert_eq!(
            (resize_status(&run), run.count(&Key::ResizeRequest)),
            ((3, vec![]), requests)
        );
        // Another size is requested after the withdrawal, not at the same time.
        updated(&mut run, sized(4, "64", "NotRequired"));
        updated(&mut run, sized(5, "1", "NotRequired"));
        updated(&mut run, sized(6, "2", "NotRequired"));
        assert_eq!(
            (
                cancellations(&run),
                run.waiting.contains(&Op::RequestResize)
            ),
            (0, true)
        );
        run.settle();
        assert_eq!(
            (resize_status(&run), run.count(&Key::Resize)),
            ((6, vec![]), 1)
        );
    }
}

#[test]
fn a_resize_deferred_while_resources_are_freed_is_requested_again() {
    let mut run = running("NotRequired");
    updated(&mut run, sized(2, "64", "NotRequired"));
    run.settle_but(|op| matches!(op, Op::RequestResize));
    run.input(Input::ResourcesFreed);
    run.done(&Key::ResizeRequest, no_room());
    assert!(
        run.waiting.contains(&Op::RequestResize),
        "{:?}",
        run.waiting
    );
    run.settle();
    assert_eq!(resize_status(&run), (2, vec![]));
}

#[test]
fn a_size_requested_during_a_resize_gets_its_own_resize() {
    let mut run = running("NotRequired");
    updated(&mut run, sized(2, "2", "NotRequired"));
    run.settle_but(|op| matches!(op, Op::Resize { .. }));
    updated(&mut run, sized(3, "3", "NotRequired"));
    run.settle_but(|op| matches!(op, Op::Resize { .. }));
    run.done(&Key::Resize, Outcome::Done);
    assert_eq!(resize_status(&run), (3, one("PodResizeInProgress", "", "")));
    run.settle();
    assert_eq!(
        (resize_status(&run), run.count(&Key::Resize)),
        ((3, vec![]), 2)
    );
}

#[test]
fn the_cgroup_is_resized_after_a_container_restarts_for_its_resize() {
    let mut run = running("RestartContainer");
    updated(&mut run, sized(2, "2", "RestartContainer"));
    run.settle_but(|op| matches!(op, Op::Stop { .. }));
    assert_eq!(
        run.count(&Key::Resize),
        0,
        "its usage may exceed the new size"
    );
    assert_eq!(resize_status(&run), (2, one("PodResizeInProgress", "", "")));
    run.settle();
    assert_eq!(
        (resize_status(&run), run.count(&Key::Resize)),
        ((2, vec![]), 1)
    );
    let status = run.worker.status().container_statuses.as_ref();
    assert_eq!(status.map(|all| all[0].restart_count), Some(1));
}

/// The failed call may have been carried out. If the request is withdrawn, the old size is therefore set again, with
/// the same back-off.
#[test]
fn a_failed_resize_is_reverted_after_its_request_is_withdrawn() {
    for taken_back in [false, true] {
        let mut run = running("NotRequired");
        updated(&mut run, sized(2, "2", "NotRequired"));
        run.settle_but(|op| matches!(op, Op::Resize { .. }));
        run.done(
            &Key::Resize,
            Outcome::Failed(Fault::later("deadline exceeded")),
        );
        run.settle();
        let cpu = |run: &Run| {
            let all = run.worker.status().container_statuses.as_ref();
            let resources = all.and_then(|all| all[0].resources.clone());
            resources.and_then(|r| Some(r.requests?["cpu"].0.clone()))
        };
        assert_eq!(
            cpu(&run).as_deref(),
            Some("1"),
            "the runtime's size is not published"
        );
        let error = one("PodResizeInProgress", "Error", "deadline exceeded");
        assert_eq!(resize_status(&run), (2, error));
        assert_eq!(run.count(&Key::Resize), 1, "it is retried later");
        let (generation, expected, tries) = match taken_back {
            true => (3, "1", 3),
            false => (2, "2", 2),
        };
        if taken_back {
            updated(&mut run, sized(3, "1", "NotRequired"));
            run.settle_but(|op| matches!(op, Op::Resize { .. }));
            // The try that the update began before the node had decided.
            run.done(&Key::Resize, Outcome::Failed(Fault::later("refused")));
            run.settle();
            assert_eq!(
                resize_status(&run),
                (3, one("PodResizeInProgress", "Error", "refused"))
            );
            assert_eq!(cpu(&run).as_deref(), Some("1"));
        }
        let turn = run.input(Input::Tick);
        let at = turn.wake_at.expect("the time of the retry");
        run.now = at.as_millisecond() - 1_700_000_000_000;
        run.input(Input::Tick);
        let resize = |op: &Op| matches!(op, Op::Resize { names, .. } if names == &["c"]);
        assert!(run.waiting.iter().any(resize), "{:?}", run.waiting);
        run.settle();
        assert_eq!(resize_status(&run), (generation, vec![]));
        assert_eq!(cpu(&run).as_deref(), Some(expected));
        assert_eq!(run.count(&Key::Resize), tries);
    }
}

/// The agent was killed during a resize, and the request was withdrawn before the next agent started.
#[test]
fn a_resize_begun_by_an_earlier_agent_is_reverted() {
    let mut run = running("NotRequired");
    updated(&mut run, sized(2, "2", "NotRequired"));
    run.settle_but(|op| matches!(op, Op::Resize { .. }));
    assert_eq!(resize_status(&run), (2, one("PodResizeInProgress", "", "")));
    let (runtime, status) = (run.runtime, Arc::clone(run.worker.status()));
    let mut update = sized(3, "1", "NotRequired");
    let mut pod = Pod::clone(&update.pod);
    pod.status = Some(Arc::unwrap_or_clone(status));
    update.pod = Arc::new(pod);
    update.object = Some(Arc::clone(&update.pod));
    let mut run = Run::over(runtime, update);
    run.settle();
    assert_eq!(
        (resize_status(&run), run.count(&Key::Resize)),
        ((3, vec![]), 1)
    );
}
