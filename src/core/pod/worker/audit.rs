//! The slow audit of pods that end: none stays for good because of a change that was missed.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;

use super::{Cause, Facts, State, Turn, Worker};

/// How long a pod that ends may have nothing under way and nothing to wait for before the worker reads again how it stands.
const ENDING_AUDIT: SignedDuration = SignedDuration::from_secs(60);

impl Worker {
    /// Whether the API should no longer have the pod: it has everything back, and no finalizer keeps the object.
    fn awaits_removal(&self) -> bool {
        let is_held = |object: &Arc<Pod>| {
            let finalizers = object.metadata.finalizers.as_ref();
            finalizers.is_some_and(|held| !held.is_empty())
        };
        let is_deleted = matches!(
            self.state,
            State::Finished {
                cause: Cause::Deleted
            }
        );
        let object = self.update.object.as_ref();
        is_deleted && self.finalised && object.is_some_and(|object| !is_held(object))
    }

    /// A pod that ends wakes up now and then where nothing else would wake it, so that none stays for good because of a
    /// change that was missed. A finished pod that stays in the API changes only with its object.
    pub(super) fn plan_audit(&mut self, facts: &Facts, turn: &mut Turn) {
        let is_ending = matches!(self.state, State::Terminating { .. });
        let sleeps = turn.wake_at.is_none() && self.is_idle();
        let is_due = sleeps && !self.is_gone() && (is_ending || self.awaits_removal());
        self.audit_at = is_due.then(|| facts.now.saturating_add(ENDING_AUDIT).unwrap_or(facts.now));
        turn.wake_at = turn.wake_at.or(self.audit_at);
    }

    /// Carries out a due audit: the worker observes the runtime again, or requests the object's removal again.
    pub(super) fn audit(&mut self, now: Timestamp) {
        if self.audit_at.take_if(|at| *at <= now).is_none() {
            return;
        }
        if self.awaits_removal() {
            self.finalised = false;
        } else {
            self.look = true;
        }
    }
}
