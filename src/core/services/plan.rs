//! What the kernel has for one port of a service in one family of addresses (`syncProxyRules` in
//! `pkg/proxy/nftables/proxier.go`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::endpoints::Slices;
use super::facts::{PortFacts, ServiceFacts};
use super::node::{NodeFacts, PlanSettings};
use super::rules::{Address, AddressSet, Destination, Map, Rule, Target, Verdict};
use super::topology::{Policies, choose, targets};
use crate::network::{Family, Protocol};

/// The maximum length of a chain's name; the kernel's limit is 255 bytes (`NFT_NAME_MAXLEN`).
const MAX_NAME: usize = 180;

/// The maximum number of endpoints of a port with session affinity, of which each has a set and a chain.
pub(super) const MAX_AFFINITY: usize = 1000;

/// What happens to a destination, without the names of chains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Way {
    /// To the endpoints of the policy Cluster.
    Cluster,
    /// To the endpoints of the policy Local.
    Local,
    /// To the chain of external traffic.
    External,
    /// To the check of the client.
    Firewall,
    Drop,
    Reject,
}

/// The chain of external traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct External {
    /// `externalTrafficPolicy: Local`: the client's address stays.
    pub is_local: bool,
    /// Whether clients in the cluster are known; they reach all endpoints.
    pub knows_clients: bool,
}

/// The plan of a port in one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PortPlan {
    /// The number in names of chains and pools. A number is never used again.
    pub number: u32,
    pub family: Family,
    pub protocol: Protocol,
    /// `namespace/name/protocol/port`, for people who read the ruleset.
    pub label: String,
    /// The targets of the policy Cluster, by their place.
    pub cluster: Vec<Target>,
    /// The targets of the policy Local, by their place.
    pub local: Vec<Target>,
    /// How long a client keeps its endpoint, in seconds.
    pub affinity: Option<u32>,
    pub external: Option<External>,
    /// The clients that may use addresses of the load balancer; `None` allows all.
    pub firewall: Option<Vec<IpNet>>,
    pub entries: Vec<(Map, Destination, Way)>,
    /// The addresses of shared sets, in their order.
    pub addresses: Box<[(AddressSet, IpAddr)]>,
    /// For UDP, the targets whose flows stay: also those that terminate but still serve.
    pub serving: Vec<Target>,
}

/// The chains, sets and entries of a plan, with their names.
#[derive(Debug, Default)]
pub(super) struct Objects {
    pub chains: BTreeMap<String, Vec<Rule>>,
    pub affinities: BTreeSet<String>,
    pub entries: BTreeMap<(Map, Destination), Verdict>,
}

/// The name of the port for people. Characters that `nft` does not read are replaced.
pub(super) fn label(service: &str, port: &PortFacts) -> String {
    let text = format!("{service}/{}/{}", port.protocol.name(), port.name);
    let readable = |c: char| c.is_ascii_alphanumeric() || "/.-_".contains(c);
    text.chars()
        .map(|c| if readable(c) { c } else { '_' })
        .take(MAX_NAME)
        .collect()
}

/// What a port is planned from.
pub(super) struct Input<'a> {
    pub settings: &'a PlanSettings,
    pub node: &'a NodeFacts,
    pub service: &'a ServiceFacts,
    pub slices: &'a Slices,
    /// Whether the service has the destination, not another service.
    pub has: &'a dyn Fn(Destination) -> bool,
}

/// The external addresses of a service, with whether they belong to the load balancer.
fn external_addresses(service: &ServiceFacts) -> BTreeMap<IpAddr, bool> {
    let balancer = service.balancer_addresses.iter().map(|a| (*a, true));
    let external = service.external_addresses.iter().map(|a| (*a, false));
    let mut all: BTreeMap<IpAddr, bool> = external.chain(balancer).collect();
    all.retain(|address, _| !service.cluster_addresses.contains(address));
    all
}

/// The cluster address of a service in one family; `None` also if this process answers at the address.
fn cluster_address(
    settings: &PlanSettings,
    service: &ServiceFacts,
    family: Family,
) -> Option<IpAddr> {
    let mut cluster = service.cluster_addresses.iter();
    let address = cluster.find(|a| Family::of(**a) == family)?;
    (!settings.own_addresses.contains(address)).then_some(*address)
}

/// The destinations that a port claims in one family.
pub(super) fn destinations(
    settings: &PlanSettings,
    service: &ServiceFacts,
    port: &PortFacts,
    family: Family,
) -> Vec<Destination> {
    let Some(cluster) = cluster_address(settings, service, family) else {
        return vec![];
    };
    let external = external_addresses(service);
    let external = external.keys().copied();
    let external =
        external.filter(|a| Family::of(*a) == family && !settings.own_addresses.contains(a));
    let addresses = std::iter::once(cluster).chain(external);
    let at = |address, number| Destination {
        address,
        protocol: port.protocol,
        port: number,
    };
    let node_port = port.node_port.map(|number| at(Address::Node, number));
    addresses
        .map(|address| at(Address::Ip(address), port.port))
        .chain(node_port)
        .collect()
}

