//! The attach/detach controller (`pkg/controller/volume/attachdetach/attach_detach_controller.go`). For CSI drivers
//! that require it, a VolumeAttachment is created when a pod is bound to a node. It is deleted after the last pod that
//! needs it. The driver's external attacher performs the attachment.

mod disks;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use super::any_change;
use super::runtime::relevant_changes;
use super::{Caches, is_stale};
use holdfast_core::{
    pod,
    volume::{claims, csi, migrated},
};
use holdfast_kubeapi::Api;
use holdfast_kubeapi::Cache;
use holdfast_kubeapi::cache::revision;

/// A VolumeAttachment that a pod needs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Wanted {
    driver: String,
    node: String,
    volume: String,
    /// The volume's unique name in the node's status.
    unique: String,
}

/// A VolumeAttachment that no pod needs.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Detached {
    name: String,
    node: String,
    /// The volume's unique name in the node's status; `None` if the volume was deleted.
    unique: Option<String>,
}

/// The volumes that a node reports as in use.
fn in_use(node: &Node) -> BTreeSet<&str> {
    let status = node.status.as_ref();
    let names = status.and_then(|s| s.volumes_in_use.as_ref());
    names.into_iter().flatten().map(String::as_str).collect()
}

/// The volumes that a node's status lists as attached.
fn listed(node: &Node) -> BTreeSet<&str> {
    let status = node.status.as_ref();
    let volumes = status.and_then(|s| s.volumes_attached.as_ref());
    let volumes = volumes.into_iter().flatten();
    volumes.map(|v| v.name.as_str()).collect()
}

/// Whether a volume can be detached from a node. A node reports a volume as in use before it mounts it, and mounts only
/// listed volumes. A volume that is neither in use nor listed can therefore not become mounted.
fn is_free(node: &Node, unique: &str) -> bool {
    !in_use(node).contains(unique) && !listed(node).contains(unique)
}

fn is_attached(attachment: &VolumeAttachment) -> bool {
    attachment.metadata.deletion_timestamp.is_none()
        && attachment.status.as_ref().is_some_and(|s| s.attached)
}

/// The pods that are bound to a node and not in a terminal phase, with the node's name.
fn bound_pods(pods: &[Arc<Pod>]) -> impl Iterator<Item = (&Arc<Pod>, &str)> {
    let running = pods.iter().filter(|pod| !pod::is_terminal(pod));
    running.filter_map(|pod| {
        let node = pod::spec(pod).node_name.as_deref();
        Some((pod, node.filter(|node| !node.is_empty())?))
    })
}

/// The volumes that a pod's claims are bound to.
fn claimed<'a>(
    pod: &Pod,
    claims: &[Arc<PersistentVolumeClaim>],
    volumes: &'a [Arc<PersistentVolume>],
) -> Vec<&'a Arc<PersistentVolume>> {
    let of_pod = claims::of_pod(pod).into_iter();
    let volumes = of_pod.filter_map(|(_, name)| {
        let is_its = |claim: &&Arc<PersistentVolumeClaim>| {
            claim.metadata.namespace == pod.metadata.namespace && claim.name_any() == name
        };
        let bound = claims::bound(claims.iter().find(is_its)?)?;
        volumes.iter().find(|volume| volume.name_any() == bound)
    });
    volumes.collect()
}

/// The observed state.
struct Observed {
    pods: Vec<Arc<Pod>>,
    claims: Vec<Arc<PersistentVolumeClaim>>,
    volumes: Vec<Arc<PersistentVolume>>,
    drivers: Vec<Arc<CSIDriver>>,
    attachments: Vec<Arc<VolumeAttachment>>,
    nodes: Vec<Arc<Node>>,
}

/// One write.
#[derive(Debug, PartialEq)]
enum Step {
    Attach(String, Box<Wanted>),
    Detach(Box<Detached>),
    /// Patches a node's list of attached volumes.
    SetAttached(String, Value),
}

