//! The Node object of a real agent: its labels count at once, its heartbeat is independent of the runtime, devices of
//! another agent are zeroed, and a deletion is final until the next start.
#![allow(clippy::unwrap_used)]

mod support;

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::Cluster;

fn node(cluster: &Cluster) -> Value {
    let list: Value =
        serde_json::from_str(&cluster.kubectl(&["get", "nodes", "-o", "json"])).unwrap();
    list["items"][0].clone()
}

fn name(cluster: &Cluster) -> String {
    node(cluster)["metadata"]["name"]
        .as_str()
        .unwrap()
        .to_owned()
}

/// Status and message of the Ready condition.
fn ready(cluster: &Cluster) -> (String, String) {
    let node = node(cluster);
    let conditions = node["status"]["conditions"].as_array().unwrap();
    let ready = conditions.iter().find(|c| c["type"] == "Ready").unwrap();
    let text = |key: &str| ready[key].as_str().unwrap().to_owned();
    (text("status"), text("message"))
}

fn signal(pid: i32, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
}

/// Ends the agent; `up` starts it again.
fn stop_agent(cluster: &Cluster) {
    let pid = cluster.pid("agent");
    signal(pid, nix::sys::signal::SIGTERM);
    let stat = format!("/proc/{pid}/stat");
    cluster.wait_quietly("the agent to end", || {
        std::fs::read_to_string(&stat).map_or(true, |s| s.contains(") Z "))
    });
}

/// Writes the node's status, as nobody but an administrator may.
fn write_status(cluster: &Cluster, changes: &Value) {
    let mut node = node(cluster);
    json_patch::merge(&mut node["status"], changes);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), node.to_string()).unwrap();
    let path = format!("/api/v1/nodes/{}/status", name(cluster));
    cluster.kubectl(&[
        "replace",
        "--raw",
        &path,
        "-f",
        file.path().to_str().unwrap(),
    ]);
}

fn capacity(cluster: &Cluster, resource: &str) -> Option<String> {
    let node = node(cluster);
    let text = |key: &str| node["status"][key][resource].as_str().map(str::to_owned);
    assert_eq!(text("capacity"), text("allocatable"));
    text("capacity")
}

fn pod(cluster: &Cluster, name: &str, spec: &Value) {
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "holdfast.local/demo:1"}]}});
    json_patch::merge(&mut pod["spec"], spec);
    cluster.apply(&pod.to_string());
}

fn labels_count_at_once(cluster: &Cluster) {
    let name = name(cluster);
    for turn in 0..5 {
        let label = format!("turn-{turn}=yes");
        cluster.kubectl(&["label", "node", &name, "--overwrite", &label]);
        let selector = json!({"nodeSelector": {(format!("turn-{turn}")): "yes"}});
        pod(cluster, &format!("selects-{turn}"), &selector);
    }
    for turn in 0..5 {
        let pod = format!("selects-{turn}");
        cluster.wait(&format!("{pod} to run or to be refused"), || {
            let phase = cluster.pod(&pod)["status"]["phase"].clone();
            phase == "Running" || phase == "Failed"
        });
        let status = cluster.pod(&pod)["status"].clone();
        assert_eq!(status["phase"], "Running", "{status}");
    }
    cluster.kubectl(&[
        "label",
        "node",
        &name,
        "--overwrite",
        "kubernetes.io/os=plan9",
    ]);
    cluster.wait("the platform's label to be put right", || {
        node(cluster)["metadata"]["labels"]["kubernetes.io/os"] == "linux"
    });
}