impl PortPlan {
    /// Plans a port. Returns `None` if the service has no cluster address of the family, or this process answers at the address.
    pub(super) fn new(
        input: &Input<'_>,
        port: &PortFacts,
        family: Family,
        number: u32,
        label: String,
    ) -> Option<PortPlan> {
        let Input { service, node, .. } = *input;
        let address = cluster_address(input.settings, service, family)?;
        let endpoints = input.slices.of_port(port, family, &node.name);
        let policies = Policies {
            is_internal_local: service.is_internal_local,
            is_external_local: service.is_external_local,
            is_external: service.is_external(port, family),
        };
        let chosen = choose(&endpoints, policies, node);
        // Only a client on this node can be its own endpoint: the translation happens where the client is.
        let may_be_here = |node_name: Option<&str>| node_name.is_none_or(|n| n == node.name);
        let used = chosen.cluster.iter().chain(&chosen.local);
        let here = used.filter(|e| may_be_here(e.facts.node.as_deref()));
        let mut addresses: BTreeSet<_> = here
            .map(|e| (AddressSet::Hairpin, e.target.address))
            .collect();
        addresses.insert((AddressSet::ClusterAddresses, address));
        let serving = endpoints.iter().filter(|e| e.facts.is_serving);
        let serving = match port.protocol {
            Protocol::Udp => serving.map(|e| e.target).collect(),
            Protocol::Tcp | Protocol::Sctp => vec![],
        };
        let external = External {
            is_local: service.is_external_local,
            knows_clients: input.settings.knows_clients(family),
        };
        let mut plan = PortPlan {
            number,
            family,
            protocol: port.protocol,
            label,
            cluster: targets(&chosen.cluster),
            local: targets(&chosen.local),
            affinity: service.affinity.filter(|_| endpoints.len() <= MAX_AFFINITY),
            external: Some(external).filter(|_| policies.is_external && chosen.has_any),
            firewall: None,
            entries: vec![],
            addresses: addresses.into_iter().collect(),
            serving,
        };
        plan.add_internal(input, port, address, chosen.has_any);
        plan.add_external(input, port, chosen.has_any);
        plan.entries.shrink_to_fit();
        Some(plan)
    }

    fn add(&mut self, input: &Input<'_>, map: Map, destination: Destination, way: Way) {
        if (input.has)(destination) {
            self.entries.push((map, destination, way));
        }
    }

    fn add_internal(
        &mut self,
        input: &Input<'_>,
        port: &PortFacts,
        address: IpAddr,
        has_any: bool,
    ) {
        let destination = Destination {
            address: Address::Ip(address),
            protocol: port.protocol,
            port: port.port,
        };
        let (map, way) = match input.service.is_internal_local {
            _ if !has_any => (Map::NoEndpoints, Way::Reject),
            true if self.local.is_empty() => (Map::NoEndpoints, Way::Drop),
            true => (Map::Services, Way::Local),
            false => (Map::Services, Way::Cluster),
        };
        self.add(input, map, destination, way);
    }

    fn add_external(&mut self, input: &Input<'_>, port: &PortFacts, has_any: bool) {
        let balanced = external_addresses(input.service);
        let is_balancer =
            |address| matches!(address, Address::Ip(ip) if balanced.get(&ip) == Some(&true));
        self.firewall = firewall(input, self.family);
        let has_external = match input.service.is_external_local {
            true => !self.local.is_empty(),
            false => has_any,
        };
        for destination in destinations(input.settings, input.service, port, self.family) {
            if let Address::Ip(ip) = destination.address
                && !balanced.contains_key(&ip)
            {
                continue;
            }
            if has_any {
                self.add(input, Map::Services, destination, Way::External);
            }
            if !has_external {
                // Pods and this node were translated before; others have no endpoint here.
                let way = if has_any { Way::Drop } else { Way::Reject };
                self.add(input, Map::NoEndpoints, destination, way);
            }
            if self.firewall.is_some() && is_balancer(destination.address) {
                self.add(input, Map::Firewall, destination, Way::Firewall);
            }
        }
    }

    /// The number of targets of both policies.
    pub(super) fn targets(&self) -> usize {
        self.cluster.len().saturating_add(self.local.len())
    }

    /// The number of the pool of a policy.
    pub(super) fn pool(&self, is_local: bool) -> u32 {
        let even = self.number.saturating_mul(2);
        even.saturating_add(u32::from(is_local))
    }

