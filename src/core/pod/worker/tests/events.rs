//! Events of the runtime: echoes of the worker's own operations cause no observation, and all other events do.

use super::super::event_effect::EventEffect::{self, Defer, Known, Observe};
use super::super::event_effect::event_effect;
use super::*;
use crate::pod::observed::{EventKind, RuntimeEvent};

fn event(id: &str, kind: EventKind) -> RuntimeEvent {
    RuntimeEvent {
        pod: "u".into(),
        id: id.into(),
        kind,
    }
}

fn starting(post_start: bool) -> Op {
    let mut container = k8s_openapi::api::core::v1::Container {
        name: "c".into(),
        ..Default::default()
    };
    if post_start {
        container.lifecycle = Some(k8s_openapi::api::core::v1::Lifecycle {
            post_start: Some(k8s_openapi::api::core::v1::LifecycleHandler::default()),
            ..Default::default()
        });
    }
    Op::Start {
        start: actions::Start {
            role: Role::Regular,
            container,
            attempt: 0,
            replaces: None,
        },
        sandbox: "box0".into(),
        attempt: 0,
        ips: vec![],
    }
}

/// The known state of container `c0`, the running operations, the event's id and kind, and the event's effect.
type Case = (
    Option<ContainerState>,
    Vec<Op>,
    &'static str,
    EventKind,
    EventEffect,
);

fn cases() -> Vec<Case> {
    use ContainerState::{Created, Exited, Running, Unknown};
    let making = || vec![Op::Sandbox { attempt: 0 }];
    let looking = || vec![Op::Observe { logs: false }];
    let (start, hooked) = (|| vec![starting(false)], || vec![starting(true)]);
    vec![
        // The change is already known, or is older than the known state.
        (Some(Running), vec![], "c0", EventKind::Created, Known),
        (Some(Running), vec![], "c0", EventKind::Started, Known),
        (Some(Exited), vec![], "c0", EventKind::Started, Known),
        (Some(Created), start(), "c0", EventKind::Created, Known),
        (None, vec![], "box0", EventKind::Created, Known),
        (None, making(), "box0", EventKind::Started, Known),
        // A running operation may have caused the event.
        (None, making(), "box1", EventKind::Created, Defer),
        (None, start(), "c0", EventKind::Created, Defer),
        (Some(Created), start(), "c0", EventKind::Started, Defer),
        // No operation explains the event, or the container must be observed at once.
        (None, vec![], "c0", EventKind::Created, Observe),
        (None, looking(), "c0", EventKind::Started, Observe),
        (None, hooked(), "c0", EventKind::Started, Observe),
        (Some(Created), vec![], "c0", EventKind::Started, Observe),
        (Some(Unknown), vec![], "c0", EventKind::Started, Observe),
        // Exits and removals, whatever the worker knows.
        (Some(Running), start(), "c0", EventKind::Stopped, Observe),
        (Some(Exited), vec![], "c0", EventKind::Stopped, Observe),
        (None, making(), "box0", EventKind::Deleted, Observe),
    ]
}

#[test]
fn an_event_counts_only_if_it_reports_an_unknown_state() {
    for (state, in_flight, id, kind, expected) in cases() {
        let mut observed = ObservedPod {
            sandboxes: vec![sandbox(0, 0)],
            containers: vec![],
        };
        if let Some(state) = state {
            let mut known = container("c", 0, "box0", 0);
            known.state = state;
            observed.containers.push(known);
        }
        let effect = event_effect(Some(&observed), in_flight.iter(), &event(id, kind));
        assert_eq!(effect, expected, "{state:?} {in_flight:?} {id} {kind:?}");
    }
    let effect = event_effect(None, [].iter(), &event("c0", EventKind::Created));
    assert_eq!(effect, Observe, "nothing has been observed yet");
}

