//! What the agent asks of the API for its pods: a narrow trait, and the real thing over kube.

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
use crate::core::volume::certificates::CertificateSource;
use crate::core::volume::claims::Grown;
use crate::core::volume::resize::{self, Resize};

/// A service-account token. Never printed.
#[derive(Clone)]
pub struct Token {
    /// The token.
    pub text: String,
    /// When it expires.
    pub expires: Timestamp,
}

/// A token is fetched anew at this age at the latest.
const OLD: SignedDuration = SignedDuration::from_hours(24);

/// A token that was issued, and when.
#[derive(Clone)]
pub struct Issued {
    /// The token.
    pub token: Token,
    /// When.
    pub at: Timestamp,
}

impl Issued {
    /// Whether it need not be fetched anew yet: for four fifths of the life that the server granted, which may be another
    /// than was asked for, and at most for a day (`requiresRefresh` in the kubelet's token manager).
    #[must_use]
    pub fn is_fresh(&self, now: Timestamp) -> bool {
        let granted = self.token.expires.duration_since(self.at);
        let age = now.duration_since(self.at);
        age < granted * 4 / 5 && age < OLD
    }
}

/// The token that a pod asks for.
#[derive(Debug, Clone, Copy)]
pub struct TokenFor<'a> {
    /// The pod it is bound to.
    pub pod: &'a Pod,
    /// The audience; empty for the API's own.
    pub audience: &'a str,
    /// The lifetime in seconds.
    pub seconds: i64,
    /// The uid that the pod's service account has to have, where that matters.
    pub account_uid: Option<&'a str>,
}

/// The certificate that a pod asks for.
#[derive(Debug, Clone, Copy)]
pub struct CertificateFor<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// The node it is on.
    pub node: &'a Node,
    /// Signer, longest lifetime and words for the signer.
    pub source: &'a CertificateSource,
    /// A PKCS#10 request made with the key, DER.
    pub request: &'a [u8],
}

/// A claim, and the volume it is bound to if it is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Binding {
    /// The claim.
    pub claim: PersistentVolumeClaim,
    /// Its volume, once it is bound.
    pub volume: Option<PersistentVolume>,
}

/// gRPC's code of a driver that serves no more volumes on a node.
const RESOURCE_EXHAUSTED: i32 = 8;

/// What has become of attaching a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attachment {
    /// Its attacher has not done it yet.
    Awaited,
    /// It is being deleted: its attacher detaches the volume, or is about to.
    Detaching,
    /// It is attached, and its attacher tells the node this.
    Done(HashMap<String, String>),
    /// It cannot be attached; its attacher tries on.
    Failed {
        /// The attacher's words.
        message: String,
        /// The driver serves no more volumes on this node.
        is_full: bool,
    },
}

