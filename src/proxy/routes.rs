//! The kernel's routes to the pods of other nodes. `core::node::routes` decides which ones; this file lists, compares and changes
//! them.
//!
//! Routes of this program have a protocol number of their own, and as metric the cluster's number. Routes with another protocol or
//! metric are never changed, so several clusters and other routing programs can share a machine. Since the routes stay in the
//! kernel, a restart finds them again and changes only what differs.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use ipnet::IpNet;

use holdfast_core::digest::fnv32;
use holdfast_core::node::routes::{Change, Hop, Interface, Peer, Unrouted, desired, diff};
use holdfast_net::netlink::Socket;
use holdfast_net::route::{Route, Tunnel};

use crate::tunnel;

/// The protocol number of the routes (`rtm_protocol`): one that `/etc/iproute2/rt_protos` does not assign.
pub(crate) const PROTOCOL: u8 = 72;
/// The main routing table.
pub(crate) const MAIN: u32 = 254;

/// The metric of a cluster's routes: it depends on the name of the cluster's tables.
fn metric(table: &str) -> u32 {
    // Behind all usual metrics, so that a route of the administrator takes precedence.
    0x4800_0000 | (fnv32(table.bytes()) & 0x00ff_ffff)
}

/// The result of [`Routes::apply`].
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// The number of routes that were added or deleted.
    pub changed: usize,
    /// The number of routes of this cluster now.
    pub routes: usize,
    /// The ranges of nodes without a route, with the reason.
    pub unrouted: Vec<Unrouted>,
    /// Why there is no tunnel, which only other nodes need: those to which this one is behind a router, but not vice versa.
    pub no_tunnel: Option<String>,
}

/// The routes of one cluster.
pub struct Routes {
    socket: Socket,
    metric: u32,
}

impl Routes {
    /// Opens a socket for the routes of the cluster whose tables have this name.
    ///
    /// # Errors
    ///
    /// The kernel has no rtnetlink, or the process has too many open files.
    pub fn open(table: &str) -> io::Result<Routes> {
        Ok(Routes {
            socket: Socket::route()?,
            metric: metric(table),
        })
    }

    /// The routes of this cluster in the kernel.
    fn installed(&mut self) -> io::Result<Vec<(IpNet, Hop)>> {
        let mut all = self.socket.routes()?;
        let metric = Some(self.metric);
        all.retain(|r| r.maker == PROTOCOL && r.priority == metric && r.table == MAIN);
        let hops = all.into_iter().filter_map(|route| {
            let (source, link) = (route.source, route.link);
            let near = |gateway| Hop::Near { gateway, link };
            let through = |tunnel: Tunnel| Hop::Tunnel {
                remote: tunnel.remote,
                source,
            };
            let hop = route.gateway.map(near).or(route.tunnel.map(through))?;
            Some((route.destination, hop))
        });
        Ok(hops.collect())
    }

    /// `tunnel` is the index of the tunnel's link.
    fn route(&self, range: IpNet, hop: Hop, tunnel: Option<u32>) -> io::Result<Route> {
        let route = match hop {
            Hop::Near { gateway, link } => Route::new(link, range, Some(gateway)),
            Hop::Tunnel { remote, source } => Route {
                source,
                tunnel: Some(tunnel::to(remote)),
                ..Route::new(tunnel.ok_or(io::ErrorKind::NotFound)?, range, None)
            },
        };
        Ok(Route {
            priority: Some(self.metric),
            maker: PROTOCOL,
            ..route
        })
    }

    /// Prepares the tunnel, which any other node may use. Returns the index of its link.
    fn tunnel(&mut self, hops: &BTreeMap<IpNet, Hop>) -> io::Result<Option<u32>> {
        let (mut remotes, mut sources) = (BTreeSet::new(), BTreeSet::new());
        for hop in hops.values() {
            if let Hop::Tunnel { remote, source } = hop {
                remotes.insert(*remote);
                sources.extend(*source);
            }
        }
        match hops.is_empty() {
            true => tunnel::index(&mut self.socket),
            false => tunnel::set_up(&mut self.socket, &remotes, &sources).map(Some),
        }
    }

    /// Compares the kernel's routes with those that node `own` needs, and changes what differs. `cluster` are the ranges in which
    /// pods may be, or empty if they are not known. Reads all addresses and routes: call it if a Node's ranges or addresses have
    /// changed, and as a periodic audit.
    ///
    /// # Errors
    ///
    /// Addresses or routes cannot be listed, or the kernel rejects a route. The other routes are changed nevertheless.
    pub fn apply(&mut self, own: &str, peers: &[Peer], cluster: &[IpNet]) -> io::Result<Applied> {
        let addresses = self.socket.all_addresses()?.into_iter();
        let interfaces: Vec<Interface> = addresses
            .map(|(link, address)| Interface { link, address })
            .collect();
        let wanted = desired(own, peers, &interfaces, cluster);
        let changes = diff(&self.installed()?, &wanted.routes);
        // Without the tunnel, the other routes are needed nevertheless.
        let is_tunnel = |hop: &Hop| matches!(hop, Hop::Tunnel { .. });
        let (tunnel, no_tunnel, mut first_error) = match self.tunnel(&wanted.routes) {
            Ok(tunnel) => (tunnel, None, Ok(())),
            Err(error) if wanted.routes.values().any(is_tunnel) => (None, None, Err(error)),
            Err(error) => (None, Some(error.to_string()), Ok(())),
        };
        for change in &changes {
            let changed = self.change(change, tunnel);
            first_error = first_error.and(changed);
        }
        first_error = first_error.and(tunnel::tidy(&mut self.socket));
        first_error.map(|()| Applied {
            changed: changes.len(),
            routes: wanted.routes.len(),
            unrouted: wanted.unrouted.into_iter().collect(),
            no_tunnel,
        })
    }

    fn change(&mut self, change: &Change, tunnel: Option<u32>) -> io::Result<()> {
        let (verb, range, result) = match *change {
            Change::Add(range, hop) => {
                let route = self.route(range, hop, tunnel);
                let result = route.and_then(|route| self.socket.add_route(&route));
                ("add", range, result)
            }
            Change::Delete(range, hop) => {
                let route = self.route(range, hop, tunnel);
                // The route may be gone with its link.
                let result = match route.and_then(|route| self.socket.delete_route(&route)) {
                    Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => Ok(()),
                    other => other,
                };
                ("delete", range, result)
            }
        };
        result.map_err(|e| {
            io::Error::new(e.kind(), format!("cannot {verb} the route to {range}: {e}"))
        })
    }

    /// Deletes all routes of this cluster. Returns their number.
    ///
    /// # Errors
    ///
    /// Routes cannot be listed or deleted.
    pub fn remove(&mut self) -> io::Result<usize> {
        let installed = self.installed()?;
        let tunnel = tunnel::index(&mut self.socket)?;
        for (range, hop) in &installed {
            self.change(&Change::Delete(*range, *hop), tunnel)?;
        }
        tunnel::tidy(&mut self.socket)?;
        Ok(installed.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_have_different_metrics_behind_the_usual_ones() {
        let all = ["holdfast", "holdfast-a", "holdfast-b"].map(metric);
        assert!(all.iter().all(|metric| *metric > 65_535));
        assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2]);
    }
}
