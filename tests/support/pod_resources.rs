//! The podresources API as a monitoring agent uses it.
#![allow(dead_code, clippy::unwrap_used)]

use std::time::Duration;

use holdfast_proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use holdfast_proto::podresources::{AllocatableResourcesRequest, ListPodResourcesRequest};
use holdfast_proto::podresources_v1alpha1 as alpha;
use holdfast_proto::socket::channel;
use tonic::transport::Channel;

use crate::support::Cluster;

/// Queries the agent of a cluster.
pub fn with_client<T>(
    cluster: &Cluster,
    work: impl AsyncFnOnce(PodResourcesListerClient<Channel>) -> T,
) -> T {
    connect(cluster, async |channel| {
        work(PodResourcesListerClient::new(channel)).await
    })
}

/// The devices of all pods by resource, from API version `v1alpha1`. `None` while the agent does not answer.
pub fn v1alpha1(cluster: &Cluster) -> Option<Vec<String>> {
    connect(cluster, async |channel| {
        let mut client = alpha::pod_resources_lister_client::PodResourcesListerClient::new(channel);
        let listed = client.list(alpha::ListPodResourcesRequest {}).await.ok()?;
        let mut rows = vec![];
        for pod in listed.into_inner().pod_resources {
            for device in pod.containers.iter().flat_map(|c| &c.devices) {
                let ids = device.device_ids.join(",");
                rows.push(format!("{} {} {ids}", pod.name, device.resource_name));
            }
        }
        rows.sort();
        Some(rows)
    })
}

fn connect<T>(cluster: &Cluster, work: impl AsyncFnOnce(Channel) -> T) -> T {
    let socket = cluster.data().join("agent/pod-resources/kubelet.sock");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let channel = channel(socket.to_str().unwrap(), Duration::from_secs(10)).unwrap();
        work(channel).await
    })
}

/// The containers with exclusive CPUs (pod, CPUs, bytes of memory and the number of NUMA nodes), and
/// the allocatable CPUs. `None` while the agent does not answer.
pub fn list_assignments(cluster: &Cluster) -> Option<(Vec<String>, Vec<i64>)> {
    with_client(cluster, async |mut client| {
        let listed = client.list(ListPodResourcesRequest {}).await.ok()?;
        let mut rows = vec![];
        for pod in listed.into_inner().pod_resources {
            for container in pod.containers.iter().filter(|c| !c.cpu_ids.is_empty()) {
                let block = container.memory.first()?;
                let nodes = block.topology.iter().flat_map(|t| &t.nodes).count();
                let (kind, size, cpus) = (&block.memory_type, block.size, &container.cpu_ids);
                rows.push(format!("{} {cpus:?} {kind} {size} of {nodes}", pod.name));
            }
        }
        let request = AllocatableResourcesRequest {};
        let all = client.get_allocatable_resources(request).await.ok()?;
        let all = all.into_inner();
        assert!(all.memory.iter().any(|m| m.memory_type == "memory"));
        Some((rows, all.cpu_ids))
    })
}
