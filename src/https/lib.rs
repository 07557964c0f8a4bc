//! HTTP and HTTPS listeners with limits on connections and on time. Certificates are reloaded when their files change,
//! and tunnels carry connections that leave HTTP.

mod commands;
mod connections;
mod ending;
mod handshakes;
mod listeners;
mod paced;
mod pairs;
mod panic_boundary;
mod receive;
mod spdy;
mod tls;
mod tunnel;
mod unverified;
mod websocket;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;

use connections::{Connection, Connections, OnEnd};
use handshakes::{HandshakeLimiter, Source};
use holdfast_sys::link;

pub use commands::{CommandStreams, Output, OutputKind, serve_command};
pub use connections::ConnectionSlot;
pub use listeners::Listeners;
pub use paced::paced;
pub use panic_boundary::{Panicked, abort_on_panic, guard};
pub use receive::{NotReceived, receive};
pub use tls::{Certificate, Protocol, Tls, TlsFiles, client};
pub use tunnel::{Outgoing, TunnelError, forward_request, is_upgrade};
pub use unverified::unverified_client;
pub use websocket::{Channels, SocketContent, serve_socket, socket_content};

/// The error of a body.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// The body of a response.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Timeout of a TLS handshake, including the wait for its turns.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Maximum number of concurrent requests on an HTTP/2 connection: the default of a kube-apiserver.
const STREAMS: u32 = 100;

/// The limits of a listener.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum number of connections. If there are more, those that have been idle longest are closed, or else those
    /// that are slow to send the body of a request. If there are none of these, the new connection waits. A source with
    /// more than half of the maximum loses its connections first.
    pub connections: usize,
    /// Whether connections that are not authenticated are closed as well, even if they are busy.
    pub evict_unauthenticated: bool,
    /// How long a connection may be without a request, or with an incomplete one. `None` for any time.
    pub idle: Option<Duration>,
}

/// The peer of a connection.
#[derive(Debug, Clone)]
pub struct Peer {
    /// The peer's address.
    pub address: SocketAddr,
    /// The certificate that the peer has presented, trusted or not.
    pub certificate: Option<Arc<Certificate>>,
}

