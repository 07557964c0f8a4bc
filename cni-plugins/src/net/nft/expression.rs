//! The expressions that rules are made of.

use std::net::IpAddr;

use ipnet::IpNet;

use super::super::netlink::Attributes;

fn expression(name: &str, data: &Attributes) -> Attributes {
    Attributes::new().text(1, name).nest(2, data)
}

fn value(bytes: &[u8]) -> Attributes {
    Attributes::new().put(1, bytes)
}

/// The bytes of an address as they are on the wire.
#[must_use]
pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

fn compare(bytes: &[u8], equal: bool) -> Attributes {
    expression(
        "cmp",
        &Attributes::new()
            .big(1, 1)
            .big(2, u32::from(!equal))
            .nest(3, &value(bytes)),
    )
}

fn payload(base: u32, offset: u32, length: u32) -> Attributes {
    expression(
        "payload",
        &Attributes::new()
            .big(1, 1)
            .big(2, base)
            .big(3, offset)
            .big(4, length),
    )
}

fn meta(key: u32) -> Attributes {
    expression("meta", &Attributes::new().big(2, key).big(1, 1))
}

/// `meta nfproto` is IPv4 or IPv6.
#[must_use]
pub fn family_is(v4: bool) -> Vec<Attributes> {
    vec![meta(15), compare(&[if v4 { 2 } else { 10 }], true)]
}

/// The protocol above IP.
#[must_use]
pub fn protocol_is(number: u8) -> Vec<Attributes> {
    vec![meta(16), compare(&[number], true)]
}

/// The port that it is for.
#[must_use]
pub fn port_is(port: u16) -> Vec<Attributes> {
    vec![payload(2, 2, 2), compare(&port.to_be_bytes(), true)]
}

/// The interface that it came in by, or goes out by.
#[must_use]
pub fn interface_is(incoming: bool, name: &str, equal: bool) -> Vec<Attributes> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.push(0);
    vec![meta(if incoming { 6 } else { 7 }), compare(&bytes, equal)]
}

/// The hardware address that sent it.
#[must_use]
pub fn sender_is(mac: [u8; 6]) -> Vec<Attributes> {
    vec![payload(0, 6, 6), compare(&mac, true)]
}

/// Source or destination compared with a network.
#[must_use]
pub fn address_is(source: bool, net: IpNet, equal: bool) -> Vec<Attributes> {
    let offset = match (net, source) {
        (IpNet::V4(_), true) => 12,
        (IpNet::V4(_), false) => 16,
        (IpNet::V6(_), true) => 8,
        (IpNet::V6(_), false) => 24,
    };
    let bytes = octets(net.network());
    let length = u32::try_from(bytes.len()).unwrap_or(4);
    let mut list = vec![payload(1, offset, length)];
    if net.prefix_len() < net.max_prefix_len() {
        let zero = vec![0; bytes.len()];
        let mask = octets(net.netmask());
        list.push(expression(
            "bitwise",
            &Attributes::new()
                .big(1, 1)
                .big(2, 1)
                .big(3, length)
                .nest(4, &value(&mask))
                .nest(5, &value(&zero)),
        ));
    }
    list.push(compare(&bytes, equal));
    list
}

/// It is for an address of this host.
#[must_use]
pub fn for_this_host() -> Vec<Attributes> {
    const LOCAL: u32 = 2;
    vec![
        expression("fib", &Attributes::new().big(1, 1).big(2, 3).big(3, 2)),
        compare(&LOCAL.to_ne_bytes(), true),
    ]
}

fn immediate(register: u32, data: &Attributes) -> Attributes {
    expression(
        "immediate",
        &Attributes::new().big(1, register).nest(2, data),
    )
}

/// What becomes of a packet.
#[derive(Debug, Clone, Copy)]
pub enum Verdict<'a> {
    /// It is lost.
    Drop,
    /// This base chain lets it pass.
    Accept,
    /// Back to the chain that it came from.
    Return,
    /// On in another chain, and back from there.
    Jump(&'a str),
    /// On in another chain.
    Goto(&'a str),
}

/// A verdict.
#[must_use]
pub fn verdict(verdict: Verdict<'_>) -> Attributes {
    let (code, chain): (i32, _) = match verdict {
        Verdict::Drop => (0, None),
        Verdict::Accept => (1, None),
        Verdict::Jump(chain) => (-3, Some(chain)),
        Verdict::Goto(chain) => (-4, Some(chain)),
        Verdict::Return => (-5, None),
    };
    let mut data = Attributes::new().big(1, code.cast_unsigned());
    if let Some(chain) = chain {
        data = data.text(2, chain);
    }
    immediate(0, &Attributes::new().nest(2, &data))
}

/// Its source becomes an address of this host.
#[must_use]
pub fn masquerade() -> Attributes {
    expression("masq", &Attributes::new())
}

/// Its destination becomes another.
#[must_use]
pub fn redirect(address: IpAddr, port: u16) -> Vec<Attributes> {
    let family = if address.is_ipv4() { 2 } else { 10 };
    let nat = Attributes::new()
        .big(1, 1)
        .big(2, family)
        .big(3, 1)
        .big(5, 2);
    vec![
        immediate(1, &value(&octets(address))),
        immediate(2, &value(&port.to_be_bytes())),
        expression("nat", &nat),
    ]
}

/// What iptables counts.
#[must_use]
pub fn counter() -> Attributes {
    expression("counter", &Attributes::new())
}

/// A match of iptables that has no expression of its own there.
#[must_use]
pub fn extension(name: &str, revision: u32, info: &[u8]) -> Attributes {
    expression(
        "match",
        &Attributes::new()
            .text(1, name)
            .big(2, revision)
            .put(3, info),
    )
}
