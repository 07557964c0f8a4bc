//! NUMA alignment of a container's resources: hints from resource providers, and the merge that finds the best nodes
//! for all of them (KEP-693, `pkg/kubelet/cm/topologymanager`). Pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, Pod};

use super::admit::{Refusal, reject};
use super::topology::{MemoryNode, Topology, combinations};
use crate::pod::{self, Role};

/// A set of NUMA nodes with numbers below 64.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeMask(u64);

impl NodeMask {
    /// Maximum number of nodes in a set.
    pub(crate) const NODES: u32 = 64;

    /// The set of these nodes.
    #[must_use]
    pub fn of(nodes: impl IntoIterator<Item = u32>) -> NodeMask {
        let bit = |mask: u64, node: u32| mask | 1_u64.checked_shl(node).unwrap_or(0);
        NodeMask(nodes.into_iter().fold(0, bit))
    }

    /// The nodes, sorted.
    #[must_use]
    pub fn nodes(self) -> Vec<u32> {
        (0..Self::NODES).filter(|n| self.has(*n)).collect()
    }

    /// Whether the set contains a node.
    #[must_use]
    pub fn has(self, node: u32) -> bool {
        1_u64.checked_shl(node).is_some_and(|bit| self.0 & bit != 0)
    }

    /// Number of nodes in the set.
    #[must_use]
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Intersection of two sets.
    #[must_use]
    pub fn and(self, other: NodeMask) -> NodeMask {
        NodeMask(self.0 & other.0)
    }

    /// Whether this set is a subset of another.
    #[must_use]
    pub fn is_within(self, other: NodeMask) -> bool {
        self.0 & !other.0 == 0
    }

    /// All non-empty subsets of these nodes, smallest first.
    #[must_use]
    pub(crate) fn all_of(nodes: &[u32]) -> Vec<NodeMask> {
        let sizes = 1..=nodes.len();
        sizes
            .flat_map(|size| combinations(nodes, size))
            .map(NodeMask::of)
            .collect()
    }

    /// Order of preference: fewer nodes first, then lower numbers.
    fn preference_order(self) -> (u32, u64) {
        (self.count(), self.0)
    }
}

/// NUMA nodes that can provide a resource.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hint {
    /// The nodes; `None` means any node.
    pub nodes: Option<NodeMask>,
    /// Whether no smaller set of nodes could provide the resource.
    pub preferred: bool,
}

/// A provider's hints by resource. An empty list means that the resource cannot be allocated; a missing resource has no
/// NUMA preference.
pub(crate) type Hints = BTreeMap<String, Vec<Hint>>;

/// The subject of hints.
#[derive(Debug, Clone, Copy)]
pub enum Subject<'a> {
    /// A single container.
    Container(&'a Pod, &'a Container),
    /// All containers of a pod together.
    Pod(&'a Pod),
}

/// Events that metrics count (`pkg/kubelet/metrics/metrics.go`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Count {
    /// The topology manager evaluated a pod.
    Alignment,
    /// The topology manager rejected a pod under its policy.
    AlignmentError,
    /// A pod or container was aligned to one NUMA node, as the policy guarantees.
    OneNode(Scope),
    /// A pod or container could not be aligned to one NUMA node.
    NoNode(Scope),
    /// A container requested exclusive CPUs.
    CpuPinning,
    /// Exclusive CPUs could not be allocated.
    CpuPinningError,
    /// A container's exclusive CPUs are whole cores, as an option guarantees.
    WholeCores,
    /// Exclusive CPUs in whole cores could not be allocated.
    NoWholeCores,
    /// A container's exclusive CPUs share a cache.
    OneCache,
    /// A container requested memory from specific NUMA nodes.
    MemoryPinning,
    /// That memory could not be allocated.
    MemoryPinningError,
}

