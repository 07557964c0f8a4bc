//! The API of an agent without an apiserver, which runs static pods only. Writes are dropped.

use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::certificates::v1beta1::{ClusterTrustBundle, PodCertificateRequest};
use k8s_openapi::api::core::v1::{ConfigMap, Event, Pod, Secret, Service, ServiceAccount};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::api::storage::v1::CSIDriver;
use serde_json::Value;

use holdfast_core::volume::resize::Grown;
use holdfast_core::volume::resize::Resize;
use holdfast_kubeapi::objects::{Following, OnChange};
use holdfast_kubeapi::pods::{
    ApiFailure, Attachment, Binding, CertificateFor, PodApi, Token, TokenFor,
};

/// The absent API.
pub(crate) struct NoApi;

fn none<T>() -> Result<T, ApiFailure> {
    Err(ApiFailure::NotFound(
        "this agent runs without an API (--kubeconfig is not set)".into(),
    ))
}

#[async_trait]
impl PodApi for NoApi {
    async fn patch_status(&self, _: &str, _: &str, _: &Value) -> Result<Pod, ApiFailure> {
        none()
    }

    async fn pod(&self, _: &str, _: &str) -> Result<Pod, ApiFailure> {
        none()
    }

    async fn delete(&self, _: &str, _: &str, _: &str) -> Result<(), ApiFailure> {
        none()
    }

    async fn create(&self, _: &Pod) -> Result<Pod, ApiFailure> {
        none()
    }

    async fn config_map(&self, _: &str, _: &str) -> Result<Arc<ConfigMap>, ApiFailure> {
        none()
    }

    async fn secret(&self, _: &str, _: &str) -> Result<Arc<Secret>, ApiFailure> {
        none()
    }

    async fn service_account(&self, _: &str, _: &str) -> Result<ServiceAccount, ApiFailure> {
        none()
    }

    async fn token(&self, _: TokenFor<'_>) -> Result<Token, ApiFailure> {
        none()
    }

    async fn claimed(&self, _: &str, _: &str) -> Result<Binding, ApiFailure> {
        none()
    }

    async fn publish_resize(&self, _: &Grown, _: Resize<'_>) -> Result<(), ApiFailure> {
        none()
    }

    async fn device_claim(&self, _: &str, _: &str) -> Result<ResourceClaim, ApiFailure> {
        none()
    }

    async fn csi_driver(&self, _: &str) -> Result<Option<CSIDriver>, ApiFailure> {
        Ok(None)
    }

    async fn attachment(&self, _: &str) -> Result<Attachment, ApiFailure> {
        Ok(Attachment::Awaited)
    }

    async fn trust_bundles(&self) -> Result<Vec<Arc<ClusterTrustBundle>>, ApiFailure> {
        none()
    }

    async fn request_certificate(&self, _: CertificateFor<'_>) -> Result<String, ApiFailure> {
        none()
    }

    async fn certificate(&self, _: &str, _: &str) -> Result<PodCertificateRequest, ApiFailure> {
        none()
    }

    async fn post_event(&self, event: &Event) -> Result<(), ApiFailure> {
        let about = &event.involved_object;
        tracing::info!(
            kind = about.kind,
            name = about.name,
            reason = event.reason,
            message = event.message,
            "event"
        );
        Ok(())
    }

    async fn count_event(&self, _: &str, _: &str, _: &Value) -> Result<(), ApiFailure> {
        Ok(())
    }

    async fn runtime_handler(&self, _: &str) -> Result<String, ApiFailure> {
        none()
    }

    fn follow(
        &self,
        _: &str,
        _: &BTreeSet<String>,
        _: &BTreeSet<String>,
        _: &OnChange,
    ) -> Following {
        Following::nothing()
    }

    fn services(&self) -> Option<Vec<Arc<Service>>> {
        Some(vec![])
    }
}
