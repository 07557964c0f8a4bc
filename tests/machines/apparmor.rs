//! AppArmor, which the running kernel lacks (issue 18): the processes of a pod have the profiles that it requests.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::resources::wait_for;
use crate::run;
use crate::support::Cluster;

/// A profile of the node's own: it denies writing one file and allows everything else. Without the rule
/// for signals no process could stop a container with this profile.
const PROFILE: &str = "profile holdfast-test flags=(attach_disconnected, mediate_deleted) {\n  file,\n  capability,\n  signal,\n  deny /v/denied w,\n}\n";
const OWN: &str = "holdfast-test (enforce): denied";
/// containerd's default profile.
const DEFAULT: &str = "cri-containerd.apparmor.d (enforce): written";
/// The runtime's message for a profile that is not loaded.
const MISSED: &str = "apparmor profile not found not-loaded";
const ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/annotated";

fn profile(kind: &str) -> Value {
    json!({"appArmorProfile": {"type": kind}})
}

fn local(name: &str) -> Value {
    json!({"appArmorProfile": {"type": "Localhost", "localhostProfile": name}})
}

/// A pod whose containers write, as termination message, their profile and whether they can write the file.
fn pod(name: &str, image: &str, context: &Value, containers: &[(&str, Value)]) -> Value {
    let script = "read -r profile </proc/self/attr/apparmor/current; if (echo x >/v/denied) 2>/v/errors; then done=written; else done=denied; fi; echo \"$profile: $done\" >/dev/termination-log";
    let containers = containers.iter().map(|(name, context)| {
        json!({"name": name, "image": image, "command": ["busybox", "sh", "-c", script], "securityContext": context,
            "volumeMounts": [{"name": "v", "mountPath": "/v"}]})
    });
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"restartPolicy": "Never",
        "securityContext": context, "containers": containers.collect::<Vec<_>>(), "volumes": [{"name": "v", "emptyDir": {}}]}})
}

/// Containers with each kind of profile, from the pod's field, their own and the old annotation. The
/// finished pods remain.
pub fn profiles_are_enforced(cluster: &Cluster, image: &str) {
    let file = "/run/holdfast-test.apparmor";
    std::fs::write(file, PROFILE).unwrap();
    run("apparmor_parser", &["--replace", "--skip-cache", file]);
    let mut free = pod(
        "profiles",
        image,
        &json!({}),
        &[
            ("by-default", json!({})),
            ("runtime-default", profile("RuntimeDefault")),
            ("unconfined", profile("Unconfined")),
            ("local", local("holdfast-test")),
            ("annotated", json!({})),
        ],
    );
    free["metadata"]["annotations"] = json!({ANNOTATION: "localhost/holdfast-test"});
    let own = [("pods", json!({})), ("changed", profile("RuntimeDefault"))];
    let bound = pod("profile", image, &local("holdfast-test"), &own);
    let missing = [("c", local("not-loaded"))];
    let missing = pod("missing", image, &json!({}), &missing);
    cluster.apply(&[free, bound, missing].map(|p| p.to_string()).join("\n"));
    let ended = "jsonpath={.status.phase}=Succeeded";
    wait_for(cluster, ended, &["profiles", "profile"]);
    let held = "jsonpath={.status.containerStatuses[0].state.waiting.reason}=CreateContainerError";
    wait_for(cluster, held, &["missing"]);

    let pods = cluster.pods();
    let states = pods.iter().flat_map(|pod| {
        let statuses = pod["status"]["containerStatuses"].as_array();
        let states = statuses.into_iter().flatten();
        states.map(|s| (s["name"].as_str().unwrap(), &s["state"]))
    });
    let states: BTreeMap<_, _> = states.collect();
    for (name, expected) in [
        ("by-default", DEFAULT),
        ("runtime-default", DEFAULT),
        ("unconfined", "unconfined: written"),
        ("local", OWN),
        ("annotated", OWN),
        ("pods", OWN),
        ("changed", DEFAULT),
    ] {
        let message = states[name]["terminated"]["message"].as_str();
        assert_eq!(message.map(str::trim), Some(expected), "{name}");
    }
    let missing = pods.iter().find(|p| p["metadata"]["name"] == "missing");
    let why = &missing.unwrap()["status"]["containerStatuses"][0]["state"]["waiting"]["message"];
    assert!(why.as_str().unwrap().contains(MISSED), "{why}");
    cluster.kubectl(&["delete", "pod", "missing", "--grace-period=1"]);
}
