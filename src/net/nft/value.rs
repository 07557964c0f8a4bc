//! Values in the keys and the data of sets, with the types by which `nft` displays them.
//!
//! A concatenation (`ipv4_addr . inet_service`) pads each value to 4 bytes, the size of a register.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use super::verdict::Verdict;

/// The version of the Internet protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum IpVersion {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl IpVersion {
    /// The version of an address.
    #[must_use]
    pub fn of(address: IpAddr) -> IpVersion {
        match address {
            IpAddr::V4(_) => IpVersion::V4,
            IpAddr::V6(_) => IpVersion::V6,
        }
    }

    /// The type of this version's addresses.
    #[must_use]
    pub fn address(self) -> Type {
        match self {
            IpVersion::V4 => Type::Ipv4Address,
            IpVersion::V6 => Type::Ipv6Address,
        }
    }
}

/// The type of a value. The numbers are those of nftables (`enum datatypes` in `include/datatype.h`), which the kernel stores
/// without interpreting them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Type {
    /// A number in the byte order of the machine, such as a random one. Integers of nftables have no fixed size, so `nft`
    /// displays the type of such keys as `0`.
    Number = 4,
    /// An IPv4 address.
    Ipv4Address = 7,
    /// An IPv6 address.
    Ipv6Address = 8,
    /// The number of a transport protocol.
    Protocol = 12,
    /// The port of a transport protocol.
    Port = 13,
    /// The mark of a packet or connection.
    Mark = 19,
    /// The name of a link.
    Interface = 41,
}

/// Bits of a type's number in the number of a concatenation (`TYPE_BITS` of nftables).
const TYPE_BITS: u32 = 6;
/// Bytes of a link's name with its terminating zeros (`IFNAMSIZ`).
const INTERFACE_NAME: usize = 16;

impl Type {
    const ALL: [Type; 7] = [
        Type::Number,
        Type::Ipv4Address,
        Type::Ipv6Address,
        Type::Protocol,
        Type::Port,
        Type::Mark,
        Type::Interface,
    ];

    /// The bytes of a value, without padding.
    #[must_use]
    pub fn width(self) -> usize {
        match self {
            Type::Protocol => 1,
            Type::Port => 2,
            Type::Number | Type::Ipv4Address | Type::Mark => 4,
            Type::Ipv6Address | Type::Interface => INTERFACE_NAME,
        }
    }

    /// Whether greater values have greater bytes in the order of memory, as intervals need.
    pub(super) fn is_ordered(self) -> bool {
        !matches!(self, Type::Number | Type::Mark | Type::Interface)
    }
}

/// The number of a concatenation of types.
pub(super) fn concatenation(types: &[Type]) -> u32 {
    types
        .iter()
        .fold(0, |number, kind| (number << TYPE_BITS) | *kind as u32)
}

/// The types of a concatenation; `None` if one of them is unknown.
pub(super) fn parts(mut number: u32) -> Option<Vec<Type>> {
    let mut types = vec![];
    while number != 0 {
        let last = number & ((1 << TYPE_BITS) - 1);
        types.push(Type::ALL.into_iter().find(|kind| *kind as u32 == last)?);
        number >>= TYPE_BITS;
    }
    types.reverse();
    Some(types)
}

/// The bytes that values of these types need, with the padding of a concatenation.
pub(super) fn width(types: &[Type]) -> usize {
    match types {
        [single] => single.width(),
        _ => types.iter().map(|t| t.width().next_multiple_of(4)).sum(),
    }
}

/// A value of a key or of data.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Value {
    /// A number.
    Number(u32),
    /// An address.
    Address(IpAddr),
    /// A transport protocol: 6 is TCP, 17 UDP, 132 SCTP.
    Protocol(u8),
    /// A port.
    Port(u16),
    /// A mark.
    Mark(u32),
    /// The name of a link, at most 15 bytes.
    Interface(String),
}

/// A value or element that does not fit its set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfit(pub(super) String);

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unfit {}

impl From<Unfit> for std::io::Error {
    fn from(error: Unfit) -> std::io::Error {
        std::io::Error::new(std::io::ErrorKind::InvalidInput, error)
    }
}

impl Value {
    /// The bytes without padding, if the value has this type.
    fn bytes(&self, kind: Type) -> Option<Vec<u8>> {
        match (self, kind) {
            (Value::Number(n), Type::Number) | (Value::Mark(n), Type::Mark) => {
                Some(n.to_ne_bytes().to_vec())
            }
            (Value::Address(IpAddr::V4(a)), Type::Ipv4Address) => Some(a.octets().to_vec()),
            (Value::Address(IpAddr::V6(a)), Type::Ipv6Address) => Some(a.octets().to_vec()),
            (Value::Protocol(p), Type::Protocol) => Some(vec![*p]),
            (Value::Port(p), Type::Port) => Some(p.to_be_bytes().to_vec()),
            (Value::Interface(name), Type::Interface) => {
                let mut bytes = name.as_bytes().to_vec();
                let fits = (1..INTERFACE_NAME).contains(&bytes.len()) && !bytes.contains(&0);
                bytes.resize(INTERFACE_NAME, 0);
                fits.then_some(bytes)
            }
            _ => None,
        }
    }

