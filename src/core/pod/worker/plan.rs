//! Computes the operations that a pod needs now (`SyncPod` in `pkg/kubelet/kubelet.go`). The plan is computed from
//! scratch after every input; no earlier plan is stored.
//!
//! The parts of the worker propose operations; this file puts their proposals together. Operations that are in progress
//! continue, unless the table of operations says that they are cancelled now (`op.rs`). Failed operations wait for the
//! end of their back-off (`operations.rs`). All others begin.
//!
//! A pod that is synced has at most one reason that prevents changes of the runtime ([`Hold`]). Everything else proceeds
//! meanwhile: images are pulled, volumes refreshed, and the pod is observed.

use jiff::Timestamp;

use super::op::Cancel;
use super::{Facts, Key, Op, PodEvent, Turn, Worker};
use crate::pod::actions::{self, PodActions};
use crate::pod::lifecycle::{Cause, State};
use crate::pod::observed::ObservedPod;
use crate::pod::{self, status};
use crate::time;

/// A plan under construction.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) ops: Vec<Op>,
    /// When the plan must be computed again.
    pub(super) wake: Vec<Timestamp>,
    /// What the whole pod waits for.
    pub(super) waits: Vec<String>,
    /// What single containers wait for. Often this is what the whole pod waits for.
    pub(super) container_waits: Vec<String>,
    /// Whether the existing sandbox is abandoned, so that starts in it are cancelled.
    abandons_sandbox: bool,
    /// Ids of containers that are stopped in order to be restarted.
    to_restart: Vec<String>,
}

/// Why the runtime must not be changed to bring the pod up.
pub(super) enum Hold {
    /// The outcome of an operation is unknown: its effects are observed first.
    OutcomeUnknown,
    /// All containers restart.
    RestartAll,
    /// The whole pod is stopped before it starts again.
    PodKill {
        /// When its grace period expires.
        until: Timestamp,
        /// The stops that are due.
        stops: Vec<Op>,
    },
}

impl Worker {
    /// Computes the plan, cancels pointless operations, and begins new ones.
    pub(super) fn replan(&mut self, facts: &Facts, turn: &mut Turn) {
        let mut plan = self.plan(facts, turn);
        if self.cancel_pointless(&plan, turn) {
            // Cancelled operations may need an observation, or begin differently.
            plan = self.plan(facts, turn);
        }
        // What the whole pod waits for explains what its first container waits for.
        let waiting: Vec<String> = [plan.waits, plan.container_waits]
            .into_iter()
            .filter_map(|waits| waits.into_iter().next())
            .collect();
        for op in plan.ops {
            let key = op.key();
            if self.operations.is_in_flight(&key) {
                continue;
            }
            if let Some(until) = self.operations.blocked_until(&key, facts.now) {
                plan.wake.push(until);
                continue;
            }
            if let Op::Stop { kill, .. } = &op
                && plan.to_restart.contains(&kill.id)
            {
                self.restarts.apply_stop_to_restart(kill.id.clone());
            }
            self.apply_begin(facts, &op);
            self.operations.begin(op.clone());
            turn.begin.push(op);
        }
        self.publication.waiting = (!waiting.is_empty()).then(|| waiting.join("; "));
        // Times up to now are covered by this plan.
        turn.wake_at = plan.wake.into_iter().filter(|at| *at > facts.now).min();
    }

    fn plan(&mut self, facts: &Facts, turn: &mut Turn) -> Plan {
        let mut plan = Plan::default();
        if self.needs_observation() {
            plan.ops.push(self.observation.propose());
        }
        match self.state {
            State::Syncing => self.plan_sync(facts, turn, &mut plan),
            State::Terminating { .. } => self.plan_termination(facts, &mut plan),
            State::Terminated { cause } => plan.ops.push(Op::Release {
                content: cause.removes_content(),
            }),
            State::Finished { cause } => self.plan_end(facts, cause, &mut plan),
        }
        plan
    }

    fn needs_observation(&self) -> bool {
        match self.state {
            State::Syncing | State::Terminating { .. } => self.observation.is_needed(),
            State::Terminated { .. } => false,
            State::Finished { .. } => {
                self.ending.suspects_leftovers() || self.observation.is_outcome_unknown()
            }
        }
    }

