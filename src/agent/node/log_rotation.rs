//! What is done for all pods from time to time: logs that have grown are rotated (kubelet spec, 8.7).

use std::sync::Arc;

use futures::StreamExt as _;

use crate::agent::Context;
use crate::cri::RunningContainer;
use crate::host::Log;

/// Runs until the process ends.
pub async fn run(context: Arc<Context>) {
    let settings = &context.config.logs;
    loop {
        tokio::time::sleep(settings.interval).await;
        let running = match context.runtime.running().await {
            Ok(running) => running,
            // That the runtime does not answer is said elsewhere.
            Err(error) => {
                tracing::debug!(%error, "no log is rotated: the runtime cannot say what runs");
                continue;
            }
        };
        let logs: Vec<Log> = running.iter().map(log_of).collect();
        let sizes = context.host.log_sizes(&logs).await;
        let mut due = vec![];
        for ((container, log), size) in running.into_iter().zip(logs).zip(sizes) {
            // One that somebody removed is made anew.
            if size.is_none_or(|bytes| bytes > settings.max_size) {
                due.push(rotated(
                    Arc::clone(&context),
                    container,
                    log,
                    size.is_some(),
                ));
            }
        }
        futures::stream::iter(due)
            .buffer_unordered(settings.workers)
            .collect::<()>()
            .await;
    }
}

async fn rotated(context: Arc<Context>, container: RunningContainer, log: Log, exists: bool) {
    if let Err(error) = rotate(&context, &container.id, &log, exists).await {
        tracing::warn!(
            error,
            pod = container.pod,
            namespace = container.namespace,
            container = container.name,
            "a log was not rotated"
        );
    }
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

/// Moves a log aside, if it is there, and has the runtime open a new one.
async fn rotate(context: &Context, id: &str, log: &Log, exists: bool) -> Result<(), String> {
    let reopen = async || {
        context
            .runtime
            .reopen_log(id)
            .await
            .map_err(|e| format!("the runtime does not open the log anew: {e}"))
    };
    if !exists {
        return reopen().await;
    }
    let stamp = context.clock.now().strftime("%Y%m%d-%H%M%S").to_string();
    let aside = context
        .host
        .move_log_aside(log, context.config.logs.max_files, &stamp)
        .await?;
    let Err(error) = reopen().await else {
        return Ok(());
    };
    context.host.put_log_back(log, aside).await?;
    Err(error)
}
