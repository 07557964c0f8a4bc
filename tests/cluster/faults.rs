//! Real faults of a node: killed agents, killed shims, a boot without an apiserver.
#![allow(clippy::unwrap_used)]

use crate::support;

use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use holdfast_core::pod::observed::{ContainerState, ObservedPod};
use holdfast_cri::{CriClient, Runtime as _};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use support::Cluster;

fn condition(pod: &Value, kind: &str) -> Value {
    pod["status"]["conditions"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|c| c["type"] == kind)
        .cloned()
        .unwrap_or_default()
}

fn ready(pod: &Value) -> bool {
    condition(pod, "Ready")["status"] == "True"
}

/// The response body of a port of this machine, if a server listens there.
fn get(port: u16, path: &str) -> Option<String> {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer.split_once("\r\n\r\n")?.1.to_owned())
}

/// Calls the cluster's containerd directly.
fn with_runtime<T>(cluster: &Cluster, work: impl AsyncFnOnce(CriClient) -> T) -> T {
    let endpoint = cluster.run_dir().join("containerd.sock");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        work(CriClient::new(endpoint.to_str().unwrap(), Duration::from_secs(60), None).unwrap())
            .await
    })
}

fn observe(cluster: &Cluster, uid: &str) -> ObservedPod {
    with_runtime(cluster, async |runtime| runtime.observe(uid).await.unwrap())
}

/// The files below a directory that contain a text.
fn found_below(dir: &Path, text: &str) -> Vec<String> {
    let mut found = vec![];
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(found_below(&path, text));
        } else if std::fs::read(&path)
            .is_ok_and(|bytes| bytes.windows(text.len()).any(|w| w == text.as_bytes()))
        {
            found.push(path.display().to_string());
        }
    }
    found
}

/// The program and the arguments of a cluster's agent.
fn arguments_of_agent(cluster: &Cluster) -> Vec<String> {
    let text = std::fs::read(format!("/proc/{}/cmdline", cluster.pid("agent"))).unwrap();
    let words = text.split(|b| *b == 0).filter(|a| !a.is_empty());
    words
        .map(|a| String::from_utf8(a.to_vec()).unwrap())
        .collect()
}

/// Simulates a reboot: kills agent and control plane, removes the pod's sandboxes, and starts only the agent.
fn boot(cluster: &Cluster, uid: &str, arguments: &[String], offline: &str) -> Child {
    for part in ["agent", "control-plane"] {
        cluster.kill(part);
    }
    with_runtime(cluster, async |runtime| {
        for sandbox in runtime.observe(uid).await.unwrap().sandboxes {
            runtime.stop_sandbox(&sandbox.id).await.unwrap();
            runtime.remove_sandbox(&sandbox.id).await.unwrap();
        }
    });
    let others = arguments[1..].iter();
    Command::new(&arguments[0])
        .args(others.filter(|a| !a.contains("offline-start")))
        .arg(format!("--offline-start={offline}"))
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap()
}

/// The running container of a pod.
fn running(cluster: &Cluster, uid: &str) -> Option<String> {
    let observed = observe(cluster, uid);
    let newest = observed.newest("c");
    newest
        .filter(|c| c.state == ContainerState::Running)
        .map(|c| c.id.clone())
}

/// By default only static pods start offline, because other pods may run on another node by now.
fn static_pods_alone_start_by_default(
    cluster: &Cluster,
    image: &str,
    uid: &str,
    arguments: &[String],
) {
    let manifest = cluster.data().join("agent/manifests/fixed.yaml");
    let fixed = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: fixed}}\nspec: {{terminationGracePeriodSeconds: 0, containers: [{{name: c, image: '{image}', command: [busybox, sleep, '1000']}}]}}\n"
    );
    let mut careful = boot(cluster, uid, arguments, "static-only");
    std::fs::write(&manifest, fixed).unwrap();
    let statics = || {
        let all = with_runtime(cluster, async |runtime| runtime.running().await.unwrap());
        all.iter().filter(|c| c.pod.starts_with("fixed-")).count()
    };
    cluster.wait_quietly("the static pod to run", || statics() == 1);
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(
        running(cluster, uid),
        None,
        "other pods wait for the apiserver"
    );
    // Its status is available without a mirror pod.
    cluster.wait_quietly("the static pod's status", || {
        let Some(listed) = get(16924, "/pods") else {
            return false;
        };
        let listed: Value = serde_json::from_str(&listed).unwrap_or_default();
        let Some(pods) = listed["items"].as_array() else {
            return false;
        };
        pods.len() == 1 && pods[0]["status"]["phase"] == "Running" && ready(&pods[0])
    });
    let secrets = cluster.data().join("agent/sealed/secrets");
    cluster.wait_quietly("the secrets of other pods to be removed", || {
        std::fs::read_dir(&secrets).unwrap().count() == 0
    });
    std::fs::remove_file(&manifest).unwrap();
    careful.kill().unwrap();
    careful.wait().unwrap();
    cluster.up();
    cluster.wait("the pod to start with the apiserver", || {
        running(cluster, uid).is_some()
    });
}

