//! The client certificate that a kubeconfig embeds, as `kubeadm init` writes `kubelet.conf`.
//!
//! With `rotateCertificates`, the node's own pair starts as a copy of that certificate; then a new one is requested
//! (`getCurrentCertificateOrBootstrap` in client-go's `certificate_manager.go`). kubeadm's phase `kubelet-finalize`
//! expects the copy, and then changes `kubelet.conf` to the link `kubelet-client-current.pem`, which the agent renews.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use base64::Engine as _;
use jiff::Timestamp;
use rcgen::{KeyPair, PublicKeyData as _};
use serde_json::Value;

use super::Pair;
use holdfast_config::Config;
use holdfast_core::node::signing;
use holdfast_sys::file;

/// Size limit of a kubeconfig, in bytes.
const MAX_KUBECONFIG: u64 = 1 << 20;

/// The user of a kubeconfig's current context.
pub(super) struct User {
    fields: Value,
    /// The directory of the kubeconfig, to which its paths are relative.
    dir: PathBuf,
}

impl User {
    /// Reads the kubeconfig. `None` if the current context refers to no user of the file.
    pub(super) fn read(path: &Path) -> anyhow::Result<Option<User>> {
        let text = file::read_text(path, MAX_KUBECONFIG)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let config: Value = serde_saphyr::from_str(&text)
            .with_context(|| format!("{} is not a kubeconfig", path.display()))?;
        let named = |list: &str, name: &Value| {
            let mut all = config[list].as_array()?.iter();
            all.find(|entry| entry["name"] == *name).cloned()
        };
        let context = named("contexts", &config["current-context"]);
        let user = context.and_then(|context| named("users", &context["context"]["user"]));
        let dir = path.parent().unwrap_or(Path::new("/")).to_owned();
        Ok(user.map(|mut user| User {
            fields: user["user"].take(),
            dir,
        }))
    }

    /// The decoded text of a base64 field.
    fn embedded(&self, field: &str) -> Option<String> {
        let data = self.fields[field]
            .as_str()
            .filter(|data| !data.is_empty())?;
        let bytes = base64::engine::general_purpose::STANDARD
            .decode(data)
            .ok()?;
        String::from_utf8(bytes).ok()
    }

    /// The client certificate in PEM format. An embedded certificate takes
    /// precedence over a file (`clientcmd/api/types.go`).
    pub(super) fn certificate(&self) -> Option<Vec<u8>> {
        let path = || self.fields["client-certificate"].as_str();
        match self.embedded("client-certificate-data") {
            Some(embedded) => Some(embedded.into_bytes()),
            None => std::fs::read(self.dir.join(path()?)).ok(),
        }
    }
}

/// Whether a certificate belongs to a key; both are in PEM format.
fn is_pair(certificate: &str, key: &str) -> bool {
    let Ok(key) = KeyPair::from_pem(key) else {
        return false;
    };
    signing::public_key(certificate.as_bytes()) == Some(key.subject_public_key_info())
}

/// Copies the embedded certificate and key of the kubeconfig to the node's own pair. Returns
/// whether the copy was made. In this case a new certificate is requested immediately, because the
/// embedded one may have more rights than a node needs.
///
/// Copies nothing without `rotateCertificates`, while the own pair is valid, or if the embedded pair is unusable. A
/// failure is logged: the kubeconfig's credentials are used until the first renewal, as in the kubelet.
pub(super) fn adopt(config: &Config, now: Timestamp) -> bool {
    match copy(config, now) {
        Ok(adopted) => adopted,
        Err(error) => {
            tracing::error!(error = %format!("{error:#}"), "cannot store the kubeconfig's client certificate");
            false
        }
    }
}

