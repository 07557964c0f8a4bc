//! Trust bundles and pod certificates of projected volumes (KEP-3257, KEP-4317). Pure.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1beta1::{ClusterTrustBundle, PodCertificateRequestStatus};
use k8s_openapi::api::core::v1::{ClusterTrustBundleProjection, Volume};

use crate::fault::Fault;
use crate::node::signing;
use crate::{digest, meta, selector, time};

/// The trust bundle sources of a projected volume.
#[must_use]
pub fn trust_bundle_sources(volume: &Volume) -> Vec<&ClusterTrustBundleProjection> {
    volume
        .projected
        .iter()
        .flat_map(|p| p.sources.iter().flatten())
        .filter_map(|s| s.cluster_trust_bundle.as_ref())
        .collect()
}

/// Adds the certificates of a PEM text without headers, keyed by digest.
fn blocks(pem: &str, into: &mut BTreeMap<String, String>) -> Result<(), Fault> {
    for block in x509_parser::pem::Pem::iter_from_buffer(pem.as_bytes()) {
        let block =
            block.map_err(|e| Fault::missing(format!("the trust bundle is not PEM: {e}")))?;
        if block.label != "CERTIFICATE" {
            return Err(Fault::missing(format!(
                "the trust bundle has a block {:?}: only CERTIFICATE blocks are allowed",
                block.label
            )));
        }
        let pem = signing::pem("CERTIFICATE", &block.contents);
        into.insert(digest::sha256(&block.contents), pem);
    }
    Ok(())
}

/// The certificates that a source selects, as PEM without duplicates, in arbitrary order. `None` if nothing is selected
/// and the source is optional.
pub fn select_trust_bundle(
    source: &ClusterTrustBundleProjection,
    all: &[impl AsRef<ClusterTrustBundle>],
) -> Result<Option<String>, Fault> {
    let mut all = all.iter().map(AsRef::as_ref);
    let optional = source.optional == Some(true);
    let found: Vec<&ClusterTrustBundle> = match (&source.name, &source.signer_name) {
        (Some(name), None) => all.find(|b| meta::name(*b) == name).into_iter().collect(),
        (None, Some(signer)) => all
            .filter(|b| {
                b.spec.signer_name.as_ref() == Some(signer)
                    && source
                        .label_selector
                        .as_ref()
                        .is_some_and(|s| selector::matches(s, meta::labels(*b)))
            })
            .collect(),
        _ => {
            return Err(Fault::invalid(
                "a clusterTrustBundle source needs either name or signerName",
            ));
        }
    };
    if found.is_empty() {
        let missing = match &source.name {
            Some(name) => format!("clustertrustbundle {name:?} not found"),
            None => "combination of signerName and labelSelector matched zero ClusterTrustBundles"
                .to_owned(),
        };
        return if optional {
            Ok(None)
        } else {
            Err(Fault::missing(missing))
        };
    }
    let mut certificates = BTreeMap::new();
    for bundle in found {
        blocks(&bundle.spec.trust_bundle, &mut certificates)?;
    }
    Ok(Some(certificates.into_values().collect()))
}

/// A pod certificate source of a projected volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateSource {
    /// Index of the source in the volume.
    pub source_index: usize,
    /// The signer's name.
    pub signer: String,
    /// The kind of key.
    pub key_type: String,
    /// Maximum lifetime in seconds.
    pub seconds: Option<i32>,
    /// User annotations, which are passed to the signer.
    pub annotations: BTreeMap<String, String>,
}

/// The pod certificate sources of a projected volume.
#[must_use]
pub fn sources(volume: &Volume) -> Vec<CertificateSource> {
    let sources = volume
        .projected
        .iter()
        .flat_map(|p| p.sources.iter().flatten())
        .enumerate();
    let of = |(source_index, source): (usize, &k8s_openapi::api::core::v1::VolumeProjection)| {
        let source = source.pod_certificate.as_ref()?;
        Some(CertificateSource {
            source_index,
            signer: source.signer_name.clone(),
            key_type: source.key_type.clone(),
            seconds: source.max_expiration_seconds,
            annotations: source.user_annotations.clone().unwrap_or_default(),
        })
    };
    sources.filter_map(of).collect()
}

/// State of a PodCertificateRequest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Not decided yet.
    Pending,
    /// Denied or failed permanently, for this reason.
    Refused(String),
    /// Issued.
    Issued {
        /// PEM chain, leaf first.
        chain: String,
        /// When to request a new certificate.
        refresh: Timestamp,
        /// When the certificate expires.
        ends: Timestamp,
    },
}

