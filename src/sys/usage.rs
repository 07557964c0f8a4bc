//! Measures the disk usage of a directory by walking it. Follows no symlinks and stays on the
//! filesystem. The walk stops at a limit and pauses regularly. The tree may have any depth.

use std::collections::HashSet;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use nix::dir::Dir;
use nix::fcntl::{AtFlags, openat};
use nix::sys::stat::{FileStat, Mode, fstat, fstatat};

use super::descent::{Descent, FLAGS};

/// Number of files after which the walk pauses, and the duration of
/// the pause, so that it does not monopolise disks and processors.
const PAUSE_EVERY: (u64, Duration) = (2_000, Duration::from_millis(2));

/// The disk usage of a directory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Allocated bytes.
    pub bytes: u64,
    /// The number of files and directories.
    pub inodes: u64,
}

struct Walk {
    usage: Usage,
    stop_above: u64,
    device: u64,
    /// Inodes of files with several hard links, which count once.
    linked: HashSet<u64>,
}

impl Walk {
    fn count(&mut self, stat: &FileStat) {
        if stat.st_nlink > 1
            && stat.st_mode & libc::S_IFMT != libc::S_IFDIR
            && !self.linked.insert(stat.st_ino)
        {
            return;
        }
        self.usage.bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        self.usage.inodes += 1;
        if self.usage.inodes.is_multiple_of(PAUSE_EVERY.0) {
            std::thread::sleep(PAUSE_EVERY.1);
        }
    }

    /// Counts the contents of a directory and returns its subdirectories.
    fn list(&mut self, dir: BorrowedFd<'_>) -> io::Result<Vec<CString>> {
        let mut below = vec![];
        for entry in Dir::from_fd(dir.try_clone_to_owned()?)?.iter() {
            let entry = entry?;
            let name = entry.file_name();
            if name.to_bytes() == b"." || name.to_bytes() == b".." {
                continue;
            }
            // A file that was removed meanwhile uses nothing.
            let Ok(stat) = fstatat(dir, name, AtFlags::AT_SYMLINK_NOFOLLOW) else {
                continue;
            };
            if stat.st_dev != self.device {
                continue;
            }
            self.count(&stat);
            if self.usage.bytes > self.stop_above {
                break;
            }
            if stat.st_mode & libc::S_IFMT == libc::S_IFDIR {
                below.push(name.to_owned());
            }
        }
        Ok(below)
    }

    fn tree(&mut self, top: OwnedFd) -> io::Result<()> {
        let below = self.list(top.as_fd())?;
        let mut descent = Descent::new(top, below);
        while self.usage.bytes <= self.stop_above {
            let Some(name) = descent.next() else {
                match descent.leave() {
                    Ok(true) => continue,
                    Ok(false) => break,
                    // A directory that was moved meanwhile is counted next time.
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => return Err(error),
                }
            };
            let Ok(dir) = openat(descent.here(), name.as_c_str(), FLAGS, Mode::empty()) else {
                continue;
            };
            if fstat(&dir)?.st_dev == self.device {
                let below = self.list(dir.as_fd())?;
                descent.enter(dir, below)?;
            }
        }
        Ok(())
    }
}

/// The disk usage of a directory. Counting stops above `stop_above` bytes. A missing directory uses nothing.
pub fn of(path: &Path, stop_above: u64) -> io::Result<Usage> {
    let dir = match nix::fcntl::open(path, FLAGS, Mode::empty()) {
        Ok(dir) => dir,
        Err(nix::errno::Errno::ENOENT) => return Ok(Usage::default()),
        Err(error) => return Err(error.into()),
    };
    let stat = fstat(&dir)?;
    let mut walk = Walk {
        usage: Usage::default(),
        stop_above,
        device: stat.st_dev,
        linked: HashSet::new(),
    };
    walk.count(&stat);
    walk.tree(dir)?;
    Ok(walk.usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hard_links_are_counted_once_and_symlinks_not_followed() {
        let (dir, outside) = (
            tempfile::tempdir().expect("a directory"),
            tempfile::tempdir().expect("a directory"),
        );
        let empty = of(dir.path(), u64::MAX).expect("counted");
        std::fs::write(outside.path().join("large"), vec![1; 1 << 20]).expect("write");
        std::os::unix::fs::symlink(outside.path(), dir.path().join("link")).expect("link");
        std::fs::create_dir_all(dir.path().join("a/b")).expect("mkdir");
        std::fs::write(dir.path().join("a/b/f"), vec![1; 256 << 10]).expect("write");
        std::fs::hard_link(dir.path().join("a/b/f"), dir.path().join("again")).expect("link");
        let used = of(dir.path(), u64::MAX).expect("counted");
        assert_eq!(used.inodes, empty.inodes + 4);
        let grown = used.bytes - empty.bytes;
        assert!((256 << 10..300 << 10).contains(&grown), "{grown}");
        assert!(
            of(dir.path(), 1 << 10).expect("counted").inodes < used.inodes,
            "counting stops at the limit"
        );
        assert_eq!(
            of(&dir.path().join("none"), 0).expect("counted"),
            Usage::default()
        );
    }

    #[test]
    fn trees_of_any_depth_are_counted_completely() {
        use crate::descent::tests::{deep, with_a_small_stack};
        use crate::removal::remove_tree;

        let dir = tempfile::tempdir().expect("a directory");
        let top = dir.path().join("tree");
        std::fs::create_dir(&top).expect("mkdir");
        let empty = of(&top, u64::MAX).expect("counted");
        deep(&top, 5000);
        // Another branch, which is walked after the way back up.
        std::fs::create_dir_all(top.join("a/b")).expect("mkdir");
        let used = with_a_small_stack(|| of(&top, u64::MAX));
        assert_eq!(remove_tree(&top), Ok(()));
        let used = used.expect("counted");
        assert_eq!(used.inodes, empty.inodes + 5000 + 1 + 2);
        assert!(used.bytes >= empty.bytes + 4096, "{used:?}");
    }
}
