//! Shared code of plugins that connect a container to the host with a veth pair
//! (`pkg/ip/link_linux.go` and `pkg/ip/ipmasq_linux.go` of containernetworking/plugins).

use std::fs::File;
use std::net::IpAddr;

use ipnet::IpNet;

use super::interface::{self, doing};
use crate::cni::{Error, Interface, Json, Owner, Success, is_orphaned};
use crate::net::{iptables, masquerade as table, spoof, xtables};
use crate::skel::Call;
use holdfast_net::link::{Change, Link, VethPlan, mac_text, random_mac};
use holdfast_net::netlink::Socket;
use holdfast_net::nft::Nft;
use holdfast_net::sysctl;

/// The configuration of a veth pair.
pub(super) struct PairConfig {
    /// The MAC address of the container end; `None` means a random one.
    pub mac: Option<[u8; 6]>,
    /// The MTU; 0 means the kernel's default.
    pub mtu: u32,
    /// The index of the bridge that the host end joins.
    pub master: Option<u32>,
}

/// A random name for a host end.
pub(super) fn random_name() -> Result<String, Error> {
    let mut suffix = [0; 4];
    holdfast_net::random(&mut suffix).map_err(doing("creating a random name failed"))?;
    Ok(format!("veth{:08x}", u32::from_ne_bytes(suffix)))
}

/// Creates a veth pair. Returns the host end and the container end, which gets the name of the call.
pub(super) fn add(
    socket: &mut Socket,
    call: &Call<'_>,
    namespace: &File,
    config: PairConfig,
) -> Result<[Interface; 2], Error> {
    let mac = |given: Option<[u8; 6]>| {
        given.map_or_else(
            || random_mac().map_err(doing("creating a random MAC address failed")),
            Ok,
        )
    };
    let (host_mac, peer_mac) = (mac(None)?, mac(config.mac)?);
    for _ in 0..10 {
        let host_name = random_name()?;
        let plan = VethPlan {
            host_name: &host_name,
            host_mac,
            peer_name: &call.ifname,
            peer_mac,
            namespace,
            mtu: config.mtu,
            master: config.master,
        };
        match socket.add_veth(&plan) {
            Ok(()) => {
                mark_host_end(socket, &host_name, &call.owner()?);
                let container = Interface {
                    name: call.ifname.clone(),
                    mac: mac_text(&peer_mac),
                    sandbox: call.netns.clone(),
                    ..Interface::default()
                };
                return Ok([
                    Interface {
                        name: host_name,
                        mac: mac_text(&host_mac),
                        ..Interface::default()
                    },
                    container,
                ]);
            }
            Err(error)
                if error.kind() == std::io::ErrorKind::AlreadyExists
                    && socket.link(&host_name).is_ok_and(|l| l.is_some()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                return Err(Error::other(format!(
                    "container veth name ({:?}) peer provided ({host_name:?}) already exists",
                    call.ifname
                )));
            }
            Err(error) => return Err(Error::doing("failed to make veth pair", error)),
        }
    }
    Err(Error::other(
        "failed to make veth pair: no free name found in ten tries",
    ))
}

/// Records the owner in the alias of the host end, so that DEL without a namespace and GC find the pair. Best effort: a pair
/// without an alias works, and DEL finds the pair by the container's interface.
fn mark_host_end(socket: &mut Socket, name: &str, owner: &Owner) {
    // Without an index, the kernel finds the link by its name.
    let alias = Change {
        name: Some(name),
        alias: Some(&owner.comment),
        ..Change::default()
    };
    let _ = socket.change_link(0, alias);
}

/// Whether a link of the host is the host end of the call's pair. The reference writes no alias; its link is the one that
/// `known`, the result of ADD, lists with this name and random hardware address.
fn is_host_end(link: &Link, owner: &Owner, known: &[Interface]) -> bool {
    let is_known = |k: &Interface| {
        k.sandbox.is_empty() && k.name == link.name && k.mac.eq_ignore_ascii_case(&link.mac)
    };
    link.kind == "veth"
        && (owner.has(&link.alias) || (link.alias.is_empty() && known.iter().any(is_known)))
}

/// Removes the host end of the call's pair, which removes the other end, too. DEL needs this step if the path of the namespace is empty or
/// leads nowhere, because the namespace and the pair may nevertheless exist.
fn remove_host_end(call: &Call<'_>) -> Result<(), Error> {
    let (owner, known) = (call.owner()?, call.previous().ok().flatten());
    let known = known.map(|p| p.interfaces).unwrap_or_default();
    remove_links(|link| is_host_end(link, &owner, &known))
}

