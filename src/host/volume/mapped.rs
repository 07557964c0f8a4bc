//! What a kubelet has made beside a pod's device, where the agent was exchanged while the pod ran: the device mounted over a
//! file that has the pod's uid, and a loop device on that, which keeps the device open (`MapBlockVolume` and
//! `UnmapBlockVolume` in the kubelet's `pkg/volume/util`). Neither goes by itself, and while they are there no driver can
//! take the device away.

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use nix::mount::MntFlags;

use crate::host::HostError;
use crate::sys::failure::doing;
use crate::sys::loop_device;
use crate::sys::mount::{self, Mount};

/// Whether a kubelet mounts devices of pods there: `…/volumeDevices/…`. What a driver has published or staged is its own to
/// undo.
pub(super) fn is_mapped(point: &Path) -> bool {
    let mut parts = point
        .iter()
        .skip_while(|part| *part != OsStr::new("volumeDevices"));
    let is_of_driver = |part: &OsStr| part == "publish" || part == "staging";
    parts.nth(1).is_some_and(|part| !is_of_driver(part))
}

/// Where a kubelet has mounted a pod's devices: `plugins/…/volumeDevices/…/<uid>`. `root` has no links.
pub(super) fn of_pod(root: &Path, uid: &str, table: &[Mount]) -> Vec<PathBuf> {
    let plugins = root.join("plugins");
    let points = table.iter().map(|m| &m.point);
    let of_pods = points.filter(|p| p.strip_prefix(&plugins).is_ok_and(is_mapped));
    of_pods
        .filter(|p| p.file_name() == Some(OsStr::new(uid)))
        .cloned()
        .collect()
}

/// Takes one of them away, the loop devices first.
pub(super) fn release(point: &Path) -> Result<(), HostError> {
    let failed = || {
        let point = point.display();
        doing(format!(
            "the loop device that a kubelet has made of {point} cannot be taken away"
        ))
    };
    for device in loop_device::of(point).map_err(failed())? {
        loop_device::detach(&device).map_err(failed())?;
    }
    mount::unmount(point, MntFlags::empty())?;
    if point.iter().any(|part| part == "iscsi") {
        // The file is the mark by which the end of the session knows the pod (`disks::unmark`).
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
        // Other pods have the device.
        Ok(()) | Err((ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty, _)) => Ok(()),
        Err((_, error)) => Err(doing(format!("{} cannot be removed", dir.display()))(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_kubelet_has_mapped_for_a_pod_is_told_from_what_drivers_have_to_undo() {
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
