use super::*;
use crate::pod::observed::Sandbox;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

mod restarts;

const AS_READ: Target<'_> = Target {
    uid: "u",
    version: Some("7"),
};

fn time(s: i64) -> Timestamp {
    Timestamp::from_second(s).expect("a time")
}

fn a_pod(policy: &str, init: Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u", "generation": 3}, "spec": {"restartPolicy": policy, "initContainers": init, "containers": [{"name": "a", "image": "i"}]}})).expect("a pod")
}

fn container(name: &str, attempt: u32, state: ContainerState, code: i32) -> observed::Container {
    observed::Container {
        id: format!("{name}{attempt}"),
        name: name.into(),
        sandbox: "s".into(),
        attempt,
        state,
        created_at: time(i64::from(attempt)),
        started_at: Some(time(10)),
        finished_at: (state == ContainerState::Exited).then(|| time(20)),
        exit_code: code,
        reason: String::new(),
        message: String::new(),
        image: "i".into(),
        image_ref: "sha256:x".into(),
        hash: None,
        user: None,
        stop_signal: None,
        message_file: None,
    }
}

fn status(
    pod: &Pod,
    containers: Vec<observed::Container>,
    problems: &Problems,
    ended: bool,
    previous: &PodStatus,
) -> PodStatus {
    let stopped = BTreeSet::new();
    status_of_stopped(pod, containers, problems, ended, previous, &stopped)
}

fn status_of_stopped(
    pod: &Pod,
    containers: Vec<observed::Container>,
    problems: &Problems,
    ended: bool,
    previous: &PodStatus,
    stopped_to_restart: &BTreeSet<String>,
) -> PodStatus {
    let sandbox = Sandbox {
        id: "s".into(),
        attempt: 0,
        ready: true,
        created_at: time(0),
        ips: vec!["10.0.0.2".into()],
        host_network: false,
        handler: String::new(),
    };
    let mut observed = ObservedPod {
        sandboxes: vec![sandbox],
        containers,
    };
    observed.sort();
    compute(&Facts {
        pod,
        observed: &observed,
        previous,
        problems,
        blocking_reason: None,
        probed: &Probed::default(),
        devices: &devices::OfPod::new(),
        has_volumes: true,
        starting: &BTreeSet::new(),
        stopped_to_restart,
        wanted: &resize::wanted(pod),
        resize: &Resizing {
            actuated: resize::wanted(pod),
            ..Resizing::default()
        },
        node_ips: &["192.0.2.1".into()],
        recursive_read_only: true,
        runtime: "containerd",
        ended,
        verdict: None,
        now: time(100),
    })
}

use ContainerState::{Exited, Running};

/// A static pod after a restart of the agent: its init containers were removed from the runtime and from the status.
#[test]
fn a_lost_init_container_has_completed_if_a_later_container_was_created() {
    let init = json!([{"name": "i", "image": "i"}, {"name": "s", "image": "i", "restartPolicy": "Always"}]);
    let pod = a_pod("Always", init);
    let of = |containers, previous: &PodStatus| {
        let status = status(&pod, containers, &Problems::new(), false, previous);
        let initialized = status
            .conditions
            .iter()
            .flatten()
            .find(|c| c.type_ == "Initialized");
        let initialized = initialized.is_some_and(|c| c.status == "True");
        let all = status.init_container_statuses.expect("statuses");
        let ends = all
            .iter()
            .map(|s| s.state.as_ref().and_then(|s| s.terminated.clone()));
        (ends.collect::<Vec<_>>(), all[0].ready, initialized)
    };
    let fresh = PodStatus::default();
    assert_eq!(of(vec![], &fresh), (vec![None, None], false, false));
    let side = container("s", 0, Running, 0);
    for state in [Running, Exited, ContainerState::Created] {
        let all = vec![container("a", 0, state, 1), side.clone()];
        let (ends, ready, _) = of(all, &fresh);
        let end = ends[0].as_ref().expect("a terminal state");
        assert_eq!(
            (end.exit_code, end.reason.as_deref()),
            (0, Some("Completed"))
        );
        let message = "Unable to get init container status from container runtime and pod has been initialized, treat it as exited normally";
        assert_eq!(end.message.as_deref(), Some(message));
        assert!(ready && ends[1].is_none(), "{ends:?}");
    }
    let (ends, ready, _) = of(vec![side], &fresh);
    assert!(ends[0].is_none() && !ready, "no container was created");
}

