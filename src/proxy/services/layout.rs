//! The tables without services: sets, maps and chains that all services share, and the names and types of all objects.
//!
//! ```text
//! prerouting, output   -> services: clients from outside are marked; vmap @services; vmap @node-ports
//! firewall-…           -> vmap @firewall, before translation
//! input, forward, …    -> new connections that were not translated: vmap @no-endpoints, unused ports and addresses
//! postrouting          -> marked connections and those of an endpoint to itself get another source
//! ```

use std::net::IpAddr;

use holdfast_core::network::Family;
use holdfast_core::services::{AddressSet, Map, NodeFacts, Rule, Target};
use holdfast_net::netlink::{Attributes, Message};
use holdfast_net::nft::element::Element;
use holdfast_net::nft::expression::{Field, field_is, for_this_host, has_bits, in_set, status};
use holdfast_net::nft::set::{Expiry, Kind, Set};
use holdfast_net::nft::statement::{
    self, Change, Mark, Reject, change_set, goto, jump, masquerade_fully_random, redirect,
    redirect_by_map, reject, verdict, verdict_of_map,
};
use holdfast_net::nft::value::{Data, IpVersion, Type, Unfit, Value, network};
use holdfast_net::nft::verdict::Verdict;
use holdfast_net::nft::{Hook, OwnerMark, Table};
use ipnet::IpNet;

use super::{OpenError, Settings};

/// The chain that rejects packets.
pub(super) const REJECT: &str = "reject";
/// The chain that marks connections of outside clients.
const MARK: &str = "mark";
/// The chain that translates.
const SERVICES: &str = "services";
/// The chain that checks untranslated connections to node ports.
const NODE_PORTS_CHECK: &str = "node-ports-check";
/// The chain that checks untranslated connections to services.
const SERVICES_CHECK: &str = "services-check";

/// The number of maps with targets, and of maps with chains of targets. With each new element the kernel visits all rules that use
/// the map, and with each new rule all elements of the map; and it finds a map by its name in a list. One map for all services, or
/// one for each of 10,000, takes seconds to fill.
pub(super) const SHARDS: u32 = 128;

/// A bit of `Field::ConnectionState`: the packet is the first one of its connection (`NF_CT_STATE_BIT(IP_CT_NEW)`).
const NEW: u32 = 8;
/// `RTN_LOCAL`.
const LOCAL: u32 = 2;

/// The base chains: name, kind, hook, priority (`nftablesBaseChains` in `pkg/proxy/nftables/proxier.go`).
pub(super) const BASE_CHAINS: [(&str, &str, u32, i32); 8] = [
    ("firewall-prerouting", "filter", 0, -110),
    ("firewall-output", "filter", 3, -110),
    ("filter-input", "filter", 1, 0),
    ("filter-forward", "filter", 2, 0),
    ("filter-output", "filter", 3, 0),
    ("nat-prerouting", "nat", 0, -100),
    ("nat-output", "nat", 3, -100),
    ("nat-postrouting", "nat", 4, 100),
];

/// The names, types and settings of the tables.
pub(super) struct Layout {
    settings: Settings,
    name: &'static str,
}

/// The version of a family's addresses.
pub(super) fn version(family: Family) -> IpVersion {
    match family {
        Family::V4 => IpVersion::V4,
        Family::V6 => IpVersion::V6,
    }
}

fn of_family(networks: &[IpNet], family: Family) -> Vec<IpNet> {
    let all = networks.iter().copied();
    let mut of_family: Vec<IpNet> = all
        .filter(|net| Family::of(net.network()) == family)
        .map(|net| net.trunc())
        .collect();
    // Intervals of a set must not overlap.
    of_family.sort();
    of_family.dedup();
    IpNet::aggregate(&of_family)
}

/// Matches the first packets of connections.
fn new() -> Vec<Attributes> {
    has_bits(Field::ConnectionState, NEW, true)
}

