//! Containers of a pod, their probes and hooks (`validateContainerCommon` and its callees).

use std::collections::HashSet;

use serde_json::Value;

use super::super::{
    Errors, KEY, LABEL, NOT_NEGATIVE, QUALIFIED, SUBDOMAIN, is_label, is_qualified, is_subdomain,
};
use super::Rule::{Absent, Between, Check, Most, OneOf, Required, Text};
use super::syntax::{
    ENV, HEADER, ID, NO_BACKSTEPS, PORT, POSITIVE, at_most_one, descending_path, has_no_backsteps,
    is_config_key, is_env, is_header, port, port_name, unique_as, unique_names,
};
use super::{Row, row, table};
use crate::api::error::FieldError;
use crate::api::object::{at, list, text};

const MAX: i64 = i32::MAX as i64;

const PROPAGATIONS: &[&str] = &["Bidirectional", "HostToContainer", "None"];
const RECURSIONS: &[&str] = &["Disabled", "Enabled", "IfPossible"];
const PULLS: &[&str] = &["Always", "IfNotPresent", "Never"];
const MESSAGES: &[&str] = &["FallbackToLogsOnError", "File"];
const RESTARTS: &[&str] = &["Always", "Never", "OnFailure"];
const ACTIONS: &[&str] = &["Restart", "RestartAllContainers"];

