//! The worker of one pod: inputs go in, operations come out. Pure.
//!
//! [`Worker::turn`] takes one [`Input`], advances the lifecycle, computes the status and replans from scratch. The plan
//! is a set of operations. Those that are already running continue; those that have become pointless are cancelled.
//! After every input, therefore, everything that can be done is being done. Whatever waits has a running operation, a
//! wake-up time, or a cause that only another input can change.
//!
//! The submodule `apply` applies an input to the worker's state. `plan` computes the operations
//! (`pkg/kubelet/pod_workers.go` and `SyncPod` upstream), `stop` the order in which containers stop. `adopt` takes over
//! the status in the API, `event_effect` decides which runtime events change anything, and `audit` checks terminating pods
//! periodically.

mod adopt;
mod apply;
mod audit;
mod clock;
mod event_effect;
mod input;
mod plan;
mod stop;
mod stored;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use serde::{Deserialize, Serialize};

pub use input::{Identity, Input, Key, Network, Op, Outcome, PodEvent, Update};

use super::Role;
use super::actions;
use super::lifecycle::{self, Cause, State, Verdict};
use super::observed::{ContainerState, ObservedPod, RuntimeEvent};
use super::probe::Probed;
use super::resize::{self, Resizing, Sizes};
use super::status::devices::OfPod as DeviceHealth;
use super::status::{self, Problems};
use crate::backoff::Backoff;
use crate::fault::Class;
use crate::pod;
use crate::time;

/// Maximum delay of a status while further changes are imminent. It applies to a pending pod during its start, and to a
/// pod whose containers have all exited while its sandbox is being stopped.
const STATUS_DELAY: SignedDuration = SignedDuration::from_secs(1);

/// The configuration that decisions depend on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rules {
    /// Interval of volume refreshes.
    pub sync_frequency: SignedDuration,
    /// Maximum crash-loop back-off.
    pub max_backoff: SignedDuration,
    /// Whether static pods have mirrors, which requires an API.
    pub mirrors: bool,
    /// Whether the runtime supports recursive read-only mounts for the pod.
    pub recursive_read_only: bool,
    /// The name of the container runtime, which is part of container ids. Empty if it is unknown.
    #[serde(default)]
    pub runtime: String,
}

/// The circumstances of a turn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// The current time, which all timers are compared with.
    pub now: Timestamp,
    /// The node's addresses, which pods on the host network have. The primary one comes first.
    pub node_ips: Vec<String>,
    /// The failing step before the first container, as a sentence.
    pub blocking_reason: Option<String>,
    /// The configuration.
    pub rules: Rules,
}

/// The result of a turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Turn {
    /// Operations to cancel, because they are pointless or will begin again.
    pub cancel: Vec<Key>,
    /// Operations to begin.
    pub begin: Vec<Op>,
    /// The status to pass to the status writer.
    pub publish: Option<Arc<PodStatus>>,
    /// Events about the pod.
    pub events: Vec<PodEvent>,
    /// Transitions of the lifecycle: the state before, the input, the state after.
    pub decisions: Vec<(State, lifecycle::Input, State)>,
    /// When to send [`Input::Tick`] unless another input arrives before.
    pub wake_at: Option<Timestamp>,
    /// Whether an observation was accepted, so that probes must be updated.
    pub observed: bool,
    /// Whether the pod has left this node, so that its worker exits.
    pub left_node: bool,
    /// Whether the input changed nothing that decisions depend on, and no timer had expired.
    pub unchanged: bool,
}

/// An operation that has failed, and its next try.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Retry {
    key: Key,
    failures: u32,
    /// When the last failure happened.
    since: Timestamp,
    until: Timestamp,
    class: Class,
}

/// The state of the pod's volumes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct VolumeState {
    /// When the volumes were last set up or refreshed.
    at: Option<Timestamp>,
    /// Whether the volumes need a refresh before the regular interval: their sources have changed, or the last refresh
    /// failed.
    stale: bool,
    /// Whether a watched object has changed since the last refresh began.
    #[serde(default)]
    changed: bool,
    /// When the last refresh for a change began. `None` if there was none yet.
    #[serde(default)]
    changed_at: Option<Timestamp>,
    /// A hash of the pod's fields that its files expose.
    shape: u64,
    /// Whether the volumes are up to date for the planned starts.
    fresh: bool,
    /// When to retry a part of the volumes that blocks nothing.
    #[serde(default, rename = "again")]
    retry_at: Option<Timestamp>,
}

