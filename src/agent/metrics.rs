//! What is counted as it happens, under the kubelet's names (kubelet spec, chapter 18).

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use crate::core::node::shutdown::Times;
use crate::core::pod;
use crate::core::serving::exposition::{Family, Page, Registry};

const POD_STARTS: &[f64] = &[
    0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0,
    300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
];
const USUAL: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];
/// 0.005 × 2.5ⁿ, fourteen of them.
const RUNTIME: &[f64] = &[
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

/// A family that is counted as things happen.
pub const fn family(
    name: &'static str,
    help: &'static str,
    labels: &'static [&'static str],
) -> Family {
    Family { name, help, labels }
}

const CGROUPS: Family = family(
    "kubelet_cgroup_manager_duration_seconds",
    "Duration in seconds to make, change or remove a pod's cgroup.",
    &["operation_type"],
);
const CONTAINERS: Family = family(
    "kubelet_containers_per_pod_count",
    "The number of containers of pods, without init containers.",
    &[],
);
const WORKER_START: Family = family(
    "kubelet_pod_worker_start_duration_seconds",
    "Duration in seconds from the agent's first sight of a pod to the begin of work on it.",
    &[],
);
const POD_START: Family = family(
    "kubelet_pod_start_duration_seconds",
    "Duration in seconds from the agent's first sight of a pod to its running.",
    &[],
);
const RUNTIME_TOTAL: Family = family(
    "kubelet_runtime_operations_total",
    "Cumulative number of runtime operations by operation type.",
    &["operation_type"],
);
const RUNTIME_ERRORS: Family = family(
    "kubelet_runtime_operations_errors_total",
    "Cumulative number of runtime operation errors by operation type.",
    &["operation_type"],
);
const RUNTIME_SECONDS: Family = family(
    "kubelet_runtime_operations_duration_seconds",
    "Duration in seconds of runtime operations by operation type.",
    &["operation_type"],
);
const RELIST: Family = family(
    "kubelet_pleg_relist_duration_seconds",
    "Duration in seconds for listing the runtime's pods.",
    &[],
);
const INTERVAL: Family = family(
    "kubelet_pleg_relist_interval_seconds",
    "Interval in seconds between two such listings.",
    &[],
);
const HTTP: Family = family(
    "kubelet_http_requests_total",
    "Number of the HTTP requests received since the agent started.",
    &["method", "path", "server_type", "long_running"],
);
const POD_START_SLI: Family = family(
    "kubelet_pod_start_sli_duration_seconds",
    "Duration in seconds to start a pod, excluding time to pull images and run init containers; pods with claims are left out.",
    &[],
);
const POD_START_TOTAL: Family = family(
    "kubelet_pod_start_total_duration_seconds",
    "Duration in seconds to start a pod since creation, including time to pull images.",
    &[],
);
const WORKER: Family = family(
    "kubelet_pod_worker_duration_seconds",
    "Duration in seconds to sync a single pod, by operation type.",
    &["operation_type"],
);
const STATUS: Family = family(
    "kubelet_pod_status_sync_duration_seconds",
    "Duration in seconds to sync a pod status update.",
    &[],
);
const SANDBOX: Family = family(
    "kubelet_run_podsandbox_duration_seconds",
    "Duration in seconds of the run_podsandbox operations.",
    &["runtime_handler"],
);
const SANDBOX_ERRORS: Family = family(
    "kubelet_run_podsandbox_errors_total",
    "Cumulative number of the run_podsandbox operation errors.",
    &["runtime_handler"],
);
const STARTED_PODS: Family = family(
    "kubelet_started_pods_total",
    "Cumulative number of pods started.",
    &[],
);
const STARTED_PODS_ERRORS: Family = family(
    "kubelet_started_pods_errors_total",
    "Cumulative number of errors when starting pods.",
    &[],
);
const STARTED: Family = family(
    "kubelet_started_containers_total",
    "Cumulative number of containers started.",
    &["container_type"],
);
const STARTED_ERRORS: Family = family(
    "kubelet_started_containers_errors_total",
    "Cumulative number of errors when starting containers.",
    &["container_type", "code"],
);
const REJECTED: Family = family(
    "kubelet_admission_rejections_total",
    "Cumulative number of pod admission rejections.",
    &["reason"],
);
const PREEMPTED: Family = family(
    "kubelet_preemptions",
    "Cumulative number of pod preemptions by preemption resource.",
    &["preemption_signal"],
);
const EVICTED: Family = family(
    "kubelet_evictions",
    "Cumulative number of pod evictions by eviction signal.",
    &["eviction_signal"],
);
const EVICTION_AGE: Family = family(
    "kubelet_eviction_stats_age_seconds",
    "Time between when stats are collected, and when a pod is evicted based on those stats by eviction signal.",
    &["eviction_signal"],
);
const PULLED: Family = family(
    "kubelet_image_pull_duration_seconds",
    "Duration in seconds to pull an image.",
    &["image_size_in_bytes"],
);
const COLLECTED: Family = family(
    "kubelet_image_garbage_collected_total",
    "Total number of images garbage collected, whether for room or for age.",
    &["reason"],
);
const STORAGE: Family = family(
    "storage_operation_duration_seconds",
    "Storage operation duration.",
    &["migrated", "operation_name", "status", "volume_plugin"],
);
const STORAGE_TOTAL: Family = family(
    "volume_operation_total_seconds",
    "Storage operation end to end duration in seconds",
    &["plugin_name", "operation_name"],
);
const RECONSTRUCTED: Family = family(
    "reconstruct_volume_operations_total",
    "The number of volumes that were attempted to be reconstructed from the operating system during kubelet startup.",
    &[],
);
const RECONSTRUCTED_ERRORS: Family = family(
    "reconstruct_volume_operations_errors_total",
    "The number of volumes that failed reconstruction from the operating system during kubelet startup.",
    &[],
);
const FORCE_CLEANED: Family = family(
    "force_cleaned_failed_volume_operations_total",
    "The number of volumes that were force cleaned after their reconstruction failed. This includes both successful and failed cleanups.",
    &[],
);
const FORCE_CLEANED_ERRORS: Family = family(
    "force_cleaned_failed_volume_operation_errors_total",
    "The number of volumes that failed force cleanup after their reconstruction failed.",
    &[],
);
const CSI: Family = family(
    "csi_operations_seconds",
    "Container Storage Interface operation duration with gRPC error code status total",
    &["driver_name", "grpc_status_code", "method_name", "migrated"],
);
const DEVICE_PLUGINS: Family = family(
    "kubelet_device_plugin_registration_total",
    "Number of registrations of device plugins.",
    &["resource_name"],
);
const DEVICE_ALLOCATION: Family = family(
    "kubelet_device_plugin_alloc_duration_seconds",
    "Duration in seconds of a device plugin's answer to Allocate.",
    &["resource_name"],
);
const HTTP_SECONDS: Family = family(
    "kubelet_http_requests_duration_seconds",
    "Duration in seconds to serve http requests",
    &["method", "path", "server_type", "long_running"],
);
const CLIENT: Family = family(
    "rest_client_requests_total",
    "Number of HTTP requests, partitioned by status code, method, and host.",
    &["code", "method", "host"],
);
const WEBSOCKETS: Family = family(
    "kubelet_websocket_streaming_requests_total",
    "Total number of WebSocket streaming requests.",
    &["subresource"],
);
const STEPS: Family = family(
    "holdfast_step_duration_seconds",
    "Duration in seconds of each step of a pod's life.",
    &["step", "result"],
);
const PROBES: Family = family(
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

const PROBE_SECONDS: Family = family(
    "prober_probe_duration_seconds",
    "Duration in seconds for a probe response.",
    &["container", "namespace", "pod", "probe_type"],
);

const PULLS: &[f64] = &[
    1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0,
    1200.0, 1800.0, 2700.0, 3600.0,
];
const COUNTS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0];
const STATUSES: &[f64] = &[0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0];
const STORING: &[f64] = &[
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0,
];
const STEP: &[f64] = &[
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0,
];

