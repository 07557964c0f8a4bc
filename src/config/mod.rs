//! KubeletConfiguration v1beta1: what an agent is told by file and flags, as one immutable value.
//!
//! Every field of the format is known by name. One that is not honoured yet is reported at start; one
//! that does not exist is refused, with its name.

mod effective;
mod fields;
mod logging;
mod serving;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::core::image::gc::Rules as ImageRules;
use crate::core::image::pulled::Policy;
use crate::core::node::features::{self, Objection};
use crate::core::pod::resources::Amounts;
use crate::core::quantity::Quantity;
use crate::core::time::duration;

pub use fields::table as fields_table;
pub use logging::Logging;
pub use serving::Serving;

/// Fields of the format that are read but not honoured by this version.
const NOT_HONOURED: &[&str] = &[
    "tlsCurvePreferences",
    "enableContentionProfiling",
    "enableProfilingHandler",
    "oomScoreAdj",
    "streamingConnectionIdleTimeout",
    "volumeStatsAggPeriod",
    "kubeletCgroups",
    "systemCgroups",
    "cgroupsPerQOS",
    "cpuManagerPolicy",
    "cpuManagerPolicyOptions",
    "cpuManagerReconcilePeriod",
    "memoryManagerPolicy",
    "reservedMemory",
    "topologyManagerPolicy",
    "topologyManagerScope",
    "topologyManagerPolicyOptions",
    "qosReserved",
    "hairpinMode",
    "podsPerCore",
    "podCIDR",
    "maxOpenFiles",
    "contentType",
    "kubeAPIQPS",
    "kubeAPIBurst",
    "evictionHard",
    "evictionSoft",
    "evictionSoftGracePeriod",
    "evictionMinimumReclaim",
    "evictionPressureTransitionPeriod",
    "evictionMaxPodGracePeriod",
    "mergeDefaultEvictionSettings",
    "enableControllerAttachDetach",
    "protectKernelDefaults",
    "makeIPTablesUtilChains",
    "iptablesMasqueradeBit",
    "iptablesDropBit",
    "failSwapOn",
    "failCgroupV1",
    "configMapAndSecretChangeDetectionStrategy",
    "reservedSystemCPUs",
    "systemReservedCgroup",
    "kubeReservedCgroup",
    "enforceNodeAllocatable",
    "volumePluginDir",
    "kernelMemcgNotification",
    "shutdownGracePeriod",
    "shutdownGracePeriodCriticalPods",
    "shutdownGracePeriodByPodPriority",
    "memoryThrottlingFactor",
    "memoryReservationPolicy",
    "localStorageCapacityIsolation",
    "imageServiceEndpoint",
    "userNamespaces",
    "showHiddenMetricsForVersion",
    "nodeStatusReportFrequency",
];

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

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct CrashLoop {
    max_container_restart_period: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct MemorySwap {
    swap_behavior: Option<String>,
}

/// The honoured fields as they stand in a file.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Document {
    /// All of it, as it stands.
    #[serde(skip)]
    raw: Value,
    #[serde(rename = "apiVersion")]
    api_version: Option<String>,
    kind: Option<String>,
    rotate_certificates: Option<bool>,
    static_pod_path: Option<String>,
    #[serde(rename = "staticPodURL")]
    static_pod_url: Option<String>,
    #[serde(rename = "staticPodURLHeader")]
    static_pod_url_header: Option<BTreeMap<String, Vec<String>>>,
    http_check_frequency: Option<String>,
    pod_logs_dir: Option<String>,
    sync_frequency: Option<String>,
    file_check_frequency: Option<String>,
    cluster_domain: Option<String>,
    #[serde(rename = "clusterDNS")]
    cluster_dns: Option<Vec<String>>,
    resolv_conf: Option<String>,
    node_status_update_frequency: Option<String>,
    node_lease_duration_seconds: Option<i32>,
    node_status_max_images: Option<i64>,
    cgroup_root: Option<String>,
    cgroup_driver: Option<String>,
    runtime_request_timeout: Option<String>,
    max_pods: Option<i64>,
    pod_pids_limit: Option<i64>,
    serialize_image_pulls: Option<bool>,
    max_parallel_image_pulls: Option<usize>,
    system_reserved: Option<BTreeMap<String, String>>,
    kube_reserved: Option<BTreeMap<String, String>>,
    seccomp_default: Option<bool>,
    #[serde(rename = "providerID")]
    provider_id: Option<String>,
    crash_loop_back_off: Option<CrashLoop>,
    register_node: Option<bool>,
    register_with_taints: Option<Vec<k8s_openapi::api::core::v1::Taint>>,
    container_runtime_endpoint: Option<String>,
    #[serde(rename = "singleProcessOOMKill")]
    single_process_oom_kill: Option<bool>,
    #[serde(rename = "cpuCFSQuota")]
    cpu_cfs_quota: Option<bool>,
    #[serde(rename = "cpuCFSQuotaPeriod")]
    cpu_cfs_quota_period: Option<String>,
    allowed_unsafe_sysctls: Option<Vec<String>>,
    #[serde(rename = "registryPullQPS")]
    registry_pull_qps: Option<i32>,
    registry_burst: Option<i32>,
    image_pull_credentials_verification_policy: Option<String>,
    preloaded_images_verification_allowlist: Option<Vec<String>>,
    container_log_max_size: Option<String>,
    container_log_max_files: Option<i32>,
    // One at a time is what we do; more would only read the disk harder.
    #[serde(rename = "containerLogMaxWorkers")]
    _container_log_max_workers: Option<i32>,
    container_log_monitor_interval: Option<String>,
    #[serde(rename = "eventRecordQPS")]
    event_record_qps: Option<i32>,
    event_burst: Option<i32>,
    memory_swap: Option<MemorySwap>,
    #[serde(rename = "imageMinimumGCAge")]
    image_minimum_gc_age: Option<String>,
    #[serde(rename = "imageMaximumGCAge")]
    image_maximum_gc_age: Option<String>,
    #[serde(rename = "imageGCHighThresholdPercent")]
    image_gc_high_threshold_percent: Option<i32>,
    #[serde(rename = "imageGCLowThresholdPercent")]
    image_gc_low_threshold_percent: Option<i32>,
    feature_gates: Option<BTreeMap<String, bool>>,
    #[serde(flatten)]
    serving: serving::Fields,
    #[serde(flatten)]
    logging: logging::Fields,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
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
}

