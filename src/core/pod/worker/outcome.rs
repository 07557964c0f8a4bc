//! Passes the outcome of an operation to the parts of the worker that it concerns, and the begin of an operation
//! likewise.
//!
//! A failure counts for the back-off of the operation (`op.rs`). If the operation changes the runtime, its effect is
//! unknown afterwards. A success changes the observed pod directly where the runtime has reported enough; otherwise the
//! pod is observed before the runtime is changed again (`observation.rs`).

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;

use super::operations::{Running, StartsWoken};
use super::{Facts, Key, Op, Outcome, PodEvent, Turn, Worker};
use crate::fault::{Class, Fault};
use crate::pod;
use crate::pod::actions::Start;
use crate::pod::lifecycle::{self, Cause, State, Verdict};
use crate::pod::observed::{Container, ContainerState, ObservedPod, Sandbox};
use crate::pod::status;

impl Worker {
    /// An operation begins.
    pub(super) fn apply_begin(&mut self, facts: &Facts, op: &Op) {
        match op {
            Op::Observe { .. } => self.observation.apply_begin(),
            Op::PreStop { kill, until } | Op::Stop { kill, until, .. } => {
                self.stops.apply_begin(kill, *until);
            }
            Op::Volumes { .. } => {
                let pod = self.desired.pod();
                self.readiness.volumes.apply_begin(pod, facts.now);
            }
            Op::RequestResize => self.desired.apply_begin_of_request(),
            Op::RestartAll(kills) => {
                let observed = self.observation.pod();
                self.restarts
                    .apply_restart_of_all(kills, observed.map(Arc::as_ref));
                self.publication.apply_restart_of_all(kills);
            }
            Op::Resize { names, to } => self.desired.resizing.begin_update(names, to),
            Op::Prepare | Op::Upkeep => self.desired.apply_begin_of_preparation(),
            Op::Start { start, .. } => {
                let name = &start.container.name;
                self.desired.apply_begin_of_start(name);
                if let Some(finished) = self.observation.last_exit(name) {
                    let maximum = facts.rules.max_backoff;
                    self.restarts
                        .apply_begin_of_start(start, finished, facts.now, maximum);
                }
            }
            _ => {}
        }
    }

    /// An operation has completed.
    pub(super) fn apply_done(
        &mut self,
        facts: &Facts,
        key: &Key,
        outcome: Outcome,
        turn: &mut Turn,
    ) {
        if let Some(running) = self.operations.complete(key) {
            match outcome {
                Outcome::Failed(fault) => self.apply_failure(facts, &running, fault),
                Outcome::Waiting {
                    reason,
                    message,
                    until,
                    class,
                } => {
                    self.apply_waiting(facts, &running, (reason, message), (class, until));
                }
                outcome => self.apply_success(facts, running.op, outcome, turn),
            }
        }
        for event in self.observation.take_postponed() {
            self.apply_event(event);
        }
    }

    /// An operation was carried out, or the node has decided about it.
    fn apply_success(&mut self, facts: &Facts, op: Op, outcome: Outcome, turn: &mut Turn) {
        match outcome {
            Outcome::Outdated(_) => self
                .operations
                .block(facts.now, &op.key(), Class::RetryLater),
            _ => self.operations.apply_success(&op),
        }
        match (op, outcome) {
            (Op::Observe { .. }, Outcome::Observed { pod, logged }) => {
                self.apply_observed(facts, pod, logged, turn);
            }
            (Op::Admit | Op::Volumes { .. }, Outcome::Refused { reason, message }) => {
                self.apply_rejection(reason, message, facts, turn);
            }
            (Op::Admit, _) => self.desired.admitted = true,
            (Op::RequestResize, outcome) => self.apply_resize_decision(outcome, turn),
            (Op::CancelResize, _) => self.desired.apply_cancelled_request(),
            (Op::Mirror, _) => {
                let update = self.desired.update();
                self.publication.apply_mirrored(update, facts.now);
            }
            (Op::Prepare, _) => self.readiness.apply_prepared(facts.now),
            (Op::Upkeep, _) => self.readiness.apply_upkeep(facts.now),
            (Op::Volumes { .. }, outcome) => {
                self.readiness.volumes.apply_outcome(&outcome, facts.now);
            }
            (Op::Pull(start), _) => self.readiness.apply_image(start.container.name),
            (Op::Resize { names, to }, _) => self.desired.resizing.complete_update(&names, to),
            (Op::PreStop { .. }, _) => {}
            (Op::UnprepareClaims, _) => self.ending.apply_unprepared_claims(),
            (Op::Release { content }, _) => self.apply_release(content, facts, turn),
            (Op::Finalise, _) => self.ending.apply_finalised(),
            (op, outcome) => self.apply_runtime_change(facts, op, outcome, turn),
        }
    }

