//! Queries over UDP.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::time::sleep;
use tracing::warn;

use super::responder::{Responder, Step};
use crate::query::Transport;

/// Longest query: one question, and an OPT record with options.
const MAX_QUERY: usize = 4096;
/// Pause after an error of the socket, so that a lasting error does not use a processor.
const ERROR_PAUSE: Duration = Duration::from_millis(100);

/// Answers the queries of one socket until the task is cancelled.
pub(crate) async fn serve(socket: UdpSocket, responder: Arc<Responder>) {
    let socket = Arc::new(socket);
    let mut buffer = vec![0; MAX_QUERY];
    loop {
        let (length, client) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                warn!("receiving DNS queries failed: {error}");
                sleep(ERROR_PAUSE).await;
                continue;
            }
        };
        // A datagram that fills the buffer may have been cut. Port 0 cannot receive a response.
        if length == buffer.len() || client.port() == 0 {
            continue;
        }
        match responder.respond(&buffer[..length], client.ip(), Transport::Udp) {
            Step::Drop => {}
            // If sending fails, the client repeats the query.
            Step::Send(response) => drop(socket.send_to(&response, client).await),
            Step::Wait(waiting) => {
                let (socket, responder) = (socket.clone(), responder.clone());
                tokio::spawn(async move {
                    let response = responder.finish(waiting).await;
                    drop(socket.send_to(&response, client).await);
                });
            }
        }
    }
}
