//! Starts one container: builds its CRI message, creates it, starts it and runs its
//! postStart hook (upstream's `startContainer`).

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use holdfast_proto::cri as pb;
use k8s_openapi::api::core::v1::{Container, Pod, VolumeMount};
use kube::ResourceExt as _;
use tokio::sync::{oneshot, watch};
use tracing::Instrument as _;

use super::{Job, Result, hook_address, hooks};
use crate::events::Kind;
use crate::image::{Pulled, Waiting};
use crate::node::DeviceManager;
use crate::pod::journal::Log;
use crate::volume::csi::Csi;
use crate::volume::objects::Fetched;
use holdfast_config::Config;
use holdfast_core::fault::Fault;
use holdfast_core::node::claims::has_claims;
use holdfast_core::pod::actions::Start;
use holdfast_core::pod::env::{self, FieldContext};
use holdfast_core::pod::journal::Step;
use holdfast_core::pod::observed::{self, ContainerState, ObservedPod};
use holdfast_core::pod::resources::Amounts;
use holdfast_core::pod::worker::Outcome;
use holdfast_core::pod::{self, Role};
use holdfast_core::pod::{cri_config, dns};
use holdfast_core::volume::resolved::Source;
use holdfast_cri::{RuntimeError, RuntimeErrorKind};
use holdfast_host::SubPath;
use holdfast_sys::machine::Machine;

/// Maximum time to wait for the runtime to complete a cancelled start.
const CANCELLED_START_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for reading the status of a container that was just started.
/// Afterwards the worker observes the whole pod instead.
const STARTED_STATUS_TIMEOUT: Duration = Duration::from_secs(2);

/// What only the start of containers uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub machine: Arc<Machine>,
    /// The resources that pods may use on this node.
    pub allocatable: Amounts,
    pub node_ips: watch::Sender<Vec<String>>,
    pub devices: Arc<DeviceManager>,
    pub csi: Arc<Csi>,
}

/// The sandbox of a container.
pub(super) struct TargetSandbox<'a> {
    /// The runtime's id of the sandbox.
    pub sandbox: &'a str,
    /// How many sandboxes the pod had before.
    pub attempt: u32,
    /// The sandbox's addresses; empty on the host network.
    pub ips: &'a [String],
}

/// Converts a waiting reason to an outcome.
pub(super) fn waiting(waiting: Waiting) -> Outcome {
    Outcome::Waiting {
        reason: waiting.reason,
        message: waiting.message,
        until: waiting.again,
        class: waiting.class,
    }
}

impl Job {
    /// Creates and starts one container whose images and volumes are ready, and runs its postStart hook.
    pub(super) async fn start(&self, start: &Start, place: &TargetSandbox<'_>) -> Result<Outcome> {
        let name = &start.container.name;
        let missing = |what: &str| Fault::later(format!("container {name} has no {what} yet"));
        let pulled = self.assets.pulled.get(name).ok_or(missing("image"))?;
        let fetched = self.assets.fetched.as_ref().ok_or(missing("volumes"))?;
        let node = self.node().await?;
        let made = match &self.assets.sandbox {
            Some((id, config)) if id == place.sandbox => Some(pb::PodSandboxConfig::clone(config)),
            _ => None,
        };
        let config = match made {
            Some(config) => config,
            None => cri_config::sandbox(&self.pod, place.attempt, &node)?,
        };
        let parts = self.parts();
        let node_ips = parts.containers.node_ips.borrow().clone();
        let ips = if pod::host_network(&self.pod) {
            &node_ips
        } else {
            place.ips
        };
        let starting = Starting {
            job: self,
            parts,
            pod: &self.pod,
            sandbox: place.sandbox,
            sandbox_config: &config,
            ips,
            node: &node,
            fetched,
            log: self.log(),
            observed: &self.observed,
        };
        let begun = start_container(&starting, start, pulled)
            .await
            .map_err(waiting)?;
        let id = begun.id;
        if let Err(message) = begun.hook {
            return Ok(Outcome::HookFailed { id, message });
        }
        self.log().close(Step::BackOff, name);
        let seen = self.read_started(&id, place.sandbox).await;
        Ok(Outcome::Started { id, seen })
    }

