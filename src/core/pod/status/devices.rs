//! The health of the devices that a container has, as its status tells it (`allocatedResourcesStatus`, KEP-4680; kubelet
//! spec, 4.4). Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ContainerStatus, ResourceHealth, ResourceStatus};
use serde::{Deserialize, Serialize};

/// What is known of a device's health.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Health {
    /// Its plugin says that it works.
    Healthy,
    /// Its plugin says that it does not.
    Unhealthy,
    /// Its plugin has gone, or does not name it any more.
    Unknown,
    /// Its plugin has said nothing since this agent started: what was told before stands.
    Untold,
}

/// The health of each device that a container has, by resource.
pub type OfContainer = BTreeMap<String, BTreeMap<String, Health>>;

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
        devices
            .find(|known| known.resource_id == id)?
            .health
            .clone()
    };
    let of_resource = |(resource, devices): (&String, &BTreeMap<String, Health>)| {
        let device = |(id, health): (&String, &Health)| ResourceHealth {
            resource_id: id.clone(),
            health: Some(match health {
                Health::Healthy => "Healthy".into(),
                Health::Unhealthy => "Unhealthy".into(),
                Health::Unknown => "Unknown".into(),
                Health::Untold => said(resource, id).unwrap_or_else(|| "Unknown".into()),
            }),
            ..ResourceHealth::default()
        };
        ResourceStatus {
            name: resource.clone(),
            resources: Some(devices.iter().map(device).collect()),
        }
    };
    Some(own.iter().map(of_resource).collect())
}
