//! Reads the resource usage of cgroups, processes and the machine.
//! Stateless; anything that no longer exists has no usage.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::dir::Dir;
use nix::fcntl::{AtFlags, OFlag, open, openat, readlinkat};
use nix::sys::stat::{Mode, fstatat};

use holdfast_core::serving::block_io::{self, DiskCounters};
use holdfast_core::serving::cgroup_stats::{self, Depth, Texts, Usage};
use holdfast_core::serving::exposition::Page;
use holdfast_core::serving::machine_stats::{self, Interface};
use holdfast_core::serving::pressure::{self, Pressures};

use super::cgroup::is_v2;
use super::machine::Room;
use super::mount;

const ROOT: &str = "/sys/fs/cgroup";
/// The size limit for reading a kernel file, in bytes.
const MAX_TEXT_BYTES: u64 = 1 << 20;
/// Limits for counting descriptors: processes of a cgroup, and descriptors of a process.
const MAX_PROCESSES: usize = 256;
const MAX_DESCRIPTORS: usize = 4096;
/// Maximum number of filesystems of the machine to query.
const MAX_FILESYSTEMS: usize = 64;

/// An open cgroup directory. Resolving a path from the root costs more than reading a file.
struct Group(OwnedFd);

impl Group {
    fn open(path: &Path) -> Option<Group> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        open(path, flags, Mode::empty()).ok().map(Group)
    }

    fn text(&self, file: &str) -> Option<String> {
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        let file = File::from(openat(&self.0, file, flags, Mode::empty()).ok()?);
        let mut text = String::with_capacity(2048);
        // If the accounting of a file is disabled, the kernel returns an error on reading.
        file.take(MAX_TEXT_BYTES).read_to_string(&mut text).ok()?;
        Some(text)
    }
}

/// The usage of a cgroup; `None` if it does not exist.
#[must_use]
pub fn cgroup(path: &str, depth: Depth) -> Option<Usage> {
    texts(path, |_, needed| needed <= depth).map(|texts| usage(&texts))
}

/// Reads the wanted files of a cgroup, by name. `wanted` gets the name and
/// the depth that needs the file. `None` if the cgroup does not exist.
#[must_use]
pub fn texts(path: &str, wanted: impl Fn(&str, Depth) -> bool) -> Option<Texts> {
    let relative = path.trim_matches('/');
    if is_v2() {
        let group = Group::open(&Path::new(ROOT).join(relative))?;
        let files = cgroup_stats::V2.iter();
        let files = files.filter(|(file, needed)| wanted(file, *needed));
        let texts = files.filter_map(|(file, _)| Some((*file, group.text(file)?)));
        return Some(texts.collect());
    }
    let mut groups: BTreeMap<&str, Option<Group>> = BTreeMap::new();
    let files = cgroup_stats::V1.iter();
    let files = files.filter(|(_, file, needed)| wanted(file, *needed));
    let texts: Texts = files
        .filter_map(|(controller, file, _)| {
            let group = groups
                .entry(*controller)
                .or_insert_with(|| Group::open(&Path::new(ROOT).join(controller).join(relative)));
            Some((*file, group.as_ref()?.text(file)?))
        })
        .collect();
    (!texts.is_empty()).then_some(texts)
}

/// Parses the files of a cgroup.
#[must_use]
pub fn usage(texts: &Texts) -> Usage {
    if is_v2() {
        cgroup_stats::v2(texts)
    } else {
        cgroup_stats::v1(texts)
    }
}

/// Properties of a cgroup's processes that the cgroup does not account for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Processes {
    /// The network interfaces of the first process.
    pub interfaces: Vec<Interface>,
    /// The number of open descriptors and of sockets among them; `None` if there are too many to count.
    pub descriptors: Option<(u64, u64)>,
    /// The open file limit of the first process; -1 if unlimited.
    pub open_files: Option<i64>,
}

