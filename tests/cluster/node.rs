//! The Node object of a real agent. Changes of its labels count immediately, and its heartbeat is
//! independent of the runtime. Devices of an earlier agent are reset to zero, and a deletion is final
//! until the next start. DRA drivers prepare claims.
#![allow(clippy::unwrap_used)]

use crate::dra;
use crate::pod_resources;
use crate::support;

use std::process::Command;
use std::time::{Duration, Instant};

use holdfast_core::cpuset;
use holdfast_proto::dra_health as health;
use holdfast_proto::podresources::ListPodResourcesRequest;
use pod_resources::list_assignments;
use serde_json::{Value, json};
use support::{Cluster, pod};

/// The last heartbeat of the Ready condition.
fn heartbeat(cluster: &Cluster) -> Value {
    let node = cluster.node();
    let conditions = node["status"]["conditions"].as_array().unwrap();
    let ready = conditions.iter().find(|c| c["type"] == "Ready").unwrap();
    ready["lastHeartbeatTime"].clone()
}

fn signal(pid: i32, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
}

/// Stops the agent; `up` starts it again.
fn stop_agent(cluster: &Cluster) {
    let pid = cluster.pid("agent");
    cluster.unsupervise("agent");
    signal(pid, nix::sys::signal::SIGTERM);
    cluster.wait_for_exit(pid);
}

/// Writes the node's status as an administrator.
fn write_status(cluster: &Cluster, changes: &Value) {
    // As a patch, because the agent also writes every two seconds.
    let patch = json!({"status": changes}).to_string();
    cluster.kubectl(&[
        "patch",
        "node",
        &cluster.node_name(),
        "--subresource=status",
        "--type=merge",
        "-p",
        &patch,
    ]);
}

fn capacity(cluster: &Cluster, resource: &str) -> Option<String> {
    let node = cluster.node();
    let text = |key: &str| node["status"][key][resource].as_str().map(str::to_owned);
    assert_eq!(text("capacity"), text("allocatable"));
    text("capacity")
}

fn labels_count_at_once(cluster: &Cluster) {
    let name = cluster.node_name();
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
    cluster.wait("the platform's label to be corrected", || {
        cluster.node()["metadata"]["labels"]["kubernetes.io/os"] == "linux"
    });
}

fn devices_of_another_agent_are_zeroed(cluster: &Cluster) {
    let gpus = json!({"example.com/gpu": "4"});
    let devices = json!({"capacity": gpus, "allocatable": gpus});
    write_status(cluster, &devices);
    stop_agent(cluster);
    let before = heartbeat(cluster);
    cluster.up();
    cluster.wait("the first status of the restarted agent", || {
        heartbeat(cluster) != before
    });
    let kept = capacity(cluster, "example.com/gpu");
    assert_eq!(
        kept.as_deref(),
        Some("4"),
        "an administrator's resources remain"
    );
    stop_agent(cluster);
    let huge = json!({"nodeInfo": {"kubeletVersion": "v1.36.2"}, "capacity": {"hugepages-3Mi": "6Mi"}, "allocatable": {"hugepages-3Mi": "6Mi"}});
    write_status(cluster, &huge);
    cluster.up();
    cluster.wait("the devices to be zeroed", || {
        capacity(cluster, "example.com/gpu").as_deref() == Some("0")
    });
    assert_eq!(capacity(cluster, "hugepages-3Mi"), None);
    // Bound directly: the scheduler would not choose this node.
    let gpu = json!({"nodeName": cluster.node_name(), "containers": [{"name": "c", "image": "holdfast.local/demo:1",
        "resources": {"limits": {"example.com/gpu": "1"}}}]});
    pod(cluster, "wants-gpu", &gpu);
    cluster.wait("a pod that wants one to be refused", || {
        cluster.pod("wants-gpu")["status"]["reason"] == "OutOfexample.com/gpu"
    });
}

