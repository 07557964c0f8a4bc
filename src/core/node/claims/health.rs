//! Health of DRA devices, as their drivers report it, for container statuses (KEP-4680,
//! `pkg/kubelet/cm/dra/healthinfo.go`). Pure; times are durations since the agent started.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use super::checkpoint::Device;
use super::{Claims, resolve};
use crate::pod;
use crate::pod::status::devices::{DeviceHealth, Health, OfContainer, OfPod};

/// How long a driver's report is valid by default, as in the kubelet. For the same time after the start of the agent,
/// the health in existing pod statuses is kept.
pub(crate) const DEFAULT_VALIDITY: Duration = Duration::from_secs(30);
/// Maximum length of a driver's message in characters, as in the kubelet.
const MAX_MESSAGE_CHARS: usize = 1024;
const ELLIPSIS: &str = "...";

/// A driver's report about a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceReport {
    /// The pool of the device.
    pub pool: String,
    /// The device's name in the pool.
    pub device: String,
    /// Reported health.
    pub health: Health,
    /// The driver's message; may be empty.
    pub message: String,
    /// How many seconds the report is valid; values below one mean [`DEFAULT_VALIDITY`].
    pub seconds: i64,
}

impl DeviceReport {
    fn validity(&self) -> Duration {
        let own = u64::try_from(self.seconds)
            .ok()
            .filter(|seconds| *seconds > 0);
        own.map_or(DEFAULT_VALIDITY, Duration::from_secs)
    }
}

fn truncate_message(message: String) -> Option<String> {
    if message.chars().count() <= MAX_MESSAGE_CHARS {
        return Some(message).filter(|m| !m.is_empty());
    }
    let kept = message
        .chars()
        .take(MAX_MESSAGE_CHARS.saturating_sub(ELLIPSIS.len()));
    Some(kept.chain(ELLIPSIS.chars()).collect())
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    health: DeviceHealth,
    until: Duration,
}

/// The latest reports of all drivers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DriversHealth(BTreeMap<String, BTreeMap<(String, String), Known>>);

impl DriversHealth {
    /// Records a driver's report. Devices that the report does not list keep their previous health until that expires.
    pub fn record(&mut self, driver: &str, devices: Vec<DeviceReport>, now: Duration) {
        let known = self.0.entry(driver.to_owned()).or_default();
        known.retain(|_, known| known.until > now);
        for report in devices {
            let until = now.saturating_add(report.validity());
            let health = DeviceHealth {
                health: report.health,
                message: truncate_message(report.message),
            };
            known.insert((report.pool, report.device), Known { health, until });
        }
    }

    fn of(&self, driver: &str, device: &Device, now: Duration) -> DeviceHealth {
        let Some(known) = self.0.get(driver) else {
            let early = now < DEFAULT_VALIDITY;
            return if early {
                Health::NotReported
            } else {
                Health::Unknown
            }
            .into();
        };
        let known = known.get(&(device.pool_name.clone(), device.device_name.clone()));
        let known = known.filter(|known| known.until > now);
        known.map_or_else(|| Health::Unknown.into(), |known| known.health.clone())
    }

    /// When the next report expires.
    #[must_use]
    pub fn next_expiry(&self, now: Duration) -> Option<Duration> {
        let report = self.0.values().flat_map(BTreeMap::values);
        let ends = report.map(|known| known.until).chain([DEFAULT_VALIDITY]);
        ends.filter(|until| *until > now).min()
    }
}

/// The id of a device in container statuses: its first CDI device, if there is one.
fn id(driver: &str, device: &Device) -> String {
    let cdi = device.cdi_device_ids.iter().flatten().next();
    cdi.cloned()
        .unwrap_or_else(|| format!("{driver}/{}/{}", device.pool_name, device.device_name))
}

impl Claims {
    /// Health of the devices that a pod's containers use through claims; claims that are not prepared are omitted.
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

    /// Health of the devices of each pod, by pod uid. If a pod's entry is unchanged, its status is too.
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
