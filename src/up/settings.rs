//! The names and directories of a local cluster.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use anyhow::bail;

use super::messages;
use super::ranges::Ranges;

/// The directories of one cluster.
#[derive(Debug, Clone)]
pub struct Dirs {
    /// Files that persist: store, certificates, images.
    pub data: PathBuf,
    /// Files of the current boot: sockets, pid files.
    pub run: PathBuf,
    /// Logs of the components.
    pub logs: PathBuf,
}

impl Dirs {
    /// The private containerd's socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.run.join("containerd.sock")
    }

    /// The administrator's kubeconfig.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.data.join("kubeconfig")
    }

    /// The service proxy's kubeconfig.
    #[must_use]
    pub fn proxy_kubeconfig(&self) -> PathBuf {
        self.data.join("proxy.kubeconfig")
    }

    /// The agent's root directory.
    #[must_use]
    pub fn agent(&self) -> PathBuf {
        self.data.join("agent")
    }
}

/// Returns the name of the directories, the cgroup and the nftables tables of the cluster `name`.
fn stem(name: &str) -> String {
    if name == "holdfast" {
        name.into()
    } else {
        format!("holdfast-{name}")
    }
}

/// A local cluster.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Its name.
    pub name: String,
    /// Its directories.
    pub dirs: Dirs,
    /// The endpoint of an existing runtime; `None` for a private one.
    pub containerd_endpoint: Option<String>,
    /// The port of the API.
    pub api_port: u16,
    /// The addresses on which the API listens in addition to 127.0.0.1 and the node's.
    pub api_bind_addresses: Vec<IpAddr>,
    /// The port of the agent's HTTP API; `None` for the default.
    pub agent_port: Option<u16>,
    /// The address ranges of services and pods.
    pub(super) ranges: Ranges,
    /// The bridge of the pods.
    pub bridge: String,
    /// The node's address.
    pub node_ip: IpAddr,
    /// A KubeletConfiguration whose fields override ours.
    pub agent_config: Option<PathBuf>,
    /// The kubeconfig of a node of another control plane, which replaces the bundled one.
    pub join: Option<PathBuf>,
    /// The node's name.
    pub node_name: String,
    /// Further names and addresses in the certificate of the API.
    pub tls_san: Vec<String>,
    /// Maximum time of a node without heartbeats; `None` for the default of the control plane.
    pub heartbeat_grace: Option<std::time::Duration>,
    /// What `holdfast join` has found out about the cluster; `None` for other commands.
    pub joined: Option<Joined>,
}

/// What a joined node's agent must know of its cluster.
#[derive(Debug, Clone)]
pub struct Joined {
    /// The kubeconfig with the bootstrap token.
    pub bootstrap: PathBuf,
    /// The addresses of the cluster's DNS servers; may be empty.
    pub cluster_dns: Vec<String>,
    /// The cluster's domain.
    pub cluster_domain: String,
}

impl Joined {
    /// Sets the fields of a KubeletConfiguration and the flags of the agent.
    pub(super) fn configure(&self, config: &mut serde_json::Value, arguments: &mut Vec<String>) {
        config["clusterDNS"] = serde_json::json!(self.cluster_dns);
        config["clusterDomain"] = self.cluster_domain.as_str().into();
        // The control plane signs a serving certificate for the Node's names and addresses.
        config["serverTLSBootstrap"] = true.into();
        config["rotateCertificates"] = true.into();
        arguments.push(format!(
            "--bootstrap-kubeconfig={}",
            self.bootstrap.display()
        ));
    }
}

impl Settings {
    /// Checks and completes the user's values.
    pub async fn new(
        name: &str,
        containerd_endpoint: Option<String>,
        api_port: u16,
    ) -> anyhow::Result<Settings> {
        let fine = !name.is_empty()
            && name.len() <= 20
            && name
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
            && !name.starts_with('-');
        if !fine {
            bail!(messages::invalid_name(name));
        }
        let hash = holdfast_core::digest::fnv32(name.bytes());
        let bridge = if name == "holdfast" {
            "hf0".to_owned()
        } else {
            format!("hf-{hash:08x}")
        };
        let node_ip = holdfast_sys::addresses::default_address()
            .await
            .unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        Ok(Settings {
            name: name.into(),
            dirs: Self::dirs(name),
            containerd_endpoint,
            api_port,
            api_bind_addresses: vec![],
            agent_port: None,
            ranges: Ranges::default(),
            bridge,
            node_ip,
            agent_config: None,
            join: None,
            joined: None,
            tls_san: vec![],
            heartbeat_grace: None,
            node_name: holdfast_sys::machine::hostname(),
        })
    }

    /// Returns the directories of the cluster `name`.
    #[must_use]
    pub fn dirs(name: &str) -> Dirs {
        let (data, run) = (
            PathBuf::from("/var/lib").join(stem(name)),
            PathBuf::from("/run").join(stem(name)),
        );
        Dirs {
            logs: data.join("logs"),
            data,
            run,
        }
    }

    /// Returns the port of the agent's HTTP API. By default it is 10250 if the bundled API has port 6443, otherwise
    /// 1000 above the API's port.
    pub fn agent_port(&self) -> anyhow::Result<u16> {
        let port = self.agent_port.or(if self.api_port == 6443 {
            Some(10250)
        } else {
            self.api_port.checked_add(1000)
        });
        match port {
            Some(port) if port == self.api_port || port == 0 => {
                bail!(messages::invalid_agent_port(port))
            }
            Some(port) => Ok(port),
            None => bail!(messages::no_agent_port(self.api_port)),
        }
    }

    /// Returns the port of the agent's `/healthz`: 10248 if the bundled API has port 6443, otherwise 0, because another
    /// cluster may use it.
    #[must_use]
    pub fn healthz_port(&self) -> u16 {
        if self.api_port == 6443 { 10248 } else { 0 }
    }

    /// Returns the addresses of the proxy's `/healthz` and `/metrics`: kube-proxy's defaults if the bundled API has port 6443,
    /// otherwise none, because another cluster may use them.
    #[must_use]
    pub(super) fn proxy_pages(&self) -> [&'static str; 2] {
        if self.api_port == 6443 {
            ["0.0.0.0:10256", "127.0.0.1:10249"]
        } else {
            ["", ""]
        }
    }

    /// Returns the name of the nftables tables.
    #[must_use]
    pub(super) fn table(&self) -> String {
        stem(&self.name)
    }

    /// The runtime's endpoint.
    #[must_use]
    pub fn endpoint(&self) -> String {
        self.containerd_endpoint
            .clone()
            .unwrap_or_else(|| format!("unix://{}", self.dirs.socket().display()))
    }

    /// Returns the cgroup as a slice, for systemd. Dashes would nest the slice.
    #[must_use]
    pub fn slice(&self) -> String {
        format!("{}.slice", stem(&self.name).replace('-', "_"))
    }

    /// Returns the cgroup that contains the cluster's pods.
    #[must_use]
    pub fn cgroup(&self) -> String {
        format!("/{}", stem(&self.name))
    }
}