#[test]
fn phases_follow_container_states() {
    let init = json!([{"name": "i", "image": "i"}]);
    let held: Problems = [(
        "a".to_owned(),
        ("CrashLoopBackOff".to_owned(), "m".to_owned()),
    )]
    .into();
    let none = Problems::new();
    let cases: Vec<(
        &str,
        &str,
        Value,
        Vec<observed::Container>,
        &Problems,
        bool,
        &str,
    )> = vec![
        (
            "no container yet",
            "Always",
            json!([]),
            vec![],
            &none,
            false,
            "Pending",
        ),
        (
            "running",
            "Always",
            json!([]),
            vec![container("a", 0, Running, 0)],
            &none,
            false,
            "Running",
        ),
        (
            "crash loop",
            "Always",
            json!([]),
            vec![container("a", 1, Exited, 1)],
            &held,
            false,
            "Running",
        ),
        (
            "done",
            "OnFailure",
            json!([]),
            vec![container("a", 0, Exited, 0)],
            &none,
            false,
            "Succeeded",
        ),
        (
            "failed",
            "Never",
            json!([]),
            vec![container("a", 0, Exited, 3)],
            &none,
            false,
            "Failed",
        ),
        (
            "succeeded",
            "Always",
            json!([]),
            vec![container("a", 0, Exited, 0)],
            &none,
            true,
            "Succeeded",
        ),
        (
            "failed",
            "Always",
            json!([]),
            vec![container("a", 0, Exited, 143)],
            &none,
            true,
            "Failed",
        ),
        (
            "never started",
            "Always",
            json!([]),
            vec![],
            &none,
            true,
            "Failed",
        ),
        (
            "initialising",
            "Always",
            init.clone(),
            vec![container("i", 0, Running, 0)],
            &none,
            false,
            "Pending",
        ),
        (
            "init failed",
            "Never",
            init.clone(),
            vec![container("i", 0, Exited, 1)],
            &none,
            false,
            "Failed",
        ),
        (
            "init keeps failing",
            "Always",
            init,
            vec![container("i", 0, Exited, 1)],
            &none,
            false,
            "Pending",
        ),
    ];
    for (what, policy, init, containers, problems, ended, expected) in cases {
        let status = status(
            &a_pod(policy, init),
            containers,
            problems,
            ended,
            &PodStatus::default(),
        );
        assert_eq!(status.phase.as_deref(), Some(expected), "{what}");
    }
}

#[test]
fn a_terminal_phase_does_not_change() {
    let previous = PodStatus {
        phase: Some("Failed".into()),
        reason: Some("Evicted".into()),
        ..PodStatus::default()
    };
    let after = status(
        &a_pod("Always", json!([])),
        vec![container("a", 0, Running, 0)],
        &Problems::new(),
        false,
        &previous,
    );
    assert_eq!(
        (after.phase.as_deref(), after.reason.as_deref()),
        (Some("Failed"), Some("Evicted"))
    );
}

/// The problem of a start is the state of a container that will be started again, and of no other.
#[test]
fn a_container_waits_only_if_it_is_started_again() {
    let problem = |reason: &str| -> Problems {
        [("a".to_owned(), (reason.to_owned(), "failed".to_owned()))].into()
    };
    for (policy, code, reason, waits) in [
        ("Always", 128, "RunContainerError", true),
        ("OnFailure", 128, "RunContainerError", true),
        ("OnFailure", 0, "PostStartHookError", false),
        ("Never", 128, "RunContainerError", false),
        ("Never", 137, "PostStartHookError", false),
        ("Never", 1, RESTARTING_ALL, true),
    ] {
        let status = status(
            &a_pod(policy, json!([])),
            vec![container("a", 0, Exited, code)],
            &problem(reason),
            false,
            &PodStatus::default(),
        );
        let a = &status.container_statuses.as_ref().expect("statuses")[0];
        let state = a.state.as_ref().expect("a state");
        let (waiting, terminated) = (&state.waiting, &state.terminated);
        let what = format!("{policy} {code} {reason}");
        assert_eq!(waiting.is_some(), waits, "{what}");
        assert_eq!(terminated.is_some(), !waits, "{what}");
        let ended = matches!(status.phase.as_deref(), Some("Failed" | "Succeeded"));
        assert_eq!(ended, !waits, "{what}");
    }
}

