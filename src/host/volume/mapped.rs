//! Mounts of a kubelet for a pod's block device, which remain if this agent replaces the kubelet while the pod
//! runs. The kubelet bind-mounts the device over a file named by the pod's uid, and attaches a loop device to
//! it, which keeps the device open. Both must be removed explicitly; until then no driver can detach the device.
//!
//! Upstream: `MapBlockVolume` and `UnmapBlockVolume` in `pkg/volume/util/operationexecutor/operation_generator.go`
//! and `pkg/volume/util/volumepathhandler/volume_path_handler_linux.go`.

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use nix::mount::MntFlags;

use crate::HostError;
use holdfast_sys::failure::doing;
use holdfast_sys::loop_device;
use holdfast_sys::mount::{self, Mount};

/// Whether a kubelet mounts block devices of pods at this path: `…/volumeDevices/…`.
/// Excludes paths that a driver publishes or stages and must remove itself.
pub(super) fn is_mapped(point: &Path) -> bool {
    let mut parts = point
        .iter()
        .skip_while(|part| *part != OsStr::new("volumeDevices"));
    let is_of_driver = |part: &OsStr| part == "publish" || part == "staging";
    parts.nth(1).is_some_and(|part| !is_of_driver(part))
}

/// The paths at which a kubelet has mounted a pod's block devices:
/// `plugins/…/volumeDevices/…/<uid>`. `root` must not contain symlinks.
pub(super) fn of_pod(root: &Path, uid: &str, table: &[Mount]) -> Vec<PathBuf> {
    let plugins = root.join("plugins");
    let points = table.iter().map(|m| &m.point);
    let of_pods = points.filter(|p| p.strip_prefix(&plugins).is_ok_and(is_mapped));
    of_pods
        .filter(|p| p.file_name() == Some(OsStr::new(uid)))
        .cloned()
        .collect()
}

/// Removes such a mount, after its loop devices.
pub(super) fn release(point: &Path) -> Result<(), HostError> {
    let failed = || {
        let point = point.display();
        doing(format!(
            "detaching the loop device that a kubelet created for {point} failed"
        ))
    };
    for device in loop_device::of(point).map_err(failed())? {
        loop_device::detach(&device).map_err(failed())?;
    }
    mount::unmount(point, MntFlags::empty())?;
    if point.iter().any(|part| part == "iscsi") {
        // The file is the mark by which session cleanup recognises the pod (`disks::remove_mark`).
        return Ok(());
    }
    match fs::remove_file(point) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(doing(format!("{} cannot be removed", point.display()))(
                error,
            ));
        }
        _ => {}
    }
    let dir = point.parent().unwrap_or(point);
    match fs::remove_dir(dir).map_err(|e| (e.kind(), e)) {
        // Other pods use the device.
        Ok(()) | Err((ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty, _)) => Ok(()),
        Err((_, error)) => Err(doing(format!("{} cannot be removed", dir.display()))(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_a_kubelet_are_distinguished_from_those_of_drivers() {
        let at = |point: &str| Mount {
            point: point.into(),
            device: "0:6".into(),
            kind: "devtmpfs".into(),
            source: "devtmpfs".into(),
            labels_files: false,
        };
        for (point, expected) in [
            (
                "/r/plugins/kubernetes.io~local-volume/volumeDevices/pv/u",
                true,
            ),
            ("/r/plugins/kubernetes.io/csi/volumeDevices/pv/dev/u", true),
            (
                "/r/plugins/kubernetes.io/iscsi/volumeDevices/iface-default/10.0.0.1:3260-iqn.x-lun-0/u",
                true,
            ),
            (
                "/r/plugins/kubernetes.io/csi/volumeDevices/publish/pv/u",
                false,
            ),
            (
                "/r/plugins/kubernetes.io/csi/volumeDevices/staging/u",
                false,
            ),
            (
                "/r/plugins/kubernetes.io/csi/volumeDevices/pv/dev/other",
                false,
            ),
            ("/r/plugins/kubernetes.io/local-volume/mounts/u", false),
            ("/r/pods/u/volumeDevices/kubernetes.io~csi/u", false),
            (
                "/other/plugins/kubernetes.io/csi/volumeDevices/pv/dev/u",
                false,
            ),
        ] {
            let found = of_pod(Path::new("/r"), "u", &[at(point)]);
            assert_eq!(!found.is_empty(), expected, "{point}");
        }
    }
}
