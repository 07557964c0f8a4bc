//! Commands and forwarded ports over WebSockets (KEP-4006), for runtimes that speak SPDY.

use std::collections::BTreeMap;
use std::io;
use std::pin::pin;

use base64::Engine as _;
use futures::future::{Either, select};
use futures::{Sink, SinkExt as _, Stream, StreamExt as _};
use hyper::body::Incoming;
use hyper::header::{
    CONNECTION, HOST, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL,
    UPGRADE,
};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Bytes, Error as WebSocketError, Message};

use super::Body;
use super::Outgoing;
use super::TunnelError;
use super::ending::{Progress, STALL, take_over};
use super::full;
use super::pairs::Pairs;
use super::spdy::{Frame, Reader, Writer};

/// The protocols that are translated to SPDY; runtimes serve older ones themselves.
const COMMAND: &str = "v5.channel.k8s.io";
const FORWARD: &str = "SPDY/3.1+portforward.k8s.io";
/// Maximum size of an accepted message.
const LARGEST: usize = 1 << 20;
/// Number of bytes that are read at once for a forwarded port.
const PIECE: usize = 32 << 10;

/// The channels of a command, by their first byte.
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
const CLOSE: u8 = 255;

/// The content of a request's WebSocket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketContent {
    /// A command's streams.
    Command,
    /// Forwarded ports.
    Ports,
}

/// Returns what a request offers for translation to SPDY; `None` if nothing.
#[must_use]
pub fn socket_content(headers: &HeaderMap) -> Option<SocketContent> {
    let websocket = headers
        .get(UPGRADE)
        .and_then(|v| v.to_str().ok())
        .is_some_and(|v| v.eq_ignore_ascii_case("websocket"));
    let offered = headers
        .get_all(SEC_WEBSOCKET_PROTOCOL)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','))
        .map(str::trim);
    let mut found = offered.filter_map(|protocol| match protocol {
        COMMAND => Some(SocketContent::Command),
        FORWARD => Some(SocketContent::Ports),
        _ => None,
    });
    found.next().filter(|_| websocket)
}

/// The streams of a command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Channels {
    /// Whether the client sends input.
    pub stdin: bool,
    /// Whether the client receives output.
    pub stdout: bool,
    /// Whether the client receives errors.
    pub stderr: bool,
    /// Whether the command has a terminal, whose size changes.
    pub tty: bool,
}

/// Computes the header that proves to a client that its handshake was understood (RFC 6455, 4.2.2).
fn accept(key: &HeaderValue) -> Option<HeaderValue> {
    let text = [key.as_bytes(), b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"].concat();
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA1_FOR_LEGACY_USE_ONLY, &text);
    HeaderValue::from_str(&base64::engine::general_purpose::STANDARD.encode(digest)).ok()
}

/// Upgrades a new connection to the runtime to SPDY. Any other answer of the runtime is returned.
async fn spdy(
    outgoing: &Outgoing,
    protocol: &str,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> Result<Result<Upgraded, Response<Incoming>>, TunnelError> {
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "a runtime's stream closed early");
        }
    });
    let request = Request::post(&outgoing.target)
        .header(HOST, &outgoing.host)
        .header(CONNECTION, "Upgrade")
        .header(UPGRADE, "SPDY/3.1");
    let answer = sender
        .send_request(
            request
                .header("X-Stream-Protocol-Version", protocol)
                .body(full(""))?,
        )
        .await?;
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        return Ok(Err(answer));
    }
    Ok(Ok(hyper::upgrade::on(answer).await?))
}

