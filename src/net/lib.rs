//! The kernel's network: netlink messages, links, routes, nftables, conntrack, traffic control, namespaces and sysctls.
//!
//! The CNI plugins, the node agent and the service proxy use this crate. The crate has no async runtime, because the plugins
//! live for milliseconds; every call blocks until the kernel has answered. The crate decides nothing: callers name the links,
//! tables and rules, and decide which of them exist.

pub mod bridge;
pub mod conntrack;
pub mod link;
pub mod local;
pub mod netlink;
pub mod netns;
pub mod nft;
pub mod packet;
pub mod route;
pub mod sysctl;
pub mod tap;
pub mod traffic;

/// Fills a buffer with random bytes.
///
/// # Errors
///
/// `/dev/urandom` cannot be opened or read.
pub fn random(bytes: &mut [u8]) -> std::io::Result<()> {
    use std::io::Read as _;
    std::fs::File::open("/dev/urandom")?.read_exact(bytes)
}
