//! The node lifecycle controller. If a node's heartbeats stop, its conditions become Unknown, it is tainted, and its
//! pods become not ready. Pods that do not tolerate the taint are deleted, as are pods of deleted nodes
//! (`pkg/controller/nodelifecycle`, `pkg/controller/tainteviction`, `pkg/controller/podgc`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, NodeCondition, Pod, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::runtime::{Keys, Next};
use super::{Caches, is_stale};
use crate::api::object::later;
use holdfast_core::lock::lock;
use holdfast_core::node::taints::tolerates;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::Cache;

/// How long a node must be missing before its pods are deleted: it may be registering again.
const MISSING_GRACE: Duration = Duration::from_secs(40);
/// Interval at which the controller checks that its process runs, and of retries that no change announces.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// Number of nodes reconciled concurrently.
const WORKERS: usize = 4;

const NOT_READY: &str = "node.kubernetes.io/not-ready";
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
/// Pressure conditions of a node, with the taints that keep pods away.
const PRESSURES: [(&str, &str); 3] = [
    ("MemoryPressure", "node.kubernetes.io/memory-pressure"),
    ("DiskPressure", "node.kubernetes.io/disk-pressure"),
    ("PIDPressure", "node.kubernetes.io/pid-pressure"),
];

/// The health of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    Ready,
    NotReady,
    Unreachable,
}

fn condition<'a>(node: &'a Node, kind: &str) -> Option<&'a NodeCondition> {
    let conditions = node.status.as_ref()?.conditions.as_deref()?;
    conditions.iter().find(|c| c.type_ == kind)
}

fn ready_condition(node: &Node) -> Option<&NodeCondition> {
    condition(node, "Ready")
}

fn health(node: &Node, overdue: bool) -> Health {
    match ready_condition(node).map(|c| c.status.as_str()) {
        _ if overdue => Health::Unreachable,
        Some("True") => Health::Ready,
        Some("Unknown") => Health::Unreachable,
        _ => Health::NotReady,
    }
}

/// The taints that a node should have; `None` if they are up to date. Taints of others are kept. Without `evict`, no
/// NoExecute taint is set for the node's health: see [`Healths::can_evict`].
fn taints(node: &Node, health: Health, evict: bool, now: Timestamp) -> Option<Vec<Taint>> {
    let spec = node.spec.clone().unwrap_or_default();
    let old = spec.taints.unwrap_or_default();
    let mut wanted = vec![];
    if spec.unschedulable == Some(true) {
        wanted.push((UNSCHEDULABLE, "NoSchedule"));
    }
    let pressed = |kind: &str| condition(node, kind).is_some_and(|c| c.status == "True");
    let short = PRESSURES.iter().filter(|(kind, _)| pressed(kind));
    wanted.extend(short.map(|(_, taint)| (*taint, "NoSchedule")));
    let key = match health {
        Health::Ready => None,
        Health::NotReady => Some(NOT_READY),
        Health::Unreachable => Some(UNREACHABLE),
    };
    if let Some(key) = key {
        wanted.push((key, "NoSchedule"));
        if evict {
            wanted.push((key, "NoExecute"));
        }
    }
    let is =
        |taint: &Taint, (key, effect): &(&str, &str)| taint.key == *key && taint.effect == *effect;
    let ours = |taint: &Taint| {
        [NOT_READY, UNREACHABLE, UNSCHEDULABLE].contains(&taint.key.as_str())
            || PRESSURES.iter().any(|(_, key)| taint.key == *key)
    };
    let mut new: Vec<Taint> = old
        .iter()
        .filter(|t| !ours(t) || wanted.iter().any(|w| is(t, w)))
        .cloned()
        .collect();
    for missing in wanted {
        if !old.iter().any(|t| is(t, &missing)) {
            new.push(Taint {
                key: missing.0.into(),
                effect: missing.1.into(),
                time_added: Some(Time(now)),
                ..Taint::default()
            });
        }
    }
    (new != old).then_some(new)
}

