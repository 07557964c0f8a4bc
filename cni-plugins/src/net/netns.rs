//! Opens network namespaces and runs code inside them.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;

use nix::sched::{CloneFlags, setns};

use crate::cni::Error;

const OWN: &str = "/proc/thread-self/ns/net";

/// Whether a path is the network namespace of this thread.
#[must_use]
pub fn is_own(path: &str) -> bool {
    let id = |path: &str| std::fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
    id(path).is_some() && id(path) == id(OWN)
}

/// Opens a namespace. `Ok(None)` if the path does not exist or is no longer a namespace.
pub fn open(path: &str) -> Result<Option<File>, Error> {
    match File::open(path) {
        Ok(file) => Ok(is_namespace(path).then_some(file)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::new(
            Error::NAMESPACE,
            format!("failed to open netns {path:?}: {error}"),
        )),
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
pub fn own() -> Result<File, Error> {
    File::open(OWN).map_err(|e| {
        Error::new(
            Error::NAMESPACE,
            format!("cannot open this process's network namespace: {e}"),
        )
    })
}

/// Opens a namespace; an error if it does not exist.
pub fn require(path: &str) -> Result<File, Error> {
    open(path)?.ok_or_else(|| {
        Error::new(
            Error::NAMESPACE,
            format!("netns {path:?} does not exist or is not a network namespace"),
        )
    })
}

/// Runs `work` inside a namespace and then returns to the present
/// one. Only the calling thread changes its namespace (setns(2)).
pub fn inside<T>(namespace: &File, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let fail = |what: &str, error: &dyn std::fmt::Display| {
        Error::new(Error::NAMESPACE, format!("{what}: {error}"))
    };
    let home = own()?;
    setns(namespace, CloneFlags::CLONE_NEWNET)
        .map_err(|e| fail("cannot enter the container's network namespace", &e))?;
    let result = work();
    setns(&home, CloneFlags::CLONE_NEWNET)
        .map_err(|e| fail("cannot return from the container's network namespace", &e))?;
    result
}
