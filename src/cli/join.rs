//! The flags of `holdfast token` and `holdfast join`, and those of the control plane about several nodes.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use holdfast_core::node::join::{AuthorityHash, Token, parse_certified_name};

fn parse_token(text: &str) -> Result<Token, String> {
    Token::parse(text).map_err(|e| e.to_string())
}

fn parse_hash(text: &str) -> Result<AuthorityHash, String> {
    AuthorityHash::parse(text).map_err(|e| e.to_string())
}

/// Parses a period without heartbeats. Agents renew their leases in a quarter of the lease's duration, which has whole seconds.
pub(super) fn parse_grace(text: &str) -> Result<std::time::Duration, String> {
    let grace = holdfast_core::time::duration(text).filter(|grace| grace.as_secs() > 0);
    grace.ok_or_else(|| format!("{text:?} is not a duration of at least 1s; use for example 50s"))
}

pub(super) fn parse_name(text: &str) -> Result<String, String> {
    parse_certified_name(text).map_err(|e| e.to_string())
}

/// Parses `NODE=RANGE`.
fn parse_node_range(text: &str) -> Result<(String, ipnet::IpNet), String> {
    let invalid = || format!("{text:?} is not NODE=RANGE, for example a=10.244.0.0/24");
    let (node, range) = text.split_once('=').ok_or_else(invalid)?;
    let range: ipnet::IpNet = range.parse().map_err(|_| invalid())?;
    (!node.is_empty() && range.trunc() == range)
        .then(|| (node.to_owned(), range))
        .ok_or_else(invalid)
}

/// The cluster that a command administers.
#[derive(Args)]
pub struct AdminSelection {
    /// The cluster that `holdfast up --name` started.
    #[arg(long, default_value = "holdfast", global = true)]
    pub name: String,
    /// The administrator's kubeconfig [default: that of the cluster of --name].
    #[arg(long, value_name = "FILE", conflicts_with = "name", global = true)]
    pub kubeconfig: Option<PathBuf>,
}

/// Subcommands of `holdfast token`.
#[derive(Subcommand)]
pub enum TokenCommand {
    /// Create a bootstrap token and print it.
    Create(CreateTokenFlags),
    /// List the bootstrap tokens.
    List {
        /// Print the secret part of the tokens.
        #[arg(long)]
        show_secrets: bool,
    },
    /// Delete a bootstrap token. A machine that has joined with it stays in the cluster.
    Delete {
        /// The token's id, its first six characters.
        token: String,
    },
}

/// Flags of `holdfast token create`.
#[derive(Args)]
pub struct CreateTokenFlags {
    /// The token [default: a random one].
    #[arg(value_parser = parse_token)]
    pub token: Option<Token>,
    /// How long the token is valid, for instance 30m; 0 is forever.
    #[arg(long, default_value = "24h", value_name = "DURATION")]
    pub ttl: String,
    /// What the token is for.
    #[arg(long, default_value = "", value_name = "TEXT")]
    pub description: String,
    /// Print the whole `holdfast join` command instead of the token.
    #[arg(long)]
    pub print_join: bool,
    /// The address of the API in the command of --print-join [default: the address of the kubeconfig, or this machine's address if
    /// that is a loopback address].
    #[arg(long, value_name = "HOST:PORT", requires = "print_join")]
    pub server: Option<String>,
}

