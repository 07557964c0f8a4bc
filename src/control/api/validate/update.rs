//! Validation of updates: immutable fields
//! (`pkg/apis/core/validation/validation.go`, `ValidatePodUpdate` and its siblings).

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::Errors;
use crate::api::error::FieldError;
use crate::api::object::{at, list, put, text};
use crate::api::resources::Resource;
use crate::api::{certificates, networking, rbac, services, storage};

/// Validates an update.
#[must_use]
pub fn update(resource: &Resource, old: &Value, new: &Value) -> Errors {
    let mut errors = Errors::new();
    super::status::finalizers(old, new, &mut errors);
    match resource.kind {
        "Deployment" | "ReplicaSet" if old["spec"]["selector"] != new["spec"]["selector"] => {
            errors.push(FieldError::invalid(
                "spec.selector",
                &new["spec"]["selector"],
                "field is immutable",
            ));
        }
        "Pod" => pod_update(old, new, &mut errors),
        "Job" => super::batch::job_update(old, new, &mut errors),
        "CronJob" => super::batch::cron_update(old, new, &mut errors),
        "ConfigMap" | "Secret" if old["immutable"] == true => {
            if new["immutable"] != true {
                errors.push(FieldError::forbidden(
                    "immutable",
                    "field is immutable when `immutable` is set",
                ));
            }
            if old["data"] != new["data"] || old["binaryData"] != new["binaryData"] {
                errors.push(FieldError::forbidden(
                    "data",
                    "field is immutable when `immutable` is set",
                ));
            }
        }
        "Service" => services::validate_update(old, new, &mut errors),
        "EndpointSlice" if old["addressType"] != new["addressType"] => {
            errors.push(FieldError::invalid(
                "addressType",
                &new["addressType"],
                "field is immutable",
            ));
        }
        "RuntimeClass" if old["handler"] != new["handler"] => {
            errors.push(FieldError::invalid(
                "handler",
                &new["handler"],
                "field is immutable",
            ));
        }
        "PriorityClass" if old["value"] != new["value"] => {
            errors.push(FieldError::forbidden(
                "value",
                "the value is immutable: create another PriorityClass",
            ));
        }
        other => {
            storage::validate_update(other, old, new, &mut errors);
            networking::validate_update(other, old, new, &mut errors);
            certificates::validate_update(other, old, new, &mut errors);
            rbac::validate_update(other, old, new, &mut errors);
        }
    }
    if resource.kind == "Secret" && old["type"] != new["type"] {
        errors.push(FieldError::invalid(
            "type",
            &new["type"],
            "field is immutable",
        ));
    }
    errors
}

/// Validates a write to `ephemeralcontainers`: containers can only be added.
#[must_use]
pub(crate) fn ephemeral_update(old: &Value, new: &Value) -> Errors {
    let mut errors = Errors::new();
    let path = "spec.ephemeralContainers";
    let (before, after) = (
        list(old, &["spec", "ephemeralContainers"]),
        list(new, &["spec", "ephemeralContainers"]),
    );
    let mut by_name: HashMap<&Value, &Value> = HashMap::new();
    for container in after {
        by_name.entry(&container["name"]).or_insert(container);
    }
    for container in before {
        let name = text(container, &["name"]).unwrap_or_default();
        match by_name.get(&container["name"]).copied() {
            None => errors.push(FieldError::forbidden(
                path,
                &format!("ephemeral container {name:?} cannot be removed"),
            )),
            Some(same) if same != container => {
                errors.push(FieldError::forbidden(
                    path,
                    &format!("ephemeral container {name:?} cannot be changed"),
                ));
            }
            Some(_) => {}
        }
    }
    let taken: HashSet<&str> = ["containers", "initContainers"]
        .iter()
        .flat_map(|kind| list(new, &["spec", kind]))
        .filter_map(|c| text(c, &["name"]))
        .collect();
    for (i, item) in after.iter().enumerate() {
        let here = format!("{path}[{i}]");
        for field in [
            "ports",
            "livenessProbe",
            "readinessProbe",
            "startupProbe",
            "lifecycle",
            "resources",
        ] {
            let set = at(item, &[field])
                .is_some_and(|v| !v.is_null() && v.as_object().is_none_or(|o| !o.is_empty()));
            if set {
                errors.push(FieldError::forbidden(
                    format!("{here}.{field}"),
                    "cannot be set for an Ephemeral Container",
                ));
            }
        }
        if let Some(target) =
            text(item, &["targetContainerName"]).filter(|t| !t.is_empty() && !taken.contains(t))
        {
            errors.push(FieldError::not_found(
                format!("{here}.targetContainerName"),
                target,
            ));
        }
    }
    errors
}

