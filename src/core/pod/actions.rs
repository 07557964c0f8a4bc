//! What to do next for a pod: a value, computed from what is wanted and what is there (upstream's
//! `computePodActions`). Pure.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Pod};
use serde::{Deserialize, Serialize};

use super::Role;
use super::observed::{self, ContainerState, ObservedPod};
use super::probe::{self, Probed};
use super::resize::{self, Resizing, Sizes};
use crate::core::pod;
use crate::core::time;

/// A container to start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// What it is.
    pub role: Role,
    /// Its definition in the spec, with the sizes that were granted.
    pub container: Container,
    /// The restart count of the new instance.
    pub attempt: u32,
    /// The id of an instance that was made and never started: it goes first, and does not count.
    pub replaces: Option<String>,
}

/// Ended containers that nobody needs any more: the newest of a name stays, and the one before it while a
/// newer one is there, so that the last state can be told (upstream's `kuberuntime_gc.go`).
#[must_use]
pub fn surplus(observed: &ObservedPod) -> Vec<&observed::Container> {
    let mut kept = BTreeSet::new();
    // Newest first: of each name the first that has ended stays. One that was never started and has a
    // successor never will be.
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

/// Sandboxes that nobody needs any more: not ready, not the newest, without containers.
#[must_use]
pub fn surplus_sandboxes(observed: &ObservedPod) -> Vec<&str> {
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
    /// By which the runtime knows it.
    pub id: String,
    /// The name in the spec, under which events tell of it.
    pub name: String,
    /// What the event says.
    pub message: String,
    /// Seconds it gets instead of the pod's grace period.
    pub grace: Option<i64>,
}

/// The plan for one sync.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PodActions {
    /// The pod cannot go on: its sandbox is gone and what ran in it must not run again. It ends as it is.
    pub give_up: bool,
    /// Stop everything, the sandbox too, before anything else.
    pub kill_pod: bool,
    /// Make a sandbox with this attempt number.
    pub create_sandbox: Option<u32>,
    /// The sandbox to use when none is made.
    pub sandbox: Option<String>,
    /// A rule asks for all containers to start over in the same sandbox: these are stopped without grace
    /// and removed, in this order, and nothing else is done in this sync.
    pub restart_all: Vec<Kill>,
    /// Containers to stop.
    pub kill: Vec<Kill>,
    /// Ids of running containers that this plan stops in order to start them again, whatever their exit code will be.
    /// Upstream starts them in the same pass of `SyncPod` that stops them.
    pub again: Vec<String>,
    /// Names of containers to bring to their size while they run.
    pub resize: Vec<String>,
    /// Containers to start, in order.
    pub start: Vec<Start>,
}

impl PodActions {
    /// Whether there is nothing to do.
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

/// What follows from a container's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterExit {
    /// It stays as it is.
    Stay,
    /// It is started again.
    Restart,
    /// The whole pod starts over in its sandbox.
    RestartAll,
}

/// The first of the container's own rules that matches (KEP-5307, KEP-5532).
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

