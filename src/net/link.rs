//! Links and their addresses over rtnetlink.

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd as _;

use ipnet::IpNet;

use crate::netlink::{
    ACK, Attributes, CREATE, DUMP, EXCL, Message, REQUEST, Socket, attributes, text,
};

pub(crate) const NEW_LINK: u16 = 16;
pub(crate) const DEL_LINK: u16 = 17;
pub(crate) const GET_LINK: u16 = 18;
pub(crate) const SET_LINK: u16 = 19;
const NEW_ADDR: u16 = 20;
const DEL_ADDR: u16 = 21;
const GET_ADDR: u16 = 22;

const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINK: u16 = 5;
const IFLA_MASTER: u16 = 10;
const IFLA_PROTINFO: u16 = 12;
const IFLA_TXQLEN: u16 = 13;
const IFLA_OPERSTATE: u16 = 16;
const IFLA_LINKINFO: u16 = 18;
const IFLA_IFALIAS: u16 = 20;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_INFO_SLAVE_DATA: u16 = 5;
const VETH_INFO_PEER: u16 = 1;
/// The attribute of a bridge that enables VLAN filtering.
pub const IFLA_BR_VLAN_FILTERING: u16 = 7;
const IFLA_BRPORT_MODE: u16 = 4;
const IFLA_BRPORT_ISOLATED: u16 = 33;

const IFF_UP: u32 = 0x1;
const IFF_PROMISC: u32 = 0x100;
const IFF_ALLMULTI: u32 = 0x200;
pub(crate) const AF_BRIDGE: u8 = 7;
const NODAD: u8 = 0x2;
const IFA_FLAGS: u16 = 8;
const NO_PREFIX_ROUTE: u32 = 0x200;

/// A link and its state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Link {
    /// The interface index.
    pub index: u32,
    /// The name.
    pub name: String,
    /// The hardware address as text.
    pub mac: String,
    /// The kind, for instance `bridge`; empty for physical links.
    pub kind: String,
    /// The MTU.
    pub mtu: u32,
    /// The index of the bridge or VRF that the link belongs to.
    pub master: Option<u32>,
    /// Whether it is administratively up.
    pub up: bool,
    /// Whether promiscuous mode is on (`IFF_PROMISC`).
    pub promiscuous: bool,
    /// Whether it receives all multicast packets (`IFF_ALLMULTI`).
    pub all_multicast: bool,
    /// The index of its parent link or of its veth peer.
    pub parent: Option<u32>,
    /// The length of the transmit queue in packets.
    pub queue: u32,
    /// The alias (`ip link set alias`); may be empty.
    pub alias: String,
    /// Whether its operational state allows traffic.
    pub is_operational: bool,
    /// The attributes of its kind (`IFLA_INFO_DATA`), encoded.
    pub data: Vec<u8>,
    /// Whether it is a bridge port in hairpin mode, which may send frames back to their sender.
    pub hairpin: bool,
    /// Whether it is an isolated bridge port, which exchanges no frames with other isolated ports.
    pub isolated: bool,
}

impl Link {
    /// The attribute `kind` of [`Link::data`], read as a number of one, two or four bytes.
    #[must_use]
    pub fn option(&self, kind: u16) -> Option<u32> {
        let value = attributes(&self.data)
            .find(|(k, _)| *k == kind)
            .map(|(_, v)| v)?;
        if let [byte] = value {
            return Some((*byte).into());
        }
        <[u8; 2]>::try_from(value)
            .ok()
            .map(|b| u16::from_ne_bytes(b).into())
            .or_else(|| number(value))
    }
}

/// The text of a hardware address.
#[must_use]
pub fn mac_text(bytes: &[u8]) -> String {
    bytes
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect::<Vec<_>>()
        .join(":")
}

/// Parses a hardware address.
#[must_use]
pub fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Vec<u8> = text
        .split([':', '-'])
        .map(|p| u8::from_str_radix(p, 16))
        .collect::<Result<_, _>>()
        .ok()?;
    bytes.try_into().ok()
}

/// A random, locally administered hardware address. An explicitly
/// set address keeps udev and the bridge from changing it.
pub fn random_mac() -> io::Result<[u8; 6]> {
    let mut mac = [0; 6];
    crate::random(&mut mac)?;
    mac[0] = (mac[0] | 0x02) & 0xfe;
    Ok(mac)
}

