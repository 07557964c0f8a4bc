//! The scheduler: assigns a node to every pending pod (`pkg/scheduler/schedule_one.go`).
//!
//! `fit` decides; this module watches, binds and reports. Bindings that are not visible in the cache yet are assumed,
//! so that a burst does not overcommit a node.

mod fit;
mod storage;

use std::collections::{HashMap, HashSet};
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
use fit::Cluster;
use holdfast_core::backoff::Doubling;
use holdfast_kubeapi::Api;
use storage::{Storage, Wanted};

/// Initial and maximum back-off before an unschedulable pod is evaluated again.
const RETRY: Doubling = Doubling::new(Duration::from_secs(1), Duration::from_secs(10));

/// Minimum time between evaluations of an unschedulable pod, even if the cluster has changed. It limits the work for
/// many pending pods to one evaluation per second.
const MIN_RETRY: Duration = Duration::from_secs(1);

/// Minimum wait for pods in back-off: pods that become due within this time are evaluated together.
const MIN_WAIT: Duration = Duration::from_millis(250);

struct Waiting {
    message: String,
    /// When the pod was last evaluated.
    tried: Instant,
    next: Instant,
    retry: Doubling,
    /// The generation of the evaluated spec.
    generation: Option<i64>,
}

impl Waiting {
    /// When to evaluate the pod again. `capacity_changed` is when the cluster last changed in a way that may let the pod
    /// fit.
    fn due(&self, pod: &Pod, capacity_changed: Instant) -> Instant {
        if self.generation != pod.metadata.generation {
            return self.tried;
        }
        if capacity_changed > self.tried {
            return self.next.min(self.tried + MIN_RETRY);
        }
        self.next
    }
}

/// Detects changes of the cluster that may let an unschedulable pod fit.
struct CapacityChanges {
    /// The uids of the pods that use resources of a node.
    taken: HashSet<String>,
    /// When the last such change was detected.
    changed: Instant,
}

impl CapacityChanges {
    /// Records the current pods. `others` is set if anything but pods has changed.
    fn observe(&mut self, pods: &[Arc<Pod>], others: bool, now: Instant) {
        let takes = |pod: &&Arc<Pod>| {
            let node = pod.spec.as_ref().and_then(|s| s.node_name.as_deref());
            node.is_some_and(|n| !n.is_empty()) && !holdfast_core::pod::is_terminal(pod)
        };
        let uids = pods.iter().filter(takes).filter_map(|pod| pod.uid());
        let taken: HashSet<String> = uids.collect();
        if others || self.taken.iter().any(|uid| !taken.contains(uid)) {
            self.changed = now;
        }
        self.taken = taken;
    }
}

/// The pods to schedule now, by descending priority. Removes the state of pods that are no longer pending.
fn due<'a>(
    all: &'a [Arc<Pod>],
    assumed: &mut HashMap<String, String>,
    waiting: &mut HashMap<String, Waiting>,
    capacity_changed: Instant,
    now: Instant,
) -> Vec<&'a Arc<Pod>> {
    let mut queue: Vec<&Arc<Pod>> = all.iter().filter(|p| needs_node(p)).collect();
    let uids = queue.iter().filter_map(|p| p.metadata.uid.as_deref());
    let uids: HashSet<&str> = uids.collect();
    assumed.retain(|uid, _| uids.contains(uid.as_str()));
    waiting.retain(|uid, _| uids.contains(uid.as_str()));
    queue.retain(|pod| {
        let known = pod.metadata.uid.as_ref().and_then(|uid| waiting.get(uid));
        known.is_none_or(|known| known.due(pod, capacity_changed) <= now)
    });
    queue.sort_by_cached_key(|p| {
        (
            std::cmp::Reverse(p.spec.as_ref().and_then(|s| s.priority).unwrap_or(0)),
            p.metadata.creation_timestamp.as_ref().map(|t| t.0),
            p.name_any(),
        )
    });
    queue
}

/// The time until the next pod is due, unless something changes.
fn next_due(
    all: &[Arc<Pod>],
    waiting: &HashMap<String, Waiting>,
    capacity_changed: Instant,
) -> Duration {
    let known = |pod: &Arc<Pod>| waiting.get(pod.metadata.uid.as_ref()?);
    let dues = all
        .iter()
        .filter_map(|pod| Some(known(pod)?.due(pod, capacity_changed)));
    let next = dues.min();
    next.map_or(Duration::from_secs(30), |next| {
        next.saturating_duration_since(Instant::now())
    })
}

