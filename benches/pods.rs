//! `make bench`: the overhead of the agent over the runtime. One run measures pods through the control plane and the
//! agent, and the floor: the same sandboxes and containers by bare CRI calls. Both use the same containerd and the same
//! CNI plugins. The control plane is the bundled one, or a real one (`HOLDFAST_REAL_APISERVER`, see CONTRIBUTING.md).
//! Only ratios are meaningful; seconds depend on the machine.
#![allow(clippy::unwrap_used)]

#[path = "pods/bursts.rs"]
mod bursts;
#[path = "pods/cost.rs"]
mod cost;
#[path = "pods/paper.rs"]
mod paper;
#[path = "pods/scrape.rs"]
mod scrape;
#[path = "../tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{StreamExt as _, TryStreamExt as _};
use holdfast_core::pod::cri_config;
use holdfast_cri::{CriClient, Runtime as _};
use holdfast_proto::cri as pb;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::api::{DeleteParams, ListParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;
use support::Cluster;
use support::real::ControlPlane;

const IMAGE: &str = "holdfast.local/demo:1";
const FLOOR: &str = "/run/holdfast-floor";
const SINGLES: usize = 10;
const BURST: usize = 50;
const MANY: usize = 110;
/// Nearly as many pods as a /24 network has addresses.
const MOST: usize = 250;

fn p50(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn pod(name: &str) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": name, "labels": {"bench": "1"}},
        // With `ClusterFirst`, each pod would have one more event, because this cluster has no DNS service.
        "spec": {"terminationGracePeriodSeconds": 1, "dnsPolicy": "Default", "containers": [{"name": "demo", "image": IMAGE}]}}))
    .unwrap()
}

/// A pod with this number of volumes, alternately ConfigMaps and Secrets.
fn with_volumes(name: &str, count: usize) -> Pod {
    let mut pod = pod(name);
    let spec = pod.spec.as_mut().unwrap();
    let source = |i: usize| match i % 2 {
        0 => json!({"name": format!("v{i}"), "configMap": {"name": format!("{name}-{i}")}}),
        _ => json!({"name": format!("v{i}"), "secret": {"secretName": format!("{name}-{i}")}}),
    };
    let mount = |i: usize| json!({"name": format!("v{i}"), "mountPath": format!("/volumes/{i}")});
    spec.volumes = Some(
        (0..count)
            .map(|i| serde_json::from_value(source(i)).unwrap())
            .collect(),
    );
    spec.containers[0].volume_mounts = Some(
        (0..count)
            .map(|i| serde_json::from_value(mount(i)).unwrap())
            .collect(),
    );
    pod
}

/// Start times with 0, 3 and 10 volumes, measured alternately. Every round has new objects, so that all of them are
/// read.
async fn volume_starts(client: &kube::Client, api: &Api<Pod>) -> [Vec<f64>; 3] {
    let (maps, secrets): (Api<ConfigMap>, Api<Secret>) = (
        Api::default_namespaced(client.clone()),
        Api::default_namespaced(client.clone()),
    );
    let mut times = [vec![], vec![], vec![]];
    for round in 0..SINGLES {
        for (times, count) in times.iter_mut().zip([0, 3, 10]) {
            let name = format!("volumes-{count}-{round}");
            let pod = with_volumes(&name, count);
            for i in 0..count {
                let object = json!({"metadata": {"name": format!("{name}-{i}")}, "data": {"key": "dmFsdWU="}});
                if i % 2 == 0 {
                    maps.create(
                        &PostParams::default(),
                        &serde_json::from_value(object).unwrap(),
                    )
                    .await
                    .unwrap();
                } else {
                    secrets
                        .create(
                            &PostParams::default(),
                            &serde_json::from_value(object).unwrap(),
                        )
                        .await
                        .unwrap();
                }
            }
            let began = Instant::now();
            let waiting = follow(api, 1, |event| ready(event).filter(|n| *n == name));
            let (_, created) = tokio::join!(waiting, async {
                api.create(&PostParams::default(), &pod).await.unwrap()
            });
            drop(created);
            times.push(began.elapsed().as_secs_f64());
            delete(api, &[name]).await;
        }
    }
    times
}

