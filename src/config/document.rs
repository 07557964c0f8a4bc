//! The configuration file before it is resolved: the fields of KubeletConfiguration v1beta1 that are read, and their
//! decoding.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::logging;
use super::serving;
use holdfast_core::node::shutdown::Period;

/// Fields of the format that have no effect, whatever their value, and why this does no harm.
pub(super) const WITHOUT_EFFECT: &[(&str, &str)] = &[
    (
        "configMapAndSecretChangeDetectionStrategy",
        "the agent always watches the objects that pods use",
    ),
    ("contentType", "requests are always JSON"),
    (
        "enableContentionProfiling",
        "there is no Go profiler ([alternatives](JOINING.md#profiling))",
    ),
    (
        "enableControllerAttachDetach",
        "the attach-detach controller always attaches volumes; an annotation on the Node requests this",
    ),
    (
        "enableProfilingHandler",
        "there is no Go profiler ([alternatives](JOINING.md#profiling))",
    ),
    (
        "hairpinMode",
        "as in the kubelet: the network plugin decides",
    ),
    ("iptablesDropBit", "as in the kubelet: kube-proxy decides"),
    (
        "iptablesMasqueradeBit",
        "as in the kubelet: kube-proxy decides",
    ),
    (
        "kernelMemcgNotification",
        "the agent always uses the kernel's memory notifications where they are available",
    ),
    ("showHiddenMetricsForVersion", "no metric is hidden"),
    (
        "streamingConnectionIdleTimeout",
        "as in the kubelet: the runtime decides (`stream_idle_timeout` of containerd)",
    ),
    ("volumeStatsAggPeriod", "volumes are measured on request"),
];