/// What follows when a container ends with `code` (KEP-5307): its rules, else its own policy, else
/// the pod's. Init containers of a pod whose policy is `Always` are repeated only when they fail.
#[must_use]
pub fn after_exit(pod: &Pod, role: Role, container: &Container, code: i32) -> AfterExit {
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

/// Whether a regular container that ended with `code` is started again.
#[must_use]
pub fn restarts_after(pod: &Pod, container: &Container, code: i32) -> bool {
    after_exit(pod, Role::Regular, container, code) != AfterExit::Stay
}

/// Whether a regular container should be started (upstream's `ShouldContainerBeRestarted`). The newest instance decides,
/// whichever sandbox it is in: a container that has succeeded does not run again because its sandbox was replaced.
#[must_use]
pub fn should_start(
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

/// Whether the policy lets a running container be started again after this program has stopped it.
fn may_restart(pod: &Pod, container: &Container) -> bool {
    container.restart_policy.as_deref().unwrap_or(policy(pod)) != "Never"
}

/// What to start in place of what is there.
fn next(
    observed: &ObservedPod,
    role: Role,
    container: &Container,
    known: impl Fn(&str) -> u32,
) -> Start {
    let (attempt, replaces) = match observed.newest(&container.name) {
        None => (known(&container.name), None),
        // Whoever made it died before starting it: nothing has run that could be restarted.
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

/// Whether the newest sandbox will do; else the attempt number of a new one (upstream's `PodSandboxChanged`).
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

/// Computes the plan. `restarts` is the count a container with no instance left should start from.
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
    // Upstream looks at all containers here, and leaves a pod pending for ever whose init container had
    // finished when the sandbox was lost.
    if all_never && attempt != 0 && ever_ran {
        actions.give_up = true;
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
    actions.again = running.map(|newest| newest.id.clone()).collect();
    // All init containers run again in a new sandbox, from the first.
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

/// The containers that a rule makes start over, if one does: first the others, then those whose end asked
/// for it, so that a crash in between leaves the reason standing.
fn restart_all(pod: &Pod, observed: &ObservedPod, sandbox: &str) -> Vec<Kill> {
    let asks = |seen: &&observed::Container| {
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
        .partition(asks);
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

/// What is known of running containers besides their state.
pub struct Health<'a> {
    /// What their probes say.
    pub probed: &'a Probed,
    /// The sizes that the runtime is to have.
    pub wanted: &'a Sizes,
    /// Those that it has; a container of which nothing is known there has what it is to have.
    pub resizing: &'a Resizing,
    /// Ids of containers that were stopped in order to start them again, whatever their exit code.
    pub stopped_to_restart: &'a BTreeSet<String>,
}

fn resized(container: &Container, health: &Health<'_>) -> Option<String> {
    let change = resize::change(container, health.wanted, health.resizing);
    (change == resize::Change::Update).then(|| container.name.clone())
}

/// Why a running container cannot stay (upstream's `computePodActions`).
fn condemned(
    pod: &Pod,
    role: Role,
    container: &Container,
    seen: &observed::Container,
    health: &Health<'_>,
) -> Option<(Kill, bool)> {
    if pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let who = match role {
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
    // A changed definition is carried out whatever the policy.
    let restarts = changed || resize || role == Role::Sidecar || may_restart(pod, container);
    let then = match restarts && !resize {
        true => ", will be restarted",
        false => "",
    };
    let message = format!("{who} {} {what}{then}", container.name);
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
    let who = if role == Role::Regular {
        "Container"
    } else {
        "Init container"
    };
    let message = format!(
        "{who} {} is in unknown state, try killing it before restart",
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
    // Containers of an older sandbox are history.
    let here = |name: &str| observed.newest(name).filter(|c| c.sandbox == sandbox);
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
    let ran = spec.containers.iter().any(|c| here(&c.name).is_some());
    match init_step(pod, init, ran, health, &here, &start, &mut actions) {
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
                true => match condemned(pod, Role::Regular, container, seen, health) {
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
                actions.again.push(seen.id.clone());
                actions.start.push(start(Role::Regular, container));
            }
        } else if should_start(pod, container, observed, health.stopped_to_restart) {
            if let Some(lost) = newest.filter(|s| s.state == ContainerState::Unknown) {
                actions.again.push(lost.id.clone());
                if lost.sandbox == sandbox {
                    actions.kill.push(unknown(Role::Regular, lost));
                }
            }
            actions.start.push(start(Role::Regular, container));
        }
    }
    let restarts = actions.start.iter().any(|s| s.role == Role::Regular);
    if keep == 0 && !restarts && pod.metadata.deletion_timestamp.is_none() {
        // Sidecars do not start again for a pod that has nothing left to do.
        actions.kill_pod = true;
        actions.start.clear();
    }
    actions
}

/// Stops what may run in older sandboxes: a start that was cut off may have been carried out there afterwards.
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
    /// All are done; regular containers may run.
    Done,
    /// One runs, or is to be started first.
    Wait,
    /// One failed for good.
    Failed,
}

/// Walks the init containers in order: what is done is passed, the first that is not decides.
fn init_step<'a>(
    pod: &Pod,
    init: &[Container],
    initialised: bool,
    health: &Health<'_>,
    here: &impl Fn(&str) -> Option<&'a observed::Container>,
    start: &impl Fn(Role, &Container) -> Start,
    actions: &mut PodActions,
) -> InitStep {
    // What comes before one that was started has ended well, also where its instance is gone.
    let begun = init.iter().rposition(|c| here(&c.name).is_some());
    for (place, container) in init.iter().enumerate() {
        let seen = here(&container.name);
        if pod::is_sidecar(container) {
            let goes_on = match seen {
                Some(seen) if seen.state == ContainerState::Running => {
                    match condemned(pod, Role::Sidecar, container, seen, health) {
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
            // The next one waits until this one has started.
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
                // Two of them must not run side by side.
                if is_unknown {
                    actions.again.push(seen.id.clone());
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
