//! Role-based access: what roles allow, and to whom they are bound (control-plane spec, 6.2). What no rule allows is
//! denied; nobody gives away what they do not have.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Deserialize;
use serde_json::{Value, json};

use super::auth::{Ask, User};
use super::error::{ApiError, FieldError};
use super::object::{list, text};
use super::selector::Selector;
use crate::control::store::Store;

type Column = (&'static str, &'static str, u8);
type Errors = Vec<FieldError>;

/// The group of roles and bindings.
pub const GROUP: &str = "rbac.authorization.k8s.io";

const KINDS: [&str; 4] = [
    "roles/",
    "clusterroles/",
    "rolebindings/",
    "clusterrolebindings/",
];

/// Something that is allowed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Rule {
    verbs: Vec<String>,
    api_groups: Vec<String>,
    resources: Vec<String>,
    resource_names: Vec<String>,
    #[serde(rename = "nonResourceURLs")]
    paths: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Subject {
    kind: String,
    name: String,
    namespace: String,
}

/// A role, bound to somebody.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Grant {
    /// Where it counts; none for everywhere.
    namespace: Option<String>,
    subjects: Vec<Subject>,
    rules: Arc<Vec<Rule>>,
}

fn any(list: &[String], wanted: &str) -> bool {
    list.iter().any(|item| item == "*" || item == wanted)
}

impl Rule {
    fn allows(&self, ask: &Ask<'_>) -> bool {
        let full = if ask.sub.is_empty() {
            ask.resource.to_owned()
        } else {
            format!("{}/{}", ask.resource, ask.sub)
        };
        let every = format!("*/{}", ask.sub);
        let resource = self
            .resources
            .iter()
            .any(|r| r == "*" || *r == full || (!ask.sub.is_empty() && *r == every));
        let named =
            self.resource_names.is_empty() || self.resource_names.iter().any(|n| n == ask.name);
        any(&self.verbs, ask.verb) && any(&self.api_groups, ask.group) && resource && named
    }

    fn allows_path(&self, verb: &str, path: &str) -> bool {
        let fits = |rule: &String| {
            rule == "*"
                || rule == path
                || rule
                    .strip_suffix('*')
                    .is_some_and(|begin| path.starts_with(begin))
        };
        any(&self.verbs, verb) && self.paths.iter().any(fits)
    }
}

impl Subject {
    fn is(&self, user: &User, binding: Option<&str>) -> bool {
        match self.kind.as_str() {
            "User" => self.name == user.name,
            "Group" => user.is_in(&self.name),
            "ServiceAccount" => {
                let namespace = if self.namespace.is_empty() {
                    binding.unwrap_or_default()
                } else {
                    &self.namespace
                };
                user.name == format!("system:serviceaccount:{namespace}:{}", self.name)
            }
            _ => false,
        }
    }
}

/// The rules that stand in the store, read anew when they change.
#[derive(Default)]
pub struct Rbac(Mutex<(u64, Arc<Vec<Grant>>)>);

fn objects(store: &Store, prefix: &str) -> Vec<Value> {
    store
        .list(prefix)
        .0
        .into_iter()
        .filter_map(|(_, r)| serde_json::from_slice(&r.value).ok())
        .collect()
}

fn rules(role: &Value) -> Vec<Rule> {
    serde_json::from_value(role["rules"].clone()).unwrap_or_default()
}

/// A cluster role's rules; of one that gathers others, theirs.
fn gathered(role: &Value, all: &[Value]) -> Vec<Rule> {
    let mut found = rules(role);
    for selector in list(role, &["aggregationRule", "clusterRoleSelectors"]) {
        let Some(selector) = Selector::of_object(selector) else {
            continue;
        };
        let chosen = all.iter().filter(|other| {
            let labels: BTreeMap<String, String> =
                serde_json::from_value(other["metadata"]["labels"].clone()).unwrap_or_default();
            super::object::name(other) != super::object::name(role)
                && selector.matches_labels(&labels)
        });
        found.extend(chosen.flat_map(rules));
    }
    found
}