fn a_short_absence_of_the_runtime_changes_nothing(cluster: &Cluster) {
    let containerd = cluster.pid("containerd");
    let transition = |node: &Value| {
        let conditions = node["status"]["conditions"].as_array().unwrap().clone();
        let ready = conditions.into_iter().find(|c| c["type"] == "Ready");
        ready.unwrap()["lastTransitionTime"].clone()
    };
    let before = transition(&cluster.node());
    signal(containerd, nix::sys::signal::SIGSTOP);
    std::thread::sleep(Duration::from_secs(18));
    assert_eq!(
        cluster.ready().0,
        "True",
        "the node is ready after 18 s without the runtime"
    );
    assert_eq!(transition(&cluster.node()), before);
    cluster.wait("the node not to be ready", || cluster.ready().0 == "False");
    let message = cluster.ready().1;
    assert!(
        message.starts_with("container runtime is down: "),
        "{message}"
    );
    signal(containerd, nix::sys::signal::SIGCONT);
    let since = Instant::now();
    cluster.wait("the node to be ready again", || cluster.ready().0 == "True");
    // The agent promises one second; the test machine may be busy.
    assert!(
        since.elapsed() < Duration::from_secs(10),
        "{:?}",
        since.elapsed()
    );
    eprintln!("ready again after {:?}", since.elapsed());
}

/// The events about the node: type, reason and message, a line each.
fn node_events(cluster: &Cluster) -> String {
    let name = cluster.node_name();
    let get = format!("get events -A --field-selector involvedObject.name={name} -o");
    let lines = "jsonpath={range .items[*]}{.type} {.reason} {.message}{\"\\n\"}{end}";
    cluster.kubectl(&get.split(' ').chain([lines]).collect::<Vec<&str>>())
}

fn the_node_events_are_emitted(cluster: &Cluster) {
    let name = cluster.node_name();
    for (verb, now) in [
        ("cordon", "NodeNotSchedulable"),
        ("uncordon", "NodeSchedulable"),
    ] {
        let event = format!("Normal {now} Node {name} status is now: {now}\n");
        assert!(!node_events(cluster).contains(&event));
        cluster.kubectl(&[verb, &name]);
        cluster.wait(now, || node_events(cluster).contains(&event));
    }
    assert!(
        !node_events(cluster).contains("Rebooted"),
        "the agent restarted, the machine did not"
    );
    let boot_id = cluster.node()["status"]["nodeInfo"]["bootID"].clone();
    let boot_id = boot_id.as_str().unwrap();
    let event = format!("Warning Rebooted Node {name} has been rebooted, boot id: {boot_id}\n");
    stop_agent(cluster);
    write_status(cluster, &json!({"nodeInfo": {"bootID": "of-before"}}));
    cluster.up();
    cluster.wait("the event about the reboot", || {
        node_events(cluster).contains(&event)
    });
}

fn a_deleted_node_is_registered_at_the_next_start(cluster: &Cluster) {
    let name = cluster.node_name();
    cluster.kubectl(&["delete", "node", &name]);
    cluster.wait_quietly("the agent to log the deletion", || {
        cluster.log("agent").contains("the Node object was deleted")
    });
    std::thread::sleep(Duration::from_secs(5));
    let there = || {
        let get = ["get", "node", &name, "--ignore-not-found", "-o", "name"];
        cluster.kubectl(&get)
    };
    assert_eq!(there(), "");
    stop_agent(cluster);
    cluster.up();
    assert_eq!(there(), format!("node/{name}\n"));
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
    // In a container the right to lower the value may be missing; then the agent logs this.
    let is_set = of("oom_score_adj").trim() == "-998";
    assert!(is_set || cluster.log("agent").contains("cannot set oomScoreAdj"));
}

#[test]
fn the_node_object_is_kept_correct() {
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
    a_short_absence_of_the_runtime_changes_nothing(&cluster);
    the_node_events_are_emitted(&cluster);
    a_deleted_node_is_registered_at_the_next_start(&cluster);
}

/// The CPUs that a pod's first container may use.
fn allowed(cluster: &Cluster, pod: &str) -> String {
    let command = ["busybox", "grep", "Cpus_allowed_list", "/proc/self/status"];
    let line = support::inside(cluster, pod, &command);
    line.rsplit('\t').next().unwrap_or_default().to_owned()
}

/// Whether a Guaranteed pod's cgroup has no CPU quota.
fn is_without_quota(cluster: &Cluster, pod: &str) -> bool {
    let uid = cluster.pod(pod)["metadata"]["uid"].clone();
    let below = format!(
        "holdfast-{}/kubepods/pod{}",
        cluster.name(),
        uid.as_str().unwrap()
    );
    let v1 = std::fs::read_to_string(format!("/sys/fs/cgroup/cpu/{below}/cpu.cfs_quota_us"));
    let v2 = || std::fs::read_to_string(format!("/sys/fs/cgroup/{below}/cpu.max"));
    let found = v1.or_else(|_| v2()).unwrap();
    found.trim() == "-1" || found.starts_with("max")
}

