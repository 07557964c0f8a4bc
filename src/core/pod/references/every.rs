//! Every place in a pod that can reference an API object, for the tests of what handles references: the node's restriction
//! and the graph of what a node may read must cover all of them.

use serde_json::{Value, json};

/// Every place in a pod that can reference an API object, with upstream's name for it. The objects are named `ref`.
#[must_use]
pub fn every_reference() -> Vec<(Value, &'static str)> {
    let (reference, key) = (json!({"name": "ref"}), json!({"name": "ref", "key": "k"}));
    let mut all = vec![
        (json!({"serviceAccountName": "ref"}), "serviceaccounts"),
        (json!({"serviceAccount": "ref"}), "serviceaccounts"),
        (json!({"imagePullSecrets": [reference]}), "secrets"),
        (
            json!({"resourceClaims": [{"name": "r", "resourceClaimName": "ref"}]}),
            "resourceclaims",
        ),
    ];
    for kind in ["containers", "initContainers", "ephemeralContainers"] {
        let container =
            |key: &str, value: Value| json!({kind: [{"name": "c", "image": "i", key: [value]}]});
        let variable =
            |source: &str| container("env", json!({"name": "X", "valueFrom": {source: key}}));
        let every = |source: &str| container("envFrom", json!({source: reference}));
        all.extend([
            (variable("secretKeyRef"), "secrets"),
            (variable("configMapKeyRef"), "configmaps"),
            (every("secretRef"), "secrets"),
            (every("configMapRef"), "configmaps"),
        ]);
    }
    all.extend(references_of_volumes());
    all
}

fn references_of_volumes() -> Vec<(Value, &'static str)> {
    let (reference, mut all) = (json!({"name": "ref"}), vec![]);
    let secret_ref = |mut source: Value| {
        source["secretRef"] = reference.clone();
        source
    };
    for (kind, source, found) in [
        ("secret", json!({"secretName": "ref"}), "secrets"),
        ("secret", json!({}), "secrets (via secret volumes)"),
        ("configMap", reference.clone(), "configmaps"),
        ("configMap", json!({}), "configmaps (via configmap volumes)"),
        (
            "azureFile",
            json!({"secretName": "ref", "shareName": "s"}),
            "secrets",
        ),
        ("cephfs", secret_ref(json!({"monitors": ["m"]})), "secrets"),
        ("cinder", secret_ref(json!({"volumeID": "v"})), "secrets"),
        (
            "flexVolume",
            secret_ref(json!({"driver": "d/d"})),
            "secrets",
        ),
        (
            "rbd",
            secret_ref(json!({"image": "i", "monitors": ["m"]})),
            "secrets",
        ),
        (
            "scaleIO",
            secret_ref(json!({"gateway": "g", "system": "s"})),
            "secrets",
        ),
        (
            "iscsi",
            secret_ref(json!({"iqn": "i", "lun": 0, "targetPortal": "t"})),
            "secrets",
        ),
        (
            "storageos",
            secret_ref(json!({"volumeName": "v"})),
            "secrets",
        ),
        (
            "csi",
            json!({"driver": "d", "nodePublishSecretRef": reference}),
            "secrets",
        ),
        (
            "csi",
            json!({"driver": "d"}),
            "csidrivers (via CSI volumes)",
        ),
        (
            "glusterfs",
            json!({"endpoints": "ref", "path": "p"}),
            "endpoints (via glusterFS volumes)",
        ),
        (
            "persistentVolumeClaim",
            json!({"claimName": "ref"}),
            "persistentvolumeclaims",
        ),
        (
            "ephemeral",
            json!({}),
            "persistentvolumeclaims (via ephemeral volumes)",
        ),
    ] {
        all.push((json!({"volumes": [{"name": "v", kind: source}]}), found));
    }
    for (kind, source, found) in [
        ("secret", reference.clone(), "secrets"),
        ("configMap", reference.clone(), "configmaps"),
        (
            "serviceAccountToken",
            json!({"path": "p"}),
            "serviceaccounts (via projected volumes)",
        ),
        (
            "clusterTrustBundle",
            json!({"name": "ref", "path": "p"}),
            "clustertrustbundles",
        ),
        (
            "podCertificate",
            json!({"keyType": "k", "signerName": "s/s"}),
            "podcertificates",
        ),
    ] {
        all.push((
            json!({"volumes": [{"name": "v", "projected": {"sources": [{kind: source}]}}]}),
            found,
        ));
    }
    all
}
