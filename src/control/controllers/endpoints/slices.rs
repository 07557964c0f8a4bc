//! The slices of a service: which to create, update and delete so that they hold the desired endpoints with few writes. Pure.
//!
//! The rules are those of `staging/src/k8s.io/endpointslice/reconciler.go`: an endpoint stays in its slice, slices that change
//! anyway are filled first, then the fullest slice with room for the rest, and only then a new slice is created.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;

use super::desired::{self, PortKey, endpoint, endpoint_ports, families, ports_key};
use super::topology::{self, Capacities};
use crate::controllers::owned::owner;

/// The label with the name of a slice's service.
pub(super) const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// The label with the name of the controller that writes a slice.
pub(super) const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
/// The name of this controller in [`MANAGED_BY`].
pub(super) const CONTROLLER: &str = "endpointslice-controller.k8s.io";
/// The label of slices and Endpoints of services without a cluster IP.
pub(super) const HEADLESS: &str = "service.kubernetes.io/headless";
/// The annotation with the time of the change that led to the last write.
pub(super) const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// Maximum number of endpoints in a slice (upstream's `--max-endpoints-per-slice`).
const MAX_ENDPOINTS: usize = 100;

/// The writes that lead to the desired slices.
#[derive(Debug, Default)]
pub(super) struct Changes {
    pub(super) create: Vec<EndpointSlice>,
    pub(super) update: Vec<EndpointSlice>,
    pub(super) delete: Vec<Arc<EndpointSlice>>,
}

/// The endpoints of one list of ports and one address type.
#[derive(Default)]
struct Group {
    ports: Vec<EndpointPort>,
    endpoints: Vec<Endpoint>,
}

/// Identifies an endpoint: addresses, host name and pod.
type EndpointKey = (Vec<String>, Option<String>, Option<String>);

fn key(endpoint: &Endpoint) -> EndpointKey {
    let pod = endpoint.target_ref.as_ref().and_then(|t| t.name.clone());
    (endpoint.addresses.clone(), endpoint.hostname.clone(), pod)
}

fn endpoints(slice: &EndpointSlice) -> &[Endpoint] {
    slice.endpoints.as_deref().unwrap_or_default()
}

/// The labels of a service's slices: those of the service, and the reserved ones.
fn labels(service: &Service) -> BTreeMap<String, String> {
    let mut labels = service.labels().clone();
    labels.remove(HEADLESS);
    if service.spec.as_ref().is_some_and(desired::is_headless) {
        labels.insert(HEADLESS.into(), String::new());
    }
    labels.insert(SERVICE_NAME.into(), service.name_any());
    labels.insert(MANAGED_BY.into(), CONTROLLER.into());
    labels
}

/// The beginning of generated names: with a hyphen if the name stays valid.
pub(super) fn name_prefix(name: &str) -> String {
    if name.len() < 253 {
        format!("{name}-")
    } else {
        name.into()
    }
}

fn new_slice(service: &Service, family: &str, ports: Vec<EndpointPort>) -> EndpointSlice {
    EndpointSlice {
        address_type: family.into(),
        endpoints: Some(vec![]),
        metadata: ObjectMeta {
            generate_name: Some(name_prefix(&service.name_any())),
            namespace: service.namespace(),
            labels: Some(labels(service)),
            owner_references: Some(vec![owner(service)]),
            ..ObjectMeta::default()
        },
        ports: Some(ports),
    }
}

/// Whether a slice belongs to this service and not to a deleted one of the same name.
fn is_owned(slice: &EndpointSlice, service: &Service) -> bool {
    let mut owners = slice.metadata.owner_references.iter().flatten();
    owners.any(|o| o.kind == "Service" && Some(&o.uid) == service.metadata.uid.as_ref())
}

