//! API errors and their `Status` bodies (`staging/src/k8s.io/apimachinery/pkg/api/errors/errors.go`).

use serde_json::{Value, json};

/// Maximum number of causes in a response.
const MAX_CAUSES: usize = 1000;

/// One invalid field of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldError {
    /// The cause's reason, for instance `FieldValueRequired`.
    pub reason: &'static str,
    /// The path, for instance `spec.containers[0].image`.
    pub field: String,
    /// The error and, where possible, the valid values.
    pub detail: String,
}

/// The message about a text that is not a range of addresses (`IsValidCIDR` in apimachinery's `pkg/util/validation`).
pub(crate) const CIDR: &str = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)";
/// The message about a text that is not an address (`IsValidIP`).
pub(crate) const IP: &str = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";

impl FieldError {
    /// `Required value`, with an optional explanation.
    pub fn required(field: impl Into<String>, detail: &str) -> FieldError {
        let detail = if detail.is_empty() {
            "Required value".into()
        } else {
            format!("Required value: {detail}")
        };
        FieldError {
            reason: "FieldValueRequired",
            field: field.into(),
            detail,
        }
    }

    /// `Invalid value: <value>: <detail>`.
    pub fn invalid(field: impl Into<String>, value: &Value, detail: &str) -> FieldError {
        FieldError {
            reason: "FieldValueInvalid",
            field: field.into(),
            detail: format!("Invalid value: {value}: {detail}"),
        }
    }

    /// `Unsupported value`, with the list of supported values.
    pub fn unsupported(field: impl Into<String>, value: &str, supported: &[&str]) -> FieldError {
        let supported: Vec<String> = supported.iter().map(|s| format!("{s:?}")).collect();
        FieldError {
            reason: "FieldValueNotSupported",
            field: field.into(),
            detail: format!(
                "Unsupported value: {value:?}: supported values: {}",
                supported.join(", ")
            ),
        }
    }

    /// `Forbidden: <detail>`.
    pub fn forbidden(field: impl Into<String>, detail: &str) -> FieldError {
        FieldError {
            reason: "FieldValueForbidden",
            field: field.into(),
            detail: format!("Forbidden: {detail}"),
        }
    }

    /// `Too long`: one or more texts with more than `most` bytes in total.
    pub(crate) fn too_long(field: impl Into<String>, most: usize) -> FieldError {
        FieldError {
            reason: "FieldValueTooLong",
            field: field.into(),
            detail: format!("Too long: may not be more than {most} bytes"),
        }
    }

    /// `Too many`: a list of `count` items where `most` are allowed.
    pub(crate) fn too_many(field: impl Into<String>, count: usize, most: usize) -> FieldError {
        FieldError {
            reason: "FieldValueTooMany",
            field: field.into(),
            detail: format!("Too many: {count}: must have at most {most} items"),
        }
    }

    /// `Duplicate value: "<value>"`.
    pub fn duplicate(field: impl Into<String>, value: &str) -> FieldError {
        FieldError {
            reason: "FieldValueDuplicate",
            field: field.into(),
            detail: format!("Duplicate value: {value:?}"),
        }
    }

    /// `Not found: "<value>"`.
    pub fn not_found(field: impl Into<String>, value: &str) -> FieldError {
        FieldError {
            reason: "FieldValueNotFound",
            field: field.into(),
            detail: format!("Not found: {value:?}"),
        }
    }
}

/// An error response.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The HTTP status code.
    pub code: u16,
    /// The machine-readable reason; empty for unclassified errors.
    pub reason: &'static str,
    /// The message for people.
    pub message: String,
    /// `details` of the Status.
    pub details: Value,
}

impl ApiError {
    /// An error without details.
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> ApiError {
        ApiError {
            code,
            reason,
            message: message.into(),
            details: Value::Null,
        }
    }

    /// 400.
    pub fn bad_request(message: impl Into<String>) -> ApiError {
        Self::new(400, "BadRequest", message)
    }

    /// 403 with the full message.
    pub fn forbidden(message: impl Into<String>) -> ApiError {
        Self::new(403, "Forbidden", message)
    }

