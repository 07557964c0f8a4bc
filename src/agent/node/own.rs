//! Our own Node object: as it was last seen, and seen anew when that matters.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use tokio::sync::watch;

use super::api::{NodeApi, NodeChange, within};
use crate::agent::{Context, Kind};
use crate::core::backoff::Doubling;
use crate::kubeapi::cache::revision;

/// How long a pod's admission waits for the Node as it is now.
const FRESH: Duration = Duration::from_secs(5);
/// The pauses after a watch that was interrupted.
const PAUSES: Doubling = Doubling::new(Duration::from_millis(100), Duration::from_secs(5));

/// Our own Node object.
pub struct OwnNode {
    name: String,
    api: Option<Arc<dyn NodeApi>>,
    /// As it was last seen; it stays when the object is deleted, as pods that run still refer to it.
    seen: watch::Sender<Option<Arc<Node>>>,
    /// Whether the object has been deleted since.
    deleted: watch::Sender<bool>,
}

impl OwnNode {
    /// Nothing is known of it yet. Without an API, nothing ever will be.
    #[must_use]
    pub fn new(name: &str, api: Option<Arc<dyn NodeApi>>) -> OwnNode {
        OwnNode {
            name: name.to_owned(),
            api,
            seen: watch::channel(None).0,
            deleted: watch::channel(false).0,
        }
    }

    /// The API that it is in; none where there are only static pods.
    #[must_use]
    pub fn api(&self) -> Option<Arc<dyn NodeApi>> {
        self.api.clone()
    }

    /// As it was last seen.
    pub fn borrow(&self) -> watch::Ref<'_, Option<Arc<Node>>> {
        self.seen.borrow()
    }

    /// Tells of each version that is seen.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Option<Arc<Node>>> {
        self.seen.subscribe()
    }

    /// Asks the API for the Node as it is now. Whether it answered.
    pub async fn refresh(&self) -> bool {
        let Some(api) = &self.api else { return false };
        match within(FRESH, api.get(&self.name)).await {
            Ok(Some(node)) => {
                self.see(node);
                true
            }
            Ok(None) => false,
            Err(error) => {
                tracing::debug!(%error, "the Node object cannot be read; what is known of it counts");
                false
            }
        }
    }

    /// A version has been seen. One older than what is known changes nothing: answers and watch may overtake each other.
    pub fn see(&self, mut node: Node) {
        node.metadata.managed_fields = None;
        let node = Arc::new(node);
        self.seen.send_if_modified(|known| {
            let is_newer = known.as_ref().is_none_or(|known| {
                known.uid() != node.uid() || revision(&**known) < revision(&*node)
            });
            if is_newer {
                *known = Some(Arc::clone(&node));
            }
            is_newer
        });
        self.set_deleted(false);
    }

    /// The object is not there any more.
    pub(super) fn lose(&self) {
        if self.seen.borrow().is_some() {
            self.set_deleted(true);
        }
    }

    fn set_deleted(&self, now: bool) {
        let changed = self.deleted.send_if_modified(|deleted| {
            let changed = *deleted != now;
            *deleted = now;
            changed
        });
        match (changed, now) {
            (true, true) => tracing::error!(
                node = self.name,
                "the Node object was deleted: no pods are sent here any more, and those that run will be removed; start the agent anew to register the node again"
            ),
            (true, false) => tracing::info!(node = self.name, "the Node object is back"),
            (false, _) => {}
        }
    }

    /// Waits until the object is there.
    pub async fn present(&self) -> Arc<Node> {
        let (mut seen, mut deleted) = (self.seen.subscribe(), self.deleted.subscribe());
        loop {
            // The senders are our own: neither wait can fail.
            let _ = deleted.wait_for(|deleted| !*deleted).await;
            if let Ok(node) = seen.wait_for(Option::is_some).await
                && let Some(node) = node.clone()
                && !*self.deleted.borrow()
            {
                return node;
            }
        }
    }
}

/// Watches the Node from its registration on: its labels decide which pods are admitted, its pod CIDR is the runtime's.
pub(super) async fn follow(context: &Context) {
    let Some(api) = context.node.api() else {
        return std::future::pending().await;
    };
    let mut schedulable = !is_cordoned(&*context.node.present().await);
    let mut changes = api.watch(&context.config.node_name);
    let mut pauses = PAUSES;
    while let Some(change) = changes.next().await {
        match change {
            NodeChange::Present(node) => {
                if schedulable == is_cordoned(&node) {
                    schedulable = !schedulable;
                    tell_schedulable(context, schedulable);
                }
                context.node.see(*node);
            }
            NodeChange::Absent => context.node.lose(),
            NodeChange::Interrupted(why) => {
                tracing::debug!(why, "the watch of the Node was interrupted, it goes on");
                tokio::time::sleep(pauses.pause()).await;
                continue;
            }
        }
        pauses.reset();
    }
}

fn is_cordoned(node: &Node) -> bool {
    let spec = node.spec.as_ref();
    spec.and_then(|s| s.unschedulable) == Some(true)
}

fn tell_schedulable(context: &Context, schedulable: bool) {
    let name = &context.config.node_name;
    let reason = if schedulable {
        "NodeSchedulable"
    } else {
        "NodeNotSchedulable"
    };
    let message = format!("Node {name} status is now: {reason}");
    context.events.node(name, Kind::Normal, reason, message);
}
