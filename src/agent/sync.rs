//! The pod sync in ten named steps (kubelet spec, 3.1 and 3.2), and the two that end a pod.
//!
//! 1 startup latency, 2 API status, 3 status manager, 4 admission (in the worker, before the first sync),
//! 5 pod cgroup, 6 mirror pod, 7 data directories, 8 volumes, 9 pull secrets, 10 runtime sync. The
//! sandbox of step 10 is made while volumes and secrets are fetched: neither needs the other.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use holdfast_proto::cri as pb;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod, PodStatus, Secret, VolumeMount};
use kube::ResourceExt as _;
use tokio::time::Instant;

use super::objects::{self, Fetched};
use super::status::StatusWriter;
use super::worker::{Desired, Stop};
use super::{Context, Kind, Network, images, mirror};
use crate::core::actions::{self, Kill, PodActions, Start};
use crate::core::backoff::Backoff;
use crate::core::env::{self, Surroundings};
use crate::core::lifecycle::{Cause, Input};
use crate::core::observed::{ContainerState, ObservedPod};
use crate::core::pod::{self, Role};
use crate::core::status::{self, Facts, Problems};
use crate::core::{config, dns, volumes};
use crate::cri::RuntimeErrorKind;
use crate::kubeapi::pods::{Token, TokenFor};

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
    tokens: BTreeMap<(String, String), Token>,
    first_seen: Timestamp,
    /// Volumes were set up, and refreshed at this time.
    volumes_at: Option<Instant>,
    ran: bool,
}

impl Memory {
    /// For a pod first seen at `now`.
    #[must_use]
    pub fn new(now: Timestamp) -> Memory {
        Memory {
            status: PodStatus::default(),
            fingerprint: 0,
            adopted: false,
            problems: Problems::new(),
            backoff: Backoff::default(),
            tokens: BTreeMap::new(),
            first_seen: now,
            volumes_at: None,
            ran: false,
        }
    }

    /// Hands the newest status to the writer, to be on `object`.
    pub fn report(&self, object: Option<Arc<Pod>>, writer: &StatusWriter) {
        writer.want(object, self.status.clone());
    }

