//! Exclusive CPUs (`cpuManagerPolicy: static`, `pkg/kubelet/cm/cpumanager/policy_static.go`). Containers of a
//! Guaranteed pod that request whole CPUs get CPUs that no other container runs on. All other containers share the
//! remaining CPUs, which include the reserved ones unless `strict-cpu-reservation` is set. Pure.
//!
//! The CPUs of an init container are reused by later containers of the pod; a sidecar keeps its own.

mod accumulator;
pub mod checkpoint;

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod};

pub(crate) use accumulator::TakeOptions;
use accumulator::take;

use super::admit::{Refusal, reject, unexpected_error};
use super::hints::{Count, Hint, Hints, NodeMask, Policy, Provider, Subject, max_concurrent};
use super::topology::{Level, Topology};
use crate::cpuset::{CpuSet, format_list};
use crate::pod::qos;
use crate::pod::resources::{Side, of_container};
use crate::pod::{self, Role};

/// `cpuManagerPolicyOptions` of the static policy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Allocates whole cores only (`full-pcpus-only`).
    pub full_cores: bool,
    /// If one NUMA node is not enough, distributes evenly over nodes (`distribute-cpus-across-numa`).
    pub across_nodes: bool,
    /// Aligns to sockets instead of NUMA nodes (`align-by-socket`).
    pub by_socket: bool,
    /// Takes one CPU of each core before a second one (`distribute-cpus-across-cores`).
    pub across_cores: bool,
    /// No containers run on the reserved CPUs (`strict-cpu-reservation`).
    pub strict_reservation: bool,
    /// Prefers CPUs that share a cache (`prefer-align-cpus-by-uncorecache`).
    pub by_cache: bool,
}

/// Configuration of the static policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// The options.
    pub options: Options,
    /// Reserved CPU in millicores (`systemReserved` plus `kubeReserved`); more than 0.
    pub reserved_milli: i64,
    /// The reserved CPUs (`reservedSystemCPUs`). `None` chooses them by number.
    pub reserved: Option<CpuSet>,
}

/// Exclusive CPUs by pod uid and container name.
pub(crate) type Exclusive = BTreeMap<String, BTreeMap<String, CpuSet>>;

/// Content of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// The shared CPUs; empty in a state that was never used.
    pub shared: CpuSet,
    /// CPUs that containers have exclusively.
    pub exclusive: Exclusive,
}

/// A pod's allocation before an admission, to restore it. Its size depends on the machine and the pod, not on the
/// number of pods.
#[derive(Debug, Clone)]
pub struct Snapshot {
    shared: CpuSet,
    own: Option<BTreeMap<String, CpuSet>>,
    reusable: (String, CpuSet),
}

/// The CPUs of a machine and their allocations.
#[derive(Debug, Clone)]
pub struct Cpus {
    topology: Arc<Topology>,
    options: Options,
    reserved: CpuSet,
    /// The reserved CPUs and their siblings on the same cores.
    reserved_cores: CpuSet,
    state: State,
    /// Uid of a pod, and CPUs of its init containers that no later container has taken over yet.
    reusable: (String, CpuSet),
}

impl Cpus {
    /// A machine without allocations.
    ///
    /// # Errors
    ///
    /// The rules do not fit the machine.
    pub fn new(
        rules: &Rules,
        alignment: Option<Policy>,
        topology: Arc<Topology>,
    ) -> Result<Cpus, String> {
        let options = rules.options;
        check_options(options, alignment, &topology)?;
        let mut cpus = Cpus {
            options,
            reserved: CpuSet::new(),
            reserved_cores: CpuSet::new(),
            state: State::default(),
            reusable: (String::new(), CpuSet::new()),
            topology,
        };
        cpus.reserve(rules)?;
        cpus.state.shared = cpus.usable();
        Ok(cpus)
    }

