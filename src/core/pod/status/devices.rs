//! The health of the devices that a container has, as its status tells it (`allocatedResourcesStatus`, KEP-4680).
//! Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ContainerStatus, ResourceHealth, ResourceStatus};
use serde::{Deserialize, Serialize};

/// What is known of a device's health.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Health {
    /// Its plugin or driver says that it works.
    Healthy,
    /// Its plugin or driver says that it does not.
    Unhealthy,
    /// Its plugin or driver has gone, or does not name it any more.
    Unknown,
    /// Its plugin or driver has said nothing since this agent started: what was told before stands.
    Untold,
}

/// What is known of a device, and what its driver says besides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceHealth {
    /// How it is.
    pub health: Health,
    /// In the driver's words, for people.
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

/// The health of each device that a container has, by resource.
pub type OfContainer = BTreeMap<String, BTreeMap<String, DeviceHealth>>;

/// That of a pod's containers, by their names.
pub type OfPod = BTreeMap<String, OfContainer>;

/// What the status of a container tells of its devices; `before` is its last status. What a container of a pod that has
/// ended had stays told, though it has been given back.
pub(super) fn told(
    own: Option<&OfContainer>,
    before: Option<&ContainerStatus>,
    ended: bool,
) -> Option<Vec<ResourceStatus>> {
    let before = before.and_then(|status| status.allocated_resources_status.as_ref());
    let Some(own) = own else {
        return before.filter(|_| ended).cloned();
    };
    let said = |resource: &str, id: &str| {
        let resource = before?.iter().find(|known| known.name == resource)?;
        let mut devices = resource.resources.iter().flatten();
        devices.find(|known| known.resource_id == id).cloned()
    };
    let of_resource = |(resource, devices): (&String, &BTreeMap<String, DeviceHealth>)| {
        let device = |(id, known): (&String, &DeviceHealth)| {
            let as_before = match known.health {
                Health::Untold => said(resource, id),
                _ => None,
            };
            as_before.unwrap_or_else(|| ResourceHealth {
                resource_id: id.clone(),
                health: Some(match known.health {
                    Health::Healthy => "Healthy".into(),
                    Health::Unhealthy => "Unhealthy".into(),
                    Health::Unknown | Health::Untold => "Unknown".into(),
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