    /// Takes over what the API says, once: after a restart, times and counts go on from there. A static
    /// pod's mirror may be seen only after its worker has begun.
    pub fn adopt(&mut self, object: Option<&Pod>) {
        let known = object.and_then(|o| o.status.clone()).filter(|s| !self.adopted && s.conditions.is_some());
        if let Some(status) = known {
            self.ran |= status.phase.as_deref().is_some_and(|p| p != "Pending");
            self.status = status;
            self.adopted = true;
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
    let mut observed = context.runtime.observe(pod::uid(pod)).await.map_err(|e| format!("the runtime cannot be asked about the pod: {e}"))?;
    memory.fingerprint = observed.fingerprint();
    for container in observed.containers.iter_mut().filter(|c| c.state == ContainerState::Exited) {
        if let Some(text) = context.host.termination_message(pod::uid(pod), &container.name, container.attempt).await {
            container.message = if container.message.is_empty() { text } else { format!("{}: {text}", container.message) };
        }
    }
    Ok(observed)
}

/// Step 1: how long the start took, noted at the first sight of the pod running.
fn record_startup_latency(context: &Context, memory: &mut Memory) {
    if !memory.ran && memory.status.phase.as_deref() == Some("Running") {
        memory.ran = true;
        context.latency.record(context.clock.now().duration_since(memory.first_seen).as_secs_f64());
    }
}

/// Step 2: the API status from what the runtime has.
fn compute_status(context: &Context, pod: &Pod, observed: &ObservedPod, memory: &mut Memory, ended: bool) {
    let facts =
        Facts { pod, observed, previous: &memory.status, problems: &memory.problems, node_ips: &context.node_ips, ended, now: context.clock.now() };
    memory.status = status::compute(&facts);
}

/// Step 3: hands the status to the status writer.
fn publish_status(desired: &Desired, memory: &Memory, writer: &StatusWriter) {
    memory.report(desired.object.clone(), writer);
}

/// Step 5: the pod's cgroup with its limits.
async fn ensure_cgroup(context: &Context, pod: &Pod) -> Result<String, String> {
    context.host.ensure_cgroup(pod).await.map_err(|error| {
        let message = format!("unable to ensure pod container exists: {error}");
        context.events.pod(pod, None, Kind::Warning, "FailedCreatePodContainer", message.clone());
        message
    })
}

/// Step 6: a static pod's mirror in the API. The answer is when to look again, if it is not there yet.
async fn reconcile_mirror(context: &Context, desired: &Desired) -> Option<Timestamp> {
    if !pod::is_static(&desired.pod) || context.config.kubeconfig.is_none() {
        return None;
    }
    let soon = context.clock.now() + SignedDuration::from_millis(200);
    match mirror::reconcile(context, &desired.pod, desired.object.as_ref()).await {
        Ok(true) => None,
        Ok(false) => Some(soon),
        Err(error) => {
            tracing::warn!(%error, pod = %pod::full_name(&desired.pod), "the static pod runs without a mirror for now");
            Some(soon + SignedDuration::from_secs(5))
        }
    }
}

/// Step 7: the pod's directories.
async fn make_directories(context: &Context, pod: &Pod) -> Result<(), String> {
    context.host.make_directories(pod).await.map_err(|error| {
        let message = format!("error making pod data directories: {error}");
        context.events.pod(pod, None, Kind::Warning, "Failed", message.clone());
        message
    })
}

/// Step 8: the pod's volumes. Also fetches what the environment refers to.
async fn set_up_volumes(context: &Context, pod: &Pod, pod_ips: &[String], tokens: &mut BTreeMap<(String, String), Token>) -> Result<Fetched, String> {
    let fetched = objects::fetch(&*context.api, pod).await?;
    let allocatable = context.allocatable();
    let around = Surroundings { pod, pod_ips, node_ips: &context.node_ips, allocatable: &allocatable };
    for volume in pod::spec(pod).volumes.iter().flatten() {
        let result = async {
            if let Some(why) = volumes::unsupported(volume) {
                return Err(why);
            }
            let mut issued = BTreeMap::new();
            for wish in volumes::tokens(volume) {
                let key = (wish.volume.clone(), wish.path.clone());
                let now = context.clock.now();
                let fresh = tokens.get(&key).is_some_and(|t| t.expires.duration_since(now) > SignedDuration::from_secs(wish.seconds / 5));
                if !fresh {
                    let token = context.api.token(TokenFor { pod, audience: &wish.audience, seconds: wish.seconds }).await;
                    tokens.insert(key.clone(), token.map_err(|e| format!("failed to fetch token: {e}"))?);
                }
                issued.extend(tokens.get(&key).map(|t| (wish.path.clone(), t.text.clone())));
            }
            let files = volumes::files(volume, &around, &fetched, &issued).transpose()?;
            context.host.set_up_volume(pod, volume, files).await
        };
        result.await.map_err(|error| {
            let message = format!("MountVolume.SetUp failed for volume {:?} : {error}", volume.name);
            context.events.pod(pod, None, Kind::Warning, "FailedMount", message.clone());
            message
        })?;
    }
    Ok(fetched)
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
        let message = format!("Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.", missing.join(", "));
        context.events.pod(pod, None, Kind::Warning, "FailedToRetrieveImagePullSecret", message);
    }
    found
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
    let observed = observe(context, pod, memory).await?;
    compute_status(context, pod, &observed, memory, false);
    record_startup_latency(context, memory);
    publish_status(desired, memory, writer);
    if matches!(memory.status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return Ok(Outcome::Next(Input::Ended(Cause::Completed)));
    }
    let known = memory.status.container_statuses.clone().unwrap_or_default();
    let restarts = |name: &str| known.iter().find(|s| s.name == name).and_then(|s| u32::try_from(s.restart_count).ok()).unwrap_or(0);
    let actions = actions::compute(pod, &observed, restarts);
    if actions.give_up {
        return Ok(Outcome::Next(Input::Ended(Cause::Completed)));
    }
    let refresh = memory.volumes_at.is_some_and(|at| at.elapsed() >= context.config.sync_frequency);
    if actions.is_empty() && !refresh {
        memory.problems.clear();
        memory.volumes_at.get_or_insert_with(Instant::now);
        let again = reconcile_mirror(context, desired).await;
        return Ok(Outcome::Wait(Some(at(context, again))));
    }
    if !pod::host_network(pod) && actions.create_sandbox.is_some() {
        let network = context.network.borrow().clone();
        match network {
            Network::Ready => {}
            // The node's loop asks as its first act: this is no news to anybody.
            Network::Unasked => return Ok(Outcome::Wait(Some(Instant::now() + Duration::from_millis(20)))),
            Network::NotReady(why) => {
                context.events.pod(pod, None, Kind::Warning, "NetworkNotReady", format!("network is not ready: {why}"));
                return Ok(Outcome::Wait(Some(Instant::now() + Duration::from_secs(1))));
            }
        }
    }
    let cgroup_parent = ensure_cgroup(context, pod).await?;
    let mirror_again = reconcile_mirror(context, desired).await;
    make_directories(context, pod).await?;
    let node = config::Node {
        resolver: &context.resolver,
        cgroup_parent,
        log_directory: context.host.log_directory(pod).display().to_string(),
        seccomp_root: context.config.root_dir.join("seccomp").display().to_string(),
        seccomp_default: context.config.seccomp_default,
        memory: context.machine.memory,
    };
    let again = runtime_sync(context, desired, &observed, actions, memory, &node, stop).await;
    stop.forget_hint();
    let observed = observe(context, pod, memory).await?;
    compute_status(context, pod, &observed, memory, false);
    record_startup_latency(context, memory);
    publish_status(desired, memory, writer);
    let again = again?.into_iter().chain(mirror_again).min();
    Ok(Outcome::Wait(Some(at(context, again))))
}

/// When to sync again: at the given time, at the latest after the sync frequency.
fn at(context: &Context, again: Option<Timestamp>) -> Instant {
    let wait = again.map_or(context.config.sync_frequency, |time| {
        let left = Duration::try_from(time.duration_since(context.clock.now())).unwrap_or_default();
        left.clamp(Duration::from_millis(10), context.config.sync_frequency)
    });
    Instant::now() + wait
}

/// Step 10: sandbox changes, kills, then ephemeral, init and normal containers in the plan's order. The
/// answer is when to try again what was held back.
async fn runtime_sync(
    context: &Arc<Context>,
    desired: &Desired,
    observed: &ObservedPod,
    actions: PodActions,
    memory: &mut Memory,
    node: &config::Node<'_>,
    stop: &Stop<'_>,
) -> Result<Option<Timestamp>, String> {
    let pod = &desired.pod;
    if actions.kill_pod {
        if actions.create_sandbox.is_some() {
            context.events.pod(pod, None, Kind::Normal, "SandboxChanged", "Pod sandbox changed, it will be killed and re-created.");
        }
        kill_pod(context, pod, observed, pod::grace_seconds(pod)).await?;
    }
    for kill in &actions.kill {
        kill_container(context, pod, kill, pod::grace_seconds(pod)).await?;
    }
    if stop.wanted() || (actions.start.is_empty() && actions.create_sandbox.is_none() && memory.volumes_at.is_none()) {
        return Ok(None);
    }
    let known_ips: Vec<String> = observed.sandboxes.first().map(|s| s.ips.clone()).unwrap_or_default();
    let mut sandbox_message = None;
    let make_sandbox = async {
        match (actions.create_sandbox, &actions.sandbox) {
            (Some(attempt), _) => create_sandbox(context, pod, attempt, node, stop).await.map(|(id, config, ips)| {
                sandbox_message = Some(config);
                (id, ips)
            }),
            (None, Some(id)) => Ok((id.clone(), known_ips.clone())),
            (None, None) => Err("there is no sandbox to use".into()),
        }
    };
    let tokens = &mut memory.tokens;
    let prepare = async { tokio::join!(set_up_volumes(context, pod, &known_ips, tokens), pull_secrets(context, pod)) };
    let (sandbox, (fetched, secrets)) = tokio::join!(make_sandbox, prepare);
    let (sandbox, ips) = sandbox?;
    let fetched = fetched?;
    memory.volumes_at = Some(Instant::now());
    let attempt = observed.sandboxes.iter().find(|s| s.id == sandbox).map_or(0, |s| s.attempt);
    let sandbox_config = match sandbox_message {
        Some(config) => config,
        None => config::sandbox(pod, attempt, node)?,
    };
    let ips = if pod::host_network(pod) { context.node_ips.clone() } else { ips };
    let starting =
        Starting { context, pod, sandbox: &sandbox, sandbox_config: &sandbox_config, ips: &ips, node, fetched: &fetched, secrets: &secrets };
    let mut again: Option<Timestamp> = None;
    for start in &actions.start {
        if stop.wanted() {
            break;
        }
        let name = start.container.name.clone();
        let last_end = observed.newest(&name).filter(|c| c.state == ContainerState::Exited).map(|c| c.finished_at.unwrap_or(c.created_at));
        let result = match held_back(context, pod, start, last_end, &mut memory.backoff) {
            Some(waiting) => Err(waiting),
            None => tokio::select! {
                // Dropping a start is safe: what was created is found by the next observation.
                result = start_container(&starting, start) => result,
                () = stop.when_wanted(), if start.role != Role::Ephemeral => break,
            },
        };
        match result {
            Ok(()) => _ = memory.problems.remove(&name),
            Err(waiting) => {
                let at = waiting.again.unwrap_or_else(|| context.clock.now() + SignedDuration::from_secs(10));
                again = Some(again.map_or(at, |a| a.min(at)));
                memory.problems.insert(name, (waiting.reason, waiting.message));
                if start.role == Role::Init {
                    break;
                }
            }
        }
    }
    Ok(again)
}

async fn create_sandbox(
    context: &Context,
    pod: &Pod,
    attempt: u32,
    node: &config::Node<'_>,
    stop: &Stop<'_>,
) -> Result<(String, pb::PodSandboxConfig, Vec<String>), String> {
    let fail = |error: String| {
        let message = format!("Failed to create pod sandbox: {error}");
        if !stop.wanted() {
            context.events.pod(pod, None, Kind::Warning, "FailedCreatePodSandBox", message.clone());
        }
        message
    };
    let message = config::sandbox(pod, attempt, node).map_err(fail)?;
    let handler = pod::spec(pod).runtime_class_name.clone().unwrap_or_default();
    if !handler.is_empty() {
        return Err(fail(format!("RuntimeClass {handler:?} not found: this version does not serve runtime classes")));
    }
    let id = context.runtime.run_sandbox(message.clone(), &handler).await.map_err(|e| fail(e.to_string()))?;
    let ips = context.runtime.sandbox_ips(&id).await.map_err(|e| {
        let message = format!("Unable to get pod sandbox status: {e}");
        context.events.pod(pod, None, Kind::Warning, "FailedPodSandBoxStatus", message.clone());
        message
    })?;
    Ok((id, message, ips))
}

/// The crash-loop back-off, if it holds this start back.
fn held_back(context: &Context, pod: &Pod, start: &Start, last_end: Option<Timestamp>, backoff: &mut Backoff) -> Option<images::Waiting> {
    let finished = last_end?;
    let container = &start.container;
    let key = format!("{}{:?}{:?}", container.name, container.image, container.resources);
    let maximum = SignedDuration::try_from(context.config.max_backoff).unwrap_or(crate::core::backoff::MAXIMUM);
    let held = backoff.start(&key, finished, context.clock.now(), maximum).err()?;
    let who = format!("{} in pod {}", container.name, pod::described(pod));
    context.events.pod(pod, path(start), Kind::Warning, "BackOff", format!("Back-off restarting failed container {who}"));
    let seconds = held.delay.as_secs();
    let shown = if seconds >= 60 { format!("{}m{}s", seconds / 60, seconds % 60) } else { format!("{seconds}s") };
    let message = format!("back-off {shown} restarting failed container={} pod={}", container.name, pod::described(pod));
    Some(images::Waiting { reason: "CrashLoopBackOff".into(), message, again: Some(held.until) })
}

fn path(start: &Start) -> Option<String> {
    Some(start.role.field_path(&start.container.name))
}

struct Starting<'a> {
    context: &'a Context,
    pod: &'a Pod,
    sandbox: &'a str,
    sandbox_config: &'a pb::PodSandboxConfig,
    ips: &'a [String],
    node: &'a config::Node<'a>,
    fetched: &'a Fetched,
    secrets: &'a [Arc<Secret>],
}

