//! The scheduler: assigns a node to every pending pod (`pkg/scheduler/schedule_one.go`).
//!
//! `pending` decides which pods to evaluate, and `fit` chooses a node. Both follow the changes of pods and nodes, so the
//! cost of a change does not depend on the number of pods. This module watches, binds and reports. Bindings that are not
//! visible in the cache yet are assumed, so that a burst does not overcommit a node.

mod fit;
mod pending;
mod storage;

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::core::v1::{
    Binding, ObjectReference, PersistentVolume, PersistentVolumeClaim, Pod,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use super::controllers::Caches;
use fit::Cluster;
use holdfast_core::volume::claims;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::cache::{Changed, Key};
use pending::{Hint, Hints, Pending};
use storage::{Storage, Wanted};

/// Minimum wait for pods that become due later: pods that become due within this time are evaluated together.
const MIN_WAIT: Duration = Duration::from_millis(250);

/// The result of a write for a pod.
struct Written {
    key: Key,
    uid: Option<String>,
    outcome: Outcome,
}

enum Outcome {
    Bound,
    /// The binding of the pod, or of its claims, failed.
    Failed,
    /// The claims of the pod are to be bound, or the refusal is reported.
    Reported,
}

/// The scheduler's view of the cluster, and its writes in progress.
struct Scheduler {
    client: Client,
    caches: Caches,
    cluster: Cluster,
    pending: Pending,
    writes: FuturesUnordered<BoxFuture<'static, Written>>,
}

/// Schedules pods until the process exits.
pub async fn run(client: Client, caches: Caches) {
    let (mut pods, mut nodes) = (caches.pods.read_changes(), caches.nodes.read_changes());
    tokio::join!(
        caches.claims.synced(),
        caches.volumes.synced(),
        caches.classes.synced()
    );
    let mut storage = [
        caches.claims.changes(),
        caches.volumes.changes(),
        caches.classes.changes(),
    ];
    storage.iter_mut().for_each(watch::Receiver::mark_unchanged);
    let [claims, volumes, classes] = &mut storage;
    let mut scheduler = Scheduler {
        client,
        caches,
        cluster: Cluster::default(),
        pending: Pending::default(),
        writes: FuturesUnordered::new(),
    };
    let (first_pods, first_nodes) = tokio::join!(pods.next(), nodes.next());
    for (key, node) in first_nodes {
        scheduler.cluster.set_node(&key.1, node.now.as_ref());
    }
    scheduler.observe_pods(first_pods);
    loop {
        scheduler.schedule();
        let now = Instant::now();
        let due = scheduler
            .pending
            .next_due()
            .map(|due| due.max(now + MIN_WAIT));
        tokio::select! {
            // All branches are cancel-safe: changes that are not taken stay with their reader.
            changed = pods.next() => scheduler.observe_pods(changed),
            changed = nodes.next() => {
                let mut relevant = false;
                for (key, node) in changed {
                    relevant |= scheduler.cluster.set_node(&key.1, node.now.as_ref());
                }
                if relevant {
                    scheduler.pending.hint(Hint::Nodes, Instant::now());
                }
            }
            // A cache lives as long as the scheduler, so `changed` fails only when the process exits.
            _ = claims.changed() => scheduler.pending.hint(Hint::Storage, Instant::now()),
            _ = volumes.changed() => scheduler.pending.hint(Hint::Storage, Instant::now()),
            _ = classes.changed() => scheduler.pending.hint(Hint::Storage, Instant::now()),
            Some(written) = scheduler.writes.next() => scheduler.finish(written),
            () = sleep_until(due) => {}
        }
    }
}

/// Waits indefinitely without a time.
async fn sleep_until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

impl Scheduler {
    /// Records changed pods.
    fn observe_pods(&mut self, changed: impl IntoIterator<Item = (Key, Changed<Pod>)>) {
        let mut freed = false;
        for (key, Changed { now, deleted }) in changed {
            let waits = now.as_ref().filter(|pod| needs_node(pod));
            let assumed = deleted.is_none() && waits.is_some() && self.pending.is_assumed(&key);
            if !assumed {
                let place = now.as_ref().and_then(|pod| Some((fit::node_of(pod)?, pod)));
                freed |= self.cluster.place(&key, place);
            }
            self.pending.observe(&key, waits);
        }
        if freed {
            self.pending.hint(Hint::Resources, Instant::now());
        }
    }

    /// Evaluates the due pods.
    fn schedule(&mut self) {
        let due = self.pending.take_due(Instant::now());
        let mut storage = None;
        for (key, pod) in due {
            let has_claims = !claims::of_pod(&pod).is_empty();
            // Most pods have no claims, and need no copy of these lists.
            let storage = match has_claims {
                true => storage.get_or_insert_with(|| Storage {
                    claims: self.caches.claims.list(),
                    volumes: self.caches.volumes.list(),
                    classes: self.caches.classes.list(),
                }),
                false => &mut Storage::default(),
            };
            self.evaluate(key, pod, storage, has_claims);
        }
    }

    fn evaluate(&mut self, key: Key, pod: Arc<Pod>, storage: &mut Storage, has_claims: bool) {
        let (client, now) = (self.client.clone(), Instant::now());
        let node = match fit::choose(&pod, &self.cluster, storage) {
            Ok(node) => node,
            Err(unfit) => {
                let hints = Hints {
                    resources: unfit.on_resources,
                    storage: has_claims,
                };
                if self.pending.refuse(&key, &unfit.message, hints, now) {
                    self.write(&key, &pod, refuse(client, Arc::clone(&pod), unfit.message));
                }
                return;
            }
        };
        // Claims that wait for their first consumer are bound first; the pod is then evaluated again.
        if let Some(found) = self.cluster.node(&node)
            && let Some(wanted) = storage.reserve(&pod, found)
        {
            self.pending.wait_for_storage(&key, now);
            self.write(&key, &pod, select(client, wanted));
            return;
        }
        self.pending.assume(&key);
        self.cluster.place(&key, Some((&node, &pod)));
        self.write(&key, &pod, bind(client, Arc::clone(&pod), node));
    }

    /// Starts a write for a pod.
    fn write(&self, key: &Key, pod: &Pod, write: impl Future<Output = Outcome> + Send + 'static) {
        let (key, uid) = (key.clone(), pod.uid());
        self.writes.push(Box::pin(async move {
            Written {
                key,
                uid,
                outcome: write.await,
            }
        }));
    }

    fn finish(&mut self, written: Written) {
        let (key, now) = (&written.key, Instant::now());
        match written.outcome {
            Outcome::Failed if self.pending.has(key, written.uid.as_deref()) => {
                if self.pending.is_assumed(key) && self.cluster.place(key, None) {
                    self.pending.hint(Hint::Resources, now);
                }
                self.pending.retry(key, now);
            }
            Outcome::Failed | Outcome::Bound | Outcome::Reported => {}
        }
    }
}

/// Requests the binding of a pod's claims from the binder.
async fn select(client: Client, wanted: Vec<Wanted>) -> Outcome {
    let mut outcome = Outcome::Reported;
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
            outcome = Outcome::Failed;
        }
    }
    outcome
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

