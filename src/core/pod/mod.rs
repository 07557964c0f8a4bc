//! Predicates on pods, and names derived from them. Pure. The submodules hold everything that is decided for one pod.

pub mod actions;
pub mod addresses;
pub mod cgroup;
pub mod cgroup_values;
pub(crate) mod container_hash;
pub mod cri_config;
pub mod desired;
pub mod dns;
pub mod env;
mod env_file;
pub mod exits;
pub mod explain;
pub mod journal;
pub mod lifecycle;
pub mod memory_qos;
pub mod observed;
pub mod pinning;
pub mod priority;
pub mod probe;
pub mod qos;
pub(crate) mod quoted;
pub mod record;
pub mod references;
pub mod resize;
pub mod resources;
pub mod static_uid;
pub mod status;
pub mod sysctl;
pub mod users;
pub mod worker;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::LazyLock;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, EphemeralContainer, Pod, PodSpec, PodStatus};
use serde::{Deserialize, Serialize};

use crate::meta;
use crate::time;

pub use container_hash::container_hash;

/// Annotation with the source of a pod: `api`, `file` or `http`.
pub const SOURCE: &str = "kubernetes.io/config.source";
/// Annotation with the hash of a static pod's manifest.
pub const HASH: &str = "kubernetes.io/config.hash";
/// Annotation with the time at which the running agent first saw the pod, formatted by [`seen_at`]. Pods of the API
/// have this annotation only in the response of `/pods`.
pub const SEEN: &str = "kubernetes.io/config.seen";
/// Annotation of a mirror pod: the hash of the static pod that it mirrors.
pub const MIRROR: &str = "kubernetes.io/config.mirror";

/// `name_namespace`, the form of messages and log directories.
#[must_use]
pub fn full_name(pod: &Pod) -> String {
    full_name_of(meta::namespace(pod), meta::name(pod))
}

/// [`full_name`] of a namespace and a name.
#[must_use]
pub fn full_name_of(namespace: &str, name: &str) -> String {
    format!("{name}_{namespace}")
}

/// Formats a time for [`SEEN`]: RFC 3339 with nanoseconds.
#[must_use]
pub fn seen_at(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%S.%9fZ").to_string()
}

/// `name_namespace(uid)`, the form of messages.
#[must_use]
pub fn described(pod: &Pod) -> String {
    format!("{}({})", full_name(pod), uid(pod))
}

/// The pod's spec, or an empty one if the pod has none. Only pods that are known from the runtime alone have no spec.
#[must_use]
pub fn spec(pod: &Pod) -> &PodSpec {
    static NONE: LazyLock<PodSpec> = LazyLock::new(PodSpec::default);
    pod.spec.as_ref().unwrap_or(&NONE)
}

/// The pod's uid, or an empty string if the pod has none yet.
#[must_use]
pub fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

/// The value of an annotation.
#[must_use]
pub fn annotation<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    let annotations = pod.metadata.annotations.as_ref()?;
    annotations.get(name).map(String::as_str)
}

/// Whether the pod is the mirror of a static pod in the API.
#[must_use]
pub fn is_mirror(pod: &Pod) -> bool {
    meta::annotations(pod).contains_key(MIRROR)
}

/// Whether the pod is static: its manifest came from a file or URL.
#[must_use]
pub fn is_static(pod: &Pod) -> bool {
    meta::annotations(pod)
        .get(SOURCE)
        .is_some_and(|s| s != "api")
}

/// The pod's phase in the API.
#[must_use]
pub fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|s| s.phase.as_deref())
        .unwrap_or("Pending")
}

/// Whether the phase is terminal: such a pod never runs again.
#[must_use]
pub fn is_final(status: &PodStatus) -> bool {
    matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"))
}

/// Whether the pod's phase in the API is terminal.
#[must_use]
pub fn is_terminal(pod: &Pod) -> bool {
    pod.status.as_ref().is_some_and(is_final)
}

/// The ownership of volumes that a pod requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ownership {
    /// `fsGroup`.
    pub group: Option<u32>,
    /// `fsGroupChangePolicy: OnRootMismatch`: if the root of a volume already has the group, the volume is not changed.
    pub on_mismatch: bool,
}

/// The ownership of volumes that a pod's security context requests.
#[must_use]
pub fn ownership(pod: &Pod) -> Ownership {
    let security = spec(pod).security_context.as_ref();
    Ownership {
        group: security
            .and_then(|s| s.fs_group)
            .and_then(|g| u32::try_from(g).ok()),
        on_mismatch: security.and_then(|s| s.fs_group_change_policy.as_deref())
            == Some("OnRootMismatch"),
    }
}

/// The `runAsUser` of all containers. `None` if they differ, or if one has none.
#[must_use]
pub(crate) fn common_user(pod: &Pod) -> Option<u32> {
    let of_pod = spec(pod)
        .security_context
        .as_ref()
        .and_then(|s| s.run_as_user);
    let mut users = containers(pod).into_iter().map(|(_, c)| {
        c.security_context
            .as_ref()
            .and_then(|s| s.run_as_user)
            .or(of_pod)
    });
    let first = users.next()??;
    users
        .all(|user| user == Some(first))
        .then(|| u32::try_from(first).ok())
        .flatten()
}

