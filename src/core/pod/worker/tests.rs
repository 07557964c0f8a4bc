use super::*;
use crate::fault::Fault;
use crate::pod::Role;
use crate::pod::observed::{Container, ContainerState, Sandbox};
use crate::pod::record::Record;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;

mod bounds;
mod claims;
mod ends;
mod events;
mod failures;
mod images;
mod refusals;
mod resizes;
mod restarts;
mod sandboxes;
mod shutdown;
mod statics;
mod stops;
mod volumes;

fn at(milliseconds: i64) -> Timestamp {
    Timestamp::from_millisecond(1_700_000_000_000 + milliseconds).expect("a time")
}

fn rules() -> Rules {
    Rules {
        sync_frequency: SignedDuration::from_secs(60),
        max_backoff: SignedDuration::from_secs(300),
        mirrors: true,
        recursive_read_only: false,
        runtime: "containerd".into(),
    }
}

fn a_pod(spec: Value, metadata: Value) -> Update {
    let mut pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u", "generation": 1,
        "resourceVersion": "1"}, "spec": spec});
    for (key, value) in metadata.as_object().expect("an object") {
        pod["metadata"][key] = value.clone();
    }
    let pod: Arc<Pod> = Arc::new(serde_json::from_value(pod).expect("a pod"));
    Update {
        object: Some(Arc::clone(&pod)),
        pod,
        removed: false,
        starts_again: false,
    }
}

/// A worker, the time, and a runtime that carries out operations immediately.
struct Run {
    worker: Worker,
    now: i64,
    record: Record,
    runtime: ObservedPod,
    /// The keys of all operations that began, in order.
    begun: Vec<Key>,
    published: Vec<PodStatus>,
    waiting: Vec<Op>,
    gone: bool,
}

impl Run {
    fn new(update: Update) -> Run {
        Run::over(ObservedPod::default(), update)
    }

    /// The worker of another agent with the same runtime and API.
    fn restarted(self) -> Run {
        let mut update = self.worker.update().clone();
        let mut pod = Pod::clone(&update.pod);
        pod.status = Some(PodStatus::clone(self.worker.status()));
        update.pod = Arc::new(pod);
        update.object = Some(Arc::clone(&update.pod));
        Run::over(self.runtime, update)
    }

    fn over(runtime: ObservedPod, update: Update) -> Run {
        let worker = Worker::new(update, Network::Ready, at(0));
        let mut run = Run {
            record: Record::new(rules(), vec!["192.0.2.1".into()], &worker),
            worker,
            now: 0,
            runtime,
            begun: vec![],
            published: vec![],
            waiting: vec![],
            gone: false,
        };
        run.input(Input::Tick);
        run
    }

    fn input(&mut self, input: Input) -> Turn {
        let facts = Facts {
            now: at(self.now),
            node_ips: vec!["192.0.2.1".into()],
            blocking_reason: None,
            rules: rules(),
        };
        let turn = self.worker.turn(&facts, input.clone());
        self.record.add(&facts, input, &turn, &self.worker);
        self.waiting.retain(|op| !turn.cancel.contains(&op.key()));
        self.begun.extend(turn.begin.iter().map(Op::key));
        self.waiting.extend(turn.begin.iter().cloned());
        self.published.extend(turn.publish.as_deref().cloned());
        self.gone |= turn.left_node;
        turn
    }

    fn done(&mut self, key: &Key, outcome: Outcome) -> Turn {
        self.waiting.retain(|op| op.key() != *key);
        self.input(Input::Done {
            key: key.clone(),
            outcome,
        })
    }

    /// The runtime's response.
    fn outcome(&mut self, op: &Op) -> Outcome {
        match op {
            Op::Observe { .. } => Outcome::Observed {
                pod: Arc::new(self.runtime.clone()),
                logged: BTreeMap::new(),
            },
            Op::Admit => Outcome::Admitted,
            Op::RequestResize => Outcome::Granted,
            Op::Sandbox { attempt } => {
                let sandbox = sandbox(*attempt, self.now);
                self.runtime.sandboxes.insert(0, sandbox.clone());
                Outcome::Sandbox {
                    id: sandbox.id,
                    ips: sandbox.ips,
                }
            }
            Op::Start { start, sandbox, .. } => {
                let made = container(&start.container.name, start.attempt, sandbox, self.now);
                let id = made.id.clone();
                // At odd times the query after the start succeeds.
                let seen = (self.now % 2 == 1).then(|| Box::new(made.clone()));
                self.runtime.containers.insert(0, made);
                Outcome::Started { id, seen }
            }
            Op::Stop { kill, .. } => {
                self.exit(&kill.id, 143);
                Outcome::Done
            }
            Op::StopSandbox(id) => {
                let all = &mut self.runtime.sandboxes;
                all.iter_mut()
                    .filter(|s| s.id == *id)
                    .for_each(|s| s.ready = false);
                Outcome::Done
            }
            _ => Outcome::Done,
        }
    }