    /// An operation has changed the runtime.
    fn apply_runtime_change(&mut self, facts: &Facts, op: Op, outcome: Outcome, turn: &mut Turn) {
        match (op, outcome) {
            (Op::Sandbox { attempt }, Outcome::Sandbox { id, ips }) => {
                self.apply_sandbox(facts.now, id, attempt, ips);
            }
            // Nothing was changed, so no observation is needed.
            (Op::Sandbox { .. }, Outcome::Abandoned) => {}
            (Op::Start { start, sandbox, .. }, Outcome::Started { id, seen }) => match seen {
                Some(seen) if seen.is_running() => self.apply_running(&start, *seen, turn),
                // A container that has exited already is observed, as its exit has more details.
                _ => self.apply_started(facts.now, &start, sandbox, id),
            },
            (Op::Start { start, sandbox, .. }, Outcome::HookFailed { id, message }) => {
                self.apply_failed_hook(facts.now, &start, sandbox, (id, message));
            }
            (Op::Stop { kill, .. }, _) => {
                self.require_observation();
                self.stops.apply_stopped(kill.id);
            }
            (Op::RestartAll(_), _) => self.require_observation(),
            (Op::Collect { .. }, _) => {
                self.observation.begin_epoch();
                self.observation.require();
                // Containers and sandboxes that could not be removed are not retried at once.
                self.operations
                    .block(facts.now, &Key::Collect, Class::RetryLater);
            }
            (Op::StopSandbox(id), _) => self.apply_stopped_sandbox(id),
            // These operations have no other outcomes.
            _ => self.observation.require(),
        }
    }

    fn apply_failure(&mut self, facts: &Facts, running: &Running, fault: Fault) {
        let woken = self
            .operations
            .apply_failure(facts.now, running, fault.class);
        self.apply_woken(woken);
        if running.op.facts().changes_runtime {
            // The call timed out or was rejected, so its effect is unknown.
            self.require_observation();
        }
        match running.op {
            Op::Resize { .. } => self.desired.apply_failed_resize(fault.message),
            Op::Observe { .. } => self.observation.require(),
            Op::Volumes { .. } => self.readiness.volumes.apply_failure(),
            _ => {}
        }
    }

    /// A container could not be started, or its image not be pulled.
    fn apply_waiting(
        &mut self,
        facts: &Facts,
        running: &Running,
        problem: (String, String),
        (class, until): (Class, Option<Timestamp>),
    ) {
        let Some(name) = running.op.started_container() else {
            let woken = self.operations.apply_failure(facts.now, running, class);
            return self.apply_woken(woken);
        };
        self.readiness.forget_image(name);
        self.publication.apply_problem(name.to_owned(), problem);
        let woken = self
            .operations
            .apply_failed_start(facts.now, running, class, until);
        self.apply_woken(woken);
        if self.readiness.volumes.are_stale() || self.operations.is_in_flight(&Key::Volumes) {
            // The missing object may be among the changes since.
            self.wake_retries(&[Class::WaitForChange]);
        }
        if running.op.starts_container() {
            self.require_observation();
        }
    }

