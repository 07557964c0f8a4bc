//! The routes from this node to the pods of other nodes: via the other node's address, if both are in one network (flannel's
//! `host-gw`, `pkg/controller/cloud`'s routes without a cloud), and else through a tunnel to that address. Pure.
//!
//! A Node's pod range and addresses are values of others. A range that contains an address of this machine, overlaps one of its
//! networks or is outside of the cluster's ranges gets no route: with it, another node would receive this machine's traffic.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;

/// What a route needs to know of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The node's name.
    pub name: String,
    /// The ranges of its pods.
    pub ranges: Vec<IpNet>,
    /// Its internal addresses, in the order of its status.
    pub addresses: Vec<IpAddr>,
}

impl Peer {
    /// Reads a Node. Malformed ranges and addresses are omitted.
    #[must_use]
    pub fn of(node: &Node) -> Peer {
        let addresses = node
            .status
            .iter()
            .flat_map(|s| s.addresses.iter().flatten());
        let internal = addresses.filter(|a| a.type_ == "InternalIP");
        Peer {
            name: node.metadata.name.clone().unwrap_or_default(),
            ranges: pod_ranges(node),
            addresses: internal.filter_map(|a| a.address.parse().ok()).collect(),
        }
    }
}

/// The pod ranges of a Node; malformed ones are omitted.
#[must_use]
pub fn pod_ranges(node: &Node) -> Vec<IpNet> {
    let spec = node.spec.as_ref();
    let several = spec
        .and_then(|s| s.pod_cidrs.as_deref())
        .unwrap_or_default();
    let one = spec.and_then(|s| s.pod_cidr.as_ref());
    let texts = several.iter().chain(one.filter(|_| several.is_empty()));
    texts
        .filter_map(|text| text.parse::<IpNet>().ok())
        .map(|range| range.trunc())
        .collect()
}

/// An address of this machine with its network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interface {
    /// The index of the link.
    pub link: u32,
    /// The address and the prefix of its network.
    pub address: IpNet,
}

/// How packets get to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hop {
    /// Via its address in a network of this machine.
    Near {
        /// The address.
        gateway: IpAddr,
        /// The index of the link to it.
        link: u32,
    },
    /// Encapsulated in packets to its address, which routers forward without knowing the pods' ranges.
    Tunnel {
        /// The address.
        remote: IpAddr,
        /// The source of packets of this machine itself: an address of its pods' range, so that the answer takes the tunnel, too.
        /// `None` if this machine has no such range.
        source: Option<IpAddr>,
    },
}

/// Why a range of a node has no route.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Unrouted {
    /// No internal address is that of another machine.
    #[error(
        "no route to the pods of node {node} ({range}): none of its addresses [{addresses}] can be another machine's; correct --node-ip of its agent"
    )]
    NoAddress {
        /// The node.
        node: String,
        /// The range of its pods.
        range: IpNet,
        /// The node's internal addresses.
        addresses: String,
    },
    /// The range is not one of the cluster's.
    #[error(
        "no route to the pods of node {node} ({range}): outside of the cluster's ranges [{cluster}]; correct spec.podCIDRs of the Node, or --cluster-cidr"
    )]
    Outside {
        /// The node.
        node: String,
        /// The range of its pods.
        range: IpNet,
        /// The cluster's ranges.
        cluster: String,
    },
    /// The range overlaps a network of this machine, its own pods' range, or another node's range.
    #[error(
        "no route to the pods of node {node} ({range}): overlaps {other}; delete the Node {node} and let it register again, which assigns another range"
    )]
    Overlaps {
        /// The node.
        node: String,
        /// The range of its pods.
        range: IpNet,
        /// What the range overlaps.
        other: String,
    },
}

/// The desired routes, and the ranges without one.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Desired {
    /// The next hop of each range.
    pub routes: BTreeMap<IpNet, Hop>,
    /// The ranges without a route, in the order of the nodes' names.
    pub unrouted: BTreeSet<Unrouted>,
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

fn is_v4(range: &IpNet) -> bool {
    matches!(range, IpNet::V4(_))
}

fn joined<T: ToString>(all: impl Iterator<Item = T>) -> String {
    all.map(|one| one.to_string())
        .collect::<Vec<_>>()
        .join(", ")
}

