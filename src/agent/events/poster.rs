//! Posting events: several requests at a time, one for each object, and retries until the apiserver answers (client-go's
//! `recordToSink`).

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

use super::super::pod::starts::Lull;
use super::{Dropped, Emitted, Kind, MAX_QUEUED};
use crate::core::backoff::Doubling;
use crate::core::bucket::Bucket;
use crate::core::correlate::{self, Correlator, Key};
use crate::core::time::seconds;
use crate::kubeapi::pods::{ApiFailure, PodApi};
use crate::sys::clock::Clock;

/// How many requests may be under way: one without an answer delays only the events of its object.
const MAX_POSTS: usize = 8;
/// The pauses after a request that the apiserver has not answered.
const RETRY: Doubling = Doubling::new(Duration::from_secs(1), Duration::from_secs(10));
/// How long an event is retried. client-go gives up after 12 tries, about 2 minutes; an apiserver that is upgraded takes longer.
const MAX_AGE: Duration = Duration::from_secs(600);

/// Where events are stored.
#[async_trait]
pub(super) trait EventSink: Send + Sync {
    async fn create(&self, event: &Event) -> Result<(), ApiFailure>;
    async fn count(&self, namespace: &str, name: &str, patch: &Value) -> Result<(), ApiFailure>;
}

/// The apiserver as a sink.
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

/// Events that are not posted yet, each kind in its order.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    warnings: VecDeque<Emitted>,
    normal: VecDeque<Emitted>,
}

/// The first event whose object has no request under way.
fn first_free(events: &VecDeque<Emitted>, busy: &HashSet<String>) -> Option<usize> {
    events
        .iter()
        .position(|event| !busy.contains(&event.object()))
}

impl Waiting {
    pub(super) fn add(&mut self, event: Emitted) {
        match event.kind {
            Kind::Warning => self.warnings.push_back(event),
            Kind::Normal => self.normal.push_back(event),
        }
    }

    fn len(&self) -> usize {
        self.warnings.len() + self.normal.len()
    }

    /// Takes the next event: a warning at once, a normal one after an idle period of the starts, unless `lull` is `None`.
    /// Cancel-safe.
    pub(super) async fn next(
        &mut self,
        lull: Option<&mut Lull>,
        busy: &HashSet<String>,
    ) -> Option<Emitted> {
        if let Some(at) = first_free(&self.warnings, busy) {
            return self.warnings.remove(at);
        }
        let at = first_free(&self.normal, busy)?;
        if let Some(lull) = lull {
            lull.wait(self.normal[at].came).await;
        }
        self.normal.remove(at)
    }
}

/// What is sent for an event.
enum Request {
    Create,
    /// Counts an event that was posted before.
    Count {
        name: String,
        patch: Value,
    },
}

/// An event on its way to the apiserver.
struct Delivery {
    /// The object that the event is about: only one of its events is on its way.
    object: String,
    key: Key,
    /// When the event is created, which is in its name.
    posted: Timestamp,
    came: Instant,
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
                // The answer to an earlier try was lost.
                Err(ApiFailure::AlreadyExists(_)) => Ok(()),
                answer => answer,
            },
            Request::Count { name, patch } => sink.count(&self.namespace, name, patch).await,
        }
    }
}

/// How an apiserver that does not answer is spared: one request at a time, after pauses that grow.
#[derive(Default)]
struct Gate {
    failures: u32,
    closed_until: Option<Instant>,
}

impl Gate {
    fn is_suspect(&self) -> bool {
        self.failures > 0
    }

    fn close(&mut self, failure: &ApiFailure) {
        let now = Instant::now();
        // Requests that were under way together fail together.
        if self.closed_until.is_none_or(|until| until <= now) {
            self.failures = self.failures.saturating_add(1);
            let pause = failure
                .retry_after()
                .unwrap_or_else(|| RETRY.after(self.failures));
            self.closed_until = Some(now + pause.min(RETRY.after(u32::MAX)));
        }
    }

    async fn pass(&self) {
        if let Some(until) = self.closed_until {
            tokio::time::sleep_until(until).await;
        }
    }
}

/// The state of the poster.
pub(super) struct Poster {
    node: String,
    clock: Clock,
    correlator: Correlator,
    pace: Bucket,
    waiting: Waiting,
    /// Judged by the correlator, and not sent yet.
    ready: VecDeque<Delivery>,
    retries: Vec<(Instant, Delivery)>,
    /// The objects of all deliveries.
    busy: HashSet<String>,
    gate: Gate,
    dropped: Dropped,
}