    /// Reads the status of a container that was just started. On failure returns `None`; the worker then
    /// observes the whole pod and reports the error.
    async fn read_started(&self, id: &str, sandbox: &str) -> Option<Box<observed::Container>> {
        let ask = self.parts().runtime.container(id, sandbox);
        match tokio::time::timeout(STARTED_STATUS_TIMEOUT, ask).await {
            Ok(Ok(container)) => container.map(Box::new),
            Ok(Err(error)) => {
                tracing::debug!(%error, id, "cannot read the status of a started container");
                None
            }
            Err(_) => None,
        }
    }

    /// Starts a container. The call continues if the operation is cancelled: when a client cancels this call,
    /// containerd 2 leaks a shim and keeps the container busy for seconds.
    async fn start_uncancelled(&self, id: &str) -> std::result::Result<(), Fault> {
        let (runtime, id) = (Arc::clone(&self.parts().runtime), id.to_owned());
        let call = async move { runtime.start_container(&id).await };
        let started = self.tools.starts.spawn(call.in_current_span()).await;
        // The task is never aborted and a panic terminates the process, so this fails only during exit.
        let answer = started.map_err(|e| Fault::later(e.to_string()))?;
        answer.map_err(RuntimeError::without_code)
    }

    /// Creates a container. If the operation is cancelled, the call continues for [`CANCELLED_START_TIMEOUT`]: a runtime
    /// whose call is cancelled may create the container after the worker's last observation of the pod.
    async fn create_uncancelled(
        &self,
        sandbox: &str,
        config: pb::ContainerConfig,
        sandbox_config: pb::PodSandboxConfig,
    ) -> std::result::Result<std::result::Result<String, RuntimeError>, Fault> {
        let (runtime, sandbox) = (Arc::clone(&self.parts().runtime), sandbox.to_owned());
        let (mut answer, created) = oneshot::channel();
        let call = async move {
            tokio::select! {
                // The order is fixed, so that a simulated run replays exactly.
                biased;
                done = runtime.create_container(&sandbox, config, sandbox_config) => {
                    // A cancelled operation does not receive the answer; the worker observes the container instead.
                    let _ = answer.send(done);
                }
                () = async {
                    answer.closed().await;
                    tokio::time::sleep(CANCELLED_START_TIMEOUT).await;
                } => {}
            }
        };
        self.tools.starts.spawn(call.in_current_span());
        // The sender is dropped without an answer only if this operation is cancelled, or the process exits.
        created.await.map_err(|e| Fault::later(e.to_string()))
    }

    /// Waits for the calls of cancelled starts, at most [`CANCELLED_START_TIMEOUT`].
    pub(super) async fn wait_for_cancelled_starts(&self) {
        let settled = self.tools.starts.wait();
        if tokio::time::timeout(CANCELLED_START_TIMEOUT, settled)
            .await
            .is_err()
        {
            tracing::warn!("the runtime is still starting a container that is no longer needed");
        }
    }
}

/// The inputs shared by the steps of a start.
struct Starting<'a> {
    job: &'a Job,
    parts: &'a super::Parts,
    pod: &'a Pod,
    sandbox: &'a str,
    sandbox_config: &'a pb::PodSandboxConfig,
    ips: &'a [String],
    node: &'a cri_config::Node,
    fetched: &'a Fetched,
    log: &'a Log,
    observed: &'a ObservedPod,
}

impl Starting<'_> {
    fn emit_event(&self, start: &Start, kind: Kind, reason: &str, message: impl Into<String>) {
        self.parts.events.pod(
            self.pod,
            Some(start.role.field_path(&start.container.name)),
            kind,
            reason,
            message,
        );
    }

    fn emit_failure(&self, start: &Start, reason: &str, fault: Fault) -> Waiting {
        self.emit_event(start, Kind::Warning, "Failed", format!("Error: {fault}"));
        Waiting::new(reason, fault)
    }
}

/// A result whose error is a container's waiting reason.
type Started<T> = std::result::Result<T, Waiting>;

/// A started container.
struct StartedContainer {
    id: String,
    /// The result of its postStart hook.
    hook: std::result::Result<(), String>,
}

