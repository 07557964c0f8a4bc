//! What a worker takes over from the API: sizes that were granted, the status that an earlier agent has written, an end that
//! is told already.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{ContainerStatus, PodStatus};

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
        if pod::is_static(&self.update.pod) {
            self.adopt_mirror(told);
        } else {
            self.status = Arc::new(told);
        }
        // A static pod's mirror may come to be known after its containers.
        if let Some(seen) = self.observed.clone() {
            self.adopt_health(&seen);
        }
    }

    /// What goes on of a mirror's status: what it tells of containers that the runtime still has. Whether the static pod runs
    /// is decided by its manifest and the runtime alone, as by a kubelet, whose static pods come from their files without a
    /// status (`generateAPIPodStatus` in `kubelet_pods.go` asks for the API's status of no static pod, and `SyncKnownPods` in
    /// `pod_workers.go` lets one start over whose manifest came back under its uid). So one that was refused, or of whose end
    /// the runtime has nothing any more, starts anew with the next agent; one that was taken away and put back counts from
    /// nought; one whose ended containers are still there has ended.
    fn adopt_mirror(&mut self, told: PodStatus) {
        let has_begun = told.phase.as_deref().is_some_and(|p| p != "Pending");
        let is_own = match &self.observed {
            Some(seen) => has_begun && seen.is_empty(),
            None => *self.status != PodStatus::default(),
        };
        if is_own {
            return;
        }
        let own = Arc::unwrap_or_clone(std::mem::take(&mut self.status));
        self.status = Arc::new(PodStatus {
            phase: own.phase,
            reason: own.reason,
            message: own.message,
            ..told
        });
        match self.observed.clone() {
            Some(seen) => self.keep_of_mirror(&seen),
            None => self.earlier_life = has_begun,
        }
    }

    /// At the first sight of what the runtime has of a static pod: what its mirror told of other containers is forgotten, and
    /// everything where there is nothing of the pod.
    pub(super) fn keep_of_mirror(&mut self, seen: &ObservedPod) {
        if std::mem::take(&mut self.earlier_life) && seen.is_empty() {
            self.status = Arc::default();
            return;
        }
        let is_there = |status: &ContainerStatus| {
            let id = status.container_id.as_deref().unwrap_or_default();
            let id = id.rsplit_once("://").map_or(id, |(_, id)| id);
            seen.containers.iter().any(|c| c.id == id)
        };
        let status = Arc::make_mut(&mut self.status);
        for list in [
            &mut status.container_statuses,
            &mut status.init_container_statuses,
            &mut status.ephemeral_container_statuses,
        ] {
            if let Some(told) = list {
                told.retain(is_there);
            }
            list.take_if(|told| told.is_empty());
        }
    }

    /// A final phase that the API has is never taken back, whoever has told it and whatever the runtime has: the pod is not
    /// started (again), what still runs of it is stopped, and phase, reason, message and the ends of containers stay as they
    /// were told (upstream's `generateAPIPodStatus`, and `UpdatePod` in `pod_workers.go`). A static pod's mirror binds nobody.
    ///
    /// Where this worker has told an end by then, what it told of the containers is newer than what stood there with the other
    /// one, and may have been written already (`status::allowed`): that stays.
    fn adopt_end(&mut self) {
        let pod = &self.update.pod;
        let is_final = |told: &&PodStatus| pod::is_final(told) && !pod::is_static(pod);
        let Some(told) = pod.status.as_ref().filter(is_final) else {
            return;
        };
        if self.end.is_some() {
            return;
        }
        if self.published.as_deref().is_some_and(pod::is_final) {
            if self.status.phase != told.phase {
                let own = Arc::make_mut(&mut self.status);
                own.phase.clone_from(&told.phase);
                own.reason.clone_from(&told.reason);
                own.message.clone_from(&told.message);
            }
            return;
        }
        self.status = Arc::new(told.clone());
        self.end = Some(told.clone());
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
