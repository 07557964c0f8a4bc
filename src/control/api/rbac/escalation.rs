//! Prevention of privilege escalation: who may write which role and bind it (`pkg/registry/rbac/validation/rule.go`,
//! `pkg/registry/rbac/escalation_check.go`).

use serde_json::Value;

use super::covers::{HeldObjects, HeldPaths, MAX_STEPS, Steps, TooManySteps};
use super::{GROUP, KINDS, Rbac, Rule, gathered, objects, rules};
use crate::api::auth::{Attributes, User};
use crate::api::error::{ApiError, FieldError};
use crate::api::object::{self, at, text};
use crate::store::Store;

/// The permissions that a write grants, and the verb that allows it without holding them.
struct GrantedRules {
    rules: Vec<Rule>,
    verb: &'static str,
    plural: &'static str,
    name: String,
}

/// All permissions. An aggregated role can match roles that do not exist yet, so
/// setting an aggregation rule needs all of them.
fn all_permissions() -> [Rule; 2] {
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

fn of_role(kind: &str, old: Option<&Value>, new: &Value) -> Option<GrantedRules> {
    let differs = |key: &str| old.and_then(|o| at(o, &[key])) != at(new, &[key]);
    let mut granted = vec![];
    if differs("rules") {
        granted.extend(rules(new));
    }
    if differs("aggregationRule") && at(new, &["aggregationRule"]).is_some() {
        granted.extend(all_permissions());
    }
    (!granted.is_empty()).then(|| GrantedRules {
        rules: granted,
        verb: "escalate",
        plural: if kind == "Role" {
            "roles"
        } else {
            "clusterroles"
        },
        name: object::name(new).to_owned(),
    })
}

fn of_binding(store: &Store, old: Option<&Value>, new: &Value) -> Option<GrantedRules> {
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
    Some(GrantedRules {
        // A missing role may later contain any permission, so binding it needs all permissions or the verb `bind`.
        rules: role.map_or_else(|| all_permissions().into(), |r| gathered(r, &all)),
        verb: "bind",
        plural: if cluster { "clusterroles" } else { "roles" },
        name: name.to_owned(),
    })
}

impl Rbac {
    /// Checks that `user` may write a role or binding. Users can grant only permissions that they
    /// hold, unless they have the verb `escalate` on the role or `bind` on the referenced role.
    /// Permissions that an update does not change are not checked.
    pub(crate) fn check_write(
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
        let granted = match kind {
            "Role" | "ClusterRole" => of_role(kind, old, new),
            "RoleBinding" | "ClusterRoleBinding" => of_binding(store, old, new),
            _ => None,
        };
        let Some(granted) = granted else {
            return Ok(());
        };
        let namespace = object::namespace(new).unwrap_or_default();
        let own = Attributes {
            verb: granted.verb,
            group: GROUP,
            resource: granted.plural,
            namespace,
            name: &granted.name,
            ..Attributes::default()
        };
        if self.allows(store, user, &own) {
            return Ok(());
        }
        let missing = self.missing_rules(store, user, namespace, &granted.rules);
        let missing = missing.map_err(|TooManySteps(count)| {
            let field = if granted.verb == "bind" { "roleRef" } else { "rules" };
            let error = FieldError {
                reason: "FieldValueTooMany",
                field: field.into(),
                detail: format!(
                    "Too many: comparing them with the rules of user {:?} takes {count} steps or more: must have at most {MAX_STEPS}; split the role",
                    user.name
                ),
            };
            ApiError::invalid(kind, GROUP, object::name(new), &[error])
        })?;
        if missing.is_empty() {
            return Ok(());
        }
        let groups: Vec<String> = user.groups.iter().map(|g| format!("{g:?}")).collect();
        Err(ApiError::forbidden(format!(
            "{}.rbac.authorization.k8s.io {:?} is forbidden: user {:?} (groups=[{}]) is attempting to grant RBAC permissions not currently held:\n{}",
            granted.plural,
            granted.name,
            user.name,
            groups.join(" "),
            missing.join("\n")
        )))
    }

    /// Those of `rules` that grant permissions which the user does not hold in the namespace.
    fn missing_rules(
        &self,
        store: &Store,
        user: &User,
        namespace: &str,
        rules: &[Rule],
    ) -> Result<Vec<String>, TooManySteps> {
        let grants = self.grants(store);
        let here = grants.of(user).filter(|g| g.counts_in(namespace));
        let objects = HeldObjects::of(here.flat_map(|g| g.rules.iter()));
        let everywhere = grants.of(user).filter(|g| g.namespace.is_none());
        let paths = HeldPaths::of(everywhere.flat_map(|g| g.rules.iter()));
        let (mut steps, mut missing) = (Steps::default(), vec![]);
        for rule in rules {
            if !objects.cover(rule, &mut steps)? || !paths.cover(rule, &mut steps)? {
                missing.push(shown(rule));
            }
        }
        Ok(missing)
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
