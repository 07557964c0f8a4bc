//! The pod sync in ten named steps (kubelet spec, 3.1 and 3.2), and the two that end a pod.
//!
//! 1 startup latency, 2 API status, 3 status manager, 4 admission (in the worker, before the first sync),
//! 5 pod cgroup, 6 mirror pod, 7 data directories, 8 volumes, 9 pull secrets, 10 runtime sync
//! ([`runtime`]). The sandbox of step 10 is made while volumes, secrets and images are fetched: neither
//! needs the other.

mod runtime;
mod start;
mod stop;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod, PodStatus, Secret};
use kube::ResourceExt as _;
use tokio::sync::Notify;
use tokio::time::Instant;

use self::stop::{Ending, Stopping};
use super::journal::Log;
use super::mirror;
use super::probing::Probing;
use super::status::StatusWriter;
use super::worker::{Desired, Stop};
use crate::agent::metrics::PodStart;
use crate::agent::volume::Volumes;
use crate::agent::{Context, Kind, Network};
use crate::core::backoff::Backoff;
use crate::core::pod::actions::{self, Health};
use crate::core::pod::cri_config;
use crate::core::pod::journal::Step;
use crate::core::pod::lifecycle::{Cause, Input};
use crate::core::pod::observed::{self, ContainerState, ObservedPod};
use crate::core::pod::resize::{self, Sizes};
use crate::core::pod::status::{self, Facts, Problems, Resizing, Verdict};
use crate::core::pod::users::Mappings;
use crate::core::pod::{self, Role};

/// What a worker remembers between syncs. All of it can be had again from the runtime and the API.
pub struct Memory {
    /// The newest status.
    pub status: PodStatus,
    /// What the runtime showed last.
    pub fingerprint: u64,
    /// The status goes on from what the API had.
    adopted: bool,
    problems: Problems,
    backoff: Backoff,
    first_seen: Timestamp,
    /// Its volumes.
    volumes: Volumes,
    ran: bool,
    /// Restart counts that removed containers must go on from.
    counts: BTreeMap<String, u32>,
    /// What was done to end the pod so far.
    ending: Ending,
    /// Its probes.
    probing: Probing,
    /// Why this node ends the pod, if it does.
    pub verdict: Option<Verdict>,
    /// The sizes that the node has granted; none until the pod is seen first.
    granted: Option<Sizes>,
    /// How far a resize is.
    pub resizing: Resizing,
    /// Its journal.
    pub log: Log,
}

impl Memory {
    /// For a pod first seen at `now`; `hint` wakes its worker.
    #[must_use]
    pub fn new(now: Timestamp, log: Log, hint: Arc<Notify>) -> Memory {
        Memory {
            status: PodStatus::default(),
            fingerprint: 0,
            adopted: false,
            problems: Problems::new(),
            backoff: Backoff::default(),
            first_seen: now,
            volumes: Volumes::new(Arc::clone(&hint)),
            ran: false,
            counts: BTreeMap::new(),
            ending: Ending::default(),
            verdict: None,
            granted: None,
            resizing: Resizing::default(),
            probing: Probing::new(hint, log.clone()),
            log,
        }
    }

    /// Hands the newest status to the writer, to be on `object`.
    pub fn report(&self, object: Option<Arc<Pod>>, writer: &StatusWriter) {
        writer.want(object, self.status.clone());
    }

    /// The pod as it was granted. At first sight that is what its status shows as carried out.
    pub fn granted(&mut self, pod: &Arc<Pod>) -> Arc<Pod> {
        if self.granted.is_none() {
            self.resizing.actuated = resize::known(pod);
        }
        let granted = self
            .granted
            .get_or_insert_with(|| self.resizing.actuated.clone());
        if resize::same(granted, &resize::wished(pod)) {
            Arc::clone(pod)
        } else {
            Arc::new(resize::with(pod, granted))
        }
    }