/// Decides the writes for a service. `pods` are the pods that match its selector. `zone_of` returns the zone of a node that
/// exists. A pod on a missing node has no endpoint, unless the service publishes unready addresses. `capacities` are those of the
/// zones if the service requests hints in proportion to them. `trigger` is the value of [`TRIGGER_TIME`].
pub(super) fn plan(
    service: &Service,
    pods: &[Arc<Pod>],
    existing: &[Arc<EndpointSlice>],
    zone_of: impl Fn(&str) -> Option<Option<String>>,
    capacities: Option<&Capacities>,
    trigger: Option<jiff::Timestamp>,
) -> Changes {
    let mut changes = Changes::default();
    let Some(spec) = &service.spec else {
        return changes;
    };
    let families = families(spec);
    let is_used = |slice: &&Arc<EndpointSlice>| families.contains(&slice.address_type.as_str());
    changes.delete = existing.iter().filter(|s| !is_used(s)).cloned().collect();
    let publish = spec.publish_not_ready_addresses == Some(true);
    let mut zones: BTreeMap<&str, Option<Option<String>>> = BTreeMap::new();
    let pods: Vec<(&Pod, Option<String>)> = pods
        .iter()
        .filter(|pod| desired::has_endpoint(pod))
        .filter_map(|pod| {
            let node = pod.spec.as_ref().and_then(|s| s.node_name.as_deref());
            let node = node.unwrap_or_default();
            let zone = zones.entry(node).or_insert_with(|| zone_of(node));
            (publish || zone.is_some()).then(|| (&**pod, zone.clone().flatten()))
        })
        .collect();
    for family in families {
        let mut groups: BTreeMap<PortKey, Group> = BTreeMap::new();
        for (pod, zone) in &pods {
            let ports = endpoint_ports(spec, pod);
            let group = groups.entry(ports_key(&ports)).or_default();
            group.ports = ports;
            let endpoint = endpoint(service, pod, zone.as_deref(), family);
            group.endpoints.extend(endpoint);
        }
        if let Some(capacities) = capacities {
            let all = groups.values_mut().flat_map(|g| &mut g.endpoints);
            topology::set_hints(all.collect(), capacities);
        }
        let existing = existing.iter().filter(|s| s.address_type == family);
        of_family(service, family, groups, existing, &mut changes);
    }
    finish(service, trigger, &mut changes);
    changes
}

/// Decides the writes to the slices of one address type.
fn of_family<'a>(
    service: &Service,
    family: &str,
    mut groups: BTreeMap<PortKey, Group>,
    existing: impl Iterator<Item = &'a Arc<EndpointSlice>>,
    changes: &mut Changes,
) {
    let (mut create, mut delete) = (vec![], vec![]);
    let mut by_ports: BTreeMap<PortKey, Vec<&Arc<EndpointSlice>>> = BTreeMap::new();
    let mut count = 0;
    for slice in existing {
        count += 1;
        if is_owned(slice, service) {
            let ports = ports_key(slice.ports.as_deref().unwrap_or_default());
            by_ports.entry(ports).or_default().push(slice);
        } else {
            delete.push(Arc::clone(slice));
        }
    }
    for (ports, slices) in &by_ports {
        match groups.remove(ports) {
            Some(group) => {
                let new = || new_slice(service, family, group.ports.clone());
                let packed = pack(slices, group.endpoints, &labels(service), new);
                create.extend(packed.create);
                changes.update.extend(packed.update);
                delete.extend(packed.delete);
            }
            None => delete.extend(slices.iter().map(|s| Arc::clone(s))),
        }
    }
    for group in groups.into_values() {
        let new = || new_slice(service, family, group.ports.clone());
        create.extend(pack(&[], group.endpoints, &BTreeMap::new(), new).create);
    }
    // A service without endpoints has one empty slice, which distinguishes it from a service that is not served.
    if count == delete.len() && create.is_empty() {
        let placeholder = new_slice(service, family, vec![]);
        match &delete[..] {
            [only] if is_same(only, &placeholder) && is_owned(only, service) => delete.clear(),
            _ => create.push(placeholder),
        }
    }
    changes.create.extend(create);
    changes.delete.extend(delete);
}

/// Whether both have the same content and labels.
fn is_same(a: &EndpointSlice, b: &EndpointSlice) -> bool {
    let ports = |slice: &EndpointSlice| ports_key(slice.ports.as_deref().unwrap_or_default());
    endpoints(a) == endpoints(b) && ports(a) == ports(b) && a.metadata.labels == b.metadata.labels
}

