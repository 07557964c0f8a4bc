//! Volumes that must not be mounted by a node before the attach-detach controller lists them for it: nobody then gives them to
//! another node while they are mounted (kubelet spec, 9.2).
//!
//! The order matters. The node reports that the volume is in use; then it reads whether the controller lists it as
//! attached. The controller does it the other way round: it takes the volume off its list, reads whether it is in use,
//! and only then detaches it. So either the node sees that it is not listed, or the controller that it is in use.
//!
//! This is so of disks that the node attaches by itself (iSCSI, Fibre Channel), too: the controller keeps book of which node has
//! which, and lists one that only one node may write to for one node alone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use k8s_openapi::api::core::v1::{Node, Pod};
use tokio::time::Instant;

use crate::agent::Context;
use crate::agent::metrics::VolumeOperation;
use crate::agent::volume::reported::{REPORTING, Reported};
use crate::core::lock::lock;
use crate::core::pod;
use crate::core::volume::disks;
use crate::core::volume::resolved::{Problem, ResolvedVolume};
use crate::host::volume::disks::all_places;

/// The disks that this node attaches by itself.
pub struct AttachedDisks {
    /// Those of pods, by the pod's uid and its name for the volume; as nodes name them.
    of_pods: Mutex<BTreeMap<(String, String), String>>,
    /// What was there when the agent started: the places, and the names that their disks may have.
    found: Mutex<BTreeMap<PathBuf, Vec<String>>>,
    reported: Reported,
}

impl AttachedDisks {
    /// Those that an agent before this one has left below its root directory.
    #[must_use]
    pub fn new(root: &Path) -> AttachedDisks {
        let names = |place: PathBuf| {
            let name = place.file_name()?.to_str()?.to_owned();
            Some((place, disks::names_of_place(&name)))
        };
        let found = all_places(root).into_iter().filter_map(names);
        AttachedDisks {
            of_pods: Mutex::default(),
            found: Mutex::new(found.collect()),
            reported: Reported::default(),
        }
    }

    /// Those that this node has, or is about to have.
    #[must_use]
    pub fn in_use(&self) -> BTreeSet<String> {
        let mut found = lock(&self.found);
        found.retain(|place, _| place.symlink_metadata().is_ok());
        let left = found.values().flatten().cloned();
        lock(&self.of_pods).values().cloned().chain(left).collect()
    }

    /// The node's status says now that these are in use. It counts for those that pods still have.
    pub fn set_reported(&self, names: &[String]) {
        // Under the lock: what is forgotten meanwhile must not come back.
        let of_pods = lock(&self.of_pods);
        let now = of_pods.values().filter(|name| names.contains(name));
        self.reported.set(now.cloned().collect());
    }

    /// Returns when [`AttachedDisks::in_use`] has changed.
    pub async fn in_use_changed(&self) {
        self.reported.changed().await;
    }

    fn note(&self, uid: &str, volume: &str, name: &str) {
        let key = (uid.to_owned(), volume.to_owned());
        let before = lock(&self.of_pods).insert(key, name.to_owned());
        if before.is_none() {
            self.reported.outdated();
        }
    }

    /// A pod has none any more.
    pub(super) fn forget(&self, uid: &str) {
        let mut of_pods = lock(&self.of_pods);
        let before = of_pods.len();
        of_pods.retain(|(of, _), _| of != uid);
        if of_pods.len() == before {
            return;
        }
        self.reported
            .retain(|name| of_pods.values().any(|other| other == name));
        self.reported.outdated();
    }
}

/// Says that a pod's disk is in use, and waits until it is listed, where `is_needed`: what is mounted was listed before.
pub(super) async fn of_disk(
    context: &Context,
    pod: &Pod,
    resolved: &ResolvedVolume,
    name: &str,
    is_needed: bool,
) -> Result<(), Problem> {
    context.disks.note(pod::uid(pod), &resolved.volume, name);
    // Without an API nobody lists it, and no other node can have it from there.
    if !is_needed || context.node.api().is_none() {
        return Ok(());
    }
    let begun = Instant::now();
    let outcome = listed_for_us(context, name).await;
    context.metrics.volume(VolumeOperation {
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

async fn listed_for_us(context: &Context, name: &str) -> Result<(), String> {
    context.disks.reported.lists(name).await?;
    let node = &context.config.node_name;
    // What was seen before may be older than the report.
    if !context.node.refresh().await {
        return Err(unanswered(context, name));
    }
    match is_listed(context, name).await {
        true => Ok(()),
        false => Err(format!(
            "volumesAttached of node {node} does not list {name}; the attach-detach controller lists it when no other node has it that must not"
        )),
    }
}

/// Why it is not known whether a volume is listed.
pub(super) fn unanswered(context: &Context, volume: &str) -> String {
    let node = &context.config.node_name;
    format!(
        "the API does not answer whether volumesAttached of node {node} lists {volume}; it is asked again"
    )
}

/// Waits until the node's status lists a volume as attached; whether it does.
pub(super) async fn is_listed(context: &Context, volume: &str) -> bool {
    let lists = |node: &Node| {
        let status = node.status.as_ref();
        let mut attached = status
            .and_then(|s| s.volumes_attached.as_ref())
            .into_iter()
            .flatten();
        attached.any(|v| v.name == volume)
    };
    let mut node = context.node.subscribe();
    let says = node.wait_for(|node| node.as_deref().is_some_and(lists));
    matches!(tokio::time::timeout(REPORTING, says).await, Ok(Ok(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_use_is_what_pods_have_and_what_an_agent_before_has_left() {
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
        disks.note("u", "v", &other);
        disks.note("w", "v", &other);
        assert_eq!(disks.in_use(), all(&[&with, &without, &other]));
        std::fs::remove_dir(&place).expect("removed");
        assert_eq!(disks.in_use(), all(&[&other]));

        let reported = disks.reported.subscribe();
        disks.set_reported(&[other.clone(), with]);
        assert_eq!(*reported.borrow(), all(&[&other]));
        disks.forget("u");
        assert_eq!(*reported.borrow(), all(&[&other]), "another pod has it");
        disks.forget("w");
        assert!(reported.borrow().is_empty() && disks.in_use().is_empty());
        // A report that was under way meanwhile says nothing of what is gone.
        disks.set_reported(&[other]);
        assert!(reported.borrow().is_empty());
    }
}
