//! `GET /logs/?query=…`: what the node's services have logged (kubelet spec, 13.2).

use std::process::Stdio;
use std::time::Duration;

use hyper::{Response, StatusCode};
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;
use tokio::sync::mpsc;

use super::Refusal;
use super::logs;
use crate::core::serving::log_query::{self, LogQuery, Searched};
use crate::https::Body;

/// How long a search may take.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(30);
/// How much is read at once.
const PIECE: usize = 64 << 10;

/// Answers a search; none if nothing is searched.
pub async fn search(query: &str) -> Result<Option<Response<Body>>, Refusal> {
    let Some(query) =
        LogQuery::parse(query).map_err(|why| Refusal(StatusCode::UNPROCESSABLE_ENTITY, why))?
    else {
        return Ok(None);
    };
    match &query.of {
        Searched::File(path) => logs::of_node(path).await.map(Some),
        Searched::Services(services) => of_services(&query, services).await.map(Some),
    }
}

/// From the journal; what is not there, from a service's own file.
async fn of_services(query: &LogQuery, services: &[String]) -> Result<Response<Body>, Refusal> {
    let mut command = Command::new("journalctl");
    command
        .args(query.journal(services))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) if query.is_narrowed() => {
            return Err(Refusal(
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("the node's journal cannot be read: journalctl: {error}"),
            ));
        }
        Err(_) => return own_file(services).await,
    };
    let Some(mut out) = child.stdout.take() else {
        return Err(Refusal(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the node's journal cannot be read".into(),
        ));
    };
    let mut first = vec![0; PIECE];
    let begun = tokio::time::timeout(SEARCH_TIMEOUT, out.read(&mut first)).await;
    let length = begun
        .map_err(|_| {
            Refusal(
                StatusCode::GATEWAY_TIMEOUT,
                "the node's journal does not answer".into(),
            )
        })?
        .unwrap_or(0);
    first.truncate(length);
    let nothing = length == 0 || first.starts_with(b"-- No entries --");
    if nothing && !query.is_narrowed() {
        return own_file(services).await;
    }
    let (sender, pieces) = mpsc::channel(2);
    tokio::spawn(async move {
        let mut piece = first;
        // The program ends with this task, and with who reads.
        let copy = async {
            while !piece.is_empty() && sender.send(std::mem::take(&mut piece).into()).await.is_ok()
            {
                piece = vec![0; PIECE];
                let length = out.read(&mut piece).await.unwrap_or(0);
                piece.truncate(length);
            }
        };
        if tokio::time::timeout(SEARCH_TIMEOUT, copy).await.is_err() {
            tracing::warn!("a search of the node's journal took too long and was ended");
        }
        drop(child);
    });
    Ok(logs::stream(pieces))
}

async fn own_file(services: &[String]) -> Result<Response<Body>, Refusal> {
    for path in services
        .iter()
        .flat_map(|service| log_query::files_of(service))
    {
        if let Ok(answer) = logs::of_file(&path).await {
            return Ok(answer);
        }
    }
    Err(Refusal(
        StatusCode::NOT_FOUND,
        format!(
            "neither the journal nor /var/log has logs of {}",
            services.join(", ")
        ),
    ))
}
