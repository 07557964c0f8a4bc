//! The ReplicaSet controller: keeps the requested number of pods (`pkg/controller/replicaset/replica_set.go`).

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tokio::time::Instant;

use super::Caches;
use super::Pending;
use super::any_change;
use super::controller_of;
use super::event;
use super::owned::{ByOwner, Failures, create, owner};
use crate::api::selector::Selector;
use holdfast_core::backoff::Doubling;
use holdfast_core::pod;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::cache::{Key, key, revision};

/// Maximum number of pods created or deleted in one reconciliation.
const MAX_PODS_AT_ONCE: usize = 500;
const COMPONENT: &str = "replicaset-controller";

/// Initial and maximum back-off after a failed creation.
const RETRY: Doubling = Doubling::new(Duration::from_secs(1), Duration::from_secs(120));

/// The next steps for one ReplicaSet.
#[derive(Debug, Default, PartialEq)]
struct Plan {
    adopt: Vec<String>,
    release: Vec<String>,
    create: usize,
    delete: Vec<String>,
    status: serde_json::Value,
}

fn is_active(pod: &Pod) -> bool {
    !pod::is_terminal(pod) && pod.metadata.deletion_timestamp.is_none()
}

fn ready_since(pod: &Pod) -> Option<jiff::Timestamp> {
    let conditions = pod.status.as_ref()?.conditions.as_deref()?;
    let ready = conditions
        .iter()
        .find(|c| c.type_ == "Ready" && c.status == "True")?;
    Some(
        ready
            .last_transition_time
            .as_ref()
            .map_or(jiff::Timestamp::UNIX_EPOCH, |t| t.0),
    )
}

/// The order in which surplus pods are deleted, lowest first (upstream's `ActivePodsWithRanks` in
/// `pkg/controller/controller_utils.go`).
pub(super) fn deletion_rank(
    pod: &Pod,
    now: jiff::Timestamp,
) -> (bool, u8, bool, i64, i64, i64, i64) {
    let assigned = pod
        .spec
        .as_ref()
        .and_then(|s| s.node_name.as_deref())
        .is_some_and(|n| !n.is_empty());
    let phase = match pod::phase(pod) {
        "Pending" => 0,
        "Unknown" => 1,
        _ => 2,
    };
    let cost = pod
        .annotations()
        .get("controller.kubernetes.io/pod-deletion-cost")
        .and_then(|c| c.parse().ok())
        .unwrap_or(0);
    let ready = ready_since(pod);
    let ready_for = ready.map_or(0, |t| {
        i64::from((now.as_second() - t.as_second()).max(1).ilog2())
    });
    let restarts: i32 = pod
        .status
        .iter()
        .flat_map(|s| s.container_statuses.iter().flatten())
        .map(|s| s.restart_count)
        .sum();
    let age = now.as_second()
        - pod
            .metadata
            .creation_timestamp
            .as_ref()
            .map_or(0, |t| t.0.as_second());
    (
        assigned,
        phase,
        ready.is_some(),
        cost,
        ready_for,
        -i64::from(restarts),
        age,
    )
}

