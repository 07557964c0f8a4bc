//! The plugins, a file each. `delegate` calls the IPAM plugin of a
//! configuration; several plugins share `interface`, `pair` and `sublink`.

mod bandwidth;
mod bridge;
mod delegate;
mod dhcp;
mod dummy;
mod firewall;
mod host_device;
mod host_local;
mod interface;
mod ipvlan;
mod loopback;
mod macvlan;
mod pair;
mod portmap;
mod ptp;
mod sbr;
mod static_ipam;
mod sublink;
mod tap;
mod tuning;
mod vlan;
mod vrf;

use crate::cni::Error;
use crate::skel::Plugin;
use holdfast_net::netlink::Socket;
use holdfast_net::nft::Nft;

/// All plugins of this binary.
const ALL: &[&dyn Plugin] = &[
    &bandwidth::Bandwidth,
    &bridge::Bridge,
    &dhcp::Dhcp,
    &dummy::Dummy,
    &firewall::Firewall,
    &host_device::HostDevice,
    &host_local::HostLocal,
    &ipvlan::Ipvlan,
    &loopback::Loopback,
    &macvlan::Macvlan,
    &portmap::Portmap,
    &ptp::Ptp,
    &sbr::Sbr,
    &static_ipam::Static,
    &tap::Tap,
    &tuning::Tuning,
    &vlan::Vlan,
    &vrf::Vrf,
];

/// The names of all plugins.
pub fn names() -> impl Iterator<Item = &'static str> {
    ALL.iter().map(|plugin| plugin.name())
}

/// The plugin with this name.
#[must_use]
pub fn find(name: &str) -> Option<&'static dyn Plugin> {
    ALL.iter().find(|plugin| plugin.name() == name).copied()
}

/// STATUS: checks that the kernel supports a kind of link.
fn has_links(kind: &str) -> Result<(), Error> {
    let unavailable = |text: String| Error::new(Error::UNAVAILABLE, text);
    match Socket::route().and_then(|mut socket| socket.knows(kind)) {
        Ok(true) => Ok(()),
        Ok(false) => Err(unavailable(format!(
            "the kernel has no {kind} links: load the module {kind}"
        ))),
        Err(error) => Err(unavailable(format!(
            "{kind} links cannot be created: {error}; this process needs CAP_NET_ADMIN"
        ))),
    }
}

/// STATUS: checks that nftables can be used.
fn has_nftables() -> Result<(), Error> {
    let probed = Nft::open().and_then(|mut nft| nft.probe());
    probed.map_err(|e| {
        Error::new(Error::UNAVAILABLE, format!("nftables cannot be used: {e}; the kernel needs nf_tables, and this process CAP_NET_ADMIN"))
    })
}
