//! Filters and scores nodes: chooses the node of a pod, or explains why none fits. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod, Taint};
use kube::ResourceExt as _;

use super::storage::Storage;
use holdfast_core::node::taints::tolerates;
use holdfast_core::pod::resources::{Amounts, requests};
use holdfast_core::quantity::Quantity;

/// The pods of a node and their resource requests.
#[derive(Debug, Default)]
struct Taken {
    pods: Vec<Arc<Pod>>,
    requests: Amounts,
    /// Requests used for scoring, in the order of [`DEFAULT_REQUESTS`].
    weights: [i64; 2],
}

impl Taken {
    fn add(&mut self, pod: &Arc<Pod>) {
        for (name, amount) in requests(pod) {
            let sum = self.requests.entry(name).or_default();
            *sum = *sum + amount;
        }
        for (sum, (name, default_request)) in self.weights.iter_mut().zip(DEFAULT_REQUESTS) {
            *sum = sum.saturating_add(weight(pod, name, default_request));
        }
        self.pods.push(Arc::clone(pod));
    }
}

/// The use of all nodes. It is summed up once per scheduling cycle, not once per pending pod.
#[derive(Debug, Default)]
pub struct Cluster(HashMap<String, Taken>);

impl Cluster {
    /// Sums up all pods. `assumed` maps the uids of pods whose binding is not visible in the cache yet to their nodes.
    pub fn of(pods: &[Arc<Pod>], assumed: &HashMap<String, String>) -> Cluster {
        let mut cluster = Cluster::default();
        for pod in pods {
            if let Some(node) = node_of(pod, assumed) {
                cluster.add(node, pod);
            }
        }
        cluster
    }

    /// Adds a pod to a node.
    pub fn add(&mut self, node: &str, pod: &Arc<Pod>) {
        match self.0.get_mut(node) {
            Some(taken) => taken.add(pod),
            None => self.0.entry(node.to_owned()).or_default().add(pod),
        }
    }
}

/// Chooses a node, or returns the message why no node fits.
pub fn choose(
    pod: &Pod,
    nodes: &[Arc<Node>],
    cluster: &Cluster,
    storage: &Storage,
) -> Result<String, String> {
    if nodes.is_empty() {
        return Err("no nodes available to schedule pods".into());
    }
    let nothing = Taken::default();
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    let mut best: Option<(Score, String)> = None;
    for node in nodes {
        let name = node.name_any();
        let here = cluster.0.get(&name).unwrap_or(&nothing);
        match fits(pod, node, here, storage) {
            Ok(score) => {
                if best.as_ref().is_none_or(|(other, _)| score > *other) {
                    best = Some((score, name));
                }
            }
            Err(why) => {
                for reason in why {
                    *reasons.entry(reason).or_default() += 1;
                }
            }
        }
    }
    best.map(|(_, name)| name).ok_or_else(|| {
        let mut texts: Vec<String> = reasons.into_iter().map(|(reason, count)| format!("{count} {reason}")).collect();
        texts.sort();
        let all = nodes.len();
        format!(
            "0/{all} nodes are available: {}. preemption: 0/{all} nodes are available: {all} Preemption is not helpful for scheduling.",
            texts.join(", ")
        )
    })
}

/// The node whose resources a pod uses.
fn node_of<'a>(pod: &'a Pod, assumed: &'a HashMap<String, String>) -> Option<&'a str> {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return None;
    }
    let bound = pod
        .spec
        .as_ref()
        .and_then(|s| s.node_name.as_deref())
        .filter(|n| !n.is_empty());
    bound.or_else(|| {
        let uid = pod.metadata.uid.as_ref()?;
        assumed.get(uid).map(String::as_str)
    })
}

/// The score of a node for a pod; higher is better. At equal merit, the node with fewer pods wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Score {
    /// Free resources and few pods of the same owner: 0 to 300.
    merit: i64,
    fewest: Reverse<usize>,
}

/// Assumed requests of a container without requests, for scoring only: CPU in millicores, memory in bytes. Otherwise
/// all pods without requests would go to the same node (`pkg/scheduler/util/pod_resources.go`).
const DEFAULT_REQUESTS: [(&str, i64); 2] = [("cpu", 100), ("memory", 200 << 20)];

/// The taints of a node, including those that its conditions imply and that the controller has not written yet.
fn taints(node: &Node) -> Vec<Taint> {
    let spec = node.spec.clone().unwrap_or_default();
    let mut all = spec.taints.unwrap_or_default();
    let ready = node
        .status
        .iter()
        .flat_map(|s| s.conditions.iter().flatten())
        .any(|c| c.type_ == "Ready" && c.status == "True");
    let mut add = |key: &str| {
        all.push(Taint {
            key: key.into(),
            effect: "NoSchedule".into(),
            ..Taint::default()
        });
    };
    if spec.unschedulable == Some(true) {
        add(UNSCHEDULABLE);
    }
    if !ready {
        add("node.kubernetes.io/not-ready");
    }
    all
}

