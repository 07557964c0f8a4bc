//! Graceful shutdown of the machine (KEP-2000, KEP-2712; `pkg/kubelet/nodeshutdown`). An inhibitor delays the shutdown.
//! When it is announced, the node rejects further pods and reports itself not ready. Pods terminate phase by phase,
//! lowest priority first, and their statuses are written before the machine continues. [`holdfast_core::node::shutdown`]
//! decides when and how each pod terminates.
//!
//! After a cancelled shutdown the node works as before. Terminated pods stay terminated, except static pods.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::OwnNode;
use super::ledger::LedgerHandle;
use crate::events::{Events, Kind};
use crate::metrics::Metrics;
use crate::pod::relist::Hint;
use crate::pod::table::{Known, PodTable};
use holdfast_config::Config;
use holdfast_core::backoff::Doubling;
use holdfast_core::node::shutdown::{self, Phase, REJECTED, STATE_FILE, Times};
use holdfast_core::pod;
use holdfast_sys::clock::Clock;
use holdfast_sys::file;
use holdfast_sys::logind::{Announcements, Announcer, Inhibitor, LogindError};

/// Back-off between attempts to connect to logind.
const LISTEN_BACKOFF: Doubling = Doubling::new(Duration::from_secs(1), Duration::from_secs(30));
/// Maximum time to wait until the Node reports the shutdown.
const NOT_READY_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum time to wait for the statuses of terminated pods. Without an apiserver they are never written.
const STATUS_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval between checks whether pods have terminated.
const TERMINATION_POLL: Duration = Duration::from_millis(50);
/// Size limit of the state file, in bytes.
const MAX_STATE_SIZE: u64 = 4096;

/// Runs until the process exits. Without grace periods, shutdowns are not delayed.
pub async fn run(
    parts: Arc<Parts>,
    announcer: Option<Arc<dyn Announcer>>,
    hints: mpsc::Sender<Hint>,
) {
    let enabled = !parts.config.shutdown.is_empty();
    let Some(announcer) = announcer.filter(|_| enabled) else {
        return std::future::pending().await;
    };
    match last_times(&parts.config.root_dir) {
        Ok(times) => parts.metrics.shut_down(times),
        Err(error) => tracing::warn!(
            error,
            file = STATE_FILE,
            "cannot read the time of the machine's last shutdown"
        ),
    }
    let mut watch = Watch {
        parts: &parts,
        hints,
        inhibitor: None,
        in_progress: None,
    };
    let mut pauses = LISTEN_BACKOFF;
    loop {
        let error = watch.listen(&*announcer, &mut pauses).await;
        let first = pauses.is_first();
        let pause = pauses.pause();
        if first {
            tracing::warn!(
                error,
                "cannot watch for shutdowns of the machine: a shutdown would not wait for pods; retrying"
            );
        }
        tokio::time::sleep(pause).await;
    }
}

/// What the handling of shutdowns uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub clock: Clock,
    pub events: Events,
    pub metrics: Arc<Metrics>,
    pub ledger: LedgerHandle,
    pub node: Arc<OwnNode>,
    pub table: watch::Receiver<PodTable>,
    /// Whether the machine is shutting down.
    pub shutting_down: watch::Sender<bool>,
}

/// A shutdown in progress; the task returns the static pods that it terminated.
struct ShutdownInProgress {
    cancel: CancellationToken,
    terminated: AbortOnDropHandle<BTreeSet<String>>,
}

struct Watch<'a> {
    parts: &'a Arc<Parts>,
    hints: mpsc::Sender<Hint>,
    /// Delays the shutdown; held while no shutdown is announced.
    inhibitor: Option<Inhibitor>,
    /// Set from the announcement of a shutdown until its cancellation.
    in_progress: Option<ShutdownInProgress>,
}

