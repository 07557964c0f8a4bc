//! Parsing and validation of ranges and range sets
//! (`plugins/ipam/host-local/backend/allocator/range.go` of containernetworking/plugins). Pure.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::cni::{self, Error, Json};

/// A range of allocatable addresses in a subnet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Range {
    /// The subnet.
    pub subnet: IpNet,
    /// The first allocatable address.
    pub start: IpAddr,
    /// The last allocatable address.
    pub end: IpAddr,
    /// The gateway; never allocated.
    pub gateway: IpAddr,
}

/// Ranges of one address family. A container gets one address from each set.
pub type RangeSet = Vec<Range>;

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(a) => u128::from(a.to_bits()),
        IpAddr::V6(a) => a.to_bits(),
    }
}

fn address(number: u128, v4: bool) -> IpAddr {
    if v4 {
        IpAddr::V4(u32::try_from(number).unwrap_or(u32::MAX).into())
    } else {
        IpAddr::V6(number.into())
    }
}

impl Range {
    fn parse(config: Json<'_>) -> Result<Range, Error> {
        let text = config.text("subnet")?;
        if text.is_empty() {
            return Err(Error::config("a range needs a \"subnet\""));
        }
        let subnet = cni::network(text)
            .ok_or_else(|| Error::config(format!("invalid subnet {text:?}: expected an address and a prefix length such as 10.22.0.0/24, without leading zeros")))?;
        if subnet.addr().is_ipv4() && text.contains(':') {
            return Err(Error::config(format!(
                "invalid subnet {text:?}: an IPv4 network in IPv6 notation; use {subnet}"
            )));
        }
        if subnet.addr() != subnet.network() {
            return Err(Error::config(format!(
                "Network has host bits set. For a subnet mask of length {} the network address is {}",
                subnet.prefix_len(),
                subnet.network()
            )));
        }
        if subnet.prefix_len() + 2 > subnet.max_prefix_len() {
            return Err(Error::config(format!(
                "Network {subnet} too small to allocate from"
            )));
        }
        let v4 = subnet.addr().is_ipv4();
        let (first, last) = (number(subnet.network()), number(subnet.broadcast()));
        let within = |key: &str, absent: u128| -> Result<IpAddr, Error> {
            let text = config.text(key)?;
            if text.is_empty() {
                return Ok(address(absent, v4));
            }
            let parsed = cni::address(text).ok_or_else(|| {
                Error::config(format!("invalid {key} {text:?}: expected an IP address"))
            })?;
            if key != "gateway" && !subnet.contains(&parsed) {
                return Err(Error::config(format!(
                    "{key} {parsed} not in network {subnet}"
                )));
            }
            Ok(parsed)
        };
        let range = Range {
            subnet,
            start: within("rangeStart", first + 1)?,
            end: within("rangeEnd", if v4 { last - 1 } else { last })?,
            gateway: within("gateway", first + 1)?,
        };
        if range.start > range.end {
            return Err(Error::config(format!(
                "rangeStart {} is after rangeEnd {}",
                range.start, range.end
            )));
        }
        Ok(range)
    }

    /// Whether the range contains `address`.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.start.is_ipv4() && (self.start..=self.end).contains(&address)
    }

    fn overlaps(&self, other: &Range) -> bool {
        self.start.is_ipv4() == other.start.is_ipv4()
            && self.start <= other.end
            && other.start <= self.end
    }
}

/// Reads the range sets of an `ipam` object. The sets of `runtimeConfig` come first.
pub fn parse(ipam: Json<'_>, runtime: Json<'_>) -> Result<Vec<RangeSet>, Error> {
    let mut sets = Vec::new();
    let lists = [runtime.list("ipRanges")?, ipam.list("ranges")?];
    for set in lists.into_iter().flatten() {
        let list = set
            .as_array()
            .ok_or_else(|| Error::config("\"ranges\" must be a list of lists of ranges"))?;
        if list.is_empty() {
            return Err(Error::config("empty range set"));
        }
        sets.push(
            list.iter()
                .map(|r| Range::parse(Json(r)))
                .collect::<Result<RangeSet, Error>>()?,
        );
    }
    if ipam.get("subnet").is_some() {
        sets.insert(lists[0].len(), vec![Range::parse(ipam)?]);
    }
    if sets.is_empty() {
        return Err(Error::config(
            "no IP ranges specified: set \"ranges\" or \"subnet\" in \"ipam\"",
        ));
    }
    let all: Vec<(usize, &Range)> = sets
        .iter()
        .enumerate()
        .flat_map(|(i, set)| set.iter().map(move |r| (i, r)))
        .collect();
    for (n, (i, a)) in all.iter().enumerate() {
        for (j, b) in &all[n + 1..] {
            if i == j && a.subnet.addr().is_ipv4() != b.subnet.addr().is_ipv4() {
                return Err(Error::config("mixed address families in a range set"));
            }
            if a.overlaps(b) {
                return Err(Error::config(format!(
                    "range {}-{} overlaps with {}-{}",
                    a.start, a.end, b.start, b.end
                )));
            }
        }
    }
    Ok(sets)
}

