//! Every call to a real containerd fails, hangs, is late, loses its response or kills the agent.
//! Afterwards, pods that were started meanwhile run exactly once, and deleted pods are removed.
#![allow(clippy::unwrap_used)]

use crate::proxy;
use crate::support;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use holdfast_core::pod::observed::{ContainerState, ObservedPod};
use holdfast_cri::{CriClient, Runtime as _};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use proxy::{FAULTS, Fault, Proxy};
use support::Cluster;

/// A cluster whose agent reaches its containerd through a proxy.
struct Bench {
    _dir: tempfile::TempDir,
    target: PathBuf,
    proxy: Proxy,
    cluster: Cluster,
    image: String,
}

impl Bench {
    fn start(name: &str, number: u16, more: &str) -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("proxy.sock");
        let target = PathBuf::from(format!("/run/holdfast-t-{name}/containerd.sock"));
        let proxy = Proxy::start(socket.clone(), target.clone());
        let fields = format!(
            "{{containerRuntimeEndpoint: 'unix://{}', runtimeRequestTimeout: 10s{more}}}",
            socket.display()
        );
        let cluster = Cluster::start_configured(name, number, &fields);
        let image = support::busybox(&cluster);
        let pid = cluster.run_dir().join("agent.pid");
        proxy.kill_with(move || {
            let agent: i32 = std::fs::read_to_string(&pid)
                .unwrap()
                .split(' ')
                .next()
                .unwrap()
                .parse()
                .unwrap();
            kill(Pid::from_raw(agent), Signal::SIGKILL).unwrap();
            // The agent has exited before this returns: `up` does not start an agent that still seems to run.
            while !support::has_exited(agent) {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Bench {
            _dir: dir,
            target,
            proxy,
            cluster,
            image,
        }
    }

    fn pod(&self, name: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{terminationGracePeriodSeconds: 1, containers: [{{name: c, image: '{}', command: [busybox, sh, -c, 'trap \"exit 0\" TERM; while true; do echo on; sleep 0.1; done'], resources: {{requests: {{cpu: 10m}}}}, readinessProbe: {{periodSeconds: 1, timeoutSeconds: 10, exec: {{command: ['true']}}}}, volumeMounts: [{{name: v, mountPath: /v}}]}}], volumes: [{{name: v, emptyDir: {{medium: Memory}}}}]}}\n",
            self.image
        )
    }

    fn ready(&self, name: &str) -> bool {
        self.cluster.pods().iter().any(|p| {
            p["metadata"]["name"] == *name && p["status"]["containerStatuses"][0]["ready"] == true
        })
    }