    /// What the spec wishes for is granted, or why not: reason and message. True if that is news.
    pub fn grant(&mut self, pod: &Pod, refusal: Option<(String, String)>) -> bool {
        let wished = resize::wished(pod);
        let news = match &refusal {
            Some(refusal) => self.resizing.pending.as_ref() != Some(refusal),
            None => self
                .granted
                .as_ref()
                .is_some_and(|granted| !resize::same(granted, &wished)),
        };
        if refusal.is_none() {
            self.granted = Some(wished);
        }
        self.resizing.pending = refusal;
        news
    }

    /// Takes over what the API says, once: after a restart, times and counts go on from there. A static
    /// pod's mirror may be seen only after its worker has begun.
    pub fn adopt(&mut self, object: Option<&Pod>) {
        // Only the first sight counts: later ones may be echoes of what was written since, and older.
        let Some(object) = object.filter(|_| !self.adopted) else {
            return;
        };
        self.adopted = true;
        if let Some(status) = object.status.clone().filter(|s| s.conditions.is_some()) {
            self.ran |= status.phase.as_deref().is_some_and(|p| p != "Pending");
            self.status = status;
        }
    }
}

/// How a step ended.
pub enum Outcome {
    /// The state moves on.
    Next(Input),
    /// Nothing to do until something happens, or this time.
    Wait(Option<Instant>),
    /// The pod has left this node.
    Gone,
}

async fn observe(context: &Context, pod: &Pod, memory: &mut Memory) -> Result<ObservedPod, String> {
    let look = async {
        context
            .runtime
            .observe(pod::uid(pod))
            .await
            .map_err(|e| format!("the runtime cannot be asked about the pod: {e}"))
    };
    let seen = memory.log.step(Step::Observe, "", look).await;
    let mut observed = seen.inspect_err(|error| {
        context.events.pod(
            pod,
            None,
            Kind::Warning,
            "FailedSync",
            format!("error determining status: {error}"),
        );
    })?;
    memory.fingerprint = observed.fingerprint();
    // A start whose answer was lost may have succeeded: what runs or has done its work has no problem.
    let settled = |name: &str| {
        let init = pod::containers(pod)
            .iter()
            .any(|(role, c)| *role == Role::Init && c.name == name);
        observed.newest(name).is_some_and(|c| {
            c.state == ContainerState::Running
                || (init && c.state == ContainerState::Exited && c.exit_code == 0)
        })
    };
    memory.problems.retain(|name, _| !settled(name));
    for container in observed
        .containers
        .iter_mut()
        .filter(|c| c.state == ContainerState::Exited)
    {
        let mut text = context
            .host
            .termination_message(pod::uid(pod), &container.name, container.attempt)
            .await;
        if text.is_none() && falls_back_to_logs(pod, container) {
            text = context
                .host
                .log_tail(pod, &container.name, container.attempt)
                .await;
        }
        if let Some(text) = text {
            container.message = if container.message.is_empty() {
                text
            } else {
                format!("{}: {text}", container.message)
            };
        }
    }
    Ok(observed)
}

/// Whether the end of its log is a container's termination message (kubelet spec, 4.5).
fn falls_back_to_logs(pod: &Pod, ended: &observed::Container) -> bool {
    let wished = |c: &Container| {
        c.name == ended.name
            && c.termination_message_policy.as_deref() == Some("FallbackToLogsOnError")
    };
    ended.exit_code != 0
        && ended.reason != "ContainerCannotRun"
        && pod::containers(pod).iter().any(|(_, c)| wished(c))
}

/// Step 1: how long the start took, noted at the first sight of the pod running.
fn record_startup_latency(context: &Context, pod: &Pod, memory: &mut Memory) {
    if !memory.ran && memory.status.phase.as_deref() == Some("Running") {
        memory.ran = true;
        let now = context.clock.now();
        let since = |at: Timestamp| now.duration_since(at).as_secs_f64();
        let created = pod
            .metadata
            .creation_timestamp
            .as_ref()
            .map_or(memory.first_seen, |t| t.0);
        let stateful = pod::spec(pod)
            .volumes
            .iter()
            .flatten()
            .any(|v| v.persistent_volume_claim.is_some() || v.ephemeral.is_some());
        let images = memory.log.took(Step::Image).as_secs_f64();
        context.metrics.pod_started(PodStart {
            seen: since(memory.first_seen),
            created: since(created),
            images,
            stateful,
        });
    }
}

