//! The Endpoints object of a service with a selector (`pkg/controller/endpoint/endpoints_controller.go`,
//! `pkg/api/v1/endpoints/util.go`). Slices have replaced it, and old clients still read it. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{
    EndpointAddress, EndpointPort, EndpointSubset, Endpoints, Pod, Service, ServiceSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;

use super::desired::{
    addresses, families, family_of, find_port, has_endpoint, hostname, is_headless, is_ready,
    target,
};
use super::slices::{HEADLESS, TRIGGER_TIME, set_trigger};

/// The label with the name of the controller that writes an Endpoints object (KEP-4974).
pub(super) const MANAGED_BY: &str = "endpoints.kubernetes.io/managed-by";
/// The name of this controller in [`MANAGED_BY`].
pub(super) const CONTROLLER: &str = "endpoint-controller";
/// The annotation of an object that lacks addresses because there were too many.
const OVER_CAPACITY: &str = "endpoints.kubernetes.io/over-capacity";
/// Maximum number of addresses.
const MAX_ADDRESSES: usize = 1000;

/// A port in the order of the ports of a subset.
type PortKey = (String, i32, String, Option<String>);
/// Addresses in the order of a subset: IP, the pod's uid, and whether it is ready.
type AddressKey = (String, String, bool);

fn port_of(key: PortKey) -> EndpointPort {
    let (name, port, protocol, app_protocol) = key;
    EndpointPort {
        name: Some(name).filter(|name| !name.is_empty()),
        port,
        protocol: Some(protocol),
        app_protocol,
    }
}

/// The address of a pod of the service's first family.
fn address(service: &Service, spec: &ServiceSpec, pod: &Pod) -> Option<EndpointAddress> {
    let first = spec.ip_families.as_ref().and_then(|all| all.first());
    let family = match first {
        Some(family) => family.as_str(),
        None => families(spec).first().copied().unwrap_or_default(),
    };
    let ip = addresses(pod)
        .into_iter()
        .find(|a| family_of(*a) == family)?;
    let node = pod.spec.as_ref().and_then(|s| s.node_name.clone());
    Some(EndpointAddress {
        ip: ip.to_string(),
        hostname: hostname(service, pod),
        node_name: node.filter(|name| !name.is_empty()),
        target_ref: Some(target(pod)),
    })
}

/// The subsets of a service. Ports with the same addresses share a subset.
fn subsets(service: &Service, spec: &ServiceSpec, pods: &[Arc<Pod>]) -> Vec<EndpointSubset> {
    let publish = spec.publish_not_ready_addresses == Some(true);
    let mut known: BTreeMap<AddressKey, EndpointAddress> = BTreeMap::new();
    let mut by_port: BTreeMap<Option<PortKey>, BTreeSet<AddressKey>> = BTreeMap::new();
    for pod in pods.iter().filter(|pod| has_endpoint(pod)) {
        if pod.metadata.deletion_timestamp.is_some() && !publish {
            continue;
        }
        let Some(address) = address(service, spec, pod) else {
            continue;
        };
        let ready = publish || is_ready(pod);
        let key = (address.ip.clone(), pod.uid().unwrap_or_default(), ready);
        known.insert(key.clone(), address);
        let ports = spec.ports.as_deref().unwrap_or_default();
        if ports.is_empty() && is_headless(spec) {
            by_port.entry(None).or_default().insert(key.clone());
        }
        for port in ports {
            let Some(number) = find_port(pod, port) else {
                continue;
            };
            let protocol = port.protocol.clone().unwrap_or_else(|| "TCP".into());
            let name = port.name.clone().unwrap_or_default();
            let port = (name, number, protocol, port.app_protocol.clone());
            by_port.entry(Some(port)).or_default().insert(key.clone());
        }
    }
    let mut by_addresses: BTreeMap<BTreeSet<AddressKey>, Vec<PortKey>> = BTreeMap::new();
    for (port, addresses) in by_port {
        by_addresses.entry(addresses).or_default().extend(port);
    }
    let of = |keys: &BTreeSet<AddressKey>, is_ready: bool| {
        let keys = keys.iter().filter(|key| key.2 == is_ready);
        let all: Vec<EndpointAddress> = keys.filter_map(|key| known.get(key).cloned()).collect();
        Some(all).filter(|all| !all.is_empty())
    };
    let mut subsets: Vec<(Vec<PortKey>, EndpointSubset)> = by_addresses
        .into_iter()
        .map(|(keys, ports)| {
            let listed: Vec<EndpointPort> = ports.iter().cloned().map(port_of).collect();
            let subset = EndpointSubset {
                addresses: of(&keys, true),
                not_ready_addresses: of(&keys, false),
                ports: Some(listed).filter(|ports| !ports.is_empty()),
            };
            (ports, subset)
        })
        .collect();
    subsets.sort_by(|(a, _), (b, _)| a.cmp(b));
    subsets.into_iter().map(|(_, subset)| subset).collect()
}

