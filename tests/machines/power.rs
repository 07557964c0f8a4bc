//! A node that is powered off, or loses its power during its work, repeatedly (issue 18, the node's
//! shutdown). Each boot starts the cluster from the disk that the previous one left.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::support::{self, Cluster, condition, find_pods};
use crate::{an_uplink, programs, run, vm};

/// Printed when everything is correct after a boot.
const CHECKED: &str = "VM-CHECKED";
/// Printed when the power may be cut at any time.
const AT_WORK: &str = "VM-AT-WORK";
/// The number of boots after the first one: an even boot ends with a power-off, an odd one with a power cut.
const CYCLES: u32 = 2;
/// On the machine's disk: the number of boots so far, and the UID of the pod that must not run again.
const COUNT: &str = "/var/lib/power-cycles";
const DELETED: &str = "/var/lib/power-deleted";
/// Pods stop long before that; commands take seconds in the machine.
const NODE: &str =
    "cgroupDriver: systemd\nshutdownGracePeriod: 300s\nshutdownGracePeriodCriticalPods: 100s\n";

#[test]
fn a_node_recovers_from_every_kind_of_power_loss() {
    let Some(node) = vm::Node::new("power::inside", &programs()) else {
        return;
    };
    let cycles = std::env::var("HOLDFAST_CYCLES").map_or(CYCLES, |n| n.parse().unwrap());
    let work = tempfile::tempdir().unwrap();
    let disk = node.own_disk(work.path());
    for cycle in 0..=cycles {
        let after = Duration::from_millis(u64::from(cycle) * 1_700 % 5_000);
        let console_output = node.run_until(&disk, AT_WORK, after);
        let checked = console_output.contains(&format!("{CHECKED} {cycle}"));
        assert!(
            checked && !console_output.contains("panicked"),
            "boot {cycle} of the virtual machine:\n{console_output}"
        );
        println!("boot {cycle} of {cycles} is correct");
    }
}

#[test]
#[ignore = "runs in a virtual machine"]
fn inside() {
    assert!(vm::is_inside(), "this test powers its machine off");
    let cycle: u32 = std::fs::read_to_string(COUNT).map_or(0, |text| text.parse().unwrap());
    write_through(COUNT, &(cycle + 1).to_string());
    an_uplink();
    // The disk is deleted after the test, and the cluster with it.
    let cluster = std::mem::ManuallyDrop::new(Cluster::new("power", 48).configured(NODE));
    cluster.up();
    match cycle {
        0 => make_pods(&cluster),
        _ => check(&cluster),
    }
    println!("{CHECKED} {cycle}");
    match cycle % 2 {
        0 => power_off(),
        _ => work_until_power_off(&cluster),
    }
}

fn write_through(path: &str, text: &str) {
    use std::io::Write as _;
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.sync_all().unwrap();
}

fn keeper(image: &str) -> String {
    let command = "echo line >> /v/lines; busybox sync; exec busybox sleep 100000";
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: keeper}}\nspec: {{terminationGracePeriodSeconds: 1, containers: [{{name: c, image: '{image}', command: [busybox, sh, -c, '{command}'], volumeMounts: [{{name: v, mountPath: /v}}]}}], volumes: [{{name: v, emptyDir: {{}}}}]}}\n"
    )
}

const IMAGE: &str = "test.local/busybox:1";

/// Creates a Deployment with a ConfigMap, a pod with its own files, and a static pod.
fn make_pods(cluster: &Cluster) {
    assert_eq!(support::busybox(cluster), IMAGE);
    let idle = format!(
        "{{name: c, image: '{IMAGE}', command: [busybox, sh, -c, 'trap exit TERM; while :; do busybox sleep 0.5; done']}}"
    );
    cluster.kubectl(&["create", "configmap", "settings", "--from-literal=a=b"]);
    cluster.apply(&keeper(IMAGE));
    cluster.apply(&format!(
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: web}}\nspec: {{replicas: 2, selector: {{matchLabels: {{app: web}}}}, template: {{metadata: {{labels: {{app: web}}}}, spec: {{terminationGracePeriodSeconds: 5, containers: [{idle}], volumes: [{{name: v, configMap: {{name: settings}}}}]}}}}}}\n"
    ));
    let manifest = cluster.data().join("agent/manifests/fixed.yaml");
    let text = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: fixed}}\nspec: {{terminationGracePeriodSeconds: 5, containers: [{idle}]}}\n"
    );
    std::fs::write(manifest, text).unwrap();
    cluster.wait("the pods to run", || all_run(cluster));
    // The images that the runtime has unpacked must be on the disk; syncing them is not the agent's task.
    nix::unistd::sync();
}

fn uid(pod: &Value) -> String {
    pod["metadata"]["uid"].as_str().unwrap().to_owned()
}

