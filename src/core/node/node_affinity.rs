//! Node selector terms and node affinity: whether a node is suitable for a pod. Pure.

use k8s_openapi::api::core::v1::{Node, NodeSelectorRequirement, NodeSelectorTerm, Pod};

use crate::meta;
use crate::selector::Operator;

/// Whether a term matches a node; an empty term matches none.
#[must_use]
pub(crate) fn term_matches(term: &NodeSelectorTerm, node: &Node) -> bool {
    let labels: Vec<&NodeSelectorRequirement> = term.match_expressions.iter().flatten().collect();
    let fields: Vec<&NodeSelectorRequirement> = term.match_fields.iter().flatten().collect();
    if labels.is_empty() && fields.is_empty() {
        return false;
    }
    let name = meta::name(node);
    labels
        .iter()
        .all(|r| requirement(r, meta::labels(node).get(&r.key).map(String::as_str)))
        && fields
            .iter()
            .all(|r| r.key == "metadata.name" && requirement(r, Some(name)))
}

fn requirement(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let operator = requirement.operator.parse::<Operator>();
    operator.is_ok_and(|operator| operator.matches(values, value))
}

/// Whether a pod's node selector and required affinity match a node.
#[must_use]
pub fn pod_matches(pod: &Pod, node: &Node) -> bool {
    let Some(spec) = &pod.spec else { return true };
    let affinity = spec
        .affinity
        .as_ref()
        .and_then(|a| a.node_affinity.as_ref());
    let required = affinity.and_then(|a| {
        a.required_during_scheduling_ignored_during_execution
            .as_ref()
    });
    spec.node_selector
        .iter()
        .flatten()
        .all(|(k, v)| meta::labels(node).get(k) == Some(v))
        && required.is_none_or(|r| r.node_selector_terms.iter().any(|t| term_matches(t, node)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn terms_match_labels_and_the_name() {
        let node: Node = serde_json::from_value(
            json!({"metadata": {"name": "n1", "labels": {"zone": "a", "cores": "8"}}}),
        )
        .expect("a node");
        let cases = [
            (json!({}), false),
            (
                json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}),
                true,
            ),
            (
                json!({"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}),
                false,
            ),
            (
                json!({"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}, {"key": "cores", "operator": "Gt", "values": ["4"]}]}),
                true,
            ),
            (
                json!({"matchExpressions": [{"key": "cores", "operator": "Lt", "values": ["x"]}]}),
                false,
            ),
            (
                json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}),
                true,
            ),
            (
                json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}),
                false,
            ),
        ];
        for (term, expected) in cases {
            let term: NodeSelectorTerm = serde_json::from_value(term.clone()).expect("a term");
            assert_eq!(term_matches(&term, &node), expected, "{term:?}");
        }
    }
}
