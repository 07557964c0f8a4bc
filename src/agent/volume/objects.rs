//! The ConfigMaps and Secrets that one pod refers to, read together before they are needed.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::ResourceExt as _;

use holdfast_core::pod::env::Objects;
use holdfast_core::pod::references;
use holdfast_core::volume::resolved::ResolvedVolume;
use holdfast_kubeapi::pods::{ApiFailure, PodApi};

/// The objects that were found. A missing object is absent; its user decides whether this is an error.
#[derive(Default)]
pub struct Fetched {
    namespace: String,
    maps: BTreeMap<String, Arc<ConfigMap>>,
    secrets: BTreeMap<String, Arc<Secret>>,
    /// The pod's resolved volumes, by name.
    pub resolved: BTreeMap<String, Arc<ResolvedVolume>>,
}

impl Objects for Fetched {
    fn namespace(&self) -> &str {
        &self.namespace
    }

    fn config_map(&self, name: &str) -> Option<Arc<ConfigMap>> {
        self.maps.get(name).cloned()
    }

    fn secret(&self, name: &str) -> Option<Arc<Secret>> {
        self.secrets.get(name).cloned()
    }
}

fn found<K>(result: Result<K, ApiFailure>) -> Result<Option<K>, ApiFailure> {
    match result {
        Ok(object) => Ok(Some(object)),
        Err(ApiFailure::NotFound(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads all objects that the pod refers to. Errors are temporary.
pub async fn fetch(api: &dyn PodApi, pod: &Pod) -> Result<Fetched, ApiFailure> {
    let namespace = pod.namespace().unwrap_or_default();
    let wanted = references::of(pod);
    let mut fetched = Fetched {
        namespace: namespace.clone(),
        ..Fetched::default()
    };
    for name in wanted.config_maps {
        if let Some(map) = found(api.config_map(&namespace, &name).await)? {
            fetched.maps.insert(name, map);
        }
    }
    for name in wanted.secrets {
        if let Some(secret) = found(api.secret(&namespace, &name).await)? {
            fetched.secrets.insert(name, secret);
        }
    }
    Ok(fetched)
}
