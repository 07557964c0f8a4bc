//! Credential provider plugins that get a token of the pod's service account (KEP-4412,
//! `pkg/credentialprovider/plugin`). Pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::ServiceAccount;
use serde::Deserialize;

use super::pulled::ByAccount;
use crate::{digest, meta};

/// `tokenAttributes` in the plugin configuration.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Attributes {
    service_account_token_audience: String,
    cache_type: String,
    require_service_account: Option<bool>,
    required_service_account_annotation_keys: Vec<String>,
    optional_service_account_annotation_keys: Vec<String>,
}

/// What a plugin gets, and how its credentials are cached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// Audience of the tokens.
    pub audience: String,
    /// Whether the plugin is skipped for pods without a service account.
    pub requires_account: bool,
    /// Whether credentials are cached per token instead of per service account.
    pub by_token: bool,
    required: Vec<String>,
    optional: Vec<String>,
}

/// Data for a plugin about one pod. Contains a token, which is never printed.
#[derive(Clone)]
pub struct Grant {
    /// The pod's service account.
    pub account: ByAccount,
    /// The annotations of the service account that the plugin requests.
    pub annotations: BTreeMap<String, String>,
    /// The token.
    pub token: String,
}

/// Cache key of a plugin's credentials.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    account: ByAccount,
    annotations: BTreeMap<String, String>,
    /// Digest of the token.
    token: Option<String>,
}

/// Whether a text is a valid annotation key: a name, optionally after a domain and a slash. The name has up to 63
/// letters, digits and inner `-_.`; case does not matter.
fn is_annotation_key(key: &str) -> bool {
    let is_part = |part: &str, most: usize, within: &[u8]| {
        let bytes = part.as_bytes();
        let is_edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
        let is_within = |b: &u8| b.is_ascii_alphanumeric() || within.contains(b);
        bytes.len() <= most
            && is_edge(bytes.first())
            && is_edge(bytes.last())
            && bytes.iter().all(is_within)
    };
    let (domain, name) = match key.split_once('/') {
        Some((domain, name)) => (Some(domain), name),
        None => (None, key),
    };
    let is_domain = |domain: &str| {
        domain.len() <= 253 && domain.split('.').all(|label| is_part(label, 253, b"-"))
    };
    is_part(name, 63, b"-_.") && domain.is_none_or(is_domain)
}

impl Attributes {
    /// Validates the attributes. The error has the field below `tokenAttributes` and the remedy.
    pub fn check(&self) -> Result<Rules, (&'static str, String)> {
        let field = "serviceAccountTokenAudience";
        if self.service_account_token_audience.is_empty() {
            return Err((field, "set it to the audience of the tokens".into()));
        }
        let field = "requireServiceAccount";
        let requires = self.require_service_account;
        let requires = requires.ok_or_else(|| (field, "set it to true or false".to_owned()))?;
        let required = &self.required_service_account_annotation_keys;
        let optional = &self.optional_service_account_annotation_keys;
        let (of_required, of_optional) = (
            "requiredServiceAccountAnnotationKeys",
            "optionalServiceAccountAnnotationKeys",
        );
        if !requires && !required.is_empty() {
            let remedy = "set requireServiceAccount: true, or use optionalServiceAccountAnnotationKeys: a pod without a service account has no annotations";
            return Err((of_required, remedy.into()));
        }
        let mut seen = BTreeSet::new();
        for (field, keys) in [(of_required, required), (of_optional, optional)] {
            for key in keys {
                if !is_annotation_key(key) {
                    return Err((field, format!("{key:?} is not a valid annotation key")));
                }
                if !seen.insert(key) {
                    let remedy = format!("name {key:?} once, as required or as optional");
                    return Err((field, remedy));
                }
            }
        }
        let by_token = match self.cache_type.as_str() {
            "ServiceAccount" => false,
            "Token" => true,
            other => {
                let remedy = format!("{other:?} is invalid: use ServiceAccount or Token");
                return Err(("cacheType", remedy));
            }
        };
        Ok(Rules {
            audience: self.service_account_token_audience.clone(),
            requires_account: requires,
            by_token,
            required: required.clone(),
            optional: optional.clone(),
        })
    }
}

impl Rules {
    /// The annotations that the plugin requests; `None` if a required one is missing, so that the plugin is skipped.
    #[must_use]
    pub fn annotations(&self, account: &ServiceAccount) -> Option<BTreeMap<String, String>> {
        let all = meta::annotations(account);
        let of = |key: &String| Some((key.clone(), all.get(key)?.clone()));
        let required: Option<BTreeMap<_, _>> = self.required.iter().map(of).collect();
        let mut wanted = required?;
        wanted.extend(self.optional.iter().filter_map(of));
        Some(wanted)
    }