impl Observed {
    /// All attachments that pods need: the pod, the attachment's name and its specification.
    fn needs(&self) -> Vec<(&Arc<Pod>, String, Wanted)> {
        let mut needs = vec![];
        for (pod, node) in bound_pods(&self.pods) {
            for volume in claimed(pod, &self.claims, &self.volumes) {
                let Some(source) = volume.spec.as_ref().and_then(|s| s.csi.as_ref()) else {
                    continue;
                };
                let driver = self.drivers.iter().find(|d| d.name_any() == source.driver);
                if driver.is_some_and(|d| d.spec.attach_required == Some(false)) {
                    continue;
                }
                let name = csi::attachment_name(&source.driver, &source.volume_handle, node);
                let unique = csi::unique_name(&source.driver, &source.volume_handle);
                needs.push((
                    pod,
                    name,
                    Wanted {
                        driver: source.driver.clone(),
                        node: node.to_owned(),
                        volume: volume.name_any(),
                        unique,
                    },
                ));
            }
        }
        needs
    }

    /// Events for pending pods: the pod, a reason and a message.
    fn events(&self) -> Vec<(Arc<Pod>, &'static str, String)> {
        let mut events = vec![];
        for (pod, name, attachment) in self
            .needs()
            .into_iter()
            .filter(|(pod, ..)| pod::phase(pod) == "Pending")
        {
            let found = self.attachments.iter().find(|a| a.name_any() == name);
            let status = found.and_then(|a| a.status.as_ref());
            let failed = status
                .and_then(|s| s.attach_error.as_ref())
                .map(|e| e.message.clone().unwrap_or_default());
            let volume = &attachment.volume;
            match (found.is_some_and(|a| is_attached(a)), failed) {
                (true, _) => {
                    events.push((
                        Arc::clone(pod),
                        "SuccessfulAttachVolume",
                        format!("AttachVolume.Attach succeeded for volume {volume:?} "),
                    ));
                }
                (false, Some(why)) => events.push((
                    Arc::clone(pod),
                    "FailedAttachVolume",
                    format!("AttachVolume.Attach failed for volume {volume:?} : {why}"),
                )),
                (false, None) => {}
            }
        }
        events.extend(self.disks().1);
        events
    }

    /// The attached lists and events for disks that nodes attach without a driver.
    fn disks(&self) -> (disks::Lists, Vec<disks::PodEvent>) {
        disks::decide(&self.pods, &self.claims, &self.volumes, &self.nodes)
    }

    fn steps(&self) -> Vec<Step> {
        let wanted: BTreeMap<String, Wanted> = self
            .needs()
            .into_iter()
            .map(|(_, name, attachment)| (name, attachment))
            .collect();
        let mut steps = vec![];
        for (name, attachment) in wanted
            .iter()
            .filter(|(name, _)| !self.attachments.iter().any(|a| a.name_any() == **name))
        {
            steps.push(Step::Attach(name.clone(), Box::new(attachment.clone())));
        }
        let is_wanted = |a: &VolumeAttachment| wanted.contains_key(&a.name_any());
        let (mut of_disks, _) = self.disks();
        for node in &self.nodes {
            let in_use = in_use(node);
            // An attachment that no pod needs is removed from the node's list before it is deleted.
            let attached = self
                .attachments
                .iter()
                .filter(|a| a.spec.node_name == node.name_any() && is_attached(a))
                .filter_map(|a| Some((a, self.unique(a)?)))
                .filter(|(a, unique)| is_wanted(a) || in_use.contains(unique.as_str()));
            let mut names = of_disks.remove(&node.name_any()).unwrap_or_default();
            names.extend(attached.map(|(_, unique)| unique));
            if !names.iter().map(String::as_str).eq(listed(node)) {
                let list: Vec<Value> = names
                    .iter()
                    .map(|name| json!({"name": name, "devicePath": ""}))
                    .collect();
                steps.push(Step::SetAttached(
                    node.name_any(),
                    json!({"status": {"volumesAttached": list}}),
                ));
            }
        }
        let unwanted = self
            .attachments
            .iter()
            .filter(|a| a.metadata.deletion_timestamp.is_none() && !is_wanted(a));
        for attachment in unwanted {
            let unique = self.unique(attachment);
            let on = &attachment.spec.node_name;
            let node = self.nodes.iter().find(|n| n.name_any() == *on);
            if let (Some(node), Some(unique)) = (node, &unique)
                && !is_free(node, unique)
            {
                continue;
            }
            steps.push(Step::Detach(Box::new(Detached {
                name: attachment.name_any(),
                node: on.clone(),
                unique,
            })));
        }
        steps
    }

