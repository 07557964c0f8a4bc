//! Rejects pods whose volumes cannot be attached because the node has reached its driver's attachment limit (KEP-4876,
//! `WaitForAttachAndMount` in `pkg/kubelet/volumemanager/volume_manager.go`). Pure.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use crate::pod;

/// Status reason of a rejected pod.
pub const LIMIT_EXCEEDED: &str = "VolumeAttachmentLimitExceeded";

/// How long a pod waits for its volumes before it is rejected; until then a volume may be detached and make room.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(2 * 60 + 3);

/// A volume that is not attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unattached {
    /// Name of the volume in the pod spec.
    pub volume: String,
    /// Whether the driver's attachment limit is reached. Only set for drivers whose limit is refreshed periodically
    /// (`nodeAllocatableUpdatePeriodSeconds`).
    pub is_full: bool,
}

/// Message of the rejection; `None` if the pod is not rejected. `waited` is how long the pod has been waiting,
/// `mounted` are its mounted volumes, and `unattached` those still not attached.
#[must_use]
pub fn limit_exceeded(
    pod: &Pod,
    waited: Duration,
    mounted: &BTreeSet<&str>,
    unattached: &[Unattached],
) -> Option<String> {
    if waited < ATTACH_TIMEOUT || !unattached.iter().any(|volume| volume.is_full) {
        return None;
    }
    let used = pod::used_volumes(pod);
    let unmounted = used.iter().map(String::as_str);
    let unmounted = unmounted.filter(|name| !mounted.contains(name));
    let unattached: BTreeSet<&str> = unattached.iter().map(|v| v.volume.as_str()).collect();
    Some(format!(
        "Node has reached its volume attachment limit, rejecting pod. unmounted volumes=[{}], unattached volumes=[{}], failed to process volumes=[]: context deadline exceeded",
        listed(unmounted),
        listed(unattached)
    ))
}

fn listed<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    names.into_iter().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod() -> Pod {
        serde_json::from_value(json!({"spec": {
            "initContainers": [{"name": "i", "volumeMounts": [{"name": "token", "mountPath": "/t"}]}],
            "containers": [{
                "name": "c",
                "volumeMounts": [{"name": "data", "mountPath": "/d"}, {"name": "conf", "mountPath": "/c"}],
                "volumeDevices": [{"name": "disk", "devicePath": "/dev/x"}]
            }],
            "volumes": [{"name": "data"}, {"name": "conf"}, {"name": "disk"}, {"name": "token"}, {"name": "unused"}]
        }}))
        .expect("a pod")
    }

    #[test]
    fn a_pod_is_rejected_after_the_attach_timeout_if_the_node_is_full() {
        let of = |volume: &str, is_full: bool| Unattached {
            volume: volume.into(),
            is_full,
        };
        let (full, other) = (of("disk", true), of("data", false));
        for (seconds, unattached, expected) in [
            (122, vec![full.clone()], false),
            (123, vec![full.clone()], true),
            (123, vec![other.clone()], false),
            (500, vec![full.clone(), other.clone()], true),
            (500, vec![], false),
        ] {
            let waited = Duration::from_secs(seconds);
            let found = limit_exceeded(&pod(), waited, &BTreeSet::new(), &unattached);
            assert_eq!(found.is_some(), expected, "{seconds} {unattached:?}");
        }
        let waited = Duration::from_secs(130);
        let mounted = BTreeSet::from(["conf", "unused"]);
        assert_eq!(
            limit_exceeded(&pod(), waited, &mounted, &[full, other]).as_deref(),
            Some(
                "Node has reached its volume attachment limit, rejecting pod. unmounted volumes=[data disk token], unattached volumes=[data disk], failed to process volumes=[]: context deadline exceeded"
            )
        );
    }
}
