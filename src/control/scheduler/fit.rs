//! Filter and score: which node a pod goes to, or the sentence that says why none will do. Pure.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod, Taint};
use kube::ResourceExt as _;

use super::storage::Storage;
use crate::core::node::taints::tolerates;
use crate::core::pod::resources::{Amounts, requests};
use crate::core::quantity::Quantity;

/// Picks a node, or explains. `assumed` maps uids of pods bound a moment ago to their nodes.
pub fn choose(
    pod: &Pod,
    nodes: &[Arc<Node>],
    pods: &[Arc<Pod>],
    assumed: &HashMap<String, String>,
    storage: &Storage,
) -> Result<String, String> {
    if nodes.is_empty() {
        return Err("no nodes available to schedule pods".into());
    }
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    let mut best: Option<(i64, String)> = None;
    for node in nodes {
        let here: Vec<&Arc<Pod>> = pods
            .iter()
            .filter(|p| is_on(p, &node.name_any(), assumed))
            .collect();
        match fits(pod, node, &here, storage) {
            Ok(score) => {
                if best.as_ref().is_none_or(|(other, _)| score > *other) {
                    best = Some((score, node.name_any()));
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

fn is_on(pod: &Pod, node: &str, assumed: &HashMap<String, String>) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return false;
    }
    let bound = pod
        .spec
        .as_ref()
        .and_then(|s| s.node_name.as_deref())
        .filter(|n| !n.is_empty());
    let bound = bound.or_else(|| {
        pod.metadata
            .uid
            .as_ref()
            .and_then(|uid| assumed.get(uid))
            .map(String::as_str)
    });
    bound == Some(node)
}

fn fits(pod: &Pod, node: &Node, here: &[&Arc<Pod>], storage: &Storage) -> Result<i64, Vec<String>> {
    let mut why = Vec::new();
    let Some(spec) = &pod.spec else {
        return Err(vec!["node(s) got a pod without a spec".into()]);
    };
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    let node_spec = node.spec.clone().unwrap_or_default();
    if node_spec.unschedulable == Some(true) {
        why.push("node(s) were unschedulable".to_owned());
    }
    let ready = node
        .status
        .iter()
        .flat_map(|s| s.conditions.iter().flatten())
        .any(|c| c.type_ == "Ready" && c.status == "True");
    let hard = |t: &&Taint| matches!(t.effect.as_str(), "NoSchedule" | "NoExecute");
    if !ready
        || node_spec
            .taints
            .iter()
            .flatten()
            .filter(hard)
            .any(|t| !tolerates(tolerations, t))
    {
        why.push("node(s) had untolerated taint(s)".into());
    }
    if !crate::core::node::node_affinity::pod_matches(pod, node) {
        why.push("node(s) didn't match Pod's node affinity/selector".into());
    }
    if crate::core::pod::resources::ports_clash(pod, here.iter().map(|p| &***p)) {
        why.push("node(s) didn't have free ports for the requested pod ports".into());
    }
    why.extend(storage.check(pod, node));
    let allocatable: Amounts = node
        .status
        .as_ref()
        .and_then(|s| s.allocatable.as_ref())
        .map(crate::core::pod::resources::amounts)
        .unwrap_or_default();
    let mut used = Amounts::new();
    for other in here {
        for (name, amount) in requests(other) {
            let sum = used.entry(name).or_default();
            *sum = *sum + amount;
        }
    }
    let capacity = |name: &str| allocatable.get(name).copied().unwrap_or(Quantity::ZERO);
    if i64::try_from(here.len()).unwrap_or(i64::MAX) + 1 > capacity("pods").units() {
        why.push("Too many pods".into());
    }
    for (name, amount) in requests(pod) {
        let taken = used.get(&name).copied().unwrap_or(Quantity::ZERO);
        if !amount.is_zero() && taken + amount > capacity(&name) {
            why.push(format!("Insufficient {name}"));
        }
    }
    if why.is_empty() {
        Ok(least_allocated(&used, &allocatable))
    } else {
        Err(why)
    }
}

/// 0 (full) to 100 (empty), the mean of CPU and memory.
fn least_allocated(used: &Amounts, allocatable: &Amounts) -> i64 {
    let free = |name: &str| {
        let all = allocatable.get(name).map_or(0, |q| q.milli()).max(1);
        let used = used.get(name).map_or(0, |q| q.milli());
        (all - used).max(0).saturating_mul(100) / all
    };
    i64::midpoint(free("cpu"), free("memory"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

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
    fn a_pod_goes_where_it_fits_best_or_is_told_why_not() {
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
}
