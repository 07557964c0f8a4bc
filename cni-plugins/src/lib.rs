//! The CNI plugins of Holdfast, for any container runtime: all of [`plugins`], protocol versions 0.1.0 to 1.1.0.
//!
//! A single binary acts as the plugin by whose name it is called. It uses netlink only: no plugin runs `ip`,
//! `nft` or `iptables`. It has no async runtime, since starting the process takes most of the time of a call.
//!
//! In comments, "the reference" means the plugins of containernetworking/plugins, with which these are interchangeable.
//!
//! The modules:
//!
//! - [`skel`] reads the environment and standard input and dispatches the verb;
//! - [`plugins`] has a file per plugin;
//! - [`ipam`] manages addresses;
//! - [`dhcp`] is the DHCP client and its daemon;
//! - [`net`] has the rules of the plugins in the kernel, and firewalld;
//! - `trace` exports spans of calls;
//! - [`cni`] has the types of the protocol.

pub mod cni;
pub mod dhcp;
pub mod ipam;
pub mod net;
pub mod plugins;
pub mod skel;
mod trace;
