//! The node lifecycle controller. If a node's heartbeats stop, its conditions become Unknown, it is tainted, and its
//! pods become not ready. Pods that do not tolerate the taint are deleted, as are pods of deleted nodes
//! (`pkg/controller/nodelifecycle`, `pkg/controller/tainteviction`, `pkg/controller/podgc`).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, NodeCondition, Pod, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Caches, any_change};
use crate::api::object::later;
use holdfast_core::node::taints::tolerates;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::Cache;
use holdfast_kubeapi::client::code;

/// Maximum time without heartbeats (kube-controller-manager's `--node-monitor-grace-period`).
const HEARTBEAT_GRACE: Duration = Duration::from_secs(50);
/// How long a node must be missing before its pods are deleted: it may be registering again.
const MISSING_GRACE: Duration = Duration::from_secs(40);
/// Maximum time between reconciliations without changes.
const MAX_WAIT: Duration = Duration::from_secs(5);

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
/// NoExecute taint is set for the node's health: see [`can_evict`].
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

/// Whether pods are evicted because of their node's health. They are not if no node is ready. Then probably the control
/// plane lost its connection, or the only node is being upgraded, and pods could not run elsewhere. Upstream calls this
/// full disruption (`pkg/controller/nodelifecycle/node_lifecycle_controller.go`).
fn can_evict(health: &[Health]) -> bool {
    health.contains(&Health::Ready)
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
#[derive(Default)]
struct Heartbeats {
    nodes: HashMap<String, (String, Instant)>,
    observed_at: Option<Instant>,
}

impl Heartbeats {
    /// Begins an observation and removes deleted nodes. Time in which this process was suspended or blocked is not
    /// counted against nodes, because their heartbeats of that time are not read yet.
    fn begin_observation(&mut self, now: Instant, nodes: &[Arc<Node>]) {
        let there: HashSet<&String> = nodes
            .iter()
            .filter_map(|n| n.metadata.name.as_ref())
            .collect();
        self.nodes.retain(|name, _| there.contains(name));
        let since = self.observed_at.replace(now).unwrap_or(now);
        let missed = now.duration_since(since).saturating_sub(2 * MAX_WAIT);
        for (_, seen) in self.nodes.values_mut() {
            *seen += missed;
        }
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
        now.duration_since(entry.1) > HEARTBEAT_GRACE
    }
}

fn log_failure(result: Result<(), kube::Error>, what: &str, name: &str) {
    if let Err(error) = result
        && !matches!(code(&error), Some(404 | 409))
    {
        tracing::warn!(%error, name, "{what} failed, retrying");
    }
}

/// Reconciles a node's conditions and taints, and evicts its pods.
async fn reconcile_node(client: &Client, node: &Node, pods: &[&Pod], health: Health, evict: bool) {
    let (api, name, now) = (
        Api::<Node>::all(client.clone()),
        node.name_any(),
        Timestamp::now(),
    );
    let parameters = PatchParams::default();
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
        log_failure(result.map(|_| ()), "writing a node's conditions", &name);
    }
    if health == Health::Unreachable {
        for pod in pods {
            set_not_ready(client, pod, now).await;
        }
    }
    if let Some(taints) = taints(node, health, evict, now) {
        let patch = json!({"metadata": {"resourceVersion": node.metadata.resource_version}, "spec": {"taints": taints}});
        let result = api.patch(&name, &parameters, &Patch::Merge(patch)).await;
        log_failure(result.map(|_| ()), "tainting a node", &name);
        // The next reconciliation evicts pods, based on the stored taints.
        return;
    }
    let taints = node.spec.as_ref().and_then(|s| s.taints.as_deref());
    for pod in pods {
        let spec = pod.spec.as_ref();
        let tolerations = spec
            .and_then(|s| s.tolerations.as_deref())
            .unwrap_or_default();
        let mirror = pod
            .annotations()
            .contains_key("kubernetes.io/config.mirror");
        let over =
            eviction_time(tolerations, taints.unwrap_or_default(), now).is_some_and(|at| at <= now);
        if over && !mirror && pod.metadata.deletion_timestamp.is_none() {
            delete(client, pod, &DeleteParams::default()).await;
        }
    }
}

