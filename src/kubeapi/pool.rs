//! Pools of connections to an apiserver, direct or through a proxy.

use std::error::Error;
use std::time::Duration;

use hyper::header::{self, HeaderValue};
use hyper::rt::{Read, Write};
use hyper::{Request, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy::connect::proxy::{SocksV5, Tunnel};
use hyper_util::client::legacy::connect::{Connection, HttpConnector};
use hyper_util::client::legacy::{Client, Error as TransportError};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::ClientConfig;
use tower::util::BoxCloneSyncService;
use tower::{BoxError, Service, ServiceExt as _};

use super::connections::Http;
use super::measured::{Measured, Report};
use super::proxy::Proxy;

/// Maximum time to open a connection, including the proxy and the handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// HTTP/2 keep-alive: the interval of pings on a connection without data, and the time to wait for an answer before it
/// is closed. A server that was cut off sends nothing.
const HTTP2_KEEPALIVE: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(10));

/// TCP keep-alive: the idle time before the first probe, the interval, and the number of unanswered probes before the
/// kernel closes the connection. HTTP/1.1 has no ping of its own.
const TCP_KEEPALIVE: (Duration, Duration, u32) =
    (Duration::from_secs(20), Duration::from_secs(5), 3);

/// The user agent. Audit logs show it, and managed fields show the part before the slash.
const USER_AGENT: &str = concat!("holdfast/", env!("CARGO_PKG_VERSION"), " (linux)");

/// Creates a pool that opens connections as requests need them. `report` receives each answer.
pub(super) fn open(proxy: &Proxy, tls: &ClientConfig, report: Option<Report>) -> Http {
    let mut plain = HttpConnector::new();
    plain.enforce_http(false);
    plain.set_nodelay(true);
    plain.set_keepalive(Some(TCP_KEEPALIVE.0));
    plain.set_keepalive_interval(Some(TCP_KEEPALIVE.1));
    plain.set_keepalive_retries(Some(TCP_KEEPALIVE.2));
    match proxy {
        Proxy::None => over(plain, tls, report),
        Proxy::Http { uri, auth } => {
            let tunnel = Tunnel::new(uri.clone(), plain);
            match auth {
                Some(auth) => over(tunnel.with_auth(auth.clone()), tls, report),
                None => over(tunnel, tls, report),
            }
        }
        Proxy::Https { uri, auth } => {
            let secured = https(tls).enable_http1().wrap_connector(plain);
            let tunnel = Tunnel::new(uri.clone(), secured);
            match auth {
                Some(auth) => over(tunnel.with_auth(auth.clone()), tls, report),
                None => over(tunnel, tls, report),
            }
        }
        Proxy::Socks5 { uri, auth } => {
            let socks = SocksV5::new(uri.clone(), plain);
            match auth.clone() {
                Some((user, password)) => over(socks.with_auth(user, password), tls, report),
                None => over(socks, tls, report),
            }
        }
    }
}

fn https(
    tls: &ClientConfig,
) -> HttpsConnectorBuilder<hyper_rustls::builderstates::WantsProtocols1> {
    HttpsConnectorBuilder::new()
        .with_tls_config(tls.clone())
        .https_or_http()
}

/// Creates a pool over the streams that `connector` opens.
fn over<C>(connector: C, tls: &ClientConfig, report: Option<Report>) -> Http
where
    C: Service<Uri> + Clone + Send + Sync + 'static,
    C::Response: Connection + Read + Write + Send + Unpin + 'static,
    C::Future: Send + 'static,
    C::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let secured: HttpsConnector<C> = https(tls).enable_all_versions().wrap_connector(connector);
    // The timeout includes the handshake: a server may accept a connection and never send anything.
    let mut connector = TimeoutConnector::new(secured);
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    let client: Client<_, kube::client::Body> = Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .http2_keep_alive_interval(HTTP2_KEEPALIVE.0)
        .http2_keep_alive_timeout(HTTP2_KEEPALIVE.1)
        .build(connector);
    let measured = Measured {
        inner: client,
        report,
    };
    let named = measured.map_request(|mut request: Request<kube::client::Body>| {
        let named = HeaderValue::from_static(USER_AGENT);
        request
            .headers_mut()
            .entry(header::USER_AGENT)
            .or_insert(named);
        request
    });
    BoxCloneSyncService::new(named.map_err(|e: TransportError| BoxError::from(e)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// The kernel's timer of the connection to a local port; 2 is keepalive.
    fn timer(port: u16) -> Option<String> {
        let table = std::fs::read_to_string("/proc/net/tcp").expect("the table of connections");
        let mut rows = table.lines().map(|row| row.split_whitespace());
        let fields: Vec<&str> = rows.find_map(|row| {
            let fields: Vec<&str> = row.collect();
            let is_ours = fields[2] == format!("0100007F:{port:04X}");
            is_ours.then_some(fields)
        })?;
        Some(fields[5].split(':').next()?.to_owned())
    }

    #[tokio::test]
    async fn idle_connections_are_probed() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("a listener");
        let port = listener.local_addr().expect("an address").port();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        let pool = open(&Proxy::None, &tls, None);
        let request = Request::get(format!("http://127.0.0.1:{port}/"));
        let request = request.body(kube::client::Body::empty());
        let request = tokio::spawn(pool.oneshot(request.expect("a request")));
        let _held = listener.accept().await.expect("a connection");
        let probed = async {
            while timer(port).as_deref() != Some("02") {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(10), probed).await;
        assert!(waited.is_ok(), "the timer is {:?}", timer(port));
        request.abort();
    }
}
