//! The server side of a command's streams over SPDY, in place of a runtime's streaming server.
//!
//! Serves version 4 of the protocol (`v4.channel.k8s.io`), which every client since Kubernetes 1.4 offers, as
//! `k8s.io/cri-streaming/pkg/streaming/remotecommand/httpstream.go` does. The client side is
//! [`forward_request`](super::forward_request) or [`serve_socket`](super::serve_socket) of this process.

use std::collections::BTreeMap;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::future::select;
use tokio::io::{
    AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadHalf, WriteHalf, duplex, split,
};
use tokio::sync::{Mutex, mpsc};
use tokio_util::sync::CancellationToken;

use super::Channels;
use super::pairs::Headers;
use super::spdy::{Frame, Reader, Writer};

/// Maximum number of bytes in transit in one direction.
const BUFFER: usize = 64 << 10;
/// Maximum size of a request's head. The listener has accepted the head before.
const MAX_HEAD: usize = 1 << 20;
/// How long a client may take to open its streams; the value of runtimes.
const STREAM_CREATION_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of frames of input and of terminal sizes that wait for the command. The client blocks on further
/// ones.
const MAX_PENDING_FRAMES: usize = 4;
/// The response that switches from HTTP to SPDY.
const RESPONSE: &[u8] =
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
    X-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n";

/// The streams that a command sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputKind {
    /// Its standard output.
    Stdout,
    /// Its standard error.
    Stderr,
    /// Its status, sent after everything else.
    Status,
}

impl OutputKind {
    fn stream(self) -> &'static [u8] {
        match self {
            OutputKind::Stdout => b"stdout",
            OutputKind::Stderr => b"stderr",
            OutputKind::Status => b"error",
        }
    }
}

type Ids = BTreeMap<&'static [u8], u32>;

/// The streams to the client. Clones share them.
#[derive(Clone)]
pub struct Output {
    writer: Arc<Mutex<Writer<WriteHalf<DuplexStream>>>>,
    ids: Arc<Ids>,
}

impl Output {
    /// Sends bytes; `last` ends the stream. Bytes for a stream that the client has not requested are discarded.
    ///
    /// # Errors
    ///
    /// The client has closed the connection.
    pub async fn send(&self, kind: OutputKind, data: &[u8], last: bool) -> io::Result<()> {
        match self.ids.get(kind.stream()) {
            Some(id) => self.writer.lock().await.data(*id, data, last).await,
            None => Ok(()),
        }
    }
}

/// A client's streams.
pub struct CommandStreams {
    /// Input, until the client ends it.
    pub input: mpsc::Receiver<Vec<u8>>,
    /// JSON of the terminal's sizes.
    pub sizes: mpsc::Receiver<Vec<u8>>,
    /// The streams to the client.
    pub output: Output,
    /// Cancelled when the client has closed the connection.
    pub disconnected: CancellationToken,
}

/// Connects to a new server, which runs `command` once the client has opened its streams. The connection closes when
/// `command` completes.
pub fn serve_command<F>(
    channels: Channels,
    command: impl FnOnce(CommandStreams) -> F + Send + 'static,
) -> DuplexStream
where
    F: Future<Output = ()> + Send,
{
    let (client, server) = duplex(BUFFER);
    tokio::spawn(async move {
        if let Err(error) = serve(server, channels, command).await {
            tracing::debug!(%error, "starting the session of a command failed");
        }
    });
    client
}

async fn serve<F: Future<Output = ()>>(
    mut stream: DuplexStream,
    channels: Channels,
    command: impl FnOnce(CommandStreams) -> F,
) -> io::Result<()> {
    let mut head = vec![];
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() >= MAX_HEAD {
            return Err(io::Error::other("the request's head is too large"));
        }
        head.push(stream.read_u8().await?);
    }
    stream.write_all(RESPONSE).await?;
    let (from, to) = split(stream);
    let (mut reader, mut writer) = (Reader(from), Writer::new(to));
    let opening = opened(&mut reader, &mut writer, channels);
    let ids = tokio::time::timeout(STREAM_CREATION_TIMEOUT, opening)
        .await
        .map_err(|_| io::Error::other("timed out waiting for client to create streams"))??;
    let output = Output {
        writer: Arc::new(Mutex::new(writer)),
        ids: Arc::new(ids),
    };
    let (input, from_client) = mpsc::channel(MAX_PENDING_FRAMES);
    let (sizes, from_terminal) = mpsc::channel(MAX_PENDING_FRAMES);
    let disconnected = CancellationToken::new();
    let command = command(CommandStreams {
        input: from_client,
        sizes: from_terminal,
        output: output.clone(),
        disconnected: disconnected.clone(),
    });
    let reading = async {
        if let Err(error) = receive(&mut reader, &output, input, sizes).await {
            tracing::debug!(%error, "the client of a command disconnected");
        }
        disconnected.cancel();
        std::future::pending::<()>().await;
    };
    select(pin!(command), pin!(reading)).await;
    Ok(())
}