    /// All CPUs that containers may run on.
    fn usable(&self) -> CpuSet {
        let all = self.topology.cpus.all();
        match self.options.strict_reservation {
            true => &all - &self.reserved,
            false => all,
        }
    }

    fn reserve(&mut self, rules: &Rules) -> Result<(), String> {
        let all = self.topology.cpus.all();
        self.reserved = match &rules.reserved {
            Some(reserved) if !reserved.is_subset(&all) => {
                return Err(format!(
                    "reservedSystemCPUs: this machine does not have CPUs {}; it has {}",
                    format_list(&(reserved - &all)),
                    format_list(&all)
                ));
            }
            Some(reserved) => reserved.clone(),
            None => {
                let whole = rules.reserved_milli.max(0).unsigned_abs().div_ceil(1000);
                let number = usize::try_from(whole).unwrap_or(usize::MAX);
                self.take(&all, number).map_err(|_| {
                    format!(
                        "systemReserved and kubeReserved reserve {number} CPUs, but this machine has only {}",
                        all.len()
                    )
                })?
            }
        };
        let cores = self
            .topology
            .cpus
            .intersection(&self.reserved)
            .groups(Level::Core);
        let members = |core| self.topology.cpus.members(Level::Core, core);
        self.reserved_cores = cores.into_iter().flat_map(members).collect();
        Ok(())
    }

    /// Restores allocations from a checkpoint.
    ///
    /// # Errors
    ///
    /// The state does not fit the rules or the machine.
    pub fn load(&mut self, state: State) -> Result<(), String> {
        let strict = self.options.strict_reservation;
        let State { shared, exclusive } = &state;
        if shared.is_empty() && exclusive.is_empty() {
            return Ok(());
        }
        let allocated = || {
            exclusive
                .iter()
                .flat_map(|(uid, c)| c.iter().map(move |(n, s)| (uid, n, s)))
        };
        // With strict reservation, all other CPUs may be exclusive, so the shared set can be empty.
        if shared.is_empty() && !strict {
            return Err("it has exclusive CPUs and no shared ones".into());
        }
        if strict && !self.reserved.is_disjoint(shared) {
            return Err(format!(
                "the strictly reserved CPUs {} are shared in it",
                format_list(&(&self.reserved & shared))
            ));
        }
        if !strict && !self.reserved.is_subset(shared) {
            return Err(format!(
                "not all of the reserved CPUs {} are shared in it ({})",
                format_list(&self.reserved),
                format_list(shared)
            ));
        }
        if let Some((uid, container, own)) =
            allocated().find(|(_, _, own)| !own.is_disjoint(shared))
        {
            return Err(format!(
                "CPUs {} are shared in it, but exclusive to container {container} of pod {uid}",
                format_list(&(own & shared))
            ));
        }
        let mut known = shared.clone();
        known.extend(allocated().flat_map(|(_, _, own)| own));
        if known != self.usable() {
            return Err(format!(
                "it was written on a machine with the CPUs {}; this machine has {}",
                format_list(&known),
                format_list(&self.usable())
            ));
        }
        self.state = state;
        Ok(())
    }

    fn take_options(&self) -> TakeOptions {
        let group = match self.options.full_cores {
            true => self.topology.cpus_per_core(),
            false => 1,
        };
        TakeOptions {
            spread: self.options.across_cores,
            align_to_caches: self.options.by_cache,
            numa_group_size: self.options.across_nodes.then_some(group),
        }
    }

    fn take(&self, free: &CpuSet, number: usize) -> Result<CpuSet, accumulator::NotEnough> {
        take(&self.topology, free, number, self.take_options())
    }

    /// The shared CPUs and the exclusive allocations.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// All CPUs that can be allocated exclusively.
    #[must_use]
    pub fn allocatable(&self) -> CpuSet {
        &self.topology.cpus.all() - &self.reserved
    }

    /// Shared CPUs that can still be allocated exclusively.
    #[must_use]
    pub fn free(&self) -> CpuSet {
        &self.state.shared - &self.reserved
    }

