//! The only code here that talks to the kernel: netlink messages, links, nftables, namespaces, sysctls.

pub mod link;
pub mod netlink;
pub mod netns;
pub mod nft;
pub mod sysctl;

/// Fills a buffer from the system's random source.
pub fn random(bytes: &mut [u8]) -> std::io::Result<()> {
    use std::io::Read as _;
    std::fs::File::open("/dev/urandom")?.read_exact(bytes)
}
