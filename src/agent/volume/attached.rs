//! Volumes that a node must not mount before the attach-detach controller lists them as
//! attached (`pkg/kubelet/volumemanager/reconciler`). Otherwise the controller could attach a
//! volume to another node while it is mounted here.
//!
//! The order matters. The node reports that the volume is in use, and then reads whether the controller
//! lists it as attached. The controller uses the reverse order: it removes the volume from its list, reads
//! whether the volume is in use, and only then detaches it. So either the node sees that the volume is not
//! listed, or the controller sees that it is in use.
//!
//! The same applies to disks that the node attaches without a driver (iSCSI, Fibre Channel): the controller tracks
//! their nodes, and lists a disk with a single writer for one node only.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::{Node, Pod};
use tokio::time::Instant;

use crate::metrics::{Metrics, VolumeOperation};
use crate::node::OwnNode;
use crate::volume::reported::{REPORT_TIMEOUT, Reported};
use holdfast_config::Config;
use holdfast_core::lock::lock;
use holdfast_core::pod;
use holdfast_core::volume::disks;
use holdfast_core::volume::resolved::{Problem, ResolvedVolume};
use holdfast_host::volume::disks::all_places;

/// The disks that this node attaches without a driver.
pub struct AttachedDisks {
    /// The unique names of pods' disks, by the pod's uid and the volume's name.
    of_pods: Mutex<BTreeMap<(String, String), String>>,
    /// Mount points found when the agent started, with the unique names that their disks may have.
    found: Mutex<BTreeMap<PathBuf, Vec<String>>>,
    reported: Reported,
}

impl AttachedDisks {
    /// Finds the disks that an earlier agent has left below its root directory.
    #[must_use]
    pub fn new(root: &Path) -> AttachedDisks {
        let names = |place: PathBuf| {
            let name = place.file_name()?.to_str()?.to_owned();
            Some((place, disks::unique_names_of_directory(&name)))
        };
        let found = all_places(root).into_iter().filter_map(names);
        AttachedDisks {
            of_pods: Mutex::default(),
            found: Mutex::new(found.collect()),
            reported: Reported::default(),
        }
    }

    /// The unique names of disks that this node uses or is about to use.
    #[must_use]
    pub fn in_use(&self) -> BTreeSet<String> {
        let mut found = lock(&self.found);
        found.retain(|place, _| place.symlink_metadata().is_ok());
        let left = found.values().flatten().cloned();
        lock(&self.of_pods).values().cloned().chain(left).collect()
    }

    /// Records that the node's status reports these disks in use. Ignores those that no pod uses any more.
    pub(crate) fn set_reported(&self, names: &[String]) {
        // Under the lock, so that a disk that is forgotten meanwhile is not added again.
        let of_pods = lock(&self.of_pods);
        let now = of_pods.values().filter(|name| names.contains(name));
        self.reported.set(now.cloned().collect());
    }

    /// Waits until [`AttachedDisks::in_use`] has changed.
    pub(crate) async fn in_use_changed(&self) {
        self.reported.changed().await;
    }

    fn record_disk(&self, uid: &str, volume: &str, name: &str) {
        let key = (uid.to_owned(), volume.to_owned());
        let before = lock(&self.of_pods).insert(key, name.to_owned());
        if before.is_none() {
            self.reported.request_update();
        }
    }

    /// Removes the disks of a pod.
    pub(super) fn forget(&self, uid: &str) {
        let mut of_pods = lock(&self.of_pods);
        let before = of_pods.len();
        of_pods.retain(|(of, _), _| of != uid);
        if of_pods.len() == before {
            return;
        }
        self.reported
            .retain(|name| of_pods.values().any(|other| other == name));
        self.reported.request_update();
    }
}

/// What reporting attached disks uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub node: Arc<OwnNode>,
    pub metrics: Arc<Metrics>,
    pub disks: Arc<AttachedDisks>,
}

