//! What a pod has on this machine besides its containers: a cgroup, directories, volumes, logs.
//!
//! The agent uses the trait [`PodHost`]; [`linux::LinuxHost`] implements it for the real machine.

pub mod cgroups;
pub mod cni_cache;
pub mod iptables;
pub mod leases;
pub mod linux;
mod pod_host;
pub mod pod_network;
pub mod serving;
#[cfg(test)]
#[path = "../../tests/support/skip.rs"]
mod skip;
mod tool;
pub mod users;
pub mod volume;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;

use self::volume::csi::Published;
use holdfast_core::image::gc::Filesystem;
use holdfast_core::lock::lock;
use holdfast_core::node::cgroup_tree::Group;
use holdfast_core::pod::Ownership;
use holdfast_core::pod::cgroup_values::{Difference, RestoredCgroup, Values};
use holdfast_core::pod::observed::Container;
use holdfast_core::pod::users::Mappings;
use holdfast_core::repeated::RepeatedFailures;
use holdfast_core::volume::payload::Files;
use holdfast_core::volume::resolved::{Problem, ResolvedVolume};
use holdfast_sys::usage::Usage;

pub use holdfast_sys::failure::{HostError, HostErrorKind};

/// Runs blocking filesystem work on a separate thread.
///
/// # Errors
///
/// The error of `work`, or a panic of it.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, HostError> + Send + 'static,
) -> Result<T, HostError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|e| Err(format!("a filesystem operation stopped unexpectedly: {e}").into()))
}

/// Rate-limits log messages about volumes and disks that no pod uses but that
/// cannot be removed yet. Repetitions are logged at increasing intervals.
#[derive(Debug, Default)]
pub(crate) struct OrphanedVolumes(Mutex<RepeatedFailures<String>>);

impl OrphanedVolumes {
    fn log(&self, volume: &str, error: &HostError) {
        let (text, now) = (error.to_string(), jiff::Timestamp::now());
        let due = lock(&self.0).record(volume.to_owned(), &text, now);
        if let Some(repetitions) = due {
            tracing::warn!(
                %error,
                volume,
                repetitions,
                "cleaning up an orphaned volume failed, retrying"
            );
        }
    }
}

/// The outcome of removing a volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeRemoval {
    /// The plugin, for instance `kubernetes.io/secret`.
    pub plugin: String,
    /// Whether the volume is a block device.
    pub block: bool,
    /// Whether this is the global mount, which is removed after its last pod.
    pub staged: bool,
    /// Whether removing it failed.
    pub has_failed: bool,
    /// The duration of the removal.
    pub took: Duration,
}

/// Callback for each volume whose removal has succeeded or failed.
pub type OnRemoval<'a> = &'a (dyn Fn(VolumeRemoval) + Send + Sync);

/// A container's mount of a volume, or of a part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubPath {
    /// The container's name.
    pub container: String,
    /// The index among the container's volume mounts.
    pub index: usize,
    /// The subPath; `None` mounts the whole volume.
    pub path: Option<String>,
}

/// Identifies the log of a container instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's uid.
    pub uid: String,
    /// The container's name.
    pub container: String,
    /// The restart count.
    pub attempt: u32,
}

