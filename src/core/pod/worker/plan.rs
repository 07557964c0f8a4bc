//! What is to be done for a pod now, from what is known (upstream's `SyncPod`). Computed anew
//! after every input; nothing here remembers what was planned before.

use std::collections::BTreeMap;
use std::hash::{Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod};

use super::apply::backoff_key;
use super::{Facts, Growth, Key, Network, Op, Turn, VolumeState, Worker, event, warning};
use crate::core::digest::Fnv64;
use crate::core::pod::actions::{self, PodActions, Start};
use crate::core::pod::lifecycle::{Cause, State};
use crate::core::pod::observed::ObservedPod;
use crate::core::pod::{self, Role, status};
use crate::core::time;

/// A mirror that the API does not show in line is looked after this often.
const MIRROR_AUDIT: SignedDuration = SignedDuration::from_secs(10);

/// What a pod waits for whose volumes could not be refreshed; the journal has why.
const OUTDATED: &str =
    "its volumes are not up to date: they could not be refreshed, and it is tried again";

/// The shortest interval between two refreshes of a pod's volumes for changes of what they are made from. Upstream refreshes
/// with the pod's next sync.
const REFRESH_INTERVAL: SignedDuration = SignedDuration::from_secs(2);

/// A plan in the making.
#[derive(Default)]
struct Plan {
    ops: Vec<Op>,
    /// Times at which something more is to be done.
    wake: Vec<Timestamp>,
    /// What the whole pod waits for.
    waits: Vec<String>,
    /// What single containers wait for; often that is what the whole pod waits for.
    container_waits: Vec<String>,
    /// The sandbox that there is, if any, is left: what is being started in it is not wanted any more.
    leaves_sandbox: bool,
    /// Containers that are stopped to be started again, by id.
    again: Vec<String>,
}

impl Worker {
    /// Computes the plan, cancels what is pointless, and begins what is new.
    pub(super) fn replan(&mut self, facts: &Facts, turn: &mut Turn) {
        let mut plan = self.plan(facts, turn);
        if self.cancel(&plan, turn) {
            // What was cancelled may have to be looked at, or begun otherwise.
            plan = self.plan(facts, turn);
        }
        // What the whole pod waits for explains what its first container does.
        let waiting: Vec<String> = [plan.waits, plan.container_waits]
            .into_iter()
            .filter_map(|waits| waits.into_iter().next())
            .collect();
        for op in plan.ops {
            let key = op.key();
            if self.is_in_flight(&key) {
                continue;
            }
            if let Some(until) = self.held_until(&key, facts.now) {
                plan.wake.push(until);
                continue;
            }
            if let Op::Stop { kill, .. } = &op
                && plan.again.contains(&kill.id)
            {
                self.stopped_to_restart.insert(kill.id.clone());
            }
            self.begun(facts, &op);
            self.in_flight.push(op.clone());
            turn.begin.push(op);
        }
        self.waiting = (!waiting.is_empty()).then(|| waiting.join("; "));
        // What was due before now is in the plan already.
        turn.wake_at = plan.wake.into_iter().filter(|at| *at > facts.now).min();
    }

