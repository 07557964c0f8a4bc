//! Sandboxes that are queued, cancelled, or created late.

use super::*;

/// The pod is deleted while its sandbox is queued. Nothing was created, so no observation and no stop is needed.
#[test]
fn a_queued_sandbox_does_not_delay_termination() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec.clone(), json!({})));
    run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
    let deleted = json!({"deletionTimestamp": "2023-11-14T22:13:20Z", "deletionGracePeriodSeconds": 5, "resourceVersion": "2"});
    run.input(Input::Update(a_pod(spec, deleted)));
    run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
    assert!(matches!(run.worker.state, State::Terminating { .. }));
    let looked = run.count(&Key::Observe);
    run.done(&Key::Sandbox, Outcome::Abandoned);
    assert!(matches!(run.worker.state, State::Terminated { .. }));
    run.settle();
    assert_eq!(run.count(&Key::Observe), looked);
    assert!(matches!(run.worker.state, State::Finished { .. }));
}

fn deleted_pod(finalizers: Value) -> (Update, Update) {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let deleted = json!({"deletionTimestamp": "2023-11-14T22:13:20Z", "deletionGracePeriodSeconds": 5, "resourceVersion": "2", "finalizers": finalizers});
    (
        a_pod(spec.clone(), json!({"finalizers": finalizers})),
        a_pod(spec, deleted),
    )
}

/// The call that creates the sandbox was cancelled: if the runtime has created it by then, it is observed and stopped
/// before the pod terminates.
#[test]
fn a_sandbox_of_a_cancelled_call_is_found_and_stopped() {
    for has_made in [false, true] {
        let (update, deleted) = deleted_pod(json!(null));
        let mut run = Run::new(update);
        run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
        if has_made {
            run.outcome(&Op::Sandbox { attempt: 0 });
        }
        run.input(Input::Update(deleted));
        let looked = run.count(&Key::Observe);
        run.done(&Key::Sandbox, Outcome::Failed(Fault::later("cancelled")));
        run.settle();
        assert!(run.count(&Key::Observe) > looked, "{has_made}");
        assert_eq!(
            run.count(&Key::StopSandbox("box0".into())),
            usize::from(has_made)
        );
        assert!(matches!(run.worker.state, State::Finished { .. }));
    }
}

/// The runtime carries out the call after the pod has terminated, while a finalizer keeps the object. An event or a
/// listing reports the sandbox.
#[test]
fn a_sandbox_that_appears_after_termination_is_stopped_and_released() {
    use crate::pod::observed::{EventKind, RuntimeEvent};
    for by_event in [false, true] {
        let (update, deleted) = deleted_pod(json!(["x"]));
        let mut run = Run::new(update);
        run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
        run.input(Input::Update(deleted));
        run.done(&Key::Sandbox, Outcome::Failed(Fault::later("cancelled")));
        run.settle();
        assert!(matches!(run.worker.state, State::Finished { .. }));
        let released = run.count(&Key::Release);
        run.outcome(&Op::Sandbox { attempt: 0 });
        run.input(match by_event {
            false => Input::Hint,
            true => Input::RuntimeEvent(RuntimeEvent {
                pod: "u".into(),
                id: "box0".into(),
                kind: EventKind::Started,
            }),
        });
        run.settle();
        assert_eq!(run.count(&Key::StopSandbox("box0".into())), 1);
        assert_eq!(run.count(&Key::Release), released + 1, "{by_event}");
        assert!(matches!(run.worker.state, State::Finished { .. }));
        // Another listing is empty and has no effect.
        run.runtime = ObservedPod::default();
        run.input(Input::Hint);
        run.settle();
        assert_eq!(run.count(&Key::Release), released + 1, "{by_event}");
    }
}
