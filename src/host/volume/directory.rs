//! Volumes that are directories of this node: emptyDirs, projected files, host paths.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{
    FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};

use crate::HostError;
use crate::linux::make;
use holdfast_core::volume::payload::Files;
use holdfast_core::volume::resolved::Medium;
use holdfast_sys::blocking_calls::Call;
use holdfast_sys::failure::doing;
use holdfast_sys::{atomic_dir, beneath, mount, quota};

/// Checks the type of a hostPath volume (`pkg/volume/hostpath/host_path.go`).
pub(super) fn check_host_path(path: &Path, kind: &str) -> Result<(), HostError> {
    let found = fs::metadata(path);
    let must_be = |what: &str, is: fn(&fs::Metadata) -> bool| {
        if found.as_ref().is_ok_and(is) {
            Ok(())
        } else {
            Err(format!(
                "hostPath type check failed: {} is not a {what}",
                path.display()
            )
            .into())
        }
    };
    match kind {
        "DirectoryOrCreate" if found.is_err() => make(path, 0o755),
        "FileOrCreate" if found.is_err() => fs::OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o644)
            .open(path)
            .map(|_| ())
            .map_err(doing(format!(
                "the file {} cannot be created",
                path.display()
            ))),
        "Directory" | "DirectoryOrCreate" => must_be("directory", |m| m.is_dir()),
        "File" | "FileOrCreate" => must_be("file", |m| m.is_file()),
        "Socket" => must_be("socket file", |m| m.file_type().is_socket()),
        "CharDevice" => must_be("character device", |m| m.file_type().is_char_device()),
        "BlockDevice" => must_be("block device", |m| m.file_type().is_block_device()),
        other => Err(format!("hostPath type {other:?} is not supported").into()),
    }
}

/// Creates an emptyDir: a world-writable directory, a tmpfs, or huge pages. Once the `ready`
/// file exists, mode and owner stay as the pod has set them
/// (`pkg/volume/emptydir/empty_dir.go`). A mount that was lost in a reboot is mounted again.
pub(super) fn empty_dir(
    dir: &Path,
    ready: &Path,
    medium: &Medium,
    group: Option<u32>,
) -> Result<(), HostError> {
    let is_ready = || -> std::io::Result<bool> {
        Ok(ready.exists()
            && match medium {
                Medium::Disk { .. } => dir.is_dir(),
                Medium::Memory(_) | Medium::HugePages(_) => mount::is_mounted(dir)?,
            })
    };
    if is_ready().map_err(doing(format!("checking {} failed", dir.display())))? {
        return Ok(());
    }
    make(dir, 0o777)?;
    let mut mode = 0o777;
    match medium {
        Medium::Disk { counted: false } => {}
        Medium::Disk { counted: true } => {
            if let Err(error) = quota::begin(dir) {
                tracing::debug!(%error, dir = %dir.display(), "setting up a quota failed; the volume's files will be counted individually");
            }
        }
        Medium::Memory(size) => {
            mount::tmpfs(dir, *size).map_err(doing(format!(
                "a tmpfs cannot be mounted at {}",
                dir.display()
            )))?;
            // The kernel's default for tmpfs, which the kubelet keeps.
            mode = 0o1777;
        }
        Medium::HugePages(size) => {
            mount::hugetlbfs(dir, *size).map_err(doing(format!(
                "huge pages of {size} bytes cannot be mounted at {}",
                dir.display()
            )))?;
        }
    }
    if let Some(group) = group {
        std::os::unix::fs::chown(dir, None, Some(group))
            .map_err(doing("the volume's group cannot be set"))?;
        mode |= 0o2000;
    }
    fs::set_permissions(dir, fs::Permissions::from_mode(mode))
        .map_err(doing("the volume's mode cannot be set"))?;
    make(ready.parent().unwrap_or(ready), 0o750)?;
    fs::write(ready, "").map_err(doing(format!("{} cannot be written", ready.display())))
}

/// Keeps a volume in a separate tmpfs, as the kubelet does, so that secrets never
/// reach a disk. Mounts the tmpfs again if another program has unmounted it.
pub(super) fn keep_in_memory(dir: &Path) -> Result<(), HostError> {
    if !mount::is_mounted(dir).map_err(doing(format!("checking {} failed", dir.display())))? {
        make(dir, 0o777)?;
        mount::tmpfs(dir, 0).map_err(doing(format!(
            "a tmpfs cannot be mounted at {}",
            dir.display()
        )))?;
    }
    match mount::is_tmpfs(dir) {
        true => Ok(()),
        false => Err(format!(
            "a filesystem other than tmpfs is mounted at {}: unmount it",
            dir.display()
        )
        .into()),
    }
}

