//! Opens network namespaces and runs code inside them.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;

use nix::sched::{CloneFlags, setns};

const OWN: &str = "/proc/thread-self/ns/net";

/// Whether a path is the network namespace of this thread.
#[must_use]
pub fn is_own(path: &str) -> bool {
    let id = |path: &str| std::fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
    id(path).is_some() && id(path) == id(OWN)
}

/// Opens a namespace. `Ok(None)` if the path does not exist or is no longer a namespace.
///
/// # Errors
///
/// The path exists, but cannot be opened.
pub fn open(path: &str) -> io::Result<Option<File>> {
    match File::open(path) {
        Ok(file) => Ok(is_namespace(path).then_some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a path is a namespace. A pinned namespace that was unmounted leaves an empty file.
fn is_namespace(path: &str) -> bool {
    const NSFS_MAGIC: i64 = 0x6e73_6673;
    const PROC_MAGIC: i64 = 0x9fa0;
    nix::sys::statfs::statfs(path)
        .is_ok_and(|s| [NSFS_MAGIC, PROC_MAGIC].contains(&s.filesystem_type().0))
}

/// The network namespace of this thread.
///
/// # Errors
///
/// `/proc` is not mounted or not accessible.
pub fn own() -> io::Result<File> {
    File::open(OWN)
}

/// Enters a namespace and returns the present one. Separate from [`inside`], which the compiler repeats for each `work`.
#[inline(never)]
fn enter(namespace: &File) -> io::Result<File> {
    let home = own()?;
    setns(namespace, CloneFlags::CLONE_NEWNET)?;
    Ok(home)
}

/// Runs `work` inside a namespace and then returns to the present one, and returns the value of `work`. Only the calling
/// thread changes its namespace (setns(2)); sockets that `work` opens stay in the namespace.
///
/// # Errors
///
/// The thread cannot enter the namespace, and `work` did not run; or the thread cannot return from the namespace.
pub fn inside<T>(namespace: &File, work: impl FnOnce() -> T) -> io::Result<T> {
    let home = enter(namespace)?;
    let result = work();
    setns(&home, CloneFlags::CLONE_NEWNET)?;
    Ok(result)
}
