//! The directories of CSI volumes in the kubelet's layout: where a driver stages and publishes, and the
//! `vol_data.json` files next to it (`pkg/volume/csi/csi_mounter.go`, `csi_attacher.go`, `csi_block.go`).

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::KERNEL_TIMEOUT;
use crate::HostError;
use crate::linux::{LinuxHost, make, segment};
use holdfast_core::digest;
use holdfast_core::pod::Ownership;
use holdfast_core::volume::csi::VolumeData;
use holdfast_core::volume::resolved::Problem;
use holdfast_sys::blocking_calls::Call;
use holdfast_sys::failure::doing;
use holdfast_sys::{file, mount};

const PLUGIN: &str = "kubernetes.io~csi";
const RECORD_FILE: &str = "vol_data.json";

/// The CSI directories below the agent's root directory.
#[derive(Debug, Clone)]
pub struct CsiDirs(pub PathBuf);

/// A volume that was or is about to be published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// The uid of the pod.
    pub uid: String,
    /// The name of the volume's directory.
    pub name: String,
    /// The path at which the driver publishes the volume.
    pub target: PathBuf,
    /// The contents of `vol_data.json`.
    pub data: VolumeData,
    /// Whether the volume is a block device.
    pub block: bool,
    /// Namespace and name of the claim. `None` for a volume that an
    /// earlier process published, until the agent processes its pod.
    pub claim: Option<(String, String)>,
}

impl Published {
    /// The uid of the pod and the name of the directory.
    #[must_use]
    pub fn key(&self) -> (String, String) {
        (self.uid.clone(), self.name.clone())
    }
}

fn names(dir: &Path) -> Vec<String> {
    fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok())
        .collect()
}

fn ignore_missing(result: std::io::Result<()>, path: &Path) -> Result<(), HostError> {
    match result {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(doing(format!(
            "{} cannot be removed",
            path.display()
        ))(error)),
        _ => Ok(()),
    }
}

/// The directories of a pod's volumes that have a `vol_data.json`. Their drivers must unmount what is below.
pub(super) fn recorded_in(pod: &Path) -> Vec<PathBuf> {
    let dir = pod.join("volumes").join(PLUGIN);
    let is_recorded = |place: &PathBuf| {
        let text = fs::read(place.join(RECORD_FILE)).unwrap_or_default();
        serde_json::from_slice::<VolumeData>(&text).is_ok()
    };
    let places = names(&dir).into_iter().map(|name| dir.join(name));
    places.filter(is_recorded).collect()
}

impl CsiDirs {
    fn of_pod(&self, uid: &str) -> Result<PathBuf, HostError> {
        Ok(self
            .0
            .join("pods")
            .join(segment(uid)?)
            .join("volumes")
            .join(PLUGIN))
    }

    /// The directory with the links to a pod's block devices.
    fn devices_of(&self, uid: &str) -> Result<PathBuf, HostError> {
        Ok(self
            .0
            .join("pods")
            .join(segment(uid)?)
            .join("volumeDevices")
            .join(PLUGIN))
    }

    fn devices(&self) -> PathBuf {
        self.0.join("plugins/kubernetes.io/csi/volumeDevices")
    }

    /// The path at which a driver publishes a block device for a pod.
    pub fn device(&self, uid: &str, name: &str) -> Result<PathBuf, HostError> {
        Ok(self
            .devices()
            .join("publish")
            .join(segment(name)?)
            .join(segment(uid)?))
    }

    fn of_staging(&self, data: &VolumeData, block: bool) -> Result<(PathBuf, PathBuf), HostError> {
        if block {
            let name = segment(&data.spec_vol_id)?;
            return Ok((
                self.devices().join(name).join("data"),
                self.devices().join("staging").join(name),
            ));
        }
        let driver = self
            .0
            .join("plugins/kubernetes.io/csi")
            .join(segment(&data.driver_name)?);
        let dir = driver.join(digest::sha256(data.volume_handle.as_bytes()));
        Ok((dir.clone(), dir.join("globalmount")))
    }

