//! Sums of pods' requests and limits, and host ports. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;

use crate::quantity::Quantity;

/// Amounts by resource name.
pub type Amounts = BTreeMap<String, Quantity>;

/// Parses a map of quantities. A quantity that cannot be parsed counts as zero.
#[must_use]
pub fn amounts(map: &BTreeMap<String, Text>) -> Amounts {
    map.iter()
        .map(|(name, text)| (name.clone(), text.0.parse().unwrap_or_default()))
        .collect()
}

/// Requests or limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Amounts that are reserved.
    Requests,
    /// Amounts that cannot be exceeded.
    Limits,
}

/// The amounts of one container.
#[must_use]
pub fn of_container(container: &Container, side: Side) -> Amounts {
    let resources = container.resources.as_ref();
    let map = match side {
        Side::Requests => resources.and_then(|r| r.requests.as_ref()),
        Side::Limits => resources.and_then(|r| r.limits.as_ref()),
    };
    map.map(amounts).unwrap_or_default()
}

fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

fn add(into: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        let sum = into.entry(name.clone()).or_default();
        *sum = *sum + *amount;
    }
}

fn raise(into: &mut Amounts, other: &Amounts) {
    for (name, amount) in other {
        let highest = into.entry(name.clone()).or_default();
        *highest = (*highest).max(*amount);
    }
}

/// Whether a resource can be set at pod level.
#[must_use]
pub fn is_pod_level(name: &str) -> bool {
    matches!(name, "cpu" | "memory") || name.starts_with("hugepages-")
}

/// Pod-level resources (KEP-2837). A request that is not set defaults to the containers' sum, else to the limit.
#[must_use]
pub fn of_pod_level(pod: &Pod, side: Side) -> Amounts {
    let Some(resources) = pod.spec.as_ref().and_then(|s| s.resources.as_ref()) else {
        return Amounts::new();
    };
    let of = |map: Option<&BTreeMap<String, Text>>| -> Amounts {
        map.map(amounts)
            .unwrap_or_default()
            .into_iter()
            .filter(|(name, _)| is_pod_level(name))
            .collect()
    };
    let limits = of(resources.limits.as_ref());
    if side == Side::Limits {
        return limits;
    }
    let (mut requests, own) = (of(resources.requests.as_ref()), of_containers(pod, side));
    for (name, limit) in limits {
        requests.entry(name.clone()).or_insert_with(|| {
            own.get(&name)
                .copied()
                .filter(|q| !q.is_zero())
                .unwrap_or(limit)
        });
    }
    requests
}

/// The amounts of a pod: pod-level resources, else the amounts of its containers; plus the overhead.
#[must_use]
pub fn of_pod(pod: &Pod, side: Side) -> Amounts {
    let mut total = of_containers(pod, side);
    total.extend(of_pod_level(pod, side));
    if let Some(overhead) = pod.spec.as_ref().and_then(|s| s.overhead.as_ref()) {
        add(&mut total, &amounts(overhead));
    }
    total
}

/// The amounts of a pod's containers. This is the maximum of the sum of all regular containers and sidecars, and of
/// each init container plus the sidecars before it.
#[must_use]
pub fn of_containers(pod: &Pod, side: Side) -> Amounts {
    let Some(spec) = &pod.spec else {
        return Amounts::new();
    };
    let mut total = Amounts::new();
    for container in &spec.containers {
        add(&mut total, &of_container(container, side));
    }
    let (mut sidecars, mut peak) = (Amounts::new(), Amounts::new());
    for container in spec.init_containers.iter().flatten() {
        let own = of_container(container, side);
        if is_sidecar(container) {
            add(&mut sidecars, &own);
            raise(&mut peak, &sidecars);
        } else {
            let mut step = sidecars.clone();
            add(&mut step, &own);
            raise(&mut peak, &step);
        }
    }
    add(&mut total, &sidecars);
    raise(&mut total, &peak);
    total
}

