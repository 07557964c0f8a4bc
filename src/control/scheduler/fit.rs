//! Filters and scores nodes: chooses the node of a pod, or explains why none fits. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod, Taint};

use super::storage::Storage;
use holdfast_core::node::taints::tolerates;
use holdfast_core::pod::resources::{Amounts, requests};
use holdfast_core::quantity::Quantity;
use holdfast_kubeapi::cache::Key;

/// What scheduling needs of a pod. It is computed once, not once per node.
#[derive(Debug, Clone)]
struct Needs {
    pod: Arc<Pod>,
    requests: Amounts,
    /// Requests used for scoring, in the order of [`DEFAULT_REQUESTS`].
    weights: [i64; 2],
}

impl Needs {
    fn of(pod: &Arc<Pod>) -> Needs {
        let requests = requests(pod);
        Needs {
            weights: DEFAULT_REQUESTS.map(|(name, default)| weight(pod, &requests, name, default)),
            requests,
            pod: Arc::clone(pod),
        }
    }
}

/// The pods of a node and the sums of their requests.
#[derive(Debug, Default)]
struct Taken {
    pods: BTreeMap<Key, Needs>,
    requests: Amounts,
    weights: [i64; 2],
    /// The number of pods by the uid of their controller.
    siblings: HashMap<String, usize>,
}

impl Taken {
    fn add(&mut self, key: Key, needs: Needs) {
        for (name, amount) in &needs.requests {
            let sum = self.requests.entry(name.clone()).or_default();
            *sum = *sum + *amount;
        }
        for (sum, weight) in self.weights.iter_mut().zip(needs.weights) {
            *sum = sum.saturating_add(weight);
        }
        if let Some(owner) = owner(&needs.pod) {
            *self.siblings.entry(owner.to_owned()).or_default() += 1;
        }
        self.pods.insert(key, needs);
    }

    fn remove(&mut self, key: &Key) -> Option<Needs> {
        let needs = self.pods.remove(key)?;
        for (name, amount) in &needs.requests {
            if let Some(sum) = self.requests.get_mut(name) {
                *sum = *sum - *amount;
            }
        }
        for (sum, weight) in self.weights.iter_mut().zip(needs.weights) {
            *sum = sum.saturating_sub(weight);
        }
        if let Some(owner) = owner(&needs.pod)
            && let Some(count) = self.siblings.get_mut(owner)
        {
            *count -= 1;
            if *count == 0 {
                self.siblings.remove(owner);
            }
        }
        Some(needs)
    }
}

/// What scheduling needs of a node.
#[derive(Debug, PartialEq)]
struct Candidate {
    labels: Option<BTreeMap<String, String>>,
    /// See [`taints`].
    taints: Vec<Taint>,
    allocatable: Amounts,
}

impl Candidate {
    fn of(node: &Node) -> Candidate {
        let allocatable = node.status.as_ref().and_then(|s| s.allocatable.as_ref());
        Candidate {
            labels: node.metadata.labels.clone(),
            taints: taints(node),
            allocatable: allocatable
                .map(holdfast_core::pod::resources::amounts)
                .unwrap_or_default(),
        }
    }
}

/// The nodes and their use, kept up to date with each change of a pod or node.
#[derive(Debug, Default)]
pub struct Cluster {
    nodes: BTreeMap<String, (Arc<Node>, Candidate)>,
    taken: HashMap<String, Taken>,
    /// The nodes of the pods.
    places: HashMap<Key, String>,
}

impl Cluster {
    /// Records a node, or its deletion. Returns whether the change may let a pod fit, or changes why no node fits.
    pub(crate) fn set_node(&mut self, name: &str, node: Option<&Arc<Node>>) -> bool {
        let Some(node) = node else {
            return self.nodes.remove(name).is_some();
        };
        let candidate = Candidate::of(node);
        let before = self.nodes.get(name);
        let changed = before.is_none_or(|(_, before)| *before != candidate);
        self.nodes
            .insert(name.to_owned(), (Arc::clone(node), candidate));
        changed
    }

