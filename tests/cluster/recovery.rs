//! How long recovery takes after faults outside a pod: one function for each row of the table in issue
//! 14, with the installed containerd and each newer one. The bounds are generous compared to the
//! kubelet's times. `--nocapture` shows the time of each row.
//!
//! Other tests cover the following cases, with the installed containerd only: a killed agent, a boot without an
//! apiserver and a killed shim under a liveness probe (`faults.rs`); runtime calls that fail, hang or lose
//! their response (`cri_faults.rs`); drivers that lose responses or hang during publishing (`csi.rs`); a static
//! pod that is added and removed (`e2e.rs`); the order in which sidecars start and stop (`lifecycle.rs`).
#![allow(clippy::unwrap_used)]

use crate::driver;
mod parts;
use crate::support;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use driver::Driver;
use holdfast_core::pod::observed::{ContainerState, ObservedPod};
use holdfast_cri::{CriClient, Runtime as _};
use k8s_openapi::api::core::v1::Pod;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use parts::{at_most, is_within, manifest, processes, time, uid, with_sidecar};
use serde_json::Value;
use support::{Cluster, condition};

/// Exits immediately on SIGTERM.
const UNTIL_TERM: &str = "trap \"exit 0\" TERM; while true; do sleep 0.1; done";
/// How long the apiserver is frozen. Together with the age of the last heartbeat (up to 15 s) this is
/// below the 50 s after which a node becomes Unknown.
const FREEZE: Duration = Duration::from_secs(33);
/// The CSI driver of the tests.
const DRIVER: &str = "slow.test";

#[test]
fn recovery_is_quick_with_the_installed_runtime() {
    let _alone = crate::many_processes();
    Node::start("rows", 60, None).all_rows();
}

#[test]
fn recovery_is_quick_with_newer_runtimes() {
    let containerds = support::skip::fetched("HOLDFAST_RUNTIMES", "usr/bin/containerd");
    // One after the other: three concurrent bursts on two cores would measure the machine.
    for (i, containerd) in (0..).zip(&containerds) {
        let bin = containerd.parent().unwrap().to_owned();
        let _alone = crate::many_processes();
        Node::start(&format!("rows{i}"), 80 + i, Some(bin)).all_rows();
    }
}

/// A node for the rows.
struct Node {
    cluster: Cluster,
    /// The name of the node and its runtime's version.
    name: String,
    version: String,
    image: String,
    /// Files that containers write to, as `/notes`.
    notes: tempfile::TempDir,
    runtime: tokio::runtime::Runtime,
    api: kube::Client,
}

/// The control plane, stopped until this is dropped.
struct Frozen(Pid);

impl Frozen {
    fn new(cluster: &Cluster) -> Frozen {
        let pid = Pid::from_raw(cluster.pid("control-plane"));
        kill(pid, Signal::SIGSTOP).unwrap();
        Frozen(pid)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        kill(self.0, Signal::SIGCONT).unwrap();
    }
}

/// The CNI configuration, removed until this is dropped.
struct NoNetwork {
    place: PathBuf,
    text: Vec<u8>,
}

impl NoNetwork {
    fn new(cluster: &Cluster) -> NoNetwork {
        let place = cluster.data().join("cni/net.d/10-holdfast.conflist");
        let text = std::fs::read(&place).unwrap();
        std::fs::remove_file(&place).unwrap();
        NoNetwork { place, text }
    }
}

impl Drop for NoNetwork {
    fn drop(&mut self) {
        std::fs::write(&self.place, &self.text).unwrap();
    }
}

impl Node {
    fn start(name: &str, number: u16, containerd: Option<PathBuf>) -> Node {
        let cluster = Cluster::start_with(name, number, containerd);
        let info = "jsonpath={.items[0].metadata.name} {.items[0].status.nodeInfo.containerRuntimeVersion}";
        let info = cluster.kubectl(&["get", "nodes", "-o", info]);
        let (name, version) = info.split_once(" containerd://").unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let kubeconfig = cluster.data().join("kubeconfig");
        let api = runtime.block_on(holdfast_kubeapi::client::connect(&kubeconfig));
        Node {
            name: name.into(),
            version: version.into(),
            image: support::busybox(&cluster),
            notes: tempfile::tempdir().unwrap(),
            runtime,
            api: api.unwrap(),
            cluster,
        }
    }

