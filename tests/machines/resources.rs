//! A node with two NUMA nodes, swap and cgroup v2 (issue 18): the assignment of CPUs and memory, swap
//! limits, and evictions for memory. The test machine has one NUMA node, no swap, and cgroup v1.

use std::path::{Path, PathBuf};

use holdfast_core::cpuset;
use serde_json::{Value, json};

use crate::support::{self, Cluster, condition};
use crate::{an_uplink, line, programs, run, vm};

/// Two sockets with two CPUs each, and separate memory.
const TWO_NODES: &str = "-smp 4,sockets=2,cores=2 -object memory-backend-ram,id=near,size=1G -object memory-backend-ram,id=far,size=1G -numa node,nodeid=0,cpus=0-1,memdev=near -numa node,nodeid=1,cpus=2-3,memdev=far";
const SLICE: &str = "/sys/fs/cgroup/holdfast_t_resources.slice";
const IMAGE: &str = "test.local/busybox:1";
const RUNNING: [&str; 4] = ["aligned", "burstable", "modest", "hog"];
const MIB: u64 = 1 << 20;
/// The memory limit of all pods together, and the part of it that must stay available.
const LIMIT: u64 = 400 * MIB;
const KEPT_FREE: u64 = 150 * MIB;

#[test]
fn resources_of_two_numa_nodes_are_aligned() {
    if let Some(node) = vm::Node::new("resources::inside", &programs()) {
        node.run(TWO_NODES);
    }
}

#[test]
#[ignore = "runs in a virtual machine"]
fn inside() {
    assert!(vm::is_inside(), "this test lets its machine swap");
    an_uplink();
    make_swap();
    // The machine is deleted after the test, and the cluster with it.
    let cluster = Cluster::new("resources", 47).configured(&configuration());
    let cluster = std::mem::ManuallyDrop::new(cluster);
    cluster.up();
    support::busybox_alone(&cluster, IMAGE);
    let containers = start(&cluster);
    what_is_aligned_has_one_nodes_processors_and_memory(&containers);
    swap_is_shared_by_request(&containers);
    a_hog_goes_and_others_stay(&cluster, &containers);
}

fn make_swap() {
    let file = "/var/swap";
    run("fallocate", &["-l", "256M", file]);
    run("chmod", &["600", file]);
    run("mkswap", &["-q", file]);
    run("swapon", &[file]);
}

/// A line in kilobytes of a kernel file, in bytes.
fn bytes(file: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(file).unwrap();
    let found = text.lines().find(|line| line.contains(name)).unwrap();
    let mut words = found.split_whitespace().rev();
    let kilobytes: u64 = words.nth(1).unwrap().parse().unwrap();
    kilobytes * 1024
}

/// Half of the memory for pods comes from each NUMA node; the first CPU is reserved for the system.
fn configuration() -> String {
    let totals = [0, 1].map(|node| {
        let file = format!("/sys/devices/system/node/node{node}/meminfo");
        bytes(&file, "MemTotal:")
    });
    let for_pods = (LIMIT - KEPT_FREE) / 2;
    let system = totals.iter().sum::<u64>() - LIMIT;
    let reserved = [0, 1].map(|node| {
        let bytes = totals[node] - for_pods;
        format!("{{numaNode: {node}, limits: {{memory: '{bytes}'}}}}")
    });
    let fields = [
        "cgroupDriver: systemd".to_owned(),
        "cpuManagerPolicy: static".into(),
        "cpuManagerReconcilePeriod: 2s".into(),
        "reservedSystemCPUs: '0'".into(),
        "memoryManagerPolicy: Static".into(),
        format!("reservedMemory: [{}]", reserved.join(", ")),
        "topologyManagerPolicy: single-numa-node".into(),
        format!("systemReserved: {{memory: '{system}'}}"),
        format!("evictionHard: {{memory.available: {}Mi}}", KEPT_FREE / MIB),
        "failSwapOn: false".into(),
        "memorySwap: {swapBehavior: LimitedSwap}".into(),
    ];
    fields.map(|field| field + "\n").concat()
}

/// A pod with containers of these names and resources. It is bound directly, as the bundled scheduler
/// would reject pods that do not fit.
fn pod(node: &str, name: &str, script: &str, containers: &[(&str, Value)]) -> Value {
    let container = |(name, resources): &(&str, Value)| {
        json!({"name": name, "image": IMAGE, "resources": resources, "command": ["busybox", "sh", "-c", script],
            "volumeMounts": [{"name": "v", "mountPath": "/v"}]})
    };
    let containers: Vec<Value> = containers.iter().map(container).collect();
    let volumes = json!([{"name": "v", "emptyDir": {}}]);
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"nodeName": node, "volumes": volumes, "containers": containers}})
}

