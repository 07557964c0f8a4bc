//! Routes, and the rules that select a routing table.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::link::{ip, number, octets};
use crate::netlink::{
    ACK, APPEND, Attributes, CREATE, DUMP, EXCL, Message, REQUEST, Socket, attributes, nested,
};

const NEW_ROUTE: u16 = 24;
const DEL_ROUTE: u16 = 25;
const GET_ROUTE: u16 = 26;
const NEW_RULE: u16 = 32;
const DEL_RULE: u16 = 33;
const GET_RULE: u16 = 34;

const MAIN: u32 = 254;
const UNIVERSE: u8 = 0;
const LINK: u8 = 253;
const UNICAST: u8 = 1;
const LOCAL: u8 = 2;
/// The table of the machine's own addresses.
const LOCAL_TABLE: u8 = 255;
const HOST: u8 = 254;
const METRICS: u16 = 8;
const METRIC_MTU: u16 = 2;
const METRIC_ADVMSS: u16 = 8;
const ENCAP_TYPE: u16 = 21;
const ENCAP: u16 = 22;
/// Types of encapsulation (`linux/lwtunnel.h`): in an IPv4 and in an IPv6 packet.
const IN_IPV4: u16 = 2;
const IN_IPV6: u16 = 4;
/// Attributes of both: the number of the virtual network (eight bytes), and the receiver's address.
const TUNNEL_ID: u16 = 1;
const TUNNEL_DESTINATION: u16 = 2;

/// A route through a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The destination network.
    pub destination: IpNet,
    /// The next hop.
    pub gateway: Option<IpAddr>,
    /// The metric; lower numbers are preferred.
    pub priority: Option<u32>,
    /// The routing table; 254 is the main table.
    pub table: u32,
    /// The scope. `None` means global for a route with a gateway, and link for others.
    pub scope: Option<u8>,
    /// The index of the link.
    pub link: u32,
    /// The MTU of the path.
    pub mtu: Option<u32>,
    /// The advertised maximum segment size.
    pub advmss: Option<u32>,
    /// The preferred source address.
    pub source: Option<IpAddr>,
    /// The origin (`rtm_protocol`); 2 means the kernel.
    pub maker: u8,
    /// How the link, a tunnel without a receiver of its own (`external`), encapsulates the packets.
    pub tunnel: Option<Tunnel>,
}

/// The encapsulation of a route's packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tunnel {
    /// The number of the virtual network (VNI).
    pub id: u32,
    /// The receiver.
    pub remote: IpAddr,
}

impl Tunnel {
    fn put_into(self, message: Message) -> Message {
        let kind = if self.remote.is_ipv4() {
            IN_IPV4
        } else {
            IN_IPV6
        };
        let encapsulation = Attributes::new()
            .put(TUNNEL_ID, &u64::from(self.id).to_be_bytes())
            .put(TUNNEL_DESTINATION, &octets(self.remote).1);
        message
            .put(ENCAP_TYPE, &kind.to_ne_bytes())
            .nest(ENCAP, &encapsulation)
    }

    fn parse(encapsulation: &[u8]) -> Option<Tunnel> {
        let id = nested(encapsulation, TUNNEL_ID)?;
        let id = u64::from_be_bytes(id.try_into().ok()?);
        Some(Tunnel {
            id: u32::try_from(id).ok()?,
            remote: ip(nested(encapsulation, TUNNEL_DESTINATION)?)?,
        })
    }
}

impl Route {
    /// A route of the main table without further properties.
    #[must_use]
    pub fn new(link: u32, destination: IpNet, gateway: Option<IpAddr>) -> Route {
        const BOOT: u8 = 3;
        Route {
            destination,
            gateway,
            link,
            priority: None,
            table: MAIN,
            scope: None,
            mtu: None,
            advmss: None,
            source: None,
            maker: BOOT,
            tunnel: None,
        }
    }

