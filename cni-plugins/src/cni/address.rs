//! Parses addresses and networks of configurations and results. Accepts exactly what the reference
//! plugins (containernetworking/plugins) accept, so that a configuration has the same meaning to both.

use std::net::IpAddr;

use ipnet::IpNet;

/// Parses an address. An IPv4-mapped IPv6 address (`::ffff:192.0.2.1`) becomes IPv4.
/// Numbers with leading zeros are rejected, because some parsers read them as octal.
#[must_use]
pub fn address(text: &str) -> Option<IpAddr> {
    text.parse::<IpAddr>().ok().map(|a| a.to_canonical())
}

/// Parses an address with the prefix length of its network, by the rules of [`address`].
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
    fn addresses_are_parsed_as_in_the_reference() {
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
    fn networks_are_parsed_as_in_the_reference() {
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
