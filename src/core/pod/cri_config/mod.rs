//! Pods as runtime configuration: sandbox and container messages (upstream's `kuberuntime_sandbox.go`). Pure.

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
use crate::core::fault::Fault;
use crate::core::{meta, pod};
pub use mounts::{recursive_read_only, sub_path, volume_mount};
pub use resources::{Swap, may_swap, resources};
use resources::{overhead, whole_resources};
pub use security::apparmor_refusal;
use security::{groups_policy, security, selinux};

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
    /// The grace period of the pod's deletion.
    pub const DELETION_GRACE: &str = "io.kubernetes.pod.deletionGracePeriod";
    /// The preStop hook, as JSON.
    pub const PRE_STOP: &str = "io.kubernetes.container.preStopHandler";
    /// The ports, as JSON.
    pub const PORTS: &str = "io.kubernetes.container.ports";
}

/// What a pod's messages need besides the pod.
#[derive(Debug, Clone)]
pub struct Node {
    /// Name resolution.
    pub resolver: Arc<Resolver>,
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
    /// How memory is protected and throttled, and the bytes of it that pods may have (cgroup v2 only).
    pub memory_qos: Option<(MemoryQos, u64)>,
    /// The period of CPU quotas in microseconds; none where quotas are not enforced.
    pub cpu_period: Option<u64>,
    /// The sizes of huge pages that the kernel knows, in bytes.
    pub page_sizes: Vec<u64>,
    /// Whether one process that runs out of memory takes the whole container with it (cgroup v2 only).
    pub group_oom: bool,
    /// What containers may have of the machine's swap; none where the kernel does not account for it.
    pub swap: Option<Swap>,
    /// Paths under `/sys` that are masked because this machine has them.
    pub masked: Vec<String>,
    /// The runtime's handler; empty for the default one.
    pub handler: String,
    /// The ids of the pod's user namespace, if it has one.
    pub users: Option<Mappings>,
    /// Whether the runtime can make mounts read-only with all that is mounted below them.
    pub recursive_read_only: bool,
    /// Which processors and memory containers are bound to.
    pub pinning: Arc<Pinning>,
}

impl Node {
    /// With nothing but name resolution, and the field's defaults.
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

/// The sandbox of a pod. The error is a sandbox error.
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

/// What a pod's containers have together, and its overhead, as a sandbox's message says it.
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
            // Of one container's ports a name, or an address and port, counts once.
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
    /// The restart count, which is in the name of its log, too.
    pub attempt: u32,
    /// The image's id in the runtime.
    pub image: &'a str,
    /// The image's user: uid, else name.
    pub image_user: (Option<i64>, String),
    /// Its environment in order, everything expanded. Values of secrets need not be text.
    pub env: Vec<(String, Vec<u8>)>,
    /// What is mounted, in this order.
    pub mounts: Vec<pb::Mount>,
    /// Devices of block volumes and of device plugins.
    pub devices: Vec<pb::Device>,
    /// Annotations that device plugins add.
    pub annotations: BTreeMap<String, String>,
    /// The full names of CDI devices.
    pub cdi: Vec<String>,
    /// The container whose processes an ephemeral one shares.
    pub target: Option<String>,
    /// Groups that the pod's persistent volumes ask for.
    pub groups: Vec<i64>,
}

/// The signal that asks a container to end: its own setting, else the image's (KEP-4960). The runtime's enum
/// spells out the sign of real-time signals.
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

/// A signal of the runtime's as the API spells it.
#[must_use]
pub fn signal_name(signal: pb::Signal) -> Option<String> {
    (signal != pb::Signal::RuntimeDefault).then(|| {
        signal
            .as_str_name()
            .replace("PLUS", "+")
            .replace("MINUS", "-")
    })
}

/// A container's annotations: what whoever finds it later must know, and what device plugins add.
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
    // What whoever stops this container without its pod's spec must know.
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

/// Mounts as a container of a pod with users of its own sees them: what is root's is its root's, the agent's own files
/// (`/etc/hosts`, the termination log) and those of device plugins included.
fn mapped(mut mounts: Vec<pb::Mount>, node: &Node) -> Vec<pb::Mount> {
    if let Some(users) = &node.users {
        for mount in &mut mounts {
            mount.uid_mappings = ids(&users.uid_mappings);
            mount.gid_mappings = ids(&users.gid_mappings);
        }
    }
    mounts
}

/// A container's message. The error is a `CreateContainerConfigError`.
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
    fn a_container_carries_what_a_restarted_agent_needs() {
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
    fn stop_signals_are_named_as_the_runtime_does_and_back() {
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
    fn root_is_refused_where_it_is_not_wanted_and_profiles_fail_closed() {
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