/// A rule with one more expression.
fn then(mut rule: Vec<Attributes>, last: Attributes) -> Vec<Attributes> {
    rule.push(last);
    rule
}

/// A rule of the shared chains with its comment, which audits compare.
pub(super) type Shared = (&'static str, Vec<Attributes>, &'static str);

impl Layout {
    /// # Errors
    ///
    /// A setting is invalid.
    pub(super) fn new(settings: Settings) -> Result<Layout, OpenError> {
        let name = settings.table.as_str();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let begins = name.starts_with(|c: char| c.is_ascii_alphabetic());
        if !begins || !name.chars().all(is_plain) || name.len() > 100 || name == "kube-proxy" {
            return Err(OpenError::Invalid {
                field: "--table",
                value: settings.table,
                reason: "not a name of letters, digits, \"-\", \"_\" and \".\" that begins with a letter, of at most 100 bytes and other than kube-proxy's; use \"holdfast\"",
            });
        }
        if settings.masquerade_bit > 31 {
            return Err(OpenError::Invalid {
                field: "masqueradeBit",
                value: settings.masquerade_bit.to_string(),
                reason: "not a number from 0 to 31; use 14",
            });
        }
        // A table's name lives as long as the process, which opens its table once.
        let name = String::leak(settings.table.clone());
        Ok(Layout { settings, name })
    }

    pub(super) fn name(&self) -> &str {
        self.name
    }

    pub(super) fn families(&self) -> &[Family] {
        &self.settings.families
    }

    pub(super) fn table(&self, family: Family) -> Table {
        super::table(self.name, family)
    }

    /// The bit by which connections are marked that get another source.
    fn mark(&self) -> u32 {
        1_u32.checked_shl(self.settings.masquerade_bit).unwrap_or(0)
    }

    // Sets.

    /// A map of destinations with addresses.
    pub(super) fn map(family: Family, map: Map) -> Set {
        let name = match map {
            Map::Services => "services",
            Map::NoEndpoints => "no-endpoints",
            Map::Firewall => "firewall",
        };
        let key = [version(family).address(), Type::Protocol, Type::Port];
        Set::new(name, &key, Kind::VerdictMap)
    }

    /// A map of node ports.
    pub(super) fn node_port_map(map: Map) -> Set {
        let name = match map {
            Map::Services => "node-ports",
            Map::NoEndpoints | Map::Firewall => "no-endpoint-node-ports",
        };
        Set::new(name, &[Type::Protocol, Type::Port], Kind::VerdictMap)
    }

    /// The number of the map that has the targets of a pool. The two pools of a port are in one map.
    pub(super) fn shard(pool: u32) -> u32 {
        (pool / 2) % SHARDS
    }

    /// A map of targets by pool and place. `nft` displays both as marks, because other numbers have no size.
    pub(super) fn targets(family: Family, shard: u32) -> Set {
        let data = vec![version(family).address(), Type::Port];
        let name = format!("endpoints-{shard}");
        Set::new(&name, &[Type::Mark, Type::Mark], Kind::Map(data))
    }

    /// A map of the chains of targets by pool and place.
    pub(super) fn choices(shard: u32) -> Set {
        let name = format!("endpoint-chains-{shard}");
        Set::new(&name, &[Type::Mark, Type::Mark], Kind::VerdictMap)
    }

    /// A set of addresses that services share. Hairpin connections are a pair of equal addresses.
    pub(super) fn addresses(family: Family, set: AddressSet) -> Set {
        let address = version(family).address();
        match set {
            AddressSet::ClusterAddresses => Set::new("cluster-addresses", &[address], Kind::Set),
            AddressSet::Hairpin => Set::new("hairpin", &[address, address], Kind::Set),
        }
    }

    /// The key of an address in such a set.
    pub(super) fn address_key(set: AddressSet, address: IpAddr) -> Vec<Value> {
        match set {
            AddressSet::ClusterAddresses => vec![Value::Address(address)],
            AddressSet::Hairpin => vec![Value::Address(address), Value::Address(address)],
        }
    }

