//! Control plane and agent are restarted when they exit, and `up status` reports this.
#![allow(clippy::unwrap_used)]

use crate::support;

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use support::Cluster;

/// A supervisor that a test has started. Dropping this kills it and its component.
struct Supervisor(Child, std::path::PathBuf);

impl Supervisor {
    fn part(&self) -> Option<i32> {
        let text = std::fs::read_to_string(self.1.join("agent.pid")).ok()?;
        text.split(' ').next()?.parse().ok()
    }

    fn state(&self) -> Option<Value> {
        serde_json::from_slice(&std::fs::read(self.1.join("agent.state")).ok()?).ok()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        if let Some(part) = self.part() {
            let _ = kill(Pid::from_raw(part), Signal::SIGKILL);
        }
    }
}

fn wait(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + support::condition_timeout();
    while !is() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_part_that_exits_is_restarted() {
    let dir = tempfile::tempdir().unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_holdfast"))
        .args(["supervise", "--part", "agent", "--run"])
        .arg(dir.path())
        .arg("--logs")
        .arg(dir.path())
        .args(["--", "sleep", "1000"])
        .spawn()
        .unwrap();
    let supervisor = Supervisor(child, dir.path().into());
    wait("the part", || supervisor.part().is_some());
    let first = supervisor.part().unwrap();
    kill(Pid::from_raw(first), Signal::SIGKILL).unwrap();
    wait("another part", || {
        supervisor.part().is_some_and(|p| p != first)
    });
    // The PID is recorded before the state is.
    let restarted = || supervisor.state().is_some_and(|s| s["restarts"] == 1);
    wait("the count of restarts", restarted);
    let state = supervisor.state().unwrap();
    assert_eq!(state["last_end"][0], "it was killed by SIGKILL");
}

/// A supervisor that is killed at any moment leaves no component running whose PID is not recorded.
#[test]
fn every_running_part_is_recorded() {
    for round in 0..30_u64 {
        let dir = tempfile::tempdir().unwrap();
        let mark = format!("{}{round:03}", 1_000_000 + std::process::id());
        let mut supervisor = Command::new(env!("CARGO_BIN_EXE_holdfast"))
            .args(["supervise", "--part", "agent", "--run"])
            .arg(dir.path())
            .arg("--logs")
            .arg(dir.path())
            .args(["--", "sleep", &mark])
            .spawn()
            .unwrap();
        // From before the supervisor has written its own state to after the component has started.
        std::thread::sleep(Duration::from_millis(round * 4));
        supervisor.kill().unwrap();
        supervisor.wait().unwrap();
        let recorded_pid = || -> Option<i32> {
            let text = std::fs::read_to_string(dir.path().join("agent.pid")).ok()?;
            text.split(' ').next()?.parse().ok()
        };
        // A process with the mark as its argument is the component, or the process that will exec it.
        let marked = || -> Vec<i32> {
            let pids = std::fs::read_dir("/proc").unwrap().flatten();
            let pids = pids.filter_map(|e| e.file_name().to_str()?.parse().ok());
            pids.filter(|pid: &i32| {
                let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                line.split(|b| *b == 0).any(|word| word == mark.as_bytes())
            })
            .collect()
        };
        // The PID that `down` would find: it waits for a process that is just recording its PID. All processes
        // that still run later must have been found.
        let directory_lock = std::fs::File::open(dir.path()).unwrap();
        directory_lock.lock().unwrap();
        let known = recorded_pid();
        drop(directory_lock);
        std::thread::sleep(Duration::from_millis(100));
        // A process before its exec exits as soon as it notices that its parent has exited.
        let begun = Instant::now();
        let mut left = marked();
        while left.iter().any(|pid| Some(*pid) != known)
            && begun.elapsed() < support::condition_timeout()
        {
            std::thread::sleep(Duration::from_millis(20));
            left = marked();
        }
        for pid in &left {
            // The process may have exited since.
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        assert!(
            left.iter().all(|pid| Some(*pid) == known),
            "round {round}: {left:?} run, and {known:?} is known"
        );
    }
}

/// A process may record its PID only after its supervisor has died and another one has started the
/// component. Then it leaves the other record alone.
#[test]
fn a_late_process_does_not_replace_the_recorded_part() {
    let dir = tempfile::tempdir().unwrap();
    let pid_file = dir.path().join("agent.pid");
    std::fs::write(&pid_file, "7 7\n").unwrap();
    // Process 1 is not its parent.
    let late = Command::new(env!("CARGO_BIN_EXE_holdfast"))
        .args(["supervise", "--part", "agent", "--for", "1", "--run"])
        .arg(dir.path())
        .arg("--logs")
        .arg(dir.path())
        .args(["--", "true"])
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&late.stderr);
    assert!(printed.contains("agent is not started"), "{printed}");
    assert_eq!(std::fs::read_to_string(&pid_file).unwrap(), "7 7\n");
}

#[test]
fn a_killed_control_plane_is_restarted() {
    let cluster = Cluster::start("supervised", 71);
    let before = cluster.pid("control-plane");
    kill(Pid::from_raw(before), Signal::SIGKILL).unwrap();
    cluster.wait("another control plane", || {
        std::fs::read_to_string(cluster.run_dir().join("control-plane.pid"))
            .is_ok_and(|t| !t.is_empty() && !t.starts_with(&format!("{before} ")))
    });
    let status = || {
        let output = Command::new(support::holdfast())
            .args(["up", "status", "--name", &cluster.name])
            .output()
            .unwrap();
        (
            output.status.success(),
            String::from_utf8(output.stdout).unwrap(),
        )
    };
    cluster.wait("the API to be served", || {
        status().1.contains("; restarted ")
            && cluster
                .log("control-plane")
                .matches("the control plane is serving")
                .count()
                >= 2
    });
    cluster.kubectl(&["get", "nodes"]);
    let (runs, text) = status();
    assert!(runs && text.contains("it was killed by SIGKILL"), "{text}");
    the_control_plane_keeps_its_secrets(&cluster);

    // `up` does not restart running components, and starts a new supervisor for a component that has lost its own.
    let agent = cluster.pid("agent");
    cluster.up();
    assert_eq!(cluster.pid("agent"), agent);
    cluster.unsupervise("agent");
    cluster.wait("a status about the missing supervisor", || {
        status().1.contains("without a supervisor")
    });
    cluster.up();
    let (runs, text) = status();
    assert!(runs && !text.contains("without a supervisor"), "{text}");
    the_readiness_is_that_of_the_agent_that_runs(&cluster);
    a_failing_api_server_is_reported(&cluster);
    the_network_file_is_rewritten(&cluster);
}

/// The process with the key of the cluster's CA writes no core file, and serves its API only on the
/// configured addresses.
fn the_control_plane_keeps_its_secrets(cluster: &Cluster) {
    let pid = cluster.pid("control-plane");
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let core = limits.lines().find(|l| l.starts_with("Max core file size"));
    let core: Vec<&str> = core.unwrap().split_whitespace().collect();
    assert_eq!(core[4..6], ["0", "0"], "{limits}");
    // The cluster's number determines its port (`Cluster::up`).
    let port = 16_471;
    let connects = |ip: [u8; 4]| std::net::TcpStream::connect((std::net::Ipv4Addr::from(ip), port));
    assert!(connects([127, 0, 0, 1]).is_ok());
    assert!(
        connects([127, 0, 0, 2]).is_err(),
        "the API listens only on the given addresses"
    );
    // The agent needs only the rights of a node.
    let refused = cluster.log("agent");
    let refused = refused.lines().find(|l| l.contains("is forbidden"));
    assert_eq!(refused, None);
}

/// `up` waits for the agent that it has started: until then the Node's status is the previous agent's.
fn the_readiness_is_that_of_the_agent_that_runs(cluster: &Cluster) {
    cluster.kill("agent");
    // Heartbeats have a resolution of one second.
    std::thread::sleep(Duration::from_millis(1100));
    cluster.up();
    let path = "jsonpath={.items[0].status.conditions[?(@.type=='Ready')].lastHeartbeatTime}";
    let heartbeat: jiff::Timestamp = cluster
        .kubectl(&["get", "nodes", "-o", path])
        .parse()
        .unwrap();
    let pid_file = std::fs::metadata(cluster.run_dir().join("agent.pid")).unwrap();
    let started = jiff::Timestamp::try_from(pid_file.modified().unwrap()).unwrap();
    assert!(
        heartbeat.as_second() >= started.as_second(),
        "{heartbeat} is before {started}"
    );
}

/// The agent's port is in use when it starts.
fn a_failing_api_server_is_reported(cluster: &Cluster) {
    let endpoint = cluster.node()["status"]["daemonEndpoints"]["kubeletEndpoint"].clone();
    let port = u16::try_from(endpoint["Port"].as_u64().unwrap()).unwrap();
    cluster.kill("agent");
    let taken = std::net::TcpListener::bind(("0.0.0.0", port)).unwrap();
    std::thread::scope(|scope| {
        // `up` waits until the node is ready.
        let up = scope.spawn(|| cluster.up());
        cluster.wait("the node not to be ready", || cluster.ready().0 == "False");
        let message = cluster.ready().1;
        let begins = "the kubelet API cannot be served on ";
        let names = message.starts_with(begins) && message.ends_with("listens there");
        assert!(names, "{message}");
        let get = "get events -A --field-selector reason=KubeletSetupFailed -o jsonpath={.items[*].message}";
        let get: Vec<&str> = get.split(' ').collect();
        cluster.wait("an event about the failure", || {
            cluster.kubectl(&get).contains(&message)
        });
        drop(taken);
        up.join().unwrap();
    });
    cluster.wait("the node to be ready", || cluster.ready().0 == "True");
}

/// By `up`, and by `down`, because no pod can stop without this file.
fn the_network_file_is_rewritten(cluster: &Cluster) {
    let image = support::busybox(cluster);
    cluster.kubectl(&[
        "run",
        "p",
        "--image",
        &image,
        "--command",
        "--",
        "busybox",
        "sleep",
        "1000",
    ]);
    cluster.kubectl(&["wait", "--for=condition=Ready", "pod/p", "--timeout=60s"]);
    let network = cluster.data().join("cni/net.d/10-holdfast.conflist");
    std::fs::remove_file(&network).unwrap();
    cluster.up();
    assert!(network.is_file());
    std::fs::remove_file(&network).unwrap();
    let output = Command::new(support::holdfast())
        .args(["down", "--purge", "--name", &cluster.name])
        .output()
        .unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}");
    assert!(!cluster.data().exists());
}

