//! The kinds `Ingress`, `IngressClass`, `ServiceCIDR` and `IPAddress`: defaults, admission, updates and table columns
//! (`pkg/apis/networking`, `plugin/pkg/admission/network/defaultingressclass`, `pkg/printers/internalversion/printers.go`).
//!
//! The control plane stores these objects for the programs that act on them, for instance an ingress controller. Addresses of
//! services come from the control plane's own ranges and not from these objects (`services::claims`), so clients that
//! write ranges or addresses get a warning.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::columns::{AGE, Column, NAME};
use super::error::FieldError;
use super::object::{at, entry, list, set_default, text};
use super::resources::Resource;
use crate::store::Store;

type Errors = Vec<FieldError>;

/// The annotation that named the class of an Ingress before `spec.ingressClassName` did.
pub(super) const CLASS_ANNOTATION: &str = "kubernetes.io/ingress.class";
const DEFAULT_CLASS: &str = "ingressclass.kubernetes.io/is-default-class";
const IMMUTABLE: &str = "field is immutable";
/// The ServiceCIDR with the control plane's own ranges.
pub(crate) const DEFAULT_RANGE: &str = "kubernetes";

/// Fills in the defaults of a kind. Upstream's types always serialise `spec` and `status`.
pub(super) fn defaults(kind: &str, object: &mut Value) {
    match kind {
        "Ingress" => {
            entry(object, "spec");
            let status = entry(object, "status");
            status.entry("loadBalancer").or_insert(json!({}));
        }
        "IngressClass" => {
            let parameters = entry(object, "spec").get_mut("parameters");
            if let Some(parameters) = parameters.filter(|p| p.is_object()) {
                set_default(parameters, "scope", json!("Cluster"));
            }
        }
        "ServiceCIDR" => {
            entry(object, "spec");
            entry(object, "status");
        }
        "IPAddress" => {
            entry(object, "spec");
        }
        _ => {}
    }
}

fn annotation<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    text(object, &["metadata", "annotations", key])
}

fn is_default_class(class: &Value) -> bool {
    annotation(class, DEFAULT_CLASS) == Some("true")
}

/// Admission of Ingresses: sets the default class if none is named. If several classes are marked as the default, the
/// newest applies, and of classes of the same second the one whose name is first.
pub(super) fn admit_ingress(store: &Store, ingress: &mut Value) {
    let named = at(ingress, &["spec", "ingressClassName"]).is_some_and(|name| !name.is_null());
    if named || annotation(ingress, CLASS_ANNOTATION).is_some() {
        return;
    }
    let Some(resource) = Resource::of_kind("IngressClass") else {
        return;
    };
    let (classes, _) = store.list(&resource.prefix(None));
    let classes = classes
        .into_iter()
        .filter_map(|(_, record)| serde_json::from_slice::<Value>(&record.value).ok());
    let created = |class: &Value| {
        let time = text(class, &["metadata", "creationTimestamp"]);
        time.unwrap_or_default().to_owned()
    };
    let newest = classes.filter(is_default_class).max_by(|a, b| {
        let by_name = || super::object::name(b).cmp(super::object::name(a));
        created(a).cmp(&created(b)).then_with(by_name)
    });
    if let Some(class) = newest {
        let name = super::object::name(&class).into();
        entry(ingress, "spec").insert("ingressClassName".into(), name);
    }
}

/// Warnings about a new object.
pub(super) fn warnings(kind: &str, object: &Value) -> Vec<String> {
    let named = at(object, &["spec", "ingressClassName"]).is_some_and(|name| !name.is_null());
    match kind {
        "Ingress" if !named && annotation(object, CLASS_ANNOTATION).is_some() => vec![format!(
            "annotation {CLASS_ANNOTATION:?} is deprecated, please use 'spec.ingressClassName' instead"
        )],
        _ => vec![],
    }
}

fn immutable(field: &str, path: &[&str], old: &Value, new: &Value, errors: &mut Errors) {
    let (before, after) = (at(old, path), at(new, path));
    if before != after {
        let value = after.cloned().unwrap_or_default();
        errors.push(FieldError::invalid(field, &value, IMMUTABLE));
    }
}

