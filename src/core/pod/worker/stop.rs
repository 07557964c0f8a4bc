//! The order in which a pod's containers stop (KEP-753). Regular containers stop at once. A sidecar stops when all
//! regular containers and all later sidecars have exited, or when the grace period has expired. The sandboxes stop
//! last. The preStop hooks of all containers begin at once.

use jiff::Timestamp;

use super::{Cause, Op, State, Worker};
use crate::node::claims::has_claims;
use crate::pod;
use crate::pod::Role;
use crate::pod::actions::Kill;
use crate::pod::observed::{self, ContainerState, ObservedPod};
use crate::pod::resources;
use crate::time;

impl Worker {
    /// The containers and sandboxes to stop now, so that at `until` nothing of the pod runs.
    pub(super) fn plan_stop(
        &self,
        observed: &ObservedPod,
        until: Timestamp,
        now: Timestamp,
    ) -> Vec<Op> {
        let all = pod::containers(&self.effective);
        // Sidecars are ordered by their position. Regular containers rank after all sidecars.
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
            let is_stopping = self.stops.contains_key(&c.id);
            if is_due && (until <= now || !self.runs_hook(&c.id)) {
                Some(self.stop_by_deadline(kill, until))
            } else {
                (!is_due && !is_stopping).then_some(Op::PreStop { kill, until })
            }
        });
        stops.collect()
    }

    /// Whether the preStop hook of a sidecar is running before its turn to stop.
    fn runs_hook(&self, id: &str) -> bool {
        let hook = |op: &Op| matches!(op, Op::PreStop { kill, .. } if kill.id == id);
        self.in_flight.iter().any(hook)
    }

    /// Adds the containers whose postStart hook has failed to those that must be stopped.
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

    /// Stops one container by `until`, or by an earlier deadline that it already has.
    pub(super) fn stop_by_deadline(&self, kill: Kill, until: Timestamp) -> Op {
        let before = self.stops.get(&kill.id).copied();
        Op::Stop {
            first: before.is_none(),
            until: before.map_or(until, |before| before.min(until)),
            kill,
        }
    }

    /// Stops one container within `grace` seconds. If it is already being stopped, its deadline stays.
    pub(super) fn stop_within(&self, kill: Kill, grace: i64, now: Timestamp) -> Op {
        let until = self
            .stops
            .get(&kill.id)
            .copied()
            .unwrap_or(time::in_seconds(now, grace));
        self.stop_by_deadline(kill, until)
    }

    /// Containers that may have a process. If the runtime does not know a container's state, a successful stop
    /// suffices.
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

    /// Whether the pod's resource claims must still be unprepared. The terminal status is published only afterwards, as
    /// the devices may then be assigned to another pod (KEP-4381).
    pub(super) fn needs_claim_release(&self) -> bool {
        has_claims(self.update.with_status()) && !self.claims_unprepared
    }

    /// Whether a container may be starting that was not observed as running. Its start is in progress, or was cancelled
    /// without an observation of the runtime since.
    pub(super) fn may_be_starting(&self) -> bool {
        let starts = |op: &Op| matches!(op, Op::Start { .. });
        self.outcome_unknown || self.in_flight.iter().any(starts)
    }

    /// Whether a terminal status was published and no container runs any more. If another client wrote the terminal
    /// status, containers may still run, and keep their resources until they stop (`filterOutInactivePods` in
    /// `pkg/kubelet/kubelet_pods.go`).
    #[must_use]
    pub fn terminal_status_published(&self) -> bool {
        let runs =
            |observed: &ObservedPod| observed.live().next().is_some() || self.may_be_starting();
        let is_published = self.published().is_some_and(|status| pod::is_final(status));
        is_published && !self.observed.as_deref().is_none_or(runs)
    }

    /// Whether the pod has completed, its terminal status was published, and no other pod waits for its sandbox. The
    /// next pod may wait for the host ports of a sandbox.
    #[must_use]
    pub fn is_sandbox_stop_deferrable(&self) -> bool {
        matches!(
            self.state,
            State::Terminating {
                cause: Cause::Completed,
                ..
            }
        ) && self.terminal_status_published()
            && !resources::has_host_ports(&self.effective)
    }

    /// Whether nothing of the pod runs any more, according to an observation after the last operation.
    pub(super) fn has_stopped(&self) -> bool {
        let Some(observed) = self.observed.as_ref().filter(|_| !self.outcome_unknown) else {
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
