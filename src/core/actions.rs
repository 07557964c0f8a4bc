//! What to do next for a pod: a value, computed from what is wanted and what is there (kubelet spec,
//! chapter 5). Pure.

use k8s_openapi::api::core::v1::{Container, Pod};

use super::observed::{self, ContainerState, ObservedPod};
use super::pod::{self, Role};

/// A container to start.
#[derive(Debug, Clone, PartialEq)]
pub struct Start {
    /// What it is.
    pub role: Role,
    /// Its definition.
    pub container: Container,
    /// The restart count of the new instance.
    pub attempt: u32,
}

/// A container to stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kill {
    /// The runtime's id.
    pub id: String,
    /// The name.
    pub name: String,
    /// What the event says.
    pub message: String,
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
    /// Containers to stop.
    pub kill: Vec<Kill>,
    /// Containers to start, in order.
    pub start: Vec<Start>,
}

impl PodActions {
    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.kill_pod && self.create_sandbox.is_none() && self.kill.is_empty() && self.start.is_empty()
    }
}

fn policy(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|s| s.restart_policy.as_deref()).unwrap_or("Always")
}

/// Whether a container that ended with `code` is started again.
#[must_use]
pub fn restarts_after(pod: &Pod, container: &Container, code: i32) -> bool {
    let rule = container.restart_policy_rules.iter().flatten().find_map(|rule| {
        let codes = rule.exit_codes.as_ref()?;
        let listed = codes.values.iter().flatten().any(|v| *v == code);
        let matches = if codes.operator == "NotIn" { !listed } else { listed };
        matches.then_some(true)
    });
    rule.unwrap_or_else(|| match container.restart_policy.as_deref().unwrap_or(policy(pod)) {
        "Never" => false,
        "OnFailure" => code != 0,
        _ => true,
    })
}

/// Whether a container should be started in the state it is in (kubelet spec, 5.3).
fn should_start(pod: &Pod, container: &Container, seen: Option<&observed::Container>) -> bool {
    if pod.metadata.deletion_timestamp.is_some() {
        return false;
    }
    match seen {
        None => true,
        Some(seen) => match seen.state {
            ContainerState::Running => false,
            ContainerState::Created | ContainerState::Unknown => true,
            ContainerState::Exited => restarts_after(pod, container, seen.exit_code),
        },
    }
}

fn next_attempt(observed: &ObservedPod, name: &str, known: impl Fn(&str) -> u32) -> u32 {
    observed.newest(name).map_or_else(|| known(name), |c| c.attempt + 1)
}

/// Whether the newest sandbox will do; else the attempt number of a new one (kubelet spec, 5.1).
fn sandbox_decision(pod: &Pod, observed: &ObservedPod) -> Result<String, u32> {
    let Some(newest) = observed.sandboxes.first() else { return Err(0) };
    let ready = observed.sandboxes.iter().filter(|s| s.ready).count();
    let host = pod::host_network(pod);
    if ready > 1 || !newest.ready || newest.host_network != host || (!host && newest.ips.is_empty()) {
        return Err(newest.attempt + 1);
    }
    Ok(newest.id.clone())
}

/// Computes the plan. `restarts` is the count a container with no instance left should start from.
#[must_use]
pub fn compute(pod: &Pod, observed: &ObservedPod, restarts: impl Fn(&str) -> u32) -> PodActions {
    let Some(spec) = &pod.spec else { return PodActions::default() };
    let start =
        |role: Role, container: &Container| Start { role, container: container.clone(), attempt: next_attempt(observed, &container.name, &restarts) };
    let init: &[Container] = spec.init_containers.as_deref().unwrap_or_default();
    let attempt = match sandbox_decision(pod, observed) {
        Ok(id) => return with_sandbox(pod, observed, id, start),
        Err(attempt) => attempt,
    };
    let mut actions = PodActions { kill_pod: !observed.sandboxes.is_empty(), ..PodActions::default() };
    let ever_ran = spec.containers.iter().any(|c| observed.newest(&c.name).is_some());
    let all_never = spec.containers.iter().all(|c| c.restart_policy.as_deref().unwrap_or(policy(pod)) == "Never");
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
            let succeeded = observed.newest(&c.name).is_some_and(|s| s.state == ContainerState::Exited && s.exit_code == 0);
            !succeeded || restarts_after(pod, c, 0)
        })
        .collect();
    if wanted.is_empty() && ever_ran {
        return actions;
    }
    actions.create_sandbox = Some(attempt);
    // All init containers run again in a new sandbox, from the first.
    actions.start = match init.first() {
        Some(first) => vec![start(if pod::is_sidecar(first) { Role::Sidecar } else { Role::Init }, first)],
        None => wanted.into_iter().map(|c| start(Role::Regular, c)).collect(),
    };
    actions
}

