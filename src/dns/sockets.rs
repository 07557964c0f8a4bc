//! The server's sockets.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::sys::socket::{
    AddressFamily, Backlog, SetSockOpt, SockFlag, SockType, SockaddrStorage, bind, listen,
    setsockopt, socket, sockopt,
};
use tokio::net::{TcpListener, UdpSocket};

/// Bytes of a UDP socket's receive buffer: about 1,000 small queries, which arrive while the processor is busy.
const RECEIVE_BUFFER: usize = 1 << 20;
/// Connections that wait for `accept`.
const BACKLOG: i32 = 128;

/// Binds a UDP socket. Several sockets may have the same address (SO_REUSEPORT): the kernel spreads clients over them.
///
/// # Errors
///
/// The address is in use by another user's socket, or has no meaning on this machine.
pub(crate) fn bind_udp(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = open(address, SockType::Datagram)?;
    set(&socket, sockopt::ReusePort, &true)?;
    // Needs CAP_NET_ADMIN; the default size is enough for a quiet machine.
    let _larger = setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER);
    bind(socket.as_raw_fd(), &SockaddrStorage::from(address))?;
    UdpSocket::from_std(socket.into())
}

/// Binds and listens.
///
/// # Errors
///
/// As for [`bind_udp`].
pub(crate) fn bind_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = open(address, SockType::Stream)?;
    // A restart must not wait for old connections.
    set(&socket, sockopt::ReuseAddr, &true)?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(address))?;
    listen(&socket, Backlog::new(BACKLOG)?)?;
    TcpListener::from_std(socket.into())
}

fn open(address: SocketAddr, kind: SockType) -> io::Result<OwnedFd> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(family, kind, flags, None)?;
    match address {
        // The route that makes the address local may be added later.
        SocketAddr::V4(_) => set(&socket, sockopt::IpFreebind, &true)?,
        SocketAddr::V6(_) => {
            set(&socket, sockopt::Ipv6V6Only, &true)?;
            // IP_FREEBIND is valid for both families.
            set(&socket, sockopt::IpFreebind, &true)?;
        }
    }
    Ok(socket)
}

fn set<O: SetSockOpt<Val = bool>>(socket: &OwnedFd, option: O, value: &bool) -> io::Result<()> {
    Ok(setsockopt(socket, option, value)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn addresses_may_become_local_later_and_udp_sockets_share_one() {
        // TEST-NET-1 (RFC 5737): no machine has the address.
        let foreign = SocketAddr::from(([192, 0, 2, 77], 0));
        assert!(UdpSocket::bind(foreign).await.is_err());
        let first = bind_udp(foreign).unwrap();
        let address = first.local_addr().unwrap();
        bind_udp(address).unwrap();
        let listener = bind_tcp(address).unwrap();
        assert!(bind_tcp(address).is_err());
        drop(listener);
        bind_tcp(address).unwrap();
    }

    #[tokio::test]
    async fn both_families_have_sockets_with_the_same_port() {
        let v4 = bind_udp(SocketAddr::from(([0, 0, 0, 0], 0))).unwrap();
        let port = v4.local_addr().unwrap().port();
        let v6 = bind_udp(SocketAddr::from(([0_u16; 8], port)));
        match v6 {
            Ok(v6) => assert_eq!(v6.local_addr().unwrap().port(), port),
            Err(e) => assert_eq!(e.raw_os_error(), Some(nix::libc::EAFNOSUPPORT)),
        }
    }
}
