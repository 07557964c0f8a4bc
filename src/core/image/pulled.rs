//! Which pods may use an image that is already present: records of pulls and their credentials (KEP-2535,
//! `pkg/kubelet/images/pullmanager`). Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// When a pod must have credentials for an image that is already present (`imagePullCredentialsVerificationPolicy`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Policy {
    /// Never.
    NeverVerify,
    /// For images that were pulled by the agent, not for preloaded ones.
    #[default]
    NeverVerifyPreloaded,
    /// For all images except those listed; an entry may end in `/*`.
    NeverVerifyAllowlisted(Vec<String>),
    /// Always.
    AlwaysVerify,
}

/// A secret with which an image was pulled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BySecret {
    /// The secret's uid.
    pub uid: String,
    /// The secret's namespace.
    pub namespace: String,
    /// The secret's name.
    pub name: String,
    /// Digest of the credentials.
    pub credential_hash: String,
}

/// A service account whose token a credential provider plugin exchanged for the credentials of a pull (KEP-4412).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ByAccount {
    /// The service account's namespace.
    pub namespace: String,
    /// The service account's name.
    pub name: String,
    /// The service account's uid.
    pub uid: String,
}

/// Credentials that gave access to an image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Access {
    /// Secrets.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kubernetes_secrets: Vec<BySecret>,
    /// Service accounts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kubernetes_service_accounts: Vec<ByAccount>,
    /// Whether all pods of the node have access, because the image needs no credentials or was pulled with the node's.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub node_pods_accessible: bool,
}

/// Record of the pulls of one image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Record {
    /// `ImagePulledRecord`.
    pub kind: String,
    /// `kubelet.config.k8s.io/v1beta1`.
    pub api_version: String,
    /// Time of the last change, RFC 3339.
    pub last_updated_time: String,
    /// The image id of the runtime.
    pub image_ref: String,
    /// Access by image name as in pod specs, without tag and digest.
    pub credential_mapping: BTreeMap<String, Access>,
}

/// Credentials of a successful pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullCredential {
    /// A pod's pull secret.
    Secret(BySecret),
    /// Credentials from a plugin for the pod's service account.
    Account(ByAccount),
    /// No credentials, or credentials that all pods of the node may use.
    Anyone,
}

impl Record {
    /// Adds the credentials of a pull.
    pub fn add_pull(&mut self, image: &str, by: PullCredential, now: &str) {
        self.kind = "ImagePulledRecord".into();
        self.api_version = "kubelet.config.k8s.io/v1beta1".into();
        self.last_updated_time = now.to_owned();
        let access = self.credential_mapping.entry(image.to_owned()).or_default();
        match by {
            PullCredential::Anyone => {
                *access = Access {
                    node_pods_accessible: true,
                    ..Access::default()
                }
            }
            PullCredential::Secret(_) | PullCredential::Account(_)
                if access.node_pods_accessible => {}
            PullCredential::Account(account) => {
                let known = &mut access.kubernetes_service_accounts;
                known.push(account);
                known.sort();
                known.dedup();
            }
            PullCredential::Secret(secret) => {
                access.kubernetes_secrets.retain(|s| {
                    (&s.uid, &s.namespace, &s.name)
                        != (&secret.uid, &secret.namespace, &secret.name)
                });
                access.kubernetes_secrets.push(secret);
            }
        }
    }
}

/// Credentials of a pod.
#[derive(Debug, Clone, Copy)]
pub struct PodCredentials<'a> {
    /// The pod's pull secrets.
    pub secrets: &'a [BySecret],
    /// The pod's service account, if a plugin has credentials for it.
    pub account: Option<&'a ByAccount>,
}

/// Whether access to an image depends on the pod's service account. Plugins are called only if it does.
#[must_use]
pub fn depends_on_account(image: &str, record: Option<&Record>) -> bool {
    let access = record.and_then(|r| r.credential_mapping.get(image));
    access.is_some_and(|access| !access.kubernetes_service_accounts.is_empty())
}