fn apply(cluster: &Cluster, pods: &[Value]) {
    let documents: Vec<String> = pods.iter().map(Value::to_string).collect();
    cluster.apply(&documents.join("\n"));
}

/// Waits in one process: starting kubectl takes seconds on an emulated CPU.
pub fn wait_for(cluster: &Cluster, condition: &str, names: &[&str]) {
    let condition = format!("--for={condition}");
    let timeout = format!("--timeout={}s", support::condition_timeout().as_secs());
    let pods = names.iter().map(|name| format!("pod/{name}"));
    let pods: Vec<String> = pods.collect();
    let mut arguments = vec!["wait", &condition, &timeout];
    arguments.extend(pods.iter().map(String::as_str));
    cluster.kubectl(&arguments);
}

const FAILED: &str = "jsonpath={.status.phase}=Failed";

fn named<'a>(pods: &'a [Value], name: &str) -> &'a Value {
    let found = pods.iter().find(|pod| pod["metadata"]["name"] == *name);
    found.unwrap()
}

const IDLE: &str = "exec busybox sleep 100000";
/// Uses 280 MiB of memory after the file `go` is created, and keeps it.
const GROWS: &str = "until test -e /v/go; do sleep 1; done; busybox dd if=/dev/zero bs=280M count=1 | busybox sleep 100000";

/// Pods whose request fits on the node, but not on one NUMA node: three CPUs, or more than half of the memory.
fn too_large_for_numa(node: &str) -> [Value; 2] {
    let half_and_more = (LIMIT - KEPT_FREE) * 3 / 5;
    [("many", 3, 16 * MIB), ("much", 1, half_and_more)].map(|(name, cpu, memory)| {
        let whole = json!({"limits": {"cpu": cpu, "memory": memory.to_string()}});
        pod(node, name, IDLE, &[("c", whole)])
    })
}

fn is_refused(pod: &Value) {
    let status = &pod["status"];
    let rejection = ["reason", "message"].map(|key| status[key].as_str().unwrap_or_default());
    let message = "Pod was rejected: Resources cannot be allocated with Topology locality";
    assert_eq!(rejection, ["TopologyAffinityError", message], "{status}");
}

/// The running containers.
struct Containers {
    /// Containers that must not be affected: their pods and names, scopes and IDs.
    steady: Vec<(String, PathBuf, Value)>,
    /// The hog's UID.
    hog: String,
}

impl Containers {
    fn scope(&self, name: &str) -> &Path {
        let found = self.steady.iter().find(|(of, ..)| of == name);
        &found.unwrap().1
    }

    fn file(&self, name: &str, file: &str) -> String {
        line(&self.scope(name).join(file))
    }
}

/// The scope of a container.
fn scope(dir: &Path, id: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut dirs = entries.map(|e| e.path()).filter(|path| path.is_dir());
    dirs.find_map(|path| match path.to_string_lossy().contains(id) {
        true => Some(path),
        false => scope(&path, id),
    })
}

/// Pods that fit on no NUMA node are rejected. One pod of each QoS class runs, and the hog.
fn start(cluster: &Cluster) -> Containers {
    let node = cluster.node_name();
    let asks = json!({"requests": {"memory": "48Mi"}});
    let even = json!({"requests": {"memory": "16Mi"}, "limits": {"memory": "16Mi"}});
    let little = json!({"requests": {"memory": "8Mi"}});
    let mut pods = too_large_for_numa(&node).to_vec();
    pods.push(pod(
        &node,
        "burstable",
        IDLE,
        &[("asks", asks), ("even", even)],
    ));
    pods.push(pod(&node, "modest", IDLE, &[("c", json!({}))]));
    pods.push(pod(&node, "hog", GROWS, &[("c", little)]));
    apply(cluster, &pods);
    wait_for(cluster, FAILED, &["many", "much"]);
    // The aligned pod is created last: with it, the rejected pods would not even fit on the whole node.
    let whole = json!({"limits": {"cpu": 2, "memory": "64Mi"}});
    apply(cluster, &[pod(&node, "aligned", IDLE, &[("c", whole)])]);
    wait_for(cluster, "condition=Ready", &RUNNING);
    let pods = cluster.pods();
    for name in ["many", "much"] {
        is_refused(named(&pods, name));
    }
    let mut found = vec![];
    for name in &RUNNING[..3] {
        let statuses = &named(&pods, name)["status"]["containerStatuses"];
        for status in statuses.as_array().unwrap() {
            let id = status["containerID"].clone();
            let number = id.as_str().unwrap().rsplit('/').next().unwrap();
            let scope = scope(Path::new(SLICE), number).expect("the container's scope");
            let container = status["name"].as_str().unwrap();
            found.push((format!("{name}/{container}"), scope, id));
        }
    }
    let hog = named(&pods, "hog")["metadata"]["uid"].clone();
    Containers {
        steady: found,
        hog: hog.as_str().unwrap().to_owned(),
    }
}

