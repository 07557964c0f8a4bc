//! `bridge`: connects a container to a bridge of the host with a veth
//! pair (`plugins/main/bridge/bridge.go` of containernetworking/plugins).
//!
//! ADD applies `Config` with as few netlink messages as the kernel allows.
//! If ADD fails, it removes its veth pair and releases its addresses.

use std::fs::File;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use serde_json::{Map, Value};

use super::delegate;
use super::interface::{self, doing};
use super::pair::{self, PairConfig};
use crate::cni::{Args, Dns, Error, Interface, Json, Route, Success, cni_args};
use crate::net::netns;
use crate::net::spoof;
use crate::skel::{Call, Plugin};
use holdfast_net::link::{IFLA_BR_VLAN_FILTERING, Link, VethPlan, parse_mac, random_mac};
use holdfast_net::netlink::Socket;
use holdfast_net::nft::Nft;
use holdfast_net::sysctl;

/// Maximum time until a port whose two ends are up becomes operational.
const OPERATES_WITHIN: Duration = Duration::from_secs(5);

/// The plugin `bridge`.
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
    spoof_check: bool,
    vlan: u16,
    trunk: Vec<u16>,
    keep_default_vlan: bool,
    ipam: &'a str,
    dns: Dns,
}

impl<'a> Config<'a> {
    fn parse(call: &Call<'a>) -> Result<Config<'a>, Error> {
        let c = call.config;
        let bridge = c.text("bridge")?;
        let args: Args = cni_args(&call.args, &["MAC"])?;
        let mut mac = args.get("MAC").cloned().unwrap_or_default();
        for source in [
            c.object("args")?.object("cni")?.text("mac")?,
            c.object("runtimeConfig")?.text("mac")?,
        ] {
            if !source.is_empty() {
                source.clone_into(&mut mac);
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
                Some(parse_mac(&mac).ok_or_else(|| {
                    Error::config(format!(
                        "invalid MAC address {mac:?}: expected six hexadecimal bytes"
                    ))
                })?)
            },
            spoof_check: c.flag("macspoofchk")?,
            vlan: vid(c.number("vlan", 0, i64::MIN..=i64::MAX)?, 0, "vlan")?,
            trunk: trunk(c.list("vlanTrunk")?)?,
            keep_default_vlan: c.flag("preserveDefaultVlan")?,
            ipam: c.object("ipam")?.text("type")?,
            dns: Dns::parse(c.object("dns")?),
        };
        if config.bridge.len() > 15
            || config.bridge.contains(['/', ':'])
            || config.bridge.contains(char::is_whitespace)
            || config.bridge.starts_with('.')
        {
            return Err(Error::config(format!(
                "invalid bridge name {:?}: at most 15 bytes, no slash, colon or white space",
                config.bridge
            )));
        }
        if config.hairpin && config.promiscuous {
            return Err(Error::config(
                "cannot set hairpin mode and promiscuous mode at the same time",
            ));
        }
        if config.leave_down && !config.ipam.is_empty() {
            return Err(Error::config(
                "cannot use IPAM when DisableContainerInterface flag is set",
            ));
        }
        Ok(config)
    }
}

impl Config<'_> {
    fn has_vlans(&self) -> bool {
        self.vlan != 0 || !self.trunk.is_empty()
    }
}

fn vid(number: i64, least: i64, what: &str) -> Result<u16, Error> {
    let fits = u16::try_from(number)
        .ok()
        .filter(|_| (least..=4094).contains(&number));
    fits.ok_or_else(|| {
        Error::config(format!(
            "invalid VLAN ID {number} in {what:?} (must be between {least} and 4094)"
        ))
    })
}

