//! Slices for Endpoints objects that users make for services without a selector
//! (`pkg/controller/endpointslicemirroring/reconciler.go`). Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{EndpointAddress, EndpointSubset, Endpoints, Service};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;

use super::desired::{PortKey, family_of, ports_key, sort_ports};
use super::legacy;
use super::slices::{Changes, HEADLESS, MANAGED_BY, SERVICE_NAME, TRIGGER_TIME, name_prefix};
use crate::controllers::owned::owner;

/// The name of this controller in [`MANAGED_BY`].
pub(super) const CONTROLLER: &str = "endpointslicemirroring-controller.k8s.io";
/// The label of Endpoints that are not mirrored.
const SKIP: &str = "endpointslice.kubernetes.io/skip-mirror";
/// The annotation of Endpoints that are a lock of a leader election.
pub(super) const LEADER: &str = "control-plane.alpha.kubernetes.io/leader";
/// The annotation of `kubectl apply`.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Maximum number of addresses that are mirrored of a subset (upstream's `--mirroring-max-endpoints-per-subset`).
const MAX_ADDRESSES: usize = 1000;

/// Whether an Endpoints object is mirrored if its service has no selector.
pub(super) fn is_mirrored(endpoints: &Endpoints) -> bool {
    endpoints.labels().get(SKIP).map(String::as_str) != Some("true")
        && !endpoints.annotations().contains_key(LEADER)
}

/// Whether the endpoints of a service are made by users.
pub(super) fn is_custom(service: &Service) -> bool {
    let selector = service.spec.as_ref().and_then(|s| s.selector.as_ref());
    selector.is_none_or(BTreeMap::is_empty)
}

/// The endpoints of one address type and one list of ports, by address.
#[derive(Default)]
struct Group {
    ports: Vec<EndpointPort>,
    endpoints: BTreeMap<String, Endpoint>,
}

fn ports_of(subset: &EndpointSubset) -> Vec<EndpointPort> {
    let ports = subset.ports.iter().flatten().map(|port| EndpointPort {
        name: Some(port.name.clone().unwrap_or_default()),
        port: Some(port.port),
        protocol: Some(port.protocol.clone().unwrap_or_else(|| "TCP".into())),
        app_protocol: port.app_protocol.clone(),
    });
    let mut ports: Vec<EndpointPort> = ports.collect();
    sort_ports(&mut ports);
    ports
}

fn endpoint(address: &EndpointAddress, ip: IpAddr, ready: bool) -> Endpoint {
    Endpoint {
        addresses: vec![ip.to_string()],
        conditions: Some(EndpointConditions {
            ready: Some(ready),
            ..EndpointConditions::default()
        }),
        hostname: address.hostname.clone().filter(|name| !name.is_empty()),
        node_name: address.node_name.clone(),
        target_ref: address.target_ref.clone(),
        ..Endpoint::default()
    }
}

fn groups(endpoints: &Endpoints) -> BTreeMap<(&'static str, PortKey), Group> {
    let mut groups: BTreeMap<(&str, PortKey), Group> = BTreeMap::new();
    for subset in endpoints.subsets.iter().flatten() {
        let ports = ports_of(subset);
        let key = ports_key(&ports);
        let ready = subset.addresses.iter().flatten().map(|a| (a, true));
        let unready = subset.not_ready_addresses.iter().flatten();
        let all = ready.chain(unready.map(|a| (a, false)));
        for (address, ready) in all.take(MAX_ADDRESSES) {
            let Ok(ip) = address.ip.parse::<IpAddr>() else {
                continue;
            };
            let group = groups.entry((family_of(ip), key.clone())).or_default();
            group.ports.clone_from(&ports);
            let endpoint = endpoint(address, ip, ready);
            group.endpoints.entry(ip.to_string()).or_insert(endpoint);
        }
    }
    groups
}