#[test]
fn container_statuses_report_current_and_last_states() {
    let held: Problems = [(
        "a".to_owned(),
        ("CrashLoopBackOff".to_owned(), "back-off".to_owned()),
    )]
    .into();
    let looping = status(
        &a_pod("Always", json!([])),
        vec![container("a", 1, Exited, 1)],
        &held,
        false,
        &PodStatus::default(),
    );
    let a = &looping.container_statuses.as_ref().expect("statuses")[0];
    assert_eq!(
        a.state
            .as_ref()
            .and_then(|s| s.waiting.as_ref())
            .and_then(|w| w.reason.as_deref()),
        Some("CrashLoopBackOff")
    );
    assert_eq!(
        a.last_state
            .as_ref()
            .and_then(|s| s.terminated.as_ref())
            .map(|t| (t.exit_code, t.reason.clone())),
        Some((1, Some("Error".into())))
    );
    assert_eq!((a.restart_count, a.ready), (1, false));
    let running = status(
        &a_pod("Always", json!([])),
        vec![container("a", 0, Running, 0)],
        &Problems::new(),
        false,
        &PodStatus::default(),
    );
    let lost = status(
        &a_pod("Always", json!([])),
        vec![],
        &Problems::new(),
        false,
        &running,
    );
    let a = &lost.container_statuses.as_ref().expect("statuses")[0];
    assert_eq!(a.restart_count, 1);
    assert_eq!(
        a.last_state
            .as_ref()
            .and_then(|s| s.terminated.as_ref())
            .and_then(|t| t.reason.as_deref()),
        Some("ContainerStatusUnknown")
    );
}

#[test]
fn transition_times_change_only_with_the_condition_status() {
    let pod = a_pod("Always", json!([]));
    let first = status(
        &pod,
        vec![container("a", 0, Running, 0)],
        &Problems::new(),
        false,
        &PodStatus::default(),
    );
    let ready = first
        .conditions
        .as_ref()
        .expect("conditions")
        .iter()
        .find(|c| c.type_ == "Ready")
        .expect("Ready");
    assert_eq!(
        (ready.status.as_str(), ready.observed_generation),
        ("True", Some(3))
    );
    let mut earlier = first.clone();
    for condition in earlier.conditions.iter_mut().flatten() {
        condition.last_transition_time = Some(Time(time(1)));
    }
    let again = status(
        &pod,
        vec![container("a", 0, Running, 0)],
        &Problems::new(),
        false,
        &earlier,
    );
    assert_eq!(again, earlier);
    let down = status(
        &pod,
        vec![container("a", 0, Exited, 1)],
        &Problems::new(),
        false,
        &earlier,
    );
    let ready = down
        .conditions
        .as_ref()
        .expect("conditions")
        .iter()
        .find(|c| c.type_ == "Ready")
        .expect("Ready");
    assert_eq!(
        (ready.status.as_str(), ready.message.as_deref()),
        ("False", Some("containers with unready status: [a]"))
    );
    assert_eq!(ready.last_transition_time, Some(Time(time(100))));
}

#[test]
fn patches_contain_only_changes_and_keep_foreign_conditions() {
    let pod = a_pod("Always", json!([]));
    let status = status(
        &pod,
        vec![container("a", 0, Running, 0)],
        &Problems::new(),
        false,
        &PodStatus::default(),
    );
    assert_eq!(patch(AS_READ, &status, &status), None);
    let mut api = status.clone();
    api.conditions
        .as_mut()
        .expect("conditions")
        .push(PodCondition {
            type_: "Other".into(),
            status: "True".into(),
            ..PodCondition::default()
        });
    assert_eq!(
        patch(AS_READ, &api, &status),
        None,
        "conditions of other components are kept"
    );
    // A kube-apiserver returns or drops empty values, whatever was written.
    for container in api.container_statuses.iter_mut().flatten() {
        container.last_state = Some(k8s_openapi::api::core::v1::ContainerState::default());
        container.resources = Some(k8s_openapi::api::core::v1::ResourceRequirements::default());
    }
    assert_eq!(patch(AS_READ, &api, &status), None);
    api.phase = Some("Pending".into());
    let patch = patch(AS_READ, &api, &status).expect("a patch");
    assert_eq!(
        patch,
        json!({"metadata": {"uid": "u", "resourceVersion": "7"}, "status": {"phase": "Running"}})
    );
    let unread = Target {
        version: None,
        ..AS_READ
    };
    let patch = super::patch(unread, &api, &status).expect("a patch");
    assert_eq!(patch["metadata"], json!({"uid": "u"}));
}

