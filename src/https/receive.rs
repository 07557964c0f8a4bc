//! Receives the bodies of requests, with limits on size and time.

use std::time::Duration;

use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::Request;
use hyper::body::{Bytes, Incoming};
use hyper::http::request::Parts;

use super::ConnectionSlot;

/// Why a body was not received.
#[derive(Debug, thiserror::Error)]
pub enum NotReceived {
    /// The body is longer than this number of bytes.
    #[error("the body is longer than {0} bytes")]
    TooLong(usize),
    /// The body did not arrive within this time.
    #[error("the body did not arrive within {} s", .0.as_secs_f32())]
    TooSlow(Duration),
    /// The connection broke.
    #[error("reading the body failed: {0}")]
    Broken(String),
}

/// Reads a request's body of at most `max_bytes`, which must be complete within `timeout`. Until then, the connection
/// may be closed to make room for others.
pub async fn receive(
    request: Request<Incoming>,
    max_bytes: usize,
    timeout: Duration,
) -> (Parts, Result<Bytes, NotReceived>) {
    let (head, body) = request.into_parts();
    let _receiving = head
        .extensions
        .get::<ConnectionSlot>()
        .and_then(ConnectionSlot::receive);
    let collected = tokio::time::timeout(timeout, Limited::new(body, max_bytes).collect()).await;
    let received = match collected {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(NotReceived::TooLong(max_bytes)),
        Ok(Err(error)) => Err(NotReceived::Broken(error.to_string())),
        Err(_) => Err(NotReceived::TooSlow(timeout)),
    };
    (head, received)
}