/// Flags of `holdfast join`.
#[derive(Args)]
pub struct JoinFlags {
    /// The address of the cluster's API, for instance 192.0.2.1:6443.
    pub server: String,
    /// The bootstrap token; needed until this node has its own certificate.
    #[arg(long, value_parser = parse_token, value_name = "TOKEN", env = "HOLDFAST_TOKEN", hide_env_values = true)]
    pub token: Option<Token>,
    /// The hash of the cluster's certificate authority, sha256:HEX, with which this machine recognises the cluster. May be given
    /// several times; one must fit.
    #[arg(long, value_parser = parse_hash, value_name = "HASH")]
    pub discovery_token_ca_cert_hash: Vec<AuthorityHash>,
    /// The name of the node's directories and network on this machine.
    #[arg(long, default_value = "holdfast")]
    pub name: String,
    /// The node's name [default: this machine's host name].
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// The node's address [default: the address of the interface with the default route].
    #[arg(long, value_name = "IP")]
    pub node_ip: Option<IpAddr>,
    /// Use this containerd instead of starting a private one, for instance unix:///run/containerd/containerd.sock. It must have its own CNI network.
    #[arg(long, value_name = "URL")]
    pub containerd_endpoint: Option<String>,
    /// The port of the agent's HTTP API.
    #[arg(long, value_name = "PORT", default_value_t = 10250)]
    pub agent_port: u16,
    /// A KubeletConfiguration for the agent; its fields override those that `join` sets.
    #[arg(long, value_name = "FILE")]
    pub agent_config: Option<PathBuf>,
}

/// Flags of the control plane about several nodes.
#[derive(Args, Debug, Clone)]
pub struct NodeFlags {
    /// The address ranges of the pods of all nodes: one, or an IPv4 and an IPv6 range separated by a comma.
    #[arg(long, value_name = "RANGES", value_delimiter = ',', default_value = holdfast_control::join::CLUSTER_RANGE)]
    pub cluster_cidr: Vec<ipnet::IpNet>,
    /// The prefix length of a node's IPv4 pod range.
    #[arg(
        long,
        value_name = "LENGTH",
        default_value_t = 24,
        visible_alias = "node-cidr-mask-size-ipv4"
    )]
    pub node_cidr_mask_size: u8,
    /// The prefix length of a node's IPv6 pod range.
    #[arg(long, value_name = "LENGTH", default_value_t = 64)]
    pub node_cidr_mask_size_ipv6: u8,
    /// The pod range of one node, which is reserved for it, for instance a=10.244.0.0/24.
    #[arg(long, value_name = "NODE=RANGE", value_parser = parse_node_range)]
    pub node_pod_cidr: Option<(String, ipnet::IpNet)>,
    /// Another DNS name or address in the certificate of the API. May be given several times.
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    pub tls_san: Vec<String>,
    /// How long a node may send no heartbeat until it is not ready. Agents send one every 10 seconds, or in a quarter of their
    /// `nodeLeaseDurationSeconds`.
    #[arg(long, value_name = "DURATION", value_parser = parse_grace, default_value = "50s")]
    pub node_monitor_grace_period: std::time::Duration,
}

impl NodeFlags {
    /// The settings of the control plane.
    #[must_use]
    pub fn settings(self) -> holdfast_control::join::NodeSettings {
        holdfast_control::join::NodeSettings {
            cluster_ranges: self.cluster_cidr,
            prefixes: (self.node_cidr_mask_size, self.node_cidr_mask_size_ipv6),
            own: self.node_pod_cidr,
            certified: self.tls_san,
            heartbeat_grace: self.node_monitor_grace_period,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grace_period_has_seconds() {
        for (text, seconds) in [
            ("50s", Some(50)),
            ("1m10s", Some(70)),
            ("0", None),
            ("900ms", None),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(
                parse_grace(text).ok().map(|g| g.as_secs()),
                seconds,
                "{text}"
            );
        }
    }

    #[test]
    fn a_nodes_range_has_a_name_and_a_network() {
        let (node, range) = parse_node_range("a=10.244.0.0/24").expect("a range");
        assert_eq!((&*node, range.to_string().as_str()), ("a", "10.244.0.0/24"));
        for bad in [
            "",
            "a",
            "a=",
            "=10.244.0.0/24",
            "a=10.244.0.1/24",
            "a=10.244.0.0",
            "a=b=10.244.0.0/24",
        ] {
            assert!(parse_node_range(bad).is_err(), "{bad}");
        }
    }
}