#[test]
fn a_node_that_boots_without_an_apiserver_starts_its_pods() {
    let cluster = Cluster::start_configured("sealed", 24, "readOnlyPort: 16924\n");
    let image = support::busybox(&cluster);
    let canary = "canary-4f1d9c";
    cluster.kubectl(&[
        "create",
        "secret",
        "generic",
        "keys",
        &format!("--from-literal=pin={canary}"),
    ]);
    cluster.kubectl(&[
        "create",
        "configmap",
        "settings",
        "--from-literal=color=blue",
    ]);
    let check = "test \"$COLOR\" = blue && grep -q canary /keys/pin && test -s /var/run/secrets/kubernetes.io/serviceaccount/token && echo fine; trap \"exit 0\" TERM; while true; do sleep 0.2; done";
    cluster.apply(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: kept}}\nspec:\n  terminationGracePeriodSeconds: 1\n  containers: [{{name: c, image: '{image}', command: [busybox, sh, -c, '{check}'], env: [{{name: COLOR, valueFrom: {{configMapKeyRef: {{name: settings, key: color}}}}}}], volumeMounts: [{{name: k, mountPath: /keys}}]}}]\n  volumes: [{{name: k, secret: {{secretName: keys}}}}]\n---\napiVersion: v1\nkind: Pod\nmetadata: {{name: gone}}\nspec: {{terminationGracePeriodSeconds: 1, containers: [{{name: c, image: '{image}', command: [busybox, sleep, '1000']}}]}}\n"
    ));
    cluster.wait("both pods to be ready", || {
        ready(&cluster.pod("kept")) && ready(&cluster.pod("gone"))
    });
    let sealed = cluster.data().join("agent/sealed");
    let count = || std::fs::read_dir(sealed.join("pods")).map_or(0, Iterator::count);
    cluster.wait("both pods to be sealed", || count() == 3);
    cluster.kubectl(&["delete", "pod", "gone"]);
    cluster.wait("the deleted pod to be unsealed", || count() == 2);
    let kept = cluster.pod("kept");
    let uid = kept["metadata"]["uid"].as_str().unwrap().to_owned();
    assert_eq!(
        found_below(&sealed, canary),
        Vec::<String>::new(),
        "a secret is stored in plain text"
    );
    assert_eq!(
        found_below(&cluster.data().join("logs"), canary),
        Vec::<String>::new(),
        "a secret is in the logs"
    );

    // The machine reboots without its apiserver.
    let arguments = arguments_of_agent(&cluster);
    assert!(arguments.contains(&"--offline-start=always".to_owned()));
    let mut alone = boot(&cluster, &uid, &arguments, "always");
    let running = || running(&cluster, &uid);
    let start = std::time::Instant::now();
    while running().is_none() {
        assert!(
            start.elapsed() < support::condition_timeout(),
            "the pod was not started without an apiserver"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    let container = running().unwrap();
    let log = cluster
        .data()
        .join(format!("pods-logs/default_kept_{uid}/c"));
    cluster.wait_quietly("the pod to find its secret, settings and token", || {
        !found_below(&log, "stdout F fine").is_empty()
    });
    alone.kill().unwrap();
    alone.wait().unwrap();

    // The apiserver returns: the same pod keeps running undisturbed.
    cluster.up();
    // The API has the old status until the agent writes the next one.
    let kept = format!("containerd://{container}");
    cluster.wait("the pod to be ready with the running container", || {
        let pod = cluster.pod("kept");
        ready(&pod) && pod["status"]["containerStatuses"][0]["containerID"] == *kept
    });
    assert_eq!(
        running(),
        Some(container),
        "the container was not restarted"
    );
    assert_eq!(cluster.pod("kept")["metadata"]["uid"], uid.as_str());

    static_pods_alone_start_by_default(&cluster, &image, &uid, &arguments);
    cluster.kubectl(&["delete", "pod", "--all", "--wait=true"]);
    cluster.wait("no leftovers", || cluster.leftovers().is_empty());
    let secrets = || {
        ["secrets", "tokens", "configmaps"]
            .iter()
            .map(|kind| std::fs::read_dir(sealed.join(kind)).unwrap().count())
            .sum::<usize>()
    };
    cluster.wait("secrets without a pod to be removed", || secrets() == 0);
}

#[test]
fn killed_agents_and_shims_disturb_no_other_pod_and_no_readiness() {
    let cluster = Cluster::start("killed", 25);
    let image = support::busybox(&cluster);
    let pod = |name: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  terminationGracePeriodSeconds: 1\n  containers: [{{name: c, image: '{image}', command: [busybox, sh, -c, 'touch /ok; sleep 10000'], startupProbe: {{periodSeconds: 1, timeoutSeconds: 20, failureThreshold: 60, exec: {{command: [cat, /ok]}}}}, readinessProbe: {{periodSeconds: 2, timeoutSeconds: 20, failureThreshold: 60, exec: {{command: [cat, /ok]}}}}, livenessProbe: {{periodSeconds: 2, timeoutSeconds: 20, failureThreshold: 60, exec: {{command: [cat, /ok]}}}}}}]\n---\n"
        )
    };
    cluster.apply(&format!("{}{}", pod("one"), pod("two")));
    cluster.wait("both pods to be ready", || {
        ready(&cluster.pod("one")) && ready(&cluster.pod("two"))
    });
    let state = |name: &str| {
        let pod = cluster.pod(name);
        let status = &pod["status"]["containerStatuses"][0];
        format!(
            "{} {} {} {}",
            status["containerID"],
            status["restartCount"],
            status["started"],
            condition(&pod, "Ready")
        )
    };
    std::thread::sleep(Duration::from_secs(11));
    let before = [state("one"), state("two")];
    let agent = cluster.pid("agent");
    kill(Pid::from_raw(agent), Signal::SIGKILL).unwrap();
    cluster.wait_for_exit(agent);
    cluster.up();
    // Nothing may change over several periods of the probes, not even for a moment.
    for _ in 0..20 {
        assert_eq!([state("one"), state("two")], before);
        std::thread::sleep(Duration::from_millis(250));
    }

    // If a shim dies, the containers of its pod die. This pod restarts; the other one is not affected.
    let sandbox = observe(
        &cluster,
        cluster.pod("one")["metadata"]["uid"].as_str().unwrap(),
    )
    .sandboxes[0]
        .id
        .clone();
    let shim = std::fs::read_dir("/proc").unwrap().flatten().find_map(|p| {
        let line =
            String::from_utf8_lossy(&std::fs::read(p.path().join("cmdline")).unwrap_or_default())
                .replace('\0', " ");
        let ours = line.contains("containerd-shim") && line.contains(&sandbox);
        ours.then(|| p.file_name().to_str().unwrap().parse::<i32>().unwrap())
    });
    kill(
        Pid::from_raw(shim.expect("the sandbox has a shim")),
        Signal::SIGKILL,
    )
    .unwrap();
    cluster.wait("the pod of the dead shim to be ready again", || {
        let pod = cluster.pod("one");
        ready(&pod) && pod["status"]["containerStatuses"][0]["restartCount"].as_i64() >= Some(1)
    });
    assert_eq!(state("two"), before[1]);
    cluster.kubectl(&["delete", "pod", "--all", "--wait=true"]);
    cluster.wait("no leftovers", || cluster.leftovers().is_empty());
}

