//! What a node's agent may write: its own Node, its own pods' mirrors and status, its own lease (NodeRestriction;
//! control-plane spec, 6.3). Authorisation says which objects; this says what may be in them. Pure.

use serde_json::Value;

use super::error::ApiError;
use super::object::{at, list, name, text};
use super::resources::{Resource, Sub};
use super::token::ISSUER;

/// Labels that a node may give itself below `kubernetes.io` and `k8s.io`.
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
/// Domains in which it may give itself any.
const DOMAINS: [&str; 2] = ["kubelet.kubernetes.io", "node.kubernetes.io"];
/// The administrator's own.
const RESTRICTED: &str = "node-restriction.kubernetes.io";

fn is_in(domain: &str, parent: &str) -> bool {
    domain == parent
        || domain
            .strip_suffix(parent)
            .is_some_and(|before| before.ends_with('.'))
}

/// Whether a node may set a label of its own.
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

/// The labels that differ, and that are not the node's to set.
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

fn node_object(node: &str, old: Option<&Value>, new: &Value) -> Result<(), String> {
    if name(new) != node {
        return Err(format!(
            "node {node:?} is not allowed to modify node {:?}",
            name(new)
        ));
    }
    let labels = foreign_labels(old, new);
    if !labels.is_empty() {
        let what = if old.is_some() {
            "modify labels"
        } else {
            "set the following labels"
        };
        return Err(format!("is not allowed to {what}: {}", labels.join(", ")));
    }
    let Some(old) = old else { return Ok(()) };
    for (path, what) in [
        (["spec", "taints"], "taints"),
        (["metadata", "ownerReferences"], "ownerReferences"),
    ] {
        if list(old, &path) != list(new, &path) {
            return Err(format!("node {node:?} is not allowed to modify {what}"));
        }
    }
    Ok(())
}

/// Whether a pod is the mirror of a static pod of this node, and draws on nothing of the API.
fn mirror(node: &str, uid: Option<String>, pod: &Value) -> Result<(), String> {
    if at(
        pod,
        &["metadata", "annotations", "kubernetes.io/config.mirror"],
    )
    .is_none()
    {
        return Err(format!(
            "pod does not have \"kubernetes.io/config.mirror\" annotation, node {node:?} can only create mirror pods"
        ));
    }
    if text(pod, &["spec", "nodeName"]) != Some(node) {
        return Err(format!(
            "node {node:?} can only create pods with spec.nodeName set to itself"
        ));
    }
    let [owner] = list(pod, &["metadata", "ownerReferences"]) else {
        return Err(format!(
            "node {node:?} can only create pods with a single owner reference set to itself"
        ));
    };
    let ours = text(owner, &["apiVersion"]) == Some("v1")
        && text(owner, &["kind"]) == Some("Node")
        && text(owner, &["name"]) == Some(node);
    if !ours
        || owner["controller"] != true
        || owner["blockOwnerDeletion"] == true
        || text(owner, &["uid"]) != uid.as_deref()
    {
        return Err(format!(
            "node {node:?} can only create pods with an owner reference that is itself, by its uid, as their controller"
        ));
    }
    let refuse = |what: &str| {
        Err(format!(
            "node {node:?} can not create pods that reference {what}"
        ))
    };
    if text(pod, &["spec", "serviceAccountName"]).is_some_and(|a| !a.is_empty()) {
        return refuse("a service account");
    }
    for volume in list(pod, &["spec", "volumes"]) {
        let sources = list(volume, &["projected", "sources"]);
        let has = |kind: &str| {
            volume.get(kind).is_some() || sources.iter().any(|s| s.get(kind).is_some())
        };
        for (kind, what) in [
            ("secret", "secrets"),
            ("configMap", "configmaps"),
            ("persistentVolumeClaim", "persistentvolumeclaims"),
            ("ephemeral", "persistentvolumeclaims"),
            ("serviceAccountToken", "a service account"),
        ] {
            if has(kind) {
                return refuse(what);
            }
        }
    }
    Ok(())
}

