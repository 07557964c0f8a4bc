//! Unix sockets of local services.

use std::fs::Permissions;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

/// Listens at a path, with permissions for the owner of this process
/// only. Replaces a stale socket (see [`clear`]). Never blocks.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    clear(path)?;
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Removes a stale socket, that is, one without a listening process. If a process listens,
/// even one that is too busy to accept, returns `AddrInUse`. Returns `AlreadyExists` for a
/// file that is not a socket, and does not remove it. A missing file is no error.
pub fn clear(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            format!("{} exists and is not a socket: remove it", path.display()),
        )),
        Ok(_) if is_served(path)? => Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            format!("another process listens on {}", path.display()),
        )),
        Ok(_) => std::fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Whether a process listens at this socket. A non-blocking `connect` fails with `EAGAIN` if the backlog is full, and
/// with `EPROTOTYPE` if the socket is of another type (datagrams). Only `ECONNREFUSED` means that no process listens.
fn is_served(path: &Path) -> io::Result<bool> {
    match connect(client()?.as_raw_fd(), &UnixAddr::new(path)?) {
        Ok(()) | Err(Errno::EAGAIN | Errno::EPROTOTYPE) => Ok(true),
        Err(Errno::ECONNREFUSED | Errno::ENOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// A non-blocking stream socket.
pub fn client() -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket(AddressFamily::Unix, SockType::Stream, flags, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_and_an_active_one_is_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("socket");
        let first = listen(&path).expect("the path is free");
        let mode = std::fs::metadata(&path).expect("a socket").permissions();
        assert_eq!(mode.mode() & 0o777, 0o600);
        let error = listen(&path).expect_err("another process listens");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(first);
        listen(&path).expect("the stale socket is replaced");
    }

    #[test]
    fn a_process_that_does_not_accept_still_listens() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("socket");
        let busy = listen(&path).expect("the path is free");
        let address = UnixAddr::new(&path).expect("an address");
        let (first, next) = (client().expect("a socket"), client().expect("a socket"));
        nix::sys::socket::listen(&busy, nix::sys::socket::Backlog::new(0).expect("0"))
            .expect("a shorter backlog");
        connect(first.as_raw_fd(), &address).expect("the backlog has room for one");
        let full = connect(next.as_raw_fd(), &address).expect_err("the backlog is full");
        assert_eq!(full, Errno::EAGAIN);
        let error = listen(&path).expect_err("a process listens");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn a_path_that_is_not_a_stale_socket_is_kept() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("file");
        std::fs::write(&file, "kept").expect("a file");
        let error = listen(&file).expect_err("the path is a file");
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&file).expect("the file is kept"), b"kept");
        let datagrams = dir.path().join("datagrams");
        let _served = std::os::unix::net::UnixDatagram::bind(&datagrams).expect("a socket");
        let error = listen(&datagrams).expect_err("a process reads the datagram socket");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }
}
