//! Forwards a request to another server and, if both sides leave HTTP, the connection itself: SPDY and WebSocket alike.
//! A redirect is never followed, and returned only if the caller wants it (CVE-2018-1002102, CVE-2020-8559).

use std::io;
use std::pin::pin;
use std::time::Duration;

use futures::future::{Either, FutureExt as _, select};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::header::{
    AUTHORIZATION, CONNECTION, HOST, HeaderName, HeaderValue, TE, TRAILER, TRANSFER_ENCODING,
    UPGRADE,
};
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};

use super::Body;
use super::BoxError;
use super::ending::{Copied, Progress, STALL, copy, discard, take_over};
use super::full;
use super::pairs::Pairs;

/// How long a server may be silent after its client has closed.
const GRACE: Duration = Duration::from_secs(2);

/// Why a request could not be forwarded.
#[derive(Debug, thiserror::Error)]
pub enum TunnelError {
    /// The other server did not answer with valid HTTP.
    #[error("the backend did not respond: {0}")]
    InvalidResponse(#[from] hyper::Error),
    /// The forwarded request cannot be built.
    #[error("the request cannot be forwarded: {0}")]
    Request(#[from] hyper::http::Error),
    /// The other server answered with a redirect.
    #[error("the backend responded with a redirect to {0:?}, which is not followed")]
    Redirect(String),
}

/// The request to the other server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outgoing {
    /// The server's name, for the `Host` header.
    pub host: String,
    /// Path and query.
    pub target: String,
    /// Whether the server is a runtime that forwards ports: reports of reset connections do not reach the client.
    pub forwards_ports: bool,
    /// Whether the client receives a redirect of the server; else it is an error.
    pub returns_redirects: bool,
}

/// Whether a request is an upgrade, which leaves HTTP.
#[must_use]
pub fn is_upgrade(headers: &HeaderMap) -> bool {
    let asks = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .any(|v| v.to_ascii_lowercase().contains("upgrade"));
    asks && headers.contains_key(UPGRADE)
}

/// Returns the headers to forward: without hop-by-hop headers and without credentials.
fn headers(from: &HeaderMap, upgrade: bool) -> HeaderMap {
    let between = [
        TE,
        TRAILER,
        TRANSFER_ENCODING,
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("proxy-connection"),
    ];
    let mut to = HeaderMap::new();
    for (name, value) in from {
        let stays = between.contains(name)
            || *name == AUTHORIZATION
            || *name == HOST
            || *name == CONNECTION
            || *name == UPGRADE;
        let acting = name.as_str().starts_with("impersonate-");
        if !stays && !acting {
            to.append(name, value.clone());
        }
    }
    if let (true, Some(kind)) = (upgrade, from.get(UPGRADE)) {
        to.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        to.insert(UPGRADE, kind.clone());
    }
    to
}

/// Copies bytes both ways until both sides have closed. A client that reads slowly gets everything that the server
/// sent, as long as the client makes progress. After the client has closed, the server may be silent for [`GRACE`].
async fn both_ways(
    client: impl AsyncRead + AsyncWrite,
    server: impl AsyncRead + AsyncWrite,
    progress: &Progress,
) -> io::Result<()> {
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_server, mut to_server) = tokio::io::split(server);
    let there = async {
        let copied = copy(&mut from_client, &mut to_server, progress).await;
        match &copied {
            Copied::Whole => {
                if let Err(error) = to_server.shutdown().await {
                    tracing::debug!(%error, "the server of a tunnel closed before its client");
                }
            }
            // The server reads no more. Unread bytes of the client would reset the client's connection.
            Copied::WriteFailed(_) => discard(&mut from_client, progress).await,
            Copied::ReadFailed(_) => {}
        }
        copied
    };
    let back = async {
        let copied = copy(&mut from_server, &mut to_client, progress).await;
        match to_client.shutdown().await {
            Err(error) if matches!(copied, Copied::Whole) => Copied::WriteFailed(error),
            _ => copied,
        }
    };
    match select(pin!(there), pin!(back)).await {
        Either::Left((Copied::ReadFailed(error), _))
        | Either::Right((Copied::WriteFailed(error), _)) => Err(error),
        Either::Left((_, back)) => {
            progress.bounds(GRACE, back.map(drop)).await;
            Ok(())
        }
        Either::Right((copied, there)) => {
            if !progress.bounds(STALL, there.map(drop)).await {
                tracing::debug!("the client of a tunnel stopped reading");
            }
            match copied {
                Copied::ReadFailed(error) => Err(error),
                _ => Ok(()),
            }
        }
    }
}

