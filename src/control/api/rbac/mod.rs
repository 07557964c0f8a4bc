//! Role-based access: what roles allow, and to whom they are bound (control-plane spec, 6.2). What no rule allows is
//! denied; nobody gives away what they do not have.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde::Deserialize;
use serde_json::Value;

use super::auth::{Ask, User};
use super::object::{at, list, text};
use super::selector::Selector;
use crate::control::store::Store;
use crate::core::lock::lock;

mod bootstrap;
mod escalation;
mod objects;

pub use bootstrap::{NODE_CLIENT, bootstrap, renewed};
pub use objects::{cells, columns, defaults, validate, validate_update};

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

/// A cluster role's rules; of one that gathers others, theirs, and what they gather in turn. What stands as its own rules
/// then is only for people to read.
fn gathered(role: &Value, all: &[Value]) -> Vec<Rule> {
    fn add<'a>(role: &'a Value, all: &'a [Value], seen: &mut Vec<&'a str>, found: &mut Vec<Rule>) {
        let name = super::object::name(role);
        if seen.contains(&name) {
            return;
        }
        seen.push(name);
        if at(role, &["aggregationRule"]).is_none() {
            found.extend(rules(role));
            return;
        }
        for selector in list(role, &["aggregationRule", "clusterRoleSelectors"]) {
            let Some(selector) = Selector::of_object(selector) else {
                continue;
            };
            let chosen = all.iter().filter(|other| {
                let labels: BTreeMap<String, String> =
                    serde_json::from_value(other["metadata"]["labels"].clone()).unwrap_or_default();
                selector.matches_labels(&labels)
            });
            for other in chosen {
                add(other, all, seen, found);
            }
        }
    }
    let mut found = vec![];
    add(role, all, &mut vec![], &mut found);
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
        let mut known = lock(&self.0);
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
}

#[cfg(test)]
mod tests;