/// The state of a request for other sizes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
enum ResizeRequest {
    /// The pod has the sizes of its spec.
    #[default]
    #[serde(rename = "Settled")]
    None,
    /// The pod has the sizes of its spec again, but the node may still have other sizes allocated or queued.
    #[serde(rename = "Withdrawn")]
    ToCancel,
    /// The sizes must be requested from the node.
    #[serde(rename = "Wanted")]
    ToSend,
    /// The node has deferred or rejected the request. It is repeated when resources are freed.
    Deferred,
}

/// The worker of one pod. All of its state can be rebuilt from the runtime and the API. It has no references to the
/// outside, so that it can be serialised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// The state of the pod's lifecycle.
    pub state: State,
    /// The current status. It may not have been published yet.
    #[serde(with = "stored::shared")]
    pub status: Arc<PodStatus>,
    /// The pod in the runtime: the last observation, updated with the results of later operations.
    #[serde(with = "stored::optional")]
    pub observed: Option<Arc<ObservedPod>>,
    /// What the pod waits for, if it is not as specified and no step is running or failing.
    pub waiting: Option<String>,
    update: Update,
    /// The pod with its granted sizes.
    #[serde(with = "stored::shared")]
    effective: Arc<Pod>,
    granted: Sizes,
    /// The newest generation that the node has granted or rejected.
    #[serde(default, rename = "decided")]
    decided_generation: Option<i64>,
    /// The sizes that the runtime should have: the granted ones.
    #[serde(default)]
    wanted: Sizes,
    #[serde(rename = "growth")]
    resize_request: ResizeRequest,
    /// Whether resources were freed while a request for other sizes was running. If the request is deferred, it is
    /// repeated at once.
    #[serde(default, rename = "room_freed")]
    resources_freed: bool,
    resizing: Resizing,
    #[serde(default, with = "stored::optional")]
    published: Option<Arc<PodStatus>>,
    publish_at: Option<Timestamp>,
    /// Whether the status in the API was adopted.
    adopted: bool,
    /// Whether the status came from a static pod's mirror and is past Pending. If the runtime has nothing of the pod,
    /// the status belongs to an earlier run.
    #[serde(default, rename = "earlier_life")]
    status_from_mirror: bool,
    /// The terminal status that the API had before this worker published one. It is kept.
    #[serde(default, rename = "end")]
    adopted_terminal_status: Option<PodStatus>,
    admitted: bool,
    /// Whether the pod must be observed, as the runtime may have changes.
    #[serde(rename = "look")]
    observe_needed: bool,
    /// Events that a running operation may have caused. They are evaluated when it completes.
    #[serde(default)]
    events: Vec<RuntimeEvent>,
    /// Whether the outcome of an operation is unknown. The runtime is not changed before the next observation.
    #[serde(rename = "unsure")]
    outcome_unknown: bool,
    /// Counts changes to the runtime. An observation that began before the last change is discarded.
    #[serde(rename = "acted")]
    epoch: u64,
    /// The epoch when the last observation began.
    #[serde(rename = "observing")]
    observed_epoch: u64,
    /// Whether `observed` has results of operations that no observation has confirmed.
    #[serde(rename = "provisional")]
    assumed: bool,
    logged: BTreeMap<String, u32>,
    counts: BTreeMap<String, u32>,
    probed: Probed,
    /// The health of the containers' devices.
    #[serde(default)]
    devices: DeviceHealth,
    problems: Problems,
    backoff: Backoff,
    /// Attempts whose back-off event was emitted, by container.
    #[serde(rename = "announced")]
    backoff_events: BTreeMap<String, u32>,
    retries: Vec<Retry>,
    in_flight: Vec<Op>,
    /// Operations during which something changed that ends the pause after failures of this class. If such an operation
    /// fails, the failure may be older than the change.
    #[serde(default)]
    overtaken: Vec<(Key, Class)>,
    /// When the grace period of stopping containers expires, by id.
    stops: BTreeMap<String, Timestamp>,
    /// When the grace period of the whole pod expires.
    stop_by: Option<Timestamp>,
    stopped_sandboxes: BTreeSet<String>,
    /// When the pod was last prepared for a sandbox.
    prepared_at: Option<Timestamp>,
    /// When its cgroup and directories were last checked.
    #[serde(default, rename = "kept_at")]
    upkeep_at: Option<Timestamp>,
    volumes: VolumeState,
    /// Containers whose image is present for the planned start.
    images: BTreeSet<String>,
    network: Network,
    /// Whether the event about the node's network was emitted.
    #[serde(rename = "network_told")]
    network_event_emitted: bool,
    /// Containers that the runtime reported as stopped. Those that still run are stopped again.
    stop_done: BTreeSet<String>,
    /// Ids of containers that this worker stops in order to restart them, whatever their exit code. With `OnFailure`, a
    /// container that exits with 0 on SIGTERM has not finished its work. As upstream, this is stored nowhere else:
    /// after a restart, the agent decides by the exit code alone.
    #[serde(default)]
    stopped_to_restart: BTreeSet<String>,
    /// Containers whose postStart hook failed: names by id. They are stopped, and later containers start only after
    /// they have exited.
    #[serde(default)]
    failed_hooks: BTreeMap<String, String>,
    /// When the last sandbox was created.
    sandbox_at: Option<Timestamp>,
    /// When the mirror was last written, and the identity of the API object at that time.
    mirrored: Option<(Option<Identity>, Timestamp)>,
    verdict: Option<Verdict>,
    /// When the plan must be computed again.
    wake_at: Option<Timestamp>,
    /// When a terminating pod is audited if nothing happens before.
    #[serde(default)]
    audit_at: Option<Timestamp>,
    /// Whether the pod has completed: its regular containers have finished, but sidecars may still run.
    completed: bool,
    /// Whether its resource claims were unprepared.
    #[serde(default, rename = "claims_returned")]
    claims_unprepared: bool,
    /// For a finished pod: whether the runtime may have something of it again, as it may carry out a cancelled call
    /// late.
    #[serde(default)]
    recheck: bool,
    /// For a finished pod: whether the runtime has something of it, so that its content must be released again.
    #[serde(default, rename = "leftover")]
    has_leftovers: bool,
    finalised: bool,
}

