//! What is done for all pods from time to time: logs that have grown are rotated (kubelet spec, 8.7).

use std::sync::Arc;

use crate::agent::Context;
use crate::cri::RunningContainer;
use crate::host::Log;

/// Runs until the process ends.
pub async fn run(context: Arc<Context>) {
    loop {
        tokio::time::sleep(context.config.logs.interval).await;
        let running = match context.runtime.running().await {
            Ok(running) => running,
            // That the runtime does not answer is said elsewhere.
            Err(error) => {
                tracing::debug!(%error, "no log is rotated: the runtime cannot say what runs");
                continue;
            }
        };
        for container in running {
            if let Err(error) = rotate(&context, &container).await {
                tracing::warn!(
                    error,
                    pod = container.pod,
                    namespace = container.namespace,
                    container = container.name,
                    "a log was not rotated"
                );
            }
        }
    }
}

async fn rotate(context: &Context, container: &RunningContainer) -> Result<(), String> {
    let RunningContainer {
        id,
        namespace,
        pod,
        uid,
        name,
        attempt,
    } = container.clone();
    let log = Log {
        namespace,
        pod,
        uid,
        container: name,
        attempt,
    };
    let settings = &context.config.logs;
    let reopen = async || {
        context
            .runtime
            .reopen_log(&id)
            .await
            .map_err(|e| format!("the runtime does not open the log anew: {e}"))
    };
    match context.host.log_exceeds(&log, settings.max_size).await {
        Some(false) => Ok(()),
        // Somebody removed it: the runtime makes a new one.
        None => reopen().await,
        Some(true) => {
            let stamp = context.clock.now().strftime("%Y%m%d-%H%M%S").to_string();
            let aside = context
                .host
                .move_log_aside(&log, settings.max_files, &stamp)
                .await?;
            let Err(error) = reopen().await else {
                return Ok(());
            };
            context.host.put_log_back(&log, aside).await?;
            Err(error)
        }
    }
}
