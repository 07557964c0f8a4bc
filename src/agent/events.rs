//! Events about pods and the node: posted in the background, repeated ones counted instead of repeated.

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
use super::pod::starts::Lull;
use crate::core::lock::lock;
use crate::core::repeated::RepeatedFailures;
use crate::core::volume::claims::Grown;
use crate::kubeapi::pods::PodApi;
use crate::sys::clock::Clock;

/// How many events may wait; beyond that the newest are dropped.
const MAX_QUEUED: usize = 1024;

/// How long an agent that stops waits until what was said is posted.
const FLUSH: Duration = Duration::from_secs(1);

/// Normal or warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// All is well.
    Normal,
    /// Somebody should look.
    Warning,
}

/// How many pods may have annotations that no event has taken yet.
const NOTES: usize = 64;

/// Annotations of events to come, by the pod's uid and the event's reason.
type Notes = HashMap<(String, String), BTreeMap<String, String>>;

#[derive(Debug)]
struct Emitted {
    /// When it was said, which the event tells however late it is posted.
    at: Timestamp,
    /// The same by the clock of timers.
    came: Instant,
    about: ObjectReference,
    kind: Kind,
    reason: String,
    message: String,
    annotations: Option<BTreeMap<String, String>>,
}

impl Emitted {
    /// Identifies the object: its namespace, kind, name and uid.
    fn object(&self) -> String {
        let about = &self.about;
        let parts = [&about.namespace, &about.kind, &about.name, &about.uid];
        parts
            .map(|part| part.as_deref().unwrap_or_default())
            .join("/")
    }
}

/// Counts events that are dropped. The first one is logged, and the number of further ones after pauses that grow.
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

/// Where events are handed in; clones share it.
#[derive(Clone)]
pub struct Events {
    queue: mpsc::Sender<Emitted>,
    flushes: mpsc::Sender<oneshot::Sender<()>>,
    clock: Clock,
    notes: Arc<Mutex<Notes>>,
    dropped: Dropped,
}

impl Events {
    /// Starts posting as component `kubelet` on `node`.
    /// `pace` is how many are posted a second (0: any number), and how many at once. Normal events wait for a lull in the
    /// starts, some seconds at most: on a small node, posting those of a pod takes the processors a tenth of its start.
    #[must_use]
    pub fn start(
        api: Arc<dyn PodApi>,
        node: &str,
        clock: Clock,
        pace: (f64, f64),
        lull: Lull,
    ) -> Events {
        Events::over(Arc::new(ApiSink(api)), node, clock, pace, lull)
    }

    fn over(
        sink: Arc<dyn EventSink>,
        node: &str,
        clock: Clock,
        pace: (f64, f64),
        lull: Lull,
    ) -> Events {
        let (queue, emitted) = mpsc::channel(MAX_QUEUED / 2);
        let (flushes, flush) = mpsc::channel(1);
        let dropped = Dropped::new(clock);
        let poster = Poster::new(node, clock, pace, dropped.clone());
        tokio::spawn(poster::run(sink, poster, emitted, flush, lull));
        Events {
            queue,
            flushes,
            clock,
            notes: Arc::default(),
            dropped,
        }
    }

    /// Events that nobody posts, and the messages that have come since the last call.
    #[cfg(test)]
    pub(super) fn heard() -> (Events, impl FnMut() -> Vec<String>) {
        let (queue, mut said) = mpsc::channel(MAX_QUEUED);
        let events = Events {
            queue,
            flushes: mpsc::channel(1).0,
            clock: Clock::system(),
            notes: Arc::default(),
            dropped: Dropped::new(Clock::system()),
        };
        let heard = move || {
            let next = || said.try_recv().ok().map(|said| said.message);
            std::iter::from_fn(next).collect()
        };
        (events, heard)
    }

    fn say(&self, about: ObjectReference, kind: Kind, reason: &str, message: impl Into<String>) {
        let (reason, message) = (reason.to_owned(), message.into());
        tracing::debug!(object = about.name, reason, message, "event");
        let key = (about.uid.clone().unwrap_or_default(), reason.clone());
        let annotations = self.notes().remove(&key);
        let sent = self.queue.try_send(Emitted {
            at: self.clock.now(),
            came: Instant::now(),
            about,
            kind,
            reason,
            message,
            annotations,
        });
        if sent.is_err() {
            self.dropped.count("too many wait for the apiserver");
        }
    }

    /// Posts what waits, as far as the API takes it in a second.
    pub async fn flush(&self) {
        let (done, posted) = oneshot::channel();
        let flush = async {
            // Where nobody posts there is nothing to wait for.
            if self.flushes.send(done).await.is_ok() {
                let _ = posted.await;
            }
        };
        if tokio::time::timeout(FLUSH, flush).await.is_err() {
            tracing::warn!("the last events could not be posted in time");
        }
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        lock(&self.notes)
    }

    /// The next event of a reason about a pod has these annotations; none takes back what was said before.
    pub fn annotate(&self, uid: &str, reason: &str, annotations: BTreeMap<String, String>) {
        let key = (uid.to_owned(), reason.to_owned());
        let mut notes = self.notes();
        if annotations.is_empty() {
            notes.remove(&key);
        } else if notes.len() < NOTES {
            notes.insert(key, annotations);
        }
    }

    /// About a pod; `container` is a field path such as `spec.containers{web}`.
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
        self.say(about, kind, reason, message);
    }

    /// About the claim of a volume that grows.
    pub fn claim(&self, of: &Grown, kind: Kind, reason: &str, message: impl Into<String>) {
        let about = ObjectReference {
            namespace: Some(of.namespace.clone()),
            // `kubectl describe` finds events by it.
            uid: of.uid.clone(),
            ..object("PersistentVolumeClaim", &of.claim)
        };
        self.say(about, kind, reason, message);
    }

    /// About a persistent volume.
    pub fn persistent_volume(
        &self,
        name: &str,
        kind: Kind,
        reason: &str,
        message: impl Into<String>,
    ) {
        self.say(object("PersistentVolume", name), kind, reason, message);
    }

    /// About the node.
    pub fn node(&self, name: &str, kind: Kind, reason: &str, message: impl Into<String>) {
        self.say(object("Node", name), kind, reason, message);
    }
}

/// An object of the core group, which has no namespace until it is given one.
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
