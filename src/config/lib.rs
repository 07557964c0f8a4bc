//! KubeletConfiguration v1beta1: the configuration of an agent from files and flags, as one immutable value.
//!
//! Every field of the format is known by name. A field that is not honoured yet, or that does not exist, is reported at
//! start and has no effect. The kubelet also reports and ignores unknown fields (`DecodeKubeletConfiguration` in
//! `pkg/kubelet/kubeletconfig/util/codec/codec.go`).

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
mod yaml;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use holdfast_core::image::gc::Rules as ImageRules;
use holdfast_core::image::pulled::Policy;
use holdfast_core::node::cgroup_tree::Rules as Enforcement;
use holdfast_core::node::collection::ContainerRules;
use holdfast_core::node::eviction::Settings as Eviction;
use holdfast_core::node::managers::Rules as Managers;
use holdfast_core::node::offline::OfflineStart;
use holdfast_core::node::shutdown::Periods;
use holdfast_core::pod::resources::Amounts;

pub use fields::table as fields_table;
pub use load::{load, load_all};
pub(crate) use logging::Logging;
pub use serving::Serving;
pub use yaml::lenient;

/// Why a configuration cannot be used. Names the field, the value and the remedy.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("the configuration file {0} cannot be read: {1}")]
    Read(PathBuf, String),
    /// The file is not YAML or JSON of the right shape.
    #[error("the configuration file {0} is not a KubeletConfiguration: {1}")]
    Parse(PathBuf, String),
    /// The value of a field is invalid.
    #[error("{field}: {value:?} is invalid: {remedy}")]
    Field {
        /// The path of the field.
        field: String,
        /// Its value.
        value: String,
        /// The remedy, as a phrase.
        remedy: String,
    },
}

/// The rotation of container logs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logs {
    /// A larger log is rotated; in bytes.
    pub max_size: u64,
    /// Maximum number of files of a log.
    pub max_files: usize,
    /// Interval between checks of the logs.
    pub interval: Duration,
    /// Maximum number of rotated logs that are compressed concurrently.
    pub workers: usize,
}

/// The cgroups of processes that do not belong to pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OwnCgroups {
    /// The agent's own (`kubeletCgroups`); `None` leaves the agent where it is.
    pub agent: Option<String>,
    /// The cgroup for processes that would otherwise be in the root cgroup (`systemCgroups`).
    pub system: Option<String>,
}

