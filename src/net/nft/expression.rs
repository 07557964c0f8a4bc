//! Expressions that load and compare fields of packets.
//!
//! An expression reads or writes registers. The kernel has 16 registers of 4 bytes; a field of more bytes takes several, and a
//! key of several fields takes the registers one after the other.

use std::net::IpAddr;

use ipnet::IpNet;

use super::numbers::{
    self as nf, CMP_EQ, CMP_NEQ, CT_DIRECTION, CT_DST_IP, CT_DST_IP6, CT_MARK, CT_PROTO_DST,
    CT_STATE, CT_STATUS, FIB_DADDR, FIB_RESULT_ADDRTYPE, FIB_SADDR, IPV4, IPV6, META_IIFNAME,
    META_L4PROTO, META_MARK, META_NFPROTO, META_OIFNAME, NG_INCREMENTAL, NG_RANDOM,
    PAYLOAD_LL_HEADER, PAYLOAD_NETWORK_HEADER, PAYLOAD_TRANSPORT_HEADER, REG32_00, bitwise, cmp,
    ct, expr, fib, numgen, xt_match,
};
use super::set::Set;
use super::value::IpVersion;
use crate::netlink::Attributes;

/// A register of 4 bytes, or several from this one on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Register(u32);

impl Register {
    /// The first register.
    pub(super) const FIRST: Register = Register(REG32_00);

    /// The register after a value of this width. The kernel rejects registers after the last one.
    pub(super) fn after(self, width: usize) -> Register {
        let words = u32::try_from(width.div_ceil(4)).unwrap_or(u32::MAX);
        Register(self.0.saturating_add(words))
    }

    /// The number in the kernel.
    pub(super) fn number(self) -> u32 {
        self.0
    }
}

pub(super) fn expression(name: &str, data: &Attributes) -> Attributes {
    Attributes::new()
        .text(expr::NAME, name)
        .nest(expr::DATA, data)
}

pub(super) fn value(bytes: &[u8]) -> Attributes {
    Attributes::new().put(nf::data::VALUE, bytes)
}

/// Loads data into a register.
pub(super) fn immediate(register: u32, data: &Attributes) -> Attributes {
    expression(
        "immediate",
        &Attributes::new()
            .big(nf::immediate::DREG, register)
            .nest(nf::immediate::DATA, data),
    )
}

/// The bytes of an address in network byte order.
#[must_use]
pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

/// A field of a packet or of its connection, or a number that the kernel computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    /// The source address. In a table of the family `Inet`, a rule must match the version first ([`family_is`]), or else it
    /// takes other bytes of packets of the other version for the address.
    Source(IpVersion),
    /// The destination address. In a table of the family `Inet`, a rule must match the version first.
    Destination(IpVersion),
    /// The source port of TCP, UDP or SCTP.
    SourcePort,
    /// The destination port of TCP, UDP or SCTP.
    DestinationPort,
    /// The number of the transport protocol.
    Protocol,
    /// The version of IP: `NFPROTO_IPV4` or `NFPROTO_IPV6`.
    IpVersion,
    /// The name of the incoming link.
    IncomingInterface,
    /// The name of the outgoing link.
    OutgoingInterface,
    /// The source hardware address.
    SourceHardwareAddress,
    /// The mark of the packet.
    Mark,
    /// The mark of the connection.
    ConnectionMark,
    /// The state of the connection: bits of [`state`].
    ConnectionState,
    /// The status of the connection: bits of [`status`].
    ConnectionStatus,
    /// The direction of the packet in its connection: 0 is the original direction, 1 is that of replies.
    ConnectionDirection,
    /// The destination address of the connection's first packet, before NAT.
    OriginalDestination(IpVersion),
    /// The destination port of the connection's first packet, before NAT.
    OriginalDestinationPort,
    /// The type of the source address for this host (`RTN_…`); 2 is an address of this host.
    SourceType,
    /// The type of the destination address for this host (`RTN_…`); 2 is an address of this host.
    DestinationType,
    /// A number that does not depend on the packet, in the byte order of the machine.
    Constant(u32),
    /// A random number from `offset` on, below `offset + modulus`.
    Random {
        /// How many numbers there are; at least 1.
        modulus: u32,
        /// The first number.
        offset: u32,
    },
    /// A number that grows by one with each packet, from `offset` on and below `offset + modulus`.
    Counter {
        /// How many numbers there are; at least 1.
        modulus: u32,
        /// The first number.
        offset: u32,
    },
}

