//! The next actions for a pod, computed from the desired and the observed state (`computePodActions` in
//! `pkg/kubelet/kuberuntime/kuberuntime_manager.go`). Pure.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Pod};
use serde::{Deserialize, Serialize};

use super::Role;
use super::observed::{self, ContainerState, ObservedPod};
use super::probe::{self, Probed};
use super::resize::{self, Resizing, Sizes};
use crate::pod;
use crate::time;

/// A container to start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// The container's role in its pod.
    pub role: Role,
    /// The container's definition, with its granted sizes.
    pub container: Container,
    /// The restart count of the new instance.
    pub attempt: u32,
    /// The id of an instance that was created but never started. The new instance replaces it and keeps its restart
    /// count.
    pub replaces: Option<String>,
}

/// Exited containers to remove. The newest exited instance of each name is kept, as the status reads `lastState` from
/// it (`pkg/kubelet/kuberuntime/kuberuntime_gc.go`).
#[must_use]
pub fn surplus(observed: &ObservedPod) -> Vec<&observed::Container> {
    let mut kept = BTreeSet::new();
    // The containers are sorted newest first, so the first exited one of each name is kept. A created container with a
    // newer instance is never started.
    let mut surplus = vec![];
    for container in &observed.containers {
        let needed = match container.state {
            ContainerState::Exited => kept.insert(container.name.as_str()),
            ContainerState::Created => observed
                .newest(&container.name)
                .is_some_and(|newest| newest.id == container.id),
            ContainerState::Running | ContainerState::Unknown => true,
        };
        if !needed {
            surplus.push(container);
        }
    }
    surplus
}

/// Sandboxes to remove: they are not ready, not the newest, and have no containers.
#[must_use]
pub(crate) fn surplus_sandboxes(observed: &ObservedPod) -> Vec<&str> {
    let used = |id: &str| observed.containers.iter().any(|c| c.sandbox == id);
    observed
        .sandboxes
        .iter()
        .skip(1)
        .filter(|s| !s.ready && !used(&s.id))
        .map(|s| s.id.as_str())
        .collect()
}

/// A container to stop.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kill {
    /// The container's id in the runtime.
    pub id: String,
    /// The container's name in the spec, for events.
    pub name: String,
    /// The event's message.
    pub message: String,
    /// The grace period in seconds. `None` means that of the pod.
    pub grace: Option<i64>,
}

/// The plan for one sync.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PodActions {
    /// The pod must terminate: its sandbox was lost, and its containers must not be restarted.
    pub must_terminate: bool,
    /// Stop all containers and the sandbox before anything else.
    pub kill_pod: bool,
    /// Create a sandbox with this attempt number.
    pub create_sandbox: Option<u32>,
    /// The existing sandbox to start containers in, if none is created.
    pub sandbox: Option<String>,
    /// Containers to stop without grace period and to remove, in this order, because a rule restarts all containers in
    /// the same sandbox. The sync does nothing else.
    pub restart_all: Vec<Kill>,
    /// Containers to stop.
    pub kill: Vec<Kill>,
    /// Ids of running containers that this plan stops in order to restart them, whatever their exit code. Upstream
    /// restarts them in the `SyncPod` call that stops them.
    pub to_restart: Vec<String>,
    /// Names of containers to resize while they run.
    pub resize: Vec<String>,
    /// Containers to start, in order.
    pub start: Vec<Start>,
}

impl PodActions {
    /// Whether the plan has no actions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.kill_pod
            && self.create_sandbox.is_none()
            && self.restart_all.is_empty()
            && self.kill.is_empty()
            && self.resize.is_empty()
            && self.start.is_empty()
    }
}

fn policy(pod: &Pod) -> &str {
    pod.spec
        .as_ref()
        .and_then(|s| s.restart_policy.as_deref())
        .unwrap_or("Always")
}

/// The consequence of a container's exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterExit {
    /// The container is not restarted.
    Stay,
    /// The container is restarted.
    Restart,
    /// All containers of the pod are restarted in the same sandbox.
    RestartAll,
}

