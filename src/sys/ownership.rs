//! Changes the group ownership of all files of a volume. Follows no symlinks (`pkg/volume/volume_linux.go`).

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{FchmodatFlags, FileStat, Mode, fchmodat, fstat};
use nix::unistd::{Gid, fchownat};

use super::descent::{Descent, FLAGS};
use holdfast_core::lock::lock;

/// The mode bits that the group needs on files, and additionally on directories.
const FILE: u32 = 0o660;
const FILE_READ_ONLY: u32 = 0o440;
const DIR: u32 = 0o2110;

fn wanted(stat: &FileStat, read_only: bool) -> u32 {
    let bits = if read_only { FILE_READ_ONLY } else { FILE };
    if stat.st_mode & libc::S_IFMT == libc::S_IFDIR {
        bits | DIR
    } else {
        bits
    }
}

/// The progress of a running ownership change.
#[derive(Debug, Clone)]
pub struct OwnershipProgress {
    /// The start time.
    pub begun: Instant,
    files: Arc<AtomicU64>,
}

impl OwnershipProgress {
    /// The number of files changed so far.
    #[must_use]
    pub fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }
}

/// The running ownership changes by volume path.
static RUNNING: Mutex<BTreeMap<PathBuf, OwnershipProgress>> = Mutex::new(BTreeMap::new());

fn running() -> MutexGuard<'static, BTreeMap<PathBuf, OwnershipProgress>> {
    lock(&RUNNING)
}

/// The progress of the ownership change of a volume, if one is running.
#[must_use]
pub fn progress(root: &Path) -> Option<OwnershipProgress> {
    running().get(root).cloned()
}

/// A running ownership change.
struct OwnershipChange<'a> {
    root: &'a Path,
    changed: Arc<AtomicU64>,
    stop: &'a dyn Fn() -> bool,
}

impl<'a> OwnershipChange<'a> {
    fn begin(root: &'a Path, stop: &'a dyn Fn() -> bool) -> OwnershipChange<'a> {
        let changed = Arc::new(AtomicU64::new(0));
        let progress = OwnershipProgress {
            begun: Instant::now(),
            files: Arc::clone(&changed),
        };
        running().insert(root.into(), progress);
        OwnershipChange {
            root,
            changed,
            stop,
        }
    }

    /// Counts a changed file. Fails if the change is to stop.
    fn count(&mut self) -> io::Result<()> {
        let changed = self.changed.fetch_add(1, Ordering::Relaxed) + 1;
        if (self.stop)() {
            let why = format!("stopped after {changed} files");
            return Err(io::Error::new(io::ErrorKind::Interrupted, why));
        }
        Ok(())
    }
}

impl Drop for OwnershipChange<'_> {
    fn drop(&mut self) {
        running().remove(self.root);
    }
}

/// Sets group and mode of an open file, which may be an O_PATH handle.
fn set_file_group(fd: BorrowedFd<'_>, group: u32, read_only: bool) -> io::Result<()> {
    let stat = fstat(fd)?;
    if stat.st_gid != group {
        fchownat(
            fd,
            c"",
            None,
            Some(Gid::from_raw(group)),
            AtFlags::AT_EMPTY_PATH,
        )?;
    }
    if stat.st_mode & libc::S_IFMT == libc::S_IFLNK {
        return Ok(());
    }
    let mode = stat.st_mode & 0o7777;
    let wanted = mode | wanted(&stat, read_only);
    // Changing the group of a file clears its set-id bits, so restore them.
    if mode != wanted || (stat.st_gid != group && mode & 0o6000 != 0) {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        fchmodat(
            nix::fcntl::AT_FDCWD,
            path.as_str(),
            Mode::from_bits_truncate(wanted),
            FchmodatFlags::FollowSymlink,
        )?;
    }
    Ok(())
}

/// A name in a directory, and its file type if the directory contains it.
type Name = (CString, Option<Type>);

fn list(dir: BorrowedFd<'_>) -> io::Result<Vec<Name>> {
    let mut names = vec![];
    for entry in Dir::from_fd(dir.try_clone_to_owned()?)?.iter() {
        let entry = entry?;
        let name = entry.file_name().to_owned();
        if name.as_bytes() != b"." && name.as_bytes() != b".." {
            names.push((name, entry.file_type()));
        }
    }
    Ok(names)
}

/// The object that a name in a directory refers to.
enum Found {
    Gone,
    Dir(OwnedFd),
    /// An O_PATH handle.
    Other(OwnedFd),
}

fn open(dir: BorrowedFd<'_>, (name, kind): &Name) -> io::Result<Found> {
    let held = match openat(
        dir,
        name.as_c_str(),
        OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC,
        Mode::empty(),
    ) {
        Ok(held) => held,
        // The file was removed meanwhile.
        Err(Errno::ENOENT) => return Ok(Found::Gone),
        Err(error) => return Err(error.into()),
    };
    let is_dir = match kind {
        Some(kind) => *kind == Type::Directory,
        None => fstat(&held)?.st_mode & libc::S_IFMT == libc::S_IFDIR,
    };
    if !is_dir {
        return Ok(Found::Other(held));
    }
    match openat(dir, name.as_c_str(), FLAGS, Mode::empty()) {
        Ok(below) => Ok(Found::Dir(below)),
        // The directory was replaced by another object meanwhile; treat it as such.
        Err(Errno::ENOTDIR | Errno::ELOOP | Errno::ENOENT) => Ok(Found::Other(held)),
        Err(error) => Err(error.into()),
    }
}