    fn exit(&mut self, id: &str, code: i32) {
        for container in self.runtime.containers.iter_mut().filter(|c| c.id == id) {
            container.state = ContainerState::Exited;
            container.exit_code = code;
            container.finished_at = Some(at(self.now));
        }
    }

    /// A reboot, or an exited shim: the sandbox and all its containers have stopped.
    fn lose_sandbox(&mut self) {
        let all: Vec<String> = self.runtime.live().map(|c| c.id.clone()).collect();
        all.iter().for_each(|id| self.exit(id, 137));
        self.runtime
            .sandboxes
            .iter_mut()
            .for_each(|s| s.ready = false);
    }

    /// Whether the worker waits for nothing although a container has no instance in the current sandbox.
    fn is_overconfident(&self) -> bool {
        let Some(seen) = self.worker.observed() else {
            return self.worker.waiting().is_none();
        };
        let here = |name: &str| {
            let sandbox = seen.sandboxes.first().map(|s| &s.id);
            seen.newest(name)
                .is_some_and(|c| Some(&c.sandbox) == sandbox)
        };
        // A container that succeeded in an older sandbox is not restarted.
        let succeeded = |name: &str| {
            let newest = seen.newest(name);
            newest.is_some_and(|c| c.state == ContainerState::Exited && c.exit_code == 0)
        };
        let mut containers = pod::spec(self.worker.pod()).containers.iter();
        self.worker.waiting().is_none() && containers.any(|c| !here(&c.name) && !succeeded(&c.name))
    }

    /// Completes operations until none is left, except for those that `held` selects. The time does not change.
    fn settle_but(&mut self, held: impl Fn(&Op) -> bool) {
        for _ in 0..200 {
            let Some(op) = self.waiting.iter().find(|op| !held(op)).cloned() else {
                return;
            };
            let outcome = self.outcome(&op);
            self.done(&op.key(), outcome);
        }
        panic!("the worker never becomes idle: {:?}", self.begun);
    }

    fn settle(&mut self) {
        self.settle_but(|_| false);
    }

    fn phase(&self) -> &str {
        self.worker.status().phase.as_deref().unwrap_or_default()
    }

    fn count(&self, key: &Key) -> usize {
        self.begun.iter().filter(|k| *k == key).count()
    }
}

fn sandbox(attempt: u32, now: i64) -> Sandbox {
    Sandbox {
        id: format!("box{attempt}"),
        attempt,
        ready: true,
        created_at: at(now),
        ips: vec!["10.0.0.2".into()],
        host_network: false,
        handler: String::new(),
    }
}

fn container(name: &str, attempt: u32, sandbox: &str, now: i64) -> Container {
    let definition = k8s_openapi::api::core::v1::Container {
        name: name.into(),
        image: Some("i".into()),
        ..Default::default()
    };
    Container {
        id: format!("{name}{attempt}"),
        name: name.into(),
        sandbox: sandbox.into(),
        attempt,
        state: ContainerState::Running,
        created_at: at(now),
        started_at: Some(at(now)),
        finished_at: None,
        exit_code: 0,
        reason: String::new(),
        message: String::new(),
        image: "i".into(),
        image_ref: "sha256:i".into(),
        hash: Some(pod::container_hash(&definition)),
        user: None,
        stop_signal: None,
        message_file: None,
    }
}

fn start(name: &str) -> Key {
    Key::Start(name.into())
}

fn with_sidecar(policy: &str) -> Value {
    json!({"restartPolicy": policy, "terminationGracePeriodSeconds": 30,
        "initContainers": [{"name": "s", "image": "i", "restartPolicy": "Always"}, {"name": "t", "image": "i", "restartPolicy": "Always"}],
        "containers": [{"name": "c", "image": "i"}]})
}