/// Bits of [`Field::ConnectionState`] (`NF_CT_STATE_BIT`).
pub mod state {
    /// The connection is invalid.
    pub const INVALID: u32 = 1;
    /// The connection has packets in both directions.
    pub const ESTABLISHED: u32 = 2;
    /// The connection belongs to another one.
    pub const RELATED: u32 = 4;
}

/// Bits of [`Field::ConnectionStatus`] (`enum ip_conntrack_status`).
pub mod status {
    /// Source addresses of the connection are translated.
    pub const SNAT: u32 = 1 << 4;
    /// Destination addresses of the connection are translated.
    pub const DNAT: u32 = 1 << 5;
}

impl Field {
    /// The bytes of the field in registers.
    pub(super) fn width(self) -> usize {
        match self {
            Field::Source(version)
            | Field::Destination(version)
            | Field::OriginalDestination(version) => version.address().width(),
            Field::SourcePort | Field::DestinationPort | Field::OriginalDestinationPort => 2,
            Field::Protocol | Field::IpVersion | Field::ConnectionDirection => 1,
            Field::IncomingInterface | Field::OutgoingInterface => 16,
            Field::SourceHardwareAddress => 6,
            Field::Mark
            | Field::ConnectionMark
            | Field::ConnectionState
            | Field::ConnectionStatus
            | Field::SourceType
            | Field::DestinationType
            | Field::Constant(_)
            | Field::Random { .. }
            | Field::Counter { .. } => 4,
        }
    }

    /// An expression that loads the field.
    pub(super) fn load(self, into: Register) -> Attributes {
        const TRANSPORT: u32 = PAYLOAD_TRANSPORT_HEADER;
        let width = u32::try_from(self.width()).unwrap_or(u32::MAX);
        let payload = |base, offset| payload(base, offset, width, into);
        let generator = |kind, modulus, offset| {
            let data = Attributes::new()
                .big(numgen::DREG, into.number())
                .big(numgen::MODULUS, modulus)
                .big(numgen::TYPE, kind)
                .big(numgen::OFFSET, offset);
            expression("numgen", &data)
        };
        match self {
            Field::Source(IpVersion::V4) => payload(PAYLOAD_NETWORK_HEADER, 12),
            Field::Source(IpVersion::V6) => payload(PAYLOAD_NETWORK_HEADER, 8),
            Field::Destination(IpVersion::V4) => payload(PAYLOAD_NETWORK_HEADER, 16),
            Field::Destination(IpVersion::V6) => payload(PAYLOAD_NETWORK_HEADER, 24),
            Field::SourcePort => payload(TRANSPORT, 0),
            Field::DestinationPort => payload(TRANSPORT, 2),
            Field::SourceHardwareAddress => payload(PAYLOAD_LL_HEADER, 6),
            Field::Protocol => meta(META_L4PROTO, into),
            Field::IpVersion => meta(META_NFPROTO, into),
            Field::IncomingInterface => meta(META_IIFNAME, into),
            Field::OutgoingInterface => meta(META_OIFNAME, into),
            Field::Mark => meta(META_MARK, into),
            Field::ConnectionMark => connection(CT_MARK, false, into),
            Field::ConnectionState => connection(CT_STATE, false, into),
            Field::ConnectionStatus => connection(CT_STATUS, false, into),
            Field::ConnectionDirection => connection(CT_DIRECTION, false, into),
            Field::OriginalDestination(IpVersion::V4) => connection(CT_DST_IP, true, into),
            Field::OriginalDestination(IpVersion::V6) => connection(CT_DST_IP6, true, into),
            Field::OriginalDestinationPort => connection(CT_PROTO_DST, true, into),
            Field::SourceType => address_type(FIB_SADDR, into),
            Field::DestinationType => address_type(FIB_DADDR, into),
            Field::Constant(number) => immediate(into.number(), &value(&number.to_ne_bytes())),
            Field::Random { modulus, offset } => generator(NG_RANDOM, modulus, offset),
            Field::Counter { modulus, offset } => generator(NG_INCREMENTAL, modulus, offset),
        }
    }
}

