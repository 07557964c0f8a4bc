//! `bridge`: a veth pair between a container and a bridge of the host (CNI reference spec, chapter 5).
//!
//! `Config` says what is wanted; ADD makes it so in as few messages as the kernel allows, and takes its
//! veth and addresses back if it fails. VLANs and MAC spoof checks are refused until they are done.

use std::fs::File;
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Map;

use super::pair::{self, Wish, doing};
use crate::cni::{Args, Dns, Error, Interface, Route, Success, cni_args};
use crate::ipam::delegate;
use crate::net::link::{Link, parse_mac, random_mac};
use crate::net::netlink::Socket;
use crate::net::{netns, sysctl};
use crate::skel::{Call, Plugin};

/// The plugin.
pub struct Bridge;

struct Config<'a> {
    bridge: &'a str,
    is_gateway: bool,
    is_default_gateway: bool,
    force_address: bool,
    masquerade: bool,
    mtu: u32,
    hairpin: bool,
    promiscuous: bool,
    isolated: bool,
    dad: bool,
    leave_down: bool,
    mac: Option<[u8; 6]>,
    ipam: &'a str,
    dns: Dns,
}

impl<'a> Config<'a> {
    fn parse(call: &Call<'a>) -> Result<Config<'a>, Error> {
        let c = call.config;
        let bridge = c.text("bridge")?;
        let args: Args = cni_args(&call.args, &["MAC"])?;
        let mut mac = args.get("MAC").cloned().unwrap_or_default();
        for source in [c.object("args")?.object("cni")?.text("mac")?, c.object("runtimeConfig")?.text("mac")?] {
            if !source.is_empty() {
                source.clone_into(&mut mac);
            }
        }
        for later in ["vlan", "vlanTrunk", "macspoofchk"] {
            if c.get(later).is_some_and(|v| *v != false && *v != 0 && v.as_array().is_none_or(|a| !a.is_empty())) {
                return Err(Error::new(
                    2,
                    format!("the option {later:?} is not supported by this version of the bridge plugin; leave it out or use the reference plugin"),
                ));
            }
        }
        let config = Config {
            bridge: if bridge.is_empty() { "cni0" } else { bridge },
            is_default_gateway: c.flag("isDefaultGateway")?,
            is_gateway: c.flag("isGateway")? || c.flag("isDefaultGateway")?,
            force_address: c.flag("forceAddress")?,
            masquerade: pair::masquerades(c)?,
            mtu: u32::try_from(c.number("mtu", 0, 0..=65535)?).unwrap_or(0),
            hairpin: c.flag("hairpinMode")?,
            promiscuous: c.flag("promiscMode")?,
            isolated: c.flag("portIsolation")?,
            dad: c.flag("enabledad")?,
            leave_down: c.flag("disableContainerInterface")?,
            mac: if mac.is_empty() {
                None
            } else {
                Some(parse_mac(&mac).ok_or_else(|| Error::config(format!("invalid MAC address {mac:?}: expected six hexadecimal bytes")))?)
            },
            ipam: c.object("ipam")?.text("type")?,
            dns: Dns::parse(c.object("dns")?),
        };
        if config.bridge.len() > 15
            || config.bridge.contains(['/', ':'])
            || config.bridge.contains(char::is_whitespace)
            || config.bridge.starts_with('.')
        {
            return Err(Error::config(format!("invalid bridge name {:?}: at most 15 bytes, no slash, colon or white space", config.bridge)));
        }
        if config.hairpin && config.promiscuous {
            return Err(Error::config("cannot set hairpin mode and promiscuous mode at the same time"));
        }
        if config.leave_down && !config.ipam.is_empty() {
            return Err(Error::config("cannot use IPAM when DisableContainerInterface flag is set"));
        }
        Ok(config)
    }
}

/// The bridge, created if it is not there. Its MAC is set explicitly, which pins it.
fn ensure_bridge(socket: &mut Socket, config: &Config<'_>) -> Result<Link, Error> {
    let name = config.bridge;
    let find = |socket: &mut Socket| socket.link(name).map_err(doing(format!("the bridge {name:?} cannot be read")));
    let mut found = find(socket)?;
    if found.is_none() {
        let mac = random_mac().map_err(doing("no random MAC address"))?;
        match socket.add_bridge(name, mac, config.mtu) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(Error::doing(format!("could not add {name:?}"), error)),
            _ => {}
        }
        // Best effort: without IPv6 in the kernel there is nothing to protect.
        let _ = sysctl::write(&format!("ipv6/conf/{name}/accept_ra"), "0");
        found = find(socket)?;
    }
    let link = found.ok_or_else(|| Error::other(format!("the bridge {name:?} vanished while it was set up")))?;
    if link.kind != "bridge" {
        return Err(Error::other(format!("{name:?} already exists but is not a bridge")));
    }
    if !link.up {
        socket.set_up(link.index, true).map_err(doing(format!("the bridge {name:?} cannot be brought up")))?;
    }
    if config.promiscuous && !link.promiscuous {
        socket.set_promiscuous(link.index).map_err(doing("could not set promiscuous mode"))?;
    }
    Ok(link)
}

