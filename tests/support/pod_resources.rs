//! The podresources API as a monitoring agent asks it.
#![allow(dead_code, clippy::unwrap_used)]

use std::time::Duration;

use holdfast_proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use holdfast_proto::podresources::{AllocatableResourcesRequest, ListPodResourcesRequest};
use holdfast_proto::socket::channel;
use tonic::transport::Channel;

use crate::support::Cluster;

/// Asks the agent of a cluster.
pub fn ask<T>(
    cluster: &Cluster,
    work: impl AsyncFnOnce(PodResourcesListerClient<Channel>) -> T,
) -> T {
    let socket = cluster.data().join("agent/pod-resources/kubelet.sock");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let channel = channel(socket.to_str().unwrap(), Duration::from_secs(10)).unwrap();
        work(PodResourcesListerClient::new(channel)).await
    })
}

/// Containers that have processors for themselves: pod, processors, bytes of memory and of how many NUMA nodes; and which
/// processors can be given at all. None while the agent does not answer.
pub fn who_has_what(cluster: &Cluster) -> Option<(Vec<String>, Vec<i64>)> {
    ask(cluster, async |mut client| {
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
