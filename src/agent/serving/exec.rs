//! Commands with input, in containers of containerd. The agent serves the streams and runs the command through
//! containerd's tasks, because containerd's own streaming server loses short input (see `cri::exec`).
//!
//! A session behaves like containerd's (`execInternal` in `internal/cri/server/container_execsync.go`). If the client
//! disconnects, the command continues: its input is closed, its output is discarded, and it is deleted when it exits.

use std::pin::pin;
use std::time::Duration;

use futures::FutureExt as _;
use hyper::body::Incoming;
use hyper::header::{HeaderMap, UPGRADE};
use hyper::{Request, StatusCode};
use serde::Deserialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::net::unix::pipe::Receiver as PipeReader;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Refusal, Server};
use holdfast_config::Config;
use holdfast_core::backoff::Doubling;
use holdfast_core::pod;
use holdfast_core::pod::observed::ContainerState;
use holdfast_core::serving::{PodTarget, Streams, command_status, query};
use holdfast_cri::{ExecProcess, PreparedExec, Runtime, RuntimeError, RuntimeErrorKind, Stdio};
use holdfast_https::{
    Channels, CommandStreams, Output, OutputKind, SocketContent, serve_command, socket_content,
};
use holdfast_sys::fifo::{self, Fifos};

/// The directory of FIFOs, below the root directory.
const DIRECTORY: &str = "exec";
const STDIN: &str = "stdin";
const STDOUT: &str = "stdout";
const STDERR: &str = "stderr";
/// Size of an output buffer, in bytes.
const BUFFER_SIZE: usize = 32 << 10;
/// Size limit of one terminal size in JSON, in bytes.
const MAX_SIZE_LENGTH: usize = 4 << 10;
/// Back-off between attempts to delete a command.
const RETRIES: Doubling = Doubling::new(Duration::from_secs(1), Duration::from_secs(60));

/// Returns a stream that serves a command with input. Returns `None` if the runtime's own streaming server must serve
/// the request: the command has no input, the client uses an older protocol, or the runtime does not support tasks.
pub(super) async fn session(
    server: &Server,
    place: &PodTarget,
    request: &Request<Incoming>,
) -> Result<Option<DuplexStream>, Refusal> {
    let text = request.uri().query().unwrap_or_default();
    let pairs = query::pairs(text).into_iter();
    let command = pairs.filter(|(key, _)| key == "command").map(|(_, v)| v);
    let command: Vec<String> = command.collect();
    let (Some(tasks), Ok(streams)) = (server.parts.runtime.tasks(), Streams::parse(text)) else {
        return Ok(None);
    };
    if !streams.stdin || command.is_empty() || !is_supported(request.headers()) {
        return Ok(None);
    }
    let container = running(server, place).await?;
    let prepared = match tasks.prepare(&container, &command, streams.tty).await {
        Ok(prepared) => prepared,
        Err(why) => {
            tracing::debug!(container, why, "serving a command with input through CRI");
            return Ok(None);
        }
    };
    let fifos = match create_fifos(&server.parts.config, &prepared.process, streams.tty).await {
        Ok(fifos) => fifos,
        Err(error) => {
            tracing::warn!(%error, "creating the FIFOs of a command failed: serving it through CRI, and short input may be lost");
            return Ok(None);
        }
    };
    let run = move |client| run_session(prepared, fifos, command, streams.tty, client);
    Ok(Some(serve_command(channels_of(streams), run)))
}

/// Whether [`serve_command`] supports the client's protocol, over SPDY or WebSocket.
fn is_supported(headers: &HeaderMap) -> bool {
    if socket_content(headers) == Some(SocketContent::Command) {
        return true;
    }
    let upgrade = headers.get(UPGRADE);
    let is_spdy = upgrade.is_some_and(|kind| kind.as_bytes().eq_ignore_ascii_case(b"SPDY/3.1"));
    let offered = headers.get_all("X-Stream-Protocol-Version");
    let mut offered = offered.iter().filter_map(|v| v.to_str().ok());
    is_spdy && offered.any(|all| all.split(',').any(|v| v.trim() == "v4.channel.k8s.io"))
}

