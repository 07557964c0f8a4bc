//! Validation of services: fields that depend on the type, on each other, or on the stored service (`ValidateService` and
//! `ValidateServiceUpdate` in `pkg/apis/core/validation/validation.go`). Rules for single fields are in `validate::rules`. Pure.

use std::collections::HashSet;
use std::net::IpAddr;

use serde_json::Value;

use super::{
    IPV4, IPV6, cluster_ip, family_of, has_address, has_node_ports, is, is_external, is_headless,
    needs_health_check, node_port, protocol, words,
};
use crate::api::error::{CIDR, FieldError, IP};
use crate::api::labels::is_label;
use crate::api::object::{at, list, text};

type Errors = Vec<FieldError>;

const ONLY_BALANCED: &str = "may only be used when `type` is 'LoadBalancer'";
const UNCHANGED: &str = "may not change once set";
const SOURCE_RANGES: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";
const TOPOLOGY_HINTS: &str = "service.kubernetes.io/topology-aware-hints";
const TOPOLOGY_MODE: &str = "service.kubernetes.io/topology-mode";

/// Validates the fields that depend on each other.
pub(crate) fn validate(service: &Value, errors: &mut Errors) {
    annotations(service, errors);
    of_type(service, errors);
    addresses(service, errors);
    ports(service, errors);
    balanced(service, errors);
    traffic(service, errors);
}

fn annotations(service: &Value, errors: &mut Errors) {
    let of = |key: &str| text(service, &["metadata", "annotations", key]);
    if let (Some(hints), Some(mode)) = (of(TOPOLOGY_HINTS), of(TOPOLOGY_MODE))
        && hints != mode
    {
        let field = format!("metadata.annotations[{TOPOLOGY_MODE}]");
        let why = format!("must match annotations[{TOPOLOGY_HINTS}] when both are specified");
        errors.push(FieldError::invalid(field, &mode.into(), &why));
    }
    let given = list(service, &["spec", "loadBalancerSourceRanges"]);
    if let (Some(ranges), true) = (of(SOURCE_RANGES), given.is_empty()) {
        let field = format!("metadata.annotations[{SOURCE_RANGES}]");
        if !is(service, "LoadBalancer") {
            errors.push(FieldError::forbidden(field.as_str(), ONLY_BALANCED));
        }
        let ranges = ranges.trim();
        let ranges = ranges.split(',').filter(|_| !ranges.is_empty());
        for range in ranges
            .map(str::trim)
            .filter(|r| r.parse::<ipnet::IpNet>().is_err())
        {
            errors.push(FieldError::invalid(field.as_str(), &range.into(), CIDR));
        }
    }
}

fn of_type(service: &Value, errors: &mut Errors) {
    let kind = text(service, &["spec", "type"]).unwrap_or("ClusterIP");
    if has_node_ports(service) && cluster_ip(service) == "None" {
        let why = format!("may not be set to 'None' for {kind} services");
        errors.push(FieldError::invalid(
            "spec.clusterIPs[0]",
            &"None".into(),
            &why,
        ));
    }
    if has_address(service) {
        return;
    }
    if text(service, &["spec", "externalName"]).is_none_or(str::is_empty) {
        errors.push(FieldError::required("spec.externalName", ""));
    }
    let has_ip = !cluster_ip(service).is_empty() || !words(service, "clusterIPs").is_empty();
    let has = |key: &str| at(service, &["spec", key]).is_some();
    for (field, is_set) in [
        ("clusterIPs", has_ip),
        ("ipFamilies", !words(service, "ipFamilies").is_empty()),
        ("ipFamilyPolicy", has("ipFamilyPolicy")),
    ] {
        if is_set {
            let why = "may not be set for ExternalName services";
            errors.push(FieldError::forbidden(format!("spec.{field}"), why));
        }
    }
}

