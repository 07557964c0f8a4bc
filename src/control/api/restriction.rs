//! The writes that a node's agent is allowed: its own Node and Lease, and the mirrors and statuses of
//! its pods (upstream's admission plugin NodeRestriction). Authorisation restricts which objects a node
//! may write; this module restricts their content. Pure.

use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

use super::certificates;
use super::error::ApiError;
use super::object::{at, list, name, text, uid};
use super::resources::{Resource, Sub};
use holdfast_core::node::signing;
use holdfast_core::pod::{self as core_pod, references};

/// Labels in `kubernetes.io` and `k8s.io` that a node may set on itself.
const LABELS: [&str; 10] = [
    "kubernetes.io/hostname",
    "kubernetes.io/arch",
    "kubernetes.io/os",
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/instance-type",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
];
/// Domains in which a node may set any label on itself.
const DOMAINS: [&str; 2] = ["kubelet.kubernetes.io", "node.kubernetes.io"];
/// The domain reserved for administrators.
const RESTRICTED: &str = "node-restriction.kubernetes.io";

fn is_in(domain: &str, parent: &str) -> bool {
    domain == parent
        || domain
            .strip_suffix(parent)
            .is_some_and(|before| before.ends_with('.'))
}

/// Whether a node may set this label on itself.
fn is_own_label(key: &str) -> bool {
    let Some((domain, _)) = key.split_once('/') else {
        return true;
    };
    if is_in(domain, RESTRICTED) {
        return false;
    }
    let cluster = is_in(domain, "kubernetes.io") || is_in(domain, "k8s.io");
    !cluster || LABELS.contains(&key) || DOMAINS.iter().any(|d| is_in(domain, d))
}

/// The labels that differ and that a node must not set.
fn foreign_labels(old: Option<&Value>, new: &Value) -> Vec<String> {
    let of = |object: Option<&Value>| {
        object
            .and_then(|o| at(o, &["metadata", "labels"]))
            .and_then(Value::as_object)
            .cloned()
            .unwrap_or_default()
    };
    let (old, new) = (of(old), of(Some(new)));
    let mut keys: Vec<String> = old
        .keys()
        .chain(new.keys())
        .filter(|k| old.get(*k) != new.get(*k) && !is_own_label(k))
        .cloned()
        .collect();
    keys.sort();
    keys.dedup();
    keys
}

/// A write request of a node.
#[derive(Debug, Clone, Copy)]
pub struct Write<'a> {
    /// The kind.
    pub resource: &'a Resource,
    /// The subresource, if any.
    pub sub: Option<Sub>,
    /// The object's namespace, if any.
    pub namespace: Option<&'a str>,
    /// The object's name: from the path, or for a new object from its metadata.
    pub name: &'a str,
    /// The stored object; `None` for a creation.
    pub old: Option<&'a Value>,
    /// The new object, or the body of the subresource; `None` for a deletion.
    pub new: Option<&'a Value>,
}

/// Reads stored objects by their key.
pub type Read<'a> = &'a dyn Fn(&str) -> Option<Value>;

/// Why a write is rejected.
enum Refusal {
    /// 403 with this reason.
    Forbidden(String),
    /// 404: a referenced object does not exist; plural and name.
    Missing(&'static str, String),
    /// 500: a reference does not match the stored object, as upstream, so that the node retries.
    Stale(String),
}

type Verdict = Result<(), Refusal>;

fn forbid(why: impl Into<String>) -> Verdict {
    Err(Refusal::Forbidden(why.into()))
}

impl<'a> Write<'a> {
    /// A write to `object` (namespace and name) of `resource`, or to one of its subresources.
    #[must_use]
    pub fn new(
        (resource, sub): (&'a Resource, Option<Sub>),
        (namespace, name): (Option<&'a str>, &'a str),
        old: Option<&'a Value>,
        new: Option<&'a Value>,
    ) -> Write<'a> {
        Write {
            resource,
            sub,
            namespace,
            name,
            old,
            new,
        }
    }

    fn operation(&self) -> &'static str {
        match (self.old, self.new) {
            (None, _) => "CREATE",
            (_, None) => "DELETE",
            _ => "UPDATE",
        }
    }
}

/// Whether two values are equal; absent and empty values count as equal.
fn same(a: Option<&Value>, b: Option<&Value>) -> bool {
    let filled = |value: Option<&Value>| {
        value
            .filter(|v| match v {
                Value::Null => false,
                Value::Array(items) => !items.is_empty(),
                Value::Object(map) => !map.is_empty(),
                _ => true,
            })
            .cloned()
    };
    filled(a) == filled(b)
}

