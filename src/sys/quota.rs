//! Project quotas: the filesystem tracks the usage of a directory, so that it need not be walked. They
//! only measure the usage and limit nothing (as upstream, `pkg/volume/util/fsquota/quota_linux.go`).
//!
//! A project is a number that new files inherit from their directory. In the node's user namespace, the owner
//! of a file can change its project. The usage is therefore reliable only for pods with another user namespace.
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
use holdfast_core::lock::lock;

/// The first project that is used here, as in the kubelet; lower numbers belong to the administrator.
const FIRST: u32 = 1_048_577;
/// The number of projects that can be used.
const PROJECTS: u32 = 1 << 30;
/// The flag by which new files inherit the project of the directory.
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

/// Serialises the allocation of project numbers.
static TAKING: Mutex<()> = Mutex::new(());

fn open(dir: &Path) -> io::Result<OwnedFd> {
    Ok(nix::fcntl::open(
        dir,
        OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC,
        Mode::empty(),
    )?)
}

/// The usage of a project on the filesystem of an open directory; `None` if the filesystem does not track it.
fn count(dir: &OwnedFd, project: u32) -> Option<Usage> {
    // SAFETY: all of it is numbers, for which zero is a value.
    let mut quota: libc::dqblk = unsafe { std::mem::zeroed() };
    let command = (Q_GETQUOTA << 8) | PROJECT_QUOTA;
    // SAFETY: the kernel writes one `dqblk`, for which there is room, and keeps no address.
    let result = unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            dir.as_raw_fd(),
            command,
            project,
            &raw mut quota,
        )
    };
    match nix::errno::Errno::result(result) {
        Ok(_) => Some(Usage {
            bytes: quota.dqb_curspace,
            inodes: quota.dqb_curinodes,
        }),
        // Some filesystems do not know a project without files.
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

/// Assigns a new project to an empty directory, if the filesystem tracks projects. Keeps no records:
/// a project is free if the filesystem counts no file of it, and the directory itself counts as one.
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
    own.project = free.ok_or_else(|| io::Error::other("all project ids are in use"))?;
    own.flags |= INHERIT;
    // SAFETY: the kernel reads one `struct fsxattr`.
    unsafe { set_attributes(handle.as_raw_fd(), &raw const own) }?;
    Ok(())
}

/// The usage of a directory that has a project; `None` if it has none. A missing directory uses nothing.
pub fn used(dir: &Path) -> io::Result<Option<Usage>> {
    let handle = match open(dir) {
        Ok(handle) => handle,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Some(Usage::default())),
        Err(error) => return Err(error),
    };
    // Filesystems without projects return an error.
    let project = of(&handle).map_or(0, |found| found.project);
    Ok((project >= FIRST)
        .then(|| count(&handle, project))
        .flatten())
}
