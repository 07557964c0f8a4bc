//! Decides the next steps for a job: a pure function of the job, its pods and the time (KEP-2307, KEP-2214, KEP-3850,
//! KEP-3939, KEP-3998; `pkg/controller/job/job_controller.go`).
//!
//! Each terminated pod is counted exactly once, in three steps. The status lists the pod as uncounted, then the pod's
//! finalizer is removed, and then the pod moves to the counters. The end of a job is reported in two steps:
//! SuccessCriteriaMet or FailureTarget first, and Complete or Failed when no pod is left.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::{Job, JobCondition, JobSpec, JobStatus, UncountedTerminatedPods};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;

use super::super::replicaset::deletion_rank;
use super::backoff::{self, Backoff};
use super::pods::{self, New};
use super::policy::{self, Verdict, verdict};
use holdfast_core::indexes::Indexes;
use holdfast_core::pod;

/// Maximum number of pods to create or delete in one reconciliation.
const MAX_PODS_AT_ONCE: usize = 500;
/// Maximum number of uncounted pods in a status.
const MAX_UNCOUNTED: usize = 500;

/// The observed state.
pub(super) struct Observed<'a> {
    pub job: &'a Job,
    /// The pods that the job controls.
    pub pods: Vec<&'a Pod>,
    /// The failures so far.
    pub backoff: Backoff,
    /// The time, in whole seconds as in the API.
    pub now: Timestamp,
}

/// A pod to delete.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Surplus {
    pub name: String,
    /// Whether to remove its finalizer first, because its termination is not counted.
    pub untracked: bool,
}

/// The steps to take, in this order.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Plan {
    pub create: Vec<New>,
    pub delete: Vec<Surplus>,
    /// The status after all pods are created and deleted.
    pub status: JobStatus,
    /// The names of the pods whose finalizer is removed after the status is written.
    pub release: Vec<String>,
    /// Events (reason and message), emitted after the status is written.
    pub events: Vec<(String, String)>,
    /// The failures, valid once the status is written.
    pub backoff: Backoff,
    /// When to reconcile again at the latest.
    pub wake: Option<Duration>,
}

/// Why a job ends.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Outcome {
    succeeded: bool,
    reason: String,
    message: String,
}

impl Outcome {
    fn failure(reason: &str, message: &str) -> Option<Outcome> {
        Some(Outcome {
            succeeded: false,
            reason: reason.into(),
            message: message.into(),
        })
    }
}

/// The state of one reconciliation.
struct Reconciliation<'a> {
    observed: &'a Observed<'a>,
    spec: &'a JobSpec,
    /// The stored status.
    before: &'a JobStatus,
    suspended: bool,
    active: Vec<&'a Pod>,
    /// Terminated pods that the status lists as not counted yet, by uid.
    uncounted: UncountedTerminatedPods,
    /// The number of pods that have succeeded and failed, including those that the status does not list yet.
    succeeded: i32,
    failed: i32,
    /// The succeeded indexes of an indexed job.
    indexes: Option<Indexes>,
    /// The failed indexes, if there is a back-off limit per index.
    failed_indexes: Option<Indexes>,
    /// Failed pods whose replacement is not created yet, by index. The replacement inherits their failure count.
    awaiting: BTreeMap<i32, &'a Pod>,
}

fn count<T>(list: &[T]) -> i32 {
    i32::try_from(list.len()).unwrap_or(i32::MAX)
}

/// The condition of this type, if it is true.
fn condition<'a>(status: &'a JobStatus, kind: &str) -> Option<&'a JobCondition> {
    let mut conditions = status.conditions.iter().flatten();
    conditions.find(|c| c.type_ == kind && c.status == "True")
}

/// The terminal condition of a job, Complete or Failed, and when it was set.
pub(in crate::controllers) fn ended_with(job: &Job) -> Option<(&str, Timestamp)> {
    let status = job.status.as_ref()?;
    let end = condition(status, "Complete").or_else(|| condition(status, "Failed"))?;
    let since = end.last_transition_time.as_ref();
    Some((&end.type_, since.map_or(Timestamp::UNIX_EPOCH, |t| t.0)))
}

/// When a job reached its terminal condition.
pub(super) fn finished(job: &Job) -> Option<Timestamp> {
    ended_with(job).map(|(_, when)| when)
}

