//! Every call to a real containerd fails, hangs, comes late or loses its answer; once that is over, pods
//! that were started meanwhile run, once, and pods that were deleted are gone.
#![allow(clippy::unwrap_used)]

#[path = "support/proxy.rs"]
mod proxy;
mod support;

use std::time::Duration;

use holdfast::cri::{CriClient, Runtime as _};
use proxy::{FAULTS, Proxy};
use support::Cluster;

fn every_fault(name: &str, number: u16, methods: &[&'static str]) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("proxy.sock");
    let target = std::path::PathBuf::from(format!("/run/holdfast-t-{name}/containerd.sock"));
    let proxy = Proxy::start(socket.clone(), target.clone());
    let cluster =
        Cluster::start_configured(name, number, &format!("{{containerRuntimeEndpoint: 'unix://{}', runtimeRequestTimeout: 2s}}", socket.display()));
    let image = support::busybox(&cluster);
    let pod = |name: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{terminationGracePeriodSeconds: 1, containers: [{{name: c, image: '{image}', command: [busybox, sh, -c, 'trap \"exit 0\" TERM; while true; do sleep 0.1; done'], readinessProbe: {{periodSeconds: 1, exec: {{command: ['true']}}}}}}]}}\n"
        )
    };
    let ready = |name: &str| cluster.pods().iter().any(|p| p["metadata"]["name"] == *name && p["status"]["containerStatuses"][0]["ready"] == true);
    let mut old = "before".to_owned();
    cluster.apply(&pod(&old));
    cluster.wait("the first pod", || ready("before"));
    for method in methods {
        for fault in FAULTS {
            let new = format!("{}-{fault:?}", method.to_lowercase()).to_lowercase();
            proxy.set(method, fault);
            cluster.apply(&pod(&new));
            cluster.kubectl(&["delete", "pod", &old, "--wait=false"]);
            std::thread::sleep(Duration::from_millis(1500));
            // Some calls are made every few seconds only.
            cluster.wait_quietly(&format!("{method} is called while {fault:?} is on"), || proxy.hits() > 0);
            proxy.lift();
            cluster.wait(&format!("{new} is ready after {method} {fault:?}"), || ready(&new));
            cluster.wait(&format!("{old} is gone after {method} {fault:?}"), || !cluster.pods().iter().any(|p| p["metadata"]["name"] == *old));
            let started = cluster.pod(&new);
            // A start that is refused may be tried anew; one that has succeeded is not repeated.
            let runs = ask(&target, started["metadata"]["uid"].as_str().unwrap());
            assert_eq!(runs, 1, "{new}: {:#}", started["status"]);
            old = new;
        }
    }
    cluster.kubectl(&["delete", "pod", "--all", "--wait=true"]);
    assert_eq!(cluster.leftovers(), Vec::<String>::new());
}

/// How many containers of a pod the runtime has.
fn ask(socket: &std::path::Path, uid: &str) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = CriClient::new(socket.to_str().unwrap(), Duration::from_secs(30)).unwrap();
        client.observe(uid).await.unwrap().live().count()
    })
}

#[test]
fn calls_that_start_pods_may_go_wrong() {
    every_fault(
        "cri-a",
        30,
        &["RunPodSandbox", "PodSandboxStatus", "ImageStatus", "CreateContainer", "StartContainer", "ContainerStatus", "ExecSync"],
    );
}

#[test]
fn calls_that_watch_and_stop_pods_may_go_wrong() {
    every_fault("cri-b", 31, &["ListPodSandbox", "ListContainers", "StopContainer", "StopPodSandbox", "RemovePodSandbox", "Status"]);
}