    fn plan(&mut self, facts: &Facts, turn: &mut Turn) -> Plan {
        let mut plan = Plan::default();
        self.plan_observe(&mut plan);
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

    fn plan_observe(&self, plan: &mut Plan) {
        let needed = match self.state {
            State::Syncing | State::Terminating { .. } => self.look,
            State::Terminated { .. } => false,
            State::Finished { .. } => self.recheck || self.unsure,
        };
        if needed {
            let logs = self.observed.is_none();
            plan.ops.push(Op::Observe { logs });
        }
    }

    /// Until when an operation that failed has to wait.
    fn held_until(&self, key: &Key, now: Timestamp) -> Option<Timestamp> {
        let retry = self.retries.iter().find(|retry| retry.key == *key)?;
        (retry.until > now).then_some(retry.until)
    }

    /// Cancels what is under way and has become pointless, or is planned otherwise now. True if there
    /// was something.
    fn cancel(&mut self, plan: &Plan, turn: &mut Turn) -> bool {
        let ops = &plan.ops;
        let ending = self.state.is_ending();
        // A container that is just being started is one of those that start over: it is seen first.
        let starts_over = ops.iter().any(|op| matches!(op, Op::RestartAll(_)));
        let pointless = |op: &Op| match op {
            // What these have begun cannot be taken back: their end is waited for.
            Op::Observe { .. }
            | Op::Sandbox { .. }
            | Op::StopSandbox(_)
            | Op::ReturnClaims
            | Op::Release { .. }
            | Op::Finalise => false,
            Op::Stop { .. } => ops
                .iter()
                .any(|planned| planned.key() == op.key() && stops_earlier(planned, op)),
            // The hook runs until its container exits, also past the grace period.
            Op::PreStop { kill, .. } => !self.may_run(&kill.id),
            // An ephemeral container is for looking at a pod that ends, too.
            Op::Start { start, .. } => {
                plan.leaves_sandbox || (ending || starts_over) && start.role != Role::Ephemeral
            }
            Op::Mirror => ending && !ops.iter().any(|planned| planned.key() == op.key()),
            Op::Pull(start) => {
                let planned = ops.iter().find(|planned| planned.key() == op.key());
                ending || matches!(planned, Some(Op::Pull(p)) if p.container != start.container)
            }
            _ => ending,
        };
        let keys: Vec<Key> = self
            .in_flight
            .iter()
            .filter(|op| pointless(op))
            .map(Op::key)
            .collect();
        let any = !keys.is_empty();
        for key in keys {
            if matches!(
                key,
                Key::Start(_) | Key::RestartAll | Key::Resize | Key::Collect
            ) {
                // What it did so far is seen first.
                self.acted = self.acted.saturating_add(1);
                (self.look, self.unsure) = (true, true);
            }
            self.drop_in_flight(&key, turn);
        }
        any
    }

    fn plan_sync(&mut self, facts: &Facts, turn: &mut Turn, plan: &mut Plan) {
        if !self.admitted {
            plan.ops.push(Op::Admit);
            plan.waits.push("the node has not admitted it yet".into());
            return;
        }
        self.plan_mirror(facts, plan);
        match self.growth {
            Growth::Wanted => plan.ops.push(Op::Grow),
            Growth::Withdrawn => plan.ops.push(Op::Withdraw),
            Growth::Settled | Growth::Deferred => {}
        }
        plan.wake
            .extend(status::deadline(&self.effective, &self.status));
        let Some(observed) = self.observed.clone() else {
            plan.waits.push("the runtime has not been asked yet".into());
            return;
        };
        let actions = self.plan_actions();
        plan.again.clone_from(&actions.again);
        self.plan_preparation(facts, &actions, plan);
        self.plan_pulls_and_starts(facts, &actions, &observed, turn, plan);
        if self.unsure {
            // What was done last is seen first.
            plan.ops.retain(|op| !op.changes_runtime());
            return;
        }
        if !actions.restart_all.is_empty() {
            plan.ops.retain(|op| !op.changes_runtime());
            plan.ops.push(Op::RestartAll(actions.restart_all));
            return;
        }
        if !actions.kill_pod {
            // Where it need not be stopped any more, the time that it got for that is not what the next stop has.
            self.stop_by = None;
        } else if self.plan_pod_kill(facts, &actions, &observed, turn, plan) {
            return;
        }
        for kill in &actions.kill {
            let grace = kill
                .grace
                .unwrap_or_else(|| pod::grace_seconds(&self.effective));
            plan.ops
                .push(self.stop_within(kill.clone(), grace, facts.now));
        }
        // Where nothing but the cgroup is left to do, what is to be stopped for its new size is gone first.
        let rest = actions.sandbox.is_some() && actions.kill.is_empty();
        let owes = !actions.resize.is_empty() || (rest && self.resizing.owes_cgroup(&self.wanted));
        // Where the upkeep fails it does not keep the containers from their size.
        let is_kept = self.kept_at.is_some() || self.retries.iter().any(|r| r.key == Key::Upkeep);
        if owes && is_kept {
            plan.ops.push(Op::Resize {
                names: actions.resize.clone(),
                to: self.wanted.clone(),
            });
        }
        self.plan_sandbox(facts, &actions, turn, plan);
        self.plan_collection(&observed, plan);
    }

    /// A static pod's mirror, until the API shows the right one.
    fn plan_mirror(&self, facts: &Facts, plan: &mut Plan) {
        if !facts.rules.mirrors || !pod::is_static(&self.effective) {
            return;
        }
        if self.update.status_object().is_some() {
            return;
        }
        match &self.mirrored {
            Some((seen, at))
                if *seen == self.update.identity()
                    && facts.now < time::later(*at, MIRROR_AUDIT) =>
            {
                plan.wake.push(time::later(*at, MIRROR_AUDIT));
            }
            _ => plan.ops.push(Op::Mirror),
        }
    }

    /// Steps 5, 7 and 8: cgroup, directories, volumes.
    fn plan_preparation(&mut self, facts: &Facts, actions: &PodActions, plan: &mut Plan) {
        let every = facts.rules.sync_frequency;
        let starts = !actions.start.is_empty() || actions.create_sandbox.is_some();
        let is_held = self.held_until(&Key::Volumes, facts.now).is_some();
        // While a refresh that failed waits for its next try, containers start with what there is.
        if !starts && !is_held {
            self.volumes.fresh = false;
        }
        let due = |at: Option<Timestamp>| at.is_none_or(|at| time::later(at, every) <= facts.now);
        let refresh = self.volumes.stale
            || due(self.volumes.at)
            || self.volumes.again.is_some_and(|at| at <= facts.now)
            || self.volumes.shape != shape(&self.effective);
        let next_refresh = self.volumes.next_for_change(&self.effective, facts.now);
        plan.wake.extend(next_refresh);
        plan.wake
            .extend(self.volumes.at.map(|at| time::later(at, every)));
        plan.wake.extend(self.volumes.again);
        let creates = actions.create_sandbox.is_some();
        let prepared = match creates {
            true => self.prepared_at,
            false => self.kept_at,
        };
        if starts || refresh {
            plan.wake.extend(prepared.map(|at| time::later(at, every)));
        }
        if (starts || refresh) && due(prepared) {
            if creates {
                plan.ops.push(Op::Prepare);
                plan.waits
                    .push("its cgroup and directories are being made".into());
                return;
            }
            // What fails there must not keep a running pod from its tokens, nor its containers from starting again.
            plan.ops.push(Op::Upkeep);
            if self.adopts_empty_sandbox(actions) {
                return;
            }
        }
        if refresh && is_held && self.volumes.at.is_some() {
            plan.waits.push(OUTDATED.into());
        }
        let wanted = refresh || (!actions.start.is_empty() && !self.volumes.fresh);
        if wanted && next_refresh.is_none() {
            let known = self
                .observed
                .as_ref()
                .is_some_and(|o| o.live().next().is_some());
            plan.ops.push(Op::Volumes { known });
        }
    }

    /// Stops the whole pod so that it can start over. True while that is not done.
    fn plan_pod_kill(
        &mut self,
        facts: &Facts,
        actions: &PodActions,
        observed: &Arc<ObservedPod>,
        turn: &mut Turn,
        plan: &mut Plan,
    ) -> bool {
        let grace = pod::grace_seconds(&self.effective);
        let begins = self.stop_by.is_none();
        let until = self.stop_by.unwrap_or(time::in_seconds(facts.now, grace));
        let stops = self.plan_stop(observed, until, facts.now);
        if stops.is_empty() {
            self.stop_by = None;
            return false;
        }
        self.stop_by = Some(until);
        plan.leaves_sandbox = true;
        if begins && actions.create_sandbox.is_some() && !observed.sandboxes.is_empty() {
            let message = "Pod sandbox changed, it will be killed and re-created.";
            turn.events.push(event("SandboxChanged", message.into()));
        }
        plan.ops.retain(|op| !op.changes_runtime());
        plan.ops.extend(stops);
        plan.wake.extend((until > facts.now).then_some(until));
        plan.waits
            .push("its sandbox is being stopped, to be made anew".into());
        true
    }

    fn plan_sandbox(
        &mut self,
        facts: &Facts,
        actions: &PodActions,
        turn: &mut Turn,
        plan: &mut Plan,
    ) {
        let Some(attempt) = actions.create_sandbox else {
            return;
        };
        if self.needs_preparation(facts) {
            return;
        }
        if !pod::host_network(&self.effective) {
            match self.network.clone() {
                Network::Ready => self.network_told = false,
                Network::Unknown => {
                    plan.waits
                        .push("the runtime has not been asked about its network yet".into());
                    return;
                }
                Network::NotReady(why) => {
                    let message = format!("network is not ready: {why}");
                    if !std::mem::replace(&mut self.network_told, true) {
                        turn.events
                            .push(warning("NetworkNotReady", message.clone()));
                    }
                    plan.waits.push(format!("the node's {message}"));
                    return;
                }
            }
        }
        plan.ops.push(Op::Sandbox { attempt });
        plan.waits.push("its sandbox is being made".into());
    }

    /// Whether the pod's sandbox has no container yet and this worker has not prepared the pod: the call that created the sandbox
    /// was cut off, and the directories may have been released since.
    fn adopts_empty_sandbox(&self, actions: &PodActions) -> bool {
        let (Some(sandbox), Some(observed)) = (&actions.sandbox, &self.observed) else {
            return false;
        };
        let is_empty = observed.containers.iter().all(|c| c.sandbox != *sandbox);
        let has_failed = self.retries.iter().any(|r| r.key == Key::Upkeep);
        is_empty && self.kept_at.is_none() && !has_failed
    }

    fn needs_preparation(&self, facts: &Facts) -> bool {
        self.prepared_at
            .is_none_or(|at| time::later(at, facts.rules.sync_frequency) <= facts.now)
    }

    /// Step 10's containers: images side by side, starts in the order of the spec. A container waits
    /// for those before it that are being started now, not for those that are held back.
    fn plan_pulls_and_starts(
        &mut self,
        facts: &Facts,
        actions: &PodActions,
        observed: &Arc<ObservedPod>,
        turn: &mut Turn,
        plan: &mut Plan,
    ) {
        let sandbox = actions
            .sandbox
            .as_ref()
            .and_then(|id| observed.sandboxes.iter().find(|s| s.id == *id));
        let killed = |name: &str| actions.kill.iter().any(|k| k.name == name);
        let order: Vec<String> = pod::containers(&self.effective)
            .iter()
            .map(|(_, c)| c.name.clone())
            .collect();
        let place = |name: &str| order.iter().position(|n| n == name);
        for start in &actions.start {
            let name = &start.container.name;
            if self.is_in_flight(&Key::Start(name.clone())) {
                plan.container_waits
                    .push(format!("container {name} is being started"));
                continue;
            }
            if let Some(until) = self.hold_back(facts, start, observed, turn) {
                plan.wake.push(until);
                plan.container_waits
                    .push(format!("container {name} waits to be started again"));
                continue;
            }
            if killed(name) {
                continue;
            }
            if !self.images.contains(name) {
                plan.ops.push(Op::Pull(start.clone()));
                plan.container_waits
                    .push(format!("container {name} waits for its image"));
                continue;
            }
            let before = |other: &Op| match other {
                Op::Pull(s) | Op::Start { start: s, .. } => place(&s.container.name) < place(name),
                _ => false,
            };
            let ends = |other: &String| place(other) < place(name);
            let blocked = plan.ops.iter().chain(&self.in_flight).any(before)
                || self.failed_hooks.values().any(ends);
            let ready = self.volumes.fresh;
            let reason = match sandbox {
                Some(sandbox) if self.is_left(&sandbox.id) => "waits for the pod's sandbox",
                Some(sandbox) if ready && !blocked => {
                    plan.ops.push(Op::Start {
                        start: start.clone(),
                        sandbox: sandbox.id.clone(),
                        attempt: sandbox.attempt,
                        ips: sandbox.ips.clone(),
                    });
                    "is being started"
                }
                Some(_) if !ready => "waits for the pod's volumes",
                Some(_) => "waits for the containers before it",
                None => "waits for the pod's sandbox",
            };
            plan.container_waits
                .push(format!("container {name} {reason}"));
        }
        self.note_init_waits(observed, actions, plan);
    }

    /// Whether the worker stops the pod's sandbox, or has stopped it and has not observed the runtime since.
    fn is_left(&self, sandbox: &str) -> bool {
        let stops = |op: &Op| matches!(op, Op::StopSandbox(id) if id == sandbox);
        self.stopped_sandboxes.contains(sandbox) || self.in_flight.iter().any(stops)
    }

    /// Containers that no action starts yet because an init container or a sidecar comes first.
    fn note_init_waits(&self, observed: &ObservedPod, actions: &PodActions, plan: &mut Plan) {
        let Some(sandbox) = actions
            .sandbox
            .as_ref()
            .filter(|_| actions.start.is_empty())
        else {
            return;
        };
        // Those of an older sandbox are history: all init containers run again in a new one.
        let here = |name: &str| observed.newest(name).is_some_and(|c| c.sandbox == *sandbox);
        let spec = pod::spec(&self.effective);
        let starts = |c: &Container| {
            actions::should_start(&self.effective, c, observed, &self.stopped_to_restart)
        };
        let mut regular = spec.containers.iter();
        let missing = regular.find(|c| !here(&c.name) && starts(c));
        let mut init = spec.init_containers.iter().flatten();
        let before = init.rfind(|c| here(&c.name));
        if let (Some(missing), Some(before)) = (missing, before) {
            plan.container_waits.push(format!(
                "container {} waits until init container {} is done or has started",
                missing.name, before.name
            ));
        }
    }

    /// Until when a container may not be started: a crash-loop back-off, or a start that failed.
    fn hold_back(
        &mut self,
        facts: &Facts,
        start: &Start,
        observed: &ObservedPod,
        turn: &mut Turn,
    ) -> Option<Timestamp> {
        let name = &start.container.name;
        let failed = self.held_until(&Key::Start(name.clone()), facts.now);
        if failed.is_some() {
            return failed;
        }
        let finished = self.last_end(name)?;
        let key = backoff_key(start);
        let held = self.backoff.held(&key, finished, facts.now)?;
        let shown = time::shown(Duration::try_from(held.delay).unwrap_or_default());
        let who = pod::described(&self.effective);
        let message = format!("back-off {shown} restarting failed container={name} pod={who}");
        self.problems
            .insert(name.clone(), ("CrashLoopBackOff".into(), message));
        let attempt = observed.newest(name).map_or(0, |c| c.attempt);
        if self.announced.insert(name.clone(), attempt) != Some(attempt) {
            let mut event = warning(
                "BackOff",
                format!("Back-off restarting failed container {name} in pod {who}"),
            );
            event.field_path = Some(start.role.field_path(name));
            turn.events.push(event);
        }
        Some(held.until)
    }

    /// Ended containers and sandboxes that nobody needs any more.
    fn plan_collection(&self, observed: &ObservedPod, plan: &mut Plan) {
        let starting = self
            .in_flight
            .iter()
            .chain(&plan.ops)
            .any(|op| matches!(op, Op::Start { .. } | Op::Sandbox { .. }));
        // What is there is about to be seen: nothing is removed on older news.
        if starting || self.look || self.is_in_flight(&Key::Observe) {
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

    fn plan_termination(&self, facts: &Facts, plan: &mut Plan) {
        let making = self
            .in_flight
            .iter()
            .any(|op| matches!(op, Op::Sandbox { .. }));
        let Some(observed) = self.observed.as_ref().filter(|_| !self.unsure) else {
            return;
        };
        let until = self.stop_by.unwrap_or(facts.now);
        plan.wake.extend((until > facts.now).then_some(until));
        let stops = self.plan_stop(observed, until, facts.now);
        // A sandbox that is being made is stopped when it is there.
        plan.ops.extend(stops.into_iter().filter(|_| !making));
        if self.has_stopped() && self.owes_claims() {
            plan.ops.push(Op::ReturnClaims);
            plan.waits
                .push("its resource claims are being given back".into());
        }
    }

    /// Stops and removes what the runtime has of a finished pod: a call that was cut off was carried out late.
    fn plan_leftovers(&self, facts: &Facts, plan: &mut Plan) {
        let Some(observed) = self.observed.as_ref().filter(|_| !self.unsure) else {
            return;
        };
        let stops = self.plan_stop(observed, facts.now, facts.now);
        if stops.is_empty() && self.leftover {
            plan.ops.push(Op::Release { content: true });
        }
        plan.ops.extend(stops);
    }

    fn plan_end(&self, facts: &Facts, cause: Cause, plan: &mut Plan) {
        self.plan_leftovers(facts, plan);
        if self.admitted && !matches!(cause, Cause::Deleted | Cause::Removed) {
            // A static pod may have come to its end before its mirror was there to tell it, or lose that now.
            self.plan_mirror(facts, plan);
        }
        let has_object = self
            .update
            .object
            .as_ref()
            .is_some_and(|object| !pod::is_mirror(object));
        if cause == Cause::Deleted && has_object && !self.update.removed && !self.finalised {
            plan.ops.push(Op::Finalise);
        }
    }
}

impl VolumeState {
    /// Whether what the volumes are made from has changed since the last refresh was begun: a watched object, or what the
    /// pod's files show of the pod itself.
    pub(super) fn changed_since(&self, pod: &Pod) -> bool {
        self.changed || self.shape != shape(pod)
    }

    /// When the next refresh for a change may begin, if a change has to wait for that.
    fn next_for_change(&self, pod: &Pod, now: Timestamp) -> Option<Timestamp> {
        let next = self.changed_at?.checked_add(REFRESH_INTERVAL).ok()?;
        (next > now && self.changed_since(pod)).then_some(next)
    }
}

fn stops_earlier(planned: &Op, under_way: &Op) -> bool {
    match (planned, under_way) {
        (Op::Stop { until: new, .. }, Op::Stop { until: old, .. }) => new < old,
        _ => false,
    }
}

/// What a pod's own files show of it: other labels, annotations or resources make other files.
pub(super) fn shape(pod: &Pod) -> u64 {
    let mut hasher = Fnv64::default();
    let text = |map: &Option<BTreeMap<String, String>>, hasher: &mut Fnv64| {
        map.iter().flatten().for_each(|entry| entry.hash(hasher));
    };
    text(&pod.metadata.labels, &mut hasher);
    text(&pod.metadata.annotations, &mut hasher);
    for (_, container) in pod::containers(pod) {
        let resources = container.resources.as_ref();
        let sides = [
            resources.and_then(|r| r.requests.as_ref()),
            resources.and_then(|r| r.limits.as_ref()),
        ];
        for (name, quantity) in sides.into_iter().flatten().flatten() {
            (name, &quantity.0).hash(&mut hasher);
        }
    }
    hasher.finish()
}