/// Forwards a request over a new connection and returns the answer. If the other side leaves HTTP, bytes are copied
/// both ways until both sides have closed; `guard` is kept until then.
pub async fn forward_request(
    mut request: Request<Incoming>,
    outgoing: &Outgoing,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    guard: impl Send + 'static,
) -> Result<Response<Body>, TunnelError> {
    let upgrade = is_upgrade(request.headers());
    let forwards_ports = outgoing.forwards_ports
        && request
            .headers()
            .get(UPGRADE)
            .is_some_and(|kind| kind.as_bytes().eq_ignore_ascii_case(b"SPDY/3.1"));
    // Taken before the request is consumed.
    let inner = upgrade.then(|| hyper::upgrade::on(&mut request));
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "a forwarded connection closed early");
        }
    });
    let (head, body) = request.into_parts();
    let mut onward = Request::builder()
        .method(head.method)
        .uri(&outgoing.target)
        .header(HOST, &outgoing.host);
    if let Some(map) = onward.headers_mut() {
        map.extend(headers(&head.headers, upgrade));
    }
    let body: Body = if upgrade {
        full("")
    } else {
        body.map_err(|e| Box::new(e) as BoxError).boxed_unsync()
    };
    let mut answer = sender.send_request(onward.body(body)?).await?;
    if answer.status().is_redirection() && !outgoing.returns_redirects {
        let place = answer
            .headers()
            .get(hyper::header::LOCATION)
            .and_then(|v| v.to_str().ok())
            .unwrap_or_default();
        return Err(TunnelError::Redirect(place.chars().take(200).collect()));
    }
    let leaves = answer.status() == StatusCode::SWITCHING_PROTOCOLS;
    let mut back = Response::builder().status(answer.status());
    if let Some(map) = back.headers_mut() {
        map.extend(headers(answer.headers(), leaves));
    }
    if let (true, Some(inner)) = (leaves, inner) {
        let outer = hyper::upgrade::on(&mut answer);
        tokio::spawn(async move {
            let _guard = guard;
            let (Some((inner, progress)), Ok(outer)) = tokio::join!(take_over(inner), outer) else {
                return;
            };
            let outer = Pairs::new(TokioIo::new(outer), forwards_ports);
            if let Err(error) = both_ways(inner, outer, &progress).await {
                tracing::debug!(%error, "a stream was closed early");
            }
        });
        return Ok(back.body(full(""))?);
    }
    // The connection lives as long as the body.
    let body = answer
        .into_body()
        .map_err(|e| Box::new(e) as BoxError)
        .boxed_unsync();
    Ok(back.body(body)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limits, serve, text};

    /// A server that responds with `answer`, and a server in front of it that forwards requests.
    async fn pair(answer: fn(Request<Incoming>) -> Response<Body>) -> std::net::SocketAddr {
        let limits = Limits {
            evict_unauthenticated: false,
            connections: 8,
            idle: None,
        };
        let back = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let front = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let (back_at, front_at) = (
            back.local_addr().expect("an address"),
            front.local_addr().expect("an address"),
        );
        tokio::spawn(serve(back, None, limits, move |_, request| async move {
            answer(request)
        }));
        tokio::spawn(serve(
            front,
            None,
            limits,
            move |_, request: Request<Incoming>| async move {
                let outgoing = Outgoing {
                    host: "h".into(),
                    target: "/there?x=1".into(),
                    forwards_ports: false,
                    returns_redirects: request.uri().path() == "/page",
                };
                let stream = tokio::net::TcpStream::connect(back_at)
                    .await
                    .expect("connected");
                forward_request(request, &outgoing, stream, ())
                    .await
                    .unwrap_or_else(|e| text(StatusCode::BAD_GATEWAY, e.to_string()))
            },
        ));
        front_at
    }

    async fn exchange(at: std::net::SocketAddr, message: &str) -> String {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let mut stream = tokio::net::TcpStream::connect(at).await.expect("connected");
        stream.write_all(message.as_bytes()).await.expect("sent");
        let mut all = vec![];
        let read = async {
            while !String::from_utf8_lossy(&all).contains("END")
                && stream.read_buf(&mut all).await.expect("read") > 0
            {}
        };
        tokio::time::timeout(std::time::Duration::from_secs(60), read)
            .await
            .expect("in time");
        String::from_utf8_lossy(&all).into_owned()
    }

    #[tokio::test]
    async fn upgraded_connections_carry_bytes_in_both_directions() {
        let at = pair(|mut request| {
            let on = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let mut stream = TokioIo::new(on.await.expect("upgraded"));
                tokio::io::AsyncWriteExt::write_all(&mut stream, b"hello")
                    .await
                    .expect("sent");
                let (mut read, mut write) = tokio::io::split(stream);
                tokio::io::copy(&mut read, &mut write)
                    .await
                    .expect("echoed");
            });
            let answer = Response::builder()
                .status(101)
                .header(UPGRADE, "SPDY/3.1")
                .header(CONNECTION, "Upgrade")
                .header("X-Stream-Protocol-Version", "v4");
            answer.body(full("")).expect("an answer")
        })
        .await;
        let response = exchange(
            at,
            "POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\nEND",
        )
        .await;
        assert!(
            response.starts_with("HTTP/1.1 101")
                && response
                    .to_lowercase()
                    .contains("x-stream-protocol-version: v4"),
            "{response}"
        );
        assert!(response.ends_with("helloEND"), "{response}");
    }

    /// The server closed long ago, and the client sends before it has read everything, as kubectl sends pings.
    #[tokio::test]
    async fn a_client_that_reads_late_receives_all_data() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        const LENGTH: usize = 8 << 20;
        let at = pair(|mut request| {
            let on = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let mut stream = TokioIo::new(on.await.expect("upgraded"));
                stream.write_all(&vec![b'x'; LENGTH]).await.expect("sent");
                stream.shutdown().await.expect("ended");
                // As a runtime does: closing with unread pings would reset the connection and lose the bytes that were
                // sent.
                let pings = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
                pings.expect("the client's end");
            });
            let answer = Response::builder()
                .status(101)
                .header(UPGRADE, "SPDY/3.1")
                .header(CONNECTION, "Upgrade");
            answer.body(full("")).expect("an answer")
        })
        .await;
        let mut client = tokio::net::TcpStream::connect(at).await.expect("connected");
        let request =
            "POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
        client.write_all(request.as_bytes()).await.expect("sent");
        let mut head = vec![];
        while !head.ends_with(b"\r\n\r\n") {
            head.push(client.read_u8().await.expect("a head"));
        }
        tokio::time::sleep(GRACE + std::time::Duration::from_secs(1)).await;
        let (mut received, mut piece) = (0, vec![0; 64 << 10]);
        while received < LENGTH {
            client.write_all(b"ping").await.expect("the tunnel reads");
            let length = client.read(&mut piece).await.expect("everything");
            assert!(length > 0, "the end after {received} of {LENGTH} bytes");
            received += length;
        }
        assert_eq!(client.read(&mut piece).await.expect("the end"), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_tunnel_closes_when_either_side_closes() {
        use tokio::io::{AsyncReadExt as _, duplex};
        use tokio::time::timeout;

        for server_ends in [true, false] {
            let (client, inner) = duplex(64);
            let (server, outer) = duplex(64);
            let carried =
                tokio::spawn(async move { both_ways(inner, outer, &Progress::default()).await });
            let (mut ends, mut stays) = match server_ends {
                true => (server, client),
                false => (client, server),
            };
            ends.write_all(b"bye").await.expect("sent");
            ends.shutdown().await.expect("ended");
            let mut rest = String::new();
            stays.read_to_string(&mut rest).await.expect("the end");
            assert_eq!(rest, "bye");
            // The other side's remaining bytes arrive.
            stays.write_all(b"and you").await.expect("sent");
            let mut rest = String::new();
            ends.read_to_string(&mut rest).await.expect("the end");
            assert_eq!(rest, "and you");
            let carried = timeout(2 * STALL, carried).await.expect("in time");
            assert!(carried.expect("no panic").is_ok());
        }
    }

    #[tokio::test]
    async fn credentials_are_not_forwarded_and_redirects_are_returned_on_request_only() {
        let at = pair(|request| {
            let secret = request.headers().contains_key(AUTHORIZATION)
                || request.headers().contains_key("impersonate-user");
            text(
                StatusCode::OK,
                format!("{} {} {secret} END", request.method(), request.uri()),
            )
        })
        .await;
        let response = exchange(at, "PUT /here HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\nImpersonate-User: u\r\nContent-Length: 0\r\n\r\n").await;
        assert!(response.ends_with("PUT /there?x=1 false END"), "{response}");
        let at = pair(|_| {
            Response::builder()
                .status(302)
                .header("Location", "http://169.254.169.254/END")
                .body(full(""))
                .expect("an answer")
        })
        .await;
        let response = exchange(at, "GET / HTTP/1.1\r\nHost: x\r\n\r\n").await;
        assert!(
            response.starts_with("HTTP/1.1 502") && response.contains("not followed"),
            "{response}"
        );
        assert!(
            !response.to_lowercase().contains("\r\nlocation:"),
            "{response}"
        );
        let response = exchange(at, "GET /page HTTP/1.1\r\nHost: x\r\n\r\n").await;
        assert!(response.starts_with("HTTP/1.1 302"), "{response}");
    }
}
