//! Long-running components of a local cluster. They run in the background and are found again by a pid file. The file
//! also has the start time of the process, so that a recycled pid is never mistaken for ours.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A component with its pid file and log.
#[derive(Debug, Clone)]
pub struct Component {
    /// The name, for messages and files.
    pub name: &'static str,
    pub(super) pid_file: PathBuf,
    /// The file with the component's output.
    pub log: PathBuf,
}

/// When a process started, in clock ticks since boot; `None` if there is no such process, or it has exited.
pub(super) fn started_at(pid: i32) -> Option<u64> {
    start_in(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The start in a process's `stat` file; `None` for a zombie. The first thread of a process may be a zombie while
/// others still run: until the last of them has exited, the process is the parent of its children and holds its files.
fn start_in(stat: &str) -> Option<u64> {
    // The name is in parentheses and may contain anything; fields count from after it.
    let rest = stat.rsplit_once(')')?.1;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let threads: u64 = fields.get(17)?.parse().ok()?;
    if fields.first() == Some(&"Z") && threads <= 1 {
        return None;
    }
    fields.get(19)?.parse().ok()
}

impl Component {
    /// Describes the component `name` of the cluster whose files are in `run` and `logs`.
    #[must_use]
    pub fn new(name: &'static str, run: &Path, logs: &Path) -> Component {
        Component {
            name,
            pid_file: run.join(format!("{name}.pid")),
            log: logs.join(format!("{name}.log")),
        }
    }

    /// Returns the pid and the start time in the pid file, whether the process still runs or not.
    fn recorded(&self) -> Option<(i32, u64)> {
        let text = fs::read_to_string(&self.pid_file).ok()?;
        let (pid, start) = text.trim().split_once(' ')?;
        Some((pid.parse().ok()?, start.parse().ok()?))
    }

    /// Returns the pid, if the component runs. A stale pid file is kept, because the supervisor may be writing the next
    /// one.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        let (pid, start) = self.recorded()?;
        (started_at(pid)? == start).then_some(pid)
    }

    /// Returns the value of an argument `NAME=VALUE` of the running process.
    #[must_use]
    pub(super) fn argument(&self, name: &str) -> Option<String> {
        let line = fs::read(format!("/proc/{}/cmdline", self.pid()?)).ok()?;
        let mut arguments = line.split(|b| *b == 0).map(String::from_utf8_lossy);
        arguments.find_map(|one| Some(one.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
    }

    /// Returns when the running process, or the last one, wrote its pid file. A component writes it first of all
    /// ([`Component::exec_program`]).
    pub(super) fn started(&self) -> Option<std::time::SystemTime> {
        fs::metadata(&self.pid_file).ok()?.modified().ok()
    }

    /// Starts the component in the background. The child first writes its own pid file ([`Component::exec_program`]),
    /// so that every process that runs can be found, even if this process is killed.
    pub fn start(&self, program: &Path, arguments: &[String]) -> anyhow::Result<Child> {
        let own = std::env::current_exe()?;
        let parent = std::process::id().to_string();
        let mut command = self.command(&own, &["--for", &parent], program, arguments)?;
        let mut child = command
            .spawn()
            .with_context(|| format!("{} cannot be started", self.name))?;
        let pid = i32::try_from(child.id())?;
        let recorded = || self.recorded().is_some_and(|(recorded, _)| recorded == pid);
        while !recorded() {
            // If the child exited after it had written its pid file, it did start: the caller learns its status.
            if let Some(status) = child.try_wait()?
                && !recorded()
            {
                bail!(
                    "{} exited immediately ({status}); see {}",
                    self.name,
                    self.log.display()
                );
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(child)
    }

    /// Returns the command `holdfast supervise` for this component, with its log as output.
    pub(super) fn command(
        &self,
        own: &Path,
        options: &[&str],
        program: &Path,
        arguments: &[String],
    ) -> anyhow::Result<Command> {
        let (run, logs) = (self.pid_file.parent(), self.log.parent());
        let (run, logs) = run.zip(logs).context("the component has no directories")?;
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.log)
            .with_context(|| format!("the log {} cannot be written", self.log.display()))?;
        let mut command = Command::new(own);
        command
            .arg("supervise")
            .args(["--part", self.name])
            .arg("--run")
            .arg(run)
            .arg("--logs")
            .arg(logs)
            .args(options)
            .arg("--")
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .current_dir("/");
        Ok(command)
    }

    /// Locks the component's directory for writing a pid file. The lock is released when the result is dropped.
    fn lock_pid_dir(&self) -> anyhow::Result<Option<fs::File>> {
        let dir = self
            .pid_file
            .parent()
            .context("the component has no directory")?;
        let failed = || format!("{} cannot be locked", dir.display());
        match fs::File::open(dir) {
            Ok(file) => {
                file.lock().with_context(failed)?;
                Ok(Some(file))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(failed),
        }
    }

    /// Waits for a process whose supervisor has exited: after this call, the process has written its pid file or never
    /// will.
    pub(super) fn await_pid_file(&self) -> anyhow::Result<()> {
        self.lock_pid_dir().map(drop)
    }

    /// Writes this process into the component's pid file, and runs `program` in its place. Fails if `parent` no longer
    /// runs, because another process may be the component by then.
    pub fn exec_program(
        &self,
        parent: u32,
        program: &Path,
        arguments: &[String],
    ) -> anyhow::Result<()> {
        let pid = i32::try_from(std::process::id())?;
        let start = started_at(pid).context("/proc is not mounted")?;
        let lock = self.lock_pid_dir()?;
        if std::os::unix::process::parent_id() != parent {
            bail!(
                "{} is not started: the process that started it has exited",
                self.name
            );
        }
        // Replaced atomically, because other processes read it at any time.
        let text = format!("{pid} {start}\n");
        holdfast_sys::file::replace_soon(&self.pid_file, text.as_bytes()).with_context(|| {
            format!("the pid file {} cannot be written", self.pid_file.display())
        })?;
        // From now on, a process that stops the parent finds this one in the pid file.
        drop(lock);
        let error = Command::new(program).args(arguments).exec();
        Err(error)
            .with_context(|| format!("{} cannot be started ({})", self.name, program.display()))
    }

    /// Returns the last lines of the log, for an error message.
    #[must_use]
    pub fn log_tail(&self) -> String {
        let text = fs::read(&self.log)
            .map(|b| String::from_utf8_lossy(&b[b.len().saturating_sub(4096)..]).into_owned())
            .unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(5).collect();
        lines
            .into_iter()
            .rev()
            .map(|l| format!("  | {l}\n"))
            .collect()
    }

    /// Stops the supervisor and then the component: SIGTERM, and SIGKILL after `grace`. Returns whether the component
    /// ran.
    pub fn stop(&self, grace: Duration) -> anyhow::Result<bool> {
        self.kill_supervisor()?;
        let Some(pid) = self.pid() else {
            self.remove_pid_file()?;
            return Ok(false);
        };
        let target = Pid::from_raw(pid);
        kill(target, Signal::SIGTERM)
            .with_context(|| format!("{} (pid {pid}) cannot be stopped", self.name))?;
        let deadline = std::time::Instant::now() + grace;
        while self.pid().is_some() {
            // A child of this process remains a zombie until it is reaped.
            let _ = nix::sys::wait::waitpid(target, Some(nix::sys::wait::WaitPidFlag::WNOHANG));
            if std::time::Instant::now() > deadline {
                kill(target, Signal::SIGKILL)
                    .with_context(|| format!("{} (pid {pid}) cannot be killed", self.name))?;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.remove_pid_file()?;
        Ok(true)
    }

    /// Removes the pid file of a process that has exited and is not restarted.
    fn remove_pid_file(&self) -> anyhow::Result<()> {
        match fs::remove_file(&self.pid_file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("{} cannot be removed", self.pid_file.display()))
            }
            _ => Ok(()),
        }
    }
}

/// Kills the shims of a containerd that has stopped. containerd loses track of a shim if the caller that requested the
/// sandbox died meanwhile. `socket` is containerd's own, which distinguishes its shims from those of others.
pub fn kill_shims(socket: &Path) {
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let arguments: Vec<&[u8]> = line.split(|b| *b == 0).collect();
        let program = arguments
            .first()
            .and_then(|p| p.rsplit(|b| *b == b'/').next())
            .unwrap_or_default();
        let of_ours = arguments
            .windows(2)
            .any(|pair| pair[0] == b"-address" && pair[1] == socket.as_os_str().as_encoded_bytes());
        if program.starts_with(b"containerd-shim") && of_ours {
            // The shim may have exited already.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_runs_until_its_last_thread_has_exited() {
        let stat = |state: &str, threads: u32| {
            format!("7 (a) b (c)) {state} 1 7 7 0 -1 4 0 0 0 0 0 0 0 0 20 0 {threads} 0 4711 0 0")
        };
        for (state, threads, expected) in [
            ("R", 1, Some(4711)),
            ("S", 9, Some(4711)),
            ("Z", 2, Some(4711)),
            ("Z", 1, None),
            ("Z", 0, None),
        ] {
            assert_eq!(
                start_in(&stat(state, threads)),
                expected,
                "{state} {threads}"
            );
        }
        assert!(started_at(1).is_some());
        assert_eq!(started_at(i32::MAX), None);
    }
}
