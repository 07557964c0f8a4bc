//! Metrics under kube-proxy's names (`pkg/proxy/metrics/metrics.go`). Those about iptables are left out.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use holdfast_core::lock::lock;
use holdfast_core::serving::exposition::{Family, Page, Registry};
use holdfast_core::version;
use holdfast_sys::meter;

/// 0.001 × 2ⁿ, 15 buckets.
const SYNC_BUCKETS: &[f64] = &[
    0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096,
    8.192, 16.384,
];
/// 0.25 and 0.5 s, each second to 59 s, each 5 s to 115 s, each 30 s to 5 min.
const PROGRAMMING_BUCKETS: &[f64] = &[
    0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0,
    15.0, 16.0, 17.0, 18.0, 19.0, 20.0, 21.0, 22.0, 23.0, 24.0, 25.0, 26.0, 27.0, 28.0, 29.0, 30.0,
    31.0, 32.0, 33.0, 34.0, 35.0, 36.0, 37.0, 38.0, 39.0, 40.0, 41.0, 42.0, 43.0, 44.0, 45.0, 46.0,
    47.0, 48.0, 49.0, 50.0, 51.0, 52.0, 53.0, 54.0, 55.0, 56.0, 57.0, 58.0, 59.0, 60.0, 65.0, 70.0,
    75.0, 80.0, 85.0, 90.0, 95.0, 100.0, 105.0, 110.0, 115.0, 120.0, 150.0, 180.0, 210.0, 240.0,
    270.0, 300.0,
];

const fn family(name: &'static str, help: &'static str, labels: &'static [&'static str]) -> Family {
    Family { name, help, labels }
}

const SYNC: Family = family(
    "kubeproxy_sync_proxy_rules_duration_seconds",
    "SyncProxyRules latency in seconds",
    &[],
);
const SYNC_PARTIAL: Family = family(
    "kubeproxy_sync_partial_proxy_rules_duration_seconds",
    "SyncProxyRules latency in seconds for partial resyncs",
    &[],
);
const LAST: Family = family(
    "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
    "The last time proxy rules were successfully synced",
    &[],
);
const LAST_QUEUED: Family = family(
    "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
    "The last time a sync of proxy rules was queued",
    &[],
);
const PROGRAMMING: Family = family(
    "kubeproxy_network_programming_duration_seconds",
    "In Cluster Network Programming Latency in seconds",
    &[],
);
const HEALTHZ: Family = family(
    "kubeproxy_proxy_healthz_total",
    "Cumulative proxy healthz HTTP status",
    &["code"],
);
const LIVEZ: Family = family(
    "kubeproxy_proxy_livez_total",
    "Cumulative proxy livez HTTP status",
    &["code"],
);
const FAILURES: Family = family(
    "kubeproxy_sync_proxy_rules_nftables_sync_failures_total",
    "Cumulative proxy nftables sync failures",
    &[],
);
const CHANGES: [(&str, &str); 2] = [
    (
        "kubeproxy_sync_proxy_rules_endpoint_changes_total",
        "Cumulative proxy rules Endpoint changes",
    ),
    (
        "kubeproxy_sync_proxy_rules_service_changes_total",
        "Cumulative proxy rules Service changes",
    ),
];
const REPAIRS: Family = family(
    "holdfast_proxy_repairs_total",
    "Number of audits that found the rules changed by another program and repaired them.",
    &[],
);

/// The counters.
#[derive(Default)]
pub(crate) struct Metrics {
    registry: Mutex<Registry>,
    slices: AtomicU64,
    services: AtomicU64,
    /// When a change last arrived, in milliseconds since 1970.
    queued: AtomicU64,
}

/// Seconds since 1970.
fn seconds(at: Timestamp) -> f64 {
    at.as_millisecond() as f64 / 1e3
}

impl Metrics {
    /// A Service has changed.
    pub(crate) fn service_changed(&self) {
        self.services.fetch_add(1, Ordering::Relaxed);
        self.queue();
    }

    /// An EndpointSlice has changed.
    pub(crate) fn slice_changed(&self) {
        self.slices.fetch_add(1, Ordering::Relaxed);
        self.queue();
    }

    fn queue(&self) {
        let now = holdfast_sys::clock::Clock::system().now().as_millisecond();
        self.queued
            .store(u64::try_from(now).unwrap_or(0), Ordering::Relaxed);
    }

