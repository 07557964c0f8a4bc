//! The directories of CSI volumes, in the kubelet's layout: where a driver stages and publishes, and what is noted
//! beside it (kubelet spec, 9.5).

use std::fs;
use std::path::{Path, PathBuf};

use super::linux::{doing, make, segment};
use crate::core::csi::VolumeData;
use crate::sys::{digest, file, mount, ownership};

const PLUGIN: &str = "kubernetes.io~csi";
const NOTE: &str = "vol_data.json";

/// The directories below the agent's root directory.
#[derive(Debug, Clone)]
pub struct CsiDirs(pub PathBuf);

/// A volume that was published, or was about to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// The pod.
    pub uid: String,
    /// The name of its directory.
    pub name: String,
    /// Where the driver mounts it.
    pub target: PathBuf,
    /// What was noted.
    pub data: VolumeData,
    /// Whether it is a device.
    pub block: bool,
}

fn names(dir: &Path) -> Vec<String> {
    fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|e| e.file_name().into_string().ok()).collect()
}

fn gone(result: std::io::Result<()>, path: &Path) -> Result<(), String> {
    match result {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(format!("{} cannot be removed: {error}", path.display())),
        _ => Ok(()),
    }
}

impl CsiDirs {
    fn of_pod(&self, uid: &str) -> Result<PathBuf, String> {
        Ok(self.0.join("pods").join(segment(uid)?).join("volumes").join(PLUGIN))
    }

    /// Where the devices of a pod are listed.
    fn devices_of(&self, uid: &str) -> Result<PathBuf, String> {
        Ok(self.0.join("pods").join(segment(uid)?).join("volumeDevices").join(PLUGIN))
    }

    fn devices(&self) -> PathBuf {
        self.0.join("plugins/kubernetes.io/csi/volumeDevices")
    }

    /// Where a driver publishes a device for a pod.
    pub fn device(&self, uid: &str, name: &str) -> Result<PathBuf, String> {
        Ok(self.devices().join("publish").join(segment(name)?).join(segment(uid)?))
    }

    fn of_staging(&self, data: &VolumeData, block: bool) -> Result<(PathBuf, PathBuf), String> {
        if block {
            let name = segment(&data.spec_vol_id)?;
            return Ok((self.devices().join(name).join("data"), self.devices().join("staging").join(name)));
        }
        let driver = self.0.join("plugins/kubernetes.io/csi").join(segment(&data.driver_name)?);
        let dir = driver.join(digest::sha256(data.volume_handle.as_bytes()));
        Ok((dir.clone(), dir.join("globalmount")))
    }

    /// Whether a pod has any.
    #[must_use]
    pub fn has(&self, uid: &str) -> bool {
        [self.of_pod(uid), self.devices_of(uid)].into_iter().flatten().any(|dir| dir.exists())
    }

