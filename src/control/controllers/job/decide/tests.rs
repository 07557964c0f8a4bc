//! Jobs in a simulated world: decisions are executed immediately, and the test sets the pods' phases.

use serde_json::{Value, json};

use super::*;

struct World {
    job: Job,
    pods: Vec<Pod>,
    backoff: Backoff,
    now: i64,
    made: usize,
    events: Vec<String>,
    /// The wait that the last reconciliation returned.
    wake: Option<Duration>,
}

fn time(second: i64) -> Timestamp {
    Timestamp::from_second(second).expect("a time")
}

impl World {
    fn new(spec: Value) -> World {
        let mut all = json!({"parallelism": 1, "backoffLimit": 6, "completionMode": "NonIndexed", "suspend": false,
            "podReplacementPolicy": "TerminatingOrFailed", "template": {"spec": {"restartPolicy": "Never", "containers": []}}});
        let map = all.as_object_mut().expect("an object");
        map.extend(spec.as_object().expect("an object").clone());
        let job = json!({"metadata": {"name": "j", "namespace": "n", "uid": "u"}, "spec": all});
        World {
            job: serde_json::from_value(job).expect("a job"),
            pods: vec![],
            backoff: Backoff::default(),
            now: 1000,
            made: 0,
            events: vec![],
            wake: None,
        }
    }

    /// One reconciliation. Returns false if no step was taken.
    fn reconcile(&mut self) -> bool {
        let plan = decide(&Observed {
            job: &self.job,
            pods: self.pods.iter().collect(),
            backoff: self.backoff,
            now: time(self.now),
        });
        self.wake = plan.wake;
        let has_actions =
            !plan.create.is_empty() || !plan.delete.is_empty() || !plan.release.is_empty();
        for surplus in &plan.delete {
            if surplus.untracked {
                self.release(&surplus.name);
            }
            let at = Some(Time(time(self.now)));
            self.pod(&surplus.name).metadata.deletion_timestamp = at;
        }
        for new in &plan.create {
            let mut pod = pods::object(&self.job, new);
            pod.metadata.name = Some(format!("p{}", self.made));
            pod.metadata.uid = Some(format!("u{}", self.made));
            pod.metadata.creation_timestamp = Some(Time(time(self.now)));
            self.made += 1;
            self.pods.push(pod);
        }
        let changed = self.job.status.as_ref() != Some(&plan.status);
        if changed {
            self.backoff = plan.backoff;
            self.events
                .extend(plan.events.iter().map(|(r, _)| r.clone()));
        }
        self.job.status = Some(plan.status);
        for name in &plan.release {
            self.release(name);
        }
        has_actions || changed
    }

    fn settle(&mut self) {
        for _ in 0..20 {
            if !self.reconcile() {
                return;
            }
        }
        panic!("the job does not become stable: {:?}", self.job.status);
    }

    fn pod(&mut self, name: &str) -> &mut Pod {
        let found = self.pods.iter_mut().find(|p| p.name_any() == name);
        found.expect("the pod is there")
    }

    fn release(&mut self, name: &str) {
        let finalizers = &mut self.pod(name).metadata.finalizers;
        *finalizers = None;
    }

    /// Sets a pod's phase; a terminal phase begins now.
    fn set(&mut self, name: &str, phase: &str, code: i32) {
        let mut status = json!({"phase": phase});
        if phase == "Running" {
            status["conditions"] = json!([{"type": "Ready", "status": "True"}]);
        } else {
            status["containerStatuses"] = json!([{"name": "c", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"terminated": {"exitCode": code, "finishedAt": time(self.now).to_string()}}}]);
        }
        self.pod(name).status = Some(serde_json::from_value(status).expect("a status"));
        self.settle();
    }

    fn done(&mut self, name: &str) {
        self.set(name, "Succeeded", 0);
    }

    fn fail(&mut self, name: &str) {
        self.set(name, "Failed", 1);
    }

    fn remove(&mut self, name: &str) {
        self.pods.retain(|p| p.name_any() != name);
        self.settle();
    }

    fn after(&mut self, seconds: i64) {
        self.now += seconds;
        self.settle();
    }

    fn active(&self) -> Vec<String> {
        let active = |p: &&Pod| !pod::is_terminal(p) && !pods::is_deleting(p);
        self.pods
            .iter()
            .filter(active)
            .map(|p| p.name_any())
            .collect()
    }

    fn status(&self) -> JobStatus {
        self.job.status.clone().expect("a status")
    }

    /// Active, ready, succeeded, failed and terminating pods in the status.
    fn numbers(&self) -> [i32; 5] {
        let s = self.status();
        [s.active, s.ready, s.succeeded, s.failed, s.terminating].map(|n| n.unwrap_or(0))
    }

    /// The conditions that are true, with their reasons.
    fn conditions(&self) -> Vec<String> {
        let status = self.status();
        let all = status.conditions.iter().flatten();
        all.filter(|c| c.status == "True")
            .map(|c| format!("{} {}", c.type_, c.reason.as_deref().unwrap_or_default()))
            .collect()
    }
}