/// Validates `clusterIP`, `clusterIPs`, `ipFamilies` and `ipFamilyPolicy` (`ValidateServiceClusterIPsRelatedFields`).
pub(super) fn addresses(service: &Value, errors: &mut Errors) {
    if !has_address(service) {
        return;
    }
    let (ips, families) = (words(service, "clusterIPs"), words(service, "ipFamilies"));
    let (field, shown) = ("spec.clusterIPs", Value::from(ips.clone()));
    match (cluster_ip(service), ips.first()) {
        ("", None) => {}
        ("", Some(_)) => {
            let why = "must be empty when `clusterIP` is not specified";
            errors.push(FieldError::invalid(field, &shown, why));
        }
        (_, None) => errors.push(FieldError::required(field, "")),
        (one, Some(first)) if one != first => {
            let why = "first value must match `clusterIP`";
            errors.push(FieldError::invalid(field, &shown, why));
        }
        _ => {}
    }
    families_of(service, errors);
    let mut is_invalid = false;
    for (i, ip) in ips.iter().enumerate() {
        if i == 0 && ip == "None" {
            if ips.len() > 1 {
                is_invalid = true;
                let why = "'None' must be the first and only value";
                errors.push(FieldError::invalid(field, &shown, why));
            }
        } else if ip.parse::<IpAddr>().is_err() {
            is_invalid = true;
            errors.push(FieldError::invalid(
                format!("{field}[{i}]"),
                &ip.as_str().into(),
                IP,
            ));
        }
    }
    if ips.len() > 2 {
        errors.push(FieldError::too_many(field, ips.len(), 2));
    }
    if is_invalid {
        return;
    }
    let of: HashSet<Option<&str>> = ips.iter().map(|ip| family_of(ip)).collect();
    if ips.len() > 1 && of.len() != 2 {
        let why = "may specify no more than one IP for each IP family";
        errors.push(FieldError::invalid(field, &shown, why));
    }
    for (i, (ip, family)) in ips.iter().zip(&families).enumerate() {
        let is_other = family_of(ip).is_some_and(|is| is != family);
        if is_other && [IPV4, IPV6].contains(&family.as_str()) {
            let why = format!("expected an {family} value as indicated by `ipFamilies[{i}]`");
            let field = format!("{field}[{i}]");
            errors.push(FieldError::invalid(field, &ip.as_str().into(), &why));
        }
    }
}

/// Validates `ipFamilies` and `ipFamilyPolicy`.
fn families_of(service: &Value, errors: &mut Errors) {
    let families = words(service, "ipFamilies");
    let mut seen = HashSet::new();
    for (i, family) in families.iter().enumerate() {
        let field = format!("spec.ipFamilies[{i}]");
        if ![IPV4, IPV6].contains(&family.as_str()) {
            errors.push(FieldError::unsupported(
                field.as_str(),
                family,
                &[IPV4, IPV6],
            ));
        }
        if !seen.insert(family) {
            errors.push(FieldError::duplicate(field, family));
        }
    }
    let policies = ["PreferDualStack", "RequireDualStack", "SingleStack"];
    let policy = text(service, &["spec", "ipFamilyPolicy"]).filter(|p| !p.is_empty());
    if let Some(policy) = policy.filter(|policy| !policies.contains(policy)) {
        errors.push(FieldError::unsupported(
            "spec.ipFamilyPolicy",
            policy,
            &policies,
        ));
    }
}

fn ports(service: &Value, errors: &mut Errors) {
    let kind = text(service, &["spec", "type"]).unwrap_or("ClusterIP");
    let mut seen = HashSet::new();
    for (i, port) in list(service, &["spec", "ports"]).iter().enumerate() {
        let Some(number) = node_port(port) else {
            continue;
        };
        let field = format!("spec.ports[{i}].nodePort");
        if !has_node_ports(service) {
            let why = format!("may not be used when `type` is '{kind}'");
            errors.push(FieldError::forbidden(field, &why));
        } else if !seen.insert((protocol(port), number)) {
            errors.push(FieldError::duplicate(field, &number.to_string()));
        }
    }
}

/// Fields of load balancers.
fn balanced(service: &Value, errors: &mut Errors) {
    if is(service, "LoadBalancer") {
        return;
    }
    let has = |key: &str| at(service, &["spec", key]).is_some();
    let ranges = list(service, &["spec", "loadBalancerSourceRanges"]);
    for (field, is_set) in [
        // Upstream's path has a capital letter, too.
        ("LoadBalancerSourceRanges", !ranges.is_empty()),
        (
            "allocateLoadBalancerNodePorts",
            has("allocateLoadBalancerNodePorts"),
        ),
        ("loadBalancerClass", has("loadBalancerClass")),
    ] {
        if is_set {
            errors.push(FieldError::forbidden(
                format!("spec.{field}"),
                ONLY_BALANCED,
            ));
        }
    }
}

fn traffic(service: &Value, errors: &mut Errors) {
    let policy = &service["spec"]["externalTrafficPolicy"];
    if !policy.is_null() && *policy != "" && !is_external(service) {
        let why = "may only be set for externally-accessible services";
        errors.push(FieldError::invalid(
            "spec.externalTrafficPolicy",
            policy,
            why,
        ));
    }
    let check = &service["spec"]["healthCheckNodePort"];
    let number = check.as_i64().unwrap_or(0);
    let field = "spec.healthCheckNodePort";
    if needs_health_check(service) {
        if !(1..=65_535).contains(&number) {
            let why = "must be between 1 and 65535, inclusive";
            errors.push(FieldError::invalid(field, check, why));
        }
    } else if number != 0 {
        let why =
            "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'";
        errors.push(FieldError::invalid(field, check, why));
    }
}