    /// Whether any volume can need an attachment; on most small clusters none does.
    fn can_need_attachments(&self) -> bool {
        let is_served =
            |v: &Arc<PersistentVolume>| v.spec.as_ref().is_some_and(|s| s.csi.is_some());
        self.volumes.iter().any(is_served)
            || !self.attachments.is_empty()
            || disks::has_disks(&self.pods, &self.volumes, &self.nodes)
    }

    /// The unique name of an attachment's volume in the node's status.
    fn unique(&self, attachment: &VolumeAttachment) -> Option<String> {
        let volume = attachment.spec.source.persistent_volume_name.as_ref()?;
        let found = self.volumes.iter().find(|v| v.name_any() == *volume)?;
        let source = found.spec.as_ref()?.csi.as_ref()?;
        Some(csi::unique_name(&source.driver, &source.volume_handle))
    }
}

/// Deletes an attachment, unless its node has begun to use the volume: the cached state may be stale.
async fn detach(client: &Client, detached: &Detached) -> Result<(), kube::Error> {
    if let Some(unique) = &detached.unique {
        let nodes: Api<Node> = Api::all(client.clone());
        let node = nodes.get_opt(&detached.node).await?;
        if node.is_some_and(|node| !is_free(&node, unique)) {
            return Ok(());
        }
    }
    Api::<VolumeAttachment>::all(client.clone())
        .delete(&detached.name, &DeleteParams::default())
        .await
        .map(|_| ())
}

/// How long to wait until a write is visible in the cache.
const CACHE_TIMEOUT: Duration = Duration::from_secs(5);

/// Waits until the cache contains the written node, so that the next decision does
/// not assign the same disk to another node.
async fn wait_until_cached(nodes: &Cache<Node>, written: &Node) {
    let mut changes = nodes.changes();
    let seen = async {
        loop {
            changes.mark_unchanged();
            let known = nodes.get("", &written.name_any());
            if known.is_none_or(|known| revision(&*known) >= revision(written)) {
                return;
            }
            if changes.changed().await.is_err() {
                return;
            }
        }
    };
    if tokio::time::timeout(CACHE_TIMEOUT, seen).await.is_err() {
        tracing::warn!(
            node = written.name_any(),
            "the watch has not shown the volumesAttached that was written to a node's status"
        );
    }
}

async fn execute(client: &Client, nodes: &Cache<Node>, step: Step) -> Result<(), kube::Error> {
    let attachments: Api<VolumeAttachment> = Api::all(client.clone());
    match step {
        Step::Attach(name, attachment) => {
            let body = json!({"metadata": {"name": name}, "spec": {"attacher": attachment.driver, "nodeName": attachment.node, "source": {"persistentVolumeName": attachment.volume}}});
            let body = serde_json::from_value(body).map_err(kube::Error::SerdeError)?;
            attachments
                .create(&PostParams::default(), &body)
                .await
                .map(|_| ())
        }
        Step::Detach(detached) => detach(client, &detached).await,
        Step::SetAttached(node, patch) => {
            let api = Api::<Node>::all(client.clone());
            let (parameters, patch) = (PatchParams::default(), Patch::Merge(patch));
            let written = api.patch_status(&node, &parameters, &patch).await?;
            wait_until_cached(nodes, &written).await;
            Ok(())
        }
    }
}

