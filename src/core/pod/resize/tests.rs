use serde_json::json;

use super::*;

fn pod(cpu: &str, memory: &str, policy: Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"generation": 2}, "spec": {"containers": [
        {"name": "a", "resizePolicy": policy, "resources": {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory, "example.com/x": "1"}}},
    ]}}))
    .expect("a pod")
}

#[test]
fn a_resize_is_described_by_resource() {
    let before = pod("1", "64Mi", json!([]));
    let of = |now: &Pod| -> Vec<String> {
        let changes = requested_changes(&before, now);
        let shown = |a: &RequestedChange| format!("{} {} {}", a.operation, a.resource, a.of);
        changes.iter().map(shown).collect()
    };
    assert_eq!(of(&pod("1000m", "65536Ki", json!([]))), [""; 0]);
    assert_eq!(
        of(&pod("2", "32Mi", json!([]))),
        [
            "increase cpu requests",
            "decrease memory requests",
            "decrease memory limits"
        ]
    );
    let mut none = before.clone();
    none.spec.as_mut().expect("a spec").containers[0].resources = None;
    assert_eq!(
        of(&none),
        [
            "remove cpu requests",
            "remove memory requests",
            "remove memory limits"
        ]
    );
    assert_eq!(requested_changes(&none, &before)[0].operation, "add");
}

#[test]
fn sizes_are_compared_by_amount_and_resized_by_policy() {
    let restart = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    let before = desired(&pod("1", "64Mi", json!([])));
    let resizing = Resizing {
        actuated: before.clone(),
        ..Resizing::default()
    };
    for (cpu, memory, policy, expected) in [
        ("1000m", "65536Ki", json!([]), Change::None),
        ("2", "64Mi", json!([]), Change::Update),
        ("1", "128Mi", json!([]), Change::Update),
        ("1", "128Mi", restart.clone(), Change::Restart),
        ("2", "64Mi", restart, Change::Update),
    ] {
        let granted = pod(cpu, memory, policy);
        assert_eq!(
            change(
                &pod::spec(&granted).containers[0],
                &wanted(&granted),
                &resizing
            ),
            expected,
            "{cpu} {memory}"
        );
        assert_eq!(same(&desired(&granted), &before), expected == Change::None);
    }
    let lowered =
        |memory: &str| lowered_memory_limit("a", &wanted(&pod("1", memory, json!([]))), &before);
    assert_eq!(lowered("32Mi"), Some(32 << 20));
    assert_eq!(lowered("65Mi"), None);
}

#[test]
fn granted_sizes_replace_desired_ones_and_keep_the_rest() {
    let requested = pod("4", "1Gi", json!([]));
    let granted = with(&requested, &desired(&pod("1", "64Mi", json!([]))));
    let resources = pod::spec(&granted).containers[0]
        .resources
        .clone()
        .expect("resources");
    assert_eq!(resources.requests.expect("requests")["cpu"].0, "1");
    assert_eq!(resources.limits.expect("limits")["example.com/x"].0, "1");
    let larger = with_larger(
        &requested,
        &desired(&pod("8", "64Mi", json!([]))),
        &desired(&requested),
    );
    let resources = pod::spec(&larger).containers[0]
        .resources
        .clone()
        .expect("resources");
    assert_eq!(
        (
            resources.requests.as_ref().expect("requests")["cpu"]
                .0
                .as_str(),
            resources.limits.expect("limits")["memory"].0.as_str()
        ),
        ("8", "1Gi")
    );
    assert!(described(&requested, Some("why")).contains("\"error\":\"why\""));
}

#[test]
fn a_new_agent_resumes_from_the_sizes_in_the_status() {
    let mut requested = pod("4", "1Gi", json!([]));
    requested.status =
        serde_json::from_value(json!({"containerStatuses": [{"name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0,
        "resources": {"requests": {"cpu": "1", "memory": "64Mi"}, "limits": {"memory": "64Mi"}}}]}))
        .expect("a status");
    assert!(same(
        &known(&requested),
        &desired(&pod("1", "64Mi", json!([])))
    ));
}

