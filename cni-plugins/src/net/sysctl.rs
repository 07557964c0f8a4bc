//! Network sysctls of the namespace that the thread is in.

use std::io;

/// Writes `net/<path>`; slashes separate, so interface names may hold dots.
pub fn write(path: &str, value: &str) -> io::Result<()> {
    std::fs::write(format!("/proc/sys/net/{path}"), value)
}

/// Writes unless the value is already that.
pub fn ensure(path: &str, value: &str) -> io::Result<()> {
    let now = std::fs::read_to_string(format!("/proc/sys/net/{path}"))?;
    if now.trim() == value {
        Ok(())
    } else {
        write(path, value)
    }
}

/// The path of a sysctl: with a slash as the first separator it is one; else dots and slashes change places.
#[must_use]
pub fn path(key: &str) -> String {
    match key.find(['.', '/']).and_then(|at| key.get(at..=at)) {
        Some(".") => key
            .chars()
            .map(|c| {
                if c == '.' {
                    '/'
                } else if c == '/' {
                    '.'
                } else {
                    c
                }
            })
            .collect(),
        _ => key.to_owned(),
    }
}

/// What stands at a path below `/proc/sys`.
pub fn get(path: &str) -> io::Result<String> {
    std::fs::read_to_string(format!("/proc/sys/{path}")).map(|text| text.trim().to_owned())
}

/// Writes to a path below `/proc/sys`.
pub fn set(path: &str, value: &str) -> io::Result<()> {
    std::fs::write(format!("/proc/sys/{path}"), value)
}
