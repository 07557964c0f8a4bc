//! The Job controller: runs pods until enough have succeeded or too many have failed. `decide`
//! computes the steps; this module executes them. Jobs with another controller (`managedBy`) are not
//! reconciled, but are deleted when their TTL expires.

mod backoff;
mod decide;
mod pods;
mod policy;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tokio::time::Instant;

use super::owned::{self, Failures, owner};
use super::runtime::{Expectations, Keys, Next, unseen};
use super::{Caches, controller_of, controller_reference, event, is_stale};
use crate::api::selector::Selector;
use backoff::Backoff;
pub(super) use decide::ended_with;
use decide::{Observed, Plan, decide, expires, finished};
use holdfast_core::backoff::Doubling;
use holdfast_core::lock::lock;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::cache::{Key, key};

const COMPONENT: &str = "job-controller";
/// The value of `managedBy` for jobs of this controller.
const CONTROLLER_NAME: &str = "kubernetes.io/job-controller";
/// Number of jobs reconciled concurrently. Concurrent writes share a sync of the store.
const WORKERS: usize = 16;
/// How long to wait for a job that the API has and the cache does not show.
const UNSEEN_JOB: Duration = Duration::from_secs(5);

/// Initial and maximum back-off after a failed reconciliation.
const RETRY_BACKOFF: Doubling = Doubling::new(Duration::from_secs(1), Duration::from_secs(60));

/// What to reconcile.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Work {
    Job(Key),
    /// A pod that may have to be adopted, or lose its finalizer.
    Pod(Key),
    /// The uid of a deleted job.
    Deleted(String),
}

fn work_of_job(before: Option<&Job>, after: Option<&Job>) -> Vec<Work> {
    let uid = |job: &Job| job.uid();
    let replaced = before.filter(|_| before.and_then(uid) != after.and_then(uid));
    let deleted = replaced.and_then(uid).map(Work::Deleted);
    let job = after.or(before).map(|job| Work::Job(key(job)));
    job.into_iter().chain(deleted).collect()
}

/// The attributes of a pod that its job depends on.
fn observed(pod: &Pod) -> impl PartialEq {
    let meta = &pod.metadata;
    let owners = (&meta.owner_references, &meta.labels, &meta.finalizers);
    (owners, meta.deletion_timestamp.is_some(), &pod.status)
}

fn work_of_pod(before: Option<&Pod>, after: Option<&Pod>) -> Vec<Work> {
    if before.map(observed) == after.map(observed) {
        return vec![];
    }
    let job = |pod: &Pod| {
        let owner = controller_reference(pod).filter(|o| o.kind == "Job")?;
        Some(Work::Job((
            pod.namespace().unwrap_or_default(),
            owner.name.clone(),
        )))
    };
    let jobs = before.into_iter().chain(after).filter_map(job);
    let pod = after.filter(|pod| controller_of(*pod).is_none() || pods::is_tracked(pod));
    jobs.chain(pod.map(|pod| Work::Pod(key(pod)))).collect()
}

/// State kept between reconciliations.
struct Memory {
    /// Writes to jobs and to pods that are not visible in the caches yet, by job.
    jobs: Expectations,
    pods: Expectations,
    /// Pod failures by the job's uid.
    failures: Mutex<HashMap<String, Backoff>>,
    retries: Failures,
}

/// What the workers share.
struct Controller {
    client: Client,
    caches: Caches,
    keys: Arc<Keys<Work>>,
    memory: Memory,
}

pub(super) async fn run(client: Client, caches: Caches) {
    let controller = Controller {
        client,
        keys: Keys::new(),
        memory: Memory {
            jobs: Expectations::of(&caches.jobs),
            pods: Expectations::of(&caches.pods),
            failures: Mutex::default(),
            retries: Failures::new(RETRY_BACKOFF),
        },
        caches,
    };
    let (keys, caches) = (&controller.keys, &controller.caches);
    keys.watch(&caches.jobs, work_of_job);
    keys.watch(&caches.pods, work_of_pod);
    let work = |work| controller.turn(work);
    keys.work(WORKERS, work).await;
}

