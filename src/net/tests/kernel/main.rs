//! The crate against the kernel, in network namespaces: what `nft` displays, what is read back, large transactions, and
//! packets that pass through a service's rules.
#![allow(clippy::unwrap_used)]

mod flows;
mod golden;
mod local;
mod namespace;
mod readback;
mod service;
#[path = "../../../../tests/support/skip.rs"]
mod skip;
mod transactions;

use holdfast_net::nft::{Family, Table};

/// The table of the tests.
pub const TABLE: Table = Table {
    family: Family::Inet,
    name: "holdfast-test",
};