#[test]
fn a_container_starts_as_soon_as_its_sidecar_has_started() {
    let mut run = Run::new(a_pod(with_sidecar("Never"), json!({})));
    run.settle();
    let starts: Vec<&Key> = run
        .begun
        .iter()
        .filter(|k| matches!(k, Key::Start(_)))
        .collect();
    assert_eq!(starts, [&start("s"), &start("t"), &start("c")]);
    assert_eq!(run.now, 0, "without a delay");
    assert_eq!((run.phase(), run.worker.waiting()), ("Running", None));
}

/// A pod with a sidecar, an init container and a regular container.
fn with_init(policy: &str) -> Value {
    json!({"restartPolicy": policy, "initContainers": [{"name": "s", "image": "i", "restartPolicy": "Always"}, {"name": "t", "image": "i"}],
        "containers": [{"name": "c", "image": "i"}]})
}

#[test]
fn a_restarted_init_container_delays_later_containers() {
    let mut run = Run::new(a_pod(with_init("Always"), json!({})));
    for attempt in 0..2 {
        run.settle();
        let why = run.worker.waiting().unwrap_or_default().to_owned();
        assert!(
            why.contains("container c waits for init container t to complete"),
            "{attempt}: {why:?}"
        );
        run.exit(&format!("t{attempt}"), 0);
        run.input(Input::Hint);
        run.settle();
        assert_eq!((run.phase(), run.worker.waiting()), ("Running", None));
        run.lose_sandbox();
        run.input(Input::Hint);
        // Creating another sandbox is subject to back-off.
        run.settle();
        run.now += 60_000;
        run.input(Input::Tick);
    }
}

/// Simulation seed 1: an event about the sandbox arrived before the call that created it returned.
#[test]
fn a_sandbox_observed_during_its_creation_is_not_created_twice() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
    let op = run.waiting[0].clone();
    let made = run.outcome(&op);
    run.input(Input::Hint);
    run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
    run.done(&op.key(), made);
    run.settle();
    assert_eq!(run.phase(), "Running");
    assert_eq!((run.count(&Key::Sandbox), run.count(&start("c"))), (1, 1));
}

/// The machine was suspended, or its clock was set: the duration of each wait stays the same.
#[test]
fn deadlines_follow_clock_changes() {
    for by in [-3_600, 3_600] {
        let spec = json!({"containers": [{"name": "c", "image": "i"}]});
        let mut run = Run::new(a_pod(spec, json!({})));
        run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
        run.done(&Key::Sandbox, Outcome::Failed(Fault::later("injected")));
        let wait = |turn: &Turn, now: i64| turn.wake_at.map(|wake| wake.duration_since(at(now)));
        run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
        assert_eq!(run.count(&Key::Sandbox), 1);
        let turn = run.input(Input::Tick);
        let before = wait(&turn, run.now);
        assert!(before.is_some_and(|w| w <= SignedDuration::from_millis(500)));
        run.now += by * 1000;
        let turn = run.input(Input::ClockMoved(SignedDuration::from_secs(by)));
        assert_eq!(run.count(&Key::Sandbox), 1, "{by}");
        assert_eq!(wait(&turn, run.now), before, "{by}");
        run.now += 500;
        run.input(Input::Tick);
        assert_eq!(run.count(&Key::Sandbox), 2, "{by}");
    }
}

/// Found by tests/cluster/recovery.rs: another input arrived while a sidecar was being started, and the pod then reported no
/// wait.
#[test]
fn a_pod_with_a_starting_container_is_not_settled() {
    let mut run = Run::new(a_pod(with_sidecar("Never"), json!({})));
    run.settle_but(|op| matches!(op, Op::Start { .. }));
    assert_eq!(run.waiting.len(), 1);
    for input in [Input::Hint, Input::Tick, Input::VolumesChanged] {
        run.input(input);
        run.settle_but(|op| matches!(op, Op::Start { .. }));
        let why = run.worker.waiting().unwrap_or_default().to_owned();
        assert!(why.contains("container s is being started"), "{why}");
    }
}

