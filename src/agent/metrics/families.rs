//! Names, help texts and labels of the kubelet's metrics, and the buckets of its histograms
//! (`pkg/kubelet/metrics/metrics.go`).

use holdfast_core::serving::exposition::Family;

pub(super) const POD_STARTS: &[f64] = &[
    0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0,
    300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
];
pub(super) const USUAL: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];
/// 0.005 × 2.5ⁿ, 14 buckets.
pub(super) const RUNTIME: &[f64] = &[
    0.005,
    0.0125,
    0.03125,
    0.078_125,
    0.195_312_5,
    0.488_281_25,
    1.220_703_125,
    3.051_757_812_5,
    7.629_394_531_25,
    19.073_486_328_125,
    47.683_715_820_312_5,
    119.209_289_550_781_25,
    298.023_223_876_953_1,
    745.058_059_692_382_8,
];

/// A metric family.
pub const fn family(
    name: &'static str,
    help: &'static str,
    labels: &'static [&'static str],
) -> Family {
    Family { name, help, labels }
}

pub(super) const CGROUPS: Family = family(
    "kubelet_cgroup_manager_duration_seconds",
    "Duration in seconds to create, update or remove a pod's cgroup.",
    &["operation_type"],
);
pub(super) const CONTAINERS: Family = family(
    "kubelet_containers_per_pod_count",
    "The number of containers of pods, without init containers.",
    &[],
);
pub(super) const WORKER_START: Family = family(
    "kubelet_pod_worker_start_duration_seconds",
    "Duration in seconds from when the agent first sees a pod until it starts to work on it.",
    &[],
);
pub(super) const POD_START: Family = family(
    "kubelet_pod_start_duration_seconds",
    "Duration in seconds from when the agent first sees a pod until the pod runs.",
    &[],
);
pub(super) const RUNTIME_TOTAL: Family = family(
    "kubelet_runtime_operations_total",
    "Cumulative number of runtime operations by operation type.",
    &["operation_type"],
);
pub(super) const RUNTIME_ERRORS: Family = family(
    "kubelet_runtime_operations_errors_total",
    "Cumulative number of runtime operation errors by operation type.",
    &["operation_type"],
);
pub(super) const RUNTIME_SECONDS: Family = family(
    "kubelet_runtime_operations_duration_seconds",
    "Duration in seconds of runtime operations by operation type.",
    &["operation_type"],
);
/// The label is the first Kubernetes version without support for a runtime that lacks RuntimeConfig
/// (`getCgroupDriverFromCRI` in `cmd/kubelet/app/server.go`).
pub(super) const LOSING_SUPPORT: Family = family(
    "kubelet_cri_losing_support",
    "The Kubernetes version from which the current runtime is no longer supported unless it is upgraded.",
    &["version"],
);
pub(super) const RELIST: Family = family(
    "kubelet_pleg_relist_duration_seconds",
    "Duration in seconds for listing the runtime's pods.",
    &[],
);
pub(super) const INTERVAL: Family = family(
    "kubelet_pleg_relist_interval_seconds",
    "Interval in seconds between two listings of the runtime's pods.",
    &[],
);
pub(super) const HTTP: Family = family(
    "kubelet_http_requests_total",
    "Number of the HTTP requests received since the agent started.",
    &["method", "path", "server_type", "long_running"],
);
pub(super) const POD_START_SLI: Family = family(
    "kubelet_pod_start_sli_duration_seconds",
    "Duration in seconds to start a pod, excluding time to pull images and run init containers; pods with claims are left out.",
    &[],
);
pub(super) const POD_START_TOTAL: Family = family(
    "kubelet_pod_start_total_duration_seconds",
    "Duration in seconds to start a pod since creation, including time to pull images.",
    &[],
);
pub(super) const WORKER: Family = family(
    "kubelet_pod_worker_duration_seconds",
    "Duration in seconds to sync a single pod, by operation type.",
    &["operation_type"],
);
pub(super) const STATUS: Family = family(
    "kubelet_pod_status_sync_duration_seconds",
    "Duration in seconds to sync a pod status update.",
    &[],
);
pub(super) const SANDBOX: Family = family(
    "kubelet_run_podsandbox_duration_seconds",
    "Duration in seconds of the run_podsandbox operations.",
    &["runtime_handler"],
);
pub(super) const SANDBOX_ERRORS: Family = family(
    "kubelet_run_podsandbox_errors_total",
    "Cumulative number of the run_podsandbox operation errors.",
    &["runtime_handler"],
);
pub(super) const STARTED_PODS: Family = family(
    "kubelet_started_pods_total",
    "Cumulative number of pods started.",
    &[],
);
pub(super) const STARTED_PODS_ERRORS: Family = family(
    "kubelet_started_pods_errors_total",
    "Cumulative number of errors when starting pods.",
    &[],
);
pub(super) const STARTED: Family = family(
    "kubelet_started_containers_total",
    "Cumulative number of containers started.",
    &["container_type"],
);
pub(super) const STARTED_ERRORS: Family = family(
    "kubelet_started_containers_errors_total",
    "Cumulative number of errors when starting containers.",
    &["container_type", "code"],
);
pub(super) const REJECTED: Family = family(
    "kubelet_admission_rejections_total",
    "Cumulative number of pod admission rejections.",
    &["reason"],
);
pub(super) const PREEMPTED: Family = family(
    "kubelet_preemptions",
    "Cumulative number of pod preemptions by preemption resource.",
    &["preemption_signal"],
);
pub(super) const EVICTED: Family = family(
    "kubelet_evictions",
    "Cumulative number of pod evictions by eviction signal.",
    &["eviction_signal"],
);
pub(super) const EVICTION_AGE: Family = family(
    "kubelet_eviction_stats_age_seconds",
    "Time between when stats are collected, and when a pod is evicted based on those stats by eviction signal.",
    &["eviction_signal"],
);
pub(super) const PULLED: Family = family(
    "kubelet_image_pull_duration_seconds",
    "Duration in seconds to pull an image.",
    &["image_size_in_bytes"],
);
pub(super) const COLLECTED: Family = family(
    "kubelet_image_garbage_collected_total",
    "Total number of images garbage collected, because of disk usage or age.",
    &["reason"],
);
pub(super) const STORAGE: Family = family(
    "storage_operation_duration_seconds",
    "Storage operation duration.",
    &["migrated", "operation_name", "status", "volume_plugin"],
);
pub(super) const STORAGE_TOTAL: Family = family(
    "volume_operation_total_seconds",
    "Storage operation end to end duration in seconds",
    &["plugin_name", "operation_name"],
);
pub(super) const RECONSTRUCTED: Family = family(
    "reconstruct_volume_operations_total",
    "The number of volumes that were attempted to be reconstructed from the operating system during kubelet startup.",
    &[],
);
pub(super) const RECONSTRUCTED_ERRORS: Family = family(
    "reconstruct_volume_operations_errors_total",
    "The number of volumes that failed reconstruction from the operating system during kubelet startup.",
    &[],
);
pub(super) const FORCE_CLEANED: Family = family(
    "force_cleaned_failed_volume_operations_total",
    "The number of volumes that were force cleaned after their reconstruction failed. This includes both successful and failed cleanups.",
    &[],
);
pub(super) const FORCE_CLEANED_ERRORS: Family = family(
    "force_cleaned_failed_volume_operation_errors_total",
    "The number of volumes that failed force cleanup after their reconstruction failed.",
    &[],
);
pub(super) const SELINUX_POD: [Family; 2] = [
    family(
        "volume_manager_selinux_pod_context_mismatch_errors_total",
        "Number of times that a pod could not be started because its containers have different SELinux contexts for one volume.",
        &["access_mode"],
    ),
    family(
        "volume_manager_selinux_pod_context_mismatch_warnings_total",
        "Number of times that the containers of a pod had different SELinux contexts for one volume, with an access mode that allows this.",
        &["access_mode"],
    ),
];
pub(super) const SELINUX_VOLUME: [Family; 2] = [
    family(
        "volume_manager_selinux_volume_context_mismatch_errors_total",
        "Number of times that a pod could not be started because other pods use its volume with another SELinux context.",
        &["volume_plugin", "access_mode"],
    ),
    family(
        "volume_manager_selinux_volume_context_mismatch_warnings_total",
        "Number of pods whose volume other pods use with another SELinux context, with an access mode that allows this.",
        &["volume_plugin", "access_mode"],
    ),
];
pub(super) const SELINUX_ADMITTED: Family = family(
    "volume_manager_selinux_volumes_admitted_total",
    "Number of volumes whose SELinux context is known, so that they can be mounted with it.",
    &["volume_plugin", "access_mode"],
);
pub(super) const CSI: Family = family(
    "csi_operations_seconds",
    "Container Storage Interface operation duration with gRPC error code status total",
    &["driver_name", "grpc_status_code", "method_name", "migrated"],
);
pub(super) const DEVICE_PLUGINS: Family = family(
    "kubelet_device_plugin_registration_total",
    "Number of registrations of device plugins.",
    &["resource_name"],
);
pub(super) const DEVICE_ALLOCATION: Family = family(
    "kubelet_device_plugin_alloc_duration_seconds",
    "Duration in seconds of a device plugin's answer to Allocate.",
    &["resource_name"],
);
pub(super) const HTTP_SECONDS: Family = family(
    "kubelet_http_requests_duration_seconds",
    "Duration in seconds to serve http requests",
    &["method", "path", "server_type", "long_running"],
);
pub(super) const CLIENT: Family = family(
    "rest_client_requests_total",
    "Number of HTTP requests, partitioned by status code, method, and host.",
    &["code", "method", "host"],
);
pub(super) const WEBSOCKETS: Family = family(
    "kubelet_websocket_streaming_requests_total",
    "Total number of WebSocket streaming requests.",
    &["subresource"],
);
pub(super) const STEPS: Family = family(
    "holdfast_step_duration_seconds",
    "Duration in seconds of each step of a pod's life.",
    &["step", "result"],
);
pub(super) const PROBES: Family = family(
    "prober_probe_total",
    "Cumulative number of a liveness, readiness or startup probe for a container by result.",
    &[
        "container",
        "namespace",
        "pod",
        "pod_uid",
        "probe_type",
        "result",
    ],
);

