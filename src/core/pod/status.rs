//! The status of a pod: phase, conditions, container statuses, and the patch for the API (`generateAPIPodStatus` in
//! `pkg/kubelet/kubelet_pods.go`). Pure.

mod addresses;
pub mod devices;
mod end;
mod patch;

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    Container, ContainerState as ApiState, ContainerStateWaiting, ContainerStatus, ContainerUser,
    HostIP, LinuxContainerUser, Pod, PodCondition, PodIP, PodStatus, VolumeMount,
    VolumeMountStatus,
};

use super::Role;
use super::actions::{AfterExit, after_exit, restarts_after};
use super::cri_config;
use super::lifecycle::{Cause, Verdict};
use super::observed::{self, ContainerState, ObservedPod};
use super::probe::Probed;
use super::qos;
use super::resize::{self, Resizing, Sizes};
use crate::pod;
use crate::time::seconds;

mod missing;
mod states;

use states::{api_id, completed, ended, lost, removed_to_restart, state};

use addresses::{addresses, node_addresses};
pub(crate) use end::keep_terminal_status;
pub use end::{deadline, rejected};
pub(crate) use patch::substance;
pub use patch::{Target, allowed, patch};

/// Why containers are not running, by name: reason and message of the waiting state.
pub type Problems = BTreeMap<String, (String, String)>;

/// The inputs of a status.
pub struct Facts<'a> {
    /// The pod with its granted sizes.
    pub pod: &'a Pod,
    /// The observed state in the runtime.
    pub observed: &'a ObservedPod,
    /// The previous status.
    pub previous: &'a PodStatus,
    /// Why containers could not be started.
    pub problems: &'a Problems,
    /// Which failing step blocks the start of all containers, if any.
    pub blocking_reason: Option<String>,
    /// The results of probes.
    pub probed: &'a Probed,
    /// The health of the containers' devices.
    pub devices: &'a devices::OfPod,
    /// Whether the pod's volumes are set up, or were when a container of its sandbox was created.
    pub has_volumes: bool,
    /// Containers that are being started: their postStart hook may still run.
    pub starting: &'a BTreeSet<&'a str>,
    /// Ids of containers that were stopped in order to restart them, whatever their exit code.
    pub stopped_to_restart: &'a BTreeSet<String>,
    /// The sizes that the runtime should have: the granted ones, which `pod` has too.
    pub wanted: &'a Sizes,
    /// The progress of actuating the sizes.
    pub resize: &'a Resizing,
    /// The addresses of the node, for `hostIPs`.
    pub node_ips: &'a [String],
    /// Whether the runtime supports recursive read-only mounts.
    pub recursive_read_only: bool,
    /// The name of the container runtime. Empty if it is unknown.
    pub runtime: &'a str,
    /// Whether all containers have stopped permanently.
    pub ended: bool,
    /// Why this node terminates the pod, if it does. Reported once all containers have stopped.
    pub verdict: Option<&'a Verdict>,
    /// The time of transitions that are detected now.
    pub now: Timestamp,
}

/// The waiting reason of containers that are restarted together (KEP-5532).
pub(crate) const RESTARTING_ALL: &str = "RestartingAllContainers";

fn waiting(reason: &str, message: &str) -> ApiState {
    let text = |s: &str| (!s.is_empty()).then(|| s.to_owned());
    ApiState {
        waiting: Some(ContainerStateWaiting {
            reason: text(reason),
            message: text(message),
        }),
        ..ApiState::default()
    }
}

/// The mounts in a container's status. `recursive` is whether the runtime supports recursive read-only mounts.
fn volume_mounts(container: &Container, recursive: bool) -> Option<Vec<VolumeMountStatus>> {
    // An invalid mount is reported by the container's waiting state.
    let is_recursive =
        |mount: &VolumeMount| cri_config::recursive_read_only(mount, recursive).unwrap_or(false);
    let of = |mount: &VolumeMount| VolumeMountStatus {
        name: mount.name.clone(),
        mount_path: mount.mount_path.clone(),
        read_only: mount.read_only.filter(|r| *r),
        recursive_read_only: mount.read_only.filter(|r| *r).map(|_| {
            let state = if is_recursive(mount) {
                "Enabled"
            } else {
                "Disabled"
            };
            state.to_owned()
        }),
        ..VolumeMountStatus::default()
    };
    container
        .volume_mounts
        .as_ref()
        .filter(|m| !m.is_empty())
        .map(|mounts| mounts.iter().map(of).collect())
}