/// The health of all nodes.
#[derive(Debug, Default)]
struct Healths {
    nodes: HashMap<String, Health>,
    ready: usize,
}

impl Healths {
    /// Whether pods are evicted because of their node's health. They are not if no node is ready. Then probably the
    /// control plane lost its connection, or the only node is being upgraded, and pods could not run elsewhere. Upstream
    /// calls this full disruption (`pkg/controller/nodelifecycle/node_lifecycle_controller.go`).
    fn can_evict(&self) -> bool {
        self.ready > 0
    }

    /// Records the health of a node; `None` removes it. Returns whether [`Healths::can_evict`] has changed.
    fn set(&mut self, node: &str, health: Option<Health>) -> bool {
        let could_evict = self.can_evict();
        let known = match health {
            Some(health) => self.nodes.insert(node.to_owned(), health),
            None => self.nodes.remove(node),
        };
        let count = |health| usize::from(health == Some(Health::Ready));
        self.ready = (self.ready + count(health)).saturating_sub(count(known));
        self.can_evict() != could_evict
    }
}

/// A patch that sets the conditions of a node without heartbeats to Unknown; `None` if they already are.
fn unknown_conditions(node: &Node, now: Timestamp) -> Option<Value> {
    let known = node
        .status
        .as_ref()
        .and_then(|s| s.conditions.clone())
        .unwrap_or_default();
    let conditions: Vec<Value> = ["Ready", "MemoryPressure", "DiskPressure", "PIDPressure"]
        .iter()
        .filter_map(|kind| {
            let old = known.iter().find(|c| c.type_ == *kind);
            let (reason, message) = match old {
                Some(old) if old.status == "Unknown" => return None,
                Some(_) => ("NodeStatusUnknown", "Kubelet stopped posting node status."),
                None => ("NodeStatusNeverUpdated", "Kubelet never posted node status."),
            };
            Some(json!({"type": kind, "status": "Unknown", "reason": reason, "message": message, "lastTransitionTime": Time(now)}))
        })
        .collect();
    (!conditions.is_empty()).then(|| json!({"status": {"conditions": conditions}}))
}

/// When a pod must be deleted because of its node's taints; `None` if it tolerates all of them indefinitely.
fn eviction_time(
    tolerations: &[Toleration],
    taints: &[Taint],
    now: Timestamp,
) -> Option<Timestamp> {
    let of = |taint: &Taint| {
        let since = taint.time_added.as_ref().map_or(now, |t| t.0);
        let fitting: Vec<&Toleration> = tolerations
            .iter()
            .filter(|t| tolerates(std::slice::from_ref(*t), taint))
            .collect();
        if fitting.is_empty() {
            return Some(now);
        }
        // The shortest period applies; a toleration without seconds sets no limit.
        fitting
            .iter()
            .filter_map(|t| t.toleration_seconds)
            .min()
            .map(|seconds| later(since, seconds.max(0)))
    };
    let evicting = taints.iter().filter(|t| t.effect == "NoExecute");
    evicting.filter_map(of).min()
}

/// The last heartbeat of each node, and when it was observed.
struct Heartbeats {
    /// Maximum time without heartbeats.
    grace: Duration,
    nodes: HashMap<String, (String, Instant)>,
    observed_at: Option<Instant>,
}

impl Heartbeats {
    fn new(grace: Duration) -> Heartbeats {
        Heartbeats {
            grace,
            nodes: HashMap::new(),
            observed_at: None,
        }
    }

    /// Begins an observation, at least every [`MAX_WAIT`]. Time in which this process was suspended or blocked is not
    /// counted against nodes, because their heartbeats of that time are not read yet.
    fn begin_observation(&mut self, now: Instant) {
        let since = self.observed_at.replace(now).unwrap_or(now);
        let missed = now.duration_since(since).saturating_sub(2 * MAX_WAIT);
        if missed.is_zero() {
            return;
        }
        for (_, seen) in self.nodes.values_mut() {
            *seen += missed;
        }
    }

