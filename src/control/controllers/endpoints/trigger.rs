//! When the change happened that leads to a write (`staging/src/k8s.io/endpointslice/util/trigger_time_tracker.go`). Proxies
//! measure from here how long a change needs until they have programmed it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt as _;

use super::desired::readiness;
use holdfast_core::digest::fnv64;
use holdfast_core::lock::lock;
use holdfast_kubeapi::cache::Key;

/// The last changes of a service and of its pods; pods by a hash of their names.
struct Seen {
    service: Option<jiff::Timestamp>,
    pods: HashMap<u64, jiff::Timestamp>,
}

/// The last changes of each service.
#[derive(Default)]
pub(super) struct Triggers {
    services: Mutex<HashMap<Key, Seen>>,
}

impl Triggers {
    /// The earliest change since the last call for this service, with a resolution of seconds. For a new service it is the
    /// time of its creation.
    pub(super) fn next(
        &self,
        key: &Key,
        service: &Service,
        pods: &[Arc<Pod>],
    ) -> Option<jiff::Timestamp> {
        let created = service.creation_timestamp().map(|t| t.0);
        let times = pods.iter().filter_map(|pod| {
            let (_, since) = readiness(pod)?;
            Some((fnv64(pod.name_any().bytes()), since?))
        });
        let now = Seen {
            service: created,
            pods: times.collect(),
        };
        let mut services = lock(&self.services);
        let Some(before) = services.get(key) else {
            services.insert(key.clone(), now);
            return created;
        };
        let changed = now
            .pods
            .iter()
            .filter(|(pod, time)| before.pods.get(pod).is_none_or(|last| last < time));
        let changed = changed.map(|(_, time)| *time);
        let own = created.filter(|time| before.service.is_none_or(|last| last < *time));
        let first = changed.chain(own).min();
        services.insert(key.clone(), now);
        first
    }

    /// Removes a deleted service.
    pub(super) fn forget(&self, key: &Key) {
        lock(&self.services).remove(key);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_earliest_change_since_the_last_call_counts() {
        let at = |second: u32| format!("2026-01-01T00:00:{second:02}Z");
        let pod = |name: &str, second: u32| -> Arc<Pod> {
            let ready =
                json!({"type": "Ready", "status": "True", "lastTransitionTime": at(second)});
            let pod = json!({"metadata": {"name": name}, "status": {"conditions": [ready]}});
            Arc::new(serde_json::from_value(pod).expect("a pod"))
        };
        let service = json!({"metadata": {"name": "s", "creationTimestamp": at(1)}});
        let service: Service = serde_json::from_value(service).expect("a service");
        let (triggers, key) = (Triggers::default(), ("n".to_owned(), "s".to_owned()));
        let next = |pods: &[Arc<Pod>]| {
            let time = triggers.next(&key, &service, pods);
            time.map(|time| time.to_string())
        };
        assert_eq!(next(&[pod("a", 5)]), Some(at(1)));
        assert_eq!(next(&[pod("a", 5)]), None);
        assert_eq!(next(&[pod("a", 9), pod("b", 8), pod("c", 7)]), Some(at(7)));
        assert_eq!(next(&[pod("a", 9)]), None, "a removed pod has no time");
        assert_eq!(next(&[pod("a", 9), pod("b", 8)]), Some(at(8)));
        triggers.forget(&key);
        assert_eq!(next(&[]), Some(at(1)));
    }
}
