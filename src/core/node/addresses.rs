//! The addresses of a Node, by the rules of `pkg/kubelet/nodestatus/setters.go`. Pure.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::NodeAddress;

/// Annotation of the Node with the addresses that `--node-ip` requests from the cloud controller.
pub const PROVIDED: &str = "alpha.kubernetes.io/provided-node-ip";

/// The loopback interface's index in every network namespace.
const LOOPBACK: u32 = 1;

/// The addresses and default routes of this machine, from the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineAddresses {
    /// Interface indexes with their addresses.
    pub addresses: Vec<(u32, IpAddr)>,
    /// Interfaces of default routes, most preferred first: IPv4, then IPv6.
    pub default_routes: [Vec<u32>; 2],
}

/// Whether an address is valid beyond its own link: not loopback, link-local, multicast or unspecified.
fn is_global(ip: IpAddr) -> bool {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    !(link_local || ip.is_loopback() || ip.is_multicast() || ip.is_unspecified())
}

impl MachineAddresses {
    fn has(&self, ip: IpAddr) -> bool {
        self.addresses.iter().any(|(_, own)| *own == ip)
    }

    fn on(&self, interface: u32, ipv6: bool) -> Option<IpAddr> {
        let mut on = self
            .addresses
            .iter()
            .filter(|(index, _)| *index == interface);
        let found = on.find(|(_, ip)| ip.is_ipv6() == ipv6 && is_global(*ip));
        found.map(|(_, ip)| *ip)
    }

    /// The address of an interface with a default route of the same family; the preferred family is tried first. If
    /// that interface has only link-local addresses, as on some routers, a global address of the loopback interface is
    /// used.
    #[must_use]
    pub(crate) fn by_default_route(&self, ipv6: bool) -> Option<IpAddr> {
        [ipv6, !ipv6].into_iter().find_map(|ipv6| {
            let interfaces = self.default_routes[usize::from(ipv6)].iter();
            let mut tried = interfaces.flat_map(|index| [*index, LOOPBACK]);
            tried.find_map(|index| self.on(index, ipv6))
        })
    }

    /// Any global address, for a cluster that consists of this machine alone.
    #[must_use]
    pub fn any(&self) -> Option<IpAddr> {
        let any = || {
            self.addresses
                .iter()
                .map(|(_, ip)| *ip)
                .find(|ip| is_global(*ip))
        };
        self.by_default_route(false).or_else(any)
    }

    /// The address of a node without `--node-ip`. The first candidate is the node name, if it is an IP address. The
    /// next one is an address that the name resolves to and this machine has. The last one is the address by default
    /// route. Addresses of other interfaces, such as container bridges, are not candidates.
    #[must_use]
    pub fn of_node(&self, name: &str, resolved: &[IpAddr], ipv6: bool) -> Option<IpAddr> {
        let is_own = |ip: &IpAddr| is_global(*ip) && self.has(*ip);
        let own = || resolved.iter().copied().filter(is_own);
        let by_name = own()
            .find(|ip| ip.is_ipv6() == ipv6)
            .or_else(|| own().next());
        let literal = name.parse().ok();
        let by_route = || self.by_default_route(ipv6);
        literal.or(by_name).or_else(by_route)
    }

    /// The first of the given addresses that this machine does not have.
    #[must_use]
    pub fn lacks(&self, ips: &[IpAddr]) -> Option<IpAddr> {
        ips.iter().copied().find(|ip| !self.has(*ip))
    }
}

/// Inputs for the addresses of a Node.
#[derive(Debug, Clone, Copy)]
pub struct Sources<'a> {
    /// The node's name.
    pub name: &'a str,
    /// Addresses of this machine, most preferred first.
    pub ips: &'a [String],
    /// Whether `--node-ip` specified the addresses or their family.
    pub given: bool,
    /// Whether a cloud controller sets addresses (`--cloud-provider=external`).
    pub external: bool,
    /// Addresses currently in the Node's status.
    pub reported: &'a [NodeAddress],
}

/// The addresses to report. `None` leaves the reported addresses unchanged.
#[must_use]
pub fn addresses(sources: Sources<'_>) -> Option<Vec<NodeAddress>> {
    // If the network is not up yet, the reported addresses stay.
    let unknown = sources.ips.is_empty();
    if (sources.external || unknown) && !sources.reported.is_empty() {
        return None;
    }
    let of = |kind: &str, address: &str| NodeAddress {
        type_: kind.into(),
        address: address.into(),
    };
    // Until the cloud controller has set addresses, only the host name is reported, unless `--node-ip` is given.
    let ips = if sources.external && !sources.given {
        &[]
    } else {
        sources.ips
    };
    let internal = ips.iter().map(|ip| of("InternalIP", ip));
    Some(internal.chain([of("Hostname", sources.name)]).collect())
}

