use super::*;
use crate::pod::observed::Sandbox;
use jiff::Timestamp;
use proptest::prelude::*;
use serde_json::{Value, json};

fn a_pod(policy: &str, init: Value, names: &[&str]) -> Pod {
    let containers: Vec<Value> = names
        .iter()
        .map(|n| json!({"name": n, "image": "i"}))
        .collect();
    serde_json::from_value(
        json!({"metadata": {"name": "p", "uid": "u"}, "spec": {"restartPolicy": policy, "initContainers": init, "containers": containers}}),
    )
    .expect("a pod")
}

fn sandbox(id: &str, attempt: u32, ready: bool) -> Sandbox {
    Sandbox {
        id: id.into(),
        attempt,
        ready,
        created_at: Timestamp::from_second(i64::from(attempt)).expect("time"),
        ips: vec!["10.0.0.2".into()],
        host_network: false,
        handler: String::new(),
    }
}

fn container(
    name: &str,
    sandbox: &str,
    attempt: u32,
    state: ContainerState,
    code: i32,
) -> observed::Container {
    let hash = pod::container_hash(&Container {
        name: name.into(),
        image: Some("i".into()),
        ..Container::default()
    });
    observed::Container {
        id: format!("{name}-{attempt}"),
        name: name.into(),
        sandbox: sandbox.into(),
        attempt,
        state,
        created_at: Timestamp::from_second(i64::from(attempt)).expect("time"),
        started_at: None,
        finished_at: None,
        exit_code: code,
        reason: String::new(),
        message: String::new(),
        image: "i".into(),
        image_ref: String::new(),
        hash: Some(hash),
        user: None,
        stop_signal: None,
        message_file: None,
    }
}

fn seen(sandboxes: Vec<Sandbox>, containers: Vec<observed::Container>) -> ObservedPod {
    let mut observed = ObservedPod {
        sandboxes,
        containers,
    };
    observed.sort();
    observed
}

fn starts(actions: &PodActions) -> Vec<(String, u32)> {
    actions
        .start
        .iter()
        .map(|s| (s.container.name.clone(), s.attempt))
        .collect()
}

use ContainerState::{Exited, Running, Unknown};

static NONE_STOPPED: BTreeSet<String> = BTreeSet::new();

fn with(probed: &Probed) -> Health<'_> {
    static AS_SPEC: std::sync::LazyLock<Resizing> = std::sync::LazyLock::new(Resizing::default);
    Health {
        probed,
        wanted: &AS_SPEC.actuated,
        resizing: &AS_SPEC,
        stopped_to_restart: &NONE_STOPPED,
    }
}

fn none() -> Health<'static> {
    static NOTHING: Probed = Probed(std::collections::BTreeMap::new());
    with(&NOTHING)
}

#[test]
fn a_created_container_that_never_started_is_replaced_and_not_counted() {
    let observed = seen(
        vec![sandbox("s", 0, true)],
        vec![container("a", "s", 3, ContainerState::Created, 0)],
    );
    let actions = compute(
        &a_pod("Always", json!([]), &["a"]),
        &observed,
        &none(),
        |_| 0,
    );
    assert_eq!(
        (starts(&actions), actions.start[0].replaces.as_deref()),
        (vec![("a".to_owned(), 3)], Some("a-3"))
    );
}

#[test]
fn a_new_pod_gets_a_sandbox_and_its_containers() {
    let actions = compute(
        &a_pod("Always", json!([]), &["a", "b"]),
        &ObservedPod::default(),
        &none(),
        |_| 0,
    );
    assert_eq!(
        (
            actions.create_sandbox,
            actions.kill_pod,
            starts(&actions).len()
        ),
        (Some(0), false, 2)
    );
}