pub(super) const PROBE_SECONDS: Family = family(
    "prober_probe_duration_seconds",
    "Duration in seconds for a probe response.",
    &["container", "namespace", "pod", "probe_type"],
);

pub(super) const PULLS: &[f64] = &[
    1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0,
    1200.0, 1800.0, 2700.0, 3600.0,
];
pub(super) const COUNTS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0];
pub(super) const STATUSES: &[f64] = &[0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0];
pub(super) const STORING: &[f64] = &[
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0,
];
/// In milliseconds.
pub(super) const RESIZING: &[f64] = &[
    10.0, 50.0, 100.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 30_000.0, 60_000.0,
    120_000.0, 300_000.0, 600_000.0,
];
pub(super) const REQUESTS: &[f64] = &[
    0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0,
];
pub(super) const STEP: &[f64] = &[
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0,
];

pub(super) const CLIENT_SECONDS: Family = family(
    "rest_client_request_duration_seconds",
    "Request latency in seconds. Broken down by verb and host.",
    &["host", "verb"],
);
pub(super) const CLIENT_RENEWALS: Family = family(
    "kubelet_certificate_manager_client_expiration_renew_errors",
    "Number of failed renewals of the client certificate.",
    &[],
);
pub(super) const SERVER_RENEWALS: Family = family(
    "kubelet_server_expiration_renew_errors",
    "Number of failed renewals of the serving certificate.",
    &[],
);
pub(super) const TERMINATED: Family = family(
    "kubelet_terminated_containers_total",
    "Cumulative number of container terminations.",
    &["container_type", "exit_code", "reason"],
);
pub(super) const USER_NAMESPACES: Family = family(
    "kubelet_started_user_namespaced_pods_total",
    "Cumulative number of pods with user namespaces started.",
    &[],
);
pub(super) const USER_NAMESPACES_ERRORS: Family = family(
    "kubelet_started_user_namespaced_pods_errors_total",
    "Cumulative number of errors when starting pods with user namespaces.",
    &[],
);
pub(super) const RESIZES: Family = family(
    "kubelet_container_requested_resizes_total",
    "Number of requested resizes of containers: a resource's requests or limits that were added, removed, increased or decreased.",
    &["resource", "requirement", "operation"],
);
pub(super) const DEFERRED_ACCEPTED: Family = family(
    "kubelet_pod_deferred_accepted_resizes_total",
    "Cumulative number of resizes that were accepted after being deferred, by what freed the resources.",
    &["retry_trigger"],
);
pub(super) const INFEASIBLE: Family = family(
    "kubelet_pod_infeasible_resizes_total",
    "Number of infeasible resizes for pods.",
    &["reason_detail"],
);
pub(super) const RESTARTED: Family = family(
    "kubelet_restarted_pods_total",
    "Number of pods that have been restarted because they were deleted and recreated with the same UID while the agent was watching them (common for static pods, extremely uncommon for API pods).",
    &["static"],
);
pub(super) const ORPHANED: Family = family(
    "kubelet_orphaned_runtime_pods_total",
    "Number of pods that have been detected in the container runtime and that neither the API nor a file or URL defines.",
    &[],
);
pub(super) const RESIZE_MS: Family = family(
    "kubelet_pod_resize_duration_milliseconds",
    "Duration in milliseconds to actuate a pod resize.",
    &["success"],
);
pub(super) const IMAGE_VOLUMES: Family = family(
    "kubelet_image_volume_requested_total",
    "Number of requested image volumes.",
    &[],
);
pub(super) const IMAGE_VOLUMES_MOUNTED: Family = family(
    "kubelet_image_volume_mounted_succeed_total",
    "Number of successful image volume mounts.",
    &[],
);
pub(super) const HOOKS_IN_PLAIN_HTTP: Family = family(
    "kubelet_lifecycle_handler_http_fallbacks_total",
    "Number of lifecycle hooks over HTTPS that were answered over plain HTTP.",
    &[],
);
pub(super) const SLEEPS_CUT: Family = family(
    "kubelet_sleep_action_terminated_early_total",
    "Number of sleep hooks that were terminated early.",
    &[],
);
/// Requests to the podresources API: the total, then one family for each kind.
pub(super) const POD_RESOURCES: [Family; 4] = [
    family(
        "kubelet_pod_resources_endpoint_requests_total",
        "Cumulative number of requests to the podresources API.",
        &["server_api_version"],
    ),
    family(
        "kubelet_pod_resources_endpoint_requests_list",
        "Number of List requests to the podresources API.",
        &["server_api_version"],
    ),
    family(
        "kubelet_pod_resources_endpoint_requests_get",
        "Number of Get requests to the podresources API.",
        &["server_api_version"],
    ),
    family(
        "kubelet_pod_resources_endpoint_requests_get_allocatable",
        "Number of GetAllocatableResources requests to the podresources API.",
        &["server_api_version"],
    ),
];
/// `Get` requests that found no pod.
pub(super) const POD_RESOURCES_ERRORS: Family = family(
    "kubelet_pod_resources_endpoint_errors_get",
    "Number of Get requests to the podresources API that failed.",
    &["server_api_version"],
);
pub(super) const HTTP_NOW: Family = family(
    "kubelet_http_inflight_requests",
    "Number of HTTP requests in flight.",
    &["method", "path", "server_type", "long_running"],
);
pub(super) const LISTED: Family = family(
    "kubelet_pleg_last_seen_seconds",
    "Time of the last listing of the runtime's pods, in seconds since the Unix epoch.",
    &[],
);
pub(super) const FIRST_NETWORK: Family = family(
    "kubelet_first_network_pod_start_sli_duration_seconds",
    "Duration in seconds to start the first pod with a network of its own, excluding time to pull images and run init containers.",
    &[],
);
pub(super) const STARTUP_BEFORE: Family = family(
    "kubelet_node_startup_pre_kubelet_duration_seconds",
    "Duration in seconds from the machine's start until the agent's start.",
    &[],
);
pub(super) const STARTUP_TRIED: Family = family(
    "kubelet_node_startup_pre_registration_duration_seconds",
    "Duration in seconds from the agent's start to its first attempt to register the node.",
    &[],
);
pub(super) const STARTUP_REGISTERED: Family = family(
    "kubelet_node_startup_registration_duration_seconds",
    "Duration in seconds from the first attempt to register the node until it was registered.",
    &[],
);
pub(super) const STARTUP_READY: Family = family(
    "kubelet_node_startup_post_registration_duration_seconds",
    "Duration in seconds from the node's registration until it was ready.",
    &[],
);
pub(super) const STARTUP: Family = family(
    "kubelet_node_startup_duration_seconds",
    "Duration in seconds from the machine's start until its node was ready.",
    &[],
);
