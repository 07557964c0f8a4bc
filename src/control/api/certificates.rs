//! CertificateSigningRequests, ClusterTrustBundles and PodCertificateRequests (`pkg/registry/certificates`).

use std::collections::HashMap;

use serde_json::{Map, Value, json};
use x509_parser::prelude::FromDer as _;

use super::auth::User;
use super::error::FieldError;
use super::object::{at, entry, list, now, text};
use super::resources::Sub;
use holdfast_core::node::signing::request_der;

type Column = (&'static str, &'static str, u8);
type Errors = Vec<FieldError>;

const USAGES: [&str; 23] = [
    "signing",
    "digital signature",
    "content commitment",
    "key encipherment",
    "key agreement",
    "data encipherment",
    "cert sign",
    "crl sign",
    "encipher only",
    "decipher only",
    "any",
    "server auth",
    "client auth",
    "code signing",
    "email protection",
    "s/mime",
    "ipsec end system",
    "ipsec tunnel",
    "ipsec user",
    "timestamping",
    "ocsp signing",
    "microsoft sgc",
    "netscape sgc",
];

/// Records the requesting user in the spec. Values that the client sent for these fields are overwritten.
pub(crate) fn requested_by(request: &mut Value, user: &User) {
    let spec = entry(request, "spec");
    for key in ["username", "uid", "groups", "extra"] {
        spec.remove(key);
    }
    spec.insert("username".into(), user.name.as_str().into());
    spec.insert("groups".into(), json!(user.groups));
    if !user.uid.is_empty() {
        spec.insert("uid".into(), user.uid.as_str().into());
    }
    if !user.extra.is_empty() {
        spec.insert("extra".into(), json!(user.extra));
    }
}

/// Copies the conditions of an `/approval` write to the stored request and sets their
/// times. The rest of the request stays unchanged.
pub fn approve(request: &mut Value, status: &Value) {
    let known = list(request, &["status", "conditions"]).to_vec();
    let mut by_type: HashMap<Option<&Value>, &Value> = HashMap::new();
    for condition in &known {
        by_type.entry(condition.get("type")).or_insert(condition);
    }
    let mut conditions = list(status, &["conditions"]).to_vec();
    for condition in conditions.iter_mut().filter_map(Value::as_object_mut) {
        let before = by_type.get(&condition.get("type")).copied();
        let stamp = |map: &mut Map<String, Value>, key: &str, old: Option<&Value>| {
            if map.get(key).is_none_or(Value::is_null) {
                map.insert(
                    key.into(),
                    old.cloned()
                        .filter(|v| !v.is_null())
                        .unwrap_or_else(|| now().into()),
                );
            }
        };
        stamp(
            condition,
            "lastUpdateTime",
            before.and_then(|c| c.get("lastUpdateTime")),
        );
        stamp(
            condition,
            "lastTransitionTime",
            before.and_then(|c| c.get("lastTransitionTime")),
        );
    }
    entry(request, "status").insert("conditions".into(), conditions.into());
}

/// Whether a condition is an approval decision, which only `/approval` can write.
fn is_decision(condition: &Value) -> bool {
    matches!(text(condition, &["type"]), Some("Approved" | "Denied"))
}

/// Restores the approval decision, so that a write to `/status` cannot change it.
pub(crate) fn restore_decision(old: &Value, new: &mut Value) {
    let mut conditions: Vec<Value> = list(old, &["status", "conditions"]).to_vec();
    conditions.retain(is_decision);
    conditions.extend(
        list(new, &["status", "conditions"])
            .iter()
            .filter(|c| !is_decision(c))
            .cloned(),
    );
    let status = entry(new, "status");
    if conditions.is_empty() {
        status.remove("conditions");
    } else {
        status.insert("conditions".into(), conditions.into());
    }
}

