//! Approves and signs certificate requests of nodes, and removes old requests (`pkg/controller/certificates`).

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use super::runtime::relevant_changes;
use super::{Caches, any_change, is_stale};
use holdfast_core::node::signing::{self, CsrRequest, NodeNames, Requester, Verdict};
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

/// The verdict of the signers' rules about a parsed request.
fn judge(request: &CertificateSigningRequest, csr: &Result<CsrRequest, String>) -> Verdict {
    let spec = &request.spec;
    let usages: Vec<&str> = spec.usages.iter().flatten().map(String::as_str).collect();
    let requester = Requester {
        name: spec.username.as_deref().unwrap_or_default(),
        groups: spec.groups.as_deref().unwrap_or_default(),
    };
    signing::decide(&spec.signer_name, csr, &usages, requester)
}

/// Decides about a request. `node_names` returns the names and addresses of a Node, and `None` if there is no such Node.
fn decide(
    request: &CertificateSigningRequest,
    node_names: impl Fn(&str) -> Option<NodeNames>,
    now: Timestamp,
) -> Step {
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
    let csr = signing::parse_request(&der);
    let verdict = match (judge(request, &csr), &csr) {
        // A Node that has not reported its addresses yet may do so later.
        (Verdict::Wait, Ok(csr))
            if !approved && signing::belongs_to_node(&spec.signer_name, csr, node_names) =>
        {
            Verdict::Allow
        }
        (verdict, _) => verdict,
    };
    match (verdict, csr) {
        (Verdict::Ignore, _) => Step::Nothing,
        (Verdict::Allow, _) if !approved => Step::Approve,
        (Verdict::Wait | Verdict::Refuse(_), _) if !approved => Step::Nothing,
        (Verdict::Refuse(why), _) | (_, Err(why)) => Step::Fail(why),
        (Verdict::Allow | Verdict::Wait, Ok(csr)) => {
            let seconds = spec.expiration_seconds.map(i64::from).filter(|s| *s >= 600);
            Step::Sign(
                Box::new(csr),
                spec.signer_name != signing::SERVING,
                seconds
                    .unwrap_or(MAX_LIFETIME_SECONDS)
                    .min(MAX_LIFETIME_SECONDS),
            )
        }
    }
}

/// The message of an approval; upstream's for client certificates.
fn approval_message(signer: &str) -> &'static str {
    match signer {
        signing::SERVING => {
            "Auto approving kubelet serving certificate: its names and addresses belong to the Node."
        }
        signing::PROXY => "Auto approving the client certificate of the node's service proxy.",
        _ => "Auto approving kubelet client certificate after SubjectAccessReview.",
    }
}

/// The names and addresses of a Node, without addresses that another Node reports, too: a Node must not get a certificate for
/// another machine.
fn node_names(caches: &Caches, name: &str) -> Option<NodeNames> {
    let mut names = NodeNames::of(&*caches.nodes.get("", name)?);
    for other in caches.nodes.list() {
        if other.name_any() != name {
            names.remove(&NodeNames::of(&other));
        }
    }
    Some(names)
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
                approval_message(&request.spec.signer_name),
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
pub(super) async fn run(client: Client, caches: Caches, sign: Sign) {
    let requests: Cache<CertificateSigningRequest> = Cache::start(
        Api::all(client.clone()),
        watcher::Config::default().streaming_lists(),
    );
    requests.synced().await;
    let addresses = relevant_changes(&caches.nodes, |before, after| {
        before.map(NodeNames::of) != after.map(NodeNames::of)
    });
    let mut changes = [requests.changes(), addresses];
    loop {
        for receiver in &mut changes {
            receiver.mark_unchanged();
        }
        let mut unfinished = false;
        for request in requests.list() {
            let names = |name: &str| node_names(&caches, name);
            let step = decide(&request, names, Timestamp::now());
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
    use k8s_openapi::api::core::v1::Node;

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

    fn decide_alone(request: &CertificateSigningRequest, now: Timestamp) -> Step {
        decide(request, |_| None, now)
    }

    #[test]
    fn node_requests_are_approved_then_signed_and_expired_ones_are_removed() {
        let at = |hours: i64| Timestamp::UNIX_EPOCH + SignedDuration::from_hours(hours);
        let condition = |kind: &str| json!({"conditions": [{"type": kind, "status": "True"}]});
        let node = "system:node:n";
        assert_eq!(decide_alone(&of(node, json!({})), at(0)), Step::Approve);
        assert_eq!(
            decide_alone(&of("other", json!({})), at(0)),
            Step::Nothing,
            "requests of other users need manual approval"
        );
        assert!(matches!(
            decide_alone(&of("other", condition("Approved")), at(0)),
            Step::Sign(csr, true, 700) if csr.name == node
        ));
        assert_eq!(
            decide_alone(&of(node, condition("Denied")), at(0)),
            Step::Nothing
        );
        assert_eq!(
            decide_alone(&of(node, condition("Denied")), at(2)),
            Step::Remove
        );
        assert_eq!(
            (
                decide_alone(&of("x", json!({})), at(2)),
                decide_alone(&of("x", json!({})), at(25))
            ),
            (Step::Nothing, Step::Remove)
        );
    }

    #[test]
    fn serving_certificates_need_a_node_with_their_names() {
        let node: Node =
            serde_json::from_value(json!({"metadata": {"name": "n"}, "status": {"addresses": [
            {"type": "InternalIP", "address": "192.0.2.7"}]}}))
            .expect("a Node");
        let key = rcgen::KeyPair::generate().expect("a key");
        let request = |names: &[&str], user: &str| {
            let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
            let mut params = rcgen::CertificateParams::new(names).expect("names");
            let subject = &mut params.distinguished_name;
            subject.push(rcgen::DnType::OrganizationName, "system:nodes");
            subject.push(rcgen::DnType::CommonName, "system:node:n");
            let pem = params.serialize_request(&key).expect("a request").pem();
            let mut request = of(user, json!({}));
            request.spec.request.0 = pem.expect("PEM").into_bytes();
            request.spec.signer_name = signing::SERVING.into();
            request.spec.usages = Some(vec!["digital signature".into(), "server auth".into()]);
            request
        };
        let known = |name: &str| (name == "n").then(|| NodeNames::of(&node));
        let fine = request(&["n", "192.0.2.7"], "system:node:n");
        let at = Timestamp::UNIX_EPOCH;
        assert_eq!(decide(&fine, known, at), Step::Approve);
        assert_eq!(decide(&fine, |_| None, at), Step::Nothing);
        for other in [
            request(&["n", "192.0.2.8"], "system:node:n"),
            request(&["m"], "system:node:n"),
            request(&["n"], "system:node:m"),
        ] {
            assert_eq!(decide(&other, known, at), Step::Nothing);
        }
        let mut approved = fine;
        approved.status =
            serde_json::from_value(json!({"conditions": [{"type": "Approved", "status": "True"}]}))
                .expect("a status");
        assert!(matches!(
            decide(&approved, |_| None, at),
            Step::Sign(_, false, 700)
        ));
    }
}
