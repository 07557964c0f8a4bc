//! Shared code of plugins that connect a container to the host with a veth pair
//! (`pkg/ip/link_linux.go` and `pkg/ip/ipmasq_linux.go` of containernetworking/plugins).

use std::fs::File;
use std::net::IpAddr;

use ipnet::IpNet;

use super::interface::{self, doing};
use crate::cni::{Error, Interface, Json, Success};
use crate::net::{iptables, masquerade as table, spoof};
use crate::skel::Call;
use holdfast_net::link::{VethPlan, mac_text, random_mac};
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

/// DEL: releases the addresses, removes the pair and its masquerading,
/// including that of the reference. Performs all steps even if one fails.
pub(super) fn remove(call: &Call<'_>) -> Result<(), Error> {
    let asks = |key: &str| call.config.flag(key).unwrap_or(false);
    let (masquerades, checks) = (asks("ipMasq"), asks("macspoofchk"));
    interface::remove(call, || {
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
    })
}

/// Whether the configuration enables masquerading. An unknown backend is an error.
pub(super) fn masquerades(config: Json<'_>) -> Result<bool, Error> {
    let backend = config.text("ipMasqBackend")?;
    if !["", "nftables", "iptables"].contains(&backend) {
        return Err(Error::config(format!(
            "unknown ipMasqBackend {backend:?}: expected \"nftables\" or \"iptables\" (which is honoured through nftables)"
        )));
    }
    config.flag("ipMasq")
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

/// Masquerades packets from the container's addresses.
pub(super) fn masquerade(call: &Call<'_>, success: &Success) -> Result<(), Error> {
    let addresses: Vec<IpNet> = success.ips.iter().map(|i| i.address).collect();
    table::add(&addresses, &call.owner()?)
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
