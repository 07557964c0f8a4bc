use super::*;
use crate::api::token::ISSUER;
use holdfast_core::pod::references::every::every_reference;
use serde_json::json;

/// Other stored objects, by key.
fn stored(key: &str) -> Option<Value> {
    let pod = |node: &str, uid: &str| json!({"metadata": {"name": uid, "uid": uid}, "spec": {"nodeName": node, "serviceAccountName": "a"}});
    match key {
        "nodes/n1" => Some(json!({"metadata": {"name": "n1", "uid": "uid-1"}})),
        "pods/ns/p" => Some(pod("n1", "p")),
        "pods/ns/elsewhere" => Some(pod("n2", "elsewhere")),
        "pods/ns/mirror" => {
            let mut pod = pod("n1", "mirror");
            pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "h"});
            Some(pod)
        }
        "serviceaccounts/ns/a" => Some(json!({"metadata": {"name": "a", "uid": "a"}})),
        _ => None,
    }
}

fn check_write_in(
    namespace: Option<&str>,
    kind: &str,
    sub: Option<Sub>,
    old: Option<&Value>,
    new: Option<&Value>,
) -> Result<(), String> {
    let write = Write {
        resource: Resource::of_kind(kind).expect("a kind"),
        sub,
        namespace,
        name: new.or(old).map(name).expect("an object"),
        old,
        new,
    };
    check("n1", &stored, &write).map_err(|e| e.message)
}

fn check_node_write(
    kind: &str,
    sub: Option<Sub>,
    old: Option<Value>,
    new: Value,
) -> Result<(), String> {
    check_write_in(Some("ns"), kind, sub, old.as_ref(), Some(&new))
}

fn check_node_delete(kind: &str, old: &Value) -> Result<(), String> {
    check_write_in(Some("ns"), kind, None, Some(old), None)
}

#[test]
fn a_node_may_modify_only_its_own_node_and_allowed_labels() {
    let node = |more: Value| {
        let mut node = json!({"metadata": {"name": "n1", "labels": {"kubernetes.io/os": "linux", "pool": "a"}}, "spec": {"taints": [{"key": "t"}]}});
        json_patch::merge(&mut node, &more);
        node
    };
    let label = |key: &str| node(json!({"metadata": {"labels": {key: "x"}}}));
    assert_eq!(
        check_node_write("Node", None, None, node(json!({}))),
        Ok(()),
        "a node may set taints when it registers"
    );
    for key in [
        "pool",
        "other.example/x",
        "topology.kubernetes.io/zone",
        "node.kubernetes.io/instance-type",
        "sub.node.kubernetes.io/x",
    ] {
        assert_eq!(
            check_node_write("Node", None, Some(node(json!({}))), label(key)),
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
        assert_eq!(
            check_node_write("Node", None, Some(node(json!({}))), label(key)),
            Err(format!(
                "nodes \"n1\" is forbidden: is not allowed to modify labels: {key}"
            ))
        );
        assert_eq!(
            check_node_write("Node", None, None, label(key)),
            Err(format!(
                "nodes \"n1\" is forbidden: node \"n1\" is not allowed to set the following labels: {key}"
            ))
        );
        assert!(
            check_node_write("Node", Some(Sub::Status), Some(label(key)), node(json!({}))).is_err(),
            "a node may not remove {key}"
        );
    }
    for more in [
        json!({"spec": {"taints": []}}),
        json!({"metadata": {"ownerReferences": [{"uid": "x"}]}}),
        json!({"metadata": {"name": "n2"}}),
        json!({"spec": {"configSource": {"configMap": {}}}}),
    ] {
        assert!(
            check_node_write("Node", None, Some(node(json!({}))), node(more.clone())).is_err(),
            "{more}"
        );
    }
    let source = node(json!({"spec": {"configSource": {"configMap": {}}}}));
    assert!(check_node_write("Node", None, None, source).is_err());
    let other = json!({"metadata": {"name": "n2"}});
    assert!(check_node_delete("Node", &other).is_err());
    assert_eq!(check_node_delete("Node", &node(json!({}))), Ok(()));
}

#[test]
fn a_node_may_access_only_its_own_lease_and_csi_node() {
    let (own, other) = (
        json!({"metadata": {"name": "n1"}}),
        json!({"metadata": {"name": "n2"}}),
    );
    let leases = Some("kube-node-lease");
    for (old, new) in [(None, true), (Some(()), true), (Some(()), false)] {
        let of = |object: &Value, namespace: Option<&str>, kind: &str| {
            let old = old.map(|()| object);
            check_write_in(namespace, kind, None, old, new.then_some(object))
        };
        assert_eq!(of(&own, leases, "Lease"), Ok(()));
        assert_eq!(
            of(&other, leases, "Lease"),
            Err("leases.coordination.k8s.io \"n2\" is forbidden: can only access node lease with the same name as the requesting node".into())
        );
        assert_eq!(
            of(&own, Some("ns"), "Lease"),
            Err("leases.coordination.k8s.io \"n1\" is forbidden: can only access leases in the \"kube-node-lease\" system namespace".into())
        );
        assert_eq!(of(&own, None, "CSINode"), Ok(()));
        assert_eq!(
            of(&other, None, "CSINode"),
            Err("csinodes.storage.k8s.io \"n2\" is forbidden: can only access CSINode with the same name as the requesting node".into())
        );
    }
}

fn mirror_of(more: &Value) -> Value {
    let owner = json!({"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "uid-1", "controller": true});
    let mut pod = json!({"metadata": {"name": "p", "annotations": {"kubernetes.io/config.mirror": "h"}, "ownerReferences": [owner]},
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}]}});
    json_patch::merge(&mut pod, more);
    pod
}

