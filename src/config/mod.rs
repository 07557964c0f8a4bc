//! KubeletConfiguration v1beta1: what an agent is told by file and flags, as one immutable value.
//!
//! Every field of the format is known by name. One that is not honoured yet is reported at start; one
//! that does not exist is refused, with its name.

mod allocatable;
mod containers;
mod document;
mod effective;
mod eviction;
mod fields;
mod images;
mod load;
mod logging;
mod managers;
mod resolve;
mod serving;
mod shutdown;
mod values;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use crate::core::image::gc::Rules as ImageRules;
use crate::core::image::pulled::Policy;
use crate::core::node::cgroup_tree::Rules as Enforcement;
use crate::core::node::collection::ContainerRules;
use crate::core::node::eviction::Settings as Eviction;
use crate::core::node::managers::Rules as Managers;
use crate::core::node::offline::OfflineStart;
use crate::core::node::shutdown::Periods;
use crate::core::pod::resources::Amounts;

pub use fields::table as fields_table;
pub use load::{load, load_all};
pub use logging::Logging;
pub use serving::Serving;

/// Why a configuration cannot be used. Names the field, the value and the remedy.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("the configuration file {0} cannot be read: {1}")]
    Read(PathBuf, String),
    /// It is not YAML or JSON of the right shape.
    #[error("the configuration file {0} is not a KubeletConfiguration: {1}")]
    Parse(PathBuf, String),
    /// A field's value will not do.
    #[error("{field}: {value:?} is invalid: {remedy}")]
    Field {
        /// The path of the field.
        field: String,
        /// What it is.
        value: String,
        /// What it should be.
        remedy: String,
    },
}

/// How container logs are rotated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logs {
    /// A log larger than this is rotated, in bytes.
    pub max_size: u64,
    /// How many files a log may have.
    pub max_files: usize,
    /// How often logs are looked at.
    pub interval: Duration,
    /// How many are rotated at once.
    pub workers: usize,
}

/// The cgroups of processes that are no pods'.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OwnCgroups {
    /// The agent's own (`kubeletCgroups`); it stays where it is without one.
    pub agent: Option<String>,
    /// That of all processes that would else be in the root cgroup (`systemCgroups`).
    pub system: Option<String>,
}

