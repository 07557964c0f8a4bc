//! Name servers in the node's resolv.conf (resolv.conf(5)).

use std::net::{IpAddr, SocketAddr, SocketAddrV6};

/// Most name servers that are used. glibc stops at three.
const MAX_SERVERS: usize = 8;
const PORT: u16 = 53;

/// The name servers of a resolv.conf in their order, without duplicates. Lines that are not understood are ignored, as resolvers
/// do. `interface` finds the number of a link-local address's zone, as in `fe80::1%eth0`.
pub(crate) fn name_servers(text: &str, interface: impl Fn(&str) -> Option<u32>) -> Vec<SocketAddr> {
    let mut servers = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        if words.next() != Some("nameserver") {
            continue;
        }
        let Some(server) = words.next().and_then(|word| server(word, &interface)) else {
            continue;
        };
        if !servers.contains(&server) && servers.len() < MAX_SERVERS {
            servers.push(server);
        }
    }
    servers
}

fn server(word: &str, interface: impl Fn(&str) -> Option<u32>) -> Option<SocketAddr> {
    match word.split_once('%') {
        None => Some(SocketAddr::new(word.parse::<IpAddr>().ok()?, PORT)),
        Some((address, zone)) => {
            let scope = zone.parse().ok().or_else(|| interface(zone))?;
            Some(SocketAddrV6::new(address.parse().ok()?, PORT, 0, scope).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_are_read_in_order() {
        let text = "# nameserver 192.0.2.9\n;x\nnameserver 192.0.2.1 # first\n\tnameserver\t2001:db8::1\r\n\
            nameserver 192.0.2.1\nnameserver\nnameserver example.com\nnameservers 192.0.2.8\n\
            nameserver fe80::1%eth0\nnameserver fe80::2%7\nnameserver fe80::3%none\nsearch nameserver 192.0.2.7\n";
        let found = name_servers(text, |name| (name == "eth0").then_some(3));
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        let expected = [
            "192.0.2.1:53",
            "[2001:db8::1]:53",
            "[fe80::1%3]:53",
            "[fe80::2%7]:53",
        ];
        assert_eq!(found, expected);
        let many: String = (0..1000)
            .map(|n| format!("nameserver 10.0.{}.{}\n", n / 200, n % 200))
            .collect();
        assert_eq!(name_servers(&many, |_| None).len(), MAX_SERVERS);
        assert!(name_servers("", |_| None).is_empty());
    }
}
