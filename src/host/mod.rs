//! What a pod has on this machine besides its containers: a cgroup, directories, volumes, logs.
//!
//! [`PodHost`] is the narrow trait the agent calls; [`linux::LinuxHost`] does it for real.

pub mod cgroups;
pub mod cni_cache;
pub mod iptables;
pub mod linux;
pub mod serving;
mod tool;
pub mod users;
pub mod volume;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;

use self::volume::csi::Published;
use crate::core::image::gc::Filesystem;
use crate::core::lock::lock;
use crate::core::node::cgroup_tree::Group;
use crate::core::pod::Ownership;
use crate::core::pod::cgroup_values::{Difference, Mended, Values};
use crate::core::pod::observed::Container;
use crate::core::pod::users::Mappings;
use crate::core::repeated::RepeatedFailures;
use crate::core::volume::payload::Files;
use crate::core::volume::resolved::{Problem, ResolvedVolume};
use crate::sys::usage::Usage;

pub use crate::sys::failure::{HostError, HostErrorKind};

/// Does work on the filesystem where it holds up nobody.
///
/// # Errors
///
/// What `work` says, or that it has panicked.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, HostError> + Send + 'static,
) -> Result<T, HostError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| {
        Err(format!("an operation on the filesystem ended unexpectedly: {e}").into())
    })
}

/// Volumes and disks that no pod uses and that stay for now. Repetitions are logged after pauses that grow.
#[derive(Debug, Default)]
pub(crate) struct Staying(Mutex<RepeatedFailures<String>>);

impl Staying {
    fn log(&self, volume: &str, error: &HostError) {
        let (text, now) = (error.to_string(), jiff::Timestamp::now());
        let due = lock(&self.0).record(volume.to_owned(), &text, now);
        if let Some(repetitions) = due {
            tracing::warn!(
                %error,
                volume,
                repetitions,
                "volume that no pod uses stays for now, retrying"
            );
        }
    }
}

/// A volume of a pod that was taken away, or could not be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenAway {
    /// Its plugin, for instance `kubernetes.io/secret`.
    pub plugin: String,
    /// Whether it is a device and not a filesystem.
    pub block: bool,
    /// Whether it is what all pods had, which goes with the last of them.
    pub staged: bool,
    /// Whether it could not be taken away.
    pub has_failed: bool,
    /// How long it took.
    pub took: Duration,
}

/// Is told of each volume that is taken away.
pub type OnTakenAway<'a> = &'a (dyn Fn(TakenAway) + Send + Sync);

/// The part of a volume that a container mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubPath {
    /// The container's name.
    pub container: String,
    /// The place of the mount among the container's.
    pub index: usize,
    /// The path in the volume, if not all of it is mounted.
    pub path: Option<String>,
}

/// The log of one instance of a container.
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

