//! The DNS server's address on this node. A route of the kernel's local table makes it an address of this machine without a
//! device, as `ip route add local ADDRESS dev lo` does.

use std::io;
use std::net::IpAddr;

use holdfast_net::netlink::Socket;

/// Adds the addresses. An address that is there already is no error.
///
/// # Errors
///
/// Returns the address that the kernel refuses, and its error.
pub(crate) fn add(addresses: &[IpAddr]) -> Result<(), (IpAddr, io::Error)> {
    each(addresses, Socket::add_local)
}

/// Removes the addresses. A missing address is no error.
///
/// # Errors
///
/// Returns the address that the kernel does not remove, and its error.
pub(crate) fn remove(addresses: &[IpAddr]) -> Result<(), (IpAddr, io::Error)> {
    each(addresses, Socket::delete_local)
}

fn each(
    addresses: &[IpAddr],
    change: impl Fn(&mut Socket, IpAddr) -> io::Result<()>,
) -> Result<(), (IpAddr, io::Error)> {
    for address in addresses {
        let changed = Socket::route().and_then(|mut socket| change(&mut socket, *address));
        changed.map_err(|error| (*address, error))?;
    }
    Ok(())
}
