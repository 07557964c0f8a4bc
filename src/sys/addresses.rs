//! The addresses of this machine, read over rtnetlink.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use futures::TryStreamExt as _;
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags};
use netlink_packet_route::route::{RouteAttribute, RouteHeader, RouteMessage, RouteType};
use rtnetlink::{Handle, RouteMessageBuilder};

use super::failure::{HostError, doing};
use holdfast_core::node::addresses::MachineAddresses;

impl From<rtnetlink::Error> for HostError {
    fn from(error: rtnetlink::Error) -> HostError {
        HostError::failed(error.to_string())
    }
}

/// Reads all addresses and the interfaces of the default routes.
pub async fn read() -> Result<MachineAddresses, HostError> {
    const WHAT: &str = "reading the machine's addresses from the kernel failed";
    let (connection, handle, _) = rtnetlink::new_connection().map_err(doing(WHAT))?;
    let task = tokio::spawn(connection);
    let found = query(&handle).await;
    task.abort();
    found.map_err(doing(WHAT))
}

/// The interfaces of the default routes in the result of a query, in the kernel's order: lowest metric first.
async fn default_routes(handle: &Handle, query: RouteMessage) -> Vec<u32> {
    let mut found = vec![];
    let mut routes = handle.route().get(query).execute();
    // A kernel without IPv6 returns an error, and has no such routes.
    while let Ok(Some(route)) = routes.try_next().await {
        let header = &route.header;
        // Other tables apply to some packets only.
        if header.destination_prefix_length != 0
            || header.table != RouteHeader::RT_TABLE_MAIN
            || header.kind != RouteType::Unicast
        {
            continue;
        }
        for attribute in &route.attributes {
            match attribute {
                RouteAttribute::Oif(index) => found.push(*index),
                RouteAttribute::MultiPath(hops) => {
                    found.extend(hops.iter().map(|hop| hop.interface_index));
                }
                _ => {}
            }
        }
    }
    found
}

async fn query(handle: &Handle) -> Result<MachineAddresses, rtnetlink::Error> {
    let default_routes = [
        default_routes(handle, RouteMessageBuilder::<Ipv4Addr>::new().build()).await,
        default_routes(handle, RouteMessageBuilder::<Ipv6Addr>::new().build()).await,
    ];
    let messages: Vec<_> = handle.address().get().execute().try_collect().await?;
    let addresses = messages.iter().filter_map(|m| {
        // Such an address must not, or no longer, be published.
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
        // For IPv6, the kernel flags temporary addresses as secondary.
        let temporary = address.is_ipv6() && m.header.flags.contains(AddressHeaderFlags::Secondary);
        (!temporary).then_some((m.header.index, address))
    });
    Ok(MachineAddresses {
        addresses: addresses.collect(),
        default_routes,
    })
}

/// An address for a single-machine cluster: IPv4 if available.
pub async fn default_address() -> Option<IpAddr> {
    read().await.ok()?.any()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_machine_has_a_loopback_address() {
        let own = read().await.expect("addresses");
        assert_eq!(own.lacks(&[Ipv4Addr::LOCALHOST.into()]), None, "{own:?}");
    }
}
