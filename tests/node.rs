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

/// When the Ready condition was reported last.
fn heartbeat(cluster: &Cluster) -> Value {
    let node = node(cluster);
    let conditions = node["status"]["conditions"].as_array().unwrap();
    let ready = conditions.iter().find(|c| c["type"] == "Ready").unwrap();
    ready["lastHeartbeatTime"].clone()
}

fn signal(pid: i32, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
}

/// Ends the agent; `up` starts it again.
fn stop_agent(cluster: &Cluster) {
    let pid = cluster.pid("agent");
    cluster.unsupervise("agent");
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
    let before = heartbeat(cluster);
    cluster.up();
    cluster.wait("the first report of an agent that starts anew", || {
        heartbeat(cluster) != before
    });
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
    let resolv_conf = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(resolv_conf.path(), "nameserver 192.0.2.1\n").unwrap();
    let fields = format!(
        "nodeStatusUpdateFrequency: 2s\nmaxOpenFiles: 5432\noomScoreAdj: -998\nresolvConf: {}\n",
        resolv_conf.path().display()
    );
    let cluster = Cluster::start_configured("node", 54, &fields);
    limits_are_the_configured_ones(&cluster);
    the_resolver_configuration_is_read_again(&cluster, resolv_conf.path());
    tiers_weigh_what_their_pods_ask_for(&cluster);
    a_runtime_in_use_is_refused(&cluster);
    labels_count_at_once(&cluster);
    devices_of_another_agent_are_zeroed(&cluster);
    a_short_absence_of_the_runtime_is_no_news(&cluster);
    a_deleted_node_is_not_registered_again(&cluster);
}

fn the_resolver_configuration_is_read_again(cluster: &Cluster, resolv_conf: &std::path::Path) {
    let image = support::busybox(cluster);
    let of = |name: &str| {
        let spec = json!({"dnsPolicy": "Default", "containers": [{"name": "c", "image": image, "command": ["busybox", "sleep", "1000"]}]});
        pod(cluster, name, &spec);
        cluster.wait("the pod to run", || {
            cluster.pod(name)["status"]["phase"] == "Running"
        });
        support::inside(cluster, name, &["busybox", "cat", "/etc/resolv.conf"])
    };
    assert!(of("before").contains("nameserver 192.0.2.1"));
    std::fs::write(resolv_conf, "nameserver 192.0.2.2\n").unwrap();
    cluster.wait_quietly("the agent to see it", || {
        cluster.log("agent").contains("name resolution has changed")
    });
    assert!(of("after").contains("nameserver 192.0.2.2"));
    cluster.kubectl(&["delete", "pod", "before", "after"]);
}

fn shares(cluster: &Cluster, tier: &str) -> String {
    let below = format!("holdfast-{}/kubepods{tier}", cluster.name());
    let v1 = std::fs::read_to_string(format!("/sys/fs/cgroup/cpu/{below}/cpu.shares"));
    let found =
        v1.or_else(|_| std::fs::read_to_string(format!("/sys/fs/cgroup/{below}/cpu.weight")));
    found.unwrap().trim().to_owned()
}

fn tiers_weigh_what_their_pods_ask_for(cluster: &Cluster) {
    let v2 = std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let expected = |shares: &str, weight: &str| {
        if v2 {
            weight.to_owned()
        } else {
            shares.to_owned()
        }
    };
    let burstable = json!({"containers": [{"name": "c", "image": "holdfast.local/demo:1", "resources": {"requests": {"cpu": "250m"}}}]});
    pod(cluster, "burst", &burstable);
    cluster.wait("the burstable tier to weigh what its pod asks for", || {
        shares(cluster, "/burstable") == expected("256", "10")
    });
    assert_eq!(shares(cluster, "/besteffort"), expected("2", "1"));
    cluster.kubectl(&["delete", "pod", "burst"]);
    cluster.wait("the burstable tier to weigh nothing again", || {
        shares(cluster, "/burstable") == expected("2", "1")
    });
}

