//! This node's Node object: caches the latest version, and reads it again when needed.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Node, NodeStatus, Pod};
use kube::ResourceExt as _;
use tokio::sync::watch;

use super::api::{NodeApi, NodeChange, within};
use super::registration;
use crate::events::{Events, Kind};
use holdfast_config::Config;
use holdfast_core::backoff::Doubling;
use holdfast_core::pod;
use holdfast_kubeapi::cache::revision;
use holdfast_sealed::Keeper;

/// Timeout for reading the Node during a pod's admission.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(5);
/// Back-off after an interrupted watch.
const REFRESH_BACKOFF: Doubling = Doubling::new(Duration::from_millis(100), Duration::from_secs(5));

/// How long the Node object must be missing until the agent registers the node again, if `registerNode` is true. To
/// remove a node from the cluster, stop its agent within this time.
pub(crate) const REGISTER_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// The Node that a pod is admitted to. Only [`OwnNode::node_for_admission`] creates one, so no
/// pod of the API is admitted to an unknown node.
pub(crate) struct AdmissionNode(Arc<Node>);

impl AdmissionNode {
    /// The Node object.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.0
    }
}

/// The state of this node's Node object.
pub struct OwnNode {
    name: String,
    api: Option<Arc<dyn NodeApi>>,
    /// The object as this agent registers it; replaces an object that does not exist.
    initial: Arc<Node>,
    registers: bool,
    /// The last version. Kept after a deletion, as running pods still refer to it.
    seen: watch::Sender<Option<Arc<Node>>>,
    /// Whether the object was deleted and not recreated.
    deleted: watch::Sender<bool>,
    /// Whether the object, or its absence, is known.
    known: watch::Sender<bool>,
}

impl OwnNode {
    /// Creates an unknown Node. Without an API, the Node consists of the configuration alone.
    #[must_use]
    pub fn new(config: &Config, api: Option<Arc<dyn NodeApi>>) -> OwnNode {
        let initial = registration::new_node(config, NodeStatus::default());
        OwnNode {
            name: config.node_name.clone(),
            known: watch::channel(api.is_none()).0,
            api,
            initial: Arc::new(initial),
            registers: config.register_node,
            seen: watch::channel(None).0,
            deleted: watch::channel(false).0,
        }
    }

    /// The Node for a pod's admission; `None` while the Node is unknown and the pod has to wait. Static pods never
    /// wait, as the API may never answer. An unknown or missing Node is replaced by the one that this agent registers
    /// (upstream's `getNodeAnyWay`, and the wait in `NewSourceApiserver`).
    #[must_use]
    pub(crate) fn node_for_admission(&self, pod: &Pod) -> Option<AdmissionNode> {
        let seen = self.seen.borrow().clone();
        let stand_in = pod::is_static(pod) || *self.known.borrow();
        let node = seen.or_else(|| stand_in.then(|| Arc::clone(&self.initial)));
        node.map(AdmissionNode)
    }

    /// Waits until the object, or its absence, is known.
    pub(crate) async fn wait_until_known(&self) {
        // This object owns the sender, so the wait cannot fail.
        let _ = self.known.subscribe().wait_for(|known| *known).await;
    }

    /// Uses the stored Node for admission, because no apiserver answers and the earlier pods are started.
    pub(crate) fn assume(&self, kept: Option<Node>) {
        if let Some(kept) = kept {
            self.seen.send_if_modified(|known| {
                let is_unknown = known.is_none();
                if is_unknown {
                    *known = Some(Arc::new(kept));
                }
                is_unknown
            });
        }
        self.known.send_replace(true);
    }

    /// The API of the object; `None` if there are only static pods.
    #[must_use]
    pub fn api(&self) -> Option<Arc<dyn NodeApi>> {
        self.api.clone()
    }

