//! Evictions: pods that exhaust the node are evicted and others stay. Also the cgroups that limit pods.
#![allow(clippy::unwrap_used)]

use crate::support;

use std::time::{Duration, Instant};

use holdfast_core::node::cgroup_tree::{self, Reserved, Rules, Supply};
use holdfast_core::pod::cgroup::Driver;
use holdfast_core::pod::cgroup_values::Values;
use holdfast_core::pod::resources::Amounts;
use holdfast_host::PodHost as _;
use holdfast_host::cgroups::Cgroups;
use holdfast_host::linux::LinuxHost;
use holdfast_sys as sys;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use support::disk::SmallDisk;
use support::{Cluster, pod};

/// Status of a condition of the node.
fn pressure(cluster: &Cluster, kind: &str) -> String {
    let node = cluster.node();
    let conditions = node["status"]["conditions"].as_array().unwrap();
    let found = conditions.iter().find(|c| c["type"] == kind).unwrap();
    found["status"].as_str().unwrap().to_owned()
}

/// A file of the cgroup of all pods, by its name in cgroup v1 or v2.
fn of_all_pods(cluster: &Cluster, v1: &str, v2: &str) -> u64 {
    let below = format!("holdfast-{}/kubepods", cluster.name());
    let text = std::fs::read_to_string(format!("/sys/fs/cgroup/memory/{below}/{v1}"))
        .or_else(|_| std::fs::read_to_string(format!("/sys/fs/cgroup/{below}/{v2}")));
    text.unwrap().trim().parse().unwrap()
}

/// The image of every hog.
const IMAGE: &str = "test.local/busybox:1";
/// So few free processes that other tests never leave only them.
const FEW: u64 = 1000;

/// A pod that waits for [`release`] and then runs `script`.
fn hog(cluster: &Cluster, name: &str, script: &str) {
    hog_with(cluster, name, script, &json!({}));
}

fn hog_with(cluster: &Cluster, name: &str, script: &str, more: &Value) {
    hog_with_requests(cluster, name, script, &json!({}), more);
}

