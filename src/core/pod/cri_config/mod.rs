//! CRI messages of pods: sandbox and container configurations (`pkg/kubelet/kuberuntime/kuberuntime_sandbox.go`,
//! `kuberuntime_container.go`). Pure.

mod mounts;
mod resources;
mod security;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use holdfast_proto::cri as pb;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

use super::cgroup;
use super::dns::{self, Resolver};
use super::memory_qos::MemoryQos;
use super::pinning::Pinning;
use super::users::{Mapping, Mappings};
use crate::fault::Fault;
use crate::network::Protocol;
use crate::{meta, pod};
pub use mounts::{recursive_read_only, sub_path, volume_mount};
pub(crate) use resources::may_swap;
pub use resources::{Swap, resources};
use resources::{overhead, whole_resources};
pub(crate) use security::apparmor_refusal;
use security::{groups_policy, security, selinux};

/// Labels that identify sandboxes and containers of a pod in the runtime.
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

/// Annotations with the state that a restarted agent needs.
pub mod annotation {
    /// The hash of the container's definition.
    pub const HASH: &str = "io.kubernetes.container.hash";
    /// The restart count.
    pub const RESTARTS: &str = "io.kubernetes.container.restartCount";
    /// The path of the termination message in the container.
    pub const MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
    /// The source of the message if the termination message is empty (`terminationMessagePolicy`).
    pub(crate) const MESSAGE_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
    /// The pod's grace period.
    pub const GRACE: &str = "io.kubernetes.pod.terminationGracePeriod";
    /// The grace period of the pod's deletion.
    pub(crate) const DELETION_GRACE: &str = "io.kubernetes.pod.deletionGracePeriod";
    /// The preStop hook, as JSON.
    pub(crate) const PRE_STOP: &str = "io.kubernetes.container.preStopHandler";
    /// The ports, as JSON.
    pub const PORTS: &str = "io.kubernetes.container.ports";
}

/// The node's part of the configuration.
#[derive(Debug, Clone)]
pub struct Node {
    /// DNS settings.
    pub resolver: Arc<Resolver>,
    /// The pod's cgroup in the driver's spelling.
    pub cgroup_parent: String,
    /// The directory of the pod's logs.
    pub log_directory: String,
    /// The root directory of localhost seccomp profiles.
    pub seccomp_root: String,
    /// Whether containers without a seccomp profile get `RuntimeDefault`.
    pub seccomp_default: bool,
    /// The node's memory in bytes.
    pub memory: u64,
    /// The rules for `memory.min`, `memory.low` and `memory.high`, and the node's allocatable memory in bytes (cgroup
    /// v2 only).
    pub memory_qos: Option<(MemoryQos, u64)>,
    /// The period of CPU quotas in microseconds. `None` if quotas are not enforced.
    pub cpu_period: Option<u64>,
    /// The huge page sizes that the kernel supports, in bytes.
    pub page_sizes: Vec<u64>,
    /// Whether an OOM kill kills all processes of the container (`memory.oom.group`, cgroup v2 only).
    pub group_oom: bool,
    /// The swap that containers may use. `None` if the kernel does not account for swap.
    pub swap: Option<Swap>,
    /// Paths below `/sys` that exist on this machine and are masked.
    pub masked: Vec<String>,
    /// The runtime handler. Empty for the default one.
    pub handler: String,
    /// The id mappings of the pod's user namespace, if it has one.
    pub users: Option<Mappings>,
    /// Whether the runtime supports recursive read-only mounts.
    pub recursive_read_only: bool,
    /// The CPUs and NUMA nodes that containers are bound to.
    pub pinning: Arc<Pinning>,
}

impl Node {
    /// A node with this resolver and Kubernetes' defaults.
    #[must_use]
    pub fn new(resolver: Arc<Resolver>) -> Node {
        Node {
            resolver,
            cgroup_parent: String::new(),
            log_directory: String::new(),
            seccomp_root: String::new(),
            seccomp_default: false,
            memory: 0,
            memory_qos: None,
            cpu_period: Some(cgroup::PERIOD),
            page_sizes: vec![],
            group_oom: false,
            swap: None,
            masked: vec![],
            handler: String::new(),
            users: None,
            recursive_read_only: false,
            pinning: Arc::default(),
        }
    }
}