/// Schedules pods until the process exits.
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
    let mut class_changes = classes.changes();
    let mut capacity = CapacityChanges {
        taken: HashSet::new(),
        changed: Instant::now(),
    };
    loop {
        let others = [
            &node_changes,
            &claim_changes,
            &volume_changes,
            &class_changes,
        ];
        let others = others
            .iter()
            .any(|changes| changes.has_changed().unwrap_or(true));
        class_changes.mark_unchanged();
        pod_changes.mark_unchanged();
        node_changes.mark_unchanged();
        claim_changes.mark_unchanged();
        volume_changes.mark_unchanged();
        let all = pods.list();
        let now = Instant::now();
        capacity.observe(&all, others, now);
        let queue = due(&all, &mut assumed, &mut waiting, capacity.changed, now);
        // The sums are not needed if no pod is due.
        let mut cluster = match queue.is_empty() {
            true => Cluster::default(),
            false => Cluster::of(&all, &assumed),
        };
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
            let chosen = fit::choose(pod, &node_list, &cluster, &storage);
            // Claims that wait for their first consumer are bound first; the pod is then evaluated again.
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
                    cluster.add(&node, pod);
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
        let most = next_due(&all, &waiting, capacity.changed);
        tokio::select! {
            // All branches are cancel-safe: the next cycle reads the caches again.
            _ = pod_changes.changed() => {}
            _ = node_changes.changed() => {}
            _ = claim_changes.changed() => {}
            _ = volume_changes.changed() => {}
            _ = class_changes.changed() => {}
            () = tokio::time::sleep(most.max(MIN_WAIT)) => {}
        }
    }
}

/// Requests the binding of a pod's claims from the binder.
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
            tracing::debug!(%error, name, "writing the volume or node of a claim failed; deciding again");
        }
    }
}

fn needs_node(pod: &Pod) -> bool {
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
    let (namespace, name) = holdfast_kubeapi::cache::key(pod);
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
            tracing::debug!(%error, name, "binding a pod failed; scheduling it again");
            false
        }
    }
}

/// Reports why a pod is unschedulable, once per change of the reason.
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
    let reason_changed = known.is_none_or(|w| w.message != message);
    // If the pod was evaluated early and the change did not help, its back-off continues.
    let next = known
        .filter(|w| w.next > now && !reason_changed)
        .map(|w| w.next);
    waiting.insert(
        uid,
        Waiting {
            message: message.clone(),
            tried: now,
            next: next.unwrap_or_else(|| now + retry.pause()),
            retry,
            generation: pod.metadata.generation,
        },
    );
    if !reason_changed {
        return;
    }
    let (namespace, name) = holdfast_kubeapi::cache::key(pod);
    let api: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let patch = json!({"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message,
        "lastTransitionTime": super::api::object::now(), "observedGeneration": pod.metadata.generation}]}});
    if let Err(error) = api
        .patch_status(&name, &PatchParams::default(), &Patch::Strategic(patch))
        .await
    {
        tracing::debug!(%error, name, "writing the PodScheduled condition of an unschedulable pod failed");
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

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str, node: &str, phase: &str) -> Arc<Pod> {
        let pod = json!({"metadata": {"name": uid, "uid": uid, "generation": 1},
            "spec": {"nodeName": node, "containers": []}, "status": {"phase": phase}});
        Arc::new(serde_json::from_value(pod).expect("a pod"))
    }

    #[test]
    fn a_pending_pod_is_evaluated_after_its_back_off_or_when_a_change_may_help() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut capacity = CapacityChanges {
            taken: HashSet::new(),
            changed: start,
        };
        let waiting = Waiting {
            message: String::new(),
            tried: at(100),
            next: at(10_100),
            retry: RETRY,
            generation: Some(1),
        };
        let waits = pod("w", "", "Pending");
        let mut pods = vec![
            Arc::clone(&waits),
            pod("a", "n", "Running"),
            pod("b", "n", "Running"),
        ];
        capacity.observe(&pods, false, at(200));
        assert_eq!(
            waiting.due(&waits, capacity.changed),
            at(10_100),
            "new pods free no room"
        );
        pods.push(pod("c", "n", "Pending"));
        capacity.observe(&pods, false, at(300));
        assert_eq!(waiting.due(&waits, capacity.changed), at(10_100));
        pods[1] = pod("a", "n", "Succeeded");
        capacity.observe(&pods, false, at(400));
        assert_eq!(
            waiting.due(&waits, capacity.changed),
            at(1100),
            "a pod that terminates frees room"
        );
        capacity.changed = start;
        pods.remove(2);
        capacity.observe(&pods, false, at(500));
        assert_eq!(
            waiting.due(&waits, capacity.changed),
            at(1100),
            "a deleted pod frees room too"
        );
        capacity.changed = start;
        capacity.observe(&pods, true, at(600));
        assert_eq!(
            waiting.due(&waits, capacity.changed),
            at(1100),
            "a changed node may have room"
        );
        let mut changed = (*waits).clone();
        changed.metadata.generation = Some(2);
        assert_eq!(
            waiting.due(&changed, start),
            at(100),
            "a changed pod spec is evaluated immediately"
        );
    }
}
