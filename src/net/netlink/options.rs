//! Options of netlink sockets that nix does not have.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

use nix::libc;

fn enable(socket: impl AsFd, option: libc::c_int) -> io::Result<()> {
    const SIZE: libc::socklen_t = size_of::<libc::c_int>() as libc::socklen_t;
    let on: libc::c_int = 1;
    // SAFETY: the value lives through the call and has the given size, and the descriptor is open.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_NETLINK,
            option,
            (&raw const on).cast(),
            SIZE,
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Keeps the kernel from repeating rejected messages in its errors, which would overflow the receive buffer after a large
/// batch, and adds the kernel's explanation to errors.
pub(super) fn shorten_errors(socket: impl AsFd) -> io::Result<()> {
    enable(&socket, libc::NETLINK_CAP_ACK)?;
    enable(&socket, libc::NETLINK_EXT_ACK)
}