/// The resolved configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The node's name.
    pub node_name: String,
    /// The addresses of `--node-ip`: none, one, or two of different families.
    pub node_ips: Vec<IpAddr>,
    /// Whether an IPv6 address is preferred if none is given (`--node-ip=::`).
    pub prefers_ipv6: bool,
    /// Whether `--node-ip` is given, even with only a family.
    pub has_node_ip: bool,
    /// Whether a cloud controller initialises the node (`--cloud-provider=external`).
    pub external_cloud: bool,
    /// `--kubeconfig`; `None` runs static pods only.
    pub kubeconfig: Option<PathBuf>,
    /// `--bootstrap-kubeconfig`: the credentials for requesting the first certificate.
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// Whether the client certificate is renewed before it expires.
    pub rotate_certificates: bool,
    /// `--root-dir`.
    pub root_dir: PathBuf,
    /// `--cert-dir`.
    pub cert_dir: PathBuf,
    /// `--device-plugin-dir`.
    pub device_plugin_dir: PathBuf,
    /// `--pod-network-template`; `None` if another program writes the CNI configuration.
    pub pod_network_template: Option<PathBuf>,
    /// The feature gates that are set.
    pub feature_gates: BTreeMap<String, bool>,
    /// Extra labels of the node.
    pub node_labels: BTreeMap<String, String>,
    /// Whether the agent creates its Node object.
    pub register_node: bool,
    /// Taints of a new Node object.
    pub register_with_taints: Vec<k8s_openapi::api::core::v1::Taint>,
    /// `spec.providerID`.
    pub provider_id: Option<String>,
    /// The endpoint of the runtime.
    pub runtime_endpoint: String,
    /// The endpoint of the image service, if it differs from the runtime's.
    pub image_endpoint: Option<String>,
    /// The deadline of ordinary calls to the runtime.
    pub runtime_timeout: Duration,
    /// The directory of static pods.
    pub static_pod_path: Option<PathBuf>,
    /// The URL of static pods.
    pub static_pod_url: Option<String>,
    /// The headers of requests to that URL.
    pub static_pod_url_header: Vec<(String, String)>,
    /// Interval between requests to that URL.
    pub http_check: Duration,
    /// Interval at which the directory is listed even without changes.
    pub file_check: Duration,
    /// The directory of pod logs.
    pub pod_logs_dir: PathBuf,
    /// Interval at which a pod is reconciled even without changes.
    pub sync_frequency: Duration,
    /// The cluster's DNS servers.
    pub cluster_dns: Vec<String>,
    /// The cluster's domain.
    pub cluster_domain: String,
    /// The resolv.conf that pods inherit; empty for none.
    pub resolv_conf: String,
    /// Interval at which the node's status is computed.
    pub node_status_update: Duration,
    /// Interval at which an unchanged status is reported nevertheless, with a jitter of half of it.
    pub node_status_report: Duration,
    /// Duration of the node's lease, in seconds.
    pub lease_seconds: i32,
    /// Maximum number of images in the node's status; negative for all.
    pub max_images: i64,
    /// The cgroup that contains `kubepods`.
    pub cgroup_root: String,
    /// The cgroups of the agent and of the system's processes.
    pub own_cgroups: OwnCgroups,
    /// Whether systemd creates cgroups if the runtime does not report its driver.
    pub systemd_cgroups: bool,
    /// Maximum number of pods on the node.
    pub max_pods: i64,
    /// Maximum number of pods for each processor; 0 for no limit.
    pub pods_per_core: i64,
    /// The pod CIDR if there is no Node object that has one.
    pub pod_cidr: Option<String>,
    /// Whether ephemeral storage is a resource with enforced limits (`localStorageCapacityIsolation`).
    pub ephemeral_storage: bool,
    /// The agent's own `oom_score_adj`.
    pub oom_score_adj: i32,
    /// Maximum number of files that the agent may open.
    pub max_open_files: u64,
    /// Whether the agent refuses to start on a machine with swap.
    pub refuses_swap: bool,
    /// Whether the agent refuses to start on cgroup v1. The kubelet refuses by default; this agent supports both
    /// versions, and refuses only if a file sets this.
    pub refuses_cgroup_v1: bool,
    /// Whether kernel settings that differ from the kubelet's are an error (`protectKernelDefaults`).
    pub protects_kernel: bool,
    /// Maximum number of processes of a pod.
    pub pod_pids: Option<i64>,
    /// Maximum number of concurrent pulls.
    pub parallel_pulls: usize,
    /// Pulls per second (0: any number), and the burst.
    pub pull_quota: (f64, f64),
    /// When a pod must prove that it could have pulled an image itself.
    pub pull_verification: Policy,
    /// `--image-credential-provider-config`.
    pub credential_providers: Option<PathBuf>,
    /// `--image-credential-provider-bin-dir`.
    pub credential_programs: Option<PathBuf>,
    /// The behaviour of a start without an apiserver (`--offline-start`).
    pub offline_start: OfflineStart,
    /// The reservation for the system and for Kubernetes.
    pub reserved: Amounts,
    /// The limits that cgroups enforce.
    pub enforcement: Enforcement,
    /// Which pods get exclusive processors, and how resources are aligned.
    pub managers: Managers,
    /// Whether containers without a seccomp profile get the runtime's default profile.
    pub seccomp_default: bool,
    /// The maximum crash-loop back-off.
    pub max_backoff: Duration,
    /// The period of CPU quotas in microseconds; `None` if quotas are not enforced.
    pub cpu_period: Option<u64>,
    /// Whether the OOM killer kills a single process instead of the whole container.
    pub single_process_oom_kill: bool,
    /// Sysctls that are allowed in addition to the safe ones; a final `*` matches anything.
    pub unsafe_sysctls: Vec<String>,
    /// The rotation of container logs.
    pub logs: Logs,
    /// Events posted per second (0: any number), and the burst.
    pub event_pace: (f64, f64),
    /// Whether the agent creates the iptables chains that other programs expect.
    pub iptables_chains: bool,
    /// Requests to the apiserver per second, and the burst. Watches, events, heartbeats and reviews do not count.
    pub api_pace: (f64, f64),
    /// Whether containers may use swap in proportion to their memory request (`memorySwap.swapBehavior`:
    /// `LimitedSwap`).
    pub limited_swap: bool,
    /// Number of ids of a pod with a user namespace (`userNamespaces.idsPerPod`): a multiple of 65536.
    pub ids_per_pod: u32,
    /// When unused images are removed.
    pub image_rules: ImageRules,
    /// How many exited containers are kept.
    pub dead_containers: ContainerRules,
    /// When pods are evicted because the node is short of a resource.
    pub eviction: Eviction,
    /// How long a shutdown of the machine waits for pods.
    pub shutdown: Periods,
    /// The file over the defaults of the format.
    pub effective: Value,
    /// The agent's HTTP API.
    pub serving: Serving,
    /// How the agent logs.
    pub logging: Logging,
    /// Fields that differ from the default and are not honoured.
    pub not_honoured: Vec<String>,
    /// Problems for which a strict decoder would have refused the files: unknown and repeated fields.
    pub unread: Vec<String>,
}

/// The values of flags; each overrides the file.
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
    /// `--v`; 0 if it is not given.
    pub verbosity: u8,
    /// `--root-dir`.
    pub root_dir: Option<PathBuf>,
    /// `--cert-dir`.
    pub cert_dir: Option<PathBuf>,
    /// `--device-plugin-dir`.
    pub device_plugin_dir: Option<PathBuf>,
    /// `--pod-network-template`.
    pub pod_network_template: Option<PathBuf>,
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
