//! A restarted agent undoes what pods had when the previous agent was killed, for each type of volume.
//! The pods were ready or still being set up, and their objects are terminating or removed when the agent
//! starts. No mount, directory, device, volume record or attachment is left, and user data is unchanged.
//!
//! An image volume is the runtime's own mount, and NFS needs a server: `tests/machines` does this for
//! NFS and iSCSI with real servers.
#![allow(clippy::unwrap_used)]

use crate::driver;
use crate::support;

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use driver::{Driver, Running};
use support::disk::Loop;
use support::{Cluster, condition};

const DRIVER: &str = "again.test";
const ATTACHED: &str = "attached.again.test";
const IQN: &str = "iqn.2026-11.test.holdfast:again";

/// How a container uses a volume: with a subpath, or as a raw device.
#[derive(Clone, Copy)]
enum As {
    Part(&'static str),
    Device,
}

/// A type of volume: its name in pod names, its source, and how it is used.
type Row = (&'static str, String, As);

fn claim(name: &str) -> String {
    format!("persistentVolumeClaim: {{claimName: {name}}}")
}

/// The types, for which [`objects`] creates the objects.
fn rows(host: &Path) -> Vec<Row> {
    let template = "{spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Mi}}}}";
    let name = "{path: name, fieldRef: {fieldPath: metadata.name}}";
    let iscsi = format!("iscsi: {{targetPortal: 192.0.2.9, iqn: '{IQN}', lun: 1, fsType: ext4}}");
    let part = As::Part("a/b");
    vec![
        ("disk", "emptyDir: {}".into(), part),
        ("memory", "emptyDir: {medium: Memory}".into(), part),
        ("pages", "emptyDir: {medium: HugePages-2Mi}".into(), part),
        (
            "host",
            format!("hostPath: {{path: '{}'}}", host.display()),
            part,
        ),
        ("map", "configMap: {name: map}".into(), As::Part("key")),
        (
            "secret",
            "secret: {secretName: keys}".into(),
            As::Part("key"),
        ),
        (
            "projected",
            "projected: {sources: [{secret: {name: keys}}, {serviceAccountToken: {path: token}}]}"
                .into(),
            As::Part("key"),
        ),
        (
            "downward",
            format!("downwardAPI: {{items: [{name}]}}"),
            As::Part("name"),
        ),
        (
            "ephemeral",
            format!("ephemeral: {{volumeClaimTemplate: {template}}}"),
            part,
        ),
        ("iscsi", iscsi, part),
        ("inline", format!("csi: {{driver: {DRIVER}}}"), part),
        ("local", claim("local"), part),
        ("local-disk", claim("local-disk"), part),
        ("local-raw", claim("local-raw"), As::Device),
        ("csi", claim("csi"), part),
        ("csi-raw", claim("csi-raw"), As::Device),
        ("csi-attached", claim("csi-attached"), part),
    ]
}

/// A PersistentVolume and its claim.
fn volume(name: &str, node: &str, mode: &str, source: &str) -> String {
    let class = format!("storageClassName: '', volumeMode: {mode}, accessModes: [ReadWriteOnce]");
    let affinity = format!(
        "nodeAffinity: {{required: {{nodeSelectorTerms: [{{matchExpressions: [{{key: kubernetes.io/hostname, operator: In, values: ['{node}']}}]}}]}}}}"
    );
    format!(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}}}\nspec: {{{class}, capacity: {{storage: 1Mi}}, claimRef: {{namespace: default, name: {name}}}, {affinity}, {source}}}\n---\napiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec: {{{class}, resources: {{requests: {{storage: 1Mi}}}}}}\n---\n"
    )
}