    fn all_rows(&self) {
        // The driver hangs while the next rows run.
        let (hanging, directory) = self.hanging_driver();
        self.side_by_side(&[
            ("sidecar", &|| self.sidecar()),
            ("hook", &|| self.exit_beside_a_hook()),
            ("finalizer", &|| self.finalizer()),
        ]);
        // After the row that counts requests.
        self.deleted_at_once();
        self.ends_at_once();
        self.side_by_side(&[
            ("manifest", &|| self.manifest_changed_ten_times()),
            ("burst", &|| self.burst()),
            ("shim", &|| self.killed_shim()),
        ]);
        self.driver_answers_again(&hanging, directory.path());
        self.missing_network();
        self.frozen_apiserver();
        self.cluster
            .kubectl(&["delete", "pod", "--all", "--wait=true"]);
        self.within(20, "no leftovers", || self.cluster.leftovers().is_empty());
    }

    /// Runs rows in threads. If a row fails, the test fails after all have finished.
    fn side_by_side(&self, rows: &[(&str, &(dyn Fn() + Sync))]) {
        std::thread::scope(|scope| {
            for (name, row) in rows {
                let thread = std::thread::Builder::new().name(format!("{name} {}", self.version));
                thread.spawn_scoped(scope, row).unwrap();
            }
        });
    }

    fn took(&self, what: &str, time: impl std::fmt::Debug) {
        eprintln!("containerd {}: {what}: {time:.1?}", self.version);
    }