/// The action of the container's first matching restart rule (KEP-5307, KEP-5532).
fn ruled(container: &Container, code: i32) -> Option<AfterExit> {
    container
        .restart_policy_rules
        .iter()
        .flatten()
        .find_map(|rule| {
            let codes = rule.exit_codes.as_ref()?;
            let listed = codes.values.iter().flatten().any(|v| *v == code);
            let matches = if codes.operator == "NotIn" {
                !listed
            } else {
                listed
            };
            matches.then_some(if rule.action == "RestartAllContainers" {
                AfterExit::RestartAll
            } else {
                AfterExit::Restart
            })
        })
}

/// The consequence of an exit with `code` (KEP-5307). The container's restart rules precede its own restart policy,
/// which precedes the pod's. If the policy is `Always`, init containers are restarted only after a failure.
#[must_use]
pub(crate) fn after_exit(pod: &Pod, role: Role, container: &Container, code: i32) -> AfterExit {
    let restarts = match (
        role,
        container.restart_policy.as_deref().unwrap_or(policy(pod)),
    ) {
        (Role::Ephemeral, _) | (_, "Never") => false,
        (Role::Init, _) | (_, "OnFailure") => code != 0,
        _ => true,
    };
    ruled(container, code).unwrap_or(if restarts {
        AfterExit::Restart
    } else {
        AfterExit::Stay
    })
}

/// Whether a regular container is restarted after an exit with `code`.
#[must_use]
pub(crate) fn restarts_after(pod: &Pod, container: &Container, code: i32) -> bool {
    after_exit(pod, Role::Regular, container, code) != AfterExit::Stay
}

/// Whether a regular container should be started (`ShouldContainerBeRestarted` in `pkg/kubelet/container/helpers.go`).
/// The newest instance decides, whatever its sandbox: a container that succeeded does not run again because its sandbox
/// was replaced.
#[must_use]
pub(crate) fn should_start(
    pod: &Pod,
    container: &Container,
    observed: &ObservedPod,
    stopped_to_restart: &BTreeSet<String>,
) -> bool {
    if pod.metadata.deletion_timestamp.is_some() {
        return false;
    }
    let Some(newest) = observed.newest(&container.name) else {
        return true;
    };
    match newest.state {
        ContainerState::Running => false,
        ContainerState::Created | ContainerState::Unknown => true,
        ContainerState::Exited => {
            stopped_to_restart.contains(&newest.id)
                || restarts_after(pod, container, newest.exit_code)
        }
    }
}

/// Whether the restart policy allows a restart of a running container that the agent stops.
fn may_restart(pod: &Pod, container: &Container) -> bool {
    container.restart_policy.as_deref().unwrap_or(policy(pod)) != "Never"
}

/// The start that follows the newest instance of a container. `known` returns the restart count of a container without
/// instances.
fn next(
    observed: &ObservedPod,
    role: Role,
    container: &Container,
    known: impl Fn(&str) -> u32,
) -> Start {
    let (attempt, replaces) = match observed.newest(&container.name) {
        None => (known(&container.name), None),
        // The agent that created it exited before starting it. It never ran, so this start is not a restart.
        Some(newest) if newest.state == ContainerState::Created => {
            (newest.attempt, Some(newest.id.clone()))
        }
        Some(newest) => (newest.attempt.saturating_add(1), None),
    };
    Start {
        role,
        container: container.clone(),
        attempt,
        replaces,
    }
}

/// The id of the newest sandbox if the pod can use it, else the attempt number of a new sandbox (`PodSandboxChanged` in
/// `pkg/kubelet/kuberuntime/util/util.go`).
fn sandbox_decision(pod: &Pod, observed: &ObservedPod) -> Result<String, u32> {
    let Some(newest) = observed.sandboxes.first() else {
        return Err(0);
    };
    let ready = observed.sandboxes.iter().filter(|s| s.ready).count();
    let host = pod::host_network(pod);
    if ready > 1 || !newest.ready || newest.host_network != host || (!host && newest.ips.is_empty())
    {
        return Err(newest.attempt.saturating_add(1));
    }
    Ok(newest.id.clone())
}