/// The objects that the volumes refer to: a directory, a disk and two devices.
fn objects(node: &str, local: &Path, [disk, raw, served]: [&Loop; 3]) -> String {
    let csi = |driver: &str, more: &str| format!("csi: {{driver: {driver}, {more}}}");
    let device = format!(
        "volumeHandle: raw, volumeAttributes: {{device: '{}'}}",
        served.device
    );
    let at = |path: &dyn std::fmt::Display| format!("local: {{path: '{path}'}}");
    [
        format!("apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {{name: {DRIVER}}}\nspec: {{attachRequired: false, podInfoOnMount: true, volumeLifecycleModes: [Persistent, Ephemeral]}}\n---\n"),
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: map}\ndata: {key: value}\n---\napiVersion: v1\nkind: Secret\nmetadata: {name: keys}\nstringData: {key: value}\n---\n".into(),
        volume("local", node, "Filesystem", &at(&local.display())),
        volume("local-disk", node, "Filesystem", &at(&disk.device)),
        volume("local-raw", node, "Block", &at(&raw.device)),
        volume("csi", node, "Filesystem", &csi(DRIVER, "volumeHandle: vol")),
        volume("csi-raw", node, "Block", &csi(DRIVER, &device)),
        volume("csi-attached", node, "Filesystem", &csi(ATTACHED, "volumeHandle: vol")),
    ]
    .concat()
}

fn pod(name: &str, image: &str, (_, source, has): &Row) -> String {
    let has = match has {
        As::Part(part) => format!(
            "volumeMounts: [{{name: v, mountPath: /v}}, {{name: v, mountPath: /part, subPath: {part}}}]"
        ),
        As::Device => "volumeDevices: [{name: v, devicePath: /dev/v}]".into(),
    };
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{terminationGracePeriodSeconds: 1, volumes: [{{name: v, {source}}}], containers: [{{name: c, image: '{image}', command: [busybox, sleep, '10000'], {has}}}]}}\n---\n"
    )
}

/// A disk that exists during a session of a program that stands in for `iscsiadm`.
struct Iscsi {
    tools: tempfile::TempDir,
    link: PathBuf,
    disk: Loop,
}

impl Iscsi {
    fn new() -> Iscsi {
        let (tools, disk) = (tempfile::tempdir().unwrap(), Loop::new());
        let by_path = Path::new("/dev/disk/by-path");
        std::fs::create_dir_all(by_path).unwrap();
        let link = by_path.join(format!("ip-192.0.2.9:3260-iscsi-{IQN}-lun-1"));
        let (device, at) = (&disk.device, link.display());
        let script = format!(
            "#!/bin/sh\ncase \"$*\" in\n*--login) ln -sf {device} {at};;\n*--logout) rm -f {at};;\nesac\n"
        );
        let program = tools.path().join("iscsiadm");
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        Iscsi { tools, link, disk }
    }
}

impl Drop for Iscsi {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.link);
    }
}

/// All files below a directory, of any type.
fn files(dir: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            true => files(&entry.path(), found),
            false => found.push(entry.path().display().to_string()),
        }
    }
}

/// Marks the volume as attached, once a VolumeAttachment exists.
fn attach(cluster: &Cluster) {
    let names = || {
        let names = "jsonpath={.items[*].metadata.name}";
        cluster.kubectl(&["get", "volumeattachments", "-o", names])
    };
    cluster.wait("a VolumeAttachment", || !names().is_empty());
    let patch = r#"{"status": {"attached": true}}"#;
    let name = names();
    let how = ["--subresource=status", "--type=merge", "-p", patch];
    cluster.kubectl(&[&["patch", "volumeattachment", &name], &how[..]].concat());
}

/// A node with everything that the volumes need.
struct Node {
    // Dropped first: a socket below the agent's directory keeps its mount busy.
    drivers: [(Running, tempfile::TempDir); 2],
    cluster: Cluster,
    image: String,
    iscsi: Iscsi,
    /// A disk and two devices.
    disks: [Loop; 3],
    /// A host directory, and a local volume.
    dirs: [tempfile::TempDir; 2],
}

impl Node {
    fn start() -> Node {
        let (iscsi, disks) = (Iscsi::new(), [(); 3].map(|()| Loop::new()));
        let cluster = Cluster::start_with("again", 89, Some(iscsi.tools.path().into()));
        let image = support::busybox(&cluster);
        let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
        for dir in &dirs {
            std::fs::write(dir.path().join("canary"), "alive").unwrap();
        }
        let registry = cluster.data().join("agent/plugins_registry");
        let drivers = [DRIVER, ATTACHED].map(|name| {
            let dir = tempfile::tempdir().unwrap();
            (Driver::new(name, dir.path()).run(&registry), dir)
        });
        let node = cluster.node_name();
        cluster.apply(&objects(&node, dirs[1].path(), disks.each_ref()));
        cluster.wait("the drivers to be registered", || {
            let mut all = drivers.iter();
            all.all(|(running, _)| running.driver.outcome().as_deref() == Some(""))
        });
        Node {
            cluster,
            image,
            iscsi,
            disks,
            dirs,
            drivers,
        }
    }