fn ids(list: &[Mapping]) -> Vec<pb::IdMapping> {
    list.iter()
        .map(|m| pb::IdMapping {
            host_id: m.host_id,
            container_id: m.container_id,
            length: m.length,
        })
        .collect()
}

fn namespaces(spec: &PodSpec, node: &Node) -> pb::NamespaceOption {
    let of = |yes: Option<bool>, other: pb::NamespaceMode| if yes == Some(true) { pb::NamespaceMode::Node } else { other } as i32;
    let shared = if spec.share_process_namespace == Some(true) {
        pb::NamespaceMode::Pod
    } else {
        pb::NamespaceMode::Container
    };
    pb::NamespaceOption {
        network: of(spec.host_network, pb::NamespaceMode::Pod),
        ipc: of(spec.host_ipc, pb::NamespaceMode::Pod),
        pid: of(spec.host_pid, shared),
        userns_options: Some(match &node.users {
            None => pb::UserNamespace {
                mode: pb::NamespaceMode::Node as i32,
                ..pb::UserNamespace::default()
            },
            Some(users) => pb::UserNamespace {
                mode: pb::NamespaceMode::Pod as i32,
                uids: ids(&users.uid_mappings),
                gids: ids(&users.gid_mappings),
            },
        }),
        ..pb::NamespaceOption::default()
    }
}

fn privileged(container: &Container) -> bool {
    container
        .security_context
        .as_ref()
        .and_then(|s| s.privileged)
        == Some(true)
}

/// Builds the sandbox's configuration. The error means that the sandbox cannot be created.
pub fn sandbox(pod: &Pod, attempt: u32, node: &Node) -> Result<pb::PodSandboxConfig, Fault> {
    dns::check_words(pod)?;
    let spec = pod::spec(pod);
    let context = spec.security_context.clone().unwrap_or_default();
    let id = |value: Option<i64>| value.map(|value| pb::Int64Value { value });
    let hostname = if pod::host_network(pod) {
        String::new()
    } else {
        dns::hostname(pod, &node.resolver.cluster_domain)?.0
    };
    let mut labels: HashMap<String, String> = meta::labels(pod).clone().into_iter().collect();
    labels.extend(pod_labels(pod));
    let groups = context
        .supplemental_groups
        .iter()
        .flatten()
        .copied()
        .chain(context.fs_group)
        .collect();
    Ok(pb::PodSandboxConfig {
        metadata: Some(pb::PodSandboxMetadata {
            name: meta::name(pod).to_owned(),
            uid: pod::uid(pod).into(),
            namespace: meta::namespace(pod).to_owned(),
            attempt,
        }),
        hostname,
        log_directory: node.log_directory.clone(),
        dns_config: Some(dns::config(pod, &node.resolver).0),
        port_mappings: port_mappings(spec),
        labels,
        annotations: meta::annotations(pod).clone().into_iter().collect(),
        linux: Some(pb::LinuxPodSandboxConfig {
            cgroup_parent: node.cgroup_parent.clone(),
            security_context: Some(pb::LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces(spec, node)),
                run_as_user: id(context.run_as_user),
                run_as_group: id(context
                    .run_as_group
                    .filter(|_| context.run_as_user.is_some())),
                supplemental_groups: groups,
                supplemental_groups_policy: groups_policy(
                    context.supplemental_groups_policy.as_deref(),
                ),
                selinux_options: context.se_linux_options.as_ref().map(selinux),
                privileged: pod::containers(pod).iter().any(|(_, c)| privileged(c)),
                seccomp: Some(pb::SecurityProfile {
                    profile_type: pb::security_profile::ProfileType::RuntimeDefault as i32,
                    localhost_ref: String::new(),
                }),
                ..pb::LinuxSandboxSecurityContext::default()
            }),
            sysctls: context
                .sysctls
                .iter()
                .flatten()
                .map(|s| (s.name.replace('/', "."), s.value.clone()))
                .collect(),
            ..sandbox_sizes(pod, node)
        }),
        windows: None,
    })
}

/// The total resources of a pod's containers and its overhead, as part of the sandbox's configuration.
#[must_use]
pub fn sandbox_sizes(pod: &Pod, node: &Node) -> pb::LinuxPodSandboxConfig {
    pb::LinuxPodSandboxConfig {
        overhead: Some(overhead(pod)),
        resources: Some(whole_resources(pod, node)),
        ..pb::LinuxPodSandboxConfig::default()
    }
}

