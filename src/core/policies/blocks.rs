//! Ranges of addresses and ports.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Ports;
use crate::network::Family;

/// A range of addresses as numbers; both ends belong to it.
type Range = (u128, u128);

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(a) => u128::from(u32::from(a)),
        IpAddr::V6(a) => u128::from(a),
    }
}

fn address(family: Family, number: u128) -> IpAddr {
    match family {
        // A number of this family has 32 bits.
        Family::V4 => Ipv4Addr::from(u32::try_from(number).unwrap_or(u32::MAX)).into(),
        Family::V6 => Ipv6Addr::from(number).into(),
    }
}

/// A block in CIDR notation. As in upstream, bits below the prefix are ignored.
fn parse(cidr: &str) -> Option<(Family, Range)> {
    let (base, length) = cidr.trim().split_once('/')?;
    let base: IpAddr = base.parse().ok()?;
    let length: u32 = length.parse().ok()?;
    let (family, bits): (Family, u32) = match base {
        IpAddr::V4(_) => (Family::V4, 32),
        IpAddr::V6(_) => (Family::V6, 128),
    };
    let free = bits.checked_sub(length).filter(|_| length <= bits)?;
    // A shift by all 128 bits overflows.
    let low = u128::MAX
        .checked_shr(128_u32.saturating_sub(free))
        .unwrap_or(0);
    let first = number(base) & !low;
    Some((family, (first, first | low)))
}

/// Removes a range from ranges.
fn without(ranges: Vec<Range>, (first, last): Range) -> Vec<Range> {
    let rest = |(from, to): Range| {
        let below = first.checked_sub(1).map(|end| (from, to.min(end)));
        let above = last.checked_add(1).map(|begin| (from.max(begin), to));
        [below, above].into_iter().flatten().filter(|(a, b)| a <= b)
    };
    ranges.into_iter().flat_map(rest).collect()
}

/// An `ipBlock` without its exceptions. `None` if the block is invalid. An invalid exception removes the whole block, because
/// ignoring it would allow more than the author wrote.
pub(super) fn block(cidr: &str, except: &[String]) -> Option<(Family, Vec<Range>)> {
    let (family, range) = parse(cidr)?;
    let mut ranges = vec![range];
    for cidr in except {
        let (other, range) = parse(cidr)?;
        if other != family {
            return None;
        }
        ranges = without(ranges, range);
    }
    Some((family, ranges))
}

/// Merges ranges that overlap or touch, in order.
fn merged(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_unstable();
    let mut merged: Vec<Range> = vec![];
    for (first, last) in ranges {
        match merged.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = (*end).max(last),
            _ => merged.push((first, last)),
        }
    }
    merged
}

/// Disjoint ranges of addresses, in order.
pub(super) fn addresses(family: Family, ranges: Vec<Range>) -> Vec<(IpAddr, IpAddr)> {
    let to_addresses = |(first, last)| (address(family, first), address(family, last));
    merged(ranges).into_iter().map(to_addresses).collect()
}

/// Disjoint ranges of ports, in order.
pub(super) fn ports(all: impl IntoIterator<Item = Ports>) -> Vec<Ports> {
    let mut all: Vec<Ports> = all.into_iter().filter(|p| p.first <= p.last).collect();
    all.sort_unstable();
    let mut merged: Vec<Ports> = vec![];
    for next in all {
        match merged.last_mut() {
            Some(p) if p.protocol == next.protocol && next.first <= p.last.saturating_add(1) => {
                p.last = p.last.max(next.last);
            }
            _ => merged.push(next),
        }
    }
    merged
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::network::Protocol;
    use proptest::prelude::*;

    fn protocols() -> impl Strategy<Value = Protocol> {
        proptest::sample::select(&Protocol::ALL)
    }

    fn ranges(cidr: &str, except: &[&str]) -> Option<Vec<(IpAddr, IpAddr)>> {
        let except: Vec<String> = except.iter().map(ToString::to_string).collect();
        let (family, ranges) = block(cidr, &except)?;
        Some(addresses(family, ranges))
    }

    #[test]
    fn blocks_lose_their_exceptions() {
        let table: [(&str, &[&str], Option<&[(&str, &str)]>); 12] = [
            ("10.0.0.0/8", &[], Some(&[("10.0.0.0", "10.255.255.255")])),
            ("10.1.2.3/8", &[], Some(&[("10.0.0.0", "10.255.255.255")])),
            ("0.0.0.0/0", &[], Some(&[("0.0.0.0", "255.255.255.255")])),
            ("10.0.0.1/32", &[], Some(&[("10.0.0.1", "10.0.0.1")])),
            (
                "10.0.0.0/24",
                &["10.0.0.64/26"],
                Some(&[("10.0.0.0", "10.0.0.63"), ("10.0.0.128", "10.0.0.255")]),
            ),
            ("10.0.0.0/24", &["10.0.0.0/24"], Some(&[])),
            (
                "0.0.0.0/0",
                &["0.0.0.0/1"],
                Some(&[("128.0.0.0", "255.255.255.255")]),
            ),
            (
                "0.0.0.0/0",
                &["128.0.0.0/1"],
                Some(&[("0.0.0.0", "127.255.255.255")]),
            ),
            (
                "::/0",
                &["8000::/1"],
                Some(&[("::", "7fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")]),
            ),
            ("10.0.0.0/33", &[], None),
            ("10.0.0.0/24", &["fd00::/8"], None),
            ("10.0.0.0/24", &["nonsense"], None),
        ];
        for (cidr, except, expected) in table {
            let expected = expected.map(|all| {
                let parsed = all
                    .iter()
                    .map(|(a, b)| (a.parse().unwrap(), b.parse().unwrap()));
                parsed.collect::<Vec<(IpAddr, IpAddr)>>()
            });
            assert_eq!(ranges(cidr, except), expected, "{cidr} except {except:?}");
        }
    }

    proptest! {
        #[test]
        fn an_address_is_in_a_block_if_its_cidr_has_it_and_no_exception(
            base: u32, length in 0_u32..=32, holes in proptest::collection::vec((any::<u32>(), 0_u32..=32), 0..4), probe: u32,
            near in any::<bool>(),
        ) {
            let text = |base: u32, length: u32| format!("{}/{length}", Ipv4Addr::from(base));
            let has = |(base, length): (u32, u32), probe: u32| length == 0 || (base ^ probe) >> (32 - length) == 0;
            let probe = if near { holes.first().map_or(base, |h| h.0) } else { probe };
            let except: Vec<String> = holes.iter().map(|(b, l)| text(*b, *l)).collect();
            let (_, ranges) = block(&text(base, length), &except).expect("is valid");
            let found = merged(ranges).iter().any(|(a, b)| (*a..=*b).contains(&u128::from(probe)));
            let expected = has((base, length), probe) && !holes.iter().any(|h| has(*h, probe));
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn merged_ports_are_disjoint_and_have_the_same_members(
            all in proptest::collection::vec((protocols(), 0_u16..40, 0_u16..40), 0..8), probe in (protocols(), 0_u16..42),
        ) {
            let all: Vec<Ports> = all.into_iter().map(|(protocol, first, last)| Ports { protocol, first, last }).collect();
            let has = |list: &[Ports]| list.iter().filter(|p| p.protocol == probe.0 && (p.first..=p.last).contains(&probe.1)).count();
            let merged = ports(all.clone());
            prop_assert_eq!(has(&merged), usize::from(has(&all) > 0));
        }
    }
}