    fn message(&self, kind: u16, flags: u16) -> Message {
        let (family, bytes) = octets(self.destination.network());
        let scope = self.scope.unwrap_or(if self.gateway.is_some() {
            UNIVERSE
        } else {
            LINK
        });
        let table = u8::try_from(self.table).unwrap_or(0);
        let head = [
            family,
            self.destination.prefix_len(),
            0,
            0,
            table,
            self.maker,
            scope,
            UNICAST,
            0,
            0,
            0,
            0,
        ];
        let mut message = Message::new(kind, flags, &head)
            .number(4, self.link)
            .number(15, self.table);
        if self.destination.prefix_len() > 0 {
            message = message.put(1, &bytes);
        }
        for (kind, address) in [(5, self.gateway), (7, self.source)] {
            if let Some(address) = address {
                message = message.put(kind, &octets(address).1);
            }
        }
        if let Some(priority) = self.priority {
            message = message.number(6, priority);
        }
        if let Some(tunnel) = self.tunnel {
            message = tunnel.put_into(message);
        }
        let mut metrics = Attributes::new();
        for (kind, metric) in [(METRIC_MTU, self.mtu), (METRIC_ADVMSS, self.advmss)] {
            if let Some(metric) = metric {
                metrics = metrics.number(kind, metric);
            }
        }
        if metrics.is_empty() {
            message
        } else {
            message.nest(METRICS, &metrics)
        }
    }
}

