//! Applies inputs to the state of a worker.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;

use super::plan::backoff_key;
use super::{
    Facts, Input, Key, Op, Outcome, ResizeRequest, Retry, Turn, Update, VolumeState, Worker, event,
    warning,
};
use crate::backoff::Doubling;
use crate::fault::{Class, Fault};
use crate::node::claims::has_claims;
use crate::pod;
use crate::pod::actions::{Kill, Start};
use crate::pod::lifecycle::{self, Cause, State, Verdict};
use crate::pod::observed::{Container, ContainerState, ObservedPod, Sandbox};
use crate::pod::resize::{self, INFEASIBLE};
use crate::pod::status::{self, RESTARTING_ALL};
use crate::time;
use crate::varying;

/// Back-off of failed operations.
const RETRY: Doubling = Doubling::new(Duration::from_millis(500), Duration::from_secs(10));
/// Back-off of a container that could not be started, if the failure gives no time for the next try. Only failures of
/// class `Final` increase it. The maximum is short because the cause may be outside of the pod, for example an image
/// that is pushed again under its tag.
const START_RETRY: Doubling = Doubling::new(Duration::from_secs(10), Duration::from_secs(60));

/// If a sandbox was ready for this long, the back-off of its successor is reset.
const SANDBOX_STABLE: SignedDuration = SignedDuration::from_secs(60);

impl Worker {
    /// Applies an input. Returns false if at most the status must be published again.
    pub(super) fn apply(&mut self, facts: &Facts, input: Input, turn: &mut Turn) -> bool {
        match input {
            Input::Update(update) => return self.apply_update(facts, update, turn),
            Input::Hint => {
                self.observe_needed = true;
                self.recheck = matches!(self.state, State::Finished { .. });
            }
            Input::RuntimeEvent(event) => return self.apply_event(event),
            Input::Probed { id, kind, result } => {
                let place = self.probed.0.entry(id).or_default();
                *place.of(kind) = Some(result);
            }
            Input::VolumesChanged => {
                (self.volumes.stale, self.volumes.changed) = (true, true);
                self.forget_retry(&Key::Volumes);
                self.wake_retries(&[Class::WaitForChange]);
            }
            // Changes since the outage are found by the listing.
            Input::RuntimeBack => self.wake_retries(&[Class::WaitForChange]),
            Input::DriversChanged => {
                self.forget_retry(&Key::Volumes);
                if has_claims(self.update.with_status()) {
                    self.forget_retry(&Key::Sandbox);
                    self.forget_retry(&Key::UnprepareClaims);
                }
            }
            Input::Devices(health) => self.devices = health,
            Input::Terminate(verdict) => self.apply_verdict(facts, verdict, turn),
            Input::ResourcesFreed => match self.resize_request {
                ResizeRequest::Deferred => self.resize_request = ResizeRequest::ToSend,
                // The node may have deferred the running request before these resources were freed.
                ResizeRequest::ToSend => self.resources_freed = true,
                ResizeRequest::None | ResizeRequest::ToCancel => {}
            },
            Input::Network(network) => self.network = network,
            Input::Done { key, outcome } => {
                self.apply_outcome(facts, &key, outcome, turn);
                self.overtaken.retain(|(running, _)| *running != key);
                self.settle_events();
            }
            Input::ClockMoved(by) => self.move_timers(by),
            Input::Tick => self.audit(facts.now),
        }
        true
    }

    /// The node terminates the pod. If the pod is already terminating, a shutdown or an eviction shortens its grace
    /// period to what the node can wait. If it was only deleted so far, an eviction also sets the reason in its status.
    fn apply_verdict(&mut self, facts: &Facts, verdict: Verdict, turn: &mut Turn) {
        let (cause, grace) = (verdict.cause, verdict.grace);
        let is_deleted = matches!(
            self.state,
            State::Terminating {
                cause: Cause::Deleted | Cause::Removed,
                ..
            }
        );
        let is_reported = self.state == State::Syncing || (is_deleted && cause == Cause::Evicted);
        if is_reported && self.verdict.is_none() {
            turn.events
                .push(warning(&verdict.reason, verdict.message.clone()));
            self.verdict = Some(verdict);
        }
        if let (Cause::NodeShutdown | Cause::Evicted, Some(grace)) = (cause, grace)
            && self.state != State::Syncing
        {
            self.step(lifecycle::Input::Terminate { cause, grace }, facts, turn);
        }
    }