    /// The time until a node becomes overdue unless it sends a heartbeat; `None` if it is overdue.
    fn time_left(&self, node: &str, now: Instant) -> Option<Duration> {
        let (_, seen) = self.nodes.get(node)?;
        let silent = now.duration_since(*seen);
        let left = self.grace.checked_sub(silent)?;
        Some(left + Duration::from_millis(1))
    }

    /// Whether a node has sent no heartbeat for too long. A heartbeat is any change of
    /// its timestamps; clocks are not compared.
    fn is_overdue(&mut self, node: &Node, lease: Option<&Lease>, now: Instant) -> bool {
        let renewed = lease.and_then(|l| l.spec.as_ref()?.renew_time.as_ref());
        let beat = ready_condition(node).and_then(|c| c.last_heartbeat_time.as_ref());
        let last = format!("{renewed:?} {beat:?}");
        let entry = self
            .nodes
            .entry(node.name_any())
            .or_insert_with(|| (last.clone(), now));
        if entry.0 != last {
            *entry = (last, now);
        }
        now.duration_since(entry.1) > self.grace
    }
}

/// Logs a failed write. Returns false if the write must be tried again: if the object was deleted or changed, the cache
/// will show that.
fn log_failure(result: Result<(), kube::Error>, what: &str, name: &str) -> bool {
    match result {
        Err(error) if !is_stale(&error) => {
            tracing::warn!(%error, name, "{what} failed, retrying");
            false
        }
        _ => true,
    }
}

/// Reconciles a node's conditions and taints, and evicts its pods.
async fn reconcile_node(
    client: &Client,
    node: &Node,
    pods: &[Arc<Pod>],
    health: Health,
    evict: bool,
) -> Next {
    let (api, name, now) = (
        Api::<Node>::all(client.clone()),
        node.name_any(),
        Timestamp::now(),
    );
    let parameters = PatchParams::default();
    let mut complete = true;
    if health == Health::Unreachable
        && let Some(patch) = unknown_conditions(node, now)
    {
        tracing::warn!(
            node = name,
            "no heartbeat within the grace period; the node's conditions become Unknown"
        );
        let result = api
            .patch_status(&name, &parameters, &Patch::Strategic(patch))
            .await;
        complete &= log_failure(result.map(|_| ()), "writing a node's conditions", &name);
    }
    if health == Health::Unreachable {
        for pod in pods {
            complete &= set_not_ready(client, pod, now).await;
        }
    }
    let mut wake = None;
    if let Some(taints) = taints(node, health, evict, now) {
        let patch = json!({"metadata": {"resourceVersion": node.metadata.resource_version}, "spec": {"taints": taints}});
        let result = api.patch(&name, &parameters, &Patch::Merge(patch)).await;
        // The next reconciliation evicts pods, based on the stored taints.
        complete &= log_failure(result.map(|_| ()), "tainting a node", &name);
    } else {
        for pod in pods {
            match time_to_eviction(node, pod, now) {
                Some(Duration::ZERO) => {
                    complete &= delete(client, pod, &DeleteParams::default()).await;
                }
                left => wake = wake.into_iter().chain(left).min(),
            }
        }
    }
    match complete {
        true => Next::after(wake),
        false => Next::Retry,
    }
}

/// The time until a pod must be deleted because of its node's taints; `None` if it stays or is being deleted.
fn time_to_eviction(node: &Node, pod: &Pod, now: Timestamp) -> Option<Duration> {
    let taints = node.spec.as_ref().and_then(|s| s.taints.as_deref());
    let tolerations = pod.spec.as_ref().and_then(|s| s.tolerations.as_deref());
    let mirror = pod
        .annotations()
        .contains_key("kubernetes.io/config.mirror");
    if mirror || pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let at = eviction_time(
        tolerations.unwrap_or_default(),
        taints.unwrap_or_default(),
        now,
    )?;
    Some(Duration::try_from(at.duration_since(now)).unwrap_or(Duration::ZERO))
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_deref());
    let mut conditions = conditions.unwrap_or_default().iter();
    conditions.any(|c| c.type_ == "Ready" && c.status == "True")
}