/// The resolved configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The node's name.
    pub node_name: String,
    /// The addresses given by `--node-ip`.
    pub node_ips: Vec<IpAddr>,
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
    /// How long the node's lease lasts, in seconds.
    pub lease_seconds: i32,
    /// How many images the node reports; negative for all.
    pub max_images: i64,
    /// The cgroup below which `kubepods` lies.
    pub cgroup_root: String,
    /// Who makes cgroups where the runtime does not say.
    pub systemd_cgroups: bool,
    /// How many pods the node takes.
    pub max_pods: i64,
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
    /// What is set aside for the system and for Kubernetes.
    pub reserved: Amounts,
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
    /// Whether containers may swap within their share (`memorySwap.swapBehavior`: `LimitedSwap`).
    pub limited_swap: bool,
    /// When images are removed that nothing uses.
    pub image_rules: ImageRules,
    /// The file as it stands, over the defaults of the format.
    pub effective: Value,
    /// The agent's HTTP API.
    pub serving: Serving,
    /// How it logs.
    pub logging: Logging,
    /// Fields that were set but are not honoured.
    pub not_honoured: Vec<String>,
}

/// What flags say; each wins over the file.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    /// `--hostname-override`.
    pub hostname: Option<String>,
    /// `--node-ip`.
    pub node_ip: Option<String>,
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
}

fn invalid(field: &str, value: impl std::fmt::Debug, remedy: &str) -> ConfigError {
    ConfigError::Field {
        field: field.into(),
        value: format!("{value:?}").trim_matches('"').to_owned(),
        remedy: remedy.into(),
    }
}

