//! The units in `systemd/` on a running systemd (issue 15): a node's kubelet.service is switched to
//! Holdfast and back, as docs/JOINING.md describes, and the agent runs as its own service. The kubelet
//! is this binary, with the name `kubelet`.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::resources::wait_for;
use crate::support::{self, Cluster};
use crate::{an_uplink, programs, run, vm};

const IMAGE: &str = "test.local/busybox:1";
const DROP_IN: &str = "/etc/systemd/system/kubelet.service.d/20-holdfast.conf";
const INSTALLED: &str = "/usr/local/bin/holdfast";
const KUBELET: &str = "/usr/bin/kubelet";
/// As in the kubelet's Debian package.
const SERVICE: &str = "[Unit]\nDescription=kubelet: The Kubernetes Node Agent\nWants=network-online.target\nAfter=network-online.target\n[Service]\nExecStart=/usr/bin/kubelet\nRestart=always\nStartLimitInterval=0\nRestartSec=10\n[Install]\nWantedBy=multi-user.target\n";

#[test]
fn a_kubelets_unit_switches_to_holdfast_and_back() {
    let Some(mut node) = vm::Node::new("units::inside", &programs()) else {
        return;
    };
    let root = tempfile::tempdir().unwrap();
    let made = Command::new("make")
        .arg("install")
        .arg(format!("DESTDIR={}", root.path().display()))
        .arg(format!("DIST={}", support::holdfast().display()))
        .status();
    assert!(made.unwrap().success());
    // The programs are in the image already.
    for file in [
        "/usr/local/lib/systemd/system/holdfast-agent.service",
        "/usr/local/share/holdfast/20-holdfast.conf",
    ] {
        let made = root.path().join(file.strip_prefix('/').unwrap());
        node = node.with_file(Path::new(file), &std::fs::read(made).unwrap());
    }
    node.run(vm::PLAIN);
}

#[test]
#[ignore = "runs in a virtual machine"]
fn inside() {
    assert!(vm::is_inside(), "this test installs a kubelet");
    an_uplink();
    for program in [INSTALLED, KUBELET] {
        std::fs::create_dir_all(Path::new(program).parent().unwrap()).unwrap();
        std::fs::hard_link(support::holdfast(), program)
            .or_else(|_| std::fs::copy(support::holdfast(), program).map(drop))
            .unwrap();
    }
    // The machine is deleted after the test, and the cluster with it.
    let cluster = Cluster::new("units", 45).configured("cgroupDriver: systemd\n");
    let cluster = std::mem::ManuallyDrop::new(cluster);
    cluster.up();
    support::busybox_alone(&cluster, IMAGE);
    let pods = start_pods(&cluster);
    let flags = the_agents_flags(&cluster);
    cluster.kill("agent");

    make_the_kubelets_unit(&flags);
    systemctl(&["start", "kubelet"]);
    pods.check_unaffected(&cluster, "kubelet", KUBELET);
    run(
        "install",
        &[
            "-D",
            "-m",
            "644",
            "/usr/local/share/holdfast/20-holdfast.conf",
            DROP_IN,
        ],
    );
    systemctl(&["daemon-reload"]);
    systemctl(&["restart", "kubelet"]);
    pods.check_unaffected(&cluster, "kubelet", INSTALLED);
    one_that_is_killed_again_and_again_comes_back(&cluster);
    one_that_hangs_is_replaced(&cluster);
    pods.check_unaffected(&cluster, "kubelet", INSTALLED);
    std::fs::remove_file(DROP_IN).unwrap();
    systemctl(&["daemon-reload"]);
    systemctl(&["restart", "kubelet"]);
    pods.check_unaffected(&cluster, "kubelet", KUBELET);
    systemctl(&["stop", "kubelet"]);

    make_a_service_of_its_own(&flags);
    systemctl(&["start", "holdfast-agent"]);
    pods.check_unaffected(&cluster, "holdfast-agent", INSTALLED);
    a_confined_agent_can_do_its_work(&cluster);
}

