//! Network disks (iSCSI, Fibre Channel): found through links in `/dev/disk`; sessions are managed with `iscsiadm`.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::staging_lock::StagingLock;
use crate::HostError;
use crate::linux::make;
use crate::tool::tool;
use holdfast_core::volume::disks::{Disk, Iscsi};
use holdfast_sys::failure::doing;
use holdfast_sys::{file, mount};

/// Maximum time until an attached disk appears.
const APPEARANCE: Duration = Duration::from_secs(30);
/// Exit code of `iscsiadm`: the session already exists.
const SESSION_EXISTS: i32 = 15;
/// Exit code of `iscsiadm`: no such session or record.
const NOTHING: i32 = 21;

/// The device of a disk, if the node has it. For a disk with several paths, the multipath device.
pub(crate) fn find(disk: &Disk) -> Option<PathBuf> {
    let mut links = vec![];
    for dir in ["by-path", "by-id"] {
        for entry in fs::read_dir(Path::new("/dev/disk").join(dir))
            .into_iter()
            .flatten()
            .flatten()
        {
            if entry
                .file_name()
                .to_str()
                .is_some_and(|name| disk.is_named(dir, name))
            {
                links.push(entry.path());
            }
        }
    }
    links.sort();
    let devices: Vec<PathBuf> = links
        .iter()
        .filter_map(|link| fs::canonicalize(link).ok())
        .collect();
    devices
        .iter()
        .find_map(|device| multipath_device(device))
        .or_else(|| devices.into_iter().next())
}

/// The multipath device that includes a disk.
fn multipath_device(device: &Path) -> Option<PathBuf> {
    let name = device.file_name()?;
    let all = fs::read_dir("/sys/block")
        .ok()?
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().starts_with("dm-"));
    let found = all
        .into_iter()
        .find(|e| e.path().join("slaves").join(name).exists())?;
    Some(Path::new("/dev").join(found.file_name()))
}

/// Attaches a disk to the node and returns its device.
pub(crate) fn attach(disk: &Disk) -> Result<PathBuf, HostError> {
    if let Some(device) = find(disk) {
        return Ok(device);
    }
    match disk {
        Disk::Iscsi(iscsi) => log_in(iscsi)?,
        Disk::Fc { .. } => rescan()?,
    }
    let begun = Instant::now();
    loop {
        match find(disk) {
            Some(device) => return Ok(device),
            None if begun.elapsed() > APPEARANCE => {
                return Err(format!(
                    "the disk does not appear below /dev/disk: {}",
                    disk.global_mount_path().last().cloned().unwrap_or_default()
                )
                .into());
            }
            None => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Logs in at all portals; fails only if all portals fail.
fn log_in(iscsi: &Iscsi) -> Result<(), HostError> {
    let mut failed = vec![];
    for portal in &iscsi.portals {
        match iscsi
            .login(portal)
            .iter()
            .try_for_each(|call| run_iscsiadm(call))
        {
            Ok(()) => {}
            Err(error) => failed.push(format!("portal {portal}: {error}")),
        }
    }
    if failed.len() == iscsi.portals.len() {
        Err(format!(
            "failed to attach iSCSI target {}: {}",
            iscsi.iqn,
            failed.join("; ")
        )
        .into())
    } else {
        Ok(())
    }
}

/// Runs `iscsiadm`. An existing session is no error. Errors contain no passwords.
fn run_iscsiadm(call: &[String]) -> Result<(), HostError> {
    let words: Vec<&str> = call.iter().map(String::as_str).collect();
    match tool("iscsiadm", &words)? {
        (0 | SESSION_EXISTS, _) => Ok(()),
        (code, output) => {
            let shown: Vec<&str> = words.iter().take_while(|w| **w != "-v").copied().collect();
            Err(format!("iscsiadm {} failed with {code}: {output}", shown.join(" ")).into())
        }
    }
}

/// Logs out at all portals. A missing session is no error.
fn log_out(iscsi: &Iscsi) -> Result<(), HostError> {
    for call in iscsi.portals.iter().flat_map(|portal| iscsi.logout(portal)) {
        let words: Vec<&str> = call.iter().map(String::as_str).collect();
        match tool("iscsiadm", &words)? {
            (0 | NOTHING, _) => {}
            (code, output) => {
                return Err(
                    format!("iscsiadm {} failed with {code}: {output}", words.join(" ")).into(),
                );
            }
        }
    }
    Ok(())
}

/// The file with the session of a disk. The disk is mounted over it, so the file is invisible meanwhile.
const SESSION: &str = "iscsi.json";

/// Records a disk's session before logging in.
pub(crate) fn record_session(disk: &Disk, place: &Path) -> Result<(), HostError> {
    let Disk::Iscsi(session) = disk else {
        return Ok(());
    };
    make(place, 0o750)?;
    let text = serde_json::to_vec(session)?;
    file::replace(&place.join(SESSION), &text).map_err(doing("recording the iSCSI session failed"))
}

/// Attaches a disk that a pod uses as a block device. `marks` are the links that record this use.
pub(crate) fn map(disk: &Disk, place: &Path, marks: [&Path; 2]) -> Result<(), HostError> {
    let _lock = StagingLock::lock_for_pod(place)?;
    record_session(disk, place)?;
    if let Disk::Iscsi(session) = disk {
        let device = Path::new("/dev/disk/by-path").join(
            session.link(
                session
                    .portals
                    .first()
                    .map(String::as_str)
                    .unwrap_or_default(),
            ),
        );
        for mark in marks {
            make(mark.parent().unwrap_or(mark), 0o750)?;
            match std::os::unix::fs::symlink(&device, mark) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                    return Err(doing(format!("{} cannot be created", mark.display()))(
                        error,
                    ));
                }
                _ => {}
            }
        }
    }
    attach(disk).map(|_| ())
}

/// Removes a pod's mark and returns whether it existed.
pub(crate) fn remove_mark(mark: &Path) -> Result<bool, HostError> {
    match fs::remove_file(mark) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(doing(format!("{} cannot be removed", mark.display()))(
            error,
        )),
    }
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .collect()
}