/// Accepts the streams of a command; returns their numbers.
async fn opened(
    reader: &mut Reader<ReadHalf<DuplexStream>>,
    writer: &mut Writer<WriteHalf<DuplexStream>>,
    channels: Channels,
) -> io::Result<Ids> {
    let wanted: [(&'static [u8], bool); 5] = [
        (b"error", true),
        (b"stdin", channels.stdin),
        (b"stdout", channels.stdout),
        (b"stderr", channels.stderr && !channels.tty),
        (b"resize", channels.tty),
    ];
    let wanted = wanted.into_iter().filter(|(_, wanted)| *wanted);
    let wanted: Vec<_> = wanted.map(|(kind, _)| kind).collect();
    let (mut ids, mut headers) = (Ids::new(), Headers::new());
    while ids.len() < wanted.len() {
        match reader.next().await? {
            Frame::Open(id, block) => {
                let kind = headers.value(&block, b"streamtype");
                let kind =
                    kind.ok_or_else(|| io::Error::other("a stream has no streamtype header"))?;
                match wanted.iter().find(|w| **w == kind) {
                    Some(kind) => _ = ids.insert(kind, id),
                    None => tracing::debug!(
                        kind = %String::from_utf8_lossy(&kind),
                        "unexpected stream type"
                    ),
                }
                writer.reply(id).await?;
            }
            Frame::Ping(number) => writer.pong(number).await?,
            Frame::Data(_, data, false) if data.is_empty() => {}
            Frame::Data(..) => {
                return Err(io::Error::other(
                    "data arrived before all streams were opened",
                ));
            }
            Frame::End => return Err(io::ErrorKind::UnexpectedEof.into()),
            Frame::Reset(_) | Frame::Other => {}
        }
    }
    Ok(ids)
}

/// Forwards the client's frames to the command until the client closes the connection.
async fn receive(
    reader: &mut Reader<ReadHalf<DuplexStream>>,
    output: &Output,
    input: mpsc::Sender<Vec<u8>>,
    sizes: mpsc::Sender<Vec<u8>>,
) -> io::Result<()> {
    let id = |kind: &[u8]| output.ids.get(kind).copied();
    let mut open: BTreeMap<u32, mpsc::Sender<Vec<u8>>> =
        [(id(b"stdin"), input), (id(b"resize"), sizes)]
            .into_iter()
            .filter_map(|(id, to)| Some((id?, to)))
            .collect();
    loop {
        match reader.next().await? {
            Frame::Data(stream, data, last) => {
                let Some(to) = open.get(&stream) else {
                    continue;
                };
                // A command that has stopped reading has dropped the receiver.
                if (!data.is_empty() && to.send(data).await.is_err()) || last {
                    open.remove(&stream);
                }
            }
            Frame::Reset(stream) => _ = open.remove(&stream),
            Frame::Ping(number) => output.writer.lock().await.pong(number).await?,
            Frame::End => return Ok(()),
            Frame::Open(..) | Frame::Other => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Channels = Channels {
        stdin: true,
        stdout: true,
        stderr: true,
        tty: false,
    };

    type Client = (
        Reader<ReadHalf<DuplexStream>>,
        Writer<WriteHalf<DuplexStream>>,
    );

    /// A client that has opened the streams of `kinds`.
    async fn client(mut stream: DuplexStream, kinds: &[&str]) -> Client {
        let request = b"POST /x HTTP/1.1\r\nUpgrade: SPDY/3.1\r\n\r\n";
        stream.write_all(request).await.expect("a result");
        let mut head = vec![0; RESPONSE.len()];
        stream.read_exact(&mut head).await.expect("a result");
        assert_eq!(head, RESPONSE);
        let (from, to) = split(stream);
        let (mut reader, mut writer) = (Reader(from), Writer::new(to));
        for kind in kinds {
            writer
                .open(&[("streamtype", kind)])
                .await
                .expect("a result");
            // The reply.
            assert_eq!(reader.next().await.expect("a result"), Frame::Other);
        }
        (reader, writer)
    }

    #[tokio::test]
    async fn a_command_gets_the_streams_that_its_client_opened() {
        let stream = serve_command(ALL, |mut streams: CommandStreams| async move {
            let mut all = vec![];
            while let Some(data) = streams.input.recv().await {
                all.extend(data);
            }
            let output = &streams.output;
            output
                .send(OutputKind::Stdout, &all, true)
                .await
                .expect("a result");
            output
                .send(OutputKind::Stderr, b"", true)
                .await
                .expect("a result");
            output
                .send(OutputKind::Status, b"{}", true)
                .await
                .expect("a result");
        });
        let (mut reader, mut writer) =
            client(stream, &["error", "stdin", "stdout", "stderr"]).await;
        writer.data(3, b"he", false).await.expect("a result");
        writer.pong(9).await.expect("a result");
        assert_eq!(reader.next().await.expect("a result"), Frame::Ping(9));
        writer.data(3, b"llo", true).await.expect("a result");
        for expected in [
            Frame::Data(5, b"hello".to_vec(), true),
            Frame::Data(7, vec![], true),
            Frame::Data(1, b"{}".to_vec(), true),
            Frame::End,
        ] {
            assert_eq!(reader.next().await.expect("a result"), expected);
        }
    }

    #[tokio::test]
    async fn a_client_that_disconnects_closes_stdin_but_does_not_stop_the_command() {
        let (done, ended) = tokio::sync::oneshot::channel();
        let stream = serve_command(ALL, |mut streams: CommandStreams| async move {
            assert_eq!(streams.input.recv().await, None);
            streams.disconnected.cancelled().await;
            let sent = streams.output.send(OutputKind::Stdout, b"late", true).await;
            done.send(sent.is_err()).expect("a result");
        });
        drop(client(stream, &["stdin", "error", "stderr", "stdout"]).await);
        assert!(
            ended.await.expect("a result"),
            "the client has disconnected"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn no_command_is_started_if_the_client_opens_too_few_streams() {
        let stream = serve_command(ALL, |_| async { panic!("it began") });
        let (mut reader, _writer) = client(stream, &["error", "stdin", "other"]).await;
        assert_eq!(reader.next().await.expect("a result"), Frame::End);
    }
}
