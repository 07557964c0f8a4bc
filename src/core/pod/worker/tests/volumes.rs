//! Volumes and directories: setup for starts, refreshes, and the consequences of their failures.

use super::*;

#[test]
fn failed_volume_refreshes_are_retried_and_delay_no_start() {
    let mut run = Run::new(a_pod(with_sidecar("Always"), json!({})));
    run.settle();
    run.input(Input::VolumesChanged);
    let outdated = || Outcome::Outdated("no space left on device".into());
    let mut pauses = vec![];
    for _ in 0..6 {
        assert!(run.waiting.iter().any(|op| op.key() == Key::Volumes));
        let turn = run.done(&Key::Volumes, outdated());
        let why = run.worker.waiting().unwrap_or_default().to_owned();
        assert!(why.contains("refreshing its volumes failed"), "{why}");
        let wake = turn.wake_at.expect("the time of the retry");
        pauses.push(wake.duration_since(at(run.now)).as_millis());
        run.now += i64::try_from(*pauses.last().expect("one")).expect("short");
        run.input(Input::Tick);
    }
    assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 10_000]);
    // A container that exits meanwhile restarts with the existing volumes.
    run.exit("c0", 1);
    run.input(Input::Hint);
    let starts = run.begun.len();
    run.done(&Key::Volumes, outdated());
    run.settle_but(|op| op.key() == Key::Volumes);
    assert!(
        run.begun[starts..]
            .iter()
            .any(|key| matches!(key, Key::Start(_)))
    );
    run.now += 10_000;
    run.input(Input::Tick);
    run.settle();
    let why = run.worker.waiting().unwrap_or_default().to_owned();
    assert!(!why.contains("refreshing its volumes failed"), "{why}");
}

/// The API could not be read for the volumes' sources: the refresh is retried soon, without waiting for the next
/// regular one.
#[test]
fn a_failed_read_of_volume_sources_is_retried() {
    let mut run = Run::new(a_pod(with_sidecar("Always"), json!({})));
    run.settle();
    run.input(Input::VolumesChanged);
    let turn = run.done(&Key::Volumes, Outcome::Failed(Fault::later("injected")));
    assert_eq!(turn.wake_at, Some(at(run.now + 500)));
    run.now += 500;
    run.input(Input::Tick);
    assert!(run.waiting.iter().any(|op| op.key() == Key::Volumes));
    let refreshed = run.count(&Key::Volumes);
    run.settle();
    run.now += 10_000;
    run.input(Input::Tick);
    assert_eq!(
        run.count(&Key::Volumes),
        refreshed,
        "no retry after a success"
    );
}

/// A driver could not expand a volume: the call is retried after a pause, without waiting for the next regular refresh.
#[test]
fn a_non_blocking_failure_is_retried_when_due() {
    let mut run = Run::new(a_pod(with_sidecar("Always"), json!({})));
    run.settle();
    run.input(Input::VolumesChanged);
    let then = at(run.now + 700);
    let turn = run.done(&Key::Volumes, Outcome::RetryPart(then));
    assert_eq!(turn.wake_at, Some(then));
    assert_eq!(run.worker.waiting(), None);
    run.now += 700;
    run.input(Input::Tick);
    assert!(run.waiting.iter().any(|op| op.key() == Key::Volumes));
    let refreshed = run.count(&Key::Volumes);
    run.settle();
    run.now += 10_000;
    run.input(Input::Tick);
    assert_eq!(
        run.count(&Key::Volumes),
        refreshed,
        "no retry after a success"
    );
}

/// Simulation seed 4383: the directories became due while a volume refresh waited for its retry, and nothing woke the
/// worker for them.
#[test]
fn directories_are_prepared_in_time_while_volume_refreshes_fail() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    run.settle();
    assert_eq!(run.count(&Key::Prepare), 1);
    run.now = 55_000;
    run.input(Input::VolumesChanged);
    while run.now < 60_000 {
        let outcome = Outcome::Outdated("no space left on device".into());
        let turn = run.done(&Key::Volumes, outcome);
        let wake = turn.wake_at.expect("the time of the retry");
        run.now += i64::try_from(wake.duration_since(at(run.now)).as_millis()).expect("short");
        run.input(Input::Tick);
    }
    assert_eq!(run.now, 60_000, "one minute, not the time of a retry");
    assert_eq!((run.count(&Key::Prepare), run.count(&Key::Upkeep)), (1, 1));
}

fn is_ready_to_start(run: &Run) -> bool {
    let mut conditions = run.worker.status().conditions.iter().flatten();
    conditions.any(|c| c.type_ == "PodReadyToStartContainers" && c.status == "True")
}

/// The kubelet creates a sandbox once the volumes are set up. Here both happen in parallel, and the condition requires
/// both.
#[test]
fn a_pod_is_not_ready_to_start_containers_before_its_volumes_are_set_up() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    let is_volumes = |op: &Op| matches!(op, Op::Volumes { .. });
    run.settle_but(is_volumes);
    assert_eq!(
        (run.runtime.sandboxes.len(), is_ready_to_start(&run)),
        (1, false)
    );
    run.done(
        &Key::Volumes,
        Outcome::Failed(Fault::later("configmap \"m\" not found")),
    );
    run.settle_but(is_volumes);
    assert!(!is_ready_to_start(&run));
    run.now += 10_000;
    run.input(Input::Tick);
    run.settle();
    assert!(is_ready_to_start(&run) && run.phase() == "Running");
    // A failed refresh does not revert the condition, and the next agent derives it from the containers.
    run.input(Input::VolumesChanged);
    run.done(&Key::Volumes, Outcome::Failed(Fault::later("no")));
    assert!(is_ready_to_start(&run));
    let mut run = run.restarted();
    run.settle_but(is_volumes);
    assert!(is_ready_to_start(&run));
}