/// Validates a write to `resize`: only CPU and memory can change, and values that are
/// set cannot be removed (KEP-1287, KEP-5419).
#[must_use]
pub fn resize(old: &Value, new: &Value) -> Errors {
    let mut errors = Errors::new();
    if ["Succeeded", "Failed"].contains(&text(old, &["status", "phase"]).unwrap_or_default()) {
        errors.push(FieldError::forbidden(
            "spec",
            "a pod in phase Succeeded or Failed cannot be resized",
        ));
    }
    let class = |pod: &Value| {
        serde_json::from_value(pod["spec"].clone())
            .map(|spec| holdfast_core::pod::qos::of(&spec).name())
            .unwrap_or_default()
    };
    if class(old) != class(new) {
        errors.push(FieldError::invalid(
            "spec",
            &class(new).into(),
            "a resize must not change the pod's QoS class",
        ));
    }
    sizes("spec.resources", &old["spec"], &new["spec"], &mut errors);
    for kind in ["containers", "initContainers"] {
        for (i, (before, after)) in list(old, &["spec", kind])
            .iter()
            .zip(list(new, &["spec", kind]))
            .enumerate()
        {
            let here = format!("spec.{kind}[{i}]");
            let runs_once = kind == "initContainers" && before["restartPolicy"] != "Always";
            let restarts = |policy: &Value| policy["restartPolicy"] == "RestartContainer";
            if runs_once
                && before["resources"] != after["resources"]
                && list(after, &["resizePolicy"]).iter().any(restarts)
            {
                errors.push(FieldError::forbidden(
                    format!("{here}.resizePolicy"),
                    "an init container with resizePolicy RestartContainer cannot be resized",
                ));
            }
            sizes(&format!("{here}.resources"), before, after, &mut errors);
        }
    }
    errors
}

/// Validates a change of the `resources` of a container or pod spec.
fn sizes(here: &str, before: &Value, after: &Value, errors: &mut Errors) {
    for side in ["requests", "limits"] {
        let of = |holder: &Value| {
            at(holder, &["resources", side])
                .and_then(Value::as_object)
                .cloned()
                .unwrap_or_default()
        };
        let (before, after) = (of(before), of(after));
        let added = after.keys().filter(|name| !before.contains_key(*name));
        for name in before.keys().chain(added) {
            if before.get(name) != after.get(name) && !["cpu", "memory"].contains(&name.as_str()) {
                errors.push(FieldError::forbidden(
                    format!("{here}.{side}[{name}]"),
                    "only cpu and memory can be resized",
                ));
            }
            if !after.contains_key(name) {
                errors.push(FieldError::forbidden(
                    format!("{here}.{side}"),
                    "a resource that is set cannot be removed",
                ));
            }
        }
    }
}

fn pod_update(old: &Value, new: &Value, errors: &mut Errors) {
    let count = |pod: &Value| list(pod, &["spec", "containers"]).len();
    if count(old) != count(new) {
        errors.push(FieldError::forbidden(
            "spec.containers",
            "pod updates may not add or remove containers",
        ));
        return;
    }
    let mut comparable = new["spec"].clone();
    for kind in ["containers", "initContainers"] {
        let images: Vec<Value> = list(old, &["spec", kind])
            .iter()
            .map(|c| c["image"].clone())
            .collect();
        for (container, image) in comparable
            .get_mut(kind)
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
            .zip(images)
        {
            container["image"] = image;
        }
    }
    for key in [
        "activeDeadlineSeconds",
        "tolerations",
        "terminationGracePeriodSeconds",
        "schedulingGates",
    ] {
        put(&mut comparable, key, old["spec"].get(key));
    }
    gated_update(old, new, &mut comparable, errors);
    if comparable != old["spec"] {
        errors.push(FieldError::forbidden("spec", "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"));
    }
    let tolerations: HashSet<&Value> = list(new, &["spec", "tolerations"]).iter().collect();
    if list(old, &["spec", "tolerations"])
        .iter()
        .any(|t| !tolerations.contains(t))
    {
        errors.push(FieldError::forbidden(
            "spec.tolerations",
            "existing toleration can not be modified except its tolerationSeconds",
        ));
    }
}

