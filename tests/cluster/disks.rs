//! Network disks, with a real containerd. There is no such network here: loop devices stand in for the
//! disks, under the names that udev would give them, and a small program for `iscsiadm`.
#![allow(clippy::unwrap_used)]

use crate::support;

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use serde_json::{Value, json};
use support::disk::Loop;
use support::{Cluster, condition, inside};

const IQN: &str = "iqn.2026-11.test.holdfast:disk";

/// A link as udev creates it, removed when dropped.
struct Link(PathBuf);

impl Link {
    fn named(name: &str) -> Link {
        let dir = PathBuf::from("/dev/disk/by-path");
        std::fs::create_dir_all(&dir).unwrap();
        Link(dir.join(name))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A Node whose status lists the disk as in use and attached.
struct OtherNode<'a> {
    cluster: &'a Cluster,
    /// The name of the cluster's own Node.
    own: String,
}

impl OtherNode<'_> {
    fn with_the_disk(cluster: &Cluster) -> OtherNode<'_> {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "other"}, "spec": {"unschedulable": true}});
        let own = cluster.node_name();
        cluster.apply(&node.to_string());
        let node = OtherNode { cluster, own };
        let disk = OtherNode::disk();
        let listed = json!([{"name": disk, "devicePath": ""}]);
        node.patch_status(&json!({"volumesInUse": [disk], "volumesAttached": listed}));
        node
    }

    fn disk() -> String {
        format!("kubernetes.io/iscsi/192.0.2.7:{IQN}:1")
    }

    fn patch_status(&self, status: &Value) {
        let patch = json!({ "status": status }).to_string();
        let to = ["node", "other", "--subresource=status", "--type=merge"];
        self.cluster
            .kubectl(&[&["patch"], &to[..], &["--patch", &patch]].concat());
    }

    /// A pod that needs the disk, which only one node may use, waits until the other node no longer uses it.
    fn check_pod_waits(&self, pod: &str) {
        let cluster = self.cluster;
        cluster.wait("events about the disk in use", || {
            let events = cluster.events(pod);
            events.contains("Multi-Attach error for volume \"block\"")
                && events.contains("MapVolume.WaitForAttach failed for volume \"block\"")
        });
        let explained = cluster.holdfast(&["explain", "pod", pod]);
        let why = format!("does not list {}", OtherNode::disk());
        assert!(explained.contains(&why), "{explained}");
        let here = |path: &str| {
            let path = format!("jsonpath={{.status.{path}}}");
            cluster.kubectl(&["get", "node", &self.own, "-o", &path])
        };
        assert_eq!(here("volumesInUse[*]"), OtherNode::disk());
        assert_eq!(here("volumesAttached[*].name"), "");
        self.patch_status(&json!({"volumesInUse": null}));
        cluster.wait("the pod to be ready", || {
            condition(&cluster.pod(pod), "Ready") == "True"
        });
        assert_eq!(here("volumesAttached[*].name"), OtherNode::disk());
        cluster.kubectl(&["delete", "node", "other"]);
    }
}

/// Creates a pod that needs the disk while another node uses it.
fn wait_for_another_node(cluster: &Cluster, pod: &str, manifest: &str) {
    if support::skip::needs_bundled("its controller reads the nodes' status at any time") {
        return cluster.apply(manifest);
    }
    let other_node = OtherNode::with_the_disk(cluster);
    cluster.apply(manifest);
    other_node.check_pod_waits(pod);
}

fn no_disk_is_in_use(cluster: &Cluster) {
    cluster.wait("no disk to be in use", || {
        let status = cluster.node()["status"].clone();
        let is_empty = |field: &str| status[field].as_array().is_none_or(Vec::is_empty);
        is_empty("volumesInUse") && is_empty("volumesAttached")
    });
}

