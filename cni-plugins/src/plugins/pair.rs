//! What plugins share that join a container to the host by a veth pair (CNI reference spec, 2.1 to 2.6).

use std::fs::File;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::cni::{Error, Interface, Json, Success};
use crate::ipam::delegate;
use crate::net::link::{VethPlan, mac_text, random_mac};
use crate::net::netlink::Socket;
use crate::net::{netns, nft, sysctl};
use crate::skel::Call;

pub(super) fn doing<E: std::fmt::Display>(what: impl std::fmt::Display) -> impl FnOnce(E) -> Error {
    move |error| Error::doing(what, error)
}

/// What a pair shall be like.
pub(super) struct Wish {
    /// The container end's address; a random one if none is wished for.
    pub mac: Option<[u8; 6]>,
    /// 0 leaves it to the kernel.
    pub mtu: u32,
    /// The bridge that the host end becomes a port of.
    pub master: Option<u32>,
}

/// Makes a pair: the host's end and the container's, which has its name.
pub(super) fn add(socket: &mut Socket, call: &Call<'_>, namespace: &File, wish: Wish) -> Result<[Interface; 2], Error> {
    let mac = |given: Option<[u8; 6]>| given.map_or_else(|| random_mac().map_err(doing("no random MAC address")), Ok);
    let (host_mac, peer_mac) = (mac(None)?, mac(wish.mac)?);
    for _ in 0..10 {
        let mut suffix = [0; 4];
        crate::net::random(&mut suffix).map_err(doing("no random name"))?;
        let host_name = format!("veth{}", suffix.iter().map(|b| format!("{b:02x}")).collect::<String>());
        let plan = VethPlan { host_name: &host_name, host_mac, peer_name: &call.ifname, peer_mac, namespace, mtu: wish.mtu, master: wish.master };
        match socket.add_veth(&plan) {
            Ok(()) => {
                let container = Interface { name: call.ifname.clone(), mac: mac_text(&peer_mac), sandbox: call.netns.clone() };
                return Ok([Interface { name: host_name, mac: mac_text(&host_mac), sandbox: String::new() }, container]);
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

/// Readies the container's interface for its addresses; called inside the container.
pub(super) fn ready(ifname: &str, success: &Success, dad: bool) -> Result<(Socket, u32), Error> {
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
    Ok((socket, link.index))
}

/// Addresses, up, routes: inside the container.
pub(super) fn configure(namespace: &File, ifname: &str, success: &Success, dad: bool) -> Result<(), Error> {
    netns::inside(namespace, || {
        let (mut socket, index) = ready(ifname, success, dad)?;
        for ip in &success.ips {
            socket.add_address(index, ip.address).map_err(doing(format!("failed to add IP addr {} to {ifname:?}", ip.address)))?;
        }
        socket.set_up(index, true).map_err(doing(format!("failed to set {ifname:?} UP")))?;
        add_routes(&mut socket, index, ifname, success)
    })
}

/// The routes that were asked for; without a gateway of their own over that of their family.
pub(super) fn add_routes(socket: &mut Socket, index: u32, ifname: &str, success: &Success) -> Result<(), Error> {
    for route in &success.routes {
        let v4 = route.destination.addr().is_ipv4();
        let gateway = route.gateway.or_else(|| success.ips.iter().find(|i| i.address.addr().is_ipv4() == v4).and_then(|i| i.gateway));
        let priority = route.extra.get("priority").and_then(serde_json::Value::as_u64).and_then(|p| u32::try_from(p).ok());
        socket
            .add_route(index, route.destination, gateway, priority)
            .map_err(doing(format!("failed to add route {} via {gateway:?} dev {ifname}", route.destination)))?;
    }
    Ok(())
}

/// DEL: gives the addresses back, and removes the pair and what was masqueraded for it. All of it is tried; what failed is
/// told as one, and the first says what kind it is.
pub(super) fn remove(call: &Call<'_>) -> Result<(), Error> {
    let ipam = call.config.object("ipam").and_then(|i| i.text("type")).unwrap_or_default();
    let mut errors = Vec::new();
    if !ipam.is_empty() {
        errors.extend(delegate::forward(call, ipam, "DEL").err());
    }
    if call.config.flag("ipMasq").unwrap_or(false) {
        let removed = call.network().and_then(|network| {
            let comment = nft::comment(network, &call.container, &call.ifname);
            let key = comment.split(',').next().unwrap_or_default().to_owned();
            nft::remove(|c| c.starts_with(&key)).map_err(doing("masquerading cannot be removed"))
        });
        errors.extend(removed.err());
    }
    if !call.netns.is_empty() {
        let deleted = netns::open(&call.netns).and_then(|namespace| match namespace {
            Some(namespace) => netns::inside(&namespace, || {
                Socket::route().and_then(|mut s| s.delete_link(&call.ifname)).map_err(doing("the interface cannot be removed"))
            }),
            None => Ok(()),
        });
        errors.extend(deleted.err());
    }
    match errors.len() {
        0 => Ok(()),
        _ => Err(Error { message: errors.iter().map(|e| e.message.as_str()).collect::<Vec<_>>().join("; "), ..errors.swap_remove(0) }),
    }
}

/// Whether the configuration asks for masquerading, by a backend that is known.
pub(super) fn masquerades(config: Json<'_>) -> Result<bool, Error> {
    let backend = config.text("ipMasqBackend")?;
    if !["", "nftables", "iptables"].contains(&backend) {
        return Err(Error::config(format!(
            "unknown ipMasqBackend {backend:?}: expected \"nftables\" or \"iptables\" (which is honoured through nftables)"
        )));
    }
    config.flag("ipMasq")
}

/// Has the host forward what comes from and goes to addresses of this family.
pub(super) fn forward(address: IpAddr) -> Result<(), Error> {
    let path = if address.is_ipv4() { "ipv4/ip_forward" } else { "ipv6/conf/all/forwarding" };
    sysctl::ensure(path, "1").map_err(doing("failed to enable forwarding"))
}

/// Masquerades what comes from the container's addresses.
pub(super) fn masquerade(call: &Call<'_>, success: &Success) -> Result<(), Error> {
    let addresses: Vec<IpNet> = success.ips.iter().map(|i| i.address).collect();
    let comment = nft::comment(call.network()?, &call.container, &call.ifname);
    nft::add(&addresses, &comment).map_err(doing("masquerading cannot be set up in nftables"))
}

/// Whether that is so.
pub(super) fn check_masquerade(call: &Call<'_>) -> Result<(), Error> {
    let comment = nft::comment(call.network()?, &call.container, &call.ifname);
    if nft::has(&comment).map_err(doing("masquerading cannot be read"))? { Ok(()) } else { Err(Error::other("the masquerading rule is missing")) }
}

/// Removes what was masqueraded for containers of this network that are not wanted any more.
pub(super) fn collect_masquerade(call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
    let network = call.network()?;
    let wanted: Vec<String> = keep.iter().map(|(id, ifname)| nft::comment(network, id, ifname)).collect();
    let own = nft::comment(network, "", "");
    let prefix = own.split('-').next().unwrap_or_default();
    nft::remove(|c| c.starts_with(prefix) && !wanted.iter().any(|w| w == c)).map_err(doing("masquerading cannot be removed"))
}

/// Whether the container has what the result says.
pub(super) fn check(call: &Call<'_>, expected: &Success) -> Result<(), Error> {
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
    })
}
