//! The API calls that the agent needs for its pods: a narrow trait, and its implementation over kube.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::certificates::v1beta1::{
    ClusterTrustBundle, PodCertificateRequest, PodCertificateRequestSpec,
};
use k8s_openapi::api::core::v1::{
    ConfigMap, Event, Node, PersistentVolume, PersistentVolumeClaim, Pod, Secret, Service,
    ServiceAccount,
};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::answers::{Answers, Recovery};
pub use super::failure::ApiFailure;
use super::objects::{Following, OnChange, Watched};
use super::{Api, Cache};
use holdfast_core::volume::certificates::CertificateSource;
use holdfast_core::volume::resize::Grown;
use holdfast_core::volume::resize::{self, Resize};

/// A service-account token. Has no `Debug`, so that it is never logged.
#[derive(Clone)]
pub struct Token {
    /// The token.
    pub text: String,
    /// When it expires.
    pub expires: Timestamp,
}

/// Maximum age of a token; an older one is requested again.
const MAX_TOKEN_AGE: SignedDuration = SignedDuration::from_hours(24);

/// A token and the time of its issue.
#[derive(Clone)]
pub struct Issued {
    /// The token.
    pub token: Token,
    /// When it was issued.
    pub at: Timestamp,
}

impl Issued {
    /// Whether the token need not be requested again yet (`requiresRefresh` in `pkg/kubelet/token/token_manager.go`). A
    /// token is fresh for four fifths of the granted lifetime, which may differ from the requested one, and at most for
    /// a day.
    #[must_use]
    pub fn is_fresh(&self, now: Timestamp) -> bool {
        let granted = self.token.expires.duration_since(self.at);
        let age = now.duration_since(self.at);
        age < granted * 4 / 5 && age < MAX_TOKEN_AGE
    }
}

/// A request for a pod's token.
#[derive(Debug, Clone, Copy)]
pub struct TokenFor<'a> {
    /// The pod to which the token is bound.
    pub pod: &'a Pod,
    /// The audience; empty for the apiserver.
    pub audience: &'a str,
    /// The requested lifetime in seconds.
    pub seconds: i64,
    /// The uid that the pod's service account must have; `None` for any.
    pub account_uid: Option<&'a str>,
}

/// A request for a pod's certificate.
#[derive(Debug, Clone, Copy)]
pub struct CertificateFor<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// The pod's node.
    pub node: &'a Node,
    /// Signer, maximum lifetime and annotations for the signer.
    pub source: &'a CertificateSource,
    /// A PKCS#10 request, DER, signed with the pod's key.
    pub request: &'a [u8],
}

/// A claim, and its volume if the claim is bound.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Binding {
    /// The claim.
    pub claim: PersistentVolumeClaim,
    /// The volume; `None` until the claim is bound.
    pub volume: Option<PersistentVolume>,
}

/// gRPC status of a driver that can attach no more volumes to a node.
const RESOURCE_EXHAUSTED: i32 = 8;

/// The progress of attaching a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attachment {
    /// The attacher has not attached the volume yet.
    Awaited,
    /// The VolumeAttachment is being deleted: the attacher detaches the volume, or is about to.
    Detaching,
    /// The volume is attached; the map is the attacher's metadata for the node.
    Done(HashMap<String, String>),
    /// Attaching failed; the attacher retries.
    Failed {
        /// The attacher's message.
        message: String,
        /// The driver can attach no more volumes to this node.
        is_full: bool,
    },
}

impl From<Option<VolumeAttachment>> for Attachment {
    fn from(found: Option<VolumeAttachment>) -> Attachment {
        let Some(found) = found else {
            return Attachment::Awaited;
        };
        // During its deletion, its status is still `attached`.
        if found.metadata.deletion_timestamp.is_some() {
            return Attachment::Detaching;
        }
        let status = found.status.unwrap_or_default();
        if status.attached {
            let metadata = status.attachment_metadata.unwrap_or_default();
            return Attachment::Done(metadata.into_iter().collect());
        }
        match status.attach_error {
            Some(error) => Attachment::Failed {
                message: error.message.unwrap_or_default(),
                is_full: error.error_code == Some(RESOURCE_EXHAUSTED),
            },
            None => Attachment::Awaited,
        }
    }
}