async fn create_fifos(config: &Config, process: &ExecProcess, tty: bool) -> std::io::Result<Fifos> {
    let parent = config.root_dir.join(DIRECTORY);
    let name = format!("{}.{}", process.container(), process.id());
    let names: &[&str] = if tty {
        &[STDIN, STDOUT]
    } else {
        &[STDIN, STDOUT, STDERR]
    };
    tokio::task::spawn_blocking(move || Fifos::create(&parent, &name, names)).await?
}

/// Runs a command with its client's streams, and sends its exit status.
async fn run_session(
    prepared: PreparedExec,
    fifos: Fifos,
    command: Vec<String>,
    tty: bool,
    client: CommandStreams,
) {
    let output = client.output.clone();
    let ended = run(&prepared, &fifos, tty, client).await;
    if let Err(error) = prepared.process.delete().await {
        tracing::warn!(%error, container = prepared.process.container(), "deleting an exited command failed; retrying");
        tokio::spawn(delete_when_exited(prepared.process, fifos));
    }
    let status = command_status(&command, &ended);
    let sent = output.send(OutputKind::Status, status.as_bytes(), true);
    if let Err(error) = sent.await {
        tracing::debug!(%error, "the client of a command has disconnected");
    }
}

/// Creates and starts a command. Returns its exit code, or an error in containerd's words.
async fn run(
    prepared: &PreparedExec,
    fifos: &Fifos,
    tty: bool,
    client: CommandStreams,
) -> Result<u32, String> {
    let (process, id) = (&prepared.process, prepared.process.id());
    let stderr = (!tty).then(|| fifos.path(STDERR));
    let stdio = Stdio {
        stdin: &fifos.path(STDIN),
        stdout: &fifos.path(STDOUT),
        stderr: stderr.as_deref(),
    };
    // The shim blocks until these ends are open.
    let readers = Readers::open(fifos, tty);
    let readers = readers.map_err(|e| format!("failed to create exec {id:?}: {e}"))?;
    let created = prepared.create(stdio).await;
    created.map_err(|e| format!("failed to create exec {id:?}: {}", e.message))?;
    let started = process.start().await;
    started.map_err(|e| format!("failed to start exec {id:?}: {}", e.message))?;
    let CommandStreams {
        input,
        sizes,
        output,
        disconnected,
    } = client;
    let inward = async {
        let input = feed(process, fifos, tty, input);
        tokio::join!(input, resize(process, sizes));
    };
    copy_streams(process, inward, readers, Some(output), &disconnected).await
}

/// The agent's ends of a command's outputs.
struct Readers {
    stdout: PipeReader,
    /// `None` with a terminal, which has a single output.
    stderr: Option<PipeReader>,
}

impl Readers {
    fn open(fifos: &Fifos, tty: bool) -> std::io::Result<Readers> {
        Ok(Readers {
            stdout: fifos.reader(STDOUT)?,
            stderr: (!tty).then(|| fifos.reader(STDERR)).transpose()?,
        })
    }
}

/// Copies the streams of a running command until it exits and its outputs are closed. If other processes keep the
/// outputs open, the session lasts until the client disconnects, as with containerd.
async fn copy_streams(
    process: &ExecProcess,
    inward: impl Future<Output = ()>,
    readers: Readers,
    output: Option<Output>,
    disconnected: &CancellationToken,
) -> Result<u32, String> {
    let errors = async {
        if let Some(stderr) = readers.stderr {
            forward(stderr, output.clone(), OutputKind::Stderr).await;
        }
    };
    let outward = async {
        tokio::join!(
            forward(readers.stdout, output.clone(), OutputKind::Stdout),
            errors
        );
    };
    let (mut outward, mut inward) = (pin!(outward.fuse()), pin!(inward.fuse()));
    let mut exited = pin!(process.wait());
    let (mut drained, mut fed) = (false, false);
    let code = loop {
        tokio::select! {
            code = &mut exited => break code,
            () = &mut outward, if !drained => drained = true,
            () = &mut inward, if !fed => fed = true,
        }
    };
    let code = code.map_err(|e| {
        let id = process.id();
        format!("failed while waiting for exec {id:?}: {}", e.message)
    })?;
    if !drained {
        tokio::select! {
            () = &mut outward => {}
            () = disconnected.cancelled() => {}
        }
    }
    Ok(code)
}