#[test]
fn restarts_follow_policy_exit_code_and_state() {
    let ready = || vec![sandbox("s", 0, true)];
    let cases: Vec<(&str, ContainerState, i32, &[(&str, u32)], bool)> = vec![
        ("Always", Running, 0, &[], false),
        ("Always", Exited, 0, &[("a", 1)], false),
        ("OnFailure", Exited, 0, &[], true),
        ("OnFailure", Exited, 1, &[("a", 1)], false),
        ("Never", Exited, 1, &[], true),
        ("Always", Unknown, 0, &[("a", 1)], false),
    ];
    for (policy, state, code, expected, kills) in cases {
        let actions = compute(
            &a_pod(policy, json!([]), &["a"]),
            &seen(ready(), vec![container("a", "s", 0, state, code)]),
            &none(),
            |_| 0,
        );
        let expected: Vec<(String, u32)> =
            expected.iter().map(|(n, a)| ((*n).into(), *a)).collect();
        assert_eq!(
            (starts(&actions), actions.kill_pod),
            (expected, kills),
            "{policy} {state:?} {code}"
        );
        assert_eq!(actions.kill.len(), usize::from(state == Unknown));
    }
}

#[test]
fn a_lost_sandbox_is_replaced_with_its_containers() {
    let observed = seen(
        vec![sandbox("s", 3, false)],
        vec![container("a", "s", 1, Exited, 137)],
    );
    let actions = compute(
        &a_pod("Always", json!([]), &["a"]),
        &observed,
        &none(),
        |_| 0,
    );
    assert_eq!(
        (actions.kill_pod, actions.create_sandbox, starts(&actions)),
        (true, Some(4), vec![("a".into(), 2)])
    );
    let never = compute(
        &a_pod("Never", json!([]), &["a"]),
        &observed,
        &none(),
        |_| 0,
    );
    assert_eq!(
        (never.kill_pod, never.create_sandbox, never.start.len()),
        (true, None, 0)
    );
    assert!(
        never.must_terminate,
        "a container with Never must not run again"
    );
    let init = json!([{"name": "i", "image": "i"}]);
    let early = seen(
        vec![sandbox("s", 0, false)],
        vec![container("i", "s", 0, Exited, 0)],
    );
    let again = compute(&a_pod("Never", init, &["a"]), &early, &none(), |_| 0);
    assert_eq!(
        (again.must_terminate, again.create_sandbox, starts(&again)),
        (false, Some(1), vec![("i".into(), 1)]),
        "no container of the pod had run"
    );
    let mut host = a_pod("Always", json!([]), &["a"]);
    host.spec.as_mut().expect("spec").host_network = Some(true);
    assert_eq!(
        compute(
            &host,
            &seen(vec![sandbox("s", 0, true)], vec![]),
            &none(),
            |_| 0
        )
        .create_sandbox,
        Some(1)
    );
}

#[test]
fn init_containers_run_one_by_one_and_sidecars_keep_running() {
    let init = json!([{"name": "i1", "image": "i"}, {"name": "side", "image": "i", "restartPolicy": "Always"}, {"name": "i2", "image": "i"}]);
    let pod = a_pod("Always", init, &["a"]);
    let ready = || vec![sandbox("s", 0, true)];
    let done = |n: &str| container(n, "s", 0, Exited, 0);
    let up = |n: &str| container(n, "s", 0, Running, 0);
    let cases = [
        (vec![], vec!["i1"]),
        (vec![up("i1")], vec![]),
        (vec![container("i1", "s", 0, Exited, 1)], vec!["i1"]),
        (vec![done("i1")], vec!["side"]),
        (vec![done("i1"), up("side")], vec!["i2"]),
        (vec![done("i1"), up("side"), done("i2")], vec!["a"]),
        // The exited instances were removed.
        (vec![up("side"), up("i2")], vec![]),
        (vec![done("i2")], vec!["side"]),
        (vec![done("i1"), up("side"), done("i2"), up("a")], vec![]),
        (
            vec![
                done("i1"),
                container("side", "s", 0, Exited, 0),
                done("i2"),
                up("a"),
            ],
            vec!["side"],
        ),
    ];
    for (containers, expected) in cases {
        let names: Vec<String> = containers
            .iter()
            .map(|c| format!("{} {:?}", c.name, c.state))
            .collect();
        let actions = compute(&pod, &seen(ready(), containers), &none(), |_| 0);
        let started: Vec<&str> = actions
            .start
            .iter()
            .map(|s| s.container.name.as_str())
            .collect();
        assert_eq!(started, expected, "{names:?}");
        assert!(!actions.kill_pod, "{names:?}");
    }
    let lost = container("i1", "s", 0, ContainerState::Unknown, 0);
    let actions = compute(&pod, &seen(ready(), vec![lost]), &none(), |_| 0);
    assert_eq!(actions.start[0].container.name, "i1");
    assert_eq!(
        actions.kill[0].id, "i1-0",
        "two instances never run at once"
    );
    let never = a_pod("Never", json!([{"name": "i1", "image": "i"}]), &["a"]);
    let failed = compute(
        &never,
        &seen(ready(), vec![container("i1", "s", 0, Exited, 1)]),
        &none(),
        |_| 0,
    );
    assert!(failed.kill_pod && failed.start.is_empty());
}