#[test]
fn disks_are_attached_mounted_shared_and_detached() {
    let tools = tempfile::tempdir().unwrap();
    let (disk, other, said) = (Loop::new(), Loop::new(), tools.path().join("said"));
    let link = Link::named(&format!("ip-192.0.2.7:3260-iscsi-{IQN}-lun-1"));
    // A login creates the disk's link, a logout removes it; a login with a wrong password fails.
    let script = format!(
        "#!/bin/sh\necho \"$@\" >> {said}\ncase \"$*\" in\n*--login) grep -q 'password -v right' {said} || {{ echo 'login failed'; exit 24; }}; ln -sf {device} {link};;\n*--logout) rm -f {link};;\nesac\n",
        said = said.display(),
        device = disk.device,
        link = link.0.display()
    );
    let program = tools.path().join("iscsiadm");
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let cluster = Cluster::start_with("disks", 42, Some(tools.path().into()));
    let image = support::busybox(&cluster);
    let pod = |name: &str, volume: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{terminationGracePeriodSeconds: 1, securityContext: {{fsGroup: 4343}}, containers: [{{name: c, image: '{image}', command: [busybox, sleep, '10000'], volumeMounts: [{{name: v, mountPath: /v}}]}}], volumes: [{{name: v, {volume}}}]}}\n---\n"
        )
    };
    let ready = |name: &str| condition(&cluster.pod(name), "Ready") == "True";
    let calls = || std::fs::read_to_string(&said).unwrap_or_default();
    let secret = |password: &str| {
        cluster.apply(&format!(
            "apiVersion: v1\nkind: Secret\nmetadata: {{name: chap}}\ntype: kubernetes.io/iscsi-chap\nstringData: {{node.session.auth.username: me, node.session.auth.password: {password}}}"
        ));
    };
    let source = format!(
        "iscsi: {{targetPortal: 192.0.2.7, iqn: '{IQN}', lun: 1, fsType: ext4, chapAuthSession: true, secretRef: {{name: chap}}}}"
    );

    secret("wrong");
    cluster.apply(&pod("one", &source));
    cluster.wait("an event about the refused login", || {
        cluster
            .events("one")
            .contains("failed to attach iSCSI target")
    });
    assert!(
        !cluster.events("one").contains("wrong"),
        "an event shows the password"
    );
    secret("right");
    cluster.wait("the pod to be ready", || ready("one"));
    assert_eq!(
        inside(
            &cluster,
            "one",
            &[
                "busybox",
                "sh",
                "-c",
                "echo kept > /v/file; stat -c %g /v/file"
            ]
        ),
        "4343"
    );
    cluster.apply(&pod("two", &source));
    cluster.wait("the second pod to be ready", || ready("two"));
    assert_eq!(
        inside(&cluster, "two", &["busybox", "cat", "/v/file"]),
        "kept"
    );
    let logins = calls().matches("--login").count();
    cluster.kubectl(&["delete", "pod", "one"]);
    assert!(!calls().contains("--logout"), "another pod uses the disk");
    cluster.kubectl(&["delete", "pod", "two"]);
    assert!(
        calls().contains("--logout") && calls().contains("-o delete"),
        "{}",
        calls()
    );
    assert!(!link.0.exists());
    // The written data is still there.
    cluster.apply(&pod("three", &source));
    cluster.wait("the pod to be ready", || ready("three"));
    assert_eq!(
        inside(&cluster, "three", &["busybox", "cat", "/v/file"]),
        "kept"
    );
    assert_eq!(calls().matches("--login").count(), logins + 1);
    cluster.kubectl(&["delete", "pod", "three"]);

    // As a raw device, in two pods: the session ends with the second one, and nothing is formatted or mounted.
    let persistent = |name: &str, source: &str| {
        cluster.apply(&format!(
            "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}}}\nspec: {{storageClassName: '', volumeMode: Block, capacity: {{storage: 1Mi}}, accessModes: [ReadWriteOnce], claimRef: {{namespace: default, name: {name}}}, {source}}}\n---\napiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec: {{storageClassName: '', volumeName: {name}, volumeMode: Block, accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 1Mi}}}}}}"
        ));
    };
    let raw = |name: &str, claim: &str| {
        pod(
            name,
            &format!("persistentVolumeClaim: {{claimName: {claim}}}"),
        )
        .replace(
            "volumeMounts: [{name: v, mountPath: /v}]",
            "volumeDevices: [{name: v, devicePath: /dev/raw}]",
        )
    };
    let magic = |name: &str| {
        inside(
            &cluster,
            name,
            &[
                "busybox",
                "sh",
                "-c",
                "dd if=/dev/raw bs=1 skip=1080 count=2 2>/dev/null | od -An -tx1",
            ],
        )
    };
    persistent(
        "block",
        &source.replace(
            "secretRef: {name: chap}",
            "secretRef: {name: chap, namespace: default}",
        ),
    );
    let logouts = || calls().matches("--logout").count();
    let before = logouts();
    wait_for_another_node(&cluster, "four", &raw("four", "block"));
    cluster.apply(&raw("five", "block"));
    cluster.wait("the pods to be ready", || ready("four") && ready("five"));
    assert_eq!(magic("four"), "53 ef", "ext4");
    cluster.kubectl(&["delete", "pod", "four"]);
    assert_eq!(
        (logouts(), magic("five").as_str()),
        (before, "53 ef"),
        "another pod uses the disk"
    );
    // A restarted agent knows which session the disk belongs to.
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(cluster.pid("agent")),
        nix::sys::signal::Signal::SIGKILL,
    )
    .unwrap();
    cluster.up();
    cluster.kubectl(&["delete", "pod", "five"]);
    assert_eq!(logouts(), before + 1);
    assert!(!link.0.exists());

    // Fibre Channel: the disk is present under its name; as a filesystem and as a device.
    let fibre = Link::named("pci-0000:41:00.0-fc-0x50060e801049cfd1-lun-0");
    std::os::unix::fs::symlink(&other.device, &fibre.0).unwrap();
    let channel = "fc: {targetWWNs: ['50060e801049cfd1'], lun: 0, fsType: ext4}";
    cluster.apply(&pod("fibre", channel));
    cluster.wait("the pod to be ready", || ready("fibre"));
    inside(&cluster, "fibre", &["busybox", "touch", "/v/file"]);
    cluster.kubectl(&["delete", "pod", "fibre"]);
    persistent("raw", channel);
    cluster.apply(&raw("raw", "raw"));
    cluster.wait("the pod to be ready", || ready("raw"));
    assert_eq!(magic("raw"), "53 ef", "ext4");
    cluster.kubectl(&["delete", "pod", "raw"]);

    no_disk_is_in_use(&cluster);
    cluster.assert_clean();
}

