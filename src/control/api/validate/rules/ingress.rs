//! Rules for Ingresses, their classes, and the objects of service addresses (`pkg/apis/networking/validation/validation.go`).

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;

use super::super::{Errors, LABEL, SEGMENT, SUBDOMAIN, is_label, is_segment, is_subdomain};
use super::Rule::{Check, Required, Text};
use super::syntax::{ABSOLUTE, PORT, is_ip, port_name_problem};
use super::{Row, row, table};
use crate::api::error::{CIDR, FieldError, IP};
use crate::api::networking::CLASS_ANNOTATION;
use crate::api::object::{list, text};

const WILDCARD: &str = "a wildcard DNS-1123 subdomain must start with '*.', followed by a valid DNS subdomain, which must consist of lower case alphanumeric characters, '-' or '.' and end with an alphanumeric character (e.g. '*.example.com', regex used for validation is '\\*\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const HTTP_PATH: &str =
    "Invalid path (regex used for validation is '[A-Za-z0-9/\\-._~%!$&'()*+,;=:]+')";
/// Maximum number of bytes of the name of a class's controller.
const MAX_CONTROLLER_BYTES: usize = 250;

pub(super) const INGRESS: &[Row] = &[
    row("spec", Check(has_backend), &["{}", r#"{"rules": []}"#]),
    row("spec.defaultBackend", Check(backend), BACKENDS),
    row(
        "spec.rules[].host",
        Check(rule_host),
        &["\"10.0.0.1\"", "\"A.example\"", "\"*\"", "\"a.*.example\""],
    ),
    row("spec.rules[].http.paths", Required(""), &["[]"]),
    row(
        "spec.rules[].http.paths[]",
        Check(http_path),
        &[
            r#"{"path": "/", "backend": {"service": {"name": "a", "port": {"number": 1}}}}"#,
            r#"{"pathType": "Regex", "path": "/", "backend": {"service": {"name": "a", "port": {"number": 1}}}}"#,
            r#"{"pathType": "Exact", "backend": {"service": {"name": "a", "port": {"number": 1}}}}"#,
            r#"{"pathType": "Prefix", "path": "/a//b", "backend": {"service": {"name": "a", "port": {"number": 1}}}}"#,
            r#"{"pathType": "Prefix", "path": "/a/..", "backend": {"service": {"name": "a", "port": {"number": 1}}}}"#,
            r#"{"pathType": "ImplementationSpecific", "path": "a", "backend": {"service": {"name": "a", "port": {"number": 1}}}}"#,
            r#"{"pathType": "Prefix", "path": "/"}"#,
        ],
    ),
    row(
        "spec.tls[].hosts[]",
        Check(host),
        &["\"A.example\"", "\"*example\""],
    ),
    row(
        "spec.tls[].secretName",
        Text(is_subdomain, SUBDOMAIN),
        &["\"A\""],
    ),
    row(
        "spec.ingressClassName",
        Text(is_subdomain, SUBDOMAIN),
        &["\"A\""],
    ),
    row(
        "",
        Check(same_class),
        &[
            r#"{"metadata": {"annotations": {"kubernetes.io/ingress.class": "b"}}, "spec": {"ingressClassName": "a"}}"#,
        ],
    ),
];

const BACKENDS: &[&str] = &[
    "{}",
    r#"{"resource": {"kind": "Bucket", "name": "a"}, "service": {"name": "a", "port": {"number": 1}}}"#,
    r#"{"resource": {"kind": "", "name": "a"}}"#,
    r#"{"resource": {"kind": "Bucket", "name": "a/b"}}"#,
    r#"{"resource": {"apiGroup": "A", "kind": "Bucket", "name": "a"}}"#,
    r#"{"service": {"name": "", "port": {"number": 1}}}"#,
    r#"{"service": {"name": "A", "port": {"number": 1}}}"#,
    r#"{"service": {"name": "a"}}"#,
    r#"{"service": {"name": "a", "port": {"number": 65536}}}"#,
    r#"{"service": {"name": "a", "port": {"name": "UPPER"}}}"#,
    r#"{"service": {"name": "a", "port": {"name": "web", "number": 80}}}"#,
];

pub(super) const CLASS: &[Row] = &[
    row("spec.controller", Required(""), &["\"\"", "null"]),
    row(
        "spec.controller",
        Check(controller),
        &[
            "\"a\"",
            "\"a.example/\"",
            "\"A.example/b\"",
            "\"a.example/b c\"",
        ],
    ),
    row(
        "spec.parameters",
        Check(parameters),
        &[
            r#"{"name": "a", "scope": "Cluster"}"#,
            r#"{"kind": "A", "scope": "Cluster"}"#,
            r#"{"kind": "A", "name": "a"}"#,
            r#"{"kind": "A", "name": "a", "scope": "Galaxy"}"#,
            r#"{"kind": "A", "name": "a", "scope": "Cluster", "namespace": "b"}"#,
            r#"{"kind": "A", "name": "a", "scope": "Namespace"}"#,
            r#"{"kind": "A", "name": "a", "scope": "Namespace", "namespace": "b.c"}"#,
            r#"{"apiGroup": "A", "kind": "A", "name": "a", "scope": "Cluster"}"#,
        ],
    ),
];

pub(super) const RANGE: &[Row] = &[
    row(
        "spec.cidrs",
        Required("at least one CIDR required"),
        &["[]", "null"],
    ),
    row(
        "spec",
        Check(ranges),
        &[
            r#"{"cidrs": ["10.0.0.0/24", "fd00::/64", "10.0.1.0/24"]}"#,
            r#"{"cidrs": ["10.0.0.0"]}"#,
            r#"{"cidrs": ["10.0.0.1/24"]}"#,
            r#"{"cidrs": ["10.0.0.0/24", "10.0.1.0/24"]}"#,
        ],
    ),
];

pub(super) const ADDRESS: &[Row] = &[
    row("spec.parentRef", Required(""), &["null"]),
    row(
        "spec.parentRef",
        Check(parent),
        &[
            r#"{"resource": "services"}"#,
            r#"{"name": "a"}"#,
            r#"{"resource": "services", "name": "a/b"}"#,
            r#"{"resource": "a%b", "name": "a"}"#,
            r#"{"resource": "services", "name": "a", "namespace": ".."}"#,
            r#"{"group": "A", "resource": "services", "name": "a"}"#,
        ],
    ),
];

fn invalid(path: &str, key: &str, value: &str, why: &str) -> FieldError {
    FieldError::invalid(format!("{path}.{key}"), &value.into(), why)
}

fn has_backend(spec: &Value, path: &str, errors: &mut Errors) {
    if list(spec, &["rules"]).is_empty() && spec["defaultBackend"].is_null() {
        let why = "either `defaultBackend` or `rules` must be specified";
        errors.push(FieldError::invalid(path, &spec["rules"], why));
    }
}

/// A required name that can be a path segment.
fn segment(value: &Value, path: &str, key: &str, errors: &mut Errors) {
    match text(value, &[key]).unwrap_or_default() {
        "" => errors.push(FieldError::required(format!("{path}.{key}"), "")),
        name if !is_segment(name) => errors.push(invalid(path, key, name, SEGMENT)),
        _ => {}
    }
}

/// An optional API group.
fn group(value: &Value, path: &str, key: &str, errors: &mut Errors) {
    if let Some(group) = text(value, &[key]).filter(|group| !is_subdomain(group)) {
        errors.push(invalid(path, key, group, SUBDOMAIN));
    }
}

/// `validateIngressBackend`.
fn backend(value: &Value, path: &str, errors: &mut Errors) {
    let (resource, service) = (&value["resource"], &value["service"]);
    let nothing = Value::from("");
    match (resource.is_null(), service.is_null()) {
        (false, false) => {
            let why = "cannot set both resource and service backends";
            errors.push(FieldError::invalid(path, &nothing, why));
        }
        (true, true) => {
            let why = "resource or service backend is required";
            errors.push(FieldError::invalid(path, &nothing, why));
        }
        (false, true) => {
            let path = format!("{path}.resource");
            group(resource, &path, "apiGroup", errors);
            segment(resource, &path, "kind", errors);
            segment(resource, &path, "name", errors);
        }
        (true, false) => service_backend(service, path, errors),
    }
}

fn service_backend(service: &Value, path: &str, errors: &mut Errors) {
    match text(service, &["name"]).unwrap_or_default() {
        "" => errors.push(FieldError::required(format!("{path}.service.name"), "")),
        name if !is_label(name) => errors.push(invalid(path, "service.name", name, LABEL)),
        _ => {}
    }
    let port = &service["port"];
    let name = text(port, &["name"]).unwrap_or_default();
    let number = port["number"].as_i64().unwrap_or(0);
    if !name.is_empty() && number != 0 {
        let why = "cannot set both port name & port number";
        errors.push(FieldError::invalid(path, &"".into(), why));
    } else if !name.is_empty() {
        if let Some(problem) = port_name_problem(name) {
            errors.push(invalid(path, "service.port.name", name, problem));
        }
    } else if number == 0 {
        errors.push(FieldError::required(
            path,
            "port name or number is required",
        ));
    } else if !(1..=65_535).contains(&number) {
        let field = format!("{path}.service.port.number");
        errors.push(FieldError::invalid(field, &number.into(), PORT));
    }
}

/// A host name; its first label may be `*`.
fn host(value: &Value, path: &str, errors: &mut Errors) {
    let name = value.as_str().unwrap_or_default();
    let (is_right, why) = if name.contains('*') {
        let rest = name.strip_prefix("*.");
        (
            rest.is_some_and(is_subdomain) && name.len() <= 253,
            WILDCARD,
        )
    } else {
        (is_subdomain(name), SUBDOMAIN)
    };
    if !is_right {
        errors.push(FieldError::invalid(path, value, why));
    }
}

/// The host of a rule; without one, the rule is for all hosts.
fn rule_host(value: &Value, path: &str, errors: &mut Errors) {
    let name = value.as_str().unwrap_or_default();
    if name.is_empty() {
        return;
    }
    if name.parse::<IpAddr>().is_ok() {
        let why = "must be a DNS name, not an IP address";
        errors.push(FieldError::invalid(path, value, why));
    }
    host(value, path, errors);
}

/// `validateHTTPIngressPath`.
fn http_path(value: &Value, path: &str, errors: &mut Errors) {
    const TYPES: &[&str] = &["Exact", "ImplementationSpecific", "Prefix"];
    let Some(kind) = text(value, &["pathType"]) else {
        let field = format!("{path}.pathType");
        return errors.push(FieldError::required(field, "pathType must be specified"));
    };
    let of = text(value, &["path"]).unwrap_or_default();
    match kind {
        "Exact" | "Prefix" => {
            if !of.starts_with('/') {
                errors.push(invalid(path, "path", of, ABSOLUTE));
            }
            let sequences = ["//", "/./", "/../", "%2f", "%2F"];
            for part in sequences.iter().filter(|part| of.contains(**part)) {
                let why = format!("must not contain '{part}'");
                errors.push(invalid(path, "path", of, &why));
            }
            for end in ["/..", "/."].iter().filter(|end| of.ends_with(**end)) {
                let why = format!("cannot end with '{end}'");
                errors.push(invalid(path, "path", of, &why));
            }
        }
        "ImplementationSpecific" => {
            if !of.is_empty() && !of.starts_with('/') {
                errors.push(invalid(path, "path", of, ABSOLUTE));
            }
        }
        _ => errors.push(FieldError::unsupported(
            format!("{path}.pathType"),
            kind,
            TYPES,
        )),
    }
    let none = Value::Object(serde_json::Map::new());
    let target = value.get("backend").unwrap_or(&none);
    backend(target, &format!("{path}.backend"), errors);
}

/// The deprecated annotation does not contradict the field.
fn same_class(ingress: &Value, _: &str, errors: &mut Errors) {
    let annotation = text(ingress, &["metadata", "annotations", CLASS_ANNOTATION]);
    let class = text(ingress, &["spec", "ingressClassName"]);
    if let (Some(annotation), Some(class)) = (annotation, class)
        && annotation != class
    {
        let why = "must match `ingressClassName` when both are specified";
        errors.push(invalid("annotations", CLASS_ANNOTATION, annotation, why));
    }
}

/// `a.example/path` (`IsDomainPrefixedPath`).
fn controller(value: &Value, path: &str, errors: &mut Errors) {
    let name = value.as_str().unwrap_or_default();
    if name.is_empty() {
        return;
    }
    if name.len() > MAX_CONTROLLER_BYTES {
        errors.push(FieldError::too_long(path, MAX_CONTROLLER_BYTES));
    }
    let parts = name.split_once('/');
    let Some((domain, rest)) =
        parts.filter(|(domain, rest)| !domain.is_empty() && !rest.is_empty())
    else {
        let why = "must be a domain-prefixed path (such as \"acme.io/foo\")";
        return errors.push(FieldError::invalid(path, value, why));
    };
    if !is_subdomain(domain) {
        errors.push(FieldError::invalid(path, &domain.into(), SUBDOMAIN));
    }
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/-._~%!$&'()*+,;=:".contains(c);
    if !rest.chars().all(is_plain) {
        errors.push(FieldError::invalid(path, &rest.into(), HTTP_PATH));
    }
}

/// `validateIngressClassParametersReference`.
fn parameters(value: &Value, path: &str, errors: &mut Errors) {
    group(value, path, "apiGroup", errors);
    segment(value, path, "kind", errors);
    segment(value, path, "name", errors);
    let namespace = text(value, &["namespace"]);
    let field = format!("{path}.namespace");
    match (text(value, &["scope"]), namespace) {
        (None, _) => errors.push(FieldError::required(format!("{path}.scope"), "")),
        (Some("Cluster"), Some(_)) => {
            let why = "`parameters.scope` is set to 'Cluster'";
            errors.push(FieldError::forbidden(field, why));
        }
        (Some("Namespace"), None) => {
            let why = "`parameters.scope` is set to 'Namespace'";
            errors.push(FieldError::required(field, why));
        }
        (Some("Namespace"), Some(name)) if !is_label(name) => {
            errors.push(FieldError::invalid(field, &name.into(), LABEL));
        }
        (Some("Cluster" | "Namespace"), _) => {}
        (Some(scope), _) => errors.push(FieldError::unsupported(
            format!("{path}.scope"),
            scope,
            &["Cluster", "Namespace"],
        )),
    }
}

/// `validateServiceCIDRSpec`.
fn ranges(spec: &Value, path: &str, errors: &mut Errors) {
    let path = format!("{path}.cidrs");
    let all = list(spec, &["cidrs"]);
    if all.len() > 2 {
        let why = "may only hold up to 2 values";
        return errors.push(FieldError::invalid(path, spec, why));
    }
    let mut parsed = vec![];
    for (i, value) in all.iter().enumerate() {
        let field = format!("{path}[{i}]");
        let range: Option<IpNet> = value.as_str().and_then(|text| text.parse().ok());
        let Some(range) = range else {
            errors.push(FieldError::invalid(field, value, CIDR));
            continue;
        };
        let canonical = range.trunc().to_string();
        if *value != canonical {
            let why = format!("must be in canonical form ({canonical:?})");
            errors.push(FieldError::invalid(field, value, &why));
        }
        parsed.push(range);
    }
    if let [first, second] = parsed[..]
        && first.addr().is_ipv4() == second.addr().is_ipv4()
    {
        let why = "may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64";
        errors.push(FieldError::invalid(path, &spec["cidrs"], why));
    }
}

/// `validateIPAddressParentReference`.
fn parent(value: &Value, path: &str, errors: &mut Errors) {
    // The group of services is empty.
    if text(value, &["group"]).is_some_and(|group| !group.is_empty()) {
        group(value, path, "group", errors);
    }
    segment(value, path, "resource", errors);
    segment(value, path, "name", errors);
    if text(value, &["namespace"]).is_some_and(|name| !name.is_empty()) {
        segment(value, path, "namespace", errors);
    }
}

const STATUS: &[Row] = &[
    row(
        "status.loadBalancer.ingress[].ip",
        Text(is_ip, IP),
        &["\"nowhere\""],
    ),
    row(
        "status.loadBalancer.ingress[].hostname",
        Check(rule_host),
        &["\"10.0.0.1\"", "\"A\""],
    ),
];

/// Validates the status of an Ingress (`ValidateIngressLoadBalancerStatus`).
pub(crate) fn status(ingress: &Value, errors: &mut Errors) {
    table(STATUS, ingress, "", errors);
}

/// The name of an IPAddress: the address in its canonical form (`ValidateIPAddressName`).
pub(crate) fn ip_name(name: &str, errors: &mut Errors) {
    let problem = match name.parse::<IpAddr>() {
        Err(_) => IP.to_owned(),
        Ok(address) if address.to_canonical() != address => {
            "must not be an IPv4-mapped IPv6 address".to_owned()
        }
        Ok(address) if address.to_string() != name => {
            format!("must be in canonical form ({:?})", address.to_string())
        }
        Ok(_) => return,
    };
    errors.push(FieldError::invalid("metadata.name", &name.into(), &problem));
}

#[cfg(test)]
pub(crate) fn examples() -> Vec<(&'static str, &'static [Row], Value)> {
    use serde_json::json;
    let service = json!({"service": {"name": "web", "port": {"number": 80}}});
    let path = |kind: &str, path: &str| json!({"pathType": kind, "path": path, "backend": service});
    vec![
        (
            "Ingress",
            INGRESS,
            json!({"metadata": {"annotations": {CLASS_ANNOTATION: "a"}}, "spec": {
                "ingressClassName": "a",
                "defaultBackend": {"resource": {"apiGroup": "s.example", "kind": "Bucket", "name": "b"}},
                "tls": [{"hosts": ["*.a.example", "b.example"], "secretName": "s"}, {}],
                "rules": [{"host": "*.a.example", "http": {"paths": [path("Prefix", "/"), path("Exact", "/a/b.c"), path("ImplementationSpecific", "")]}}, {"host": "b.example"}, {}]}}),
        ),
        (
            "Ingress/status",
            STATUS,
            json!({"status": {"loadBalancer": {"ingress": [{"ip": "10.0.0.1"}, {"hostname": "a.example"}]}}}),
        ),
        (
            "IngressClass",
            CLASS,
            json!({"spec": {"controller": "a.example/b", "parameters": {"apiGroup": "a.example", "kind": "A", "name": "a", "scope": "Namespace", "namespace": "b"}}}),
        ),
        (
            "ServiceCIDR",
            RANGE,
            json!({"spec": {"cidrs": ["10.0.0.0/24", "fd00::/64"]}}),
        ),
        (
            "IPAddress",
            ADDRESS,
            json!({"spec": {"parentRef": {"group": "a.example", "resource": "as", "namespace": "b", "name": "c"}}}),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_an_address_is_canonical() {
        for (name, is_valid) in [
            ("10.0.0.1", true),
            ("fd00::1", true),
            ("010.0.0.1", false),
            ("fd00:0::1", false),
            ("FD00::1", false),
            ("::ffff:10.0.0.1", false),
            ("10.0.0.0/24", false),
            ("web", false),
        ] {
            let mut errors = vec![];
            ip_name(name, &mut errors);
            assert_eq!(errors.is_empty(), is_valid, "{name} {errors:?}");
        }
    }
}
