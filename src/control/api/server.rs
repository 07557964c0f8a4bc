//! HTTPS in front of the API: one accept loop, HTTP/1.1 and HTTP/2, client certificates optional.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, Limited, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::{Answer, Api, ApiError, Query, Request};

/// The largest request body: 3 MiB, as the real server has it.
const BODY_LIMIT: usize = 3 << 20;
const HANDSHAKE: Duration = Duration::from_secs(10);

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Builds the TLS settings: our certificate, and the CA whose client certificates count.
pub fn tls(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    client_ca: CertificateDer<'static>,
) -> Result<rustls::ServerConfig, Box<dyn std::error::Error + Send + Sync>> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(client_ca)?;
    let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).allow_unauthenticated().build()?;
    let mut config = rustls::ServerConfig::builder().with_client_cert_verifier(verifier).with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// Serves until the process ends.
pub async fn serve(api: Api, listener: TcpListener, tls: rustls::ServerConfig) -> std::io::Result<()> {
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    loop {
        let (socket, _) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, most likely: wait for connections to end instead of spinning.
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (api, acceptor) = (api.clone(), acceptor.clone());
        tokio::spawn(async move {
            // Small answers and watch lines must not wait for the acknowledgement of the one before.
            let _ = socket.set_nodelay(true);
            let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, acceptor.accept(socket)).await else { return };
            let certificate = stream.get_ref().1.peer_certificates().and_then(|c| c.first()).map(|c| Arc::new(c.to_vec()));
            let service = service_fn(move |request| respond(api.clone(), certificate.clone(), request));
            let mut builder = auto::Builder::new(TokioExecutor::new());
            builder.http1().header_read_timeout(None);
            if let Err(error) = builder.serve_connection(TokioIo::new(stream), service).await {
                tracing::debug!(%error, "a connection ended early");
            }
        });
    }
}

async fn respond(api: Api, certificate: Option<Arc<Vec<u8>>>, request: hyper::Request<Incoming>) -> Result<hyper::Response<Body>, Infallible> {
    let answer = match decode(&api, certificate.as_deref().map(Vec::as_slice), request).await {
        Ok(request) => api.answer(request).await,
        Err(error) => error.into(),
    };
    Ok(encode(answer))
}

async fn decode(api: &Api, certificate: Option<&[u8]>, request: hyper::Request<Incoming>) -> Result<Request, ApiError> {
    let (head, body) = request.into_parts();
    let header = |name| head.headers.get(name).and_then(|v| HeaderValue::to_str(v).ok()).unwrap_or_default().to_owned();
    let authorization = head.headers.get(AUTHORIZATION).and_then(|v| v.to_str().ok());
    let user = api.authenticate(certificate, authorization)?;
    let body = Limited::new(body, BODY_LIMIT).collect().await.map_err(|error| {
        if error.is::<http_body_util::LengthLimitError>() {
            ApiError::new(413, "RequestEntityTooLarge", format!("Request entity too large: limit is {BODY_LIMIT}"))
        } else {
            ApiError::bad_request(format!("the body could not be read: {error}"))
        }
    })?;
    // Several Accept headers mean the same as one with commas.
    let accept: Vec<&str> = head.headers.get_all(ACCEPT).iter().filter_map(|v| v.to_str().ok()).collect();
    Ok(Request {
        method: head.method.as_str().to_owned(),
        path: head.uri.path().to_owned(),
        query: Query::parse(head.uri.query().unwrap_or_default()),
        accept: accept.join(","),
        content_type: header(CONTENT_TYPE),
        body: body.to_bytes(),
        user,
    })
}

fn encode(answer: Answer) -> hyper::Response<Body> {
    let response = hyper::Response::builder().header("Cache-Control", "no-cache, private").header("Audit-Id", super::object::new_uid());
    let built = match answer {
        Answer::Body { code, content_type, body, warnings } => {
            let mut response = response.status(code).header(CONTENT_TYPE, content_type).header("Vary", "Accept");
            for warning in warnings {
                let text = warning.replace('\\', "\\\\").replace('"', "\\\"");
                response = response.header("Warning", format!("299 - \"{text}\""));
            }
            response.body(Full::new(body).boxed_unsync())
        }
        Answer::Watch(lines) => {
            let lines = futures::stream::unfold(lines, |mut lines| async move { lines.recv().await.map(|line| (line, lines)) });
            let body = StreamBody::new(lines.map(|line| Ok::<_, Infallible>(Frame::data(line))));
            response.header(CONTENT_TYPE, "application/json").body(body.boxed_unsync())
        }
    };
    built.unwrap_or_else(|_| hyper::Response::new(Full::new(Bytes::from_static(b"internal error")).boxed_unsync()))
}
