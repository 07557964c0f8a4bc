//! Metrics of the resource managers, under the kubelet's names (`pkg/kubelet/metrics/metrics.go`).

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use crate::metrics::{Metrics, family};
use holdfast_core::cpuset::CpuSet;
use holdfast_core::node::cgroup_tree::{Rules, protection};
use holdfast_core::node::hints::{Count, Scope};
use holdfast_core::node::managers::Managers;
use holdfast_core::serving::exposition::{Family, Page};

const CPU_REQUESTS: Family = family(
    "kubelet_cpu_manager_pinning_requests_total",
    "The number of containers that requested exclusive CPUs.",
    &[],
);
const CPU_ERRORS: Family = family(
    "kubelet_cpu_manager_pinning_errors_total",
    "The number of containers that requested exclusive CPUs and got none.",
    &[],
);
const MEMORY_REQUESTS: Family = family(
    "kubelet_memory_manager_pinning_requests_total",
    "The number of containers that requested memory from assigned NUMA nodes.",
    &[],
);
const MEMORY_ERRORS: Family = family(
    "kubelet_memory_manager_pinning_errors_total",
    "The number of containers that requested memory from assigned NUMA nodes and got none.",
    &[],
);
const ADMISSIONS: Family = family(
    "kubelet_topology_manager_admission_requests_total",
    "The number of pods whose resources had to be aligned.",
    &[],
);
const ADMISSION_ERRORS: Family = family(
    "kubelet_topology_manager_admission_errors_total",
    "The number of pods whose resources could not be aligned or allocated.",
    &[],
);
const ADMISSION_MS: Family = family(
    "kubelet_topology_manager_admission_duration_ms",
    "Duration in milliseconds to decide which exclusive resources a pod gets.",
    &[],
);
const ALIGNED: Family = family(
    "kubelet_container_aligned_compute_resources_count",
    "Cumulative number of containers or pods whose resources are aligned, by alignment boundary.",
    &["scope", "boundary"],
);
const NOT_ALIGNED: Family = family(
    "kubelet_container_aligned_compute_resources_failure_count",
    "Cumulative number of containers or pods whose resources could not be aligned, by alignment boundary.",
    &["scope", "boundary"],
);
/// 0.05 × 2ⁿ, 15 buckets.
const MILLISECONDS: &[f64] = &[
    0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6, 819.2,
];

fn scope(scope: Scope) -> &'static str {
    match scope {
        Scope::Container => "container",
        Scope::Pod => "pod",
    }
}

fn count(metrics: &Metrics, count: Count, by: u64) {
    let (family, labels): (Family, &[&str]) = match count {
        Count::Alignment => (ADMISSIONS, &[]),
        Count::AlignmentError => (ADMISSION_ERRORS, &[]),
        Count::OneNode(of) => (ALIGNED, &[scope(of), "numa_node"]),
        Count::NoNode(of) => (NOT_ALIGNED, &[scope(of), "numa_node"]),
        Count::CpuPinning => (CPU_REQUESTS, &[]),
        Count::CpuPinningError => (CPU_ERRORS, &[]),
        Count::WholeCores => (ALIGNED, &["container", "physical_cpu"]),
        Count::NoWholeCores => (NOT_ALIGNED, &["container", "physical_cpu"]),
        Count::OneCache => (ALIGNED, &["container", "uncore_cache"]),
        Count::MemoryPinning => (MEMORY_REQUESTS, &[]),
        Count::MemoryPinningError => (MEMORY_ERRORS, &[]),
    };
    metrics.count(family, labels, by);
}

/// Creates the counters with a value of 0, as the kubelet does.
pub fn begin(metrics: &Metrics, managers: &Managers) {
    let plain = [
        Count::Alignment,
        Count::AlignmentError,
        Count::CpuPinning,
        Count::CpuPinningError,
        Count::MemoryPinning,
        Count::MemoryPinningError,
    ];
    let cpus = [Count::WholeCores, Count::NoWholeCores, Count::OneCache];
    let nodes = [Scope::Container, Scope::Pod].map(|of| [Count::OneNode(of), Count::NoNode(of)]);
    let cpus = cpus.into_iter().filter(|_| managers.cpus().is_some());
    let nodes = nodes.into_iter().flatten();
    let nodes = nodes.filter(|_| managers.aligns());
    for each in plain.into_iter().chain(cpus).chain(nodes) {
        count(metrics, each, 0);
    }
}

/// Writes how much memory is protected for these pods; nothing without memory QoS.
pub(crate) fn write_protected(rules: &Rules, pods: &[&Pod], page: &mut Page) {
    let Some(all) = protection(rules, pods) else {
        return;
    };
    page.single(
        "kubelet_memory_qos_node_memory_min_bytes",
        "gauge",
        "Memory of guaranteed pods that is never reclaimed for others (memory.min), in bytes.",
        &[],
        all.min as f64,
    );
    page.single(
        "kubelet_memory_qos_node_memory_low_bytes",
        "gauge",
        "Memory of burstable pods that is reclaimed last (memory.low), in bytes.",
        &[],
        all.low as f64,
    );
}

/// Records a decision of the managers about a pod, and its duration.
pub fn admitted(metrics: &Metrics, counts: &[Count], took: Duration) {
    for each in counts {
        count(metrics, *each, 1);
    }
    let took = took.as_secs_f64() * 1000.0;
    metrics.observe(ADMISSION_MS, MILLISECONDS, &[], took);
}

/// Writes the sizes of the shared pool of CPUs and of the exclusive CPUs. Both are 0 without a static policy.
pub fn write(managers: &Managers, page: &mut Page) {
    let cpus = managers.cpus();
    let shared = cpus.map_or(0, |cpus| cpus.free().len());
    let own: CpuSet = cpus.map_or_else(CpuSet::new, |cpus| {
        let containers = cpus.state().exclusive.values().flat_map(BTreeMap::values);
        containers.flatten().copied().collect()
    });
    page.single(
        "kubelet_cpu_manager_shared_pool_size_millicores",
        "gauge",
        "The size of the shared CPUs that can be allocated exclusively, in millicores.",
        &[],
        (shared * 1000) as f64,
    );
    page.single(
        "kubelet_cpu_manager_exclusive_cpu_allocation_count",
        "gauge",
        "The number of CPUs that are allocated exclusively.",
        &[],
        own.len() as f64,
    );
    let Some(topology) = cpus.map(|cpus| cpus.topology()) else {
        return;
    };
    let mut by_node: BTreeMap<String, usize> = BTreeMap::new();
    for node in topology.nodes.keys() {
        by_node.insert(node.to_string(), 0);
    }
    for cpu in topology.cpus.intersection(&own).0.values() {
        *by_node.entry(cpu.node.to_string()).or_default() += 1;
    }
    let name = "kubelet_cpu_manager_allocation_per_numa";
    page.family(
        name,
        "gauge",
        "The number of CPUs that are allocated exclusively, by NUMA node.",
    );
    for (node, count) in by_node {
        page.sample(name, &[("numa_node", node.as_str())], count as f64, None);
    }
}
