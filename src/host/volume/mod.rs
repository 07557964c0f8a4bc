//! Volumes on this machine: setup, mounts and removal
//! (`pkg/volume/util/operationexecutor/operation_generator.go`, `pkg/volume/volume_linux.go`).
//!
//! Calls that may hang on another machine or a device have timeouts.

pub mod csi;
mod device;
mod directory;
pub mod disks;
mod mapped;
mod staging_lock;
mod tear_down;

pub(crate) use directory::Content;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::linux::{LinuxHost, OnOwnershipChange, make, segment};
use super::{HostError, SubPath, blocking};
use holdfast_core::pod::Ownership;
use holdfast_core::volume::disks::Disk;
use holdfast_core::volume::permissions::OwnershipChange;
use holdfast_core::volume::resolved::{Problem, ResolvedVolume, Source};
use holdfast_sys::blocking_calls::Call;
use holdfast_sys::failure::doing;
use holdfast_sys::{beneath, ownership};

/// Timeout for calls to the kernel.
const KERNEL_TIMEOUT: Duration = Duration::from_secs(10);

/// Changes the group ownership of a volume's files.
struct OwnershipChanger {
    plugin: String,
    on_ownership_change: Option<OnOwnershipChange>,
}

impl OwnershipChanger {
    /// Calls [`ownership::set_group`] and reports the outcome.
    fn change(
        &self,
        root: &Path,
        (group, owner): (u32, Ownership),
        read_only: bool,
        call: &Call,
    ) -> std::io::Result<()> {
        let (begun, stop) = (Instant::now(), || call.is_cancelled());
        let outcome = ownership::set_group(root, group, owner.on_mismatch, read_only, &stop);
        if let (Some(report), Ok(true) | Err(_)) = (&self.on_ownership_change, &outcome) {
            report(&self.plugin, begun.elapsed(), outcome.is_err());
        }
        outcome.map(drop)
    }
}

impl LinuxHost {
    fn ownership_changer(&self, plugin: String) -> OwnershipChanger {
        OwnershipChanger {
            plugin,
            on_ownership_change: self.on_ownership_change.clone(),
        }
    }

    /// The progress of a running ownership change, which takes long for large
    /// volumes. `dir` is the volume's directory in the pod's directory.
    fn ownership_progress(
        &self,
        root: &Path,
        dir: &Path,
        owner: Ownership,
    ) -> Option<OwnershipChange> {
        let (progress, group) = (ownership::progress(root)?, owner.group?);
        let files = progress.files();
        // The path that upstream shows: from the pod's uid on.
        let shown = dir.strip_prefix(self.root.join("pods")).unwrap_or(dir);
        Some(OwnershipChange {
            root: root.into(),
            display_path: shown.display().to_string(),
            progress: format!(
                "changing its files to group {group}: {files} so far; with fsGroupChangePolicy OnRootMismatch this is done once"
            ),
        })
    }

    /// Replaces a problem "under way" by the progress of the
    /// ownership change, if one is running at one of these `places`.
    fn with_ownership_progress(
        &self,
        outcome: Result<(), Problem>,
        places: &[&Path],
        dir: &Path,
        owner: Ownership,
    ) -> Result<(), Problem> {
        outcome.map_err(|problem| {
            let mut places = places.iter().filter(|_| problem.is_under_way());
            let progress = places.find_map(|place| self.ownership_progress(place, dir, owner));
            progress.map_or(problem, Problem::Permissions)
        })
    }

    fn staged(&self, name: &str) -> Result<PathBuf, HostError> {
        Ok(self
            .root
            .join("plugins/kubernetes.io/local-volume/mounts")
            .join(segment(name)?))
    }

    /// The global mount of a network disk.
    fn staged_disk(&self, disk: &Disk) -> Result<PathBuf, HostError> {
        disk.global_mount_path()
            .iter()
            .try_fold(self.root.join("plugins"), |path, name| {
                Ok(path.join(segment(name)?))
            })
    }

    /// The directory with the marks of pods that use the disk as a block device.
    fn mapped_disk(&self, disk: &Disk) -> Result<PathBuf, HostError> {
        disk.device_path()
            .iter()
            .try_fold(self.root.join("plugins"), |path, name| {
                Ok(path.join(segment(name)?))
            })
    }