/// The API calls for pods.
#[async_trait]
pub trait PodApi: Send + Sync + 'static {
    /// Patches a pod's status (strategic merge).
    async fn patch_status(
        &self,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> Result<Pod, ApiFailure>;
    /// Gets a pod; not cached.
    async fn pod(&self, namespace: &str, name: &str) -> Result<Pod, ApiFailure>;
    /// Deletes a pod at once, if it still has this uid.
    async fn delete(&self, namespace: &str, name: &str, uid: &str) -> Result<(), ApiFailure>;
    /// Reports when the apiserver answers again after silence.
    fn recovery(&self) -> Recovery {
        Recovery::never()
    }
    /// Creates a (mirror) pod.
    async fn create(&self, pod: &Pod) -> Result<Pod, ApiFailure>;
    /// Gets a ConfigMap.
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<ConfigMap>, ApiFailure>;
    /// Gets a Secret.
    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Secret>, ApiFailure>;
    /// Gets a service account; not cached.
    async fn service_account(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<ServiceAccount, ApiFailure>;
    /// Requests a token that is bound to a pod.
    async fn token(&self, request: TokenFor<'_>) -> Result<Token, ApiFailure>;
    /// Gets a claim and its volume; not cached.
    async fn claimed(&self, namespace: &str, name: &str) -> Result<Binding, ApiFailure>;
    /// Publishes a step of a claim's resize in the claim's status.
    async fn publish_resize(&self, grown: &Grown, step: Resize<'_>) -> Result<(), ApiFailure>;
    /// Gets a ResourceClaim; not cached.
    async fn device_claim(&self, namespace: &str, name: &str) -> Result<ResourceClaim, ApiFailure>;
    /// Gets the CSIDriver object of a storage driver, if it exists.
    async fn csi_driver(&self, name: &str) -> Result<Option<CSIDriver>, ApiFailure>;
    /// Gets the state of a VolumeAttachment.
    async fn attachment(&self, name: &str) -> Result<Attachment, ApiFailure>;
    /// Lists the ClusterTrustBundles.
    async fn trust_bundles(&self) -> Result<Vec<Arc<ClusterTrustBundle>>, ApiFailure>;
    /// Creates a PodCertificateRequest and returns its name.
    async fn request_certificate(&self, request: CertificateFor<'_>) -> Result<String, ApiFailure>;
    /// Gets a PodCertificateRequest.
    async fn certificate(
        &self,
        namespace: &str,
        request: &str,
    ) -> Result<PodCertificateRequest, ApiFailure>;
    /// Posts an event.
    async fn post_event(&self, event: &Event) -> Result<(), ApiFailure>;
    /// Patches an event's count.
    async fn count_event(
        &self,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> Result<(), ApiFailure>;
    /// Returns the runtime handler of a RuntimeClass.
    async fn runtime_handler(&self, class: &str) -> Result<String, ApiFailure>;
    /// Watches these objects of a namespace, so that reads are cached; calls `on_change` for changes.
    fn follow(
        &self,
        namespace: &str,
        config_maps: &BTreeSet<String>,
        secrets: &BTreeSet<String>,
        on_change: &OnChange,
    ) -> Following;
    /// Returns the services; `None` until the first list has arrived.
    fn services(&self) -> Option<Vec<Arc<Service>>>;
}

/// Maximum number of attempts to patch a claim while others write it.
const MAX_CLAIM_ATTEMPTS: u32 = 5;

/// The API calls, over kube.
pub struct KubePods {
    client: Client,
    answers: Answers,
    services: Cache<Service>,
    config_maps: Watched<ConfigMap>,
    secrets: Watched<Secret>,
    drivers: Lazy<CSIDriver>,
    bundles: Lazy<ClusterTrustBundle>,
}

/// Maximum time that a call waits for the first list of a kind.
const SYNC_TIMEOUT: Duration = Duration::from_secs(1);

/// All objects of a kind that has few, watched from the first call on.
struct Lazy<K>(OnceLock<Cache<K>>);

impl<K> Lazy<K>
where
    K: kube::Resource + DeserializeOwned + Send + Sync + 'static,
    K::DynamicType: Default,
{
    async fn get(&self, client: &Client) -> Result<&Cache<K>, ApiFailure> {
        let cache = self.0.get_or_init(|| {
            Cache::start(
                Api::all(client.clone()),
                kube::runtime::watcher::Config::default(),
            )
        });
        let late = |_| {
            ApiFailure::Timeout(format!(
                "failed to sync {} cache: timed out waiting for the condition",
                K::kind(&K::DynamicType::default())
            ))
        };
        tokio::time::timeout(SYNC_TIMEOUT, cache.synced())
            .await
            .map_err(late)?;
        Ok(cache)
    }
}

impl KubePods {
    /// Starts a watch of services; other objects are watched while pods use them. `answers` records the requests of
    /// `client`.
    #[must_use]
    pub fn new(client: Client, answers: Answers) -> KubePods {
        let services = Cache::start(
            Api::all(client.clone()),
            kube::runtime::watcher::Config::default(),
        );
        KubePods {
            config_maps: Watched::new(client.clone()),
            secrets: Watched::new(client.clone()),
            drivers: Lazy(OnceLock::new()),
            bundles: Lazy(OnceLock::new()),
            client,
            answers,
            services,
        }
    }
}

#[async_trait]
impl PodApi for KubePods {
    fn recovery(&self) -> Recovery {
        self.answers.subscribe()
    }

    async fn patch_status(
        &self,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> Result<Pod, ApiFailure> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        Ok(api
            .patch_status(name, &PatchParams::default(), &Patch::Strategic(patch))
            .await?)
    }

    async fn pod(&self, namespace: &str, name: &str) -> Result<Pod, ApiFailure> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        Ok(api.get(name).await?)
    }

    async fn delete(&self, namespace: &str, name: &str, uid: &str) -> Result<(), ApiFailure> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let preconditions = Some(Preconditions {
            uid: Some(uid.into()),
            resource_version: None,
        });
        api.delete(
            name,
            &DeleteParams {
                grace_period_seconds: Some(0),
                preconditions,
                ..DeleteParams::default()
            },
        )
        .await?;
        Ok(())
    }

    async fn create(&self, pod: &Pod) -> Result<Pod, ApiFailure> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
        Ok(Api::namespaced(self.client.clone(), namespace)
            .create(&PostParams::default(), pod)
            .await?)
    }

    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<ConfigMap>, ApiFailure> {
        self.config_maps.get(namespace, name).await
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Secret>, ApiFailure> {
        self.secrets.get(namespace, name).await
    }

    async fn service_account(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<ServiceAccount, ApiFailure> {
        let api: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        Ok(api.get(name).await?)
    }

    async fn token(&self, request: TokenFor<'_>) -> Result<Token, ApiFailure> {
        let metadata = &request.pod.metadata;
        let namespace = metadata.namespace.as_deref().unwrap_or_default();
        let account = request
            .pod
            .spec
            .as_ref()
            .and_then(|s| s.service_account_name.as_deref())
            .unwrap_or("default");
        let request = TokenRequest {
            metadata: ObjectMeta {
                uid: request.account_uid.map(Into::into),
                ..ObjectMeta::default()
            },
            spec: Some(TokenRequestSpec {
                audiences: (!request.audience.is_empty())
                    .then(|| vec![request.audience.to_owned()]),
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".into()),
                    kind: Some("Pod".into()),
                    name: metadata.name.clone(),
                    uid: metadata.uid.clone(),
                }),
                expiration_seconds: Some(request.seconds),
            }),
            ..TokenRequest::default()
        };
        let api: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        let answer: TokenRequest = api.create_below(account, "token", &request).await?;
        let status = answer.status.and_then(|s| {
            Some(Token {
                text: s.token?,
                expires: s.expiration_timestamp?.0,
            })
        });
        status.ok_or_else(|| {
            ApiFailure::Other("the response to the TokenRequest contains no token".into())
        })
    }

    async fn claimed(&self, namespace: &str, name: &str) -> Result<Binding, ApiFailure> {
        let claim: PersistentVolumeClaim = Api::namespaced(self.client.clone(), namespace)
            .get(name)
            .await?;
        let volume = match claim
            .spec
            .as_ref()
            .and_then(|s| s.volume_name.as_deref())
            .filter(|v| !v.is_empty())
        {
            Some(volume) => Some(Api::all(self.client.clone()).get(volume).await?),
            None => None,
        };
        Ok(Binding { claim, volume })
    }

    async fn publish_resize(&self, grown: &Grown, step: Resize<'_>) -> Result<(), ApiFailure> {
        let (namespace, name) = (&grown.namespace, &grown.claim);
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), namespace);
        let mut tries = 0;
        loop {
            let claim = api.get(name).await?;
            if !resize::is_same_claim(&claim, grown) {
                let gone = format!("claim {namespace}/{name} was deleted and created again");
                return Err(ApiFailure::Replaced(gone));
            }
            let patch = resize::patch(&claim, step);
            let patched = api
                .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
                .await;
            tries += 1;
            match patched.map_err(ApiFailure::from) {
                // The resizer writes to the claim's status as well.
                Err(ApiFailure::Conflict(_)) if tries < MAX_CLAIM_ATTEMPTS => {}
                outcome => return outcome.map(drop),
            }
        }
    }

    async fn device_claim(&self, namespace: &str, name: &str) -> Result<ResourceClaim, ApiFailure> {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        Ok(api.get(name).await?)
    }

    async fn csi_driver(&self, name: &str) -> Result<Option<CSIDriver>, ApiFailure> {
        Ok(self
            .drivers
            .get(&self.client)
            .await?
            .get("", name)
            .map(|d| CSIDriver::clone(&d)))
    }

    async fn trust_bundles(&self) -> Result<Vec<Arc<ClusterTrustBundle>>, ApiFailure> {
        Ok(self.bundles.get(&self.client).await?.list())
    }

    async fn request_certificate(&self, wanted: CertificateFor<'_>) -> Result<String, ApiFailure> {
        let CertificateFor {
            pod,
            node,
            source,
            request,
        } = wanted;
        let namespace = pod.namespace().unwrap_or_default();
        let account = pod
            .spec
            .as_ref()
            .and_then(|s| s.service_account_name.clone())
            .unwrap_or_else(|| "default".into());
        let found = self.service_account(&namespace, &account).await?;
        let account_uid = found.uid().unwrap_or_default();
        let object = PodCertificateRequest {
            metadata: ObjectMeta {
                generate_name: Some("req-".into()),
                namespace: Some(namespace.clone()),
                ..ObjectMeta::default()
            },
            spec: PodCertificateRequestSpec {
                signer_name: source.signer.clone(),
                pod_name: pod.name_any(),
                pod_uid: pod.uid().unwrap_or_default(),
                service_account_name: account,
                service_account_uid: account_uid,
                node_name: node.name_any(),
                node_uid: node.uid().unwrap_or_default(),
                max_expiration_seconds: Some(source.seconds.unwrap_or(86_400)),
                stub_pkc_s10_request: ByteString(request.to_vec()),
                unverified_user_annotations: Some(source.annotations.clone())
                    .filter(|a| !a.is_empty()),
                ..PodCertificateRequestSpec::default()
            },
            status: None,
        };
        let api: Api<PodCertificateRequest> = Api::namespaced(self.client.clone(), &namespace);
        Ok(api
            .create(&PostParams::default(), &object)
            .await?
            .name_any())
    }

    async fn certificate(
        &self,
        namespace: &str,
        request: &str,
    ) -> Result<PodCertificateRequest, ApiFailure> {
        Ok(Api::namespaced(self.client.clone(), namespace)
            .get(request)
            .await?)
    }

    async fn attachment(&self, name: &str) -> Result<Attachment, ApiFailure> {
        let found: Option<VolumeAttachment> = Api::all(self.client.clone()).get_opt(name).await?;
        Ok(found.into())
    }

    async fn post_event(&self, event: &Event) -> Result<(), ApiFailure> {
        let namespace = event.metadata.namespace.as_deref().unwrap_or("default");
        Api::<Event>::namespaced(self.client.clone(), namespace)
            .create(&PostParams::default(), event)
            .await?;
        Ok(())
    }

    async fn count_event(
        &self,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> Result<(), ApiFailure> {
        let api: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        api.patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await?;
        Ok(())
    }

    async fn runtime_handler(&self, class: &str) -> Result<String, ApiFailure> {
        Ok(Api::<RuntimeClass>::all(self.client.clone())
            .get(class)
            .await?
            .handler)
    }

    fn follow(
        &self,
        namespace: &str,
        config_maps: &BTreeSet<String>,
        secrets: &BTreeSet<String>,
        on_change: &OnChange,
    ) -> Following {
        self.config_maps
            .follow(namespace, config_maps.iter(), on_change)
            .and(self.secrets.follow(namespace, secrets.iter(), on_change))
    }

    fn services(&self) -> Option<Vec<Arc<Service>>> {
        self.services.is_synced().then(|| self.services.list())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_token_is_renewed_after_four_fifths_of_its_lifetime() {
        let at = |second: i64| Timestamp::from_second(second).expect("a time");
        // Granted seconds, age, whether it is fresh.
        for (granted, age, expected) in [
            (600, 0, true),
            (600, 479, true),
            (600, 480, false),
            (7200, 5759, true),
            (7200, 5760, false),
            (1_000_000, 86_399, true),
            (1_000_000, 86_400, false),
        ] {
            let issued = Issued {
                token: Token {
                    text: String::new(),
                    expires: at(1000 + granted),
                },
                at: at(1000),
            };
            assert_eq!(issued.is_fresh(at(1000 + age)), expected, "{granted} {age}");
        }
    }

    #[test]
    fn an_attachment_that_is_being_deleted_counts_as_missing() {
        let of = |deleted: bool, status: Value| {
            let deleted = deleted.then_some("2026-01-01T00:00:00Z");
            let found = json!({"metadata": {"name": "a", "deletionTimestamp": deleted}, "status": status,
                "spec": {"attacher": "d", "nodeName": "n", "source": {"persistentVolumeName": "v"}}});
            let found: VolumeAttachment = serde_json::from_value(found).expect("an attachment");
            Attachment::from(Some(found))
        };
        let attached = json!({"attached": true, "attachmentMetadata": {"lun": "7"}});
        let full = json!({"attached": false, "attachError": {"message": "full", "errorCode": 8}});
        let done = Attachment::Done(HashMap::from([("lun".into(), "7".into())]));
        let failed = Attachment::Failed {
            message: "full".into(),
            is_full: true,
        };
        for (deleted, status, expected) in [
            (false, attached.clone(), done),
            (true, attached, Attachment::Detaching),
            (false, full.clone(), failed),
            (true, full, Attachment::Detaching),
            (false, json!({"attached": false}), Attachment::Awaited),
            (false, Value::Null, Attachment::Awaited),
        ] {
            assert_eq!(of(deleted, status.clone()), expected, "{status}");
        }
        assert_eq!(Attachment::from(None), Attachment::Awaited);
    }
}
