//! Resizes of running pods: containers, init containers, the pod as a whole.
#![allow(clippy::unwrap_used)]

use crate::support;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use support::{Cluster, pod};

/// Writes to a pod's `resize` subresource, as a strategic merge patch.
fn resized(cluster: &Cluster, name: &str, spec: &Value) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build().unwrap();
    runtime.block_on(async {
        let config = cluster.data().join("kubeconfig");
        let client = holdfast_kubeapi::client::connect(&config).await.unwrap();
        let api: kube::Api<k8s_openapi::api::core::v1::Pod> = kube::Api::default_namespaced(client);
        let (params, patch) = (
            kube::api::PatchParams::default(),
            kube::api::Patch::Strategic(json!({"spec": spec})),
        );
        let patched = api.patch_subresource("resize", name, &params, &patch);
        patched.await.map(|_| ()).map_err(|e| e.to_string())
    })
}

/// The directory with a name below another one.
fn find(dir: &Path, name: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(dir).ok()?.flatten();
    let mut dirs = entries.map(|e| e.path()).filter(|p| p.is_dir());
    dirs.find_map(|dir| {
        if dir.ends_with(name) {
            Some(dir)
        } else {
            find(&dir, name)
        }
    })
}

/// A pod on the node that the test resizes.
struct Sized<'a> {
    cluster: &'a Cluster,
    name: &'a str,
}

impl Sized<'_> {
    fn resize(&self, spec: &Value) {
        resized(self.cluster, self.name, spec).unwrap();
    }

    fn status(&self) -> Value {
        self.cluster.pod(self.name)["status"].clone()
    }

    fn container(&self, name: &str) -> Value {
        let status = self.status();
        let lists = ["initContainerStatuses", "containerStatuses"].map(|list| status[list].clone());
        let mut all = lists.iter().filter_map(Value::as_array).flatten();
        all.find(|c| c["name"] == name).cloned().unwrap_or_default()
    }

    fn runs(&self, name: &str) -> bool {
        self.container(name)["state"]["running"].is_object()
    }

    /// The condition of a resize that is in progress or pending.
    fn condition(&self) -> Option<Value> {
        let conditions = self.status()["conditions"].as_array()?.clone();
        let resizes = |c: &Value| c["type"].as_str().unwrap().starts_with("PodResize");
        conditions.into_iter().find(resizes)
    }

    /// The kernel's limits of the pod or one of its containers: bytes of memory, and microseconds of CPU in
    /// 100 ms (-1 for no limit).
    fn limits(&self, container: Option<&str>) -> (u64, i64) {
        let pod = self.cluster.pod(self.name);
        let uid = format!("pod{}", pod["metadata"]["uid"].as_str().unwrap());
        let root = format!("holdfast-{}", self.cluster.name());
        let read = |controller: &str, v1: &str, v2: &str| -> i64 {
            let top = [
                format!("/sys/fs/cgroup/{controller}/{root}"),
                format!("/sys/fs/cgroup/{root}"),
            ];
            let mut dir = top
                .iter()
                .find_map(|top| find(Path::new(top), &uid))
                .unwrap();
            if let Some(container) = container {
                let status = self.container(container);
                let id = status["containerID"].as_str().unwrap();
                dir = find(&dir, id.strip_prefix("containerd://").unwrap()).unwrap();
            }
            let text = std::fs::read_to_string(dir.join(v1))
                .or_else(|_| std::fs::read_to_string(dir.join(v2)));
            let text = text.unwrap();
            // "max" means that there is no limit.
            text.split_whitespace()
                .next()
                .unwrap()
                .parse()
                .unwrap_or(-1)
        };
        let memory = read("memory", "memory.limit_in_bytes", "memory.max");
        (
            memory.try_into().unwrap(),
            read("cpu", "cpu.cfs_quota_us", "cpu.max"),
        )
    }
}

fn made<'a>(cluster: &'a Cluster, name: &'a str, spec: &Value) -> Sized<'a> {
    let mut spec = spec.clone();
    spec["terminationGracePeriodSeconds"] = 1.into();
    pod(cluster, name, &spec);
    Sized { cluster, name }
}

const fn mebi(n: u64) -> u64 {
    n << 20
}

