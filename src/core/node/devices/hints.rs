//! NUMA hints for the devices of a container or pod, to align them with other resources
//! (`pkg/kubelet/cm/devicemanager/topology_hints.go`).

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, Pod};

use super::super::admit::Refusal;
use super::super::hints::{Count, Hint, Hints, NodeMask, Provider, Subject, max_concurrent};
use super::{Devices, Resource, Slot, wanted};
use crate::pod::{self, Role};

/// The devices as a hint provider.
pub(crate) struct NearNodes<'a> {
    /// The devices.
    pub devices: &'a mut Devices,
    /// The machine's NUMA nodes. All subsets of nodes with devices are tried, so the caller must limit their number.
    pub nodes: &'a BTreeSet<i64>,
}

impl Provider for NearNodes<'_> {
    fn hints(&self, subject: Subject<'_>) -> Hints {
        match subject {
            Subject::Container(pod, container) => {
                self.devices.container_hints(pod, container, self.nodes)
            }
            Subject::Pod(pod) => self.devices.pod_hints(pod, self.nodes),
        }
    }

    fn allocate(
        &mut self,
        pod: &Pod,
        _role: Role,
        container: &Container,
        affinity: Hint,
        _counts: &mut Vec<Count>,
    ) -> Result<(), Refusal> {
        let nodes = affinity.nodes.map(|mask| {
            let nodes = mask.nodes().into_iter().map(i64::from);
            nodes.collect::<BTreeSet<i64>>()
        });
        let reserved = self
            .devices
            .reserve_container(pod, container, nodes.as_ref());
        reserved.map_err(|error| error.refusal())
    }
}

impl Devices {
    /// Hints by resource. An empty list means that the devices cannot be allocated; a missing resource has no NUMA
    /// preference.
    fn container_hints(&self, pod: &Pod, container: &Container, nodes: &BTreeSet<i64>) -> Hints {
        let mut hints = Hints::new();
        for (resource, requested) in wanted(pod, container) {
            let slot = Slot {
                container: container.name.clone(),
                resource: resource.clone(),
            };
            let (available, reusable) = match self.allocation(pod::uid(pod), &slot) {
                Some(own) => (own.devices.keys().cloned().collect(), BTreeSet::new()),
                None => (self.free(resource), self.reusable(pod, resource)),
            };
            self.add_hints(
                &mut hints,
                nodes,
                resource,
                (&available, &reusable),
                requested,
            );
        }
        hints
    }

    /// Hints for all devices that the pod's containers use at the same time.
    fn pod_hints(&self, pod: &Pod, nodes: &BTreeSet<i64>) -> Hints {
        let of = |container: &Container| -> BTreeMap<String, u64> {
            let amounts = wanted(pod, container);
            let amount = |(name, number): (&String, usize)| {
                (name.clone(), u64::try_from(number).unwrap_or(u64::MAX))
            };
            amounts.map(amount).collect()
        };
        let mut hints = Hints::new();
        for (resource, requested) in max_concurrent(pod, of) {
            let requested = usize::try_from(requested).unwrap_or(usize::MAX);
            let containers = self.pods.get(pod::uid(pod)).into_iter().flatten();
            let own = containers.filter_map(|(_, allocations)| allocations.get(&resource));
            let own: BTreeSet<String> = own.flat_map(|a| a.devices.keys().cloned()).collect();
            let available = match own.len() {
                0 => self.free(&resource),
                count if count == requested => own,
                _ => BTreeSet::new(),
            };
            let sets = (&available, &BTreeSet::new());
            self.add_hints(&mut hints, nodes, &resource, sets, requested);
        }
        hints
    }

    /// Adds the hints of a resource, given its available devices and those reusable from init containers.
    fn add_hints(
        &self,
        hints: &mut Hints,
        nodes: &BTreeSet<i64>,
        resource: &str,
        (available, reusable): (&BTreeSet<String>, &BTreeSet<String>),
        requested: usize,
    ) {
        let Some(known) = self.resources.get(resource) else {
            return;
        };
        if known.devices.values().all(|device| device.numa.is_empty()) {
            return;
        }
        let found = match available.union(reusable).count() >= requested {
            true => combinations(known, nodes, available, reusable, requested),
            false => vec![],
        };
        hints.insert(resource.to_owned(), found);
    }
}

fn combinations(
    known: &Resource,
    nodes: &BTreeSet<i64>,
    available: &BTreeSet<String>,
    reusable: &BTreeSet<String>,
    requested: usize,
) -> Vec<Hint> {
    let with_devices: BTreeSet<i64> = known
        .devices
        .values()
        .flat_map(|d| &d.numa)
        .copied()
        .collect();
    let with_devices: Vec<i64> = with_devices.intersection(nodes).copied().collect();
    let near = |set: &BTreeSet<i64>, id: &String| {
        let device = known.devices.get(id);
        device.is_some_and(|d| !d.numa.is_disjoint(set))
    };
    let has_node = |id: &&String| known.devices.get(*id).is_some_and(|d| !d.numa.is_empty());
    let mut fewest = with_devices.len();
    let mut found = vec![];
    for set in subsets(&with_devices) {
        let all = known.devices.keys().filter(|id| near(&set, id)).count();
        if all >= requested {
            fewest = fewest.min(set.len());
        }
        // Devices of the pod's init containers are reused, so the set must include their nodes.
        let reused: Vec<&String> = reusable.iter().filter(has_node).collect();
        if !reused.iter().all(|id| near(&set, id)) {
            continue;
        }
        let free = available.iter().filter(|id| near(&set, id)).count();
        if reused.len().saturating_add(free) >= requested {
            found.push(set);
        }
    }
    let hint = |nodes: BTreeSet<i64>| Hint {
        preferred: nodes.len() == fewest,
        nodes: Some(NodeMask::of(
            nodes
                .into_iter()
                .filter_map(|node| u32::try_from(node).ok()),
        )),
    };
    found.into_iter().map(hint).collect()
}

/// All non-empty subsets.
fn subsets(items: &[i64]) -> Vec<BTreeSet<i64>> {
    let mut sets = vec![BTreeSet::new()];
    for item in items {
        let with: Vec<BTreeSet<i64>> = sets
            .iter()
            .map(|set| set.iter().chain([item]).copied().collect())
            .collect();
        sets.extend(with);
    }
    sets.remove(0);
    sets
}
