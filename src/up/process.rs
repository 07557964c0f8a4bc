//! Long-running parts of a local cluster: started in the background, found again by a pid file that
//! also says when the process started, so that a recycled pid is never mistaken for ours.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A part with its pid file and log.
#[derive(Debug, Clone)]
pub struct Part {
    /// The name, for messages and files.
    pub name: &'static str,
    pub(super) pid_file: PathBuf,
    /// Where it writes.
    pub log: PathBuf,
}

/// When a process started, in clock ticks since boot; `None` if there is no such process.
pub(super) fn started_at(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses and may hold anything; fields count from behind it.
    let rest = stat.rsplit_once(')')?.1;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    if fields.first() == Some(&"Z") {
        return None;
    }
    fields.get(19)?.parse().ok()
}

impl Part {
    /// The part `name` of the cluster whose files lie in `run` and `logs`.
    #[must_use]
    pub fn new(name: &'static str, run: &Path, logs: &Path) -> Part {
        Part {
            name,
            pid_file: run.join(format!("{name}.pid")),
            log: logs.join(format!("{name}.log")),
        }
    }

    /// The pid and the start that are noted, whether it still runs or not.
    fn noted(&self) -> Option<(i32, u64)> {
        let text = fs::read_to_string(&self.pid_file).ok()?;
        let (pid, start) = text.trim().split_once(' ')?;
        Some((pid.parse().ok()?, start.parse().ok()?))
    }

    /// Its pid, if it runs. A stale pid file stays: its supervisor may be writing the next one.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        let (pid, start) = self.noted()?;
        (started_at(pid)? == start).then_some(pid)
    }

    /// When the process that runs, or ran last, was noted, which it is before anything else ([`Part::become_it`]).
    pub(super) fn started(&self) -> Option<std::time::SystemTime> {
        fs::metadata(&self.pid_file).ok()?.modified().ok()
    }

    /// Starts it in the background. What is started first notes its own pid ([`Part::become_it`]), so that nothing runs that
    /// is noted nowhere, wherever this process ends.
    pub fn start(&self, program: &Path, arguments: &[String]) -> anyhow::Result<Child> {
        let own = std::env::current_exe()?;
        let parent = std::process::id().to_string();
        let mut command = self.command(&own, &["--for", &parent], program, arguments)?;
        let mut child = command
            .spawn()
            .with_context(|| format!("{} cannot be started", self.name))?;
        let pid = i32::try_from(child.id())?;
        let noted = || self.noted().is_some_and(|(noted, _)| noted == pid);
        while !noted() {
            // What ended after it was noted did start: the caller learns how it ended.
            if let Some(status) = child.try_wait()?
                && !noted()
            {
                bail!(
                    "{} ended at once ({status}); see {}",
                    self.name,
                    self.log.display()
                );
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(child)
    }

    /// `holdfast supervise` for this part, with its log as output.
    pub(super) fn command(
        &self,
        own: &Path,
        options: &[&str],
        program: &Path,
        arguments: &[String],
    ) -> anyhow::Result<Command> {
        let (run, logs) = (self.pid_file.parent(), self.log.parent());
        let (run, logs) = run.zip(logs).context("the part has no directories")?;
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

    /// Waits until nobody else notes a pid in the part's directory, and keeps others from it until the answer is dropped.
    fn note_alone(&self) -> anyhow::Result<Option<fs::File>> {
        let dir = self
            .pid_file
            .parent()
            .context("the part has no directory")?;
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

    /// Waits for a process that was started by a supervisor that has ended since: it has noted its pid when this returns, or
    /// never will.
    pub(super) fn settle(&self) -> anyhow::Result<()> {
        self.note_alone().map(drop)
    }

    /// Notes the pid of this process as the part's, and runs `program` in its place. Does nothing if `parent` no longer runs:
    /// then another process may be the part.
    pub fn become_it(
        &self,
        parent: u32,
        program: &Path,
        arguments: &[String],
    ) -> anyhow::Result<()> {
        let pid = i32::try_from(std::process::id())?;
        let start = started_at(pid).context("/proc is not mounted")?;
        let noting = self.note_alone()?;
        if std::os::unix::process::parent_id() != parent {
            bail!(
                "{} is not started: who wanted it has ended meanwhile",
                self.name
            );
        }
        // Replaced in one step, as others read it at any time.
        let text = format!("{pid} {start}\n");
        crate::sys::file::replace_soon(&self.pid_file, text.as_bytes()).with_context(|| {
            format!("the pid file {} cannot be written", self.pid_file.display())
        })?;
        // Whoever has ended the parent meanwhile finds it there.
        drop(noting);
        let error = Command::new(program).args(arguments).exec();
        Err(error)
            .with_context(|| format!("{} cannot be started ({})", self.name, program.display()))
    }

    /// The last lines of its log, for an error message.
    #[must_use]
    pub fn last_words(&self) -> String {
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

    /// Stops it, and first its supervisor: SIGTERM, and SIGKILL after `patience`. Says whether it ran.
    pub fn stop(&self, patience: Duration) -> anyhow::Result<bool> {
        self.release()?;
        let Some(pid) = self.pid() else {
            self.forget()?;
            return Ok(false);
        };
        let target = Pid::from_raw(pid);
        kill(target, Signal::SIGTERM)
            .with_context(|| format!("{} (pid {pid}) cannot be stopped", self.name))?;
        let deadline = std::time::Instant::now() + patience;
        while self.pid().is_some() {
            // A child of this very process must be waited for to be gone.
            let _ = nix::sys::wait::waitpid(target, Some(nix::sys::wait::WaitPidFlag::WNOHANG));
            if std::time::Instant::now() > deadline {
                kill(target, Signal::SIGKILL)
                    .with_context(|| format!("{} (pid {pid}) cannot be killed", self.name))?;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.forget()?;
        Ok(true)
    }

    /// Removes the pid file of a process that has ended and that nothing starts again.
    fn forget(&self) -> anyhow::Result<()> {
        match fs::remove_file(&self.pid_file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("{} cannot be removed", self.pid_file.display()))
            }
            _ => Ok(()),
        }
    }
}

/// Ends the shims of a containerd that has stopped: those that it lost sight of, when whoever asked for a sandbox
/// died meanwhile. `socket` is its own, by which they are told from all others.
pub fn end_shims(socket: &Path) {
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
            // It may have ended by itself.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}
