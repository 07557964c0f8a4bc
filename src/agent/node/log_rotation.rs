//! What is done for all pods from time to time: logs that have grown are rotated (kubelet spec, 8.7).
//!
//! Two steps: a log is moved aside and the runtime opens a new one, which takes moments, and then what was moved aside
//! before is compressed, which may take minutes. The first waits for nobody's second, so that logs that grow fast stay small.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::{Arc, Mutex};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::agent::Context;
use crate::core::lock::lock;
use crate::cri::{RunningContainer, RuntimeError};
use crate::host::{HostError, HostErrorKind, Log};

/// How many logs are moved aside at once, so that a runtime that does not answer for one holds up no other.
const MOVES: usize = 16;

/// A step of rotations: so many at a time, and for each container one.
struct Step {
    under_way: Mutex<BTreeSet<String>>,
    places: Semaphore,
}

impl Step {
    fn new(places: usize) -> Step {
        Step {
            under_way: Mutex::default(),
            places: Semaphore::new(places),
        }
    }

    /// Does the step for a container; nothing if it is done for that one already, or waits for its place.
    async fn take<T>(&self, id: &str, work: impl Future<Output = T>) -> Option<T> {
        if !lock(&self.under_way).insert(id.to_owned()) {
            return None;
        }
        let place = self.places.acquire().await;
        let result = work.await;
        drop(place);
        lock(&self.under_way).remove(id);
        Some(result)
    }
}

struct Rotation {
    context: Arc<Context>,
    moves: Step,
    compressions: Step,
}

/// Runs until the process ends.
pub async fn run(context: Arc<Context>) {
    let rotation = Arc::new(Rotation {
        moves: Step::new(MOVES),
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
        // A panic ends the process: what comes of a task need not be looked at.
        while tasks.try_join_next().is_some() {}
        tokio::time::sleep_until(next).await;
    }
}

/// The containers whose log is too large, or is not there.
async fn due(context: &Context) -> Vec<(RunningContainer, bool)> {
    let running = match context.runtime.running().await {
        Ok(running) => running,
        // That the runtime does not answer is said elsewhere.
        Err(error) => {
            tracing::debug!(%error, "no log is rotated: the runtime cannot say what runs");
            return vec![];
        }
    };
    let logs: Vec<Log> = running.iter().map(log_of).collect();
    let sizes = context.host.log_sizes(&logs).await;
    let most = context.config.logs.max_size;
    // One that somebody removed is made anew.
    let is_due = |size: &Option<u64>| size.is_none_or(|bytes| bytes > most);
    let measured = running.into_iter().zip(sizes);
    measured
        .filter(|(_, size)| is_due(size))
        .map(|(container, size)| (container, size.is_some()))
        .collect()
}

impl Rotation {
    /// Both steps for a container. While its files are being compressed, its log may be moved aside again.
    async fn handle(&self, container: &RunningContainer, exists: bool) {
        let (context, log) = (&self.context, log_of(container));
        let moving = rotate(context, &container.id, &log, exists);
        let Some(moved) = self.moves.take(&container.id, moving).await else {
            return;
        };
        if let Err(error) = moved {
            tell(container, "a log was not rotated", &error);
            return;
        }
        let compressing = context.host.compress_log(&log);
        let compressed = self.compressions.take(&container.id, compressing).await;
        if let Some(Err(error)) = compressed {
            tell(container, "a rotated log was not compressed", &error);
        }
    }
}

fn tell(container: &RunningContainer, what: &str, error: &dyn Display) {
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
    /// It cannot be moved.
    #[error("{0}")]
    Host(#[from] HostError),
    /// What was moved aside is back in its place.
    #[error("the runtime does not open the log anew: {0}")]
    Runtime(#[from] RuntimeError),
}

/// Has the runtime open a log anew.
async fn reopen(context: &Context, id: &str) -> Result<(), NotRotated> {
    Ok(context.runtime.reopen_log(id).await?)
}

/// Moves a log aside, if it is there, and has the runtime open a new one.
async fn rotate(context: &Context, id: &str, log: &Log, exists: bool) -> Result<(), NotRotated> {
    if !exists {
        return reopen(context, id).await;
    }
    let stamp = context.clock.now().strftime("%Y%m%d-%H%M%S").to_string();
    let files = context.config.logs.max_files;
    let aside = match context.host.move_log_aside(log, files, &stamp).await {
        // Somebody has removed it since it was measured.
        Err(error) if error.kind == HostErrorKind::NotFound => return reopen(context, id).await,
        moved => moved?,
    };
    let Err(error) = reopen(context, id).await else {
        return Ok(());
    };
    context.host.put_log_back(log, aside).await?;
    Err(error)
}
