//! Pod cgroups on v1 and v2, managed directly (cgroupfs driver). All functions block, so callers use a blocking thread.
//!
//! cgroups-rs detects the hierarchies; this module restricts access to the cgroups that the caller names.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use holdfast_core::pod::cgroup_values::{Controller, Difference, Setting};

const ROOT: &str = "/sys/fs/cgroup";

/// The v1 controllers in which pods get a cgroup.
const CONTROLLERS: &[&str] = &[
    "cpu",
    "cpuacct",
    "cpuset",
    "memory",
    "devices",
    "freezer",
    "blkio",
    "pids",
    "hugetlb",
    "net_cls",
    "net_prio",
    "perf_event",
    "systemd",
    "rdma",
    "misc",
    "unified",
];

/// Whether this machine uses only the unified hierarchy.
#[must_use]
pub fn is_v2() -> bool {
    static V2: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *V2.get_or_init(cgroups_rs::fs::hierarchies::is_cgroup2_unified_mode)
}

/// The available and enabled controllers.
#[must_use]
pub fn controllers() -> Vec<String> {
    if is_v2() {
        let list = fs::read_to_string(Path::new(ROOT).join("cgroup.controllers"));
        let list = list.unwrap_or_default();
        return list.split_whitespace().map(Into::into).collect();
    }
    let table = fs::read_to_string("/proc/cgroups").unwrap_or_default();
    let rows = table.lines().filter(|row| !row.starts_with('#'));
    let enabled = rows.filter_map(|row| {
        let fields: Vec<&str> = row.split_whitespace().collect();
        match fields[..] {
            [name, _, _, "1"] => Some(name.to_owned()),
            _ => None,
        }
    });
    enabled.collect()
}

/// Whether the kernel accounts for the swap usage of cgroups.
#[must_use]
pub(crate) fn accounts_swap() -> bool {
    if !is_v2() {
        return Path::new(ROOT)
            .join("memory/memory.memsw.limit_in_bytes")
            .exists();
    }
    // The root has no such file, but every other cgroup does.
    let below = fs::read_dir(ROOT)
        .into_iter()
        .flatten()
        .filter_map(Result::ok);
    below
        .into_iter()
        .any(|entry| entry.path().join("memory.swap.max").exists())
}

/// The hierarchies of this machine: the unified one on v2, all
/// mounted ones on v1. They do not change while the process runs.
fn hierarchies() -> &'static [PathBuf] {
    static FOUND: std::sync::OnceLock<Vec<PathBuf>> = std::sync::OnceLock::new();
    FOUND.get_or_init(|| {
        if is_v2() {
            return vec![PathBuf::from(ROOT)];
        }
        let mut seen = Vec::new();
        let mounted = CONTROLLERS
            .iter()
            .map(|c| Path::new(ROOT).join(c))
            .filter(|dir| dir.is_dir());
        mounted
            // `cpu` and `cpuacct` can be names of the same hierarchy.
            .filter(|dir| match fs::canonicalize(dir) {
                Ok(real) if !seen.contains(&real) => {
                    seen.push(real);
                    true
                }
                _ => false,
            })
            .collect()
    })
}

/// The directories of a cgroup path.
fn places(path: &str) -> Vec<PathBuf> {
    let relative = path.trim_start_matches('/');
    hierarchies().iter().map(|h| h.join(relative)).collect()
}

fn controller(dir: &Path, path: &str) -> String {
    let depth = path.trim_matches('/').split('/').count();
    dir.ancestors()
        .nth(depth)
        .and_then(Path::file_name)
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default()
}

fn write(dir: &Path, file: &str, value: &str) -> io::Result<()> {
    fs::write(dir.join(file), value).map_err(|e| {
        io::Error::new(
            e.kind(),
            format!("{} cannot be set to {value}: {e}", dir.join(file).display()),
        )
    })
}

/// Creates a single level. On v1, a new cpuset has no CPUs and must copy those
/// of its parent. On v2, the parent must enable its controllers for children.
fn make_level(path: &str) -> io::Result<()> {
    for dir in places(path) {
        match fs::create_dir(&dir) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            Err(error) => {
                return Err(io::Error::new(
                    error.kind(),
                    format!("the cgroup {} cannot be created: {error}", dir.display()),
                ));
            }
        }
        if !is_v2() && controller(&dir, path) == "cpuset" {
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if let Some(parent) = dir.parent() {
                    let inherited = fs::read_to_string(parent.join(file))?;
                    write(&dir, file, inherited.trim())?;
                }
            }
        }
    }
    if is_v2() {
        let dir = Path::new(ROOT).join(path.trim_start_matches('/'));
        if let Some(parent) = dir.parent() {
            let available =
                fs::read_to_string(parent.join("cgroup.controllers")).unwrap_or_default();
            for name in PASSED_DOWN
                .iter()
                .filter(|c| available.split_whitespace().any(|a| a == **c))
            {
                write(parent, "cgroup.subtree_control", &format!("+{name}"))?;
            }
        }
    }
    Ok(())
}

