//! Volumes on this machine: made, mounted, handed out and taken away (kubelet spec, 9.3, 9.7 and 9.8).
//!
//! What can hang, because another machine or a device is behind it, is waited for only so long.

pub mod csi;
mod disks;
mod staging_lock;
mod tool;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use self::staging_lock::Turn;
use self::tool::tool;
use super::SubPath;
use super::blocking;
use super::linux::{LinuxHost, doing, make, remove, segment};
use crate::core::pod::Ownership;
use crate::core::volume::disks::Disk;
use crate::core::volume::payload::Files;
use crate::core::volume::resolved::{Medium, ResolvedVolume, Source};
use crate::sys::{atomic_dir, beneath, mount, ownership, quota};

/// How long the kernel is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

impl LinuxHost {
    /// Where volumes lie that must never reach a disk: one tmpfs for all pods. One mount a volume would
    /// lengthen the mount table, which the runtime reads for every container it starts.
    pub(in crate::host) fn memory(&self) -> PathBuf {
        self.root.join("memory")
    }

    fn staged(&self, name: &str) -> Result<PathBuf, String> {
        Ok(self
            .root
            .join("plugins/kubernetes.io/local-volume/mounts")
            .join(segment(name)?))
    }

    /// Where a disk behind a network is mounted for all pods.
    fn staged_disk(&self, disk: &Disk) -> Result<PathBuf, String> {
        disk.place()
            .iter()
            .try_fold(self.root.join("plugins"), |path, name| {
                Ok(path.join(segment(name)?))
            })
    }

    /// Where it is noted which pods have it as a device.
    fn mapped_disk(&self, disk: &Disk) -> Result<PathBuf, String> {
        disk.device_place()
            .iter()
            .try_fold(self.root.join("plugins"), |path, name| {
                Ok(path.join(segment(name)?))
            })
    }

    /// Where devices are mounted for all pods.
    fn staging(&self) -> [PathBuf; 3] {
        ["local-volume/mounts", "iscsi", "fc"]
            .map(|name| self.root.join("plugins/kubernetes.io").join(name))
    }

    /// The directory of a volume in a pod's.
    fn volume_dir(&self, uid: &str, resolved: &ResolvedVolume) -> Result<PathBuf, String> {
        Ok(match &resolved.source {
            Source::HostPath { path, .. } => PathBuf::from(path),
            Source::Local { path, .. } if resolved.block => PathBuf::from(path),
            Source::Disk { disk, .. } if resolved.block => {
                disks::find(disk).ok_or("the disk is not there any more")?
            }
            Source::Files { secret: true, .. } => self
                .memory()
                .join(segment(uid)?)
                .join(segment(&resolved.name)?),
            Source::Csi(_) => self
                .pod_dir(uid)?
                .join("volumes")
                .join(resolved.plugin())
                .join(segment(&resolved.name)?)
                .join("mount"),
            _ => self
                .pod_dir(uid)?
                .join("volumes")
                .join(resolved.plugin())
                .join(segment(&resolved.name)?),
        })
    }

