//! Clients for an apiserver, made from a kubeconfig.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use jiff::Timestamp;
use kube::client::ConfigExt as _;
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig};
use tower::util::BoxCloneSyncService;

use super::connections::{self, Connections, Material};
use super::failure::chain;
use super::measured::Report;
use super::pace::Pace;
use super::pool;
use super::proxy::{self, Proxy};
use holdfast_core::node::signing;

/// Why no client can be created.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The file is missing or cannot be read.
    #[error(
        "the kubeconfig {path} cannot be read ({why}); name another with --kubeconfig, or create it"
    )]
    Read {
        /// The kubeconfig.
        path: PathBuf,
        /// The cause.
        why: String,
    },
    /// The file is not a usable kubeconfig.
    #[error("the kubeconfig {path} cannot be used: {why}")]
    Use {
        /// The kubeconfig.
        path: PathBuf,
        /// The cause.
        why: String,
    },
}

/// Creates a client for the current context of a kubeconfig. Nothing is sent yet.
pub async fn connect(path: &Path) -> Result<kube::Client, ConnectError> {
    connect_as(path, None, None, Pace::default()).await
}

/// Creates a client for the node. The kubeconfig's credentials are only needed to obtain the first certificate. While
/// the certificate in the file `own` is valid, it and its key replace them. `report` receives every answer, and `pace`
/// limits the rate of requests.
pub async fn connect_as(
    path: &Path,
    own: Option<PathBuf>,
    report: Option<Report>,
    pace: Pace,
) -> Result<kube::Client, ConnectError> {
    let used = |why: String| ConnectError::Use {
        path: path.to_owned(),
        why,
    };
    std::fs::File::open(path).map_err(|e| ConnectError::Read {
        path: path.to_owned(),
        why: e.to_string(),
    })?;
    let target = read(path, own.as_deref()).await.map_err(used)?;
    let namespace = target.config.default_namespace;
    let path = path.to_owned();
    let read: connections::Read = Box::new(move || {
        let (path, own, report) = (path.clone(), own.clone(), report.clone());
        Box::pin(async move {
            let target = read(&path, own.as_deref()).await?;
            material(target, report).map_err(|e| chain(&e))
        })
    });
    let connections = Connections::new(read, pace).await.map_err(used)?;
    Ok(kube::client::ClientBuilder::new(connections, namespace).build())
}

/// The configuration from a kubeconfig, the files that it depends on, and the proxy to the server.
struct Target {
    config: kube::Config,
    files: Vec<PathBuf>,
    proxy: Proxy,
}

/// Returns the credentials in the node's own certificate file, if it exists and has not expired.
fn own_credentials(own: &Path, now: Timestamp) -> Option<AuthInfo> {
    let (_, ends) = signing::lifetime(&std::fs::read(own).ok()?)?;
    let path = own.to_str().filter(|_| ends > now)?;
    Some(AuthInfo {
        client_certificate: Some(path.into()),
        client_key: Some(path.into()),
        ..AuthInfo::default()
    })
}

/// Returns a user's client certificate (PEM), if it can be read.
fn certificate(user: &AuthInfo) -> Option<Vec<u8>> {
    match (&user.client_certificate_data, &user.client_certificate) {
        (Some(data), _) => base64::engine::general_purpose::STANDARD.decode(data).ok(),
        (None, Some(path)) => std::fs::read(path).ok(),
        (None, None) => None,
    }
}

async fn read(path: &Path, own: Option<&Path>) -> Result<Target, String> {
    let mut file = Kubeconfig::read_from(path).map_err(|e| chain(&e))?;
    if let Some(kept) = own.and_then(|own| own_credentials(own, Timestamp::now())) {
        for user in &mut file.auth_infos {
            user.auth_info = Some(kept.clone());
        }
    }
    let clusters = file.clusters.iter().filter_map(|c| c.cluster.as_ref());
    let users = file.auth_infos.iter().filter_map(|u| u.auth_info.as_ref());
    let authorities = clusters.filter_map(|c| c.certificate_authority.clone());
    let pairs = users.flat_map(|u| [u.client_certificate.clone(), u.client_key.clone()]);
    let files = std::iter::once(path.to_owned())
        .chain(authorities.chain(pairs.flatten()).map(PathBuf::from))
        .chain(own.map(Path::to_owned))
        .collect();
    let own = proxy::proxy_url(&file);
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .map_err(|e| chain(&e))?;
    if certificate(&config.auth_info).is_some_and(|pem| signing::is_version_1(&pem)) {
        return Err("the user's client certificate is X.509 version 1, which TLS clients do not support: issue a new one with an extension, for instance extendedKeyUsage=clientAuth".into());
    }
    let proxy = Proxy::towards(&config.cluster_url, own.as_deref())?;
    Ok(Target {
        config,
        files,
        proxy,
    })
}