/// Validates an update of one of these kinds.
pub(super) fn validate_update(kind: &str, old: &Value, new: &Value, errors: &mut Errors) {
    match kind {
        "IngressClass" => immutable("spec.controller", &["spec", "controller"], old, new, errors),
        "IPAddress" => immutable("spec.parentRef", &["spec", "parentRef"], old, new, errors),
        "ServiceCIDR" => {
            let cidrs = |object| list(object, &["spec", "cidrs"]);
            let (before, after) = (cidrs(old), cidrs(new));
            // A second family may be added.
            if before.len() != after.len() && (before.len(), after.len()) != (1, 2) {
                let value = Value::from(after.to_vec());
                errors.push(FieldError::invalid("spec.cidrs", &value, IMMUTABLE));
                return;
            }
            for (i, (before, after)) in before.iter().zip(after).enumerate() {
                if before != after {
                    let field = format!("spec.cidrs[{i}]");
                    errors.push(FieldError::invalid(field, after, IMMUTABLE));
                }
            }
        }
        _ => {}
    }
}

/// The column definitions of a kind.
pub(super) fn columns(kind: &str) -> Option<&'static [Column]> {
    Some(match kind {
        "Ingress" => &[
            NAME,
            ("Class", "string", 0),
            ("Hosts", "string", 0),
            ("Address", "string", 0),
            ("Ports", "string", 0),
            AGE,
        ],
        "IngressClass" => &[
            NAME,
            ("Controller", "string", 0),
            ("Parameters", "string", 0),
            AGE,
        ],
        "ServiceCIDR" => &[NAME, ("CIDRs", "string", 0), AGE],
        // Upstream's definitions lack the age, which its rows have.
        "IPAddress" => &[NAME, ("ParentRef", "string", 0), AGE],
        _ => return None,
    })
}

/// At most three hosts; `*` if no rule has one.
fn hosts(ingress: &Value) -> String {
    const MOST: usize = 3;
    let rules = list(ingress, &["spec", "rules"]);
    let hosts = rules.iter().filter_map(|rule| text(rule, &["host"]));
    let hosts: Vec<&str> = hosts.filter(|host| !host.is_empty()).collect();
    match hosts.as_slice() {
        [] => "*".into(),
        hosts if hosts.len() <= MOST => hosts.join(","),
        hosts => {
            let shown = hosts[..MOST].join(",");
            format!("{shown} + {} more...", rules.len() - MOST)
        }
    }
}

/// The sorted addresses or host names in the status.
fn addresses(ingress: &Value) -> String {
    let points = list(ingress, &["status", "loadBalancer", "ingress"]).iter();
    let shown = points.filter_map(|point| {
        let of = |key| text(point, &[key]).filter(|value| !value.is_empty());
        of("ip").or_else(|| of("hostname"))
    });
    let shown: BTreeSet<&str> = shown.collect();
    shown.into_iter().collect::<Vec<_>>().join(",")
}

/// `deployments.apps/default/web`, the object that an address belongs to.
fn parent(address: &Value) -> String {
    let Some(parent) = at(address, &["spec", "parentRef"]).filter(|parent| parent.is_object())
    else {
        return "<none>".into();
    };
    let of = |key| text(parent, &[key]).unwrap_or_default();
    let mut shown = match of("group") {
        "" => of("resource").to_owned(),
        group => format!("{}.{group}", of("resource")),
    };
    shown.make_ascii_lowercase();
    for part in ["namespace", "name"] {
        if part == "name" || !of(part).is_empty() {
            shown.push('/');
            shown.push_str(of(part));
        }
    }
    shown
}

/// The cells of a class.
fn class(class: &Value, age: &str) -> Vec<Value> {
    let name = super::object::name(class);
    let suffix = if is_default_class(class) {
        " (default)"
    } else {
        ""
    };
    let parameters = at(class, &["spec", "parameters"]).filter(|p| p.is_object());
    let parameters = parameters.map(|parameters| {
        let of = |key| text(parameters, &[key]).unwrap_or_default();
        let group = text(parameters, &["apiGroup"]);
        let group = group.map(|group| format!(".{group}")).unwrap_or_default();
        format!("{}{group}/{}", of("kind"), of("name"))
    });
    let controller = text(class, &["spec", "controller"]).unwrap_or_default();
    vec![
        format!("{name}{suffix}").into(),
        controller.into(),
        parameters.unwrap_or_else(|| "<none>".into()).into(),
        age.into(),
    ]
}