async fn bind(client: Client, pod: Arc<Pod>, node: String) -> Outcome {
    let (namespace, name) = holdfast_kubeapi::cache::key(&*pod);
    let binding = Binding {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            namespace: Some(namespace.clone()),
            uid: pod.uid(),
            ..ObjectMeta::default()
        },
        target: ObjectReference {
            kind: Some("Node".into()),
            name: Some(node.clone()),
            ..ObjectReference::default()
        },
    };
    let api: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let result: Result<k8s_openapi::apimachinery::pkg::apis::meta::v1::Status, kube::Error> =
        api.create_below(&name, "binding", &binding).await;
    match result {
        Ok(_) => {
            event(
                &client,
                &pod,
                "Scheduled",
                format!("Successfully assigned {namespace}/{name} to {node}"),
            )
            .await;
            Outcome::Bound
        }
        Err(error) => {
            tracing::debug!(%error, name, "binding a pod failed; scheduling it again");
            Outcome::Failed
        }
    }
}

/// Reports why a pod is unschedulable.
async fn refuse(client: Client, pod: Arc<Pod>, message: String) -> Outcome {
    let (namespace, name) = holdfast_kubeapi::cache::key(&*pod);
    let api: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let patch = json!({"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message,
        "lastTransitionTime": super::api::object::now(), "observedGeneration": pod.metadata.generation}]}});
    if let Err(error) = api
        .patch_status(&name, &PatchParams::default(), &Patch::Strategic(patch))
        .await
    {
        tracing::debug!(%error, name, "writing the PodScheduled condition of an unschedulable pod failed");
    }
    event(&client, &pod, "FailedScheduling", message).await;
    Outcome::Reported
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