/// The same with requests.
fn hog_with_requests(cluster: &Cluster, name: &str, script: &str, requested: &Value, more: &Value) {
    let mut requests = json!({"cpu": "10m", "memory": "10Mi"});
    json_patch::merge(&mut requests, requested);
    let script =
        format!("until test -e /v/go; do sleep 0.1; done; {script}; : > /v/done; sleep 1000");
    let mut spec = json!({"volumes": [{"name": "v", "emptyDir": {}}],
        "containers": [{"name": "c", "image": IMAGE, "command": ["busybox", "sh", "-c", script], "resources": {"requests": requests},
            "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]});
    json_patch::merge(&mut spec, more);
    pod(cluster, name, &spec);
}

fn of_class(class: &str) -> Value {
    json!({"priorityClassName": class})
}

fn release(cluster: &Cluster, name: &str) {
    signal(cluster, name, "go");
}

/// Creates a file in a hog's volume.
fn signal(cluster: &Cluster, name: &str, file: &str) {
    cluster.wait("the pod to run", || {
        cluster.pod(name)["status"]["phase"] == "Running"
    });
    std::fs::write(volume_of(cluster, name).join(file), "").unwrap();
}

/// A hog's volume on this machine.
fn volume_of(cluster: &Cluster, name: &str) -> std::path::PathBuf {
    let uid = cluster.pod(name)["metadata"]["uid"].clone();
    let dir = format!(
        "agent/pods/{}/volumes/kubernetes.io~empty-dir/v",
        uid.as_str().unwrap()
    );
    cluster.data().join(dir)
}

/// Starts hogs, and waits until each uses its full amount.
fn release_and_wait(cluster: &Cluster, names: &[&str]) {
    for name in names {
        release(cluster, name);
    }
    for name in names {
        let done = volume_of(cluster, name).join("done");
        cluster.wait_quietly(&format!("{name} to grow"), || done.exists());
    }
}

/// The pods that the agent has evicted so far, in its order.
fn victims(cluster: &Cluster) -> Vec<String> {
    let log = cluster.log("agent");
    let evictions = log.lines().filter(|line| {
        line.contains("evicting the pod: the node is short of")
            && line.contains("ends_already=false")
    });
    let name = |line: &str| {
        let (_, rest) = line.split_once("pod=").unwrap();
        let name = rest.trim_start_matches('"').split('_').next();
        name.unwrap().to_owned()
    };
    evictions.map(name).collect()
}

/// Pods that must not be affected, with their containers.
struct Bystanders(std::collections::BTreeMap<String, Value>);

impl Bystanders {
    fn of(cluster: &Cluster, names: &[&str]) -> Bystanders {
        let ready = |name: &&str| support::condition(&cluster.pod(name), "Ready") == "True";
        cluster.wait("the bystanders to be ready", || names.iter().all(ready));
        let id =
            |name: &str| cluster.pod(name)["status"]["containerStatuses"][0]["containerID"].clone();
        let all = names.iter().map(|name| ((*name).to_owned(), id(name)));
        Bystanders(all.collect())
    }

    #[track_caller]
    fn are_untouched(&self, cluster: &Cluster) {
        let pods = cluster.pods();
        for (name, id) in &self.0 {
            let pod = pods.iter().find(|p| p["metadata"]["name"] == **name);
            let status = &pod.unwrap()["status"];
            let container = &status["containerStatuses"][0];
            let is_as_it_was = status["phase"] == "Running"
                && container["restartCount"] == 0
                && container["containerID"] == *id;
            assert!(is_as_it_was, "{name}: {status}\n{}", cluster.log("agent"));
        }
    }
}

/// Starts a hog and waits until the node has reported the pressure and evicted it. Returns the hog's status.
fn is_evicted(cluster: &Cluster, name: &str, kind: &str, resource: &str) -> Value {
    release(cluster, name);
    cluster.wait("the node to report the pressure", || {
        pressure(cluster, kind) == "True"
    });
    cluster.wait(&format!("{name} to be evicted"), || {
        cluster.pod(name)["status"]["phase"] == "Failed"
    });
    let status = cluster.pod(name)["status"].clone();
    assert_eq!(status["reason"], "Evicted", "{status}");
    let low = format!("The node was low on resource: {resource}. Threshold quantity: ");
    let message = status["message"].as_str().unwrap();
    assert!(message.starts_with(&low), "{message}");
    let conditions = status["conditions"].as_array().unwrap();
    let target = conditions.iter().find(|c| c["type"] == "DisruptionTarget");
    assert_eq!(target.unwrap()["reason"], "TerminationByKubelet");
    let evicted = format!("Warning Evicted {low}");
    let attempt = format!("Warning EvictionThresholdMet Attempting to reclaim {resource}");
    cluster.wait("the events of the eviction", || {
        cluster.events(name).contains(&evicted)
            && cluster.events(&cluster.node_name()).contains(&attempt)
    });
    eprintln!("{name}: {message}");
    status
}

fn until_relieved(cluster: &Cluster, kind: &str) {
    cluster.wait("the end of the pressure", || {
        pressure(cluster, kind) == "False"
    });
}

/// The node's event about an evicted pod.
fn eviction_of(cluster: &Cluster, name: &str) -> Value {
    let about = format!("involvedObject.name={name},reason=Evicted");
    let events = cluster.kubectl(&["get", "events", "--field-selector", &about, "-o", "json"]);
    let events: Value = serde_json::from_str(&events).unwrap();
    assert_eq!(events["items"].as_array().unwrap().len(), 1, "{events}");
    events["items"][0].clone()
}

/// When the memory of all pods crossed the threshold, and how long it took until the victims' memory was free.
fn watch_memory(cluster: &Cluster, crossed: u64, freed: u64) -> (Timestamp, Duration) {
    let wait = |reached: &dyn Fn(u64) -> bool| {
        let begun = Instant::now();
        while !reached(used(cluster)) && begun.elapsed() < support::condition_timeout() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Instant::now()
    };
    let begun = wait(&|used| used > crossed);
    let at = Timestamp::now();
    (at, wait(&|used| used < freed) - begun)
}

fn used(cluster: &Cluster) -> u64 {
    of_all_pods(cluster, "memory.usage_in_bytes", "memory.current")
}

/// Checks that a pod was evicted within two seconds after the threshold was crossed. Events have a
/// resolution of one second.
fn is_quick(cluster: &Cluster, name: &str, crossed: Timestamp) {
    let event = eviction_of(cluster, name);
    let evicted_at: Timestamp = event["firstTimestamp"].as_str().unwrap().parse().unwrap();
    let late = evicted_at.duration_since(crossed).as_secs_f64();
    eprintln!(
        "{name}: evicted {late:.1} s after the threshold was crossed, rounded down to a second"
    );
    assert!((-1.0..=2.0).contains(&late), "{late}: {event}");
}

/// Two memory hogs, of which the smaller one has the lower priority. It is evicted first, and the other one because
/// that is not sufficient. A pod that uses as much but requested it stays, and so does a pod with a higher priority.
fn memory_hogs_go(cluster: &Cluster) {
    for name in ["smaller", "modest", "memory-low"] {
        release(cluster, name);
    }
    cluster.wait("all pods to use their memory", || used(cluster) > 270 << 20);
    let status = std::thread::scope(|scope| {
        let measured = scope.spawn(|| watch_memory(cluster, 400 << 20, 300 << 20));
        let status = is_evicted(cluster, "memory-hog", "MemoryPressure", "memory");
        let (crossed, took) = measured.join().unwrap();
        eprintln!("from the crossing to the end of the victims: {took:?}");
        // The grace period of a hard threshold is a second; the test machine may be busy.
        assert!(took < Duration::from_secs(30), "{took:?}");
        is_quick(cluster, "memory-low", crossed);
        status
    });
    ranks(
        cluster,
        "memory-low",
        &["memory-low", "memory-hog", "modest", "smaller"],
    );
    memory_pressure_is_published(cluster, &status);
}

/// Checks the order of pods in the ranking of an eviction.
fn ranks(cluster: &Cluster, name: &str, expected: &[&str]) {
    let ranking = eviction_of(cluster, name)["metadata"]["annotations"]["ranking"].clone();
    let ranking = ranking.as_str().unwrap().to_owned();
    let places: Vec<Option<usize>> = expected
        .iter()
        .map(|name| ranking.find(&format!("{name}_default")))
        .collect();
    let in_order = places.is_sorted() && places.iter().all(Option::is_some);
    assert!(places[0] == Some(0) && in_order, "{ranking}");
}

/// Checks the messages about a hog's eviction, and the state of the node after it.
fn memory_pressure_is_published(cluster: &Cluster, status: &Value) {
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("Container c was using "), "{message}");
    let event = eviction_of(cluster, "memory-hog");
    let notes = &event["metadata"]["annotations"];
    assert_eq!(notes["offending_containers"], "c", "{notes}");
    assert_eq!(notes["starved_resource"], "memory");
    let ranking = notes["ranking"].as_str().unwrap();
    assert!(ranking.starts_with("memory-hog_default uses "), "{ranking}");
    assert!(message.contains("request is 10Mi, has larger consumption of memory. "));
    let best_effort = json!({"nodeName": cluster.node_name()});
    pod(cluster, "late", &best_effort);
    cluster.wait("a best-effort pod to be refused", || {
        cluster.pod("late")["status"]["reason"] == "Evicted"
    });
    let refused = cluster.pod("late")["status"]["message"].clone();
    assert_eq!(
        refused,
        "Pod was rejected: The node had condition: [MemoryPressure]. "
    );
    cluster.wait("the node to be tainted", || {
        let key = "node.kubernetes.io/memory-pressure";
        cluster.node()["spec"]["taints"].to_string().contains(key)
    });
}

/// Dead containers are removed first. Then the larger disk hog is evicted, and the smaller one because
/// the minimum reclaim is not reached. The largest consumer has requested its usage, and stays.
fn disk_hogs_go_after_the_dead(cluster: &Cluster) {
    let done = json!({"nodeName": cluster.node_name(), "restartPolicy": "Never", "containers": [{"name": "c", "image": IMAGE, "command": ["busybox", "true"],
        "resources": {"requests": {"memory": "1Mi"}}}]});
    pod(cluster, "done", &done);
    cluster.wait("the pod to finish", || {
        cluster.pod("done")["status"]["phase"] == "Succeeded"
    });
    let id = cluster.pod("done")["status"]["containerStatuses"][0]["containerID"].clone();
    let id = id.as_str().unwrap().rsplit('/').next().unwrap().to_owned();
    let dead = || support::ctr(cluster, "k8s.io", &["containers", "ls", "-q"]).contains(&id);
    release_and_wait(cluster, &["disk-asked", "disk-more"]);
    assert!(dead(), "the container remains until its pod is deleted");
    is_evicted(cluster, "disk-less", "DiskPressure", "ephemeral-storage");
    assert!(!dead(), "dead containers are removed first");
}

fn make_disk_hogs(cluster: &Cluster) {
    let files = |mib: u32| format!("busybox dd if=/dev/zero of=/v/f bs=1M count={mib}");
    let requested = json!({"ephemeral-storage": "60Mi"});
    hog_with_requests(cluster, "disk-asked", &files(50), &requested, &json!({}));
    hog(cluster, "disk-more", &files(45));
    hog(cluster, "disk-less", &files(42));
}

/// Inodes cannot be requested: the largest consumer is evicted first, then the next one, until the
/// minimum reclaim is reached.
fn inode_hogs_go(cluster: &Cluster) {
    release_and_wait(cluster, &["inode-few", "inode-more"]);
    is_evicted(cluster, "inode-less", "DiskPressure", "inodes");
    ranks(cluster, "inode-less", &["inode-less", "inode-few"]);
}

fn make_inode_hogs(cluster: &Cluster) {
    let files = |many: u32| format!("cd /v; for i in $(busybox seq {many}); do : > $i; done");
    hog(cluster, "inode-few", &files(2500));
    hog(cluster, "inode-more", &files(7000));
    hog(cluster, "inode-less", &files(6500));
}

/// The configuration of a node with low thresholds. Disk pressure begins when 120 MiB of the root
/// directory's 220 are used (softly at 106) and ends at 85. Inode pressure begins at 14,000 of 20,000
/// and ends at 7,000. PID pressure begins if only `free` processes can be started, and ends at 750 more.
fn small_node(free: u64) -> String {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = info.lines().next().unwrap().split_whitespace().nth(1);
    let total: u64 = total.unwrap().parse().unwrap();
    let fields = [
        format!("systemReserved: {{memory: {}Ki}}", total - (600 << 10)),
        "systemReservedCgroup: /holdfast-t-pressure-system".into(),
        "enforceNodeAllocatable: [pods, system-reserved]".into(),
        "evictionPressureTransitionPeriod: 20s".into(),
        format!(
            "evictionHard: {{memory.available: 200Mi, nodefs.available: 100Mi, nodefs.inodesFree: '6000', pid.available: '{free}'}}"
        ),
        "evictionSoft: {nodefs.available: 114Mi}".into(),
        "evictionSoftGracePeriod: {nodefs.available: 3s}".into(),
        "evictionMinimumReclaim: {nodefs.available: 35Mi, nodefs.inodesFree: '7000', pid.available: '750'}".into(),
        "evictionMaxPodGracePeriod: 120".into(),
        "podPidsLimit: 2500".into(),
    ];
    fields.map(|field| field + "\n").concat()
}

fn limits_are_reported(cluster: &Cluster) {
    for done in [
        "Updated Node Allocatable limit across pods",
        "Updated limits on system reserved cgroup /holdfast-t-pressure-system",
    ] {
        let event = format!("Normal NodeAllocatableEnforced {done}");
        cluster.wait(&event, || {
            cluster.events(&cluster.node_name()).contains(&event)
        });
    }
}

/// Restarts the agent with another threshold for processes. Other tests start and end thousands on this machine, so only
/// the part with fork bombs has a threshold near the current number.
fn set_free_processes(cluster: &Cluster, free: u64) {
    let config = cluster.config.as_ref().unwrap();
    std::fs::write(config.path(), small_node(free)).unwrap();
    cluster.kill("agent");
    cluster.up();
}

/// Fork bombs of limited size: the one with the lower priority is evicted first, although it is smaller.
fn fork_bombs_go(cluster: &Cluster) {
    let processes =
        |many: u32| format!("for i in $(busybox seq {many}); do busybox sleep 1000 & done");
    hog(cluster, "forks-few", &processes(60));
    hog(cluster, "forks-more", &processes(800));
    hog_with(cluster, "forks-low", &processes(700), &of_class("low"));
    cluster.wait("the third pod to be ready", || {
        support::condition(&cluster.pod("forks-more"), "Ready") == "True"
    });
    release_and_wait(cluster, &["forks-few", "forks-low", "forks-more"]);
    let _others = crate::many_processes();
    let (most, now) = sys::meter::processes();
    set_free_processes(cluster, most - now + 300);
    let status = is_evicted(cluster, "forks-more", "PIDPressure", "pids");
    let message = status["message"].as_str().unwrap();
    assert!(!message.contains("Container"), "{message}");
    ranks(
        cluster,
        "forks-low",
        &["forks-low", "forks-more", "forks-few"],
    );
    set_free_processes(cluster, FEW);
}

/// A hog that only crosses a soft threshold has its grace period and uses it. A memory hog that starts
/// meanwhile is evicted immediately, and no other pod is.
fn memory_is_watched_while_a_pod_has_its_grace_period(cluster: &Cluster) {
    let script = "busybox dd if=/dev/zero of=/v/f bs=1M count=60; until test -e /v/end; do sleep 0.1; done; exit 0";
    let patient = json!({"terminationGracePeriodSeconds": 120});
    hog_with(cluster, "soft-hog", script, &patient);
    hog(cluster, "late-hog", &memory_of_size("300m"));
    release(cluster, "soft-hog");
    cluster.wait("an eviction by the soft threshold", || {
        cluster.events("soft-hog").contains("Warning Evicted ")
    });
    let crossed = std::thread::scope(|scope| {
        let measured = scope.spawn(|| watch_memory(cluster, 400 << 20, 300 << 20));
        is_evicted(cluster, "late-hog", "MemoryPressure", "memory");
        measured.join().unwrap().0
    });
    is_quick(cluster, "late-hog", crossed);
    let status = cluster.pod("soft-hog")["status"].clone();
    assert_eq!(status["phase"], "Running", "{status}");
    signal(cluster, "soft-hog", "end");
    let status = is_evicted_at_last(cluster, "soft-hog");
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("Threshold quantity: 114Mi, "), "{message}");
}

/// Waits until a pod whose eviction has begun has stopped, and returns its status.
fn is_evicted_at_last(cluster: &Cluster, name: &str) -> Value {
    cluster.wait(&format!("{name} to terminate"), || {
        cluster.pod(name)["status"]["phase"] == "Failed"
    });
    let status = cluster.pod(name)["status"].clone();
    assert_eq!(status["reason"], "Evicted", "{status}");
    status
}

/// A script that allocates so much memory and keeps it.
fn memory_of_size(size: &str) -> String {
    format!("busybox head -c {size} /dev/zero | busybox tail -c {size} | sleep 1000")
}

/// Memory hogs: one with a lower priority than the others, one that requested nearly all that it uses,
/// and a small one with a higher priority.
fn make_memory_hogs(cluster: &Cluster) {
    hog(cluster, "memory-hog", &memory_of_size("220m"));
    hog_with(
        cluster,
        "memory-low",
        &memory_of_size("60m"),
        &of_class("low"),
    );
    hog_with(
        cluster,
        "smaller",
        &memory_of_size("60m"),
        &of_class("high"),
    );
    let requested = json!({"memory": "155Mi"});
    hog_with_requests(
        cluster,
        "modest",
        &memory_of_size("160m"),
        &requested,
        &json!({}),
    );
}

fn make_classes(cluster: &Cluster) {
    for (name, value) in [("low", -10), ("high", 1000)] {
        let class = json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": value});
        cluster.apply(&class.to_string());
    }
}

/// A node whose pods have 600 MiB of memory together and whose root directory is on a small filesystem:
/// other load on this machine has no influence.
fn make_small_node() -> (Cluster, SmallDisk, Group) {
    let config = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(config.path(), small_node(FEW)).unwrap();
    let mut cluster = Cluster::new("pressure", 57);
    cluster.config = Some(config);
    cluster.clear();
    let root = SmallDisk::at(cluster.data().join("agent"), "size=220m,nr_inodes=20000");
    let system = Group::made("/holdfast-t-pressure-system");
    cluster.up();
    let limit = of_all_pods(&cluster, "memory.limit_in_bytes", "memory.max");
    assert_eq!(limit, 600 << 20);
    let allocatable = cluster.node()["status"]["allocatable"]["memory"].clone();
    assert_eq!(allocatable, "400Mi");
    limits_are_reported(&cluster);
    (cluster, root, system)
}

/// For each resource there are two hogs, and other pods that use no more than they may: only the hogs
/// are evicted, in order.
#[test]
fn pods_that_exhaust_the_node_are_evicted_and_others_stay() {
    let (cluster, root, _system) = make_small_node();
    let sizes = json!({"cpu": "10m", "memory": "50Mi"});
    let guaranteed = json!({"containers": [{"name": "c", "image": "holdfast.local/demo:1", "resources": {"requests": sizes, "limits": sizes}}]});
    pod(&cluster, "steady", &guaranteed);
    assert_eq!(support::busybox(&cluster), IMAGE);
    make_classes(&cluster);
    make_memory_hogs(&cluster);
    make_disk_hogs(&cluster);
    make_inode_hogs(&cluster);
    let others = ["steady", "smaller", "disk-asked", "inode-few"];
    let others = Bystanders::of(&cluster, &others);
    let modest = Bystanders::of(&cluster, &["modest"]);
    memory_hogs_go(&cluster);
    modest.are_untouched(&cluster);
    assert_eq!(victims(&cluster), ["memory-low", "memory-hog"]);
    // Files on this small filesystem are memory too, so the pod makes room.
    cluster.kubectl(&["delete", "pod", "modest", "--wait=false"]);
    disk_hogs_go_after_the_dead(&cluster);
    others.are_untouched(&cluster);
    assert_eq!(victims(&cluster)[2..], ["disk-more", "disk-less"]);
    inode_hogs_go(&cluster);
    others.are_untouched(&cluster);
    assert_eq!(victims(&cluster)[4..], ["inode-more", "inode-less"]);
    for kind in ["MemoryPressure", "DiskPressure"] {
        until_relieved(&cluster, kind);
    }
    pod(&cluster, "after", &json!({"nodeName": cluster.node_name()}));
    let after = Bystanders::of(&cluster, &["after"]);
    fork_bombs_go(&cluster);
    assert_eq!(victims(&cluster)[6..], ["forks-low", "forks-more"]);
    memory_is_watched_while_a_pod_has_its_grace_period(&cluster);
    assert_eq!(victims(&cluster)[8..], ["soft-hog", "late-hog"]);
    for bystanders in [others, after] {
        bystanders.are_untouched(&cluster);
    }
    cluster.down();
    drop(root);
}

/// A file of a cgroup, by its name in cgroup v1 or v2.
fn file_of(cgroup: &str, (controller, v1): (&str, &str), v2: &str) -> std::path::PathBuf {
    let below = cgroup.trim_start_matches('/');
    if sys::cgroup::is_v2() {
        format!("/sys/fs/cgroup/{below}/{v2}").into()
    } else {
        format!("/sys/fs/cgroup/{controller}/{below}/{v1}").into()
    }
}

fn shares_of(cgroup: &str) -> std::path::PathBuf {
    file_of(cgroup, ("cpu", "cpu.shares"), "cpu.weight")
}

fn memory_of(cgroup: &str) -> std::path::PathBuf {
    file_of(cgroup, ("memory", "memory.limit_in_bytes"), "memory.max")
}

fn text_of(file: &std::path::Path) -> String {
    let text = std::fs::read_to_string(file);
    text.unwrap_or_else(|e| format!("{}: {e}", file.display()))
        .trim()
        .to_owned()
}

/// A cgroup that is removed when dropped.
struct Group(&'static str);

impl Group {
    fn made(path: &'static str) -> Group {
        sys::cgroup::make(path).unwrap();
        Group(path)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // If it is missing, the test has failed already.
        let _ = sys::cgroup::remove(self.0);
    }
}

fn amounts(pairs: &[(&str, &str)]) -> Amounts {
    let pairs = pairs.iter();
    pairs
        .map(|(name, text)| ((*name).to_owned(), text.parse().unwrap()))
        .collect()
}

/// The tree of a node without pods that reserves resources in the cgroup `system`.
fn described(system: &str) -> Vec<(cgroup_tree::Group, Values)> {
    let supply = Supply {
        capacity: amounts(&[("cpu", "4"), ("memory", "2Gi"), ("pid", "3000")]),
        reserved: amounts(&[("cpu", "1"), ("memory", "1Gi"), ("pid", "1000")]),
        allocatable: amounts(&[("memory", "1Gi")]),
    };
    let rules = Rules {
        limits_pods: true,
        system: Some(Reserved {
            cgroup: system.into(),
            amounts: amounts(&[("cpu", "500m"), ("memory", "512Mi")]),
            compressible_only: false,
        }),
        ..Rules::default()
    };
    cgroup_tree::tree(&supply, &rules, &[])
}

/// A pod with half a CPU and 64 MiB.
fn guaranteed() -> Pod {
    let sizes = json!({"cpu": "500m", "memory": "64Mi"});
    serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u"},
        "spec": {"containers": [{"name": "c", "resources": {"limits": sizes, "requests": sizes}}]}}))
    .unwrap()
}

