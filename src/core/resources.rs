//! What pods ask for: sums of requests and limits, host ports. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;

use super::quantity::Quantity;

/// Amounts by resource name.
pub type Amounts = BTreeMap<String, Quantity>;

/// Reads a map of quantities; what cannot be read counts as nothing.
#[must_use]
pub fn amounts(map: &BTreeMap<String, Text>) -> Amounts {
    map.iter().map(|(name, text)| (name.clone(), text.0.parse().unwrap_or_default())).collect()
}

/// Which side of a container's resources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// What is set aside.
    Requests,
    /// What may not be exceeded.
    Limits,
}

/// One container's amounts.
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

/// A pod's amounts: the larger of all containers with the sidecars, and of each init step with the
/// sidecars started before it; plus the overhead.
#[must_use]
pub fn of_pod(pod: &Pod, side: Side) -> Amounts {
    let Some(spec) = &pod.spec else { return Amounts::new() };
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
    if let Some(overhead) = &spec.overhead {
        add(&mut total, &amounts(overhead));
    }
    total
}

/// What the scheduler and admission count.
#[must_use]
pub fn requests(pod: &Pod) -> Amounts {
    of_pod(pod, Side::Requests)
}

/// Host ports of a pod: protocol, host address, port.
fn host_ports(pod: &Pod) -> Vec<(String, String, i32)> {
    let containers = pod.spec.iter().flat_map(|s| &s.containers);
    containers
        .flat_map(|c| c.ports.iter().flatten())
        .filter_map(|p| {
            let port = p.host_port.filter(|p| *p > 0)?;
            Some((p.protocol.clone().unwrap_or_else(|| "TCP".into()), p.host_ip.clone().unwrap_or_default(), port))
        })
        .collect()
}

/// Whether a pod wants a host port that one of the others has.
pub fn ports_clash<'a>(pod: &Pod, mut others: impl Iterator<Item = &'a Pod>) -> bool {
    let wanted = host_ports(pod);
    let any = |ip: &str| ip.is_empty() || ip == "0.0.0.0" || ip == "::";
    !wanted.is_empty()
        && others.any(|other| {
            host_ports(other)
                .iter()
                .any(|(protocol, ip, port)| wanted.iter().any(|(p, i, n)| p == protocol && n == port && (i == ip || any(i) || any(ip))))
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
            let pod: Pod = serde_json::from_value(json!({"spec": {"initContainers": init, "containers": main}})).expect("a pod");
            requests(&pod)["cpu"].milli()
        };
        assert_eq!(sum(json!([]), json!([container("a", "1", false), container("b", "500m", false)])), 1500);
        assert_eq!(sum(json!([container("i", "3", false)]), json!([container("a", "1", false)])), 3000);
        assert_eq!(sum(json!([container("s", "1", true), container("i", "1500m", false)]), json!([container("a", "1", false)])), 2500);
        assert_eq!(sum(json!([container("i", "1500m", false), container("s", "1", true)]), json!([container("a", "1", false)])), 2000);
    }
}