/// The status of a container without an instance in the runtime.
fn status_without_instance(
    facts: &Facts<'_>,
    (role, container): (Role, &Container),
    before: Option<&ContainerStatus>,
    initial: &str,
    mut status: ContainerStatus,
) -> ContainerStatus {
    status.restart_count = before.map_or(0, |b| b.restart_count);
    status.last_state = before.and_then(|b| b.last_state.clone());
    let restarting = facts
        .problems
        .get(&container.name)
        .is_some_and(|(reason, _)| reason == RESTARTING_ALL)
        && !facts.ended;
    if restarting {
        status.restart_count = before.map_or(0, |b| b.restart_count);
        status.last_state = Some(ApiState {
            terminated: Some(removed_to_restart()),
            ..ApiState::default()
        });
        status.state = Some(waiting(RESTARTING_ALL, ""));
        status.started = Some(false);
        return status;
    }
    let ended_before = before
        .and_then(|b| b.state.as_ref())
        .and_then(|s| s.terminated.clone());
    let ran_before = before
        .and_then(|b| b.state.as_ref())
        .is_some_and(|s| s.running.is_some());
    let known_end = ended_before.or_else(|| missing::has_completed(facts, role).then(completed));
    let is_complete = role == Role::Init && known_end.as_ref().is_some_and(|e| e.exit_code == 0);
    status.state = Some(if let Some(ended) = known_end {
        ApiState {
            terminated: Some(ended),
            ..ApiState::default()
        }
    } else if ran_before || (facts.ended && missing::is_lost(facts, role, container)) {
        let runs_again = i32::from(ran_before && !facts.ended);
        status.restart_count = status.restart_count.saturating_add(runs_again);
        if facts.ended {
            ApiState {
                terminated: Some(lost()),
                ..ApiState::default()
            }
        } else {
            status.last_state = Some(ApiState {
                terminated: Some(lost()),
                ..ApiState::default()
            });
            waiting(initial, "")
        }
    } else {
        // The kubelet leaves the message empty here. Holdfast reports the failing step.
        let blocking_reason = facts.blocking_reason.as_deref().unwrap_or_default();
        let (reason, message) = facts
            .problems
            .get(&container.name)
            .map_or((initial, blocking_reason), |(r, m)| (r, m));
        waiting(reason, message)
    });
    if facts.ended
        && let Some(before) = before
    {
        status.image_id.clone_from(&before.image_id);
        status.container_id.clone_from(&before.container_id);
    }
    status.ready = is_complete;
    status.started = Some(false);
    status
}

fn published_user(user: &observed::User) -> ContainerUser {
    ContainerUser {
        linux: Some(LinuxContainerUser {
            uid: user.uid,
            gid: user.gid,
            supplemental_groups: Some(user.groups.clone()).filter(|g| !g.is_empty()),
        }),
    }
}

/// Why a container that does not run waits for its next start: reason and message; `None` if it does not wait.
fn waits_for<'a>(
    facts: &'a Facts<'_>,
    (role, container): (Role, &Container),
    newest: &observed::Container,
    initial: &'a str,
) -> Option<(&'a str, &'a str)> {
    let exited = newest.state == ContainerState::Exited;
    // The agent stopped the instance to start another one. An apiserver rejects every later status of a container that it saw
    // terminated with exit code 0 and `OnFailure`, or with `Never` (`ValidateContainerStateTransition` in
    // `pkg/apis/core/validation/validation.go`). The kubelet computes no status between the two instances.
    let restarts = exited && facts.stopped_to_restart.contains(&newest.id);
    // A problem is of the next start. If no start follows, the exit is the container's state (`ShouldContainerBeRestarted` in
    // `convertToAPIContainerStatuses`).
    let stays = exited
        && !restarts
        && after_exit(facts.pod, role, container, newest.exit_code) == AfterExit::Stay;
    let problem = facts.problems.get(&container.name);
    problem
        .map(|(reason, message)| (reason.as_str(), message.as_str()))
        .filter(|(reason, _)| !stays || *reason == RESTARTING_ALL)
        .or_else(|| restarts.then_some((initial, "")))
}

