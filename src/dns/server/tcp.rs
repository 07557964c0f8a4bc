//! Queries over TCP (RFC 7766): several queries of a connection may wait at the same time, and responses may overtake each
//! other. The number of connections is limited, in total and by client; idle and slow connections are closed.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::warn;

use super::responder::{Responder, Step};
use crate::query::Transport;

/// Most connections of one listener.
const MAX_CONNECTIONS: usize = 128;
/// Most connections of one client.
const MAX_CLIENT_CONNECTIONS: usize = 16;
/// Most queries of a connection that wait for upstreams.
const MAX_PIPELINED: usize = 8;
/// Most responses that wait until the client reads; a response may have 64 KiB.
const MAX_RESPONSES: usize = 4;
/// Longest query: one question, and an OPT record with options.
const MAX_QUERY: u16 = 4096;
/// How long a connection may be idle. Longer than the time for a query to upstreams.
const IDLE: Duration = Duration::from_secs(10);
/// How long the rest of a message may take.
const MESSAGE: Duration = Duration::from_secs(2);
/// How long a client may take to read a response.
const WRITE: Duration = Duration::from_secs(5);
/// Pause after `accept` fails, mostly for lack of file descriptors.
const ERROR_PAUSE: Duration = Duration::from_millis(100);

/// The connections of each client.
#[derive(Clone, Default)]
struct Connections(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// One counted connection.
struct Counted {
    connections: Connections,
    client: IpAddr,
}

impl Connections {
    fn add(&self, client: IpAddr) -> Option<Counted> {
        let mut clients = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let total: usize = clients.values().sum();
        let own = clients.get(&client).copied().unwrap_or_default();
        if total >= MAX_CONNECTIONS || own >= MAX_CLIENT_CONNECTIONS {
            return None;
        }
        clients.insert(client, own + 1);
        Some(Counted {
            connections: self.clone(),
            client,
        })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut clients = self
            .connections
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = clients.get_mut(&self.client) {
            *own -= 1;
            if *own == 0 {
                clients.remove(&self.client);
            }
        }
    }
}

/// Accepts connections until the task is cancelled, which closes them.
pub(crate) async fn serve(listener: TcpListener, responder: Arc<Responder>) {
    let connections = Connections::default();
    let mut tasks = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = tasks.join_next() => continue,
        };
        let (stream, client) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!("accepting DNS connections failed: {error}");
                sleep(ERROR_PAUSE).await;
                continue;
            }
        };
        // Above the limit, the connection is closed at once.
        if let Some(counted) = connections.add(client.ip()) {
            let responder = responder.clone();
            tasks.spawn(async move {
                let client = counted.client;
                connection(stream, client, responder).await;
                drop(counted);
            });
        }
    }
}

async fn connection(stream: TcpStream, client: IpAddr, responder: Arc<Responder>) {
    let _small_segments = stream.set_nodelay(true);
    let (reader, writer) = stream.into_split();
    let (sender, responses) = mpsc::channel(MAX_RESPONSES);
    tokio::join!(
        read(reader, client, responder, sender),
        write(writer, responses)
    );
}

/// Reads queries until the client closes its side, is idle or breaks the framing. Then waits for outstanding responses.
async fn read(
    mut reader: OwnedReadHalf,
    client: IpAddr,
    responder: Arc<Responder>,
    responses: mpsc::Sender<Vec<u8>>,
) {
    let places = Arc::new(Semaphore::new(MAX_PIPELINED));
    let mut waiting = JoinSet::new();
    while let Ok(Ok(length)) = timeout(IDLE, reader.read_u16()).await {
        if length > MAX_QUERY {
            break;
        }
        let mut packet = vec![0; usize::from(length)];
        if !matches!(
            timeout(MESSAGE, reader.read_exact(&mut packet)).await,
            Ok(Ok(_))
        ) {
            break;
        }
        match responder.respond(&packet, client, Transport::Tcp) {
            // A client that sends no queries has no use for the connection.
            Step::Drop => break,
            Step::Send(response) => {
                if responses.send(response).await.is_err() {
                    return;
                }
            }
            Step::Wait(query) => {
                let Ok(place) = places.clone().acquire_owned().await else {
                    return;
                };
                let (responder, responses) = (responder.clone(), responses.clone());
                waiting.spawn(async move {
                    let response = responder.finish(query).await;
                    // The client has gone if this fails.
                    drop(responses.send(response).await);
                    drop(place);
                });
            }
        }
        while waiting.try_join_next().is_some() {}
    }
    while waiting.join_next().await.is_some() {}
}

/// Writes responses until there are no more senders. An error ends the connection: the reader's next send fails.
async fn write(mut writer: OwnedWriteHalf, mut responses: mpsc::Receiver<Vec<u8>>) {
    while let Some(response) = responses.recv().await {
        if !matches!(
            timeout(WRITE, write_message(&mut writer, &response)).await,
            Ok(Ok(()))
        ) {
            return;
        }
    }
}

async fn write_message(writer: &mut OwnedWriteHalf, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(io::Error::other)?;
    let mut framed = Vec::with_capacity(message.len() + 2);
    framed.extend_from_slice(&length.to_be_bytes());
    framed.extend_from_slice(message);
    writer.write_all(&framed).await
}
