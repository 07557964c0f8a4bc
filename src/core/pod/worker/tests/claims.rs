//! The terminal status of a pod with resource claims is published after the claims were unprepared.

use super::*;

#[test]
fn a_pod_terminates_once_its_claims_are_unprepared() {
    let spec = json!({"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}],
        "resourceClaims": [{"name": "r", "resourceClaimName": "device"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    run.settle();
    assert_eq!(
        (run.phase(), run.count(&Key::UnprepareClaims)),
        ("Running", 0)
    );
    run.exit("c0", 1);
    run.input(Input::Hint);
    while let Some(op) = run
        .waiting
        .iter()
        .find(|op| **op != Op::UnprepareClaims)
        .cloned()
    {
        let outcome = run.outcome(&op);
        run.done(&op.key(), outcome);
    }
    let turn = run.done(
        &Key::UnprepareClaims,
        Outcome::Failed(Fault::later("the driver failed")),
    );
    assert_eq!(run.phase(), "Running");
    assert!(matches!(run.worker.state, State::Terminating { .. }));
    // The operation is retried with back-off, and at once when a driver is registered.
    assert_eq!(turn.wake_at, Some(at(run.now + 500)));
    run.input(Input::DriversChanged);
    assert_eq!(run.waiting, [Op::UnprepareClaims]);
    assert!(
        run.published
            .iter()
            .all(|s| s.phase.as_deref() != Some("Failed"))
    );
    run.settle();
    assert_eq!(
        (run.phase(), run.count(&Key::UnprepareClaims)),
        ("Failed", 2)
    );
}

#[test]
fn a_pod_without_claims_has_nothing_to_unprepare() {
    let spec = json!({"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    run.settle();
    run.exit("c0", 0);
    run.input(Input::Hint);
    run.settle();
    assert_eq!(
        (run.phase(), run.count(&Key::UnprepareClaims)),
        ("Succeeded", 0)
    );
}