/// The status of a container in the previous status of its pod.
fn before<'a>(previous: &'a PodStatus, name: &str) -> Option<&'a ContainerStatus> {
    let lists = [
        &previous.container_statuses,
        &previous.init_container_statuses,
        &previous.ephemeral_container_statuses,
    ];
    let mut all = lists.into_iter().flatten().flatten();
    all.find(|s| s.name == name)
}

/// The waiting reason of containers that nothing else holds.
fn initial_reason(pod: &Pod) -> &'static str {
    let init = &pod::spec(pod).init_containers;
    if init.as_ref().is_some_and(|i| !i.is_empty()) {
        "PodInitializing"
    } else {
        "ContainerCreating"
    }
}

/// The status of one container (`convertToAPIContainerStatuses` in `pkg/kubelet/kubelet_pods.go`).
fn container_status(facts: &Facts<'_>, role: Role, container: &Container) -> ContainerStatus {
    let before = before(facts.previous, &container.name);
    let initial = initial_reason(facts.pod);
    let (newest, older) = match facts.observed.latest_two(&container.name) {
        // In a stopped pod, an instance that was created and never started does not count if an earlier one has run.
        (Some(c), Some(_)) if facts.ended && c.state == ContainerState::Created => {
            facts.observed.latest_two_started(&container.name)
        }
        both => both,
    };
    let image = container.image.clone().unwrap_or_default();
    let mut status = ContainerStatus {
        name: container.name.clone(),
        image: image.clone(),
        volume_mounts: volume_mounts(container, facts.recursive_read_only),
        ..ContainerStatus::default()
    };
    if role == Role::Regular {
        let own = facts.devices.get(&container.name);
        status.allocated_resources_status = devices::reported_health(own, before, facts.ended);
    }
    let Some(newest) = newest else {
        return status_without_instance(facts, (role, container), before, initial, status);
    };
    // When a pod is being removed, its newest instance may be removed before older ones. An instance that was not
    // started yet may be replaced, and counts only after it has run.
    let (attempt, counted) = (
        i32::try_from(newest.attempt).unwrap_or(i32::MAX),
        before.map(|b| b.restart_count),
    );
    status.restart_count = match newest.state {
        ContainerState::Created => counted.unwrap_or(attempt),
        _ => attempt.max(counted.unwrap_or(0)),
    };
    status.container_id = Some(api_id(facts, &newest.id));
    status.image = if newest.image.is_empty() {
        image
    } else {
        newest.image.clone()
    };
    status.image_id.clone_from(&newest.image_ref);
    status.last_state = older.map(|older| ended(facts, older));
    if status.last_state.is_none() && older.is_none() && newest.attempt > 0 {
        // The earlier instance was removed; its last state is kept.
        let kept = before.and_then(|b| b.last_state.clone());
        let of = |s: &ApiState| s.terminated.as_ref()?.container_id.clone();
        status.last_state = kept.filter(|s| of(s) != status.container_id);
    }
    let running = newest.state == ContainerState::Running;
    // A container that was created and never started.
    let is_lost = facts.ended
        && newest.state == ContainerState::Created
        && missing::is_lost(facts, role, container);
    status.state = Some(if is_lost {
        ApiState {
            terminated: Some(lost()),
            ..ApiState::default()
        }
    } else {
        state(facts, newest)
    });
    let exited = newest.state == ContainerState::Exited;
    if let (Some((reason, message)), false) = (
        waits_for(facts, (role, container), newest, initial),
        running || facts.ended,
    ) {
        // The container will be restarted but cannot be yet, so its exit becomes the last state.
        if exited {
            status.last_state = Some(ended(facts, newest));
        }
        status.state = Some(waiting(reason, message));
    }
    if role != Role::Ephemeral {
        status.allocated_resources = container
            .resources
            .as_ref()
            .and_then(|r| r.requests.clone())
            .filter(|r| !r.is_empty());
        status.resources = Some(resize::reported_resources(
            container,
            &facts.resize.actuated,
        ));
    }
    status.user = newest.user.as_ref().map(published_user);
    status.stop_signal.clone_from(&newest.stop_signal);
    let running = running && !facts.starting.contains(container.name.as_str());
    status.started =
        (role != Role::Ephemeral).then(|| running && facts.probed.started(container, &newest.id));
    status.ready = match role {
        Role::Init => newest.state == ContainerState::Exited && newest.exit_code == 0,
        Role::Ephemeral => false,
        Role::Sidecar | Role::Regular => running && facts.probed.ready(container, &newest.id),
    };
    status
}

