//! Addresses of a machine that no device has.

use std::net::{IpAddr, UdpSocket};

use holdfast_net::netlink::Socket;

use crate::namespace::Namespace;

#[test]
fn a_local_address_can_be_bound_until_it_is_deleted() {
    let Some(namespace) = Namespace::new() else {
        return;
    };
    for (text, family) in [("10.96.0.10", "-4"), ("fd00::a", "-6")] {
        let address: IpAddr = text.parse().unwrap();
        let is_routed = || {
            namespace
                .ip(&[family, "route", "show", "table", "local"])
                .contains(text)
        };
        // An IPv6 socket also needs IPV6_FREEBIND.
        let binds = || namespace.inside(|| UdpSocket::bind((address, 0)).is_ok());
        let change = |change: fn(&mut Socket, IpAddr) -> std::io::Result<()>| {
            namespace.inside(|| change(&mut Socket::route().unwrap(), address).unwrap());
        };
        change(Socket::delete_local);
        assert!(!is_routed() && !binds(), "{text}");
        change(Socket::add_local);
        change(Socket::add_local);
        assert!(is_routed() && (address.is_ipv6() || binds()), "{text}");
        change(Socket::delete_local);
        assert!(!is_routed() && !binds(), "{text}");
    }
}