/// The host's side of pods. Removing something that no longer exists succeeds.
#[async_trait]
pub trait PodHost: Send + Sync + 'static {
    /// Creates or updates the pod's cgroup; limits its CPU time only if `cpu_limit` is set. Returns the
    /// cgroup parent for the runtime. If pods have no cgroups, does nothing and returns an empty string.
    async fn ensure_cgroup(&self, pod: &Pod, cpu_limit: bool) -> Result<String, HostError>;
    /// The name of the pod's cgroup, as returned by [`PodHost::ensure_cgroup`]. Changes nothing.
    fn cgroup_parent(&self, pod: &Pod) -> String;
    /// The memory usage of the pod in bytes, including caches; `None` if unknown.
    fn memory_of_pod(&self, _pod: &Pod) -> Option<u64> {
        None
    }
    /// Writes values to the node's cgroups, and creates missing ones that the agent owns. For
    /// each, returns the differences from the previous values or the error, in the same order.
    async fn apply_tree(
        &self,
        tree: &[(Group, Values)],
    ) -> Vec<Result<Vec<Difference>, HostError>> {
        tree.iter().map(|_| Ok(vec![])).collect()
    }
    /// Waits until another program has changed a cgroup of the node or of a pod, then restores it.
    async fn restore_cgroups(&self) -> Vec<RestoredCgroup> {
        std::future::pending().await
    }
    /// The path of the cgroup of all pods relative to the hierarchies.
    /// If pods have no cgroups, the configured root. Changes nothing.
    fn cgroup_of_all(&self) -> String;
    /// The paths of the cgroups of QoS classes that have one.
    fn cgroups_of_classes(&self) -> Vec<String> {
        vec![]
    }
    /// The path of the cgroup of the pod, or of a container given by its id, relative to the hierarchies. `None` for
    /// pods without cgroups (`cgroupsPerQOS: false`), and then also for containers that are not found. Changes nothing.
    fn cgroup_path(&self, pod: &Pod, container: Option<&str>) -> Option<String>;
    /// The id mappings of the pod's user namespace: its existing range, or else a range that no other pod has.
    async fn user_mappings(&self, pod: &Pod) -> Result<Mappings, HostError>;
    /// Creates the pod's directories.
    async fn make_directories(&self, pod: &Pod) -> Result<(), HostError>;
    /// The group of a local volume that other pods use as well, if this pod requests another group.
    async fn group_of_others(&self, _pod: &Pod, _resolved: &ResolvedVolume) -> Option<u32> {
        None
    }
    /// Mounts a volume. For projected kinds, also writes the files.
    async fn set_up_volume(
        &self,
        pod: &Pod,
        resolved: &ResolvedVolume,
        files: Option<Files>,
    ) -> Result<(), Problem>;
    /// Waits until a pending call for one of the pod's volumes completes,
    /// so that the caller can retry. Does not return if no call is pending.
    async fn wait_for_call(&self, _uid: &str) {
        std::future::pending().await
    }
    /// Expands the filesystem of a mounted volume to the volume's size.
    async fn grow_volume(&self, _pod: &Pod, _resolved: &ResolvedVolume) -> Result<(), HostError> {
        Ok(())
    }
    /// The path of the directory or file that a container mounts.
    async fn mount_source(
        &self,
        pod: &Pod,
        resolved: &ResolvedVolume,
        place: &SubPath,
    ) -> Result<PathBuf, HostError>;
    /// Reads a small file of a volume. Links cannot lead out of the volume.
    async fn read_file(
        &self,
        pod: &Pod,
        resolved: &ResolvedVolume,
        path: &str,
    ) -> Result<String, HostError>;
    /// Writes the pod's `/etc/hosts` and returns its path on the host.
    async fn write_hosts(&self, pod: &Pod, text: String) -> Result<PathBuf, HostError>;
    /// Creates an empty file for a container's termination message and returns its path.
    async fn termination_log(
        &self,
        pod: &Pod,
        container: &str,
        attempt: u32,
    ) -> Result<PathBuf, HostError>;
    /// The termination message of a terminated container.
    async fn termination_message(&self, uid: &str, container: &Container) -> Option<String>;
    /// The last lines of a container's log: at most 80 lines and 2048 bytes.
    async fn log_tail(&self, pod: &Pod, container: &str, attempt: u32) -> Option<String>;
    /// The highest restart count for which a container has a log; `None` without a log.
    async fn last_attempt(&self, pod: &Pod, container: &str) -> Result<Option<u32>, HostError>;
    /// Links a container's log into the directory that log collectors read.
    async fn link_log(
        &self,
        pod: &Pod,
        container: &str,
        attempt: u32,
        id: &str,
    ) -> Result<(), HostError>;
    /// Removes the files of a terminated container instance: its logs, their link, its termination message.
    async fn remove_instance(
        &self,
        pod: &Pod,
        container: &str,
        attempt: u32,
        id: &str,
    ) -> Result<(), HostError>;
    /// The sizes of logs in bytes, in the same order, read in one blocking call; `None` for a missing log.
    async fn log_sizes(&self, logs: &[Log]) -> Vec<Option<u64>>;
    /// Renames a log for rotation, and removes old files so that at most
    /// `files` exist. Returns the new name, for [`PodHost::revert_log_rotation`].
    async fn rotate_log(&self, log: &Log, files: usize, stamp: &str) -> Result<String, HostError>;
    /// Compresses the rotated files except the newest. May take long; the log may be rotated again meanwhile.
    async fn compress_log(&self, log: &Log) -> Result<(), HostError>;
    /// Reverts [`PodHost::rotate_log`].
    async fn revert_log_rotation(&self, log: &Log, aside: String) -> Result<(), HostError>;
    /// The disk usage of a volume. Counting may stop above `stop_above` bytes.
    async fn volume_usage(
        &self,
        pod: &Pod,
        volume: &str,
        stop_above: u64,
    ) -> Result<Usage, HostError>;
    /// The size of a container's logs in bytes.
    async fn log_usage(&self, pod: &Pod, container: &str) -> Result<u64, HostError>;
    /// The size and usage of the filesystem that contains a directory.
    async fn filesystem(&self, dir: &Path) -> Result<Filesystem, HostError>;
    /// Changes the group ownership of a volume that a CSI driver has published.
    async fn chown_published(&self, _volume: &Published, _owner: Ownership) -> Result<(), Problem> {
        Ok(())
    }
    /// Unmounts what pods have mounted inside a published volume, because the driver cannot unmount the volume before.
    async fn unmount_within(&self, _volume: &Published) -> Result<(), HostError> {
        Ok(())
    }
    /// Cancels pending setup of the pod's volumes, and unmounts the subPath mounts of its containers.
    async fn unbind_sub_paths(&self, uid: &str) -> Result<(), HostError>;
    /// Unmounts the pod's volumes and removes the files that the agent has created: emptyDirs
    /// and projected files. Calls `each` for all volumes except those of CSI drivers.
    async fn tear_down_volumes(&self, uid: &str, each: OnRemoval<'_>) -> Result<(), HostError>;
    /// Removes the pod's cgroup.
    async fn remove_cgroup(&self, pod: &Pod) -> Result<(), HostError>;
    /// Removes the cgroup of a terminated container, and kills processes in it.
    async fn remove_container_cgroup(&self, _pod: &Pod, _id: &str) -> Result<(), HostError> {
        Ok(())
    }
    /// Removes the pod's directory, and its logs unless `keeps_logs` is set.
    async fn remove_directories(&self, pod: &Pod, keeps_logs: bool) -> Result<(), HostError>;
    /// The directory of the pod's logs.
    fn log_directory(&self, pod: &Pod) -> PathBuf;
    /// The contents of the node's `/etc/hosts`.
    async fn node_hosts(&self) -> String;
    /// The uids of pods that have a directory or cgroup on this host.
    async fn leftovers(&self) -> Vec<String>;
    /// The number of a pod's CSI volumes without a readable `vol_data.json`.
    async fn unknown_volumes(&self, uid: &str) -> u64;
    /// Removes the leftovers of an orphaned pod except its volumes. Never crosses a mount point.
    async fn remove_leftovers(&self, uid: &str) -> Result<(), HostError>;
    /// Removes a sandbox's corrupt results from libcni's cache. Returns whether there were any.
    async fn remove_corrupt_results(&self, _sandbox: &str) -> bool {
        false
    }
}
