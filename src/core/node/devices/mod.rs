//! Devices of this node's device plugins and their allocation to containers (KEP-3573, `pkg/kubelet/cm/devicemanager`).
//! Pure; the agent's device manager owns it.
//!
//! Admission reserves all devices of a pod at once; plugins are called afterwards. So no decision waits for a call, and
//! a plugin's preference can only exchange a reserved device for a free one.

pub mod checkpoint;
mod health;
mod hints;
mod responses;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use holdfast_proto::deviceplugin::ContainerAllocateResponse;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod};

use super::admit::Refusal;
use super::capacity::is_extended;
use crate::pod::resources::Amounts;
use crate::pod::{self, Role};
use crate::quantity::Quantity;
use crate::time;
pub(crate) use hints::NearNodes;
pub use responses::DeviceConfig;

/// How long a resource stays advertised after its plugin disconnected.
pub const GRACE: SignedDuration = SignedDuration::from_mins(5);

/// A device, as its plugin reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Device {
    /// Whether the device can be allocated.
    pub healthy: bool,
    /// The NUMA nodes of the device; empty if it has none.
    pub numa: BTreeSet<i64>,
}

/// Registration state of a resource's plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plugin {
    /// Registered; every registration has its own number.
    Registered(u64),
    /// Disconnected since this time, or not registered since the agent started.
    Gone(Timestamp),
}

#[derive(Debug, Clone)]
struct Resource {
    devices: BTreeMap<String, Device>,
    plugin: Plugin,
    /// Whether the plugin has listed its devices since the agent started.
    listed: bool,
    /// Whether the list is current: the plugin has not disconnected since.
    current: bool,
}

impl Resource {
    fn healthy(&self) -> impl Iterator<Item = &String> {
        let healthy = self.devices.iter().filter(|(_, device)| device.healthy);
        healthy.map(|(id, _)| id)
    }
}

/// A container's allocation of one resource.
#[derive(Debug, Clone, Default, PartialEq)]
struct Allocation {
    /// Device ids with their NUMA nodes.
    devices: BTreeMap<String, BTreeSet<i64>>,
    /// The plugin's Allocate response; `None` until the plugin has been called.
    response: Option<ContainerAllocateResponse>,
    /// Devices that are shared with the pod's init containers.
    reused: BTreeSet<String>,
    /// Preferred NUMA nodes; `None` without preference.
    affinity: Option<BTreeSet<i64>>,
}

/// A container and a resource.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot {
    /// The container's name.
    pub container: String,
    /// The resource.
    pub resource: String,
}

/// Request for a plugin's preferred devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreferenceRequest {
    /// The devices to choose from.
    pub available: BTreeSet<String>,
    /// Devices that the choice must include.
    pub must_include: BTreeSet<String>,
    /// How many devices are needed.
    pub size: usize,
}

impl PreferenceRequest {
    /// Whether anything remains to be chosen.
    #[must_use]
    pub fn has_choice(&self) -> bool {
        self.must_include.len() < self.size
    }
}

/// Why a pod's devices cannot be allocated. The messages are the kubelet's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Too few are free.
    #[error(
        "requested number of devices unavailable for {resource}. Requested: {requested}, Available: {available}"
    )]
    Unavailable {
        /// The resource.
        resource: String,
        /// How many are needed in addition to reused ones.
        requested: usize,
        /// How many are free and healthy.
        available: usize,
    },
    /// No plugin is registered for the resource.
    #[error("cannot allocate unregistered device {0}")]
    Unregistered(String),
    /// The resource has no healthy device, for instance because its plugin disconnected.
    #[error("no healthy devices present; cannot allocate unhealthy devices {0}")]
    NoneHealthy(String),
    /// The container's allocation differs in size from its spec.
    #[error(
        "container {container:?} changed request for resource {resource:?} from {allocated} to {requested}"
    )]
    Changed {
        /// The container.
        container: String,
        /// The resource.
        resource: String,
        /// Number of allocated devices.
        allocated: usize,
        /// Number in the spec.
        requested: usize,
    },
    /// A call to the plugin failed.
    #[error("device plugin of {resource}: {call} failed: {why}")]
    Plugin {
        /// The resource.
        resource: String,
        /// The gRPC method.
        call: &'static str,
        /// The plugin's error message.
        why: String,
    },
    /// The allocation could not be saved, so it would not survive a restart.
    #[error("failed to write checkpoint file {path:?}: {why}")]
    Checkpoint {
        /// Path of the checkpoint.
        path: String,
        /// The I/O error.
        why: String,
    },
}

