//! Stops of containers and sandboxes: their order, their deadlines, and what has stopped.
//!
//! Deadlines enter from the lifecycle or from single containers, and the outcomes of stops. The operations that stop
//! leave, and whether anything of the pod may still run.
//!
//! The order is that of KEP-753. Regular containers stop at once. A sidecar stops when all regular containers and all
//! later sidecars have exited, or when the grace period has expired. The sandboxes stop last. The preStop hooks of all
//! containers begin at once, as upstream (`pkg/kubelet/kuberuntime/kuberuntime_termination_order.go`).
//!
//! A container's deadline never moves to a later time. A container that still runs after the runtime reported its stop
//! is stopped again, with back-off. If the runtime does not know a container's state, a successful stop suffices:
//! otherwise the pod could never terminate.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use super::Op;
use super::clock::{shift, shift_all};
use crate::pod;
use crate::pod::Role;
use crate::pod::actions::Kill;
use crate::pod::observed::{self, ObservedPod};
use crate::time;

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Stops {
    /// When the grace period of stopping containers expires, by id.
    deadlines: BTreeMap<String, Timestamp>,
    /// When the grace period of the whole pod expires. `None` if the pod is not being stopped.
    pod_deadline: Option<Timestamp>,
    /// Ids of sandboxes that were stopped.
    stopped_sandboxes: BTreeSet<String>,
    /// Ids of containers that the runtime reported as stopped. Those that still run are stopped again.
    stopped_containers: BTreeSet<String>,
}

impl Stops {
    /// When the grace period of the whole pod expires. `None` if the pod is not being stopped.
    pub(super) fn pod_deadline(&self) -> Option<Timestamp> {
        self.pod_deadline
    }

    /// The whole pod is stopped by `until`. An earlier deadline stays.
    pub(super) fn apply_pod_deadline(&mut self, until: Timestamp) {
        let before = self.pod_deadline;
        self.pod_deadline = Some(before.map_or(until, |before| before.min(until)));
    }

    /// The pod need not be stopped any more. The next stop gets a full grace period.
    pub(super) fn forget_pod_deadline(&mut self) {
        self.pod_deadline = None;
    }

    /// The stop of a container or its preStop hook begins.
    pub(super) fn apply_begin(&mut self, kill: &Kill, until: Timestamp) {
        self.deadlines.insert(kill.id.clone(), until);
    }

    /// The runtime has reported the stop of a container.
    pub(super) fn apply_stopped(&mut self, id: String) {
        self.stopped_containers.insert(id);
    }

    /// The runtime has reported the stop of a sandbox.
    pub(super) fn apply_stopped_sandbox(&mut self, id: String) {
        self.stopped_sandboxes.insert(id);
    }

    /// Applies an observation. Returns the containers that run although their stop was reported.
    pub(super) fn apply_observed(&mut self, seen: &ObservedPod) -> Vec<String> {
        let instance = |id: &str| seen.containers.iter().find(|c| c.id == id);
        self.deadlines.retain(|id, _| instance(id).is_some());
        let (survivors, stopped): (Vec<_>, Vec<_>) = std::mem::take(&mut self.stopped_containers)
            .into_iter()
            .filter(|id| instance(id).is_some())
            .partition(|id| instance(id).is_some_and(|c| c.is_running()));
        self.stopped_containers.extend(stopped);
        self.stopped_sandboxes
            .retain(|id| seen.sandboxes.iter().any(|s| s.id == *id));
        survivors
    }

    /// Whether a sandbox was stopped.
    pub(super) fn has_stopped_sandbox(&self, id: &str) -> bool {
        self.stopped_sandboxes.contains(id)
    }

    /// Whether nothing of the pod runs any more.
    pub(super) fn is_all_stopped(&self, observed: &ObservedPod) -> bool {
        self.alive(observed).next().is_none() && self.unstopped(observed).next().is_none()
    }

    /// Whether a container may have a process.
    pub(super) fn may_run(&self, observed: &ObservedPod, id: &str) -> bool {
        self.alive(observed).any(|c| c.id == id)
    }

    /// The containers and sandboxes to stop now, so that at `until` nothing of the pod runs. `runs_hook` says whether the
    /// preStop hook of a container is in progress before its turn to stop.
    pub(super) fn propose(
        &self,
        pod: &Pod,
        observed: &ObservedPod,
        runs_hook: impl Fn(&str) -> bool,
        until: Timestamp,
        now: Timestamp,
    ) -> Vec<Op> {
        let all = pod::containers(pod);
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
            let is_stopping = self.deadlines.contains_key(&c.id);
            if is_due && (until <= now || !runs_hook(&c.id)) {
                Some(self.stop_by_deadline(kill, until))
            } else {
                (!is_due && !is_stopping).then_some(Op::PreStop { kill, until })
            }
        });
        stops.collect()
    }

    /// Stops one container by `until`, or by an earlier deadline that it already has.
    fn stop_by_deadline(&self, kill: Kill, until: Timestamp) -> Op {
        let before = self.deadlines.get(&kill.id).copied();
        Op::Stop {
            first: before.is_none(),
            until: before.map_or(until, |before| before.min(until)),
            kill,
        }
    }

    /// Stops one container within its grace period, or else that of the pod. If the container is already being stopped,
    /// its deadline stays.
    pub(super) fn propose_stop(&self, kill: &Kill, pod: &Pod, now: Timestamp) -> Op {
        let grace = kill.grace.unwrap_or_else(|| pod::grace_seconds(pod));
        let known = self.deadlines.get(&kill.id).copied();
        let until = known.unwrap_or(time::in_seconds(now, grace));
        self.stop_by_deadline(kill.clone(), until)
    }

    /// Containers that may have a process.
    fn alive<'a>(
        &'a self,
        observed: &'a ObservedPod,
    ) -> impl Iterator<Item = &'a observed::Container> {
        observed
            .live()
            .filter(|c| c.is_running() || !self.stopped_containers.contains(&c.id))
    }

    fn unstopped<'a>(&'a self, observed: &'a ObservedPod) -> impl Iterator<Item = &'a str> {
        let ids = observed.sandboxes.iter().map(|s| s.id.as_str());
        ids.filter(|id| !self.stopped_sandboxes.contains(*id))
    }

    /// Moves all times after the clock was changed.
    pub(super) fn move_timers(&mut self, by: SignedDuration) {
        shift_all([&mut self.pod_deadline], by);
        self.deadlines.values_mut().for_each(|at| shift(at, by));
    }
}
