//! Statements: what rules do with packets.

use std::net::IpAddr;
use std::time::Duration;

use super::expression::{
    Field, Register, combine, expression, immediate, load, lookup, octets, value,
};
use super::numbers::{
    self as nf, CT_MARK, IPV4, IPV6, META_MARK, NAT_DNAT, NAT_FULLY_RANDOM, REG_VERDICT,
    REJECT_ICMP_UNREACH, REJECT_ICMPX_UNREACH, REJECT_TCP_RST, ct, dynset, masq, nat,
};
use super::set::{Kind, Set, milliseconds};
use super::value::{IpVersion, Unfit, Value, encode};
use super::verdict::Verdict;
use crate::netlink::Attributes;

/// A statement with this verdict.
#[must_use]
pub fn verdict(verdict: &Verdict) -> Attributes {
    immediate(REG_VERDICT, &verdict.data())
}

/// Continues in another chain, and returns afterwards.
#[must_use]
pub fn jump(chain: &str) -> Attributes {
    verdict(&Verdict::jump(chain))
}

/// Continues in another chain, and does not return.
#[must_use]
pub fn goto(chain: &str) -> Attributes {
    verdict(&Verdict::goto(chain))
}

/// Gives each packet the verdict that a verdict map has for its fields. Other packets continue with the next rule.
#[must_use]
pub fn verdict_of_map(fields: &[Field], map: &Set) -> Vec<Attributes> {
    let (mut expressions, _) = load(fields);
    expressions.push(lookup(map, Some(REG_VERDICT), false));
    expressions
}

/// Source NAT to an address of the outgoing interface.
#[must_use]
pub fn masquerade() -> Attributes {
    expression("masq", &Attributes::new())
}

/// Source NAT to an address of the outgoing interface and a random port, so that concurrent connections do not choose the
/// same one (`masquerade fully-random`).
#[must_use]
pub fn masquerade_fully_random() -> Attributes {
    expression(
        "masq",
        &Attributes::new().big(masq::FLAGS, NAT_FULLY_RANDOM),
    )
}

/// Destination NAT to the address in the first registers, and to the port in the register `port`.
fn dnat(version: IpVersion, port: Option<Register>) -> Attributes {
    let family = match version {
        IpVersion::V4 => IPV4,
        IpVersion::V6 => IPV6,
    };
    let mut data = Attributes::new()
        .big(nat::TYPE, NAT_DNAT)
        .big(nat::FAMILY, family.into())
        .big(nat::REG_ADDR_MIN, Register::FIRST.number());
    if let Some(port) = port {
        data = data.big(nat::REG_PROTO_MIN, port.number());
    }
    expression("nat", &data)
}

/// Destination NAT to an address and port.
#[must_use]
pub fn redirect(address: IpAddr, port: u16) -> Vec<Attributes> {
    let octets = octets(address);
    let second = Register::FIRST.after(octets.len());
    vec![
        immediate(Register::FIRST.number(), &value(&octets)),
        immediate(second.number(), &value(&port.to_be_bytes())),
        dnat(IpVersion::of(address), Some(second)),
    ]
}

/// What a map has for the target of NAT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// An address; the port stays.
    Address(IpVersion),
    /// An address and a port.
    AddressAndPort(IpVersion),
}

/// Destination NAT to what a map has for the fields (`dnat to numgen random mod 3 map @endpoints`). Packets without an entry
/// continue with the next rule.
#[must_use]
pub fn redirect_by_map(fields: &[Field], map: &Set, target: Target) -> Vec<Attributes> {
    let (mut expressions, _) = load(fields);
    expressions.push(lookup(map, Some(Register::FIRST.number()), false));
    expressions.push(match target {
        Target::Address(version) => dnat(version, None),
        Target::AddressAndPort(version) => {
            let port = Register::FIRST.after(version.address().width());
            dnat(version, Some(port))
        }
    });
    expressions
}

/// A mark that rules set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// The mark of the packet.
    Packet,
    /// The mark of the connection, which all its packets share.
    Connection,
}

impl Mark {
    fn field(self) -> Field {
        match self {
            Mark::Packet => Field::Mark,
            Mark::Connection => Field::ConnectionMark,
        }
    }

    /// Sets the mark to the value of the first register.
    fn store(self) -> Attributes {
        let register = Register::FIRST.number();
        match self {
            Mark::Packet => expression(
                "meta",
                &Attributes::new()
                    .big(nf::meta::KEY, META_MARK)
                    .big(nf::meta::SREG, register),
            ),
            Mark::Connection => expression(
                "ct",
                &Attributes::new()
                    .big(ct::KEY, CT_MARK)
                    .big(ct::SREG, register),
            ),
        }
    }

