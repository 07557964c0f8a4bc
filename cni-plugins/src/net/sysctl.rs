//! Network sysctls of the namespace that the thread is in.

use std::io;

/// Writes `net/<path>`; slashes separate, so interface names may hold dots.
pub fn write(path: &str, value: &str) -> io::Result<()> {
    std::fs::write(format!("/proc/sys/net/{path}"), value)
}

/// Writes unless the value is already that.
pub fn ensure(path: &str, value: &str) -> io::Result<()> {
    let now = std::fs::read_to_string(format!("/proc/sys/net/{path}"))?;
    if now.trim() == value { Ok(()) } else { write(path, value) }
}
