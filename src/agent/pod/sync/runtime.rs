//! Step 10, the runtime sync: sandbox changes, kills, then ephemeral, init and normal containers in the
//! plan's order (kubelet spec, 3.2 and 3.3).

use std::sync::Arc;
use std::time::Duration;

use holdfast_proto::cri as pb;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Pod, Secret};
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

use super::Memory;
use super::compute_status;
use super::observe;
use super::publish_status;
use super::pull_secrets;
use super::start::{Starting, start_container};
use super::stop::Stopping;
use crate::agent::pod::journal::Log;
use crate::agent::pod::status::StatusWriter;
use crate::agent::pod::worker::{Desired, Stop};
use crate::agent::{Context, Kind, image};
use crate::core::backoff::Backoff;
use crate::core::pod::actions::{Kill, PodActions, Start};
use crate::core::pod::journal::Step;
use crate::core::pod::observed::{ContainerState, ObservedPod};
use crate::core::pod::{self, Role};
use crate::core::{
    pod::{cri_config, dns, resize},
    time,
};
use crate::cri::RuntimeErrorKind;
use tokio::time::Instant;

/// A start that waits for its image this long lets the status so far be seen, and again each time a probe
/// has news.
const PATIENCE: Duration = Duration::from_millis(300);

type Pull = AbortOnDropHandle<Result<image::Pulled, image::Waiting>>;

