//! What the control plane needs for a pod by itself: on a node that exists on paper alone, whose agent says of each pod that is
//! bound to it that it is ready, with one patch, and does nothing else.

use std::time::{Duration, Instant};

use futures::TryStreamExt as _;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use super::{create_all, delete, is_ready, pod};

const NODE: &str = "paper";

/// The node, and what says that its pods are ready. Their namespace is their own: pods of the bench's go to its node.
pub struct Paper {
    namespaces: Api<Namespace>,
    pods: Api<Pod>,
    nodes: Api<Node>,
    agent: tokio::task::JoinHandle<()>,
}

fn parsed<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

/// Says that every pod is ready, as soon as it is bound to the node.
async fn answer(pods: Api<Pod>) {
    let here = WatchParams::default().fields(&format!("spec.nodeName={NODE}"));
    let mut events = Box::pin(pods.watch(&here, "0").await.unwrap());
    while let Some(event) = events.try_next().await.unwrap() {
        let (WatchEvent::Added(pod) | WatchEvent::Modified(pod)) = event else {
            continue;
        };
        if is_ready(&pod) || pod.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let condition = json!({"type": "Ready", "status": "True"});
        let status = json!({"status": {"phase": "Running", "conditions": [condition]}});
        let (name, patch) = (pod.name_any(), Patch::Strategic(status));
        let parameters = PatchParams::default();
        pods.patch_status(&name, &parameters, &patch).await.unwrap();
    }
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
        let room = json!({"cpu": "1", "memory": "1Gi", "pods": "10"});
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

    /// Seconds from a pod's creation until a watcher sees that it is ready.
    pub async fn start(&self, name: &str) -> f64 {
        let mut pod = pod(name);
        let spec = pod.spec.as_mut().unwrap();
        spec.node_selector = parsed(json!({"bench": NODE}));
        spec.tolerations = parsed(json!([{"operator": "Exists"}]));
        spec.termination_grace_period_seconds = Some(0);
        let begun = Instant::now();
        create_all(&self.pods, &[pod]).await;
        let took = begun.elapsed().as_secs_f64();
        delete(&self.pods, &[name.to_owned()]).await;
        took
    }

    pub async fn end(self) {
        self.agent.abort();
        let parameters = DeleteParams::default();
        self.nodes.delete(NODE, &parameters).await.unwrap();
        self.namespaces.delete(NODE, &parameters).await.unwrap();
    }
}