#[test]
fn the_newest_exited_instance_is_kept() {
    let observed = seen(
        vec![
            sandbox("old", 0, false),
            sandbox("used", 1, false),
            sandbox("s", 2, true),
        ],
        vec![
            container("a", "s", 3, Running, 0),
            container("a", "s", 2, Exited, 1),
            container("a", "used", 1, Exited, 1),
            container("b", "used", 0, Exited, 0),
        ],
    );
    assert_eq!(
        surplus(&observed)
            .iter()
            .map(|c| c.id.as_str())
            .collect::<Vec<_>>(),
        ["a-1"]
    );
    assert_eq!(surplus_sandboxes(&observed), ["old"]);
}

#[test]
fn granted_resizes_follow_the_resize_policy() {
    let mut pod = a_pod("Always", json!([]), &["a", "b"]);
    let resizing = Resizing {
        actuated: resize::wanted(&pod),
        ..Resizing::default()
    };
    for (container, policy) in pod
        .spec
        .as_mut()
        .expect("spec")
        .containers
        .iter_mut()
        .zip(["NotRequired", "RestartContainer"])
    {
        container.resources =
            serde_json::from_value(json!({"requests": {"cpu": "1"}})).expect("resources");
        container.resize_policy =
            serde_json::from_value(json!([{"resourceName": "cpu", "restartPolicy": policy}]))
                .expect("a policy");
    }
    let observed = seen(
        vec![sandbox("s", 0, true)],
        vec![
            container("a", "s", 0, Running, 0),
            container("b", "s", 0, Running, 0),
        ],
    );
    let wanted = resize::wanted(&pod);
    let probed = Probed::default();
    let health = |resizing| Health {
        probed: &probed,
        wanted: &wanted,
        resizing,
        stopped_to_restart: &NONE_STOPPED,
    };
    let actions = compute(&pod, &observed, &health(&resizing), |_| 0);
    assert_eq!(
        (
            actions.resize,
            actions.kill[0].message.as_str(),
            actions.start.len()
        ),
        (
            vec!["a".to_owned()],
            "Container b resize requires restart",
            1
        )
    );
    let done = Resizing {
        actuated: wanted.clone(),
        ..Resizing::default()
    };
    assert!(compute(&pod, &observed, &health(&done), |_| 0).is_empty());
}

#[test]
fn a_changed_image_restarts_only_that_container() {
    let mut pod = a_pod("Always", json!([]), &["a", "b"]);
    pod.spec.as_mut().expect("spec").containers[0].image = Some("other".into());
    let actions = compute(
        &pod,
        &seen(
            vec![sandbox("s", 0, true)],
            vec![
                container("a", "s", 0, Running, 0),
                container("b", "s", 0, Running, 0),
            ],
        ),
        &none(),
        |_| 0,
    );
    assert_eq!(
        (actions.kill.len(), starts(&actions)),
        (1, vec![("a".into(), 1)])
    );
}

