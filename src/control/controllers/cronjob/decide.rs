//! Decides the next steps for a CronJob: a pure function of the CronJob, its jobs, its time zone and the time
//! (`pkg/controller/cronjob/cronjob_controllerv2.go`, `utils.go`).

use std::time::Duration;

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::{CronJob, CronJobStatus, Job};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::ResourceExt as _;

use super::super::job::ended_with;
use super::super::owned::owner;
use holdfast_core::schedule::Schedule;

/// Annotation of a job with its scheduled time.
const SCHEDULED: &str = "batch.kubernetes.io/cronjob-scheduled-timestamp";
/// Number of missed times above which an event is emitted.
const MANY_MISSED: i64 = 100;
/// Delay of the reconciliation after a scheduled time, because clocks differ slightly.
const WAKE_DELAY: SignedDuration = SignedDuration::from_millis(100);

/// The observed state.
pub(super) struct Observed<'a> {
    pub cron: &'a CronJob,
    /// The jobs that the CronJob controls.
    pub jobs: Vec<&'a Job>,
    /// The time zone of the schedule, or why it is invalid.
    pub zone: Result<TimeZone, String>,
    pub now: Timestamp,
}

/// The steps to take, in this order.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Plan {
    /// Active jobs to delete for the next one (`concurrencyPolicy: Replace`).
    pub replace: Vec<String>,
    /// The job to create, with its scheduled time.
    pub start: Option<(Timestamp, Box<Job>)>,
    /// Finished jobs beyond the history limits.
    pub clean: Vec<String>,
    /// The status, without the job to create.
    pub status: CronJobStatus,
    /// Reasons and messages.
    pub events: Vec<(&'static str, String)>,
    /// When to reconcile again at the latest.
    pub wake: Option<Duration>,
}

/// The scheduled times since the last job.
struct Due {
    /// The latest of them.
    last: Option<Timestamp>,
    /// Their approximate number.
    missed: i64,
    /// The time after which they count: of the last job, the CronJob's creation, or the starting deadline.
    since: Timestamp,
}

/// Decides the next steps.
pub(super) fn decide(observed: &Observed<'_>) -> Plan {
    let mut plan = Plan {
        status: observed.cron.status.clone().unwrap_or_default(),
        ..Plan::default()
    };
    update_status(observed, &mut plan);
    if observed.cron.metadata.deletion_timestamp.is_none() {
        start(observed, &mut plan);
    }
    clean(observed, &mut plan);
    plan
}

/// Updates the list of active jobs and the time of the last success.
fn update_status(observed: &Observed<'_>, plan: &mut Plan) {
    let mut active = plan.status.active.take().unwrap_or_default();
    let listed =
        |active: &[ObjectReference], job: &Job| active.iter().any(|a| a.uid == job.metadata.uid);
    for job in &observed.jobs {
        let name = job.name_any();
        match ended_with(job) {
            None if !listed(&active, job) => {
                let what = "Saw a job that the controller did not create or forgot";
                plan.events
                    .push(("UnexpectedJob", format!("{what}: {name}")));
            }
            None => {}
            Some((kind, _)) => {
                if listed(&active, job) {
                    active.retain(|a| a.uid != job.metadata.uid);
                    let what = format!("Saw completed job: {name}, condition: {kind}");
                    plan.events.push(("SawCompletedJob", what));
                }
                let done = job.status.as_ref().and_then(|s| s.completion_time.clone());
                if kind == "Complete" && done > plan.status.last_successful_time {
                    plan.status.last_successful_time = done;
                }
            }
        }
    }
    active.retain(|a| {
        let there = observed.jobs.iter().any(|j| j.metadata.uid == a.uid);
        if !there {
            let name = a.name.as_deref().unwrap_or_default();
            plan.events
                .push(("MissingJob", format!("Active job went missing: {name}")));
        }
        there
    });
    plan.status.active = Some(active).filter(|a| !a.is_empty());
}