/// A node without an agent becomes Unknown and is tainted. Its pods are deleted when their toleration
/// expires. The node recovers when the agent returns.
#[test]
fn pods_of_a_silent_node_are_deleted() {
    let cluster = Cluster::start("silent", 73);
    let image = support::busybox(&cluster);
    let node = cluster.node_name();
    // Pods are deleted only while some node is ready: this one is, and no pod runs on it.
    let other = serde_json::json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "other"}, "spec": {"unschedulable": true},
        "status": {"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": "2026-01-01T00:00:00Z",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    cluster.apply(&other.to_string());
    let pod = |name: &str, seconds: u32| {
        let pod = serde_json::json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"terminationGracePeriodSeconds": 1,
            "containers": [{"name": "c", "image": image, "command": ["busybox", "sleep", "1000"]}],
            "tolerations": [{"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}]}});
        cluster.apply(&pod.to_string());
        cluster.kubectl(&[
            "wait",
            "--for=condition=Ready",
            &format!("pod/{name}"),
            "--timeout=60s",
        ]);
    };
    pod("short", 2);
    pod("long", 600);
    cluster.kill("agent");
    let heartbeat = |i: u32| {
        let patch = serde_json::json!({"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady",
            "lastHeartbeatTime": format!("2026-01-01T00:{:02}:{:02}Z", i / 60, i % 60)}]}});
        cluster.kubectl(&[
            "patch",
            "node",
            "other",
            "--subresource=status",
            "-p",
            &patch.to_string(),
        ]);
    };
    let ready = || {
        let path = "jsonpath={.status.conditions[?(@.type=='Ready')].status} {.spec.taints[*].key}";
        cluster.kubectl(&["get", "node", &node, "-o", path])
    };
    let deleting = |name: &str| {
        let path = "jsonpath={.metadata.deletionTimestamp}";
        !cluster
            .kubectl(&["get", "pod", name, "-o", path])
            .is_empty()
    };
    let deadline = Instant::now() + Duration::from_secs(50) + support::condition_timeout();
    for i in 1.. {
        assert!(Instant::now() < deadline, "{}", ready());
        heartbeat(i);
        if deleting("short") {
            break;
        }
        std::thread::sleep(Duration::from_secs(2));
    }
    let shown = ready();
    assert!(
        shown.starts_with("Unknown ") && shown.contains("unreachable"),
        "{shown}"
    );
    assert!(!deleting("long"));
    cluster.up();
    cluster.wait("the node to be ready", || ready().trim() == "True");
    cluster.wait("the pod to be deleted", || {
        cluster.kubectl(&["get", "pods", "-o", "name"]).trim() == "pod/long"
    });
}
