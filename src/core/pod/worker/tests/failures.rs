//! When failed operations are retried, by the class of the failure.

use super::*;

fn waits(class: Class) -> Outcome {
    Outcome::Waiting {
        reason: "CreateContainerConfigError".into(),
        message: "injected".into(),
        until: None,
        class,
    }
}

/// A pod whose container is being started.
fn starting() -> Run {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    run.settle_but(|op| matches!(op, Op::Start { .. }));
    run
}

/// Completes an operation with this outcome. Returns the milliseconds until it begins again.
fn pause(run: &mut Run, key: &Key, outcome: Outcome) -> i64 {
    run.done(key, outcome);
    run.settle_but(|op| op.key() == *key);
    let (begun, from) = (run.count(key), run.now);
    while run.count(key) == begun {
        run.now += 500;
        run.input(Input::Tick);
        run.settle_but(|op| op.key() == *key);
    }
    run.now - from
}

#[test]
fn back_off_grows_only_for_final_failures() {
    for (class, expected) in [
        (Class::RetryLater, [10, 10, 10, 10, 10, 10, 10]),
        (Class::WaitForChange, [10, 10, 10, 10, 10, 10, 10]),
        (Class::Final, [10, 20, 40, 60, 60, 60, 60]),
    ] {
        let mut run = starting();
        let pauses = [(); 7].map(|()| pause(&mut run, &start("c"), waits(class)) / 1000);
        assert_eq!(pauses, expected, "{class:?}");
    }
}

/// Lets the minimum pause between two tries pass.
fn pass(run: &mut Run) {
    run.settle();
    run.now += 500;
    run.input(Input::Tick);
    run.settle();
}

/// Whether a failed start is retried as soon as this change arrives.
fn is_retried_after(class: Class, change: impl FnOnce(&mut Run)) -> bool {
    let mut run = starting();
    run.done(&start("c"), waits(class));
    pass(&mut run);
    let begun = run.count(&start("c"));
    change(&mut run);
    run.settle();
    let tries = run.count(&start("c")) - begun;
    assert!(tries <= 1, "{class:?}");
    tries == 1
}

/// A ConfigMap is created late: the container is started as soon as a volume refresh has found it.
#[test]
fn a_failed_start_is_retried_when_its_missing_object_appears() {
    for (class, again) in [
        (Class::WaitForChange, true),
        (Class::RetryLater, false),
        (Class::Final, false),
    ] {
        let tried = is_retried_after(class, |run| {
            let (begun, refreshed) = (run.count(&start("c")), run.count(&Key::Volumes));
            run.input(Input::VolumesChanged);
            assert_eq!(run.count(&start("c")), begun, "not before the refresh");
            run.settle();
            assert_eq!(run.count(&Key::Volumes), refreshed + 1);
        });
        assert_eq!(tried, again, "{class:?}");
    }
}

/// The change arrives while the start is failing, or while the refresh that will find it is running.
#[test]
fn a_change_that_arrives_before_the_failure_is_not_lost() {
    for refresh_begins in [false, true] {
        let mut run = starting();
        let begun = run.count(&start("c"));
        run.input(Input::VolumesChanged);
        if !refresh_begins {
            run.settle_but(|op| matches!(op, Op::Start { .. }));
            run.input(Input::VolumesChanged);
        }
        run.done(&start("c"), waits(Class::WaitForChange));
        pass(&mut run);
        // A second change waits until the next refresh may begin.
        run.now += 1500;
        run.input(Input::Tick);
        run.settle();
        assert_eq!(run.count(&start("c")), begun + 1);
    }
}

/// The runtime returns, an object or a driver appears while an operation is failing for want of it: the operation is
/// retried after the minimum pause, although no pause had begun that the change could end.
#[test]
fn a_change_during_an_operation_that_fails_ends_its_back_off() {
    let spec = || json!({"containers": [{"name": "c", "image": "i"}]});
    for (key, class, change, again) in [
        (Key::Sandbox, Class::WaitForChange, Input::RuntimeBack, true),
        (Key::Sandbox, Class::RetryLater, Input::RuntimeBack, false),
        (Key::Volumes, Class::WaitForChange, Input::RuntimeBack, true),
        (Key::Volumes, Class::RetryLater, Input::RuntimeBack, false),
        // These two also reset the back-off.
        (Key::Volumes, Class::RetryLater, Input::VolumesChanged, true),
        (Key::Volumes, Class::RetryLater, Input::DriversChanged, true),
        (Key::Volumes, Class::RetryLater, Input::Hint, false),
    ] {
        let resets = !matches!(change, Input::RuntimeBack | Input::Hint);
        let mut run = Run::new(a_pod(spec(), json!({})));
        let fails = |class| {
            let message = "injected".into();
            Outcome::Failed(Fault { class, message })
        };
        // Several failures, so that the pauses are long.
        run.settle_but(|op| op.key() == key);
        for _ in 0..6 {
            pause(&mut run, &key, fails(class));
        }
        let case = format!("{key:?} {class:?} {change:?}");
        run.input(change);
        let after = pause(&mut run, &key, fails(class));
        assert_eq!(after <= 500, again, "{case}: {after} ms");
        let after = pause(&mut run, &key, fails(class));
        assert!(resets || after > 5000, "{case}: only once, but {after} ms");
    }
}