async fn start_container(
    s: &Starting<'_>,
    start: &Start,
    images: &Pulled,
) -> Started<StartedContainer> {
    let result = begin_container(s, start, images).await;
    let failure = match &result {
        Ok(begun) => begun.hook.as_ref().err().map(|_| "PostStartHookError"),
        Err(waiting) => Some(waiting.reason.as_str()),
    };
    let kind = match start.role {
        Role::Regular => "container",
        Role::Init | Role::Sidecar => "init_container",
        Role::Ephemeral => "ephemeral_container",
    };
    s.parts.metrics.container_started(kind, failure);
    result
}

async fn begin_container(
    s: &Starting<'_>,
    start: &Start,
    images: &Pulled,
) -> Started<StartedContainer> {
    let name = &start.container.name;
    let id = s
        .log
        .step(Step::Create, name, create_container(s, start, images))
        .await?;
    s.emit_event(start, Kind::Normal, "Created", "Container created");
    let begin = async {
        let started = s.job.start_uncancelled(&id).await;
        started.map_err(|e| s.emit_failure(start, "RunContainerError", e))
    };
    s.log.step(Step::Start, name, begin).await?;
    s.emit_event(start, Kind::Normal, "Started", "Container started");
    if let Err(error) = s.parts.host.link_log(s.pod, name, start.attempt, &id).await {
        tracing::warn!(
            %error,
            container = name,
            "linking the container's log failed: log collectors will not find it"
        );
    }
    let lifecycle = start.container.lifecycle.as_ref();
    let hook = match lifecycle.and_then(|l| l.post_start.as_ref()) {
        None => Ok(()),
        Some(handler) => post_start(s, start, &id, handler).await,
    };
    Ok(StartedContainer { id, hook })
}

async fn create_container(
    s: &Starting<'_>,
    start: &Start,
    images: &Pulled,
) -> std::result::Result<String, Waiting> {
    let config = container_config(s, start, images)
        .await
        .map_err(|e| s.emit_failure(start, "CreateContainerConfigError", e))?;
    let failed = |fault: Fault| s.emit_failure(start, "CreateContainerError", fault);
    if let Some(old) = &start.replaces {
        let removed = s.parts.runtime.remove_container(old).await;
        removed.map_err(|e| {
            failed(
                Fault::from(e).context("an earlier instance that never started cannot be removed"),
            )
        })?;
    }
    let (metrics, image_volumes) = (&s.parts.metrics, images.volumes.len() as u64);
    metrics.image_volumes(image_volumes);
    let call = s
        .job
        .create_uncancelled(s.sandbox, config, s.sandbox_config.clone());
    match call.await.map_err(failed)? {
        Ok(id) => {
            metrics.image_volumes_mounted(image_volumes);
            Ok(id)
        }
        // The outcome is unknown: use the container if the runtime has created it.
        Err(error) if error.kind == RuntimeErrorKind::Timeout => {
            let observed = s
                .parts
                .runtime
                .observe(pod::uid(s.pod))
                .await
                .map_err(|e| failed(e.into()))?;
            let made = observed
                .newest(&start.container.name)
                .filter(|c| c.attempt == start.attempt && c.state == ContainerState::Created);
            made.map(|c| c.id.clone())
                .ok_or_else(|| failed(error.into()))
        }
        Err(error) => Err(failed(error.without_code())),
    }
}

/// Runs the postStart hook and emits an event if it fails. The worker plans the stop of the container.
async fn post_start(
    s: &Starting<'_>,
    start: &Start,
    id: &str,
    handler: &k8s_openapi::api::core::v1::LifecycleHandler,
) -> std::result::Result<(), String> {
    let ip = hook_address(s.pod, s.ips);
    let run = hooks::run(&s.parts.hooks, s.pod, &start.container, handler, id, ip);
    let ran = s
        .log
        .step(Step::PostStart, &start.container.name, run)
        .await;
    if ran.is_err() {
        s.emit_event(
            start,
            Kind::Warning,
            "FailedPostStartHook",
            "PostStartHook failed",
        );
    }
    ran
}

