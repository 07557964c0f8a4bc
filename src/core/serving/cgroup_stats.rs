//! What a cgroup used, from the text of its files, on v1 and v2; and interfaces from `/proc/<pid>/net/dev`. Pure.

use std::collections::BTreeMap;

/// What a cgroup used, and what it may.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time in nanoseconds: all of it, and its parts.
    pub cpu: u64,
    /// In user mode.
    pub user: u64,
    /// In the kernel.
    pub system: u64,
    /// Periods in which a quota counted, those in which it ran out, and the nanoseconds waited.
    pub periods: (u64, u64, u64),
    /// Memory in bytes, the page cache included.
    pub memory: u64,
    /// Without what could be dropped at once.
    pub working_set: u64,
    /// Not backed by files.
    pub rss: u64,
    /// The page cache.
    pub cache: u64,
    /// Mapped files.
    pub mapped: u64,
    /// Swapped out.
    pub swap: u64,
    /// The most there was at once.
    pub peak: u64,
    /// How often the limit was in the way.
    pub failures: u64,
    /// Page faults, and those that needed a disk.
    pub faults: (u64, u64),
    /// The most there may be; none for any amount.
    pub limit: Option<u64>,
    /// Processes and threads.
    pub processes: u64,
    /// How often the kernel killed something for want of memory.
    pub oom_kills: u64,
}

/// The files of a cgroup that matter, by name.
pub type Texts = BTreeMap<&'static str, String>;

/// The files that are read of v1: controller and name.
pub const V1: [(&str, &str); 11] = [
    ("cpuacct", "cpuacct.usage"),
    ("cpuacct", "cpuacct.stat"),
    ("cpu", "cpu.stat"),
    ("memory", "memory.usage_in_bytes"),
    ("memory", "memory.max_usage_in_bytes"),
    ("memory", "memory.failcnt"),
    ("memory", "memory.limit_in_bytes"),
    ("memory", "memory.stat"),
    ("memory", "memory.oom_control"),
    ("pids", "pids.current"),
    ("memory", "memory.memsw.limit_in_bytes"),
];

/// The files that are read of v2.
pub const V2: [&str; 8] = [
    "cpu.stat",
    "memory.current",
    "memory.peak",
    "memory.max",
    "memory.stat",
    "memory.events",
    "memory.swap.current",
    "pids.current",
];

/// Ticks a second in v1's `cpuacct.stat`; fixed in the kernel's interface.
const TICK: u64 = 10_000_000;
/// Limits from here on mean none.
const UNLIMITED: u64 = 1 << 62;

fn fields(text: Option<&String>) -> BTreeMap<&str, u64> {
    let pair = |line| {
        str::split_once(line, ' ').and_then(|(key, value)| Some((key, value.trim().parse().ok()?)))
    };
    text.map_or("", String::as_str)
        .lines()
        .filter_map(pair)
        .collect()
}

fn number(text: Option<&String>) -> Option<u64> {
    text?.trim().parse().ok()
}

/// Reads v1's files.
#[must_use]
pub fn v1(texts: &Texts) -> Usage {
    let (cpu, quota, memory) = (
        fields(texts.get("cpuacct.stat")),
        fields(texts.get("cpu.stat")),
        fields(texts.get("memory.stat")),
    );
    let of = |map: &BTreeMap<&str, u64>, key: &str| map.get(key).copied().unwrap_or(0);
    let used = number(texts.get("memory.usage_in_bytes")).unwrap_or(0);
    Usage {
        cpu: number(texts.get("cpuacct.usage")).unwrap_or(0),
        user: of(&cpu, "user") * TICK,
        system: of(&cpu, "system") * TICK,
        periods: (
            of(&quota, "nr_periods"),
            of(&quota, "nr_throttled"),
            of(&quota, "throttled_time"),
        ),
        memory: used,
        working_set: used.saturating_sub(of(&memory, "total_inactive_file")),
        rss: of(&memory, "total_rss"),
        cache: of(&memory, "total_cache"),
        mapped: of(&memory, "total_mapped_file"),
        swap: of(&memory, "total_swap"),
        peak: number(texts.get("memory.max_usage_in_bytes")).unwrap_or(0),
        failures: number(texts.get("memory.failcnt")).unwrap_or(0),
        faults: (
            of(&memory, "total_pgfault"),
            of(&memory, "total_pgmajfault"),
        ),
        limit: number(texts.get("memory.limit_in_bytes")).filter(|l| *l < UNLIMITED),
        processes: number(texts.get("pids.current")).unwrap_or(0),
        oom_kills: of(&fields(texts.get("memory.oom_control")), "oom_kill"),
    }
}