async fn start_container(s: &Starting<'_>, start: &Start) -> Result<(), images::Waiting> {
    let image = images::ensure(s.context, s.pod, start.role, &start.container, s.secrets).await?;
    let refuse = |reason: &str, error: String| {
        s.context.events.pod(s.pod, path(start), Kind::Warning, "Failed", format!("Error: {error}"));
        images::Waiting { reason: reason.into(), message: error, again: None }
    };
    let config = container_config(s, start, &image).await.map_err(|e| refuse("CreateContainerConfigError", e))?;
    let id = match s.context.runtime.create_container(s.sandbox, config.clone(), s.sandbox_config.clone()).await {
        Ok(id) => id,
        // The outcome is unknown: what was made under this name is looked up and used.
        Err(error) if error.kind == RuntimeErrorKind::Timeout => {
            let observed = s.context.runtime.observe(pod::uid(s.pod)).await.map_err(|e| refuse("CreateContainerError", e.to_string()))?;
            let made = observed.newest(&start.container.name).filter(|c| c.attempt == start.attempt && c.state == ContainerState::Created);
            made.map(|c| c.id.clone()).ok_or_else(|| refuse("CreateContainerError", error.to_string()))?
        }
        Err(error) => return Err(refuse("CreateContainerError", error.to_string())),
    };
    s.context.events.pod(s.pod, path(start), Kind::Normal, "Created", "Container created");
    s.context.runtime.start_container(&id).await.map_err(|e| refuse("RunContainerError", e.to_string()))?;
    s.context.events.pod(s.pod, path(start), Kind::Normal, "Started", "Container started");
    Ok(())
}

