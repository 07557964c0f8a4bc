//! How much of a disk a directory uses: counted by walking it, file by file, never through a link and never into
//! another filesystem. Bounded: it stops as soon as it has seen enough, and rests on its way.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::Duration;

use nix::dir::Dir;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{FileStat, Mode, fstat, fstatat};

/// After so many files it rests for a moment, so that disks and processors are there for others.
const BREATH: (u64, Duration) = (2_000, Duration::from_millis(2));
/// How deep a tree is followed.
const DEPTH: usize = 1000;

/// What a directory uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes on the disk.
    pub bytes: u64,
    /// Files and directories.
    pub inodes: u64,
}

struct Walk {
    usage: Usage,
    enough: u64,
    device: u64,
    /// Files with several names count once.
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
        if self.usage.inodes.is_multiple_of(BREATH.0) {
            std::thread::sleep(BREATH.1);
        }
    }

    fn dir(&mut self, dir: OwnedFd, depth: usize) -> io::Result<()> {
        let mut listed = Dir::from_fd(dir)?;
        let mut below = vec![];
        let held = listed.as_fd().try_clone_to_owned()?;
        for entry in listed.iter() {
            let entry = entry?;
            let name = entry.file_name();
            if name.to_bytes() == b"." || name.to_bytes() == b".." {
                continue;
            }
            // What goes away meanwhile uses nothing.
            let Ok(stat) = fstatat(&held, name, AtFlags::AT_SYMLINK_NOFOLLOW) else {
                continue;
            };
            if stat.st_dev != self.device {
                continue;
            }
            self.count(&stat);
            if self.usage.bytes > self.enough {
                return Ok(());
            }
            if stat.st_mode & libc::S_IFMT == libc::S_IFDIR && depth < DEPTH {
                below.push(name.to_owned());
            }
        }
        for name in below {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let Ok(dir) = openat(&held, name.as_c_str(), flags, Mode::empty()) else {
                continue;
            };
            if fstat(&dir)?.st_dev == self.device {
                self.dir(dir, depth + 1)?;
            }
            if self.usage.bytes > self.enough {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// What a directory uses; counting ends once it is more than `enough` bytes. A missing one uses nothing.
pub fn of(path: &Path, enough: u64) -> io::Result<Usage> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let dir = match nix::fcntl::open(path, flags, Mode::empty()) {
        Ok(dir) => dir,
        Err(nix::errno::Errno::ENOENT) => return Ok(Usage::default()),
        Err(error) => return Err(error.into()),
    };
    let stat = fstat(&dir)?;
    let mut walk = Walk {
        usage: Usage::default(),
        enough,
        device: stat.st_dev,
        linked: HashSet::new(),
    };
    walk.count(&stat);
    walk.dir(dir, 0)?;
    Ok(walk.usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_count_once_and_links_lead_nowhere() {
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
            "it stops when it has seen enough"
        );
        assert_eq!(
            of(&dir.path().join("none"), 0).expect("counted"),
            Usage::default()
        );
    }
}