    fn apply_update(&mut self, facts: &Facts, update: Update, turn: &mut Turn) -> bool {
        if self.update.removed && !update.removed {
            // A pod that was removed from its source cannot return under the same uid before it has terminated.
            return true;
        }
        let echo = self.update.differs_in_status_only(&update);
        let same_object = |a: &Update, b: &Update| {
            let of = |u: &Update| u.object.as_ref().and_then(|o| o.metadata.uid.clone());
            of(a) == of(b)
        };
        let is_new_object = !same_object(&self.update, &update);
        let changed = !echo && self.update.pod.spec != update.pod.spec;
        if changed {
            // A pulled image does not count for a container whose image has changed.
            let before = &self.update.pod;
            self.images
                .retain(|name| image(before, name) == image(&update.pod, name));
        }
        self.update = update;
        if is_new_object {
            // A new object needs the complete status.
            self.published = None;
        }
        if echo && !is_new_object {
            return false;
        }
        self.adopt_update();
        // Paths and variables may reference labels and annotations.
        self.wake_retries(&[Class::WaitForChange, Class::Final]);
        if changed {
            self.retries.clear();
            if self.is_in_flight(&Key::ResizeRequest) {
                self.drop_in_flight(&Key::ResizeRequest, turn);
            }
        }
        self.step(lifecycle::Input::Intent(self.update.intent()), facts, turn);
        true
    }

    fn apply_outcome(&mut self, facts: &Facts, key: &Key, outcome: Outcome, turn: &mut Turn) {
        let Some(op) = self.take_in_flight(key) else {
            return;
        };
        match outcome {
            Outcome::Failed(fault) => return self.apply_failure(facts, &op, fault),
            Outcome::Waiting {
                reason,
                message,
                until,
                class,
            } => return self.apply_waiting(facts, &op, (reason, message), (class, until)),
            Outcome::Outdated(_) => self.record_failure(facts.now, key, Class::RetryLater),
            // A created sandbox does not reset the back-off: it depends on how long sandboxes last.
            _ if *key != Key::Sandbox => self.forget_retry(key),
            _ => {}
        }
        match (op, outcome) {
            (Op::Observe { .. }, Outcome::Observed { pod, logged }) => {
                self.apply_observed(facts, pod, logged, turn);
            }
            (Op::Admit | Op::Volumes { .. }, Outcome::Refused { reason, message }) => {
                self.apply_rejection(reason, message, facts, turn);
            }
            (Op::Admit, _) => self.admitted = true,
            (Op::RequestResize, outcome) => self.apply_resize_decision(outcome, turn),
            (Op::CancelResize, _) if self.resize_request == ResizeRequest::ToCancel => {
                self.resize_request = ResizeRequest::None;
            }
            (Op::Mirror, _) => {
                self.mirrored = Some((self.update.identity(), facts.now));
            }
            (Op::Prepare, _) => {
                (self.prepared_at, self.upkeep_at) = (Some(facts.now), Some(facts.now));
            }
            (Op::Upkeep, _) => self.upkeep_at = Some(facts.now),
            (Op::Volumes { .. }, outcome) => {
                // Even if the refresh failed, containers start with the existing volumes.
                self.volumes = VolumeState {
                    at: Some(facts.now),
                    fresh: true,
                    stale: self.volumes.stale || matches!(outcome, Outcome::Outdated(_)),
                    retry_at: match outcome {
                        Outcome::RetryPart(at) => Some(at),
                        _ => None,
                    },
                    ..self.volumes
                };
            }
            (Op::Sandbox { attempt }, Outcome::Sandbox { id, ips }) => {
                self.record_sandbox(facts.now, id, attempt, ips);
            }
            // Nothing was changed, so no observation is needed.
            (Op::Sandbox { .. }, Outcome::Abandoned) => {}
            (Op::Pull(start), _) => _ = self.images.insert(start.container.name),
            (Op::Start { start, sandbox, .. }, Outcome::Started { id, seen }) => match seen {
                Some(seen) if seen.is_running() => self.record_running(&start, *seen, turn),
                // A container that has exited already is observed, as its exit has more details.
                _ => self.record_started(facts.now, start, sandbox, id),
            },
            (Op::Start { start, sandbox, .. }, Outcome::HookFailed { id, message }) => {
                self.record_failed_hook(facts.now, start, sandbox, (id, message));
            }
            (Op::Stop { kill, .. }, _) => {
                self.require_observation();
                self.stop_done.insert(kill.id);
            }
            (Op::RestartAll(_), _) => self.require_observation(),
            (Op::Collect { .. }, _) => {
                self.epoch = self.epoch.saturating_add(1);
                self.observe_needed = true;
                // Containers and sandboxes that could not be removed are not retried at once.
                self.record_failure(facts.now, key, Class::RetryLater);
            }
            (Op::StopSandbox(id), _) => self.record_stopped_sandbox(id),
            (Op::Resize { names, to }, _) => self.resizing.complete_update(&names, to),
            (Op::Release { content }, _) => {
                // If the pod was deleted meanwhile, its content must be released too, which the next plan does.
                if let State::Finished { .. } = self.state {
                    self.has_leftovers = false;
                } else if content || !self.must_release_content() {
                    self.step(lifecycle::Input::Released, facts, turn);
                }
            }
            (Op::PreStop { .. }, _) => {}
            (Op::UnprepareClaims, _) => self.claims_unprepared = true,
            (Op::Finalise, _) => self.finalised = true,
            // These operations have no other outcomes.
            (Op::Observe { .. } | Op::Sandbox { .. } | Op::Start { .. }, _) => {
                self.observe_needed = true;
            }
            (Op::CancelResize, _) => {}
        }
    }

