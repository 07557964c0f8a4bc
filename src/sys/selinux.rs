//! SELinux on this machine.

use std::path::Path;

use holdfast_core::volume::selinux::is_loaded;

/// Whether SELinux has a policy loaded, enforcing or not.
#[must_use]
pub fn has_selinux() -> bool {
    let is_there = Path::new("/sys/fs/selinux/enforce").exists();
    is_there && std::fs::read_to_string("/proc/self/attr/current").is_ok_and(|own| is_loaded(&own))
}
