//! What a local cluster is called and where its things lie.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use anyhow::bail;

/// The directories of one cluster.
#[derive(Debug, Clone)]
pub struct Dirs {
    /// What lasts: store, certificates, images.
    pub data: PathBuf,
    /// What ends with the boot: sockets, pid files.
    pub run: PathBuf,
    /// Logs of the parts.
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

    /// The agent's root directory.
    #[must_use]
    pub fn agent(&self) -> PathBuf {
        self.data.join("agent")
    }
}

/// What the directories and the cgroup of the cluster `name` are called.
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
    /// A runtime that is already there.
    pub containerd_endpoint: Option<String>,
    /// The port of the API.
    pub api_port: u16,
    /// The addresses that the API listens on besides 127.0.0.1 and the node's.
    pub api_bind_addresses: Vec<IpAddr>,
    /// The port of the agent's HTTP API, if it is not the usual one.
    pub agent_port: Option<u16>,
    /// The addresses of the pods.
    pub pod_cidr: ipnet::Ipv4Net,
    /// The bridge they are on.
    pub bridge: String,
    /// The node's address.
    pub node_ip: IpAddr,
    /// A KubeletConfiguration whose fields win over ours.
    pub agent_config: Option<PathBuf>,
    /// The kubeconfig of a node of another control plane, in the place of the bundled one.
    pub join: Option<PathBuf>,
    /// What the node is called.
    pub node_name: String,
}

impl Settings {
    /// Checks and completes what the user gave.
    pub async fn new(
        name: &str,
        containerd_endpoint: Option<String>,
        api_port: u16,
        pod_cidr: ipnet::Ipv4Net,
    ) -> anyhow::Result<Settings> {
        let fine = !name.is_empty()
            && name.len() <= 20
            && name
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
            && !name.starts_with('-');
        if !fine {
            bail!("--name: {name:?} is invalid: use at most 20 lower-case letters, digits and '-'");
        }
        if pod_cidr.prefix_len() > 28 || pod_cidr.addr() != pod_cidr.network() {
            bail!(
                "--pod-cidr: {pod_cidr} is invalid: use a network address with a prefix of at most 28, such as 10.244.0.0/24"
            );
        }
        let hash = crate::core::digest::fnv32(name.bytes());
        let bridge = if name == "holdfast" {
            "hf0".to_owned()
        } else {
            format!("hf-{hash:08x}")
        };
        let node_ip = crate::sys::addresses::default_address()
            .await
            .unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        Ok(Settings {
            name: name.into(),
            dirs: Self::dirs(name),
            containerd_endpoint,
            api_port,
            api_bind_addresses: vec![],
            agent_port: None,
            pod_cidr,
            bridge,
            node_ip,
            agent_config: None,
            join: None,
            node_name: crate::sys::machine::hostname(),
        })
    }

    /// Where the cluster `name` lies.
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

    /// The port of the agent's HTTP API: the kubelet's, for the API's own port; 1000 from it for another.
    pub fn agent_port(&self) -> anyhow::Result<u16> {
        let port = self.agent_port.or(if self.api_port == 6443 {
            Some(10250)
        } else {
            self.api_port.checked_add(1000)
        });
        match port {
            Some(port) if port == self.api_port || port == 0 => {
                bail!(
                    "--agent-port: {port} is invalid: use a port from 1 to 65535 that is not the API's"
                )
            }
            Some(port) => Ok(port),
            None => bail!(
                "--agent-port is needed: without it the agent listens 1000 ports above the API, and {} + 1000 is no port",
                self.api_port
            ),
        }
    }

    /// The port on which the agent tells its health: the kubelet's, or none beside another cluster.
    #[must_use]
    pub fn healthz_port(&self) -> u16 {
        if self.api_port == 6443 { 10248 } else { 0 }
    }

    /// The runtime's endpoint.
    #[must_use]
    pub fn endpoint(&self) -> String {
        self.containerd_endpoint
            .clone()
            .unwrap_or_else(|| format!("unix://{}", self.dirs.socket().display()))
    }

    /// The same as a slice, where systemd makes cgroups: dashes would nest it.
    #[must_use]
    pub fn slice(&self) -> String {
        format!("{}.slice", stem(&self.name).replace('-', "_"))
    }

    /// The cgroup below which its pods are.
    #[must_use]
    pub fn cgroup(&self) -> String {
        format!("/{}", stem(&self.name))
    }
}