/// Evaluates the status of a request.
#[must_use]
pub fn outcome(status: Option<&PodCertificateRequestStatus>, now: Timestamp) -> Outcome {
    let Some(status) = status else {
        return Outcome::Pending;
    };
    let condition = |kind: &str| {
        status
            .conditions
            .iter()
            .flatten()
            .find(|c| c.type_ == kind && c.status == "True")
    };
    for kind in ["Denied", "Failed"] {
        if let Some(c) = condition(kind) {
            return Outcome::Refused(format!(
                "{}: {} ({})",
                kind.to_lowercase(),
                c.message,
                c.reason
            ));
        }
    }
    match (
        condition("Issued"),
        status.certificate_chain.as_ref().filter(|c| !c.is_empty()),
    ) {
        (Some(_), Some(chain)) => {
            let later = time::later(now, SignedDuration::from_hours(1));
            let ends = status.not_after.as_ref().map_or(later, |t| t.0);
            let refresh = status.begin_refresh_at.as_ref().map_or(ends, |t| t.0);
            Outcome::Issued {
                chain: chain.clone(),
                refresh,
                ends,
            }
        }
        _ => Outcome::Pending,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::sync::Arc;

    fn bundle(name: &str, signer: Value, labels: Value, pem: &str) -> Arc<ClusterTrustBundle> {
        let object = json!({"metadata": {"name": name, "labels": labels}, "spec": {"signerName": signer, "trustBundle": pem}});
        Arc::new(serde_json::from_value(object).expect("a bundle"))
    }

    fn root() -> String {
        rcgen::generate_simple_self_signed(["a".into()])
            .expect("a certificate")
            .cert
            .pem()
    }

    #[test]
    fn roots_are_selected_by_name_or_by_signer_and_labels() {
        let (one, two) = (root(), root());
        let all = [
            bundle("own", Value::Null, json!({}), &one),
            bundle("a.b:c:x", json!("a.b/c"), json!({"k": "v"}), &two),
            bundle(
                "a.b:c:y",
                json!("a.b/c"),
                json!({"k": "w"}),
                &format!("{one}\n{two}"),
            ),
        ];
        let chosen = |source: Value| {
            let mut source = source;
            source["path"] = json!("p");
            let found =
                select_trust_bundle(&serde_json::from_value(source).expect("a source"), &all);
            found.map(|text| text.map(|t| t.matches("BEGIN").count()))
        };
        assert_eq!(chosen(json!({"name": "own"})), Ok(Some(1)));
        assert_eq!(
            chosen(json!({"signerName": "a.b/c", "labelSelector": {"matchLabels": {"k": "v"}}})),
            Ok(Some(1))
        );
        assert_eq!(
            chosen(json!({"signerName": "a.b/c", "labelSelector": {}})),
            Ok(Some(2)),
            "each once"
        );
        assert_eq!(chosen(json!({"name": "none", "optional": true})), Ok(None));
        assert!(
            chosen(json!({"signerName": "a.b/c"}))
                .is_err_and(|e| e.message.contains("matched zero")),
            "without a selector nothing matches"
        );
        assert!(
            chosen(json!({"name": "none"}))
                .is_err_and(|e| e.message.contains("\"none\" not found"))
        );
    }

    #[test]
    fn certificate_requests_are_pending_until_they_are_decided() {
        let at = |s: i64| Timestamp::from_second(s).expect("a time");
        let of = |status: Value| {
            outcome(
                Some(&serde_json::from_value(status).expect("a status")),
                at(0),
            )
        };
        let condition = |kind: &str| json!([{"type": kind, "status": "True", "reason": "R", "message": "m", "lastTransitionTime": "1970-01-01T00:00:00Z"}]);
        assert_eq!(
            (outcome(None, at(0)), of(json!({}))),
            (Outcome::Pending, Outcome::Pending)
        );
        assert_eq!(
            of(json!({"conditions": condition("Denied")})),
            Outcome::Refused("denied: m (R)".into())
        );
        let issued = json!({"conditions": condition("Issued"), "certificateChain": "C", "notAfter": "1970-01-01T02:00:00Z", "beginRefreshAt": "1970-01-01T01:00:00Z"});
        assert_eq!(
            of(issued),
            Outcome::Issued {
                chain: "C".into(),
                refresh: at(3600),
                ends: at(7200)
            }
        );
        assert_eq!(
            of(json!({"certificateChain": "C"})),
            Outcome::Pending,
            "a chain without its condition is not issued"
        );
    }
}