fn systemctl(arguments: &[&str]) {
    run("systemctl", arguments);
}

/// A property of a unit.
fn property(unit: &str, name: &str) -> String {
    let output = Command::new("systemctl")
        .args(["show", "--timestamp=unix", "--value", "-p", name, unit])
        .output();
    String::from_utf8(output.unwrap().stdout)
        .unwrap()
        .trim()
        .to_owned()
}

fn main_pid(unit: &str) -> i32 {
    property(unit, "MainPID").parse().unwrap()
}

fn signal(pid: i32, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
}

/// The flags of the running agent.
fn the_agents_flags(cluster: &Cluster) -> Vec<String> {
    let text = std::fs::read(format!("/proc/{}/cmdline", cluster.pid("agent"))).unwrap();
    let text = String::from_utf8(text).unwrap();
    let words = text.trim_end_matches('\0').split('\0').skip(2);
    words.map(str::to_owned).collect()
}

/// The value of a flag.
fn flag<'a>(flags: &'a [String], name: &str) -> &'a str {
    let found = flags
        .iter()
        .find_map(|f| f.strip_prefix(name)?.strip_prefix('='));
    found.unwrap()
}

fn others(flags: &[String]) -> String {
    let is_file = |f: &&String| f.starts_with("--config=") || f.starts_with("--kubeconfig=");
    let others = flags.iter().filter(|f| !is_file(f));
    let others: Vec<&str> = others.map(String::as_str).collect();
    others.join(" ")
}

/// With kubeadm's drop-in, and its file of flags.
fn make_the_kubelets_unit(flags: &[String]) {
    let dir = Path::new("/etc/systemd/system/kubelet.service.d");
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write("/etc/systemd/system/kubelet.service", SERVICE).unwrap();
    let [kubeconfig, config] = ["--kubeconfig", "--config"].map(|name| flag(flags, name));
    std::fs::write(
        dir.join("10-kubeadm.conf"),
        format!("[Service]\nEnvironment=\"KUBELET_KUBECONFIG_ARGS=--kubeconfig={kubeconfig}\"\nEnvironment=\"KUBELET_CONFIG_ARGS=--config={config}\"\nEnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env\nEnvironmentFile=-/etc/default/kubelet\nExecStart=\nExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS\n"),
    )
    .unwrap();
    std::fs::create_dir_all("/var/lib/kubelet").unwrap();
    std::fs::write(
        "/var/lib/kubelet/kubeadm-flags.env",
        format!("KUBELET_KUBEADM_ARGS=\"{}\"\n", others(flags)),
    )
    .unwrap();
    systemctl(&["daemon-reload"]);
}

/// As `systemctl edit holdfast-agent` creates it.
fn make_a_service_of_its_own(flags: &[String]) {
    let dir = Path::new("/etc/holdfast");
    std::fs::create_dir_all(dir).unwrap();
    for (name, file) in [("--config", "config.yaml"), ("--kubeconfig", "kubeconfig")] {
        std::fs::copy(flag(flags, name), dir.join(file)).unwrap();
    }
    let own = Path::new("/etc/systemd/system/holdfast-agent.service.d");
    std::fs::create_dir_all(own).unwrap();
    std::fs::write(
        own.join("override.conf"),
        format!("[Service]\nExecStart=\nExecStart={INSTALLED} agent --config=/etc/holdfast/config.yaml --kubeconfig=/etc/holdfast/kubeconfig {}\n", others(flags)),
    )
    .unwrap();
    systemctl(&["daemon-reload"]);
}

/// The part of a pod's status that must not change: its containers, their restart counts, and since when it is ready.
#[derive(Debug, PartialEq)]
struct Life {
    containers: Vec<(Value, Value)>,
    ready_since: Value,
}