impl Controller {
    async fn turn(&self, work: Work) -> Next {
        match work {
            Work::Job(job) => self.reconcile_job(&job).await,
            Work::Pod(pod) => self.reconcile_pod(&pod).await,
            Work::Deleted(uid) => {
                lock(&self.memory.failures).remove(&uid);
                self.queue_tracked(&uid);
                Next::Done
            }
        }
    }

    /// Queues the pods of a finished or deleted job that have the tracking finalizer.
    fn queue_tracked(&self, uid: &str) {
        let pods = self.caches.pods_of.get(uid);
        for pod in pods.iter().filter(|pod| pods::is_tracked(pod)) {
            self.keys.add(Work::Pod(key(&**pod)));
        }
    }

    async fn reconcile_job(&self, job: &Key) -> Next {
        let (caches, memory) = (&self.caches, &self.memory);
        if let Some(left) = unseen([&memory.jobs, &memory.pods], job) {
            // The change that shows the write queues the job again.
            return Next::After(left);
        }
        let Some(found) = caches.jobs.get(&job.0, &job.1) else {
            memory.jobs.forget(job);
            memory.pods.forget(job);
            memory.retries.forget(job);
            return Next::Done;
        };
        Next::after(self.step(&found).await)
    }

    /// Reconciles one job. Returns the maximum time until the next reconciliation.
    async fn step(&self, job: &Job) -> Option<Duration> {
        let (client, memory) = (&self.client, &self.memory);
        let uid = job.uid().unwrap_or_default();
        if let Some(left) = memory.retries.pause(job, Instant::now()) {
            return Some(left);
        }
        let result = if finished(job).is_some() {
            lock(&memory.failures).remove(&uid);
            self.queue_tracked(&uid);
            expire(client, job).await
        } else if is_managed_elsewhere(job) {
            return None;
        } else {
            let own = self.caches.pods_of.get(&uid);
            let free = self.caches.free_pods.get(&key(job).0);
            reconcile(client, memory, job, &own, &free).await
        };
        let pause = memory
            .retries
            .record_result(job, result.is_err(), Instant::now());
        result.unwrap_or_else(|error| {
            tracing::debug!(%error, job = job.name_any(), "reconcile of a Job failed, retrying");
            pause
        })
    }

    /// Removes the finalizer of a pod that no job counts, and queues the jobs that may adopt a pod without a controller.
    async fn reconcile_pod(&self, (namespace, name): &Key) -> Next {
        let Some(pod) = self.caches.pods.get(namespace, name) else {
            return Next::Done;
        };
        if controller_of(&*pod).is_none() && !pods::is_deleting(&pod) {
            let jobs = self.caches.jobs_in.get(namespace);
            let fitting = jobs.iter().filter(|job| {
                finished(job).is_none()
                    && selector(job).is_some_and(|s| s.matches_labels(pod.labels()))
            });
            fitting.for_each(|job| self.keys.add(Work::Job(key(&**job))));
        }
        match is_orphan(&pod, &self.caches) {
            true => remove_finalizer(&self.client, &self.caches, &pod).await,
            false => Next::Done,
        }
    }
}

fn is_managed_elsewhere(job: &Job) -> bool {
    let manager = job.spec.as_ref().and_then(|s| s.managed_by.as_deref());
    manager.is_some_and(|m| m != CONTROLLER_NAME)
}

/// Deletes a finished job whose TTL has expired; its pods are deleted first.
async fn expire(client: &Client, job: &Job) -> Result<Option<Duration>, kube::Error> {
    let left = expires(job, Timestamp::now());
    if left.is_some_and(|left| left.is_zero()) {
        let (namespace, name) = key(job);
        let mut parameters = DeleteParams::foreground();
        // If the job was changed concurrently, its TTL may be longer.
        parameters.preconditions = Some(Preconditions {
            uid: job.uid(),
            resource_version: job.resource_version(),
        });
        let api: Api<Job> = Api::namespaced(client.clone(), &namespace);
        ignore_conflict(api.delete(&name, &parameters).await)?;
        return Ok(None);
    }
    Ok(left)
}

/// Maps 404 and 409 to `None`: an object that was deleted or changed is not an error.
fn ignore_conflict<T>(result: Result<T, kube::Error>) -> Result<Option<T>, kube::Error> {
    match result {
        Err(error) if is_stale(&error) => Ok(None),
        result => result.map(Some),
    }
}