/// Changes everything below a directory, at any depth. Changes each directory after its contents.
fn walk(
    top: OwnedFd,
    group: u32,
    read_only: bool,
    change: &mut OwnershipChange<'_>,
) -> io::Result<()> {
    let names = list(top.as_fd())?;
    let (mut descent, mut depth) = (Descent::new(top, names), 0_u64);
    loop {
        match descent.next() {
            Some(name) => match open(descent.here(), &name)? {
                Found::Gone => {}
                Found::Dir(dir) => {
                    let names = list(dir.as_fd())?;
                    descent.enter(dir, names)?;
                    depth += 1;
                }
                Found::Other(held) => {
                    set_file_group(held.as_fd(), group, read_only)?;
                    change.count()?;
                }
            },
            // The caller changes the top directory at the end.
            None if depth == 0 => return Ok(()),
            None => {
                set_file_group(descent.here(), group, read_only)?;
                change.count()?;
                descent.leave()?;
                depth -= 1;
            }
        }
    }
}

/// Changes the group ownership of a volume. With `on_mismatch`, does so only if the root does not have
/// the right group and mode (fsGroupChangePolicy). The root is changed last, so that an interrupted
/// change is repeated. Calls `stop` after each file. Returns whether there was anything to do.
///
/// # Errors
///
/// `Interrupted` if `stop` returned true, or if a directory was moved meanwhile.
pub fn set_group(
    root: &Path,
    group: u32,
    on_mismatch: bool,
    read_only: bool,
    stop: &dyn Fn() -> bool,
) -> io::Result<bool> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let dir = nix::fcntl::open(root, flags, Mode::empty())?;
    let stat = fstat(&dir)?;
    let bits = wanted(&stat, read_only);
    if on_mismatch && stat.st_gid == group && stat.st_mode & bits == bits {
        return Ok(false);
    }
    let mut change = OwnershipChange::begin(root, stop);
    walk(dir.try_clone()?, group, read_only, &mut change)?;
    set_file_group(dir.as_fd(), group, read_only)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    #[test]
    fn every_file_gets_the_group_and_link_targets_do_not() {
        if crate::skip::needs_root() {
            return;
        }
        let (volume, outside) = (
            tempfile::tempdir().expect("a directory"),
            tempfile::tempdir().expect("a directory"),
        );
        let (root, victim) = (volume.path(), outside.path().join("victim"));
        std::fs::write(&victim, "x").expect("write");
        std::fs::create_dir_all(root.join("a/b")).expect("mkdir");
        std::fs::write(root.join("a/b/f"), "x").expect("write");
        std::fs::set_permissions(root.join("a/b/f"), std::fs::Permissions::from_mode(0o4755))
            .expect("chmod");
        symlink(&victim, root.join("a/link")).expect("link");
        symlink(outside.path(), root.join("dir")).expect("link");
        let before = std::fs::metadata(&victim).expect("stat");
        assert!(set_group(root, 4242, false, false, &|| false).expect("given"));
        let stat = |path: &str| std::fs::symlink_metadata(root.join(path)).expect("stat");
        assert_eq!((stat("").gid(), stat("").mode() & 0o2770), (4242, 0o2770));
        assert_eq!(
            (stat("a/b").gid(), stat("a/b").mode() & 0o2770),
            (4242, 0o2770)
        );
        assert_eq!(
            (stat("a/b/f").gid(), stat("a/b/f").mode() & 0o7777),
            (4242, 0o4775)
        );
        assert_eq!(stat("a/link").gid(), 4242);
        let after = std::fs::metadata(&victim).expect("stat");
        assert_eq!((before.gid(), before.mode()), (after.gid(), after.mode()));
        // With `on_mismatch`, files below a root with the right group stay unchanged.
        std::os::unix::fs::chown(root.join("a/b/f"), None, Some(0)).expect("chown");
        assert!(!set_group(root, 4242, true, false, &|| false).expect("checked"));
        assert_eq!(stat("a/b/f").gid(), 0);
        set_group(root, 4242, false, true, &|| false).expect("given");
        assert_eq!(stat("a/b/f").gid(), 4242);
        // A stopped change leaves the root unchanged, and is repeated as a whole.
        let calls = std::cell::Cell::new(0);
        let stop = || calls.replace(calls.get() + 1) > 0;
        let stopped = set_group(root, 4343, true, false, &stop);
        assert!(stopped.is_err_and(|e| e.kind() == io::ErrorKind::Interrupted));
        assert_eq!((calls.get(), stat("").gid()), (2, 4242));
        set_group(root, 4343, true, false, &|| false).expect("given");
        assert_eq!((stat("").gid(), stat("a/b/f").gid()), (4343, 4343));
    }

    #[test]
    fn trees_of_any_depth_are_changed_completely() {
        use crate::descent::tests::{deep, with_a_small_stack};
        use crate::removal::remove_tree;

        let dir = tempfile::tempdir().expect("a directory");
        let top = dir.path().join("tree");
        std::fs::create_dir(&top).expect("mkdir");
        deep(&top, 5000);
        std::fs::create_dir_all(top.join("a/b")).expect("mkdir");
        // The process's own group, so that the test works without root. The modes show what was changed.
        let group = nix::unistd::getegid().as_raw();
        let calls = std::sync::atomic::AtomicU64::new(0);
        let count = || {
            calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            false
        };
        let changed = with_a_small_stack(|| set_group(&top, group, false, false, &count));
        let modes = [top.clone(), top.join("deep/deep"), top.join("a/b")]
            .map(|path| std::fs::metadata(path).expect("stat").mode() & 0o2770);
        assert_eq!(remove_tree(&top), Ok(()));
        assert!(changed.is_ok(), "{changed:?}");
        assert_eq!(calls.into_inner(), 5000 + 1 + 2);
        assert_eq!(modes, [0o2770; 3]);
    }
}
