//! Usage and limits of a cgroup, parsed from its files, for cgroup v1 and v2. Pure.

use std::collections::BTreeMap;

use super::block_io::{self, Disk};
use super::pressure::{self, Pressures};

/// How many files of a cgroup are read. Every file costs a few microseconds, and there are hundreds of cgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// Memory only.
    Memory,
    /// For `/stats/summary` and `/metrics/resource`.
    Summary,
    /// For `/metrics/cadvisor`.
    All,
}

/// Usage and limits of a cgroup.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Usage {
    /// Total CPU time in nanoseconds.
    pub cpu: u64,
    /// CPU time in user mode, in nanoseconds.
    pub user: u64,
    /// CPU time in the kernel, in nanoseconds.
    pub system: u64,
    /// CFS periods, throttled periods, and nanoseconds of throttling.
    pub periods: (u64, u64, u64),
    /// Periods with bursts above the quota, and nanoseconds of bursts.
    pub bursts: (u64, u64),
    /// CPU weight, as shares of cgroup v1.
    pub shares: u64,
    /// CFS period in microseconds.
    pub period: u64,
    /// CFS quota in microseconds per period; `None` without a quota.
    pub quota: Option<u64>,
    /// Memory usage in bytes, including the page cache.
    pub memory: u64,
    /// Working set in bytes: usage minus inactive file pages.
    pub working_set: u64,
    /// Anonymous memory in bytes.
    pub rss: u64,
    /// Page cache in bytes.
    pub cache: u64,
    /// Mapped files in bytes.
    pub mapped: u64,
    /// Active and inactive file pages in bytes.
    pub file_pages: (u64, u64),
    /// Kernel memory in bytes.
    pub kernel: u64,
    /// Swap usage in bytes.
    pub swap: u64,
    /// Peak memory usage in bytes.
    pub peak: u64,
    /// How often usage reached the limit.
    pub limit_hits: u64,
    /// Page faults, and major page faults.
    pub faults: (u64, u64),
    /// Memory limit in bytes; `None` if unlimited.
    pub limit: Option<u64>,
    /// Memory protected under pressure, in bytes.
    pub reserved: u64,
    /// Swap limit in bytes; `None` if unlimited.
    pub swap_limit: Option<u64>,
    /// Processes in this cgroup, without child cgroups.
    pub processes: u64,
    /// Processes and threads, including child cgroups.
    pub threads: u64,
    /// Limit of processes and threads; `None` if unlimited.
    pub threads_limit: Option<u64>,
    /// Number of OOM kills.
    pub oom_kills: u64,
    /// I/O by disk.
    pub disks: Vec<Disk>,
    /// Pressure stall information; only cgroup v2 has it.
    pub pressure: Pressures,
}

impl Usage {
    /// Sum over several cgroups, for the values in the summary: a pod without a cgroup uses the sum of its containers.
    /// Pressure cannot be summed.
    #[must_use]
    pub fn total<'a>(parts: impl IntoIterator<Item = &'a Usage>) -> Usage {
        let mut all = Usage::default();
        for part in parts {
            for (sum, more) in [
                (&mut all.cpu, part.cpu),
                (&mut all.user, part.user),
                (&mut all.system, part.system),
                (&mut all.memory, part.memory),
                (&mut all.working_set, part.working_set),
                (&mut all.rss, part.rss),
                (&mut all.swap, part.swap),
                (&mut all.faults.0, part.faults.0),
                (&mut all.faults.1, part.faults.1),
                (&mut all.processes, part.processes),
                (&mut all.threads, part.threads),
            ] {
                *sum = sum.saturating_add(more);
            }
            // A part without a limit adds nothing to the remaining amount.
            let remaining = part
                .limit
                .map(|limit| limit.saturating_sub(part.working_set));
            all.limit = sum(all.limit, remaining);
            let remaining = part.swap_limit.map(|limit| limit.saturating_sub(part.swap));
            all.swap_limit = sum(all.swap_limit, remaining);
        }
        all.limit = all
            .limit
            .map(|remaining| remaining.saturating_add(all.working_set));
        all.swap_limit = all
            .swap_limit
            .map(|remaining| remaining.saturating_add(all.swap));
        all
    }
}

fn sum(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    match (one, other) {
        (None, None) => None,
        (one, other) => Some(one.unwrap_or(0).saturating_add(other.unwrap_or(0))),
    }
}

/// Contents of a cgroup's files, by name.
pub type Texts = BTreeMap<&'static str, String>;