fn parse(body: &[u8]) -> Option<Route> {
    let (&family, &prefix, &table, &maker, &scope, &kind) = (
        body.first()?,
        body.get(1)?,
        body.get(4)?,
        body.get(5)?,
        body.get(6)?,
        body.get(7)?,
    );
    if kind != UNICAST {
        return None;
    }
    let any: IpAddr = if family == 2 {
        IpAddr::from([0u8; 4])
    } else {
        IpAddr::from([0u8; 16])
    };
    let mut route = Route {
        table: table.into(),
        scope: Some(scope),
        maker,
        ..Route::new(0, IpNet::new(any, prefix).ok()?, None)
    };
    for (kind, value) in attributes(body.get(12..)?) {
        match kind {
            1 => route.destination = IpNet::new(ip(value)?, prefix).ok()?,
            4 => route.link = number(value)?,
            5 => route.gateway = ip(value),
            6 => route.priority = number(value),
            7 => route.source = ip(value),
            15 => route.table = number(value)?,
            ENCAP => route.tunnel = Tunnel::parse(value),
            METRICS => {
                for (kind, value) in attributes(value) {
                    match kind {
                        METRIC_MTU => route.mtu = number(value),
                        METRIC_ADVMSS => route.advmss = number(value),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    Some(route)
}

impl Socket {
    /// Adds a route. An existing identical route is no error.
    pub fn add_route(&mut self, route: &Route) -> io::Result<()> {
        match self.execute(route.message(NEW_ROUTE, REQUEST | ACK | CREATE | APPEND)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    }

    /// Deletes a route.
    pub fn delete_route(&mut self, route: &Route) -> io::Result<()> {
        self.execute(route.message(DEL_ROUTE, REQUEST | ACK))
    }

    /// The routes of all tables, except those to addresses of this host.
    pub fn routes(&mut self) -> io::Result<Vec<Route>> {
        let answers = self.query(Message::new(GET_ROUTE, REQUEST | DUMP, &[0; 12]))?;
        Ok(answers.iter().filter_map(|(_, body)| parse(body)).collect())
    }

    /// The index of the outgoing link for an address, if there is a route.
    pub fn link_to(&mut self, address: IpAddr) -> io::Result<Option<u32>> {
        let (family, bytes) = octets(address);
        let length = if address.is_ipv4() { 32 } else { 128 };
        let answers = match self.query(
            Message::new(
                GET_ROUTE,
                REQUEST,
                &[family, length, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            )
            .put(1, &bytes),
        ) {
            Err(error)
                if [
                    io::ErrorKind::NetworkUnreachable,
                    io::ErrorKind::HostUnreachable,
                ]
                .contains(&error.kind()) =>
            {
                return Ok(None);
            }
            answers => answers?,
        };
        Ok(answers
            .first()
            .and_then(|(_, body)| parse(body))
            .map(|r| r.link))
    }

    /// The index of the link of the default route. IPv4 takes precedence over IPv6.
    pub fn default_link(&mut self) -> io::Result<Option<u32>> {
        let mut routes = self.routes()?;
        routes.retain(|r| r.destination.prefix_len() == 0 && r.table == MAIN && r.link != 0);
        routes.sort_by_key(|r| (r.destination.addr().is_ipv6(), r.priority));
        Ok(routes.first().map(|r| r.link))
    }

    /// Makes an address one of this machine's, without a device that has it, as `ip route add local ADDRESS dev lo` does. An
    /// existing route is no error.
    ///
    /// # Errors
    ///
    /// The namespace has no loopback link, or the kernel refuses the route.
    pub fn add_local(&mut self, address: IpAddr) -> io::Result<()> {
        let message = self.local_route(NEW_ROUTE, REQUEST | ACK | CREATE | EXCL, address)?;
        match self.execute(message) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    }

    /// Undoes [`Socket::add_local`]. A missing route is no error.
    ///
    /// # Errors
    ///
    /// The namespace has no loopback link, or the kernel refuses.
    pub fn delete_local(&mut self, address: IpAddr) -> io::Result<()> {
        let message = self.local_route(DEL_ROUTE, REQUEST | ACK, address)?;
        match self.execute(message) {
            Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => Ok(()),
            other => other,
        }
    }

    fn local_route(&mut self, kind: u16, flags: u16, address: IpAddr) -> io::Result<Message> {
        const BOOT: u8 = 3;
        let lo = self.link("lo")?.ok_or(io::ErrorKind::NotFound)?;
        let (family, bytes) = octets(address);
        let length = if address.is_ipv4() { 32 } else { 128 };
        let head = [
            family,
            length,
            0,
            0,
            LOCAL_TABLE,
            BOOT,
            HOST,
            LOCAL,
            0,
            0,
            0,
            0,
        ];
        let message = Message::new(kind, flags, &head)
            .put(1, &bytes)
            .number(4, lo.index);
        Ok(message)
    }

    fn source_rule(kind: u16, flags: u16, source: IpAddr, table: u32) -> Message {
        let (family, bytes) = octets(source);
        let length = if source.is_ipv4() { 32 } else { 128 };
        let head = [
            family,
            0,
            length,
            0,
            u8::try_from(table).unwrap_or(0),
            0,
            0,
            1,
            0,
            0,
            0,
            0,
        ];
        Message::new(kind, flags, &head)
            .put(2, &bytes)
            .number(15, table)
    }

    /// Adds a rule: packets from `source` use this routing table. An existing rule is no error.
    pub fn add_rule(&mut self, source: IpAddr, table: u32) -> io::Result<()> {
        match self.execute(Self::source_rule(
            NEW_RULE,
            REQUEST | ACK | CREATE | EXCL,
            source,
            table,
        )) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    }

    /// Deletes the rule for packets from `source`.
    pub fn delete_rule(&mut self, source: IpAddr, table: u32) -> io::Result<()> {
        self.execute(Self::source_rule(DEL_RULE, REQUEST | ACK, source, table))
    }

    /// The rules for single source addresses: the address and the table.
    pub fn source_rules(&mut self) -> io::Result<Vec<(IpAddr, u32)>> {
        let mut rules = vec![];
        for (_, body) in self.query(Message::new(GET_RULE, REQUEST | DUMP, &[0; 12]))? {
            let (Some(length), Some(&table)) = (body.get(2), body.get(4)) else {
                continue;
            };
            let (mut source, mut table) = (None, u32::from(table));
            for (kind, value) in attributes(body.get(12..).unwrap_or_default()) {
                match kind {
                    2 => source = ip(value),
                    15 => table = number(value).unwrap_or(table),
                    _ => {}
                }
            }
            if let Some(source) = source.filter(|s| *length == if s.is_ipv4() { 32 } else { 128 }) {
                rules.push((source, table));
            }
        }
        Ok(rules)
    }
}
