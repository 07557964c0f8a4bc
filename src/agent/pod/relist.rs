//! Noticing what happens in the runtime (upstream's `pleg/`): events where it has them, listing
//! where it has not, and a slow listing as audit in any case. Both only hint; the worker looks itself, where an event
//! tells something that it does not know.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::agent::Context;
use crate::core::lock::lock;
use crate::core::pod::observed::RuntimeEvent;
use crate::cri::{ListedPod, RuntimeErrorKind};

/// How often the runtime is listed without events, and with them.
const PERIOD: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// How long nothing must have happened before memory is given back.
const QUIET: Duration = Duration::from_secs(2);

/// What workers last saw, by uid: a listing that shows the same is no news.
#[derive(Clone, Default)]
pub struct Seen(Arc<Mutex<BTreeMap<String, u64>>>);

impl Seen {
    /// A worker has seen this.
    pub fn set(&self, uid: &str, fingerprint: u64) {
        lock(&self.0).insert(uid.to_owned(), fingerprint);
    }

    /// The worker is gone.
    pub fn forget(&self, uid: &str) {
        lock(&self.0).remove(uid);
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

/// What is found.
#[derive(Debug)]
pub enum Hint {
    /// This static pod, which the node has ended, is to start anew.
    StartAnew(String),
    /// Something may have changed in this pod.
    Pod(String),
    /// This has happened to a sandbox or a container of a pod.
    Event(RuntimeEvent),
    /// The devices of this pod have another health than before.
    Devices(String),
    /// The runtime answers again, after it had not.
    RuntimeBack,
    /// All pods that the runtime has.
    Listed(Vec<ListedPod>),
}

/// Waits until it has been quiet for long enough after something happened.
async fn trimming(quiet_since: Option<Instant>) {
    match quiet_since {
        Some(since) => tokio::time::sleep_until(since + QUIET).await,
        None => std::future::pending().await,
    }
}

/// Runs until the receiver is gone.
pub async fn run(context: Arc<Context>, seen: Seen, hints: mpsc::Sender<Hint>) {
    let mut events: Option<mpsc::Receiver<RuntimeEvent>> = None;
    let mut has_events = true;
    let mut next_try = Instant::now();
    let mut failing = false;
    let mut was_away = false;
    let mut last: Option<Instant> = None;
    // Memory is given back once a burst is over: something happened, and then a while nothing did. The last to free much
    // are workers that end, some time after their containers.
    let mut quiet_since: Option<Instant> = None;
    let mut roster = context.roster.subscribe();
    loop {
        if roster.has_changed().unwrap_or(false) {
            roster.mark_unchanged();
            quiet_since = Some(Instant::now());
        }
        if quiet_since.is_some_and(|since| since.elapsed() >= QUIET) {
            quiet_since = None;
            crate::sys::memory::trim();
        }
        if events.is_none() && has_events && Instant::now() >= next_try {
            match context.runtime.events().await {
                Ok(stream) => events = Some(stream),
                Err(error) if error.kind == RuntimeErrorKind::Unimplemented => {
                    tracing::info!(
                        "the runtime has no container events; it is listed every second instead"
                    );
                    has_events = false;
                }
                Err(_) => next_try = Instant::now() + Duration::from_secs(5),
            }
        }
        let begun = Instant::now();
        let listing = context.runtime.list().await;
        context.metrics.listed(
            context.clock.now().as_duration().as_secs_f64(),
            begun.elapsed(),
            last.replace(begun).map(|last| begun - last),
        );
        match listing {
            Ok(listed) => {
                context.pulse.lists();
                if std::mem::replace(&mut failing, false) {
                    tracing::info!("the container runtime answers again");
                }
                if std::mem::take(&mut was_away) && hints.send(Hint::RuntimeBack).await.is_err() {
                    return;
                }
                for uid in seen.differing(&listed) {
                    quiet_since = Some(Instant::now());
                    if hints.send(Hint::Pod(uid)).await.is_err() {
                        return;
                    }
                }
                if hints.send(Hint::Listed(listed)).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                was_away = true;
                if !std::mem::replace(&mut failing, true) {
                    tracing::error!(%error, endpoint = context.config.runtime_endpoint, "the container runtime does not answer; is it running? it is tried every second");
                }
            }
        }
        let period = if events.is_some() { PERIOD.1 } else { PERIOD.0 };
        let until = Instant::now() + period;
        while let Some(stream) = &mut events {
            tokio::select! {
                // In this order, so that a simulated run replays exactly.
                biased;
                // Cancel-safe: a received event is handled before the next wait.
                event = stream.recv() => match event {
                    Some(event) => {
                        quiet_since = Some(Instant::now());
                        if hints.send(Hint::Event(event)).await.is_err() {
                            return;
                        }
                    }
                    // It may have been started again, sooner than it is listed.
                    None => (events, was_away) = (None, true),
                },
                Ok(()) = roster.changed() => quiet_since = Some(Instant::now()),
                () = trimming(quiet_since) => {
                    quiet_since = None;
                    crate::sys::memory::trim();
                }
                () = tokio::time::sleep_until(until) => break,
            }
        }
        if events.is_none() {
            next_try = next_try.max(Instant::now() + Duration::from_secs(1));
            tokio::time::sleep_until(until.min(Instant::now() + PERIOD.0)).await;
        }
    }
}
