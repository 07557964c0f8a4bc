//! What is told of a volume while it is given to its pod's group, which takes long where it has many files (upstream's
//! `pkg/volume/volume_linux.go`). Pure.

use std::path::PathBuf;
use std::time::Duration;

/// The reason of the events.
pub const REASON: &str = "VolumePermissionChangeInProgress";

/// The first event comes so long after the beginning,
const FIRST: Duration = Duration::from_secs(30);
/// and each further one so long after the one before it.
const EVERY: Duration = Duration::from_secs(60);

/// A volume that is being given to its pod's group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Giving {
    /// The directory whose files are given, all of them.
    pub root: PathBuf,
    /// The volume's directory below those of all pods, as events name it.
    pub shown: String,
    /// What it has come to.
    pub progress: String,
}

/// How long after the beginning the event is due that follows on so many.
#[must_use]
pub fn due(told: u32) -> Duration {
    FIRST.saturating_add(EVERY.saturating_mul(told))
}

/// The words of the event that follows on so many, when so many `files` have been given.
#[must_use]
pub fn message(shown: &str, told: u32, files: u64) -> String {
    match told {
        0 => format!(
            "Setting volume ownership for {shown} is taking longer than expected, consider using OnRootMismatch - https://kubernetes.io/docs/tasks/configure-pod-container/security-context/#configure-volume-permission-and-ownership-change-policy-for-pods"
        ),
        _ => format!("Setting volume ownership for {shown}, processed {files} files."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_told_after_half_a_minute_and_then_every_minute() {
        let shown = "u/volumes/kubernetes.io~csi/pv/mount";
        let due: Vec<u64> = (0..3).map(|told| due(told).as_secs()).collect();
        assert_eq!(due, [30, 90, 150]);
        let first = message(shown, 0, 7);
        assert!(
            first.starts_with("Setting volume ownership for u/volumes/kubernetes.io~csi/pv/mount is taking longer than expected, consider using OnRootMismatch - https://kubernetes.io/docs/"),
            "{first}"
        );
        assert_eq!(
            message(shown, 1, 7),
            "Setting volume ownership for u/volumes/kubernetes.io~csi/pv/mount, processed 7 files."
        );
    }
}