    /// Cancels running operations that are pointless or planned differently now. Returns true if there are any.
    fn cancel_pointless(&mut self, plan: &Plan, turn: &mut Turn) -> bool {
        let ending = self.state.is_ending();
        // If all containers restart, a container that is being started must restart too. It is observed first.
        let starts_over = plan.ops.iter().any(|op| matches!(op, Op::RestartAll(_)));
        let pointless = |op: &Op| {
            let facts = op.facts();
            let planned = plan.ops.iter().map(Op::facts);
            let mut planned = planned.filter(|planned| planned.key == facts.key);
            let is_pointless = match facts.cancel {
                Cancel::Never => false,
                Cancel::AtTermination => ending,
                Cancel::AtTerminationUnlessPlanned => ending && planned.next().is_none(),
                Cancel::AtTerminationOrChange { .. } if ending => true,
                Cancel::WithSandbox { ephemeral } => {
                    plan.abandons_sandbox || ((ending || starts_over) && !ephemeral)
                }
                Cancel::WhenExited { id } => {
                    let observed = self.observation.pod();
                    observed.is_some_and(|observed| !self.stops.may_run(observed, id))
                }
                Cancel::AtTerminationOrChange { .. } | Cancel::ForEarlierDeadline { .. } => {
                    planned.any(|planned| facts.cancel.is_replaced_by(planned.cancel))
                }
            };
            is_pointless.then_some((facts.key, facts.observe_after_cancel))
        };
        let cancelled: Vec<(Key, bool)> =
            self.operations.in_flight().filter_map(pointless).collect();
        let any = !cancelled.is_empty();
        for (key, observe) in cancelled {
            if observe {
                // The partial effects of the operation are observed first.
                self.observation.begin_epoch();
                self.observation.require_before_changes();
            }
            self.cancel(&key, turn);
        }
        any
    }

    /// Cancels an operation.
    pub(super) fn cancel(&mut self, key: &Key, turn: &mut Turn) {
        self.operations.cancel(key);
        turn.cancel.push(key.clone());
    }

    fn plan_sync(&mut self, facts: &Facts, turn: &mut Turn, plan: &mut Plan) {
        if !self.desired.admitted {
            plan.ops.push(Op::Admit);
            plan.waits.push("waiting for admission".into());
            return;
        }
        self.plan_mirror(facts, plan);
        plan.ops.extend(self.desired.propose());
        let deadline = status::deadline(self.pod(), self.status());
        plan.wake.extend(deadline);
        let Some(observed) = self.observation.pod().cloned() else {
            let why = "waiting for the first runtime status";
            return plan.waits.push(why.into());
        };
        let actions = self.plan_actions();
        plan.to_restart.clone_from(&actions.to_restart);
        let pod = self.desired.pod();
        let refresh = self.operations.blocked_until(&Key::Volumes, facts.now);
        self.readiness
            .propose(facts, pod, &observed, &actions, refresh.is_some(), plan);
        let hold = self.hold(facts, &actions, &observed);
        self.plan_starts(facts, &actions, &observed, hold.as_ref(), turn, plan);
        match hold {
            Some(Hold::OutcomeUnknown) => {}
            Some(Hold::RestartAll) => plan.ops.push(Op::RestartAll(actions.restart_all)),
            Some(Hold::PodKill { until, stops }) => {
                let replaces = actions.create_sandbox.is_some() && !observed.sandboxes.is_empty();
                self.plan_pod_kill(facts, until, stops, replaces, turn, plan);
            }
            None => self.plan_changes(facts, &actions, &observed, turn, plan),
        }
    }

    /// What prevents changes of the runtime, if anything.
    fn hold(&self, facts: &Facts, actions: &PodActions, observed: &ObservedPod) -> Option<Hold> {
        if self.observation.is_outcome_unknown() {
            return Some(Hold::OutcomeUnknown);
        }
        if !actions.restart_all.is_empty() {
            return Some(Hold::RestartAll);
        }
        if !actions.kill_pod {
            return None;
        }
        let grace = pod::grace_seconds(self.pod());
        let known = self.stops.pod_deadline();
        let until = known.unwrap_or(time::in_seconds(facts.now, grace));
        let stops = self.plan_stops(observed, until, facts.now);
        (!stops.is_empty()).then_some(Hold::PodKill { until, stops })
    }

    /// The containers and sandboxes to stop now, so that at `until` nothing of the pod runs.
    fn plan_stops(&self, observed: &ObservedPod, until: Timestamp, now: Timestamp) -> Vec<Op> {
        let runs_hook = |id: &str| {
            let key = Key::PreStop(id.to_owned());
            self.operations.is_in_flight(&key)
        };
        self.stops
            .propose(self.pod(), observed, runs_hook, until, now)
    }

