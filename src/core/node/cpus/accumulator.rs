//! Chooses CPUs for a container out of the free ones: whole NUMA nodes, sockets and cores first. Among these, groups
//! with the fewest free CPUs come first, so that large free groups stay whole. Follows
//! `pkg/kubelet/cm/cpumanager/cpu_assignment.go`, and KEP-2902 for distribution over NUMA nodes. Pure.

use std::collections::BTreeMap;

use crate::cpuset::CpuSet;
use crate::node::topology::{Cpus, Level, Topology, combinations};

/// How CPUs are chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TakeOptions {
    /// Takes one CPU of each core before a second one (`distribute-cpus-across-cores`).
    pub spread: bool,
    /// Prefers CPUs that share a cache (`prefer-align-cpus-by-uncorecache`).
    pub align_to_caches: bool,
    /// Distributes evenly over the fewest possible NUMA nodes, in groups of this size (`distribute-cpus-across-numa`).
    pub numa_group_size: Option<usize>,
}

/// Too few CPUs are free; the message is the kubelet's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "not enough cpus available to satisfy request: requested={requested}, available={available}"
)]
pub(crate) struct NotEnough {
    /// Requested number of CPUs.
    pub requested: usize,
    /// Number of free CPUs.
    pub available: usize,
}

/// Takes `number` of the free CPUs.
pub fn take(
    topology: &Topology,
    free: &CpuSet,
    number: usize,
    options: TakeOptions,
) -> Result<CpuSet, NotEnough> {
    let free = topology.cpus.intersection(free);
    if number > free.len() {
        return Err(NotEnough {
            requested: number,
            available: free.len(),
        });
    }
    Ok(match options.numa_group_size {
        Some(group) if group > 0 && number.is_multiple_of(group) => {
            distributed(topology, &free, number, group, options.spread)
        }
        _ => packed(topology, free, number, options),
    })
}

fn packed(topology: &Topology, free: Cpus, number: usize, options: TakeOptions) -> CpuSet {
    let mut taking = Accumulator::new(topology, free, number);
    let [first, second] = taking.outer();
    taking.take_whole(first);
    taking.take_whole(second);
    if options.align_to_caches && options.numa_group_size.is_none() {
        taking.take_caches();
    }
    if !options.spread {
        taking.take_whole(Level::Core);
    }
    taking.take_single(options.spread);
    taking.taken
}

struct Accumulator<'a> {
    topology: &'a Topology,
    free: Cpus,
    needed: usize,
    taken: CpuSet,
}

