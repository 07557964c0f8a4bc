//! AppArmor, which the kernel at hand lacks (issue 18): the processes of a pod have the profile that it asks for.

use serde_json::{Value, json};

use crate::run;
use crate::support::Cluster;

/// A profile of the node's own: everything may be done but to write one file.
const PROFILE: &str = "profile holdfast-test flags=(attach_disconnected, mediate_deleted) {\n  file,\n  capability,\n  signal,\n  deny /v/denied w,\n}\n";
const OWN: &str = "holdfast-test (enforce)";
/// What containerd gives to whoever does not ask for another.
const DEFAULT: &str = "cri-containerd.apparmor.d (enforce)";

/// A pod that tells its profile and whether it can write the file.
fn pod(image: &str, name: &str, context: &Value) -> Value {
    let script = "cat /proc/self/attr/apparmor/current; if (echo x > /v/denied) 2>/v/errors; then echo written; else echo denied; fi";
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "restartPolicy": "Never",
        "securityContext": context,
        "containers": [{"name": "c", "image": image, "command": ["busybox", "sh", "-c", script],
            "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        "volumes": [{"name": "v", "emptyDir": {}}]}})
}

/// Pods of each kind of profile, by the pod's field and by the old annotation.
pub fn profiles_are_enforced(cluster: &Cluster, image: &str) {
    let file = "/run/holdfast-test.apparmor";
    std::fs::write(file, PROFILE).unwrap();
    run("apparmor_parser", &["--replace", "--skip-cache", file]);
    let kind = |kind: &str| json!({"appArmorProfile": {"type": kind}});
    let local =
        |name: &str| json!({"appArmorProfile": {"type": "Localhost", "localhostProfile": name}});
    let mut pods = [
        ("by-default", json!({})),
        ("runtime-default", kind("RuntimeDefault")),
        ("unconfined", kind("Unconfined")),
        ("local", local("holdfast-test")),
        ("missing", local("not-loaded")),
        ("annotated", json!({})),
    ]
    .map(|(name, context)| pod(image, name, &context));
    let annotation = "container.apparmor.security.beta.kubernetes.io/c";
    pods[5]["metadata"]["annotations"] = json!({annotation: "localhost/holdfast-test"});
    cluster.apply(&pods.map(|pod| pod.to_string()).join("\n"));
    for (name, profile, file) in [
        ("by-default", DEFAULT, "written"),
        ("runtime-default", DEFAULT, "written"),
        ("unconfined", "unconfined", "written"),
        ("local", OWN, "denied"),
        ("annotated", OWN, "denied"),
    ] {
        cluster.wait("a pod with a profile to end", || {
            cluster.pod(name)["status"]["phase"] == "Succeeded"
        });
        let said = cluster.kubectl(&["logs", name]);
        assert_eq!(said, format!("{profile}\n{file}\n"), "{name}");
    }
    let mut waiting = Value::Null;
    cluster.wait("the profile to be missed", || {
        waiting =
            cluster.pod("missing")["status"]["containerStatuses"][0]["state"]["waiting"].clone();
        waiting["reason"] == "CreateContainerError"
    });
    let message = waiting["message"].as_str().unwrap();
    let missed = "apparmor profile not found not-loaded";
    assert!(message.contains(missed), "{message}");
    cluster.kubectl(&["delete", "pod", "missing", "--grace-period=1"]);
    cluster.delete_finished();
}
