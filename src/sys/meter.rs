//! Reading what cgroups, processes and the machine used. Nothing is kept; what is gone has used nothing.

use std::fs;
use std::path::Path;

use crate::core::serving::cgroup_stats::{self, Interface, Texts, Usage};

use super::cgroup::is_v2;

const ROOT: &str = "/sys/fs/cgroup";

/// What a cgroup used; none if there is no such cgroup.
#[must_use]
pub fn cgroup(path: &str) -> Option<Usage> {
    usage(path, |_| true)
}

/// The memory that a cgroup uses, and the most it may; nothing else of it is read. None if there is no such cgroup.
#[must_use]
pub fn cgroup_memory(path: &str) -> Option<Usage> {
    const FILES: [&str; 6] = [
        "memory.usage_in_bytes",
        "memory.limit_in_bytes",
        "memory.current",
        "memory.max",
        "memory.stat",
        "cpu.stat",
    ];
    usage(path, |file| FILES.contains(&file))
}

fn usage(path: &str, wanted: impl Fn(&str) -> bool) -> Option<Usage> {
    let relative = path.trim_matches('/');
    let read = |dir: &Path, file: &str| fs::read_to_string(dir.join(relative).join(file)).ok();
    if is_v2() {
        let root = Path::new(ROOT);
        let texts: Texts = cgroup_stats::V2
            .iter()
            .filter(|file| wanted(file))
            .filter_map(|file| Some((*file, read(root, file)?)))
            .collect();
        return texts
            .contains_key("cpu.stat")
            .then(|| cgroup_stats::v2(&texts));
    }
    let texts: Texts = cgroup_stats::V1
        .iter()
        .filter(|(_, file)| wanted(file))
        .filter_map(|(controller, file)| {
            Some((*file, read(&Path::new(ROOT).join(controller), file)?))
        })
        .collect();
    (!texts.is_empty()).then(|| cgroup_stats::v1(&texts))
}

/// The interfaces that the processes of a cgroup have.
#[must_use]
pub fn interfaces(path: &str) -> Vec<Interface> {
    let relative = path.trim_matches('/');
    let dir = if is_v2() {
        Path::new(ROOT).join(relative)
    } else {
        Path::new(ROOT).join("memory").join(relative)
    };
    let processes = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    let text = processes.lines().find_map(|pid| {
        fs::read_to_string(format!("/proc/{}/net/dev", pid.parse::<u32>().ok()?)).ok()
    });
    text.map(|text| cgroup_stats::interfaces(&text))
        .unwrap_or_default()
}

/// The machine's own figures.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Whole {
    /// What it used.
    pub usage: Usage,
    /// Memory that can be had at once, in bytes.
    pub available: u64,
    /// Swap: all, and what is free, in bytes.
    pub swap: (u64, u64),
    /// Its interfaces.
    pub interfaces: Vec<Interface>,
    /// The highest number of processes, and the present one.
    pub processes: (u64, u64),
}

/// The bytes of the machine's memory, and those of them that are not in its working set.
#[must_use]
pub fn memory() -> (u64, u64) {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let of = |key: &str| cgroup_stats::meminfo(&text, key);
    let used = of("MemTotal").saturating_sub(of("MemFree"));
    let working_set = used.saturating_sub(of("Inactive(file)"));
    (of("MemTotal"), of("MemTotal").saturating_sub(working_set))
}

/// The highest process id that the kernel gives, and how many processes and threads there are.
#[must_use]
pub fn processes() -> (u64, u64) {
    let number = |path: &str| {
        fs::read_to_string(path)
            .ok()
            .and_then(|t| t.trim().parse::<u64>().ok())
            .unwrap_or(0)
    };
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let now = load
        .split(' ')
        .nth(3)
        .and_then(|f| f.split('/').nth(1)?.parse().ok())
        .unwrap_or(0);
    let most = number("/proc/sys/kernel/pid_max").min(number("/proc/sys/kernel/threads-max"));
    (most, now)
}

/// What the machine used.
#[must_use]
pub fn machine() -> Whole {
    let (stat, memory) = (
        fs::read_to_string("/proc/stat").unwrap_or_default(),
        fs::read_to_string("/proc/meminfo").unwrap_or_default(),
    );
    let of = |key: &str| cgroup_stats::meminfo(&memory, key);
    let used = of("MemTotal").saturating_sub(of("MemFree"));
    let working_set = used.saturating_sub(of("Inactive(file)"));
    Whole {
        usage: Usage {
            cpu: cgroup_stats::machine_cpu(&stat),
            memory: used,
            working_set,
            rss: of("AnonPages"),
            cache: of("Cached"),
            mapped: of("Mapped"),
            ..Usage::default()
        },
        available: of("MemTotal").saturating_sub(working_set),
        swap: (of("SwapTotal"), of("SwapFree")),
        interfaces: cgroup_stats::interfaces(
            &fs::read_to_string("/proc/net/dev").unwrap_or_default(),
        ),
        processes: processes(),
    }
}

/// What this process used: processor seconds, resident and virtual bytes, open descriptors and the most it may have,
/// and when it began, in seconds since 1970.
#[must_use]
pub fn own() -> (f64, u64, u64, u64, u64, f64) {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let rest: Vec<&str> = stat
        .rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_whitespace()
        .collect();
    let field = |n: usize| {
        rest.get(n - 3)
            .and_then(|v| v.parse::<u64>().ok())
            .unwrap_or(0)
    };
    let page = 4096;
    let open = fs::read_dir("/proc/self/fd").map_or(0, |d| d.count() as u64);
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let most = limits
        .lines()
        .find(|l| l.starts_with("Max open files"))
        .and_then(|l| l.split_whitespace().nth(3)?.parse().ok())
        .unwrap_or(0);
    let booted = fs::read_to_string("/proc/stat").unwrap_or_default();
    let booted = booted
        .lines()
        .find_map(|l| l.strip_prefix("btime ")?.parse::<u64>().ok())
        .unwrap_or(0);
    let seconds = (field(14) + field(15)) as f64 / 100.0;
    (
        seconds,
        field(24) * page,
        field(23),
        open,
        most,
        booted as f64 + field(22) as f64 / 100.0,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_and_this_process_use_something() {
        let whole = machine();
        assert!(
            whole.usage.cpu > 0 && whole.usage.memory > 0 && whole.processes.0 > 0,
            "{whole:?}"
        );
        let (seconds, resident, _, open, most, began) = own();
        assert!(seconds >= 0.0 && resident > 1 << 20 && open > 2 && most >= open && began > 1e9);
        assert_eq!(cgroup("/no-such-cgroup"), None);
        assert_eq!(cgroup_memory("/no-such-cgroup"), None);
        let (all, left) = memory();
        assert!(left > 0 && left < all);
        assert!(interfaces("/no-such-cgroup").is_empty());
    }
}
