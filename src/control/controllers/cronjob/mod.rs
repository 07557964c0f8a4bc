//! The CronJob controller: creates jobs at their scheduled times. `decide`
//! computes the steps; this module executes them.

mod decide;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{DeleteParams, PostParams};
use kube::{Client, ResourceExt as _};

use super::runtime::{Expectations, Keys, Next, unseen};
use super::{Caches, controller_of, controller_reference, event};
use decide::{Observed, Plan, decide};
use holdfast_kubeapi::Api;
use holdfast_kubeapi::cache::{Key, key};
use holdfast_kubeapi::client::code;

const COMPONENT: &str = "cronjob-controller";
/// Number of CronJobs reconciled concurrently.
const WORKERS: usize = 4;
/// Maximum time between reconciliations of a CronJob with a schedule, because the machine's clock may be changed.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// Pause after a failed reconciliation.
const RETRY: Duration = Duration::from_secs(1);

/// What the workers share.
struct Controller {
    client: Client,
    caches: Caches,
    /// Writes to CronJobs and to jobs that are not visible in the caches yet, by CronJob.
    crons: Expectations,
    jobs: Expectations,
}

fn cron_of_job(job: &Job) -> Option<Key> {
    let owner = controller_reference(job).filter(|o| o.kind == "CronJob")?;
    Some((job.namespace().unwrap_or_default(), owner.name.clone()))
}

pub(super) async fn run(client: Client, caches: Caches) {
    let keys = Keys::new();
    keys.watch(&caches.cron_jobs, |before, after| after.or(before).map(key));
    keys.watch(&caches.jobs, |before, after| {
        let crons = before.into_iter().chain(after).filter_map(cron_of_job);
        crons.collect::<Vec<_>>()
    });
    let controller = Controller {
        client,
        crons: Expectations::of(&caches.cron_jobs),
        jobs: Expectations::of(&caches.jobs),
        caches,
    };
    let turn = |cron: Key| controller.turn(cron);
    keys.work(WORKERS, turn).await;
}

impl Controller {
    async fn turn(&self, cron: Key) -> Next {
        let caches = &self.caches;
        if let Some(left) = unseen([&self.crons, &self.jobs], &cron) {
            // The change that shows the write queues the CronJob again.
            return Next::After(left);
        }
        let Some(found) = caches.cron_jobs.get(&cron.0, &cron.1) else {
            self.crons.forget(&cron);
            self.jobs.forget(&cron);
            return Next::Done;
        };
        let own = caches.jobs_of.get(&found.uid().unwrap_or_default());
        Next::after(self.reconcile(&found, &own).await)
    }

    /// Reconciles one CronJob. Returns the maximum time until the next reconciliation.
    async fn reconcile(&self, cron: &CronJob, own: &[Arc<Job>]) -> Option<Duration> {
        let observed = Observed {
            cron,
            jobs: own.iter().map(|j| &**j).collect(),
            zone: zone(cron),
            now: Timestamp::now(),
        };
        let plan = decide(&observed);
        match self.execute(cron, plan).await {
            Ok(wake) => wake.map(|wake| wake.min(MAX_WAIT)),
            Err(error) => {
                tracing::debug!(%error, name = cron.name_any(), "reconcile of a CronJob failed, retrying");
                Some(RETRY)
            }
        }
    }

    async fn execute(
        &self,
        cron: &CronJob,
        mut plan: Plan,
    ) -> Result<Option<Duration>, kube::Error> {
        let (client, cron_key) = (&self.client, key(cron));
        let api: Api<Job> = Api::namespaced(client.clone(), &cron_key.0);
        for (reason, message) in std::mem::take(&mut plan.events) {
            emit_event(client, cron, reason, message).await;
        }
        for name in &plan.replace {
            self.delete(&api, cron, name).await?;
        }
        let mut failure = None;
        if let Some((time, job)) = plan.start.take() {
            match create(client, &api, cron, &job).await {
                Ok(Some(job)) => {
                    self.jobs.record(&cron_key, &job);
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
            self.delete(&api, cron, name).await?;
        }
        if cron.status.as_ref().unwrap_or(&Default::default()) != &plan.status {
            let mut new = cron.clone();
            new.status = Some(plan.status);
            let crons: Api<CronJob> = Api::namespaced(client.clone(), &cron_key.0);
            let parameters = PostParams::default();
            let name = cron.name_any();
            let cron = crons.replace_status(&name, &parameters, &new).await?;
            self.crons.record(&cron_key, &cron);
        }
        failure.map_or(Ok(plan.wake), Err)
    }

    /// Deletes a job and its dependents.
    async fn delete(&self, api: &Api<Job>, cron: &CronJob, name: &str) -> Result<(), kube::Error> {
        let client = &self.client;
        match api.delete(name, &DeleteParams::background()).await {
            Ok(deleted) => {
                if let Some(job) = deleted {
                    self.jobs.record(&key(cron), &job);
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
}

/// The time zone of a CronJob; by default this machine's.
fn zone(cron: &CronJob) -> Result<TimeZone, String> {
    let name = cron.spec.time_zone.as_deref();
    name.map_or_else(
        || Ok(TimeZone::system()),
        |name| TimeZone::get(name).map_err(|e| e.to_string()),
    )
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