/// Another cluster does not take over a runtime that has pods already.
fn a_runtime_in_use_is_refused(cluster: &Cluster) {
    pod(cluster, "in-use", &json!({}));
    cluster.wait("the pod to run", || {
        cluster.pod("in-use")["status"]["phase"] == "Running"
    });
    let socket = std::fs::read_dir(cluster.run_dir())
        .unwrap()
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|e| e == "sock"))
        .unwrap();
    let endpoint = format!("unix://{}", socket.display());
    let mut command = Command::new(support::holdfast());
    command.args(["up", "--name", "t-intruder", "--api-port", "16498"]);
    let output = command
        .args(["--containerd-endpoint", &endpoint])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    for dir in ["/var/lib/holdfast-t-intruder", "/run/holdfast-t-intruder"] {
        std::fs::remove_dir_all(dir).unwrap();
    }
    assert!(
        !output.status.success() && said.contains("already serves a kubelet"),
        "{said}"
    );
}

/// What each unit file says, by its name.
fn units() -> Vec<(String, String)> {
    let files = std::fs::read_dir("systemd").unwrap().flatten();
    let read = |path: std::path::PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, std::fs::read_to_string(path).unwrap())
    };
    files.map(|f| read(f.path())).collect()
}

/// Mounts that the agent makes must be seen by the runtime: nothing may give the service a mount namespace.
#[test]
fn units_leave_mounts_alone_and_are_never_given_up() {
    let namespaces = [
        "ProtectSystem",
        "ProtectHome",
        "ProtectKernel",
        "ProtectControlGroups",
        "ProtectProc",
        "ProtectHostname=",
        "PrivateTmp",
        "PrivateDevices",
        "PrivateMounts",
        "PrivateUsers",
        "ReadOnlyPaths",
        "ReadWritePaths",
        "InaccessiblePaths",
        "BindPaths",
        "DynamicUser",
        "RootDirectory",
        "TemporaryFileSystem",
        "RestrictSUIDSGID",
        "MountFlags",
    ];
    for (name, text) in units() {
        let settings: Vec<&str> = text.lines().filter(|l| !l.starts_with('#')).collect();
        for banned in namespaces {
            assert!(
                !settings.iter().any(|s| s.starts_with(banned)),
                "{name}: {banned}"
            );
        }
        if text.contains("holdfast agent") {
            for wanted in [
                "Type=notify",
                "Restart=always",
                "StartLimitIntervalSec=0",
                "KillMode=process",
                "TimeoutStartSec=infinity",
            ] {
                assert!(settings.contains(&wanted), "{name}: {wanted}");
            }
        }
    }
}

#[test]
fn installing_and_uninstalling_leaves_only_what_is_the_administrators() {
    let root = tempfile::tempdir().unwrap();
    let make = |target: &str| {
        let mut command = Command::new("make");
        command.args([target, "PREFIX=/usr"]);
        command.arg(format!("DESTDIR={}", root.path().display()));
        command.arg(format!("RELEASE={}", support::holdfast().display()));
        let output = command.output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    let files = || {
        let mut found = vec![];
        let mut dirs = vec![root.path().to_owned()];
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(dir).unwrap().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    dirs.push(path);
                } else {
                    found.push(
                        path.strip_prefix(root.path())
                            .unwrap()
                            .display()
                            .to_string(),
                    );
                }
            }
        }
        found.sort();
        found
    };
    make("install");
    let config = root.path().join("etc/holdfast/config.yaml");
    std::fs::write(&config, "mine").unwrap();
    make("install");
    assert_eq!(std::fs::read_to_string(&config).unwrap(), "mine");
    assert_eq!(
        files(),
        [
            "etc/holdfast/config.yaml",
            "usr/bin/holdfast",
            "usr/bin/holdfast-cni",
            "usr/lib/systemd/system/holdfast-agent.service",
            "usr/lib/systemd/system/holdfast-dhcp.service",
            "usr/lib/systemd/system/holdfast-dhcp.socket",
            "usr/share/holdfast/10-holdfast.conflist",
            "usr/share/holdfast/20-holdfast.conf",
        ]
    );
    let unit = std::fs::read_to_string(
        root.path()
            .join("usr/lib/systemd/system/holdfast-agent.service"),
    )
    .unwrap();
    assert!(
        unit.contains("ExecStart=/usr/bin/holdfast agent "),
        "{unit}"
    );
    make("uninstall");
    assert_eq!(files(), ["etc/holdfast/config.yaml"]);
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