    fn apply_failure(&mut self, facts: &Facts, op: &Op, fault: Fault) {
        self.record_failure(facts.now, &op.key(), fault.class);
        if op.changes_runtime() {
            // The call timed out or was rejected, so its effect is unknown.
            self.require_observation();
        }
        match op {
            Op::Resize { .. } => {
                let known = self.resizing.error.as_ref();
                if !known.is_some_and(|known| varying::is_same(known, &fault.message)) {
                    self.resizing.error = Some(fault.message);
                }
            }
            Op::Observe { .. } => self.observe_needed = true,
            // The failed refresh has not applied earlier changes. They do not wait for the next regular refresh.
            Op::Volumes { .. } => self.volumes.stale = true,
            _ => {}
        }
    }

    /// Requires an observation before the runtime is changed again.
    fn require_observation(&mut self) {
        self.epoch = self.epoch.saturating_add(1);
        (self.observe_needed, self.outcome_unknown) = (true, true);
    }

    fn must_release_content(&self) -> bool {
        matches!(self.state, State::Terminated { cause } if cause.removes_content())
    }

    fn apply_waiting(
        &mut self,
        facts: &Facts,
        op: &Op,
        problem: (String, String),
        (class, until): (Class, Option<Timestamp>),
    ) {
        let (Op::Pull(start) | Op::Start { start, .. }) = op else {
            return self.record_failure(facts.now, &op.key(), class);
        };
        let name = &start.container.name;
        self.images.remove(name);
        self.record_problem(start.container.name.clone(), problem);
        let pause = |failures: u32| match class {
            Class::WaitForChange | Class::RetryLater => START_RETRY.after(1),
            Class::Final => START_RETRY.after(failures),
        };
        // Pulling the image and starting the container share one back-off.
        let key = Key::Start(name.clone());
        self.block_until(facts.now, &key, class, |failures| {
            until.unwrap_or(time::later(facts.now, pause(failures)))
        });
        if self.volumes.stale || self.is_in_flight(&Key::Volumes) {
            // The missing object may be among the changes since.
            self.wake_retries(&[Class::WaitForChange]);
        }
        if matches!(op, Op::Start { .. }) {
            self.require_observation();
        }
    }

