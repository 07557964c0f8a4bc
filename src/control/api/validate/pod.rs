//! Pod specs: of pods, and of what makes pods (control-plane spec, 4.2).

use std::collections::HashSet;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::{Errors, LABEL, is_label};
use crate::control::api::delete::MAX_GRACE;
use crate::control::api::error::FieldError;
use crate::control::api::object::{at, list, text};

/// Scheduling gates: names of their own kind, and no node while there are any (KEP-3521).
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

pub(super) fn spec(spec: &Value, path: &str, restart: Option<&[&str]>, errors: &mut Errors) {
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
    if let Some(grace) = at(spec, &["terminationGracePeriodSeconds"])
        && grace.as_i64().is_none_or(|g| g > MAX_GRACE)
    {
        errors.push(FieldError::invalid(
            format!("{path}.terminationGracePeriodSeconds"),
            grace,
            &format!("must be less than or equal to {MAX_GRACE}"),
        ));
    }
    let volumes = volumes(spec, path, errors);
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
    whole(spec, path, errors);
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

/// What is set for a pod as a whole: resources that can be, no less than its containers request together, and no limit
/// below that of a container (KEP-2837).
fn whole(spec: &Value, path: &str, errors: &mut Errors) {
    use crate::core::pod::resources::{Side, amounts, of_container, of_containers};
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
    // What cannot be read has errors of its own.
    let Ok(pod) = serde_json::from_value::<Pod>(json!({"spec": spec})) else {
        return;
    };
    let spec = crate::core::pod::spec(&pod);
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

/// The names of a pod's volumes.
fn volumes<'a>(spec: &'a Value, path: &str, errors: &mut Errors) -> HashSet<&'a str> {
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
    volumes
}

pub(super) fn container(
    container: &Value,
    path: &str,
    volumes: &HashSet<&str>,
    errors: &mut Errors,
) {
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
    ports(container, path, errors);
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

fn ports(container: &Value, path: &str, errors: &mut Errors) {
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
