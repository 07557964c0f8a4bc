//! Finds a cluster by the address of its apiserver, a bootstrap token and the hash of its authority, as `kubeadm join` does
//! (`cmd/kubeadm/app/discovery/token/token.go`).
//!
//! The first request is not authenticated in either direction. Its answer is trusted only if the token has signed the answer and
//! the authority in it has the expected hash. The second request verifies the apiserver with this authority, and must have the
//! same answer.

use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Client;
use kube::config::Kubeconfig;

use holdfast_core::node::join::{
    AuthorityHash, CLUSTER_INFO, JoinError, Token, certificates, check_authority, decode_authority,
    verified_kubeconfig,
};
use holdfast_kubeapi::failure::chain;

/// The port of an apiserver address without one.
const DEFAULT_PORT: u16 = 6443;
/// Maximum time of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of an answer, in bytes.
const MAX_ANSWER: usize = 1 << 20;
/// How long a new token may be without a signature: the control plane signs within a moment.
const SIGNATURE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two requests for a missing signature.
const SIGNATURE_POLL: Duration = Duration::from_millis(500);

/// The cluster to join.
#[derive(Debug, Clone)]
pub struct Target {
    /// The URL of the apiserver that the user has named.
    pub server: String,
    /// The bootstrap token.
    pub token: Token,
    /// The hashes of the cluster's authority, at least one.
    pub hashes: Vec<AuthorityHash>,
}

/// A verified cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Discovered {
    /// The URL of the apiserver for the node.
    pub server: String,
    /// The certificate authority, PEM.
    pub authority: String,
}

/// The URL of an apiserver: `HOST`, `HOST:PORT` or `https://HOST:PORT`.
///
/// # Errors
///
/// The text has another form.
pub fn server_url(text: &str) -> anyhow::Result<String> {
    let invalid = || {
        format!(
            "invalid server {text:?}: not a host or an address with an optional port; use, for example, 192.0.2.1:6443"
        )
    };
    let rest = text.strip_prefix("https://").unwrap_or(text);
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    // An IPv6 address without brackets is no authority of a URL.
    let rest = match rest.parse::<std::net::Ipv6Addr>() {
        Ok(address) => format!("[{address}]"),
        Err(_) => rest.to_owned(),
    };
    let authority: hyper::http::uri::Authority = rest.parse().ok().with_context(invalid)?;
    anyhow::ensure!(
        !rest.contains('@') && !authority.host().is_empty(),
        invalid()
    );
    // A port that is not a number from 1 to 65535 is not parsed.
    let has_port = authority.as_str().len() > authority.host().len();
    match (authority.port_u16(), has_port) {
        (Some(port), _) if port > 0 => Ok(format!("https://{}:{port}", authority.host())),
        (None, false) => Ok(format!("https://{}:{DEFAULT_PORT}", authority.host())),
        _ => anyhow::bail!(invalid()),
    }
}

/// A client without credentials. Without `authority` (PEM), it accepts any certificate.
fn client(server: &str, authority: Option<&str>) -> anyhow::Result<Client> {
    let url = server
        .parse()
        .with_context(|| format!("invalid server {server:?}: not a URL"))?;
    let mut config = kube::Config::new(url);
    match authority {
        Some(pem) => config.root_cert = Some(certificates(pem.as_bytes())),
        None => config.accept_invalid_certs = true,
    }
    config.connect_timeout = Some(REQUEST_TIMEOUT);
    config.read_timeout = Some(REQUEST_TIMEOUT);
    Client::try_from(config).map_err(|e| anyhow::anyhow!("{server}: {}", chain(&e)))
}

/// Reads the description of the cluster.
async fn cluster_info(server: &str, client: &Client) -> anyhow::Result<ConfigMap> {
    use http_body_util::{BodyExt as _, Limited};
    let (namespace, name) = CLUSTER_INFO;
    let request = hyper::Request::get(format!("/api/v1/namespaces/{namespace}/configmaps/{name}"));
    let request = request.body(kube::client::Body::empty())?;
    let get = async {
        let response = client.send(request).await.map_err(|e| {
            anyhow::anyhow!(
                "the apiserver at {server} is not reachable: {}; check the address and the port, and that no firewall is in between",
                chain(&e)
            )
        })?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_ANSWER)
            .collect()
            .await;
        let body = body.map_err(|e| {
            anyhow::anyhow!("the answer of {server} cannot be read: {e}; check that {server} is a Kubernetes API")
        })?;
        anyhow::ensure!(
            status == hyper::StatusCode::OK,
            "{server} has refused to show {namespace}/{name} ({status}); check that {server} is the API of a cluster for `holdfast join` or `kubeadm join`"
        );
        let info = serde_json::from_slice(&body.to_bytes());
        info.with_context(|| format!("{server} has answered with something else than a ConfigMap; check that {server} is a Kubernetes API"))
    };
    let answer = tokio::time::timeout(REQUEST_TIMEOUT, get).await;
    answer.unwrap_or_else(|_| {
        anyhow::bail!(
            "the apiserver at {server} has not answered within {} s; check the address and the port, and that no firewall is in between",
            REQUEST_TIMEOUT.as_secs()
        )
    })
}

