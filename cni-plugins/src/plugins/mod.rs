//! One file a plugin.

mod bridge;
mod host_local;
mod loopback;
mod pair;
mod ptp;
mod static_ipam;

use crate::skel::Plugin;

/// The plugins in this binary.
pub const NAMES: &[&str] = &["bridge", "host-local", "loopback", "ptp", "static"];

/// The plugin of a name.
#[must_use]
pub fn find(name: &str) -> Option<&'static dyn Plugin> {
    match name {
        "bridge" => Some(&bridge::Bridge),
        "host-local" => Some(&host_local::HostLocal),
        "loopback" => Some(&loopback::Loopback),
        "ptp" => Some(&ptp::Ptp),
        "static" => Some(&static_ipam::Static),
        _ => None,
    }
}
