//! Metrics of calls to DRA drivers, under the kubelet's names (`pkg/kubelet/metrics/metrics.go`).

use std::time::Duration;

use crate::metrics::{Metrics, family};
use holdfast_core::node::claims::Claims;
use holdfast_core::serving::exposition::{Family, Page};

const OPERATIONS: Family = family(
    "dra_operations_duration_seconds",
    "Duration in seconds to prepare or unprepare all resource claims of a pod.",
    &["operation_name", "is_error"],
);
const CALLS: Family = family(
    "dra_grpc_operations_duration_seconds",
    "Duration in seconds of calls to DRA drivers.",
    &["driver_name", "method_name", "grpc_status_code"],
);
/// From 0.1 to 40 s, 15 buckets in a geometric series.
const SECONDS: &[f64] = &[
    0.1,
    0.153_412_740_463_439_1,
    0.235_354_689_365_024_36,
    0.361_064_078_764_099_46,
    0.553_918_298_061_075_2,
    0.849_781_240_983_936_7,
    1.303_672_689_737_683,
    2.0,
    3.068_254_809_268_781_4,
    4.707_093_787_300_507,
    7.221_281_575_281_991,
    11.078_365_961_221_504,
    16.995_624_819_678_72,
    26.073_453_794_753_576,
    40.0,
];

/// Records the preparation of all claims of a pod.
pub fn prepared(metrics: &Metrics, is_error: bool, took: Duration) {
    operation(metrics, "PrepareResources", is_error, took);
}

/// Records the release of all claims of a pod.
pub(crate) fn released(metrics: &Metrics, is_error: bool, took: Duration) {
    operation(metrics, "UnprepareResources", is_error, took);
}

fn operation(metrics: &Metrics, name: &str, is_error: bool, took: Duration) {
    let is_error = if is_error { "true" } else { "false" };
    metrics.observe(OPERATIONS, SECONDS, &[name, is_error], took.as_secs_f64());
}

/// Records a call to a driver; `code` is the gRPC status code.
pub fn called(metrics: &Metrics, driver: &str, method: &str, code: &str, took: Duration) {
    metrics.observe(CALLS, SECONDS, &[driver, method, code], took.as_secs_f64());
}

/// Writes the number of prepared claims, by driver and in total.
pub fn write(claims: &Claims, page: &mut Page) {
    let name = "dra_resource_claims_in_use";
    page.family(
        name,
        "gauge",
        "The number of resource claims that are prepared on this node, by driver; <any> counts all of them.",
    );
    for (driver, count) in claims.in_use() {
        let driver = if driver.is_empty() { "<any>" } else { &driver };
        page.sample(name, &[("driver_name", driver)], count as f64, None);
    }
}
