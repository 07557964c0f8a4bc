//! Validation and merge of updates, by subresource (`staging/src/k8s.io/apiserver/pkg/registry/rest/update.go`).

use serde_json::{Value, json};

use super::certificates;
use super::defaults;
use super::error::FieldError;
use super::object::{at, list, meta, put};
use super::resources::{Resource, Sub};
use super::services;
use super::validate;

/// Validates an update of an object or of one of its subresources.
pub(super) fn check(
    resource: &Resource,
    sub: Option<Sub>,
    old: &Value,
    new: &Value,
) -> Vec<FieldError> {
    let more = match sub {
        None => validate::update(resource, old, new),
        Some(Sub::EphemeralContainers) => validate::ephemeral_update(old, new),
        Some(Sub::Resize) => validate::resize(old, new),
        Some(Sub::Status) => return validate::status(resource, old, new),
        _ => return vec![],
    };
    let mut errors = validate::object(resource, new);
    if !errors.is_empty() {
        // Violations that are stored already do not block the update: an object that an older version accepted can
        // still be changed, and its finalizers removed.
        let known = validate::object(resource, old);
        errors.retain(|error| !known.contains(error));
    }
    errors.extend(more);
    errors
}

/// Restores the fields that this kind of write must not change, and increments the generation if the spec changes.
pub(super) fn merge(resource: &Resource, sub: Option<Sub>, old: &Value, new: &mut Value) {
    match sub {
        Some(Sub::Status) => {
            // A status update changes the status. Except for pods it can also change
            // labels, annotations and finalizers.
            let status = new.get("status").cloned();
            let metadata = new["metadata"].clone();
            *new = old.clone();
            if let Some(status) = status {
                new["status"] = status;
            }
            if resource.kind == "Pod"
                && let Some(class) = at(old, &["status", "qosClass"])
            {
                new["status"]["qosClass"] = class.clone();
            }
            if resource.kind == "CertificateSigningRequest" {
                certificates::restore_decision(old, new);
            }
            if resource.kind != "Pod" {
                for key in ["labels", "annotations", "finalizers"] {
                    match metadata.get(key) {
                        Some(value) => meta(new).insert(key.into(), value.clone()),
                        None => meta(new).remove(key),
                    };
                }
            }
        }
        Some(Sub::Approval) => {
            let status = new.get("status").cloned().unwrap_or_default();
            *new = old.clone();
            certificates::approve(new, &status);
        }
        Some(Sub::EphemeralContainers) => {
            let wanted = at(new, &["spec", "ephemeralContainers"]).cloned();
            *new = old.clone();
            if let Some(wanted) = wanted {
                new["spec"]["ephemeralContainers"] = wanted;
            }
            defaults::apply(resource.kind, new);
        }
        Some(Sub::Resize) => {
            let wanted = std::mem::replace(new, old.clone());
            let whole = at(&wanted, &["spec", "resources"]);
            put(&mut new["spec"], "resources", whole);
            for kind in ["containers", "initContainers"] {
                let containers = new["spec"]
                    .get_mut(kind)
                    .and_then(Value::as_array_mut)
                    .into_iter()
                    .flatten();
                for (container, wanted) in containers.zip(list(&wanted, &["spec", kind])) {
                    if container["name"] == wanted["name"] {
                        container["resources"] = wanted["resources"].clone();
                    }
                }
            }
            defaults::apply(resource.kind, new);
        }
        Some(Sub::Finalize) => {
            let finalizers = at(new, &["spec", "finalizers"])
                .cloned()
                .unwrap_or(json!([]));
            *new = old.clone();
            new["spec"]["finalizers"] = finalizers;
        }
        _ => {
            if resource.has(Sub::Status) {
                match old.get("status") {
                    Some(status) => new["status"] = status.clone(),
                    None => {
                        new.as_object_mut().map(|o| o.remove("status"));
                    }
                }
            }
            if resource.kind == "Service" {
                services::carry_over(old, new);
            }
            defaults::apply(resource.kind, new);
            if resource.kind == "Namespace" {
                new["spec"] = old["spec"].clone();
            }
        }
    }
    restore_metadata(old, new);
    let annotations = |o: &Value| at(o, &["metadata", "annotations"]).cloned();
    let changed = old["spec"] != new["spec"]
        || (resource.kind == "Deployment" && sub.is_none() && annotations(old) != annotations(new));
    if resource.generation && changed {
        bump_generation(new);
    }
}

/// Restores the metadata that only the server may set.
fn restore_metadata(old: &Value, new: &mut Value) {
    for key in [
        "uid",
        "creationTimestamp",
        "generation",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "resourceVersion",
        "namespace",
        "name",
        "generateName",
    ] {
        match old["metadata"].get(key) {
            Some(value) => meta(new).insert(key.into(), value.clone()),
            None => meta(new).remove(key),
        };
    }
}

pub(super) fn bump_generation(object: &mut Value) {
    let generation = object["metadata"]["generation"].as_i64().unwrap_or(0);
    if generation > 0 {
        meta(object).insert("generation".into(), (generation + 1).into());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// An object that violates a newer rule can still lose its finalizers; a further violation is rejected.
    #[test]
    fn an_update_is_rejected_only_for_fields_that_it_changes() {
        let resource = Resource::find("", "v1", "configmaps").expect("a resource");
        let old = json!({
            "metadata": {"name": "a", "namespace": "n", "finalizers": ["a.example/b"]},
            "data": {"..old": "x"},
        });
        let mut new = old.clone();
        new["metadata"]["finalizers"] = json!([]);
        assert_eq!(check(resource, None, &old, &new), []);
        new["data"]["..new"] = "y".into();
        let errors = check(resource, None, &old, &new);
        let fields: Vec<&str> = errors.iter().map(|error| error.field.as_str()).collect();
        assert_eq!(fields, ["data[..new]"]);
    }
}