#[test]
fn a_hook_of_one_container_does_not_delay_restarts_of_others() {
    let spec = json!({"restartPolicy": "Always", "containers": [{"name": "a", "image": "i"}, {"name": "b", "image": "i"}, {"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    let hook = |op: &Op| op.key() == start("b");
    run.settle_but(hook);
    assert_eq!(
        run.count(&start("c")),
        0,
        "c waits for b, whose hook is running"
    );
    run.exit("a0", 1);
    run.input(Input::Hint);
    run.settle_but(hook);
    assert_eq!(run.count(&start("a")), 2, "a has restarted");
    assert_eq!(run.count(&start("b")), 1);
    run.settle();
    assert_eq!(run.count(&start("c")), 1);
}

#[test]
fn a_starting_container_is_included_in_restart_all() {
    let rules =
        json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [4]}}]);
    let spec = json!({"containers": [{"name": "a", "image": "i", "restartPolicy": "Never", "restartPolicyRules": rules}, {"name": "b", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    let held = |op: &Op| op.key() == start("b") || matches!(op, Op::RestartAll(_));
    run.settle_but(held);
    run.exit("a0", 4);
    run.input(Input::Hint);
    let outcome = run.outcome(&Op::Observe { logs: false });
    let turn = run.done(&Key::Observe, outcome);
    assert_eq!(turn.cancel, [start("b")]);
    // The runtime was creating it.
    let b = container("b", 0, "box0", run.now);
    run.runtime.containers.insert(0, b);
    run.settle_but(held);
    let Some(Op::RestartAll(kills)) = run.waiting.first() else {
        panic!("{:?}", run.waiting);
    };
    let names: Vec<&str> = kills.iter().map(|kill| kill.name.as_str()).collect();
    assert_eq!(names, ["b", "a"]);
}

#[test]
fn removing_a_finalizer_takes_one_request() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec.clone(), json!({})));
    run.settle();
    let deleted = |version: u32| json!({"deletionTimestamp": "2023-11-14T22:13:20Z", "finalizers": ["x"], "resourceVersion": version.to_string()});
    for version in 2..40 {
        run.now += 1000;
        run.input(Input::Update(a_pod(spec.clone(), deleted(version))));
        run.settle();
    }
    assert_eq!(run.count(&Key::Finalise), 1);
    assert!(!run.gone, "the object still exists");
    let mut removed = a_pod(spec, deleted(41));
    removed.removed = true;
    run.input(Input::Update(removed));
    run.settle();
    assert!(run.gone);
    assert_eq!(run.count(&Key::Finalise), 1);
}

#[test]
fn failed_operations_are_retried_with_back_off_after_an_observation() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
    let mut pauses = vec![];
    for _ in 0..7 {
        let before = run.count(&Key::Observe);
        run.done(&Key::Sandbox, Outcome::Failed(Fault::later("no")));
        run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
        assert_eq!(run.count(&Key::Observe), before + 1);
        let begun = run.now;
        while !run.waiting.iter().any(|op| op.key() == Key::Sandbox) {
            run.now += 100;
            run.input(Input::Tick);
            run.settle_but(|op| matches!(op, Op::Sandbox { .. }));
        }
        pauses.push(run.now - begun);
    }
    assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 10_000, 10_000]);
}

#[test]
fn a_static_pod_starts_without_the_state_of_an_older_mirror() {
    let of = |hash: &str| json!({"annotations": {"kubernetes.io/config.source": "file", "kubernetes.io/config.hash": hash}});
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let mut update = a_pod(spec.clone(), of("new"));
    let mut mirror = a_pod(
        spec,
        json!({"uid": "m", "annotations": {"kubernetes.io/config.mirror": "old"}}),
    );
    let mut old = (*mirror.pod).clone();
    let status = json!({"phase": "Failed", "conditions": []});
    old.status = Some(serde_json::from_value(status).expect("a status"));
    mirror.pod = Arc::new(old);
    update.object = Some(mirror.pod);
    let mut run = Run::new(update);
    run.settle();
    assert_eq!(run.phase(), "Running");
    assert!(run.worker.update().status_object().is_none());
    assert_eq!(
        run.count(&Key::Mirror),
        1,
        "one attempt until the API shows a change"
    );
}

