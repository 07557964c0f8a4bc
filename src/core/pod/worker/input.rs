//! The inputs of a pod's worker, the outcomes of its operations, and its events. Inputs and outcomes can be serialised: a
//! recorded run is replayed by passing its inputs to a worker again.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use super::Key;
use crate::fault::{Class, Fault};
use crate::pod;
use crate::pod::lifecycle::Intent;
use crate::pod::lifecycle::Verdict;
use crate::pod::observed::{Container, ObservedPod, RuntimeEvent};
use crate::pod::probe::Kind;
use crate::pod::status::devices::OfPod as DeviceHealth;

/// The desired state of a pod according to its source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Update {
    /// The pod as it should run.
    #[serde(with = "super::stored::shared")]
    pub pod: Arc<Pod>,
    /// The API object with the pod's name: the pod itself, or a static pod's mirror. The mirror may still be that of an
    /// older manifest.
    #[serde(with = "super::stored::optional")]
    pub object: Option<Arc<Pod>>,
    /// Whether no source has the pod any more.
    pub removed: bool,
    /// Whether a removed pod starts again under its uid once it has stopped, because its manifest was written again.
    /// Its logs are kept, as they determine the restart counts (`calcRestartCountByLogDir` in
    /// `pkg/kubelet/kuberuntime/kuberuntime_container.go`).
    #[serde(default, rename = "again")]
    pub starts_again: bool,
}

impl Update {
    /// The API object for the pod's status. A mirror qualifies only if it mirrors this manifest. A pod that was removed
    /// from the API has no such object.
    #[must_use]
    pub fn status_object(&self) -> Option<&Arc<Pod>> {
        let is_there = |object: &&Arc<Pod>| match pod::is_static(&self.pod) {
            true => self.is_mirrored_by(object),
            false => !self.removed,
        };
        self.object.as_ref().filter(is_there)
    }

    /// The pod with its status in the API, which may contain fields that other components wrote. For a static pod, the
    /// pod itself.
    #[must_use]
    pub fn with_status(&self) -> &Arc<Pod> {
        let object = self.object.as_ref();
        let own = object.filter(|_| !pod::is_static(&self.pod));
        own.unwrap_or(&self.pod)
    }

    /// The order in which pods that arrive together are admitted. Pods that have run come first, by start time. After a
    /// restart of the agent, no pod therefore loses its resources to a newer one. The others follow by creation time.
    #[must_use]
    pub fn admission_order(&self) -> impl Ord + use<> {
        let status = self.status_object().and_then(|o| o.status.as_ref());
        let started = status.and_then(|s| Some(s.start_time.as_ref()?.0));
        let created = self.pod.metadata.creation_timestamp.as_ref();
        let uid = pod::uid(&self.pod).to_owned();
        (started.is_none(), started, created.map(|t| t.0), uid)
    }

    /// Distinguishes the API object from other objects, regardless of its status.
    #[must_use]
    pub fn identity(&self) -> Option<Identity> {
        self.object.as_ref().map(|object| Identity {
            uid: object.metadata.uid.clone(),
            deleted: object.metadata.deletion_timestamp.is_some(),
            mirrors: pod::annotation(object, pod::MIRROR).map(ToOwned::to_owned),
        })
    }

    /// Whether a mirror mirrors exactly this manifest and is not being deleted.
    #[must_use]
    pub fn is_mirrored_by(&self, mirror: &Pod) -> bool {
        pod::annotation(mirror, pod::MIRROR) == pod::annotation(&self.pod, pod::HASH)
            && mirror.metadata.deletion_timestamp.is_none()
    }

    /// The lifecycle's view of the update.
    #[must_use]
    pub fn intent(&self) -> Intent {
        let is_static = pod::is_static(&self.pod);
        Intent {
            deleted: !is_static && self.pod.metadata.deletion_timestamp.is_some(),
            removed: self.removed,
            terminal: !is_static && pod::is_terminal(&self.pod),
            grace: pod::grace_seconds(&self.pod),
        }
    }

    /// Whether only the status differs. Readiness gates depend on conditions that other components write, so a pod with
    /// readiness gates always differs.
    #[must_use]
    pub(crate) fn differs_in_status_only(&self, other: &Update) -> bool {
        let (a, b) = (&self.pod, &other.pod);
        let gates = a.spec.as_ref().is_some_and(|s| s.readiness_gates.is_some());
        !gates
            && self.intent() == other.intent()
            && a.spec == b.spec
            && a.metadata.labels == b.metadata.labels
            && a.metadata.annotations == b.metadata.annotations
            && a.metadata.generation == b.metadata.generation
            && self.identity() == other.identity()
    }
}

/// The identity of an API object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    uid: Option<String>,
    /// Whether it has a deletion timestamp.
    deleted: bool,
    /// For a mirror, the hash of the mirrored manifest.
    mirrors: Option<String>,
}

/// Whether the runtime's network is ready for sandboxes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Network {
    /// Unknown, as the agent has just started and the runtime's status was not read yet.
    #[default]
    Unknown,
    /// Sandboxes can get addresses.
    Ready,
    /// Sandboxes cannot get addresses, for this reason.
    NotReady(String),
}