fn copy(config: &Config, now: Timestamp) -> anyhow::Result<bool> {
    let Some(kubeconfig) = config
        .kubeconfig
        .as_ref()
        .filter(|_| config.rotate_certificates)
    else {
        return Ok(false);
    };
    let pair = Pair::client(&config.cert_dir);
    let recovered = pair.recover();
    recovered.with_context(|| format!("cannot complete {}", pair.current().display()))?;
    if pair.lifetime().is_some_and(|(_, ends)| ends > now) {
        return Ok(false);
    }
    // The connection reads the same file next, and reports its errors.
    let Ok(Some(user)) = User::read(kubeconfig) else {
        return Ok(false);
    };
    let (Some(certificate), Some(key)) = (
        user.embedded("client-certificate-data"),
        user.embedded("client-key-data"),
    ) else {
        return Ok(false);
    };
    let is_current = signing::lifetime(certificate.as_bytes()).is_some_and(|(_, ends)| ends > now);
    if !is_current || !is_pair(&certificate, &key) {
        tracing::warn!(
            kubeconfig = %kubeconfig.display(),
            "the embedded client certificate expired or does not match its key; it is not copied to the certificate directory"
        );
        return Ok(false);
    }
    pair.store(&format!("{}\n", certificate.trim_end()), &key, now)
        .with_context(|| format!("cannot store {}", pair.current().display()))?;
    tracing::info!(pair = %pair.current().display(), "stored the kubeconfig's client certificate; requesting a new one");
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use holdfast_config::{Overrides, load};

    fn encoded(text: &str) -> String {
        base64::engine::general_purpose::STANDARD.encode(text)
    }

    /// A kubeconfig whose current context does not use its first user.
    fn kubeconfig(certificate: &str, key: &str) -> String {
        let user = serde_json::json!({"client-certificate-data": encoded(certificate), "client-key-data": encoded(key)});
        serde_json::json!({"apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": "https://192.0.2.1"}}],
            "contexts": [{"name": "y", "context": {"cluster": "c", "user": "other"}}, {"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "other", "user": {"token": "t"}}, {"name": "u", "user": user}]})
        .to_string()
    }

    #[test]
    fn the_embedded_pair_is_stored_once_and_privately() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kubelet.conf");
        let made = rcgen::generate_simple_self_signed(["a".into()]).expect("a certificate");
        let other = rcgen::generate_simple_self_signed(["a".into()]).expect("a certificate");
        let (certificate, key) = (made.cert.pem(), made.signing_key.serialize_pem());
        let mut config = load(None, &Overrides::default(), "n1").expect("a configuration");
        config.cert_dir = dir.path().join("pki");
        config.kubeconfig = Some(path.clone());
        let (now, pair) = (Timestamp::now(), Pair::client(&config.cert_dir));
        let late = Timestamp::from_second(100_000_000_000).expect("a time");
        let mut adopts = |rotates: bool, text: &str, now: Timestamp| {
            std::fs::write(&path, text).expect("written");
            config.rotate_certificates = rotates;
            let adopted = adopt(&config, now);
            assert!(!adopted || pair.current().exists());
            adopted
        };
        let good = kubeconfig(&certificate, &key);
        for (case, rotates, text, now) in [
            ("no rotation", false, good.as_str(), now),
            ("expired", true, &good, late),
            (
                "another key",
                true,
                &kubeconfig(&certificate, &other.signing_key.serialize_pem()),
                now,
            ),
            ("no certificate", true, &kubeconfig("", ""), now),
            ("no context", true, "{apiVersion: v1, kind: Config}", now),
        ] {
            assert!(!adopts(rotates, text, now), "{case}");
            assert!(!pair.current().exists(), "{case}");
        }
        assert!(adopts(true, &good, now));
        let stored = std::fs::read_to_string(pair.current()).expect("read");
        assert!(stored.contains(&certificate) && stored.contains(&key));
        let target = std::fs::read_link(pair.current()).expect("a link");
        let name = format!("kubelet-client-{}.pem", now.strftime("%Y-%m-%d-%H-%M-%S"));
        assert!(target.ends_with(name), "{target:?}");
        let mode = std::fs::metadata(&target)
            .expect("metadata")
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(!adopts(true, &good, now), "the pair is valid");
        std::fs::write(&target, "corrupt").expect("written");
        assert!(adopts(true, &good, now), "a corrupt pair is replaced");
    }

    #[test]
    fn an_interrupted_exchange_of_pairs_is_completed() {
        let dir = tempfile::tempdir().expect("a directory");
        let pair = Pair::client(dir.path());
        pair.recover().expect("nothing to recover");
        let (target, updated) = (
            dir.path().join("a.pem"),
            dir.path().join("kubelet-client-updated.pem"),
        );
        std::fs::write(&target, "x").expect("written");
        std::os::unix::fs::symlink(&target, updated).expect("a link");
        pair.recover().expect("recovered");
        assert_eq!(std::fs::read_link(pair.current()).expect("a link"), target);
    }
}