/// The controllers that are enabled for pods' cgroups if the kernel has them (v2).
const PASSED_DOWN: [&str; 6] = ["cpu", "cpuset", "memory", "pids", "io", "hugetlb"];

/// Whether the parent of a cgroup has enabled all controllers for it (v2).
fn has_controllers(path: &str) -> bool {
    let read = |dir: &Path| fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default();
    let own = read(&Path::new(ROOT).join(path.trim_start_matches('/')));
    let all = read(Path::new(ROOT));
    let mut wanted = PASSED_DOWN
        .iter()
        .filter(|c| all.split_whitespace().any(|a| a == **c));
    wanted.all(|c| own.split_whitespace().any(|o| o == *c))
}

/// Creates a cgroup and its ancestors, as far as they are missing.
pub fn make(path: &str) -> io::Result<()> {
    let is_there = |path: &str| {
        places(path).iter().all(|dir| dir.is_dir()) && (!is_v2() || has_controllers(path))
    };
    if is_there(path) {
        return Ok(());
    }
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    for depth in 1..=parts.len() {
        make_level(&format!("/{}", parts[..depth].join("/")))?;
    }
    Ok(())
}

/// Enables a controller for a cgroup that another program has created (v2).
pub fn pass_down(path: &str, controller: Controller) -> io::Result<()> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    for depth in 0..parts.len() {
        let dir = Path::new(ROOT).join(parts[..depth].join("/"));
        let passed = fs::read_to_string(dir.join("cgroup.subtree_control"))?;
        if !passed.split_whitespace().any(|c| c == controller.name()) {
            let more = format!("+{}", controller.name());
            write(&dir, "cgroup.subtree_control", &more)?;
        }
    }
    Ok(())
}

/// Whether the kernel has a usable controller.
#[must_use]
pub fn has_controller(controller: Controller) -> bool {
    if !is_v2() {
        return Path::new(ROOT).join(controller.name()).is_dir();
    }
    static FOUND: std::sync::OnceLock<Vec<String>> = std::sync::OnceLock::new();
    let all = FOUND.get_or_init(controllers);
    all.iter().any(|c| c == controller.name())
}

fn directory(path: &str, controller: Controller) -> PathBuf {
    let relative = path.trim_start_matches('/');
    if is_v2() {
        Path::new(ROOT).join(relative)
    } else {
        Path::new(ROOT).join(controller.name()).join(relative)
    }
}

/// The difference between a setting and its file. `None` if they agree, or if the kernel does not support the file.
fn difference(path: &str, setting: &Setting) -> Option<Difference> {
    if !has_controller(setting.controller) {
        return None;
    }
    let file = directory(path, setting.controller).join(&setting.file);
    let found = match fs::read_to_string(file) {
        Ok(text) if setting.is_met_by(&text) => return None,
        Ok(text) => Some(text.trim().to_owned()),
        // Some kernels lack a page size or the accounting of reservations.
        Err(_) if setting.controller == Controller::HugeTlb => return None,
        Err(_) => None,
    };
    Some(Difference {
        file: setting.file.clone(),
        found,
        wanted: setting.value.clone(),
    })
}

/// The files of a cgroup whose contents differ from the settings.
#[must_use]
pub fn differences(path: &str, settings: &[Setting]) -> Vec<Difference> {
    settings
        .iter()
        .filter_map(|setting| difference(path, setting))
        .collect()
}

