//! Memory allocation (`memoryManagerPolicy: Static`, `pkg/kubelet/cm/memorymanager/policy_static.go`). Containers of a
//! Guaranteed pod get memory and huge pages from NUMA nodes with enough free memory, from one node if possible. A node
//! belongs to one group of nodes at a time. Pure.
//!
//! The kernel restricts containers to their nodes (`cpuset.mems`); this module only accounts for the free memory of
//! each node.

pub mod checkpoint;
mod rules;
mod state;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};

use super::admit::{Refusal, unexpected_error};
use super::hints::{Count, Hint, Hints, NodeMask, Provider, Subject, max_concurrent};
use super::topology::Topology;
use crate::cpuset::CpuSet;
use crate::pod::qos;
use crate::pod::resources::{Amounts, Side, of_container};
use crate::pod::{self, Role};
pub use rules::{Reserved, Rules, is_memory, set_aside};
pub(crate) use state::Allocations;
pub use state::{Block, NodeState, State, Table};

/// Requested bytes by resource.
type Wanted = BTreeMap<String, u64>;

/// Uid of a pod, and the memory of its init containers that its later containers can reuse: bytes by nodes and
/// resource.
type Reusable = (String, BTreeMap<(NodeMask, String), u64>);

/// A pod's allocation before an admission, to restore it. Its size depends on the machine and the pod, not on the
/// number of pods.
#[derive(Debug, Clone)]
pub struct Snapshot {
    nodes: BTreeMap<u32, state::NodeState>,
    own: Option<BTreeMap<String, Vec<Block>>>,
    reusable: Reusable,
}

/// The memory of a machine and its allocations.
#[derive(Debug, Clone)]
pub struct Memory {
    state: State,
    /// Memory of init containers that no later container has taken over yet.
    reusable: Reusable,
}

impl Memory {
    /// A machine without allocations. `set_aside` is the amount of each resource that is unavailable to pods; it must
    /// equal the reservations on the nodes.
    ///
    /// # Errors
    ///
    /// The rules do not fit the machine or each other.
    pub fn new(rules: &Rules, topology: &Topology, set_aside: &Amounts) -> Result<Memory, String> {
        rules.check(topology, set_aside)?;
        Ok(Memory {
            state: rules.initial_state(topology),
            reusable: Default::default(),
        })
    }

    /// Restores allocations from a checkpoint.
    ///
    /// # Errors
    ///
    /// The state does not fit the rules or the machine.
    pub fn load(&mut self, state: State) -> Result<(), String> {
        if state.nodes.is_empty() {
            return match state.allocations.is_empty() {
                true => Ok(()),
                false => Err("it has allocated memory and no NUMA nodes".into()),
            };
        }
        let mut expected = self.state.clone();
        for (uid, containers) in &state.allocations {
            let blocks = containers
                .iter()
                .flat_map(|(name, blocks)| blocks.iter().map(move |block| (name, block)));
            for (name, block) in blocks {
                if !expected.knows(block) {
                    return Err(format!(
                        "container {name} of pod {uid} has {} of NUMA nodes {:?}, where this machine has none",
                        block.resource, block.nodes
                    ));
                }
                expected.take(&block.nodes, &block.resource, block.size);
            }
        }
        if let Some(why) = expected.difference(&state) {
            return Err(why);
        }
        self.state = if expected.has_the_memory_of(&state) {
            state
        } else {
            State {
                nodes: expected.nodes,
                allocations: state.allocations,
            }
        };
        Ok(())
    }

    /// A container's allocation.
    #[must_use]
    pub fn blocks(&self, uid: &str, container: &str) -> Option<&[Block]> {
        let containers = self.state.allocations.get(uid)?;
        containers.get(container).map(Vec::as_slice)
    }

    /// The allocatable amounts of each node and resource.
    #[must_use]
    pub fn allocatable(&self) -> Vec<Block> {
        let nodes = self.state.nodes.iter();
        let blocks = nodes.flat_map(|(id, node)| {
            let tables = node.tables.iter().filter(|(_, t)| t.allocatable > 0);
            tables.map(|(resource, table)| Block {
                nodes: vec![*id],
                resource: resource.clone(),
                size: table.allocatable,
            })
        });
        blocks.collect()
    }

    /// Allocations and free memory.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The NUMA nodes of each container's memory, by pod uid and container name.
    #[must_use]
    pub fn nodes(&self) -> BTreeMap<String, BTreeMap<String, CpuSet>> {
        let of = |blocks: &Vec<Block>| blocks.iter().flat_map(|b| b.nodes.clone()).collect();
        let pod = |containers: &BTreeMap<String, Vec<Block>>| {
            let nodes = containers
                .iter()
                .map(|(name, blocks)| (name.clone(), of(blocks)));
            nodes.collect()
        };
        let pods = self.state.allocations.iter();
        pods.map(|(uid, containers)| (uid.clone(), pod(containers)))
            .collect()
    }

    /// The pod's current allocation, for [`Memory::restore`].
    #[must_use]
    pub fn snapshot(&self, uid: &str) -> Snapshot {
        Snapshot {
            nodes: self.state.nodes.clone(),
            own: self.state.allocations.get(uid).cloned(),
            reusable: self.reusable.clone(),
        }
    }

