//! Tables of kube-proxy's behaviour, a model of the kernel, and properties.
#![allow(clippy::unwrap_used)]

mod kernel;
mod properties;
mod tables;

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::{Value as Json, json};

use super::*;
use crate::network::Family;
use kernel::Kernel;

/// A service of the namespace `default` with the fields of its spec; the cluster address is 10.96.0.20 and the port 80, unless
/// `spec` has others.
fn service(name: &str, spec: Json) -> Service {
    let mut object = json!({
        "metadata": {"namespace": "default", "name": name, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {
            "type": "ClusterIP", "clusterIP": "10.96.0.20", "clusterIPs": ["10.96.0.20"],
            "ports": [{"name": "http", "port": 80, "protocol": "TCP"}],
        },
    });
    json_patch::merge(&mut object, &json!({"spec": spec}));
    serde_json::from_value(object).unwrap()
}

/// A service with fields next to its spec.
fn service_with(name: &str, spec: Json, other: Json) -> Service {
    let mut object = serde_json::to_value(service(name, spec)).unwrap();
    json_patch::merge(&mut object, &other);
    serde_json::from_value(object).unwrap()
}

/// A slice with the port `http` and 8080.
fn slice(name: &str, endpoints: Json) -> Arc<EndpointSlice> {
    slice_with(
        name,
        json!([{"name": "http", "port": 8080, "protocol": "TCP"}]),
        endpoints,
    )
}

fn slice_with(name: &str, ports: Json, endpoints: Json) -> Arc<EndpointSlice> {
    let first = endpoints[0]["addresses"][0].as_str().unwrap_or_default();
    let kind = if first.contains(':') { "IPv6" } else { "IPv4" };
    let object = json!({
        "metadata": {"name": name}, "addressType": kind, "ports": ports, "endpoints": endpoints,
    });
    Arc::new(serde_json::from_value(object).unwrap())
}

/// A ready endpoint on a node.
fn endpoint(address: &str, node: &str) -> Json {
    json!({"addresses": [address], "nodeName": node, "conditions": {"ready": true, "serving": true}})
}

fn node() -> NodeFacts {
    NodeFacts {
        name: "here".to_owned(),
        zone: Some("a".to_owned()),
        addresses: vec!["192.168.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
    }
}

fn planner() -> Planner {
    let mut planner = Planner::new(PlanSettings {
        families: Family::ALL.to_vec(),
        cluster_networks: vec!["10.244.0.0/16".parse().unwrap()],
        own_addresses: vec!["10.96.0.10".parse().unwrap()],
    });
    planner.set_node(node());
    planner
}

/// The kernel's tables after the changes of a planner.
type Tables = BTreeMap<Family, Kernel>;

#[derive(Debug, Default, PartialEq)]
struct Changes {
    operations: Vec<(Family, Operation)>,
    flows: Vec<StaleFlows>,
}

fn take_changes(planner: &mut Planner) -> Changes {
    let mut operations = vec![];
    let flows = planner.take_changes(|family, operation| operations.push((family, operation)));
    Changes { operations, flows }
}

fn apply(planner: &mut Planner, tables: &mut Tables) -> Changes {
    let changes = take_changes(planner);
    for family in Family::ALL {
        let of_family = changes.operations.iter().filter(|(of, _)| *of == family);
        let operations = of_family.map(|(_, operation)| operation.clone()).collect();
        tables.entry(family).or_default().apply(operations);
    }
    changes
}

/// The table of IPv4 with one service.
fn table_of(service: &Service, slices: &[Arc<EndpointSlice>]) -> Kernel {
    let mut planner = planner();
    planner.set_service("default", "web", Some(service), slices);
    let mut tables = Tables::new();
    apply(&mut planner, &mut tables);
    tables.remove(&Family::V4).unwrap()
}
