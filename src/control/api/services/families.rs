//! The IP families of a service (KEP-563, `initIPFamilyFields` in `pkg/registry/core/service/storage/alloc.go`). Pure.

use std::net::IpAddr;

use serde_json::Value;

use super::validate::addresses;
use super::{IPV4, IPV6, cluster_ip, family_of, has_address, is, words};
use crate::api::error::FieldError;
use crate::api::object::{at, text};
use crate::ranges::Ranges;

const SINGLE: &str = "SingleStack";
const PREFER: &str = "PreferDualStack";
const REQUIRE: &str = "RequireDualStack";
const POLICY: &str = "spec.ipFamilyPolicy";

/// The families of the ranges, the default one first.
fn configured(ranges: &Ranges) -> Vec<&'static str> {
    let families = ranges.iter().map(|range| match range.addr() {
        IpAddr::V4(_) => IPV4,
        IpAddr::V6(_) => IPV6,
    });
    families.collect()
}

fn other(family: &str) -> &'static str {
    if family == IPV4 { IPV6 } else { IPV4 }
}

fn policy(service: &Value) -> Option<&str> {
    text(service, &["spec", "ipFamilyPolicy"]).filter(|policy| !policy.is_empty())
}

/// Whether an update leaves the addresses of a service that prefers two families as they are. Such a service is not changed when
/// the cluster gets or loses a family.
fn is_settled(old: &Value, new: &Value) -> bool {
    let kind = |service| {
        text(service, &["spec", "type"])
            .unwrap_or("ClusterIP")
            .to_owned()
    };
    let is_preferred = |service| policy(service) == Some(PREFER);
    kind(old) == kind(new)
        && has_address(new)
        && is_preferred(old)
        && is_preferred(new)
        && words(old, "clusterIPs") == words(new, "clusterIPs")
        && words(old, "ipFamilies") == words(new, "ipFamilies")
}

/// The policy of a service that names none.
fn default_policy(old: Option<&Value>, service: &Value) -> String {
    match old.and_then(policy) {
        Some(policy) => policy.into(),
        None if is_custom(service) => REQUIRE.into(),
        None => SINGLE.into(),
    }
}

/// Whether a service has neither an address nor a selector. Users make its endpoints, of any family.
fn is_custom(service: &Value) -> bool {
    let selector = at(service, &["spec", "selector"]).and_then(Value::as_object);
    cluster_ip(service) == "None" && selector.is_none_or(serde_json::Map::is_empty)
}

/// Sets `ipFamilyPolicy` and `ipFamilies`, and removes a second address that an update releases. Returns why the service cannot
/// have what it requests.
pub(super) fn init(ranges: &Ranges, old: Option<&Value>, service: &mut Value) -> Vec<FieldError> {
    if is(service, "ExternalName") || old.is_some_and(|old| is_settled(old, service)) {
        return vec![];
    }
    if policy(service).is_none() {
        service["spec"]["ipFamilyPolicy"] = default_policy(old, service).into();
    }
    let mut errors = vec![];
    addresses(service, &mut errors);
    if !errors.is_empty() {
        return errors;
    }
    let chosen = policy(service).unwrap_or_default().to_owned();
    if let Some(old) = old {
        reduce(old, service, &chosen, &mut errors);
    }
    let (ips, mut families) = (words(service, "clusterIPs"), words(service, "ipFamilies"));
    too_many(&chosen, ips.len(), families.len(), &mut errors);
    let there = configured(ranges);
    for (i, ip) in ips.iter().enumerate().skip(families.len()) {
        match family_of(ip) {
            None => break,
            Some(family) if there.contains(&family) => families.push(family.into()),
            Some(family) => {
                let why = format!("{family} is not configured on this cluster");
                let all = Value::from(ips.clone());
                errors.push(FieldError::invalid(
                    format!("spec.clusterIPs[{i}]"),
                    &all,
                    &why,
                ));
            }
        }
    }
    if !errors.is_empty() {
        return errors;
    }
    if is_custom(service) {
        if families.is_empty() {
            families.extend(there.first().map(|family| (*family).to_owned()));
        }
    } else {
        errors = unavailable(old, &there, &chosen, &families);
        if families.is_empty() {
            families.extend(there.first().map(|family| (*family).to_owned()));
        }
    }
    let adds = is_custom(service) || there.len() == 2;
    if let ([only], true) = (&families[..], adds && chosen != SINGLE) {
        families.push(other(only).into());
    }
    service["spec"]["ipFamilies"] = families.into();
    errors
}

