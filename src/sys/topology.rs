//! The machine's topology from `/sys/devices/system`: processors
//! by NUMA node, socket, core and cache, and memory by NUMA node.
//!
//! The numbers equal those of cAdvisor (`utils/sysinfo`), so that assignments made by the kubelet stay valid.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use super::file::read_text;
use holdfast_core::cpuset::parse_list;
use holdfast_core::node::topology::{Cpu, Cpus, MemoryNode, Topology};

/// The size limit for reading a file, in bytes.
const LIMIT: u64 = 64 << 10;
/// Maximum number of directory entries to read.
const ENTRIES: usize = 16_384;

/// The directory in sysfs.
pub const SYSTEM: &str = "/sys/devices/system";

fn text(path: &Path) -> Option<String> {
    Some(read_text(path, LIMIT).ok()?.trim().to_owned())
}

fn number<T: std::str::FromStr>(path: &Path) -> Option<T> {
    text(path)?.parse().ok()
}

/// The numbers in names that consist of `prefix` and a number.
fn numbered(dir: &Path, prefix: &str) -> BTreeSet<u32> {
    let entries = fs::read_dir(dir).into_iter().flatten().take(ENTRIES);
    let number = |entry: fs::DirEntry| {
        let name = entry.file_name();
        name.to_str()?.strip_prefix(prefix)?.parse().ok()
    };
    entries.filter_map(Result::ok).filter_map(number).collect()
}

/// The core of a processor: its socket and core id. `None` if it is offline.
fn core(cpu: &Path) -> Option<(u32, u32)> {
    if text(&cpu.join("online")).is_some_and(|online| online == "0") {
        return None;
    }
    let of = |name: &str| number(&cpu.join("topology").join(name));
    Some((of("physical_package_id")?, of("core_id")?))
}

/// The id of a cache above level 2 that a processor shares with some, but not with all `all` processors of its node.
fn shared_cache(cpu: &Path, all: usize) -> Option<u32> {
    let indices = numbered(&cpu.join("cache"), "index");
    let cache = |index: u32| {
        let dir = cpu.join(format!("cache/index{index}"));
        let level: u32 = number(&dir.join("level"))?;
        let sharing = parse_list(&text(&dir.join("shared_cpu_list"))?)?.len();
        let id: u32 = number(&dir.join("id"))?;
        (level > 2 && sharing != all).then_some(id)
    };
    indices.into_iter().find_map(cache)
}

/// The processors of a node.
fn cpus(system: &Path, node: u32, numbers: &BTreeSet<u32>) -> BTreeMap<u32, Cpu> {
    let path = |cpu: u32| system.join(format!("cpu/cpu{cpu}"));
    let mut cores: BTreeMap<(u32, u32), Vec<u32>> = BTreeMap::new();
    for cpu in numbers {
        if let Some(core) = core(&path(*cpu)) {
            cores.entry(core).or_default().push(*cpu);
        }
    }
    let number_of_cores = cores.len();
    let of = |((socket, _), threads): ((u32, u32), Vec<u32>)| {
        let first = threads.first().copied().unwrap_or(0);
        let cache = shared_cache(&path(first), number_of_cores * threads.len());
        let cpu = Cpu {
            node,
            socket,
            core: first,
            cache: cache.unwrap_or(socket),
        };
        threads.into_iter().map(move |id| (id, cpu))
    };
    cores.into_iter().flat_map(of).collect()
}

/// The pools of huge pages below a directory: the number of pages by page size in bytes. Blocking.
pub(super) fn huge_pages(pools: &Path) -> BTreeMap<u64, u64> {
    let entries = fs::read_dir(pools).into_iter().flatten().take(ENTRIES);
    let pool = |entry: fs::DirEntry| {
        let name = entry.file_name();
        let size = name.to_str()?.strip_prefix("hugepages-")?;
        let kilobytes: u64 = size.strip_suffix("kB")?.parse().ok()?;
        let pages = number(&entry.path().join("nr_hugepages"))?;
        Some((kilobytes.saturating_mul(1024), pages))
    };
    entries.filter_map(Result::ok).filter_map(pool).collect()
}

fn memory(dir: &Path, nodes: &BTreeSet<u32>) -> MemoryNode {
    let info = text(&dir.join("meminfo")).unwrap_or_default();
    let total = info.lines().find_map(|line| {
        let (_, rest) = line.split_once("MemTotal:")?;
        rest.trim()
            .trim_end_matches("kB")
            .trim()
            .parse::<u64>()
            .ok()
    });
    let distances = text(&dir.join("distance")).unwrap_or_default();
    let distances = distances.split_whitespace().map(|d| d.parse().unwrap_or(0));
    MemoryNode {
        memory: total.unwrap_or(0).saturating_mul(1024),
        huge_pages: huge_pages(&dir.join("hugepages")),
        distances: nodes.iter().copied().zip(distances).collect(),
    }
}

