//! Client of the agent's local socket, for `holdfast explain`, `holdfast gc` and `holdfast agent record`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;

use holdfast_core::json;
use holdfast_core::node::collection;
use holdfast_core::pod::explain::Explanation;
use holdfast_core::pod::record::Report;

/// Maximum size of an answer, in bytes: a record has the pod and some dozens of observations.
const MAX_ANSWER_BYTES: usize = 16 << 20;
/// Timeout of an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of the removal of images.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(600);

/// Queries the agent at this socket why a pod is not running.
pub async fn explain(socket: &Path, namespace: &str, name: &str) -> anyhow::Result<Explanation> {
    let body = get(socket, &format!("/explain/{namespace}/{name}")).await?;
    serde_json::from_slice(&body).context(OTHER_VERSION)
}

/// Queries the inputs and the decisions of a pod's worker.
pub async fn record(socket: &Path, namespace: &str, name: &str) -> anyhow::Result<Report> {
    let body = get(socket, &format!("/record/{namespace}/{name}")).await?;
    json::read(&body).context(OTHER_VERSION)
}

/// Queries which images and containers a collection would remove; without `dry_run`, the agent removes them.
pub async fn gc(socket: &Path, dry_run: bool) -> anyhow::Result<collection::Report> {
    let body = match dry_run {
        true => get(socket, "/gc").await?,
        false => request_with_timeout(REMOVAL_TIMEOUT, socket, hyper::Method::POST, "/gc").await?,
    };
    serde_json::from_slice(&body).context(OTHER_VERSION)
}

const OTHER_VERSION: &str =
    "the agent's answer cannot be decoded; use the `holdfast` of the agent's version";

async fn get(socket: &Path, path: &str) -> anyhow::Result<Bytes> {
    request_with_timeout(ANSWER_TIMEOUT, socket, hyper::Method::GET, path).await
}

async fn request_with_timeout(
    timeout: Duration,
    socket: &Path,
    method: hyper::Method,
    path: &str,
) -> anyhow::Result<Bytes> {
    let response = tokio::time::timeout(timeout, send(socket, method, path)).await;
    let (status, body) = response
        .with_context(|| format!("the agent at {} does not answer", socket.display()))??;
    if !status.is_success() {
        bail!("{}", String::from_utf8_lossy(&body));
    }
    Ok(body)
}

async fn send(
    socket: &Path,
    method: hyper::Method,
    path: &str,
) -> anyhow::Result<(hyper::StatusCode, Bytes)> {
    let stream = tokio::net::UnixStream::connect(socket).await.with_context(|| {
        format!(
            "no agent answers at {}: run this as root on the pod's node, with the agent's --root-dir or the cluster's --name",
            socket.display()
        )
    })?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let driver = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(connection));
    let request = hyper::Request::builder()
        .method(method)
        .uri(path)
        .header(hyper::header::HOST, "localhost")
        .body(Empty::<Bytes>::new())?;
    let answer = sender.send_request(request).await?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES)
        .collect()
        .await
        .map_err(|e| anyhow::anyhow!("{e}"))?
        .to_bytes();
    drop(driver);
    Ok((status, body))
}
