//! Memory protection and throttling on cgroup v2
//! ([KEP-2570](https://git.k8s.io/enhancements/keps/sig-node/2570-memory-qos), `featureGates.MemoryQoS`). Pure.

use k8s_openapi::api::core::v1::{Container, Pod};

use super::qos::{self, QosClass};
use super::resources::{Amounts, Side, of_container, of_pod};
use crate::pod;

/// The kernel rounds `memory.high` down to pages of this many bytes.
const PAGE: i64 = 4096;

/// The configuration of memory QoS.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryQos {
    /// The point between request and limit from which a container is throttled (`memoryThrottlingFactor`), above 0 and
    /// at most 1.
    pub throttling: f64,
    /// Whether memory requests are protected (`memoryReservationPolicy: TieredReservation`).
    pub reserves: bool,
}

/// Protection of a cgroup's memory from reclaim, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Protection {
    /// Memory that is never reclaimed (`memory.min`).
    pub min: u64,
    /// Memory that is reclaimed only if there is no other (`memory.low`).
    pub low: u64,
}

fn memory(amounts: &Amounts) -> u64 {
    let bytes = amounts.get("memory").map_or(0, |q| q.units());
    u64::try_from(bytes).unwrap_or(0)
}

/// The protection of a memory request: `memory.min` for Guaranteed pods, `memory.low` for others.
fn of_request(class: QosClass, request: u64) -> Protection {
    match class {
        QosClass::Guaranteed => Protection {
            min: request,
            low: 0,
        },
        _ => Protection {
            min: 0,
            low: request,
        },
    }
}

/// The protection of a pod's cgroup.
#[must_use]
pub fn of_whole_pod(pod: &Pod) -> Protection {
    let request = memory(&of_pod(pod, Side::Requests));
    of_request(qos::of(pod::spec(pod)), request)
}

/// The sum of the protection of pods.
#[must_use]
pub fn of_pods(pods: &[&Pod]) -> Protection {
    pods.iter()
        .map(|p| of_whole_pod(p))
        .fold(Protection::default(), |sum, one| Protection {
            min: sum.min.saturating_add(one.min),
            low: sum.low.saturating_add(one.low),
        })
}

/// The files of a container's cgroup with their values in bytes. A container without a limit is throttled as if its
/// limit were `allocatable` (bytes). A container whose request equals its limit is not throttled.
#[must_use]
pub(crate) fn of_one_container(
    pod: &Pod,
    container: &Container,
    rules: MemoryQos,
    allocatable: u64,
) -> Vec<(&'static str, u64)> {
    let request = memory(&of_container(container, Side::Requests));
    let limit = memory(&of_container(container, Side::Limits));
    let mut files = vec![];
    if rules.reserves && request > 0 {
        let protection = of_request(qos::of(pod::spec(pod)), request);
        files.push(match protection.min {
            0 => ("memory.low", protection.low),
            min => ("memory.min", min),
        });
    } else {
        files.extend([("memory.min", 0), ("memory.low", 0)]);
    }
    let most = if limit == 0 { allocatable } else { limit };
    if request != limit && most > request {
        let high = throttled_from(request, most, rules.throttling);
        if high > request {
            files.push(("memory.high", high));
        }
    }
    files
}

/// `request + (most - request) × factor`, rounded down to whole pages.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "the kubelet computes it in floating point, and both must agree"
)]
fn throttled_from(request: u64, most: u64, factor: f64) -> u64 {
    let bytes = request as f64 + (most as f64 - request as f64) * factor;
    let pages = (bytes.floor() / PAGE as f64) as i64;
    pages.saturating_mul(PAGE).max(0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const MIB: u64 = 1 << 20;

    fn pod(resources: Value) -> Pod {
        let container = json!({"name": "c", "resources": resources});
        serde_json::from_value(json!({"spec": {"containers": [container]}})).expect("a pod")
    }

    fn files(pod: &Pod, reserves: bool) -> Vec<(&'static str, u64)> {
        let rules = MemoryQos {
            throttling: 0.9,
            reserves,
        };
        of_one_container(pod, &pod::spec(pod).containers[0], rules, 1000 * MIB)
    }

    #[test]
    fn containers_are_protected_by_their_class_and_throttled_below_their_limit() {
        let guaranteed = pod(
            json!({"limits": {"cpu": "1", "memory": "64Mi"}, "requests": {"cpu": "1", "memory": "64Mi"}}),
        );
        let burstable =
            pod(json!({"requests": {"memory": "100Mi"}, "limits": {"memory": "200Mi"}}));
        let open = pod(json!({"requests": {"memory": "100Mi"}}));
        let best_effort = pod(json!({}));
        let none = [("memory.min", 0), ("memory.low", 0)];
        let (low, high) = (("memory.low", 100 * MIB), ("memory.high", 190 * MIB));
        for (pod, reserves, expected) in [
            (&guaranteed, true, vec![("memory.min", 64 * MIB)]),
            (&guaranteed, false, none.to_vec()),
            (&burstable, true, vec![low, high]),
            (&burstable, false, vec![none[0], none[1], high]),
            (&open, true, vec![low, ("memory.high", 910 * MIB)]),
            (&best_effort, true, none.to_vec()),
        ] {
            assert_eq!(files(pod, reserves), expected, "{pod:?}");
        }
        let odd = pod(json!({"requests": {"memory": "1"}, "limits": {"memory": "10001"}}));
        assert_eq!(files(&odd, false)[2], ("memory.high", 8192), "whole pages");
        let small = pod(json!({"requests": {"memory": "4097"}, "limits": {"memory": "4100"}}));
        assert_eq!(files(&small, false).len(), 2, "never below the request");
        let more_than_there_is = pod(json!({"requests": {"memory": "2000Mi"}}));
        assert_eq!(files(&more_than_there_is, false).len(), 2);
    }

    #[test]
    fn pods_are_protected_together() {
        let guaranteed = pod(
            json!({"limits": {"cpu": "1", "memory": "64Mi"}, "requests": {"cpu": "1", "memory": "64Mi"}}),
        );
        let burstable = pod(json!({"requests": {"memory": "100Mi"}}));
        let all = of_pods(&[&guaranteed, &burstable, &burstable]);
        assert_eq!((all.min, all.low), (64 * MIB, 200 * MIB));
    }
}