/// Executes the plan. The answer is when to try again what was held back.
#[allow(clippy::too_many_arguments)]
pub async fn sync(
    context: &Arc<Context>,
    desired: &Desired,
    observed: &ObservedPod,
    actions: PodActions,
    memory: &mut Memory,
    node: &cri_config::Node<'_>,
    stop: &Stop<'_>,
    writer: &StatusWriter,
) -> Result<Option<Timestamp>, String> {
    let pod = &desired.pod;
    let log = memory.log.clone();
    let stopping = Stopping {
        context,
        pod,
        observed,
        log: &log,
    };
    let is_resized =
        |memory: &Memory| resize::same(&memory.resizing.actuated, &resize::wished(pod));
    let mut resizing = !is_resized(memory);
    if !actions.restart_all.is_empty() {
        return restart_all(&stopping, &actions.restart_all, memory).await;
    }
    if actions.kill_pod {
        if actions.create_sandbox.is_some() {
            context.events.pod(
                pod,
                None,
                Kind::Normal,
                "SandboxChanged",
                "Pod sandbox changed, it will be killed and re-created.",
            );
        }
        memory.ending.within(pod::grace_seconds(pod));
        stopping.pod(&mut memory.ending).await?;
        memory.ending = super::Ending::default();
    }
    for kill in &actions.kill {
        tokio::select! {
            // In this order, so that a simulated run replays exactly.
            biased;
            stopped = stopping.container(kill, kill.grace.unwrap_or_else(|| pod::grace_seconds(pod))) => stopped?,
            // The pod's own end has a grace of its own, and stops this container too.
            () = stop.when_wanted() => return Ok(None),
        }
    }
    if !actions.resize.is_empty() && !stop.wanted() {
        carry_out(&stopping, &actions.resize, memory, node).await?;
        if is_resized(memory) {
            resize_completed(std::mem::take(&mut resizing), context, pod);
        }
    }
    if stop.wanted()
        || (actions.start.is_empty()
            && actions.create_sandbox.is_none()
            && !memory.volumes.are_due(pod, context.config.sync_frequency))
    {
        return Ok(None);
    }
    let known_ips: Vec<String> = observed
        .sandboxes
        .first()
        .map(|s| s.ips.clone())
        .unwrap_or_default();
    let mut sandbox_message = None;
    let make_sandbox = async {
        match (actions.create_sandbox, &actions.sandbox) {
            (Some(attempt), _) => {
                let made = log
                    .step(
                        Step::Sandbox,
                        "",
                        create_sandbox(context, pod, attempt, node, stop),
                    )
                    .await;
                made.map(|(id, config, ips)| {
                    sandbox_message = Some(config);
                    (id, ips)
                })
            }
            (None, Some(id)) => Ok((id.clone(), known_ips.clone())),
            (None, None) => Err("there is no sandbox to use".into()),
        }
    };
    let held: Vec<Option<image::Waiting>> = actions
        .start
        .iter()
        .map(|start| {
            let ended = observed
                .newest(&start.container.name)
                .filter(|c| c.state == ContainerState::Exited);
            let held = held_back(
                context,
                pod,
                start,
                ended.map(|c| c.finished_at.unwrap_or(c.created_at)),
                &mut memory.backoff,
            );
            if let Some(held) = &held {
                log.fail(
                    Step::BackOff,
                    &start.container.name,
                    &held.message,
                    held.again,
                );
            }
            held
        })
        .collect();
    // Containers that run have theirs, from whoever set them up.
    let (volumes, known) = (&mut memory.volumes, observed.live().next().is_some());
    let images = async {
        let secrets: Arc<[Arc<Secret>]> = pull_secrets(context, pod).await.into();
        // All pulls begin now; each container waits for its own.
        let pulls = actions.start.iter().zip(&held).map(|(start, held)| {
            held.is_none()
                .then(|| pull(context, pod, start, &secrets, &log))
        });
        pulls.collect::<Vec<Option<Pull>>>()
    };
    let prepare = async {
        tokio::select! {
            // In this order, so that a simulated run replays exactly.
            biased;
            done = async { tokio::join!(volumes.set_up(context, pod, &known_ips, known, &log), images) } => Some(done),
            // A driver may take minutes. Dropping what it was asked is safe: what came of it is undone with the pod.
            () = stop.when_wanted() => None,
        }
    };
    let (sandbox, prepared) = tokio::join!(make_sandbox, prepare);
    let (sandbox, ips) = sandbox?;
    let Some((fetched, pulls)) = prepared else {
        return Ok(None);
    };
    let fetched = fetched?;
    let attempt = observed
        .sandboxes
        .iter()
        .find(|s| s.id == sandbox)
        .map_or(0, |s| s.attempt);
    let sandbox_config = match sandbox_message {
        Some(config) => config,
        None => cri_config::sandbox(pod, attempt, node)?,
    };
    let ips = if pod::host_network(pod) {
        context.node_ips.clone()
    } else {
        ips
    };
    let starting = Starting {
        context,
        pod,
        sandbox: &sandbox,
        sandbox_config: &sandbox_config,
        ips: &ips,
        node,
        fetched: &fetched,
        log: &log,
        observed,
    };
    let mut again: Option<Timestamp> = None;
    for ((start, held), pull) in actions.start.iter().zip(held).zip(pulls) {
        if stop.wanted() {
            break;
        }
        let name = start.container.name.clone();
        let result = match (held, pull) {
            (None, Some(pull)) => {
                let begin = async {
                    let image = patiently(&starting, desired, pull, memory, writer, stop).await?;
                    start_container(&starting, start, &image).await
                };
                tokio::select! {
                    // In this order, so that a simulated run replays exactly.
                    biased;
                    // Dropping a start is safe: what was created is found by the next observation.
                    result = begin => result,
                    () = stop.when_wanted(), if start.role != Role::Ephemeral => break,
                }
            }
            (held, _) => held.map_or(Ok(()), Err),
        };
        match result {
            Ok(()) => {
                // What is started now has the size that was granted.
                memory
                    .resizing
                    .actuated
                    .extend(resize::wished(pod).remove_entry(&name));
                log.close(Step::BackOff, &name);
                memory.problems.remove(&name);
            }
            Err(waiting) => {
                let at = waiting
                    .again
                    .unwrap_or_else(|| context.clock.now() + SignedDuration::from_secs(10));
                again = Some(again.map_or(at, |a| a.min(at)));
                log.again(at);
                memory
                    .problems
                    .insert(name, (waiting.reason, waiting.message));
                if start.role == Role::Init {
                    break;
                }
            }
        }
    }
    resize_completed(resizing && is_resized(memory), context, pod);
    Ok(again)
}

fn resize_completed(is: bool, context: &Context, pod: &Pod) {
    if is {
        let message = format!("Pod resize completed: {}", resize::described(pod, None));
        context
            .events
            .pod(pod, None, Kind::Normal, "ResizeCompleted", message);
    }
}

