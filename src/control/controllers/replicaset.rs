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
use super::event;
use super::owned::{Failures, create, owner};
use super::runtime::{Expectations, Keys, Next, unseen};
use super::{controller_of, controller_reference, is_stale};
use crate::api::selector::Selector;
use holdfast_core::backoff::Doubling;
use holdfast_core::pod;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::cache::{Key, key};

/// Maximum number of pods created or deleted in one reconciliation.
const MAX_PODS_AT_ONCE: usize = 500;
const COMPONENT: &str = "replicaset-controller";
/// Number of sets reconciled concurrently. Concurrent writes share a sync of the store.
const WORKERS: usize = 16;

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
    /// When the next ready pod has been ready for `minReadySeconds`.
    wake: Option<Duration>,
}

/// What to reconcile.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Work {
    Set(Key),
    /// A pod without a controller: the sets that may adopt it.
    FreePod(Key),
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

fn selector(set: &ReplicaSet) -> Option<Selector> {
    let selector = serde_json::to_value(&set.spec.as_ref()?.selector).ok()?;
    Selector::of_object(&selector)
}

/// The attributes of a pod that its set depends on.
fn observed(pod: &Pod) -> impl PartialEq {
    (
        controller_of(pod),
        &pod.metadata.labels,
        pod.metadata.deletion_timestamp.is_some(),
        pod::phase(pod),
        ready_since(pod),
    )
}

/// The work that a change of a pod requires.
fn work_of_pod(before: Option<&Pod>, after: Option<&Pod>) -> Vec<Work> {
    if before.map(observed) == after.map(observed) {
        return vec![];
    }
    let set = |pod: &Pod| {
        let namespace = pod.namespace().unwrap_or_default();
        let owner = controller_reference(pod).filter(|o| o.kind == "ReplicaSet")?;
        Some(Work::Set((namespace, owner.name.clone())))
    };
    let sets = before.into_iter().chain(after).filter_map(set);
    let free = after.filter(|pod| controller_of(*pod).is_none());
    sets.chain(free.map(|pod| Work::FreePod(key(pod))))
        .collect()
}

