//! Which processors and which memory containers are bound to, as the node's managers have it now
//! (KEP-3570, KEP-1769).

use std::collections::BTreeMap;

use crate::core::cpuset::CpuSet;

/// What is bound to what, by pod uid and container. Empty where the node binds nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pinning {
    /// The processors that containers share which have none of their own; none where the node gives nobody his own.
    pub shared: Option<CpuSet>,
    /// The processors that containers have for themselves.
    pub exclusive: BTreeMap<String, BTreeMap<String, CpuSet>>,
    /// The NUMA nodes that containers have memory from.
    pub memory: BTreeMap<String, BTreeMap<String, CpuSet>>,
}

impl Pinning {
    fn own(&self, uid: &str, container: &str) -> Option<&CpuSet> {
        self.exclusive.get(uid)?.get(container)
    }

    /// The processors that a container runs on; none where it may run on all.
    #[must_use]
    pub fn cpus(&self, uid: &str, container: &str) -> Option<&CpuSet> {
        let cpus = self.own(uid, container).or(self.shared.as_ref());
        cpus.filter(|set| !set.is_empty())
    }

    /// Whether a container has processors for itself.
    #[must_use]
    pub fn has_own_cpus(&self, uid: &str, container: &str) -> bool {
        self.own(uid, container).is_some_and(|set| !set.is_empty())
    }

    /// Whether one of a pod's containers has.
    #[must_use]
    pub fn pod_has_own_cpus(&self, uid: &str) -> bool {
        let containers = self.exclusive.get(uid).into_iter().flatten();
        containers.into_iter().any(|(_, set)| !set.is_empty())
    }

    /// The NUMA nodes that a container's memory comes from; none where it may come from all.
    #[must_use]
    pub fn memory_nodes(&self, uid: &str, container: &str) -> Option<&CpuSet> {
        let nodes = self.memory.get(uid)?.get(container)?;
        Some(nodes).filter(|set| !set.is_empty())
    }

    /// The pods that have something for themselves.
    pub fn pods(&self) -> impl Iterator<Item = &str> {
        let uids = self.exclusive.keys().chain(self.memory.keys());
        uids.map(String::as_str)
    }
}
