//! The listening sockets of a server.

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::task::Poll;

use tokio::net::{TcpListener, TcpSocket, TcpStream};

use holdfast_sys::link;

/// Maximum number of connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// The sockets of one server, which share its limits.
pub struct Listeners {
    all: Vec<TcpListener>,
    /// The socket that is polled first. It rotates, so that a busy socket does not starve the others.
    first: usize,
}

impl From<TcpListener> for Listeners {
    fn from(one: TcpListener) -> Listeners {
        Listeners {
            all: vec![one],
            first: 0,
        }
    }
}

impl Listeners {
    /// Listens on all `addresses`, with one port; port 0 selects a free one. An address that this machine does not have
    /// is not an error: the socket serves as soon as the address is assigned.
    ///
    /// # Errors
    ///
    /// Returns the address on which listening failed, and the cause.
    pub fn bind(addresses: &[IpAddr], mut port: u16) -> Result<Listeners, (SocketAddr, io::Error)> {
        let mut all = vec![];
        for address in addresses {
            let address = SocketAddr::new(*address, port);
            let listener = bind(address).map_err(|e| (address, e))?;
            let bound = listener.local_addr().map_err(|e| (address, e))?;
            port = bound.port();
            all.push(listener);
        }
        Ok(Listeners { all, first: 0 })
    }

    /// Returns the port of the sockets; `None` if there is no socket.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        Some(self.all.first()?.local_addr().ok()?.port())
    }

    /// Accepts the next connection.
    pub(super) async fn accept(&mut self) -> io::Result<(TcpStream, SocketAddr)> {
        let (all, count) = (&self.all, self.all.len().max(1));
        self.first = (self.first + 1) % count;
        let first = self.first;
        // Cancel-safe: a connection is accepted only when it is returned.
        poll_fn(|context| {
            let (after, before) = (all.iter().skip(first), all.iter().take(first));
            for listener in after.chain(before) {
                if let Poll::Ready(accepted) = listener.poll_accept(context) {
                    return Poll::Ready(accepted);
                }
            }
            Poll::Pending
        })
        .await
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    socket.set_reuseaddr(true)?;
    link::bind_to_any(&socket)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_sockets_are_served_on_one_port() {
        let addresses = ["127.0.0.1", "127.0.0.2"].map(|a| a.parse().expect("an address"));
        let mut listeners = Listeners::bind(&addresses, 0).expect("a free port");
        let port = listeners.port().expect("a port");
        for address in addresses.iter().chain(&addresses) {
            let client = TcpStream::connect((*address, port))
                .await
                .expect("connects");
            let (_, peer) = listeners.accept().await.expect("accepts");
            assert_eq!(client.local_addr().expect("an address"), peer);
        }
        let elsewhere = TcpStream::connect(("127.0.0.3", port)).await;
        assert!(
            elsewhere.is_err(),
            "the server does not listen on other addresses"
        );
        let taken = Listeners::bind(&addresses[1..], port).map(|_| ());
        assert_eq!(
            taken.map_err(|(a, _)| a),
            Err(SocketAddr::new(addresses[1], port))
        );
    }

    /// The node's address may be assigned after the control plane has started.
    #[tokio::test]
    async fn an_address_that_the_machine_does_not_have_can_be_bound() {
        let absent = ["127.0.0.1", "192.0.2.7"].map(|a| a.parse().expect("an address"));
        assert!(Listeners::bind(&absent, 0).is_ok());
    }
}