/// Reads v2's files.
#[must_use]
pub fn v2(texts: &Texts) -> Usage {
    let (cpu, memory, events) = (
        fields(texts.get("cpu.stat")),
        fields(texts.get("memory.stat")),
        fields(texts.get("memory.events")),
    );
    let of = |map: &BTreeMap<&str, u64>, key: &str| map.get(key).copied().unwrap_or(0);
    let micro = |key: &str| of(&cpu, key) * 1000;
    let used = number(texts.get("memory.current")).unwrap_or(0);
    Usage {
        cpu: micro("usage_usec"),
        user: micro("user_usec"),
        system: micro("system_usec"),
        periods: (
            of(&cpu, "nr_periods"),
            of(&cpu, "nr_throttled"),
            micro("throttled_usec"),
        ),
        memory: used,
        working_set: used.saturating_sub(of(&memory, "inactive_file")),
        rss: of(&memory, "anon"),
        cache: of(&memory, "file"),
        mapped: of(&memory, "file_mapped"),
        swap: number(texts.get("memory.swap.current")).unwrap_or(0),
        peak: number(texts.get("memory.peak")).unwrap_or(0),
        failures: of(&events, "max"),
        faults: (of(&memory, "pgfault"), of(&memory, "pgmajfault")),
        limit: number(texts.get("memory.max")),
        processes: number(texts.get("pids.current")).unwrap_or(0),
        oom_kills: of(&events, "oom_kill"),
    }
}

/// The counters of a network interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Received: bytes, packets, errors, dropped.
    pub received: [u64; 4],
    /// Sent: bytes, packets, errors, dropped.
    pub sent: [u64; 4],
}

/// Reads `/proc/<pid>/net/dev`; what only looks back is left out.
#[must_use]
pub fn interfaces(text: &str) -> Vec<Interface> {
    let of = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        let numbers: Vec<u64> = rest
            .split_whitespace()
            .filter_map(|n| n.parse().ok())
            .collect();
        let four = |at: usize| {
            Some([
                *numbers.get(at)?,
                *numbers.get(at + 1)?,
                *numbers.get(at + 2)?,
                *numbers.get(at + 3)?,
            ])
        };
        Some(Interface {
            name: name.trim().to_owned(),
            received: four(0)?,
            sent: four(8)?,
        })
    };
    text.lines()
        .filter_map(of)
        .filter(|i| i.name != "lo")
        .collect()
}

/// Processor time of the whole machine from `/proc/stat`, in nanoseconds: without what it was idle or waited.
#[must_use]
pub fn machine_cpu(stat: &str) -> u64 {
    let numbers = stat
        .lines()
        .next()
        .into_iter()
        .flat_map(str::split_whitespace)
        .skip(1)
        .filter_map(|n| n.parse::<u64>().ok());
    // user nice system idle iowait irq softirq steal; guests are in user already.
    numbers
        .take(8)
        .enumerate()
        .filter(|(i, _)| !matches!(i, 3 | 4))
        .map(|(_, n)| n)
        .sum::<u64>()
        * TICK
}

/// A figure of `/proc/meminfo`, in bytes.
#[must_use]
pub fn meminfo(text: &str, key: &str) -> u64 {
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix(key)?.strip_prefix(':'));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok())
        .unwrap_or(0)
        * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_tell_the_same() {
        let old = Texts::from([
            ("cpuacct.usage", "2000000\n".to_owned()),
            ("cpuacct.stat", "user 1\nsystem 2\n".to_owned()),
            ("cpu.stat", "nr_periods 5\nnr_throttled 2\nthrottled_time 7000\n".to_owned()),
            ("memory.usage_in_bytes", "1000".to_owned()),
            ("memory.limit_in_bytes", "9223372036854771712".to_owned()),
            ("memory.stat", "rss 1\ntotal_rss 300\ntotal_cache 700\ntotal_inactive_file 400\ntotal_pgfault 9\ntotal_pgmajfault 1\n".to_owned()),
            ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n".to_owned()),
            ("pids.current", "4\n".to_owned()),
        ]);
        let new = Texts::from([
            ("cpu.stat", "usage_usec 2000\nuser_usec 10000\nsystem_usec 20000\nnr_periods 5\nnr_throttled 2\nthrottled_usec 7\n".to_owned()),
            ("memory.current", "1000\n".to_owned()),
            ("memory.max", "max\n".to_owned()),
            ("memory.stat", "anon 300\nfile 700\ninactive_file 400\npgfault 9\npgmajfault 1\n".to_owned()),
            ("memory.events", "low 0\nmax 0\noom_kill 3\n".to_owned()),
            ("pids.current", "4\n".to_owned()),
        ]);
        let (old, new) = (v1(&old), v2(&new));
        assert_eq!(old, new);
        assert_eq!(
            (old.working_set, old.limit, old.faults, old.user),
            (600, None, (9, 1), 10_000_000)
        );
        assert_eq!(
            (v1(&Texts::new()), v2(&Texts::new())),
            (Usage::default(), Usage::default())
        );
    }

    #[test]
    fn the_machine_and_its_interfaces_are_read() {
        let text = "Inter-|   Receive  |  Transmit\n face |bytes packets\n    lo: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n  eth0: 10 2 3 4 0 0 0 0 50 6 7 8 0 0 0 0\n";
        assert_eq!(
            interfaces(text),
            [Interface {
                name: "eth0".into(),
                received: [10, 2, 3, 4],
                sent: [50, 6, 7, 8]
            }]
        );
        assert_eq!(
            machine_cpu("cpu  1 2 3 100 100 4 5 6 7 8\ncpu0 9\n"),
            21 * TICK
        );
        assert_eq!(meminfo("MemTotal: 5 kB\nMemFree:  2 kB\n", "MemFree"), 2048);
    }
}