impl Worker {
    /// Creates the worker of a pod that the agent received at `now`.
    #[must_use]
    pub fn new(update: Update, network: Network, now: Timestamp) -> Worker {
        let granted = resize::known(&update.pod);
        let mut worker = Worker {
            state: State::Syncing,
            status: Arc::default(),
            observed: None,
            waiting: None,
            effective: Arc::clone(&update.pod),
            resizing: Resizing::adopted(&update.pod),
            granted,
            decided_generation: update
                .pod
                .status
                .as_ref()
                .and_then(|s| s.observed_generation),
            wanted: Sizes::default(),
            resize_request: ResizeRequest::None,
            resources_freed: false,
            published: None,
            publish_at: None,
            adopted: false,
            status_from_mirror: false,
            adopted_terminal_status: None,
            admitted: false,
            observe_needed: true,
            events: vec![],
            outcome_unknown: true,
            epoch: 0,
            observed_epoch: 0,
            assumed: false,
            logged: BTreeMap::new(),
            counts: BTreeMap::new(),
            probed: Probed::default(),
            devices: DeviceHealth::new(),
            problems: Problems::new(),
            backoff: Backoff::default(),
            backoff_events: BTreeMap::new(),
            retries: vec![],
            in_flight: vec![],
            overtaken: vec![],
            stops: BTreeMap::new(),
            stop_by: None,
            stopped_sandboxes: BTreeSet::new(),
            prepared_at: None,
            upkeep_at: None,
            volumes: VolumeState::default(),
            images: BTreeSet::new(),
            network,
            network_event_emitted: false,
            stop_done: BTreeSet::new(),
            stopped_to_restart: BTreeSet::new(),
            failed_hooks: BTreeMap::new(),
            sandbox_at: None,
            mirrored: None,
            verdict: None,
            wake_at: None,
            audit_at: None,
            completed: false,
            claims_unprepared: false,
            recheck: false,
            has_leftovers: false,
            finalised: false,
            update,
        };
        worker.adopt_update();
        let intent = worker.update.intent();
        worker.state = State::Syncing.step(lifecycle::Input::Intent(intent));
        worker.limit_grace(now);
        worker
    }

