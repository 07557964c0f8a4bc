//! What can happen to a pod, what its worker does about it, and what comes of that. All are values
//! that can be stored: a recorded run is replayed by giving a worker its inputs again.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::core::fault::{Class, Fault};
use crate::core::pod;
use crate::core::pod::actions::{Kill, Start};
use crate::core::pod::lifecycle::Intent;
use crate::core::pod::observed::{Container, ObservedPod, RuntimeEvent};
use crate::core::pod::probe::Kind;
use crate::core::pod::resize::Sizes;
use crate::core::pod::status::Verdict;
use crate::core::pod::status::devices::OfPod as DeviceHealth;

/// The desired state of a pod, as its source has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Update {
    /// The pod as it is to run.
    #[serde(with = "super::stored::shared")]
    pub pod: Arc<Pod>,
    /// The object in the API under the pod's name: the pod itself, or a static pod's mirror, which may
    /// still be that of an older manifest.
    #[serde(with = "super::stored::optional")]
    pub object: Option<Arc<Pod>>,
    /// The pod is in no source any more.
    pub removed: bool,
    /// A removed pod starts again under its uid once it has stopped: its manifest was written again. Its logs stay, by which
    /// restarts are counted on (upstream's `calcRestartCountByLogDir`).
    #[serde(default)]
    pub again: bool,
}

impl Update {
    /// The object that the pod's status belongs to: a mirror only if it mirrors this manifest, and none of a pod that the
    /// API no longer has.
    #[must_use]
    pub fn status_object(&self) -> Option<&Arc<Pod>> {
        let is_there = |object: &&Arc<Pod>| match pod::is_static(&self.pod) {
            true => self.is_mirrored_by(object),
            false => !self.removed,
        };
        self.object.as_ref().filter(is_there)
    }

    /// The pod with what the API's status says of it: what others have written there stands in no other place.
    #[must_use]
    pub fn with_status(&self) -> &Arc<Pod> {
        let object = self.object.as_ref();
        let own = object.filter(|_| !pod::is_static(&self.pod));
        own.unwrap_or(&self.pod)
    }

    /// By what pods that come together are admitted: those that have run before, as they were started, so that after a
    /// restart of the agent none loses its place to a newer one; then the others, as they were created.
    #[must_use]
    pub fn admission_order(&self) -> impl Ord + use<> {
        let status = self.status_object().and_then(|o| o.status.as_ref());
        let started = status.and_then(|s| Some(s.start_time.as_ref()?.0));
        let created = self.pod.metadata.creation_timestamp.as_ref();
        let uid = pod::uid(&self.pod).to_owned();
        (started.is_none(), started, created.map(|t| t.0), uid)
    }

    /// What tells the API's object from another one, whatever its status.
    #[must_use]
    pub fn identity(&self) -> Option<Identity> {
        self.object.as_ref().map(|object| Identity {
            uid: object.metadata.uid.clone(),
            deleted: object.metadata.deletion_timestamp.is_some(),
            mirrors: pod::annotation(object, pod::MIRROR).map(ToOwned::to_owned),
        })
    }

    /// Whether a mirror is that of this very manifest, and stays.
    #[must_use]
    pub fn is_mirrored_by(&self, mirror: &Pod) -> bool {
        pod::annotation(mirror, pod::MIRROR) == pod::annotation(&self.pod, pod::HASH)
            && mirror.metadata.deletion_timestamp.is_none()
    }

    /// What the lifecycle makes of it.
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

    /// Whether nothing but the reported status differs. Readiness gates read conditions that others
    /// write, so with them every change counts.
    #[must_use]
    pub fn differs_in_status_only(&self, other: &Update) -> bool {
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

/// An object of the API, and what it stands for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    uid: Option<String>,
    /// Its deletion was asked for.
    deleted: bool,
    /// The hash of the manifest that it mirrors.
    mirrors: Option<String>,
}

/// Whether the runtime can give sandboxes a network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Network {
    /// The runtime has not been asked yet: the agent has just started.
    #[default]
    Unknown,
    /// Sandboxes can be given an address.
    Ready,
    /// They cannot, for this reason.
    NotReady(String),
}

/// Everything that can happen to a pod. A worker has one inbox, and these are what lies in it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Input {
    /// The source has another desired state, or the API another object.
    Update(Update),
    /// The runtime may have something new: a listing differs from what was seen.
    Hint,
    /// The runtime tells what has happened to a sandbox or a container of the pod.
    Happened(RuntimeEvent),
    /// A probe has another result than before.
    Probed {
        /// The runtime's container id.
        id: String,
        /// Which probe.
        kind: Kind,
        /// Whether it succeeded.
        result: bool,
    },
    /// Something that volumes or environments are made from has changed.
    VolumesChanged,
    /// A driver has come or gone, or a volume that one pod alone may have is free: failed volumes and resource claims are
    /// worth another try now.
    DriversChanged,
    /// The health of the devices that the pod's containers have, as it is when this is taken in.
    Devices(DeviceHealth),
    /// The node ends the pod.
    Evicted(Verdict),
    /// There is room now for a resize that was deferred: it is asked for again.
    RoomFreed,
    /// Whether the runtime can give sandboxes a network has changed.
    Network(Network),
    /// The runtime answers again, after it had not.
    RuntimeBack,
    /// An operation of the plan has ended.
    Done {
        /// Which.
        key: Key,
        /// What came of it.
        outcome: Outcome,
    },
    /// The clock was set, or the machine has slept: by how much the time of day has moved.
    ClockMoved(SignedDuration),
    /// The time that the worker asked to be woken at, or an audit.
    Tick,
}

