//! Events about pods and the node: posted in the background, repeated ones counted instead of repeated.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use serde_json::json;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::pod::starts::Lull;
use crate::core::bucket::Bucket;
use crate::core::correlate::{self, Correlator};
use crate::core::lock::lock;
use crate::core::time::seconds;
use crate::core::volume::claims::Grown;
use crate::kubeapi::pods::{ApiFailure, PodApi};
use crate::sys::clock::Clock;

/// How many events may wait; beyond that the newest are dropped, as they hold nothing up.
const QUEUE: usize = 1024;

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
struct Said {
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

/// Where events are handed in; clones share it.
#[derive(Clone)]
pub struct Events {
    queue: mpsc::Sender<Said>,
    flushes: mpsc::Sender<oneshot::Sender<()>>,
    clock: Clock,
    notes: Arc<Mutex<Notes>>,
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
        (rate, burst): (f64, f64),
        lull: Lull,
    ) -> Events {
        let (queue, said) = mpsc::channel(QUEUE / 2);
        let (flushes, flush) = mpsc::channel(1);
        let poster = Poster {
            api,
            node: node.to_owned(),
            clock,
            correlator: Correlator::default(),
            pace: Bucket::new(rate, burst, clock.now()),
        };
        tokio::spawn(post(poster, said, flush, lull));
        Events {
            queue,
            flushes,
            clock,
            notes: Arc::default(),
        }
    }