fn pod_labels(pod: &Pod) -> [(String, String); 3] {
    [
        (label::POD_NAME.into(), meta::name(pod).to_owned()),
        (label::POD_NAMESPACE.into(), meta::namespace(pod).to_owned()),
        (label::POD_UID.into(), pod::uid(pod).into()),
    ]
}

fn port_mappings(spec: &PodSpec) -> Vec<pb::PortMapping> {
    let mut seen = std::collections::HashSet::new();
    let ports = spec
        .containers
        .iter()
        .flat_map(|c| c.ports.iter().flatten().map(move |p| (c, p)));
    ports
        .filter(|(container, p)| {
            // Duplicates in a container are dropped: by name, else by protocol, address and ports.
            let family = if p.host_ip.as_deref().is_some_and(|ip| ip.contains(':')) {
                6
            } else {
                4
            };
            let key = match p.name.as_deref().filter(|n| !n.is_empty()) {
                Some(name) => format!("{}:{name}", container.name),
                None => format!(
                    "{}:{family}-{:?}-{:?}:{:?}:{}",
                    container.name, p.protocol, p.host_ip, p.host_port, p.container_port
                ),
            };
            seen.insert(key)
        })
        .map(|(_, p)| pb::PortMapping {
            protocol: match Protocol::parse(p.protocol.as_deref()) {
                Some(Protocol::Udp) => pb::Protocol::Udp,
                Some(Protocol::Sctp) => pb::Protocol::Sctp,
                Some(Protocol::Tcp) | None => pb::Protocol::Tcp,
            } as i32,
            container_port: p.container_port,
            host_port: p.host_port.unwrap_or(0),
            host_ip: p.host_ip.clone().unwrap_or_default(),
        })
        .collect()
}

/// The prepared part of a container's configuration.
pub struct Prepared<'a> {
    /// The restart count, which is part of the log's name too.
    pub attempt: u32,
    /// The image's id in the runtime.
    pub image: &'a str,
    /// The image's user: uid, else name.
    pub image_user: (Option<i64>, String),
    /// The environment in order, with all references expanded. Values from Secrets may be arbitrary bytes.
    pub env: Vec<(String, Vec<u8>)>,
    /// The mounts in order.
    pub mounts: Vec<pb::Mount>,
    /// Devices of block volumes and of device plugins.
    pub devices: Vec<pb::Device>,
    /// Annotations that device plugins add.
    pub annotations: BTreeMap<String, String>,
    /// The full names of CDI devices.
    pub cdi: Vec<String>,
    /// The id of the container whose processes an ephemeral container shares.
    pub target: Option<String>,
    /// The supplementary groups that the pod's persistent volumes require.
    pub groups: Vec<i64>,
}

/// The stop signal of a container: its own, else the image's (KEP-4960). CRI's enum spells the sign of real-time
/// signals as a word.
fn stop_signal(container: &Container) -> Result<pb::Signal, Fault> {
    let Some(name) = container
        .lifecycle
        .as_ref()
        .and_then(|l| l.stop_signal.as_deref())
        .filter(|n| !n.is_empty())
    else {
        return Ok(pb::Signal::RuntimeDefault);
    };
    let known = pb::Signal::from_str_name(&name.replace('+', "PLUS").replace('-', "MINUS"))
        .filter(|s| *s != pb::Signal::RuntimeDefault);
    known.ok_or_else(|| Fault::invalid(format!("lifecycle.stopSignal {name:?} is not a signal: use a name such as SIGTERM or SIGRTMIN+1")))
}

/// A CRI signal in the API's spelling.
#[must_use]
pub fn signal_name(signal: pb::Signal) -> Option<String> {
    (signal != pb::Signal::RuntimeDefault).then(|| {
        signal
            .as_str_name()
            .replace("PLUS", "+")
            .replace("MINUS", "-")
    })
}