#[test]
fn a_job_is_complete_after_its_pod_has_succeeded_and_was_counted() {
    let mut world = World::new(json!({"completions": 1}));
    world.settle();
    assert_eq!(
        (world.active(), world.numbers()),
        (vec!["p0".to_owned()], [1, 0, 0, 0, 0])
    );
    world.set("p0", "Running", 0);
    assert_eq!(world.numbers(), [1, 1, 0, 0, 0]);
    // The first reconciliation lists the pod and removes its finalizer; only then is it counted.
    world.pod("p0").status =
        Some(serde_json::from_value(json!({"phase": "Succeeded"})).expect("a status"));
    world.reconcile();
    let uncounted = world.status().uncounted_terminated_pods.expect("a list");
    assert_eq!(uncounted.succeeded, Some(vec!["u0".to_owned()]));
    assert_eq!(
        (world.numbers()[2], world.conditions()),
        (0, vec!["SuccessCriteriaMet CompletionsReached".into()])
    );
    assert!(!pods::is_tracked(world.pod("p0")));
    world.now += 5;
    world.settle();
    assert_eq!(world.numbers(), [0, 0, 1, 0, 0]);
    assert_eq!(world.conditions()[1], "Complete CompletionsReached");
    assert_eq!(world.status().completion_time, Some(Time(time(1005))));
    assert_eq!(world.events, ["Completed"]);
    assert_eq!(finished(&world.job), Some(time(1005)));
    world.remove("p0");
    assert_eq!(
        (world.numbers()[2], world.made),
        (1, 1),
        "a deleted pod stays counted"
    );
}

#[test]
fn parallelism_limits_the_active_pods() {
    for (completions, parallelism, first, more) in [
        (json!(3), 2, 2, 3),
        (json!(2), 5, 2, 2),
        (json!(0), 1, 0, 0),
        // Without `completions` one success is enough, and active pods continue.
        (Value::Null, 3, 3, 3),
    ] {
        let mut world = World::new(json!({"completions": completions, "parallelism": parallelism}));
        world.settle();
        assert_eq!(world.active().len(), first, "{completions} {parallelism}");
        while let Some(name) = world.active().first() {
            world.done(&name.clone());
        }
        assert_eq!(world.made, more, "{completions} {parallelism}");
        assert_eq!(world.conditions().len(), 2, "{completions} {parallelism}");
    }
}

#[test]
fn failed_pods_are_replaced_with_back_off_up_to_the_limit() {
    let mut world = World::new(json!({"completions": 1, "backoffLimit": 2}));
    world.settle();
    for (name, pause) in [("p0", 10), ("p1", 20)] {
        world.fail(name);
        assert_eq!(
            (world.active().len(), world.wake),
            (0, Some(Duration::from_secs(pause)))
        );
        world.after(i64::try_from(pause).expect("a pause"));
        assert_eq!(world.active().len(), 1);
    }
    assert_eq!(world.numbers(), [1, 0, 0, 2, 0]);
    world.fail("p2");
    assert_eq!(world.numbers(), [0, 0, 0, 3, 0]);
    let expected = [
        "FailureTarget BackoffLimitExceeded",
        "Failed BackoffLimitExceeded",
    ];
    assert_eq!(world.conditions(), expected);
    assert_eq!(world.events, ["BackoffLimitExceeded"]);
    assert_eq!(world.wake, None);
}

