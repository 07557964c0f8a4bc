//! Requests and limits (`validateResourceRequirements`, `ValidateResourceQuantityValue`).

use std::collections::BTreeMap;

use serde_json::Value;

use super::super::{Errors, QUALIFIED, is_qualified};
use super::Rule::Check;
use super::{Row, row, table};
use crate::api::error::FieldError;
use crate::api::object::at;
use holdfast_core::quantity::Quantity;

/// Amounts of resources, in containers and pod specs.
const RESOURCES: &[Row] = &[row(
    "resources",
    Check(quantities),
    &[
        r#"{"limits": {"cpu": "many"}}"#,
        r#"{"requests": {"cpu": "-1"}}"#,
        r#"{"limits": {"cpu": "1"}, "requests": {"cpu": "2"}}"#,
        r#"{"limits": {"a.example/gpu": "500m"}, "requests": {"a.example/gpu": "500m"}}"#,
        r#"{"limits": {"a.example/gpu": "2"}, "requests": {"a.example/gpu": "1"}}"#,
        r#"{"requests": {"a.example/gpu": "1"}}"#,
        r#"{"limits": {"hugepages-2Mi": "3Mi", "cpu": "1"}, "requests": {"hugepages-2Mi": "3Mi"}}"#,
        r#"{"limits": {"hugepages-2Mi": "2Mi"}, "requests": {"hugepages-2Mi": "2Mi"}}"#,
    ],
)];

/// Names of resources, in containers only.
const NAMES: &[Row] = &[row(
    "resources",
    Check(names),
    &[
        r#"{"limits": {"pods": "1"}}"#,
        r#"{"limits": {"disk": "1"}}"#,
        r#"{"limits": {"a b/c": "1"}}"#,
        r#"{"limits": {"requests.a.example/gpu": "1"}}"#,
    ],
)];

/// Validates the amounts in `resources`.
pub fn amounts(owner: &Value, path: &str, errors: &mut Errors) {
    table(RESOURCES, owner, path, errors);
}

/// Validates names and amounts of a container's resources.
pub fn of_container(container: &Value, path: &str, errors: &mut Errors) {
    table(NAMES, container, path, errors);
    amounts(container, path, errors);
}

/// Validates the pod overhead of a RuntimeClass or pod spec.
pub fn overhead(overhead: &Value, path: &str, errors: &mut Errors) {
    for (name, value) in overhead.as_object().into_iter().flatten() {
        let field = format!("{path}.limits[{name}]");
        container_name(name, &field, errors);
        quantity(name, value, &field, errors);
    }
}

fn is_huge(name: &str) -> bool {
    name.starts_with("hugepages-")
}

/// Whether a resource belongs to Kubernetes, in upstream's definition.
fn is_native(name: &str) -> bool {
    !name.contains('/') || name.contains("kubernetes.io/")
}

fn is_extended(name: &str) -> bool {
    let for_quota = format!("requests.{name}");
    !is_native(name) && !name.starts_with("requests.") && is_qualified(&for_quota)
}

/// Whether a resource can be overcommitted; only then may requests and limits differ.
fn can_overcommit(name: &str) -> bool {
    is_native(name) && !is_huge(name)
}

fn each<'a>(resources: &'a Value, side: &str) -> impl Iterator<Item = (&'a String, &'a Value)> {
    at(resources, &[side])
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
}

fn names(resources: &Value, path: &str, errors: &mut Errors) {
    for side in ["limits", "requests"] {
        for (name, _) in each(resources, side) {
            container_name(name, &format!("{path}.{side}[{name}]"), errors);
        }
    }
}

/// The name of a container's resource (`validateContainerResourceName`).
fn container_name(name: &str, field: &str, errors: &mut Errors) {
    let why = if !is_qualified(name) {
        QUALIFIED
    } else if !name.contains('/')
        && !matches!(name, "cpu" | "memory" | "ephemeral-storage")
        && !is_huge(name)
    {
        "must be a standard resource for containers"
    } else if !is_native(name) && !is_extended(name) {
        "doesn't follow extended resource name standard"
    } else {
        return;
    };
    errors.push(FieldError::invalid(field, &name.into(), why));
}

/// An amount as text; in JSON it may also be a number.
pub fn shown(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

/// Validates and parses an amount of a resource.
fn quantity(name: &str, value: &Value, field: &str, errors: &mut Errors) -> Option<Quantity> {
    let amount = match shown(value).parse::<Quantity>() {
        Ok(amount) => amount,
        Err(error) => {
            errors.push(FieldError::invalid(field, value, &error.to_string()));
            return None;
        }
    };
    if amount < Quantity::ZERO {
        errors.push(FieldError::invalid(
            field,
            value,
            "must be greater than or equal to 0",
        ));
    }
    if is_extended(name) && amount.milli() % 1000 != 0 {
        errors.push(FieldError::invalid(field, value, "must be an integer"));
    }
    let page = name
        .strip_prefix("hugepages-")
        .map(|size| size.parse::<Quantity>().map_or(0, Quantity::units));
    if let Some(page) = page
        && (page <= 0 || amount.units() % page != 0)
    {
        let why = format!(
            "{} is not positive integer multiple of {name}",
            shown(value)
        );
        errors.push(FieldError::invalid(field, value, &why));
    }
    Some(amount)
}

fn quantities(resources: &Value, path: &str, errors: &mut Errors) {
    let mut limits = BTreeMap::new();
    for (name, value) in each(resources, "limits") {
        if let Some(amount) = quantity(name, value, &format!("{path}.limits[{name}]"), errors) {
            limits.insert(name.as_str(), (amount, shown(value)));
        }
    }
    let field = format!("{path}.requests");
    for (name, value) in each(resources, "requests") {
        let Some(amount) = quantity(name, value, &format!("{field}[{name}]"), errors) else {
            continue;
        };
        match limits.get(name.as_str()) {
            Some((limit, text)) if amount != *limit && !can_overcommit(name) => {
                let why = format!("must be equal to {name} limit of {text}");
                errors.push(FieldError::invalid(&*field, value, &why));
            }
            Some((limit, text)) if amount > *limit => {
                let why = format!("must be less than or equal to {name} limit of {text}");
                errors.push(FieldError::invalid(&*field, value, &why));
            }
            None if !can_overcommit(name) && resources["limits"].get(name).is_none() => {
                let why = "Limit must be set for non overcommitable resources";
                errors.push(FieldError::required(format!("{path}.limits"), why));
            }
            _ => {}
        }
    }
    let all = || {
        ["limits", "requests"]
            .into_iter()
            .flat_map(|side| each(resources, side))
    };
    let has_huge = all().any(|(name, _)| is_huge(name));
    if has_huge && !all().any(|(name, _)| matches!(name.as_str(), "cpu" | "memory")) {
        errors.push(FieldError::forbidden(
            path,
            "HugePages require cpu or memory",
        ));
    }
}

#[cfg(test)]
pub(crate) fn examples() -> Vec<(&'static str, &'static [Row], Value)> {
    use serde_json::json;
    let example = || {
        json!({"resources": {
            "limits": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi", "hugepages-2Mi": "4Mi", "a.example/gpu": "2"},
            "requests": {"cpu": "0.5", "hugepages-2Mi": "4Mi", "a.example/gpu": 2},
        }})
    };
    vec![
        ("resources", RESOURCES, example()),
        ("names of resources", NAMES, example()),
    ]
}
