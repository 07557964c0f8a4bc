//! The link through which this machine reaches the pods of nodes behind routers.
//!
//! The link is of kind VXLAN, without receivers of its own (`external`): each route through it names the node that gets the packets, so there
//! are no tables of neighbours and hardware addresses to keep. Every node of a cluster of several has it, as another node may be
//! behind a router only in its own view. Its packets have no Ethernet header (the Generic Protocol
//! Extension, draft-ietf-nvo3-vxlan-gpe). All clusters of a machine share it, as only one such link can have the UDP port.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use ipnet::IpNet;

use holdfast_net::link::{Change, LinkPlan};
use holdfast_net::netlink::{Attributes, Socket};
use holdfast_net::route::{Route, Tunnel};
use holdfast_net::sysctl;

use crate::routes::{MAIN, PROTOCOL};

/// The link's name.
const NAME: &str = "holdfast-vxlan";
/// The UDP port: the one that IANA assigned to VXLAN-GPE.
const PORT: u16 = 4790;
/// The number of the virtual network. Receivers ignore it.
const ID: u32 = 72;
/// Bytes of the headers of IP, UDP and VXLAN.
const OVERHEAD_V4: u32 = 20 + 8 + 8;
const OVERHEAD_V6: u32 = 40 + 8 + 8;
/// The smallest MTU of IPv6 (RFC 8200, section 5).
const MIN_MTU: u32 = 1280;

/// Attributes of a VXLAN link (`linux/if_link.h`).
const VXLAN_LEARNING: u16 = 7;
const VXLAN_PORT: u16 = 15;
const VXLAN_COLLECT_METADATA: u16 = 25;
const VXLAN_GPE: u16 = 27;

/// The encapsulation of packets to `remote`.
pub(crate) fn to(remote: IpAddr) -> Tunnel {
    Tunnel { id: ID, remote }
}

fn failed(what: &str, error: &io::Error) -> io::Error {
    let text =
        format!("the tunnel to nodes behind routers, {NAME} on UDP port {PORT}, {what}: {error}");
    io::Error::new(error.kind(), text)
}

/// Creates the link if it is missing, and sets its MTU and addresses: the sources of this machine's own packets. Returns its
/// index.
///
/// # Errors
///
/// The kernel has no VXLAN, another link has its name or port, or the kernel refuses a change.
pub(crate) fn set_up(
    socket: &mut Socket,
    remotes: &BTreeSet<IpAddr>,
    sources: &BTreeSet<IpAddr>,
) -> io::Result<u32> {
    let mtu = mtu(socket, remotes)?;
    if socket.link(NAME)?.is_none() {
        let data = Attributes::new()
            .put(VXLAN_COLLECT_METADATA, &[1])
            .put(VXLAN_GPE, &[])
            .put(VXLAN_LEARNING, &[0])
            .put(VXLAN_PORT, &PORT.to_be_bytes());
        let plan = LinkPlan {
            name: NAME,
            kind: "vxlan",
            data,
            mtu,
            ..LinkPlan::default()
        };
        let cannot = "cannot be created (the kernel module vxlan is needed, and no other VXLAN link may have the port)";
        socket.add_link(&plan).map_err(|e| failed(cannot, &e))?;
        // Two nodes need not agree that a router is between them: what comes from the tunnel may have a direct way back.
        // (The loose filter, 2, refuses all packets of a link that has no address.)
        let unfiltered = sysctl::write(&format!("ipv4/conf/{NAME}/rp_filter"), "0");
        unfiltered.map_err(|e| failed("keeps its filter of sources (rp_filter)", &e))?;
    }
    let link = socket.link(NAME)?.ok_or(io::ErrorKind::NotFound)?;
    if link.kind != "vxlan" {
        let other = io::Error::from(io::ErrorKind::AlreadyExists);
        return Err(failed(
            "cannot be created; rename the other link of this name",
            &other,
        ));
    }
    if link.mtu != mtu || !link.up {
        let change = Change {
            mtu: Some(mtu),
            up: Some(true),
            ..Change::default()
        };
        let cannot = "cannot be set up (no other VXLAN link may have the port)";
        let changed = socket.change_link(link.index, change);
        changed.map_err(|e| failed(cannot, &e))?;
    }
    let present = socket.addresses(link.index)?;
    for source in sources.iter().map(|source| IpNet::from(*source)) {
        if !present.contains(&source) {
            let added = socket.add_lone_address(link.index, source);
            added.map_err(|e| failed(&format!("does not get the address {source}"), &e))?;
        }
    }
    Ok(link.index)
}

/// The largest MTU with which encapsulated packets leave this machine in one piece.
fn mtu(socket: &mut Socket, remotes: &BTreeSet<IpAddr>) -> io::Result<u32> {
    let mut smallest = None;
    for remote in remotes {
        let Some(index) = socket.link_to(*remote)? else {
            continue;
        };
        let Some(link) = socket.link_at(index)? else {
            continue;
        };
        let overhead = if remote.is_ipv4() {
            OVERHEAD_V4
        } else {
            OVERHEAD_V6
        };
        let mtu = link.mtu.saturating_sub(overhead);
        smallest = Some(smallest.map_or(mtu, |other: u32| other.min(mtu)));
    }
    // Without a route to a remote, that of Ethernet.
    Ok(smallest.unwrap_or(1500 - OVERHEAD_V6).max(MIN_MTU))
}

/// The index of the link, if it exists.
pub(crate) fn index(socket: &mut Socket) -> io::Result<Option<u32>> {
    Ok(socket.link(NAME)?.map(|link| link.index))
}

/// Deletes the link if no cluster has routes to other nodes, and else the addresses that are no route's source.
///
/// # Errors
///
/// Routes or addresses cannot be listed or deleted.
pub(crate) fn tidy(socket: &mut Socket) -> io::Result<()> {
    let Some(link) = index(socket)? else {
        return Ok(());
    };
    let mut routes = socket.routes()?;
    routes.retain(|route| route.maker == PROTOCOL && route.table == MAIN);
    if routes.is_empty() {
        return socket.delete_link(NAME);
    }
    for address in socket.addresses(link)? {
        let is_source = |r: &Route| r.link == link && r.source == Some(address.addr());
        if !routes.iter().any(is_source) {
            socket.delete_address(link, address)?;
        }
    }
    Ok(())
}