/// Computes the plan. `restarts` returns the restart count of a container without instances.
#[must_use]
pub fn compute(
    pod: &Pod,
    observed: &ObservedPod,
    health: &Health<'_>,
    restarts: impl Fn(&str) -> u32,
) -> PodActions {
    let Some(spec) = &pod.spec else {
        return PodActions::default();
    };
    let start = |role: Role, container: &Container| next(observed, role, container, &restarts);
    let init: &[Container] = spec.init_containers.as_deref().unwrap_or_default();
    let attempt = match sandbox_decision(pod, observed) {
        Ok(id) => return with_sandbox(pod, observed, health, id, start),
        Err(attempt) => attempt,
    };
    let mut actions = PodActions {
        kill_pod: !observed.sandboxes.is_empty(),
        ..PodActions::default()
    };
    let ever_ran = spec
        .containers
        .iter()
        .any(|c| observed.newest(&c.name).is_some());
    let all_never = !spec.containers.iter().any(|c| may_restart(pod, c));
    // Upstream checks all containers here. If the init container had finished when the sandbox was lost, it leaves the
    // pod Pending indefinitely.
    if all_never && attempt != 0 && ever_ran {
        actions.must_terminate = true;
        return actions;
    }
    let wanted: Vec<&Container> = spec
        .containers
        .iter()
        .filter(|c| {
            observed.runs(&c.name) || should_start(pod, c, observed, health.stopped_to_restart)
        })
        .collect();
    if wanted.is_empty() && ever_ran {
        return actions;
    }
    actions.create_sandbox = Some(attempt);
    let stopped = wanted.iter().filter(|c| may_restart(pod, c));
    let stopped = stopped.filter_map(|c| observed.newest(&c.name));
    let running = stopped.filter(|newest| newest.is_running());
    actions.to_restart = running.map(|newest| newest.id.clone()).collect();
    // In a new sandbox, all init containers run again from the first.
    actions.start = match init.first() {
        Some(first) => vec![start(
            if pod::is_sidecar(first) {
                Role::Sidecar
            } else {
                Role::Init
            },
            first,
        )],
        None => wanted
            .into_iter()
            .map(|c| start(Role::Regular, c))
            .collect(),
    };
    actions
}

/// The containers to restart if a rule restarts all containers. Those whose exit matched the rule come last, so that
/// the cause persists if the agent crashes in between.
fn restart_all(pod: &Pod, observed: &ObservedPod, sandbox: &str) -> Vec<Kill> {
    let matches_rule = |seen: &&observed::Container| {
        seen.state == ContainerState::Exited
            && pod::containers(pod).iter().any(|(role, c)| {
                c.name == seen.name
                    && *role != Role::Ephemeral
                    && observed.newest(&c.name).is_some_and(|n| n.id == seen.id)
                    && after_exit(pod, *role, c, seen.exit_code) == AfterExit::RestartAll
            })
    };
    let ephemeral = |seen: &observed::Container| {
        pod::spec(pod)
            .ephemeral_containers
            .iter()
            .flatten()
            .any(|e| e.name == seen.name)
    };
    let (sources, others): (Vec<_>, Vec<_>) = observed
        .containers
        .iter()
        .filter(|c| c.sandbox == sandbox && !ephemeral(c))
        .partition(matches_rule);
    if sources.is_empty() || pod.metadata.deletion_timestamp.is_some() {
        return vec![];
    }
    let over = |seen: &observed::Container| Kill {
        id: seen.id.clone(),
        name: seen.name.clone(),
        message: format!(
            "Container {} is stopped because RestartAllContainers in place",
            seen.name
        ),
        grace: Some(0),
    };
    others.into_iter().chain(sources).map(over).collect()
}

/// Information about running containers that does not come from the runtime.
pub struct Health<'a> {
    /// Results of their probes.
    pub probed: &'a Probed,
    /// The sizes that containers should have.
    pub wanted: &'a Sizes,
    /// The sizes that containers have. A container without an entry has the size that it should have.
    pub resizing: &'a Resizing,
    /// Ids of containers that were stopped in order to restart them, whatever their exit code.
    pub stopped_to_restart: &'a BTreeSet<String>,
}

fn resized(container: &Container, health: &Health<'_>) -> Option<String> {
    let change = resize::change(container, health.wanted, health.resizing);
    (change == resize::Change::Update).then(|| container.name.clone())
}