/// The size of an image as metrics show it.
fn size_class(bytes: u64) -> &'static str {
    const MB: u64 = 1 << 20;
    const GB: u64 = 1 << 30;
    let classes = [
        (10 * MB, "0-10MB"),
        (100 * MB, "10MB-100MB"),
        (500 * MB, "100MB-500MB"),
        (GB, "500MB-1GB"),
        (5 * GB, "1GB-5GB"),
        (10 * GB, "5GB-10GB"),
        (20 * GB, "10GB-20GB"),
        (30 * GB, "20GB-30GB"),
        (40 * GB, "30GB-40GB"),
        (60 * GB, "40GB-60GB"),
        (100 * GB, "60GB-100GB"),
    ];
    classes
        .into_iter()
        .find(|(most, _)| bytes <= *most)
        .map_or("GT100GB", |(_, name)| name)
}

/// How long a pod's start took, in seconds.
#[derive(Debug, Clone, Copy)]
pub struct PodStart {
    /// Since the agent saw it first.
    pub seen: f64,
    /// Since it was created.
    pub created: f64,
    /// What of it went into images.
    pub images: f64,
    /// Whether it has storage of its own, whose time is not ours.
    pub stateful: bool,
}

/// A probe of a container.
#[derive(Debug, Clone, Copy)]
pub struct Probe<'a> {
    /// The container, its pod's namespace and name, the pod's uid.
    pub of: [&'a str; 4],
    /// `Liveness`, `Readiness` or `Startup`.
    pub kind: &'a str,
    /// `successful`, `failed` or `unknown`.
    pub result: &'a str,
    /// How long the answer took.
    pub took: Duration,
}