async fn reconcile(
    client: &Client,
    memory: &Memory,
    job: &Job,
    own: &[Arc<Pod>],
    free: &[Arc<Pod>],
) -> Result<Option<Duration>, kube::Error> {
    let job_key = key(job);
    let uid = job.uid().unwrap_or_default();
    let api: Api<Pod> = Api::namespaced(client.clone(), &job_key.0);
    if claim(client, &api, memory, job, own, free).await? {
        // Reconciled again when the cache shows the patched pods.
        return Ok(None);
    }
    let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
    let observed = Observed {
        job,
        pods: own.iter().map(|p| &**p).collect(),
        backoff: lock(&memory.failures)
            .get(&uid)
            .copied()
            .unwrap_or_default(),
        now,
    };
    let mut plan = decide(&observed);
    remove(client, &api, memory, job, &plan).await?;
    let failure = create(client, memory, job, &mut plan).await;
    write(client, memory, job, &plan).await?;
    let release = plan.release.iter().map(|name| release(&api, name));
    for pod in futures::future::join_all(release).await {
        if let Some(pod) = pod? {
            memory.pods.record(&job_key, &pod);
        }
    }
    failure.map_or(Ok(plan.wake), Err)
}

fn selector(job: &Job) -> Option<Selector> {
    let selector = job.spec.as_ref()?.selector.as_ref();
    Selector::of_object(&serde_json::to_value(selector).ok()?)
}

/// Adopts matching pods without a controller and releases owned pods that do not match. Returns true if there were any.
async fn claim(
    client: &Client,
    api: &Api<Pod>,
    memory: &Memory,
    job: &Job,
    own: &[Arc<Pod>],
    free: &[Arc<Pod>],
) -> Result<bool, kube::Error> {
    let uid = job.uid().unwrap_or_default();
    let selector = selector(job);
    let matches = |pod: &Pod| {
        let selector = selector.as_ref();
        selector.is_some_and(|s| s.matches_labels(pod.labels()))
    };
    let lost = own.iter().filter(|pod| !matches(pod));
    let lost = lost.map(|pod| {
        (pod, json!({"metadata": {"uid": pod.uid(), "ownerReferences": [{"$patch": "delete", "uid": uid}],
            "$deleteFromPrimitiveList/finalizers": [pods::FINALIZER]}}))
    });
    let deleting = job.metadata.deletion_timestamp.is_some();
    let found = free
        .iter()
        .filter(|pod| !deleting && !pods::is_deleting(pod) && matches(pod));
    let found = found.map(|pod| {
        (pod, json!({"metadata": {"uid": pod.uid(), "ownerReferences": [owner(job)], "finalizers": [pods::FINALIZER]}}))
    });
    let patches: Vec<_> = lost.chain(found).collect();
    if patches.is_empty() {
        return Ok(false);
    }
    // The cache may be stale: a job that is being deleted must not adopt pods.
    let jobs: Api<Job> = Api::namespaced(client.clone(), &job.namespace().unwrap_or_default());
    let fresh = jobs.get_opt(&job.name_any()).await?;
    let alive = |j: &Job| j.metadata.uid == job.metadata.uid;
    if !fresh.is_some_and(|j| alive(&j) && j.metadata.deletion_timestamp.is_some() == deleting) {
        return Ok(true);
    }
    for (pod, patch) in patches {
        let patch = Patch::Strategic(patch);
        let parameters = PatchParams::default();
        let patched = api.patch(&pod.name_any(), &parameters, &patch).await;
        if let Some(pod) = ignore_conflict(patched)? {
            memory.pods.record(&key(job), &pod);
        }
    }
    Ok(true)
}

/// Deletes surplus pods; if their termination is not counted, their finalizer is removed first.
async fn remove(
    client: &Client,
    api: &Api<Pod>,
    memory: &Memory,
    job: &Job,
    plan: &Plan,
) -> Result<(), kube::Error> {
    let job_key = key(job);
    let deletions = plan.delete.iter().map(|surplus| async move {
        if surplus.untracked {
            release(api, &surplus.name).await?;
        }
        let parameters = DeleteParams::default();
        let deleted = ignore_conflict(api.delete(&surplus.name, &parameters).await)?;
        Ok::<_, kube::Error>((surplus, deleted))
    });
    for deleted in futures::future::join_all(deletions).await {
        let (surplus, deleted) = deleted?;
        let Some(deleted) = deleted else { continue };
        if let Some(pod) = deleted {
            memory.pods.record(&job_key, &pod);
        }
        let message = format!("Deleted pod: {}", surplus.name);
        emit_event(client, job, "SuccessfulDelete", message).await;
    }
    Ok(())
}