/// The cluster in a kubeconfig: that of its current context, else the one without a name (`GetClusterFromKubeConfig`).
fn cluster(kubeconfig: &str) -> anyhow::Result<Discovered> {
    const WHAT: &str = "the kubeconfig in kube-public/cluster-info";
    let remedy =
        "repair it with `kubeadm init phase bootstrap-token`, or restart the control plane";
    let file = Kubeconfig::from_yaml(kubeconfig)
        .map_err(|e| anyhow::anyhow!("{WHAT} cannot be parsed: {e}; {remedy}"))?;
    let current = file.current_context.as_deref().unwrap_or_default();
    let context = file.contexts.iter().find(|c| c.name == current);
    let name = context
        .and_then(|c| c.context.as_ref())
        .map(|c| c.cluster.as_str());
    let name = name.unwrap_or_default();
    let found = file.clusters.iter().find(|c| c.name == name);
    let found = found.and_then(|c| c.cluster.as_ref());
    let server = found.and_then(|c| c.server.clone());
    let data = found.and_then(|c| c.certificate_authority_data.as_deref());
    let (server, data) = server.zip(data).with_context(|| {
        format!("{WHAT} has no server or no certificate-authority-data; {remedy}")
    })?;
    Ok(Discovered {
        server,
        authority: decode_authority(data).with_context(|| {
            format!("{WHAT} has a malformed certificate-authority-data; {remedy}")
        })?,
    })
}

/// Verifies the cluster.
///
/// # Errors
///
/// The server is not reachable, the token is unknown, or the authority is another one. The error names the value and the remedy.
pub async fn discover(target: &Target) -> anyhow::Result<Discovered> {
    let server = &target.server;
    let insecure = client(server, None)?;
    let until = tokio::time::Instant::now() + SIGNATURE_TIMEOUT;
    let kubeconfig = loop {
        let info = cluster_info(server, &insecure).await?;
        match verified_kubeconfig(&info, &target.token) {
            Ok(kubeconfig) => break kubeconfig.to_owned(),
            Err(JoinError::NotSigned(_)) if tokio::time::Instant::now() < until => {
                tokio::time::sleep(SIGNATURE_POLL).await;
            }
            Err(error) => return Err(error.into()),
        }
    };
    let found = cluster(&kubeconfig)?;
    check_authority(found.authority.as_bytes(), &target.hashes)?;
    let secure = client(server, Some(&found.authority))?;
    let again = cluster_info(server, &secure).await?;
    let again = verified_kubeconfig(&again, &target.token)?;
    anyhow::ensure!(
        again == kubeconfig,
        "{server} has described the cluster differently over the verified connection; check that no program between this machine and {server} changes its answers"
    );
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_hosts_with_an_optional_port() {
        for (text, expected) in [
            ("192.0.2.1", Some("https://192.0.2.1:6443")),
            ("192.0.2.1:443", Some("https://192.0.2.1:443")),
            ("https://192.0.2.1:443/", Some("https://192.0.2.1:443")),
            ("api.example", Some("https://api.example:6443")),
            ("2001:db8::1", Some("https://[2001:db8::1]:6443")),
            ("[2001:db8::1]:443", Some("https://[2001:db8::1]:443")),
            ("", None),
            (":443", None),
            ("192.0.2.1:0", None),
            ("192.0.2.1:65536", None),
            ("192.0.2.1:port", None),
            ("192.0.2.1:", None),
            ("http://192.0.2.1", None),
            ("192.0.2.1/path", None),
            ("user@192.0.2.1", None),
            ("a b", None),
        ] {
            let url = server_url(text);
            assert_eq!(url.as_deref().ok(), expected, "{text}: {url:?}");
        }
    }

    #[test]
    fn the_cluster_of_a_kubeconfig_is_found() {
        // kubeadm writes YAML with the name "", this control plane the same as JSON.
        let yaml = "apiVersion: v1\nclusters:\n- cluster:\n    certificate-authority-data: Q0E=\n    server: https://192.0.2.1:6443\n  name: \"\"\ncontexts: null\ncurrent-context: \"\"\nkind: Config\npreferences: {}\nusers: null\n";
        let json = r#"{"apiVersion": "v1", "kind": "Config", "clusters": [{"name": "", "cluster": {"server": "https://192.0.2.1:6443", "certificate-authority-data": "Q0E="}}], "contexts": null, "current-context": "", "preferences": {}, "users": null}"#;
        let named = "apiVersion: v1\nkind: Config\ncurrent-context: x\ncontexts: [{name: x, context: {cluster: c, user: u}}]\nclusters: [{name: b, cluster: {server: other}}, {name: c, cluster: {server: 'https://192.0.2.1:6443', certificate-authority-data: Q0E=}}]\n";
        for text in [yaml, json, named] {
            let found = cluster(text).expect(text);
            assert_eq!(
                (&*found.server, &*found.authority),
                ("https://192.0.2.1:6443", "CA")
            );
        }
        for text in [
            "",
            "[]",
            "clusters: []",
            "clusters: [{name: '', cluster: {server: 'https://192.0.2.1'}}]",
            "clusters: [{name: '', cluster: {certificate-authority-data: Q0E=}}]",
            "clusters: [{name: '', cluster: {server: 'https://192.0.2.1', certificate-authority-data: '?'}}]",
            "clusters: [{name: other, cluster: {server: 'https://192.0.2.1', certificate-authority-data: Q0E=}}]",
        ] {
            assert!(cluster(text).is_err(), "{text}");
        }
    }

    #[tokio::test]
    async fn an_unreachable_server_is_named_with_the_cause() {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let server = format!("https://{}", socket.local_addr().expect("an address"));
        drop(socket);
        let target = Target {
            server: server.clone(),
            token: Token::parse("abcdef.0123456789abcdef").expect("a token"),
            hashes: vec![],
        };
        let error = discover(&target)
            .await
            .expect_err("nothing listens")
            .to_string();
        assert!(
            error.contains(&server) && error.contains("refused"),
            "{error}"
        );
    }
}