/// The tree with its QoS tiers and reservations. The agent reverts changes of others in it and in a pod's cgroup.
#[tokio::test]
async fn changed_cgroups_are_restored() {
    let (root, system) = ("/holdfast-t-tree", "/holdfast-t-tree-system");
    let _groups = [Group::made(root), Group::made(system)];
    let dir = tempfile::tempdir().unwrap();
    let host = LinuxHost::new(
        dir.path(),
        dir.path().join("logs"),
        Cgroups::new(root, Driver::Cgroupfs),
        Some(50),
        Some(100_000),
    );
    let tree = described(system);
    for answer in host.apply_tree(&tree).await {
        answer.unwrap();
    }
    let (pods, tier) = (
        format!("{root}/kubepods"),
        format!("{root}/kubepods/besteffort"),
    );
    let pids = file_of(&pods, ("pids", "pids.max"), "pids.max");
    let expected = |shares: &'static str, weight: &'static str| {
        if sys::cgroup::is_v2() { weight } else { shares }
    };
    let limits = [&pods, system].map(|cgroup: &str| text_of(&memory_of(cgroup)));
    assert_eq!(limits, ["1073741824", "536870912"]);
    assert_eq!(text_of(&pids), "2000");
    assert_eq!(text_of(&shares_of(&pods)), expected("3072", "118"));
    assert_eq!(text_of(&shares_of(system)), expected("512", "20"));

    let pod = guaranteed();
    let own = host.ensure_cgroup(&pod, true).await.unwrap();
    let quota = file_of(&own, ("cpu", "cpu.cfs_quota_us"), "cpu.max");
    assert!(text_of(&quota).starts_with("50000"), "{}", text_of(&quota));
    // The pod has exclusive CPUs from now on.
    host.ensure_cgroup(&pod, false).await.unwrap();
    assert!(["-1", "max 100000"].contains(&text_of(&quota).as_str()));

    std::fs::write(shares_of(&tier), "77").unwrap();
    std::fs::write(memory_of(&own), "1048576000").unwrap();
    std::fs::write(memory_of(system), "1048576000").unwrap();
    sys::cgroup::remove(&format!("{root}/kubepods/burstable")).unwrap();
    let begun = Instant::now();
    let restored = tokio::time::timeout(Duration::from_secs(10), host.restore_cgroups()).await;
    let restored = restored.expect("changes are detected within seconds");
    eprintln!("restored after {:?}: {restored:?}", begun.elapsed());
    let names: Vec<&str> = restored.iter().map(|m| m.cgroup.as_str()).collect();
    let burstable = format!("{root}/kubepods/burstable");
    assert_eq!(names, [system, &tier, &burstable, &own]);
    assert!(restored.iter().all(|m| m.error.is_none()), "{restored:?}");
    let found = restored[1].changes[0].to_string();
    assert!(found.contains(" was 77, expected "), "{found}");
    assert_eq!(text_of(&shares_of(&tier)), expected("2", "1"));
    assert_eq!(text_of(&shares_of(&burstable)), expected("2", "1"));
    assert_eq!(text_of(&memory_of(&own)), "67108864");
    assert_eq!(text_of(&memory_of(system)), "536870912");
    // A cgroup that the agent itself has removed is not created again.
    host.remove_cgroup(&pod).await.unwrap();
    assert!(!quota.exists());
}