/// Sets a pod to not ready, because its state is unknown. Returns false if the write must be tried again.
async fn set_not_ready(client: &Client, pod: &Pod, now: Timestamp) -> bool {
    if !is_ready(pod) {
        return true;
    }
    let patch = json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "NodeNotReady", "lastTransitionTime": Time(now)}]}});
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let name = pod.name_any();
    let result = api
        .patch_status(&name, &PatchParams::default(), &Patch::Strategic(patch))
        .await;
    log_failure(
        result.map(|_| ()),
        "setting a pod's Ready condition to False",
        &name,
    )
}

/// Deletes a pod. Returns false if the deletion must be tried again.
async fn delete(client: &Client, pod: &Pod, how: &DeleteParams) -> bool {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let how = DeleteParams {
        preconditions: Some(kube::api::Preconditions {
            uid: pod.uid(),
            resource_version: None,
        }),
        ..how.clone()
    };
    let name = pod.name_any();
    tracing::info!(
        pod = name,
        "deleting a pod whose node has a NoExecute taint or was deleted"
    );
    log_failure(
        api.delete(&name, &how).await.map(|_| ()),
        "deleting a pod",
        &name,
    )
}

/// The node that a pod is bound to.
pub(super) fn node_of(pod: &Pod) -> Option<&str> {
    let node = pod.spec.as_ref()?.node_name.as_deref();
    node.filter(|n| !n.is_empty())
}

/// The node of a pod that was bound or became ready. Other changes of a pod are no reason to evict it, or to set it to not
/// ready.
fn node_to_check(before: Option<&Pod>, after: Option<&Pod>) -> Option<String> {
    let pod = after?;
    let bound = before.and_then(node_of) != node_of(pod);
    let became_ready = is_ready(pod) && !before.is_some_and(is_ready);
    let node = node_of(pod).filter(|_| bound || became_ready);
    node.map(str::to_owned)
}

/// State kept between reconciliations.
struct State {
    heartbeats: Heartbeats,
    healths: Healths,
    /// Since when nodes that pods are bound to do not exist.
    missing_since: HashMap<String, Instant>,
}

/// What the workers share.
struct Controller {
    client: Client,
    caches: Caches,
    leases: Cache<Lease>,
    keys: Arc<Keys<String>>,
    state: Mutex<State>,
}

/// Runs until the process exits. `grace` is the maximum time of a node without heartbeats.
pub(super) async fn run(client: Client, caches: Caches, grace: Duration) {
    let leases: Cache<Lease> = Cache::start(
        Api::namespaced(client.clone(), "kube-node-lease"),
        watcher::Config::default().streaming_lists(),
    );
    leases.synced().await;
    let controller = Controller {
        client,
        caches,
        leases,
        keys: Keys::new(),
        state: Mutex::new(State {
            heartbeats: Heartbeats::new(grace),
            healths: Healths::default(),
            missing_since: HashMap::new(),
        }),
    };
    let (keys, caches) = (&controller.keys, &controller.caches);
    // The health of all nodes is known before the first of them is tainted.
    for node in caches.nodes.list() {
        controller.observe(&node);
    }
    let name = |object: &ObjectMeta| object.name.clone();
    keys.watch(&caches.nodes, move |before, after| {
        after.or(before).and_then(|node| name(&node.metadata))
    });
    keys.watch(&controller.leases, move |_, after| {
        after.and_then(|lease| name(&lease.metadata))
    });
    keys.watch(&caches.pods, node_to_check);
    let turn = |node: String| controller.turn(node);
    tokio::join!(keys.work(WORKERS, turn), controller.observe_time());
}

impl Controller {
    /// Notices the time in which this process does not run.
    async fn observe_time(&self) {
        loop {
            tokio::time::sleep(MAX_WAIT).await;
            lock(&self.state)
                .heartbeats
                .begin_observation(Instant::now());
        }
    }

