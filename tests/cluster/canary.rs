//! Users' data survives every pod. The agent's root directory is a symbolic link, users mount
//! directories that the agent does not know of, and the agent is killed meanwhile.
//!
//! `HOLDFAST_ROUNDS=1000 cargo test --test cluster canary::rounds` (`make rounds`) runs so many random rounds,
//! `HOLDFAST_SEED=17` makes other choices.
#![allow(clippy::unwrap_used)]

use crate::driver;
use crate::support;

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use driver::{Driver, Running};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use support::disk::Loop;
use support::{Cluster, condition, inside};

/// A user's directory with a file that must survive.
struct Canary(tempfile::TempDir);

impl Canary {
    fn new() -> Canary {
        let dir = tempfile::tempdir().unwrap();
        create_canaries(dir.path());
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

    fn assert_alive(&self) {
        assert_canaries_alive(self.path());
    }
}

fn create_canaries(dir: &Path) {
    std::fs::create_dir_all(dir.join("deep/er")).unwrap();
    for file in ["canary", "deep/er/canary"] {
        std::fs::write(dir.join(file), "alive").unwrap();
    }
}

fn assert_canaries_alive(dir: &Path) {
    for file in ["canary", "deep/er/canary"] {
        let text = std::fs::read_to_string(dir.join(file));
        assert_eq!(text.unwrap(), "alive", "{file} in {}", dir.display());
    }
}

/// Creates a filesystem on a disk.
fn format(disk: &Loop) {
    let made = std::process::Command::new("mkfs.ext4")
        .args(["-q", &disk.device])
        .status();
    assert!(made.unwrap().success());
}

/// Mounts the filesystem of a disk that is not in use, and runs `look` on it.
fn with_filesystem(disk: &Loop, check: impl FnOnce(&Path)) {
    let place = tempfile::tempdir().unwrap();
    let (device, none) = (Some(disk.device.as_str()), None::<&str>);
    mount(device, place.path(), Some("ext4"), MsFlags::empty(), none).unwrap();
    check(place.path());
    umount2(place.path(), MntFlags::empty()).unwrap();
}

fn claimed(name: &str, node: &str, path: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}}}\nspec: {{storageClassName: '', capacity: {{storage: 1Mi}}, accessModes: [ReadWriteOnce], claimRef: {{namespace: default, name: {name}}}, local: {{path: '{path}'}}, nodeAffinity: {{required: {{nodeSelectorTerms: [{{matchExpressions: [{{key: kubernetes.io/hostname, operator: In, values: ['{node}']}}]}}]}}}}}}\n---\napiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec: {{storageClassName: '', accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 1Mi}}}}}}\n---\n"
    )
}

/// A pod with a volume of every kind; some of them are also mounted as subpaths.
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
fn user_data_outlives_every_pod() {
    let cluster = Cluster::start("canary", 55);
    let image = support::busybox(&cluster);
    let node = cluster.node_name();
    // The root directory is a link to another disk, as users have it.
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
        let agent = cluster.pid("agent");
        kill(Pid::from_raw(agent), Signal::SIGKILL).unwrap();
        cluster.wait_for_exit(agent);
        cluster.up();
    };
    for round in 0..6_u64 {
        let name = format!("pod-{round}");
        cluster.apply(&pod(&name, &image, host.path()));
        cluster.wait("the pod to be ready", || {
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
        // In odd rounds a process uses the mount. It is then not unmounted by force.
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
                "the directory is kept while it is in use"
            );
            drop(used);
        }
        cluster.wait("the pod to be removed", || cluster.pods().is_empty());
        cluster.wait_quietly("the pod's directory to be removed", || !dir.exists());
        for canary in [&host, &local, &foreign] {
            canary.assert_alive();
        }
    }
    // The files on the disk still exist.
    cluster.wait_quietly("the disk to be unmounted", || {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        !table.contains(&format!(" {} ", disk.device))
    });
    with_filesystem(&disk, |place| {
        let canary = std::fs::read_to_string(place.join("canary"));
        assert_eq!(canary.unwrap(), "alive\n");
    });
}

const DRIVER: &str = "rounds.test";
/// The number of rounds after which all faults are healed and everything is checked.
const SETTLE: u64 = 5;
/// The faults; the first two occur twice as often.
const FAULTS: [&str; 13] = [
    "agent",
    "agent",
    "shim",
    "shim",
    "containerd",
    "driver",
    "refuse",
    "lose",
    "hang",
    "full",
    "vanish",
    "pull",
    "behind",
];

