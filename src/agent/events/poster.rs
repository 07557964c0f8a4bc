//! Posts events: several requests in parallel, but one for each object, with retries until the
//! apiserver answers (client-go's `recordToSink`).

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::super::pod::starts::IdleGate;
use super::{Dropped, Emitted, Kind, MAX_QUEUED};
use holdfast_core::backoff::Doubling;
use holdfast_core::bucket::Bucket;
use holdfast_core::correlate::{self, Correlator, Key};
use holdfast_core::time::seconds;
use holdfast_kubeapi::pods::{ApiFailure, PodApi};
use holdfast_sys::clock::Clock;

/// Limit for parallel requests. A request without an answer delays only the events of its object.
const MAX_PARALLEL_REQUESTS: usize = 8;
/// Back-off after a request that the apiserver did not answer.
const RETRY_BACKOFF: Doubling = Doubling::new(Duration::from_secs(1), Duration::from_secs(10));
/// How long an event is retried. client-go gives up after 12 attempts, about
/// 2 minutes; an apiserver upgrade takes longer.
const MAX_RETRY_AGE: Duration = Duration::from_secs(600);

/// The store of events.
#[async_trait]
pub(super) trait EventSink: Send + Sync {
    async fn create(&self, event: &Event) -> Result<(), ApiFailure>;
    async fn count(&self, namespace: &str, name: &str, patch: &Value) -> Result<(), ApiFailure>;
}

/// The apiserver as the store.
pub(super) struct ApiSink(pub(super) Arc<dyn PodApi>);

#[async_trait]
impl EventSink for ApiSink {
    async fn create(&self, event: &Event) -> Result<(), ApiFailure> {
        self.0.post_event(event).await
    }

    async fn count(&self, namespace: &str, name: &str, patch: &Value) -> Result<(), ApiFailure> {
        self.0.count_event(namespace, name, patch).await
    }
}

/// Events that are not posted yet, in order of arrival.
#[derive(Debug, Default)]
pub(super) struct QueuedEvents {
    warnings: VecDeque<Emitted>,
    normal: VecDeque<Emitted>,
}

/// Returns the first event whose object has no request in flight.
fn first_without_request(events: &VecDeque<Emitted>, busy: &HashSet<String>) -> Option<usize> {
    events
        .iter()
        .position(|event| !busy.contains(&event.object()))
}

impl QueuedEvents {
    pub(super) fn add(&mut self, event: Emitted) {
        match event.kind {
            Kind::Warning => self.warnings.push_back(event),
            Kind::Normal => self.normal.push_back(event),
        }
    }

    fn len(&self) -> usize {
        self.warnings.len() + self.normal.len()
    }

    /// Returns the next event: a warning immediately, a normal event after an idle period of container starts. Without
    /// an idle gate, a normal event does not wait. Cancel-safe.
    pub(super) async fn next(
        &mut self,
        idle_gate: Option<&mut IdleGate>,
        busy: &HashSet<String>,
    ) -> Option<Emitted> {
        if let Some(at) = first_without_request(&self.warnings, busy) {
            return self.warnings.remove(at);
        }
        let at = first_without_request(&self.normal, busy)?;
        if let Some(idle_gate) = idle_gate {
            idle_gate.wait(self.normal[at].queued_at).await;
        }
        self.normal.remove(at)
    }
}

/// The request that publishes an event.
enum Request {
    Create,
    /// Increments the count of an event that was posted before.
    Count {
        name: String,
        patch: Value,
    },
}

/// An event that is being posted.
struct Delivery {
    /// The event's object, which has only one request in flight.
    object: String,
    key: Key,
    /// The creation time, which is part of the event's name.
    posted: Timestamp,
    queued_at: Instant,
    count: i32,
    namespace: String,
    event: Box<Event>,
    request: Request,
    tries: u32,
}

impl Delivery {
    async fn send(&self, sink: &dyn EventSink) -> Result<(), ApiFailure> {
        match &self.request {
            Request::Create => match sink.create(&self.event).await {
                // The answer to an earlier attempt was lost.
                Err(ApiFailure::AlreadyExists(_)) => Ok(()),
                answer => answer,
            },
            Request::Count { name, patch } => sink.count(&self.namespace, name, patch).await,
        }
    }
}

/// Protects an apiserver that does not answer: one request at a time, with growing back-off.
#[derive(Default)]
struct Backpressure {
    failures: u32,
    closed_until: Option<Instant>,
}

impl Backpressure {
    fn is_unresponsive(&self) -> bool {
        self.failures > 0
    }

    fn close(&mut self, failure: &ApiFailure) {
        let now = Instant::now();
        // Requests that were in flight together count as one failure.
        if self.closed_until.is_none_or(|until| until <= now) {
            self.failures = self.failures.saturating_add(1);
            let pause = failure
                .retry_after()
                .unwrap_or_else(|| RETRY_BACKOFF.after(self.failures));
            self.closed_until = Some(now + pause.min(RETRY_BACKOFF.after(u32::MAX)));
        }
    }