fn node_object(node: &str, write: &Write<'_>) -> Verdict {
    if write.name != node {
        return forbid(format!(
            "node {node:?} is not allowed to modify node {:?}",
            write.name
        ));
    }
    let Some(new) = write.new else { return Ok(()) };
    let labels = foreign_labels(write.old, new).join(", ");
    let source = at(new, &["spec", "configSource"]);
    let Some(old) = write.old else {
        if source.is_some() {
            return forbid(format!(
                "node {node:?} is not allowed to create pods with a non-nil configSource"
            ));
        }
        if !labels.is_empty() {
            return forbid(format!(
                "node {node:?} is not allowed to set the following labels: {labels}"
            ));
        }
        return Ok(());
    };
    if source.is_some() && source != at(old, &["spec", "configSource"]) {
        return forbid(format!(
            "node {node:?} is not allowed to update configSource to a new non-nil configSource"
        ));
    }
    for (path, what) in [
        (["spec", "taints"], "taints"),
        (["metadata", "ownerReferences"], "ownerReferences"),
    ] {
        if list(old, &path) != list(new, &path) {
            return forbid(format!("node {node:?} is not allowed to modify {what}"));
        }
    }
    if !labels.is_empty() {
        return forbid(format!("is not allowed to modify labels: {labels}"));
    }
    Ok(())
}

/// Checks that the node itself is the only owner of a mirror pod.
fn owner(node: &str, read: Read<'_>, pod: &Value) -> Verdict {
    let owner = match list(pod, &["metadata", "ownerReferences"]) {
        [one] => one,
        [] => {
            return forbid(format!(
                "node {node:?} can only create pods with an owner reference set to itself"
            ));
        }
        _ => {
            return forbid(format!(
                "node {node:?} can only create pods with a single owner reference set to itself"
            ));
        }
    };
    if text(owner, &["apiVersion"]) != Some("v1")
        || text(owner, &["kind"]) != Some("Node")
        || text(owner, &["name"]) != Some(node)
    {
        return forbid(format!(
            "node {node:?} can only create pods with an owner reference set to itself"
        ));
    }
    if owner["controller"] != true {
        return forbid(format!(
            "node {node:?} can only create pods with a controller owner reference set to itself"
        ));
    }
    if owner["blockOwnerDeletion"] == true {
        return forbid(format!(
            "node {node:?} must not set blockOwnerDeletion on an owner reference"
        ));
    }
    let own =
        read(&format!("nodes/{node}")).ok_or_else(|| Refusal::Missing("nodes", node.to_owned()))?;
    let (expected, is) = (text(owner, &["uid"]).unwrap_or_default(), uid(&own));
    if expected != is {
        return forbid(format!(
            "node {node} UID mismatch: expected {expected} got {is}"
        ));
    }
    Ok(())
}

/// Checks that a pod is the mirror of a static pod of this node and refers to no API objects.
fn mirror(node: &str, read: Read<'_>, pod: &Value) -> Verdict {
    let annotation = ["metadata", "annotations", "kubernetes.io/config.mirror"];
    if at(pod, &annotation).is_none() {
        return forbid(format!(
            "pod does not have \"kubernetes.io/config.mirror\" annotation, node {node:?} can only create mirror pods"
        ));
    }
    if text(pod, &["spec", "nodeName"]) != Some(node) {
        return forbid(format!(
            "node {node:?} can only create pods with spec.nodeName set to itself"
        ));
    }
    owner(node, read, pod)?;
    let unclear = |why: String| format!("error checking mirror pod for API references: {why}");
    let typed: Pod = serde_json::from_value(pod.clone())
        .map_err(|e| Refusal::Forbidden(unclear(e.to_string())))?;
    match references::kind_of_object(&typed) {
        Err(why) => return forbid(unclear(why)),
        Ok(Some(kind)) => {
            return forbid(format!(
                "node {node:?} can not create pods that reference {kind}"
            ));
        }
        Ok(None) => {}
    }
    // An unknown volume type may refer to any object.
    for volume in core_pod::spec(&typed).volumes.iter().flatten() {
        let sources = serde_json::to_value(volume).ok();
        if sources
            .and_then(|v| Some(v.as_object()?.len()))
            .is_none_or(|n| n < 2)
        {
            return forbid(unclear(format!(
                "unknown volume type for volume  {:?}",
                volume.name
            )));
        }
    }
    Ok(())
}

