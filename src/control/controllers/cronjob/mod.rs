//! The CronJob controller: creates jobs at their scheduled times. `decide`
//! computes the steps; this module executes them.

mod decide;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{DeleteParams, PostParams};
use kube::{Client, ResourceExt as _};

use super::{Caches, Pending, any_change, controller_of, event};
use decide::{Observed, Plan, decide};
use holdfast_kubeapi::Api;
use holdfast_kubeapi::cache::{Key, key, revision};
use holdfast_kubeapi::client::code;

const COMPONENT: &str = "cronjob-controller";
/// Maximum time between reconciliations without changes.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// Writes that are not visible in the caches yet. CronJobs and jobs are kept separately, because they may share names.
#[derive(Default)]
struct Written {
    crons: Pending,
    jobs: Pending,
}

impl Written {
    /// The uids of the CronJobs whose writes are all visible in the caches.
    fn settled(&self, caches: &Caches) -> HashSet<String> {
        let of_cron = |(namespace, name): &Key| {
            let cron = caches.cron_jobs.get(namespace, name);
            cron.map(|c| revision(&*c))
        };
        let of_job =
            |(namespace, name): &Key| caches.jobs.get(namespace, name).map(|j| revision(&*j));
        let crons = caches.cron_jobs.list();
        let jobs = self.jobs.all_settled(&crons, of_job);
        let mut settled = self.crons.all_settled(&crons, of_cron);
        settled.retain(|uid| jobs.contains(uid));
        settled
    }
}

pub(super) async fn run(client: Client, caches: Caches) {
    let mut changes = [caches.cron_jobs.changes(), caches.jobs.changes()];
    let written = Written::default();
    loop {
        for receiver in &mut changes {
            receiver.mark_unchanged();
        }
        let settled = written.settled(&caches);
        let jobs = caches.jobs.list();
        let crons = caches.cron_jobs.list();
        let work = crons.iter().map(|cron| {
            let ready = cron
                .metadata
                .uid
                .as_ref()
                .is_some_and(|uid| settled.contains(uid));
            reconcile(&client, &written, (cron, ready), &jobs)
        });
        let waits = futures::future::join_all(work).await;
        let most = waits.into_iter().flatten().fold(MAX_WAIT, Duration::min);
        any_change(&mut changes, most).await;
    }
}

/// Reconciles one CronJob. Returns the maximum time until the next reconciliation.
async fn reconcile(
    client: &Client,
    written: &Written,
    (cron, settled): (&CronJob, bool),
    jobs: &[Arc<Job>],
) -> Option<Duration> {
    let uid = cron.uid().unwrap_or_default();
    if !settled {
        return Some(Duration::from_secs(1));
    }
    let own = jobs.iter().filter(|job| {
        job.metadata.namespace == cron.metadata.namespace && controller_of(&***job) == Some(&*uid)
    });
    let observed = Observed {
        cron,
        jobs: own.map(|j| &**j).collect(),
        zone: zone(cron),
        now: Timestamp::now(),
    };
    let plan = decide(&observed);
    match execute(client, written, cron, plan).await {
        Ok(wake) => wake,
        Err(error) => {
            tracing::debug!(%error, name = cron.name_any(), "reconcile of a CronJob failed, retrying");
            Some(Duration::from_secs(1))
        }
    }
}

/// The time zone of a CronJob; by default this machine's.
fn zone(cron: &CronJob) -> Result<TimeZone, String> {
    let name = cron.spec.time_zone.as_deref();
    name.map_or_else(
        || Ok(TimeZone::system()),
        |name| TimeZone::get(name).map_err(|e| e.to_string()),
    )
}

async fn execute(
    client: &Client,
    written: &Written,
    cron: &CronJob,
    mut plan: Plan,
) -> Result<Option<Duration>, kube::Error> {
    let (namespace, _) = key(cron);
    let uid = cron.uid().unwrap_or_default();
    let api: Api<Job> = Api::namespaced(client.clone(), &namespace);
    for (reason, message) in std::mem::take(&mut plan.events) {
        emit_event(client, cron, reason, message).await;
    }
    for name in &plan.replace {
        delete(client, &api, written, cron, name).await?;
    }
    let mut failure = None;
    if let Some((time, job)) = plan.start.take() {
        match create(client, &api, cron, &job).await {
            Ok(Some(job)) => {
                written.jobs.record_write(&uid, &job);
                let active = plan.status.active.get_or_insert_default();
                if active.iter().all(|a| a.uid != job.metadata.uid) {
                    active.push(reference(&job));
                }
                plan.status.last_schedule_time = Some(Time(time));
            }
            Ok(None) => {}
            Err(error) => failure = Some(error),
        }
    }
    for name in &plan.clean {
        delete(client, &api, written, cron, name).await?;
    }
    if cron.status.as_ref().unwrap_or(&Default::default()) != &plan.status {
        let mut new = cron.clone();
        new.status = Some(plan.status);
        let crons: Api<CronJob> = Api::namespaced(client.clone(), &namespace);
        let parameters = PostParams::default();
        let name = cron.name_any();
        let cron = crons.replace_status(&name, &parameters, &new).await?;
        written.crons.record_write(&uid, &cron);
    }
    failure.map_or(Ok(plan.wake), Err)
}

/// Creates a job. If a job of this name exists and belongs to the CronJob, returns it: its creation was not recorded.
/// `None` if the existing job does not belong to the CronJob.
async fn create(
    client: &Client,
    api: &Api<Job>,
    cron: &CronJob,
    job: &Job,
) -> Result<Option<Job>, kube::Error> {
    match api.create(&PostParams::default(), job).await {
        Ok(job) => {
            let message = format!("Created job {}", job.name_any());
            emit_event(client, cron, "SuccessfulCreate", message).await;
            Ok(Some(job))
        }
        Err(error) if code(&error) == Some(409) => {
            let found = api.get_opt(&job.name_any()).await?;
            Ok(found.filter(|found| controller_of(found) == cron.metadata.uid.as_deref()))
        }
        Err(error) => {
            let message = format!("Error creating job: {error}");
            emit_event(client, cron, "FailedCreate", message).await;
            Err(error)
        }
    }
}

/// Deletes a job and its dependents.
async fn delete(
    client: &Client,
    api: &Api<Job>,
    written: &Written,
    cron: &CronJob,
    name: &str,
) -> Result<(), kube::Error> {
    match api.delete(name, &DeleteParams::background()).await {
        Ok(deleted) => {
            let uid = cron.uid().unwrap_or_default();
            if let Some(job) = deleted {
                written.jobs.record_deletion(&uid, &job);
            }
            let message = format!("Deleted job {name}");
            emit_event(client, cron, "SuccessfulDelete", message).await;
            Ok(())
        }
        Err(error) if code(&error) == Some(404) => Ok(()),
        Err(error) => {
            let message = format!("Deleted job: {error}");
            emit_event(client, cron, "FailedDelete", message).await;
            Err(error)
        }
    }
}

fn reference(job: &Job) -> ObjectReference {
    ObjectReference {
        api_version: Some("batch/v1".into()),
        kind: Some("Job".into()),
        name: job.metadata.name.clone(),
        namespace: job.metadata.namespace.clone(),
        uid: job.metadata.uid.clone(),
        resource_version: job.metadata.resource_version.clone(),
        ..ObjectReference::default()
    }
}

async fn emit_event(client: &Client, cron: &CronJob, reason: &str, message: String) {
    event(
        client, cron, "CronJob", "batch/v1", COMPONENT, reason, message,
    )
    .await;
}