/// The host names and IP addresses of the node's serving certificate, each sorted
/// (`pkg/kubelet/certificate/kubelet.go`).
#[must_use]
pub fn certificate_names(reported: &[NodeAddress]) -> (Vec<String>, Vec<String>) {
    let (mut names, mut ips) = (BTreeSet::new(), BTreeSet::new());
    for NodeAddress { type_, address } in reported.iter().filter(|a| !a.address.is_empty()) {
        let ip: Option<IpAddr> = address.parse().ok();
        match (type_.as_str(), ip) {
            ("Hostname" | "InternalIP" | "ExternalIP", Some(ip)) => {
                ips.insert(ip.to_string());
            }
            ("Hostname", None) | ("InternalDNS" | "ExternalDNS", _) => {
                names.insert(address.clone());
            }
            _ => {}
        }
    }
    (names.into_iter().collect(), ips.into_iter().collect())
}

/// Source of the host IPs in the status of pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The addresses in the Node's status.
    Node(Vec<String>),
    /// The addresses of this machine, by `--node-ip` and the default routes.
    Machine,
    /// Unknown until the Node is available, because its addresses may differ from the machine's.
    Unknown,
}

/// Decides where the host IPs of pods come from. `node` has the addresses in the Node's status, if the Node is known.
/// With an external cloud provider those win, even if this machine does not have them.
#[must_use]
pub fn origin(external: bool, given: bool, node: Option<&[NodeAddress]>) -> Origin {
    match node {
        _ if !external => Origin::Machine,
        None if given => Origin::Machine,
        None => Origin::Unknown,
        Some(reported) => match of_host(reported).as_slice() {
            [] => Origin::Machine,
            ips => Origin::Node(ips.to_vec()),
        },
    }
}

/// The host IPs from a Node's addresses: the first internal address, or else the first external one, and the next
/// address of the other family.
fn of_host(reported: &[NodeAddress]) -> Vec<String> {
    let of = |kind: &'static str| {
        let those = reported.iter().filter(move |a| a.type_ == kind);
        those.filter_map(|a| a.address.parse::<IpAddr>().ok())
    };
    let mut all = of("InternalIP").chain(of("ExternalIP"));
    let Some(first) = all.next() else {
        return vec![];
    };
    let second = all.find(|ip| ip.is_ipv6() != first.is_ipv6());
    let both = std::iter::once(first).chain(second);
    both.map(|ip| ip.to_string()).collect()
}

/// Whether the found addresses replace the known ones. An empty result is no change: the network may be restarting.
#[must_use]
pub fn has_changed(known: &[String], found: &[String]) -> bool {
    !found.is_empty() && known != found
}

/// Why an address cannot be used for a node; `None` if it can. Whether this machine has the address is checked
/// elsewhere. Unlike the kubelet, loopback addresses are accepted, because a cluster of one machine without a network
/// has no other.
#[must_use]
pub fn invalid_reason(ip: IpAddr) -> Option<&'static str> {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    match ip {
        ip if ip.is_multicast() => Some("it is a multicast address"),
        _ if link_local => Some("it is a link-local address, which is valid only on its own link"),
        _ => None,
    }
}

