//! Mirror pods: how static pods are seen in the API (upstream's `pod/mirror_client.go`).

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt as _;

use crate::agent::Context;
use crate::core::fault::Fault;
use crate::core::pod;
use crate::core::pod::worker::Update;
use crate::kubeapi::pods::ApiFailure;

/// The mirror of a static pod.
fn of(pod: &Pod, node: &Node) -> Pod {
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

/// Makes sure that a static pod's mirror is there and is the right one.
pub async fn reconcile(context: &Context, update: &Update) -> Result<(), Fault> {
    let Some(node) = context.node.borrow().clone() else {
        return Err(Fault::later(
            "the Node object that owns mirrors is not known yet",
        ));
    };
    if let Some(mirror) = &update.object {
        if update.is_mirrored_by(mirror) {
            return Ok(());
        }
        remove(context, mirror).await?;
    }
    match context.api.create(&of(&update.pod, &node)).await {
        Ok(_) | Err(ApiFailure::AlreadyExists(_)) => Ok(()),
        Err(error) => Err(Fault::later(format!(
            "the mirror pod cannot be created: {error}"
        ))),
    }
}

/// Removes a mirror.
pub async fn remove(context: &Context, mirror: &Pod) -> Result<(), Fault> {
    match context
        .api
        .delete(
            &mirror.namespace().unwrap_or_default(),
            &mirror.name_any(),
            pod::uid(mirror),
        )
        .await
    {
        Ok(()) => Ok(()),
        Err(error) if error.is_gone() => Ok(()),
        Err(error) => Err(Fault::later(format!(
            "the mirror pod cannot be removed: {error}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_mirror_tells_the_pods_source_its_hash_and_when_it_was_seen() {
        let own = json!({"kubernetes.io/config.hash": "h", "kubernetes.io/config.source": "file", "kubernetes.io/config.seen": "t", "own": "x"});
        let pod = json!({"metadata": {"name": "p", "uid": "h", "annotations": own}, "spec": {"containers": []}});
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let node: Node = serde_json::from_value(json!({"metadata": {"name": "n1", "uid": "u"}}))
            .expect("a node");
        let mirror = of(&pod, &node);
        let mut expected = own;
        expected["kubernetes.io/config.mirror"] = "h".into();
        assert_eq!(json!(mirror.annotations()), expected);
        assert_eq!(mirror.owner_references()[0].uid, "u");
        assert_eq!(mirror.metadata.uid, None);
    }
}