impl DeviceError {
    /// Converts the error to the rejection of a pod.
    #[must_use]
    pub fn refusal(&self) -> Refusal {
        Refusal {
            reason: "UnexpectedAdmissionError".into(),
            message: format!("Allocate failed due to {self}, which is unexpected"),
            missing: Amounts::new(),
            infeasible: None,
        }
    }
}

/// Allocations by resource.
type Allocations = BTreeMap<String, Allocation>;

/// A pod's allocations, by container.
#[derive(Debug, Clone, Default)]
pub struct Snapshot(BTreeMap<String, Allocations>);

/// All devices and their allocations.
#[derive(Debug, Clone, Default)]
pub struct Devices {
    resources: BTreeMap<String, Resource>,
    /// Resources that expired since the agent started; they are advertised as zero.
    removed: BTreeSet<String>,
    /// By pod uid and container name.
    pods: BTreeMap<String, BTreeMap<String, Allocations>>,
}

/// Whether a plugin may register a resource of this name: a valid extended resource name.
#[must_use]
pub fn is_resource_name(name: &str) -> bool {
    let Some((domain, own)) = name.split_once('/') else {
        return false;
    };
    let ends = |text: &str| {
        let outer = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        outer(text.chars().next()) && outer(text.chars().last())
    };
    // The length limit of the API includes the prefix "requests.".
    is_extended(name)
        && (1..=244).contains(&domain.len())
        && ends(domain)
        && domain
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c))
        && (1..=63).contains(&own.len())
        && ends(own)
        && own
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

/// Whether DRA provides the container's resource instead (KEP-5004).
pub(super) fn is_from_claim(pod: &Pod, container: &str, resource: &str) -> bool {
    let status = pod.status.as_ref();
    let claim = status.and_then(|s| s.extended_resource_claim_status.as_ref());
    claim.is_some_and(|claim| {
        let mut mappings = claim.request_mappings.iter();
        mappings.any(|m| m.container_name == container && m.resource_name == resource)
    })
}

/// Amounts of extended resources that a container requests. These resources are never overcommitted, so requests equal
/// limits.
fn wanted<'a>(pod: &Pod, container: &'a Container) -> impl Iterator<Item = (&'a String, usize)> {
    let limits = container
        .resources
        .as_ref()
        .and_then(|r| r.limits.as_ref())
        .into_iter()
        .flatten();
    limits.filter_map(|(name, amount)| {
        let amount: Quantity = amount.0.parse().ok()?;
        let number = usize::try_from(amount.units()).ok()?;
        let counts = number > 0 && is_extended(name) && !is_from_claim(pod, &container.name, name);
        counts.then_some((name, number))
    })
}

impl Devices {
    /// Registers a plugin for a resource. Devices from an earlier registration remain until the plugin lists its own.
    pub fn register(&mut self, resource: &str, number: u64) {
        self.removed.remove(resource);
        let entry = self
            .resources
            .entry(resource.to_owned())
            .or_insert_with(|| Resource {
                devices: BTreeMap::new(),
                plugin: Plugin::Registered(number),
                listed: false,
                current: false,
            });
        entry.plugin = Plugin::Registered(number);
    }

    /// The resource, if this registration is the newest and the plugin is connected.
    fn registered(&mut self, resource: &str, number: u64) -> Option<&mut Resource> {
        let known = self.resources.get_mut(resource);
        known.filter(|r| r.plugin == Plugin::Registered(number))
    }

    /// Records the plugin's list of devices; returns whether it differs from the previous list. Lists from an outdated
    /// registration are ignored.
    pub fn set_devices(
        &mut self,
        resource: &str,
        number: u64,
        devices: BTreeMap<String, Device>,
    ) -> bool {
        let Some(known) = self.registered(resource, number) else {
            return false;
        };
        let same = known.current && known.devices == devices;
        (known.devices, known.listed, known.current) = (devices, true, true);
        !same
    }

