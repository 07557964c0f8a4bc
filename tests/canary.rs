//! What is the user's outlives every pod: with the agent's root directory being a link, with mounts made behind the
//! agent's back, and with the agent killed meanwhile.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use support::{Cluster, Loop, condition, inside};

/// A directory of the user's with a file that must survive.
struct Canary(tempfile::TempDir);

impl Canary {
    fn new() -> Canary {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("deep/er")).unwrap();
        std::fs::write(dir.path().join("canary"), "alive").unwrap();
        std::fs::write(dir.path().join("deep/er/canary"), "alive").unwrap();
        Canary(dir)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn bind(&self, to: &Path) {
        std::fs::create_dir_all(to).unwrap();
        mount(
            Some(self.path()),
            to,
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )
        .unwrap();
    }

    fn lives(&self) {
        for file in ["canary", "deep/er/canary"] {
            assert_eq!(
                std::fs::read_to_string(self.path().join(file)).unwrap(),
                "alive"
            );
        }
    }
}

fn claimed(name: &str, node: &str, path: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}}}\nspec: {{storageClassName: '', capacity: {{storage: 1Mi}}, accessModes: [ReadWriteOnce], claimRef: {{namespace: default, name: {name}}}, local: {{path: '{path}'}}, nodeAffinity: {{required: {{nodeSelectorTerms: [{{matchExpressions: [{{key: kubernetes.io/hostname, operator: In, values: ['{node}']}}]}}]}}}}}}\n---\napiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec: {{storageClassName: '', accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 1Mi}}}}}}\n---\n"
    )
}

/// A pod with a volume of every kind, whole and in part.
fn pod(name: &str, image: &str, host: &Path) -> String {
    let volumes = format!(
        "[{{name: h, hostPath: {{path: '{}'}}}}, {{name: l, persistentVolumeClaim: {{claimName: local}}}}, {{name: d, persistentVolumeClaim: {{claimName: disk}}}}, {{name: e, emptyDir: {{}}}}, {{name: t, emptyDir: {{medium: Memory}}}}, {{name: m, configMap: {{name: map}}}}, {{name: s, secret: {{secretName: keys}}}}, {{name: p, projected: {{sources: [{{serviceAccountToken: {{path: token}}}}]}}}}, {{name: w, downwardAPI: {{items: [{{path: name, fieldRef: {{fieldPath: metadata.name}}}}]}}}}]",
        host.display()
    );
    let mounts: Vec<String> = ["h", "l", "d", "e", "t", "m", "s", "p", "w"]
        .iter()
        .map(|v| format!("{{name: {v}, mountPath: /{v}}}"))
        .chain(
            ["h", "l", "d", "e", "t"]
                .iter()
                .map(|v| format!("{{name: {v}, mountPath: /sub-{v}, subPath: deep/er}}")),
        )
        .collect();
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  terminationGracePeriodSeconds: 1\n  volumes: {volumes}\n  containers: [{{name: c, image: '{image}', command: [busybox, sleep, '10000'], volumeMounts: [{}]}}]\n---\n",
        mounts.join(", ")
    )
}

#[test]
fn what_is_the_users_outlives_every_pod() {
    let cluster = Cluster::start("canary", 55);
    let image = support::busybox(&cluster);
    let node = cluster.kubectl(&["get", "nodes", "-o", "jsonpath={.items[0].metadata.name}"]);
    // The root directory leads to another disk, as users have it.
    cluster.down();
    let (root, elsewhere) = (
        cluster.data().join("agent"),
        cluster.data().join("larger-disk"),
    );
    std::fs::rename(&root, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &root).unwrap();
    cluster.up();

    let (host, local, foreign, disk) = (Canary::new(), Canary::new(), Canary::new(), Loop::new());
    cluster.kubectl(&["create", "configmap", "map", "--from-literal=key=value"]);
    let secret = "create secret generic keys --from-literal=key=value";
    cluster.kubectl(&secret.split(' ').collect::<Vec<_>>());
    cluster.apply(&claimed(
        "local",
        &node,
        &local.path().display().to_string(),
    ));
    cluster.apply(&claimed("disk", &node, &disk.device.to_string()));
    let pod_dir = |name: &str| -> PathBuf {
        let uid = cluster.pod(name)["metadata"]["uid"]
            .as_str()
            .unwrap()
            .to_owned();
        elsewhere.join("pods").join(uid)
    };
    let die = || {
        let agent = nix::unistd::Pid::from_raw(cluster.pid("agent"));
        nix::sys::signal::kill(agent, nix::sys::signal::Signal::SIGKILL).unwrap();
        cluster.up();
    };
    for round in 0..6_u64 {
        let name = format!("pod-{round}");
        cluster.apply(&pod(&name, &image, host.path()));
        cluster.wait("the pod", || {
            condition(&cluster.pod(&name), "Ready") == "True"
        });
        inside(
            &cluster,
            &name,
            &[
                "busybox",
                "sh",
                "-c",
                "echo alive > /d/canary; mkdir -p /e/x/y; echo x > /e/x/y/z",
            ],
        );
        let dir = pod_dir(&name);
        let behind = dir.join("volumes/kubernetes.io~empty-dir/e/x/behind");
        foreign.bind(&behind);
        foreign.bind(&dir.join("containers/behind"));
        // In odd rounds somebody uses it, and nothing is forced.
        let used = (round % 2 == 1).then(|| std::fs::File::open(behind.join("canary")).unwrap());
        cluster.kubectl(&["delete", "pod", &name, "--wait=false"]);
        if round > 1 {
            std::thread::sleep(Duration::from_millis(round * 150));
            die();
        }
        if let Some(used) = used {
            std::thread::sleep(Duration::from_secs(3));
            assert!(
                behind.join("canary").exists() && !cluster.pods().is_empty(),
                "it is kept"
            );
            drop(used);
        }
        cluster.wait("the pod to go", || cluster.pods().is_empty());
        cluster.wait_quietly("its directory to go", || !dir.exists());
        for canary in [&host, &local, &foreign] {
            canary.lives();
        }
    }
    // What was on the disk is still there.
    let place = tempfile::tempdir().unwrap();
    cluster.wait_quietly("the disk to be let go", || {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        !table.contains(&format!(" {} ", disk.device))
    });
    mount(
        Some(disk.device.as_str()),
        place.path(),
        Some("ext4"),
        MsFlags::empty(),
        None::<&str>,
    )
    .unwrap();
    assert_eq!(
        std::fs::read_to_string(place.path().join("canary")).unwrap(),
        "alive\n"
    );
    umount2(place.path(), MntFlags::empty()).unwrap();
}
