//! Impersonation by the `Impersonate-*` headers
//! (`staging/src/k8s.io/apiserver/pkg/endpoints/filters/impersonation/impersonation.go`).

use std::collections::BTreeMap;

use hyper::HeaderMap;

use super::auth::{Attributes, User, forbidden_error};
use super::error::ApiError;
use holdfast_core::serving::query;

const USER: &str = "impersonate-user";
const GROUP: &str = "impersonate-group";
const UID: &str = "impersonate-uid";
const EXTRA: &str = "impersonate-extra-";

/// The user that the headers name, without implied groups; `None` without such headers.
fn requested_user(headers: &HeaderMap) -> Result<Option<User>, ApiError> {
    let text = |value: &hyper::header::HeaderValue| {
        value.to_str().map(str::to_owned).map_err(|_| {
            ApiError::bad_request("the value of an Impersonate header is not visible ASCII text")
        })
    };
    let all = |key: &str| {
        headers
            .get_all(key)
            .iter()
            .map(text)
            .collect::<Result<Vec<String>, ApiError>>()
    };
    let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (key, value) in headers {
        if let Some(key) = key.as_str().strip_prefix(EXTRA) {
            extra
                .entry(query::decode(key))
                .or_default()
                .push(text(value)?);
        }
    }
    let first = |key: &str| Ok::<_, ApiError>(all(key)?.into_iter().next().unwrap_or_default());
    let user = User {
        name: first(USER)?,
        uid: first(UID)?,
        groups: all(GROUP)?,
        extra,
    };
    if user == User::default() {
        return Ok(None);
    }
    if user.name.is_empty() {
        return Err(ApiError::bad_request(
            "Impersonate-Group, Impersonate-Uid and Impersonate-Extra need an Impersonate-User",
        ));
    }
    Ok(Some(user))
}

/// Parses the user name of a service account into namespace and name.
fn account(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix("system:serviceaccount:")?
        .split_once(':')
        .filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty())
}

/// The permissions needed to impersonate `other`.
fn required_permissions(other: &User) -> Vec<Attributes<'_>> {
    const OF_GROUP: &str = "authentication.k8s.io";
    let attributes = |group: &'static str, resource: &'static str| Attributes {
        verb: "impersonate",
        group,
        resource,
        ..Attributes::default()
    };
    let mut all = vec![match account(&other.name) {
        Some((namespace, name)) => Attributes {
            namespace,
            name,
            ..attributes("", "serviceaccounts")
        },
        None => Attributes {
            name: &other.name,
            ..attributes("", "users")
        },
    }];
    all.extend(other.groups.iter().map(|name| Attributes {
        name,
        ..attributes("", "groups")
    }));
    all.extend((!other.uid.is_empty()).then(|| Attributes {
        name: &other.uid,
        ..attributes(OF_GROUP, "uids")
    }));
    for (key, values) in &other.extra {
        all.extend(values.iter().map(|name| Attributes {
            name,
            sub: key,
            ..attributes(OF_GROUP, "userextras")
        }));
    }
    all
}

/// The effective user of a request: the user that the headers name, if
/// impersonation is allowed, else the authenticated user.
pub(crate) fn effective_user(
    user: User,
    headers: &HeaderMap,
    is_allowed: impl Fn(&User, &Attributes<'_>) -> bool,
) -> Result<User, ApiError> {
    let Some(mut other) = requested_user(headers)? else {
        return Ok(user);
    };
    if let Some(refused) = required_permissions(&other)
        .iter()
        .find(|attributes| !is_allowed(&user, attributes))
    {
        return Err(forbidden_error(&user, refused));
    }
    if let (Some((namespace, _)), true) = (account(&other.name), other.groups.is_empty()) {
        other.groups = vec![
            "system:serviceaccounts".into(),
            format!("system:serviceaccounts:{namespace}"),
        ];
    }
    let everybody = if other.name == "system:anonymous" {
        "system:unauthenticated"
    } else {
        "system:authenticated"
    };
    if !other.is_in("system:authenticated") && !other.is_in("system:unauthenticated") {
        other.groups.push(everybody.into());
    }
    Ok(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&'static str, &str)], allowed: &[&str]) -> Result<User, String> {
        let mut headers = HeaderMap::new();
        for (key, value) in pairs {
            headers.append(*key, value.parse().expect("a value"));
        }
        let me = User {
            name: "me".into(),
            ..User::default()
        };
        let is_allowed = |_: &User, attributes: &Attributes<'_>| {
            assert_eq!(attributes.verb, "impersonate");
            allowed.contains(
                &format!(
                    "{}/{}/{}/{}",
                    attributes.resource, attributes.sub, attributes.namespace, attributes.name
                )
                .as_str(),
            )
        };
        effective_user(me, &headers, is_allowed).map_err(|e| e.message)
    }

    #[test]
    fn only_authorized_users_may_impersonate() {
        assert_eq!(of(&[], &[]).map(|u| u.name), Ok("me".into()));
        let jane = of(&[("Impersonate-User", "jane")], &["users///jane"]).expect("allowed");
        assert_eq!(
            (jane.name.as_str(), jane.groups.join(" ")),
            ("jane", "system:authenticated".into())
        );
        let refused = of(&[("Impersonate-User", "jane")], &["users///joe"]).expect_err("refused");
        assert!(
            refused.contains(r#"User "me" cannot impersonate resource "users""#),
            "{refused}"
        );
        let both = [
            ("Impersonate-User", "jane"),
            ("Impersonate-Group", "a"),
            ("Impersonate-Group", "system:masters"),
        ];
        assert!(
            of(&both, &["users///jane", "groups///a"]).is_err(),
            "every group counts"
        );
        let group = of(&both[..2], &["users///jane", "groups///a"]).expect("allowed");
        assert_eq!(group.groups.join(" "), "a system:authenticated");
        let account = [("Impersonate-User", "system:serviceaccount:n:bot")];
        let bot = of(&account, &["serviceaccounts//n/bot"]).expect("allowed");
        assert_eq!(
            bot.groups.join(" "),
            "system:serviceaccounts system:serviceaccounts:n system:authenticated"
        );
        assert!(of(&account, &["users///system:serviceaccount:n:bot"]).is_err());
        let anonymous = of(
            &[("Impersonate-User", "system:anonymous")],
            &["users///system:anonymous"],
        )
        .expect("allowed");
        assert_eq!(anonymous.groups.join(" "), "system:unauthenticated");
        assert!(
            of(&[("Impersonate-Group", "a")], &["groups///a"])
                .is_err_and(|e| e.contains("need an Impersonate-User"))
        );
        let more = [
            ("Impersonate-User", "jane"),
            ("Impersonate-Uid", "7"),
            ("Impersonate-Extra-a%2Fb", "x"),
        ];
        let known = ["users///jane", "uids///7", "userextras/a/b//x"];
        assert_eq!(
            of(&more, &known).map(|u| (u.uid, u.extra["a/b"].clone())),
            Ok(("7".into(), vec!["x".to_owned()]))
        );
        for n in 0..known.len() {
            let less: Vec<&str> = known
                .iter()
                .enumerate()
                .filter(|(i, _)| *i != n)
                .map(|(_, k)| *k)
                .collect();
            assert!(of(&more, &less).is_err(), "{less:?}");
        }
    }
}
