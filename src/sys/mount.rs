//! Mounts.

use std::io;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// The mount points at or below `dir`, deepest first.
pub fn below(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let table = std::fs::read_to_string("/proc/self/mountinfo")?;
    let mut points: Vec<PathBuf> =
        table.lines().filter_map(|l| l.split(' ').nth(4)).map(|p| PathBuf::from(unescape(p))).filter(|p| p.starts_with(dir)).collect();
    points.sort_by_key(|p| std::cmp::Reverse(p.components().count()));
    Ok(points)
}

/// Whether something is mounted at `dir`.
pub fn is_mounted(dir: &Path) -> io::Result<bool> {
    Ok(below(dir)?.iter().any(|p| p == dir))
}

fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

/// Whether a path is on a tmpfs.
#[must_use]
pub fn is_tmpfs(path: &Path) -> bool {
    nix::sys::statfs::statfs(path).is_ok_and(|s| s.filesystem_type() == nix::sys::statfs::TMPFS_MAGIC)
}

/// Mounts a tmpfs of at most `size` bytes (0: the kernel's default) at `dir`, unless one is there.
pub fn tmpfs(dir: &Path, size: u64) -> io::Result<()> {
    if is_mounted(dir)? {
        return Ok(());
    }
    let options = if size == 0 { String::new() } else { format!("size={size}") };
    mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::empty(), Some(options.as_str()))?;
    Ok(())
}

/// Unmounts everything at or below `dir`.
pub fn unmount_all(dir: &Path) -> io::Result<()> {
    for point in below(dir)? {
        match umount2(&point, MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) | Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOENT) => {}
            Err(error) => return Err(io::Error::new(io::Error::from(error).kind(), format!("{} cannot be unmounted: {error}", point.display()))),
        }
    }
    Ok(())
}
