//! The node's certificates, in the kubelet's files (`pkg/kubelet/certificate`). The first client
//! certificate is requested with a bootstrap token, later ones with their predecessor. The serving
//! certificate is requested from the API as well.

mod embedded;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::NodeAddress;
use kube::Client;
use kube::config::Kubeconfig;
use rcgen::{KeyPair, PublicKeyData as _};
use serde_json::json;
use tokio::sync::watch;

use embedded::User;
use embedded::adopt;

use crate::Metrics;
use holdfast_config::Config;
use holdfast_core::backoff::Doubling;
use holdfast_core::node::addresses::certificate_names;
use holdfast_core::node::signing::{self, CLIENT, SERVING};
use holdfast_host::{HostError, blocking};
use holdfast_kubeapi::client::connect;
use holdfast_kubeapi::signing::{CertificateRequest, obtain, obtain_for_new_key, request};
use holdfast_sys::clock::Clock;
use holdfast_sys::failure::doing;
use holdfast_sys::file;

/// How long to wait for the first certificate, and for each later one.
const CERTIFICATE_TIMEOUTS: (Duration, Duration) =
    (Duration::from_secs(3600), Duration::from_secs(900));
/// Back-off after a failure.
const BACKOFF: Doubling = Doubling::new(Duration::from_secs(2), Duration::from_secs(32));
/// Interval between checks whether a renewal is due.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// How long a node without a valid certificate keeps running while its API answers.
const MAX_WITHOUT_CERTIFICATE: SignedDuration = SignedDuration::from_secs(300);
const CLIENT_USAGES: &[&str] = &["digital signature", "client auth"];
const SERVING_USAGES: &[&str] = &["digital signature", "server auth"];

/// A certificate with its key in one file, and a link to the newest file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    dir: PathBuf,
    prefix: &'static str,
}

impl Pair {
    /// The client certificate, which authenticates the node.
    #[must_use]
    pub fn client(dir: &Path) -> Pair {
        Pair {
            dir: dir.into(),
            prefix: "kubelet-client",
        }
    }

    /// The serving certificate.
    #[must_use]
    pub fn serving(dir: &Path) -> Pair {
        Pair {
            dir: dir.into(),
            prefix: "kubelet-server",
        }
    }

    /// The path of the link.
    #[must_use]
    pub fn current(&self) -> PathBuf {
        self.dir.join(format!("{}-current.pem", self.prefix))
    }

    /// The validity of the current certificate, if there is one.
    #[must_use]
    pub fn lifetime(&self) -> Option<(Timestamp, Timestamp)> {
        signing::lifetime(&std::fs::read(self.current()).ok()?)
    }

    /// Completes an update that another agent began: the link was removed, and its replacement was not renamed yet
    /// (`recover` in client-go's `certificate_store.go`).
    fn recover(&self) -> std::io::Result<()> {
        let updated = self.dir.join(format!("{}-updated.pem", self.prefix));
        if self.current().exists() || !updated.is_symlink() {
            return Ok(());
        }
        std::fs::rename(updated, self.current())
    }

    /// Stores a new certificate, and then changes the link.
    fn store(&self, certificate: &str, key: &str, now: Timestamp) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.dir)?;
        let name = format!("{}-{}.pem", self.prefix, now.strftime("%Y-%m-%d-%H-%M-%S"));
        file::replace(
            &self.dir.join(&name),
            format!("{certificate}{key}").as_bytes(),
        )?;
        let fresh = self.dir.join(format!("{}-updated.pem", self.prefix));
        match std::fs::remove_file(&fresh) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        std::os::unix::fs::symlink(self.dir.join(&name), &fresh)?;
        std::fs::rename(fresh, self.current())
    }
}

/// The client certificate that the agent renews itself, with `rotateCertificates`. Once it exists,
/// it replaces the credentials of the kubeconfig.
#[must_use]
pub(crate) fn own_pair(config: &Config) -> Option<PathBuf> {
    let rotates = config.rotate_certificates;
    rotates.then(|| Pair::client(&config.cert_dir).current())
}

/// The group and the user of a node.
fn user(node: &str) -> (&'static str, String) {
    ("system:nodes", format!("system:node:{node}"))
}

