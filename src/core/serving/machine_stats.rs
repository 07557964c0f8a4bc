//! Usage of the whole machine, and process information, parsed from `/proc`. Pure.

use super::cgroup_stats::TICK;

/// Counters of a network interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Interface {
    /// The interface's name.
    pub name: String,
    /// Received: bytes, packets, errors, dropped.
    pub received: [u64; 4],
    /// Sent: bytes, packets, errors, dropped.
    pub sent: [u64; 4],
}

/// Name prefixes of ignored interfaces, as in cAdvisor: loopback, and interfaces whose traffic would be counted twice.
const NOT_COUNTED: [&str; 4] = ["lo", "veth", "docker", "nerdctl"];

/// Parses `/proc/<pid>/net/dev`.
#[must_use]
pub fn interfaces(text: &str) -> Vec<Interface> {
    let of = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        let numbers: Vec<u64> = rest
            .split_whitespace()
            .filter_map(|n| n.parse().ok())
            .collect();
        let four = |at: usize| numbers.get(at..)?.get(..4)?.try_into().ok();
        Some(Interface {
            name: name.trim().to_owned(),
            received: four(0)?,
            sent: four(8)?,
        })
    };
    let counts = |i: &Interface| !NOT_COUNTED.iter().any(|p| i.name.starts_with(p));
    text.lines().filter_map(of).filter(counts).collect()
}

/// CPU time of the whole machine in nanoseconds: total, user mode, kernel; without idle time and I/O wait.
#[must_use]
pub fn machine_cpu(stat: &str) -> (u64, u64, u64) {
    // Fields: user nice system idle iowait irq softirq steal. Guest time is already part of user.
    let first = stat.lines().next().unwrap_or_default();
    let numbers = first.split_whitespace().skip(1);
    let numbers: Vec<u64> = numbers.filter_map(|n| n.parse().ok()).collect();
    let of = |fields: &[usize]| {
        let fields = fields.iter().filter_map(|i| numbers.get(*i));
        fields
            .copied()
            .fold(0, u64::saturating_add)
            .saturating_mul(TICK)
    };
    (of(&[0, 1, 2, 5, 6, 7]), of(&[0, 1]), of(&[2, 5, 6]))
}

/// Boot time in seconds since the epoch, from `/proc/stat`.
#[must_use]
pub fn booted(stat: &str) -> u64 {
    let line = stat.lines().find_map(|l| l.strip_prefix("btime "));
    line.and_then(|v| v.trim().parse().ok()).unwrap_or(0)
}

/// A value of `/proc/meminfo`, in bytes.
#[must_use]
pub fn meminfo(text: &str, key: &str) -> u64 {
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix(key)?.strip_prefix(':'));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok())
        .unwrap_or(0)
        .saturating_mul(1024)
}

/// Limit of open files, from `/proc/<pid>/limits`; -1 if unlimited.
#[must_use]
pub fn open_files(limits: &str) -> Option<i64> {
    let line = limits
        .lines()
        .find_map(|l| l.strip_prefix("Max open files"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(-1),
        number => number.parse().ok(),
    }
}

/// The cgroup of a process, from `/proc/<pid>/cgroup`: in the unified hierarchy, or in the memory hierarchy of v1.
/// `None` for the root cgroup.
#[must_use]
pub fn cgroup_of_process(text: &str, v2: bool) -> Option<&str> {
    let path = text.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let counts = if v2 {
            controllers.is_empty()
        } else {
            controllers.split(',').any(|c| c == "memory")
        };
        counts.then_some(path)
    })?;
    (path != "/").then_some(path)
}

