//! The endpoints that a service should have: which pods, with which addresses, ports, conditions and hints. Pure.
//!
//! The rules are those of `staging/src/k8s.io/endpointslice` (`utils.go`, `util/controller_utils.go`,
//! `trafficdist/trafficdist.go`).

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{ObjectReference, Pod, Service, ServicePort, ServiceSpec};
use k8s_openapi::api::discovery::v1::{
    Endpoint, EndpointConditions, EndpointHints, EndpointPort, ForNode, ForZone,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt as _;

use holdfast_core::pod;

/// The address types of slices.
pub(super) const IPV4: &str = "IPv4";
pub(super) const IPV6: &str = "IPv6";

/// Annotations of a service that request hints by zone in proportion to processors (KEP-2433). They exclude
/// `trafficDistribution`.
const TOPOLOGY_MODE: [&str; 2] = [
    "service.kubernetes.io/topology-aware-hints",
    "service.kubernetes.io/topology-mode",
];

/// Whether a pod can be an endpoint: it has an address, and its phase is not terminal.
pub(super) fn has_endpoint(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let has_address = status.is_some_and(|s| {
        s.pod_ip.as_deref().is_some_and(|ip| !ip.is_empty())
            || s.pod_ips.as_ref().is_some_and(|ips| !ips.is_empty())
    });
    has_address && !pod::is_terminal(pod)
}

/// The time of the last transition of the condition `Ready`, and whether it is true.
pub(super) fn readiness(pod: &Pod) -> Option<(bool, Option<jiff::Timestamp>)> {
    let conditions = pod.status.as_ref()?.conditions.as_deref()?;
    let ready = conditions.iter().find(|c| c.type_ == "Ready")?;
    let since = ready.last_transition_time.as_ref().map(|t| t.0);
    Some((ready.status == "True", since))
}

pub(super) fn is_ready(pod: &Pod) -> bool {
    readiness(pod).is_some_and(|(ready, _)| ready)
}

/// The addresses of a pod, each in its usual notation.
pub(super) fn addresses(pod: &Pod) -> Vec<IpAddr> {
    let status = pod.status.as_ref();
    let all = status
        .and_then(|s| s.pod_ips.as_deref())
        .unwrap_or_default();
    let all = all.iter().filter_map(|ip| ip.ip.parse().ok());
    all.collect()
}

/// The address type of an address.
pub(super) fn family_of(address: IpAddr) -> &'static str {
    match address {
        IpAddr::V4(_) => IPV4,
        IpAddr::V6(_) => IPV6,
    }
}

/// The address types of a service's slices.
pub(super) fn families(spec: &ServiceSpec) -> Vec<&'static str> {
    let set = spec.ip_families.as_deref().unwrap_or_default();
    let named: Vec<&str> = [IPV4, IPV6]
        .into_iter()
        .filter(|family| set.iter().any(|f| f == family))
        .collect();
    if !named.is_empty() {
        return named;
    }
    match spec.cluster_ip.as_deref().map(str::parse::<IpAddr>) {
        Some(Ok(address)) => vec![family_of(address)],
        _ => vec![IPV4, IPV6],
    }
}

/// Whether a service has no cluster IP.
pub(super) fn is_headless(spec: &ServiceSpec) -> bool {
    matches!(spec.cluster_ip.as_deref(), None | Some("" | "None"))
}

/// The selector of a service whose endpoints are its pods.
pub(super) fn selector(service: &Service) -> Option<&BTreeMap<String, String>> {
    let spec = service.spec.as_ref()?;
    let selector = spec.selector.as_ref().filter(|s| !s.is_empty())?;
    (spec.type_.as_deref() != Some("ExternalName")).then_some(selector)
}

/// Whether labels match the selector of a service.
pub(super) fn matches(
    selector: &BTreeMap<String, String>,
    labels: &BTreeMap<String, String>,
) -> bool {
    selector
        .iter()
        .all(|(key, value)| labels.get(key) == Some(value))
}

