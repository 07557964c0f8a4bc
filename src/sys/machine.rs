//! Facts about this machine.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use jiff::Timestamp;

use super::topology;
use holdfast_core::image::gc::Filesystem;
use holdfast_core::node::capacity::count_cpus;
use holdfast_core::serving::machine_stats;
use holdfast_core::volume::selinux;

/// The properties that a node reports.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// The number of logical processors.
    pub cpus: u32,
    /// Memory in bytes.
    pub memory: u64,
    /// The size in bytes of the filesystem with the root directory.
    pub storage: u64,
    /// The contents of `/etc/machine-id`.
    pub machine_id: String,
    /// The UUID of the firmware.
    pub system_uuid: String,
    /// The boot id, which changes with every boot.
    pub boot_id: String,
    /// The time of the last boot.
    pub booted: Timestamp,
    /// The kernel release (`uname -r`).
    pub kernel: String,
    /// The name of the distribution.
    pub os_image: String,
    /// The pools of huge pages: the size of a page in bytes, and the number of pages.
    pub huge_pages: Vec<(u64, u64)>,
    /// The `thermal_throttle` directories of the processors.
    pub thermal: Vec<String>,
    /// Whether cgroups use only the unified hierarchy.
    pub cgroup_v2: bool,
    /// Swap in bytes; `None` if the kernel does not account for cgroups' swap usage.
    pub swap: Option<u64>,
    /// Whether the kernel enforces AppArmor profiles.
    pub apparmor: bool,
    /// The SELinux label of containers' files; `None` without SELinux.
    pub selinux: Option<String>,
}

/// The pools of huge pages: the size of a page in bytes, and the number of pages.
#[must_use]
pub fn huge_pages() -> Vec<(u64, u64)> {
    let pools = topology::huge_pages(Path::new("/sys/kernel/mm/hugepages"));
    pools.into_iter().collect()
}

/// The machine's logical processors, even if this process's cgroup or affinity allows fewer.
fn cpus() -> u32 {
    let online = fs::read_to_string("/sys/devices/system/cpu/online").ok();
    online
        .and_then(|list| count_cpus(&list))
        .or_else(|| {
            let info = fs::read_to_string("/proc/cpuinfo").ok()?;
            let count = info.lines().filter(|l| l.starts_with("processor")).count();
            u32::try_from(count).ok().filter(|n| *n > 0)
        })
        .unwrap_or_else(|| {
            std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(1))
        })
}

fn thermal() -> Vec<String> {
    let entries = fs::read_dir("/sys/devices/system/cpu")
        .into_iter()
        .flatten()
        .filter_map(Result::ok);
    let mut paths: Vec<String> = entries
        .map(|e| e.path().join("thermal_throttle"))
        .filter(|p| p.is_dir())
        .map(|p| p.display().to_string())
        .collect();
    paths.sort();
    paths
}

fn line(path: &str) -> String {
    fs::read_to_string(path)
        .map(|t| t.trim().to_owned())
        .unwrap_or_default()
}

/// The SELinux label of containers' files, from the policy's configuration or that of the container tools.
fn selinux_files() -> Option<String> {
    super::selinux::has_selinux().then(|| {
        // In the runtime's order (`go-selinux`, `openContextFile`).
        let shared = fs::read_to_string("/usr/share/containers/selinux/contexts");
        if let Ok(contexts) = shared {
            return selinux::files(&contexts);
        }
        let config = line("/etc/selinux/config");
        let policy = config
            .lines()
            .find_map(|l| l.strip_prefix("SELINUXTYPE="))
            .unwrap_or("targeted")
            .trim();
        selinux::files(&line(&format!(
            "/etc/selinux/{policy}/contexts/lxc_contexts"
        )))
    })
}

impl Machine {
    /// Reads all properties; unreadable ones are empty or zero.
    #[must_use]
    pub fn read(root: &Path) -> Machine {
        let meminfo = line("/proc/meminfo");
        let kilobytes = |key: &str| {
            meminfo
                .lines()
                .find_map(|l| l.strip_prefix(key))
                .and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok())
        };
        let total = kilobytes("MemTotal:");
        let release = line("/etc/os-release");
        let pretty = release
            .lines()
            .find_map(|l| l.strip_prefix("PRETTY_NAME="))
            .map(|n| n.trim_matches('"').to_owned());
        Machine {
            cpus: cpus(),
            memory: total.unwrap_or(0) * 1024,
            storage: filesystem(root).map_or(0, |f| f.capacity),
            machine_id: line("/etc/machine-id"),
            // Machines without DMI use other ids (cAdvisor, `GetSystemUUID`).
            system_uuid: [
                "/sys/class/dmi/id/product_uuid",
                "/proc/device-tree/vm,uuid",
                "/etc/machine-id",
            ]
            .into_iter()
            .map(&line)
            .find(|id| !id.is_empty())
            .unwrap_or_default(),
            boot_id: line("/proc/sys/kernel/random/boot_id"),
            booted: i64::try_from(machine_stats::booted(&line("/proc/stat")))
                .ok()
                .and_then(|second| Timestamp::from_second(second).ok())
                .unwrap_or_default(),
            kernel: kernel(),
            os_image: pretty.unwrap_or_else(|| "Linux".into()),
            huge_pages: huge_pages(),
            thermal: thermal(),
            cgroup_v2: crate::cgroup::is_v2(),
            swap: crate::cgroup::accounts_swap()
                .then(|| kilobytes("SwapTotal:").unwrap_or(0) * 1024),
            apparmor: line("/sys/module/apparmor/parameters/enabled") == "Y",
            selinux: selinux_files(),
        }
    }
}

