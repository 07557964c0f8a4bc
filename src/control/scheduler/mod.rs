//! The scheduler: finds a node for every pod that has none (control-plane spec, chapter 8).
//!
//! `fit` decides; this file watches, binds and reports. What has been bound but not seen yet counts
//! as there, so that a burst does not overfill a node.

mod fit;
mod storage;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{
    Binding, ObjectReference, PersistentVolume, PersistentVolumeClaim, Pod,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tokio::time::Instant;

use super::controllers::Caches;
use crate::core::backoff::Doubling;
use crate::kubeapi::Api;
use storage::{Storage, Wanted};

/// A pod that did not fit is looked at again after this long at the latest, doubling up to the maximum.
const RETRY: Doubling = Doubling::new(Duration::from_secs(1), Duration::from_secs(10));

struct Waiting {
    message: String,
    next: Instant,
    retry: Doubling,
}

/// Schedules until the process ends.
pub async fn run(client: Client, caches: Caches) {
    let Caches {
        pods,
        nodes,
        claims,
        volumes,
        classes,
        ..
    } = caches;
    tokio::join!(
        pods.synced(),
        nodes.synced(),
        claims.synced(),
        volumes.synced(),
        classes.synced()
    );
    let mut assumed: HashMap<String, String> = HashMap::new();
    let mut waiting: HashMap<String, Waiting> = HashMap::new();
    let (mut pod_changes, mut node_changes) = (pods.changes(), nodes.changes());
    let (mut claim_changes, mut volume_changes) = (claims.changes(), volumes.changes());
    loop {
        pod_changes.mark_unchanged();
        node_changes.mark_unchanged();
        claim_changes.mark_unchanged();
        volume_changes.mark_unchanged();
        let all = pods.list();
        let mut queue: Vec<&Arc<Pod>> = all.iter().filter(|p| wants_node(p)).collect();
        queue.sort_by_key(|p| {
            (
                std::cmp::Reverse(p.spec.as_ref().and_then(|s| s.priority).unwrap_or(0)),
                p.metadata.creation_timestamp.as_ref().map(|t| t.0),
                p.name_any(),
            )
        });
        assumed.retain(|uid, _| queue.iter().any(|p| p.metadata.uid.as_deref() == Some(uid)));
        waiting.retain(|uid, _| queue.iter().any(|p| p.metadata.uid.as_deref() == Some(uid)));
        let node_list = nodes.list();
        let mut storage = Storage {
            claims: claims.list(),
            volumes: volumes.list(),
            classes: classes.list(),
        };
        let mut bindings = Vec::new();
        for pod in queue {
            let uid = pod.uid().unwrap_or_default();
            if assumed.contains_key(&uid) {
                continue;
            }
            let chosen = fit::choose(pod, &node_list, &all, &assumed, &storage);
            // Claims that waited for their consumer are bound first; then the pod comes again.
            if let Ok(node) = &chosen
                && let Some(node) = node_list.iter().find(|n| n.name_any() == *node)
                && let Some(wanted) = storage.reserve(pod, node)
            {
                waiting.remove(&uid);
                select(&client, wanted).await;
                continue;
            }
            match chosen {
                Ok(node) => {
                    assumed.insert(uid.clone(), node.clone());
                    waiting.remove(&uid);
                    let (client, pod) = (client.clone(), Arc::clone(pod));
                    bindings.push(async move { (uid, bind(&client, &pod, &node).await) });
                }
                Err(message) => refuse(&client, pod, message, &mut waiting).await,
            }
        }
        for (uid, bound) in futures::future::join_all(bindings).await {
            if !bound {
                assumed.remove(&uid);
            }
        }
        let most = waiting
            .values()
            .map(|w| w.next)
            .min()
            .map_or(Duration::from_secs(30), |next| {
                next.saturating_duration_since(Instant::now())
            });
        tokio::select! {
            // All are cancel-safe: nothing is lost that the next round does not read anew.
            _ = pod_changes.changed() => {}
            _ = node_changes.changed() => {}
            _ = claim_changes.changed() => {}
            _ = volume_changes.changed() => {}
            () = tokio::time::sleep(most.max(Duration::from_millis(20))) => {}
        }
    }
}

/// Tells the binder what the claims of a pod that has a node are to be bound to.
async fn select(client: &Client, wanted: Vec<Wanted>) {
    for desired in wanted {
        let (name, result) = match desired {
            Wanted::Volume(volume, patch) => {
                let api: Api<PersistentVolume> = Api::all(client.clone());
                let name = volume.name_any();
                (
                    name.clone(),
                    api.patch(&name, &PatchParams::default(), &Patch::Merge(patch))
                        .await
                        .map(|_| ()),
                )
            }
            Wanted::Node(claim, patch) => {
                let api: Api<PersistentVolumeClaim> =
                    Api::namespaced(client.clone(), &claim.namespace().unwrap_or_default());
                let name = claim.name_any();
                (
                    name.clone(),
                    api.patch(&name, &PatchParams::default(), &Patch::Merge(patch))
                        .await
                        .map(|_| ()),
                )
            }
        };
        if let Err(error) = result {
            tracing::debug!(%error, name, "what a claim is to be bound to could not be written; it is decided anew");
        }
    }
}

fn wants_node(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    spec.node_name.as_deref().is_none_or(str::is_empty)
        && pod.metadata.deletion_timestamp.is_none()
        && spec
            .scheduler_name
            .as_deref()
            .unwrap_or("default-scheduler")
            == "default-scheduler"
        && spec.scheduling_gates.as_ref().is_none_or(Vec::is_empty)
}

async fn bind(client: &Client, pod: &Pod, node: &str) -> bool {
    let (namespace, name) = crate::kubeapi::cache::key(pod);
    let binding = Binding {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            namespace: Some(namespace.clone()),
            uid: pod.uid(),
            ..ObjectMeta::default()
        },
        target: ObjectReference {
            kind: Some("Node".into()),
            name: Some(node.into()),
            ..ObjectReference::default()
        },
    };
    let api: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let result: Result<k8s_openapi::apimachinery::pkg::apis::meta::v1::Status, kube::Error> =
        api.create_below(&name, "binding", &binding).await;
    match result {
        Ok(_) => {
            event(
                client,
                pod,
                "Scheduled",
                format!("Successfully assigned {namespace}/{name} to {node}"),
            )
            .await;
            true
        }
        Err(error) => {
            tracing::debug!(%error, name, "binding a pod failed; it is scheduled anew");
            false
        }
    }
}

