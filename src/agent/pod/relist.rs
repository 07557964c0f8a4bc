//! Detects changes in the runtime (upstream's `pkg/kubelet/pleg`). If the runtime has an event stream, its events are
//! used, with a slow listing as a safety net; otherwise a fast listing. Both are only hints: a worker that does not
//! know what a hint reports reads the pod's state from the runtime.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{BoxFuture, OptionFuture};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::heartbeats::Heartbeats;
use crate::metrics::Metrics;
use holdfast_config::Config;
use holdfast_core::lock::lock;
use holdfast_core::pod::observed::RuntimeEvent;
use holdfast_cri::{ListedPod, Runtime, RuntimeError, RuntimeErrorKind};
use holdfast_sys::clock::Clock;

/// Interval between listings without and with runtime events.
const LIST_INTERVALS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Pause after a failed subscription to runtime events.
const RESUBSCRIBE: Duration = Duration::from_secs(5);

/// The state that each worker last observed, as a fingerprint by pod uid. A
/// listing with the same fingerprint is no change.
#[derive(Clone, Default)]
pub(crate) struct ObservedFingerprints(Arc<Mutex<BTreeMap<String, u64>>>);

impl ObservedFingerprints {
    /// Sets the state that a worker has observed.
    pub fn set(&self, uid: &str, fingerprint: u64) {
        lock(&self.0).insert(uid.to_owned(), fingerprint);
    }

    /// Forgets a worker that has returned.
    pub fn forget(&self, uid: &str) {
        lock(&self.0).remove(uid);
    }

    /// Returns pods with a running sandbox or container, but without an active worker: a cancelled call may have
    /// created a sandbox after its pod finished.
    fn unwatched(&self, listed: &[ListedPod]) -> Vec<String> {
        let seen = lock(&self.0);
        let unseen = listed
            .iter()
            .filter(|p| p.is_live && !seen.contains_key(&p.uid));
        unseen.map(|p| p.uid.clone()).collect()
    }

    fn differing(&self, listed: &[ListedPod]) -> Vec<String> {
        let seen = lock(&self.0);
        let now: BTreeMap<&str, u64> = listed
            .iter()
            .map(|p| (p.uid.as_str(), p.fingerprint))
            .collect();
        seen.iter()
            .filter(|(uid, seen)| now.get(uid.as_str()).copied().unwrap_or(0) != **seen)
            .map(|(uid, _)| uid.clone())
            .collect()
    }
}

/// A change for the dispatcher.
#[derive(Debug)]
pub enum Hint {
    /// Restart this static pod, which the node has stopped.
    Restart(String),
    /// The state of this pod may have changed.
    Pod(String),
    /// An event of a sandbox or a container.
    Event(RuntimeEvent),
    /// The health of this pod's devices changed.
    Devices(String),
    /// The runtime answers again after an outage.
    RuntimeBack,
    /// All pods of the runtime.
    Listed(Vec<ListedPod>),
}

/// What relisting uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub runtime: Arc<dyn Runtime>,
    pub clock: Clock,
    pub metrics: Arc<Metrics>,
    pub heartbeats: Arc<Heartbeats>,
}

/// The runtime's event stream.
type Stream = mpsc::Receiver<RuntimeEvent>;

/// The result of a listing. Without an event stream, the round subscribes first.
struct Round {
    subscription: Option<Result<Stream, RuntimeError>>,
    listing: Result<Vec<ListedPod>, RuntimeError>,
    begun: Instant,
}

async fn round(runtime: Arc<dyn Runtime>, subscribes: bool) -> Round {
    let subscription = match subscribes {
        true => Some(runtime.events().await),
        false => None,
    };
    let begun = Instant::now();
    let listing = runtime.list().await;
    Round {
        subscription,
        listing,
        begun,
    }
}

/// Returns the next event, or `None` if the stream was closed. Never returns without a stream. Cancel-safe.
async fn next_event(stream: Option<&mut Stream>) -> Option<RuntimeEvent> {
    match stream {
        Some(stream) => stream.recv().await,
        None => std::future::pending().await,
    }
}

/// The receiver of hints was dropped.
struct Closed;

struct Relist {
    parts: Parts,
    seen: ObservedFingerprints,
    hints: mpsc::Sender<Hint>,
    stream: Option<Stream>,
    has_events: bool,
    /// The time of the next subscription attempt.
    next_try: Instant,
    failing: bool,
    was_unavailable: bool,
    last: Option<Instant>,
}

