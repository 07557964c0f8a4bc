//! Sandboxes that wait for their turn.

use super::*;

/// The pod is deleted before its turn has come: nothing was made, so nothing is looked for or waited for.
#[test]
fn a_sandbox_that_was_not_begun_holds_up_no_end() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec.clone(), json!({})));
    run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
    let deleted = json!({"deletionTimestamp": "2023-11-14T22:13:20Z", "deletionGracePeriodSeconds": 5, "resourceVersion": "2"});
    run.input(Input::Update(a_pod(spec, deleted)));
    run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
    assert!(matches!(run.worker.state, State::Terminating { .. }));
    let looked = run.count(&Key::Observe);
    run.done(&Key::Sandbox, Outcome::NotBegun);
    assert!(matches!(run.worker.state, State::Terminated { .. }));
    run.settle();
    assert_eq!(run.count(&Key::Observe), looked);
    assert!(matches!(run.worker.state, State::Finished { .. }));
}
