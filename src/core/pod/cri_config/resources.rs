//! Resources in CRI units (`pkg/kubelet/kuberuntime/kuberuntime_container_linux.go`). Pure.

use std::sync::Arc;

use holdfast_proto::cri as pb;
use k8s_openapi::api::core::v1::{Container, Pod};

use super::Node;
use crate::cpuset::format_list;
use crate::pod;
use crate::pod::cgroup::{self, oom_score_adj};
use crate::pod::cgroup_values::page_name;
use crate::pod::memory_qos;
use crate::pod::priority::is_critical;
use crate::pod::qos::{self, QosClass};
use crate::pod::resources::{
    Amounts, Side, amounts, huge_pages, of_container, of_containers, of_pod_level,
};
use crate::quantity::Quantity;

/// The swap that containers may use (KEP-2400).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Swap {
    /// Bytes of swap that pods share in proportion to their memory requests. 0 disables swap for containers.
    pub bytes: u64,
    /// Whether the node uses cgroup v2.
    pub unified: bool,
}

/// Converts requests and limits to CRI units.
fn linux(requests: &Amounts, limits: &Amounts, node: &Node) -> pb::LinuxContainerResources {
    let share = requests
        .get("cpu")
        .or(limits.get("cpu"))
        .map_or(0, |q| q.milli());
    let quota = limits
        .get("cpu")
        .zip(node.cpu_period)
        .map_or(0, |(q, period)| cgroup::quota(q.milli(), period));
    pb::LinuxContainerResources {
        cpu_shares: i64::try_from(cgroup::shares(share)).unwrap_or(2),
        cpu_period: node
            .cpu_period
            .and_then(|p| i64::try_from(p).ok())
            .unwrap_or(0),
        cpu_quota: quota,
        memory_limit_in_bytes: limits.get("memory").map_or(0, |q| q.units()),
        ..pb::LinuxContainerResources::default()
    }
}

/// A container's limits, with the pod's where it has none (KEP-2837).
fn with_the_pods(pod: &Pod, own: &Amounts) -> Amounts {
    let mut limits = own.clone();
    for (name, limit) in of_pod_level(pod, Side::Limits) {
        let has_own = limits.get(&name).is_some_and(|own| !own.is_zero());
        if !has_own {
            limits.insert(name, limit);
        }
    }
    limits
}

/// The CRI resources of a container.
#[must_use]
pub fn resources(pod: &Pod, container: &Container, node: &Node) -> pb::LinuxContainerResources {
    let (requests, limits) = (
        of_container(container, Side::Requests),
        of_container(container, Side::Limits),
    );
    let bounds = with_the_pods(pod, &limits);
    let mut message = linux(&requests, &bounds, node);
    message.oom_score_adj = oom_score_adj(pod, container, node.memory);
    match node.swap {
        Some(swap) if swap.unified => {
            message.unified.insert(
                "memory.swap.max".into(),
                swap_share(pod, &requests, &limits, swap.bytes, node.memory).to_string(),
            );
        }
        // In cgroup v1, this limit is the sum of memory and swap.
        Some(_) => message.memory_swap_limit_in_bytes = message.memory_limit_in_bytes,
        None => {}
    }
    if let Some((rules, allocatable)) = node.memory_qos {
        let files = memory_qos::of_one_container(pod, container, rules, allocatable);
        let files = files.into_iter();
        let files = files.map(|(file, bytes)| (file.to_owned(), bytes.to_string()));
        message.unified.extend(files);
    }
    message.hugepage_limits = hugepages(&bounds, node);
    bind(&mut message, pod::uid(pod), &container.name, node);
    if node.group_oom {
        message
            .unified
            .insert("memory.oom.group".into(), "1".into());
    }
    message
}

/// Binds a container to its CPUs and NUMA nodes. A container with exclusive CPUs has no CPU quota (the kubelet's
/// feature gate `DisableCPUQuotaWithExclusiveCPUs`).
fn bind(message: &mut pb::LinuxContainerResources, uid: &str, name: &str, node: &Node) {
    if let Some(cpus) = node.pinning.cpus(uid, name) {
        message.cpuset_cpus = format_list(cpus);
    }
    if let Some(nodes) = node.pinning.memory_nodes(uid, name) {
        message.cpuset_mems = format_list(nodes);
    }
    if node.pinning.has_own_cpus(uid, name) {
        lift_quota(message);
    }
}

fn lift_quota(message: &mut pb::LinuxContainerResources) {
    if message.cpu_period != 0 {
        message.cpu_quota = -1;
    }
}

/// The memory request that determines a container's share of swap. Only containers of Burstable pods that are not
/// critical have one.
fn swapping_request(pod: &Pod, requests: &Amounts, limits: &Amounts) -> Option<Quantity> {
    let entitled = qos::of(pod::spec(pod)) == QosClass::Burstable
        && !is_critical(pod)
        && requests.get("memory") != limits.get("memory");
    let request = requests.get("memory").copied();
    request.filter(|q| entitled && !q.is_zero())
}

/// Whether a container may use swap if the node allows it (`GetContainerSwapBehavior` in
/// `pkg/kubelet/kuberuntime/kuberuntime_container_linux.go`).
#[must_use]
pub(crate) fn may_swap(pod: &Pod, container: &Container) -> bool {
    let of = |side| of_container(container, side);
    swapping_request(pod, &of(Side::Requests), &of(Side::Limits)).is_some()
}