/// Copies the client's input to a command, and then closes the command's
/// input. The input of a terminal is never closed.
async fn feed(process: &ExecProcess, fifos: &Fifos, tty: bool, input: mpsc::Receiver<Vec<u8>>) {
    if let Err(error) = copy_input(fifos, input).await {
        tracing::debug!(%error, "a command reads no more input");
    }
    if tty {
        return;
    }
    if let Err(error) = process.close_input().await {
        tracing::warn!(%error, container = process.container(), "closing the input of a command failed");
    }
}

async fn copy_input(fifos: &Fifos, mut input: mpsc::Receiver<Vec<u8>>) -> std::io::Result<()> {
    let mut writer = fifos.writer(STDIN).await?;
    while let Some(data) = input.recv().await {
        writer.write_all(&data).await?;
    }
    Ok(())
}

/// Copies a command's output to the client. After the client has disconnected, output
/// is discarded, so that the command can continue.
async fn forward(mut from: PipeReader, mut to: Option<Output>, kind: OutputKind) {
    let mut piece = vec![0; BUFFER_SIZE];
    loop {
        let length = match from.read(&mut piece).await {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) => {
                tracing::warn!(%error, "reading the output of a command failed");
                break;
            }
        };
        if let (Some(output), Some(data)) = (&to, piece.get(..length))
            && output.send(kind, data, false).await.is_err()
        {
            to = None;
        }
    }
    if let Some(output) = to
        && let Err(error) = output.send(kind, &[], true).await
    {
        tracing::debug!(%error, "the client of a command has disconnected");
    }
}

/// A terminal size in the client's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Size {
    #[serde(default)]
    width: u16,
    #[serde(default)]
    height: u16,
}

/// Removes complete sizes from the front of `bytes` and returns them. `None` if the bytes are not valid.
fn take_sizes(bytes: &mut Vec<u8>) -> Option<Vec<Size>> {
    let mut found = vec![];
    let mut values = serde_json::Deserializer::from_slice(bytes).into_iter();
    loop {
        match values.next() {
            Some(Ok(size)) => found.push(size),
            Some(Err(error)) if !error.is_eof() => return None,
            _ => break,
        }
    }
    let taken = values.byte_offset();
    drop(values);
    bytes.drain(..taken);
    Some(found)
}

/// Applies the client's terminal sizes to the command's terminal.
async fn resize(process: &ExecProcess, mut sizes: mpsc::Receiver<Vec<u8>>) {
    let mut begun = vec![];
    while let Some(bytes) = sizes.recv().await {
        begun.extend(bytes);
        let Some(found) = take_sizes(&mut begun).filter(|_| begun.len() <= MAX_SIZE_LENGTH) else {
            tracing::debug!("a client sent an invalid terminal size");
            return;
        };
        let mut found = found.into_iter().filter(|s| s.width > 0 && s.height > 0);
        if let Some(size) = found.next_back()
            && let Err(error) = process.resize(size.width, size.height).await
        {
            tracing::debug!(%error, "resizing the terminal of a command failed");
        }
    }
}

/// Waits until a command without a client exits, and deletes it. Retries until containerd answers.
async fn delete_when_exited(process: ExecProcess, fifos: Fifos) {
    let mut retries = RETRIES;
    loop {
        match wait_and_delete(&process, &fifos).await {
            Ok(()) => return,
            Err(error) => {
                tracing::debug!(
                    error,
                    container = process.container(),
                    "deleting a leftover command failed; retrying"
                );
                tokio::time::sleep(retries.pause()).await;
            }
        }
    }
}

async fn wait_and_delete(process: &ExecProcess, fifos: &Fifos) -> Result<(), String> {
    if process.is_running().await.map_err(|e| e.to_string())? {
        let tty = !fifos.path(STDERR).exists();
        let readers = Readers::open(fifos, tty).map_err(|e| e.to_string())?;
        let disconnected = CancellationToken::new();
        disconnected.cancel();
        let inward = async {
            let ended = mpsc::channel(1).1;
            feed(process, fifos, tty, ended).await;
        };
        copy_streams(process, inward, readers, None, &disconnected).await?;
    }
    process.delete().await.map_err(|e| e.to_string())
}

