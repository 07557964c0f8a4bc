//! Volumes that are plain directories of this node: emptyDirs, files that the agent projects, host paths.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::core::volume::payload::Files;
use crate::core::volume::resolved::Medium;
use crate::host::linux::{doing, make};
use crate::sys::{atomic_dir, mount, quota};

/// Checks a hostPath volume's type (kubelet spec, 9.3).
pub(super) fn check_host_path(path: &Path, kind: &str) -> Result<(), String> {
    let found = fs::metadata(path);
    let must_be = |what: &str, is: fn(&fs::Metadata) -> bool| {
        if found.as_ref().is_ok_and(is) {
            Ok(())
        } else {
            Err(format!(
                "hostPath type check failed: {} is not a {what}",
                path.display()
            ))
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
            .map_err(doing(format!("the file {} cannot be made", path.display()))),
        "Directory" | "DirectoryOrCreate" => must_be("directory", |m| m.is_dir()),
        "File" | "FileOrCreate" => must_be("file", |m| m.is_file()),
        "Socket" => must_be("socket file", |m| m.file_type().is_socket()),
        "CharDevice" => must_be("character device", |m| m.file_type().is_char_device()),
        "BlockDevice" => must_be("block device", |m| m.file_type().is_block_device()),
        other => Err(format!("hostPath type {other:?} is not known")),
    }
}

/// An emptyDir: a directory everybody may write, a tmpfs, or huge pages. Once it is `ready` nothing of it is touched:
/// its mode and owner are the pod's business then (kubelet spec, 9.3). A mount that a restart of the node has undone
/// is made again.
pub(super) fn empty_dir(
    dir: &Path,
    ready: &Path,
    medium: &Medium,
    group: Option<u32>,
) -> Result<(), String> {
    let is_ready = || -> std::io::Result<bool> {
        Ok(ready.exists()
            && match medium {
                Medium::Disk { .. } => dir.is_dir(),
                Medium::Memory(_) | Medium::HugePages(_) => mount::is_mounted(dir)?,
            })
    };
    if is_ready().map_err(doing(format!("{} cannot be looked at", dir.display())))? {
        return Ok(());
    }
    make(dir, 0o777)?;
    let mut mode = 0o777;
    match medium {
        Medium::Disk { counted: false } => {}
        Medium::Disk { counted: true } => {
            if let Err(error) = quota::begin(dir) {
                tracing::debug!(%error, dir = %dir.display(), "the volume's files will be counted one by one");
            }
        }
        Medium::Memory(size) => {
            mount::tmpfs(dir, *size).map_err(doing(format!(
                "a tmpfs cannot be mounted at {}",
                dir.display()
            )))?;
            // As the kernel makes it, and the kubelet leaves it.
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

/// What may be secret never reaches a disk, also after somebody unmounted it. Volumes are set up side by side: the first of them
/// mounts what they share, and the others must not mount it again over what the first has written.
fn ensure_memory(memory: &Path) -> Result<(), String> {
    static MOUNTING: Mutex<()> = Mutex::new(());
    let _one = MOUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    if mount::is_tmpfs(memory) {
        return Ok(());
    }
    make(memory, 0o700)?;
    mount::tmpfs(memory, 0).map_err(doing(format!(
        "a tmpfs cannot be mounted at {}",
        memory.display()
    )))
}

/// The files that the agent projects.
pub(super) fn write_files(
    dir: &Path,
    memory: &Path,
    volume: &str,
    files: Option<Files>,
    group: Option<u32>,
) -> Result<(), String> {
    let files = files.ok_or_else(|| format!("volume {volume:?} has no content"))?;
    if dir.starts_with(memory) {
        ensure_memory(memory)?;
    }
    make(dir, 0o755)?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755))
        .map_err(doing("the volume's mode cannot be set"))?;
    let stamp = jiff::Timestamp::now()
        .strftime("%Y_%m_%d_%H_%M_%S")
        .to_string();
    atomic_dir::write(dir, &files, group, &stamp)
        .map(|_| ())
        .map_err(doing(format!(
            "the files of volume {volume:?} cannot be written"
        )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::volume::payload::File;
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn volumes_set_up_side_by_side_share_one_memory() {
        // Below the file systems of disks, as the agent's directory is.
        let dir = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let memory = dir.path().join("memory");
        for _ in 0..20 {
            let barrier = std::sync::Barrier::new(8);
            std::thread::scope(|scope| {
                for n in 0..8 {
                    let (barrier, memory) = (&barrier, &memory);
                    scope.spawn(move || {
                        barrier.wait();
                        let files =
                            Files::from([("key".to_owned(), File::new(b"value".to_vec(), 0o400))]);
                        write_files(
                            &memory.join(format!("pod/v{n}")),
                            memory,
                            "v",
                            Some(files),
                            None,
                        )
                        .expect("written");
                    });
                }
            });
            for n in 0..8 {
                assert_eq!(
                    fs::read(memory.join(format!("pod/v{n}/key"))).expect("it is there"),
                    b"value"
                );
            }
            mount::unmount_all(&memory).expect("unmounted");
        }
    }

    #[test]
    fn an_empty_dir_is_set_up_once_and_its_mode_is_the_pods() {
        let root = tempfile::tempdir().expect("a directory");
        let mode = |dir: &Path| fs::metadata(dir).expect("stat").mode() & 0o7777;
        let (dir, ready) = (root.path().join("v"), root.path().join("plugins/v/ready"));
        let disk = Medium::Disk { counted: false };
        empty_dir(&dir, &ready, &disk, None).expect("made");
        assert_eq!(mode(&dir), 0o777);
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).expect("chmod");
        empty_dir(&dir, &ready, &disk, None).expect("looked at");
        assert_eq!(mode(&dir), 0o700, "what an init container has set stays");
        fs::remove_dir(&dir).expect("removed");
        empty_dir(&dir, &ready, &disk, None).expect("made again");
        assert_eq!(mode(&dir), 0o777);
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let (dir, ready) = (root.path().join("m"), root.path().join("plugins/m/ready"));
        let memory = Medium::Memory(1 << 20);
        empty_dir(&dir, &ready, &memory, None).expect("made");
        assert_eq!(mode(&dir), 0o1777);
        let below = crate::sys::beneath::Dir::open(&dir).expect("open");
        below.find_or_make(Path::new("a/b")).expect("made");
        assert_eq!(
            mode(&dir.join("a/b")),
            0o1777,
            "a subPath is made with the volume's mode"
        );
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).expect("chmod");
        empty_dir(&dir, &ready, &memory, None).expect("looked at");
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
