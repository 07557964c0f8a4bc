//! What the agent asks of the API for its Node: a narrow trait, and the real thing over kube.

use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver};
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::watcher::watch_object;
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::core::time::shown;
use crate::kubeapi::client::{chain, code};
use crate::kubeapi::pods::ApiFailure;

/// What a watch tells of the Node object.
#[derive(Debug)]
pub enum NodeChange {
    /// It is there, in this version.
    Present(Box<Node>),
    /// There is none.
    Absent,
    /// The watch was interrupted, for this reason; it goes on by itself.
    Interrupted(String),
}

/// Gives a request up after `limit`.
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

/// The API's side of the node.
#[async_trait]
pub trait NodeApi: Send + Sync + 'static {
    /// Each version of the node from now on.
    fn watch(&self, name: &str) -> BoxStream<'static, NodeChange>;
    /// The node, if it exists.
    async fn get(&self, name: &str) -> Result<Option<Node>, ApiFailure>;
    /// Creates it.
    async fn create(&self, node: &Node) -> Result<Node, ApiFailure>;
    /// Patches labels and annotations (merge).
    async fn patch(&self, name: &str, patch: &Value) -> Result<Node, ApiFailure>;
    /// Patches its status (strategic merge).
    async fn patch_status(&self, name: &str, patch: &Value) -> Result<Node, ApiFailure>;
    /// Makes the node's CSINode say which drivers there are.
    async fn report_drivers(
        &self,
        node: &Node,
        drivers: &[CSINodeDriver],
    ) -> Result<(), ApiFailure>;
    /// Creates or renews its lease.
    async fn renew(&self, lease: &Lease) -> Result<(), ApiFailure>;
}

/// The node's side of the API over kube.
pub struct KubeNodes(pub Client);

#[async_trait]
impl NodeApi for KubeNodes {
    fn watch(&self, name: &str) -> BoxStream<'static, NodeChange> {
        let changes = watch_object(Api::<Node>::all(self.0.clone()), name);
        let change = |result| match result {
            Ok(Some(node)) => NodeChange::Present(Box::new(node)),
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

    async fn report_drivers(
        &self,
        node: &Node,
        drivers: &[CSINodeDriver],
    ) -> Result<(), ApiFailure> {
        let api: Api<CSINode> = Api::all(self.0.clone());
        let name = node.name_any();
        let Some(mut known) = api.get_opt(&name).await? else {
            let owner =
                json!({"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.uid()});
            let fresh = json!({"metadata": {"name": name, "ownerReferences": [owner]}, "spec": {"drivers": drivers}});
            let fresh: CSINode =
                serde_json::from_value(fresh).map_err(|e| ApiFailure::Other(e.to_string()))?;
            api.create(&PostParams::default(), &fresh).await?;
            return Ok(());
        };
        if known.spec.drivers != drivers {
            known.spec.drivers = drivers.to_vec();
            api.replace(&name, &PostParams::default(), &known).await?;
        }
        Ok(())
    }

    async fn renew(&self, lease: &Lease) -> Result<(), ApiFailure> {
        let api: Api<Lease> = Api::namespaced(self.0.clone(), "kube-node-lease");
        let name = lease.name_any();
        // A merge patch renews without reading first.
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