/// Says once per change of reason why a pod fits nowhere.
async fn refuse(
    client: &Client,
    pod: &Pod,
    message: String,
    waiting: &mut HashMap<String, Waiting>,
) {
    let uid = pod.uid().unwrap_or_default();
    let now = Instant::now();
    let known = waiting.get(&uid);
    let mut retry = known.map_or(RETRY, |w| w.retry);
    let news = known.is_none_or(|w| w.message != message);
    if known.is_some_and(|w| w.next > now && w.message == message) {
        return;
    }
    waiting.insert(
        uid,
        Waiting {
            message: message.clone(),
            next: now + retry.pause(),
            retry,
        },
    );
    if !news {
        return;
    }
    let (namespace, name) = crate::kubeapi::cache::key(pod);
    let api: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let patch = json!({"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message,
        "lastTransitionTime": super::api::object::now(), "observedGeneration": pod.metadata.generation}]}});
    if let Err(error) = api
        .patch_status(&name, &PatchParams::default(), &Patch::Strategic(patch))
        .await
    {
        tracing::debug!(%error, name, "writing why a pod is unschedulable failed");
    }
    event(client, pod, "FailedScheduling", message).await;
}

async fn event(client: &Client, pod: &Pod, reason: &str, message: String) {
    super::controllers::event(
        client,
        pod,
        "Pod",
        "v1",
        "default-scheduler",
        reason,
        message,
    )
    .await;
}