fn ensure_address(socket: &mut Socket, bridge: &Link, address: IpNet, force: bool) -> Result<(), Error> {
    let have = socket.addresses(bridge.index).map_err(doing("the bridge's addresses cannot be read"))?;
    if have.contains(&address) {
        return Ok(());
    }
    let conflict = |other: &&IpNet| match (other, address) {
        (IpNet::V4(_), IpNet::V4(_)) => true,
        (IpNet::V6(_), IpNet::V6(_)) => other.contains(&address.network()) || address.contains(&other.network()),
        _ => false,
    };
    for other in have.iter().filter(conflict) {
        if !force {
            return Err(Error::other(format!(
                "{:?} already has an IP address different from {address}; set \"forceAddress\" to replace it",
                bridge.name
            )));
        }
        socket.delete_address(bridge.index, *other).map_err(doing(format!("could not remove {other} from {:?}", bridge.name)))?;
    }
    match socket.add_address(bridge.index, address) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(Error::doing(format!("could not add {address} to {:?}", bridge.name), error))
        }
        _ => Ok(()),
    }
}

fn first_address(net: IpNet) -> Option<IpAddr> {
    net.trunc().hosts().next()
}

/// Completes what IPAM gave: interface, gateways, default routes.
fn complete(success: &mut Success, config: &Config<'_>) {
    for ip in &mut success.ips {
        ip.interface = Some(2);
        if ip.gateway.is_none() && config.is_gateway {
            ip.gateway = first_address(ip.address);
        }
    }
    if !config.is_default_gateway {
        return;
    }
    for v4 in [true, false] {
        let gateway = success.ips.iter().find(|i| i.address.addr().is_ipv4() == v4).and_then(|i| i.gateway);
        let default = success.routes.iter_mut().find(|r| r.destination.prefix_len() == 0 && r.destination.addr().is_ipv4() == v4);
        match (gateway, default) {
            (Some(gateway), Some(route)) => {
                route.gateway.get_or_insert(gateway);
            }
            (Some(gateway), None) => {
                let any: IpAddr = if v4 { [0u8; 4].into() } else { [0u8; 16].into() };
                success.routes.push(Route { destination: IpNet::new(any, 0).unwrap_or_default(), gateway: Some(gateway), extra: Map::new() });
            }
            _ => {}
        }
    }
}