/// The VLANs of a trunk, without duplicates.
fn trunk(list: &[Value]) -> Result<Vec<u16>, Error> {
    let mut found = std::collections::BTreeSet::new();
    for item in list.iter().map(Json) {
        let number = |key: &str| {
            item.get(key)
                .map(|_| {
                    item.number(key, 0, i64::MIN..=i64::MAX)
                        .and_then(|n| vid(n, 1, key))
                })
                .transpose()
        };
        let (low, high, id) = (number("minID")?, number("maxID")?, number("id")?);
        match (low, high) {
            (Some(low), Some(high)) if low > high => {
                return Err(Error::config(format!(
                    "minID {low} is greater than maxID {high} in \"vlanTrunk\""
                )));
            }
            (Some(low), Some(high)) => found.extend(low..=high),
            (None, None) if id.is_some() => {}
            (None, None) => {
                return Err(Error::config(
                    "an item of \"vlanTrunk\" must have \"id\", or \"minID\" and \"maxID\"",
                ));
            }
            (Some(_), None) => {
                return Err(Error::config(
                    "\"vlanTrunk\" has a \"minID\" without its \"maxID\"",
                ));
            }
            (None, Some(_)) => {
                return Err(Error::config(
                    "\"vlanTrunk\" has a \"maxID\" without its \"minID\"",
                ));
            }
        }
        found.extend(id);
    }
    Ok(found.into_iter().collect())
}

/// Sets the VLANs of a port. Removes all others, unless the default VLAN is to be kept.
fn set_vlans(socket: &mut Socket, config: &Config<'_>, port: u32) -> Result<(), Error> {
    let failed = || {
        doing(format!(
            "the VLANs of the port cannot be set on the bridge {:?}",
            config.bridge
        ))
    };
    if !config.keep_default_vlan {
        for (vid, _) in socket.vlans(port).map_err(failed())? {
            socket.delete_vlan(port, vid).map_err(failed())?;
        }
    }
    // On a trunk without an access VLAN, untagged packets belong to VLAN 1, as in the reference.
    let access = if config.vlan != 0 { config.vlan } else { 1 };
    socket
        .add_vlan(port, access, true, false)
        .map_err(failed())?;
    for vid in config.trunk.iter().filter(|v| **v != access) {
        socket
            .add_vlan(port, *vid, false, false)
            .map_err(failed())?;
    }
    Ok(())
}

/// The link for the gateway's address: the bridge, or for a VLAN a separate veth pair between the host and the bridge.
fn gateway_link(socket: &mut Socket, config: &Config<'_>, bridge: &Link) -> Result<Link, Error> {
    if config.vlan == 0 {
        return Ok(bridge.clone());
    }
    let name = format!("{}.{}", config.bridge, config.vlan);
    if name.len() > 15 {
        return Err(Error::config(format!(
            "the gateway's interface {name:?} would be longer than 15 bytes: use a shorter name for the bridge"
        )));
    }
    let failed = || doing(format!("creating the gateway's interface {name:?} failed"));
    if socket.link(&name).map_err(failed())?.is_none() {
        let here = netns::own()?;
        let macs = [
            random_mac().map_err(failed())?,
            random_mac().map_err(failed())?,
        ];
        let port = pair::random_name()?;
        let plan = VethPlan {
            host_name: &port,
            host_mac: macs[0],
            peer_name: &name,
            peer_mac: macs[1],
            namespace: &here,
            mtu: config.mtu,
            master: Some(bridge.index),
        };
        match socket.add_veth(&plan) {
            // Another process has created it concurrently.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed()(error)),
            Ok(()) => {
                let port = socket
                    .link(&port)
                    .map_err(failed())?
                    .ok_or_else(|| Error::other(format!("the interface {port:?} disappeared")))?;
                for (vid, _) in socket.vlans(port.index).map_err(failed())? {
                    socket.delete_vlan(port.index, vid).map_err(failed())?;
                }
                socket
                    .add_vlan(port.index, config.vlan, true, false)
                    .map_err(failed())?;
            }
        }
    }
    let link = socket
        .link(&name)
        .map_err(failed())?
        .ok_or_else(|| Error::other(format!("the interface {name:?} disappeared")))?;
    socket.set_up(link.index, true).map_err(failed())?;
    Ok(link)
}