    fn apply_resize_decision(&mut self, outcome: Outcome, turn: &mut Turn) {
        let desired = Arc::clone(&self.update.pod);
        match outcome {
            Outcome::Deferred { reason, message } => {
                self.resize_request = match std::mem::take(&mut self.resources_freed) {
                    true => ResizeRequest::ToSend,
                    false => ResizeRequest::Deferred,
                };
                let (kind, event) = match reason.as_str() {
                    INFEASIBLE => (INFEASIBLE, "ResizeInfeasible"),
                    _ => ("Deferred", "ResizeDeferred"),
                };
                let described = resize::described(&desired, Some(&message));
                let pending = Some((kind.to_owned(), message));
                if self.resizing.pending != pending {
                    let text = format!("Pod resize {reason}: {described}");
                    turn.events.push(warning(event, text));
                }
                self.resizing.pending = pending;
                self.decided_generation = desired.metadata.generation;
                self.keep_granted();
            }
            _ => {
                self.granted = resize::desired(&desired);
                self.resize_request = ResizeRequest::None;
                self.resizing.error = None;
                self.adopt_update();
                let described = resize::described(&desired, None);
                turn.events.push(event(
                    "ResizeStarted",
                    format!("Pod resize started: {described}"),
                ));
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
        if self.observed_epoch != self.epoch {
            // The runtime was changed since the observation began, so the observation may be outdated.
            self.observe_needed = true;
            return;
        }
        self.outcome_unknown = false;
        self.assumed = false;
        if let State::Finished { cause } = self.state {
            self.recheck = false;
            self.has_leftovers = cause.removes_content() && !seen.is_empty();
        }
        self.logged.extend(logged);
        turn.observed = true;
        let runs = |id: &str| {
            seen.containers
                .iter()
                .any(|c| c.id == id && c.state == ContainerState::Running)
        };
        self.probed.0.retain(|id, _| runs(id));
        if self.observed.is_none() && pod::is_static(&self.update.pod) {
            self.keep_known_statuses(&seen);
        }
        self.adopt_health(&seen);
        self.stops
            .retain(|id, _| seen.containers.iter().any(|c| c.id == *id));
        for survivor in std::mem::take(&mut self.stop_done) {
            if runs(&survivor) {
                self.record_failure(facts.now, &Key::Stop(survivor), Class::RetryLater);
            } else if seen.containers.iter().any(|c| c.id == survivor) {
                self.stop_done.insert(survivor);
            }
        }
        self.failed_hooks.retain(|id, _| runs(id));
        self.stopped_to_restart
            .retain(|id| seen.containers.iter().any(|c| c.id == *id));
        self.stopped_sandboxes
            .retain(|id| seen.sandboxes.iter().any(|s| s.id == *id));
        self.observed = Some(seen);
    }

    fn record_change(&mut self, change: impl FnOnce(&mut ObservedPod)) {
        let mut observed = self.observed.as_deref().cloned().unwrap_or_default();
        change(&mut observed);
        observed.sort();
        self.observed = Some(Arc::new(observed));
        self.epoch = self.epoch.saturating_add(1);
    }

    /// Admission rejected the pod. If it may have run before the agent started, its containers are stopped first: a
    /// terminal phase must not be published while a container runs.
    fn apply_rejection(&mut self, reason: String, message: String, facts: &Facts, turn: &mut Turn) {
        turn.events.push(warning(&reason, message.clone()));
        let has_run = status::names_containers(&self.status)
            || match &self.observed {
                Some(observed) => !observed.containers.is_empty(),
                // An earlier agent had the pod. The containers that it started are not known yet.
                None => self.status.start_time.is_some(),
            };
        if has_run {
            self.verdict = Some(Verdict {
                cause: Cause::Rejected,
                reason,
                message: format!("Pod was rejected: {message}"),
                disruption: None,
                grace: None,
            });
            return;
        }
        let refusal = (reason.as_str(), message.as_str());
        let refused = status::rejected(&self.effective, &self.status, refusal, facts.now);
        self.status = Arc::new(refused);
        let ended = lifecycle::Input::Terminate {
            cause: Cause::Rejected,
            grace: 1,
        };
        self.step(ended, facts, turn);
    }

    fn record_sandbox(&mut self, now: Timestamp, id: String, attempt: u32, ips: Vec<String>) {
        let host_network = pod::host_network(&self.effective);
        // A sandbox that is lost repeatedly is recreated with increasing back-off.
        let stable = self
            .sandbox_at
            .replace(now)
            .is_none_or(|before| now.duration_since(before) > SANDBOX_STABLE);
        if stable {
            self.forget_retry(&Key::Sandbox);
        }
        self.record_failure(now, &Key::Sandbox, Class::RetryLater);
        self.record_change(|observed| {
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

    fn record_stopped_sandbox(&mut self, id: String) {
        self.record_change(|observed| {
            for sandbox in observed.sandboxes.iter_mut().filter(|s| s.id == id) {
                sandbox.ready = false;
            }
        });
        if self
            .observed
            .as_ref()
            .is_some_and(|o| o.live().next().is_some())
        {
            (self.observe_needed, self.outcome_unknown) = (true, true);
        }
        self.stopped_sandboxes.insert(id);
    }

    /// A container was started, and the runtime reports it as running. No further observation is needed: its exit
    /// arrives as an event, or a listing finds it.
    fn record_running(&mut self, start: &Start, seen: Container, turn: &mut Turn) {
        let name = &start.container.name;
        self.record_change(|observed| {
            let known = observed.containers.iter_mut().find(|c| c.id == seen.id);
            match known {
                // An observation has found its exit since.
                Some(known) if known.state == ContainerState::Exited => {}
                Some(known) => *known = seen,
                None => observed.containers.push(seen),
            }
            observed
                .containers
                .retain(|c| Some(&c.id) != start.replaces.as_ref());
        });
        if let Some(observed) = self.observed.clone() {
            self.adopt_health(&observed);
        }
        turn.observed = true;
        self.images.remove(name);
        self.problems.remove(name);
    }

    fn record_started(&mut self, now: Timestamp, start: Start, sandbox: String, id: String) {
        let name = start.container.name.clone();
        let hash = pod::container_hash(&start.container);
        let instance = Container {
            id,
            name: name.clone(),
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
            hash: Some(hash),
            user: None,
            stop_signal: None,
            message_file: None,
        };
        self.record_change(|observed| {
            let seen = observed.containers.iter_mut().find(|c| c.id == instance.id);
            match seen {
                // An observation has found it before it was started, or after it has exited.
                Some(seen) if seen.state == ContainerState::Created => {
                    (seen.state, seen.started_at) = (ContainerState::Running, Some(now));
                }
                Some(_) => {}
                None => observed.containers.push(instance),
            }
            observed
                .containers
                .retain(|c| Some(&c.id) != start.replaces.as_ref());
        });
        self.assumed = true;
        self.observe_needed = true;
        self.images.remove(&name);
        self.problems.remove(&name);
    }

    /// A container runs, and its postStart hook has failed. It is stopped like any other, with its preStop hook and its
    /// grace period.
    fn record_failed_hook(
        &mut self,
        now: Timestamp,
        start: Start,
        sandbox: String,
        (id, message): (String, String),
    ) {
        let name = start.container.name.clone();
        self.record_started(now, start, sandbox, id.clone());
        let observed = self.observed.iter();
        let mut known = observed.flat_map(|observed| &observed.containers);
        if known.any(|c| c.id == id && c.is_running()) {
            self.failed_hooks.insert(id, name.clone());
        }
        self.record_problem(name, ("PostStartHookError".to_owned(), message));
    }

    /// Records why a container waits. Each change of the status costs an API request. If an error differs from the last
    /// one only in parts that vary with each try, the status therefore stays the same.
    fn record_problem(&mut self, name: String, (reason, message): (String, String)) {
        let known = self.problems.get(&name);
        let is_known = known.is_some_and(|(r, m)| *r == reason && varying::is_same(m, &message));
        if !is_known {
            self.problems.insert(name, (reason, message));
        }
    }

    /// Records that an operation begins.
    pub(super) fn record_begin(&mut self, facts: &Facts, op: &Op) {
        match op {
            Op::Observe { .. } => {
                self.observe_needed = false;
                self.observed_epoch = self.epoch;
            }
            Op::PreStop { kill, until } | Op::Stop { kill, until, .. } => {
                self.stops.insert(kill.id.clone(), *until);
            }
            Op::Volumes { .. } => {
                if self.volumes.at.is_some() && self.volumes.changed_since(&self.effective) {
                    self.volumes.changed_at = Some(facts.now);
                }
                // Later changes require another refresh.
                (self.volumes.stale, self.volumes.changed) = (false, false);
                self.volumes.retry_at = None;
                self.volumes.shape = super::plan::shape(&self.effective);
            }
            Op::RequestResize => self.resources_freed = false,
            Op::RestartAll(kills) => self.record_restart_of_all(kills),
            Op::Resize { names, to } => self.resizing.begin_update(names, to),
            // An existing cgroup keeps its sizes until it is resized, as running containers may use more than the new
            // sizes.
            Op::Prepare | Op::Upkeep if self.resizing.cgroup.is_none() => {
                self.resizing.set_cgroup(self.wanted.clone());
            }
            Op::Start { start, .. } => {
                // The container is started with the sizes that are granted by now.
                let name = &start.container.name;
                self.resizing.set_container(name, &self.wanted);
                let finished = self.last_exit(&start.container.name);
                if let Some(finished) = finished {
                    let key = backoff_key(start);
                    // Whether the container may start was checked before. This call counts the restart.
                    let _ = self
                        .backoff
                        .start(&key, finished, facts.now, facts.rules.max_backoff);
                }
            }
            _ => {}
        }
    }

    /// All containers restart: their restart counts continue, and they restart whatever their policy.
    fn record_restart_of_all(&mut self, kills: &[Kill]) {
        let observed = self.observed.clone().unwrap_or_default();
        for kill in kills {
            let attempt = observed
                .containers
                .iter()
                .find(|c| c.id == kill.id)
                .map_or(0, |c| c.attempt);
            let count = self.counts.entry(kill.name.clone()).or_default();
            *count = (*count).max(attempt.saturating_add(1));
            self.problems
                .insert(kill.name.clone(), (RESTARTING_ALL.into(), String::new()));
        }
    }

    /// When the newest instance of a container exited. `None` if it has not exited.
    pub(super) fn last_exit(&self, name: &str) -> Option<Timestamp> {
        let newest = self.observed.as_ref()?.newest(name)?;
        (newest.state == ContainerState::Exited)
            .then(|| newest.finished_at.unwrap_or(newest.created_at))
    }

    fn record_failure(&mut self, now: Timestamp, key: &Key, class: Class) {
        let pauses = match class {
            Class::RetryLater | Class::WaitForChange => &RETRY,
            Class::Final => &START_RETRY,
        };
        self.block_until(now, key, class, |failures| {
            time::later(now, pauses.after(failures))
        });
    }

    /// Blocks a failed operation. `until` computes the time of the next try from the number of failures.
    fn block_until(
        &mut self,
        now: Timestamp,
        key: &Key,
        class: Class,
        until: impl FnOnce(u32) -> Timestamp,
    ) {
        let before = self.retries.iter().find(|r| r.key == *key);
        let failures = before.map_or(1, |r| r.failures.saturating_add(1));
        self.forget_retry(key);
        self.retries.push(Retry {
            key: key.clone(),
            failures,
            since: now,
            until: until(failures),
            class,
        });
        if self.overtaken.contains(&(key.clone(), class)) {
            self.wake_retries_of(|retry| retry.key == *key);
        }
    }

    /// Retries operations that failed with one of these classes. A minimum pause remains, as changes may arrive
    /// continually.
    fn wake_retries(&mut self, of: &[Class]) {
        for key in self.in_flight.iter().map(Op::key) {
            for class in of {
                let overtaken = (key.clone(), *class);
                if !self.overtaken.contains(&overtaken) {
                    self.overtaken.push(overtaken);
                }
            }
        }
        self.wake_retries_of(|retry| of.contains(&retry.class));
    }

    fn wake_retries_of(&mut self, is_due: impl Fn(&Retry) -> bool) {
        let waiting = self.retries.iter_mut();
        for retry in waiting.filter(|retry| is_due(retry)) {
            retry.until = retry.until.min(time::later(retry.since, RETRY.after(1)));
            if let Key::Start(_) = retry.key {
                // The start needs the result of another volume refresh.
                self.volumes.fresh = false;
            }
        }
    }

    pub(super) fn forget_retry(&mut self, key: &Key) {
        self.retries.retain(|retry| retry.key != *key);
    }

    fn take_in_flight(&mut self, key: &Key) -> Option<Op> {
        let at = self.in_flight.iter().position(|op| op.key() == *key)?;
        let op = self.in_flight.remove(at);
        if self.in_flight.is_empty() {
            // An idle pod does not keep the memory that its start needed.
            self.in_flight = vec![];
        }
        Some(op)
    }

    pub(super) fn drop_in_flight(&mut self, key: &Key, turn: &mut Turn) {
        self.in_flight.retain(|op| op.key() != *key);
        self.overtaken.retain(|(running, _)| running != key);
        turn.cancel.push(key.clone());
    }
}

/// The image of a container in a pod's spec.
fn image(pod: &Pod, name: &str) -> Option<String> {
    let all = pod::containers(pod);
    let (_, container) = all.iter().find(|(_, c)| c.name == name)?;
    container.image.clone()
}
