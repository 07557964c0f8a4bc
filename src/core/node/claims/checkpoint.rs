//! The checkpoint of prepared claims, `dra_manager_state`, in the kubelet's format (`pkg/kubelet/cm/dra/state`). With
//! it, a node can switch between the kubelet and this agent, and every prepared claim is eventually unprepared. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Claim, Claims};
use crate::digest::crc32;

/// File name, below the root directory.
pub const FILE: &str = "dra_manager_state";
const KIND: &str = "DRACheckpoint";
const VERSION: &str = "checkpoint.dra.kubelet.k8s.io/v1";

/// The whole file. `checksum` covers the text of `data`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct File {
    data: String,
    checksum: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct Data {
    #[serde(default)]
    kind: String,
    #[serde(default, rename = "apiVersion")]
    api_version: String,
    #[serde(default, rename = "ClaimInfoStateList")]
    claims: Option<Vec<Entry>>,
}

/// A claim. Go writes absent lists as `null`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    #[serde(rename = "ClaimUID")]
    uid: String,
    claim_name: String,
    namespace: String,
    #[serde(rename = "PodUIDs")]
    pods: Option<BTreeMap<String, Nothing>>,
    driver_state: Option<BTreeMap<String, Driver>>,
}

/// The value type of Go's sets.
#[derive(Debug, Serialize, Deserialize)]
struct Nothing {}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Driver {
    devices: Option<Vec<Device>>,
}

/// A device that a driver prepared for a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Device {
    /// The device's pool.
    pub pool_name: String,
    /// The device's name in the pool.
    pub device_name: String,
    /// Id of the share, if several claims share the device.
    #[serde(rename = "ShareID")]
    pub share_id: Option<String>,
    /// The requests of the claim that the device serves; `None` means all.
    pub request_names: Option<Vec<String>>,
    /// Fully qualified names of the CDI devices.
    #[serde(rename = "CDIDeviceIDs")]
    pub cdi_device_ids: Option<Vec<String>>,
}

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The content is not JSON of the expected shape.
    #[error("not a resource claim checkpoint: {0}")]
    Malformed(#[from] serde_json::Error),
    /// The file was modified or is truncated.
    #[error("its checksum is {found}, but that of its content is {expected}")]
    Checksum {
        /// Checksum in the file.
        found: u32,
        /// Checksum computed from the content.
        expected: u32,
    },
}

/// Reads a checkpoint. Its claims count as prepared for the pods that it lists; for other pods they are prepared again.
///
/// # Errors
///
/// The file is corrupt.
pub fn read(text: &str) -> Result<Claims, CheckpointError> {
    let file: File = serde_json::from_str(text)?;
    let expected = crc32(file.data.as_bytes());
    if file.checksum != expected {
        return Err(CheckpointError::Checksum {
            found: file.checksum,
            expected,
        });
    }
    let data: Data = serde_json::from_str(&file.data)?;
    let claim = |entry: Entry| {
        let drivers = entry.driver_state.into_iter().flatten();
        let drivers = drivers.map(|(name, state)| (name, state.devices.unwrap_or_default()));
        let claim = Claim {
            uid: entry.uid,
            pods: entry.pods.unwrap_or_default().into_keys().collect(),
            drivers: drivers.collect(),
            ..Claim::default()
        };
        ((entry.namespace, entry.claim_name), claim)
    };
    let claims = data.claims.into_iter().flatten();
    Ok(Claims(claims.map(claim).collect()))
}

/// Serialises the checkpoint.
#[must_use]
pub fn write(claims: &Claims) -> String {
    let driver = |(name, devices): (&String, &Vec<Device>)| {
        let devices = (!devices.is_empty()).then(|| devices.clone());
        (name.clone(), Driver { devices })
    };
    let entry = |((namespace, name), claim): (&(String, String), &Claim)| Entry {
        uid: claim.uid.clone(),
        claim_name: name.clone(),
        namespace: namespace.clone(),
        pods: Some(
            claim
                .pods
                .iter()
                .map(|uid| (uid.clone(), Nothing {}))
                .collect(),
        ),
        driver_state: Some(claim.drivers.iter().map(driver).collect()),
    };
    let data = Data {
        kind: KIND.into(),
        api_version: VERSION.into(),
        claims: Some(claims.0.iter().map(entry).collect()),
    };
    // Maps with string keys and values: serde_json cannot fail on them.
    let data = serde_json::to_string(&data).unwrap_or_default();
    let checksum = crc32(data.as_bytes());
    serde_json::to_string(&File { data, checksum }).unwrap_or_default()
}