/// The reason to stop a running container, and whether it is restarted (`computePodActions` in
/// `pkg/kubelet/kuberuntime/kuberuntime_manager.go`).
fn reason_to_stop(
    pod: &Pod,
    role: Role,
    container: &Container,
    seen: &observed::Container,
    health: &Health<'_>,
) -> Option<(Kill, bool)> {
    if pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let subject = match role {
        Role::Sidecar => "Init container",
        _ => "Container",
    };
    let changed = seen
        .hash
        .as_ref()
        .is_some_and(|h| *h != pod::container_hash(container));
    let change = resize::change(container, health.wanted, health.resizing);
    let resize = change == resize::Change::Restart;
    let (what, grace) = if changed {
        ("definition changed", None)
    } else if resize {
        ("resize requires restart", None)
    } else {
        let kind = health.probed.failed(container, &seen.id)?;
        let grace = kind
            .of(container)
            .and_then(|p| p.termination_grace_period_seconds)
            .map(time::bounded);
        (
            if kind == probe::Kind::Liveness {
                "failed liveness probe"
            } else {
                "failed startup probe"
            },
            grace,
        )
    };
    // A changed definition is applied regardless of the restart policy.
    let restarts = changed || resize || role == Role::Sidecar || may_restart(pod, container);
    let then = match restarts && !resize {
        true => ", will be restarted",
        false => "",
    };
    let message = format!("{subject} {} {what}{then}", container.name);
    Some((
        Kill {
            id: seen.id.clone(),
            name: container.name.clone(),
            message,
            grace,
        },
        restarts,
    ))
}

fn unknown(role: Role, seen: &observed::Container) -> Kill {
    let subject = if role == Role::Regular {
        "Container"
    } else {
        "Init container"
    };
    let message = format!(
        "{subject} {} is in unknown state, try killing it before restart",
        seen.name
    );
    Kill {
        id: seen.id.clone(),
        name: seen.name.clone(),
        message,
        grace: None,
    }
}

fn with_sandbox(
    pod: &Pod,
    observed: &ObservedPod,
    health: &Health<'_>,
    sandbox: String,
    start: impl Fn(Role, &Container) -> Start,
) -> PodActions {
    let spec = pod::spec(pod);
    // Containers of older sandboxes do not count.
    let in_sandbox = |name: &str| observed.newest(name).filter(|c| c.sandbox == sandbox);
    let mut actions = PodActions {
        sandbox: Some(sandbox.clone()),
        restart_all: restart_all(pod, observed, &sandbox),
        ..PodActions::default()
    };
    if !actions.restart_all.is_empty() {
        return actions;
    }
    actions.kill = kill_strays(observed, &sandbox);
    for (role, container) in pod::containers(pod)
        .into_iter()
        .filter(|(r, _)| *r == Role::Ephemeral)
    {
        if observed.newest(&container.name).is_none() && pod.metadata.deletion_timestamp.is_none() {
            actions.start.push(start(role, &container));
        }
    }
    let init = spec.init_containers.as_deref().unwrap_or_default();
    let ran = spec
        .containers
        .iter()
        .any(|c| in_sandbox(&c.name).is_some());
    match init_step(pod, init, ran, health, &in_sandbox, &start, &mut actions) {
        InitStep::Wait => return actions,
        InitStep::Failed => {
            actions.start.clear();
            actions.kill_pod = true;
            return actions;
        }
        InitStep::Done => {}
    }
    let mut keep = 0_usize;
    for container in &spec.containers {
        let newest = observed.newest(&container.name);
        if let Some(seen) = newest.filter(|s| s.is_running()) {
            let restarts = match seen.sandbox == sandbox {
                false => may_restart(pod, container),
                true => match reason_to_stop(pod, Role::Regular, container, seen, health) {
                    None => {
                        keep = keep.saturating_add(1);
                        actions.resize.extend(resized(container, health));
                        false
                    }
                    Some((kill, restarts)) => {
                        actions.kill.push(kill);
                        restarts
                    }
                },
            };
            if restarts {
                actions.to_restart.push(seen.id.clone());
                actions.start.push(start(Role::Regular, container));
            }
        } else if should_start(pod, container, observed, health.stopped_to_restart) {
            if let Some(lost) = newest.filter(|s| s.state == ContainerState::Unknown) {
                actions.to_restart.push(lost.id.clone());
                if lost.sandbox == sandbox {
                    actions.kill.push(unknown(Role::Regular, lost));
                }
            }
            actions.start.push(start(Role::Regular, container));
        }
    }
    let restarts = actions.start.iter().any(|s| s.role == Role::Regular);
    if keep == 0 && !restarts && pod.metadata.deletion_timestamp.is_none() {
        // Sidecars are not restarted for a pod that has finished its work.
        actions.kill_pod = true;
        actions.start.clear();
    }
    actions
}