fn grants(store: &Store) -> Vec<Grant> {
    let (roles, cluster_roles) = (objects(store, KINDS[0]), objects(store, KINDS[1]));
    let of_binding = |binding: &Value, namespace: Option<&str>| {
        let name = text(binding, &["roleRef", "name"])?;
        let rules = match text(binding, &["roleRef", "kind"])? {
            "ClusterRole" => gathered(
                cluster_roles
                    .iter()
                    .find(|r| super::object::name(r) == name)?,
                &cluster_roles,
            ),
            _ => rules(roles.iter().find(|r| {
                super::object::name(r) == name && super::object::namespace(r) == namespace
            })?),
        };
        let subjects = serde_json::from_value(binding["subjects"].clone()).unwrap_or_default();
        Some(Grant {
            namespace: namespace.map(Into::into),
            subjects,
            rules: Arc::new(rules),
        })
    };
    let mut found: Vec<Grant> = objects(store, KINDS[2])
        .iter()
        .filter_map(|b| of_binding(b, super::object::namespace(b)))
        .collect();
    found.extend(
        objects(store, KINDS[3])
            .iter()
            .filter_map(|b| of_binding(b, None)),
    );
    found
}

impl Rbac {
    fn grants(&self, store: &Store) -> Arc<Vec<Grant>> {
        // Any change of a role or binding changes the sum or the highest of their revisions.
        let records = KINDS.iter().flat_map(|prefix| store.list(prefix).0);
        let print = records.fold(1_u64, |sum, (key, r)| {
            sum.wrapping_mul(31)
                .wrapping_add(r.revision)
                .wrapping_add(key.len() as u64)
        });
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.0 != print {
            *known = (print, Arc::new(grants(store)));
        }
        Arc::clone(&known.1)
    }

    /// Whether a role that is bound to `user` allows it.
    #[must_use]
    pub fn allows(&self, store: &Store, user: &User, ask: &Ask<'_>) -> bool {
        let holds = |grant: &&Grant| {
            let here = grant
                .namespace
                .as_deref()
                .is_none_or(|n| n == ask.namespace);
            here && grant
                .subjects
                .iter()
                .any(|s| s.is(user, grant.namespace.as_deref()))
        };
        self.grants(store)
            .iter()
            .filter(holds)
            .any(|grant| grant.rules.iter().any(|rule| rule.allows(ask)))
    }

    /// The same for a path outside the object API.
    #[must_use]
    pub fn allows_path(&self, store: &Store, user: &User, verb: &str, path: &str) -> bool {
        let holds = |grant: &&Grant| {
            grant.namespace.is_none() && grant.subjects.iter().any(|s| s.is(user, None))
        };
        self.grants(store)
            .iter()
            .filter(holds)
            .any(|grant| grant.rules.iter().any(|rule| rule.allows_path(verb, path)))
    }

    /// Whether `user` may write a role or binding: only what they have themselves can be given away, unless they may
    /// `escalate` roles or `bind` them.
    pub fn check_write(
        &self,
        store: &Store,
        user: &User,
        kind: &str,
        object: &Value,
    ) -> Result<(), ApiError> {
        if user.is_in("system:masters") {
            return Ok(());
        }
        let namespace = super::object::namespace(object).unwrap_or_default();
        let (given, verb, plural, name) = match kind {
            "Role" | "ClusterRole" => {
                let plural = if kind == "Role" {
                    "roles"
                } else {
                    "clusterroles"
                };
                let all = objects(store, KINDS[1]);
                (
                    gathered(object, &all),
                    "escalate",
                    plural,
                    super::object::name(object),
                )
            }
            "RoleBinding" | "ClusterRoleBinding" => {
                let name = text(object, &["roleRef", "name"]).unwrap_or_default();
                let cluster = text(object, &["roleRef", "kind"]) == Some("ClusterRole");
                let all = objects(store, if cluster { KINDS[1] } else { KINDS[0] });
                let fits = |r: &&Value| {
                    super::object::name(r) == name
                        && (cluster || super::object::namespace(r) == Some(namespace))
                };
                let given = all
                    .iter()
                    .find(fits)
                    .map(|r| gathered(r, &all))
                    .unwrap_or_default();
                (
                    given,
                    "bind",
                    if cluster { "clusterroles" } else { "roles" },
                    name,
                )
            }
            _ => return Ok(()),
        };
        let own = Ask {
            verb,
            group: "rbac.authorization.k8s.io",
            resource: plural,
            sub: "",
            namespace,
            name,
        };
        if self.allows(store, user, &own) {
            return Ok(());
        }
        let lacking: Vec<String> = given
            .iter()
            .filter(|rule| !self.covers(store, user, namespace, rule))
            .map(shown)
            .collect();
        if lacking.is_empty() {
            return Ok(());
        }
        let groups: Vec<String> = user.groups.iter().map(|g| format!("{g:?}")).collect();
        Err(ApiError::forbidden(format!(
            "{plural}.rbac.authorization.k8s.io {name:?} is forbidden: user {:?} (groups=[{}]) is attempting to grant RBAC permissions not currently held:\n{}",
            user.name,
            groups.join(" "),
            lacking.join("\n")
        )))
    }

