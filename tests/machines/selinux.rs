//! SELinux, which the running kernel lacks (issue 18): the processes of a pod have the label that it
//! requests, and may use files with this label.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::resources::wait_for;
use crate::support::{self, Cluster, condition};
use crate::{IQN, an_uplink, line, programs, run, share_disk, vm};

/// Compiled here, as the node has no compiler; it has the same path there.
const POLICY: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/selinux/policy");
/// The version that Debian 12's kernel reads.
const VERSION: &str = "33";
/// The initial SIDs of the kernel, in its order (`security/selinux/include/initial_sid_to_string.h`).
const INITIAL: &str = "kernel security unlabeled fs file file_labels init any_socket port netif netmsg node igmp_packet icmp_socket tcp_socket sysctl_modprobe sysctl sysctl_fs sysctl_kernel sysctl_net sysctl_net_unix sysctl_vm sysctl_dev kmod policy scmp_packet devnull";
const IMAGE: &str = "test.local/busybox:1";
/// The level of the shared directory and of the pods that may use it.
const LEVEL: &str = "s0:c10,c20";

#[test]
fn selinux_labels_are_enforced() {
    let Some(node) = vm::Node::new("selinux::inside", &programs()) else {
        return;
    };
    node.with_file(Path::new(POLICY), &compiled_policy())
        .with_kernel_arguments("security=selinux")
        .run(vm::PLAIN);
}

fn compiled_policy() -> Vec<u8> {
    let mut source = include_str!("selinux.cil").to_owned();
    let categories = (0..1024).map(|n| format!("c{n}"));
    let categories: Vec<String> = categories.collect();
    for category in &categories {
        writeln!(source, "(category {category})").unwrap();
    }
    writeln!(source, "(categoryorder ({}))", categories.join(" ")).unwrap();
    for label in INITIAL.split(' ') {
        writeln!(source, "(sid {label})\n(sidcontext {label} system)").unwrap();
    }
    writeln!(source, "(sidorder ({INITIAL}))").unwrap();
    let policy = PathBuf::from(POLICY);
    std::fs::create_dir_all(policy.parent().unwrap()).unwrap();
    let file = policy.with_extension("cil");
    std::fs::write(&file, source).unwrap();
    let compiled = Command::new("secilc")
        .args(["--policyvers", VERSION, "--filecontexts", "/dev/null"])
        .args(["--output", POLICY])
        .arg(file)
        .status();
    let compiled = compiled.expect("secilc is installed (make test-all-deps installs it)");
    assert!(compiled.success());
    std::fs::read(policy).unwrap()
}

#[test]
#[ignore = "runs in a virtual machine"]
fn inside() {
    assert!(
        vm::is_inside(),
        "this test changes the machine's SELinux policy"
    );
    enforce();
    an_uplink();
    share_disk();
    let cluster = Cluster::new("selinux", 46).configured("cgroupDriver: systemd\n");
    // The machine is deleted after the test, and the cluster with it.
    let cluster = std::mem::ManuallyDrop::new(cluster);
    cluster.up();
    support::busybox_alone(&cluster, IMAGE);
    make_files(&cluster);
    plugins_may_use_their_directories(&cluster);
    labels_decide_what_pods_can_use(&cluster);
    a_volume_of_one_pod_is_mounted_with_its_label(&cluster);
}

/// Drivers also run in unprivileged containers.
fn plugins_may_use_their_directories(cluster: &Cluster) {
    for name in ["plugins", "plugins_registry", "device-plugins"] {
        let dir = cluster.data().join("agent").join(name);
        let output = support::command_with_timeout("stat")
            .args(["-c", "%C %a"])
            .arg(&dir)
            .output();
        let output = String::from_utf8(output.unwrap().stdout).unwrap();
        assert_eq!(
            output.trim(),
            "system_u:object_r:container_file_t:s0 750",
            "{dir:?}"
        );
    }
}