/// Removes the links of the host for which `selects` is true.
fn remove_links(selects: impl Fn(&Link) -> bool) -> Result<(), Error> {
    let mut socket = Socket::route().map_err(doing("opening a netlink socket failed"))?;
    let links = socket
        .links()
        .map_err(doing("the host's interfaces cannot be read"))?;
    for link in links.iter().filter(|l| selects(l)) {
        socket.delete_link(&link.name).map_err(doing(format!(
            "the host's interface {:?} cannot be removed",
            link.name
        )))?;
    }
    Ok(())
}

/// GC: removes the pairs of this network's attachments that are not in `keep`.
pub(super) fn collect_links(call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
    let network = call.network()?;
    remove_links(|link| link.kind == "veth" && is_orphaned(&link.alias, network, keep))
}

/// DEL: releases the addresses, removes the pair and its masquerading,
/// including that of the reference. Performs all steps even if one fails.
pub(super) fn remove(call: &Call<'_>) -> Result<(), Error> {
    let asks = |key: &str| call.config.flag(key).unwrap_or(false);
    let (masquerades, checks) = (asks("ipMasq"), asks("macspoofchk"));
    let rules = || {
        if !masquerades && !checks {
            return Ok(None);
        }
        let (network, owner) = (call.network()?, call.owner()?);
        let removed = Nft::clean_up(|nft| {
            if masquerades {
                table::remove(nft, &owner)?;
                iptables::remove_masquerade(nft, network, &call.container)?;
            }
            if checks {
                spoof::remove(nft, &call.container, &call.ifname)?;
            }
            Ok(())
        });
        removed.map_err(doing("the rules cannot be removed from nftables"))
    };
    interface::remove_with(call, rules, || remove_host_end(call))
}

/// Whether the configuration enables masquerading. An unknown backend is an error.
pub(super) fn masquerades(config: Json<'_>) -> Result<bool, Error> {
    let backend = config.text("ipMasqBackend")?;
    if !["", "nftables", "iptables"].contains(&backend) {
        return Err(Error::config(format!(
            "unknown ipMasqBackend {backend:?}: expected \"nftables\" or \"iptables\""
        )));
    }
    masquerade_exceptions(config)?;
    config.flag("ipMasq")
}

/// The destinations to which packets are not masqueraded, besides the container's own network: in a cluster, the pods of all
/// nodes. The reference plugins have no such field.
fn masquerade_exceptions(config: Json<'_>) -> Result<Vec<IpNet>, Error> {
    let texts = config.texts("ipMasqExcept")?;
    let nets = texts.iter().map(|text| {
        text.parse::<IpNet>().map(|net| net.trunc()).map_err(|_| {
            Error::config(format!(
                "invalid ipMasqExcept {text:?}: not an address range; use for instance 10.244.0.0/16"
            ))
        })
    });
    nets.collect()
}

/// Enables IP forwarding on the host for the address's family.
pub(super) fn forward(address: IpAddr) -> Result<(), Error> {
    let path = if address.is_ipv4() {
        "ipv4/ip_forward"
    } else {
        "ipv6/conf/all/forwarding"
    };
    sysctl::ensure(path, "1").map_err(doing("failed to enable forwarding"))
}

/// Masquerades packets from the container's addresses, in the tables of iptables if wanted and if the kernel has their matches.
pub(super) fn masquerade(call: &Call<'_>, success: &Success) -> Result<(), Error> {
    let addresses: Vec<IpNet> = success.ips.iter().map(|i| i.address).collect();
    let except = masquerade_exceptions(call.config)?;
    let backend = call.config.text("ipMasqBackend")?;
    // Only the own table knows exceptions.
    if except.is_empty()
        && xtables::is_wanted(backend).map_err(doing("the tables of iptables cannot be read"))?
    {
        let added = xtables::masquerade(&addresses, call.network()?, &call.container);
        if !added.as_ref().is_err_and(xtables::is_unsupported) {
            return added.map_err(doing(
                "masquerading cannot be set up in the tables of iptables",
            ));
        }
    }
    table::add(&addresses, &except, &call.owner()?)
        .map_err(doing("masquerading cannot be set up in nftables"))
}

/// Checks that masquerading is set up, by this implementation or by the reference.
pub(super) fn check_masquerade(call: &Call<'_>, expected: &Success) -> Result<(), Error> {
    let failed = || doing("masquerading cannot be read");
    let addresses: Vec<IpAddr> = expected.ips.iter().map(|i| i.address.addr()).collect();
    if table::has(&call.owner()?).map_err(failed())?
        || iptables::masquerades(&addresses, call.network()?, &call.container).map_err(failed())?
    {
        Ok(())
    } else {
        Err(Error::other(format!(
            "the masquerading rule is missing{}",
            iptables::legacy_hint()
        )))
    }
}

/// Removes the masquerading of this network's containers that are not in `keep`.
pub(super) fn collect_masquerade(call: &Call<'_>, keep: &[(String, String)]) -> Result<(), Error> {
    table::collect(call.network()?, keep).map_err(doing("masquerading cannot be removed"))
}