/// The name of the first request. It depends on the key, so that after a restart the agent waits for the same request.
fn first_name(key: &KeyPair, node: &str) -> String {
    let text = [
        key.subject_public_key_info().as_slice(),
        node.as_bytes(),
        CLIENT.as_bytes(),
    ]
    .concat();
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &text);
    format!(
        "node-csr-{}",
        base64::engine::general_purpose::URL_SAFE_NO_PAD
            .encode(digest)
            .to_lowercase()
            .replace('_', "-")
            .trim_end_matches('-')
    )
}

/// The key of the first request, stored until the certificate is issued.
fn first_key(dir: &Path) -> Result<KeyPair, HostError> {
    let path = dir.join("kubelet-client.key.tmp");
    if let Some(key) = std::fs::read_to_string(&path)
        .ok()
        .and_then(|text| KeyPair::from_pem(&text).ok())
    {
        return Ok(key);
    }
    let unmade = |e: rcgen::Error| HostError::failed(format!("cannot generate a key: {e}"));
    let key = KeyPair::generate().map_err(unmade)?;
    let kept = std::fs::create_dir_all(dir)
        .and_then(|()| file::replace(&path, key.serialize_pem().as_bytes()));
    kept.map_err(doing(format!("cannot store the key {}", path.display())))?;
    Ok(key)
}

/// Whether a kubeconfig has a client certificate that has not expired, embedded or in a
/// file (`isClientConfigStillValid` in `pkg/kubelet/certificate/bootstrap`). Credentials
/// of other kinds do not count, as in the kubelet.
fn is_usable(path: &Path, now: Timestamp) -> bool {
    let Ok(Some(user)) = User::read(path) else {
        return false;
    };
    let lifetime = user.certificate().and_then(|pem| signing::lifetime(&pem));
    lifetime.is_some_and(|(_, ends)| ends > now)
}

/// Builds the node's kubeconfig from the bootstrap kubeconfig.
fn kubeconfig(bootstrap: &Kubeconfig, pair: &Path) -> Result<String, String> {
    let context = bootstrap
        .contexts
        .iter()
        .find(|c| Some(&c.name) == bootstrap.current_context.as_ref());
    let named = context
        .and_then(|c| c.context.as_ref())
        .map(|c| c.cluster.clone());
    let cluster = bootstrap
        .clusters
        .iter()
        .find(|c| named.as_ref().is_none_or(|n| *n == c.name))
        .and_then(|c| c.cluster.clone());
    let cluster = cluster.ok_or("the bootstrap kubeconfig has no cluster: add one with its server and certificate authority")?;
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "default-context",
        "clusters": [{"name": "default-cluster", "cluster": cluster}],
        "contexts": [{"name": "default-context", "context": {"cluster": "default-cluster", "user": "default-auth"}}],
        "users": [{"name": "default-auth", "user": {"client-certificate": pair, "client-key": pair}}],
    });
    serde_json::to_string_pretty(&text).map_err(|e| e.to_string())
}

/// Prepares the node's client certificate, from a bootstrap kubeconfig or from a certificate embedded in the
/// kubeconfig. Returns whether a renewal is due immediately.
pub async fn prepare(config: &Config, clock: Clock) -> anyhow::Result<bool> {
    bootstrap(config, clock).await?;
    Ok(adopt(config, clock.now()))
}

/// Ensures a usable kubeconfig: if it is missing or its certificate has expired, requests a certificate with the
/// bootstrap kubeconfig. Retries with back-off until this succeeds.
async fn bootstrap(config: &Config, clock: Clock) -> anyhow::Result<()> {
    let (Some(kubeconfig_path), Some(bootstrap_path)) =
        (&config.kubeconfig, &config.bootstrap_kubeconfig)
    else {
        return Ok(());
    };
    if is_usable(kubeconfig_path, clock.now()) {
        return Ok(());
    }
    tracing::info!(kubeconfig = %bootstrap_path.display(), "the node has no certificate yet; requesting one");
    let file = Kubeconfig::read_from(bootstrap_path).map_err(|e| {
        anyhow::anyhow!(
            "--bootstrap-kubeconfig: {} cannot be used: {e}",
            bootstrap_path.display()
        )
    })?;
    let client = connect(bootstrap_path).await?;
    let mut again = BACKOFF;
    loop {
        match request_first_certificate(config, &client, &file, kubeconfig_path, clock).await {
            Ok(()) => return Ok(()),
            Err(error) => {
                tracing::warn!(error, "requesting the node's certificate failed; retrying");
                tokio::time::sleep(again.pause()).await;
            }
        }
    }
}

fn text(error: HostError) -> String {
    error.message
}