/// A local volume of 320 MiB and its claim, `disk`.
fn claimed(cluster: &Cluster, local: &Value) {
    let node = cluster.node()["metadata"]["name"].clone();
    let here = json!({"key": "kubernetes.io/hostname", "operator": "In", "values": [node]});
    let reach = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}});
    let common = json!({"storageClassName": "", "accessModes": ["ReadWriteOnce"]});
    let made = |kind: &str, name: &str, mut spec: Value| {
        json_patch::merge(&mut spec, &common);
        let object =
            json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec});
        cluster.apply(&object.to_string());
    };
    let of = json!({"namespace": "default", "name": "disk"});
    let size = json!({"storage": "320Mi"});
    let volume = json!({"capacity": size, "claimRef": of, "nodeAffinity": reach, "local": local});
    made("PersistentVolume", "disk", volume);
    let claim = json!({"volumeName": "disk", "resources": {"requests": size}});
    made("PersistentVolumeClaim", "disk", claim);
}

/// The filesystem on an expanded device grows as soon as the PersistentVolume shows the new size, while a pod uses it.
#[test]
fn a_local_disk_grows_under_its_pod() {
    let cluster = Cluster::start_configured("grown", 75, "syncFrequency: 2s");
    // XFS can grow with the right to mount; ext4 also needs CAP_SYS_RESOURCE. An XFS filesystem is at least 300 MiB.
    let (image, disk) = (support::busybox(&cluster), Loop::new());
    disk.grow(320 << 20);
    claimed(&cluster, &json!({"path": disk.device, "fsType": "xfs"}));
    let container = json!({"name": "c", "image": image, "command": ["busybox", "sleep", "10000"],
        "volumeMounts": [{"name": "v", "mountPath": "/v"}]});
    let volumes = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "disk"}}]);
    let spec =
        json!({"terminationGracePeriodSeconds": 1, "containers": [container], "volumes": volumes});
    support::pod(&cluster, "p", &spec);
    cluster.wait("the pod to be ready", || {
        condition(&cluster.pod("p"), "Ready") == "True"
    });
    let mebibytes = || -> u64 {
        let table = inside(&cluster, "p", &["busybox", "df", "-Pm", "/v"]);
        let size = table.lines().nth(1).unwrap().split_whitespace().nth(1);
        size.unwrap().parse().unwrap()
    };
    assert!((200..=320).contains(&mebibytes()));
    inside(&cluster, "p", &["busybox", "touch", "/v/kept"]);

    let capacity = |size: &str| {
        let patch = json!({"spec": {"capacity": {"storage": size}}}).to_string();
        cluster.kubectl(&["patch", "pv", "disk", "--type=merge", "-p", &patch]);
    };
    disk.grow(640 << 20);
    capacity("640Mi");
    cluster.wait("the claim to show the new size", || {
        let has = "jsonpath={.status.capacity.storage}";
        cluster.kubectl(&["get", "pvc", "disk", "-o", has]) == "640Mi"
    });
    assert!((480..=640).contains(&mebibytes()));
    inside(&cluster, "p", &["cat", "/v/kept"]);
    let restarts = &cluster.pod("p")["status"]["containerStatuses"][0]["restartCount"];
    assert_eq!(restarts, 0);
    for who in ["p", "disk"] {
        cluster.wait("the event about the new size", || {
            let events = cluster.events(who);
            events.contains("FileSystemResizeSuccessful")
                && events.contains("MountVolume.NodeExpandVolume succeeded for volume \"disk\"")
        });
    }
    cluster.kubectl(&["delete", "pod", "p"]);
    cluster.kubectl(&["delete", "pvc,pv", "disk"]);
    cluster.assert_clean();
}