/// The annotations of a container: the state that a later agent needs, and the annotations of device plugins.
fn annotations(
    pod: &Pod,
    container: &Container,
    prepared: &Prepared<'_>,
) -> HashMap<String, String> {
    let mut annotations: HashMap<String, String> =
        prepared.annotations.clone().into_iter().collect();
    annotations.extend([
        (annotation::HASH.to_owned(), pod::container_hash(container)),
        (
            annotation::RESTARTS.to_owned(),
            prepared.attempt.to_string(),
        ),
        (
            annotation::MESSAGE_PATH.to_owned(),
            container
                .termination_message_path
                .clone()
                .unwrap_or_default(),
        ),
        (
            annotation::MESSAGE_POLICY.to_owned(),
            container
                .termination_message_policy
                .clone()
                .unwrap_or_default(),
        ),
    ]);
    if let Some(grace) = pod
        .spec
        .as_ref()
        .and_then(|s| s.termination_grace_period_seconds)
    {
        annotations.insert(annotation::GRACE.into(), grace.to_string());
    }
    if let Some(grace) = pod.metadata.deletion_grace_period_seconds {
        annotations.insert(annotation::DELETION_GRACE.into(), grace.to_string());
    }
    // An agent that stops the container without the pod's spec needs these.
    let json = |value: Option<serde_json::Value>| value.map(|v| v.to_string());
    let hook = container
        .lifecycle
        .as_ref()
        .and_then(|l| l.pre_stop.as_ref())
        .and_then(|h| serde_json::to_value(h).ok());
    let ports = container
        .ports
        .as_ref()
        .filter(|p| !p.is_empty())
        .and_then(|p| serde_json::to_value(p).ok());
    annotations.extend(json(hook).map(|text| (annotation::PRE_STOP.to_owned(), text)));
    annotations.extend(json(ports).map(|text| (annotation::PORTS.to_owned(), text)));
    annotations
}

/// Adds the pod's id mappings to all mounts, so that files of root belong to the root user of the container. This
/// includes the agent's own files (`/etc/hosts`, the termination log) and mounts of device plugins.
fn mapped(mut mounts: Vec<pb::Mount>, node: &Node) -> Vec<pb::Mount> {
    if let Some(users) = &node.users {
        for mount in &mut mounts {
            mount.uid_mappings = ids(&users.uid_mappings);
            mount.gid_mappings = ids(&users.gid_mappings);
        }
    }
    mounts
}