impl Watch<'_> {
    /// Follows announcements. Returns the reason when there are no more.
    async fn listen(&mut self, announcer: &dyn Announcer, pauses: &mut Doubling) -> String {
        let needed = self.parts.config.shutdown.total();
        match announcer.listen(needed).await {
            Ok(mut announcements) => match self.follow(&mut *announcements, pauses).await {
                Ok(()) => "the connection to logind or D-Bus was closed".into(),
                Err(error) => error.to_string(),
            },
            Err(error) => error.to_string(),
        }
    }

    async fn follow(
        &mut self,
        announcements: &mut dyn Announcements,
        pauses: &mut Doubling,
    ) -> Result<(), LogindError> {
        // A shutdown may have been announced before the subscription.
        let mut is_shutting_down = announcements.is_shutting_down().await?;
        loop {
            if is_shutting_down {
                self.begin();
            } else {
                self.cancel().await;
                match announcements.inhibit().await {
                    Ok(inhibitor) => {
                        self.inhibitor = Some(inhibitor);
                        tracing::info!("a shutdown of the machine will wait for pods");
                    }
                    // Announced since the query: begin immediately.
                    Err(LogindError::InProgress) => self.begin(),
                    Err(error) => return Err(error),
                }
            }
            pauses.reset();
            match announcements.next().await {
                Some(announced) => is_shutting_down = announced,
                None => return Ok(()),
            }
        }
    }

    fn emit_event(&self, what: &str) {
        let name = &self.parts.config.node_name;
        let message = format!("Shutdown manager detected shutdown {what}");
        let events = &self.parts.events;
        events.node(name, Kind::Normal, "Shutdown", message);
    }

    fn begin(&mut self) {
        if self.in_progress.is_some() {
            return;
        }
        tracing::warn!("the machine is shutting down: stopping the pods of this node");
        self.parts.shutting_down.send_replace(true);
        self.emit_event("event");
        if self.inhibitor.is_none() {
            tracing::warn!(
                "the shutdown does not wait for pods: it was announced before the agent could delay it"
            );
        }
        let (parts, cancel) = (Arc::clone(self.parts), CancellationToken::new());
        let (cancelled, inhibitor) = (cancel.clone(), self.inhibitor.take());
        let terminated = tokio::spawn(async move {
            let mut terminated = BTreeSet::new();
            let ended =
                cancelled.run_until_cancelled_owned(terminate_pods(&parts, &mut terminated));
            if ended.await.is_some() {
                tracing::info!("the pods have terminated: the machine may shut down");
            }
            drop(inhibitor);
            terminated
        });
        self.in_progress = Some(ShutdownInProgress {
            cancel,
            terminated: AbortOnDropHandle::new(terminated),
        });
    }

    /// Handles a cancelled shutdown: restarts static pods, and accepts pods again.
    async fn cancel(&mut self) {
        let Some(ShutdownInProgress { cancel, terminated }) = self.in_progress.take() else {
            return;
        };
        cancel.cancel();
        let mut to_restart = match terminated.await {
            Ok(terminated) => terminated,
            Err(error) => {
                tracing::error!(%error, "the set of terminated static pods is unknown");
                BTreeSet::new()
            }
        };
        to_restart.extend(rejected_static_pods(&self.parts.table.borrow()));
        tracing::warn!("the shutdown of the machine was cancelled: the node accepts pods again");
        self.parts.shutting_down.send_replace(false);
        self.emit_event("cancellation");
        for uid in to_restart {
            if self.hints.send(Hint::Restart(uid)).await.is_err() {
                tracing::debug!("the dispatcher has stopped: the process is exiting");
            }
        }
    }
}

/// Static pods that were rejected because of the shutdown.
fn rejected_static_pods(pods: &PodTable) -> BTreeSet<String> {
    let is_rejected = |known: &&Known| {
        let status = known.object.as_ref().and_then(|o| o.status.as_ref());
        pod::is_static(&known.pod) && status.is_some_and(|s| s.reason.as_deref() == Some(REJECTED))
    };
    let rejected = pods.iter().filter(is_rejected);
    rejected.map(|k| pod::uid(&k.pod).to_owned()).collect()
}

/// Terminates all pods, and adds the static ones to the set.
async fn terminate_pods(parts: &Arc<Parts>, terminated: &mut BTreeSet<String>) {
    let mut began = Instant::now();
    let mut times = Times {
        start: Some(parts.clock.now()),
        end: None,
    };
    // A disk that hangs or is no longer available must not delay the termination of pods.
    let saved = tokio::time::timeout(NOT_READY_TIMEOUT, save_times(parts, times));
    let (saved, ()) = tokio::join!(saved, wait_until_reported(parts));
    if saved.is_err() {
        tracing::warn!(waited = ?NOT_READY_TIMEOUT, file = STATE_FILE, "writing the time of the shutdown takes long; continuing without it");
    }
    let pods = parts.ledger.pods().await;
    let phases = parts.config.shutdown.phases(pods);
    for (place, phase) in phases.iter().enumerate() {
        let deadline = began + phase.period;
        let is_static = phase.pods.iter().filter(|p| pod::is_static(p));
        terminated.extend(is_static.map(|p| pod::uid(p).to_owned()));
        terminate_phase(parts, phase, deadline).await;
        // The apiserver may be a pod of the next phase. The wait is not added to the phase's period.
        let is_last = place + 1 == phases.len();
        let longest = Instant::now() + STATUS_TIMEOUT;
        wait_for_statuses(
            parts,
            phase,
            if is_last {
                longest
            } else {
                longest.min(deadline)
            },
        )
        .await;
        began = Instant::now().min(deadline);
    }
    times.end = Some(parts.clock.now());
    save_times(parts, times).await;
}