/// Stops containers that may run in older sandboxes. The runtime may still carry out a start whose call was cancelled.
fn kill_strays(observed: &ObservedPod, sandbox: &str) -> Vec<Kill> {
    let stray = |seen: &observed::Container| Kill {
        id: seen.id.clone(),
        name: seen.name.clone(),
        message: format!("Stopping container {}", seen.name),
        grace: None,
    };
    let live = observed.live().filter(|c| c.sandbox != sandbox);
    live.map(stray).collect()
}

enum InitStep {
    /// All init containers have finished; regular containers may start.
    Done,
    /// An init container is running or must be started first.
    Wait,
    /// An init container failed and is not restarted.
    Failed,
}

/// Walks the init containers in order. The first one that has not finished decides.
fn init_step<'a>(
    pod: &Pod,
    init: &[Container],
    initialised: bool,
    health: &Health<'_>,
    in_sandbox: &impl Fn(&str) -> Option<&'a observed::Container>,
    start: &impl Fn(Role, &Container) -> Start,
    actions: &mut PodActions,
) -> InitStep {
    // Init containers before one that was started have succeeded, even if their instances were removed.
    let begun = init.iter().rposition(|c| in_sandbox(&c.name).is_some());
    for (place, container) in init.iter().enumerate() {
        let seen = in_sandbox(&container.name);
        if pod::is_sidecar(container) {
            let goes_on = match seen {
                Some(seen) if seen.state == ContainerState::Running => {
                    match reason_to_stop(pod, Role::Sidecar, container, seen, health) {
                        None => {
                            actions.resize.extend(resized(container, health));
                            health.probed.started(container, &seen.id)
                        }
                        Some((kill, _)) => {
                            actions.kill.push(kill);
                            actions.start.push(start(Role::Sidecar, container));
                            false
                        }
                    }
                }
                other => {
                    actions.kill.extend(
                        other
                            .filter(|s| s.state == ContainerState::Unknown)
                            .map(|s| unknown(Role::Sidecar, s)),
                    );
                    if pod.metadata.deletion_timestamp.is_none() {
                        actions.start.push(start(Role::Sidecar, container));
                    }
                    false
                }
            };
            // The next init container waits until this sidecar has started.
            if !goes_on && !initialised {
                return InitStep::Wait;
            }
            continue;
        }
        if initialised || (seen.is_none() && begun.is_some_and(|begun| place < begun)) {
            continue;
        }
        let restarts = |seen: &observed::Container| health.stopped_to_restart.contains(&seen.id);
        match seen {
            Some(seen)
                if seen.state == ContainerState::Exited
                    && seen.exit_code == 0
                    && !restarts(seen) => {}
            Some(seen) if seen.state == ContainerState::Running => {
                actions.resize.extend(resized(container, health));
                return InitStep::Wait;
            }
            Some(seen)
                if matches!(seen.state, ContainerState::Exited | ContainerState::Unknown) =>
            {
                let is_unknown = seen.state == ContainerState::Unknown;
                let code = if is_unknown { 137 } else { seen.exit_code };
                let stays = after_exit(pod, Role::Init, container, code) == AfterExit::Stay;
                if stays && !restarts(seen) {
                    return InitStep::Failed;
                }
                // A container in unknown state may still run. Two instances must not run at once.
                if is_unknown {
                    actions.to_restart.push(seen.id.clone());
                    actions.kill.push(unknown(Role::Init, seen));
                }
                actions.start.push(start(Role::Init, container));
                return InitStep::Wait;
            }
            _ => {
                actions.start.push(start(Role::Init, container));
                return InitStep::Wait;
            }
        }
    }
    InitStep::Done
}

#[cfg(test)]
mod tests;