#[test]
fn failed_probes_restart_a_container_and_startup_probes_gate_the_next() {
    let mut pod = a_pod(
        "Always",
        json!([{"name": "side", "image": "i", "restartPolicy": "Always", "startupProbe": {}}]),
        &["a"],
    );
    pod.spec.as_mut().expect("spec").containers[0].liveness_probe =
        Some(serde_json::from_value(json!({"terminationGracePeriodSeconds": 7})).expect("a probe"));
    let health = |id: &str, health: probe::Health| Probed([(id.to_owned(), health)].into());
    let up = |names: &[&str]| {
        seen(
            vec![sandbox("s", 0, true)],
            names
                .iter()
                .map(|n| container(n, "s", 0, Running, 0))
                .collect(),
        )
    };
    let waiting = compute(&pod, &up(&["side"]), &none(), |_| 0);
    assert!(
        waiting.is_empty(),
        "the sidecar has not started yet: {waiting:?}"
    );
    let started = health(
        "side-0",
        probe::Health {
            started: Some(true),
            ..probe::Health::default()
        },
    );
    assert_eq!(
        starts(&compute(&pod, &up(&["side"]), &with(&started), |_| 0)),
        [("a".to_owned(), 0)]
    );
    let sick = health(
        "side-0",
        probe::Health {
            started: Some(false),
            ..probe::Health::default()
        },
    );
    let actions = compute(&pod, &up(&["side"]), &with(&sick), |_| 0);
    assert_eq!(
        (actions.kill[0].message.as_str(), starts(&actions)),
        (
            "Init container side failed startup probe, will be restarted",
            vec![("side".into(), 1)]
        )
    );
    let dead = health(
        "a-0",
        probe::Health {
            alive: Some(false),
            ..probe::Health::default()
        },
    );
    let actions = compute(&pod, &up(&["side", "a"]), &with(&dead), |_| 0);
    assert_eq!(
        (actions.kill[0].message.as_str(), actions.kill[0].grace),
        (
            "Container a failed liveness probe, will be restarted",
            Some(7)
        )
    );
    pod.spec.as_mut().expect("spec").restart_policy = Some("Never".into());
    let actions = compute(&pod, &up(&["side", "a"]), &with(&dead), |_| 0);
    assert_eq!(
        (
            actions.kill[0].message.as_str(),
            actions.start.len(),
            actions.kill_pod
        ),
        ("Container a failed liveness probe", 0, true)
    );
}

#[test]
fn restart_rules_precede_the_containers_policy_and_that_the_pods() {
    let mut pod = a_pod("Never", json!([]), &["a", "b"]);
    let rules = json!([{"action": "Restart", "exitCodes": {"operator": "In", "values": [3]}}, {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [4]}}]);
    let a = &mut pod.spec.as_mut().expect("spec").containers[0];
    a.restart_policy = Some("OnFailure".into());
    a.restart_policy_rules = serde_json::from_value(rules).expect("rules");
    let of = |code| after_exit(&pod, Role::Regular, &pod::spec(&pod).containers[0], code);
    assert_eq!(
        [of(0), of(1), of(3), of(4)],
        [
            AfterExit::Stay,
            AfterExit::Restart,
            AfterExit::Restart,
            AfterExit::RestartAll
        ]
    );
    let b = &pod::spec(&pod).containers[1];
    assert_eq!(after_exit(&pod, Role::Regular, b, 1), AfterExit::Stay);
    let observed = seen(
        vec![sandbox("s", 0, true)],
        vec![
            container("a", "s", 0, Exited, 4),
            container("b", "s", 0, Running, 0),
        ],
    );
    let actions = compute(&pod, &observed, &none(), |_| 0);
    let order: Vec<&str> = actions
        .restart_all
        .iter()
        .map(|k| k.name.as_str())
        .collect();
    assert_eq!(
        (order, actions.start.len()),
        (vec!["b", "a"], 0),
        "the container that caused the restart is last"
    );
    let init = Container {
        name: "i".into(),
        restart_policy: Some("Never".into()),
        ..Container::default()
    };
    assert_eq!(
        after_exit(&a_pod("Always", json!([]), &["a"]), Role::Init, &init, 1),
        AfterExit::Stay
    );
}