    /// 403 for a write that admission rejects (upstream's `admission.NewForbidden`).
    pub fn refused(group: &str, plural: &str, name: &str, why: &str) -> ApiError {
        let message = format!("{} {name:?} is forbidden: {why}", qualified(plural, group));
        Self::with_details(403, "Forbidden", message, group, plural, name)
    }

    /// 404 for an object.
    pub fn not_found(group: &str, plural: &str, name: &str) -> ApiError {
        Self::with_details(
            404,
            "NotFound",
            format!("{} {name:?} not found", qualified(plural, group)),
            group,
            plural,
            name,
        )
    }

    /// 409: the name exists already.
    pub(crate) fn already_exists(group: &str, plural: &str, name: &str) -> ApiError {
        let message = format!("{} {name:?} already exists", qualified(plural, group));
        Self::with_details(409, "AlreadyExists", message, group, plural, name)
    }

    /// 409: a concurrent write, or a failed precondition.
    pub fn conflict(group: &str, plural: &str, name: &str, why: &str) -> ApiError {
        let message = format!(
            "Operation cannot be fulfilled on {} {name:?}: {why}",
            qualified(plural, group)
        );
        Self::with_details(409, "Conflict", message, group, plural, name)
    }

    /// 409 for an update that is based on an old version.
    pub fn modified(group: &str, plural: &str, name: &str) -> ApiError {
        let why = "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(group, plural, name, why)
    }

    /// 422 with one cause per field. Only the first [`MAX_CAUSES`] are listed: a
    /// body of 3 MiB can have a million errors.
    pub fn invalid(kind: &str, group: &str, name: &str, errors: &[FieldError]) -> ApiError {
        let more = errors.len().saturating_sub(MAX_CAUSES);
        let errors = &errors[..errors.len() - more];
        let mut texts: Vec<String> = errors
            .iter()
            .map(|e| format!("{}: {}", e.field, e.detail))
            .collect();
        if more > 0 {
            texts.push(format!("and {more} more"));
        }
        let text = if texts.len() == 1 {
            texts[0].clone()
        } else {
            format!("[{}]", texts.join(", "))
        };
        let causes: Vec<Value> = errors
            .iter()
            .map(|e| json!({"reason": e.reason, "message": e.detail, "field": e.field}))
            .collect();
        ApiError {
            code: 422,
            reason: "Invalid",
            message: format!("{} {name:?} is invalid: {text}", qualified(kind, group)),
            details: json!({"name": name, "group": group, "kind": kind, "causes": causes}),
        }
    }

    /// 405.
    pub(crate) fn method_not_allowed() -> ApiError {
        Self::new(
            405,
            "MethodNotAllowed",
            "the server does not allow this method on the requested resource",
        )
    }

    /// 404 for an unknown resource or path.
    pub(crate) fn no_such_resource() -> ApiError {
        Self::new(
            404,
            "NotFound",
            "the server could not find the requested resource",
        )
    }

    /// 410: the requested history is compacted.
    pub fn expired(message: impl Into<String>) -> ApiError {
        Self::new(410, "Expired", message)
    }

    /// 415 for a request body.
    pub(crate) fn unsupported_body() -> ApiError {
        let message = "the body of the request was in an unknown format - accepted media types include: application/json, application/yaml, application/vnd.kubernetes.protobuf";
        Self::new(415, "UnsupportedMediaType", message)
    }

    /// 500.
    pub fn internal(message: impl std::fmt::Display) -> ApiError {
        Self::new(
            500,
            "InternalError",
            format!("Internal error occurred: {message}"),
        )
    }

    fn with_details(
        code: u16,
        reason: &'static str,
        message: String,
        group: &str,
        plural: &str,
        name: &str,
    ) -> ApiError {
        let mut details = json!({"name": name, "kind": plural});
        if !group.is_empty() {
            details["group"] = group.into();
        }
        ApiError {
            code,
            reason,
            message,
            details,
        }
    }

    /// The response body.
    #[must_use]
    pub fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "code": self.code,
        });
        if !self.reason.is_empty() {
            status["reason"] = self.reason.into();
        }
        if !self.details.is_null() {
            status["details"] = self.details.clone();
        }
        status
    }
}

fn qualified(name: &str, group: &str) -> String {
    if group.is_empty() {
        name.to_owned()
    } else {
        format!("{name}.{group}")
    }
}
