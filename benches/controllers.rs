//! `make bench-controllers`: the processor time of the bundled control plane. The control plane is a process of its own;
//! this process creates the objects and simulates the nodes. A simulated node renews its lease and reports each pod that is
//! bound to it as ready, with one patch.
//!
//! Figures: pods a second of 100 Deployments with 10 pods each, the processor time of one annotation among 3,000 pods, and
//! the idle time with 1,500 pods that fit on no node. `HOLDFAST_CHANGES` (200) annotations are written, one every
//! `HOLDFAST_INTERVAL_MS` (100).
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod, ServiceAccount};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;

/// The directory of the control plane in the child process.
const DIRECTORY: &str = "HOLDFAST_BENCH_CONTROL";
const NODES: usize = 40;
const DEPLOYMENTS: usize = 100;
const PENDING: usize = 1500;
/// Length of an idle measurement.
const WINDOW: Duration = Duration::from_secs(20);
/// Concurrent requests of this process.
const CONCURRENT: usize = 32;

fn parsed<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

/// A number from the environment.
fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// A control plane in a child process, and the simulated nodes.
struct Plane {
    child: Child,
    client: Client,
    /// The names of the ready pods.
    ready: Arc<Mutex<BTreeSet<String>>>,
    agents: Vec<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Plane {
    async fn start() -> Plane {
        let dir = tempfile::tempdir().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .env(DIRECTORY, dir.path())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let client = client(&dir.path().join("controller-manager.kubeconfig")).await;
        let ready = Arc::default();
        let pods: Api<Pod> = Api::default_namespaced(client.clone());
        let agents = vec![
            tokio::spawn(answer(pods, Arc::clone(&ready))),
            tokio::spawn(renew(client.clone())),
        ];
        Plane {
            child,
            client,
            ready,
            agents,
            _dir: dir,
        }
    }

    /// Seconds of processor time that the threads of the control plane have used.
    fn cpu(&self) -> f64 {
        let tasks = format!("/proc/{}/task", self.child.id().unwrap());
        let used = |task: std::io::Result<std::fs::DirEntry>| {
            let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
            text.split(' ').next()?.parse::<u64>().ok()
        };
        let nanos: u64 = std::fs::read_dir(tasks).unwrap().filter_map(used).sum();
        nanos as f64 / 1e9
    }

    /// Resident memory in MiB.
    fn rss(&self) -> f64 {
        let path = format!("/proc/{}/statm", self.child.id().unwrap());
        let text = std::fs::read_to_string(path).unwrap();
        let pages: u64 = text.split(' ').nth(1).unwrap().parse().unwrap();
        pages as f64 * 4096.0 / f64::from(1 << 20)
    }

    /// Processors in use while nothing changes but leases.
    async fn idle(&self) -> f64 {
        let before = self.cpu();
        tokio::time::sleep(WINDOW).await;
        (self.cpu() - before) / WINDOW.as_secs_f64()
    }

    /// Waits until this number of pods is ready.
    async fn wait_ready(&self, count: usize) {
        while self.ready.lock().unwrap().len() < count {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn stop(mut self) {
        self.agents.iter().for_each(JoinHandle::abort);
        self.child.kill().await.unwrap();
    }
}

/// A client of the control plane, once the `default` namespace can have pods.
async fn client(kubeconfig: &Path) -> Client {
    loop {
        if let Ok(client) = holdfast_kubeapi::client::connect(kubeconfig).await {
            let accounts: Api<ServiceAccount> = Api::default_namespaced(client.clone());
            if matches!(accounts.get_opt("default").await, Ok(Some(_))) {
                return client;
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn node_name(index: usize) -> String {
    format!("paper-{index}")
}

/// Creates the nodes, which are ready and have room for 110 pods each.
async fn create_nodes(client: &Client) {
    let (nodes, leases): (Api<Node>, Api<Lease>) = (
        Api::all(client.clone()),
        Api::namespaced(client.clone(), "kube-node-lease"),
    );
    let room = json!({"cpu": "64", "memory": "256Gi", "pods": "110"});
    let ready = json!({"type": "Ready", "status": "True"});
    let status = json!({"status": {"capacity": room, "allocatable": room, "conditions": [ready]}});
    for index in 0..NODES {
        let name = node_name(index);
        let metadata = json!({"name": name});
        let node: Node = parsed(json!({"metadata": metadata}));
        nodes.create(&PostParams::default(), &node).await.unwrap();
        let patch = Patch::Strategic(&status);
        let parameters = PatchParams::default();
        let patched = nodes.patch_status(&name, &parameters, &patch);
        patched.await.unwrap();
        let lease: Lease = parsed(json!({"metadata": metadata, "spec": {"holderIdentity": name}}));
        leases.create(&PostParams::default(), &lease).await.unwrap();
    }
}

/// Renews every node's lease every ten seconds.
async fn renew(client: Client) {
    let leases: Api<Lease> = Api::namespaced(client, "kube-node-lease");
    let pause = Duration::from_secs(10) / u32::try_from(NODES).unwrap();
    for index in (0..NODES).cycle() {
        tokio::time::sleep(pause).await;
        let now = jiff::Timestamp::now();
        let patch = json!({"spec": {"renewTime": format!("{now:.6}")}});
        let (name, patch) = (node_name(index), Patch::Merge(patch));
        // The lease may not exist yet.
        let _ = leases.patch(&name, &PatchParams::default(), &patch).await;
    }
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|s| s.conditions.iter().flatten());
    let mut ready = conditions.filter(|c| c.type_ == "Ready" && c.status == "True");
    ready.next().is_some()
}

/// Reports bound pods as ready, and removes pods that are being deleted.
async fn answer(pods: Api<Pod>, ready: Arc<Mutex<BTreeSet<String>>>) {
    let each = |event: WatchEvent<Pod>| async {
        let (WatchEvent::Added(pod) | WatchEvent::Modified(pod)) = event else {
            return Ok(());
        };
        let name = pod.name_any();
        let is_bound = pod.spec.as_ref().is_some_and(|s| s.node_name.is_some());
        // A late event may be about a deleted pod, so failures are ignored.
        if pod.metadata.deletion_timestamp.is_some() {
            let at_once = DeleteParams::default().grace_period(0);
            let _ = pods.delete(&name, &at_once).await;
        } else if is_ready(&pod) {
            ready.lock().unwrap().insert(name);
        } else if is_bound {
            let condition = json!({"type": "Ready", "status": "True"});
            let status = json!({"status": {"phase": "Running", "conditions": [condition]}});
            let (parameters, patch) = (PatchParams::default(), Patch::Strategic(status));
            let _ = pods.patch_status(&name, &parameters, &patch).await;
        }
        Ok(())
    };
    loop {
        if let Ok(events) = pods.watch(&WatchParams::default(), "0").await {
            let _ = events.try_for_each_concurrent(CONCURRENT, each).await;
        }
    }
}

/// Runs requests concurrently.
async fn all<F: Future<Output = kube::Result<T>>, T>(requests: impl Iterator<Item = F>) {
    let requests = futures::stream::iter(requests).buffer_unordered(CONCURRENT);
    requests.try_for_each(async |_| Ok(())).await.unwrap();
}

fn deployment(index: usize) -> Deployment {
    let labels = json!({"app": format!("d{index}")});
    parsed(
        json!({"metadata": {"name": format!("d{index}")}, "spec": {"replicas": 10, "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}}}),
    )
}

/// The roll-out, and the annotations.
async fn deployments() {
    let plane = Plane::start().await;
    create_nodes(&plane.client).await;
    let api: Api<Deployment> = Api::default_namespaced(plane.client.clone());
    let (start, before) = (Instant::now(), plane.cpu());
    let (api, made) = (&api, &PostParams::default());
    all((0..DEPLOYMENTS).map(|i| async move { api.create(made, &deployment(i)).await })).await;
    plane.wait_ready(1000).await;
    let (took, used) = (start.elapsed().as_secs_f64(), plane.cpu() - before);
    println!(
        "roll-out of 1,000 pods of {DEPLOYMENTS} Deployments: {took:.1} s, {:.0} pods/s, {used:.1} s of processor time",
        1000.0 / took
    );
    let (start, before) = (Instant::now(), plane.cpu());
    let more = Patch::Merge(json!({"spec": {"replicas": 30}}));
    let (more, parameters) = (&more, &PatchParams::default());
    all((0..DEPLOYMENTS).map(|i| async move {
        let name = format!("d{i}");
        api.patch(&name, parameters, more).await
    }))
    .await;
    plane.wait_ready(3000).await;
    let (took, used) = (start.elapsed().as_secs_f64(), plane.cpu() - before);
    println!(
        "from 1,000 to 3,000 pods: {took:.1} s, {:.0} pods/s, {used:.1} s of processor time, RSS {:.0} MiB",
        2000.0 / took,
        plane.rss()
    );
    tokio::time::sleep(Duration::from_secs(15)).await;
    let idle = plane.idle().await;
    println!("idle with 3,000 pods: {:.2} % of a processor", idle * 100.0);
    annotate(&plane, idle).await;
    plane.stop().await;
}

async fn annotate(plane: &Plane, idle: f64) {
    let pods: Api<Pod> = Api::default_namespaced(plane.client.clone());
    let names: Vec<String> = plane.ready.lock().unwrap().iter().cloned().collect();
    let changes = usize::try_from(setting("HOLDFAST_CHANGES", 200)).unwrap();
    let interval = Duration::from_millis(setting("HOLDFAST_INTERVAL_MS", 100));
    let (start, before) = (Instant::now(), plane.cpu());
    for (n, name) in names.iter().step_by(7).cycle().take(changes).enumerate() {
        let patch = Patch::Merge(json!({"metadata": {"annotations": {"bench": n.to_string()}}}));
        let parameters = PatchParams::default();
        let patched = pods.patch(name, &parameters, &patch);
        patched.await.unwrap();
        tokio::time::sleep(interval).await;
    }
    let used = plane.cpu() - before - idle * start.elapsed().as_secs_f64();
    println!(
        "one annotation among 3,000 pods: {:.2} ms of processor time ({changes} changes, one every {interval:?})",
        used * 1000.0 / changes as f64
    );
}

/// Pods that fit on no node.
async fn pending() {
    let plane = Plane::start().await;
    create_nodes(&plane.client).await;
    let pods: Api<Pod> = Api::default_namespaced(plane.client.clone());
    let (pods, made) = (&pods, &PostParams::default());
    all((0..PENDING).map(|i| async move {
        let spec =
            json!({"nodeSelector": {"no": "node"}, "containers": [{"name": "c", "image": "i:1"}]});
        let pod = parsed(json!({"metadata": {"name": format!("p{i}")}, "spec": spec}));
        pods.create(made, &pod).await
    }))
    .await;
    tokio::time::sleep(Duration::from_secs(15)).await;
    let idle = plane.idle().await;
    println!(
        "idle with {PENDING} pending pods: {:.2} % of a processor",
        idle * 100.0
    );
    plane.stop().await;
}

/// Runs the control plane until this process is killed.
async fn serve(dir: &Path) {
    let settings = holdfast_control::Settings {
        dir: dir.into(),
        bind: vec![],
        port: 0,
        advertise: [127, 0, 0, 1].into(),
        service_range: "10.96.0.0/16".parse().unwrap(),
        nodes: holdfast_control::join::NodeSettings::default(),
    };
    holdfast_control::run(settings).await.unwrap();
}

#[tokio::main]
async fn main() {
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    if let Some(dir) = std::env::var_os(DIRECTORY) {
        return serve(Path::new(&dir)).await;
    }
    deployments().await;
    pending().await;
}
