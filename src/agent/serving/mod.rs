//! The agent's HTTP API: the kubelet's endpoints on the kubelet's port (`pkg/kubelet/server/server.go`).
//!
//! Every request is authenticated and authorized before it is routed. Data is read on request.

mod access;
mod cadvisor;
mod checkpoint;
mod exec;
mod figures;
mod files;
mod gzip;
pub(crate) mod listen;
pub mod local;
mod logs;
pub(crate) mod metrics;
mod node_logs;
pub mod pod_resources;
mod sessions;
mod stats;
mod streams;
mod views;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response, StatusCode};
use jiff::Timestamp;
use kube::ResourceExt as _;
use tokio::sync::watch;
use tracing::Instrument as _;

use super::metrics::{Metrics, RequestInFlight};
use super::pod::heartbeats::Heartbeats;
use super::pod::journal::Journals;
use super::pod::table::{Known, PodTable};
use super::volume::csi::Csi;
use access::Access;
use holdfast_config::Config;
use holdfast_core::pod;
use holdfast_core::serving::exposition::Page;
use holdfast_core::serving::{self, Endpoint, PodTarget, Route};
use holdfast_cri::{ImageFilesystem, Runtime, RuntimeError};
use holdfast_host::PodHost;
use holdfast_https as https;
use holdfast_https::{Body, Limits, Peer, Protocol, text};
use holdfast_kubeapi::reviews::Reviews;
use holdfast_sys::clock::Clock;
use holdfast_sys::machine::Machine;
use holdfast_sys::service;
use listen::Part;

pub(crate) use listen::Unserved;
pub use sessions::Sessions;

/// Limits of the main listener.
const MAIN_LIMITS: Limits = Limits {
    evict_unauthenticated: false,
    connections: 512,
    idle: Some(Duration::from_secs(90)),
};
/// Limits of the other listeners.
const OTHER_LIMITS: Limits = Limits {
    evict_unauthenticated: false,
    connections: 32,
    idle: Some(Duration::from_secs(30)),
};

/// An error response: the status code and a sentence.
#[derive(Debug, PartialEq, Eq)]
struct Refusal(StatusCode, String);

impl Refusal {
    fn of((code, why): serving::Rejection) -> Refusal {
        Refusal(
            StatusCode::from_u16(code).unwrap_or(StatusCode::BAD_REQUEST),
            why,
        )
    }
}

/// What the server uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub runtime: Arc<dyn Runtime>,
    pub host: Arc<dyn PodHost>,
    pub clock: Clock,
    pub machine: Arc<Machine>,
    pub metrics: Arc<Metrics>,
    pub table: watch::Receiver<PodTable>,
    pub journals: Arc<Journals>,
    pub heartbeats: Arc<Heartbeats>,
    pub csi: Arc<Csi>,
    /// The start time of this agent.
    pub started: Timestamp,
    pub managers: metrics::Parts,
    pub listen: listen::Parts,
}

/// The server of the HTTP API.
pub(crate) struct Server {
    parts: Parts,
    access: Access,
    figures: figures::Measurements,
    sessions: Sessions,
    /// The directory of the runtime's images, and the sandbox image.
    images: tokio::sync::OnceCell<(PathBuf, String)>,
}

/// The method and the path family of a request, for metrics and traces.
fn method_and_family(request: &Request<Incoming>) -> (&'static str, &'static str) {
    let method = serving::metric_method(request.method().as_str());
    (method, serving::metric_path(request.uri().path()))
}

impl Server {
    /// Finds the pod of a path.
    fn find(&self, place: &PodTarget) -> Option<Known> {
        let fits = |known: &&Known| {
            let pod = &known.pod;
            let uid = place.uid.as_ref().is_none_or(|uid| {
                pod::uid(pod) == uid || known.object.as_ref().is_some_and(|o| pod::uid(o) == uid)
            });
            uid && pod.name_any() == place.pod
                && pod.namespace().unwrap_or_default() == place.namespace
        };
        self.parts.table.borrow().iter().find(fits).cloned()
    }

