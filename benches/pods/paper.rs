//! The control plane's part of the work for a pod. A simulated node reports each pod that is bound to it as ready, with
//! one patch, and does nothing else.

use std::time::Duration;

use futures::TryStreamExt as _;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use super::{create_all, delete, is_ready, pod};

const NODE: &str = "paper";

/// The simulated node and its agent. Its pods have a separate namespace, so that the bench's other pods stay on the
/// real node.
pub struct Paper {
    namespaces: Api<Namespace>,
    pods: Api<Pod>,
    nodes: Api<Node>,
    agent: tokio::task::JoinHandle<()>,
}

fn parsed<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

/// The control plane's part, in seconds.
pub struct Life {
    /// From a pod's creation until a watcher sees that it is ready.
    pub start: f64,
    /// From its deletion until a watcher sees it deleted.
    pub end: f64,
}

/// Reports a pod as ready, or removes a pod that is being deleted.
async fn answer_for(pods: &Api<Pod>, pod: Pod) {
    let name = pod.name_any();
    let done = if pod.metadata.deletion_timestamp.is_some() {
        let at_once = DeleteParams::default().grace_period(0);
        pods.delete(&name, &at_once).await.map(drop)
    } else if is_ready(&pod) {
        return;
    } else {
        let condition = json!({"type": "Ready", "status": "True"});
        let status = json!({"status": {"phase": "Running", "conditions": [condition]}});
        let (parameters, patch) = (PatchParams::default(), Patch::Strategic(status));
        pods.patch_status(&name, &parameters, &patch)
            .await
            .map(drop)
    };
    // A late event may be about a deleted pod.
    if let Err(error) = done
        && !matches!(&error, kube::Error::Api(status) if status.code == 404)
    {
        panic!("{name}: {error}");
    }
}

/// Answers for every pod that is bound to the simulated node.
async fn answer(pods: Api<Pod>) {
    let here = WatchParams::default().fields(&format!("spec.nodeName={NODE}"));
    let each = |event| async {
        if let WatchEvent::Added(pod) | WatchEvent::Modified(pod) = event {
            answer_for(&pods, pod).await;
        }
        Ok(())
    };
    // An apiserver ends a watch after some minutes.
    loop {
        let events = pods.watch(&here, "0").await.unwrap();
        let ended = events.try_for_each_concurrent(None, each).await;
        ended.unwrap();
    }
}

/// A pod for the simulated node.
fn pod_here(name: &str) -> Pod {
    let mut pod = pod(name);
    let spec = pod.spec.as_mut().unwrap();
    spec.node_selector = parsed(json!({"bench": NODE}));
    spec.tolerations = parsed(json!([{"operator": "Exists"}]));
    pod
}

impl Paper {
    pub async fn new(client: &Client) -> Paper {
        let (namespaces, nodes) = (Api::all(client.clone()), Api::all(client.clone()));
        let namespace: Namespace = parsed(json!({"metadata": {"name": NODE}}));
        let made = PostParams::default();
        namespaces.create(&made, &namespace).await.unwrap();
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NODE);
        while accounts.get_opt("default").await.unwrap().is_none() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let room = json!({"cpu": "1", "memory": "1Gi", "pods": "250"});
        let node: Node = parsed(json!({
            "metadata": {"name": NODE, "labels": {"bench": NODE}},
            "spec": {"taints": [{"key": "bench", "value": NODE, "effect": "NoSchedule"}]}}));
        nodes.create(&made, &node).await.unwrap();
        let ready = json!({"type": "Ready", "status": "True"});
        let status =
            json!({"status": {"capacity": room, "allocatable": room, "conditions": [ready]}});
        let patch = Patch::Strategic(status);
        let parameters = PatchParams::default();
        let patched = nodes.patch_status(NODE, &parameters, &patch);
        patched.await.unwrap();
        let pods: Api<Pod> = Api::namespaced(client.clone(), NODE);
        let agent = tokio::spawn(answer(pods.clone()));
        Paper {
            namespaces,
            pods,
            nodes,
            agent,
        }
    }

    /// Measures one pod from its creation to its deletion.
    pub async fn life(&self, name: &str) -> Life {
        let start = create_all(&self.pods, &[pod_here(name)]).await;
        let end = delete(&self.pods, &[name.to_owned()]).await;
        Life {
            start: start.as_secs_f64(),
            end: end.as_secs_f64(),
        }
    }

    /// Returns the seconds from the creation of these pods until a watcher sees that all are ready.
    pub async fn burst(&self, names: &[String]) -> f64 {
        let pods: Vec<Pod> = names.iter().map(|name| pod_here(name)).collect();
        let took = create_all(&self.pods, &pods).await.as_secs_f64();
        delete(&self.pods, names).await;
        took
    }

    pub async fn end(self) {
        self.agent.abort();
        let parameters = DeleteParams::default();
        self.nodes.delete(NODE, &parameters).await.unwrap();
        self.namespaces.delete(NODE, &parameters).await.unwrap();
    }
}
