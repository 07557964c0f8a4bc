//! Validation of objects before they are stored (control-plane spec, 4.2 to 4.4).

use std::collections::HashSet;

use serde_json::Value;

use super::error::FieldError;
use super::object::{at, list, text};
use super::resources::Resource;
use super::selector::Selector;

const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const LABEL_VALUE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";
const KEY: &str = "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')";

const SEGMENT: &str = "may not be '.' or '..', and may not contain '/' or '%'";

type Errors = Vec<FieldError>;

/// Whether `name` is an RFC 1123 label.
#[must_use]
pub fn is_label(name: &str) -> bool {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    name.len() <= 63
        && edge(name.chars().next())
        && edge(name.chars().last())
        && name
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

/// Whether `name` is an RFC 1123 subdomain.
#[must_use]
pub fn is_subdomain(name: &str) -> bool {
    name.len() <= 253 && !name.is_empty() && name.split('.').all(is_label_part)
}

/// Whether `name` can stand between two slashes of a path.
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

fn is_label_value(value: &str) -> bool {
    let edge = |c: Option<char>| c.is_none_or(|c| c.is_ascii_alphanumeric());
    value.len() <= 63
        && edge(value.chars().next())
        && edge(value.chars().last())
        && value
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

fn is_qualified(key: &str) -> bool {
    let (prefix, name) = key
        .split_once('/')
        .map_or((None, key), |(p, n)| (Some(p), n));
    prefix.is_none_or(is_subdomain) && !name.is_empty() && is_label_value(name)
}

/// Checks a complete object.
#[must_use]
pub fn object(resource: &Resource, object: &Value) -> Errors {
    let mut errors = Errors::new();
    metadata(resource, object, &mut errors);
    match resource.kind {
        "Pod" => pod_spec(&object["spec"], "spec", None, &mut errors),
        "Deployment" | "ReplicaSet" => workload(resource, object, &mut errors),
        "ConfigMap" | "Secret" => {
            for field in ["data", "binaryData"] {
                for key in at(object, &[field])
                    .and_then(Value::as_object)
                    .into_iter()
                    .flat_map(|m| m.keys())
                {
                    if key.is_empty()
                        || key.len() > 253
                        || !key
                            .chars()
                            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
                        || key == "."
                        || key == ".."
                    {
                        errors.push(FieldError::invalid(
                            format!("{field}[{key}]"),
                            &key.as_str().into(),
                            KEY,
                        ));
                    }
                }
            }
            if resource.kind == "Secret" {
                secret_data(object, &mut errors);
            }
        }
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
                "names that begin with system- belong to the system",
            ));
        }
        Some(_) => {}
        None if name.starts_with("system-") => {
            errors.push(FieldError::forbidden(
                "metadata.name",
                "names that begin with system- belong to the system",
            ));
        }
        None if value > 1_000_000_000 => {
            errors.push(FieldError::forbidden(
                "value",
                "a priority of one's own is at most 1000000000",
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
        if !fine {
            errors.push(FieldError::invalid("metadata.name", &name.into(), rule));
        }
    }
    for (key, value) in at(object, &["metadata", "labels"])
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        if !is_qualified(key) {
            errors.push(FieldError::invalid("metadata.labels", &key.as_str().into(), "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"));
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
        errors.push(FieldError {
            reason: "FieldValueTooLong",
            field: "metadata.annotations".into(),
            detail: "Too long: may not be more than 262144 bytes".into(),
        });
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
            Some("Recreate" | "RollingUpdate") | None => {}
            Some(other) => errors.push(FieldError::unsupported(
                "spec.strategy.type",
                other,
                &["Recreate", "RollingUpdate"],
            )),
        }
    }
    pod_spec(
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
}

fn pod_spec(spec: &Value, path: &str, restart: Option<&[&str]>, errors: &mut Errors) {
    if list(spec, &["containers"]).is_empty() {
        errors.push(FieldError::required(format!("{path}.containers"), ""));
    }
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
    match text(spec, &["dnsPolicy"]) {
        Some("None") if at(spec, &["dnsConfig"]).is_none() => {
            errors.push(FieldError::required(
                format!("{path}.dnsConfig"),
                "must provide `dnsConfig` when `dnsPolicy` is None",
            ));
        }
        Some("ClusterFirst" | "ClusterFirstWithHostNet" | "Default" | "None") | None => {}
        Some(other) => errors.push(FieldError::unsupported(
            format!("{path}.dnsPolicy"),
            other,
            &["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"],
        )),
    }
    if let Some(deadline) = at(spec, &["activeDeadlineSeconds"])
        && !deadline
            .as_i64()
            .is_some_and(|d| (1..=i64::from(i32::MAX)).contains(&d))
    {
        errors.push(FieldError::invalid(
            format!("{path}.activeDeadlineSeconds"),
            deadline,
            "must be between 1 and 2147483647, inclusive",
        ));
    }
    let mut volumes = HashSet::new();
    for (i, volume) in list(spec, &["volumes"]).iter().enumerate() {
        let here = format!("{path}.volumes[{i}]");
        let name = text(volume, &["name"]).unwrap_or_default();
        if !is_label(name) {
            errors.push(FieldError::invalid(
                format!("{here}.name"),
                &name.into(),
                LABEL,
            ));
        }
        if !volumes.insert(name) {
            errors.push(FieldError::duplicate(format!("{here}.name"), name));
        }
        let sources: Vec<&String> = volume
            .as_object()
            .into_iter()
            .flat_map(|m| m.iter())
            .filter(|(k, v)| *k != "name" && !v.is_null())
            .map(|(k, _)| k)
            .collect();
        if sources.len() > 1 {
            errors.push(FieldError::forbidden(
                format!("{here}.{}", sources[1]),
                "may not specify more than 1 volume type",
            ));
        }
    }
    let mut names = HashSet::new();
    for kind in ["initContainers", "containers"] {
        for (i, item) in list(spec, &[kind]).iter().enumerate() {
            let here = format!("{path}.{kind}[{i}]");
            let name = text(item, &["name"]).unwrap_or_default();
            if !name.is_empty() && !names.insert(name) {
                errors.push(FieldError::duplicate(format!("{here}.name"), name));
            }
            container(item, &here, &volumes, errors);
        }
    }
    resources(spec, path, errors);
    for side in ["limits", "requests"] {
        for (name, value) in at(spec, &["resources", side])
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
        {
            if !crate::core::pod::resources::is_pod_level(name) {
                let remedy = "of a pod as a whole only cpu, memory and hugepages-<size> can be set: set it in a container";
                errors.push(FieldError::invalid(
                    format!("{path}.resources.{side}[{name}]"),
                    value,
                    remedy,
                ));
            }
        }
    }
    for (i, toleration) in list(spec, &["tolerations"]).iter().enumerate() {
        let operator = text(toleration, &["operator"]).unwrap_or("Equal");
        if text(toleration, &["key"]).is_none_or(str::is_empty) && operator != "Exists" {
            errors.push(FieldError::invalid(
                format!("{path}.tolerations[{i}].operator"),
                &operator.into(),
                "operator must be Exists when `key` is empty, which means \"match all values and all keys\"",
            ));
        }
    }
}

fn container(container: &Value, path: &str, volumes: &HashSet<&str>, errors: &mut Errors) {
    let name = text(container, &["name"]).unwrap_or_default();
    if name.is_empty() {
        errors.push(FieldError::required(format!("{path}.name"), ""));
    } else if !is_label(name) {
        errors.push(FieldError::invalid(
            format!("{path}.name"),
            &name.into(),
            LABEL,
        ));
    }
    let image = text(container, &["image"]).unwrap_or_default();
    if image.is_empty() {
        errors.push(FieldError::required(format!("{path}.image"), ""));
    } else if image.trim() != image {
        errors.push(FieldError::invalid(
            format!("{path}.image"),
            &image.into(),
            "must not have leading or trailing whitespace",
        ));
    }
    if let Some(policy) = text(container, &["imagePullPolicy"])
        && !["Always", "IfNotPresent", "Never"].contains(&policy)
    {
        errors.push(FieldError::unsupported(
            format!("{path}.imagePullPolicy"),
            policy,
            &["Always", "IfNotPresent", "Never"],
        ));
    }
    let mut mount_paths = HashSet::new();
    for (i, mount) in list(container, &["volumeMounts"]).iter().enumerate() {
        let here = format!("{path}.volumeMounts[{i}]");
        let volume = text(mount, &["name"]).unwrap_or_default();
        if !volumes.contains(volume) {
            errors.push(FieldError::not_found(format!("{here}.name"), volume));
        }
        let at = text(mount, &["mountPath"]).unwrap_or_default();
        if at.is_empty() {
            errors.push(FieldError::required(format!("{here}.mountPath"), ""));
        } else if !mount_paths.insert(at) {
            errors.push(FieldError::invalid(
                format!("{here}.mountPath"),
                &at.into(),
                "must be unique",
            ));
        }
        if let Some(sub) = text(mount, &["subPath"])
            && (sub.starts_with('/') || sub.split('/').any(|part| part == ".."))
        {
            errors.push(FieldError::invalid(
                format!("{here}.subPath"),
                &sub.into(),
                "must be a relative path and must not contain '..'",
            ));
        }
    }
    for (i, port) in list(container, &["ports"]).iter().enumerate() {
        let here = format!("{path}.ports[{i}]");
        match port["containerPort"].as_i64() {
            None | Some(0) => {
                errors.push(FieldError::required(format!("{here}.containerPort"), ""))
            }
            Some(p) if !(1..=65535).contains(&p) => errors.push(FieldError::invalid(
                format!("{here}.containerPort"),
                &p.into(),
                "must be between 1 and 65535, inclusive",
            )),
            _ => {}
        }
        if let Some(protocol) = text(port, &["protocol"])
            && !["TCP", "UDP", "SCTP"].contains(&protocol)
        {
            errors.push(FieldError::unsupported(
                format!("{here}.protocol"),
                protocol,
                &["SCTP", "TCP", "UDP"],
            ));
        }
    }
    for (i, env) in list(container, &["env"]).iter().enumerate() {
        let name = text(env, &["name"]).unwrap_or_default();
        if name.is_empty() {
            errors.push(FieldError::required(format!("{path}.env[{i}].name"), ""));
        } else if !name.chars().all(|c| (' '..='~').contains(&c) && c != '=') {
            errors.push(FieldError::invalid(
                format!("{path}.env[{i}].name"),
                &name.into(),
                "a valid environment variable name must consist only of printable ASCII characters other than '='",
            ));
        }
    }
    resources(container, path, errors);
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if let Some(probe_value) = at(container, &[probe])
            && !["exec", "httpGet", "tcpSocket", "grpc"]
                .iter()
                .any(|h| at(probe_value, &[h]).is_some())
        {
            errors.push(FieldError::required(
                format!("{path}.{probe}"),
                "must specify a handler type",
            ));
        }
    }
    let security = &container["securityContext"];
    if security["privileged"] == true && security["allowPrivilegeEscalation"] == false {
        errors.push(FieldError::invalid(
            format!("{path}.securityContext"),
            &"".into(),
            "cannot set `allowPrivilegeEscalation` to false and `privileged` to true",
        ));
    }
}

fn resources(container: &Value, path: &str, errors: &mut Errors) {
    use crate::core::quantity::Quantity;
    let mut limits = std::collections::BTreeMap::new();
    for kind in ["limits", "requests"] {
        for (name, value) in at(container, &["resources", kind])
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
        {
            let here = format!("{path}.resources.{kind}[{name}]");
            let shown = value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_owned);
            match shown.parse::<Quantity>() {
                Err(error) => errors.push(FieldError::invalid(here, value, &error.to_string())),
                Ok(quantity) if quantity < Quantity::ZERO => errors.push(FieldError::invalid(
                    here,
                    value,
                    "must be greater than or equal to 0",
                )),
                Ok(quantity) if kind == "limits" => {
                    limits.insert(name.clone(), (quantity, shown));
                }
                Ok(quantity) => {
                    if let Some((limit, text)) = limits.get(name)
                        && quantity > *limit
                    {
                        errors.push(FieldError::invalid(
                            format!("{path}.resources.requests"),
                            value,
                            &format!("must be less than or equal to {name} limit of {text}"),
                        ));
                    }
                }
            }
        }
    }
}

