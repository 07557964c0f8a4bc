//! Computes the operations that a pod needs now (`SyncPod` in `pkg/kubelet/kubelet.go`). The plan is computed from
//! scratch after every input; no earlier plan is stored.

use std::collections::BTreeMap;
use std::hash::{Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod};

use super::{Facts, Key, Network, Op, ResizeRequest, Turn, VolumeState, Worker, event, warning};
use crate::digest::Fnv64;
use crate::pod::actions::{self, PodActions, Start};
use crate::pod::lifecycle::{Cause, State};
use crate::pod::observed::ObservedPod;
use crate::pod::{self, Role, status};
use crate::time;

/// Interval at which a mirror is written again while the API does not have the right one.
const MIRROR_AUDIT: SignedDuration = SignedDuration::from_secs(10);

/// What a pod waits for if refreshing its volumes failed. The journal has the error.
const OUTDATED: &str = "refreshing its volumes failed; retrying";

/// Minimum interval between two volume refreshes that are caused by changes. Upstream refreshes with the pod's next
/// sync.
const REFRESH_INTERVAL: SignedDuration = SignedDuration::from_secs(2);

/// A plan under construction.
#[derive(Default)]
struct Plan {
    ops: Vec<Op>,
    /// When the plan must be computed again.
    wake: Vec<Timestamp>,
    /// What the whole pod waits for.
    waits: Vec<String>,
    /// What single containers wait for. Often this is what the whole pod waits for.
    container_waits: Vec<String>,
    /// Whether the existing sandbox is abandoned, so that starts in it are cancelled.
    abandons_sandbox: bool,
    /// Ids of containers that are stopped in order to be restarted.
    to_restart: Vec<String>,
}