/// Rules for all containers.
const CONTAINER: &[Row] = &[
    row("name", Required(""), &["\"\""]),
    row("name", Text(is_label, LABEL), &["\"A\""]),
    row("image", Required(""), &["\"\""]),
    row("imagePullPolicy", OneOf(PULLS), &["\"Sometimes\""]),
    row("terminationMessagePolicy", OneOf(MESSAGES), &["\"Both\""]),
    row("restartPolicy", OneOf(RESTARTS), &["\"Sometimes\""]),
    row("restartPolicyRules", Most(20), &[]),
    row(
        "restartPolicyRules[].action",
        OneOf(ACTIONS),
        &["\"Reboot\""],
    ),
    row(
        "restartPolicyRules[].exitCodes",
        Required("must be specified"),
        &["null"],
    ),
    row(
        "restartPolicyRules[].exitCodes.operator",
        OneOf(&["In", "NotIn"]),
        &["\"Like\""],
    ),
    row("ports[].name", Check(port_name), &["\"Web_Port\""]),
    row(
        "ports[].containerPort",
        Check(container_port),
        &["0", "65536"],
    ),
    row("ports[].hostPort", Check(host_port), &["70000"]),
    row(
        "ports[].protocol",
        OneOf(&["SCTP", "TCP", "UDP"]),
        &["\"ICMP\""],
    ),
    row(
        "ports",
        Check(unique_names),
        &[r#"[{"name": "a", "containerPort": 1}, {"name": "a", "containerPort": 2}]"#],
    ),
    row("env[].name", Required(""), &["\"\""]),
    row("env[].name", Text(is_env, ENV), &["\"A=B\""]),
    row(
        "env[]",
        Check(value_from),
        &[
            r#"{"name": "A", "valueFrom": {}}"#,
            r#"{"name": "A", "value": "x", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}"#,
            r#"{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}, "secretKeyRef": {"name": "s", "key": "k"}}}"#,
        ],
    ),
    row(
        "env[].valueFrom.fieldRef",
        Check(env_field),
        &[r#"{"fieldPath": "spec.containers"}"#],
    ),
    row(
        "env[].valueFrom.resourceFieldRef",
        Check(resource_field),
        &[
            r#"{"resource": "limits.gpu"}"#,
            r#"{"resource": "limits.cpu", "divisor": "2"}"#,
        ],
    ),
    row(
        "env[].valueFrom.configMapKeyRef.key",
        Required(""),
        &["\"\""],
    ),
    row(
        "env[].valueFrom.configMapKeyRef.key",
        Text(is_config_key, KEY),
        &["\"a/b\""],
    ),
    row("env[].valueFrom.secretKeyRef.key", Required(""), &["\"\""]),
    row(
        "env[].valueFrom.secretKeyRef.key",
        Text(is_config_key, KEY),
        &["\"a b\""],
    ),
    row("env[].valueFrom.fileKeyRef.key", Required(""), &["\"\""]),
    row(
        "env[].valueFrom.fileKeyRef.key",
        Text(is_env, ENV),
        &["\"a=b\""],
    ),
    row(
        "env[].valueFrom.fileKeyRef.volumeName",
        Required(""),
        &["\"\""],
    ),
    row("env[].valueFrom.fileKeyRef.path", Required(""), &["\"\""]),
    row(
        "env[].valueFrom.fileKeyRef.path",
        Text(has_no_backsteps, NO_BACKSTEPS),
        &["\"../x\""],
    ),
    row("envFrom[].prefix", Text(is_env, ENV), &["\"A=\""]),
    row(
        "envFrom",
        Check(env_from),
        &[
            "[{}]",
            r#"[{"configMapRef": {"name": "c"}, "secretRef": {"name": "s"}}]"#,
        ],
    ),
    row("envFrom[].configMapRef.name", Required(""), &["\"\""]),
    row(
        "envFrom[].configMapRef.name",
        Text(is_subdomain, SUBDOMAIN),
        &["\"A_B\""],
    ),
    row("envFrom[].secretRef.name", Required(""), &["\"\""]),
    row(
        "envFrom[].secretRef.name",
        Text(is_subdomain, SUBDOMAIN),
        &["\"A_B\""],
    ),
    row("volumeMounts[].name", Required(""), &["\"\""]),
    row("volumeMounts[].mountPath", Required(""), &["\"\""]),
    row(
        "volumeMounts[].subPath",
        Check(descending_path),
        &["\"a/../b\""],
    ),
    row(
        "volumeMounts[].subPathExpr",
        Check(descending_path),
        &["\"/$(A)\""],
    ),
    row(
        "volumeMounts[]",
        Check(one_sub_path),
        &[r#"{"name": "v", "mountPath": "/v", "subPath": "a", "subPathExpr": "b"}"#],
    ),
    row(
        "volumeMounts[].mountPropagation",
        OneOf(PROPAGATIONS),
        &["\"Shared\""],
    ),
    row(
        "volumeMounts[].recursiveReadOnly",
        OneOf(RECURSIONS),
        &["\"Maybe\""],
    ),
    row(
        "volumeMounts[]",
        Check(recursive),
        &[r#"{"name": "v", "mountPath": "/v", "recursiveReadOnly": "Enabled"}"#],
    ),
    row(
        "volumeMounts",
        Check(mount_paths),
        &[r#"[{"name": "v", "mountPath": "/v"}, {"name": "w", "mountPath": "/v"}]"#],
    ),
    row("volumeDevices[].name", Required(""), &["\"\""]),
    row("volumeDevices[].devicePath", Required(""), &["\"\""]),
    row(
        "volumeDevices[].devicePath",
        Text(has_no_backsteps, "can not contain backsteps ('..')"),
        &["\"/dev/../x\""],
    ),
    row(
        "volumeDevices",
        Check(device_paths),
        &[r#"[{"name": "a", "devicePath": "/dev/x"}, {"name": "b", "devicePath": "/dev/x"}]"#],
    ),
    row("resizePolicy[].resourceName", Required(""), &["\"\""]),
    row(
        "resizePolicy[].resourceName",
        OneOf(&["cpu", "memory"]),
        &["\"disk\""],
    ),
    row("resizePolicy[].restartPolicy", Required(""), &["\"\""]),
    row(
        "resizePolicy[].restartPolicy",
        OneOf(&["NotRequired", "RestartContainer"]),
        &["\"Maybe\""],
    ),
    row(
        "resizePolicy",
        Check(resize_names),
        &[
            r#"[{"resourceName": "cpu", "restartPolicy": "NotRequired"}, {"resourceName": "cpu", "restartPolicy": "NotRequired"}]"#,
        ],
    ),
    row(
        "securityContext.runAsUser",
        Between(0, MAX, ID),
        &["-1", "2147483648"],
    ),
    row("securityContext.runAsGroup", Between(0, MAX, ID), &["-1"]),
    row(
        "securityContext.procMount",
        OneOf(&["Default", "Unmasked"]),
        &["\"Hidden\""],
    ),
    row(
        "securityContext.seccompProfile",
        Check(seccomp),
        &[
            r#"{"type": "Localhost"}"#,
            r#"{"type": "Localhost", "localhostProfile": "../x"}"#,
        ],
    ),
    row(
        "securityContext.appArmorProfile",
        Check(app_armor),
        &[r#"{"type": "RuntimeDefault", "localhostProfile": "x"}"#],
    ),
    row(
        "securityContext",
        Check(escalation),
        &[
            r#"{"allowPrivilegeEscalation": false, "privileged": true}"#,
            r#"{"allowPrivilegeEscalation": false, "capabilities": {"add": ["CAP_SYS_ADMIN"]}}"#,
        ],
    ),
];

/// Rules for probes.
const PROBE: &[Row] = &[
    row(
        "initialDelaySeconds",
        Between(0, MAX, NOT_NEGATIVE),
        &["-1"],
    ),
    row("timeoutSeconds", Between(0, MAX, NOT_NEGATIVE), &["-1"]),
    row("periodSeconds", Between(0, MAX, NOT_NEGATIVE), &["-1"]),
    row("successThreshold", Between(0, MAX, NOT_NEGATIVE), &["-1"]),
    row("failureThreshold", Between(0, MAX, NOT_NEGATIVE), &["-1"]),
    row(
        "terminationGracePeriodSeconds",
        Between(1, i64::MAX, POSITIVE),
        &["0"],
    ),
    row("grpc.port", Between(1, 65535, PORT), &["0"]),
];

/// Rules for the actions of probes and hooks.
const HANDLER: &[Row] = &[
    row("exec.command", Required(""), &["[]"]),
    row("httpGet.port", Required(""), &["null"]),
    row("httpGet.port", Check(port), &["0"]),
    row("httpGet.scheme", OneOf(&["HTTP", "HTTPS"]), &["\"FTP\""]),
    row(
        "httpGet.httpHeaders[].name",
        Text(is_header, HEADER),
        &["\"a b\""],
    ),
    row("tcpSocket.port", Required(""), &["null"]),
    row("tcpSocket.port", Check(port), &["\"UPPER\""]),
];

/// Fields that only regular containers and sidecars may have.
const HOOKS: &[Row] = &[
    row(
        "livenessProbe",
        Check(single_success),
        &[r#"{"exec": {"command": ["a"]}, "successThreshold": 2}"#],
    ),
    row(
        "startupProbe",
        Check(single_success),
        &[r#"{"exec": {"command": ["a"]}, "successThreshold": 2}"#],
    ),
    row(
        "livenessProbe",
        Check(probe),
        &[
            r#"{"exec": {"command": ["a"]}, "tcpSocket": {"port": 1}}"#,
            "{}",
        ],
    ),
    row(
        "readinessProbe",
        Check(probe),
        &[r#"{"httpGet": {"port": 1}, "exec": {"command": ["a"]}}"#],
    ),
    row(
        "readinessProbe",
        Check(readiness),
        &[r#"{"exec": {"command": ["a"]}, "terminationGracePeriodSeconds": 1}"#],
    ),
    row("startupProbe", Check(probe), &["{}"]),
    row("lifecycle.postStart", Check(hook), &["{}"]),
    row(
        "lifecycle.preStop",
        Check(hook),
        &[r#"{"sleep": {"seconds": 1}, "exec": {"command": ["a"]}}"#],
    ),
];

const NOT_IN_INIT: &str = "may not be set for init containers without restartPolicy=Always";

/// Rules for init containers that are not sidecars.
const INIT: &[Row] = &[
    row("lifecycle", Absent(NOT_IN_INIT), &["{}"]),
    row("livenessProbe", Absent(NOT_IN_INIT), &["{}"]),
    row("readinessProbe", Absent(NOT_IN_INIT), &["{}"]),
    row("startupProbe", Absent(NOT_IN_INIT), &["{}"]),
    row(
        "resizePolicy[].restartPolicy",
        Check(init_resize),
        &["\"RestartContainer\""],
    ),
];

/// Validates one container. `is_init` is set for init containers; sidecars may have the fields of regular containers.
pub fn check(container: &Value, path: &str, is_init: bool, errors: &mut Errors) {
    table(CONTAINER, container, path, errors);
    let is_sidecar = text(container, &["restartPolicy"]) == Some("Always");
    if is_init && !is_sidecar {
        table(INIT, container, path, errors);
    } else {
        table(HOOKS, container, path, errors);
    }
    restart_rules(container, path, errors);
    let privileged = at(container, &["securityContext", "privileged"]) == Some(&Value::Bool(true));
    for mount in list(container, &["volumeMounts"]) {
        if text(mount, &["mountPropagation"]) == Some("Bidirectional") && !privileged {
            errors.push(FieldError::forbidden(
                format!("{path}.volumeMounts.mountPropagation"),
                "Bidirectional mount propagation is available only to privileged containers",
            ));
        }
    }
}

fn restart_rules(container: &Value, path: &str, errors: &mut Errors) {
    let has_policy = !container["restartPolicy"].is_null();
    if !has_policy && !list(container, &["restartPolicyRules"]).is_empty() {
        errors.push(FieldError::required(
            format!("{path}.restartPolicy"),
            "must specify restartPolicy when restart rules are used",
        ));
    }
}

fn container_port(value: &Value, path: &str, errors: &mut Errors) {
    match value.as_i64() {
        Some(0) => errors.push(FieldError::required(path, "")),
        Some(1..=65535) => {}
        _ => errors.push(FieldError::invalid(path, value, PORT)),
    }
}

/// A port of the node; 0 means no port.
fn host_port(value: &Value, path: &str, errors: &mut Errors) {
    if !value
        .as_i64()
        .is_some_and(|port| (0..=65535).contains(&port))
    {
        errors.push(FieldError::invalid(path, value, PORT));
    }
}

fn value_from(env: &Value, path: &str, errors: &mut Errors) {
    let source = &env["valueFrom"];
    if source.is_null() {
        return;
    }
    let kinds = [
        "fieldRef",
        "resourceFieldRef",
        "configMapKeyRef",
        "secretKeyRef",
        "fileKeyRef",
    ];
    let count = kinds
        .iter()
        .filter(|kind| !source[**kind].is_null())
        .count();
    let has_value = text(env, &["value"]).is_some_and(|value| !value.is_empty());
    let problem = match count {
        0 => {
            "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`"
        }
        _ if has_value => "may not be specified when `value` is not empty",
        1 => return,
        _ => "may not have more than one field specified at a time",
    };
    errors.push(FieldError::invalid(
        format!("{path}.valueFrom"),
        &"".into(),
        problem,
    ));
}

fn env_field(field: &Value, path: &str, errors: &mut Errors) {
    let paths = [
        "metadata.name",
        "metadata.namespace",
        "metadata.uid",
        "spec.nodeName",
        "spec.serviceAccountName",
        "status.hostIP",
        "status.hostIPs",
        "status.podIP",
        "status.podIPs",
    ];
    field_ref(field, path, &paths, errors);
}

/// A pod field for an environment variable or a file (`validateObjectFieldSelector`).
pub fn field_ref(field: &Value, path: &str, paths: &[&str], errors: &mut Errors) {
    let Some(named) = text(field, &["fieldPath"]).filter(|named| !named.is_empty()) else {
        return errors.push(FieldError::required(format!("{path}.fieldPath"), ""));
    };
    let subscript = named
        .strip_suffix("']")
        .and_then(|named| named.split_once("['"));
    match subscript {
        Some(("metadata.annotations" | "metadata.labels", key))
            if is_qualified(&key.to_lowercase()) => {}
        Some(("metadata.annotations" | "metadata.labels", key)) => {
            errors.push(FieldError::invalid(path, &key.into(), QUALIFIED));
        }
        Some((other, _)) => {
            errors.push(FieldError::invalid(
                path,
                &other.into(),
                "does not support subscript",
            ));
        }
        None if !paths.contains(&named) => {
            errors.push(FieldError::unsupported(
                format!("{path}.fieldPath"),
                named,
                paths,
            ));
        }
        None => {}
    }
}

const RESOURCES: [&str; 6] = [
    "limits.cpu",
    "limits.ephemeral-storage",
    "limits.memory",
    "requests.cpu",
    "requests.ephemeral-storage",
    "requests.memory",
];
const SIZES: [&str; 13] = [
    "1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei",
];

/// A container resource for an environment variable or a file (`validateContainerResourceFieldSelector`).
pub(crate) fn resource_field(field: &Value, path: &str, errors: &mut Errors) {
    let Some(resource) = text(field, &["resource"]).filter(|name| !name.is_empty()) else {
        return errors.push(FieldError::required(format!("{path}.resource"), ""));
    };
    let is_huge = ["limits.hugepages-", "requests.hugepages-"]
        .iter()
        .any(|p| resource.starts_with(p));
    if !is_huge && !RESOURCES.contains(&resource) {
        return errors.push(FieldError::unsupported(
            format!("{path}.resource"),
            resource,
            &RESOURCES,
        ));
    }
    let divisor = match &field["divisor"] {
        Value::String(text) => text.clone(),
        Value::Null => return,
        number => number.to_string(),
    };
    let (divisors, kind): (&[&str], _) = match resource.split_once('.') {
        Some((_, "cpu")) => (&["1m", "1"], "cpu"),
        Some((_, "memory")) => (&SIZES, "memory"),
        Some((_, "ephemeral-storage")) => (&SIZES, "local ephemeral storage"),
        _ => (&SIZES, "hugepages"),
    };
    if !matches!(divisor.as_str(), "" | "0") && !divisors.contains(&divisor.as_str()) {
        let values = if kind == "cpu" {
            "1m and 1".to_owned()
        } else {
            divisors.join(", ")
        };
        errors.push(FieldError::invalid(
            format!("{path}.divisor"),
            &resource.into(),
            &format!("only divisor's values {values} are supported with the {kind} resource"),
        ));
    }
}

fn env_from(sources: &Value, path: &str, errors: &mut Errors) {
    for source in sources.as_array().into_iter().flatten() {
        let problem = match (
            source["configMapRef"].is_null(),
            source["secretRef"].is_null(),
        ) {
            (true, true) => "must specify one of: `configMapRef` or `secretRef`",
            (false, false) => "may not have more than one field specified at a time",
            _ => continue,
        };
        errors.push(FieldError::invalid(path, &"".into(), problem));
    }
}

fn one_sub_path(mount: &Value, path: &str, errors: &mut Errors) {
    let is_set = |key: &str| text(mount, &[key]).is_some_and(|text| !text.is_empty());
    if is_set("subPath") && is_set("subPathExpr") {
        errors.push(FieldError::invalid(
            format!("{path}.subPathExpr"),
            &mount["subPathExpr"],
            "subPathExpr and subPath are mutually exclusive",
        ));
    }
}

fn recursive(mount: &Value, path: &str, errors: &mut Errors) {
    if !matches!(
        text(mount, &["recursiveReadOnly"]),
        Some("Enabled" | "IfPossible")
    ) {
        return;
    }
    let field = || format!("{path}.recursiveReadOnly");
    if mount["readOnly"] != true {
        errors.push(FieldError::forbidden(
            field(),
            "may only be specified when readOnly is true",
        ));
    }
    if text(mount, &["mountPropagation"]).is_some_and(|mode| mode != "None") {
        errors.push(FieldError::forbidden(
            field(),
            "may only be specified when mountPropagation is None or not specified",
        ));
    }
}

fn unique_paths(items: &Value, path: &str, key: &str, errors: &mut Errors) {
    let mut seen = HashSet::new();
    for (i, item) in items.as_array().into_iter().flatten().enumerate() {
        if let Some(value) = text(item, &[key]).filter(|value| !seen.insert(*value)) {
            errors.push(FieldError::invalid(
                format!("{path}[{i}].{key}"),
                &value.into(),
                "must be unique",
            ));
        }
    }
}

fn mount_paths(mounts: &Value, path: &str, errors: &mut Errors) {
    unique_paths(mounts, path, "mountPath", errors);
}

fn device_paths(devices: &Value, path: &str, errors: &mut Errors) {
    unique_paths(devices, path, "devicePath", errors);
    unique_paths(devices, path, "name", errors);
}

fn resize_names(policies: &Value, path: &str, errors: &mut Errors) {
    unique_as(policies, "resourceName", |i| format!("{path}[{i}]"), errors);
}

fn init_resize(policy: &Value, path: &str, errors: &mut Errors) {
    if policy == "RestartContainer" {
        errors.push(FieldError::invalid(
            path,
            policy,
            "must not be set to 'RestartContainer' for non-sidecar initContainers",
        ));
    }
}

/// A seccomp profile (`validateSeccompProfileField`).
pub fn seccomp(profile: &Value, path: &str, errors: &mut Errors) {
    let kinds = ["Localhost", "RuntimeDefault", "Unconfined"];
    localhost_profile(profile, path, "seccomp", &kinds, errors);
    if text(profile, &["type"]) == Some("Localhost") && !profile["localhostProfile"].is_null() {
        descending_path(
            &profile["localhostProfile"],
            &format!("{path}.localhostProfile"),
            errors,
        );
    }
}

/// An AppArmor profile (`ValidateAppArmorProfileField`).
pub(crate) fn app_armor(profile: &Value, path: &str, errors: &mut Errors) {
    let kinds = ["Localhost", "RuntimeDefault", "Unconfined"];
    localhost_profile(profile, path, "AppArmor", &kinds, errors);
    let field = format!("{path}.localhostProfile");
    if let Some(name) = text(profile, &["localhostProfile"]) {
        if name.trim() != name {
            errors.push(FieldError::invalid(
                &*field,
                &name.into(),
                "must not be padded with whitespace",
            ));
        }
        if name.len() > 4095 {
            errors.push(FieldError::too_long(&*field, 4095));
        }
    }
}

fn localhost_profile(profile: &Value, path: &str, what: &str, kinds: &[&str], errors: &mut Errors) {
    let kind = text(profile, &["type"]).unwrap_or_default();
    let field = if what == "seccomp" {
        "seccompProfile"
    } else {
        "appArmorProfile"
    };
    if kind.is_empty() {
        let why = format!("type is required when {field} is set");
        errors.push(FieldError::required(format!("{path}.type"), &why));
    } else if !kinds.contains(&kind) {
        errors.push(FieldError::unsupported(format!("{path}.type"), kind, kinds));
    }
    let named = &profile["localhostProfile"];
    if kind == "Localhost" {
        if text(profile, &["localhostProfile"]).is_none_or(str::is_empty) {
            errors.push(FieldError::required(
                format!("{path}.localhostProfile"),
                &format!("must be set when {what} type is Localhost"),
            ));
        }
    } else if !named.is_null() {
        errors.push(FieldError::invalid(
            format!("{path}.localhostProfile"),
            named,
            &format!("can only be set when {what} type is Localhost"),
        ));
    }
}

fn escalation(security: &Value, path: &str, errors: &mut Errors) {
    if security["allowPrivilegeEscalation"] != false {
        return;
    }
    let adds = list(security, &["capabilities", "add"])
        .iter()
        .any(|cap| cap == "CAP_SYS_ADMIN");
    for (is_wrong, with) in [
        (security["privileged"] == true, "`privileged` to true"),
        (adds, "`capabilities.Add` CAP_SYS_ADMIN"),
    ] {
        if is_wrong {
            let why = format!("cannot set `allowPrivilegeEscalation` to false and {with}");
            errors.push(FieldError::invalid(path, security, &why));
        }
    }
}

fn handler(value: &Value, path: &str, kinds: &[&str], errors: &mut Errors) {
    let why = "may not specify more than 1 handler type";
    if at_most_one(value, path, kinds, why, errors) == 0 {
        errors.push(FieldError::required(path, "must specify a handler type"));
    }
    table(HANDLER, value, path, errors);
}

fn probe(value: &Value, path: &str, errors: &mut Errors) {
    handler(
        value,
        path,
        &["exec", "httpGet", "tcpSocket", "grpc"],
        errors,
    );
    table(PROBE, value, path, errors);
}

/// Liveness and startup probes need exactly one success. If absent, it defaults to 1.
fn single_success(probe: &Value, path: &str, errors: &mut Errors) {
    let threshold = &probe["successThreshold"];
    if !threshold.is_null() && *threshold != 1 {
        errors.push(FieldError::invalid(
            format!("{path}.successThreshold"),
            threshold,
            "must be 1",
        ));
    }
}

fn readiness(value: &Value, path: &str, errors: &mut Errors) {
    let grace = &value["terminationGracePeriodSeconds"];
    if !grace.is_null() {
        errors.push(FieldError::invalid(
            format!("{path}.terminationGracePeriodSeconds"),
            grace,
            "must not be set for readinessProbes",
        ));
    }
}

fn hook(value: &Value, path: &str, errors: &mut Errors) {
    handler(
        value,
        path,
        &["exec", "httpGet", "tcpSocket", "sleep"],
        errors,
    );
}

#[cfg(test)]
pub(crate) fn examples() -> Vec<(&'static str, &'static [Row], Value)> {
    use serde_json::json;
    let run = || json!({"exec": {"command": ["true"]}});
    let container = json!({
        "name": "c", "image": "i", "imagePullPolicy": "Always", "terminationMessagePolicy": "File", "restartPolicy": "Never",
        "restartPolicyRules": [{"action": "Restart", "exitCodes": {"operator": "In", "values": [1]}}],
        "ports": [{"name": "web", "containerPort": 80, "hostPort": 0, "protocol": "TCP"}],
        "env": [{"name": "A", "valueFrom": {
            "fieldRef": {"fieldPath": "metadata.labels['a']"},
            "resourceFieldRef": {"resource": "limits.hugepages-2Mi", "divisor": "1Mi"},
            "configMapKeyRef": {"name": "c", "key": "k"},
            "secretKeyRef": {"name": "s", "key": "k"},
            "fileKeyRef": {"key": "K", "volumeName": "v", "path": "a/b"},
        }}],
        "envFrom": [{"prefix": "P_", "configMapRef": {"name": "c"}, "secretRef": {"name": "s"}}],
        "volumeMounts": [{"name": "v", "mountPath": "/v", "subPath": "a", "subPathExpr": "", "mountPropagation": "None", "readOnly": true, "recursiveReadOnly": "Enabled"}],
        "volumeDevices": [{"name": "d", "devicePath": "/dev/x"}],
        "resizePolicy": [{"resourceName": "cpu", "restartPolicy": "NotRequired"}],
        "securityContext": {"runAsUser": 0, "runAsGroup": 2147483647, "procMount": "Default", "seccompProfile": {"type": "Localhost", "localhostProfile": "a/b"}, "appArmorProfile": {"type": "Localhost", "localhostProfile": "x"}},
    });
    // A variable or an `envFrom` entry may have one source only, so the rules on this use
    // another example than the rules on the sources.
    let single = json!({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}], "envFrom": [{"secretRef": {"name": "s"}}]});
    let is_single = |row: &&Row| matches!(row.path, "env[]" | "envFrom");
    let leak = |rows: Vec<&'static Row>| -> &'static [Row] {
        let copies = rows.into_iter().map(|r| row(r.path, r.rule, r.breaks));
        Box::leak(copies.collect::<Vec<_>>().into_boxed_slice())
    };
    let (ones, others) = CONTAINER.iter().partition(is_single);
    vec![
        ("container", leak(others), container),
        ("container", leak(ones), single),
        (
            "probe",
            PROBE,
            json!({"initialDelaySeconds": 0, "timeoutSeconds": 1, "periodSeconds": 1, "successThreshold": 1, "failureThreshold": 3, "terminationGracePeriodSeconds": 1, "grpc": {"port": 1}}),
        ),
        (
            "handler",
            HANDLER,
            json!({"exec": {"command": ["a"]}, "httpGet": {"port": "web", "scheme": "HTTP", "httpHeaders": [{"name": "X-A", "value": "b"}]}, "tcpSocket": {"port": 65535}}),
        ),
        (
            "hooks",
            HOOKS,
            json!({"livenessProbe": run(), "readinessProbe": run(), "startupProbe": run(), "lifecycle": {"postStart": run(), "preStop": {"sleep": {"seconds": 5}}}}),
        ),
        (
            "init",
            INIT,
            json!({"resizePolicy": [{"resourceName": "cpu", "restartPolicy": "NotRequired"}]}),
        ),
    ]
}