    /// Whether a user has all that a rule allows.
    fn covers(&self, store: &Store, user: &User, namespace: &str, rule: &Rule) -> bool {
        let none = vec![String::new()];
        let names = if rule.resource_names.is_empty() {
            &none
        } else {
            &rule.resource_names
        };
        let objects = rule.verbs.iter().all(|verb| {
            rule.api_groups.iter().all(|group| {
                rule.resources.iter().all(|resource| {
                    let (resource, sub) = resource.split_once('/').unwrap_or((resource, ""));
                    names.iter().all(|name| {
                        self.allows(
                            store,
                            user,
                            &Ask {
                                verb,
                                group,
                                resource,
                                sub,
                                namespace,
                                name,
                            },
                        )
                    })
                })
            })
        });
        objects
            && rule.verbs.iter().all(|verb| {
                rule.paths
                    .iter()
                    .all(|path| self.allows_path(store, user, verb, path))
            })
    }
}

fn shown(rule: &Rule) -> String {
    let mut parts = vec![];
    for (name, values) in [
        ("APIGroups", &rule.api_groups),
        ("Resources", &rule.resources),
        ("ResourceNames", &rule.resource_names),
        ("NonResourceURLs", &rule.paths),
        ("Verbs", &rule.verbs),
    ] {
        if !values.is_empty() {
            parts.push(format!("{name}:{values:?}"));
        }
    }
    format!("{{{}}}", parts.join(", "))
}

/// Fills in the defaults of a kind.
pub fn defaults(kind: &str, object: &mut Value) {
    if !matches!(kind, "RoleBinding" | "ClusterRoleBinding") {
        return;
    }
    if let Some(role) = object.get_mut("roleRef").filter(|r| r.is_object()) {
        super::defaults::default(role, "apiGroup", json!("rbac.authorization.k8s.io"));
    }
    for subject in object
        .get_mut("subjects")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        let group = if subject["kind"] == "ServiceAccount" {
            ""
        } else {
            "rbac.authorization.k8s.io"
        };
        if !group.is_empty() {
            super::defaults::default(subject, "apiGroup", json!(group));
        }
    }
}

/// Checks an object.
pub fn validate(kind: &str, object: &Value, errors: &mut Errors) {
    match kind {
        "Role" | "ClusterRole" => {
            for (i, rule) in list(object, &["rules"]).iter().enumerate() {
                if list(rule, &["verbs"]).is_empty() {
                    errors.push(FieldError::required(
                        format!("rules[{i}].verbs"),
                        "verbs must contain at least one value",
                    ));
                }
                let (paths, resources) = (
                    !list(rule, &["nonResourceURLs"]).is_empty(),
                    !list(rule, &["resources"]).is_empty(),
                );
                if paths && kind == "Role" {
                    errors.push(FieldError::invalid(
                        format!("rules[{i}].nonResourceURLs"),
                        &rule["nonResourceURLs"],
                        "namespaced rules cannot apply to non-resource URLs",
                    ));
                }
                if !paths && list(rule, &["apiGroups"]).is_empty() {
                    errors.push(FieldError::required(
                        format!("rules[{i}].apiGroups"),
                        "resource rules must supply at least one api group",
                    ));
                }
                if !paths && !resources {
                    errors.push(FieldError::required(
                        format!("rules[{i}].resources"),
                        "resource rules must supply at least one resource",
                    ));
                }
            }
        }
        "RoleBinding" | "ClusterRoleBinding" => {
            let allowed: &[&str] = if kind == "RoleBinding" {
                &["Role", "ClusterRole"]
            } else {
                &["ClusterRole"]
            };
            let named = text(object, &["roleRef", "kind"]).unwrap_or_default();
            if !allowed.contains(&named) {
                errors.push(FieldError::unsupported("roleRef.kind", named, allowed));
            }
            if text(object, &["roleRef", "name"]).is_none_or(str::is_empty) {
                errors.push(FieldError::required("roleRef.name", ""));
            }
            for (i, subject) in list(object, &["subjects"]).iter().enumerate() {
                let named = text(subject, &["kind"]).unwrap_or_default();
                if !["User", "Group", "ServiceAccount"].contains(&named) {
                    errors.push(FieldError::unsupported(
                        format!("subjects[{i}].kind"),
                        named,
                        &["ServiceAccount", "User", "Group"],
                    ));
                }
                if text(subject, &["name"]).is_none_or(str::is_empty) {
                    errors.push(FieldError::required(format!("subjects[{i}].name"), ""));
                }
                if named == "ServiceAccount"
                    && text(subject, &["namespace"]).is_none_or(str::is_empty)
                    && kind == "ClusterRoleBinding"
                {
                    errors.push(FieldError::required(format!("subjects[{i}].namespace"), ""));
                }
            }
        }
        _ => {}
    }
}

