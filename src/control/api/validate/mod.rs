//! Validation of objects before they are stored.

mod batch;
mod job_status;
mod pod;
mod rules;
mod status;
mod update;

use serde_json::Value;

pub use status::status;
pub(crate) use update::ephemeral_update;
pub use update::{resize, update};

use super::error::FieldError;
use super::labels::{LABEL, is_label, is_label_value};
use super::object::{at, list, text};
use super::resources::Resource;
use super::selector::{self, Selector};

const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const LABEL_VALUE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";
const KEY: &str = "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')";

const QUALIFIED: &str = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";

const NOT_NEGATIVE: &str = "must be greater than or equal to 0";

const SEGMENT: &str = "may not be '.' or '..', and may not contain '/' or '%'";

type Errors = Vec<FieldError>;

/// Whether `name` is an RFC 1123 subdomain.
#[must_use]
pub(crate) fn is_subdomain(name: &str) -> bool {
    name.len() <= 253 && !name.is_empty() && name.split('.').all(is_label_part)
}

/// Whether `name` can be a path segment.
fn is_segment(name: &str) -> bool {
    name != "." && name != ".." && !name.contains(['/', '%'])
}

fn is_label_part(part: &str) -> bool {
    part.len() <= 253
        && !part.is_empty()
        && !part.starts_with('-')
        && !part.ends_with('-')
        && part
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

fn is_qualified(key: &str) -> bool {
    let (prefix, name) = key
        .split_once('/')
        .map_or((None, key), |(p, n)| (Some(p), n));
    prefix.is_none_or(is_subdomain) && !name.is_empty() && is_label_value(name)
}

/// Validates a new object.
#[must_use]
pub fn new(resource: &Resource, fresh: &Value) -> Errors {
    let mut errors = object(resource, fresh);
    if resource.kind == "Pod" && !list(fresh, &["spec", "ephemeralContainers"]).is_empty() {
        errors.push(FieldError::forbidden(
            "spec.ephemeralContainers",
            "cannot be set on create",
        ));
    }
    errors
}

/// Validates a complete object.
#[must_use]
pub fn object(resource: &Resource, object: &Value) -> Errors {
    let mut errors = Errors::new();
    metadata(resource, object, &mut errors);
    rules::object(resource.kind, object, &mut errors);
    match resource.kind {
        "Pod" => {
            pod::spec(&object["spec"], "spec", None, &mut errors);
            pod::images(object, &mut errors);
            pod::gates(object, &mut errors);
        }
        "Deployment" | "ReplicaSet" => workload(resource, object, &mut errors),
        "Job" => batch::job(object, &mut errors),
        "CronJob" => batch::cron_job(object, &mut errors),
        "Secret" => secret_data(object, &mut errors),
        "Service" => service(object, &mut errors),
        "RuntimeClass" if !text(object, &["handler"]).is_some_and(is_label) => {
            errors.push(FieldError::invalid("handler", &object["handler"], LABEL));
        }
        "PriorityClass" => priority_class(object, &mut errors),
        "Event" => {
            let involved = text(object, &["involvedObject", "namespace"]).unwrap_or_default();
            let own = super::object::namespace(object).unwrap_or_default();
            if !involved.is_empty() && involved != own {
                errors.push(FieldError::invalid(
                    "involvedObject.namespace",
                    &involved.into(),
                    "does not match event.namespace",
                ));
            }
        }
        other => {
            super::storage::validate(other, object, &mut errors);
            super::certificates::validate(other, object, &mut errors);
            super::rbac::validate(other, object, &mut errors);
        }
    }
    errors
}

fn priority_class(object: &Value, errors: &mut Errors) {
    let (name, value) = (
        super::object::name(object),
        object["value"].as_i64().unwrap_or(0),
    );
    let system = super::classes::SYSTEM
        .iter()
        .find(|(known, ..)| *known == name);
    match system {
        Some((_, known, _)) if *known != value => {
            errors.push(FieldError::forbidden(
                "metadata.name",
                "names that begin with system- are reserved for the system's classes",
            ));
        }
        Some(_) => {}
        None if name.starts_with("system-") => {
            errors.push(FieldError::forbidden(
                "metadata.name",
                "names that begin with system- are reserved for the system's classes",
            ));
        }
        None if value > 1_000_000_000 => {
            errors.push(FieldError::forbidden(
                "value",
                "the value of a class that is not a system class must be at most 1000000000",
            ));
        }
        None => {}
    }
    if let Some(policy) = text(object, &["preemptionPolicy"])
        .filter(|p| !["Never", "PreemptLowerPriority"].contains(p))
    {
        errors.push(FieldError::unsupported(
            "preemptionPolicy",
            policy,
            &["Never", "PreemptLowerPriority"],
        ));
    }
}

fn metadata(resource: &Resource, object: &Value, errors: &mut Errors) {
    let name = super::object::name(object);
    if name.is_empty() {
        errors.push(FieldError::required(
            "metadata.name",
            "name or generateName is required",
        ));
    } else {
        let (fine, rule) = match resource.kind {
            "Namespace" | "Service" => (is_label(name), LABEL),
            "ClusterTrustBundle" | "Role" | "ClusterRole" | "RoleBinding"
            | "ClusterRoleBinding" => (is_segment(name), SEGMENT),
            _ => (is_subdomain(name), SUBDOMAIN),
        };
        if resource.kind == "IPAddress" {
            rules::ip_name(name, errors);
        } else if !fine {
            errors.push(FieldError::invalid("metadata.name", &name.into(), rule));
        }
    }
    for (key, value) in at(object, &["metadata", "labels"])
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        if !is_qualified(key) {
            errors.push(FieldError::invalid(
                "metadata.labels",
                &key.as_str().into(),
                QUALIFIED,
            ));
        }
        if !value.as_str().is_some_and(is_label_value) {
            errors.push(FieldError::invalid("metadata.labels", value, LABEL_VALUE));
        }
    }
    let annotations = at(object, &["metadata", "annotations"]).and_then(Value::as_object);
    let size: usize = annotations
        .into_iter()
        .flatten()
        .map(|(k, v)| k.len() + v.as_str().map_or(0, str::len))
        .sum();
    if size > 256 << 10 {
        errors.push(FieldError::too_long("metadata.annotations", 256 << 10));
    }
    let owners = list(object, &["metadata", "ownerReferences"]);
    for (i, owner) in owners.iter().enumerate() {
        for key in ["apiVersion", "kind", "name", "uid"] {
            if text(owner, &[key]).is_none_or(str::is_empty) {
                errors.push(FieldError::required(
                    format!("metadata.ownerReferences[{i}].{key}"),
                    "must not be empty",
                ));
            }
        }
    }
    if owners.iter().filter(|o| o["controller"] == true).count() > 1 {
        errors.push(FieldError::invalid(
            "metadata.ownerReferences",
            &Value::from(owners.to_vec()),
            "Only one reference can have Controller set to true",
        ));
    }
}

