//! The API, or its last answers while the apiserver does not answer.

use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;
use jiff::Timestamp;
use k8s_openapi::api::certificates::v1beta1::{ClusterTrustBundle, PodCertificateRequest};
use k8s_openapi::api::core::v1::{ConfigMap, Event, Pod, Secret, Service, ServiceAccount};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::api::storage::v1::CSIDriver;
use kube::ResourceExt as _;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Keeper;
use super::Kind;
use holdfast_core::volume::resize::Grown;
use holdfast_core::volume::resize::Resize;
use holdfast_kubeapi::answers::Recovery;
use holdfast_kubeapi::objects::{Following, OnChange};
use holdfast_kubeapi::pods::{
    ApiFailure, Attachment, Binding, CertificateFor, PodApi, Token, TokenFor,
};

/// Calls the API and seals its answers. If the apiserver cannot be reached, returns the sealed answer.
pub struct SealedApi {
    api: Arc<dyn PodApi>,
    keeper: Keeper,
}

#[derive(Serialize, Deserialize)]
struct SealedToken {
    text: String,
    expires: Timestamp,
}

impl SealedApi {
    /// Wraps an API.
    #[must_use]
    pub fn new(api: Arc<dyn PodApi>, keeper: Keeper) -> SealedApi {
        SealedApi { api, keeper }
    }

    /// Seals an answer. If there is none, returns the previous one.
    fn settle<T: Serialize + DeserializeOwned>(
        &self,
        kind: Kind,
        name: &str,
        answer: Result<T, ApiFailure>,
    ) -> Result<T, ApiFailure> {
        match answer {
            Ok(value) => {
                self.keeper.put(kind, name, &value);
                Ok(value)
            }
            Err(error) if error.is_gone() || matches!(error, ApiFailure::Conflict(_)) => {
                self.keeper.remove(kind, name);
                Err(error)
            }
            // A refusal counts. Only a missing answer is replaced by a sealed one.
            Err(error) if error.is_answer() => Err(error),
            Err(error) => self.keeper.get(kind, name).ok_or(error),
        }
    }
}

#[async_trait]
impl PodApi for SealedApi {
    fn recovery(&self) -> Recovery {
        self.api.recovery()
    }

    async fn patch_status(
        &self,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> Result<Pod, ApiFailure> {
        self.api.patch_status(namespace, name, patch).await
    }

    async fn pod(&self, namespace: &str, name: &str) -> Result<Pod, ApiFailure> {
        self.api.pod(namespace, name).await
    }

    async fn delete(&self, namespace: &str, name: &str, uid: &str) -> Result<(), ApiFailure> {
        self.api.delete(namespace, name, uid).await
    }

    async fn create(&self, pod: &Pod) -> Result<Pod, ApiFailure> {
        self.api.create(pod).await
    }

    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<ConfigMap>, ApiFailure> {
        let answer = self
            .api
            .config_map(namespace, name)
            .await
            .map(Arc::unwrap_or_clone);
        self.settle(Kind::ConfigMaps, &format!("{namespace}/{name}"), answer)
            .map(Arc::new)
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Secret>, ApiFailure> {
        let answer = self
            .api
            .secret(namespace, name)
            .await
            .map(Arc::unwrap_or_clone);
        self.settle(Kind::Secrets, &format!("{namespace}/{name}"), answer)
            .map(Arc::new)
    }

    async fn service_account(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<ServiceAccount, ApiFailure> {
        self.api.service_account(namespace, name).await
    }

    async fn token(&self, request: TokenFor<'_>) -> Result<Token, ApiFailure> {
        // A sealed token is returned even if it has expired: the pod's containers wait for its file.
        let name = format!(
            "{}/{}",
            request.pod.uid().unwrap_or_default(),
            request.audience
        );
        let answer = self.api.token(request).await.map(|t| SealedToken {
            text: t.text,
            expires: t.expires,
        });
        self.settle(Kind::Tokens, &name, answer).map(|t| Token {
            text: t.text,
            expires: t.expires,
        })
    }

    async fn claimed(&self, namespace: &str, name: &str) -> Result<Binding, ApiFailure> {
        let answer = self.api.claimed(namespace, name).await;
        self.settle(Kind::Claims, &format!("{namespace}/{name}"), answer)
    }

    async fn publish_resize(&self, grown: &Grown, step: Resize<'_>) -> Result<(), ApiFailure> {
        self.api.publish_resize(grown, step).await
    }

    /// Not sealed: only the apiserver knows whether a claim still belongs to the pod.
    async fn device_claim(&self, namespace: &str, name: &str) -> Result<ResourceClaim, ApiFailure> {
        self.api.device_claim(namespace, name).await
    }

    async fn csi_driver(&self, name: &str) -> Result<Option<CSIDriver>, ApiFailure> {
        let answer = self.api.csi_driver(name).await;
        self.settle(Kind::Handlers, &format!("csi/{name}"), answer)
    }

    async fn attachment(&self, name: &str) -> Result<Attachment, ApiFailure> {
        self.api.attachment(name).await
    }

    async fn trust_bundles(&self) -> Result<Vec<Arc<ClusterTrustBundle>>, ApiFailure> {
        self.api.trust_bundles().await
    }

    async fn request_certificate(&self, request: CertificateFor<'_>) -> Result<String, ApiFailure> {
        self.api.request_certificate(request).await
    }

    async fn certificate(
        &self,
        namespace: &str,
        request: &str,
    ) -> Result<PodCertificateRequest, ApiFailure> {
        self.api.certificate(namespace, request).await
    }

    async fn post_event(&self, event: &Event) -> Result<(), ApiFailure> {
        self.api.post_event(event).await
    }

    async fn count_event(
        &self,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> Result<(), ApiFailure> {
        self.api.count_event(namespace, name, patch).await
    }

    async fn runtime_handler(&self, class: &str) -> Result<String, ApiFailure> {
        let answer = self.api.runtime_handler(class).await;
        self.settle(Kind::Handlers, class, answer)
    }

    fn follow(
        &self,
        namespace: &str,
        config_maps: &BTreeSet<String>,
        secrets: &BTreeSet<String>,
        on_change: &OnChange,
    ) -> Following {
        self.api.follow(namespace, config_maps, secrets, on_change)
    }

    fn services(&self) -> Option<Vec<Arc<Service>>> {
        self.api.services().or_else(|| {
            Some(self.keeper.last_services().to_vec()).filter(|_| self.keeper.is_offline())
        })
    }
}