/// Step 2: the API status from what the runtime has.
fn compute_status(
    context: &Context,
    pod: &Pod,
    observed: &ObservedPod,
    memory: &mut Memory,
    ended: bool,
) {
    let facts = Facts {
        pod,
        observed,
        previous: &memory.status,
        problems: &memory.problems,
        held_up: memory.log.held_up(),
        probed: &memory.probing.results(),
        resize: &memory.resizing,
        node_ips: &context.node_ips,
        ended,
        verdict: memory.verdict.as_ref(),
        now: context.clock.now(),
    };
    memory.status = status::compute(&facts);
}

/// Step 3: hands the status to the status writer.
fn publish_status(desired: &Desired, memory: &Memory, writer: &StatusWriter) {
    memory.report(desired.object.clone(), writer);
}

/// Step 5: the pod's cgroup with its limits.
async fn ensure_cgroup(context: &Context, pod: &Pod, log: &Log) -> Result<String, String> {
    log.step(Step::Cgroup, "", context.host.ensure_cgroup(pod))
        .await
        .map_err(|error| {
            let message = format!("unable to ensure pod container exists: {error}");
            context.events.pod(
                pod,
                None,
                Kind::Warning,
                "FailedCreatePodContainer",
                message.clone(),
            );
            message
        })
}

/// Step 6: a static pod's mirror in the API. The answer is when to look again, if it is not there yet.
async fn reconcile_mirror(context: &Context, desired: &Desired, log: &Log) -> Option<Timestamp> {
    if !pod::is_static(&desired.pod) || context.config.kubeconfig.is_none() {
        return None;
    }
    let soon = context.clock.now() + SignedDuration::from_millis(200);
    match log
        .step(
            Step::Mirror,
            "",
            mirror::reconcile(context, &desired.pod, desired.object.as_ref()),
        )
        .await
    {
        Ok(true) => None,
        Ok(false) => Some(soon),
        Err(error) => {
            tracing::warn!(%error, "the static pod runs without a mirror for now");
            Some(soon + SignedDuration::from_secs(5))
        }
    }
}

/// Step 7: the pod's directories.
async fn make_directories(context: &Context, pod: &Pod, log: &Log) -> Result<(), String> {
    log.step(Step::Directories, "", context.host.make_directories(pod))
        .await
        .map_err(|error| {
            let message = format!("error making pod data directories: {error}");
            context
                .events
                .pod(pod, None, Kind::Warning, "Failed", message.clone());
            message
        })
}

/// Step 9: the pull secrets; those that are missing are reported, the rest is used.
async fn pull_secrets(context: &Context, pod: &Pod) -> Vec<Arc<Secret>> {
    let namespace = pod.namespace().unwrap_or_default();
    let (mut found, mut missing) = (vec![], vec![]);
    for reference in pod::spec(pod).image_pull_secrets.iter().flatten() {
        match context.api.secret(&namespace, &reference.name).await {
            Ok(secret) => found.push(secret),
            Err(_) => missing.push(reference.name.clone()),
        }
    }
    if !missing.is_empty() {
        let message = format!(
            "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
            missing.join(", ")
        );
        context.events.pod(
            pod,
            None,
            Kind::Warning,
            "FailedToRetrieveImagePullSecret",
            message,
        );
    }
    found
}

/// The end of a pod that has been active for as long as it may be (kubelet spec, 4.1).
fn past_deadline(context: &Context, pod: &Pod, memory: &mut Memory) -> bool {
    let Some(until) =
        status::deadline(pod, &memory.status).filter(|until| *until <= context.clock.now())
    else {
        return false;
    };
    let message = "Pod was active on the node longer than the specified deadline";
    tracing::info!(%until, "the pod is past its active deadline");
    context
        .events
        .pod(pod, None, Kind::Normal, "DeadlineExceeded", message);
    memory.verdict = Some(Verdict {
        reason: "DeadlineExceeded",
        message: message.into(),
        disruption: None,
        grace: None,
    });
    true
}