/// A pod that has a sandbox does not need the preparation for a sandbox. While its upkeep fails or hangs, its tokens
/// are refreshed and its containers restart. This also applies to an agent that has not created the sandbox.
#[test]
fn failing_upkeep_blocks_no_other_operation() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    for hangs in [false, true] {
        for restarted in [false, true] {
            let mut run = Run::new(a_pod(spec.clone(), json!({})));
            run.settle();
            if restarted {
                run = run.restarted();
            }
            let before = (run.count(&Key::Prepare), run.count(&Key::Volumes));
            run.now += 60_001;
            run.exit("c0", 1);
            run.input(Input::Hint);
            run.input(Input::VolumesChanged);
            for _ in 0..20 {
                run.settle_but(|op| matches!(op, Op::Upkeep));
                if !hangs {
                    run.done(&Key::Upkeep, Outcome::Failed(Fault::later("no answer")));
                }
                run.now += 1000;
                run.input(Input::Tick);
            }
            assert!(run.count(&Key::Upkeep) > 0, "{hangs} {restarted}");
            assert_eq!(run.count(&Key::Prepare), before.0, "{hangs} {restarted}");
            assert!(run.count(&Key::Volumes) > before.1, "{hangs} {restarted}");
            assert!(
                run.worker.observed().is_some_and(|o| o.runs("c")),
                "{hangs} {restarted}"
            );
            assert_eq!(run.runtime.newest("c").map(|c| c.attempt), Some(1));
            // If the sandbox is lost, the pod is prepared for the next one.
            run.lose_sandbox();
            run.input(Input::Hint);
            for _ in 0..100 {
                run.settle_but(|op| matches!(op, Op::Upkeep));
                run.now += 1000;
                run.input(Input::Tick);
            }
            assert!(run.count(&Key::Prepare) > before.0, "{hangs} {restarted}");
            assert_eq!(run.runtime.sandboxes[0].attempt, 1);
        }
    }
}

/// Changes arrive 20 times per second. The first one is refreshed at once, the others at most every two seconds, and
/// the last one is not lost.
#[test]
fn refreshes_are_rate_limited_whatever_the_rate_of_changes() {
    let annotate = |run: &mut Run, number: i64| {
        let mut update = run.worker.update().clone();
        let mut pod = Pod::clone(&update.pod);
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert("beat".into(), number.to_string());
        update.pod = Arc::new(pod);
        run.input(Input::Update(update));
    };
    let touch = |run: &mut Run, _: i64| _ = run.input(Input::VolumesChanged);
    for (name, change) in [
        ("object", &touch as &dyn Fn(&mut Run, i64)),
        ("annotation", &annotate),
    ] {
        for fails in [false, true] {
            let mut run = Run::new(a_pod(with_sidecar("Always"), json!({})));
            run.settle();
            let before = run.count(&Key::Volumes);
            change(&mut run, 0);
            assert_eq!(run.count(&Key::Volumes), before + 1, "{name}: at once");
            let mut wake = None;
            for number in 1..=200 {
                while run.waiting.iter().any(|op| op.key() == Key::Volumes) {
                    let outcome = match fails {
                        true => Outcome::Failed(Fault::later("injected")),
                        false => Outcome::Done,
                    };
                    wake = run.done(&Key::Volumes, outcome).wake_at;
                }
                run.now += 50;
                wake = run.input(Input::Tick).wake_at.or(wake);
                change(&mut run, number);
            }
            let refreshes = run.count(&Key::Volumes) - before;
            let most = if fails { 12 } else { 6 };
            assert!(
                (5..=most).contains(&refreshes),
                "{name} {fails}: {refreshes}"
            );
            // The last change.
            run.now += 2000;
            run.input(Input::Tick);
            run.settle();
            assert!(
                run.count(&Key::Volumes) - before > refreshes,
                "{name} {fails}"
            );
            assert!(wake.is_some(), "{name}");
            let all = run.count(&Key::Volumes);
            run.now += 10_000;
            run.input(Input::Tick);
            run.settle();
            assert_eq!(
                run.count(&Key::Volumes),
                all,
                "{name}: no change, no refresh"
            );
        }
    }
}

/// A sandbox without containers may come from a cancelled call, after which the directories were released (simulation
/// seed 83). The pod is prepared before its volumes, as for a new sandbox, also if that fails at first (seed 3067).
#[test]
fn a_pod_with_a_leftover_empty_sandbox_is_prepared_before_its_volumes() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let mut runtime = ObservedPod::default();
    runtime.sandboxes.push(sandbox(0, 0));
    let mut run = Run::over(runtime, a_pod(spec, json!({})));
    run.settle_but(|op| matches!(op, Op::Upkeep));
    assert_eq!(run.count(&Key::Upkeep), 1);
    assert_eq!(run.count(&Key::Volumes), 0, "{:?}", run.begun);
    run.done(&Key::Upkeep, Outcome::Failed(Fault::later("no answer")));
    run.settle_but(|op| matches!(op, Op::Upkeep));
    assert_eq!(run.count(&Key::Volumes), 0, "{:?}", run.begun);
    run.now += 60_000;
    run.input(Input::Tick);
    run.settle();
    assert_eq!((run.phase(), run.count(&Key::Prepare)), ("Running", 0));
}