/// Random choices that a seed repeats (SplitMix64).
struct Choices(u64);

impl Choices {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % most as u64).unwrap()
    }

    fn one_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }

    fn of<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

/// A small filesystem for the agent's root directory, which a test can fill.
struct Small {
    at: tempfile::TempDir,
    _disk: Loop,
}

impl Small {
    fn new() -> Small {
        let (disk, at) = (Loop::new(), tempfile::tempdir().unwrap());
        format(&disk);
        let (device, options) = (Some(disk.device.as_str()), None::<&str>);
        mount(device, at.path(), Some("ext4"), MsFlags::empty(), options).unwrap();
        Small { at, _disk: disk }
    }

    /// The agent's root directory.
    fn root(&self) -> PathBuf {
        self.at.path().join("agent")
    }

    fn filler(&self) -> PathBuf {
        self.at.path().join("filler")
    }

    fn fill(&self) {
        let mut file = std::fs::File::create(self.filler()).unwrap();
        for size in [1 << 20, 4096, 1] {
            while file.write_all(&vec![1; size]).is_ok() {}
        }
    }

    /// The mount points below the agent's directory.
    fn mounts(&self) -> Vec<String> {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let points = table.lines().filter_map(|l| l.split(' ').nth(4));
        let below = points.filter(|point| Path::new(point).starts_with(self.root()));
        below.map(Into::into).collect()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let mut mounts = self.mounts();
        mounts.sort();
        for point in mounts.iter().rev() {
            let _ = umount2(point.as_str(), MntFlags::MNT_DETACH);
        }
        let _ = umount2(self.at.path(), MntFlags::MNT_DETACH);
    }
}

/// A node whose pods, volumes, disks, driver and processes suffer faults.
struct Rounds {
    choices: Choices,
    image: String,
    canaries: [Canary; 2],
    /// The disk of a volume, and its name as long as it has not vanished.
    disk: Loop,
    name_of_disk: PathBuf,
    /// A disk that pods use as a raw device: in one volume by its path, in another through the driver.
    raw: Loop,
    /// Addresses and links of sandboxes that a killed containerd no longer knows: it sets up their network
    /// before it records them.
    forgotten: BTreeSet<String>,
    /// Whether containerd was killed since the last check.
    runtime_killed: bool,
    driver_at: tempfile::TempDir,
    driver: Option<Running>,
    pods: Vec<String>,
    cluster: Cluster,
    small: Small,
}

impl Rounds {
    fn start(seed: u64) -> Rounds {
        let cluster = Cluster::start("rounds", 93);
        let image = support::busybox(&cluster);
        let node = cluster.node_name();
        cluster.down();
        let (root, small) = (cluster.data().join("agent"), Small::new());
        std::fs::remove_dir_all(&root).unwrap();
        std::fs::create_dir(small.root()).unwrap();
        std::os::unix::fs::symlink(small.root(), &root).unwrap();
        cluster.up();
        let driver_at = tempfile::tempdir().unwrap();
        std::fs::create_dir(driver_at.path().join("vol")).unwrap();
        std::fs::write(driver_at.path().join("vol/canary"), "alive").unwrap();
        let (disk, raw, canaries) = (Loop::new(), Loop::new(), [Canary::new(), Canary::new()]);
        format(&disk);
        with_filesystem(&disk, create_canaries);
        std::fs::write(&raw.device, "alive").unwrap();
        let name_of_disk = driver_at.path().join("disk");
        std::os::unix::fs::symlink(&disk.device, &name_of_disk).unwrap();
        let mut rounds = Rounds {
            choices: Choices(seed),
            image,
            canaries,
            disk,
            name_of_disk,
            raw,
            forgotten: BTreeSet::new(),
            runtime_killed: false,
            driver_at,
            driver: None,
            pods: vec![],
            cluster,
            small,
        };
        rounds.apply_objects(&node);
        rounds.start_driver();
        rounds
    }