fn time(field: &str, text: Option<&String>, default: u64) -> Result<Duration, ConfigError> {
    match text {
        None => Ok(Duration::from_secs(default)),
        Some(text) => duration(text)
            .map(|d| {
                if d.is_zero() {
                    Duration::from_secs(default)
                } else {
                    d
                }
            })
            .ok_or_else(|| invalid(field, text, "use a duration such as 10s or 1m30s")),
    }
}

fn logs(
    size: Option<&String>,
    files: Option<i32>,
    interval: Option<&String>,
) -> Result<Logs, ConfigError> {
    let text = size.map_or("10Mi", String::as_str);
    let bytes = text
        .parse::<Quantity>()
        .ok()
        .and_then(|q| u64::try_from(q.units()).ok());
    Ok(Logs {
        max_size: bytes.filter(|b| *b > 0).ok_or_else(|| {
            invalid(
                "containerLogMaxSize",
                text,
                "use a positive quantity such as 10Mi",
            )
        })?,
        max_files: usize::try_from(files.unwrap_or(5))
            .ok()
            .filter(|f| *f > 1)
            .ok_or_else(|| invalid("containerLogMaxFiles", files, "use 2 or more"))?,
        interval: time("containerLogMonitorInterval", interval, 10)?,
    })
}

fn limited_swap(swap: Option<MemorySwap>) -> Result<bool, ConfigError> {
    match swap.and_then(|s| s.swap_behavior).as_deref() {
        None | Some("" | "NoSwap") => Ok(false),
        Some("LimitedSwap") => Ok(true),
        Some(other) => Err(invalid(
            "memorySwap.swapBehavior",
            other,
            "use NoSwap or LimitedSwap",
        )),
    }
}

fn image_rules(document: &Document) -> Result<ImageRules, ConfigError> {
    let percent = |field: &str, value: Option<i32>, default: i32| {
        let value = value.unwrap_or(default);
        u8::try_from(value)
            .ok()
            .filter(|p| *p <= 100)
            .ok_or_else(|| invalid(field, value, "use a percentage between 0 and 100"))
    };
    let age = |field: &str, text: Option<&String>, default: &str| {
        let text = text.map_or(default, String::as_str);
        let age = duration(text).and_then(|d| jiff::SignedDuration::try_from(d).ok());
        age.ok_or_else(|| invalid(field, text, "use a duration such as 2m or 168h"))
    };
    let rules = ImageRules {
        high: percent(
            "imageGCHighThresholdPercent",
            document.image_gc_high_threshold_percent,
            85,
        )?,
        low: percent(
            "imageGCLowThresholdPercent",
            document.image_gc_low_threshold_percent,
            80,
        )?,
        // kubeadm writes zeros for what it leaves to the kubelet.
        minimum_age: Some(age(
            "imageMinimumGCAge",
            document.image_minimum_gc_age.as_ref(),
            "2m",
        )?)
        .filter(|age| !age.is_zero())
        .unwrap_or(jiff::SignedDuration::from_mins(2)),
        maximum_age: Some(age(
            "imageMaximumGCAge",
            document.image_maximum_gc_age.as_ref(),
            "0s",
        )?)
        .filter(|age| !age.is_zero()),
    };
    if rules.low >= rules.high {
        return Err(invalid(
            "imageGCLowThresholdPercent",
            rules.low,
            "it must be below imageGCHighThresholdPercent",
        ));
    }
    if rules
        .maximum_age
        .is_some_and(|most| most <= rules.minimum_age)
    {
        return Err(invalid(
            "imageMaximumGCAge",
            &document.image_maximum_gc_age,
            "it must be longer than imageMinimumGCAge, or 0s",
        ));
    }
    Ok(rules)
}

fn url(field: &str, text: Option<String>) -> Result<Option<String>, ConfigError> {
    match text {
        Some(text) if !text.starts_with("http://") && !text.starts_with("https://") => {
            Err(invalid(field, text, "use a URL with http or https"))
        }
        text => Ok(text),
    }
}