async fn container_config(s: &Starting<'_>, start: &Start, image: &crate::cri::Image) -> Result<pb::ContainerConfig, String> {
    let container = &start.container;
    let pod_spec = pod::spec(s.pod);
    let services = match s.context.api.services() {
        Some(services) => env::of_services(&services, &s.pod.namespace().unwrap_or_default(), pod_spec.enable_service_links != Some(false)),
        None if pod::is_static(s.pod) => BTreeMap::new(),
        None => return Err("services have not yet been read at least once, cannot construct envvars".into()),
    };
    let allocatable = s.context.allocatable();
    let around = Surroundings { pod: s.pod, pod_ips: s.ips, node_ips: &s.context.node_ips, allocatable: &allocatable };
    let env = env::build(container, &around, &services, s.fetched)?;
    let mounts = mounts(s, container, start.attempt, &env).await?;
    let image_user = (image.uid, image.username.clone());
    config::container(s.pod, container, config::Prepared { attempt: start.attempt, image: &image.id, image_user, env, mounts }, s.node)
}

async fn mounts(s: &Starting<'_>, container: &Container, attempt: u32, env: &[(String, String)]) -> Result<Vec<pb::Mount>, String> {
    let pod_spec = pod::spec(s.pod);
    let mut mounts = Vec::new();
    for mount in container.volume_mounts.iter().flatten() {
        let volume = pod_spec
            .volumes
            .iter()
            .flatten()
            .find(|v| v.name == mount.name)
            .ok_or_else(|| format!("volume {:?} of a volumeMount does not exist", mount.name))?;
        let mut resolved: VolumeMount = mount.clone();
        if let Some(expression) = mount.sub_path_expr.as_ref().filter(|e| !e.is_empty()) {
            let text = env::expand(expression, |name| env.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone()));
            if text.contains("$(") {
                return Err(format!("subPathExpr {expression:?} names a variable that is not set: missing value for {text}"));
            }
            resolved.sub_path = Some(text);
        }
        let host_path = s.context.host.mount_source(s.pod, volume, &resolved).await?;
        mounts.push(pb::Mount {
            container_path: mount.mount_path.clone(),
            host_path: host_path.display().to_string(),
            readonly: mount.read_only.unwrap_or(false),
            propagation: match mount.mount_propagation.as_deref() {
                Some("HostToContainer") => pb::MountPropagation::PropagationHostToContainer,
                Some("Bidirectional") => pb::MountPropagation::PropagationBidirectional,
                _ => pb::MountPropagation::PropagationPrivate,
            } as i32,
            ..pb::Mount::default()
        });
    }
    let taken = |path: &str, mounts: &[pb::Mount]| mounts.iter().any(|m| m.container_path == path);
    if !taken("/etc/hosts", &mounts) && (!s.ips.is_empty() || pod::host_network(s.pod)) {
        let text = dns::hosts_file(s.pod, s.ips, &s.context.resolver.cluster_domain, &s.context.host.node_hosts().await);
        let path = s.context.host.write_hosts(s.pod, text).await?;
        mounts.push(pb::Mount { container_path: "/etc/hosts".into(), host_path: path.display().to_string(), ..pb::Mount::default() });
    }
    if let Some(path) = container.termination_message_path.as_ref().filter(|p| !p.is_empty()) {
        let file = s.context.host.termination_log(s.pod, &container.name, attempt).await?;
        mounts.push(pb::Mount { container_path: path.clone(), host_path: file.display().to_string(), ..pb::Mount::default() });
    }
    Ok(mounts)
}

