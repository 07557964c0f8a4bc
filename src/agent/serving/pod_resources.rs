//! The podresources API for monitoring agents (KEP-606; `pkg/kubelet/apis/podresources`): the devices, exclusive CPUs
//! and memory of each container. Served in v1 and v1alpha1 on `pod-resources/kubelet.sock` in the root directory.

use std::collections::BTreeSet;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use holdfast_proto::{podresources as pb, podresources_v1alpha1 as alpha};
use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::net::UnixListener;

use crate::metrics::Metrics;
use crate::node::ledger::LedgerHandle;
use crate::node::{ClaimManager, DeviceManager};
use holdfast_config::Config;
use holdfast_core::bucket::Bucket;
use holdfast_core::lock::lock;
use holdfast_core::meta;
use holdfast_core::node::claims::Claims;
use holdfast_core::node::claims::checkpoint::Device;
use holdfast_core::node::cpus::Cpus;
use holdfast_core::node::devices::Devices;
use holdfast_core::node::managers::Managers;
use holdfast_core::node::memory::{Block, Memory};
use holdfast_core::pod::{self, Role};
use holdfast_devices::{PodResources, serve_pod_resources};
use holdfast_sys::clock::Clock;

/// The directory of the socket, below the root directory.
const DIRECTORY: &str = "pod-resources";
/// The name of the socket.
const SOCKET: &str = "kubelet.sock";
/// The limit of requests per second and the burst, as in the kubelet.
const RATE: (f64, f64) = (100.0, 10.0);

fn listen(dir: &Path) -> std::io::Result<UnixListener> {
    match std::fs::DirBuilder::new().mode(0o750).create(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    holdfast_sys::link::listen(&dir.join(SOCKET))
}

/// What the podresources API uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub clock: Clock,
    pub metrics: Arc<Metrics>,
    pub ledger: LedgerHandle,
    pub devices: Arc<DeviceManager>,
    pub claims: Arc<ClaimManager>,
}

/// Serves until the process exits. If the socket cannot be created, the agent runs without it.
pub async fn run(parts: Parts) {
    let dir = parts.config.root_dir.join(DIRECTORY);
    let listener = match listen(&dir) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::warn!(%error, dir = %dir.display(), "the podresources API is not available: creating the socket failed");
            return std::future::pending().await;
        }
    };
    let (rate, burst) = RATE;
    let bucket = Mutex::new(Bucket::new(rate, burst, parts.clock.now()));
    serve_pod_resources(listener, Arc::new(Answers { parts, bucket })).await;
}

struct Answers {
    parts: Parts,
    bucket: Mutex<Bucket>,
}

/// Devices in the API's format: one entry for each device and NUMA node.
fn devices(rows: Vec<(String, String, BTreeSet<i64>)>) -> Vec<pb::ContainerDevices> {
    let entry = |resource: &str, id: &str, node: Option<i64>| pb::ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: vec![id.to_owned()],
        topology: node.map(|id| pb::TopologyInfo {
            nodes: vec![pb::NumaNode { id }],
        }),
    };
    let mut entries = vec![];
    for (resource, id, numa) in rows {
        if numa.is_empty() {
            entries.push(entry(&resource, &id, None));
        }
        entries.extend(numa.iter().map(|node| entry(&resource, &id, Some(*node))));
    }
    entries
}

fn memory(blocks: &[Block]) -> Vec<pb::ContainerMemory> {
    let block = |block: &Block| pb::ContainerMemory {
        memory_type: block.resource.clone(),
        size: block.size,
        topology: Some(pb::TopologyInfo {
            nodes: block
                .nodes
                .iter()
                .map(|id| pb::NumaNode { id: (*id).into() })
                .collect(),
        }),
    };
    blocks.iter().map(block).collect()
}

fn cpu_ids<'a>(cpus: impl IntoIterator<Item = &'a u32>) -> Vec<i64> {
    cpus.into_iter().copied().map(i64::from).collect()
}

/// The prepared devices of the claims that a container refers to.
fn claimed(pod: &Pod, container: &Container, claims: &Claims) -> Vec<pb::DynamicResource> {
    let held = claims.claims_of_container(pod, container).into_iter();
    let claim = held.map(|(claim, drivers)| {
        let devices = drivers
            .iter()
            .flat_map(|(driver, devices)| devices.iter().map(move |device| (driver, device)));
        let resource = |(driver, device): (&String, &Device)| pb::ClaimResource {
            cdi_devices: device
                .cdi_device_ids
                .iter()
                .flatten()
                .map(|name| pb::CdiDevice { name: name.clone() })
                .collect(),
            driver_name: driver.clone(),
            pool_name: device.pool_name.clone(),
            device_name: device.device_name.clone(),
            share_id: device.share_id.clone(),
        };
        pb::DynamicResource {
            claim_name: claim.name,
            claim_namespace: claim.namespace,
            claim_resources: devices.map(resource).collect(),
        }
    });
    claim.collect()
}

/// The assignments of all containers.
struct Assignments<'a> {
    devices: &'a Devices,
    claims: &'a Claims,
    managers: &'a Managers,
}