fn is_ready(pod: &Pod) -> bool {
    pod.status
        .iter()
        .flat_map(|s| s.conditions.iter().flatten())
        .any(|c| c.type_ == "Ready" && c.status == "True")
}

/// Watches the pods from now on until `done` has named `count` of them.
async fn follow(api: &Api<Pod>, count: usize, done: impl Fn(&WatchEvent<Pod>) -> Option<String>) {
    follow_since(api, "0", count, done).await;
}

/// Watches like [`follow`], for all events after a revision. An apiserver ends the watch of a client that reads too
/// slowly, as this one may in a burst. The watch then resumes from the last revision that was seen.
async fn follow_since(
    api: &Api<Pod>,
    revision: &str,
    count: usize,
    done: impl Fn(&WatchEvent<Pod>) -> Option<String>,
) {
    let parameters = WatchParams::default().labels("bench=1");
    let open = async |revision: &str| api.watch(&parameters, revision).await.unwrap().boxed();
    let mut stream = open(revision).await;
    let mut revision = revision.to_owned();
    let mut seen = std::collections::HashSet::new();
    while seen.len() < count {
        let event = tokio::time::timeout(Duration::from_secs(120), stream.try_next());
        let Some(event) = event.await.expect("in time").unwrap() else {
            stream = open(&revision).await;
            continue;
        };
        if let WatchEvent::Added(pod) | WatchEvent::Modified(pod) | WatchEvent::Deleted(pod) =
            &event
        {
            revision = pod.resource_version().unwrap();
        }
        seen.extend(done(&event));
    }
}

fn ready(event: &WatchEvent<Pod>) -> Option<String> {
    match event {
        WatchEvent::Added(pod) | WatchEvent::Modified(pod) if is_ready(pod) => Some(pod.name_any()),
        _ => None,
    }
}

fn gone(event: &WatchEvent<Pod>) -> Option<String> {
    match event {
        WatchEvent::Deleted(pod) => Some(pod.name_any()),
        _ => None,
    }
}

/// Creates pods and waits until a watcher sees them all ready.
async fn create(api: &Api<Pod>, names: &[String]) -> Duration {
    let pods: Vec<Pod> = names.iter().map(|name| pod(name)).collect();
    create_all(api, &pods).await
}

/// Does the same as [`create`], for any pods with the label `bench=1`.
async fn create_all(api: &Api<Pod>, pods: &[Pod]) -> Duration {
    let start = Instant::now();
    let requests = futures::future::join_all(
        pods.iter()
            .map(|pod| async move { api.create(&PostParams::default(), pod).await.unwrap() }),
    );
    let known: std::collections::HashSet<String> = pods.iter().map(|p| p.name_any()).collect();
    tokio::join!(
        requests,
        follow(api, pods.len(), move |e| ready(e)
            .filter(|n| known.contains(n)))
    );
    start.elapsed()
}

async fn delete(api: &Api<Pod>, names: &[String]) -> Duration {
    // Terminated pods are deleted at once, perhaps before the watch begins.
    let list = api.list(&ListParams::default().limit(1)).await.unwrap();
    let revision = list.metadata.resource_version.unwrap();
    let start = Instant::now();
    let requests = futures::future::join_all(
        names
            .iter()
            .map(|name| async move { api.delete(name, &DeleteParams::default()).await.unwrap() }),
    );
    tokio::join!(follow_since(api, &revision, names.len(), gone), requests);
    start.elapsed()
}