impl Plugin for Bridge {
    fn name(&self) -> &'static str {
        "bridge"
    }

    fn add(&self, call: &Call<'_>) -> Result<Success, Error> {
        let config = Config::parse(call)?;
        let namespace = netns::require(&call.netns)?;
        let mut socket = Socket::route().map_err(doing("no netlink socket"))?;
        let bridge = ensure_bridge(&mut socket, &config)?;
        let made = pair::add(&mut socket, call, &namespace, Wish { mac: config.mac, mtu: config.mtu, master: Some(bridge.index) })?;
        let host_name = made[0].name.clone();
        let own = Interface { name: bridge.name.clone(), mac: bridge.mac.clone(), sandbox: String::new() };
        let [host, container] = made;
        let interfaces = [own, host, container];
        let result = attach(&mut socket, &config, call, &bridge, &namespace, interfaces);
        if result.is_err() {
            // The first error is the one to report; the runtime calls DEL for whatever is left.
            let _ = socket.delete_link(&host_name);
            if !config.ipam.is_empty() {
                let _ = delegate::forward(call, config.ipam, "DEL");
            }
        }
        result
    }

    fn del(&self, call: &Call<'_>) -> Result<(), Error> {
        pair::remove(call)
    }

    fn check(&self, call: &Call<'_>) -> Result<(), Error> {
        let config = Config::parse(call)?;
        if !config.ipam.is_empty() {
            delegate::forward(call, config.ipam, "CHECK")?;
        }
        let expected = call.previous()?.unwrap_or_default();
        let mut socket = Socket::route().map_err(doing("no netlink socket"))?;
        let bridge = socket.link(config.bridge).map_err(doing("the bridge cannot be read"))?.filter(|l| l.kind == "bridge");
        let bridge = bridge.ok_or_else(|| Error::other(format!("the bridge {:?} is missing", config.bridge)))?;
        let ports = expected.interfaces.iter().filter(|i| i.sandbox.is_empty() && i.name != config.bridge);
        let mut attached = false;
        for port in ports {
            attached |= socket.link(&port.name).map_err(doing("a port cannot be read"))?.is_some_and(|l| l.master == Some(bridge.index));
        }
        if !attached {
            return Err(Error::other(format!("no interface of prevResult is a port of the bridge {:?}", config.bridge)));
        }
        pair::check(call, &expected)?;
        if config.masquerade {
            pair::check_masquerade(call)?;
        }
        Ok(())
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        let config = Config::parse(call)?;
        let rules = pair::collect_masquerade(call, keep);
        let addresses = if config.ipam.is_empty() { Ok(()) } else { delegate::collect(call, config.ipam, keep) };
        rules.and(addresses)
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        let config = Config::parse(call)?;
        if config.ipam.is_empty() { Ok(()) } else { delegate::forward(call, config.ipam, "STATUS") }
    }
}

fn attach(
    socket: &mut Socket,
    config: &Config<'_>,
    call: &Call<'_>,
    bridge: &Link,
    namespace: &File,
    interfaces: [Interface; 3],
) -> Result<Success, Error> {
    let host_name = interfaces[1].name.clone();
    let _ = sysctl::write(&format!("ipv6/conf/{host_name}/accept_ra"), "0");
    if config.hairpin || config.isolated {
        let port = socket.link(&host_name).map_err(doing("the host interface cannot be read"))?;
        let port = port.ok_or_else(|| Error::other(format!("the interface {host_name:?} vanished")))?;
        socket.set_port(port.index, config.hairpin, config.isolated).map_err(doing(format!("failed to setup hairpin mode for {host_name:?}")))?;
    }
    let mut success = if config.ipam.is_empty() { Success::default() } else { delegate::add(call, config.ipam)? };
    success.interfaces = interfaces.to_vec();
    if !config.ipam.is_empty() && success.ips.is_empty() {
        return Err(Error::other("IPAM plugin returned missing IP config"));
    }
    complete(&mut success, config);
    if !config.leave_down {
        pair::configure(namespace, &call.ifname, &success, config.dad)?;
    }
    if config.is_gateway {
        for ip in &success.ips {
            let Some(gateway) = ip.gateway.and_then(|g| IpNet::new(g, ip.address.prefix_len()).ok()) else { continue };
            ensure_address(socket, bridge, gateway, config.force_address)?;
            pair::forward(gateway.addr())?;
        }
    }
    if config.masquerade && !success.ips.is_empty() {
        pair::masquerade(call, &success)?;
    }
    if !config.dns.fields.is_empty() {
        success.dns = config.dns.clone();
    }
    Ok(success)
}
