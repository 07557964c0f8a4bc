//! The kernel's table of connections (conntrack): listed and deleted.
//!
//! The kernel sends all packets of a known flow to the target of its first packet. After a rule with NAT has changed, flows
//! that it translated must be deleted, or else their packets still go to the old target; this concerns UDP, whose flows have
//! no end.

use std::io;
use std::net::IpAddr;
use std::ops::ControlFlow;

use crate::link::ip;
use crate::netlink::{ACK, DUMP, Message, NESTED, REQUEST, Socket, attributes};

const GET: u16 = 1 << 8 | 1;
const DELETE: u16 = 1 << 8 | 2;

/// `CTA_…`.
mod attribute {
    pub(crate) const ORIGINAL: u16 = 1;
    pub(crate) const REPLY: u16 = 2;
    pub const STATUS: u16 = 3;
    pub const MARK: u16 = 8;
    pub const ID: u16 = 12;
    pub const ZONE: u16 = 18;
}

/// `CTA_TUPLE_…`, `CTA_IP_…` and `CTA_PROTO_…`.
mod tuple {
    pub const ADDRESSES: u16 = 1;
    pub(crate) const PROTOCOL: u16 = 2;
    pub const SOURCES: [u16; 2] = [1, 3];
    pub(crate) const DESTINATIONS: [u16; 2] = [2, 4];
    pub(crate) const NUMBER: u16 = 1;
    pub(crate) const SOURCE_PORT: u16 = 2;
    pub(crate) const DESTINATION_PORT: u16 = 3;
}

/// One direction of a flow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tuple {
    /// The source address.
    pub source: Option<IpAddr>,
    /// The destination address.
    pub destination: Option<IpAddr>,
    /// The source port; 0 if the protocol has no ports.
    pub source_port: u16,
    /// The destination port; 0 if the protocol has no ports.
    pub destination_port: u16,
    /// The number of the transport protocol: 6 is TCP, 17 UDP, 132 SCTP.
    pub protocol: u8,
}

/// A flow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flow {
    /// The direction of the first packet, before NAT.
    pub original: Tuple,
    /// The direction of replies: after destination NAT, its source is the target.
    pub reply: Tuple,
    /// Bits of `enum ip_conntrack_status` ([`crate::nft::expression::status`]).
    pub status: u32,
    /// The mark of the connection.
    pub mark: u32,
    /// The attributes by which the kernel finds the flow again.
    key: Vec<(u16, Vec<u8>)>,
}

fn read_tuple(bytes: &[u8]) -> Tuple {
    let mut read = Tuple::default();
    let port = |value: &[u8]| value.try_into().map_or(0, u16::from_be_bytes);
    for (kind, value) in attributes(bytes) {
        for (part, value) in attributes(value) {
            match (kind, part) {
                (tuple::ADDRESSES, part) if tuple::SOURCES.contains(&part) => {
                    read.source = ip(value);
                }
                (tuple::ADDRESSES, part) if tuple::DESTINATIONS.contains(&part) => {
                    read.destination = ip(value);
                }
                (tuple::PROTOCOL, tuple::NUMBER) => {
                    read.protocol = value.first().copied().unwrap_or(0);
                }
                (tuple::PROTOCOL, tuple::SOURCE_PORT) => read.source_port = port(value),
                (tuple::PROTOCOL, tuple::DESTINATION_PORT) => read.destination_port = port(value),
                _ => {}
            }
        }
    }
    read
}

/// Reads the body of a flow's message.
fn read(body: &[u8]) -> Flow {
    let mut flow = Flow::default();
    let number = |value: &[u8]| value.try_into().map_or(0, u32::from_be_bytes);
    for (kind, value) in attributes(body.get(4..).unwrap_or_default()) {
        match kind {
            attribute::ORIGINAL => {
                flow.original = read_tuple(value);
                flow.key.push((kind | NESTED, value.to_vec()));
            }
            attribute::REPLY => flow.reply = read_tuple(value),
            attribute::STATUS => flow.status = number(value),
            attribute::MARK => flow.mark = number(value),
            attribute::ID | attribute::ZONE => flow.key.push((kind, value.to_vec())),
            _ => {}
        }
    }
    flow
}

/// A netlink connection to the table of the namespace in which it was opened.
pub struct Conntrack(Socket);

/// Flows that were found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flows {
    /// The flows, in no order.
    pub flows: Vec<Flow>,
    /// Whether there are more flows than the caller wanted, or flows changed in between.
    pub is_partial: bool,
}

fn header(v4: bool) -> [u8; 4] {
    [if v4 { 2 } else { 10 }, 0, 0, 0]
}

impl Conntrack {
    /// Opens a connection.
    ///
    /// # Errors
    ///
    /// The kernel has no nfnetlink, or the process has too many open files.
    pub fn open() -> io::Result<Conntrack> {
        Socket::netfilter().map(Conntrack)
    }

    /// The flows of IPv4 or IPv6 for which `selects` is true, at most `most`. Other flows take no memory.
    ///
    /// # Errors
    ///
    /// This process may not read the table.
    pub fn flows(
        &mut self,
        v4: bool,
        most: usize,
        mut selects: impl FnMut(&Flow) -> bool,
    ) -> io::Result<Flows> {
        let mut flows = vec![];
        let query = Message::new(GET, REQUEST | DUMP, &header(v4));
        let is_whole = self.0.stream(query, |_, body| {
            let flow = read(body);
            if !selects(&flow) {
                return ControlFlow::Continue(());
            }
            if flows.len() >= most {
                return ControlFlow::Break(());
            }
            flows.push(flow);
            ControlFlow::Continue(())
        })?;
        Ok(Flows {
            flows,
            is_partial: !is_whole,
        })
    }

    /// Deletes the flows of IPv4 or IPv6 for which `selects` is true. Returns their number. Flows that end in the meantime are
    /// no error.
    ///
    /// # Errors
    ///
    /// This process may not read or change the table, or the kernel rejects a deletion. The other flows are deleted nevertheless.
    pub fn delete(
        &mut self,
        v4: bool,
        mut selects: impl FnMut(&Flow) -> bool,
    ) -> io::Result<usize> {
        /// Flows that are listed at a time, so that the memory is bounded.
        const AT_A_TIME: usize = 10_000;
        let mut deleted: usize = 0;
        let mut first_error = Ok(());
        loop {
            let before = deleted;
            let found = self.flows(v4, AT_A_TIME, &mut selects)?;
            for flow in &found.flows {
                let message = Message::new(DELETE, REQUEST | ACK, &header(v4));
                let keys = flow.key.iter();
                let message = keys.fold(message, |all, (kind, value)| all.put(*kind, value));
                match self.0.execute(message) {
                    Ok(()) => deleted = deleted.saturating_add(1),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => first_error = first_error.and(Err(error)),
                }
            }
            // Without progress, the same flows would be listed indefinitely.
            if !found.is_partial || deleted == before {
                return first_error.map(|()| deleted);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_of_a_flow_are_read_within_their_bounds(bytes in vec(any::<u8>(), 0..200)) {
            let flow = read(&bytes);
            prop_assert!(flow.key.iter().map(|(_, value)| value.len()).sum::<usize>() <= bytes.len());
        }
    }
}