fn a_second_one_is_refused(cluster: &Cluster, image: &str, resources: &Value) {
    let container = json!({"name": "c", "image": image, "resources": resources});
    // With a node's name in the spec, the scheduler is not involved.
    let spec = json!({"nodeName": cluster.node_name(), "restartPolicy": "Never", "containers": [container]});
    pod(cluster, "second", &spec);
    cluster.wait("the second pod to be refused", || {
        cluster.pod("second")["status"]["phase"] == "Failed"
    });
    assert_eq!(cluster.pod("second")["status"]["reason"], "OutOfcpu");
}

/// The number of pods with memory from chosen NUMA nodes, in the checkpoint file that has the kubelet's format.
fn checkpointed(cluster: &Cluster) -> usize {
    let file = cluster.data().join("agent/memory_manager_state");
    let state: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(state["policyName"], "Static");
    state["entries"].as_object().map_or(0, |pods| pods.len())
}

fn managers_are_counted(cluster: &Cluster) {
    let metrics = cluster.get_node_path("/metrics");
    for line in [
        "kubelet_cpu_manager_pinning_requests_total 1",
        "kubelet_cpu_manager_pinning_errors_total 0",
        "kubelet_cpu_manager_exclusive_cpu_allocation_count 1",
        "kubelet_cpu_manager_shared_pool_size_millicores 0",
        "kubelet_memory_manager_pinning_requests_total 1",
        "kubelet_topology_manager_admission_errors_total 0",
        "kubelet_container_aligned_compute_resources_count{scope=\"container\",boundary=\"uncore_cache\"} 1",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line}: {metrics}");
    }
    assert!(metrics.contains("kubelet_topology_manager_admission_duration_ms_bucket"));
}

#[test]
fn a_guaranteed_pod_gets_exclusive_cpus_and_memory() {
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    let all = cpuset::parse_list(&online).unwrap();
    let Some(last) = all.last().filter(|_| all.len() > 1) else {
        return support::skip::skipped("this machine has one CPU");
    };
    // All other CPUs are reserved, so that one can be assigned.
    let rest = cpuset::format_list(&(&all - &[*last].into()));
    let (all, last) = (cpuset::format_list(&all), last.to_string());
    let fields = format!(
        "cpuManagerPolicy: static\nreservedSystemCPUs: \"{rest}\"\ncpuManagerReconcilePeriod: 2s\nmemoryManagerPolicy: Static\nreservedMemory: [{{numaNode: 0, limits: {{memory: 100Mi}}}}]\n"
    );
    let cluster = Cluster::start_configured("cpus", 61, &fields);
    let image = support::busybox(&cluster);
    let run = |name: &str, resources: Value| {
        let container = json!({"name": "c", "image": image, "resources": resources, "command": ["busybox", "sleep", "1000"]});
        pod(&cluster, name, &json!({"containers": [container]}));
    };
    let runs = |name: &str| {
        cluster.wait(&format!("{name} to run"), || {
            cluster.pod(name)["status"]["phase"] == "Running"
        });
    };
    let whole = json!({"limits": {"cpu": "1", "memory": "32Mi"}});
    run("shares", json!({"requests": {"memory": "16Mi"}}));
    runs("shares");
    assert_eq!(allowed(&cluster, "shares"), all);
    run("own", whole.clone());
    runs("own");
    assert_eq!(allowed(&cluster, "own"), last);
    cluster.wait("the other pod to leave the CPU", || {
        allowed(&cluster, "shares") == rest
    });
    run("later", json!({}));
    runs("later");
    assert_eq!(allowed(&cluster, "later"), rest);
    assert!(is_without_quota(&cluster, "own"));
    managers_are_counted(&cluster);
    let own = format!("own [{last}] memory {} of 1", 32 << 20);
    let assignments = Some((vec![own], vec![last.parse().unwrap()]));
    assert_eq!(list_assignments(&cluster), assignments);
    assert_eq!(checkpointed(&cluster), 1);
    a_second_one_is_refused(&cluster, &image, &whole);
    stop_agent(&cluster);
    cluster.up();
    cluster.wait("the node to be ready", || cluster.ready().0 == "True");
    cluster.wait("the CPUs to be assigned as before", || {
        allowed(&cluster, "own") == last && allowed(&cluster, "shares") == rest
    });
    // The containers keep their CPUs all the time, which does not show whether the new agent knows the assignment.
    cluster.wait("the agent to report the same assignments", || {
        (list_assignments(&cluster), checkpointed(&cluster)) == (assignments.clone(), 1)
    });
    cluster.kubectl(&["delete", "pod", "own"]);
    cluster.wait("all CPUs to be shared again", || {
        allowed(&cluster, "shares") == all && allowed(&cluster, "later") == all
    });
    cluster.wait("the memory to be released", || checkpointed(&cluster) == 0);
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
    // Replaced atomically: a partial file is also a valid configuration.
    let draft = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(draft.path(), "nameserver 192.0.2.2\n").unwrap();
    draft.persist(resolv_conf).unwrap();
    cluster.wait_quietly("the agent to see the change", || {
        cluster.log("agent").contains("DNS configuration changed")
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
    cluster.wait("the burstable tier to have its pod's weight", || {
        shares(cluster, "/burstable") == expected("256", "10")
    });
    assert_eq!(shares(cluster, "/besteffort"), expected("2", "1"));
    cluster.kubectl(&["delete", "pod", "burst"]);
    cluster.wait("the burstable tier to have the lowest weight again", || {
        shares(cluster, "/burstable") == expected("2", "1")
    });
}

/// Another cluster does not use a runtime that already has pods.
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
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    for dir in ["/var/lib/holdfast-t-intruder", "/run/holdfast-t-intruder"] {
        std::fs::remove_dir_all(dir).unwrap();
    }
    assert!(
        !output.status.success() && printed.contains("already serves a kubelet"),
        "{printed}"
    );
}

/// The name and content of each unit file.
fn units() -> Vec<(String, String)> {
    let files = std::fs::read_dir("systemd").unwrap().flatten();
    let read = |path: std::path::PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, std::fs::read_to_string(path).unwrap())
    };
    files.map(|f| read(f.path())).collect()
}

