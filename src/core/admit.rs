//! Admission: whether this node takes a pod, in the kubelet's order and words (kubelet spec, chapter 11). Pure.

use k8s_openapi::api::core::v1::{Node, Pod};

use super::node_affinity;
use super::pod;
use super::quantity::Quantity;
use super::resources::{Amounts, ports_clash, requests};
use super::taints::tolerates;

/// A refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The reason in the status and the event.
    pub reason: String,
    /// The message, without the `Pod was rejected: ` prefix.
    pub message: String,
}

/// Decides. `others` are the pods already taken; `node` is our own object once it is known.
pub fn admit<'a>(pod: &Pod, others: impl Iterator<Item = &'a Pod> + Clone, allocatable: &Amounts, node: Option<&Node>) -> Result<(), Refusal> {
    let mut used = Amounts::new();
    let mut count = 0;
    for other in others.clone() {
        count += 1;
        for (name, amount) in requests(other) {
            let sum = used.entry(name).or_default();
            *sum = *sum + amount;
        }
    }
    let capacity = |name: &str| allocatable.get(name).copied();
    let short = |name: &str, requested: i64, used: i64, capacity: i64| Refusal {
        reason: format!("OutOf{name}"),
        message: format!("Node didn't have enough resource: {name}, requested: {requested}, used: {used}, capacity: {capacity}"),
    };
    if let Some(pods) = capacity("pods")
        && count + 1 > pods.units()
    {
        return Err(short("pods", 1, count, pods.units()));
    }
    for (name, amount) in requests(pod) {
        // What the node does not know (extended resources of others) is not ours to refuse.
        let Some(capacity) = capacity(&name) else { continue };
        let taken = used.get(&name).copied().unwrap_or(Quantity::ZERO);
        if !amount.is_zero() && taken + amount > capacity {
            let number = |q: Quantity| if name == "cpu" { q.milli() } else { q.units() };
            return Err(short(&name, number(amount), number(taken), number(capacity)));
        }
    }
    if node.is_some_and(|node| !node_affinity::pod_matches(pod, node)) {
        return Err(Refusal {
            reason: "NodeAffinity".into(),
            message: "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector".into(),
        });
    }
    if ports_clash(pod, others) {
        return Err(Refusal {
            reason: "NodePorts".into(),
            message: "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports".into(),
        });
    }
    let taints = node.and_then(|n| n.spec.as_ref()).and_then(|s| s.taints.clone()).unwrap_or_default();
    let tolerations = pod.spec.as_ref().and_then(|s| s.tolerations.clone()).unwrap_or_default();
    if !pod::is_static(pod) && taints.iter().filter(|t| t.effect == "NoExecute").any(|t| !tolerates(&tolerations, t)) {
        return Err(Refusal {
            reason: "TaintToleration".into(),
            message: "Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate".into(),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(extra: Value) -> Pod {
        let mut base = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "500m"}}, "ports": [{"containerPort": 80, "hostPort": 80}]}]}});
        json_patch::merge(&mut base, &extra);
        serde_json::from_value(base).expect("a pod")
    }

    #[test]
    fn refusals_name_what_is_short() {
        let node: Node =
            serde_json::from_value(json!({"metadata": {"labels": {"a": "1"}}, "spec": {"taints": [{"key": "k", "effect": "NoExecute"}]}}))
                .expect("a node");
        let allocatable = |cpu: &str, pods: &str| Amounts::from([("cpu".into(), cpu.parse().expect("q")), ("pods".into(), pods.parse().expect("q"))]);
        let other = pod(json!({}));
        let free = pod(json!({"spec": {"containers": [{"name": "c"}]}}));
        let big = allocatable("4", "10");
        let cases = [
            (
                pod(json!({})),
                vec![],
                allocatable("100m", "10"),
                None,
                Some(("OutOfcpu", "Node didn't have enough resource: cpu, requested: 500, used: 0, capacity: 100")),
            ),
            (pod(json!({})), vec![&other], allocatable("4", "1"), None, Some(("OutOfpods", "requested: 1, used: 1, capacity: 1"))),
            (pod(json!({})), vec![&other], big.clone(), None, Some(("NodePorts", "free ports"))),
            (pod(json!({"spec": {"nodeSelector": {"a": "2"}}})), vec![], big.clone(), Some(&node), Some(("NodeAffinity", "affinity"))),
            (pod(json!({})), vec![], big.clone(), Some(&node), Some(("TaintToleration", "taints"))),
            (pod(json!({"spec": {"tolerations": [{"operator": "Exists"}]}})), vec![&free], big.clone(), Some(&node), None),
        ];
        for (pod, others, allocatable, node, expected) in cases {
            let result = admit(&pod, others.into_iter(), &allocatable, node);
            match expected {
                None => assert_eq!(result, Ok(())),
                Some((reason, text)) => {
                    let refusal = result.expect_err(reason);
                    assert!(refusal.reason == reason && refusal.message.contains(text), "{refusal:?}");
                }
            }
        }
    }
}