    async fn wait_until_open(&self) {
        if let Some(until) = self.closed_until {
            tokio::time::sleep_until(until).await;
        }
    }
}

/// State of the task that posts events.
pub(super) struct Poster {
    node: String,
    clock: Clock,
    correlator: Correlator,
    pace: Bucket,
    waiting: QueuedEvents,
    /// Correlated, but not sent yet.
    ready: VecDeque<Delivery>,
    retries: Vec<(Instant, Delivery)>,
    /// The objects of all deliveries, in flight or waiting for a retry.
    busy: HashSet<String>,
    backpressure: Backpressure,
    dropped: Dropped,
}

impl Poster {
    pub(super) fn new(node: &str, clock: Clock, pace: (f64, f64), dropped: Dropped) -> Poster {
        Poster {
            node: node.to_owned(),
            clock,
            correlator: Correlator::default(),
            pace: Bucket::new(pace.0, pace.1, clock.now()),
            waiting: QueuedEvents::default(),
            ready: VecDeque::new(),
            retries: vec![],
            busy: HashSet::new(),
            backpressure: Backpressure::default(),
            dropped,
        }
    }

    fn len(&self) -> usize {
        self.waiting.len() + self.ready.len() + self.retries.len()
    }

    /// The time of the next retry.
    fn next_retry(&self) -> Option<Instant> {
        self.retries.iter().map(|(at, _)| *at).min()
    }

    fn take_retry(&mut self) -> Option<Delivery> {
        let now = Instant::now();
        let due = self.retries.iter().enumerate();
        let due = due.filter(|(_, (at, _))| *at <= now);
        let (at, _) = due.min_by_key(|(_, (at, _))| *at)?;
        Some(self.retries.remove(at).1)
    }

