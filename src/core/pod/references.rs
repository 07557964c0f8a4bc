//! The API objects that a pod references. Pure.

pub mod every;

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Pod, Volume, VolumeProjection};

use crate::{pod, volume::payload};

/// Names of the objects in its namespace that a pod references.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct References {
    /// ConfigMaps.
    pub config_maps: BTreeSet<String>,
    /// Secrets of volumes and environment variables.
    pub secrets: BTreeSet<String>,
    /// Secrets with registry credentials (`imagePullSecrets`).
    pub pull_secrets: BTreeSet<String>,
    /// Secrets with credentials for a volume's storage, for example of an iSCSI target. Their keys do not become files.
    pub storage_secrets: BTreeSet<String>,
}

/// The names of the Secrets with credentials for a volume's storage (`VisitPodSecretNames` in
/// `pkg/api/v1/pod/util.go`).
fn storage_secrets(volume: &Volume) -> impl Iterator<Item = String> + '_ {
    let azure = volume.azure_file.as_ref().map(|s| &s.secret_name);
    let references = [
        volume.cephfs.as_ref().and_then(|s| s.secret_ref.as_ref()),
        volume.cinder.as_ref().and_then(|s| s.secret_ref.as_ref()),
        volume
            .flex_volume
            .as_ref()
            .and_then(|s| s.secret_ref.as_ref()),
        volume.rbd.as_ref().and_then(|s| s.secret_ref.as_ref()),
        volume.scale_io.as_ref().map(|s| &s.secret_ref),
        volume.iscsi.as_ref().and_then(|s| s.secret_ref.as_ref()),
        volume
            .storageos
            .as_ref()
            .and_then(|s| s.secret_ref.as_ref()),
        volume
            .csi
            .as_ref()
            .and_then(|s| s.node_publish_secret_ref.as_ref()),
    ];
    let named = references.into_iter().flatten().map(|r| &r.name);
    azure
        .into_iter()
        .chain(named)
        .filter(|n| !n.is_empty())
        .cloned()
}

/// Collects the references of a pod.
#[must_use]
pub fn of(pod: &Pod) -> References {
    let mut found = References::default();
    let spec = pod::spec(pod);
    for volume in spec.volumes.iter().flatten() {
        let (maps, secrets) = payload::references(volume);
        found.config_maps.extend(maps);
        found.secrets.extend(secrets);
        found.storage_secrets.extend(storage_secrets(volume));
    }
    for (_, container) in pod::containers(pod) {
        for source in container.env_from.iter().flatten() {
            found
                .config_maps
                .extend(source.config_map_ref.as_ref().map(|r| r.name.clone()));
            found
                .secrets
                .extend(source.secret_ref.as_ref().map(|r| r.name.clone()));
        }
        for source in container
            .env
            .iter()
            .flatten()
            .filter_map(|e| e.value_from.as_ref())
        {
            found
                .config_maps
                .extend(source.config_map_key_ref.as_ref().map(|r| r.name.clone()));
            found
                .secrets
                .extend(source.secret_key_ref.as_ref().map(|r| r.name.clone()));
        }
    }
    found.pull_secrets.extend(
        spec.image_pull_secrets
            .iter()
            .flatten()
            .map(|r| r.name.clone()),
    );
    found
}

/// The plural of the first kind of API object that a pod references, and the place of the reference. Wording and order
/// are upstream's (`HasAPIObjectReference` in `pkg/api/pod/util.go`). `None` if the pod references no object. Static
/// pods and their mirrors must not reference any object: they must run without an apiserver, and must not give their
/// node access to objects.
///
/// # Errors
///
/// A projected volume has a source of unknown kind.
pub fn kind_of_object(pod: &Pod) -> Result<Option<&'static str>, String> {
    let (spec, found) = (pod::spec(pod), of(pod));
    let any = |names: &BTreeSet<String>| names.iter().any(|n| !n.is_empty());
    // `serviceAccount` is the deprecated name of the field.
    let accounts = [&spec.service_account_name, &spec.service_account];
    if accounts.into_iter().flatten().any(|a| !a.is_empty()) {
        return Ok(Some("serviceaccounts"));
    }
    if any(&found.secrets) || any(&found.pull_secrets) || any(&found.storage_secrets) {
        return Ok(Some("secrets"));
    }
    if any(&found.config_maps) {
        return Ok(Some("configmaps"));
    }
    if spec.resource_claims.as_ref().is_some_and(|c| !c.is_empty()) {
        return Ok(Some("resourceclaims"));
    }
    for volume in spec.volumes.iter().flatten() {
        if let Some(kind) = kind_of_volume(volume)? {
            return Ok(Some(kind));
        }
    }
    Ok(None)
}