fn workload(resource: &Resource, object: &Value, errors: &mut Errors) {
    if object["spec"]["replicas"].as_i64().is_some_and(|r| r < 0) {
        errors.push(FieldError::invalid(
            "spec.replicas",
            &object["spec"]["replicas"],
            "must be greater than or equal to 0",
        ));
    }
    let terms = at(object, &["spec", "selector"]).map_or(0, selector::terms);
    if terms > selector::MAX_TERMS {
        errors.push(FieldError::too_many(
            "spec.selector",
            terms,
            selector::MAX_TERMS,
        ));
        return;
    }
    let selector = at(object, &["spec", "selector"]).and_then(Selector::of_object);
    let labels = at(object, &["spec", "template", "metadata", "labels"]).and_then(Value::as_object);
    match selector {
        None => errors.push(FieldError::required("spec.selector", "")),
        Some(selector) => {
            let labels = labels
                .into_iter()
                .flatten()
                .map(|(k, v)| (k.clone(), v.as_str().unwrap_or_default().into()))
                .collect();
            if !selector.matches_labels(&labels) {
                let value = at(object, &["spec", "template", "metadata", "labels"])
                    .cloned()
                    .unwrap_or_default();
                errors.push(FieldError::invalid(
                    "spec.template.metadata.labels",
                    &value,
                    "`selector` does not match template `labels`",
                ));
            }
        }
    }
    if resource.kind == "Deployment" {
        let strategy = &object["spec"]["strategy"];
        match text(strategy, &["type"]) {
            Some("Recreate") if at(strategy, &["rollingUpdate"]).is_some() => {
                errors.push(FieldError::forbidden(
                    "spec.strategy.rollingUpdate",
                    "may not be specified when strategy `type` is 'Recreate'",
                ))
            }
            Some("Recreate") => {}
            Some("RollingUpdate") | None => {
                let rolling = &strategy["rollingUpdate"];
                let none = |value: &Value| *value == 0 || *value == "0%";
                if none(&rolling["maxSurge"]) && none(&rolling["maxUnavailable"]) {
                    errors.push(FieldError::invalid(
                        "spec.strategy.rollingUpdate.maxUnavailable",
                        &rolling["maxUnavailable"],
                        "may not be 0 when `maxSurge` is 0",
                    ));
                }
            }
            Some(other) => errors.push(FieldError::unsupported(
                "spec.strategy.type",
                other,
                &["Recreate", "RollingUpdate"],
            )),
        }
    }
    pod::spec(
        &object["spec"]["template"]["spec"],
        "spec.template.spec",
        Some(&["Always"]),
        errors,
    );
}

