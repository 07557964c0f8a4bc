//! The CNI networks whose addresses come from the host-local plugin, as the runtime reports its configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde_json::Value;

/// Default lease directory of host-local (`plugins/ipam/host-local/backend/disk` in containernetworking/plugins).
const DEFAULT_DIR: &str = "/var/lib/cni/networks";

/// A network with host-local IPAM.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseNetwork {
    /// The network's name.
    pub name: String,
    /// The directory that holds the leases of all networks.
    pub data_dir: PathBuf,
}

/// The runtime's use of host-local.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attachments {
    /// The networks of its current configuration.
    pub networks: BTreeSet<LeaseNetwork>,
    /// Ids of all sandboxes in any state.
    pub sandboxes: BTreeSet<String>,
}

/// The networks in field `cniconfig` of a runtime's verbose status, which is containerd's `cni.ConfigResult`. Empty if
/// the runtime reports none.
#[must_use]
pub fn networks(info: &BTreeMap<String, String>) -> BTreeSet<LeaseNetwork> {
    let loaded = info.get("cniconfig").map_or("", String::as_str);
    let loaded: Value = serde_json::from_str(loaded).unwrap_or_default();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut networks = BTreeSet::new();
    for network in list(&loaded["Networks"]) {
        let config = &network["Config"];
        for plugin in list(&config["Plugins"]) {
            let source = plugin["Source"].as_str().unwrap_or_default();
            let source: Value = serde_json::from_str(source).unwrap_or_default();
            let (name, ipam) = (config["Name"].as_str(), &source["ipam"]);
            let (Some(name), Some("host-local")) = (name, ipam["type"].as_str()) else {
                continue;
            };
            let dir = ipam["dataDir"].as_str().filter(|dir| !dir.is_empty());
            networks.insert(LeaseNetwork {
                name: name.to_owned(),
                data_dir: dir.unwrap_or(DEFAULT_DIR).into(),
            });
        }
    }
    networks
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_host_local_networks_are_listed() {
        let plugin = |source: Value| {
            let kind = source["type"].clone();
            json!({"Network": {"type": kind, "ipam": {}, "dns": {}}, "Source": source.to_string()})
        };
        let loaded = json!({"PluginConfDir": "/etc/cni/net.d", "Networks": [
            {"IFName": "lo", "Config": {"Name": "cni-loopback", "Plugins": [plugin(json!({"type": "loopback"}))]}},
            {"IFName": "eth0", "Config": {"Name": "pods", "Plugins": [
                plugin(json!({"type": "bridge", "ipam": {"type": "host-local", "dataDir": "/d"}})),
                plugin(json!({"type": "portmap"})),
            ]}},
            {"IFName": "eth1", "Config": {"Name": "more", "Plugins": [plugin(json!({"type": "ptp", "ipam": {"type": "host-local"}}))]}},
            {"IFName": "eth2", "Config": {"Name": "leased", "Plugins": [plugin(json!({"type": "macvlan", "ipam": {"type": "dhcp"}}))]}},
            {"IFName": "eth3", "Config": Value::Null},
        ]});
        let of =
            |text: &str| networks(&BTreeMap::from([("cniconfig".to_owned(), text.to_owned())]));
        let network = |name: &str, dir: &str| LeaseNetwork {
            name: name.into(),
            data_dir: dir.into(),
        };
        let expected = [network("pods", "/d"), network("more", DEFAULT_DIR)].into();
        assert_eq!(of(&loaded.to_string()), expected);
        for nothing in [
            "",
            "null",
            "[]",
            r#"{"Networks": null}"#,
            r#"{"Networks": [1]}"#,
        ] {
            assert_eq!(of(nothing), BTreeSet::new(), "{nothing}");
        }
        assert_eq!(networks(&BTreeMap::new()), BTreeSet::new());
    }
}
