//! Volumes of storage drivers that have to be attached to a node before it can mount them: asked for when a pod
//! goes there, and taken back after the last one (control-plane spec, chapter 8; kubelet spec, 9.2). The driver's
//! own attacher does the work.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use super::Caches;
use super::any_change;
use crate::core::{
    pod,
    volume::{claims, csi, migrated},
};
use crate::kubeapi::Cache;
use crate::kubeapi::client::code;

/// An attachment that should be.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Wanted {
    driver: String,
    node: String,
    volume: String,
    /// The name that nodes know the volume by.
    unique: String,
}

/// What there is.
struct World {
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
    Detach(String),
    /// What a node is told of its volumes.
    Tell(String, Value),
}

impl World {
    /// All attachments that pods need: the pod, the attachment's name and what it is.
    fn needs(&self) -> Vec<(&Arc<Pod>, String, Wanted)> {
        let mut needs = vec![];
        for pod in self.pods.iter().filter(|p| !pod::is_terminal(p)) {
            let Some(node) = pod::spec(pod).node_name.clone().filter(|n| !n.is_empty()) else {
                continue;
            };
            for (_, name) in claims::of_pod(pod) {
                let claim = self.claims.iter().find(|c| {
                    c.metadata.namespace == pod.metadata.namespace && c.name_any() == name
                });
                let bound = claim.and_then(|c| claims::bound(c));
                let Some(volume) =
                    bound.and_then(|b| self.volumes.iter().find(|v| v.name_any() == b))
                else {
                    continue;
                };
                let Some(source) = volume.spec.as_ref().and_then(|s| s.csi.as_ref()) else {
                    continue;
                };
                let driver = self.drivers.iter().find(|d| d.name_any() == source.driver);
                if driver.is_some_and(|d| d.spec.attach_required == Some(false)) {
                    continue;
                }
                let name = csi::attachment_name(&source.driver, &source.volume_handle, &node);
                let unique = csi::unique_name(&source.driver, &source.volume_handle);
                needs.push((
                    pod,
                    name,
                    Wanted {
                        driver: source.driver.clone(),
                        node: node.clone(),
                        volume: volume.name_any(),
                        unique,
                    },
                ));
            }
        }
        needs
    }

    /// What the users of waiting pods are told: the pod, a reason and a message (kubelet spec, 9.4).
    fn news(&self) -> Vec<(Arc<Pod>, &'static str, String)> {
        let mut news = vec![];
        for (pod, name, attachment) in self
            .needs()
            .into_iter()
            .filter(|(pod, ..)| pod::phase(pod) == "Pending")
        {
            let status = self
                .attachments
                .iter()
                .find(|a| a.name_any() == name)
                .and_then(|a| a.status.as_ref());
            let failed = status
                .and_then(|s| s.attach_error.as_ref())
                .map(|e| e.message.clone().unwrap_or_default());
            let volume = &attachment.volume;
            match (status.is_some_and(|s| s.attached), failed) {
                (true, _) => {
                    news.push((
                        Arc::clone(pod),
                        "SuccessfulAttachVolume",
                        format!("AttachVolume.Attach succeeded for volume {volume:?} "),
                    ));
                }
                (false, Some(why)) => news.push((
                    Arc::clone(pod),
                    "FailedAttachVolume",
                    format!("AttachVolume.Attach failed for volume {volume:?} : {why}"),
                )),
                (false, None) => {}
            }
        }
        news
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
        let in_use: BTreeSet<&String> = self
            .nodes
            .iter()
            .flat_map(|n| {
                n.status
                    .as_ref()
                    .and_then(|s| s.volumes_in_use.as_ref())
                    .into_iter()
                    .flatten()
            })
            .collect();
        let unique = |attachment: &VolumeAttachment| {
            let volume = attachment.spec.source.persistent_volume_name.as_ref()?;
            let source = self
                .volumes
                .iter()
                .find(|v| v.name_any() == *volume)?
                .spec
                .as_ref()?
                .csi
                .as_ref()?;
            Some(csi::unique_name(&source.driver, &source.volume_handle))
        };
        for attachment in self
            .attachments
            .iter()
            .filter(|a| a.metadata.deletion_timestamp.is_none())
        {
            let held = unique(attachment).is_some_and(|u| in_use.contains(&u));
            if !wanted.contains_key(&attachment.name_any()) && !held {
                steps.push(Step::Detach(attachment.name_any()));
            }
        }
        for node in &self.nodes {
            let attached = self.attachments.iter().filter(|a| {
                a.spec.node_name == node.name_any() && a.status.as_ref().is_some_and(|s| s.attached)
            });
            let names: BTreeSet<String> = attached.filter_map(|a| unique(a)).collect();
            let known: BTreeSet<String> = node
                .status
                .as_ref()
                .and_then(|s| s.volumes_attached.as_ref())
                .into_iter()
                .flatten()
                .map(|v| v.name.clone())
                .collect();
            if names != known {
                let list: Vec<Value> = names
                    .iter()
                    .map(|name| json!({"name": name, "devicePath": ""}))
                    .collect();
                steps.push(Step::Tell(
                    node.name_any(),
                    json!({"status": {"volumesAttached": list}}),
                ));
            }
        }
        steps
    }
}