/// Whether a node may make `new` of `old`. `uid` reads its own Node's, which only mirrors need.
pub fn check(
    node: &str,
    uid: impl FnOnce() -> Option<String>,
    resource: &Resource,
    sub: Option<Sub>,
    old: Option<&Value>,
    new: &Value,
) -> Result<(), ApiError> {
    let same = |what: &str| {
        if name(new) == node {
            Ok(())
        } else {
            Err(format!(
                "can only access {what} with the same name as the requesting node"
            ))
        }
    };
    let result = match (resource.kind, sub, old) {
        ("Node", None | Some(Sub::Status), _) => node_object(node, old, new),
        ("Pod", None, None) => mirror(node, uid(), new),
        ("Pod", None, Some(_)) => Err(format!("node {node:?} can only change the status of pods")),
        ("Pod", Some(Sub::Status), _) if text(new, &["spec", "nodeName"]) != Some(node) => {
            Err(format!(
                "node {node:?} can only update pod status for pods with spec.nodeName set to itself"
            ))
        }
        ("Lease", _, _) => same("lease"),
        ("CSINode", _, _) => same("CSINode"),
        ("PodCertificateRequest", _, None) if text(new, &["spec", "nodeName"]) != Some(node) => {
            Err(format!(
                "node {node:?} can only ask for certificates of its own pods"
            ))
        }
        _ => Ok(()),
    };
    result.map_err(|why| {
        ApiError::forbidden(format!(
            "{} {:?} is forbidden: {why}",
            resource.plural,
            name(new)
        ))
    })
}

