//! Changes of objects, and the services that they mark.

use super::*;
use holdfast_kubeapi::cache::Writer;
use serde_json::{Value, json};

struct World {
    caches: Caches,
    inbox: Arc<Inbox>,
    services: Writer<Packed<Service>>,
    slices: Writer<Packed<EndpointSlice>>,
    namespaces: Writer<Packed<Namespace>>,
    node: Writer<Node>,
}

fn world() -> World {
    let (node, nodes) = Cache::without_watch();
    let (services, all_services) = Cache::without_watch();
    let (slices, all_slices) = Cache::without_watch();
    let (namespaces, all_namespaces) = Cache::without_watch();
    let caches = Caches::over(nodes, all_services, all_slices, Some(all_namespaces), "n1");
    let inbox = Arc::<Inbox>::default();
    caches.observe(&inbox, &Arc::default());
    World {
        caches,
        inbox,
        services,
        slices,
        namespaces,
        node,
    }
}

fn service(name: &str, ip: &str) -> Packed<Service> {
    let object = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "d"}, "spec": {"clusterIP": ip}});
    serde_json::from_value(object).expect("a service")
}

fn slice(name: &str, service: &str, trigger: Option<&str>) -> Packed<EndpointSlice> {
    let annotations =
        json!({"endpoints.kubernetes.io/last-change-trigger-time": trigger.unwrap_or_default()});
    let object = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "endpoints": [],
        "metadata": {"name": name, "namespace": "d", "labels": {"kubernetes.io/service-name": service}, "annotations": annotations}});
    serde_json::from_value(object).expect("a slice")
}

fn node(fields: Value) -> Node {
    serde_json::from_value(fields).expect("a node")
}

fn key_of(name: &str) -> Key {
    ("d".into(), name.into())
}

#[test]
fn a_change_of_a_slice_marks_its_service() {
    let world = world();
    world.services.apply(service("web", "10.96.0.7"));
    assert_eq!(world.inbox.len(), 1);
    world.slices.apply(slice("web-1", "web", None));
    world.slices.apply(slice("web-2", "web", None));
    world.slices.apply(slice("lost", "", None));
    assert_eq!(world.inbox.len(), 1, "all changes are of one service");
    let (found, slices) = world.caches.service(&key_of("web"));
    assert!(found.is_some());
    assert_eq!(slices.len(), 2);
    // A slice moves to another service.
    world.slices.apply(slice("web-2", "other", None));
    assert_eq!(world.inbox.len(), 2);
    assert_eq!(world.caches.service(&key_of("web")).1.len(), 1);
    let (found, slices) = world.caches.service(&key_of("other"));
    assert!(found.is_none());
    assert_eq!(slices.len(), 1);
    world.services.delete(service("web", "10.96.0.7"));
    assert!(world.caches.service(&key_of("web")).0.is_none());
}

#[test]
fn namespaces_and_the_node_are_followed() {
    let world = world();
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "d"}});
    let namespace = || serde_json::from_value(namespace.clone()).expect("a namespace");
    assert!(!world.caches.has_namespace("d"));
    world.namespaces.apply(namespace());
    assert!(world.caches.has_namespace("d"));
    world.namespaces.delete(namespace());
    assert!(!world.caches.has_namespace("d"));

    assert_eq!(world.caches.node().name, "n1", "without a Node");
    world.node.apply(node(json!({"metadata": {"name": "n1", "labels": {ZONE: "z"}}, "status": {"addresses": [
        {"type": "ExternalIP", "address": "fd00::9"}, {"type": "ExternalIP", "address": "198.51.100.1"}, {"type": "InternalIP", "address": "192.0.2.1"},
        {"type": "InternalIP", "address": "192.0.2.2"}, {"type": "Hostname", "address": "n1"}, {"type": "ExternalIP", "address": "no"}]}})));
    let facts = world.caches.node();
    assert_eq!(facts.zone.as_deref(), Some("z"));
    let addresses: Vec<String> = facts.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["192.0.2.1", "fd00::9"]);
    assert_eq!(world.caches.eligibility(), Eligibility::Eligible);
    world.node.apply(node(json!({"metadata": {"name": "n1"}, "spec": {"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}})));
    assert_eq!(world.caches.eligibility(), Eligibility::Leaving);
}