/// Simulates the effect of a power loss on recently written files. The runtime's CNI library caches the result
/// of a plugin without syncing the file. It does not delete a network whose cached result it cannot read.
fn corrupt_cached_results(sandbox: &str) -> usize {
    let cached = std::fs::read_dir("/var/lib/cni/results").unwrap().flatten();
    let of_sandbox = cached.filter(|file| file.file_name().to_str().unwrap().contains(sandbox));
    of_sandbox
        .map(|file| std::fs::write(file.path(), "").unwrap())
        .count()
}

#[test]
fn a_pod_with_a_corrupt_cni_result_terminates() {
    corrupt("torn", 87, None);
    for (i, containerd) in (0..).zip(support::skip::fetched(
        "HOLDFAST_RUNTIMES",
        "usr/bin/containerd",
    )) {
        let bin = containerd.parent().unwrap().to_owned();
        corrupt(&format!("torn{i}"), 13 + i, Some(bin));
    }
}

fn corrupt(name: &str, number: u16, containerd: Option<std::path::PathBuf>) {
    let cluster = Cluster::start_with(name, number, containerd);
    let image = support::busybox(&cluster);
    let pod_with_corrupt_result = || {
        cluster.apply(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: torn}}\nspec: {{terminationGracePeriodSeconds: 1, containers: [{{name: c, image: '{image}', command: [busybox, sleep, '100000']}}]}}\n"
        ));
        cluster.wait("the pod to run", || ready(&cluster.pod("torn")));
        let pod = cluster.pod("torn");
        let seen = observe(&cluster, pod["metadata"]["uid"].as_str().unwrap());
        assert!(corrupt_cached_results(&seen.sandboxes[0].id) > 0);
    };
    pod_with_corrupt_result();
    cluster.kubectl(&["delete", "pod", "torn", "--wait=false"]);
    let begun = std::time::Instant::now();
    cluster.wait("the pod to be removed", || cluster.pods().is_empty());
    assert!(begun.elapsed() < Duration::from_secs(15));
    cluster.wait("no leftovers", || cluster.leftovers().is_empty());

    pod_with_corrupt_result();
    cluster.holdfast(&["down"]);
    assert_eq!(cluster.leftovers(), Vec::<String>::new());
}
