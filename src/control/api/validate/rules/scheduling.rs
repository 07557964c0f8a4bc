//! Scheduling constraints of a pod (`ValidateTolerations`, `validateAffinity`, `validateTopologySpreadConstraints`).

use std::collections::HashSet;

use serde_json::Value;

use super::super::{
    Errors, LABEL, LABEL_VALUE, QUALIFIED, SUBDOMAIN, is_label, is_label_value, is_qualified,
    is_subdomain,
};
use super::Rule::{Check, Required};
use super::syntax::qualified;
use super::{Row, row, table};
use crate::api::error::FieldError;
use crate::api::object::{at, list, text};

const EFFECTS: &[&str] = &["NoSchedule", "PreferNoSchedule", "NoExecute"];
const WEIGHT: &str = "must be in the range 1-100";
const ONE_NAME: &str =
    "must be only one value when `operator` is 'In' or 'NotIn' for node field selector";

/// Rules for pod specs.
const SPEC: &[Row] = &[
    row(
        "nodeSelector",
        Check(labels),
        &[r#"{"a b": "x"}"#, r#"{"a": "x y"}"#],
    ),
    row(
        "tolerations[]",
        Check(toleration),
        &[
            r#"{"operator": "Equal"}"#,
            r#"{"key": "a b", "operator": "Exists"}"#,
            r#"{"key": "a", "value": "x y"}"#,
            r#"{"key": "a", "operator": "Exists", "value": "x"}"#,
            r#"{"key": "a", "operator": "Like"}"#,
            r#"{"key": "a", "effect": "Never"}"#,
            r#"{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 1}"#,
        ],
    ),
    row(
        "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms",
        Required("must have at least one node selector term"),
        &["[]"],
    ),
    row(
        "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[]",
        Check(strict_term),
        &[
            r#"{"matchExpressions": [{"key": "a", "operator": "In", "values": ["x y"]}]}"#,
            r#"{"matchExpressions": [{"key": "a", "operator": "In"}]}"#,
            r#"{"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["x"]}]}"#,
            r#"{"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1", "2"]}]}"#,
            r#"{"matchExpressions": [{"key": "a", "operator": "Like"}]}"#,
            r#"{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a", "b"]}]}"#,
            r#"{"matchFields": [{"key": "spec.name", "operator": "In", "values": ["a"]}]}"#,
            r#"{"matchFields": [{"key": "metadata.name", "operator": "Exists", "values": ["a"]}]}"#,
        ],
    ),
    row(
        "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[]",
        Check(preferred_node),
        &[
            r#"{"weight": 101, "preference": {}}"#,
            r#"{"weight": 1, "preference": {"matchExpressions": [{"key": "", "operator": "Exists"}]}}"#,
        ],
    ),
    row(
        "affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[]",
        Check(pod_term),
        &[
            r#"{"labelSelector": {}}"#,
            r#"{"topologyKey": "a b"}"#,
            r#"{"topologyKey": "a", "namespaces": ["A"]}"#,
            r#"{"topologyKey": "a", "labelSelector": {"matchLabels": {"a": "x y"}}}"#,
            r#"{"topologyKey": "a", "namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}"#,
            r#"{"topologyKey": "a", "labelSelector": {}, "matchLabelKeys": ["a"], "mismatchLabelKeys": ["a"]}"#,
            r#"{"topologyKey": "a", "matchLabelKeys": ["a"]}"#,
        ],
    ),
    row(
        "affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[]",
        Check(weighted_term),
        &[r#"{"weight": 0, "podAffinityTerm": {"topologyKey": "a"}}"#],
    ),
    row(
        "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[]",
        Check(pod_term),
        &["{}"],
    ),
    row(
        "affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[]",
        Check(weighted_term),
        &[r#"{"weight": 1, "podAffinityTerm": {}}"#],
    ),
    row(
        "topologySpreadConstraints[]",
        Check(spread),
        &[
            r#"{"maxSkew": 0, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"}"#,
            r#"{"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}"#,
            r#"{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "Maybe"}"#,
            r#"{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "ScheduleAnyway", "minDomains": 1}"#,
            r#"{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule", "minDomains": 0}"#,
            r#"{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule", "nodeTaintsPolicy": "Maybe"}"#,
            r#"{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"a b": "x"}}}"#,
        ],
    ),
    row(
        "topologySpreadConstraints",
        Check(repeated),
        &[
            r#"[{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"}, {"maxSkew": 2, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"}]"#,
        ],
    ),
];

/// Rules for a Node's taints.
pub(crate) const TAINTS: &[Row] = &[
    row(
        "spec.taints[]",
        Check(taint),
        &[
            r#"{"key": "a b", "effect": "NoSchedule"}"#,
            r#"{"key": "a", "value": "x y", "effect": "NoSchedule"}"#,
            r#"{"key": "a"}"#,
            r#"{"key": "a", "effect": "Never"}"#,
        ],
    ),
    row(
        "spec.taints",
        Check(unique_taints),
        &[
            r#"[{"key": "a", "effect": "NoExecute"}, {"key": "a", "value": "x", "effect": "NoExecute"}]"#,
        ],
    ),
];

/// Validates the scheduling constraints of a pod spec or RuntimeClass.
pub fn check(spec: &Value, path: &str, errors: &mut Errors) {
    table(SPEC, spec, path, errors);
}

fn word<'a>(value: &'a Value, key: &str) -> &'a str {
    text(value, &[key]).unwrap_or_default()
}

/// Labels of a node or selector.
pub(crate) fn labels(labels: &Value, path: &str, errors: &mut Errors) {
    for (key, value) in labels.as_object().into_iter().flatten() {
        if !is_qualified(key) {
            errors.push(FieldError::invalid(path, &key.as_str().into(), QUALIFIED));
        }
        if !value.as_str().is_some_and(is_label_value) {
            errors.push(FieldError::invalid(path, value, LABEL_VALUE));
        }
    }
}

fn label_value(value: &str, path: String, errors: &mut Errors) {
    if !is_label_value(value) {
        errors.push(FieldError::invalid(path, &value.into(), LABEL_VALUE));
    }
}

fn effect(effect: &str, path: String, errors: &mut Errors) {
    if !EFFECTS.contains(&effect) {
        errors.push(FieldError::unsupported(path, effect, EFFECTS));
    }
}

fn toleration(toleration: &Value, path: &str, errors: &mut Errors) {
    let (key, value) = (word(toleration, "key"), word(toleration, "value"));
    let operator = word(toleration, "operator");
    if !key.is_empty() {
        qualified(&toleration["key"], &format!("{path}.key"), errors);
    }
    let field = format!("{path}.operator");
    if key.is_empty() && operator != "Exists" {
        errors.push(FieldError::invalid(
            &*field,
            &operator.into(),
            "operator must be Exists when `key` is empty, which means \"match all values and all keys\"",
        ));
    }
    let named = word(toleration, "effect");
    if !toleration["tolerationSeconds"].is_null() && named != "NoExecute" {
        let why = "effect must be 'NoExecute' when `tolerationSeconds` is set";
        errors.push(FieldError::invalid(
            format!("{path}.effect"),
            &named.into(),
            why,
        ));
    }
    match operator {
        "" | "Equal" => label_value(value, field, errors),
        "Exists" if value.is_empty() => {}
        "Exists" => {
            let why = "value must be empty when `operator` is 'Exists'";
            errors.push(FieldError::invalid(field, &value.into(), why));
        }
        other => errors.push(FieldError::unsupported(field, other, &["Equal", "Exists"])),
    }
    if !named.is_empty() {
        effect(named, format!("{path}.effect"), errors);
    }
}

fn taint(taint: &Value, path: &str, errors: &mut Errors) {
    qualified(&taint["key"], &format!("{path}.key"), errors);
    label_value(word(taint, "value"), format!("{path}.value"), errors);
    match word(taint, "effect") {
        "" => errors.push(FieldError::required(format!("{path}.effect"), "")),
        named => effect(named, format!("{path}.effect"), errors),
    }
}

fn unique_taints(taints: &Value, path: &str, errors: &mut Errors) {
    let mut seen = HashSet::new();
    for (i, taint) in taints.as_array().into_iter().flatten().enumerate() {
        if !seen.insert((word(taint, "key"), word(taint, "effect"))) {
            errors.push(FieldError {
                reason: "FieldValueDuplicate",
                field: format!("{path}[{i}]"),
                detail: format!(
                    "Duplicate value: {taint}: taints must be unique by key and effect pair"
                ),
            });
        }
    }
}

/// Extensions of a label requirement.
#[derive(Clone, Copy)]
struct Allowed {
    /// Whether operators that compare numbers are allowed.
    comparison: bool,
    /// Whether values that no label can have are allowed.
    any_value: bool,
}

/// A requirement on labels (`ValidateNodeSelectorRequirement`, `ValidateLabelSelectorRequirement`).
fn requirement(requirement: &Value, path: &str, allowed: Allowed, errors: &mut Errors) {
    let values = list(requirement, &["values"]);
    let field = format!("{path}.values");
    match word(requirement, "operator") {
        "In" | "NotIn" if values.is_empty() => {
            let why = "must be specified when `operator` is 'In' or 'NotIn'";
            errors.push(FieldError::required(&*field, why));
        }
        "Exists" | "DoesNotExist" if !values.is_empty() => {
            let why = "may not be specified when `operator` is 'Exists' or 'DoesNotExist'";
            errors.push(FieldError::forbidden(&*field, why));
        }
        "Gt" | "Lt" if allowed.comparison && values.len() != 1 => {
            let why = "must be specified single value when `operator` is 'Lt' or 'Gt'";
            errors.push(FieldError::required(&*field, why));
        }
        "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
        "Gt" | "Lt" if allowed.comparison => {}
        other => {
            let why = "not a valid selector operator";
            errors.push(FieldError::invalid(
                format!("{path}.operator"),
                &other.into(),
                why,
            ));
        }
    }
    qualified(&requirement["key"], &format!("{path}.key"), errors);
    for (i, value) in values.iter().enumerate().filter(|_| !allowed.any_value) {
        label_value(
            value.as_str().unwrap_or_default(),
            format!("{field}[{i}]"),
            errors,
        );
    }
}

/// A requirement on a node's name (`ValidateNodeFieldSelectorRequirement`).
fn field_requirement(requirement: &Value, path: &str, errors: &mut Errors) {
    let values = list(requirement, &["values"]);
    let operator = word(requirement, "operator");
    if !matches!(operator, "In" | "NotIn") {
        let why = "not a valid selector operator";
        errors.push(FieldError::invalid(
            format!("{path}.operator"),
            &operator.into(),
            why,
        ));
    } else if values.len() != 1 {
        errors.push(FieldError::required(format!("{path}.values"), ONE_NAME));
    }
    let key = word(requirement, "key");
    if key != "metadata.name" {
        let why = "not a valid field selector key";
        return errors.push(FieldError::invalid(format!("{path}.key"), &key.into(), why));
    }
    for (i, value) in values.iter().enumerate() {
        if !value.as_str().is_some_and(is_subdomain) {
            errors.push(FieldError::invalid(
                format!("{path}.values[{i}]"),
                value,
                SUBDOMAIN,
            ));
        }
    }
}

fn term(term: &Value, path: &str, strict: bool, errors: &mut Errors) {
    let allowed = Allowed {
        comparison: true,
        any_value: !strict,
    };
    for (i, one) in list(term, &["matchExpressions"]).iter().enumerate() {
        requirement(
            one,
            &format!("{path}.matchExpressions[{i}]"),
            allowed,
            errors,
        );
    }
    for (i, one) in list(term, &["matchFields"]).iter().enumerate() {
        field_requirement(one, &format!("{path}.matchFields[{i}]"), errors);
    }
}

/// A term of a required node selector.
pub(crate) fn strict_term(one: &Value, path: &str, errors: &mut Errors) {
    term(one, path, true, errors);
}

fn weight(weighted: &Value, path: &str, errors: &mut Errors) {
    let weight = &weighted["weight"];
    if !weight.as_i64().is_some_and(|w| (1..=100).contains(&w)) {
        errors.push(FieldError::invalid(
            format!("{path}.weight"),
            weight,
            WEIGHT,
        ));
    }
}

fn preferred_node(preferred: &Value, path: &str, errors: &mut Errors) {
    weight(preferred, path, errors);
    term(
        &preferred["preference"],
        &format!("{path}.preference"),
        false,
        errors,
    );
}

fn weighted_term(weighted: &Value, path: &str, errors: &mut Errors) {
    weight(weighted, path, errors);
    pod_term(
        &weighted["podAffinityTerm"],
        &format!("{path}.podAffinityTerm"),
        errors,
    );
}

/// A pod affinity term (`validatePodAffinityTerm`).
fn pod_term(term: &Value, path: &str, errors: &mut Errors) {
    for key in ["labelSelector", "namespaceSelector"] {
        label_selector(&term[key], &format!("{path}.{key}"), errors);
    }
    for name in list(term, &["namespaces"]) {
        if !name.as_str().is_some_and(is_label) {
            errors.push(FieldError::invalid(
                format!("{path}.namespace"),
                name,
                LABEL,
            ));
        }
    }
    label_keys(term, path, errors);
    if word(term, "topologyKey").is_empty() {
        errors.push(FieldError::required(
            format!("{path}.topologyKey"),
            "can not be empty",
        ));
    } else {
        qualified(&term["topologyKey"], &format!("{path}.topologyKey"), errors);
    }
}

/// Label keys whose values are copied from the pod (`ValidateMatchLabelKeysAndMismatchLabelKeys`).
fn label_keys(term: &Value, path: &str, errors: &mut Errors) {
    let mismatched: HashSet<&str> = list(term, &["mismatchLabelKeys"])
        .iter()
        .filter_map(Value::as_str)
        .collect();
    for key in ["matchLabelKeys", "mismatchLabelKeys"] {
        let keys = list(term, &[key]);
        if !keys.is_empty() && term["labelSelector"].is_null() {
            let why = "must not be specified when labelSelector is not set";
            errors.push(FieldError::forbidden(format!("{path}.{key}"), why));
        }
        for (i, own) in keys.iter().enumerate() {
            let field = format!("{path}.{key}[{i}]");
            qualified(own, &field, errors);
            if key == "matchLabelKeys" && own.as_str().is_some_and(|own| mismatched.contains(own)) {
                let why = "exists in both matchLabelKeys and mismatchLabelKeys";
                errors.push(FieldError::invalid(field, own, why));
            }
        }
    }
}

/// A label selector (`ValidateLabelSelector`).
pub fn label_selector(selector: &Value, path: &str, errors: &mut Errors) {
    labels(
        &selector["matchLabels"],
        &format!("{path}.matchLabels"),
        errors,
    );
    let allowed = Allowed {
        comparison: false,
        any_value: false,
    };
    for (i, one) in list(selector, &["matchExpressions"]).iter().enumerate() {
        let here = format!("{path}.matchExpressions[{i}]");
        requirement(one, &here, allowed, errors);
    }
}

fn spread(spread: &Value, path: &str, errors: &mut Errors) {
    const POSITIVE: &str = "must be greater than zero";
    if spread["maxSkew"].as_i64().is_none_or(|skew| skew <= 0) {
        errors.push(FieldError::invalid(
            format!("{path}.maxSkew"),
            &spread["maxSkew"],
            POSITIVE,
        ));
    }
    if word(spread, "topologyKey").is_empty() {
        errors.push(FieldError::required(
            format!("{path}.topologyKey"),
            "can not be empty",
        ));
    }
    let action = word(spread, "whenUnsatisfiable");
    let actions = ["DoNotSchedule", "ScheduleAnyway"];
    if !actions.contains(&action) {
        errors.push(FieldError::unsupported(
            format!("{path}.whenUnsatisfiable"),
            action,
            &actions,
        ));
    }
    if let Some(domains) = at(spread, &["minDomains"]).filter(|domains| !domains.is_null()) {
        let field = format!("{path}.minDomains");
        if domains.as_i64().is_none_or(|n| n <= 0) {
            errors.push(FieldError::invalid(&*field, domains, POSITIVE));
        }
        if action != "DoNotSchedule" {
            let why =
                format!("can only use minDomains if whenUnsatisfiable=DoNotSchedule, not {action}");
            errors.push(FieldError::invalid(field, domains, &why));
        }
    }
    for key in ["nodeAffinityPolicy", "nodeTaintsPolicy"] {
        let policy = word(spread, key);
        if !["", "Honor", "Ignore"].contains(&policy) {
            errors.push(FieldError::unsupported(
                format!("{path}.{key}"),
                policy,
                &["Honor", "Ignore"],
            ));
        }
    }
    label_keys(spread, path, errors);
    label_selector(
        &spread["labelSelector"],
        &format!("{path}.labelSelector"),
        errors,
    );
}

fn repeated(constraints: &Value, path: &str, errors: &mut Errors) {
    let mut seen = HashSet::new();
    for (i, one) in constraints.as_array().into_iter().flatten().enumerate() {
        let (key, action) = (word(one, "topologyKey"), word(one, "whenUnsatisfiable"));
        if !seen.insert((key, action)) {
            let field = format!("{path}[{i}].{{topologyKey, whenUnsatisfiable}}");
            errors.push(FieldError::duplicate(
                field,
                &format!("{{{key}, {action}}}"),
            ));
        }
    }
}

#[cfg(test)]
pub(crate) fn examples() -> Vec<(&'static str, &'static [Row], Value)> {
    use serde_json::json;
    let term = || json!({"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}, "namespaces": ["default"], "matchLabelKeys": ["hash"]});
    let required = || {
        json!({
            "requiredDuringSchedulingIgnoredDuringExecution": [term()],
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term()}],
        })
    };
    let spec = json!({
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{
                    "matchExpressions": [{"key": "cpu", "operator": "Gt", "values": ["4"]}],
                    "matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}],
                }]},
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}],
            },
            "podAffinity": required(),
            "podAntiAffinity": required(),
        },
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "minDomains": 2, "nodeAffinityPolicy": "Honor", "labelSelector": {}}],
    });
    vec![
        ("scheduling", SPEC, spec),
        (
            "taints",
            TAINTS,
            json!({"spec": {"taints": [{"key": "a", "value": "b", "effect": "NoSchedule"}]}}),
        ),
    ]
}
