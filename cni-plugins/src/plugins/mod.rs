//! One file a plugin.

mod bridge;
mod host_local;
mod loopback;

use crate::skel::Plugin;

/// The plugins in this binary.
pub const NAMES: &[&str] = &["bridge", "host-local", "loopback"];

/// The plugin of a name.
#[must_use]
pub fn find(name: &str) -> Option<&'static dyn Plugin> {
    match name {
        "bridge" => Some(&bridge::Bridge),
        "host-local" => Some(&host_local::HostLocal),
        "loopback" => Some(&loopback::Loopback),
        _ => None,
    }
}
