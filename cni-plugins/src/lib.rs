//! CNI plugins that any runtime can use: `bridge`, `host-local` and `loopback`, spec 0.1.0 to 1.1.0.
//!
//! One binary that behaves as the plugin it is called as. It talks netlink only: no plugin runs `ip`,
//! `nft` or `iptables`, and there is no async runtime, as process start is most of what a call costs.
//!
//! `skel` reads environment and standard input and dispatches the verb; `plugins` hold one file a
//! plugin; `ipam` the address store; `net` the only code that talks to the kernel; `cni` the
//! protocol's own types.

pub mod cni;
pub mod dhcp;
pub mod ipam;
pub mod net;
pub mod plugins;
pub mod skel;