/// The agent writes `DisruptionTarget` only if its node terminates the pod. A condition of another component stays as
/// that component last wrote it.
#[test]
fn a_disruption_condition_of_another_component_is_kept() {
    let of = |reason: &str| -> PodStatus {
        let condition = json!({"type": "DisruptionTarget", "status": "True", "reason": reason});
        serde_json::from_value(json!({"conditions": [condition]})).expect("a status")
    };
    for (api, wanted, is_written) in [
        ("EvictionByEvictionAPI", "DeletionByTaintManager", false),
        ("EvictionByEvictionAPI", "TerminationByKubelet", true),
        ("TerminationByKubelet", "TerminationByKubelet", false),
    ] {
        let patch = patch(AS_READ, &of(api), &of(wanted));
        assert_eq!(patch.is_some(), is_written, "{api} {wanted}");
    }
}

#[test]
fn changed_pod_addresses_replace_earlier_ones() {
    let status = |pod: &[&str], host: &[&str]| -> PodStatus {
        let list = |ips: &[&str]| ips.iter().map(|ip| json!({"ip": ip})).collect::<Vec<_>>();
        let status = json!({"podIP": pod.first(), "podIPs": list(pod), "hostIP": host.first(), "hostIPs": list(host)});
        serde_json::from_value(status).expect("a status")
    };
    let before = status(&["10.0.0.1", "fd00::1"], &["192.0.2.1"]);
    let after = status(&["10.0.0.2", "fd00::1"], &["192.0.2.2"]);
    assert_eq!(
        patch(AS_READ, &before, &after),
        Some(
            json!({"metadata": {"uid": "u", "resourceVersion": "7"}, "status": {
                "podIP": "10.0.0.2", "hostIP": "192.0.2.2",
                "$setElementOrder/podIPs": [{"ip": "10.0.0.2"}, {"ip": "fd00::1"}],
                "podIPs": [{"ip": "10.0.0.2"}, {"ip": "fd00::1"}, {"ip": "10.0.0.1", "$patch": "delete"}],
                "$setElementOrder/hostIPs": [{"ip": "192.0.2.2"}],
                "hostIPs": [{"ip": "192.0.2.2"}, {"ip": "192.0.2.1", "$patch": "delete"}],
            }})
        )
    );
    let other_order = status(&["fd00::1", "10.0.0.1"], &["192.0.2.1"]);
    let patch = patch(AS_READ, &before, &other_order).expect("a patch");
    assert_eq!(
        patch["status"]["$setElementOrder/podIPs"],
        json!([{"ip": "fd00::1"}, {"ip": "10.0.0.1"}])
    );
}

#[test]
fn device_health_is_published_and_kept_while_unknown() {
    use devices::{Health, reported_health};
    let own = |health: Health| -> devices::OfContainer {
        let of = |ids: &[&str]| {
            ids.iter()
                .map(|id| ((*id).to_owned(), health.into()))
                .collect()
        };
        [
            ("x/one".to_owned(), of(&["b", "a"])),
            ("x/two".to_owned(), of(&["c"])),
        ]
        .into()
    };
    let status = |before: Option<&ContainerStatus>, health| ContainerStatus {
        allocated_resources_status: reported_health(Some(&own(health)), before, false),
        ..ContainerStatus::default()
    };
    let shown = |status: &ContainerStatus| {
        let all = status.allocated_resources_status.iter().flatten();
        let of = |r: &k8s_openapi::api::core::v1::ResourceStatus| {
            let devices = r.resources.iter().flatten();
            let devices: Vec<String> = devices
                .map(|d| format!("{}={}", d.resource_id, d.health.as_deref().unwrap_or("")))
                .collect();
            format!("{} {}", r.name, devices.join(" "))
        };
        all.map(of).collect::<Vec<_>>()
    };
    let healthy = status(None, Health::Healthy);
    assert_eq!(
        shown(&healthy),
        ["x/one a=Healthy b=Healthy", "x/two c=Healthy"]
    );
    let ill = status(Some(&healthy), Health::Unhealthy);
    assert_eq!(
        shown(&ill),
        ["x/one a=Unhealthy b=Unhealthy", "x/two c=Unhealthy"]
    );
    assert_eq!(
        status(Some(&ill), Health::NotReported),
        ill,
        "a new agent keeps the published health"
    );
    let unknown = shown(&status(None, Health::NotReported));
    assert_eq!(unknown, ["x/one a=Unknown b=Unknown", "x/two c=Unknown"]);
    assert_eq!(shown(&status(Some(&ill), Health::Unknown)), unknown);
    // The health of a terminated pod's devices is kept. A container without devices has no health.
    assert_eq!(
        reported_health(None, Some(&ill), true),
        ill.allocated_resources_status
    );
    assert_eq!(reported_health(None, Some(&ill), false), None);
    assert_eq!(reported_health(None, None, true), None);
}