/// Decides whether to create a job now.
fn start(observed: &Observed<'_>, plan: &mut Plan) {
    let spec = &observed.cron.spec;
    let zone = match &observed.zone {
        Ok(zone) => zone,
        Err(why) => {
            let name = spec.time_zone.as_deref().unwrap_or_default();
            let what = format!("invalid timeZone: {name:?}: {why}");
            plan.events.push(("UnknownTimeZone", what));
            return;
        }
    };
    if spec.suspend == Some(true) {
        return;
    }
    let schedule = match Schedule::parse(&spec.schedule) {
        Ok(schedule) => schedule,
        Err(why) => {
            let what = format!("unparseable schedule: {:?} : {why}", spec.schedule);
            plan.events.push(("UnparseableSchedule", what));
            return;
        }
    };
    let due = due(observed, &schedule, zone, true);
    plan.wake = wake(observed, &schedule, zone);
    let Some(time) = due.last else { return };
    if due.missed > MANY_MISSED {
        let what = "too many missed start times. Set or decrease .spec.startingDeadlineSeconds or check clock skew";
        plan.events.push(("TooManyMissedTimes", what.into()));
    }
    let deadline = spec
        .starting_deadline_seconds
        .map(SignedDuration::from_secs);
    if deadline.is_some_and(|most| observed.now.duration_since(time) > most) {
        let when = time.strftime("%a, %d %b %Y %H:%M:%S +0000");
        let what = format!("Missed scheduled time to start a job: {when}");
        plan.events.push(("MissSchedule", what));
        return;
    }
    let name = job_name(observed.cron, time);
    let active = plan.status.active.as_deref().unwrap_or_default();
    let begun = plan.status.last_schedule_time == Some(Time(time))
        || active.iter().any(|a| a.name.as_ref() == Some(&name));
    if begun {
        return;
    }
    match spec.concurrency_policy.as_deref() {
        Some("Forbid") if !active.is_empty() => {
            let what = "Not starting job because prior execution is running and concurrency policy is Forbid";
            plan.events.push(("JobAlreadyActive", what.into()));
            return;
        }
        Some("Replace") => {
            let names = active.iter().filter_map(|a| a.name.clone());
            plan.replace = names.collect();
            plan.status.active = None;
        }
        _ => {}
    }
    plan.start = Some((time, Box::new(job(observed.cron, name, time, zone))));
}

/// The scheduled times between the last one and now. With `late`, times beyond the starting deadline are skipped.
fn due(observed: &Observed<'_>, schedule: &Schedule, zone: &TimeZone, late: bool) -> Due {
    let cron = observed.cron;
    let created = cron.metadata.creation_timestamp.as_ref();
    let last = cron
        .status
        .as_ref()
        .and_then(|s| s.last_schedule_time.as_ref());
    let mut since = last.or(created).map_or(observed.now, |t| t.0);
    let deadline = cron.spec.starting_deadline_seconds;
    if let Some(deadline) = deadline.filter(|_| late) {
        let earliest = observed
            .now
            .checked_sub(SignedDuration::from_secs(deadline));
        since = since.max(earliest.unwrap_or(Timestamp::MIN));
    }
    let none = Due {
        last: None,
        missed: 0,
        since,
    };
    let next = |after: Timestamp| schedule.next(after, zone).filter(|t| *t <= observed.now);
    let Some(first) = next(since) else {
        return none;
    };
    let Some(second) = next(first) else {
        return Due {
            last: Some(first),
            missed: 1,
            ..none
        };
    };
    // Long intervals are not enumerated: the distance of the first two times gives an
    // estimate from which the last ones are found.
    let pause = second.duration_since(first).as_secs().max(1);
    let missed = observed.now.duration_since(first).as_secs() / pause + 1;
    let skipped = SignedDuration::from_secs((missed - 2).saturating_mul(pause));
    let mut last = first.checked_add(skipped).ok().and_then(next);
    while let Some(later) = last.and_then(next) {
        last = Some(later);
    }
    Due {
        last,
        missed,
        since,
    }
}

/// The time until the next scheduled time.
fn wake(observed: &Observed<'_>, schedule: &Schedule, zone: &TimeZone) -> Option<Duration> {
    let due = due(observed, schedule, zone, false);
    let from = match due.last {
        Some(last) => last,
        None if due.missed == 0 => due.since,
        None => observed.now,
    };
    let left = schedule.next(from, zone)?.duration_since(observed.now) + WAKE_DELAY;
    Some(Duration::try_from(left).unwrap_or(Duration::ZERO))
}

fn job_name(cron: &CronJob, time: Timestamp) -> String {
    format!("{}-{}", cron.name_any(), time.as_second().div_euclid(60))
}