    /// The clients of a target. When the set is full, further clients get a random target with each connection.
    pub(super) fn affinity(family: Family, name: &str) -> Set {
        Set {
            expiry: Expiry::PerElement,
            is_dynamic: true,
            size: Some(65_535),
            ..Set::new(name, &[version(family).address()], Kind::Set)
        }
    }

    fn networks(family: Family, name: &str) -> Set {
        Set {
            has_intervals: true,
            ..Set::new(name, &[version(family).address()], Kind::Set)
        }
    }

    /// The sets of networks, with their elements. An empty setting has no set, because no rule uses it.
    pub(super) fn network_sets(
        &self,
        family: Family,
        node: &NodeFacts,
    ) -> Vec<(Set, Vec<Element>)> {
        let settings = &self.settings;
        let mut node_ports = of_family(&settings.node_port_addresses, family);
        if settings.node_port_addresses.is_empty() {
            let own = node.addresses.iter().copied().map(IpNet::from);
            node_ports = of_family(&own.collect::<Vec<_>>(), family);
        }
        let sets = [
            (
                "cluster-networks",
                of_family(&settings.cluster_cidrs, family),
                false,
            ),
            (
                "service-networks",
                of_family(&settings.service_cidrs, family),
                false,
            ),
            ("node-port-networks", node_ports, true),
        ];
        let used = sets
            .into_iter()
            .filter(|(_, nets, always)| *always || !nets.is_empty());
        used.map(|(name, nets, _)| {
            let elements = nets.into_iter().map(|net| {
                let (first, last) = network(net);
                Element::interval(vec![first], vec![last], Data::None)
            });
            (Self::networks(family, name), elements.collect())
        })
        .collect()
    }

    // Rules.

    /// Matches clients in the cluster's networks, or others.
    fn from_cluster(family: Family, is_inside: bool) -> Vec<Attributes> {
        let source = [Field::Source(version(family))];
        in_set(
            &source,
            &Self::networks(family, "cluster-networks"),
            is_inside,
        )
    }

    /// Matches packets to cluster addresses of services.
    fn to_cluster_address(family: Family) -> Vec<Attributes> {
        let cluster = Self::addresses(family, AddressSet::ClusterAddresses);
        in_set(&[Field::Destination(version(family))], &cluster, true)
    }

    /// Gives packets the verdict of a map of destinations.
    fn dispatch(family: Family, map: Map) -> Vec<Attributes> {
        let key = [
            Field::Destination(version(family)),
            Field::Protocol,
            Field::DestinationPort,
        ];
        verdict_of_map(&key, &Self::map(family, map))
    }

    /// Gives packets to addresses with node ports the verdict of a map. Loopback addresses have no node ports: translated packets
    /// from them cannot leave the node.
    fn dispatch_node_port(family: Family, map: Map) -> Vec<Attributes> {
        let to = [Field::Destination(version(family))];
        let mut rule = in_set(&to, &Self::networks(family, "node-port-networks"), true);
        rule.extend(for_this_host());
        let loopback: IpNet = match family {
            Family::V4 => ipnet::Ipv4Net::new_assert([127, 0, 0, 0].into(), 8).into(),
            Family::V6 => ipnet::Ipv6Net::new_assert(std::net::Ipv6Addr::LOCALHOST, 128).into(),
        };
        rule.extend(holdfast_net::nft::expression::address_is(
            false, loopback, false,
        ));
        let key = [Field::Protocol, Field::DestinationPort];
        rule.extend(verdict_of_map(&key, &Self::node_port_map(map)));
        rule
    }

    /// The rules of the shared chains, in their order.
    pub(super) fn shared_rules(&self, family: Family) -> Vec<Shared> {
        // The ICMP code "port unreachable", which a table of one family needs.
        let unreachable = match family {
            Family::V4 => 3,
            Family::V6 => 4,
        };
        let mark = Mark::Packet.change(self.mark(), self.mark());
        let mut rules: Vec<Shared> = vec![
            (MARK, mark, "masquerade later"),
            (REJECT, vec![reject(Reject::Code(unreachable))], "reject"),
        ];
        rules.extend(self.check_rules(family));
        rules.extend(self.translation_rules(family));
        rules.extend(self.source_rules(family));
        rules
    }