    /// Records the health of a node. Returns the health, whether to evict pods, and the time until the node is overdue.
    fn observe(&self, node: &Node) -> (Health, bool, Option<Duration>) {
        let name = node.name_any();
        let lease = self.leases.get("kube-node-lease", &name);
        let now = Instant::now();
        let mut state = lock(&self.state);
        state.heartbeats.begin_observation(now);
        let overdue = state.heartbeats.is_overdue(node, lease.as_deref(), now);
        let left = state.heartbeats.time_left(&name, now);
        let health = health(node, overdue);
        state.missing_since.remove(&name);
        let changed = state.healths.set(&name, Some(health));
        let evict = state.healths.can_evict();
        drop(state);
        if changed {
            self.queue_all();
        }
        (health, evict, left)
    }

    /// Queues all nodes, because they depend on whether any node is ready.
    fn queue_all(&self) {
        for node in self.caches.nodes.list() {
            self.keys.add(node.name_any());
        }
    }

    async fn turn(&self, name: String) -> Next {
        let Some(node) = self.caches.nodes.get("", &name) else {
            return self.delete_orphaned_pods(&name).await;
        };
        let (health, evict, left) = self.observe(&node);
        let taints = node.spec.as_ref().and_then(|s| s.taints.as_deref());
        let evicts = |taint: &Taint| taint.effect == "NoExecute";
        let needs_pods =
            health == Health::Unreachable || taints.unwrap_or_default().iter().any(evicts);
        let pods = match needs_pods {
            true => self.caches.pods_on.get(&name),
            false => vec![],
        };
        match reconcile_node(&self.client, &node, &pods, health, evict).await {
            Next::Done => Next::after(left),
            Next::After(wake) => Next::After(left.map_or(wake, |left| left.min(wake))),
            Next::Retry => Next::Retry,
        }
    }

    /// Force-deletes the pods of a node that has been missing for a while, because no agent can stop them.
    async fn delete_orphaned_pods(&self, node: &str) -> Next {
        let pods = self.caches.pods_on.get(node);
        let waits = {
            let mut state = lock(&self.state);
            state.heartbeats.nodes.remove(node);
            if state.healths.set(node, None) {
                self.queue_all();
            }
            if pods.is_empty() {
                state.missing_since.remove(node);
                return Next::Done;
            }
            let since = state.missing_since.entry(node.to_owned());
            let since = since.or_insert_with(Instant::now);
            MISSING_GRACE.saturating_sub(since.elapsed())
        };
        if !waits.is_zero() {
            return Next::After(waits);
        }
        // The cache may be stale, so the API is read.
        match Api::<Node>::all(self.client.clone()).get_opt(node).await {
            Ok(None) => {}
            Ok(Some(_)) => return Next::After(MAX_WAIT),
            Err(_) => return Next::Retry,
        }
        let mut complete = true;
        for pod in &pods {
            let at_once = DeleteParams::default().grace_period(0);
            complete &= delete(&self.client, pod, &at_once).await;
        }
        match complete {
            // A finalizer may keep pods.
            true => Next::After(MAX_WAIT),
            false => Next::Retry,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::SignedDuration;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds)
    }

    fn node(ready: &str, spec: Value) -> Node {
        serde_json::from_value(json!({"metadata": {"name": "n"}, "spec": spec,
            "status": {"conditions": [{"type": "Ready", "status": ready}]}}))
        .expect("a node")
    }