/// Checks what an update may change.
#[must_use]
pub fn update(resource: &Resource, old: &Value, new: &Value) -> Errors {
    let mut errors = Errors::new();
    if super::object::deleting(old) {
        let had: HashSet<&Value> = list(old, &["metadata", "finalizers"]).iter().collect();
        if list(new, &["metadata", "finalizers"])
            .iter()
            .any(|f| !had.contains(f))
        {
            errors.push(FieldError::forbidden(
                "metadata.finalizers",
                "no new finalizers can be added if the object is being deleted",
            ));
        }
    }
    match resource.kind {
        "Deployment" | "ReplicaSet" if old["spec"]["selector"] != new["spec"]["selector"] => {
            errors.push(FieldError::invalid(
                "spec.selector",
                &new["spec"]["selector"],
                "field is immutable",
            ));
        }
        "Pod" => pod_update(old, new, &mut errors),
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
        "Service" => {
            let (before, after) = (
                text(old, &["spec", "clusterIP"]),
                text(new, &["spec", "clusterIP"]),
            );
            if before.is_some() && before != after && new["spec"]["type"] != "ExternalName" {
                errors.push(FieldError::invalid(
                    "spec.clusterIPs[0]",
                    &after.unwrap_or_default().into(),
                    "may not change once set",
                ));
            }
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
                "the value cannot be changed: make another class",
            ));
        }
        other => {
            super::storage::validate_update(other, old, new, &mut errors);
            super::certificates::validate_update(other, old, new, &mut errors);
            super::rbac::validate_update(other, old, new, &mut errors);
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

/// Checks a write to `ephemeralcontainers`: they are only ever added.
#[must_use]
pub fn ephemeral_update(old: &Value, new: &Value) -> Errors {
    let mut errors = Errors::new();
    let path = "spec.ephemeralContainers";
    let (before, after) = (
        list(old, &["spec", "ephemeralContainers"]),
        list(new, &["spec", "ephemeralContainers"]),
    );
    for container in before {
        let name = text(container, &["name"]).unwrap_or_default();
        match after.iter().find(|c| c["name"] == container["name"]) {
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
    let volumes: HashSet<&str> = list(new, &["spec", "volumes"])
        .iter()
        .filter_map(|v| text(v, &["name"]))
        .collect();
    let taken: Vec<&str> = ["containers", "initContainers"]
        .iter()
        .flat_map(|kind| list(new, &["spec", kind]))
        .filter_map(|c| text(c, &["name"]))
        .collect();
    let mut seen = HashSet::new();
    for (i, item) in after.iter().enumerate() {
        let here = format!("{path}[{i}]");
        container(item, &here, &volumes, &mut errors);
        let name = text(item, &["name"]).unwrap_or_default();
        if taken.contains(&name) || !seen.insert(name) {
            errors.push(FieldError::duplicate(format!("{here}.name"), name));
        }
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
                    "an ephemeral container cannot have it",
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

/// Checks a write to `resize`: CPU and memory only, and what is set stays set (KEP-1287).
#[must_use]
pub fn resize(old: &Value, new: &Value) -> Errors {
    let mut errors = Errors::new();
    if ["Succeeded", "Failed"].contains(&text(old, &["status", "phase"]).unwrap_or_default()) {
        errors.push(FieldError::forbidden(
            "spec",
            "a pod that has ended cannot be resized",
        ));
    }
    if old["spec"]["resources"] != new["spec"]["resources"] {
        errors.push(FieldError::forbidden(
            "spec.resources",
            "what is set for the pod as a whole cannot be resized yet",
        ));
    }
    let class = |pod: &Value| {
        serde_json::from_value(pod["spec"].clone())
            .map(|spec| crate::core::pod::qos::of(&spec).name())
            .unwrap_or_default()
    };
    if class(old) != class(new) {
        errors.push(FieldError::invalid(
            "spec",
            &class(new).into(),
            "a resize may not change the pod's QoS class",
        ));
    }
    for kind in ["containers", "initContainers"] {
        for (i, (before, after)) in list(old, &["spec", kind])
            .iter()
            .zip(list(new, &["spec", kind]))
            .enumerate()
        {
            let here = format!("spec.{kind}[{i}].resources");
            if before["resources"] != after["resources"]
                && kind == "initContainers"
                && before["restartPolicy"] != "Always"
            {
                errors.push(FieldError::forbidden(
                    here.clone(),
                    "of the init containers only sidecars can be resized",
                ));
            }
            for side in ["requests", "limits"] {
                let of = |container: &Value| {
                    at(container, &["resources", side])
                        .and_then(Value::as_object)
                        .cloned()
                        .unwrap_or_default()
                };
                let (before, after) = (of(before), of(after));
                for name in before.keys().chain(after.keys()) {
                    if before.get(name) != after.get(name)
                        && !["cpu", "memory"].contains(&name.as_str())
                    {
                        errors.push(FieldError::forbidden(
                            format!("{here}.{side}[{name}]"),
                            "only cpu and memory can be resized",
                        ));
                    }
                    if !after.contains_key(name) && before.contains_key(name) {
                        errors.push(FieldError::forbidden(
                            format!("{here}.{side}"),
                            "what is set cannot be removed",
                        ));
                    }
                }
            }
        }
    }
    errors
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
    ] {
        match old["spec"].get(key) {
            Some(value) => comparable[key] = value.clone(),
            None => {
                comparable.as_object_mut().map(|m| m.remove(key));
            }
        }
    }
    if comparable != old["spec"] {
        errors.push(FieldError::forbidden("spec", "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"));
    }
    let tolerations = list(new, &["spec", "tolerations"]);
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
