//! Deletes flows of UDP whose translation is out of date (`pkg/proxy/conntrack/cleanup.go`).
//!
//! Connection tracking sends all packets of a flow to the target of its first packet. A client of TCP
//! notices that the target was removed; a client of UDP would go on sending to it.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use holdfast_core::network::{Family, Protocol};
use holdfast_core::services::{Address, Destination, StaleFlows, Target};
use holdfast_net::conntrack::{Conntrack, Flow};
use holdfast_net::nft::expression::status;

/// The targets to which flows stay, by the address and port that clients send to. Node ports have no address.
type Kept<'a> = BTreeMap<(Option<IpAddr>, u16), &'a [Target]>;

fn is_stale(flow: &Flow, kept: &Kept<'_>) -> bool {
    if flow.original.protocol != Protocol::Udp.number() {
        return false;
    }
    let port = flow.original.destination_port;
    let of_address = kept.get(&(flow.original.destination, port));
    // Only translated flows belong to a node port: a program on this node may use the same port at another address.
    let is_translated = flow.status & status::DNAT != 0;
    let of_node = || kept.get(&(None, port)).filter(|_| is_translated);
    let (Some(keep), Some(address)) = (of_address.or_else(of_node), flow.reply.source) else {
        return false;
    };
    let target = Target {
        address,
        port: flow.reply.source_port,
    };
    keep.binary_search(&target).is_err()
}

/// Flows to delete: the targets to which flows stay, by what clients have sent to.
#[derive(Debug, Default)]
pub(super) struct Stale(BTreeMap<(Family, Destination), Vec<Target>>);

impl Stale {
    /// Adds flows. For a destination that is known already, the new targets replace the old ones, so that flows that cannot be
    /// deleted for a long time take no more memory than all destinations.
    pub(super) fn add(&mut self, flows: impl IntoIterator<Item = StaleFlows>) {
        let flows = flows.into_iter();
        self.0
            .extend(flows.map(|f| ((f.family, f.destination), f.keep)));
    }

    /// Deletes the flows and returns their number. After an error, the next call tries again.
    ///
    /// # Errors
    ///
    /// This process may not read or change connection tracking.
    pub(super) fn delete(&mut self) -> io::Result<usize> {
        let deleted = delete(&self.0)?;
        self.0.clear();
        Ok(deleted)
    }
}

fn delete(stale: &BTreeMap<(Family, Destination), Vec<Target>>) -> io::Result<usize> {
    let mut deleted = 0_usize;
    for family in Family::ALL {
        let of_family = stale.iter().filter(|((of, _), _)| *of == family);
        let kept: Kept<'_> = of_family
            .map(|((_, destination), keep)| {
                let address = match destination.address {
                    Address::Ip(ip) => Some(ip),
                    Address::Node => None,
                };
                ((address, destination.port), keep.as_slice())
            })
            .collect();
        if kept.is_empty() {
            continue;
        }
        let found =
            Conntrack::open()?.delete(family == Family::V4, |flow| is_stale(flow, &kept))?;
        deleted = deleted.saturating_add(found);
    }
    Ok(deleted)
}