    /// Rules for new connections that were not translated, and for those whose clients are checked.
    fn check_rules(&self, family: Family) -> Vec<Shared> {
        let mut rules: Vec<Shared> = vec![];
        for chain in ["firewall-prerouting", "firewall-output"] {
            let rule = [new(), Self::dispatch(family, Map::Firewall)].concat();
            rules.push((chain, rule, "load balancers with source ranges"));
        }
        let checks = [
            (
                "filter-input",
                NODE_PORTS_CHECK,
                "node ports without endpoints",
            ),
            ("filter-input", SERVICES_CHECK, "services without endpoints"),
            (
                "filter-forward",
                SERVICES_CHECK,
                "services without endpoints",
            ),
            (
                "filter-output",
                SERVICES_CHECK,
                "services without endpoints",
            ),
        ];
        rules.extend(checks.map(|(chain, to, why)| (chain, then(new(), jump(to)), why)));
        for chain in ["filter-forward", "filter-output"] {
            let known = [new(), Self::to_cluster_address(family)].concat();
            rules.push((chain, then(known, goto(REJECT)), "unused ports of services"));
            if !of_family(&self.settings.service_cidrs, family).is_empty() {
                let to = [Field::Destination(version(family))];
                let unused = in_set(&to, &Self::networks(family, "service-networks"), true);
                // Addresses of this node, such as that of the DNS, are used without a service.
                let elsewhere = field_is(Field::DestinationType, &LOCAL.to_ne_bytes(), false);
                let unused = [new(), unused, elsewhere].concat();
                let rule = then(unused, verdict(&Verdict::Drop));
                rules.push((chain, rule, "unused service addresses"));
            }
        }
        let services = Self::dispatch(family, Map::NoEndpoints);
        rules.push((SERVICES_CHECK, services, "no endpoints"));
        let node_ports = Self::dispatch_node_port(family, Map::NoEndpoints);
        rules.push((NODE_PORTS_CHECK, node_ports, "no endpoints"));
        rules
    }

    fn translation_rules(&self, family: Family) -> Vec<Shared> {
        let base = ["nat-prerouting", "nat-output"];
        let mut rules: Vec<Shared> = base
            .map(|c| (c, vec![jump(SERVICES)], "translate"))
            .to_vec();
        let to_cluster = Self::to_cluster_address(family);
        if self.settings.masquerade_all {
            let rule = then(to_cluster, jump(MARK));
            rules.push((SERVICES, rule, "masquerade all"));
        } else if !of_family(&self.settings.cluster_cidrs, family).is_empty() {
            // The endpoint may be on another node, which must answer to this one.
            let rule = [Self::from_cluster(family, false), to_cluster].concat();
            let rule = then(rule, jump(MARK));
            rules.push((SERVICES, rule, "masquerade outside clients"));
        }
        let services = Self::dispatch(family, Map::Services);
        rules.push((SERVICES, services, "services"));
        let node_ports = Self::dispatch_node_port(family, Map::Services);
        rules.push((SERVICES, node_ports, "node ports"));
        rules
    }

    /// Rules that give connections another source.
    fn source_rules(&self, family: Family) -> [Shared; 2] {
        let marked = has_bits(Field::Mark, self.mark(), true);
        let marked = [marked, Mark::Packet.change(self.mark(), 0)].concat();
        let pair = [
            Field::Source(version(family)),
            Field::Destination(version(family)),
        ];
        let hairpin = Self::addresses(family, AddressSet::Hairpin);
        let translated = has_bits(Field::ConnectionStatus, status::DNAT, true);
        let own = [translated, in_set(&pair, &hairpin, true)].concat();
        let chain = "nat-postrouting";
        [
            (
                chain,
                then(marked, masquerade_fully_random()),
                "marked connections",
            ),
            (
                chain,
                then(own, masquerade_fully_random()),
                "endpoints to themselves",
            ),
        ]
    }

