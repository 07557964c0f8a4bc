//! Addresses and networks in configurations and results. What the reference refuses is refused: a configuration means the
//! same to both.

use std::net::IpAddr;

use ipnet::IpNet;

/// An address. One of IPv4 in the notation of IPv6 (`::ffff:192.0.2.1`) is of IPv4; a number with leading zeros, which some
/// read as octal, is none.
#[must_use]
pub fn address(text: &str) -> Option<IpAddr> {
    text.parse::<IpAddr>().ok().map(|a| a.to_canonical())
}

/// An address and the length of its network's prefix, read as [`address`] does.
#[must_use]
pub fn network(text: &str) -> Option<IpNet> {
    let (address, length) = text.split_once('/')?;
    if length.is_empty() || !length.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let net = IpNet::new(address.parse().ok()?, length.parse().ok()?).ok()?;
    let v4 = net.addr().to_canonical();
    match net.prefix_len().checked_sub(96) {
        Some(length) if v4 != net.addr() => IpNet::new(v4, length).ok(),
        _ => Some(net),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_the_reference_does() {
        let shown = |text| address(text).map(|a| a.to_string());
        assert_eq!(shown("10.1.2.3").as_deref(), Some("10.1.2.3"));
        assert_eq!(shown("fd00::1").as_deref(), Some("fd00::1"));
        assert_eq!(shown("::ffff:10.1.2.3").as_deref(), Some("10.1.2.3"));
        for wrong in [
            "",
            "010.1.2.3",
            "10.1.2.03",
            "10.1.2",
            "fe80::1%eth0",
            "10.1.2.3/24",
        ] {
            assert_eq!(address(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn networks_are_read_as_the_reference_does() {
        let shown = |text| network(text).map(|a| a.to_string());
        assert_eq!(shown("10.1.2.3/24").as_deref(), Some("10.1.2.3/24"));
        assert_eq!(shown("fd00::/64").as_deref(), Some("fd00::/64"));
        assert_eq!(shown("::ffff:10.1.2.3/120").as_deref(), Some("10.1.2.3/24"));
        assert_eq!(shown("::/0").as_deref(), Some("::/0"));
        for wrong in [
            "010.1.2.0/24",
            "10.1.2.0",
            "10.1.2.0/",
            "10.1.2.0/33",
            "10.1.2.0/+24",
            "10.1.2/24",
            "fd00::/129",
        ] {
            assert_eq!(network(wrong), None, "{wrong}");
        }
    }
}