    /// A transaction was committed at `now`, after causes at `triggers`.
    pub(crate) fn committed(&self, took: Duration, triggers: &[Timestamp], now: Timestamp) {
        let mut registry = lock(&self.registry);
        for of in [SYNC, SYNC_PARTIAL] {
            registry.observe(of, SYNC_BUCKETS, &[], took.as_secs_f64());
        }
        registry.set(LAST, seconds(now));
        for trigger in triggers {
            // The clocks of this node and of the control plane may differ.
            let latency = now.duration_since(*trigger).max(SignedDuration::ZERO);
            registry.observe(PROGRAMMING, PROGRAMMING_BUCKETS, &[], latency.as_secs_f64());
        }
    }

    /// A transaction failed.
    pub(crate) fn failed(&self) {
        lock(&self.registry).count(FAILURES, &[], 1);
    }

    /// An audit has repaired the rules.
    pub(crate) fn repaired(&self) {
        lock(&self.registry).count(REPAIRS, &[], 1);
    }

    /// `/healthz` was answered.
    pub(crate) fn healthz(&self, code: u16) {
        lock(&self.registry).count(HEALTHZ, &[&code.to_string()], 1);
    }

    /// `/livez` was answered.
    pub(crate) fn livez(&self, code: u16) {
        lock(&self.registry).count(LIVEZ, &[&code.to_string()], 1);
    }

    /// The page. `pending` is the number of services whose changes are not committed.
    pub(crate) fn page(&self, pending: usize) -> String {
        let mut page = Page::default();
        {
            let mut registry = lock(&self.registry);
            registry.count(FAILURES, &[], 0);
            registry.count(REPAIRS, &[], 0);
            let queued = self.queued.load(Ordering::Relaxed);
            registry.set(LAST_QUEUED, queued as f64 / 1e3);
            registry.write(&mut page);
        }
        let counts = [&self.slices, &self.services].map(|c| c.load(Ordering::Relaxed));
        for ((name, help), count) in CHANGES.into_iter().zip(counts) {
            page.single(name, "counter", help, &[], count as f64);
        }
        // Changes are counted by service here, whichever of its objects has changed.
        for name in [
            "kubeproxy_sync_proxy_rules_endpoint_changes_pending",
            "kubeproxy_sync_proxy_rules_service_changes_pending",
        ] {
            let help = "Services with changes that are not committed";
            page.single(name, "gauge", help, &[], pending as f64);
        }
        let build = [("git_version", version::KUBERNETES)];
        page.single(
            "kubernetes_build_info",
            "gauge",
            "A metric with a constant '1' value labeled by git version.",
            &build,
            1.0,
        );
        meter::write_process(&mut page);
        page.into_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_kube_proxys_names() {
        let metrics = Metrics::default();
        let at = |second| Timestamp::from_second(second).expect("a time");
        metrics.service_changed();
        metrics.slice_changed();
        metrics.slice_changed();
        metrics.committed(Duration::from_millis(3), &[at(98), at(200)], at(100));
        metrics.failed();
        metrics.healthz(200);
        metrics.livez(503);
        let page = metrics.page(7);
        for line in [
            "kubeproxy_sync_proxy_rules_duration_seconds_bucket{le=\"0.002\"} 0",
            "kubeproxy_sync_proxy_rules_duration_seconds_bucket{le=\"0.004\"} 1",
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds 100",
            "kubeproxy_network_programming_duration_seconds_sum 2",
            "kubeproxy_network_programming_duration_seconds_bucket{le=\"0\"} 1",
            "kubeproxy_sync_proxy_rules_endpoint_changes_total 2",
            "kubeproxy_sync_proxy_rules_service_changes_total 1",
            "kubeproxy_sync_proxy_rules_service_changes_pending 7",
            "kubeproxy_sync_proxy_rules_nftables_sync_failures_total 1",
            "kubeproxy_proxy_healthz_total{code=\"200\"} 1",
            "kubeproxy_proxy_livez_total{code=\"503\"} 1",
            "holdfast_proxy_repairs_total 0",
        ] {
            assert!(page.lines().any(|l| l == line), "{line} is not in:\n{page}");
        }
    }
}