#[test]
fn a_job_over_its_deadline_deletes_its_pods_and_then_fails() {
    let mut world =
        World::new(json!({"completions": 2, "parallelism": 2, "activeDeadlineSeconds": 30}));
    world.settle();
    assert_eq!(world.wake, Some(Duration::from_secs(30)));
    world.set("p0", "Running", 0);
    world.after(30);
    assert_eq!(world.numbers(), [0, 0, 0, 2, 2]);
    assert_eq!(world.conditions(), ["FailureTarget DeadlineExceeded"]);
    assert!(world.pods.iter().all(pods::is_deleting));
    assert_eq!(
        world.wake, None,
        "no timer is needed, because the deletion of the pods triggers the next step"
    );
    world.remove("p0");
    world.remove("p1");
    assert_eq!(world.conditions()[1], "Failed DeadlineExceeded");
    assert_eq!(world.numbers(), [0, 0, 0, 2, 0]);
}

#[test]
fn a_suspended_job_has_no_pods_and_its_deadline_restarts_on_resume() {
    let mut world =
        World::new(json!({"completions": 1, "suspend": true, "activeDeadlineSeconds": 30}));
    world.settle();
    assert_eq!((world.active().len(), world.status().start_time), (0, None));
    assert_eq!(world.conditions(), ["Suspended JobSuspended"]);
    let suspend = |world: &mut World, is: bool| {
        world.job.spec.as_mut().expect("a spec").suspend = Some(is);
        world.settle();
    };
    suspend(&mut world, false);
    assert_eq!((world.active().len(), world.conditions().len()), (1, 0));
    world.after(20);
    suspend(&mut world, true);
    assert_eq!(
        world.numbers(),
        [0, 0, 0, 0, 1],
        "pods that a suspension deletes are not failures"
    );
    world.remove("p0");
    world.after(100);
    suspend(&mut world, false);
    world.after(29);
    assert_eq!(world.conditions(), [""; 0]);
    assert_eq!(
        world.events,
        ["Suspended", "Resumed", "Suspended", "Resumed"]
    );
    world.after(1);
    assert_eq!(world.conditions(), ["FailureTarget DeadlineExceeded"]);
}

#[test]
fn an_indexed_job_needs_one_success_per_index() {
    let mut world =
        World::new(json!({"completions": 4, "parallelism": 2, "completionMode": "Indexed"}));
    world.settle();
    let index = |world: &mut World, name: &str| {
        let pod = world.pod(name).clone();
        pods::index(world.job.spec.as_ref().expect("a spec"), &pod)
    };
    assert_eq!(
        [index(&mut world, "p0"), index(&mut world, "p1")],
        [Some(0), Some(1)]
    );
    world.done("p1");
    assert_eq!(index(&mut world, "p2"), Some(2));
    world.fail("p0");
    world.after(10);
    assert_eq!(
        index(&mut world, "p3"),
        Some(0),
        "the lowest missing index is created first"
    );
    for name in ["p3", "p2", "p4"] {
        world.done(name);
    }
    let status = world.status();
    assert_eq!(status.completed_indexes.as_deref(), Some("0-3"));
    assert_eq!((status.failed_indexes, status.failed), (None, Some(1)));
    assert_eq!(world.conditions()[1], "Complete CompletionsReached");
}

#[test]
fn an_index_over_its_back_off_limit_fails_alone_up_to_max_failed_indexes() {
    for (most, conditions) in [
        (Value::Null, "FailureTarget FailedIndexes"),
        (json!(0), "FailureTarget MaxFailedIndexesExceeded"),
    ] {
        let mut world = World::new(
            json!({"completions": 2, "parallelism": 2, "completionMode": "Indexed",
            "backoffLimit": i32::MAX, "backoffLimitPerIndex": 1, "maxFailedIndexes": most}),
        );
        world.settle();
        world.fail("p0");
        assert!(
            pods::is_tracked(world.pod("p0")),
            "a failed pod keeps its finalizer until it is replaced"
        );
        assert_eq!(world.active(), ["p1"]);
        world.after(10);
        let new = world.pod("p2").clone();
        assert_eq!(
            (pods::failures_before(&new), world.numbers()[3]),
            ((1, 0), 1)
        );
        assert!(!pods::is_tracked(world.pod("p0")));
        world.fail("p2");
        let active = if most.is_null() { vec!["p1"] } else { vec![] };
        assert_eq!(world.active(), active);
        assert_eq!(world.status().failed_indexes.as_deref(), Some("0"));
        if most.is_null() {
            world.done("p1");
            assert_eq!(world.status().completed_indexes.as_deref(), Some("1"));
        }
        assert_eq!(world.conditions()[0], conditions);
    }
}

