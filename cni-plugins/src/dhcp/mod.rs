//! Addresses from a DHCP server of the network: `dhcp daemon` gets leases, renews them and gives them back, as a plugin's process
//! does not live long enough to (RFC 2131; CNI reference spec, chapter 12).
//!
//! `message`, `frame` and `lease` are pure; `client` asks servers, `daemon` holds leases, in files too, so that a restart loses none.

pub mod client;
pub mod daemon;
pub mod frame;
pub mod lease;
pub mod message;

/// Where the daemon listens, if nobody says otherwise.
pub const SOCKET: &str = "/run/cni/dhcp.sock";
