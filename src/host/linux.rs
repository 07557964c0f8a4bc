//! The real machine: the root directory, cgroups, and what calls and volumes on it are doing. `pod_host` and `volume` act on
//! it for pods.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::cgroups::Cgroups;
use super::{HostError, OrphanedVolumes};
use holdfast_core::pod::users::{LENGTH, Pool};
use holdfast_sys::blocking_calls::BlockingCalls;
use holdfast_sys::failure::doing;
use holdfast_sys::removal;

/// The machine.
pub struct LinuxHost {
    /// The root directory, for instance `/var/lib/kubelet`.
    pub root: PathBuf,
    /// The directory of pod logs.
    pub logs: PathBuf,
    /// The cgroups of pods.
    pub cgroups: Cgroups,
    /// The limit of processes per pod.
    pub pids: Option<i64>,
    /// The period of CPU quotas in microseconds; `None` if quotas are not enforced.
    pub cpu_period: Option<u64>,
    /// Whether memory requests of pods are protected (MemoryQoS, cgroup v2 only).
    pub reserves_memory: bool,
    /// The pool of user ids for pods with user namespaces.
    pub users: Pool,
    /// Callback for changes of volumes' group ownership.
    pub on_ownership_change: Option<OnOwnershipChange>,
    /// Runs system calls that can block indefinitely.
    pub(crate) calls: BlockingCalls,
    /// Volumes that no pod uses but that cannot be removed yet.
    pub(crate) orphans: OrphanedVolumes,
    /// Mounts of unresponsive servers: unmounting them does not return. With the time of the first attempt.
    pub(crate) unresponsive: Mutex<HashMap<PathBuf, Instant>>,
    /// Time that unmounting a remote filesystem may block before it is forced.
    pub(crate) force_after: Duration,
}

/// Checks that a text, such as a pod uid, is a single path segment.
pub(crate) fn segment(text: &str) -> Result<&str, HostError> {
    let fine =
        !text.is_empty() && text != "." && text != ".." && !text.contains('/') && text.len() < 256;
    if fine {
        Ok(text)
    } else {
        Err(format!("{text:?} cannot be used as a directory name").into())
    }
}

pub(crate) fn make(path: &Path, mode: u32) -> Result<(), HostError> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .map_err(doing(format!(
            "the directory {} cannot be created",
            path.display()
        )))
}

/// Removes a directory tree, but does not cross mount points. A
/// missing directory is no error. The error names the remaining files.
pub(crate) fn remove(dir: &Path) -> Result<(), HostError> {
    removal::remove_tree(dir).map_err(|left| HostError::failed(left.to_string()))
}

impl LinuxHost {
    /// Creates the host for the root directory `root`. Resolves symlinks in its path once, because
    /// mounts are found by their real path and `/var/lib/kubelet` may link to a larger disk.
    #[must_use]
    pub fn new(
        root: &Path,
        logs: PathBuf,
        cgroups: Cgroups,
        pids: Option<i64>,
        cpu_period: Option<u64>,
    ) -> LinuxHost {
        LinuxHost {
            root: fs::canonicalize(root).unwrap_or_else(|_| root.into()),
            logs,
            cgroups,
            pids,
            cpu_period,
            reserves_memory: false,
            users: Pool::all(LENGTH),
            on_ownership_change: None,
            calls: BlockingCalls::default(),
            orphans: OrphanedVolumes::default(),
            unresponsive: Mutex::default(),
            force_after: FORCE_AFTER,
        }
    }

    pub(crate) fn pod_dir(&self, uid: &str) -> Result<PathBuf, HostError> {
        Ok(self.root.join("pods").join(segment(uid)?))
    }
}

/// Callback for each volume whose group ownership was changed: the plugin
/// (with the driver for CSI), the duration, and whether it failed.
pub(crate) type OnOwnershipChange = Arc<dyn Fn(&str, Duration, bool) + Send + Sync>;

/// Time that unmounting a remote filesystem may block before it is forced.
pub(crate) const FORCE_AFTER: Duration = Duration::from_secs(60);