/// Fields of the format that are read but not honoured by this version.
pub(super) const NOT_HONOURED: &[&str] = &["volumePluginDir"];

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct CrashLoop {
    pub(super) max_container_restart_period: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct MemorySwap {
    pub(super) swap_behavior: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct UserNamespaces {
    #[serde(rename = "idsPerPod")]
    pub(super) ids_per_pod: Option<i64>,
}

/// The honoured fields, as written in a file.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Document {
    /// All fields, as written.
    #[serde(skip)]
    pub(super) raw: Value,
    #[serde(rename = "apiVersion")]
    pub(super) api_version: Option<String>,
    pub(super) kind: Option<String>,
    pub(super) rotate_certificates: Option<bool>,
    pub(super) static_pod_path: Option<String>,
    #[serde(rename = "staticPodURL")]
    pub(super) static_pod_url: Option<String>,
    #[serde(rename = "staticPodURLHeader")]
    pub(super) static_pod_url_header: Option<BTreeMap<String, Vec<String>>>,
    pub(super) http_check_frequency: Option<String>,
    pub(super) pod_logs_dir: Option<String>,
    pub(super) sync_frequency: Option<String>,
    pub(super) file_check_frequency: Option<String>,
    pub(super) cluster_domain: Option<String>,
    #[serde(rename = "clusterDNS")]
    pub(super) cluster_dns: Option<Vec<String>>,
    pub(super) resolv_conf: Option<String>,
    pub(super) node_status_update_frequency: Option<String>,
    pub(super) node_status_report_frequency: Option<String>,
    pub(super) node_lease_duration_seconds: Option<i32>,
    pub(super) node_status_max_images: Option<i64>,
    pub(super) cgroup_root: Option<String>,
    pub(super) kubelet_cgroups: Option<String>,
    pub(super) system_cgroups: Option<String>,
    #[serde(rename = "cgroupsPerQOS")]
    pub(super) cgroups_per_qos: Option<bool>,
    pub(super) cgroup_driver: Option<String>,
    pub(super) runtime_request_timeout: Option<String>,
    pub(super) max_pods: Option<i64>,
    pub(super) pods_per_core: Option<i32>,
    #[serde(rename = "podCIDR")]
    pub(super) pod_cidr: Option<String>,
    pub(super) local_storage_capacity_isolation: Option<bool>,
    pub(super) oom_score_adj: Option<i32>,
    pub(super) max_open_files: Option<i64>,
    pub(super) fail_swap_on: Option<bool>,
    pub(super) fail_cgroup_v1: Option<bool>,
    pub(super) protect_kernel_defaults: Option<bool>,
    #[serde(rename = "reservedSystemCPUs")]
    pub(super) reserved_system_cpus: Option<String>,
    pub(super) pod_pids_limit: Option<i64>,
    pub(super) serialize_image_pulls: Option<bool>,
    pub(super) max_parallel_image_pulls: Option<usize>,
    pub(super) system_reserved: Option<BTreeMap<String, String>>,
    pub(super) kube_reserved: Option<BTreeMap<String, String>>,
    pub(super) system_reserved_cgroup: Option<String>,
    pub(super) kube_reserved_cgroup: Option<String>,
    pub(super) qos_reserved: Option<BTreeMap<String, String>>,
    pub(super) seccomp_default: Option<bool>,
    #[serde(rename = "providerID")]
    pub(super) provider_id: Option<String>,
    pub(super) crash_loop_back_off: Option<CrashLoop>,
    pub(super) register_node: Option<bool>,
    pub(super) register_with_taints: Option<Vec<k8s_openapi::api::core::v1::Taint>>,
    pub(super) container_runtime_endpoint: Option<String>,
    pub(super) image_service_endpoint: Option<String>,
    #[serde(rename = "singleProcessOOMKill")]
    pub(super) single_process_oom_kill: Option<bool>,
    #[serde(rename = "cpuCFSQuota")]
    pub(super) cpu_cfs_quota: Option<bool>,
    #[serde(rename = "cpuCFSQuotaPeriod")]
    pub(super) cpu_cfs_quota_period: Option<String>,
    pub(super) allowed_unsafe_sysctls: Option<Vec<String>>,
    #[serde(rename = "registryPullQPS")]
    pub(super) registry_pull_qps: Option<i32>,
    pub(super) registry_burst: Option<i32>,
    pub(super) image_pull_credentials_verification_policy: Option<String>,
    pub(super) preloaded_images_verification_allowlist: Option<Vec<String>>,
    pub(super) container_log_max_size: Option<String>,
    pub(super) container_log_max_files: Option<i32>,
    #[serde(rename = "containerLogMaxWorkers")]
    pub(super) container_log_max_workers: Option<i32>,
    pub(super) container_log_monitor_interval: Option<String>,
    #[serde(rename = "eventRecordQPS")]
    pub(super) event_record_qps: Option<i32>,
    pub(super) event_burst: Option<i32>,
    #[serde(rename = "makeIPTablesUtilChains")]
    pub(super) make_iptables_util_chains: Option<bool>,
    #[serde(rename = "kubeAPIQPS")]
    pub(super) kube_api_qps: Option<i32>,
    #[serde(rename = "kubeAPIBurst")]
    pub(super) kube_api_burst: Option<i32>,
    pub(super) memory_swap: Option<MemorySwap>,
    pub(super) user_namespaces: Option<UserNamespaces>,
    pub(super) memory_throttling_factor: Option<f64>,
    pub(super) memory_reservation_policy: Option<String>,
    #[serde(rename = "imageMinimumGCAge")]
    pub(super) image_minimum_gc_age: Option<String>,
    #[serde(rename = "imageMaximumGCAge")]
    pub(super) image_maximum_gc_age: Option<String>,
    #[serde(rename = "imageGCHighThresholdPercent")]
    pub(super) image_gc_high_threshold_percent: Option<i32>,
    #[serde(rename = "imageGCLowThresholdPercent")]
    pub(super) image_gc_low_threshold_percent: Option<i32>,
    pub(super) eviction_hard: Option<BTreeMap<String, String>>,
    pub(super) eviction_soft: Option<BTreeMap<String, String>>,
    pub(super) eviction_soft_grace_period: Option<BTreeMap<String, String>>,
    pub(super) eviction_minimum_reclaim: Option<BTreeMap<String, String>>,
    pub(super) eviction_pressure_transition_period: Option<String>,
    pub(super) eviction_max_pod_grace_period: Option<i32>,
    pub(super) merge_default_eviction_settings: Option<bool>,
    pub(super) shutdown_grace_period: Option<String>,
    pub(super) shutdown_grace_period_critical_pods: Option<String>,
    pub(super) shutdown_grace_period_by_pod_priority: Option<Vec<Period>>,
    pub(super) enforce_node_allocatable: Option<Vec<String>>,
    pub(super) feature_gates: Option<BTreeMap<String, bool>>,
    #[serde(flatten)]
    pub(super) serving: serving::Fields,
    #[serde(flatten)]
    pub(super) logging: logging::Fields,
    #[serde(flatten)]
    pub(super) managers: ManagerFields,
    #[serde(flatten)]
    pub(super) rest: BTreeMap<String, Value>,
}

impl Document {
    /// Decodes the merged file. The error names the field with the wrong type.
    pub(super) fn decode(raw: Value) -> Result<Document, String> {
        let mut document: Document =
            serde_json::from_value(raw.clone()).map_err(|e| e.to_string())?;
        document.raw = raw;
        Ok(document)
    }
}

/// The fields of the resource managers.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ManagerFields {
    pub(super) cpu_manager_policy: Option<String>,
    pub(super) cpu_manager_policy_options: Option<BTreeMap<String, String>>,
    pub(super) cpu_manager_reconcile_period: Option<String>,
    pub(super) memory_manager_policy: Option<String>,
    pub(super) reserved_memory: Option<Vec<MemoryReservation>>,
    pub(super) topology_manager_policy: Option<String>,
    pub(super) topology_manager_scope: Option<String>,
    pub(super) topology_manager_policy_options: Option<BTreeMap<String, String>>,
}

/// The reserved memory of a NUMA node.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct MemoryReservation {
    #[serde(default)]
    pub(super) numa_node: u32,
    #[serde(default)]
    pub(super) limits: BTreeMap<String, String>,
}