/// A container's share of `swap` bytes, in proportion to its memory request.
fn swap_share(pod: &Pod, requests: &Amounts, limits: &Amounts, swap: u64, memory: u64) -> u64 {
    let Some(request) = swapping_request(pod, requests, limits) else {
        return 0;
    };
    let share = u128::try_from(request.units()).unwrap_or(0);
    let share = share.saturating_mul(swap.into());
    let share = share.checked_div(memory.into()).unwrap_or(share);
    u64::try_from(share).unwrap_or(swap).min(swap)
}

/// One limit for each huge page size of the kernel. Sizes that the container does not request get a limit of 0.
fn hugepages(limits: &Amounts, node: &Node) -> Vec<pb::HugepageLimit> {
    let requested = |size| huge_pages(limits).find(|(of, _)| *of == size);
    let limit = |size: &u64| pb::HugepageLimit {
        page_size: page_name(*size),
        limit: requested(*size).map_or(0, |(_, bytes)| bytes),
    };
    node.page_sizes.iter().map(limit).collect()
}

/// The pod's overhead in CRI units.
pub(super) fn overhead(pod: &Pod) -> pb::LinuxContainerResources {
    let amounts = pod::spec(pod)
        .overhead
        .as_ref()
        .map(amounts)
        .unwrap_or_default();
    if amounts.is_empty() {
        return pb::LinuxContainerResources::default();
    }
    linux(&amounts, &amounts, &Node::new(Arc::default()))
}

/// The total resources of the pod's containers, for runtimes that size the sandbox by them. The overhead is reported
/// separately.
pub(super) fn whole_resources(pod: &Pod, node: &Node) -> pb::LinuxContainerResources {
    let of = |side| {
        let mut amounts = of_containers(pod, side);
        amounts.extend(of_pod_level(pod, side));
        amounts
    };
    let mut message = linux(&of(Side::Requests), &of(Side::Limits), node);
    if node.pinning.pod_has_own_cpus(pod::uid(pod)) {
        lift_quota(&mut message);
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::resources::of_pod;
    use serde_json::{Value, json};

    fn made(spec: Value, swap: Option<Swap>) -> pb::LinuxContainerResources {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec}))
            .expect("a pod");
        let node = Node {
            memory: 1 << 30,
            swap,
            ..Node::new(Arc::default())
        };
        resources(&pod, &pod::spec(&pod).containers[0], &node)
    }

    #[test]
    fn static_pods_are_kept_out_of_swap() {
        let share = |source: &str| {
            let pod: Pod = serde_json::from_value(json!({
                "metadata": {"annotations": {"kubernetes.io/config.source": source}},
                "spec": {"containers": [{"name": "c", "resources": {"requests": {"memory": "1Ki"}}}]},
            }))
            .expect("a pod");
            let requests = of_pod(&pod, Side::Requests);
            swap_share(&pod, &requests, &Amounts::new(), 1 << 20, 1 << 20)
        };
        assert_eq!((share("api"), share("file")), (1 << 10, 0));
    }

    #[test]
    fn swap_is_proportional_to_the_memory_request_or_disabled() {
        let burstable =
            json!({"containers": [{"name": "c", "resources": {"requests": {"memory": "256Mi"}}}]});
        let limited = Some(Swap {
            bytes: 1 << 20,
            unified: true,
        });
        let share = |spec: &Value, swap| {
            made(spec.clone(), swap)
                .unified
                .get("memory.swap.max")
                .cloned()
        };
        assert_eq!(share(&burstable, limited).as_deref(), Some("262144"));
        assert_eq!(
            share(
                &burstable,
                Some(Swap {
                    bytes: 0,
                    unified: true
                })
            )
            .as_deref(),
            Some("0")
        );
        assert_eq!(share(&burstable, None), None);
        let mut critical = burstable.clone();
        critical["priority"] = 2_000_000_000.into();
        let guaranteed = json!({"containers": [{"name": "c", "resources": {"limits": {"cpu": "1", "memory": "256Mi"}}}]});
        for spec in [
            critical,
            guaranteed.clone(),
            json!({"containers": [{"name": "c"}]}),
        ] {
            assert_eq!(share(&spec, limited).as_deref(), Some("0"), "{spec}");
        }
        let v1 = made(
            guaranteed,
            Some(Swap {
                bytes: 0,
                unified: false,
            }),
        );
        assert_eq!(
            (
                v1.memory_limit_in_bytes,
                v1.memory_swap_limit_in_bytes,
                v1.unified.len()
            ),
            (256 << 20, 256 << 20, 0)
        );
    }

    #[test]
    fn containers_without_limits_get_the_pods_limits() {
        let spec = |own: Value| json!({"resources": {"limits": {"memory": "64Mi", "cpu": "1"}}, "containers": [{"name": "c", "resources": own}]});
        assert_eq!(made(spec(json!({})), None).memory_limit_in_bytes, 64 << 20);
        assert_eq!(
            made(spec(json!({"limits": {"memory": "32Mi"}})), None).memory_limit_in_bytes,
            32 << 20
        );
        let cpu = |own: Value| {
            let message = made(spec(own), None);
            (message.cpu_quota, message.cpu_shares)
        };
        assert_eq!(cpu(json!({})), (100_000, 1024));
        assert_eq!(cpu(json!({"limits": {"cpu": "500m"}})), (50_000, 512));
        assert_eq!(cpu(json!({"limits": {"cpu": "0"}})), (100_000, 1024));
        // The container's own request is used.
        assert_eq!(cpu(json!({"requests": {"cpu": "250m"}})), (100_000, 256));
    }
}