    /// Leftovers of pods and their volumes.
    fn left(&self) -> Vec<String> {
        let name = |pod: &serde_json::Value| pod["metadata"]["name"].to_string();
        let mut left: Vec<String> = self.cluster.pods().iter().map(name).collect();
        left.extend(self.cluster.leftovers_known());
        // Volume records and published devices.
        files(&self.cluster.data().join("agent/plugins"), &mut left);
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        for disk in self.disks.iter().chain([&self.iscsi.disk]) {
            if table.contains(&format!(" {} ", disk.device)) {
                left.push(format!("{} is mounted", disk.device));
            }
        }
        if self.iscsi.link.symlink_metadata().is_ok() {
            left.push("the iSCSI session".into());
        }
        for (kind, field) in [
            ("nodes", "status.volumesInUse[*]"),
            ("volumeattachments", "metadata.name"),
        ] {
            let field = format!("jsonpath={{.items[*].{field}}}");
            left.push(self.cluster.kubectl(&["get", kind, "-o", &field]));
        }
        left.retain(|found| !found.is_empty());
        left
    }

    /// Kills the agent a time after the pods were created, or when all are ready. Deletes the pods while no
    /// agent runs.
    fn round(&self, name: &str, early: Option<Duration>) {
        let (cluster, rows) = (&self.cluster, rows(self.dirs[0].path()));
        // Of each type one pod whose object is removed when the agent restarts, and one that is terminating.
        let kinds = ["forced", "waiting"];
        let names = |kind: &str| -> Vec<String> {
            let name = |row: &Row| format!("{}-{kind}-{name}", row.0);
            rows.iter().map(name).collect()
        };
        for kind in kinds {
            let pods = rows.iter().zip(names(kind));
            let pods = pods.map(|(row, name)| pod(&name, &self.image, row));
            cluster.apply(&pods.collect::<String>());
        }
        match early {
            Some(early) => std::thread::sleep(early),
            None => {
                attach(cluster);
                for name in kinds.iter().flat_map(|kind| names(kind)) {
                    cluster.wait(&name, || condition(&cluster.pod(&name), "Ready") == "True");
                }
            }
        }
        cluster.kill("agent");
        for kind in kinds {
            let (mut command, names) = (vec!["delete", "pod", "--wait=false"], names(kind));
            if kind == "forced" {
                command.extend(["--force", "--grace-period=0"]);
            }
            command.extend(names.iter().map(String::as_str));
            cluster.kubectl(&command);
        }
        cluster.up();
        self.is_clean(name);
    }

    fn is_clean(&self, round: &str) {
        let deadline = Instant::now() + support::condition_timeout() * 3;
        while !self.left().is_empty() {
            assert!(
                Instant::now() < deadline,
                "{round}: leftovers: {:#?}\nagent's log:\n{}",
                self.left(),
                self.cluster.log("agent")
            );
            std::thread::sleep(Duration::from_millis(200));
        }
        for dir in &self.dirs {
            let canary = std::fs::read_to_string(dir.path().join("canary"));
            assert_eq!(canary.unwrap(), "alive");
        }
        for (running, _) in &self.drivers {
            self.cluster.wait("all staged volumes to be unstaged", || {
                let calls = running.driver.calls();
                let last = |call: &str| calls.iter().rposition(|c| c.starts_with(call));
                last("unstage") >= last("stage")
            });
        }
    }
}

#[test]
fn volumes_of_a_killed_agent_are_cleaned_up_for_each_type() {
    let node = Node::start();
    node.round("ready", None);
    node.round("soon", Some(Duration::from_millis(300)));
    node.round("later", Some(Duration::from_millis(1500)));
}