/// Distributes endpoints with the same ports over slices.
fn pack(
    existing: &[&Arc<EndpointSlice>],
    endpoints_wanted: Vec<Endpoint>,
    labels: &BTreeMap<String, String>,
    new: impl Fn() -> EndpointSlice,
) -> Changes {
    let mut changes = Changes::default();
    let wanted = endpoints_wanted.into_iter().map(|e| (key(&e), e));
    let mut wanted: BTreeMap<EndpointKey, Endpoint> = wanted.collect();
    let mut unchanged: Vec<&Arc<EndpointSlice>> = vec![];
    for slice in existing {
        let (mut kept, mut is_changed) = (vec![], false);
        for endpoint in endpoints(slice) {
            match wanted.remove(&key(endpoint)) {
                Some(now) => {
                    is_changed |= now != *endpoint;
                    kept.push(now);
                }
                None => is_changed = true,
            }
        }
        if is_changed && kept.is_empty() {
            changes.delete.push(Arc::clone(slice));
        } else if is_changed || slice.metadata.labels.as_ref() != Some(labels) {
            let mut updated = EndpointSlice::clone(slice);
            updated.endpoints = Some(kept);
            updated.metadata.labels = Some(labels.clone());
            changes.update.push(updated);
        } else {
            unchanged.push(slice);
        }
    }
    changes
        .update
        .sort_by_key(|slice| Reverse(endpoints(slice).len()));
    for slice in &mut changes.update {
        fill(slice, &mut wanted);
    }
    while !wanted.is_empty() {
        let room = |slice: &Arc<EndpointSlice>| {
            endpoints(slice).len().saturating_add(wanted.len()) <= MAX_ENDPOINTS
        };
        let fullest = (0..unchanged.len())
            .filter(|i| room(unchanged[*i]))
            .max_by_key(|i| endpoints(unchanged[*i]).len());
        let mut slice = match fullest {
            Some(i) => EndpointSlice::clone(unchanged.remove(i)),
            None => new(),
        };
        fill(&mut slice, &mut wanted);
        match fullest {
            Some(_) => changes.update.push(slice),
            None => changes.create.push(slice),
        }
    }
    changes
}

/// Moves endpoints into a slice until it is full.
fn fill(slice: &mut EndpointSlice, wanted: &mut BTreeMap<EndpointKey, Endpoint>) {
    let here = slice.endpoints.get_or_insert_default();
    while here.len() < MAX_ENDPOINTS
        && let Some((_, endpoint)) = wanted.pop_first()
    {
        here.push(endpoint);
    }
}

/// Replaces pairs of a creation and a deletion by an update, and sets the trigger time.
fn finish(service: &Service, trigger: Option<jiff::Timestamp>, changes: &mut Changes) {
    for deleted in std::mem::take(&mut changes.delete) {
        let last = changes.create.last();
        let fits = last.is_some_and(|new| new.address_type == deleted.address_type);
        match changes
            .create
            .pop_if(|_| fits && is_owned(&deleted, service))
        {
            Some(new) => {
                let mut reused = EndpointSlice::clone(&deleted);
                reused.metadata.labels = new.metadata.labels;
                (reused.endpoints, reused.ports) = (new.endpoints, new.ports);
                changes.update.push(reused);
            }
            None => changes.delete.push(deleted),
        }
    }
    if service.metadata.deletion_timestamp.is_some() {
        changes.create.clear();
    }
    for slice in changes.create.iter_mut().chain(&mut changes.update) {
        set_trigger(&mut slice.metadata, trigger);
    }
}

/// Sets or removes the annotation [`TRIGGER_TIME`].
pub(super) fn set_trigger(metadata: &mut ObjectMeta, trigger: Option<jiff::Timestamp>) {
    match trigger {
        Some(time) => {
            let annotations = metadata.annotations.get_or_insert_default();
            annotations.insert(TRIGGER_TIME.into(), time.to_string());
        }
        None => {
            if let Some(annotations) = &mut metadata.annotations {
                annotations.remove(TRIGGER_TIME);
            }
        }
    }
}

#[cfg(test)]
mod tests;
