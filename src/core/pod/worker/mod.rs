//! The worker of one pod: inputs go in, operations come out. Pure.
//!
//! [`Worker::turn`] takes one [`Input`], advances the lifecycle, computes the status and replans from scratch. The plan
//! is a set of operations. Those that are already running continue; those that have become pointless are cancelled.
//! After every input, therefore, everything that can be done is being done. Whatever waits has a running operation, a
//! wake-up time, or a cause that only another input can change.
//!
//! The worker consists of parts. Each part is a file that holds its state, applies the inputs that concern it
//! (`apply_…`), and proposes operations:
//!
//! | Part | State |
//! |---|---|
//! | `desired` | the update of the source, granted sizes, the resize request |
//! | `observation` | the observed pod, and how far it can be trusted |
//! | `readiness`, `volumes` | cgroup, directories, sandbox, network, images, volumes |
//! | `operations` | operations in progress, and the back-off of failed ones |
//! | `restarts` | the crash-loop back-off, restart counts, failed hooks |
//! | `stops` | deadlines, and what has stopped |
//! | `health` | results of probes, health of devices |
//! | `publication` | the status, and what of it is published |
//! | `ending` | verdicts, leftovers, the removal of the object |
//!
//! No part reads another one. This file and three others put the parts together. `outcome` passes the outcome of an
//! operation to the parts, `plan` collects the proposals (`SyncPod` upstream), and `start` decides whether a container
//! starts now. `op` has the table of operations. Upstream keeps this state in `pkg/kubelet/pod_workers.go`, and in the
//! caches of a dozen managers.

mod clock;
mod desired;
mod ending;
mod event_effect;
mod health;
mod input;
mod observation;
mod op;
mod operations;
mod outcome;
mod plan;
mod publication;
mod readiness;
mod restarts;
mod start;
mod stops;
mod stored;
#[cfg(test)]
mod tests;
mod volumes;

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use serde::{Deserialize, Serialize};

pub use input::{Identity, Input, Network, Outcome, PodEvent, Update};
pub use op::{Key, Op};

use desired::{Change, Desired};
use ending::Ending;
use health::Health;
use observation::Observation;
use operations::Operations;
use publication::Publication;
use readiness::Readiness;
use restarts::Restarts;
use stops::Stops;

use super::actions;
use super::lifecycle::{self, Cause, State, Verdict};
use super::observed::{ObservedPod, RuntimeEvent};
use super::probe::Probed;
use super::resize::Resizing;
use super::resources;
use super::status;
use crate::fault::Class;
use crate::node::claims::has_claims;
use crate::pod;
use crate::time;

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

/// The worker of one pod. All of its state can be rebuilt from the runtime and the API. It has no references to the
/// outside, so that it can be serialised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// The state of the pod's lifecycle.
    pub state: State,
    desired: Desired,
    observation: Observation,
    readiness: Readiness,
    operations: Operations,
    restarts: Restarts,
    stops: Stops,
    health: Health,
    publication: Publication,
    ending: Ending,
    /// When the plan must be computed again.
    wake_at: Option<Timestamp>,
}

impl Worker {
    /// Creates the worker of a pod that the agent received at `now`.
    #[must_use]
    pub fn new(update: Update, network: Network, now: Timestamp) -> Worker {
        let intent = update.intent();
        let mut worker = Worker {
            state: State::Syncing.step(lifecycle::Input::Intent(intent)),
            desired: Desired::new(update),
            observation: Observation::new(),
            readiness: Readiness::new(network),
            operations: Operations::default(),
            restarts: Restarts::default(),
            stops: Stops::default(),
            health: Health::default(),
            publication: Publication::new(),
            ending: Ending::default(),
            wake_at: None,
        };
        worker.adopt_update();
        worker.limit_grace(now);
        worker
    }

