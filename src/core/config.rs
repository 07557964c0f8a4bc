//! Pods as runtime configuration: sandbox and container messages (kubelet spec, chapter 6). Pure.

use std::collections::HashMap;

use holdfast_proto::cri as pb;
use k8s_openapi::api::core::v1::{Capabilities, Container, Pod, PodSpec, SeccompProfile, SecurityContext};
use kube::ResourceExt as _;

use super::cgroup::{self, oom_score_adj};
use super::dns::{self, Resolver};
use super::pod;
use super::resources::{Side, of_container};

/// Labels by which pods are found again in the runtime.
pub mod label {
    /// The pod's name.
    pub const POD_NAME: &str = "io.kubernetes.pod.name";
    /// The pod's namespace.
    pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
    /// The pod's uid.
    pub const POD_UID: &str = "io.kubernetes.pod.uid";
    /// The container's name.
    pub const CONTAINER: &str = "io.kubernetes.container.name";
}

/// Annotations that carry what a restarted agent needs.
pub mod annotation {
    /// The definition's hash.
    pub const HASH: &str = "io.kubernetes.container.hash";
    /// The restart count.
    pub const RESTARTS: &str = "io.kubernetes.container.restartCount";
    /// Where the termination message lies in the container.
    pub const MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
    /// What to do without one.
    pub const MESSAGE_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
    /// The pod's grace period.
    pub const GRACE: &str = "io.kubernetes.pod.terminationGracePeriod";
}

const MASKED: &[&str] = &[
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READ_ONLY: &[&str] = &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// What a pod's messages need besides the pod.
pub struct Node<'a> {
    /// Name resolution.
    pub resolver: &'a Resolver,
    /// The pod's cgroup in the driver's spelling.
    pub cgroup_parent: String,
    /// The directory of the pod's logs.
    pub log_directory: String,
    /// The directory below which localhost seccomp profiles lie.
    pub seccomp_root: String,
    /// Whether containers without a seccomp profile get the runtime's.
    pub seccomp_default: bool,
    /// The node's memory in bytes.
    pub memory: u64,
}

fn namespaces(spec: &PodSpec) -> pb::NamespaceOption {
    let node = |yes: Option<bool>, other: pb::NamespaceMode| if yes == Some(true) { pb::NamespaceMode::Node } else { other } as i32;
    let shared = if spec.share_process_namespace == Some(true) { pb::NamespaceMode::Pod } else { pb::NamespaceMode::Container };
    pb::NamespaceOption {
        network: node(spec.host_network, pb::NamespaceMode::Pod),
        ipc: node(spec.host_ipc, pb::NamespaceMode::Pod),
        pid: node(spec.host_pid, shared),
        ..pb::NamespaceOption::default()
    }
}

fn seccomp(profile: Option<&SeccompProfile>, node: &Node<'_>) -> Result<pb::SecurityProfile, String> {
    use pb::security_profile::ProfileType;
    let simple = |kind: ProfileType| pb::SecurityProfile { profile_type: kind as i32, localhost_ref: String::new() };
    Ok(match profile {
        None if node.seccomp_default => simple(ProfileType::RuntimeDefault),
        None => simple(ProfileType::Unconfined),
        Some(profile) => match profile.type_.as_str() {
            "RuntimeDefault" => simple(ProfileType::RuntimeDefault),
            "Unconfined" => simple(ProfileType::Unconfined),
            // An empty name must not come out as unconfined.
            "Localhost" => {
                match profile.localhost_profile.as_deref().filter(|p| !p.is_empty() && !p.starts_with('/') && !p.split('/').any(|s| s == "..")) {
                    Some(path) => {
                        pb::SecurityProfile { profile_type: ProfileType::Localhost as i32, localhost_ref: format!("{}/{path}", node.seccomp_root) }
                    }
                    None => {
                        return Err("localhostProfile must be set to a path below the seccomp directory if seccompProfile type is Localhost.".into());
                    }
                }
            }
            other => return Err(format!("seccompProfile type {other:?} is not supported: use RuntimeDefault, Localhost or Unconfined")),
        },
    })
}

fn privileged(container: &Container) -> bool {
    container.security_context.as_ref().and_then(|s| s.privileged) == Some(true)
}