/// The bridge, created if it does not exist. An explicitly set MAC address keeps the kernel from changing it.
fn ensure_bridge(socket: &mut Socket, config: &Config<'_>) -> Result<Link, Error> {
    let name = config.bridge;
    let find = |socket: &mut Socket| {
        socket
            .link(name)
            .map_err(doing(format!("the bridge {name:?} cannot be read")))
    };
    let mut found = find(socket)?;
    if found.is_none() {
        let mac = random_mac().map_err(doing("creating a random MAC address failed"))?;
        match socket.add_bridge(name, mac, config.mtu, config.has_vlans()) {
            Err(error)
                if config.has_vlans()
                    && error.raw_os_error() == Some(nix::errno::Errno::EOPNOTSUPP as i32) =>
            {
                return Err(Error::other(format!(
                    "could not add {name:?}: the kernel has no VLAN filtering for bridges (CONFIG_BRIDGE_VLAN_FILTERING), which \"vlan\" and \"vlanTrunk\" need"
                )));
            }
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(Error::doing(format!("could not add {name:?}"), error));
            }
            _ => {}
        }
        found = find(socket)?;
    }
    let link = found
        .ok_or_else(|| Error::other(format!("the bridge {name:?} disappeared during its setup")))?;
    if link.kind != "bridge" {
        return Err(Error::other(format!(
            "{name:?} already exists but is not a bridge"
        )));
    }
    // Even if another program has created the bridge: otherwise a container could announce itself as
    // the host's router (CVE-2020-10749). Best effort: a kernel without IPv6 needs no protection.
    let _ = sysctl::ensure(&format!("ipv6/conf/{name}/accept_ra"), "0");
    if config.has_vlans() && link.option(IFLA_BR_VLAN_FILTERING) != Some(1) {
        return Err(Error::other(format!(
            "the bridge {name:?} has no VLAN filtering, which \"vlan\" and \"vlanTrunk\" need: enable it (ip link set {name} type bridge vlan_filtering 1), or use another bridge"
        )));
    }
    if !link.up {
        socket
            .set_up(link.index, true)
            .map_err(doing(format!("the bridge {name:?} cannot be brought up")))?;
    }
    if config.promiscuous && !link.promiscuous {
        socket
            .set_promiscuous(link.index)
            .map_err(doing("could not set promiscuous mode"))?;
    }
    Ok(link)
}

fn ensure_address(
    socket: &mut Socket,
    bridge: &Link,
    address: IpNet,
    force: bool,
) -> Result<(), Error> {
    let have = socket
        .addresses(bridge.index)
        .map_err(doing("the bridge's addresses cannot be read"))?;
    if have.contains(&address) {
        return Ok(());
    }
    let conflict = |other: &&IpNet| match (other, address) {
        (IpNet::V4(_), IpNet::V4(_)) => true,
        (IpNet::V6(_), IpNet::V6(_)) => {
            other.contains(&address.network()) || address.contains(&other.network())
        }
        _ => false,
    };
    for other in have.iter().filter(conflict) {
        if !force {
            return Err(Error::other(format!(
                "{:?} already has an IP address different from {address}; set \"forceAddress\" to replace it",
                bridge.name
            )));
        }
        socket
            .delete_address(bridge.index, *other)
            .map_err(doing(format!(
                "could not remove {other} from {:?}",
                bridge.name
            )))?;
    }
    match socket.add_address(bridge.index, address) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(Error::doing(
            format!("could not add {address} to {:?}", bridge.name),
            error,
        )),
        _ => Ok(()),
    }
}

/// CHECK: the port has its flags and its VLANs.
fn check_port(socket: &mut Socket, config: &Config<'_>, port: &Link) -> Result<(), Error> {
    for (option, wanted, found) in [
        ("hairpinMode", config.hairpin, port.hairpin),
        ("portIsolation", config.isolated, port.isolated),
    ] {
        if wanted != found {
            return Err(Error::other(format!(
                "{option:?} of the port {:?} is {found}, not {wanted}",
                port.name
            )));
        }
    }
    if !config.has_vlans() {
        return Ok(());
    }
    let found = socket
        .vlans(port.index)
        .map_err(doing("the port's VLANs cannot be read"))?;
    let wanted = config
        .trunk
        .iter()
        .map(|v| (*v, false))
        .chain((config.vlan != 0).then_some((config.vlan, true)));
    match wanted
        .filter(|(v, access)| *access || *v != config.vlan)
        .find(|(v, access)| !found.iter().any(|f| f.0 == *v && (f.1 || !access)))
    {
        Some((missing, _)) => Err(Error::other(format!(
            "the port {:?} is not in the VLAN {missing}",
            port.name
        ))),
        None => Ok(()),
    }
}

