//! Rules for other kinds, limited to violations that would harm a node or another user.

use std::net::IpAddr;

use base64::Engine as _;
use serde_json::Value;

use super::super::{
    Errors, KEY, LABEL, NOT_NEGATIVE, QUALIFIED, SUBDOMAIN, is_label, is_qualified, is_subdomain,
};
use super::Rule::{Between, Check, OneOf, Required, Text};
use super::network::{POLICY, SLICE, endpoint_ip};
use super::scheduling::{TAINTS, label_selector, labels, strict_term};
use super::syntax::{
    NO_BACKSTEPS, PORT, PROTOCOLS, has_no_backsteps, is_config_key, port, port_name, unique_names,
};
use super::volume::HOST_PATHS;
use super::{Row, ingress, resources, row, scheduling, table};
use crate::api::error::{CIDR, FieldError};
use crate::api::object::{list, text};
use holdfast_core::quantity::Quantity;

/// Maximum total size of a ConfigMap's or Secret's values, in bytes.
const MAX_DATA_BYTES: usize = 1 << 20;
const LARGEST: i64 = i32::MAX as i64;

const CONFIG_MAP: &[Row] = &[
    row(
        "data",
        Check(keys),
        &[r#"{"a/b": "x"}"#, r#"{"..": "x"}"#, r#"{"..data": "x"}"#],
    ),
    row("binaryData", Check(keys), &[r#"{"": "eA=="}"#]),
    row(
        "",
        Check(config_map),
        &[r#"{"data": {"a": "x"}, "binaryData": {"a": "eA=="}}"#],
    ),
];

const SECRET: &[Row] = &[
    row("data", Check(keys), &[r#"{"../x": "eA=="}"#]),
    row(
        "",
        Check(secret),
        &[
            r#"{"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": "eA=="}}"#,
            r#"{"type": "kubernetes.io/basic-auth", "data": {}}"#,
            r#"{"type": "kubernetes.io/ssh-auth", "data": {"ssh-privatekey": ""}}"#,
        ],
    ),
];

const VOLUME: &[Row] = &[
    row(
        "spec.hostPath.path",
        Text(has_no_backsteps, NO_BACKSTEPS),
        &["\"/var/../etc\""],
    ),
    row("spec.hostPath.type", OneOf(HOST_PATHS), &["\"Folder\""]),
    row(
        "spec",
        Check(recycled_root),
        &[r#"{"hostPath": {"path": "/"}, "persistentVolumeReclaimPolicy": "Recycle"}"#],
    ),
    row(
        "spec.local.path",
        Text(has_no_backsteps, NO_BACKSTEPS),
        &["\"/mnt/../../etc\""],
    ),
    row(
        "spec.volumeMode",
        OneOf(&["Block", "Filesystem"]),
        &["\"Raw\""],
    ),
    row(
        "spec.nodeAffinity.required.nodeSelectorTerms",
        Required("must have at least one node selector term"),
        &["[]"],
    ),
    row(
        "spec.nodeAffinity.required.nodeSelectorTerms[]",
        Check(strict_term),
        &[r#"{"matchExpressions": [{"key": "a", "operator": "In"}]}"#],
    ),
    row(
        "spec.csi.controllerPublishSecretRef.name",
        Required(""),
        &["\"\""],
    ),
    row(
        "spec.csi.controllerPublishSecretRef.namespace",
        Required(""),
        &["null"],
    ),
    row(
        "spec.csi.nodePublishSecretRef.namespace",
        Required(""),
        &["\"\""],
    ),
    row(
        "spec.iscsi.lun",
        Between(0, 255, "must be between 0 and 255, inclusive"),
        &["256"],
    ),
];

const CLAIM: &[Row] = &[
    row(
        "spec.selector",
        Check(label_selector),
        &[r#"{"matchLabels": {"a b": "c"}}"#],
    ),
    row(
        "spec.storageClassName",
        Text(is_subdomain, SUBDOMAIN),
        &["\"A\""],
    ),
    row(
        "spec.volumeMode",
        OneOf(&["Block", "Filesystem"]),
        &["\"Raw\""],
    ),
];

const NODE: &[Row] = &[
    row(
        "spec.podCIDRs[]",
        Check(cidr),
        &["\"10.0.0.0\"", "\"10.0.0.0/33\""],
    ),
    row(
        "spec.podCIDRs",
        Check(one_of_each_family),
        &[r#"["10.0.0.0/24", "10.0.1.0/24"]"#],
    ),
    row("status.capacity", Check(amounts), &[r#"{"cpu": "-1"}"#]),
    row(
        "status.allocatable",
        Check(amounts),
        &[r#"{"memory": "lots"}"#],
    ),
];

const SERVICE: &[Row] = &[
    row(
        "spec.externalIPs[]",
        Check(endpoint_ip),
        &[
            "\"127.0.0.1\"",
            "\"169.254.169.254\"",
            "\"0.0.0.0\"",
            "\"nowhere\"",
        ],
    ),
    row(
        "spec.loadBalancerSourceRanges[]",
        Check(cidr),
        &["\"10.0.0.0\""],
    ),
    row(
        "spec.sessionAffinity",
        OneOf(&["ClientIP", "None"]),
        &["\"Cookie\""],
    ),
    row(
        "spec.externalTrafficPolicy",
        OneOf(&["Cluster", "Local"]),
        &["\"Node\""],
    ),
    row(
        "spec.internalTrafficPolicy",
        OneOf(&["Cluster", "Local"]),
        &["\"Node\""],
    ),
    row(
        "spec.trafficDistribution",
        OneOf(&["PreferClose", "PreferSameNode", "PreferSameZone"]),
        &["\"PreferFar\""],
    ),
    row("spec.selector", Check(labels), &[r#"{"a b": "c"}"#]),
    row(
        "spec.loadBalancerClass",
        Text(is_qualified, QUALIFIED),
        &["\"a b\""],
    ),
    row(
        "spec.ports[].appProtocol",
        Text(is_qualified, QUALIFIED),
        &["\"a b\""],
    ),
    row("spec.ports[].name", Text(is_label, LABEL), &["\"A\""]),
    row("spec.ports[].protocol", OneOf(PROTOCOLS), &["\"ICMP\""]),
    row(
        "spec.ports[].targetPort",
        Check(target_port),
        &["65536", "\"UPPER\""],
    ),
    row(
        "spec.ports[].nodePort",
        Between(0, 65_535, PORT),
        &["70000"],
    ),
    row(
        "spec.ports",
        Check(unique_names),
        &[r#"[{"name": "a", "port": 1}, {"name": "a", "port": 2}]"#],
    ),
    row(
        "spec.ports",
        Check(same_ports),
        &[r#"[{"name": "a", "port": 1}, {"name": "b", "port": 1}]"#],
    ),
    row(
        "spec",
        Check(of_type),
        &[
            r#"{"type": "ExternalName", "externalName": "a b"}"#,
            r#"{"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 0}}}"#,
            r#"{"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 86401}}}"#,
        ],
    ),
];

const ENDPOINTS: &[Row] = &[
    row(
        "subsets[]",
        Check(has_addresses),
        &[r#"{"ports": [{"port": 1}]}"#],
    ),
    row("subsets[].addresses[].ip", Required(""), &["null"]),
    row(
        "subsets[].addresses[].ip",
        Check(endpoint_ip),
        &["\"127.0.0.1\""],
    ),
    row(
        "subsets[].notReadyAddresses[].ip",
        Check(endpoint_ip),
        &["\"fe80::1\""],
    ),
    row(
        "subsets[].addresses[].hostname",
        Text(is_label, LABEL),
        &["\"A\""],
    ),
    row(
        "subsets[].addresses[].nodeName",
        Text(is_subdomain, SUBDOMAIN),
        &["\"A\""],
    ),
    row("subsets[].ports[].port", Between(1, 65_535, PORT), &["0"]),
    row(
        "subsets[].ports[].protocol",
        OneOf(PROTOCOLS),
        &["\"ICMP\""],
    ),
];

const LEASE: &[Row] = &[
    row(
        "spec.leaseDurationSeconds",
        Between(1, LARGEST, "must be greater than 0"),
        &["0"],
    ),
    row(
        "spec.leaseTransitions",
        Between(0, LARGEST, NOT_NEGATIVE),
        &["-1"],
    ),
];

const RUNTIME_CLASS: &[Row] = &[
    row(
        "overhead.podFixed",
        Check(resources::overhead),
        &[r#"{"cpu": "-1"}"#, r#"{"disk": "1"}"#],
    ),
    row(
        "scheduling",
        Check(scheduling::check),
        &[
            r#"{"nodeSelector": {"a b": "c"}}"#,
            r#"{"tolerations": [{"operator": "Equal"}]}"#,
        ],
    ),
];

/// Validates an object of a kind that has a table.
pub fn check(kind: &str, object: &Value, errors: &mut Errors) {
    let rows = match kind {
        "ConfigMap" => CONFIG_MAP,
        "Secret" => SECRET,
        "PersistentVolume" => VOLUME,
        "PersistentVolumeClaim" => CLAIM,
        "Node" => {
            table(TAINTS, object, "", errors);
            NODE
        }
        "Service" => SERVICE,
        "Endpoints" => ENDPOINTS,
        "EndpointSlice" => SLICE,
        "NetworkPolicy" => POLICY,
        "Ingress" => ingress::INGRESS,
        "IngressClass" => ingress::CLASS,
        "ServiceCIDR" => ingress::RANGE,
        "IPAddress" => ingress::ADDRESS,
        "Lease" => LEASE,
        "RuntimeClass" => RUNTIME_CLASS,
        _ => return,
    };
    table(rows, object, "", errors);
}

/// Keys of a ConfigMap or Secret: each can become a file name.
fn keys(data: &Value, path: &str, errors: &mut Errors) {
    for key in data.as_object().into_iter().flat_map(|data| data.keys()) {
        if key.is_empty() || !is_config_key(key) {
            errors.push(FieldError::invalid(
                format!("{path}[{key}]"),
                &key.as_str().into(),
                KEY,
            ));
        }
    }
}

/// Decodes base64; undecodable values have an error of their own.
fn decoded(value: &Value) -> Vec<u8> {
    let text = value.as_str().unwrap_or_default();
    base64::engine::general_purpose::STANDARD
        .decode(text)
        .unwrap_or_default()
}

fn entries<'a>(object: &'a Value, key: &str) -> impl Iterator<Item = (&'a String, &'a Value)> {
    object[key].as_object().into_iter().flatten()
}

fn config_map(object: &Value, _: &str, errors: &mut Errors) {
    for (key, _) in
        entries(object, "data").filter(|(key, _)| object["binaryData"].get(*key).is_some())
    {
        let why = "duplicate of key present in binaryData";
        errors.push(FieldError::invalid(
            format!("data[{key}]"),
            &key.as_str().into(),
            why,
        ));
    }
    let texts = entries(object, "data").map(|(_, value)| value.as_str().map_or(0, str::len));
    let bytes = entries(object, "binaryData").map(|(_, value)| decoded(value).len());
    if texts.chain(bytes).sum::<usize>() > MAX_DATA_BYTES {
        errors.push(FieldError::too_long("[]", MAX_DATA_BYTES));
    }
}

fn secret(object: &Value, _: &str, errors: &mut Errors) {
    if entries(object, "data")
        .map(|(_, value)| decoded(value).len())
        .sum::<usize>()
        > MAX_DATA_BYTES
    {
        errors.push(FieldError::too_long("data", MAX_DATA_BYTES));
    }
    let value = |key: &str| object["data"].get(key);
    let is_empty = |key: &str| value(key).is_none_or(|value| decoded(value).is_empty());
    let config = match text(object, &["type"]).unwrap_or_default() {
        "kubernetes.io/dockerconfigjson" => ".dockerconfigjson",
        "kubernetes.io/dockercfg" => ".dockercfg",
        "kubernetes.io/basic-auth" => {
            for key in ["username", "password"] {
                if value("username").is_none() && value("password").is_none() {
                    errors.push(FieldError::required(format!("data[{key}]"), ""));
                }
            }
            return;
        }
        "kubernetes.io/ssh-auth" => {
            if is_empty("ssh-privatekey") {
                errors.push(FieldError::required("data[ssh-privatekey]", ""));
            }
            return;
        }
        _ => return,
    };
    let parsed = value(config)
        .map(|value| serde_json::from_slice::<serde_json::Map<String, Value>>(&decoded(value)));
    if let Some(Err(error)) = parsed {
        let shown = "<secret contents redacted>".into();
        errors.push(FieldError::invalid(
            format!("data[{config}]"),
            &shown,
            &error.to_string(),
        ));
    }
}

/// Recycling deletes a volume's files, so it must not apply to the node's root
/// directory (`ValidatePersistentVolumeSpec`).
fn recycled_root(spec: &Value, path: &str, errors: &mut Errors) {
    let is_recycled = text(spec, &["persistentVolumeReclaimPolicy"]) == Some("Recycle");
    if is_recycled
        && text(spec, &["hostPath", "path"]).is_some_and(|dir| dir.trim_end_matches('/').is_empty())
    {
        let why = "may not be 'recycle' for a hostPath mount of '/'";
        errors.push(FieldError::forbidden(
            format!("{path}.persistentVolumeReclaimPolicy"),
            why,
        ));
    }
}

/// Parses a CIDR; returns its address.
fn range(text: &str) -> Option<IpAddr> {
    let (address, length) = text.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let is_length = length.parse::<u8>().is_ok_and(|length| length <= longest);
    is_length.then_some(address)
}

fn cidr(value: &Value, path: &str, errors: &mut Errors) {
    if value.as_str().and_then(|text| range(text.trim())).is_none() {
        errors.push(FieldError::invalid(path, value, CIDR));
    }
}

fn one_of_each_family(ranges: &Value, path: &str, errors: &mut Errors) {
    let families = ranges
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .filter_map(range);
    let families: Vec<bool> = families.map(|address| address.is_ipv4()).collect();
    if families.len() > 2 || matches!(families[..], [first, second] if first == second) {
        let why = "may specify no more than one CIDR for each IP family";
        errors.push(FieldError::invalid(path, ranges, why));
    }
}

fn amounts(amounts: &Value, path: &str, errors: &mut Errors) {
    for (name, value) in amounts.as_object().into_iter().flatten() {
        let field = format!("{path}.{name}");
        match resources::shown(value).parse::<Quantity>() {
            Ok(amount) if amount < Quantity::ZERO => {
                errors.push(FieldError::invalid(field, value, NOT_NEGATIVE))
            }
            Ok(_) => {}
            Err(error) => errors.push(FieldError::invalid(field, value, &error.to_string())),
        }
    }
}

fn target_port(value: &Value, path: &str, errors: &mut Errors) {
    // 0 and an empty string mean the service's own port.
    if *value != 0 && *value != "" {
        port(value, path, errors);
    }
    port_name(value, path, errors);
}

/// Rules that depend on a service's type and session affinity.
fn of_type(spec: &Value, path: &str, errors: &mut Errors) {
    let kind = text(spec, &["type"]).unwrap_or_default();
    let name = text(spec, &["externalName"]).unwrap_or_default();
    let is_name = is_subdomain(name.strip_suffix('.').unwrap_or(name));
    if kind == "ExternalName" && !name.is_empty() && !is_name {
        let field = format!("{path}.externalName");
        errors.push(FieldError::invalid(field, &name.into(), SUBDOMAIN));
    }
    let timeout = &spec["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"];
    let is_timeout = timeout
        .as_i64()
        .is_some_and(|seconds| (1..=86_400).contains(&seconds));
    if spec["sessionAffinity"] == "ClientIP" && !timeout.is_null() && !is_timeout {
        let field = format!("{path}.sessionAffinityConfig.clientIP.timeoutSeconds");
        let why = "must be greater than 0 and less than 86400";
        errors.push(FieldError::invalid(field, timeout, why));
    }
}

fn has_addresses(subset: &Value, path: &str, errors: &mut Errors) {
    let lists = ["addresses", "notReadyAddresses"];
    if lists.iter().all(|key| list(subset, &[key]).is_empty()) {
        let why = "must specify `addresses` or `notReadyAddresses`";
        errors.push(FieldError::required(path, why));
    }
}

fn same_ports(ports: &Value, path: &str, errors: &mut Errors) {
    let mut seen = std::collections::HashSet::new();
    for (i, port) in ports.as_array().into_iter().flatten().enumerate() {
        let protocol = text(port, &["protocol"])
            .filter(|p| !p.is_empty())
            .unwrap_or("TCP");
        if !seen.insert((protocol, port["port"].as_i64())) {
            let shown = format!("{{\"port\":{},\"protocol\":\"{protocol}\"}}", port["port"]);
            errors.push(FieldError {
                reason: "FieldValueDuplicate",
                field: format!("{path}[{i}]"),
                detail: format!("Duplicate value: {shown}"),
            });
        }
    }
}

#[cfg(test)]
pub(crate) fn examples() -> Vec<(&'static str, &'static [Row], Value)> {
    use serde_json::json;
    let port = || json!([{"name": "a", "port": 1, "protocol": "TCP"}]);
    let terms = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}});
    let secret = || json!({"name": "s", "namespace": "n"});
    vec![
        (
            "ConfigMap",
            CONFIG_MAP,
            json!({"data": {"a.b-c_D": "x"}, "binaryData": {"b": "eA=="}}),
        ),
        (
            "Secret",
            SECRET,
            json!({"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": "e30="}}),
        ),
        (
            "PersistentVolume",
            VOLUME,
            json!({"spec": {
                "hostPath": {"path": "/mnt/a", "type": ""}, "local": {"path": "/mnt/b"}, "volumeMode": "Block", "nodeAffinity": terms, "iscsi": {"lun": 255},
                "csi": {"controllerPublishSecretRef": secret(), "nodePublishSecretRef": secret()},
            }}),
        ),
        (
            "PersistentVolumeClaim",
            CLAIM,
            json!({"spec": {"selector": {"matchLabels": {"a": "b"}}, "storageClassName": "a.b", "volumeMode": "Block"}}),
        ),
        (
            "Node",
            NODE,
            json!({"spec": {"podCIDRs": ["10.0.0.0/24", "fd00::/64"]}, "status": {"capacity": {"cpu": "1"}, "allocatable": {"memory": "1Gi"}}}),
        ),
        (
            "Service",
            SERVICE,
            json!({"spec": {
                "externalIPs": ["192.0.2.1"], "loadBalancerSourceRanges": ["10.0.0.0/8"], "clusterIPs": ["10.0.0.1"], "externalName": "a.example", "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 86_400}}, "externalTrafficPolicy": "Local", "internalTrafficPolicy": "Cluster",
                "trafficDistribution": "PreferClose", "selector": {"a": "b"}, "loadBalancerClass": "a.example/b",
                "ports": [{"name": "a", "port": 80, "protocol": "TCP", "targetPort": "web", "nodePort": 0, "appProtocol": "kubernetes.io/h2c"}, {"name": "b", "port": 80, "protocol": "UDP", "targetPort": 0}],
            }}),
        ),
        (
            "Endpoints",
            ENDPOINTS,
            json!({"subsets": [{
                "addresses": [{"ip": "10.0.0.1", "hostname": "a", "nodeName": "n.example"}], "notReadyAddresses": [{"ip": "fd00::1"}], "ports": port(),
            }]}),
        ),
        (
            "Lease",
            LEASE,
            json!({"spec": {"leaseDurationSeconds": 40, "leaseTransitions": 0}}),
        ),
        (
            "RuntimeClass",
            RUNTIME_CLASS,
            json!({"overhead": {"podFixed": {"cpu": "100m"}}, "scheduling": {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "a", "operator": "Exists"}]}}),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn errors_of(kind: &str, object: &Value) -> Vec<String> {
        let mut errors = vec![];
        check(kind, object, &mut errors);
        errors
            .into_iter()
            .map(|error| format!("{}: {}", error.field, error.detail))
            .collect()
    }

    #[test]
    fn data_is_limited_to_one_mebibyte() {
        let of = |size: usize| json!({"data": {"a": "x".repeat(size)}});
        assert_eq!(
            errors_of("ConfigMap", &of(MAX_DATA_BYTES)),
            Vec::<String>::new()
        );
        assert_eq!(
            errors_of("ConfigMap", &of(MAX_DATA_BYTES + 1)),
            ["[]: Too long: may not be more than 1048576 bytes"]
        );
        // The values of a Secret count with their decoded size.
        let encoded = |size: usize| base64::engine::general_purpose::STANDARD.encode(vec![0; size]);
        let of = |size| json!({"data": {"a": encoded(size)}});
        assert_eq!(
            errors_of("Secret", &of(MAX_DATA_BYTES)),
            Vec::<String>::new()
        );
        assert_eq!(
            errors_of("Secret", &of(MAX_DATA_BYTES + 1)),
            ["data: Too long: may not be more than 1048576 bytes"]
        );
    }
}
