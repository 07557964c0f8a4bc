//! Channels to services behind unix sockets.

use std::time::Duration;

use tonic::transport::{Channel, Endpoint, Error};

/// Returns a channel to the service behind a socket, which is a path with or without `unix://`. The channel connects at
/// the first call, and again after the connection broke. An attempt may take as long as `connecting`. Must be called
/// within a tokio runtime.
///
/// # Errors
///
/// Fails if no socket can have this name.
pub fn channel(socket: &str, connecting: Duration) -> Result<Channel, Error> {
    let path = socket.strip_prefix("unix://").unwrap_or(socket);
    let endpoint = Endpoint::from_shared(format!("unix://{path}"))?;
    Ok(endpoint.connect_timeout(connecting).connect_lazy())
}