    /// The paths of a pod's volume. Changes nothing.
    pub fn place(
        &self,
        uid: &str,
        data: VolumeData,
        block: bool,
        claim: Option<(String, String)>,
    ) -> Result<Published, HostError> {
        let name = segment(&data.spec_vol_id)?.to_owned();
        let target = if block {
            self.device(uid, &name)?
        } else {
            self.of_pod(uid)?.join(&name).join("mount")
        };
        Ok(Published {
            uid: uid.to_owned(),
            name,
            target,
            data,
            block,
            claim,
        })
    }

    /// Creates the directory of a pod's volume and writes its `vol_data.json`. The driver creates the target itself.
    pub fn prepare(&self, volume: &Published) -> Result<(), HostError> {
        let target = &volume.target;
        let parent = target.parent().unwrap_or(target);
        if !volume.block {
            return self.record(parent, &volume.data);
        }
        make(parent, 0o750)?;
        let (note, _) = self.of_staging(&volume.data, true)?;
        self.record(&note, &volume.data)?;
        let list = self.devices_of(&volume.uid)?;
        make(&list, 0o750)?;
        match std::os::unix::fs::symlink(target, list.join(&volume.name)) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                let what = format!("recording the device of {} failed", volume.name);
                Err(doing(what)(error))
            }
            _ => Ok(()),
        }
    }

    fn record(&self, dir: &Path, data: &VolumeData) -> Result<(), HostError> {
        make(dir, 0o750)?;
        let text = serde_json::to_vec(data)?;
        // Called at each refresh, so write only changes.
        if fs::read(dir.join(RECORD_FILE)).is_ok_and(|there| there == text) {
            return Ok(());
        }
        file::replace(&dir.join(RECORD_FILE), &text).map_err(doing(format!(
            "writing the volume data in {} failed",
            dir.display()
        )))
    }

    /// Creates the directory in which a driver stages a volume for all pods, and returns it.
    pub fn stage(&self, volume: &Published) -> Result<PathBuf, HostError> {
        let (dir, place) = self.of_staging(&volume.data, volume.block)?;
        make(&place, 0o750)?;
        self.record(&dir, &volume.data)?;
        Ok(place)
    }

    /// Whether a volume has a record on disk, so that its driver may know it.
    #[must_use]
    pub fn is_recorded(&self, volume: &Published) -> bool {
        if volume.block {
            return self
                .devices_of(&volume.uid)
                .is_ok_and(|dir| dir.join(&volume.name).is_symlink());
        }
        volume
            .target
            .parent()
            .is_some_and(|dir| dir.join(RECORD_FILE).exists())
    }

    /// The staging path of a volume, if it may be staged. Does not access the mount, which may hang.
    #[must_use]
    pub fn staged(&self, volume: &Published) -> Option<PathBuf> {
        let (dir, place) = self.of_staging(&volume.data, volume.block).ok()?;
        let mark = if volume.block {
            place.clone()
        } else {
            dir.join(RECORD_FILE)
        };
        mark.exists().then_some(place)
    }

    /// The number of pods' volumes on disk, and the number of CSI
    /// volumes among them without a readable `vol_data.json`.
    #[must_use]
    pub fn count(&self) -> (u64, u64) {
        let pods = names(&self.0.join("pods"));
        pods.iter().fold((0, 0), |(volumes, unknown), uid| {
            let (own, own_unknown) = self.count_of(uid);
            (volumes + own, unknown + own_unknown)
        })
    }

    /// Like [`CsiDirs::count`], for a single pod.
    #[must_use]
    pub(crate) fn count_of(&self, uid: &str) -> (u64, u64) {
        let (mut volumes, mut unknown) = (0, 0);
        let Ok(uid) = segment(uid) else {
            return (0, 0);
        };
        let dir = self.0.join("pods").join(uid);
        for plugin in names(&dir.join("volumes")) {
            let of_plugin = dir.join("volumes").join(&plugin);
            for name in names(&of_plugin) {
                let note = || -> Option<VolumeData> {
                    let text = fs::read(of_plugin.join(&name).join(RECORD_FILE)).ok()?;
                    serde_json::from_slice(&text).ok()
                };
                volumes += 1;
                unknown += u64::from(plugin == PLUGIN && note().is_none());
            }
        }
        for plugin in names(&dir.join("volumeDevices")) {
            volumes += names(&dir.join("volumeDevices").join(plugin)).len() as u64;
        }
        (volumes, unknown)
    }

    /// All volumes with a record of being published.
    #[must_use]
    pub fn published(&self) -> Vec<Published> {
        let read = |note: PathBuf| -> Option<VolumeData> {
            serde_json::from_slice(&fs::read(note).ok()?).ok()
        };
        let mut all = vec![];
        for uid in names(&self.0.join("pods")) {
            let (Ok(dir), Ok(devices)) = (self.of_pod(&uid), self.devices_of(&uid)) else {
                continue;
            };
            for name in names(&dir) {
                let place = dir.join(&name);
                if let Some(data) = read(place.join(RECORD_FILE)) {
                    all.push(Published {
                        uid: uid.clone(),
                        name,
                        target: place.join("mount"),
                        data,
                        block: false,
                        claim: None,
                    });
                }
            }
            for name in names(&devices) {
                let (data, target) = (
                    read(self.devices().join(&name).join("data").join(RECORD_FILE)),
                    self.device(&uid, &name),
                );
                if let (Some(data), Ok(target)) = (data, target) {
                    all.push(Published {
                        uid: uid.clone(),
                        name,
                        target,
                        data,
                        block: true,
                        claim: None,
                    });
                }
            }
        }
        all
    }

    /// All volumes with a record of being staged, without pods.
    #[must_use]
    pub fn staged_volumes(&self) -> Vec<Published> {
        let drivers = self.0.join("plugins/kubernetes.io/csi");
        let mut notes = vec![];
        for driver in names(&drivers) {
            let dirs = names(&drivers.join(&driver)).into_iter();
            let block = driver == "volumeDevices";
            notes.extend(dirs.map(|dir| match block {
                true => (drivers.join(&driver).join(dir).join("data"), true),
                false => (drivers.join(&driver).join(dir), false),
            }));
        }
        let read = |(dir, block): (PathBuf, bool)| {
            let data: VolumeData =
                serde_json::from_slice(&fs::read(dir.join(RECORD_FILE)).ok()?).ok()?;
            let volume = self.place("none", data, block, None).ok()?;
            self.staged(&volume).is_some().then_some(volume)
        };
        notes.into_iter().filter_map(read).collect()
    }

    /// Removes the directories and the record of an unpublished volume. A remaining
    /// mount is an error. `is_last` means that no other pod uses the volume.
    pub fn forget(&self, volume: &Published, is_last: bool) -> Result<(), HostError> {
        require_unmounted(&volume.target)?;
        if volume.block {
            let name = segment(&volume.name)?;
            let link = self.devices_of(&volume.uid)?.join(name);
            ignore_missing(fs::remove_file(&volume.target), &volume.target)?;
            ignore_missing(fs::remove_file(&link), &link)?;
            return match is_last {
                true => self.forget_device(&volume.data, name),
                false => Ok(()),
            };
        }
        let dir = self.of_pod(&volume.uid)?.join(segment(&volume.name)?);
        ignore_missing(fs::remove_dir(&volume.target), &volume.target)?;
        ignore_missing(file::remove(&dir.join(RECORD_FILE)), &dir)?;
        ignore_missing(fs::remove_dir(&dir), &dir)
    }

    /// Removes the shared directories of a block device.
    fn forget_device(&self, data: &VolumeData, name: &str) -> Result<(), HostError> {
        let (note, _) = self.of_staging(data, true)?;
        ignore_missing(file::remove(&note.join(RECORD_FILE)), &note)?;
        let of_volume = self.devices().join(name);
        let published = self.devices().join("publish").join(name);
        for dir in [note, of_volume, published] {
            // Keep directories that contain files of the driver.
            match fs::remove_dir(&dir) {
                Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {}
                removed => ignore_missing(removed, &dir)?,
            }
        }
        Ok(())
    }

    /// Removes the directories and the record of an unstaged volume that no other pod uses.
    pub fn unstaged(&self, volume: &Published) -> Result<(), HostError> {
        let (dir, place) = self.of_staging(&volume.data, volume.block)?;
        require_unmounted(&place)?;
        ignore_missing(fs::remove_dir(&place), &place)?;
        if volume.block {
            // The record is removed with the pod's link; until then it identifies the volume.
            return Ok(());
        }
        ignore_missing(file::remove(&dir.join(RECORD_FILE)), &dir)?;
        ignore_missing(fs::remove_dir(&dir), &dir)
    }
}