/// The verb that a user needs on the request's signer for a change, and the
/// signer: `approve` to decide, `sign` to issue.
#[must_use]
pub fn required_permission<'a>(
    sub: Option<Sub>,
    old: &Value,
    new: &'a Value,
) -> Option<(&'static str, &'a str)> {
    let verb = match sub {
        Some(Sub::Approval) => "approve",
        Some(Sub::Status) if old["status"] != new["status"] => "sign",
        _ => return None,
    };
    Some((verb, text(new, &["spec", "signerName"]).unwrap_or_default()))
}

/// Decodes `spec.request` (base64 of PEM) to DER.
fn der_of(base64: &str) -> Option<Vec<u8>> {
    use base64::Engine as _;
    request_der(
        &base64::engine::general_purpose::STANDARD
            .decode(base64)
            .ok()?,
    )
}

/// The common name in `spec.request` (base64 of PEM). Empty if the subject has no common name or
/// several; `None` if the request cannot be parsed.
pub(crate) fn common_name(base64: &str) -> Option<String> {
    let der = der_of(base64)?;
    let (_, csr) =
        x509_parser::certification_request::X509CertificationRequest::from_der(&der).ok()?;
    let mut names = csr.certification_request_info.subject.iter_common_name();
    let name = match (names.next(), names.next()) {
        (Some(one), None) => one.as_str().unwrap_or_default(),
        _ => "",
    };
    Some(name.to_owned())
}

fn is_qualified(signer: &str) -> bool {
    signer
        .split_once('/')
        .is_some_and(|(domain, path)| domain.contains('.') && !path.is_empty())
        && signer.len() <= 571
}

fn signer(object: &Value, errors: &mut Errors) {
    match text(object, &["spec", "signerName"]).unwrap_or_default() {
        "" => errors.push(FieldError::required("spec.signerName", "")),
        name if !is_qualified(name) => {
            errors.push(FieldError::invalid(
                "spec.signerName",
                &name.into(),
                "must be a fully qualified domain and path of the form 'example.com/signer-name'",
            ));
        }
        _ => {}
    }
}

/// Whether a text consists of PEM certificates only.
fn is_bundle(pem: &str) -> bool {
    let mut blocks = 0;
    for block in x509_parser::pem::Pem::iter_from_buffer(pem.as_bytes()) {
        let Ok(block) = block else { return false };
        if block.label != "CERTIFICATE"
            || x509_parser::parse_x509_certificate(&block.contents).is_err()
        {
            return false;
        }
        blocks += 1;
    }
    blocks > 0
}