/// The time from the exit of a container's process to the start of the next, by the runtime's clock.
async fn restart_gap(api: &Api<Pod>, runtime: &CriClient, name: &str, image: &str) -> f64 {
    let pod: Pod = serde_json::from_value(json!({"metadata": {"name": name}, "spec": {"terminationGracePeriodSeconds": 1,
        "containers": [{"name": "c", "image": image, "command": ["busybox", "sh", "-c", "test -f /v/x && exec sleep 1000; touch /v/x; sleep 0.5"],
                        "volumeMounts": [{"name": "v", "mountPath": "/v"}]}], "volumes": [{"name": "v", "emptyDir": {}}]}}))
    .unwrap();
    let uid = api
        .create(&PostParams::default(), &pod)
        .await
        .unwrap()
        .uid()
        .unwrap();
    loop {
        let observed = runtime.observe(&uid).await.unwrap();
        if let (Some(new), Some(old)) = observed.latest_two("c")
            && let (Some(started), Some(finished)) = (new.started_at, old.finished_at)
        {
            api.delete(name, &DeleteParams::default()).await.unwrap();
            return started.duration_since(finished).as_secs_f64();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The time from the first successful readiness probe until a watcher sees `Ready`.
async fn readiness_gap(api: &Api<Pod>, name: &str) -> f64 {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (said, when) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        let mut said = Some(said);
        for asked in 0_u32.. {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).await;
            let ready = asked > 0;
            let status = if ready { "200 OK" } else { "503 No" };
            let _ = stream
                .write_all(
                    format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                        .as_bytes(),
                )
                .await;
            if ready && let Some(said) = said.take() {
                let _ = said.send(Instant::now());
            }
        }
    });
    let pod: Pod = serde_json::from_value(json!({"metadata": {"name": name, "labels": {"bench": "1"}}, "spec": {"terminationGracePeriodSeconds": 1,
        "containers": [{"name": "demo", "image": IMAGE, "readinessProbe": {"periodSeconds": 1, "httpGet": {"host": "127.0.0.1", "port": port}}}]}}))
    .unwrap();
    api.create(&PostParams::default(), &pod).await.unwrap();
    let own = name.to_owned();
    follow(api, 1, move |e| ready(e).filter(|n| *n == own)).await;
    let seen = Instant::now();
    let gap = seen.duration_since(when.await.unwrap()).as_secs_f64();
    delete(api, &[name.to_owned()]).await;
    gap
}

struct Made {
    sandbox: String,
    container: String,
}

/// Prepares the parts of a pod that the floor does not measure: directories, files and a tmpfs, as the agent creates
/// them.
fn prepare(name: &str) -> (Pod, PathBuf) {
    let mut made = pod(name);
    made.metadata.uid = Some(name.into());
    made.metadata.namespace = Some("floor".into());
    let dir = Path::new(FLOOR).join(name);
    std::fs::create_dir_all(dir.join("logs/demo")).unwrap();
    std::fs::create_dir_all(dir.join("token")).unwrap();
    for file in [
        "hosts",
        "message",
        "token/token",
        "token/ca.crt",
        "token/namespace",
    ] {
        std::fs::write(dir.join(file), "x").unwrap();
    }
    (made, dir)
}

fn floor_node(pod: &Pod, dir: &Path) -> cri_config::Node {
    cri_config::Node {
        cgroup_parent: format!(
            "/holdfast-floor/kubepods/besteffort/pod{}",
            pod.metadata.uid.as_ref().unwrap()
        ),
        log_directory: dir.join("logs").display().to_string(),
        memory: 1 << 34,
        ..cri_config::Node::new(Arc::default())
    }
}

/// The sandbox without labels. With them, the agent would take it for an orphaned pod.
fn floor_sandbox(pod: &Pod, node: &cri_config::Node) -> pb::PodSandboxConfig {
    let mut message = cri_config::sandbox(pod, 0, node).unwrap();
    message.labels.clear();
    message
}

async fn floor_container(
    runtime: &CriClient,
    pod: &Pod,
    dir: &Path,
    sandbox: &str,
    node: &cri_config::Node,
    attempt: u32,
) -> String {
    let mount = |from: &str, to: &str| pb::Mount {
        container_path: to.into(),
        host_path: dir.join(from).display().to_string(),
        ..Default::default()
    };
    let mounts = vec![
        mount("token", "/var/run/secrets/kubernetes.io/serviceaccount"),
        mount("hosts", "/etc/hosts"),
        mount("message", "/dev/termination-log"),
    ];
    let prepared = cri_config::Prepared {
        attempt,
        image: pod.spec.as_ref().unwrap().containers[0]
            .image
            .as_ref()
            .unwrap(),
        image_user: (None, String::new()),
        env: vec![],
        mounts,
        devices: vec![],
        target: None,
        groups: vec![],
        annotations: BTreeMap::new(),
        cdi: vec![],
    };
    let mut container = cri_config::container(
        pod,
        &pod.spec.as_ref().unwrap().containers[0],
        prepared,
        node,
    )
    .unwrap();
    container.labels.clear();
    let container = runtime
        .create_container(sandbox, container, floor_sandbox(pod, node))
        .await
        .unwrap();
    runtime.start_container(&container).await.unwrap();
    container
}

