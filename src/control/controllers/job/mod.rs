//! Jobs: pods until as many as are wanted have succeeded, or too many have failed. What is to be done is decided in
//! `decide`; here it is done. Jobs that another controller manages are left alone, but deleted when their time is over.

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
use crate::control::api::selector::Selector;
use crate::core::backoff::Doubling;
use crate::core::lock::lock;
use crate::kubeapi::Api;
use crate::kubeapi::cache::{Key, key, revision};
use crate::kubeapi::client::code;
use backoff::Backoff;
pub(super) use decide::ended_with;
use decide::{Plan, Seen, decide, expires, finished};

const COMPONENT: &str = "job-controller";
/// The controller that jobs name which are ours.
const OURS: &str = "kubernetes.io/job-controller";
/// How long nothing is looked at while nothing changes.
const IDLE: Duration = Duration::from_secs(5);

/// The pauses after a turn that failed, at first and at most.
const AGAIN: Doubling = Doubling::new(Duration::from_secs(1), Duration::from_secs(60));

/// What the controller remembers between two turns.
struct Memory {
    /// Jobs, and pods, that were written and not seen yet, by the uid of the job. They are kept apart as a pod and a job
    /// may have one name.
    jobs: Pending,
    pods: Pending,
    /// Failures of pods, by the uid of the job.
    failures: Mutex<HashMap<String, Backoff>>,
    again: Failures,
}

impl Memory {
    fn new() -> Memory {
        Memory {
            jobs: Pending::default(),
            pods: Pending::default(),
            failures: Mutex::default(),
            again: Failures::new(AGAIN),
        }
    }

    /// The uids of the jobs of which everything written has been seen.
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

    /// Forgets jobs that are gone.
    fn keep(&self, jobs: &[Arc<Job>]) {
        let known: HashSet<&String> = jobs
            .iter()
            .filter_map(|j| j.metadata.uid.as_ref())
            .collect();
        lock(&self.failures).retain(|uid, _| known.contains(uid));
        self.again.keep(jobs);
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
        let work = ready.map(|job| turn(&client, &memory, job, &of));
        let waits = futures::future::join_all(work).await;
        let orphans = all.iter().filter(|pod| is_orphan(pod, &caches));
        let work = orphans.map(|pod| let_go(&client, &caches, pod));
        futures::future::join_all(work).await;
        memory.keep(&jobs);
        let most = waits.into_iter().flatten().fold(IDLE, Duration::min);
        any_change(&mut changes, most).await;
    }
}

/// Looks at one job. Returns when to look again at the latest.
async fn turn(client: &Client, memory: &Memory, job: &Job, of: &ByOwner<'_>) -> Option<Duration> {
    let uid = job.uid().unwrap_or_default();
    if let Some(left) = memory.again.pause(job, Instant::now()) {
        return Some(left);
    }
    let result = if finished(job).is_some() {
        lock(&memory.failures).remove(&uid);
        expire(client, job).await
    } else if managed_elsewhere(job) {
        return None;
    } else {
        reconcile(client, memory, job, of).await
    };
    let pause = memory.again.note(job, result.is_err(), Instant::now());
    result.unwrap_or_else(|error| {
        tracing::debug!(%error, job = job.name_any(), "a job could not be reconciled; it is tried again");
        pause
    })
}

fn managed_elsewhere(job: &Job) -> bool {
    let manager = job.spec.as_ref().and_then(|s| s.managed_by.as_deref());
    manager.is_some_and(|m| m != OURS)
}

/// Deletes a job whose time after its end is over; its pods go first.
async fn expire(client: &Client, job: &Job) -> Result<Option<Duration>, kube::Error> {
    let left = expires(job, Timestamp::now());
    if left.is_some_and(|left| left.is_zero()) {
        let (namespace, name) = key(job);
        let mut parameters = DeleteParams::foreground();
        // A job that was changed meanwhile may have more time.
        parameters.preconditions = Some(Preconditions {
            uid: job.uid(),
            resource_version: job.resource_version(),
        });
        let api: Api<Job> = Api::namespaced(client.clone(), &namespace);
        gone(api.delete(&name, &parameters).await)?;
        return Ok(None);
    }
    Ok(left)
}

/// That an object is gone, or has changed, is no failure.
fn gone<T>(result: Result<T, kube::Error>) -> Result<Option<T>, kube::Error> {
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
        // What was claimed is looked at when it comes back.
        return Ok(None);
    }
    let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
    let seen = Seen {
        job,
        pods: own.iter().map(|p| &***p).collect(),
        backoff: lock(&memory.failures)
            .get(&uid)
            .copied()
            .unwrap_or_default(),
        now,
    };
    let mut plan = decide(&seen);
    remove(client, &api, memory, job, &plan).await?;
    let failure = create(client, memory, job, &mut plan).await;
    write(client, memory, job, &plan).await?;
    let release = plan.release.iter().map(|name| release(&api, name));
    for pod in futures::future::join_all(release).await {
        if let Some(pod) = pod? {
            memory.pods.deleted(&uid, &pod);
        }
    }
    failure.map_or(Ok(plan.wake), Err)
}

