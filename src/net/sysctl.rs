//! Sysctls of the network namespace of this thread.

use std::io;

/// Writes `net/<path>`. The separator is a slash, so interface names may contain dots.
pub fn write(path: &str, value: &str) -> io::Result<()> {
    std::fs::write(format!("/proc/sys/net/{path}"), value)
}

/// Writes a value unless the sysctl already has it.
pub fn ensure(path: &str, value: &str) -> io::Result<()> {
    let now = std::fs::read_to_string(format!("/proc/sys/net/{path}"))?;
    if now.trim() == value {
        Ok(())
    } else {
        write(path, value)
    }
}

/// The path of a sysctl. If the first separator is a dot, dots and slashes are swapped (sysctl(8)).
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

/// Reads a path below `/proc/sys`.
pub fn get(path: &str) -> io::Result<String> {
    std::fs::read_to_string(format!("/proc/sys/{path}")).map(|text| text.trim().to_owned())
}

/// Writes to a path below `/proc/sys`.
pub fn set(path: &str, value: &str) -> io::Result<()> {
    std::fs::write(format!("/proc/sys/{path}"), value)
}