/// The resolved configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The node's name.
    pub node_name: String,
    /// The addresses given by `--node-ip`: none, one, or two of different families.
    pub node_ips: Vec<IpAddr>,
    /// Whether an IPv6 address is preferred where none is given (`--node-ip=::`).
    pub prefers_ipv6: bool,
    /// Whether `--node-ip` says anything, be it a family alone.
    pub has_node_ip: bool,
    /// Whether a cloud controller initialises the node (`--cloud-provider=external`).
    pub external_cloud: bool,
    /// `--kubeconfig`; without one the agent runs static pods only.
    pub kubeconfig: Option<PathBuf>,
    /// `--bootstrap-kubeconfig`: with what the first certificate is asked for.
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// Whether the client certificate is renewed before it ends.
    pub rotate_certificates: bool,
    /// `--root-dir`.
    pub root_dir: PathBuf,
    /// `--cert-dir`.
    pub cert_dir: PathBuf,
    /// `--device-plugin-dir`.
    pub device_plugin_dir: PathBuf,
    /// The feature gates that are set.
    pub feature_gates: BTreeMap<String, bool>,
    /// Extra labels of the node.
    pub node_labels: BTreeMap<String, String>,
    /// Whether the agent makes its Node object.
    pub register_node: bool,
    /// Taints of a new Node object.
    pub register_with_taints: Vec<k8s_openapi::api::core::v1::Taint>,
    /// `spec.providerID`.
    pub provider_id: Option<String>,
    /// The runtime's socket.
    pub runtime_endpoint: String,
    /// The socket of its image service, where that is another one.
    pub image_endpoint: Option<String>,
    /// The deadline of ordinary calls to it.
    pub runtime_timeout: Duration,
    /// The directory of static pods.
    pub static_pod_path: Option<PathBuf>,
    /// The URL of static pods, and the headers it is asked with.
    pub static_pod_url: Option<String>,
    /// Its headers.
    pub static_pod_url_header: Vec<(String, String)>,
    /// How often it is asked.
    pub http_check: Duration,
    /// How often the directory is listed in any case.
    pub file_check: Duration,
    /// The directory of pod logs.
    pub pod_logs_dir: PathBuf,
    /// How often a pod is looked at in any case.
    pub sync_frequency: Duration,
    /// The cluster's DNS servers.
    pub cluster_dns: Vec<String>,
    /// The cluster's domain.
    pub cluster_domain: String,
    /// The resolv.conf that pods inherit; empty for none.
    pub resolv_conf: String,
    /// How often the node's status is computed.
    pub node_status_update: Duration,
    /// How often an unchanged status is reported all the same, give or take a half.
    pub node_status_report: Duration,
    /// How long the node's lease lasts, in seconds.
    pub lease_seconds: i32,
    /// How many images the node reports; negative for all.
    pub max_images: i64,
    /// The cgroup below which `kubepods` lies.
    pub cgroup_root: String,
    /// Where the agent and the system's processes are to be.
    pub own_cgroups: OwnCgroups,
    /// Who makes cgroups where the runtime does not say.
    pub systemd_cgroups: bool,
    /// How many pods the node takes.
    pub max_pods: i64,
    /// How many pods the node takes for each processor; 0 for any number.
    pub pods_per_core: i64,
    /// The addresses of pods where there is no Node object that tells them.
    pub pod_cidr: Option<String>,
    /// Whether ephemeral storage is a resource, and limits on it are held (`localStorageCapacityIsolation`).
    pub ephemeral_storage: bool,
    /// The agent's own `oom_score_adj`.
    pub oom_score_adj: i32,
    /// How many files the agent may have open.
    pub max_open_files: u64,
    /// Whether the agent does not start on a machine that swaps.
    pub refuses_swap: bool,
    /// Whether it does not start on cgroup v1. The kubelet refuses by default; this agent is at home on both, and
    /// refuses only where a file says so.
    pub refuses_cgroup_v1: bool,
    /// Whether the kernel's settings must be as the kubelet wants them (`protectKernelDefaults`).
    pub protects_kernel: bool,
    /// The number of processes a pod may have.
    pub pod_pids: Option<i64>,
    /// How many images are pulled at once.
    pub parallel_pulls: usize,
    /// How many pulls are begun a second (0: any number), and how many at once.
    pub pull_quota: (f64, f64),
    /// When a pod must show that it could have pulled an image itself.
    pub pull_verification: Policy,
    /// `--image-credential-provider-config`.
    pub credential_providers: Option<PathBuf>,
    /// `--image-credential-provider-bin-dir`.
    pub credential_programs: Option<PathBuf>,
    /// What a start without an apiserver does (`--offline-start`).
    pub offline_start: OfflineStart,
    /// What is set aside for the system and for Kubernetes.
    pub reserved: Amounts,
    /// What of that is held by cgroups.
    pub enforcement: Enforcement,
    /// Who gets processors for himself, and how resources are aligned.
    pub managers: Managers,
    /// Whether containers without a seccomp profile get the runtime's.
    pub seccomp_default: bool,
    /// The longest crash-loop back-off.
    pub max_backoff: Duration,
    /// The period of CPU quotas in microseconds; none where quotas are not enforced.
    pub cpu_period: Option<u64>,
    /// Whether a process that runs out of memory dies alone.
    pub single_process_oom_kill: bool,
    /// Sysctls that are allowed besides the safe ones; a `*` at the end stands for anything.
    pub unsafe_sysctls: Vec<String>,
    /// How container logs are rotated.
    pub logs: Logs,
    /// How many events are posted a second (0: any number), and how many at once.
    pub event_pace: (f64, f64),
    /// Whether the agent makes the chains of iptables that others look for.
    pub iptables_chains: bool,
    /// How many requests are sent to the apiserver a second, and how many at once. Watches, events,
    /// heartbeats and reviews do not count.
    pub api_pace: (f64, f64),
    /// Whether containers may swap within their share (`memorySwap.swapBehavior`: `LimitedSwap`).
    pub limited_swap: bool,
    /// How many ids a pod with a user namespace gets (`userNamespaces.idsPerPod`): a multiple of 65536.
    pub ids_per_pod: u32,
    /// When images are removed that nothing uses.
    pub image_rules: ImageRules,
    /// How many containers stay that have ended.
    pub dead_containers: ContainerRules,
    /// When pods are evicted because the node is short of something.
    pub eviction: Eviction,
    /// How long a shutdown of the machine waits for pods.
    pub shutdown: Periods,
    /// The file as it stands, over the defaults of the format.
    pub effective: Value,
    /// The agent's HTTP API.
    pub serving: Serving,
    /// How it logs.
    pub logging: Logging,
    /// Fields that were set to something but the default, and are not honoured.
    pub not_honoured: Vec<String>,
    /// What a strict reading of the files would have refused: unknown and repeated fields.
    pub unread: Vec<String>,
}

/// What flags say; each wins over the file.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    /// `--hostname-override`.
    pub hostname: Option<String>,
    /// `--node-ip`.
    pub node_ip: Option<String>,
    /// `--cloud-provider`.
    pub cloud_provider: Option<String>,
    /// `--kubeconfig`.
    pub kubeconfig: Option<PathBuf>,
    /// `--bootstrap-kubeconfig`.
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// `--v`; 0 where it is not given.
    pub verbosity: u8,
    /// `--root-dir`.
    pub root_dir: Option<PathBuf>,
    /// `--cert-dir`.
    pub cert_dir: Option<PathBuf>,
    /// `--device-plugin-dir`.
    pub device_plugin_dir: Option<PathBuf>,
    /// `--node-labels`.
    pub node_labels: Option<String>,
    /// `--register-node`.
    pub register_node: Option<bool>,
    /// `--container-runtime-endpoint`.
    pub runtime_endpoint: Option<String>,
    /// `--pod-manifest-path`.
    pub static_pod_path: Option<PathBuf>,
    /// `--cgroup-root`.
    pub cgroup_root: Option<String>,
    /// `--max-pods`.
    pub max_pods: Option<i64>,
    /// `--cluster-dns`.
    pub cluster_dns: Option<String>,
    /// `--cluster-domain`.
    pub cluster_domain: Option<String>,
    /// `--image-credential-provider-config`.
    pub credential_providers: Option<PathBuf>,
    /// `--image-credential-provider-bin-dir`.
    pub credential_programs: Option<PathBuf>,
    /// `--offline-start`.
    pub offline_start: Option<String>,
    /// `--maximum-dead-containers`.
    pub maximum_dead_containers: Option<i32>,
    /// `--maximum-dead-containers-per-container`.
    pub maximum_dead_containers_per_container: Option<i32>,
    /// `--minimum-container-ttl-duration`.
    pub minimum_container_ttl_duration: Option<String>,
}

#[cfg(test)]
mod tests;
