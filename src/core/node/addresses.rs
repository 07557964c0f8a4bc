//! The addresses of a Node (kubelet spec, 12.3; kubelet's `nodestatus/setters.go`). Pure.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::NodeAddress;

/// Tells a cloud controller which addresses the administrator wants.
pub const PROVIDED: &str = "alpha.kubernetes.io/provided-node-ip";

/// What the addresses of a Node follow from.
#[derive(Debug, Clone, Copy)]
pub struct Sources<'a> {
    /// The node's name.
    pub name: &'a str,
    /// Addresses of this machine, the preferred one first.
    pub ips: &'a [String],
    /// Whether `--node-ip` named them.
    pub given: bool,
    /// Whether a cloud controller sets addresses (`--cloud-provider=external`).
    pub external: bool,
    /// What the Node object says now.
    pub reported: &'a [NodeAddress],
}

/// The addresses to report; none where those that are reported are not ours to change.
#[must_use]
pub fn addresses(sources: Sources<'_>) -> Option<Vec<NodeAddress>> {
    if sources.external && !sources.reported.is_empty() {
        return None;
    }
    let of = |kind: &str, address: &str| NodeAddress {
        type_: kind.into(),
        address: address.into(),
    };
    // Before the cloud controller has spoken, its own words are not guessed.
    let ips = if sources.external && !sources.given {
        &[]
    } else {
        sources.ips
    };
    let internal = ips.iter().map(|ip| of("InternalIP", ip));
    Some(internal.chain([of("Hostname", sources.name)]).collect())
}

/// Whether what was found takes the place of the addresses that are known. None found, as while a network is taken down
/// and up again, is no change.
#[must_use]
pub fn changed(known: &[String], found: &[String]) -> bool {
    !found.is_empty() && known != found
}

/// Why an address cannot be a node's, if it cannot. Whether this machine has it is another matter. The kubelet refuses
/// loopback addresses too; a cluster of one machine without a network has no other.
#[must_use]
pub fn objection(ip: IpAddr) -> Option<&'static str> {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    match ip {
        ip if ip.is_multicast() => Some("it is a multicast address"),
        _ if link_local => Some("it is a link-local address: it means nothing beyond its own link"),
        _ => None,
    }
}

/// Whether some addresses can be those of one node: one, or two of different families.
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
    fn a_cloud_controllers_addresses_are_left_alone() {
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
    fn a_network_that_comes_late_or_changes_is_seen_and_one_that_is_away_for_a_moment_is_not() {
        let of = |text: &str| text.split_whitespace().map(Into::into).collect::<Vec<_>>();
        for (known, found, expected) in [
            ("", "192.0.2.1", true),
            ("192.0.2.1", "192.0.2.2", true),
            ("192.0.2.1", "", false),
            ("192.0.2.1", "192.0.2.1", false),
            ("", "", false),
        ] {
            assert_eq!(
                changed(&of(known), &of(found)),
                expected,
                "{known:?} {found:?}"
            );
        }
    }

    #[test]
    fn addresses_that_cannot_be_a_nodes_are_refused() {
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
            assert_eq!(objection(ip(text)).is_none(), fine, "{text}");
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
