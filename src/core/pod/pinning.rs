//! The CPUs and NUMA nodes that containers are bound to, as the CPU manager and the memory manager have assigned them
//! (KEP-3570, KEP-1769).

use std::collections::BTreeMap;

use crate::cpuset::CpuSet;

/// Bindings by pod uid and container name. Empty if the node binds nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pinning {
    /// The CPUs of containers without exclusive CPUs. `None` if the node assigns no exclusive CPUs.
    pub shared: Option<CpuSet>,
    /// The exclusive CPUs of containers.
    pub exclusive: BTreeMap<String, BTreeMap<String, CpuSet>>,
    /// The NUMA nodes that containers get memory from.
    pub memory: BTreeMap<String, BTreeMap<String, CpuSet>>,
}

impl Pinning {
    fn own(&self, uid: &str, container: &str) -> Option<&CpuSet> {
        self.exclusive.get(uid)?.get(container)
    }

    /// The CPUs that a container may run on. `None` means all.
    #[must_use]
    pub fn cpus(&self, uid: &str, container: &str) -> Option<&CpuSet> {
        let cpus = self.own(uid, container).or(self.shared.as_ref());
        cpus.filter(|set| !set.is_empty())
    }

    /// Whether a container has exclusive CPUs.
    #[must_use]
    pub(crate) fn has_own_cpus(&self, uid: &str, container: &str) -> bool {
        self.own(uid, container).is_some_and(|set| !set.is_empty())
    }

    /// Whether a container of the pod has exclusive CPUs.
    #[must_use]
    pub fn pod_has_own_cpus(&self, uid: &str) -> bool {
        let containers = self.exclusive.get(uid).into_iter().flatten();
        containers.into_iter().any(|(_, set)| !set.is_empty())
    }

    /// The NUMA nodes that a container gets memory from. `None` means all.
    #[must_use]
    pub fn memory_nodes(&self, uid: &str, container: &str) -> Option<&CpuSet> {
        let nodes = self.memory.get(uid)?.get(container)?;
        Some(nodes).filter(|set| !set.is_empty())
    }

    /// The uids of pods with exclusive CPUs or assigned memory.
    pub fn pods(&self) -> impl Iterator<Item = &str> {
        let uids = self.exclusive.keys().chain(self.memory.keys());
        uids.map(String::as_str)
    }
}
