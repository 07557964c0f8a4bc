//! Files below a directory that a pod can influence: opened with `openat2` and `RESOLVE_BENEATH`, so
//! that no link leads outside, whoever swaps what meanwhile.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{Mode, mkdirat};

/// A directory handle.
#[derive(Debug)]
pub struct Dir(OwnedFd);

fn how(flags: OFlag) -> OpenHow {
    OpenHow::new().flags(flags | OFlag::O_CLOEXEC).resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS)
}

impl Dir {
    /// Opens a directory whose path is ours.
    pub fn open(path: &Path) -> io::Result<Dir> {
        let fd = nix::fcntl::open(path, OFlag::O_DIRECTORY | OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
        Ok(Dir(fd))
    }

    /// Opens a directory below this one.
    pub fn open_dir(&self, path: &Path) -> io::Result<Dir> {
        Ok(Dir(openat2(self.0.as_fd(), path, how(OFlag::O_DIRECTORY | OFlag::O_PATH))?))
    }

    /// Opens or makes every directory of a relative path, mode 0750.
    pub fn make_dirs(&self, path: &Path) -> io::Result<Dir> {
        let mut here = Dir(self.0.try_clone()?);
        for part in path.components() {
            let part = Path::new(part.as_os_str());
            match mkdirat(here.0.as_fd(), part, Mode::from_bits_truncate(0o750)) {
                Err(nix::errno::Errno::EEXIST) | Ok(()) => {}
                Err(error) => return Err(error.into()),
            }
            here = here.open_dir(part)?;
        }
        Ok(here)
    }

    /// The path by which the kernel finds this directory again, for calls that take only paths. It is
    /// valid while the handle is open.
    #[must_use]
    pub fn magic_path(&self) -> std::path::PathBuf {
        use std::os::fd::AsRawFd as _;
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }

    /// What the handle points to now, as a path of the host.
    pub fn real_path(&self) -> io::Result<std::path::PathBuf> {
        std::fs::read_link(self.magic_path())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_lead_outside_are_refused() {
        let outside = tempfile::tempdir().expect("a directory");
        let inside = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(inside.path().join("fine")).expect("mkdir");
        std::os::unix::fs::symlink(outside.path(), inside.path().join("out")).expect("link");
        std::os::unix::fs::symlink("fine", inside.path().join("in")).expect("link");
        let dir = Dir::open(inside.path()).expect("open");
        assert!(dir.open_dir(Path::new("fine")).is_ok() && dir.open_dir(Path::new("in")).is_ok());
        for path in ["out", "..", "fine/../..", "/etc", "out/x"] {
            assert!(dir.open_dir(Path::new(path)).is_err(), "{path}");
            assert!(dir.make_dirs(Path::new(path)).is_err(), "{path}");
        }
        assert!(dir.make_dirs(Path::new("a/b")).expect("made").real_path().expect("a path").ends_with("a/b"));
    }
}
