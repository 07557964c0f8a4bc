//! Families of addresses and transport protocols, as services, policies and DNS name them.

use std::net::IpAddr;

/// A family of addresses: the version of IP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both families.
    pub const ALL: [Family; 2] = [Family::V4, Family::V6];

    /// The family of an address.
    #[must_use]
    pub fn of(address: IpAddr) -> Family {
        match address {
            IpAddr::V4(_) => Family::V4,
            IpAddr::V6(_) => Family::V6,
        }
    }
}

/// A transport protocol of ports. The order is that of the protocols' numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Protocol {
    /// All protocols.
    pub const ALL: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];

    /// The protocol with a name in the API. A missing or empty name means TCP, and an unknown one has no protocol.
    #[must_use]
    pub fn parse(name: Option<&str>) -> Option<Protocol> {
        match name {
            None | Some("TCP" | "") => Some(Protocol::Tcp),
            Some("UDP") => Some(Protocol::Udp),
            Some("SCTP") => Some(Protocol::Sctp),
            Some(_) => None,
        }
    }

    /// The number of the protocol in IP packets.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
            Protocol::Sctp => 132,
        }
    }

    /// The name in lower case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
            Protocol::Sctp => "sctp",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_the_api_are_upper_case_and_tcp_is_the_default() {
        for (name, expected) in [
            (None, Some(Protocol::Tcp)),
            (Some(""), Some(Protocol::Tcp)),
            (Some("tcp"), None),
            (Some("ICMP"), None),
        ] {
            assert_eq!(Protocol::parse(name), expected, "{name:?}");
        }
        for protocol in Protocol::ALL {
            let name = protocol.name().to_uppercase();
            assert_eq!(Protocol::parse(Some(&name)), Some(protocol));
        }
        assert!(Protocol::ALL.is_sorted_by_key(|protocol| protocol.number()));
    }
}