/// What was done with a volume.
#[derive(Debug, Clone, Copy)]
pub struct VolumeOperation<'a> {
    /// `volume_mount`, for instance.
    pub name: &'a str,
    /// Its plugin, of a driver's volume with the driver.
    pub plugin: &'a str,
    /// Whether a driver has taken over its kind.
    pub is_migrated: bool,
    /// Whether it failed.
    pub has_failed: bool,
    /// How long it took.
    pub took: Duration,
}

/// The volumes of a pod, each by its plugin.
#[derive(Debug, Clone, Default)]
pub struct PodVolumes {
    /// Those that it is to have; `N/A` for one whose plugin is not known yet.
    pub desired: Vec<String>,
    /// Those that are set up.
    pub actual: Vec<String>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is counted.
#[derive(Debug, Default)]
pub struct Metrics {
    /// The volumes of pods, by uid.
    volumes: Mutex<BTreeMap<String, PodVolumes>>,
    /// Pods that are gone and have left something, and those of them of which it could not be removed.
    orphans: Mutex<(usize, usize)>,
    /// When the runtime's pods were listed last, in seconds since 1970.
    listed_at: Mutex<Option<f64>>,
    own: Mutex<Registry>,
    probes: Mutex<Registry>,
    /// When the machine was shut down last, or is now.
    shutdown: Mutex<Times>,
}

impl Metrics {
    fn with(&self, work: impl FnOnce(&mut Registry)) {
        work(&mut lock(&self.own));
    }

    /// Counts.
    pub fn count(&self, family: Family, labels: &[&str], by: u64) {
        self.with(|r| r.count(family, labels, by));
    }

    /// Observes.
    pub fn observe(&self, family: Family, bounds: &'static [f64], labels: &[&str], value: f64) {
        self.with(|r| r.observe(family, bounds, labels, value));
    }

    /// A pod runs.
    pub fn pod_started(&self, start: PodStart) {
        self.with(|r| {
            r.observe(POD_START, POD_STARTS, &[], start.seen);
            r.observe(POD_START_TOTAL, POD_STARTS, &[], start.created);
            if !start.stateful {
                r.observe(
                    POD_START_SLI,
                    POD_STARTS,
                    &[],
                    (start.created - start.images).max(0.0),
                );
            }
        });
    }

    /// A worker has done a turn for its pod.
    pub fn worked(&self, operation: &str, took: Duration) {
        self.with(|r| r.observe(WORKER, USUAL, &[operation], took.as_secs_f64()));
    }

    /// A status has reached the API, so long after it was wanted.
    pub fn status_written(&self, took: Duration) {
        self.with(|r| r.observe(STATUS, STATUSES, &[], took.as_secs_f64()));
    }

    /// A sandbox was made, or not.
    pub fn sandbox(&self, handler: &str, refused: bool, took: Duration) {
        self.with(|r| {
            r.observe(SANDBOX, USUAL, &[handler], took.as_secs_f64());
            r.count(SANDBOX_ERRORS, &[handler], u64::from(refused));
            r.count(STARTED_PODS, &[], 1);
            r.count(STARTED_PODS_ERRORS, &[], u64::from(refused));
        });
    }

    /// A container was started, or failed for this reason.
    pub fn container_started(&self, kind: &str, failed: Option<&str>) {
        self.with(|r| {
            r.count(STARTED, &[kind], 1);
            if let Some(code) = failed {
                r.count(STARTED_ERRORS, &[kind, code], 1);
            }
        });
    }

    /// A pod was not taken.
    pub fn rejected(&self, reason: &str) {
        self.with(|r| r.count(REJECTED, &[reason], 1));
    }

    /// A pod was ended for another.
    pub fn preempted(&self, signal: &str) {
        self.with(|r| r.count(PREEMPTED, &[signal], 1));
    }

    /// A pod was ended for what it used.
    pub fn evicted(&self, signal: &str) {
        self.with(|r| r.count(EVICTED, &[signal], 1));
    }

    /// The machine is shut down, or was the last time.
    pub fn shut_down(&self, times: Times) {
        *lock(&self.shutdown) = times;
    }