impl Worker {
    /// Computes the plan, cancels pointless operations, and begins new ones.
    pub(super) fn replan(&mut self, facts: &Facts, turn: &mut Turn) {
        let mut plan = self.plan(facts, turn);
        if self.cancel(&plan, turn) {
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
            if self.is_in_flight(&key) {
                continue;
            }
            if let Some(until) = self.blocked_until(&key, facts.now) {
                plan.wake.push(until);
                continue;
            }
            if let Op::Stop { kill, .. } = &op
                && plan.to_restart.contains(&kill.id)
            {
                self.stopped_to_restart.insert(kill.id.clone());
            }
            self.record_begin(facts, &op);
            self.in_flight.push(op.clone());
            turn.begin.push(op);
        }
        self.waiting = (!waiting.is_empty()).then(|| waiting.join("; "));
        // Times up to now are covered by this plan.
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
            State::Syncing | State::Terminating { .. } => self.observe_needed,
            State::Terminated { .. } => false,
            State::Finished { .. } => self.recheck || self.outcome_unknown,
        };
        if needed {
            let logs = self.observed.is_none();
            plan.ops.push(Op::Observe { logs });
        }
    }

    /// When a failed operation may be retried. `None` if it need not wait.
    fn blocked_until(&self, key: &Key, now: Timestamp) -> Option<Timestamp> {
        let retry = self.retries.iter().find(|retry| retry.key == *key)?;
        (retry.until > now).then_some(retry.until)
    }

    /// Cancels running operations that are pointless or planned differently now. Returns true if there are any.
    fn cancel(&mut self, plan: &Plan, turn: &mut Turn) -> bool {
        let ops = &plan.ops;
        let ending = self.state.is_ending();
        // If all containers restart, a container that is being started must restart too. It is observed first.
        let starts_over = ops.iter().any(|op| matches!(op, Op::RestartAll(_)));
        let pointless = |op: &Op| match op {
            // The effects of these cannot be undone, so their completion is awaited.
            Op::Observe { .. }
            | Op::Sandbox { .. }
            | Op::StopSandbox(_)
            | Op::UnprepareClaims
            | Op::Release { .. }
            | Op::Finalise => false,
            Op::Stop { .. } => ops
                .iter()
                .any(|planned| planned.key() == op.key() && stops_earlier(planned, op)),
            // The hook runs until its container exits, even beyond the grace period.
            Op::PreStop { kill, .. } => !self.may_run(&kill.id),
            // An ephemeral container may also debug a terminating pod.
            Op::Start { start, .. } => {
                plan.abandons_sandbox || (ending || starts_over) && start.role != Role::Ephemeral
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
                // The partial effects of the operation are observed first.
                self.epoch = self.epoch.saturating_add(1);
                (self.observe_needed, self.outcome_unknown) = (true, true);
            }
            self.drop_in_flight(&key, turn);
        }
        any
    }

    fn plan_sync(&mut self, facts: &Facts, turn: &mut Turn, plan: &mut Plan) {
        if !self.admitted {
            plan.ops.push(Op::Admit);
            plan.waits.push("waiting for admission".into());
            return;
        }
        self.plan_mirror(facts, plan);
        match self.resize_request {
            ResizeRequest::ToSend => plan.ops.push(Op::RequestResize),
            ResizeRequest::ToCancel => plan.ops.push(Op::CancelResize),
            ResizeRequest::None | ResizeRequest::Deferred => {}
        }
        plan.wake
            .extend(status::deadline(&self.effective, &self.status));
        let Some(observed) = self.observed.clone() else {
            return plan
                .waits
                .push("waiting for the first runtime status".into());
        };
        let actions = self.plan_actions();
        plan.to_restart.clone_from(&actions.to_restart);
        self.plan_preparation(facts, &actions, plan);
        self.plan_pulls_and_starts(facts, &actions, &observed, turn, plan);
        if self.outcome_unknown {
            // The effects of the last operation are observed first.
            plan.ops.retain(|op| !op.changes_runtime());
            return;
        }
        if !actions.restart_all.is_empty() {
            plan.ops.retain(|op| !op.changes_runtime());
            plan.ops.push(Op::RestartAll(actions.restart_all));
            return;
        }
        if !actions.kill_pod {
            // If the pod need not be stopped any more, the next stop gets a full grace period.
            self.stop_by = None;
        } else if self.plan_pod_kill(facts, &actions, &observed, turn, plan) {
            return;
        }
        for kill in &actions.kill {
            let default = || pod::grace_seconds(&self.effective);
            let grace = kill.grace.unwrap_or_else(default);
            let stop = self.stop_within(kill.clone(), grace, facts.now);
            plan.ops.push(stop);
        }
        // If only the cgroup remains to be resized, containers that restart for their new size stop first.
        let only_cgroup = actions.sandbox.is_some() && actions.kill.is_empty();
        let needs_resize = !actions.resize.is_empty()
            || (only_cgroup && self.resizing.needs_cgroup_resize(&self.wanted));
        // A failing upkeep does not block the resize.
        let has_upkeep =
            self.upkeep_at.is_some() || self.retries.iter().any(|r| r.key == Key::Upkeep);
        if needs_resize && has_upkeep {
            plan.ops.push(Op::Resize {
                names: actions.resize.clone(),
                to: self.wanted.clone(),
            });
        }
        self.plan_sandbox(facts, &actions, turn, plan);
        self.plan_collection(&observed, plan);
    }

    /// Plans writing a static pod's mirror until the API has the right one.
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

    /// Plans cgroup, directories and volumes (steps 5, 7 and 8 in ARCHITECTURE.md).
    fn plan_preparation(&mut self, facts: &Facts, actions: &PodActions, plan: &mut Plan) {
        let every = facts.rules.sync_frequency;
        let starts = !actions.start.is_empty() || actions.create_sandbox.is_some();
        let is_blocked = self.blocked_until(&Key::Volumes, facts.now).is_some();
        // While a failed refresh waits for its retry, containers start with the existing volumes.
        if !starts && !is_blocked {
            self.volumes.fresh = false;
        }
        let due = |at: Option<Timestamp>| at.is_none_or(|at| time::later(at, every) <= facts.now);
        let refresh = self.volumes.stale
            || due(self.volumes.at)
            || self.volumes.retry_at.is_some_and(|at| at <= facts.now)
            || self.volumes.shape != shape(&self.effective);
        let next_refresh = self.volumes.next_for_change(&self.effective, facts.now);
        plan.wake.extend(next_refresh);
        plan.wake
            .extend(self.volumes.at.map(|at| time::later(at, every)));
        plan.wake.extend(self.volumes.retry_at);
        let creates = actions.create_sandbox.is_some();
        let prepared = match creates {
            true => self.prepared_at,
            false => self.upkeep_at,
        };
        if starts || refresh {
            plan.wake.extend(prepared.map(|at| time::later(at, every)));
        }
        if (starts || refresh) && due(prepared) {
            if creates {
                plan.ops.push(Op::Prepare);
                plan.waits
                    .push("its cgroup and directories are being created".into());
                return;
            }
            // A failure here must not block the token refresh of a running pod, nor the restart of its containers.
            plan.ops.push(Op::Upkeep);
            if self.adopts_empty_sandbox(actions) {
                plan.waits
                    .push("its cgroup and directories are being created".into());
                return;
            }
        }
        if refresh && is_blocked && self.volumes.at.is_some() {
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

    /// Stops the whole pod so that it can start again. Returns true until that is done.
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
        plan.abandons_sandbox = true;
        if begins && actions.create_sandbox.is_some() && !observed.sandboxes.is_empty() {
            let message = "Pod sandbox changed, it will be killed and re-created.";
            turn.events.push(event("SandboxChanged", message.into()));
        }
        plan.ops.retain(|op| !op.changes_runtime());
        plan.ops.extend(stops);
        plan.wake.extend((until > facts.now).then_some(until));
        plan.waits
            .push("its sandbox is being stopped and will be replaced".into());
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
                Network::Ready => self.network_event_emitted = false,
                Network::Unknown => {
                    plan.waits
                        .push("waiting for the first network status of the runtime".into());
                    return;
                }
                Network::NotReady(why) => {
                    let message = format!("network is not ready: {why}");
                    if !std::mem::replace(&mut self.network_event_emitted, true) {
                        turn.events
                            .push(warning("NetworkNotReady", message.clone()));
                    }
                    plan.waits.push(format!("the node's {message}"));
                    return;
                }
            }
        }
        plan.ops.push(Op::Sandbox { attempt });
        plan.waits.push("its sandbox is being created".into());
    }

    /// Whether the pod's sandbox has no container yet and this worker has not prepared the pod. In this case the call
    /// that created the sandbox was cancelled, and the directories may have been released since. As with a new sandbox,
    /// nothing starts until the upkeep succeeds.
    fn adopts_empty_sandbox(&self, actions: &PodActions) -> bool {
        let (Some(sandbox), Some(observed)) = (&actions.sandbox, &self.observed) else {
            return false;
        };
        let is_empty = observed.containers.iter().all(|c| c.sandbox != *sandbox);
        is_empty && self.upkeep_at.is_none()
    }

    fn needs_preparation(&self, facts: &Facts) -> bool {
        self.prepared_at
            .is_none_or(|at| time::later(at, facts.rules.sync_frequency) <= facts.now)
    }

    /// Plans image pulls in parallel and starts in the order of the spec (step 10 in ARCHITECTURE.md). A container
    /// waits for earlier ones that are being started, but not for those in back-off.
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
            if let Some(until) = self.start_blocked_until(facts, start, observed, turn) {
                plan.wake.push(until);
                plan.container_waits
                    .push(format!("container {name} waits for its restart"));
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
                Some(sandbox) if self.is_sandbox_abandoned(&sandbox.id) => {
                    "waits for the pod's sandbox"
                }
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
        self.add_init_waits(observed, actions, plan);
    }

    /// Whether the worker is stopping the pod's sandbox, or has stopped it and has not observed the runtime since.
    fn is_sandbox_abandoned(&self, sandbox: &str) -> bool {
        let stops = |op: &Op| matches!(op, Op::StopSandbox(id) if id == sandbox);
        self.stopped_sandboxes.contains(sandbox) || self.in_flight.iter().any(stops)
    }

    /// Reports containers that wait for an init container or a sidecar.
    fn add_init_waits(&self, observed: &ObservedPod, actions: &PodActions, plan: &mut Plan) {
        let Some(sandbox) = actions
            .sandbox
            .as_ref()
            .filter(|_| actions.start.is_empty())
        else {
            return;
        };
        // Instances in an older sandbox do not count: all init containers run again in a new one.
        let in_sandbox = |name: &str| observed.newest(name).is_some_and(|c| c.sandbox == *sandbox);
        let spec = pod::spec(&self.effective);
        let starts = |c: &Container| {
            actions::should_start(&self.effective, c, observed, &self.stopped_to_restart)
        };
        let mut regular = spec.containers.iter();
        let missing = regular.find(|c| !in_sandbox(&c.name) && starts(c));
        let mut init = spec.init_containers.iter().flatten();
        let before = init.rfind(|c| in_sandbox(&c.name));
        if let (Some(missing), Some(before)) = (missing, before) {
            plan.container_waits.push(format!(
                "container {} waits for init container {} to complete or start",
                missing.name, before.name
            ));
        }
    }

    /// When a container may be started after a crash-loop back-off or a failed start. `None` if it need not wait.
    fn start_blocked_until(
        &mut self,
        facts: &Facts,
        start: &Start,
        observed: &ObservedPod,
        turn: &mut Turn,
    ) -> Option<Timestamp> {
        let name = &start.container.name;
        let failed = self.blocked_until(&Key::Start(name.clone()), facts.now);
        if failed.is_some() {
            return failed;
        }
        let finished = self.last_exit(name)?;
        let key = backoff_key(start);
        let held = self.backoff.remaining(&key, finished, facts.now)?;
        let shown = time::shown(Duration::try_from(held.delay).unwrap_or_default());
        let described = pod::described(&self.effective);
        let message =
            format!("back-off {shown} restarting failed container={name} pod={described}");
        self.problems
            .insert(name.clone(), ("CrashLoopBackOff".into(), message));
        let attempt = observed.newest(name).map_or(0, |c| c.attempt);
        if self.backoff_events.insert(name.clone(), attempt) != Some(attempt) {
            let mut event = warning(
                "BackOff",
                format!("Back-off restarting failed container {name} in pod {described}"),
            );
            event.field_path = Some(start.role.field_path(name));
            turn.events.push(event);
        }
        Some(held.until)
    }

    /// Plans the removal of exited containers and stopped sandboxes that are no longer needed.
    fn plan_collection(&self, observed: &ObservedPod, plan: &mut Plan) {
        let starting = self
            .in_flight
            .iter()
            .chain(&plan.ops)
            .any(|op| matches!(op, Op::Start { .. } | Op::Sandbox { .. }));
        // An observation is due or running. Nothing is removed on the basis of an older one.
        if starting || self.observe_needed || self.is_in_flight(&Key::Observe) {
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
        let creates_sandbox = self
            .in_flight
            .iter()
            .any(|op| matches!(op, Op::Sandbox { .. }));
        let Some(observed) = self.observed.as_ref().filter(|_| !self.outcome_unknown) else {
            return;
        };
        let until = self.stop_by.unwrap_or(facts.now);
        plan.wake.extend((until > facts.now).then_some(until));
        let stops = self.plan_stop(observed, until, facts.now);
        // A sandbox that is being created is stopped once it exists.
        plan.ops
            .extend(stops.into_iter().filter(|_| !creates_sandbox));
        if self.has_stopped() && self.needs_claim_release() {
            plan.ops.push(Op::UnprepareClaims);
            plan.waits
                .push("its resource claims are being unprepared".into());
        }
    }

    /// Stops and removes what the runtime has of a finished pod, because it carried out a cancelled call late.
    fn plan_leftovers(&self, facts: &Facts, plan: &mut Plan) {
        let Some(observed) = self.observed.as_ref().filter(|_| !self.outcome_unknown) else {
            return;
        };
        let stops = self.plan_stop(observed, facts.now, facts.now);
        if stops.is_empty() && self.has_leftovers {
            plan.ops.push(Op::Release { content: true });
        }
        plan.ops.extend(stops);
    }

    fn plan_end(&self, facts: &Facts, cause: Cause, plan: &mut Plan) {
        self.plan_leftovers(facts, plan);
        if self.admitted && !matches!(cause, Cause::Deleted | Cause::Removed) {
            // A static pod may have finished before its mirror existed, or its mirror may be deleted now.
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
    /// Whether the sources of the volumes have changed since the last refresh began: a watched object, or fields of the
    /// pod that its files expose.
    pub(super) fn changed_since(&self, pod: &Pod) -> bool {
        self.changed || self.shape != shape(pod)
    }

    /// When the next refresh for a change may begin. `None` if no change has to wait.
    fn next_for_change(&self, pod: &Pod, now: Timestamp) -> Option<Timestamp> {
        let next = self.changed_at?.checked_add(REFRESH_INTERVAL).ok()?;
        (next > now && self.changed_since(pod)).then_some(next)
    }
}

fn stops_earlier(planned: &Op, running: &Op) -> bool {
    match (planned, running) {
        (Op::Stop { until: new, .. }, Op::Stop { until: old, .. }) => new < old,
        _ => false,
    }
}

/// A hash of the pod's fields that its files expose: labels, annotations and resources.
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

/// The key of a container's crash-loop back-off. Another image or other resources reset the back-off.
pub(super) fn backoff_key(start: &Start) -> String {
    let container = &start.container;
    format!(
        "{}{:?}{:?}",
        container.name, container.image, container.resources
    )
}