    /// With each fault for each method, starts one pod and deletes another.
    fn every(&self, methods: &[&'static str], faults: &[Fault]) {
        let Bench {
            cluster,
            proxy,
            target,
            ..
        } = self;
        let mut old = "before".to_owned();
        cluster.apply(&self.pod(&old));
        cluster.wait("the first pod to be ready", || self.ready("before"));
        for method in methods {
            for fault in faults {
                let kills = matches!(fault, Fault::KillBefore | Fault::KillAfter);
                let new = format!("{}-{fault:?}", method.to_lowercase()).to_lowercase();
                proxy.set(method, *fault);
                cluster.apply(&self.pod(&new));
                cluster.kubectl(&["delete", "pod", &old, "--wait=false"]);
                if !kills {
                    // Some calls hang for longer than the agent's timeout.
                    let outlasts = *fault == Fault::Hang
                        && ["StartContainer", "StopPodSandbox"].contains(method);
                    let lasts = if outlasts { 12_000 } else { 1500 };
                    std::thread::sleep(Duration::from_millis(lasts));
                }
                // Some calls occur only every few seconds.
                cluster.wait_quietly(
                    &format!("a call of {method} while {fault:?} is set"),
                    || proxy.hits() > 0,
                );
                if kills {
                    // If a call takes long, the caller is killed only after its response.
                    cluster.wait_quietly(
                        &format!("the agent to be killed by {fault:?} of {method}"),
                        || proxy.has_killed(),
                    );
                    cluster.up();
                }
                proxy.clear_fault();
                cluster.wait(
                    &format!("{new} to be ready after {method} {fault:?}"),
                    || self.ready(&new),
                );
                cluster.wait(
                    &format!("{old} to be removed after {method} {fault:?}"),
                    || !cluster.pods().iter().any(|p| p["metadata"]["name"] == *old),
                );
                let started = cluster.pod(&new);
                // A failed start may be retried; a successful one is not repeated.
                let runs =
                    count_live_containers(target, started["metadata"]["uid"].as_str().unwrap());
                assert_eq!(runs, 1, "{new}: {:#}", started["status"]);
                if kills {
                    // If its caller died during a start, the runtime cancels the start and counts the attempt.
                    let container = &started["status"]["containerStatuses"][0];
                    // The message reports that the context was cancelled, or that the starting shim was killed for
                    // this reason.
                    let cut_off = container["lastState"]["terminated"]["message"]
                        .as_str()
                        .is_some_and(|m| {
                            m.contains("context canceled") || m.contains("signal: killed")
                        });
                    assert_eq!(
                        container["restartCount"],
                        u32::from(cut_off),
                        "{new}: {:#}",
                        started["status"]
                    );
                }
                old = new;
            }
        }
        self.delete_pods();
    }

    fn delete_pods(&self) {
        self.cluster
            .kubectl(&["delete", "pod", "--all", "--wait=true"]);
        self.cluster
            .wait_quietly("no leftovers", || self.cluster.leftovers_known().is_empty());
    }
}

/// The number of a pod's live containers in the runtime.
fn count_live_containers(socket: &std::path::Path, uid: &str) -> usize {
    observe(socket, uid).live().count()
}

fn observe(socket: &std::path::Path, uid: &str) -> ObservedPod {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let client =
            CriClient::new(socket.to_str().unwrap(), Duration::from_secs(30), None).unwrap();
        client.observe(uid).await.unwrap()
    })
}

const STARTING: [&str; 7] = [
    "RunPodSandbox",
    "PodSandboxStatus",
    "ImageStatus",
    "CreateContainer",
    "StartContainer",
    "ContainerStatus",
    "ExecSync",
];
const ENDING: [&str; 6] = [
    "ListPodSandbox",
    "ListContainers",
    "StopContainer",
    "StopPodSandbox",
    "RemovePodSandbox",
    "Status",
];

#[test]
fn pods_start_despite_failing_runtime_calls() {
    Bench::start("cri-a", 30, "").every(&STARTING, &FAULTS);
}

#[test]
fn pods_stop_despite_failing_runtime_calls() {
    Bench::start("cri-b", 31, "").every(&ENDING, &FAULTS);
}

#[test]
fn pods_survive_a_kill_of_the_agent_at_every_call() {
    let bench = Bench::start("cri-kill", 32, "");
    bench.every(
        &[STARTING.as_slice(), &ENDING].concat(),
        &[Fault::KillBefore, Fault::KillAfter],
    );
    bench.cluster.down();
    bench.cluster.wait_quietly("no leftovers after `down`", || {
        bench.cluster.leftovers().is_empty()
    });
}

/// A caller that dies at the wrong moment leaves a task that containerd's CRI plugin does not know. The
/// plugin then refuses to remove the container.
#[test]
fn a_task_unknown_to_cri_does_not_block_a_deletion() {
    let bench = Bench::start("cri-d", 16, "");
    let Bench {
        cluster,
        proxy,
        target,
        ..
    } = &bench;
    proxy.set("StartContainer", Fault::Fail);
    cluster.apply(&bench.pod("left"));
    let created = || {
        let pod = cluster.pods().into_iter().next()?;
        let containers = observe(target, pod["metadata"]["uid"].as_str()?).containers;
        let mut created = containers
            .into_iter()
            .filter(|c| c.state == ContainerState::Created);
        created.next().map(|c| c.id)
    };
    // The agent may replace a container that failed to start at any moment; then this retries with the next one.
    cluster.wait("a container to be started without CRI", || {
        let Some(id) = created() else { return false };
        let mut ctr = Command::new("ctr");
        ctr.arg("--address").arg(target);
        ctr.args(["--namespace", "k8s.io", "task", "start", "--detach"]);
        ctr.arg(id).output().unwrap().status.success()
    });
    proxy.clear_fault();
    bench.delete_pods();
}