/// The addresses of a node, of either family, that can be another machine's. One in a range of pods would lead to a pod.
fn usable(peer: &Peer, interfaces: &[Interface], pods: &[&IpNet]) -> Vec<IpAddr> {
    let mut addresses = peer.addresses.clone();
    addresses.retain(|address| {
        let is_own = interfaces.iter().any(|i| i.address.addr() == *address);
        let is_special =
            address.is_loopback() || address.is_unspecified() || address.is_multicast();
        !is_own && !is_special && !pods.iter().any(|range| range.contains(address))
    });
    addresses
}

/// The way to a node's pods: via its first address of their family in a network of this machine, in the smallest such network,
/// where networks of one address lead nowhere; else through a tunnel to its first address.
fn hop(
    addresses: &[IpAddr],
    range: &IpNet,
    own: &[IpNet],
    interfaces: &[Interface],
) -> Option<Hop> {
    let same_family = addresses.iter().filter(|a| a.is_ipv4() == is_v4(range));
    let mut near = same_family.filter_map(|address| {
        let near = interfaces.iter().filter(|i| i.address.contains(address));
        let smallest = near.max_by_key(|i| i.address.prefix_len())?;
        Some(Hop::Near {
            gateway: *address,
            link: smallest.link,
        })
    });
    let tunnel = || {
        let source = own.iter().find(|other| is_v4(other) == is_v4(range));
        Some(Hop::Tunnel {
            remote: *addresses.first()?,
            source: source.map(IpNet::network),
        })
    };
    near.next().or_else(tunnel)
}

/// The routes of this node, `own`. `interfaces` are all addresses of this machine; `cluster` the ranges in which pods may be, or
/// empty if they are not known. If two nodes have overlapping ranges, the first one by name gets the route.
#[must_use]
pub fn desired(own: &str, peers: &[Peer], interfaces: &[Interface], cluster: &[IpNet]) -> Desired {
    let mut result = Desired::default();
    let own_ranges: Vec<IpNet> = peers
        .iter()
        .filter(|peer| peer.name == own)
        .flat_map(|peer| peer.ranges.iter().copied())
        .collect();
    let mut others: Vec<&Peer> = peers.iter().filter(|peer| peer.name != own).collect();
    others.sort_by(|a, b| a.name.cmp(&b.name));
    let mut owners: BTreeMap<IpNet, &str> = BTreeMap::new();
    for peer in others {
        for range in &peer.ranges {
            match route(peer, range, &own_ranges, interfaces, cluster, &owners) {
                Ok(hop) => {
                    owners.insert(*range, &peer.name);
                    result.routes.insert(*range, hop);
                }
                Err(why) => {
                    result.unrouted.insert(why);
                }
            }
        }
    }
    result
}

fn route(
    peer: &Peer,
    range: &IpNet,
    own: &[IpNet],
    interfaces: &[Interface],
    cluster: &[IpNet],
    owners: &BTreeMap<IpNet, &str>,
) -> Result<Hop, Unrouted> {
    if !cluster.is_empty() && !cluster.iter().any(|c| c.contains(range)) {
        return Err(Unrouted::Outside {
            node: peer.name.clone(),
            range: *range,
            cluster: joined(cluster.iter()),
        });
    }
    let mine = own.iter().find(|other| overlap(other, range));
    let mine = mine.map(|other| format!("{other}, the range of this node's pods"));
    let near = || {
        let found = interfaces
            .iter()
            .find(|i| overlap(&i.address.trunc(), range));
        found.map(|i| format!("{}, a network of this machine", i.address.trunc()))
    };
    let foreign = || {
        let found = nearest(owners, range);
        found.map(|(other, node)| format!("{other}, the range of node {node}"))
    };
    if let Some(other) = mine.or_else(near).or_else(foreign) {
        return Err(Unrouted::Overlaps {
            node: peer.name.clone(),
            range: *range,
            other,
        });
    }
    let pods: Vec<&IpNet> = cluster.iter().chain(own).chain([range]).collect();
    let addresses = usable(peer, interfaces, &pods);
    let found = hop(&addresses, range, own, interfaces);
    found.ok_or_else(|| Unrouted::NoAddress {
        node: peer.name.clone(),
        range: *range,
        addresses: joined(peer.addresses.iter()),
    })
}