#[test]
fn a_node_may_create_mirror_pods_only_for_itself() {
    assert_eq!(
        check_node_write("Pod", None, None, mirror_of(&json!({}))),
        Ok(())
    );
    let owned = |more: Value| {
        let mut owner = json!({"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "uid-1", "controller": true});
        json_patch::merge(&mut owner, &more);
        json!({"metadata": {"ownerReferences": [owner]}})
    };
    for (more, why) in [
        (
            json!({"metadata": {"annotations": null}}),
            "pod does not have \"kubernetes.io/config.mirror\" annotation, node \"n1\" can only create mirror pods",
        ),
        (
            json!({"spec": {"nodeName": "n2"}}),
            "node \"n1\" can only create pods with spec.nodeName set to itself",
        ),
        (
            json!({"metadata": {"ownerReferences": null}}),
            "node \"n1\" can only create pods with an owner reference set to itself",
        ),
        (
            json!({"metadata": {"ownerReferences": [{}, {}]}}),
            "node \"n1\" can only create pods with a single owner reference set to itself",
        ),
        (
            owned(json!({"name": "n2"})),
            "node \"n1\" can only create pods with an owner reference set to itself",
        ),
        (
            owned(json!({"controller": null})),
            "node \"n1\" can only create pods with a controller owner reference set to itself",
        ),
        (
            owned(json!({"blockOwnerDeletion": true})),
            "node \"n1\" must not set blockOwnerDeletion on an owner reference",
        ),
        (
            owned(json!({"uid": "other"})),
            "node n1 UID mismatch: expected other got uid-1",
        ),
        (
            json!({"spec": {"volumes": [{"name": "v", "nosuch": {}}]}}),
            "error checking mirror pod for API references: unknown volume type for volume  \"v\"",
        ),
        (
            json!({"spec": {"volumes": [{"name": "v", "projected": {"sources": [{"nosuch": {}}]}}]}}),
            "error checking mirror pod for API references: unknown source for projected volume \"v\"",
        ),
    ] {
        assert_eq!(
            check_node_write("Pod", None, None, mirror_of(&more)),
            Err(format!("pods \"p\" is forbidden: {why}")),
            "{more}"
        );
    }
}

/// A mirror pod refers to no API object, so that a node cannot gain access with it.
#[test]
fn a_mirror_pod_may_not_reference_api_objects() {
    for (spec, kind) in every_reference() {
        let pod = mirror_of(&json!({"spec": spec}));
        assert_eq!(
            check_node_write("Pod", None, None, pod),
            Err(format!(
                "pods \"p\" is forbidden: node \"n1\" can not create pods that reference {kind}"
            )),
            "{spec}"
        );
    }
}

#[test]
fn a_node_may_update_only_the_status_of_its_pods() {
    let pod = mirror_of(
        &json!({"metadata": {"labels": {"a": "b"}}, "status": {"phase": "Pending", "resourceClaimStatuses": [{"name": "c", "resourceClaimName": "own"}]}}),
    );
    let changed = |more: Value| {
        let mut new = pod.clone();
        json_patch::merge(&mut new, &more);
        check_node_write("Pod", Some(Sub::Status), Some(pod.clone()), new)
    };
    assert_eq!(changed(json!({"status": {"phase": "Running"}})), Ok(()));
    for (more, what) in [
        (
            json!({"metadata": {"labels": {"a": "c"}}}),
            "labels through pod status",
        ),
        (
            json!({"status": {"resourceClaimStatuses": [{"name": "c", "resourceClaimName": "stolen"}]}}),
            "resource claim statues",
        ),
        (
            json!({"status": {"resourceClaimStatuses": null}}),
            "resource claim statues",
        ),
        (
            json!({"status": {"extendedResourceClaimStatus": {"resourceClaimName": "stolen"}}}),
            "extended resource claim status",
        ),
    ] {
        assert_eq!(
            changed(more),
            Err(format!(
                "pods \"p\" is forbidden: node \"n1\" cannot update {what}"
            ))
        );
    }
}

#[test]
fn a_node_may_not_modify_pods_of_other_nodes() {
    let pod = mirror_of(&json!({}));
    let elsewhere = mirror_of(&json!({"spec": {"nodeName": "n2"}}));
    let refused = check_node_write(
        "Pod",
        Some(Sub::Status),
        Some(elsewhere.clone()),
        elsewhere.clone(),
    );
    assert_eq!(refused, Err("pods \"p\" is forbidden: node \"n1\" can only update pod status for pods with spec.nodeName set to itself".into()));
    assert_eq!(check_node_delete("Pod", &pod), Ok(()));
    assert_eq!(check_node_delete("Pod", &elsewhere), Err("pods \"p\" is forbidden: node \"n1\" can only delete pods with spec.nodeName set to itself".into()));
    let evicted = |pod: &Value| {
        check_node_write(
            "Pod",
            Some(Sub::Eviction),
            Some(pod.clone()),
            json!({"metadata": {"name": "p"}}),
        )
    };
    assert_eq!(evicted(&pod), Ok(()));
    assert_eq!(
        evicted(&elsewhere),
        Err(
            "pods \"p\" is forbidden: node n1 can only evict pods with spec.nodeName set to itself"
                .into()
        )
    );
    assert_eq!(
        check_node_write("Pod", None, Some(pod.clone()), pod.clone()),
        Err("pods \"p\" is forbidden: unexpected operation \"UPDATE\", node \"n1\" can only create and delete mirror pods".into())
    );
    for sub in [Sub::Binding, Sub::EphemeralContainers, Sub::Resize] {
        assert_eq!(
            check_node_write("Pod", Some(sub), Some(pod.clone()), pod.clone()),
            Err(format!(
                "pods \"p\" is forbidden: unexpected pod subresource {:?}, only 'status' and 'eviction' are allowed",
                sub.name()
            ))
        );
    }
}

#[test]
fn a_node_may_update_only_resize_fields_of_claims() {
    let old = json!({"metadata": {"name": "c", "labels": {}, "resourceVersion": "1"}, "spec": {"volumeName": "v"}, "status": {"phase": "Bound"}});
    let check_claim = |sub, old, new| check_node_write("PersistentVolumeClaim", sub, old, new);
    let changed = |more: &Value| {
        let mut new = old.clone();
        json_patch::merge(&mut new, more);
        check_claim(Some(Sub::Status), Some(old.clone()), new)
    };
    for more in [
        json!({"metadata": {"resourceVersion": null, "managedFields": [{}], "annotations": {}}}),
        json!({"status": {"capacity": {"storage": "2Gi"}, "conditions": [{}]}}),
        json!({"status": {"allocatedResources": {"storage": "2Gi"}, "allocatedResourceStatuses": {"storage": "x"}}}),
    ] {
        assert_eq!(changed(&more), Ok(()), "{more}");
    }
    for (more, field) in [
        (
            json!({"metadata": {"labels": {"a": "b"}}}),
            "metadata.labels",
        ),
        (
            json!({"metadata": {"annotations": {"a": "b"}}}),
            "metadata.annotations",
        ),
        (
            json!({"metadata": {"finalizers": ["a/b"]}}),
            "metadata.finalizers",
        ),
        (
            json!({"metadata": {"ownerReferences": [{}]}}),
            "metadata.ownerReferences",
        ),
        (json!({"spec": {"volumeName": "w"}}), "spec.volumeName"),
        (json!({"status": {"phase": "Lost"}}), "status.phase"),
        (
            json!({"status": {"accessModes": ["x"]}}),
            "status.accessModes",
        ),
    ] {
        assert_eq!(
            changed(&more),
            Err(format!(
                "persistentvolumeclaims \"c\" is forbidden: node \"n1\" is not allowed to update fields other than status.quantity and status.conditions: {field}"
            )),
        );
    }
    let refused =
        Err("persistentvolumeclaims \"c\" is forbidden: may only update PVC status".into());
    assert_eq!(check_claim(None, Some(old.clone()), old.clone()), refused);
    assert_eq!(check_claim(None, None, old.clone()), refused);
    assert_eq!(check_node_delete("PersistentVolumeClaim", &old), refused);
}

#[test]
fn a_node_may_write_only_its_own_resource_slices() {
    let slice = |node: Value| json!({"metadata": {"name": "s"}, "spec": {"nodeName": node}});
    assert_eq!(
        check_node_write("ResourceSlice", None, None, slice(json!("n1"))),
        Ok(())
    );
    assert_eq!(
        check_node_delete("ResourceSlice", &slice(json!("n1"))),
        Ok(())
    );
    for foreign in [json!("n2"), Value::Null] {
        let foreign = slice(foreign);
        let refused = |verb: &str| {
            Err(format!(
                "resourceslices.resource.k8s.io \"s\" is forbidden: can only {verb} ResourceSlice with the same NodeName as the requesting node"
            ))
        };
        assert_eq!(
            check_node_write("ResourceSlice", None, None, foreign.clone()),
            refused("create")
        );
        assert_eq!(
            check_node_delete("ResourceSlice", &foreign),
            refused("delete")
        );
    }
}

#[test]
fn a_node_may_request_pod_certificates_only_for_its_pods() {
    let request = |more: Value| {
        let mut request = json!({"metadata": {"name": "r"}, "spec": {"nodeName": "n1", "nodeUID": "uid-1", "podName": "p", "podUID": "p",
            "serviceAccountName": "a", "serviceAccountUID": "a"}});
        json_patch::merge(&mut request["spec"], &more);
        check_node_write("PodCertificateRequest", None, None, request)
    };
    assert_eq!(request(json!({})), Ok(()));
    for (more, why) in [
        (
            json!({"nodeName": "n2"}),
            "which is not the requesting node",
        ),
        (
            json!({"nodeUID": "x"}),
            "inconsistent with the running node",
        ),
        (json!({"podName": "nosuch"}), "pods \"nosuch\" not found"),
        (json!({"podUID": "x"}), "which differs from running pod"),
        (
            json!({"podName": "elsewhere", "podUID": "elsewhere"}),
            "is not running on node",
        ),
        (
            json!({"podName": "mirror", "podUID": "mirror"}),
            "is a mirror pod",
        ),
        (
            json!({"serviceAccountName": "b"}),
            "that differs from running pod",
        ),
        (
            json!({"serviceAccountUID": "x"}),
            "names service account UID",
        ),
    ] {
        assert!(
            request(more.clone()).is_err_and(|e| e.contains(why)),
            "{more}"
        );
    }
}

fn signing_request_for(name: &str, signer: &str) -> Value {
    use base64::Engine as _;
    let mut params = rcgen::CertificateParams::default();
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, name);
    let csr = params
        .serialize_request(&rcgen::KeyPair::generate().expect("a key"))
        .expect("a request");
    let pem = base64::engine::general_purpose::STANDARD.encode(csr.pem().expect("pem"));
    json!({"metadata": {"name": "r"}, "spec": {"signerName": signer, "request": pem}})
}

#[test]
fn a_node_may_request_client_certificates_only_in_its_own_name() {
    let kind = "CertificateSigningRequest";
    for signer in [signing::CLIENT, signing::SERVING] {
        let own = signing_request_for("system:node:n1", signer);
        assert_eq!(check_node_write(kind, None, None, own), Ok(()));
        for name in ["system:node:n2", "kubernetes-admin"] {
            let refused = check_node_write(kind, None, None, signing_request_for(name, signer));
            assert_eq!(refused, Err("certificatesigningrequests.certificates.k8s.io \"r\" is forbidden: can only create a node CSR with CN=system:node:n1".into()));
        }
    }
    let other = signing_request_for("x", "example.com/signer");
    assert_eq!(check_node_write(kind, None, None, other), Ok(()));
}

#[test]
fn a_node_may_request_tokens_only_for_audiences_of_the_pod_or_its_drivers() {
    let pod = json!({"metadata": {"name": "p", "uid": "u"}, "spec": {"nodeName": "n1", "volumes": [
        {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"audience": "vault"}}]}},
        {"name": "d", "csi": {"driver": "inline"}}, {"name": "c", "persistentVolumeClaim": {"claimName": "claim"}},
        {"name": "e", "ephemeral": {"volumeClaimTemplate": {}}}]}});
    let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"});
    let check_bound = |pod: Option<&Value>, bound: &Value, audiences: &[&str]| {
        let audiences: Vec<String> = audiences.iter().map(|a| (*a).to_owned()).collect();
        let token = RequestedToken {
            account: "a",
            bound: Some(bound).filter(|b| !b.is_null()),
            pod,
            audiences: &audiences,
        };
        let drivers = |source: &Source<'_>| match source {
            Source::Driver("inline") => vec!["of-inline".to_owned()],
            Source::Claim(claim) => vec![format!("of-{claim}")],
            Source::Driver(_) => vec![],
        };
        check_token("n1", &token, drivers, |audience| audience == "by-role").map_err(|e| e.message)
    };
    for (audiences, why) in [
        (&["vault"][..], ""),
        (&["of-inline"], ""),
        (&["of-claim"], ""),
        (&["of-p-e"], ""),
        (&["by-role"], ""),
        (
            &["elsewhere"],
            "audience \"elsewhere\" not found in pod spec volume, system:node:n1 is not authorized to request tokens for this audience",
        ),
        (&[], "audience \"\" not found in pod spec volume"),
        (&[ISSUER], "not found in pod spec volume"),
        (
            &["vault", "of-inline"],
            "node may only request 0 or 1 audiences",
        ),
    ] {
        match check_bound(Some(&pod), &bound, audiences) {
            Ok(()) => assert_eq!(why, "", "{audiences:?}"),
            Err(error) => assert!(!why.is_empty() && error.contains(why), "{error}"),
        }
    }
    let mut plain = pod.clone();
    plain["spec"]["volumes"][0]["projected"]["sources"][0]["serviceAccountToken"] =
        json!({"path": "token"});
    assert_eq!(check_bound(Some(&plain), &bound, &[]), Ok(()));
    let mut elsewhere = pod.clone();
    elsewhere["spec"]["nodeName"] = json!("n2");
    let without = |key: &str| {
        let mut bound = bound.clone();
        json_patch::merge(&mut bound, &json!({key: null}));
        bound
    };
    for (pod, bound, why) in [
        (&pod, Value::Null, "node requested token not bound to a pod"),
        (
            &pod,
            without("apiVersion"),
            "node requested token not bound to a pod",
        ),
        (
            &pod,
            without("uid"),
            "node requested token with a pod binding without a uid",
        ),
        (
            &pod,
            json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "old"}),
            "the UID in the bound object reference (old) does not match the UID in record",
        ),
        (
            &elsewhere,
            bound.clone(),
            "node requested token bound to a pod scheduled on a different node",
        ),
    ] {
        assert!(
            check_bound(Some(pod), &bound, &["vault"]).is_err_and(|e| e.contains(why)),
            "{why}"
        );
    }
    assert_eq!(
        check_bound(None, &bound, &["vault"]),
        Err("pods \"p\" not found".into())
    );
}