/// Checks what an update changes: what a binding binds stays.
pub fn validate_update(kind: &str, old: &Value, new: &Value, errors: &mut Errors) {
    if matches!(kind, "RoleBinding" | "ClusterRoleBinding") && old["roleRef"] != new["roleRef"] {
        errors.push(FieldError::invalid(
            "roleRef",
            &new["roleRef"],
            "cannot change roleRef",
        ));
    }
}

/// The columns of a kind; none if it is not one of these.
#[must_use]
pub fn columns(kind: &str) -> Option<&'static [Column]> {
    Some(match kind {
        "Role" | "ClusterRole" => &[("Name", "string", 0), ("Created At", "date", 0)],
        "RoleBinding" | "ClusterRoleBinding" => &[
            ("Name", "string", 0),
            ("Role", "string", 0),
            ("Age", "string", 0),
        ],
        _ => return None,
    })
}

/// The cells of a row.
#[must_use]
pub fn cells(kind: &str, object: &Value, age: &str) -> Vec<Value> {
    let name = Value::from(super::object::name(object));
    match kind {
        "Role" | "ClusterRole" => vec![name, object["metadata"]["creationTimestamp"].clone()],
        _ => {
            let role = format!(
                "{}/{}",
                text(object, &["roleRef", "kind"]).unwrap_or_default(),
                text(object, &["roleRef", "name"]).unwrap_or_default()
            );
            vec![name, role.into(), age.into()]
        }
    }
}

