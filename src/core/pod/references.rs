//! The objects that a pod refers to. Pure.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Pod, Volume, VolumeProjection};

use crate::core::{pod, volume::payload};

/// Names of what a pod refers to in its namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct References {
    /// ConfigMaps.
    pub config_maps: BTreeSet<String>,
    /// Secrets of volumes and variables.
    pub secrets: BTreeSet<String>,
    /// Secrets with registries' credentials.
    pub pull_secrets: BTreeSet<String>,
}

/// What a pod refers to.
#[must_use]
pub fn of(pod: &Pod) -> References {
    let mut found = References::default();
    let spec = pod::spec(pod);
    for volume in spec.volumes.iter().flatten() {
        let (maps, secrets) = payload::references(volume);
        found.config_maps.extend(maps);
        found.secrets.extend(secrets);
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

/// What kind of the API's objects a pod needs, if it needs any. Static pods may need none: they must run without an API.
#[must_use]
pub fn kind_of_object(pod: &Pod) -> Option<&'static str> {
    let (spec, found) = (pod::spec(pod), of(pod));
    let account = spec.service_account_name.as_deref().unwrap_or_default();
    let any = |is: fn(&Volume) -> bool| spec.volumes.iter().flatten().any(is);
    let projects = |is: fn(&VolumeProjection) -> bool| {
        let projected = spec.volumes.iter().flatten().flat_map(|v| &v.projected);
        projected.flat_map(|p| p.sources.iter().flatten()).any(is)
    };
    let kinds = [
        (
            "serviceaccounts",
            !account.is_empty() || projects(|s| s.service_account_token.is_some()),
        ),
        (
            "secrets",
            !found.secrets.is_empty()
                || !found.pull_secrets.is_empty()
                || any(|v| v.secret.is_some() || v.azure_file.is_some()),
        ),
        (
            "configmaps",
            !found.config_maps.is_empty() || any(|v| v.config_map.is_some()),
        ),
        (
            "resourceclaims",
            spec.resource_claims.as_ref().is_some_and(|c| !c.is_empty()),
        ),
        (
            "persistentvolumeclaims",
            any(|v| v.persistent_volume_claim.is_some() || v.ephemeral.is_some()),
        ),
        ("csidrivers", any(|v| v.csi.is_some())),
        ("endpoints", any(|v| v.glusterfs.is_some())),
        (
            "clustertrustbundles",
            projects(|s| s.cluster_trust_bundle.is_some()),
        ),
        ("podcertificates", projects(|s| s.pod_certificate.is_some())),
    ];
    let needed = kinds.into_iter().find(|(_, needed)| *needed);
    needed.map(|(kind, _)| kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn volumes_variables_and_pull_secrets_are_found() {
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "volumes": [{"name": "v", "configMap": {"name": "a"}}, {"name": "w", "secret": {"secretName": "b"}}],
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
                pull_secrets: names(&["p"])
            }
        );
    }

    #[test]
    fn what_needs_the_api_is_told_from_what_does_not() {
        let variable = |source: &str, reference: serde_json::Value| json!({"initContainers": [{"name": "i", "env": [{"name": "X", "valueFrom": {source: reference}}]}]});
        let volume = |kind: &str, source: serde_json::Value| json!({"volumes": [{"name": "v", kind: source}]});
        let projected = |kind: &str, source: serde_json::Value| json!({"volumes": [{"name": "v", "projected": {"sources": [{kind: source}]}}]});
        let key = json!({"name": "n", "key": "k"});
        for (spec, expected) in [
            (json!({}), None),
            (
                variable("fieldRef", json!({"fieldPath": "metadata.name"})),
                None,
            ),
            (volume("hostPath", json!({"path": "/p"})), None),
            (projected("downwardAPI", json!({})), None),
            (json!({"serviceAccountName": "a"}), Some("serviceaccounts")),
            (
                projected("serviceAccountToken", json!({"path": "p"})),
                Some("serviceaccounts"),
            ),
            (
                json!({"imagePullSecrets": [{"name": "s"}]}),
                Some("secrets"),
            ),
            (variable("secretKeyRef", key.clone()), Some("secrets")),
            (
                volume("secret", json!({"secretName": "s"})),
                Some("secrets"),
            ),
            (variable("configMapKeyRef", key), Some("configmaps")),
            (
                projected("configMap", json!({"name": "c"})),
                Some("configmaps"),
            ),
            (
                json!({"resourceClaims": [{"name": "r"}]}),
                Some("resourceclaims"),
            ),
            (
                volume("persistentVolumeClaim", json!({"claimName": "c"})),
                Some("persistentvolumeclaims"),
            ),
            (
                volume("ephemeral", json!({})),
                Some("persistentvolumeclaims"),
            ),
            (volume("csi", json!({"driver": "d"})), Some("csidrivers")),
            (
                projected("clusterTrustBundle", json!({"path": "p"})),
                Some("clustertrustbundles"),
            ),
        ] {
            let mut whole = spec.clone();
            whole["containers"] = json!([]);
            let pod = serde_json::from_value(json!({"spec": whole})).expect("a pod");
            assert_eq!(kind_of_object(&pod), expected, "{spec}");
        }
    }
}
