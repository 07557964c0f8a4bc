//! Approves and signs certificate requests of nodes, and removes old requests (`pkg/controller/certificates`).

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use super::{any_change, is_stale};
use holdfast_core::node::signing::{self, CsrRequest, Requester, Verdict};
use holdfast_kubeapi::Api;
use holdfast_kubeapi::Cache;
use holdfast_kubeapi::failure::chain;

/// Signs a validated request: whether it is for a client certificate, and the lifetime in seconds. The result is PEM.
pub(crate) type Sign = Arc<dyn Fn(&CsrRequest, bool, i64) -> Result<String, String> + Send + Sync>;

/// Maximum lifetime of a certificate, in seconds: one year.
const MAX_LIFETIME_SECONDS: i64 = 365 * 24 * 3600;
/// Retention of requests: denied, failed or issued ones, and all others.
const RETENTION: (SignedDuration, SignedDuration) = (
    SignedDuration::from_hours(1),
    SignedDuration::from_hours(24),
);

/// The next step for a request.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    Approve,
    Fail(String),
    /// The validated request, whether it is for a client certificate, and the lifetime in seconds.
    Sign(Box<CsrRequest>, bool, i64),
    Remove,
}

fn decide(request: &CertificateSigningRequest, now: Timestamp) -> Step {
    let status = request.status.clone().unwrap_or_default();
    let has = |kind: &str| status.conditions.iter().flatten().any(|c| c.type_ == kind);
    let age = request
        .metadata
        .creation_timestamp
        .as_ref()
        .map_or(SignedDuration::ZERO, |t| now.duration_since(t.0));
    let (approved, over) = (has("Approved"), has("Denied") || has("Failed"));
    let issued = status.certificate.as_ref().is_some_and(|c| !c.0.is_empty());
    if age
        > if over || issued {
            RETENTION.0
        } else {
            RETENTION.1
        }
    {
        return Step::Remove;
    }
    if over || issued {
        return Step::Nothing;
    }
    let spec = &request.spec;
    let Some(der) = signing::request_der(&spec.request.0) else {
        return Step::Nothing;
    };
    let usages: Vec<&str> = spec.usages.iter().flatten().map(String::as_str).collect();
    let groups = spec.groups.clone().unwrap_or_default();
    let requester = Requester {
        name: spec.username.as_deref().unwrap_or_default(),
        groups: &groups,
    };
    let csr = signing::parse_request(&der);
    let verdict = signing::decide(&spec.signer_name, &csr, &usages, requester);
    match (verdict, csr) {
        (Verdict::Ignore, _) => Step::Nothing,
        (Verdict::Allow, _) if !approved => Step::Approve,
        (Verdict::Wait | Verdict::Refuse(_), _) if !approved => Step::Nothing,
        (Verdict::Refuse(why), _) | (_, Err(why)) => Step::Fail(why),
        (Verdict::Allow | Verdict::Wait, Ok(csr)) => {
            let seconds = spec.expiration_seconds.map(i64::from).filter(|s| *s >= 600);
            Step::Sign(
                Box::new(csr),
                spec.signer_name == signing::CLIENT,
                seconds
                    .unwrap_or(MAX_LIFETIME_SECONDS)
                    .min(MAX_LIFETIME_SECONDS),
            )
        }
    }
}

