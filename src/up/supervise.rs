//! Restarts components that exit. A small process for each component watches it, backs off longer after every early
//! exit, and records what happened for `holdfast up status`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::messages::{self, Shown};
use super::process::{Component, started_at};

/// Initial and maximum back-off before a restart.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));
/// After a component has run for this time, its back-off starts again with the initial value.
const STEADY_RUN: Duration = Duration::from_secs(60);

/// How long a component without a supervisor may take to exit before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// The state that a supervisor records.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The supervisor's pid, and its start in clock ticks since boot.
    pub supervisor: (i32, u64),
    /// Number of restarts.
    pub restarts: u32,
    /// Cause of the component's last exit, and its time in seconds since 1970.
    pub last_end: Option<(String, i64)>,
}

/// Returns the back-off of a component that was started after `pause` and ran for `lasted`.
fn next_backoff(pause: Duration, lasted: Duration) -> Duration {
    if lasted >= STEADY_RUN || pause.is_zero() {
        BACKOFF.0
    } else {
        (pause * 2).min(BACKOFF.1)
    }
}

impl Component {
    fn state_file(&self) -> PathBuf {
        self.pid_file.with_extension("state")
    }

    fn state(&self) -> Option<State> {
        serde_json::from_slice(&fs::read(self.state_file()).ok()?).ok()
    }

    /// Returns the state that the supervisor recorded, if the supervisor runs.
    #[must_use]
    pub fn supervised(&self) -> Option<State> {
        self.state()
            .filter(|s| started_at(s.supervisor.0) == Some(s.supervisor.1))
    }

    /// Whether both the component and its supervisor run.
    #[must_use]
    pub fn runs_supervised(&self) -> bool {
        self.pid().is_some() && self.supervised().is_some()
    }

    /// Starts the component in the background with a supervisor, unless both run. A supervisor whose component does not
    /// run is replaced, so that the start need not wait for its back-off. A component that has lost its supervisor is
    /// restarted with one. Returns whether the component was started.
    pub fn start_supervised(&self, program: &Path, arguments: &[String]) -> anyhow::Result<bool> {
        if self.runs_supervised() {
            return Ok(false);
        }
        self.stop(STOP_TIMEOUT)?;
        let own = std::env::current_exe()?;
        self.command(&own, &[], program, arguments)?
            .spawn()
            .with_context(|| format!("the supervisor of {} cannot be started", self.name))?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.pid().is_none() && self.state().is_none_or(|s| s.last_end.is_none()) {
            anyhow::ensure!(
                Instant::now() < deadline,
                "{} was not started; see {}",
                self.name,
                self.log.display()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(true)
    }

    /// Whether the component will not be started again. A component that this process has `started` must not exit at
    /// all; one that ran before is restarted as long as its supervisor runs.
    #[must_use]
    pub fn has_stopped_for_good(&self, started: bool) -> bool {
        self.pid().is_none() && (started || self.supervised().is_none())
    }

    /// Kills the supervisor; the component keeps running.
    pub fn kill_supervisor(&self) -> anyhow::Result<()> {
        if let Some(state) = self.supervised() {
            let (pid, start) = state.supervisor;
            kill(Pid::from_raw(pid), Signal::SIGKILL).with_context(|| {
                format!(
                    "the supervisor of {} (pid {pid}) cannot be killed",
                    self.name
                )
            })?;
            while started_at(pid) == Some(start) {
                // A child of this process remains a zombie until it is reaped.
                let _ = nix::sys::wait::waitpid(
                    Pid::from_raw(pid),
                    Some(nix::sys::wait::WaitPidFlag::WNOHANG),
                );
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        self.await_pid_file()?;
        match fs::remove_file(self.state_file()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Returns a line for `holdfast up status`, and whether the component runs.
    #[must_use]
    pub fn status(&self, now: i64) -> (String, bool) {
        let (pid, state) = (self.pid(), self.supervised());
        let restarted = state.as_ref().and_then(|state| {
            let (why, at) = state.last_end.as_ref()?;
            let ago = now.saturating_sub(*at).max(0);
            Some((state.restarts, why.as_str(), ago))
        });
        let text = messages::component(&Shown {
            name: self.name,
            pid,
            is_supervised: state.is_some(),
            restarted,
            log: &self.log,
        });
        (text, pid.is_some())
    }
}

/// Runs a component and restarts it whenever it exits, until this process is killed.
pub fn supervise(
    component: &Component,
    program: &Path,
    arguments: &[String],
) -> anyhow::Result<()> {
    let own = i32::try_from(std::process::id())?;
    let mut state = State {
        supervisor: (own, started_at(own).context("/proc is not mounted")?),
        ..State::default()
    };
    let write = |state: &State| -> anyhow::Result<()> {
        let text = serde_json::to_vec(state)?;
        holdfast_sys::file::replace_soon(&component.state_file(), &text)
            .with_context(|| format!("{} cannot be written", component.state_file().display()))
    };
    // Without the file, `holdfast down` would not find this process.
    write(&state)?;
    let mut pause = Duration::ZERO;
    loop {
        let began = Instant::now();
        let ended = component.start(program, arguments).and_then(|mut child| {
            // Mostly, this process only waits. What its start has used is a part of the memory that `ps` shows.
            if let Err(error) = holdfast_sys::memory::unmap_code() {
                eprintln!("holdfast: {error}");
            }
            Ok(child.wait()?)
        });
        let why = match ended {
            Ok(status) => messages::exit_cause(status),
            Err(error) => format!("{error:#}"),
        };
        pause = next_backoff(pause, began.elapsed());
        state.restarts = state.restarts.saturating_add(1);
        state.last_end = Some((why.clone(), jiff::Timestamp::now().as_second()));
        // A full disk must not end the supervision; the old file still names this process.
        if let Err(error) = write(&state) {
            eprintln!("holdfast: {error:#}");
        }
        eprintln!(
            "holdfast: {}",
            messages::restart(component.name, pause, &why)
        );
        std::thread::sleep(pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_back_off_grows_and_is_reset_after_a_steady_run() {
        let mut pause = Duration::ZERO;
        let mut seen = vec![];
        for _ in 0..8 {
            pause = next_backoff(pause, Duration::from_secs(1));
            seen.push(pause.as_millis());
        }
        assert_eq!(seen, [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000]);
        assert_eq!(next_backoff(pause, STEADY_RUN), BACKOFF.0);
    }

    #[test]
    fn a_component_that_ran_before_is_lost_only_without_its_supervisor() {
        let dir = tempfile::tempdir().expect("a directory");
        let component = Component::new("agent", dir.path(), dir.path());
        assert!(component.has_stopped_for_good(false), "nothing runs");
        let own = i32::try_from(std::process::id()).expect("a pid");
        let start = started_at(own).expect("/proc");
        let state = State {
            supervisor: (own, start),
            ..State::default()
        };
        let text = serde_json::to_vec(&state).expect("JSON");
        fs::write(component.state_file(), text).expect("a file");
        assert!(
            !component.has_stopped_for_good(false),
            "its supervisor restarts it"
        );
        assert!(
            component.has_stopped_for_good(true),
            "it has just been started and has exited"
        );
        fs::write(&component.pid_file, format!("{own} {start}\n")).expect("a file");
        assert!(
            !component.has_stopped_for_good(true) && !component.has_stopped_for_good(false),
            "it runs"
        );
    }
}