#[test]
fn whole_pods_and_running_init_containers_are_resized() {
    let cluster = Cluster::start("resize-whole", 74);
    let image = support::busybox(&cluster);
    let sleep = json!(["busybox", "sleep", "1000"]);
    let restarts = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    let own = json!({"limits": {"memory": "12Mi"}, "requests": {"memory": "8Mi"}});
    let whole = made(
        &cluster,
        "whole",
        &json!({"resources": sizes("500m", "64Mi"), "containers": [
        {"name": "shares", "image": image, "command": sleep},
        {"name": "anew", "image": image, "command": sleep, "resizePolicy": restarts, "resources": own}]}),
    );
    let little = json!({"requests": {"cpu": "10m"}, "limits": {"memory": "16Mi"}});
    let begins = made(
        &cluster,
        "begins",
        &json!({
        "initContainers": [{"name": "step", "image": image, "command": sleep, "resources": little}],
        "containers": [{"name": "c", "image": image, "command": sleep}]}),
    );
    let memory = json!({"requests": {"memory": "32Mi"}, "limits": {"memory": "32Mi"}});
    let alone = made(
        &cluster,
        "alone",
        &json!({"resources": memory, "containers": [{"name": "c", "image": image, "command": sleep}]}),
    );
    cluster.wait("all pods to run", || {
        whole.runs("shares") && whole.runs("anew") && begins.runs("step") && alone.runs("c")
    });
    whole_pod(&whole);
    below_what_is_used(&alone);

    // A restarted agent continues from this state.
    let before = (whole.container("shares"), whole.container("anew"));
    cluster.kill("agent");
    cluster.up();
    begins.resize(&json!({"initContainers": [{"name": "step", "resources": {"requests": {"cpu": "20m"}, "limits": {"memory": "32Mi"}}}]}));
    cluster.wait("the step's new size", || {
        let size = &begins.container("step")["resources"]["limits"]["memory"];
        size == "32Mi" && begins.condition().is_none()
    });
    assert_eq!(begins.limits(Some("step")).0, mebi(32));
    assert_eq!(begins.container("step")["restartCount"], 0);
    assert_eq!((whole.container("shares"), whole.container("anew")), before);
    let none = json!({"resources": {"limits": {"cpu": null}}});
    let refused = resized(&cluster, "whole", &none).unwrap_err();
    let why = "spec.resources.limits: Forbidden: a resource that is set cannot be removed";
    assert!(refused.contains(why), "{refused}");
    cluster.delete_all_and_check();
}

fn sizes(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": "16Mi"}, "limits": {"cpu": cpu, "memory": memory}})
}

/// One resize of the pod, of a container without its own limits, and of one that must restart.
fn whole_pod(pod: &Sized<'_>) {
    assert_eq!(pod.limits(None), (mebi(64), 50_000));
    assert_eq!(pod.limits(Some("shares")), (mebi(64), 50_000));
    assert_eq!(pod.limits(Some("anew")), (mebi(12), 50_000));
    let before = pod.container("shares")["containerID"].clone();
    let more = json!({"limits": {"memory": "24Mi"}, "requests": {"memory": "8Mi"}});
    pod.resize(&json!({"resources": sizes("1", "128Mi"), "containers": [{"name": "anew", "resources": more}]}));
    pod.cluster.wait("the pod to have the new size", || {
        pod.status()["resources"]["limits"]["memory"] == "128Mi"
            && pod.container("anew")["restartCount"] == 1
            && pod.runs("anew")
            && pod.condition().is_none()
    });
    assert_eq!(pod.limits(None), (mebi(128), 100_000));
    assert_eq!(pod.limits(Some("shares")), (mebi(128), 100_000));
    assert_eq!(pod.limits(Some("anew")), (mebi(24), 100_000));
    assert_eq!(pod.container("shares")["containerID"], before);
    assert_eq!(pod.container("shares")["resources"], json!({}));
    assert_eq!(
        pod.status()["allocatedResources"],
        json!({"cpu": "1", "memory": "16Mi"})
    );
}

/// A memory limit below the usage: nothing changes, and the condition has the reason.
fn below_what_is_used(pod: &Sized<'_>) {
    let sized = |memory: &str| json!({"resources": {"requests": {"memory": memory}, "limits": {"memory": memory}}});
    pod.resize(&sized("8Ki"));
    let mut message = String::new();
    pod.cluster
        .wait("a condition about the refused resize", || {
            let Some(condition) = pod.condition() else {
                return false;
            };
            message = condition["message"].as_str().unwrap_or_default().into();
            condition["type"] == "PodResizeInProgress" && condition["reason"] == "Error"
        });
    assert!(
        message.contains("pod memory limit (8192) below current usage ("),
        "{message}"
    );
    assert_eq!(pod.limits(None).0, mebi(32));
    assert_eq!(pod.limits(Some("c")).0, mebi(32));
    pod.resize(&sized("48Mi"));
    pod.cluster.wait("the pod to have another size", || {
        pod.limits(None).0 == mebi(48) && pod.condition().is_none()
    });
    assert_eq!(pod.limits(Some("c")).0, mebi(48));
    assert_eq!(pod.container("c")["restartCount"], 0);
}

