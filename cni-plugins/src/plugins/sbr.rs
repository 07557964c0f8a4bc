//! `sbr` (source-based routing): packets from an address of the container leave through the interface
//! that has the address (`plugins/meta/sbr/main.go` of containernetworking/plugins). Chained.

use std::net::IpAddr;

use ipnet::IpNet;

use super::interface::{self, doing};
use crate::cni::{Error, Success};
use crate::net::netns;
use crate::skel::{Call, Plugin};
use holdfast_net::netlink::Socket;
use holdfast_net::route::Route;

/// The plugin `sbr`.
pub struct Sbr;

/// The first routing table that this plugin uses; lower numbers are left to others.
const FIRST: u32 = 100;
const MAIN: u32 = 254;

struct Config {
    table: Option<u32>,
    gateways: Vec<IpAddr>,
    hints: bool,
}

impl Config {
    fn parse(call: &Call<'_>) -> Result<Config, Error> {
        let c = call.config;
        let table = c
            .get("table")
            .map(|_| c.number("table", 0, 1..=i64::from(u32::MAX)))
            .transpose()?;
        let gateway = |text: &String| {
            crate::cni::address(text)
                .ok_or_else(|| Error::config(format!("gateways: {text:?} is not an IP address")))
        };
        Ok(Config {
            table: table.and_then(|t| u32::try_from(t).ok()),
            gateways: c
                .texts("gateways")?
                .iter()
                .map(gateway)
                .collect::<Result<_, _>>()?,
            hints: c.flag("addSourceHints")?,
        })
    }
}

/// The addresses of the container's interface, with their gateways.
fn addresses(call: &Call<'_>, success: &Success) -> Vec<(IpNet, Option<IpAddr>)> {
    let ours = |n: usize| {
        success
            .interfaces
            .get(n)
            .is_some_and(|i| i.name == call.ifname && !i.sandbox.is_empty())
    };
    success
        .ips
        .iter()
        .filter(|ip| ip.interface.is_none_or(ours))
        .map(|ip| (ip.address, ip.gateway))
        .collect()
}

fn add_rule(socket: &mut Socket, address: IpAddr, table: u32) -> Result<(), Error> {
    socket
        .add_rule(address, table)
        .map_err(doing(format!("the rule for {address} cannot be added")))
}

fn divert(
    call: &Call<'_>,
    config: &Config,
    socket: &mut Socket,
    addresses: &[(IpNet, Option<IpAddr>)],
) -> Result<(), Error> {
    // A table with a configured number is filled by others: by IPAM's
    // routes with "table", or by a vrf (containernetworking/plugins#1046).
    if let Some(table) = config.table {
        return addresses
            .iter()
            .try_for_each(|(address, _)| add_rule(socket, address.addr(), table));
    }
    let failed = || doing("the container's routes cannot be read");
    let link = socket.link(&call.ifname).map_err(failed())?;
    let link = link.ok_or_else(|| {
        Error::other(format!(
            "the interface {:?} is missing in the container",
            call.ifname
        ))
    })?;
    let all = socket.routes().map_err(failed())?;
    let rules = socket.source_rules().map_err(failed())?;
    let mut used: Vec<u32> = all
        .iter()
        .map(|r| r.table)
        .chain(rules.iter().map(|(_, table)| *table))
        .collect();
    let ours: Vec<Route> = all
        .into_iter()
        .filter(|r| r.link == link.index && r.table == MAIN && !is_link_local(r.destination))
        .collect();
    for (net, own) in addresses {
        let address = net.addr();
        let free = (FIRST..)
            .find(|t| !used.contains(t))
            .ok_or_else(|| Error::other("no routing table is free"))?;
        used.push(free);
        let same = |other: &IpAddr| other.is_ipv4() == address.is_ipv4();
        let adapt = |route: &Route| Route {
            table: free,
            source: if config.hints {
                Some(address)
            } else {
                route.source
            },
            ..*route
        };
        // Routes on the link first: they must exist before routes through gateways.
        let mut copies: Vec<Route> = ours
            .iter()
            .filter(|r| same(&r.destination.addr()))
            .map(adapt)
            .collect();
        copies.sort_by_key(|r| r.gateway.is_some());
        if let Some(gateway) = config.gateways.iter().copied().find(same).or(*own) {
            let any: IpAddr = if address.is_ipv4() {
                [0u8; 4].into()
            } else {
                [0u8; 16].into()
            };
            let everything = IpNet::new(any, 0).map_err(doing("no network"))?;
            copies.retain(|r| r.destination.prefix_len() > 0);
            copies.push(adapt(&Route::new(link.index, everything, Some(gateway))));
        }
        for route in copies {
            let added = socket.add_route(&route);
            added.map_err(doing(format!(
                "the route to {} cannot be added to table {free}",
                route.destination
            )))?;
        }
        add_rule(socket, address, free)?;
    }
    clear_main(socket, config, link.index, addresses, &ours)
}