/// Validates the addresses of a load balancer (`ValidateLoadBalancerStatus`).
pub(crate) fn status(service: &Value, errors: &mut Errors) {
    let ingress = list(service, &["status", "loadBalancer", "ingress"]);
    let path = "status.loadBalancer.ingress";
    if !is(service, "LoadBalancer") && !ingress.is_empty() {
        let why = "may only be used when `spec.type` is 'LoadBalancer'";
        errors.push(FieldError::forbidden(path, why));
        return;
    }
    for (i, one) in ingress.iter().enumerate() {
        let of = |key: &str| text(one, &[key]).unwrap_or_default();
        let (ip, mode, host) = (of("ip"), of("ipMode"), of("hostname"));
        let field = |key: &str| format!("{path}[{i}].{key}");
        if !ip.is_empty() && ip.parse::<IpAddr>().is_err() {
            errors.push(FieldError::invalid(field("ip"), &ip.into(), IP));
        }
        if !mode.is_empty() && ip.is_empty() {
            let why = "may not be specified when `ip` is not set";
            errors.push(FieldError::forbidden(field("ipMode"), why));
        } else if !["", "Proxy", "VIP"].contains(&mode) {
            errors.push(FieldError::unsupported(
                field("ipMode"),
                mode,
                &["Proxy", "VIP"],
            ));
        }
        if !host.is_empty() && host.parse::<IpAddr>().is_ok() {
            let why = "must be a DNS name, not an IP address";
            errors.push(FieldError::invalid(field("hostname"), &host.into(), why));
        } else if !host.is_empty() && !host.split('.').all(is_label) {
            let why = "must be a DNS name: labels of lower case letters, digits and '-', separated by dots";
            errors.push(FieldError::invalid(field("hostname"), &host.into(), why));
        }
    }
}

/// Validates an update: the first address and family stay, and the second ones are released only by the policy
/// `SingleStack`.
pub(crate) fn update(old: &Value, new: &Value, errors: &mut Errors) {
    let balanced = |service| is(service, "LoadBalancer");
    let class = |service: &Value| service["spec"]["loadBalancerClass"].clone();
    if balanced(old) && balanced(new) && class(old) != class(new) {
        errors.push(FieldError::invalid(
            "spec.loadBalancerClass",
            &class(new),
            UNCHANGED,
        ));
    }
    let check = |service: &Value| service["spec"]["healthCheckNodePort"].clone();
    if needs_health_check(old) && needs_health_check(new) && check(old) != check(new) {
        let field = "spec.healthCheckNodePort";
        errors.push(FieldError::forbidden(field, "field is immutable"));
    }
    if !has_address(old) || !has_address(new) || is_headless(old) && is_headless(new) {
        return;
    }
    unchanged(old, new, "clusterIPs", errors);
    if is_headless(old) == is_headless(new) {
        unchanged(old, new, "ipFamilies", errors);
    }
}