    /// Creates the objects that the pods' volumes refer to.
    fn apply_objects(&self, node: &str) {
        let cluster = &self.cluster;
        cluster.kubectl(&["create", "configmap", "map", "--from-literal=key=value"]);
        let secret = "create secret generic keys --from-literal=key=value";
        cluster.kubectl(&secret.split(' ').collect::<Vec<_>>());
        let local = self.canaries[1].path().display().to_string();
        let disk = self.name_of_disk.display().to_string();
        let by_driver = |volume: &str| format!("csi: {{driver: {DRIVER}, {volume}}}");
        let of = |name: &str, volume: &str| {
            claimed(name, node, "/").replace("local: {path: '/'}", &by_driver(volume))
        };
        let device = |manifest: String| {
            manifest.replace(
                "{storageClassName: ''",
                "{volumeMode: Block, storageClassName: ''",
            )
        };
        let raw = format!(
            "volumeHandle: raw, volumeAttributes: {{device: '{}'}}",
            self.raw.device
        );
        let driver = format!(
            "apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {{name: {DRIVER}}}\nspec: {{attachRequired: false, podInfoOnMount: true, volumeLifecycleModes: [Persistent, Ephemeral]}}\n---\n"
        );
        let volumes = [
            claimed("l", node, &local),
            claimed("d", node, &disk),
            of("c", "volumeHandle: vol"),
            device(claimed("b", node, &self.raw.device)),
            device(of("r", &raw)),
        ];
        cluster.apply(&(driver + &volumes.concat()));
    }

    fn start_driver(&mut self) {
        let registry = self.small.root().join("plugins_registry");
        self.driver = None;
        self.driver = Some(Driver::new(DRIVER, self.driver_at.path()).run(&registry));
    }

    /// A pod with some volumes, some of them also as subpaths. It writes files, and links that lead
    /// outside, into them.
    fn manifest(&mut self, name: &str) -> String {
        let host = self.canaries[0].path().display().to_string();
        let all = [
            ("e", "emptyDir: {}".to_owned()),
            ("t", "emptyDir: {medium: Memory}".into()),
            ("h", format!("hostPath: {{path: '{host}'}}")),
            ("m", "configMap: {name: map}".into()),
            ("s", "secret: {secretName: keys}".into()),
            ("p", "projected: {sources: [{serviceAccountToken: {path: token}}, {secret: {name: keys}}]}".into()),
            ("w", "downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}".into()),
            ("l", "persistentVolumeClaim: {claimName: l}".into()),
            ("d", "persistentVolumeClaim: {claimName: d}".into()),
            ("c", "persistentVolumeClaim: {claimName: c}".into()),
            ("i", format!("csi: {{driver: {DRIVER}}}")),
            ("b", "persistentVolumeClaim: {claimName: b}".into()),
            ("r", "persistentVolumeClaim: {claimName: r}".into()),
            ("g", "ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Mi}}}}}".into()),
        ];
        let (mut volumes, mut mounts, mut devices) = (vec![], vec![], vec![]);
        for (volume, source) in &all {
            if !self.choices.one_in(2) {
                continue;
            }
            volumes.push(format!("{{name: {volume}, {source}}}"));
            if ["b", "r"].contains(volume) {
                devices.push(format!("{{name: {volume}, devicePath: /dev/{volume}}}"));
                continue;
            }
            mounts.push(format!("{{name: {volume}, mountPath: /v/{volume}}}"));
            if self.choices.one_in(3) && ["e", "t", "h", "l", "d", "c", "i", "g"].contains(volume) {
                mounts.push(format!(
                    "{{name: {volume}, mountPath: /v/sub-{volume}, subPath: deep/er}}"
                ));
            }
        }
        let ends = self.choices.one_in(4);
        let (policy, then) = match ends {
            true => ("Never", "exit 0"),
            false => ("Always", "trap 'exit 0' TERM; busybox sleep 10000 & wait"),
        };
        let (volumes, mounts, devices) =
            (volumes.join(", "), mounts.join(", "), devices.join(", "));
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  restartPolicy: {policy}\n  terminationGracePeriodSeconds: 1\n  volumes: [{volumes}]\n  containers:\n  - name: c\n    image: '{}'\n    volumeMounts: [{mounts}]\n    volumeDevices: [{devices}]\n    command: [busybox, sh, -c, \"for v in /v/*; do busybox mkdir -p $v/{name}/deep; echo x > $v/{name}/deep/file; busybox ln -s / $v/{name}/everywhere; done 2>/dev/null; {then}\"]\n---\n",
            self.image
        )
    }

    fn kill_agent(&self) {
        let agent = self.cluster.pid("agent");
        let _ = kill(Pid::from_raw(agent), Signal::SIGKILL);
        self.cluster.wait_for_exit(agent);
    }