async fn take(
    client: &Client,
    request: &CertificateSigningRequest,
    step: Step,
    sign: &Sign,
) -> Result<(), kube::Error> {
    let (api, name) = (
        Api::<CertificateSigningRequest>::all(client.clone()),
        request.name_any(),
    );
    let own = request
        .status
        .as_ref()
        .and_then(|s| s.conditions.clone())
        .unwrap_or_default();
    let with = |kind: &str, reason: &str, message: &str| -> Value {
        let mut all = json!(own);
        if let Some(list) = all.as_array_mut() {
            list.push(
                json!({"type": kind, "status": "True", "reason": reason, "message": message}),
            );
        }
        json!({"metadata": {"resourceVersion": request.metadata.resource_version}, "status": {"conditions": all}})
    };
    match step {
        Step::Nothing => Ok(()),
        Step::Remove => api
            .delete(&name, &DeleteParams::default())
            .await
            .map(|_| ()),
        Step::Approve => {
            let patch = with(
                "Approved",
                "AutoApproved",
                "Auto approving kubelet client certificate after SubjectAccessReview.",
            );
            let body = serde_json::to_vec(&patch).map_err(kube::Error::SerdeError)?;
            api.patch_below(
                "approval",
                &name,
                &PatchParams::default(),
                &Patch::Merge(
                    serde_json::from_slice::<Value>(&body).map_err(kube::Error::SerdeError)?,
                ),
            )
            .await
            .map(|_| ())
        }
        Step::Fail(why) => api
            .patch_status(
                &name,
                &PatchParams::default(),
                &Patch::Merge(with("Failed", "SignerValidationFailure", &why)),
            )
            .await
            .map(|_| ()),
        Step::Sign(csr, is_client, seconds) => {
            let patch = match sign(&csr, is_client, seconds) {
                Ok(pem) => {
                    use base64::Engine as _;
                    let text = base64::engine::general_purpose::STANDARD.encode(pem);
                    json!({"metadata": {"resourceVersion": request.metadata.resource_version}, "status": {"certificate": text}})
                }
                Err(why) => with("Failed", "SigningFailed", &why),
            };
            api.patch_status(&name, &PatchParams::default(), &Patch::Merge(patch))
                .await
                .map(|_| ())
        }
    }
}

/// Runs until the process exits.
pub(super) async fn run(client: Client, sign: Sign) {
    let requests: Cache<CertificateSigningRequest> = Cache::start(
        Api::all(client.clone()),
        watcher::Config::default().streaming_lists(),
    );
    requests.synced().await;
    let mut changes = [requests.changes()];
    loop {
        changes[0].mark_unchanged();
        let mut unfinished = false;
        for request in requests.list() {
            let step = decide(&request, Timestamp::now());
            if let Err(error) = take(&client, &request, step, &sign).await {
                unfinished |= !is_stale(&error);
                if unfinished {
                    tracing::warn!(error = %chain(&error), request = request.name_any(), "reconcile of a CertificateSigningRequest failed, retrying");
                }
            }
        }
        any_change(
            &mut changes,
            if unfinished {
                Duration::from_millis(500)
            } else {
                Duration::from_secs(60)
            },
        )
        .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(username: &str, status: Value) -> CertificateSigningRequest {
        use base64::Engine as _;
        let mut params = rcgen::CertificateParams::default();
        params
            .distinguished_name
            .push(rcgen::DnType::OrganizationName, "system:nodes");
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, "system:node:n");
        let pem = params
            .serialize_request(&rcgen::KeyPair::generate().expect("a key"))
            .expect("a request")
            .pem()
            .expect("pem");
        let request = base64::engine::general_purpose::STANDARD.encode(pem);
        serde_json::from_value(json!({"metadata": {"name": "r", "creationTimestamp": "1970-01-01T00:00:00Z"},
            "spec": {"signerName": signing::CLIENT, "request": request, "username": username, "usages": ["digital signature", "client auth"], "expirationSeconds": 700},
            "status": status}))
        .expect("a request")
    }

    #[test]
    fn node_requests_are_approved_then_signed_and_expired_ones_are_removed() {
        let at = |hours: i64| Timestamp::UNIX_EPOCH + SignedDuration::from_hours(hours);
        let condition = |kind: &str| json!({"conditions": [{"type": kind, "status": "True"}]});
        let node = "system:node:n";
        assert_eq!(decide(&of(node, json!({})), at(0)), Step::Approve);
        assert_eq!(
            decide(&of("other", json!({})), at(0)),
            Step::Nothing,
            "requests of other users need manual approval"
        );
        assert!(matches!(
            decide(&of("other", condition("Approved")), at(0)),
            Step::Sign(csr, true, 700) if csr.name == node
        ));
        assert_eq!(decide(&of(node, condition("Denied")), at(0)), Step::Nothing);
        assert_eq!(decide(&of(node, condition("Denied")), at(2)), Step::Remove);
        assert_eq!(
            (
                decide(&of("x", json!({})), at(2)),
                decide(&of("x", json!({})), at(25))
            ),
            (Step::Nothing, Step::Remove)
        );
    }
}
