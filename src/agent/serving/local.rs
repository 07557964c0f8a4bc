//! A unix socket in the root directory for Holdfast's own commands, accessible to root
//! only. `GET /explain/NAMESPACE/NAME`, `GET /record/NAMESPACE/NAME` and `GET /gc` return
//! JSON; `POST /gc` removes what `GET /gc` reports.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;

use crate::doctor::hidden_namespaces;
use crate::image::collect;
use crate::pod::journal::Journals;
use holdfast_config::Config;
use holdfast_core::pod::explain::{self, Fetching};
use holdfast_core::pod::record::{FORMAT, Report};
use holdfast_cri::Runtime;
use holdfast_sys::clock::Clock;
use holdfast_sys::link;

/// The socket's name, below the root directory.
pub const SOCKET: &str = "holdfast.sock";
/// Limit for parallel connections; further ones wait.
const MAX_CONNECTIONS: usize = 8;
/// Timeout for an answer, including the removal of images.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(600);

/// What the local socket uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub runtime: Arc<dyn Runtime>,
    pub clock: Clock,
    pub journals: Arc<Journals>,
    pub images: Arc<collect::Parts>,
}

/// Serves until the process exits. If the socket cannot be created, the agent runs without it.
pub async fn run(parts: Arc<Parts>) {
    let path = parts.config.root_dir.join(SOCKET);
    let listener = match link::listen(&path) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::warn!(%error, socket = %path.display(), "`holdfast explain` will not work: creating the socket failed");
            return std::future::pending().await;
        }
    };
    let serve = |stream| {
        let parts = Arc::clone(&parts);
        async move {
            let service = hyper::service::service_fn(|request| {
                let parts = Arc::clone(&parts);
                async move { Ok::<_, Infallible>(answer(&parts, &request).await) }
            });
            let serve = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service);
            // Does not block on a client that has stopped reading.
            if tokio::time::timeout(ANSWER_TIMEOUT, serve).await.is_err() {
                tracing::debug!("a request on the local socket timed out");
            }
        }
    };
    link::serve(listener, MAX_CONNECTIONS, serve).await;
}

/// The runtime's pulls in progress; `None` if the runtime does not report them.
async fn fetching(parts: &Parts) -> Option<Fetching> {
    match parts.runtime.fetching().await {
        Ok(fetching) => Some(Fetching {
            pulls: parts.images.images.pulls_in_progress(),
            ..fetching
        }),
        Err(error) => {
            tracing::debug!(%error, "cannot read the progress of pulls from the runtime");
            None
        }
    }
}

/// The explanation of a pod; `None` if the agent does not know a pod of this name.
async fn explanation(parts: &Parts, namespace: &str, name: &str) -> Option<Answer> {
    let (uid, journal) = parts.journals.find(namespace, name).into_iter().next()?;
    let fetching = if journal.is_pulling() {
        fetching(parts).await
    } else {
        None
    };
    let mut explanation = explain::explain(namespace, name, &uid, journal, fetching);
    if explanation.fails_to_stop_sandbox() {
        explanation = explanation.with_hidden_namespaces(&hidden_namespaces());
    }
    Some(serde_json::to_string(&explanation))
}

/// The recorded turns of a pod's worker; `None` if the agent does not know a pod of this name.
fn record(parts: &Parts, namespace: &str, name: &str) -> Option<Answer> {
    let report = Report {
        format: FORMAT,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        node: parts.config.node_name.clone(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        at: parts.clock.now(),
        record: parts.journals.record(namespace, name)?,
    };
    Some(serde_json::to_string(&report))
}

type Answer = serde_json::Result<String>;

async fn answer(parts: &Parts, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let respond = |status: StatusCode, text: String| {
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = status;
        response
    };
    let segments: Vec<&str> = request.uri().path().split('/').skip(1).collect();
    if let ["gc"] = segments.as_slice() {
        let report = match *request.method() {
            Method::POST => collect::collect(&parts.images).await,
            _ => collect::report(&parts.images).await,
        };
        let text = report.map_err(|e| e.to_string());
        let text = text.and_then(|r| serde_json::to_string(&r).map_err(|e| e.to_string()));
        return match text {
            Ok(text) => respond(StatusCode::OK, text),
            Err(error) => respond(StatusCode::INTERNAL_SERVER_ERROR, error),
        };
    }
    let [question @ ("explain" | "record"), namespace, name] = segments.as_slice() else {
        return respond(
            StatusCode::NOT_FOUND,
            "unknown path: use /explain/NAMESPACE/NAME, /record/NAMESPACE/NAME or /gc".into(),
        );
    };
    let answer = match *question {
        "explain" => explanation(parts, namespace, name).await,
        _ => record(parts, namespace, name),
    };
    match answer {
        Some(Ok(text)) => respond(StatusCode::OK, text),
        Some(Err(error)) => respond(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
        None => {
            let node = &parts.config.node_name;
            let text = format!(
                "the agent of node {node} knows no pod {namespace}/{name}: find the pod's node with `kubectl get pod -o wide`"
            );
            respond(StatusCode::NOT_FOUND, text)
        }
    }
}