/// The runtime must see the mounts that the agent creates, so the service must not get its own mount namespace. The proxy mounts nothing.
#[test]
fn units_have_no_mount_namespace_and_restart_without_limit() {
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
        let mounts = !text.contains("holdfast proxy");
        for banned in namespaces.iter().filter(|_| mounts) {
            assert!(
                !settings.iter().any(|s| s.starts_with(*banned)),
                "{name}: {banned}"
            );
        }
        if text.contains("holdfast agent") {
            // Units stop in the reverse order.
            let after: Vec<&str> = settings
                .iter()
                .filter_map(|s| s.strip_prefix("After="))
                .collect();
            for earlier in ["containerd.service", "systemd-logind.service"] {
                assert!(after.join(" ").contains(earlier), "{name}: {earlier}");
            }
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
fn uninstalling_leaves_only_files_of_the_administrator() {
    let root = tempfile::tempdir().unwrap();
    let run = |target: &str| {
        let mut command = Command::new("make");
        command.args([target, "PREFIX=/usr"]);
        command.arg(format!("DESTDIR={}", root.path().display()));
        command.arg(format!("DIST={}", support::holdfast().display()));
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), error)
    };
    let make = |target: &str| {
        let (fine, error) = run(target);
        assert!(fine, "{error}");
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
            "etc/holdfast/proxy.yaml",
            "usr/bin/holdfast",
            "usr/bin/holdfast-cni",
            "usr/lib/systemd/system/holdfast-agent.service",
            "usr/lib/systemd/system/holdfast-dhcp.service",
            "usr/lib/systemd/system/holdfast-dhcp.socket",
            "usr/lib/systemd/system/holdfast-proxy.service",
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
    // The kubelet's unit still uses it.
    let drop_in = root
        .path()
        .join("etc/systemd/system/kubelet.service.d/20-holdfast.conf");
    std::fs::create_dir_all(drop_in.parent().unwrap()).unwrap();
    std::fs::write(&drop_in, "").unwrap();
    let installed = files();
    let (fine, error) = run("uninstall");
    assert!(!fine && error.contains("rm /"), "{error}");
    assert_eq!(files(), installed);
    std::fs::remove_file(&drop_in).unwrap();
    make("uninstall");
    let kept = ["etc/holdfast/config.yaml", "etc/holdfast/proxy.yaml"];
    assert_eq!(files(), kept);
}

/// The help of the flags lists every flag that the unit files use.
#[test]
fn kubelet_flags_are_in_the_help() {
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

/// From the podresources API: pods with the prepared devices of their claims. `None` while the agent does not answer.
fn list_claim_assignments(cluster: &Cluster) -> Option<Vec<String>> {
    pod_resources::with_client(cluster, async |mut client| {
        let listed = client.list(ListPodResourcesRequest {}).await;
        let mut rows = vec![];
        for pod in listed.ok()?.into_inner().pod_resources {
            let containers = pod.containers.iter();
            for claim in containers.flat_map(|c| &c.dynamic_resources) {
                let device = &claim.claim_resources[0];
                let (driver, pool, name) =
                    (&device.driver_name, &device.pool_name, &device.device_name);
                let cdi = &device.cdi_devices[0].name;
                rows.push(format!(
                    "{} {} {driver}/{pool}/{name} {cdi}",
                    pod.name, claim.claim_name
                ));
            }
        }
        rows.sort();
        Some(rows)
    })
}

/// Allocates the claim `shared` to a driver's device, for these pods.
fn allocate(cluster: &Cluster, driver: &str, pods: &[&str]) {
    let uid = |name: &str| cluster.pod(name)["metadata"]["uid"].clone();
    let user = |name: &&str| json!({"resource": "pods", "name": name, "uid": uid(name)});
    let users: Vec<Value> = pods.iter().map(user).collect();
    let result = json!({"request": "thing", "driver": driver, "pool": "pool", "device": "a"});
    let status =
        json!({"status": {"allocation": {"devices": {"results": [result]}}, "reservedFor": users}});
    let (kind, patch) = ("resourceclaim", status.to_string());
    cluster.kubectl(&[
        "patch",
        kind,
        "shared",
        "--subresource=status",
        "--type=merge",
        "-p",
        &patch,
    ]);
}

/// A containerd that supports CDI devices by default; the installed one may not.
fn containerd_with_cdi() -> Option<std::path::PathBuf> {
    let containerds = support::skip::fetched("HOLDFAST_RUNTIMES", "usr/bin/containerd");
    let is_2 = |program: &std::path::PathBuf| {
        let printed = Command::new(program).arg("--version").output().unwrap();
        let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
        printed
            .split_whitespace()
            .any(|word| word.trim_start_matches('v').starts_with("2."))
    };
    let found = containerds.into_iter().find(is_2);
    if found.is_none() {
        support::skip::skipped("none of the containerds in HOLDFAST_RUNTIMES is 2.x");
    }
    found
}

/// Creates the pods `one` and `two` with the claim `shared`, which is not reserved for them yet.
fn share_a_claim(cluster: &Cluster, image: &str) {
    let request = json!({"name": "thing", "exactly": {"deviceClassName": "things"}});
    let claim = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "shared"},
        "spec": {"devices": {"requests": [request]}}});
    cluster.apply(&claim.to_string());
    let container = json!({"name": "c", "image": image, "command": ["busybox", "sleep", "10000"],
        "resources": {"claims": [{"name": "mine", "request": "thing"}]}});
    let spec = json!({"nodeName": cluster.node_name(), "restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
        "containers": [container], "resourceClaims": [{"name": "mine", "resourceClaimName": "shared"}]});
    for name in ["one", "two"] {
        let metadata = json!({"name": name});
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec});
        cluster.apply(&pod.to_string());
    }
    for name in ["one", "two"] {
        cluster.wait("an event that the claim is not the pod's", || {
            let events = cluster.events(name);
            events.contains("FailedPrepareDynamicResources Failed to prepare dynamic resources: prepare dynamic resources: pod")
                && events.contains("is not allowed to use ResourceClaim shared")
        });
    }
}

