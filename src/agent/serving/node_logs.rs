//! `GET /logs/?query=…`: logs of the node's services (KEP-2258; `pkg/kubelet/kubelet_server_journal.go`).

use std::process::Stdio;
use std::time::Duration;

use hyper::body::Bytes;
use hyper::{Response, StatusCode};
use tokio::io::AsyncReadExt as _;
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::Refusal;
use super::logs;
use holdfast_core::serving::log_query::{self, LogQuery, LogSource};
use holdfast_https::Body;

/// Timeout of a query.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(30);
/// Size of a read buffer, in bytes.
const BUFFER_SIZE: usize = 64 << 10;

/// Answers a query; `None` if the request is not a query.
pub async fn search(query: &str) -> Result<Option<Response<Body>>, Refusal> {
    let Some(query) =
        LogQuery::parse(query).map_err(|why| Refusal(StatusCode::UNPROCESSABLE_ENTITY, why))?
    else {
        return Ok(None);
    };
    match &query.source {
        LogSource::File(path) => logs::serve_node_log(path).await.map(Some),
        LogSource::Services(services) => of_services(&query, services).await.map(Some),
    }
}

/// Reads the journal. If it has no entries, reads the service's own log file.
async fn of_services(query: &LogQuery, services: &[String]) -> Result<Response<Body>, Refusal> {
    let mut command = Command::new("journalctl");
    command
        .args(query.journal(services))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) if query.has_filters() => {
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
    let errors = errors_of(&mut child);
    let mut first = vec![0; BUFFER_SIZE];
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
    if nothing && !query.has_filters() {
        return own_file(services).await;
    }
    let (sender, pieces) = mpsc::channel(2);
    tokio::spawn(async move {
        // The program is stopped when this task returns or the client disconnects.
        let copy = forward_output(first, out, errors, sender);
        if tokio::time::timeout(SEARCH_TIMEOUT, copy).await.is_err() {
            tracing::warn!("a search of the node's journal timed out and was stopped");
        }
        drop(child);
    });
    Ok(logs::stream(pieces))
}

/// Forwards the output already read, then further output, and finally the errors.
async fn forward_output(
    first: Vec<u8>,
    mut out: ChildStdout,
    errors: JoinHandle<Vec<u8>>,
    to: mpsc::Sender<Bytes>,
) {
    let mut piece = first;
    while !piece.is_empty() && to.send(std::mem::take(&mut piece).into()).await.is_ok() {
        piece = vec![0; BUFFER_SIZE];
        let length = out.read(&mut piece).await.unwrap_or(0);
        piece.truncate(length);
    }
    let errors = tokio::select! {
        errors = errors => errors.unwrap_or_default(),
        () = to.closed() => return,
    };
    if !errors.is_empty() {
        // The client may have disconnected.
        let _ = to.send(errors.into()).await;
    }
}

/// Collects the program's error output.
fn errors_of(child: &mut Child) -> JoinHandle<Vec<u8>> {
    let errors = child.stderr.take();
    tokio::spawn(async move {
        let mut text = vec![];
        if let Some(errors) = errors
            && let Err(error) = errors.take(BUFFER_SIZE as u64).read_to_end(&mut text).await
        {
            tracing::debug!(%error, "cannot read the error output of a search");
        }
        text
    })
}

async fn own_file(services: &[String]) -> Result<Response<Body>, Refusal> {
    for path in services
        .iter()
        .flat_map(|service| log_query::files_of(service))
    {
        if let Ok(answer) = logs::serve_file(&path).await {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_error_output_of_a_program_comes_last() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo wrong >&2; echo out; exit 1"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("a shell");
        let out = child.stdout.take().expect("its output");
        let errors = errors_of(&mut child);
        let (sender, mut pieces) = mpsc::channel(8);
        forward_output(b"first\n".to_vec(), out, errors, sender).await;
        let mut text = vec![];
        while let Some(piece) = pieces.recv().await {
            text.extend_from_slice(&piece);
        }
        assert_eq!(text, b"first\nout\nwrong\n");
        child.wait().await.expect("ended");
    }
}