/// The states of a terminated pod, by container: `waiting`, `lost`, or its exit code.
fn end_states(pod: &Pod, seen: Vec<observed::Container>, previous: &PodStatus) -> Vec<String> {
    let published = status(pod, seen, &Problems::new(), true, previous);
    let lists = [
        &published.init_container_statuses,
        &published.container_statuses,
    ];
    let shown = |c: &ContainerStatus| {
        let state = c.state.clone().unwrap_or_default();
        let end = match (state.waiting, state.terminated) {
            (Some(waiting), _) => waiting.reason.unwrap_or_default(),
            (_, Some(end)) if end.reason.as_deref() == Some("ContainerStatusUnknown") => {
                "lost".into()
            }
            (_, Some(end)) => end.exit_code.to_string(),
            _ => "runs".into(),
        };
        format!("{} {end}", c.name)
    };
    let mut all: Vec<String> = lists.into_iter().flatten().flatten().map(shown).collect();
    let conditions = published.conditions.iter().flatten();
    let mut initialized = conditions.filter(|c| c.type_ == "Initialized");
    all.push(initialized.next().expect("the condition").status.clone());
    all.push(published.phase.unwrap_or_default());
    all
}

#[test]
fn containers_that_were_never_due_are_not_reported_as_lost() {
    let two = json!([{"name": "i", "image": "i"}, {"name": "j", "image": "i"}]);
    let pod = a_pod("Never", two);
    let none = PodStatus::default();
    let at = |states: Vec<observed::Container>| end_states(&pod, states, &none);
    // The second init container has failed: the kubelet shows Init:Error.
    assert_eq!(
        at(vec![
            container("i", 0, Exited, 0),
            container("j", 0, Exited, 1)
        ]),
        ["i 0", "j 1", "a PodInitializing", "False", "Failed"]
    );
    assert_eq!(
        at(vec![]),
        [
            "i PodInitializing",
            "j PodInitializing",
            "a PodInitializing",
            "False",
            "Failed"
        ]
    );
    // A later init container has started, so the first one had started too.
    assert_eq!(
        at(vec![container("j", 0, Exited, 1)]),
        ["i lost", "j 1", "a PodInitializing", "False", "Failed"]
    );
    // The init containers have completed, so the regular containers could start.
    assert_eq!(
        at(vec![
            container("i", 0, Exited, 0),
            container("j", 0, Exited, 0)
        ]),
        ["i 0", "j 0", "a lost", "True", "Failed"]
    );
    let initialised: PodStatus =
        serde_json::from_value(json!({"conditions": [{"type": "Initialized", "status": "True"}]}))
            .expect("a status");
    assert_eq!(
        end_states(&pod, vec![], &initialised),
        ["i lost", "j lost", "a lost", "True", "Failed"]
    );
    let plain = a_pod("Never", json!([]));
    assert_eq!(
        end_states(&plain, vec![], &none),
        ["a lost", "True", "Failed"]
    );
}

#[test]
fn a_node_without_an_address_keeps_the_published_one() {
    let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u"},
        "spec": {"hostNetwork": true, "containers": [{"name": "a", "image": "i"}]}}))
    .expect("a pod");
    let reported: PodStatus = serde_json::from_value(json!({"hostIP": "192.0.2.9",
        "hostIPs": [{"ip": "192.0.2.9"}], "podIPs": [{"ip": "192.0.2.9"}]}))
    .expect("a status");
    for (node_ips, previous, expected) in [
        (&["192.0.2.1".to_owned()][..], &reported, Some("192.0.2.1")),
        (&[], &reported, Some("192.0.2.9")),
        (&[], &PodStatus::default(), None),
    ] {
        let status = compute(&Facts {
            pod: &pod,
            observed: &ObservedPod::default(),
            previous,
            problems: &Problems::new(),
            blocking_reason: None,
            probed: &Probed::default(),
            devices: &devices::OfPod::new(),
            has_volumes: true,
            starting: &BTreeSet::new(),
            stopped_to_restart: &BTreeSet::new(),
            wanted: &resize::wanted(&pod),
            resize: &Resizing::default(),
            node_ips,
            recursive_read_only: true,
            runtime: "containerd",
            ended: false,
            verdict: None,
            now: time(100),
        });
        let first = status.host_ips.and_then(|ips| ips.into_iter().next());
        let addresses = [status.host_ip, first.map(|ip| ip.ip), status.pod_ip];
        assert_eq!(addresses, [(); 3].map(|()| expected.map(str::to_owned)));
    }
}