#[test]
fn the_mirror_of_a_completed_static_pod_has_the_terminal_phase() {
    let annotations =
        json!({"kubernetes.io/config.hash": "h", "kubernetes.io/config.source": "file"});
    let spec = json!({"restartPolicy": "Never", "containers": [{"name": "a", "image": "i"}]});
    let mirror = json!({"uid": "m", "annotations": {"kubernetes.io/config.mirror": "h"}});
    let mirror = a_pod(spec.clone(), mirror).pod;
    let mut update = a_pod(spec, json!({"annotations": annotations}));
    update.object = Some(mirror);
    let mut run = Run::new(update.clone());
    run.settle();
    run.exit("a0", 0);
    run.input(Input::Hint);
    run.settle();
    assert_eq!(run.phase(), "Succeeded");
    let before = run.count(&Key::Mirror);
    // The mirror is deleted. A new mirror must show the terminal status.
    update.object = None;
    run.input(Input::Update(update));
    run.settle();
    assert_eq!(run.count(&Key::Mirror), before + 1);
}

#[test]
fn a_restart_keeps_a_static_pods_readiness_until_its_mirror_arrives() {
    let annotations =
        json!({"kubernetes.io/config.hash": "h", "kubernetes.io/config.source": "file"});
    let probe = json!({"exec": {"command": ["true"]}});
    let spec = json!({"containers": [{"name": "a", "image": "i", "readinessProbe": probe}]});
    let mut run = Run::new(a_pod(spec.clone(), json!({"annotations": annotations})));
    run.settle();
    let id = run.runtime.containers[0].id.clone();
    run.input(Input::Probed {
        id,
        kind: crate::pod::probe::Kind::Readiness,
        result: true,
    });
    let before = run.worker.status().clone();
    let ready = |status: &PodStatus| {
        let conditions = status.conditions.clone().expect("conditions");
        let ready = conditions.into_iter().find(|c| c.type_ == "Ready");
        ready.map(|c| (c.status, c.last_transition_time))
    };
    assert_eq!(ready(&before).expect("Ready").0, "True");

    let mut mirror = a_pod(
        spec.clone(),
        json!({"uid": "m", "annotations": {"kubernetes.io/config.mirror": "h"}}),
    );
    let mut object = Pod::clone(&mirror.pod);
    object.status = Some(Arc::unwrap_or_clone(before.clone()));
    mirror.pod = Arc::new(object);
    // Another agent reads the manifests before it has listed the API's objects.
    let mut update = a_pod(spec, json!({"annotations": annotations}));
    update.object = None;
    let mut again = Run::over(run.runtime, update.clone());
    again.now = 60_000;
    again.settle();
    update.object = Some(mirror.pod);
    again.published.clear();
    again.input(Input::Update(update));
    again.settle();
    assert_eq!(ready(again.worker.status()), ready(&before));
    assert!(
        again.published.iter().all(|s| ready(s) == ready(&before)),
        "{:?}",
        again.published
    );
}

/// Simulation seed 2300: the status of a mirror that was being deleted changed. The worker then went to sleep although
/// the mirror had to be written again.
#[test]
fn a_status_change_of_an_outdated_mirror_writes_no_second_mirror() {
    let annotations =
        json!({"kubernetes.io/config.hash": "h", "kubernetes.io/config.source": "file"});
    let spec = json!({"containers": [{"name": "a", "image": "i"}]});
    let mut update = a_pod(spec.clone(), json!({"annotations": annotations}));
    let wrong = |version: &str, hash: &str| {
        let mut mirror = json!({"uid": "m", "annotations": {"kubernetes.io/config.mirror": hash}, "resourceVersion": version});
        mirror["deletionTimestamp"] = "2023-11-14T22:13:20Z".into();
        Some(a_pod(spec.clone(), mirror).pod)
    };
    update.object = wrong("1", "g");
    let mut run = Run::new(update.clone());
    run.settle();
    let mirrored = run.count(&Key::Mirror);
    update.object = wrong("2", "g");
    run.input(Input::Update(update.clone()));
    assert_eq!(run.count(&Key::Mirror), mirrored);
    update.object = wrong("3", "f");
    run.input(Input::Update(update));
    assert_eq!(run.count(&Key::Mirror), mirrored + 1, "this mirror differs");
}