/// Decides the next steps from the set, all pods of its namespace, and the time.
fn plan(set: &ReplicaSet, pods: &[Arc<Pod>], now: jiff::Timestamp) -> Plan {
    let mut plan = Plan::default();
    let uid = set.uid().unwrap_or_default();
    let Some(spec) = &set.spec else { return plan };
    let selector = selector(set);
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
    let left = |t: &jiff::Timestamp| minimum.saturating_sub(now.as_second() - t.as_second());
    let available = ready.iter().filter(|t| left(t) <= 0).count();
    let waits = ready.iter().map(left).filter(|left| *left > 0).min();
    plan.wake = waits
        .and_then(|left| u64::try_from(left).ok())
        .map(Duration::from_secs);
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

/// What the workers share.
struct Controller {
    client: Client,
    caches: Caches,
    keys: Arc<Keys<Work>>,
    /// Writes to pods that are not visible in the cache yet, by set.
    expected: Expectations,
    failures: Failures,
}

pub(super) async fn run(client: Client, caches: Caches) {
    let controller = Controller {
        client,
        keys: Keys::new(),
        expected: Expectations::of(&caches.pods),
        caches,
        failures: Failures::new(RETRY),
    };
    let (keys, caches) = (&controller.keys, &controller.caches);
    keys.watch(&caches.replica_sets, |before, after| {
        after.or(before).map(|set| Work::Set(key(set)))
    });
    keys.watch(&caches.pods, work_of_pod);
    let work = |work| controller.turn(work);
    keys.work(WORKERS, work).await;
}

impl Controller {
    async fn turn(&self, work: Work) -> Next {
        match work {
            Work::FreePod(pod) => {
                self.offer(&pod);
                Next::Done
            }
            Work::Set(set) => self.reconcile_set(&set).await,
        }
    }

    /// Queues the sets whose selector matches a pod without a controller.
    fn offer(&self, (namespace, name): &Key) {
        let pod = self.caches.pods.get(namespace, name);
        let Some(pod) = pod.filter(|pod| controller_of(&**pod).is_none() && is_active(pod)) else {
            return;
        };
        for set in self.caches.sets_in.get(namespace) {
            if selector(&set).is_some_and(|s| s.matches_labels(pod.labels())) {
                self.keys.add(Work::Set(key(&*set)));
            }
        }
    }

    async fn reconcile_set(&self, set: &Key) -> Next {
        let caches = &self.caches;
        if let Some(left) = unseen([&self.expected], set) {
            // The change that shows the write queues the set again.
            return Next::After(left);
        }
        let Some(found) = caches.replica_sets.get(&set.0, &set.1) else {
            self.expected.forget(set);
            self.failures.forget(set);
            return Next::Done;
        };
        // The set's own pods, and pods that it may adopt.
        let mut pods = caches.pods_of.get(&found.uid().unwrap_or_default());
        pods.extend(caches.free_pods.get(&set.0));
        reconcile(&self.client, &found, &pods, &self.expected, &self.failures).await
    }
}

async fn reconcile(
    client: &Client,
    set: &ReplicaSet,
    pods: &[Arc<Pod>],
    expected: &Expectations,
    failures: &Failures,
) -> Next {
    let plan = plan(set, pods, jiff::Timestamp::now());
    let set_key = key(set);
    let (namespace, name) = &set_key;
    let uid = set.uid().unwrap_or_default();
    let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let (mut complete, mut wake) = (true, plan.wake);
    for pod in &plan.adopt {
        let patch = json!({"metadata": {"ownerReferences": [owner(set)]}});
        let (parameters, patch) = (PatchParams::default(), Patch::Strategic(patch));
        let patched = api.patch(pod, &parameters, &patch).await;
        complete &= record_patch(patched, &set_key, expected, "adopting a pod");
    }
    for pod in &plan.release {
        let patch = json!({"metadata": {"ownerReferences": [{"$patch": "delete", "uid": uid}]}});
        let (parameters, patch) = (PatchParams::default(), Patch::Strategic(patch));
        let patched = api.patch(pod, &parameters, &patch).await;
        complete &= record_patch(patched, &set_key, expected, "releasing a pod");
    }
    if plan.create > 0 {
        let mut pause = failures.pause(set, Instant::now());
        if pause.is_none() {
            let pods = vec![new_pod(set); plan.create];
            let record = |pod: &Pod| expected.record(&set_key, pod);
            let (_, failure) = create(client, (set, COMPONENT), &pods, record).await;
            pause = failures.record_result(set, failure.is_some(), Instant::now());
        }
        wake = wake.into_iter().chain(pause).min();
    }
    let deletions = plan.delete.iter().map(|pod| {
        let api = &api;
        async move { (pod, api.delete(pod, &DeleteParams::background()).await) }
    });
    for (pod, result) in futures::future::join_all(deletions).await {
        match result {
            Ok(marked) => {
                if let Some(marked) = marked {
                    expected.record(&set_key, &marked);
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
            Err(error) => {
                tracing::debug!(%error, pod, "deleting a surplus pod failed");
                complete &= is_stale(&error);
            }
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
        let sets: Api<ReplicaSet> = Api::namespaced(client.clone(), namespace);
        let patch = json!({"status": plan.status});
        if let Err(error) = sets
            .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
        {
            tracing::debug!(%error, name, "writing a ReplicaSet's status failed");
            complete &= is_stale(&error);
        }
    }
    match complete {
        true => Next::after(wake),
        false => Next::Retry,
    }
}

/// Records a patched pod. Returns false if the patch must be tried again.
fn record_patch(
    result: Result<Pod, kube::Error>,
    set: &Key,
    expected: &Expectations,
    what: &str,
) -> bool {
    match result {
        Ok(pod) => {
            expected.record(set, &pod);
            true
        }
        Err(error) => {
            tracing::debug!(%error, "{what} failed");
            is_stale(&error)
        }
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
    fn only_changes_that_a_set_depends_on_are_work() {
        let keys = |before: Option<&Arc<Pod>>, after: Option<&Arc<Pod>>| {
            let work = work_of_pod(before.map(|p| &**p), after.map(|p| &**p));
            let name = |work| match work {
                Work::Set((_, name)) => name,
                Work::FreePod((_, name)) => format!("free {name}"),
            };
            work.into_iter().map(name).collect::<Vec<_>>()
        };
        let waiting = pod("a", Some("u"), "1", false);
        let mut annotated = Pod::clone(&waiting);
        annotated.metadata.annotations = Some([("k".to_owned(), "v".to_owned())].into());
        let free = pod("a", None, "1", false);
        assert_eq!(keys(Some(&waiting), Some(&Arc::new(annotated))), [""; 0]);
        assert_eq!(keys(None, Some(&waiting)), ["s"]);
        assert_eq!(keys(Some(&waiting), None), ["s"]);
        let ready = pod("a", Some("u"), "1", true);
        assert_eq!(keys(Some(&waiting), Some(&ready)), ["s", "s"]);
        assert_eq!(keys(Some(&waiting), Some(&free)), ["s", "free a"]);
        assert_eq!(keys(None, Some(&free)), ["free a"]);
    }

    #[test]
    fn a_set_is_reconciled_when_a_pod_becomes_available() {
        let mut slow = set(1);
        slow.spec.as_mut().expect("a spec").min_ready_seconds = Some(90);
        let pods = [pod("a", Some("u"), "1", true)];
        let of = |now: &str| {
            let plan = plan(&slow, &pods, now.parse().expect("a time"));
            (plan.status["availableReplicas"].clone(), plan.wake)
        };
        let left = Some(Duration::from_secs(60));
        assert_eq!(of("2026-01-01T00:00:30.9Z"), (json!(0), left));
        assert_eq!(of("2026-01-01T00:01:30Z"), (json!(1), None));
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