    /// The machine's topology.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The pod's current allocation, for [`Cpus::restore`].
    #[must_use]
    pub fn snapshot(&self, uid: &str) -> Snapshot {
        Snapshot {
            shared: self.state.shared.clone(),
            own: self.state.exclusive.get(uid).cloned(),
            reusable: self.reusable.clone(),
        }
    }

    /// Restores a pod's allocation. Requires that no other pod was allocated CPUs in between.
    pub fn restore(&mut self, uid: &str, before: Snapshot) {
        self.state.shared = before.shared;
        self.reusable = before.reusable;
        match before.own {
            Some(own) => self.state.exclusive.insert(uid.to_owned(), own),
            None => self.state.exclusive.remove(uid),
        };
    }

    /// Whether a pod has exclusive CPUs.
    #[must_use]
    pub fn has(&self, uid: &str) -> bool {
        self.state.exclusive.contains_key(uid)
    }

    /// Releases a pod's CPUs; returns whether it had any.
    pub fn release(&mut self, uid: &str) -> bool {
        if self.reusable.0 == uid {
            self.reusable = (String::new(), CpuSet::new());
        }
        let Some(containers) = self.state.exclusive.remove(uid) else {
            return false;
        };
        self.state.shared.extend(containers.into_values().flatten());
        true
    }

    fn reusable(&self, uid: &str) -> CpuSet {
        match self.reusable.0 == uid {
            true => self.reusable.1.clone(),
            false => CpuSet::new(),
        }
    }

    /// Marks an init container's CPUs as reusable, and those of other containers as not reusable.
    fn update_reusable(&mut self, uid: &str, role: Role, own: &CpuSet) {
        let reusable = self.reusable(uid);
        let now = match role {
            Role::Init => &reusable | own,
            _ => &reusable - own,
        };
        self.reusable = (uid.to_owned(), now);
    }

    fn check_cores(&self, number: usize) -> Result<(), Refusal> {
        let per_core = self.topology.cpus_per_core();
        if !self.options.full_cores || per_core == 0 {
            return Ok(());
        }
        let refusal =
            |why: String| reject("SMTAlignmentError", format!("SMT Alignment Error: {why}"));
        if !number.is_multiple_of(per_core) {
            return Err(refusal(format!(
                "requested {number} cpus not multiple cpus per core = {per_core}"
            )));
        }
        let available = (&self.state.shared - &self.reserved_cores).len();
        if number > available {
            return Err(refusal(format!(
                "not enough free physical CPUs: available physical CPUs = {available}, requested CPUs = {number}, CPUs per core = {per_core}"
            )));
        }
        Ok(())
    }

    /// The free CPUs of these NUMA nodes, or of the sockets that contain them (`align-by-socket`).
    fn cpus_near(&self, nodes: NodeMask, free: &CpuSet) -> CpuSet {
        let cpus = &self.topology.cpus;
        let of = |level: Level, id: u32| cpus.members(level, id);
        let near: CpuSet = match self.options.by_socket {
            false => nodes
                .nodes()
                .into_iter()
                .flat_map(|n| of(Level::Node, n))
                .collect(),
            true => self
                .sockets(nodes)
                .into_iter()
                .flat_map(|s| of(Level::Socket, s))
                .collect(),
        };
        &near & free
    }

    fn sockets(&self, nodes: NodeMask) -> CpuSet {
        let of = |node| {
            self.topology
                .cpus
                .groups_in(Level::Socket, Level::Node, node)
        };
        nodes.nodes().into_iter().flat_map(of).collect()
    }

