//! Changes that let a blocked container start: the agent starts it immediately, without waiting for a
//! back-off that is in progress.
#![allow(clippy::unwrap_used)]

use crate::proxy;
use crate::support;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use proxy::Proxy;
use serde_json::{Value, json};
use support::{Cluster, pod};

/// Longer than a start takes on a busy machine, and much less than the back-offs.
const AT_ONCE: Duration = Duration::from_secs(7);

/// How long the runtime is down. The agent retries after 0.5, 1.5, 3.5, 7.5, 15.5 and 25.5 seconds, so its
/// next retry would come more than [`AT_ONCE`] later.
const AWAY: Duration = Duration::from_secs(16);

struct Bench {
    cluster: Cluster,
    image: String,
}

impl Bench {
    /// Creates a pod with these fields of its container.
    fn create(&self, name: &str, container: &Value, volumes: &Value) {
        let mut all =
            json!({"name": "c", "image": self.image, "command": ["busybox", "sleep", "3600"]});
        json_patch::merge(&mut all, container);
        let spec =
            json!({"terminationGracePeriodSeconds": 0, "containers": [all], "volumes": volumes});
        pod(&self.cluster, name, &spec);
    }

    /// Waits until the container cannot be created, for this reason.
    fn waits(&self, name: &str, why: &str) {
        self.cluster.wait(&format!("{name} to wait"), || {
            let pod = self.cluster.pod(name);
            let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"];
            let message = waiting["message"].as_str().unwrap_or_default();
            waiting["reason"] == "CreateContainerConfigError" && message.contains(why)
        });
    }

    /// The pod runs soon after `cure`.
    fn runs_at_once(&self, name: &str, cure: impl FnOnce()) {
        cure();
        let cured = Instant::now();
        let ready = || self.cluster.pod(name)["status"]["containerStatuses"][0]["ready"] == true;
        self.cluster.wait(&format!("{name} to run"), ready);
        let took = cured.elapsed();
        println!("{name}: {took:.1?}");
        assert!(took < AT_ONCE, "{name} took {took:.1?}");
    }
}

/// A ConfigMap, one of its keys, and a Secret are created late.
fn objects(bench: &Bench) {
    let kubectl = |arguments: &[&str]| _ = bench.cluster.kubectl(arguments);
    let of_map = json!({"configMapKeyRef": {"name": "late", "key": "a"}});
    bench.create(
        "map",
        &json!({"env": [{"name": "A", "valueFrom": of_map}]}),
        &json!([]),
    );
    bench.waits("map", "\"late\" not found");
    kubectl(&["create", "configmap", "late", "--from-literal=b=1"]);
    bench.waits("map", "couldn't find key a");
    bench.runs_at_once("map", || {
        kubectl(&[
            "patch",
            "configmap",
            "late",
            "--patch",
            r#"{"data": {"a": "1"}}"#,
        ]);
    });

    let all = json!([{"secretRef": {"name": "late"}}]);
    bench.create("secret", &json!({"envFrom": all}), &json!([]));
    bench.waits("secret", "\"late\" not found");
    bench.runs_at_once("secret", || {
        kubectl(&["create", "secret", "generic", "late", "--from-literal=a=1"]);
    });
}

/// The annotation from which a path is built is corrected.
fn annotations(bench: &Bench) {
    let kubectl = |arguments: &[&str]| _ = bench.cluster.kubectl(arguments);
    let annotation = json!({"fieldRef": {"fieldPath": "metadata.annotations['place']"}});
    let below = json!({"env": [{"name": "PLACE", "valueFrom": annotation}],
        "volumeMounts": [{"name": "v", "mountPath": "/v", "subPathExpr": "a/$(PLACE)"}]});
    bench.create("path", &below, &json!([{"name": "v", "emptyDir": {}}]));
    bench.waits("path", "missing value for PLACE");
    kubectl(&["annotate", "pod", "path", "place=../.."]);
    bench.waits("path", "must not contain '..'");
    bench.runs_at_once("path", || {
        kubectl(&["annotate", "pod", "path", "--overwrite", "place=b"]);
    });
}

#[test]
fn containers_start_as_soon_as_a_missing_object_exists() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("proxy.sock");
    let target = PathBuf::from("/run/holdfast-t-news/containerd.sock");
    let proxy = Proxy::start(socket.clone(), target);
    let fields = format!(
        "{{containerRuntimeEndpoint: 'unix://{}'}}",
        socket.display()
    );
    let cluster = Cluster::start_configured("news", 85, &fields);
    let image = support::busybox(&cluster);
    let bench = Bench { cluster, image };
    objects(&bench);
    annotations(&bench);
    proxy.set_unreachable(true);
    bench.create("patient", &json!({}), &json!([]));
    std::thread::sleep(AWAY);
    assert_eq!(bench.cluster.pod("patient")["status"]["phase"], "Pending");
    bench.runs_at_once("patient", || proxy.set_unreachable(false));

    let all = ["delete", "pod", "--all", "--wait=true"];
    bench.cluster.kubectl(&all);
    let nothing = || bench.cluster.leftovers_known().is_empty();
    bench.cluster.wait_quietly("no leftovers", nothing);
}
