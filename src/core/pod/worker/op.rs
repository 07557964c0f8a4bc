//! The operations of a worker, and the table of their properties.
//!
//! The worker begins at most one operation per [`Key`]. The executor (`agent::pod::sync`) carries the operation out and
//! sends [`Input::Done`](super::Input::Done) with the outcome. [`Op::facts`] is the only place that knows how the kinds
//! of operations differ for the worker: the key, whether the operation changes the runtime, when it is cancelled, which
//! retry its failures count for, and which steps of the journal it consists of. The parts of the worker read this
//! table. What matters to one part only stands in that part, for example which operations change the status soon.
//!
//! - **Changes the runtime**: if such an operation fails, its effect is unknown, as a call that timed out may still be
//!   carried out. The worker observes the runtime before it changes the runtime again.
//! - **Cancelled**: an operation without lasting effects is cancelled as soon as the pod terminates. An operation whose
//!   effect cannot be undone runs to its end, so that its result is known. Upstream cancels the context of the whole
//!   `SyncPod` call instead (`pkg/kubelet/pod_workers.go`).
//! - **Back-off**: failures count for the operation's own key, with two exceptions. Pulling the image and starting the
//!   container share one back-off, as the user sees one waiting container. A sandbox that was created resets its
//!   back-off only if its predecessor was stable.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Container;
use serde::{Deserialize, Serialize};

use crate::pod::Role;
use crate::pod::actions::{Kill, Start};
use crate::pod::journal::Step;
use crate::pod::resize::Sizes;

/// An operation that an executor carries out for the worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Op {
    /// Observe the pod in the runtime. The first observation also reads the logs, for restart counts.
    Observe {
        /// Whether the logs are read too.
        logs: bool,
    },
    /// Request admission by the node. Completes when the node has decided.
    Admit,
    /// Request the sizes of the pod's current spec from the node.
    #[serde(rename = "Grow")]
    RequestResize,
    /// Report to the node that the pod requests no other sizes than it has.
    #[serde(rename = "Withdraw")]
    CancelResize,
    /// Create or update a static pod's mirror.
    Mirror,
    /// Prepare for a sandbox: determine the runtime handler and the user namespace, and create the cgroup and the
    /// directories.
    Prepare,
    /// Check and repair the cgroup and the directories of a pod that has a sandbox. No other operation waits for this.
    Upkeep,
    /// Set up or refresh the volumes.
    Volumes {
        /// Whether the volumes were set up before, by the agent that started the running containers.
        known: bool,
    },
    /// Create a sandbox.
    Sandbox {
        /// The number of earlier sandboxes.
        attempt: u32,
    },
    /// Ensure that a container's image is present.
    Pull(Start),
    /// Create and start a container, and run its postStart hook.
    Start {
        /// The container with its role and attempt.
        start: Start,
        /// The id of the container's sandbox.
        sandbox: String,
        /// The sandbox's attempt, to rebuild the sandbox's configuration if it is not cached.
        attempt: u32,
        /// The sandbox's addresses, for the environment and the hosts file. Empty on the host network.
        ips: Vec<String>,
    },
    /// Run a sidecar's preStop hook and emit the event for its stop, before it is the sidecar's turn to stop.
    PreStop {
        /// The container, and the event's message.
        kill: Kill,
        /// When its grace period expires.
        until: Timestamp,
    },
    /// Stop a container: preStop hook, stop signal, and SIGKILL at the deadline.
    Stop {
        /// The container, and the event's message.
        kill: Kill,
        /// Whether this is the first try, which emits the event and runs the hook.
        first: bool,
        /// When its grace period expires.
        until: Timestamp,
    },
    /// Stop a sandbox and release its addresses.
    StopSandbox(String),
    /// Unprepare the resource claims of a pod that has stopped, before its terminal status is published.
    #[serde(rename = "ReturnClaims")]
    UnprepareClaims,
    /// Kill containers and remove them, in this order, so that all of them restart (KEP-5532).
    RestartAll(Vec<Kill>),
    /// Resize running containers and the pod's cgroup to the granted sizes.
    Resize {
        /// The names of the containers whose size differs from the granted one.
        names: Vec<String>,
        /// The sizes of all containers and the cgroup afterwards.
        to: Sizes,
    },
    /// Remove exited containers and stopped sandboxes that are no longer needed.
    Collect {
        /// Containers: id, name and attempt.
        containers: Vec<(String, String, u32)>,
        /// Ids of sandboxes.
        sandboxes: Vec<String>,
    },
    /// Release the pod's resources.
    Release {
        /// Whether containers, logs and directories are removed too.
        content: bool,
    },
    /// Write the last status and remove the object from the API.
    Finalise,
}