/// The job for a scheduled time. Its name contains the time, so that it is created once.
fn job(cron: &CronJob, name: String, time: Timestamp, zone: &TimeZone) -> Job {
    let template = cron.spec.job_template.clone();
    let meta = template.metadata.unwrap_or_default();
    let local = time.to_zoned(zone.clone());
    let stamp = match local.offset().is_zero() {
        true => local.strftime("%Y-%m-%dT%H:%M:%SZ"),
        false => local.strftime("%Y-%m-%dT%H:%M:%S%:z"),
    };
    let stamp = stamp.to_string();
    let mut annotations = meta.annotations.unwrap_or_default();
    annotations.insert(SCHEDULED.into(), stamp);
    Job {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: cron.namespace(),
            labels: meta.labels,
            annotations: Some(annotations),
            owner_references: Some(vec![owner(cron)]),
            ..ObjectMeta::default()
        },
        spec: template.spec,
        status: None,
    }
}

/// Deletes finished jobs beyond the history limits, oldest first.
fn clean(observed: &Observed<'_>, plan: &mut Plan) {
    let spec = &observed.cron.spec;
    for (kind, most) in [
        ("Complete", spec.successful_jobs_history_limit),
        ("Failed", spec.failed_jobs_history_limit),
    ] {
        let Some(most) = most else { continue };
        let mut ended: Vec<&Job> = observed
            .jobs
            .iter()
            .copied()
            .filter(|j| ended_with(j).is_some_and(|(is, _)| is == kind))
            .filter(|j| j.metadata.deletion_timestamp.is_none())
            .collect();
        ended.sort_by_key(|j| {
            let start = j.status.as_ref().and_then(|s| s.start_time.as_ref());
            (start.is_none(), start.map(|t| t.0), j.name_any())
        });
        let surplus = ended
            .len()
            .saturating_sub(usize::try_from(most).unwrap_or(0));
        let names = ended.iter().take(surplus).map(|j| j.name_any());
        plan.clean.extend(names);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn cron(spec: Value, status: Value) -> CronJob {
        let mut all = json!({"schedule": "*/10 * * * *", "concurrencyPolicy": "Allow", "jobTemplate":
            {"metadata": {"labels": {"a": "1"}, "annotations": {"b": "2"}}, "spec": {"template": {}}}});
        let map = all.as_object_mut().expect("an object");
        map.extend(spec.as_object().expect("an object").clone());
        serde_json::from_value(json!({"metadata": {"name": "c", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:05:00Z"},
            "spec": all, "status": status}))
        .expect("a CronJob")
    }

    fn some_job(name: &str, kind: &str, start: &str) -> Job {
        let conditions = if kind.is_empty() {
            json!([])
        } else {
            json!([{"type": kind, "status": "True", "lastTransitionTime": start}])
        };
        let end = (kind == "Complete").then_some(start);
        serde_json::from_value(
            json!({"metadata": {"name": name, "namespace": "n", "uid": name},
            "status": {"startTime": start, "completionTime": end, "conditions": conditions}}),
        )
        .expect("a job")
    }

    fn plan(cron: &CronJob, jobs: &[Job], now: &str) -> Plan {
        decide(&Observed {
            cron,
            jobs: jobs.iter().collect(),
            zone: Ok(TimeZone::UTC),
            now: now.parse().expect("a time"),
        })
    }

    fn reasons(plan: &Plan) -> Vec<&'static str> {
        plan.events.iter().map(|(reason, _)| *reason).collect()
    }

    /// Columns: spec, minute of the last schedule, current time (on a day in January 2026), minute of the expected job
    /// in Unix time, event, wait in ms. Of several missed times, the latest is used.
    const TIMES: &str = r#"
{} - 01T00:09:59 - - 1100
{} - 01T00:10:00 29453770 - 600100
{} 10 01T00:10:01 - - 599100
{} 10 01T00:41:00 29453800 - 540100
{} - 03T00:00:30 29456640 TooManyMissedTimes 570100
{"startingDeadlineSeconds":20} - 01T00:10:19 29453770 - 581100
{"startingDeadlineSeconds":20} - 01T00:10:21 - - 579100
{"suspend":true} - 01T00:10:00 - - -1
{"schedule":"x"} - 01T00:10:00 - UnparseableSchedule -1
{"schedule":"@every_7m"} - 01T00:19:00 29453779 - 420100
{"schedule":"0_0_31_2_*"} - 01T00:10:00 - - -1"#;

    #[test]
    fn one_job_is_created_for_the_most_recent_missed_time() {
        for line in TIMES.lines().skip(1) {
            let words: Vec<&str> = line.split(' ').collect();
            let [spec, last, now, minute, event, wake] = words.as_slice() else {
                panic!("{line}");
            };
            let spec = serde_json::from_str(&spec.replace('_', " ")).expect("a spec");
            let status = match *last {
                "-" => json!({}),
                minute => json!({"lastScheduleTime": format!("2026-01-01T00:{minute}:00Z")}),
            };
            let plan = plan(&cron(spec, status), &[], &format!("2026-01-{now}Z"));
            let is = plan.start.as_ref().map(|(_, job)| job.name_any());
            let name = (*minute != "-").then(|| format!("c-{minute}"));
            assert_eq!(is, name, "{line}");
            let events: Vec<&str> = [*event].into_iter().filter(|e| *e != "-").collect();
            assert_eq!(reasons(&plan), events, "{line}");
            let wait = plan
                .wake
                .map_or("-1".to_owned(), |w| w.as_millis().to_string());
            assert_eq!(wait, *wake, "{line}");
        }
    }

    #[test]
    fn a_job_has_its_owner_and_scheduled_time() {
        let cron = cron(
            json!({"schedule": "0 2 * * *", "timeZone": "Europe/Vienna"}),
            json!({}),
        );
        let plan = decide(&Observed {
            cron: &cron,
            jobs: vec![],
            zone: TimeZone::posix("CET-1").map_err(|e| e.to_string()),
            now: "2026-01-01T01:00:00Z".parse().expect("a time"),
        });
        let (time, job) = plan.start.expect("a job");
        assert_eq!(time.to_string(), "2026-01-01T01:00:00Z");
        assert_eq!(job.labels()["a"], "1");
        assert_eq!(
            (
                job.annotations()["b"].as_str(),
                job.annotations()[SCHEDULED].as_str()
            ),
            ("2", "2026-01-01T02:00:00+01:00")
        );
        assert_eq!(job.owner_references()[0].uid, "u");
        let lost = decide(&Observed {
            cron: &cron,
            jobs: vec![],
            zone: Err("none".into()),
            now: Timestamp::UNIX_EPOCH,
        });
        assert_eq!(
            (reasons(&lost), lost.start),
            (vec!["UnknownTimeZone"], None)
        );
    }

    #[test]
    fn the_concurrency_policy_applies_to_running_jobs() {
        let status = json!({"active": [{"name": "old", "namespace": "n", "uid": "old"}], "lastScheduleTime": "2026-01-01T00:10:00Z"});
        for (policy, replaced, started, events) in [
            ("Allow", vec![], true, vec![]),
            ("Forbid", vec![], false, vec!["JobAlreadyActive"]),
            ("Replace", vec!["old"], true, vec![]),
        ] {
            let cron = cron(json!({"concurrencyPolicy": policy}), status.clone());
            let old = some_job("old", "", "2026-01-01T00:10:00Z");
            let plan = plan(&cron, &[old], "2026-01-01T00:20:00Z");
            assert_eq!(plan.replace, replaced, "{policy}");
            assert_eq!(
                (plan.start.is_some(), reasons(&plan)),
                (started, events),
                "{policy}"
            );
            assert_eq!(plan.status.active.is_none(), policy == "Replace");
        }
    }

    #[test]
    fn finished_jobs_are_inactive_and_only_the_history_limit_is_kept() {
        let active: Vec<Value> = ["a", "b", "gone"]
            .iter()
            .map(|n| json!({"name": n, "namespace": "n", "uid": n}))
            .collect();
        let spec =
            json!({"successfulJobsHistoryLimit": 1, "failedJobsHistoryLimit": 0, "suspend": true});
        let cron = cron(spec, json!({"active": active}));
        let jobs = [
            some_job("b", "Complete", "2026-01-01T00:02:00Z"),
            some_job("a", "Complete", "2026-01-01T00:01:00Z"),
            some_job("f", "Failed", "2026-01-01T00:03:00Z"),
            some_job("r", "", "2026-01-01T00:04:00Z"),
        ];
        let plan = plan(&cron, &jobs, "2026-01-01T00:05:00Z");
        assert_eq!(plan.clean, ["a", "f"]);
        assert_eq!(
            reasons(&plan),
            [
                "SawCompletedJob",
                "SawCompletedJob",
                "UnexpectedJob",
                "MissingJob"
            ]
        );
        assert_eq!(plan.status.active, None);
        let last = plan.status.last_successful_time.expect("a time");
        assert_eq!(last.0.to_string(), "2026-01-01T00:02:00Z");
    }
}