/// The number of a service port's target in a pod; `None` if no container port has the target's name and protocol.
/// Sidecars count, other init containers do not (`FindPort`).
pub(super) fn find_port(pod: &Pod, port: &ServicePort) -> Option<i32> {
    let name = match &port.target_port {
        None => return Some(port.port),
        Some(IntOrString::Int(number)) => return Some(*number),
        Some(IntOrString::String(name)) => name,
    };
    let spec = pod.spec.as_ref()?;
    let init = spec.init_containers.iter().flatten();
    let sidecars = init.filter(|c| c.restart_policy.as_deref() == Some("Always"));
    let protocol = |p: Option<&str>| p.filter(|p| !p.is_empty()).unwrap_or("TCP").to_owned();
    let wanted = protocol(port.protocol.as_deref());
    spec.containers
        .iter()
        .chain(sidecars)
        .flat_map(|container| container.ports.iter().flatten())
        .find(|p| p.name.as_ref() == Some(name) && protocol(p.protocol.as_deref()) == wanted)
        .map(|p| p.container_port)
}

/// The ports of a pod's endpoint, in a fixed order. Ports that the pod does not have are missing.
pub(super) fn endpoint_ports(spec: &ServiceSpec, pod: &Pod) -> Vec<EndpointPort> {
    let ports = spec.ports.iter().flatten().filter_map(|port| {
        Some(EndpointPort {
            name: Some(port.name.clone().unwrap_or_default()),
            port: Some(find_port(pod, port)?),
            protocol: Some(port.protocol.clone().unwrap_or_else(|| "TCP".into())),
            app_protocol: port.app_protocol.clone(),
        })
    });
    let mut ports: Vec<EndpointPort> = ports.collect();
    sort_ports(&mut ports);
    ports
}

/// The order and identity of a list of ports.
pub(super) type PortKey = Vec<(String, String, Option<i32>, Option<String>)>;

fn port_key(port: &EndpointPort) -> (String, String, Option<i32>, Option<String>) {
    (
        port.name.clone().unwrap_or_default(),
        port.protocol.clone().unwrap_or_default(),
        port.port,
        port.app_protocol.clone(),
    )
}

pub(super) fn sort_ports(ports: &mut [EndpointPort]) {
    ports.sort_by_cached_key(port_key);
}

/// The key of ports in any order.
pub(super) fn ports_key(ports: &[EndpointPort]) -> PortKey {
    let mut all: PortKey = ports.iter().map(port_key).collect();
    all.sort_unstable();
    all
}

/// The reference to a pod.
pub(super) fn target(pod: &Pod) -> ObjectReference {
    ObjectReference {
        kind: Some("Pod".into()),
        namespace: pod.namespace(),
        name: Some(pod.name_any()),
        uid: pod.uid(),
        ..ObjectReference::default()
    }
}

/// The host name of a pod's endpoint: only in the service that is the pod's subdomain.
pub(super) fn hostname(service: &Service, pod: &Pod) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let hostname = spec.hostname.clone().filter(|name| !name.is_empty())?;
    let is_here = spec.subdomain.as_deref() == Some(&service.name_any())
        && service.metadata.namespace == pod.metadata.namespace;
    is_here.then_some(hostname)
}

/// How a service prefers close endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Preference {
    None,
    Zone,
    Node,
}

/// Whether a service requests hints in proportion to processors.
pub(super) fn is_auto(service: &Service) -> bool {
    let annotated = TOPOLOGY_MODE
        .iter()
        .find_map(|key| service.annotations().get(*key));
    annotated.is_some_and(|mode| mode == "Auto" || mode == "auto")
}

pub(super) fn preference(service: &Service) -> Preference {
    if is_auto(service) {
        return Preference::None;
    }
    let spec = service.spec.as_ref();
    match spec.and_then(|s| s.traffic_distribution.as_deref()) {
        Some("PreferClose" | "PreferSameZone") => Preference::Zone,
        Some("PreferSameNode") => Preference::Node,
        _ => Preference::None,
    }
}

/// The hints of a ready endpoint.
fn hints(preference: Preference, zone: Option<&str>, node: Option<&str>) -> Option<EndpointHints> {
    if preference == Preference::None {
        return None;
    }
    let for_zones = zone.map(|zone| vec![ForZone { name: zone.into() }]);
    let node = node.filter(|_| preference == Preference::Node);
    let for_nodes = node.map(|node| vec![ForNode { name: node.into() }]);
    (for_zones.is_some() || for_nodes.is_some()).then_some(EndpointHints {
        for_nodes,
        for_zones,
    })
}

