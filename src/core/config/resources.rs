//! Resources in the runtime's units (kubelet spec, 6.8). Pure.

use holdfast_proto::cri as pb;
use k8s_openapi::api::core::v1::{Container, Pod};

use super::super::cgroup::{self, oom_score_adj};
use super::super::dns::Resolver;
use super::super::pod;
use super::super::quantity::Quantity;
use super::super::resources::{Amounts, Side, amounts, of_container, of_pod};
use super::Node;

/// What amounts come to in the runtime's units.
fn linux(requests: &Amounts, limits: &Amounts, node: &Node<'_>) -> pb::LinuxContainerResources {
    let share = requests.get("cpu").or(limits.get("cpu")).map_or(0, |q| q.milli());
    let quota = limits.get("cpu").zip(node.cpu_period).map_or(0, |(q, period)| cgroup::quota(q.milli(), period));
    pb::LinuxContainerResources {
        cpu_shares: i64::try_from(cgroup::shares(share)).unwrap_or(2),
        cpu_period: node.cpu_period.and_then(|p| i64::try_from(p).ok()).unwrap_or(0),
        cpu_quota: quota,
        memory_limit_in_bytes: limits.get("memory").map_or(0, |q| q.units()),
        ..pb::LinuxContainerResources::default()
    }
}

/// A container's resources in the runtime's units (kubelet spec, 6.8).
#[must_use]
pub fn resources(pod: &Pod, container: &Container, node: &Node<'_>) -> pb::LinuxContainerResources {
    let (requests, limits) = (of_container(container, Side::Requests), of_container(container, Side::Limits));
    let mut message = linux(&requests, &limits, node);
    message.oom_score_adj = oom_score_adj(pod, container, node.memory);
    message.hugepage_limits = hugepages(&limits, node);
    if node.group_oom {
        message.unified.insert("memory.oom.group".into(), "1".into());
    }
    message
}

/// One limit for each size that the kernel knows: what is not asked for is not to be had.
fn hugepages(limits: &Amounts, node: &Node<'_>) -> Vec<pb::HugepageLimit> {
    let asked = |size: &str| {
        let of = |(name, amount): (&String, &Quantity)| {
            let wanted = name.strip_prefix("hugepages-")?.parse::<Quantity>().ok()?;
            (page_size(wanted.units()) == size).then(|| u64::try_from(amount.units()).unwrap_or(0))
        };
        limits.iter().find_map(of).unwrap_or(0)
    };
    node.hugepages.iter().map(|size| pb::HugepageLimit { page_size: size.clone(), limit: asked(size) }).collect()
}

/// A page size as the kernel's cgroup files name it, for instance `2MB`.
fn page_size(bytes: i64) -> String {
    let units = ["B", "KB", "MB", "GB", "TB"];
    let (mut size, mut unit) = (bytes, 0);
    while size >= 1024 && size % 1024 == 0 && unit + 1 < units.len() {
        size /= 1024;
        unit += 1;
    }
    format!("{size}{}", units[unit])
}

/// The pod's overhead.
pub(super) fn overhead(pod: &Pod) -> pb::LinuxContainerResources {
    let amounts = pod::spec(pod).overhead.as_ref().map(amounts).unwrap_or_default();
    if amounts.is_empty() {
        return pb::LinuxContainerResources::default();
    }
    linux(&amounts, &amounts, &Node::new(&Resolver::default()))
}

/// The sum of the pod's containers, for runtimes that size the sandbox by it.
pub(super) fn whole_resources(pod: &Pod, node: &Node<'_>) -> pb::LinuxContainerResources {
    linux(&of_pod(pod, Side::Requests), &of_pod(pod, Side::Limits), node)
}