fn ended(pod: &Pod) -> Outcome {
    Outcome::Next(Input::Ended {
        cause: Cause::Completed,
        grace: pod::grace_seconds(pod),
    })
}

/// Brings a pod to what its spec says, as far as that is possible now.
pub async fn sync_pod(
    context: &Arc<Context>,
    desired: &Desired,
    memory: &mut Memory,
    writer: &StatusWriter,
    stop: &Stop<'_>,
) -> Result<Outcome, String> {
    let pod = &desired.pod;
    let observed = look(context, desired, memory, writer).await?;
    if matches!(memory.status.phase.as_deref(), Some("Succeeded" | "Failed"))
        || past_deadline(context, pod, memory)
    {
        publish_status(desired, memory, writer);
        return Ok(ended(pod));
    }
    let restarts = restart_counts(context, pod, &observed, memory).await;
    let actions = actions::compute(
        pod,
        &observed,
        &Health {
            probed: &memory.probing.results(),
            actuated: &memory.resizing.actuated,
        },
        |name| restarts.get(name).copied().unwrap_or(0),
    );
    if actions.give_up {
        return Ok(ended(pod));
    }
    let deadline = status::deadline(pod, &memory.status);
    if actions.is_empty() && !memory.volumes.are_due(pod, context.config.sync_frequency) {
        memory.problems.clear();
        let mirror_again = reconcile_mirror(context, desired, &memory.log).await;
        return Ok(Outcome::Wait(Some(at(
            context,
            mirror_again.into_iter().chain(deadline).min(),
        ))));
    }
    if !pod::host_network(pod) && actions.create_sandbox.is_some() {
        let network = context.network.borrow().clone();
        match network {
            Network::Ready => memory.log.close(Step::Network, ""),
            // The node's loop asks as its first act: this is no news to anybody.
            Network::Unasked => {
                let mut known = context.network.clone();
                // The sender lives as long as the process.
                let _ = known.wait_for(|n| *n != Network::Unasked).await;
                return Ok(Outcome::Wait(Some(Instant::now())));
            }
            Network::NotReady(why) => {
                let message = format!("network is not ready: {why}");
                let again = context.clock.now() + SignedDuration::from_secs(1);
                memory.log.fail(Step::Network, "", &message, Some(again));
                context
                    .events
                    .pod(pod, None, Kind::Warning, "NetworkNotReady", message);
                return Ok(Outcome::Wait(Some(Instant::now() + Duration::from_secs(1))));
            }
        }
    }
    let (handler, users) = isolation(context, pod).await?;
    let cgroup_parent = ensure_cgroup(context, pod, &memory.log).await?;
    let mirror_again = reconcile_mirror(context, desired, &memory.log).await;
    make_directories(context, pod, &memory.log).await?;
    let node = cri_config::Node {
        resolver: &context.resolver,
        cgroup_parent,
        log_directory: context.host.log_directory(pod).display().to_string(),
        seccomp_root: context
            .config
            .root_dir
            .join("seccomp")
            .display()
            .to_string(),
        seccomp_default: context.config.seccomp_default,
        memory: context.machine.memory,
        cpu_period: context.config.cpu_period,
        hugepages: context.machine.hugepages.clone(),
        group_oom: context.machine.cgroup_v2 && !context.config.single_process_oom_kill,
        swap: context.machine.swap.map(|bytes| cri_config::Swap {
            bytes: if context.config.limited_swap && context.machine.cgroup_v2 {
                bytes
            } else {
                0
            },
            unified: context.machine.cgroup_v2,
        }),
        masked: context.machine.thermal.clone(),
        recursive_read_only: context
            .features
            .borrow()
            .handler(&handler)
            .recursive_read_only,
        handler,
        users,
    };
    let again = runtime::sync(
        context, desired, &observed, actions, memory, &node, stop, writer,
    )
    .await;
    stop.forget_hint();
    let observed = look(context, desired, memory, writer).await?;
    collect_garbage(context, pod, &observed, memory).await;
    let again = again?.into_iter().chain(mirror_again).chain(deadline).min();
    Ok(Outcome::Wait(Some(at(context, again))))
}

