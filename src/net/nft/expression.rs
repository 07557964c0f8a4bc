//! The expressions of nftables rules.

use std::net::IpAddr;

use ipnet::IpNet;

use super::numbers::{self as nf, *};
use crate::netlink::Attributes;

fn expression(name: &str, data: &Attributes) -> Attributes {
    Attributes::new()
        .text(expr::NAME, name)
        .nest(expr::DATA, data)
}

fn value(bytes: &[u8]) -> Attributes {
    Attributes::new().put(nf::data::VALUE, bytes)
}

/// The bytes of an address in network byte order.
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
            .big(cmp::SREG, REG_1)
            .big(cmp::OP, if equal { CMP_EQ } else { CMP_NEQ })
            .nest(cmp::DATA, &value(bytes)),
    )
}

fn payload(base: u32, offset: u32, length: u32) -> Attributes {
    expression(
        "payload",
        &Attributes::new()
            .big(nf::payload::DREG, REG_1)
            .big(nf::payload::BASE, base)
            .big(nf::payload::OFFSET, offset)
            .big(nf::payload::LEN, length),
    )
}

fn meta(key: u32) -> Attributes {
    expression(
        "meta",
        &Attributes::new()
            .big(nf::meta::KEY, key)
            .big(nf::meta::DREG, REG_1),
    )
}

/// Matches IPv4 or IPv6 packets (`meta nfproto`).
#[must_use]
pub fn family_is(v4: bool) -> Vec<Attributes> {
    vec![
        meta(META_NFPROTO),
        compare(&[if v4 { IPV4 } else { IPV6 }], true),
    ]
}

/// Matches the transport protocol (`meta l4proto`).
#[must_use]
pub fn protocol_is(number: u8) -> Vec<Attributes> {
    vec![meta(META_L4PROTO), compare(&[number], true)]
}

/// Matches the destination port.
#[must_use]
pub fn port_is(port: u16) -> Vec<Attributes> {
    vec![
        payload(PAYLOAD_TRANSPORT_HEADER, 2, 2),
        compare(&port.to_be_bytes(), true),
    ]
}

/// Matches the incoming or outgoing interface.
#[must_use]
pub fn interface_is(incoming: bool, name: &str, equal: bool) -> Vec<Attributes> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.push(0);
    vec![
        meta(if incoming { META_IIFNAME } else { META_OIFNAME }),
        compare(&bytes, equal),
    ]
}

/// Matches the source hardware address.
#[must_use]
pub fn sender_is(mac: [u8; 6]) -> Vec<Attributes> {
    vec![payload(PAYLOAD_LL_HEADER, 6, 6), compare(&mac, true)]
}

/// Matches the source or destination address against a network.
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
    let mut list = vec![payload(PAYLOAD_NETWORK_HEADER, offset, length)];
    if net.prefix_len() < net.max_prefix_len() {
        let zero = vec![0; bytes.len()];
        let mask = octets(net.netmask());
        list.push(expression(
            "bitwise",
            &Attributes::new()
                .big(bitwise::SREG, REG_1)
                .big(bitwise::DREG, REG_1)
                .big(bitwise::LEN, length)
                .nest(bitwise::MASK, &value(&mask))
                .nest(bitwise::XOR, &value(&zero)),
        ));
    }
    list.push(compare(&bytes, equal));
    list
}

/// Matches packets to an address of this host (`fib daddr type local`).
#[must_use]
pub fn for_this_host() -> Vec<Attributes> {
    /// `RTN_LOCAL`.
    const LOCAL: u32 = 2;
    vec![
        expression(
            "fib",
            &Attributes::new()
                .big(fib::DREG, REG_1)
                .big(fib::RESULT, FIB_RESULT_ADDRTYPE)
                .big(fib::FLAGS, FIB_DADDR),
        ),
        compare(&LOCAL.to_ne_bytes(), true),
    ]
}

fn immediate(register: u32, data: &Attributes) -> Attributes {
    expression(
        "immediate",
        &Attributes::new()
            .big(nf::immediate::DREG, register)
            .nest(nf::immediate::DATA, data),
    )
}

/// The verdict of a rule.
#[derive(Debug, Clone, Copy)]
pub enum Verdict<'a> {
    /// Discards the packet.
    Drop,
    /// Ends the base chain; the packet passes.
    Accept,
    /// Returns to the calling chain.
    Return,
    /// Continues in another chain, and returns afterwards.
    Jump(&'a str),
    /// Continues in another chain, and does not return.
    Goto(&'a str),
}

/// A statement with this verdict.
#[must_use]
pub fn verdict(verdict: Verdict<'_>) -> Attributes {
    let (code, chain): (i32, _) = match verdict {
        Verdict::Drop => (NF_DROP, None),
        Verdict::Accept => (NF_ACCEPT, None),
        Verdict::Jump(chain) => (NFT_JUMP, Some(chain)),
        Verdict::Goto(chain) => (NFT_GOTO, Some(chain)),
        Verdict::Return => (NFT_RETURN, None),
    };
    let mut data = Attributes::new().big(nf::verdict::CODE, code.cast_unsigned());
    if let Some(chain) = chain {
        data = data.text(nf::verdict::CHAIN, chain);
    }
    immediate(
        REG_VERDICT,
        &Attributes::new().nest(nf::data::VERDICT, &data),
    )
}

/// Source NAT to an address of the outgoing interface.
#[must_use]
pub fn masquerade() -> Attributes {
    expression("masq", &Attributes::new())
}

/// Destination NAT to an address and port.
#[must_use]
pub fn redirect(address: IpAddr, port: u16) -> Vec<Attributes> {
    let family = if address.is_ipv4() { IPV4 } else { IPV6 };
    let translation = Attributes::new()
        .big(nat::TYPE, NAT_DNAT)
        .big(nat::FAMILY, family.into())
        .big(nat::REG_ADDR_MIN, REG_1)
        .big(nat::REG_PROTO_MIN, REG_2);
    vec![
        immediate(REG_1, &value(&octets(address))),
        immediate(REG_2, &value(&port.to_be_bytes())),
        expression("nat", &translation),
    ]
}

/// A counter, which iptables adds to its rules.
#[must_use]
pub fn counter() -> Attributes {
    expression("counter", &Attributes::new())
}

/// An xtables match that has no native expression.
#[must_use]
pub fn extension(name: &str, revision: u32, info: &[u8]) -> Attributes {
    expression(
        "match",
        &Attributes::new()
            .text(xt_match::NAME, name)
            .big(xt_match::REV, revision)
            .put(xt_match::INFO, info),
    )
}