fn payload(base: u32, offset: u32, length: u32, into: Register) -> Attributes {
    let data = Attributes::new()
        .big(nf::payload::DREG, into.number())
        .big(nf::payload::BASE, base)
        .big(nf::payload::OFFSET, offset)
        .big(nf::payload::LEN, length);
    expression("payload", &data)
}

fn meta(key: u32, into: Register) -> Attributes {
    let data = Attributes::new()
        .big(nf::meta::KEY, key)
        .big(nf::meta::DREG, into.number());
    expression("meta", &data)
}

/// Loads a property of the connection; `of_original` is for properties that each direction has.
fn connection(key: u32, of_original: bool, into: Register) -> Attributes {
    let mut data = Attributes::new()
        .big(ct::DREG, into.number())
        .big(ct::KEY, key);
    if of_original {
        data = data.put(ct::DIRECTION, &[0]);
    }
    expression("ct", &data)
}

fn address_type(flag: u32, into: Register) -> Attributes {
    let data = Attributes::new()
        .big(fib::DREG, into.number())
        .big(fib::RESULT, FIB_RESULT_ADDRTYPE)
        .big(fib::FLAGS, flag);
    expression("fib", &data)
}

/// Loads fields into registers one after the other. Returns the register after them, too.
pub(super) fn load(fields: &[Field]) -> (Vec<Attributes>, Register) {
    let mut into = Register::FIRST;
    let mut expressions = vec![];
    for field in fields {
        expressions.push(field.load(into));
        into = into.after(field.width());
    }
    (expressions, into)
}

fn compare(bytes: &[u8], equal: bool) -> Attributes {
    let data = Attributes::new()
        .big(cmp::SREG, Register::FIRST.number())
        .big(cmp::OP, if equal { CMP_EQ } else { CMP_NEQ })
        .nest(cmp::DATA, &value(bytes));
    expression("cmp", &data)
}

/// Replaces the first registers with `(value & mask) ^ xor`.
pub(super) fn combine(mask: &[u8], xor: &[u8]) -> Attributes {
    let length = u32::try_from(mask.len()).unwrap_or(u32::MAX);
    let data = Attributes::new()
        .big(bitwise::SREG, Register::FIRST.number())
        .big(bitwise::DREG, Register::FIRST.number())
        .big(bitwise::LEN, length)
        .nest(bitwise::MASK, &value(mask))
        .nest(bitwise::XOR, &value(xor));
    expression("bitwise", &data)
}

/// Matches packets whose field has these bytes, or has others.
#[must_use]
pub fn field_is(field: Field, bytes: &[u8], equal: bool) -> Vec<Attributes> {
    vec![field.load(Register::FIRST), compare(bytes, equal)]
}

/// Matches packets whose field, a number in the byte order of the machine, has at least one of these bits, or has none.
#[must_use]
pub fn has_bits(field: Field, bits: u32, any: bool) -> Vec<Attributes> {
    let zero = 0_u32.to_ne_bytes();
    vec![
        field.load(Register::FIRST),
        combine(&bits.to_ne_bytes(), &zero),
        compare(&zero, !any),
    ]
}