fn count(subsets: &[EndpointSubset], list: fn(&EndpointSubset) -> &Addresses) -> usize {
    subsets
        .iter()
        .map(|s| list(s).as_ref().map_or(0, Vec::len))
        .sum()
}

type Addresses = Option<Vec<EndpointAddress>>;

/// Removes addresses beyond the maximum, unready ones first, in proportion to the sizes of the subsets. Returns whether there
/// were too many.
fn truncate(subsets: &mut [EndpointSubset]) -> bool {
    let ready = count(subsets, |s| &s.addresses);
    let unready = count(subsets, |s| &s.not_ready_addresses);
    if ready.saturating_add(unready) <= MAX_ADDRESSES {
        return false;
    }
    let keep_unready = ready <= MAX_ADDRESSES;
    let (total, room) = if keep_unready {
        (unready, MAX_ADDRESSES.saturating_sub(ready))
    } else {
        (ready, MAX_ADDRESSES)
    };
    let mut left = room;
    for subset in subsets {
        if !keep_unready {
            subset.not_ready_addresses = None;
        }
        let list = if keep_unready {
            &mut subset.not_ready_addresses
        } else {
            &mut subset.addresses
        };
        let Some(all) = list else { continue };
        // Rounded up, so the last subset may get less than its share.
        let share = (all.len() * room).div_ceil(total.max(1));
        all.truncate(share.min(left));
        left -= all.len();
        if all.is_empty() {
            *list = None;
        }
    }
    true
}

fn labels(service: &Service, spec: &ServiceSpec) -> BTreeMap<String, String> {
    let mut labels = service.labels().clone();
    labels.remove(HEADLESS);
    if is_headless(spec) {
        labels.insert(HEADLESS.into(), String::new());
    }
    labels.insert(MANAGED_BY.into(), CONTROLLER.into());
    labels
}

/// The Endpoints object to create or update; `None` if the current one is as desired.
pub(super) fn plan(
    service: &Service,
    pods: &[Arc<Pod>],
    current: Option<&Endpoints>,
    trigger: Option<jiff::Timestamp>,
) -> Option<Endpoints> {
    let spec = service.spec.as_ref()?;
    let mut subsets = subsets(service, spec, pods);
    let truncated = truncate(&mut subsets);
    subsets.retain(|s| s.addresses.is_some() || s.not_ready_addresses.is_some());
    let labels = labels(service, spec);
    let mut new = current.cloned().unwrap_or_else(|| Endpoints {
        metadata: ObjectMeta {
            name: service.metadata.name.clone(),
            namespace: service.namespace(),
            ..ObjectMeta::default()
        },
        subsets: None,
    });
    new.subsets = Some(subsets).filter(|s| !s.is_empty());
    new.metadata.labels = Some(labels);
    let annotations = new.metadata.annotations.get_or_insert_default();
    if truncated {
        annotations.insert(OVER_CAPACITY.into(), "truncated".into());
    } else {
        annotations.remove(OVER_CAPACITY);
    }
    let content = |e: &Endpoints| {
        let mut annotations = e.annotations().clone();
        annotations.remove(TRIGGER_TIME);
        let subsets = e.subsets.clone().unwrap_or_default();
        (subsets, e.labels().clone(), annotations)
    };
    if current.is_some_and(|current| content(current) == content(&new)) {
        return None;
    }
    set_trigger(&mut new.metadata, trigger);
    Some(new)
}