/// Whether a pod may use an image that is present. `image` is the name in the pod spec without tag and digest.
/// `pulling` is whether a pull was started whose result was not recorded.
#[must_use]
pub fn may_use(
    policy: &Policy,
    image: &str,
    record: Option<&Record>,
    pulling: bool,
    own: PodCredentials<'_>,
) -> bool {
    let free = match policy {
        Policy::NeverVerify => true,
        Policy::NeverVerifyPreloaded => record.is_none() && !pulling,
        Policy::NeverVerifyAllowlisted(list) => list.iter().any(|entry| {
            entry.strip_suffix("/*").map_or(entry == image, |prefix| {
                image.starts_with(&format!("{prefix}/"))
            })
        }),
        Policy::AlwaysVerify => false,
    };
    let access = record.and_then(|r| r.credential_mapping.get(image));
    free || access.is_some_and(|access| {
        // The same secret, even if changed since; or the same credentials in another secret.
        let same = |a: &BySecret, b: &BySecret| {
            (&a.uid, &a.namespace, &a.name) == (&b.uid, &b.namespace, &b.name)
                || a.credential_hash == b.credential_hash
        };
        let accounts = &access.kubernetes_service_accounts;
        access.node_pods_accessible
            || access
                .kubernetes_secrets
                .iter()
                .any(|known| own.secrets.iter().any(|own| same(known, own)))
            || own.account.is_some_and(|own| accounts.contains(own))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(name: &str, hash: &str) -> BySecret {
        BySecret {
            uid: format!("{name}-uid"),
            namespace: "n".into(),
            name: name.into(),
            credential_hash: hash.into(),
        }
    }

    #[test]
    fn only_pods_that_could_have_pulled_an_image_may_use_it() {
        let mut record = Record::default();
        record.add_pull("r/x", PullCredential::Secret(secret("a", "h1")), "t");
        let cases = [
            (Policy::default(), None, false, vec![], true, "preloaded"),
            (
                Policy::default(),
                None,
                true,
                vec![],
                false,
                "a pull had started",
            ),
            (
                Policy::default(),
                Some(&record),
                false,
                vec![],
                false,
                "pulled with another secret",
            ),
            (
                Policy::default(),
                Some(&record),
                false,
                vec![secret("a", "changed")],
                true,
                "the same secret",
            ),
            (
                Policy::default(),
                Some(&record),
                false,
                vec![secret("b", "h1")],
                true,
                "the same credentials",
            ),
            (
                Policy::default(),
                Some(&record),
                false,
                vec![secret("b", "h2")],
                false,
                "others",
            ),
            (
                Policy::NeverVerify,
                Some(&record),
                false,
                vec![],
                true,
                "never checked",
            ),
            (
                Policy::AlwaysVerify,
                None,
                false,
                vec![],
                false,
                "always checked",
            ),
            (
                Policy::NeverVerifyAllowlisted(vec!["r/*".into()]),
                Some(&record),
                false,
                vec![],
                true,
                "listed, and pulled with another secret",
            ),
            (
                Policy::NeverVerifyAllowlisted(vec!["r/y".into()]),
                None,
                false,
                vec![],
                false,
                "not listed",
            ),
        ];
        for (policy, record, pulling, secrets, expected, what) in cases {
            let own = PodCredentials {
                secrets: &secrets,
                account: None,
            };
            assert_eq!(
                may_use(&policy, "r/x", record, pulling, own),
                expected,
                "{what}"
            );
        }
        let of = |image: &str, record: &Record, secrets: &[BySecret]| {
            let own = PodCredentials {
                secrets,
                account: None,
            };
            may_use(&Policy::default(), image, Some(record), false, own)
        };
        assert!(
            !of("r/other", &record, &[secret("a", "h1")]),
            "another name of the image is checked itself"
        );
        record.add_pull("r/x", PullCredential::Anyone, "t");
        assert!(of("r/x", &record, &[]));
    }

    #[test]
    fn a_service_account_may_use_images_that_were_pulled_for_it() {
        let account = |name: &str, uid: &str| ByAccount {
            namespace: "n".into(),
            name: name.into(),
            uid: uid.into(),
        };
        let mut record = Record::default();
        assert!(!depends_on_account("r/x", Some(&record)));
        for name in ["b", "a", "b"] {
            record.add_pull("r/x", PullCredential::Account(account(name, "1")), "t");
        }
        assert!(
            depends_on_account("r/x", Some(&record)) && !depends_on_account("r/y", Some(&record))
        );
        let text = serde_json::to_value(&record).expect("a record");
        let access = &text["credentialMapping"]["r/x"];
        let of = |name: &str| serde_json::json!({"namespace": "n", "name": name, "uid": "1"});
        assert_eq!(
            *access,
            serde_json::json!({"kubernetesServiceAccounts": [of("a"), of("b")]})
        );
        let may = |record: &Record, account: Option<&ByAccount>| {
            let own = PodCredentials {
                secrets: &[],
                account,
            };
            may_use(&Policy::default(), "r/x", Some(record), false, own)
        };
        assert!(may(&record, Some(&account("a", "1"))));
        assert!(
            !may(&record, None),
            "its credentials apply only to its account"
        );
        for other in [account("a", "2"), account("c", "1")] {
            assert!(!may(&record, Some(&other)), "{other:?}");
        }
        record.add_pull("r/x", PullCredential::Anyone, "t");
        record.add_pull("r/x", PullCredential::Account(account("c", "1")), "t");
        assert!(may(&record, None) && !depends_on_account("r/x", Some(&record)));
    }
}
