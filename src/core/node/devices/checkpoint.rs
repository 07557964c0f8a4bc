//! The checkpoint of device allocations, `device-plugins/kubelet_internal_checkpoint`, in the kubelet's format
//! (`pkg/kubelet/cm/devicemanager/checkpoint`). With it, a node can switch between the kubelet and this agent, and
//! every container keeps its devices. Pure.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};

use serde::{Deserialize, Serialize};

use crate::digest::fnv32;

/// The whole file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct File {
    data: Data,
    checksum: u64,
}

/// The content. Go distinguishes absent lists from empty ones, and the checksum depends on it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Data {
    /// Allocations of containers, in any order.
    pub pod_device_entries: Option<Vec<Entry>>,
    /// The healthy devices of each resource with a registered plugin.
    pub registered_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

/// A container's allocation of one resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Entry {
    /// The pod's uid.
    #[serde(rename = "PodUID")]
    pub pod_uid: String,
    /// The container's name.
    pub container_name: String,
    /// The resource.
    pub resource_name: String,
    /// Device ids by NUMA node; -1 for devices without one.
    #[serde(rename = "DeviceIDs")]
    pub device_ids: Option<BTreeMap<i64, Option<Vec<String>>>>,
    /// The plugin's Allocate response as base64-encoded protobuf.
    pub alloc_resp: Option<String>,
}

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The content is not JSON of the expected shape.
    #[error("not a device checkpoint: {0}")]
    Malformed(#[from] serde_json::Error),
    /// The file was modified or is truncated.
    #[error("its checksum is {found}, but that of its content is {expected}")]
    Checksum {
        /// Checksum in the file.
        found: u64,
        /// Checksum computed from the content.
        expected: u64,
    },
}

/// Reads a checkpoint.
pub fn read(text: &str) -> Result<Data, CheckpointError> {
    let file: File = serde_json::from_str(text)?;
    let expected = checksum(&file.data);
    if file.checksum != expected {
        return Err(CheckpointError::Checksum {
            found: file.checksum,
            expected,
        });
    }
    Ok(file.data)
}

/// Serialises a checkpoint.
#[must_use]
pub fn write(data: Data) -> String {
    let checksum = checksum(&data);
    // Maps with string or integer keys: serde_json cannot fail on them.
    serde_json::to_string(&File { data, checksum }).unwrap_or_default()
}

/// 32-bit FNV-1a over the structure as Go's deep-hash printer dumps it.
fn checksum(data: &Data) -> u64 {
    fnv32(printed(data).bytes()).into()
}

/// A list as that printer writes it: `<nil>` if absent.
fn list<T: Display>(items: Option<&[T]>) -> String {
    let Some(items) = items else {
        return "<nil>".into();
    };
    let items: Vec<String> = items.iter().map(T::to_string).collect();
    format!("[{}]", items.join(" "))
}

/// A map of lists as that printer writes it, sorted by key.
fn map<K: Display>(map: Option<&BTreeMap<K, Option<Vec<String>>>>) -> String {
    let Some(map) = map else {
        return "<nil>".into();
    };
    let items: Vec<String> = map
        .iter()
        .map(|(key, items)| format!("{key}:{}", list(items.as_deref())))
        .collect();
    format!("map[{}]", items.join(" "))
}

fn printed(data: &Data) -> String {
    let entry = |entry: &Entry| {
        let mut text = format!(
            "{{PodUID:(string){} ContainerName:(string){} ResourceName:(string){}",
            entry.pod_uid, entry.container_name, entry.resource_name
        );
        let devices = map(entry.device_ids.as_ref());
        let response = list(entry.response().as_deref());
        // Writing to a string does not fail.
        let _ = write!(
            text,
            " DeviceIDs:(checkpoint.DevicesPerNUMA){devices} AllocResp:([]uint8){response}}}"
        );
        text
    };
    let entries: Option<Vec<String>> = data
        .pod_device_entries
        .as_ref()
        .map(|entries| entries.iter().map(entry).collect());
    format!(
        "(checkpoint.checkpointData){{PodDeviceEntries:([]checkpoint.PodDevicesEntry){} RegisteredDevices:(map[string][]string){}}}",
        list(entries.as_deref()),
        map(data.registered_devices.as_ref())
    )
}

impl Entry {
    /// The plugin's Allocate response as protobuf; `None` if absent or not base64.
    #[must_use]
    pub fn response(&self) -> Option<Vec<u8>> {
        use base64::Engine as _;
        let engine = base64::engine::general_purpose::STANDARD;
        engine.decode(self.alloc_resp.as_ref()?).ok()
    }

    /// Encodes a protobuf response for [`Entry::alloc_resp`].
    #[must_use]
    pub fn encoded(response: &[u8]) -> String {
        use base64::Engine as _;
        base64::engine::general_purpose::STANDARD.encode(response)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by the kubelet's package (1.36.1).
    const FILES: [&str; 3] = [
        r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":3467439661}"#,
        r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":null},"Checksum":1944006890}"#,
        r#"{"Data":{"PodDeviceEntries":[{"PodUID":"pod-1","ContainerName":"c","ResourceName":"example.com/thing","DeviceIDs":{"-1":["d1","d2"],"0":["a"],"10":["b"],"2":["é \"x\""]},"AllocResp":"CgD/"},{"PodUID":"pod-2","ContainerName":"c2","ResourceName":"r/x","DeviceIDs":{},"AllocResp":""},{"PodUID":"pod-3","ContainerName":"c3","ResourceName":"r/x","DeviceIDs":null,"AllocResp":null}],"RegisteredDevices":{"a/nil":null,"b/none":[],"example.com/thing":["d2","d1"]}},"Checksum":3057672466}"#,
    ];

    #[test]
    fn the_kubelets_checkpoint_files_round_trip() {
        for text in FILES {
            let data = read(text).expect(text);
            // Only the order of map keys may differ.
            let value =
                |text: &str| -> serde_json::Value { serde_json::from_str(text).expect("JSON") };
            assert_eq!(value(&write(data.clone())), value(text));
            assert_eq!(read(&write(data.clone())).expect(text), data);
        }
        let data = read(FILES[2]).expect("a checkpoint");
        let entries = data.pod_device_entries.expect("entries");
        assert_eq!(entries[0].response(), Some(vec![10, 0, 255]));
        assert_eq!(Entry::encoded(&[10, 0, 255]), "CgD/");
    }

    #[test]
    fn modified_or_truncated_files_are_rejected() {
        let changed = FILES[2].replace("\"d1\"", "\"d3\"");
        assert!(matches!(
            read(&changed),
            Err(CheckpointError::Checksum { .. })
        ));
        assert!(matches!(
            read(&FILES[2][..100]),
            Err(CheckpointError::Malformed(_))
        ));
    }
}