/// Files of cgroup v1: controller, name, and the depth that needs it.
pub const V1: [(&str, &str, Depth); 26] = [
    ("memory", "memory.usage_in_bytes", Depth::Memory),
    ("memory", "memory.limit_in_bytes", Depth::Memory),
    ("memory", "memory.stat", Depth::Memory),
    ("memory", "memory.memsw.limit_in_bytes", Depth::Summary),
    ("cpuacct", "cpuacct.usage", Depth::Summary),
    ("pids", "pids.current", Depth::Summary),
    ("cpu", "cgroup.procs", Depth::Summary),
    ("cpuacct", "cpuacct.stat", Depth::All),
    ("cpu", "cpu.stat", Depth::All),
    ("cpu", "cpu.shares", Depth::All),
    ("cpu", "cpu.cfs_period_us", Depth::All),
    ("cpu", "cpu.cfs_quota_us", Depth::All),
    ("memory", "memory.max_usage_in_bytes", Depth::All),
    ("memory", "memory.failcnt", Depth::All),
    ("memory", "memory.oom_control", Depth::All),
    ("memory", "memory.kmem.usage_in_bytes", Depth::All),
    ("memory", "memory.soft_limit_in_bytes", Depth::All),
    ("pids", "pids.max", Depth::All),
    ("blkio", block_io::V1[0].0, Depth::All),
    ("blkio", block_io::V1[0].1, Depth::All),
    ("blkio", block_io::V1[1].0, Depth::All),
    ("blkio", block_io::V1[1].1, Depth::All),
    ("blkio", block_io::V1[2].0, Depth::All),
    ("blkio", block_io::V1[2].1, Depth::All),
    ("blkio", block_io::V1[3].0, Depth::All),
    ("blkio", block_io::V1[3].1, Depth::All),
];

/// Files of cgroup v2, and the depth that needs each.
pub const V2: [(&str, Depth); 18] = [
    ("memory.current", Depth::Memory),
    ("memory.max", Depth::Memory),
    ("memory.stat", Depth::Memory),
    ("cpu.stat", Depth::Summary),
    ("memory.swap.current", Depth::Summary),
    ("memory.swap.max", Depth::Summary),
    ("pids.current", Depth::Summary),
    ("cgroup.procs", Depth::Summary),
    ("cpu.pressure", Depth::Summary),
    ("memory.pressure", Depth::Summary),
    ("io.pressure", Depth::Summary),
    ("cpu.max", Depth::All),
    ("cpu.weight", Depth::All),
    ("memory.peak", Depth::All),
    ("memory.events", Depth::All),
    ("memory.min", Depth::All),
    ("pids.max", Depth::All),
    ("io.stat", Depth::All),
];

/// Files with limits. They change only when they are written, so they need not be read every time.
pub const SETTINGS: [&str; 12] = [
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.soft_limit_in_bytes",
    "cpu.shares",
    "cpu.cfs_period_us",
    "cpu.cfs_quota_us",
    "memory.max",
    "memory.min",
    "memory.swap.max",
    "cpu.max",
    "cpu.weight",
    "pids.max",
];

/// Nanoseconds per tick in `cpuacct.stat` of cgroup v1; fixed by the kernel's interface.
pub(crate) const TICK: u64 = 10_000_000;
/// Limits at or above this value mean unlimited.
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

fn bounded(text: Option<&String>) -> Option<u64> {
    number(text).filter(|limit| *limit < UNLIMITED)
}

fn lines(text: Option<&String>) -> u64 {
    text.map_or(0, |text| text.lines().count() as u64)
}

/// Converts a cgroup v2 weight to v1 shares, as cAdvisor does.
fn shares(weight: u64) -> u64 {
    weight
        .checked_sub(1)
        .map_or(0, |w| (w.saturating_mul(262_142) / 9999).saturating_add(2))
}

