//! Roles and bindings as objects: defaults, validation, table columns.

use serde_json::{Value, json};

use crate::api::error::FieldError;
use crate::api::object::{self, list, text};

type Column = (&'static str, &'static str, u8);
type Errors = Vec<FieldError>;

/// Fills in the defaults of a kind.
pub fn defaults(kind: &str, object: &mut Value) {
    if !matches!(kind, "RoleBinding" | "ClusterRoleBinding") {
        return;
    }
    if let Some(role) = object.get_mut("roleRef").filter(|r| r.is_object()) {
        crate::api::object::set_default(role, "apiGroup", json!("rbac.authorization.k8s.io"));
    }
    for subject in object
        .get_mut("subjects")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        let group = if subject["kind"] == "ServiceAccount" {
            ""
        } else {
            "rbac.authorization.k8s.io"
        };
        if !group.is_empty() {
            crate::api::object::set_default(subject, "apiGroup", json!(group));
        }
    }
}

/// Validates an object of one of these kinds.
pub fn validate(kind: &str, object: &Value, errors: &mut Errors) {
    match kind {
        "Role" | "ClusterRole" => {
            for (i, rule) in list(object, &["rules"]).iter().enumerate() {
                if list(rule, &["verbs"]).is_empty() {
                    errors.push(FieldError::required(
                        format!("rules[{i}].verbs"),
                        "verbs must contain at least one value",
                    ));
                }
                let (paths, resources) = (
                    !list(rule, &["nonResourceURLs"]).is_empty(),
                    !list(rule, &["resources"]).is_empty(),
                );
                if paths && kind == "Role" {
                    errors.push(FieldError::invalid(
                        format!("rules[{i}].nonResourceURLs"),
                        &rule["nonResourceURLs"],
                        "namespaced rules cannot apply to non-resource URLs",
                    ));
                }
                if !paths && list(rule, &["apiGroups"]).is_empty() {
                    errors.push(FieldError::required(
                        format!("rules[{i}].apiGroups"),
                        "resource rules must supply at least one api group",
                    ));
                }
                if !paths && !resources {
                    errors.push(FieldError::required(
                        format!("rules[{i}].resources"),
                        "resource rules must supply at least one resource",
                    ));
                }
            }
        }
        "RoleBinding" | "ClusterRoleBinding" => {
            let allowed: &[&str] = if kind == "RoleBinding" {
                &["Role", "ClusterRole"]
            } else {
                &["ClusterRole"]
            };
            let named = text(object, &["roleRef", "kind"]).unwrap_or_default();
            if !allowed.contains(&named) {
                errors.push(FieldError::unsupported("roleRef.kind", named, allowed));
            }
            if text(object, &["roleRef", "name"]).is_none_or(str::is_empty) {
                errors.push(FieldError::required("roleRef.name", ""));
            }
            for (i, subject) in list(object, &["subjects"]).iter().enumerate() {
                let named = text(subject, &["kind"]).unwrap_or_default();
                if !["User", "Group", "ServiceAccount"].contains(&named) {
                    errors.push(FieldError::unsupported(
                        format!("subjects[{i}].kind"),
                        named,
                        &["ServiceAccount", "User", "Group"],
                    ));
                }
                if text(subject, &["name"]).is_none_or(str::is_empty) {
                    errors.push(FieldError::required(format!("subjects[{i}].name"), ""));
                }
                if named == "ServiceAccount"
                    && text(subject, &["namespace"]).is_none_or(str::is_empty)
                    && kind == "ClusterRoleBinding"
                {
                    errors.push(FieldError::required(format!("subjects[{i}].namespace"), ""));
                }
            }
        }
        _ => {}
    }
}

/// Validates an update: the `roleRef` of a binding is immutable.
pub(crate) fn validate_update(kind: &str, old: &Value, new: &Value, errors: &mut Errors) {
    if matches!(kind, "RoleBinding" | "ClusterRoleBinding") && old["roleRef"] != new["roleRef"] {
        errors.push(FieldError::invalid(
            "roleRef",
            &new["roleRef"],
            "cannot change roleRef",
        ));
    }
}

/// The table columns of a kind; `None` for other kinds.
#[must_use]
pub fn columns(kind: &str) -> Option<&'static [Column]> {
    Some(match kind {
        "Role" | "ClusterRole" => &[("Name", "string", 0), ("Created At", "date", 0)],
        "RoleBinding" | "ClusterRoleBinding" => &[
            ("Name", "string", 0),
            ("Role", "string", 0),
            ("Age", "string", 0),
            ("Users", "string", 1),
            ("Groups", "string", 1),
            ("ServiceAccounts", "string", 1),
        ],
        _ => return None,
    })
}

/// The cells of a table row.
#[must_use]
pub fn cells(kind: &str, object: &Value, age: &str) -> Vec<Value> {
    let name = Value::from(object::name(object));
    match kind {
        "Role" | "ClusterRole" => vec![name, object["metadata"]["creationTimestamp"].clone()],
        _ => {
            let role = format!(
                "{}/{}",
                text(object, &["roleRef", "kind"]).unwrap_or_default(),
                text(object, &["roleRef", "name"]).unwrap_or_default()
            );
            let [users, groups, accounts] = ["User", "Group", "ServiceAccount"].map(|kind| {
                let all = list(object, &["subjects"]).iter();
                let all = all.filter(|s| s["kind"] == kind).map(subject);
                Value::from(all.collect::<Vec<_>>().join(", "))
            });
            vec![name, role.into(), age.into(), users, groups, accounts]
        }
    }
}

/// A subject as shown in a table column.
fn subject(subject: &Value) -> String {
    let name = text(subject, &["name"]).unwrap_or_default();
    match text(subject, &["namespace"]) {
        Some(namespace) if subject["kind"] == "ServiceAccount" => format!("{namespace}/{name}"),
        _ => name.to_owned(),
    }
}
