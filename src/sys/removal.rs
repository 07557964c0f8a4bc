//! Removes directories that pods have written to.
//!
//! A pod controls the contents of its volumes, and mounts may change concurrently. Everything is therefore removed
//! relative to the handle of its directory. No symlink is followed and no mount entered, and a name that was replaced
//! meanwhile is treated as the new object. Anything that cannot be removed stays and is reported; nothing is forced.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, OsStr};
use std::fmt;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{OFlag, RenameFlags, renameat2};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::mount::open_here;

/// Maximum number of open directories. Deeper directories are first moved up.
const DEPTH: usize = 64;
/// The number of names read from a directory before they are removed.
const BATCH: usize = 1024;
/// Maximum number of paths in an error.
const NAMED: usize = 8;
/// If more names than this stay in a directory, the rest of the directory stays as well.
const MAX_KEPT_NAMES: usize = 1000;

/// Why an object could not be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The path is a mount point.
    Mounted,
    /// The kernel returned an error, for instance because the file is immutable.
    Refused(Errno),
}

/// The paths that could not be removed. The rest of the tree was removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RemovalError {
    /// The first few paths.
    pub places: Vec<(PathBuf, Reason)>,
    /// The total number.
    pub count: usize,
}

impl fmt::Display for RemovalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (path, reason)) in self.places.iter().enumerate() {
            let separator = if n == 0 { "" } else { "; " };
            match reason {
                Reason::Mounted => write!(
                    f,
                    "{separator}{} is kept: something is mounted there, unmount it",
                    path.display()
                )?,
                Reason::Refused(error) => write!(
                    f,
                    "{separator}{} cannot be removed: {}",
                    path.display(),
                    error.desc()
                )?,
            }
        }
        match self.count - self.places.len() {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

impl std::error::Error for RemovalError {}

/// A directory that is being emptied.
struct Level {
    dir: Dir,
    name: CString,
    names: Vec<CString>,
    /// Names that cannot be removed, and must not be tried again.
    kept: BTreeSet<CString>,
}

impl Level {
    fn new(dir: OwnedFd, name: CString) -> Result<Level, Errno> {
        Ok(Level {
            dir: Dir::from_fd(dir)?,
            name,
            names: vec![],
            kept: BTreeSet::new(),
        })
    }

    /// The next name to remove. Reads the directory again until it contains no other names.
    fn next(&mut self) -> Result<Option<CString>, Errno> {
        if self.names.is_empty() && self.kept.len() < MAX_KEPT_NAMES {
            for entry in self.dir.iter() {
                let name = entry?.file_name().to_owned();
                if ![c".", c".."].contains(&name.as_c_str()) && !self.kept.contains(&name) {
                    self.names.push(name);
                }
                if self.names.len() == BATCH {
                    break;
                }
            }
        }
        Ok(self.names.pop())
    }
}

/// The outcome of an attempt to remove a name.
enum Outcome {
    Gone,
    NotEmpty(OwnedFd),
    Kept(Reason),
}

/// Removes a name, or opens it if it is a directory with contents.
fn take(dir: BorrowedFd<'_>, name: &CStr) -> Outcome {
    match unlinkat(dir, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => return Outcome::Gone,
        Err(Errno::EBUSY) => return Outcome::Kept(Reason::Mounted),
        Err(Errno::EISDIR) => {}
        Err(error) => return Outcome::Kept(Reason::Refused(error)),
    }
    match unlinkat(dir, name, UnlinkatFlags::RemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => return Outcome::Gone,
        Err(Errno::EBUSY) => return Outcome::Kept(Reason::Mounted),
        Err(Errno::ENOTEMPTY | Errno::EEXIST) => {}
        Err(error) => return Outcome::Kept(Reason::Refused(error)),
    }
    match open_here(dir, path_of(name), OFlag::O_RDONLY | OFlag::O_DIRECTORY) {
        Ok(below) => Outcome::NotEmpty(below),
        Err(Errno::ENOENT) => Outcome::Gone,
        Err(Errno::EXDEV) => Outcome::Kept(Reason::Mounted),
        Err(error) => Outcome::Kept(Reason::Refused(error)),
    }
}

fn path_of(name: &CStr) -> &Path {
    Path::new(OsStr::from_bytes(name.to_bytes()))
}

/// The state of a removal.
struct Removal {
    parent: OwnedFd,
    top: PathBuf,
    levels: Vec<Level>,
    left: RemovalError,
    moved: u64,
}

impl Removal {
    fn record_kept(&mut self, name: &CString, reason: Reason) {
        if self.left.places.len() < NAMED {
            let below = self.levels.iter().skip(1).map(|level| &level.name);
            let mut path = self.top.clone();
            path.extend(below.map(|name| path_of(name)));
            if !self.levels.is_empty() {
                path.push(path_of(name));
            }
            self.left.places.push((path, reason));
        }
        self.left.count += 1;
        self.keep(name);
    }

    /// Records in the parent that a name stays.
    fn keep(&mut self, name: &CString) {
        if let Some(level) = self.levels.last_mut() {
            level.kept.insert(name.clone());
        }
    }

    fn take(&mut self, name: CString) {
        let dir = self
            .levels
            .last()
            .map_or(self.parent.as_fd(), |l| l.dir.as_fd());
        match take(dir, &name) {
            Outcome::Gone => {}
            Outcome::Kept(reason) => self.record_kept(&name, reason),
            Outcome::NotEmpty(_) if self.levels.len() >= DEPTH => self.move_up(&name),
            Outcome::NotEmpty(below) => match Level::new(below, name.clone()) {
                Ok(level) => self.levels.push(level),
                Err(error) => self.record_kept(&name, Reason::Refused(error)),
            },
        }
    }

    /// Moves a directory that is too deep half-way up; the traversal reaches it there later.
    fn move_up(&mut self, name: &CString) {
        let (from, to) = (&self.levels[DEPTH - 1].dir, &self.levels[DEPTH / 2].dir);
        let moved = loop {
            let fresh = format!("..removed-{}", self.moved);
            self.moved += 1;
            match renameat2(
                from,
                name.as_c_str(),
                to,
                fresh.as_str(),
                RenameFlags::RENAME_NOREPLACE,
            ) {
                Err(Errno::EEXIST) => {}
                other => break other,
            }
        };
        match moved {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(error) => self.record_kept(name, Reason::Refused(error)),
        }
    }

    fn run(mut self, name: CString) -> Result<(), RemovalError> {
        self.take(name);
        while let Some(level) = self.levels.last_mut() {
            match level.next() {
                Ok(Some(name)) => self.take(name),
                outcome => {
                    let failed = outcome.err();
                    let Some(Level { name, kept, .. }) = self.levels.pop() else {
                        break;
                    };
                    match failed {
                        Some(error) => self.record_kept(&name, Reason::Refused(error)),
                        // The paths below it were already reported.
                        None if !kept.is_empty() => self.keep(&name),
                        None => self.end(&name),
                    }
                }
            }
        }
        if self.left.count == 0 {
            Ok(())
        } else {
            Err(self.left)
        }
    }

    /// Removes a directory that was empty. If it has new contents, it is processed again.
    fn end(&mut self, name: &CString) {
        let dir = self
            .levels
            .last()
            .map_or(self.parent.as_fd(), |l| l.dir.as_fd());
        match unlinkat(dir, name.as_c_str(), UnlinkatFlags::RemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(Errno::EBUSY) => self.record_kept(name, Reason::Mounted),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) if !self.levels.is_empty() => {}
            Err(error) => self.record_kept(name, Reason::Refused(error)),
        }
    }
}