    /// Applies an input and returns the consequences.
    pub fn turn(&mut self, facts: &Facts, input: Input) -> Turn {
        let mut turn = Turn::default();
        let was_resizing = self.is_resizing();
        // Even if the input changes nothing, a timer may have expired.
        let due = self.wake_at.is_some_and(|at| at <= facts.now);
        turn.unchanged = !self.apply(facts, input, &mut turn) && !due;
        if !turn.unchanged {
            self.advance(facts, &mut turn);
            self.replan(facts, &mut turn);
            self.schedule_audit(facts, &mut turn);
            self.wake_at = turn.wake_at;
            if was_resizing && !self.is_resizing() && !self.state.is_ending() {
                turn.events.push(self.desired.resize_completed());
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

    /// Applies an input. Returns false if at most the status must be published again.
    fn apply(&mut self, facts: &Facts, input: Input, turn: &mut Turn) -> bool {
        match input {
            Input::Update(update) => return self.apply_update(facts, update, turn),
            Input::Hint => {
                self.observation.require();
                self.ending.apply_hint(self.state);
            }
            Input::RuntimeEvent(event) => return self.apply_event(event),
            Input::Probed { id, kind, result } => self.health.apply_probe(id, kind, result),
            Input::VolumesChanged => {
                self.readiness.volumes.apply_change();
                self.operations.forget(&Key::Volumes);
                self.wake_retries(&[Class::WaitForChange]);
            }
            // Changes since the outage are found by the listing.
            Input::RuntimeBack => self.wake_retries(&[Class::WaitForChange]),
            Input::DriversChanged => {
                self.operations.forget(&Key::Volumes);
                if has_claims(self.update().with_status()) {
                    self.operations.forget(&Key::Sandbox);
                    self.operations.forget(&Key::UnprepareClaims);
                }
            }
            Input::Devices(devices) => self.health.devices = devices,
            Input::Terminate(verdict) => self.apply_verdict(facts, verdict, turn),
            Input::ResourcesFreed => self.desired.apply_resources_freed(),
            Input::Network(network) => self.readiness.apply_network(network),
            Input::Done { key, outcome } => self.apply_done(facts, &key, outcome, turn),
            Input::ClockMoved(by) => self.move_timers(by),
            Input::Tick => {
                if self
                    .ending
                    .audit(self.state, self.desired.update(), facts.now)
                {
                    self.observation.require();
                }
            }
        }
        true
    }

    fn apply_update(&mut self, facts: &Facts, update: Update, turn: &mut Turn) -> bool {
        let (before, is_other_spec, is_other_object) = match self.desired.apply_update(update) {
            Change::Ignored => return true,
            Change::Echo => return false,
            Change::Changed {
                before,
                spec,
                object,
            } => (before, spec, object),
        };
        if is_other_spec {
            self.readiness
                .apply_spec(&before, &self.desired.update().pod);
        }
        if is_other_object {
            self.publication.apply_new_object();
        }
        self.adopt_update();
        // Paths and variables may reference labels and annotations.
        self.wake_retries(&[Class::WaitForChange, Class::Final]);
        if is_other_spec {
            self.operations.forget_all();
            if self.operations.is_in_flight(&Key::ResizeRequest) {
                self.cancel(&Key::ResizeRequest, turn);
            }
        }
        let intent = self.update().intent();
        self.step(lifecycle::Input::Intent(intent), facts, turn);
        true
    }

    /// Adopts from the API the status that an earlier agent wrote, and a terminal status of another client.
    fn adopt_update(&mut self) {
        let update = self.desired.update();
        let observed = self.observation.pod().cloned();
        if self.publication.adopt_status(update, observed.as_deref())
            // A static pod's mirror may be known only after its containers.
            && let Some(seen) = observed
        {
            self.adopt_health(&seen);
        }
        let pod = &self.desired.update().pod;
        self.publication.adopt_terminal_status(pod);
    }

    /// The node terminates the pod. If the pod is already terminating, a shutdown or an eviction shortens its grace
    /// period to what the node can wait.
    fn apply_verdict(&mut self, facts: &Facts, verdict: Verdict, turn: &mut Turn) {
        if self.ending.apply_verdict(self.state, &verdict) {
            turn.events
                .push(PodEvent::warning(&verdict.reason, verdict.message));
        }
        let cause = verdict.cause;
        if let (Cause::NodeShutdown | Cause::Evicted, Some(grace)) = (cause, verdict.grace)
            && self.state != State::Syncing
        {
            self.step(lifecycle::Input::Terminate { cause, grace }, facts, turn);
        }
    }

    /// Applies an event of the runtime. Returns false if it has no effect, now or later. For a finished pod, only new
    /// sandboxes and containers matter. Its exited containers are removed later.
    fn apply_event(&mut self, event: RuntimeEvent) -> bool {
        if !matches!(self.state, State::Finished { .. }) {
            let in_flight = self.operations.in_flight();
            return self.observation.apply_event(event, in_flight);
        }
        let is_new = self.observation.is_new(&event);
        if is_new {
            self.ending.apply_late_start();
        }
        is_new
    }

    /// The pod with its granted sizes.
    #[must_use]
    pub fn pod(&self) -> &Arc<Pod> {
        self.desired.pod()
    }

    /// The latest desired state.
    #[must_use]
    pub fn update(&self) -> &Update {
        self.desired.update()
    }

    /// The pod in the runtime: the last observation, updated with the results of later operations. `None` before the
    /// first observation.
    #[must_use]
    pub fn observed(&self) -> Option<&Arc<ObservedPod>> {
        self.observation.pod()
    }

    /// The current status. It may not have been published yet.
    #[must_use]
    pub fn status(&self) -> &Arc<PodStatus> {
        self.publication.status()
    }

    /// What the pod waits for, if it is not as specified and no step is running or failing.
    #[must_use]
    pub fn waiting(&self) -> Option<&str> {
        self.publication.waiting.as_deref()
    }

    /// The results of probes.
    #[must_use]
    pub fn probed(&self) -> &Probed {
        &self.health.probed
    }

    /// The status that was last passed to the status writer.
    #[must_use]
    pub fn published(&self) -> Option<&Arc<PodStatus>> {
        self.publication.published()
    }

    /// The progress of a resize.
    #[must_use]
    pub fn resizing(&self) -> &Resizing {
        &self.desired.resizing
    }

    /// Containers that are being started. Their postStart hook may still run, or has failed.
    #[must_use]
    pub fn starting(&self) -> BTreeSet<&str> {
        let in_flight = self.operations.in_flight();
        let starts = in_flight.filter(|op| op.starts_container());
        let starting = starts.filter_map(Op::started_container);
        starting.chain(self.restarts.failed_hooks()).collect()
    }

    /// Whether no operation is running.
    #[must_use]
    pub(crate) fn is_idle(&self) -> bool {
        self.operations.is_idle()
    }

    /// Whether a terminal status was published and no container runs any more. If another client wrote the terminal
    /// status, containers may still run, and keep their resources until they stop (`filterOutInactivePods` in
    /// `pkg/kubelet/kubelet_pods.go`).
    #[must_use]
    pub fn terminal_status_published(&self) -> bool {
        let is_published = self.published().is_some_and(|status| pod::is_final(status));
        is_published && !self.observation.may_have_live() && !self.may_be_starting()
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
            && !resources::has_host_ports(self.pod())
    }

    fn is_resizing(&self) -> bool {
        let observed = self.observation.pod();
        let runs = |name: &str| observed.is_some_and(|o| o.runs(name));
        self.desired.is_resizing(runs)
    }

    fn has_left_node(&self) -> bool {
        ending::has_left_node(self.state, self.update())
    }

    /// Whether nothing of the pod runs any more, according to an observation after the last operation.
    fn has_stopped(&self) -> bool {
        let observed = self.observation.certain_pod();
        observed.is_some_and(|observed| self.stops.is_all_stopped(observed))
            && !self.operations.in_flight().any(Op::delays_end)
    }

    /// Whether a container may be starting that was not observed as running. Its start is in progress, or was cancelled
    /// without an observation of the runtime since.
    fn may_be_starting(&self) -> bool {
        self.observation.is_outcome_unknown()
            || self.operations.in_flight().any(Op::starts_container)
    }

    /// Whether the pod's resource claims must still be unprepared.
    fn needs_claim_release(&self) -> bool {
        self.ending.needs_claim_release(self.update())
    }

    fn step(&mut self, input: lifecycle::Input, facts: &Facts, turn: &mut Turn) {
        let before = self.state;
        self.state = before.step(input);
        turn.decisions.push((before, input, self.state));
        self.limit_grace(facts.now);
        if before != self.state {
            // Failures in one state do not apply to the next.
            self.operations.forget_all();
        }
    }

    /// The grace period of a terminating pod begins now. An earlier deadline stays.
    fn limit_grace(&mut self, now: Timestamp) {
        if let State::Terminating { grace, .. } = self.state {
            self.stops.apply_pod_deadline(time::in_seconds(now, grace));
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
        let own_grace = pod::grace_seconds(self.pod());
        match self.state {
            State::Syncing => {
                if let Some(verdict) = self.ending.verdict() {
                    return ended(verdict.cause, verdict.grace.unwrap_or(own_grace));
                }
                if self.observation.pod().is_none() || !self.desired.admitted {
                    return None;
                }
                if self.ending.is_completed() || self.plan_actions().must_terminate {
                    return ended(Cause::Completed, own_grace);
                }
                let until = status::deadline(self.pod(), self.status())?;
                if until > facts.now {
                    return None;
                }
                let message = "Pod was active on the node longer than the specified deadline";
                turn.events
                    .push(PodEvent::normal("DeadlineExceeded", message));
                self.ending.set_verdict(Verdict {
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
        let Some(observed) = self.observation.pod() else {
            return actions::PodActions::default();
        };
        let health = actions::Health {
            probed: &self.health.probed,
            wanted: self.desired.wanted(),
            resizing: &self.desired.resizing,
            stopped_to_restart: self.restarts.stopped_to_restart(),
        };
        let mut actions = actions::compute(self.pod(), observed, &health, |name| {
            self.restart_count(name)
        });
        if !actions.kill_pod {
            self.restarts.stop_failed_hooks(&mut actions.kill);
        }
        actions
    }

    /// The restart count of a container without instances. This is the maximum of the count in the status, of the count
    /// after a restart of all containers, and of the count in the logs (`calcRestartCountByLogDir` in
    /// `pkg/kubelet/kuberuntime/kuberuntime_container.go`).
    fn restart_count(&self, name: &str) -> u32 {
        let status = self.status();
        let known = [&status.container_statuses, &status.init_container_statuses]
            .into_iter()
            .flatten()
            .flatten()
            .find(|s| s.name == name)
            .map_or(0, |s| u32::try_from(s.restart_count).unwrap_or(0));
        known
            .max(self.observation.logged_restarts(name))
            .max(self.restarts.count(name))
    }

    /// Whether observations can no longer change the status: the containers have been removed, or admission rejected
    /// the pod before it was started. The containers of such a pod must not be reported as lost, even by a later agent.
    fn status_stands(&self, observed: &ObservedPod) -> bool {
        if let State::Finished { cause } = self.state
            && cause.removes_content()
        {
            return true;
        }
        let status = self.status();
        let lists = [&status.container_statuses, &status.init_container_statuses];
        status.phase.as_deref() == Some("Failed")
            && self.ending.verdict().is_none()
            && observed.containers.is_empty()
            && lists.iter().all(|list| list.is_none())
    }

    fn compute_status(&mut self, facts: &Facts) {
        let Some(observed) = self.observation.pod().cloned() else {
            return;
        };
        let ended = self.state.has_stopped();
        if self.status_stands(&observed) {
            self.ending.apply_completed(pod::is_final(self.status()));
            return;
        }
        let terminal = self.publication.adopted_terminal_status().cloned();
        if let Some(terminal) = terminal.clone().filter(|_| !ended) {
            // Containers that still run are reported once they have stopped.
            self.publication.apply_status(terminal);
            self.ending.apply_completed(true);
            return;
        }
        let pod = self.desired.pod();
        let restarts = &self.restarts;
        let has_failed_hook = |name: &str| restarts.failed_hooks().any(|of| of == name);
        self.publication
            .forget_settled_problems(pod, &observed, has_failed_hook);
        let mut status = status::compute(&status::Facts {
            pod,
            observed: &observed,
            previous: self.status(),
            problems: self.publication.problems(),
            blocking_reason: facts.blocking_reason.clone(),
            probed: &self.health.probed,
            devices: &self.health.devices,
            has_volumes: self.has_volumes(&observed),
            starting: &self.starting(),
            stopped_to_restart: self.restarts.stopped_to_restart(),
            wanted: self.desired.wanted(),
            resize: &self.desired.resizing,
            node_ips: &facts.node_ips,
            recursive_read_only: facts.rules.recursive_read_only,
            runtime: &facts.rules.runtime,
            ended,
            verdict: self.ending.verdict(),
            now: facts.now,
        });
        if let Some(terminal) = &terminal {
            status::keep_terminal_status(&mut status, terminal);
        }
        let completed = pod::is_final(&status);
        let becomes_final = completed && !pod::is_final(self.status());
        let has_live = observed.live().next().is_some() || self.may_be_starting();
        if becomes_final && !ended && has_live {
            // A terminal phase means that no container runs any more, including sidecars.
            status.phase = Some("Running".into());
        } else if becomes_final && self.needs_claim_release() {
            // A terminal phase also means that the pod's devices are released.
            let before = self.status().phase.clone();
            status.phase = before.or_else(|| Some("Pending".into()));
        }
        self.ending.apply_completed(completed);
        self.publication.apply_status(status);
    }

    /// Whether the volumes are set up, by this agent or by the one that created a container in the pod's sandbox.
    fn has_volumes(&self, observed: &ObservedPod) -> bool {
        let sandbox = observed.sandboxes.first();
        let mut containers = observed.containers.iter();
        self.readiness.volumes.are_set_up()
            || containers.any(|c| sandbox.is_some_and(|s| s.id == c.sandbox))
    }

    /// Publishes the status if it has changed: at once, or after a delay while an operation will change it soon.
    fn publish(&mut self, facts: &Facts, turn: &mut Turn) {
        let is_terminating = matches!(self.state, State::Terminating { .. });
        let terminates = is_terminating || self.update().intent().deleted;
        let mut in_flight = self.operations.in_flight();
        let is_changing = in_flight.any(|op| self.changes_status_soon(op));
        self.publication
            .publish(terminates, is_changing, facts.now, turn);
    }

    /// Whether the completion of an operation is imminent and changes the status.
    fn changes_status_soon(&self, op: &Op) -> bool {
        match (self.state, op) {
            (State::Syncing, Op::Sandbox { .. } | Op::Pull(_) | Op::Start { .. }) => {
                self.publication.is_pending()
            }
            // The observation will complete the status of the container that was started.
            (State::Syncing, Op::Observe { .. }) => self.observation.is_assumed(),
            // The status of a completed pod does not wait for its sandbox, whose stop may be queued behind others.
            (
                State::Terminating {
                    cause: Cause::Completed,
                    ..
                },
                Op::StopSandbox(_),
            ) => false,
            (State::Terminating { .. }, Op::StopSandbox(_) | Op::Observe { .. }) => {
                !self.observation.may_have_live()
            }
            _ => false,
        }
    }

    /// Schedules the audit of a terminating pod if nothing else would wake its worker.
    fn schedule_audit(&mut self, facts: &Facts, turn: &mut Turn) {
        let sleeps = turn.wake_at.is_none() && self.is_idle() && !self.has_left_node();
        let update = self.desired.update();
        let audit_at = self
            .ending
            .schedule_audit(self.state, update, sleeps, facts.now);
        turn.wake_at = turn.wake_at.or(audit_at);
    }
}
