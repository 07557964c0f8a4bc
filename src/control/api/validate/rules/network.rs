//! Rules for network policies (`pkg/apis/networking/validation/validation.go`) and EndpointSlices
//! (`pkg/apis/discovery/validation/validation.go`).

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;

use super::super::{Errors, LABEL, QUALIFIED, SUBDOMAIN, is_label, is_qualified, is_subdomain};
use super::Rule::{Check, Most, OneOf, Required, Text};
use super::scheduling::label_selector;
use super::syntax::{PORT, PROTOCOLS, port, unique_as};
use super::{Row, row};
use crate::api::error::{CIDR, FieldError, IP};
use crate::api::object::{list, text};

pub(super) const POLICY: &[Row] = &[
    row(
        "spec.podSelector",
        Check(label_selector),
        &[r#"{"matchLabels": {"a b": "c"}}"#],
    ),
    row("spec.ingress[].ports[]", Check(policy_port), PORTS),
    row("spec.egress[].ports[]", Check(policy_port), PORTS),
    row("spec.ingress[].from[]", Check(peer), PEERS),
    row("spec.egress[].to[]", Check(peer), PEERS),
    row(
        "spec.policyTypes",
        Check(policy_types),
        &[r#"["Ingress", "Egress", "Ingress"]"#, r#"["Sideways"]"#],
    ),
];

const PORTS: &[&str] = &[
    r#"{"protocol": "ICMP"}"#,
    r#"{"port": 0}"#,
    r#"{"port": "UPPER"}"#,
    r#"{"port": 80, "endPort": 79}"#,
    r#"{"port": 80, "endPort": 65536}"#,
    r#"{"port": "web", "endPort": 80}"#,
    r#"{"endPort": 80}"#,
];

const PEERS: &[&str] = &[
    "{}",
    r#"{"podSelector": {"matchLabels": {"a b": "c"}}}"#,
    r#"{"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}"#,
    r#"{"podSelector": {}, "ipBlock": {"cidr": "10.0.0.0/8"}}"#,
    r#"{"ipBlock": {}}"#,
    r#"{"ipBlock": {"cidr": "10.0.0.0"}}"#,
    r#"{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}}"#,
    r#"{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.0.0/8"]}}"#,
    r#"{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["nonsense"]}}"#,
];

pub(super) const SLICE: &[Row] = &[
    row("addressType", Required(""), &["\"\""]),
    row(
        "addressType",
        OneOf(&["FQDN", "IPv4", "IPv6"]),
        &["\"IPX\""],
    ),
    row("endpoints", Most(1000), &[]),
    row("endpoints[].addresses", Most(100), &[]),
    row(
        "endpoints[].addresses",
        Required("must contain at least 1 address"),
        &["[]"],
    ),
    row("endpoints[].hostname", Text(is_label, LABEL), &["\"A\""]),
    row(
        "endpoints[].nodeName",
        Text(is_subdomain, SUBDOMAIN),
        &["\"A\""],
    ),
    row("endpoints[].hints.forZones", Most(8), &[]),
    row("endpoints[].hints.forNodes", Most(8), &[]),
    row("endpoints[].hints.forZones[].name", Required(""), &["\"\""]),
    row("endpoints[].hints.forNodes[].name", Required(""), &["\"\""]),
    row(
        "",
        Check(addresses),
        &[
            r#"{"addressType": "IPv4", "endpoints": [{"addresses": ["127.0.0.1"]}]}"#,
            r#"{"addressType": "IPv4", "endpoints": [{"addresses": ["fd00::1"]}]}"#,
            r#"{"addressType": "IPv6", "endpoints": [{"addresses": ["10.0.0.1"]}]}"#,
            r#"{"addressType": "FQDN", "endpoints": [{"addresses": ["a b"]}]}"#,
        ],
    ),
    row("ports", Most(20_000), &[]),
    row(
        "ports",
        Check(unique_port_names),
        &[r#"[{"name": "a"}, {"name": "a"}]"#, r#"[{"name": ""}, {}]"#],
    ),
    row("ports[].name", Text(is_label, LABEL), &["\"A\""]),
    row("ports[].protocol", OneOf(PROTOCOLS), &["\"ICMP\""]),
    row(
        "ports[].appProtocol",
        Text(is_qualified, QUALIFIED),
        &["\"a b\""],
    ),
];

/// The address of an endpoint; addresses of the node itself are invalid (`ValidateEndpointIP`).
pub(super) fn endpoint_ip(value: &Value, path: &str, errors: &mut Errors) {
    let Some(address) = value.as_str().and_then(|text| text.parse::<IpAddr>().ok()) else {
        return errors.push(FieldError::invalid(path, value, IP));
    };
    // IPv4-mapped IPv6 addresses count as IPv4.
    let problem = match address.to_canonical() {
        address if address.is_unspecified() => format!("may not be unspecified ({address})"),
        address if address.is_loopback() => {
            "may not be in the loopback range (127.0.0.0/8, ::1/128)".to_owned()
        }
        IpAddr::V4(address) if address.is_link_local() => LINK_LOCAL.to_owned(),
        IpAddr::V6(address) if address.is_unicast_link_local() => LINK_LOCAL.to_owned(),
        IpAddr::V4(address) if address.octets()[..3] == [224, 0, 0] => MULTICAST.to_owned(),
        IpAddr::V6(address) if address.segments()[0] & 0xff0f == 0xff02 => MULTICAST.to_owned(),
        _ => return,
    };
    errors.push(FieldError::invalid(path, value, &problem));
}

const LINK_LOCAL: &str = "may not be in the link-local range (169.254.0.0/16, fe80::/10)";
const MULTICAST: &str = "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)";

fn addresses(slice: &Value, _: &str, errors: &mut Errors) {
    let kind = text(slice, &["addressType"]).unwrap_or_default();
    for (i, endpoint) in list(slice, &["endpoints"]).iter().enumerate() {
        for (n, address) in list(endpoint, &["addresses"]).iter().enumerate() {
            let field = format!("endpoints[{i}].addresses[{n}]");
            let text = address.as_str().unwrap_or_default();
            let is_ipv4 = text.parse().map(|address: IpAddr| address.is_ipv4());
            match (kind, is_ipv4) {
                ("FQDN", _) if !is_subdomain(text) => {
                    errors.push(FieldError::invalid(field, address, SUBDOMAIN))
                }
                ("IPv4" | "IPv6", Err(_)) => errors.push(FieldError::invalid(field, address, IP)),
                ("IPv4", Ok(false)) => errors.push(FieldError::invalid(
                    field,
                    address,
                    "must be an IPv4 address",
                )),
                ("IPv6", Ok(true)) => errors.push(FieldError::invalid(
                    field,
                    address,
                    "must be an IPv6 address",
                )),
                ("IPv4" | "IPv6", Ok(_)) => endpoint_ip(address, &field, errors),
                _ => {}
            }
        }
    }
}

/// The names of a slice's ports are unique; one port may have no name.
fn unique_port_names(ports: &Value, path: &str, errors: &mut Errors) {
    unique_as(ports, "name", |i| format!("{path}[{i}].name"), errors);
    let all = ports.as_array().into_iter().flatten().enumerate();
    let unnamed = all.filter(|(_, port)| text(port, &["name"]).is_none_or(str::is_empty));
    for (i, _) in unnamed.skip(1) {
        errors.push(FieldError::duplicate(format!("{path}[{i}].name"), ""));
    }
}

/// `ValidateNetworkPolicyPort`.
fn policy_port(value: &Value, path: &str, errors: &mut Errors) {
    let protocol = text(value, &["protocol"]).unwrap_or("TCP");
    if !PROTOCOLS.contains(&protocol) {
        let field = format!("{path}.protocol");
        errors.push(FieldError::unsupported(field, protocol, PROTOCOLS));
    }
    let (number, end) = (&value["port"], &value["endPort"]);
    if !number.is_null() {
        port(number, &format!("{path}.port"), errors);
    }
    if end.is_null() {
        return;
    }
    let field = format!("{path}.endPort");
    let end_number = end.as_i64().unwrap_or(0);
    if number.is_null() {
        let why = "may not be specified when `port` is not specified";
        errors.push(FieldError::invalid(field, end, why));
    } else if let Some(first) = number.as_i64() {
        if end_number < first {
            let why = "must be greater than or equal to `port`";
            errors.push(FieldError::invalid(field.as_str(), end, why));
        }
        if !(1..=65_535).contains(&end_number) {
            errors.push(FieldError::invalid(field, end, PORT));
        }
    } else {
        let why = "may not be specified when `port` is non-numeric";
        errors.push(FieldError::invalid(field, end, why));
    }
}

/// `ValidateNetworkPolicyPeer`.
fn peer(value: &Value, path: &str, errors: &mut Errors) {
    let selectors = ["podSelector", "namespaceSelector"];
    let selectors = selectors.into_iter().filter(|key| !value[*key].is_null());
    let mut count = 0;
    for key in selectors {
        count += 1;
        label_selector(&value[key], &format!("{path}.{key}"), errors);
    }
    let block = &value["ipBlock"];
    if !block.is_null() {
        ip_block(block, &format!("{path}.ipBlock"), errors);
    }
    if count == 0 && block.is_null() {
        errors.push(FieldError::required(path, "must specify a peer"));
    } else if count > 0 && !block.is_null() {
        let why = "may not specify both ipBlock and another peer";
        errors.push(FieldError::forbidden(path, why));
    }
}

/// Parses a range; reports one that is invalid.
fn range(value: &Value, path: &str, errors: &mut Errors) -> Option<IpNet> {
    let parsed = value.as_str().and_then(|text| text.parse::<IpNet>().ok());
    if parsed.is_none() {
        errors.push(FieldError::invalid(path, value, CIDR));
    }
    parsed
}

/// `ValidateIPBlock`.
fn ip_block(block: &Value, path: &str, errors: &mut Errors) {
    let field = format!("{path}.cidr");
    if text(block, &["cidr"]).is_none_or(str::is_empty) {
        errors.push(FieldError::required(field, ""));
        return;
    }
    let Some(whole) = range(&block["cidr"], &field, errors) else {
        return;
    };
    for (i, except) in list(block, &["except"]).iter().enumerate() {
        let field = format!("{path}.except[{i}]");
        let Some(part) = range(except, &field, errors) else {
            continue;
        };
        if !whole.contains(&part.network()) || part.prefix_len() <= whole.prefix_len() {
            let why = "must be a strict subset of `cidr`";
            errors.push(FieldError::invalid(field, except, why));
        }
    }
}

fn policy_types(types: &Value, path: &str, errors: &mut Errors) {
    let allowed = ["Ingress", "Egress"];
    let types_given = types.as_array().map(Vec::as_slice).unwrap_or_default();
    if types_given.len() > allowed.len() {
        let why = "may not specify more than two policyTypes";
        errors.push(FieldError::invalid(path, types, why));
        return;
    }
    for (i, one) in types_given.iter().enumerate() {
        let name = one.as_str().unwrap_or_default();
        if !allowed.contains(&name) {
            errors.push(FieldError::unsupported(
                format!("{path}[{i}]"),
                name,
                &allowed,
            ));
        }
    }
}

#[cfg(test)]
pub(crate) fn examples() -> Vec<(&'static str, &'static [Row], Value)> {
    use serde_json::json;
    let ports = json!([{"protocol": "TCP", "port": 80, "endPort": 90}, {"port": "web"}, {}]);
    let peers = json!([
        {"podSelector": {"matchLabels": {"a": "b"}}, "namespaceSelector": {}},
        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
    ]);
    vec![
        (
            "NetworkPolicy",
            POLICY,
            json!({"spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"ports": ports, "from": peers}], "egress": [{"ports": ports, "to": peers}]}}),
        ),
        (
            "EndpointSlice",
            SLICE,
            json!({"addressType": "IPv4", "ports": [{"name": "a", "port": 1, "protocol": "TCP", "appProtocol": "a.example/b"}, {"name": "", "port": 2}],
                "endpoints": [{"addresses": ["10.0.0.1"], "hostname": "a", "nodeName": "n", "hints": {"forZones": [{"name": "z"}], "forNodes": [{"name": "n"}]}}]}),
        ),
    ]
}