/// The floor of a start: the same sandbox and the same container, mounts included, by bare calls.
async fn floor_create(runtime: &CriClient, pod: &Pod, dir: &Path) -> Made {
    let node = floor_node(pod, dir);
    let sandbox = runtime
        .run_sandbox(floor_sandbox(pod, &node), "")
        .await
        .unwrap();
    let container = floor_container(runtime, pod, dir, &sandbox, &node, 0).await;
    Made { sandbox, container }
}

/// The floor of a deletion.
async fn floor_delete(runtime: &CriClient, made: &Made) {
    runtime.stop_container(&made.container, 1).await.unwrap();
    runtime.remove_container(&made.container).await.unwrap();
    runtime.stop_sandbox(&made.sandbox).await.unwrap();
    runtime.remove_sandbox(&made.sandbox).await.unwrap();
}

/// Pods per second when `count` of them are created at once by bare calls.
async fn floor_burst(runtime: &CriClient, count: usize, kind: &str) -> f64 {
    let pods: Vec<(Pod, PathBuf)> = (0..count)
        .map(|i| prepare(&format!("{kind}-{i}")))
        .collect();
    let start = Instant::now();
    let made = futures::future::join_all(
        pods.iter()
            .map(|(pod, dir)| floor_create(runtime, pod, dir)),
    )
    .await;
    let rate = count as f64 / start.elapsed().as_secs_f64();
    futures::future::join_all(made.iter().map(|m| floor_delete(runtime, m))).await;
    rate
}

/// The floor of a restart: one more container in an existing sandbox.
async fn floor_restart(runtime: &CriClient, name: &str) -> f64 {
    let (pod, dir) = prepare(name);
    let made = floor_create(runtime, &pod, &dir).await;
    runtime.stop_container(&made.container, 0).await.unwrap();
    let node = floor_node(&pod, &dir);
    let start = Instant::now();
    let container = floor_container(runtime, &pod, &dir, &made.sandbox, &node, 1).await;
    let time = start.elapsed().as_secs_f64();
    runtime.stop_container(&container, 0).await.unwrap();
    floor_delete(runtime, &made).await;
    time
}

/// The times of starts and deletions in seconds, and those of the floor.
#[derive(Default)]
struct OneByOne {
    starts: Vec<f64>,
    floor_starts: Vec<f64>,
    /// The control plane's part of a start.
    control: Vec<f64>,
    ends: Vec<f64>,
    floor_ends: Vec<f64>,
    /// The control plane's part of a deletion.
    control_ends: Vec<f64>,
}

/// Measures one pod after the other, alternately with the floor, so that both see the machine in the same state.
async fn one_by_one(api: &Api<Pod>, runtime: &CriClient, paper: &paper::Paper) -> OneByOne {
    let mut all = OneByOne::default();
    paper.life("paper-warm").await;
    for i in 0..SINGLES {
        all.starts
            .push(create(api, &[format!("one-{i}")]).await.as_secs_f64());
        all.ends
            .push(delete(api, &[format!("one-{i}")]).await.as_secs_f64());
        let (floor_pod, dir) = prepare(&format!("floor-{i}"));
        let start = Instant::now();
        let made = floor_create(runtime, &floor_pod, &dir).await;
        all.floor_starts.push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        floor_delete(runtime, &made).await;
        all.floor_ends.push(start.elapsed().as_secs_f64());
        let on_paper = paper.life(&format!("paper-{i}")).await;
        all.control.push(on_paper.start);
        all.control_ends.push(on_paper.end);
    }
    all
}

fn rss_mib(pid: i32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let kib: f64 = status
        .lines()
        .find_map(|l| l.strip_prefix("VmRSS:"))
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    kib / 1024.0
}