impl Poster {
    pub(super) fn new(node: &str, clock: Clock, pace: (f64, f64), dropped: Dropped) -> Poster {
        Poster {
            node: node.to_owned(),
            clock,
            correlator: Correlator::default(),
            pace: Bucket::new(pace.0, pace.1, clock.now()),
            waiting: Waiting::default(),
            ready: VecDeque::new(),
            retries: vec![],
            busy: HashSet::new(),
            gate: Gate::default(),
            dropped,
        }
    }

    fn len(&self) -> usize {
        self.waiting.len() + self.ready.len() + self.retries.len()
    }

    /// When the next retry is due.
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

    /// The next delivery to send, when its time has come; `None` if there is none. Cancel-safe.
    async fn next(&mut self, mut lull: Option<&mut Lull>) -> Option<Delivery> {
        self.gate.pass().await;
        while self.ready.is_empty() {
            // While the apiserver is suspect, an event that it never answers must not be the only one that is tried.
            if !self.gate.is_suspect()
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
                emitted = self.waiting.next(lull.as_deref_mut(), &self.busy) => emitted,
                () = due => None,
            };
            if let Some(emitted) = emitted {
                let delivery = self.judge(emitted);
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

    /// Correlates an event with those before; `None` if there were too many about its object.
    fn judge(&mut self, emitted: Emitted) -> Option<Delivery> {
        let now = self.clock.now();
        let (object, kind) = (emitted.object(), format!("{:?}", emitted.kind));
        let said = correlate::Said {
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
        let message = shortened(&verdict.message);
        let (count, request) = match verdict.counted {
            None => (1, Request::Create),
            Some((posted, count)) => {
                let last = seconds(emitted.at);
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
            came: emitted.came,
            count,
            namespace,
            event: Box::new(self.event(metadata, emitted, message, count)),
            request,
            tries: 0,
        })
    }

    fn event(&self, metadata: ObjectMeta, emitted: Emitted, message: String, count: i32) -> Event {
        let stamp = seconds(emitted.at);
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

    /// Takes the outcome of a request: what was not answered is retried, what was refused is dropped, as upstream has it.
    fn settle(&mut self, mut delivery: Delivery, outcome: Result<(), ApiFailure>) {
        let answered = outcome.as_ref().err().is_none_or(ApiFailure::is_answer);
        if answered {
            self.gate = Gate::default();
        }
        match (outcome, &delivery.request) {
            (Ok(()), Request::Create) => {
                let (key, count) = (delivery.key, delivery.count);
                self.correlator.posted(key, delivery.posted, count);
            }
            (Ok(()), Request::Count { .. }) => {}
            (Err(ApiFailure::NotFound(_)), Request::Count { .. }) => {
                // The apiserver removes events after an hour.
                self.correlator.forget(delivery.key);
                delivery.request = Request::Create;
                self.ready.push_front(delivery);
                return;
            }
            (Err(failure), _) if !answered => {
                // A request that hangs occupies its own place only.
                if !matches!(failure, ApiFailure::Timeout(_)) {
                    self.gate.close(&failure);
                }
                if delivery.came.elapsed() < MAX_AGE {
                    delivery.tries = delivery.tries.saturating_add(1);
                    let pause = failure
                        .retry_after()
                        .unwrap_or_else(|| RETRY.after(delivery.tries));
                    let at = Instant::now() + pause.min(RETRY.after(u32::MAX));
                    self.retries.push((at, delivery));
                    return;
                }
                self.dropped
                    .count(&format!("not posted for {MAX_AGE:?}: {failure}"));
            }
            (Err(failure), _) => tracing::debug!(%failure, "the apiserver refused an event"),
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
    mut lull: Lull,
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
                // The caller may have given up.
                let _ = done.send(());
            }
        }
        let has_room = poster.len() < MAX_QUEUED / 2;
        let most = if poster.gate.is_suspect() {
            1
        } else {
            MAX_POSTS
        };
        let may_send = requests.len() < most;
        let lull = Some(&mut lull).filter(|_| flushing.is_none());
        tokio::select! {
            // In this order: a warning overtakes normal events, and a simulated run replays exactly.
            biased;
            Some(event) = emitted.recv(), if has_room => poster.waiting.add(event),
            Some(done) = flushes.recv(), if flushing.is_none() => flushing = Some(done),
            // Cancel-safe: an outcome is taken or stays. No task is aborted, and a panic ends the process.
            Some(Ok((delivery, outcome))) = requests.join_next() => poster.settle(delivery, outcome),
            Some(delivery) = poster.next(lull), if may_send => {
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

/// The API's limit for messages.
fn shortened(message: &str) -> String {
    message.chars().take(1024).collect()
}