/// Adopts pods without a controller that the job selects, and releases its own that it does not. True if there were any.
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
        .filter(|pod| !deleting && !pods::deleting(pod) && matches(pod));
    let found = found.map(|pod| {
        (pod, json!({"metadata": {"uid": pod.uid(), "ownerReferences": [owner(job)], "finalizers": [pods::FINALIZER]}}))
    });
    let patches: Vec<_> = lost.chain(found).collect();
    if patches.is_empty() {
        return Ok(false);
    }
    // The cache may be behind: a job that is being deleted adopts nothing.
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
        if let Some(pod) = gone(patched)? {
            memory.pods.wrote(&uid, &pod);
        }
    }
    Ok(true)
}

/// Deletes what is too much; of a pod whose end is not to be counted the finalizer goes first.
async fn remove(
    client: &Client,
    api: &Api<Pod>,
    memory: &Memory,
    job: &Job,
    plan: &Plan,
) -> Result<(), kube::Error> {
    let uid = job.uid().unwrap_or_default();
    let deletions = plan.delete.iter().map(|surplus| async move {
        if surplus.forgotten {
            release(api, &surplus.name).await?;
        }
        let parameters = DeleteParams::default();
        let deleted = gone(api.delete(&surplus.name, &parameters).await)?;
        Ok::<_, kube::Error>((surplus, deleted))
    });
    for deleted in futures::future::join_all(deletions).await {
        let (surplus, deleted) = deleted?;
        let Some(deleted) = deleted else { continue };
        if let Some(pod) = deleted {
            memory.pods.deleted(&uid, &pod);
        }
        let message = format!("Deleted pod: {}", surplus.name);
        tell(client, job, "SuccessfulDelete", message).await;
    }
    Ok(())
}

/// Removes the finalizer by which a pod is counted.
async fn release(api: &Api<Pod>, name: &str) -> Result<Option<Pod>, kube::Error> {
    let patch = json!({"metadata": {"$deleteFromPrimitiveList/finalizers": [pods::FINALIZER]}});
    let patch = Patch::Strategic(patch);
    gone(api.patch(name, &PatchParams::default(), &patch).await)
}

/// Creates the pods of a plan. What could not be created is taken off the status. Returns the failure.
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

/// Writes the status if it has changed, and tells what it means. The version makes sure that it was computed from the
/// present one.
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
    memory.jobs.wrote(&uid, &written);
    lock(&memory.failures).insert(uid, plan.backoff);
    for (reason, message) in &plan.events {
        tell(client, job, reason, message.clone()).await;
    }
    Ok(())
}

async fn tell(client: &Client, job: &Job, reason: &str, message: String) {
    event(client, job, "Job", "batch/v1", COMPONENT, reason, message).await;
}

/// Whether a pod waits to be counted by a job that is gone or has ended.
fn is_orphan(pod: &Pod, caches: &Caches) -> bool {
    let owner = pod
        .owner_references()
        .iter()
        .find(|o| o.controller == Some(true));
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    pods::tracked(pod)
        && owner.is_none_or(|owner| {
            let job = || {
                let job = caches.jobs.get(namespace, &owner.name);
                job.filter(|j| j.metadata.uid.as_ref() == Some(&owner.uid))
            };
            owner.kind == "Job"
                && owner.api_version == "batch/v1"
                && job().is_none_or(|j| !managed_elsewhere(&j) && finished(&j).is_some())
        })
}

/// Lets go of a pod whose job does not count it any more.
async fn let_go(client: &Client, caches: &Caches, pod: &Pod) {
    let (namespace, name) = key(pod);
    let owner = pod
        .owner_references()
        .iter()
        .find(|o| o.controller == Some(true));
    if let Some(owner) = owner.filter(|o| caches.jobs.get(&namespace, &o.name).is_none()) {
        // The cache may be behind: a job that it does not show may have just been made.
        let jobs: Api<Job> = Api::namespaced(client.clone(), &namespace);
        let gone = match jobs.get_opt(&owner.name).await {
            Ok(found) => found.is_none_or(|j| j.metadata.uid.as_ref() != Some(&owner.uid)),
            Err(_) => false,
        };
        if !gone {
            return;
        }
    }
    let api: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    if let Err(error) = release(&api, &name).await {
        tracing::debug!(%error, name, "a pod of a job that is gone could not be let go; it is tried again");
    }
}