/// Whether an Endpoints object is written by [`plan`].
pub(super) fn is_managed(endpoints: &Endpoints) -> bool {
    endpoints.labels().get(MANAGED_BY).map(String::as_str) == Some(CONTROLLER)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn service(spec: &Value) -> Service {
        let mut all = json!({"metadata": {"name": "s", "namespace": "n", "labels": {"a": "b"}},
            "spec": {"clusterIP": "10.96.0.9", "ipFamilies": ["IPv4"], "selector": {"a": "b"},
                "ports": [{"name": "web", "port": 80, "protocol": "TCP", "targetPort": 8080}]}});
        json_patch::merge(&mut all["spec"], spec);
        serde_json::from_value(all).expect("a service")
    }

    fn pod(i: usize, ready: bool) -> Arc<Pod> {
        let ip = format!("10.0.{}.{}", i / 250, i % 250 + 1);
        let status = if ready { "True" } else { "False" };
        Arc::new(
            serde_json::from_value(json!({"metadata": {"name": format!("p{i}"), "namespace": "n", "uid": format!("u{i}")},
            "spec": {"nodeName": "n1", "containers": [{"name": "c", "ports": [{"name": "only", "containerPort": 8000 + i % 2}]}]},
            "status": {"podIP": ip, "podIPs": [{"ip": ip}], "conditions": [{"type": "Ready", "status": status}]}}))
            .expect("a pod"),
        )
    }

    /// Each subset as `ready/unready:ports`.
    fn shown(endpoints: &Endpoints) -> String {
        let size = |list: &Addresses| list.as_ref().map_or(0, Vec::len);
        let one = |s: &EndpointSubset| {
            let ports = s.ports.iter().flatten().map(|p| p.port.to_string());
            let ports: Vec<String> = ports.collect();
            let (ready, unready) = (size(&s.addresses), size(&s.not_ready_addresses));
            format!("{ready}/{unready}:{}", ports.join("+"))
        };
        let all = endpoints.subsets.iter().flatten().map(one);
        all.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn ports_with_the_same_addresses_share_a_subset() {
        let two = json!([{"name": "a", "port": 80, "targetPort": 8080}, {"name": "b", "port": 81, "targetPort": 8081}]);
        let named = json!([{"name": "a", "port": 80, "targetPort": 8080}, {"name": "b", "port": 81, "targetPort": "only"}]);
        let pods = [pod(0, true), pod(1, true), pod(2, false)];
        for (spec, expected) in [
            (json!({}), "2/1:8080"),
            (json!({"ports": two}), "2/1:8080+8081"),
            (json!({"ports": named}), "2/1:8080 1/1:8000 1/0:8001"),
            (json!({"publishNotReadyAddresses": true}), "3/0:8080"),
            (json!({"clusterIP": "None", "ports": null}), "2/1:"),
            (json!({"ports": null}), ""),
            (json!({"ipFamilies": ["IPv6"]}), ""),
        ] {
            let new = plan(&service(&spec), &pods, None, None).expect("a new object");
            assert_eq!(shown(&new), expected, "{spec}");
            assert!(is_managed(&new));
            let headless = spec["clusterIP"] == "None";
            assert_eq!(new.labels().contains_key(HEADLESS), headless, "{spec}");
        }
    }

    #[test]
    fn an_unchanged_object_is_not_written() {
        let pods = [pod(0, true)];
        let time = Some(jiff::Timestamp::UNIX_EPOCH);
        let mut one = plan(&service(&json!({})), &pods, None, time).expect("a new object");
        assert_eq!(one.annotations()[TRIGGER_TIME], "1970-01-01T00:00:00Z");
        assert_eq!(plan(&service(&json!({})), &pods, Some(&one), None), None);
        let addresses = &one.subsets.as_ref().expect("subsets")[0].addresses;
        let address = &addresses.as_ref().expect("addresses")[0];
        assert_eq!(
            (address.ip.as_str(), address.node_name.as_deref()),
            ("10.0.0.1", Some("n1"))
        );
        one.labels_mut().insert("own".into(), "label".into());
        assert!(plan(&service(&json!({})), &pods, Some(&one), None).is_some());
        let none = plan(&service(&json!({})), &[], Some(&one), None).expect("a change");
        assert_eq!(
            (shown(&none).as_str(), none.annotations().get(TRIGGER_TIME)),
            ("", None)
        );
    }

    #[test]
    fn at_most_1000_addresses_are_written_ready_ones_first() {
        let of = |ready: usize, unready: usize| {
            let pods: Vec<_> = (0..ready + unready).map(|i| pod(i, i < ready)).collect();
            let new = plan(&service(&json!({})), &pods, None, None).expect("a new object");
            let is_truncated = new.annotations().contains_key(OVER_CAPACITY);
            (shown(&new), is_truncated)
        };
        assert_eq!(of(1000, 0), ("1000/0:8080".into(), false));
        assert_eq!(of(1001, 0), ("1000/0:8080".into(), true));
        assert_eq!(of(900, 200), ("900/100:8080".into(), true));
        assert_eq!(of(1100, 50), ("1000/0:8080".into(), true));
        // Over several subsets: the shares are rounded up, and the sum is the maximum.
        let ports = json!([{"name": "b", "port": 81, "targetPort": "only"}]);
        let pods: Vec<_> = (0..1501).map(|i| pod(i, true)).collect();
        let new = plan(&service(&json!({"ports": ports})), &pods, None, None).expect("one");
        assert_eq!(shown(&new), "501/0:8000 499/0:8001");
    }
}
