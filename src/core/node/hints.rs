//! On which NUMA nodes a container's resources are to lie together: what those who have resources to give can do
//! (hints), and what is best for all of them (KEP-693; kubelet's `cm/topologymanager`). Pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, Pod};

use super::admit::{Refusal, refuse};
use super::topology::{MemoryNode, Topology, combinations};
use crate::core::pod::{self, Role};

/// A set of NUMA nodes; nodes from 64 on cannot be in one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeMask(u64);

impl NodeMask {
    /// How many nodes there may be.
    pub const NODES: u32 = 64;

    /// Of these nodes.
    #[must_use]
    pub fn of(nodes: impl IntoIterator<Item = u32>) -> NodeMask {
        let bit = |mask: u64, node: u32| mask | 1_u64.checked_shl(node).unwrap_or(0);
        NodeMask(nodes.into_iter().fold(0, bit))
    }

    /// The nodes, in order.
    #[must_use]
    pub fn nodes(self) -> Vec<u32> {
        (0..Self::NODES).filter(|n| self.has(*n)).collect()
    }

    /// Whether a node is one of them.
    #[must_use]
    pub fn has(self, node: u32) -> bool {
        1_u64.checked_shl(node).is_some_and(|bit| self.0 & bit != 0)
    }

    /// How many they are.
    #[must_use]
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Those that are in both.
    #[must_use]
    pub fn and(self, other: NodeMask) -> NodeMask {
        NodeMask(self.0 & other.0)
    }

    /// Whether all of these are in another set.
    #[must_use]
    pub fn is_within(self, other: NodeMask) -> bool {
        self.0 & !other.0 == 0
    }

    /// All sets of some of these nodes, the small ones first.
    #[must_use]
    pub fn all_of(nodes: &[u32]) -> Vec<NodeMask> {
        let sizes = 1..=nodes.len();
        sizes
            .flat_map(|size| combinations(nodes, size))
            .map(NodeMask::of)
            .collect()
    }

    /// Fewer nodes are better, then those with low numbers.
    fn narrowness(self) -> (u32, u64) {
        (self.count(), self.0)
    }
}

/// Nodes that a resource could come from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hint {
    /// The nodes; none where any will do.
    pub nodes: Option<NodeMask>,
    /// Whether no fewer nodes would do.
    pub preferred: bool,
}

/// What somebody can do, by resource. A resource with no hint cannot be given at all; where there is no resource, the
/// nodes make no difference.
pub type Hints = BTreeMap<String, Vec<Hint>>;

/// Whom hints are for.
#[derive(Debug, Clone, Copy)]
pub enum Asker<'a> {
    /// One container.
    Container(&'a Pod, &'a Container),
    /// All containers of a pod together.
    Pod(&'a Pod),
}

/// What is counted of admissions (kubelet's `metrics/metrics.go`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Count {
    /// The topology manager was asked whether a pod can have what it asks for.
    Alignment,
    /// It cannot, under a policy.
    AlignmentError,
    /// What a pod or a container has is on one NUMA node, as the policy guarantees.
    OneNode(Scope),
    /// It cannot be on one.
    NoNode(Scope),
    /// A container is to have processors of its own.
    CpuPinning,
    /// It gets none.
    CpuPinningError,
    /// Its processors are whole cores, as an option guarantees.
    WholeCores,
    /// It gets no processors where they would have been whole cores.
    NoWholeCores,
    /// Its processors share a cache.
    OneCache,
    /// A container is to have memory from chosen NUMA nodes.
    MemoryPinning,
    /// It gets none.
    MemoryPinningError,
}

/// Somebody who has resources to give that lie near NUMA nodes: the processors, the memory, devices.
pub trait Provider {
    /// From which nodes it could give what is asked for.
    fn hints(&self, asker: Asker<'_>) -> Hints;
    /// Gives a container what it asks for, from the nodes of `affinity` where that can be. A container that has it
    /// already keeps it. What is to be counted is added to `counts`.
    fn allocate(
        &mut self,
        pod: &Pod,
        role: Role,
        container: &Container,
        affinity: Hint,
        counts: &mut Vec<Count>,
    ) -> Result<(), Refusal>;
}

/// What the containers of a pod have of each resource at the most at a time, where each has what `wanted` says
/// (KEP-753): the regular ones and the sidecars together, or an init container and the sidecars before it.
pub(super) fn most_at_a_time(
    pod: &Pod,
    wanted: impl Fn(&Container) -> BTreeMap<String, u64>,
) -> BTreeMap<String, u64> {
    let mut lasting: BTreeMap<String, u64> = BTreeMap::new();
    let mut peak: BTreeMap<String, u64> = BTreeMap::new();
    for (role, container) in pod::containers(pod) {
        for (resource, amount) in wanted(&container) {
            let before = lasting.entry(resource.clone()).or_default();
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
        let most = lasting.entry(resource).or_default();
        *most = (*most).max(amount);
    }
    lasting.retain(|_, amount| *amount > 0);
    lasting
}

/// Which alignment a pod must have (`topologyManagerPolicy`; `none` is no [`Alignment`] at all).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The best there is.
    BestEffort,
    /// On no more nodes than it needs.
    Restricted,
    /// On one node.
    SingleNode,
}

/// For whom resources are aligned (`topologyManagerScope`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// For each container by itself.
    #[default]
    Container,
    /// For all containers of a pod.
    Pod,
}