#[test]
fn termination_messages_share_twelve_kibibytes() {
    let containers: Vec<Value> = (0..12)
        .map(|n| json!({"name": format!("c{n}"), "image": "i"}))
        .collect();
    let spec = json!({"restartPolicy": "Never", "containers": containers});
    let pod: Pod =
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).expect("a pod");
    let seen = (0..12).map(|n| {
        let mut container = container(&format!("c{n}"), 0, Exited, 1);
        container.message = "ä".repeat(2048);
        container
    });
    let published = status(
        &pod,
        seen.collect(),
        &Problems::new(),
        true,
        &PodStatus::default(),
    );
    for container in published.container_statuses.into_iter().flatten() {
        let ended = container.state.and_then(|s| s.terminated).expect("ended");
        assert_eq!(ended.message.map(|m| m.len()), Some(1024));
    }
}

#[test]
fn pods_with_restart_all_rules_have_the_restart_condition() {
    let rules =
        json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [4]}}]);
    let mut pod = a_pod("Always", json!([]));
    let condition = |pod: &Pod, problems: &Problems| {
        let published = status(
            pod,
            vec![container("a", 0, Running, 0)],
            problems,
            false,
            &PodStatus::default(),
        );
        let found = published.conditions.into_iter().flatten();
        let mut found = found.filter(|c| c.type_ == "AllContainersRestarting");
        found.next().map(|c| c.status)
    };
    assert_eq!(condition(&pod, &Problems::new()), None);
    let spec = pod.spec.as_mut().expect("a spec");
    spec.containers[0].restart_policy_rules = serde_json::from_value(rules).expect("rules");
    assert_eq!(condition(&pod, &Problems::new()).as_deref(), Some("False"));
    let over = [("a".to_owned(), (RESTARTING_ALL.to_owned(), String::new()))];
    assert_eq!(condition(&pod, &over.into()).as_deref(), Some("True"));
}

/// Ids contain the name that the runtime reports. While the name is unknown, it is taken from earlier ids.
#[test]
fn container_ids_contain_the_runtime_name() {
    let pod =
        json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "a", "image": "i"}]}});
    let pod: Pod = serde_json::from_value(pod).expect("a pod");
    let known = |id: &str| -> PodStatus {
        let status = json!({"containerStatuses": [{"name": "a", "image": "i", "imageID": "", "ready": true,
            "restartCount": 0, "containerID": id}]});
        serde_json::from_value(status).expect("a status")
    };
    let (none, crio) = (PodStatus::default(), known("cri-o://old"));
    for (runtime, previous, expected) in [
        ("cri-o", &none, "cri-o"),
        ("containerd", &crio, "containerd"),
        ("", &crio, "cri-o"),
        ("", &none, "containerd"),
    ] {
        let observed = ObservedPod {
            containers: vec![container("a", 1, Running, 0), container("a", 0, Exited, 3)],
            ..ObservedPod::default()
        };
        let status = compute(&Facts {
            pod: &pod,
            observed: &observed,
            previous,
            problems: &Problems::new(),
            blocking_reason: None,
            probed: &Probed::default(),
            devices: &devices::OfPod::new(),
            starting: &BTreeSet::new(),
            wanted: &resize::wanted(&pod),
            resize: &Resizing::default(),
            node_ips: &[],
            recursive_read_only: true,
            has_volumes: true,
            stopped_to_restart: &BTreeSet::new(),
            runtime,
            ended: false,
            verdict: None,
            now: time(100),
        });
        let of = &status.container_statuses.expect("a container")[0];
        let before = of.last_state.as_ref().and_then(|s| s.terminated.as_ref());
        let before = before.and_then(|t| t.container_id.as_deref());
        for id in [of.container_id.as_deref(), before] {
            let scheme = id.and_then(|id| id.split_once("://")).map(|(name, _)| name);
            assert_eq!(scheme, Some(expected), "{runtime:?}");
        }
    }
}