    #[test]
    fn taints_follow_the_nodes_conditions() {
        let cases = [
            ("True", false, json!({}), None),
            (
                "False",
                false,
                json!({}),
                Some(
                    "node.kubernetes.io/not-ready:NoSchedule node.kubernetes.io/not-ready:NoExecute",
                ),
            ),
            (
                "Unknown",
                false,
                json!({}),
                Some(
                    "node.kubernetes.io/unreachable:NoSchedule node.kubernetes.io/unreachable:NoExecute",
                ),
            ),
            (
                "True",
                true,
                json!({}),
                Some(
                    "node.kubernetes.io/unreachable:NoSchedule node.kubernetes.io/unreachable:NoExecute",
                ),
            ),
            (
                "True",
                false,
                json!({"unschedulable": true}),
                Some("node.kubernetes.io/unschedulable:NoSchedule"),
            ),
            (
                "True",
                false,
                json!({"taints": [{"key": "own", "effect": "NoExecute"}, {"key": NOT_READY, "effect": "NoExecute"}]}),
                Some("own:NoExecute"),
            ),
            (
                "True",
                false,
                json!({"taints": [{"key": UNSCHEDULABLE, "effect": "NoSchedule"}]}),
                Some(""),
            ),
        ];
        for (ready, overdue, spec, expected) in cases {
            let node = node(ready, spec);
            let shown = taints(&node, health(&node, overdue), true, at(0)).map(|taints| {
                let all: Vec<String> = taints
                    .iter()
                    .map(|t| format!("{}:{}", t.key, t.effect))
                    .collect();
                all.join(" ")
            });
            assert_eq!(shown.as_deref(), expected, "{ready} {overdue}");
        }
    }

    #[test]
    fn a_node_under_pressure_is_tainted() {
        let pressed = |status: &str, spec| {
            let mut node = node("True", spec);
            let conditions = node.status.as_mut().and_then(|s| s.conditions.as_mut());
            let condition = json!({"type": "DiskPressure", "status": status});
            let condition = serde_json::from_value(condition).expect("a condition");
            conditions.expect("conditions").push(condition);
            let found = taints(&node, Health::Ready, true, at(0));
            found.map(|t| t.iter().map(|t| t.key.clone()).collect::<Vec<_>>())
        };
        let key = "node.kubernetes.io/disk-pressure";
        let tainted = json!({"taints": [{"key": key, "effect": "NoSchedule"}]});
        assert_eq!(pressed("True", json!({})), Some(vec![key.to_owned()]));
        assert_eq!(pressed("True", tainted.clone()), None);
        assert_eq!(pressed("False", tainted), Some(vec![]));
    }

    /// While no node is ready, no NoExecute taint is added and existing ones are removed, so that no pod is evicted.
    #[test]
    fn no_pod_is_evicted_while_no_node_is_ready() {
        use Health::{NotReady, Ready, Unreachable};
        let mut healths = Healths::default();
        assert!(!healths.can_evict());
        for (node, health, changes, can_evict) in [
            ("a", Some(Unreachable), false, false),
            ("b", Some(NotReady), false, false),
            ("b", Some(Ready), true, true),
            ("b", Some(Ready), false, true),
            ("a", Some(Ready), false, true),
            ("b", None, false, true),
            ("b", None, false, true),
            ("a", Some(NotReady), true, false),
        ] {
            assert_eq!(healths.set(node, health), changes, "{node} {health:?}");
            assert_eq!(healths.can_evict(), can_evict, "{node} {health:?}");
        }
        let tainted = json!({"taints": [{"key": UNREACHABLE, "effect": "NoSchedule"}, {"key": UNREACHABLE, "effect": "NoExecute"}]});
        let kept = taints(&node("Unknown", tainted), Unreachable, false, at(0)).expect("a change");
        assert_eq!(kept.len(), 1);
        assert_eq!(kept[0].effect, "NoSchedule");
    }