impl Relist {
    fn new(parts: Parts, seen: ObservedFingerprints, hints: mpsc::Sender<Hint>) -> Relist {
        Relist {
            parts,
            seen,
            hints,
            stream: None,
            has_events: true,
            next_try: Instant::now(),
            failing: false,
            was_unavailable: false,
            last: None,
        }
    }

    async fn send(&self, hint: Hint) -> Result<(), Closed> {
        self.hints.send(hint).await.map_err(|_| Closed)
    }

    fn subscribes(&self) -> bool {
        self.stream.is_none() && self.has_events && Instant::now() >= self.next_try
    }

    async fn take(&mut self, round: Round) -> Result<(), Closed> {
        match round.subscription {
            Some(Ok(stream)) => self.stream = Some(stream),
            Some(Err(error)) if error.kind == RuntimeErrorKind::Unimplemented => {
                tracing::info!(
                    "the runtime does not support container events; listing its pods every second instead"
                );
                self.has_events = false;
            }
            Some(Err(_)) => self.next_try = Instant::now() + RESUBSCRIBE,
            None => {}
        }
        let parts = &self.parts;
        let begun = round.begun;
        parts.metrics.runtime_listed(
            parts.clock.now().as_duration().as_secs_f64(),
            begun.elapsed(),
            self.last.replace(begun).map(|last| begun - last),
        );
        match round.listing {
            Ok(listed) => self.take_listed(listed).await,
            Err(error) => {
                self.was_unavailable = true;
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::error!(%error, endpoint = parts.config.runtime_endpoint, "the container runtime does not answer; is it running? retrying every second");
                }
                Ok(())
            }
        }
    }

    async fn take_listed(&mut self, listed: Vec<ListedPod>) -> Result<(), Closed> {
        self.parts.heartbeats.runtime_listed();
        if std::mem::replace(&mut self.failing, false) {
            tracing::info!("the container runtime answers again");
        }
        if std::mem::take(&mut self.was_unavailable) {
            self.send(Hint::RuntimeBack).await?;
        }
        let changed = self.seen.differing(&listed);
        for uid in changed.into_iter().chain(self.seen.unwatched(&listed)) {
            self.send(Hint::Pod(uid)).await?;
        }
        self.send(Hint::Listed(listed)).await
    }

    async fn take_event(&mut self, event: Option<RuntimeEvent>) -> Result<(), Closed> {
        let Some(event) = event else {
            // The runtime may have restarted between two listings.
            (self.stream, self.was_unavailable) = (None, true);
            self.next_try = self.next_try.max(Instant::now() + LIST_INTERVALS.0);
            return Ok(());
        };
        self.send(Hint::Event(event)).await
    }
}

/// Runs until the receiver is dropped.
pub async fn run(parts: Parts, seen: ObservedFingerprints, hints: mpsc::Sender<Hint>) {
    let mut relist = Relist::new(parts, seen, hints);
    // Events are read during a listing: a runtime that does not answer the listing may still send events.
    let (mut under_way, mut next) = (OptionFuture::<BoxFuture<Round>>::default(), Instant::now());
    let mut is_listing = false;
    loop {
        if !is_listing && Instant::now() >= next {
            let round = round(Arc::clone(&relist.parts.runtime), relist.subscribes());
            (under_way, is_listing) = (Some(round.boxed()).into(), true);
        }
        let taken = tokio::select! {
            // The order is fixed, so that a simulated run replays exactly.
            biased;
            // Cancel-safe: a received event is handled before the next wait.
            event = next_event(relist.stream.as_mut()) => {
                let taken = relist.take_event(event).await;
                if relist.stream.is_none() {
                    next = next.min(Instant::now() + LIST_INTERVALS.0);
                }
                taken
            }
            // Cancel-safe: the future is kept and polled again.
            Some(round) = &mut under_way, if is_listing => {
                (under_way, is_listing) = (None.into(), false);
                let taken = relist.take(round).await;
                let period = if relist.stream.is_some() { LIST_INTERVALS.1 } else { LIST_INTERVALS.0 };
                next = Instant::now() + period;
                taken
            }
            () = tokio::time::sleep_until(next), if !is_listing => Ok(()),
        };
        if taken.is_err() {
            return;
        }
    }
}
