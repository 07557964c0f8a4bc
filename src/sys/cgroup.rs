//! Pod cgroups, on v1 and v2, made directly (cgroupfs driver). Blocking: callers use a blocking thread.
//!
//! cgroups-rs knows which hierarchies there are and writes the values; this module keeps it from
//! touching anything but the cgroups named here.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::core::pod::cgroup::{PodLimits, place, weight};

const ROOT: &str = "/sys/fs/cgroup";

/// The controllers of v1 in which pods get a cgroup.
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

/// Whether this machine has the unified hierarchy only.
#[must_use]
pub fn is_v2() -> bool {
    static V2: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *V2.get_or_init(cgroups_rs::fs::hierarchies::is_cgroup2_unified_mode)
}

/// Whether the kernel accounts for the swap of cgroups.
#[must_use]
pub fn accounts_swap() -> bool {
    if !is_v2() {
        return Path::new(ROOT)
            .join("memory/memory.memsw.limit_in_bytes")
            .exists();
    }
    // The root has no such file, every cgroup below it has.
    let below = fs::read_dir(ROOT)
        .into_iter()
        .flatten()
        .filter_map(Result::ok);
    below
        .into_iter()
        .any(|entry| entry.path().join("memory.swap.max").exists())
}

/// The hierarchies of this machine: the unified one on v2, every mounted one on v1. They do not change
/// while the process runs.
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
            // `cpu` and `cpuacct` may be one hierarchy under two names.
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

/// The directories that a cgroup path stands for.
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

/// Makes one level. On v1 a cpuset starts without CPUs and must copy its parent's; on v2 the parent must
/// pass its controllers down.
fn make_level(path: &str) -> io::Result<()> {
    for dir in places(path) {
        match fs::create_dir(&dir) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            Err(error) => {
                return Err(io::Error::new(
                    error.kind(),
                    format!("the cgroup {} cannot be made: {error}", dir.display()),
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
            for name in ["cpu", "cpuset", "memory", "pids", "io", "hugetlb"]
                .iter()
                .filter(|c| available.split_whitespace().any(|a| a == **c))
            {
                write(parent, "cgroup.subtree_control", &format!("+{name}"))?;
            }
        }
    }
    Ok(())
}

/// Makes a pod's cgroup below `tiers` and sets its values.
pub fn ensure_pod(tiers: &[String], path: &str, limits: &PodLimits) -> io::Result<()> {
    // The tiers are there for all pods but the first.
    let first = make_level(path);
    if first
        .as_ref()
        .is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
    {
        for tier in tiers {
            make_level(tier)?;
        }
        make_level(path)?;
    } else {
        first?;
    }
    for dir in places(path) {
        if is_v2() {
            let max = |v: Option<i64>| v.map_or_else(|| "max".to_owned(), |v| v.to_string());
            write(&dir, "cpu.weight", &weight(limits.shares).to_string())?;
            write(
                &dir,
                "cpu.max",
                &format!("{} {}", max(limits.quota), limits.period),
            )?;
            write(&dir, "memory.max", &max(limits.memory))?;
            if limits.pids.is_some() {
                write(&dir, "pids.max", &max(limits.pids))?;
            }
            continue;
        }
        match controller(&dir, path).as_str() {
            "cpu" => {
                write(&dir, "cpu.shares", &limits.shares.to_string())?;
                if let Some(quota) = limits.quota {
                    write(&dir, "cpu.cfs_period_us", &limits.period.to_string())?;
                    write(&dir, "cpu.cfs_quota_us", &quota.to_string())?;
                }
            }
            "memory" => {
                if let Some(memory) = limits.memory {
                    write(&dir, "memory.limit_in_bytes", &memory.to_string())?;
                }
            }
            "pids" => {
                if let Some(pids) = limits.pids {
                    write(&dir, "pids.max", &pids.to_string())?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// The file of a cgroup's CPU weight, and what it holds for these shares. None where there is no such controller.
fn shares_file(path: &str, shares: u64) -> Option<(PathBuf, String)> {
    let path = place(path, None);
    let (file, value) = if is_v2() {
        ("cpu.weight", weight(shares))
    } else {
        ("cpu.shares", shares)
    };
    let dir = places(&path)
        .into_iter()
        .find(|dir| dir.join(file).exists())?;
    Some((dir.join(file), value.to_string()))
}

/// Whether a cgroup has these shares; one without the controller has what it can have.
#[must_use]
pub fn has_shares(path: &str, shares: u64) -> bool {
    shares_file(path, shares)
        .is_none_or(|(file, value)| fs::read_to_string(file).is_ok_and(|t| t.trim() == value))
}

/// Makes the cgroups `above` and the tiers where they are not there, and gives the tiers their shares.
pub fn ensure_tiers(above: &[String], tiers: &[(String, u64)]) -> io::Result<()> {
    for path in above.iter().chain(tiers.iter().map(|(path, _)| path)) {
        if !places(path).iter().all(|dir| dir.is_dir()) {
            make_level(path)?;
        }
    }
    for (path, shares) in tiers {
        if let Some((file, value)) =
            shares_file(path, *shares).filter(|_| !has_shares(path, *shares))
        {
            fs::write(&file, &value).map_err(|e| {
                let shown = file.display();
                io::Error::new(e.kind(), format!("{shown} cannot be set to {value}: {e}"))
            })?;
        }
    }
    Ok(())
}

/// Removes a cgroup and all below it; processes still in it are killed.
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
    for _ in 0..20 {
        match fs::remove_dir(dir) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(_) => {}
        }
        let processes = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        for pid in processes.lines().filter_map(|l| l.parse().ok()) {
            // It may have ended meanwhile.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    fs::remove_dir(dir).map_err(|e| {
        io::Error::new(
            e.kind(),
            format!("the cgroup {} cannot be removed: {e}", dir.display()),
        )
    })
}

/// Whether there is such a cgroup; a slice's name is its path.
#[must_use]
pub fn exists(path: &str) -> bool {
    let path = place(path, None);
    places(&path).iter().any(|dir| dir.is_dir())
}

/// The names of the cgroups in one; none if it is not there.
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
