//! Unix sockets of services on this machine.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Listens at a path that only the owner of this process may connect to. A socket that a dead process left there is
/// replaced; one where somebody answers is an error of the kind `AddrInUse`.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    if UnixStream::connect(path).is_ok() {
        return Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            format!("another process listens at {}", path.display()),
        ));
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_socket_is_replaced_and_a_living_one_is_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("socket");
        let first = listen(&path).expect("nothing is there");
        let mode = std::fs::metadata(&path).expect("a socket").permissions();
        assert_eq!(mode.mode() & 0o777, 0o600);
        let error = listen(&path).expect_err("somebody listens");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(first);
        listen(&path).expect("the dead one is replaced");
    }
}