fn secret_data(object: &Value, errors: &mut Errors) {
    use base64::Engine as _;
    for (key, value) in at(object, &["data"])
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        let decoded = value
            .as_str()
            .map(|v| base64::engine::general_purpose::STANDARD.decode(v));
        if !matches!(decoded, Some(Ok(_))) && !value.is_null() {
            errors.push(FieldError::invalid(
                format!("data[{key}]"),
                &"<redacted>".into(),
                "must be base64",
            ));
        }
    }
    let account = "kubernetes.io/service-account.name";
    if text(object, &["type"]) == Some("kubernetes.io/service-account-token")
        && text(object, &["metadata", "annotations", account]).is_none_or(str::is_empty)
    {
        let field = format!("metadata.annotations[{account}]");
        errors.push(FieldError::required(field, ""));
    }
    let needed = match text(object, &["type"]) {
        Some("kubernetes.io/dockerconfigjson") => &[".dockerconfigjson"][..],
        Some("kubernetes.io/dockercfg") => &[".dockercfg"],
        Some("kubernetes.io/tls") => &["tls.crt", "tls.key"],
        _ => &[],
    };
    for key in needed {
        if object["data"].get(key).is_none() {
            errors.push(FieldError::required(format!("data[{key}]"), ""));
        }
    }
}

fn service(object: &Value, errors: &mut Errors) {
    let ports = list(object, &["spec", "ports"]);
    let headless = text(object, &["spec", "clusterIP"]) == Some("None");
    let external = text(object, &["spec", "type"]) == Some("ExternalName");
    if ports.is_empty() && !headless && !external {
        errors.push(FieldError::required("spec.ports", ""));
    }
    for (i, port) in ports.iter().enumerate() {
        if !port["port"]
            .as_i64()
            .is_some_and(|p| (1..=65535).contains(&p))
        {
            errors.push(FieldError::invalid(
                format!("spec.ports[{i}].port"),
                &port["port"],
                "must be between 1 and 65535, inclusive",
            ));
        }
        if ports.len() > 1 && text(port, &["name"]).is_none_or(str::is_empty) {
            errors.push(FieldError::required(format!("spec.ports[{i}].name"), ""));
        }
    }
    if let Some(kind) = text(object, &["spec", "type"])
        && !["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"].contains(&kind)
    {
        errors.push(FieldError::unsupported(
            "spec.type",
            kind,
            &["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"],
        ));
    }
    super::services::validate(object, errors);
}
