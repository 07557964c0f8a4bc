//! Role-based access control: the permissions of roles, and their bindings (`plugin/pkg/auth/authorizer/rbac/rbac.go`).
//! Requests that no rule allows are denied, and users cannot grant permissions that they do not hold.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex};

use serde::Deserialize;
use serde_json::Value;

use super::auth::{Attributes, User};
use super::object::{at, list, text};
use super::selector::Selector;
use crate::store::Store;
use holdfast_core::lock::lock;

mod bootstrap;
mod covers;
mod escalation;
mod objects;

pub use bootstrap::{NODE_CLIENT, bootstrap, renewed};
pub(crate) use objects::validate_update;
pub use objects::{cells, columns, defaults, validate};

/// The API group of roles and bindings.
pub(crate) const GROUP: &str = "rbac.authorization.k8s.io";

const KINDS: [&str; 4] = [
    "roles/",
    "clusterroles/",
    "rolebindings/",
    "clusterrolebindings/",
];

/// A `PolicyRule`.
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

/// The rules of a role that is bound.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Grant {
    /// The namespace where it applies; `None` for the whole cluster.
    namespace: Option<String>,
    rules: Arc<Vec<Rule>>,
}

/// The subject of a binding; service accounts count as users.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Holder {
    User(String),
    Group(String),
}

/// All grants, indexed by their subjects.
#[derive(Debug, Default)]
struct Grants {
    all: Vec<Grant>,
    /// Indices in `all` by user name, ascending.
    users: HashMap<String, Vec<usize>>,
    /// Indices in `all` by group name, ascending.
    groups: HashMap<String, Vec<usize>>,
}

impl Grants {
    fn add(&mut self, grant: Grant, holders: impl Iterator<Item = Holder>) {
        let index = self.all.len();
        self.all.push(grant);
        for holder in holders {
            let indices = match holder {
                Holder::User(name) => self.users.entry(name).or_default(),
                Holder::Group(name) => self.groups.entry(name).or_default(),
            };
            if indices.last() != Some(&index) {
                indices.push(index);
            }
        }
    }

    /// The grants of a user and of the user's groups.
    fn of<'a>(&'a self, user: &User) -> impl Iterator<Item = &'a Grant> {
        // Deduplicated: the groups of a SubjectAccessReview come from the client.
        let groups: HashSet<&str> = user.groups.iter().map(String::as_str).collect();
        let of_groups = groups
            .into_iter()
            .filter_map(|group| self.groups.get(group));
        let of_user = self.users.get(&user.name).into_iter();
        let indices: BTreeSet<usize> = of_user.chain(of_groups).flatten().copied().collect();
        indices.into_iter().map(|index| &self.all[index])
    }
}

fn any(list: &[String], wanted: &str) -> bool {
    list.iter().any(|item| item == "*" || item == wanted)
}