    /// The plugins with global mounts, and the directories of these.
    fn staging(&self) -> [(&'static str, PathBuf); 3] {
        let plugins = self.root.join("plugins");
        [
            ("kubernetes.io/local-volume", "mounts"),
            ("kubernetes.io/iscsi", ""),
            ("kubernetes.io/fc", ""),
        ]
        .map(|(plugin, below)| (plugin, plugins.join(plugin).join(below)))
    }

    /// The file that marks a volume as set up, so that later changes by the pod to its mode persist.
    fn ready_mark(&self, uid: &str, resolved: &ResolvedVolume) -> Result<PathBuf, HostError> {
        Ok(self
            .pod_dir(uid)?
            .join("plugins")
            .join(resolved.plugin())
            .join(segment(&resolved.name)?)
            .join("ready"))
    }

    /// The directory of a volume in the pod's directory.
    fn volume_dir(&self, uid: &str, resolved: &ResolvedVolume) -> Result<PathBuf, HostError> {
        Ok(match &resolved.source {
            Source::HostPath { path, .. } => PathBuf::from(path),
            Source::Local { path, .. } if resolved.block => PathBuf::from(path),
            Source::Disk { disk, .. } if resolved.block => {
                disks::find(disk).ok_or("the disk no longer exists")?
            }
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

    /// The group of a local volume that other pods use as well.
    pub(crate) async fn shared_group(&self, uid: &str, resolved: &ResolvedVolume) -> Option<u32> {
        let Source::Local { path, .. } = &resolved.source else {
            return None;
        };
        let (staged, path) = (self.staged(&resolved.name).ok()?, PathBuf::from(path));
        let (pods, own) = (self.root.join("pods"), uid.to_owned());
        let (plugin, name) = (resolved.plugin(), resolved.name.clone());
        let inspect = move || {
            let others = fs::read_dir(pods)?.flatten();
            let mut others = others.filter(|pod| *pod.file_name() != *own);
            // Do not access the mount, which may hang.
            let has = |pod: fs::DirEntry| {
                let volumes = fs::read_dir(pod.path().join("volumes").join(plugin));
                let mut volumes = volumes.into_iter().flatten().flatten();
                volumes.any(|volume| *volume.file_name() == *name)
            };
            if !others.any(has) {
                return Ok::<_, HostError>(None);
            }
            let found = fs::metadata(&path)?;
            let root = match found.is_dir() {
                true => found,
                false => fs::metadata(&staged)?,
            };
            Ok(Some(root.gid()))
        };
        let key = format!("{uid}/{}/group", resolved.volume);
        let found = self.calls.call(&key, KERNEL_TIMEOUT, inspect).await;
        found.ok().flatten()
    }

    pub(crate) async fn set_up(
        &self,
        uid: &str,
        resolved: &ResolvedVolume,
        owner: Ownership,
        content: Option<Content>,
    ) -> Result<(), Problem> {
        let key = format!("{uid}/{}", resolved.volume);
        if let (Source::Disk { disk, .. }, true) = (&resolved.source, resolved.block) {
            return Ok(self
                .map_disk(&key, uid, &resolved.name, disk.clone())
                .await?);
        }
        let dir = self.volume_dir(uid, resolved)?;
        let done = match resolved.source.clone() {
            // The runtime mounts images, and drivers mount CSI volumes.
            Source::Image | Source::Csi(_) => Ok(()),
            Source::HostPath { kind, .. } if kind.is_empty() => Ok(()),
            Source::HostPath { kind, .. } => {
                self.calls
                    .call(&key, KERNEL_TIMEOUT, move || {
                        directory::check_host_path(&dir, &kind)
                    })
                    .await
            }
            Source::EmptyDir(medium) => {
                let mark = self.ready_mark(uid, resolved)?;
                let make = move |dir: &Path| directory::empty_dir(dir, &mark, &medium, owner.group);
                self.make_unless_cancelled(&key, dir, make).await
            }
            Source::Files { in_memory, .. } => {
                let volume = resolved.volume.clone();
                let make = move |dir: &Path| {
                    if in_memory {
                        directory::keep_in_memory(dir)?;
                    }
                    directory::write_files(dir, &volume, content, owner.group)
                };
                self.make_unless_cancelled(&key, dir, make).await
            }
            Source::Nfs { device } => {
                let resolved = resolved.clone();
                self.calls
                    .call_with(&key, KERNEL_TIMEOUT, move |call| {
                        device::nfs(&device, &dir, &resolved, call)
                    })
                    .await
            }
            Source::Disk {
                disk, filesystem, ..
            } => {
                let (staged, resolved) = (self.staged_disk(&disk)?, resolved.clone());
                let (given, ownership_changer) = (
                    staged.clone(),
                    self.ownership_changer(resolved.qualified_plugin()),
                );
                let own = dir.clone();
                let outcome = self
                    .calls
                    .call_with(&key, KERNEL_TIMEOUT, move |call| {
                        let to =
                            device::Target::new([&staged, &dir], owner, &ownership_changer, call);
                        device::remote(&disk, &filesystem, &resolved, &to)
                    })
                    .await;
                return self.with_ownership_progress(outcome, &[&given], &own, owner);
            }
            Source::Local {
                path, filesystem, ..
            } => {
                let (staged, resolved) = (self.staged(&resolved.name)?, resolved.clone());
                let ownership_changer = self.ownership_changer(resolved.qualified_plugin());
                let (given, source, own) = (staged.clone(), PathBuf::from(&path), dir.clone());
                let outcome = self
                    .calls
                    .call_with(&key, KERNEL_TIMEOUT, move |call| {
                        let to =
                            device::Target::new([&staged, &dir], owner, &ownership_changer, call);
                        device::local(Path::new(&path), &filesystem, &resolved, &to)
                    })
                    .await;
                return self.with_ownership_progress(outcome, &[&given, &source], &own, owner);
            }
        };
        Ok(done?)
    }

    /// Expands the filesystem of a local volume to the size of its device.
    pub(crate) async fn grow(&self, uid: &str, resolved: &ResolvedVolume) -> Result<(), HostError> {
        let Source::Local { path, .. } = &resolved.source else {
            return Ok(());
        };
        if resolved.block {
            return Ok(());
        }
        let (path, staged) = (PathBuf::from(path), self.staged(&resolved.name)?);
        let key = format!("{uid}/{}/size", resolved.volume);
        let grow = move |call: &Call| device::grow(&path, &staged, call);
        self.calls.call_with(&key, KERNEL_TIMEOUT, grow).await
    }

    /// Attaches a disk that a pod uses as a block device, under the volume's name.
    async fn map_disk(
        &self,
        key: &str,
        uid: &str,
        name: &str,
        disk: Box<Disk>,
    ) -> Result<(), HostError> {
        let place = self.mapped_disk(&disk)?;
        let list = self.pod_dir(uid)?.join("volumeDevices").join(disk.plugin());
        let (mark, link) = (place.join(segment(uid)?), list.join(segment(name)?));
        let map = move || disks::map(&disk, &place, [&mark, &link]);
        self.calls.call(key, KERNEL_TIMEOUT, map).await
    }

    /// Sets up a volume, and unmounts it if the call was cancelled meanwhile.
    async fn make_unless_cancelled(
        &self,
        key: &str,
        dir: PathBuf,
        make: impl FnOnce(&Path) -> Result<(), HostError> + Send + 'static,
    ) -> Result<(), HostError> {
        let work = move |call: &Call| {
            make(&dir)?;
            directory::undo_if_cancelled(&dir, call)
        };
        self.calls.call_with(key, KERNEL_TIMEOUT, work).await
    }

    pub(crate) async fn source(
        &self,
        uid: &str,
        resolved: &ResolvedVolume,
        place: &SubPath,
    ) -> Result<PathBuf, HostError> {
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
        let work = move |call: &Call| {
            let of = format!("for volumeMount {volume:?} of container {container:?}");
            // The pod's owner can read the error, which must not reveal
            // what exists on the machine. The log has the details.
            let hidden = |what: &str, error: HostError| {
                let message = format!("failed to {what} {of}");
                tracing::warn!(%error, volume, container, "{message}");
                error.as_text(|_| message)
            };
            let unprepared = |error: std::io::Error| hidden("prepare subPath", error.into());
            let base = beneath::Dir::open(&base).map_err(unprepared)?;
            let sub = Path::new(&sub);
            let found = match base.find(sub).map_err(unprepared)? {
                Some(found) => found,
                None => base
                    .find_or_make(sub)
                    .map_err(|error| hidden("create subPath directory", error.into()))?,
            };
            if call.is_cancelled() {
                return Err(
                    format!("volume {volume:?} is not mounted: its pod is terminating").into(),
                );
            }
            make(&places, 0o750)?;
            let target = places.join(index.to_string());
            device::bind_unless_cancelled(&found, &target, call, target.display().to_string())
                .map_err(|error| hidden("prepare subPath", error))?;
            Ok(target)
        };
        self.calls.call_with(&key, KERNEL_TIMEOUT, work).await
    }

    pub(crate) async fn read(
        &self,
        uid: &str,
        resolved: &ResolvedVolume,
        path: &str,
        limit: u64,
    ) -> Result<String, HostError> {
        let (dir, path) = (self.volume_dir(uid, resolved)?, PathBuf::from(path));
        blocking(move || {
            let dir = beneath::Dir::open(&dir).map_err(doing("the volume cannot be opened"))?;
            dir.read(&path, limit)
                .map_err(doing(format!("{} cannot be read", path.display())))
        })
        .await
    }
}