fn named<'a>(pods: &'a [Value], prefix: &str) -> Vec<&'a Value> {
    let is = |pod: &&Value| {
        pod["metadata"]["name"]
            .as_str()
            .unwrap()
            .starts_with(prefix)
    };
    pods.iter().filter(is).collect()
}

/// Whether exactly two pods of the Deployment, the pod with files and the static pod run.
fn all_run(cluster: &Cluster) -> bool {
    let pods = cluster.pods();
    let are = |prefix: &str, many: usize| {
        let found = named(&pods, prefix);
        found.len() == many && found.iter().all(|p| condition(p, "Ready") == "True")
    };
    are("web-", 2) && are("keeper", 1) && are("fixed-", 1) && pods.len() == 4
}

/// Checks after a boot that every pod runs again, and that nothing is left of other pods.
fn check(cluster: &Cluster) {
    // Pods that a shutdown has terminated stay terminated, as with the kubelet. Their controller replaces
    // them; a pod without a controller is replaced by this test.
    let is_failed = |p: &Value| p["status"]["phase"] == "Failed";
    cluster.wait("every pod to be ready or failed", || {
        let running = |p: &Value| condition(p, "Ready") == "True";
        cluster.pods().iter().all(|p| is_failed(p) || running(p))
    });
    let was_ended = cluster.pods().iter().any(is_failed);
    let keeper_ended = named(&cluster.pods(), "keeper").into_iter().any(is_failed);
    if was_ended {
        cluster.delete_finished();
    }
    if keeper_ended {
        cluster.apply(&keeper(IMAGE));
    }
    cluster.kubectl(&["scale", "deployment", "web", "--replicas=2"]);
    cluster.wait("every pod to run again", || all_run(cluster));
    let pods = cluster.pods();
    if !keeper_ended {
        let dir = cluster
            .data()
            .join("agent/pods")
            .join(uid(named(&pods, "keeper")[0]));
        let lines = dir.join("volumes/kubernetes.io~empty-dir/v/lines");
        let lines = std::fs::read_to_string(lines).unwrap();
        assert!(
            lines.lines().count() > 1,
            "the files of the pod are kept: {lines:?}"
        );
    }
    nothing_else_is_there(cluster, &pods);
}

/// Checks that directories, cgroups and addresses exist for these pods only.
fn nothing_else_is_there(cluster: &Cluster, pods: &[Value]) {
    if let Ok(deleted) = std::fs::read_to_string(DELETED) {
        cluster.wait("no leftovers of the deleted pod", || {
            !cluster
                .leftovers()
                .iter()
                .any(|left| left.contains(&deleted))
        });
    }
    // Directories and cgroups of a static pod have its own UID, not that of its mirror pod.
    let config = |p: &Value| {
        let hash = &p["metadata"]["annotations"]["kubernetes.io/config.hash"];
        hash.as_str().map(str::to_owned)
    };
    let uids: BTreeSet<String> = pods
        .iter()
        .map(|p| config(p).unwrap_or_else(|| uid(p)))
        .collect();
    cluster.wait("the directories of only these pods", || {
        directories(&cluster.data().join("agent/pods")) == uids
    });
    cluster.wait("the cgroups of only these pods", || {
        let mut found = vec![];
        find_pods(
            Path::new("/sys/fs/cgroup/holdfast_t_power.slice"),
            &mut found,
        );
        let is_known = |slice: &String| {
            uids.iter()
                .any(|uid| slice.contains(&uid.replace('-', "_")))
        };
        found.len() == uids.len() && found.iter().all(is_known)
    });
    let addresses = cluster.data().join("cni/networks").join(cluster.name());
    cluster.wait("one address for each pod", || {
        let given = directories(&addresses);
        let given = given
            .iter()
            .filter(|n| n.parse::<std::net::IpAddr>().is_ok());
        given.count() == uids.len()
    });
    cluster.holdfast(&["ipam", "audit"]);
}

fn directories(dir: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|e| e.file_name().into_string().unwrap())
        .collect()
}

/// As an administrator does. The agent's inhibitor lock makes logind wait for the pods.
fn power_off() {
    run("systemctl", &["poweroff"]);
    // This process ends with the machine.
    std::thread::sleep(Duration::from_secs(900));
}

/// Deletes a pod while the agent is down, and lets the agent start and stop other pods until the power is cut.
fn work_until_power_off(cluster: &Cluster) {
    let pods = cluster.pods();
    let victim = named(&pods, "web-")[0];
    cluster.kill("agent");
    let name = victim["metadata"]["name"].as_str().unwrap();
    cluster.kubectl(&["delete", "pod", name, "--force", "--grace-period=0"]);
    write_through(DELETED, &uid(victim));
    cluster.up();
    println!("{AT_WORK}");
    for replicas in [3, 1, 4, 2].into_iter().cycle() {
        cluster.kubectl(&[
            "scale",
            "deployment",
            "web",
            &format!("--replicas={replicas}"),
        ]);
    }
}
