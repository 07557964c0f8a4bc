//! What the pod should be: the latest update of its source, the sizes that the node has granted, and the request for
//! other sizes.
//!
//! Updates of the source, the node's admission and its decisions about sizes enter. The *effective* pod leaves: the pod
//! of the source with the granted sizes. All other parts read this pod, and never that of the source, so that a size
//! that the node has not granted has no effect.
//!
//! The rules are those of in-place resize (KEP-1287, `pkg/kubelet/allocation/allocation_manager.go`). A pod keeps the
//! sizes that the node has granted until the node grants others. The worker requests the sizes of each new spec once.
//! A deferred request is repeated when resources are freed. The generation of the effective pod is the newest that the
//! node has decided about, because the status reports this generation as observed (KEP-5067). Upstream retries deferred
//! requests periodically; this worker is notified by the ledger of the node.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use super::stored;
use super::{Op, PodEvent, Update};
use crate::pod::resize::{self, INFEASIBLE, Resizing, Sizes};

/// The state of a request for other sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum ResizeRequest {
    /// The pod has the sizes of its spec.
    None,
    /// The pod has the sizes of its spec again, but the node may still have other sizes allocated or queued.
    ToCancel,
    /// The sizes must be requested from the node, or the request is in progress.
    ToSend {
        /// Whether resources were freed since the request began. If the node defers it, it is repeated at once.
        resources_freed: bool,
    },
    /// The node has deferred or rejected the request. It is repeated when resources are freed.
    Deferred,
}

/// How an update differs from the one before.
#[derive(Debug)]
pub(super) enum Change {
    /// The update is ignored: the pod was removed from its source and must terminate first.
    Ignored,
    /// At most the status differs.
    Echo,
    /// The pod or its object differs.
    Changed {
        /// The pod before.
        before: Arc<Pod>,
        /// Whether the spec differs.
        spec: bool,
        /// Whether the API has another object.
        object: bool,
    },
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Desired {
    update: Update,
    /// The pod with its granted sizes.
    #[serde(with = "stored::shared")]
    effective: Arc<Pod>,
    granted: Sizes,
    /// The newest generation that the node has granted or rejected.
    decided_generation: Option<i64>,
    /// The sizes that the runtime should have: the granted ones.
    wanted: Sizes,
    request: ResizeRequest,
    /// The progress of a resize in the runtime.
    pub(super) resizing: Resizing,
    /// Whether the node has admitted the pod.
    pub(super) admitted: bool,
}

impl Desired {
    /// The desired state of a pod that no node has decided about since the agent started. The sizes in its status
    /// are those that an earlier agent has granted.
    pub(super) fn new(update: Update) -> Desired {
        let status = update.pod.status.as_ref();
        let mut desired = Desired {
            effective: Arc::clone(&update.pod),
            granted: resize::known(&update.pod),
            decided_generation: status.and_then(|s| s.observed_generation),
            wanted: Sizes::default(),
            request: ResizeRequest::None,
            resizing: Resizing::adopted(&update.pod),
            admitted: false,
            update,
        };
        desired.adopt_sizes();
        desired
    }

    /// The latest update.
    pub(super) fn update(&self) -> &Update {
        &self.update
    }

    /// The pod with its granted sizes.
    pub(super) fn pod(&self) -> &Arc<Pod> {
        &self.effective
    }

    /// The sizes that the runtime should have.
    pub(super) fn wanted(&self) -> &Sizes {
        &self.wanted
    }

    /// Whether a running container or the pod's cgroup does not have its granted size yet.
    pub(super) fn is_resizing(&self, runs: impl Fn(&str) -> bool) -> bool {
        self.resizing.is_under_way(&self.wanted, runs)
    }

    /// Applies an update of the source.
    pub(super) fn apply_update(&mut self, update: Update) -> Change {
        if self.update.removed && !update.removed {
            // A pod that was removed from its source cannot return under the same uid before it has terminated.
            return Change::Ignored;
        }
        let uid = |update: &Update| update.object.as_ref().and_then(|o| o.metadata.uid.clone());
        let is_echo = self.update.differs_in_status_only(&update);
        let object = uid(&self.update) != uid(&update);
        let before = std::mem::replace(&mut self.update, update).pod;
        if is_echo {
            return Change::Echo;
        }
        self.adopt_sizes();
        Change::Changed {
            spec: before.spec != self.update.pod.spec,
            object,
            before,
        }
    }

    /// Compares the sizes of the latest update with the granted ones.
    fn adopt_sizes(&mut self) {
        let requested = resize::desired(&self.update.pod);
        if resize::same(&self.granted, &requested) {
            self.decided_generation = self.update.pod.metadata.generation;
            self.effective = Arc::clone(&self.update.pod);
            self.resizing.pending = None;
            if self.request != ResizeRequest::None {
                self.request = ResizeRequest::ToCancel;
            }
        } else {
            self.keep_granted();
            if !matches!(self.request, ResizeRequest::ToSend { .. }) {
                self.request = ResizeRequest::ToSend {
                    resources_freed: false,
                };
            }
        }
        self.wanted = resize::wanted(&self.effective);
    }

