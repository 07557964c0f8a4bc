//! Records the requests that change objects, and the events about them, for `holdfast trace`.
//!
//! Events and leases have no trail of their own: they change too often. An event is a step of its object's trail instead, so
//! decisions of controllers, scheduler and agents have the exact time of their arrival.

use std::sync::{Arc, Mutex};

use jiff::Timestamp;
use serde::Deserialize;

use holdfast_core::lock::lock;
use holdfast_core::trail::{Entry, Trails};

use super::resources::{RESOURCES, Resource, Sub};
use super::route::{self, Target};
use super::{Answer, Request, authorize};
use crate::store::Bytes;

/// The path below which the trails are served, to users who may get it: by default administrators only.
const PATH: &str = "/debug/trail/";

/// The trails of all objects. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Recorder(Arc<Mutex<Trails>>);

/// A request whose answer will be recorded.
pub(super) struct Pending {
    resource: &'static Resource,
    namespace: Option<String>,
    name: Option<String>,
    request: String,
    user: String,
    client: String,
}

/// What the recorder reads of an answer.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answered {
    #[serde(default)]
    kind: String,
    #[serde(default)]
    metadata: Identity,
    #[serde(default)]
    message: Option<String>,
    #[serde(default)]
    reason: Option<String>,
    #[serde(default)]
    involved_object: Option<Involved>,
    #[serde(default)]
    source: Option<Source>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Identity {
    name: String,
    uid: String,
    resource_version: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Involved {
    api_version: String,
    kind: String,
    namespace: String,
    name: String,
    uid: String,
}

#[derive(Deserialize)]
struct Source {
    #[serde(default)]
    component: String,
}

/// The key of an object's trail.
fn key(group: &str, plural: &str, namespace: &str, name: &str) -> String {
    let group = if group.is_empty() { "core" } else { group };
    format!("{group}/{plural}/{namespace}/{name}")
}

impl Recorder {
    /// Notes a request before it is handled; `None` if it changes no object.
    pub(super) fn begin(&self, request: &Request) -> Option<Pending> {
        if matches!(request.method.as_str(), "GET" | "HEAD") {
            return None;
        }
        let Ok(Target::Objects {
            resource,
            namespace,
            name,
            sub,
        }) = route::target(&request.path)
        else {
            return None;
        };
        let verb = authorize::verb(request, name.as_deref()).ok()?;
        // Streams and tokens change nothing.
        let changes = !matches!(
            sub,
            Some(Sub::Token | Sub::Exec | Sub::Attach | Sub::PortForward | Sub::Proxy)
        );
        let is_recorded = changes && resource.plural != "leases" && !request.query.has("dryRun");
        (is_recorded && verb != "deletecollection").then(|| Pending {
            resource,
            namespace,
            name,
            request: match sub {
                Some(sub) => format!("{verb} {}", sub.name()),
                None => verb.to_owned(),
            },
            user: request.user.name.clone(),
            client: request.client.clone(),
        })
    }

    /// Records a request with its answer.
    pub(super) fn finish(&self, pending: Pending, answer: &Answer) {
        let Answer::Body { code, body, .. } = answer else {
            return;
        };
        let Ok(answered) = serde_json::from_slice::<Answered>(body) else {
            return;
        };
        let now = Timestamp::now();
        if pending.resource.plural == "events" {
            return self.event(answered, now);
        }
        let is_refused = *code >= 400;
        // An answer of kind Status is about the request, not the object.
        let identity = if answered.kind == "Status" {
            Identity::default()
        } else {
            answered.metadata
        };
        let Some(name) = pending
            .name
            .or(Some(identity.name).filter(|name| !name.is_empty()))
        else {
            return;
        };
        let namespace = pending.namespace.unwrap_or_default();
        let key = key(
            pending.resource.group,
            pending.resource.plural,
            &namespace,
            &name,
        );
        let mut trails = lock(&self.0);
        // Requests that are not permitted must not displace the trails of other objects.
        if is_refused && trails.get(&key).is_none() {
            return;
        }
        trails.add(
            &key,
            Entry {
                first: now,
                last: now,
                count: 1,
                request: pending.request,
                user: pending.user,
                client: pending.client,
                code: *code,
                refusal: answered.message.filter(|_| is_refused).unwrap_or_default(),
                uid: identity.uid,
                revision: identity.resource_version,
            },
        );
    }

    /// Records an event in the trail of its object.
    fn event(&self, event: Answered, now: Timestamp) {
        let Some(object) = event.involved_object else {
            return;
        };
        let group = object
            .api_version
            .split_once('/')
            .map_or("", |(group, _)| group);
        let is_of = |r: &&Resource| {
            r.kind == object.kind && (r.group == group || object.api_version.is_empty())
        };
        let Some(resource) = RESOURCES.iter().find(is_of) else {
            return;
        };
        let (reason, message) = (
            event.reason.unwrap_or_default(),
            event.message.unwrap_or_default(),
        );
        let entry = Entry {
            first: now,
            last: now,
            count: 1,
            request: format!("{reason}: {message}"),
            user: event.source.map(|s| s.component).unwrap_or_default(),
            client: String::new(),
            code: 201,
            refusal: String::new(),
            uid: object.uid,
            revision: String::new(),
        };
        let key = key(
            resource.group,
            resource.plural,
            &object.namespace,
            &object.name,
        );
        let mut trails = lock(&self.0);
        // Clients that may create events must not displace the trails of other objects.
        if trails.get(&key).is_some() {
            trails.add(&key, entry);
        }
    }

    /// The trail at a path `/debug/trail/GROUP/PLURAL/NAMESPACE/NAME`, as JSON; the group of core kinds is `core`. `None` for other
    /// paths, and for objects without a trail.
    pub(super) fn at(&self, path: &str) -> Option<Bytes> {
        let trail = lock(&self.0).get(path.strip_prefix(PATH)?)?.clone();
        serde_json::to_vec(&trail).ok().map(Bytes::from)
    }
}