    /// Something has changed that failures of these classes may have waited for.
    pub(super) fn wake_retries(&mut self, classes: &[Class]) {
        let woken = self.operations.apply_change(classes);
        self.apply_woken(woken);
    }

    fn apply_woken(&mut self, woken: StartsWoken) {
        if woken.0 {
            self.readiness.volumes.expire();
        }
    }

    /// Requires an observation before the runtime is changed again. An observation in progress does not count.
    fn require_observation(&mut self) {
        self.observation.begin_epoch();
        self.observation.require_before_changes();
    }

    fn apply_resize_decision(&mut self, outcome: Outcome, turn: &mut Turn) {
        match outcome {
            Outcome::Deferred { reason, message } => {
                turn.events
                    .extend(self.desired.apply_deferral(&reason, message));
            }
            _ => {
                turn.events.push(self.desired.apply_grant());
                self.adopt_update();
            }
        }
    }

    fn apply_observed(
        &mut self,
        facts: &Facts,
        seen: Arc<ObservedPod>,
        logged: BTreeMap<String, u32>,
        turn: &mut Turn,
    ) {
        let is_first = self.observation.pod().is_none();
        if !self.observation.apply_observed(Arc::clone(&seen), logged) {
            return;
        }
        self.ending.apply_observed(self.state, seen.is_empty());
        turn.observed = true;
        self.health.apply_observed(&seen);
        if is_first && pod::is_static(&self.update().pod) {
            self.publication.keep_known_statuses(&seen);
        }
        self.adopt_health(&seen);
        for survivor in self.stops.apply_observed(&seen) {
            self.operations
                .block(facts.now, &Key::Stop(survivor), Class::RetryLater);
        }
        self.restarts.apply_observed(&seen);
    }

    /// Adopts the health in the status for instances that no probe has judged yet.
    pub(super) fn adopt_health(&mut self, seen: &ObservedPod) {
        let (pod, status) = (self.desired.pod(), self.publication.status());
        self.health.adopt(pod, seen, status);
    }

    /// Admission rejected the pod. If it may have run before the agent started, its containers are stopped first: a
    /// terminal phase must not be published while a container runs.
    fn apply_rejection(&mut self, reason: String, message: String, facts: &Facts, turn: &mut Turn) {
        turn.events
            .push(PodEvent::warning(&reason, message.clone()));
        let has_run = status::names_containers(self.status())
            || match self.observation.pod() {
                Some(observed) => !observed.containers.is_empty(),
                // An earlier agent had the pod. The containers that it started are not known yet.
                None => self.status().start_time.is_some(),
            };
        if has_run {
            self.ending.set_verdict(Verdict {
                cause: Cause::Rejected,
                reason,
                message: format!("Pod was rejected: {message}"),
                disruption: None,
                grace: None,
            });
            return;
        }
        let refusal = (reason.as_str(), message.as_str());
        let refused = status::rejected(self.pod(), self.status(), refusal, facts.now);
        self.publication.apply_status(refused);
        let ended = lifecycle::Input::Terminate {
            cause: Cause::Rejected,
            grace: 1,
        };
        self.step(ended, facts, turn);
    }

    /// The pod's resources were released. If the pod was deleted meanwhile, its content must be released too, which the
    /// next plan does.
    fn apply_release(&mut self, content: bool, facts: &Facts, turn: &mut Turn) {
        match self.state {
            State::Finished { .. } => self.ending.apply_released_leftovers(),
            State::Terminated { cause } if cause.removes_content() && !content => {}
            _ => self.step(lifecycle::Input::Released, facts, turn),
        }
    }

