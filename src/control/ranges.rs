//! Address ranges of services: one range, or one for each IP family (KEP-563).

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use ipnet::IpNet;

/// The largest number of host bits that a range may lack: it has at least 16 addresses, because the tenth address of the
/// service range is that of the cluster's DNS.
const LEAST_HOST_BITS: u8 = 4;

/// One range, or an IPv4 and an IPv6 range. The family of the first one is the cluster's default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranges {
    primary: IpNet,
    secondary: Option<IpNet>,
}

/// Why a text is not a list of ranges.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RangesError {
    /// One item is not a range.
    #[error("{0:?} is not an address range; use ADDRESS/PREFIX, for example 10.96.0.0/16")]
    Syntax(String),
    /// A range has too few addresses.
    #[error("{0} has fewer than 16 addresses; use a shorter prefix")]
    Small(IpNet),
    /// More than one range of a family.
    #[error("{0:?} has more than one range of an IP family; use one IPv4 and one IPv6 range")]
    Family(String),
}

impl FromStr for Ranges {
    type Err = RangesError;

    fn from_str(text: &str) -> Result<Ranges, RangesError> {
        let mut all = vec![];
        for item in text.split(',') {
            let range: IpNet = item
                .trim()
                .parse()
                .map_err(|_| RangesError::Syntax(item.into()))?;
            if range.max_prefix_len() - range.prefix_len() < LEAST_HOST_BITS {
                return Err(RangesError::Small(range));
            }
            all.push(range.trunc());
        }
        match all[..] {
            [primary] => Ok(Ranges {
                primary,
                secondary: None,
            }),
            [primary, second] if primary.addr().is_ipv4() != second.addr().is_ipv4() => {
                Ok(Ranges {
                    primary,
                    secondary: Some(second),
                })
            }
            _ => Err(RangesError::Family(text.into())),
        }
    }
}

impl fmt::Display for Ranges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.secondary {
            None => write!(f, "{}", self.primary),
            Some(second) => write!(f, "{},{second}", self.primary),
        }
    }
}

impl Ranges {
    /// The ranges, the first one first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = IpNet> {
        [self.primary].into_iter().chain(self.secondary)
    }

    /// Whether an address is in one of the ranges.
    #[must_use]
    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        self.iter().any(|range| range.contains(&address))
    }

    /// The address at this position of the first range; 1 is the address of the Service `kubernetes`, 10 that of the DNS.
    #[must_use]
    pub(crate) fn address(&self, position: u8) -> IpAddr {
        match self.primary.network() {
            IpAddr::V4(first) => {
                Ipv4Addr::from_bits(first.to_bits().saturating_add(position.into())).into()
            }
            IpAddr::V6(first) => {
                Ipv6Addr::from_bits(first.to_bits().saturating_add(position.into())).into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_parsed_and_printed() {
        let cases = [
            ("10.96.0.0/16", Ok("10.96.0.0/16 10.96.0.1 10.96.0.10")),
            ("10.96.3.4/16", Ok("10.96.0.0/16 10.96.0.1 10.96.0.10")),
            (
                "10.96.0.0/28, fd00::/108",
                Ok("10.96.0.0/28,fd00::/108 10.96.0.1 10.96.0.10"),
            ),
            (
                "fd00::/112,10.96.0.0/16",
                Ok("fd00::/112,10.96.0.0/16 fd00::1 fd00::a"),
            ),
            (
                "",
                Err("\"\" is not an address range; use ADDRESS/PREFIX, for example 10.96.0.0/16"),
            ),
            (
                "10.96.0.0/33",
                Err(
                    "\"10.96.0.0/33\" is not an address range; use ADDRESS/PREFIX, for example 10.96.0.0/16",
                ),
            ),
            (
                "10.96.0.0/29",
                Err("10.96.0.0/29 has fewer than 16 addresses; use a shorter prefix"),
            ),
            (
                "10.96.0.0/16,10.97.0.0/16",
                Err(
                    "\"10.96.0.0/16,10.97.0.0/16\" has more than one range of an IP family; use one IPv4 and one IPv6 range",
                ),
            ),
            (
                "10.96.0.0/16,fd00::/64,fd01::/64",
                Err(
                    "\"10.96.0.0/16,fd00::/64,fd01::/64\" has more than one range of an IP family; use one IPv4 and one IPv6 range",
                ),
            ),
        ];
        for (text, expected) in cases {
            let parsed: Result<Ranges, RangesError> = text.parse();
            let shown = parsed
                .map(|r| format!("{r} {} {}", r.address(1), r.address(10)))
                .map_err(|e| e.to_string());
            assert_eq!(
                shown,
                expected.map(Into::into).map_err(Into::into),
                "{text}"
            );
        }
    }

    #[test]
    fn a_range_contains_addresses_of_its_family() {
        let ranges: Ranges = "10.96.0.0/16,fd00::/108".parse().expect("ranges");
        for (address, expected) in [
            ("10.96.255.255", true),
            ("10.97.0.0", false),
            ("fd00::1", true),
            ("fd01::1", false),
        ] {
            let parsed = address.parse().expect(address);
            assert_eq!(ranges.contains(parsed), expected, "{address}");
        }
    }
}
