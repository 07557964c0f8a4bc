//! Volumes that are mounted: NFS exports, network disks, local devices and directories.

use std::fs::{self, File, TryLockError};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use nix::mount::MntFlags;

use super::csi::is_mounted;
use super::staging_lock::StagingLock;
use super::{OwnershipChanger, disks};
use crate::HostError;
use crate::linux::make;
use crate::tool::{run_tool_cancellable, run_tool_to_completion, tool};
use holdfast_core::fault::Fault;
use holdfast_core::pod::Ownership;
use holdfast_core::volume::disks::Disk;
use holdfast_core::volume::resolved::{Problem, ResolvedVolume};
use holdfast_sys::beneath::Found;
use holdfast_sys::blocking_calls::Call;
use holdfast_sys::failure::doing;
use holdfast_sys::{beneath, mount};

/// The mount points of a volume and the properties of the mount.
pub(super) struct Target<'a> {
    /// The global mount, shared by all pods.
    pub(super) staged: &'a Path,
    /// The directory in the pod's directory.
    pub(super) dir: &'a Path,
    pub(super) owner: Ownership,
    pub(super) ownership_changer: &'a OwnershipChanger,
    pub(super) call: &'a Call,
}

impl<'a> Target<'a> {
    /// Combines the global mount and the pod's directory with the other parameters.
    pub(super) fn new(
        [staged, dir]: [&'a Path; 2],
        owner: Ownership,
        ownership_changer: &'a OwnershipChanger,
        call: &'a Call,
    ) -> Target<'a> {
        Target {
            staged,
            dir,
            owner,
            ownership_changer,
            call,
        }
    }
}

/// Mounts an NFS export in a pod's directory.
pub(super) fn nfs(
    device: &str,
    dir: &Path,
    resolved: &ResolvedVolume,
    call: &Call,
) -> Result<(), HostError> {
    if mount::is_mounted(dir)? {
        return Ok(());
    }
    make(dir, 0o750)?;
    let mut options = resolved.options.clone();
    options.extend(resolved.read_only.then(|| "ro".to_owned()));
    mount_with_tool("nfs", device, dir, &options, call)
}

/// Sets up a network disk: attaches and mounts it once (formatting an empty disk), and bind-mounts it into the pod.
pub(super) fn remote(
    disk: &Disk,
    filesystem: &str,
    resolved: &ResolvedVolume,
    to: &Target<'_>,
) -> Result<(), Problem> {
    if is_mounted(to.dir)? {
        return Ok(());
    }
    let _lock = StagingLock::lock_for_pod(to.staged)?;
    if !is_mounted(to.staged)? {
        disks::record_session(disk, to.staged)?;
        let device = disks::attach(disk)?;
        stage(&device, filesystem, resolved, to)?;
    }
    Ok(bind_staged(to.staged, resolved, to)?)
}

/// Sets up a local volume: bind-mounts a directory into the pod, or
/// mounts a device once (formatting an empty one) and bind-mounts it.
pub(super) fn local(
    path: &Path,
    filesystem: &str,
    resolved: &ResolvedVolume,
    to: &Target<'_>,
) -> Result<(), Problem> {
    let found = fs::metadata(path).map_err(doing(format!("local volume {}", path.display())))?;
    let device = found.file_type().is_block_device();
    if resolved.block {
        return if device {
            Ok(())
        } else {
            let shown = path.display();
            Err(Problem::later(format!(
                "{shown} is not a block device, but its volumeMode is Block"
            )))
        };
    }
    let restrict = || {
        // A device is mounted with these options, so its bind mount has them.
        let options: &[String] = if device { &[] } else { &resolved.options };
        let restricted = mount::restrict(to.dir, options);
        restricted.map_err(doing(format!(
            "applying the mount options to {} failed",
            to.dir.display()
        )))
    };
    if is_mounted(to.dir)? {
        return Ok(restrict()?);
    }
    let _lock = StagingLock::lock_for_pod(to.staged)?;
    let mut source = path;
    if device {
        stage(path, filesystem, resolved, to)?;
        source = to.staged;
    } else if !found.is_dir() {
        return Err(Problem::later(format!(
            "local volume {} is neither a directory nor a block device",
            path.display()
        )));
    }
    let owner = match is_shared(to.dir)? {
        // Changing the group would take the files from the pod that
        // uses the volume. The event AlreadyMountedVolume reports this.
        true => Ownership {
            group: None,
            ..to.owner
        },
        false => to.owner,
    };
    bind_staged(source, resolved, &Target { owner, ..*to })?;
    Ok(restrict()?)
}