pub(crate) fn header(family: u8, index: u32, flags: u32, change: u32) -> Vec<u8> {
    let mut bytes = vec![family, 0, 0, 0];
    bytes.extend_from_slice(&index.to_ne_bytes());
    bytes.extend_from_slice(&flags.to_ne_bytes());
    bytes.extend_from_slice(&change.to_ne_bytes());
    bytes
}

pub(crate) fn number(bytes: &[u8]) -> Option<u32> {
    bytes.get(..4)?.try_into().ok().map(u32::from_ne_bytes)
}

/// Reads the flags of a bridge port. The ports of other kinds of links have other attributes with these numbers, so callers
/// check the kind of the master.
fn read_port(data: &[u8], link: &mut Link) {
    for (kind, value) in attributes(data) {
        match kind {
            IFLA_BRPORT_MODE => link.hairpin = value == [1],
            IFLA_BRPORT_ISOLATED => link.isolated = value == [1],
            _ => {}
        }
    }
}

fn parse_link(body: &[u8]) -> Option<Link> {
    let index = number(body.get(4..)?)?;
    let flags = number(body.get(8..)?)?;
    let mut link = Link {
        index,
        up: flags & IFF_UP != 0,
        promiscuous: flags & IFF_PROMISC != 0,
        all_multicast: flags & IFF_ALLMULTI != 0,
        ..Link::default()
    };
    for (kind, value) in attributes(body.get(16..)?) {
        match kind {
            IFLA_IFNAME => link.name = text(value),
            IFLA_ADDRESS => link.mac = mac_text(value),
            IFLA_MTU => link.mtu = number(value).unwrap_or(0),
            IFLA_MASTER => link.master = number(value),
            IFLA_LINK => link.parent = number(value),
            IFLA_TXQLEN => link.queue = number(value).unwrap_or(0),
            IFLA_IFALIAS => link.alias = text(value),
            IFLA_OPERSTATE => link.is_operational = value == [6],
            IFLA_LINKINFO => {
                for (kind, value) in attributes(value) {
                    match kind {
                        IFLA_INFO_KIND => link.kind = text(value),
                        IFLA_INFO_DATA => value.clone_into(&mut link.data),
                        IFLA_INFO_SLAVE_DATA => read_port(value, &mut link),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    Some(link)
}

/// The parameters of a veth pair.
pub struct VethPlan<'a> {
    /// The name of the host end.
    pub host_name: &'a str,
    /// The hardware address of the host end.
    pub host_mac: [u8; 6],
    /// The name of the container end.
    pub peer_name: &'a str,
    /// The hardware address of the container end.
    pub peer_mac: [u8; 6],
    /// The container's network namespace.
    pub namespace: &'a File,
    /// The MTU of both ends; 0 means the kernel's default.
    pub mtu: u32,
    /// The index of the bridge that the host end joins.
    pub master: Option<u32>,
}

/// The parameters of a new link.
#[derive(Default)]
pub struct LinkPlan<'a> {
    /// The name.
    pub name: &'a str,
    /// The kind, for instance `macvlan`.
    pub kind: &'a str,
    /// The attributes of the kind (`IFLA_INFO_DATA`).
    pub data: Attributes,
    /// The index of the parent link, in the namespace of the socket.
    pub parent: Option<u32>,
    /// The namespace for the new link; `None` means that of the socket.
    pub namespace: Option<&'a File>,
    /// The MTU; 0 means the kernel's default.
    pub mtu: u32,
    /// The hardware address; `None` means that the kernel chooses one.
    pub mac: Option<[u8; 6]>,
}

/// Changes to a link. `None` leaves a property unchanged.
#[derive(Debug, Clone, Copy, Default)]
pub struct Change<'a> {
    /// The name.
    pub name: Option<&'a str>,
    /// The hardware address.
    pub mac: Option<[u8; 6]>,
    /// The MTU.
    pub mtu: Option<u32>,
    /// The length of the transmit queue in packets.
    pub queue: Option<u32>,
    /// Whether the link is administratively up.
    pub up: Option<bool>,
    /// Whether promiscuous mode is on.
    pub promiscuous: Option<bool>,
    /// Whether the link receives all multicast packets.
    pub all_multicast: Option<bool>,
    /// The alias; an empty string removes it.
    pub alias: Option<&'a str>,
    /// The index of the bridge or VRF to join; 0 detaches the link from its present one.
    pub master: Option<u32>,
    /// The namespace to move to.
    pub namespace: Option<&'a File>,
}

impl Socket {
    /// Creates a link in the state down.
    pub fn add_link(&mut self, plan: &LinkPlan<'_>) -> io::Result<()> {
        let mut message =
            Message::new(NEW_LINK, REQUEST | ACK | CREATE | EXCL, &header(0, 0, 0, 0))
                .text(IFLA_IFNAME, plan.name);
        if let Some(parent) = plan.parent {
            message = message.number(IFLA_LINK, parent);
        }
        if let Some(mac) = plan.mac {
            message = message.put(IFLA_ADDRESS, &mac);
        }
        if plan.mtu > 0 {
            message = message.number(IFLA_MTU, plan.mtu);
        }
        if let Some(namespace) = plan.namespace {
            message = message.put(IFLA_NET_NS_FD, &namespace.as_raw_fd().to_ne_bytes());
        }
        let mut info = Attributes::new().text(IFLA_INFO_KIND, plan.kind);
        if !plan.data.is_empty() {
            info = info.nest(IFLA_INFO_DATA, &plan.data);
        }
        self.execute(message.nest(IFLA_LINKINFO, &info))
    }

    /// Whether the kernel supports a kind of link. Tries to create
    /// a link with an invalid name, so that none is created.
    pub fn knows(&mut self, kind: &str) -> io::Result<bool> {
        const IMPOSSIBLE: &str = "a/b";
        match self.add_link(&LinkPlan {
            name: IMPOSSIBLE,
            kind,
            ..LinkPlan::default()
        }) {
            Err(error) if error.raw_os_error() == Some(nix::errno::Errno::EOPNOTSUPP as i32) => {
                Ok(false)
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(error),
            _ => Ok(true),
        }
    }

    /// Changes a link in a single message.
    pub fn change_link(&mut self, index: u32, change: Change<'_>) -> io::Result<()> {
        let (mut flags, mut mask) = (0, 0);
        for (wanted, flag) in [
            (change.up, IFF_UP),
            (change.promiscuous, IFF_PROMISC),
            (change.all_multicast, IFF_ALLMULTI),
        ] {
            mask |= if wanted.is_some() { flag } else { 0 };
            flags |= if wanted == Some(true) { flag } else { 0 };
        }
        let mut message = Message::new(NEW_LINK, REQUEST | ACK, &header(0, index, flags, mask));
        for (kind, text) in [(IFLA_IFNAME, change.name), (IFLA_IFALIAS, change.alias)] {
            if let Some(text) = text {
                message = message.text(kind, text);
            }
        }
        for (kind, number) in [
            (IFLA_MTU, change.mtu),
            (IFLA_TXQLEN, change.queue),
            (IFLA_MASTER, change.master),
        ] {
            if let Some(number) = number {
                message = message.number(kind, number);
            }
        }
        if let Some(mac) = change.mac {
            message = message.put(IFLA_ADDRESS, &mac);
        }
        if let Some(namespace) = change.namespace {
            message = message.put(IFLA_NET_NS_FD, &namespace.as_raw_fd().to_ne_bytes());
        }
        self.execute(message)
    }

    /// The link with this index, if it exists.
    pub fn link_at(&mut self, index: u32) -> io::Result<Option<Link>> {
        match self.query(Message::new(GET_LINK, REQUEST, &header(0, index, 0, 0))) {
            Ok(answers) => Ok(answers.first().and_then(|(_, body)| parse_link(body))),
            Err(error) if error.raw_os_error() == Some(nix::errno::Errno::ENODEV as i32) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The link with this name, if it exists.
    pub fn link(&mut self, name: &str) -> io::Result<Option<Link>> {
        let message = Message::new(GET_LINK, REQUEST, &header(0, 0, 0, 0)).text(IFLA_IFNAME, name);
        match self.query(message) {
            Ok(answers) => Ok(answers.first().and_then(|(_, body)| parse_link(body))),
            Err(error) if error.raw_os_error() == Some(nix::errno::Errno::ENODEV as i32) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// All links of the namespace.
    pub fn links(&mut self) -> io::Result<Vec<Link>> {
        let answers = self.query(Message::new(GET_LINK, REQUEST | DUMP, &header(0, 0, 0, 0)))?;
        Ok(answers
            .iter()
            .filter_map(|(_, body)| parse_link(body))
            .collect())
    }

    /// Creates a bridge in the state up, optionally with VLAN filtering. An existing link of that name is an error.
    pub fn add_bridge(
        &mut self,
        name: &str,
        mac: [u8; 6],
        mtu: u32,
        filters_vlans: bool,
    ) -> io::Result<()> {
        let mut info = Attributes::new().text(IFLA_INFO_KIND, "bridge");
        if filters_vlans {
            info = info.nest(
                IFLA_INFO_DATA,
                &Attributes::new().put(IFLA_BR_VLAN_FILTERING, &[1]),
            );
        }
        let mut message = Message::new(
            NEW_LINK,
            REQUEST | ACK | CREATE | EXCL,
            &header(0, 0, IFF_UP, IFF_UP),
        )
        .text(IFLA_IFNAME, name)
        .put(IFLA_ADDRESS, &mac);
        if mtu > 0 {
            message = message.number(IFLA_MTU, mtu);
        }
        self.execute(message.nest(IFLA_LINKINFO, &info))
    }

    /// Creates a veth pair in a single message. The host end is
    /// up and a port of the bridge; the peer is in the container.
    pub fn add_veth(&mut self, plan: &VethPlan<'_>) -> io::Result<()> {
        let mut peer = Attributes::after(header(0, 0, 0, 0))
            .text(IFLA_IFNAME, plan.peer_name)
            .put(IFLA_ADDRESS, &plan.peer_mac);
        peer = peer.put(IFLA_NET_NS_FD, &plan.namespace.as_raw_fd().to_ne_bytes());
        if plan.mtu > 0 {
            peer = peer.put(IFLA_MTU, &plan.mtu.to_ne_bytes());
        }
        let data = Attributes::new().nest(VETH_INFO_PEER, &peer);
        let info = Attributes::new()
            .text(IFLA_INFO_KIND, "veth")
            .nest(IFLA_INFO_DATA, &data);
        let mut message = Message::new(
            NEW_LINK,
            REQUEST | ACK | CREATE | EXCL,
            &header(0, 0, IFF_UP, IFF_UP),
        )
        .text(IFLA_IFNAME, plan.host_name)
        .put(IFLA_ADDRESS, &plan.host_mac);
        if let Some(master) = plan.master {
            message = message.number(IFLA_MASTER, master);
        }
        if plan.mtu > 0 {
            message = message.number(IFLA_MTU, plan.mtu);
        }
        self.execute(message.nest(IFLA_LINKINFO, &info))
    }

    /// Sets a link up or down.
    pub fn set_up(&mut self, index: u32, up: bool) -> io::Result<()> {
        self.execute(Message::new(
            NEW_LINK,
            REQUEST | ACK,
            &header(0, index, if up { IFF_UP } else { 0 }, IFF_UP),
        ))
    }

    /// Turns on promiscuous mode.
    pub fn set_promiscuous(&mut self, index: u32) -> io::Result<()> {
        self.execute(Message::new(
            NEW_LINK,
            REQUEST | ACK,
            &header(0, index, IFF_PROMISC, IFF_PROMISC),
        ))
    }

    /// Sets hairpin mode and isolation of a bridge port.
    pub fn set_port(&mut self, index: u32, hairpin: bool, isolated: bool) -> io::Result<()> {
        let port = Attributes::new()
            .put(IFLA_BRPORT_MODE, &[u8::from(hairpin)])
            .put(IFLA_BRPORT_ISOLATED, &[u8::from(isolated)]);
        self.execute(
            Message::new(SET_LINK, REQUEST | ACK, &header(AF_BRIDGE, index, 0, 0))
                .nest(IFLA_PROTINFO, &port),
        )
    }

    /// Deletes a link. A missing link is no error.
    pub fn delete_link(&mut self, name: &str) -> io::Result<()> {
        let message =
            Message::new(DEL_LINK, REQUEST | ACK, &header(0, 0, 0, 0)).text(IFLA_IFNAME, name);
        match self.execute(message) {
            Err(error) if error.raw_os_error() == Some(nix::errno::Errno::ENODEV as i32) => Ok(()),
            other => other,
        }
    }

    fn address_message(kind: u16, flags: u16, index: u32, address: IpNet, more: u32) -> Message {
        let (family, bytes) = octets(address.addr());
        let nodad = if address.addr().is_ipv6() { NODAD } else { 0 };
        let mut head = vec![family, address.prefix_len(), nodad, 0];
        head.extend_from_slice(&index.to_ne_bytes());
        let mut message = Message::new(kind, flags, &head)
            .put(2, &bytes)
            .put(1, &bytes);
        if more != 0 {
            // Replaces the flags of the header, which have only eight bits.
            message = message.number(IFA_FLAGS, more | u32::from(nodad));
        }
        if let IpNet::V4(net) = address
            && net.prefix_len() < 31
        {
            message = message.put(4, &net.broadcast().octets());
        }
        message
    }

    /// Adds an address. IPv6 addresses skip duplicate address detection, because the IPAM plugin guarantees uniqueness.
    pub fn add_address(&mut self, index: u32, address: IpNet) -> io::Result<()> {
        self.execute(Self::address_message(
            NEW_ADDR,
            REQUEST | ACK | CREATE | EXCL,
            index,
            address,
            0,
        ))
    }

    /// Like [`Socket::add_address`], but without a route to the address's network.
    pub fn add_lone_address(&mut self, index: u32, address: IpNet) -> io::Result<()> {
        self.execute(Self::address_message(
            NEW_ADDR,
            REQUEST | ACK | CREATE | EXCL,
            index,
            address,
            NO_PREFIX_ROUTE,
        ))
    }

    /// Removes an address.
    pub fn delete_address(&mut self, index: u32, address: IpNet) -> io::Result<()> {
        self.execute(Self::address_message(
            DEL_ADDR,
            REQUEST | ACK,
            index,
            address,
            0,
        ))
    }

    /// The addresses of a link, except link-local IPv6 addresses.
    pub fn addresses(&mut self, index: u32) -> io::Result<Vec<IpNet>> {
        let all = self.all_addresses()?.into_iter();
        Ok(all
            .filter(|(owner, _)| *owner == index)
            .map(|(_, address)| address)
            .collect())
    }

    /// The addresses of all links, each with the index of its link, except link-local IPv6 addresses.
    ///
    /// # Errors
    ///
    /// The kernel's answer is an error, or is lost.
    pub fn all_addresses(&mut self) -> io::Result<Vec<(u32, IpNet)>> {
        let answers = self.query(Message::new(GET_ADDR, REQUEST | DUMP, &[0; 8]))?;
        let mut found = Vec::new();
        for (_, body) in answers {
            let (Some(prefix), Some(owner)) = (body.get(1), body.get(4..).and_then(number)) else {
                continue;
            };
            let mut address = None;
            for (kind, value) in attributes(body.get(8..).unwrap_or_default()) {
                // IFA_LOCAL, if present, is the link's own address; IFA_ADDRESS is then the peer's.
                if kind == 2 || (kind == 1 && address.is_none()) {
                    address = ip(value);
                }
            }
            let local =
                |a: &IpAddr| matches!(a, IpAddr::V6(a) if a.segments()[0] & 0xffc0 == 0xfe80);
            if let Some(address) = address
                .filter(|a| !local(a))
                .and_then(|a| IpNet::new(a, *prefix).ok())
            {
                found.push((owner, address));
            }
        }
        Ok(found)
    }
}

pub(crate) fn octets(address: IpAddr) -> (u8, Vec<u8>) {
    match address {
        IpAddr::V4(a) => (2, a.octets().to_vec()),
        IpAddr::V6(a) => (10, a.octets().to_vec()),
    }
}

pub(crate) fn ip(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        16 => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
        _ => None,
    }
}
