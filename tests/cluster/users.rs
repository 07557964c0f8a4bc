//! Pods with user namespaces (`hostUsers: false`, KEP-127), run by a containerd and a runc that support them.
#![allow(clippy::unwrap_used)]

use crate::support;

use std::path::PathBuf;

use support::{Cluster, condition};

/// The number of IDs of a pod; the first ID on the host is a multiple of it.
const USERS: u32 = 131_072;

/// An idle container with an emptyDir, a Secret and a ConfigMap.
fn manifest(name: &str, image: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{hostUsers: false, terminationGracePeriodSeconds: 1, securityContext: {{fsGroup: 1234}}, volumes: [{{name: e, emptyDir: {{}}}}, {{name: s, secret: {{secretName: keys, defaultMode: 256}}}}, {{name: m, configMap: {{name: words}}}}], containers: [{{name: c, image: '{image}', command: [busybox, sleep, '100000'], volumeMounts: [{{name: e, mountPath: /e}}, {{name: s, mountPath: /s}}, {{name: m, mountPath: /m}}]}}]}}\n---\n"
    )
}

/// A running pod, by its name.
struct Users<'a>(&'a Cluster, &'a str);

impl Users<'_> {
    fn run(&self, command: &str) -> String {
        let Users(cluster, name) = self;
        let shell = ["exec", name, "--", "busybox", "sh", "-c", command];
        cluster.kubectl(&shell).trim().to_owned()
    }

    /// The first of its IDs on the host.
    fn first(&self) -> u32 {
        let map = self.run("cat /proc/self/uid_map; cat /proc/self/gid_map");
        let lines: Vec<Vec<u32>> = map
            .lines()
            .map(|l| l.split_whitespace().map(|n| n.parse().unwrap()).collect())
            .collect();
        assert_eq!(lines[0], lines[1], "users and groups have the same mapping");
        assert_eq!((lines.len(), lines[0][0], lines[0][2]), (2, 0, USERS));
        lines[0][1]
    }

    /// The UID of its container's process on the host.
    fn on_host(&self) -> u32 {
        let Users(cluster, name) = self;
        let pod = cluster.pod(name);
        let id = pod["status"]["containerStatuses"][0]["containerID"]
            .as_str()
            .unwrap()
            .trim_start_matches("containerd://")
            .to_owned();
        let state = cluster
            .run_dir()
            .join("containerd/io.containerd.runtime.v2.task/k8s.io")
            .join(id)
            .join("init.pid");
        let pid = std::fs::read_to_string(state).unwrap();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let users = status.lines().find_map(|l| l.strip_prefix("Uid:")).unwrap();
        users.split_whitespace().next().unwrap().parse().unwrap()
    }
}

fn runtime() -> Option<PathBuf> {
    let containerds = support::skip::fetched("HOLDFAST_RUNTIMES", "usr/bin/containerd");
    let runcs = support::skip::fetched("HOLDFAST_RUNTIMES", "usr/sbin/runc");
    let newest = containerds
        .iter()
        .find(|c| c.ends_with("sid/usr/bin/containerd"))?;
    let [containerd, runc] = [newest, runcs.first()?].map(|p| p.parent().unwrap());
    // The shim finds runc by its name in this path.
    Some(format!("{}:{}", runc.display(), containerd.display()).into())
}

#[test]
fn pods_have_their_own_user_namespaces() {
    let Some(runtime) = runtime() else { return };
    let fields = format!("userNamespaces: {{idsPerPod: {USERS}}}");
    let cluster = Cluster::start_configured_with("users", 77, &fields, runtime);
    let image = support::busybox(&cluster);
    cluster.kubectl(&[
        "create",
        "secret",
        "generic",
        "keys",
        "--from-literal=pin=42",
    ]);
    cluster.kubectl(&["create", "configmap", "words", "--from-literal=a=b"]);
    let ready = |name: &str| {
        cluster.wait(name, || condition(&cluster.pod(name), "Ready") == "True");
    };
    cluster.apply(&[manifest("one", &image), manifest("two", &image)].concat());
    let (one, two) = (Users(&cluster, "one"), Users(&cluster, "two"));
    ready("one");
    ready("two");

    // Root in a pod is an unprivileged user on the host, and a different one for each pod.
    let firsts = [one.first(), two.first()];
    for (pod, first) in [(&one, firsts[0]), (&two, firsts[1])] {
        assert!(first >= USERS && first.is_multiple_of(USERS), "{first}");
        assert_eq!((pod.run("id -u"), pod.on_host()), ("0".into(), first));
    }
    assert_ne!(firsts[0], firsts[1]);

    // Inside the pod, volumes look as in any other pod.
    let owners = "busybox stat -L -c '%u:%g %a' /e /s/pin /m/a; touch /e/f; busybox stat -c '%u:%g' /e/f; cat /s/pin";
    assert_eq!(
        one.run(owners),
        "0:1234 2777\n0:1234 440\n0:1234 644\n0:1234\n42"
    );
    let last = "busybox chown 131071 /e/f; busybox stat -c %u /e/f; busybox chown 0 /e/f";
    assert_eq!(one.run(last), "131071", "the last user ID of the pod");
    // On the host, files below the kubelet's paths belong to root, so that an agent without user
    // namespaces can read them.
    let file = std::fs::metadata(
        cluster
            .data()
            .join("agent/pods")
            .join(cluster.pod("one")["metadata"]["uid"].as_str().unwrap())
            .join("volumes/kubernetes.io~empty-dir/e/f"),
    );
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&file.unwrap()), 0);

    // A restarted agent knows the IDs of each pod.
    cluster.kill("agent");
    cluster.up();
    cluster.apply(&manifest("three", &image));
    ready("three");
    let three = Users(&cluster, "three");
    assert_eq!([one.first(), two.first()], firsts);
    assert!(!firsts.contains(&three.first()), "{}", three.first());
    let restarts =
        |name| cluster.pod(name)["status"]["containerStatuses"][0]["restartCount"].clone();
    assert_eq!([restarts("one"), restarts("two")], [0, 0]);
    let started = cluster.metric("kubelet_started_user_namespaced_pods_total");
    assert_eq!(started, Some(1.0), "the count since this agent's start");

    cluster.delete_all_and_check();
}