/// The time until a finished job is deleted (KEP-592).
pub(super) fn expires(job: &Job, now: Timestamp) -> Option<Duration> {
    let ttl = job.spec.as_ref()?.ttl_seconds_after_finished?;
    let end = finished(job)?;
    if job.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let left = SignedDuration::from_secs(ttl.into()).saturating_sub(now.duration_since(end));
    Some(Duration::try_from(left).unwrap_or(Duration::ZERO))
}

/// Decides the next steps. A job without a spec, or a finished one, stays unchanged.
pub(super) fn decide(observed: &Observed<'_>) -> Plan {
    let before = observed.job.status.clone().unwrap_or_default();
    let mut plan = Plan {
        status: before.clone(),
        backoff: observed.backoff,
        ..Plan::default()
    };
    let Some(spec) = observed
        .job
        .spec
        .as_ref()
        .filter(|_| finished(observed.job).is_none())
    else {
        return plan;
    };
    let mut reconciliation = Reconciliation::new(observed, spec, &before);
    plan.backoff = reconciliation.count_new();
    if plan.status.start_time.is_none() && !reconciliation.suspended {
        plan.status.start_time = Some(Time(observed.now));
    }
    reconciliation.count_indexes();
    let mut end = reconciliation.outcome();
    let mut active = reconciliation.active.clone();
    if end.is_some() {
        plan.delete = active
            .drain(..)
            .map(|pod| Surplus {
                name: pod.name_any(),
                untracked: false,
            })
            .collect();
    } else {
        plan.wake = reconciliation.deadline();
        let managed = observed.job.metadata.deletion_timestamp.is_none();
        if managed {
            reconciliation.manage(&mut plan, &mut active);
        }
        let running = active.len() + plan.create.len();
        if reconciliation.is_complete(running) {
            end = Some(Outcome {
                succeeded: true,
                reason: "CompletionsReached".into(),
                message: "Reached expected number of succeeded pods".into(),
            });
        } else if managed {
            reconciliation.suspension(&mut plan);
        }
    }
    reconciliation.update_counts(&mut plan, &active);
    reconciliation.track(&mut plan, end.as_ref());
    if let Some(end) = end {
        reconciliation.report_end(&mut plan, end);
    }
    plan
}

