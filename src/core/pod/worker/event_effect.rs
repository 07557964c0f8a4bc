//! Decides which runtime events need an observation. Most events are echoes: the worker's own operations come back as
//! events, often before the call returns.

use super::Op;
use crate::pod::observed::{ContainerState, EventKind, ObservedPod, RuntimeEvent};

/// The effect of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventEffect {
    /// No effect: the worker already knows the change.
    Known,
    /// Undecided until the running operation completes that may have caused the event.
    Defer,
    /// The pod must be observed.
    Observe,
}

/// Whether an operation completes as soon as the runtime has carried it out, which supplies the id of the sandbox or
/// container. A start with a postStart hook completes later, so the container must be observed meanwhile.
fn completes_immediately(op: &Op) -> bool {
    match op {
        Op::Sandbox { .. } => true,
        Op::Start { start, .. } => {
            let lifecycle = start.container.lifecycle.as_ref();
            lifecycle.is_none_or(|l| l.post_start.is_none())
        }
        _ => false,
    }
}

/// Determines the effect of an event from the worker's state and its running operations. Exits and removals always need
/// an observation, as the runtime has more details.
pub(super) fn event_effect<'a>(
    observed: Option<&ObservedPod>,
    mut in_flight: impl Iterator<Item = &'a Op>,
    event: &RuntimeEvent,
) -> EventEffect {
    let Some(observed) = observed else {
        return EventEffect::Observe;
    };
    let container = observed.containers.iter().find(|c| c.id == event.id);
    let is_known = match event.kind {
        EventKind::Stopped | EventKind::Deleted => return EventEffect::Observe,
        _ if observed.sandboxes.iter().any(|s| s.id == event.id) => true,
        EventKind::Created => container.is_some(),
        EventKind::Started => container
            .is_some_and(|c| matches!(c.state, ContainerState::Running | ContainerState::Exited)),
    };
    if is_known {
        EventEffect::Known
    } else if in_flight.any(completes_immediately) {
        EventEffect::Defer
    } else {
        EventEffect::Observe
    }
}