/// Sets a pod to not ready, because its state is unknown.
async fn set_not_ready(client: &Client, pod: &Pod, now: Timestamp) {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_deref());
    if !conditions
        .unwrap_or_default()
        .iter()
        .any(|c| c.type_ == "Ready" && c.status == "True")
    {
        return;
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
    );
}

async fn delete(client: &Client, pod: &Pod, how: &DeleteParams) {
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
    );
}

/// The node that a pod is bound to.
fn node_of(pod: &Pod) -> Option<&str> {
    let node = pod.spec.as_ref()?.node_name.as_deref();
    node.filter(|n| !n.is_empty())
}

/// Force-deletes the pods of nodes that have been missing for a while, because no agent can stop them.
async fn delete_orphaned_pods(
    client: &Client,
    caches: &Caches,
    missing_since: &mut HashMap<String, Instant>,
) {
    let pods = caches.pods.list();
    let named: BTreeSet<&str> = pods.iter().filter_map(|p| node_of(p)).collect();
    let missing: BTreeSet<String> = named
        .into_iter()
        .filter(|n| caches.nodes.get("", n).is_none())
        .map(Into::into)
        .collect();
    missing_since.retain(|node, _| missing.contains(node));
    for node in missing {
        let since = *missing_since
            .entry(node.clone())
            .or_insert_with(Instant::now);
        if since.elapsed() < MISSING_GRACE {
            continue;
        }
        // The cache may be stale, so the API is read.
        if !matches!(
            Api::<Node>::all(client.clone()).get_opt(&node).await,
            Ok(None)
        ) {
            continue;
        }
        for pod in pods.iter().filter(|p| node_of(p) == Some(&node)) {
            delete(client, pod, &DeleteParams::default().grace_period(0)).await;
        }
    }
}

/// Runs until the process exits.
pub(super) async fn run(client: Client, caches: Caches) {
    let leases: Cache<Lease> = Cache::start(
        Api::namespaced(client.clone(), "kube-node-lease"),
        watcher::Config::default().streaming_lists(),
    );
    leases.synced().await;
    let (mut heartbeats, mut missing_since) = (Heartbeats::default(), HashMap::new());
    let mut changes = [caches.nodes.changes()];
    loop {
        changes[0].mark_unchanged();
        let (nodes, pods) = (caches.nodes.list(), caches.pods.list());
        let now = Instant::now();
        heartbeats.begin_observation(now, &nodes);
        let states: Vec<Health> = nodes
            .iter()
            .map(|node| {
                let lease = leases.get("kube-node-lease", &node.name_any());
                health(node, heartbeats.is_overdue(node, lease.as_deref(), now))
            })
            .collect();
        let evict = can_evict(&states);
        let mut of_node: HashMap<&str, Vec<&Pod>> = HashMap::new();
        for pod in &pods {
            if let Some(node) = node_of(pod) {
                of_node.entry(node).or_default().push(pod);
            }
        }
        for (node, health) in nodes.iter().zip(states) {
            let own = of_node.remove(node.name_any().as_str()).unwrap_or_default();
            reconcile_node(&client, node, &own, health, evict).await;
        }
        delete_orphaned_pods(&client, &caches, &mut missing_since).await;
        any_change(&mut changes, MAX_WAIT).await;
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
        assert!(
            !can_evict(&[]) && !can_evict(&[Unreachable]) && !can_evict(&[Unreachable, NotReady])
        );
        assert!(can_evict(&[Unreachable, Ready]));
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
        let (mut heartbeats, node) = (Heartbeats::default(), node("True", json!({})));
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
        let (mut heartbeats, node) = (Heartbeats::default(), Arc::new(node("True", json!({}))));
        let nodes = [Arc::clone(&node)];
        let start = Instant::now();
        let mut overdue_at = |seconds: u64| {
            let now = start + Duration::from_secs(seconds);
            heartbeats.begin_observation(now, &nodes);
            heartbeats.is_overdue(&node, None, now)
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