/// A resize of the only container.
fn one(resources: &Value) -> Value {
    json!({"containers": [{"name": "c", "resources": resources}]})
}

#[test]
fn pods_are_resized_in_place_and_wait_for_capacity() {
    let cluster = Cluster::start("resize", 28);
    let image = support::busybox(&cluster);
    let allocatable = cluster.node()["status"]["allocatable"]["cpu"].clone();
    let cpus: u64 = allocatable.as_str().unwrap().parse().unwrap();
    let pod = |name, cpu: &str, policy: &str| {
        let sizes = json!({"requests": {"cpu": cpu, "memory": "32Mi"}, "limits": {"cpu": cpus, "memory": "64Mi"}});
        let policy = json!([{"resourceName": "memory", "restartPolicy": policy}]);
        let container = json!({"name": "c", "image": image, "command": ["busybox", "sleep", "1000"], "resizePolicy": policy, "resources": sizes});
        made(&cluster, name, &json!({"containers": [container]}))
    };
    let live = pod("live", "100m", "NotRequired");
    let restarted = pod("anew", "100m", "RestartContainer");
    let big = pod("big", &format!("{}m", cpus * 1000 - 700), "NotRequired");
    cluster.wait("all pods to run", || {
        [&live, &restarted, &big].iter().all(|p| p.runs("c"))
    });
    let before = live.container("c")["containerID"].clone();
    let larger =
        json!({"requests": {"cpu": "200m", "memory": "48Mi"}, "limits": {"memory": "128Mi"}});
    for pod in [&live, &restarted] {
        pod.resize(&one(&larger));
        cluster.wait("the pod to have the new size", || {
            let resources = &pod.container("c")["resources"];
            resources["requests"]["cpu"] == "200m"
                && resources["limits"]["memory"] == "128Mi"
                && pod.runs("c")
                && pod.condition().is_none()
        });
        assert_eq!(pod.container("c")["allocatedResources"]["cpu"], "200m");
        let cpu = i64::try_from(cpus).unwrap() * 100_000;
        assert_eq!(pod.limits(None), (mebi(128), cpu));
        assert_eq!(pod.limits(Some("c")), (mebi(128), cpu));
    }
    assert_eq!(live.container("c")["containerID"], before);
    assert_eq!(live.container("c")["restartCount"], 0);
    assert_eq!(
        restarted.container("c")["restartCount"],
        1,
        "the resize policy requires a restart"
    );
    if !holdfast_sys::cgroup::is_v2() {
        let shares = ["cat", "/sys/fs/cgroup/cpu/cpu.shares"];
        assert_eq!(support::inside(&cluster, "live", &shares), "204");
    }
    cluster.wait("the events of the resize", || {
        let events = cluster.events("live");
        events.contains("ResizeStarted Pod resize started: {")
            && events.contains("ResizeCompleted Pod resize completed: {")
    });

    // A resize that does not fit is deferred, reports this, and is applied when capacity becomes free.
    live.resize(&one(&json!({"requests": {"cpu": "700m"}})));
    cluster.wait("the resize to be deferred", || {
        let Some(condition) = live.condition() else {
            return false;
        };
        let why = condition["message"].as_str().unwrap_or_default();
        condition["type"] == "PodResizePending"
            && condition["reason"] == "Deferred"
            && why.contains("Node didn't have enough resource: cpu")
    });
    assert_eq!(live.container("c")["allocatedResources"]["cpu"], "200m");
    cluster.kubectl(&["delete", "pod", "big"]);
    cluster.wait("the resize to be granted", || {
        live.container("c")["resources"]["requests"]["cpu"] == "700m" && live.condition().is_none()
    });
    assert_eq!(live.container("c")["containerID"], before);
    let none =
        json!({"requests": {"cpu": null, "memory": null}, "limits": {"cpu": null, "memory": null}});
    let refused = resized(&cluster, "live", &one(&none)).unwrap_err();
    let why = "must not change the pod's QoS class";
    assert!(refused.contains(why), "{refused}");
    cluster.delete_all_and_check();
}
