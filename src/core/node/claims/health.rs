//! How well the devices of dynamic resources are, as their drivers say it, for the statuses of containers (KEP-4680, kubelet
//! spec, 14.6). Pure; times are since the agent started.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use super::checkpoint::Device;
use super::{Claims, resolve};
use crate::core::pod;
use crate::core::pod::status::devices::{DeviceHealth, Health, OfContainer, OfPod};

/// For how long holds what a driver says of a device, if it says nothing else, as the kubelet has it. So long what was told
/// before stands after a start of the agent too.
pub const HOLDS: Duration = Duration::from_secs(30);
/// How long a driver's words may be, in characters, as the kubelet has it.
const MESSAGE: usize = 1024;
const CUT: &str = "...";

/// What a driver says of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// The pool of the device.
    pub pool: String,
    /// Its name in the pool.
    pub device: String,
    /// How it is.
    pub health: Health,
    /// In the driver's words; may be empty.
    pub message: String,
    /// For how long that holds, in seconds; below one means [`HOLDS`].
    pub seconds: i64,
}

impl Said {
    fn holds(&self) -> Duration {
        let own = u64::try_from(self.seconds)
            .ok()
            .filter(|seconds| *seconds > 0);
        own.map_or(HOLDS, Duration::from_secs)
    }
}

fn shortened(message: String) -> Option<String> {
    if message.chars().count() <= MESSAGE {
        return Some(message).filter(|m| !m.is_empty());
    }
    let kept = message.chars().take(MESSAGE.saturating_sub(CUT.len()));
    Some(kept.chain(CUT.chars()).collect())
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    is: DeviceHealth,
    until: Duration,
}

/// What drivers have said of their devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DriversHealth(BTreeMap<String, BTreeMap<(String, String), Known>>);

impl DriversHealth {
    /// A driver has said how its devices are. What it does not name any more holds for as long as it was said to.
    pub fn said(&mut self, driver: &str, devices: Vec<Said>, now: Duration) {
        let known = self.0.entry(driver.to_owned()).or_default();
        known.retain(|_, known| known.until > now);
        for said in devices {
            let until = now.saturating_add(said.holds());
            let is = DeviceHealth {
                health: said.health,
                message: shortened(said.message),
            };
            known.insert((said.pool, said.device), Known { is, until });
        }
    }

    fn of(&self, driver: &str, device: &Device, now: Duration) -> DeviceHealth {
        let Some(known) = self.0.get(driver) else {
            let early = now < HOLDS;
            return if early {
                Health::Untold
            } else {
                Health::Unknown
            }
            .into();
        };
        let known = known.get(&(device.pool_name.clone(), device.device_name.clone()));
        let known = known.filter(|known| known.until > now);
        known.map_or_else(|| Health::Unknown.into(), |known| known.is.clone())
    }

    /// When something that was said ceases to hold.
    #[must_use]
    pub fn next_expiry(&self, now: Duration) -> Option<Duration> {
        let said = self.0.values().flat_map(BTreeMap::values);
        let ends = said.map(|known| known.until).chain([HOLDS]);
        ends.filter(|until| *until > now).min()
    }
}

/// The device as the status names it: by its CDI device where it has one.
fn id(driver: &str, device: &Device) -> String {
    let cdi = device.cdi_device_ids.iter().flatten().next();
    cdi.cloned()
        .unwrap_or_else(|| format!("{driver}/{}/{}", device.pool_name, device.device_name))
}

impl Claims {
    /// The health of the devices that a pod's containers have by their claims; nothing of claims that are not prepared.
    #[must_use]
    pub fn health(&self, pod: &Pod, drivers: &DriversHealth, now: Duration) -> OfPod {
        let mut found = OfPod::new();
        for container in &pod::spec(pod).containers {
            let own = container.resources.as_ref().and_then(|r| r.claims.as_ref());
            let mut of_container = OfContainer::new();
            for entry in own.into_iter().flatten() {
                let Ok(Some(reference)) = resolve(pod, &entry.name) else {
                    continue;
                };
                let Ok(claim) = self.get(pod, &reference.name) else {
                    continue;
                };
                let request = entry.request.as_deref().filter(|r| !r.is_empty());
                let devices = claim.devices(request);
                let devices: BTreeMap<_, _> = devices
                    .map(|(driver, device)| (id(driver, device), drivers.of(driver, device, now)))
                    .collect();
                if devices.is_empty() {
                    continue;
                }
                let name = match request {
                    Some(request) => format!("claim:{}/{request}", entry.name),
                    None => format!("claim:{}", entry.name),
                };
                of_container.insert(name, devices);
            }
            if !of_container.is_empty() {
                found.insert(container.name.clone(), of_container);
            }
        }
        found
    }

    /// How the devices of all pods are that have some, by the pods' uids: two that are equal tell the pods the same.
    #[must_use]
    pub fn health_by_pod(
        &self,
        drivers: &DriversHealth,
        now: Duration,
    ) -> BTreeMap<String, Vec<(String, DeviceHealth)>> {
        let mut found: BTreeMap<String, Vec<(String, DeviceHealth)>> = BTreeMap::new();
        for claim in self.0.values() {
            for (driver, device) in claim.devices(None) {
                for uid in &claim.pods {
                    let of_pod = found.entry(uid.clone()).or_default();
                    of_pod.push((id(driver, device), drivers.of(driver, device, now)));
                }
            }
        }
        found
    }
}
