//! The only code of the plugins that talks to the kernel: netlink messages,
//! links, routes, nftables, traffic control, namespaces, sysctls.

pub mod bridge;
pub mod conntrack;
pub mod dbus;
pub mod firewalld;
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

/// Runs `work` so that the sockets and devices it creates get an SELinux label. An empty label changes nothing.
pub fn with_socket_label<T>(
    label: &str,
    work: impl FnOnce() -> std::io::Result<T>,
) -> std::io::Result<T> {
    const ATTRIBUTE: &str = "/proc/thread-self/attr/sockcreate";
    if label.is_empty() {
        return work();
    }
    std::fs::write(ATTRIBUTE, label)?;
    let result = work();
    std::fs::write(ATTRIBUTE, "")?;
    result
}

/// Fills a buffer with random bytes.
pub fn random(bytes: &mut [u8]) -> std::io::Result<()> {
    use std::io::Read as _;
    std::fs::File::open("/dev/urandom")?.read_exact(bytes)
}
