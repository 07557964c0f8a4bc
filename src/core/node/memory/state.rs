//! Memory of each NUMA node and its allocations: the tables of the kubelet (`pkg/kubelet/cm/memorymanager/state`) and
//! the arithmetic on them. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::super::hints::NodeMask;
use super::Wanted;

/// Amounts of one resource on a node, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    /// Total amount.
    pub total: u64,
    /// Amount reserved by the configuration.
    #[serde(rename = "systemReserved")]
    pub system_reserved: u64,
    /// Amount available to containers in total.
    pub allocatable: u64,
    /// Amount allocated to containers.
    pub reserved: u64,
    /// Amount still available.
    pub free: u64,
}

/// A NUMA node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeState {
    /// Number of blocks allocated from the node.
    #[serde(rename = "numberOfAssignments")]
    pub assignments: u64,
    /// Amounts by resource.
    #[serde(rename = "memoryMap", default)]
    pub tables: BTreeMap<String, Table>,
    /// The group of nodes that allocates together with this one; initially only the node itself.
    #[serde(default)]
    pub cells: Vec<u32>,
}

impl NodeState {
    fn group(&self) -> NodeMask {
        NodeMask::of(self.cells.iter().copied())
    }
}

/// A container's allocation of one resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// The NUMA nodes of the block.
    #[serde(rename = "numaAffinity")]
    pub nodes: Vec<u32>,
    /// The resource.
    #[serde(rename = "type")]
    pub resource: String,
    /// Size in bytes.
    pub size: u64,
}

impl Block {
    pub(super) fn mask(&self) -> NodeMask {
        NodeMask::of(self.nodes.iter().copied())
    }
}

/// Allocations by pod uid and container name.
pub(crate) type Allocations = BTreeMap<String, BTreeMap<String, Vec<Block>>>;

/// Content of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// The NUMA nodes.
    pub nodes: BTreeMap<u32, NodeState>,
    /// The allocations.
    pub allocations: Allocations,
}

impl State {
    fn of(&self, mask: NodeMask) -> impl Iterator<Item = &NodeState> {
        let nodes = self.nodes.iter().filter(move |(id, _)| mask.has(**id));
        nodes.map(|(_, node)| node)
    }

    /// Sum of one amount of a resource over these nodes.
    pub(super) fn sum(&self, mask: NodeMask, resource: &str, of: impl Fn(&Table) -> u64) -> u64 {
        let tables = self.of(mask).filter_map(|node| node.tables.get(resource));
        tables.map(of).fold(0, u64::saturating_add)
    }

    /// Whether these nodes have enough free memory.
    pub(super) fn has_free(&self, mask: NodeMask, wanted: &Wanted) -> bool {
        let mut each = wanted.iter();
        each.all(|(resource, size)| self.sum(mask, resource, |t| t.free) >= *size)
    }

    /// Whether memory may be allocated from these nodes together. A node allocates either alone or with one group of
    /// nodes.
    pub(super) fn can_group(&self, mask: NodeMask) -> bool {
        match mask.count() {
            1 => self.of(mask).all(|node| node.cells.len() <= 1),
            _ => {
                let fits = |node: &NodeState| node.assignments == 0 || node.group() == mask;
                self.of(mask).all(fits)
            }
        }
    }

    /// Whether the nodes of a block have the block's resource.
    pub(super) fn knows(&self, block: &Block) -> bool {
        let has = |id: &u32| {
            let node = self.nodes.get(id);
            node.is_some_and(|n| n.tables.contains_key(&block.resource))
        };
        block.nodes.iter().all(has)
    }

    /// Takes memory from these nodes, in order.
    pub(super) fn take(&mut self, nodes: &[u32], resource: &str, mut size: u64) {
        for id in nodes {
            let Some(node) = self.nodes.get_mut(id) else {
                continue;
            };
            node.assignments = node.assignments.saturating_add(1);
            node.cells = nodes.to_vec();
            if let Some(table) = node.tables.get_mut(resource) {
                let taken = table.free.min(size);
                table.free = table.free.saturating_sub(taken);
                table.reserved = table.reserved.saturating_add(taken);
                size = size.saturating_sub(taken);
            }
        }
    }

    /// Returns a block to its nodes.
    pub(super) fn release(&mut self, block: &Block) {
        let mut size = block.size;
        for id in &block.nodes {
            let Some(node) = self.nodes.get_mut(id) else {
                continue;
            };
            node.assignments = node.assignments.saturating_sub(1);
            if node.assignments == 0 {
                node.cells = vec![*id];
            }
            if let Some(table) = node.tables.get_mut(&block.resource) {
                let returned = table.reserved.min(size);
                table.free = table.free.saturating_add(returned);
                table.reserved = table.reserved.saturating_sub(returned);
                size = size.saturating_sub(returned);
            }
        }
    }

    /// Whether the machine has as much memory in each NUMA node as when another state was written.
    pub(super) fn has_the_memory_of(&self, other: &State) -> bool {
        let totals = |state: &State| {
            let nodes = state.nodes.values();
            let tables = nodes.flat_map(|n| n.tables.values());
            tables.map(|t| t.total).collect::<Vec<u64>>()
        };
        totals(self) == totals(other)
    }

    /// Why an earlier state does not fit this one, which has the earlier state's allocations on today's machine; `None` if
    /// it does. The distribution of memory within a group of nodes is ignored. The kubelet also refuses to start if the
    /// memory of a node has changed (`areMachineStatesEqual` in `pkg/kubelet/cm/memorymanager/policy_static.go`). But
    /// hypervisors change the memory of a running machine, and then no restart may stop the node: what the containers have
    /// must still exist.
    pub(super) fn difference(&self, other: &State) -> Option<String> {
        let ids = |state: &State| state.nodes.keys().copied().collect::<Vec<u32>>();
        if ids(self) != ids(other) {
            let (then, now) = (ids(other), ids(self));
            return Some(format!(
                "it was written on a machine with the NUMA nodes {then:?}; this machine has {now:?}"
            ));
        }
        let mut pairs = self.nodes.iter().zip(other.nodes.values());
        pairs.find_map(|((id, now), then)| self.node_difference(other, *id, now, then))
    }

    fn node_difference(
        &self,
        other: &State,
        id: u32,
        now: &NodeState,
        then: &NodeState,
    ) -> Option<String> {
        if now.assignments != then.assignments || now.group() != then.group() {
            return Some(format!("its allocations on NUMA node {id} do not add up"));
        }
        if !now.tables.keys().eq(then.tables.keys()) {
            return Some(format!("NUMA node {id} had other resources"));
        }
        let sum = |state: &State, resource: &str, of: fn(&Table) -> u64| {
            state.sum(now.group(), resource, of)
        };
        let mut tables = now.tables.iter().zip(then.tables.values());
        tables.find_map(|((resource, table), was)| {
            if table.system_reserved != was.system_reserved {
                return Some(format!(
                    "{} bytes of {resource} of NUMA node {id} were reserved for the system; now {} are",
                    was.system_reserved, table.system_reserved
                ));
            }
            let (taken, held) = (
                sum(self, resource, |t| t.reserved),
                sum(other, resource, |t| t.reserved),
            );
            if table.total < was.total && taken < held {
                return Some(format!(
                    "NUMA node {id} had {} bytes of {resource}; now it has {}, which is less than its containers have",
                    was.total, table.total
                ));
            }
            let differs = taken != held
                || (self.has_the_memory_of(other)
                    && sum(self, resource, |t| t.free) != sum(other, resource, |t| t.free));
            differs.then(|| {
                format!("its allocations of {resource} on NUMA node {id} do not add up")
            })
        })
    }
}
