//! The objects that a pod refers to. Pure.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;

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
}