const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";

fn fits(pod: &Pod, node: &Node, here: &Taken, storage: &Storage) -> Result<Score, Vec<String>> {
    let mut why = Vec::new();
    let Some(spec) = &pod.spec else {
        return Err(vec!["node(s) cannot run a pod without a spec".into()]);
    };
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    let hard = |t: &Taint| matches!(t.effect.as_str(), "NoSchedule" | "NoExecute");
    let refused: Vec<Taint> = taints(node)
        .into_iter()
        .filter(|t| hard(t) && !tolerates(tolerations, t))
        .collect();
    if refused.iter().any(|t| t.key == UNSCHEDULABLE) {
        why.push("node(s) were unschedulable".to_owned());
    } else if !refused.is_empty() {
        why.push("node(s) had untolerated taint(s)".into());
    }
    if !holdfast_core::node::node_affinity::pod_matches(pod, node) {
        why.push("node(s) didn't match Pod's node affinity/selector".into());
    }
    if holdfast_core::pod::resources::ports_clash(pod, here.pods.iter().map(|p| &**p)) {
        why.push("node(s) didn't have free ports for the requested pod ports".into());
    }
    why.extend(storage.check(pod, node));
    let allocatable: Amounts = node
        .status
        .as_ref()
        .and_then(|s| s.allocatable.as_ref())
        .map(holdfast_core::pod::resources::amounts)
        .unwrap_or_default();
    let capacity = |name: &str| allocatable.get(name).copied().unwrap_or(Quantity::ZERO);
    if i64::try_from(here.pods.len()).unwrap_or(i64::MAX) + 1 > capacity("pods").units() {
        why.push("Too many pods".into());
    }
    for (name, amount) in requests(pod) {
        let taken = here.requests.get(&name).copied().unwrap_or(Quantity::ZERO);
        if !amount.is_zero() && taken + amount > capacity(&name) {
            why.push(format!("Insufficient {name}"));
        }
    }
    if why.is_empty() {
        Ok(score(pod, here, &allocatable))
    } else {
        Err(why)
    }
}

/// A pod's request of a resource for scoring, in millicores or bytes.
fn weight(pod: &Pod, name: &str, default_request: i64) -> i64 {
    let request = requests(pod).get(name).copied().unwrap_or(Quantity::ZERO);
    if request.is_zero() {
        let containers = pod.spec.as_ref().map_or(1, |s| s.containers.len().max(1));
        return default_request.saturating_mul(i64::try_from(containers).unwrap_or(i64::MAX));
    }
    if name == "cpu" {
        request.milli()
    } else {
        request.units()
    }
}

fn owner(pod: &Pod) -> Option<&str> {
    let owners = pod.metadata.owner_references.as_deref()?;
    owners
        .iter()
        .find(|o| o.controller == Some(true))
        .map(|o| o.uid.as_str())
}

