//! Volumes and directories: set up for starts, refreshed, and what comes of it when that fails.

use super::*;

#[test]
fn volumes_that_could_not_be_refreshed_are_tried_again_and_hold_up_no_start() {
    let mut run = Run::new(a_pod(with_sidecar("Always"), json!({})));
    run.settle();
    run.input(Input::VolumesChanged);
    let outdated = || Outcome::Outdated("no space left on device".into());
    let mut pauses = vec![];
    for _ in 0..6 {
        assert!(run.waiting.iter().any(|op| op.key() == Key::Volumes));
        let turn = run.done(&Key::Volumes, outdated());
        let why = run.worker.waiting.clone().unwrap_or_default();
        assert!(why.contains("volumes are not up to date"), "{why}");
        let wake = turn.wake_at.expect("it is tried again");
        pauses.push(wake.duration_since(at(run.now)).as_millis());
        run.now += i64::try_from(*pauses.last().expect("one")).expect("short");
        run.input(Input::Tick);
    }
    assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 10_000]);
    // A container that ends meanwhile starts anew with what there is.
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
    let why = run.worker.waiting.clone().unwrap_or_default();
    assert!(!why.contains("volumes are not up to date"), "{why}");
}

/// The API could not say what the volumes are made from by now: it is asked again soon, not with the next refresh.
#[test]
fn a_refresh_of_volumes_that_fails_is_tried_again() {
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
    assert_eq!(run.count(&Key::Volumes), refreshed, "once it has succeeded");
}

/// A driver that could not make a volume larger is asked again after a pause, and not with the next refresh.
#[test]
fn what_holds_nothing_up_is_tried_again_when_it_is_to_be() {
    let mut run = Run::new(a_pod(with_sidecar("Always"), json!({})));
    run.settle();
    run.input(Input::VolumesChanged);
    let then = at(run.now + 700);
    let turn = run.done(&Key::Volumes, Outcome::Again(then));
    assert_eq!(turn.wake_at, Some(then));
    assert_eq!(run.worker.waiting, None);
    run.now += 700;
    run.input(Input::Tick);
    assert!(run.waiting.iter().any(|op| op.key() == Key::Volumes));
    let refreshed = run.count(&Key::Volumes);
    run.settle();
    run.now += 10_000;
    run.input(Input::Tick);
    assert_eq!(run.count(&Key::Volumes), refreshed, "once it has succeeded");
}

/// Seed 4383: the directories became due while a refresh of the volumes waited for its next try, and nothing woke for them.
#[test]
fn directories_are_prepared_in_time_also_while_volumes_cannot_be_refreshed() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    run.settle();
    assert_eq!(run.count(&Key::Prepare), 1);
    run.now = 55_000;
    run.input(Input::VolumesChanged);
    while run.now < 60_000 {
        let outcome = Outcome::Outdated("no space left on device".into());
        let turn = run.done(&Key::Volumes, outcome);
        let wake = turn.wake_at.expect("it is tried again");
        run.now += i64::try_from(wake.duration_since(at(run.now)).as_millis()).expect("short");
        run.input(Input::Tick);
    }
    assert_eq!(run.now, 60_000, "not at the next try");
    assert_eq!(run.count(&Key::Prepare), 2);
}

/// Changes come 20 times a second: the first one is refreshed at once, the others at most every two seconds, and the last
/// one is not lost.
#[test]
fn changes_of_any_rate_lead_to_a_bounded_number_of_refreshes() {
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
            assert_eq!(run.count(&Key::Volumes), all, "{name}: nothing has changed");
        }
    }
}