/// Whether another pod uses the volume that is to be mounted in the directory `dir` of a pod.
fn is_shared(dir: &Path) -> Result<bool, HostError> {
    // pods/<uid>/volumes/<plugin>/<name>
    let above: Vec<&Path> = dir.ancestors().take(5).collect();
    let [_, _, _, pod, pods] = above.as_slice() else {
        return Ok(false);
    };
    let below = dir.strip_prefix(pod).expect("it is an ancestor");
    let all = fs::read_dir(pods).map_err(doing(format!("{} cannot be read", pods.display())))?;
    for other in all {
        let other = other?.path();
        let is_pod = other != **pod && other.is_dir();
        if is_pod && mount::is_mounted(&other.join(below))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Changes the group ownership of a global mount and bind-mounts it into the pod.
fn bind_staged(source: &Path, resolved: &ResolvedVolume, to: &Target<'_>) -> Result<(), HostError> {
    let Target { dir, owner, .. } = *to;
    if let Some(group) = owner.group.filter(|_| resolved.applies_fs_group) {
        let read_only = resolved.read_only;
        let given = to
            .ownership_changer
            .change(source, (group, owner), read_only, to.call);
        given.map_err(doing(format!(
            "the group of volume {} cannot be set",
            resolved.volume
        )))?;
    }
    if to.call.is_cancelled() {
        return Err(format!("volume {} is no longer needed", resolved.volume).into());
    }
    make(dir, 0o750)?;
    let base = beneath::Dir::open(source).map_err(doing("the volume cannot be opened"))?;
    bind_unless_cancelled(
        &base.itself()?,
        dir,
        to.call,
        format!(
            "{} cannot be bind-mounted at {}",
            source.display(),
            dir.display()
        ),
    )
}

/// Bind-mounts a path into a pod's directory. If the call was cancelled meanwhile, unmounts it again.
pub(super) fn bind_unless_cancelled(
    found: &Found,
    target: &Path,
    call: &Call,
    failed: String,
) -> Result<(), HostError> {
    let cancelled = || HostError::failed(format!("{failed}: its pod is terminating"));
    if call.is_cancelled() {
        return Err(cancelled());
    }
    mount::bind(found, target).map_err(doing(&failed))?;
    if call.is_cancelled() {
        mount::unmount(target, MntFlags::MNT_DETACH)?;
        return Err(cancelled());
    }
    Ok(())
}

/// Mounts a device at the global mount. Never formats a device that is not empty.
fn stage(
    device: &Path,
    filesystem: &str,
    resolved: &ResolvedVolume,
    to: &Target<'_>,
) -> Result<(), Problem> {
    if is_mounted(to.staged)? {
        return Ok(());
    }
    let shown = device.display().to_string();
    let known = ["ext4", "ext3", "ext2", "xfs", "btrfs"];
    if !known.contains(&filesystem) {
        return Err(Fault::invalid(format!(
            "filesystem {filesystem:?} is not supported: use one of {}",
            known.join(", ")
        ))
        .into());
    }
    let found = prepare(
        &shown,
        filesystem,
        is_read_only(resolved.read_only, &resolved.options),
        to.call,
    )?;
    make(to.staged, 0o750)?;
    let mut options = resolved.options.clone();
    options.extend(resolved.read_only.then(|| "ro".to_owned()));
    mount_with_tool(filesystem, &shown, to.staged, &options, to.call).map_err(|why| match mismatch(
        &found, filesystem,
    ) {
        Some(other) => Problem::Mismatch(format!(
            "{shown} has {other}, but the volume's fsType is {filesystem}: {why}"
        )),
        None => why.into(),
    })
}

/// Whether a volume is mounted read-only: by its pod or claim, or by a mount option.
fn is_read_only(read_only: bool, options: &[String]) -> bool {
    let mut options = options.iter().flat_map(|o| o.split(','));
    read_only || options.any(|option| option == "ro")
}

/// Formats an empty device, or checks the filesystem of another. A read-only device is not written to,
/// since another machine may have mounted it. Returns the output of `blkid`. Never interrupts a tool,
/// however long it takes. The device stays locked until the tool exits, even if the agent exits earlier.
fn prepare(
    device: &str,
    filesystem: &str,
    read_only: bool,
    call: &Call,
) -> Result<String, HostError> {
    if call.is_cancelled() {
        return Err(format!("{device} is not prepared: its pod is terminating").into());
    }
    let file = lock_device(device)?;
    let found = probe(device)?;
    if found.is_none() && read_only {
        return Err(format!(
            "{device} is empty, and the volume is read-only: nothing can be mounted"
        )
        .into());
    }
    if found.is_none() {
        check_readable(&file).map_err(doing(format!(
            "{device} is not formatted: reading its content failed"
        )))?;
        // `blkid` reports nothing if reading the device failed temporarily.
        if let Some(output) = probe(device)? {
            return Err(format!("{device} is not formatted: it has {output}").into());
        }
        let program = format!("mkfs.{filesystem}");
        let mut arguments = match filesystem {
            "xfs" | "btrfs" => vec!["-f"],
            _ => vec!["-F", "-m0"],
        };
        arguments.push(device);
        call.doing(format!("{program} {device}"));
        match run_tool_to_completion(&program, &arguments, file)? {
            (0, _) => {}
            (code, output) => {
                return Err(format!("{program} {device} failed with {code}: {output}").into());
            }
        }
    } else if filesystem.starts_with("ext") && !read_only {
        call.doing(format!("fsck -a {device}"));
        // Exit code 1 means that errors were corrected; 4 that errors remain.
        match run_tool_to_completion("fsck", &["-a", device], file)? {
            (4, output) => {
                return Err(format!(
                    "fsck found errors on {device} but could not correct them: {output}"
                )
                .into());
            }
            (code, output) if code > 1 => {
                tracing::warn!(code, output, device, "checking a volume with fsck failed")
            }
            _ => {}
        }
    }
    Ok(found.unwrap_or_default())
}

/// The output of `blkid` for a device; `None` if it finds nothing.
fn probe(device: &str) -> Result<Option<String>, HostError> {
    let what = ["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", device];
    match tool("blkid", &what)? {
        (0, output) => Ok(Some(output)),
        // `blkid` also exits with this code if it could not read the device.
        (2, _) => Ok(None),
        (code, output) => Err(format!("blkid could not probe {device} ({code}): {output}").into()),
    }
}

/// Reads the areas of filesystem headers and partition tables: the beginning and the end.
fn check_readable(mut device: &File) -> std::io::Result<()> {
    const SPAN: u64 = 1 << 20;
    let read = |device: &File| std::io::copy(&mut device.take(SPAN), &mut std::io::sink());
    device.rewind()?;
    read(device)?;
    let end = device.seek(SeekFrom::End(0))?;
    device.seek(SeekFrom::Start(end.saturating_sub(SPAN)))?;
    read(device).map(drop)
}

/// Expands the filesystem of a mounted device to the size of the device. A directory needs no expansion.
pub(super) fn grow(device: &Path, staged: &Path, call: &Call) -> Result<(), HostError> {
    let shown = device.display().to_string();
    let found = fs::metadata(device).map_err(doing(format!("local volume {shown}")))?;
    if !found.file_type().is_block_device() {
        return Ok(());
    }
    let mounted = staged.display().to_string();
    let mounts = mount::table()?;
    let there = mounts.iter().rfind(|m| m.point == staged);
    let there = there.ok_or_else(|| format!("{shown} is not mounted at {mounted}"))?;
    let (program, arguments) = match there.kind.as_str() {
        "ext2" | "ext3" | "ext4" => ("resize2fs", vec![shown.as_str()]),
        "xfs" => ("xfs_growfs", vec![mounted.as_str()]),
        "btrfs" => ("btrfs", vec!["filesystem", "resize", "max", &mounted]),
        other => {
            return Err(format!("a filesystem of type {other} cannot be grown").into());
        }
    };
    call.doing(format!("{program} {}", arguments.join(" ")));
    // Several pods may notice the growth of their volume at the same time; serialise them.
    let file = open_exclusive(&shown)?;
    file.lock()
        .map_err(doing(format!("{shown} cannot be locked")))?;
    if call.is_cancelled() {
        return Err(format!("{shown} is not grown: its pod is terminating").into());
    }
    match run_tool_to_completion(program, &arguments, file)? {
        (0, _) => Ok(()),
        (code, output) => Err(format!("{program} {shown} failed with {code}: {output}").into()),
    }
}

fn open_exclusive(device: &str) -> Result<File, HostError> {
    File::open(device).map_err(doing(format!("{device} cannot be opened")))
}

/// Opens and locks a device. The tool that formats or checks the device inherits the lock.
fn lock_device(device: &str) -> Result<File, HostError> {
    let file = open_exclusive(device)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(HostError::under_way(format!(
            "{device} is locked: another program is formatting, checking or probing it"
        ))),
        Err(TryLockError::Error(error)) => Err(doing(format!("{device} cannot be locked"))(error)),
    }
}

/// Describes the contents of a device by the output of `blkid`, if they differ from the requested filesystem.
fn mismatch(found: &str, filesystem: &str) -> Option<String> {
    let value = |key: &str| {
        found
            .lines()
            .find_map(|l| l.strip_prefix(key))
            .map(str::to_owned)
    };
    let table = value("PTTYPE=").map(|kind| format!("a partition table ({kind})"));
    value("TYPE=")
        .filter(|kind| kind != filesystem)
        .map(|kind| format!("a filesystem of type {kind}"))
        .or(table)
}

/// Mounts through the system's `mount`, which supports helpers of filesystems.
///
/// If the call was cancelled before the mount succeeds, undoes the
/// mount, so that none appears in a directory that is being removed.
fn mount_with_tool(
    kind: &str,
    device: &str,
    dir: &Path,
    options: &[String],
    call: &Call,
) -> Result<(), HostError> {
    call.doing(format!("mount -t {kind} {device}"));
    let outcome = match mount_called(kind, device, dir, options, call) {
        Ok(()) if call.is_cancelled() => {
            Err(format!("mount -t {kind} {device} finished after it was cancelled").into())
        }
        other => other,
    };
    if outcome.is_err() && mount::is_mounted(dir)? {
        mount::unmount(dir, MntFlags::MNT_DETACH)?;
    }
    outcome
}

fn mount_called(
    kind: &str,
    device: &str,
    dir: &Path,
    options: &[String],
    call: &Call,
) -> Result<(), HostError> {
    let (options, dir) = (options.join(","), dir.display().to_string());
    let mut arguments = vec!["-t", kind];
    if !options.is_empty() {
        arguments.extend(["-o", &options]);
    }
    arguments.extend([device, &dir]);
    match run_tool_cancellable("mount", &arguments, call)? {
        (0, _) => Ok(()),
        (code, output) => {
            Err(format!("mount -t {kind} {device} failed with {code}: {output}").into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_sys::blocking_calls::BlockingCalls;
    use std::os::unix::fs::FileExt as _;
    use std::time::Duration;

    fn a_local_volume(path: &Path) -> ResolvedVolume {
        ResolvedVolume {
            volume: "v".into(),
            name: "pv".into(),
            source: holdfast_core::volume::resolved::Source::Local {
                path: path.display().to_string(),
                filesystem: "ext4".into(),
                grown: None,
            },
            read_only: false,
            block: false,
            options: vec!["noexec".into()],
            applies_fs_group: true,
            labelled: false,
            group: None,
            access_mode: "RWO",
        }
    }

    #[tokio::test]
    async fn a_local_volume_gets_the_group_of_its_first_pod() {
        use std::os::unix::fs::MetadataExt as _;

        if crate::skip::needs_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let root = fs::canonicalize(dir.path()).expect("resolved");
        let volume = root.join("volume");
        fs::create_dir(&volume).expect("mkdir");
        let of = |uid: &str| root.join("pods").join(uid).join("volumes/local/pv");
        let set_up = async |uid: &str, group: u32| {
            let (path, dir) = (volume.clone(), of(uid));
            let staged = root.join("staged/pv");
            let resolved = a_local_volume(&path);
            let work = move |call: &Call| {
                fs::create_dir_all(&dir).expect("mkdir");
                let ownership_changer = OwnershipChanger {
                    plugin: "local".into(),
                    on_ownership_change: None,
                };
                let owner = Ownership {
                    group: Some(group),
                    ..Ownership::default()
                };
                let to = Target::new([&staged, &dir], owner, &ownership_changer, call);
                local(&path, "ext4", &resolved, &to)
            };
            let calls = BlockingCalls::default();
            let outcome = calls.call_with(uid, Duration::from_secs(60), work).await;
            assert_eq!(outcome, Ok(()));
            let stat = fs::metadata(&volume).expect("stat");
            stat.gid()
        };
        assert_eq!(set_up("one", 4242).await, 4242);
        assert_eq!(
            set_up("two", 4343).await,
            4242,
            "the first pod still uses the volume"
        );
        for uid in ["one", "two"] {
            let flags = nix::sys::statvfs::statvfs(&of(uid)).expect("statvfs");
            assert!(
                flags
                    .flags()
                    .contains(nix::sys::statvfs::FsFlags::ST_NOEXEC)
            );
            mount::unmount_all(&of(uid)).expect("unmounted");
        }
        assert_eq!(set_up("three", 4343).await, 4343);
        mount::unmount_all(&of("three")).expect("unmounted");
    }

    #[test]
    fn a_volume_is_read_only_by_its_spec_or_by_a_mount_option() {
        for (read_only, options, expected) in [
            (false, vec![], false),
            (true, vec![], true),
            (false, vec!["ro"], true),
            (false, vec!["noatime,ro"], true),
            (false, vec!["errors=remount-ro", "rw"], false),
        ] {
            let options: Vec<String> = options.into_iter().map(str::to_owned).collect();
            assert_eq!(
                is_read_only(read_only, &options),
                expected,
                "{read_only} {options:?}"
            );
        }
    }

    /// An image with an unclean filesystem, which a check would write to.
    fn unclean(image: &Path) {
        let file = File::create(image).expect("an image");
        file.set_len(4 << 20).expect("as large");
        let path = image.display().to_string();
        let arguments = ["-q", "-F", "-O", "^metadata_csum", &path];
        let made = std::process::Command::new("mkfs.ext4")
            .args(arguments)
            .status();
        assert!(made.expect("mkfs.ext4 of e2fsprogs").success());
        // The state field of the superblock.
        file.write_all_at(&[0, 0], 1024 + 0x3a).expect("written");
    }

    /// `blkid` reports nothing for a device that it cannot read.
    #[test]
    fn an_unreadable_device_is_not_formatted() {
        let dir = tempfile::tempdir().expect("a directory");
        let image = dir.path().join("image");
        let file = File::create(&image).expect("an image");
        file.set_len(3 << 20).expect("as large");
        check_readable(&File::open(&image).expect("opened"))
            .expect("the device is empty and readable");
        // Reading at offset 0 fails, as on a broken disk.
        let broken = "/proc/self/mem";
        let error = check_readable(&File::open(broken).expect("opened"))
            .expect_err("the device is unreadable");
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }

    #[tokio::test]
    async fn a_read_only_volume_is_not_checked() {
        let dir = tempfile::tempdir().expect("a directory");
        let image = dir.path().join("image");
        unclean(&image);
        let bytes = || std::fs::read(&image).expect("read");
        let before = bytes();
        for (read_only, is_checked) in [(true, false), (false, true)] {
            let device = image.display().to_string();
            let work = move |call: &Call| prepare(&device, "ext4", read_only, call);
            let calls = BlockingCalls::default();
            let prepared = calls.call_with("v", Duration::from_secs(60), work).await;
            assert!(prepared.is_ok_and(|found| found.contains("TYPE=ext4")));
            assert_eq!(bytes() != before, is_checked, "read-only: {read_only}");
        }
    }
}