impl<'a> Reconciliation<'a> {
    fn new(
        observed: &'a Observed<'a>,
        spec: &'a JobSpec,
        before: &'a JobStatus,
    ) -> Reconciliation<'a> {
        let active = |p: &&Pod| !pod::is_terminal(p) && !pods::is_deleting(p);
        Reconciliation {
            observed,
            spec,
            before,
            suspended: spec.suspend == Some(true),
            active: observed.pods.iter().copied().filter(active).collect(),
            uncounted: before.uncounted_terminated_pods.clone().unwrap_or_default(),
            succeeded: 0,
            failed: 0,
            indexes: None,
            failed_indexes: None,
            awaiting: BTreeMap::new(),
        }
    }

    fn is_indexed(&self) -> bool {
        self.spec.completion_mode.as_deref() == Some("Indexed")
    }

    /// The pods that are not counted yet; for an indexed job, those with a valid index.
    fn tracked(&self) -> impl Iterator<Item = &'a Pod> {
        let (spec, indexed) = (self.spec, self.is_indexed());
        let pods = self.observed.pods.iter().copied();
        pods.filter(move |p| pods::is_tracked(p) && (!indexed || pods::index(spec, p).is_some()))
    }

    /// Counts succeeded and failed pods. Returns the failures including the new ones.
    fn count_new(&mut self) -> Backoff {
        let new = |named: &Option<Vec<String>>, ended: &dyn Fn(&Pod) -> bool| -> Vec<&'a Pod> {
            let named: HashSet<&str> = named.iter().flatten().map(String::as_str).collect();
            let new = |p: &&Pod| !named.contains(pod::uid(p)) && ended(p);
            self.tracked().filter(new).collect()
        };
        let succeeded = new(&self.uncounted.succeeded, &|p| pod::phase(p) == "Succeeded");
        let failed = new(&self.uncounted.failed, &|p| pods::has_failed(self.spec, p));
        let counted: Vec<_> = failed
            .iter()
            .filter(|p| verdict(self.spec, p).is_counted())
            .collect();
        let named = |list: &Option<Vec<String>>| list.as_deref().map_or(0, count);
        let (before, uncounted) = (self.before, &self.uncounted);
        let of = |was: Option<i32>, new: i32, named: i32| {
            was.unwrap_or(0).saturating_add(new).saturating_add(named)
        };
        let (done, lost) = (
            of(
                before.succeeded,
                count(&succeeded),
                named(&uncounted.succeeded),
            ),
            of(before.failed, count(&counted), named(&uncounted.failed)),
        );
        (self.succeeded, self.failed) = (done, lost);
        self.observed.backoff.with(&succeeded, &failed)
    }

    fn count_indexes(&mut self) {
        if !self.is_indexed() {
            return;
        }
        let spec = self.spec;
        let completions = spec.completions.unwrap_or(0);
        let read =
            |text: &Option<String>| Indexes::read(text.as_deref().unwrap_or_default(), completions);
        let mut indexes = read(&self.before.completed_indexes);
        let mut lost = read(&self.before.failed_indexes);
        for pod in self.tracked() {
            let Some(index) = pods::index(spec, pod) else {
                continue;
            };
            if pod::phase(pod) == "Succeeded" {
                indexes.insert(index);
            }
            if spec.backoff_limit_per_index.is_some() && pods::fails_index(spec, pod) {
                lost.insert(index);
            }
        }
        self.succeeded = indexes.total();
        self.indexes = Some(indexes);
        if spec.backoff_limit_per_index.is_some() {
            self.failed_indexes = Some(lost);
            self.await_replacements();
        }
    }

    /// Selects the failed pods that keep their finalizer until their replacement has inherited the failure count.
    fn await_replacements(&mut self) {
        let spec = self.spec;
        let mut settled = self.indexes.clone().unwrap_or_default();
        if let Some(lost) = &self.failed_indexes {
            settled.extend(lost);
        }
        let active = self.active.iter();
        active
            .filter_map(|p| pods::index(spec, p))
            .for_each(|index| settled.insert(index));
        let rank = |pod: &Pod| {
            let (failed, ignored) = pods::failures_before(pod);
            (failed.saturating_add(ignored), backoff::finished(pod))
        };
        let mut awaiting: BTreeMap<i32, &Pod> = BTreeMap::new();
        for pod in self.tracked().filter(|p| pods::has_failed(spec, p)) {
            let Some(index) = pods::index(spec, pod).filter(|i| !settled.contains(*i)) else {
                continue;
            };
            let last = awaiting.entry(index).or_insert(pod);
            if rank(pod) >= rank(last) {
                *last = pod;
            }
        }
        self.awaiting = awaiting;
    }

    /// Whether the job ends: according to its status, its failures, or its success policy.
    fn outcome(&self) -> Option<Outcome> {
        for (kind, succeeded) in [("SuccessCriteriaMet", true), ("FailureTarget", false)] {
            if let Some(noted) = condition(self.before, kind) {
                return Some(Outcome {
                    succeeded,
                    reason: noted.reason.clone().unwrap_or_default(),
                    message: noted.message.clone().unwrap_or_default(),
                });
            }
        }
        let spec = self.spec;
        let failed = self
            .observed
            .pods
            .iter()
            .filter(|p| pods::has_failed(spec, p));
        let verdicts = failed.map(|p| verdict(spec, p));
        for verdict in verdicts {
            if let Verdict::FailJob(why) = verdict {
                return Outcome::failure("PodFailurePolicy", &why);
            }
        }
        if self.failed > spec.backoff_limit.unwrap_or(6) || self.restarted_too_often() {
            return Outcome::failure(
                "BackoffLimitExceeded",
                "Job has reached the specified backoff limit",
            );
        }
        if self.deadline().is_some_and(|left| left.is_zero()) {
            return Outcome::failure(
                "DeadlineExceeded",
                "Job was active longer than specified deadline",
            );
        }
        let indexes = self.indexes.as_ref()?;
        if let Some(lost) = self.failed_indexes.as_ref().map(Indexes::total) {
            if spec.max_failed_indexes.is_some_and(|most| lost > most) {
                return Outcome::failure(
                    "MaxFailedIndexesExceeded",
                    "Job has exceeded the specified maximal number of failed indexes",
                );
            }
            if lost > 0 && lost + indexes.total() >= spec.completions.unwrap_or(0) {
                return Outcome::failure("FailedIndexes", "Job has failed indexes");
            }
        }
        policy::enough(spec, indexes).map(|message| Outcome {
            succeeded: true,
            reason: "SuccessPolicy".into(),
            message,
        })
    }

    /// Whether container restarts exceed the back-off limit. They count only if the pods restart failed containers.
    fn restarted_too_often(&self) -> bool {
        let template = self.spec.template.spec.as_ref();
        if template.and_then(|s| s.restart_policy.as_deref()) != Some("OnFailure") {
            return false;
        }
        let running = self.observed.pods.iter().filter(|p| !pod::is_terminal(p));
        let statuses = running.filter_map(|p| p.status.as_ref());
        let containers = statuses.flat_map(|s| {
            let first = s.init_container_statuses.iter().flatten();
            first.chain(s.container_statuses.iter().flatten())
        });
        let restarts = containers.map(|c| c.restart_count).sum::<i32>();
        restarts >= self.spec.backoff_limit.unwrap_or(6).max(1)
    }

    /// The remaining time until the active deadline.
    fn deadline(&self) -> Option<Duration> {
        let seconds = self.spec.active_deadline_seconds?;
        let start = self
            .before
            .start_time
            .as_ref()
            .map_or(self.observed.now, |t| t.0);
        if self.suspended {
            return None;
        }
        let active = self.observed.now.duration_since(start);
        let left = SignedDuration::from_secs(seconds).saturating_sub(active);
        Some(Duration::try_from(left).unwrap_or(Duration::ZERO))
    }

    /// Whether enough pods have succeeded, and none is active.
    fn is_complete(&self, running: usize) -> bool {
        let wanted = self.spec.completions.unwrap_or(1);
        self.succeeded >= wanted && running == 0
    }

    /// Adjusts the number of active pods: either deletes or creates some.
    fn manage(&self, plan: &mut Plan, active: &mut Vec<&'a Pod>) {
        let have = count(active);
        let parallel = self.spec.parallelism.unwrap_or(1);
        let wanted = match self.spec.completions {
            _ if self.suspended => 0,
            None if self.succeeded > 0 => have,
            None => parallel,
            Some(completions) => (completions - self.succeeded).min(parallel).max(0),
        };
        let surplus = self.surplus(active, usize::try_from(have - wanted).unwrap_or(0));
        if !surplus.is_empty() || self.suspended {
            active.retain(|pod| !surplus.iter().any(|s| pod::uid(s) == pod::uid(pod)));
            plan.delete = surplus
                .iter()
                .map(|pod| Surplus {
                    name: pod.name_any(),
                    untracked: true,
                })
                .collect();
            return;
        }
        let mut missing = wanted - have;
        if pods::replaces_ended_only(self.spec) {
            missing -= self.terminating();
        }
        let missing = usize::try_from(missing).unwrap_or(0).min(MAX_PODS_AT_ONCE);
        if missing > 0 {
            let (create, wait) = self.create(missing, plan.backoff);
            plan.create = create;
            plan.wake = plan.wake.into_iter().chain(wait).min();
        }
    }

    fn terminating(&self) -> i32 {
        let pods = self.observed.pods.iter();
        let terminating = pods.filter(|p| pods::is_deleting(p) && !pod::is_terminal(p));
        i32::try_from(terminating.count()).unwrap_or(i32::MAX)
    }

    /// The surplus pods: for an indexed job, those without a unique valid index first; then by deletion rank.
    fn surplus(&self, active: &[&'a Pod], at_least: usize) -> Vec<&'a Pod> {
        let mut ranked = active.to_vec();
        ranked.sort_by_cached_key(|p| deletion_rank(p, self.observed.now));
        let mut surplus = vec![];
        if self.is_indexed() {
            // If several pods have the same index, the one with the highest rank stays.
            let mut taken = HashSet::new();
            let mut left = vec![];
            for pod in ranked.into_iter().rev() {
                match pods::index(self.spec, pod) {
                    Some(index) if taken.insert(index) => left.insert(0, pod),
                    _ => surplus.push(pod),
                }
            }
            ranked = left;
        }
        let more = at_least.saturating_sub(surplus.len());
        surplus.extend(ranked.into_iter().take(more));
        if !self.suspended {
            surplus.truncate(MAX_PODS_AT_ONCE);
        }
        surplus
    }

    /// The missing pods to create now, and the wait for those in back-off.
    fn create(&self, missing: usize, backoff: Backoff) -> (Vec<New>, Option<Duration>) {
        let per_index = self.failed_indexes.is_some();
        let wait = backoff.remaining(self.observed.now);
        if !per_index && !wait.is_zero() {
            return (vec![], Some(wait));
        }
        if !self.is_indexed() {
            return (vec![New::default(); missing], None);
        }
        let mut create = vec![];
        let mut waits = vec![];
        for index in self.free_indexes(missing) {
            let replaced = self.awaiting.get(&index).copied();
            let failures = pods::failures_with(self.spec, replaced);
            let wait = replaced.map_or(Duration::ZERO, |pod| {
                let all = failures.0.saturating_add(failures.1);
                let all = u32::try_from(all).unwrap_or(0);
                backoff::remaining(all, backoff::finished(pod), self.observed.now)
            });
            if per_index && !wait.is_zero() {
                waits.push(wait);
            } else {
                create.push(New {
                    index: Some(index),
                    failures: per_index.then_some(failures),
                });
            }
        }
        (create, waits.into_iter().min())
    }

    /// The lowest indexes that have no pod and have neither succeeded nor failed.
    fn free_indexes(&self, most: usize) -> Vec<i32> {
        let mut taken = self.indexes.clone().unwrap_or_default();
        if let Some(lost) = &self.failed_indexes {
            taken.extend(lost);
        }
        let ended_only = pods::replaces_ended_only(self.spec);
        for pod in &self.observed.pods {
            let counts = !pod::is_terminal(pod) && (ended_only || !pods::is_deleting(pod));
            if let Some(index) = pods::index(self.spec, pod).filter(|_| counts) {
                taken.insert(index);
            }
        }
        taken.missing(self.spec.completions.unwrap_or(0), most)
    }

    /// Sets or clears the condition Suspended.
    fn suspension(&self, plan: &mut Plan) {
        let (status, reason, event, message) = if self.suspended {
            ("True", "JobSuspended", "Suspended", "Job suspended")
        } else {
            ("False", "JobResumed", "Resumed", "Job resumed")
        };
        if !self.set_condition(&mut plan.status, "Suspended", status, reason, message) {
            return;
        }
        // The time while a job is suspended does not count towards its deadline.
        plan.status.start_time = (!self.suspended).then_some(Time(self.observed.now));
        plan.events.push((event.into(), message.into()));
    }

    /// Sets a condition; returns false if nothing changes. A condition that is not true is not added.
    fn set_condition(
        &self,
        status: &mut JobStatus,
        kind: &str,
        value: &str,
        reason: &str,
        message: &str,
    ) -> bool {
        let new = JobCondition {
            type_: kind.into(),
            status: value.into(),
            reason: Some(reason.into()),
            message: Some(message.into()),
            last_probe_time: Some(Time(self.observed.now)),
            last_transition_time: Some(Time(self.observed.now)),
        };
        let conditions = status.conditions.get_or_insert_default();
        match conditions.iter_mut().find(|c| c.type_ == kind) {
            Some(old)
                if old.status == new.status
                    && old.reason == new.reason
                    && old.message == new.message =>
            {
                false
            }
            Some(old) => {
                *old = new;
                true
            }
            None if value == "True" => {
                conditions.push(new);
                true
            }
            None => {
                if conditions.is_empty() {
                    status.conditions = None;
                }
                false
            }
        }
    }

    /// Updates the pod counts to the state after the plan is executed.
    fn update_counts(&self, plan: &mut Plan, active: &[&Pod]) {
        let some = |n: i32| (n != 0).then_some(n);
        let ready = active.iter().filter(|p| pods::is_ready(p)).count();
        plan.status.active = some(count(active).saturating_add(count(&plan.create)));
        plan.status.ready = Some(i32::try_from(ready).unwrap_or(i32::MAX));
        plan.status.terminating = Some(self.terminating().saturating_add(count(&plan.delete)));
    }

    /// Counts the listed pods whose finalizer is removed, and lists pods that have terminated since.
    fn track(&self, plan: &mut Plan, end: Option<&Outcome>) {
        let held: HashSet<&str> = self
            .observed
            .pods
            .iter()
            .filter(|p| pods::is_tracked(p))
            .map(|p| pod::uid(p))
            .collect();
        let (mut done, succeeded) = settle(&self.uncounted.succeeded, self.before.succeeded, &held);
        let (mut lost, failed) = settle(&self.uncounted.failed, self.before.failed, &held);
        let mut all = self.observed.pods.clone();
        all.sort_by_key(|p| (pods::index(self.spec, p), p.name_any()));
        let mut named = 0;
        for pod in all.into_iter().filter(|p| pods::is_tracked(p)) {
            if named + done.len() + lost.len() >= MAX_UNCOUNTED {
                break;
            }
            if !self.is_countable(pod, end) {
                continue;
            }
            plan.release.push(pod.name_any());
            let (own, is) = (pod::uid(pod).to_owned(), pod::phase(pod));
            let of_index = !self.is_indexed() || pods::index(self.spec, pod).is_some();
            let given_up = end.is_some_and(|end| !end.succeeded);
            if is == "Succeeded" && !lost.contains(&own) {
                // The completed index already records that the pod was counted.
                if self.is_indexed() {
                    named += 1;
                } else if !done.contains(&own) {
                    done.push(own);
                }
            } else if (pods::has_failed(self.spec, pod) || given_up)
                && of_index
                && !lost.contains(&own)
                && verdict(self.spec, pod).is_counted()
            {
                lost.push(own);
            }
        }
        let some = |n: i32| (n != 0).then_some(n);
        let list = |list: Vec<String>| (!list.is_empty()).then_some(list);
        let status = &mut plan.status;
        status.failed = some(failed);
        status.succeeded = some(succeeded);
        status.uncounted_terminated_pods = Some(UncountedTerminatedPods {
            succeeded: list(done),
            failed: list(lost),
        });
        if let Some(indexes) = &self.indexes {
            status.succeeded = some(indexes.total());
            status.completed_indexes = Some(indexes.to_string()).filter(|t| !t.is_empty());
            status.failed_indexes = self.failed_indexes.as_ref().map(ToString::to_string);
        }
    }

    /// Whether the finalizer of a pod can be removed.
    fn is_countable(&self, pod: &Pod, end: Option<&Outcome>) -> bool {
        let over = end.is_some() || self.observed.job.metadata.deletion_timestamp.is_some();
        if over || pod::phase(pod) == "Succeeded" {
            return true;
        }
        let awaited = pods::index(self.spec, pod)
            .and_then(|index| self.awaiting.get(&index))
            .is_some_and(|awaited| pod::uid(awaited) == pod::uid(pod));
        pods::has_failed(self.spec, pod) && !awaited
    }

    /// Reports the end: first the condition that announces it, then the terminal
    /// one when all pods are counted and deleted.
    fn report_end(&self, plan: &mut Plan, end: Outcome) {
        let (first, last) = if end.succeeded {
            ("SuccessCriteriaMet", "Complete")
        } else {
            ("FailureTarget", "Failed")
        };
        if condition(self.before, first).is_none() {
            self.set_condition(&mut plan.status, first, "True", &end.reason, &end.message);
            return;
        }
        let uncounted = plan.status.uncounted_terminated_pods.as_ref();
        let uncounted = uncounted.is_some_and(|u| u.succeeded.is_some() || u.failed.is_some());
        if uncounted || !plan.release.is_empty() || plan.status.terminating != Some(0) {
            return;
        }
        self.set_condition(&mut plan.status, last, "True", &end.reason, &end.message);
        if !end.succeeded {
            plan.events.push((end.reason, end.message));
            return;
        }
        plan.status.completion_time = Some(Time(self.observed.now));
        let wanted = self.spec.completions.unwrap_or(i32::MAX);
        if plan.status.succeeded.unwrap_or(0) > wanted {
            let why = "Too many succeeded pods running after completion count reached";
            let event = "TooManySucceededPods";
            plan.events.push((event.into(), why.into()));
        }
        let completed = ("Completed".into(), "Job completed".into());
        plan.events.push(completed);
    }
}

/// Splits the listed uids: those whose pod still has its finalizer stay listed, the others are added to the counter.
fn settle(
    named: &Option<Vec<String>>,
    was: Option<i32>,
    held: &HashSet<&str>,
) -> (Vec<String>, i32) {
    let named = named.iter().flatten().cloned();
    let (left, gone): (Vec<_>, Vec<_>) = named.partition(|uid| held.contains(uid.as_str()));
    (left, was.unwrap_or(0).saturating_add(count(&gone)))
}

#[cfg(test)]
mod tests;
