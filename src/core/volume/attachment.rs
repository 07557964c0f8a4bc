//! Pods whose volumes cannot be attached as their node has as many as its driver serves there (KEP-4876; upstream's
//! `pkg/kubelet/volumemanager`, `WaitForAttachAndMount`). Pure.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use crate::core::pod;

/// The reason of a pod that is given up.
pub const LIMIT_EXCEEDED: &str = "VolumeAttachmentLimitExceeded";

/// How long a pod waits for its volumes before it is given up: until then its attacher may find room again.
const PATIENCE: Duration = Duration::from_secs(2 * 60 + 3);

/// A volume that is not attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unattached {
    /// The pod's name for it.
    pub volume: String,
    /// Its driver serves no more volumes on this node, and says how often it is to be asked for their number.
    pub is_full: bool,
}

/// Why a pod is given up, if it is: it has waited for `waited`, `mounted` are the volumes that it has, and `unattached` those
/// that have been waited for in vain.
#[must_use]
pub fn limit_exceeded(
    pod: &Pod,
    waited: Duration,
    mounted: &BTreeSet<&str>,
    unattached: &[Unattached],
) -> Option<String> {
    if waited < PATIENCE || !unattached.iter().any(|volume| volume.is_full) {
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
    fn a_pod_is_given_up_when_its_attacher_has_had_its_time_and_the_node_is_full() {
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
