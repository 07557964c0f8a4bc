//! Channels to services behind unix sockets.

use std::time::Duration;

use tonic::transport::{Channel, Endpoint, Error};

/// A channel to the service behind a socket, which is a path or has `unix://` before one. It connects with the first call,
/// and again after the connection broke; an attempt may take as long as `connecting`. To be called within a runtime of tokio.
///
/// # Errors
///
/// No socket can have that name.
pub fn channel(socket: &str, connecting: Duration) -> Result<Channel, Error> {
    let path = socket.strip_prefix("unix://").unwrap_or(socket);
    let endpoint = Endpoint::from_shared(format!("unix://{path}"))?;
    Ok(endpoint.connect_timeout(connecting).connect_lazy())
}
