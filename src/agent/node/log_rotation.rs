//! Rotates container logs that have grown too large (`pkg/kubelet/logs/container_log_manager.go`).
//!
//! There are two steps. First the log is renamed and the runtime opens a new one, which is fast. Then earlier logs are
//! compressed, which may take minutes. No rename waits for a compression, so that fast-growing logs stay small.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::{Arc, Mutex};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;

use holdfast_config::Config;
use holdfast_core::lock::lock;
use holdfast_cri::{RunningContainer, Runtime, RuntimeError};
use holdfast_host::{HostError, HostErrorKind, Log, PodHost};
use holdfast_sys::clock::Clock;

/// Limit for parallel renames, so that a runtime that hangs for one log does not delay others.
const MAX_PARALLEL_RENAMES: usize = 16;

/// A step of the rotation: limits parallel runs, and runs once per container at a time.
struct Step {
    in_progress: Mutex<BTreeSet<String>>,
    places: Semaphore,
}

impl Step {
    fn new(places: usize) -> Step {
        Step {
            in_progress: Mutex::default(),
            places: Semaphore::new(places),
        }
    }

    /// Runs the step for a container. `None` if the step is already running or queued for this container.
    async fn take<T>(&self, id: &str, work: impl Future<Output = T>) -> Option<T> {
        if !lock(&self.in_progress).insert(id.to_owned()) {
            return None;
        }
        let place = self.places.acquire().await;
        let result = work.await;
        drop(place);
        lock(&self.in_progress).remove(id);
        Some(result)
    }
}

/// What the rotation of logs uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub runtime: Arc<dyn Runtime>,
    pub host: Arc<dyn PodHost>,
    pub clock: Clock,
}

struct Rotation {
    parts: Parts,
    moves: Step,
    compressions: Step,
}

/// Runs until the process exits.
pub async fn run(parts: Parts) {
    let rotation = Arc::new(Rotation {
        moves: Step::new(MAX_PARALLEL_RENAMES),
        compressions: Step::new(parts.config.logs.workers),
        parts,
    });
    let mut tasks = JoinSet::new();
    loop {
        let next = Instant::now() + rotation.parts.config.logs.interval;
        for (container, exists) in due(&rotation.parts).await {
            let rotation = Arc::clone(&rotation);
            tasks.spawn(async move { rotation.handle(&container, exists).await });
        }
        // A panic terminates the process, so results of tasks are not checked.
        while tasks.try_join_next().is_some() {}
        tokio::time::sleep_until(next).await;
    }
}

/// The running containers whose log is too large or missing, with whether the log exists.
async fn due(parts: &Parts) -> Vec<(RunningContainer, bool)> {
    let running = match parts.runtime.running().await {
        Ok(running) => running,
        // Other tasks report that the runtime does not answer.
        Err(error) => {
            tracing::debug!(%error, "no log is rotated: cannot list the running containers");
            return vec![];
        }
    };
    let logs: Vec<Log> = running.iter().map(log_of).collect();
    let sizes = parts.host.log_sizes(&logs).await;
    let most = parts.config.logs.max_size;
    // A missing log was removed by another program; the runtime must open a new one.
    let is_due = |size: &Option<u64>| size.is_none_or(|bytes| bytes > most);
    let measured = running.into_iter().zip(sizes);
    measured
        .filter(|(_, size)| is_due(size))
        .map(|(container, size)| (container, size.is_some()))
        .collect()
}

impl Rotation {
    /// Runs both steps for a container. While its files are compressed, its log may be renamed again.
    async fn handle(&self, container: &RunningContainer, exists: bool) {
        let (parts, log) = (&self.parts, log_of(container));
        let moving = rotate(parts, &container.id, &log, exists);
        let Some(moved) = self.moves.take(&container.id, moving).await else {
            return;
        };
        if let Err(error) = moved {
            log_failure(container, "rotating a log failed", &error);
            return;
        }
        let compressing = parts.host.compress_log(&log);
        let compressed = self.compressions.take(&container.id, compressing).await;
        if let Some(Err(error)) = compressed {
            log_failure(container, "compressing a rotated log failed", &error);
        }
    }
}

fn log_failure(container: &RunningContainer, what: &str, error: &dyn Display) {
    let (pod, namespace) = (&container.pod, &container.namespace);
    tracing::warn!(%error, pod, namespace, container = container.name, "{what}");
}

fn log_of(container: &RunningContainer) -> Log {
    Log {
        namespace: container.namespace.clone(),
        pod: container.pod.clone(),
        uid: container.uid.clone(),
        container: container.name.clone(),
        attempt: container.attempt,
    }
}

/// Why a log was not rotated.
#[derive(Debug, thiserror::Error)]
enum NotRotated {
    /// The log cannot be renamed.
    #[error("{0}")]
    Host(#[from] HostError),
    /// The runtime did not open a new log; the renamed log was restored.
    #[error("the runtime did not reopen the log: {0}")]
    Runtime(#[from] RuntimeError),
}

/// Makes the runtime open the log file again.
async fn reopen(parts: &Parts, id: &str) -> Result<(), NotRotated> {
    Ok(parts.runtime.reopen_log(id).await?)
}

/// Renames an existing log, and makes the runtime open a new one.
async fn rotate(parts: &Parts, id: &str, log: &Log, exists: bool) -> Result<(), NotRotated> {
    if !exists {
        return reopen(parts, id).await;
    }
    let stamp = parts.clock.now().strftime("%Y%m%d-%H%M%S").to_string();
    let files = parts.config.logs.max_files;
    let aside = match parts.host.rotate_log(log, files, &stamp).await {
        // Removed since the measurement.
        Err(error) if error.kind == HostErrorKind::NotFound => return reopen(parts, id).await,
        moved => moved?,
    };
    let Err(error) = reopen(parts, id).await else {
        return Ok(());
    };
    parts.host.revert_log_rotation(log, aside).await?;
    Err(error)
}