    fn kill_shim(&mut self) {
        let ours = format!("/run/holdfast-{}/", self.cluster.name);
        let shims: Vec<i32> = std::fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .filter_map(|process| {
                let line = std::fs::read(process.path().join("cmdline")).ok()?;
                let line = String::from_utf8_lossy(&line).into_owned();
                let is_shim = line.contains("containerd-shim") && line.contains(&ours);
                is_shim.then(|| process.file_name().to_str()?.parse().ok())?
            })
            .collect();
        if !shims.is_empty() {
            let _ = kill(Pid::from_raw(*self.choices.of(&shims)), Signal::SIGKILL);
        }
    }

    /// Mounts a user's directory in every emptyDir.
    fn mount_behind(&self) {
        for pod in std::fs::read_dir(self.small.root().join("pods"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let dir = pod.path().join("volumes/kubernetes.io~empty-dir/e");
            if dir.exists() && std::fs::create_dir(dir.join("behind")).is_ok() {
                let (from, bind) = (Some(self.canaries[0].path()), MsFlags::MS_BIND);
                let _ = mount(from, &dir.join("behind"), None::<&str>, bind, None::<&str>);
            }
        }
    }

    /// containerd stays down until `heal`: here it has no supervisor.
    fn kill_runtime(&mut self) {
        if !std::mem::replace(&mut self.runtime_killed, true) {
            let runtime = self.cluster.pid("containerd");
            let _ = kill(Pid::from_raw(runtime), Signal::SIGKILL);
            self.cluster.wait_for_exit(runtime);
        }
    }

    /// Pulls the disk out: its name is removed, and the device is removed when its last user closes it.
    fn pull_disk(&mut self) {
        let _ = std::fs::remove_file(&self.name_of_disk);
        self.disk.detach();
    }

    /// Causes a fault, which lasts until `heal`, and returns its description.
    fn fault(&mut self) -> String {
        let calls = ["stage", "publish", "unpublish", "unstage"];
        let call = *self.choices.of(&calls);
        let what = *self.choices.of(&FAULTS);
        let driver = self.driver.as_ref().map(|running| running.driver.clone());
        match (what, driver) {
            ("agent", _) => self.kill_agent(),
            ("shim", _) => self.kill_shim(),
            ("containerd", _) => self.kill_runtime(),
            ("driver", _) => self.driver = None,
            ("refuse", Some(driver)) => driver.fail_calls(call, true),
            ("lose", Some(driver)) => driver.lose_responses(call, true),
            ("hang", Some(driver)) => driver.hang_calls(call, true),
            ("full", _) => self.small.fill(),
            ("vanish", _) => _ = std::fs::remove_file(&self.name_of_disk),
            ("pull", _) => self.pull_disk(),
            ("behind", _) => self.mount_behind(),
            _ => {}
        }
        match what {
            "refuse" | "lose" | "hang" => format!("{what} {call}"),
            _ => what.to_owned(),
        }
    }

    /// Ends all faults. A disk that was pulled out returns later, when it is no longer in use.
    fn heal(&mut self) {
        let _ = std::fs::remove_file(self.small.filler());
        if self.disk.is_there() {
            let _ = std::os::unix::fs::symlink(&self.disk.device, &self.name_of_disk);
        }
        self.start_driver();
        // A supervisor waits longer after each early exit of its agent.
        self.cluster.up();
    }

    fn assert_canaries_alive(&self) {
        self.canaries.iter().for_each(Canary::assert_alive);
        let canary = self.driver_at.path().join("vol/canary");
        assert_eq!(std::fs::read_to_string(canary).unwrap(), "alive");
        let (mut raw, mut text) = (std::fs::File::open(&self.raw.device).unwrap(), [0; 5]);
        raw.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"alive", "no pod overwrites {}", self.raw.device);
    }