async fn request_first_certificate(
    config: &Config,
    client: &Client,
    file_of: &Kubeconfig,
    target: &Path,
    clock: Clock,
) -> Result<(), String> {
    let dir = config.cert_dir.clone();
    let key = blocking(move || first_key(&dir)).await.map_err(text)?;
    let (group, user) = user(&config.node_name);
    let request = CertificateRequest {
        name: Some(first_name(&key, &config.node_name)),
        signer: CLIENT,
        usages: CLIENT_USAGES,
        request: request(&key, (group, &user), &[])?,
    };
    let certificate = obtain(client, &request, CERTIFICATE_TIMEOUTS.0)
        .await
        .map_err(|e| e.to_string())?;
    let pair = Pair::client(&config.cert_dir);
    let (kubeconfig, target, now, dir) = (
        kubeconfig(file_of, &pair.current())?,
        target.to_owned(),
        clock.now(),
        config.cert_dir.clone(),
    );
    blocking(move || {
        pair.store(&certificate, &key.serialize_pem(), now)
            .map_err(doing("cannot store the certificate"))?;
        if let Some(parent) = target.parent() {
            std::fs::create_dir_all(parent)
                .map_err(doing(format!("cannot create {}", parent.display())))?;
        }
        file::replace(&target, kubeconfig.as_bytes())
            .map_err(doing(format!("cannot write {}", target.display())))?;
        match std::fs::remove_file(dir.join("kubelet-client.key.tmp")) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(doing("cannot remove the key of the first request")(error))
            }
            _ => Ok(()),
        }
    })
    .await
    .map_err(text)?;
    tracing::info!(
        node = config.node_name,
        "the node has received its certificate"
    );
    Ok(())
}

/// A certificate that is renewed when due, or when it lacks an address or name of the node.
#[derive(Debug, Clone)]
pub(crate) struct Renewed {
    pair: Pair,
    signer: &'static str,
    usages: &'static [&'static str],
    node: String,
    /// The names and addresses that the node reports; `None` for the client certificate.
    addresses: Option<watch::Receiver<Vec<NodeAddress>>>,
    /// Whether the first renewal is due immediately, regardless of the certificate's validity.
    is_forced: bool,
}

impl Renewed {
    /// The client certificate. With `is_forced` it is renewed immediately, because it was copied from the kubeconfig.
    #[must_use]
    pub fn client(config: &Config, is_forced: bool) -> Renewed {
        Renewed {
            pair: Pair::client(&config.cert_dir),
            signer: CLIENT,
            usages: CLIENT_USAGES,
            node: config.node_name.clone(),
            addresses: None,
            is_forced,
        }
    }

    /// The serving certificate, for all names and addresses that the node reports.
    #[must_use]
    pub fn serving(config: &Config, addresses: watch::Receiver<Vec<NodeAddress>>) -> Renewed {
        Renewed {
            pair: Pair::serving(&config.cert_dir),
            signer: SERVING,
            usages: SERVING_USAGES,
            node: config.node_name.clone(),
            addresses: Some(addresses),
            is_forced: false,
        }
    }

    /// The names and addresses for the certificate.
    fn names(&self) -> Vec<String> {
        let reported = self
            .addresses
            .as_ref()
            .map(|known| certificate_names(&known.borrow()));
        let (names, ips) = reported.unwrap_or_default();
        [names, ips].concat()
    }

    /// Whether a request is possible. A serving certificate needs an IP address: a request with names alone is not
    /// allowed (the gate `AllowDNSOnlyNodeCSR` is off).
    fn can_request(&self) -> bool {
        let addresses = self.addresses.as_ref();
        addresses.is_none_or(|known| !certificate_names(&known.borrow()).1.is_empty())
    }

    /// Waits until the next check is due.
    async fn wait_for_next_check(&mut self) {
        let changed = async {
            // The sender lives as long as the agent.
            if let Some(addresses) = &mut self.addresses
                && addresses.changed().await.is_ok()
            {
                return;
            }
            std::future::pending().await
        };
        tokio::select! {
            () = tokio::time::sleep(CHECK_INTERVAL) => {}
            () = changed => {}
        }
    }
}

/// Whether an apiserver answers, even with a rejection.
async fn is_reachable(client: &Client) -> bool {
    matches!(
        client.apiserver_version().await,
        Ok(_) | Err(kube::Error::Api(_))
    )
}