fn require_unmounted(path: &Path) -> Result<(), HostError> {
    if mount::is_mounted(path)? {
        return Err(format!(
            "{} is still mounted, although its driver reports success",
            path.display()
        )
        .into());
    }
    Ok(())
}

/// Whether there is a mount at a path.
pub fn is_mounted(target: &Path) -> Result<bool, HostError> {
    Ok(mount::is_mounted(target)?)
}

/// Whether files of a mounted volume can have individual SELinux labels.
pub fn labels_files(target: &Path) -> Result<bool, HostError> {
    Ok(mount::labels_files(target)?)
}

impl LinuxHost {
    /// Changes the group ownership of a published volume. For a large volume, the work
    /// continues in the background and the returned problem contains the progress.
    pub(crate) async fn change_ownership(
        &self,
        volume: &Published,
        owner: Ownership,
    ) -> Result<(), Problem> {
        let Some(group) = owner.group else {
            return Ok(());
        };
        let key = format!("{}/{}/published", segment(&volume.uid)?, volume.name);
        let target = volume.target.clone();
        let ownership_changer =
            self.ownership_changer(format!("kubernetes.io/csi:{}", volume.data.driver_name));
        let change = move |call: &Call| {
            ownership_changer
                .change(&target, (group, owner), false, call)
                .map_err(doing("the volume's group cannot be set"))
                .map_err(Problem::from)
        };
        let outcome = self.calls.call_with(&key, KERNEL_TIMEOUT, change).await;
        self.with_ownership_progress(outcome, &[&volume.target], &volume.target, owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_sys::ownership;

    #[test]
    fn recorded_volumes_are_found_after_a_restart_and_removed_completely() {
        let root = tempfile::tempdir().expect("a directory");
        let dirs = CsiDirs(root.path().into());
        let data = VolumeData {
            spec_vol_id: "pv".into(),
            volume_handle: "../h".into(),
            driver_name: "d.example".into(),
            ..VolumeData::default()
        };
        assert!(dirs.published().is_empty());
        let volume = dirs.place("u", data.clone(), false, None).expect("a place");
        assert!(
            volume
                .target
                .ends_with("pods/u/volumes/kubernetes.io~csi/pv/mount")
        );
        dirs.prepare(&volume).expect("prepared");
        assert!(!volume.target.exists(), "the driver creates the target");
        let found = dirs.published();
        assert_eq!(found, [volume]);
        assert_eq!(dirs.staged(&found[0]), None);
        let staging = dirs.stage(&found[0]).expect("staged");
        assert_eq!(dirs.staged(&found[0]).as_ref(), Some(&staging));
        let recorded = [&staging, &found[0].target].map(|of| of.parent().expect("a directory"));
        for dir in recorded {
            // A temporary file, left when a disk was full.
            fs::write(dir.join(format!("{RECORD_FILE}.new")), b"{").expect("written");
        }
        dirs.unstaged(&found[0]).expect("forgotten");
        dirs.unstaged(&found[0]).expect("a repetition succeeds");
        dirs.forget(&found[0], true).expect("forgotten");
        assert!(dirs.published().is_empty() && dirs.staged(&found[0]).is_none());
        assert!(!recorded.iter().any(|dir| dir.exists()));
        let device = dirs.place("u", data.clone(), true, None).expect("a place");
        dirs.prepare(&device).expect("prepared");
        assert!(device.target.ends_with("volumeDevices/publish/pv/u") && !device.target.exists());
        let other = dirs.place("w", data.clone(), true, None).expect("a place");
        dirs.prepare(&other).expect("prepared");
        dirs.stage(&other).expect("staged");
        assert_eq!(dirs.published().len(), 2);
        // Shared directories are removed with the last pod.
        dirs.forget(&device, false).expect("forgotten");
        assert_eq!(dirs.published(), std::slice::from_ref(&other));
        dirs.unstaged(&other).expect("forgotten");
        dirs.forget(&other, true).expect("forgotten");
        dirs.forget(&other, true).expect("a repetition succeeds");
        assert!(dirs.published().is_empty());
        let left: Vec<_> = ["", "staging", "publish"]
            .iter()
            .flat_map(|dir| names(&dirs.devices().join(dir)))
            .filter(|name| !["staging", "publish"].contains(&name.as_str()))
            .collect();
        assert!(left.is_empty(), "{left:?}");
        for bad in ["../x", "", ".."] {
            assert!(
                dirs.place(bad, data.clone(), false, None).is_err(),
                "{bad:?}"
            );
            assert!(
                dirs.place(
                    "u",
                    VolumeData {
                        spec_vol_id: bad.into(),
                        ..data.clone()
                    },
                    true,
                    None
                )
                .is_err(),
                "{bad:?}"
            );
            let place = dirs
                .place(
                    "u",
                    VolumeData {
                        driver_name: bad.into(),
                        ..data.clone()
                    },
                    false,
                    None,
                )
                .expect("a place");
            assert!(dirs.stage(&place).is_err(), "{bad:?}");
        }
    }

    /// The volumes whose ownership was changed, and whether it failed.
    type Reports = std::sync::Arc<std::sync::Mutex<Vec<(String, bool)>>>;

    fn reported_by(host: &mut LinuxHost) -> Reports {
        let reports = Reports::default();
        let sender = std::sync::Arc::clone(&reports);
        host.on_ownership_change = Some(std::sync::Arc::new(move |plugin: &str, _, has_failed| {
            let mut reports = sender.lock().expect("a lock");
            reports.push((plugin.to_owned(), has_failed));
        }));
        reports
    }

    #[tokio::test(start_paused = true)]
    async fn changing_the_group_of_a_large_volume_is_reported_and_cancelled_with_its_pod() {
        use crate::volume::tear_down::tests::{host, of_a_program};

        if crate::skip::needs_root() {
            return;
        }
        let root = tempfile::tempdir().expect("a directory");
        let mut host = host(root.path());
        let reports = reported_by(&mut host);
        let dirs = CsiDirs(host.root.clone());
        let data = VolumeData {
            spec_vol_id: "pv".into(),
            ..VolumeData::default()
        };
        let volume = dirs.place("u", data, false, None).expect("a place");
        // Reading this directory never returns.
        let slow = volume.target.join("slow");
        let Some((answers, held)) = of_a_program(&slow) else {
            return crate::skip::skipped("this machine has no FUSE");
        };
        let owner = Ownership {
            group: Some(4242),
            ..Ownership::default()
        };
        let target = volume.target.clone();
        // While a blocking thread of tokio runs, the paused clock does not
        // advance, so the call cannot time out before the walk has started.
        let begun = tokio::task::spawn_blocking(move || {
            let since = std::time::Instant::now();
            while ownership::progress(&target).is_none() && since.elapsed().as_secs() < 60 {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        let (first, begun) = tokio::join!(host.change_ownership(&volume, owner), begun);
        begun.expect("the change has begun");
        for outcome in [first, host.change_ownership(&volume, owner).await] {
            let problem = outcome.expect_err("the change is in progress");
            assert_eq!(problem.reason(), "VolumePermissionChangeInProgress");
            assert!(
                problem.to_string().contains("group 4242: 0 so far"),
                "{problem}"
            );
            let Problem::Permissions(giving) = problem else {
                panic!("{problem}");
            };
            assert_eq!(giving.display_path, "u/volumes/kubernetes.io~csi/pv/mount");
            assert_eq!(giving.root, volume.target);
        }
        assert_eq!(host.calls.pending(), 1, "the change is started only once");
        // Pod termination cancels the work and waits only for a limited time.
        let unbound = host.unbind_sub_paths("u").await;
        drop((answers, held));
        mount::unmount(&slow, nix::mount::MntFlags::MNT_DETACH).expect("unmounted");
        assert_eq!(unbound, Ok(()));
        tokio::time::resume();
        let ended = host
            .calls
            .cancel("u/", std::time::Duration::from_secs(60))
            .await;
        assert_eq!(ended, Ok(()));
        let reports = reports.lock().expect("a lock").clone();
        assert_eq!(reports, [("kubernetes.io/csi:".to_owned(), true)]);
        use std::os::unix::fs::MetadataExt as _;
        let root = fs::metadata(&volume.target).expect("stat");
        assert_ne!(root.gid(), 4242, "the root directory is changed last");
    }
}