fn pod(node: &str, read: Read<'_>, write: &Write<'_>) -> Verdict {
    match (write.sub, write.old, write.new) {
        (None, None, Some(new)) => mirror(node, read, new),
        (None, Some(old), None) if text(old, &["spec", "nodeName"]) != Some(node) => forbid(
            format!("node {node:?} can only delete pods with spec.nodeName set to itself"),
        ),
        (None, Some(_), None) => Ok(()),
        (None, ..) => forbid(format!(
            "unexpected operation {:?}, node {node:?} can only create and delete mirror pods",
            write.operation()
        )),
        (Some(Sub::Status), Some(old), Some(new)) => pod_status(node, old, new),
        (Some(Sub::Eviction), Some(old), _) if text(old, &["spec", "nodeName"]) != Some(node) => {
            forbid(format!(
                "node {node} can only evict pods with spec.nodeName set to itself"
            ))
        }
        (Some(Sub::Eviction), ..) => Ok(()),
        (Some(Sub::Status), ..) => forbid(format!("unexpected operation {:?}", write.operation())),
        (Some(sub), ..) => forbid(format!(
            "unexpected pod subresource {:?}, only 'status' and 'eviction' are allowed",
            sub.name()
        )),
    }
}

/// Checks a pod's status. The node must not add resource claims, because it may then read them (CVE-2025-4563).
fn pod_status(node: &str, old: &Value, new: &Value) -> Verdict {
    if text(old, &["spec", "nodeName"]) != Some(node) {
        return forbid(format!(
            "node {node:?} can only update pod status for pods with spec.nodeName set to itself"
        ));
    }
    let changed = |path: &[&str]| !same(at(old, path), at(new, path));
    if changed(&["metadata", "labels"]) {
        return forbid(format!(
            "node {node:?} cannot update labels through pod status"
        ));
    }
    if changed(&["status", "resourceClaimStatuses"]) {
        return forbid(format!(
            "node {node:?} cannot update resource claim statues"
        ));
    }
    if changed(&["status", "extendedResourceClaimStatus"]) {
        return forbid(format!(
            "node {node:?} cannot update extended resource claim status"
        ));
    }
    Ok(())
}

/// The fields of a claim's status that a node reports after a file system resize.
const CLAIM_STATUS: [&str; 4] = [
    "capacity",
    "conditions",
    "allocatedResources",
    "allocatedResourceStatuses",
];

fn claim(node: &str, write: &Write<'_>) -> Verdict {
    let (old, new) = match (write.sub, write.old, write.new) {
        (Some(Sub::Status), Some(old), Some(new)) => (old, new),
        (Some(Sub::Status), ..) => {
            return forbid(format!("unexpected operation {:?}", write.operation()));
        }
        _ => return forbid("may only update PVC status"),
    };
    let mut changed = vec![];
    for (part, own) in [
        ("metadata", &["resourceVersion", "managedFields"][..]),
        ("spec", &[]),
        ("status", &CLAIM_STATUS),
    ] {
        let keys = |object: &Value| -> Vec<String> {
            let map = at(object, &[part]).and_then(Value::as_object);
            map.into_iter().flat_map(|m| m.keys().cloned()).collect()
        };
        let foreign = keys(old)
            .into_iter()
            .chain(keys(new))
            .filter(|k| !own.contains(&k.as_str()))
            .filter(|k| !same(at(old, &[part, k]), at(new, &[part, k])));
        changed.extend(foreign.map(|k| format!("{part}.{k}")));
    }
    changed.sort();
    changed.dedup();
    if changed.is_empty() {
        return Ok(());
    }
    forbid(format!(
        "node {node:?} is not allowed to update fields other than status.quantity and status.conditions: {}",
        changed.join(", ")
    ))
}

/// The error if an object that a PodCertificateRequest names does not exist.
fn missing_for_certificate(kind: &str, name: &str, plural: &str, short: &str) -> Refusal {
    Refusal::Stale(format!(
        "while retrieving {kind} {name:?} named in the PodCertificateRequest: {plural} {short:?} not found"
    ))
}