async fn kill_container(context: &Context, pod: &Pod, kill: &Kill, grace: i64) -> Result<(), String> {
    let role = pod::containers(pod).into_iter().find(|(_, c)| c.name == kill.name).map_or(Role::Regular, |(r, _)| r);
    context.events.pod(pod, Some(role.field_path(&kill.name)), Kind::Normal, "Killing", kill.message.clone());
    context.runtime.stop_container(&kill.id, grace).await.map_err(|e| format!("container {} cannot be stopped: {e}", kill.name))
}

/// Stops all containers at once, sidecars after the others and in reverse order, then every sandbox.
async fn kill_pod(context: &Context, pod: &Pod, observed: &ObservedPod, grace: i64) -> Result<(), String> {
    let roles = pod::containers(pod);
    let is_sidecar = |name: &str| roles.iter().any(|(r, c)| *r == Role::Sidecar && c.name == name);
    let started = Instant::now();
    let kill =
        |c: &crate::core::observed::Container| Kill { id: c.id.clone(), name: c.name.clone(), message: format!("Stopping container {}", c.name) };
    let (sidecars, others): (Vec<Kill>, Vec<Kill>) = observed.live().map(kill).partition(|k| is_sidecar(&k.name));
    let results = futures::future::join_all(others.iter().map(|k| kill_container(context, pod, k, grace))).await;
    results.into_iter().collect::<Result<Vec<_>, _>>()?;
    let order = |name: &str| roles.iter().position(|(_, c)| c.name == name);
    let mut sidecars = sidecars;
    sidecars.sort_by_key(|k| std::cmp::Reverse(order(&k.name)));
    for sidecar in &sidecars {
        let left = grace.saturating_sub(i64::try_from(started.elapsed().as_secs()).unwrap_or(grace)).max(2);
        kill_container(context, pod, sidecar, left).await?;
    }
    for sandbox in &observed.sandboxes {
        context.runtime.stop_sandbox(&sandbox.id).await.map_err(|e| format!("the sandbox {} cannot be stopped: {e}", sandbox.id))?;
    }
    Ok(())
}