impl Rule {
    fn allows(&self, attributes: &Attributes<'_>) -> bool {
        // `resource/sub`, or `*/sub` for all resources with the subresource.
        let fits = |rule: &String| {
            if attributes.sub.is_empty() {
                return rule == attributes.resource;
            }
            let parts = rule.split_once('/');
            parts.is_some_and(|(r, sub)| {
                sub == attributes.sub && (r == "*" || r == attributes.resource)
            })
        };
        let resource = self.resources.iter().any(|r| r == "*" || fits(r));
        let named = self.resource_names.is_empty()
            || self.resource_names.iter().any(|n| n == attributes.name);
        any(&self.verbs, attributes.verb)
            && any(&self.api_groups, attributes.group)
            && resource
            && named
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
    /// The user or group that a subject names; `None` if the subject's kind is
    /// unknown. `binding` is the binding's namespace.
    fn holder(self, binding: Option<&str>) -> Option<Holder> {
        match self.kind.as_str() {
            "User" => Some(Holder::User(self.name)),
            "Group" => Some(Holder::Group(self.name)),
            "ServiceAccount" => {
                let namespace = if self.namespace.is_empty() {
                    binding.unwrap_or_default()
                } else {
                    &self.namespace
                };
                let name = format!("system:serviceaccount:{namespace}:{}", self.name);
                Some(Holder::User(name))
            }
            _ => None,
        }
    }
}

/// Cache of the stored rules, rebuilt when they change.
#[derive(Default)]
pub(crate) struct Rbac(Mutex<(Option<[u64; 4]>, Arc<Grants>)>);

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

/// A role's rules. For an aggregated role: the rules of all roles that its selectors match, recursively. The `rules`
/// stored in an aggregated role are ignored.
fn gathered(role: &Value, all: &[Value]) -> Vec<Rule> {
    type Labels = Vec<BTreeMap<String, String>>;
    fn add<'a>(
        role: &'a Value,
        (all, labels): (&'a [Value], &Labels),
        seen: &mut HashSet<&'a str>,
        found: &mut Vec<Rule>,
    ) {
        if !seen.insert(super::object::name(role)) {
            return;
        }
        if at(role, &["aggregationRule"]).is_none() {
            found.extend(rules(role));
            return;
        }
        for selector in list(role, &["aggregationRule", "clusterRoleSelectors"]) {
            let Some(selector) = Selector::of_object(selector) else {
                continue;
            };
            let chosen = all.iter().zip(labels);
            for (other, _) in chosen.filter(|(_, own)| selector.matches_labels(own)) {
                add(other, (all, labels), seen, found);
            }
        }
    }
    let of = |role: &Value| serde_json::from_value(role["metadata"]["labels"].clone());
    let labels: Labels = match at(role, &["aggregationRule"]) {
        Some(_) => all
            .iter()
            .map(|role| of(role).unwrap_or_default())
            .collect(),
        None => vec![],
    };
    let mut found = vec![];
    add(role, (all, &labels), &mut HashSet::new(), &mut found);
    found
}

fn grants(store: &Store) -> Grants {
    use super::object::{name, namespace};
    let (roles, cluster_roles) = (objects(store, KINDS[0]), objects(store, KINDS[1]));
    let roles: HashMap<(Option<&str>, &str), &Value> =
        roles.iter().map(|r| ((namespace(r), name(r)), r)).collect();
    let by_name: HashMap<&str, &Value> = cluster_roles.iter().map(|r| (name(r), r)).collect();
    // Each role's rules are computed once, however many bindings refer to it.
    let mut known: HashMap<String, Arc<Vec<Rule>>> = HashMap::new();
    let mut grants = Grants::default();
    for (kind, prefix) in KINDS.iter().enumerate().skip(2) {
        for binding in objects(store, prefix) {
            let here = namespace(&binding).filter(|_| kind == 2);
            let wanted = text(&binding, &["roleRef", "name"]).unwrap_or_default();
            let rules = if text(&binding, &["roleRef", "kind"]) == Some("ClusterRole") {
                let Some(role) = by_name.get(wanted) else {
                    continue;
                };
                let gather = || Arc::new(gathered(role, &cluster_roles));
                Arc::clone(known.entry(wanted.to_owned()).or_insert_with(gather))
            } else {
                match roles.get(&(here, wanted)) {
                    Some(role) => Arc::new(rules(role)),
                    None => continue,
                }
            };
            let subjects: Vec<Subject> =
                serde_json::from_value(binding["subjects"].clone()).unwrap_or_default();
            let grant = Grant {
                namespace: here.map(Into::into),
                rules,
            };
            grants.add(grant, subjects.into_iter().filter_map(|s| s.holder(here)));
        }
    }
    grants
}

impl Grant {
    /// Whether the grant applies in a namespace; empty for cluster-scoped requests.
    fn counts_in(&self, namespace: &str) -> bool {
        self.namespace.as_deref().is_none_or(|n| n == namespace)
    }
}

impl Rbac {
    fn grants(&self, store: &Store) -> Arc<Grants> {
        // Revisions are read before the objects: a concurrent change then causes another rebuild.
        let heads = KINDS.map(|prefix| *store.head_of(prefix).borrow());
        let mut known = lock(&self.0);
        if known.0 != Some(heads) {
            *known = (Some(heads), Arc::new(grants(store)));
        }
        Arc::clone(&known.1)
    }

    /// Whether a role that is bound to `user` allows the request.
    #[must_use]
    pub fn allows(&self, store: &Store, user: &User, attributes: &Attributes<'_>) -> bool {
        let grants = self.grants(store);
        let mut here = grants
            .of(user)
            .filter(|g| g.counts_in(attributes.namespace));
        here.any(|grant| grant.rules.iter().any(|rule| rule.allows(attributes)))
    }

    /// Like [`Rbac::allows`], for a non-resource URL.
    #[must_use]
    pub(crate) fn allows_path(&self, store: &Store, user: &User, verb: &str, path: &str) -> bool {
        let grants = self.grants(store);
        let mut all = grants.of(user).filter(|g| g.namespace.is_none());
        all.any(|grant| grant.rules.iter().any(|rule| rule.allows_path(verb, path)))
    }
}

#[cfg(test)]
mod tests;