/// `holdfast gc` with two unused images, neither of which can be removed at first.
fn gc_goes_on_after_a_failure(bench: &Bench) {
    let Bench { cluster, proxy, .. } = bench;
    let gc = |more: &[&str]| {
        let mut command = Command::new(support::holdfast());
        command.args(["gc", "--name", cluster.name()]).args(more);
        let output = command.output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        (output.status.success(), printed)
    };
    let unused = ["test.local/one:1", "test.local/two:1"]
        .map(|name| support::busybox_in(cluster, "k8s.io", name, name.as_bytes()));
    let lines = |printed: &str, verb: &str| {
        let is_it = |line: &&str| {
            line.trim().starts_with(verb) && unused.iter().any(|image| line.contains(image))
        };
        printed.lines().filter(is_it).count()
    };
    cluster.wait("both images to be old enough", || {
        lines(&gc(&["--dry-run"]).1, "goes ") == 2
    });
    proxy.set("RemoveImage", Fault::Fail);
    let (succeeds, printed) = gc(&[]);
    assert!(!succeeds && lines(&printed, "failed ") == 2, "{printed}");
    assert_eq!(
        proxy.hits(),
        2,
        "the second image is removed although the first fails"
    );
    proxy.clear_fault();
    let (succeeds, printed) = gc(&[]);
    assert!(succeeds && lines(&printed, "removed ") == 2, "{printed}");
}

#[test]
fn log_rotation_and_resizes_survive_failing_runtime_calls() {
    let bench = Bench::start(
        "cri-c",
        33,
        ", containerLogMaxSize: 1Ki, containerLogMonitorInterval: 500ms, imageGCHighThresholdPercent: 1, imageGCLowThresholdPercent: 0, imageMinimumGCAge: 1s",
    );
    let Bench { cluster, proxy, .. } = &bench;
    cluster.apply(&bench.pod("kept"));
    cluster.wait("the pod to be ready", || bench.ready("kept"));
    let pod = cluster.pod("kept");
    let before = pod["status"]["containerStatuses"][0]["containerID"].clone();
    let log = cluster.data().join("pods-logs").join(format!(
        "default_kept_{}/c/0.log",
        pod["metadata"]["uid"].as_str().unwrap()
    ));
    for fault in FAULTS {
        proxy.set("ReopenContainerLog", fault);
        cluster.wait_quietly(&format!("a rotation while {fault:?} is set"), || {
            proxy.hits() > 0
        });
        proxy.clear_fault();
        let size = || std::fs::metadata(&log).map_or(0, |m| m.len());
        cluster.wait(&format!("the log to be rotated after {fault:?}"), || {
            size() < 1024
        });
        let now = size();
        cluster.wait(&format!("the log to grow after {fault:?}"), || {
            size() != now
        });
    }
    for (n, fault) in FAULTS.into_iter().enumerate() {
        let cpu = format!("{}m", 20 + n);
        proxy.set("UpdateContainerResources", fault);
        let patch = format!(
            r#"{{"spec": {{"containers": [{{"name": "c", "resources": {{"requests": {{"cpu": "{cpu}"}}}}}}]}}}}"#
        );
        cluster.kubectl(&[
            "patch",
            "pod",
            "kept",
            "--subresource=resize",
            "--patch",
            &patch,
        ]);
        cluster.wait_quietly(&format!("a resize while {fault:?} is set"), || {
            proxy.hits() > 0
        });
        proxy.clear_fault();
        cluster.wait(&format!("the new size after {fault:?}"), || {
            cluster.pod("kept")["status"]["containerStatuses"][0]["resources"]["requests"]["cpu"]
                == *cpu
        });
    }
    assert_eq!(
        cluster.pod("kept")["status"]["containerStatuses"][0]["containerID"],
        before
    );
    gc_goes_on_after_a_failure(&bench);
    bench.delete_pods();
}
