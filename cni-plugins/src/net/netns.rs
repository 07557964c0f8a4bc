//! Network namespaces: entering one and coming back.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;

use nix::sched::{CloneFlags, setns};

use crate::cni::Error;

const OWN: &str = "/proc/thread-self/ns/net";

/// Whether a path is the namespace that this process is in.
#[must_use]
pub fn is_own(path: &str) -> bool {
    let id = |path: &str| std::fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
    id(path).is_some() && id(path) == id(OWN)
}

/// Opens a namespace; `Ok(None)` if there is nothing, or something that is no namespace any more.
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

/// A pinned namespace whose mount is gone is an empty file: that is no namespace.
fn is_namespace(path: &str) -> bool {
    const NSFS_MAGIC: i64 = 0x6e73_6673;
    const PROC_MAGIC: i64 = 0x9fa0;
    nix::sys::statfs::statfs(path)
        .is_ok_and(|s| [NSFS_MAGIC, PROC_MAGIC].contains(&s.filesystem_type().0))
}

/// The namespace that the thread is in.
pub fn own() -> Result<File, Error> {
    File::open(OWN).map_err(|e| {
        Error::new(
            Error::NAMESPACE,
            format!("cannot open the own network namespace: {e}"),
        )
    })
}

/// Opens a namespace that must be there.
pub fn require(path: &str) -> Result<File, Error> {
    open(path)?.ok_or_else(|| {
        Error::new(
            Error::NAMESPACE,
            format!("netns {path:?} does not exist or is not a network namespace"),
        )
    })
}

/// Runs `work` inside a namespace and comes back. The process has one thread, so nobody else moves.
pub fn inside<T>(namespace: &File, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let fail = |what: &str, error: &dyn std::fmt::Display| {
        Error::new(Error::NAMESPACE, format!("{what}: {error}"))
    };
    let home = own()?;
    setns(namespace, CloneFlags::CLONE_NEWNET)
        .map_err(|e| fail("cannot enter the container's network namespace", &e))?;
    let result = work();
    setns(&home, CloneFlags::CLONE_NEWNET).map_err(|e| {
        fail(
            "cannot come back from the container's network namespace",
            &e,
        )
    })?;
    result
}
