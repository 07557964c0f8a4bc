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

    fn of_staging(&self, driver: &str, handle: &str) -> Result<PathBuf, String> {
        Ok(self.0.join("plugins/kubernetes.io/csi").join(segment(driver)?).join(digest::sha256(handle.as_bytes())))
    }

    /// Whether a pod has any.
    #[must_use]
    pub fn has(&self, uid: &str) -> bool {
        self.of_pod(uid).is_ok_and(|dir| dir.exists())
    }

    /// Makes the directory of a pod's volume and notes what it is for. The answer is where the driver mounts it: the
    /// driver makes that itself.
    pub fn prepare(&self, uid: &str, data: &VolumeData) -> Result<PathBuf, String> {
        let dir = self.of_pod(uid)?.join(segment(&data.spec_vol_id)?);
        make(&dir, 0o750)?;
        self.note(&dir, data)?;
        Ok(dir.join("mount"))
    }

    fn note(&self, dir: &Path, data: &VolumeData) -> Result<(), String> {
        let text = serde_json::to_vec(data).map_err(|e| e.to_string())?;
        file::replace(&dir.join(NOTE), &text).map_err(doing(format!("what {} is for cannot be noted", dir.display())))
    }

    /// Makes the directory in which a driver stages a volume for all pods.
    pub fn stage(&self, data: &VolumeData) -> Result<PathBuf, String> {
        let dir = self.of_staging(&data.driver_name, &data.volume_handle)?;
        let place = dir.join("globalmount");
        make(&place, 0o750)?;
        self.note(&dir, data)?;
        Ok(place)
    }

    /// Where a volume is staged, if it is.
    #[must_use]
    pub fn staged(&self, data: &VolumeData) -> Option<PathBuf> {
        let place = self.of_staging(&data.driver_name, &data.volume_handle).ok()?.join("globalmount");
        place.exists().then_some(place)
    }

    /// All volumes that were published here.
    #[must_use]
    pub fn published(&self) -> Vec<Published> {
        let pods = self.0.join("pods");
        let of = |uid: String| {
            let dir = pods.join(&uid).join("volumes").join(PLUGIN);
            let one = |name: String| {
                let place = dir.join(&name);
                let data = fs::read(place.join(NOTE)).ok().and_then(|text| serde_json::from_slice(&text).ok())?;
                Some(Published { uid: uid.clone(), name: name.clone(), target: place.join("mount"), data })
            };
            names(&dir).into_iter().filter_map(one).collect::<Vec<_>>()
        };
        names(&pods).into_iter().flat_map(of).collect()
    }

    /// Removes what is left of a volume that the driver has unpublished. What is still mounted is an error.
    pub fn forget(&self, volume: &Published) -> Result<(), String> {
        if mount::is_mounted(&volume.target).map_err(|e| e.to_string())? {
            return Err(format!("{} is still mounted, though its driver says that it is not", volume.target.display()));
        }
        let dir = self.of_pod(&volume.uid)?.join(segment(&volume.name)?);
        gone(fs::remove_dir(&volume.target), &volume.target)?;
        gone(fs::remove_file(dir.join(NOTE)), &dir)?;
        gone(fs::remove_dir(&dir), &dir)
    }

    /// The same for one that was unstaged.
    pub fn unstaged(&self, data: &VolumeData) -> Result<(), String> {
        let dir = self.of_staging(&data.driver_name, &data.volume_handle)?;
        let place = dir.join("globalmount");
        if mount::is_mounted(&place).map_err(|e| e.to_string())? {
            return Err(format!("{} is still mounted, though its driver says that it is not", place.display()));
        }
        gone(fs::remove_dir(&place), &place)?;
        gone(fs::remove_file(dir.join(NOTE)), &dir)?;
        gone(fs::remove_dir(&dir), &dir)
    }
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
        let target = dirs.prepare("u", &data).expect("prepared");
        assert!(target.ends_with("pods/u/volumes/kubernetes.io~csi/pv/mount") && !target.exists());
        assert_eq!(dirs.staged(&data), None);
        let staging = dirs.stage(&data).expect("staged");
        assert_eq!(dirs.staged(&data), Some(staging));
        let found = dirs.published();
        assert_eq!(found.iter().map(|p| (p.uid.as_str(), &p.data)).collect::<Vec<_>>(), [("u", &data)]);
        dirs.forget(&found[0]).expect("forgotten");
        dirs.unstaged(&data).expect("forgotten");
        dirs.unstaged(&data).expect("once more is fine");
        assert!(dirs.published().is_empty() && dirs.staged(&data).is_none());
        for bad in ["../x", "", ".."] {
            assert!(dirs.prepare(bad, &data).is_err(), "{bad:?}");
            assert!(dirs.stage(&VolumeData { driver_name: bad.into(), ..data.clone() }).is_err(), "{bad:?}");
        }
    }
}
