//! The addresses of this machine, as the kernel tells them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use futures::TryStreamExt as _;
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags};
use netlink_packet_route::route::RouteAttribute;
use rtnetlink::{Handle, RouteMessageBuilder};

/// An address, and the index of the interface that has it.
type Held = (u32, IpAddr);

/// What this machine has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Addresses {
    /// All addresses, in the kernel's order.
    held: Vec<Held>,
    /// The interfaces with a default route, by their indexes.
    default: Vec<u32>,
}

/// Reads them; none where the kernel does not say.
pub async fn read() -> Addresses {
    let Ok((connection, handle, _)) = rtnetlink::new_connection() else {
        return Addresses::default();
    };
    let task = tokio::spawn(connection);
    let found = query(&handle).await;
    task.abort();
    found.unwrap_or_default()
}

async fn query(handle: &Handle) -> Result<Addresses, rtnetlink::Error> {
    let queries = [
        RouteMessageBuilder::<Ipv4Addr>::new().build(),
        RouteMessageBuilder::<Ipv6Addr>::new().build(),
    ];
    let mut default = vec![];
    for query in queries {
        let mut routes = handle.route().get(query).execute();
        // A kernel without IPv6 has no such routes.
        while let Ok(Some(route)) = routes.try_next().await {
            if route.header.destination_prefix_length == 0 {
                default.extend(route.attributes.iter().find_map(|a| match a {
                    RouteAttribute::Oif(index) => Some(*index),
                    _ => None,
                }));
            }
        }
    }
    let messages: Vec<_> = handle.address().get().execute().try_collect().await?;
    let held = messages.iter().filter_map(|m| {
        // Such an address is not, or no longer, to be told to others.
        let passing = AddressHeaderFlags::Tentative
            | AddressHeaderFlags::Deprecated
            | AddressHeaderFlags::Dadfailed;
        if m.header.flags.intersects(passing) {
            return None;
        }
        let address = m.attributes.iter().find_map(|a| match a {
            AddressAttribute::Address(ip) => Some(*ip),
            _ => None,
        })?;
        // Of IPv6, the kernel calls temporary addresses secondary.
        let temporary = address.is_ipv6() && m.header.flags.contains(AddressHeaderFlags::Secondary);
        (!temporary).then_some((m.header.index, address))
    });
    Ok(Addresses {
        held: held.collect(),
        default,
    })
}

impl Addresses {
    /// Whether this machine has an address.
    #[must_use]
    pub fn has(&self, ip: IpAddr) -> bool {
        self.held.iter().any(|(_, held)| *held == ip)
    }

    /// The address to tell others: of an interface with a default route, else of any; of the preferred family, else of
    /// the other.
    #[must_use]
    pub fn preferred(&self, ipv6: bool) -> Option<IpAddr> {
        let is_global = |ip: &IpAddr| match ip {
            IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local(),
            IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
        };
        let usable = self.held.iter().filter(|(_, ip)| is_global(ip));
        let rank = |(index, ip): &&Held| (ip.is_ipv6() != ipv6, !self.default.contains(index));
        usable.min_by_key(rank).map(|(_, ip)| *ip)
    }
}

/// The address to tell others, an IPv4 one if there is one.
pub async fn default_address() -> Option<IpAddr> {
    read().await.preferred(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_routes_address_of_the_preferred_family_is_told() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        let of = |held: &[(u32, &str)], default: &[u32]| Addresses {
            held: held
                .iter()
                .map(|(index, text)| (*index, ip(text)))
                .collect(),
            default: default.to_vec(),
        };
        let both: &[(u32, &str)] = &[
            (1, "127.0.0.1"),
            (1, "::1"),
            (2, "192.0.2.2"),
            (3, "192.0.2.3"),
            (3, "fe80::3"),
            (3, "2001:db8::3"),
        ];
        let v6: &[(u32, &str)] = &[(1, "127.0.0.1"), (2, "fe80::2"), (2, "2001:db8::2")];
        for (held, default, ipv6, expected) in [
            (both, &[3][..], false, Some("192.0.2.3")),
            (both, &[3], true, Some("2001:db8::3")),
            (both, &[], false, Some("192.0.2.2")),
            (v6, &[2], false, Some("2001:db8::2")),
            (&both[..2], &[], false, None),
        ] {
            let found = of(held, default).preferred(ipv6);
            assert_eq!(found, expected.map(ip), "{held:?} {default:?} {ipv6}");
        }
        assert!(of(both, &[]).has(ip("2001:db8::3")) && !of(v6, &[]).has(ip("192.0.2.2")));
    }
}