    /// Cache key of the credentials for this pod.
    #[must_use]
    pub fn key(&self, grant: &Grant) -> Key {
        Key {
            account: grant.account.clone(),
            annotations: grant.annotations.clone(),
            token: self
                .by_token
                .then(|| digest::sha256(grant.token.as_bytes())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn checked(changes: Value) -> Result<Rules, (&'static str, String)> {
        let mut fields = json!({"serviceAccountTokenAudience": "reg.example", "cacheType": "Token", "requireServiceAccount": true});
        json_patch::merge(&mut fields, &changes);
        let attributes: Attributes = serde_json::from_value(fields).expect("attributes");
        attributes.check()
    }

    #[test]
    fn validation_errors_name_the_field() {
        for (changes, field) in [
            (
                json!({"serviceAccountTokenAudience": null}),
                "serviceAccountTokenAudience",
            ),
            (
                json!({"requireServiceAccount": null}),
                "requireServiceAccount",
            ),
            (json!({"cacheType": null}), "cacheType"),
            (json!({"cacheType": "Pod"}), "cacheType"),
            (
                json!({"requireServiceAccount": false, "requiredServiceAccountAnnotationKeys": ["a"]}),
                "requiredServiceAccountAnnotationKeys",
            ),
            (
                json!({"requiredServiceAccountAnnotationKeys": ["a", "a"]}),
                "requiredServiceAccountAnnotationKeys",
            ),
            (
                json!({"requiredServiceAccountAnnotationKeys": ["a"], "optionalServiceAccountAnnotationKeys": ["a"]}),
                "optionalServiceAccountAnnotationKeys",
            ),
            (
                json!({"optionalServiceAccountAnnotationKeys": ["-a"]}),
                "optionalServiceAccountAnnotationKeys",
            ),
        ] {
            let error = checked(changes.clone()).expect_err("an error");
            assert_eq!(error.0, field, "{changes}: {}", error.1);
        }
        for key in [
            "",
            "/",
            "a/",
            "/a",
            "a/b/c",
            "a..b/c",
            "a b",
            &"a".repeat(64),
        ] {
            assert!(!is_annotation_key(key), "{key:?}");
        }
        for key in ["a", "A.b_c-d", "Reg.example/Role", &"a".repeat(63)] {
            assert!(is_annotation_key(key), "{key:?}");
        }
    }

    #[test]
    fn a_plugin_gets_the_annotations_that_it_lists() {
        let rules = checked(
            json!({"requiredServiceAccountAnnotationKeys": ["role"], "optionalServiceAccountAnnotationKeys": ["team", "other"]}),
        );
        let rules = rules.expect("rules");
        let of = |annotations: Value| {
            let account = json!({"metadata": {"annotations": annotations}});
            rules.annotations(&serde_json::from_value(account).expect("an account"))
        };
        let pairs = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            let pairs = pairs.iter();
            pairs.map(|(k, v)| ((*k).into(), (*v).into())).collect()
        };
        let found = of(json!({"role": "r", "team": "t", "secret": "s"}));
        assert_eq!(found, Some(pairs(&[("role", "r"), ("team", "t")])));
        assert_eq!(of(json!({"role": ""})), Some(pairs(&[("role", "")])));
        assert_eq!(of(json!({"team": "t"})), None);
    }

    #[test]
    fn credentials_are_cached_per_service_account_or_per_token() {
        let grant = |uid: &str, role: &str, token: &str| Grant {
            account: ByAccount {
                uid: uid.into(),
                namespace: "n".into(),
                name: "sa".into(),
            },
            annotations: BTreeMap::from([("role".to_owned(), role.to_owned())]),
            token: token.into(),
        };
        for (cache_type, other_token_is_other) in [("ServiceAccount", false), ("Token", true)] {
            let rules = checked(json!({"cacheType": cache_type})).expect("rules");
            let key = |uid, role, token| rules.key(&grant(uid, role, token));
            let one = key("u", "r", "t");
            assert_eq!(one, key("u", "r", "t"));
            assert_ne!(one, key("v", "r", "t"), "created again under the same name");
            assert_ne!(one, key("u", "s", "t"));
            assert_eq!(one != key("u", "r", "t2"), other_token_is_other);
            assert!(!format!("{one:?}").contains("\"t\""), "no token is printed");
        }
    }
}