    fn apply_sandbox(&mut self, now: Timestamp, id: String, attempt: u32, ips: Vec<String>) {
        let host_network = pod::host_network(self.pod());
        if self.readiness.apply_sandbox(now) {
            self.operations.forget(&Key::Sandbox);
        }
        self.operations.block(now, &Key::Sandbox, Class::RetryLater);
        self.observation.apply_change(|observed| {
            // An observation may have found the sandbox while it was being created, and it may have stopped since.
            if observed.sandboxes.iter().any(|s| s.id == id) {
                return;
            }
            observed.sandboxes.push(Sandbox {
                id,
                attempt,
                ready: true,
                created_at: now,
                ips,
                host_network,
                // The next observation supplies the handler.
                handler: String::new(),
            });
        });
    }

    fn apply_stopped_sandbox(&mut self, id: String) {
        self.observation.apply_change(|observed| {
            for sandbox in observed.sandboxes.iter_mut().filter(|s| s.id == id) {
                sandbox.ready = false;
            }
        });
        if self.observation.may_have_live() {
            self.observation.require_before_changes();
        }
        self.stops.apply_stopped_sandbox(id);
    }

    /// A container was started, and the runtime reports it as running. No further observation is needed: its exit
    /// arrives as an event, or a listing finds it.
    fn apply_running(&mut self, start: &Start, seen: Container, turn: &mut Turn) {
        self.observation.apply_change(|observed| {
            let known = observed.containers.iter_mut().find(|c| c.id == seen.id);
            match known {
                // An observation has found its exit since.
                Some(known) if known.state == ContainerState::Exited => {}
                Some(known) => *known = seen,
                None => observed.containers.push(seen),
            }
            remove_replaced(observed, start);
        });
        if let Some(observed) = self.observation.pod().cloned() {
            self.adopt_health(&observed);
        }
        turn.observed = true;
        self.forget_start(&start.container.name);
    }

    /// A container was started, and the runtime has reported no more than its id.
    fn apply_started(&mut self, now: Timestamp, start: &Start, sandbox: String, id: String) {
        let instance = instance(now, start, sandbox, id);
        self.observation.apply_assumption(|observed| {
            let seen = observed.containers.iter_mut().find(|c| c.id == instance.id);
            match seen {
                // An observation has found it before it was started, or after it has exited.
                Some(seen) if seen.state == ContainerState::Created => {
                    (seen.state, seen.started_at) = (ContainerState::Running, Some(now));
                }
                Some(_) => {}
                None => observed.containers.push(instance),
            }
            remove_replaced(observed, start);
        });
        self.forget_start(&start.container.name);
    }

    /// The next start of a container checks its image again, and has no problem yet.
    fn forget_start(&mut self, container: &str) {
        self.readiness.forget_image(container);
        self.publication.apply_started(container);
    }

    /// A container runs, and its postStart hook has failed.
    fn apply_failed_hook(
        &mut self,
        now: Timestamp,
        start: &Start,
        sandbox: String,
        (id, message): (String, String),
    ) {
        let name = start.container.name.clone();
        self.apply_started(now, start, sandbox, id.clone());
        let observed = self.observation.pod().into_iter();
        let mut known = observed.flat_map(|observed| &observed.containers);
        if known.any(|c| c.id == id && c.is_running()) {
            self.restarts.apply_failed_hook(id, name.clone());
        }
        let problem = ("PostStartHookError".to_owned(), message);
        self.publication.apply_problem(name, problem);
    }
}

/// The instance of a container that was started now.
fn instance(now: Timestamp, start: &Start, sandbox: String, id: String) -> Container {
    Container {
        id,
        name: start.container.name.clone(),
        sandbox,
        attempt: start.attempt,
        state: ContainerState::Running,
        created_at: now,
        started_at: Some(now),
        finished_at: None,
        exit_code: 0,
        reason: String::new(),
        message: String::new(),
        image: start.container.image.clone().unwrap_or_default(),
        image_ref: String::new(),
        hash: Some(pod::container_hash(&start.container)),
        user: None,
        stop_signal: None,
        message_file: None,
    }
}

/// Removes the instance that was created but never started.
fn remove_replaced(observed: &mut ObservedPod, start: &Start) {
    observed
        .containers
        .retain(|c| Some(&c.id) != start.replaces.as_ref());
}