/// Returns the certificate authorities (PEM) with which a kubeconfig's current context verifies its apiserver.
pub async fn authority(path: &Path) -> Result<Vec<u8>, ConnectError> {
    let roots = read(path, None).await.and_then(|target| {
        let roots = target.config.root_cert.filter(|roots| !roots.is_empty());
        roots.ok_or_else(|| {
            "its cluster has no certificate-authority or certificate-authority-data".to_owned()
        })
    });
    let roots = roots.map_err(|why| ConnectError::Use {
        path: path.to_owned(),
        why,
    })?;
    let pem: String = roots
        .iter()
        .map(|der| signing::pem("CERTIFICATE", der))
        .collect();
    Ok(pem.into_bytes())
}

/// Prepares the connections to a target: pools that use HTTP/2 if the server does.
fn material(target: Target, report: Option<Report>) -> Result<Material, kube::Error> {
    let Target {
        config,
        files,
        proxy,
    } = target;
    let tls = config.rustls_client_config()?;
    let front = tower::ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .service_fn(connections::send_over_pool);
    let open = move || pool::open(&proxy, &tls, report.clone());
    Ok(Material {
        open: Box::new(open),
        front: BoxCloneSyncService::new(front),
        files,
    })
}

/// Fetches a text of at most `limit` bytes from a URL, within ten seconds. Certificates are verified with the system's
/// certificate authorities.
pub async fn fetch(url: &str, headers: &[(String, String)], limit: u64) -> Result<String, String> {
    let get = async {
        let target: hyper::Uri = url
            .parse()
            .map_err(|e| format!("{url:?} is not a URL: {e}"))?;
        let client =
            kube::Client::try_from(kube::Config::new(target.clone())).map_err(|e| chain(&e))?;
        let mut request = hyper::Request::get(target.path_and_query().map_or("/", |p| p.as_str()));
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request
            .body(kube::client::Body::empty())
            .map_err(|e| e.to_string())?;
        let answer = client.send(request).await.map_err(|e| chain(&e))?;
        if answer.status() != hyper::StatusCode::OK {
            return Err(format!("{url} responded with {}", answer.status()));
        }
        let body = http_body_util::Limited::new(
            answer.into_body(),
            usize::try_from(limit).unwrap_or(usize::MAX),
        );
        let bytes = http_body_util::BodyExt::collect(body)
            .await
            .map_err(|e| format!("{url}: {e}"))?
            .to_bytes();
        String::from_utf8(bytes.into()).map_err(|e| format!("{url}: {e}"))
    };
    tokio::time::timeout(Duration::from_secs(10), get)
        .await
        .map_err(|_| format!("{url} did not respond within 10s"))?
}

