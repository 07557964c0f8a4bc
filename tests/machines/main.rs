//! Tests in virtual machines, for features that the running kernel may lack.
#![allow(clippy::unwrap_used)]

mod apparmor;
mod power;
mod resources;
mod selinux;
#[path = "../support/mod.rs"]
mod support;
mod units;
#[path = "../support/vm.rs"]
mod vm;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use holdfast_core::pod::cgroup::Driver;
use holdfast_core::volume::resolved::{self, NodeProperties};
use holdfast_host::PodHost as _;
use holdfast_host::cgroups::Cgroups;
use holdfast_host::linux::LinuxHost;
use holdfast_sys::{quota, usage};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use support::{Cluster, condition, skip};

/// The iSCSI target.
const IQN: &str = "iqn.2026-11.test.holdfast:disk";

#[test]
fn filesystem_quotas_count_the_writes_of_pods() {
    vm::run(
        "quotas_inside",
        &["quota_v2", "brd rd_nr=1 rd_size=65536"],
        &["/sbin/mkfs.ext4"],
    );
}

#[test]
#[ignore = "runs in a virtual machine"]
fn quotas_inside() {
    assert!(
        vm::is_inside(),
        "this test creates filesystems: it runs in a virtual machine only"
    );
    let made = std::process::Command::new("/sbin/mkfs.ext4")
        .args(["-q", "-O", "quota,project", "/dev/ram0"])
        .status()
        .unwrap();
    assert!(made.success());
    let root = Path::new("/run/node");
    std::fs::create_dir(root).unwrap();
    nix::mount::mount(
        Some("/dev/ram0"),
        root,
        Some("ext4"),
        nix::mount::MsFlags::empty(),
        Some("prjquota"),
    )
    .unwrap();
    let host = LinuxHost::new(
        root,
        root.join("logs"),
        Cgroups::new("/", Driver::Cgroupfs),
        None,
        None,
    );
    let pod = |uid: &str, host_users: bool| -> Pod {
        let volumes = json!([{"name": "v", "emptyDir": {}}, {"name": "w", "emptyDir": {}}]);
        serde_json::from_value(
            json!({"metadata": {"name": "p", "uid": uid}, "spec": {"hostUsers": host_users, "containers": [], "volumes": volumes}}),
        )
        .unwrap()
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let set_up = |pod: &Pod| {
        for volume in pod.spec.as_ref().unwrap().volumes.iter().flatten() {
            let resolved = resolved::resolve(pod, volume, None, NodeProperties::default()).unwrap();
            runtime
                .block_on(host.set_up_volume(pod, &resolved, None))
                .unwrap();
        }
    };
    let dir = |uid: &str, volume: &str| {
        root.join(format!(
            "pods/{uid}/volumes/kubernetes.io~empty-dir/{volume}"
        ))
    };
    let used = |pod: &Pod, volume: &str| {
        runtime
            .block_on(host.volume_usage(pod, volume, u64::MAX))
            .unwrap()
    };

    // Each volume is counted separately with the same result as walking its tree, also after it is set up again.
    let (counted, walked) = (pod("counted", false), pod("walked", true));
    set_up(&counted);
    set_up(&walked);
    for uid in ["counted", "walked"] {
        std::fs::create_dir(dir(uid, "v").join("deep")).unwrap();
        std::fs::write(dir(uid, "v").join("deep/file"), vec![1; 3 << 20]).unwrap();
        std::fs::write(dir(uid, "w").join("file"), vec![1; 1 << 20]).unwrap();
    }
    nix::unistd::sync();
    set_up(&counted);
    for volume in ["v", "w"] {
        let known = quota::used(&dir("counted", volume))
            .unwrap()
            .expect("the filesystem has quotas");
        assert_eq!(known, usage::of(&dir("counted", volume), u64::MAX).unwrap());
        assert_eq!(
            (used(&counted, volume), used(&walked, volume)),
            (known, known)
        );
        assert_eq!(
            quota::used(&dir("walked", volume)).unwrap(),
            None,
            "a user of that pod could change the project of its files"
        );
    }
    // A removed volume no longer counts, and its project ID is free for others.
    std::fs::remove_dir_all(dir("counted", "v")).unwrap();
    assert_eq!(used(&counted, "v"), usage::Usage::default());
    set_up(&counted);
    assert_eq!(
        quota::used(&dir("counted", "v")).unwrap().map(|u| u.inodes),
        Some(1)
    );
    // Many volumes get different project IDs.
    for n in 0..200 {
        set_up(&pod(&format!("many-{n}"), false));
    }
    assert!((0..200).all(|n| {
        quota::used(&dir(&format!("many-{n}"), "w"))
            .unwrap()
            .map(|u| u.inodes)
            == Some(1)
    }));
}

/// The programs that a node needs in addition to those on its disk.
fn programs() -> Vec<PathBuf> {
    let own = support::holdfast();
    let plugins = own.with_file_name("holdfast-cni");
    let others = ["/usr/bin/kubectl", "/bin/busybox"].map(PathBuf::from);
    [own, plugins].into_iter().chain(others).collect()
}

/// A whole node, as in most clusters: systemd creates the cgroups, and they are version 2.
#[test]
fn systemd_creates_the_cgroups() {
    vm::run_on_node("systemd_inside", &programs());
}

fn run(program: &str, arguments: &[&str]) {
    let status = support::command_with_timeout(program)
        .args(arguments)
        .status()
        .unwrap();
    assert!(status.success(), "{program} {arguments:?}: {status}");
}

/// An interface with the node's address and its default route.
fn an_uplink() {
    run("ip", &["link", "add", "uplink", "type", "dummy"]);
    run("ip", &["address", "add", "192.0.2.10/24", "dev", "uplink"]);
    run("ip", &["link", "set", "uplink", "up"]);
    run("ip", &["route", "add", "default", "dev", "uplink"]);
}

/// Serves a directory by NFS and a disk by iSCSI, on this machine's own network.
fn serve_a_directory_and_a_disk() {
    an_uplink();
    std::fs::create_dir_all("/srv/shared").unwrap();
    std::fs::write(
        "/etc/exports",
        "/srv/shared 192.0.2.10(rw,no_root_squash,insecure,no_subtree_check)\n",
    )
    .unwrap();
    run("systemctl", &["start", "nfs-server"]);
    share_disk();
}

/// Serves a disk by iSCSI with the kernel's own target.
fn share_disk() {
    for module in [
        "target_core_mod",
        "target_core_file",
        "iscsi_target_mod",
        "iscsi_tcp",
    ] {
        run("modprobe", &[module]);
    }
    std::fs::File::create("/srv/disk")
        .unwrap()
        .set_len(32 << 20)
        .unwrap();
    let (cores, target) = (
        Path::new("/sys/kernel/config/target/core"),
        Path::new("/sys/kernel/config/target/iscsi")
            .join(IQN)
            .join("tpgt_1"),
    );
    let disk = cores.join("fileio_0/disk");
    std::fs::create_dir_all(&disk).unwrap();
    let write_file = |file: std::path::PathBuf, text: &str| {
        std::fs::write(&file, text).unwrap_or_else(|e| panic!("{}: {e}", file.display()))
    };
    write_file(
        disk.join("control"),
        "fd_dev_name=/srv/disk,fd_dev_size=33554432",
    );
    write_file(disk.join("enable"), "1");
    for dir in ["lun/lun_0", "np/192.0.2.10:3260"] {
        std::fs::create_dir_all(target.join(dir)).unwrap();
    }
    std::os::unix::fs::symlink(&disk, target.join("lun/lun_0/disk")).unwrap();
    for (attribute, value) in [
        ("authentication", "0"),
        ("generate_node_acls", "1"),
        ("demo_mode_write_protect", "0"),
        ("cache_dynamic_acls", "1"),
    ] {
        write_file(target.join("attrib").join(attribute), value);
    }
    write_file(target.join("enable"), "1");
    run("systemctl", &["start", "iscsid"]);
}

fn line(path: &Path) -> String {
    std::fs::read_to_string(path).map_or_else(|e| e.to_string(), |text| text.trim().to_owned())
}

/// The cgroup of all pods has limits. The agent reverts changes that others make to them or to a pod's limits.
fn limits_outlast_others(cluster: &Cluster, tier: &Path, pod: &Path) {
    let all = ["memory.max", "pids.max"].map(|f| line(&tier.join(f)));
    assert!(all.iter().all(|v| v.parse::<u64>().is_ok()), "{all:?}");
    // The memory request of a Guaranteed pod is protected in its slice, in its container's scope and above them.
    let protected = |dir: &Path| line(&dir.join("memory.min")).parse::<u64>().unwrap();
    assert_eq!(protected(pod), 64 << 20);
    let inner = std::fs::read_dir(pod).unwrap().flatten().map(|e| e.path());
    let mut scopes = inner.filter(|path| path.is_dir());
    assert!(scopes.any(|scope| protected(&scope) == 64 << 20));
    cluster.wait("the slice of all pods to protect as much memory", || {
        protected(tier) >= 64 << 20
    });
    let weight = tier.join("holdfast_t_vm-kubepods-besteffort.slice/cpu.weight");
    std::fs::write(&weight, "77").unwrap();
    std::fs::write(pod.join("pids.max"), "77").unwrap();
    cluster.wait("the limits to be restored", || {
        [line(&weight), line(&pod.join("pids.max"))] == ["1", "100"]
    });
}

fn iscsi() -> String {
    format!("iscsi: {{targetPortal: 192.0.2.10, iqn: '{IQN}', lun: 0, fsType: ext4}}")
}

/// Replaces the agent's root directory with a link to another directory, as users have it, and returns the target.
fn the_root_is_a_link(cluster: &Cluster) -> PathBuf {
    cluster.down();
    let root = cluster.data().join("agent");
    let elsewhere = cluster.data().join("larger-disk");
    std::fs::rename(&root, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &root).unwrap();
    cluster.up();
    elsewhere
}

/// Data on a server and a disk survives every pod that mounts it, as a whole and as a subpath. The test also mounts
/// the server inside the pod's emptyDir without the agent's knowledge, and kills the agent during the deletion.
fn what_is_on_servers_outlives_every_pod(cluster: &Cluster, image: &str, root: &Path) {
    let shared = Path::new("/srv/shared");
    std::fs::create_dir_all(shared.join("deep/er")).unwrap();
    let canaries = ["canary", "deep/er/canary"].map(|file| shared.join(file));
    for canary in &canaries {
        std::fs::write(canary, "alive").unwrap();
    }
    let mounts = ["share", "disk", "empty"].map(|volume| {
        format!("{{name: {volume}, mountPath: /{volume}}}, {{name: {volume}, mountPath: /sub-{volume}, subPath: deep/er}}")
    });
    for round in 0..3_u64 {
        let name = format!("canary-{round}");
        let first = "echo alive > /disk/canary; echo alive > /sub-disk/canary; sync; ";
        let first = if round == 0 { first } else { "" };
        let command = format!("{first}cat /disk/canary /disk/deep/er/canary; sleep 10000");
        cluster.apply(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{terminationGracePeriodSeconds: 1, containers: [{{name: c, image: '{image}', command: [busybox, sh, -c, '{command}'], volumeMounts: [{}]}}], volumes: [{{name: share, nfs: {{server: 192.0.2.10, path: /srv/shared}}}}, {{name: disk, {}}}, {{name: empty, emptyDir: {{}}}}]}}\n",
            mounts.join(", "),
            iscsi()
        ));
        cluster.wait("the pod to find the data on the disk", || {
            condition(&cluster.pod(&name), "Ready") == "True"
                && cluster.kubectl(&["logs", &name]) == "alive\nalive\n"
        });
        let uid = cluster.pod(&name)["metadata"]["uid"].clone();
        let dir = root.join("pods").join(uid.as_str().unwrap());
        let behind = dir.join("volumes/kubernetes.io~empty-dir/empty/behind");
        std::fs::create_dir(&behind).unwrap();
        let target = behind.to_str().unwrap();
        run("mount", &["-t", "nfs", "192.0.2.10:/srv/shared", target]);
        cluster.kubectl(&["delete", "pod", &name, "--wait=false"]);
        if round > 0 {
            std::thread::sleep(Duration::from_millis(round * 700));
            cluster.kill("agent");
            cluster.up();
        }
        cluster.wait_quietly("the pod and its directory to be removed", || {
            !cluster
                .kubectl(&["get", "pods", "-o", "name"])
                .contains(&name)
                && !dir.exists()
        });
        for canary in &canaries {
            assert_eq!(line(canary), "alive", "round {round}: {}", canary.display());
        }
    }
}