/// Terminates the pods of a phase, and waits for them until the phase's deadline.
async fn terminate_phase(parts: &Parts, phase: &Phase, deadline: Instant) {
    let names: Vec<String> = phase.pods.iter().map(|p| pod::full_name(p)).collect();
    tracing::info!(
        priority = phase.priority,
        period = ?phase.period,
        pods = names.join(" "),
        "stopping the pods of this shutdown phase"
    );
    for pod in &phase.pods {
        let left = deadline.saturating_duration_since(Instant::now());
        let verdict = phase.verdict(pod, left);
        parts.ledger.terminate(pod::uid(pod), verdict).await;
    }
    let uids: BTreeSet<&str> = phase.pods.iter().map(|p| pod::uid(p)).collect();
    let ended = async {
        while remaining(parts, &uids).await.next().is_some() {
            tokio::time::sleep(TERMINATION_POLL).await;
        }
    };
    if tokio::time::timeout_at(deadline, ended).await.is_err() {
        let late: Vec<String> = remaining(parts, &uids)
            .await
            .map(|p| pod::full_name(&p))
            .collect();
        tracing::warn!(pods = late.join(" "), period = ?phase.period, "pods did not terminate in time, or unmounting their volumes failed");
    }
}

/// Waits until the API has the terminal statuses of a phase's pods.
async fn wait_for_statuses(parts: &Parts, phase: &Phase, until: Instant) {
    let uids: BTreeSet<&str> = phase.pods.iter().map(|p| pod::uid(p)).collect();
    let mut table = parts.table.clone();
    let written = table.wait_for(|known| uids.iter().all(|uid| has_terminal_status(known, uid)));
    if tokio::time::timeout_at(until, written).await.is_err() {
        tracing::warn!(
            priority = phase.priority,
            "the terminal statuses of this shutdown phase's pods were not all published in time"
        );
    }
}

/// The pods that still use resources.
async fn remaining(parts: &Parts, uids: &BTreeSet<&str>) -> impl Iterator<Item = Arc<Pod>> {
    let pods = parts.ledger.pods().await.into_iter();
    pods.filter(|p| uids.contains(pod::uid(p)))
}

/// Whether the API has the pod's terminal status, or has no object for it.
fn has_terminal_status(known: &PodTable, uid: &str) -> bool {
    let Some(known) = known.iter().find(|k| pod::uid(&k.pod) == uid) else {
        return true;
    };
    let mirrors = |object: &&Arc<Pod>| {
        !pod::is_static(&known.pod)
            || pod::annotation(object, pod::MIRROR) == pod::annotation(&known.pod, pod::HASH)
    };
    let object = known.object.as_ref().filter(mirrors);
    object.is_none_or(|object| pod::is_terminal(object))
}

/// Waits until the Node reports the shutdown, so that no more pods are scheduled here.
async fn wait_until_reported(parts: &Parts) {
    if parts.node.api().is_none() {
        return;
    }
    let says = |node: &Option<Arc<Node>>| {
        let status = node.as_ref().and_then(|n| n.status.as_ref());
        let mut conditions = status
            .and_then(|s| s.conditions.as_ref())
            .into_iter()
            .flatten();
        conditions.any(|c| c.type_ == "Ready" && c.message.as_deref() == Some(shutdown::NOT_READY))
    };
    let mut seen = parts.node.subscribe();
    if tokio::time::timeout(NOT_READY_TIMEOUT, seen.wait_for(says))
        .await
        .is_err()
    {
        tracing::warn!(waited = ?NOT_READY_TIMEOUT, "the Node object does not report the shutdown yet; stopping the pods nevertheless");
    }
}

fn last_times(root: &Path) -> Result<Times, String> {
    let text = file::read_text_if_there(&root.join(STATE_FILE), MAX_STATE_SIZE);
    match text.map_err(|e| e.to_string())? {
        Some(text) => Times::parse(&text),
        None => Ok(Times::default()),
    }
}

/// Stores the start and end of the shutdown, for metrics after the next start.
async fn save_times(parts: &Parts, times: Times) {
    parts.metrics.shut_down(times);
    let path = parts.config.root_dir.join(STATE_FILE);
    let write = move || file::replace(&path, times.checkpoint().as_bytes());
    match tokio::task::spawn_blocking(write).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::warn!(%error, file = STATE_FILE, "writing the times of the shutdown failed");
        }
        Err(error) => {
            tracing::error!(%error, "the task that writes the times of the shutdown failed")
        }
    }
}