/// Whether the pod uses the node's network.
#[must_use]
pub fn host_network(pod: &Pod) -> bool {
    spec(pod).host_network.unwrap_or(false)
}

/// Whether a container is a sidecar: an init container with `restartPolicy: Always`.
#[must_use]
pub fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// The kind of a container in its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Role {
    /// An init container: runs to completion before the regular containers start.
    Init,
    /// A sidecar: started in the order of the init containers, and keeps running.
    Sidecar,
    /// One of `spec.containers`.
    Regular,
    /// An ephemeral container, added to a running pod for debugging.
    Ephemeral,
}

impl Role {
    fn field(self) -> &'static str {
        match self {
            Role::Init | Role::Sidecar => "initContainers",
            Role::Regular => "containers",
            Role::Ephemeral => "ephemeralContainers",
        }
    }

    /// The field path of a container in events, for example `spec.containers{web}`.
    #[must_use]
    pub fn field_path(self, container: &str) -> String {
        format!("spec.{}{{{container}}}", self.field())
    }
}

/// Converts an ephemeral container to a container. Only `targetContainerName` is dropped.
fn as_container(e: &EphemeralContainer) -> Container {
    Container {
        args: e.args.clone(),
        command: e.command.clone(),
        env: e.env.clone(),
        env_from: e.env_from.clone(),
        image: e.image.clone(),
        image_pull_policy: e.image_pull_policy.clone(),
        lifecycle: e.lifecycle.clone(),
        liveness_probe: e.liveness_probe.clone(),
        name: e.name.clone(),
        ports: e.ports.clone(),
        readiness_probe: e.readiness_probe.clone(),
        resize_policy: e.resize_policy.clone(),
        resources: e.resources.clone(),
        restart_policy: e.restart_policy.clone(),
        restart_policy_rules: e.restart_policy_rules.clone(),
        security_context: e.security_context.clone(),
        startup_probe: e.startup_probe.clone(),
        stdin: e.stdin,
        stdin_once: e.stdin_once,
        termination_message_path: e.termination_message_path.clone(),
        termination_message_policy: e.termination_message_policy.clone(),
        tty: e.tty,
        volume_devices: e.volume_devices.clone(),
        volume_mounts: e.volume_mounts.clone(),
        working_dir: e.working_dir.clone(),
    }
}

/// All containers with their roles. Ephemeral containers are converted to containers.
#[must_use]
pub fn containers(pod: &Pod) -> Vec<(Role, Cow<'_, Container>)> {
    let spec = spec(pod);
    let init = spec.init_containers.iter().flatten().map(|c| {
        (
            if is_sidecar(c) {
                Role::Sidecar
            } else {
                Role::Init
            },
            Cow::Borrowed(c),
        )
    });
    let regular = spec
        .containers
        .iter()
        .map(|c| (Role::Regular, Cow::Borrowed(c)));
    let ephemeral = spec
        .ephemeral_containers
        .iter()
        .flatten()
        .map(|e| (Role::Ephemeral, Cow::Owned(as_container(e))));
    init.chain(regular).chain(ephemeral).collect()
}

/// The names of the volumes that containers mount or use as block devices. Other volumes are not set up
/// (`GetPodVolumeNames` in `pkg/volume/util/util.go`, `processPodVolumes` in
/// `pkg/kubelet/volumemanager/populator/desired_state_of_world_populator.go`).
#[must_use]
pub fn used_volumes(pod: &Pod) -> BTreeSet<String> {
    let containers = containers(pod).into_iter();
    let names = containers.flat_map(|(_, container)| {
        let mounts = container.volume_mounts.iter().flatten();
        let devices = container.volume_devices.iter().flatten();
        let mounts = mounts.map(|m| m.name.clone());
        let names: Vec<String> = mounts.chain(devices.map(|d| d.name.clone())).collect();
        names
    });
    names.collect()
}

/// The grace period for terminating the pod, in seconds: that of the deletion, else that of the spec. The result is at
/// least 1 and at most [`time::MAX_SECONDS`].
#[must_use]
pub fn grace_seconds(pod: &Pod) -> i64 {
    let spec = spec(pod).termination_grace_period_seconds.unwrap_or(30);
    let grace = pod
        .metadata
        .deletion_timestamp
        .as_ref()
        .and(pod.metadata.deletion_grace_period_seconds)
        .unwrap_or(spec);
    time::bounded(grace).max(1)
}

/// Whether the exit of one container may restart all containers of the pod (KEP-5532).
#[must_use]
pub(crate) fn may_restart_all(pod: &Pod) -> bool {
    let spec = spec(pod);
    let of = |c: &Container| {
        let mut rules = c.restart_policy_rules.iter().flatten();
        rules.any(|rule| rule.action == "RestartAllContainers")
    };
    let init = spec.init_containers.iter().flatten();
    init.chain(&spec.containers).any(of)
}
