//! Credentials that the API issues to a single pod: service account tokens and pod certificates (KEP-1205, KEP-4317),
//! and trust bundles (KEP-3257). They are cached while the pod runs, and renewed in time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Pod, Volume};
use kube::ResourceExt as _;
use rcgen::{CertificateParams, KeyPair, RsaKeySize};
use tokio::sync::Mutex;

use crate::node::OwnNode;
use holdfast_core::volume::certificates::{self, CertificateSource, Outcome};
use holdfast_core::volume::payload::{self, Credential, FetchedSources, TokenSource};
use holdfast_core::volume::resolved::Problem;
use holdfast_host::{HostError, blocking};
use holdfast_kubeapi::pods::{ApiFailure, CertificateFor, Issued, PodApi, TokenFor};
use holdfast_sys::clock::Clock;

/// Pauses between reads of a pending certificate request, before the volume's next attempt reads it.
const READ_PAUSES: [Duration; 4] = [
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_secs(1),
];
/// How long a pending request is kept before it is replaced.
const MAX_PENDING: SignedDuration = SignedDuration::from_mins(10);

/// A pending certificate request.
struct PendingRequest {
    request: String,
    key: String,
    at: Timestamp,
}

/// The certificates of one projected source.
#[derive(Default)]
struct CertificateState {
    issued: Option<(Credential, Timestamp, Timestamp)>,
    pending: Option<PendingRequest>,
}

/// What requesting credentials uses.
pub(crate) struct Parts {
    pub api: Arc<dyn PodApi>,
    pub clock: Clock,
    pub node: Arc<OwnNode>,
}

/// The credentials of one pod.
#[derive(Default)]
pub struct PodCredentials {
    /// By volume and path.
    tokens: Mutex<BTreeMap<(String, String), Issued>>,
    /// By volume and index of the source.
    certificates: Mutex<BTreeMap<(String, usize), CertificateState>>,
}

impl PodCredentials {
    /// Returns the credentials for the projected sources of a volume, and
    /// requests those that are missing or need renewal.
    pub async fn fetch(
        &self,
        parts: &Parts,
        pod: &Pod,
        volume: &Volume,
    ) -> Result<FetchedSources, Problem> {
        let mut given = FetchedSources::default();
        for source in payload::tokens(volume) {
            given
                .tokens
                .insert(source.path.clone(), self.token(parts, pod, &source).await?);
        }
        let bundles = certificates::trust_bundle_sources(volume);
        if !bundles.is_empty() {
            let all = parts
                .api
                .trust_bundles()
                .await
                .map_err(|e| Problem::later(format!("cannot read the trust bundles: {e}")))?;
            for source in bundles {
                given.bundles.insert(
                    source.path.clone(),
                    certificates::select_trust_bundle(source, &all)?,
                );
            }
        }
        for source in certificates::sources(volume) {
            given.credentials.insert(
                source.source_index,
                self.credential(parts, pod, &volume.name, &source).await?,
            );
        }
        Ok(given)
    }

    async fn token(
        &self,
        parts: &Parts,
        pod: &Pod,
        source: &TokenSource,
    ) -> Result<String, Problem> {
        let place = (source.volume.clone(), source.path.clone());
        let now = parts.clock.now();
        let known = self
            .tokens
            .lock()
            .await
            .get(&place)
            .map(|i| (i.token.text.clone(), i.is_fresh(now), i.token.expires > now));
        if let Some((text, true, _)) = known {
            return Ok(text);
        }
        match (
            parts
                .api
                .token(TokenFor {
                    pod,
                    audience: &source.audience,
                    seconds: source.seconds,
                    account_uid: None,
                })
                .await,
            known,
        ) {
            (Ok(token), _) => {
                let text = token.text.clone();
                self.tokens
                    .lock()
                    .await
                    .insert(place, Issued { token, at: now });
                Ok(text)
            }
            (Err(_), Some((text, _, true))) => Ok(text),
            (Err(error), _) => Err(Problem::later(format!("failed to fetch token: {error}"))),
        }
    }

    async fn credential(
        &self,
        parts: &Parts,
        pod: &Pod,
        volume: &str,
        source: &CertificateSource,
    ) -> Result<Credential, Problem> {
        let place = (volume.to_owned(), source.source_index);
        // Removed during the request to the API; inserted again with all changes, even after a failure.
        let mut certificate_state = self
            .certificates
            .lock()
            .await
            .remove(&place)
            .unwrap_or_default();
        let outcome = ensure_certificate(parts, pod, source, &mut certificate_state).await;
        let now = parts.clock.now();
        let usable = certificate_state
            .issued
            .as_ref()
            .filter(|(_, _, ends)| *ends > now)
            .map(|(credential, ..)| credential.clone());
        self.certificates
            .lock()
            .await
            .insert(place, certificate_state);
        match (usable, outcome) {
            (Some(credential), Ok(())) => Ok(credential),
            (Some(credential), Err(error)) => {
                tracing::warn!(
                    %error,
                    "renewing a certificate failed; keeping the old one"
                );
                Ok(credential)
            }
            (None, Err(error)) => Err(error),
            (None, Ok(())) => Err(Problem::later(format!(
                "the certificate of signer {} had expired when it was issued",
                source.signer
            ))),
        }
    }
}