/// Writes the configuration of SELinux for the runtime's libraries, then loads and enforces the policy.
fn enforce() {
    let dir = Path::new("/etc/selinux");
    std::fs::create_dir_all(dir.join("test/contexts")).unwrap();
    std::fs::write(dir.join("config"), "SELINUX=enforcing\nSELINUXTYPE=test\n").unwrap();
    let contexts = "process = \"system_u:system_r:container_t:s0\"\nfile = \"system_u:object_r:container_file_t:s0\"\n";
    std::fs::write(dir.join("test/contexts/lxc_contexts"), contexts).unwrap();
    let kernel = Path::new("/sys/fs/selinux");
    if !kernel.join("load").exists() {
        run(
            "mount",
            &["-t", "selinuxfs", "selinuxfs", "/sys/fs/selinux"],
        );
    }
    std::fs::write(kernel.join("load"), std::fs::read(POLICY).unwrap()).unwrap();
    std::fs::write(kernel.join("enforce"), "1").unwrap();
    assert_eq!(line(&kernel.join("enforce")), "1");
}

/// Creates a directory for pods of one level, and one that is not for containers.
fn make_files(cluster: &Cluster) {
    for dir in ["/srv/shared", "/srv/system"] {
        std::fs::create_dir_all(dir).unwrap();
        std::fs::write(Path::new(dir).join("file"), "").unwrap();
    }
    let label = format!("system_u:object_r:container_file_t:{LEVEL}");
    run("chcon", &["--recursive", &label, "/srv/shared"]);
    // As policies label the runtime's directory.
    let images = cluster.data().join("containerd");
    let label = "system_u:object_r:container_ro_file_t:s0";
    run("chcon", &["--recursive", label, images.to_str().unwrap()]);
    cluster.kubectl(&["create", "configmap", "settings", "--from-literal=file=x"]);
}

/// A pod whose container writes, as termination message, its label and which files it can use.
fn pod(name: &str, of_pod: &Value, of_container: &Value) -> Value {
    let script = "read -r label </proc/self/attr/current; (echo x >/empty/file) 2>/dev/null; for at in empty settings shared system; do if busybox cat /$at/file >/dev/null 2>&1; then label=\"$label $at\"; fi; done; echo \"$label\" >/dev/termination-log";
    let mounts = ["empty", "settings", "shared", "system"]
        .map(|volume| json!({"name": volume, "mountPath": format!("/{volume}")}));
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "restartPolicy": "Never",
        "securityContext": of_pod,
        "containers": [{"name": "c", "image": IMAGE, "command": ["busybox", "sh", "-c", script],
            "securityContext": of_container, "volumeMounts": mounts}],
        "volumes": [
            {"name": "empty", "emptyDir": {}},
            {"name": "settings", "configMap": {"name": "settings"}},
            {"name": "shared", "hostPath": {"path": "/srv/shared"}},
            {"name": "system", "hostPath": {"path": "/srv/system"}}]}})
}

fn options(key: &str, value: &str) -> Value {
    json!({"seLinuxOptions": {key: value}})
}

/// The kernel's denials.
fn denied() -> String {
    let output = Command::new("dmesg").output().unwrap().stdout;
    let output = String::from_utf8_lossy(&output).into_owned();
    let lines = output.lines().filter(|line| line.contains("denied"));
    lines.collect::<Vec<_>>().join("\n")
}

/// Waits until every pod has a terminal phase, and its container the last state. Next to the phase, a container that could not
/// be started is waiting at first.
fn until_all_have_exited(cluster: &Cluster) {
    let has_exited = |pod: &Value| {
        let status = &pod["status"];
        ["Succeeded", "Failed"].contains(&status["phase"].as_str().unwrap_or_default())
            && status["containerStatuses"][0]["state"]["terminated"].is_object()
    };
    cluster.wait_quietly("the pods to terminate", || {
        cluster.pods().iter().all(has_exited)
    });
}