    /// Waits until a condition holds, [`at_most`] so many seconds, and returns how long it took.
    fn within(&self, seconds: u64, what: &str, condition: impl Fn() -> bool) -> Duration {
        let begun = Instant::now();
        while !condition() {
            if begun.elapsed() > at_most(seconds) {
                let log = self.cluster.log("agent");
                let from = log.len().saturating_sub(10_000);
                let end = String::from_utf8_lossy(&log.as_bytes()[from..]);
                panic!(
                    "containerd {}: not within {seconds} s: {what}\npods: {}\nleft: {:#?}\nthe end of the agent's log:\n{end}",
                    self.version,
                    self.phases(),
                    self.cluster.leftovers(),
                );
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        begun.elapsed()
    }

    /// All pods with their phases, if the API answers.
    fn phases(&self) -> String {
        let pods: kube::Api<Pod> = kube::Api::all(self.api.clone());
        let params = kube::api::ListParams::default();
        let listed = async {
            tokio::time::timeout(Duration::from_secs(2), pods.list(&params))
                .await
                .map_err(|e| e.to_string())?
                .map_err(|e| e.to_string())
        };
        let shown = |pod: Pod| {
            format!(
                "{:?} {:?}",
                pod.metadata.name,
                pod.status.and_then(|s| s.phase)
            )
        };
        match self.runtime.block_on(listed) {
            Ok(list) => format!(
                "{:#?}",
                list.items.into_iter().map(shown).collect::<Vec<_>>()
            ),
            Err(error) => error,
        }
    }

    fn pod(&self, name: &str) -> Option<Value> {
        let pods: kube::Api<Pod> = kube::Api::default_namespaced(self.api.clone());
        let pod = self.runtime.block_on(pods.get_opt(name)).unwrap();
        pod.map(|pod| serde_json::to_value(pod).unwrap())
    }

    fn is(&self, name: &str, phase: &str) -> bool {
        self.pod(name)
            .is_some_and(|pod| pod["status"]["phase"] == phase)
    }

    fn is_ready(&self, name: &str) -> bool {
        self.pod(name)
            .is_some_and(|pod| condition(&pod, "Ready") == "True")
    }

    fn is_deleted(&self, name: &str) -> bool {
        self.pod(name).is_none()
    }

    /// Deletes a pod, which must be removed within so many seconds.
    fn delete(&self, name: &str, seconds: u64) {
        self.cluster
            .kubectl(&["delete", "pod", name, "--wait=false"]);
        self.within(seconds, &format!("{name} is removed"), || {
            self.is_deleted(name)
        });
    }

    fn observe(&self, uid: &str) -> ObservedPod {
        let socket = self.cluster.run_dir().join("containerd.sock");
        self.runtime.block_on(async {
            let client = CriClient::new(socket.to_str().unwrap(), Duration::from_secs(30), None);
            client.unwrap().observe(uid).await.unwrap()
        })
    }

    fn explain(&self, pod: &str) -> String {
        let run = std::process::Command::new(support::holdfast())
            .args(["explain", "pod", pod, "--name", &self.cluster.name])
            .output()
            .unwrap();
        String::from_utf8(run.stdout).unwrap()
    }

    /// A container that runs a script.
    fn container(&self, name: &str, script: &str, more: &str) -> String {
        let image = &self.image;
        format!(
            "{{name: {name}, image: '{image}', command: [busybox, sh, -c, '{script}'], {more}}}"
        )
    }

    /// A container's fields that mount the notes.
    const NOTES: &str = "volumeMounts: [{name: notes, mountPath: /notes}]";

    /// A pod's volumes with the notes.
    fn volumes(&self) -> String {
        format!(
            "volumes: [{{name: notes, hostPath: {{path: '{}'}}}}]",
            self.notes.path().display()
        )
    }

    fn note(&self, name: &str) -> String {
        let text = std::fs::read_to_string(self.notes.path().join(name));
        text.unwrap_or_default().trim().to_owned()
    }

    /// Replaces a static pod's manifest atomically, as a careful operator does.
    fn write_manifest(&self, pod: &str, version: u32, script: &str) {
        let env = format!("env: [{{name: VERSION, value: '{version}'}}]");
        let container = self.container("c", script, &format!("{env}, {}", Self::NOTES));
        let volumes = self.volumes();
        let spec = format!("restartPolicy: Never, containers: [{container}], {volumes}");
        let manifest = manifest(pod, "", &spec);
        let manifests = self.cluster.data().join("agent/manifests");
        // Files whose name begins with a dot are ignored.
        let draft = manifests.join(format!(".{pod}"));
        std::fs::write(&draft, manifest.trim_end_matches("---\n")).unwrap();
        std::fs::rename(&draft, manifests.join(format!("{pod}.yaml"))).unwrap();
    }

    /// Whether the mirror pod of a static pod shows a version as running.
    fn mirrors(&self, pod: &str, version: u32) -> bool {
        let Some(mirror) = self.pod(&format!("{pod}-{}", self.name)) else {
            return false;
        };
        let shown = &mirror["spec"]["containers"][0]["env"][0]["value"];
        shown.as_str() == Some(&version.to_string())
            && mirror["status"]["phase"] == "Running"
            && condition(&mirror, "Ready") == "True"
    }

    /// The number of the agent's API requests with a method.
    fn requests(&self, method: &str) -> u64 {
        let path = format!("/api/v1/nodes/{}/proxy/metrics", self.name);
        let text = self.cluster.kubectl(&["get", "--raw", &path]);
        let of_method = format!("method=\"{method}\"");
        let counted = |line: &&str| {
            line.starts_with("rest_client_requests_total{") && line.contains(&of_method)
        };
        let values = text
            .lines()
            .filter(counted)
            .map(|line| line.rsplit(' ').next().unwrap());
        values
            .map(|value| value.parse::<f64>().unwrap() as u64)
            .sum()
    }
}

/// The rows.
impl Node {
    /// A pod with a sidecar and a container. The container starts promptly. Until then no explanation
    /// reports the pod as healthy.
    fn sidecar(&self) {
        let script = format!("sleep 1; touch /up; {UNTIL_TERM}");
        let probe = "restartPolicy: Always, startupProbe: {periodSeconds: 1, failureThreshold: 60, exec: {command: [cat, /up]}}";
        let sidecar = self.container("side", &script, probe);
        let spec = with_sidecar(&sidecar, &self.container("main", "sleep 2", ""));
        self.cluster.apply(&manifest("sidecar", "", &spec));
        let uid = uid(&self.pod("sidecar").unwrap());
        self.within(10, "the container starts after its sidecar", || {
            let explanation = self.explain("sidecar");
            // The runtime is queried after the explanation, so its state can only be newer.
            let main = self.observe(&uid).newest("main").cloned();
            let waits = main.is_none_or(|c| c.state == ContainerState::Created);
            assert!(
                !waits || !explanation.contains("Running as specified"),
                "{explanation}"
            );
            !waits
        });
        self.within(15, "the pod succeeds", || self.is("sidecar", "Succeeded"));
        let pod = self.pod("sidecar").unwrap();
        let main = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
        let waited =
            time(&main["startedAt"]).duration_since(time(&pod["metadata"]["creationTimestamp"]));
        assert!(is_within(waited, 10), "{waited:?}: {pod:#}");
        self.took(
            "a container whose sidecar takes a second to start starts after",
            waited,
        );
        self.delete("sidecar", 10);
    }

    /// Short pods, plain and with sidecars that must stop after them.
    fn burst(&self) {
        let plain: Vec<String> = (0..12).map(|n| format!("short-{n}")).collect();
        let paired: Vec<String> = (0..4).map(|n| format!("paired-{n}")).collect();
        let main = self.container("main", "sleep 1", "");
        let sidecar = self.container("side", UNTIL_TERM, "restartPolicy: Always");
        let label = "labels: {row: burst}";
        let mut all = String::new();
        for name in &plain {
            all += &manifest(
                name,
                label,
                &format!("restartPolicy: Never, containers: [{main}]"),
            );
        }
        for name in &paired {
            all += &manifest(name, label, &with_sidecar(&sidecar, &main));
        }
        let begun = Instant::now();
        self.cluster.apply(&all);
        for name in plain.iter().chain(&paired) {
            self.within(40, &format!("{name} succeeds"), || {
                self.is(name, "Succeeded")
            });
        }
        assert!(begun.elapsed() < at_most(40), "{:?}", begun.elapsed());
        self.took("12 short pods and 4 with sidecars", begun.elapsed());
        for name in &paired {
            let pod = self.pod(name).unwrap();
            let end =
                |list: &str| time(&pod["status"][list][0]["state"]["terminated"]["finishedAt"]);
            assert!(
                end("initContainerStatuses") >= end("containerStatuses"),
                "{pod:#}"
            );
        }
        self.cluster.kubectl(&["delete", "pod", "-l", "row=burst"]);
    }

    /// Containers that exit while the runtime is still starting them: their pods terminate immediately, not
    /// at the next audit.
    fn ends_at_once(&self) {
        let main = self.container("main", "true", "");
        let spec = format!("restartPolicy: Never, containers: [{main}]");
        let names: Vec<String> = (0..20).map(|n| format!("instant-{n}")).collect();
        let all = |name: &String| manifest(name, "labels: {row: instant}", &spec);
        self.cluster
            .apply(&names.iter().map(all).collect::<String>());
        let mut longest = jiff::SignedDuration::ZERO;
        for name in &names {
            self.within(60, &format!("{name} succeeds"), || {
                self.is(name, "Succeeded")
            });
            let pod = self.pod(name).unwrap();
            let end = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
            let conditions = pod["status"]["conditions"].as_array().unwrap();
            let ready = conditions.iter().find(|c| c["type"] == "Ready").unwrap();
            let after = time(&ready["lastTransitionTime"]).duration_since(time(&end["finishedAt"]));
            assert!(is_within(after, 5), "{after:?}: {pod:#}");
            longest = longest.max(after);
        }
        self.took(
            "20 containers that exit at once are reported after",
            longest,
        );
        self.cluster
            .kubectl(&["delete", "pod", "-l", "row=instant"]);
    }

    /// Pods that are deleted while the runtime creates their sandboxes: no shim is leaked.
    fn deleted_at_once(&self) {
        let container = self.container("c", UNTIL_TERM, "");
        let label = "labels: {row: hasty}";
        for round in 0..12 {
            let pods = (0..4).map(|n| {
                let spec = format!("containers: [{container}]");
                manifest(&format!("hasty-{round}-{n}"), label, &spec)
            });
            self.cluster.apply(&pods.collect::<String>());
            std::thread::sleep(Duration::from_millis(round * 37 % 400));
            let force = ["--force", "--grace-period=0", "--wait=false"];
            let delete = ["delete", "pod", "-l", "row=hasty"];
            self.cluster.kubectl(&[&delete[..], &force].concat());
        }
        // The pod whose driver hangs keeps some resources until later.
        let shims = || {
            let left = self.cluster.leftovers().into_iter();
            left.filter(|left| left.starts_with("shim ")).count()
        };
        let ended = self.within(20, "no shim is left", || shims() == 0);
        self.took(
            "the shims of 48 pods that were deleted during their start exited after",
            ended,
        );
    }

    /// A container that exits during another one's postStart hook restarts long before the hook returns.
    fn exit_beside_a_hook(&self) {
        let first = self.container("a", "sleep 3; exit 1", "");
        let hook = "lifecycle: {postStart: {exec: {command: [sleep, '150']}}}";
        let second = self.container("b", UNTIL_TERM, hook);
        self.cluster.apply(&manifest(
            "hook",
            "",
            &format!("containers: [{first}, {second}]"),
        ));
        let status = || self.pod("hook").unwrap()["status"]["containerStatuses"].clone();
        self.within(20, "container a is restarted", || {
            let a = status()[0].clone();
            a["restartCount"].as_i64() >= Some(1) && a["lastState"]["terminated"].is_object()
        });
        let (a, b) = (status()[0].clone(), status()[1].clone());
        let started =
            [&a["state"]["running"], &a["state"]["terminated"]].map(|s| s["startedAt"].clone());
        let started = started.iter().find(|at| at.is_string());
        assert_eq!(b["started"], false, "the hook still runs: {b:#}");
        if let Some(started) = started {
            let waited =
                time(started).duration_since(time(&a["lastState"]["terminated"]["finishedAt"]));
            assert!(is_within(waited, 8), "{waited:?}: {a:#}");
            self.took("restart while a hook runs after", waited);
        }
        self.delete("hook", 15);
    }

    /// A deleted and stopped pod causes no requests while a finalizer keeps it.
    fn finalizer(&self) {
        let container = self.container("c", UNTIL_TERM, "");
        let metadata = "finalizers: [test.local/hold]";
        self.cluster.apply(&manifest(
            "held",
            metadata,
            &format!("containers: [{container}]"),
        ));
        self.within(20, "the pod is ready", || self.is_ready("held"));
        self.cluster
            .kubectl(&["delete", "pod", "held", "--wait=false"]);
        self.within(20, "the container exits", || {
            let pod = self.pod("held").unwrap();
            pod["status"]["containerStatuses"][0]["state"]["terminated"].is_object()
        });
        // Its final status is published first; the node releases its resources a moment later.
        self.within(20, "the node releases the pod", || {
            self.pod("held").unwrap()["metadata"]["deletionGracePeriodSeconds"] == 0
        });
        let version = || self.pod("held").unwrap()["metadata"]["resourceVersion"].clone();
        self.within(20, "the pod's last status", || {
            let before = version();
            std::thread::sleep(Duration::from_secs(1));
            version() == before
        });
        let before = (self.requests("DELETE"), self.requests("PATCH"), version());
        std::thread::sleep(Duration::from_secs(10));
        let deletes = self.requests("DELETE") - before.0;
        let patches = self.requests("PATCH") - before.1;
        assert_eq!(version(), before.2, "the pod is not updated");
        // Two other rows run at the same time. Each deletes a pod and reports the start and the end of its pods.
        assert!(
            deletes <= 3 && patches <= 40,
            "{deletes} DELETE, {patches} PATCH requests in 10 s"
        );
        self.took(
            "DELETE and PATCH requests in 10 s while a finalizer exists",
            (deletes, patches),
        );
        let patch = r#"{"metadata": {"finalizers": null}}"#;
        self.cluster
            .kubectl(&["patch", "pod", "held", "--type=merge", "--patch", patch]);
        self.within(5, "the pod is removed with its finalizer", || {
            self.is_deleted("held")
        });
    }

    /// The script of each version of a static pod: it writes its version. Every other version exits, so
    /// that its mirror pod has a terminal status when the next version comes.
    const VERSIONED: &str = "echo $VERSION > /notes/$POD; test $((VERSION % 2)) = 1 && exit 0; trap \"exit 0\" TERM; while true; do sleep 0.1; done";

    /// A static pod whose manifest changes every second or two: the last version runs, and its mirror pod shows it.
    fn manifest_changed_ten_times(&self) {
        let script = Self::VERSIONED.replace("$POD", "changed");
        for version in 1..=10 {
            self.write_manifest("changed", version, &script);
            std::thread::sleep(Duration::from_millis(
                1000 + u64::from(version) * 370 % 1000,
            ));
        }
        let ran = self.within(40, "the last version runs", || self.note("changed") == "10");
        let shown = self.within(20, "the mirror shows the last version", || {
            self.mirrors("changed", 10)
        });
        self.took(
            "the tenth version of a manifest runs after, and then is mirrored after",
            (ran, shown),
        );
    }

    /// A shim dies. Its pod becomes ready again and can be deleted, and the old process does not keep
    /// running next to the new one.
    fn killed_shim(&self) {
        let marker = format!("{}", 50_000 + self.cluster.number);
        let container = self.container("c", &format!("sleep {marker}"), "");
        self.cluster
            .apply(&manifest("shim", "", &format!("containers: [{container}]")));
        self.within(20, "the pod is ready", || self.is_ready("shim"));
        let before = self.pod("shim").unwrap();
        let id = |pod: &Value| pod["status"]["containerStatuses"][0]["containerID"].to_string();
        let sandbox = self.observe(&uid(&before)).sandboxes[0].id.clone();
        // The runtime reports `running` when runc releases the process, before the exec of the shell.
        self.within(10, "the container's process runs", || {
            !processes(&format!("sleep {marker}")).is_empty()
        });
        let old = processes(&format!("sleep {marker}"));
        let shims = processes(&format!("-id {sandbox}"));
        assert!(!shims.is_empty(), "no shim of sandbox {sandbox}");
        for shim in shims {
            kill(Pid::from_raw(shim), Signal::SIGKILL).unwrap();
        }
        let ready = self.within(40, "the pod is ready again", || {
            self.pod("shim")
                .is_some_and(|pod| condition(&pod, "Ready") == "True" && id(&pod) != id(&before))
        });
        self.took("a pod whose shim was killed is ready after", ready);
        let left: Vec<i32> = processes(&format!("sleep {marker}"))
            .into_iter()
            .filter(|p| old.contains(p))
            .collect();
        assert_eq!(
            left,
            Vec::<i32>::new(),
            "processes of the old container still run"
        );
        self.delete("shim", 20);
    }

    /// A driver hangs while the agent cleans up a pod whose object was removed while no agent ran.
    fn hanging_driver(&self) -> (driver::Running, tempfile::TempDir) {
        let directory = tempfile::tempdir().unwrap();
        let registry = self.cluster.data().join("agent/plugins_registry");
        self.cluster.apply(&format!(
            "apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {{name: {DRIVER}}}\nspec: {{attachRequired: false, volumeLifecycleModes: [Ephemeral]}}\n"
        ));
        let running = Driver::new(DRIVER, directory.path()).run(&registry);
        let driver = &running.driver;
        self.within(20, "the driver is registered", || {
            driver.outcome().is_some()
        });
        let mount = "volumeMounts: [{name: v, mountPath: /v}]";
        let container = self.container("c", UNTIL_TERM, mount);
        let spec =
            format!("containers: [{container}], volumes: [{{name: v, csi: {{driver: {DRIVER}}}}}]");
        self.cluster.apply(&manifest("left", "", &spec));
        self.within(20, "the pod is ready", || self.is_ready("left"));
        driver.hang_calls("unpublish", true);
        kill(Pid::from_raw(self.cluster.pid("agent")), Signal::SIGKILL).unwrap();
        self.cluster
            .kubectl(&["delete", "pod", "left", "--grace-period=0", "--force"]);
        self.cluster.up();
        self.within(40, "the driver is called", || driver.count("unpublish") > 0);
        (running, directory)
    }

    /// The previous rows have run while the driver hung. Now it answers.
    fn driver_answers_again(&self, hanging: &driver::Running, directory: &std::path::Path) {
        let mounted = || {
            let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
            let pods = self.cluster.data().join("agent/pods");
            table
                .lines()
                .any(|l| l.contains("kubernetes.io~csi") && l.contains(pods.to_str().unwrap()))
        };
        assert!(
            mounted(),
            "the volume in {} was unmounted too early",
            directory.display()
        );
        hanging.driver.hang_calls("unpublish", false);
        let undone = self.within(20, "the volume is unmounted", || !mounted());
        self.took(
            "a leftover volume is unmounted after the driver's recovery",
            undone,
        );
    }

    fn is_node_ready(&self) -> bool {
        let ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}";
        let node = ["get", "node", &self.name, "-o", ready];
        self.cluster.kubectl(&node) == "True"
    }

    /// Pods that stop and pods that start without a CNI configuration.
    fn missing_network(&self) {
        let container = self.container("c", UNTIL_TERM, "");
        let spec = format!("containers: [{container}]");
        let label = "labels: {row: going}";
        let going: String = (0..30)
            .map(|n| manifest(&format!("going-{n}"), label, &spec))
            .collect();
        self.cluster.apply(&going);
        for n in 0..30 {
            self.within(60, "all are ready", || self.is_ready(&format!("going-{n}")));
        }
        let without = NoNetwork::new(&self.cluster);
        self.cluster
            .kubectl(&["delete", "pod", "-l", "row=going", "--wait=false"]);
        let waiting = ["at-once", "later"];
        // The scheduler would not place them on a node that is not ready.
        let bound = format!("nodeName: {}, {spec}", self.name);
        let apply = |name: &str| self.cluster.apply(&manifest(name, "", &bound));
        apply(waiting[0]);
        // The agent queries the runtime's status every five seconds. A sandbox that is created before fails,
        // and cannot be removed either.
        self.within(20, "the node is not ready", || !self.is_node_ready());
        apply(waiting[1]);
        self.within(20, "an event names the network", || {
            self.cluster.events("later").contains("NetworkNotReady")
        });
        self.within(10, "the agent explains this, too", || {
            let explanation = self.explain("later");
            explanation.contains("the node's network is not ready")
        });
        let end = Instant::now() + Duration::from_secs(5);
        while Instant::now() < end {
            for name in waiting {
                assert!(
                    self.is(name, "Pending"),
                    "{:#}",
                    self.pod(name).unwrap_or_default()
                );
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        drop(without);
        let ready = self.within(30, "the pods start with the network", || {
            waiting.iter().all(|name| self.is_ready(name))
        });
        let gone = self.within(60, "all deleted pods are removed", || {
            (0..30).all(|n| self.is_deleted(&format!("going-{n}")))
        });
        self.took("pods ready, others removed, after recovery", (ready, gone));
        self.cluster.kubectl(&["delete", "pod", "at-once", "later"]);
        self.within(10, "no address is leased", || {
            !self
                .cluster
                .leftovers()
                .iter()
                .any(|left| left.starts_with("address") && !self.is_leased_to_static(left))
        });
    }

    /// Whether an address belongs to the remaining static pod.
    fn is_leased_to_static(&self, left: &str) -> bool {
        let address = left.trim_start_matches("address ");
        self.pod(&format!("changed-{}", self.name))
            .is_some_and(|pod| pod["status"]["podIP"] == address)
    }

    /// The apiserver freezes. No pod's readiness changes, static pods start and change without the API, and
    /// pods that are created meanwhile start as soon as it answers.
    fn frozen_apiserver(&self) {
        let probe =
            "readinessProbe: {periodSeconds: 1, timeoutSeconds: 20, exec: {command: ['true']}}";
        let container = self.container("c", UNTIL_TERM, probe);
        let probed = ["probed-0", "probed-1", "probed-2"];
        for name in probed {
            self.cluster
                .apply(&manifest(name, "", &format!("containers: [{container}]")));
        }
        self.within(30, "the pods are ready", || {
            probed.iter().all(|name| self.is_ready(name))
        });
        let readiness = || probed.map(|name| self.readiness(name));
        let before = readiness();
        std::thread::sleep(Duration::from_secs(2));

        let (frozen, begun) = (Frozen::new(&self.cluster), Instant::now());
        std::thread::sleep(Duration::from_secs(3));
        self.write_manifest("placed", 2, &Self::VERSIONED.replace("$POD", "placed"));
        let placed = self.within(15, "a static pod starts without the API", || {
            self.note("placed") == "2"
        });
        let script = Self::VERSIONED.replace("$POD", "changed");
        self.write_manifest("changed", 11, &script);
        std::thread::sleep(Duration::from_secs(1));
        self.write_manifest("changed", 12, &script);
        let changed = self.within(15, "a static pod changes without the API", || {
            self.note("changed") == "12"
        });
        self.took(
            "without the API a static pod starts, and changes, after",
            (placed, changed),
        );
        std::thread::sleep(FREEZE.saturating_sub(begun.elapsed()));
        drop(frozen);

        let thawed = Instant::now();
        self.cluster.apply(&manifest(
            "thawed",
            "",
            &format!("containers: [{container}]"),
        ));
        self.within(20, "a new pod is ready", || self.is_ready("thawed"));
        self.took("a new pod is ready after the thaw", thawed.elapsed());
        self.within(20, "the mirrors are correct", || {
            self.mirrors("changed", 12) && self.mirrors("placed", 2)
        });
        self.took("the mirrors are correct after the thaw", thawed.elapsed());
        std::thread::sleep(Duration::from_secs(3));
        assert_eq!(
            readiness(),
            before,
            "readiness has changed though nothing was wrong with the pods"
        );
        for pod in ["placed", "changed"] {
            let name = format!("{pod}-{}", self.name);
            std::fs::remove_file(
                self.cluster
                    .data()
                    .join(format!("agent/manifests/{pod}.yaml")),
            )
            .unwrap();
            self.within(20, "the static pod is removed", || self.is_deleted(&name));
        }
    }

    /// A pod's readiness, since when, and its container's restart count.
    fn readiness(&self, name: &str) -> String {
        let pod = self.pod(name).unwrap();
        let conditions = pod["status"]["conditions"].as_array().unwrap();
        let ready = conditions
            .iter()
            .filter(|c| c["type"] == "Ready" || c["type"] == "ContainersReady");
        let since: Vec<String> = ready
            .map(|c| format!("{} {} {}", c["type"], c["status"], c["lastTransitionTime"]))
            .collect();
        format!(
            "{name} {since:?} {}",
            pod["status"]["containerStatuses"][0]["restartCount"]
        )
    }
}