fn first_address(net: IpNet) -> Option<IpAddr> {
    net.trunc().hosts().next()
}

/// Completes the IPAM result with the interface, gateways and default routes.
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
        let gateway = success
            .ips
            .iter()
            .find(|i| i.address.addr().is_ipv4() == v4)
            .and_then(|i| i.gateway);
        let default = success
            .routes
            .iter_mut()
            .find(|r| r.destination.prefix_len() == 0 && r.destination.addr().is_ipv4() == v4);
        match (gateway, default) {
            (Some(gateway), Some(route)) => {
                route.gateway.get_or_insert(gateway);
            }
            (Some(gateway), None) => {
                let any: IpAddr = if v4 {
                    [0u8; 4].into()
                } else {
                    [0u8; 16].into()
                };
                success.routes.push(Route {
                    destination: IpNet::new(any, 0).unwrap_or_default(),
                    gateway: Some(gateway),
                    extra: Map::new(),
                });
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
        let mut socket = Socket::route().map_err(doing("opening a netlink socket failed"))?;
        let bridge = ensure_bridge(&mut socket, &config)?;
        let made = pair::add(
            &mut socket,
            call,
            &namespace,
            PairConfig {
                mac: config.mac,
                mtu: config.mtu,
                master: Some(bridge.index),
            },
        )?;
        let host_name = made[0].name.clone();
        let own = Interface {
            name: bridge.name.clone(),
            mac: bridge.mac.clone(),
            ..Interface::default()
        };
        let [host, container] = made;
        let interfaces = [own, host, container];
        let result = attach(&mut socket, &config, call, &bridge, &namespace, interfaces);
        if result.is_err() {
            // Report only the first error; the runtime calls DEL for leftovers.
            let _ = socket.delete_link(&host_name);
            if config.spoof_check {
                let _ = Nft::clean_up(|nft| spoof::remove(nft, &call.container, &call.ifname));
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
        let mut socket = Socket::route().map_err(doing("opening a netlink socket failed"))?;
        let bridge = socket
            .link(config.bridge)
            .map_err(doing("the bridge cannot be read"))?
            .filter(|l| l.kind == "bridge");
        let bridge = bridge
            .ok_or_else(|| Error::other(format!("the bridge {:?} is missing", config.bridge)))?;
        if config.promiscuous && !bridge.promiscuous {
            return Err(Error::other(format!(
                "the bridge {:?} is no longer promiscuous",
                config.bridge
            )));
        }
        let ports = expected
            .interfaces
            .iter()
            .filter(|i| i.sandbox.is_empty() && i.name != config.bridge);
        let mut attached = None;
        for port in ports {
            let link = socket
                .link(&port.name)
                .map_err(doing("a port cannot be read"))?;
            attached = attached.or(link.filter(|l| l.master == Some(bridge.index)));
        }
        let port = attached.ok_or_else(|| {
            Error::other(format!(
                "no interface of prevResult is a port of the bridge {:?}",
                config.bridge
            ))
        })?;
        interface::check(call, &expected)?;
        check_port(&mut socket, &config, &port)?;
        if config.spoof_check
            && !spoof::has(&call.container, &call.ifname)
                .map_err(doing("the MAC spoof check cannot be read"))?
        {
            return Err(Error::other(
                "the rules that check the container's MAC address are missing",
            ));
        }
        if config.masquerade {
            pair::check_masquerade(call, &expected)?;
        }
        Ok(())
    }

    fn gc(&self, call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
        let config = Config::parse(call)?;
        let mut socket = Socket::route().map_err(doing("opening a netlink socket failed"))?;
        // First the pairs, because spoof checks are removed with their ports.
        let links = pair::collect_links(call, keep);
        let spoof = if config.spoof_check {
            let is_removed = |port: &str| matches!(socket.link(port), Ok(None));
            spoof::collect(keep, is_removed).map_err(doing("MAC spoof checks cannot be removed"))
        } else {
            Ok(())
        };
        interface::join_errors([
            links,
            spoof,
            pair::collect_masquerade(call, keep),
            interface::collect_addresses(call, keep),
        ])
    }

    fn status(&self, call: &Call<'_>) -> Result<(), Error> {
        let config = Config::parse(call)?;
        super::has_links("bridge")?;
        if config.masquerade || config.spoof_check {
            super::has_nftables()?;
        }
        interface::call_ipam(call, "STATUS")
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
    if config.hairpin || config.isolated || config.has_vlans() {
        let port = socket
            .link(&host_name)
            .map_err(doing("the host interface cannot be read"))?;
        let port =
            port.ok_or_else(|| Error::other(format!("the interface {host_name:?} disappeared")))?;
        socket
            .set_port(port.index, config.hairpin, config.isolated)
            .map_err(doing(format!(
                "failed to setup hairpin mode for {host_name:?}"
            )))?;
        if config.has_vlans() {
            set_vlans(socket, config, port.index)?;
        }
    }
    if config.spoof_check {
        let mac = parse_mac(&interfaces[2].mac)
            .ok_or_else(|| Error::other("the container's MAC address is unknown"))?;
        spoof::add(&host_name, mac, &call.container, &call.ifname)
            .map_err(doing("the MAC spoof check cannot be set up in nftables"))?;
    }
    let mut finish = |success| {
        let success = Success {
            interfaces: interfaces.to_vec(),
            ..success
        };
        let success = finish(socket, config, call, bridge, namespace, success)?;
        if !config.leave_down {
            forwards(socket, &host_name)?;
        }
        Ok(success)
    };
    if config.ipam.is_empty() {
        finish(Success::default())
    } else {
        interface::with_addresses(call, config.ipam, finish)
    }
}

/// Waits until the port is operational, which happens shortly after both
/// ends are up. Before, the bridge drops packets from the container.
fn forwards(socket: &mut Socket, port: &str) -> Result<(), Error> {
    let begun = Instant::now();
    loop {
        let link = socket
            .link(port)
            .map_err(doing("the host interface cannot be read"))?;
        match link {
            Some(link) if link.is_operational => return Ok(()),
            Some(_) if begun.elapsed() < OPERATES_WITHIN => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Some(_) => {
                return Err(Error::other(format!(
                    "the bridge's port {port:?} did not become operational within {} s though both its ends are up",
                    OPERATES_WITHIN.as_secs()
                )));
            }
            None => {
                return Err(Error::other(format!("the interface {port:?} disappeared")));
            }
        }
    }
}

/// Configures addresses, gateways, masquerading and the remaining properties of an attachment whose port exists.
fn finish(
    socket: &mut Socket,
    config: &Config<'_>,
    call: &Call<'_>,
    bridge: &Link,
    namespace: &File,
    mut success: Success,
) -> Result<Success, Error> {
    complete(&mut success, config);
    if !config.leave_down {
        interface::configure(namespace, &call.ifname, &success, config.dad)?;
    }
    if config.is_gateway {
        for ip in success.ips.clone() {
            let Some(gateway) = ip
                .gateway
                .and_then(|g| IpNet::new(g, ip.address.prefix_len()).ok())
            else {
                continue;
            };
            let link = gateway_link(socket, config, bridge)?;
            ensure_address(socket, &link, gateway, config.force_address)?;
            if config.vlan != 0 && !success.interfaces.iter().any(|i| i.name == link.name) {
                success.interfaces.push(Interface {
                    name: link.name,
                    mac: link.mac,
                    ..Interface::default()
                });
            }
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
