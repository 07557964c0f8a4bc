//! The crate against the kernel, in network namespaces: what `nft` displays, what is read back, large transactions, and
//! packets that pass through a service's rules.
#![allow(clippy::unwrap_used)]

mod flows;
mod golden;
mod namespace;
mod readback;
mod service;
#[path = "../../../../tests/support/skip.rs"]
mod skip;
mod transactions;
