//! Service account tokens for credential provider plugins (KEP-4412): requested
//! from the API and cached until they need renewal.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use holdfast_core::image::pulled::ByAccount;
use holdfast_core::image::tokens::{Grant, Rules};
use holdfast_core::lock::lock;
use holdfast_core::{meta, pod};
use holdfast_kubeapi::pods::{ApiFailure, Issued, PodApi, Token, TokenFor};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};

/// The requested lifetime of tokens, in seconds. The API may issue a different one.
const TOKEN_SECONDS: i64 = 3600;

/// The API operations for service accounts.
#[async_trait]
pub(crate) trait Accounts: Send + Sync {
    /// Reads a service account.
    async fn account(&self, namespace: &str, name: &str) -> Result<ServiceAccount, ApiFailure>;
    /// Requests a token that is bound to a pod.
    async fn token(&self, request: TokenFor<'_>) -> Result<Token, ApiFailure>;
}

#[async_trait]
impl Accounts for Arc<dyn PodApi> {
    async fn account(&self, namespace: &str, name: &str) -> Result<ServiceAccount, ApiFailure> {
        self.service_account(namespace, name).await
    }

    async fn token(&self, request: TokenFor<'_>) -> Result<Token, ApiFailure> {
        PodApi::token(&**self, request).await
    }
}

/// The pod on whose behalf plugins are called.
#[derive(Clone, Copy)]
pub(crate) struct Caller<'a> {
    /// The API for service accounts and tokens.
    pub accounts: &'a dyn Accounts,
    /// The pod that needs the image.
    pub pod: &'a Pod,
    /// The current time.
    pub now: Timestamp,
}

/// The input that a plugin gets.
pub enum Granted {
    /// The plugin is not called: the pod has no service account, or the account lacks a required annotation.
    Skipped,
    /// No token: the pod has no service account, and the plugin does not require one.
    WithoutToken,
    /// A token and the service account's annotations.
    Account(Grant),
}

/// The issued tokens, by the uids of pod and service account and by audience.
#[derive(Default)]
pub struct Tokens(Mutex<BTreeMap<(String, String, String), Issued>>);

impl Tokens {
    /// Returns the input for a plugin with these rules and a pod.
    pub async fn grant(&self, rules: &Rules, caller: Caller<'_>) -> Result<Granted, String> {
        let name = pod::spec(caller.pod).service_account_name.as_deref();
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            return Ok(match rules.requires_account {
                true => Granted::Skipped,
                false => Granted::WithoutToken,
            });
        };
        let namespace = meta::namespace(caller.pod);
        let account = caller.accounts.account(namespace, name).await;
        let account = account.map_err(|e| {
            format!("cannot read the pod's service account {namespace}/{name}: {e}")
        })?;
        let Some(annotations) = rules.annotations(&account) else {
            tracing::debug!(
                namespace,
                name,
                "the service account lacks an annotation that a credential provider requires"
            );
            return Ok(Granted::Skipped);
        };
        let account = ByAccount {
            uid: meta::uid(&account).to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        Ok(Granted::Account(Grant {
            token: self.token(rules, &account, caller).await?,
            account,
            annotations,
        }))
    }

    async fn token(
        &self,
        rules: &Rules,
        account: &ByAccount,
        caller: Caller<'_>,
    ) -> Result<String, String> {
        let key = (
            pod::uid(caller.pod).to_owned(),
            account.uid.clone(),
            rules.audience.clone(),
        );
        let fresh = {
            let mut issued = lock(&self.0);
            issued.retain(|_, issued| issued.is_fresh(caller.now));
            issued.get(&key).map(|known| known.token.text.clone())
        };
        if let Some(text) = fresh {
            return Ok(text);
        }
        let request = TokenFor {
            pod: caller.pod,
            audience: &rules.audience,
            seconds: TOKEN_SECONDS,
            account_uid: Some(&account.uid),
        };
        let token = caller.accounts.token(request).await;
        let token = token.map_err(|e| format!("failed to fetch token: {e}"))?;
        let text = token.text.clone();
        let at = caller.now;
        lock(&self.0).insert(key, Issued { token, at });
        Ok(text)
    }
}