/// The configuration of the node. The shutdown grace period is long, because every command of this test
/// takes seconds in the machine.
const NODE: &str = "cgroupDriver: systemd\npodPidsLimit: 100\nfeatureGates: {MemoryQoS: true}\nmemoryReservationPolicy: TieredReservation\nshutdownGracePeriod: 900s\nshutdownGracePeriodCriticalPods: 10s\n";

/// systemd powers the machine off. It waits for pods as long as the agent requested, which is longer
/// than logind's default. No command can run in the machine afterwards.
fn a_real_shutdown_waits_for_pods(cluster: Cluster, image: &str) {
    let run = |program: &str, arguments: &[&str]| {
        let output = support::command_with_timeout(program)
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{program}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let inhibits = || run("systemd-inhibit", &["--list", "--no-legend"]).contains("kubelet");
    cluster.wait("the agent's inhibitor", inhibits);
    let delay = [
        "get-property",
        "org.freedesktop.login1",
        "/org/freedesktop/login1",
        "org.freedesktop.login1.Manager",
        "InhibitDelayMaxUSec",
    ];
    cluster.wait("logind to accept the delay", || {
        run("busctl", &delay).trim() == "t 900000000"
    });
    cluster.apply(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: last}}\nspec: {{terminationGracePeriodSeconds: 200, containers: [{{name: c, image: '{image}', command: [busybox, sh, -c, 'trap \"busybox sleep 6; exit 3\" TERM; while :; do busybox sleep 0.2; done']}}]}}\n"
    ));
    cluster.wait("the pod to be ready", || {
        condition(&cluster.pod("last"), "Ready") == "True"
    });
    // The machine stops when the script of this test ends, so this inhibitor keeps it up until this process exits.
    let mut still = std::process::Command::new("systemd-inhibit")
        .args(["--what=shutdown", "--mode=delay", "sleep", "100000"])
        .spawn()
        .unwrap();
    cluster.wait("the inhibitor of this test", || {
        run("systemd-inhibit", &["--list", "--no-legend"]).contains("sleep")
    });
    run("systemctl", &["poweroff"]);
    cluster.wait_quietly("the agent to release its inhibitor", || !inhibits());
    assert!(still.try_wait().unwrap().is_none());
    let mut pod = json!(null);
    cluster.wait("the pod's end in its status", || {
        pod = cluster.pod("last");
        let state = &pod["status"]["containerStatuses"][0]["state"];
        !state["terminated"].is_null() && pod["status"]["reason"].is_string()
    });
    assert_eq!(pod["status"]["reason"], "Terminated", "{pod}");
    assert_eq!(
        pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"], 3,
        "the container had its grace period: {pod}"
    );
    cluster.wait("the shutdown in the node's status", || {
        let nodes = cluster.kubectl(&["get", "nodes", "-o", "json"]);
        nodes.contains("node is shutting down")
    });
    cluster.kubectl(&["delete", "pod", "last", "--force", "--grace-period=0"]);
}

