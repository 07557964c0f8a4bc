//! The periodic audit of terminating pods, so that no pod stays Terminating because of a missed change.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;

use super::{Cause, Facts, State, Turn, Worker};

/// How long a terminating pod may be idle before the worker checks its state again.
const ENDING_AUDIT: SignedDuration = SignedDuration::from_secs(60);

impl Worker {
    /// Whether the API should have removed the object: everything is released, and the object has no finalizers.
    fn awaits_removal(&self) -> bool {
        let has_finalizers = |object: &Arc<Pod>| {
            let finalizers = object.metadata.finalizers.as_ref();
            finalizers.is_some_and(|all| !all.is_empty())
        };
        let is_deleted = matches!(
            self.state,
            State::Finished {
                cause: Cause::Deleted
            }
        );
        let object = self.update.object.as_ref();
        is_deleted && self.finalised && object.is_some_and(|object| !has_finalizers(object))
    }

    /// Schedules the audit of a terminating pod if nothing else would wake its worker. A finished pod that stays in the
    /// API changes only with its object.
    pub(super) fn plan_audit(&mut self, facts: &Facts, turn: &mut Turn) {
        let is_ending = matches!(self.state, State::Terminating { .. });
        let sleeps = turn.wake_at.is_none() && self.is_idle();
        let is_due = sleeps && !self.has_left_node() && (is_ending || self.awaits_removal());
        self.audit_at = is_due.then(|| facts.now.saturating_add(ENDING_AUDIT).unwrap_or(facts.now));
        turn.wake_at = turn.wake_at.or(self.audit_at);
    }

    /// Carries out an audit if it is due: the worker observes the runtime again, or requests the object's removal
    /// again.
    pub(super) fn audit(&mut self, now: Timestamp) {
        if self.audit_at.take_if(|at| *at <= now).is_none() {
            return;
        }
        if self.awaits_removal() {
            self.finalised = false;
        } else {
            self.observe_needed = true;
        }
    }
}