/// Since when the node has had no valid certificate; `None` if it has one.
fn invalid_since(
    lifetime: Option<(Timestamp, Timestamp)>,
    before: Option<Timestamp>,
    now: Timestamp,
) -> Option<Timestamp> {
    match lifetime {
        Some((_, ends)) if ends > now => None,
        _ => Some(before.unwrap_or(now)),
    }
}

/// Whether a renewal is due: late in the certificate's validity, or because it lacks some of the names. Names in
/// `answered` were already requested last time, and are not requested again.
fn is_due(
    present: &[u8],
    names: &[String],
    answered: Option<&Vec<String>>,
    now: Timestamp,
) -> bool {
    let fits = answered.is_some_and(|last| last == names) || signing::covers_names(present, names);
    !fits || signing::is_renewal_due(present, now)
}

/// Renews a certificate when due. Returns when the node's client certificate is invalid and cannot be renewed although
/// the API answers: only a bootstrap token can help then (`pkg/kubelet/certificate/bootstrap`).
pub(crate) async fn renew_when_due(
    mut kept: Renewed,
    client: Client,
    clock: Clock,
    metrics: Arc<Metrics>,
) {
    metrics.renewals_failed(kept.signer == CLIENT, 0);
    let mut again = BACKOFF;
    let mut since = None;
    // The last requested names: a signer may omit some of them, which must not cause repeated requests.
    let mut answered = None;
    loop {
        let (now, names) = (clock.now(), kept.names());
        let present = std::fs::read(kept.pair.current()).unwrap_or_default();
        let due = kept.is_forced || is_due(&present, &names, answered.as_ref(), now);
        if !kept.can_request() || !due {
            kept.wait_for_next_check().await;
            continue;
        }
        match renew(&kept, &names, &client, now).await {
            Ok(()) => {
                (answered, kept.is_forced) = (Some(names), false);
                tracing::info!(signer = kept.signer, "a certificate was renewed");
                again.reset();
            }
            Err(error) => {
                metrics.renewals_failed(kept.signer == CLIENT, 1);
                tracing::warn!(
                    error,
                    signer = kept.signer,
                    "renewing a certificate failed; retrying"
                );
                since = invalid_since(kept.pair.lifetime(), since, now);
                let long =
                    since.is_some_and(|since| now.duration_since(since) >= MAX_WITHOUT_CERTIFICATE);
                if kept.signer == CLIENT && long && is_reachable(&client).await {
                    return;
                }
                tokio::time::sleep(again.pause()).await;
            }
        }
    }
}