fn life(pod: &Value) -> Life {
    let status = &pod["status"];
    let of_container = |c: &Value| (c["containerID"].clone(), c["restartCount"].clone());
    let containers = status["containerStatuses"].as_array().unwrap().iter();
    let mut conditions = status["conditions"].as_array().unwrap().iter();
    let ready = conditions.find(|c| c["type"] == "Ready").unwrap();
    assert_eq!(ready["status"], "True", "{status}");
    Life {
        containers: containers.map(of_container).collect(),
        ready_since: ready["lastTransitionTime"].clone(),
    }
}

/// The initial state of the pods.
struct Pods(Vec<(String, Life)>);

/// Starts a pod with a probe and a sidecar, and a static pod.
fn start_pods(cluster: &Cluster) -> Pods {
    let idle = json!([
        "busybox",
        "sh",
        "-c",
        "trap exit TERM; while :; do busybox sleep 1; done"
    ]);
    let side = json!({"name": "side", "image": IMAGE, "command": idle, "restartPolicy": "Always"});
    let probe =
        json!({"exec": {"command": ["busybox", "true"]}, "periodSeconds": 5, "timeoutSeconds": 30});
    let container = |name: &str| json!({"name": name, "image": IMAGE, "command": idle, "env": [{"name": "A", "value": "b"}]});
    let mut probed = container("probed");
    probed["readinessProbe"] = probe;
    let pod = |name: &str, spec: Value| json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
    cluster.apply(&pod("plain", json!({"terminationGracePeriodSeconds": 1, "initContainers": [side], "containers": [probed]})).to_string());
    let manifest = cluster.data().join("agent/manifests/fixed.yaml");
    std::fs::write(
        manifest,
        pod("fixed", json!({"containers": [container("c")]})).to_string(),
    )
    .unwrap();
    let mirror = format!("fixed-{}", cluster.node_name());
    cluster.wait_quietly("the mirror of the static pod", || cluster.pods().len() == 2);
    let names = ["plain", &mirror];
    wait_for(cluster, "condition=Ready", &names);
    Pods(
        names
            .map(|name| (name.to_owned(), life(&cluster.pod(name))))
            .into(),
    )
}

impl Pods {
    /// Checks that the unit runs this program, that its agent reports the node as ready, and that the pods
    /// are not affected.
    fn check_unaffected(&self, cluster: &Cluster, unit: &str, program: &str) {
        cluster.wait("the unit to run", || {
            property(unit, "ActiveState") == "active"
        });
        let pid = main_pid(unit);
        let runs = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap();
        assert_eq!(runs, Path::new(program));
        wait_until_reported(cluster, unit);
        for (name, life_before) in &self.0 {
            assert_eq!(
                life(&cluster.pod(name)),
                *life_before,
                "{name} with {program}, on a node with {}",
                cluster.node()["status"]["conditions"]
            );
        }
        println!("{unit} runs {program}");
    }
}

/// Waits until the running agent reports the node as ready. Every step that stops an agent calls this
/// first: without a heartbeat within the control plane's grace period (50 s, which some starts take on
/// a slow machine) pods would correctly become unready.
fn wait_until_reported(cluster: &Cluster, unit: &str) {
    let begun = property(unit, "ExecMainStartTimestamp");
    let begun: i64 = begun.trim_start_matches('@').parse().unwrap();
    cluster.wait("this agent to report the node as ready", || {
        let node = cluster.node();
        let mut conditions = node["status"]["conditions"].as_array().unwrap().iter();
        let ready = conditions.find(|c| c["type"] == "Ready").unwrap();
        let heartbeat = ready["lastHeartbeatTime"].as_str().unwrap();
        let heartbeat: jiff::Timestamp = heartbeat.parse().unwrap();
        ready["status"] == "True" && heartbeat.as_second() >= begun
    });
}

/// The unit has no start limit after which systemd gives up.
fn one_that_is_killed_again_and_again_comes_back(cluster: &Cluster) {
    for _ in 0..6 {
        let pid = main_pid("kubelet");
        signal(pid, nix::sys::signal::SIGKILL);
        cluster.wait_quietly("another process", || {
            ![0, pid].contains(&main_pid("kubelet"))
        });
    }
    cluster.wait("the unit to run", || {
        property("kubelet", "ActiveState") == "active"
    });
    assert!(property("kubelet", "NRestarts").parse::<u32>().unwrap() >= 6);
    wait_until_reported(cluster, "kubelet");
}

