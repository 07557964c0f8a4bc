//! Nobody gives away what they do not have: who may write which role, and bind it (control-plane spec, 6.2).

use serde_json::Value;

use super::{GROUP, KINDS, Rbac, Rule, gathered, objects, rules};
use crate::control::api::auth::{Ask, User};
use crate::control::api::error::ApiError;
use crate::control::api::object::{self, at, text};
use crate::control::store::Store;

/// What a write would give, and what lets a user give it all the same.
struct Gift {
    rules: Vec<Rule>,
    verb: &'static str,
    plural: &'static str,
    name: String,
}

/// All that there is: who decides what a role gathers decides over roles that nobody has made yet.
fn everything() -> [Rule; 2] {
    let all = || vec!["*".to_owned()];
    [
        Rule {
            verbs: all(),
            api_groups: all(),
            resources: all(),
            ..Rule::default()
        },
        Rule {
            verbs: all(),
            paths: all(),
            ..Rule::default()
        },
    ]
}

fn of_role(kind: &str, old: Option<&Value>, new: &Value) -> Option<Gift> {
    let differs = |key: &str| old.and_then(|o| at(o, &[key])) != at(new, &[key]);
    let mut given = vec![];
    if differs("rules") {
        given.extend(rules(new));
    }
    if differs("aggregationRule") && at(new, &["aggregationRule"]).is_some() {
        given.extend(everything());
    }
    (!given.is_empty()).then(|| Gift {
        rules: given,
        verb: "escalate",
        plural: if kind == "Role" {
            "roles"
        } else {
            "clusterroles"
        },
        name: object::name(new).to_owned(),
    })
}

fn of_binding(store: &Store, old: Option<&Value>, new: &Value) -> Option<Gift> {
    let same = |key: &str| old.is_some_and(|old| at(old, &[key]) == at(new, &[key]));
    if same("roleRef") && same("subjects") {
        return None;
    }
    let name = text(new, &["roleRef", "name"]).unwrap_or_default();
    let cluster = text(new, &["roleRef", "kind"]) == Some("ClusterRole");
    let all = objects(store, if cluster { KINDS[1] } else { KINDS[0] });
    let role = all.iter().find(|r| {
        object::name(r) == name && (cluster || object::namespace(r) == object::namespace(new))
    });
    Some(Gift {
        // Of a role that is not there nobody knows what it will give: only who may bind anything binds it.
        rules: role.map_or_else(|| everything().into(), |r| gathered(r, &all)),
        verb: "bind",
        plural: if cluster { "clusterroles" } else { "roles" },
        name: name.to_owned(),
    })
}

impl Rbac {
    /// Whether `user` may write a role or binding: only what they have themselves can be given away, unless they may
    /// `escalate` roles or `bind` them. What an update leaves as it was is not given anew.
    pub fn check_write(
        &self,
        store: &Store,
        user: &User,
        kind: &str,
        old: Option<&Value>,
        new: &Value,
    ) -> Result<(), ApiError> {
        if user.is_in("system:masters") {
            return Ok(());
        }
        let gift = match kind {
            "Role" | "ClusterRole" => of_role(kind, old, new),
            "RoleBinding" | "ClusterRoleBinding" => of_binding(store, old, new),
            _ => None,
        };
        let Some(gift) = gift else { return Ok(()) };
        let namespace = object::namespace(new).unwrap_or_default();
        let own = Ask {
            verb: gift.verb,
            group: GROUP,
            resource: gift.plural,
            namespace,
            name: &gift.name,
            ..Ask::default()
        };
        if self.allows(store, user, &own) {
            return Ok(());
        }
        let lacking: Vec<String> = gift
            .rules
            .iter()
            .filter(|rule| !self.covers(store, user, namespace, rule))
            .map(shown)
            .collect();
        if lacking.is_empty() {
            return Ok(());
        }
        let groups: Vec<String> = user.groups.iter().map(|g| format!("{g:?}")).collect();
        Err(ApiError::forbidden(format!(
            "{}.rbac.authorization.k8s.io {:?} is forbidden: user {:?} (groups=[{}]) is attempting to grant RBAC permissions not currently held:\n{}",
            gift.plural,
            gift.name,
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
                                on_node: "",
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
