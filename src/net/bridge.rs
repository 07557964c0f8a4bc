//! VLANs of bridge ports.

use std::io;

use crate::link::{AF_BRIDGE, DEL_LINK, GET_LINK, SET_LINK, header, number};
use crate::netlink::{ACK, Attributes, DUMP, Message, REQUEST, Socket, attributes};

const IFLA_AF_SPEC: u16 = 26;
const IFLA_EXT_MASK: u16 = 29;
const BRIDGE_FLAGS: u16 = 0;
const VLAN_INFO: u16 = 2;
const SELF: u16 = 2;
const WITH_VLANS: u32 = 2;
const PVID: u16 = 2;
const UNTAGGED: u16 = 4;

impl Socket {
    fn vlan(kind: u16, port: u32, vid: u16, flags: u16, own: bool) -> Message {
        let mut spec = Attributes::new();
        if own {
            spec = spec.put(BRIDGE_FLAGS, &SELF.to_ne_bytes());
        }
        let info = [flags.to_ne_bytes(), vid.to_ne_bytes()].concat();
        Message::new(kind, REQUEST | ACK, &header(AF_BRIDGE, port, 0, 0))
            .nest(IFLA_AF_SPEC, &spec.put(VLAN_INFO, &info))
    }

    /// Adds a VLAN to a port: untagged if `access` is set, else
    /// tagged. `own` addresses the bridge itself instead of a port.
    pub fn add_vlan(&mut self, port: u32, vid: u16, access: bool, own: bool) -> io::Result<()> {
        self.execute(Self::vlan(
            SET_LINK,
            port,
            vid,
            if access { PVID | UNTAGGED } else { 0 },
            own,
        ))
    }

    /// Removes a VLAN from a port.
    pub fn delete_vlan(&mut self, port: u32, vid: u16) -> io::Result<()> {
        self.execute(Self::vlan(DEL_LINK, port, vid, 0, false))
    }

    /// The VLANs of a port, each with whether it is untagged.
    pub fn vlans(&mut self, port: u32) -> io::Result<Vec<(u16, bool)>> {
        let query = Message::new(GET_LINK, REQUEST | DUMP, &header(AF_BRIDGE, 0, 0, 0))
            .number(IFLA_EXT_MASK, WITH_VLANS);
        let mut found = vec![];
        for (_, body) in self.query(query)? {
            if body.get(4..).and_then(number) != Some(port) {
                continue;
            }
            let specs = attributes(body.get(16..).unwrap_or_default())
                .filter(|(kind, _)| *kind == IFLA_AF_SPEC);
            for (kind, value) in specs.flat_map(|(_, spec)| attributes(spec)) {
                if let (VLAN_INFO, [f0, f1, v0, v1]) = (kind, value) {
                    found.push((
                        u16::from_ne_bytes([*v0, *v1]),
                        u16::from_ne_bytes([*f0, *f1]) & UNTAGGED != 0,
                    ));
                }
            }
        }
        Ok(found)
    }
}