/// The number of times that a plan starts container `a`, given its instances in the runtime: sandbox, state and exit
/// code. Sandbox `old` is not ready. Sandbox `new` exists if `has_new`, and is ready.
fn started_of(policy: &str, instances: &[(&str, ContainerState, i32)], has_new: bool) -> usize {
    let mut sandboxes = vec![sandbox("old", 0, false)];
    sandboxes.extend(has_new.then(|| sandbox("new", 1, true)));
    let instances = instances.iter().zip(0..);
    let mut all: Vec<_> = instances
        .map(|((sandbox, state, code), attempt)| container("a", sandbox, attempt, *state, *code))
        .collect();
    // Another container keeps the pod running.
    all.push(container("b", "old", 0, Exited, 137));
    let mut pod = a_pod(policy, json!([]), &["a", "b"]);
    pod.spec.as_mut().expect("spec").containers[1].restart_policy = Some("Always".into());
    let actions = compute(&pod, &seen(sandboxes, all), &none(), |_| 0);
    assert!(
        actions.start.iter().any(|s| s.container.name == "b"),
        "{policy}"
    );
    let of_a = actions.start.iter().filter(|s| s.container.name == "a");
    of_a.count()
}

#[test]
fn a_final_container_does_not_run_again_in_another_sandbox() {
    use ContainerState::Created;
    let ok = ("old", Exited, 0);
    let failed = ("old", Exited, 1);
    for (policy, instances, starts) in [
        ("OnFailure", &[ok][..], 0),
        ("OnFailure", &[failed], 1),
        ("OnFailure", &[failed, ok], 0),
        ("OnFailure", &[failed, ("old", Created, 0)], 1),
        ("OnFailure", &[], 1),
        ("Never", &[ok], 0),
        ("Never", &[failed], 0),
        ("Never", &[], 1),
        ("Always", &[ok], 1),
    ] {
        for has_new in [false, true] {
            let started = started_of(policy, instances, has_new);
            assert_eq!(started, starts, "{policy} {instances:?} {has_new}");
        }
    }
}

/// Upstream decides on the restart of a container when it stops the container, whatever the exit code will be.
#[test]
fn a_container_stopped_for_a_restart_restarts_whatever_its_exit_code() {
    let mut pod = a_pod("OnFailure", json!([]), &["a"]);
    let probe = json!({"exec": {"command": ["x"]}});
    let spec = pod.spec.as_mut().expect("spec");
    spec.containers[0].liveness_probe = serde_json::from_value(probe).expect("a probe");
    let of = |state, code| {
        let mut running = container("a", "s", 0, state, code);
        running.hash = None;
        seen(vec![sandbox("s", 0, true)], vec![running])
    };
    let mut probed = Probed::default();
    probed.0.entry("a-0".into()).or_default().alive = Some(false);
    for (policy, again) in [("OnFailure", true), ("Always", true), ("Never", false)] {
        pod.spec.as_mut().expect("spec").restart_policy = Some(policy.into());
        let actions = compute(&pod, &of(Running, 0), &with(&probed), |_| 0);
        assert_eq!(
            actions.to_restart.contains(&"a-0".to_owned()),
            again,
            "{policy}"
        );
        let stopped: BTreeSet<String> = actions.to_restart.into_iter().collect();
        let health = Health {
            stopped_to_restart: &stopped,
            ..none()
        };
        let actions = compute(&pod, &of(Exited, 0), &health, |_| 0);
        assert_eq!(starts(&actions).len(), usize::from(again), "{policy}");
    }
    // A changed definition is applied regardless of the restart policy.
    let mut changed = of(Running, 0);
    changed.containers[0].hash = Some("another".into());
    let actions = compute(&pod, &changed, &none(), |_| 0);
    assert_eq!(actions.to_restart, ["a-0"]);
}

#[test]
fn containers_in_an_older_sandbox_are_stopped() {
    let sandboxes = vec![sandbox("old", 0, false), sandbox("new", 1, true)];
    let of = |older: Option<observed::Container>| {
        let newest = container("a", "new", 1, Running, 0);
        let all = older.into_iter().chain([newest]).collect();
        let observed = seen(sandboxes.clone(), all);
        let pod = a_pod("Always", json!([]), &["a", "b"]);
        let actions = compute(&pod, &observed, &none(), |_| 0);
        let kills: Vec<String> = actions.kill.iter().map(|kill| kill.id.clone()).collect();
        (kills, starts(&actions))
    };
    let b = || vec![("b".to_owned(), 0)];
    assert_eq!(of(None), (vec![], b()));
    let late = container("a", "old", 0, Running, 0);
    assert_eq!(of(Some(late)), (vec!["a-0".to_owned()], b()));
    let late = container("b", "old", 0, Running, 0);
    assert_eq!(
        of(Some(late)),
        (vec!["b-0".to_owned()], vec![("b".to_owned(), 1)])
    );
}