/// A pod's endpoint in a slice of one address type; `None` if the pod has no such address.
pub(super) fn endpoint(
    service: &Service,
    pod: &Pod,
    zone: Option<&str>,
    family: &str,
) -> Option<Endpoint> {
    let own = addresses(pod)
        .into_iter()
        .filter(|a| family_of(*a) == family);
    let addresses: Vec<String> = own.map(|a| a.to_string()).collect();
    if addresses.is_empty() {
        return None;
    }
    let spec = service.spec.as_ref();
    let publish = spec.and_then(|s| s.publish_not_ready_addresses) == Some(true);
    let serving = is_ready(pod);
    let terminating = pod.metadata.deletion_timestamp.is_some();
    let ready = publish || serving && !terminating;
    let node = pod.spec.as_ref().and_then(|s| s.node_name.clone());
    let node = node.filter(|name| !name.is_empty());
    let zone = zone.filter(|zone| !zone.is_empty());
    let preference = if ready {
        preference(service)
    } else {
        Preference::None
    };
    Some(Endpoint {
        addresses,
        conditions: Some(EndpointConditions {
            ready: Some(ready),
            serving: Some(serving),
            terminating: Some(terminating),
        }),
        hints: hints(preference, zone, node.as_deref()),
        hostname: hostname(service, pod),
        node_name: node,
        target_ref: Some(target(pod)),
        zone: zone.map(str::to_owned),
        ..Endpoint::default()
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parsed<T: serde::de::DeserializeOwned>(object: Value) -> T {
        serde_json::from_value(object).expect("an object")
    }

    fn pod(ips: &[&str], more: Value) -> Pod {
        let ips: Vec<Value> = ips.iter().map(|ip| json!({"ip": ip})).collect();
        let mut pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"nodeName": "n1", "hostname": "h", "subdomain": "s", "containers": [
                {"name": "c", "ports": [{"name": "web", "containerPort": 8080, "protocol": "TCP"}]}],
                "initContainers": [
                    {"name": "i", "ports": [{"name": "setup", "containerPort": 1}]},
                    {"name": "side", "restartPolicy": "Always", "ports": [{"name": "metrics", "containerPort": 9100}]}]},
            "status": {"podIP": "x", "podIPs": ips, "conditions": [{"type": "Ready", "status": "True"}]}});
        json_patch::merge(&mut pod, &more);
        parsed(pod)
    }

    fn service(spec: Value) -> Service {
        let mut all = json!({"metadata": {"name": "s", "namespace": "n"}, "spec": {"clusterIP": "10.96.0.9", "selector": {"a": "b"}}});
        json_patch::merge(&mut all["spec"], &spec);
        parsed(all)
    }

    #[test]
    fn conditions_follow_readiness_and_termination() {
        let deleted = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
        let unready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
        let mut both = deleted.clone();
        json_patch::merge(&mut both, &unready);
        for (publish, more, expected) in [
            (false, json!({}), (true, true, false)),
            (false, unready.clone(), (false, false, false)),
            (false, deleted.clone(), (false, true, true)),
            (false, both.clone(), (false, false, true)),
            (true, unready, (true, false, false)),
            (true, deleted, (true, true, true)),
            (true, both, (true, false, true)),
        ] {
            let service = service(json!({"publishNotReadyAddresses": publish}));
            let pod = pod(&["10.0.0.1"], more);
            let endpoint = endpoint(&service, &pod, None, IPV4).expect("an endpoint");
            let is = endpoint.conditions.expect("conditions");
            let is = (is.ready, is.serving, is.terminating);
            let expected = (Some(expected.0), Some(expected.1), Some(expected.2));
            assert_eq!(is, expected, "{publish} {pod:?}");
        }
    }

    #[test]
    fn an_endpoint_has_the_addresses_of_one_family() {
        let both = pod(&["10.0.0.1", "fd00::0:1"], json!({}));
        let service = service(json!({}));
        let of = |pod, family| endpoint(&service, pod, Some("z"), family).map(|e| e.addresses);
        assert_eq!(of(&both, IPV4), Some(vec!["10.0.0.1".into()]));
        assert_eq!(of(&both, IPV6), Some(vec!["fd00::1".into()]));
        assert_eq!(of(&pod(&["10.0.0.1"], json!({})), IPV6), None);
        let one = endpoint(&service, &both, Some("z"), IPV4).expect("an endpoint");
        assert_eq!(one.hostname.as_deref(), Some("h"));
        assert_eq!(one.node_name.as_deref(), Some("n1"));
        assert_eq!(one.zone.as_deref(), Some("z"));
        assert_eq!(one.target_ref, Some(target(&both)));
        let other = pod(&["10.0.0.1"], json!({"spec": {"subdomain": "other"}}));
        assert_eq!(
            endpoint(&service, &other, None, IPV4)
                .expect("one")
                .hostname,
            None
        );
    }

    #[test]
    fn the_families_are_those_of_the_service() {
        for (spec, expected) in [
            (json!({"ipFamilies": ["IPv6"]}), vec![IPV6]),
            (json!({"ipFamilies": ["IPv6", "IPv4"]}), vec![IPV4, IPV6]),
            (json!({}), vec![IPV4]),
            (json!({"clusterIP": "fd00::9"}), vec![IPV6]),
            (json!({"clusterIP": "None"}), vec![IPV4, IPV6]),
        ] {
            let service = service(spec);
            assert_eq!(families(&service.spec.expect("a spec")), expected);
        }
    }

    #[test]
    fn named_ports_resolve_in_each_pod() {
        let port = |target: Value| -> ServicePort {
            parsed(json!({"port": 80, "protocol": "TCP", "targetPort": target}))
        };
        let pod = pod(&["10.0.0.1"], json!({}));
        for (target, expected) in [
            (json!(81), Some(81)),
            (json!("web"), Some(8080)),
            (json!("metrics"), Some(9100)),
            (json!("setup"), None),
            (json!("nosuch"), None),
        ] {
            assert_eq!(find_port(&pod, &port(target.clone())), expected, "{target}");
        }
        let mut udp = port(json!("web"));
        udp.protocol = Some("UDP".into());
        assert_eq!(find_port(&pod, &udp), None);
    }

    #[test]
    fn hints_follow_the_traffic_distribution() {
        let of = |distribution: &str, annotation: &str, more: Value| {
            let mut service = service(json!({"trafficDistribution": distribution}));
            service
                .annotations_mut()
                .insert(TOPOLOGY_MODE[1].into(), annotation.into());
            let pod = pod(&["10.0.0.1"], more);
            let hints = endpoint(&service, &pod, Some("z"), IPV4)
                .expect("one")
                .hints;
            hints.map_or("none".to_owned(), |h| {
                let zones = h.for_zones.iter().flatten().map(|z| z.name.as_str());
                let nodes = h.for_nodes.iter().flatten().map(|n| n.name.as_str());
                zones.chain(nodes).collect::<Vec<_>>().join(" ")
            })
        };
        let unready = json!({"status": {"conditions": []}});
        assert_eq!(of("PreferClose", "", json!({})), "z");
        assert_eq!(of("PreferSameZone", "", json!({})), "z");
        assert_eq!(of("PreferSameNode", "", json!({})), "z n1");
        assert_eq!(of("PreferSameNode", "", unready), "none");
        assert_eq!(of("PreferClose", "Auto", json!({})), "none");
        assert_eq!(of("", "", json!({})), "none");
    }

    #[test]
    fn ended_pods_and_pods_without_an_address_are_no_endpoints() {
        let ended = |phase: &str| json!({"status": {"phase": phase}});
        assert!(has_endpoint(&pod(&["10.0.0.1"], json!({}))));
        assert!(has_endpoint(&pod(&["10.0.0.1"], ended("Running"))));
        assert!(!has_endpoint(&pod(&["10.0.0.1"], ended("Failed"))));
        assert!(!has_endpoint(&pod(&["10.0.0.1"], ended("Succeeded"))));
        assert!(!has_endpoint(&pod(&[], json!({"status": {"podIP": null}}))));
    }
}