/// Whether these addresses can belong to one node: one address, or two of different families.
#[must_use]
pub fn is_one_or_dual_stack(ips: &[IpAddr]) -> bool {
    match ips {
        [] | [_] => true,
        [a, b] => a.is_ipv4() != b.is_ipv4() && !a.is_unspecified() && !b.is_unspecified(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_lists_every_host_name_and_address() {
        let of = |all: &[(&str, &str)]| {
            let address = |(kind, address): &(&str, &str)| NodeAddress {
                type_: (*kind).into(),
                address: (*address).into(),
            };
            certificate_names(&all.iter().map(address).collect::<Vec<_>>())
        };
        let strings = |all: &[&str]| all.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        let all = [
            ("InternalIP", "2001:db8::1"),
            ("InternalIP", "192.0.2.1"),
            ("ExternalIP", "198.51.100.1"),
            ("ExternalIP", "192.0.2.1"),
            ("Hostname", "n"),
            ("InternalDNS", "n.internal"),
            ("ExternalDNS", "n.example.org"),
            ("InternalIP", "no address"),
            ("Hostname", ""),
        ];
        let names = strings(&["n", "n.example.org", "n.internal"]);
        let ips = strings(&["192.0.2.1", "198.51.100.1", "2001:db8::1"]);
        assert_eq!(of(&all), (names, ips));
        let name = [("Hostname", "192.0.2.7")];
        assert_eq!(of(&name), (vec![], strings(&["192.0.2.7"])));
    }

    #[test]
    fn addresses_of_a_cloud_controller_are_unchanged() {
        let ips = ["192.0.2.1".to_owned(), "2001:db8::1".to_owned()];
        let cloud = [NodeAddress {
            type_: "ExternalIP".into(),
            address: "198.51.100.1".into(),
        }];
        let cases: [(bool, bool, &[NodeAddress], Option<&[&str]>); 6] = [
            (false, false, &[], Some(&["192.0.2.1", "2001:db8::1", "n"])),
            (
                false,
                true,
                &cloud,
                Some(&["192.0.2.1", "2001:db8::1", "n"]),
            ),
            (true, false, &[], Some(&["n"])),
            (true, true, &[], Some(&["192.0.2.1", "2001:db8::1", "n"])),
            (true, true, &cloud, None),
            (true, false, &cloud, None),
        ];
        for (external, given, reported, expected) in cases {
            let found = addresses(Sources {
                name: "n",
                ips: &ips,
                given,
                external,
                reported,
            });
            let found: Option<Vec<&str>> = found
                .as_ref()
                .map(|all| all.iter().map(|a| a.address.as_str()).collect());
            assert_eq!(
                found.as_deref(),
                expected,
                "{external} {given} {reported:?}"
            );
        }
    }

    #[test]
    fn host_ips_are_the_addresses_that_a_cloud_controller_reports() {
        let of = |text: &str| -> Vec<NodeAddress> {
            let pairs = text.split_whitespace().filter_map(|p| p.split_once('='));
            let address = |(kind, address): (&str, &str)| NodeAddress {
                type_: kind.into(),
                address: address.into(),
            };
            pairs.map(address).collect()
        };
        let node_ips = |ips: &[&str]| Origin::Node(ips.iter().map(|ip| (*ip).into()).collect());
        let both = "Hostname=n ExternalIP=198.51.100.1 InternalIP=10.0.0.1 InternalIP=10.0.0.2 InternalIP=fd00::1";
        for (external, given, node, expected) in [
            (false, false, Some(both), Origin::Machine),
            (true, false, Some(both), node_ips(&["10.0.0.1", "fd00::1"])),
            (true, true, Some(both), node_ips(&["10.0.0.1", "fd00::1"])),
            (
                true,
                true,
                Some("ExternalIP=2001:db8::1"),
                node_ips(&["2001:db8::1"]),
            ),
            (
                true,
                true,
                Some("ExternalIP=2001:db8::1 InternalIP=10.0.0.1"),
                node_ips(&["10.0.0.1", "2001:db8::1"]),
            ),
            (
                true,
                false,
                Some("Hostname=n InternalDNS=n.a"),
                Origin::Machine,
            ),
            (true, false, None, Origin::Unknown),
            (true, true, None, Origin::Machine),
        ] {
            let reported = node.map(of);
            let found = origin(external, given, reported.as_deref());
            assert_eq!(found, expected, "{external} {given} {node:?}");
        }
    }

    /// Interface 1 is loopback, 2 a container bridge; 3 and 4 have external connectivity.
    const BRIDGE: &str = "1=127.0.0.1 1=::1 2=172.17.0.1 2=fe80::2";
    const UP: &str =
        "1=127.0.0.1 2=172.17.0.1 3=fe80::3 3=192.0.2.3 3=2001:db8::3 4=192.0.2.4 4=2001:db8::4";
    const V6: &str = "1=127.0.0.1 2=172.17.0.1 3=fe80::3 3=2001:db8::3";
    const ROUTER: &str = "1=127.0.0.1 1=198.51.100.1 2=172.17.0.1 3=169.254.0.3";

    /// Columns: addresses of the machine; default-route interfaces for IPv4 and IPv6; node name; addresses that the
    /// name resolves to; whether IPv6 is preferred; expected address.
    type Chosen = (
        &'static str,
        [&'static [u32]; 2],
        &'static str,
        &'static str,
        bool,
        &'static str,
    );
    const CHOSEN: [Chosen; 17] = [
        (UP, [&[3], &[3]], "n", "", false, "192.0.2.3"),
        (UP, [&[3], &[3]], "n", "", true, "2001:db8::3"),
        (UP, [&[4, 3], &[3]], "n", "", false, "192.0.2.4"),
        (UP, [&[], &[3]], "n", "", false, "2001:db8::3"),
        (UP, [&[3], &[]], "n", "", true, "192.0.2.3"),
        (UP, [&[], &[]], "n", "", false, ""),
        (V6, [&[], &[3]], "n", "", false, "2001:db8::3"),
        (V6, [&[3], &[3]], "n", "", false, "2001:db8::3"),
        (BRIDGE, [&[], &[]], "n", "", false, ""),
        (BRIDGE, [&[3], &[]], "n", "", false, ""),
        (ROUTER, [&[3], &[]], "n", "", false, "198.51.100.1"),
        (UP, [&[3], &[3]], "n", "192.0.2.4", false, "192.0.2.4"),
        (
            UP,
            [&[3], &[3]],
            "n",
            "2001:db8::4 192.0.2.4",
            false,
            "192.0.2.4",
        ),
        (UP, [&[3], &[3]], "n", "2001:db8::4", false, "2001:db8::4"),
        (
            UP,
            [&[3], &[3]],
            "n",
            "127.0.0.1 203.0.113.9",
            false,
            "192.0.2.3",
        ),
        (UP, [&[3], &[3]], "203.0.113.9", "", false, "203.0.113.9"),
        (BRIDGE, [&[], &[]], "n", "172.17.0.1", false, "172.17.0.1"),
    ];

    fn machine(addresses: &str, default_routes: [&[u32]; 2]) -> MachineAddresses {
        let addresses = addresses.split_whitespace().map(|pair| {
            let (index, ip) = pair.split_once('=').expect("a pair");
            let ip = ip.parse().expect("an address");
            (index.parse().expect("an index"), ip)
        });
        MachineAddresses {
            addresses: addresses.collect(),
            default_routes: default_routes.map(<[u32]>::to_vec),
        }
    }

    #[test]
    fn the_node_address_comes_from_its_name_or_default_route_and_never_from_a_bridge() {
        for (addresses, default_routes, name, resolved, ipv6, expected) in CHOSEN {
            let resolved = resolved.split_whitespace();
            let resolved: Vec<IpAddr> = resolved.map(|t| t.parse().expect("an address")).collect();
            let found = machine(addresses, default_routes).of_node(name, &resolved, ipv6);
            let found = found.map(|ip| ip.to_string()).unwrap_or_default();
            assert_eq!(
                found, expected,
                "{addresses} {default_routes:?} {name} {resolved:?} {ipv6}"
            );
        }
    }

    #[test]
    fn addresses_that_the_machine_lacks_are_reported() {
        let own = machine(UP, [&[], &[]]);
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        let (here, there) = (ip("192.0.2.4"), ip("2001:db8::9"));
        assert_eq!(own.lacks(&[here, ip("2001:db8::4")]), None);
        assert_eq!(own.lacks(&[here, there]), Some(there));
        assert_eq!(machine(BRIDGE, [&[], &[]]).any(), Some(ip("172.17.0.1")));
        assert_eq!(machine(ROUTER, [&[3], &[]]).any(), Some(ip("198.51.100.1")));
    }

    #[test]
    fn unknown_addresses_do_not_replace_reported_ones() {
        let reported = [NodeAddress {
            type_: "InternalIP".into(),
            address: "192.0.2.1".into(),
        }];
        let with = |reported| {
            addresses(Sources {
                name: "n",
                ips: &[],
                given: true,
                external: false,
                reported,
            })
        };
        assert_eq!(with(&reported), None);
        assert_eq!(with(&[]).map(|all| all.len()), Some(1), "only the name");
    }

    #[test]
    fn a_new_or_changed_address_counts_as_a_change_and_a_lost_one_does_not() {
        let of = |text: &str| text.split_whitespace().map(Into::into).collect::<Vec<_>>();
        for (known, found, expected) in [
            ("", "192.0.2.1", true),
            ("192.0.2.1", "192.0.2.2", true),
            ("192.0.2.1", "", false),
            ("192.0.2.1", "192.0.2.1", false),
            ("", "", false),
        ] {
            assert_eq!(
                has_changed(&of(known), &of(found)),
                expected,
                "{known:?} {found:?}"
            );
        }
    }

    #[test]
    fn invalid_node_addresses_are_rejected() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        for (text, fine) in [
            ("192.0.2.1", true),
            ("2001:db8::1", true),
            ("127.0.0.1", true),
            ("::1", true),
            ("169.254.1.1", false),
            ("fe80::1", false),
            ("224.0.0.1", false),
            ("ff02::1", false),
        ] {
            assert_eq!(invalid_reason(ip(text)).is_none(), fine, "{text}");
        }
        for (texts, fine) in [
            (vec!["192.0.2.1"], true),
            (vec!["192.0.2.1", "2001:db8::1"], true),
            (vec!["2001:db8::1", "192.0.2.1"], true),
            (vec!["192.0.2.1", "192.0.2.2"], false),
            (vec!["192.0.2.1", "::"], false),
            (vec!["192.0.2.1", "2001:db8::1", "192.0.2.2"], false),
        ] {
            let ips: Vec<IpAddr> = texts.iter().map(|t| ip(t)).collect();
            assert_eq!(is_one_or_dual_stack(&ips), fine, "{texts:?}");
        }
    }
}
