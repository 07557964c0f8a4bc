//! Shared parts of controllers that create objects for an owner: owner references,
//! creation of pods, and back-off after failures.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::PostParams;
use kube::{Client, Resource, ResourceExt as _};
use tokio::time::Instant;

use super::{Pending, controller_of, event};
use holdfast_core::backoff::Doubling;
use holdfast_core::lock::lock;
use holdfast_kubeapi::Api;

/// The controlling owner reference to an object.
pub(super) fn owner<K: Resource<DynamicType = ()>>(object: &K) -> OwnerReference {
    OwnerReference {
        api_version: K::api_version(&()).into(),
        kind: K::kind(&()).into(),
        name: object.name_any(),
        uid: object.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// Creates pods in batches of 1, 2, 4, … and stops after the first batch with a failure (upstream's `slowStartBatch`).
/// An invalid template can therefore not flood the API. Emits events for both outcomes as `component`. Returns how many
/// pods were not created, and the error.
pub(super) async fn create<K: Resource<DynamicType = ()>>(
    client: &Client,
    (owner, component): (&K, &str),
    pods: &[Pod],
    pending: &Pending,
) -> (usize, Option<kube::Error>) {
    let namespace = owner.namespace().unwrap_or_default();
    let api: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let uid = owner.uid().unwrap_or_default();
    let (kind, version) = (K::kind(&()), K::api_version(&()));
    let emit = |reason: &'static str, message: String| {
        event(client, owner, &kind, &version, component, reason, message)
    };
    let (mut left, mut batch) = (pods, 1);
    while !left.is_empty() {
        let (now, later) = left.split_at(batch.min(left.len()));
        let parameters = PostParams::default();
        let created = now.iter().map(|pod| api.create(&parameters, pod));
        let (mut failed, mut failure) = (0, None);
        for result in futures::future::join_all(created).await {
            match result {
                Ok(pod) => {
                    pending.record_write(&uid, &pod);
                    let message = format!("Created pod: {}", pod.name_any());
                    emit("SuccessfulCreate", message).await;
                }
                Err(error) => {
                    failed += 1;
                    failure = Some(error);
                }
            }
        }
        if let Some(error) = failure {
            emit("FailedCreate", format!("Error creating: {error}")).await;
            return (failed + later.len(), Some(error));
        }
        (left, batch) = (later, batch * 2);
    }
    (0, None)
}

/// Objects whose last reconciliation failed, by uid. Each is retried after a back-off, or earlier if its spec changes.
pub(super) struct Failures {
    /// Initial and maximum back-off.
    pauses: Doubling,
    all: Mutex<HashMap<String, Failure>>,
}

struct Failure {
    generation: Option<i64>,
    next: Instant,
    pauses: Doubling,
}

impl Failures {
    pub(super) fn new(pauses: Doubling) -> Failures {
        Failures {
            pauses,
            all: Mutex::default(),
        }
    }

    /// The remaining back-off of an object; `None` if it is due.
    pub(super) fn pause<K: Resource>(&self, object: &K, now: Instant) -> Option<Duration> {
        let (all, meta) = (lock(&self.all), object.meta());
        let failure = all.get(meta.uid.as_ref()?)?;
        let left = failure.next.saturating_duration_since(now);
        (failure.generation == meta.generation && !left.is_zero()).then_some(left)
    }

    /// Records the result of a reconciliation. Returns the back-off if it failed.
    pub(super) fn record_result<K: Resource>(
        &self,
        object: &K,
        failed: bool,
        now: Instant,
    ) -> Option<Duration> {
        let (mut all, uid) = (lock(&self.all), object.uid().unwrap_or_default());
        let generation = object.meta().generation;
        let before = all
            .remove(&uid)
            .filter(|f| failed && f.generation == generation);
        let mut pauses = before.map_or(self.pauses, |f| f.pauses);
        failed.then(|| {
            let pause = pauses.pause();
            let failure = Failure {
                generation,
                next: now + pause,
                pauses,
            };
            all.insert(uid, failure);
            pause
        })
    }

    /// Removes deleted objects.
    pub(super) fn keep<K: Resource>(&self, objects: &[Arc<K>]) {
        let mut all = lock(&self.all);
        if all.is_empty() {
            return;
        }
        let known: HashSet<&String> = objects
            .iter()
            .filter_map(|o| o.meta().uid.as_ref())
            .collect();
        all.retain(|uid, _| known.contains(uid));
    }
}

/// Pods by namespace and by their controller's uid, which is empty for pods without one.
pub(super) struct ByOwner<'a>(HashMap<&'a str, HashMap<&'a str, Vec<&'a Arc<Pod>>>>);

impl<'a> ByOwner<'a> {
    pub(super) fn of(pods: &'a [Arc<Pod>]) -> ByOwner<'a> {
        let mut all = ByOwner(HashMap::new());
        for pod in pods {
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            let owner = controller_of(&**pod).unwrap_or_default();
            let here = all.0.entry(namespace).or_default();
            here.entry(owner).or_default().push(pod);
        }
        all
    }

    /// The pods of an owner; an empty uid returns the pods without a controller.
    pub(super) fn get(&self, namespace: &str, owner: &str) -> &[&'a Arc<Pod>] {
        let here = self.0.get(namespace).and_then(|here| here.get(owner));
        here.map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::batch::v1::Job;

    use super::*;

    #[test]
    fn failures_are_retried_with_back_off_or_when_the_generation_changes() {
        for (most, expected) in [
            (120, [1, 2, 4, 8, 16, 32, 64, 120, 120]),
            (60, [1, 2, 4, 8, 16, 32, 60, 60, 60]),
        ] {
            let pauses = Doubling::new(Duration::from_secs(1), Duration::from_secs(most));
            let (failures, mut at) = (Failures::new(pauses), Instant::now());
            let mut object = Job::default();
            object.metadata.uid = Some("u".into());
            object.metadata.generation = Some(1);
            assert_eq!(failures.pause(&object, at), None);
            for pause in expected.map(Duration::from_secs) {
                assert_eq!(failures.record_result(&object, true, at), Some(pause));
                assert_eq!(failures.pause(&object, at), Some(pause));
                at += pause;
                assert_eq!(failures.pause(&object, at), None);
            }
            failures.record_result(&object, true, at);
            object.metadata.generation = Some(2);
            assert_eq!(
                failures.pause(&object, at),
                None,
                "a changed object is retried immediately"
            );
            let first = Some(Duration::from_secs(1));
            assert_eq!(failures.record_result(&object, true, at), first);
            assert_eq!(failures.record_result(&object, false, at), None);
            assert_eq!(failures.pause(&object, at), None);
            assert_eq!(failures.record_result(&object, true, at), first);
            failures.keep::<Job>(&[]);
            assert!(lock(&failures.all).is_empty());
        }
    }
}
