//! The cgroups of the agent and of system processes (`kubeletCgroups`, `systemCgroups`;
//! `pkg/kubelet/cm/container_manager_linux.go`).

use std::time::Duration;

use holdfast_config::OwnCgroups;
use holdfast_host::blocking;
use holdfast_sys::{cgroup, meter, process};

/// Interval between checks of the processes' cgroups, as in the kubelet.
const PERIOD: Duration = Duration::from_secs(60);

/// Moves the agent to its cgroup. An agent in a container stays in the container's cgroup.
fn move_agent(to: &str) -> Result<(), String> {
    let is_on_host = process::is_on_host();
    let is_on_host =
        is_on_host.map_err(|e| format!("cannot determine the process namespace: {e}"))?;
    let is_there = meter::own_cgroup().as_deref().unwrap_or("/") == to;
    if !is_on_host || is_there {
        return Ok(());
    }
    let pid = std::process::id().try_into();
    let pid = pid.map_err(|_| "the id of this process is not valid in a cgroup".to_owned())?;
    cgroup::join(to, pid).map_err(|e| e.to_string())
}

/// Moves processes to their cgroups. Returns the failures.
fn move_processes(wanted: &OwnCgroups) -> Vec<String> {
    let mut failed = vec![];
    if let Some(to) = &wanted.system {
        match cgroup::move_processes("/", to) {
            Ok(0) => {}
            Ok(moved) => tracing::info!(moved, to, "moved processes out of the root cgroup"),
            Err(error) => failed.push(error.to_string()),
        }
    }
    // After the system processes: the agent may also have been in the root cgroup.
    if let Some(to) = &wanted.agent {
        failed.extend(move_agent(to).err());
    }
    failed
}

/// Keeps processes in their cgroups. Logs failures when they change.
pub(super) async fn run(wanted: &OwnCgroups) {
    if *wanted == OwnCgroups::default() {
        return;
    }
    let mut reported: Vec<String> = vec![];
    loop {
        let wanted = wanted.clone();
        match blocking(move || Ok(move_processes(&wanted))).await {
            Ok(failed) if failed == reported => {}
            Ok(failed) => {
                for error in &failed {
                    tracing::warn!(
                        error,
                        "moving a process to its cgroup (kubeletCgroups, systemCgroups) failed; retrying every minute"
                    );
                }
                reported = failed;
            }
            Err(error) => tracing::warn!(%error, "moving processes to their cgroups failed"),
        }
        tokio::time::sleep(PERIOD).await;
    }
}