/// The sandbox of a pod. The error is a sandbox error.
pub fn sandbox(pod: &Pod, attempt: u32, node: &Node<'_>) -> Result<pb::PodSandboxConfig, String> {
    let spec = pod::spec(pod);
    let context = spec.security_context.clone().unwrap_or_default();
    let id = |value: Option<i64>| value.map(|value| pb::Int64Value { value });
    let hostname = if pod::host_network(pod) { String::new() } else { dns::hostname(pod, &node.resolver.cluster_domain)?.0 };
    let mut labels: HashMap<String, String> = pod.labels().clone().into_iter().collect();
    labels.extend(pod_labels(pod));
    let groups = context.supplemental_groups.iter().flatten().copied().chain(context.fs_group).collect();
    Ok(pb::PodSandboxConfig {
        metadata: Some(pb::PodSandboxMetadata {
            name: pod.name_any(),
            uid: pod::uid(pod).into(),
            namespace: pod.namespace().unwrap_or_default(),
            attempt,
        }),
        hostname,
        log_directory: node.log_directory.clone(),
        dns_config: Some(dns::config(pod, node.resolver)),
        port_mappings: port_mappings(spec),
        labels,
        annotations: pod.annotations().clone().into_iter().collect(),
        linux: Some(pb::LinuxPodSandboxConfig {
            cgroup_parent: node.cgroup_parent.clone(),
            security_context: Some(pb::LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces(spec)),
                run_as_user: id(context.run_as_user),
                run_as_group: id(context.run_as_group.filter(|_| context.run_as_user.is_some())),
                supplemental_groups: groups,
                privileged: pod::containers(pod).iter().any(|(_, c)| privileged(c)),
                seccomp: Some(pb::SecurityProfile {
                    profile_type: pb::security_profile::ProfileType::RuntimeDefault as i32,
                    localhost_ref: String::new(),
                }),
                ..pb::LinuxSandboxSecurityContext::default()
            }),
            sysctls: context.sysctls.iter().flatten().map(|s| (s.name.replace('/', "."), s.value.clone())).collect(),
            ..pb::LinuxPodSandboxConfig::default()
        }),
        windows: None,
    })
}

fn pod_labels(pod: &Pod) -> [(String, String); 3] {
    [
        (label::POD_NAME.into(), pod.name_any()),
        (label::POD_NAMESPACE.into(), pod.namespace().unwrap_or_default()),
        (label::POD_UID.into(), pod::uid(pod).into()),
    ]
}

fn port_mappings(spec: &PodSpec) -> Vec<pb::PortMapping> {
    let ports = spec.containers.iter().flat_map(|c| c.ports.iter().flatten());
    ports
        .map(|p| pb::PortMapping {
            protocol: match p.protocol.as_deref() {
                Some("UDP") => pb::Protocol::Udp,
                Some("SCTP") => pb::Protocol::Sctp,
                _ => pb::Protocol::Tcp,
            } as i32,
            container_port: p.container_port,
            host_port: p.host_port.unwrap_or(0),
            host_ip: p.host_ip.clone().unwrap_or_default(),
        })
        .collect()
}

/// What a container's message needs besides pod and node.
pub struct Prepared<'a> {
    /// The restart count.
    pub attempt: u32,
    /// The image's id in the runtime.
    pub image: &'a str,
    /// The image's user: uid, else name.
    pub image_user: (Option<i64>, String),
    /// The environment.
    pub env: Vec<(String, String)>,
    /// The mounts.
    pub mounts: Vec<pb::Mount>,
}

/// Effective user checks (kubelet spec, 6.6): refuses root where it is not wanted.
fn check_non_root(pod: &Pod, container: &Container, user: Option<i64>, image: &(Option<i64>, String)) -> Result<(), String> {
    let of_pod = pod.spec.as_ref().and_then(|s| s.security_context.as_ref()).and_then(|s| s.run_as_non_root);
    let wanted = container.security_context.as_ref().and_then(|s| s.run_as_non_root).or(of_pod);
    if wanted != Some(true) {
        return Ok(());
    }
    let who = format!("(pod: \"{}\", container: {})", pod::described(pod), container.name);
    match (user, image) {
        (Some(0), _) => Err(format!("container's runAsUser breaks non-root policy {who}")),
        (Some(_), _) => Ok(()),
        (None, (None, name)) if !name.is_empty() => {
            Err(format!("container has runAsNonRoot and image has non-numeric user ({name}), cannot verify user is non-root {who}"))
        }
        (None, (None | Some(0), _)) => Err(format!("container has runAsNonRoot and image will run as root {who}")),
        (None, (Some(_), _)) => Ok(()),
    }
}