    /// When the machine was shut down last, as far as that is known.
    pub fn shutdown(&self) -> Times {
        *lock(&self.shutdown)
    }

    /// A pod was chosen to go by figures that are so old.
    pub fn eviction_decided(&self, signal: &str, age: Duration) {
        self.with(|r| r.observe(EVICTION_AGE, USUAL, &[signal], age.as_secs_f64()));
    }

    /// An image of so many bytes was pulled.
    pub fn pulled(&self, bytes: u64, took: Duration) {
        self.with(|r| r.observe(PULLED, PULLS, &[size_class(bytes)], took.as_secs_f64()));
    }

    /// An image was removed, for `space` or for `age`.
    pub fn collected(&self, reason: &str) {
        self.with(|r| r.count(COLLECTED, &[reason], 1));
    }

    /// Something was done with a volume, or not.
    pub fn volume(&self, operation: VolumeOperation<'_>) {
        let status = match operation.has_failed {
            true => "fail-unknown",
            false => "success",
        };
        let migrated = match operation.is_migrated {
            true => "true",
            false => "false",
        };
        let labels = [migrated, operation.name, status, operation.plugin];
        self.with(|r| r.observe(STORAGE, STORING, &labels, operation.took.as_secs_f64()));
    }

    /// A volume is there, so long after its pod asked for it first.
    pub fn volume_ready(&self, plugin: &str, took: Duration) {
        let labels = [plugin, "overall_volume_mount"];
        self.with(|r| r.observe(STORAGE_TOTAL, STORING, &labels, took.as_secs_f64()));
    }

    /// So many volumes stood on the disk when the agent started, and of so many it cannot be told what they are.
    pub fn reconstructed(&self, volumes: u64, unknown: u64) {
        self.with(|r| {
            r.count(RECONSTRUCTED, &[], volumes);
            r.count(RECONSTRUCTED_ERRORS, &[], unknown);
            r.count(FORCE_CLEANED, &[], 0);
            r.count(FORCE_CLEANED_ERRORS, &[], 0);
        });
    }

    /// So many volumes of which it cannot be told what they are were cleared up for a pod that is gone, or could not be.
    pub fn force_cleaned(&self, volumes: u64, has_failed: bool) {
        self.with(|r| {
            r.count(FORCE_CLEANED, &[], volumes);
            r.count(
                FORCE_CLEANED_ERRORS,
                &[],
                if has_failed { volumes } else { 0 },
            );
        });
    }

    /// Pods that are gone have left something: how many, and of how many it could not be removed yet.
    pub fn orphans(&self, found: usize, failed: usize) {
        *lock(&self.orphans) = (found, failed);
    }

    /// How many pods that are gone had left something at the last look, and of how many it could not be removed yet.
    #[must_use]
    pub fn orphaned(&self) -> (usize, usize) {
        *lock(&self.orphans)
    }

    /// What a pod has of volumes now.
    pub fn pod_has_volumes(&self, uid: &str, volumes: PodVolumes) {
        lock(&self.volumes).insert(uid.to_owned(), volumes);
    }

    /// A pod's volumes are given back.
    pub fn pod_has_no_volumes(&self, uid: &str) {
        lock(&self.volumes).remove(uid);
    }

    /// How many volumes there are, by state and plugin.
    #[must_use]
    pub fn volumes(&self) -> BTreeMap<(&'static str, String), usize> {
        let mut all = BTreeMap::new();
        for pod in lock(&self.volumes).values() {
            let desired = pod.desired.iter().map(|p| ("desired_state_of_world", p));
            let actual = pod.actual.iter().map(|p| ("actual_state_of_world", p));
            for (state, plugin) in desired.chain(actual) {
                *all.entry((state, plugin.clone())).or_default() += 1;
            }
        }
        all
    }

    /// A driver has answered a call, with gRPC's code.
    pub fn csi(&self, driver: &str, method: &str, code: &str, took: Duration) {
        let method = format!("/csi.v1.Node/{method}");
        let labels = [driver, code, &method, "false"];
        self.with(|r| r.observe(CSI, STORING, &labels, took.as_secs_f64()));
    }

    /// A device plugin wants to be registered.
    pub fn device_plugin_registered(&self, resource: &str) {
        self.with(|r| r.count(DEVICE_PLUGINS, &[resource], 1));
    }

    /// A device plugin was asked for what a container needs, and has answered or not.
    pub fn device_allocated(&self, resource: &str, took: Duration) {
        self.with(|r| r.observe(DEVICE_ALLOCATION, USUAL, &[resource], took.as_secs_f64()));
    }