/// Removes all routes over the interface from the main table. With `addSourceHints`,
/// keeps the routes to the interface's own networks, with its addresses as source.
fn clear_main(
    socket: &mut Socket,
    config: &Config,
    link: u32,
    addresses: &[(IpNet, Option<IpAddr>)],
    ours: &[Route],
) -> Result<(), Error> {
    let hint = |r: &Route, net: &IpNet| {
        r.gateway.is_none() && r.destination == net.trunc() && r.source == Some(net.addr())
    };
    let hinted: Vec<IpNet> = addresses
        .iter()
        .map(|(net, _)| *net)
        .filter(|net| config.hints && net.prefix_len() < net.max_prefix_len())
        .collect();
    for net in &hinted {
        if !ours.iter().any(|r| hint(r, net)) {
            let route = Route {
                source: Some(net.addr()),
                ..Route::new(link, net.trunc(), None)
            };
            socket.add_route(&route).map_err(doing(format!(
                "the route to {} cannot be added to the main table",
                route.destination
            )))?;
        }
    }
    for route in ours
        .iter()
        .filter(|r| !hinted.iter().any(|net| hint(r, net)))
    {
        match socket.delete_route(route) {
            Err(error) if error.raw_os_error() != Some(nix::errno::Errno::ESRCH as i32) => {
                return Err(Error::doing(
                    format!(
                        "the route to {} cannot be removed from the main table",
                        route.destination
                    ),
                    error,
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

fn is_link_local(net: IpNet) -> bool {
    matches!(net.addr(), IpAddr::V6(a) if a.segments()[0] & 0xffc0 == 0xfe80 || a.is_multicast())
}

impl Plugin for Sbr {
    fn name(&self) -> &'static str {
        "sbr"
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let previous = call.chained("sbr")?;
        let config = Config::parse(call)?;
        let addresses = addresses(call, &previous);
        if addresses.is_empty() {
            return Err(Error::config(format!(
                "prevResult has no address for {:?}: list this plugin after one that provides addresses",
                call.ifname
            )));
        }
        interface::inside(call, |socket| divert(call, &config, socket, &addresses))?;
        Ok(previous)
    }

    /// The kernel removes the routes together with the interface, but not the rules.
    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        let Some(namespace) = (if call.netns.is_empty() {
            None
        } else {
            netns::open(&call.netns)?
        }) else {
            return Ok(());
        };
        let known: Vec<IpAddr> = call
            .previous()
            .ok()
            .flatten()
            .map(|p| addresses(call, &p))
            .unwrap_or_default()
            .into_iter()
            .map(|a| a.0.addr())
            .collect();
        netns::inside(&namespace, || {
            let failed = || doing("the container's rules cannot be removed");
            let mut socket = Socket::route().map_err(failed())?;
            let mut sources = known;
            if let Some(link) = socket.link(&call.ifname).map_err(failed())? {
                sources.extend(
                    socket
                        .addresses(link.index)
                        .map_err(failed())?
                        .iter()
                        .map(|a| a.addr()),
                );
            }
            for (source, table) in socket.source_rules().map_err(failed())? {
                if sources.contains(&source) {
                    socket.delete_rule(source, table).map_err(failed())?;
                }
            }
            Ok(())
        })
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        let previous = call.chained("sbr")?;
        let given = Config::parse(call)?.table;
        interface::inside(call, |socket| {
            let failed = || doing("the container's rules cannot be read");
            let (rules, routes) = (
                socket.source_rules().map_err(failed())?,
                socket.routes().map_err(failed())?,
            );
            for address in addresses(call, &previous).iter().map(|a| a.0.addr()) {
                // This plugin does not own the contents of a table with a configured number.
                let serves = |table: u32| {
                    given.map_or_else(|| routes.iter().any(|r| r.table == table), |g| g == table)
                };
                if !rules
                    .iter()
                    .any(|(s, table)| *s == address && serves(*table))
                {
                    return Err(Error::other(format!(
                        "the rule or the routing table for packets from {address} is missing"
                    )));
                }
            }
            Ok(())
        })
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        Config::parse(call).map(|_| ())
    }
}
