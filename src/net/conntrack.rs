//! Deletes stale conntrack entries. The kernel sends the packets of a known UDP flow
//! to the target of its first packet, even after the port forwarding has changed.

use std::io;
use std::net::IpAddr;

use crate::netlink::{ACK, DUMP, Message, NESTED, REQUEST, Socket, attributes};

const GET: u16 = 1 << 8 | 1;
const DELETE: u16 = 1 << 8 | 2;
const ORIGINAL: u16 = 1;
const REPLY: u16 = 2;
const ID: u16 = 12;
const UDP: u8 = 17;

/// One direction of a flow: source address, protocol and destination port.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tuple {
    source: Option<IpAddr>,
    protocol: u8,
    port: u16,
}

fn tuple(bytes: &[u8]) -> Tuple {
    let mut tuple = Tuple::default();
    for (kind, value) in attributes(bytes) {
        match kind {
            1 => {
                for (kind, value) in attributes(value) {
                    if kind == 1 || kind == 3 {
                        tuple.source = crate::link::ip(value);
                    }
                }
            }
            2 => {
                for (kind, value) in attributes(value) {
                    match (kind, value) {
                        (1, [number]) => tuple.protocol = *number,
                        (3, [high, low]) => tuple.port = u16::from_be_bytes([*high, *low]),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    tuple
}

/// Deletes the UDP flows to one of `ports` of this host, and those whose replies come from one of `containers`.
pub fn forget_udp(v4: bool, ports: &[u16], containers: &[IpAddr]) -> io::Result<()> {
    let mut socket = Socket::netfilter()?;
    let header = [if v4 { 2 } else { 10 }, 0, 0, 0];
    let mut to_delete = vec![];
    for (_, body) in socket.query(Message::new(GET, REQUEST | DUMP, &header))? {
        let mut message = Message::new(DELETE, REQUEST | ACK, &header);
        let (mut original, mut reply) = (Tuple::default(), Tuple::default());
        for (kind, value) in attributes(body.get(4..).unwrap_or_default()) {
            match kind {
                ORIGINAL => {
                    original = tuple(value);
                    message = message.put(ORIGINAL | NESTED, value);
                }
                REPLY => reply = tuple(value),
                ID => message = message.put(ID, value),
                _ => {}
            }
        }
        let answered = reply.source.is_some_and(|a| containers.contains(&a));
        if original.protocol == UDP && (answered || ports.contains(&original.port)) {
            to_delete.push(message);
        }
    }
    for message in to_delete {
        match socket.execute(message) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}