/// A routed range that overlaps this one. Routed ranges do not overlap each other, and the map has their order by address, so only
/// the neighbours can.
fn nearest<'a>(owners: &BTreeMap<IpNet, &'a str>, range: &IpNet) -> Option<(IpNet, &'a str)> {
    let before = owners.range(..=*range).next_back();
    let after = owners.range(*range..).next();
    let found = before.into_iter().chain(after);
    found
        .map(|(other, node)| (*other, *node))
        .find(|(other, _)| overlap(other, range))
}

/// A change of the kernel's routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Delete a route of ours.
    Delete(IpNet, Hop),
    /// Add a route.
    Add(IpNet, Hop),
}

/// The changes from the routes that this program has installed to the desired ones. A route with another next hop is added before
/// the old one is deleted, so that the range always has a route.
#[must_use]
pub fn diff(installed: &[(IpNet, Hop)], desired: &BTreeMap<IpNet, Hop>) -> Vec<Change> {
    let mut kept = BTreeSet::new();
    let mut deleted = vec![];
    for (range, hop) in installed {
        // The second of two equal routes is superfluous, too.
        if desired.get(range) == Some(hop) && kept.insert(*range) {
            continue;
        }
        deleted.push(Change::Delete(*range, *hop));
    }
    let missing = desired.iter().filter(|(range, _)| !kept.contains(*range));
    missing
        .map(|(range, hop)| Change::Add(*range, *hop))
        .chain(deleted)
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().expect("a range")
    }

    fn peer(name: &str, ranges: &str, addresses: &str) -> Peer {
        let parts =
            |text: &str| -> Vec<String> { text.split_whitespace().map(str::to_owned).collect() };
        Peer {
            name: name.into(),
            ranges: parts(ranges).iter().map(|r| net(r)).collect(),
            addresses: parts(addresses)
                .iter()
                .map(|a| a.parse().expect("an address"))
                .collect(),
        }
    }

    fn interfaces(all: &[(u32, &str)]) -> Vec<Interface> {
        all.iter()
            .map(|(link, address)| Interface {
                link: *link,
                address: net(address),
            })
            .collect()
    }

    #[test]
    fn nodes_are_read_without_their_malformed_values() {
        let node = |spec| {
            let node = json!({"metadata": {"name": "n"}, "spec": spec, "status": {"addresses": [
                {"type": "Hostname", "address": "10.0.0.9"}, {"type": "InternalIP", "address": "10.0.0.1"},
                {"type": "ExternalIP", "address": "1.2.3.4"}, {"type": "InternalIP", "address": "no address"},
                {"type": "InternalIP", "address": "fd00::1"}]}});
            Peer::of(&serde_json::from_value(node).expect("a Node"))
        };
        for (spec, ranges) in [
            (json!({}), ""),
            (json!({"podCIDR": "10.1.0.0/24"}), "10.1.0.0/24"),
            (
                json!({"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24", "fd00:1::/64"]}),
                "10.1.0.0/24 fd00:1::/64",
            ),
            (
                json!({"podCIDR": "x", "podCIDRs": ["", "10.1.0.0", "10.1.0.0/33", "10.1.0.7/24"]}),
                "10.1.0.0/24",
            ),
        ] {
            assert_eq!(
                node(spec.clone()),
                peer("n", ranges, "10.0.0.1 fd00::1"),
                "{spec}"
            );
        }
    }

    /// The ranges of another node, its addresses, the cluster's ranges (`C` for those of [`CLUSTER`]), and the result.
    const CASES: &str = "
