//! Network namespaces, with the errors of the protocol.

use std::fs::File;

use holdfast_net::netns;

use crate::cni::Error;

fn failed(what: impl std::fmt::Display, error: &std::io::Error) -> Error {
    Error::new(Error::NAMESPACE, format!("{what}: {error}"))
}

/// Opens a namespace. `Ok(None)` if the path does not exist or is no longer a namespace.
pub fn open(path: &str) -> Result<Option<File>, Error> {
    netns::open(path).map_err(|e| failed(format_args!("failed to open netns {path:?}"), &e))
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

/// The network namespace of this thread.
pub fn own() -> Result<File, Error> {
    netns::own().map_err(|e| failed("cannot open this process's network namespace", &e))
}

/// The error of a thread that cannot enter or leave a container's namespace.
#[cold]
fn unreachable(error: std::io::Error) -> Error {
    failed(
        "cannot enter or leave the container's network namespace",
        &error,
    )
}

/// Runs `work` inside a namespace and then returns to the present
/// one. Only the calling thread changes its namespace (setns(2)).
pub fn inside<T>(namespace: &File, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    netns::inside(namespace, work).map_err(unreachable)?
}
