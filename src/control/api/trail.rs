//! Records the requests that change objects, and the events about them, for `holdfast trace`.
//!
//! Events and leases have no trail of their own: they change too often. An event is a step of its object's trail instead, so
//! decisions of controllers, scheduler and agents have the exact time of their arrival.

use std::sync::{Arc, Mutex};

use jiff::Timestamp;
use serde::Deserialize;

use holdfast_core::lock::lock;
use holdfast_core::trail::{Entry, Trails};

use super::error::ApiError;
use super::resources::{RESOURCES, Resource, Sub};
use super::route::Target;
use super::{Answer, Reply, Request, authorize};
use crate::store::Bytes;

/// The path below which the trails are served, to users who may get it: by default administrators only.
const PATH: &str = "/debug/trail/";

/// The trails of all objects. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Recorder(Arc<Mutex<Trails>>);

/// A request whose result will be recorded.
pub(super) struct Pending {
    resource: &'static Resource,
    namespace: Option<String>,
    name: Option<String>,
    request: String,
    user: String,
    client: String,
}

/// What the recorder reads of an event.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Event {
    message: Option<String>,
    reason: Option<String>,
    involved_object: Involved,
    source: Option<Source>,
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

#[derive(Default, Deserialize)]
#[serde(default)]
struct Source {
    component: String,
}

/// The key of an object's trail.
fn key(group: &str, plural: &str, namespace: &str, name: &str) -> String {
    let group = if group.is_empty() { "core" } else { group };
    format!("{group}/{plural}/{namespace}/{name}")
}

impl Pending {
    /// Notes a request before it is handled; `None` if it changes no object.
    pub(super) fn of(request: &Request, target: &Target) -> Option<Pending> {
        if matches!(request.method.as_str(), "GET" | "HEAD") {
            return None;
        }
        let Target::Objects {
            resource,
            namespace,
            name,
            sub,
        } = target
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
            namespace: namespace.clone(),
            name: name.clone(),
            request: match sub {
                Some(sub) => format!("{verb} {}", sub.name()),
                None => verb.to_owned(),
            },
            user: request.user.name.clone(),
            client: request.client.clone(),
        })
    }
}

impl Recorder {
    /// Records a request with its result.
    pub(super) fn finish(&self, pending: Pending, result: &Result<Reply, ApiError>) {
        let now = Timestamp::now();
        let (code, refusal, stored) = match result {
            Ok(Reply {
                answer: Answer::Body { code, body, .. },
                stored,
            }) => {
                if pending.resource.plural == "events" {
                    return self.event(body, now);
                }
                (*code, "", stored.as_ref())
            }
            // A watch changes nothing.
            Ok(_) => return,
            Err(error) => (error.code, error.message.as_str(), None),
        };
        let Some(name) = pending.name.or_else(|| stored.map(|s| s.name.clone())) else {
            return;
        };
        let namespace = pending.namespace.unwrap_or_default();
        let Resource { group, plural, .. } = pending.resource;
        let key = key(group, plural, &namespace, &name);
        let mut trails = lock(&self.0);
        // Requests that are not permitted must not displace the trails of other objects.
        if result.is_err() && trails.get(&key).is_none() {
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
                code,
                refusal: refusal.to_owned(),
                uid: stored.map(|s| s.uid.clone()).unwrap_or_default(),
                revision: stored.map(|s| s.revision.to_string()).unwrap_or_default(),
            },
        );
    }

    /// Records a stored event in the trail of its object.
    fn event(&self, body: &[u8], now: Timestamp) {
        // An event without an object is in no trail, and the answer to a deletion is not an event.
        let Ok(event) = serde_json::from_slice::<Event>(body) else {
            return;
        };
        let object = event.involved_object;
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
        let reason = event.reason.unwrap_or_default();
        let message = event.message.unwrap_or_default();
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