/// A volume in the form that its driver serves: in-tree volumes are translated to CSI.
fn served(volume: Arc<PersistentVolume>) -> Arc<PersistentVolume> {
    if volume.spec.as_ref().is_some_and(|s| s.csi.is_some()) {
        return volume;
    }
    migrated::persistent(PersistentVolume::clone(&volume)).map_or(volume, Arc::new)
}

/// Whether a pod has claims, or disks that nodes attach.
fn can_need_attachment(pod: &Pod) -> bool {
    let mut volumes = pod::spec(pod).volumes.iter().flatten();
    volumes.any(|v| v.iscsi.is_some() || v.fc.is_some()) || !claims::of_pod(pod).is_empty()
}

/// Runs until the process exits.
pub(super) async fn run(client: Client, caches: Caches) {
    let config = || watcher::Config::default().streaming_lists();
    let drivers: Cache<CSIDriver> = Cache::start(Api::all(client.clone()), config());
    let attachments: Cache<VolumeAttachment> = Cache::start(Api::all(client.clone()), config());
    let nodes: Cache<Node> = Cache::start(Api::all(client.clone()), config());
    tokio::join!(drivers.synced(), attachments.synced(), nodes.synced());
    let mut changes = [
        relevant_changes(&caches.pods, |before, after| {
            before.into_iter().chain(after).any(can_need_attachment)
        }),
        caches.claims.changes(),
        caches.volumes.changes(),
        drivers.changes(),
        attachments.changes(),
        nodes.changes(),
    ];
    let mut emitted: BTreeSet<(String, String)> = BTreeSet::new();
    loop {
        for receiver in &mut changes {
            receiver.mark_unchanged();
        }
        let mut unfinished = false;
        let observed = Observed {
            pods: caches.pods.list(),
            claims: caches.claims.list(),
            volumes: caches.volumes.list().into_iter().map(served).collect(),
            drivers: drivers.list(),
            attachments: attachments.list(),
            nodes: nodes.list(),
        };
        if observed.can_need_attachments() {
            let events = observed.events();
            emitted.retain(|(uid, _)| observed.pods.iter().any(|p| p.uid().as_ref() == Some(uid)));
            for (pod, reason, message) in events {
                if emitted.insert((pod.uid().unwrap_or_default(), message.clone())) {
                    super::event(
                        &client,
                        &*pod,
                        "Pod",
                        "v1",
                        "attachdetach-controller",
                        reason,
                        message,
                    )
                    .await;
                }
            }
            for step in observed.steps() {
                if let Err(error) = execute(&client, &nodes, step).await {
                    unfinished = true;
                    if !is_stale(&error) {
                        tracing::warn!(error = %holdfast_kubeapi::failure::chain(&error), "reconcile of a VolumeAttachment failed, retrying");
                    }
                }
            }
        }
        any_change(
            &mut changes,
            if unfinished {
                Duration::from_millis(500)
            } else {
                Duration::from_secs(60)
            },
        )
        .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one<K: serde::de::DeserializeOwned>(value: Value) -> Vec<Arc<K>> {
        vec![Arc::new(serde_json::from_value(value).expect("an object"))]
    }

    fn node(in_use: &[&str], attached: &[&str]) -> Arc<Node> {
        let attached: Vec<Value> = attached
            .iter()
            .map(|name| json!({"name": name, "devicePath": ""}))
            .collect();
        let status = json!({"volumesInUse": in_use, "volumesAttached": attached});
        one(json!({"metadata": {"name": "here"}, "status": status})).remove(0)
    }

    fn observed(required: bool, in_use: &[&str]) -> Observed {
        Observed {
            pods: one(
                json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {"nodeName": "here", "containers": [],
                "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}}),
            ),
            claims: one(
                json!({"metadata": {"name": "c", "namespace": "n", "annotations": {"pv.kubernetes.io/bind-completed": "yes"}}, "spec": {"volumeName": "pv"}}),
            ),
            volumes: one(
                json!({"metadata": {"name": "pv"}, "spec": {"csi": {"driver": "d", "volumeHandle": "h"}}}),
            ),
            drivers: one(json!({"metadata": {"name": "d"}, "spec": {"attachRequired": required}})),
            attachments: vec![],
            nodes: one(json!({"metadata": {"name": "here"}, "status": {"volumesInUse": in_use}})),
        }
    }

    #[test]
    fn volumes_are_attached_to_the_pods_node_and_detached_after_their_last_use() {
        assert_eq!(observed(false, &[]).steps(), vec![]);
        let mut attached = observed(true, &["kubernetes.io/csi/d^h"]);
        let name = match &attached.steps()[..] {
            [Step::Attach(name, attachment)]
                if attachment.node == "here" && attachment.volume == "pv" =>
            {
                name.clone()
            }
            other => panic!("{other:?}"),
        };
        attached.attachments = one(
            json!({"metadata": {"name": name}, "spec": {"attacher": "d", "nodeName": "here", "source": {"persistentVolumeName": "pv"}},
            "status": {"attached": true}}),
        );
        assert!(
            matches!(&attached.steps()[..], [Step::SetAttached(node, written)] if node == "here" && written["status"]["volumesAttached"][0]["name"] == "kubernetes.io/csi/d^h")
        );
        assert_eq!(
            attached
                .events()
                .iter()
                .map(|(_, reason, _)| *reason)
                .collect::<Vec<_>>(),
            ["SuccessfulAttachVolume"]
        );
        let mut failing = observed(true, &[]);
        failing.attachments = one(
            json!({"metadata": {"name": name}, "spec": {"attacher": "d", "nodeName": "here", "source": {"persistentVolumeName": "pv"}},
            "status": {"attached": false, "attachError": {"message": "no room"}}}),
        );
        assert!(
            matches!(&failing.events()[..], [(_, "FailedAttachVolume", why)] if why.ends_with("\"pv\" : no room"))
        );
        attached.nodes[0] = node(&["kubernetes.io/csi/d^h"], &["kubernetes.io/csi/d^h"]);
        attached.pods.clear();
        assert_eq!(
            attached.steps(),
            [],
            "no step while the node has the volume mounted"
        );
        // The volume is removed from the list before it is detached: a node may mount a listed volume.
        attached.nodes[0] = node(&[], &["kubernetes.io/csi/d^h"]);
        let written = json!({"status": {"volumesAttached": []}});
        assert_eq!(
            attached.steps(),
            [Step::SetAttached("here".into(), written)]
        );
        attached.nodes[0] = node(&[], &[]);
        assert!(
            matches!(&attached.steps()[..], [Step::Detach(detached)] if detached.name == name && detached.node == "here")
        );
        // Use by another node does not block the detachment.
        let mut other = Node::clone(&node(&["kubernetes.io/csi/d^h"], &[]));
        other.metadata.name = Some("other".into());
        attached.nodes.push(Arc::new(other));
        assert!(matches!(&attached.steps()[..], [Step::Detach(_)]));
    }

    #[test]
    fn an_attachment_that_is_being_deleted_is_not_attached() {
        let mut observed = observed(true, &["kubernetes.io/csi/d^h"]);
        let name = csi::attachment_name("d", "h", "here");
        observed.attachments = one(
            json!({"metadata": {"name": name, "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["a"]},
            "spec": {"attacher": "d", "nodeName": "here", "source": {"persistentVolumeName": "pv"}}, "status": {"attached": true}}),
        );
        assert_eq!((observed.steps(), observed.events()), (vec![], vec![]));
        observed.nodes[0] = node(&[], &["kubernetes.io/csi/d^h"]);
        let written = json!({"status": {"volumesAttached": []}});
        assert_eq!(
            observed.steps(),
            [Step::SetAttached("here".into(), written)]
        );
        observed.attachments.clear();
        observed.nodes[0] = node(&[], &[]);
        assert!(matches!(&observed.steps()[..], [Step::Attach(..)]));
    }
}