    fn chain(&self, kind: &str) -> String {
        format!("{kind}-{}/{}", self.number, self.label)
    }

    /// The chain, or the set of clients, of one target.
    pub(super) fn of_target(&self, kind: &str, target: Target) -> String {
        let Target { address, port } = target;
        let address = address.to_string().replace(':', ".");
        format!("{}__{address}/{port}", self.chain(kind))
    }

    fn verdict(&self, way: Way) -> Verdict {
        match way {
            Way::Cluster => Verdict::Goto(self.chain("service")),
            Way::Local => Verdict::Goto(self.chain("local")),
            Way::External => Verdict::Goto(self.chain("external")),
            Way::Firewall => Verdict::Goto(self.chain("firewall")),
            Way::Drop => Verdict::Drop,
            Way::Reject => Verdict::Reject,
        }
    }

    /// The rules that choose a target of a pool.
    fn balance(&self, is_local: bool) -> Vec<Rule> {
        let targets = if is_local { &self.local } else { &self.cluster };
        let pool = self.pool(is_local);
        let count = u32::try_from(targets.len()).unwrap_or(u32::MAX);
        if self.affinity.is_none() {
            return vec![Rule::Translate { pool, count }];
        }
        let known = targets.iter().map(|target| Rule::Known {
            affinity: self.of_target("affinity", *target),
            chain: self.of_target("endpoint", *target),
            target: *target,
        });
        known
            .chain(std::iter::once(Rule::Choose { pool, count }))
            .collect()
    }

    fn external_rules(&self, external: External) -> Vec<Rule> {
        let cluster = self.chain("service");
        if !external.is_local {
            // The endpoint may be on another node, which must answer to this one.
            return vec![Rule::Masquerade, Rule::Goto(cluster)];
        }
        let mut rules = vec![];
        if external.knows_clients {
            rules.push(Rule::GotoFromCluster(cluster.clone()));
        }
        // The node's own connections would have the external address as their source.
        rules.push(Rule::MasqueradeNode);
        rules.push(Rule::GotoFromNode(cluster));
        if !self.local.is_empty() {
            rules.push(Rule::Goto(self.chain("local")));
        }
        rules
    }

    /// The chains, sets and entries of the plan.
    pub(super) fn objects(&self) -> Objects {
        let mut objects = Objects::default();
        for (targets, kind, is_local) in [
            (&self.cluster, "service", false),
            (&self.local, "local", true),
        ] {
            if !targets.is_empty() {
                let rules = self.balance(is_local);
                objects.chains.insert(self.chain(kind), rules);
            }
        }
        if let Some(seconds) = self.affinity {
            for target in self.cluster.iter().chain(&self.local) {
                let affinity = self.of_target("affinity", *target);
                objects.affinities.insert(affinity.clone());
                let rules = vec![
                    Rule::Remember { affinity, seconds },
                    Rule::TranslateTo(*target),
                ];
                let chain = self.of_target("endpoint", *target);
                objects.chains.insert(chain, rules);
            }
        }
        if let Some(external) = self.external {
            let rules = self.external_rules(external);
            objects.chains.insert(self.chain("external"), rules);
        }
        if let Some(networks) = &self.firewall {
            let allowed = networks.iter().map(|net| Rule::ReturnFrom(*net));
            let rules = allowed.chain(std::iter::once(Rule::Drop)).collect();
            objects.chains.insert(self.chain("firewall"), rules);
        }
        for (map, destination, way) in &self.entries {
            let verdict = self.verdict(*way);
            objects.entries.insert((*map, *destination), verdict);
        }
        objects
    }
}

/// The clients that may use the load balancer's addresses of a family; `None` allows all.
fn firewall(input: &Input<'_>, family: Family) -> Option<Vec<IpNet>> {
    let of_family = |address: &IpAddr| Family::of(*address) == family;
    let sources = input.service.sources.as_ref()?;
    let balancers = input
        .service
        .balancer_addresses
        .iter()
        .filter(|a| of_family(a));
    let balancers: Vec<IpAddr> = balancers.copied().collect();
    let networks = sources.networks.iter();
    let mut networks: Vec<IpNet> = networks
        .filter(|net| of_family(&net.network()))
        .copied()
        .collect();
    if balancers.is_empty() || (networks.is_empty() && !sources.has_invalid) {
        return None;
    }
    // A request of this node to a balancer's address that the node has itself comes from this address.
    let mut own = input.node.addresses.iter();
    if own.any(|address| networks.iter().any(|net| net.contains(address))) {
        networks.extend(balancers.into_iter().map(IpNet::from));
    }
    Some(networks)
}