/// Huge pages by page size; both in bytes.
pub fn huge_pages(amounts: &Amounts) -> impl Iterator<Item = (u64, u64)> {
    amounts.iter().filter_map(|(name, amount)| {
        let size: Quantity = name.strip_prefix("hugepages-")?.parse().ok()?;
        let bytes = u64::try_from(amount.units()).unwrap_or(0);
        Some((u64::try_from(size.units()).ok()?, bytes))
    })
}

/// The requests that the scheduler and admission count.
#[must_use]
pub fn requests(pod: &Pod) -> Amounts {
    of_pod(pod, Side::Requests)
}

/// Whether a container of the pod has a host port.
#[must_use]
pub(crate) fn has_host_ports(pod: &Pod) -> bool {
    !host_ports(pod).is_empty()
}

/// The host ports of a pod: protocol, host address, port.
fn host_ports(pod: &Pod) -> Vec<(String, String, i32)> {
    let containers = pod.spec.iter().flat_map(|s| &s.containers);
    containers
        .flat_map(|c| c.ports.iter().flatten())
        .filter_map(|p| {
            let port = p.host_port.filter(|p| *p > 0)?;
            Some((
                p.protocol.clone().unwrap_or_else(|| "TCP".into()),
                p.host_ip.clone().unwrap_or_default(),
                port,
            ))
        })
        .collect()
}

/// Whether a host port of the pod conflicts with one of the other pods.
pub fn ports_clash<'a>(pod: &Pod, mut others: impl Iterator<Item = &'a Pod>) -> bool {
    let wanted = host_ports(pod);
    let any = |ip: &str| ip.is_empty() || ip == "0.0.0.0" || ip == "::";
    !wanted.is_empty()
        && others.any(|other| {
            host_ports(other).iter().any(|(protocol, ip, port)| {
                wanted
                    .iter()
                    .any(|(p, i, n)| p == protocol && n == port && (i == ip || any(i) || any(ip)))
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn pod_level_resources_replace_the_sums_of_containers() {
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "overhead": {"memory": "1Mi"},
            "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "4", "memory": "64Mi", "example.com/x": "9"}},
            "containers": [{"name": "a", "resources": {"requests": {"cpu": "1", "memory": "16Mi", "example.com/x": "1"}}}]}}))
        .expect("a pod");
        let (requests, limits) = (of_pod(&pod, Side::Requests), of_pod(&pod, Side::Limits));
        assert_eq!(
            (
                requests["cpu"].milli(),
                requests["memory"].units(),
                requests["example.com/x"].units()
            ),
            (2000, 17 << 20, 1)
        );
        assert_eq!(
            (
                limits["cpu"].milli(),
                limits["memory"].units(),
                limits.contains_key("example.com/x")
            ),
            (4000, 65 << 20, false)
        );
    }

    #[test]
    fn init_containers_count_at_their_peak_and_sidecars_throughout() {
        let container = |name: &str, cpu: &str, sidecar: bool| {
            let mut c = json!({"name": name, "resources": {"requests": {"cpu": cpu}}});
            if sidecar {
                c["restartPolicy"] = "Always".into();
            }
            c
        };
        let sum = |init: serde_json::Value, main: serde_json::Value| {
            let pod: Pod = serde_json::from_value(
                json!({"spec": {"initContainers": init, "containers": main}}),
            )
            .expect("a pod");
            requests(&pod)["cpu"].milli()
        };
        assert_eq!(
            sum(
                json!([]),
                json!([container("a", "1", false), container("b", "500m", false)])
            ),
            1500
        );
        assert_eq!(
            sum(
                json!([container("i", "3", false)]),
                json!([container("a", "1", false)])
            ),
            3000
        );
        assert_eq!(
            sum(
                json!([container("s", "1", true), container("i", "1500m", false)]),
                json!([container("a", "1", false)])
            ),
            2500
        );
        assert_eq!(
            sum(
                json!([container("i", "1500m", false), container("s", "1", true)]),
                json!([container("a", "1", false)])
            ),
            2000
        );
    }
}