fn with_sandbox(pod: &Pod, observed: &ObservedPod, sandbox: String, start: impl Fn(Role, &Container) -> Start) -> PodActions {
    let spec = pod::spec(pod);
    // Containers of an older sandbox are history.
    let here = |name: &str| observed.newest(name).filter(|c| c.sandbox == sandbox);
    let mut actions = PodActions { sandbox: Some(sandbox.clone()), ..PodActions::default() };
    for (role, container) in pod::containers(pod).into_iter().filter(|(r, _)| *r == Role::Ephemeral) {
        if observed.newest(&container.name).is_none() && pod.metadata.deletion_timestamp.is_none() {
            actions.start.push(start(role, &container));
        }
    }
    let init = spec.init_containers.as_deref().unwrap_or_default();
    let initialised =
        spec.containers.iter().any(|c| here(&c.name).is_some_and(|s| matches!(s.state, ContainerState::Created | ContainerState::Running)));
    let ran = spec.containers.iter().any(|c| here(&c.name).is_some());
    match init_step(pod, init, initialised || ran, &here, &start, &mut actions) {
        InitStep::Wait => return actions,
        InitStep::Failed => {
            actions.start.clear();
            actions.kill_pod = true;
            return actions;
        }
        InitStep::Done => {}
    }
    let mut keep = 0;
    for container in &spec.containers {
        let seen = here(&container.name);
        let kill = |message: String| seen.map(|s| Kill { id: s.id.clone(), name: container.name.clone(), message });
        match seen.map(|s| s.state) {
            Some(ContainerState::Running) => {
                let changed = seen.and_then(|s| s.hash.as_ref()).is_some_and(|h| *h != pod::container_hash(container));
                if changed && pod.metadata.deletion_timestamp.is_none() {
                    actions.kill.extend(kill(format!("Container {} definition changed, will be restarted", container.name)));
                    actions.start.push(start(Role::Regular, container));
                } else {
                    keep += 1;
                }
            }
            state => {
                if should_start(pod, container, seen) {
                    if state == Some(ContainerState::Unknown) {
                        actions.kill.extend(kill(format!("Container {} is in unknown state, try killing it before restart", container.name)));
                    }
                    actions.start.push(start(Role::Regular, container));
                }
            }
        }
    }
    if keep == 0 && actions.start.is_empty() && pod.metadata.deletion_timestamp.is_none() {
        actions.kill_pod = true;
    }
    actions
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
    here: &impl Fn(&str) -> Option<&'a observed::Container>,
    start: &impl Fn(Role, &Container) -> Start,
    actions: &mut PodActions,
) -> InitStep {
    for container in init {
        let seen = here(&container.name);
        let state = seen.map(|s| s.state);
        if pod::is_sidecar(container) {
            if state != Some(ContainerState::Running) {
                if let (Some(ContainerState::Unknown), Some(seen)) = (state, seen) {
                    actions.kill.push(Kill {
                        id: seen.id.clone(),
                        name: container.name.clone(),
                        message: format!("Init container {} is in unknown state, try killing it before restart", container.name),
                    });
                }
                actions.start.push(start(Role::Sidecar, container));
                // The next one waits until this one has been seen running.
                if !initialised {
                    return InitStep::Wait;
                }
            }
            continue;
        }
        if initialised {
            continue;
        }
        match (state, seen) {
            (Some(ContainerState::Exited), Some(seen)) if seen.exit_code == 0 => {}
            (Some(ContainerState::Running), _) => return InitStep::Wait,
            (Some(ContainerState::Exited | ContainerState::Unknown), Some(seen)) => {
                let code = if seen.state == ContainerState::Unknown { 137 } else { seen.exit_code };
                // Init containers of an `Always` pod restart on failure.
                let again = policy(pod) != "Never"
                    || container.restart_policy.as_deref().is_some_and(|p| p != "Never") && restarts_after(pod, container, code);
                if !again {
                    return InitStep::Failed;
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
