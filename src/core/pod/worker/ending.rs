//! The end of the pod on this node: why this node terminates it, whether it has completed, what must still be released,
//! and the removal of its object from the API.
//!
//! Verdicts of the node enter (evictions, preemptions, shutdowns, deadlines, rejections), the phase of computed
//! statuses, and the outcomes of releases. What leaves is the next input of the lifecycle (`core::pod::lifecycle`), and
//! the operations that release, finalise and audit.
//!
//! - The terminal status is published only after all containers have stopped and the resource claims are unprepared:
//!   the devices may then be assigned to another pod (KEP-4381).
//! - The object is removed from the API once everything is released (`canBeDeleted` in
//!   `pkg/kubelet/status/status_manager.go`).
//! - The runtime may carry out a cancelled call late, so a finished pod may have containers again. The worker of such a
//!   pod observes the runtime after a hint, and stops and releases what it finds. Upstream does this in its periodic
//!   housekeeping (`HandlePodCleanups`).
//! - A terminating pod that is idle is audited every [`AUDIT_INTERVAL`], so that no pod stays Terminating because of a
//!   missed change.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use super::clock::shift_all;
use super::{Op, Update};
use crate::node::claims::has_claims;
use crate::pod;
use crate::pod::lifecycle::{Cause, State, Verdict};

/// How long a terminating pod may be idle before the worker checks its state again.
const AUDIT_INTERVAL: SignedDuration = SignedDuration::from_secs(60);

/// What the runtime has of a finished pod.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Leftovers {
    /// Whether the runtime may have something of the pod again, so that the pod must be observed.
    suspected: bool,
    /// Whether an observation has found something, so that the pod's content must be released again.
    found: bool,
}

/// The removal of a deleted pod's object from the API.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Removal {
    /// Not requested yet.
    #[default]
    Due,
    /// Requested. The API removes the object unless it has finalizers.
    Requested,
}

/// The pod's resource claims (KEP-4381).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Claims {
    /// Drivers may have prepared claims.
    #[default]
    Held,
    /// The claims were unprepared after the containers had stopped.
    Unprepared,
}

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Ending {
    /// Why this node terminates the pod. `None` if the source terminates the pod, or nothing does.
    verdict: Option<Verdict>,
    /// Whether the pod has completed: its regular containers have finished, but sidecars may still run.
    completed: bool,
    claims: Claims,
    leftovers: Leftovers,
    removal: Removal,
    /// When a terminating pod is audited if nothing happens before.
    audit_at: Option<Timestamp>,
}

impl Ending {
    /// Why this node terminates the pod.
    pub(super) fn verdict(&self) -> Option<&Verdict> {
        self.verdict.as_ref()
    }

    /// The node terminates the pod. An earlier verdict stays. Returns whether the verdict was accepted. If the pod was
    /// only deleted so far, an eviction also sets the reason in its status.
    pub(super) fn apply_verdict(&mut self, state: State, verdict: &Verdict) -> bool {
        let is_deleted = matches!(
            state,
            State::Terminating {
                cause: Cause::Deleted | Cause::Removed,
                ..
            }
        );
        let counts = state == State::Syncing || (is_deleted && verdict.cause == Cause::Evicted);
        if !counts || self.verdict.is_some() {
            return false;
        }
        self.verdict = Some(verdict.clone());
        true
    }

    /// The worker itself has found that the pod must terminate.
    pub(super) fn set_verdict(&mut self, verdict: Verdict) {
        self.verdict = Some(verdict);
    }

    /// A status was computed.
    pub(super) fn apply_completed(&mut self, completed: bool) {
        self.completed = completed;
    }

    /// Whether the pod has completed.
    pub(super) fn is_completed(&self) -> bool {
        self.completed
    }

    /// Whether the pod's resource claims must still be unprepared.
    pub(super) fn needs_claim_release(&self, update: &Update) -> bool {
        has_claims(update.with_status()) && self.claims == Claims::Held
    }

