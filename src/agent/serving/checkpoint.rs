//! `POST /checkpoint/…`: the runtime writes a container's state to a file (KEP-2008).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use serde_json::json;

use super::Refusal;
use super::Server;
use super::exec;
use holdfast_core::serving::PodTarget;
use holdfast_core::serving::query;
use holdfast_host::{HostError, blocking};
use holdfast_https::{Body, text};
use holdfast_sys::failure::doing;
use holdfast_sys::machine::Room;

/// A checkpoint is as large as the container's memory, so it is created only while at
/// least a tenth of the disk is free (CVE-2025-0426).
const FREE: u64 = 10;

/// Creates a checkpoint.
pub async fn make(
    server: &Arc<Server>,
    place: &PodTarget,
    text_of: &str,
) -> Result<Response<Body>, Refusal> {
    let timeout = query::pairs(text_of)
        .into_iter()
        .rfind(|(key, _)| key == "timeout")
        .map(|(_, value)| value);
    let seconds = timeout.map_or(Ok(0), |t| t.parse::<u32>());
    let seconds = seconds.map_err(|_| {
        Refusal(
            StatusCode::NOT_FOUND,
            "cannot parse value of timeout parameter".into(),
        )
    })?;
    let id = exec::running(server, place).await?;
    let dir = server.parts.config.root_dir.join("checkpoints");
    let (own, made) = (dir.clone(), dir.clone());
    let failed = |why: &dyn std::fmt::Display| {
        let (namespace, pod, container) = (&place.namespace, &place.pod, &place.container);
        Refusal(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("checkpointing of {namespace}/{pod}/{container} failed ({why})"),
        )
    };
    let prepared = blocking(move || prepare(&own)).await;
    prepared.map_err(|e| failed(&e))?;
    let at = server
        .parts
        .clock
        .now()
        .strftime("%Y-%m-%dT%H:%M:%SZ")
        .to_string();
    let path = made
        .join(format!(
            "checkpoint-{}_{}-{}-{at}.tar",
            place.pod, place.namespace, place.container
        ))
        .display()
        .to_string();
    let done = server
        .parts
        .runtime
        .checkpoint(&id, &path, Duration::from_secs(seconds.into()))
        .await;
    done.map_err(|e| failed(&e))?;
    let mut response = text(StatusCode::OK, json!({"items": [path]}).to_string());
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

fn prepare(dir: &Path) -> Result<(), HostError> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(doing(format!("cannot create {}", dir.display())))?;
    let room = Room::of(dir)?;
    if room.available < room.capacity / FREE {
        return Err(format!(
            "the disk of {} has only {} of {} bytes left: remove old checkpoints",
            dir.display(),
            room.available,
            room.capacity
        )
        .into());
    }
    Ok(())
}