    pub(in crate::host) async fn set_up(
        &self,
        uid: &str,
        resolved: &ResolvedVolume,
        owner: Ownership,
        files: Option<Files>,
    ) -> Result<(), String> {
        let key = format!("{uid}/{}", resolved.volume);
        if let (Source::Disk { disk, .. }, true) = (&resolved.source, resolved.block) {
            let (disk, place) = (disk.clone(), self.mapped_disk(disk)?);
            let list = self.pod_dir(uid)?.join("volumeDevices").join(disk.plugin());
            let (mark, link) = (
                place.join(segment(uid)?),
                list.join(segment(&resolved.name)?),
            );
            return self
                .patient
                .call(&key, PATIENCE, move || {
                    disks::map(&disk, &place, [&mark, &link])
                })
                .await;
        }
        let dir = self.volume_dir(uid, resolved)?;
        match resolved.source.clone() {
            // The runtime mounts it from its own store, the driver from its.
            Source::Image | Source::Csi(_) => Ok(()),
            Source::HostPath { kind, .. } if kind.is_empty() => Ok(()),
            Source::HostPath { kind, .. } => {
                self.patient
                    .call(&key, PATIENCE, move || check_host_path(&dir, &kind))
                    .await
            }
            Source::EmptyDir(medium) => {
                blocking(move || empty_dir(&dir, &medium, owner.group)).await
            }
            Source::Files { .. } => {
                let (memory, volume) = (self.memory(), resolved.volume.clone());
                blocking(move || write_files(&dir, &memory, &volume, files, owner.group)).await
            }
            Source::Nfs { device } => {
                let resolved = resolved.clone();
                self.patient
                    .call(&key, PATIENCE, move || nfs(&device, &dir, &resolved))
                    .await
            }
            Source::Disk { disk, filesystem } => {
                let (staged, resolved) = (self.staged_disk(&disk)?, resolved.clone());
                let given = staged.clone();
                let result = self
                    .patient
                    .call(&key, PATIENCE, move || {
                        remote(&disk, &filesystem, &staged, &dir, &resolved, owner)
                    })
                    .await;
                result.map_err(|why| giving(&given, owner).unwrap_or(why))
            }
            Source::Local { path, filesystem } => {
                let (staged, resolved) = (self.staged(&resolved.name)?, resolved.clone());
                let given = [staged.clone(), PathBuf::from(&path)];
                let result = self
                    .patient
                    .call(&key, PATIENCE, move || {
                        local(
                            Path::new(&path),
                            &filesystem,
                            &staged,
                            &dir,
                            &resolved,
                            owner,
                        )
                    })
                    .await;
                result.map_err(|why| {
                    given
                        .iter()
                        .find_map(|place| giving(place, owner))
                        .unwrap_or(why)
                })
            }
        }
    }

    pub(in crate::host) async fn source(
        &self,
        uid: &str,
        resolved: &ResolvedVolume,
        place: &SubPath,
    ) -> Result<PathBuf, String> {
        let base = self.volume_dir(uid, resolved)?;
        let Some(sub) = place.path.clone() else {
            return Ok(base);
        };
        let (volume, container, index) = (
            resolved.volume.clone(),
            place.container.clone(),
            place.index,
        );
        let places = self
            .pod_dir(uid)?
            .join("volume-subpaths")
            .join(segment(&volume)?)
            .join(segment(&container)?);
        let key = format!("{uid}/{volume}/{container}/{index}");
        let work = move || {
            let sub = Path::new(&sub);
            if sub.is_absolute() {
                return Err(format!(
                    "error SubPath `{}` must not be an absolute path",
                    sub.display()
                ));
            }
            if sub
                .components()
                .any(|c| matches!(c, std::path::Component::ParentDir))
            {
                return Err(format!(
                    "unable to provision SubPath `{}`: must not contain '..'",
                    sub.display()
                ));
            }
            let base = beneath::Dir::open(&base).map_err(doing(format!(
                "failed to prepare subPath for volumeMount {volume:?} of container {container:?}"
            )))?;
            let found = base
                .find_or_make(sub)
                .map_err(doing(format!("failed to create subPath directory for volumeMount {volume:?} of container {container:?}")))?;
            make(&places, 0o750)?;
            let target = places.join(index.to_string());
            mount::bind(&found, &target).map_err(doing(format!(
                "failed to prepare subPath for volumeMount {volume:?} of container {container:?}"
            )))?;
            Ok(target)
        };
        self.patient.call(&key, PATIENCE, work).await
    }

    pub(in crate::host) async fn read(
        &self,
        uid: &str,
        resolved: &ResolvedVolume,
        path: &str,
        limit: u64,
    ) -> Result<String, String> {
        let (dir, path) = (self.volume_dir(uid, resolved)?, PathBuf::from(path));
        blocking(move || {
            let dir = beneath::Dir::open(&dir).map_err(doing("the volume cannot be opened"))?;
            dir.read(&path, limit)
                .map_err(doing(format!("{} cannot be read", path.display())))
        })
        .await
    }

