//! What is counted as it happens, under the kubelet's names (kubelet spec, chapter 18).

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::core::exposition::{Family, Page, Registry};

const POD_STARTS: &[f64] = &[
    0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0,
    2700.0, 3600.0,
];
const USUAL: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
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

const fn family(name: &'static str, help: &'static str, labels: &'static [&'static str]) -> Family {
    Family { name, help, labels }
}

const POD_START: Family =
    family("kubelet_pod_start_duration_seconds", "Duration in seconds from the agent's first sight of a pod to its running.", &[]);
const RUNTIME_TOTAL: Family =
    family("kubelet_runtime_operations_total", "Cumulative number of runtime operations by operation type.", &["operation_type"]);
const RUNTIME_ERRORS: Family =
    family("kubelet_runtime_operations_errors_total", "Cumulative number of runtime operation errors by operation type.", &["operation_type"]);
const RUNTIME_SECONDS: Family =
    family("kubelet_runtime_operations_duration_seconds", "Duration in seconds of runtime operations by operation type.", &["operation_type"]);
const RELIST: Family = family("kubelet_pleg_relist_duration_seconds", "Duration in seconds for listing the runtime's pods.", &[]);
const INTERVAL: Family = family("kubelet_pleg_relist_interval_seconds", "Interval in seconds between two such listings.", &[]);
const HTTP: Family = family(
    "kubelet_http_requests_total",
    "Number of the HTTP requests received since the agent started.",
    &["method", "path", "server_type", "long_running"],
);
const PROBES: Family = family(
    "prober_probe_total",
    "Cumulative number of a liveness, readiness or startup probe for a container by result.",
    &["container", "namespace", "pod", "pod_uid", "probe_type", "result"],
);

/// A probe of a container.
#[derive(Debug, Clone, Copy)]
pub struct Probe<'a> {
    /// The container, its pod's namespace and name, the pod's uid.
    pub of: [&'a str; 4],
    /// `Liveness`, `Readiness` or `Startup`.
    pub kind: &'a str,
    /// `successful`, `failed` or `unknown`.
    pub result: &'a str,
}

/// What is counted.
#[derive(Debug, Default)]
pub struct Metrics {
    own: Mutex<Registry>,
    probes: Mutex<Registry>,
}

impl Metrics {
    fn with(&self, work: impl FnOnce(&mut Registry)) {
        work(&mut self.own.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// A pod runs, so many seconds after it was first seen.
    pub fn pod_started(&self, seconds: f64) {
        self.with(|r| r.observe(POD_START, POD_STARTS, &[], seconds));
    }

    /// A call to the runtime has ended.
    pub fn runtime(&self, operation: &str, refused: bool, took: Duration) {
        self.with(|r| {
            r.count(RUNTIME_TOTAL, &[operation], 1);
            r.count(RUNTIME_ERRORS, &[operation], u64::from(refused));
            r.observe(RUNTIME_SECONDS, RUNTIME, &[operation], took.as_secs_f64());
        });
    }

    /// The runtime's pods were listed.
    pub fn listed(&self, took: Duration, since_last: Option<Duration>) {
        self.with(|r| {
            r.observe(RELIST, USUAL, &[], took.as_secs_f64());
            if let Some(since) = since_last {
                r.observe(INTERVAL, USUAL, &[], since.as_secs_f64());
            }
        });
    }

    /// Something was asked over HTTP.
    pub fn http(&self, method: &str, path: &str, long: bool) {
        self.with(|r| r.count(HTTP, &[method, path, "readwrite", if long { "true" } else { "false" }], 1));
    }

    /// A probe has an answer.
    pub fn probed(&self, probe: Probe<'_>) {
        let [container, namespace, pod, uid] = probe.of;
        let labels = [container, namespace, pod, uid, probe.kind, probe.result];
        self.probes.lock().unwrap_or_else(PoisonError::into_inner).count(PROBES, &labels, 1);
    }

    /// A pod is gone: so is what was counted of its probes.
    pub fn gone(&self, uid: &str) {
        self.probes.lock().unwrap_or_else(PoisonError::into_inner).forget("pod_uid", uid);
    }

    /// Writes what is counted of the agent, or of probes.
    pub fn write(&self, probes: bool, page: &mut Page) {
        let of = if probes { &self.probes } else { &self.own };
        of.lock().unwrap_or_else(PoisonError::into_inner).write(page);
    }
}
