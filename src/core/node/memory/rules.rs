//! The reserved memory of each NUMA node, and checks that it fits the machine
//! (`pkg/kubelet/cm/memorymanager/memory_manager.go`). Pure.

use std::collections::BTreeMap;

use super::super::capacity::{Limits, MachineSize, huge_page_resource};
use super::super::eviction::{self, Resource};
use super::super::topology::{MemoryNode, Topology};
use super::{NodeState, State, Table};
use crate::pod::resources::Amounts;
use crate::quantity::Quantity;

/// Maximum number of NUMA nodes; all combinations of nodes are tried.
const MAX_NODES: usize = 16;

/// Reserved bytes by NUMA node and resource (`reservedMemory`).
pub type Reserved = BTreeMap<u32, BTreeMap<String, u64>>;

/// Configuration of the static policy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    /// `reservedMemory`.
    pub reserved: Reserved,
}

/// Whether a resource is memory or huge pages.
#[must_use]
pub fn is_memory(resource: &str) -> bool {
    resource == "memory" || resource.starts_with("hugepages-")
}

/// Memory and huge pages that are unavailable to pods: `systemReserved`, `kubeReserved` and the hard eviction threshold
/// of memory together. All of it must be reserved on NUMA nodes.
#[must_use]
pub fn set_aside(machine: &MachineSize, limits: Limits<'_>) -> Amounts {
    let pools = machine.huge_pages.iter();
    let pools = pools.map(|(bytes, _)| huge_page_resource(*bytes));
    let names = pools.chain(["memory".to_owned()]);
    let amount = |name: String| {
        let reserved = limits.reserved.get(&name).copied().unwrap_or_default();
        let kept = match name.as_str() {
            "memory" => eviction::reserved_by_thresholds(
                limits.thresholds,
                Resource::Memory,
                machine.memory,
            ),
            _ => Quantity::ZERO,
        };
        (name, reserved + kept)
    };
    let amounts = names.map(amount);
    amounts.filter(|(_, amount)| !amount.is_zero()).collect()
}

impl Rules {
    /// Checks the rules against the machine and the amounts set aside.
    pub(super) fn check(&self, topology: &Topology, set_aside: &Amounts) -> Result<(), String> {
        if topology.nodes.len() > MAX_NODES {
            return Err(format!(
                "memoryManagerPolicy: Static does not support more than {MAX_NODES} NUMA nodes, and this machine has {}: use None",
                topology.nodes.len()
            ));
        }
        for (node, reserved) in &self.reserved {
            check_node(*node, topology.nodes.get(node), reserved)?;
        }
        let mut sums = Amounts::new();
        for (resource, bytes) in self.reserved.values().flatten() {
            let sum = sums.entry(resource.clone()).or_default();
            *sum = *sum + Quantity::from_bytes(*bytes);
        }
        let of = |amounts: &Amounts, name: &str| amounts.get(name).copied().unwrap_or_default();
        for resource in sums.keys().chain(set_aside.keys()) {
            let (reserved, aside) = (of(&sums, resource), of(set_aside, resource));
            if reserved != aside {
                return Err(format!(
                    "reservedMemory: the total amount \"{reserved}\" of type \"{resource}\" is not equal to the value \"{aside}\" determined by Node Allocatable feature: reserve as much on the NUMA nodes together as systemReserved, kubeReserved and the hard threshold of evictionHard set aside"
                ));
            }
        }
        if of(&sums, "memory").is_zero() {
            return Err("memoryManagerPolicy: Static needs reserved memory: set reservedMemory, and the same amount in systemReserved or kubeReserved".into());
        }
        Ok(())
    }

    /// The state of a machine without allocations.
    pub(super) fn initial_state(&self, topology: &Topology) -> State {
        let node = |(id, memory): (&u32, &MemoryNode)| {
            let none = BTreeMap::new();
            let reserved = self.reserved.get(id).unwrap_or(&none);
            let state = NodeState {
                assignments: 0,
                tables: tables(memory, reserved),
                cells: vec![*id],
            };
            (*id, state)
        };
        State {
            nodes: topology.nodes.iter().map(node).collect(),
            ..State::default()
        }
    }
}

/// For each resource of a node: the total bytes, and the bytes usable by requests. Huge pages are not usable as
/// ordinary memory.
fn sizes(node: &MemoryNode) -> BTreeMap<String, (u64, u64)> {
    let mut sizes = BTreeMap::new();
    let mut remaining = node.memory;
    for (size, pages) in &node.huge_pages {
        let bytes = size.saturating_mul(*pages);
        sizes.insert(huge_page_resource(*size), (bytes, bytes));
        remaining = remaining.saturating_sub(bytes);
    }
    sizes.insert("memory".to_owned(), (node.memory, remaining));
    sizes
}

fn tables(node: &MemoryNode, reserved: &BTreeMap<String, u64>) -> BTreeMap<String, Table> {
    let table = |(resource, (total, usable)): (String, (u64, u64))| {
        let system_reserved = reserved.get(&resource).copied().unwrap_or(0);
        let allocatable = usable.saturating_sub(system_reserved);
        let table = Table {
            total,
            system_reserved,
            allocatable,
            reserved: 0,
            free: allocatable,
        };
        (resource, table)
    };
    sizes(node).into_iter().map(table).collect()
}

fn check_node(
    id: u32,
    node: Option<&MemoryNode>,
    reserved: &BTreeMap<String, u64>,
) -> Result<(), String> {
    let Some(node) = node else {
        return Err(format!(
            "reservedMemory: the reserved memory configuration references a NUMA node {id} that does not exist on this machine"
        ));
    };
    let sizes = sizes(node);
    for (resource, bytes) in reserved {
        let usable = sizes.get(resource).map_or(0, |(_, usable)| *usable);
        if usable < *bytes {
            return Err(format!(
                "reservedMemory: NUMA node {id} has {} of {resource}, but {} are to be reserved there: reserve less, or on another node",
                Quantity::from_bytes(usable),
                Quantity::from_bytes(*bytes)
            ));
        }
    }
    Ok(())
}