/// The policy for one family excludes a second address or family.
fn too_many(chosen: &str, ips: usize, families: usize, errors: &mut Vec<FieldError>) {
    for (count, what) in [(ips, "cluster IPs"), (families, "IP families")] {
        if chosen == SINGLE && count == 2 {
            let why = format!(
                "must be 'RequireDualStack' or 'PreferDualStack' when multiple {what} are specified"
            );
            errors.push(FieldError::invalid(POLICY, &chosen.into(), &why));
        }
    }
}

/// An update to one family releases the second address; any other policy keeps both.
fn reduce(old: &Value, service: &mut Value, chosen: &str, errors: &mut Vec<FieldError>) {
    for (key, what) in [("clusterIPs", "cluster IP"), ("ipFamilies", "IP family")] {
        let (before, after) = (words(old, key), words(service, key));
        if chosen == SINGLE {
            if before == after && after.len() > 1 {
                service["spec"][key] = after[..1].to_vec().into();
            }
        } else if !after.is_empty() && after.len() < before.len() {
            let why = format!("must be 'SingleStack' to release the secondary {what}");
            errors.push(FieldError::invalid(POLICY, &chosen.into(), &why));
        }
    }
}

/// Families that the cluster does not have. Those of the stored service stay, so that it can be changed otherwise.
fn unavailable(
    old: Option<&Value>,
    there: &[&str],
    chosen: &str,
    families: &[String],
) -> Vec<FieldError> {
    let mut errors = vec![];
    let before = old.map(|old| words(old, "ipFamilies")).unwrap_or_default();
    if chosen == REQUIRE && there.len() < 2 && before.len() < 2 {
        let why = "this cluster is not configured for dual-stack services";
        errors.push(FieldError::invalid(POLICY, &chosen.into(), why));
    }
    for (i, family) in families.iter().enumerate() {
        if !there.contains(&family.as_str()) && !before.contains(family) {
            let field = format!("spec.ipFamilies[{i}]");
            let why = "not configured on this cluster";
            errors.push(FieldError::invalid(field, &family.as_str().into(), why));
        }
    }
    errors
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The families after a write, or the errors.
    fn after(ranges: &str, old: Option<&Value>, spec: &Value) -> String {
        let mut service = json!({"metadata": {"name": "s"}, "spec": {"selector": {"a": "b"}}});
        json_patch::merge(&mut service["spec"], spec);
        let ranges = ranges.parse().expect("ranges");
        let errors = init(&ranges, old, &mut service);
        if errors.is_empty() {
            let families = words(&service, "ipFamilies").join(" ");
            let ips = words(&service, "clusterIPs").join(" ");
            let policy = policy(&service).unwrap_or_default();
            return format!("{policy} {families} [{ips}]");
        }
        let shown = errors.iter().map(|e| format!("{}: {}", e.field, e.detail));
        shown.collect::<Vec<_>>().join("; ")
    }

    const ONE: &str = "10.96.0.0/16";
    const SIX: &str = "fd00::/108";
    const BOTH: &str = "10.96.0.0/16,fd00::/108";

    #[test]
    fn new_services_get_the_families_of_the_cluster() {
        let policy = |policy: &str| json!({"ipFamilyPolicy": policy});
        let custom = json!({"clusterIP": "None", "clusterIPs": ["None"], "selector": null});
        for (ranges, spec, expected) in [
            (ONE, json!({}), "SingleStack IPv4 []"),
            (SIX, json!({}), "SingleStack IPv6 []"),
            (BOTH, json!({}), "SingleStack IPv4 []"),
            (BOTH, policy(PREFER), "PreferDualStack IPv4 IPv6 []"),
            (ONE, policy(PREFER), "PreferDualStack IPv4 []"),
            (BOTH, policy(REQUIRE), "RequireDualStack IPv4 IPv6 []"),
            (
                ONE,
                policy(REQUIRE),
                "spec.ipFamilyPolicy: Invalid value: \"RequireDualStack\": this cluster is not configured for dual-stack services",
            ),
            (BOTH, json!({"ipFamilies": ["IPv6"]}), "SingleStack IPv6 []"),
            (
                ONE,
                json!({"ipFamilies": ["IPv6"]}),
                "spec.ipFamilies[0]: Invalid value: \"IPv6\": not configured on this cluster",
            ),
            (
                BOTH,
                json!({"ipFamilyPolicy": PREFER, "ipFamilies": ["IPv6"]}),
                "PreferDualStack IPv6 IPv4 []",
            ),
            (
                BOTH,
                json!({"clusterIP": "fd00::9", "clusterIPs": ["fd00::9"]}),
                "SingleStack IPv6 [fd00::9]",
            ),
            (
                ONE,
                json!({"clusterIP": "fd00::9", "clusterIPs": ["fd00::9"]}),
                "spec.clusterIPs[0]: Invalid value: [\"fd00::9\"]: IPv6 is not configured on this cluster",
            ),
            (
                BOTH,
                json!({"ipFamilies": ["IPv4", "IPv6"]}),
                "spec.ipFamilyPolicy: Invalid value: \"SingleStack\": must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified",
            ),
            (ONE, custom.clone(), "RequireDualStack IPv4 IPv6 [None]"),
            (SIX, custom, "RequireDualStack IPv6 IPv4 [None]"),
            (
                ONE,
                json!({"clusterIP": "None", "clusterIPs": ["None"]}),
                "SingleStack IPv4 [None]",
            ),
            (ONE, json!({"type": "ExternalName"}), "  []"),
        ] {
            assert_eq!(after(ranges, None, &spec), expected, "{ranges} {spec}");
        }
    }

    #[test]
    fn updates_add_or_release_the_second_family_only_on_request() {
        let two = json!({"type": "ClusterIP", "ipFamilyPolicy": PREFER, "clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9", "fd00::9"], "ipFamilies": ["IPv4", "IPv6"]});
        let one = json!({"type": "ClusterIP", "ipFamilyPolicy": PREFER, "clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9"], "ipFamilies": ["IPv4"]});
        let with = |spec: &Value, more: Value| {
            let mut spec = spec.clone();
            json_patch::merge(&mut spec, &more);
            spec
        };
        let single = json!({"ipFamilyPolicy": SINGLE});
        for (ranges, old, new, expected) in [
            (BOTH, &one, one.clone(), "PreferDualStack IPv4 [10.96.0.9]"),
            (
                ONE,
                &two,
                two.clone(),
                "PreferDualStack IPv4 IPv6 [10.96.0.9 fd00::9]",
            ),
            (
                BOTH,
                &one,
                with(&one, json!({"ipFamilyPolicy": REQUIRE})),
                "RequireDualStack IPv4 IPv6 [10.96.0.9]",
            ),
            (
                BOTH,
                &two,
                with(&two, single.clone()),
                "SingleStack IPv4 [10.96.0.9]",
            ),
            (
                BOTH,
                &two,
                with(&two, json!({"clusterIPs": ["10.96.0.9"]})),
                "spec.ipFamilyPolicy: Invalid value: \"PreferDualStack\": must be 'SingleStack' to release the secondary cluster IP",
            ),
            // The range of the family was removed; other fields can still be changed.
            (
                SIX,
                &one,
                with(&one, single),
                "SingleStack IPv4 [10.96.0.9]",
            ),
        ] {
            let old = json!({"spec": old});
            assert_eq!(after(ranges, Some(&old), &new), expected, "{ranges} {new}");
        }
    }
}