/// A start whose events arrive before its calls return needs no more observations than a start without events.
#[test]
fn events_of_the_workers_own_operations_need_no_observation() {
    let spec = || json!({"containers": [{"name": "c", "image": "i"}]});
    let mut silent = Run::new(a_pod(spec(), json!({})));
    silent.settle();
    let mut run = Run::new(a_pod(spec(), json!({})));
    for making in [Key::Sandbox, start("c")] {
        run.settle_but(|op| op.key() == making);
        let op = run.waiting[0].clone();
        assert_eq!(op.key(), making);
        let (made, id) = (
            run.outcome(&op),
            if making == Key::Sandbox { "box0" } else { "c0" },
        );
        run.input(Input::RuntimeEvent(event(id, EventKind::Created)));
        run.input(Input::RuntimeEvent(event(id, EventKind::Started)));
        run.done(&making, made);
    }
    run.settle();
    assert_eq!(run.phase(), "Running");
    assert_eq!(run.count(&Key::Observe), silent.count(&Key::Observe));
    let late = run.input(Input::RuntimeEvent(event("c0", EventKind::Started)));
    assert!(late.unchanged, "the event is repeated");
    assert_eq!(run.record.replay(), vec![]);
}

/// An event during an operation that turns out to be about something else causes an observation when the operation
/// completes.
#[test]
fn an_unrelated_event_is_observed_when_the_operation_completes() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    run.settle_but(|op| op.key() == Key::Sandbox);
    let op = run.waiting[0].clone();
    let made = run.outcome(&op);
    run.input(Input::RuntimeEvent(event("other", EventKind::Started)));
    let looked = run.count(&Key::Observe);
    assert_eq!(looked, 1, "it may be about the sandbox");
    run.done(&Key::Sandbox, made);
    assert_eq!(run.count(&Key::Observe), looked + 1);
    run.settle();
    let looked = run.count(&Key::Observe);
    run.input(Input::RuntimeEvent(event("other", EventKind::Started)));
    assert_eq!(
        run.count(&Key::Observe),
        looked + 1,
        "no start explains the event"
    );
}

/// If the runtime reports a container right after its start, no observation is needed unless the container has exited.
#[test]
fn a_container_reported_after_its_start_needs_no_observation() {
    for state in [ContainerState::Running, ContainerState::Exited] {
        let spec = json!({"containers": [{"name": "c", "image": "i"}]});
        let mut run = Run::new(a_pod(spec, json!({})));
        run.settle_but(|op| op.key() == start("c"));
        let mut made = container("c", 0, "box0", 0);
        made.state = state;
        run.runtime.containers.push(made.clone());
        let looked = run.count(&Key::Observe);
        let seen = Some(Box::new(made));
        let id = "c0".into();
        let turn = run.done(&start("c"), Outcome::Started { id, seen });
        let looks = run.count(&Key::Observe) - looked;
        assert_eq!(looks, usize::from(state == ContainerState::Exited));
        if state == ContainerState::Running {
            assert!(turn.observed, "probes and the audit follow");
            assert_eq!(run.phase(), "Running");
            assert!(
                turn.publish.is_some(),
                "the full status is published at once"
            );
        }
        assert_eq!(run.record.replay(), vec![]);
    }
}

/// The exit arrived as an event and was observed before the start completed.
#[test]
fn an_observed_exit_is_not_reverted_by_an_older_response() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    run.settle_but(|op| op.key() == start("c"));
    let made = container("c", 0, "box0", 0);
    run.runtime.containers.push(made.clone());
    run.exit("c0", 3);
    run.input(Input::RuntimeEvent(event("c0", EventKind::Stopped)));
    run.settle_but(|op| op.key() == start("c"));
    let (id, seen) = ("c0".into(), Some(Box::new(made)));
    run.done(&start("c"), Outcome::Started { id, seen });
    let known = run.worker.observed().cloned().unwrap_or_default();
    let newest = known.newest("c").map(|c| (c.state, c.exit_code));
    assert_eq!(newest, Some((ContainerState::Exited, 3)));
}
