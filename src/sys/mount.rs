//! Finds, creates and removes mounts.
//!
//! To find out whether a path is a mount point, this module uses a lookup that refuses to cross mounts. It does not
//! compare paths with the mount table. The lookup is also correct below symlinks, and accesses no filesystem that may
//! hang. Only the mounts below a directory are read from the mount table, after resolving the path of the directory.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::Mode;
use nix::sys::statvfs::{FsFlags, statvfs};

use super::beneath::Found;
use holdfast_core::lock::lock;

/// A mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The mount point.
    pub point: PathBuf,
    /// The filesystem's device number, `major:minor`.
    pub device: String,
    /// The type of the filesystem, for instance `nfs4`.
    pub kind: String,
    /// The source, for instance `/dev/sda1`.
    pub source: String,
    /// Whether its files can have individual SELinux labels.
    pub labels_files: bool,
}

/// All mounts of this mount namespace, oldest first. Reading the table accesses no filesystem.
pub fn table() -> io::Result<Vec<Mount>> {
    let table = std::fs::read("/proc/thread-self/mountinfo")?;
    Ok(table.split(|b| *b == b'\n').filter_map(parse).collect())
}

/// Parses a line of mountinfo: `id parent major:minor root point options [fields…] - type source options`.
fn parse(line: &[u8]) -> Option<Mount> {
    let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    let mut fields = line.split(|b| *b == b' ');
    let device = text(fields.nth(2)?);
    let point = OsString::from_vec(unescape(fields.nth(1)?)).into();
    let of_mount = fields.next()?;
    let mut fields = fields.skip_while(|f| *f != b"-").skip(1);
    let kind = text(fields.next()?);
    let source = text(&unescape(fields.next().unwrap_or_default()));
    let of_filesystem = fields.next().unwrap_or_default();
    // The kernel shows this among the mount's or the filesystem's options.
    let labels_files = [of_mount, of_filesystem]
        .iter()
        .any(|options| options.split(|b| *b == b',').any(|o| o == b"seclabel"));
    Some(Mount {
        point,
        device,
        kind,
        source,
        labels_files,
    })
}

/// Decodes the kernel's escapes: a backslash and three octal digits.
pub(super) fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let octal = after
            .get(..3)
            .filter(|_| *first == b'\\')
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(octal.unwrap_or(*first));
        rest = if octal.is_some() { &after[3..] } else { after };
    }
    bytes
}

/// The path with all symlinks resolved. Does not access a mount at the path itself, which may hang.
fn canonical(path: &Path) -> io::Result<PathBuf> {
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) if is_mounted(path)? => {
            Ok(std::fs::canonicalize(parent)?.join(name))
        }
        _ => std::fs::canonicalize(path),
    }
}

/// Writes a filesystem's cached data to disk. Unmounting also does this, but only for the last mount of the
/// filesystem. Another mount may remain, for instance in the mount namespace of a container with the node's root.
pub fn sync(point: &Path) -> io::Result<()> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let dir = nix::fcntl::open(point, flags, Mode::empty())?;
    Ok(nix::unistd::syncfs(&dir)?)
}

/// Whether files on the mount at `point` can have individual SELinux labels.
/// Of several mounts, the newest counts. False if nothing is mounted.
pub fn labels_files(point: &Path) -> io::Result<bool> {
    let point = canonical(point)?;
    let table = table()?;
    let mut newest = table.iter().rev();
    Ok(newest
        .find(|m| m.point == point)
        .is_some_and(|m| m.labels_files))
}

/// The mounts at or below `dir`, deepest and newest first. The path may contain symlinks.
pub fn below(dir: &Path) -> io::Result<Vec<Mount>> {
    let dir = match canonical(dir) {
        Ok(dir) => dir,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        Err(error) => return Err(error),
    };
    Ok(among(&table()?, &dir))
}