/// Container `a` has no limits; container `b` has a memory limit. The pod requests 200m more CPU than its containers.
fn shared(resources: &Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"generation": 2}, "spec": {
        "resources": resources, "overhead": {"cpu": "50m"},
        "initContainers": [{"name": "i", "resources": {"requests": {"cpu": "10m"}}}],
        "containers": [
            {"name": "a", "resizePolicy": [{"resourceName": "memory", "restartPolicy": "RestartContainer"}]},
            {"name": "b", "resources": {"limits": {"memory": "10Mi"}, "requests": {"memory": "10Mi"}}}]}}))
    .expect("a pod")
}

fn sized(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": "16Mi"}, "limits": {"cpu": cpu, "memory": memory}})
}

#[test]
fn containers_without_their_own_limits_resize_with_the_pod() {
    let before = wanted(&shared(&sized("1", "64Mi")));
    let resizing = Resizing {
        actuated: before.clone(),
        ..Resizing::default()
    };
    let changes = |now: &Pod| -> Vec<Change> {
        let containers = pod::containers(now);
        let change = containers
            .iter()
            .map(|(_, c)| change(c, &wanted(now), &resizing));
        change.collect()
    };
    use Change::{None, Restart, Update};
    let same = shared(&sized("1000m", "65536Ki"));
    assert_eq!(changes(&same), [None, None, None]);
    // The container with its own memory limit gets the pod's CPU limit.
    assert_eq!(changes(&shared(&sized("2", "64Mi"))), [Update; 3]);
    let smaller = shared(&sized("1", "32Mi"));
    assert_eq!(changes(&smaller), [Update, Restart, None]);
    assert_eq!(
        lowered_memory_limit("a", &wanted(&smaller), &before),
        Some(32 << 20)
    );
    assert_eq!(
        lowered_memory_limit("b", &wanted(&smaller), &before),
        Option::None
    );
    // A limit that is added can be too low as well.
    let unlimited = shared(&json!({"requests": {"cpu": "1"}}));
    let limited = lowered_memory_limit("a", &before, &wanted(&unlimited));
    assert_eq!(limited, Some(64 << 20));
}

#[test]
fn a_resize_completes_when_all_containers_and_the_cgroup_have_it() {
    let (old, new) = (
        wanted(&shared(&sized("1", "64Mi"))),
        wanted(&shared(&sized("2", "64Mi"))),
    );
    let mut resizing = Resizing {
        actuated: old.clone(),
        cgroup: Some(old.clone()),
        ..Resizing::default()
    };
    assert!(!resizing.is_under_way(&old, |_| true));
    assert!(resizing.is_under_way(&new, |_| true) && resizing.needs_cgroup_resize(&new));
    resizing.complete_update(&["a".into(), "b".into()], new.clone());
    assert!(!resizing.needs_cgroup_resize(&new));
    // The init container has exited; while it ran, it had to be resized too.
    assert!(!resizing.is_under_way(&new, |name| name != "i"));
    assert!(resizing.is_under_way(&new, |_| true));
    // A cgroup that does not exist yet is created with the sizes that are granted by then.
    resizing.cgroup = None;
    assert!(!resizing.needs_cgroup_resize(&old));
}

