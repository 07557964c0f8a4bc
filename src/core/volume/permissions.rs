//! Events about a volume whose ownership change to the pod's `fsGroup` takes long because it has many files
//! (`pkg/volume/volume_linux.go`). Pure.

use std::path::PathBuf;
use std::time::Duration;

/// Reason of the events.
pub const REASON: &str = "VolumePermissionChangeInProgress";

/// Time from the start to the first event.
const FIRST: Duration = Duration::from_secs(30);
/// Time between further events.
const EVERY: Duration = Duration::from_secs(60);

/// An ownership change in progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnershipChange {
    /// The directory whose files are changed recursively.
    pub root: PathBuf,
    /// Path of the volume relative to the directory of all pods, as events name it.
    pub display_path: String,
    /// Description of the progress.
    pub progress: String,
}

/// Time from the start to the next event, after the given number of events.
#[must_use]
pub fn due(events_emitted: u32) -> Duration {
    FIRST.saturating_add(EVERY.saturating_mul(events_emitted))
}

/// Message of the next event, after the given number of events and `files` processed files.
#[must_use]
pub fn message(display_path: &str, events_emitted: u32, files: u64) -> String {
    match events_emitted {
        0 => format!(
            "Setting volume ownership for {display_path} is taking longer than expected, consider using OnRootMismatch - https://kubernetes.io/docs/tasks/configure-pod-container/security-context/#configure-volume-permission-and-ownership-change-policy-for-pods"
        ),
        _ => format!("Setting volume ownership for {display_path}, processed {files} files."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_ownership_change_is_reported_after_half_a_minute_and_then_every_minute() {
        let display_path = "u/volumes/kubernetes.io~csi/pv/mount";
        let due: Vec<u64> = (0..3)
            .map(|events_emitted| due(events_emitted).as_secs())
            .collect();
        assert_eq!(due, [30, 90, 150]);
        let first = message(display_path, 0, 7);
        assert!(
            first.starts_with("Setting volume ownership for u/volumes/kubernetes.io~csi/pv/mount is taking longer than expected, consider using OnRootMismatch - https://kubernetes.io/docs/"),
            "{first}"
        );
        assert_eq!(
            message(display_path, 1, 7),
            "Setting volume ownership for u/volumes/kubernetes.io~csi/pv/mount, processed 7 files."
        );
    }
}
