//! HTTP and HTTPS listeners: bounded in connections and in patience, with certificates that are read anew when their
//! files change, and tunnels for connections that leave HTTP.

mod tls;
mod tunnel;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

pub use tls::{ClientFiles, Tls, TlsFiles, client};
pub use tunnel::{Outgoing, TunnelError, is_upgrade, tunnel};

/// What a body may fail with.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// A body of an answer.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// What one listener gives away.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// How many connections it has at most; more wait.
    pub connections: usize,
    /// How long a connection may be without a request, or with half of one. None for any time.
    pub idle: Option<Duration>,
}

/// Who is at the other end.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Its address.
    pub address: SocketAddr,
    /// Its certificate (DER), verified against the listener's client CAs.
    pub certificate: Option<Arc<Vec<u8>>>,
}

/// A whole body.
#[must_use]
pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

/// An answer of plain text.
#[must_use]
pub fn text(status: StatusCode, text: impl Into<String>) -> Response<Body> {
    let mut response = Response::new(full(text.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(hyper::header::CONTENT_TYPE, hyper::header::HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

/// Serves until the process ends; without `tls` in the clear.
pub async fn serve<S, F>(listener: TcpListener, tls: Option<Arc<Tls>>, limits: Limits, respond: S)
where
    S: Fn(Peer, Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let slots = Arc::new(Semaphore::new(limits.connections));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let (socket, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, most likely: wait for connections to end instead of spinning.
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // Small answers and watch lines must not wait for the acknowledgement of the one before.
        let _ = socket.set_nodelay(true);
        let (respond, tls) = (respond.clone(), tls.clone());
        tokio::spawn(async move {
            let _slot = slot;
            let Some(tls) = tls else { return converse(socket, Peer { address, certificate: None }, limits, respond).await };
            let acceptor = TlsAcceptor::from(tls.current());
            let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, acceptor.accept(socket)).await else { return };
            let certificate = stream.get_ref().1.peer_certificates().and_then(|c| c.first()).map(|c| Arc::new(c.to_vec()));
            Box::pin(converse(stream, Peer { address, certificate }, limits, respond)).await;
        });
    }
}

async fn converse<S, F>(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, peer: Peer, limits: Limits, respond: S)
where
    S: Fn(Peer, Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let service = service_fn(move |request| {
        let answer = respond(peer.clone(), request);
        async move { Ok::<_, Infallible>(answer.await) }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(limits.idle);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(limits.idle).max_concurrent_streams(250);
    if let Err(error) = builder.serve_connection_with_upgrades(TokioIo::new(stream), service).await {
        tracing::debug!(error, "a connection ended early");
    }
}
