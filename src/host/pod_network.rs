//! The network of a joined node on this machine: its CNI configuration, composed of a template, the addresses that are reserved for
//! pods, and the addresses of its bridge. `core::node::pod_network` decides what happens with them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use holdfast_core::node::pod_network::{Facts, compose, range_of};
use holdfast_net::netlink::Socket;
use holdfast_sys::file;
use ipnet::{IpNet, Ipv4Net};
use serde_json::Value;

/// Size limit of a configuration in bytes.
const MAX_FILE_SIZE: u64 = 1 << 20;

/// The network of a template.
#[derive(Debug, Clone)]
pub struct PodNetwork {
    template: PathBuf,
}

/// What a template says about its network.
struct Template {
    text: Value,
    bridge: String,
    /// The directory with a file for each reserved address.
    leases: PathBuf,
}

impl Template {
    fn parse(text: Value) -> Option<Template> {
        let of = |pointer: &str| text.pointer(pointer)?.as_str().map(str::to_owned);
        let bridge = of("/plugins/0/bridge")?;
        let leases = Path::new(&of("/plugins/0/ipam/dataDir")?).join(of("/name")?);
        Some(Template {
            text,
            bridge,
            leases,
        })
    }
}

impl PodNetwork {
    /// The network of a template, whose configuration is next to it.
    #[must_use]
    pub fn new(template: &Path) -> PodNetwork {
        PodNetwork {
            template: template.to_owned(),
        }
    }

    /// The file that the runtime reads.
    fn configuration(&self) -> PathBuf {
        self.template.with_extension("conflist")
    }

    fn template(&self) -> io::Result<Template> {
        let path = self.template.display();
        let text = file::read_text(&self.template, MAX_FILE_SIZE)
            .map_err(|e| io::Error::new(e.kind(), format!("{path} cannot be read: {e}")))?;
        let parsed = serde_json::from_str(&text).ok().and_then(Template::parse);
        parsed.ok_or_else(|| {
            io::Error::other(format!(
                "{path} is no network with name, plugins[0].bridge and plugins[0].ipam.dataDir; run `holdfast join` again"
            ))
        })
    }

    /// Reads the state of the network.
    ///
    /// # Errors
    ///
    /// A file, a directory or the kernel's addresses cannot be read.
    pub fn facts(&self) -> io::Result<Facts> {
        let template = self.template()?;
        let text = file::read_text_if_there(&self.configuration(), MAX_FILE_SIZE)?;
        let configuration: Value = text
            .and_then(|text| serde_json::from_str(&text).ok())
            .unwrap_or_default();
        let names = match fs::read_dir(&template.leases) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => vec![],
            entries => entries?.collect::<io::Result<Vec<_>>>()?,
        };
        let names = names.into_iter().map(|entry| entry.file_name());
        let mut leases: Vec<_> = names
            .filter_map(|name| name.to_str()?.parse().ok())
            .collect();
        leases.sort();
        Ok(Facts {
            configured: range_of(&configuration),
            leases,
            gateways: gateways(&template.bridge)?,
        })
    }

    /// Writes the configuration for a range.
    ///
    /// # Errors
    ///
    /// The template cannot be read, or the configuration cannot be written.
    pub fn write(&self, range: Ipv4Net) -> io::Result<()> {
        let configuration = compose(&self.template()?.text, range);
        let configuration =
            configuration.ok_or_else(|| io::Error::other("the template has no ipam"))?;
        file::replace(&self.configuration(), configuration.to_string().as_bytes())
    }

    /// Removes addresses of the bridge, and with them the kernel's route to an earlier range. The bridge plugin refuses a bridge
    /// with another address.
    ///
    /// # Errors
    ///
    /// The kernel refuses.
    pub fn remove_gateways(&self, addresses: &[IpNet]) -> io::Result<()> {
        let bridge = self.template()?.bridge;
        let mut socket = Socket::route()?;
        let Some(link) = socket.link(&bridge)? else {
            return Ok(());
        };
        for address in addresses {
            socket.delete_address(link.index, *address)?;
        }
        Ok(())
    }
}

/// The addresses of a bridge; none if it does not exist.
fn gateways(bridge: &str) -> io::Result<Vec<IpNet>> {
    let mut socket = Socket::route()?;
    match socket.link(bridge)? {
        Some(link) => socket.addresses(link.index),
        None => Ok(vec![]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_configuration_and_the_leases_of_a_template_are_found() {
        let dir = tempfile::tempdir().expect("a directory");
        let template = dir.path().join("10-holdfast.template");
        let network = PodNetwork::new(&template);
        let error = network.facts().expect_err("no template");
        assert!(
            error.to_string().contains("10-holdfast.template"),
            "{error}"
        );
        let text = json!({"name": "n", "plugins": [{"type": "bridge", "bridge": "nosuch0",
            "ipam": {"type": "host-local", "dataDir": dir.path().join("networks")}}]});
        fs::write(&template, text.to_string()).expect("written");
        assert_eq!(network.facts().expect("facts"), Facts::default());

        let range = "10.244.1.0/24".parse().expect("a range");
        network.write(range).expect("written");
        let leases = dir.path().join("networks/n");
        fs::create_dir_all(&leases).expect("a directory");
        for name in ["10.244.1.3", "10.244.1.2", "last_reserved_ip.0", "lock"] {
            fs::write(leases.join(name), "").expect("written");
        }
        let expected = Facts {
            configured: Some(range),
            leases: ["10.244.1.2", "10.244.1.3"]
                .map(|a| a.parse().expect("an address"))
                .into(),
            gateways: vec![],
        };
        assert_eq!(network.facts().expect("facts"), expected);
        assert!(dir.path().join("10-holdfast.conflist").exists());
        network.remove_gateways(&[]).expect("no bridge");
        fs::write(&template, "{}").expect("written");
        assert!(network.write(range).is_err());
    }
}