    /// Applies an input and returns the consequences.
    pub fn turn(&mut self, facts: &Facts, input: Input) -> Turn {
        let mut turn = Turn::default();
        let resizing = self.is_resizing();
        // Even if the input changes nothing, a timer may have expired.
        let due = self.wake_at.is_some_and(|at| at <= facts.now);
        turn.unchanged = !self.apply(facts, input, &mut turn) && !due;
        if !turn.unchanged {
            self.advance(facts, &mut turn);
            self.replan(facts, &mut turn);
            self.plan_audit(facts, &mut turn);
            self.wake_at = turn.wake_at;
            if resizing && !self.is_resizing() && !self.state.is_ending() {
                let message = format!(
                    "Pod resize completed: {}",
                    resize::described(&self.effective, None)
                );
                turn.events.push(event("ResizeCompleted", message));
            }
        }
        turn.wake_at = self.wake_at.filter(|at| *at > facts.now);
        self.publish(facts, &mut turn);
        turn.left_node = self.has_left_node();
        debug_assert!(
            turn.left_node || !self.is_idle() || !self.has_unscheduled_ops(facts),
            "a worker sleeps although work is left: {self:?}"
        );
        turn
    }

    /// Whether the plan has an operation that is neither running nor waits for a time. Nothing would ever wake the
    /// worker for it.
    fn has_unscheduled_ops(&self, facts: &Facts) -> bool {
        let mut probe = self.clone();
        let mut turn = Turn::default();
        probe.replan(facts, &mut turn);
        !turn.begin.is_empty() || !turn.cancel.is_empty()
    }

    /// The pod with its granted sizes.
    #[must_use]
    pub fn pod(&self) -> &Arc<Pod> {
        &self.effective
    }

    /// The latest desired state.
    #[must_use]
    pub fn update(&self) -> &Update {
        &self.update
    }

    /// The results of probes.
    #[must_use]
    pub fn probed(&self) -> &Probed {
        &self.probed
    }

    /// The status that was last passed to the status writer.
    #[must_use]
    pub fn published(&self) -> Option<&Arc<PodStatus>> {
        self.published.as_ref()
    }

    /// The progress of a resize.
    #[must_use]
    pub fn resizing(&self) -> &Resizing {
        &self.resizing
    }

    /// Containers that are being started. Their postStart hook may still run, or has failed.
    #[must_use]
    pub fn starting(&self) -> BTreeSet<&str> {
        let starting = self.in_flight.iter().filter_map(|op| match op {
            Op::Start { start, .. } => Some(start.container.name.as_str()),
            _ => None,
        });
        let failed = self.failed_hooks.values().map(String::as_str);
        starting.chain(failed).collect()
    }

