//! The simulated API as the node uses it. After an agent's start its first answer is delayed, and the
//! Node may be deleted.

use futures::stream::{BoxStream, StreamExt as _};
use holdfast_agent::{NodeApi, NodeChange};
use holdfast_core::volume::csi::Drivers;
use k8s_openapi::api::coordination::v1::Lease;

use super::*;

impl State {
    /// An agent starts. The Node is not known to it until the API answers.
    pub(super) fn forget_node(&mut self) {
        let delays = [0, 200, 2_000, 15_000];
        let delay = match self.faults {
            true => delays[usize::try_from(self.draw(4)).unwrap()],
            false => 0,
        };
        self.node.answers_at = Some(Instant::now() + Duration::from_millis(delay));
        self.node.answered = false;
    }

    /// Rule: the agent starts no pod of the API before it knows the Node.
    pub(super) fn node_is_known(&mut self, uid: &str) {
        if !self.node.answered {
            self.report_violation(format!("{uid}: started before the Node was known"));
        }
    }
}

impl World {
    /// Waits until the API answers requests about the Node.
    async fn answers(&self) {
        let at = self.state().node.answers_at;
        if let Some(at) = at.filter(|at| *at > Instant::now()) {
            tokio::time::sleep_until(at).await;
        }
        while self.state().frozen {
            self.sleep(Duration::from_secs(1)).await;
        }
        self.hang_if_killed().await;
    }

    fn own_node(&self) -> Result<Node, ApiFailure> {
        let found = self.state().node.feed.borrow().clone();
        found.ok_or_else(|| ApiFailure::NotFound("nodes \"node\" not found".into()))
    }

    fn change_own_node(&self, change: impl FnOnce(&mut Value)) -> Result<Node, ApiFailure> {
        self.own_node()?;
        let mut state = self.state();
        state.revision += 1;
        let revision = state.revision.to_string();
        let mut object = serde_json::to_value(&state.node.object).unwrap();
        change(&mut object);
        object["metadata"]["resourceVersion"] = revision.into();
        state.node.object = serde_json::from_value(object).unwrap();
        Ok(state.publish_node())
    }

    /// Deletes the Node object. Its pods remain.
    pub fn delete_node(&self) {
        self.state().node.feed.send_replace(None);
    }

    /// How often the agent has written the Node's status.
    pub fn status_writes(&self) -> usize {
        self.state().node.status_writes
    }

    /// How often the agent has registered the node.
    pub fn registrations(&self) -> usize {
        self.state().node.registered
    }

    /// Whether the Node object exists.
    pub fn has_node(&self) -> bool {
        self.state().node.feed.borrow().is_some()
    }
}

#[async_trait]
impl NodeApi for World {
    fn watch(&self, _: &str) -> BoxStream<'static, NodeChange> {
        let (world, feed) = (self.clone(), self.state().node.feed.subscribe());
        let first = (world, feed, true);
        let changes = futures::stream::unfold(first, |(world, mut feed, is_first)| async move {
            match is_first {
                true => world.answers().await,
                false => feed.changed().await.ok()?,
            }
            let node = feed.borrow_and_update().clone();
            world.state().node.answered = true;
            let change = match node {
                Some(node) => NodeChange::Present(Box::new(node)),
                None => NodeChange::Absent,
            };
            Some((change, (world, feed, false)))
        });
        changes.boxed()
    }

    async fn get(&self, _: &str) -> Result<Option<Node>, ApiFailure> {
        self.answers().await;
        self.state().node.answered = true;
        Ok(self.own_node().ok())
    }

    async fn create(&self, node: &Node) -> Result<Node, ApiFailure> {
        self.answers().await;
        if self.has_node() {
            return Err(ApiFailure::AlreadyExists(
                "nodes \"node\" already exists".into(),
            ));
        }
        let mut state = self.state();
        let known: BTreeSet<&String> = state.pods.keys().collect();
        let orphaned = state.containers.values().find(|c| {
            let runs = c.container.state == ContainerState::Running;
            runs && !known.contains(&c.uid) && !state.static_uids.contains(&c.uid)
        });
        if let Some(orphaned) = orphaned {
            let what = format!(
                "{}: the node is registered while a container of this pod runs, which the API does not have",
                orphaned.uid
            );
            state.report_violation(what);
        }
        state.node.registered += 1;
        state.revision += 1;
        let (uid, revision) = (state.id("node"), state.revision.to_string());
        let mut object = serde_json::to_value(node).unwrap();
        object["metadata"]["uid"] = uid.into();
        object["metadata"]["resourceVersion"] = revision.into();
        state.node.object = serde_json::from_value(object).unwrap();
        Ok(state.publish_node())
    }

    async fn patch(&self, _: &str, patch: &Value) -> Result<Node, ApiFailure> {
        self.answers().await;
        self.change_own_node(|object| json_patch::merge(object, patch))
    }

    async fn patch_status(&self, _: &str, patch: &Value) -> Result<Node, ApiFailure> {
        self.answers().await;
        self.state().node.status_writes += 1;
        self.change_own_node(|object| {
            let lanes = object["status"]["allocatable"][nodes::LANE].clone();
            let before = object["status"]["conditions"].take();
            json_patch::merge(object, patch);
            // This is a directive of a strategic merge patch, not an address. The apiserver stores none of them.
            if let Some(addresses) = object["status"]["addresses"].as_array_mut() {
                addresses.retain(|a| a.get("$patch").is_none());
            }
            let mut conditions = before.as_array().cloned().unwrap_or_default();
            for new in patch["status"]["conditions"]
                .as_array()
                .into_iter()
                .flatten()
            {
                conditions.retain(|old| old["type"] != new["type"]);
                conditions.push(new.clone());
            }
            object["status"]["conditions"] = conditions.into();
            // The agent writes back the value that it read; the Node may have another one by now.
            object["status"]["allocatable"][nodes::LANE] = lanes.clone();
            object["status"]["capacity"][nodes::LANE] = lanes;
        })
    }

    async fn report_drivers(&self, _: &Node, _: &Drivers) -> Result<(), ApiFailure> {
        Ok(())
    }

    async fn renew(&self, _: &Lease) -> Result<(), ApiFailure> {
        self.hang_if_killed().await;
        Ok(())
    }

    async fn delete_slices(&self, _: &str, _: Option<&str>) -> Result<(), ApiFailure> {
        Ok(())
    }
}