fn verification(policy: Option<&str>, allowlist: Vec<String>) -> Result<Policy, ConfigError> {
    let policy = match policy.unwrap_or("NeverVerifyPreloadedImages") {
        "NeverVerify" => Policy::NeverVerify,
        "NeverVerifyPreloadedImages" => Policy::NeverVerifyPreloaded,
        "NeverVerifyAllowlistedImages" => return Ok(Policy::NeverVerifyAllowlisted(allowlist)),
        "AlwaysVerify" => Policy::AlwaysVerify,
        other => {
            let remedy = "use NeverVerify, NeverVerifyPreloadedImages, NeverVerifyAllowlistedImages or AlwaysVerify";
            return Err(invalid(
                "imagePullCredentialsVerificationPolicy",
                other,
                remedy,
            ));
        }
    };
    match allowlist.first() {
        None => Ok(policy),
        Some(_) => Err(invalid(
            "preloadedImagesVerificationAllowlist",
            allowlist,
            "it needs imagePullCredentialsVerificationPolicy NeverVerifyAllowlistedImages",
        )),
    }
}

fn both(
    config: Option<&PathBuf>,
    programs: Option<&PathBuf>,
) -> Result<Option<PathBuf>, ConfigError> {
    match (config, programs) {
        (Some(_), None) => Err(invalid(
            "--image-credential-provider-bin-dir",
            "",
            "set it too: it is where the plugins lie",
        )),
        (None, Some(_)) => Err(invalid(
            "--image-credential-provider-config",
            "",
            "set it too: it says which plugins there are",
        )),
        (config, _) => Ok(config.cloned()),
    }
}

fn period(text: Option<&String>) -> Result<u64, ConfigError> {
    let Some(text) = text else {
        return Ok(crate::core::pod::cgroup::PERIOD);
    };
    let micros = duration(text).and_then(|d| u64::try_from(d.as_micros()).ok());
    micros
        .filter(|m| (1_000..=1_000_000).contains(m))
        .ok_or_else(|| {
            invalid(
                "cpuCFSQuotaPeriod",
                text,
                "use a duration between 1ms and 1s",
            )
        })
}

fn unsafe_sysctls(patterns: Vec<String>) -> Result<Vec<String>, ConfigError> {
    match patterns
        .iter()
        .find(|p| !crate::core::pod::sysctl::is_namespaced(p))
    {
        None => Ok(patterns),
        Some(bad) => Err(invalid(
            "allowedUnsafeSysctls",
            bad,
            "only kernel.shm*, kernel.msg*, kernel.sem, fs.mqueue.* and net.* belong to a pod alone",
        )),
    }
}

fn at_least_zero(field: &str, value: Option<i32>, default: i32) -> Result<i32, ConfigError> {
    let value = value.unwrap_or(default);
    if value >= 0 {
        Ok(value)
    } else {
        Err(invalid(field, value, "use 0 or more"))
    }
}

fn read(path: &Path) -> Result<Value, ConfigError> {
    let text =
        std::fs::read_to_string(path).map_err(|e| ConfigError::Read(path.into(), e.to_string()))?;
    parse(&text).map_err(|why| ConfigError::Parse(path.into(), why))
}

/// A KubeletConfiguration, as it stands.
fn parse(text: &str) -> Result<Value, String> {
    let value: Value = serde_saphyr::from_str(text).map_err(|e| e.to_string())?;
    let of = |key: &str| value[key].as_str().unwrap_or_default();
    if of("kind") != "KubeletConfiguration" || of("apiVersion") != "kubelet.config.k8s.io/v1beta1" {
        let (version, kind) = (of("apiVersion"), of("kind"));
        return Err(format!(
            "expected apiVersion kubelet.config.k8s.io/v1beta1 and kind KubeletConfiguration, found {version:?} and {kind:?}"
        ));
    }
    Ok(value)
}

fn document(value: Value) -> Result<Document, String> {
    let mut document: Document =
        serde_json::from_value(value.clone()).map_err(|e| e.to_string())?;
    document.raw = value;
    Ok(document)
}

