//! Sends and receives IPv4 packets on a link that has no address yet.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::time::Duration;

use nix::libc;

/// A packet socket for one link, in the namespace in which it was opened.
pub struct Packets {
    socket: OwnedFd,
    link: u32,
}

fn address(link: u32) -> libc::sockaddr_ll {
    // SAFETY: all zeros are a valid value of this plain structure.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = (libc::ETH_P_IP as u16).to_be();
    address.sll_ifindex = i32::try_from(link).unwrap_or(0);
    address.sll_halen = 6;
    address.sll_addr[..6].fill(0xff);
    address
}

const SIZE: libc::socklen_t = size_of::<libc::sockaddr_ll>() as libc::socklen_t;

impl Packets {
    /// Opens a socket for the link with this index.
    pub fn open(link: u32) -> io::Result<Packets> {
        let protocol = i32::from((libc::ETH_P_IP as u16).to_be());
        // SAFETY: a plain call; the descriptor that it returns has no owner yet.
        let raw = unsafe {
            libc::socket(
                libc::AF_PACKET,
                libc::SOCK_DGRAM | libc::SOCK_CLOEXEC,
                protocol,
            )
        };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just opened.
        let socket = unsafe { OwnedFd::from_raw_fd(raw) };
        let address = address(link);
        // SAFETY: the address lives through the call and has the given length.
        if unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), SIZE) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Packets { socket, link })
    }

    /// Sends a packet to the broadcast address of the link.
    pub fn send(&self, packet: &[u8]) -> io::Result<()> {
        let address = address(self.link);
        // SAFETY: packet and address live through the call and have the given lengths.
        let sent = unsafe {
            libc::sendto(
                self.socket.as_raw_fd(),
                packet.as_ptr().cast(),
                packet.len(),
                0,
                (&raw const address).cast(),
                SIZE,
            )
        };
        if sent < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    /// Receives the next packet; `None` after the timeout.
    pub fn receive(&self, timeout: Duration) -> io::Result<Option<Vec<u8>>> {
        use nix::sys::socket::{MsgFlags, recv, setsockopt, sockopt};
        use nix::sys::time::{TimeVal, TimeValLike as _};
        // A timeout of zero would block indefinitely.
        let timeout = i64::try_from(timeout.as_millis())
            .unwrap_or(i64::MAX)
            .max(1);
        setsockopt(
            &self.socket,
            sockopt::ReceiveTimeout,
            &TimeVal::milliseconds(timeout),
        )?;
        let mut buffer = vec![0; 4096];
        match recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
            Ok(length) => {
                buffer.truncate(length);
                Ok(Some(buffer))
            }
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}