/// Removes the finalizer that keeps a pod until it is counted.
async fn release(api: &Api<Pod>, name: &str) -> Result<Option<Pod>, kube::Error> {
    let patch = json!({"metadata": {"$deleteFromPrimitiveList/finalizers": [pods::FINALIZER]}});
    let patch = Patch::Strategic(patch);
    ignore_conflict(api.patch(name, &PatchParams::default(), &patch).await)
}

/// Creates the pods of a plan, and subtracts those that fail from the status. Returns the error, if any.
async fn create(
    client: &Client,
    memory: &Memory,
    job: &Job,
    plan: &mut Plan,
) -> Option<kube::Error> {
    let pods: Vec<Pod> = plan
        .create
        .iter()
        .map(|new| pods::object(job, new))
        .collect();
    let job_key = key(job);
    let record = |pod: &Pod| memory.pods.record(&job_key, pod);
    let (missing, failure) = owned::create(client, (job, COMPONENT), &pods, record).await;
    let missing = i32::try_from(missing).unwrap_or(i32::MAX);
    let active = plan.status.active.unwrap_or(0).saturating_sub(missing);
    plan.status.active = (active > 0).then_some(active);
    failure
}

/// Writes the status if it has changed, and emits the events. The resource version ensures
/// that it was computed from the current object.
async fn write(
    client: &Client,
    memory: &Memory,
    job: &Job,
    plan: &Plan,
) -> Result<(), kube::Error> {
    if job.status.as_ref() == Some(&plan.status) {
        return Ok(());
    }
    let job_key = key(job);
    let uid = job.uid().unwrap_or_default();
    let mut new = job.clone();
    new.status = Some(plan.status.clone());
    let api: Api<Job> = Api::namespaced(client.clone(), &job_key.0);
    let written = api
        .replace_status(&job_key.1, &PostParams::default(), &new)
        .await?;
    memory.jobs.record(&job_key, &written);
    lock(&memory.failures).insert(uid, plan.backoff);
    for (reason, message) in &plan.events {
        emit_event(client, job, reason, message.clone()).await;
    }
    Ok(())
}

async fn emit_event(client: &Client, job: &Job, reason: &str, message: String) {
    event(client, job, "Job", "batch/v1", COMPONENT, reason, message).await;
}

/// Whether a pod has the tracking finalizer although its job was deleted or has finished.
fn is_orphan(pod: &Pod, caches: &Caches) -> bool {
    let owner = pod
        .owner_references()
        .iter()
        .find(|o| o.controller == Some(true));
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    pods::is_tracked(pod)
        && owner.is_none_or(|owner| {
            let job = || {
                let job = caches.jobs.get(namespace, &owner.name);
                job.filter(|j| j.metadata.uid.as_ref() == Some(&owner.uid))
            };
            owner.kind == "Job"
                && owner.api_version == "batch/v1"
                && job().is_none_or(|j| !is_managed_elsewhere(&j) && finished(&j).is_some())
        })
}

/// Removes the finalizer of a pod that its job no longer counts.
async fn remove_finalizer(client: &Client, caches: &Caches, pod: &Pod) -> Next {
    let (namespace, name) = key(pod);
    let owner = controller_reference(pod);
    if let Some(owner) = owner.filter(|o| caches.jobs.get(&namespace, &o.name).is_none()) {
        // The cache may be stale: a job missing there may have been created recently.
        let jobs: Api<Job> = Api::namespaced(client.clone(), &namespace);
        match jobs.get_opt(&owner.name).await {
            Ok(Some(found)) if found.metadata.uid.as_ref() == Some(&owner.uid) => {
                return Next::After(UNSEEN_JOB);
            }
            Ok(_) => {}
            Err(_) => return Next::Retry,
        }
    }
    let api: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    if let Err(error) = release(&api, &name).await {
        tracing::debug!(%error, name, "removing the finalizer from a pod of a deleted Job failed, retrying");
        return Next::Retry;
    }
    Next::Done
}
