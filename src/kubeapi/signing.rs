//! Requests a certificate from the apiserver and waits for it.

use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Client, ResourceExt as _};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use tokio::time::Instant;

use super::api::Api;
use super::failure::ApiFailure;
use holdfast_core::backoff::Doubling;

/// Initial and maximum interval at which a request is polled.
const POLL_BACKOFF: Doubling = Doubling::new(Duration::from_millis(200), Duration::from_secs(5));

/// A request for a certificate.
#[derive(Debug, Clone)]
pub struct CertificateRequest {
    /// The name of the CertificateSigningRequest; `None` lets the apiserver generate one.
    pub name: Option<String>,
    /// The signer's name.
    pub signer: &'static str,
    /// The key usages.
    pub usages: &'static [&'static str],
    /// PKCS#10, PEM.
    pub request: String,
}

/// Creates a request for a certificate of the user `user` in the group `group`, PKCS#10 in PEM format.
///
/// # Errors
///
/// A name is no valid text of a certificate.
pub fn request(
    key: &KeyPair,
    (group, user): (&str, &str),
    names: &[String],
) -> Result<String, String> {
    let failed = |e: rcgen::Error| format!("cannot create a certificate request: {e}");
    let mut params = CertificateParams::new(names.to_vec()).map_err(failed)?;
    params.distinguished_name = DistinguishedName::new();
    let subject = &mut params.distinguished_name;
    subject.push(DnType::OrganizationName, group);
    subject.push(DnType::CommonName, user);
    let request = params.serialize_request(key).and_then(|r| r.pem());
    request.map_err(failed)
}

/// A certificate with its key; both are PEM.
pub struct Issued {
    /// The certificate.
    pub certificate: String,
    /// The key.
    pub key: String,
}

/// Requests a certificate for a new key from `signer`, and waits at most `limit` for it. `subject` is the group and the user.
///
/// # Errors
///
/// The apiserver refuses the request, or the signer does not answer in time.
pub async fn obtain_for_new_key(
    client: &Client,
    (signer, usages): (&'static str, &'static [&'static str]),
    subject: (&str, &str),
    names: &[String],
    limit: Duration,
) -> Result<Issued, String> {
    let key = KeyPair::generate().map_err(|e| format!("cannot generate a key: {e}"))?;
    let wanted = CertificateRequest {
        name: None,
        signer,
        usages,
        request: request(&key, subject, names)?,
    };
    let certificate = obtain(client, &wanted, limit).await;
    Ok(Issued {
        certificate: certificate.map_err(|e| e.to_string())?,
        key: key.serialize_pem(),
    })
}

/// Creates the request and waits at most `limit` for the certificate, which is PEM.
pub async fn obtain(
    client: &Client,
    wanted: &CertificateRequest,
    limit: Duration,
) -> Result<String, ApiFailure> {
    let api: Api<CertificateSigningRequest> = Api::all(client.clone());
    let object = CertificateSigningRequest {
        metadata: ObjectMeta {
            name: wanted.name.clone(),
            generate_name: wanted.name.is_none().then(|| "csr-".into()),
            ..ObjectMeta::default()
        },
        spec: CertificateSigningRequestSpec {
            request: ByteString(wanted.request.clone().into_bytes()),
            signer_name: wanted.signer.into(),
            usages: Some(wanted.usages.iter().map(|u| (*u).to_owned()).collect()),
            ..CertificateSigningRequestSpec::default()
        },
        ..CertificateSigningRequest::default()
    };
    let name = match api
        .create(&PostParams::default(), &object)
        .await
        .map_err(ApiFailure::from)
    {
        Ok(created) => created.name_any(),
        // A request with this name, and so for the same key, exists: wait for that one.
        Err(ApiFailure::AlreadyExists(why)) => {
            wanted.name.clone().ok_or(ApiFailure::AlreadyExists(why))?
        }
        Err(error) => return Err(error),
    };
    let (until, mut backoff) = (Instant::now() + limit, POLL_BACKOFF);

    loop {
        let status = api
            .get(&name)
            .await
            .map_err(ApiFailure::from)?
            .status
            .unwrap_or_default();
        if let Some(certificate) = status.certificate.filter(|c| !c.0.is_empty()) {
            return String::from_utf8(certificate.0).map_err(|e| {
                ApiFailure::Other(format!(
                    "the certificate of CertificateSigningRequest {name} is not PEM: {e}"
                ))
            });
        }
        let refused = status
            .conditions
            .iter()
            .flatten()
            .find(|c| matches!(c.type_.as_str(), "Denied" | "Failed"));
        if let Some(c) = refused {
            let why = c.message.clone().unwrap_or_default();
            return Err(ApiFailure::Other(format!(
                "CertificateSigningRequest {name} was {}: {why}",
                c.type_.to_lowercase()
            )));
        }
        let pause = backoff.pause();
        if Instant::now() + pause > until {
            return Err(ApiFailure::Timeout(format!(
                "CertificateSigningRequest {name} is not signed yet: approve it with `kubectl certificate approve {name}`"
            )));
        }
        tokio::time::sleep(pause).await;
    }
}