/// The cells of a table row.
pub(super) fn cells(kind: &str, object: &Value, age: &str) -> Vec<Value> {
    let name = super::object::name(object);
    match kind {
        "Ingress" => {
            let class = text(object, &["spec", "ingressClassName"]).unwrap_or("<none>");
            let has_tls = !list(object, &["spec", "tls"]).is_empty();
            let ports = if has_tls { "80, 443" } else { "80" };
            vec![
                name.into(),
                class.into(),
                hosts(object).into(),
                addresses(object).into(),
                ports.into(),
                age.into(),
            ]
        }
        "IngressClass" => class(object, age),
        "ServiceCIDR" => {
            let cidrs = list(object, &["spec", "cidrs"]).iter();
            let cidrs: Vec<&str> = cidrs.filter_map(Value::as_str).collect();
            vec![name.into(), cidrs.join(",").into(), age.into()]
        }
        _ => vec![name.into(), parent(object).into(), age.into()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn immutable_fields_do_not_change() {
        let class = |controller: &str, label: &str| json!({"metadata": {"labels": {"a": label}}, "spec": {"controller": controller}});
        let range = |cidrs: &[&str]| json!({"spec": {"cidrs": cidrs}});
        let address =
            |name: &str| json!({"spec": {"parentRef": {"resource": "services", "name": name}}});
        for (kind, old, new, fields) in [
            (
                "IngressClass",
                class("a.example/b", "1"),
                class("a.example/b", "2"),
                &[][..],
            ),
            (
                "IngressClass",
                class("a.example/b", "1"),
                class("a.example/c", "1"),
                &["spec.controller"],
            ),
            ("IPAddress", address("a"), address("a"), &[]),
            ("IPAddress", address("a"), address("b"), &["spec.parentRef"]),
            (
                "ServiceCIDR",
                range(&["10.0.0.0/24"]),
                range(&["10.0.0.0/24"]),
                &[],
            ),
            (
                "ServiceCIDR",
                range(&["10.0.0.0/24"]),
                range(&["10.0.1.0/24"]),
                &["spec.cidrs[0]"],
            ),
            (
                "ServiceCIDR",
                range(&["10.0.0.0/24"]),
                range(&["10.0.0.0/24", "fd00::/64"]),
                &[],
            ),
            (
                "ServiceCIDR",
                range(&["10.0.0.0/24"]),
                range(&["fd00::/64", "10.0.0.0/24"]),
                &["spec.cidrs[0]"],
            ),
            (
                "ServiceCIDR",
                range(&["10.0.0.0/24", "fd00::/64"]),
                range(&["10.0.0.0/24"]),
                &["spec.cidrs"],
            ),
        ] {
            let mut errors = vec![];
            validate_update(kind, &old, &new, &mut errors);
            let found: Vec<&str> = errors.iter().map(|error| error.field.as_str()).collect();
            assert_eq!(found, fields, "{kind} {old} {new}");
        }
    }

    #[test]
    fn the_annotation_for_the_class_is_deprecated() {
        let annotated = json!({"metadata": {"annotations": {CLASS_ANNOTATION: "a"}}, "spec": {}});
        let mut both = annotated.clone();
        both["spec"]["ingressClassName"] = "a".into();
        for (object, count) in [(annotated, 1), (both, 0), (json!({"spec": {}}), 0)] {
            assert_eq!(warnings("Ingress", &object).len(), count, "{object}");
        }
    }

    #[test]
    fn hosts_are_abbreviated_after_three() {
        let of = |hosts: &[&str]| {
            let rules: Vec<Value> = hosts.iter().map(|host| json!({"host": host})).collect();
            super::hosts(&json!({"spec": {"rules": rules}}))
        };
        for (hosts, shown) in [
            (&[][..], "*"),
            (&[""], "*"),
            (&["a", "", "b", "c"], "a,b,c"),
            (&["a", "b", "c", "d", "e"], "a,b,c + 2 more..."),
        ] {
            assert_eq!(of(hosts), shown);
        }
    }
}