    fn round(&mut self, round: u64) {
        let new: Vec<String> = (0..=self.choices.below(2))
            .map(|n| format!("pod-{round}-{n}"))
            .collect();
        let manifests: String = new.iter().map(|name| self.manifest(name)).collect();
        self.cluster.apply(&manifests);
        self.pods.extend(new);
        std::thread::sleep(Duration::from_millis(self.choices.below(800) as u64));
        let mut log = vec![];
        for _ in 0..=self.choices.below(2) {
            log.push(self.fault());
        }
        let mut going = vec![];
        let mut kept = vec![];
        for pod in std::mem::take(&mut self.pods) {
            match self.choices.one_in(2) {
                true => going.push(pod),
                false => kept.push(pod),
            }
        }
        self.pods = kept;
        if !going.is_empty() {
            let mut command = vec!["delete", "pod", "--wait=false", "--ignore-not-found"];
            if self.choices.one_in(4) {
                command.extend(["--force", "--grace-period=0"]);
            }
            command.extend(going.iter().map(String::as_str));
            self.cluster.kubectl(&command);
        }
        if self.choices.one_in(3) {
            std::thread::sleep(Duration::from_millis(self.choices.below(300) as u64));
            log.push(self.fault());
        }
        eprintln!("{} deleted, {}", going.len(), log.join(", "));
        self.assert_canaries_alive();
    }

    /// The agent's explanations of the remaining pods.
    fn explained(&self) -> String {
        let name = |pod: &serde_json::Value| pod["metadata"]["name"].as_str().unwrap().to_owned();
        let pods: Vec<String> = self.cluster.pods().iter().map(name).collect();
        let explain = |pod: &String| self.cluster.holdfast(&["explain", "pod", pod]);
        pods.iter().map(explain).collect()
    }

    /// Ends all faults, deletes all pods, and checks that nothing is left of them.
    fn settle(&mut self, round: u64) {
        self.heal();
        let begun = Instant::now();
        self.cluster
            .kubectl(&["delete", "pod", "--all", "--wait=false"]);
        self.pods.clear();
        let deadline = begun + support::condition_timeout() * 4;
        while !self.cluster.pods().is_empty() {
            assert!(
                Instant::now() < deadline,
                "pods still exist after round {round}:\n{}\nagent's log:\n{}",
                self.explained(),
                self.cluster.log("agent")
            );
            std::thread::sleep(Duration::from_millis(100));
        }
        while !self.left().is_empty() {
            assert!(
                Instant::now() < deadline,
                "leftovers after round {round}: {:#?}\nagent's log:\n{}",
                self.left(),
                self.cluster.log("agent")
            );
            std::thread::sleep(Duration::from_millis(100));
        }
        if std::mem::take(&mut self.runtime_killed) {
            self.forgotten = self.cluster.leftovers_known().into_iter().collect();
        }
        self.cluster
            .wait_quietly("the disk to be released", || !self.disk.is_in_use());
        self.disk.reattach();
        let _ = std::os::unix::fs::symlink(&self.disk.device, &self.name_of_disk);
        with_filesystem(&self.disk, assert_canaries_alive);
        eprintln!("settled after {:.1?}", begun.elapsed());
        self.assert_canaries_alive();
    }

    /// Leftovers of deleted pods.
    fn left(&self) -> Vec<String> {
        let pods = std::fs::read_dir(self.small.root().join("pods"));
        let dirs = pods
            .into_iter()
            .flatten()
            .flatten()
            .map(|d| d.path().display().to_string());
        let mut left = self.cluster.leftovers_known();
        left.retain(|found| {
            let of_network = found.starts_with("address ") || found.starts_with("link ");
            !(self.forgotten.contains(found) || self.runtime_killed && of_network)
        });
        // The agent makes its own root directory a shared mount if the machine's mounts are not shared.
        let root = self.small.root().display().to_string();
        left.extend(self.small.mounts().into_iter().filter(|at| *at != root));
        left.extend(dirs);
        left
    }
}

/// Random pods with random volumes. Meanwhile the agent, containerd, its shims and the driver are
/// killed, the agent's disk is full, devices vanish, and users mount directories inside volumes. No
/// user data may be lost, and nothing may be left.
#[test]
fn rounds_of_random_pods_lose_no_data_and_leave_nothing_behind() {
    let number = |name: &str| std::env::var(name).ok().map(|n| n.parse::<u64>().unwrap());
    let seed = number("HOLDFAST_SEED").unwrap_or(1);
    eprintln!("HOLDFAST_SEED={seed}");
    let mut rounds = Rounds::start(seed);
    let all = number("HOLDFAST_ROUNDS").unwrap_or(10);
    for round in 1..=all {
        eprint!("{round} of {all}: ");
        rounds.round(round);
        if round % SETTLE == 0 {
            rounds.settle(round);
        }
    }
    rounds.settle(0);
}
