//! Fields that the bundled control plane stores and does not enforce: clients that set them get a warning. A row is
//! removed when its field is enforced.

use serde_json::Value;

use super::networking::DEFAULT_RANGE;
use super::object::at;

/// The path of the pod spec in each kind.
const PODS: [(&str, &[&str]); 5] = [
    ("Pod", &["spec"]),
    ("Deployment", &["spec", "template", "spec"]),
    ("ReplicaSet", &["spec", "template", "spec"]),
    ("Job", &["spec", "template", "spec"]),
    (
        "CronJob",
        &["spec", "jobTemplate", "spec", "template", "spec"],
    ),
];

/// Fields of a pod spec, with the reason why they have no effect.
const IN_PODS: [(&[&str], &str); 4] = [
    (
        &["affinity", "podAffinity"],
        "the scheduler ignores pod affinity",
    ),
    (
        &["affinity", "podAntiAffinity"],
        "the scheduler ignores pod anti-affinity",
    ),
    (
        &[
            "affinity",
            "nodeAffinity",
            "preferredDuringSchedulingIgnoredDuringExecution",
        ],
        "the scheduler ignores preferred node affinity",
    ),
    (
        &["topologySpreadConstraints"],
        "the scheduler ignores topology spread constraints",
    ),
];

/// Labels of a namespace that select Pod Security Standards.
const POD_SECURITY: [&str; 3] = [
    "pod-security.kubernetes.io/enforce",
    "pod-security.kubernetes.io/audit",
    "pod-security.kubernetes.io/warn",
];

fn is_set(object: &Value, path: &[&str]) -> bool {
    match at(object, path) {
        Some(Value::Array(items)) => !items.is_empty(),
        Some(Value::Object(map)) => !map.is_empty(),
        value => value.is_some(),
    }
}

/// Warnings about an object that a client stores.
#[must_use]
pub fn warnings(kind: &str, object: &Value) -> Vec<String> {
    let stored = |field: &str, why: &str| format!("{field}: stored but not enforced: {why}");
    let mut found = vec![];
    if let Some((_, path)) = PODS.iter().find(|(known, _)| *known == kind) {
        for (field, why) in IN_PODS {
            let full = [*path, field].concat();
            if is_set(object, &full) {
                found.push(stored(&full.join("."), why));
            }
        }
    }
    if kind == "Namespace" {
        for label in POD_SECURITY {
            if at(object, &["metadata", "labels", label]).is_some() {
                let field = format!("metadata.labels[{label}]");
                found.push(stored(
                    &field,
                    "pods are not checked against Pod Security Standards",
                ));
            }
        }
    }
    if kind == "PriorityClass"
        && at(object, &["preemptionPolicy"]).is_none_or(|policy| policy != "Never")
    {
        found.push(stored(
            "preemptionPolicy",
            "the scheduler orders pods by priority and does not preempt",
        ));
    }
    match kind {
        "ServiceCIDR" if super::object::name(object) != DEFAULT_RANGE => found.push(stored(
            "spec.cidrs",
            "services get addresses of the ServiceCIDR kubernetes only",
        )),
        "IPAddress" => found.push(stored(
            "spec.parentRef",
            "the addresses of services are allocated without IPAddress objects",
        )),
        _ => {}
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn unenforced_fields_cause_warnings() {
        let term = json!([{"weight": 1}]);
        for (kind, path) in PODS {
            for (spec, field) in [
                (
                    json!({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}}}),
                    "affinity.podAffinity",
                ),
                (
                    json!({"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": term}}}),
                    "affinity.podAntiAffinity",
                ),
                (
                    json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": term}}}),
                    "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution",
                ),
                (
                    json!({"topologySpreadConstraints": [{"maxSkew": 1}]}),
                    "topologySpreadConstraints",
                ),
            ] {
                let whole = path
                    .iter()
                    .rev()
                    .fold(spec, |inner, key| json!({*key: inner}));
                let warned = warnings(kind, &whole);
                let expected = format!("{}.{field}: stored but not enforced: ", path.join("."));
                assert!(
                    warned.len() == 1 && warned[0].starts_with(&expected),
                    "{warned:?}"
                );
            }
            let plain = json!({"affinity": {"podAffinity": {}, "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}, "topologySpreadConstraints": []});
            let whole = path
                .iter()
                .rev()
                .fold(plain, |inner, key| json!({*key: inner}));
            assert_eq!(warnings(kind, &whole), Vec::<String>::new(), "{kind}");
        }
        for label in POD_SECURITY {
            let namespace = json!({"metadata": {"labels": {label: "restricted"}}});
            assert_eq!(warnings("Namespace", &namespace).len(), 1, "{label}");
        }
        assert_eq!(warnings("PriorityClass", &json!({"value": 1})).len(), 1);
        let never = json!({"preemptionPolicy": "Never"});
        assert_eq!(warnings("PriorityClass", &never), Vec::<String>::new());
        assert_eq!(
            warnings(
                "ConfigMap",
                &json!({"spec": {"affinity": {"podAffinity": {"a": 1}}}})
            ),
            Vec::<String>::new()
        );
    }
}
