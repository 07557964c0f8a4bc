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

use crate::Context;
use holdfast_core::lock::lock;
use holdfast_cri::{RunningContainer, RuntimeError};
use holdfast_host::{HostError, HostErrorKind, Log};

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

struct Rotation {
    context: Arc<Context>,
    moves: Step,
    compressions: Step,
}

/// Runs until the process exits.
pub async fn run(context: Arc<Context>) {
    let rotation = Arc::new(Rotation {
        moves: Step::new(MAX_PARALLEL_RENAMES),
        compressions: Step::new(context.config.logs.workers),
        context,
    });
    let mut tasks = JoinSet::new();
    loop {
        let next = Instant::now() + rotation.context.config.logs.interval;
        for (container, exists) in due(&rotation.context).await {
            let rotation = Arc::clone(&rotation);
            tasks.spawn(async move { rotation.handle(&container, exists).await });
        }
        // A panic terminates the process, so results of tasks are not checked.
        while tasks.try_join_next().is_some() {}
        tokio::time::sleep_until(next).await;
    }
}

/// The running containers whose log is too large or missing, with whether the log exists.
async fn due(context: &Context) -> Vec<(RunningContainer, bool)> {
    let running = match context.runtime.running().await {
        Ok(running) => running,
        // Other tasks report that the runtime does not answer.
        Err(error) => {
            tracing::debug!(%error, "no log is rotated: cannot list the running containers");
            return vec![];
        }
    };
    let logs: Vec<Log> = running.iter().map(log_of).collect();
    let sizes = context.host.log_sizes(&logs).await;
    let most = context.config.logs.max_size;
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
        let (context, log) = (&self.context, log_of(container));
        let moving = rotate(context, &container.id, &log, exists);
        let Some(moved) = self.moves.take(&container.id, moving).await else {
            return;
        };
        if let Err(error) = moved {
            log_failure(container, "rotating a log failed", &error);
            return;
        }
        let compressing = context.host.compress_log(&log);
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
async fn reopen(context: &Context, id: &str) -> Result<(), NotRotated> {
    Ok(context.runtime.reopen_log(id).await?)
}

/// Renames an existing log, and makes the runtime open a new one.
async fn rotate(context: &Context, id: &str, log: &Log, exists: bool) -> Result<(), NotRotated> {
    if !exists {
        return reopen(context, id).await;
    }
    let stamp = context.clock.now().strftime("%Y%m%d-%H%M%S").to_string();
    let files = context.config.logs.max_files;
    let aside = match context.host.rotate_log(log, files, &stamp).await {
        // Removed since the measurement.
        Err(error) if error.kind == HostErrorKind::NotFound => return reopen(context, id).await,
        moved => moved?,
    };
    let Err(error) = reopen(context, id).await else {
        return Ok(());
    };
    context.host.revert_log_rotation(log, aside).await?;
    Err(error)
}
