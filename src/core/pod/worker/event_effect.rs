//! Decides which runtime events need an observation. Most events are echoes: the worker's own operations come back as
//! events, often before the call returns.

use super::{Op, State, Worker};
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
pub(super) fn event_effect(
    observed: Option<&ObservedPod>,
    in_flight: &[Op],
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
    } else if in_flight.iter().any(completes_immediately) {
        EventEffect::Defer
    } else {
        EventEffect::Observe
    }
}

impl Worker {
    /// Applies an event. Returns false if it has no effect, now or later.
    pub(super) fn apply_event(&mut self, event: RuntimeEvent) -> bool {
        if matches!(self.state, State::Finished { .. }) {
            return self.apply_late_event(&event);
        }
        match event_effect(self.observed.as_deref(), &self.in_flight, &event) {
            EventEffect::Known => return false,
            EventEffect::Defer if self.events.contains(&event) => return false,
            EventEffect::Defer => self.events.push(event),
            EventEffect::Observe => self.observe_needed = true,
        }
        true
    }

    /// For a finished pod, only new sandboxes and containers matter. Its exited containers are removed later.
    fn apply_late_event(&mut self, event: &RuntimeEvent) -> bool {
        let known = self.observed.iter().flat_map(|observed| {
            let containers = observed.containers.iter().map(|c| &c.id);
            containers.chain(observed.sandboxes.iter().map(|s| &s.id))
        });
        let is_new = matches!(event.kind, EventKind::Created | EventKind::Started)
            && !known.into_iter().any(|id| *id == event.id);
        self.recheck |= is_new;
        is_new
    }

    /// An operation has completed: evaluates the deferred events again.
    pub(super) fn settle_events(&mut self) {
        for event in std::mem::take(&mut self.events) {
            self.apply_event(event);
        }
    }
}