fn cpu_seconds(pid: i32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_whitespace()
        .collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

async fn idle_percent(pid: i32) -> f64 {
    let (start, before) = (Instant::now(), cpu_seconds(pid));
    tokio::time::sleep(Duration::from_secs(20)).await;
    (cpu_seconds(pid) - before) / start.elapsed().as_secs_f64() * 100.0
}

fn row(what: &str, ours: f64, floor: f64, mark: &str) {
    println!(
        "| {what} | {ours:.3} | {floor:.3} | **{:.2}** | {mark} |",
        ours / floor
    );
}

/// Prints how much longer a restart takes than the floor, and the time from a successful probe to Ready, in seconds.
fn print_gaps(restart: f64, ready: f64) {
    println!(
        "\nThe restart is {:.0} ms above the floor (mark: ≤ 50 ms).",
        restart * 1000.0
    );
    println!(
        "From a successful readiness probe to Ready at a watcher, p50: {:.0} ms (mark: ≤ 30 ms).",
        ready * 1000.0
    );
}

/// The agent's own usage: memory in MiB, CPU in percent of a core and in seconds.
struct Footprint {
    rss_fresh: f64,
    rss_after: f64,
    rss_many: f64,
    rss_most: f64,
    idle: f64,
    idle_most: f64,
    scrape: scrape::Cost,
    cpu: f64,
}

fn print_agent(agent: &Footprint) {
    let Footprint {
        rss_fresh,
        rss_after,
        rss_many,
        rss_most,
        idle,
        idle_most,
        scrape,
        cpu,
    } = agent;
    println!("\n| agent | value | mark |\n|---|---|---|");
    println!("| RSS without pods, after its start (MiB) | {rss_fresh:.1} | ≤ 25 |");
    println!("| RSS without pods, after all of them (MiB) | {rss_after:.1} | |");
    println!("| RSS with {MANY} pods (MiB) | {rss_many:.1} | ≤ 45 |");
    println!("| idle CPU with {MANY} pods (% of a core) | {idle:.2} | ≤ 1 |");
    println!(
        "| CPU of a scrape of cAdvisor's page with {MANY} pods, {} KiB (ms) | {:.1} | ≤ 20 |",
        scrape.bytes / 1024,
        scrape.cpu
    );
    println!(
        "| CPU with {MANY} pods and a scrape every 15 s (% of a core) | {:.2} | ≤ 1 |",
        idle + scrape.share()
    );
    println!("| RSS with {MOST} pods (MiB) | {rss_most:.1} | ≤ 80 |");
    println!("| idle CPU with {MOST} pods (% of a core) | {idle_most:.2} | |");
    println!("| CPU time of the whole run (s) | {cpu:.1} | |");
}

/// Creates pods up to the maximum; returns their names, and the agent's memory and idle CPU with all of them.
async fn fill_up(api: &Api<Pod>, agent: i32) -> (Vec<String>, f64, f64) {
    let more: Vec<String> = (MANY..MOST).map(|i| format!("many-{i}")).collect();
    create(api, &more).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    (more, rss_mib(agent), idle_percent(agent).await)
}

/// Describes the control plane of the measurements.
async fn control_plane(cluster: &Cluster, client: &kube::Client) -> String {
    let version = client.apiserver_version().await.unwrap().git_version;
    match &cluster.control {
        ControlPlane::Bundled => format!("the bundled control plane, {version}"),
        ControlPlane::Real(_) => {
            format!("a real control plane, {version}, which shares the machine if it runs here")
        }
    }
}

/// A client of the cluster's runtime, for bare calls.
fn floor_runtime(cluster: &Cluster) -> CriClient {
    CriClient::new(
        cluster.run_dir().join("containerd.sock").to_str().unwrap(),
        Duration::from_secs(120),
        None,
    )
    .unwrap()
}

/// Uses caches, the snapshotter and the bridge once before the measurements.
async fn warm_up(api: &Api<Pod>, runtime: &CriClient) {
    create(api, &["warm-0".to_owned()]).await;
    delete(api, &["warm-0".to_owned()]).await;
    let (warm, dir) = prepare("warm");
    floor_delete(runtime, &floor_create(runtime, &warm, &dir).await).await;
}

#[tokio::main]
async fn main() {
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let cluster = Cluster::start_configured("bench", 90, &format!("maxPods: {}", MOST + 2));
    let client = holdfast_kubeapi::client::connect(&cluster.data().join("kubeconfig"))
        .await
        .unwrap();
    let api: Api<Pod> = Api::default_namespaced(client.clone());
    let control = control_plane(&cluster, &client).await;
    let busybox = support::busybox(&cluster);
    let runtime = floor_runtime(&cluster);
    let agent = cluster.pid("agent");
    let name = |kind: &str, i: usize| format!("{kind}-{i}");
    tokio::time::sleep(Duration::from_secs(2)).await;
    let rss_fresh = rss_mib(agent);

    warm_up(&api, &runtime).await;
    let paper = paper::Paper::new(&client).await;
    let one_by_one = one_by_one(&api, &runtime, &paper).await;
    let cost = cost::of_one(&cost::Source::of(&cluster), &client, &api).await;
    let [without, three, ten] = volume_starts(&client, &api).await;

    let (mut gaps, mut ready_gaps, mut floor_gaps) = (vec![], vec![], vec![]);
    for i in 0..SINGLES / 2 {
        gaps.push(restart_gap(&api, &runtime, &name("restart", i), &busybox).await);
        ready_gaps.push(readiness_gap(&api, &name("ready", i)).await);
        floor_gaps.push(floor_restart(&runtime, &name("floor-restart", i)).await);
    }

    let both = (&runtime, &paper);
    let burst = bursts::at_once(&api, both, BURST, "burst").await;
    let many = bursts::at_once(&api, both, MANY, "many").await;
    paper.end().await;
    let bursts = bursts::measure(&api, &runtime, &busybox).await;
    let all: Vec<String> = (0..MANY).map(|i| name("many", i)).collect();
    create(&api, &all).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let rss_many = rss_mib(agent);
    let idle = idle_percent(agent).await;
    let scrape = scrape::cost(&client, &cluster.node_name(), agent, idle).await;
    let (more, rss_most, idle_most) = fill_up(&api, agent).await;
    delete(&api, &[all, more].concat()).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let rss_after = rss_mib(agent);
    let _ = holdfast_sys::cgroup::remove("/holdfast-floor");
    let _ = std::fs::remove_dir_all(FLOOR);

    println!("\nOn {control}:");
    println!("\n| what | Holdfast | floor | ratio | mark |\n|---|---|---|---|---|");
    let first = "start one by one, p50 (s)";
    let (start, floor_start) = (p50(one_by_one.starts), p50(one_by_one.floor_starts));
    row(first, start, floor_start, "≤ 1.25");
    let both = "the same, with the control plane's time for pods without a node added to the floor";
    row(both, start, floor_start + p50(one_by_one.control), "≤ 1.1");
    for (count, rates) in [(BURST, burst), (MANY, many)] {
        let what = format!("{count} at once (pods/s)");
        row(&what, rates.ours, rates.floor, "≥ 0.9");
        row(both, rates.ours, rates.floor_and_control(), "≥ 0.95");
    }
    let (end, floor_end) = (p50(one_by_one.ends), p50(one_by_one.floor_ends));
    row("deletion one by one, p50 (s)", end, floor_end, "≤ 1.25");
    let with_control = floor_end + p50(one_by_one.control_ends);
    row(both, end, with_control, "≤ 1.2");
    let (restart, floor_restart) = (p50(gaps), p50(floor_gaps));
    let exit = "container exit to restart, p50 (s)";
    row(exit, restart, floor_restart, "≤ 50 ms over");
    print_gaps(restart - floor_restart, p50(ready_gaps));
    let more = |times: Vec<f64>| (p50(times) - p50(without.clone())) * 1000.0;
    println!(
        "Three ConfigMaps and Secrets as volumes add {:.0} ms to the start, ten add {:.0} ms (mark: ≤ 20 ms).",
        more(three),
        more(ten)
    );
    bursts.print();
    cost.print();
    print_agent(&Footprint {
        rss_fresh,
        rss_after,
        rss_many,
        rss_most,
        idle,
        idle_most,
        scrape,
        cpu: cpu_seconds(agent),
    });
}