async fn take(client: &Client, step: Step) -> Result<(), kube::Error> {
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
        Step::Detach(name) => attachments
            .delete(&name, &DeleteParams::default())
            .await
            .map(|_| ()),
        Step::Tell(node, patch) => Api::<Node>::all(client.clone())
            .patch_status(&node, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .map(|_| ()),
    }
}

/// A volume as its driver serves it.
fn served(volume: Arc<PersistentVolume>) -> Arc<PersistentVolume> {
    if volume.spec.as_ref().is_some_and(|s| s.csi.is_some()) {
        return volume;
    }
    migrated::persistent(PersistentVolume::clone(&volume)).map_or(volume, Arc::new)
}

/// Runs until the process ends.
pub(super) async fn run(client: Client, caches: Caches) {
    let config = || watcher::Config::default().streaming_lists();
    let drivers: Cache<CSIDriver> = Cache::start(Api::all(client.clone()), config());
    let attachments: Cache<VolumeAttachment> = Cache::start(Api::all(client.clone()), config());
    let nodes: Cache<Node> = Cache::start(Api::all(client.clone()), config());
    tokio::join!(drivers.synced(), attachments.synced(), nodes.synced());
    let mut changes = [
        caches.pods.changes(),
        caches.claims.changes(),
        caches.volumes.changes(),
        drivers.changes(),
        attachments.changes(),
        nodes.changes(),
    ];
    let mut said: BTreeSet<(String, String)> = BTreeSet::new();
    loop {
        for receiver in &mut changes {
            receiver.mark_unchanged();
        }
        let mut unfinished = false;
        // Without volumes of drivers there is nothing to attach: most clusters here have none.
        let volumes: Vec<_> = caches.volumes.list().into_iter().map(served).collect();
        if volumes
            .iter()
            .any(|v| v.spec.as_ref().is_some_and(|s| s.csi.is_some()))
            || !attachments.list().is_empty()
        {
            let world = World {
                pods: caches.pods.list(),
                claims: caches.claims.list(),
                volumes,
                drivers: drivers.list(),
                attachments: attachments.list(),
                nodes: nodes.list(),
            };
            let news = world.news();
            said.retain(|(uid, _)| world.pods.iter().any(|p| p.uid().as_ref() == Some(uid)));
            for (pod, reason, message) in news {
                if said.insert((pod.uid().unwrap_or_default(), message.clone())) {
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
            for step in world.steps() {
                if let Err(error) = take(&client, step).await {
                    unfinished = true;
                    if !matches!(code(&error), Some(404 | 409)) {
                        tracing::warn!(error = %crate::kubeapi::client::chain(&error), "reconcile of a VolumeAttachment failed, retrying");
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

    fn world(required: bool, in_use: &[&str]) -> World {
        World {
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
    fn volumes_are_attached_where_pods_are_and_kept_while_they_are_in_use() {
        assert_eq!(world(false, &[]).steps(), vec![]);
        let mut attached = world(true, &["kubernetes.io/csi/d^h"]);
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
            matches!(&attached.steps()[..], [Step::Tell(node, told)] if node == "here" && told["status"]["volumesAttached"][0]["name"] == "kubernetes.io/csi/d^h")
        );
        assert_eq!(
            attached
                .news()
                .iter()
                .map(|(_, reason, _)| *reason)
                .collect::<Vec<_>>(),
            ["SuccessfulAttachVolume"]
        );
        let mut failing = world(true, &[]);
        failing.attachments = one(
            json!({"metadata": {"name": name}, "spec": {"attacher": "d", "nodeName": "here", "source": {"persistentVolumeName": "pv"}},
            "status": {"attached": false, "attachError": {"message": "no room"}}}),
        );
        assert!(
            matches!(&failing.news()[..], [(_, "FailedAttachVolume", why)] if why.ends_with("\"pv\" : no room"))
        );
        attached.pods.clear();
        assert!(
            !attached
                .steps()
                .iter()
                .any(|s| matches!(s, Step::Detach(_))),
            "the node still has it mounted"
        );
        attached.nodes = world(true, &[]).nodes;
        assert!(attached.steps().contains(&Step::Detach(name)));
    }
}
