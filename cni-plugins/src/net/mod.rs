//! The rules that plugins write and find in the kernel, and firewalld. `holdfast_net` has the kernel interfaces.
//!
//! Plugins use tables with the names of the reference plugins, so that either implementation can clean up after the other. No
//! module lists a whole ruleset; modules request chains by name. ADD only adds rules: after a transaction that deletes,
//! closing the socket waits for an RCU grace period of the kernel.

pub mod dbus;
pub mod firewalld;
pub mod hostport;
pub mod iptables;
pub mod masquerade;
pub mod netns;
pub mod spoof;
pub mod xtables;

use std::io;

use holdfast_net::netlink::BatchError;

/// The result of a deletion, without the error that another process has already deleted the object.
fn ignore_missing(result: Result<(), BatchError>) -> io::Result<()> {
    match result.map_err(io::Error::from) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