/// Removes a directory tree or a file. A missing path is no error. The parent directory must be trusted.
///
/// # Errors
///
/// The paths that remain: mounts, and files that the kernel refuses to remove. All others were removed.
pub fn remove_tree(path: &Path) -> Result<(), RemovalError> {
    let refused = |error: Errno| RemovalError {
        places: vec![(path.into(), Reason::Refused(error))],
        count: 1,
    };
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(refused(Errno::EINVAL));
    };
    let name = CString::new(name.as_bytes()).map_err(|_| refused(Errno::EINVAL))?;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let parent = match nix::fcntl::open(parent, flags, Mode::empty()) {
        Ok(parent) => parent,
        Err(Errno::ENOENT) => return Ok(()),
        Err(error) => return Err(refused(error)),
    };
    let removal = Removal {
        parent,
        top: path.into(),
        levels: vec![],
        left: RemovalError::default(),
        moved: 0,
    };
    removal.run(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{beneath, mount};
    use nix::mount::{MsFlags, mount as mount_at};
    use std::fs;

    #[test]
    fn a_tree_is_removed_completely_and_link_targets_are_kept() {
        let (dir, outside) = (
            tempfile::tempdir().expect("a directory"),
            tempfile::tempdir().expect("a directory"),
        );
        let canary = outside.path().join("canary");
        fs::write(&canary, "alive").expect("written");
        let tree = dir.path().join("tree");
        fs::create_dir_all(tree.join("a/b")).expect("mkdir");
        std::os::unix::fs::symlink(outside.path(), tree.join("a/link")).expect("link");
        std::os::unix::fs::symlink(&canary, tree.join("a/b/file")).expect("link");
        nix::unistd::mkfifo(&tree.join("pipe"), Mode::from_bits_truncate(0o600)).expect("pipe");
        let _socket = std::os::unix::net::UnixListener::bind(tree.join("socket")).expect("socket");
        for n in 0..3000 {
            fs::write(tree.join(format!("a/{n}")), "x").expect("written");
        }
        assert_eq!(remove_tree(&tree), Ok(()));
        assert!(!tree.exists());
        assert_eq!(
            remove_tree(&tree),
            Ok(()),
            "removing a missing tree succeeds"
        );
        assert_eq!(remove_tree(&tree.join("x/y")), Ok(()));
        // The tree itself may be a symlink, which is removed.
        std::os::unix::fs::symlink(outside.path(), &tree).expect("link");
        assert_eq!(remove_tree(&tree), Ok(()));
        assert_eq!(fs::read_to_string(&canary).expect("read"), "alive");
    }

    #[test]
    fn trees_may_be_deeper_than_the_maximum_path_length() {
        let dir = tempfile::tempdir().expect("a directory");
        let tree = dir.path().join("tree");
        fs::create_dir(&tree).expect("mkdir");
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let mut here = nix::fcntl::open(&tree, flags, Mode::empty()).expect("open");
        for _ in 0..5000 {
            nix::sys::stat::mkdirat(&here, "deep", Mode::from_bits_truncate(0o700)).expect("mkdir");
            here = nix::fcntl::openat(&here, "deep", flags, Mode::empty()).expect("open");
        }
        drop(here);
        assert_eq!(remove_tree(&tree), Ok(()));
        assert!(!tree.exists());
    }

    #[test]
    fn mounts_are_never_entered_even_of_the_same_filesystem() {
        if crate::skip::needs_root() {
            return;
        }
        let (dir, outside) = (
            tempfile::tempdir().expect("a directory"),
            tempfile::tempdir().expect("a directory"),
        );
        fs::write(outside.path().join("canary"), "alive").expect("written");
        let (tree, link) = (dir.path().join("tree"), dir.path().join("link"));
        fs::create_dir_all(tree.join("a/dir")).expect("mkdir");
        fs::write(tree.join("a/file"), "").expect("written");
        fs::write(tree.join("a/gone"), "").expect("written");
        std::os::unix::fs::symlink(dir.path(), &link).expect("link");
        let bind = |from: &Path, to: &Path| {
            mount_at(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("bound");
        };
        bind(outside.path(), &tree.join("a/dir"));
        bind(&outside.path().join("canary"), &tree.join("a/file"));
        // Given through a symlink, as a root directory may be.
        let left = remove_tree(&link.join("tree")).expect_err("mounts stay");
        assert_eq!(left.count, 2, "{left}");
        assert!(
            left.places
                .iter()
                .all(|(_, reason)| *reason == Reason::Mounted)
        );
        assert!(left.to_string().contains("tree/a/dir is kept"), "{left}");
        assert!(!tree.join("a/gone").exists(), "everything else is removed");
        assert_eq!(
            fs::read_to_string(outside.path().join("canary")).expect("read"),
            "alive"
        );
        mount::unmount_all(&tree).expect("unmounted");
        assert_eq!(remove_tree(&tree), Ok(()));
    }

    #[test]
    fn mounts_created_during_removal_are_not_entered() {
        use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

        if crate::skip::needs_root() {
            return;
        }
        let (dir, outside) = (
            tempfile::tempdir().expect("a directory"),
            tempfile::tempdir().expect("a directory"),
        );
        for n in 0..50 {
            fs::create_dir_all(outside.path().join(format!("{n}"))).expect("mkdir");
            fs::write(outside.path().join(format!("{n}/canary")), "alive").expect("written");
        }
        /// Stops the mounting thread, even after a failed assertion.
        struct Over<'a>(&'a AtomicBool);
        impl Drop for Over<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        // No tree has this number: the first tree is complete before anything is mounted there.
        let (over, round) = (AtomicBool::new(false), AtomicU32::new(u32::MAX));
        // Continuous mounting could keep the directory indefinitely, so the thread stops after some attempts.
        let lets_go = AtomicBool::new(false);
        let place = |round: u32| dir.path().join(format!("tree-{round}/5"));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let place = place(round.load(Ordering::Relaxed));
                    let from = beneath::Dir::open(outside.path()).and_then(|d| d.itself());
                    if lets_go.load(Ordering::Relaxed) {
                        std::thread::yield_now();
                    } else if let Ok(from) = from {
                        let _ = mount_at(
                            Some(&from.magic_path()),
                            &place,
                            None::<&str>,
                            MsFlags::MS_BIND,
                            None::<&str>,
                        );
                    }
                    let _ = mount::unmount_all(&place);
                }
            });
            let _over = Over(&over);
            for n in 0..25 {
                let tree = dir.path().join(format!("tree-{n}"));
                for below in 0..10 {
                    fs::create_dir_all(tree.join(format!("{below}/x/y"))).expect("mkdir");
                    fs::write(tree.join(format!("{below}/x/file")), "x").expect("written");
                }
                round.store(n, Ordering::Relaxed);
                let tried = (0..5).any(|_| remove_tree(&tree).is_ok());
                lets_go.store(true, Ordering::Relaxed);
                let whole = tried
                    || (0..30_000).any(|_| {
                        std::thread::sleep(std::time::Duration::from_millis(1));
                        remove_tree(&tree).is_ok()
                    });
                assert!(whole, "round {n}: nothing is mounted there any more");
                lets_go.store(false, Ordering::Relaxed);
            }
        });
        for n in 0..50 {
            assert!(outside.path().join(format!("{n}/canary")).exists(), "{n}");
        }
    }
}