/// Reads the topology below `system` ([`SYSTEM`]). Unreadable parts are missing. Blocking.
#[must_use]
pub fn read(system: &Path) -> Topology {
    let nodes = numbered(&system.join("node"), "node");
    let mut topology = Topology::default();
    for node in &nodes {
        let dir = system.join(format!("node/node{node}"));
        topology.nodes.insert(*node, memory(&dir, &nodes));
        let own = cpus(system, *node, &numbered(&dir, "cpu"));
        topology.cpus.0.extend(own);
    }
    if nodes.is_empty() {
        read_without_nodes(system, &mut topology);
    }
    topology
}

/// On a kernel without NUMA, each socket counts as a node.
fn read_without_nodes(system: &Path, topology: &mut Topology) {
    let all = numbered(&system.join("cpu"), "cpu");
    let mut sockets: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for cpu in all {
        if let Some((socket, _)) = core(&system.join(format!("cpu/cpu{cpu}"))) {
            sockets.entry(socket).or_default().insert(cpu);
        }
    }
    for (socket, members) in sockets {
        topology.nodes.insert(socket, MemoryNode::default());
        topology.cpus = Cpus(
            std::mem::take(&mut topology.cpus.0)
                .into_iter()
                .chain(cpus(system, socket, &members))
                .collect(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        fs::write(path, format!("{text}\n")).expect("written");
    }

    /// Two sockets with a node each, four threads on two cores; processor 5 is offline. The
    /// cores of the first node have separate caches; those of the second share a cache.
    fn machine(root: &Path) {
        for cpu in 0..8_u32 {
            let (socket, core, dir) = (cpu / 4, cpu % 2, format!("cpu/cpu{cpu}"));
            if cpu == 5 {
                put(root, &format!("{dir}/online"), "0");
            } else {
                put(
                    root,
                    &format!("{dir}/topology/physical_package_id"),
                    &socket.to_string(),
                );
                put(root, &format!("{dir}/topology/core_id"), &core.to_string());
                let (id, list) = match socket {
                    0 => (core + 7, format!("{core},{}", core + 2)),
                    _ => (9, "4,6-7".to_owned()),
                };
                put(root, &format!("{dir}/cache/index3/level"), "3");
                put(root, &format!("{dir}/cache/index3/id"), &id.to_string());
                put(root, &format!("{dir}/cache/index3/shared_cpu_list"), &list);
            }
            put(root, &format!("node/node{socket}/cpu{cpu}/present"), "");
        }
        for node in 0..2_u64 {
            let dir = format!("node/node{node}");
            put(
                root,
                &format!("{dir}/meminfo"),
                &format!("Node {node} MemTotal:       {} kB", node + 4),
            );
            put(
                root,
                &format!("{dir}/hugepages/hugepages-2048kB/nr_hugepages"),
                "3",
            );
            put(
                root,
                &format!("{dir}/distance"),
                if node == 0 { "10 21" } else { "21 10" },
            );
        }
    }

    #[test]
    fn the_topology_is_read_from_sysfs() {
        let dir = tempfile::tempdir().expect("a directory");
        machine(dir.path());
        let topology = read(dir.path());
        let shown = topology
            .cpus
            .0
            .iter()
            .map(|(id, c)| (*id, c.node, c.socket, c.core, c.cache));
        assert_eq!(
            shown.collect::<Vec<_>>(),
            [
                (0, 0, 0, 0, 7),
                (1, 0, 0, 1, 8),
                (2, 0, 0, 0, 7),
                (3, 0, 0, 1, 8),
                (4, 1, 1, 4, 9),
                (6, 1, 1, 4, 9),
                (7, 1, 1, 7, 9),
            ]
        );
        let second = &topology.nodes[&1];
        assert_eq!((second.memory, second.huge_pages[&(2 << 20)]), (5 << 10, 3));
        assert_eq!((second.distances[&0], second.distances[&1]), (21, 10));
    }

    #[test]
    fn the_topology_of_this_machine_can_be_read() {
        let topology = read(Path::new(SYSTEM));
        let online = read_text(Path::new("/sys/devices/system/cpu/online"), LIMIT).expect("a list");
        assert_eq!(Some(topology.cpus.all()), parse_list(&online));
        assert!(topology.nodes.values().any(|n| n.memory > 0) || topology.nodes.len() == 1);
    }
}