fn pod_certificate(node: &str, read: Read<'_>, write: &Write<'_>) -> Verdict {
    if write.old.is_some() {
        return forbid(format!("unexpected operation {}", write.operation()));
    }
    if let Some(sub) = write.sub {
        return forbid(format!("unexpected subresource {}", sub.name()));
    }
    let Some(request) = write.new else {
        return Ok(());
    };
    let specified = |key: &str| text(request, &["spec", key]).unwrap_or_default();
    if specified("nodeName") != node {
        return forbid(format!(
            "PodCertificateRequest.Spec.NodeName={:?}, which is not the requesting node {node:?}",
            specified("nodeName")
        ));
    }
    let namespace = write.namespace.unwrap_or_default();
    let full = format!("{namespace}/{}", specified("podName"));
    let missing = missing_for_certificate;
    let own = read(&format!("nodes/{node}")).ok_or_else(|| missing("node", node, "nodes", node))?;
    if uid(&own) != specified("nodeUID") {
        return Err(Refusal::Stale(format!(
            "PodCertificateRequest for pod {full:?} names node UID {:?}, inconsistent with the running node ({:?})",
            specified("nodeUID"),
            uid(&own)
        )));
    }
    let pod = read(&format!("pods/{full}"))
        .ok_or_else(|| missing("pod", &full, "pods", specified("podName")))?;
    if uid(&pod) != specified("podUID") {
        return Err(Refusal::Stale(format!(
            "PodCertificateRequest for pod {full:?} contains pod UID ({:?}) which differs from running pod {:?}",
            specified("podUID"),
            uid(&pod)
        )));
    }
    if text(&pod, &["spec", "nodeName"]) != Some(node) {
        return forbid(format!(
            "pod {full:?} is not running on node {node:?} named in the PodCertificateRequest"
        ));
    }
    if at(
        &pod,
        &["metadata", "annotations", "kubernetes.io/config.mirror"],
    )
    .is_some()
    {
        return forbid(format!("pod {full:?} is a mirror pod"));
    }
    account_of_certificate(read, request, &full, &pod)
}

/// Checks that a PodCertificateRequest names the service account of its pod.
fn account_of_certificate(read: Read<'_>, request: &Value, full: &str, pod: &Value) -> Verdict {
    let specified = |key: &str| text(request, &["spec", key]).unwrap_or_default();
    let namespace = full.split_once('/').map_or("", |(namespace, _)| namespace);
    let account = text(pod, &["spec", "serviceAccountName"]).unwrap_or_default();
    if specified("serviceAccountName") != account {
        return forbid(format!(
            "PodCertificateRequest for pod {full:?} contains serviceAccountName ({:?}) that differs from running pod ({account:?})",
            specified("serviceAccountName")
        ));
    }
    let name = format!("{namespace}/{account}");
    let found = read(&format!("serviceaccounts/{name}")).ok_or_else(|| {
        missing_for_certificate("service account", &name, "serviceaccounts", account)
    })?;
    if uid(&found) != specified("serviceAccountUID") {
        return Err(Refusal::Stale(format!(
            "PodCertificateRequest for pod {full:?} names service account UID {:?}, which differs from the running service account ({:?})",
            specified("serviceAccountUID"),
            uid(&found)
        )));
    }
    Ok(())
}

fn lease(node: &str, write: &Write<'_>) -> Verdict {
    if write.namespace != Some("kube-node-lease") {
        return forbid("can only access leases in the \"kube-node-lease\" system namespace");
    }
    if write.name != node {
        return forbid("can only access node lease with the same name as the requesting node");
    }
    Ok(())
}

/// A node may create and delete only slices of its own devices; the authoriser restricts changes of existing slices.
fn resource_slice(node: &str, write: &Write<'_>) -> Verdict {
    let (object, verb) = match (write.old, write.new) {
        (None, Some(new)) => (new, "create"),
        (Some(old), None) => (old, "delete"),
        _ => return Ok(()),
    };
    if text(object, &["spec", "nodeName"]) == Some(node) {
        return Ok(());
    }
    forbid(format!(
        "can only {verb} ResourceSlice with the same NodeName as the requesting node"
    ))
}

/// A node may request certificates for its own name only.
fn signing_request(node: &str, write: &Write<'_>) -> Verdict {
    let (None, Some(new)) = (write.old, write.new) else {
        return Ok(());
    };
    let signer = text(new, &["spec", "signerName"]);
    if !signer.is_some_and(|s| s == signing::CLIENT || s == signing::SERVING) {
        return Ok(());
    }
    let name = text(new, &["spec", "request"]).and_then(certificates::common_name);
    match name {
        None => forbid("unable to parse csr: PEM block type must be CERTIFICATE REQUEST"),
        Some(name) if name != format!("system:node:{node}") => forbid(format!(
            "can only create a node CSR with CN=system:node:{node}"
        )),
        Some(_) => Ok(()),
    }
}