/// Metadata of a mirrored slice: labels and annotations of the Endpoints object.
fn metadata(endpoints: &Endpoints) -> ObjectMeta {
    let mut labels = endpoints.labels().clone();
    for key in [legacy::MANAGED_BY, HEADLESS] {
        labels.remove(key);
    }
    labels.insert(SERVICE_NAME.into(), endpoints.name_any());
    labels.insert(MANAGED_BY.into(), CONTROLLER.into());
    let mut annotations = endpoints.annotations().clone();
    for key in [TRIGGER_TIME, LAST_APPLIED] {
        annotations.remove(key);
    }
    ObjectMeta {
        generate_name: Some(name_prefix(&endpoints.name_any())),
        namespace: endpoints.namespace(),
        labels: Some(labels),
        annotations: Some(annotations).filter(|all| !all.is_empty()),
        owner_references: Some(vec![owner(endpoints)]),
        ..ObjectMeta::default()
    }
}

/// Decides the writes for an Endpoints object that is mirrored: one slice for each address type and list of ports.
pub(super) fn plan(endpoints: &Endpoints, existing: &[Arc<EndpointSlice>]) -> Changes {
    let mut changes = Changes::default();
    let mut by_group: BTreeMap<(&str, PortKey), Vec<&Arc<EndpointSlice>>> = BTreeMap::new();
    for slice in existing {
        let ports = ports_key(slice.ports.as_deref().unwrap_or_default());
        let group = by_group.entry((slice.address_type.as_str(), ports));
        group.or_default().push(slice);
    }
    let metadata = metadata(endpoints);
    for ((family, ports), group) in groups(endpoints) {
        let mut there = by_group
            .remove(&(family, ports))
            .unwrap_or_default()
            .into_iter();
        let mut new = EndpointSlice {
            address_type: family.into(),
            endpoints: Some(group.endpoints.into_values().collect()),
            metadata: metadata.clone(),
            ports: Some(group.ports),
        };
        match there.next() {
            None => changes.create.push(new),
            Some(old) => {
                let of = |m: &ObjectMeta| {
                    let annotations = m.annotations.clone().unwrap_or_default();
                    (m.labels.clone(), annotations, m.owner_references.clone())
                };
                if old.endpoints != new.endpoints || of(&old.metadata) != of(&new.metadata) {
                    new.metadata = old.metadata.clone();
                    new.metadata.labels.clone_from(&metadata.labels);
                    new.metadata.annotations.clone_from(&metadata.annotations);
                    new.metadata
                        .owner_references
                        .clone_from(&metadata.owner_references);
                    changes.update.push(new);
                }
            }
        }
        changes.delete.extend(there.map(Arc::clone));
    }
    let left = by_group.into_values().flatten();
    changes.delete.extend(left.map(Arc::clone));
    if endpoints.metadata.deletion_timestamp.is_some() {
        changes.create.clear();
    }
    changes
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn endpoints(subsets: Value) -> Endpoints {
        serde_json::from_value(json!({"metadata": {"name": "s", "namespace": "n", "uid": "eu",
            "labels": {"a": "b"}, "annotations": {"c": "d", TRIGGER_TIME: "x", LAST_APPLIED: "{}"}}, "subsets": subsets}))
        .expect("endpoints")
    }

    fn stored(changes: Changes) -> Vec<Arc<EndpointSlice>> {
        let named = |(i, mut slice): (usize, EndpointSlice)| {
            slice.metadata.name = Some(format!("s-{i}"));
            Arc::new(slice)
        };
        changes.create.into_iter().enumerate().map(named).collect()
    }

    fn counts(changes: &Changes) -> (usize, usize, usize) {
        (
            changes.create.len(),
            changes.update.len(),
            changes.delete.len(),
        )
    }

    #[test]
    fn each_family_and_list_of_ports_is_one_slice() {
        let port = |n: i32| json!([{"name": "p", "port": n, "protocol": "TCP"}]);
        let ip = |ip: &str| json!({"ip": ip});
        let cases = [
            (json!([]), (0, 0, 0)),
            (
                json!([{"addresses": [ip("10.0.0.1"), ip("10.0.0.2")], "ports": port(1)}]),
                (1, 0, 0),
            ),
            (
                json!([{"addresses": [ip("10.0.0.1"), ip("fd00::1")], "ports": port(1)}]),
                (2, 0, 0),
            ),
            (
                json!([{"addresses": [ip("10.0.0.1")], "ports": port(1)}, {"notReadyAddresses": [ip("10.0.0.2")], "ports": port(2)}]),
                (2, 0, 0),
            ),
            (
                json!([{"addresses": [ip("nonsense")], "ports": port(1)}]),
                (0, 0, 0),
            ),
        ];
        for (subsets, expected) in cases {
            let object = endpoints(subsets);
            let first = plan(&object, &[]);
            assert_eq!(counts(&first), expected, "{object:?}");
            let there = stored(first);
            assert_eq!(counts(&plan(&object, &there)), (0, 0, 0), "{object:?}");
        }
    }

    #[test]
    fn slices_follow_their_endpoints() {
        let one = json!({"addresses": [{"ip": "10.0.0.1", "hostname": "h", "nodeName": "n1"}], "notReadyAddresses": [{"ip": "10.0.0.2"}]});
        let object = endpoints(json!([one]));
        let there = stored(plan(&object, &[]));
        let slice = &there[0];
        let labels = json!({"a": "b", SERVICE_NAME: "s", MANAGED_BY: CONTROLLER});
        assert_eq!(json!(slice.metadata.labels), labels);
        assert_eq!(json!(slice.metadata.annotations), json!({"c": "d"}));
        let owner = &slice.metadata.owner_references.as_ref().expect("owners")[0];
        assert_eq!(
            (owner.kind.as_str(), owner.uid.as_str()),
            ("Endpoints", "eu")
        );
        let ready = |e: &Endpoint| e.conditions.as_ref().and_then(|c| c.ready);
        let all = slice.endpoints.as_ref().expect("endpoints");
        let ready: Vec<_> = all.iter().map(ready).collect();
        assert_eq!(ready, [Some(true), Some(false)]);
        assert_eq!(all[0].hostname.as_deref(), Some("h"));
        let changed = endpoints(json!([{"addresses": [{"ip": "10.0.0.3"}]}]));
        assert_eq!(counts(&plan(&changed, &there)), (0, 1, 0));
        let mut labelled = object.clone();
        labelled.labels_mut().insert("e".into(), "f".into());
        assert_eq!(counts(&plan(&labelled, &there)), (0, 1, 0));
        assert_eq!(counts(&plan(&endpoints(json!([])), &there)), (0, 0, 1));
    }

    #[test]
    fn at_most_1000_addresses_of_a_subset_are_mirrored() {
        let ips = |n: usize| -> Vec<Value> {
            (0..n)
                .map(|i| json!({"ip": format!("10.0.{}.{}", i / 250, i % 250)}))
                .collect()
        };
        let object = endpoints(json!([{"addresses": ips(1500)}]));
        let changes = plan(&object, &[]);
        let size = changes.create[0].endpoints.as_ref().map(Vec::len);
        assert_eq!(size, Some(1000));
    }

    #[test]
    fn labels_annotations_and_selectors_exclude_objects() {
        let mut object = endpoints(json!([]));
        assert!(is_mirrored(&object));
        object.labels_mut().insert(SKIP.into(), "true".into());
        assert!(!is_mirrored(&object));
        let mut lock = endpoints(json!([]));
        lock.annotations_mut().insert(LEADER.into(), "{}".into());
        assert!(!is_mirrored(&lock));
        let service = |spec: Value| -> Service {
            serde_json::from_value(json!({"metadata": {"name": "s"}, "spec": spec})).expect("one")
        };
        assert!(is_custom(&service(json!({}))));
        assert!(is_custom(&service(json!({"selector": {}}))));
        assert!(!is_custom(&service(json!({"selector": {"a": "b"}}))));
    }
}