/// Validates an object of one of these kinds.
pub fn validate(kind: &str, object: &Value, errors: &mut Errors) {
    match kind {
        "CertificateSigningRequest" => {
            signer(object, errors);
            let request = text(object, &["spec", "request"]).unwrap_or_default();
            let der = der_of(request);
            let good = der.as_deref().and_then(|der| {
                x509_parser::certification_request::X509CertificationRequest::from_der(der).ok()
            });
            if good.is_none_or(|(_, csr)| csr.verify_signature().is_err()) {
                errors.push(FieldError::invalid(
                    "spec.request",
                    &json!("<omitted>"),
                    "PEM block type must be CERTIFICATE REQUEST, and its signature must hold",
                ));
            }
            let usages = list(object, &["spec", "usages"]);
            if usages.is_empty() {
                errors.push(FieldError::required(
                    "spec.usages",
                    "usages must be provided",
                ));
            }
            for (i, usage) in usages
                .iter()
                .filter_map(Value::as_str)
                .enumerate()
                .filter(|(_, u)| !USAGES.contains(u))
            {
                errors.push(FieldError::unsupported(
                    format!("spec.usages[{i}]"),
                    usage,
                    &USAGES,
                ));
            }
            if let Some(seconds) = at(object, &["spec", "expirationSeconds"])
                .and_then(Value::as_i64)
                .filter(|s| *s < 600)
            {
                errors.push(FieldError::invalid(
                    "spec.expirationSeconds",
                    &seconds.into(),
                    "may not specify a duration less than 600 seconds (10 minutes)",
                ));
            }
        }
        "ClusterTrustBundle" => {
            if !is_bundle(text(object, &["spec", "trustBundle"]).unwrap_or_default()) {
                errors.push(FieldError::invalid(
                    "spec.trustBundle",
                    &json!("<value omitted>"),
                    "must be one or more certificates in PEM, and nothing else",
                ));
            }
            // The name of a signer's bundle begins with the signer's name, so that a
            // signer cannot take the names of another.
            let (name, signer) = (
                super::object::name(object),
                text(object, &["spec", "signerName"]).unwrap_or_default(),
            );
            let prefix = signer.replace('/', ":") + ":";
            if !signer.is_empty() && !name.starts_with(&prefix) {
                errors.push(FieldError::invalid(
                    "metadata.name",
                    &name.into(),
                    &format!("ClusterTrustBundle for signerName {signer} must be named with prefix {prefix}"),
                ));
            }
        }
        "PodCertificateRequest" => {
            signer(object, errors);
            for field in [
                "podName",
                "podUID",
                "serviceAccountName",
                "serviceAccountUID",
                "nodeName",
                "nodeUID",
                "stubPKCS10Request",
            ] {
                if text(object, &["spec", field]).is_none_or(str::is_empty) {
                    errors.push(FieldError::required(format!("spec.{field}"), ""));
                }
            }
            let seconds = at(object, &["spec", "maxExpirationSeconds"]).and_then(Value::as_i64);
            if let Some(seconds) = seconds.filter(|s| !(3600..=7_862_400).contains(s)) {
                errors.push(FieldError::invalid(
                    "spec.maxExpirationSeconds",
                    &seconds.into(),
                    "must be in the range [3600, 7862400]",
                ));
            }
        }
        _ => {}
    }
}

/// Validates an update: the spec of a request is immutable.
pub(crate) fn validate_update(kind: &str, old: &Value, new: &Value, errors: &mut Errors) {
    let fixed = match kind {
        "CertificateSigningRequest" | "PodCertificateRequest" => old["spec"] != new["spec"],
        "ClusterTrustBundle" => old["spec"]["signerName"] != new["spec"]["signerName"],
        _ => false,
    };
    if fixed {
        errors.push(FieldError::invalid(
            "spec",
            &json!("<omitted>"),
            "field is immutable",
        ));
    }
}

/// The table columns of a kind; `None` for other kinds.
#[must_use]
pub fn columns(kind: &str) -> Option<&'static [Column]> {
    Some(match kind {
        "CertificateSigningRequest" => &[
            ("Name", "string", 0),
            ("Age", "string", 0),
            ("SignerName", "string", 0),
            ("Requestor", "string", 0),
            ("RequestedDuration", "string", 0),
            ("Condition", "string", 0),
        ],
        "ClusterTrustBundle" => &[("Name", "string", 0), ("SignerName", "string", 0)],
        "PodCertificateRequest" => &[
            ("Name", "string", 0),
            ("PodName", "string", 0),
            ("ServiceAccountName", "string", 0),
            ("NodeName", "string", 0),
            ("SignerName", "string", 0),
            ("State", "string", 0),
        ],
        _ => return None,
    })
}