    /// Restores a pod's allocation. Requires that no other pod was allocated memory in between.
    pub fn restore(&mut self, uid: &str, before: Snapshot) {
        self.state.nodes = before.nodes;
        self.reusable = before.reusable;
        match before.own {
            Some(own) => self.state.allocations.insert(uid.to_owned(), own),
            None => self.state.allocations.remove(uid),
        };
    }

    /// Whether a pod has an allocation.
    #[must_use]
    pub fn has(&self, uid: &str) -> bool {
        self.state.allocations.contains_key(uid)
    }

    /// Releases a pod's memory; returns whether it had any.
    pub fn release(&mut self, uid: &str) -> bool {
        if self.reusable.0 == uid {
            self.reusable = Default::default();
        }
        let Some(containers) = self.state.allocations.remove(uid) else {
            return false;
        };
        for block in containers.values().flatten() {
            self.state.release(block);
        }
        true
    }

    fn reusable(&self, uid: &str, mask: NodeMask, resource: &str) -> u64 {
        let own = self.reusable.0 == uid;
        let found = self.reusable.1.get(&(mask, resource.to_owned()));
        found.copied().filter(|_| own).unwrap_or(0)
    }

    /// Hints about the nodes with enough free memory.
    fn hints_for(&self, uid: &str, wanted: &Wanted) -> Vec<Hint> {
        let nodes: Vec<u32> = self.state.nodes.keys().copied().collect();
        let mut fewest = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
        let mut masks = vec![];
        for mask in NodeMask::all_of(&nodes) {
            let can_ever = |(resource, size): (&String, &u64)| {
                self.state.sum(mask, resource, |t| t.allocatable) >= *size
            };
            if !wanted.iter().all(can_ever) {
                continue;
            }
            fewest = fewest.min(mask.count());
            let can_now = |(resource, size): (&String, &u64)| {
                let free = self.state.sum(mask, resource, |t| t.free);
                free.saturating_add(self.reusable(uid, mask, resource)) >= *size
            };
            if self.state.can_group(mask) && wanted.iter().all(can_now) {
                masks.push(mask);
            }
        }
        let hint = |mask: NodeMask| Hint {
            nodes: Some(mask),
            preferred: mask.count() == fewest,
        };
        masks.into_iter().map(hint).collect()
    }

    /// The nodes for a request: those of the affinity, extended by more nodes if they have too little free memory.
    ///
    /// If the affinity is a single node of a group, it is extended to the group. (The kubelet takes the node alone,
    /// which makes its own state inconsistent.)
    fn choose(&self, uid: &str, wanted: &Wanted, affinity: Hint) -> Result<NodeMask, Refusal> {
        let no_worse = |before: Hint, found: Hint, which: &str| match before.preferred {
            true if !found.preferred => Err(unexpected_error(format!(
                "[memorymanager] failed to find the {which} preferred hint"
            ))),
            _ => Ok(found),
        };
        let mut hint = affinity;
        if hint.nodes.is_none() {
            let found = best(self.hints_for(uid, wanted)).ok_or_else(|| {
                unexpected_error("[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available")
            })?;
            hint = no_worse(hint, found, "default")?;
        }
        let nodes = hint.nodes.unwrap_or_default();
        let can_take = nodes.count() > 1 || self.state.can_group(nodes);
        if !can_take || !self.state.has_free(nodes, wanted) {
            let mut hints = self.hints_for(uid, wanted);
            hints.retain(|candidate| candidate.nodes.is_some_and(|n| nodes.is_within(n)));
            let found = best(hints).ok_or_else(|| {
                unexpected_error(
                    "[memorymanager] failed to find NUMA nodes to extend the current topology hint",
                )
            })?;
            hint = no_worse(hint, found, "extended")?;
        }
        let nodes = hint.nodes.unwrap_or_default();
        if !self.state.can_group(nodes) {
            return Err(unexpected_error(
                "[memorymanager] preferred hint violates NUMA node allocation",
            ));
        }
        Ok(nodes)
    }

    /// Marks an init container's memory as reusable, and that of other containers as not reusable.
    fn update_reusable(&mut self, uid: &str, role: Role, blocks: &[Block]) {
        if self.reusable.0 != uid {
            self.reusable = (uid.to_owned(), BTreeMap::new());
        }
        for block in blocks {
            let key = (block.mask(), block.resource.clone());
            let remaining = self.reusable.1.entry(key).or_default();
            *remaining = match role {
                Role::Init => (*remaining).max(block.size),
                _ => remaining.saturating_sub(block.size),
            };
        }
    }