    /// Unmounts what a pod has mounted, and staged devices that nobody has any more: its own, and those that an agent
    /// left behind that was killed.
    pub(in crate::host) async fn tear_down(&self, uid: &str) -> Result<(), String> {
        let (dir, memory) = (self.pod_dir(uid)?, self.memory().join(segment(uid)?));
        let (pods, staging) = (self.root.join("pods"), self.staging());
        let work = move || {
            let table = mount::table().map_err(|e| e.to_string())?;
            let had: BTreeSet<String> = table
                .iter()
                .filter(|m| m.point.starts_with(&dir))
                .map(|m| m.device.clone())
                .collect();
            mount::unmount_all(&dir).map_err(|e| e.to_string())?;
            remove(&memory)?;
            let staged = table
                .into_iter()
                .filter(|m| staging.iter().any(|dir| m.point.starts_with(dir)));
            Ok(staged
                .map(|m| (had.contains(&m.device), m))
                .collect::<Vec<_>>())
        };
        let failed = |e: String| format!("volumes cannot be unmounted: {e}");
        for (own, staged) in self
            .patient
            .call(&format!("{uid}/end"), PATIENCE, work)
            .await
            .map_err(failed)?
        {
            let (key, pods) = (staged.point.display().to_string(), pods.clone());
            match self
                .patient
                .call(&key, PATIENCE, move || unstage(&pods, &staged))
                .await
            {
                // Another pod's device that hangs is no reason to stay.
                Err(error) if own => return Err(failed(error)),
                Err(error) => tracing::warn!(
                    error,
                    volume = key,
                    "a local volume that no pod uses stays mounted for now"
                ),
                Ok(()) => {}
            }
        }
        self.let_sessions_go(uid).await.map_err(failed)
    }

    /// Ends the sessions of disks that no pod has: those of a pod that had them as devices, and those that led to
    /// nothing or whose agent was killed.
    async fn let_sessions_go(&self, uid: &str) -> Result<(), String> {
        let (iscsi, mark) = (
            self.root.join("plugins/kubernetes.io/iscsi"),
            segment(uid)?.to_owned(),
        );
        let found = blocking(move || {
            let mut own = BTreeSet::new();
            for place in disks::places(&iscsi.join("volumeDevices")) {
                if disks::unmark(&place.join(&mark))? {
                    own.insert(place);
                }
            }
            Ok(disks::places(&iscsi)
                .into_iter()
                .map(|place| (own.contains(&place), place))
                .collect::<Vec<_>>())
        });
        for (own, place) in found.await? {
            let key = place.display().to_string();
            match self
                .patient
                .call(&key, PATIENCE, move || disks::end_if_idle(&place))
                .await
            {
                Err(error) if own => return Err(error),
                Err(error) => tracing::warn!(
                    error,
                    disk = key,
                    "a session that no pod uses stays for now"
                ),
                Ok(()) => {}
            }
        }
        Ok(())
    }
}

/// What a volume waits for whose files are being given to its pod's group: large ones take their time.
fn giving(place: &Path, owner: Ownership) -> Option<String> {
    let (files, group) = (ownership::under_way(place)?, owner.group?);
    Some(format!(
        "its files are being given to group {group}: {files} so far; with fsGroupChangePolicy OnRootMismatch this is done once"
    ))
}

/// Unmounts a staged device if no pod has it mounted.
fn unstage(pods: &Path, staged: &mount::Mount) -> Result<(), String> {
    // Whoever has its turn is about to use it, or does just this.
    let Some(_turn) = Turn::at(&staged.point) else {
        return Ok(());
    };
    let table = mount::table().map_err(|e| e.to_string())?;
    let there = table.iter().any(|m| m.point == staged.point);
    if !there
        || table
            .iter()
            .any(|m| m.device == staged.device && m.point.starts_with(pods))
    {
        return Ok(());
    }
    mount::unmount_all(&staged.point).map_err(|e| e.to_string())?;
    disks::end_session(&staged.point)?;
    fs::remove_dir(&staged.point).map_err(doing(format!(
        "{} cannot be removed",
        staged.point.display()
    )))
}