/// Writes settings to a cgroup and returns the differences. If a file cannot
/// be written, writes the others nevertheless and returns the first error.
pub fn set(path: &str, settings: &[Setting]) -> io::Result<Vec<Difference>> {
    let (mut changed, mut failed) = (vec![], None);
    for setting in settings {
        let Some(difference) = difference(path, setting) else {
            continue;
        };
        let dir = directory(path, setting.controller);
        match write(&dir, &setting.file, &setting.value) {
            Ok(()) => changed.push(difference),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    failed.map_or(Ok(changed), Err)
}

/// The memory usage of a cgroup in bytes, including caches; `None` if unknown.
#[must_use]
pub fn memory_in_use(path: &str) -> Option<u64> {
    let file = if is_v2() {
        "memory.current"
    } else {
        "memory.usage_in_bytes"
    };
    let dir = directory(path, Controller::Memory);
    let text = fs::read_to_string(dir.join(file)).ok()?;
    text.trim().parse().ok()
}

/// The processes in a cgroup, without its descendants. On v1, uses the devices hierarchy, as the kubelet does.
pub fn processes(path: &str) -> io::Result<Vec<i32>> {
    let of_devices = Path::new(ROOT).join("devices");
    let dir = match hierarchies().iter().find(|dir| **dir == of_devices) {
        Some(devices) => Some(devices.join(path.trim_start_matches('/'))),
        None => places(path).into_iter().next(),
    };
    let dir = dir.ok_or(io::ErrorKind::NotFound)?;
    let text = fs::read_to_string(dir.join("cgroup.procs"))?;
    Ok(text.lines().filter_map(|pid| pid.parse().ok()).collect())
}

/// Moves a process to a cgroup in all hierarchies, and creates
/// the cgroup if it is missing. An exited process is no error.
pub fn join(path: &str, pid: i32) -> io::Result<()> {
    make(path)?;
    let mut failed = None;
    for dir in places(path) {
        match fs::write(dir.join("cgroup.procs"), pid.to_string()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(nix::errno::Errno::ESRCH as i32) => {
                return Ok(());
            }
            Err(error) => {
                let text = format!(
                    "process {pid} cannot be moved to {}: {error}",
                    dir.display()
                );
                failed = failed.or(Some(io::Error::new(error.kind(), text)));
            }
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Maximum number of passes to catch processes that started while others were moved.
const ROUNDS: u32 = 11;

/// Whether a process is a kernel thread, which has no executable. An exited process has none either.
fn is_of_kernel(pid: i32) -> bool {
    let program = fs::read_link(format!("/proc/{pid}/exe"));
    program.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Moves processes from a cgroup to another, except process 1 and kernel threads.
/// Returns the number of moved processes, or the first error of the last pass.
pub fn move_processes(from: &str, to: &str) -> io::Result<usize> {
    let (mut moved, mut failed) = (0, None);
    for _ in 0..ROUNDS {
        let mut left = processes(from)?;
        left.retain(|pid| *pid != 1 && !is_of_kernel(*pid));
        if left.is_empty() {
            return Ok(moved);
        }
        failed = None;
        for pid in left {
            match join(to, pid) {
                Ok(()) => moved += 1,
                Err(error) => failed = failed.or(Some(error)),
            }
        }
    }
    failed.map_or(Ok(moved), Err)
}

/// How long killed processes may take to exit. On a busy machine, freeing the memory of one takes a second.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Removes a cgroup and its descendants, and kills processes in them.
///
/// # Errors
/// When a process is still in a cgroup 10 seconds after it was killed.
pub fn remove(path: &str) -> io::Result<()> {
    for dir in places(path) {
        remove_tree(&dir)?;
    }
    Ok(())
}

fn remove_tree(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries
        .filter_map(Result::ok)
        .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
    {
        remove_tree(&entry.path())?;
    }
    let deadline = Instant::now() + EXIT_TIMEOUT;
    loop {
        match fs::remove_dir(dir) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if Instant::now() >= deadline => {
                return Err(io::Error::new(
                    error.kind(),
                    format!("the cgroup {} cannot be removed: {error}", dir.display()),
                ));
            }
            Err(_) => {}
        }
        let processes = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        for pid in processes.lines().filter_map(|l| l.parse().ok()) {
            // The process may have exited meanwhile.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether the cgroup exists.
#[must_use]
pub fn exists(path: &str) -> bool {
    places(path).iter().any(|dir| dir.is_dir())
}

/// The maximum depth at which [`named`] searches.
const DEPTH: usize = 8;

/// Searches all cgroups below the root for names to which `key` returns a value. Returns the paths by this value.
pub fn named(key: impl Fn(&str) -> Option<String>) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut left = vec![(String::new(), 0)];
    while let Some((path, depth)) = left.pop() {
        for name in children(&path) {
            let below = format!("{path}/{name}");
            match key(&name) {
                Some(key) => _ = found.insert(key, below),
                None if depth < DEPTH => left.push((below, depth + 1)),
                None => {}
            }
        }
    }
    found
}

/// The names of a cgroup's children; empty if the cgroup does not exist.
#[must_use]
pub fn children(path: &str) -> Vec<String> {
    let first = places(path).into_iter().next();
    let entries = first
        .into_iter()
        .filter_map(|dir| fs::read_dir(dir).ok())
        .flatten()
        .filter_map(Result::ok);
    entries
        .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
        .filter_map(|e| e.file_name().into_string().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FROM: &str = "/holdfast-t-move-from";
    const TO: &str = "/holdfast-t-move-to";

    /// A sleeping process and its cgroups, which are removed on drop.
    struct Moved(std::process::Child);

    impl Drop for Moved {
        fn drop(&mut self) {
            // If they do not exist, the test has already failed.
            let _ = self.0.kill();
            let _ = self.0.wait();
            let _ = remove(FROM);
            let _ = remove(TO);
        }
    }

    #[test]
    fn processes_are_moved_from_one_cgroup_to_another() {
        if crate::skip::needs_root() {
            return;
        }
        let mut command = std::process::Command::new("sleep");
        let child = Moved(command.arg("600").spawn().expect("begun"));
        let pid = i32::try_from(child.0.id()).expect("a process id");
        let below = format!("{TO}/below");
        join(FROM, pid).expect("moved");
        assert_eq!(processes(FROM).expect("there"), [pid]);
        assert_eq!(move_processes(FROM, &below).expect("moved"), 1);
        assert!(processes(FROM).expect("there").is_empty());
        assert_eq!(processes(&below).expect("there"), [pid]);
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("there");
        assert!(!text.contains(FROM), "moved in every hierarchy: {text}");
        assert_eq!(move_processes(FROM, TO).expect("nothing"), 0);
        assert!(is_of_kernel(i32::MAX) && !is_of_kernel(pid));
        // An exited process is no error.
        join(&below, i32::MAX).expect("nothing");
    }
}