/// Checks a write of a node (`plugin/pkg/admission/noderestriction/admission.go`).
///
/// # Errors
///
/// 403 in upstream's wording; 404 or 500 if a referenced object does not exist or has another uid.
pub fn check(node: &str, read: Read<'_>, write: &Write<'_>) -> Result<(), ApiError> {
    let resource = write.resource;
    let verdict = match resource.kind {
        "Pod" => pod(node, read, write),
        "Node" => node_object(node, write),
        "PersistentVolumeClaim" => claim(node, write),
        "PodCertificateRequest" => pod_certificate(node, read, write),
        "Lease" => lease(node, write),
        "CSINode" if write.name != node => {
            forbid("can only access CSINode with the same name as the requesting node")
        }
        "ResourceSlice" => resource_slice(node, write),
        "CertificateSigningRequest" => signing_request(node, write),
        _ => Ok(()),
    };
    verdict.map_err(|refusal| match refusal {
        Refusal::Forbidden(why) => {
            ApiError::refused(resource.group, resource.plural, write.name, &why)
        }
        Refusal::Missing(plural, name) => ApiError::not_found("", plural, &name),
        Refusal::Stale(why) => ApiError::new(500, "", why),
    })
}

/// How the driver of a volume is determined.
#[derive(Debug, Clone)]
pub enum Source<'a> {
    /// By the driver's name.
    Driver(&'a str),
    /// By the driver of the volume that this claim is bound to.
    Claim(String),
}

/// Whether a pod needs tokens for an audience (empty for the apiserver's own), in
/// a projected volume or for a CSI driver.
fn needs_audience(
    pod: &Value,
    audience: &str,
    drivers: impl Fn(&Source<'_>) -> Vec<String>,
) -> bool {
    list(pod, &["spec", "volumes"]).iter().any(|volume| {
        let own = list(volume, &["projected", "sources"])
            .iter()
            .filter_map(|s| at(s, &["serviceAccountToken"]))
            .any(|token| text(token, &["audience"]).unwrap_or_default() == audience);
        let ephemeral_claim = || {
            format!(
                "{}-{}",
                name(pod),
                text(volume, &["name"]).unwrap_or_default()
            )
        };
        let source = if at(volume, &["ephemeral", "volumeClaimTemplate"]).is_some() {
            Some(Source::Claim(ephemeral_claim()))
        } else if let Some(claim) = text(volume, &["persistentVolumeClaim", "claimName"]) {
            Some(Source::Claim(claim.to_owned()))
        } else {
            text(volume, &["csi", "driver"]).map(Source::Driver)
        };
        own || source.is_some_and(|s| drivers(&s).iter().any(|a| a == audience))
    })
}

/// A token request of a node.
pub(crate) struct RequestedToken<'a> {
    /// The service account's name.
    pub account: &'a str,
    /// The object to which the token is bound.
    pub bound: Option<&'a Value>,
    /// The pod that `bound` names; `None` if it does not exist.
    pub pod: Option<&'a Value>,
    /// The audiences; empty for the apiserver's own.
    pub audiences: &'a [String],
}

/// Checks a token request of a node. The token must be bound to a pod of the node. Its audience must be one that the
/// pod or a CSI driver of its volumes needs. `drivers` returns a driver's audiences; `allowed` returns whether RBAC
/// allows the node tokens for an audience.
///
/// # Errors
///
/// 403 in upstream's wording (`admitServiceAccount`), 404 if the pod does not exist.
pub(crate) fn check_token(
    node: &str,
    token: &RequestedToken<'_>,
    drivers: impl Fn(&Source<'_>) -> Vec<String>,
    allowed: impl Fn(&str) -> bool,
) -> Result<(), ApiError> {
    let refuse = |why: &str| Err(ApiError::refused("", "serviceaccounts", token.account, why));
    let bound_to = |key: &str| {
        token
            .bound
            .and_then(|b| text(b, &[key]))
            .unwrap_or_default()
    };
    if bound_to("apiVersion") != "v1" || bound_to("kind") != "Pod" || bound_to("name").is_empty() {
        return refuse("node requested token not bound to a pod");
    }
    if bound_to("uid").is_empty() {
        return refuse("node requested token with a pod binding without a uid");
    }
    let pod = token
        .pod
        .ok_or_else(|| ApiError::not_found("", "pods", bound_to("name")))?;
    if bound_to("uid") != uid(pod) {
        return refuse(&format!(
            "the UID in the bound object reference ({}) does not match the UID in record. The object might have been deleted and then recreated",
            bound_to("uid")
        ));
    }
    if text(pod, &["spec", "nodeName"]) != Some(node) {
        return refuse("node requested token bound to a pod scheduled on a different node");
    }
    let audience = match token.audiences {
        [] => "",
        [one] => one.as_str(),
        _ => return refuse("node may only request 0 or 1 audiences"),
    };
    if needs_audience(pod, audience, drivers) || allowed(audience) {
        return Ok(());
    }
    refuse(&format!(
        "audience {audience:?} not found in pod spec volume, system:node:{node} is not authorized to request tokens for this audience"
    ))
}

#[cfg(test)]
mod tests;
