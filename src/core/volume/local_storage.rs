//! Limits of local ephemeral storage, and the check whether a pod exceeds them (`localStorageEviction` in
//! `pkg/kubelet/eviction/eviction_manager.go`). Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;

use crate::pod::resources::{Side, of_container, of_pod};
use crate::pod::{self, Role};
use crate::quantity::Quantity;

const RESOURCE: &str = "ephemeral-storage";

/// A pod's limits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    /// Limit of each emptyDir that has one: as text and in bytes.
    pub volumes: BTreeMap<String, (String, u64)>,
    /// Limit of each container that has one.
    pub containers: BTreeMap<String, (String, u64)>,
    /// Limit of the whole pod, if every container has a limit.
    pub pod: Option<(String, u64)>,
}

/// A pod's usage in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// EmptyDirs and projected files on disk, by volume.
    pub volumes: BTreeMap<String, u64>,
    /// Writable layer and logs, by container.
    pub containers: BTreeMap<String, u64>,
}

fn bytes(quantity: Quantity) -> u64 {
    u64::try_from(quantity.units()).unwrap_or(0)
}

/// The limits of a pod.
#[must_use]
pub fn limits(pod: &Pod) -> Limits {
    let mut limits = Limits::default();
    for volume in pod::spec(pod).volumes.iter().flatten() {
        let limit = volume
            .empty_dir
            .as_ref()
            .and_then(|e| e.size_limit.as_ref());
        if let Some((text, quantity)) = limit
            .and_then(|l| Some((l.0.clone(), l.0.parse::<Quantity>().ok()?)))
            .filter(|(_, q)| !q.is_zero())
        {
            limits
                .volumes
                .insert(volume.name.clone(), (text, bytes(quantity)));
        }
    }
    let mut all_limited = true;
    for (role, container) in pod::containers(pod)
        .iter()
        .filter(|(role, _)| *role != Role::Ephemeral)
    {
        match of_container(container, Side::Limits).get(RESOURCE) {
            Some(limit) => {
                _ = limits
                    .containers
                    .insert(container.name.clone(), (limit.to_string(), bytes(*limit)))
            }
            None => all_limited &= *role == Role::Init,
        }
    }
    limits.pod = of_pod(pod, Side::Limits)
        .get(RESOURCE)
        .filter(|q| all_limited && !q.is_zero())
        .map(|q| (q.to_string(), bytes(*q)));
    limits
}

impl Limits {
    /// Whether there are no limits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.volumes.is_empty() && self.containers.is_empty() && self.pod.is_none()
    }

    /// Whether the usage of containers must be measured.
    #[must_use]
    pub fn needs_container_usage(&self) -> bool {
        !self.containers.is_empty() || self.pod.is_some()
    }

    /// Usage in bytes above which measuring a volume can stop.
    #[must_use]
    pub fn measure_limit(&self, volume: &str) -> u64 {
        let own = self.volumes.get(volume).map(|(_, limit)| *limit);
        own.into_iter()
            .chain(self.pod.as_ref().map(|(_, limit)| *limit))
            .min()
            .unwrap_or(u64::MAX)
    }

    /// Why a pod with this usage must be evicted: the signal for metrics, and the message.
    #[must_use]
    pub fn exceeded(&self, usage: &Usage) -> Option<(&'static str, String)> {
        let over = |map: &BTreeMap<String, u64>, name: &str, limit: u64| {
            map.get(name).is_some_and(|used| *used > limit)
        };
        if let Some((name, (text, _))) = self
            .volumes
            .iter()
            .find(|(name, (_, limit))| over(&usage.volumes, name, *limit))
        {
            return Some((
                "emptydirfs.limit",
                format!("Usage of EmptyDir volume {name:?} exceeds the limit {text:?}. "),
            ));
        }
        let total: u64 = usage
            .volumes
            .values()
            .chain(usage.containers.values())
            .fold(0, |sum, used| sum.saturating_add(*used));
        if let Some((text, _)) = self.pod.as_ref().filter(|(_, limit)| total > *limit) {
            return Some((
                "ephemeralpodfs.limit",
                format!(
                    "Pod ephemeral local storage usage exceeds the total limit of containers {text}. "
                ),
            ));
        }
        let container = self
            .containers
            .iter()
            .find(|(name, (_, limit))| over(&usage.containers, name, *limit));
        container.map(|(name, (text, _))| {
            (
                "ephemeralcontainerfs.limit",
                format!("Container {name} exceeded its local ephemeral storage limit {text:?}. "),
            )
        })
    }
}

/// The volumes of a pod that use the node's disk.
#[must_use]
pub fn volumes_on_disk(pod: &Pod) -> Vec<String> {
    let on_disk = |v: &&k8s_openapi::api::core::v1::Volume| {
        let disk = v
            .empty_dir
            .as_ref()
            .is_some_and(|e| e.medium.as_deref().unwrap_or_default().is_empty());
        disk || v.config_map.is_some()
    };
    pod::spec(pod)
        .volumes
        .iter()
        .flatten()
        .filter(on_disk)
        .map(|v| v.name.clone())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn limits_of(containers: Value, volumes: Value) -> Limits {
        limits(
            &serde_json::from_value(
                json!({"spec": {"containers": containers, "volumes": volumes}}),
            )
            .expect("a pod"),
        )
    }

    fn container(name: &str, limit: &str) -> Value {
        json!({"name": name, "resources": {"limits": if limit.is_empty() { json!({}) } else { json!({"ephemeral-storage": limit}) }}})
    }

    #[test]
    fn the_first_exceeded_limit_is_reported() {
        let volumes =
            json!([{"name": "v", "emptyDir": {"sizeLimit": "1Ki"}}, {"name": "w", "emptyDir": {}}]);
        let limits = limits_of(
            json!([container("a", "1Ki"), container("b", "2Ki")]),
            volumes.clone(),
        );
        let usage = |v: u64, w: u64, a: u64, b: u64| Usage {
            volumes: [("v".to_owned(), v), ("w".to_owned(), w)].into(),
            containers: [("a".to_owned(), a), ("b".to_owned(), b)].into(),
        };
        for (used, expected) in [
            (usage(1024, 0, 1024, 1024), None),
            (
                usage(1025, 0, 0, 0),
                Some("Usage of EmptyDir volume \"v\" exceeds the limit \"1Ki\". "),
            ),
            (
                usage(0, 3073, 0, 0),
                Some(
                    "Pod ephemeral local storage usage exceeds the total limit of containers 3Ki. ",
                ),
            ),
            (
                usage(0, 0, 1025, 0),
                Some("Container a exceeded its local ephemeral storage limit \"1Ki\". "),
            ),
        ] {
            assert_eq!(
                limits.exceeded(&used).map(|(_, why)| why).as_deref(),
                expected,
                "{used:?}"
            );
        }
        assert_eq!(
            (limits.measure_limit("v"), limits.measure_limit("w")),
            (1024, 3072)
        );
        let open = limits_of(json!([container("a", "1Ki"), container("b", "")]), volumes);
        assert_eq!(
            (open.pod, open.containers.len()),
            (None, 1),
            "without a limit in every container the pod has none"
        );
        assert!(
            limits_of(
                json!([container("a", "")]),
                json!([{"name": "v", "emptyDir": {}}])
            )
            .is_empty()
        );
    }
}