impl From<Option<VolumeAttachment>> for Attachment {
    fn from(found: Option<VolumeAttachment>) -> Attachment {
        let Some(found) = found else {
            return Attachment::Awaited;
        };
        // While it is being deleted it still says that it is attached.
        if found.metadata.deletion_timestamp.is_some() {
            return Attachment::Detaching;
        }
        let status = found.status.unwrap_or_default();
        if status.attached {
            let told = status.attachment_metadata.unwrap_or_default();
            return Attachment::Done(told.into_iter().collect());
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

/// The API's side of pods.
#[async_trait]
pub trait PodApi: Send + Sync + 'static {
    /// Patches a pod's status (strategic merge).
    async fn patch_status(
        &self,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> Result<Pod, ApiFailure>;
    /// A pod, as it is now.
    async fn pod(&self, namespace: &str, name: &str) -> Result<Pod, ApiFailure>;
    /// Removes a pod at once, if it still has this uid.
    async fn delete(&self, namespace: &str, name: &str, uid: &str) -> Result<(), ApiFailure>;
    /// Reports when the apiserver answers again after it had not.
    fn recovery(&self) -> Recovery {
        Recovery::never()
    }
    /// Creates a (mirror) pod.
    async fn create(&self, pod: &Pod) -> Result<Pod, ApiFailure>;
    /// A ConfigMap.
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<ConfigMap>, ApiFailure>;
    /// A Secret.
    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Secret>, ApiFailure>;
    /// A service account, as it is now.
    async fn service_account(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<ServiceAccount, ApiFailure>;
    /// A token bound to a pod.
    async fn token(&self, request: TokenFor<'_>) -> Result<Token, ApiFailure>;
    /// A claim, as it is now, and the volume it is bound to.
    async fn claimed(&self, namespace: &str, name: &str) -> Result<Binding, ApiFailure>;
    /// Tells a claim what becomes of its growth.
    async fn claim_resize(&self, grown: &Grown, step: Resize<'_>) -> Result<(), ApiFailure>;
    /// A claim of dynamic resources, as it is now.
    async fn device_claim(&self, namespace: &str, name: &str) -> Result<ResourceClaim, ApiFailure>;
    /// What the cluster says of a storage driver.
    async fn csi_driver(&self, name: &str) -> Result<Option<CSIDriver>, ApiFailure>;
    /// Whether a volume is attached.
    async fn attachment(&self, name: &str) -> Result<Attachment, ApiFailure>;
    /// The roots that the cluster trusts for its signers.
    async fn trust_bundles(&self) -> Result<Vec<Arc<ClusterTrustBundle>>, ApiFailure>;
    /// Asks for a certificate; the answer is the request's name.
    async fn request_certificate(&self, request: CertificateFor<'_>) -> Result<String, ApiFailure>;
    /// What has become of a request.
    async fn certificate(
        &self,
        namespace: &str,
        request: &str,
    ) -> Result<PodCertificateRequest, ApiFailure>;
    /// Posts an event.
    async fn post_event(&self, event: &Event) -> Result<(), ApiFailure>;
    /// Counts an event once more.
    async fn count_event(
        &self,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> Result<(), ApiFailure>;
    /// The runtime's handler for a RuntimeClass.
    async fn runtime_handler(&self, class: &str) -> Result<String, ApiFailure>;
    /// Keeps these objects of a namespace watched, so that reading them costs nothing; `on_change` is told of changes.
    fn follow(
        &self,
        namespace: &str,
        config_maps: &BTreeSet<String>,
        secrets: &BTreeSet<String>,
        on_change: &OnChange,
    ) -> Following;
    /// The services; `None` until they have been read once.
    fn services(&self) -> Option<Vec<Arc<Service>>>;
}

/// How often a claim is read and written when others write it at the same time.
const CLAIM_TRIES: u32 = 5;

/// The API over kube.
pub struct KubePods {
    client: Client,
    answers: Answers,
    services: Cache<Service>,
    config_maps: Watched<ConfigMap>,
    secrets: Watched<Secret>,
    drivers: Lazy<CSIDriver>,
    bundles: Lazy<ClusterTrustBundle>,
}

/// How long a question waits for the first list of a kind.
const SYNC: Duration = Duration::from_secs(1);

/// All objects of a kind of which there are few, watched from the first question on.
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
        tokio::time::timeout(SYNC, cache.synced())
            .await
            .map_err(late)?;
        Ok(cache)
    }
}

impl KubePods {
    /// Starts watching services; other objects are watched while pods use them. `answers` follows the requests of `client`.
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
            ApiFailure::Other("the TokenRequest was answered without a token".into())
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

    async fn claim_resize(&self, grown: &Grown, step: Resize<'_>) -> Result<(), ApiFailure> {
        let (namespace, name) = (&grown.namespace, &grown.claim);
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), namespace);
        let mut tries = 0;
        loop {
            let claim = api.get(name).await?;
            if !resize::concerns(&claim, grown) {
                let gone = format!("claim {namespace}/{name} was deleted and made again");
                return Err(ApiFailure::Replaced(gone));
            }
            let patch = resize::patch(&claim, step);
            let patched = api
                .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
                .await;
            tries += 1;
            match patched.map_err(ApiFailure::from) {
                // Who resizes the volume writes there as well.
                Err(ApiFailure::Conflict(_)) if tries < CLAIM_TRIES => {}
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

    async fn request_certificate(&self, asked: CertificateFor<'_>) -> Result<String, ApiFailure> {
        let CertificateFor {
            pod,
            node,
            source,
            request,
        } = asked;
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
    fn a_token_is_fresh_for_four_fifths_of_the_granted_life() {
        let at = |second: i64| Timestamp::from_second(second).expect("a time");
        // Granted seconds, its age, whether it is fresh.
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
    fn an_attachment_that_is_being_deleted_is_none() {
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