/// Decides the next steps from the set, all pods of its namespace, and the time.
fn plan(set: &ReplicaSet, pods: &[Arc<Pod>], now: jiff::Timestamp) -> Plan {
    let mut plan = Plan::default();
    let uid = set.uid().unwrap_or_default();
    let Some(spec) = &set.spec else { return plan };
    let selector = serde_json::to_value(&spec.selector)
        .ok()
        .and_then(|s| Selector::of_object(&s));
    let deleting = set.metadata.deletion_timestamp.is_some();
    let mut owned: Vec<&Arc<Pod>> = Vec::new();
    let here = &set.metadata.namespace;
    for pod in pods.iter().filter(|p| p.metadata.namespace == *here) {
        let matches = selector
            .as_ref()
            .is_some_and(|s| s.matches_labels(pod.labels()));
        match controller_of(&**pod) {
            Some(owner) if owner == uid && matches => owned.push(pod),
            Some(owner) if owner == uid => plan.release.push(pod.name_any()),
            None if matches && !deleting && is_active(pod) => plan.adopt.push(pod.name_any()),
            _ => {}
        }
    }
    let active: Vec<&Arc<Pod>> = owned.iter().copied().filter(|p| is_active(p)).collect();
    let wanted = usize::try_from(spec.replicas.unwrap_or(1)).unwrap_or(0);
    if !deleting {
        let have = active.len() + plan.adopt.len();
        plan.create = wanted.saturating_sub(have).min(MAX_PODS_AT_ONCE);
        let mut ranked = active.clone();
        ranked.sort_by_cached_key(|p| deletion_rank(p, now));
        plan.delete = ranked
            .iter()
            .take(have.saturating_sub(wanted).min(MAX_PODS_AT_ONCE))
            .map(|p| p.name_any())
            .collect();
    }
    let ready: Vec<jiff::Timestamp> = active.iter().filter_map(|p| ready_since(p)).collect();
    let minimum = i64::from(spec.min_ready_seconds.unwrap_or(0));
    let available = ready
        .iter()
        .filter(|t| now.as_second() - t.as_second() >= minimum)
        .count();
    let template = spec
        .template
        .as_ref()
        .and_then(|t| t.metadata.as_ref())
        .and_then(|m| m.labels.clone())
        .unwrap_or_default();
    let labelled = active
        .iter()
        .filter(|p| template.iter().all(|(k, v)| p.labels().get(k) == Some(v)))
        .count();
    let terminating = owned
        .iter()
        .filter(|p| p.metadata.deletion_timestamp.is_some())
        .count();
    plan.status = json!({
        "replicas": active.len(), "fullyLabeledReplicas": labelled, "readyReplicas": ready.len(), "availableReplicas": available,
        "terminatingReplicas": terminating, "observedGeneration": set.metadata.generation,
    });
    plan
}

pub(super) async fn run(client: Client, caches: Caches) {
    let mut changes = [caches.replica_sets.changes(), caches.pods.changes()];
    let (pending, failures) = (Arc::new(Pending::default()), Failures::new(RETRY));
    loop {
        for receiver in &mut changes {
            receiver.mark_unchanged();
        }
        let seen = |(namespace, name): &Key| {
            let pod = caches.pods.get(namespace, name).map(|p| revision(&*p));
            let set = || caches.replica_sets.get(namespace, name);
            pod.or_else(|| set().map(|s| revision(&*s)))
        };
        let settled = pending.all_settled(&caches.replica_sets.list(), seen);
        let (sets, pods) = (caches.replica_sets.list(), caches.pods.list());
        let of = ByOwner::of(&pods);
        let ready = sets.iter().filter(|set| {
            set.metadata
                .uid
                .as_ref()
                .is_some_and(|uid| settled.contains(uid))
        });
        let work = ready.map(|set| {
            let (client, pending, failures) = (client.clone(), &pending, &failures);
            // The set's own pods, and pods that it may adopt.
            let (namespace, _) = key(&**set);
            let own = of.get(&namespace, set.metadata.uid.as_deref().unwrap_or_default());
            let free = of.get(&namespace, "");
            let pods: Vec<Arc<Pod>> = own.iter().chain(free).map(|pod| Arc::clone(pod)).collect();
            async move { reconcile(&client, set, &pods, pending, failures).await }
        });
        futures::future::join_all(work).await;
        failures.keep(&sets);
        any_change(&mut changes, Duration::from_secs(5)).await;
    }
}