    /// Events that nobody posts, and the messages that have come since the last call.
    #[cfg(test)]
    pub(super) fn heard() -> (Events, impl FnMut() -> Vec<String>) {
        let (queue, mut said) = mpsc::channel(QUEUE);
        let events = Events {
            queue,
            flushes: mpsc::channel(1).0,
            clock: Clock::system(),
            notes: Arc::default(),
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
        if let Err(error) = self.queue.try_send(Said {
            at: self.clock.now(),
            came: Instant::now(),
            about,
            kind,
            reason,
            message,
            annotations,
        }) {
            tracing::warn!(%error, "an event was dropped: too many are waiting for the API");
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

/// What has been said and not posted, each kind in its order.
#[derive(Debug, Default)]
struct Waiting {
    warnings: VecDeque<Said>,
    normal: VecDeque<Said>,
}

impl Waiting {
    fn add(&mut self, said: Said) {
        match said.kind {
            Kind::Warning => self.warnings.push_back(said),
            Kind::Normal => self.normal.push_back(said),
        }
    }

    fn len(&self) -> usize {
        self.warnings.len() + self.normal.len()
    }

    fn take(&mut self) -> Option<Said> {
        let warning = self.warnings.pop_front();
        warning.or_else(|| self.normal.pop_front())
    }

    /// Takes the next one when its time has come. Cancel-safe.
    async fn next(&mut self, lull: &mut Lull) -> Option<Said> {
        if self.warnings.is_empty() {
            lull.wait(self.normal.front()?.came).await;
        }
        self.take()
    }
}

async fn post(
    mut poster: Poster,
    mut said: mpsc::Receiver<Said>,
    mut flushes: mpsc::Receiver<oneshot::Sender<()>>,
    mut lull: Lull,
) {
    let mut waiting = Waiting::default();
    loop {
        tokio::select! {
            // What comes first is seen first: a warning overtakes what waits.
            biased;
            Some(said) = said.recv(), if waiting.len() < QUEUE / 2 => waiting.add(said),
            Some(done) = flushes.recv() => {
                while let Some(next) = waiting.take().or_else(|| said.try_recv().ok()) {
                    poster.post(next).await;
                }
                // Who asked may have gone.
                let _ = done.send(());
            }
            Some(next) = waiting.next(&mut lull) => poster.post(next).await,
            else => return,
        }
    }
}

/// Posts events, one after the other.
struct Poster {
    api: Arc<dyn PodApi>,
    node: String,
    clock: Clock,
    correlator: Correlator,
    pace: Bucket,
}

impl Poster {
    async fn post(&mut self, said: Said) {
        let namespace = said.about.namespace.as_deref().unwrap_or("default");
        let about = format!(
            "{namespace}/{:?}/{:?}/{:?}",
            said.about.uid, said.about.name, said.about.field_path
        );
        let reason = format!("{:?} {}", said.kind, said.reason);
        let now = self.clock.now();
        let Some(verdict) = self.correlator.decide(
            correlate::Said {
                about: &about,
                reason: &reason,
                message: &said.message,
            },
            now,
        ) else {
            tracing::debug!(
                about,
                reason,
                "an event is not posted: there were too many about this object"
            );
            return;
        };
        while let Err(wait) = self.pace.take(self.clock.now()) {
            tokio::time::sleep(wait).await;
        }
        let name = |posted: Timestamp| {
            let about = said.about.name.as_deref().unwrap_or_default();
            format!("{about}.{:x}", posted.as_nanosecond())
        };
        if let Some((posted, count)) = verdict.counted {
            let (name, stamp) = (name(posted), seconds(said.at));
            let patch = json!({"count": count, "lastTimestamp": stamp, "message": shortened(&verdict.message)});
            match self.api.count_event(namespace, &name, &patch).await {
                Err(ApiFailure::NotFound(_)) => self.correlator.forget(verdict.key),
                Err(error) => tracing::debug!(%error, "an event could not be counted"),
                Ok(()) => {}
            }
            return;
        }
        let metadata = ObjectMeta {
            name: Some(name(now)),
            namespace: Some(namespace.to_owned()),
            annotations: said.annotations.clone(),
            ..ObjectMeta::default()
        };
        let event = self.event(metadata, said, shortened(&verdict.message));
        match self.api.post_event(&event).await {
            Ok(()) => self.correlator.posted(verdict.key, now),
            Err(error) => tracing::debug!(%error, "an event could not be posted"),
        }
    }

    fn event(&self, metadata: ObjectMeta, said: Said, message: String) -> Event {
        let stamp = seconds(said.at);
        Event {
            metadata,
            involved_object: said.about,
            reason: Some(said.reason),
            message: Some(message),
            type_: Some(format!("{:?}", said.kind)),
            source: Some(EventSource {
                component: Some("kubelet".into()),
                host: Some(self.node.clone()),
            }),
            reporting_component: Some("kubelet".into()),
            reporting_instance: Some(self.node.clone()),
            first_timestamp: Some(stamp.clone()),
            last_timestamp: Some(stamp),
            count: Some(1),
            ..Event::default()
        }
    }
}

/// The API's limit for messages.
fn shortened(message: &str) -> String {
    message.chars().take(1024).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::Starts;

    fn said(kind: Kind, reason: &str) -> Said {
        Said {
            at: Timestamp::UNIX_EPOCH,
            came: Instant::now(),
            about: object("Pod", "p"),
            kind,
            reason: reason.into(),
            message: String::new(),
            annotations: None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_normal_event_waits_for_a_lull_and_a_warning_overtakes_it() {
        let starts = Starts::for_processors(1);
        let (mut lull, begun) = (starts.lull(), Instant::now());
        let mut waiting = Waiting::default();
        assert!(waiting.next(&mut lull).await.is_none());
        waiting.add(said(Kind::Normal, "Pulled"));
        waiting.add(said(Kind::Normal, "Created"));
        waiting.add(said(Kind::Warning, "Failed"));
        let posted = async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            let mut posted = vec![];
            while let Some(next) = waiting.next(&mut lull).await {
                posted.push((next.reason, begun.elapsed().as_millis() / 100));
            }
            posted
        };
        let start = starts.container(tokio::time::sleep(Duration::from_millis(300)));
        let (posted, ()) = tokio::join!(posted, start);
        let expected = [("Failed", 0), ("Pulled", 3), ("Created", 3)];
        assert_eq!(posted, expected.map(|(reason, at)| (reason.to_owned(), at)));
    }
}