/// The mounts of a table at or below `dir`, deepest and newest first. The path must not contain symlinks.
#[must_use]
pub fn among(table: &[Mount], dir: &Path) -> Vec<Mount> {
    let within = table.iter().rev().filter(|m| m.point.starts_with(dir));
    let mut mounts: Vec<Mount> = within.cloned().collect();
    mounts.sort_by_key(|m| std::cmp::Reverse(m.point.components().count()));
    mounts
}

/// Whether `path` is a mount point. False if it does not exist.
pub fn is_mounted(path: &Path) -> io::Result<bool> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(true);
    };
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let parent = match nix::fcntl::open(parent, flags, Mode::empty()) {
        Err(Errno::ENOENT) => return Ok(false),
        other => other?,
    };
    match open_here(&parent, Path::new(name), OFlag::O_PATH | OFlag::O_NOFOLLOW) {
        Ok(_) => Ok(false),
        Err(Errno::EXDEV) => Ok(true),
        Err(Errno::ENOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Opens a name in a directory without following symlinks. `EXDEV` if the name is a mount point.
pub(super) fn open_here(
    dir: impl AsFd,
    name: &Path,
    flags: OFlag,
) -> Result<std::os::fd::OwnedFd, Errno> {
    let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let how = OpenHow::new()
        .flags(flags)
        .resolve(ResolveFlag::RESOLVE_NO_XDEV | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    match openat2(&dir, name, how) {
        // A kernel before 5.6, or a sandbox that rejects the call.
        Err(Errno::ENOSYS | Errno::EPERM) => {
            let found = openat(&dir, name, flags, Mode::empty())?;
            if mount_id(&found)? == mount_id(&dir)? {
                Ok(found)
            } else {
                Err(Errno::EXDEV)
            }
        }
        other => other,
    }
}

/// The kernel's id of the mount to which a handle belongs.
pub(super) fn mount_id(fd: impl AsFd) -> Result<u64, Errno> {
    let path = format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd());
    let text = std::fs::read_to_string(path).map_err(|_| Errno::EIO)?;
    let id = text.lines().find_map(|l| l.strip_prefix("mnt_id:"));
    id.and_then(|id| id.trim().parse().ok()).ok_or(Errno::EIO)
}

/// Whether a path is on a tmpfs.
#[must_use]
pub fn is_tmpfs(path: &Path) -> bool {
    nix::sys::statfs::statfs(path)
        .is_ok_and(|s| s.filesystem_type() == nix::sys::statfs::TMPFS_MAGIC)
}

/// Mounts a tmpfs at `dir` with a limit of `size` bytes (0: the kernel's default), unless there already is a mount.
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
    Ok(NOSWAP.tried(&options, with)?)
}

/// Whether the kernel supports the option `noswap` of tmpfs: version 6.4 and later, outside user namespaces.
static NOSWAP: NoSwap = NoSwap(Mutex::new(None));

/// Caches the answer, because an unsupporting kernel logs a complaint at each attempt.
struct NoSwap(Mutex<Option<bool>>);

impl NoSwap {
    /// Mounts with the option, so that secrets in memory are not swapped
    /// out. Mounts without it if the kernel does not support it.
    fn tried(&self, options: &str, mount: impl Fn(&str) -> Result<(), Errno>) -> Result<(), Errno> {
        let with = || mount(&format!("noswap,{options}"));
        // Concurrent callers wait until the answer is known.
        let mut known = lock(&self.0);
        match *known {
            Some(true) => {
                drop(known);
                return with();
            }
            Some(false) => {
                drop(known);
                return mount(options);
            }
            None => {}
        }
        match with() {
            Err(Errno::EINVAL) => {
                // If this fails as well, another option is invalid.
                mount(options)?;
                *known = Some(false);
            }
            outcome => {
                outcome?;
                *known = Some(true);
            }
        }
        Ok(())
    }
}

/// Mounts a hugetlbfs with this page size in bytes at `dir`, unless there
/// already is one. An existing mount with another page size is an error.
pub fn hugetlbfs(dir: &Path, page: u64) -> io::Result<()> {
    if is_mounted(dir)? {
        let there = u64::try_from(nix::sys::statfs::statfs(dir)?.block_size()).unwrap_or(0);
        return if there == page {
            Ok(())
        } else {
            Err(io::Error::other(format!(
                "a hugetlbfs with pages of {there} bytes is already mounted there"
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

/// Bind-mounts a found object at `target`, which is created. An
/// existing mount of the same object stays; another mount is replaced.
pub fn bind(found: &Found, target: &Path) -> io::Result<()> {
    if is_mounted(target)? {
        if found.is_at(target) {
            return Ok(());
        }
        umount2(target, MntFlags::UMOUNT_NOFOLLOW)?;
    }
    // The target is of the other kind, because the volume has changed.
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
    Err(io::Error::other(
        "the mounted directory is not the one that was found",
    ))
}

/// The options that a bind mount can have independently of its filesystem.
const OWN: [(&str, MsFlags, FsFlags); 6] = [
    ("ro", MsFlags::MS_RDONLY, FsFlags::ST_RDONLY),
    ("nosuid", MsFlags::MS_NOSUID, FsFlags::ST_NOSUID),
    ("nodev", MsFlags::MS_NODEV, FsFlags::ST_NODEV),
    ("noexec", MsFlags::MS_NOEXEC, FsFlags::ST_NOEXEC),
    ("noatime", MsFlags::MS_NOATIME, FsFlags::ST_NOATIME),
    ("nodiratime", MsFlags::MS_NODIRATIME, FsFlags::ST_NODIRATIME),
];

/// Adds options to the bind mount at `dir`. Ignores options that only a filesystem
/// can have, as the kernel does for `mount -o bind`. Existing options stay.
pub fn restrict(dir: &Path, options: &[String]) -> io::Result<()> {
    if options.is_empty() {
        return Ok(());
    }
    let is_requested = |name: &str| options.iter().flat_map(|o| o.split(',')).any(|o| o == name);
    let there = statvfs(dir)?.flags();
    let mut flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
    let mut is_new = false;
    for (name, flag, has) in OWN {
        let has = there.contains(has);
        is_new |= is_requested(name) && !has;
        flags.set(flag, is_requested(name) || has);
    }
    if is_new {
        mount(None::<&str>, dir, None::<&str>, flags, None::<&str>)?;
    }
    Ok(())
}

/// The propagation of mounts below a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Mounts propagate to other mount namespaces, as before or from now on.
    Shared,
    /// Mounts do not propagate: there are mounts below the directory, which a mount over it would hide.
    Occupied,
}

/// Makes future mounts below `dir` propagate to other mount namespaces (`rshared`). If the mount of `dir`
/// is not shared, bind-mounts the directory over itself, as a kubelet does with its root directory.
pub fn share(dir: &Path) -> io::Result<Sharing> {
    let dir = std::fs::canonicalize(dir)?;
    let id = mount_id(std::fs::File::open(&dir)?)?.to_string();
    let table = std::fs::read_to_string("/proc/thread-self/mountinfo")?;
    let held = table.lines().find(|l| l.split(' ').next() == Some(&id));
    if held.is_some_and(is_shared) {
        return Ok(Sharing::Shared);
    }
    let none = None::<&str>;
    if !is_mounted(&dir)? {
        if !below(&dir)?.is_empty() {
            return Ok(Sharing::Occupied);
        }
        mount(Some(&dir), &dir, none, MsFlags::MS_BIND, none)?;
    }
    let shared = MsFlags::MS_SHARED | MsFlags::MS_REC;
    mount(none, &dir, none, shared, none)?;
    Ok(Sharing::Shared)
}

/// Whether a line of mountinfo describes a shared mount.
fn is_shared(line: &str) -> bool {
    let mut optional = line.split(' ').skip(6).take_while(|f| *f != "-");
    optional.any(|f| f.starts_with("shared:"))
}

/// Unmounts everything at or below `dir`, deepest first. Does not force busy mounts.
pub fn unmount_all(dir: &Path) -> io::Result<()> {
    for mount in below(dir)? {
        unmount(&mount.point, MntFlags::empty())?;
    }
    Ok(())
}

/// Unmounts a path. A path without a mount is no error. Symlinks are not followed.
pub fn unmount(point: &Path, flags: MntFlags) -> io::Result<()> {
    try_unmount(point, flags).map_err(|error| {
        io::Error::new(
            io::Error::from(error).kind(),
            format!("{} cannot be unmounted: {error}", point.display()),
        )
    })
}

/// Like [`unmount`], but returns the kernel's error.
pub fn try_unmount(point: &Path, flags: MntFlags) -> Result<(), Errno> {
    match umount2(point, flags | MntFlags::UMOUNT_NOFOLLOW) {
        Err(Errno::EINVAL | Errno::ENOENT) => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_table_is_parsed_with_escaped_and_invalid_utf8_paths() {
        let line = b"36 35 98:0 /mnt1 /a\\040b\\134040\xff rw,noatime master:1 - ext3 /dev/root rw";
        let mount = parse(line).expect("a mount");
        assert_eq!(mount.point.as_os_str().as_encoded_bytes(), b"/a b\\040\xff");
        assert_eq!(
            (mount.device.as_str(), mount.kind.as_str()),
            ("98:0", "ext3")
        );
        assert_eq!(parse(b""), None);
        for (line, expected) in [
            (
                "36 35 98:0 / /a rw,noatime - ext3 /dev/root rw,seclabel,errors=continue",
                true,
            ),
            (
                "36 35 98:0 / /a rw,seclabel master:1 - xfs /dev/root rw",
                true,
            ),
            ("36 35 0:9 / /a rw - nfs4 seclabel:/x rw,vers=4.2", false),
            (
                "36 35 98:0 / /a rw - ext3 /dev/root rw,context=\"u:r:t:s0:c1,c2\"",
                false,
            ),
        ] {
            let mount = parse(line.as_bytes()).expect("a mount");
            assert_eq!(mount.labels_files, expected, "{line}");
        }
    }

    #[test]
    fn the_noswap_option_is_probed_once() {
        let mount = |takes: bool, known: &NoSwap, options: &str| {
            let tried = std::cell::RefCell::new(vec![]);
            let outcome = known.tried(options, |options| {
                tried.borrow_mut().push(options.to_owned());
                match options {
                    _ if options.ends_with("size=x") => Err(Errno::EINVAL),
                    "noswap,size=1" if !takes => Err(Errno::EINVAL),
                    _ => Ok(()),
                }
            });
            (outcome, tried.into_inner().join(" "))
        };
        let known = NoSwap(Mutex::new(None));
        let (outcome, tried) = mount(false, &known, "size=x");
        assert_eq!(
            (outcome, tried.as_str()),
            (Err(Errno::EINVAL), "noswap,size=x size=x")
        );
        assert_eq!(
            mount(false, &known, "size=1"),
            (Ok(()), "noswap,size=1 size=1".into())
        );
        for _ in 0..2 {
            assert_eq!(mount(false, &known, "size=1"), (Ok(()), "size=1".into()));
        }
        let known = NoSwap(Mutex::new(None));
        for _ in 0..2 {
            assert_eq!(
                mount(true, &known, "size=1"),
                (Ok(()), "noswap,size=1".into())
            );
        }
    }

    #[test]
    fn a_bind_mount_gets_only_per_mount_options() {
        if crate::skip::needs_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let (volume, bound) = (dir.path().join("volume"), dir.path().join("bound"));
        std::fs::create_dir(&volume).expect("mkdir");
        let found = super::super::beneath::Dir::open(&volume).expect("open");
        bind(&found.itself().expect("itself"), &bound).expect("bound");
        let has = |path: &Path| statvfs(path).expect("statvfs").flags();
        let before = has(&volume);
        for options in [
            vec!["data=ordered"],
            vec!["noexec,nosuid", "ro"],
            vec!["noatime"],
        ] {
            let options: Vec<String> = options.into_iter().map(str::to_owned).collect();
            for _ in 0..2 {
                restrict(&bound, &options).expect("restricted");
            }
        }
        let wanted =
            FsFlags::ST_NOEXEC | FsFlags::ST_NOSUID | FsFlags::ST_RDONLY | FsFlags::ST_NOATIME;
        assert!(has(&bound).contains(wanted), "{:?}", has(&bound));
        assert_eq!(has(&volume), before, "the source's options are unchanged");
        unmount_all(&bound).expect("unmounted");
    }

    #[test]
    fn shared_mounts_are_recognised() {
        let shared = "36 35 98:0 / /a rw,noatime master:1 shared:7 - ext3 /dev/shared:1 rw";
        assert!(is_shared(shared));
        assert!(!is_shared(&shared.replace("shared:7 ", "")));
    }

    #[test]
    fn a_directory_is_shared_once_and_hides_nothing() {
        if crate::skip::needs_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        // The machine's mounts may be shared; this one is not.
        tmpfs(dir.path(), 0).expect("mounted");
        mount(
            None::<&str>,
            dir.path(),
            None::<&str>,
            MsFlags::MS_PRIVATE,
            None::<&str>,
        )
        .expect("private");
        let root = dir.path().join("root");
        std::fs::create_dir_all(root.join("a")).expect("mkdir");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&root, &link).expect("link");
        let mounts = || below(&root).expect("listed").len();
        tmpfs(&root.join("a"), 0).expect("mounted");
        assert_eq!(share(&link).expect("checked"), Sharing::Occupied);
        assert_eq!(mounts(), 1);
        unmount_all(&root).expect("unmounted");
        for _ in 0..2 {
            assert_eq!(share(&link).expect("shared"), Sharing::Shared);
            assert_eq!(mounts(), 1, "a shared directory is not bind-mounted again");
        }
        tmpfs(&root.join("a"), 0).expect("mounted");
        assert_eq!(share(&root).expect("shared"), Sharing::Shared);
        assert_eq!(mounts(), 2);
        unmount_all(dir.path()).expect("unmounted");
    }

    #[test]
    fn mounts_are_found_below_a_linked_directory() {
        if crate::skip::needs_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        std::fs::create_dir_all(real.join("a")).expect("mkdir");
        std::fs::create_dir_all(real.join("b")).expect("mkdir");
        std::os::unix::fs::symlink(&real, &link).expect("link");
        tmpfs(&link.join("a"), 0).expect("mounted");
        for root in [&real, &link] {
            assert!(is_mounted(&root.join("a")).expect("checked"));
            assert!(!is_mounted(&root.join("b")).expect("checked"));
            assert!(!is_mounted(&root.join("c/d")).expect("checked"));
            assert_eq!(below(root).expect("listed").len(), 1);
            assert_eq!(below(&root.join("a")).expect("listed").len(), 1);
        }
        // A bind mount of the same filesystem has the same device number.
        let found = super::super::beneath::Dir::open(&real.join("a")).expect("open");
        bind(&found.itself().expect("itself"), &link.join("b")).expect("bound");
        assert!(is_mounted(&real.join("b")).expect("checked"));
        drop(found);
        // A program that another test has just forked keeps the file open until its execve.
        let begun = std::time::Instant::now();
        let mut outcome = unmount_all(&link.join("b"));
        while outcome.is_err() && begun.elapsed().as_secs() < 60 {
            outcome = unmount_all(&link.join("b"));
        }
        outcome.expect("unmounted");
        unmount_all(&link.join("a")).expect("unmounted");
        assert!(below(&real).expect("listed").is_empty());
    }
}
