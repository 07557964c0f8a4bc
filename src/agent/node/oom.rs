//! Emits an event about the node when the kernel kills processes because the machine is out of memory
//! (`pkg/kubelet/oom/oom_watcher_linux.go`).

use std::path::PathBuf;

use crate::events::{Events, Kind};
use holdfast_core::node::oom::Reader;
use holdfast_sys::kmsg::KernelLog;

/// The event's reason.
const REASON: &str = "SystemOOM";

/// Runs until the process exits. `log` is the kernel log; without it no events are emitted.
pub async fn run(node: String, events: Events, log: Option<PathBuf>) {
    if let Some(path) = log {
        let Err(error) = follow(&node, &events, path.clone()).await;
        tracing::warn!(
            %error,
            path = %path.display(),
            "cannot read the kernel's log: the agent emits no SystemOOM event when the machine runs out of memory"
        );
    }
    std::future::pending().await
}

async fn follow(
    node: &str,
    events: &Events,
    path: PathBuf,
) -> std::io::Result<std::convert::Infallible> {
    let mut log = KernelLog::open(&path)?;
    let mut reader = Reader::default();
    loop {
        let record = log.next().await?;
        if let Some(kill) = reader.read(&record) {
            tracing::warn!(
                process = kill.process,
                pid = kill.pid,
                "the machine ran out of memory: the kernel killed a process"
            );
            let message = kill.message();
            events.node(node, Kind::Warning, REASON, message);
        }
    }
}
