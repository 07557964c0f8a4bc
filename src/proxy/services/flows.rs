//! Deletes flows of UDP whose translation is out of date (`pkg/proxy/conntrack/cleanup.go`).
//!
//! Connection tracking sends all packets of a flow to the target of its first packet. A client of TCP
//! notices that the target was removed; a client of UDP would go on sending to it.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use holdfast_core::network::{Family, Protocol};
use holdfast_core::services::{Address, StaleFlows, Target};
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

/// Deletes the flows and returns their number.
///
/// # Errors
///
/// This process may not read or change connection tracking.
pub(super) fn delete(stale: &[StaleFlows]) -> io::Result<usize> {
    let mut deleted = 0_usize;
    for family in Family::ALL {
        let of_family = stale.iter().filter(|flows| flows.family == family);
        let kept: Kept<'_> = of_family
            .map(|flows| {
                let address = match flows.destination.address {
                    Address::Ip(ip) => Some(ip),
                    Address::Node => None,
                };
                ((address, flows.destination.port), flows.keep.as_slice())
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