/// In upstream's `computePodActions`, `InitContainersToStart` does not keep a pod alive.
#[test]
fn no_sidecar_restarts_once_the_pod_has_nothing_left_to_run() {
    let init = json!([{"name": "side", "image": "i", "restartPolicy": "Always"}]);
    let mut pod = a_pod("Never", init, &["a"]);
    let probe = json!({"exec": {"command": ["x"]}});
    let spec = pod.spec.as_mut().expect("spec");
    spec.containers[0].liveness_probe = serde_json::from_value(probe).expect("a probe");
    let mut probed = Probed::default();
    probed.0.entry("a-0".into()).or_default().alive = Some(false);
    for side in [Running, Exited] {
        let mut a = container("a", "s", 0, Running, 0);
        a.hash = None;
        let all = vec![a, container("side", "s", 0, side, 1)];
        let observed = seen(vec![sandbox("s", 0, true)], all);
        let actions = compute(&pod, &observed, &with(&probed), |_| 0);
        assert!(actions.kill_pod && actions.start.is_empty(), "{actions:?}");
    }
}

proptest! {
    /// For all sandboxes: a container in its final state never runs again, and no second instance runs next to the
    /// first.
    #[test]
    fn no_new_sandbox_restarts_a_final_container(
        instances in proptest::collection::vec((0u8..4, 0i32..2, 0usize..3), 0..8), ready in proptest::collection::vec(any::<bool>(), 3), policy in 0usize..3,
    ) {
        let pod = a_pod(["Always", "OnFailure", "Never"][policy], json!([]), &["a", "b"]);
        let boxes = ["s0", "s1", "s2"];
        let sandboxes = boxes.iter().zip(0..).zip(&ready).map(|((id, attempt), ready)| sandbox(id, attempt, *ready)).collect();
        let containers = instances.iter().zip(0..).map(|((state, code, place), attempt)| {
            let state = [ContainerState::Created, Running, Exited, Unknown][usize::from(*state)];
            container(["a", "b"][*place % 2], boxes[*place], attempt, state, *code)
        }).collect();
        let observed = seen(sandboxes, containers);
        let actions = compute(&pod, &observed, &none(), |_| 0);
        for start in &actions.start {
            if let Some(newest) = observed.newest(&start.container.name) {
                let stays = after_exit(&pod, Role::Regular, &start.container, newest.exit_code) == AfterExit::Stay;
                prop_assert!(newest.state != Exited || !stays, "{newest:?}");
                let is_stopped = actions.kill_pod || actions.kill.iter().any(|kill| kill.id == newest.id);
                prop_assert!(newest.state != Running || is_stopped, "{newest:?}");
            }
        }
    }

    #[test]
    fn no_plan_starts_a_running_container_or_anything_of_a_deleted_pod(
        states in proptest::collection::vec((0u8..4, 0i32..3), 0..4), ready: bool, policy in 0usize..3, deleted: bool,
    ) {
        let names = ["a", "b", "c"];
        let mut pod = a_pod(["Always", "OnFailure", "Never"][policy], json!([]), &names);
        if deleted {
            pod.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::UNIX_EPOCH));
        }
        let containers = states.iter().zip(names).map(|((state, code), name)| {
            let state = [ContainerState::Created, Running, Exited, Unknown][usize::from(*state)];
            container(name, "s", 0, state, *code)
        }).collect();
        let observed = seen(vec![sandbox("s", 0, ready)], containers);
        let actions = compute(&pod, &observed, &none(), |_| 0);
        for start in &actions.start {
            let running = observed.newest(&start.container.name).is_some_and(|c| c.state == Running);
            prop_assert!(!running || actions.kill_pod, "a running container is only restarted after its pod was killed");
        }
        if deleted && ready {
            prop_assert!(actions.start.is_empty());
        }
        prop_assert_eq!(actions.clone(), compute(&pod, &observed, &none(), |_| 0), "the same input gives the same plan");
    }
}