/// Parses the files of cgroup v1.
#[must_use]
pub fn v1(texts: &Texts) -> Usage {
    let (cpu, quota, memory) = (
        fields(texts.get("cpuacct.stat")),
        fields(texts.get("cpu.stat")),
        fields(texts.get("memory.stat")),
    );
    let of = |map: &BTreeMap<&str, u64>, key: &str| map.get(key).copied().unwrap_or(0);
    let text = |name: &str| texts.get(name).map_or("", String::as_str);
    let used = number(texts.get("memory.usage_in_bytes")).unwrap_or(0);
    let limit = bounded(texts.get("memory.limit_in_bytes"));
    let with_swap = bounded(texts.get("memory.memsw.limit_in_bytes"));
    Usage {
        cpu: number(texts.get("cpuacct.usage")).unwrap_or(0),
        user: of(&cpu, "user").saturating_mul(TICK),
        system: of(&cpu, "system").saturating_mul(TICK),
        periods: (
            of(&quota, "nr_periods"),
            of(&quota, "nr_throttled"),
            of(&quota, "throttled_time"),
        ),
        bursts: (of(&quota, "nr_bursts"), of(&quota, "burst_time")),
        shares: number(texts.get("cpu.shares")).unwrap_or(0),
        period: number(texts.get("cpu.cfs_period_us")).unwrap_or(0),
        quota: number(texts.get("cpu.cfs_quota_us")),
        memory: used,
        working_set: used.saturating_sub(of(&memory, "total_inactive_file")),
        rss: of(&memory, "total_rss"),
        cache: of(&memory, "total_cache"),
        mapped: of(&memory, "total_mapped_file"),
        file_pages: (
            of(&memory, "total_active_file"),
            of(&memory, "total_inactive_file"),
        ),
        kernel: number(texts.get("memory.kmem.usage_in_bytes")).unwrap_or(0),
        swap: of(&memory, "total_swap"),
        peak: number(texts.get("memory.max_usage_in_bytes")).unwrap_or(0),
        limit_hits: number(texts.get("memory.failcnt")).unwrap_or(0),
        faults: (
            of(&memory, "total_pgfault"),
            of(&memory, "total_pgmajfault"),
        ),
        limit,
        reserved: bounded(texts.get("memory.soft_limit_in_bytes")).unwrap_or(0),
        // cgroup v1 limits the sum of memory and swap.
        swap_limit: with_swap
            .zip(limit)
            .map(|(both, memory)| both.saturating_sub(memory)),
        processes: lines(texts.get("cgroup.procs")),
        threads: number(texts.get("pids.current")).unwrap_or(0),
        threads_limit: number(texts.get("pids.max")),
        oom_kills: of(&fields(texts.get("memory.oom_control")), "oom_kill"),
        disks: block_io::v1(text),
        pressure: Pressures::default(),
    }
}

