//! The certificate and key files of the agent's HTTP API.

use std::path::PathBuf;

use crate::node::credentials::Pair;
use holdfast_config::Config;
use holdfast_https::TlsFiles;

/// Whether the serving certificate is requested from the API and was not issued yet.
pub(super) fn is_awaited(config: &Config) -> bool {
    let serving = &config.serving;
    let is_requested = serving.certificate.is_none() && serving.asks_for_certificate;
    is_requested && !Pair::serving(&config.cert_dir).current().exists()
}

/// The TLS files. Creates a self-signed certificate if the configuration names none.
pub(super) fn of(config: &Config, node_ips: &[String]) -> Result<TlsFiles, String> {
    let (certificate, key) = match &config.serving.certificate {
        Some(pair) => pair.clone(),
        None if config.serving.asks_for_certificate => {
            let current = Pair::serving(&config.cert_dir).current();
            (current.clone(), current)
        }
        None => self_signed(&config.cert_dir, &config.node_name, node_ips)?,
    };
    Ok(TlsFiles {
        certificate,
        key,
        client_ca: config.serving.client_ca.clone(),
    })
}

/// Creates `kubelet.crt` and `kubelet.key` once, for the node's names and addresses.
fn self_signed(
    dir: &std::path::Path,
    node: &str,
    addresses: &[String],
) -> Result<(PathBuf, PathBuf), String> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let (certificate, key) = (dir.join("kubelet.crt"), dir.join("kubelet.key"));
    if certificate.exists() && key.exists() {
        return Ok((certificate, key));
    }
    let names: Vec<String> = std::iter::once(node.to_owned())
        .chain(addresses.iter().cloned())
        .collect();
    let made = rcgen::generate_simple_self_signed(names)
        .map_err(|e| format!("cannot generate a serving certificate: {e}"))?;
    let failed = |e: std::io::Error| {
        format!(
            "cannot store the serving certificate in {}: {e}",
            dir.display()
        )
    };
    std::fs::create_dir_all(dir).map_err(failed)?;
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&key)
        .map_err(failed)?;
    std::io::Write::write_all(&mut file, made.signing_key.serialize_pem().as_bytes())
        .map_err(failed)?;
    holdfast_sys::file::replace(&certificate, made.cert.pem().as_bytes()).map_err(failed)?;
    Ok((certificate, key))
}