/// Brings running containers to the sizes that were granted: the pod's cgroup grows first, then those that
/// shrink, then those that grow, and at last the pod's cgroup shrinks (kubelet spec, 5.7).
async fn carry_out(
    s: &Stopping<'_>,
    names: &[String],
    memory: &mut Memory,
    node: &cri_config::Node<'_>,
) -> Result<(), String> {
    let (context, pod) = (s.context, s.pod);
    let work = async {
        let wished = resize::wished(pod);
        context
            .host
            .ensure_cgroup(&resize::with_larger(
                pod,
                &memory.resizing.actuated,
                &wished,
            ))
            .await?;
        let all = pod::containers(pod);
        let mut wanted: Vec<_> = all
            .iter()
            .filter(|(_, c)| names.contains(&c.name))
            .map(|(_, c)| c)
            .collect();
        wanted.sort_by_key(|c| resize::lowers_memory(c, &memory.resizing.actuated).is_none());
        for container in wanted {
            let Some(seen) = s.observed.newest(&container.name) else {
                continue;
            };
            if let Some(limit) = resize::lowers_memory(container, &memory.resizing.actuated) {
                let used = context
                    .runtime
                    .memory_in_use(&seen.id)
                    .await
                    .map_err(|e| e.to_string())?;
                if i128::from(used) > i128::from(limit) {
                    return Err(format!(
                        "container {} uses {used} bytes of memory, more than its new limit of {limit}",
                        container.name
                    ));
                }
            }
            let resources = cri_config::resources(pod, container, node);
            context
                .runtime
                .update_container(&seen.id, resources)
                .await
                .map_err(|e| format!("container {} cannot be resized: {e}", container.name))?;
            memory.resizing.actuated.extend(
                wished
                    .get(&container.name)
                    .map(|size| (container.name.clone(), size.clone())),
            );
        }
        context.host.ensure_cgroup(pod).await.map(|_| ())
    };
    let result = work.await;
    if result.is_ok()
        && let Some(sandbox) = s.observed.sandboxes.first()
        && let Err(error) = context
            .runtime
            .update_sandbox(&sandbox.id, cri_config::sandbox_sizes(pod, node))
            .await
        && error.kind != RuntimeErrorKind::Unimplemented
    {
        // The containers have their sizes; this only informs.
        tracing::warn!(%error, "the runtime was not told the sandbox's new size");
    }
    match &result {
        Ok(()) => {
            memory.resizing.error = None;
            s.log.close(Step::Resize, "");
        }
        Err(error) => {
            s.log.fail(Step::Resize, "", error, None);
            if memory.resizing.error.as_ref() != Some(error) {
                let message = format!("Pod resize error: {}", resize::described(pod, Some(error)));
                context
                    .events
                    .pod(pod, None, Kind::Warning, "ResizeError", message);
            }
            memory.resizing.error = Some(error.clone());
        }
    }
    result
}

/// Begins to make sure of a container's image.
fn pull(
    context: &Arc<Context>,
    pod: &Arc<Pod>,
    start: &Start,
    secrets: &Arc<[Arc<Secret>]>,
    log: &Log,
) -> Pull {
    let (context, pod, start, secrets, log) = (
        Arc::clone(context),
        Arc::clone(pod),
        start.clone(),
        Arc::clone(secrets),
        log.clone(),
    );
    let pull = async move {
        log.step(
            Step::Image,
            &start.container.name,
            image::ensure_all(&context, &pod, start.role, &start.container, &secrets),
        )
        .await
    };
    AbortOnDropHandle::new(tokio::spawn(pull.in_current_span()))
}

/// Waits for an image. While that takes long, the pod's state so far is published: that its sandbox is
/// there, and what the probes of containers that run already say.
async fn patiently(
    s: &Starting<'_>,
    desired: &Desired,
    mut pull: Pull,
    memory: &mut Memory,
    writer: &StatusWriter,
    stop: &Stop<'_>,
) -> Result<image::Pulled, image::Waiting> {
    let failed = |error: String| image::Waiting {
        reason: "ErrImagePull".into(),
        message: error,
        again: None,
    };
    let mut patience = Some(PATIENCE);
    loop {
        let hint = async {
            match patience {
                Some(time) => tokio::time::sleep(time).await,
                None => stop.hinted().await,
            }
        };
        tokio::select! {
            // In this order, so that a simulated run replays exactly.
            biased;
            // Cancel-safe: the pull goes on in its task.
            pulled = &mut pull => return pulled.map_err(|e| failed(format!("the pull ended unexpectedly: {e}")))?,
            () = hint => patience = None,
        }
        if let Ok(observed) = observe(s.context, s.pod, memory).await {
            compute_status(s.context, s.pod, &observed, memory, false);
            publish_status(desired, memory, writer);
        }
    }
}