/// Takes over commands of an earlier agent that are still running or not deleted.
pub(super) fn adopt_leftovers(config: &Config, runtime: &dyn Runtime) {
    let parent = config.root_dir.join(DIRECTORY);
    let left = match fifo::leftovers(&parent) {
        Ok(left) => left,
        Err(error) => {
            tracing::warn!(%error, directory = %parent.display(), "finding the commands of an earlier agent failed");
            return;
        }
    };
    let Some(tasks) = runtime.tasks() else {
        return;
    };
    for (name, fifos) in left {
        // A directory with another name is removed when `fifos` is dropped.
        if let Some((container, id)) = name.rsplit_once('.') {
            tokio::spawn(delete_when_exited(tasks.find(container, id), fifos));
        }
    }
}

/// The runtime's id of a running container.
pub(super) async fn running(server: &Server, place: &PodTarget) -> Result<String, Refusal> {
    let known = server
        .find(place)
        .ok_or_else(|| Refusal(StatusCode::NOT_FOUND, "pod does not exist".into()))?;
    let observed = server
        .parts
        .runtime
        .observe(pod::uid(&known.pod))
        .await
        .map_err(broken)?;
    let found = observed
        .newest(&place.container)
        .filter(|c| c.state == ContainerState::Running);
    found.map(|c| c.id.clone()).ok_or_else(|| {
        Refusal(
            StatusCode::NOT_FOUND,
            format!("container not found ({:?})", place.container),
        )
    })
}

/// Converts the streams to the type of the connection module.
pub(super) fn channels_of(streams: Streams) -> Channels {
    Channels {
        stdin: streams.stdin,
        stdout: streams.stdout,
        stderr: streams.stderr,
        tty: streams.tty,
    }
}

/// The refusal of a request that the runtime did not carry out.
pub(super) fn broken(error: RuntimeError) -> Refusal {
    let code = match (error.kind, error.code) {
        (RuntimeErrorKind::NotFound, _) => StatusCode::NOT_FOUND,
        (_, Some("ResourceExhausted")) => StatusCode::TOO_MANY_REQUESTS,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    Refusal(code, error.message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_protocols_are_served_here_and_older_ones_by_the_runtime() {
        let upgrade = "upgrade";
        let (spdy, socket) = ("x-stream-protocol-version", "sec-websocket-protocol");
        for (kind, name, value, served) in [
            ("SPDY/3.1", spdy, "v4.channel.k8s.io", true),
            (
                "SPDY/3.1",
                spdy,
                "v5.channel.k8s.io, v4.channel.k8s.io",
                true,
            ),
            ("SPDY/3.1", spdy, "v3.channel.k8s.io", false),
            ("websocket", socket, "v5.channel.k8s.io", true),
            ("websocket", socket, "v4.channel.k8s.io", false),
            ("websocket", spdy, "v4.channel.k8s.io", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(upgrade, kind.parse().expect("a value"));
            headers.insert(name, value.parse().expect("a value"));
            assert_eq!(is_supported(&headers), served, "{kind} {name} {value}");
        }
    }

    #[test]
    fn sizes_are_read_from_any_pieces() {
        let size = |width, height| Size { width, height };
        let text = b"{\"Width\":80,\"Height\":24}\n{\"Width\":1,\"Height\":2}\n";
        for cut in 0..=text.len() {
            let mut begun = vec![];
            let mut all = vec![];
            for part in [&text[..cut], &text[cut..]] {
                begun.extend(part);
                all.extend(take_sizes(&mut begun).expect("a value"));
            }
            assert_eq!(all, [size(80, 24), size(1, 2)], "{cut}");
        }
        assert_eq!(take_sizes(&mut b"{\"Width\":70000}".to_vec()), None);
        assert_eq!(take_sizes(&mut b"x".to_vec()), None);
    }
}