    fn choose(&self, number: usize, affinity: Hint, reusable: &CpuSet) -> Result<CpuSet, Refusal> {
        let free = &self.free() | reusable;
        let take = |free: &CpuSet, number| self.take(free, number).map_err(unexpected_error);
        let mut chosen = CpuSet::new();
        if let Some(nodes) = affinity.nodes {
            let near = self.cpus_near(nodes, &free);
            chosen = take(&near, number.min(near.len()))?;
        }
        let rest = take(&(&free - &chosen), number.saturating_sub(chosen.len()))?;
        chosen.extend(rest);
        Ok(chosen)
    }

    fn hints_for(&self, available: &CpuSet, reusable: &CpuSet, number: usize) -> Vec<Hint> {
        let cpus = &self.topology.cpus;
        let nodes: Vec<u32> = cpus.groups(Level::Node).into_iter().collect();
        let of = |set: &CpuSet| -> Vec<u32> {
            let nodes = cpus.intersection(set);
            nodes.0.values().map(|cpu| cpu.node).collect()
        };
        let (all, available, reusable) = (of(&cpus.all()), of(available), of(reusable));
        let within = |list: &[u32], mask: NodeMask| list.iter().filter(|n| mask.has(**n)).count();
        let mut fewest = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
        let mut masks = vec![];
        for mask in NodeMask::all_of(&nodes) {
            if within(&all, mask) >= number {
                fewest = fewest.min(mask.count());
            }
            let reused = within(&reusable, mask);
            if reused == reusable.len() && reused.saturating_add(within(&available, mask)) >= number
            {
                masks.push(mask);
            }
        }
        let hint = |mask: NodeMask| Hint {
            nodes: Some(mask),
            preferred: mask.count() == fewest || self.is_by_socket(mask, fewest),
        };
        masks.into_iter().map(hint).collect()
    }

    /// Whether these NUMA nodes span only as many sockets as `fewest` nodes need.
    fn is_by_socket(&self, mask: NodeMask, fewest: u32) -> bool {
        let number = |level| self.topology.group_count(level);
        let per_socket = number(Level::Node).checked_div(number(Level::Socket));
        let Some(per_socket) = per_socket.filter(|n| self.options.by_socket && *n > 0) else {
            return false;
        };
        let fewest = usize::try_from(fewest).unwrap_or(usize::MAX);
        self.sockets(mask).len() == fewest.div_ceil(per_socket)
    }

    fn container_hints(&self, pod: &Pod, container: &Container) -> Option<Vec<Hint>> {
        let number = wanted(pod, container);
        if number == 0 {
            return None;
        }
        let (uid, none) = (pod::uid(pod), CpuSet::new());
        let allocated = self.state.exclusive.get(uid);
        match allocated.and_then(|c| c.get(&container.name)) {
            Some(own) if own.len() != number => Some(vec![]),
            Some(own) => Some(self.hints_for(own, &none, number)),
            None => Some(self.hints_for(&self.free(), &self.reusable(uid), number)),
        }
    }

    fn pod_hints(&self, pod: &Pod) -> Option<Vec<Hint>> {
        let number = wanted_by_pod(pod);
        if number == 0 {
            return None;
        }
        let (uid, none) = (pod::uid(pod), CpuSet::new());
        let mut assigned = CpuSet::new();
        for (role, container) in pod::containers(pod) {
            let allocated = self.state.exclusive.get(uid);
            let own = allocated.and_then(|c| c.get(&container.name));
            if let Some(own) = own.filter(|_| role != Role::Ephemeral) {
                if own.len() != wanted(pod, &container) {
                    return Some(vec![]);
                }
                assigned.extend(own);
            }
        }
        if assigned.len() == number {
            return Some(self.hints_for(&assigned, &none, number));
        }
        let reusable = &self.reusable(uid) | &assigned;
        Some(self.hints_for(&self.free(), &reusable, number))
    }