/// What the configuration says of alignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// `topologyManagerPolicy`.
    pub policy: Policy,
    /// `topologyManagerScope`.
    pub scope: Scope,
    /// Whether nodes near each other are better than those with low numbers (`prefer-closest-numa-nodes`).
    pub closest: bool,
    /// On how many nodes this is tried at all (`max-allowable-numa-nodes`).
    pub most_nodes: u32,
}

/// How resources are aligned on this machine.
#[derive(Debug, Clone)]
pub struct Alignment {
    rules: Rules,
    nodes: NodeMask,
    distances: BTreeMap<(u32, u32), u64>,
}

/// The refusal of a pod whose resources cannot lie together.
fn not_aligned() -> Refusal {
    refuse(
        "TopologyAffinityError",
        "Resources cannot be allocated with Topology locality",
    )
}

/// What a choice of one hint for each resource comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Choice {
    nodes: NodeMask,
    /// The nodes that all hints so far have named, where they agree.
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
            // It makes no difference any more: choices that come to the same are one.
            self.agreed = Some(NodeMask::default());
        }
        self
    }
}

impl Alignment {
    /// On this machine.
    ///
    /// # Errors
    ///
    /// The machine has more NUMA nodes than the rules allow, or nearness matters and is not known.
    pub fn new(rules: Rules, topology: &Topology) -> Result<Alignment, String> {
        let (number, most) = (topology.nodes.len(), rules.most_nodes);
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

    /// For whom resources are aligned.
    #[must_use]
    pub fn scope(&self) -> Scope {
        self.rules.scope
    }

    /// Whether all that is admitted is on one node.
    #[must_use]
    pub fn is_guaranteed(&self) -> bool {
        self.rules.policy == Policy::SingleNode
    }

    /// The best nodes for all resources; a refusal where the policy does not take them.
    pub fn merge(&self, offers: &[Hints]) -> Result<Hint, Refusal> {
        let hint = self.best(offers);
        if hint.preferred || self.rules.policy == Policy::BestEffort {
            return Ok(hint);
        }
        Err(not_aligned())
    }

    fn best(&self, offers: &[Hints]) -> Hint {
        let single = self.rules.policy == Policy::SingleNode;
        let impossible = vec![Hint::default()];
        let resources = offers.iter().flat_map(|hints| hints.values());
        let resources = resources.map(|hints| match hints.is_empty() {
            true => &impossible,
            false => hints,
        });
        let usable =
            |hint: &&Hint| !single || (hint.preferred && hint.nodes.is_none_or(|n| n.count() == 1));
        let lists: Vec<Vec<Hint>> = resources
            .map(|hints| hints.iter().filter(usable).copied().collect())
            .collect();
        // As wide as the resource that needs most nodes.
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

    /// The less, the better: preferred ones and the narrowest of them; of the others those that are as wide as they
    /// need to be, then the widest below that, then the narrowest above.
    fn rank(&self, choice: &Choice, width: u32) -> (u8, u32, u64, (u32, u64)) {
        let count = choice.nodes.count();
        let (class, size) = match choice.preferred {
            true => (0, count),
            false if count <= width => (1, width.saturating_sub(count)),
            false => (2, count),
        };
        let closest = self.rules.closest && self.rules.policy != Policy::SingleNode;
        let distance = if closest {
            self.spread(choice.nodes)
        } else {
            0
        };
        (class, size, distance, choice.nodes.narrowness())
    }

    /// The sum of the distances between all of these nodes.
    fn spread(&self, mask: NodeMask) -> u64 {
        let nodes = mask.nodes();
        let pairs = nodes.iter().flat_map(|a| nodes.iter().map(|b| (*a, *b)));
        pairs.filter_map(|pair| self.distances.get(&pair)).sum()
    }
}

#[cfg(test)]
pub(in crate::core::node) mod tests;