/// The processes in a cgroup, without its descendants.
fn members(path: &str) -> Vec<u32> {
    let relative = path.trim_matches('/');
    let dir = if is_v2() {
        Path::new(ROOT).join(relative)
    } else {
        Path::new(ROOT).join("cpu").join(relative)
    };
    let text = Group::open(&dir).and_then(|group| group.text("cgroup.procs"));
    let text = text.unwrap_or_default();
    text.lines().filter_map(|pid| pid.parse().ok()).collect()
}

/// Reads the properties of a cgroup's processes: interfaces if requested, and descriptors with [`Depth::All`].
#[must_use]
pub fn processes_of(path: &str, depth: Depth, with_interfaces: bool) -> Processes {
    let members = members(path);
    let read = |pid: &u32, file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
    let first = |file: &str| members.iter().find_map(|pid| read(pid, file));
    let mut found = Processes::default();
    if with_interfaces {
        let text = first("net/dev").unwrap_or_default();
        found.interfaces = machine_stats::interfaces(&text);
    }
    if depth == Depth::All {
        found.open_files = first("limits").and_then(|text| machine_stats::open_files(&text));
        found.descriptors = descriptors(&members);
    }
    found
}

/// The number of open descriptors of processes, and of sockets among them.
fn descriptors(members: &[u32]) -> Option<(u64, u64)> {
    if members.len() > MAX_PROCESSES {
        return None;
    }
    let (mut all, mut sockets) = (0, 0);
    for pid in members {
        let path = format!("/proc/{pid}/fd");
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        // The process has exited meanwhile.
        let Ok(mut dir) = Dir::open(path.as_str(), flags, Mode::empty()) else {
            continue;
        };
        // Since Linux 6.2, the directory's size is the number of descriptors, which avoids listing too many.
        let size = fstatat(&dir, ".", AtFlags::empty()).map_or(0, |stat| stat.st_size);
        if usize::try_from(size).is_ok_and(|size| size > MAX_DESCRIPTORS) {
            return None;
        }
        let names: Vec<_> = dir
            .iter()
            .filter_map(Result::ok)
            .map(|entry| entry.file_name().to_owned())
            .filter(|name| !name.to_bytes().starts_with(b"."))
            .take(MAX_DESCRIPTORS + 1)
            .collect();
        for name in names {
            all += 1;
            let link = readlinkat(&dir, name.as_c_str()).unwrap_or_default();
            sockets += u64::from(link.as_encoded_bytes().starts_with(b"socket:"));
        }
        if all > MAX_DESCRIPTORS as u64 {
            return None;
        }
    }
    Some((all, sockets))
}

/// The cgroup of the process that listens on a socket; `None` for the root cgroup. Connects, but sends nothing.
#[must_use]
pub fn cgroup_of_server(socket: &str) -> Option<String> {
    use nix::sys::socket::{UnixAddr, connect, getsockopt, sockopt::PeerCredentials};
    use std::os::fd::AsRawFd as _;
    let path = socket.strip_prefix("unix://").unwrap_or(socket);
    // Non-blocking, because the server may not accept.
    let end = super::link::client().ok()?;
    connect(end.as_raw_fd(), &UnixAddr::new(path).ok()?).ok()?;
    let pid = getsockopt(&end, PeerCredentials).ok()?.pid();
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    machine_stats::cgroup_of_process(&text, is_v2()).map(str::to_owned)
}

/// The usage of the machine.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Whole {
    /// Resource usage.
    pub usage: Usage,
    /// Available memory in bytes.
    pub available: u64,
    /// Total and free swap in bytes.
    pub swap: (u64, u64),
    /// The network interfaces.
    pub interfaces: Vec<Interface>,
    /// The maximum and current number of processes.
    pub processes: (u64, u64),
    /// The time of the last boot, in seconds since 1970.
    pub booted: u64,
    /// The disks and partitions.
    pub disks: Vec<DiskCounters>,
    /// The filesystems and their usage.
    pub filesystems: Vec<Filesystem>,
    /// Properties of the processes in the root cgroup.
    pub own: Processes,
}