/// The cells of a table row.
#[must_use]
pub fn cells(kind: &str, object: &Value, age: &str) -> Vec<Value> {
    let name = super::object::name(object);
    let of = |path: &[&str]| {
        Value::from(
            text(object, path)
                .filter(|v| !v.is_empty())
                .unwrap_or("<none>"),
        )
    };
    let conditions: Vec<&str> = list(object, &["status", "conditions"])
        .iter()
        .filter_map(|c| c["type"].as_str())
        .collect();
    let state = if conditions.is_empty() {
        "Pending".to_owned()
    } else {
        conditions.join(",")
    };
    match kind {
        "CertificateSigningRequest" => {
            let issued = text(object, &["status", "certificate"]).is_some_and(|c| !c.is_empty());
            let seconds = at(object, &["spec", "expirationSeconds"]).and_then(Value::as_i64);
            let lasts = seconds.map_or("<none>".to_owned(), super::columns::duration);
            let state = if issued {
                format!("{state},Issued")
            } else {
                state
            };
            vec![
                name.into(),
                age.into(),
                of(&["spec", "signerName"]),
                of(&["spec", "username"]),
                lasts.into(),
                state.into(),
            ]
        }
        "ClusterTrustBundle" => vec![name.into(), of(&["spec", "signerName"])],
        _ => vec![
            name.into(),
            of(&["spec", "podName"]),
            of(&["spec", "serviceAccountName"]),
            of(&["spec", "nodeName"]),
            of(&["spec", "signerName"]),
            state.into(),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(kind: &str, object: &Value) -> Vec<String> {
        let mut errors = vec![];
        validate(kind, object, &mut errors);
        errors.iter().map(|e| e.field.clone()).collect()
    }

    #[test]
    fn a_csr_needs_a_valid_request_known_usages_and_a_signer_name() {
        use base64::Engine as _;
        let key = rcgen::KeyPair::generate().expect("a key");
        let csr = rcgen::CertificateParams::default()
            .serialize_request(&key)
            .expect("a request");
        let pem = base64::engine::general_purpose::STANDARD.encode(csr.pem().expect("pem"));
        let mut request =
            json!({"spec": {"signerName": "a.b/c", "request": pem, "usages": ["client auth"]}});
        assert_eq!(
            errors("CertificateSigningRequest", &request),
            Vec::<String>::new()
        );
        request["spec"]["usages"] = json!(["flying"]);
        request["spec"]["signerName"] = json!("c");
        request["spec"]["request"] = json!("AAAA");
        request["spec"]["expirationSeconds"] = json!(60);
        assert_eq!(
            errors("CertificateSigningRequest", &request),
            [
                "spec.signerName",
                "spec.request",
                "spec.usages[0]",
                "spec.expirationSeconds"
            ]
        );
        let mut changed = vec![];
        validate_update(
            "CertificateSigningRequest",
            &json!({"spec": {"usages": []}}),
            &request,
            &mut changed,
        );
        assert_eq!(changed.len(), 1);
    }

    #[test]
    fn the_requester_is_the_authenticated_user() {
        let mut request =
            json!({"spec": {"username": "admin", "groups": ["system:masters"], "extra": {}}});
        requested_by(
            &mut request,
            &User {
                name: "me".into(),
                groups: vec!["mine".into()],
                ..User::default()
            },
        );
        assert_eq!(
            request["spec"],
            json!({"username": "me", "groups": ["mine"]})
        );
    }

    #[test]
    fn approval_changes_only_conditions_and_sets_their_times() {
        let mut request = json!({"spec": {"a": 1}, "status": {"certificate": "x"}});
        approve(
            &mut request,
            &json!({"certificate": "y", "conditions": [{"type": "Approved", "status": "True"}]}),
        );
        assert_eq!(
            (&request["spec"]["a"], &request["status"]["certificate"]),
            (&json!(1), &json!("x"))
        );
        let first = request["status"]["conditions"][0]["lastUpdateTime"].clone();
        assert!(first.is_string());
    }

    #[test]
    fn a_trust_bundle_contains_only_certificates_and_has_its_signers_prefix() {
        let certificate = rcgen::generate_simple_self_signed(["a".into()])
            .expect("a certificate")
            .cert
            .pem();
        let bundle = |name: &str, signer: &str, pem: &str| json!({"metadata": {"name": name}, "spec": {"signerName": signer, "trustBundle": pem}});
        assert_eq!(
            errors(
                "ClusterTrustBundle",
                &bundle("a.b:c:x", "a.b/c", &certificate)
            ),
            Vec::<String>::new()
        );
        assert_eq!(
            errors("ClusterTrustBundle", &bundle("x", "a.b/c", &certificate)),
            ["metadata.name"]
        );
        assert_eq!(
            errors("ClusterTrustBundle", &bundle("x", "", "no pem")),
            ["spec.trustBundle"]
        );
    }
}