impl Input {
    /// A name for logs and records.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Input::Update(_) => "update",
            Input::Hint => "hint",
            Input::Happened(_) => "happened",
            Input::Probed { .. } => "probed",
            Input::VolumesChanged => "volumes-changed",
            Input::DriversChanged => "drivers-changed",
            Input::Devices(_) => "devices",
            Input::ClockMoved(_) => "clock-moved",
            Input::Evicted(_) => "evicted",
            Input::RoomFreed => "room-freed",
            Input::Network(_) => "network",
            Input::RuntimeBack => "runtime-back",
            Input::Done { .. } => "done",
            Input::Tick => "tick",
        }
    }
}

/// An operation that an executor carries out for the worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Op {
    /// Ask the runtime about the pod; at first also the logs, for restart counts.
    Observe {
        /// Whether the logs are asked too.
        logs: bool,
    },
    /// Ask the node whether it takes the pod. Ends when the node has decided.
    Admit,
    /// Ask the node whether the pod may have the sizes that its spec has now.
    Grow,
    /// Report to the node that the pod asks for no other sizes than it has.
    Withdraw,
    /// Bring a static pod's mirror in line.
    Mirror,
    /// Before a sandbox is made: find the runtime handler and the user namespace, make the cgroup and the directories.
    Prepare,
    /// Keep the cgroup and the directories of a pod that has a sandbox in order. No other operation waits for it.
    Upkeep,
    /// Set up the volumes, or refresh them.
    Volumes {
        /// They were set up before, by whoever started the containers that run.
        known: bool,
    },
    /// Make a sandbox.
    Sandbox {
        /// How many came before it.
        attempt: u32,
    },
    /// Make sure of a container's image.
    Pull(Start),
    /// Create and start a container, and run its postStart hook.
    Start {
        /// What is started, as what, and which attempt it is.
        start: Start,
        /// The sandbox that it joins, by its id in the runtime.
        sandbox: String,
        /// The sandbox's attempt: its message is made anew where it is not at hand.
        attempt: u32,
        /// The addresses that environment and hosts file show; empty on the host network.
        ips: Vec<String>,
    },
    /// Tell a sidecar that the pod ends, before it is its turn to stop: the event is sent and its preStop hook runs.
    PreStop {
        /// What is stopped, and what its event says.
        kill: Kill,
        /// When its grace period is over.
        until: Timestamp,
    },
    /// Stop a container: its preStop hook, the signal, and at the deadline SIGKILL.
    Stop {
        /// What is stopped, and what its event says.
        kill: Kill,
        /// It is the first try: the event is sent and the hook runs.
        first: bool,
        /// When its grace period is over.
        until: Timestamp,
    },
    /// Stop a sandbox and give its addresses back.
    StopSandbox(String),
    /// Give back the resource claims of a pod of which nothing runs any more, before its end is told.
    ReturnClaims,
    /// Stop containers at once and remove them, in this order, so that all start over (KEP-5532).
    RestartAll(Vec<Kill>),
    /// Bring running containers and the pod's cgroup to the sizes that were granted.
    Resize {
        /// The containers that have another size than they are to have, by name.
        names: Vec<String>,
        /// What all of them, and the cgroup, have afterwards.
        to: Sizes,
    },
    /// Remove ended containers and sandboxes that nobody needs any more.
    Collect {
        /// Containers: id, name and attempt.
        containers: Vec<(String, String, u32)>,
        /// Ids of sandboxes.
        sandboxes: Vec<String>,
    },
    /// Give back what the pod held; what is in the runtime and on disk only if its content goes.
    Release {
        /// Whether the content goes.
        content: bool,
    },
    /// Tell the API the last status and let it have the object back.
    Finalise,
}

