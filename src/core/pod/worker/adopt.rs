//! What a worker takes over from the API: sizes that were granted, the status that an earlier agent has written, an end that
//! is told already.

use std::sync::Arc;

use k8s_openapi::api::core::v1::PodStatus;

use super::{Growth, Worker};
use crate::core::pod::observed::{ContainerState, ObservedPod};
use crate::core::pod::probe::Health;
use crate::core::pod::{self, Role, resize};

impl Worker {
    /// Takes over what the newest update says: the granted sizes stay, and at the first sight of the
    /// object so does what the API knows, so that after a restart times and counts go on from there.
    pub(super) fn adopt_update(&mut self) {
        let desired = resize::desired(&self.update.pod);
        if resize::same(&self.granted, &desired) {
            self.decided = self.update.pod.metadata.generation;
            self.effective = Arc::clone(&self.update.pod);
            self.resizing.pending = None;
            if self.growth != Growth::Settled {
                self.growth = Growth::Withdrawn;
            }
        } else {
            self.keep_granted();
            self.growth = Growth::Wanted;
        }
        self.wanted = resize::wanted(&self.effective);
        self.adopt_status();
        self.adopt_end();
    }

    /// The pod goes on with the sizes that were granted. Its generation is observed when the node has decided about it.
    pub(super) fn keep_granted(&mut self) {
        let mut pod = resize::with(&self.update.pod, &self.granted);
        pod.metadata.generation = self.decided;
        self.effective = Arc::new(pod);
    }

    fn adopt_status(&mut self) {
        if self.adopted {
            // Only the first sight counts: later ones may be echoes of what was written since.
            return;
        }
        let Some(object) = self.update.status_object() else {
            return;
        };
        self.adopted = true;
        // One that is refused has a start time before it has conditions.
        let written = |s: &PodStatus| s.conditions.is_some() || s.start_time.is_some();
        let Some(told) = object.status.clone().filter(written) else {
            return;
        };
        self.status = told;
        // A static pod's mirror may come to be known after its containers.
        if let Some(seen) = self.observed.clone() {
            self.adopt_health(&seen);
        }
    }

    /// A final phase that the API has is never taken back, whoever has told it and whatever the runtime has: the pod is not
    /// started (again), what still runs of it is stopped, and phase, reason, message and the ends of containers stay as they
    /// were told (upstream's `generateAPIPodStatus`, and `UpdatePod` in `pod_workers.go`). A static pod's mirror binds nobody.
    fn adopt_end(&mut self) {
        let pod = &self.update.pod;
        let is_final = |told: &&PodStatus| pod::is_final(told) && !pod::is_static(pod);
        let Some(told) = pod.status.as_ref().filter(is_final) else {
            return;
        };
        let is_own = |own: &PodStatus| own.phase == told.phase;
        if self.end.is_none() && !self.published.as_ref().is_some_and(is_own) {
            self.status = told.clone();
            self.end = Some(told.clone());
        }
    }

    /// What no probe has judged yet is as the status has it, where that speaks of the same instances.
    pub(super) fn adopt_health(&mut self, seen: &ObservedPod) {
        for (role, container) in &pod::containers(&self.effective) {
            if !matches!(role, Role::Regular | Role::Sidecar) {
                continue;
            }
            let running = seen.newest(&container.name);
            let Some(running) = running.filter(|c| c.state == ContainerState::Running) else {
                continue;
            };
            let known = [
                &self.status.container_statuses,
                &self.status.init_container_statuses,
            ];
            let mut known = known.into_iter().flatten().flatten();
            let adopted = Health::adopted(&running.id, known.find(|s| s.name == container.name));
            let health = self.probed.0.entry(running.id.clone()).or_default();
            health.started = health.started.or(adopted.started);
            health.ready = health.ready.or(adopted.ready);
        }
    }
}