/// The drop-ins of a directory and those below it, in the order of their paths; only `*.conf` counts (kubelet spec, 16.1).
fn drop_ins(dir: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let failed = |e: std::io::Error| ConfigError::Read(dir.into(), e.to_string());
    let mut found = vec![];
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() {
            found.extend(drop_ins(&path)?);
        } else if path.extension().is_some_and(|e| e == "conf") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Reads the file, if one is named, and resolves everything. `hostname` is the machine's own name.
pub fn load(
    file: Option<&Path>,
    overrides: &Overrides,
    hostname: &str,
) -> Result<Config, ConfigError> {
    load_all(file, None, &Value::Null, overrides, hostname)
}

/// The same with drop-ins, each merged over what came before it, and with `fields` of flags, which win.
pub fn load_all(
    file: Option<&Path>,
    drop_in_dir: Option<&Path>,
    fields: &Value,
    overrides: &Overrides,
    hostname: &str,
) -> Result<Config, ConfigError> {
    let mut all = file
        .map(read)
        .transpose()?
        .unwrap_or_else(|| Value::Object(serde_json::Map::new()));
    for path in drop_in_dir.map(drop_ins).transpose()?.unwrap_or_default() {
        json_patch::merge(&mut all, &read(&path)?);
    }
    if !fields.is_null() {
        json_patch::merge(&mut all, fields);
    }
    let named = file.or(drop_in_dir).unwrap_or(Path::new("the flags"));
    let document = document(all).map_err(|why| ConfigError::Parse(named.into(), why))?;
    resolve(document, overrides, hostname)
}

/// What wishes of feature gates make no difference.
fn gates(wishes: Option<&BTreeMap<String, bool>>) -> Result<Vec<String>, ConfigError> {
    let mut ignored = vec![];
    for (name, wish) in wishes.into_iter().flatten() {
        match features::object(name, *wish) {
            Some(Objection::Refused(remedy)) => {
                return Err(invalid(&format!("featureGates.{name}"), wish, &remedy));
            }
            Some(Objection::Ignored(why)) => ignored.push(why),
            None => {}
        }
    }
    Ok(ignored)
}

fn resolve(document: Document, flags: &Overrides, hostname: &str) -> Result<Config, ConfigError> {
    let image_rules = image_rules(&document)?;
    let mut not_honoured = Vec::new();
    for (name, value) in &document.rest {
        if !NOT_HONOURED.contains(&name.as_str()) {
            return Err(invalid(
                name,
                value,
                "there is no such field in KubeletConfiguration v1beta1; check its spelling",
            ));
        }
        not_honoured.push(name.clone());
    }
    let (logging, ignored) = logging::resolve(&document.logging, flags.verbosity)?;
    let (serving, unspoken) = serving::resolve(&document.serving, document.kind.is_some())?;
    not_honoured.extend(ignored.into_iter().chain(unspoken));
    not_honoured.extend(gates(document.feature_gates.as_ref())?);
    let node_name = flags
        .hostname
        .as_deref()
        .unwrap_or(hostname)
        .trim()
        .to_lowercase();
    if node_name.is_empty()
        || node_name.len() > 253
        || !node_name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '.')
    {
        return Err(invalid(
            "--hostname-override",
            &node_name,
            "a node name consists of lower-case letters, digits, '-' and '.'",
        ));
    }
    let node_ips = flags
        .node_ip
        .iter()
        .flat_map(|t| t.split(','))
        .map(|t| {
            t.trim().parse::<IpAddr>().map_err(|_| {
                invalid(
                    "--node-ip",
                    t,
                    "use one IP address, or two of different families separated by a comma",
                )
            })
        })
        .collect::<Result<_, _>>()?;
    let mut node_labels = BTreeMap::new();
    for pair in flags
        .node_labels
        .iter()
        .flat_map(|t| t.split(','))
        .filter(|p| !p.is_empty())
    {
        let (key, value) = pair.split_once('=').ok_or_else(|| {
            invalid(
                "--node-labels",
                pair,
                "use key=value pairs separated by commas",
            )
        })?;
        node_labels.insert(key.to_owned(), value.to_owned());
    }
    let mut reserved = Amounts::new();
    for (field, map) in [
        ("systemReserved", &document.system_reserved),
        ("kubeReserved", &document.kube_reserved),
    ] {
        for (name, text) in map.iter().flatten() {
            let amount: Quantity = text.parse().map_err(|_| {
                invalid(
                    &format!("{field}.{name}"),
                    text,
                    "use a quantity such as 100m or 256Mi",
                )
            })?;
            let sum = reserved.entry(name.clone()).or_default();
            *sum = *sum + amount;
        }
    }
    let max_pods = flags.max_pods.or(document.max_pods).unwrap_or(110);
    if max_pods < 0 {
        return Err(invalid("maxPods", max_pods, "use 0 or more"));
    }
    let lease_seconds = document.node_lease_duration_seconds.unwrap_or(40);
    if lease_seconds <= 0 {
        return Err(invalid(
            "nodeLeaseDurationSeconds",
            lease_seconds,
            "use more than 0",
        ));
    }
    let systemd_cgroups = match document.cgroup_driver.as_deref() {
        None | Some("cgroupfs") => false,
        Some("systemd") => true,
        Some(other) => return Err(invalid("cgroupDriver", other, "use cgroupfs or systemd")),
    };
    let parallel_pulls = match (
        document.serialize_image_pulls,
        document.max_parallel_image_pulls,
    ) {
        (Some(true), Some(n)) if n > 1 => {
            return Err(invalid(
                "maxParallelImagePulls",
                n,
                "it can only be above 1 when serializeImagePulls is false",
            ));
        }
        (_, Some(n)) => n.max(1),
        (Some(false), None) => 32,
        _ => 1,
    };
    let backoff = document
        .crash_loop_back_off
        .and_then(|c| c.max_container_restart_period);
    let max_backoff = time(
        "crashLoopBackOff.maxContainerRestartPeriod",
        backoff.as_ref(),
        300,
    )?;
    if !(Duration::from_secs(1)..=Duration::from_secs(300)).contains(&max_backoff) {
        return Err(invalid(
            "crashLoopBackOff.maxContainerRestartPeriod",
            backoff,
            "use between 1s and 300s",
        ));
    }
    let root_dir = flags
        .root_dir
        .clone()
        .unwrap_or_else(|| "/var/lib/kubelet".into());
    let absolute = |field: &str, path: PathBuf| {
        if path.is_absolute() {
            Ok(path)
        } else {
            Err(invalid(
                field,
                path.display().to_string(),
                "use an absolute path",
            ))
        }
    };
    Ok(Config {
        node_name,
        node_ips,
        kubeconfig: flags.kubeconfig.clone(),
        bootstrap_kubeconfig: match (&flags.bootstrap_kubeconfig, &flags.kubeconfig) {
            (Some(_), None) => {
                return Err(invalid(
                    "--kubeconfig",
                    "",
                    "set it too: it is where the node's own credentials are written",
                ));
            }
            (path, _) => path.clone(),
        },
        rotate_certificates: document.rotate_certificates.unwrap_or(false),
        cert_dir: flags
            .cert_dir
            .clone()
            .unwrap_or_else(|| root_dir.join("pki")),
        root_dir: absolute("--root-dir", root_dir)?,
        node_labels,
        register_node: flags
            .register_node
            .or(document.register_node)
            .unwrap_or(true),
        register_with_taints: document.register_with_taints.unwrap_or_default(),
        provider_id: document.provider_id.filter(|p| !p.is_empty()),
        runtime_endpoint: flags
            .runtime_endpoint
            .clone()
            .or(document.container_runtime_endpoint)
            .filter(|e| !e.is_empty())
            .unwrap_or_else(|| "unix:///run/containerd/containerd.sock".into()),
        runtime_timeout: time(
            "runtimeRequestTimeout",
            document.runtime_request_timeout.as_ref(),
            120,
        )?,
        static_pod_path: flags.static_pod_path.clone().or(document
            .static_pod_path
            .filter(|p| !p.is_empty())
            .map(Into::into)),
        static_pod_url: url(
            "staticPodURL",
            document.static_pod_url.filter(|u| !u.is_empty()),
        )?,
        static_pod_url_header: document
            .static_pod_url_header
            .into_iter()
            .flatten()
            .flat_map(|(name, values)| values.into_iter().map(move |value| (name.clone(), value)))
            .collect(),
        http_check: time(
            "httpCheckFrequency",
            document.http_check_frequency.as_ref(),
            20,
        )?,
        file_check: time(
            "fileCheckFrequency",
            document.file_check_frequency.as_ref(),
            20,
        )?,
        pod_logs_dir: absolute(
            "podLogsDir",
            document
                .pod_logs_dir
                .map_or_else(|| "/var/log/pods".into(), PathBuf::from),
        )?,
        sync_frequency: time("syncFrequency", document.sync_frequency.as_ref(), 60)?,
        cluster_dns: flags
            .cluster_dns
            .as_ref()
            .map(|t| t.split(',').map(Into::into).collect())
            .or(document.cluster_dns)
            .unwrap_or_default(),
        cluster_domain: flags
            .cluster_domain
            .clone()
            .or(document.cluster_domain)
            .unwrap_or_default(),
        resolv_conf: document
            .resolv_conf
            .unwrap_or_else(|| "/etc/resolv.conf".into()),
        node_status_update: time(
            "nodeStatusUpdateFrequency",
            document.node_status_update_frequency.as_ref(),
            10,
        )?,
        lease_seconds,
        max_images: document.node_status_max_images.unwrap_or(50),
        cgroup_root: flags
            .cgroup_root
            .clone()
            .or(document.cgroup_root)
            .filter(|r| !r.is_empty())
            .unwrap_or_else(|| "/".into()),
        systemd_cgroups,
        max_pods,
        pod_pids: document.pod_pids_limit.filter(|p| *p > 0),
        parallel_pulls,
        reserved,
        seccomp_default: document.seccomp_default.unwrap_or(false),
        limited_swap: limited_swap(document.memory_swap)?,
        image_rules,
        max_backoff,
        pull_quota: (
            f64::from(at_least_zero(
                "registryPullQPS",
                document.registry_pull_qps,
                5,
            )?),
            f64::from(at_least_zero("registryBurst", document.registry_burst, 10)?).max(1.0),
        ),
        pull_verification: verification(
            document
                .image_pull_credentials_verification_policy
                .as_deref(),
            document
                .preloaded_images_verification_allowlist
                .unwrap_or_default(),
        )?,
        credential_providers: both(
            flags.credential_providers.as_ref(),
            flags.credential_programs.as_ref(),
        )?,
        credential_programs: flags.credential_programs.clone(),
        cpu_period: match document.cpu_cfs_quota {
            Some(false) => None,
            _ => Some(period(document.cpu_cfs_quota_period.as_ref())?),
        },
        single_process_oom_kill: document.single_process_oom_kill.unwrap_or(false),
        unsafe_sysctls: unsafe_sysctls(document.allowed_unsafe_sysctls.unwrap_or_default())?,
        logs: logs(
            document.container_log_max_size.as_ref(),
            document.container_log_max_files,
            document.container_log_monitor_interval.as_ref(),
        )?,
        event_pace: (
            f64::from(at_least_zero(
                "eventRecordQPS",
                document.event_record_qps,
                50,
            )?),
            f64::from(at_least_zero("eventBurst", document.event_burst, 100)?).max(1.0),
        ),
        effective: effective::of(&document.raw),
        serving,
        logging,
        not_honoured,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str, flags: &Overrides) -> Result<Config, String> {
        let text = format!(
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{text}"
        );
        resolve(document(parse(&text)?)?, flags, "HOST").map_err(|e| e.to_string())
    }

    #[test]
    fn files_are_read_flags_win_and_mistakes_are_named() {
        let flags = Overrides::default();
        let config = load(
            "maxPods: 5\nsyncFrequency: 1m30s\nclusterDNS: [10.96.0.10]\nsystemReserved: {cpu: 100m}\nkubeReserved: {cpu: 200m}\nfailSwapOn: false\n",
            &flags,
        )
        .expect("fine");
        assert_eq!(
            (
                config.max_pods,
                config.sync_frequency.as_secs(),
                config.node_name.as_str(),
                config.reserved["cpu"].milli()
            ),
            (5, 90, "host", 300)
        );
        assert_eq!(config.not_honoured, ["failSwapOn"]);
        let zeros = load("imageMinimumGCAge: 0s\nsyncFrequency: 0s\n", &flags).expect("fine");
        assert_eq!(
            (
                zeros.image_rules.minimum_age.as_secs(),
                zeros.sync_frequency.as_secs()
            ),
            (120, 60),
            "zeros are left to us"
        );
        let over = load(
            "maxPods: 5\n",
            &Overrides {
                max_pods: Some(7),
                hostname: Some(" N1 ".into()),
                ..Overrides::default()
            },
        )
        .expect("fine");
        assert_eq!((over.max_pods, over.node_name.as_str()), (7, "n1"));
        let cases = [
            ("maxPodz: 5\n", "maxPodz"),
            ("maxPods: -1\n", "maxPods"),
            ("featureGates: {NodeSwap: false}\n", "featureGates.NodeSwap"),
            ("maxPods: many\n", "many"),
            ("eventRecordQPS: -1\n", "eventRecordQPS"),
            (
                "imagePullCredentialsVerificationPolicy: Sometimes\n",
                "AlwaysVerify",
            ),
            ("staticPodURL: ftp://x\n", "staticPodURL"),
            ("cpuCFSQuotaPeriod: 2s\n", "cpuCFSQuotaPeriod"),
            (
                "allowedUnsafeSysctls: [vm.swappiness]\n",
                "allowedUnsafeSysctls",
            ),
            ("containerLogMaxSize: big\n", "containerLogMaxSize"),
            ("containerLogMaxFiles: 1\n", "containerLogMaxFiles"),
            ("syncFrequency: soon\n", "syncFrequency: \"soon\""),
            ("cgroupDriver: other\n", "use cgroupfs or systemd"),
            ("podLogsDir: relative\n", "podLogsDir"),
            (
                "crashLoopBackOff: {maxContainerRestartPeriod: 10m}\n",
                "between 1s and 300s",
            ),
            ("systemReserved: {memory: lots}\n", "systemReserved.memory"),
        ];
        for (text, expected) in cases {
            let error = load(text, &flags).expect_err(text);
            assert!(error.contains(expected), "{error}");
        }
        assert!(parse("kind: Pod\n").is_err());
    }

    #[test]
    fn drop_ins_win_over_the_file_and_flags_over_both() {
        let dir = tempfile::tempdir().expect("a directory");
        let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            std::fs::write(&path, format!("{head}{text}")).expect("written");
            path
        };
        let file = write(
            "config.yaml",
            "maxPods: 1\nsyncFrequency: 10s\nclusterDNS: [192.0.2.1, 192.0.2.2]\nclusterDomain: a\n",
        );
        write("d/20.conf", "maxPods: 3\nclusterDNS: [192.0.2.3]\n");
        write("d/10.conf", "maxPods: 2\nsyncFrequency: 20s\n");
        write("d/30.yaml", "maxPods: 9\n");
        let (drop_ins, flags) = (
            dir.path().join("d"),
            serde_json::json!({"syncFrequency": "30s"}),
        );
        let config = load_all(
            Some(&file),
            Some(&drop_ins),
            &flags,
            &Overrides::default(),
            "h",
        )
        .expect("fine");
        assert_eq!(
            (
                config.max_pods,
                config.sync_frequency.as_secs(),
                config.cluster_domain.as_str()
            ),
            (3, 30, "a")
        );
        assert_eq!(config.cluster_dns, ["192.0.2.3"], "lists are replaced");
        std::fs::write(drop_ins.join("40.conf"), "maxPods: 4").expect("written");
        assert!(
            load_all(
                Some(&file),
                Some(&drop_ins),
                &flags,
                &Overrides::default(),
                "h"
            )
            .is_err_and(|e| e.to_string().contains("40.conf"))
        );
    }
}