    fn read(kind: Type, bytes: &[u8]) -> Option<Value> {
        Some(match kind {
            Type::Number => Value::Number(u32::from_ne_bytes(bytes.try_into().ok()?)),
            Type::Mark => Value::Mark(u32::from_ne_bytes(bytes.try_into().ok()?)),
            Type::Ipv4Address => Value::Address(<[u8; 4]>::try_from(bytes).ok()?.into()),
            Type::Ipv6Address => Value::Address(<[u8; 16]>::try_from(bytes).ok()?.into()),
            Type::Protocol => Value::Protocol(*bytes.first()?),
            Type::Port => Value::Port(u16::from_be_bytes(bytes.try_into().ok()?)),
            Type::Interface => Value::Interface(crate::netlink::text(bytes)),
        })
    }
}

/// The bytes of values of these types, padded if there are several.
pub(super) fn encode(types: &[Type], values: &[Value]) -> Result<Vec<u8>, Unfit> {
    let mut bytes = vec![];
    let unfit = || {
        Unfit(format!(
            "the values {values:?} do not have the types {types:?}"
        ))
    };
    if types.is_empty() || types.len() != values.len() {
        return Err(unfit());
    }
    for (kind, value) in types.iter().zip(values) {
        bytes.extend(value.bytes(*kind).ok_or_else(unfit)?);
        if types.len() > 1 {
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
    }
    Ok(bytes)
}

/// The values of these types; `None` if the bytes have another length.
pub(super) fn decode(types: &[Type], mut bytes: &[u8]) -> Option<Vec<Value>> {
    let mut values = vec![];
    for kind in types {
        let padded = if types.len() > 1 {
            kind.width().next_multiple_of(4)
        } else {
            kind.width()
        };
        values.push(Value::read(*kind, bytes.get(..kind.width())?)?);
        bytes = bytes.get(padded..)?;
    }
    bytes.is_empty().then_some(values)
}

/// What a set maps a key to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Data {
    /// Nothing: the set is no map.
    #[default]
    None,
    /// A verdict, for verdict maps.
    Verdict(Verdict),
    /// Values, for maps.
    Values(Vec<Value>),
}

/// The first and the last address of a network, as the values of an interval.
#[must_use]
pub fn network(net: IpNet) -> (Value, Value) {
    (
        Value::Address(net.network()),
        Value::Address(net.broadcast()),
    )
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// A value of a type.
    pub fn value(kind: Type) -> BoxedStrategy<Value> {
        match kind {
            Type::Number => any::<u32>().prop_map(Value::Number).boxed(),
            Type::Mark => any::<u32>().prop_map(Value::Mark).boxed(),
            Type::Ipv4Address => any::<[u8; 4]>()
                .prop_map(|a| Value::Address(a.into()))
                .boxed(),
            Type::Ipv6Address => any::<[u8; 16]>()
                .prop_map(|a| Value::Address(a.into()))
                .boxed(),
            Type::Protocol => any::<u8>().prop_map(Value::Protocol).boxed(),
            Type::Port => any::<u16>().prop_map(Value::Port).boxed(),
            Type::Interface => "[a-z0-9.-]{1,15}".prop_map(Value::Interface).boxed(),
        }
    }

    /// Some types, as many as a number of 32 bits can express.
    pub fn types() -> impl Strategy<Value = Vec<Type>> {
        vec(proptest::sample::select(Type::ALL.to_vec()), 1..=5)
    }

    /// Types with a value of each.
    fn typed() -> impl Strategy<Value = (Vec<Type>, Vec<Value>)> {
        types().prop_flat_map(|types| {
            let values: Vec<_> = types.iter().map(|t| value(*t)).collect();
            (Just(types), values)
        })
    }

    proptest! {
        #[test]
        fn any_values_are_read_back((types, values) in typed()) {
            let bytes = encode(&types, &values).expect("the values have these types");
            prop_assert_eq!(bytes.len(), width(&types));
            prop_assert_eq!(decode(&types, &bytes), Some(values));
            prop_assert_eq!(parts(concatenation(&types)), Some(types));
        }

        #[test]
        fn any_bytes_are_read_within_their_bounds(types in types(), bytes in vec(any::<u8>(), 0..100), number in any::<u32>()) {
            prop_assert!(decode(&types, &bytes).is_none_or(|values| values.len() == types.len()));
            let _ = parts(number);
        }
    }

    #[test]
    fn values_of_other_types_are_refused() {
        let v4 = Value::Address([10, 0, 0, 1].into());
        let long = Value::Interface("a-name-of-16-byt".to_owned());
        let cases = [
            (vec![Type::Ipv6Address], vec![v4.clone()]),
            (vec![Type::Port], vec![Value::Number(80)]),
            (vec![Type::Ipv4Address, Type::Port], vec![v4.clone()]),
            (vec![Type::Interface], vec![long]),
            (vec![], vec![]),
        ];
        for (types, values) in cases {
            assert!(encode(&types, &values).is_err(), "{types:?} {values:?}");
        }
        let error = encode(&[Type::Port], &[Value::Protocol(6)]).expect_err("another type");
        assert_eq!(
            error.to_string(),
            "the values [Protocol(6)] do not have the types [Port]"
        );
    }
}