/// Parses the files of cgroup v2.
#[must_use]
pub fn v2(texts: &Texts) -> Usage {
    let (cpu, memory, events) = (
        fields(texts.get("cpu.stat")),
        fields(texts.get("memory.stat")),
        fields(texts.get("memory.events")),
    );
    let of = |map: &BTreeMap<&str, u64>, key: &str| map.get(key).copied().unwrap_or(0);
    let micro = |key: &str| of(&cpu, key).saturating_mul(1000);
    let text = |name: &str| texts.get(name).map_or("", String::as_str);
    let (quota, period) = text("cpu.max").split_once(' ').unwrap_or_default();
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
        bursts: (of(&cpu, "nr_bursts"), micro("burst_usec")),
        shares: shares(number(texts.get("cpu.weight")).unwrap_or(0)),
        period: period.trim().parse().unwrap_or(0),
        quota: quota.parse().ok(),
        memory: used,
        working_set: used.saturating_sub(of(&memory, "inactive_file")),
        rss: of(&memory, "anon"),
        cache: of(&memory, "file"),
        mapped: of(&memory, "file_mapped"),
        file_pages: (of(&memory, "active_file"), of(&memory, "inactive_file")),
        kernel: of(&memory, "kernel"),
        swap: number(texts.get("memory.swap.current")).unwrap_or(0),
        peak: number(texts.get("memory.peak")).unwrap_or(0),
        limit_hits: of(&events, "max"),
        faults: (of(&memory, "pgfault"), of(&memory, "pgmajfault")),
        limit: number(texts.get("memory.max")),
        reserved: bounded(texts.get("memory.min")).unwrap_or(0),
        swap_limit: number(texts.get("memory.swap.max")),
        processes: lines(texts.get("cgroup.procs")),
        threads: number(texts.get("pids.current")).unwrap_or(0),
        threads_limit: number(texts.get("pids.max")),
        oom_kills: of(&events, "oom_kill"),
        disks: block_io::v2(text("io.stat")),
        pressure: Pressures {
            cpu: pressure::read(text("cpu.pressure")),
            memory: pressure::read(text("memory.pressure")),
            io: pressure::read(text("io.pressure")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_of_several_containers_is_summed() {
        let of = |working_set, limit| Usage {
            cpu: 5,
            memory: working_set + 1,
            working_set,
            limit,
            faults: (2, 1),
            threads: 3,
            ..Usage::default()
        };
        let all = Usage::total(&[of(10, Some(30)), of(100, None)]);
        assert_eq!((all.cpu, all.memory, all.threads), (10, 112, 6));
        assert_eq!((all.working_set, all.faults), (110, (4, 2)));
        // 20 bytes remain below the one limit.
        assert_eq!((all.limit, all.swap_limit), (Some(130), None));
        assert_eq!(Usage::total(&[]), Usage::default());
    }

    #[test]
    fn both_cgroup_versions_yield_the_same_usage() {
        let old = Texts::from([
            ("cpuacct.usage", "2000000\n".to_owned()),
            ("cpuacct.stat", "user 1\nsystem 2\n".to_owned()),
            ("cpu.stat", "nr_periods 5\nnr_throttled 2\nthrottled_time 7000\nnr_bursts 1\nburst_time 3000\n".to_owned()),
            ("cpu.shares", "2\n".to_owned()),
            ("cpu.cfs_period_us", "100000\n".to_owned()),
            ("cpu.cfs_quota_us", "50000\n".to_owned()),
            ("memory.usage_in_bytes", "1000".to_owned()),
            ("memory.limit_in_bytes", "9223372036854771712".to_owned()),
            ("memory.kmem.usage_in_bytes", "64\n".to_owned()),
            ("memory.soft_limit_in_bytes", "9223372036854771712".to_owned()),
            ("memory.stat", "rss 1\ntotal_rss 300\ntotal_cache 700\ntotal_inactive_file 400\ntotal_active_file 200\ntotal_pgfault 9\ntotal_pgmajfault 1\n".to_owned()),
            ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n".to_owned()),
            ("pids.current", "4\n".to_owned()),
            ("pids.max", "max\n".to_owned()),
            ("cgroup.procs", "10\n11\n".to_owned()),
            ("blkio.throttle.io_service_bytes_recursive", "8:0 Read 4096\n8:0 Write 1\n".to_owned()),
            ("blkio.throttle.io_serviced_recursive", "8:0 Read 2\n8:0 Write 1\n".to_owned()),
        ]);
        let new = Texts::from([
            ("cpu.stat", "usage_usec 2000\nuser_usec 10000\nsystem_usec 20000\nnr_periods 5\nnr_throttled 2\nthrottled_usec 7\nnr_bursts 1\nburst_usec 3\n".to_owned()),
            ("cpu.weight", "1\n".to_owned()),
            ("cpu.max", "50000 100000\n".to_owned()),
            ("memory.current", "1000\n".to_owned()),
            ("memory.max", "max\n".to_owned()),
            ("memory.stat", "anon 300\nfile 700\nkernel 64\ninactive_file 400\nactive_file 200\npgfault 9\npgmajfault 1\n".to_owned()),
            ("memory.events", "low 0\nmax 0\noom_kill 3\n".to_owned()),
            ("pids.current", "4\n".to_owned()),
            ("pids.max", "max\n".to_owned()),
            ("memory.min", "0\n".to_owned()),
            ("memory.swap.max", "max\n".to_owned()),
            ("cgroup.procs", "10\n11\n".to_owned()),
            ("io.stat", "8:0 rbytes=4096 wbytes=1 rios=2 wios=1 dbytes=0 dios=0\n".to_owned()),
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
    fn limits_are_parsed() {
        let of = |pairs: &[(&'static str, &str)]| -> Texts {
            let pairs = pairs.iter();
            pairs
                .map(|(name, text)| (*name, format!("{text}\n")))
                .collect()
        };
        let old = v1(&of(&[
            ("memory.limit_in_bytes", "1000"),
            ("memory.memsw.limit_in_bytes", "1500"),
            ("memory.soft_limit_in_bytes", "10"),
            ("cpu.cfs_quota_us", "-1"),
            ("pids.max", "99"),
        ]));
        let new = v2(&of(&[
            ("memory.max", "1000"),
            ("memory.swap.max", "500"),
            ("memory.min", "10"),
            ("cpu.max", "max 100000"),
            ("pids.max", "99"),
        ]));
        let limits = |u: &Usage| (u.limit, u.swap_limit, u.reserved, u.quota, u.threads_limit);
        assert_eq!(limits(&old), (Some(1000), Some(500), 10, None, Some(99)));
        assert_eq!((limits(&new), new.period), (limits(&old), 100_000));
        for (weight, is) in [(0, 0), (1, 2), (39, 998), (100, 2597), (10_000, 262_144)] {
            assert_eq!(shares(weight), is, "{weight}");
        }
    }

    #[test]
    fn every_settings_file_is_read() {
        let v1 = V1.iter().map(|(_, file, _)| *file);
        let read: Vec<&str> = v1.chain(V2.iter().map(|(file, _)| *file)).collect();
        for file in SETTINGS {
            assert!(read.contains(&file), "{file}");
        }
    }

    #[test]
    fn pressure_is_reported_only_if_the_kernel_provides_it() {
        let line = "some avg10=1.50 avg60=0.00 avg300=0.00 total=7\n".to_owned();
        let usage = v2(&Texts::from([("io.pressure", line)]));
        let io = usage.pressure.io.unwrap_or_default();
        assert_eq!((io.some.total, io.some.averages[0]), (7, 1.5));
        assert_eq!((usage.pressure.cpu, usage.pressure.memory), (None, None));
    }
}