#[test]
#[ignore = "runs in a virtual machine"]
fn systemd_inside() {
    assert!(vm::is_inside(), "this test runs in a virtual machine only");
    serve_a_directory_and_a_disk();
    let cluster = Cluster::start_configured("vm", 49, NODE);
    let root = the_root_is_a_link(&cluster);
    let image = support::busybox(&cluster);
    let pod = |name: &str, limits: &str, command: &str, volume: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{terminationGracePeriodSeconds: 1, restartPolicy: Never, containers: [{{name: c, image: '{image}', command: [busybox, sh, -c, '{command}'], resources: {{limits: {limits}}}, volumeMounts: [{{name: v, mountPath: /v}}]}}], volumes: [{{name: v, {volume}}}]}}\n---\n"
        )
    };
    let nfs = "nfs: {server: 192.0.2.10, path: /srv/shared}";
    cluster.apply(&pod(
        "one",
        "{cpu: 200m, memory: 64Mi}",
        "echo hello > /v/file; sleep 10000",
        nfs,
    ));
    cluster.apply(&pod("two", "{}", "sleep 10000", "emptyDir: {}"));
    cluster.apply(&pod(
        "greedy",
        "{memory: 32Mi}",
        "dd if=/dev/zero of=/v/file bs=1M count=64",
        "emptyDir: {medium: Memory}",
    ));
    let disk = iscsi();
    cluster.apply(&pod(
        "disk",
        "{}",
        "echo kept > /v/file; sync; sleep 10000",
        &disk,
    ));
    let ready = |name: &str| condition(&cluster.pod(name), "Ready") == "True";
    cluster.wait("the pods", || ["one", "two", "disk"].into_iter().all(ready));
    cluster.wait("the pod's file on the server", || {
        line(Path::new("/srv/shared/file")) == "hello"
    });

    // The slices have the pods' limits, and the containers are in them.
    let tier = Path::new("/sys/fs/cgroup/holdfast_t_vm.slice/holdfast_t_vm-kubepods.slice");
    let uid = |name: &str| {
        cluster.pod(name)["metadata"]["uid"]
            .as_str()
            .unwrap()
            .replace('-', "_")
    };
    let one = tier.join(format!("holdfast_t_vm-kubepods-pod{}.slice", uid("one")));
    let two = tier.join(format!(
        "holdfast_t_vm-kubepods-besteffort.slice/holdfast_t_vm-kubepods-besteffort-pod{}.slice",
        uid("two")
    ));
    assert_eq!(
        ["memory.max", "cpu.max", "cpu.weight", "pids.max"].map(|f| line(&one.join(f))),
        ["67108864", "20000 100000", "8", "100"]
    );
    assert_eq!(
        ["memory.max", "cpu.max", "cpu.weight", "pids.max"].map(|f| line(&two.join(f))),
        ["max", "max 100000", "1", "100"]
    );
    for slice in [&one, &two] {
        let scopes = std::fs::read_dir(slice).unwrap().flatten().filter(|e| {
            e.file_name()
                .to_string_lossy()
                .starts_with("cri-containerd-")
        });
        assert_eq!(scopes.count(), 2, "scopes of sandbox and container");
    }
    limits_outlast_others(&cluster, tier, &one);
    // The kernel kills a container that uses too much memory. (The runtime may not report the OOM kill in time.)
    let code = || {
        cluster.pod("greedy")["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
            .as_i64()
    };
    cluster.wait("the pod above its limit to terminate", || code().is_some());
    assert_eq!(code(), Some(137));
    // Stats come from the same cgroups.
    let node = cluster
        .kubectl(&["get", "nodes", "-o", "name"])
        .replace("node/", "");
    let path = format!("/api/v1/nodes/{}/proxy/stats/summary", node.trim());
    cluster.wait("the pod's stats", || {
        let summary = cluster.kubectl(&["get", "--raw", &path]);
        let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
        let mut pods = summary["pods"].as_array().unwrap().iter();
        pods.find(|p| p["podRef"]["name"] == "one")
            .is_some_and(|p| {
                p["memory"]["workingSetBytes"].as_u64() > Some(0)
                    && p["process_stats"]["process_count"].as_u64() > Some(0)
            })
    });

    // The disk's session ends with its last pod, and the written data remains on the disk.
    let sessions = || std::fs::read_dir("/sys/class/iscsi_session").map_or(0, Iterator::count);
    assert_eq!(sessions(), 1);
    cluster.kubectl(&["delete", "pod", "disk"]);
    cluster.wait("the session to end", || sessions() == 0);
    what_is_on_servers_outlives_every_pod(&cluster, &image, &root);
    cluster.wait("the sessions to end", || sessions() == 0);
    cluster.apply(&pod("again", "{}", "cat /v/file; sleep 10000", &disk));
    cluster.wait("the pod to be ready", || ready("again"));
    cluster.wait("the kept data in the pod's log", || {
        cluster.kubectl(&["logs", "again"]).trim() == "kept"
    });

    // A resized pod keeps running, with new limits of its slice.
    let patch = r#"{"spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "300m", "memory": "96Mi"}, "requests": {"cpu": "300m", "memory": "96Mi"}}}]}}"#;
    cluster.kubectl(&[
        "patch",
        "pod",
        "one",
        "--subresource=resize",
        "--patch",
        patch,
    ]);
    cluster.wait("the slice's new limits", || {
        ["memory.max", "memory.min", "cpu.max"].map(|f| line(&one.join(f)))
            == ["100663296", "100663296", "30000 100000"]
    });

    // A restarted agent finds its pods and removes all of them.
    let agent = cluster.pid("agent");
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(agent),
        nix::sys::signal::Signal::SIGKILL,
    )
    .unwrap();
    cluster.wait_for_exit(agent);
    cluster.up();
    cluster.wait("both pods to be ready", || ready("one") && ready("two"));
    assert_eq!(
        cluster.pod("one")["status"]["containerStatuses"][0]["restartCount"],
        0
    );
    apparmor::profiles_are_enforced(&cluster, &image);
    cluster.delete_finished();
    cluster.kubectl(&["delete", "pod", "one", "two", "again"]);
    let slices = || {
        let mut found = vec![];
        support::find_pods(Path::new("/sys/fs/cgroup/holdfast_t_vm.slice"), &mut found);
        found
    };
    cluster.wait("the slices to be removed", || slices().is_empty());
    assert!(
        !std::fs::read_to_string("/proc/self/mountinfo")
            .unwrap()
            .contains(" - nfs4 "),
        "no volume of the server is mounted"
    );
    cluster.assert_clean();
    a_real_shutdown_waits_for_pods(cluster, &image);
    // The cgroup is removed a moment after its slice has stopped.
    let deadline = Instant::now() + support::condition_timeout();
    while tier.exists() {
        assert!(Instant::now() < deadline, "the slice still exists");
        std::thread::sleep(Duration::from_millis(100));
    }
}