/// The addresses of a set in allocation order: from the address
/// after `last`, wrapping around to `last`. Gateways are skipped.
pub fn candidates(set: &RangeSet, last: Option<IpAddr>) -> impl Iterator<Item = (IpAddr, &Range)> {
    let size = |r: &Range| number(r.end) - number(r.start) + 1;
    let total: u128 = set.iter().map(size).sum();
    let v4 = set.first().is_some_and(|r| r.start.is_ipv4());
    // Positions count through all ranges of the set.
    let place = |wanted: IpAddr| {
        let mut before = 0;
        set.iter().find_map(|r| {
            let here = r
                .contains(wanted)
                .then(|| before + number(wanted) - number(r.start));
            before += size(r);
            here
        })
    };
    let start = last.and_then(place).map_or(0, |p| p + 1);
    (0..total).filter_map(move |step| {
        let mut position = (start + step) % total;
        for range in set {
            if position < size(range) {
                let found = address(number(range.start) + position, v4);
                return (found != range.gateway).then_some((found, range));
            }
            position -= size(range);
        }
        None
    })
}

/// The ranges of a set as text, for error messages.
#[must_use]
pub fn describe(set: &RangeSet) -> String {
    set.iter()
        .map(|r| format!("{}-{}", r.start, r.end))
        .collect::<Vec<_>>()
        .join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn parsed(ipam: &Value) -> Result<Vec<RangeSet>, Error> {
        parse(Json(ipam), Json(&Value::Null))
    }

    #[test]
    fn ranges_are_validated_and_get_defaults() {
        let sets = parsed(&json!({"subnet": "10.1.2.0/24"})).expect("fine");
        let range = &sets[0][0];
        assert_eq!(
            (
                range.start.to_string(),
                range.end.to_string(),
                range.gateway.to_string()
            ),
            ("10.1.2.1".into(), "10.1.2.254".into(), "10.1.2.1".into())
        );
        let ranges = parsed(&json!({"subnet": "10.1.2.0/24", "rangeStart": "::ffff:10.1.2.9"}));
        assert_eq!(ranges.expect("fine")[0][0].start.to_string(), "10.1.2.9");
        let v6 = parsed(&json!({"ranges": [[{"subnet": "fd00::/64"}]]})).expect("fine");
        assert_eq!(v6[0][0].end.to_string(), "fd00::ffff:ffff:ffff:ffff");
        let refused = [
            json!({}),
            json!({"subnet": "10.1.2.1/24"}),
            json!({"subnet": "10.1.2.0/31"}),
            json!({"subnet": "nonsense"}),
            json!({"subnet": "010.1.002.0/24"}),
            json!({"subnet": "::ffff:10.1.2.0/120"}),
            json!({"subnet": "10.1.2.0/24", "rangeStart": "10.1.2.09"}),
            json!({"subnet": "10.1.2.0/24", "rangeStart": "10.1.3.1"}),
            json!({"subnet": "10.1.2.0/24", "rangeStart": "10.1.2.9", "rangeEnd": "10.1.2.8"}),
            json!({"ranges": [[]]}),
            json!({"ranges": [[{"subnet": "10.1.2.0/24"}], [{"subnet": "10.1.0.0/16"}]]}),
            json!({"ranges": [[{"subnet": "10.1.2.0/24"}, {"subnet": "fd00::/64"}]]}),
            json!({"ranges": [{"subnet": "10.1.2.0/24"}]}),
        ];
        for ipam in refused {
            assert!(parsed(&ipam).is_err(), "{ipam}");
        }
    }

    #[test]
    fn addresses_are_allocated_round_robin_without_gateways() {
        let set =
            parsed(&json!({"ranges": [[{"subnet": "10.0.0.0/29", "rangeEnd": "10.0.0.3"}, {"subnet": "10.0.1.0/29", "rangeEnd": "10.0.1.2"}]]}))
                .expect("fine");
        let from = |last: Option<&str>| {
            candidates(&set[0], last.and_then(|l| l.parse().ok()))
                .map(|(a, _)| a.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(from(None), ["10.0.0.2", "10.0.0.3", "10.0.1.2"]);
        assert_eq!(from(Some("10.0.0.2")), ["10.0.0.3", "10.0.1.2", "10.0.0.2"]);
        assert_eq!(from(Some("10.0.1.2")), ["10.0.0.2", "10.0.0.3", "10.0.1.2"]);
        assert_eq!(
            from(Some("192.168.0.1")),
            ["10.0.0.2", "10.0.0.3", "10.0.1.2"]
        );
    }

    proptest! {
        #[test]
        fn the_iteration_visits_every_address_exactly_once(prefix in 24u8..=30, last in any::<u8>()) {
            let set = parsed(&json!({"subnet": format!("10.0.0.0/{prefix}")})).expect("fine");
            let last = IpAddr::from([10, 0, 0, last]);
            let mut seen: Vec<_> = candidates(&set[0], Some(last)).map(|(a, _)| a).collect();
            let count = seen.len();
            seen.sort();
            seen.dedup();
            prop_assert_eq!(seen.len(), count);
            prop_assert_eq!(count, (1usize << (32 - prefix)) - 3);
        }
    }
}
