//! Validation of pod specs, in pods and pod templates.

use std::collections::HashSet;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::{Errors, rules};
use crate::api::error::FieldError;
use crate::api::object::{at, list, text};

/// Scheduling gates: qualified names, and no node while a gate exists (KEP-3521).
pub(super) fn gates(pod: &Value, errors: &mut Errors) {
    let gates = list(pod, &["spec", "schedulingGates"]);
    let mut seen = HashSet::new();
    for (i, gate) in gates.iter().enumerate() {
        let name = text(gate, &["name"]).unwrap_or_default();
        let field = format!("spec.schedulingGates[{i}].name");
        if !super::is_qualified(name) {
            errors.push(FieldError::invalid(field, &name.into(), super::QUALIFIED));
        } else if !seen.insert(name) {
            errors.push(FieldError::duplicate(field, name));
        }
    }
    if !gates.is_empty() && text(pod, &["spec", "nodeName"]).is_some_and(|n| !n.is_empty()) {
        errors.push(FieldError::forbidden(
            "spec.nodeName",
            "cannot be set until all schedulingGates have been cleared",
        ));
    }
}

/// Rules for pods, not for templates (`validateContainersOnlyForPod`).
pub(super) fn images(pod: &Value, errors: &mut Errors) {
    for kind in ["containers", "initContainers"] {
        for (i, container) in list(pod, &["spec", kind]).iter().enumerate() {
            let image = text(container, &["image"]).unwrap_or_default();
            if image.trim() != image {
                errors.push(FieldError::invalid(
                    format!("spec.{kind}[{i}].image"),
                    &image.into(),
                    "must not have leading or trailing whitespace",
                ));
            }
        }
    }
    for (i, volume) in list(pod, &["spec", "volumes"]).iter().enumerate() {
        let image = &volume["image"];
        if !image.is_null() && text(image, &["reference"]).is_none_or(str::is_empty) {
            let field = format!("spec.volumes[{i}].image.reference");
            errors.push(FieldError::required(field, ""));
        }
    }
}

/// Validates the spec of a pod or template; `restart` lists the restart policies that the kind allows.
pub(super) fn spec(spec: &Value, path: &str, restart: Option<&[&str]>, errors: &mut Errors) {
    let allowed = restart.unwrap_or(&["Always", "OnFailure", "Never"]);
    if let Some(policy) = text(spec, &["restartPolicy"])
        && !allowed.contains(&policy)
    {
        errors.push(FieldError::unsupported(
            format!("{path}.restartPolicy"),
            policy,
            allowed,
        ));
    }
    rules::pod(spec, path, errors);
    whole(spec, path, errors);
}

/// Pod-level resources: only supported ones, requests of at least the sum of the containers' requests, and limits of at
/// least each container's limit (KEP-2837).
fn whole(spec: &Value, path: &str, errors: &mut Errors) {
    use holdfast_core::pod::resources::{Side, amounts, of_container, of_containers};
    for side in ["limits", "requests"] {
        for (name, value) in at(spec, &["resources", side])
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
        {
            if !holdfast_core::pod::resources::is_pod_level(name) {
                let remedy = "only cpu, memory and hugepages-<size> can be set at the level of the pod; set this resource in a container";
                errors.push(FieldError::invalid(
                    format!("{path}.resources.{side}[{name}]"),
                    value,
                    remedy,
                ));
            }
        }
    }
    // A spec that cannot be decoded has other errors.
    let Ok(pod) = serde_json::from_value::<Pod>(json!({"spec": spec})) else {
        return;
    };
    let spec = holdfast_core::pod::spec(&pod);
    let Some(resources) = &spec.resources else {
        return;
    };
    let of = |map: &Option<_>| map.as_ref().map(amounts).unwrap_or_default();
    let (requests, limits) = (of(&resources.requests), of(&resources.limits));
    for (name, sum) in of_containers(&pod, Side::Requests) {
        if let Some(own) = requests.get(&name).filter(|own| **own < sum) {
            errors.push(FieldError::invalid(
                format!("{path}.resources.requests[{name}]"),
                &own.to_string().into(),
                &format!("must be greater than or equal to aggregate container requests of {sum}"),
            ));
        }
    }
    for (i, container) in spec.containers.iter().enumerate() {
        for (name, limit) in of_container(container, Side::Limits) {
            if let Some(own) = limits.get(&name).filter(|own| **own < limit) {
                errors.push(FieldError::invalid(
                    format!("{path}.containers[{i}].resources.limits[{name}]"),
                    &limit.to_string().into(),
                    &format!("must be less than or equal to pod limits of {own}"),
                ));
            }
        }
    }
}
