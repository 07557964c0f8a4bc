//! Bytes of a TCP connection that its peer has not acknowledged.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};

// `SIOCOUTQ` of the kernel's `linux/sockios.h` (tcp(7)).
nix::ioctl_read_bad!(send_queue, libc::TIOCOUTQ, libc::c_int);

/// A second descriptor of a connection's socket, to observe the send queue while another owner writes. The connection
/// stays open until this value is dropped.
#[derive(Debug)]
pub struct SendQueue(OwnedFd);

impl SendQueue {
    /// Duplicates the descriptor of a connected TCP socket.
    pub fn of(socket: &impl AsFd) -> io::Result<SendQueue> {
        Ok(SendQueue(socket.as_fd().try_clone_to_owned()?))
    }

    /// Bytes that were written and that the peer's kernel has not acknowledged. `None` if the kernel does not report them.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        let mut queued = 0;
        // SAFETY: the descriptor is open, and the kernel writes one c_int.
        unsafe { send_queue(self.0.as_raw_fd(), &raw mut queued) }.ok()?;
        u64::try_from(queued).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};

    #[test]
    fn the_queue_shrinks_as_the_peer_reads() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut writer = std::net::TcpStream::connect(listener.local_addr().expect("an address"))
            .expect("connected");
        let (mut reader, _) = listener.accept().expect("accepted");
        let queue = SendQueue::of(&writer).expect("a descriptor");
        writer.set_nonblocking(true).expect("set");
        let mut written = 0;
        while let Ok(length) = writer.write(&[0; 64 << 10]) {
            written += length;
        }
        let full = queue.bytes().expect("a length");
        assert!(full > 0 && full <= written as u64, "{full} of {written}");
        reader.read_exact(&mut vec![0; written]).expect("read");
        // Acknowledgements of the last bytes may be delayed.
        while queue.bytes().expect("a length") > 0 {
            std::thread::yield_now();
        }
        let other = std::fs::File::open("/dev/null").expect("open");
        assert_eq!(SendQueue::of(&other).expect("a descriptor").bytes(), None);
    }
}