/// A container's message. The error is a `CreateContainerConfigError`.
pub fn container(pod: &Pod, container: &Container, prepared: Prepared<'_>, node: &Node<'_>) -> Result<pb::ContainerConfig, String> {
    let lookup = |name: &str| prepared.env.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    let expand = |list: Option<&Vec<String>>| list.into_iter().flatten().map(|text| super::env::expand(text, lookup)).collect();
    let mut annotations = HashMap::from([
        (annotation::HASH.to_owned(), pod::container_hash(container)),
        (annotation::RESTARTS.to_owned(), prepared.attempt.to_string()),
        (annotation::MESSAGE_PATH.to_owned(), container.termination_message_path.clone().unwrap_or_default()),
        (annotation::MESSAGE_POLICY.to_owned(), container.termination_message_policy.clone().unwrap_or_default()),
    ]);
    if let Some(grace) = pod.spec.as_ref().and_then(|s| s.termination_grace_period_seconds) {
        annotations.insert(annotation::GRACE.into(), grace.to_string());
    }
    let mut labels: HashMap<String, String> = pod_labels(pod).into();
    labels.insert(label::CONTAINER.into(), container.name.clone());
    let security = security(pod, container, &prepared.image_user, node)?;
    Ok(pb::ContainerConfig {
        metadata: Some(pb::ContainerMetadata { name: container.name.clone(), attempt: prepared.attempt }),
        image: Some(pb::ImageSpec {
            image: prepared.image.into(),
            user_specified_image: container.image.clone().unwrap_or_default(),
            ..pb::ImageSpec::default()
        }),
        command: expand(container.command.as_ref()),
        args: expand(container.args.as_ref()),
        working_dir: container.working_dir.clone().unwrap_or_default(),
        envs: prepared.env.iter().map(|(key, value)| pb::KeyValue { key: key.clone(), value: value.clone() }).collect(),
        mounts: prepared.mounts,
        labels,
        annotations,
        log_path: format!("{}/{}.log", container.name, prepared.attempt),
        stdin: container.stdin.unwrap_or(false),
        stdin_once: container.stdin_once.unwrap_or(false),
        tty: container.tty.unwrap_or(false),
        linux: Some(pb::LinuxContainerConfig { resources: Some(resources(pod, container, node.memory)), security_context: Some(security) }),
        ..pb::ContainerConfig::default()
    })
}

fn security(
    pod: &Pod,
    container: &Container,
    image_user: &(Option<i64>, String),
    node: &Node<'_>,
) -> Result<pb::LinuxContainerSecurityContext, String> {
    let spec = pod::spec(pod);
    let of_pod = spec.security_context.clone().unwrap_or_default();
    let own: SecurityContext = container.security_context.clone().unwrap_or_default();
    let user = own.run_as_user.or(of_pod.run_as_user);
    check_non_root(pod, container, user, image_user)?;
    let id = |value: Option<i64>| value.map(|value| pb::Int64Value { value });
    let named = user.is_none() && image_user.0.is_none() && !image_user.1.is_empty();
    let unmasked = own.proc_mount.as_deref() == Some("Unmasked");
    let paths = |list: &[&str]| if unmasked { vec![] } else { list.iter().map(|p| (*p).to_owned()).collect() };
    let capabilities = |c: Capabilities| pb::Capability {
        add_capabilities: c.add.unwrap_or_default(),
        drop_capabilities: c.drop.unwrap_or_default(),
        ..pb::Capability::default()
    };
    Ok(pb::LinuxContainerSecurityContext {
        capabilities: own.capabilities.clone().map(capabilities),
        privileged: privileged(container),
        namespace_options: Some(namespaces(spec)),
        run_as_user: if named { None } else { id(user.or(image_user.0).or(Some(0))) },
        run_as_group: id(own.run_as_group.or(of_pod.run_as_group)),
        run_as_username: if named { image_user.1.clone() } else { String::new() },
        readonly_rootfs: own.read_only_root_filesystem.unwrap_or(false),
        supplemental_groups: of_pod.supplemental_groups.iter().flatten().copied().chain(of_pod.fs_group).collect(),
        no_new_privs: own.allow_privilege_escalation == Some(false),
        masked_paths: paths(MASKED),
        readonly_paths: paths(READ_ONLY),
        seccomp: Some(seccomp(own.seccomp_profile.as_ref().or(of_pod.seccomp_profile.as_ref()), node)?),
        ..pb::LinuxContainerSecurityContext::default()
    })
}

