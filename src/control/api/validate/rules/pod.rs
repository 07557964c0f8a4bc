//! The spec of a pod or pod template (`ValidatePodSpec` and its callees).

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::super::{Errors, LABEL, QUALIFIED, SUBDOMAIN, is_label, is_qualified, is_subdomain};
use super::Rule::{Between, Check, OneOf, Required, Text};
use super::container::{app_armor, seccomp};
use super::syntax::{ID, SYSCTL, ip, is_sysctl, subdomain, unique_names};
use super::{Row, below, container, resources, row, scheduling, table, volume};
use crate::api::delete::MAX_GRACE;
use crate::api::error::FieldError;
use crate::api::object::{at, list, text};

const MAX: i64 = i32::MAX as i64;
const DEADLINE: &str = "must be between 1 and 2147483647, inclusive";
const GRACE: &str = "must be less than or equal to 2147483647";
const DNS: &[&str] = &["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"];
/// The container lists, in the order in which upstream validates them.
const KINDS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

/// Rules for single fields.
const SPEC: &[Row] = &[
    row("containers", Required(""), &["[]"]),
    row("dnsPolicy", OneOf(DNS), &["\"Custom\""]),
    row(
        "activeDeadlineSeconds",
        Between(1, MAX, DEADLINE),
        &["0", "2147483648"],
    ),
    // Negative values count as 1 (KEP-3960 keeps this).
    row(
        "terminationGracePeriodSeconds",
        Between(i64::MIN, MAX_GRACE, GRACE),
        &["2147483648"],
    ),
    row(
        "hostname",
        Text(is_label, LABEL),
        &["\"a.b\"", "\"a\\n10.0.0.1 b\""],
    ),
    row("subdomain", Text(is_label, LABEL), &["\"a.b\""]),
    row("hostnameOverride", Check(hostname_override), &["\"A\""]),
    row(
        "serviceAccountName",
        Text(is_subdomain, SUBDOMAIN),
        &["\"A\""],
    ),
    row("nodeName", Text(is_subdomain, SUBDOMAIN), &["\"A_b\""]),
    row(
        "priorityClassName",
        Text(is_subdomain, SUBDOMAIN),
        &["\"A\""],
    ),
    row(
        "runtimeClassName",
        Text(is_subdomain, SUBDOMAIN),
        &["\"A\""],
    ),
    row(
        "preemptionPolicy",
        OneOf(&["PreemptLowerPriority", "Never"]),
        &["\"Always\""],
    ),
    row(
        "overhead",
        Check(resources::overhead),
        &[r#"{"cpu": "-1"}"#],
    ),
    row("os.name", Required(""), &["null"]),
    row("os.name", OneOf(&["linux", "windows"]), &["\"plan9\""]),
    row(
        "dnsConfig.nameservers",
        Check(few_nameservers),
        &[r#"["1.1.1.1", "1.1.1.2", "1.1.1.3", "1.1.1.4"]"#],
    ),
    row(
        "dnsConfig.nameservers[]",
        Check(ip),
        &["\"1.1.1.1\\nsearch x\""],
    ),
    row(
        "dnsConfig.searches",
        Check(few_searches),
        &[
            r#"["a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a"]"#,
        ],
    ),
    row("dnsConfig.searches[]", Check(search), &["\"a b\""]),
    row(
        "dnsConfig.options[]",
        Check(dns_option),
        &[r#"{"value": "1"}"#],
    ),
    row(
        "hostAliases[]",
        Check(host_alias),
        &[r#"{"hostnames": ["a"]}"#, r#"{"ip": "1.1.1.1\n2.2.2.2 b"}"#],
    ),
    row(
        "hostAliases[].hostnames[]",
        Check(subdomain),
        &["\"a\\n10.0.0.1 b\""],
    ),
    row("readinessGates[].conditionType", Required(""), &["\"\""]),
    row(
        "readinessGates[].conditionType",
        Text(is_qualified, QUALIFIED),
        &["\"a b\""],
    ),
    row(
        "resourceClaims[]",
        Check(claim),
        &[
            r#"{"resourceClaimName": "a"}"#,
            r#"{"name": "a"}"#,
            r#"{"name": "a", "resourceClaimName": "a", "resourceClaimTemplateName": "b"}"#,
        ],
    ),
    row("resourceClaims[].name", Text(is_label, LABEL), &["\"A\""]),
    row(
        "resourceClaims[].resourceClaimName",
        Check(subdomain),
        &["\"A\""],
    ),
    row(
        "resourceClaims",
        Check(unique_names),
        &[r#"[{"name": "a", "resourceClaimName": "a"}, {"name": "a", "resourceClaimName": "b"}]"#],
    ),
    row("securityContext.runAsUser", Between(0, MAX, ID), &["-1"]),
    row(
        "securityContext.runAsGroup",
        Between(0, MAX, ID),
        &["2147483648"],
    ),
    row("securityContext.fsGroup", Between(0, MAX, ID), &["-1"]),
    row(
        "securityContext.supplementalGroups[]",
        Between(0, MAX, ID),
        &["-1"],
    ),
    row(
        "securityContext.fsGroupChangePolicy",
        OneOf(&["Always", "OnRootMismatch"]),
        &["\"Never\""],
    ),
    row(
        "securityContext.supplementalGroupsPolicy",
        OneOf(&["Merge", "Strict"]),
        &["\"None\""],
    ),
    row(
        "securityContext.seLinuxChangePolicy",
        OneOf(&["MountOption", "Recursive"]),
        &["\"None\""],
    ),
    row(
        "securityContext.seccompProfile",
        Check(seccomp),
        &[r#"{"type": "Localhost", "localhostProfile": "/x"}"#],
    ),
    row(
        "securityContext.appArmorProfile",
        Check(app_armor),
        &[r#"{"type": "Other"}"#],
    ),
    row(
        "securityContext.sysctls[]",
        Check(sysctl),
        &[r#"{"value": "1"}"#, r#"{"name": "a..b", "value": "1"}"#],
    ),
    row(
        "securityContext.sysctls",
        Check(unique_names),
        &[r#"[{"name": "a.b", "value": "1"}, {"name": "a.b", "value": "2"}]"#],
    ),
];

/// Rules across fields. Their path is empty: the examples that violate them are whole specs.
const WHOLE: &[Row] = &[
    row(
        "",
        Check(dns_none),
        &[
            r#"{"dnsPolicy": "None"}"#,
            r#"{"dnsPolicy": "None", "dnsConfig": {}}"#,
        ],
    ),
    row(
        "",
        Check(container_names),
        &[r#"{"initContainers": [{"name": "a"}], "containers": [{"name": "a"}]}"#],
    ),
    row(
        "",
        Check(host_ports),
        &[
            r#"{"containers": [{"ports": [{"containerPort": 1, "hostPort": 80}]}, {"ports": [{"containerPort": 2, "hostPort": 80, "protocol": "TCP"}]}]}"#,
        ],
    ),
    row(
        "",
        Check(host_network_ports),
        &[
            r#"{"hostNetwork": true, "containers": [{"ports": [{"containerPort": 1, "hostPort": 80}]}]}"#,
        ],
    ),
    row(
        "",
        Check(host_users),
        &[
            r#"{"hostUsers": false, "hostNetwork": true}"#,
            r#"{"hostUsers": false, "hostPID": true}"#,
            r#"{"hostUsers": false, "containers": [{"volumeDevices": [{"name": "d"}]}]}"#,
        ],
    ),
    row(
        "",
        Check(shared_processes),
        &[r#"{"shareProcessNamespace": true, "hostPID": true}"#],
    ),
    row(
        "",
        Check(host_sysctls),
        &[
            r#"{"hostNetwork": true, "securityContext": {"sysctls": [{"name": "net.core.somaxconn", "value": "1"}]}}"#,
            r#"{"hostIPC": true, "securityContext": {"sysctls": [{"name": "kernel/shm_rmid_forced", "value": "1"}]}}"#,
        ],
    ),
    row(
        "",
        Check(overridden_name),
        &[
            r#"{"hostnameOverride": "a", "setHostnameAsFQDN": true}"#,
            r#"{"hostnameOverride": "a", "hostNetwork": true}"#,
        ],
    ),
    row(
        "",
        Check(mounts),
        &[
            r#"{"containers": [{"volumeMounts": [{"name": "absent", "mountPath": "/v"}]}]}"#,
            r#"{"containers": [{"volumeDevices": [{"name": "absent", "devicePath": "/dev/x"}]}]}"#,
            r#"{"volumes": [{"name": "v", "emptyDir": {}}], "containers": [{"volumeDevices": [{"name": "v", "devicePath": "/dev/x"}]}]}"#,
            r#"{"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}], "containers": [{"volumeMounts": [{"name": "v", "mountPath": "/v"}], "volumeDevices": [{"name": "v", "devicePath": "/dev/x"}]}]}"#,
        ],
    ),
    row(
        "",
        Check(files_of_variables),
        &[
            r#"{"volumes": [{"name": "v", "hostPath": {"path": "/x"}}], "containers": [{"env": [{"name": "A", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "p", "key": "k"}}}]}]}"#,
        ],
    ),
    row(
        "",
        Check(resizes),
        &[
            r#"{"restartPolicy": "Never", "containers": [{"resizePolicy": [{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]}]}"#,
        ],
    ),
    row(
        "",
        Check(sleeps),
        &[
            r#"{"terminationGracePeriodSeconds": 5, "containers": [{"lifecycle": {"preStop": {"sleep": {"seconds": 6}}}}]}"#,
            r#"{"terminationGracePeriodSeconds": 5, "containers": [{"lifecycle": {"preStop": {"sleep": {"seconds": -1}}}}]}"#,
        ],
    ),
    row(
        "",
        Check(claims_of_containers),
        &[
            r#"{"containers": [{"resources": {"claims": [{"name": "absent"}]}}]}"#,
            r#"{"resourceClaims": [{"name": "a"}], "containers": [{"resources": {"claims": [{"name": "a"}, {"name": "a"}]}}]}"#,
        ],
    ),
    row(
        "",
        Check(operating_system),
        &[
            r#"{"os": {"name": "linux"}, "securityContext": {"windowsOptions": {}}}"#,
            r#"{"os": {"name": "windows"}, "securityContext": {"runAsUser": 1}}"#,
            r#"{"os": {"name": "windows"}, "containers": [{"securityContext": {"privileged": true}}]}"#,
        ],
    ),
];

/// Validates the spec of a pod or template, except for `restartPolicy`, whose values depend on the kind.
pub fn check(spec: &Value, path: &str, errors: &mut Errors) {
    table(SPEC, spec, path, errors);
    scheduling::check(spec, path, errors);
    volume::check(spec, path, errors);
    for kind in KINDS {
        for (i, item) in list(spec, &[kind]).iter().enumerate() {
            let here = format!("{path}.{kind}[{i}]");
            container::check(item, &here, kind == "initContainers", errors);
        }
    }
    table(WHOLE, spec, path, errors);
    resources::amounts(spec, path, errors);
    for (here, container) in containers(spec, path) {
        resources::of_container(container, &here, errors);
    }
}

/// All containers with their paths.
fn containers<'a>(spec: &'a Value, path: &str) -> impl Iterator<Item = (String, &'a Value)> {
    KINDS.into_iter().flat_map(move |kind| {
        let items = list(spec, &[kind]).iter().enumerate();
        items.map(move |(i, item)| (format!("{path}.{kind}[{i}]"), item))
    })
}

fn is_true(spec: &Value, key: &str) -> bool {
    spec[key] == true
}

fn hostname_override(name: &Value, path: &str, errors: &mut Errors) {
    if name.as_str().is_some_and(|name| name.len() > 64) {
        errors.push(FieldError::too_long(path, 64));
    }
    subdomain(name, path, errors);
}

fn few_nameservers(servers: &Value, path: &str, errors: &mut Errors) {
    if servers.as_array().is_some_and(|servers| servers.len() > 3) {
        errors.push(FieldError::invalid(
            path,
            servers,
            "must not have more than 3 nameservers",
        ));
    }
}

/// The limits of libc's resolver.
fn few_searches(searches: &Value, path: &str, errors: &mut Errors) {
    let domains: Vec<&str> = searches
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    if domains.len() > 32 {
        errors.push(FieldError::invalid(
            path,
            searches,
            "must not have more than 32 search paths",
        ));
    }
    if domains.join(" ").len() > 2048 {
        let why = "must not have more than 2048 characters (including spaces) in the search list";
        errors.push(FieldError::invalid(path, searches, why));
    }
}

/// A search domain; `.` is the root, and underscores are allowed (KEP-4427).
fn search(domain: &Value, path: &str, errors: &mut Errors) {
    let text = domain.as_str().unwrap_or_default();
    let plain = text.strip_suffix('.').unwrap_or(text).replace('_', "-");
    let is_right = text == "."
        || plain
            .split('.')
            .all(|part| is_label(part.trim_matches('-')));
    if !is_right || plain.len() > 253 {
        errors.push(FieldError::invalid(path, domain, SUBDOMAIN));
    }
}

fn dns_option(option: &Value, path: &str, errors: &mut Errors) {
    if text(option, &["name"]).is_none_or(str::is_empty) {
        errors.push(FieldError::required(path, "must not be empty"));
    }
}

fn host_alias(alias: &Value, path: &str, errors: &mut Errors) {
    ip(&alias["ip"], &format!("{path}.ip"), errors);
}

fn claim(claim: &Value, path: &str, errors: &mut Errors) {
    if text(claim, &["name"]).is_none_or(str::is_empty) {
        errors.push(FieldError::required(format!("{path}.name"), ""));
    }
    let sources = ["resourceClaimName", "resourceClaimTemplateName"];
    let why = match sources.iter().filter(|key| !claim[**key].is_null()).count() {
        0 => "must specify one of: `resourceClaimName`, `resourceClaimTemplateName`",
        1 => return,
        _ => "at most one of `resourceClaimName` or `resourceClaimTemplateName` may be specified",
    };
    errors.push(FieldError::invalid(path, claim, why));
}

fn sysctl(sysctl: &Value, path: &str, errors: &mut Errors) {
    let field = format!("{path}.name");
    match text(sysctl, &["name"]).unwrap_or_default() {
        "" => errors.push(FieldError::required(field, "")),
        name if !is_sysctl(name) => errors.push(FieldError::invalid(field, &name.into(), SYSCTL)),
        _ => {}
    }
}

fn dns_none(spec: &Value, path: &str, errors: &mut Errors) {
    if text(spec, &["dnsPolicy"]) != Some("None") {
        return;
    }
    if spec["dnsConfig"].is_null() {
        let why = "must provide `dnsConfig` when `dnsPolicy` is None";
        errors.push(FieldError::required(below(path, "dnsConfig"), why));
    } else if list(spec, &["dnsConfig", "nameservers"]).is_empty() {
        let why = "must provide at least one DNS nameserver when `dnsPolicy` is None";
        errors.push(FieldError::required(
            below(path, "dnsConfig.nameservers"),
            why,
        ));
    }
}

fn container_names(spec: &Value, path: &str, errors: &mut Errors) {
    let mut seen = HashSet::new();
    for (here, container) in containers(spec, path) {
        let name = text(container, &["name"]).unwrap_or_default();
        if !name.is_empty() && !seen.insert(name) {
            errors.push(FieldError::duplicate(below(&here, "name"), name));
        }
    }
}

/// Two containers of a pod cannot bind the same host port. Init containers run one after the other and may share one.
fn host_ports(spec: &Value, path: &str, errors: &mut Errors) {
    let mut seen = HashSet::new();
    for (i, container) in list(spec, &["containers"]).iter().enumerate() {
        for (n, port) in list(container, &["ports"]).iter().enumerate() {
            let number = port["hostPort"].as_i64().unwrap_or_default();
            let protocol = text(port, &["protocol"])
                .filter(|p| !p.is_empty())
                .unwrap_or("TCP");
            let address = text(port, &["hostIP"]).unwrap_or_default();
            let bound = format!("{protocol}/{address}/{number}");
            if number != 0 && !seen.insert(bound.clone()) {
                let field = format!("containers[{i}].ports[{n}].hostPort");
                errors.push(FieldError::duplicate(below(path, &field), &bound));
            }
        }
    }
}

fn host_network_ports(spec: &Value, path: &str, errors: &mut Errors) {
    if !is_true(spec, "hostNetwork") {
        return;
    }
    for (i, container) in list(spec, &["containers"]).iter().enumerate() {
        for (n, port) in list(container, &["ports"]).iter().enumerate() {
            let own = &port["hostPort"];
            // In a template, `hostPort` may be absent: it is defaulted when the pod is created.
            if own.as_i64().unwrap_or_default() != 0 && *own != port["containerPort"] {
                let field = format!("containers[{i}].ports[{n}].hostPort");
                let why = "must match `containerPort` when `hostNetwork` is true";
                errors.push(FieldError::invalid(below(path, &field), own, why));
            }
        }
    }
}

/// A pod with a user namespace cannot share other namespaces of the node (KEP-127).
fn host_users(spec: &Value, path: &str, errors: &mut Errors) {
    if spec["hostUsers"] != false {
        return;
    }
    let why = "when `hostUsers` is false";
    for (key, field) in [
        ("hostNetwork", "hostNetwork"),
        ("hostPID", "HostPID"),
        ("hostIPC", "HostIPC"),
    ] {
        if is_true(spec, key) {
            errors.push(FieldError::forbidden(below(path, field), why));
        }
    }
    for (here, container) in containers(spec, path) {
        if !list(container, &["volumeDevices"]).is_empty() {
            errors.push(FieldError::forbidden(below(&here, "volumeDevices"), why));
        }
    }
}

fn shared_processes(spec: &Value, path: &str, errors: &mut Errors) {
    if is_true(spec, "shareProcessNamespace") && is_true(spec, "hostPID") {
        let why = "ShareProcessNamespace and HostPID cannot both be enabled";
        let field = below(path, "securityContext.shareProcessNamespace");
        errors.push(FieldError::invalid(field, &true.into(), why));
    }
}

/// Sysctls of a namespace that the pod shares with the node are forbidden (`ValidateHostSysctl`).
fn host_sysctls(spec: &Value, path: &str, errors: &mut Errors) {
    for (i, sysctl) in list(spec, &["securityContext", "sysctls"])
        .iter()
        .enumerate()
    {
        let name = text(sysctl, &["name"]).unwrap_or_default();
        let dotted = name.replace('/', ".");
        let is_ipc = ["kernel.sem", "kernel.shm", "kernel.msg", "fs.mqueue."]
            .iter()
            .any(|prefix| dotted.starts_with(prefix));
        let shared = if dotted.starts_with("net.") && is_true(spec, "hostNetwork") {
            "hostNetwork"
        } else if is_ipc && is_true(spec, "hostIPC") {
            "hostIPC"
        } else {
            continue;
        };
        let field = below(path, &format!("securityContext.sysctls[{i}].name"));
        let why = format!("may not be specified when '{shared}' is true");
        errors.push(FieldError::invalid(field, &name.into(), &why));
    }
}

fn overridden_name(spec: &Value, path: &str, errors: &mut Errors) {
    if spec["hostnameOverride"].is_null() {
        return;
    }
    for key in ["setHostnameAsFQDN", "hostNetwork"] {
        if is_true(spec, key) {
            let why = format!("may not be specified when {key} is true");
            errors.push(FieldError::forbidden(below(path, "hostnameOverride"), &why));
        }
    }
}

/// Mounts refer to volumes of the pod, and devices to claims (`ValidateVolumeMounts`, `ValidateVolumeDevices`).
fn mounts(spec: &Value, path: &str, errors: &mut Errors) {
    let named = list(spec, &["volumes"])
        .iter()
        .filter_map(|v| Some((text(v, &["name"])?, v)));
    let volumes: HashMap<&str, &Value> = named.collect();
    for (here, container) in containers(spec, path) {
        let mounted = list(container, &["volumeMounts"]);
        let names: HashSet<&str> = mounted
            .iter()
            .filter_map(|mount| text(mount, &["name"]))
            .collect();
        for (i, mount) in mounted.iter().enumerate() {
            let name = text(mount, &["name"]).unwrap_or_default();
            if !name.is_empty() && !volumes.contains_key(name) {
                let field = below(&here, &format!("volumeMounts[{i}].name"));
                errors.push(FieldError::not_found(field, name));
            }
        }
        for (i, device) in list(container, &["volumeDevices"]).iter().enumerate() {
            let name = text(device, &["name"]).unwrap_or_default();
            let field = below(&here, &format!("volumeDevices[{i}].name"));
            match volumes.get(name) {
                _ if name.is_empty() => {}
                None => errors.push(FieldError::not_found(field, name)),
                Some(volume)
                    if volume["persistentVolumeClaim"].is_null()
                        && volume["ephemeral"].is_null() =>
                {
                    let why = "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode";
                    errors.push(FieldError::invalid(field, &name.into(), why));
                }
                Some(_) if names.contains(name) => {
                    let why = "must not already exist in volumeMounts";
                    errors.push(FieldError::invalid(field, &name.into(), why));
                }
                Some(_) => {}
            }
        }
    }
}

/// Files with environment variables must be in an emptyDir (KEP-3721).
fn files_of_variables(spec: &Value, path: &str, errors: &mut Errors) {
    for (here, container) in containers(spec, path) {
        for (i, variable) in list(container, &["env"]).iter().enumerate() {
            let Some(name) = text(variable, &["valueFrom", "fileKeyRef", "volumeName"]) else {
                continue;
            };
            let field = below(&here, &format!("env[{i}].valueFrom.fileKeyRef.volumeName"));
            let volume = list(spec, &["volumes"])
                .iter()
                .find(|v| text(v, &["name"]) == Some(name));
            match volume {
                None => errors.push(FieldError::not_found(field, name)),
                Some(volume) if volume["emptyDir"].is_null() => {
                    let why = "referenced volume must be of type emptyDir";
                    errors.push(FieldError::invalid(field, &name.into(), why));
                }
                Some(_) => {}
            }
        }
    }
}

fn resizes(spec: &Value, path: &str, errors: &mut Errors) {
    if text(spec, &["restartPolicy"]) != Some("Never") {
        return;
    }
    for (here, container) in containers(spec, path) {
        for policy in list(container, &["resizePolicy"]) {
            if policy["restartPolicy"] == "RestartContainer" {
                let why = "must be 'NotRequired' when pod `restartPolicy` is 'Never'";
                errors.push(FieldError::invalid(
                    below(&here, "resizePolicy"),
                    &policy["restartPolicy"],
                    why,
                ));
            }
        }
    }
}

/// The sleep of a hook must not exceed the grace period (`validateSleepAction`).
fn sleeps(spec: &Value, path: &str, errors: &mut Errors) {
    let Some(grace) = spec["terminationGracePeriodSeconds"].as_i64() else {
        return;
    };
    for (here, container) in containers(spec, path) {
        for hook in ["postStart", "preStop"] {
            let seconds = &container["lifecycle"][hook]["sleep"]["seconds"];
            if !seconds.is_null() && !seconds.as_i64().is_some_and(|s| (0..=grace).contains(&s)) {
                let why = format!(
                    "must be non-negative and less than terminationGracePeriodSeconds ({grace})"
                );
                errors.push(FieldError::invalid(
                    below(&here, &format!("lifecycle.{hook}.sleep")),
                    seconds,
                    &why,
                ));
            }
        }
    }
}

/// Containers may use only claims of the pod (`validateResourceClaimNames`).
fn claims_of_containers(spec: &Value, path: &str, errors: &mut Errors) {
    let mut known: Vec<&str> = list(spec, &["resourceClaims"])
        .iter()
        .filter_map(|c| text(c, &["name"]))
        .collect();
    known.sort_unstable();
    for (here, container) in containers(spec, path) {
        let mut seen = HashSet::new();
        for (i, claim) in list(container, &["resources", "claims"]).iter().enumerate() {
            let field = below(&here, &format!("resources.claims[{i}]"));
            match text(claim, &["name"]).unwrap_or_default() {
                "" => errors.push(FieldError::required(field, "")),
                name if known.binary_search(&name).is_ok() => {
                    let request = text(claim, &["request"]).unwrap_or_default();
                    // Duplicate: the whole claim or the same request is listed already.
                    if !seen.insert((name, request))
                        || seen.contains(&(name, "")) && !request.is_empty()
                    {
                        errors.push(FieldError::duplicate(field, name));
                    }
                }
                name => {
                    let names = if known.is_empty() {
                        " which is empty".to_owned()
                    } else {
                        format!(": {}", known.join(", "))
                    };
                    let mut error = FieldError::not_found(field, name);
                    error.detail +=
                        &format!(": must be one of the names in pod.spec.resourceClaims{names}");
                    errors.push(error);
                }
            }
        }
    }
}

/// Fields of a pod or its security context that Windows does not support.
const NOT_ON_WINDOWS: [&str; 4] = ["hostUsers", "hostPID", "hostIPC", "shareProcessNamespace"];
const POD_NOT_ON_WINDOWS: [&str; 10] = [
    "appArmorProfile",
    "seLinuxOptions",
    "seccompProfile",
    "fsGroup",
    "fsGroupChangePolicy",
    "sysctls",
    "runAsUser",
    "runAsGroup",
    "supplementalGroups",
    "supplementalGroupsPolicy",
];
const CONTAINER_NOT_ON_WINDOWS: [&str; 10] = [
    "appArmorProfile",
    "seLinuxOptions",
    "seccompProfile",
    "capabilities",
    "readOnlyRootFilesystem",
    "privileged",
    "allowPrivilegeEscalation",
    "procMount",
    "runAsUser",
    "runAsGroup",
];

/// A pod that names its operating system must not have fields of another one (KEP-2802).
fn operating_system(spec: &Value, path: &str, errors: &mut Errors) {
    let linux = "windows options cannot be set for a linux pod";
    let windows = "cannot be set for a windows pod";
    let why = match at(spec, &["os", "name"]).and_then(Value::as_str) {
        Some("linux") => linux,
        Some("windows") => windows,
        _ => return,
    };
    let is_windows = why == windows;
    let mut refuse = |value: &Value, at: &str, of_windows: &[&str]| {
        let keys = if is_windows {
            of_windows
        } else {
            &["windowsOptions"]
        };
        for key in keys
            .iter()
            .filter(|key| !matches!(&value[**key], Value::Null | Value::Bool(false)))
        {
            errors.push(FieldError::forbidden(below(at, key), why));
        }
    };
    if is_windows {
        refuse(spec, path, &NOT_ON_WINDOWS);
    }
    refuse(
        &spec["securityContext"],
        &below(path, "securityContext"),
        &POD_NOT_ON_WINDOWS,
    );
    for (here, container) in containers(spec, path) {
        refuse(
            &container["securityContext"],
            &below(&here, "securityContext"),
            &CONTAINER_NOT_ON_WINDOWS,
        );
    }
}

#[cfg(test)]
pub(crate) fn examples() -> Vec<(&'static str, &'static [Row], Value)> {
    use serde_json::json;
    let spec = json!({
        "containers": [{"name": "c"}], "dnsPolicy": "None", "activeDeadlineSeconds": 1, "terminationGracePeriodSeconds": 2147483647,
        "hostname": "a", "subdomain": "b", "hostnameOverride": "a.b", "serviceAccountName": "a.b", "nodeName": "n.example",
        "priorityClassName": "p", "runtimeClassName": "r", "preemptionPolicy": "Never", "overhead": {"cpu": "1"}, "os": {"name": "linux"},
        "dnsConfig": {"nameservers": ["1.1.1.1"], "searches": ["a_b.c.", "."], "options": [{"name": "ndots", "value": "2"}]},
        "hostAliases": [{"ip": "2001:db8::1", "hostnames": ["a.b"]}],
        "readinessGates": [{"conditionType": "a.example/b"}],
        "resourceClaims": [{"name": "a", "resourceClaimName": "a.b"}],
        "securityContext": {
            "runAsUser": 0, "runAsGroup": 1, "fsGroup": 2147483647, "supplementalGroups": [0], "fsGroupChangePolicy": "Always",
            "supplementalGroupsPolicy": "Merge", "seLinuxChangePolicy": "Recursive", "seccompProfile": {"type": "RuntimeDefault"},
            "appArmorProfile": {"type": "Unconfined"}, "sysctls": [{"name": "net/core/somaxconn", "value": "1"}],
        },
    });
    let whole = json!({
        "dnsPolicy": "None", "dnsConfig": {"nameservers": ["1.1.1.1"]}, "hostNetwork": true, "hostIPC": false,
        "shareProcessNamespace": true, "restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "os": {"name": "linux"},
        "volumes": [{"name": "v", "emptyDir": {}}, {"name": "d", "persistentVolumeClaim": {"claimName": "c"}}],
        "resourceClaims": [{"name": "gpu"}],
        "securityContext": {"sysctls": [{"name": "kernel.shm_rmid_forced", "value": "1"}]},
        "initContainers": [{"name": "i", "ports": [{"containerPort": 80, "hostPort": 80}]}],
        "containers": [
            {"name": "a", "ports": [{"containerPort": 80, "hostPort": 80}, {"containerPort": 80, "hostPort": 80, "protocol": "UDP"}],
             "volumeMounts": [{"name": "v", "mountPath": "/v"}], "volumeDevices": [{"name": "d", "devicePath": "/dev/x"}],
             "resizePolicy": [{"resourceName": "cpu", "restartPolicy": "NotRequired"}], "resources": {"claims": [{"name": "gpu"}]},
             "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
             "env": [{"name": "A", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "p", "key": "k"}}}]},
            {"name": "b"},
        ],
    });
    vec![("pod", SPEC, spec), ("whole pod", WHOLE, whole)]
}
