//! The limits of this process, and the programs that it can run.

use std::io;
use std::path::PathBuf;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Sets the open file limit to `wanted`, or to the maximum allowed. Returns the new limit.
pub fn limit_open_files(wanted: u64) -> io::Result<u64> {
    let files = Resource::RLIMIT_NOFILE;
    let (_, most) = getrlimit(files)?;
    // Raising the hard limit needs a capability that a container may lack.
    if setrlimit(files, wanted, wanted).is_err() {
        setrlimit(files, wanted.min(most), most)?;
    }
    Ok(getrlimit(files)?.0)
}

/// Prevents processes without root privileges from reading this process's memory through
/// `ptrace` or `/proc`, and core dumps by the kernel. Does not apply to child processes.
pub fn hide_memory() -> io::Result<()> {
    Ok(nix::sys::prctl::set_dumpable(false)?)
}

/// Like [`hide_memory`], but also prevents core dumps if the kernel is
/// configured to dump such processes. Child processes inherit this limit.
pub fn forbid_dumps() -> io::Result<()> {
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    hide_memory()
}

/// Sets the priority of this process for the OOM killer: -1000 (never killed) to 1000.
pub fn set_oom_score_adj(score: i32) -> io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", score.to_string())
}

/// Whether this process is in the machine's pid namespace, and not in that of a container.
pub fn is_on_host() -> io::Result<bool> {
    let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/pid"));
    Ok(of("1")? == of("self")?)
}

/// Finds a program in `PATH` and in the usual directories of system programs.
#[must_use]
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(
            [
                "/usr/local/sbin",
                "/usr/sbin",
                "/sbin",
                "/usr/local/bin",
                "/usr/bin",
                "/bin",
            ]
            .map(PathBuf::from),
        )
        .map(|d| d.join(name))
        .find(|p| p.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_dumps_are_disabled() {
        let (before, most) = getrlimit(Resource::RLIMIT_CORE).expect("limits");
        forbid_dumps().expect("allowed to every process");
        let dumpable = nix::sys::prctl::get_dumpable().expect("a flag");
        assert_eq!(
            (dumpable, getrlimit(Resource::RLIMIT_CORE)),
            (false, Ok((0, 0)))
        );
        nix::sys::prctl::set_dumpable(true).expect("allowed to every process");
        // Only root can raise the limit again.
        let _ = setrlimit(Resource::RLIMIT_CORE, before, most);
    }

    #[test]
    fn the_open_file_limit_is_raised_up_to_the_maximum() {
        let (before, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("limits");
        assert_eq!(limit_open_files(before).expect("set"), before);
        // More than any kernel allows: the limit becomes the maximum.
        assert!(limit_open_files(u64::MAX).expect("set") >= most.min(before));
    }
}
