//! Which events of the runtime are news. Most are echoes: what the worker has made and started itself comes back as
//! events, often before the call that did it has returned.

use super::{Op, State, Worker};
use crate::core::pod::observed::{ContainerState, EventKind, ObservedPod, RuntimeEvent};

/// What follows from an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum News {
    /// Nothing: the worker knows it already.
    None,
    /// Whether it is news is known when the operation under way has ended that may have caused it.
    Later,
    /// The runtime is asked about the pod.
    Look,
}

/// Whether an operation ends as soon as the runtime has done it, so that the id of what was made is known then. A
/// container whose postStart hook runs is to be seen meanwhile.
fn tells_soon(op: &Op) -> bool {
    match op {
        Op::Sandbox { .. } => true,
        Op::Start { start, .. } => {
            let lifecycle = start.container.lifecycle.as_ref();
            lifecycle.is_none_or(|l| l.post_start.is_none())
        }
        _ => false,
    }
}

/// Judges an event by what the worker knows and what it is doing. Of an end or a removal the runtime always has more to
/// say.
pub(super) fn news(observed: Option<&ObservedPod>, in_flight: &[Op], event: &RuntimeEvent) -> News {
    let Some(observed) = observed else {
        return News::Look;
    };
    let container = observed.containers.iter().find(|c| c.id == event.id);
    let is_known = match event.kind {
        EventKind::Stopped | EventKind::Deleted => return News::Look,
        _ if observed.sandboxes.iter().any(|s| s.id == event.id) => true,
        EventKind::Created => container.is_some(),
        EventKind::Started => container
            .is_some_and(|c| matches!(c.state, ContainerState::Running | ContainerState::Exited)),
    };
    if is_known {
        News::None
    } else if in_flight.iter().any(tells_soon) {
        News::Later
    } else {
        News::Look
    }
}

impl Worker {
    /// Takes in an event. False if nothing follows from it, now or later.
    pub(super) fn apply_event(&mut self, event: RuntimeEvent) -> bool {
        if matches!(self.state, State::Finished { .. }) {
            return self.apply_late_event(&event);
        }
        match news(self.observed.as_deref(), &self.in_flight, &event) {
            News::None => return false,
            News::Later if self.events.contains(&event) => return false,
            News::Later => self.events.push(event),
            News::Look => self.look = true,
        }
        true
    }

    /// After the pod's end only what was not there before is of interest: its ended containers are removed in time.
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

    /// Judges the events anew that had to wait; an operation has ended.
    pub(super) fn settle_events(&mut self) {
        for event in std::mem::take(&mut self.events) {
            self.apply_event(event);
        }
    }
}