/// What an operation is about. A worker has at most one under way for each.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Key {
    /// See [`Op::Observe`].
    Observe,
    /// See [`Op::Admit`].
    Admit,
    /// See [`Op::Grow`] and [`Op::Withdraw`]: the node gets them one after the other.
    Grow,
    /// See [`Op::Mirror`].
    Mirror,
    /// See [`Op::Prepare`].
    Prepare,
    /// See [`Op::Upkeep`].
    Upkeep,
    /// See [`Op::Volumes`].
    Volumes,
    /// See [`Op::Sandbox`].
    Sandbox,
    /// See [`Op::Pull`]; the container's name.
    Pull(String),
    /// See [`Op::Start`]; the container's name.
    Start(String),
    /// See [`Op::PreStop`]; the container's id.
    PreStop(String),
    /// See [`Op::Stop`]; the container's id.
    Stop(String),
    /// See [`Op::StopSandbox`]; its id.
    StopSandbox(String),
    /// See [`Op::ReturnClaims`].
    ReturnClaims,
    /// See [`Op::RestartAll`].
    RestartAll,
    /// See [`Op::Resize`].
    Resize,
    /// See [`Op::Collect`].
    Collect,
    /// See [`Op::Release`].
    Release,
    /// See [`Op::Finalise`].
    Finalise,
}

impl Op {
    /// Whether it changes what the runtime has.
    #[must_use]
    pub fn changes_runtime(&self) -> bool {
        matches!(
            self,
            Op::Sandbox { .. }
                | Op::Start { .. }
                | Op::PreStop { .. }
                | Op::Stop { .. }
                | Op::StopSandbox(_)
                | Op::RestartAll(_)
                | Op::Resize { .. }
                | Op::Collect { .. }
        )
    }

    /// What it is about.
    #[must_use]
    pub fn key(&self) -> Key {
        match self {
            Op::Observe { .. } => Key::Observe,
            Op::Admit => Key::Admit,
            Op::Grow | Op::Withdraw => Key::Grow,
            Op::Mirror => Key::Mirror,
            Op::Prepare => Key::Prepare,
            Op::Upkeep => Key::Upkeep,
            Op::Volumes { .. } => Key::Volumes,
            Op::Sandbox { .. } => Key::Sandbox,
            Op::Pull(start) => Key::Pull(start.container.name.clone()),
            Op::Start { start, .. } => Key::Start(start.container.name.clone()),
            Op::PreStop { kill, .. } => Key::PreStop(kill.id.clone()),
            Op::Stop { kill, .. } => Key::Stop(kill.id.clone()),
            Op::StopSandbox(id) => Key::StopSandbox(id.clone()),
            Op::ReturnClaims => Key::ReturnClaims,
            Op::RestartAll(_) => Key::RestartAll,
            Op::Resize { .. } => Key::Resize,
            Op::Collect { .. } => Key::Collect,
            Op::Release { .. } => Key::Release,
            Op::Finalise => Key::Finalise,
        }
    }
}

/// What came of an operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Outcome {
    /// What the runtime has, and for containers without an instance the attempt that follows their
    /// logs, by name.
    Observed {
        /// What the runtime has.
        #[serde(with = "super::stored::shared")]
        pod: Arc<ObservedPod>,
        /// Attempts by container name.
        logged: BTreeMap<String, u32>,
    },
    /// The node takes the pod.
    Admitted,
    /// The node does not take it.
    Refused {
        /// The reason in the status and the event.
        reason: String,
        /// The same in words, for people.
        message: String,
    },
    /// The pod has the sizes that its spec has.
    Granted,
    /// It does not have them yet.
    Deferred {
        /// The reason, for instance `OutOfmemory`.
        reason: String,
        /// The same in words, for people.
        message: String,
    },
    /// A sandbox was made.
    Sandbox {
        /// The runtime's id of it.
        id: String,
        /// Its addresses; empty on the host network.
        ips: Vec<String>,
    },
    /// It was given up while it waited for its turn, as the pod ends: nothing was done.
    NotBegun,
    /// A container was started, and its postStart hook has succeeded.
    Started {
        /// The runtime's id of it.
        id: String,
        /// What the runtime said of it afterwards, where it could be asked.
        #[serde(default)]
        seen: Option<Box<Container>>,
    },
    /// A container was started, and its postStart hook has failed: it runs, and is to be stopped.
    HookFailed {
        /// The runtime's id of it.
        id: String,
        /// What went wrong.
        message: String,
    },
    /// It is done.
    Done,
    /// A container cannot be started yet: the reason and message of its waiting state.
    Waiting {
        /// In one word, for instance `ErrImagePull`.
        reason: String,
        /// The same in words, for people.
        message: String,
        /// When another try makes sense, if that is known.
        until: Option<Timestamp>,
        /// What it waits for where that is not known.
        #[serde(default)]
        class: Class,
    },
    /// It is done, and something of it is to be tried again then.
    Again(Timestamp),
    /// What was there before still is, and could not be brought up to date.
    Outdated(String),
    /// It failed or its outcome is unknown.
    Failed(Fault),
}

impl From<Fault> for Outcome {
    fn from(fault: Fault) -> Outcome {
        Outcome::Failed(fault)
    }
}

/// An event about the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodEvent {
    /// The field path of the container, if it is about one.
    pub field_path: Option<String>,
    /// Whether it is a warning.
    pub warning: bool,
    /// In one word, for instance `BackOff`.
    pub reason: String,
    /// A sentence for people.
    pub message: String,
}