async fn reconcile(
    client: &Client,
    set: &ReplicaSet,
    pods: &[Arc<Pod>],
    pending: &Pending,
    failures: &Failures,
) {
    let plan = plan(set, pods, jiff::Timestamp::now());
    let (namespace, name) = key(set);
    let uid = set.uid().unwrap_or_default();
    let api: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    for pod in &plan.adopt {
        let patch = json!({"metadata": {"ownerReferences": [owner(set)]}});
        record_patch(
            api.patch(pod, &PatchParams::default(), &Patch::Strategic(patch))
                .await,
            &uid,
            pending,
            "adopting a pod",
        );
    }
    for pod in &plan.release {
        let patch = json!({"metadata": {"ownerReferences": [{"$patch": "delete", "uid": uid}]}});
        record_patch(
            api.patch(pod, &PatchParams::default(), &Patch::Strategic(patch))
                .await,
            &uid,
            pending,
            "releasing a pod",
        );
    }
    if plan.create > 0 && failures.pause(set, Instant::now()).is_none() {
        let pods = vec![new_pod(set); plan.create];
        let (_, failure) = create(client, (set, COMPONENT), &pods, pending).await;
        failures.record_result(set, failure.is_some(), Instant::now());
    }
    let deletions = plan.delete.iter().map(|pod| {
        let api = &api;
        async move { (pod, api.delete(pod, &DeleteParams::background()).await) }
    });
    for (pod, result) in futures::future::join_all(deletions).await {
        match result {
            Ok(marked) => {
                if let Some(marked) = marked {
                    pending.record_deletion(&uid, &marked);
                }
                event(
                    client,
                    set,
                    "ReplicaSet",
                    "apps/v1",
                    COMPONENT,
                    "SuccessfulDelete",
                    format!("Deleted pod: {pod}"),
                )
                .await;
            }
            Err(error) => tracing::debug!(%error, pod, "deleting a surplus pod failed"),
        }
    }
    let current = set
        .status
        .as_ref()
        .and_then(|s| serde_json::to_value(s).ok())
        .unwrap_or_default();
    let differs = plan
        .status
        .as_object()
        .into_iter()
        .flatten()
        .any(|(k, v)| current.get(k).map_or(v != 0, |c| c != v));
    if differs {
        let sets: Api<ReplicaSet> = Api::namespaced(client.clone(), &namespace);
        let patch = json!({"status": plan.status});
        if let Err(error) = sets
            .patch_status(&name, &PatchParams::default(), &Patch::Merge(patch))
            .await
        {
            tracing::debug!(%error, name, "writing a ReplicaSet's status failed");
        }
    }
}

fn record_patch(result: Result<Pod, kube::Error>, owner: &str, pending: &Pending, what: &str) {
    match result {
        Ok(pod) => pending.record_write(owner, &pod),
        Err(error) => tracing::debug!(%error, "{what} failed"),
    }
}

fn new_pod(set: &ReplicaSet) -> Pod {
    let template = set
        .spec
        .as_ref()
        .and_then(|s| s.template.clone())
        .unwrap_or_default();
    let mut metadata = template.metadata.unwrap_or_default();
    metadata.name = None;
    metadata.generate_name = Some(format!("{}-", set.name_any()));
    metadata.namespace = set.namespace();
    metadata.owner_references = Some(vec![owner(set)]);
    Pod {
        metadata,
        spec: template.spec,
        status: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(replicas: i32) -> ReplicaSet {
        serde_json::from_value(json!({
            "metadata": {"name": "s", "namespace": "n", "uid": "u"},
            "spec": {"replicas": replicas, "selector": {"matchLabels": {"a": "1"}}, "template": {"metadata": {"labels": {"a": "1"}}}},
        }))
        .expect("a set")
    }

    fn pod(name: &str, owner: Option<&str>, label: &str, ready: bool) -> Arc<Pod> {
        let owners: Vec<_> =
            owner.iter().map(|o| json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "s", "uid": o, "controller": true})).collect();
        let conditions = if ready {
            json!([{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}])
        } else {
            json!([])
        };
        Arc::new(
            serde_json::from_value(json!({
                "metadata": {"name": name, "namespace": "n", "labels": {"a": label}, "ownerReferences": owners, "creationTimestamp": "2026-01-01T00:00:00Z"},
                "spec": {"nodeName": "x", "containers": []}, "status": {"phase": if ready { "Running" } else { "Pending" }, "conditions": conditions},
            }))
            .expect("a pod"),
        )
    }

    #[test]
    fn pods_are_created_deleted_adopted_or_released_to_match_replicas() {
        let now = "2026-01-02T00:00:00Z".parse().expect("a time");
        let mine = |name, ready| pod(name, Some("u"), "1", ready);
        let p = plan(&set(3), &[mine("a", true)], now);
        assert_eq!((p.create, p.delete.len()), (2, 0));
        let p = plan(
            &set(1),
            &[mine("a", true), mine("b", false), mine("c", true)],
            now,
        );
        assert_eq!(p.delete[0], "b", "the unready pod is deleted first");
        assert_eq!(p.delete.len(), 2);
        let p = plan(&set(1), &[pod("o", None, "1", true)], now);
        assert_eq!((p.create, p.adopt), (0, vec!["o".to_owned()]));
        let p = plan(&set(1), &[pod("r", Some("u"), "2", true)], now);
        assert_eq!((p.create, p.release), (1, vec!["r".to_owned()]));
        let p = plan(&set(1), &[pod("f", Some("other"), "1", true)], now);
        assert_eq!((p.create, p.status["readyReplicas"].clone()), (1, json!(0)));
    }
}