/// A disk behind a network: it is mounted once, formatted if it is empty, and bound into the pod.
fn remote(
    disk: &Disk,
    filesystem: &str,
    staged: &Path,
    dir: &Path,
    resolved: &ResolvedVolume,
    owner: Ownership,
) -> Result<(), String> {
    if mount::is_mounted(dir).map_err(|e| e.to_string())? {
        return Ok(());
    }
    let _turn = Turn::of_pod(staged)?;
    if !mount::is_mounted(staged).map_err(|e| e.to_string())? {
        disks::note(disk, staged)?;
        let device = disks::attach(disk)?;
        stage(&device, filesystem, staged, resolved)?;
    }
    bind_staged(staged, dir, resolved, owner)
}

/// Binds what is mounted for all pods into one, and gives it to the pod's group.
fn bind_staged(
    source: &Path,
    dir: &Path,
    resolved: &ResolvedVolume,
    owner: Ownership,
) -> Result<(), String> {
    if let Some(group) = owner.group.filter(|_| resolved.owned) {
        let given = ownership::set_group(source, group, owner.on_mismatch, resolved.read_only);
        given.map_err(doing(format!(
            "the group of volume {} cannot be set",
            resolved.volume
        )))?;
    }
    make(dir, 0o750)?;
    let base = beneath::Dir::open(source).map_err(doing("the volume cannot be opened"))?;
    mount::bind(&base.itself().map_err(|e| e.to_string())?, dir).map_err(doing(format!(
        "{} cannot be bound to {}",
        source.display(),
        dir.display()
    )))
}

