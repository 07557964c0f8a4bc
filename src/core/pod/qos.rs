//! QoS classes of pods (`pkg/apis/core/v1/helper/qos`).

use k8s_openapi::api::core::v1::{Pod, PodSpec, ResourceRequirements};
use serde_json::Value;

use super::resources::{Side, of_pod_level};
use crate::pod;
use crate::quantity::Quantity;

/// The QoS class, which ranks pods when memory or CPU is scarce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QosClass {
    /// All containers have limits of CPU and memory, and requests equal to them.
    Guaranteed,
    /// Some container has a request or a limit.
    Burstable,
    /// No container has a request or a limit.
    BestEffort,
}

impl QosClass {
    /// The value of `status.qosClass`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            QosClass::Guaranteed => "Guaranteed",
            QosClass::Burstable => "Burstable",
            QosClass::BestEffort => "BestEffort",
        }
    }
}

/// The class of a pod.
#[must_use]
pub fn of(spec: &PodSpec) -> QosClass {
    // Pod-level resources replace those of all containers (KEP-2837).
    let whole = spec
        .resources
        .as_ref()
        .filter(|r| r.limits.is_some() || r.requests.is_some());
    let containers: Vec<Option<&ResourceRequirements>> = match whole {
        Some(whole) => vec![Some(whole)],
        None => spec
            .containers
            .iter()
            .chain(spec.init_containers.iter().flatten())
            .map(|c| c.resources.as_ref())
            .collect(),
    };
    let amount =
        |resources: &Option<&ResourceRequirements>, limits: bool, name: &str| -> Option<Quantity> {
            let resources = (*resources)?;
            let map = if limits {
                &resources.limits
            } else {
                &resources.requests
            };
            map.as_ref()?
                .get(name)?
                .0
                .parse()
                .ok()
                .filter(|q: &Quantity| !q.is_zero())
        };
    let any = containers.iter().any(|c| {
        ["cpu", "memory"]
            .iter()
            .any(|r| amount(c, true, r).is_some() || amount(c, false, r).is_some())
    });
    if !any {
        return QosClass::BestEffort;
    }
    let all = containers.iter().all(|c| {
        ["cpu", "memory"].iter().all(|r| {
            let limit = amount(c, true, r);
            limit.is_some() && amount(c, false, r).is_none_or(|request| Some(request) == limit)
        })
    });
    if all {
        QosClass::Guaranteed
    } else {
        QosClass::Burstable
    }
}

/// The class of a pod spec in JSON. A spec that cannot be decoded counts as `BestEffort`; validation rejects it later.
#[must_use]
pub fn of_json(spec: &Value) -> &'static str {
    let spec: Option<PodSpec> = serde_json::from_value(spec.clone()).ok();
    spec.map_or(QosClass::BestEffort, |s| of(&s)).name()
}

/// Whether a pod is Guaranteed by the resources of its containers, which may then get exclusive CPUs and memory. A pod
/// with pod-level resources is not.
#[must_use]
pub(crate) fn is_guaranteed_by_containers(pod: &Pod) -> bool {
    let for_the_pod = |side| !of_pod_level(pod, side).is_empty();
    of(pod::spec(pod)) == QosClass::Guaranteed
        && !for_the_pod(Side::Limits)
        && !for_the_pod(Side::Requests)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn pod_level_resources_decide_the_qos_class_if_set() {
        for (resources, expected) in [
            (
                json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}}),
                "Guaranteed",
            ),
            (json!({"requests": {"cpu": "1"}}), "Burstable"),
            (json!({}), "BestEffort"),
        ] {
            assert_eq!(
                of_json(&json!({"resources": resources, "containers": [{"name": "c"}]})),
                expected
            );
        }
    }

    #[test]
    fn qos_classes_follow_requests_and_limits() {
        let cases = [
            (json!({}), "BestEffort"),
            (json!({"requests": {"cpu": "0"}}), "BestEffort"),
            (json!({"requests": {"cpu": "1"}}), "Burstable"),
            (json!({"limits": {"cpu": "1"}}), "Burstable"),
            (
                json!({"limits": {"cpu": "1", "memory": "1Gi"}}),
                "Guaranteed",
            ),
            (
                json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1000m", "memory": "1024Mi"}}),
                "Guaranteed",
            ),
            (
                json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}}),
                "Burstable",
            ),
        ];
        for (resources, expected) in cases {
            let spec = json!({"containers": [{"name": "c", "resources": resources}]});
            assert_eq!(of_json(&spec), expected, "{spec}");
        }
    }
}