/// Returns a body of these bytes.
#[must_use]
pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// Returns a response of plain text.
#[must_use]
pub fn text(status: StatusCode, text: impl Into<String>) -> Response<Body> {
    let mut response = Response::new(full(text.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(
        hyper::header::CONTENT_TYPE,
        hyper::header::HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

/// Keeps `kept` until the response's body is sent completely or its connection is closed.
#[must_use]
pub fn keep_with_body(answer: Response<Body>, kept: impl Send + Unpin + 'static) -> Response<Body> {
    answer.map(|body| BodyWith { body, _kept: kept }.boxed_unsync())
}

/// Serves until the process exits; without `tls` in plain text.
pub async fn serve<S, F>(
    listeners: impl Into<Listeners>,
    tls: Option<Arc<Tls>>,
    limits: Limits,
    respond: S,
) where
    S: Fn(Peer, Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let connections = Arc::new(Connections::default());
    let limiter = HandshakeLimiter::for_this_machine();
    let (mut listeners, mut next) = (listeners.into(), 0);
    loop {
        let (socket, address) = match listeners.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Most likely out of descriptors: wait until connections are closed instead of spinning.
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        connections.make_room(limits).await;
        // Small responses and watch events must not wait for the acknowledgement of the previous one.
        let _ = socket.set_nodelay(true);
        if let Err(error) = link::keep_alive(&socket) {
            tracing::debug!(%error, "enabling TCP keep-alive on a connection failed");
        }
        next += 1;
        let (respond, tls, held, id) =
            (respond.clone(), tls.clone(), Arc::clone(&connections), next);
        let (limiter, source) = (Arc::clone(&limiter), Source::from(address.ip()));
        // Registered before the task begins, so that the task finds its own entry.
        let mut all = connections.all();
        let task = tokio::spawn(async move {
            let _end = OnEnd {
                connections: Arc::clone(&held),
                id,
            };
            let slot = ConnectionSlot {
                connections: held,
                id,
            };
            let Some(tls) = tls else {
                return serve_connection(
                    socket,
                    Peer {
                        address,
                        certificate: None,
                    },
                    limits,
                    respond,
                    slot,
                )
                .await;
            };
            let settings = tls.current();
            let acceptor = TlsAcceptor::from(Arc::clone(&settings.server));
            let handshake = limiter.run(source, acceptor.accept(socket));
            let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, handshake).await else {
                return;
            };
            let chain = stream.get_ref().1.peer_certificates();
            let certificate = settings.verify_client(chain).map(Arc::new);
            Box::pin(serve_connection(
                stream,
                Peer {
                    address,
                    certificate,
                },
                limits,
                respond,
                slot,
            ))
            .await;
        });
        all.insert(id, Connection::new(source, task.abort_handle()));
    }
}

/// A body that keeps a value while it lives.
struct BodyWith<T> {
    body: Body,
    _kept: T,
}

impl<T: Unpin> hyper::body::Body for BodyWith<T> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

async fn serve_connection<S, F>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    peer: Peer,
    limits: Limits,
    respond: S,
    slot: ConnectionSlot,
) where
    S: Fn(Peer, Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let service = service_fn(move |mut request: Request<Incoming>| {
        let busy = slot.connections.begin(slot.id);
        request.extensions_mut().insert(slot.clone());
        let (respond, peer) = (respond.clone(), peer.clone());
        async move {
            let answer = guard(async move { respond(peer, request).await }).await;
            let answer = answer.unwrap_or_else(|panicked| {
                text(StatusCode::INTERNAL_SERVER_ERROR, panicked.to_string())
            });
            // The connection is busy until the whole body is sent.
            Ok::<_, Infallible>(answer.map(|body| BodyWith { body, _kept: busy }))
        }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.idle);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(limits.idle)
        .max_concurrent_streams(STREAMS);
    if let Err(error) = builder
        .serve_connection_with_upgrades(TokioIo::new(stream), service)
        .await
    {
        tracing::debug!(error, "a connection closed early");
    }
}

#[cfg(test)]
mod tests {
    use super::connections::NEW_CONNECTION_GRACE;
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    #[tokio::test]
    async fn a_value_held_by_a_response_is_dropped_after_its_body() {
        use hyper::body::Body as _;
        let kept = Arc::new(());
        let answer = keep_with_body(text(StatusCode::OK, "abc"), Arc::clone(&kept));
        assert_eq!(answer.body().size_hint().exact(), Some(3));
        assert_eq!(Arc::strong_count(&kept), 2);
        let body = answer.into_body().collect().await.expect("a body");
        assert_eq!(body.to_bytes(), "abc");
        assert_eq!(Arc::strong_count(&kept), 1);
    }

    async fn request_path(stream: &mut TcpStream, path: &str) -> String {
        stream
            .write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes())
            .await
            .expect("sent");
        let mut all = vec![];
        while !String::from_utf8_lossy(&all).contains("END")
            && stream.read_buf(&mut all).await.is_ok_and(|n| n > 0)
        {}
        String::from_utf8_lossy(&all).into_owned()
    }

    /// Timeout of steps that take no time unless the machine is busy.
    const LONG: Duration = Duration::from_secs(30);

    /// A gate that blocks a response: it notifies the test that the response has come so far, and waits.
    #[derive(Default)]
    struct Gate {
        reached: tokio::sync::Notify,
        open: tokio::sync::Notify,
    }

    impl Gate {
        async fn pass(&self) {
            self.reached.notify_one();
            self.open.notified().await;
        }
    }

    /// Waits until the peer has closed a connection.
    async fn closed(stream: &mut TcpStream) {
        let mut byte = [0];
        let end = tokio::time::timeout(LONG, stream.read(&mut byte)).await;
        let end = end.expect("the connection is closed in time");
        assert!(
            end.is_err() || end.is_ok_and(|n| n == 0),
            "no bytes are received before the close"
        );
    }

    #[tokio::test]
    async fn idle_connections_are_closed_to_make_room_and_busy_ones_stay() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let at = listener.local_addr().expect("an address");
        let limits = Limits {
            connections: 4,
            evict_unauthenticated: false,
            idle: None,
        };
        let gate = Arc::new(Gate::default());
        let held = Arc::clone(&gate);
        tokio::spawn(serve(
            listener,
            None,
            limits,
            move |_, request: Request<Incoming>| {
                let held = Arc::clone(&held);
                async move {
                    if request.uri().path() == "/slow" {
                        held.pass().await;
                    }
                    text(StatusCode::OK, "END")
                }
            },
        ));
        let mut busy = TcpStream::connect(at).await.expect("connected");
        let slow = tokio::spawn(async move { request_path(&mut busy, "/slow").await });
        gate.reached.notified().await;
        let mut idle = vec![];
        for _ in 0..20 {
            idle.push(TcpStream::connect(at).await.expect("connected"));
        }
        let mut last = TcpStream::connect(at).await.expect("connected");
        let response = tokio::time::timeout(LONG, request_path(&mut last, "/"))
            .await
            .expect("a response while the other request is in progress");
        assert!(response.contains("200 OK"), "{response}");
        gate.open.notify_one();
        assert!(
            slow.await.expect("ended").contains("END"),
            "a busy connection is not closed"
        );
        assert!(
            !request_path(&mut idle[0], "/").await.contains("END"),
            "the oldest idle connection was closed"
        );
    }

    #[tokio::test]
    async fn a_source_with_most_connections_loses_them_first() {
        let (at, _) = server(6, LONG).await;
        let from = |last: u8| async move {
            let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
            let local = SocketAddr::from(([127, 0, 0, last], 0));
            socket.bind(local).expect("an address of this machine");
            socket.connect(at).await.expect("connected")
        };
        // This connection is idle, and older than all others.
        let mut small_client = from(2).await;
        assert!(request_path(&mut small_client, "/").await.contains("END"));
        let mut large_client = vec![];
        for _ in 0..12 {
            large_client.push(from(1).await);
        }
        closed(&mut large_client[0]).await;
        assert!(request_path(&mut small_client, "/").await.contains("END"));
    }

    /// A server for tests. Waits for bodies on `/body`, sends an endless response on `/endless`, and panics on
    /// `/panic`. Authenticates the client of `/known` and blocks it at a gate.
    async fn server(connections: usize, body: Duration) -> (SocketAddr, Arc<Gate>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let at = listener.local_addr().expect("an address");
        let limits = Limits {
            connections,
            evict_unauthenticated: true,
            idle: None,
        };
        let gate = Arc::new(Gate::default());
        let held = Arc::clone(&gate);
        let respond = move |_, request: Request<Incoming>| {
            let held = Arc::clone(&held);
            async move {
                match request.uri().path() {
                    "/panic" => panic!("on purpose"),
                    "/body" => match receive(request, 10, body).await.1 {
                        Ok(body) => text(StatusCode::OK, format!("{} bytes END", body.len())),
                        Err(error) => text(StatusCode::BAD_REQUEST, format!("{error} END")),
                    },
                    "/known" => {
                        if let Some(slot) = request.extensions().get::<ConnectionSlot>() {
                            slot.mark_authenticated();
                        }
                        held.pass().await;
                        text(StatusCode::OK, "END")
                    }
                    "/endless" => std::future::pending().await,
                    "/large" => {
                        let slot = request.extensions().get::<ConnectionSlot>().cloned();
                        let body = Bytes::from(vec![b'x'; 64 << 20]);
                        Response::new(paced(body, slot.as_ref(), Duration::from_secs(2)))
                    }
                    _ => text(StatusCode::OK, "END"),
                }
            }
        };
        tokio::spawn(serve(listener, None, limits, respond));
        (at, gate)
    }

    async fn open_and_send(at: SocketAddr, text: &str) -> TcpStream {
        let mut stream = TcpStream::connect(at).await.expect("connected");
        stream.write_all(text.as_bytes()).await.expect("sent");
        stream
    }

    #[tokio::test]
    async fn slow_senders_and_unauthenticated_clients_do_not_block_others() {
        let (at, gate) = server(4, 2 * LONG).await;
        let known = tokio::spawn(async move {
            let mut stream = TcpStream::connect(at).await.expect("connected");
            request_path(&mut stream, "/known").await
        });
        gate.reached.notified().await;
        let mut held = vec![];
        for _ in 0..10 {
            held.push(
                open_and_send(
                    at,
                    "POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\na",
                )
                .await,
            );
            held.push(open_and_send(at, "GET /endless HTTP/1.1\r\nHost: x\r\n\r\n").await);
        }
        let mut last = TcpStream::connect(at).await.expect("connected");
        let response = tokio::time::timeout(LONG, request_path(&mut last, "/"))
            .await
            .expect("a response before the timeouts of the others");
        assert!(response.contains("200 OK"), "{response}");
        gate.open.notify_one();
        assert!(
            known.await.expect("ended").contains("END"),
            "a busy connection of an authenticated client is not closed"
        );
    }

    #[tokio::test]
    async fn unauthenticated_connections_are_closed_before_idle_authenticated_ones() {
        let (at, gate) = server(4, LONG).await;
        let mut known = TcpStream::connect(at).await.expect("connected");
        gate.open.notify_one();
        assert!(request_path(&mut known, "/known").await.contains("END"));
        tokio::time::sleep(NEW_CONNECTION_GRACE + Duration::from_millis(100)).await;
        let mut strangers = vec![];
        for _ in 0..20 {
            strangers.push(TcpStream::connect(at).await.expect("connected"));
        }
        closed(&mut strangers[0]).await;
        assert!(request_path(&mut known, "/").await.contains("END"));
    }

    #[tokio::test]
    async fn bodies_have_a_size_limit_and_a_deadline() {
        let (at, _) = server(4, Duration::from_millis(500)).await;
        let post = |length: usize, body: &str| {
            format!(
                "POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            )
        };
        for (sent, words) in [
            (post(5, "12345"), "5 bytes"),
            (post(11, "12345678901"), "longer than 10 bytes"),
            (post(5, "1"), "did not arrive within"),
        ] {
            let mut stream = open_and_send(at, &sent).await;
            let mut all = String::new();
            // The server may reset the connection after the response, as it has not read the whole body.
            let _ = stream.read_to_string(&mut all).await;
            assert!(all.contains(words), "{words}: {all}");
        }
    }

    /// The kernel's buffers take some MiB of a response. A client that stops reading loses its connection, and a client
    /// that reads gets the whole response.
    #[tokio::test]
    async fn a_client_that_stops_reading_a_response_is_disconnected() {
        let (at, _) = server(4, LONG).await;
        let get = "GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        let mut reader = open_and_send(at, get).await;
        let mut deaf = open_and_send(at, get).await;
        let mut all = vec![];
        reader.read_to_end(&mut all).await.expect("an answer");
        assert!(all.len() > 64 << 20, "{} bytes", all.len());
        // Until its connection is closed, a write succeeds or is buffered; then it is reset.
        let closed = async {
            while deaf.write_all(b"x").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(LONG, closed)
            .await
            .expect("the connection is closed");
        let mut rest = vec![];
        // Bytes in transit may still arrive.
        let _ = deaf.read_to_end(&mut rest).await;
        assert!(rest.len() < 64 << 20, "{} bytes", rest.len());
    }

    #[tokio::test]
    async fn a_panic_causes_an_error_response() {
        let (at, _) = server(4, LONG).await;
        let mut stream = open_and_send(
            at,
            "GET /panic HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        )
        .await;
        let mut all = String::new();
        stream.read_to_string(&mut all).await.expect("an answer");
        assert!(
            all.starts_with("HTTP/1.1 500") && all.contains("log has it as panic"),
            "{all}"
        );
        let mut next = TcpStream::connect(at).await.expect("connected");
        assert!(request_path(&mut next, "/").await.contains("200 OK"));
    }
}
