//! What a worker adopts from the API: granted sizes, the status that an earlier agent wrote, and a terminal status of
//! another client.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{ContainerStatus, PodStatus};

use super::{ResizeRequest, Worker};
use crate::pod::observed::{ContainerState, ObservedPod};
use crate::pod::probe::Health;
use crate::pod::{self, Role, resize};

impl Worker {
    /// Adopts the latest update. Granted sizes are kept. The first update with the object also supplies the status in
    /// the API, so that times and counts continue after a restart.
    pub(super) fn adopt_update(&mut self) {
        let desired = resize::desired(&self.update.pod);
        if resize::same(&self.granted, &desired) {
            self.decided_generation = self.update.pod.metadata.generation;
            self.effective = Arc::clone(&self.update.pod);
            self.resizing.pending = None;
            if self.resize_request != ResizeRequest::None {
                self.resize_request = ResizeRequest::ToCancel;
            }
        } else {
            self.keep_granted();
            self.resize_request = ResizeRequest::ToSend;
        }
        self.wanted = resize::wanted(&self.effective);
        self.adopt_status();
        self.adopt_terminal_status();
    }

    /// The pod keeps its granted sizes. Its generation is observed once the node has decided about it.
    pub(super) fn keep_granted(&mut self) {
        let mut pod = resize::with(&self.update.pod, &self.granted);
        pod.metadata.generation = self.decided_generation;
        self.effective = Arc::new(pod);
    }

    fn adopt_status(&mut self) {
        if self.adopted {
            // Only the first status counts: later ones may be echoes of what was written since.
            return;
        }
        let Some(object) = self.update.status_object() else {
            return;
        };
        self.adopted = true;
        // A rejected pod has a start time, but no conditions yet.
        let written = |s: &PodStatus| s.conditions.is_some() || s.start_time.is_some();
        let Some(published) = object.status.clone().filter(written) else {
            return;
        };
        if pod::is_static(&self.update.pod) {
            self.adopt_mirror(published);
        } else {
            self.status = Arc::new(published);
        }
        // A static pod's mirror may be known only after its containers.
        if let Some(seen) = self.observed.clone() {
            self.adopt_health(&seen);
        }
    }

    /// Adopts the part of a mirror's status that is about containers which the runtime still has. The manifest and the
    /// runtime alone decide whether a static pod runs, as with the kubelet. `generateAPIPodStatus` in
    /// `pkg/kubelet/kubelet_pods.go` does not read a static pod's status from the API. `SyncKnownPods` in
    /// `pkg/kubelet/pod_workers.go` restarts a static pod whose manifest came back under its uid.
    ///
    /// A static pod that was rejected, or that terminated and is unknown to the runtime, therefore starts again with
    /// the next agent. If its manifest was removed and came back, its restart counts begin at zero. If the runtime
    /// still has its exited containers, it has terminated.
    fn adopt_mirror(&mut self, published: PodStatus) {
        let has_begun = published.phase.as_deref().is_some_and(|p| p != "Pending");
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
            ..published
        });
        match self.observed.clone() {
            Some(seen) => self.keep_known_statuses(&seen),
            None => self.status_from_mirror = has_begun,
        }
    }

    /// At the first observation of a static pod, drops the mirror's statuses of containers that the runtime does not
    /// have. If the runtime has nothing of the pod, the whole status is dropped.
    pub(super) fn keep_known_statuses(&mut self, seen: &ObservedPod) {
        if std::mem::take(&mut self.status_from_mirror) && seen.is_empty() {
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
            if let Some(statuses) = list {
                statuses.retain(is_there);
            }
            list.take_if(|statuses| statuses.is_empty());
        }
    }

    /// A terminal phase in the API is never reverted, whichever client wrote it and whatever the runtime has. The pod
    /// is not started again, and running containers are stopped. Phase, reason, message and the statuses of terminated
    /// containers are kept (`generateAPIPodStatus` in `pkg/kubelet/kubelet_pods.go`, `UpdatePod` in
    /// `pkg/kubelet/pod_workers.go`). The mirror of a static pod has no such effect.
    ///
    /// If this worker has already published a terminal status, its container statuses are kept. They are newer than
    /// those of the other client, and may have been written already (`status::allowed`).
    fn adopt_terminal_status(&mut self) {
        let pod = &self.update.pod;
        let is_final = |terminal: &&PodStatus| pod::is_final(terminal) && !pod::is_static(pod);
        let Some(terminal) = pod.status.as_ref().filter(is_final) else {
            return;
        };
        if self.adopted_terminal_status.is_some() {
            return;
        }
        if self.published.as_deref().is_some_and(pod::is_final) {
            if self.status.phase != terminal.phase {
                let own = Arc::make_mut(&mut self.status);
                own.phase.clone_from(&terminal.phase);
                own.reason.clone_from(&terminal.reason);
                own.message.clone_from(&terminal.message);
            }
            return;
        }
        self.status = Arc::new(terminal.clone());
        self.adopted_terminal_status = Some(terminal.clone());
    }

    /// Adopts the health in the status for instances that no probe has judged yet.
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