    #[test]
    fn a_node_without_heartbeats_is_set_to_unknown_only_once() {
        let fresh = node("True", json!({}));
        let patch = unknown_conditions(&fresh, at(0)).expect("a change");
        assert_eq!(
            patch["status"]["conditions"].as_array().map(Vec::len),
            Some(4)
        );
        assert_eq!(
            patch["status"]["conditions"][0]["reason"],
            "NodeStatusUnknown"
        );
        let mut merged = serde_json::to_value(&fresh).expect("JSON");
        json_patch::merge(&mut merged, &patch);
        assert_eq!(
            unknown_conditions(&serde_json::from_value(merged).expect("a node"), at(0)),
            None
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_changed_lease_counts_as_a_heartbeat() {
        let lease = |second: i64| -> Lease {
            serde_json::from_value(
                json!({"spec": {"renewTime": format!("2026-01-01T00:00:{second:02}.000000Z")}}),
            )
            .expect("a lease")
        };
        let (mut heartbeats, node) = (
            Heartbeats::new(Duration::from_secs(50)),
            node("True", json!({})),
        );
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(!heartbeats.is_overdue(&node, Some(&lease(0)), start));
        assert!(!heartbeats.is_overdue(&node, Some(&lease(0)), after(40)));
        assert!(
            !heartbeats.is_overdue(&node, Some(&lease(1)), after(49)),
            "the lease was renewed"
        );
        assert!(!heartbeats.is_overdue(&node, Some(&lease(1)), after(98)));
        assert!(heartbeats.is_overdue(&node, Some(&lease(1)), after(101)));
        assert!(
            !heartbeats.is_overdue(&node, Some(&lease(2)), after(200)),
            "the node sends heartbeats again"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn time_while_the_controller_was_stopped_is_not_counted_as_silence() {
        let (mut heartbeats, node) = (
            Heartbeats::new(Duration::from_secs(50)),
            node("True", json!({})),
        );
        let start = Instant::now();
        let mut overdue_at = |seconds: u64| {
            let now = start + Duration::from_secs(seconds);
            heartbeats.begin_observation(now);
            let overdue = heartbeats.is_overdue(&node, None, now);
            assert_eq!(heartbeats.time_left("n", now).is_none(), overdue);
            overdue
        };
        assert!(!overdue_at(0) && !overdue_at(5) && !overdue_at(10));
        assert!(
            !overdue_at(3600),
            "the time while this process was stopped does not count"
        );
        let silent: Vec<u64> = (3605..3660).step_by(5).filter(|s| overdue_at(*s)).collect();
        assert_eq!(
            silent.first(),
            Some(&3635),
            "the grace period begins when the process continues"
        );
    }

    #[test]
    fn only_bound_and_ready_pods_are_a_reason_to_check_their_node() {
        let pod = |node: &str, ready: &str, note: &str| -> Pod {
            serde_json::from_value(json!({"metadata": {"name": "p", "annotations": {"note": note}}, "spec": {"nodeName": node, "containers": []},
                "status": {"conditions": [{"type": "Ready", "status": ready}]}}))
            .expect("a pod")
        };
        let of = |before: &Pod, after: &Pod| node_to_check(Some(before), Some(after));
        let bound = pod("n", "False", "");
        assert_eq!(of(&pod("", "False", ""), &bound).as_deref(), Some("n"));
        assert_eq!(of(&bound, &pod("n", "True", "")).as_deref(), Some("n"));
        assert_eq!(of(&bound, &pod("n", "False", "other")), None);
        assert_eq!(of(&pod("n", "True", ""), &bound), None);
        assert_eq!(node_to_check(None, Some(&bound)).as_deref(), Some("n"));
        assert_eq!(node_to_check(Some(&bound), None), None);
    }

    #[test]
    fn pods_are_evicted_after_their_toleration_seconds() {
        let taint = |effect: &str| -> Taint {
            serde_json::from_value(
                json!({"key": UNREACHABLE, "effect": effect, "timeAdded": "1970-01-01T00:01:40Z"}),
            )
            .expect("a taint")
        };
        let of = |tolerations: Value, effect: &str| {
            let tolerations: Vec<Toleration> =
                serde_json::from_value(tolerations).expect("tolerations");
            eviction_time(&tolerations, &[taint(effect)], at(1000))
        };
        let exists = |seconds: Value| json!({"key": UNREACHABLE, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds});
        assert_eq!(of(json!([]), "NoExecute"), Some(at(1000)));
        assert_eq!(of(json!([]), "NoSchedule"), None);
        assert_eq!(of(json!([exists(json!(300))]), "NoExecute"), Some(at(400)));
        assert_eq!(
            of(json!([exists(json!(300)), exists(json!(5))]), "NoExecute"),
            Some(at(105))
        );
        assert_eq!(of(json!([exists(Value::Null)]), "NoExecute"), None);
        assert!(of(json!([exists(json!(i64::MAX))]), "NoExecute") > Some(at(1_000_000)));
    }
}