/// What a volume of a pod says of its driver.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// Its name.
    Driver(&'a str),
    /// The claim that it is bound to.
    Claim(&'a str),
}

/// The audiences of which a pod itself wants tokens, and what its volumes say of their drivers.
fn wanted_by(pod: &Value) -> (Vec<&str>, Vec<Source<'_>>) {
    let (mut audiences, mut sources) = (vec![], vec![]);
    for volume in list(pod, &["spec", "volumes"]) {
        for token in list(volume, &["projected", "sources"])
            .iter()
            .filter_map(|s| at(s, &["serviceAccountToken"]))
        {
            audiences.push(
                text(token, &["audience"])
                    .filter(|a| !a.is_empty())
                    .unwrap_or(ISSUER),
            );
        }
        sources.extend(text(volume, &["csi", "driver"]).map(Source::Driver));
        sources.extend(text(volume, &["persistentVolumeClaim", "claimName"]).map(Source::Claim));
    }
    (audiences, sources)
}

/// Whether a node may have this token: only one that is bound to a pod of its own, and meant for whom the pod or a driver
/// of its volumes wants it. `pod` is the one that it names; `drivers` gives a driver's audiences.
pub fn check_token(
    node: &str,
    account: &str,
    pod: Option<&Value>,
    audiences: &[String],
    drivers: impl Fn(Source<'_>) -> Vec<String>,
) -> Result<(), ApiError> {
    let refuse = |why: &str| {
        Err(ApiError::forbidden(format!(
            "serviceaccounts {account:?} is forbidden: {why}"
        )))
    };
    let Some(pod) = pod else {
        return refuse("node requested token not bound to a pod");
    };
    if text(pod, &["spec", "nodeName"]) != Some(node) {
        return refuse("node requested token bound to a pod scheduled on a different node");
    }
    let (own, sources) = wanted_by(pod);
    let of_drivers: Vec<String> = sources.into_iter().flat_map(drivers).collect();
    match audiences
        .iter()
        .find(|a| a.as_str() != ISSUER && !own.contains(&a.as_str()) && !of_drivers.contains(a))
    {
        Some(audience) => refuse(&format!(
            "audience {audience:?} not found in pod spec volume, system:node:{node} is not authorized to request tokens for this audience"
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn may(kind: &str, sub: Option<Sub>, old: Option<Value>, new: Value) -> Result<(), String> {
        let resource = Resource::of_kind(kind).expect("a kind");
        check(
            "n1",
            || Some("uid-1".into()),
            resource,
            sub,
            old.as_ref(),
            &new,
        )
        .map_err(|e| e.message)
    }

    #[test]
    fn a_node_writes_itself_and_only_what_is_its_own_to_say() {
        let node = |more: Value| {
            let mut node = json!({"metadata": {"name": "n1", "labels": {"kubernetes.io/os": "linux", "pool": "a"}}, "spec": {"taints": [{"key": "t"}]}});
            json_patch::merge(&mut node, &more);
            node
        };
        let label = |key: &str| node(json!({"metadata": {"labels": {key: "x"}}}));
        assert_eq!(
            may("Node", None, None, node(json!({}))),
            Ok(()),
            "taints are its own when it comes"
        );
        for key in [
            "pool",
            "other.example/x",
            "topology.kubernetes.io/zone",
            "node.kubernetes.io/instance-type",
            "sub.node.kubernetes.io/x",
        ] {
            assert_eq!(
                may("Node", None, Some(node(json!({}))), label(key)),
                Ok(()),
                "{key}"
            );
        }
        for key in [
            "node-restriction.kubernetes.io/x",
            "a.node-restriction.kubernetes.io/x",
            "node-role.kubernetes.io/control-plane",
            "k8s.io/x",
        ] {
            assert!(
                may("Node", None, Some(node(json!({}))), label(key))
                    .is_err_and(|e| e.contains(key)),
                "{key}"
            );
            assert!(
                may("Node", None, None, label(key))
                    .is_err_and(|e| e.contains("set the following labels")),
                "{key}"
            );
            assert!(
                may("Node", Some(Sub::Status), Some(label(key)), node(json!({}))).is_err(),
                "nor remove {key}"
            );
        }
        for more in [
            json!({"spec": {"taints": []}}),
            json!({"metadata": {"ownerReferences": [{"uid": "x"}]}}),
            json!({"metadata": {"name": "n2"}}),
        ] {
            assert!(
                may("Node", None, Some(node(json!({}))), node(more.clone())).is_err(),
                "{more}"
            );
        }
        assert!(
            may("Lease", None, None, json!({"metadata": {"name": "n2"}}))
                .is_err_and(|e| e.contains("same name"))
        );
        assert_eq!(
            may("CSINode", None, None, json!({"metadata": {"name": "n1"}})),
            Ok(())
        );
    }

    #[test]
    fn a_node_makes_mirrors_of_its_own_static_pods() {
        let pod = |more: Value| {
            let owner = json!({"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "uid-1", "controller": true});
            let mut pod = json!({"metadata": {"name": "p", "annotations": {"kubernetes.io/config.mirror": "h"}, "ownerReferences": [owner]}, "spec": {"nodeName": "n1"}});
            json_patch::merge(&mut pod, &more);
            pod
        };
        assert_eq!(may("Pod", None, None, pod(json!({}))), Ok(()));
        for (more, why) in [
            (json!({"metadata": {"annotations": null}}), "mirror pods"),
            (json!({"spec": {"nodeName": "n2"}}), "spec.nodeName"),
            (json!({"metadata": {"ownerReferences": null}}), "owner"),
            (
                json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "other", "controller": true}]}}),
                "uid",
            ),
            (
                json!({"spec": {"serviceAccountName": "a"}}),
                "service account",
            ),
            (json!({"spec": {"volumes": [{"secret": {}}]}}), "secrets"),
            (
                json!({"spec": {"volumes": [{"projected": {"sources": [{"configMap": {}}]}}]}}),
                "configmaps",
            ),
        ] {
            assert!(
                may("Pod", None, None, pod(more.clone())).is_err_and(|e| e.contains(why)),
                "{more}"
            );
        }
        assert_eq!(
            may(
                "Pod",
                Some(Sub::Status),
                Some(pod(json!({}))),
                pod(json!({}))
            ),
            Ok(())
        );
        let elsewhere = pod(json!({"spec": {"nodeName": "n2"}}));
        assert!(
            may(
                "Pod",
                Some(Sub::Status),
                Some(elsewhere.clone()),
                elsewhere.clone()
            )
            .is_err()
        );
        assert!(may("Pod", None, Some(pod(json!({}))), pod(json!({}))).is_err());
        let token = |pod: Option<&Value>| {
            check_token("n1", "a", pod, &[ISSUER.into()], |_| vec![]).map_err(|e| e.message)
        };
        assert_eq!(token(Some(&pod(json!({})))), Ok(()));
        assert!(token(Some(&elsewhere)).is_err_and(|e| e.contains("different node")));
        assert!(token(None).is_err_and(|e| e.contains("not bound to a pod")));
    }

    #[test]
    fn tokens_are_for_whom_the_pod_or_its_drivers_want_them() {
        let pod = json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n1", "volumes": [
            {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"audience": "vault"}}]}},
            {"name": "d", "csi": {"driver": "inline"}}, {"name": "c", "persistentVolumeClaim": {"claimName": "claim"}}]}});
        let drivers = |source: Source<'_>| match source {
            Source::Driver("inline") => vec!["of-inline".to_owned()],
            Source::Claim("claim") => vec!["of-claim".to_owned()],
            _ => vec![],
        };
        for (audience, may) in [
            (ISSUER, true),
            ("vault", true),
            ("of-inline", true),
            ("of-claim", true),
            ("elsewhere", false),
        ] {
            let asked = check_token("n1", "a", Some(&pod), &[audience.into()], drivers);
            assert_eq!(asked.is_ok(), may, "{audience}");
        }
    }
}
