//! What plans depend on besides services.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::network::Family;

/// The facts of this node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeFacts {
    /// The name of the Node.
    pub name: String,
    /// The value of the Node's label `topology.kubernetes.io/zone`; `None` without the label.
    pub zone: Option<String>,
    /// The addresses in the Node's status, at most one of each family. They accept node ports unless networks are configured.
    pub addresses: Vec<IpAddr>,
}

/// Settings that do not change while the process runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PlanSettings {
    /// The families that get rules.
    pub families: Vec<Family>,
    /// The networks of pods. Empty: clients in the cluster are not distinguished from others.
    pub cluster_networks: Vec<IpNet>,
    /// Cluster addresses at which this process answers itself, such as that of the DNS: they get no rules.
    pub own_addresses: Vec<IpAddr>,
}

impl PlanSettings {
    /// Whether clients in the cluster are known for a family.
    pub(super) fn knows_clients(&self, family: Family) -> bool {
        let mut networks = self.cluster_networks.iter();
        networks.any(|net| Family::of(net.network()) == family)
    }
}