/// Removes ended containers and sandboxes that nobody needs any more, with their logs. What cannot be
/// removed now is found again by the next sync.
async fn collect_garbage(
    context: &Context,
    pod: &Pod,
    observed: &ObservedPod,
    memory: &mut Memory,
) {
    let gone = |error: String| tracing::warn!(error, "what has ended could not be removed yet");
    let (containers, sandboxes) = (
        actions::surplus(observed),
        actions::surplus_sandboxes(observed),
    );
    for container in &containers {
        match context.runtime.remove_container(&container.id).await {
            Ok(()) => context
                .host
                .remove_instance(pod, &container.name, container.attempt, &container.id)
                .await
                .unwrap_or_else(gone),
            Err(error) => gone(error.to_string()),
        }
    }
    for sandbox in &sandboxes {
        context
            .runtime
            .remove_sandbox(sandbox)
            .await
            .unwrap_or_else(|e| gone(e.to_string()));
    }
    if !containers.is_empty() || !sandboxes.is_empty() {
        // What was removed by us is no news.
        if let Err(error) = observe(context, pod, memory).await {
            gone(error);
        }
    }
}

/// Steps 1 to 3: looks at the runtime, keeps the probes in line, computes the status and hands it on.
async fn look(
    context: &Arc<Context>,
    desired: &Desired,
    memory: &mut Memory,
    writer: &StatusWriter,
) -> Result<ObservedPod, String> {
    let pod = &desired.pod;
    let observed = observe(context, pod, memory).await?;
    memory
        .probing
        .follow(context, pod, &observed, &memory.status);
    compute_status(context, pod, &observed, memory, false);
    record_startup_latency(context, pod, memory);
    publish_status(desired, memory, writer);
    Ok(observed)
}

/// The restart counts that containers without an instance start from: what the status says, what was
/// removed on purpose, what the logs tell (kubelet spec, 4.4).
async fn restart_counts(
    context: &Context,
    pod: &Pod,
    observed: &ObservedPod,
    memory: &Memory,
) -> BTreeMap<String, u32> {
    let status = &memory.status;
    let known = [&status.container_statuses, &status.init_container_statuses]
        .into_iter()
        .flatten()
        .flatten();
    let mut counts: BTreeMap<String, u32> = known
        .map(|s| (s.name.clone(), u32::try_from(s.restart_count).unwrap_or(0)))
        .collect();
    for (_, container) in pod::containers(pod)
        .iter()
        .filter(|(_, c)| observed.newest(&c.name).is_none())
    {
        let logged = context
            .host
            .last_attempt(pod, &container.name)
            .await
            .map(|last| last + 1);
        let count = counts.entry(container.name.clone()).or_default();
        *count = (*count)
            .max(logged.unwrap_or(0))
            .max(memory.counts.get(&container.name).copied().unwrap_or(0));
    }
    counts
}