/// Restarts the agent: the new one finds the prepared claims, and deletes ResourceSlices of drivers
/// that may no longer run.
fn replace_agent(cluster: &Cluster, driver: &str) {
    let pool = json!({"name": "pool", "generation": 1, "resourceSliceCount": 1});
    let slice = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "things"},
        "spec": {"driver": driver, "nodeName": cluster.node_name(), "pool": pool, "devices": [{"name": "a"}]}});
    cluster.apply(&slice.to_string());
    cluster.kill("agent");
    cluster.up();
    cluster.wait("the slice to be deleted", || {
        let slices = cluster.kubectl(&["get", "resourceslices", "-o", "name"]);
        slices.is_empty()
    });
}

/// The driver's report of a device's health appears in the status of each container with this device,
/// and replaces the previous report.
fn the_device_is_reported_unhealthy(cluster: &Cluster, driver: &dra::Driver) {
    let device_health = |name: &str| {
        let status = cluster.pod(name)["status"]["containerStatuses"][0].clone();
        status["allocatedResourcesStatus"].clone()
    };
    let expected = |health: Value| {
        let mut device = json!({"resourceID": "holdfast.test/thing=a"});
        device
            .as_object_mut()
            .unwrap()
            .extend(health.as_object().unwrap().clone());
        json!([{"name": "claim:mine/thing", "resources": [device]}])
    };
    let steps = [
        (
            health::HealthStatus::Healthy,
            "",
            json!({"health": "Healthy"}),
        ),
        (
            health::HealthStatus::Unhealthy,
            "too hot",
            json!({"health": "Unhealthy", "message": "too hot"}),
        ),
    ];
    for (status, why, shown) in steps {
        driver.report_health(status, why);
        for name in ["one", "two"] {
            let shown = expected(shown.clone());
            cluster.wait(&format!("{name}: {shown}"), || device_health(name) == shown);
        }
    }
}