    /// The node with this name.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<&Arc<Node>> {
        self.nodes.get(name).map(|(node, _)| node)
    }

    /// Records the node whose resources a pod uses; `None` if it uses none. Returns whether resources became free.
    pub fn place(&mut self, key: &Key, place: Option<(&str, &Arc<Pod>)>) -> bool {
        let needs = place.map(|(node, pod)| (node, Needs::of(pod)));
        let before = self.places.remove(key).and_then(|node| {
            let taken = self.taken.get_mut(&node)?;
            let needs = taken.remove(key)?;
            if taken.pods.is_empty() {
                self.taken.remove(&node);
            }
            Some((node, needs.requests))
        });
        let Some((node, needs)) = needs else {
            return before.is_some();
        };
        let freed = before.is_some_and(|(old, requests)| {
            let less = |(name, amount)| needs.requests.get(name).is_none_or(|new| new < amount);
            old != node || requests.iter().any(less)
        });
        let taken = self.taken.entry(node.to_owned()).or_default();
        taken.add(key.clone(), needs);
        self.places.insert(key.clone(), node.to_owned());
        freed
    }
}

/// Why no node fits.
#[derive(Debug, PartialEq, Eq)]
pub struct Unfit {
    /// The message for the user.
    pub message: String,
    /// Whether the message changes when pods release resources.
    pub on_resources: bool,
}

/// Chooses a node, or returns why no node fits.
pub fn choose(pod: &Arc<Pod>, cluster: &Cluster, storage: &Storage) -> Result<String, Unfit> {
    if cluster.nodes.is_empty() {
        return Err(Unfit {
            message: "no nodes available to schedule pods".into(),
            on_resources: false,
        });
    }
    let (nothing, needs) = (Taken::default(), Needs::of(pod));
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    let mut on_resources = false;
    let mut best: Option<(Score, &String)> = None;
    for (name, node) in &cluster.nodes {
        let here = cluster.taken.get(name).unwrap_or(&nothing);
        match fits(&needs, node, here, storage) {
            Ok(score) => {
                if best.as_ref().is_none_or(|(other, _)| score > *other) {
                    best = Some((score, name));
                }
            }
            Err(refusal) => {
                on_resources |= refusal.on_resources;
                for reason in refusal.why {
                    *reasons.entry(reason).or_default() += 1;
                }
            }
        }
    }
    best.map(|(_, name)| name.clone()).ok_or_else(|| {
        let mut texts: Vec<String> = reasons.into_iter().map(|(reason, count)| format!("{count} {reason}")).collect();
        texts.sort();
        let all = cluster.nodes.len();
        let message = format!(
            "0/{all} nodes are available: {}. preemption: 0/{all} nodes are available: {all} Preemption is not helpful for scheduling.",
            texts.join(", ")
        );
        Unfit { message, on_resources }
    })
}

/// The node whose resources a pod uses.
pub fn node_of(pod: &Pod) -> Option<&str> {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return None;
    }
    let bound = pod.spec.as_ref()?.node_name.as_deref();
    bound.filter(|n| !n.is_empty())
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

/// Why a node does not fit.
#[derive(Default)]
struct Refusal {
    why: Vec<String>,
    /// Whether pods on the node use what the pod requests.
    on_resources: bool,
}

fn fits(
    needs: &Needs,
    (node, candidate): &(Arc<Node>, Candidate),
    here: &Taken,
    storage: &Storage,
) -> Result<Score, Refusal> {
    let mut why = Vec::new();
    let pod = &*needs.pod;
    let Some(spec) = &pod.spec else {
        return Err(Refusal {
            why: vec!["node(s) cannot run a pod without a spec".into()],
            ..Refusal::default()
        });
    };
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    let hard = |t: &&Taint| matches!(t.effect.as_str(), "NoSchedule" | "NoExecute");
    let hard = candidate.taints.iter().filter(hard);
    let refused: Vec<&Taint> = hard.filter(|t| !tolerates(tolerations, t)).collect();
    if refused.iter().any(|t| t.key == UNSCHEDULABLE) {
        why.push("node(s) were unschedulable".to_owned());
    } else if !refused.is_empty() {
        why.push("node(s) had untolerated taint(s)".into());
    }
    if !holdfast_core::node::node_affinity::pod_matches(pod, node) {
        why.push("node(s) didn't match Pod's node affinity/selector".into());
    }
    why.extend(storage.check(pod, node));
    let others = why.len();
    if holdfast_core::pod::resources::ports_clash(pod, here.pods.values().map(|p| &*p.pod)) {
        why.push("node(s) didn't have free ports for the requested pod ports".into());
    }
    let allocatable = &candidate.allocatable;
    let capacity = |name: &str| allocatable.get(name).copied().unwrap_or(Quantity::ZERO);
    if i64::try_from(here.pods.len()).unwrap_or(i64::MAX) + 1 > capacity("pods").units() {
        why.push("Too many pods".into());
    }
    for (name, amount) in &needs.requests {
        let taken = here.requests.get(name).copied().unwrap_or(Quantity::ZERO);
        if !amount.is_zero() && taken + *amount > capacity(name) {
            why.push(format!("Insufficient {name}"));
        }
    }
    if why.is_empty() {
        Ok(score(needs, here, allocatable))
    } else {
        let on_resources = why.len() > others;
        Err(Refusal { why, on_resources })
    }
}