#[test]
fn the_pod_failure_policy_ignores_or_fails_and_the_policy_failed_delays_replacements() {
    let rules = json!([
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [7]}},
    ]);
    let mut world = World::new(
        json!({"completions": 1, "backoffLimit": 0, "podReplacementPolicy": "Failed", "podFailurePolicy": {"rules": rules}}),
    );
    world.settle();
    world.set("p0", "Failed", 7);
    assert_eq!(world.numbers()[3], 0);
    world.after(10);
    world.pod("p1").metadata.deletion_timestamp = Some(Time(time(world.now)));
    world.settle();
    assert_eq!(
        (world.active().len(), world.numbers()),
        (0, [0, 0, 0, 0, 1])
    );
    world.set("p1", "Failed", 7);
    world.after(20);
    assert_eq!(world.active(), ["p2"]);
    world.set("p2", "Failed", 42);
    assert_eq!(world.conditions()[0], "FailureTarget PodFailurePolicy");
    assert_eq!(world.conditions()[1], "Failed PodFailurePolicy");
}

#[test]
fn a_success_policy_deletes_running_pods_without_counting_failures() {
    let mut world = World::new(
        json!({"completions": 3, "parallelism": 3, "completionMode": "Indexed",
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]}}),
    );
    world.settle();
    world.done("p0");
    assert_eq!(world.conditions(), ["SuccessCriteriaMet SuccessPolicy"]);
    assert_eq!(world.numbers(), [0, 0, 1, 0, 2]);
    world.remove("p1");
    world.remove("p2");
    assert_eq!(world.conditions()[1], "Complete SuccessPolicy");
}

#[test]
fn surplus_pods_are_deleted_without_being_counted() {
    let mut world = World::new(json!({"completions": 5, "parallelism": 3}));
    world.settle();
    world.set("p1", "Running", 0);
    world.job.spec.as_mut().expect("a spec").parallelism = Some(1);
    world.settle();
    assert_eq!(
        (world.active(), world.numbers()),
        (vec!["p1".to_owned()], [1, 1, 0, 0, 2])
    );
    world.remove("p0");
    world.remove("p2");
    assert_eq!(world.numbers(), [1, 1, 0, 0, 0]);
}

#[test]
fn a_deleted_pod_counts_as_failed_and_a_deleted_job_stops_counting() {
    let mut world = World::new(json!({"completions": 1}));
    world.settle();
    world.pod("p0").metadata.deletion_timestamp = Some(Time(time(world.now)));
    world.settle();
    assert_eq!(world.numbers(), [0, 0, 0, 1, 1]);
    world.after(10);
    assert_eq!(world.active(), ["p1"]);
    world.job.metadata.deletion_timestamp = Some(Time(time(world.now)));
    world.settle();
    assert!(
        !pods::is_tracked(world.pod("p1")),
        "the pod has no finalizer of the job"
    );
    world.fail("p1");
    assert_eq!(world.made, 2);
}

#[test]
fn container_restarts_count_as_failures_with_restart_policy_on_failure() {
    let mut world = World::new(json!({"completions": 1, "backoffLimit": 3,
        "template": {"spec": {"restartPolicy": "OnFailure", "containers": []}}}));
    world.settle();
    for (restarts, failed) in [(2, false), (3, true)] {
        let status = json!({"phase": "Running", "containerStatuses": [{"name": "c", "image": "", "imageID": "", "ready": true, "restartCount": restarts}]});
        world.pod("p0").status = Some(serde_json::from_value(status).expect("a status"));
        world.settle();
        assert_eq!(!world.conditions().is_empty(), failed, "{restarts}");
    }
}

#[test]
fn a_finished_job_is_deleted_after_its_ttl() {
    let mut world = World::new(json!({"completions": 0, "ttlSecondsAfterFinished": 60}));
    assert_eq!(
        expires(&world.job, time(1000)),
        None,
        "an unfinished job does not expire"
    );
    world.settle();
    for (now, left) in [(1000, 60), (1050, 10), (1060, 0), (2000, 0)] {
        assert_eq!(
            expires(&world.job, time(now)),
            Some(Duration::from_secs(left))
        );
    }
    world.job.metadata.deletion_timestamp = Some(Time(time(1060)));
    assert_eq!(expires(&world.job, time(1060)), None);
}