/// The usage of a filesystem of the machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filesystem {
    /// The device, or the mount point of a filesystem without device.
    pub device: String,
    /// The size and usage.
    pub room: Room,
}

/// The machine's filesystems. `root` is the agent's directory; mounts of pods below it are excluded.
fn filesystems(root: &str) -> Vec<Filesystem> {
    let mut known: BTreeMap<String, std::path::PathBuf> = BTreeMap::new();
    for mount in mount::table().unwrap_or_default() {
        let point = mount.point.to_string_lossy();
        let device = machine_stats::device_of_mount(&mount.kind, &mount.source, &point, root);
        if let Some(device) = device {
            known.entry(device).or_insert(mount.point);
        }
    }
    let known = known.into_iter().take(MAX_FILESYSTEMS);
    let room = |(device, point): (String, std::path::PathBuf)| {
        let room = Room::of(&point).ok()?;
        Some(Filesystem { device, room })
    };
    known.filter_map(room).collect()
}

/// The cgroup of this process; `None` for the root cgroup.
#[must_use]
pub fn own_cgroup() -> Option<String> {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    machine_stats::cgroup_of_process(&text, is_v2()).map(str::to_owned)
}

/// The machine's memory in bytes, and the part that is outside its working set.
#[must_use]
pub fn memory() -> (u64, u64) {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = machine_stats::meminfo(&text, "MemTotal");
    // cgroup v2 has no memory statistics in the root.
    let root = (!is_v2()).then(|| cgroup("/", Depth::Memory)).flatten();
    let (_, working_set) = used(&text, &root.unwrap_or_default());
    (total, total.saturating_sub(working_set))
}

/// The memory usage and working set of the machine. Both are computed as cAdvisor does for
/// the root cgroup, so that thresholds mean the same as for a kubelet. v1 counts memory of
/// processes and page cache; v2 also counts kernel memory, which may be gigabytes.
fn used(meminfo: &str, root: &Usage) -> (u64, u64) {
    if root.memory > 0 {
        return (root.memory, root.working_set);
    }
    let of = |key: &str| machine_stats::meminfo(meminfo, key);
    let used = of("MemTotal").saturating_sub(of("MemFree"));
    (used, used.saturating_sub(of("Inactive(file)")))
}

/// The maximum number of processes and threads, and their current number.
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

/// The usage of the machine; with [`Depth::All`] including disks and filesystems. `root` is the agent's directory.
#[must_use]
pub fn machine(depth: Depth, root: &str) -> Whole {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let (stat, memory) = (text("/proc/stat"), text("/proc/meminfo"));
    let of = |key: &str| machine_stats::meminfo(&memory, key);
    let root_cgroup = cgroup("/", depth).unwrap_or_default();
    let (used, working_set) = used(&memory, &root_cgroup);
    let (cpu, user, system) = machine_stats::machine_cpu(&stat);
    let pressure = |name: &str| pressure::read(&text(&format!("/proc/pressure/{name}")));
    let processes = processes();
    let all = depth == Depth::All;
    let (mut disks, mut rooms, mut own) = (vec![], vec![], Processes::default());
    if all {
        disks = block_io::counters(&text("/proc/diskstats"));
        rooms = filesystems(root);
        own = processes_of("/", depth, false);
        own.open_files = machine_stats::open_files(&text("/proc/1/limits"));
    }
    Whole {
        usage: Usage {
            cpu,
            user,
            system,
            memory: used,
            working_set,
            rss: of("AnonPages"),
            cache: of("Cached"),
            mapped: of("Mapped"),
            file_pages: (of("Active(file)"), of("Inactive(file)")),
            kernel: of("Slab") + of("KernelStack") + of("PageTables"),
            swap: of("SwapTotal").saturating_sub(of("SwapFree")),
            limit: Some(of("MemTotal")),
            swap_limit: Some(of("SwapTotal")),
            threads: processes.1,
            pressure: Pressures {
                cpu: pressure("cpu"),
                memory: pressure("memory"),
                io: pressure("io"),
            },
            // The other fields come from the root cgroup, as far as the cgroup version provides them.
            ..root_cgroup
        },
        available: of("MemTotal").saturating_sub(working_set),
        swap: (of("SwapTotal"), of("SwapFree")),
        interfaces: machine_stats::interfaces(&text("/proc/self/net/dev")),
        processes,
        booted: machine_stats::booted(&stat),
        disks,
        filesystems: rooms,
        own,
    }
}