/// The size and available space of the filesystem that contains a directory.
pub fn filesystem(dir: &Path) -> std::io::Result<Filesystem> {
    let Room {
        capacity,
        available,
        ..
    } = Room::of(dir)?;
    Ok(Filesystem {
        capacity,
        available,
    })
}

/// The size and usage of a filesystem.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Room {
    /// The size in bytes.
    pub capacity: u64,
    /// Bytes available to unprivileged users.
    pub available: u64,
    /// Bytes available to root.
    pub free: u64,
    /// The number of inodes.
    pub inodes: u64,
    /// The number of free inodes.
    pub inodes_free: u64,
}

impl Room {
    /// Reads the usage of the filesystem that contains a directory.
    pub fn of(dir: &Path) -> std::io::Result<Room> {
        let stat = nix::sys::statvfs::statvfs(dir)?;
        let bytes = |blocks: u64| blocks * stat.fragment_size();
        Ok(Room {
            capacity: bytes(stat.blocks()),
            available: bytes(stat.blocks_available()),
            free: bytes(stat.blocks_free()),
            inodes: stat.files(),
            inodes_free: stat.files_free(),
        })
    }
}

/// The kernel release.
#[must_use]
pub fn kernel() -> String {
    line("/proc/sys/kernel/osrelease")
}

/// A sysctl by its path below `/proc/sys`; empty if it does not exist.
#[must_use]
pub fn sysctl(name: &str) -> String {
    line(&format!("/proc/sys/{name}"))
}

/// The interfaces with an IPv4 default route, in the order of their names, with the reverse path filter that takes effect: 0 off,
/// 1 strict, 2 loose (RFC 3704). Routes to the pods of other nodes do not make an uplink of an overlay's device.
#[must_use]
pub fn uplinks() -> Vec<(String, u8)> {
    let names = default_interfaces(&line("/proc/net/route"));
    let filter = |of: &str| {
        sysctl(&format!("net/ipv4/conf/{of}/rp_filter"))
            .parse()
            .ok()
    };
    // The kernel takes the larger value (Documentation/networking/ip-sysctl.rst).
    names
        .into_iter()
        .filter_map(|name| Some((filter(&name).max(filter("all"))?, name)))
        .map(|(filter, name)| (name, filter))
        .collect()
}

/// The interfaces of the default routes in the kernel's table `/proc/net/route`.
fn default_interfaces(table: &str) -> BTreeSet<String> {
    // Columns: interface, destination, gateway, flags, references, uses, metric, mask; addresses are hexadecimal. The interface
    // of an unreachable route is "*" (`fib_route_seq_show` in net/ipv4/fib_trie.c).
    let rows = table.lines().skip(1).map(str::split_whitespace);
    rows.filter_map(|mut row| {
        let (name, destination, mask) = (row.next()?, row.next()?, row.nth(5)?);
        let is_default = destination == "00000000" && mask == "00000000";
        (is_default && name != "*").then(|| name.to_owned())
    })
    .collect()
}

/// The size limit of a module list in bytes.
const MODULES: u64 = 8 << 20;

/// Whether the kernel supports a filesystem, directly or through a module.
#[must_use]
pub fn has_filesystem(name: &str) -> bool {
    let loaded = line("/proc/filesystems");
    if loaded
        .lines()
        .any(|row| row.split_whitespace().last() == Some(name))
    {
        return true;
    }
    let file = format!("/{name}.ko");
    ["modules.dep", "modules.builtin"].iter().any(|list| {
        let path = format!("/lib/modules/{}/{list}", kernel());
        super::file::read_text(path.as_ref(), MODULES).is_ok_and(|text| text.contains(&file))
    })
}

/// The swap files and devices of the machine. Includes compressed memory (zram), as for the kubelet.
#[must_use]
pub fn swaps() -> Vec<String> {
    let table = line("/proc/swaps");
    let rows = table.lines().skip(1);
    rows.filter_map(|row| row.split_whitespace().next().map(Into::into))
        .collect()
}

/// The host name in lower case.
#[must_use]
pub fn hostname() -> String {
    line("/proc/sys/kernel/hostname").to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_uplink_has_a_default_route() {
        // eth1 has a default route without a gateway; flannel.1 and eth2 have gateways for some destinations, and tun0 for a half
        // of all.
        let table = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
            eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
            eth1\t00000000\t00000000\t0001\t0\t0\t100\t00000000\t0\t0\t0\n\
            *\t00000000\t00000000\t0200\t0\t0\t200\t00000000\t0\t0\t0\n\
            cni0\t0000F40A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
            flannel.1\t0001F40A\t0001F40A\t0003\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
            tun0\t00000000\t010010AC\t0003\t0\t0\t0\t00000080\t0\t0\t0\n\
            eth2\t0003A8C0\t010010AC\t0003\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
            torn";
        assert_eq!(Vec::from_iter(default_interfaces(table)), ["eth0", "eth1"]);
        assert!(default_interfaces("").is_empty());
    }

    #[test]
    fn the_number_of_processors_is_that_of_the_machine() {
        // This test may be bound to fewer processors than the machine has.
        let here = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        assert!(usize::try_from(cpus()).is_ok_and(|all| all >= here));
    }
}
