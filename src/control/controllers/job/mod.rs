//! The Job controller: runs pods until enough have succeeded or too many have failed. `decide`
//! computes the steps; this module executes them. Jobs with another controller (`managedBy`) are not
//! reconciled, but are deleted when their TTL expires.

mod backoff;
mod decide;
mod pods;
mod policy;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tokio::time::Instant;

use super::owned::{self, ByOwner, Failures, owner};
use super::{Caches, Pending, any_change, event};
use crate::api::selector::Selector;
use backoff::Backoff;
pub(super) use decide::ended_with;
use decide::{Observed, Plan, decide, expires, finished};
use holdfast_core::backoff::Doubling;
use holdfast_core::lock::lock;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::cache::{Key, key, revision};
use holdfast_kubeapi::client::code;

const COMPONENT: &str = "job-controller";
/// The value of `managedBy` for jobs of this controller.
const CONTROLLER_NAME: &str = "kubernetes.io/job-controller";
/// Maximum time between reconciliations without changes.
const MAX_WAIT: Duration = Duration::from_secs(5);

/// Initial and maximum back-off after a failed reconciliation.
const RETRY_BACKOFF: Doubling = Doubling::new(Duration::from_secs(1), Duration::from_secs(60));

/// State kept between reconciliations.
struct Memory {
    /// Writes to jobs and to pods that are not visible in the caches yet, by the job's uid. They are kept separately,
    /// because a pod and a job may share a name.
    jobs: Pending,
    pods: Pending,
    /// Pod failures by the job's uid.
    failures: Mutex<HashMap<String, Backoff>>,
    retries: Failures,
}

impl Memory {
    fn new() -> Memory {
        Memory {
            jobs: Pending::default(),
            pods: Pending::default(),
            failures: Mutex::default(),
            retries: Failures::new(RETRY_BACKOFF),
        }
    }

    /// The uids of the jobs whose writes are all visible in the caches.
    fn settled(&self, caches: &Caches) -> HashSet<String> {
        let of_job =
            |(namespace, name): &Key| caches.jobs.get(namespace, name).map(|j| revision(&*j));
        let of_pod =
            |(namespace, name): &Key| caches.pods.get(namespace, name).map(|p| revision(&*p));
        let jobs = caches.jobs.list();
        let pods = self.pods.all_settled(&jobs, of_pod);
        let mut settled = self.jobs.all_settled(&jobs, of_job);
        settled.retain(|uid| pods.contains(uid));
        settled
    }

    /// Removes the state of deleted jobs.
    fn keep(&self, jobs: &[Arc<Job>]) {
        let known: HashSet<&String> = jobs
            .iter()
            .filter_map(|j| j.metadata.uid.as_ref())
            .collect();
        lock(&self.failures).retain(|uid, _| known.contains(uid));
        self.retries.keep(jobs);
    }
}

pub(super) async fn run(client: Client, caches: Caches) {
    let mut changes = [caches.jobs.changes(), caches.pods.changes()];
    let memory = Memory::new();
    loop {
        for receiver in &mut changes {
            receiver.mark_unchanged();
        }
        let settled = memory.settled(&caches);
        let (jobs, all) = (caches.jobs.list(), caches.pods.list());
        let of = ByOwner::of(&all);
        let ready = jobs.iter().filter(|job| {
            job.metadata
                .uid
                .as_ref()
                .is_some_and(|uid| settled.contains(uid))
        });
        let work = ready.map(|job| reconcile_job(&client, &memory, job, &of));
        let waits = futures::future::join_all(work).await;
        let orphans = all.iter().filter(|pod| is_orphan(pod, &caches));
        let work = orphans.map(|pod| remove_finalizer(&client, &caches, pod));
        futures::future::join_all(work).await;
        memory.keep(&jobs);
        let most = waits.into_iter().flatten().fold(MAX_WAIT, Duration::min);
        any_change(&mut changes, most).await;
    }
}