/// A provider of resources with NUMA locality: CPUs, memory, devices.
pub trait Provider {
    /// Hints about the nodes that can provide the requested resources.
    fn hints(&self, subject: Subject<'_>) -> Hints;
    /// Allocates a container's resources, from the nodes of `affinity` if possible. An existing allocation is kept.
    /// Events for metrics are added to `counts`.
    fn allocate(
        &mut self,
        pod: &Pod,
        role: Role,
        container: &Container,
        affinity: Hint,
        counts: &mut Vec<Count>,
    ) -> Result<(), Refusal>;
}

/// The maximum of each resource that a pod's containers use at the same time (KEP-753). `wanted` returns the amounts of
/// a container. The maximum is that of all regular containers and sidecars, or of an init container with the sidecars
/// before it.
pub(super) fn max_concurrent(
    pod: &Pod,
    wanted: impl Fn(&Container) -> BTreeMap<String, u64>,
) -> BTreeMap<String, u64> {
    let mut concurrent: BTreeMap<String, u64> = BTreeMap::new();
    let mut peak: BTreeMap<String, u64> = BTreeMap::new();
    for (role, container) in pod::containers(pod) {
        for (resource, amount) in wanted(&container) {
            let before = concurrent.entry(resource.clone()).or_default();
            let sum = before.saturating_add(amount);
            match role {
                Role::Init => {
                    let peak = peak.entry(resource).or_default();
                    *peak = (*peak).max(sum);
                }
                Role::Sidecar | Role::Regular => *before = sum,
                Role::Ephemeral => {}
            }
        }
    }
    for (resource, amount) in peak {
        let maximum = concurrent.entry(resource).or_default();
        *maximum = (*maximum).max(amount);
    }
    concurrent.retain(|_, amount| *amount > 0);
    concurrent
}

/// Required alignment (`topologyManagerPolicy`; without [`Alignment`] the policy is `none`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The best available alignment.
    BestEffort,
    /// No more nodes than the resources need.
    Restricted,
    /// A single node.
    SingleNode,
}

/// Unit of alignment (`topologyManagerScope`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Each container separately.
    #[default]
    Container,
    /// All containers of a pod together.
    Pod,
}

/// Configuration of the topology manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// `topologyManagerPolicy`.
    pub policy: Policy,
    /// `topologyManagerScope`.
    pub scope: Scope,
    /// Whether to prefer nodes close to each other over nodes with low numbers (`prefer-closest-numa-nodes`).
    pub closest: bool,
    /// Maximum number of NUMA nodes on which alignment is supported (`max-allowable-numa-nodes`).
    pub max_nodes: u32,
}

/// The topology manager of this machine.
#[derive(Debug, Clone)]
pub struct Alignment {
    rules: Rules,
    nodes: NodeMask,
    distances: BTreeMap<(u32, u32), u64>,
}

/// Rejects a pod whose resources cannot be aligned.
fn not_aligned() -> Refusal {
    reject(
        "TopologyAffinityError",
        "Resources cannot be allocated with Topology locality",
    )
}

/// Result of choosing one hint per resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Choice {
    nodes: NodeMask,
    /// The nodes that all hints so far name; empty if the hints differ.
    agreed: Option<NodeMask>,
    preferred: bool,
}

impl Choice {
    fn with(mut self, hint: Hint) -> Choice {
        if let Some(nodes) = hint.nodes {
            self.nodes = self.nodes.and(nodes);
            self.preferred &= *self.agreed.get_or_insert(nodes) == nodes;
        }
        self.preferred &= hint.preferred;
        if !self.preferred {
            // The value no longer matters; a fixed one makes equivalent choices equal.
            self.agreed = Some(NodeMask::default());
        }
        self
    }
}

impl Alignment {
    /// The topology manager for this machine.
    ///
    /// # Errors
    ///
    /// The machine has more NUMA nodes than the rules allow, or distances are needed but unknown.
    pub fn new(rules: Rules, topology: &Topology) -> Result<Alignment, String> {
        let (number, most) = (topology.nodes.len(), rules.max_nodes);
        if u32::try_from(number).is_ok_and(|n| n > most) {
            return Err(format!(
                "topologyManagerPolicy: this machine has {number} NUMA nodes, and more than {most} are not allowed: set topologyManagerPolicyOptions.max-allowable-numa-nodes, or topologyManagerPolicy: none"
            ));
        }
        let nodes = || topology.nodes.iter();
        let is_measured = |(node, memory): (&u32, &MemoryNode)| {
            let mut others = nodes().map(|(other, _)| other);
            others.all(|other| other == node || memory.distances.contains_key(other))
        };
        if rules.closest && !nodes().all(is_measured) {
            return Err("topologyManagerPolicyOptions.prefer-closest-numa-nodes: how far the NUMA nodes of this machine are from each other cannot be read below /sys/devices/system/node: remove the option".into());
        }
        let from = |(node, memory): (&u32, &MemoryNode)| {
            let node = *node;
            let to = memory.distances.clone().into_iter();
            to.map(move |(other, distance)| ((node, other), distance))
                .collect::<Vec<_>>()
        };
        Ok(Alignment {
            rules,
            nodes: NodeMask::of(topology.nodes.keys().copied()),
            distances: topology.nodes.iter().flat_map(from).collect(),
        })
    }

