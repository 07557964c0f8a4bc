//! Volumes against a real containerd: what is in them, when it changes, and what stays of them.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use holdfast::cri::{CriClient, Runtime as _};
use serde_json::Value;
use support::{Cluster, condition};

/// Runs a command in the only container of a pod; the answer is what it printed.
fn inside(cluster: &Cluster, pod: &str, command: &[&str]) -> String {
    let id = cluster.pod(pod)["status"]["containerStatuses"][0]["containerID"].as_str().unwrap().rsplit('/').next().unwrap().to_owned();
    let command: Vec<String> = command.iter().map(|c| (*c).to_owned()).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = CriClient::new(cluster.run_dir().join("containerd.sock").to_str().unwrap(), Duration::from_secs(60)).unwrap();
        client.exec(&id, &command, None).await.unwrap().output.trim().to_owned()
    })
}

fn pod(name: &str, image: &str, volumes: &str, mounts: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, labels: {{color: blue}}}}\nspec:\n  terminationGracePeriodSeconds: 1\n  volumes: {volumes}\n  containers: [{{name: c, image: '{image}', command: [busybox, sleep, '10000'], volumeMounts: {mounts}}}]\n---\n"
    )
}

fn ready(cluster: &Cluster, pod: &str) -> bool {
    condition(&cluster.pod(pod), "Ready") == "True"
}

#[test]
fn what_changes_in_the_api_changes_in_the_container() {
    // Nothing but the news of a change makes volumes be looked at again.
    let cluster = Cluster::start_configured("refresh", 34, "{syncFrequency: 1h}");
    let image = support::busybox(&cluster);
    cluster.kubectl(&["create", "configmap", "settings", "--from-literal=color=blue"]);
    cluster.kubectl(&["create", "secret", "generic", "keys", "--from-literal=pin=1111"]);
    let volumes = "[{name: m, configMap: {name: settings}}, {name: s, secret: {secretName: keys, defaultMode: 0400}}, {name: d, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}, {name: p, projected: {sources: [{configMap: {name: settings, items: [{key: color, path: a/b}]}}, {secret: {name: keys}}, {configMap: {name: late, optional: true}}]}}]";
    let mounts = "[{name: m, mountPath: /m}, {name: s, mountPath: /s}, {name: d, mountPath: /d}, {name: p, mountPath: /p}, {name: m, mountPath: /once, subPath: color}]";
    cluster.apply(&pod("one", &image, volumes, mounts));
    cluster.wait("the pod", || ready(&cluster, "one"));
    let cat = |path: &str| inside(&cluster, "one", &["cat", path]);
    assert_eq!([cat("/m/color"), cat("/s/pin"), cat("/p/a/b"), cat("/p/pin"), cat("/once")], ["blue", "1111", "blue", "1111", "blue"]);
    assert_eq!(inside(&cluster, "one", &["busybox", "stat", "-L", "-c", "%a", "/s/pin"]), "400");

    cluster.kubectl(&["patch", "configmap", "settings", "--patch", r#"{"data": {"color": "green", "size": "big"}}"#]);
    cluster.wait("the new settings", || cat("/m/color") == "green" && cat("/m/size") == "big" && cat("/p/a/b") == "green");
    assert_eq!(cat("/once"), "blue", "a subPath is what it was when its container was started");
    cluster.kubectl(&["patch", "secret", "keys", "--patch", r#"{"stringData": {"pin": "2222"}}"#]);
    cluster.wait("the new secret", || cat("/s/pin") == "2222" && cat("/p/pin") == "2222");
    cluster.kubectl(&["label", "pod", "one", "color=red", "--overwrite"]);
    cluster.wait("the new label", || cat("/d/labels").contains("color=\"red\""));
    cluster.kubectl(&["create", "configmap", "late", "--from-literal=late=here"]);
    cluster.wait("what was optional and came later", || cat("/p/late") == "here");

    // What has gone leaves what was there, and says so; a restart of the container is not held up by it.
    cluster.kubectl(&["delete", "configmap", "settings"]);
    cluster.wait("the loss to be told", || cluster.events("one").contains("configmap \"settings\" not found in namespace \"default\""));
    assert_eq!(cat("/m/color"), "green");
    let before = cluster.pod("one")["status"]["containerStatuses"][0]["containerID"].clone();
    let process = support::ctr(&cluster, "k8s.io", &["tasks", "ls"]);
    let id = before.as_str().unwrap().rsplit('/').next().unwrap().to_owned();
    let line = process.lines().find(|l| l.contains(&id)).unwrap();
    let pid: i32 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    cluster.wait("the container to be started again", || {
        let pod = cluster.pod("one");
        pod["status"]["containerStatuses"][0]["restartCount"] == 1 && condition(&pod, "Ready") == "True"
    });

    // A pod that waits for an object starts when it comes, and says meanwhile what it waits for.
    cluster.apply(&pod("two", &image, "[{name: m, configMap: {name: awaited}}]", "[{name: m, mountPath: /m}]"));
    let message = || cluster.pod("two")["status"]["containerStatuses"][0]["state"]["waiting"]["message"].clone();
    cluster.wait("the wait to be explained", || {
        message().as_str().is_some_and(|m| m.contains("volume m cannot be set up: configmap \"awaited\" not found in namespace \"default\""))
    });
    // By now the retries are far apart.
    std::thread::sleep(Duration::from_secs(6));
    cluster.kubectl(&["create", "configmap", "awaited", "--from-literal=x=y"]);
    let came = std::time::Instant::now();
    cluster.wait("the pod to start", || ready(&cluster, "two"));
    assert!(came.elapsed() < Duration::from_secs(4), "it was told, it did not try by chance");

    // A restarted agent catches up with what changed meanwhile.
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(cluster.pid("agent")), nix::sys::signal::Signal::SIGKILL).unwrap();
    cluster.kubectl(&["patch", "configmap", "awaited", "--patch", r#"{"data": {"x": "z"}}"#]);
    cluster.up();
    cluster.wait("what changed while nobody looked", || inside(&cluster, "two", &["cat", "/m/x"]) == "z");
    let restarts: Vec<Value> = cluster.pods().iter().map(|p| p["status"]["containerStatuses"][0]["restartCount"].clone()).collect();
    assert_eq!(restarts, [1, 0]);
    cluster.kubectl(&["delete", "pod", "--all", "--wait=true"]);
    assert_eq!(cluster.leftovers(), Vec::<String>::new());
}