    /// Shrinks the blocks of init containers by what a later container takes over. So the sum of all blocks equals what
    /// is taken from the nodes.
    fn shrink_init(&mut self, pod: &Pod, container: &Container, blocks: &[Block]) {
        let Some(allocations) = self.state.allocations.get_mut(pod::uid(pod)) else {
            return;
        };
        for block in blocks {
            let mut size = block.size;
            for (role, init) in pod::containers(pod) {
                if init.name == container.name {
                    break;
                }
                let own = allocations
                    .get_mut(&init.name)
                    .filter(|_| role == Role::Init);
                for before in own.into_iter().flatten() {
                    if before.resource == block.resource && before.mask() == block.mask() {
                        let taken = before.size.min(size);
                        before.size = before.size.saturating_sub(taken);
                        size = size.saturating_sub(taken);
                    }
                }
            }
        }
    }

    fn container_hints(&self, pod: &Pod, container: &Container) -> Hints {
        let (uid, wanted) = (pod::uid(pod), wanted(pod, container));
        match self.blocks(uid, &container.name) {
            Some(blocks) => hints_of_allocation(blocks, &wanted),
            None => self.hints_of(uid, &wanted),
        }
    }

    fn hints_of(&self, uid: &str, wanted: &Wanted) -> Hints {
        let hints = match wanted.is_empty() {
            true => vec![],
            false => self.hints_for(uid, wanted),
        };
        // If no nodes have enough free memory there are no hints, and the later allocation fails.
        let resources = wanted.keys().filter(|_| !hints.is_empty());
        resources.map(|r| (r.clone(), hints.clone())).collect()
    }

    fn pod_hints(&self, pod: &Pod) -> Hints {
        let uid = pod::uid(pod);
        let wanted = max_concurrent(pod, |container| wanted(pod, container));
        let containers = pod::containers(pod);
        let mut blocks = containers.iter().map(|(_, c)| self.blocks(uid, &c.name));
        match blocks.find_map(|blocks| blocks) {
            Some(blocks) => hints_of_allocation(blocks, &wanted),
            None => self.hints_of(uid, &wanted),
        }
    }

    fn allocate_container(
        &mut self,
        pod: &Pod,
        role: Role,
        container: &Container,
        wanted: Wanted,
        affinity: Hint,
    ) -> Result<(), Refusal> {
        let uid = pod::uid(pod);
        if let Some(blocks) = self.blocks(uid, &container.name) {
            let blocks = blocks.to_vec();
            self.update_reusable(uid, role, &blocks);
            return Ok(());
        }
        let mask = self.choose(uid, &wanted, affinity)?;
        let nodes = mask.nodes();
        let mut blocks = vec![];
        for (resource, size) in wanted {
            let reused = self.reusable(uid, mask, &resource);
            self.state
                .take(&nodes, &resource, size.saturating_sub(reused));
            blocks.push(Block {
                nodes: nodes.clone(),
                resource,
                size,
            });
        }
        self.update_reusable(uid, role, &blocks);
        self.shrink_init(pod, container, &blocks);
        let containers = self.state.allocations.entry(uid.to_owned()).or_default();
        containers.insert(container.name.clone(), blocks);
        Ok(())
    }
}

impl Provider for Memory {
    fn hints(&self, subject: Subject<'_>) -> Hints {
        match subject {
            Subject::Container(pod, container) => self.container_hints(pod, container),
            Subject::Pod(pod) => self.pod_hints(pod),
        }
    }

    fn allocate(
        &mut self,
        pod: &Pod,
        role: Role,
        container: &Container,
        affinity: Hint,
        counts: &mut Vec<Count>,
    ) -> Result<(), Refusal> {
        let wanted = wanted(pod, container);
        if wanted.is_empty() {
            return Ok(());
        }
        counts.push(Count::MemoryPinning);
        let result = self.allocate_container(pod, role, container, wanted, affinity);
        if result.is_err() {
            counts.push(Count::MemoryPinningError);
        }
        result
    }
}

fn best(hints: Vec<Hint>) -> Option<Hint> {
    let preference_order = |hint: &Hint| {
        let nodes = hint.nodes.unwrap_or_default();
        (!hint.preferred, nodes.count(), nodes)
    };
    hints.into_iter().min_by_key(preference_order)
}

/// Hints for an existing allocation; none if the request has changed.
fn hints_of_allocation(blocks: &[Block], wanted: &Wanted) -> Hints {
    let fits = |block: &Block| wanted.get(&block.resource) == Some(&block.size);
    if blocks.len() != wanted.len() || !blocks.iter().all(fits) {
        return Hints::new();
    }
    let hint = |block: &Block| {
        let hint = Hint {
            nodes: Some(block.mask()),
            preferred: true,
        };
        (block.resource.clone(), vec![hint])
    };
    blocks.iter().map(hint).collect()
}

/// The memory and huge pages to allocate for a container: its request, if the pod is Guaranteed by its containers.
fn wanted(pod: &Pod, container: &Container) -> Wanted {
    if !qos::is_guaranteed_by_containers(pod) {
        return Wanted::new();
    }
    let mut amounts = of_container(container, Side::Limits);
    amounts.extend(of_container(container, Side::Requests));
    let sizes = amounts.into_iter().filter(|(name, _)| is_memory(name));
    let sizes = sizes.map(|(name, amount)| (name, u64::try_from(amount.units()).unwrap_or(0)));
    sizes.filter(|(_, size)| *size > 0).collect()
}

#[cfg(test)]
mod tests;