/// The life of a pod needs three status updates, and none of them waits for a sandbox that does not stop.
#[test]
fn a_pods_life_takes_three_status_updates() {
    let spec = || json!({"containers": [{"name": "a", "image": "i"}]});
    let deleted = json!({"deletionTimestamp": "2023-11-14T22:13:20Z", "deletionGracePeriodSeconds": 5, "resourceVersion": "2"});
    let mut run = Run::new(a_pod(spec(), json!({})));
    run.settle();
    run.input(Input::Update(a_pod(spec(), deleted)));
    let stopping = |op: &Op| matches!(op, Op::StopSandbox(_));
    run.settle_but(stopping);
    let ended = |status: &PodStatus| {
        let mut containers = status.container_statuses.iter().flatten();
        containers.any(|c| c.state.as_ref().is_some_and(|s| s.terminated.is_some()))
    };
    assert!(ended(run.worker.status()) && run.waiting.iter().any(stopping));
    assert!(
        !run.published.iter().any(ended),
        "the status waits for the sandbox stop"
    );
    let mut hung = Run {
        worker: run.worker.clone(),
        published: vec![],
        ..Run::new(a_pod(spec(), json!({})))
    };
    hung.now = run.now + 1000;
    let published = hung.input(Input::Tick).publish;
    assert!(
        published.is_some_and(|status| ended(&status)),
        "the status does not wait for it"
    );
    run.settle();
    let phases = run.published.iter().map(|s| s.phase.as_deref());
    assert_eq!(
        phases.collect::<Vec<_>>(),
        [Some("Pending"), Some("Running"), Some("Failed")]
    );
}

/// The terminal status of a completed pod does not wait for its sandbox, which may take time to stop. It does wait if
/// the sandbox has host ports.
#[test]
fn a_completed_pods_terminal_status_precedes_its_sandbox_stop() {
    let spec = |container: Value| json!({"restartPolicy": "Never", "containers": [container]});
    let plain = json!({"name": "a", "image": "i"});
    let served =
        json!({"name": "a", "image": "i", "ports": [{"containerPort": 80, "hostPort": 80}]});
    for (container, is_deferrable) in [(plain, true), (served, false)] {
        let mut run = Run::new(a_pod(spec(container), json!({})));
        run.settle();
        run.exit("a0", 0);
        run.now += 10_000;
        run.input(Input::Hint);
        let stopping = |op: &Op| matches!(op, Op::StopSandbox(_));
        run.settle_but(stopping);
        assert!(run.waiting.iter().any(stopping));
        let status = run.published.last().expect("a status");
        assert_eq!(status.phase.as_deref(), Some("Succeeded"));
        assert_eq!(run.worker.is_sandbox_stop_deferrable(), is_deferrable);
        let statuses = run.published.len();
        run.settle();
        assert_eq!(
            run.published.len(),
            statuses,
            "everything has been published"
        );
    }
}

