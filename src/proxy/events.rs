//! Events about the Node and about Services. Errors are logged, because an event must not delay rules.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use holdfast_core::digest::fnv64;
use holdfast_core::time::seconds;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::failure::chain;

/// The component of the events.
const COMPONENT: &str = "holdfast-proxy";
/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of events whose repetitions are counted.
const MAX_REMEMBERED: usize = 256;

/// Maximum number of events that wait to be written; more are dropped.
const MAX_PENDING: usize = 32;

/// The object that an event is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum About {
    /// The Node with this name.
    Node(String),
    /// A Service: its namespace and name.
    Service(String, String),
}

/// A warning.
#[derive(Debug, Clone)]
pub(crate) struct Emitted {
    pub(crate) about: About,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    /// When it happened.
    pub(crate) at: Timestamp,
}

/// A request to the API.
#[derive(Debug, PartialEq)]
enum Write {
    /// Create this event.
    Create(Value),
    /// Merge this into the event with this name.
    Count(String, Value),
}

/// Emits events. A task writes them, so that callers never wait for the apiserver.
pub(crate) struct Events(mpsc::Sender<Emitted>);

impl Events {
    /// Emits events of the node `node` through `client`; `started` is when this process began.
    pub(crate) fn start(client: kube::Client, node: &str, started: Timestamp) -> Events {
        let (sender, receiver) = mpsc::channel(MAX_PENDING);
        tokio::spawn(post(
            client,
            node.to_owned(),
            started.as_millisecond(),
            receiver,
        ));
        Events(sender)
    }

    /// Emits a warning.
    pub(crate) fn warn(&self, event: Emitted) {
        if let Err(error) = self.0.try_send(event) {
            tracing::debug!(%error, "an event was dropped");
        }
    }
}

/// Writes events and counts their repetitions: the proxy may not read events. `run` distinguishes the events of this process
/// from those of earlier ones.
async fn post(client: kube::Client, node: String, run: i64, mut receiver: mpsc::Receiver<Emitted>) {
    let mut emitted = BTreeMap::new();
    while let Some(event) = receiver.recv().await {
        let (namespace, write) = write(&mut emitted, &event, (&node, run));
        let api: Api<Event> = Api::namespaced(client.clone(), &namespace);
        let sent = async {
            match write {
                Write::Create(event) => {
                    let event = serde_json::from_value(event).map_err(kube::Error::SerdeError)?;
                    api.create(&PostParams::default(), &event).await
                }
                Write::Count(name, fields) => {
                    let patch = Patch::Merge(fields);
                    api.patch(&name, &PatchParams::default(), &patch).await
                }
            }
        };
        let reason = event.reason;
        match tokio::time::timeout(TIMEOUT, sent).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                tracing::debug!(error = chain(&error), reason, "writing an event failed");
            }
            Err(_) => tracing::debug!(reason, "writing an event timed out"),
        }
    }
}

/// The request for an event, and its namespace.
fn write(
    emitted: &mut BTreeMap<String, i32>,
    event: &Emitted,
    (node, run): (&str, i64),
) -> (String, Write) {
    let Emitted {
        about,
        reason,
        message,
        at,
    } = event;
    let (involved, namespace, name) = match about {
        // A kubelet's events have the Node's name as its uid, too (`nodeRef` in `cmd/kube-proxy/app/server.go`).
        About::Node(name) => (
            json!({"kind": "Node", "apiVersion": "v1", "name": name, "uid": name}),
            "default",
            name.as_str(),
        ),
        About::Service(namespace, name) => (
            json!({"kind": "Service", "apiVersion": "v1", "namespace": namespace, "name": name}),
            namespace.as_str(),
            name.as_str(),
        ),
    };
    let same = fnv64(
        [name, *reason, message.as_str(), &run.to_string()]
            .join("\n")
            .bytes(),
    );
    let name = format!("{name}.{same:016x}");
    let now = seconds(*at);
    if let Some(count) = emitted.get_mut(&name) {
        *count = count.saturating_add(1);
        let fields = json!({"count": *count, "lastTimestamp": now});
        return (namespace.to_owned(), Write::Count(name, fields));
    }
    if emitted.len() >= MAX_REMEMBERED {
        emitted.clear();
    }
    emitted.insert(name.clone(), 1);
    let event = json!({
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": namespace}, "involvedObject": involved,
        "reason": reason, "message": message, "type": "Warning", "count": 1, "firstTimestamp": now, "lastTimestamp": now,
        "source": {"component": COMPONENT, "host": node}, "reportingComponent": COMPONENT, "reportingInstance": node,
    });
    (namespace.to_owned(), Write::Create(event))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_event_is_counted() {
        let mut emitted = BTreeMap::new();
        let at = |second| Timestamp::from_second(second).expect("a time");
        let mut emit = |message: &str, second| {
            let event = Emitted {
                about: About::Node("n1".into()),
                reason: "RulesRepaired",
                message: message.into(),
                at: at(second),
            };
            write(&mut emitted, &event, ("n1", 7))
        };
        let (namespace, Write::Create(first)) = emit("table", 1) else {
            panic!("the first one is created");
        };
        assert_eq!(namespace, "default");
        let name = first["metadata"]["name"].as_str().expect("a name");
        assert!(name.starts_with("n1."), "{name}");
        assert!(serde_json::from_value::<Event>(first.clone()).is_ok());
        for count in 2..4 {
            let fields = json!({"count": count, "lastTimestamp": seconds(at(2))});
            let expected = ("default".to_owned(), Write::Count(name.to_owned(), fields));
            assert_eq!(emit("table", 2), expected);
        }
        assert!(matches!(emit("set", 3), (_, Write::Create(_))));
        for n in 0..1000 {
            emit(&n.to_string(), 4);
        }
        assert!(emitted.len() <= MAX_REMEMBERED);
    }
}
