//! Mounts.

use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::beneath::Found;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Where.
    pub point: PathBuf,
    /// The filesystem's number, `major:minor`.
    pub device: String,
}

/// All mounts of this mount namespace, oldest first. Reading them asks no filesystem.
pub fn table() -> io::Result<Vec<Mount>> {
    let table = std::fs::read_to_string("/proc/self/mountinfo")?;
    let mount = |line: &str| {
        let mut fields = line.split(' ').skip(2);
        let device = fields.next()?.to_owned();
        Some(Mount {
            device,
            point: unescape(fields.nth(1)?).into(),
        })
    };
    Ok(table.lines().filter_map(mount).collect())
}

/// The mount points at or below `dir`, deepest first.
pub fn below(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut points: Vec<PathBuf> = table()?
        .into_iter()
        .map(|m| m.point)
        .filter(|p| p.starts_with(dir))
        .collect();
    points.sort_by_key(|p| std::cmp::Reverse(p.components().count()));
    Ok(points)
}

/// Whether something is mounted at `dir`.
pub fn is_mounted(dir: &Path) -> io::Result<bool> {
    Ok(below(dir)?.iter().any(|p| p == dir))
}

fn unescape(text: &str) -> String {
    text.replace("\\040", " ")
        .replace("\\011", "\t")
        .replace("\\012", "\n")
        .replace("\\134", "\\")
}

/// Whether a path is on a tmpfs.
#[must_use]
pub fn is_tmpfs(path: &Path) -> bool {
    nix::sys::statfs::statfs(path)
        .is_ok_and(|s| s.filesystem_type() == nix::sys::statfs::TMPFS_MAGIC)
}

/// Mounts a tmpfs of at most `size` bytes (0: the kernel's default) at `dir`, unless one is there.
pub fn tmpfs(dir: &Path, size: u64) -> io::Result<()> {
    if is_mounted(dir)? {
        return Ok(());
    }
    let options = if size == 0 {
        String::new()
    } else {
        format!("size={size}")
    };
    let with = |options: &str| {
        mount(
            Some("tmpfs"),
            dir,
            Some("tmpfs"),
            MsFlags::empty(),
            Some(options),
        )
    };
    // What is in memory may be secret: it is not swapped out where the kernel can keep it (6.4 and later).
    match with(&format!("noswap,{options}")) {
        Err(nix::errno::Errno::EINVAL) => with(&options)?,
        result => result?,
    }
    Ok(())
}

/// Mounts huge pages of so many bytes each at `dir`, unless they are there. Pages of another size there are an
/// error.
pub fn hugetlbfs(dir: &Path, page: u64) -> io::Result<()> {
    if is_mounted(dir)? {
        let there = u64::try_from(nix::sys::statfs::statfs(dir)?.block_size()).unwrap_or(0);
        return if there == page {
            Ok(())
        } else {
            Err(io::Error::other(format!(
                "pages of {there} bytes are mounted there"
            )))
        };
    }
    mount(
        Some("nodev"),
        dir,
        Some("hugetlbfs"),
        MsFlags::empty(),
        Some(format!("pagesize={page}").as_str()),
    )?;
    Ok(())
}

/// Binds what was found to `target`, which is made. What is mounted there already stays if it is the same
/// thing, and goes if it is another.
pub fn bind(found: &Found, target: &Path) -> io::Result<()> {
    if is_mounted(target)? {
        if found.is_at(target) {
            return Ok(());
        }
        umount2(target, MntFlags::UMOUNT_NOFOLLOW)?;
    }
    // A place of the other kind, from before the volume changed.
    match std::fs::symlink_metadata(target) {
        Ok(there) if there.is_dir() && !found.is_dir => std::fs::remove_dir(target)?,
        Ok(there) if !there.is_dir() && found.is_dir => std::fs::remove_file(target)?,
        _ => {}
    }
    if found.is_dir {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o750)
            .create(target)?;
    } else {
        std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o640)
            .open(target)?;
    }
    mount(
        Some(&found.magic_path()),
        target,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )?;
    if found.is_at(target) {
        return Ok(());
    }
    umount2(target, MntFlags::UMOUNT_NOFOLLOW)?;
    Err(io::Error::other("what was mounted is not what was found"))
}

/// Unmounts everything at or below `dir`.
pub fn unmount_all(dir: &Path) -> io::Result<()> {
    for point in below(dir)? {
        match umount2(&point, MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) | Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOENT) => {}
            Err(error) => {
                return Err(io::Error::new(
                    io::Error::from(error).kind(),
                    format!("{} cannot be unmounted: {error}", point.display()),
                ));
            }
        }
    }
    Ok(())
}