    /// The runtime's image directory and sandbox image, read once.
    async fn image_settings(&self) -> Result<&(PathBuf, String), RuntimeError> {
        let ask = || async {
            let stock = self.parts.runtime.image_inventory().await?;
            let pinned = stock.images.iter().filter(|i| i.pinned);
            let mut names = pinned.flat_map(|i| &i.names);
            let sandbox = names.find(|n| n.contains("pause") && !n.contains('@'));
            let sandbox = sandbox.cloned().unwrap_or_default();
            Ok((stock.mountpoint, sandbox))
        };
        self.images.get_or_try_init(ask).await
    }

    /// The filesystem of the runtime's images; empty if the runtime does not report it.
    async fn image_filesystem(&self) -> ImageFilesystem {
        let answer = self.parts.runtime.image_filesystem().await;
        answer.unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot read the runtime's image filesystem");
            ImageFilesystem::default()
        })
    }

    /// Counts a request. It is in flight until the returned value is dropped. The request, the answer's body and an
    /// upgraded session each hold a reference.
    fn count(
        &self,
        request: &mut Request<Incoming>,
        (method, path): (&'static str, &'static str),
        server: &'static str,
    ) -> Arc<RequestInFlight> {
        let metrics = &self.parts.metrics;
        let in_flight = metrics.http(method, path, server, serving::is_long_running(path));
        let in_flight = Arc::new(in_flight);
        request.extensions_mut().insert(Arc::clone(&in_flight));
        in_flight
    }

    async fn answer(self: Arc<Self>, peer: Peer, mut request: Request<Incoming>) -> Response<Body> {
        let (method, path) = method_and_family(&request);
        let in_flight = self.count(&mut request, (method, path), "readwrite");
        let needs = serving::required_permission(request.method().as_str(), request.uri().path());
        let span = tracing::info_span!(target: "trace::http", "http", otel.name = format!("{method} /{path}"), otel.kind = "server");
        let answer = async {
            match self.access.check(&peer, request.headers(), &needs).await {
                Ok(()) => Arc::clone(&self).serve(request).await,
                Err(refusal) => refusal,
            }
        };
        https::keep_with_body(answer.instrument(span).await, in_flight)
    }

    async fn serve(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        let endpoint = match serving::route(request.method().as_str(), request.uri().path()) {
            Route::Found(endpoint) => endpoint,
            Route::MethodNotAllowed => {
                return text(StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed");
            }
            Route::NotFound => return text(StatusCode::NOT_FOUND, "404 page not found"),
        };
        if let Some(Refusal(code, why)) = self.disabled_error(&endpoint) {
            return text(code, why);
        }
        self.serve_endpoint(&endpoint, request)
            .await
            .unwrap_or_else(|Refusal(code, why)| text(code, why))
    }

    /// The error response of a disabled endpoint.
    fn disabled_error(&self, endpoint: &Endpoint) -> Option<Refusal> {
        let config = &self.parts.config.serving;
        if !config.debugging {
            return serving::disabled_response(endpoint).map(Refusal::of);
        }
        let why = match endpoint {
            Endpoint::Files(_) if !config.system_logs => "logs endpoint is disabled.",
            Endpoint::Verbosity if !config.debug_flags => "flags endpoint is disabled.",
            _ => return None,
        };
        Some(Refusal(StatusCode::METHOD_NOT_ALLOWED, why.into()))
    }

    async fn serve_endpoint(
        self: &Arc<Self>,
        endpoint: &Endpoint,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Refusal> {
        let query = request.uri().query().unwrap_or_default().to_owned();
        match endpoint {
            Endpoint::Health(check) => Ok(views::health(
                &self.parts.config,
                &self.parts.heartbeats,
                check,
                &query,
            )),
            Endpoint::Pods => Ok(views::pods(self)),
            Endpoint::RunningPods => views::running(self).await,
            Endpoint::Config => Ok(views::config(self)),
            Endpoint::Status => Ok(views::status(self)),
            Endpoint::Flags => Ok(views::flags()),
            Endpoint::Logs(place) => logs::serve_container_log(self, place, &query).await,
            Endpoint::Files(path) if path.is_empty() && self.parts.config.serving.log_query => {
                match node_logs::search(&query).await? {
                    Some(answer) => Ok(answer),
                    None => logs::serve_node_log(path).await,
                }
            }
            Endpoint::Files(path) => logs::serve_node_log(path).await,
            Endpoint::Checkpoint(place) => checkpoint::make(self, place, &query).await,
            Endpoint::Explain(place) => views::explanation(self, place),
            Endpoint::Verbosity => views::verbosity(request).await,
            Endpoint::Run(place) => streams::run(self, place, &query).await,
            Endpoint::Exec(_) | Endpoint::Attach(_) | Endpoint::PortForward(_) => {
                streams::serve_stream(self, endpoint, request).await
            }
            Endpoint::Stats => stats::summary(self, &query).await,
            Endpoint::Metrics(part) => {
                let page = metrics::part(self, part).await?;
                gzip::compressed(request.headers(), page).await
            }
        }
    }
}

/// Serves until the process exits.
pub async fn run(parts: Parts, reviews: Option<Arc<dyn Reviews>>, sessions: Sessions) {
    let serving = parts.config.serving.clone();
    if !serving.enabled {
        parts.listen.unserved.mark_tried();
        service::ready();
        return std::future::pending().await;
    }
    exec::adopt_leftovers(&parts.config, &*parts.runtime);
    let access = Access::new(serving.clone(), &parts.config.node_name, reviews);
    let server = Arc::new(Server {
        parts,
        access,
        figures: figures::Measurements::default(),
        sessions,
        images: tokio::sync::OnceCell::new(),
    });
    if !serving.reviews && serving.anonymous {
        tracing::warn!(address = %serving.main, "every client may do everything over this agent's HTTP API: set authentication and authorization in its configuration");
    }
    let protocol = Protocol {
        only_tls13: serving.tls.only_tls13,
        suites: serving.tls.cipher_suites.clone(),
        groups: serving.tls.key_exchanges.clone(),
    };
    let main = async {
        let tls = listen::tls(&server.parts.listen, &protocol).await;
        let listener =
            listen::bind_with_retries(&server.parts.listen, Part::Main, serving.main).await;
        service::ready();
        let server = Arc::clone(&server);
        https::serve(listener, Some(tls), MAIN_LIMITS, move |peer, request| {
            Arc::clone(&server).answer(peer, request)
        })
        .await;
    };
    let read_only = async {
        let Some(address) = serving.read_only else {
            return std::future::pending().await;
        };
        let listener =
            listen::bind_with_retries(&server.parts.listen, Part::ReadOnly, address).await;
        let server = Arc::clone(&server);
        https::serve(
            listener,
            None,
            OTHER_LIMITS,
            move |_, mut request: Request<Incoming>| {
                let server = Arc::clone(&server);
                async move {
                    let names = method_and_family(&request);
                    let in_flight = server.count(&mut request, names, "readonly");
                    let (method, path) = (request.method().as_str(), request.uri().path());
                    let closed = match serving::route(method, path) {
                        Route::Found(endpoint) => serving::disabled_response(&endpoint),
                        Route::MethodNotAllowed | Route::NotFound => None,
                    };
                    let answer = match closed.map(Refusal::of) {
                        Some(Refusal(code, why)) => text(code, why),
                        None => server.serve(request).await,
                    };
                    https::keep_with_body(answer, in_flight)
                }
            },
        )
        .await;
    };
    let healthz = async {
        let Some(address) = serving.healthz else {
            return std::future::pending().await;
        };
        let listener =
            listen::bind_with_retries(&server.parts.listen, Part::Healthz, address).await;
        let server = Arc::clone(&server);
        https::serve(
            listener,
            None,
            OTHER_LIMITS,
            move |_, request: Request<Incoming>| {
                let server = Arc::clone(&server);
                async move {
                    let uri = request.uri();
                    match serving::route(request.method().as_str(), uri.path()) {
                        Route::Found(Endpoint::Health(check)) => {
                            let query = uri.query().unwrap_or_default();
                            let parts = &server.parts;
                            views::health(&parts.config, &parts.heartbeats, &check, query)
                        }
                        _ => text(StatusCode::NOT_FOUND, "404 page not found"),
                    }
                }
            },
        )
        .await;
    };
    tokio::join!(main, read_only, healthz);
}

/// A page of metrics.
fn page(page: Page) -> Response<Body> {
    let mut response = text(StatusCode::OK, page.into_string());
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"),
    );
    response
}

/// The refusal of a request that the runtime did not carry out.
fn broken(error: RuntimeError) -> Refusal {
    Refusal(StatusCode::INTERNAL_SERVER_ERROR, error.message)
}
