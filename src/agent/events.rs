//! Events about pods and the node. Events are posted in the background; repeated events increment a count instead.

mod poster;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use kube::ResourceExt as _;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use self::poster::{ApiSink, EventSink, Poster};
use super::pod::starts::IdleGate;
use holdfast_core::lock::lock;
use holdfast_core::repeated::RepeatedFailures;
use holdfast_core::volume::resize::Grown;
use holdfast_kubeapi::pods::PodApi;
use holdfast_sys::clock::Clock;

/// Limit for queued events; further events are dropped.
const MAX_QUEUED: usize = 1024;

/// Maximum time to flush queued events during shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The `type` of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `Normal`: information only.
    Normal,
    /// `Warning`: a problem that needs attention.
    Warning,
}

/// Limit for pending sets of annotations, one for each pod and reason.
const MAX_PENDING_ANNOTATIONS: usize = 64;

/// Annotations for future events, by the pod's uid and the event's reason.
type PendingAnnotations = HashMap<(String, String), BTreeMap<String, String>>;

#[derive(Debug)]
struct Emitted {
    /// The time of the occurrence, which the event reports even if posted later.
    occurred_at: Timestamp,
    /// The same time on the monotonic clock.
    queued_at: Instant,
    about: ObjectReference,
    kind: Kind,
    reason: String,
    message: String,
    annotations: Option<BTreeMap<String, String>>,
}

impl Emitted {
    /// A key for the object: its namespace, kind, name and uid.
    fn object(&self) -> String {
        let about = &self.about;
        let parts = [&about.namespace, &about.kind, &about.name, &about.uid];
        parts
            .map(|part| part.as_deref().unwrap_or_default())
            .join("/")
    }
}

/// Counts dropped events. Logs the first one, then the number of further ones with growing pauses.
#[derive(Clone)]
struct Dropped {
    logged: Arc<Mutex<RepeatedFailures<()>>>,
    clock: Clock,
}

impl Dropped {
    fn new(clock: Clock) -> Dropped {
        Dropped {
            logged: Arc::default(),
            clock,
        }
    }

    fn count(&self, why: &str) {
        if let Some(more) = lock(&self.logged).record((), why, self.clock.now()) {
            tracing::warn!(why, dropped = more.saturating_add(1), "events were dropped");
        }
    }
}

/// A handle to emit events; clones share one queue.
#[derive(Clone)]
pub struct Events {
    queue: mpsc::Sender<Emitted>,
    flushes: mpsc::Sender<oneshot::Sender<()>>,
    clock: Clock,
    pending_annotations: Arc<Mutex<PendingAnnotations>>,
    dropped: Dropped,
}

impl Events {
    /// Starts posting as component `kubelet` on `node`. `pace` is the limit of events per second (0: unlimited) and the
    /// burst. Normal events wait for an idle period between container starts, at most some seconds. On a small node,
    /// posting a pod's events would take a tenth of the processor time of its start.
    #[must_use]
    pub fn start(
        api: Arc<dyn PodApi>,
        node: &str,
        clock: Clock,
        pace: (f64, f64),
        idle_gate: IdleGate,
    ) -> Events {
        Events::with_sink(Arc::new(ApiSink(api)), node, clock, pace, idle_gate)
    }

    fn with_sink(
        sink: Arc<dyn EventSink>,
        node: &str,
        clock: Clock,
        pace: (f64, f64),
        idle_gate: IdleGate,
    ) -> Events {
        let (queue, emitted) = mpsc::channel(MAX_QUEUED / 2);
        let (flushes, flush) = mpsc::channel(1);
        let dropped = Dropped::new(clock);
        let poster = Poster::new(node, clock, pace, dropped.clone());
        tokio::spawn(poster::run(sink, poster, emitted, flush, idle_gate));
        Events {
            queue,
            flushes,
            clock,
            pending_annotations: Arc::default(),
            dropped,
        }
    }