async fn renew(
    kept: &Renewed,
    names: &[String],
    client: &Client,
    now: Timestamp,
) -> Result<(), String> {
    let (group, user) = user(&kept.node);
    let signer = (kept.signer, kept.usages);
    let limit = CERTIFICATE_TIMEOUTS.1;
    let issued = obtain_for_new_key(client, signer, (group, &user), names, limit).await?;
    let pair = kept.pair.clone();
    blocking(move || {
        pair.store(&issued.certificate, &issued.key, now)
            .map_err(doing("cannot store the certificate"))
    })
    .await
    .map_err(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_config::{Overrides, load};

    #[test]
    fn the_link_leads_to_the_newest_pair_which_only_its_owner_reads() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().expect("a directory");
        let pair = Pair::client(dir.path());
        assert_eq!(pair.lifetime(), None);
        for second in [0, 100] {
            let made = rcgen::generate_simple_self_signed(["a".into()]).expect("a certificate");
            let at = Timestamp::from_second(second).expect("a time");
            pair.store(&made.cert.pem(), &made.signing_key.serialize_pem(), at)
                .expect("kept");
            assert!(
                std::fs::read_to_string(pair.current())
                    .expect("read")
                    .contains(&made.cert.pem())
            );
        }
        assert!(pair.lifetime().is_some());
        let target = std::fs::read_link(pair.current()).expect("a link");
        assert!(
            target.ends_with("kubelet-client-1970-01-01-00-01-40.pem"),
            "{target:?}"
        );
        assert_eq!(
            std::fs::metadata(&target)
                .expect("metadata")
                .permissions()
                .mode()
                & 0o777,
            0o600
        );
    }

    #[test]
    fn the_start_of_a_time_without_a_certificate_is_known() {
        let at = |second: i64| Timestamp::from_second(second).expect("a time");
        assert_eq!(
            invalid_since(Some((at(0), at(10))), Some(at(1)), at(9)),
            None,
            "the certificate is valid again"
        );
        assert_eq!(
            invalid_since(Some((at(0), at(10))), None, at(10)),
            Some(at(10))
        );
        assert_eq!(invalid_since(None, Some(at(3)), at(10)), Some(at(3)));
    }

    fn reported(ips: &[&str]) -> Vec<NodeAddress> {
        let of = |kind: &str, address: &str| NodeAddress {
            type_: kind.into(),
            address: address.into(),
        };
        let ips = ips.iter().map(|ip| of("InternalIP", ip));
        ips.chain([of("Hostname", "n1")]).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_serving_certificate_follows_the_nodes_addresses() {
        let config = load(None, &Overrides::default(), "n1").expect("a configuration");
        let addresses = watch::channel(reported(&["192.0.2.1"])).0;
        let mut kept = Renewed::serving(&config, addresses.subscribe());
        let made = rcgen::generate_simple_self_signed(kept.names()).expect("a certificate");
        let (pem, now) = (made.cert.pem(), Timestamp::now());
        let due = |kept: &Renewed, answered: Option<Vec<String>>| {
            is_due(pem.as_bytes(), &kept.names(), answered.as_ref(), now)
        };
        assert!(!due(&kept, None) && is_due(b"", &kept.names(), None, now));
        let begun = tokio::time::Instant::now();
        addresses.send_replace(reported(&["192.0.2.1", "2001:db8::1"]));
        kept.wait_for_next_check().await;
        assert!(
            begun.elapsed() < CHECK_INTERVAL,
            "the change is handled immediately"
        );
        assert!(due(&kept, None));
        let requested = kept.names();
        assert!(
            !due(&kept, Some(requested)),
            "the signer has already answered for these names"
        );
        kept.wait_for_next_check().await;
        assert!(begun.elapsed() >= CHECK_INTERVAL);
    }

    #[tokio::test(start_paused = true)]
    async fn a_serving_certificate_waits_for_the_nodes_address() {
        let config = load(None, &Overrides::default(), "n1").expect("a configuration");
        assert!(Renewed::client(&config, false).can_request());
        // The cloud controller has not set any address yet.
        let addresses = watch::channel(reported(&[])).0;
        let mut kept = Renewed::serving(&config, addresses.subscribe());
        assert!(!kept.can_request());
        let begun = tokio::time::Instant::now();
        addresses.send_replace(reported(&["192.0.2.1"]));
        kept.wait_for_next_check().await;
        assert!(
            begun.elapsed() < CHECK_INTERVAL,
            "the change is handled immediately"
        );
        assert!(kept.can_request());
        assert_eq!(kept.names(), ["n1", "192.0.2.1"]);
    }

    #[test]
    fn the_first_request_keeps_its_name_after_a_restart() {
        let dir = tempfile::tempdir().expect("a directory");
        let (one, two) = (
            first_key(dir.path()).expect("a key"),
            first_key(dir.path()).expect("a key"),
        );
        assert_eq!(first_name(&one, "n"), first_name(&two, "n"));
        assert_ne!(first_name(&one, "n"), first_name(&one, "m"));
        let name = first_name(&one, "n");
        assert!(
            name.starts_with("node-csr-")
                && name
                    .chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'),
            "{name}"
        );
    }

    #[test]
    fn a_kubeconfig_is_usable_while_its_certificate_is_valid() {
        let dir = tempfile::tempdir().expect("a directory");
        let (path, pair) = (dir.path().join("kubeconfig"), Pair::client(dir.path()));
        let now = Timestamp::now();
        assert!(!is_usable(&path, now), "the kubeconfig is missing");
        let start: Kubeconfig = serde_saphyr::from_str("clusters: [{name: a, cluster: {server: 'https://192.0.2.1'}}]\ncontexts: [{name: x, context: {cluster: a, user: u}}]\ncurrent-context: x").expect("a kubeconfig");
        std::fs::write(&path, kubeconfig(&start, &pair.current()).expect("text")).expect("written");
        assert!(!is_usable(&path, now), "its certificate is missing");
        let made = rcgen::generate_simple_self_signed(["a".into()]).expect("a certificate");
        pair.store(&made.cert.pem(), &made.signing_key.serialize_pem(), now)
            .expect("kept");
        assert!(is_usable(&path, now));
        let text = std::fs::read_to_string(&path).expect("read");
        assert!(text.contains("192.0.2.1") && text.contains("default-auth"));
    }
}
