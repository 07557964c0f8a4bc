//! The proxy's client certificate, which its kubeconfig embeds. The proxy renews it before it expires.
//!
//! Only the node may request the certificate of its proxy (`holdfast_core::node::signing`), so the request uses the kubeconfig of
//! the node's agent. It is read for each request, because the agent renews its certificate as well. The new certificate
//! replaces the old one in the kubeconfig, and the connections, which watch this file, use it from then on. A proxy whose
//! certificate has expired while the machine was off is renewed in the same way.

use std::convert::Infallible;
use std::path::Path;
use std::time::Duration;

use base64::Engine as _;
use jiff::Timestamp;
use serde_json::{Value, json};

use holdfast_config::lenient;
use holdfast_core::backoff::Doubling;
use holdfast_core::node::signing;
use holdfast_kubeapi::client;
use holdfast_kubeapi::signing::{Issued, obtain_for_new_key};
use holdfast_sys::clock::Clock;
use holdfast_sys::file;

use crate::config::Config;

/// Interval between checks whether a renewal is due.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// How long to wait for a new certificate.
const TIMEOUT: Duration = Duration::from_secs(900);
/// Back-off after a failure.
const BACKOFF: Doubling = Doubling::new(Duration::from_secs(2), Duration::from_secs(32));
/// Size limit of a kubeconfig, in bytes.
const MAX_KUBECONFIG: u64 = 1 << 20;

/// Renews the certificate whenever that is due. Waits indefinitely without the kubeconfig of the agent.
pub(crate) async fn keep_renewed(config: &Config) -> Infallible {
    let Some(node_kubeconfig) = &config.node_kubeconfig else {
        return std::future::pending().await;
    };
    let mut again = BACKOFF;
    loop {
        let now = Clock::system().now();
        let pause = match renew_if_due(config, node_kubeconfig, now).await {
            Ok(is_renewed) => {
                if is_renewed {
                    tracing::info!("the proxy's client certificate was renewed");
                }
                again.reset();
                CHECK_INTERVAL
            }
            Err(error) => {
                tracing::warn!(
                    error,
                    "renewing the proxy's client certificate failed; retrying"
                );
                again.pause()
            }
        };
        tokio::time::sleep(pause).await;
    }
}

async fn renew_if_due(
    config: &Config,
    node_kubeconfig: &Path,
    now: Timestamp,
) -> Result<bool, String> {
    let path = &config.kubeconfig;
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    // A short file, once a minute.
    let text = file::read_text(path, MAX_KUBECONFIG).map_err(|e| failed(&e))?;
    let (mut kubeconfig, _) = lenient(&text).map_err(|e| failed(&e))?;
    let user = user(&mut kubeconfig).map_err(|e| failed(&e))?;
    if !signing::is_renewal_due(&certificate(user), now) {
        return Ok(false);
    }
    let client = client::connect(node_kubeconfig).await;
    let client = client.map_err(|e| e.to_string())?;
    let name = format!("{}{}", signing::PROXY_USER, config.node_name);
    let subject = (signing::PROXY_GROUP, name.as_str());
    let issued = obtain_for_new_key(&client, signing::PROXY_REQUEST, subject, &[], TIMEOUT).await?;
    set(user, &issued);
    let text = format!("{kubeconfig:#}\n");
    file::replace(path, text.as_bytes()).map_err(|e| failed(&e))?;
    Ok(true)
}

/// The user of the current context.
fn user(kubeconfig: &mut Value) -> Result<&mut Value, &'static str> {
    let position = |list: &str, name: &Value| {
        let mut all = kubeconfig[list].as_array()?.iter();
        all.position(|entry| entry["name"] == *name)
    };
    let context = position("contexts", &kubeconfig["current-context"]);
    let named = context.map(|at| &kubeconfig["contexts"][at]["context"]["user"]);
    let at = named.and_then(|name| position("users", name));
    let users = kubeconfig.get_mut("users");
    let user = at.and_then(|at| users?.get_mut(at)?.get_mut("user"));
    user.ok_or("the current context names no user of the file")
}

/// The certificate (PEM) that a user embeds; empty without one.
fn certificate(user: &Value) -> Vec<u8> {
    let data = user["client-certificate-data"].as_str().unwrap_or_default();
    let decoded = base64::engine::general_purpose::STANDARD.decode(data);
    // An invalid certificate is renewed, as a missing one.
    decoded.unwrap_or_default()
}

/// Replaces all credentials of a user.
fn set(user: &mut Value, issued: &Issued) {
    let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    let (certificate, key) = (encode(&issued.certificate), encode(&issued.key));
    *user = json!({"client-certificate-data": certificate, "client-key-data": key});
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "apiVersion: v1\nkind: Config\ncurrent-context: b\n\
        clusters: [{name: c, cluster: {server: 'https://192.0.2.1'}}]\n\
        contexts: [{name: a, context: {cluster: c, user: x}}, {name: b, context: {cluster: c, user: y}}]\n\
        users: [{name: x, user: {token: t}}, {name: y, user: {client-certificate-data: Zm9v, client-key-data: Zm9v}}]\n";

    #[test]
    fn the_certificate_of_the_current_contexts_user_is_replaced() {
        let (mut kubeconfig, _) = lenient(TEXT).expect("YAML");
        let before = kubeconfig.clone();
        let found = user(&mut kubeconfig).expect("a user");
        assert_eq!(certificate(found), b"foo");
        let issued = Issued {
            certificate: "bar".into(),
            key: "key".into(),
        };
        set(found, &issued);
        assert_eq!(certificate(found), b"bar");
        let text = format!("{kubeconfig:#}\n");
        let parsed: kube::config::Kubeconfig =
            kube::config::Kubeconfig::from_yaml(&text).expect("a kubeconfig");
        assert_eq!(parsed.current_context.as_deref(), Some("b"));
        for same in ["contexts", "clusters", "current-context"] {
            assert_eq!(kubeconfig[same], before[same], "{same}");
        }
        assert_eq!(kubeconfig["users"][0], before["users"][0]);
    }

    #[test]
    fn a_kubeconfig_without_a_user_is_an_error() {
        for text in [
            "{}",
            "7",
            "[]",
            "current-context: a\nusers: []\ncontexts: 7\n",
        ] {
            let (mut kubeconfig, _) = lenient(text).expect("YAML");
            assert!(user(&mut kubeconfig).is_err(), "{text}");
        }
    }
}