impl<'a> Accumulator<'a> {
    fn new(topology: &'a Topology, free: Cpus, needed: usize) -> Accumulator<'a> {
        Accumulator {
            topology,
            free,
            needed,
            taken: CpuSet::new(),
        }
    }

    /// NUMA nodes and sockets, the containing level first.
    fn outer(&self) -> [Level; 2] {
        let number = |level| self.topology.group_count(level);
        if number(Level::Socket) >= number(Level::Node) {
            [Level::Node, Level::Socket]
        } else {
            [Level::Socket, Level::Node]
        }
    }

    fn take(&mut self, cpus: &CpuSet) {
        self.free.0.retain(|id, _| !cpus.contains(id));
        self.taken.extend(cpus);
        self.needed = self.needed.saturating_sub(cpus.len());
    }

    /// Sorts groups by number of free CPUs, fewest first.
    fn fewest_free_first(&self, ids: impl IntoIterator<Item = u32>, level: Level) -> Vec<u32> {
        let mut ids: Vec<u32> = ids.into_iter().collect();
        ids.sort_by_key(|id| (self.free.count(level, *id), *id));
        ids
    }

    fn inside(&self, outer: Level, ids: &[u32], level: Level) -> Vec<u32> {
        let groups = ids
            .iter()
            .map(|id| self.fewest_free_first(self.free.groups_in(level, outer, *id), level));
        groups.flatten().collect()
    }

    /// The groups of a level with at least one free CPU, fewest free first, sorted within the groups of the outer
    /// levels.
    fn sorted(&self, level: Level) -> Vec<u32> {
        let [first, second] = self.outer();
        match level {
            level if level == first => self.fewest_free_first(self.free.groups(first), first),
            level if level == second => self.inside(first, &self.sorted(first), second),
            Level::Core => self.inside(second, &self.sorted(second), Level::Core),
            _ => self.inside(Level::Node, &self.sorted(Level::Node), level),
        }
    }

    fn is_whole(&self, level: Level, id: u32) -> bool {
        let whole = match level {
            Level::Core => self.topology.cpus_per_core(),
            Level::Socket => self.topology.cpus_per_socket(),
            Level::Node | Level::Cache => self.topology.cpus.count(level, id),
        };
        self.free.count(level, id) == whole
    }

    fn take_whole(&mut self, level: Level) {
        let whole: Vec<u32> = self
            .sorted(level)
            .into_iter()
            .filter(|id| self.is_whole(level, *id))
            .collect();
        for id in whole {
            let cpus = self.free.members(level, id);
            if self.needed > 0 && self.needed >= cpus.len() {
                self.take(&cpus);
            }
        }
    }

    fn take_caches(&mut self) {
        for id in self.sorted(Level::Cache) {
            if self.needed >= self.topology.cpus_per_cache() {
                self.take_whole(Level::Cache);
            }
            if self.needed == 0 {
                return;
            }
            self.take_part_of_cache(id);
        }
    }

    /// Takes all CPUs that are still needed from one cache, in whole cores except for the last.
    fn take_part_of_cache(&mut self, id: u32) {
        let per_core = self.topology.cpus_per_core();
        let cores = self.free.groups_in(Level::Core, Level::Cache, id);
        let cores = cores.into_iter().take(self.needed.div_ceil(per_core));
        let mut cpus: CpuSet = cores
            .flat_map(|core| self.free.members(Level::Core, core))
            .collect();
        if per_core > 1 && !self.needed.is_multiple_of(2) && cpus.len() > self.needed {
            cpus.pop_last();
        }
        if cpus.len() == self.needed {
            self.take(&cpus);
        }
    }

    fn take_single(&mut self, spread: bool) {
        let level = if spread { Level::Socket } else { Level::Core };
        let groups = self.sorted(level).into_iter();
        let cpus = groups.flat_map(|id| self.free.members(level, id));
        let cpus: CpuSet = cpus
            .collect::<Vec<_>>()
            .into_iter()
            .take(self.needed)
            .collect();
        self.take(&cpus);
    }
}

/// Distributes evenly over the fewest possible NUMA nodes. If no set of nodes has room for equal parts, packs instead.
fn distributed(
    topology: &Topology,
    free: &Cpus,
    number: usize,
    group: usize,
    spread: bool,
) -> CpuSet {
    let taking = Accumulator::new(topology, free.clone(), number);
    let nodes = taking.sorted(Level::Node);
    let (fewest, most) = node_range(topology, nodes.len(), number, group);
    let plain = TakeOptions {
        spread,
        ..TakeOptions::default()
    };
    for size in fewest..=most {
        let fit = |combination: Vec<u32>| Split::of(free, &nodes, combination, number, group);
        let splits = combinations(&nodes, size).into_iter().filter_map(fit);
        // The first of the splits after which the nodes have the most equal numbers of free CPUs.
        let Some(split) = splits.min_by_key(|split| split.imbalance) else {
            continue;
        };
        let mut taking = Accumulator::new(topology, free.clone(), number);
        for (node, count) in split.takes {
            let node_cpus = taking.free.members(Level::Node, node);
            let cpus = packed(topology, taking.free.intersection(&node_cpus), count, plain);
            taking.take(&cpus);
        }
        return taking.taken;
    }
    packed(topology, free.clone(), number, plain)
}

/// Minimum and maximum number of NUMA nodes to use.
fn node_range(
    topology: &Topology,
    free_nodes: usize,
    number: usize,
    group: usize,
) -> (usize, usize) {
    let groups = number.div_ceil(group);
    let all = topology.cpus.len().div_ceil(group);
    let per_node = all.div_ceil(topology.group_count(Level::Node).max(1));
    (groups.div_ceil(per_node.max(1)), groups.min(free_nodes))
}

/// How many CPUs are taken from each node, in this order.
struct Split {
    takes: Vec<(u32, usize)>,
    /// Variance of the nodes' remaining free CPUs, times a constant.
    imbalance: u64,
}

impl Split {
    fn of(
        free: &Cpus,
        nodes: &[u32],
        combination: Vec<u32>,
        number: usize,
        group: usize,
    ) -> Option<Split> {
        let count = |node: u32| free.count(Level::Node, node);
        // Rounds down to a multiple of the group size.
        let grouped = |n: usize| n.saturating_sub(n.checked_rem(group).unwrap_or(0));
        let in_groups: usize = combination.iter().map(|n| grouped(count(*n))).sum();
        let each = grouped(number.checked_div(combination.len()).unwrap_or(0));
        if in_groups < number || combination.iter().any(|n| count(*n) < each) {
            return None;
        }
        let mut remaining: BTreeMap<u32, usize> = nodes.iter().map(|n| (*n, count(*n))).collect();
        for node in &combination {
            remaining
                .entry(*node)
                .and_modify(|remaining| *remaining = remaining.saturating_sub(each));
        }
        let takes: Vec<(u32, usize)> = combination.iter().map(|n| (*n, each)).collect();
        let rest = number.saturating_sub(each.saturating_mul(combination.len()));
        if rest == 0 {
            let imbalance = imbalance(&remaining);
            return Some(Split { takes, imbalance });
        }
        let able: Vec<u32> = combination
            .into_iter()
            .filter(|n| remaining[n] >= group)
            .collect();
        let mut best: Option<Split> = None;
        // Tries more nodes first; a split over fewer nodes wins only if it leaves the nodes more equal.
        for size in (1..=able.len()).rev() {
            for subset in combinations(&able, size) {
                let split = distribute_rest(&remaining, &takes, &subset, rest, group);
                if let Some(split) = split
                    && best.as_ref().is_none_or(|b| split.imbalance < b.imbalance)
                {
                    best = Some(split);
                }
            }
        }
        best
    }
}

/// Takes the rest group by group from the nodes of `subset` in turn.
fn distribute_rest(
    remaining: &BTreeMap<u32, usize>,
    takes: &[(u32, usize)],
    subset: &[u32],
    mut rest: usize,
    group: usize,
) -> Option<Split> {
    let (mut remaining, mut takes) = (remaining.clone(), takes.to_vec());
    while rest > 0 {
        let before = rest;
        for node in subset {
            if rest > 0 && remaining[node] >= group {
                remaining
                    .entry(*node)
                    .and_modify(|remaining| *remaining = remaining.saturating_sub(group));
                takes.push((*node, group));
                rest = rest.saturating_sub(group);
            }
        }
        if rest == before {
            return None;
        }
    }
    let imbalance = imbalance(&remaining);
    Some(Split { takes, imbalance })
}

fn imbalance(remaining: &BTreeMap<u32, usize>) -> u64 {
    let values = || {
        remaining
            .values()
            .map(|n| u64::try_from(*n).unwrap_or(u64::MAX))
    };
    let (sum, squares): (u64, u64) = (values().sum(), values().map(|v| v.saturating_mul(v)).sum());
    let number = u64::try_from(remaining.len()).unwrap_or(0);
    number
        .saturating_mul(squares)
        .saturating_sub(sum.saturating_mul(sum))
}
