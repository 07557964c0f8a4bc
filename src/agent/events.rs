//! Events about pods and the node: posted in the background, repeated ones counted instead of repeated.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use serde_json::json;
use tokio::sync::mpsc;

use crate::core::bucket::Bucket;
use crate::core::correlate::{self, Correlator};
use crate::core::lock::lock;
use crate::core::time::seconds;
use crate::core::volume::claims::Grown;
use crate::kubeapi::pods::{ApiFailure, PodApi};
use crate::sys::clock::Clock;

/// How many events may wait; beyond that the newest are dropped, as they hold nothing up.
const QUEUE: usize = 1024;

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

struct Said {
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
    notes: Arc<Mutex<Notes>>,
}

impl Events {
    /// Starts posting as component `kubelet` on `node`.
    /// `pace` is how many are posted a second (0: any number), and how many at once.
    #[must_use]
    pub fn start(api: Arc<dyn PodApi>, node: &str, clock: Clock, pace: (f64, f64)) -> Events {
        let (queue, said) = mpsc::channel(QUEUE);
        tokio::spawn(post(api, node.to_owned(), clock, said, pace));
        Events {
            queue,
            notes: Arc::default(),
        }
    }

    /// Events that nobody posts, and the messages that have come since the last call.
    #[cfg(test)]
    pub(super) fn heard() -> (Events, impl FnMut() -> Vec<String>) {
        let (queue, mut said) = mpsc::channel(QUEUE);
        let events = Events {
            queue,
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
            about,
            kind,
            reason,
            message,
            annotations,
        }) {
            tracing::warn!(%error, "an event was dropped: too many are waiting for the API");
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

async fn post(
    api: Arc<dyn PodApi>,
    node: String,
    clock: Clock,
    mut said: mpsc::Receiver<Said>,
    (rate, burst): (f64, f64),
) {
    let mut correlator = Correlator::default();
    let mut pace = Bucket::new(rate, burst, clock.now());
    while let Some(said) = said.recv().await {
        let namespace = said
            .about
            .namespace
            .clone()
            .unwrap_or_else(|| "default".into());
        let about = format!(
            "{namespace}/{:?}/{:?}/{:?}",
            said.about.uid, said.about.name, said.about.field_path
        );
        let reason = format!("{:?} {}", said.kind, said.reason);
        let now = clock.now();
        let Some(verdict) = correlator.decide(
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
            continue;
        };
        while let Err(wait) = pace.take(clock.now()) {
            tokio::time::sleep(wait).await;
        }
        let stamp = seconds(now);
        let name = |posted: Timestamp| {
            let about = said.about.name.as_deref().unwrap_or_default();
            format!("{about}.{:x}", posted.as_nanosecond())
        };
        if let Some((posted, count)) = verdict.counted {
            let name = name(posted);
            let patch = json!({"count": count, "lastTimestamp": stamp, "message": shortened(&verdict.message)});
            match api.count_event(&namespace, &name, &patch).await {
                Err(ApiFailure::NotFound(_)) => correlator.forget(verdict.key),
                Err(error) => tracing::debug!(%error, "an event could not be counted"),
                Ok(()) => {}
            }
            continue;
        }
        let event = Event {
            metadata: ObjectMeta {
                name: Some(name(now)),
                namespace: Some(namespace),
                annotations: said.annotations,
                ..ObjectMeta::default()
            },
            involved_object: said.about,
            reason: Some(said.reason),
            message: Some(shortened(&verdict.message)),
            type_: Some(format!("{:?}", said.kind)),
            source: Some(EventSource {
                component: Some("kubelet".into()),
                host: Some(node.clone()),
            }),
            reporting_component: Some("kubelet".into()),
            reporting_instance: Some(node.clone()),
            first_timestamp: Some(stamp.clone()),
            last_timestamp: Some(stamp),
            count: Some(1),
            ..Event::default()
        };
        match api.post_event(&event).await {
            Ok(()) => correlator.posted(verdict.key, now),
            Err(error) => tracing::debug!(%error, "an event could not be posted"),
        }
    }
}

/// The API's limit for messages.
fn shortened(message: &str) -> String {
    message.chars().take(1024).collect()
}
