//! The plugins' Allocate responses: merged for a container, and converted to and from the checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_proto::cri;
use holdfast_proto::deviceplugin::ContainerAllocateResponse;
use jiff::Timestamp;
use prost::Message as _;

use super::checkpoint::{Data, Entry};
use super::{Allocation, Devices, Plugin, Resource};

/// NUMA node number in the checkpoint for devices without a NUMA node.
const NO_NODE: i64 = -1;

/// Settings of a container for its devices. If two plugins set the same name or path, the first wins.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DeviceConfig {
    /// Environment variables. The container's own variables take precedence.
    pub env: Vec<(String, String)>,
    /// Mounts.
    pub mounts: Vec<cri::Mount>,
    /// Device files.
    pub devices: Vec<cri::Device>,
    /// Annotations for the runtime.
    pub annotations: BTreeMap<String, String>,
    /// Fully qualified names of CDI devices.
    pub cdi: Vec<String>,
}

impl DeviceConfig {
    fn add(&mut self, response: &ContainerAllocateResponse) {
        // Protobuf maps are unordered; sorting keeps the result stable.
        let envs: BTreeMap<_, _> = response.envs.iter().collect();
        for (name, value) in envs {
            if !self.env.iter().any(|(known, _)| known == name) {
                self.env.push((name.clone(), value.clone()));
            }
        }
        for mount in &response.mounts {
            let path = &mount.container_path;
            if !self.mounts.iter().any(|m| m.container_path == *path) {
                self.mounts.push(cri::Mount {
                    container_path: path.clone(),
                    host_path: mount.host_path.clone(),
                    readonly: mount.read_only,
                    ..cri::Mount::default()
                });
            }
        }
        for device in &response.devices {
            let path = &device.container_path;
            if !self.devices.iter().any(|d| d.container_path == *path) {
                self.devices.push(cri::Device {
                    container_path: path.clone(),
                    host_path: device.host_path.clone(),
                    permissions: device.permissions.clone(),
                });
            }
        }
        for (name, value) in &response.annotations {
            let entry = self.annotations.entry(name.clone());
            entry.or_insert_with(|| value.clone());
        }
        for device in &response.cdi_devices {
            if !self.cdi.contains(&device.name) {
                self.cdi.push(device.name.clone());
            }
        }
    }
}

impl Devices {
    /// Settings of a container for its devices, merged in the order of resource names.
    #[must_use]
    pub fn config_of(&self, uid: &str, container: &str) -> DeviceConfig {
        let allocations = self.pods.get(uid).and_then(|pod| pod.get(container));
        let mut config = DeviceConfig::default();
        for own in allocations.into_iter().flat_map(BTreeMap::values) {
            own.response
                .iter()
                .for_each(|response| config.add(response));
        }
        config
    }

    /// Restores the content of a checkpoint when the agent starts. Plugins have [`super::GRACE`] to register again;
    /// until then their resources have no devices.
    #[must_use]
    pub fn from_checkpoint(data: Data, now: Timestamp) -> Devices {
        let mut devices = Devices::default();
        for entry in data.pod_device_entries.into_iter().flatten() {
            let response = entry.response().unwrap_or_default();
            let Ok(response) = ContainerAllocateResponse::decode(response.as_slice()) else {
                continue;
            };
            let mut own = Allocation {
                response: Some(response),
                ..Allocation::default()
            };
            for (node, ids) in entry.device_ids.into_iter().flatten() {
                for id in ids.into_iter().flatten() {
                    let numa = own.devices.entry(id).or_default();
                    numa.extend((node != NO_NODE).then_some(node));
                }
            }
            let of_pod = devices.pods.entry(entry.pod_uid).or_default();
            let of_container = of_pod.entry(entry.container_name).or_default();
            of_container.insert(entry.resource_name, own);
        }
        for (name, _) in data.registered_devices.into_iter().flatten() {
            let resource = Resource {
                devices: BTreeMap::new(),
                plugin: Plugin::Gone(now),
                listed: false,
                current: false,
            };
            devices.resources.insert(name, resource);
        }
        devices
    }

    /// Content of the checkpoint: all allocations that have a response from the plugin.
    #[must_use]
    pub fn checkpoint_data(&self) -> Data {
        let mut entries = vec![];
        for (uid, containers) in &self.pods {
            for (container, allocations) in containers {
                for (resource, own) in allocations {
                    let Some(response) = &own.response else {
                        continue;
                    };
                    entries.push(Entry {
                        pod_uid: uid.clone(),
                        container_name: container.clone(),
                        resource_name: resource.clone(),
                        device_ids: Some(by_node(own)),
                        alloc_resp: Some(Entry::encoded(&response.encode_to_vec())),
                    });
                }
            }
        }
        let registered = self.resources.iter().map(|(name, resource)| {
            let healthy = resource.healthy().cloned().collect();
            (name.clone(), Some(healthy))
        });
        Data {
            pod_device_entries: Some(entries).filter(|e| !e.is_empty()),
            registered_devices: Some(registered.collect()),
        }
    }
}

fn by_node(own: &Allocation) -> BTreeMap<i64, Option<Vec<String>>> {
    let mut nodes: BTreeMap<i64, Option<Vec<String>>> = BTreeMap::new();
    for (id, numa) in &own.devices {
        let no_node = BTreeSet::from([NO_NODE]);
        let numa = if numa.is_empty() { &no_node } else { numa };
        for node in numa {
            let ids = nodes.entry(*node).or_default();
            ids.get_or_insert_default().push(id.clone());
        }
    }
    nodes
}