    /// Stops the whole pod so that it can start again. `replaces` says whether a sandbox is lost and will be replaced.
    fn plan_pod_kill(
        &mut self,
        facts: &Facts,
        until: Timestamp,
        stops: Vec<Op>,
        replaces: bool,
        turn: &mut Turn,
        plan: &mut Plan,
    ) {
        if self.stops.pod_deadline().is_none() && replaces {
            let message = "Pod sandbox changed, it will be killed and re-created.";
            turn.events
                .push(PodEvent::normal("SandboxChanged", message));
        }
        self.stops.apply_pod_deadline(until);
        plan.abandons_sandbox = true;
        plan.ops.extend(stops);
        plan.wake.extend((until > facts.now).then_some(until));
        let why = "its sandbox is being stopped and will be replaced";
        plan.waits.push(why.into());
    }

    /// Plans changes of the runtime other than starts: stops of single containers, the resize, the sandbox, and the
    /// removal of exited containers.
    fn plan_changes(
        &mut self,
        facts: &Facts,
        actions: &PodActions,
        observed: &ObservedPod,
        turn: &mut Turn,
        plan: &mut Plan,
    ) {
        self.stops.forget_pod_deadline();
        let pod = self.desired.pod();
        for kill in &actions.kill {
            plan.ops.push(self.stops.propose_stop(kill, pod, facts.now));
        }
        // If only the cgroup remains to be resized, containers that restart for their new size stop first.
        let only_cgroup = actions.sandbox.is_some() && actions.kill.is_empty();
        let resize = self.desired.propose_resize(&actions.resize, only_cgroup);
        // A failing upkeep does not block the resize.
        let has_upkeep = self.readiness.has_upkeep() || self.operations.has_failed(&Key::Upkeep);
        plan.ops.extend(resize.filter(|_| has_upkeep));
        if let Some(attempt) = actions.create_sandbox {
            self.readiness
                .propose_sandbox(facts, pod, attempt, turn, plan);
        }
        self.plan_collection(observed, plan);
    }

    /// Plans the removal of exited containers and stopped sandboxes that are no longer needed.
    fn plan_collection(&self, observed: &ObservedPod, plan: &mut Plan) {
        let starts = |op: &Op| op.starts_container() || op.creates_sandbox();
        let starting = self.operations.in_flight().any(starts) || plan.ops.iter().any(starts);
        let is_observing = self.operations.is_in_flight(&Key::Observe);
        // An observation is due or running. Nothing is removed on the basis of an older one.
        if starting || self.observation.is_needed() || is_observing {
            return;
        }
        let containers: Vec<_> = actions::surplus(observed)
            .into_iter()
            .map(|c| (c.id.clone(), c.name.clone(), c.attempt))
            .collect();
        let sandboxes: Vec<String> = actions::surplus_sandboxes(observed)
            .into_iter()
            .map(Into::into)
            .collect();
        if !containers.is_empty() || !sandboxes.is_empty() {
            plan.ops.push(Op::Collect {
                containers,
                sandboxes,
            });
        }
    }

    /// Plans writing a static pod's mirror.
    fn plan_mirror(&self, facts: &Facts, plan: &mut Plan) {
        match self.publication.propose_mirror(facts, self.update()) {
            Some(Ok(op)) => plan.ops.push(op),
            Some(Err(next)) => plan.wake.push(next),
            None => {}
        }
    }

    fn plan_termination(&self, facts: &Facts, plan: &mut Plan) {
        let Some(observed) = self.observation.certain_pod() else {
            return;
        };
        let until = self.stops.pod_deadline().unwrap_or(facts.now);
        plan.wake.extend((until > facts.now).then_some(until));
        // A sandbox that is being created is stopped once it exists.
        if !self.operations.in_flight().any(Op::creates_sandbox) {
            plan.ops.extend(self.plan_stops(observed, until, facts.now));
        }
        if self.has_stopped() && self.needs_claim_release() {
            plan.ops.push(Op::UnprepareClaims);
            let why = "its resource claims are being unprepared";
            plan.waits.push(why.into());
        }
    }

    /// Stops and removes what the runtime has of a finished pod, because it carried out a cancelled call late.
    fn plan_leftovers(&self, facts: &Facts, plan: &mut Plan) {
        let Some(observed) = self.observation.certain_pod() else {
            return;
        };
        let stops = self.plan_stops(observed, facts.now, facts.now);
        if stops.is_empty() && self.ending.has_leftovers() {
            plan.ops.push(Op::Release { content: true });
        }
        plan.ops.extend(stops);
    }

    fn plan_end(&self, facts: &Facts, cause: Cause, plan: &mut Plan) {
        self.plan_leftovers(facts, plan);
        if self.desired.admitted && !matches!(cause, Cause::Deleted | Cause::Removed) {
            // A static pod may have finished before its mirror existed, or its mirror may be deleted now.
            self.plan_mirror(facts, plan);
        }
        let removal = self.ending.propose_removal(cause, self.update());
        plan.ops.extend(removal);
    }
}
