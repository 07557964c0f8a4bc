//! Traverses directory trees that a pod has created. They can be deeper than the
//! stack allows for recursion, or than the number of files that a process may open.
//!
//! Only the topmost directories and the current one stay open. The way up to the others is `..`, and the directory
//! found there must be the one from which the traversal came. If a directory was moved meanwhile, going up fails.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, fstat};

/// The number of topmost directories that stay open.
const MAX_OPEN_DIRS: usize = 64;

/// Flags to open a pod's directories; symlinks are not followed.
pub(super) const FLAGS: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);

/// An ancestor of the current directory.
struct Level<T> {
    /// Open if it is one of the topmost.
    dir: Option<OwnedFd>,
    identity: (u64, u64),
    below: Vec<T>,
}

/// The current directory of a traversal, the items still to visit in it, and its ancestors.
pub(super) struct Descent<T> {
    here: OwnedFd,
    below: Vec<T>,
    above: Vec<Level<T>>,
}

/// The device and inode number of a directory.
fn identity(dir: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let stat = fstat(dir)?;
    Ok((stat.st_dev, stat.st_ino))
}

impl<T> Descent<T> {
    /// Starts at the top of a tree.
    pub(super) fn new(top: OwnedFd, below: Vec<T>) -> Descent<T> {
        Descent {
            here: top,
            below,
            above: vec![],
        }
    }

    /// The current directory.
    pub(super) fn here(&self) -> BorrowedFd<'_> {
        self.here.as_fd()
    }

    /// The next item to visit in the current directory.
    pub(super) fn next(&mut self) -> Option<T> {
        self.below.pop()
    }

    /// Descends into a directory.
    pub(super) fn enter(&mut self, dir: OwnedFd, below: Vec<T>) -> io::Result<()> {
        let identity = identity(self.here())?;
        let left = std::mem::replace(&mut self.here, dir);
        self.above.push(Level {
            dir: (self.above.len() < MAX_OPEN_DIRS).then_some(left),
            identity,
            below: std::mem::replace(&mut self.below, below),
        });
        Ok(())
    }

    /// Returns to the parent; false at the top.
    ///
    /// # Errors
    ///
    /// The parent was moved or cannot be opened. The traversal then continues at
    /// the lowest directory that stayed open, and skips the items in between.
    pub(super) fn leave(&mut self) -> io::Result<bool> {
        let Some(mut level) = self.above.pop() else {
            return Ok(false);
        };
        let mut outcome = Ok(true);
        loop {
            match level.dir.map_or_else(|| self.parent(level.identity), Ok) {
                Ok(dir) => {
                    (self.here, self.below) = (dir, level.below);
                    return outcome;
                }
                Err(error) => outcome = Err(error),
            }
            self.above.truncate(MAX_OPEN_DIRS);
            match self.above.pop() {
                Some(held) => level = held,
                None => return outcome,
            }
        }
    }

    fn parent(&self, expected: (u64, u64)) -> io::Result<OwnedFd> {
        let dir = openat(self.here(), c"..", FLAGS, Mode::empty())?;
        if identity(dir.as_fd())? != expected {
            return Err(io::Error::new(
                io::ErrorKind::Interrupted,
                "a directory was moved while its files were walked",
            ));
        }
        Ok(dir)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::path::Path;

    /// Creates nested directories, deeper than the maximum length of a path, and a file in the lowest one.
    pub(crate) fn deep(top: &Path, depth: usize) {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let mut here = nix::fcntl::open(top, flags, Mode::empty()).expect("open");
        for _ in 0..depth {
            nix::sys::stat::mkdirat(&here, "deep", Mode::from_bits_truncate(0o700)).expect("mkdir");
            here = openat(&here, "deep", flags, Mode::empty()).expect("open");
        }
        let made = OFlag::O_CREAT | OFlag::O_WRONLY;
        let file =
            openat(&here, "file", made, Mode::from_bits_truncate(0o600)).expect("a file is made");
        nix::unistd::write(&file, &[1; 4096]).expect("written");
    }

    /// Runs `work` in a thread with the stack size of the threads that walk volumes.
    pub(crate) fn with_a_small_stack<T: Send>(work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(256 << 10);
            let thread = thread.spawn_scoped(scope, work).expect("a thread");
            thread.join().expect("it ends")
        })
    }

    #[test]
    fn a_directory_moved_during_the_walk_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        deep(dir.path(), MAX_OPEN_DIRS + 4);
        let open = |dir: BorrowedFd<'_>| openat(dir, "deep", FLAGS, Mode::empty()).expect("open");
        let top = nix::fcntl::open(dir.path(), FLAGS, Mode::empty()).expect("open");
        let mut descent = Descent::new(top, vec![0]);
        for depth in 1..=MAX_OPEN_DIRS + 4 {
            let below = open(descent.here());
            descent.enter(below, vec![depth]).expect("entered");
        }
        let held = descent.above.iter().filter(|l| l.dir.is_some()).count();
        assert_eq!(
            held, MAX_OPEN_DIRS,
            "the number of open directories is limited"
        );
        assert!(descent.leave().expect("up"));
        assert_eq!(descent.next(), Some(MAX_OPEN_DIRS + 3));
        // Move the current directory to the top. Its new parent is not the one from which the traversal came.
        let here = format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&descent.here())
        );
        let here = std::fs::read_link(here).expect("its path");
        std::fs::rename(here, dir.path().join("moved")).expect("moved");
        let lost = descent.leave().expect_err("the directory was moved");
        assert_eq!(lost.kind(), io::ErrorKind::Interrupted);
        assert_eq!(
            descent.next(),
            Some(MAX_OPEN_DIRS - 1),
            "the lowest directory that is still open"
        );
        for depth in (0..MAX_OPEN_DIRS - 1).rev() {
            assert!(descent.leave().expect("up"));
            assert_eq!(descent.next(), Some(depth));
        }
        assert!(!descent.leave().expect("the top"));
    }
}
