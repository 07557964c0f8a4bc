//! The controllers of workloads and the scheduler with only a control plane. No agent runs: the test writes the status of
//! nodes and pods.

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

use crate::jobs::Plane;

fn template(app: &str) -> Value {
    json!({"metadata": {"labels": {"app": app}}, "spec": {"containers": [
        {"name": "c", "image": "i:1", "resources": {"requests": {"cpu": "1"}}}]}})
}

fn spec(app: &str, replicas: i32) -> Value {
    json!({"replicas": replicas, "selector": {"matchLabels": {"app": app}}, "template": template(app)})
}

async fn patch<K>(plane: &Plane, name: &str, patch: Value)
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned,
    K::DynamicType: Default,
{
    let (api, parameters) = (plane.api::<K>(), PatchParams::default());
    api.patch(name, &parameters, &Patch::Merge(patch))
        .await
        .unwrap();
}

/// Waits until the pods that are not being deleted are as `is_expected` wants them.
async fn pods(plane: &Plane, what: &str, is_expected: impl Fn(&[Pod]) -> bool) -> Vec<Pod> {
    plane
        .wait(what, || async {
            let list = plane.api::<Pod>().list(&ListParams::default()).await;
            let mut pods = list.unwrap().items;
            pods.retain(|pod| pod.metadata.deletion_timestamp.is_none());
            is_expected(&pods).then_some(pods)
        })
        .await
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Why the pods are unschedulable.
fn refusals(pods: &[Pod]) -> Vec<String> {
    let conditions = pods
        .iter()
        .filter_map(|p| p.status.as_ref()?.conditions.as_ref());
    let refused = conditions
        .flatten()
        .filter(|c| c.type_ == "PodScheduled" && c.status == "False");
    refused.filter_map(|c| c.message.clone()).collect()
}

/// Creates a node, or sets its number of processors.
async fn node(plane: &Plane, name: &str, cpu: &str) {
    let nodes: Api<Node> = Api::all(plane.client.clone());
    let node = serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
    let _ = nodes.create(&PostParams::default(), &node).await;
    let room = json!({"cpu": cpu, "memory": "4Gi", "pods": "10"});
    let ready = json!({"type": "Ready", "status": "True"});
    let status = json!({"status": {"capacity": room, "allocatable": room, "conditions": [ready]}});
    let parameters = PatchParams::default();
    let patch = Patch::Strategic(status);
    nodes.patch_status(name, &parameters, &patch).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_set_adopts_releases_and_orphans_pods() {
    let plane = Plane::start().await;
    let free = json!({"metadata": {"name": "free", "labels": {"app": "a"}}, "spec": template("a")["spec"]});
    plane.create::<Pod>(free).await;
    let set = json!({"metadata": {"name": "s"}, "spec": spec("a", 2)});
    let set: ReplicaSet = plane.create(set).await;
    let uid = set.uid().unwrap();
    let owned = |pods: &[Pod]| {
        let owners = |pod: &&Pod| pod.owner_references().iter().any(|o| o.uid == uid);
        pods.iter()
            .filter(owners)
            .map(|p| p.name_any())
            .collect::<Vec<_>>()
    };
    let adopted = |pods: &[Pod]| owned(pods).len() == 2 && owned(pods).contains(&"free".into());
    pods(&plane, "one pod adopted, one created", adopted).await;
    patch::<Pod>(
        &plane,
        "free",
        json!({"metadata": {"labels": {"app": "b"}}}),
    )
    .await;
    let released = |pods: &[Pod]| owned(pods).len() == 2 && !owned(pods).contains(&"free".into());
    pods(&plane, "a released pod is replaced", released).await;
    // A pod without a controller may be adopted later, when its labels match.
    patch::<Pod>(
        &plane,
        "free",
        json!({"metadata": {"labels": {"app": "a"}}}),
    )
    .await;
    pods(&plane, "an adopted pod makes another one surplus", |pods| {
        pods.len() == 2 && owned(pods).len() == 2
    })
    .await;
    plane
        .wait_for_events("s", &["SuccessfulCreate", "SuccessfulDelete"])
        .await;
    let sets = plane.api::<ReplicaSet>();
    sets.delete("s", &DeleteParams::orphan()).await.unwrap();
    let orphaned =
        |pods: &[Pod]| pods.len() == 2 && pods.iter().all(|p| p.owner_references().is_empty());
    pods(&plane, "the pods have no owner", orphaned).await;
    plane
        .wait("the set is deleted", || async {
            let set = sets.get_opt("s").await.unwrap();
            set.is_none().then_some(())
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_wait_for_room_and_are_deleted_with_their_deployment() {
    let plane = Plane::start().await;
    let deployment = json!({"metadata": {"name": "d"}, "spec": spec("d", 3)});
    plane.create::<Deployment>(deployment).await;
    let no_nodes = ["no nodes available to schedule pods"; 3];
    pods(&plane, "pods without nodes", |pods| {
        refusals(pods) == no_nodes
    })
    .await;
    node(&plane, "one", "2").await;
    let bound = |pods: &[Pod]| pods.iter().filter(|p| node_of(p) == Some("one")).count();
    let full = pods(&plane, "two pods fit", |pods| {
        let refused = refusals(pods);
        bound(pods) == 2 && refused.len() == 1 && refused[0].contains("1 Insufficient cpu")
    })
    .await;
    // A terminated pod releases its resources. The set creates another pod, and two compete for the place.
    let ended = full.iter().find(|p| node_of(p).is_some()).unwrap();
    plane.finish_pod(ended, "Failed", 1).await;
    let running = |pods: &[Pod]| {
        let running = pods.iter().filter(|p| p.name_any() != ended.name_any());
        running.filter(|p| node_of(p).is_some()).count()
    };
    pods(&plane, "a pod takes the place", |pods| running(pods) == 2).await;
    node(&plane, "one", "4").await;
    pods(&plane, "all pods fit on the larger node", |pods| {
        running(pods) == 3
    })
    .await;
    patch::<Deployment>(
        &plane,
        "d",
        json!({"spec": {"strategy": {"type": "Recreate", "rollingUpdate": null},
        "template": {"metadata": {"labels": {"new": "1"}}}}}),
    )
    .await;
    // Bound pods wait for their agent, so the Recreate waits for the end of the old pods.
    let all = plane.api::<Pod>();
    let terminating = |pod: &&Pod| pod.metadata.deletion_timestamp.is_some();
    let old = plane
        .wait("old pods are deleted", || async {
            let list = all.list(&ListParams::default()).await.unwrap().items;
            let old: Vec<Pod> = list.iter().filter(terminating).cloned().collect();
            (old.len() >= 3).then_some(old)
        })
        .await;
    for pod in old {
        let at_once = DeleteParams::default().grace_period(0);
        let _ = all.delete(&pod.name_any(), &at_once).await;
    }
    let renewed = |pods: &[Pod]| {
        let new = pods.iter().filter(|p| p.labels().contains_key("new"));
        new.filter(|p| node_of(p).is_some()).count() == 3
    };
    pods(&plane, "new pods after the old ones", renewed).await;
    let deployments = plane.api::<Deployment>();
    let background = DeleteParams::background();
    deployments.delete("d", &background).await.unwrap();
    plane
        .wait("its dependents are deleted", || async {
            let sets = plane.api::<ReplicaSet>().list(&ListParams::default()).await;
            let list = all.list(&ListParams::default()).await.unwrap().items;
            let ended = list.iter().all(|p| terminating(&p));
            (sets.unwrap().items.is_empty() && ended).then_some(())
        })
        .await;
}