/// Ends all containers; returns when none is seen running any more.
pub async fn terminate(
    context: &Arc<Context>,
    desired: &Desired,
    memory: &mut Memory,
    writer: &StatusWriter,
    grace: i64,
    cause: Cause,
) -> Result<(), String> {
    let pod = &desired.pod;
    let observed = observe(context, pod, memory).await?;
    // The status that led here is published before the work starts.
    publish_status(desired, memory, writer);
    kill_pod(context, pod, &observed, grace).await.map_err(|error| {
        context.events.pod(pod, None, Kind::Warning, "FailedKillPod", format!("error killing pod: {error}"));
        error
    })?;
    let observed = observe(context, pod, memory).await?;
    if let Some(running) = observed.live().next() {
        return Err(format!("container {} still runs after it was stopped", running.name));
    }
    tracing::debug!(?cause, pod = %pod::full_name(pod), "all containers have ended");
    memory.problems.clear();
    compute_status(context, pod, &observed, memory, true);
    publish_status(desired, memory, writer);
    Ok(())
}

/// Gives back what the pod held: volumes, cgroup and, for a pod that leaves, everything else.
pub async fn release(context: &Arc<Context>, desired: &Desired, memory: &mut Memory, cause: Cause) -> Result<(), String> {
    let pod = &desired.pod;
    let uid = pod::uid(pod);
    if cause.removes_content() {
        let observed = observe(context, pod, memory).await?;
        let removals = observed.sandboxes.iter().map(|s| context.runtime.remove_sandbox(&s.id));
        for removed in futures::future::join_all(removals).await {
            removed.map_err(|e| format!("the sandbox cannot be removed: {e}"))?;
        }
        let orphans = observed.containers.iter().filter(|c| !observed.sandboxes.iter().any(|s| s.id == c.sandbox));
        for container in orphans {
            context.runtime.remove_container(&container.id).await.map_err(|e| format!("container {} cannot be removed: {e}", container.name))?;
        }
        memory.fingerprint = 0;
    }
    context.host.tear_down_volumes(uid).await?;
    context.host.remove_cgroup(pod).await?;
    if cause.removes_content() {
        context.host.remove_directories(pod).await?;
    }
    Ok(())
}