    /// The pod keeps its granted sizes. Its generation is observed once the node has decided about it.
    fn keep_granted(&mut self) {
        let mut pod = resize::with(&self.update.pod, &self.granted);
        pod.metadata.generation = self.decided_generation;
        self.effective = Arc::new(pod);
    }

    /// Resources were freed on the node.
    pub(super) fn apply_resources_freed(&mut self) {
        match &mut self.request {
            ResizeRequest::Deferred => {
                self.request = ResizeRequest::ToSend {
                    resources_freed: false,
                };
            }
            // The node may have deferred the running request before these resources were freed.
            ResizeRequest::ToSend { resources_freed } => *resources_freed = true,
            ResizeRequest::None | ResizeRequest::ToCancel => {}
        }
    }

    /// The operation that informs the node about the requested sizes, if one is due.
    pub(super) fn propose(&self) -> Option<Op> {
        match self.request {
            ResizeRequest::ToSend { .. } => Some(Op::RequestResize),
            ResizeRequest::ToCancel => Some(Op::CancelResize),
            ResizeRequest::None | ResizeRequest::Deferred => None,
        }
    }

    /// A request begins. Resources that were freed before are known to the node.
    pub(super) fn apply_begin_of_request(&mut self) {
        if let ResizeRequest::ToSend { resources_freed } = &mut self.request {
            *resources_freed = false;
        }
    }

    /// The node knows that the pod requests no other sizes.
    pub(super) fn apply_cancelled_request(&mut self) {
        if self.request == ResizeRequest::ToCancel {
            self.request = ResizeRequest::None;
        }
    }

    /// The node has deferred the request, or rejected it. Returns a warning if the reason is new.
    pub(super) fn apply_deferral(&mut self, reason: &str, message: String) -> Option<PodEvent> {
        let was_freed = ResizeRequest::ToSend {
            resources_freed: true,
        };
        self.request = match self.request == was_freed {
            true => ResizeRequest::ToSend {
                resources_freed: false,
            },
            false => ResizeRequest::Deferred,
        };
        let (kind, event) = match reason {
            INFEASIBLE => (INFEASIBLE, "ResizeInfeasible"),
            _ => ("Deferred", "ResizeDeferred"),
        };
        let requested = Arc::clone(&self.update.pod);
        let described = resize::described(&requested, Some(&message));
        let pending = Some((kind.to_owned(), message));
        let is_new = self.resizing.pending != pending;
        self.resizing.pending = pending;
        self.decided_generation = requested.metadata.generation;
        self.keep_granted();
        is_new.then(|| PodEvent::warning(event, format!("Pod resize {reason}: {described}")))
    }

    /// The node has granted the sizes of the spec.
    pub(super) fn apply_grant(&mut self) -> PodEvent {
        self.granted = resize::desired(&self.update.pod);
        self.request = ResizeRequest::None;
        self.resizing.error = None;
        self.adopt_sizes();
        let described = resize::described(&self.update.pod, None);
        PodEvent::normal("ResizeStarted", format!("Pod resize started: {described}"))
    }

    /// The event of a completed resize.
    pub(super) fn resize_completed(&self) -> PodEvent {
        let described = resize::described(&self.effective, None);
        PodEvent::normal(
            "ResizeCompleted",
            format!("Pod resize completed: {described}"),
        )
    }

    /// The operation that resizes these running containers and the pod's cgroup. `only_cgroup` says whether the cgroup
    /// alone may be resized.
    pub(super) fn propose_resize(&self, names: &[String], only_cgroup: bool) -> Option<Op> {
        let is_needed =
            !names.is_empty() || (only_cgroup && self.resizing.needs_cgroup_resize(&self.wanted));
        is_needed.then(|| Op::Resize {
            names: names.to_vec(),
            to: self.wanted.clone(),
        })
    }

    /// The cgroup is being created or checked. An existing cgroup keeps its sizes until it is resized, as running
    /// containers may use more than the new sizes.
    pub(super) fn apply_begin_of_preparation(&mut self) {
        if self.resizing.cgroup.is_none() {
            self.resizing.set_cgroup(self.wanted.clone());
        }
    }

    /// A container is being started with the sizes that are granted by now.
    pub(super) fn apply_begin_of_start(&mut self, container: &str) {
        self.resizing.set_container(container, &self.wanted);
    }

    /// A resize in the runtime has failed.
    pub(super) fn apply_failed_resize(&mut self, message: String) {
        let known = self.resizing.error.as_ref();
        if !known.is_some_and(|known| crate::varying::is_same(known, &message)) {
            self.resizing.error = Some(message);
        }
    }
}