fn resources(pod: &Pod, container: &Container, memory: u64) -> pb::LinuxContainerResources {
    let (requests, limits) = (of_container(container, Side::Requests), of_container(container, Side::Limits));
    let share = requests.get("cpu").or(limits.get("cpu")).map_or(0, |q| q.milli());
    let bytes = limits.get("memory").map_or(0, |q| q.units());
    pb::LinuxContainerResources {
        cpu_shares: i64::try_from(cgroup::shares(share)).unwrap_or(2),
        cpu_period: i64::try_from(cgroup::PERIOD).unwrap_or(100_000),
        cpu_quota: limits.get("cpu").map_or(0, |q| cgroup::quota(q.milli())),
        memory_limit_in_bytes: bytes,
        oom_score_adj: oom_score_adj(pod, container, memory),
        ..pb::LinuxContainerResources::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn made(pod: Value, image_user: (Option<i64>, String)) -> Result<pb::ContainerConfig, String> {
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let node = Node {
            resolver: &Resolver::default(),
            cgroup_parent: "/x".into(),
            log_directory: "/l".into(),
            seccomp_root: "/s".into(),
            seccomp_default: false,
            memory: 1 << 30,
        };
        sandbox(&pod, 0, &node)?;
        let first = pod.spec.as_ref().expect("spec").containers[0].clone();
        container(&pod, &first, Prepared { attempt: 2, image: "sha256:i", image_user, env: vec![("A".into(), "1".into())], mounts: vec![] }, &node)
    }

    fn with(context: Value) -> Value {
        json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": [{"name": "c", "image": "i", "args": ["$(A)"], "securityContext": context}]}})
    }

    #[test]
    fn a_container_carries_what_a_restarted_agent_needs() {
        let config = made(with(json!({})), (None, String::new())).expect("fine");
        assert_eq!(
            (config.args, config.log_path.as_str(), config.annotations[annotation::RESTARTS].as_str(), config.labels[label::POD_UID].as_str()),
            (vec!["1".to_owned()], "c/2.log", "2", "u")
        );
        let linux = config.linux.expect("linux");
        assert_eq!(linux.resources.expect("resources").oom_score_adj, 1000);
        let security = linux.security_context.expect("security");
        assert_eq!((security.run_as_user.expect("a user").value, security.masked_paths.len()), (0, MASKED.len()));
    }

    #[test]
    fn root_is_refused_where_it_is_not_wanted_and_profiles_fail_closed() {
        let cases = [
            (json!({"runAsNonRoot": true}), (None, String::new()), Some("image will run as root")),
            (json!({"runAsNonRoot": true}), (None, "app".to_owned()), Some("non-numeric user (app)")),
            (json!({"runAsNonRoot": true}), (Some(5), String::new()), None),
            (json!({"runAsNonRoot": true, "runAsUser": 0}), (Some(5), String::new()), Some("breaks non-root policy")),
            (json!({"seccompProfile": {"type": "Localhost", "localhostProfile": ""}}), (None, String::new()), Some("localhostProfile must be set")),
            (
                json!({"seccompProfile": {"type": "Localhost", "localhostProfile": "../../x"}}),
                (None, String::new()),
                Some("localhostProfile must be set"),
            ),
        ];
        for (context, user, expected) in cases {
            let result = made(with(context.clone()), user);
            match expected {
                None => assert!(result.is_ok(), "{context}: {result:?}"),
                Some(text) => assert!(result.as_ref().is_err_and(|e| e.contains(text)), "{context}: {result:?}"),
            }
        }
    }
}