/// The device name under which a mount's usage is reported; `None` if it is not reported. Covers what cAdvisor reports
/// for the machine, without the mounts of pods. `root` is the agent's root directory: mounts below it are pod volumes,
/// which may hang and are measured separately.
#[must_use]
pub fn device_of_mount(kind: &str, source: &str, point: &str, root: &str) -> Option<String> {
    const ON_DISKS: [&str; 16] = [
        "ext2", "ext3", "ext4", "xfs", "btrfs", "squashfs", "f2fs", "jfs", "reiserfs", "ntfs",
        "vfat", "msdos", "exfat", "udf", "iso9660", "zfs",
    ];
    let below = |dir: &str| {
        let rest = point.strip_prefix(dir.trim_end_matches('/'));
        rest.is_some_and(|rest| rest.starts_with('/'))
    };
    if below(root) {
        return None;
    }
    match kind {
        _ if ON_DISKS.contains(&kind) => Some(source.to_owned()),
        // The machine's own tmpfs mounts are near the root, those of containers are deep.
        "tmpfs" if point.matches('/').count() <= 2 => Some(point.to_owned()),
        _ if point == "/" => Some(source.to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_and_interface_statistics_are_parsed() {
        let text = "Inter-|   Receive  |  Transmit\n face |bytes packets\n    lo: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n veth1: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n  eth0: 10 2 3 4 0 0 0 0 50 6 7 8 0 0 0 0\n";
        assert_eq!(
            interfaces(text),
            [Interface {
                name: "eth0".into(),
                received: [10, 2, 3, 4],
                sent: [50, 6, 7, 8]
            }]
        );
        let stat = "cpu  1 2 3 100 100 4 5 6 7 8\ncpu0 9\nbtime 1700000000\n";
        assert_eq!(machine_cpu(stat), (21 * TICK, 3 * TICK, 12 * TICK));
        assert_eq!((booted(stat), booted("")), (1_700_000_000, 0));
        assert_eq!(meminfo("MemTotal: 5 kB\nMemFree:  2 kB\n", "MemFree"), 2048);
    }

    #[test]
    fn process_statistics_are_parsed() {
        let limits = |soft: &str| {
            format!(
                "Limit                     Soft Limit           Hard Limit           Units     \nMax processes             193047               193047               processes \nMax open files            {soft}              524288               files     \n"
            )
        };
        for (soft, read_as) in [
            ("1024", Some(1024)),
            ("unlimited", Some(-1)),
            ("many", None),
        ] {
            assert_eq!(open_files(&limits(soft)), read_as, "{soft}");
        }
        assert_eq!(open_files(""), None);
        let v1 = "9:name=systemd:/user\n5:cpu,cpuacct:/a\n4:memory:/b:c\n0::/d\n";
        for (text, v2, path) in [
            (v1, false, Some("/b:c")),
            (v1, true, Some("/d")),
            ("0::/\n", true, None),
            ("0::/d\n", false, None),
            ("", true, None),
        ] {
            assert_eq!(cgroup_of_process(text, v2), path, "{text} {v2}");
        }
    }

    #[test]
    fn only_mounts_of_the_machine_are_reported() {
        for (kind, source, point, device) in [
            ("ext4", "/dev/vda1", "/", Some("/dev/vda1")),
            ("overlay", "overlay", "/", Some("overlay")),
            ("xfs", "/dev/sdb", "/data/a/b", Some("/dev/sdb")),
            ("tmpfs", "tmpfs", "/run/lock", Some("/run/lock")),
            ("tmpfs", "shm", "/run/containerd/x/shm", None),
            ("tmpfs", "tmpfs", "/var/lib/kubelet/pods/u/v", None),
            ("ext4", "/dev/rbd0", "/var/lib/kubelet/plugins/a", None),
            ("ext4", "/dev/sdc", "/var/lib/kubelet2", Some("/dev/sdc")),
            ("overlay", "overlay", "/run/containerd/rootfs", None),
            ("nfs4", "server:/", "/mnt", None),
            ("proc", "proc", "/proc", None),
        ] {
            assert_eq!(
                device_of_mount(kind, source, point, "/var/lib/kubelet/").as_deref(),
                device,
                "{kind} {point}"
            );
        }
    }
}