/// Serves a request's WebSocket through a new SPDY connection to a runtime. `guard` is kept until the session ends.
pub async fn serve_socket(
    mut request: Request<Incoming>,
    socket_content: SocketContent,
    channels: Channels,
    outgoing: &Outgoing,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    guard: impl Send + 'static,
) -> Result<Response<Body>, TunnelError> {
    let Some(accept) = request.headers().get(SEC_WEBSOCKET_KEY).and_then(accept) else {
        return Ok(super::text(
            StatusCode::BAD_REQUEST,
            "Sec-WebSocket-Key is missing",
        ));
    };
    let inner: OnUpgrade = hyper::upgrade::on(&mut request);
    let (requested, chosen) = match socket_content {
        SocketContent::Command => ("v4.channel.k8s.io", COMMAND),
        SocketContent::Ports => ("portforward.k8s.io", FORWARD),
    };
    let outer = match spdy(outgoing, requested, stream).await? {
        Ok(outer) => TokioIo::new(outer),
        Err(answer) => {
            use http_body_util::BodyExt as _;
            return Ok(answer.map(|body| body.map_err(Into::into).boxed_unsync()));
        }
    };
    tokio::spawn(async move {
        let _guard = guard;
        let Some((inner, progress)) = take_over(inner).await else {
            return;
        };
        let socket = accepted(inner).await;
        let done = match socket_content {
            SocketContent::Command => command(socket, channels, outer, &progress).await,
            SocketContent::Ports => ports(socket, Pairs::new(outer, true), &progress).await,
        };
        if let Err(error) = done {
            tracing::debug!(%error, "a stream was closed early");
        }
    });
    let answer = Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header(CONNECTION, "Upgrade")
        .header(UPGRADE, "websocket");
    Ok(answer
        .header(SEC_WEBSOCKET_ACCEPT, accept)
        .header(SEC_WEBSOCKET_PROTOCOL, chosen)
        .body(full(""))?)
}

/// The server's side of a WebSocket after its handshake.
async fn accepted<S: AsyncRead + AsyncWrite + Unpin>(stream: S) -> WebSocketStream<S> {
    let limits = WebSocketConfig::default()
        .max_message_size(Some(LARGEST))
        .max_frame_size(Some(LARGEST));
    WebSocketStream::from_raw_socket(stream, Role::Server, Some(limits)).await
}

fn broken(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(error.to_string())
}

/// Encodes a message of a channel.
fn message(channel: u8, data: &[u8]) -> Message {
    let mut bytes = Vec::with_capacity(data.len() + 1);
    bytes.push(channel);
    bytes.extend(data);
    Message::Binary(bytes.into())
}

/// Runs both directions of a session. After the runtime's side ends, the client closes when it has read
/// everything. Until then its messages are read, as long as it makes progress. If the client's side ends, the session
/// ends at once.
async fn until_closed(
    outward: impl Future<Output = io::Result<()>>,
    inward: impl Future<Output = ()>,
    progress: &Progress,
) -> io::Result<()> {
    match select(pin!(outward), pin!(inward)).await {
        Either::Left((ended, inward)) => {
            ended?;
            if !progress.bounds(STALL, inward).await {
                tracing::debug!("the client of a session stopped reading");
            }
            Ok(())
        }
        Either::Right(((), _)) => Ok(()),
    }
}

/// Sends the message that closes a session. The message reports an error if the runtime's connection failed before its
/// end, so that a client does not take the output for complete.
async fn closed(
    sink: &mut (impl Sink<Message, Error = WebSocketError> + Unpin),
    ended: io::Result<()>,
) -> io::Result<()> {
    let (code, reason) = match ended {
        Ok(()) => (CloseCode::Normal, ""),
        Err(error) => {
            tracing::debug!(%error, "the runtime's stream of a session failed");
            let reason = "the container runtime closed its stream early";
            (CloseCode::Error, reason)
        }
    };
    let reason = reason.into();
    let message = Message::Close(Some(CloseFrame { code, reason }));
    sink.send(message).await.map_err(broken)
}

/// Serves a command: each channel is a stream of the runtime.
async fn command(
    socket: WebSocketStream<impl AsyncRead + AsyncWrite + Unpin>,
    channels: Channels,
    runtime: impl AsyncRead + AsyncWrite + Unpin,
    progress: &Progress,
) -> io::Result<()> {
    let (mut sink, messages) = socket.split();
    let (from, to) = split(runtime);
    let mut writer = Writer::new(to);
    let wanted = [
        (ERROR, "error", true),
        (STDIN, "stdin", channels.stdin),
        (STDOUT, "stdout", channels.stdout),
        (STDERR, "stderr", channels.stderr && !channels.tty),
        (RESIZE, "resize", channels.tty),
    ];
    let mut streams: BTreeMap<u8, u32> = BTreeMap::new();
    for (channel, kind, _) in wanted.into_iter().filter(|(_, _, wanted)| *wanted) {
        streams.insert(channel, writer.open(&[("streamtype", kind)]).await?);
    }
    // Notifies the client that it may begin.
    let first = [STDOUT, STDERR, ERROR]
        .into_iter()
        .find(|c| streams.contains_key(c))
        .unwrap_or(ERROR);
    sink.send(message(first, &[])).await.map_err(broken)?;
    let (ping_sender, ping_receiver) = mpsc::channel(8);
    let open = [STDOUT, STDERR, ERROR]
        .into_iter()
        .filter_map(|c| Some((*streams.get(&c)?, c)))
        .collect();
    let outward = outward(Reader(from), sink, open, ping_sender, progress);
    let inward = inward(messages, writer, &streams, ping_receiver, progress);
    until_closed(outward, inward, progress).await
}