/// Starts all containers over in their sandbox (KEP-5532): stopped at once and removed, the ones that
/// asked for it last. The next sync starts them, with their counts going on.
async fn restart_all(
    stopping: &Stopping<'_>,
    kills: &[Kill],
    memory: &mut Memory,
) -> Result<Option<Timestamp>, String> {
    let (context, observed) = (stopping.context, stopping.observed);
    let runs = |kill: &&Kill| observed.live().any(|c| c.id == kill.id);
    let stopped = futures::future::join_all(
        kills
            .iter()
            .filter(runs)
            .map(|kill| stopping.container(kill, 0)),
    )
    .await;
    stopped.into_iter().collect::<Result<Vec<_>, _>>()?;
    for kill in kills {
        let attempt = observed
            .containers
            .iter()
            .find(|c| c.id == kill.id)
            .map_or(0, |c| c.attempt);
        let count = memory.counts.entry(kill.name.clone()).or_default();
        *count = (*count).max(attempt + 1);
        memory.problems.insert(
            kill.name.clone(),
            (
                crate::core::pod::status::RESTARTING_ALL.into(),
                String::new(),
            ),
        );
        let removed = context.runtime.remove_container(&kill.id).await;
        removed.map_err(|e| {
            format!(
                "container {} cannot be removed to start over: {e}",
                kill.name
            )
        })?;
    }
    Ok(Some(context.clock.now()))
}

async fn create_sandbox(
    context: &Context,
    pod: &Pod,
    attempt: u32,
    node: &cri_config::Node<'_>,
    stop: &Stop<'_>,
) -> Result<(String, pb::PodSandboxConfig, Vec<String>), String> {
    let fail = |error: String| {
        let message = format!("Failed to create pod sandbox: {error}");
        if !stop.wanted() {
            context.events.pod(
                pod,
                None,
                Kind::Warning,
                "FailedCreatePodSandBox",
                message.clone(),
            );
        }
        message
    };
    let message = cri_config::sandbox(pod, attempt, node).map_err(fail)?;
    for (reason, warning) in dns::config(pod, node.resolver).1 {
        context
            .events
            .pod(pod, None, Kind::Warning, reason, warning);
    }
    let begun = Instant::now();
    let made = context
        .runtime
        .run_sandbox(message.clone(), &node.handler)
        .await;
    context
        .metrics
        .sandbox(&node.handler, made.is_err(), begun.elapsed());
    let id = made.map_err(|e| fail(e.to_string()))?;
    let ips = context.runtime.sandbox_ips(&id).await.map_err(|e| {
        let message = format!("Unable to get pod sandbox status: {e}");
        context.events.pod(
            pod,
            None,
            Kind::Warning,
            "FailedPodSandBoxStatus",
            message.clone(),
        );
        message
    })?;
    Ok((id, message, ips))
}

/// The crash-loop back-off, if it holds this start back.
fn held_back(
    context: &Context,
    pod: &Pod,
    start: &Start,
    last_end: Option<Timestamp>,
    backoff: &mut Backoff,
) -> Option<image::Waiting> {
    let finished = last_end?;
    let container = &start.container;
    let key = format!(
        "{}{:?}{:?}",
        container.name, container.image, container.resources
    );
    let maximum = SignedDuration::try_from(context.config.max_backoff)
        .unwrap_or(crate::core::backoff::MAXIMUM);
    let held = backoff
        .start(&key, finished, context.clock.now(), maximum)
        .err()?;
    let who = format!("{} in pod {}", container.name, pod::described(pod));
    context.events.pod(
        pod,
        Some(start.role.field_path(&container.name)),
        Kind::Warning,
        "BackOff",
        format!("Back-off restarting failed container {who}"),
    );
    let shown = time::shown(Duration::try_from(held.delay).unwrap_or_default());
    let message = format!(
        "back-off {shown} restarting failed container={} pod={}",
        container.name,
        pod::described(pod)
    );
    Some(image::Waiting {
        reason: "CrashLoopBackOff".into(),
        message,
        again: Some(held.until),
    })
}