/// Reports a pod's disk in use. If `is_needed`, waits until the controller
/// lists the disk; a mounted disk was listed before.
pub(super) async fn report_disk_in_use(
    parts: &Parts,
    pod: &Pod,
    resolved: &ResolvedVolume,
    name: &str,
    is_needed: bool,
) -> Result<(), Problem> {
    parts
        .disks
        .record_disk(pod::uid(pod), &resolved.volume, name);
    // Without an API there is no controller, so no other node can get the disk from it.
    if !is_needed || parts.node.api().is_none() {
        return Ok(());
    }
    let begun = Instant::now();
    let outcome = wait_until_attached(parts, name).await;
    parts.metrics.volume(VolumeOperation {
        name: "verify_controller_attached_volume",
        plugin: &resolved.qualified_plugin(),
        is_migrated: false,
        has_failed: outcome.is_err(),
        took: begun.elapsed(),
    });
    let step = match resolved.block {
        true => "MapVolume.WaitForAttach",
        false => "MountVolume.WaitForAttach",
    };
    outcome.map_err(|why| Problem::Unattached {
        step,
        why: format!("volume is not attached yet: {why}"),
        is_full: false,
    })
}

async fn wait_until_attached(parts: &Parts, name: &str) -> Result<(), String> {
    parts.disks.reported.wait_until_reported(name).await?;
    let node = &parts.config.node_name;
    // The cached Node may be older than the report.
    if !parts.node.refresh().await {
        return Err(no_answer_error(&parts.config, name));
    }
    match wait_until_listed(&parts.node, name).await {
        true => Ok(()),
        false => Err(format!(
            "volumesAttached of node {node} does not list {name}; the attach-detach controller lists it when no other node blocks the attachment"
        )),
    }
}

/// The error when the API does not answer whether a volume is listed.
pub(super) fn no_answer_error(config: &Config, volume: &str) -> String {
    let node = &config.node_name;
    format!(
        "the API does not answer whether volumesAttached of node {node} lists {volume}; retrying"
    )
}

/// Waits until the node's status lists a volume as attached. Returns whether it does.
pub(super) async fn wait_until_listed(node: &OwnNode, volume: &str) -> bool {
    let lists = |node: &Node| {
        let status = node.status.as_ref();
        let mut attached = status
            .and_then(|s| s.volumes_attached.as_ref())
            .into_iter()
            .flatten();
        attached.any(|v| v.name == volume)
    };
    let mut node = node.subscribe();
    let says = node.wait_for(|node| node.as_deref().is_some_and(lists));
    matches!(tokio::time::timeout(REPORT_TIMEOUT, says).await, Ok(Ok(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_in_use_are_those_of_pods_and_of_an_earlier_agent() {
        let root = tempfile::tempdir().expect("a directory");
        let place = root.path().join(
            "plugins/kubernetes.io/iscsi/iface-default/192.0.2.7:3260-iqn.2024-01.test:x-lun-1",
        );
        std::fs::create_dir_all(&place).expect("made");
        let disks = AttachedDisks::new(root.path());
        let [with, without] = ["192.0.2.7:3260", "192.0.2.7"]
            .map(|portal| disks::iscsi_name(portal, "iqn.2024-01.test:x", 1));
        let all = |names: &[&String]| -> BTreeSet<String> {
            names.iter().map(|name| (*name).clone()).collect()
        };
        assert_eq!(disks.in_use(), all(&[&with, &without]));
        let other = "kubernetes.io/fc/[50060e801049cfd1]:0".to_owned();
        disks.record_disk("u", "v", &other);
        disks.record_disk("w", "v", &other);
        assert_eq!(disks.in_use(), all(&[&with, &without, &other]));
        std::fs::remove_dir(&place).expect("removed");
        assert_eq!(disks.in_use(), all(&[&other]));

        let reported = disks.reported.subscribe();
        disks.set_reported(&[other.clone(), with]);
        assert_eq!(*reported.borrow(), all(&[&other]));
        disks.forget("u");
        assert_eq!(*reported.borrow(), all(&[&other]), "another pod uses it");
        disks.forget("w");
        assert!(reported.borrow().is_empty() && disks.in_use().is_empty());
        // A late report must not add released disks again.
        disks.set_reported(&[other]);
        assert!(reported.borrow().is_empty());
    }
}