/// The roles and bindings that every cluster has: kind in paths, and object.
#[must_use]
pub fn bootstrap() -> Vec<(&'static str, Value)> {
    let labels = |more: Value| {
        let mut labels = json!({"kubernetes.io/bootstrapping": "rbac-defaults"});
        json_patch::merge(&mut labels, &more);
        labels
    };
    let role = |name: &str, more: Value, rules: Value| {
        (
            "clusterroles",
            json!({"metadata": {"name": name, "labels": labels(more)}, "rules": rules}),
        )
    };
    let gather = |name: &str, label: &str| {
        let label = format!("rbac.authorization.k8s.io/aggregate-to-{label}");
        let more = if name == "admin" {
            json!({})
        } else {
            json!({format!("rbac.authorization.k8s.io/aggregate-to-{}", if name == "view" { "edit" } else { "admin" }): "true"})
        };
        (
            "clusterroles",
            json!({"metadata": {"name": name, "labels": labels(more)}, "rules": [],
            "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {label: "true"}}]}}),
        )
    };
    let bind = |name: &str, groups: &[&str]| {
        let subjects: Vec<Value> = groups
            .iter()
            .map(|g| json!({"kind": "Group", "name": g, "apiGroup": "rbac.authorization.k8s.io"}))
            .collect();
        (
            "clusterrolebindings",
            json!({"metadata": {"name": name, "labels": labels(json!({}))}, "subjects": subjects,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}}),
        )
    };
    let read = json!(["get", "list", "watch"]);
    let write = json!(["create", "delete", "deletecollection", "patch", "update"]);
    let plain = json!([
        "configmaps",
        "endpoints",
        "events",
        "persistentvolumeclaims",
        "pods",
        "pods/log",
        "pods/status",
        "serviceaccounts",
        "services",
        "namespaces"
    ]);
    let workloads = json!([
        "deployments",
        "deployments/scale",
        "deployments/status",
        "replicasets",
        "replicasets/scale",
        "replicasets/status"
    ]);
    let to = |role: &str| json!({format!("rbac.authorization.k8s.io/aggregate-to-{role}"): "true"});
    vec![
        role(
            "cluster-admin",
            json!({}),
            json!([{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}, {"nonResourceURLs": ["*"], "verbs": ["*"]}]),
        ),
        gather("admin", "admin"),
        gather("edit", "edit"),
        gather("view", "view"),
        role(
            "system:aggregate-to-view",
            to("view"),
            json!([
            {"apiGroups": [""], "resources": plain, "verbs": read}, {"apiGroups": ["apps"], "resources": workloads, "verbs": read},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": read}]),
        ),
        role(
            "system:aggregate-to-edit",
            json!({"rbac.authorization.k8s.io/aggregate-to-edit": "true", "rbac.authorization.k8s.io/aggregate-to-admin": "true"}),
            json!([
            {"apiGroups": [""], "resources": ["secrets"], "verbs": read}, {"apiGroups": [""], "resources": ["secrets", "configmaps", "endpoints", "events", "persistentvolumeclaims", "pods", "serviceaccounts", "services"], "verbs": write},
            {"apiGroups": [""], "resources": ["pods/exec", "pods/attach", "pods/portforward", "pods/proxy", "pods/eviction", "serviceaccounts/token"], "verbs": ["create", "get"]},
            {"apiGroups": ["apps"], "resources": workloads, "verbs": write}]),
        ),
        role(
            "system:aggregate-to-admin",
            to("admin"),
            json!([
            {"apiGroups": [""], "resources": ["secrets"], "verbs": read}, {"apiGroups": [""], "resources": plain, "verbs": read}, {"apiGroups": ["apps"], "resources": workloads, "verbs": read},
            {"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles", "rolebindings"], "verbs": ["*"]}]),
        ),
        role(
            "system:basic-user",
            json!({}),
            json!([
            {"apiGroups": ["authorization.k8s.io"], "resources": ["selfsubjectaccessreviews", "selfsubjectrulesreviews"], "verbs": ["create"]},
            {"apiGroups": ["authentication.k8s.io"], "resources": ["selfsubjectreviews"], "verbs": ["create"]}]),
        ),
        role(
            "system:discovery",
            json!({}),
            json!([{"nonResourceURLs": ["/api", "/api/*", "/apis", "/apis/*", "/healthz", "/livez", "/openapi", "/openapi/*", "/readyz", "/version", "/version/"], "verbs": ["get"]}]),
        ),
        role(
            "system:public-info-viewer",
            json!({}),
            json!([{"nonResourceURLs": ["/healthz", "/livez", "/readyz", "/version", "/version/"], "verbs": ["get"]}]),
        ),
        role(
            "system:monitoring",
            json!({}),
            json!([{"nonResourceURLs": ["/healthz", "/healthz/*", "/livez", "/livez/*", "/metrics", "/metrics/slis", "/readyz", "/readyz/*"], "verbs": ["get"]}]),
        ),
        role(
            "system:node-bootstrapper",
            json!({}),
            json!([{"apiGroups": ["certificates.k8s.io"], "resources": ["certificatesigningrequests"], "verbs": ["create", "get", "list", "watch"]}]),
        ),
        role(
            "system:auth-delegator",
            json!({}),
            json!([
            {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}, {"apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"]}]),
        ),
        role(
            "system:kubelet-api-admin",
            json!({}),
            json!([
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch", "proxy"]}, {"apiGroups": [""], "resources": ["nodes/proxy", "nodes/log", "nodes/metrics", "nodes/stats", "nodes/healthz", "nodes/pods", "nodes/configz"], "verbs": ["*"]}]),
        ),
        bind("cluster-admin", &["system:masters"]),
        bind("system:basic-user", &["system:authenticated"]),
        bind("system:discovery", &["system:authenticated"]),
        bind(
            "system:public-info-viewer",
            &["system:authenticated", "system:unauthenticated"],
        ),
        bind("system:monitoring", &["system:monitoring"]),
        bind("system:node-bootstrapper", &["system:bootstrappers"]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(value: Value) -> Rule {
        serde_json::from_value(value).expect("a rule")
    }

    fn ask<'a>(verb: &'a str, resource: &'a str, sub: &'a str, name: &'a str) -> Ask<'a> {
        Ask {
            verb,
            group: "",
            resource,
            sub,
            namespace: "n",
            name,
        }
    }

    #[test]
    fn rules_allow_what_they_say_and_no_more() {
        let pods =
            rule(json!({"verbs": ["get", "list"], "apiGroups": [""], "resources": ["pods"]}));
        let logs = rule(json!({"verbs": ["get"], "apiGroups": [""], "resources": ["pods/log"]}));
        let scale = rule(json!({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*/scale"]}));
        let one = rule(
            json!({"verbs": ["get"], "apiGroups": [""], "resources": ["secrets"], "resourceNames": ["s"]}),
        );
        let all = rule(json!({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}));
        for (rule, ask, expected) in [
            (&pods, ask("get", "pods", "", "p"), true),
            (&pods, ask("delete", "pods", "", "p"), false),
            (&pods, ask("get", "pods", "log", "p"), false),
            (&logs, ask("get", "pods", "log", "p"), true),
            (&logs, ask("get", "pods", "", "p"), false),
            (&scale, ask("patch", "deployments", "scale", "d"), true),
            (&scale, ask("patch", "deployments", "", "d"), false),
            (&one, ask("get", "secrets", "", "s"), true),
            (&one, ask("get", "secrets", "", "t"), false),
            (&one, ask("list", "secrets", "", ""), false),
            (&all, ask("delete", "nodes", "proxy", "x"), true),
        ] {
            assert_eq!(rule.allows(&ask), expected, "{rule:?} {ask:?}");
        }
        let paths = rule(json!({"verbs": ["get"], "nonResourceURLs": ["/metrics", "/api/*"]}));
        assert!(
            paths.allows_path("get", "/metrics")
                && paths.allows_path("get", "/api/v1")
                && !paths.allows_path("get", "/metrics/x")
        );
        assert!(
            !paths.allows_path("post", "/metrics") && !paths.allows(&ask("get", "pods", "", ""))
        );
    }

    #[test]
    fn subjects_are_users_groups_and_accounts() {
        let user = |name: &str| User {
            name: name.into(),
            groups: vec!["g".into()],
            ..User::default()
        };
        let is = |subject: Value, name: &str| {
            serde_json::from_value::<Subject>(subject)
                .expect("a subject")
                .is(&user(name), Some("b"))
        };
        assert!(
            is(json!({"kind": "User", "name": "u"}), "u")
                && !is(json!({"kind": "User", "name": "u"}), "v")
        );
        assert!(
            is(json!({"kind": "Group", "name": "g"}), "u")
                && !is(json!({"kind": "Group", "name": "h"}), "u")
        );
        assert!(is(
            json!({"kind": "ServiceAccount", "name": "s", "namespace": "n"}),
            "system:serviceaccount:n:s"
        ));
        assert!(is(
            json!({"kind": "ServiceAccount", "name": "s"}),
            "system:serviceaccount:b:s"
        ));
        assert!(!is(
            json!({"kind": "ServiceAccount", "name": "s", "namespace": "n"}),
            "system:serviceaccount:m:s"
        ));
    }

    #[test]
    fn mistakes_in_roles_and_bindings_are_named() {
        let of = |kind: &str, object: Value| {
            let mut errors = vec![];
            validate(kind, &object, &mut errors);
            errors.into_iter().map(|e| e.field).collect::<Vec<_>>()
        };
        assert_eq!(
            of(
                "Role",
                json!({"rules": [{"verbs": ["get"], "nonResourceURLs": ["/x"]}]})
            ),
            ["rules[0].nonResourceURLs"]
        );
        assert_eq!(
            of("ClusterRole", json!({"rules": [{"resources": ["pods"]}]})),
            ["rules[0].verbs", "rules[0].apiGroups"]
        );
        assert_eq!(
            of(
                "ClusterRoleBinding",
                json!({"roleRef": {"kind": "Role"}, "subjects": [{"kind": "Robot", "name": "r"}]})
            ),
            ["roleRef.kind", "roleRef.name", "subjects[0].kind"]
        );
        for (plural, object) in bootstrap() {
            let kind = if plural == "clusterroles" {
                "ClusterRole"
            } else {
                "ClusterRoleBinding"
            };
            assert_eq!(of(kind, object.clone()), Vec::<String>::new(), "{object}");
        }
    }
}
