//! Mirror pods: the objects that show static pods in the API (upstream's `pkg/kubelet/pod/mirror_client.go`).

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt as _;

use crate::node::OwnNode;
use holdfast_core::backoff::Doubling;
use holdfast_core::fault::Fault;
use holdfast_core::pod;
use holdfast_core::pod::worker::Update;
use holdfast_kubeapi::pods::{ApiFailure, PodApi};

/// Back-off while the apiserver does not answer.
const RETRY: Doubling = Doubling::new(Duration::from_millis(500), Duration::from_secs(10));

/// Builds the mirror of a static pod.
fn mirror_of(pod: &Pod, node: &Node) -> Pod {
    let mut mirror = pod.clone();
    let hash = pod
        .annotations()
        .get(pod::HASH)
        .cloned()
        .unwrap_or_default();
    mirror
        .metadata
        .annotations
        .get_or_insert_default()
        .insert(pod::MIRROR.into(), hash);
    mirror.metadata.uid = None;
    mirror.metadata.resource_version = None;
    mirror.metadata.owner_references = Some(vec![OwnerReference {
        api_version: "v1".into(),
        kind: "Node".into(),
        name: node.name_any(),
        uid: node.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: None,
    }]);
    mirror.status = None;
    mirror
}

/// Creates the mirror of a static pod, and replaces a mirror of another manifest.
///
/// While the Node object is unknown or the apiserver does not answer, this waits and retries as soon as either changes:
/// static pods may run before their apiserver does, which is not an error. `on_wait` receives the reason of the wait.
pub async fn reconcile(
    api: &dyn PodApi,
    node: &OwnNode,
    update: &Update,
    on_wait: impl Fn(&str),
) -> Result<(), Fault> {
    let (mut recovery, mut pauses) = (api.recovery(), RETRY);
    let mut node = node.subscribe();
    loop {
        let owner = node.borrow_and_update().clone();
        let reason = match owner {
            None => "waiting for the Node object, which owns mirror pods".to_owned(),
            Some(owner) => match replace(api, update, &owner).await {
                Ok(()) => return Ok(()),
                Err(error) if error.is_answer() => {
                    let why = format!("the mirror pod cannot be created: {error}");
                    return Err(Fault::later(why));
                }
                Err(error) => {
                    format!("waiting for the apiserver to create the mirror pod: {error}")
                }
            },
        };
        tracing::debug!(reason, "the mirror pod is delayed");
        on_wait(&reason);
        let is_unknown = node.borrow().is_none();
        tokio::select! {
            // The order is fixed, so that a simulated run replays exactly.
            biased;
            () = recovery.next() => pauses.reset(),
            // The caller owns the sender. A known Node changes with every heartbeat, which must not cause a retry.
            _ = node.changed(), if is_unknown => {}
            () = tokio::time::sleep(pauses.pause()) => {}
        }
    }
}

async fn replace(api: &dyn PodApi, update: &Update, node: &Node) -> Result<(), ApiFailure> {
    if let Some(mirror) = &update.object {
        if update.is_mirrored_by(mirror) {
            return Ok(());
        }
        delete(api, mirror).await?;
    }
    match api.create(&mirror_of(&update.pod, node)).await {
        Ok(_) | Err(ApiFailure::AlreadyExists(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

async fn delete(api: &dyn PodApi, mirror: &Pod) -> Result<(), ApiFailure> {
    let (namespace, name) = (mirror.namespace().unwrap_or_default(), mirror.name_any());
    let deleted = api.delete(&namespace, &name, pod::uid(mirror));
    match deleted.await {
        Err(error) if !error.is_gone() => Err(error),
        _ => Ok(()),
    }
}

/// Deletes a mirror.
pub async fn remove(api: &dyn PodApi, mirror: &Pod) -> Result<(), Fault> {
    let deleted = delete(api, mirror).await;
    deleted.map_err(|error| Fault::later(format!("the mirror pod cannot be removed: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_mirror_has_the_source_hash_and_first_seen_time_of_its_pod() {
        let own = json!({"kubernetes.io/config.hash": "h", "kubernetes.io/config.source": "file", "kubernetes.io/config.seen": "t", "own": "x"});
        let pod = json!({"metadata": {"name": "p", "uid": "h", "annotations": own}, "spec": {"containers": []}});
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let node: Node = serde_json::from_value(json!({"metadata": {"name": "n1", "uid": "u"}}))
            .expect("a node");
        let mirror = mirror_of(&pod, &node);
        let mut expected = own;
        expected["kubernetes.io/config.mirror"] = "h".into();
        assert_eq!(json!(mirror.annotations()), expected);
        assert_eq!(mirror.owner_references()[0].uid, "u");
        assert_eq!(mirror.metadata.uid, None);
    }
}