/// The subject of an operation. A worker runs at most one operation per key.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Key {
    /// See [`Op::Observe`].
    Observe,
    /// See [`Op::Admit`].
    Admit,
    /// See [`Op::RequestResize`] and [`Op::CancelResize`], which must reach the node in order.
    #[serde(rename = "Grow")]
    ResizeRequest,
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
    /// See [`Op::UnprepareClaims`].
    #[serde(rename = "ReturnClaims")]
    UnprepareClaims,
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

/// When an operation in progress is cancelled.
#[derive(Debug, Clone, Copy)]
pub(super) enum Cancel<'a> {
    /// Never: the effect cannot be undone, so the completion is awaited.
    Never,
    /// When the pod terminates.
    AtTermination,
    /// When the pod terminates, unless the operation is still planned.
    AtTerminationUnlessPlanned,
    /// When the pod terminates, or when the operation is planned for another definition of its container.
    AtTerminationOrChange {
        /// The container's definition.
        container: &'a Container,
    },
    /// When the sandbox is abandoned. If the container is not ephemeral, also when the pod terminates or all containers
    /// restart: an ephemeral container may debug a terminating pod.
    WithSandbox {
        /// Whether the container is ephemeral.
        ephemeral: bool,
    },
    /// When its container has exited. A preStop hook runs until then, even beyond the grace period.
    WhenExited {
        /// The container's id.
        id: &'a str,
    },
    /// When a stop of the same container with an earlier deadline is planned.
    ForEarlierDeadline {
        /// The deadline.
        until: Timestamp,
    },
}

impl Cancel<'_> {
    /// Whether an operation with the same key that is planned now replaces the one in progress.
    pub(super) fn is_replaced_by(self, planned: Cancel<'_>) -> bool {
        match (self, planned) {
            (
                Cancel::AtTerminationOrChange { container },
                Cancel::AtTerminationOrChange { container: new },
            ) => new != container,
            (Cancel::ForEarlierDeadline { until }, Cancel::ForEarlierDeadline { until: new }) => {
                new < until
            }
            _ => false,
        }
    }
}

/// Which retry the failures of an operation count for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum BackOff {
    /// That of the operation's own key. A success resets it.
    Own,
    /// That of the operation's own key. A success does not reset it.
    OwnKept,
    /// That of another operation. Only a success of the other operation resets it.
    Shared(Key),
}

/// The properties of an operation.
#[derive(Debug)]
pub(super) struct OpFacts<'a> {
    /// The operation's key.
    pub(super) key: Key,
    /// Whether the operation changes the runtime.
    pub(super) changes_runtime: bool,
    /// When the operation is cancelled.
    pub(super) cancel: Cancel<'a>,
    /// Whether the runtime must be observed after the operation was cancelled, as it may have been carried out in part.
    pub(super) observe_after_cancel: bool,
    /// Which retry its failures count for.
    pub(super) back_off: BackOff,
    /// The steps of the journal that the operation consists of, in order.
    steps: &'static [Step],
}

impl<'a> OpFacts<'a> {
    /// An operation that changes nothing in the runtime and is cancelled when the pod terminates.
    fn new(key: Key, steps: &'static [Step]) -> OpFacts<'a> {
        OpFacts {
            key,
            changes_runtime: false,
            cancel: Cancel::AtTermination,
            observe_after_cancel: false,
            back_off: BackOff::Own,
            steps,
        }
    }

    fn cancelled(self, cancel: Cancel<'a>) -> OpFacts<'a> {
        OpFacts { cancel, ..self }
    }

    fn changing_runtime(self) -> OpFacts<'a> {
        OpFacts {
            changes_runtime: true,
            ..self
        }
    }

    /// An operation that changes the runtime step by step.
    fn changing_runtime_in_parts(self) -> OpFacts<'a> {
        OpFacts {
            changes_runtime: true,
            observe_after_cancel: true,
            ..self
        }
    }

    fn backing_off(self, back_off: BackOff) -> OpFacts<'a> {
        OpFacts { back_off, ..self }
    }

    /// The key of the retry that the operation's failures count for.
    pub(super) fn failure_key(self) -> Key {
        match self.back_off {
            BackOff::Own | BackOff::OwnKept => self.key,
            BackOff::Shared(other) => other,
        }
    }
}