/// Reconciles one job. Returns the maximum time until the next reconciliation.
async fn reconcile_job(
    client: &Client,
    memory: &Memory,
    job: &Job,
    of: &ByOwner<'_>,
) -> Option<Duration> {
    let uid = job.uid().unwrap_or_default();
    if let Some(left) = memory.retries.pause(job, Instant::now()) {
        return Some(left);
    }
    let result = if finished(job).is_some() {
        lock(&memory.failures).remove(&uid);
        expire(client, job).await
    } else if is_managed_elsewhere(job) {
        return None;
    } else {
        reconcile(client, memory, job, of).await
    };
    let pause = memory
        .retries
        .record_result(job, result.is_err(), Instant::now());
    result.unwrap_or_else(|error| {
        tracing::debug!(%error, job = job.name_any(), "reconcile of a Job failed, retrying");
        pause
    })
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
        Err(error) if matches!(code(&error), Some(404 | 409)) => Ok(None),
        result => result.map(Some),
    }
}

async fn reconcile(
    client: &Client,
    memory: &Memory,
    job: &Job,
    of: &ByOwner<'_>,
) -> Result<Option<Duration>, kube::Error> {
    let (namespace, _) = key(job);
    let uid = job.uid().unwrap_or_default();
    let api: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let (own, free) = (of.get(&namespace, &uid), of.get(&namespace, ""));
    if claim(client, &api, memory, job, own, free).await? {
        // Reconciled again when the cache shows the patched pods.
        return Ok(None);
    }
    let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
    let observed = Observed {
        job,
        pods: own.iter().map(|p| &***p).collect(),
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
            memory.pods.record_deletion(&uid, &pod);
        }
    }
    failure.map_or(Ok(plan.wake), Err)
}

/// Adopts matching pods without a controller and releases owned pods that do not match. Returns true if there were any.
async fn claim(
    client: &Client,
    api: &Api<Pod>,
    memory: &Memory,
    job: &Job,
    own: &[&Arc<Pod>],
    free: &[&Arc<Pod>],
) -> Result<bool, kube::Error> {
    let uid = job.uid().unwrap_or_default();
    let selector = job.spec.as_ref().and_then(|s| s.selector.as_ref());
    let selector = serde_json::to_value(selector).map_err(kube::Error::SerdeError)?;
    let selector = Selector::of_object(&selector);
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
            memory.pods.record_write(&uid, &pod);
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
    let uid = job.uid().unwrap_or_default();
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
            memory.pods.record_deletion(&uid, &pod);
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
    let (missing, failure) = owned::create(client, (job, COMPONENT), &pods, &memory.pods).await;
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
    let (namespace, name) = key(job);
    let uid = job.uid().unwrap_or_default();
    let mut new = job.clone();
    new.status = Some(plan.status.clone());
    let api: Api<Job> = Api::namespaced(client.clone(), &namespace);
    let written = api
        .replace_status(&name, &PostParams::default(), &new)
        .await?;
    memory.jobs.record_write(&uid, &written);
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
async fn remove_finalizer(client: &Client, caches: &Caches, pod: &Pod) {
    let (namespace, name) = key(pod);
    let owner = pod
        .owner_references()
        .iter()
        .find(|o| o.controller == Some(true));
    if let Some(owner) = owner.filter(|o| caches.jobs.get(&namespace, &o.name).is_none()) {
        // The cache may be stale: a job missing there may have been created recently.
        let jobs: Api<Job> = Api::namespaced(client.clone(), &namespace);
        let deleted = match jobs.get_opt(&owner.name).await {
            Ok(found) => found.is_none_or(|j| j.metadata.uid.as_ref() != Some(&owner.uid)),
            Err(_) => false,
        };
        if !deleted {
            return;
        }
    }
    let api: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    if let Err(error) = release(&api, &name).await {
        tracing::debug!(%error, name, "removing the finalizer from a pod of a deleted Job failed, retrying");
    }
}