    /// The resource claims were unprepared.
    pub(super) fn apply_unprepared_claims(&mut self) {
        self.claims = Claims::Unprepared;
    }

    /// The runtime may have changes, according to a listing.
    pub(super) fn apply_hint(&mut self, state: State) {
        self.leftovers.suspected = matches!(state, State::Finished { .. });
    }

    /// The runtime has started something of the finished pod.
    pub(super) fn apply_late_start(&mut self) {
        self.leftovers.suspected = true;
    }

    /// An observation of a pod was accepted. `is_empty` says whether the runtime has nothing of the pod.
    pub(super) fn apply_observed(&mut self, state: State, is_empty: bool) {
        if let State::Finished { cause } = state {
            self.leftovers = Leftovers {
                suspected: false,
                found: cause.removes_content() && !is_empty,
            };
        }
    }

    /// The leftovers of the finished pod were released.
    pub(super) fn apply_released_leftovers(&mut self) {
        self.leftovers.found = false;
    }

    /// Whether the runtime may have something of the finished pod again.
    pub(super) fn suspects_leftovers(&self) -> bool {
        self.leftovers.suspected
    }

    /// Whether the content of the finished pod must be released again.
    pub(super) fn has_leftovers(&self) -> bool {
        self.leftovers.found
    }

    /// The object's removal was requested.
    pub(super) fn apply_finalised(&mut self) {
        self.removal = Removal::Requested;
    }

    /// Proposes the removal of a deleted pod's object.
    pub(super) fn propose_removal(&self, cause: Cause, update: &Update) -> Option<Op> {
        let object = update.object.as_ref();
        let has_object = object.is_some_and(|object| !pod::is_mirror(object));
        let is_due = cause == Cause::Deleted
            && has_object
            && !update.removed
            && self.removal == Removal::Due;
        is_due.then_some(Op::Finalise)
    }

    /// Whether the API should have removed the object: everything is released, and the object has no finalizers.
    fn awaits_removal(&self, state: State, update: &Update) -> bool {
        let deleted = State::Finished {
            cause: Cause::Deleted,
        };
        let finalizers = |object: &Pod| {
            let finalizers = object.metadata.finalizers.as_ref();
            finalizers.is_some_and(|all| !all.is_empty())
        };
        let object = update.object.as_ref();
        state == deleted
            && self.removal == Removal::Requested
            && object.is_some_and(|object| !finalizers(object))
    }

    /// Schedules the audit of a terminating pod. `sleeps` says whether nothing else would wake its worker. A finished
    /// pod that stays in the API changes only with its object.
    pub(super) fn schedule_audit(
        &mut self,
        state: State,
        update: &Update,
        sleeps: bool,
        now: Timestamp,
    ) -> Option<Timestamp> {
        let is_ending = matches!(state, State::Terminating { .. });
        let is_due = sleeps && (is_ending || self.awaits_removal(state, update));
        self.audit_at = is_due.then(|| now.saturating_add(AUDIT_INTERVAL).unwrap_or(now));
        self.audit_at
    }

    /// Carries out an audit if it is due: requests the object's removal again, or returns true so that the worker
    /// observes the runtime again.
    pub(super) fn audit(&mut self, state: State, update: &Update, now: Timestamp) -> bool {
        if self.audit_at.take_if(|at| *at <= now).is_none() {
            return false;
        }
        let awaits_removal = self.awaits_removal(state, update);
        if awaits_removal {
            self.removal = Removal::Due;
        }
        !awaits_removal
    }

    /// Moves all times after the clock was changed.
    pub(super) fn move_timers(&mut self, by: SignedDuration) {
        shift_all([&mut self.audit_at], by);
    }
}

/// Whether the worker is no longer needed: its content is released, and the API has no object, or keeps it only because
/// of finalizers. In that case the source reports the removal.
pub(super) fn has_left_node(state: State, update: &Update) -> bool {
    let State::Finished { cause } = state else {
        return false;
    };
    match cause {
        Cause::Removed => true,
        Cause::Deleted => update.removed || update.object.is_none(),
        _ => false,
    }
}
