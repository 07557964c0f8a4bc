//! In which order a pod's containers end (KEP-753): the regular ones at once, each
//! sidecar when all regular containers and the sidecars after it have ended or the grace period is over,
//! then the sandboxes. The preStop hooks of all of them begin at once.

use jiff::Timestamp;

use super::{Cause, Op, State, Worker};
use crate::core::node::claims::has_claims;
use crate::core::pod;
use crate::core::pod::Role;
use crate::core::pod::actions::Kill;
use crate::core::pod::observed::{self, ContainerState, ObservedPod};
use crate::core::pod::resources;
use crate::core::time;

impl Worker {
    /// What is to be stopped now, so that at `until` nothing of the pod runs.
    pub(super) fn plan_stop(
        &self,
        observed: &ObservedPod,
        until: Timestamp,
        now: Timestamp,
    ) -> Vec<Op> {
        let all = pod::containers(&self.effective);
        // Sidecars by their place; regular containers count as the last of all.
        let place = |c: &observed::Container| {
            all.iter()
                .position(|(role, def)| *role == Role::Sidecar && def.name == c.name)
                .unwrap_or(usize::MAX)
        };
        let Some(last) = self.alive(observed).map(place).max() else {
            let stop = |id: &str| Op::StopSandbox(id.to_owned());
            return self.unstopped(observed).map(stop).collect();
        };
        let stops = self.alive(observed).filter_map(|c| {
            let kill = Kill {
                id: c.id.clone(),
                name: c.name.clone(),
                message: format!("Stopping container {}", c.name),
                grace: None,
            };
            let is_due = place(c) == last || until <= now;
            let is_told = self.stops.contains_key(&c.id);
            if is_due && (until <= now || !self.runs_hook(&c.id)) {
                Some(self.stop_of(kill, until))
            } else {
                (!is_due && !is_told).then_some(Op::PreStop { kill, until })
            }
        });
        stops.collect()
    }

    /// Whether a container's preStop hook runs before it is its turn to stop.
    fn runs_hook(&self, id: &str) -> bool {
        let hook = |op: &Op| matches!(op, Op::PreStop { kill, .. } if kill.id == id);
        self.in_flight.iter().any(hook)
    }

    /// Adds the containers whose postStart hook failed to those that are to be stopped.
    pub(super) fn stop_failed_hooks(&self, kills: &mut Vec<Kill>) {
        for (id, name) in &self.failed_hooks {
            if !kills.iter().any(|kill| kill.id == *id) {
                kills.push(Kill {
                    id: id.clone(),
                    name: name.clone(),
                    message: "FailedPostStartHook".into(),
                    grace: None,
                });
            }
        }
    }

    /// Whether a container may have a process.
    pub(super) fn may_run(&self, id: &str) -> bool {
        let observed = self.observed.as_ref();
        observed.is_none_or(|observed| self.alive(observed).any(|c| c.id == id))
    }

    /// Stopping one container by `until`, or earlier if it was told so before.
    pub(super) fn stop_of(&self, kill: Kill, until: Timestamp) -> Op {
        let before = self.stops.get(&kill.id).copied();
        Op::Stop {
            first: before.is_none(),
            until: before.map_or(until, |before| before.min(until)),
            kill,
        }
    }

    /// Stopping one container that has `grace` seconds from the time that it is told so.
    pub(super) fn stop_within(&self, kill: Kill, grace: i64, now: Timestamp) -> Op {
        let until = self
            .stops
            .get(&kill.id)
            .copied()
            .unwrap_or(time::in_seconds(now, grace));
        self.stop_of(kill, until)
    }

    /// Containers that may have a process. Of one whose state the runtime does not know, that it could be
    /// stopped has to be enough.
    fn alive<'a>(
        &'a self,
        observed: &'a ObservedPod,
    ) -> impl Iterator<Item = &'a observed::Container> {
        observed
            .live()
            .filter(|c| c.state == ContainerState::Running || !self.stop_done.contains(&c.id))
    }

    fn unstopped<'a>(&'a self, observed: &'a ObservedPod) -> impl Iterator<Item = &'a str> {
        let ids = observed.sandboxes.iter().map(|s| s.id.as_str());
        ids.filter(|id| !self.stopped_sandboxes.contains(*id))
    }

    /// Whether the drivers of the pod's resource claims are still to be told that it has ended. Only then is its end told:
    /// whoever sees it may give the devices to another pod (KEP-4381).
    pub(super) fn owes_claims(&self) -> bool {
        has_claims(self.update.with_status()) && !self.claims_returned
    }

    /// Whether a container may begin to run that was not seen to do so: its start is under way, or was cancelled, and the
    /// runtime, which may have begun with it, has not been looked at since.
    pub(super) fn may_begin(&self) -> bool {
        let starts = |op: &Op| matches!(op, Op::Start { .. });
        self.unsure || self.in_flight.iter().any(starts)
    }

    /// Whether the pod's end was told and nothing of it runs any more. Of an end that somebody else has told the containers
    /// may still run: as long as they do, they have what they were given (upstream's `filterOutInactivePods`).
    #[must_use]
    pub fn has_told_its_end(&self) -> bool {
        let runs = |observed: &ObservedPod| observed.live().next().is_some() || self.may_begin();
        let is_told = self.published().is_some_and(|told| pod::is_final(told));
        is_told && !self.observed.as_deref().is_none_or(runs)
    }

    /// Whether the pod has completed and its end was told: nobody waits for its sandbox, but for the host ports of one, which
    /// the next pod may have.
    #[must_use]
    pub fn has_completed_unawaited(&self) -> bool {
        matches!(
            self.state,
            State::Terminating {
                cause: Cause::Completed,
                ..
            }
        ) && self.has_told_its_end()
            && !resources::has_host_ports(&self.effective)
    }

    /// Whether nothing of the pod runs any more, as far as was seen after the last thing that was done.
    pub(super) fn has_stopped(&self) -> bool {
        let Some(observed) = self.observed.as_ref().filter(|_| !self.unsure) else {
            return false;
        };
        let acting = self
            .in_flight
            .iter()
            .any(|op| matches!(op, Op::Sandbox { .. } | Op::Start { .. } | Op::Stop { .. }));
        !acting
            && self.alive(observed).next().is_none()
            && self.unstopped(observed).next().is_none()
    }
}