/// Builds a container's configuration. The error is a `CreateContainerConfigError`.
pub fn container(
    pod: &Pod,
    container: &Container,
    prepared: Prepared<'_>,
    node: &Node,
) -> Result<pb::ContainerConfig, Fault> {
    let lookup = |name: &str| super::env::text_of(&prepared.env, name);
    let expand = |list: Option<&Vec<String>>| {
        list.into_iter()
            .flatten()
            .map(|text| super::env::expand(text, lookup))
            .collect()
    };
    let mut labels: HashMap<String, String> = pod_labels(pod).into();
    labels.insert(label::CONTAINER.into(), container.name.clone());
    let annotations = annotations(pod, container, &prepared);
    let security = security(pod, container, &prepared, node)?;
    Ok(pb::ContainerConfig {
        metadata: Some(pb::ContainerMetadata {
            name: container.name.clone(),
            attempt: prepared.attempt,
        }),
        image: Some(pb::ImageSpec {
            image: prepared.image.into(),
            user_specified_image: container.image.clone().unwrap_or_default(),
            ..pb::ImageSpec::default()
        }),
        command: expand(container.command.as_ref()),
        args: expand(container.args.as_ref()),
        working_dir: container.working_dir.clone().unwrap_or_default(),
        envs: prepared
            .env
            .iter()
            .map(|(key, value)| pb::KeyValue {
                key: key.clone(),
                value: value.clone(),
            })
            .collect(),
        mounts: mapped(prepared.mounts, node),
        devices: prepared.devices,
        cdi_devices: prepared
            .cdi
            .into_iter()
            .map(|name| pb::CdiDevice { name })
            .collect(),
        labels,
        annotations,
        log_path: format!("{}/{}.log", container.name, prepared.attempt),
        stdin: container.stdin.unwrap_or(false),
        stdin_once: container.stdin_once.unwrap_or(false),
        tty: container.tty.unwrap_or(false),
        linux: Some(pb::LinuxContainerConfig {
            resources: Some(resources(pod, container, node)),
            security_context: Some(security),
        }),
        stop_signal: stop_signal(container)? as i32,
        ..pb::ContainerConfig::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn made(pod: Value, image_user: (Option<i64>, String)) -> Result<pb::ContainerConfig, Fault> {
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let node = Node {
            seccomp_root: "/s".into(),
            memory: 1 << 30,
            page_sizes: vec![2 << 20, 1 << 30],
            ..Node::new(Arc::default())
        };
        sandbox(&pod, 0, &node)?;
        let first = pod.spec.as_ref().expect("spec").containers[0].clone();
        container(
            &pod,
            &first,
            Prepared {
                attempt: 2,
                image: "sha256:i",
                image_user,
                env: vec![("A".into(), "1".into())],
                mounts: vec![],
                devices: vec![],
                annotations: [
                    ("vendor".to_owned(), "x".to_owned()),
                    (annotation::RESTARTS.to_owned(), "9".to_owned()),
                ]
                .into(),
                cdi: vec!["vendor.com/gpu=0".into()],
                target: None,
                groups: vec![],
            },
            &node,
        )
    }

    fn with(context: Value) -> Value {
        json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": [{"name": "c", "image": "i", "args": ["$(A)"], "securityContext": context}]}})
    }

    #[test]
    fn labels_and_annotations_restore_a_restarted_agents_state() {
        let config = made(with(json!({})), (None, String::new())).expect("fine");
        assert_eq!(
            (
                config.args,
                config.log_path.as_str(),
                config.annotations[annotation::RESTARTS].as_str(),
                config.labels[label::POD_UID].as_str()
            ),
            (vec!["1".to_owned()], "c/2.log", "2", "u")
        );
        assert_eq!(config.annotations["vendor"], "x");
        assert_eq!(config.cdi_devices[0].name, "vendor.com/gpu=0");
        let linux = config.linux.expect("linux");
        assert_eq!(linux.resources.expect("resources").oom_score_adj, 1000);
        let security = linux.security_context.expect("security");
        assert_eq!(
            (
                security.run_as_user.expect("a user").value,
                security.masked_paths.len()
            ),
            (0, super::security::MASKED.len())
        );
    }

    #[test]
    fn stop_signals_map_to_the_runtimes_and_back() {
        let config = |signal: &str| {
            let mut pod = with(json!({}));
            pod["spec"]["containers"][0]["lifecycle"] = json!({"stopSignal": signal});
            made(pod, (None, String::new())).map(|c| c.stop_signal)
        };
        for (name, number) in [
            ("SIGTERM", 23),
            ("SIGRTMIN+1", 36),
            ("SIGRTMAX-14", 51),
            ("SIGRTMAX", 65),
        ] {
            assert_eq!(config(name), Ok(number));
            assert_eq!(
                signal_name(pb::Signal::try_from(number).expect("a signal")).as_deref(),
                Some(name)
            );
        }
        assert_eq!(
            made(with(json!({})), (None, String::new())).map(|c| c.stop_signal),
            Ok(0)
        );
        assert_eq!(signal_name(pb::Signal::RuntimeDefault), None);
        for wrong in ["TERM", "RUNTIME_DEFAULT", "15"] {
            assert!(
                config(wrong).is_err_and(|e| e.message.contains(wrong)),
                "{wrong}"
            );
        }
    }

    #[test]
    fn run_as_non_root_rejects_root_and_profiles_fail_closed() {
        let cases = [
            (
                json!({"runAsNonRoot": true}),
                (None, String::new()),
                Some("image will run as root"),
            ),
            (
                json!({"runAsNonRoot": true}),
                (None, "app".to_owned()),
                Some("non-numeric user (app)"),
            ),
            (
                json!({"runAsNonRoot": true}),
                (Some(5), String::new()),
                None,
            ),
            (
                json!({"runAsNonRoot": true, "runAsUser": 0}),
                (Some(5), String::new()),
                Some("breaks non-root policy"),
            ),
            (
                json!({"seccompProfile": {"type": "Localhost", "localhostProfile": ""}}),
                (None, String::new()),
                Some("localhostProfile must be set"),
            ),
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
                Some(text) => assert!(
                    result.as_ref().is_err_and(|e| e.message.contains(text)),
                    "{context}: {result:?}"
                ),
            }
        }
    }
}