/// Matches IPv4 or IPv6 packets (`meta nfproto`).
#[must_use]
pub fn family_is(v4: bool) -> Vec<Attributes> {
    field_is(Field::IpVersion, &[if v4 { IPV4 } else { IPV6 }], true)
}

/// Matches the transport protocol (`meta l4proto`).
#[must_use]
pub fn protocol_is(number: u8) -> Vec<Attributes> {
    field_is(Field::Protocol, &[number], true)
}

/// Matches the destination port.
#[must_use]
pub fn port_is(port: u16) -> Vec<Attributes> {
    field_is(Field::DestinationPort, &port.to_be_bytes(), true)
}

/// Matches the incoming or outgoing interface.
#[must_use]
pub fn interface_is(incoming: bool, name: &str, equal: bool) -> Vec<Attributes> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.push(0);
    let field = match incoming {
        true => Field::IncomingInterface,
        false => Field::OutgoingInterface,
    };
    field_is(field, &bytes, equal)
}

/// Matches the source hardware address.
#[must_use]
pub fn sender_is(mac: [u8; 6]) -> Vec<Attributes> {
    field_is(Field::SourceHardwareAddress, &mac, true)
}

/// Matches the source or destination address against a network.
#[must_use]
pub fn address_is(source: bool, net: IpNet, equal: bool) -> Vec<Attributes> {
    let version = IpVersion::of(net.network());
    let field = match source {
        true => Field::Source(version),
        false => Field::Destination(version),
    };
    let mut list = vec![field.load(Register::FIRST)];
    let bytes = octets(net.network());
    if net.prefix_len() < net.max_prefix_len() {
        list.push(combine(&octets(net.netmask()), &vec![0; bytes.len()]));
    }
    list.push(compare(&bytes, equal));
    list
}

/// Matches packets to an address of this host (`fib daddr type local`).
#[must_use]
pub fn for_this_host() -> Vec<Attributes> {
    /// `RTN_LOCAL`.
    const LOCAL: u32 = 2;
    field_is(Field::DestinationType, &LOCAL.to_ne_bytes(), true)
}

/// Searches a set for the first registers. Loads the data of a map into `into`.
pub(super) fn lookup(set: &Set, into: Option<u32>, inverted: bool) -> Attributes {
    let mut data = Attributes::new()
        .text(nf::lookup::SET, &set.name)
        .big(nf::lookup::SREG, Register::FIRST.number());
    if let Some(register) = into {
        data = data.big(nf::lookup::DREG, register);
    }
    if let Some(number) = set.anonymous {
        data = data.big(nf::lookup::SET_ID, number);
    }
    if inverted {
        data = data.big(nf::lookup::FLAGS, nf::lookup::INVERTED);
    }
    expression("lookup", &data)
}

/// Matches packets whose fields are a key of the set, or are none.
#[must_use]
pub fn in_set(fields: &[Field], set: &Set, equal: bool) -> Vec<Attributes> {
    let (mut expressions, _) = load(fields);
    expressions.push(lookup(set, None, !equal));
    expressions
}

/// An xtables match that has no native expression.
#[must_use]
pub fn extension(name: &str, revision: u32, info: &[u8]) -> Attributes {
    xtables("match", name, revision, info)
}

/// An xtables target, for rules that programs of iptables must be able to read.
#[must_use]
pub fn target(name: &str, revision: u32, info: &[u8]) -> Attributes {
    xtables("target", name, revision, info)
}

/// A match or target. Both have the same attributes (`enum nft_match_attributes`, `enum nft_target_attributes`).
fn xtables(kind: &str, name: &str, revision: u32, info: &[u8]) -> Attributes {
    expression(
        kind,
        &Attributes::new()
            .text(xt_match::NAME, name)
            .big(xt_match::REV, revision)
            .put(xt_match::INFO, info),
    )
}