/// The same applies to an image pull, whose failures count for the start of its container: the start and the pull share
/// one back-off.
#[test]
fn a_change_during_a_failing_image_pull_ends_the_back_off_of_the_start() {
    for (class, again) in [
        (Class::WaitForChange, true),
        (Class::RetryLater, false),
        (Class::Final, false),
    ] {
        let spec = json!({"containers": [{"name": "c", "image": "i"}]});
        let mut run = Run::new(a_pod(spec, json!({})));
        let pull = Key::Pull("c".into());
        run.settle_but(|op| op.key() == pull);
        assert_eq!(pause(&mut run, &pull, waits(class)), 10_000, "{class:?}");
        run.input(Input::RuntimeBack);
        let after = pause(&mut run, &pull, waits(class));
        assert_eq!(after <= 500, again, "{class:?}: {after} ms");
        let after = pause(&mut run, &pull, waits(class));
        assert!(after >= 10_000, "{class:?}: only once, but {after} ms");
        // The start continues the back-off of the pull.
        run.settle_but(|op| matches!(op, Op::Start { .. }));
        let after = pause(&mut run, &start("c"), waits(class));
        let expected = if class == Class::Final {
            40_000
        } else {
            10_000
        };
        assert!(after >= expected, "{class:?}: {after} ms");
    }
}

/// An object may change continually, and the runtime may fail as soon as it is back (simulation seed 1317).
#[test]
fn frequent_changes_do_not_bypass_the_back_off() {
    let mut run = starting();
    let begun = run.count(&start("c"));
    for n in 0..600 {
        run.input(Input::VolumesChanged);
        run.input(Input::RuntimeBack);
        let spec = json!({"containers": [{"name": "c", "image": "i"}]});
        let metadata = json!({"annotations": {"a": n.to_string()}});
        run.input(Input::Update(a_pod(spec, metadata)));
        run.done(&start("c"), waits(Class::WaitForChange));
        run.settle_but(|op| matches!(op, Op::Start { .. }));
        run.now += 100;
        run.input(Input::Tick);
        run.settle_but(|op| matches!(op, Op::Start { .. }));
    }
    let tries = run.count(&start("c")) - begun;
    // One try with each refresh.
    assert!((25..=31).contains(&tries), "{tries} attempts in a minute");
}

/// Without a change, a failure of this class is not retried.
#[test]
fn a_refresh_without_changes_causes_no_retry() {
    let mut run = starting();
    run.done(&start("c"), waits(Class::WaitForChange));
    run.settle();
    let begun = run.count(&start("c"));
    for _ in 0..9 {
        run.now += 1000;
        run.input(Input::Tick);
        run.settle();
    }
    assert_eq!(run.count(&start("c")), begun);
}

/// A path or a variable may depend on labels and annotations.
#[test]
fn a_changed_annotation_causes_a_retry() {
    for (class, again) in [
        (Class::Final, true),
        (Class::WaitForChange, true),
        (Class::RetryLater, false),
    ] {
        let spec = json!({"containers": [{"name": "c", "image": "i"}]});
        let metadata = json!({"annotations": {"a": "b"}, "resourceVersion": "2"});
        let tried = is_retried_after(class, |run| {
            run.input(Input::Update(a_pod(spec, metadata)));
        });
        assert_eq!(tried, again, "{class:?}");
    }
}

/// Operations that failed while the runtime was unavailable do not wait for their increased back-off.
#[test]
fn pods_continue_as_soon_as_the_runtime_is_back() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
    let away = || Outcome::Failed(Fault::missing("connection refused"));
    for _ in 0..6 {
        pause(&mut run, &Key::Sandbox, away());
    }
    run.done(&Key::Sandbox, away());
    run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
    run.now += 1000;
    let begun = run.count(&Key::Sandbox);
    run.input(Input::RuntimeBack);
    run.settle();
    assert_eq!(run.count(&Key::Sandbox), begun + 1);
    assert_eq!(run.phase(), "Running");
}
