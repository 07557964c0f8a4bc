//! The health of a container's devices in its status (`allocatedResourcesStatus`, KEP-4680). Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ContainerStatus, ResourceHealth, ResourceStatus};
use serde::{Deserialize, Serialize};

/// The health of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Health {
    /// The plugin or driver reports that the device works.
    Healthy,
    /// The plugin or driver reports that the device does not work.
    Unhealthy,
    /// The plugin or driver was removed, or no longer lists the device.
    Unknown,
    /// The plugin or driver has not reported since this agent started. The last published health is kept.
    #[serde(rename = "Untold")]
    NotReported,
}

/// The health of a device with the driver's message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceHealth {
    /// The health.
    pub health: Health,
    /// The driver's message for users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

impl From<Health> for DeviceHealth {
    fn from(health: Health) -> DeviceHealth {
        DeviceHealth {
            health,
            message: None,
        }
    }
}

/// The health of a container's devices, by resource and device id.
pub(crate) type OfContainer = BTreeMap<String, BTreeMap<String, DeviceHealth>>;

/// The health of the devices of a pod's containers, by container name.
pub type OfPod = BTreeMap<String, OfContainer>;

/// The device health in a container's status. `before` is its last status. After the pod has terminated, the last
/// published health is kept, although the devices were released.
pub(super) fn reported_health(
    own: Option<&OfContainer>,
    before: Option<&ContainerStatus>,
    ended: bool,
) -> Option<Vec<ResourceStatus>> {
    let before = before.and_then(|status| status.allocated_resources_status.as_ref());
    let Some(own) = own else {
        return before.filter(|_| ended).cloned();
    };
    let reported = |resource: &str, id: &str| {
        let resource = before?.iter().find(|known| known.name == resource)?;
        let mut devices = resource.resources.iter().flatten();
        devices.find(|known| known.resource_id == id).cloned()
    };
    let of_resource = |(resource, devices): (&String, &BTreeMap<String, DeviceHealth>)| {
        let device = |(id, known): (&String, &DeviceHealth)| {
            let as_before = match known.health {
                Health::NotReported => reported(resource, id),
                _ => None,
            };
            as_before.unwrap_or_else(|| ResourceHealth {
                resource_id: id.clone(),
                health: Some(match known.health {
                    Health::Healthy => "Healthy".into(),
                    Health::Unhealthy => "Unhealthy".into(),
                    Health::Unknown | Health::NotReported => "Unknown".into(),
                }),
                message: known.message.clone(),
            })
        };
        ResourceStatus {
            name: resource.clone(),
            resources: Some(devices.iter().map(device).collect()),
        }
    };
    Some(own.iter().map(of_resource).collect())
}