fn kind_of_volume(volume: &Volume) -> Result<Option<&'static str>, String> {
    let kinds = [
        (
            volume.config_map.is_some(),
            "configmaps (via configmap volumes)",
        ),
        (volume.secret.is_some(), "secrets (via secret volumes)"),
        (volume.csi.is_some(), "csidrivers (via CSI volumes)"),
        (
            volume.glusterfs.is_some(),
            "endpoints (via glusterFS volumes)",
        ),
        (
            volume.persistent_volume_claim.is_some(),
            "persistentvolumeclaims",
        ),
        (
            volume.ephemeral.is_some(),
            "persistentvolumeclaims (via ephemeral volumes)",
        ),
        (
            volume.azure_file.is_some(),
            "secrets (via azureFile volumes)",
        ),
    ];
    if let Some((_, kind)) = kinds.into_iter().find(|(has, _)| *has) {
        return Ok(Some(kind));
    }
    let projected = volume
        .projected
        .iter()
        .flat_map(|p| p.sources.iter().flatten());
    for source in projected {
        match kind_of_projection(source) {
            Some(kind) => return Ok(Some(kind)),
            None if source.downward_api.is_some() => {}
            None => {
                return Err(format!(
                    "unknown source for projected volume {:?}",
                    volume.name
                ));
            }
        }
    }
    Ok(None)
}

fn kind_of_projection(source: &VolumeProjection) -> Option<&'static str> {
    let kinds = [
        (
            source.config_map.is_some(),
            "configmaps (via projected volumes)",
        ),
        (source.secret.is_some(), "secrets (via projected volumes)"),
        (
            source.service_account_token.is_some(),
            "serviceaccounts (via projected volumes)",
        ),
        (source.cluster_trust_bundle.is_some(), "clustertrustbundles"),
        (source.pod_certificate.is_some(), "podcertificates"),
    ];
    let found = kinds.into_iter().find(|(has, _)| *has);
    found.map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use super::every::every_reference;
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn references_of_volumes_variables_and_pull_secrets_are_found() {
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "volumes": [{"name": "v", "configMap": {"name": "a"}}, {"name": "w", "secret": {"secretName": "b"}},
                {"name": "x", "iscsi": {"iqn": "i", "lun": 0, "targetPortal": "t", "secretRef": {"name": "e"}}}],
            "imagePullSecrets": [{"name": "p"}],
            "containers": [{"name": "c", "envFrom": [{"configMapRef": {"name": "c"}}],
                            "env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "d", "key": "k"}}}]}]}}))
        .expect("a pod");
        let names = |list: &[&str]| {
            list.iter()
                .map(|n| (*n).to_owned())
                .collect::<BTreeSet<String>>()
        };
        assert_eq!(
            of(&pod),
            References {
                config_maps: names(&["a", "c"]),
                secrets: names(&["b", "d"]),
                pull_secrets: names(&["p"]),
                storage_secrets: names(&["e"]),
            }
        );
    }

    fn kind_of(spec: &Value) -> Result<Option<&'static str>, String> {
        let mut whole = json!({"containers": []});
        json_patch::merge(&mut whole, spec);
        let pod = serde_json::from_value(json!({"spec": whole})).expect("a pod");
        kind_of_object(&pod)
    }

    #[test]
    fn every_reference_is_found() {
        for (spec, expected) in every_reference() {
            assert_eq!(kind_of(&spec), Ok(Some(expected)), "{spec}");
        }
    }

    #[test]
    fn pods_without_api_objects_have_no_references() {
        let volume = |kind: &str, source: Value| json!({"volumes": [{"name": "v", kind: source}]});
        let variable =
            json!({"name": "X", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}});
        for spec in [
            json!({}),
            json!({"serviceAccountName": "", "imagePullSecrets": [{"name": ""}]}),
            json!({"initContainers": [{"name": "i", "env": [variable]}]}),
            volume("hostPath", json!({"path": "/p"})),
            volume("emptyDir", json!({})),
            volume("nfs", json!({"server": "s", "path": "/p"})),
            volume("iscsi", json!({"iqn": "i", "lun": 0, "targetPortal": "t"})),
            volume("image", json!({"reference": "r"})),
            volume("projected", json!({"sources": [{"downwardAPI": {}}]})),
        ] {
            assert_eq!(kind_of(&spec), Ok(None), "{spec}");
        }
        assert_eq!(
            kind_of(&volume("projected", json!({"sources": [{}]}))),
            Err("unknown source for projected volume \"v\"".into())
        );
    }
}