/// Whether the container is restarted regardless of its policy and exit code. This applies if it was removed because
/// all containers restart, or stopped in order to be restarted, until its next instance runs.
fn comes_back(facts: &Facts<'_>, status: &ContainerStatus) -> bool {
    let newest = facts.observed.newest(&status.name);
    let is_restarted = newest.is_some_and(|c| {
        let starts = c.state == ContainerState::Created && !facts.ended;
        starts || facts.stopped_to_restart.contains(&c.id)
    });
    let waiting = status.state.as_ref().and_then(|s| s.waiting.as_ref());
    is_restarted || waiting.is_some_and(|w| w.reason.as_deref() == Some(RESTARTING_ALL))
}

fn exit_of(status: &ContainerStatus) -> Option<i32> {
    let state = status.state.as_ref();
    let now = state.and_then(|s| s.terminated.as_ref());
    let before = state
        .filter(|s| s.waiting.is_some())
        .and(status.last_state.as_ref())
        .and_then(|s| s.terminated.as_ref());
    now.or(before).map(|t| t.exit_code)
}

fn is_running(status: &ContainerStatus) -> bool {
    status.state.as_ref().is_some_and(|s| s.running.is_some())
}

/// The phase (`getPhase` in `pkg/kubelet/kubelet_pods.go`).
fn phase(facts: &Facts<'_>, regular: &[ContainerStatus], init: &[ContainerStatus]) -> &'static str {
    let spec = pod::spec(facts.pod);
    let definitions: &[Container] = spec.init_containers.as_deref().unwrap_or_default();
    let never_started = regular
        .iter()
        .all(|s| exit_of(s).is_none() && !is_running(s));
    for (definition, status) in definitions.iter().zip(init) {
        let exit = exit_of(status).filter(|_| !comes_back(facts, status));
        if pod::is_sidecar(definition) {
            let up = is_running(status) && status.started == Some(true);
            if never_started && !up && !facts.ended {
                return "Pending";
            }
            continue;
        }
        match exit {
            Some(0) => {}
            Some(code)
                if facts.ended
                    || after_exit(facts.pod, Role::Init, definition, code) == AfterExit::Stay =>
            {
                return "Failed";
            }
            _ if facts.ended => return "Failed",
            _ => return "Pending",
        }
    }
    let running = regular.iter().filter(|s| is_running(s)).count();
    let stopped: Vec<(i32, &Container)> = regular
        .iter()
        .zip(&spec.containers)
        .filter(|(s, _)| !is_running(s))
        .filter_map(|(s, c)| exit_of(s).map(|e| (e, c)))
        .collect();
    let never = regular
        .len()
        .saturating_sub(running)
        .saturating_sub(stopped.len());
    if never > 0 {
        return if facts.ended { "Failed" } else { "Pending" };
    }
    if running > 0 {
        return "Running";
    }
    let success = stopped.iter().all(|(code, _)| *code == 0);
    if facts.ended {
        return if success { "Succeeded" } else { "Failed" };
    }
    if regular.iter().any(|s| comes_back(facts, s))
        || stopped
            .iter()
            .any(|(code, c)| restarts_after(facts.pod, c, *code))
    {
        return "Running";
    }
    if success { "Succeeded" } else { "Failed" }
}

fn list(names: &[&str]) -> String {
    format!("[{}]", names.join(" "))
}

struct ConditionState {
    kind: &'static str,
    holds: bool,
    reason: Option<&'static str>,
    message: Option<String>,
}

/// Whether the pod was initialised before. It stays so even while its init containers run again in a new sandbox.
fn initialised_before(facts: &Facts<'_>) -> bool {
    facts
        .previous
        .conditions
        .iter()
        .flatten()
        .any(|c| c.type_ == "Initialized" && c.status == "True")
}

/// The messages of the readiness gates that are not satisfied.
fn unmet_gates(pod: &Pod) -> Vec<String> {
    pod::spec(pod)
        .readiness_gates
        .iter()
        .flatten()
        .filter_map(|gate| {
            let found = pod
                .status
                .iter()
                .flat_map(|s| s.conditions.iter().flatten())
                .find(|c| c.type_ == gate.condition_type);
            match found {
                None => Some(format!(
                    "corresponding condition of pod readiness gate \"{}\" does not exist.",
                    gate.condition_type
                )),
                Some(c) if c.status != "True" => Some(format!(
                    "the status of pod readiness gate \"{}\" is not \"True\", but {}",
                    gate.condition_type, c.status
                )),
                Some(_) => None,
            }
        })
        .collect()
}

fn condition_of(
    kind: &'static str,
    holds: bool,
    reason: Option<&'static str>,
    message: Option<String>,
) -> ConditionState {
    ConditionState {
        kind,
        holds,
        reason,
        message,
    }
}

/// The `Initialized` condition: whether all init containers have completed or, as sidecars, started.
fn initialized(
    facts: &Facts<'_>,
    phase: &str,
    regular: &[ContainerStatus],
    init: &[ContainerStatus],
    sidecars: &[&str],
) -> ConditionState {
    let is_complete = |status: &ContainerStatus| match sidecars.contains(&status.name.as_str()) {
        true => status.started == Some(true),
        false => status.ready,
    };
    let incomplete = init.iter().filter(|status| !is_complete(status));
    let incomplete: Vec<&str> = incomplete.map(|status| status.name.as_str()).collect();
    let ran = regular
        .iter()
        .any(|s| is_running(s) || exit_of(s).is_some());
    if phase == "Succeeded" {
        return condition_of("Initialized", true, Some("PodCompleted"), None);
    }
    if incomplete.is_empty() || ran || initialised_before(facts) {
        return condition_of("Initialized", true, None, None);
    }
    let message = format!("containers with incomplete status: {}", list(&incomplete));
    let reason = Some("ContainersNotInitialized");
    condition_of("Initialized", false, reason, Some(message))
}

fn conditions_of(
    facts: &Facts<'_>,
    phase: &str,
    regular: &[ContainerStatus],
    init: &[ContainerStatus],
) -> Vec<ConditionState> {
    let spec = pod::spec(facts.pod);
    // The kubelet creates the sandbox after the volumes; here neither waits for the other.
    let can_start = facts.has_volumes
        && facts
        .observed
        .sandboxes
        .first()
        .is_some_and(|s| s.ready && (s.host_network || !s.ips.is_empty()))
        // The sandbox of a finished pod is stopped next.
        && !(matches!(phase, "Succeeded" | "Failed") && facts.observed.live().next().is_none());
    let sidecars: Vec<&str> = spec
        .init_containers
        .iter()
        .flatten()
        .filter(|c| pod::is_sidecar(c))
        .map(|c| c.name.as_str())
        .collect();
    let unready: Vec<&str> = regular
        .iter()
        .chain(init.iter().filter(|s| sidecars.contains(&s.name.as_str())))
        .filter(|s| !s.ready)
        .map(|s| s.name.as_str())
        .collect();
    let (holds, reason, message) = match phase {
        "Succeeded" => (false, Some("PodCompleted"), None),
        "Failed" => (false, Some("PodFailed"), None),
        _ if unready.is_empty() => (true, None, None),
        _ => (
            false,
            Some("ContainersNotReady"),
            Some(format!(
                "containers with unready status: {}",
                list(&unready)
            )),
        ),
    };
    let gates = unmet_gates(facts.pod);
    let ready = if holds && !gates.is_empty() {
        condition_of(
            "Ready",
            false,
            Some("ReadinessGatesNotReady"),
            Some(gates.join(", ")),
        )
    } else {
        condition_of("Ready", holds, reason, message.clone())
    };
    let final_reason = reason.filter(|_| matches!(phase, "Succeeded" | "Failed"));
    let restarting = pod::may_restart_all(facts.pod).then(|| {
        let over = |(reason, _): &(String, String)| reason == RESTARTING_ALL;
        let holds = final_reason.is_none() && facts.problems.values().any(over);
        condition_of("AllContainersRestarting", holds, final_reason, None)
    });
    let mut all = vec![
        // The kubelet has no message here. Holdfast reports the failing step.
        condition_of(
            "PodReadyToStartContainers",
            can_start,
            None,
            facts
                .blocking_reason
                .clone()
                .filter(|_| !can_start && !facts.ended),
        ),
        initialized(facts, phase, regular, init, &sidecars),
        ready,
        condition_of("ContainersReady", holds, reason, message),
        condition_of("PodScheduled", true, None, None),
    ];
    all.extend(restarting);
    all
}

/// The conditions of a resize, if there is one.
fn resizes(facts: &Facts<'_>) -> Vec<ConditionState> {
    let mut conditions = vec![];
    if let Some((reason, message)) = &facts.resize.pending {
        let infeasible = reason == resize::INFEASIBLE;
        conditions.push(ConditionState {
            kind: "PodResizePending",
            holds: true,
            reason: Some(if infeasible {
                resize::INFEASIBLE
            } else {
                "Deferred"
            }),
            message: Some(message.clone()),
        });
    }
    let error = facts.resize.error.clone();
    let runs = |name: &str| facts.observed.runs(name);
    let under_way = || facts.resize.is_under_way(facts.wanted, runs);
    if !facts.ended && (error.is_some() || under_way()) {
        conditions.push(ConditionState {
            kind: resize::IN_PROGRESS,
            holds: true,
            reason: error.is_some().then_some("Error"),
            message: error,
        });
    }
    conditions
}

/// A condition with the time of its last transition.
fn condition(facts: &Facts<'_>, new: ConditionState) -> PodCondition {
    let status = if new.holds { "True" } else { "False" };
    let before = facts.previous.conditions.iter().flatten();
    let same = |c: &&PodCondition| c.type_ == new.kind && c.status == status;
    let since = { before }
        .find(same)
        .and_then(|c| c.last_transition_time.clone());
    PodCondition {
        type_: new.kind.into(),
        status: status.into(),
        reason: new.reason.map(Into::into),
        message: new.message,
        last_transition_time: since.or_else(|| Some(seconds(facts.now))),
        observed_generation: facts.pod.metadata.generation,
        last_probe_time: None,
    }
}

/// Maximum total length of a pod's termination messages in bytes (`MaxPodTerminationMessageLogLength` in
/// `pkg/kubelet/container/runtime.go`).
const MESSAGES: usize = 12 << 10;

/// Truncates a container's termination messages to its share of the pod's limit.
fn cut_messages(status: &mut ContainerStatus, most: usize) {
    for state in [&mut status.state, &mut status.last_state] {
        let ended = state.as_mut().and_then(|s| s.terminated.as_mut());
        if let Some(message) = ended.and_then(|t| t.message.as_mut()) {
            let at_most = (0..=most.min(message.len())).rev();
            let mut ends = at_most.filter(|end| message.is_char_boundary(*end));
            let end = ends.next().unwrap_or(0);
            message.truncate(end);
        }
    }
}

/// Computes the status.
#[must_use]
pub fn compute(facts: &Facts<'_>) -> PodStatus {
    let spec = pod::spec(facts.pod);
    let all = pod::containers(facts.pod);
    let of = |wanted: fn(Role) -> bool| -> Vec<ContainerStatus> {
        all.iter()
            .filter(|(role, _)| wanted(*role))
            .map(|(role, c)| {
                let mut status = container_status(facts, *role, c);
                cut_messages(
                    &mut status,
                    MESSAGES.checked_div(all.len()).unwrap_or(MESSAGES),
                );
                status
            })
            .collect()
    };
    let regular = of(|r| r == Role::Regular);
    let init = of(|r| matches!(r, Role::Init | Role::Sidecar));
    let ephemeral = of(|r| r == Role::Ephemeral);
    // A terminal phase never changes.
    let known = facts.previous.phase.as_deref().unwrap_or_default();
    let verdict = facts.verdict.filter(|_| facts.ended);
    let phase = match (known, pod::phase(facts.pod)) {
        ("Succeeded", _) | (_, "Succeeded") => "Succeeded",
        ("Failed", _) | (_, "Failed") => "Failed",
        // The containers determine the phase of a preempted pod (upstream's `generateAPIPodStatus`,
        // critical_pod_test.go).
        _ if verdict.is_some_and(|v| v.cause != Cause::Preempted) => "Failed",
        _ => phase(facts, &regular, &init),
    };
    // Reason and message belong to the phase: upstream drops them if the containers have succeeded.
    let reported = verdict.filter(|_| phase == "Failed");
    let mut conditions = conditions_of(facts, phase, &regular, &init);
    conditions.extend(resizes(facts));
    if let Some(message) = verdict.and_then(|v| v.disruption.clone()) {
        conditions.push(ConditionState {
            kind: "DisruptionTarget",
            holds: true,
            reason: Some("TerminationByKubelet"),
            message: Some(message),
        });
    }
    let conditions = conditions.into_iter();
    let conditions = conditions.map(|j| condition(facts, j)).collect();
    let (ips, host_ips) = (addresses(facts), node_addresses(facts));
    let some = |list: Vec<ContainerStatus>| (!list.is_empty()).then_some(list);
    let (allocated_resources, resources) =
        resize::published_of_pod(facts.pod, facts.wanted, &facts.resize.actuated);
    let mut regular = regular;
    regular.sort_by(|a, b| a.name.cmp(&b.name));
    PodStatus {
        phase: Some(phase.into()),
        conditions: Some(conditions),
        container_statuses: some(regular),
        init_container_statuses: some(init),
        ephemeral_container_statuses: some(ephemeral),
        host_ip: host_ips.first().cloned(),
        host_ips: (!host_ips.is_empty())
            .then(|| host_ips.into_iter().map(|ip| HostIP { ip }).collect()),
        pod_ip: ips.first().cloned(),
        pod_ips: (!ips.is_empty()).then(|| ips.iter().map(|ip| PodIP { ip: ip.clone() }).collect()),
        start_time: facts
            .previous
            .start_time
            .clone()
            .or_else(|| Some(seconds(facts.now))),
        qos_class: facts
            .previous
            .qos_class
            .clone()
            .or_else(|| Some(qos::of(spec).name().into())),
        reason: reported
            .map(|v| v.reason.clone())
            .or_else(|| facts.previous.reason.clone().filter(|_| known == phase)),
        message: reported
            .map(|v| v.message.clone())
            .or_else(|| facts.previous.message.clone().filter(|_| known == phase)),
        observed_generation: facts.pod.metadata.generation,
        allocated_resources,
        resources,
        ..PodStatus::default()
    }
}

/// Whether a container has been created for the pod according to its status.
#[must_use]
pub(crate) fn names_containers(status: &PodStatus) -> bool {
    let lists = [
        &status.init_container_statuses,
        &status.container_statuses,
        &status.ephemeral_container_statuses,
    ];
    let mut containers = lists.into_iter().flatten().flatten();
    containers.any(|container| container.container_id.is_some())
}

#[cfg(test)]
mod tests;