fn devices_of_another_agent_are_zeroed(cluster: &Cluster) {
    let gpus = json!({"example.com/gpu": "4"});
    let devices = json!({"capacity": gpus, "allocatable": gpus});
    write_status(cluster, &devices);
    stop_agent(cluster);
    cluster.up();
    std::thread::sleep(Duration::from_secs(3));
    let kept = capacity(cluster, "example.com/gpu");
    assert_eq!(
        kept.as_deref(),
        Some("4"),
        "an administrator's resources stay"
    );
    stop_agent(cluster);
    let huge = json!({"nodeInfo": {"kubeletVersion": "v1.36.2"}, "capacity": {"hugepages-3Mi": "6Mi"}, "allocatable": {"hugepages-3Mi": "6Mi"}});
    write_status(cluster, &huge);
    cluster.up();
    cluster.wait("the devices to be zeroed", || {
        capacity(cluster, "example.com/gpu").as_deref() == Some("0")
    });
    assert_eq!(capacity(cluster, "hugepages-3Mi"), None);
    // Bound by hand: the scheduler would not send it here.
    let gpu = json!({"nodeName": name(cluster), "containers": [{"name": "c", "image": "holdfast.local/demo:1",
        "resources": {"limits": {"example.com/gpu": "1"}}}]});
    pod(cluster, "wants-gpu", &gpu);
    cluster.wait("a pod that wants one to be refused", || {
        cluster.pod("wants-gpu")["status"]["reason"] == "OutOfexample.com/gpu"
    });
}

fn a_short_absence_of_the_runtime_is_no_news(cluster: &Cluster) {
    let containerd = cluster.pid("containerd");
    let transition = |node: &Value| {
        let conditions = node["status"]["conditions"].as_array().unwrap().clone();
        let ready = conditions.into_iter().find(|c| c["type"] == "Ready");
        ready.unwrap()["lastTransitionTime"].clone()
    };
    let before = transition(&node(cluster));
    signal(containerd, nix::sys::signal::SIGSTOP);
    std::thread::sleep(Duration::from_secs(18));
    assert_eq!(ready(cluster).0, "True", "18 s without the runtime");
    assert_eq!(transition(&node(cluster)), before);
    cluster.wait("the node to be not ready", || ready(cluster).0 == "False");
    let message = ready(cluster).1;
    assert!(
        message.starts_with("container runtime is down: "),
        "{message}"
    );
    signal(containerd, nix::sys::signal::SIGCONT);
    let since = Instant::now();
    cluster.wait("the node to be ready again", || ready(cluster).0 == "True");
    // One second is what is promised; the machine that tests may be busy.
    assert!(
        since.elapsed() < Duration::from_secs(3),
        "{:?}",
        since.elapsed()
    );
    eprintln!("ready again after {:?}", since.elapsed());
}

fn a_deleted_node_is_not_registered_again(cluster: &Cluster) {
    let name = name(cluster);
    cluster.kubectl(&["delete", "node", &name]);
    cluster.wait_quietly("the agent to say so", || {
        cluster.log("agent").contains("the Node object was deleted")
    });
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(cluster.kubectl(&["get", "nodes", "-o", "name"]), "");
    stop_agent(cluster);
    cluster.up();
    assert_eq!(
        cluster.kubectl(&["get", "nodes", "-o", "name"]),
        format!("node/{name}\n")
    );
}

fn limits_are_the_configured_ones(cluster: &Cluster) {
    let of = |file: &str| {
        std::fs::read_to_string(format!("/proc/{}/{file}", cluster.pid("agent"))).unwrap()
    };
    let limits = of("limits");
    let files = limits
        .lines()
        .find(|l| l.starts_with("Max open files"))
        .unwrap();
    assert!(files.contains(" 5432 "), "{files}");
    // A container may lack the right to lower it; the agent says so then.
    let is_set = of("oom_score_adj").trim() == "-998";
    assert!(is_set || cluster.log("agent").contains("oomScoreAdj cannot be set"));
}

#[test]
fn the_node_object_is_true_and_known() {
    let fields = "nodeStatusUpdateFrequency: 2s\nmaxOpenFiles: 5432\noomScoreAdj: -998\n";
    let cluster = Cluster::start_configured("node", 54, fields);
    limits_are_the_configured_ones(&cluster);
    labels_count_at_once(&cluster);
    devices_of_another_agent_are_zeroed(&cluster);
    a_short_absence_of_the_runtime_is_no_news(&cluster);
    a_deleted_node_is_not_registered_again(&cluster);
}

/// The flags' help names every flag that the unit files use.
#[test]
fn flags_of_the_kubelet_are_known() {
    let output = Command::new(support::holdfast())
        .args(["agent", "--help"])
        .output()
        .unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    for flag in [
        "--cloud-provider",
        "--node-ip",
        "--hostname-override",
        "--bootstrap-kubeconfig",
    ] {
        assert!(help.contains(flag), "{flag}");
    }
}