/// Builds the environment: services, references, and files of volumes.
async fn environment(
    s: &Starting<'_>,
    container: &Container,
) -> std::result::Result<Vec<(String, Vec<u8>)>, Fault> {
    let services = match s.parts.api.services() {
        Some(services) => env::of_services(
            &services,
            &s.pod.namespace().unwrap_or_default(),
            pod::spec(s.pod).enable_service_links != Some(false),
        ),
        None if pod::is_static(s.pod) => BTreeMap::new(),
        None => {
            return Err(Fault::later(
                "services have not yet been read at least once, cannot construct envvars",
            ));
        }
    };
    let mut files = env::Files::new();
    for (volume, path) in env::file_references(container) {
        let found = s
            .fetched
            .resolved
            .get(&volume)
            .filter(|b| matches!(b.source, Source::EmptyDir(_)));
        let text = match found {
            Some(found) => {
                let read = s.parts.host.read_file(s.pod, found, &path).await;
                read.map_err(Fault::from)
            }
            None => Err(Fault::invalid(format!(
                "volume {volume:?} is not an emptyDir of the pod"
            ))),
        };
        files.insert((volume, path), text);
    }
    let containers = &s.parts.containers;
    let node_ips = containers.node_ips.borrow().clone();
    let around = FieldContext {
        pod: s.pod,
        pod_ips: s.ips,
        node_ips: &node_ips,
        allocatable: &containers.allocatable,
    };
    env::build(container, &around, &services, s.fetched, &files)
}

async fn container_config(
    s: &Starting<'_>,
    start: &Start,
    images: &Pulled,
) -> std::result::Result<pb::ContainerConfig, Fault> {
    let container = &start.container;
    let devices = &s.parts.containers.devices;
    let given = devices.prepare(pod::uid(s.pod), &container.name);
    let given = given.await.map_err(Fault::later)?;
    let claimed = match s.job.update.with_status() {
        pod if has_claims(pod) => s
            .parts
            .claims
            .cdi(pod, container)
            .map_err(|e| Fault::later(e.to_string()))?,
        _ => vec![],
    };
    // The container's own variables and paths take precedence over those of devices.
    let own = environment(s, container).await?;
    let mut env: Vec<(String, Vec<u8>)> = given
        .env
        .into_iter()
        .filter(|(name, _)| !own.iter().any(|(known, _)| known == name))
        .map(|(name, value)| (name, value.into_bytes()))
        .collect();
    env.extend(own);
    let mut mounts = mounts(s, start, &env, &images.volumes).await?;
    for mount in given.mounts {
        if !mounts
            .iter()
            .any(|m| m.container_path == mount.container_path)
        {
            mounts.push(mount);
        }
    }
    let mut devices = block_devices(s, container).await?;
    devices.extend(given.devices);
    let image_user = (images.own.uid, images.own.username.clone());
    let target = target(s, start)?;
    let prepared = cri_config::Prepared {
        attempt: start.attempt,
        image: &images.own.id,
        image_user,
        env,
        mounts,
        devices,
        annotations: given.annotations,
        cdi: given.cdi.into_iter().chain(claimed).collect(),
        target,
        groups: s
            .fetched
            .resolved
            .values()
            .filter_map(|v| v.group)
            .collect(),
    };
    cri_config::container(s.pod, container, prepared, s.node)
}

/// The container whose process namespace an ephemeral container shares.
fn target(s: &Starting<'_>, start: &Start) -> std::result::Result<Option<String>, Fault> {
    let ephemeral = pod::spec(s.pod)
        .ephemeral_containers
        .iter()
        .flatten()
        .find(|e| start.role == Role::Ephemeral && e.name == start.container.name);
    let Some(name) = ephemeral
        .and_then(|e| e.target_container_name.clone())
        .filter(|n| !n.is_empty())
    else {
        return Ok(None);
    };
    let running = s
        .observed
        .newest(&name)
        .filter(|c| c.state == ContainerState::Running);
    running
        .map(|c| Some(c.id.clone()))
        .ok_or_else(|| Fault::later(format!("unable to find target container {name}")))
}