/// `validateUpgradeDowngradeClusterIPs` and `validateUpgradeDowngradeIPFamilies`.
fn unchanged(old: &Value, new: &Value, key: &str, errors: &mut Errors) {
    let (before, after) = (words(old, key), words(new, key));
    let shown = Value::from(after.clone());
    if after.is_empty() && !before.is_empty() {
        let what = if key == "clusterIPs" {
            "clusterIP"
        } else {
            "ipFamily"
        };
        let why = format!("primary {what} can not be unset");
        errors.push(FieldError::invalid(format!("spec.{key}[0]"), &shown, &why));
        return;
    }
    for (i, (was, now)) in before.iter().zip(&after).enumerate() {
        if was != now {
            errors.push(FieldError::invalid(
                format!("spec.{key}[{i}]"),
                &shown,
                UNCHANGED,
            ));
        }
    }
    let policy = &new["spec"]["ipFamilyPolicy"];
    if after.len() < before.len() && *policy != "SingleStack" {
        let what = if key == "clusterIPs" {
            "clusterIP"
        } else {
            "ipFamily"
        };
        let why = format!("must be set to 'SingleStack' when releasing the secondary {what}");
        errors.push(FieldError::invalid("spec.ipFamilyPolicy", policy, &why));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn service(spec: &Value) -> Value {
        let mut all = json!({"metadata": {"name": "s"}, "spec": {"type": "ClusterIP", "clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9"],
            "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack", "ports": [{"port": 80, "protocol": "TCP"}]}});
        json_patch::merge(&mut all["spec"], spec);
        all
    }

    fn shown(errors: &[FieldError]) -> String {
        let all = errors.iter().map(|e| format!("{}: {}", e.field, e.detail));
        all.collect::<Vec<_>>().join("; ")
    }

    /// Specs, and the errors after `=>`.
    const INVALID: &str = include_str!("invalid.txt");

    #[test]
    fn fields_must_fit_to_the_type_and_to_each_other() {
        let cases = INVALID.lines().filter(|line| !line.starts_with('#'));
        for line in cases {
            let (spec, expected) = line.split_once(" =>").expect(line);
            let spec: Value = serde_json::from_str(spec).expect(line);
            let mut errors = vec![];
            validate(&service(&spec), &mut errors);
            assert_eq!(shown(&errors), expected.trim_start(), "{line}");
        }
    }

    #[test]
    fn annotations_are_validated() {
        let invalid = |annotations: Value| {
            let mut service = service(&json!({}));
            service["metadata"]["annotations"] = annotations;
            let mut errors = vec![];
            validate(&service, &mut errors);
            errors.len()
        };
        assert_eq!(
            invalid(json!({TOPOLOGY_HINTS: "Auto", TOPOLOGY_MODE: "Auto"})),
            0
        );
        assert_eq!(
            invalid(json!({TOPOLOGY_HINTS: "Auto", TOPOLOGY_MODE: "Other"})),
            1
        );
        assert_eq!(invalid(json!({SOURCE_RANGES: ""})), 1);
        assert_eq!(invalid(json!({SOURCE_RANGES: "10.0.0.0/8, nonsense"})), 2);
    }

    #[test]
    fn the_addresses_of_load_balancers_are_valid() {
        for (kind, ingress, expected) in [
            ("ClusterIP", json!([]), 0),
            ("ClusterIP", json!([{"ip": "192.0.2.1"}]), 1),
            (
                "LoadBalancer",
                json!([{"ip": "192.0.2.1", "ipMode": "VIP"}, {"hostname": "a.example"}]),
                0,
            ),
            ("LoadBalancer", json!([{"ip": "nonsense"}]), 1),
            (
                "LoadBalancer",
                json!([{"ip": "192.0.2.1", "ipMode": "Other"}]),
                1,
            ),
            (
                "LoadBalancer",
                json!([{"hostname": "a.example", "ipMode": "VIP"}]),
                1,
            ),
            (
                "LoadBalancer",
                json!([{"hostname": "192.0.2.1"}, {"hostname": "A"}]),
                2,
            ),
        ] {
            let mut errors = vec![];
            let mut service = service(&json!({"type": kind}));
            service["status"] = json!({"loadBalancer": {"ingress": ingress}});
            status(&service, &mut errors);
            assert_eq!(errors.len(), expected, "{kind} {ingress}: {errors:?}");
        }
    }

    #[test]
    fn addresses_and_families_stay() {
        let of = |old: Value, new: Value| {
            let mut errors = vec![];
            update(&service(&old), &service(&new), &mut errors);
            shown(&errors)
        };
        let two = json!({"clusterIPs": ["10.96.0.9", "fd00::9"], "ipFamilies": ["IPv4", "IPv6"], "ipFamilyPolicy": "PreferDualStack"});
        let none = json!({"clusterIP": "None", "clusterIPs": ["None"]});
        let class = |class: &str| json!({"type": "LoadBalancer", "loadBalancerClass": class});
        let check = |port: i64| json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": port});
        for (old, new, expected) in [
            (json!({}), json!({}), ""),
            (json!({}), two.clone(), ""),
            (two.clone(), json!({}), ""),
            (
                two.clone(),
                json!({"ipFamilyPolicy": "PreferDualStack"}),
                "spec.ipFamilyPolicy: Invalid value: \"PreferDualStack\": must be set to 'SingleStack' when releasing the secondary clusterIP; spec.ipFamilyPolicy: Invalid value: \"PreferDualStack\": must be set to 'SingleStack' when releasing the secondary ipFamily",
            ),
            (
                json!({}),
                json!({"clusterIPs": ["10.96.0.8"]}),
                "spec.clusterIPs[0]: Invalid value: [\"10.96.0.8\"]: may not change once set",
            ),
            (
                json!({}),
                json!({"clusterIPs": null}),
                "spec.clusterIPs[0]: Invalid value: []: primary clusterIP can not be unset",
            ),
            (
                two,
                json!({"ipFamilies": ["IPv6"], "clusterIPs": ["10.96.0.9", "fd00::9"]}),
                "spec.ipFamilies[0]: Invalid value: [\"IPv6\"]: may not change once set",
            ),
            (none.clone(), none.clone(), ""),
            (
                json!({}),
                none,
                "spec.clusterIPs[0]: Invalid value: [\"None\"]: may not change once set",
            ),
            (class("a"), class("a"), ""),
            (
                class("a"),
                class("b"),
                "spec.loadBalancerClass: Invalid value: \"b\": may not change once set",
            ),
            (
                check(30_000),
                check(30_001),
                "spec.healthCheckNodePort: Forbidden: field is immutable",
            ),
            (
                json!({}),
                json!({"type": "ExternalName", "clusterIPs": null}),
                "",
            ),
        ] {
            assert_eq!(of(old.clone(), new.clone()), expected, "{old} {new}");
        }
    }
}
