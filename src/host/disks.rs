//! Disks behind a network: found by their links, logged in to and out of with the tools of the system.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::linux::doing;
use super::tool::tool;
use crate::core::disks::{Disk, Iscsi};

/// How long a disk may take to appear once it is there.
const APPEARANCE: Duration = Duration::from_secs(30);
/// What `iscsiadm` says by its code: there is a session already.
const SESSION_EXISTS: i32 = 15;
/// No such session or record.
const NOTHING: i32 = 21;

/// The device of a disk, if the node has it: that of its paths together, where there are several.
pub(super) fn find(disk: &Disk) -> Option<PathBuf> {
    let mut links = vec![];
    for dir in ["by-path", "by-id"] {
        for entry in fs::read_dir(Path::new("/dev/disk").join(dir)).into_iter().flatten().flatten() {
            if entry.file_name().to_str().is_some_and(|name| disk.is_named(dir, name)) {
                links.push(entry.path());
            }
        }
    }
    links.sort();
    let devices: Vec<PathBuf> = links.iter().filter_map(|link| fs::canonicalize(link).ok()).collect();
    devices.iter().find_map(|device| together(device)).or_else(|| devices.into_iter().next())
}

/// The multipath device that a disk is a part of.
fn together(device: &Path) -> Option<PathBuf> {
    let name = device.file_name()?;
    let all = fs::read_dir("/sys/block").ok()?.flatten().filter(|e| e.file_name().to_string_lossy().starts_with("dm-"));
    let found = all.into_iter().find(|e| e.path().join("slaves").join(name).exists())?;
    Some(Path::new("/dev").join(found.file_name()))
}

/// Makes the node have a disk; the answer is its device.
pub(super) fn attach(disk: &Disk) -> Result<PathBuf, String> {
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
                return Err(format!("the disk does not appear below /dev/disk: {}", disk.place().last().cloned().unwrap_or_default()));
            }
            None => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Logs in at all portals; one that works is enough.
fn log_in(iscsi: &Iscsi) -> Result<(), String> {
    let mut failed = vec![];
    for portal in &iscsi.portals {
        match iscsi.login(portal).iter().try_for_each(|call| told(call)) {
            Ok(()) => {}
            Err(error) => failed.push(format!("portal {portal}: {error}")),
        }
    }
    if failed.len() == iscsi.portals.len() { Err(format!("failed to attach iSCSI target {}: {}", iscsi.iqn, failed.join("; "))) } else { Ok(()) }
}

/// One call; what is already so is fine. Passwords are not repeated.
fn told(call: &[String]) -> Result<(), String> {
    let words: Vec<&str> = call.iter().map(String::as_str).collect();
    match tool("iscsiadm", &words)? {
        (0 | SESSION_EXISTS, _) => Ok(()),
        (code, said) => {
            let shown: Vec<&str> = words.iter().take_while(|w| **w != "-v").copied().collect();
            Err(format!("iscsiadm {} failed with {code}: {said}", shown.join(" ")))
        }
    }
}

/// Logs out everywhere. A session that is gone is fine.
pub(super) fn log_out(iscsi: &Iscsi) -> Result<(), String> {
    for call in iscsi.portals.iter().flat_map(|portal| iscsi.logout(portal)) {
        let words: Vec<&str> = call.iter().map(String::as_str).collect();
        match tool("iscsiadm", &words)? {
            (0 | NOTHING, _) => {}
            (code, said) => return Err(format!("iscsiadm {} failed with {code}: {said}", words.join(" "))),
        }
    }
    Ok(())
}

/// Has all hosts of the node look for new disks.
fn rescan() -> Result<(), String> {
    for host in fs::read_dir("/sys/class/scsi_host").into_iter().flatten().flatten() {
        let file = host.path().join("scan");
        fs::write(&file, "- - -").map_err(doing(format!("{} cannot be asked to look for new disks", file.display())))?;
    }
    Ok(())
}
