//! Topology of a machine: CPUs by socket, NUMA node, core and shared cache, and memory by NUMA node
//! (`pkg/kubelet/cm/cpumanager/topology`). Pure.

use std::collections::{BTreeMap, BTreeSet};

use crate::cpuset::CpuSet;

/// Position of a logical CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu {
    /// The NUMA node.
    pub node: u32,
    /// The socket.
    pub socket: u32,
    /// The core, identified by its lowest CPU number.
    pub core: u32,
    /// The last-level cache, if only some cores of the node share it; otherwise the socket.
    pub cache: u32,
}

/// A level by which CPUs are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// NUMA nodes.
    Node,
    /// Sockets.
    Socket,
    /// Shared caches.
    Cache,
    /// Cores.
    Core,
}

impl Cpu {
    fn at(self, level: Level) -> u32 {
        match level {
            Level::Node => self.node,
            Level::Socket => self.socket,
            Level::Cache => self.cache,
            Level::Core => self.core,
        }
    }
}

/// CPUs with their positions, by CPU number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cpus(pub BTreeMap<u32, Cpu>);

impl Cpus {
    /// Number of CPUs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no CPUs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The CPU numbers.
    #[must_use]
    pub fn all(&self) -> CpuSet {
        self.0.keys().copied().collect()
    }

    /// The CPUs that are also in a set.
    #[must_use]
    pub fn intersection(&self, set: &CpuSet) -> Cpus {
        let kept = self.0.iter().filter(|(id, _)| set.contains(id));
        Cpus(kept.map(|(id, cpu)| (*id, *cpu)).collect())
    }

    /// Ids of the groups of a level.
    #[must_use]
    pub fn groups(&self, level: Level) -> BTreeSet<u32> {
        self.0.values().map(|cpu| cpu.at(level)).collect()
    }

    /// Ids of the groups of a level that are within one group of another level.
    #[must_use]
    pub(crate) fn groups_in(&self, level: Level, outer: Level, id: u32) -> BTreeSet<u32> {
        let inside = self.0.values().filter(|cpu| cpu.at(outer) == id);
        inside.map(|cpu| cpu.at(level)).collect()
    }

    /// The CPUs of a group.
    #[must_use]
    pub fn members(&self, level: Level, id: u32) -> CpuSet {
        let inside = self.0.iter().filter(|(_, cpu)| cpu.at(level) == id);
        inside.map(|(id, _)| *id).collect()
    }

    /// Number of CPUs in a group.
    #[must_use]
    pub fn count(&self, level: Level, id: u32) -> usize {
        self.0.values().filter(|cpu| cpu.at(level) == id).count()
    }
}

/// The memory of a NUMA node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryNode {
    /// Total memory in bytes.
    pub memory: u64,
    /// Huge pages: number of pages by page size in bytes.
    pub huge_pages: BTreeMap<u64, u64>,
    /// Distances to other nodes, from the firmware; the node itself has 10.
    pub distances: BTreeMap<u32, u64>,
}

/// Topology of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// The online CPUs.
    pub cpus: Cpus,
    /// All NUMA nodes, including those without CPUs.
    pub nodes: BTreeMap<u32, MemoryNode>,
}

impl Topology {
    fn share(&self, level: Level) -> usize {
        self.cpus
            .len()
            .checked_div(self.cpus.groups(level).len())
            .unwrap_or(0)
    }

    /// CPUs per core, assuming equal cores.
    #[must_use]
    pub(crate) fn cpus_per_core(&self) -> usize {
        self.share(Level::Core)
    }

    /// CPUs per socket, assuming equal sockets.
    #[must_use]
    pub(crate) fn cpus_per_socket(&self) -> usize {
        self.share(Level::Socket)
    }

    /// CPUs per shared cache, assuming equal caches.
    #[must_use]
    pub(crate) fn cpus_per_cache(&self) -> usize {
        self.share(Level::Cache)
    }

    /// Number of groups of a level.
    #[must_use]
    pub(crate) fn group_count(&self, level: Level) -> usize {
        self.cpus.groups(level).len()
    }
}

/// All combinations of `size` items, in the order of the items.
#[must_use]
pub fn combinations(items: &[u32], size: usize) -> Vec<Vec<u32>> {
    fn go(items: &[u32], size: usize, taken: &mut Vec<u32>, all: &mut Vec<Vec<u32>>) {
        if size == 0 {
            all.push(taken.clone());
            return;
        }
        for (index, item) in items.iter().enumerate() {
            if items.len().saturating_sub(index) < size {
                return;
            }
            taken.push(*item);
            let rest = items.get(index.saturating_add(1)..).unwrap_or_default();
            go(rest, size.saturating_sub(1), taken, all);
            taken.pop();
        }
    }
    let mut all = vec![];
    if size > 0 {
        go(items, size, &mut vec![], &mut all);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn combinations_keep_the_order_of_their_items() {
        assert_eq!(
            combinations(&[7, 5, 6], 2),
            [vec![7, 5], vec![7, 6], vec![5, 6]]
        );
        assert_eq!(combinations(&[1, 2], 2), [vec![1, 2]]);
        assert!(combinations(&[1], 2).is_empty() && combinations(&[1], 0).is_empty());
    }
}