/// A pod's request of a resource for scoring, in millicores or bytes.
fn weight(pod: &Pod, requests: &Amounts, name: &str, default_request: i64) -> i64 {
    let request = requests.get(name).copied().unwrap_or(Quantity::ZERO);
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
fn score(needs: &Needs, here: &Taken, allocatable: &Amounts) -> Score {
    let free = |index: usize| {
        let (name, _) = DEFAULT_REQUESTS[index];
        let all = allocatable.get(name).copied().unwrap_or(Quantity::ZERO);
        let all = if name == "cpu" {
            all.milli()
        } else {
            all.units()
        };
        let used = here.weights[index].saturating_add(needs.weights[index]);
        all.saturating_sub(used).max(0).saturating_mul(100) / all.max(1)
    };
    let room = (0..DEFAULT_REQUESTS.len()).map(free).sum::<i64>() / 2;
    let siblings = owner(&needs.pod).and_then(|own| here.siblings.get(own));
    let siblings = siblings.copied().unwrap_or(0);
    let spread = 200 / (i64::try_from(siblings).unwrap_or(i64::MAX - 1) + 1);
    Score {
        merit: room + spread,
        fewest: Reverse(here.pods.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_kubeapi::cache::key;
    use kube::ResourceExt as _;
    use serde_json::{Value, json};

    /// Chooses a node among `nodes`. `assumed` maps the uids of pods whose binding is not visible yet to their nodes.
    fn choose(
        pod: &Arc<Pod>,
        nodes: &[Arc<Node>],
        pods: &[Arc<Pod>],
        assumed: &HashMap<String, String>,
        storage: &Storage,
    ) -> Result<String, String> {
        let mut cluster = Cluster::default();
        for node in nodes {
            cluster.set_node(&node.name_any(), Some(node));
        }
        for pod in pods {
            let assumed = pod.metadata.uid.as_ref().and_then(|uid| assumed.get(uid));
            let node = node_of(pod).or(assumed.map(String::as_str));
            cluster.place(&key(&**pod), node.map(|node| (node, pod)));
        }
        super::choose(pod, &cluster, storage).map_err(|unfit| unfit.message)
    }

    /// The sums of a cluster after any changes are those of a cluster that was created from the result.
    #[test]
    fn a_cluster_follows_changes_of_pods_and_nodes() {
        let mut cluster = Cluster::default();
        let on = |node: &str, cpu: &str| {
            let requests = json!({"cpu": cpu});
            pod(
                "p",
                node,
                json!({"containers": [{"name": "c", "resources": {"requests": requests}}]}),
            )
        };
        let (small, large) = (on("a", "1"), on("a", "2"));
        let key = key(&*small);
        let mut place = |place| cluster.place(&key, place);
        assert!(!place(None), "an unknown pod frees nothing");
        assert!(!place(Some(("a", &small))));
        assert!(!place(Some(("a", &small))));
        assert!(!place(Some(("a", &large))), "more resources");
        assert!(place(Some(("a", &small))), "fewer resources");
        assert!(place(Some(("b", &small))), "another node");
        assert_eq!(
            cluster.taken["b"].requests["cpu"],
            "1".parse().expect("a quantity")
        );
        assert_eq!(cluster.taken["b"].weights, [1000, 200 << 20]);
        assert_eq!(cluster.taken.len(), 1);
        assert!(cluster.place(&key, None));
        assert!(cluster.taken.is_empty() && cluster.places.is_empty());

        let plain = node("a", json!({}));
        let beat = json!({"status": {"conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}]}});
        let mut set = |node: Option<&Arc<Node>>| cluster.set_node("a", node);
        assert!(set(Some(&plain)));
        assert!(!set(Some(&node("a", beat))), "a heartbeat changes nothing");
        let cordoned = node("a", json!({"spec": {"unschedulable": true}}));
        assert!(set(Some(&cordoned)) && set(Some(&plain)));
        let labelled = node("a", json!({"metadata": {"labels": {"new": "1"}}}));
        assert!(set(Some(&labelled)));
        let larger = json!({"status": {"allocatable": {"cpu": "4"}}});
        assert!(set(Some(&node("a", larger))));
        assert!(set(None) && !set(None));
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