/// The watchdog of the drop-in, with a shorter timeout for this test.
fn one_that_hangs_is_replaced(cluster: &Cluster) {
    let shorter = Path::new("/etc/systemd/system/kubelet.service.d/30-test.conf");
    std::fs::write(shorter, "[Service]\nWatchdogSec=20\nTimeoutAbortSec=1\n").unwrap();
    systemctl(&["daemon-reload"]);
    systemctl(&["restart", "kubelet"]);
    wait_until_reported(cluster, "kubelet");
    let pid = main_pid("kubelet");
    signal(pid, nix::sys::signal::SIGSTOP);
    let stopped = Instant::now();
    cluster.wait_quietly("another process", || {
        ![0, pid].contains(&main_pid("kubelet"))
    });
    // A restart before the watchdog's timeout has another cause.
    assert!(
        stopped.elapsed() > Duration::from_secs(5),
        "{:?}",
        stopped.elapsed()
    );
    assert_eq!(property("kubelet", "NRestarts"), "1");
    wait_until_reported(cluster, "kubelet");
    std::fs::remove_file(shorter).unwrap();
    systemctl(&["daemon-reload"]);
    systemctl(&["restart", "kubelet"]);
}

/// The restrictions of the unit allow everything that pods need: mounts that the runtime sees, owners
/// and modes, processes of containers.
fn a_confined_agent_can_do_its_work(cluster: &Cluster) {
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", main_pid("holdfast-agent"))).unwrap();
    assert!(status.contains("NoNewPrivs:\t1"), "{status}");
    cluster.kubectl(&[
        "create",
        "configmap",
        "settings",
        "--from-literal=key=value",
    ]);
    cluster.kubectl(&[
        "create",
        "secret",
        "generic",
        "hidden",
        "--from-literal=key=value",
    ]);
    let script = "busybox stat -c %g:%a /memory; busybox cat /settings/key /hidden/key /part && echo && exec busybox sleep 100000";
    let mounts = json!([{"name": "memory", "mountPath": "/memory"}, {"name": "settings", "mountPath": "/settings"},
        {"name": "hidden", "mountPath": "/hidden"}, {"name": "settings", "mountPath": "/part", "subPath": "key"}]);
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "later"}, "spec": {
        "terminationGracePeriodSeconds": 1, "securityContext": {"fsGroup": 4321},
        "containers": [{"name": "c", "image": IMAGE, "command": ["busybox", "sh", "-c", script], "volumeMounts": mounts,
            "lifecycle": {"postStart": {"exec": {"command": ["busybox", "true"]}}},
            "resources": {"limits": {"cpu": "500m", "memory": "64Mi"}}}],
        "volumes": [{"name": "memory", "emptyDir": {"medium": "Memory"}}, {"name": "settings", "configMap": {"name": "settings"}},
            {"name": "hidden", "secret": {"secretName": "hidden"}}]}});
    cluster.apply(&pod.to_string());
    wait_for(cluster, "condition=Ready", &["later"]);
    cluster.wait_quietly("the contents of the pod's volumes", || {
        // A tmpfs keeps its sticky bit.
        cluster.kubectl(&["logs", "later"]) == "4321:3777\nvaluevaluevalue\n"
    });
    assert_eq!(
        cluster.kubectl(&["exec", "later", "--", "busybox", "echo", "reached"]),
        "reached\n"
    );
    let uid = cluster.pod("later")["metadata"]["uid"]
        .as_str()
        .unwrap()
        .to_owned();
    cluster.kubectl(&["delete", "pod", "later"]);
    let dir = cluster.data().join("agent/pods").join(uid);
    cluster.wait_quietly("the pod's directory to be removed", || !dir.exists());
}