    /// Allocates CPUs for a container. Returns an empty set if the container already has its CPUs.
    fn allocate_container(
        &mut self,
        uid: &str,
        role: Role,
        container: &str,
        number: usize,
        affinity: Hint,
    ) -> Result<CpuSet, Refusal> {
        let allocated = self.state.exclusive.get(uid);
        if let Some(own) = allocated.and_then(|c| c.get(container)).cloned() {
            self.update_reusable(uid, role, &own);
            return Ok(CpuSet::new());
        }
        self.check_cores(number)?;
        let own = self.choose(number, affinity, &self.reusable(uid))?;
        self.state.shared.retain(|cpu| !own.contains(cpu));
        self.update_reusable(uid, role, &own);
        let containers = self.state.exclusive.entry(uid.to_owned()).or_default();
        containers.insert(container.to_owned(), own.clone());
        Ok(own)
    }
}

impl Provider for Cpus {
    fn hints(&self, subject: Subject<'_>) -> Hints {
        let hints = match subject {
            Subject::Container(pod, container) => self.container_hints(pod, container),
            Subject::Pod(pod) => self.pod_hints(pod),
        };
        hints.into_iter().map(|h| ("cpu".to_owned(), h)).collect()
    }

    fn allocate(
        &mut self,
        pod: &Pod,
        role: Role,
        container: &Container,
        affinity: Hint,
        counts: &mut Vec<Count>,
    ) -> Result<(), Refusal> {
        let number = wanted(pod, container);
        if number == 0 {
            return Ok(());
        }
        counts.push(Count::CpuPinning);
        let own = self.allocate_container(pod::uid(pod), role, &container.name, number, affinity);
        let full = self.options.full_cores;
        match &own {
            Ok(own) => {
                let caches = self.topology.cpus.intersection(own).groups(Level::Cache);
                counts.extend((caches.len() == 1).then_some(Count::OneCache));
                counts.extend(full.then_some(Count::WholeCores));
            }
            Err(_) => {
                counts.push(Count::CpuPinningError);
                counts.extend(full.then_some(Count::NoWholeCores));
            }
        }
        own.map(drop)
    }
}

fn check_options(
    options: Options,
    alignment: Option<Policy>,
    topology: &Topology,
) -> Result<(), String> {
    if topology.cpus.is_empty() {
        return Err("cpuManagerPolicy: static needs the machine's topology, which cannot be read from /sys/devices/system/cpu".into());
    }
    if !options.by_socket {
        return Ok(());
    }
    if alignment == Some(Policy::SingleNode) {
        return Err("cpuManagerPolicyOptions.align-by-socket contradicts topologyManagerPolicy: single-numa-node: remove one of them".into());
    }
    let number = |level| topology.group_count(level);
    if number(Level::Socket) > number(Level::Node) {
        return Err(format!(
            "cpuManagerPolicyOptions.align-by-socket has no effect on this machine, which has {} sockets and {} NUMA nodes: remove it",
            number(Level::Socket),
            number(Level::Node)
        ));
    }
    Ok(())
}

/// Number of exclusive CPUs of a container: its CPU request, if that is whole and the pod is Guaranteed by its
/// containers. Zero if resources are set at pod level.
#[must_use]
pub fn wanted(pod: &Pod, container: &Container) -> usize {
    if !qos::is_guaranteed_by_containers(pod) {
        return 0;
    }
    let of = |side| of_container(container, side).get("cpu").copied();
    let Some(cpu) = of(Side::Requests).or_else(|| of(Side::Limits)) else {
        return 0;
    };
    match cpu.milli() % 1000 {
        0 => usize::try_from(cpu.milli() / 1000).unwrap_or(0),
        _ => 0,
    }
}

/// The maximum number of exclusive CPUs that the pod's containers use at the same time.
fn wanted_by_pod(pod: &Pod) -> usize {
    let of = |container: &Container| {
        let number = u64::try_from(wanted(pod, container)).unwrap_or(u64::MAX);
        BTreeMap::from([("cpu".to_owned(), number)])
    };
    let most = max_concurrent(pod, of).get("cpu").copied().unwrap_or(0);
    usize::try_from(most).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests;