/// Checks a hostPath volume's type (kubelet spec, 9.3).
fn check_host_path(path: &Path, kind: &str) -> Result<(), String> {
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

/// An emptyDir: a directory everybody may write, a tmpfs, or huge pages.
fn empty_dir(dir: &Path, medium: &Medium, group: Option<u32>) -> Result<(), String> {
    make(dir, 0o777)?;
    match medium {
        Medium::Disk { counted: false } => {}
        Medium::Disk { counted: true } => {
            if let Err(error) = quota::begin(dir) {
                tracing::debug!(%error, dir = %dir.display(), "the volume's files will be counted one by one");
            }
        }
        Medium::Memory(size) => mount::tmpfs(dir, *size).map_err(doing(format!(
            "a tmpfs cannot be mounted at {}",
            dir.display()
        )))?,
        Medium::HugePages(size) => {
            mount::hugetlbfs(dir, *size).map_err(doing(format!(
                "huge pages of {size} bytes cannot be mounted at {}",
                dir.display()
            )))?;
        }
    }
    let mode = if group.is_some() { 0o2777 } else { 0o777 };
    if let Some(group) = group {
        std::os::unix::fs::chown(dir, None, Some(group))
            .map_err(doing("the volume's group cannot be set"))?;
    }
    fs::set_permissions(dir, fs::Permissions::from_mode(mode))
        .map_err(doing("the volume's mode cannot be set"))
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
fn write_files(
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

/// Mounts through the system's `mount`, which knows the helpers of filesystems.
fn mount_with_tool(kind: &str, device: &str, dir: &Path, options: &[String]) -> Result<(), String> {
    let (options, dir) = (options.join(","), dir.display().to_string());
    let mut arguments = vec!["-t", kind];
    if !options.is_empty() {
        arguments.extend(["-o", &options]);
    }
    arguments.extend([device, &dir]);
    match tool("mount", &arguments)? {
        (0, _) => Ok(()),
        (code, said) => Err(format!(
            "mount -t {kind} {device} failed with {code}: {said}"
        )),
    }
}

fn nfs(device: &str, dir: &Path, resolved: &ResolvedVolume) -> Result<(), String> {
    if mount::is_mounted(dir).map_err(|e| e.to_string())? {
        return Ok(());
    }
    make(dir, 0o750)?;
    let mut options = resolved.options.clone();
    options.extend(resolved.read_only.then(|| "ro".to_owned()));
    mount_with_tool("nfs", device, dir, &options)
}

/// A local volume: a directory is bound into the pod; a device is mounted once, formatted if it is empty.
fn local(
    path: &Path,
    filesystem: &str,
    staged: &Path,
    dir: &Path,
    resolved: &ResolvedVolume,
    owner: Ownership,
) -> Result<(), String> {
    let found = fs::metadata(path).map_err(doing(format!("local volume {}", path.display())))?;
    let device = found.file_type().is_block_device();
    if resolved.block {
        return if device {
            Ok(())
        } else {
            Err(format!(
                "{} is not a block device, as volumeMode Block asks for",
                path.display()
            ))
        };
    }
    if mount::is_mounted(dir).map_err(|e| e.to_string())? {
        return Ok(());
    }
    let _turn = Turn::of_pod(staged)?;
    let mut source = path;
    if device {
        stage(path, filesystem, staged, resolved)?;
        source = staged;
    } else if !found.is_dir() {
        return Err(format!(
            "local volume {} is neither a directory nor a block device",
            path.display()
        ));
    }
    bind_staged(source, dir, resolved, owner)
}

/// Mounts a device where all pods of this node find it. One that holds anything is never formatted.
fn stage(
    device: &Path,
    filesystem: &str,
    staged: &Path,
    resolved: &ResolvedVolume,
) -> Result<(), String> {
    if mount::is_mounted(staged).map_err(|e| e.to_string())? {
        return Ok(());
    }
    let shown = device.display().to_string();
    let known = ["ext4", "ext3", "ext2", "xfs", "btrfs"];
    if !known.contains(&filesystem) {
        return Err(format!(
            "filesystem {filesystem:?} is not known: use one of {}",
            known.join(", ")
        ));
    }
    // blkid ends with 2 where it finds nothing.
    let (empty, found) = match tool(
        "blkid",
        &["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", &shown],
    )? {
        (2, _) => (true, String::new()),
        (0, said) => (false, said),
        (code, said) => {
            return Err(format!(
                "blkid cannot tell what is on {shown} ({code}): {said}"
            ));
        }
    };
    let program = format!("mkfs.{filesystem}");
    if empty && resolved.read_only {
        return Err(format!(
            "{shown} is empty, and the volume is read-only: nothing can be mounted"
        ));
    }
    if empty {
        let mut arguments = match filesystem {
            "xfs" | "btrfs" => vec!["-f"],
            _ => vec!["-F", "-m0"],
        };
        arguments.push(&shown);
        match tool(&program, &arguments)? {
            (0, _) => {}
            (code, said) => return Err(format!("{program} {shown} failed with {code}: {said}")),
        }
    } else if filesystem.starts_with("ext") {
        // 1 says that errors were mended, 4 that they were not.
        match tool("fsck", &["-a", &shown])? {
            (4, said) => {
                return Err(format!(
                    "fsck found errors on {shown} that it could not mend: {said}"
                ));
            }
            (code, said) if code > 1 => {
                tracing::warn!(code, said, device = shown, "fsck could not check a volume")
            }
            _ => {}
        }
    }
    make(staged, 0o750)?;
    let mut options = resolved.options.clone();
    options.extend(resolved.read_only.then(|| "ro".to_owned()));
    mount_with_tool(filesystem, &shown, staged, &options).map_err(|why| {
        match mismatch(&found, filesystem) {
            Some(other) => {
                format!("{shown} has {other}, and the volume asks for {filesystem}: {why}")
            }
            None => why,
        }
    })
}

/// What is on a device by the words of `blkid`, if it is not what is asked for.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::volume::payload::File;

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
}