/// The runtime's handler that the pod asks for, and its user namespace's ids.
async fn isolation(context: &Context, pod: &Pod) -> Result<(String, Option<Mappings>), String> {
    let spec = pod::spec(pod);
    let fail = |error: String| {
        let message = format!("Failed to create pod sandbox: {error}");
        context.events.pod(
            pod,
            None,
            Kind::Warning,
            "FailedCreatePodSandBox",
            message.clone(),
        );
        message
    };
    let handler = match spec.runtime_class_name.as_deref().filter(|n| !n.is_empty()) {
        None => String::new(),
        Some(class) => context
            .api
            .runtime_handler(class)
            .await
            .map_err(|e| fail(format!("failed to get RuntimeClass {class:?}: {e}")))?,
    };
    if spec.host_users != Some(false) {
        return Ok((handler, None));
    }
    if !context.features.borrow().handler(&handler).user_namespaces {
        let which = if handler.is_empty() {
            "runtime".to_owned()
        } else {
            format!("RuntimeClass handler {handler:?}")
        };
        return Err(fail(format!(
            "can't set `spec.hostUsers: false`, {which} does not support user namespaces"
        )));
    }
    Ok((
        handler,
        Some(context.host.user_mappings(pod).await.map_err(fail)?),
    ))
}

/// When to sync again: at the given time, at the latest after the sync frequency.
fn at(context: &Context, again: Option<Timestamp>) -> Instant {
    let wait = again.map_or(context.config.sync_frequency, |time| {
        let left = Duration::try_from(time.duration_since(context.clock.now())).unwrap_or_default();
        left.clamp(Duration::from_millis(10), context.config.sync_frequency)
    });
    Instant::now() + wait
}

/// Ends all containers within `grace` seconds; returns when none is seen running any more.
pub async fn terminate(
    context: &Arc<Context>,
    desired: &Desired,
    memory: &mut Memory,
    writer: &StatusWriter,
    grace: i64,
    cause: Cause,
) -> Result<(), String> {
    let pod = &desired.pod;
    memory.ending.within(grace);
    let observed = observe(context, pod, memory).await?;
    memory
        .probing
        .follow(context, pod, &observed, &memory.status);
    let before = status::substance(&memory.status);
    compute_status(context, pod, &observed, memory, false);
    // That the deletion was seen is told together with the end, which is near.
    if before != status::substance(&memory.status) {
        publish_status(desired, memory, writer);
    }
    memory.probing.ending(pod, &observed);
    let log = memory.log.clone();
    let stopping = Stopping {
        context,
        pod,
        observed: &observed,
        log: &log,
    };
    stopping
        .pod(&mut memory.ending)
        .await
        .inspect_err(|error| {
            context.events.pod(
                pod,
                None,
                Kind::Warning,
                "FailedKillPod",
                format!("error killing pod: {error}"),
            );
        })?;
    memory.probing.stop();
    memory.problems.clear();
    let observed = observe(context, pod, memory).await?;
    if let Some(running) = observed.live().next() {
        return Err(format!(
            "container {} still runs after it was stopped",
            running.name
        ));
    }
    tracing::debug!(?cause, "all containers have ended");
    compute_status(context, pod, &observed, memory, true);
    publish_status(desired, memory, writer);
    Ok(())
}

/// Gives back what the pod held: volumes, cgroup and, for a pod that leaves, everything else.
pub async fn release(
    context: &Arc<Context>,
    desired: &Desired,
    memory: &mut Memory,
    cause: Cause,
) -> Result<(), String> {
    let pod = &desired.pod;
    let uid = pod::uid(pod);
    if cause.removes_content() {
        let observed = observe(context, pod, memory).await?;
        let removals = observed
            .sandboxes
            .iter()
            .map(|s| context.runtime.remove_sandbox(&s.id));
        for removed in futures::future::join_all(removals).await {
            removed.map_err(|e| format!("the sandbox cannot be removed: {e}"))?;
        }
        let orphans = observed
            .containers
            .iter()
            .filter(|c| !observed.sandboxes.iter().any(|s| s.id == c.sandbox));
        for container in orphans {
            context
                .runtime
                .remove_container(&container.id)
                .await
                .map_err(|e| format!("container {} cannot be removed: {e}", container.name))?;
        }
        memory.fingerprint = 0;
    }
    let give_back = async {
        crate::agent::volume::tear_down(context, uid).await?;
        context.host.remove_cgroup(pod).await?;
        if cause.removes_content() {
            context.host.remove_directories(pod).await?;
        }
        Ok(())
    };
    memory.log.step(Step::Release, "", give_back).await
}