10.244.1.0/24 | 192.168.7.2 | C | 10.244.1.0/24 via 192.168.7.2 link 2
# Of two networks, the smaller one.
10.244.1.0/24 | 192.168.7.66 | C | 10.244.1.0/24 via 192.168.7.66 link 3
# The first address that is near.
10.244.1.0/24 | 10.9.9.9 192.168.7.3 192.168.7.2 | C | 10.244.1.0/24 via 192.168.7.3 link 2
10.244.1.0/24 fd00:244:0:1::/64 | 192.168.7.2 fd00:7::2 | C | 10.244.1.0/24 via 192.168.7.2 link 2; fd00:244:0:1::/64 via fd00:7::2 link 2
# Through a tunnel to the first address of another machine, of either family.
10.244.1.0/24 | fd00:7::2 | C | 10.244.1.0/24 to fd00:7::2 from 10.244.0.0
10.244.1.0/24 | 10.9.9.9 10.9.9.8 | C | 10.244.1.0/24 to 10.9.9.9 from 10.244.0.0
fd00:244:0:1::/64 | 127.0.0.1 192.168.7.1 224.0.0.1 0.0.0.0 10.9.9.8 | C | fd00:244:0:1::/64 to 10.9.9.8
10.244.1.0/24 | 10.244.1.7 10.244.9.9 | C | no address
10.99.1.0/24 | 10.99.1.7 10.244.0.7 | | no address
10.244.1.0/24 | | C | no address
# A node with this machine's own address.
10.244.1.0/24 | 192.168.7.1 | C | no address
10.244.1.0/24 | 127.0.0.1 | C | no address
10.244.1.0/24 | 172.16.0.1 | C | no address
| 192.168.7.2 | C |
# Another cluster's range is routed only if the cluster's ranges are unknown.
10.99.1.0/24 | 192.168.7.2 | C | outside
10.99.1.0/24 | 192.168.7.2 | | 10.99.1.0/24 via 192.168.7.2 link 2
0.0.0.0/0 | 192.168.7.2 | C | outside
0.0.0.0/0 | 192.168.7.2 | | overlaps 10.244.0.0/24, the range of this node's pods
10.244.0.0/24 | 192.168.7.2 | C | overlaps 10.244.0.0/24, the range of this node's pods
10.244.0.128/25 | 192.168.7.2 | C | overlaps 10.244.0.0/24, the range of this node's pods
192.168.0.0/16 | 192.168.7.2 | | overlaps 192.168.7.0/24, a network of this machine
192.168.7.2/32 | 192.168.7.2 | | overlaps 192.168.7.0/24, a network of this machine
127.1.0.0/16 | 192.168.7.2 | | overlaps 127.0.0.0/8, a network of this machine
::/0 | fd00:7::2 | | overlaps ::1/128, a network of this machine
";

    const CLUSTER: &str = "10.244.0.0/16 fd00:244::/48";

    #[test]
    fn ranges_are_routed_via_nodes_or_through_a_tunnel_and_never_take_this_machines_traffic() {
        let machine = interfaces(&[
            (1, "127.0.0.1/8"),
            (1, "::1/128"),
            (2, "192.168.7.1/24"),
            (3, "192.168.7.65/26"),
            (2, "fd00:7::1/64"),
            (4, "10.244.0.1/24"),
            (5, "172.16.0.1/32"),
        ]);
        let own = peer("me", "10.244.0.0/24", "192.168.7.1");
        let mut count = 0;
        for line in CASES.lines().filter(|l| l.contains('|')) {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let [ranges, addresses, cluster, expected] = cells[..] else {
                panic!("{line:?} has not four cells");
            };
            let cluster = if cluster == "C" { CLUSTER } else { cluster };
            let cluster: Vec<IpNet> = cluster.split_whitespace().map(net).collect();
            let peers = [own.clone(), peer("b", ranges, addresses)];
            let result = desired("me", &peers, &machine, &cluster);
            let routes = result.routes.iter();
            let routes = routes.map(|(range, hop)| match hop {
                Hop::Near { gateway, link } => format!("{range} via {gateway} link {link}"),
                Hop::Tunnel { remote, source } => {
                    let source = source.map_or(String::new(), |source| format!(" from {source}"));
                    format!("{range} to {remote}{source}")
                }
            });
            let unrouted = result.unrouted.iter().map(|why| match why {
                Unrouted::NoAddress { .. } => "no address".to_owned(),
                Unrouted::Outside { .. } => "outside".to_owned(),
                Unrouted::Overlaps { other, .. } => format!("overlaps {other}"),
            });
            let found: Vec<String> = routes.chain(unrouted).collect();
            assert_eq!(found.join("; "), expected, "{line}");
            count += 1;
        }
        assert_eq!(count, 24);
    }

    #[test]
    fn one_of_two_nodes_with_one_range_gets_the_route_in_any_order() {
        let machine = interfaces(&[(2, "192.168.7.1/24")]);
        let mut peers = vec![
            peer("b", "10.244.1.0/24", "192.168.7.2"),
            peer("c", "10.244.1.0/25", "192.168.7.3"),
            peer("d", "10.244.0.0/16", "192.168.7.4"),
            peer("e", "10.244.2.0/24", "192.168.7.5"),
        ];
        let first = desired("me", &peers, &machine, &[]);
        assert_eq!(first.routes.len(), 2);
        assert_eq!(first.unrouted.len(), 2);
        let text = joined(first.unrouted.iter());
        assert!(
            text.contains("10.244.1.0/24, the range of node b"),
            "{text}"
        );
        peers.reverse();
        assert_eq!(desired("me", &peers, &machine, &[]), first);
    }

    #[test]
    fn changes_leave_no_gap_and_remove_what_is_superfluous() {
        let hop = |last: u8| Hop::Near {
            gateway: IpAddr::from([192, 168, 7, last]),
            link: 2,
        };
        let (one, two) = (net("10.244.1.0/24"), net("10.244.2.0/24"));
        let wanted = BTreeMap::from([(one, hop(2))]);
        for (installed, expected) in [
            (vec![], vec![Change::Add(one, hop(2))]),
            (vec![(one, hop(2))], vec![]),
            (
                vec![(one, hop(2)), (one, hop(2))],
                vec![Change::Delete(one, hop(2))],
            ),
            (
                vec![(one, hop(3))],
                vec![Change::Add(one, hop(2)), Change::Delete(one, hop(3))],
            ),
            (
                vec![(two, hop(2)), (one, hop(2))],
                vec![Change::Delete(two, hop(2))],
            ),
        ] {
            assert_eq!(diff(&installed, &wanted), expected, "{installed:?}");
        }
        assert_eq!(
            diff(&[(one, hop(2))], &BTreeMap::new()),
            [Change::Delete(one, hop(2))]
        );
    }

    proptest! {
        /// No route contains an address of this machine or overlaps another route, whatever the Nodes say; and carrying out the
        /// changes leads to the desired routes.
        #[test]
        fn routes_are_disjoint_and_reached(
            nodes in proptest::collection::vec((0..6_u8, 0..4_u8, 16..32_u8, 0..=255_u8, 0..4_u8), 0..12),
            old in proptest::collection::vec((0..4_u8, 0..6_u8), 0..6),
        ) {
            let machine = interfaces(&[(2, "10.0.3.1/24"), (3, "192.168.7.1/24")]);
            let peers: Vec<Peer> = nodes.iter().map(|(name, third, prefix, fourth, host)| {
                let range = IpNet::new(IpAddr::from([10, 0, *third, *fourth]), *prefix).expect("a range").trunc();
                Peer { name: format!("n{name}"), ranges: vec![range], addresses: vec![IpAddr::from(if host % 3 == 0 { [203, 0, 113, *host] } else { [192, 168, 7, *host] })] }
            }).collect();
            let result = desired("n0", &peers, &machine, &[]);
            let all: Vec<_> = result.routes.iter().collect();
            for (at, (range, hop)) in all.iter().enumerate() {
                for interface in &machine {
                    prop_assert!(!overlap(range, &interface.address.trunc()));
                    let (Hop::Near { gateway: address, .. } | Hop::Tunnel { remote: address, .. }) = hop;
                    prop_assert!(*address != interface.address.addr());
                }
                for (other, _) in all.iter().skip(at + 1) {
                    prop_assert!(!overlap(range, other), "{} and {}", range, other);
                }
            }
            let others = peers.iter().filter(|peer| peer.name != "n0").flat_map(|peer| &peer.ranges).count();
            prop_assert!(result.routes.len() + result.unrouted.len() <= others);
            let mut kernel: Vec<(IpNet, Hop)> = old.iter().map(|(third, host)| {
                let hop = Hop::Near { gateway: IpAddr::from([192, 168, 7, *host]), link: 3 };
                (IpNet::new(IpAddr::from([10, 0, *third, 0]), 24).expect("a range"), hop)
            }).collect();
            for change in diff(&kernel, &result.routes) {
                match change {
                    Change::Add(range, hop) => kernel.push((range, hop)),
                    Change::Delete(range, hop) => {
                        let at = kernel.iter().position(|one| *one == (range, hop));
                        kernel.remove(at.expect("an installed route"));
                    }
                }
            }
            kernel.sort();
            let wanted: Vec<_> = result.routes.into_iter().collect();
            prop_assert_eq!(kernel, wanted);
        }
    }
}