/// Unmounts a volume whose setup was cancelled meanwhile.
pub(super) fn undo_if_cancelled(dir: &Path, call: &Call) -> Result<(), HostError> {
    if !call.is_cancelled() {
        return Ok(());
    }
    mount::unmount_all(dir)?;
    Err(format!("{} is not mounted: its pod is terminating", dir.display()).into())
}

/// Sets the mode of the volume's root directory. As in the kubelet, it is that of
/// an emptyDir, so world-writable; a tmpfs also has the sticky bit. With a group,
/// the directory belongs to the group, and files created in it inherit the group.
fn root_of_files(dir: &Path, group: Option<u32>) -> std::io::Result<()> {
    let found = fs::metadata(dir)?;
    if let Some(group) = group.filter(|group| *group != found.gid()) {
        std::os::unix::fs::chown(dir, None, Some(group))?;
    }
    let bits = if group.is_some() { 0o2777 } else { 0o777 };
    let mode = found.mode() & 0o7777;
    if mode | bits == mode {
        return Ok(());
    }
    fs::set_permissions(dir, fs::Permissions::from_mode(mode | bits))
}

/// The contents of a projected volume.
pub(crate) struct Content {
    pub(crate) files: Files,
    /// The paths at which other volumes are mounted inside it.
    pub(crate) mounted_within: BTreeSet<PathBuf>,
}

