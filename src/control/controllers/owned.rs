//! Shared parts of controllers that create objects for an owner: owner references,
//! creation of pods, and back-off after failures.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::PostParams;
use kube::{Client, Resource, ResourceExt as _};
use tokio::time::Instant;

use super::event;
use holdfast_core::backoff::Doubling;
use holdfast_core::lock::lock;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::cache::{Key, key};

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
/// An invalid template can therefore not flood the API. Emits events for both outcomes as `component`, and calls `record`
/// with each new pod. Returns how many pods were not created, and the error.
pub(super) async fn create<K: Resource<DynamicType = ()>>(
    client: &Client,
    (owner, component): (&K, &str),
    pods: &[Pod],
    record: impl Fn(&Pod),
) -> (usize, Option<kube::Error>) {
    let namespace = owner.namespace().unwrap_or_default();
    let api: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let (kind, version) = (K::kind(&()), K::api_version(&()));
    let emit = |reason: &'static str, message: String| {
        event(client, owner, &kind, &version, component, reason, message)
    };
    let (mut left, mut batch) = (pods, 1);
    while !left.is_empty() {
        let (now, later) = left.split_at(batch.min(left.len()));
        let parameters = PostParams::default();
        let created = now.iter().map(|pod| api.create(&parameters, pod));
        let (mut failed, mut failure, mut events) = (0, None, vec![]);
        for result in futures::future::join_all(created).await {
            match result {
                Ok(pod) => {
                    record(&pod);
                    let message = format!("Created pod: {}", pod.name_any());
                    events.push(emit("SuccessfulCreate", message));
                }
                Err(error) => {
                    failed += 1;
                    failure = Some(error);
                }
            }
        }
        futures::future::join_all(events).await;
        if let Some(error) = failure {
            emit("FailedCreate", format!("Error creating: {error}")).await;
            return (failed + later.len(), Some(error));
        }
        (left, batch) = (later, batch * 2);
    }
    (0, None)
}

/// Objects whose last reconciliation failed. Each is retried after a back-off, or earlier if its spec changes.
pub(super) struct Failures {
    /// Initial and maximum back-off.
    pauses: Doubling,
    all: Mutex<HashMap<Key, Failure>>,
}

struct Failure {
    uid: Option<String>,
    generation: Option<i64>,
    next: Instant,
    pauses: Doubling,
}

impl Failure {
    /// Whether the spec of this object has failed.
    fn is_of(&self, meta: &ObjectMeta) -> bool {
        self.uid == meta.uid && self.generation == meta.generation
    }
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
        let all = lock(&self.all);
        let failure = all.get(&key(object)).filter(|f| f.is_of(object.meta()))?;
        let left = failure.next.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    /// Records the result of a reconciliation. Returns the back-off if it failed.
    pub(super) fn record_result<K: Resource>(
        &self,
        object: &K,
        failed: bool,
        now: Instant,
    ) -> Option<Duration> {
        let (mut all, key, meta) = (lock(&self.all), key(object), object.meta());
        let before = all.remove(&key).filter(|f| failed && f.is_of(meta));
        let mut pauses = before.map_or(self.pauses, |f| f.pauses);
        failed.then(|| {
            let pause = pauses.pause();
            let failure = Failure {
                uid: meta.uid.clone(),
                generation: meta.generation,
                next: now + pause,
                pauses,
            };
            all.insert(key, failure);
            pause
        })
    }

    /// Removes a deleted object.
    pub(super) fn forget(&self, key: &Key) {
        lock(&self.all).remove(key);
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
            failures.forget(&key(&object));
            assert!(lock(&failures.all).is_empty());
        }
    }
}