impl Op {
    /// The table of operations.
    pub(super) fn facts(&self) -> OpFacts<'_> {
        match self {
            Op::Observe { .. } => {
                OpFacts::new(Key::Observe, &[Step::Observe]).cancelled(Cancel::Never)
            }
            Op::Admit => OpFacts::new(Key::Admit, &[Step::Admission]),
            Op::RequestResize | Op::CancelResize => OpFacts::new(Key::ResizeRequest, &[]),
            Op::Mirror => OpFacts::new(Key::Mirror, &[Step::Mirror])
                .cancelled(Cancel::AtTerminationUnlessPlanned),
            Op::Prepare => OpFacts::new(Key::Prepare, &[Step::Cgroup, Step::Directories]),
            Op::Upkeep => OpFacts::new(Key::Upkeep, &[Step::Cgroup, Step::Directories]),
            Op::Volumes { .. } => OpFacts::new(Key::Volumes, &[Step::Objects, Step::Volume]),
            Op::Sandbox { .. } => OpFacts::new(Key::Sandbox, &[Step::Claims, Step::Sandbox])
                .changing_runtime()
                .cancelled(Cancel::Never)
                .backing_off(BackOff::OwnKept),
            Op::Pull(start) => {
                let name = || start.container.name.clone();
                OpFacts::new(Key::Pull(name()), &[Step::Image])
                    .cancelled(Cancel::AtTerminationOrChange {
                        container: &start.container,
                    })
                    .backing_off(BackOff::Shared(Key::Start(name())))
            }
            Op::Start { start, .. } => {
                let key = Key::Start(start.container.name.clone());
                let ephemeral = start.role == Role::Ephemeral;
                OpFacts::new(key, &[Step::Create, Step::Start, Step::PostStart])
                    .changing_runtime_in_parts()
                    .cancelled(Cancel::WithSandbox { ephemeral })
            }
            Op::PreStop { kill, .. } => {
                OpFacts::new(Key::PreStop(kill.id.clone()), &[Step::PreStop])
                    .changing_runtime()
                    .cancelled(Cancel::WhenExited { id: &kill.id })
            }
            Op::Stop { kill, until, .. } => {
                OpFacts::new(Key::Stop(kill.id.clone()), &[Step::PreStop, Step::Stop])
                    .changing_runtime()
                    .cancelled(Cancel::ForEarlierDeadline { until: *until })
            }
            Op::StopSandbox(id) => OpFacts::new(Key::StopSandbox(id.clone()), &[Step::StopSandbox])
                .changing_runtime()
                .cancelled(Cancel::Never),
            Op::UnprepareClaims => OpFacts::new(Key::UnprepareClaims, &[Step::UnprepareClaims])
                .cancelled(Cancel::Never),
            Op::RestartAll(_) => {
                OpFacts::new(Key::RestartAll, &[Step::Stop]).changing_runtime_in_parts()
            }
            Op::Resize { .. } => {
                OpFacts::new(Key::Resize, &[Step::Resize]).changing_runtime_in_parts()
            }
            Op::Collect { .. } => OpFacts::new(Key::Collect, &[]).changing_runtime_in_parts(),
            Op::Release { .. } => {
                OpFacts::new(Key::Release, &[Step::Release]).cancelled(Cancel::Never)
            }
            Op::Finalise => OpFacts::new(Key::Finalise, &[Step::Finalise]).cancelled(Cancel::Never),
        }
    }

    /// The operation's key.
    #[must_use]
    pub fn key(&self) -> Key {
        self.facts().key
    }

    /// The steps of the journal that the operation consists of, in order.
    #[must_use]
    pub fn steps(&self) -> &'static [Step] {
        self.facts().steps
    }

    /// Whether the operation starts a container.
    pub(super) fn starts_container(&self) -> bool {
        matches!(self, Op::Start { .. })
    }

    /// Whether the operation creates a sandbox.
    pub(super) fn creates_sandbox(&self) -> bool {
        matches!(self, Op::Sandbox { .. })
    }

    /// Whether something of the pod may run as long as the operation is in progress.
    pub(super) fn delays_end(&self) -> bool {
        self.starts_container() || self.creates_sandbox() || matches!(self, Op::Stop { .. })
    }

    /// The deadline of a stop or a preStop hook.
    pub(super) fn deadline_mut(&mut self) -> Option<&mut Timestamp> {
        match self {
            Op::Stop { until, .. } | Op::PreStop { until, .. } => Some(until),
            _ => None,
        }
    }

    /// The container whose image is pulled or which is started.
    pub(super) fn started_container(&self) -> Option<&str> {
        match self {
            Op::Pull(start) | Op::Start { start, .. } => Some(&start.container.name),
            _ => None,
        }
    }
}