    /// Events without a poster, and a function that returns the messages emitted since its last call.
    #[cfg(test)]
    pub(super) fn recorded() -> (Events, impl FnMut() -> Vec<String>) {
        let (queue, mut emitted) = mpsc::channel(MAX_QUEUED);
        let events = Events {
            queue,
            flushes: mpsc::channel(1).0,
            clock: Clock::system(),
            pending_annotations: Arc::default(),
            dropped: Dropped::new(Clock::system()),
        };
        let heard = move || {
            let next = || emitted.try_recv().ok().map(|event| event.message);
            std::iter::from_fn(next).collect()
        };
        (events, heard)
    }

    fn emit(&self, about: ObjectReference, kind: Kind, reason: &str, message: impl Into<String>) {
        let (reason, message) = (reason.to_owned(), message.into());
        tracing::debug!(object = about.name, reason, message, "event");
        let key = (about.uid.clone().unwrap_or_default(), reason.clone());
        let annotations = self.pending_annotations().remove(&key);
        let sent = self.queue.try_send(Emitted {
            occurred_at: self.clock.now(),
            queued_at: Instant::now(),
            about,
            kind,
            reason,
            message,
            annotations,
        });
        if sent.is_err() {
            self.dropped.count("too many events wait for the apiserver");
        }
    }

    /// Posts queued events, for at most [`FLUSH_TIMEOUT`].
    pub async fn flush(&self) {
        let (done, posted) = oneshot::channel();
        let flush = async {
            // Without a poster there is nothing to wait for.
            if self.flushes.send(done).await.is_ok() {
                let _ = posted.await;
            }
        };
        if tokio::time::timeout(FLUSH_TIMEOUT, flush).await.is_err() {
            tracing::warn!("the last events were not posted before the shutdown timeout");
        }
    }

    fn pending_annotations(&self) -> MutexGuard<'_, PendingAnnotations> {
        lock(&self.pending_annotations)
    }

    /// Sets the annotations of the pod's next event with this reason. Empty annotations cancel an earlier call.
    pub fn annotate(&self, uid: &str, reason: &str, annotations: BTreeMap<String, String>) {
        let key = (uid.to_owned(), reason.to_owned());
        let mut pending_annotations = self.pending_annotations();
        if annotations.is_empty() {
            pending_annotations.remove(&key);
        } else if pending_annotations.len() < MAX_PENDING_ANNOTATIONS {
            pending_annotations.insert(key, annotations);
        }
    }

    /// Emits an event about a pod; `container` is a field path such as `spec.containers{web}`.
    pub fn pod(
        &self,
        pod: &Pod,
        container: Option<String>,
        kind: Kind,
        reason: &str,
        message: impl Into<String>,
    ) {
        let about = ObjectReference {
            namespace: pod.namespace(),
            uid: pod.uid(),
            resource_version: pod.resource_version(),
            field_path: container,
            ..object("Pod", &pod.name_any())
        };
        self.emit(about, kind, reason, message);
    }

    /// Emits an event about the claim of a volume that is being expanded.
    pub fn claim(&self, of: &Grown, kind: Kind, reason: &str, message: impl Into<String>) {
        let about = ObjectReference {
            namespace: Some(of.namespace.clone()),
            // `kubectl describe` matches events by uid.
            uid: of.uid.clone(),
            ..object("PersistentVolumeClaim", &of.claim)
        };
        self.emit(about, kind, reason, message);
    }

    /// Emits an event about a persistent volume.
    pub(crate) fn persistent_volume(
        &self,
        name: &str,
        kind: Kind,
        reason: &str,
        message: impl Into<String>,
    ) {
        self.emit(object("PersistentVolume", name), kind, reason, message);
    }

    /// Emits an event about the node.
    pub fn node(&self, name: &str, kind: Kind, reason: &str, message: impl Into<String>) {
        self.emit(object("Node", name), kind, reason, message);
    }
}

/// A reference to an object of the core API group, without a namespace.
fn object(kind: &str, name: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some(kind.into()),
        name: Some(name.into()),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests;