    /// Whether no operation is running.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    fn is_in_flight(&self, key: &Key) -> bool {
        self.in_flight.iter().any(|op| op.key() == *key)
    }

    fn is_resizing(&self) -> bool {
        let observed = self.observed.as_ref();
        let runs = |name: &str| observed.is_some_and(|o| o.runs(name));
        self.resizing.is_under_way(&self.wanted, runs)
    }

    /// Whether the worker is no longer needed: its content is released, and the API has no object, or keeps it only
    /// because of finalizers. In that case the source reports the removal.
    fn has_left_node(&self) -> bool {
        let State::Finished { cause } = self.state else {
            return false;
        };
        match cause {
            Cause::Removed => true,
            Cause::Deleted => self.update.removed || self.update.object.is_none(),
            _ => false,
        }
    }

    fn step(&mut self, input: lifecycle::Input, facts: &Facts, turn: &mut Turn) {
        let before = self.state;
        self.state = before.step(input);
        turn.decisions.push((before, input, self.state));
        self.limit_grace(facts.now);
        if before != self.state {
            // Failures in one state do not apply to the next.
            self.retries.clear();
        }
    }

    /// The grace period of a terminating pod begins now. An earlier deadline stays.
    fn limit_grace(&mut self, now: Timestamp) {
        if let State::Terminating { grace, .. } = self.state {
            let until = time::in_seconds(now, grace);
            self.stop_by = Some(self.stop_by.map_or(until, |before| before.min(until)));
        }
    }

    /// Advances the lifecycle as far as possible.
    fn advance(&mut self, facts: &Facts, turn: &mut Turn) {
        loop {
            self.compute_status(facts);
            let Some(input) = self.next_step(facts, turn) else {
                break;
            };
            let before = self.state;
            self.step(input, facts, turn);
            if before == self.state {
                break;
            }
        }
    }

    /// The next input of the lifecycle, if one is due.
    fn next_step(&mut self, facts: &Facts, turn: &mut Turn) -> Option<lifecycle::Input> {
        let ended = |cause, grace| Some(lifecycle::Input::Terminate { cause, grace });
        let own_grace = pod::grace_seconds(&self.effective);
        match self.state {
            State::Syncing => {
                if let Some(verdict) = &self.verdict {
                    return ended(verdict.cause, verdict.grace.unwrap_or(own_grace));
                }
                if self.observed.is_none() || !self.admitted {
                    return None;
                }
                if self.completed || self.plan_actions().must_terminate {
                    return ended(Cause::Completed, own_grace);
                }
                let until = status::deadline(&self.effective, &self.status)?;
                if until > facts.now {
                    return None;
                }
                let message = "Pod was active on the node longer than the specified deadline";
                turn.events.push(event("DeadlineExceeded", message.into()));
                self.verdict = Some(Verdict {
                    cause: Cause::DeadlineExceeded,
                    reason: "DeadlineExceeded".into(),
                    message: message.into(),
                    disruption: None,
                    grace: None,
                });
                ended(Cause::DeadlineExceeded, own_grace)
            }
            State::Terminating { .. } => (self.has_stopped() && !self.needs_claim_release())
                .then_some(lifecycle::Input::Stopped),
            State::Terminated { .. } | State::Finished { .. } => None,
        }
    }

    /// The actions that bring the runtime to the desired state.
    fn plan_actions(&self) -> actions::PodActions {
        let Some(observed) = &self.observed else {
            return actions::PodActions::default();
        };
        let health = actions::Health {
            probed: &self.probed,
            wanted: &self.wanted,
            resizing: &self.resizing,
            stopped_to_restart: &self.stopped_to_restart,
        };
        let mut actions = actions::compute(&self.effective, observed, &health, |name| {
            self.restart_count(name)
        });
        if !actions.kill_pod {
            self.stop_failed_hooks(&mut actions.kill);
        }
        actions
    }

    /// The restart count of a container without instances. This is the maximum of the count in the status, of the count
    /// after a restart of all containers, and of the count in the logs (`calcRestartCountByLogDir` in
    /// `pkg/kubelet/kuberuntime/kuberuntime_container.go`).
    fn restart_count(&self, name: &str) -> u32 {
        let status = &self.status;
        let known = [&status.container_statuses, &status.init_container_statuses]
            .into_iter()
            .flatten()
            .flatten()
            .find(|s| s.name == name)
            .map_or(0, |s| u32::try_from(s.restart_count).unwrap_or(0));
        let logged = self.logged.get(name).copied().unwrap_or(0);
        known
            .max(logged)
            .max(self.counts.get(name).copied().unwrap_or(0))
    }

    /// Whether observations can no longer change the status: the containers have been removed, or admission rejected
    /// the pod before it was started. The containers of such a pod must not be reported as lost, even by a later agent.
    fn status_stands(&self, observed: &ObservedPod) -> bool {
        if let State::Finished { cause } = self.state
            && cause.removes_content()
        {
            return true;
        }
        let status = &self.status;
        let lists = [&status.container_statuses, &status.init_container_statuses];
        status.phase.as_deref() == Some("Failed")
            && self.verdict.is_none()
            && observed.containers.is_empty()
            && lists.iter().all(|list| list.is_none())
    }

    fn compute_status(&mut self, facts: &Facts) {
        let Some(observed) = &self.observed else {
            return;
        };
        let ended = self.state.has_stopped();
        if self.status_stands(observed) {
            self.completed = pod::is_final(&self.status);
            return;
        }
        if let Some(terminal) = self.adopted_terminal_status.as_ref().filter(|_| !ended) {
            // Containers that still run are reported once they have stopped.
            self.set_status(terminal.clone());
            self.completed = true;
            return;
        }
        let failed = &self.failed_hooks;
        self.problems.retain(|name, (reason, _)| {
            failed.values().any(|of| of == name)
                || !is_settled(&self.effective, observed, name, reason)
        });
        let mut status = status::compute(&status::Facts {
            pod: &self.effective,
            observed,
            previous: &self.status,
            problems: &self.problems,
            blocking_reason: facts.blocking_reason.clone(),
            probed: &self.probed,
            devices: &self.devices,
            has_volumes: self.has_volumes(observed),
            starting: &self.starting(),
            stopped_to_restart: &self.stopped_to_restart,
            wanted: &self.wanted,
            resize: &self.resizing,
            node_ips: &facts.node_ips,
            recursive_read_only: facts.rules.recursive_read_only,
            runtime: &facts.rules.runtime,
            ended,
            verdict: self.verdict.as_ref(),
            now: facts.now,
        });
        if let Some(terminal) = &self.adopted_terminal_status {
            status::keep_terminal_status(&mut status, terminal);
        }
        self.completed = pod::is_final(&status);
        let becomes_final = self.completed && !pod::is_final(&self.status);
        let has_live = observed.live().next().is_some() || self.may_be_starting();
        if becomes_final && !ended && has_live {
            // A terminal phase means that no container runs any more, including sidecars.
            status.phase = Some("Running".into());
        } else if becomes_final && self.needs_claim_release() {
            // A terminal phase also means that the pod's devices are released.
            let before = self.status.phase.clone();
            status.phase = before.or_else(|| Some("Pending".into()));
        }
        self.set_status(status);
    }

    /// Whether the volumes are set up, by this agent or by the one that created a container in the pod's sandbox.
    fn has_volumes(&self, observed: &ObservedPod) -> bool {
        let sandbox = observed.sandboxes.first();
        let mut containers = observed.containers.iter();
        self.volumes.at.is_some() || containers.any(|c| sandbox.is_some_and(|s| s.id == c.sandbox))
    }

    /// Sets the status. An equal status keeps its shared copy.
    fn set_status(&mut self, status: PodStatus) {
        if *self.status != status {
            self.status = Arc::new(status);
        }
    }

    /// Publishes the status if it has changed: at once, or after a delay while further changes are imminent.
    fn publish(&mut self, facts: &Facts, turn: &mut Turn) {
        if self.status.phase.is_none() {
            // A status that came from a mirror is not published before the runtime was observed.
            return;
        }
        let differs = match (&self.published, self.state) {
            (None, _) => true,
            // The observed generation of a deletion is published with the terminal status, which follows soon.
            (Some(published), state)
                if matches!(state, State::Terminating { .. }) || self.update.intent().deleted =>
            {
                status::substance(published) != status::substance(&self.status)
            }
            (Some(published), _) => *published != self.status,
        };
        if !differs {
            self.publish_at = None;
            return;
        }
        // Changes of a running pod are published at once: others may depend on them, for example on a lost readiness.
        let is_pending = self
            .published
            .as_ref()
            .is_some_and(|published| published.phase.as_deref() == Some("Pending"));
        let changing = |op: &Op| match (self.state, op) {
            (State::Syncing, Op::Sandbox { .. } | Op::Pull(_) | Op::Start { .. }) => is_pending,
            // The observation will complete the status of the container that was started.
            (State::Syncing, Op::Observe { .. }) => self.assumed,
            // The status of a completed pod does not wait for its sandbox, whose stop may be queued behind others.
            (
                State::Terminating {
                    cause: Cause::Completed,
                    ..
                },
                Op::StopSandbox(_),
            ) => false,
            (State::Terminating { .. }, Op::StopSandbox(_) | Op::Observe { .. }) => {
                let observed = self.observed.as_ref();
                observed.is_some_and(|o| o.live().next().is_none())
            }
            _ => false,
        };
        // The first status never waits: it shows later agents that the pod was admitted and may have containers.
        let waits = self.published.is_some() && self.in_flight.iter().any(changing);
        let due = match (waits, self.publish_at) {
            (false, _) => true,
            (true, Some(at)) => at <= facts.now,
            (true, None) => {
                self.publish_at = Some(time::later(facts.now, STATUS_DELAY));
                false
            }
        };
        if due {
            self.publish_at = None;
            self.published = Some(Arc::clone(&self.status));
            turn.publish = Some(Arc::clone(&self.status));
        } else if let Some(at) = self.publish_at {
            turn.wake_at = Some(turn.wake_at.map_or(at, |wake| wake.min(at)));
        }
    }
}

/// Whether a container is running, or is an init container that has succeeded. Then the cause that blocked its start is
/// over, even if the response to its start was lost. A container that restarts together with all others is still to be
/// removed.
fn is_settled(pod: &Pod, observed: &ObservedPod, name: &str, reason: &str) -> bool {
    if reason == status::RESTARTING_ALL {
        return false;
    }
    let init = pod::containers(pod)
        .iter()
        .any(|(role, c)| *role == Role::Init && c.name == name);
    observed.newest(name).is_some_and(|c| {
        c.state == ContainerState::Running
            || (init && c.state == ContainerState::Exited && c.exit_code == 0)
    })
}

fn event(reason: &str, message: String) -> PodEvent {
    PodEvent {
        field_path: None,
        warning: false,
        reason: reason.into(),
        message,
    }
}

fn warning(reason: &str, message: String) -> PodEvent {
    PodEvent {
        warning: true,
        ..event(reason, message)
    }
}