    /// The regular chains that services share.
    pub(super) const CHAINS: [&'static str; 5] =
        [MARK, REJECT, SERVICES, NODE_PORTS_CHECK, SERVICES_CHECK];

    /// Messages that replace the table of a family by one without services, with these sets.
    pub(super) fn create(&self, family: Family, node: &NodeFacts, shared: &[Set]) -> Vec<Message> {
        let table = self.table(family);
        let mut messages = table.destroy().to_vec();
        messages.push(table.create());
        for (set, elements) in self.network_sets(family, node) {
            messages.extend(known(table.create_set(&set)));
            messages.extend(
                known(table.add_elements(&set, &elements))
                    .into_iter()
                    .flatten(),
            );
        }
        messages.extend(shared.iter().filter_map(|set| known(table.create_set(set))));
        for (name, kind, hook, priority) in BASE_CHAINS {
            let hook = Hook {
                kind,
                hook,
                priority,
            };
            messages.push(table.hooked(name, hook));
        }
        messages.extend(Self::CHAINS.map(|name| table.chain(name)));
        for (chain, rule, comment) in self.shared_rules(family) {
            messages.push(table.append(chain, &rule, OwnerMark::Comment(comment)));
        }
        messages
    }

    /// The expressions of a service's rule.
    pub(super) fn expressions(&self, family: Family, rule: &Rule) -> Vec<Attributes> {
        let source = [Field::Source(version(family))];
        let place = |pool: u32, count: u32| {
            let random = Field::Random {
                modulus: count.max(1),
                offset: 0,
            };
            [Field::Constant(pool), random]
        };
        let from_node = || field_is(Field::SourceType, &LOCAL.to_ne_bytes(), true);
        match rule {
            Rule::ReturnFrom(net) => then(
                holdfast_net::nft::expression::address_is(true, *net, true),
                verdict(&Verdict::Return),
            ),
            Rule::Drop => vec![verdict(&Verdict::Drop)],
            Rule::Masquerade => vec![jump(MARK)],
            Rule::MasqueradeNode => then(from_node(), jump(MARK)),
            Rule::GotoFromCluster(chain) => then(Self::from_cluster(family, true), goto(chain)),
            Rule::GotoFromNode(chain) => then(from_node(), goto(chain)),
            Rule::Goto(chain) => vec![goto(chain)],
            Rule::Translate { pool, count } => redirect_by_map(
                &place(*pool, *count),
                &Self::targets(family, Self::shard(*pool)),
                statement::Target::AddressAndPort(version(family)),
            ),
            Rule::Choose { pool, count } => {
                let chains = Self::choices(Self::shard(*pool));
                verdict_of_map(&place(*pool, *count), &chains)
            }
            Rule::Known {
                affinity, chain, ..
            } => then(
                in_set(&source, &Self::affinity(family, affinity), true),
                goto(chain),
            ),
            Rule::Remember { affinity, seconds } => {
                let time = std::time::Duration::from_secs((*seconds).into());
                let set = Self::affinity(family, affinity);
                known(change_set(Change::Update, &set, &source, &[], Some(time)))
                    .unwrap_or_default()
            }
            Rule::TranslateTo(Target { address, port }) => redirect(*address, *port),
        }
    }
}

/// The result of an encoding that cannot fail: the layout has the types of every set, and the planner the family of every
/// address. A debug build stops at a mistake; a release build leaves the object out, and the audit reports it.
pub(super) fn known<T>(encoded: Result<T, Unfit>) -> Option<T> {
    if let Err(error) = &encoded {
        debug_assert!(false, "{error}");
        tracing::error!("an object of the services' table was left out: {error}");
    }
    encoded.ok()
}
