//! Events about pods and the node: posted in the background, repeated ones counted instead of repeated.

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use serde_json::json;
use tokio::sync::mpsc;

use crate::core::time::seconds;
use crate::kubeapi::pods::{ApiFailure, PodApi};
use crate::sys::clock::Clock;

/// How many events may wait; beyond that the newest are dropped, as they hold nothing up.
const QUEUE: usize = 1024;
/// How many are remembered for counting.
const REMEMBERED: usize = 512;

/// Normal or warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// All is well.
    Normal,
    /// Somebody should look.
    Warning,
}

struct Said {
    about: ObjectReference,
    kind: Kind,
    reason: String,
    message: String,
}

/// Where events are handed in; clones share it.
#[derive(Clone)]
pub struct Events {
    queue: mpsc::Sender<Said>,
}

impl Events {
    /// Starts posting as component `kubelet` on `node`.
    #[must_use]
    pub fn start(api: Arc<dyn PodApi>, node: &str, clock: Clock) -> Events {
        let (queue, said) = mpsc::channel(QUEUE);
        tokio::spawn(post(api, node.to_owned(), clock, said));
        Events { queue }
    }

    fn say(&self, about: ObjectReference, kind: Kind, reason: String, message: String) {
        tracing::debug!(object = about.name, reason, message, "event");
        if let Err(error) = self.queue.try_send(Said { about, kind, reason, message }) {
            tracing::warn!(%error, "an event was dropped: too many are waiting for the API");
        }
    }

    /// About a pod; `container` is a field path such as `spec.containers{web}`.
    pub fn pod(&self, pod: &Pod, container: Option<String>, kind: Kind, reason: &str, message: impl Into<String>) {
        let about = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            name: Some(pod.name_any()),
            namespace: pod.namespace(),
            uid: pod.uid(),
            resource_version: pod.resource_version(),
            field_path: container,
        };
        self.say(about, kind, reason.to_owned(), message.into());
    }

    /// About the node.
    pub fn node(&self, name: &str, kind: Kind, reason: &str, message: impl Into<String>) {
        let about =
            ObjectReference { api_version: Some("v1".into()), kind: Some("Node".into()), name: Some(name.into()), ..ObjectReference::default() };
        self.say(about, kind, reason.to_owned(), message.into());
    }
}

async fn post(api: Arc<dyn PodApi>, node: String, clock: Clock, mut said: mpsc::Receiver<Said>) {
    let mut known: HashMap<String, (String, i32)> = HashMap::new();
    while let Some(said) = said.recv().await {
        let namespace = said.about.namespace.clone().unwrap_or_else(|| "default".into());
        let key = format!("{:?}{:?}{:?}{}{}", said.about.uid, said.about.name, said.about.field_path, said.reason, said.message);
        let now = clock.now();
        let stamp = seconds(now);
        if let Some((name, count)) = known.get_mut(&key) {
            *count += 1;
            let patch = json!({"count": *count, "lastTimestamp": stamp});
            match api.count_event(&namespace, name, &patch).await {
                Err(ApiFailure::NotFound(_)) => _ = known.remove(&key),
                Err(error) => tracing::debug!(%error, "an event could not be counted"),
                Ok(()) => {}
            }
            continue;
        }
        let name = format!("{}.{:x}", said.about.name.clone().unwrap_or_default(), now.as_nanosecond());
        let event = Event {
            metadata: ObjectMeta { name: Some(name.clone()), namespace: Some(namespace), ..ObjectMeta::default() },
            involved_object: said.about,
            reason: Some(said.reason),
            message: Some(said.message.chars().take(1024).collect()),
            type_: Some(format!("{:?}", said.kind)),
            source: Some(EventSource { component: Some("kubelet".into()), host: Some(node.clone()) }),
            reporting_component: Some("kubelet".into()),
            reporting_instance: Some(node.clone()),
            first_timestamp: Some(stamp.clone()),
            last_timestamp: Some(stamp),
            count: Some(1),
            ..Event::default()
        };
        match api.post_event(&event).await {
            Ok(()) => {
                if known.len() >= REMEMBERED {
                    known.clear();
                }
                known.insert(key, (name, 1));
            }
            Err(error) => tracing::debug!(%error, "an event could not be posted"),
        }
    }
}
