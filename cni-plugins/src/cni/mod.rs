//! The protocol: errors, network configurations, results and their versions.

mod address;
mod config;
mod error;
mod owner;
mod parse;
mod result;

pub use address::{address, network};
pub use config::{Args, Json, cni_args};
pub use error::Error;
pub use owner::{Owner, digest, is_orphaned};
pub use parse::{INPUT_LIMIT, parse};
pub use result::{Address, Dns, Interface, Route, Success, parse_routes};

/// All supported protocol versions, oldest first.
pub const VERSIONS: &[&str] = &[
    "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0",
];

/// The versions from `least` on, for plugins that do not exist in earlier versions.
#[must_use]
pub fn since(least: &str) -> &'static [&'static str] {
    let first = VERSIONS.iter().position(|v| *v == least).unwrap_or(0);
    VERSIONS.get(first..).unwrap_or_default()
}

/// Whether `version` is `least` or later. Both must be in [`VERSIONS`].
#[must_use]
pub fn at_least(version: &str, least: &str) -> bool {
    let place = |v: &str| VERSIONS.iter().position(|x| *x == v);
    place(version) >= place(least)
}
