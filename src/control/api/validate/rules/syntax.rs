//! The syntax of strings in fields (`staging/src/k8s.io/apimachinery/pkg/util/validation/validation.go`).

use std::collections::HashSet;

use serde_json::Value;

use super::super::{Errors, QUALIFIED, SUBDOMAIN, is_qualified, is_subdomain};
use crate::api::error::{FieldError, IP};
use crate::api::object::text;

pub const PORT: &str = "must be between 1 and 65535, inclusive";
pub const ID: &str = "must be between 0 and 2147483647, inclusive";
pub const MODE: &str = "must be a number between 0 and 0777 (octal), both inclusive";
pub(crate) const POSITIVE: &str = "must be greater than 0";
/// The protocols of ports.
pub(crate) const PROTOCOLS: &[&str] = &["SCTP", "TCP", "UDP"];
pub(crate) const ABSOLUTE: &str = "must be an absolute path";
pub(crate) const RELATIVE: &str = "must be a relative path";
pub(crate) const NO_BACKSTEPS: &str = "must not contain '..'";
pub const HEADER: &str = "a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name', regex used for validation is '[-A-Za-z0-9]+')";
pub(crate) const ENV: &str = "a valid environment variable name must consist only of printable ASCII characters other than '='";
pub(crate) const SYSCTL: &str = "must have at most 253 characters and match regex ^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$";

pub(crate) fn is_ip(text: &str) -> bool {
    text.parse::<std::net::IpAddr>().is_ok()
}

pub fn is_absolute(path: &str) -> bool {
    path.starts_with('/')
}

pub(crate) fn has_no_backsteps(path: &str) -> bool {
    path.split('/').all(|part| part != "..")
}

pub(crate) fn is_header(name: &str) -> bool {
    name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
}

pub(crate) fn is_env(name: &str) -> bool {
    name.chars().all(|c| (' '..='~').contains(&c) && c != '=')
}

pub(crate) fn is_config_key(key: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    key.len() <= 253 && key.chars().all(is_plain) && key != "." && !key.starts_with("..")
}

/// Segments of lower-case letters, digits, '-' and '_', separated by dots or slashes.
pub(crate) fn is_sysctl(name: &str) -> bool {
    let is_edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    let is_inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c);
    let is_segment = |part: &str| {
        is_edge(part.chars().next()) && is_edge(part.chars().last()) && part.chars().all(is_inner)
    };
    name.len() <= 253 && name.split(['.', '/']).all(is_segment)
}

/// Why a port name (IANA service name) is invalid; `None` if it is valid.
pub(crate) fn port_name_problem(name: &str) -> Option<&'static str> {
    let is_inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.len() > 15 {
        Some("must be no more than 15 characters")
    } else if !name.chars().all(is_inner) {
        Some("must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)")
    } else if !name.chars().any(|c| c.is_ascii_lowercase()) {
        Some("must contain at least one letter (a-z)")
    } else if name.contains("--") {
        Some("must not contain consecutive hyphens")
    } else if name.starts_with('-') || name.ends_with('-') {
        Some("must not begin or end with a hyphen")
    } else {
        None
    }
}

/// A port name.
pub(crate) fn port_name(value: &Value, path: &str, errors: &mut Errors) {
    let name = value.as_str().unwrap_or_default();
    if let Some(problem) = port_name_problem(name).filter(|_| !name.is_empty()) {
        errors.push(FieldError::invalid(path, value, problem));
    }
}

/// A port number or name (`ValidatePortNumOrName`).
pub fn port(value: &Value, path: &str, errors: &mut Errors) {
    let problem = match value {
        Value::String(name) => port_name_problem(name),
        number => {
            let is_right = number.as_i64().is_some_and(|n| (1..=65535).contains(&n));
            (!is_right).then_some(PORT)
        }
    };
    if let Some(problem) = problem {
        errors.push(FieldError::invalid(path, value, problem));
    }
}

/// A path within a volume's directory (`ValidateLocalNonReservedPath`).
pub(crate) fn local_path(value: &Value, path: &str, errors: &mut Errors) {
    let text = value.as_str().unwrap_or_default();
    descending_path(value, path, errors);
    if text.starts_with("..") && !text.starts_with("../") && has_no_backsteps(text) {
        errors.push(FieldError::invalid(path, value, "must not start with '..'"));
    }
}

/// A relative path without `..` (`validateLocalDescendingPath`).
pub(crate) fn descending_path(value: &Value, path: &str, errors: &mut Errors) {
    let text = value.as_str().unwrap_or_default();
    if is_absolute(text) {
        errors.push(FieldError::invalid(path, value, RELATIVE));
    }
    if !has_no_backsteps(text) {
        errors.push(FieldError::invalid(path, value, NO_BACKSTEPS));
    }
}

/// At most one of these fields may be set; further ones are forbidden (`validateVolumeSource`, `validateHandler`).
/// Returns the number of fields that are set.
pub(crate) fn at_most_one(
    value: &Value,
    path: &str,
    keys: &[&str],
    why: &str,
    errors: &mut Errors,
) -> usize {
    let present = keys.iter().filter(|key| !value[**key].is_null());
    let mut count = 0;
    for key in present {
        count += 1;
        if count > 1 {
            errors.push(FieldError::forbidden(format!("{path}.{key}"), why));
        }
    }
    count
}

/// The name of a label, resource or condition, with an optional prefix (`ValidateLabelName`).
pub fn qualified(key: &Value, path: &str, errors: &mut Errors) {
    if !key.as_str().is_some_and(is_qualified) {
        let shown = key.as_str().unwrap_or_default();
        errors.push(FieldError::invalid(path, &shown.into(), QUALIFIED));
    }
}

/// An IP address in a list.
pub fn ip(value: &Value, path: &str, errors: &mut Errors) {
    if !value.as_str().is_some_and(is_ip) {
        errors.push(FieldError::invalid(path, value, IP));
    }
}

/// A DNS name in a list (`ValidateDNS1123Subdomain`).
pub fn subdomain(value: &Value, path: &str, errors: &mut Errors) {
    if !value.as_str().is_some_and(is_subdomain) {
        errors.push(FieldError::invalid(path, value, SUBDOMAIN));
    }
}

/// The names in a list are unique. Each error names the later item.
pub(crate) fn unique_names(items: &Value, path: &str, errors: &mut Errors) {
    unique_as(items, "name", |i| format!("{path}[{i}].name"), errors);
}

/// The values of a key are unique in a list. `field` returns the path of an item's error. Empty values count as absent.
pub(crate) fn unique_as(
    items: &Value,
    key: &str,
    field: impl Fn(usize) -> String,
    errors: &mut Errors,
) {
    let mut seen = HashSet::new();
    for (i, item) in items.as_array().into_iter().flatten().enumerate() {
        let value = text(item, &[key]).unwrap_or_default();
        if !value.is_empty() && !seen.insert(value) {
            errors.push(FieldError::duplicate(field(i), value));
        }
    }
}