/// A pod's own volumes get its label; the machine's directories do not.
fn labels_decide_what_pods_can_use(cluster: &Cluster) {
    let none = json!({});
    let pods = [
        pod("chosen", &none, &none),
        pod("same", &options("level", LEVEL), &none),
        pod(
            "other",
            &options("level", LEVEL),
            &options("level", "s0:c30,c40"),
        ),
        pod("free", &none, &options("type", "spc_t")),
    ];
    cluster.apply(&pods.map(|p| p.to_string()).join("\n"));
    // A label with a type that is not in the policy is invalid.
    let unknown = pod("unknown", &none, &options("type", "unknown_t"));
    cluster.apply(&unknown.to_string());
    let names = ["chosen", "same", "other", "free"];
    until_all_have_exited(cluster);
    let pods = cluster.pods();
    let state = |name: &str| {
        let found = pods.iter().find(|pod| pod["metadata"]["name"] == *name);
        found.unwrap()["status"]["containerStatuses"][0]["state"].clone()
    };
    let container = "system_u:system_r:container_t:s0:c";
    for (name, label, files) in [
        ("chosen", container.to_owned(), "empty settings"),
        (
            "same",
            format!("system_u:system_r:container_t:{LEVEL}"),
            "empty settings shared",
        ),
        (
            "other",
            "system_u:system_r:container_t:s0:c30,c40".into(),
            "empty settings",
        ),
        (
            "free",
            "system_u:system_r:spc_t:s0:c".into(),
            "empty settings shared system",
        ),
    ] {
        let state = state(name);
        let message = state["terminated"]["message"].as_str().unwrap_or_default();
        let (own, found) = message.trim().split_once(' ').unwrap_or_default();
        let denied = denied();
        assert!(own.starts_with(&label), "{name}: {state}\n{denied}");
        assert_eq!(found, files, "{name}: {state}\n{denied}");
    }
    let of_unknown = state("unknown");
    assert_eq!(of_unknown["terminated"]["exitCode"], 128, "{of_unknown}");
    let mut names = names.to_vec();
    names.push("unknown");
    names.extend(["--grace-period=1"]);
    cluster.kubectl(&[&["delete", "pod"], &names[..]].concat());
}

/// A volume of a ReadWriteOncePod claim is mounted with its label; its files are not labelled one by one (KEP-1710).
fn a_volume_of_one_pod_is_mounted_with_its_label(cluster: &Cluster) {
    let capacity = json!({"storage": "32Mi"});
    let disk = json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "disk"}, "spec": {
        "capacity": capacity, "accessModes": ["ReadWriteOncePod"], "storageClassName": "",
        "claimRef": {"namespace": "default", "name": "disk"},
        "iscsi": {"targetPortal": "192.0.2.10", "iqn": IQN, "lun": 0, "fsType": "ext4"}}});
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "disk"}, "spec": {
        "accessModes": ["ReadWriteOncePod"], "storageClassName": "", "volumeName": "disk",
        "resources": {"requests": capacity}}});
    let command = "echo x >/disk/file && busybox sleep 100000";
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "alone"}, "spec": {
        "terminationGracePeriodSeconds": 0,
        "securityContext": options("level", LEVEL),
        "containers": [{"name": "c", "image": IMAGE, "command": ["busybox", "sh", "-c", command],
            "volumeMounts": [{"name": "disk", "mountPath": "/disk"}]}],
        "volumes": [{"name": "disk", "persistentVolumeClaim": {"claimName": "disk"}}]}});
    cluster.apply(&[disk, claim, pod].map(|o| o.to_string()).join("\n"));
    wait_for(cluster, "condition=Ready", &["alone"]);
    assert_eq!(condition(&cluster.pod("alone"), "Ready"), "True");
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mut of_volume = mounts
        .lines()
        .filter(|l| l.contains("/volumes/kubernetes.io~iscsi/disk "));
    let mount = of_volume.next().expect("the volume is mounted");
    let context = format!("context=\"system_u:object_r:container_file_t:{LEVEL}\"");
    assert!(mount.contains(&context), "{mount}");
    cluster.kubectl(&["delete", "pod", "alone"]);
}