/// Adds the metrics of this process to a page, under the names of Prometheus' client libraries.
pub fn write_process(page: &mut Page) {
    let (cpu, resident, virtual_bytes, open, most, start) = own();
    for (name, kind, help, value) in [
        (
            "process_cpu_seconds_total",
            "counter",
            "Total user and system CPU time spent in seconds.",
            cpu,
        ),
        (
            "process_resident_memory_bytes",
            "gauge",
            "Resident memory size in bytes.",
            resident as f64,
        ),
        (
            "process_virtual_memory_bytes",
            "gauge",
            "Virtual memory size in bytes.",
            virtual_bytes as f64,
        ),
        (
            "process_open_fds",
            "gauge",
            "Number of open file descriptors.",
            open as f64,
        ),
        (
            "process_max_fds",
            "gauge",
            "Maximum number of open file descriptors.",
            most as f64,
        ),
        (
            "process_start_time_seconds",
            "gauge",
            "Start time of the process since unix epoch in seconds.",
            start,
        ),
    ] {
        page.single(name, kind, help, &[], value);
    }
}

/// The usage of this process: CPU seconds, resident and virtual memory in
/// bytes, open descriptors and their limit, start time in seconds since 1970.
#[must_use]
fn own() -> (f64, u64, u64, u64, u64, f64) {
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
    let booted = machine_stats::booted(&booted);
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Memory that other processes may allocate or free during the test.
    const SLACK: u64 = 64 << 20;

    #[test]
    fn usage_of_this_machine_and_process_is_measured() {
        let whole = machine(Depth::All, "/var/lib/kubelet");
        assert!(
            whole.usage.cpu > 0 && whole.usage.memory > 0 && whole.processes.0 > 0,
            "{whole:?}"
        );
        assert!(
            whole.booted > 0 && whole.filesystems.iter().any(|f| f.room.capacity > 0),
            "{whole:?}"
        );
        let (seconds, resident, _, open, most, began) = own();
        assert!(seconds >= 0.0 && resident > 1 << 20 && open > 2 && most >= open && began > 1e9);
        assert_eq!(cgroup("/no-such-cgroup", Depth::All), None);
        assert_eq!(cgroup("/no-such-cgroup", Depth::Memory), None);
        let (all, left) = memory();
        assert!(left > 0 && left < all);
        if !is_v2() {
            let root = || cgroup("/", Depth::Memory).expect("a root").working_set;
            let (before, left, after) = (root(), memory().1, root());
            let (least, most) = (before.min(after), before.max(after));
            let used = (least - least.min(SLACK))..=(most + SLACK);
            assert!(used.contains(&(all - left)), "{used:?} {left}");
        }
        let none = processes_of("/no-such-cgroup", Depth::All, true);
        let descriptors = Some((0, 0));
        assert_eq!(
            none,
            Processes {
                descriptors,
                ..Processes::default()
            }
        );
    }

    #[test]
    fn descriptors_and_sockets_are_counted() {
        let _open = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (all, sockets) = descriptors(&[std::process::id()]).unwrap();
        assert!(all > sockets && sockets >= 1, "{all} {sockets}");
        assert_eq!(descriptors(&[u32::MAX]), Some((0, 0)));
        assert_eq!(descriptors(&vec![1; MAX_PROCESSES + 1]), None);
    }
}
