//! Project quotas: the filesystem itself keeps count of what a directory holds, so that nobody walks it. Only the count
//! is used; nothing is limited by it (kubelet spec, 9.3).
//!
//! A directory's project is a number that all files made below it inherit. Who owns a file may change its project from
//! the node's own user namespace, so such a count is to be trusted only for pods that have another.
#![allow(unsafe_code)]

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::Mutex;

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

use super::usage::Usage;
use crate::core::lock::lock;

/// Projects below this one are the administrator's: the kubelet's first, too.
const FIRST: u32 = 1_048_577;
/// How many of ours there may be.
const PROJECTS: u32 = 1 << 30;
/// Files made below the directory belong to its project.
const INHERIT: u32 = 0x200;
const Q_GETQUOTA: libc::c_uint = 0x80_0007;
const PROJECT_QUOTA: libc::c_uint = 2;

/// `struct fsxattr`.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    cow_extent_size: u32,
    rest: [u8; 8],
}

nix::ioctl_read!(attributes, b'X', 31, Attributes);
nix::ioctl_write_ptr!(set_attributes, b'X', 32, Attributes);

/// Numbers are taken by one at a time.
static TAKING: Mutex<()> = Mutex::new(());

fn open(dir: &Path) -> io::Result<OwnedFd> {
    Ok(nix::fcntl::open(
        dir,
        OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC,
        Mode::empty(),
    )?)
}

/// What the filesystem of an open directory counts of a project; none where it does not count.
fn count(dir: &OwnedFd, project: u32) -> Option<Usage> {
    // SAFETY: all of it is numbers, for which zero is a value.
    let mut told: libc::dqblk = unsafe { std::mem::zeroed() };
    let command = (Q_GETQUOTA << 8) | PROJECT_QUOTA;
    // SAFETY: the kernel writes one `dqblk`, for which there is room, and keeps no address.
    let result = unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            dir.as_raw_fd(),
            command,
            project,
            &raw mut told,
        )
    };
    match nix::errno::Errno::result(result) {
        Ok(_) => Some(Usage {
            bytes: told.dqb_curspace,
            inodes: told.dqb_curinodes,
        }),
        // Some filesystems do not know of a project that has no file.
        Err(nix::errno::Errno::ENOENT) => Some(Usage::default()),
        // A filesystem without project quotas, or a kernel before 5.14.
        Err(_) => None,
    }
}

fn of(dir: &OwnedFd) -> io::Result<Attributes> {
    let mut found = Attributes::default();
    // SAFETY: the kernel writes one `struct fsxattr`, for which there is room.
    unsafe { attributes(dir.as_raw_fd(), &raw mut found) }?;
    Ok(found)
}

/// Makes an empty directory a project of its own, where its filesystem counts projects. Nothing is noted anywhere: a
/// number is free if the filesystem counts no file of it, and the directory itself is one.
pub fn begin(dir: &Path) -> io::Result<()> {
    let handle = open(dir)?;
    if count(&handle, FIRST).is_none() {
        return Ok(());
    }
    let mut own = of(&handle)?;
    if own.project >= FIRST {
        return Ok(());
    }
    let mut hasher = DefaultHasher::new();
    dir.hash(&mut hasher);
    let start = u32::try_from(hasher.finish() % u64::from(PROJECTS)).unwrap_or(0);
    let _taking = lock(&TAKING);
    let free = (0..PROJECTS)
        .map(|n| FIRST + (start + n) % PROJECTS)
        .find(|project| count(&handle, *project).is_none_or(|u| u.inodes == 0));
    own.project = free.ok_or_else(|| io::Error::other("all projects are taken"))?;
    own.flags |= INHERIT;
    // SAFETY: the kernel reads one `struct fsxattr`.
    unsafe { set_attributes(handle.as_raw_fd(), &raw const own) }?;
    Ok(())
}

/// What a directory that is a project of its own holds; none if it is not one. A missing one holds nothing.
pub fn used(dir: &Path) -> io::Result<Option<Usage>> {
    let handle = match open(dir) {
        Ok(handle) => handle,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Some(Usage::default())),
        Err(error) => return Err(error),
    };
    // Filesystems without such attributes say so by an error.
    let project = of(&handle).map_or(0, |found| found.project);
    Ok((project >= FIRST)
        .then(|| count(&handle, project))
        .flatten())
}