/// The resources assigned to a container.
fn of_container(
    pod: &Pod,
    container: &Container,
    held: &Assignments<'_>,
) -> pb::ContainerResources {
    let (uid, name, managers) = (pod::uid(pod), &container.name, held.managers);
    let cpus = managers.cpus();
    let cpus = cpus.and_then(|cpus| cpus.state().exclusive.get(uid)?.get(name));
    let blocks = managers.memory();
    let blocks = blocks.and_then(|memory| memory.blocks(uid, name));
    pb::ContainerResources {
        name: name.clone(),
        devices: devices(held.devices.devices_of(uid, name)),
        cpu_ids: cpu_ids(cpus.into_iter().flatten()),
        memory: memory(blocks.unwrap_or_default()),
        dynamic_resources: claimed(pod, container, held.claims),
    }
}

/// The resources of a pod's containers that run as long as the pod does.
fn of_pod(pod: &Pod, held: &Assignments<'_>) -> pb::PodResources {
    let containers = pod::containers(pod);
    let lasting = containers
        .iter()
        .filter(|(role, _)| matches!(role, Role::Sidecar | Role::Regular));
    let containers = lasting.map(|(_, container)| of_container(pod, container, held));
    pb::PodResources {
        name: meta::name(pod).to_owned(),
        namespace: meta::namespace(pod).to_owned(),
        containers: containers.collect(),
    }
}

/// A pod in version `v1alpha1`: the devices of regular containers only.
fn of_pod_v1alpha1(pod: &Pod, held: &Devices) -> alpha::PodResources {
    let containers = pod::containers(pod);
    let regular = containers.iter().filter(|(role, _)| *role == Role::Regular);
    let resources = |container: &Container| alpha::ContainerResources {
        name: container.name.clone(),
        devices: devices(held.devices_of(pod::uid(pod), &container.name))
            .into_iter()
            .map(|d| alpha::ContainerDevices {
                resource_name: d.resource_name,
                device_ids: d.device_ids,
            })
            .collect(),
    };
    alpha::PodResources {
        name: meta::name(pod).to_owned(),
        namespace: meta::namespace(pod).to_owned(),
        containers: regular.map(|(_, container)| resources(container)).collect(),
    }
}

impl Answers {
    /// Reads the assignments. The caller has obtained `managers` from the ledger.
    fn read<T>(&self, managers: &Managers, read: impl FnOnce(&Assignments<'_>) -> T) -> T {
        let parts = &self.parts;
        parts.devices.read(|devices| {
            parts.claims.read(|claims| {
                read(&Assignments {
                    devices,
                    claims,
                    managers,
                })
            })
        })
    }

    async fn pods(&self) -> Vec<Arc<Pod>> {
        let mut pods = self.parts.ledger.pods().await;
        pods.retain(|pod| !matches!(pod::phase(pod), "Succeeded" | "Failed"));
        pods
    }
}

#[async_trait]
impl PodResources for Answers {
    fn admits(&self) -> bool {
        let mut bucket = lock(&self.bucket);
        bucket.take(self.parts.clock.now()).is_ok()
    }

    async fn list(&self) -> Vec<pb::PodResources> {
        self.parts.metrics.pod_resources("list", true);
        let (pods, managers) = (self.pods().await, self.parts.ledger.managers().await);
        self.read(&managers, |held| {
            pods.iter().map(|p| of_pod(p, held)).collect()
        })
    }

    async fn list_v1alpha1(&self) -> Vec<alpha::PodResources> {
        self.parts.metrics.pod_resources_v1alpha1();
        // As in the kubelet, including terminated pods.
        let pods = self.parts.ledger.pods().await;
        let list = |held: &Devices| pods.iter().map(|p| of_pod_v1alpha1(p, held)).collect();
        self.parts.devices.read(list)
    }

    async fn get(&self, namespace: &str, name: &str) -> Option<pb::PodResources> {
        let pods = self.pods().await;
        let mut pods = pods.iter();
        let pod = pods.find(|p| meta::name(&***p) == name && meta::namespace(&***p) == namespace);
        self.parts.metrics.pod_resources("get", pod.is_some());
        let pod = pod?;
        let managers = self.parts.ledger.managers().await;
        Some(self.read(&managers, |held| of_pod(pod, held)))
    }

    async fn allocatable(&self) -> pb::AllocatableResourcesResponse {
        let metrics = &self.parts.metrics;
        metrics.pod_resources("get_allocatable", true);
        let managers = self.parts.ledger.managers().await;
        let cpus = managers.cpus().map(Cpus::allocatable).unwrap_or_default();
        let blocks = managers.memory().map(Memory::allocatable);
        pb::AllocatableResourcesResponse {
            devices: devices(self.parts.devices.read(Devices::healthy)),
            cpu_ids: cpu_ids(&cpus),
            memory: memory(&blocks.unwrap_or_default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_of_two_numa_nodes_has_two_entries() {
        let row = |id: &str, numa: &[i64]| {
            let numa = numa.iter().copied().collect();
            ("example.com/thing".to_owned(), id.to_owned(), numa)
        };
        let entries = devices(vec![row("a", &[]), row("b", &[0, 1])]);
        let shown: Vec<_> = entries
            .iter()
            .map(|e| {
                let node = e.topology.as_ref().map(|t| t.nodes[0].id);
                (e.device_ids[0].as_str(), node)
            })
            .collect();
        assert_eq!(shown, [("a", None), ("b", Some(0)), ("b", Some(1))]);
    }
}