/// Everything that can happen to a pod. A worker receives all inputs through one queue.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Input {
    /// The source has another desired state, or the API has another object.
    Update(Update),
    /// The runtime may have changes: a listing differs from the last observation.
    Hint,
    /// The runtime reports an event of one of the pod's sandboxes or containers.
    #[serde(rename = "Happened")]
    RuntimeEvent(RuntimeEvent),
    /// The result of a probe has changed.
    Probed {
        /// The container's id in the runtime.
        id: String,
        /// The kind of probe.
        kind: Kind,
        /// Whether the probe succeeded.
        result: bool,
    },
    /// An object that the pod's volumes or environments depend on has changed.
    VolumesChanged,
    /// A driver was registered or unregistered, or a volume that only one pod may use became free. Failed volumes and
    /// resource claims are retried.
    DriversChanged,
    /// The current health of the containers' devices.
    Devices(DeviceHealth),
    /// The node terminates the pod.
    #[serde(rename = "Evicted")]
    Terminate(Verdict),
    /// Resources were freed, so that a deferred resize is requested again.
    #[serde(rename = "RoomFreed")]
    ResourcesFreed,
    /// The readiness of the runtime's network has changed.
    Network(Network),
    /// The runtime responds again after an outage.
    RuntimeBack,
    /// An operation has completed.
    Done {
        /// The operation's key.
        key: Key,
        /// The operation's outcome.
        outcome: Outcome,
    },
    /// The time of day has moved by this much, because the clock was set or the machine was suspended.
    ClockMoved(SignedDuration),
    /// The requested wake-up time or an audit is due.
    Tick,
}

impl Input {
    /// The input's name in logs and records.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Input::Update(_) => "update",
            Input::Hint => "hint",
            Input::RuntimeEvent(_) => "happened",
            Input::Probed { .. } => "probed",
            Input::VolumesChanged => "volumes-changed",
            Input::DriversChanged => "drivers-changed",
            Input::Devices(_) => "devices",
            Input::ClockMoved(_) => "clock-moved",
            Input::Terminate(_) => "evicted",
            Input::ResourcesFreed => "room-freed",
            Input::Network(_) => "network",
            Input::RuntimeBack => "runtime-back",
            Input::Done { .. } => "done",
            Input::Tick => "tick",
        }
    }
}

/// The outcome of an operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Outcome {
    /// The observed state.
    Observed {
        /// The pod in the runtime.
        #[serde(with = "super::stored::shared")]
        pod: Arc<ObservedPod>,
        /// For containers without instances, the restart count that follows from their logs, by name.
        logged: BTreeMap<String, u32>,
    },
    /// The node admitted the pod.
    Admitted,
    /// The node rejected the pod.
    Refused {
        /// The reason in the status and the event.
        reason: String,
        /// The message for users.
        message: String,
    },
    /// The node granted the sizes of the spec.
    Granted,
    /// The node deferred or rejected the sizes.
    Deferred {
        /// The reason, for example `OutOfmemory`.
        reason: String,
        /// The message for users.
        message: String,
    },
    /// A sandbox was created.
    Sandbox {
        /// The sandbox's id.
        id: String,
        /// The sandbox's addresses. Empty on the host network.
        ips: Vec<String>,
    },
    /// The operation was abandoned while it was queued, because the pod terminates. Nothing was done.
    #[serde(rename = "NotBegun")]
    Abandoned,
    /// A container was started, and its postStart hook, if any, has succeeded.
    Started {
        /// The container's id.
        id: String,
        /// The container as the runtime reported it afterwards. `None` if the query failed.
        #[serde(default)]
        seen: Option<Box<Container>>,
    },
    /// A container was started, but its postStart hook has failed. The container runs and must be stopped.
    HookFailed {
        /// The container's id.
        id: String,
        /// The error message.
        message: String,
    },
    /// The operation succeeded.
    Done,
    /// A container cannot be started yet: the reason and message of its waiting state.
    Waiting {
        /// The reason, for example `ErrImagePull`.
        reason: String,
        /// The message for users.
        message: String,
        /// When to retry, if it is known.
        until: Option<Timestamp>,
        /// The class of the failure, which determines the next try if `until` is `None`.
        #[serde(default)]
        class: Class,
    },
    /// The operation succeeded, except for a part to retry at this time.
    #[serde(rename = "Again")]
    RetryPart(Timestamp),
    /// Volumes could not be brought up to date. Their earlier state is intact.
    Outdated(String),
    /// The operation failed, or its effect is unknown.
    Failed(Fault),
}

impl From<Fault> for Outcome {
    fn from(fault: Fault) -> Outcome {
        Outcome::Failed(fault)
    }
}

/// An event about the pod, for the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodEvent {
    /// The field path of the container, if the event is about one.
    pub field_path: Option<String>,
    /// Whether the event is a warning.
    pub warning: bool,
    /// The reason, for example `BackOff`.
    pub reason: String,
    /// The message for users.
    pub message: String,
}

impl PodEvent {
    /// A normal event about the whole pod.
    pub(super) fn normal(reason: &str, message: impl Into<String>) -> PodEvent {
        PodEvent {
            field_path: None,
            warning: false,
            reason: reason.into(),
            message: message.into(),
        }
    }

    /// A warning about the whole pod.
    pub(super) fn warning(reason: &str, message: impl Into<String>) -> PodEvent {
        PodEvent {
            warning: true,
            ..PodEvent::normal(reason, message)
        }
    }
}