/// Converts one volumeMount to its CRI message.
async fn volume_mount(
    s: &Starting<'_>,
    start: &Start,
    (index, mount): (usize, &VolumeMount),
    env: &[(String, Vec<u8>)],
    images: &BTreeMap<String, String>,
) -> std::result::Result<pb::Mount, Fault> {
    let volume = pod::spec(s.pod)
        .volumes
        .iter()
        .flatten()
        .find(|v| v.name == mount.name);
    let missing = || {
        let container = &start.container.name;
        Fault::invalid(format!(
            "cannot find volume {:?} to mount into container {container:?}",
            mount.name
        ))
    };
    let volume = volume.ok_or_else(missing)?;
    let sub_path = cri_config::sub_path(mount, env)?;
    let mut message = cri_config::volume_mount(mount, &start.container, s.node)?;
    if volume.image.is_some() {
        let image = images.get(&volume.name).cloned().unwrap_or_default();
        message.image = Some(pb::ImageSpec {
            image,
            ..pb::ImageSpec::default()
        });
        message.image_sub_path = sub_path.unwrap_or_default();
        message.readonly = true;
        return Ok(message);
    }
    let resolved = s.fetched.resolved.get(&volume.name).ok_or_else(missing)?;
    message.readonly |= resolved.read_only;
    message.selinux_relabel =
        s.parts.containers.machine.selinux.is_some() && resolved.is_relabelled();
    let place = SubPath {
        container: start.container.name.clone(),
        index,
        path: sub_path,
    };
    let source = s.parts.host.mount_source(s.pod, resolved, &place).await;
    message.host_path = source?.display().to_string();
    Ok(message)
}

/// Converts a container's block volumes to devices.
async fn block_devices(
    s: &Starting<'_>,
    container: &Container,
) -> std::result::Result<Vec<pb::Device>, Fault> {
    let mut devices = vec![];
    for (index, device) in container.volume_devices.iter().flatten().enumerate() {
        let resolved = s.fetched.resolved.get(&device.name).ok_or_else(|| {
            let (volume, container) = (&device.name, &container.name);
            Fault::invalid(format!(
                "cannot find volume {volume:?} to pass into container {container:?}"
            ))
        })?;
        if !resolved.block {
            return Err(Fault::invalid(format!(
                "volume {:?} is not a block volume, but is specified in volumeDevices",
                device.name
            )));
        }
        let place = SubPath {
            container: container.name.clone(),
            index,
            path: None,
        };
        let path = match &resolved.source {
            Source::Csi(_) => s
                .parts
                .containers
                .csi
                .device(pod::uid(s.pod), &resolved.name),
            _ => s.parts.host.mount_source(s.pod, resolved, &place).await,
        };
        let path = path?;
        let permissions = if resolved.read_only { "r" } else { "mrw" };
        devices.push(pb::Device {
            container_path: device.device_path.clone(),
            host_path: path.display().to_string(),
            permissions: permissions.into(),
        });
    }
    Ok(devices)
}

async fn mounts(
    s: &Starting<'_>,
    start: &Start,
    env: &[(String, Vec<u8>)],
    images: &BTreeMap<String, String>,
) -> std::result::Result<Vec<pb::Mount>, Fault> {
    let container = &start.container;
    let mut mounts = Vec::new();
    for mount in container.volume_mounts.iter().flatten().enumerate() {
        mounts.push(volume_mount(s, start, mount, env, images).await?);
    }
    let taken = |path: &str, mounts: &[pb::Mount]| mounts.iter().any(|m| m.container_path == path);
    let selinux_relabel = s.parts.containers.machine.selinux.is_some();
    let file = |path: &str, host: PathBuf| pb::Mount {
        container_path: path.into(),
        host_path: host.display().to_string(),
        selinux_relabel,
        ..pb::Mount::default()
    };
    if !taken("/etc/hosts", &mounts) && (!s.ips.is_empty() || pod::host_network(s.pod)) {
        let text = dns::hosts_file(
            s.pod,
            s.ips,
            &s.parts.containers.config.cluster_domain,
            &s.parts.host.node_hosts().await,
        );
        let hosts = s.parts.host.write_hosts(s.pod, text).await;
        mounts.push(file("/etc/hosts", hosts?));
    }
    if let Some(path) = container
        .termination_message_path
        .as_ref()
        .filter(|p| !p.is_empty())
    {
        let (host, name) = (&s.parts.host, &container.name);
        let made = host.termination_log(s.pod, name, start.attempt).await;
        mounts.push(file(path, made?));
    }
    Ok(mounts)
}
