//! `bridge`: a veth pair between a container and a bridge of the host (CNI reference spec, chapter 5).
//!
//! `Config` says what is wanted; ADD makes it so in as few messages as the kernel allows, and takes its
//! veth and addresses back if it fails. VLANs and MAC spoof checks are refused until they are done.

use std::fs::File;
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Map;

use crate::cni::{Args, Dns, Error, Interface, Route, Success, cni_args};
use crate::ipam::delegate;
use crate::net::link::{Link, VethPlan, parse_mac, random_mac};
use crate::net::netlink::Socket;
use crate::net::{netns, nft, sysctl};
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
        let backend = c.text("ipMasqBackend")?;
        if !["", "nftables", "iptables"].contains(&backend) {
            return Err(Error::config(format!(
                "unknown ipMasqBackend {backend:?}: expected \"nftables\" or \"iptables\" (which is honoured through nftables)"
            )));
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
            masquerade: c.flag("ipMasq")?,
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

fn doing<E: std::fmt::Display>(what: impl std::fmt::Display) -> impl FnOnce(E) -> Error {
    move |error| Error::doing(what, error)
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

/// Addresses, up, routes: inside the container.
fn configure(namespace: &File, ifname: &str, success: &Success, dad: bool) -> Result<(), Error> {
    netns::inside(namespace, || {
        let mut socket = Socket::route().map_err(doing("no netlink socket in the container"))?;
        let link = socket.link(ifname).map_err(doing("the container's interface cannot be read"))?;
        let link = link.ok_or_else(|| Error::other(format!("the interface {ifname:?} vanished from the container")))?;
        // Best effort, as in the reference: neighbours learn the address at once.
        let _ = sysctl::write(&format!("ipv4/conf/{ifname}/arp_notify"), "1");
        if success.ips.iter().any(|i| i.address.addr().is_ipv6()) {
            for name in ["lo", ifname] {
                let _ = sysctl::ensure(&format!("ipv6/conf/{name}/disable_ipv6"), "0");
            }
            let _ = sysctl::write(&format!("ipv6/conf/{ifname}/accept_dad"), if dad { "1" } else { "0" });
            sysctl::write(&format!("ipv6/conf/{ifname}/keep_addr_on_down"), "1").map_err(doing("keep_addr_on_down cannot be set"))?;
        }
        for ip in &success.ips {
            socket.add_address(link.index, ip.address).map_err(doing(format!("failed to add IP addr {} to {ifname:?}", ip.address)))?;
        }
        socket.set_up(link.index, true).map_err(doing(format!("failed to set {ifname:?} UP")))?;
        for route in &success.routes {
            let v4 = route.destination.addr().is_ipv4();
            let gateway = route.gateway.or_else(|| success.ips.iter().find(|i| i.address.addr().is_ipv4() == v4).and_then(|i| i.gateway));
            let priority = route.extra.get("priority").and_then(serde_json::Value::as_u64).and_then(|p| u32::try_from(p).ok());
            socket
                .add_route(link.index, route.destination, gateway, priority)
                .map_err(doing(format!("failed to add route {} via {gateway:?} dev {ifname}", route.destination)))?;
        }
        Ok(())
    })
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
        let (host_name, interfaces) = add_pair(&mut socket, &config, call, &bridge, &namespace)?;
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
        let ipam = call.config.object("ipam").and_then(|i| i.text("type")).unwrap_or_default();
        let mut errors = Vec::new();
        if !ipam.is_empty() {
            errors.extend(delegate::forward(call, ipam, "DEL").err());
        }
        if call.config.flag("ipMasq").unwrap_or(false) {
            let comment = nft::comment(call.network()?, &call.container, &call.ifname);
            let key = comment.split(',').next().unwrap_or_default().to_owned();
            errors.extend(nft::remove(|c| c.starts_with(&key)).map_err(doing("masquerading cannot be removed")).err());
        }
        if !call.netns.is_empty()
            && let Some(namespace) = netns::open(&call.netns)?
        {
            errors.extend(
                netns::inside(&namespace, || {
                    Socket::route().and_then(|mut s| s.delete_link(&call.ifname)).map_err(doing("the interface cannot be removed"))
                })
                .err(),
            );
        }
        match errors.len() {
            0 => Ok(()),
            _ => Err(Error { message: errors.iter().map(|e| e.message.as_str()).collect::<Vec<_>>().join("; "), ..errors.swap_remove(0) }),
        }
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
        let namespace = netns::require(&call.netns)?;
        netns::inside(&namespace, || {
            let failed = "the container's interface cannot be read";
            let mut socket = Socket::route().map_err(doing(failed))?;
            let link = socket
                .link(&call.ifname)
                .map_err(doing(failed))?
                .ok_or_else(|| Error::other(format!("the interface {:?} is missing in the container", call.ifname)))?;
            let known = expected.interfaces.iter().find(|i| i.name == call.ifname && !i.sandbox.is_empty());
            if let Some(known) = known.filter(|k| !k.mac.is_empty() && !k.mac.eq_ignore_ascii_case(&link.mac)) {
                return Err(Error::other(format!("the interface {:?} has MAC {}, not {}", call.ifname, link.mac, known.mac)));
            }
            let addresses = socket.addresses(link.index).map_err(doing(failed))?;
            if let Some(missing) = expected.ips.iter().find(|i| {
                i.interface.is_none_or(|n| expected.interfaces.get(n).is_some_and(|i| i.name == call.ifname)) && !addresses.contains(&i.address)
            }) {
                return Err(Error::other(format!("the address {} is missing on {:?}", missing.address, call.ifname)));
            }
            let routes = socket.routes().map_err(doing("the container's routes cannot be read"))?;
            match expected.routes.iter().find(|r| !routes.iter().any(|(d, _)| *d == r.destination)) {
                Some(missing) => Err(Error::other(format!("the route to {} is missing", missing.destination))),
                None => Ok(()),
            }
        })?;
        let comment = nft::comment(call.network()?, &call.container, &call.ifname);
        if config.masquerade && !nft::has(&comment).map_err(doing("masquerading cannot be read"))? {
            return Err(Error::other("the masquerading rule is missing"));
        }
        Ok(())
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        let config = Config::parse(call)?;
        let network = call.network()?;
        let wanted: Vec<String> = keep.iter().map(|(id, ifname)| nft::comment(network, id, ifname)).collect();
        let own = nft::comment(network, "", "");
        let prefix = own.split('-').next().unwrap_or_default();
        let rules = nft::remove(|c| c.starts_with(prefix) && !wanted.iter().any(|w| w == c)).map_err(doing("masquerading cannot be removed"));
        let addresses = if config.ipam.is_empty() { Ok(()) } else { delegate::collect(call, config.ipam, keep) };
        rules.and(addresses)
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        let config = Config::parse(call)?;
        if config.ipam.is_empty() { Ok(()) } else { delegate::forward(call, config.ipam, "STATUS") }
    }
}

fn add_pair(socket: &mut Socket, config: &Config<'_>, call: &Call<'_>, bridge: &Link, namespace: &File) -> Result<(String, [Interface; 3]), Error> {
    let mac = |given: Option<[u8; 6]>| given.map_or_else(|| random_mac().map_err(doing("no random MAC address")), Ok);
    let (host_mac, peer_mac) = (mac(None)?, mac(config.mac)?);
    for _ in 0..10 {
        let mut suffix = [0; 4];
        crate::net::random(&mut suffix).map_err(doing("no random name"))?;
        let host_name = format!("veth{}", suffix.iter().map(|b| format!("{b:02x}")).collect::<String>());
        let plan = VethPlan { host_name: &host_name, host_mac, peer_name: &call.ifname, peer_mac, namespace, mtu: config.mtu, master: bridge.index };
        match socket.add_veth(&plan) {
            Ok(()) => {
                let text = |mac: [u8; 6]| crate::net::link::mac_text(&mac);
                let interfaces = [
                    Interface { name: bridge.name.clone(), mac: bridge.mac.clone(), sandbox: String::new() },
                    Interface { name: host_name.clone(), mac: text(host_mac), sandbox: String::new() },
                    Interface { name: call.ifname.clone(), mac: text(peer_mac), sandbox: call.netns.clone() },
                ];
                return Ok((host_name, interfaces));
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && socket.link(&host_name).is_ok_and(|l| l.is_some()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                return Err(Error::other(format!("container veth name ({:?}) peer provided ({host_name:?}) already exists", call.ifname)));
            }
            Err(error) => return Err(Error::doing("failed to make veth pair", error)),
        }
    }
    Err(Error::other("failed to make veth pair: no free name found in ten tries"))
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
        configure(namespace, &call.ifname, &success, config.dad)?;
    }
    if config.is_gateway {
        for ip in &success.ips {
            let Some(gateway) = ip.gateway.and_then(|g| IpNet::new(g, ip.address.prefix_len()).ok()) else { continue };
            ensure_address(socket, bridge, gateway, config.force_address)?;
            let forward = if gateway.addr().is_ipv4() { "ipv4/ip_forward" } else { "ipv6/conf/all/forwarding" };
            sysctl::ensure(forward, "1").map_err(doing("failed to enable forwarding"))?;
        }
    }
    if config.masquerade && !success.ips.is_empty() {
        let addresses: Vec<IpNet> = success.ips.iter().map(|i| i.address).collect();
        nft::add(&addresses, &nft::comment(call.network()?, &call.container, &call.ifname))
            .map_err(doing("masquerading cannot be set up in nftables"))?;
    }
    if !config.dns.fields.is_empty() {
        success.dns = config.dns.clone();
    }
    Ok(success)
}