/// Writes the projected files, and creates directories for mounts inside the volume.
pub(super) fn write_files(
    dir: &Path,
    volume: &str,
    content: Option<Content>,
    group: Option<u32>,
) -> Result<(), HostError> {
    let content = content.ok_or_else(|| format!("volume {volume:?} has no content"))?;
    make(dir, 0o777)?;
    root_of_files(dir, group).map_err(doing("the volume's mode cannot be set"))?;
    let stamp = jiff::Timestamp::now()
        .strftime("%Y_%m_%d_%H_%M_%S")
        .to_string();
    atomic_dir::write(dir, &content.files, group, &stamp).map_err(doing(format!(
        "the files of volume {volume:?} cannot be written"
    )))?;
    for place in &content.mounted_within {
        let made = beneath::Dir::open(dir).and_then(|dir| dir.find_or_make(place));
        made.map_err(doing(format!(
            "volume {volume:?}: the mount point {} cannot be created",
            place.display()
        )))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_core::volume::payload::File;

    fn content(files: Files) -> Option<Content> {
        let mounted_within = BTreeSet::new();
        Some(Content {
            files,
            mounted_within,
        })
    }

    #[test]
    fn mount_points_within_files_are_created() {
        let root = tempfile::tempdir().expect("a directory");
        let write = |text: &str| {
            let file = File::new(text.as_bytes().to_vec(), 0o400);
            let content = Content {
                files: Files::from([("key".to_owned(), file)]),
                mounted_within: ["in/side", "key"].map(PathBuf::from).into(),
            };
            write_files(root.path(), "v", Some(content), None).expect("written");
        };
        for text in ["first", "changed"] {
            write(text);
            assert!(root.path().join("in/side").is_dir());
            let key = fs::read_to_string(root.path().join("key"));
            assert_eq!(key.expect("it is there"), text);
        }
    }

    #[test]
    fn secrets_are_written_only_to_a_tmpfs() {
        if crate::skip::needs_root() {
            return;
        }
        // On a disk, like the agent's directory.
        let root = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let write = |dir: &Path| {
            let files = Files::from([("key".to_owned(), File::new(b"value".to_vec(), 0o400))]);
            keep_in_memory(dir)?;
            write_files(dir, "v", content(files), None)
        };
        let (dir, disk) = (root.path().join("v"), root.path().join("disk"));
        for _ in 0..2 {
            write(&dir).expect("written, and checked again");
            assert!(mount::is_mounted(&dir).expect("checked") && mount::is_tmpfs(&dir));
            assert_eq!(mount::below(root.path()).expect("listed").len(), 1);
            assert_eq!(fs::read(dir.join("key")).expect("it is there"), b"value");
        }
        mount::unmount_all(&dir).expect("unmounted");
        assert_eq!(fs::read_dir(&dir).expect("listed").count(), 0);
        write(&dir).expect("as after a restart of the node");
        mount::unmount_all(&dir).expect("unmounted");

        fs::create_dir(&disk).expect("mkdir");
        let disk = holdfast_sys::beneath::Dir::open(&disk).expect("open");
        mount::bind(&disk.itself().expect("itself"), &dir).expect("bound");
        let refused = write(&dir).expect_err("a disk is not a tmpfs");
        assert!(
            refused.message.contains("a filesystem other than tmpfs"),
            "{refused}"
        );
        assert_eq!(fs::read_dir(&dir).expect("listed").count(), 0);
        mount::unmount_all(&dir).expect("unmounted");
    }

    #[test]
    fn the_root_of_a_files_volume_has_the_mode_of_an_empty_dir() {
        let root = tempfile::tempdir().expect("a directory");
        let mode = |dir: &Path| fs::metadata(dir).expect("stat").mode() & 0o7777;
        let dir = root.path().join("v");
        let write = |dir: &Path, group| write_files(dir, "v", content(Files::new()), group);
        write(&dir, None).expect("written");
        assert_eq!(mode(&dir), 0o777);
        // The mode that an earlier version has set.
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).expect("chmod");
        write(&dir, None).expect("written again");
        assert_eq!(mode(&dir), 0o777);
    }

    #[test]
    fn the_root_of_a_files_volume_has_the_group_of_its_pod() {
        if crate::skip::needs_root() {
            return;
        }
        let root = tempfile::tempdir().expect("a directory");
        let mode = |dir: &Path| fs::metadata(dir).expect("stat").mode() & 0o7777;
        let dir = root.path().join("v");
        let write = |dir: &Path, group| write_files(dir, "v", content(Files::new()), group);
        write(&dir, Some(4242)).expect("written for a group");
        assert_eq!(mode(&dir), 0o2777);
        assert_eq!(fs::metadata(&dir).expect("stat").gid(), 4242);
        let dir = root.path().join("m");
        keep_in_memory(&dir).expect("mounted");
        write(&dir, None).expect("written");
        assert_eq!(mode(&dir), 0o1777);
        mount::unmount_all(&dir).expect("unmounted");
    }

    #[test]
    fn an_empty_dir_is_set_up_once_and_keeps_the_mode_that_its_pod_sets() {
        let root = tempfile::tempdir().expect("a directory");
        let mode = |dir: &Path| fs::metadata(dir).expect("stat").mode() & 0o7777;
        let (dir, ready) = (root.path().join("v"), root.path().join("plugins/v/ready"));
        let disk = Medium::Disk { counted: false };
        empty_dir(&dir, &ready, &disk, None).expect("made");
        assert_eq!(mode(&dir), 0o777);
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).expect("chmod");
        empty_dir(&dir, &ready, &disk, None).expect("checked");
        assert_eq!(
            mode(&dir),
            0o700,
            "the mode set by an init container is kept"
        );
        fs::remove_dir(&dir).expect("removed");
        empty_dir(&dir, &ready, &disk, None).expect("made again");
        assert_eq!(mode(&dir), 0o777);
    }

    #[test]
    fn an_empty_dir_in_memory_is_set_up_once_and_keeps_the_mode_that_its_pod_sets() {
        if crate::skip::needs_root() {
            return;
        }
        let root = tempfile::tempdir().expect("a directory");
        let mode = |dir: &Path| fs::metadata(dir).expect("stat").mode() & 0o7777;
        let (dir, ready) = (root.path().join("m"), root.path().join("plugins/m/ready"));
        let memory = Medium::Memory(1 << 20);
        empty_dir(&dir, &ready, &memory, None).expect("made");
        assert_eq!(mode(&dir), 0o1777);
        let below = holdfast_sys::beneath::Dir::open(&dir).expect("open");
        below.find_or_make(Path::new("a/b")).expect("made");
        assert_eq!(
            mode(&dir.join("a/b")),
            0o1777,
            "a subPath is created with the volume's mode"
        );
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).expect("chmod");
        empty_dir(&dir, &ready, &memory, None).expect("checked");
        assert_eq!(mode(&dir), 0o700);
        drop(below);
        mount::unmount_all(&dir).expect("unmounted");
        empty_dir(&dir, &ready, &memory, Some(4242)).expect("as after a restart of the node");
        assert_eq!(
            (mode(&dir), fs::metadata(&dir).expect("stat").gid()),
            (0o3777, 4242)
        );
        mount::unmount_all(&dir).expect("unmounted");
    }
}