/// The machine's side of pods. Removing what is gone succeeds.
#[async_trait]
pub trait PodHost: Send + Sync + 'static {
    /// Makes the pod's cgroup and sets its values, a limit of its CPU time only with `cpu_limit`. The answer is the parent
    /// that the runtime is given; it is empty where pods have no cgroups, and nothing is made.
    async fn ensure_cgroup(&self, pod: &Pod, cpu_limit: bool) -> Result<String, HostError>;
    /// The pod's cgroup as [`PodHost::ensure_cgroup`] names it. Nothing is touched.
    fn cgroup_parent(&self, pod: &Pod) -> String;
    /// The bytes of memory that the pod uses, caches included; none where that is not known.
    fn memory_of_pod(&self, _pod: &Pod) -> Option<u64> {
        None
    }
    /// Gives the node's own cgroups their values, and makes those that are to be made. The answers are in their order: what
    /// was different, or why one could not be set.
    async fn apply_tree(
        &self,
        tree: &[(Group, Values)],
    ) -> Vec<Result<Vec<Difference>, HostError>> {
        tree.iter().map(|_| Ok(vec![])).collect()
    }
    /// Waits until somebody else has changed a cgroup of the node or of a pod, and sets it back.
    async fn mend_cgroups(&self) -> Vec<Mended> {
        std::future::pending().await
    }
    /// Where the cgroup of all pods lies below the hierarchies; where pods have none, the root that the configuration names.
    /// Nothing is touched.
    fn cgroup_of_all(&self) -> String;
    /// Where the cgroups of the classes that have one lie.
    fn cgroups_of_classes(&self) -> Vec<String> {
        vec![]
    }
    /// Where the pod's cgroup lies below the hierarchies, or a container's by its id; none where pods have none
    /// (`cgroupsPerQOS: false`), and for a container that is not found then. Nothing is touched.
    fn cgroup_path(&self, pod: &Pod, container: Option<&str>) -> Option<String>;
    /// The ids of the pod's user namespace: those it has already, else a range that no other pod has.
    async fn user_mappings(&self, pod: &Pod) -> Result<Mappings, HostError>;
    /// Makes the pod's directories.
    async fn make_directories(&self, pod: &Pod) -> Result<(), HostError>;
    /// The group of a local volume that other pods have too, where this pod asks for another one.
    async fn group_of_others(&self, _pod: &Pod, _resolved: &ResolvedVolume) -> Option<u32> {
        None
    }
    /// Mounts a volume and, for projecting kinds, writes its files.
    async fn set_up_volume(
        &self,
        pod: &Pod,
        resolved: &ResolvedVolume,
        files: Option<Files>,
    ) -> Result<(), Problem>;
    /// Returns when one of the calls that are under way for the pod's volumes has ended: what waits for it is worth a try then.
    /// Where none is under way, it does not return.
    async fn call_ends(&self, _uid: &str) {
        std::future::pending().await
    }
    /// Makes the filesystem of a volume that is set up as large as the volume has become.
    async fn grow_volume(&self, _pod: &Pod, _resolved: &ResolvedVolume) -> Result<(), HostError> {
        Ok(())
    }
    /// The directory or file that a container mounts.
    async fn mount_source(
        &self,
        pod: &Pod,
        resolved: &ResolvedVolume,
        place: &SubPath,
    ) -> Result<PathBuf, HostError>;
    /// Reads a small file of a volume, never outside of it.
    async fn read_file(
        &self,
        pod: &Pod,
        resolved: &ResolvedVolume,
        path: &str,
    ) -> Result<String, HostError>;
    /// Writes the pod's `/etc/hosts`; the answer is its path here.
    async fn write_hosts(&self, pod: &Pod, text: String) -> Result<PathBuf, HostError>;
    /// Makes an empty file for a container's termination message.
    async fn termination_log(
        &self,
        pod: &Pod,
        container: &str,
        attempt: u32,
    ) -> Result<PathBuf, HostError>;
    /// What an ended container of a pod left as its termination message.
    async fn termination_message(&self, uid: &str, container: &Container) -> Option<String>;
    /// The end of a container's log: at most 80 lines and 2048 bytes.
    async fn log_tail(&self, pod: &Pod, container: &str, attempt: u32) -> Option<String>;
    /// The highest restart count that a container has a log of; `None` where it has no log.
    async fn last_attempt(&self, pod: &Pod, container: &str) -> Result<Option<u32>, HostError>;
    /// Links a container's log from the directory that log collectors read.
    async fn link_log(
        &self,
        pod: &Pod,
        container: &str,
        attempt: u32,
        id: &str,
    ) -> Result<(), HostError>;
    /// Removes what one ended instance of a container has here: logs, their link, its message.
    async fn remove_instance(
        &self,
        pod: &Pod,
        container: &str,
        attempt: u32,
        id: &str,
    ) -> Result<(), HostError>;
    /// The sizes of logs in bytes, in their order and in one visit to the disk; `None` for one that is not there.
    async fn log_sizes(&self, logs: &[Log]) -> Vec<Option<u64>>;
    /// Moves a log aside, keeping at most `files` in all; the answer puts it back.
    async fn move_log_aside(
        &self,
        log: &Log,
        files: usize,
        stamp: &str,
    ) -> Result<String, HostError>;
    /// Compresses what was moved aside before the newest of it. It may take long, and the log may be moved aside meanwhile.
    async fn compress_log(&self, log: &Log) -> Result<(), HostError>;
    /// Undoes the moving.
    async fn put_log_back(&self, log: &Log, aside: String) -> Result<(), HostError>;
    /// What a volume on the node's disk uses; counting may end once it is more than `enough` bytes.
    async fn volume_usage(&self, pod: &Pod, volume: &str, enough: u64) -> Result<Usage, HostError>;
    /// The bytes of a container's logs.
    async fn log_usage(&self, pod: &Pod, container: &str) -> Result<u64, HostError>;
    /// The filesystem that a directory is on.
    async fn filesystem(&self, dir: &Path) -> Result<Filesystem, HostError>;
    /// Gives a volume that a driver has published to its pod's group.
    async fn give_published(&self, _volume: &Published, _owner: Ownership) -> Result<(), Problem> {
        Ok(())
    }
    /// Unmounts what pods have mounted within a published volume, where its driver cannot unmount it for that.
    async fn unmount_within(&self, _volume: &Published) -> Result<(), HostError> {
        Ok(())
    }
    /// Ends the setting up of the pod's volumes, and unmounts the parts of them that its containers had mounted.
    async fn unbind_sub_paths(&self, uid: &str) -> Result<(), HostError>;
    /// Unmounts the pod's volumes, and removes what the agent has made for them: emptyDirs and projected files. Of those
    /// of drivers, `each` is not told.
    async fn tear_down_volumes(&self, uid: &str, each: OnTakenAway<'_>) -> Result<(), HostError>;
    /// Removes the pod's cgroup.
    async fn remove_cgroup(&self, pod: &Pod) -> Result<(), HostError>;
    /// Removes the cgroup of a container that has ended; processes still in it are killed.
    async fn remove_container_cgroup(&self, _pod: &Pod, _id: &str) -> Result<(), HostError> {
        Ok(())
    }
    /// Removes the pod's directory, and its logs unless `keeps_logs`.
    async fn remove_directories(&self, pod: &Pod, keeps_logs: bool) -> Result<(), HostError>;
    /// The directory of the pod's logs.
    fn log_directory(&self, pod: &Pod) -> PathBuf;
    /// The node's own `/etc/hosts`.
    async fn node_hosts(&self) -> String;
    /// Uids of pods that have a directory or cgroup here.
    async fn leftovers(&self) -> Vec<String>;
    /// How many volumes of CSI drivers a pod has without a readable note.
    async fn unknown_volumes(&self, uid: &str) -> u64;
    /// Removes what a pod that nobody knows any more left here besides its volumes, never crossing a mount.
    async fn remove_leftovers(&self, uid: &str) -> Result<(), HostError>;
    /// Removes what the runtime's library for CNI has cached of a sandbox and cannot read; whether there was something.
    async fn remove_torn_results(&self, _sandbox: &str) -> bool {
        false
    }
}
