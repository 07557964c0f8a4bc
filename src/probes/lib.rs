//! The network requests of probes and lifecycle hooks, and nothing else. `core::pod::probe` decides what the answers
//! mean.
//!
//! Every request has a deadline, reads a bounded body, uses a new connection, verifies no certificate and uses no proxy
//! (`pkg/probe/http/http.go`).

mod grpc;
mod http;

use std::time::Duration;

use async_trait::async_trait;

use holdfast_core::pod::probe::{Http, Reply};

/// Why an HTTP request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    /// The server answered with plain HTTP where TLS was requested.
    #[error("server gave HTTP response to HTTPS client")]
    Plain,
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

/// The network, as probes use it.
#[async_trait]
pub trait Dialer: Send + Sync + 'static {
    /// Sends an HTTP GET; follows redirects on the same host, with ten requests at most.
    async fn http(&self, request: &Http, timeout: Duration) -> Result<Reply, HttpError>;
    /// Opens a connection and closes it at once.
    async fn tcp(&self, host: &str, port: u16, timeout: Duration) -> Result<(), String>;
    /// Checks the health of a gRPC service.
    async fn grpc(
        &self,
        host: &str,
        port: u16,
        service: &str,
        timeout: Duration,
    ) -> Result<(), String>;
}

/// The real network.
pub struct Network;

pub(crate) async fn connect(host: &str, port: u16) -> Result<tokio::net::TcpStream, String> {
    let shown = if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    };
    tokio::net::TcpStream::connect((host, port))
        .await
        .map_err(|error| {
            let why = match error.kind() {
                std::io::ErrorKind::ConnectionRefused => "connect: connection refused".to_owned(),
                std::io::ErrorKind::HostUnreachable => "connect: no route to host".to_owned(),
                _ => error.to_string(),
            };
            format!("dial tcp {shown}: {why}")
        })
}

#[async_trait]
impl Dialer for Network {
    async fn http(&self, request: &Http, timeout: Duration) -> Result<Reply, HttpError> {
        let late = || {
            HttpError::Failed(
                "context deadline exceeded (Client.Timeout exceeded while awaiting headers)".into(),
            )
        };
        tokio::time::timeout(timeout, http::get(request))
            .await
            .map_err(|_| late())?
    }

    async fn tcp(&self, host: &str, port: u16, timeout: Duration) -> Result<(), String> {
        match tokio::time::timeout(timeout, connect(host, port)).await {
            Ok(result) => result.map(|_| ()),
            Err(_) => Err(format!("dial tcp {host}:{port}: i/o timeout")),
        }
    }

    async fn grpc(
        &self,
        host: &str,
        port: u16,
        service: &str,
        timeout: Duration,
    ) -> Result<(), String> {
        grpc::check(host, port, service, timeout).await
    }
}

#[cfg(test)]
mod tests;