    /// Sets the mark to a value.
    #[must_use]
    pub fn set(self, mark: u32) -> Vec<Attributes> {
        let data = value(&mark.to_ne_bytes());
        vec![immediate(Register::FIRST.number(), &data), self.store()]
    }

    /// Sets `bits` and clears the other bits of `mask`; bits outside the mask stay.
    #[must_use]
    pub fn change(self, mask: u32, bits: u32) -> Vec<Attributes> {
        let bits = bits & mask;
        vec![
            self.field().load(Register::FIRST),
            combine(&(!mask).to_ne_bytes(), &bits.to_ne_bytes()),
            self.store(),
        ]
    }

    /// Sets the mark to that of `from`, of which only the bits of `mask` count.
    #[must_use]
    pub fn copy(self, from: Mark, mask: u32) -> Vec<Attributes> {
        let mut expressions = vec![from.field().load(Register::FIRST)];
        if mask != u32::MAX {
            expressions.push(combine(&mask.to_ne_bytes(), &0_u32.to_ne_bytes()));
        }
        expressions.push(self.store());
        expressions
    }
}

/// The answer to a rejected packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reject {
    /// A TCP reset. The rule must match TCP packets only.
    TcpReset,
    /// The ICMP or ICMPv6 message that the port is unreachable.
    PortUnreachable,
    /// The ICMP or ICMPv6 message that the host is unreachable.
    HostUnreachable,
    /// The ICMP or ICMPv6 message that an administrator prohibits the packet.
    Prohibited,
    /// An ICMP message (type 3) or ICMPv6 message (type 1) with this code. The rule must match packets of one version only.
    Code(u8),
}

/// Drops packets and notifies their senders.
#[must_use]
pub fn reject(answer: Reject) -> Attributes {
    let (kind, code) = match answer {
        Reject::TcpReset => (REJECT_TCP_RST, None),
        Reject::PortUnreachable => (REJECT_ICMPX_UNREACH, Some(1)),
        Reject::HostUnreachable => (REJECT_ICMPX_UNREACH, Some(2)),
        Reject::Prohibited => (REJECT_ICMPX_UNREACH, Some(3)),
        Reject::Code(code) => (REJECT_ICMP_UNREACH, Some(code)),
    };
    let mut data = Attributes::new().big(nf::reject::TYPE, kind);
    if let Some(code) = code {
        data = data.put(nf::reject::ICMP_CODE, &[code]);
    }
    expression("reject", &data)
}

/// How a rule changes a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Adds a missing element.
    Add = 0,
    /// Adds a missing element, and starts the timeout of an existing one again. Existing data stay.
    Update = 1,
    /// Deletes an element.
    Delete = 2,
}

/// Changes the element of a dynamic set whose key are the fields of the packet. A packet whose element the set has no room for
/// does not match the rule. `timeout` replaces that of the set.
///
/// # Errors
///
/// `data` do not have the types of the map.
pub fn change_set(
    change: Change,
    set: &Set,
    fields: &[Field],
    data: &[Value],
    timeout: Option<Duration>,
) -> Result<Vec<Attributes>, Unfit> {
    let (mut expressions, after) = load(fields);
    let mut change = Attributes::new()
        .text(dynset::SET_NAME, &set.name)
        .big(dynset::OP, change as u32)
        .big(dynset::SREG_KEY, Register::FIRST.number());
    match &set.kind {
        Kind::Map(types) => {
            encode(types, data)?;
            // The kernel loads at most 16 bytes at a time.
            let mut register = after;
            for (kind, one) in types.iter().zip(data) {
                let bytes = encode(&[*kind], std::slice::from_ref(one))?;
                expressions.push(immediate(register.number(), &value(&bytes)));
                register = register.after(bytes.len());
            }
            change = change.big(dynset::SREG_DATA, after.number());
        }
        Kind::Set if data.is_empty() => {}
        kind => {
            let name = &set.name;
            let why = format!("the set {name:?} is a {kind:?}; rules cannot add {data:?} to it");
            return Err(Unfit(why));
        }
    }
    if let Some(timeout) = timeout {
        change = change.put(dynset::TIMEOUT, &milliseconds(timeout));
    }
    expressions.push(expression("dynset", &change));
    Ok(expressions)
}

/// A counter, which iptables adds to its rules.
#[must_use]
pub fn counter() -> Attributes {
    expression("counter", &Attributes::new())
}
