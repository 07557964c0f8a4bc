//! The controller of Secrets of type `kubernetes.io/service-account-token`. It adds the token of the account, the CA
//! certificate and the namespace, and deletes the Secret with its account
//! (`pkg/controller/serviceaccount/tokens_controller.go`).

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Secret, ServiceAccount};
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use super::{Caches, any_change, is_stale};
use crate::api::token::Subject;
use holdfast_core::meta;
use holdfast_kubeapi::client::code;
use holdfast_kubeapi::failure::chain;
use holdfast_kubeapi::{Api, Cache};

/// Signs the token of an account for the Secret of this name.
pub(crate) type SignToken = Arc<dyn Fn(&Subject<'_>, &str) -> Result<String, String> + Send + Sync>;

/// The type of these Secrets.
pub const TYPE: &str = "kubernetes.io/service-account-token";
/// Annotation with the name of the Secret's account.
const ACCOUNT: &str = "kubernetes.io/service-account.name";
/// Annotation with the uid of the account, set by the controller.
const ACCOUNT_UID: &str = "kubernetes.io/service-account.uid";

/// Whether a Secret refers to this account.
fn is_of(secret: &Secret, account: &ServiceAccount) -> bool {
    let annotations = meta::annotations(secret);
    annotations.get(ACCOUNT) == account.metadata.name.as_ref()
        && annotations
            .get(ACCOUNT_UID)
            .is_none_or(|uid| uid.is_empty() || Some(uid) == account.metadata.uid.as_ref())
}

/// The missing or outdated data of a Secret, base64-encoded by key. The token is signed only if it is missing.
fn missing_data(
    secret: &Secret,
    ca: &str,
    sign: impl FnOnce() -> Result<String, String>,
) -> Result<Value, String> {
    use base64::Engine as _;
    let held = |key: &str| secret.data.as_ref().and_then(|d| d.get(key));
    let is_empty = |key: &str| held(key).is_none_or(|value| value.0.is_empty());
    let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    let mut data = json!({});
    if held("ca.crt") != Some(&ByteString(ca.as_bytes().to_vec())) {
        data["ca.crt"] = encode(ca).into();
    }
    if is_empty("namespace") {
        data["namespace"] = encode(&secret.namespace().unwrap_or_default()).into();
    }
    if is_empty("token") {
        data["token"] = encode(&sign()?).into();
    }
    Ok(data)
}

/// Reconciles one Secret.
async fn reconcile(
    client: &Client,
    caches: &Caches,
    secret: &Secret,
    ca: &str,
    sign: &SignToken,
) -> Result<(), kube::Error> {
    let (namespace, name) = (secret.namespace().unwrap_or_default(), secret.name_any());
    let account = meta::annotations(secret).get(ACCOUNT).cloned();
    let account = account.filter(|a| !a.is_empty());
    let Some(account) = account.filter(|_| secret.metadata.deletion_timestamp.is_none()) else {
        return Ok(());
    };
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &namespace);
    let mut found = caches.accounts.get(&namespace, &account);
    if found.as_ref().is_none_or(|a| !is_of(secret, a)) {
        // The cache may be stale, and a Secret must not be deleted because of that.
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &namespace);
        found = accounts.get_opt(&account).await?.map(Arc::new);
    }
    let Some(account) = found.filter(|a| is_of(secret, a)) else {
        let only = Preconditions {
            uid: secret.uid(),
            ..Preconditions::default()
        };
        let params = DeleteParams::default().preconditions(only);
        return secrets.delete(&name, &params).await.map(|_| ());
    };
    let uid = account.uid().unwrap_or_default();
    let subject = Subject {
        namespace: &namespace,
        account: &account.name_any(),
        uid: &uid,
    };
    let data = match missing_data(secret, ca, || sign(&subject, &name)) {
        Ok(data) => data,
        Err(error) => {
            tracing::error!(
                error,
                namespace,
                name,
                "signing a service account token failed"
            );
            return Ok(());
        }
    };
    if data.as_object().is_none_or(serde_json::Map::is_empty) {
        return Ok(());
    }
    let patch = json!({"data": data, "metadata": {
        "resourceVersion": secret.metadata.resource_version,
        "annotations": {ACCOUNT: subject.account, ACCOUNT_UID: uid}}});
    let patch = Patch::Merge(patch);
    secrets
        .patch(&name, &PatchParams::default(), &patch)
        .await
        .map(|_| ())
}

/// Runs until the process exits.
pub(super) async fn run(client: Client, caches: Caches, ca: String, sign: SignToken) {
    let secrets: Cache<Secret> = Cache::start(
        Api::all(client.clone()),
        watcher::Config::default()
            .streaming_lists()
            .fields(&format!("type={TYPE}")),
    );
    secrets.synced().await;
    let mut changes = [secrets.changes(), caches.accounts.changes()];
    loop {
        for receiver in &mut changes {
            receiver.mark_unchanged();
        }
        let mut unfinished = false;
        for secret in secrets.list() {
            let result = reconcile(&client, &caches, &secret, &ca, &sign).await;
            // After a conflict, the next reconciliation sees the concurrent change. A rejected write is not retried,
            // because only a change of the Secret can make it valid.
            if let Err(error) = result
                && !is_stale(&error)
            {
                unfinished |= !matches!(code(&error), Some(400 | 403 | 413 | 422));
                tracing::warn!(error = %chain(&error), namespace = secret.namespace(), name = secret.name_any(), "reconcile of a service account token Secret failed");
            }
        }
        let most = if unfinished {
            Duration::from_secs(1)
        } else {
            Duration::from_secs(60)
        };
        any_change(&mut changes, most).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(annotations: Value, data: Value) -> Secret {
        let metadata = json!({"name": "s", "namespace": "n", "annotations": annotations});
        serde_json::from_value(json!({"metadata": metadata, "type": TYPE, "data": data}))
            .expect("a secret")
    }

    #[test]
    fn a_token_secret_gets_only_its_missing_fields() {
        let of = |data: Value| {
            missing_data(&secret(json!({}), data), "CA", || Ok("TOKEN".into())).expect("signed")
        };
        let (ca, namespace, token) = ("Q0E=", "bg==", "VE9LRU4=");
        assert_eq!(
            of(json!({})),
            json!({"ca.crt": ca, "namespace": namespace, "token": token})
        );
        assert_eq!(
            of(json!({"ca.crt": "T0xE", "namespace": namespace, "token": token})),
            json!({"ca.crt": ca}),
            "a changed CA is written to the secret"
        );
        assert_eq!(
            of(json!({"ca.crt": ca, "namespace": "b3RoZXI=", "token": "b3RoZXI="})),
            json!({})
        );
        let failed = missing_data(&secret(json!({}), json!({})), "CA", || Err("why".into()));
        assert_eq!(failed, Err("why".into()));
    }

    #[test]
    fn a_token_secret_belongs_to_the_account_with_its_uid() {
        let account: ServiceAccount = serde_json::from_value(
            json!({"metadata": {"name": "a", "namespace": "n", "uid": "u"}}),
        )
        .expect("an account");
        for (annotations, expected) in [
            (json!({ACCOUNT: "a"}), true),
            (json!({ACCOUNT: "a", ACCOUNT_UID: "u"}), true),
            (json!({ACCOUNT: "a", ACCOUNT_UID: ""}), true),
            (json!({ACCOUNT: "a", ACCOUNT_UID: "old"}), false),
            (json!({ACCOUNT: "b"}), false),
            (json!({}), false),
        ] {
            let secret = secret(annotations.clone(), json!({}));
            assert_eq!(is_of(&secret, &account), expected, "{annotations}");
        }
    }
}
