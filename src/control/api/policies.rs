//! Network policies: defaults and the selector of the table column (`pkg/apis/networking/v1/defaults.go`,
//! `pkg/printers/internalversion/printers.go`).

use serde_json::{Value, json};

use super::columns::pairs;
use super::object::{at, list, set_default, text};

/// Fills in the defaults of a policy's spec: the protocol of ports, and the directions that the policy applies to. A policy
/// always isolates ingress, and egress if it has rules for it.
pub(crate) fn defaults(spec: &mut Value) {
    if !spec.is_object() {
        *spec = json!({});
    }
    set_default(spec, "podSelector", json!({}));
    for direction in ["ingress", "egress"] {
        let rules = spec.get_mut(direction).and_then(Value::as_array_mut);
        let ports = rules
            .into_iter()
            .flatten()
            .filter_map(|rule| rule.get_mut("ports"));
        let ports = ports.filter_map(Value::as_array_mut).flatten();
        for port in ports.filter(|port| port.is_object()) {
            set_default(port, "protocol", json!("TCP"));
        }
    }
    if list(spec, &["policyTypes"]).is_empty() {
        let mut types = vec!["Ingress"];
        if !list(spec, &["egress"]).is_empty() {
            types.push("Egress");
        }
        spec["policyTypes"] = types.into();
    }
}

/// A label selector in the form of `kubectl get`.
pub(crate) fn selector(selector: Option<&Value>) -> String {
    let equal = selector.and_then(|s| at(s, &["matchLabels"]));
    let mut all: Vec<String> = match equal.and_then(Value::as_object) {
        Some(labels) if !labels.is_empty() => vec![pairs(equal)],
        _ => vec![],
    };
    for one in selector
        .map(|s| list(s, &["matchExpressions"]))
        .unwrap_or_default()
    {
        let key = text(one, &["key"]).unwrap_or_default();
        let values = list(one, &["values"]).iter().filter_map(Value::as_str);
        let values = values.collect::<Vec<_>>().join(",");
        all.push(match text(one, &["operator"]).unwrap_or_default() {
            "In" => format!("{key} in ({values})"),
            "NotIn" => format!("{key} notin ({values})"),
            "Exists" => key.to_owned(),
            _ => format!("!{key}"),
        });
    }
    if all.is_empty() {
        "<none>".into()
    } else {
        all.join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_isolates_the_directions_that_it_has_rules_for() {
        for (spec, types) in [
            (json!({}), json!(["Ingress"])),
            (json!({"egress": []}), json!(["Ingress"])),
            (json!({"egress": [{}]}), json!(["Ingress", "Egress"])),
            (
                json!({"egress": [{}], "policyTypes": ["Egress"]}),
                json!(["Egress"]),
            ),
        ] {
            let mut defaulted = spec.clone();
            defaults(&mut defaulted);
            assert_eq!(defaulted["policyTypes"], types, "{spec}");
            assert_eq!(defaulted["podSelector"], json!({}));
        }
        let mut spec =
            json!({"ingress": [{"ports": [{"port": 80}, {"port": 53, "protocol": "UDP"}]}]});
        defaults(&mut spec);
        let ports = json!([{"port": 80, "protocol": "TCP"}, {"port": 53, "protocol": "UDP"}]);
        assert_eq!(spec["ingress"][0]["ports"], ports);
    }

    #[test]
    fn selectors_are_printed_like_kubectls() {
        let one = |key: &str, operator: &str, values: Value| json!({"key": key, "operator": operator, "values": values});
        for (value, expected) in [
            (json!({}), "<none>"),
            (json!({"matchLabels": {"a": "b"}}), "a=b"),
            (
                json!({"matchLabels": {"a": "b"}, "matchExpressions": [one("c", "In", json!(["d", "e"])), one("f", "NotIn", json!(["g"])), one("h", "Exists", json!([])), one("i", "DoesNotExist", json!([]))]}),
                "a=b,c in (d,e),f notin (g),h,!i",
            ),
        ] {
            assert_eq!(selector(Some(&value)), expected, "{value}");
        }
    }
}