/// The aligned container has the CPUs and the memory of the second NUMA node, the only one with two
/// free CPUs. All others have the remaining CPUs.
fn what_is_aligned_has_one_nodes_processors_and_memory(containers: &Containers) {
    let own = ["cpuset.cpus", "cpuset.mems"].map(|file| containers.file("aligned/c", file));
    assert_eq!(own, ["2-3", "1"]);
    let process = containers.file("aligned/c", "cgroup.procs");
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    for allowed in ["Cpus_allowed_list:\t2-3", "Mems_allowed_list:\t1"] {
        assert!(status.lines().any(|line| line == allowed), "{status}");
    }
    for (name, scope, _) in &containers.steady[1..] {
        let cpus = line(&scope.join("cpuset.cpus"));
        let cpus = cpuset::parse_list(&cpus).unwrap_or_default();
        assert_eq!(cpus, [0, 1].into(), "{name}");
    }
}

/// A container of a Burstable pod may use swap in proportion to its memory request, in whole pages (KEP-2400).
/// Guaranteed pods, and containers without a request or with a request equal to the limit, may not.
fn swap_is_shared_by_request(containers: &Containers) {
    let [swap, memory] = ["SwapTotal:", "MemTotal:"].map(|name| bytes("/proc/meminfo", name));
    let share = u128::from(48 * MIB) * u128::from(swap) / u128::from(memory);
    let share = u64::try_from(share).unwrap() / 4096 * 4096;
    assert!(share > 4 * MIB, "{share} of {swap}");
    for (name, expected) in [
        ("burstable/asks", share),
        ("burstable/even", 0),
        ("aligned/c", 0),
        ("modest/c", 0),
    ] {
        let found = containers.file(name, "memory.swap.max");
        assert_eq!(found, expected.to_string(), "{name}");
    }
}

/// The memory of all pods runs short: the hog is evicted, and other pods are not affected.
fn a_hog_goes_and_others_stay(cluster: &Cluster, containers: &Containers) {
    let pods = Path::new(SLICE).join("holdfast_t_resources-kubepods.slice");
    assert_eq!(line(&pods.join("memory.max")), LIMIT.to_string());
    let volume = format!(
        "agent/pods/{}/volumes/kubernetes.io~empty-dir/v/go",
        containers.hog
    );
    std::fs::write(cluster.data().join(volume), "").unwrap();
    wait_for(cluster, FAILED, &["hog"]);
    let found = cluster.pods();
    let status = &named(&found, "hog")["status"];
    assert_eq!(status["reason"], "Evicted", "{status}");
    let message = status["message"].as_str().unwrap();
    let low = "The node was low on resource: memory. Threshold quantity: 150Mi, available: ";
    assert!(message.starts_with(low), "{message}");
    println!("{message}");
    assert_eq!(condition(&cluster.node(), "MemoryPressure"), "True");
    let events = line(&pods.join("memory.events"));
    let kills = events.lines().find(|line| line.starts_with("oom_kill "));
    assert_eq!(
        kills,
        Some("oom_kill 0"),
        "the kernel killed no process: {events}"
    );
    for (name, _, id) in &containers.steady {
        let (name, container) = name.split_once('/').unwrap();
        let status = &named(&found, name)["status"];
        let mut all = status["containerStatuses"].as_array().unwrap().iter();
        let one = all.find(|status| status["name"] == container).unwrap();
        let is_as_it_was = one["restartCount"] == 0 && one["containerID"] == *id;
        assert!(
            is_as_it_was && !one["state"]["running"].is_null(),
            "{status}"
        );
    }
}