/// Scheduling gates can only be removed. While one exists, the set of eligible nodes can only shrink (KEP-3838). Copies
/// the mutable fields of the old spec to `comparable`, so that the caller's comparison ignores them.
fn gated_update(old: &Value, new: &Value, comparable: &mut Value, errors: &mut Errors) {
    let gates: HashSet<&Value> = list(old, &["spec", "schedulingGates"]).iter().collect();
    for gate in list(new, &["spec", "schedulingGates"]) {
        if !gates.contains(gate) {
            let name = text(gate, &["name"]).unwrap_or_default();
            errors.push(FieldError::forbidden(
                "spec.schedulingGates",
                &format!("only deletion is allowed, but found new scheduling gate {name:?}"),
            ));
        }
    }
    if gates.is_empty() {
        return;
    }
    let entries = |pod: &Value| {
        at(pod, &["spec", "nodeSelector"])
            .and_then(Value::as_object)
            .cloned()
            .unwrap_or_default()
    };
    let (before, after) = (entries(old), entries(new));
    if before
        .iter()
        .any(|(key, value)| after.get(key) != Some(value))
    {
        errors.push(FieldError::invalid(
            "spec.nodeSelector",
            &new["spec"]["nodeSelector"],
            "only additions are allowed while the pod has scheduling gates",
        ));
    }
    put(comparable, "nodeSelector", old["spec"].get("nodeSelector"));
    if !is_narrower(old, new) {
        errors.push(FieldError::invalid(
            "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution",
            at(new, &REQUIRED).unwrap_or(&Value::Null),
            "only additions to the expressions of each term are allowed while the pod has scheduling gates",
        ));
    }
    let Some(affinity) = comparable.get_mut("affinity").filter(|a| a.is_object()) else {
        // If the old spec has no other kind of affinity, only the node affinity has changed.
        if others(&old["spec"]["affinity"]).is_empty() {
            put(comparable, "affinity", old["spec"].get("affinity"));
        }
        return;
    };
    put(
        affinity,
        "nodeAffinity",
        old["spec"]["affinity"].get("nodeAffinity"),
    );
    if others(affinity).is_empty() && others(&old["spec"]["affinity"]).is_empty() {
        put(comparable, "affinity", old["spec"].get("affinity"));
    }
}

const REQUIRED: [&str; 4] = [
    "spec",
    "affinity",
    "nodeAffinity",
    "requiredDuringSchedulingIgnoredDuringExecution",
];

/// The kinds of affinity other than node affinity.
fn others(affinity: &Value) -> Vec<&String> {
    let fields = affinity.as_object().into_iter().flatten();
    let others = fields.filter(|(key, value)| *key != "nodeAffinity" && !value.is_null());
    others.map(|(key, _)| key).collect()
}

/// Whether a pod's new required node affinity selects only nodes that the old one selects. Its terms are alternatives;
/// all expressions of a term must match.
fn is_narrower(old: &Value, new: &Value) -> bool {
    let terms = |pod| at(pod, &REQUIRED).map(|required| list(required, &["nodeSelectorTerms"]));
    let Some(before) = terms(old) else {
        return true;
    };
    let Some(after) = terms(new) else {
        return false;
    };
    let has_all = |(before, after): (&Value, &Value)| {
        ["matchExpressions", "matchFields"].iter().all(|key| {
            let now: HashSet<&Value> = list(after, &[key]).iter().collect();
            list(before, &[key]).iter().all(|e| now.contains(e))
        })
    };
    before.len() == after.len() && before.iter().zip(after).all(has_all)
}