    /// Makes the directory of a pod's volume and notes what it is for. The answer is where the driver mounts it: the
    /// driver makes that itself.
    pub fn prepare(&self, uid: &str, data: &VolumeData, block: bool) -> Result<PathBuf, String> {
        if block {
            let target = self.device(uid, &data.spec_vol_id)?;
            make(target.parent().unwrap_or(&target), 0o750)?;
            let (note, _) = self.of_staging(data, true)?;
            self.note(&note, data)?;
            let list = self.devices_of(uid)?;
            make(&list, 0o750)?;
            return match std::os::unix::fs::symlink(&target, list.join(&data.spec_vol_id)) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    Err(format!("the device of {} cannot be noted: {error}", data.spec_vol_id))
                }
                _ => Ok(target),
            };
        }
        let dir = self.of_pod(uid)?.join(segment(&data.spec_vol_id)?);
        self.note(&dir, data)?;
        Ok(dir.join("mount"))
    }

    fn note(&self, dir: &Path, data: &VolumeData) -> Result<(), String> {
        make(dir, 0o750)?;
        let text = serde_json::to_vec(data).map_err(|e| e.to_string())?;
        file::replace(&dir.join(NOTE), &text).map_err(doing(format!("what {} is for cannot be noted", dir.display())))
    }

    /// Makes the directory in which a driver stages a volume for all pods.
    pub fn stage(&self, data: &VolumeData, block: bool) -> Result<PathBuf, String> {
        let (dir, place) = self.of_staging(data, block)?;
        make(&place, 0o750)?;
        self.note(&dir, data)?;
        Ok(place)
    }

    /// Where a volume is staged, if it is.
    #[must_use]
    pub fn staged(&self, volume: &Published) -> Option<PathBuf> {
        let (_, place) = self.of_staging(&volume.data, volume.block).ok()?;
        place.exists().then_some(place)
    }

    /// All volumes that were published here.
    #[must_use]
    pub fn published(&self) -> Vec<Published> {
        let read = |note: PathBuf| -> Option<VolumeData> { serde_json::from_slice(&fs::read(note).ok()?).ok() };
        let mut all = vec![];
        for uid in names(&self.0.join("pods")) {
            let (Ok(dir), Ok(devices)) = (self.of_pod(&uid), self.devices_of(&uid)) else { continue };
            for name in names(&dir) {
                let place = dir.join(&name);
                if let Some(data) = read(place.join(NOTE)) {
                    all.push(Published { uid: uid.clone(), name, target: place.join("mount"), data, block: false });
                }
            }
            for name in names(&devices) {
                let (data, target) = (read(self.devices().join(&name).join("data").join(NOTE)), self.device(&uid, &name));
                if let (Some(data), Ok(target)) = (data, target) {
                    all.push(Published { uid: uid.clone(), name, target, data, block: true });
                }
            }
        }
        all
    }

    /// Removes what is left of a volume that the driver has unpublished. What is still mounted is an error.
    pub fn forget(&self, volume: &Published) -> Result<(), String> {
        still(&volume.target)?;
        if volume.block {
            let link = self.devices_of(&volume.uid)?.join(segment(&volume.name)?);
            gone(fs::remove_file(&volume.target), &volume.target)?;
            return gone(fs::remove_file(&link), &link);
        }
        let dir = self.of_pod(&volume.uid)?.join(segment(&volume.name)?);
        gone(fs::remove_dir(&volume.target), &volume.target)?;
        gone(fs::remove_file(dir.join(NOTE)), &dir)?;
        gone(fs::remove_dir(&dir), &dir)
    }

    /// The same for one that was unstaged, and that no other pod has.
    pub fn unstaged(&self, volume: &Published) -> Result<(), String> {
        let (dir, place) = self.of_staging(&volume.data, volume.block)?;
        still(&place)?;
        gone(fs::remove_dir(&place), &place)?;
        if volume.block {
            // The note goes with the pod's own link: until then it is what the volume is known by.
            return Ok(());
        }
        gone(fs::remove_file(dir.join(NOTE)), &dir)?;
        gone(fs::remove_dir(&dir), &dir)
    }
}

fn still(path: &Path) -> Result<(), String> {
    if mount::is_mounted(path).map_err(|e| e.to_string())? {
        return Err(format!("{} is still mounted, though its driver says that it is not", path.display()));
    }
    Ok(())
}

/// Whether a volume is mounted.
pub fn is_mounted(target: &Path) -> Result<bool, String> {
    mount::is_mounted(target).map_err(|e| e.to_string())
}

/// Gives a published volume to its pod's group.
pub fn give(target: &Path, group: u32, on_mismatch: bool) -> Result<(), String> {
    ownership::set_group(target, group, on_mismatch, false).map_err(doing("the volume's group cannot be set"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_is_found_again_and_leaves_nothing() {
        let root = tempfile::tempdir().expect("a directory");
        let dirs = CsiDirs(root.path().into());
        let data = VolumeData { spec_vol_id: "pv".into(), volume_handle: "../h".into(), driver_name: "d.example".into(), ..VolumeData::default() };
        assert!(!dirs.has("u") && dirs.published().is_empty());
        let target = dirs.prepare("u", &data, false).expect("prepared");
        assert!(target.ends_with("pods/u/volumes/kubernetes.io~csi/pv/mount") && !target.exists());
        let found = dirs.published();
        assert_eq!(dirs.staged(&found[0]), None);
        let staging = dirs.stage(&data, false).expect("staged");
        assert_eq!(dirs.staged(&found[0]), Some(staging));
        assert_eq!(found.iter().map(|p| (p.uid.as_str(), &p.data)).collect::<Vec<_>>(), [("u", &data)]);
        dirs.unstaged(&found[0]).expect("forgotten");
        dirs.unstaged(&found[0]).expect("once more is fine");
        dirs.forget(&found[0]).expect("forgotten");
        assert!(dirs.published().is_empty() && dirs.staged(&found[0]).is_none());
        let device = dirs.prepare("u", &data, true).expect("prepared");
        assert!(device.ends_with("volumeDevices/publish/pv/u") && !device.exists());
        let found = dirs.published();
        assert_eq!(found.iter().map(|p| (&p.target, p.block)).collect::<Vec<_>>(), [(&device, true)]);
        dirs.forget(&found[0]).expect("forgotten");
        assert!(dirs.published().is_empty());
        for bad in ["../x", "", ".."] {
            assert!(dirs.prepare(bad, &data, false).is_err(), "{bad:?}");
            assert!(dirs.stage(&VolumeData { driver_name: bad.into(), ..data.clone() }, false).is_err(), "{bad:?}");
        }
    }
}