/// Returns the HTTP status if the apiserver refused the request; `None` for other errors.
#[must_use]
pub fn code(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A certificate that expires in a hundred years.
    const GOOD: &str = "\
-----BEGIN CERTIFICATE-----
MIIBcDCCARWgAwIBAgIUDFrmQxnI4n8sDVOv1D1w60MjNrUwCgYIKoZIzj0EAwIw
DDEKMAgGA1UEAwwBbjAgFw0yNjExMjQyMDQwMDBaGA8yMTI2MTAzMTIwNDAwMFow
DDEKMAgGA1UEAwwBbjBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABAcn6e/fcfSj
CbBMF07cRl74P/kL0ADSzReXMhfTSn6jZGAkDKSXUknm5Wt9xzzOOLs9xA+X0bK2
wNp4lYctvUCjUzBRMB0GA1UdDgQWBBSfBC+c+coYQDnIW/xDKRighLDTWDAfBgNV
HSMEGDAWgBSfBC+c+coYQDnIW/xDKRighLDTWDAPBgNVHRMBAf8EBTADAQH/MAoG
CCqGSM49BAMCA0kAMEYCIQCPjRA1bSVtwv7JhU46h8UD5YPuZqIBT7+rbJDDBt2b
GAIhAOFDlwoQo6Feb/obJekaCiuea05mUm24Dn1X6VNZdR5U
-----END CERTIFICATE-----
";

    #[tokio::test]
    async fn the_ca_is_read_from_the_current_context_and_must_have_certificates() {
        let dir = tempfile::tempdir().expect("a directory");
        let (path, file) = (dir.path().join("kubeconfig"), dir.path().join("ca.crt"));
        std::fs::write(&file, GOOD).expect("written");
        let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        for (authority_is, known) in [
            ("certificate-authority: ca.crt".to_owned(), true),
            (
                format!("certificate-authority-data: {}", encode(GOOD)),
                true,
            ),
            (
                format!("certificate-authority-data: {}", encode("none")),
                false,
            ),
            ("insecure-skip-tls-verify: true".to_owned(), false),
        ] {
            let text = format!(
                "apiVersion: v1\nkind: Config\ncurrent-context: x\nclusters: [{{name: b, cluster: {{server: 'https://192.0.2.2'}}}}, {{name: a, cluster: {{server: 'https://192.0.2.1', {authority_is}}}}}]\ncontexts: [{{name: x, context: {{cluster: a, user: u}}}}]\nusers: [{{name: u, user: {{token: t}}}}]\n"
            );
            std::fs::write(&path, text).expect("written");
            let found = authority(&path).await.ok();
            assert_eq!(found, known.then(|| GOOD.into()), "{authority_is}");
        }
    }

    #[tokio::test]
    async fn a_client_certificate_of_x509_version_1_is_rejected_with_the_remedy() {
        const VERSION_1: &str = "\
-----BEGIN CERTIFICATE-----
MIIBFDCBuwIUR77pTm5AECDOhtJsHl3u6zUmEu0wCgYIKoZIzj0EAwIwDDEKMAgG
A1UEAwwBbjAgFw0yNjExMjcwMzQzMzFaGA8yMTI2MTEwMzAzNDMzMVowDDEKMAgG
A1UEAwwBbjBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABC87xKk9aH1dRTU4lJsW
p6RzlCmtSG7++NcMgHGjdBCbralAJqQ9IapDEVmKCPIAWtAjdrsxCqVfufMjVryi
sXUwCgYIKoZIzj0EAwIDSAAwRQIhAIEMtKIQgD8IMAAL5rttV0bQuiVXyyKOmIq7
5DbG94NxAiAbn3u36anrevy81/Q3JsdMD7d9H5spDKrytBAnagRchw==
-----END CERTIFICATE-----
";
        let dir = tempfile::tempdir().expect("a directory");
        let (path, file) = (dir.path().join("kubeconfig"), dir.path().join("user.crt"));
        let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        for (content, is_old) in [(VERSION_1, true), (GOOD, false)] {
            std::fs::write(&file, content).expect("written");
            for user in [
                "client-certificate: user.crt".to_owned(),
                format!("client-certificate-data: {}", encode(content)),
            ] {
                let text = format!(
                    "apiVersion: v1\nkind: Config\ncurrent-context: x\nclusters: [{{name: a, cluster: {{server: 'https://192.0.2.1'}}}}]\ncontexts: [{{name: x, context: {{cluster: a, user: u}}}}]\nusers: [{{name: u, user: {{{user}}}}}]\n"
                );
                std::fs::write(&path, text).expect("written");
                let refused = read(&path, None).await.err();
                let mentions_remedy = refused.is_some_and(|why| why.contains("extendedKeyUsage"));
                assert_eq!(mentions_remedy, is_old, "{user}");
            }
        }
    }

    #[tokio::test]
    async fn a_renewed_client_certificate_replaces_the_kubeconfigs_credentials() {
        let dir = tempfile::tempdir().expect("a directory");
        let (path, own) = (
            dir.path().join("kubeconfig"),
            dir.path().join("current.pem"),
        );
        let begun = "apiVersion: v1\nkind: Config\ncurrent-context: x\nclusters: [{name: a, cluster: {server: 'https://192.0.2.1'}}]\ncontexts: [{name: x, context: {cluster: a, user: u}}]\nusers: [{name: u, user: {token: begun}}]\n";
        std::fs::write(&path, begun).expect("written");
        for (content, is_used) in [(None, false), (Some("torn"), false), (Some(GOOD), true)] {
            if let Some(content) = content {
                std::fs::write(&own, content).expect("written");
            }
            let target = read(&path, Some(&own)).await.expect("a target");
            let user = &target.config.auth_info;
            let used = user.client_certificate.as_deref();
            assert_eq!(used, own.to_str().filter(|_| is_used), "{content:?}");
            assert_eq!(user.token.is_none(), is_used, "{content:?}");
            assert!(
                target.files.contains(&own),
                "the file is watched for a new certificate"
            );
        }
        let (_, ends) = signing::lifetime(GOOD.as_bytes()).expect("a certificate");
        assert!(
            own_credentials(&own, ends).is_none(),
            "an expired certificate is not used"
        );
        let alone = read(&path, None).await.expect("a target");
        assert!(alone.config.auth_info.token.is_some());
    }
}