    /// A request to an apiserver was answered; without a code it was not.
    pub fn requested(&self, method: &str, host: &str, code: Option<u16>) {
        let code = code.map_or_else(|| "<error>".to_owned(), |c| c.to_string());
        self.with(|r| r.count(CLIENT, &[&code, method, host], 1));
    }

    /// A command or port is served over a WebSocket.
    pub fn websocket(&self, what: &str) {
        self.with(|r| r.count(WEBSOCKETS, &[what], 1));
    }

    /// A step of a pod's life has ended: `done`, `failed` or `dropped`.
    pub fn step(&self, step: &str, result: &str, took: Duration) {
        self.with(|r| r.observe(STEPS, STEP, &[step, result], took.as_secs_f64()));
    }

    /// A call to the runtime has ended.
    pub fn runtime(&self, operation: &str, refused: bool, took: Duration) {
        self.with(|r| {
            r.count(RUNTIME_TOTAL, &[operation], 1);
            r.count(RUNTIME_ERRORS, &[operation], u64::from(refused));
            r.observe(RUNTIME_SECONDS, RUNTIME, &[operation], took.as_secs_f64());
        });
    }

    /// Work on a pod with so many containers begins, so long after the agent saw it first.
    pub fn pod_begun(&self, containers: usize, after: f64) {
        self.with(|r| {
            r.observe(CONTAINERS, COUNTS, &[], containers as f64);
            r.observe(WORKER_START, USUAL, &[], after);
        });
    }

    /// Waits until a pod's cgroup is made (`create`), changed (`update`) or removed (`destroy`).
    pub async fn cgroup<T>(&self, operation: &str, work: impl Future<Output = T>) -> T {
        let begun = tokio::time::Instant::now();
        let done = work.await;
        let took = begun.elapsed().as_secs_f64();
        self.with(|r| r.observe(CGROUPS, USUAL, &[operation], took));
        done
    }

    /// The runtime's pods were listed, at `now` in seconds since 1970.
    pub fn listed(&self, now: f64, took: Duration, since_last: Option<Duration>) {
        *lock(&self.listed_at) = Some(now);
        self.with(|r| {
            r.observe(RELIST, USUAL, &[], took.as_secs_f64());
            if let Some(since) = since_last {
                r.observe(INTERVAL, USUAL, &[], since.as_secs_f64());
            }
        });
    }

    /// Something was asked over HTTP, and answered after so long.
    pub fn http(&self, method: &str, path: &str, long: bool, took: Duration) {
        let labels = [
            method,
            path,
            "readwrite",
            if long { "true" } else { "false" },
        ];
        self.with(|r| {
            r.count(HTTP, &labels, 1);
            r.observe(HTTP_SECONDS, USUAL, &labels, took.as_secs_f64());
        });
    }

    /// A probe has an answer. How long it took counts where it did not fail, as in the kubelet.
    pub fn probed(&self, probe: Probe<'_>) {
        let [container, namespace, pod, uid] = probe.of;
        let labels = [container, namespace, pod, uid, probe.kind, probe.result];
        let mut probes = lock(&self.probes);
        probes.count(PROBES, &labels, 1);
        if probe.result != "failed" {
            let labels = [container, namespace, pod, probe.kind];
            probes.observe(PROBE_SECONDS, USUAL, &labels, probe.took.as_secs_f64());
        }
    }

    /// A pod is gone: so is what was counted of its probes.
    pub fn gone(&self, pod: &Pod) {
        let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
        let mut probes = lock(&self.probes);
        probes.forget(PROBES, &[("pod_uid", pod::uid(pod))]);
        // How long they took is known by the name alone. A newer pod of this name begins anew.
        let of = [("namespace", namespace.as_str()), ("pod", &name)];
        probes.forget(PROBE_SECONDS, &of);
    }

    /// Writes what is counted of the agent, or of probes.
    pub fn write(&self, probes: bool, page: &mut Page) {
        let of = if probes { &self.probes } else { &self.own };
        lock(of).write(page);
        if let Some(at) = lock(&self.listed_at).filter(|_| !probes) {
            page.single(
                "kubelet_pleg_last_seen_seconds",
                "gauge",
                "When the runtime's pods were listed last, in seconds since 1970.",
                &[],
                at,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_of_a_size() {
        let classes = [0, 10 << 20, (10 << 20) + 1, 2 << 30, 200 << 30].map(size_class);
        assert_eq!(
            classes,
            ["0-10MB", "0-10MB", "10MB-100MB", "1GB-5GB", "GT100GB"]
        );
    }
}
