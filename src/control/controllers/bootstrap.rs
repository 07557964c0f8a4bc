//! Bootstrap tokens: signs `kube-public/cluster-info` with each token, and deletes expired tokens
//! (`pkg/controller/bootstrap/bootstrapsigner.go`, `tokencleaner.go`).

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::runtime::watcher;
use serde_json::json;

use super::{any_change, is_stale};
use holdfast_core::node::join::{
    CLUSTER_INFO, SECRET_TYPE, StoredToken, TOKEN_NAMESPACE, signature_changes,
};
use holdfast_kubeapi::failure::chain;
use holdfast_kubeapi::{Api, Cache};

/// Maximum time between two checks.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Pause after a failed write.
const RETRY: Duration = Duration::from_millis(500);

/// The Secrets with expired tokens. The token of a Secret that is not a complete token is never accepted, and the Secret stays.
fn expired(secrets: &[Arc<Secret>], now: Timestamp) -> Vec<&Secret> {
    let is_expired = |secret: &&Arc<Secret>| {
        StoredToken::read(secret).is_some_and(|token| token.has_expired(now))
    };
    secrets.iter().filter(is_expired).map(|s| &**s).collect()
}

/// The time until the next token expires, at most [`MAX_WAIT`].
fn time_to_next_check(tokens: &[StoredToken], now: Timestamp) -> Duration {
    let left = tokens.iter().filter_map(|token| token.expires);
    let left = left.filter_map(|at| Duration::try_from(at.duration_since(now)).ok());
    // A moment later, so that the token has expired then.
    let next = left.min().map(|left| left + Duration::from_millis(1));
    next.unwrap_or(MAX_WAIT).min(MAX_WAIT)
}

async fn sign(
    client: &Client,
    info: &ConfigMap,
    tokens: &[StoredToken],
    now: Timestamp,
) -> Result<(), kube::Error> {
    let changes = signature_changes(info, tokens, now);
    if changes.is_empty() {
        return Ok(());
    }
    let (namespace, name) = CLUSTER_INFO;
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let revision = info.metadata.resource_version.as_deref();
    let patch = Patch::Merge(json!({"metadata": {"resourceVersion": revision}, "data": changes}));
    api.patch(name, &PatchParams::default(), &patch)
        .await
        .map(|_| ())
}

async fn delete(client: &Client, secret: &Secret) -> Result<(), kube::Error> {
    let api: Api<Secret> = Api::namespaced(client.clone(), TOKEN_NAMESPACE);
    let only = Preconditions {
        uid: secret.metadata.uid.clone(),
        resource_version: secret.metadata.resource_version.clone(),
    };
    let params = DeleteParams::default().preconditions(only);
    let name = secret.metadata.name.as_deref().unwrap_or_default();
    tracing::info!(secret = name, "deleting an expired bootstrap token");
    api.delete(name, &params).await.map(|_| ())
}

/// Runs until the process exits.
pub(super) async fn run(client: Client) {
    let (namespace, name) = CLUSTER_INFO;
    let config = || watcher::Config::default().streaming_lists();
    let secrets: Cache<Secret> = Cache::start(
        Api::namespaced(client.clone(), TOKEN_NAMESPACE),
        config().fields(&format!("type={SECRET_TYPE}")),
    );
    let infos: Cache<ConfigMap> = Cache::start(
        Api::namespaced(client.clone(), namespace),
        config().fields(&format!("metadata.name={name}")),
    );
    tokio::join!(secrets.synced(), infos.synced());
    let mut changes = [secrets.changes(), infos.changes()];
    loop {
        for receiver in &mut changes {
            receiver.mark_unchanged();
        }
        let (now, all) = (Timestamp::now(), secrets.list());
        let tokens: Vec<StoredToken> = all.iter().filter_map(|s| StoredToken::read(s)).collect();
        let mut results = vec![];
        if let Some(info) = infos.get(namespace, name) {
            results.push(sign(&client, &info, &tokens, now).await);
        }
        for secret in expired(&all, now) {
            results.push(delete(&client, secret).await);
        }
        let mut wait = time_to_next_check(&tokens, now);
        for error in results.into_iter().filter_map(Result::err) {
            // The cache shows the concurrent change that caused a conflict.
            if !is_stale(&error) {
                tracing::warn!(error = %chain(&error), "reconcile of bootstrap tokens failed, retrying");
                wait = wait.min(RETRY);
            }
        }
        any_change(&mut changes, wait).await;
    }
}

#[cfg(test)]
mod tests {
    use holdfast_core::node::join::Token;

    use super::*;

    #[test]
    fn tokens_are_deleted_when_they_expire() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        let stored = |id: &str, expires: Option<i64>| {
            let token = Token::of(id, "0123456789abcdef").expect("a token");
            StoredToken::for_nodes(token, expires.map(at), "")
        };
        let tokens = [
            stored("aaaaaa", None),
            stored("bbbbbb", Some(100)),
            stored("cccccc", Some(130)),
        ];
        let secrets: Vec<Arc<Secret>> = tokens
            .iter()
            .map(|t| Arc::new(serde_json::from_value(t.secret()).expect("a Secret")))
            .collect();
        for (now, names, wait) in [
            (0, vec![], 60_000),
            (99, vec![], 1001),
            (100, vec!["bootstrap-token-bbbbbb"], 1),
            (101, vec!["bootstrap-token-bbbbbb"], 29_001),
            (
                1000,
                vec!["bootstrap-token-bbbbbb", "bootstrap-token-cccccc"],
                60_000,
            ),
        ] {
            let found = expired(&secrets, at(now)).into_iter();
            let found: Vec<_> = found.filter_map(|s| s.metadata.name.as_deref()).collect();
            assert_eq!(found, names, "{now}");
            let next = time_to_next_check(&tokens, at(now));
            assert_eq!(next, Duration::from_millis(wait), "{now}");
        }
    }
}