/// Computes the merit of a node. The mean free share of CPU and memory with the pod on the node counts 0 to 100. Few
/// pods of the same owner count up to 200.
fn score(pod: &Pod, here: &Taken, allocatable: &Amounts) -> Score {
    let free = |((name, default_request), taken): ((&str, i64), &i64)| {
        let all = allocatable.get(name).copied().unwrap_or(Quantity::ZERO);
        let all = if name == "cpu" {
            all.milli()
        } else {
            all.units()
        };
        let used = taken.saturating_add(weight(pod, name, default_request));
        all.saturating_sub(used).max(0).saturating_mul(100) / all.max(1)
    };
    let room = DEFAULT_REQUESTS
        .into_iter()
        .zip(&here.weights)
        .map(free)
        .sum::<i64>()
        / 2;
    let own = owner(pod);
    let siblings = here
        .pods
        .iter()
        .filter(|other| own.is_some() && owner(other) == own)
        .count();
    let spread = 200 / (i64::try_from(siblings).unwrap_or(i64::MAX - 1) + 1);
    Score {
        merit: room + spread,
        fewest: Reverse(here.pods.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn choose(
        pod: &Pod,
        nodes: &[Arc<Node>],
        pods: &[Arc<Pod>],
        assumed: &HashMap<String, String>,
        storage: &Storage,
    ) -> Result<String, String> {
        super::choose(pod, nodes, &Cluster::of(pods, assumed), storage)
    }

    fn node(name: &str, extra: Value) -> Arc<Node> {
        let mut node = json!({"metadata": {"name": name, "labels": {"disk": "ssd"}}, "spec": {},
            "status": {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"cpu": "2", "memory": "4Gi", "pods": "3"}}});
        json_patch::merge(&mut node, &extra);
        Arc::new(serde_json::from_value(node).expect("a node"))
    }

    fn pod(name: &str, node: &str, spec: Value) -> Arc<Pod> {
        let mut base = json!({"metadata": {"name": name, "uid": name}, "spec": {"nodeName": node, "containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]}});
        json_patch::merge(&mut base["spec"], &spec);
        Arc::new(serde_json::from_value(base).expect("a pod"))
    }

    #[test]
    fn a_pod_gets_the_best_fitting_node_or_the_reasons_why_none_fits() {
        let empty = HashMap::new();
        let nodes = [node("a", json!({})), node("b", json!({}))];
        assert_eq!(
            choose(
                &pod("p", "", json!({})),
                &nodes,
                &[pod("x", "a", json!({}))],
                &empty,
                &Storage::default()
            ),
            Ok("b".into())
        );
        let one = &nodes[..1];
        let taint = node(
            "t",
            json!({"spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}}),
        );
        let cases: Vec<(Value, Vec<Arc<Node>>, Vec<Arc<Pod>>, Option<&str>)> = vec![
            (json!({}), vec![], vec![], Some("no nodes available")),
            (
                json!({}),
                one.to_vec(),
                vec![pod("x", "a", json!({})), pod("y", "a", json!({}))],
                Some("1 Insufficient cpu."),
            ),
            (
                json!({"nodeSelector": {"disk": "hdd"}}),
                one.to_vec(),
                vec![],
                Some("1 node(s) didn't match Pod's node affinity/selector"),
            ),
            (
                json!({"nodeSelector": {"disk": "ssd"}}),
                one.to_vec(),
                vec![],
                None,
            ),
            (
                json!({}),
                vec![taint.clone()],
                vec![],
                Some("untolerated taint"),
            ),
            (
                json!({"tolerations": [{"operator": "Exists"}]}),
                vec![taint],
                vec![],
                None,
            ),
            (
                json!({}),
                vec![node(
                    "n",
                    json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}),
                )],
                vec![],
                Some("untolerated taint"),
            ),
            (
                json!({}),
                vec![node("u", json!({"spec": {"unschedulable": true}}))],
                vec![],
                Some("were unschedulable"),
            ),
        ];
        for (spec, nodes, pods, expected) in cases {
            let result = choose(
                &pod("p", "", spec.clone()),
                &nodes,
                &pods,
                &empty,
                &Storage::default(),
            );
            match expected {
                None => assert!(result.is_ok(), "{spec}: {result:?}"),
                Some(text) => assert!(
                    result.as_ref().expect_err("refused").contains(text),
                    "{spec}: {result:?}"
                ),
            }
        }
        let assumed = HashMap::from([
            ("q".to_owned(), "a".to_owned()),
            ("r".to_owned(), "a".to_owned()),
        ]);
        let bound = [pod("q", "", json!({})), pod("r", "", json!({}))];
        assert!(
            choose(
                &pod("p", "", json!({})),
                one,
                &bound,
                &assumed,
                &Storage::default()
            )
            .is_err(),
            "assumed pods count"
        );
    }

    #[test]
    fn pods_without_requests_are_spread_by_count() {
        let nodes = [
            node("a", json!({})),
            node("b", json!({})),
            node("c", json!({})),
        ];
        let owned = |name: &str, at: &str, owner: &str| {
            let mut pod = json!({"metadata": {"name": name, "uid": name, "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": owner, "uid": owner, "controller": true}]},
                "spec": {"containers": [{"name": "c"}]}});
            if !at.is_empty() {
                pod["spec"]["nodeName"] = json!(at);
            }
            Arc::new(serde_json::from_value::<Pod>(pod).expect("a pod"))
        };
        let mut pods = vec![owned("x", "b", "other")];
        let mut chosen = vec![];
        for i in 0..3 {
            let at = choose(
                &owned("new", "", "mine"),
                &nodes,
                &pods,
                &HashMap::new(),
                &Storage::default(),
            )
            .expect("it fits");
            pods.push(owned(&format!("p{i}"), &at, "mine"));
            chosen.push(at);
        }
        chosen.sort();
        assert_eq!(
            chosen,
            ["a", "b", "c"],
            "pods of one owner are spread, one per node"
        );
        let next = choose(
            &owned("y", "", "lone"),
            &nodes,
            &pods,
            &HashMap::new(),
            &Storage::default(),
        );
        assert_ne!(
            next,
            Ok("b".into()),
            "another pod gets the node with the fewest pods"
        );
    }

    #[test]
    fn tolerated_taints_do_not_exclude_a_node() {
        let cordoned = node("u", json!({"spec": {"unschedulable": true}}));
        let down = node(
            "d",
            json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}),
        );
        let tolerant = pod("p", "", json!({"tolerations": [{"operator": "Exists"}]}));
        for node in [cordoned, down] {
            let placed = choose(
                &tolerant,
                std::slice::from_ref(&node),
                &[],
                &HashMap::new(),
                &Storage::default(),
            );
            assert_eq!(placed, Ok(node.name_any()));
        }
    }
}