/// Two pods share a claim. The claim is prepared once, and its device is in both pods. The claim is
/// unprepared when both have exited, before the terminal status of the second one is published.
#[test]
fn claims_are_prepared_once_and_released_before_the_terminal_status() {
    const DRIVER: &str = "dra.holdfast.test";
    let Some(containerd) = containerd_with_cdi() else {
        return;
    };
    let cluster = Cluster::start_with("prepared", 63, containerd.parent().map(Into::into));
    share_a_claim(&cluster, &support::busybox(&cluster));
    allocate(&cluster, DRIVER, &["one", "two"]);
    let driver = dra::Driver::new(DRIVER);
    let _runs = driver.run(&cluster.data().join("agent/plugins_registry"));
    for name in ["one", "two"] {
        cluster.wait(&format!("{name} to run"), || {
            support::condition(&cluster.pod(name), "Ready") == "True"
        });
        let variable = ["busybox", "sh", "-c", "echo $THING"];
        assert_eq!(support::inside(&cluster, name, &variable), "of the driver");
    }
    let row = |pod: &str| format!("{pod} shared {DRIVER}/pool/a holdfast.test/thing=a");
    let rows = vec![row("one"), row("two")];
    assert_eq!(list_claim_assignments(&cluster), Some(rows));
    the_device_is_reported_unhealthy(&cluster, &driver);
    replace_agent(&cluster, DRIVER);
    let call_count = |call: &str| {
        let calls = driver.calls();
        calls.iter().filter(|c| c.starts_with(call)).count()
    };
    cluster.wait("the driver to be registered again", || {
        call_count("outcome \"\"") >= 2
    });
    cluster.kubectl(&["delete", "pod", "one"]);
    cluster.wait("the first pod to be removed", || cluster.pods().len() == 1);
    assert_eq!(
        (call_count("prepare shared"), call_count("unprepare")),
        (1, 0)
    );

    driver.fail_unprepare(Some("not yet"));
    let id = cluster.pod("two")["status"]["containerStatuses"][0]["containerID"].clone();
    let id = id.as_str().unwrap().rsplit('/').next().unwrap().to_owned();
    support::ctr(&cluster, "k8s.io", &["tasks", "kill", "-s", "SIGKILL", &id]);
    cluster.wait("a call to unprepare the claim", || {
        call_count("unprepare shared") > 0
    });
    let status = cluster.pod("two")["status"].clone();
    assert_eq!(status["phase"], "Running", "{status}");
    driver.fail_unprepare(None);
    cluster.wait("the second pod to fail", || {
        cluster.pod("two")["status"]["phase"] == "Failed"
    });
    let state = std::fs::read_to_string(cluster.data().join("agent/dra_manager_state")).unwrap();
    assert!(state.contains("\\\"ClaimInfoStateList\\\":[]"), "{state}");
    cluster.kubectl(&["delete", "pod", "two"]);
    cluster.wait("no leftovers of the pods", || {
        cluster.leftovers().is_empty()
    });
}