    /// The unit of alignment.
    #[must_use]
    pub fn scope(&self) -> Scope {
        self.rules.scope
    }

    /// Whether the policy guarantees that admitted resources are on one node.
    #[must_use]
    pub(crate) fn is_guaranteed(&self) -> bool {
        self.rules.policy == Policy::SingleNode
    }

    /// The best nodes for all resources; an error if the policy does not accept them.
    pub fn merge(&self, all_hints: &[Hints]) -> Result<Hint, Refusal> {
        let hint = self.best(all_hints);
        if hint.preferred || self.rules.policy == Policy::BestEffort {
            return Ok(hint);
        }
        Err(not_aligned())
    }

    fn best(&self, all_hints: &[Hints]) -> Hint {
        let single = self.rules.policy == Policy::SingleNode;
        let impossible = vec![Hint::default()];
        let resources = all_hints.iter().flat_map(|hints| hints.values());
        let resources = resources.map(|hints| match hints.is_empty() {
            true => &impossible,
            false => hints,
        });
        let usable =
            |hint: &&Hint| !single || (hint.preferred && hint.nodes.is_none_or(|n| n.count() == 1));
        let lists: Vec<Vec<Hint>> = resources
            .map(|hints| hints.iter().filter(usable).copied().collect())
            .collect();
        // The minimum width of the resource that needs the most nodes.
        let narrowest = |hints: &Vec<Hint>| {
            hints
                .iter()
                .filter_map(|h| h.nodes)
                .map(NodeMask::count)
                .min()
        };
        let width = lists.iter().filter_map(narrowest).max().unwrap_or(0);
        let mut choices = BTreeSet::from([Choice {
            nodes: self.nodes,
            agreed: None,
            preferred: true,
        }]);
        for hints in &lists {
            let extended = choices
                .iter()
                .flat_map(|choice| hints.iter().map(|hint| choice.with(*hint)));
            choices = extended.collect();
        }
        let possible = choices.into_iter().filter(|c| c.nodes.count() > 0);
        let best = possible.min_by_key(|choice| self.rank(choice, width));
        let (nodes, preferred) = best.map_or((self.nodes, false), |c| (c.nodes, c.preferred));
        Hint {
            nodes: (!single || nodes != self.nodes).then_some(nodes),
            preferred,
        }
    }

    /// Rank of a choice; lower is better. Preferred choices come first, narrow before wide. Other choices rank by
    /// width: exactly `width`, then narrower ones (widest first), then wider ones (narrowest first).
    fn rank(&self, choice: &Choice, width: u32) -> (u8, u32, u64, (u32, u64)) {
        let count = choice.nodes.count();
        let (class, size) = match choice.preferred {
            true => (0, count),
            false if count <= width => (1, width.saturating_sub(count)),
            false => (2, count),
        };
        let closest = self.rules.closest && self.rules.policy != Policy::SingleNode;
        let distance = if closest {
            self.total_distance(choice.nodes)
        } else {
            0
        };
        (class, size, distance, choice.nodes.preference_order())
    }

    /// Sum of the distances between all pairs of nodes.
    fn total_distance(&self, mask: NodeMask) -> u64 {
        let nodes = mask.nodes();
        let pairs = nodes.iter().flat_map(|a| nodes.iter().map(|b| (*a, *b)));
        pairs.filter_map(|pair| self.distances.get(&pair)).sum()
    }
}

#[cfg(test)]
pub(in crate::node) mod tests;
