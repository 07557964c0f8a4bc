//! Health of the devices of device plugins, for container statuses (KEP-4680). Pure.

use std::collections::BTreeMap;

use super::{Allocations, Devices};
use crate::pod::status::devices::{Health, OfContainer, OfPod};

impl Devices {
    /// Health of the devices of a pod's containers; allocations without a response from the plugin are omitted.
    #[must_use]
    pub fn health(&self, uid: &str) -> OfPod {
        let containers = self.pods.get(uid).into_iter().flatten();
        let of_container = containers.filter_map(|(name, allocations)| {
            let own = self.health_of(allocations);
            (!own.is_empty()).then(|| (name.clone(), own))
        });
        of_container.collect()
    }

    /// Health by pod uid, for all pods with devices.
    #[must_use]
    pub fn health_of_all(&self) -> BTreeMap<String, OfPod> {
        let pods = self.pods.keys().map(|uid| (uid.clone(), self.health(uid)));
        pods.filter(|(_, health)| !health.is_empty()).collect()
    }

    fn health_of(&self, allocations: &Allocations) -> OfContainer {
        let allocated = allocations.iter().filter(|(_, own)| own.response.is_some());
        let of_resource = allocated.map(|(resource, own)| {
            let ids = own.devices.keys();
            let devices = ids.map(|id| (id.clone(), self.device_health(resource, id).into()));
            (resource.clone(), devices.collect())
        });
        of_resource.collect()
    }

    /// Unlike the kubelet, which reports a device as healthy if its plugin does not list it, such a device is
    /// `Unknown`.
    fn device_health(&self, resource: &str, id: &str) -> Health {
        match self.resources.get(resource) {
            Some(known) if !known.listed => Health::NotReported,
            Some(known) if known.current => match known.devices.get(id) {
                Some(device) if device.healthy => Health::Healthy,
                Some(_) => Health::Unhealthy,
                None => Health::Unknown,
            },
            _ => Health::Unknown,
        }
    }
}