#[test]
fn unreadiness_is_published_while_another_container_starts() {
    let probe = json!({"exec": {"command": ["true"]}});
    let spec = json!({"containers": [{"name": "a", "image": "i", "readinessProbe": probe}, {"name": "b", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    run.settle();
    let probed = |result| Input::Probed {
        id: "a0".into(),
        kind: crate::pod::probe::Kind::Readiness,
        result,
    };
    run.input(probed(true));
    run.exit("b0", 1);
    run.now += 60_000;
    run.input(Input::Hint);
    run.settle_but(|op| op.key() == start("b"));
    assert!(run.waiting.iter().any(|op| op.key() == start("b")));
    let turn = run.input(probed(false));
    let ready = |status: &PodStatus| {
        let mut containers = status.container_statuses.iter().flatten();
        containers.any(|c| c.name == "a" && c.ready)
    };
    assert!(turn.publish.is_some_and(|status| !ready(&status)));
}

#[test]
fn a_pod_that_waits_for_the_network_reports_it() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    let mut run = Run::new(a_pod(spec, json!({})));
    run.input(Input::Network(Network::NotReady("no plugin".into())));
    run.settle();
    assert_eq!((run.phase(), run.count(&Key::Sandbox)), ("Pending", 0));
    let why = run.worker.waiting().unwrap_or_default().to_owned();
    assert!(why.contains("waits for the pod's sandbox"), "{why}");
    run.input(Input::Network(Network::Ready));
    run.settle();
    assert_eq!(run.phase(), "Running");
}

#[test]
fn a_replayed_record_reports_different_decisions() {
    let mut run = Run::new(a_pod(with_sidecar("Always"), json!({})));
    run.settle();
    for round in 0..20 {
        run.now += 20_000;
        run.exit(&format!("c{round}"), 1);
        run.input(Input::Hint);
        run.settle();
    }
    let stored = serde_json::to_string(&run.record).expect("JSON");
    let mut read: Record = serde_json::from_str(&stored).expect("the stored record");
    assert_eq!(read.replay(), vec![]);
    let entries = run.record.entries.len();
    let mut echo = run.worker.update().clone();
    let mut pod = Pod::clone(&echo.pod);
    pod.metadata.resource_version = Some("11".into());
    pod.status = Some(PodStatus {
        phase: Some("Running".into()),
        ..PodStatus::default()
    });
    echo.pod = Arc::new(pod);
    echo.object = Some(Arc::clone(&echo.pod));
    run.input(Input::Update(echo));
    assert_eq!(
        run.record.entries.len(),
        entries,
        "an echo of the status needs no record of the pod"
    );
    read.entries[3].decision.begin.push(Key::Finalise);
    let differences = read.replay();
    assert_eq!(differences.iter().map(|d| d.index).collect::<Vec<_>>(), [3]);
}

proptest! {
    /// For any order of inputs: no two operations with the same key run at once, and a terminating pod begins only
    /// operations for its termination. A debug assertion in `turn` checks that every planned operation has a wake-up
    /// time.
    #[test]
    fn a_worker_handles_every_order_of_events(choices in proptest::collection::vec(0u8..21, 1..120), init in any::<bool>()) {
        let spec = || if init { with_init("OnFailure") } else { with_sidecar("OnFailure") };
        let mut run = Run::new(a_pod(spec(), json!({})));
        for choice in choices {
            run.now += i64::from(choice) * 37;
            let op = run.waiting.get(usize::from(choice % 4)).cloned();
            match (choice, op) {
                (0..=8, Some(op)) => {
                    let outcome = run.outcome(&op);
                    run.done(&op.key(), outcome);
                }
                (9 | 10, Some(op)) => _ = run.done(&op.key(), Outcome::Failed(Fault::later("injected"))),
                (11, _) => {
                    let running = run.runtime.live().next().map(|c| c.id.clone());
                    if let Some(id) = running {
                        run.exit(&id, 1);
                    }
                    run.input(Input::Hint);
                }
                (12, _) => _ = run.input(Input::VolumesChanged),
                (13, _) => _ = run.input(Input::Hint),
                (14, _) if run.now > 2000 => {
                    let deleted = json!({"deletionTimestamp": "2023-11-14T22:13:20Z", "resourceVersion": "9"});
                    run.input(Input::Update(a_pod(spec(), deleted)));
                }
                (15, _) => {
                    let mut echo = run.worker.update().clone();
                    let mut pod = Pod::clone(&echo.pod);
                    pod.status = Some(PodStatus::clone(run.worker.status()));
                    echo.pod = Arc::new(pod);
                    echo.object = Some(Arc::clone(&echo.pod));
                    run.input(Input::Update(echo));
                }
                (16, _) => _ = run.input(Input::Terminate(shutdown::verdict(9))),
                (18, _) => {
                    let newest = run.runtime.newest("t").filter(|t| t.state == ContainerState::Running);
                    if let Some(id) = newest.filter(|_| init).map(|t| t.id.clone()) {
                        run.exit(&id, 0);
                    }
                    run.input(Input::Hint);
                }
                (19, _) => {
                    run.lose_sandbox();
                    run.input(Input::Hint);
                }
                _ => _ = run.input(Input::Tick),
            }
            let mut keys: Vec<Key> = run.waiting.iter().map(Op::key).collect();
            keys.sort();
            let all = keys.len();
            keys.dedup();
            prop_assert_eq!(keys.len(), all);
            if run.worker.state == State::Syncing {
                prop_assert!(!run.is_overconfident(), "{:?}", run.worker);
            }
            if run.worker.state.is_ending() {
                let starts = run.waiting.iter().any(|op| matches!(op, Op::Start { .. } | Op::Pull(_) | Op::Volumes { .. }));
                prop_assert!(!starts);
            }
        }
        prop_assert_eq!(run.record.replay(), vec![]);
    }
}