/// Ensures a certificate that does not need renewal yet.
async fn ensure_certificate(
    parts: &Parts,
    pod: &Pod,
    source: &CertificateSource,
    certificate_state: &mut CertificateState,
) -> Result<(), Problem> {
    let now = parts.clock.now();
    if certificate_state
        .issued
        .as_ref()
        .is_some_and(|(_, refresh, _)| *refresh > now)
    {
        return Ok(());
    }
    if certificate_state
        .pending
        .as_ref()
        .is_none_or(|pending| now.duration_since(pending.at) > MAX_PENDING)
    {
        certificate_state.pending = Some(request_certificate(parts, pod, source).await?);
    }
    let Some(pending) = &certificate_state.pending else {
        return Ok(());
    };
    let namespace = pod.namespace().unwrap_or_default();
    let about = format!("PodCertificateRequest {namespace}/{}", pending.request);
    let read_pauses = if certificate_state.issued.is_some() {
        &READ_PAUSES[..0]
    } else {
        &READ_PAUSES[..]
    };
    for pause in std::iter::once(&Duration::ZERO).chain(read_pauses) {
        tokio::time::sleep(*pause).await;
        let found = match parts.api.certificate(&namespace, &pending.request).await {
            Err(ApiFailure::NotFound(_)) => {
                certificate_state.pending = None;
                let why = format!("{about} was deleted before its signer answered");
                return Err(Problem::later(why));
            }
            other => other.map_err(|e| Problem::later(format!("{about} cannot be read: {e}")))?,
        };
        match certificates::outcome(found.status.as_ref(), now) {
            Outcome::Pending => {}
            // The request is kept: a new one would be denied as well.
            Outcome::Refused(why) => return Err(Problem::later(format!("{about} was {why}"))),
            Outcome::Issued {
                chain,
                refresh,
                ends,
            } => {
                certificate_state.issued = Some((
                    Credential {
                        key: pending.key.clone(),
                        chain,
                    },
                    refresh,
                    ends,
                ));
                certificate_state.pending = None;
                return Ok(());
            }
        }
    }
    Err(Problem::later(format!(
        "{about} is pending: its signer {} has not decided yet",
        source.signer
    )))
}

/// Generates a key and requests a certificate.
async fn request_certificate(
    parts: &Parts,
    pod: &Pod,
    source: &CertificateSource,
) -> Result<PendingRequest, Problem> {
    let Some(node) = parts.node.borrow().clone() else {
        return Err(Problem::later("the node is not registered yet"));
    };
    let kind = source.key_type.clone();
    let (key, request) = blocking(move || make(&kind)).await?;
    let answer = parts
        .api
        .request_certificate(CertificateFor {
            pod,
            node: &node,
            source,
            request: &request,
        })
        .await;
    let request = answer.map_err(|e| {
        let signer = &source.signer;
        Problem::later(format!(
            "requesting a certificate of signer {signer} failed: {e}"
        ))
    })?;
    Ok(PendingRequest {
        request,
        key,
        at: parts.clock.now(),
    })
}

/// Generates a key of this kind (PEM), and a request signed with it (DER). Slow for RSA.
fn make(kind: &str) -> Result<(String, Vec<u8>), HostError> {
    let failed =
        |e: rcgen::Error| HostError::failed(format!("cannot generate a key of type {kind}: {e}"));
    let key = match kind {
        "ED25519" => KeyPair::generate_for(&rcgen::PKCS_ED25519),
        "ECDSAP256" => KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256),
        "ECDSAP384" => KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384),
        "ECDSAP521" => KeyPair::generate_for(&rcgen::PKCS_ECDSA_P521_SHA512),
        "RSA3072" => KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, RsaKeySize::_3072),
        "RSA4096" => KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, RsaKeySize::_4096),
        other => {
            return Err(format!(
                "unknown key type {other:?}: use RSA3072, RSA4096, ECDSAP256, ECDSAP384, ECDSAP521 or ED25519"
            ).into());
        }
    };
    let key = key.map_err(failed)?;
    let request = CertificateParams::default()
        .serialize_request(&key)
        .map_err(failed)?;
    Ok((key.serialize_pem(), request.der().to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_every_kind_sign_their_request() {
        use x509_parser::prelude::FromDer as _;
        for kind in ["ED25519", "ECDSAP256", "ECDSAP384", "ECDSAP521", "RSA3072"] {
            let (key, request) = make(kind).expect(kind);
            assert!(key.contains("PRIVATE KEY"), "{kind}");
            let (_, csr) =
                x509_parser::certification_request::X509CertificationRequest::from_der(&request)
                    .expect(kind);
            // The parser's crypto library does not support P-521.
            assert!(
                kind == "ECDSAP521" || csr.verify_signature().is_ok(),
                "{kind}"
            );
        }
        assert!(
            make("DSA").is_err_and(|e| e.message.contains("DSA") && e.message.contains("ED25519"))
        );
    }
}