#[test]
fn the_kubelets_pod_level_status_is_parsed() {
    let mut pod = shared(&sized("1", "64Mi"));
    pod.status = serde_json::from_value(json!({
        "allocatedResources": {"cpu": "1050m", "memory": "16Mi"},
        "resources": {"requests": {"cpu": "1050m", "memory": "16Mi"}, "limits": {"cpu": "1050m", "memory": "64Mi"}},
        "containerStatuses": [
            {"name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0, "resources": {}},
            {"name": "b", "image": "", "imageID": "", "ready": true, "restartCount": 0, "resources": {
                "requests": {"cpu": "1", "memory": "10Mi"}, "limits": {"cpu": "1", "memory": "10Mi"}}}]}))
    .expect("a status");
    assert!(same(&known(&pod), &desired(&pod)));
    assert!(same(&actuated(&pod), &wanted(&pod)));
    let (allocated, resources) = published_of_pod(&pod, &wanted(&pod), &actuated(&pod));
    let status = pod.status.clone().expect("a status");
    assert_eq!(json!(allocated), json!(status.allocated_resources));
    assert_eq!(json!(resources), json!(status.resources));
    // A later request has not been actuated.
    let status = pod.status.take();
    pod = shared(&sized("2", "128Mi"));
    pod.status = status;
    let granted = with(&pod, &known(&pod));
    assert!(same(
        &desired(&granted),
        &desired(&shared(&sized("1", "64Mi")))
    ));
}

#[test]
fn a_pod_without_pod_level_resources_keeps_its_qos_class() {
    let requested = shared(&sized("1", "64Mi"));
    let none = Sizes::default();
    let granted = with(&requested, &none);
    assert_eq!(pod::spec(&granted).resources, None);
    // Each size alone is Burstable; the larger of both would be Guaranteed.
    let of = |cpu: &str, memory: (&str, &str)| -> Pod {
        serde_json::from_value(json!({"spec": {"containers": [{"name": "a", "resources": {
            "requests": {"cpu": cpu, "memory": memory.0}, "limits": {"cpu": "3", "memory": memory.1}}}]}}))
        .expect("a pod")
    };
    let (before, now) = (of("1", ("2Gi", "2Gi")), of("3", ("1Gi", "2Gi")));
    let larger = with_larger(&now, &desired(&before), &desired(&now));
    assert_eq!(qos::of(pod::spec(&larger)), qos::of(pod::spec(&now)));
}

#[test]
fn pod_level_limits_are_reported_only_for_containers_with_their_own_limits() {
    let pod = shared(&sized("1", "64Mi"));
    let [a, b] = &pod::spec(&pod).containers[..] else {
        panic!("two containers");
    };
    let sizes = wanted(&pod);
    assert_eq!(
        reported_resources(a, &sizes),
        ResourceRequirements::default()
    );
    let limits = json!({"cpu": "1", "memory": "10Mi"});
    assert_eq!(json!(reported_resources(b, &sizes).limits), limits);
}

#[test]
fn the_pods_status_has_the_sums_of_its_containers() {
    let sums = |containers: Value| {
        let pod: Pod =
            serde_json::from_value(json!({"spec": {"containers": containers}})).expect("a pod");
        let (allocated, resources) = published_of_pod(&pod, &wanted(&pod), &wanted(&pod));
        (json!(allocated), json!(resources))
    };
    let a = json!({"name": "a", "resources": {"requests": {"cpu": "20m", "memory": "10Mi", "example.com/x": "1"},
        "limits": {"cpu": "30m", "memory": "20Mi", "example.com/x": "1"}}});
    let b =
        json!({"name": "b", "resources": {"requests": {"cpu": "5m"}, "limits": {"cpu": "10m"}}});
    assert_eq!(
        sums(json!([a, b])),
        (
            json!({"cpu": "25m", "memory": "10Mi", "example.com/x": "1"}),
            json!({"requests": {"cpu": "25m", "memory": "10Mi"}, "limits": {"cpu": "40m"}})
        )
    );
    assert_eq!(sums(json!([{"name": "c"}])), (Value::Null, Value::Null));
}

#[test]
fn a_memory_limit_cannot_go_below_the_current_usage() {
    let lowered = |of: &str, limit: i64, used: Option<u64>| Lowered {
        of: of.to_owned(),
        limit,
        used,
    };
    let refused = |why: &str| Err(format!("cannot decrease memory limits: {why}"));
    for (all, expected) in [
        (vec![], Ok(())),
        (vec![lowered("pod", 100, Some(99))], Ok(())),
        (
            vec![lowered("pod", 100, Some(100))],
            refused("attempting to set pod memory limit (100) below current usage (100)"),
        ),
        (
            vec![lowered("pod", 100, None)],
            refused("missing pod memory usage"),
        ),
        (
            vec![
                lowered("pod", 100, Some(200)),
                lowered("container \"a\"", 50, Some(60)),
                lowered("container \"b\"", 50, Some(40)),
            ],
            refused(
                "[attempting to set pod memory limit (100) below current usage (200), attempting to set container \"a\" memory limit (50) below current usage (60)]",
            ),
        ),
    ] {
        assert_eq!(check_lowered(&all), expected);
    }
    // The pod's own limit is checked only if it is lowered.
    let before = wanted(&pod("1", "64Mi", json!([])));
    let of_pod =
        |cpu: &str, memory: &str| lowered_pod_memory_limit(&pod(cpu, memory, json!([])), &before);
    assert_eq!(of_pod("2", "64Mi"), None);
    assert_eq!(of_pod("1", "65Mi"), None);
    assert_eq!(of_pod("1", "32Mi"), Some(32 << 20));
}

#[test]
fn a_running_container_with_swap_keeps_its_memory_request() {
    let sized = |request: &str, limit: &str, policy: &str| -> Pod {
        let policy = json!([{"resourceName": "memory", "restartPolicy": policy}]);
        let resources =
            json!({"requests": {"cpu": "1", "memory": request}, "limits": {"memory": limit}});
        serde_json::from_value(json!({"metadata": {}, "spec": {"containers": [
            {"name": "a", "resizePolicy": policy, "resources": resources},
        ]}}))
        .expect("a pod")
    };
    for (policy, from, to, moves) in [
        ("NotRequired", ("32Mi", "64Mi"), ("48Mi", "64Mi"), true),
        ("NotRequired", ("32Mi", "64Mi"), ("32Mi", "96Mi"), false),
        ("NotRequired", ("32Mi", "64Mi"), ("32768Ki", "64Mi"), false),
        (
            "RestartContainer",
            ("32Mi", "64Mi"),
            ("48Mi", "64Mi"),
            false,
        ),
        // A request that equals the limit keeps a container out of swap: before, after, or both.
        ("NotRequired", ("64Mi", "64Mi"), ("32Mi", "64Mi"), true),
        ("NotRequired", ("32Mi", "64Mi"), ("64Mi", "64Mi"), true),
        ("NotRequired", ("32Mi", "32Mi"), ("64Mi", "64Mi"), false),
    ] {
        let (now, then) = (sized(from.0, from.1, policy), sized(to.0, to.1, policy));
        assert_eq!(moves_swap(&now, &then), moves, "{policy} {from:?} {to:?}");
    }
}

/// A failed call may have been carried out. Until a call succeeds, the container may have either size.
#[test]
fn after_a_failed_resize_the_size_of_a_container_is_unknown() {
    let of = |cpu: &str, memory: &str| pod(cpu, memory, json!([]));
    let (small, large) = (of("1", "64Mi"), of("2", "128Mi"));
    let mut resizing = Resizing {
        actuated: wanted(&small),
        ..Resizing::default()
    };
    resizing.set_cgroup(wanted(&small));
    resizing.begin_update(&["a".into()], &wanted(&large));
    for now in [&small, &large] {
        let container = &pod::spec(now).containers[0];
        assert_eq!(change(container, &wanted(now), &resizing), Change::Update);
        assert!(resizing.is_under_way(&wanted(now), |_| true));
        assert!(resizing.needs_cgroup_resize(&wanted(now)));
    }
    // A container that does not run is started with its wanted size.
    assert!(resizing.unsettled.contains_key("a"));
    let lowered =
        |resizing: &Resizing| lowered_memory_limit("a", &wanted(&small), &resizing.at_most());
    assert_eq!(
        lowered(&resizing),
        Some(64 << 20),
        "its usage may be higher"
    );
    resizing.complete_update(&["a".into()], wanted(&small));
    assert!(!resizing.is_under_way(&wanted(&small), |_| true));
    assert_eq!(lowered(&resizing), None);
}

/// An agent was killed after it had started a container and before it published the status. Meanwhile the pod requests
/// another size.
#[test]
fn an_unreported_container_may_have_another_size_than_requested() {
    let reported = |generation: i64, container: Value| -> Pod {
        let mut pod = pod("1", "64Mi", json!([]));
        pod.metadata.generation = Some(2);
        let status = json!({"phase": "Pending", "observedGeneration": generation, "containerStatuses": [container]});
        pod.status = Some(serde_json::from_value(status).expect("a status"));
        pod
    };
    let of = |resources: Value| {
        let mut container =
            json!({"name": "a", "image": "i", "imageID": "", "ready": false, "restartCount": 0});
        container["resources"] = resources;
        container
    };
    let limits = json!({"memory": "64Mi", "example.com/x": "1"});
    let size = json!({"requests": {"cpu": "1", "memory": "64Mi"}, "limits": limits});
    for (generation, container, expected) in [
        (1, of(Value::Null), Change::Update),
        (2, of(Value::Null), Change::None),
        (1, of(size), Change::None),
    ] {
        let pod = reported(generation, container);
        let resizing = Resizing::adopted(&pod);
        let first = &pod::spec(&pod).containers[0];
        let found = change(first, &wanted(&pod), &resizing);
        assert_eq!(found, expected, "{generation} {:?}", pod.status);
    }
}