/// The directories of all iSCSI disks: mounted ones, and those that pods use as block devices.
pub(crate) fn places(iscsi: &Path) -> Vec<PathBuf> {
    let interfaces = entries(iscsi)
        .into_iter()
        .chain(entries(&iscsi.join("volumeDevices")));
    interfaces
        .filter(|i| {
            i.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("iface-"))
        })
        .flat_map(|i| entries(&i))
        .collect()
}

/// The directories of all disks, below the agent's root directory.
#[must_use]
pub fn all_places(root: &Path) -> Vec<PathBuf> {
    let plugins = root.join("plugins/kubernetes.io");
    let channel = plugins.join("fc");
    let devices = channel.join("volumeDevices");
    let of_channel = entries(&channel).into_iter().chain(entries(&devices));
    let of_channel = of_channel.filter(|place| *place != devices);
    of_channel.chain(places(&plugins.join("iscsi"))).collect()
}

/// Logs out of a disk that is not mounted, is no pod's block device, and is not being set up.
pub(crate) fn log_out_if_unused(place: &Path) -> Result<(), HostError> {
    let Some(_lock) = StagingLock::try_lock(place) else {
        return Ok(());
    };
    // A pod's mark is our link, or a mount that a kubelet has created there.
    let is_mark = |entry: &PathBuf| entry.is_symlink() || mount::is_mounted(entry).unwrap_or(true);
    let marked = || entries(place).iter().any(is_mark);
    if mount::is_mounted(place)? || marked() {
        return Ok(());
    }
    log_out_if_last(place)?;
    fs::remove_dir(place).map_err(doing(format!("{} cannot be removed", place.display())))
}

/// Logs out of a disk that no pod uses, unless another disk of the same target is in use or being set up.
pub(crate) fn log_out_if_last(place: &Path) -> Result<(), HostError> {
    let note = place.join(SESSION);
    let remove = || {
        let what = format!("{} cannot be removed", note.display());
        file::remove(&note).map_err(doing(what))
    };
    let what = format!("{} cannot be read", note.display());
    let session: Iscsi = match fs::read(&note) {
        Ok(text) => Iscsi::parse_session(&text).map_err(doing(&what))?,
        // A temporary file may remain after a crash or on a full disk.
        Err(error) if error.kind() == ErrorKind::NotFound => return remove(),
        Err(error) => return Err(doing(what)(error)),
    };
    let interface = place.parent().and_then(Path::file_name);
    let root = place
        .ancestors()
        .find(|p| p.ends_with("kubernetes.io/iscsi"))
        .unwrap_or(place);
    let of_target = |other: &PathBuf| {
        let named = other.file_name().is_some_and(|n| {
            n.to_string_lossy()
                .contains(&format!("-{}-lun-", session.iqn))
        });
        named && other != place && other.parent().and_then(Path::file_name) == interface
    };
    let table = mount::table()?;
    // Do not read the record below a mount, which may hang.
    let has_it =
        |other: &PathBuf| table.iter().any(|m| m.point == *other) || other.join(SESSION).exists();
    if !places(root)
        .iter()
        .any(|other| of_target(other) && has_it(other))
    {
        log_out(&session)?;
    }
    remove()
}

/// Makes all SCSI hosts of the node scan for new disks.
fn rescan() -> Result<(), HostError> {
    for host in fs::read_dir("/sys/class/scsi_host")
        .into_iter()
        .flatten()
        .flatten()
    {
        let file = host.path().join("scan");
        fs::write(&file, "- - -").map_err(doing(format!(
            "requesting a scan for new disks through {} failed",
            file.display()
        )))?;
    }
    Ok(())
}