    /// Records that the plugin disconnected: its devices still count towards capacity, but none can be allocated.
    /// Returns whether that registration was the newest.
    pub fn disconnect(&mut self, resource: &str, number: u64, now: Timestamp) -> bool {
        let Some(known) = self.registered(resource, number) else {
            return false;
        };
        (known.plugin, known.current) = (Plugin::Gone(now), false);
        for device in known.devices.values_mut() {
            device.healthy = false;
        }
        true
    }

    /// Removes resources whose plugin has been disconnected for [`GRACE`]; returns whether any was removed.
    pub fn expire(&mut self, now: Timestamp) -> bool {
        let before = self.resources.len();
        self.resources.retain(|name, resource| {
            let is_kept = match resource.plugin {
                Plugin::Registered(_) => true,
                Plugin::Gone(since) => now < time::later(since, GRACE),
            };
            if !is_kept {
                self.removed.insert(name.clone());
            }
            is_kept
        });
        self.resources.len() != before
    }

    /// The next time at which [`Devices::expire`] removes a resource.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Timestamp> {
        let gone = self.resources.values().filter_map(|r| match r.plugin {
            Plugin::Registered(_) => None,
            Plugin::Gone(since) => Some(time::later(since, GRACE)),
        });
        gone.min()
    }

    /// Amounts that the Node advertises: all devices as capacity, and the healthy ones as allocatable.
    #[must_use]
    pub fn amounts(&self) -> (Amounts, Amounts) {
        let (mut capacity, mut allocatable) = (Amounts::new(), Amounts::new());
        for name in &self.removed {
            capacity.insert(name.clone(), Quantity::ZERO);
            allocatable.insert(name.clone(), Quantity::ZERO);
        }
        for (name, resource) in &self.resources {
            capacity.insert(name.clone(), number(resource.devices.len()));
            allocatable.insert(name.clone(), number(resource.healthy().count()));
        }
        (capacity, allocatable)
    }

    /// Amounts available to a pod's admission. If the pod already has devices, all allocated devices count even while
    /// their plugin is disconnected, so that the pod is not rejected.
    #[must_use]
    pub fn allocatable_for(&self, uid: &str) -> Amounts {
        let mut amounts = self.amounts().1;
        if self.pods.contains_key(uid) {
            for resource in self.allocated_resources() {
                let allocated = number(self.in_use(&resource).len());
                let amount = amounts.entry(resource).or_default();
                *amount = (*amount).max(allocated);
            }
        }
        amounts
    }

    fn allocated_resources(&self) -> BTreeSet<String> {
        let containers = self.pods.values().flat_map(BTreeMap::values);
        containers.flat_map(BTreeMap::keys).cloned().collect()
    }

    /// Allocated devices of a resource.
    fn in_use(&self, resource: &str) -> BTreeSet<&String> {
        let containers = self.pods.values().flat_map(BTreeMap::values);
        let allocations = containers.filter_map(|c| c.get(resource));
        allocations.flat_map(|a| a.devices.keys()).collect()
    }

    /// Healthy devices of a resource that are not allocated.
    fn free(&self, resource: &str) -> BTreeSet<String> {
        let in_use = self.in_use(resource);
        let healthy = self.resources.get(resource).into_iter();
        let healthy = healthy.flat_map(Resource::healthy);
        healthy.filter(|id| !in_use.contains(id)).cloned().collect()
    }

    /// Whether a resource belongs to a plugin: registered now or before, or allocated to a container.
    fn knows(&self, resource: &str) -> bool {
        self.resources.contains_key(resource) || self.allocated_resources().contains(resource)
    }

    fn allocation(&self, uid: &str, slot: &Slot) -> Option<&Allocation> {
        let containers = self.pods.get(uid)?;
        containers.get(&slot.container)?.get(&slot.resource)
    }

    /// The pod's current allocations, for [`Devices::restore`].
    #[must_use]
    pub fn snapshot(&self, uid: &str) -> Snapshot {
        Snapshot(self.pods.get(uid).cloned().unwrap_or_default())
    }

    /// Restores a pod's allocations.
    pub fn restore(&mut self, uid: &str, before: Snapshot) {
        match before.0.is_empty() {
            true => self.pods.remove(uid),
            false => self.pods.insert(uid.to_owned(), before.0),
        };
    }

    /// Allocations of a pod that still need a call to the plugin, init containers first.
    #[must_use]
    pub(crate) fn pending_calls(&self, pod: &Pod) -> Vec<Slot> {
        let uid = pod::uid(pod);
        let containers = pod::containers(pod);
        let slots = containers
            .iter()
            .flat_map(|(_, c)| self.slots(uid, &c.name));
        let is_open = |slot: &Slot| {
            let own = self.allocation(uid, slot);
            own.is_some_and(|own| own.response.is_none())
        };
        slots.filter(is_open).collect()
    }

    /// Reserves the devices that a container requests; existing allocations stay. Call it for the pod's containers in
    /// order, init containers first. On error, earlier reservations remain; [`Devices::restore`] reverts them.
    pub(crate) fn reserve_container(
        &mut self,
        pod: &Pod,
        container: &Container,
        affinity: Option<&BTreeSet<i64>>,
    ) -> Result<(), DeviceError> {
        let uid = pod::uid(pod);
        for (resource, requested) in wanted(pod, container) {
            if !self.knows(resource) {
                continue;
            }
            let slot = Slot {
                container: container.name.clone(),
                resource: resource.clone(),
            };
            let allocated = self.allocation(uid, &slot).map(|own| own.devices.len());
            match allocated {
                Some(allocated) if allocated != requested => {
                    return Err(DeviceError::Changed {
                        container: slot.container,
                        resource: slot.resource,
                        allocated,
                        requested,
                    });
                }
                Some(_) => {}
                None => {
                    let reusable = self.reusable(pod, resource);
                    let allocation = self.choose(resource, requested, &reusable, affinity)?;
                    let of_pod = self.pods.entry(uid.to_owned()).or_default();
                    let of_container = of_pod.entry(slot.container).or_default();
                    of_container.insert(slot.resource, allocation);
                }
            }
        }
        Ok(())
    }

    /// Devices that the pod's next container can reuse: those of init containers, except devices that sidecars or
    /// regular containers also use.
    fn reusable(&self, pod: &Pod, resource: &str) -> BTreeSet<String> {
        let init = pod::spec(pod).init_containers.iter().flatten();
        let init: BTreeSet<&str> = init
            .filter(|c| !pod::is_sidecar(c))
            .map(|c| c.name.as_str())
            .collect();
        let (mut of_init, mut of_others) = (BTreeSet::new(), BTreeSet::new());
        for (name, allocations) in self.pods.get(pod::uid(pod)).into_iter().flatten() {
            let ids = allocations.get(resource).into_iter();
            let ids = ids.flat_map(|own| own.devices.keys().cloned());
            if init.contains(name.as_str()) {
                of_init.extend(ids);
            } else {
                of_others.extend(ids);
            }
        }
        &of_init - &of_others
    }

    /// Chooses devices: reusable ones first, then free ones near the preferred NUMA nodes, then any.
    fn choose(
        &self,
        resource: &str,
        needed: usize,
        reusable: &BTreeSet<String>,
        affinity: Option<&BTreeSet<i64>>,
    ) -> Result<Allocation, DeviceError> {
        let Some(known) = self.resources.get(resource) else {
            return Err(DeviceError::Unregistered(resource.to_owned()));
        };
        let healthy: BTreeSet<&String> = known.healthy().collect();
        if healthy.is_empty() {
            return Err(DeviceError::NoneHealthy(resource.to_owned()));
        }
        let reused = reusable.iter().filter(|id| healthy.contains(id));
        let reused: BTreeSet<String> = reused.take(needed).cloned().collect();
        let missing = needed.saturating_sub(reused.len());
        let free = self.free(resource);
        if free.len() < missing {
            return Err(DeviceError::Unavailable {
                resource: resource.to_owned(),
                requested: missing,
                available: free.len(),
            });
        }
        let mut free: Vec<&String> = free.iter().collect();
        free.sort_by_key(|id| distance(&known.devices[*id], affinity));
        let chosen = reused.iter().chain(free.into_iter().take(missing));
        let devices = chosen.map(|id| (id.clone(), known.devices[id].numa.clone()));
        Ok(Allocation {
            devices: devices.collect(),
            response: None,
            reused: reused.clone(),
            affinity: affinity.cloned(),
        })
    }

    /// Request for the plugin's preference. If there are enough near devices, the choice is among them; otherwise all
    /// near devices are mandatory.
    #[must_use]
    pub fn preference_request(&self, uid: &str, slot: &Slot) -> Option<PreferenceRequest> {
        let own = self.allocation(uid, slot)?;
        let known = self.resources.get(&slot.resource)?;
        let mut available = self.free(&slot.resource);
        available.extend(own.devices.keys().cloned());
        let mut must_include = own.reused.clone();
        let near: BTreeSet<String> = available
            .iter()
            .filter(|id| !own.reused.contains(*id))
            .filter(|id| {
                let device = known.devices.get(*id);
                device.is_some_and(|d| distance(d, own.affinity.as_ref()) == Distance::Near)
            })
            .cloned()
            .collect();
        if own.devices.len().saturating_sub(own.reused.len()) < near.len() {
            available = near.union(&own.reused).cloned().collect();
        } else {
            must_include.extend(near);
        }
        Some(PreferenceRequest {
            available,
            must_include,
            size: own.devices.len(),
        })
    }

    /// Applies the plugin's preference to devices that were offered and are still free. Containers that reuse an
    /// exchanged device follow.
    pub fn apply_preference(&mut self, uid: &str, slot: &Slot, preferred: &[String]) {
        let (Some(request), Some(own)) = (
            self.preference_request(uid, slot),
            self.allocation(uid, slot),
        ) else {
            return;
        };
        let preferred = preferred
            .iter()
            .filter(|id| request.available.contains(*id));
        let order = request.must_include.iter().chain(preferred);
        let mut chosen: BTreeSet<String> = BTreeSet::new();
        for id in order.chain(own.devices.keys()) {
            if chosen.len() < request.size {
                chosen.insert(id.clone());
            }
        }
        let removed: Vec<String> = own
            .devices
            .keys()
            .filter(|id| !chosen.contains(*id))
            .cloned()
            .collect();
        let added: Vec<String> = chosen
            .into_iter()
            .filter(|id| !own.devices.contains_key(id))
            .collect();
        for (old, new) in removed.iter().zip(&added) {
            self.replace_device(uid, &slot.resource, old, new);
        }
    }

    /// Exchanges a device in all containers of a pod whose plugin has not been called yet.
    fn replace_device(&mut self, uid: &str, resource: &str, old: &str, new: &str) {
        let numa = self
            .resources
            .get(resource)
            .and_then(|r| r.devices.get(new))
            .map(|d| d.numa.clone())
            .unwrap_or_default();
        let containers = self.pods.get_mut(uid).into_iter().flatten();
        for (_, allocations) in containers {
            let Some(own) = allocations.get_mut(resource) else {
                continue;
            };
            if own.response.is_none() && own.devices.remove(old).is_some() {
                own.devices.insert(new.to_owned(), numa.clone());
                if own.reused.remove(old) {
                    own.reused.insert(new.to_owned());
                }
            }
        }
    }

    /// Ids of a container's devices of a resource.
    #[must_use]
    pub fn ids(&self, uid: &str, slot: &Slot) -> Vec<String> {
        let own = self.allocation(uid, slot);
        own.map(|a| a.devices.keys().cloned().collect())
            .unwrap_or_default()
    }

    /// Records the plugin's Allocate response; returns whether the allocation still exists.
    pub fn record_response(
        &mut self,
        uid: &str,
        slot: &Slot,
        response: ContainerAllocateResponse,
    ) -> bool {
        let own = self
            .pods
            .get_mut(uid)
            .and_then(|containers| containers.get_mut(&slot.container))
            .and_then(|allocations| allocations.get_mut(&slot.resource));
        own.map(|own| own.response = Some(response)).is_some()
    }

    /// Releases a pod's reservations that have no response from the plugin.
    pub fn release_pending(&mut self, uid: &str) {
        if let Some(containers) = self.pods.get_mut(uid) {
            for allocations in containers.values_mut() {
                allocations.retain(|_, own| own.response.is_some());
            }
            containers.retain(|_, allocations| !allocations.is_empty());
            if containers.is_empty() {
                self.pods.remove(uid);
            }
        }
    }

    /// Releases a pod's devices; returns whether it had any.
    pub fn release(&mut self, uid: &str) -> bool {
        self.pods.remove(uid).is_some()
    }

    /// Releases the devices of pods that no longer exist; returns whether there were any.
    pub fn retain(&mut self, exists: impl Fn(&str) -> bool) -> bool {
        let before = self.pods.len();
        self.pods.retain(|uid, _| exists(uid));
        self.pods.len() != before
    }

    /// If a plugin's resource is missing, replaces the rejection by the device manager's error, because the kubelet
    /// runs the device manager before the predicates.
    #[must_use]
    pub fn as_device_rejection(&self, pod: &Pod, refusal: Refusal) -> Refusal {
        let resource = refusal.reason.strip_prefix("OutOf");
        if !resource.is_some_and(|name| self.knows(name)) {
            return refusal;
        }
        let mut tried = self.clone();
        for (role, container) in pod::containers(pod) {
            if role != Role::Ephemeral
                && let Err(error) = tried.reserve_container(pod, &container, None)
            {
                return error.refusal();
            }
        }
        refusal
    }

    /// A resource of the container whose plugin has not listed its devices since the agent started; the devices may not
    /// exist yet.
    #[must_use]
    pub fn unlisted_resource(&self, uid: &str, container: &str) -> Option<&str> {
        let allocations = self.pods.get(uid)?.get(container)?;
        let mut resources = allocations.keys();
        let absent = resources.find(|name| self.resources.get(*name).is_none_or(|r| !r.listed));
        absent.map(String::as_str)
    }

    /// The resources that a container has devices of.
    #[must_use]
    pub fn slots(&self, uid: &str, container: &str) -> Vec<Slot> {
        let allocations = self.pods.get(uid).and_then(|pod| pod.get(container));
        let resources = allocations.into_iter().flat_map(BTreeMap::keys);
        let slot = |resource: &String| Slot {
            container: container.to_owned(),
            resource: resource.clone(),
        };
        resources.map(slot).collect()
    }

    /// A container's devices: resource, device id, NUMA nodes.
    #[must_use]
    pub fn devices_of(&self, uid: &str, container: &str) -> Vec<(String, String, BTreeSet<i64>)> {
        let allocations = self.pods.get(uid).and_then(|pod| pod.get(container));
        let allocations = allocations.into_iter().flatten();
        let rows = allocations.flat_map(|(resource, own)| {
            let devices = own.devices.iter();
            devices.map(|(id, numa)| (resource.clone(), id.clone(), numa.clone()))
        });
        rows.collect()
    }

    /// All healthy devices, in the form of [`Devices::devices_of`].
    #[must_use]
    pub fn healthy(&self) -> Vec<(String, String, BTreeSet<i64>)> {
        let rows = self.resources.iter().flat_map(|(name, resource)| {
            let ids = resource.healthy();
            ids.map(|id| (name.clone(), id.clone(), resource.devices[id].numa.clone()))
        });
        rows.collect()
    }
}

fn number(count: usize) -> Quantity {
    Quantity::from_units(i64::try_from(count).unwrap_or(i64::MAX))
}

/// Distance of a device from the preferred NUMA nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Distance {
    Near,
    Far,
    /// The device has no NUMA node, or no node is preferred.
    Unknown,
}

fn distance(device: &Device, affinity: Option<&BTreeSet<i64>>) -> Distance {
    match affinity {
        Some(_) if device.numa.is_empty() => Distance::Unknown,
        Some(wanted) if !wanted.is_disjoint(&device.numa) => Distance::Near,
        Some(_) => Distance::Far,
        None => Distance::Unknown,
    }
}