    /// Waits until the next delivery is due and returns it; `None` if no event is queued. Cancel-safe.
    async fn next(&mut self, mut idle_gate: Option<&mut IdleGate>) -> Option<Delivery> {
        self.backpressure.wait_until_open().await;
        while self.ready.is_empty() {
            // While the apiserver does not answer, retries have no precedence over new events: the same
            // unanswered event would be the only one tried.
            if !self.backpressure.is_unresponsive()
                && let Some(retry) = self.take_retry()
            {
                self.ready.push_back(retry);
                break;
            }
            let retry_at = self.next_retry();
            let due = async {
                match retry_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let emitted = tokio::select! {
                biased;
                emitted = self.waiting.next(idle_gate.as_deref_mut(), &self.busy) => emitted,
                () = due => None,
            };
            if let Some(emitted) = emitted {
                let delivery = self.correlate(emitted);
                self.ready.extend(delivery);
            } else if let Some(retry) = self.take_retry() {
                self.ready.push_back(retry);
            } else {
                tokio::time::sleep_until(retry_at?).await;
            }
        }
        while let Err(wait) = self.pace.take(self.clock.now()) {
            tokio::time::sleep(wait).await;
        }
        self.ready.pop_front()
    }

    /// Correlates an event with earlier ones; `None` if the object has too many events.
    fn correlate(&mut self, emitted: Emitted) -> Option<Delivery> {
        let now = self.clock.now();
        let (object, kind) = (emitted.object(), format!("{:?}", emitted.kind));
        let said = correlate::PendingEvent {
            object: &object,
            part: emitted.about.field_path.as_deref().unwrap_or_default(),
            kind: &kind,
            reason: &emitted.reason,
            message: &emitted.message,
        };
        let Some(verdict) = self.correlator.decide(said, now) else {
            tracing::debug!(
                object,
                reason = emitted.reason,
                "event not posted: too many about this object"
            );
            return None;
        };
        let name = |posted: Timestamp| {
            let about = emitted.about.name.as_deref().unwrap_or_default();
            format!("{about}.{:x}", posted.as_nanosecond())
        };
        let message = truncate_message(&verdict.message);
        let (count, request) = match verdict.counted {
            None => (1, Request::Create),
            Some((posted, count)) => {
                let last = seconds(emitted.occurred_at);
                let patch = json!({"count": count, "lastTimestamp": last, "message": message});
                let name = name(posted);
                (count, Request::Count { name, patch })
            }
        };
        let namespace = emitted.about.namespace.clone();
        let namespace = namespace.unwrap_or_else(|| "default".into());
        let metadata = ObjectMeta {
            name: Some(name(now)),
            namespace: Some(namespace.clone()),
            annotations: emitted.annotations.clone(),
            ..ObjectMeta::default()
        };
        self.busy.insert(object.clone());
        Some(Delivery {
            object,
            key: verdict.key,
            posted: now,
            queued_at: emitted.queued_at,
            count,
            namespace,
            event: Box::new(self.event(metadata, emitted, message, count)),
            request,
            tries: 0,
        })
    }

    fn event(&self, metadata: ObjectMeta, emitted: Emitted, message: String, count: i32) -> Event {
        let stamp = seconds(emitted.occurred_at);
        Event {
            metadata,
            involved_object: emitted.about,
            reason: Some(emitted.reason),
            message: Some(message),
            type_: Some(format!("{:?}", emitted.kind)),
            source: Some(EventSource {
                component: Some("kubelet".into()),
                host: Some(self.node.clone()),
            }),
            reporting_component: Some("kubelet".into()),
            reporting_instance: Some(self.node.clone()),
            first_timestamp: Some(stamp.clone()),
            last_timestamp: Some(stamp),
            count: Some(count),
            ..Event::default()
        }
    }

    /// Processes a request's outcome as upstream does: retries without an answer, drops rejected events.
    fn process_outcome(&mut self, mut delivery: Delivery, outcome: Result<(), ApiFailure>) {
        let answered = outcome.as_ref().err().is_none_or(ApiFailure::is_answer);
        if answered {
            self.backpressure = Backpressure::default();
        }
        match (outcome, &delivery.request) {
            (Ok(()), Request::Create) => {
                let (key, count) = (delivery.key, delivery.count);
                self.correlator.record_posted(key, delivery.posted, count);
            }
            (Ok(()), Request::Count { .. }) => {}
            (Err(ApiFailure::NotFound(_)), Request::Count { .. }) => {
                // The apiserver deletes events after an hour.
                self.correlator.remove(delivery.key);
                delivery.request = Request::Create;
                self.ready.push_front(delivery);
                return;
            }
            (Err(failure), _) if !answered => {
                // A request that times out delays only its own object.
                if !matches!(failure, ApiFailure::Timeout(_)) {
                    self.backpressure.close(&failure);
                }
                if delivery.queued_at.elapsed() < MAX_RETRY_AGE {
                    delivery.tries = delivery.tries.saturating_add(1);
                    let pause = failure
                        .retry_after()
                        .unwrap_or_else(|| RETRY_BACKOFF.after(delivery.tries));
                    let at = Instant::now() + pause.min(RETRY_BACKOFF.after(u32::MAX));
                    self.retries.push((at, delivery));
                    return;
                }
                self.dropped
                    .count(&format!("not posted for {MAX_RETRY_AGE:?}: {failure}"));
            }
            (Err(failure), _) => tracing::debug!(%failure, "the apiserver rejected an event"),
        }
        self.busy.remove(&delivery.object);
    }
}

/// Posts events until all senders are dropped.
pub(super) async fn run(
    sink: Arc<dyn EventSink>,
    mut poster: Poster,
    mut emitted: mpsc::Receiver<Emitted>,
    mut flushes: mpsc::Receiver<oneshot::Sender<()>>,
    mut idle_gate: IdleGate,
) {
    let mut requests: JoinSet<(Delivery, Result<(), ApiFailure>)> = JoinSet::new();
    let mut flushing: Option<oneshot::Sender<()>> = None;
    loop {
        if flushing.is_some() {
            while let Ok(event) = emitted.try_recv() {
                poster.waiting.add(event);
            }
            if poster.len() == 0
                && requests.is_empty()
                && let Some(done) = flushing.take()
            {
                // The caller may have stopped waiting.
                let _ = done.send(());
            }
        }
        let has_room = poster.len() < MAX_QUEUED / 2;
        let most = if poster.backpressure.is_unresponsive() {
            1
        } else {
            MAX_PARALLEL_REQUESTS
        };
        let may_send = requests.len() < most;
        let idle_gate = Some(&mut idle_gate).filter(|_| flushing.is_none());
        tokio::select! {
            // The order is fixed: warnings overtake normal events, and a simulated run replays exactly.
            biased;
            Some(event) = emitted.recv(), if has_room => poster.waiting.add(event),
            Some(done) = flushes.recv(), if flushing.is_none() => flushing = Some(done),
            // Cancel-safe: an outcome is either returned or stays in the set. Tasks are
            // never aborted, and a panic terminates the process.
            Some(Ok((delivery, outcome))) = requests.join_next() => poster.process_outcome(delivery, outcome),
            Some(delivery) = poster.next(idle_gate), if may_send => {
                let sink = Arc::clone(&sink);
                requests.spawn(async move {
                    let outcome = delivery.send(&*sink).await;
                    (delivery, outcome)
                });
            }
            else => return,
        }
    }
}

/// Truncates a message to the API's limit of 1024 characters.
fn truncate_message(message: &str) -> String {
    message.chars().take(1024).collect()
}