    /// The last version.
    pub fn borrow(&self) -> watch::Ref<'_, Option<Arc<Node>>> {
        self.seen.borrow()
    }

    /// Watches the versions of the Node.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Option<Arc<Node>>> {
        self.seen.subscribe()
    }

    /// Reads the Node from the API. Returns whether this succeeded.
    pub async fn refresh(&self) -> bool {
        let Some(api) = &self.api else { return false };
        match within(REFRESH_TIMEOUT, api.get(&self.name)).await {
            Ok(Some(node)) => {
                self.observe(node);
                true
            }
            Ok(None) => {
                self.known.send_replace(true);
                false
            }
            Err(error) => {
                tracing::debug!(%error, "cannot read the Node object; using the cached one");
                false
            }
        }
    }

    /// Applies a version from an answer or from the watch. Ignores versions older than
    /// the known one, as both may overtake each other.
    pub fn observe(&self, mut node: Node) {
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
        self.known.send_replace(true);
        self.set_deleted(false);
    }

    /// Records that the object does not exist.
    pub(super) fn mark_absent(&self) {
        self.known.send_replace(true);
        if self.seen.borrow().is_some() {
            self.set_deleted(true);
        }
    }

    /// Whether the object was deleted and not recreated.
    #[must_use]
    pub fn is_deleted(&self) -> bool {
        *self.deleted.borrow()
    }

    fn set_deleted(&self, now: bool) {
        let changed = self.deleted.send_if_modified(|deleted| {
            let changed = *deleted != now;
            *deleted = now;
            changed
        });
        match (changed, now) {
            (true, true) => {
                let remedy = match self.registers {
                    true => {
                        "the agent registers the node again when the object has been missing for a minute; to remove the node from the cluster, stop the agent first"
                    }
                    false => "create the object again, because registerNode is false",
                };
                tracing::error!(
                    node = self.name,
                    remedy,
                    "the Node object was deleted: the scheduler assigns no pods to this node, and the control plane deletes its running pods"
                );
            }
            (true, false) => tracing::info!(node = self.name, "the Node object exists again"),
            (false, _) => {}
        }
    }

    /// Waits until the object exists.
    pub(crate) async fn wait_until_present(&self) -> Arc<Node> {
        let (mut seen, mut deleted) = (self.seen.subscribe(), self.deleted.subscribe());
        loop {
            // This object owns the senders, so the waits cannot fail.
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

/// Stores the Node's fields that admission needs, for a start without an apiserver.
pub(crate) async fn store_node(node: Arc<OwnNode>, keeper: Keeper) {
    let mut seen = node.subscribe();
    loop {
        let node = seen.borrow_and_update().clone();
        if let Some(node) = node {
            keeper.put_node(&node);
        }
        // `node` owns the sender.
        if seen.changed().await.is_err() {
            return;
        }
    }
}

/// What the watch of the Node uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub events: Events,
    pub node: Arc<OwnNode>,
}

/// Watches the Node: its labels and taints determine which pods are admitted, its pod CIDR is passed to the runtime.
pub(super) async fn run(parts: &Parts) {
    let Some(api) = parts.node.api() else {
        return std::future::pending().await;
    };
    let mut schedulable = None;
    let mut changes = api.watch(&parts.config.node_name);
    let mut pauses = REFRESH_BACKOFF;
    while let Some(change) = changes.next().await {
        match change {
            NodeChange::Present(node) => {
                let now = !is_cordoned(&node);
                if schedulable.replace(now).is_some_and(|before| before != now) {
                    emit_schedulable_event(parts, now);
                }
                parts.node.observe(*node);
            }
            NodeChange::Absent => parts.node.mark_absent(),
            NodeChange::Interrupted(why) => {
                tracing::debug!(why, "the watch of the Node was interrupted; retrying");
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

fn emit_schedulable_event(parts: &Parts, schedulable: bool) {
    let name = &parts.config.node_name;
    let reason = if schedulable {
        "NodeSchedulable"
    } else {
        "NodeNotSchedulable"
    };
    let message = format!("Node {name} status is now: {reason}");
    parts.events.node(name, Kind::Normal, reason, message);
}
