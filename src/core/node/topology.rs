//! How a machine is laid out: its processors by socket, NUMA node, core and shared cache, and its memory by NUMA node
//! (kubelet spec, chapter 14; kubelet's `cm/cpumanager/topology`). Pure.

use std::collections::{BTreeMap, BTreeSet};

use crate::core::cpuset::CpuSet;

/// Where a logical processor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu {
    /// Its NUMA node.
    pub node: u32,
    /// Its socket.
    pub socket: u32,
    /// Its core, by the lowest of the core's processors.
    pub core: u32,
    /// The last-level cache that only some cores of a node share; the socket where there is no such cache.
    pub cache: u32,
}

/// What processors are grouped by.
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

/// Processors, and where they are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cpus(pub BTreeMap<u32, Cpu>);

impl Cpus {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Their numbers.
    #[must_use]
    pub fn all(&self) -> CpuSet {
        self.0.keys().copied().collect()
    }

    /// Those of them that are in a set.
    #[must_use]
    pub fn only(&self, set: &CpuSet) -> Cpus {
        let kept = self.0.iter().filter(|(id, _)| set.contains(id));
        Cpus(kept.map(|(id, cpu)| (*id, *cpu)).collect())
    }

    /// The groups of a level that they belong to.
    #[must_use]
    pub fn groups(&self, level: Level) -> BTreeSet<u32> {
        self.0.values().map(|cpu| cpu.at(level)).collect()
    }

    /// The groups of a level that are in a group of another.
    #[must_use]
    pub fn groups_in(&self, level: Level, outer: Level, id: u32) -> BTreeSet<u32> {
        let inside = self.0.values().filter(|cpu| cpu.at(outer) == id);
        inside.map(|cpu| cpu.at(level)).collect()
    }

    /// The processors of a group.
    #[must_use]
    pub fn members(&self, level: Level, id: u32) -> CpuSet {
        let inside = self.0.iter().filter(|(_, cpu)| cpu.at(level) == id);
        inside.map(|(id, _)| *id).collect()
    }

    /// How many processors a group has.
    #[must_use]
    pub fn count(&self, level: Level, id: u32) -> usize {
        self.0.values().filter(|cpu| cpu.at(level) == id).count()
    }
}

/// The memory of a NUMA node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryNode {
    /// All of it, in bytes.
    pub memory: u64,
    /// Huge pages: the bytes of one, and how many there are.
    pub huge_pages: BTreeMap<u64, u64>,
    /// How far other nodes are, as the firmware says; 10 is the node itself.
    pub distances: BTreeMap<u32, u64>,
}

/// How a machine is laid out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// The processors that are online.
    pub cpus: Cpus,
    /// The NUMA nodes, those without processors included.
    pub nodes: BTreeMap<u32, MemoryNode>,
}

impl Topology {
    fn share(&self, level: Level) -> usize {
        self.cpus
            .len()
            .checked_div(self.cpus.groups(level).len())
            .unwrap_or(0)
    }

    /// The processors of a core, if all have as many.
    #[must_use]
    pub fn cpus_per_core(&self) -> usize {
        self.share(Level::Core)
    }

    /// The processors of a socket, if all have as many.
    #[must_use]
    pub fn cpus_per_socket(&self) -> usize {
        self.share(Level::Socket)
    }

    /// The processors that share a cache, if all caches have as many.
    #[must_use]
    pub fn cpus_per_cache(&self) -> usize {
        self.share(Level::Cache)
    }

    /// How many groups a level has.
    #[must_use]
    pub fn number_of(&self, level: Level) -> usize {
        self.cpus.groups(level).len()
    }
}

/// All ways to take `size` of these, in the order of the items.
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
    fn combinations_come_in_the_order_of_their_items() {
        assert_eq!(
            combinations(&[7, 5, 6], 2),
            [vec![7, 5], vec![7, 6], vec![5, 6]]
        );
        assert_eq!(combinations(&[1, 2], 2), [vec![1, 2]]);
        assert!(combinations(&[1], 2).is_empty() && combinations(&[1], 0).is_empty());
    }
}
