//! Addresses from a DHCP server of the network. `dhcp daemon` acquires, renews and releases leases, because a plugin
//! process does not live long enough to do so (RFC 2131; `plugins/ipam/dhcp/daemon.go` of containernetworking/plugins).
//!
//! `message`, `frame` and `lease` are pure. `client` talks to servers. `daemon`
//! manages the leases and stores them in files, so that a restart loses none.

pub mod client;
pub mod daemon;
pub mod frame;
pub mod lease;
pub mod message;

/// The default socket of the daemon.
pub const SOCKET: &str = "/run/cni/dhcp.sock";