/// Sends the runtime's output to the client, and a close message after it.
async fn outward(
    mut reader: Reader<impl AsyncRead + Unpin>,
    mut sink: impl Sink<Message, Error = WebSocketError> + Unpin,
    mut open: BTreeMap<u32, u8>,
    pings: mpsc::Sender<u32>,
    progress: &Progress,
) -> io::Result<()> {
    let mut ended = Ok(());
    while !open.is_empty() {
        let frame = match reader.next().await {
            Ok(frame) => frame,
            Err(error) => {
                ended = Err(error);
                break;
            }
        };
        match frame {
            Frame::Data(stream, data, last) => {
                if let (Some(channel), false) = (open.get(&stream), data.is_empty()) {
                    sink.send(message(*channel, &data)).await.map_err(broken)?;
                    progress.add(data.len());
                }
                if last {
                    open.remove(&stream);
                }
            }
            Frame::Reset(stream) => _ = open.remove(&stream),
            // A runtime that does not read the replies delays only its own session; pings are few.
            Frame::Ping(number) => _ = pings.send(number).await,
            Frame::End => break,
            // A runtime opens no streams.
            Frame::Open(..) | Frame::Other => {}
        }
    }
    closed(&mut sink, ended).await
}

/// Forwards the client's messages to the runtime until the client closes. After the runtime has stopped reading,
/// messages are discarded.
async fn inward(
    mut messages: impl Stream<Item = Result<Message, WebSocketError>> + Unpin,
    mut writer: Writer<impl AsyncWrite + Unpin>,
    streams: &BTreeMap<u8, u32>,
    mut pings: mpsc::Receiver<u32>,
    progress: &Progress,
) {
    let (mut input_ended, mut runtime_reads) = (false, true);
    loop {
        let message = tokio::select! {
            biased;
            // Both futures are cancel-safe.
            Some(number) = pings.recv() => {
                runtime_reads = runtime_reads && writer.pong(number).await.is_ok();
                continue;
            }
            message = messages.next() => message,
        };
        let data = match message {
            Some(Ok(Message::Binary(data))) => data,
            Some(Ok(Message::Close(_))) | None => return,
            Some(Ok(_)) => {
                progress.add(1);
                continue;
            }
            Some(Err(error)) => {
                tracing::debug!(%error, "the client of a session closed early");
                return;
            }
        };
        progress.add(data.len());
        let written = match data.split_first() {
            _ if !runtime_reads => Ok(()),
            Some((&CLOSE, &[STDIN])) if !input_ended => {
                input_ended = true;
                match streams.get(&STDIN) {
                    Some(stream) => writer.data(*stream, &[], true).await,
                    None => Ok(()),
                }
            }
            Some((&channel @ (STDIN | RESIZE), data)) if !(input_ended && channel == STDIN) => {
                match streams.get(&channel) {
                    Some(stream) => writer.data(*stream, data, false).await,
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        };
        runtime_reads = runtime_reads && written.is_ok();
    }
}

/// Serves forwarded ports: the WebSocket carries the bytes of an SPDY connection.
async fn ports(
    socket: WebSocketStream<impl AsyncRead + AsyncWrite + Unpin>,
    runtime: impl AsyncRead + AsyncWrite + Unpin,
    progress: &Progress,
) -> io::Result<()> {
    let (mut sink, mut messages) = socket.split();
    let (mut from, mut to) = split(runtime);
    let inward = async {
        let mut runtime_reads = true;
        while let Some(Ok(message)) = messages.next().await {
            match message {
                Message::Binary(data) => {
                    progress.add(data.len());
                    runtime_reads = runtime_reads && to.write_all(&data).await.is_ok();
                }
                Message::Close(_) => break,
                _ => progress.add(1),
            }
        }
    };
    let outward = async {
        let mut piece = vec![0; PIECE];
        let ended = loop {
            let length = match from.read(&mut piece).await {
                Ok(0) => break Ok(()),
                Ok(length) => length,
                Err(error) => break Err(error),
            };
            sink.send(Message::Binary(Bytes::copy_from_slice(&piece[..length])))
                .await
                .map_err(broken)?;
            progress.add(length);
        };
        closed(&mut sink, ended).await
    };
    until_closed(outward, inward, progress).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// The bytes of a client's frame, of which any part may be wrong.
    fn frame() -> impl Strategy<Value = Vec<u8>> {
        let parts = (
            any::<u8>(),
            any::<u8>(),
            any::<[u8; 4]>(),
            vec(any::<u8>(), 0..80),
        );
        (parts, any::<bool>()).prop_map(|((head, length, mask, data), honest)| {
            if !honest {
                return [vec![head, length], mask.to_vec(), data].concat();
            }
            // A whole binary or text message, or a control frame, masked as a client must.
            let head = 0x80 | [1, 2, 8, 9, 10][usize::from(head) % 5];
            let masked = data.iter().enumerate().map(|(i, b)| b ^ mask[i % 4]);
            let length = 0x80 | u8::try_from(data.len()).unwrap_or(0);
            [vec![head, length], mask.to_vec(), masked.collect()].concat()
        })
    }

    proptest! {
        /// Whatever both sides send, the sessions of a command and of forwarded ports end with the peers, without a
        /// panic.
        #[test]
        fn any_bytes_end_the_session(frames in vec(frame(), 0..8), runtime in vec(any::<u8>(), 0..200), tty in any::<bool>()) {
            let all = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
            let ended = all.block_on(async {
                for socket_content in [SocketContent::Command, SocketContent::Ports] {
                    let (mut client, inner) = tokio::io::duplex(1 << 16);
                    let (mut other, outer) = tokio::io::duplex(1 << 16);
                    client.write_all(&frames.concat()).await?;
                    client.shutdown().await?;
                    other.write_all(&runtime).await?;
                    other.shutdown().await?;
                    let channels = Channels { stdin: true, stdout: true, stderr: true, tty };
                    let socket = accepted(inner).await;
                    let served = async {
                        // An error is an end as well.
                        let _ = match socket_content {
                            SocketContent::Command => command(socket, channels, outer, &Progress::default()).await,
                            SocketContent::Ports => ports(socket, outer, &Progress::default()).await,
                        };
                    };
                    tokio::time::timeout(std::time::Duration::from_secs(60), served).await?;
                }
                Ok::<_, io::Error>(())
            });
            prop_assert!(ended.is_ok(), "{ended:?}");
        }
    }

    #[test]
    fn only_supported_subprotocols_are_translated() {
        let of = |upgrade: &str, protocols: &[&str]| {
            let mut headers = HeaderMap::new();
            headers.insert(UPGRADE, HeaderValue::from_str(upgrade).expect("a value"));
            for protocol in protocols {
                headers.append(
                    SEC_WEBSOCKET_PROTOCOL,
                    HeaderValue::from_str(protocol).expect("a value"),
                );
            }
            socket_content(&headers)
        };
        assert_eq!(
            of("websocket", &["v5.channel.k8s.io"]),
            Some(SocketContent::Command)
        );
        assert_eq!(
            of("WebSocket", &["v4.channel.k8s.io, v5.channel.k8s.io"]),
            Some(SocketContent::Command)
        );
        assert_eq!(
            of("websocket", &["SPDY/3.1+portforward.k8s.io"]),
            Some(SocketContent::Ports)
        );
        assert_eq!(
            of("websocket", &["v4.channel.k8s.io"]),
            None,
            "the runtime implements this protocol"
        );
        assert_eq!(of("SPDY/3.1", &["v5.channel.k8s.io"]), None);
        let key = HeaderValue::from_static("dGhlIHNhbXBsZSBub25jZQ==");
        assert_eq!(
            accept(&key),
            Some(HeaderValue::from_static("s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")),
            "the example of RFC 6455"
        );
    }
}
