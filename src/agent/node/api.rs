//! The API operations for the Node: a narrow trait, and its implementation with kube.

use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::api::storage::v1::CSINode;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use holdfast_core::time::shown;
use holdfast_core::volume::csi::Drivers;
use holdfast_core::volume::migrated;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::client::code;
use holdfast_kubeapi::failure::chain;
use holdfast_kubeapi::pods::ApiFailure;

/// A change reported by the watch of the Node object.
#[derive(Debug)]
pub enum NodeChange {
    /// The object exists, in this version.
    Present(Box<Node>),
    /// The object does not exist.
    Absent,
    /// The watch was interrupted for this reason, and continues automatically.
    Interrupted(String),
}

/// Fails a request after `limit`.
pub(super) async fn within<T>(
    limit: Duration,
    request: impl Future<Output = Result<T, ApiFailure>>,
) -> Result<T, ApiFailure> {
    match tokio::time::timeout(limit, request).await {
        Ok(result) => result,
        Err(_) => Err(ApiFailure::Timeout(format!(
            "the apiserver did not answer within {}",
            shown(limit)
        ))),
    }
}

/// API operations for the node's objects.
#[async_trait]
pub trait NodeApi: Send + Sync + 'static {
    /// Watches the Node.
    fn watch(&self, name: &str) -> BoxStream<'static, NodeChange>;
    /// Returns the Node, if it exists.
    async fn get(&self, name: &str) -> Result<Option<Node>, ApiFailure>;
    /// Creates the Node.
    async fn create(&self, node: &Node) -> Result<Node, ApiFailure>;
    /// Patches labels and annotations (merge patch).
    async fn patch(&self, name: &str, patch: &Value) -> Result<Node, ApiFailure>;
    /// Patches the status (strategic merge patch).
    async fn patch_status(&self, name: &str, patch: &Value) -> Result<Node, ApiFailure>;
    /// Writes the node's CSINode: its drivers, and the in-tree volume types that are migrated to drivers. Replaces the
    /// CSINode of an earlier Node of the same name.
    async fn report_drivers(&self, node: &Node, drivers: &Drivers) -> Result<(), ApiFailure>;
    /// Creates or renews the Lease.
    async fn renew(&self, lease: &Lease) -> Result<(), ApiFailure>;
    /// Deletes the node's ResourceSlices, of one driver or of all.
    async fn delete_slices(&self, node: &str, driver: Option<&str>) -> Result<(), ApiFailure>;
}

/// [`NodeApi`] over a kube client.
pub(crate) struct KubeNodes(pub Client);

#[async_trait]
impl NodeApi for KubeNodes {
    fn watch(&self, name: &str) -> BoxStream<'static, NodeChange> {
        let changes = Api::<Node>::all(self.0.clone()).watch_object(name);
        let change = |result| match result {
            Ok(Some(Ok(node))) => NodeChange::Present(Box::new(node)),
            Ok(Some(Err(error))) => NodeChange::Interrupted(chain(&error)),
            Ok(None) => NodeChange::Absent,
            Err(error) => NodeChange::Interrupted(chain(&error)),
        };
        changes.map(change).boxed()
    }

    async fn get(&self, name: &str) -> Result<Option<Node>, ApiFailure> {
        Ok(Api::<Node>::all(self.0.clone()).get_opt(name).await?)
    }

    async fn create(&self, node: &Node) -> Result<Node, ApiFailure> {
        Ok(Api::all(self.0.clone())
            .create(&PostParams::default(), node)
            .await?)
    }

    async fn patch(&self, name: &str, patch: &Value) -> Result<Node, ApiFailure> {
        Ok(Api::<Node>::all(self.0.clone())
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await?)
    }

    async fn patch_status(&self, name: &str, patch: &Value) -> Result<Node, ApiFailure> {
        Ok(Api::<Node>::all(self.0.clone())
            .patch_status(name, &PatchParams::default(), &Patch::Strategic(patch))
            .await?)
    }

    async fn report_drivers(&self, node: &Node, drivers: &Drivers) -> Result<(), ApiFailure> {
        let api: Api<CSINode> = Api::all(self.0.clone());
        let name = node.name_any();
        let migrated = migrated::PLUGINS.join(",");
        let mut found = api.get_opt(&name).await?;
        let is_owner = |o: &OwnerReference| {
            o.kind == "Node" && o.name == name && Some(&o.uid) == node.metadata.uid.as_ref()
        };
        if let Some(other) = found.take_if(|n| !n.owner_references().iter().any(is_owner)) {
            let other = Preconditions {
                uid: other.uid(),
                ..Preconditions::default()
            };
            api.delete(&name, &DeleteParams::default().preconditions(other))
                .await?;
        }
        let Some(mut known) = found else {
            let owner =
                json!({"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.uid()});
            let metadata = json!({"name": name, "ownerReferences": [owner], "annotations": {migrated::ANNOTATION: migrated}});
            let fresh = json!({"metadata": metadata, "spec": {"drivers": drivers.merged(&[])}});
            let fresh: CSINode =
                serde_json::from_value(fresh).map_err(|e| ApiFailure::Other(e.to_string()))?;
            api.create(&PostParams::default(), &fresh).await?;
            return Ok(());
        };
        let wanted = drivers.merged(&known.spec.drivers);
        let annotated = known.annotations().get(migrated::ANNOTATION) == Some(&migrated);
        if known.spec.drivers != wanted || !annotated {
            known.spec.drivers = wanted;
            known
                .annotations_mut()
                .insert(migrated::ANNOTATION.into(), migrated);
            api.replace(&name, &PostParams::default(), &known).await?;
        }
        Ok(())
    }

    async fn delete_slices(&self, node: &str, driver: Option<&str>) -> Result<(), ApiFailure> {
        let fields = match driver {
            Some(driver) => format!("spec.driver={driver},spec.nodeName={node}"),
            None => format!("spec.nodeName={node}"),
        };
        Api::<ResourceSlice>::all(self.0.clone())
            .delete_collection(
                &DeleteParams::default(),
                &ListParams::default().fields(&fields),
            )
            .await?;
        Ok(())
    }

    async fn renew(&self, lease: &Lease) -> Result<(), ApiFailure> {
        let api: Api<Lease> = Api::namespaced(self.0.clone(), "kube-node-lease");
        let name = lease.name_any();
        // A merge patch renews without a previous read.
        match api
            .patch(
                &name,
                &PatchParams::default(),
                &Patch::Merge(&json!({"spec": lease.spec})),
            )
            .await
        {
            Err(error) if code(&error) == Some(404) => {
                api.create(&PostParams::default(), lease).await?;
                Ok(())
            }
            other => Ok(other.map(|_| ())?),
        }
    }
}
