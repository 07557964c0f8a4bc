//! The apiserver over the store: decodes requests and produces responses.
//!
//! [`Api::answer`] is the entry point. It maps a decoded request to a response, independent of the
//! transport; `server` adds TLS. This module does not depend on the node agent. Controllers and
//! scheduler connect over HTTPS like any other client.

mod admit;
pub mod auth;
mod authorize;
mod backends;
pub mod batch;
pub mod certificates;
mod change;
pub mod classes;
mod columns;
mod defaults;
mod delete;
mod discovery;
mod error;
mod expansion;
mod graph;
mod health;
mod impersonate;
mod labels;
mod links;
mod list_options;
pub(crate) mod networking;
pub mod nodes;
pub mod object;
mod offload;
mod patch;
mod policies;
pub mod rbac;
mod read;
pub mod resources;
mod restriction;
mod route;
mod schema;
pub mod selector;
pub mod server;
mod services;
mod share;
pub mod storage;
mod sub;
mod table;
pub mod token;
mod token_request;
mod trail;
mod unenforced;
mod validate;
mod warnings;
pub mod watch;
mod write;

use std::sync::Arc;

use serde_json::Value;
use tokio::sync::mpsc;

pub(crate) use error::ApiError;
use read::{View, render};
use resources::{Resource, Sub};
pub use route::Query;
use route::Target;
use write::{Options, Stored, Written};

use super::ranges::Ranges;
use super::store::{Bytes, Expect, Store, WriteError};
use holdfast_core::lock::lock;

/// The API; clones share all state.
#[derive(Clone)]
pub struct Api {
    store: Store,
    tokens: Arc<token::Tokens>,
    /// The cluster IPs and node ports of services.
    services: Arc<services::Allocator>,
    /// Request counts by verb, plural, subresource, and whether the user is a node.
    counts: Arc<std::sync::Mutex<Counts>>,
    /// RBAC rules.
    rbac: Arc<rbac::Rbac>,
    /// The objects related to each node.
    graph: Arc<graph::Graph>,
    /// Runs expensive requests on separate threads.
    offload: Arc<offload::Offload>,
    /// Limits of each user's concurrent use.
    shares: Arc<share::Shares>,
    /// The requests of each object.
    recorder: trail::Recorder,
    /// Client for the nodes' agents; `None` if this server does not connect to nodes.
    nodes: Option<nodes::Nodes>,
}

type Counts = std::collections::BTreeMap<(&'static str, &'static str, &'static str, bool), u64>;

/// A request, decoded from the wire.
#[derive(Debug, Default)]
pub struct Request {
    /// The HTTP method.
    pub method: String,
    /// The path, still percent-encoded.
    pub path: String,
    /// The query.
    pub query: Query,
    /// The `Accept` header.
    pub accept: String,
    /// The `Content-Type` header.
    pub content_type: String,
    /// The body.
    pub body: Bytes,
    /// The authenticated user.
    pub user: auth::User,
    /// The `User-Agent` header.
    pub client: String,
}

/// A response.
pub enum Answer {
    /// A complete body.
    Body {
        /// The HTTP status.
        code: u16,
        /// The content type.
        content_type: &'static str,
        /// The bytes.
        body: Bytes,
        /// `Warning` headers.
        warnings: Vec<String>,
    },
    /// The lines of a watch, until the channel is closed.
    Watch(mpsc::Receiver<watch::Line>),
}

const JSON: &str = "application/json";

impl Answer {
    fn json(body: Bytes) -> Answer {
        Answer::Body {
            code: 200,
            content_type: JSON,
            body,
            warnings: vec![],
        }
    }

    fn text(code: u16, text: &str) -> Answer {
        Answer::Body {
            code,
            content_type: "text/plain; charset=utf-8",
            body: Bytes::copy_from_slice(text.as_bytes()),
            warnings: vec![],
        }
    }
}

/// An answer, and the object that the request has stored.
struct Reply {
    answer: Answer,
    stored: Option<Stored>,
}

impl From<Written> for Reply {
    fn from(written: Written) -> Reply {
        Reply {
            answer: Answer::Body {
                code: written.code,
                content_type: JSON,
                body: written.body,
                warnings: written.warnings,
            },
            stored: written.stored,
        }
    }
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Reply {
        Reply {
            answer,
            stored: None,
        }
    }
}

impl From<ApiError> for Answer {
    fn from(error: ApiError) -> Answer {
        Answer::Body {
            code: error.code,
            content_type: JSON,
            body: render(&error.status()),
            warnings: vec![],
        }
    }
}

impl Api {
    /// Creates an API over `store`; services get cluster IPs from `service_range`.
    #[must_use]
    pub fn new(store: Store, tokens: token::Tokens, service_range: Ranges) -> Api {
        Api {
            store,
            tokens: Arc::new(tokens),
            services: Arc::new(services::Allocator::new(service_range)),
            counts: Arc::default(),
            rbac: Arc::default(),
            graph: Arc::default(),
            offload: Arc::default(),
            shares: Arc::default(),
            recorder: trail::Recorder::default(),
            nodes: None,
        }
    }

    /// Adds credentials for the nodes' agents.
    #[must_use]
    pub(crate) fn with_nodes(self, nodes: nodes::Nodes) -> Api {
        Api {
            nodes: Some(nodes),
            ..self
        }
    }

    /// The store, for this process's maintenance tasks.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The keys that sign and verify service-account tokens.
    #[must_use]
    pub fn tokens(&self) -> Arc<token::Tokens> {
        Arc::clone(&self.tokens)
    }

    /// Authenticates credentials; returns the user.
    pub fn authenticate(
        &self,
        certificate: Option<&holdfast_https::Certificate>,
        authorization: Option<&str>,
    ) -> Result<auth::User, ApiError> {
        auth::authenticate(certificate, authorization, &self.tokens, &self.store)
    }

    /// Handles a request. Errors are converted to responses.
    pub async fn answer(&self, request: Request) -> Answer {
        let target = match route::target(&request.path) {
            Ok(target) => target,
            Err(error) => return error.into(),
        };
        let recorded = trail::Pending::of(&request, &target);
        let result = self.dispatch(request, target).await;
        if let Some(recorded) = recorded {
            self.recorder.finish(recorded, &result);
        }
        match result {
            Ok(reply) => reply.answer,
            Err(error) => error.into(),
        }
    }

    /// Request counts by verb and kind, in Prometheus text format.
    fn metrics(&self) -> String {
        let counts = lock(&self.counts);
        let mut text = String::from(
            "# HELP apiserver_request_total Requests by verb, resource and whether the client is a node.\n# TYPE apiserver_request_total counter\n",
        );
        for ((verb, resource, sub, node), count) in counts.iter() {
            text.push_str(&format!(
                "apiserver_request_total{{verb=\"{verb}\",resource=\"{resource}\",subresource=\"{sub}\",node=\"{node}\"}} {count}\n"
            ));
        }
        text
    }

    async fn dispatch(&self, request: Request, target: Target) -> Result<Reply, ApiError> {
        self.authorize(&request, &target)?;
        match target {
            Target::Other(path) if path == "/metrics" && request.method == "GET" => {
                Ok(Answer::text(200, &self.metrics()).into())
            }
            Target::Other(path) => Ok(self.other(&request, &path)?.into()),
            Target::Review(kind) => {
                if request.method != "POST" {
                    return Err(ApiError::method_not_allowed());
                }
                let body = decode_body(&request)?;
                Ok(self.review(kind, &request.user, &body)?.into())
            }
            Target::Objects {
                resource,
                namespace,
                name,
                sub,
            } => {
                self.objects(
                    &request,
                    resource,
                    namespace.as_deref(),
                    name.as_deref(),
                    sub,
                )
                .await
            }
        }
    }

    async fn objects(
        &self,
        request: &Request,
        resource: &'static Resource,
        namespace: Option<&str>,
        name: Option<&str>,
        sub: Option<Sub>,
    ) -> Result<Reply, ApiError> {
        let (query, user) = (&request.query, &request.user);
        let verb = authorize::verb(request, name)?;
        {
            let key = (
                verb,
                resource.plural,
                sub.map_or("", Sub::name),
                request.user.node().is_some(),
            );
            *lock(&self.counts).entry(key).or_default() += 1;
        }
        if let (Some(sub), Some(name)) = (sub, name)
            && !matches!(
                sub,
                Sub::Status
                    | Sub::Finalize
                    | Sub::EphemeralContainers
                    | Sub::Resize
                    | Sub::Approval
            )
        {
            return self
                .subresource(
                    request,
                    verb,
                    resource,
                    namespace.unwrap_or_default(),
                    name,
                    sub,
                )
                .await;
        }
        if sub == Some(Sub::Finalize) && verb != "update" {
            return Err(ApiError::method_not_allowed());
        }
        if sub == Some(Sub::Approval) && !matches!(verb, "get" | "update" | "patch") {
            return Err(ApiError::method_not_allowed());
        }
        match (verb, name) {
            ("watch", _) => Ok(Answer::Watch(self.watch(
                resource,
                namespace,
                query,
                View::of(&request.accept, query)?,
            )?)
            .into()),
            ("list", _) => Ok(Answer::json(
                self.list(
                    resource,
                    namespace,
                    query,
                    &View::of(&request.accept, query)?,
                )
                .await?,
            )
            .into()),
            ("get", Some(name)) => Ok(Answer::json(self.get(
                resource,
                namespace,
                name,
                &View::of(&request.accept, query)?,
            )?)
            .into()),
            ("create", None) => {
                let options = Options::of(query, "CreateOptions", user)?;
                let mut body = decode_body(request)?;
                if resource.kind == "CertificateSigningRequest" {
                    certificates::requested_by(&mut body, &request.user);
                }
                let created = self.create(resource, namespace, body, &options);
                Ok(created.await?.into())
            }
            ("update", Some(name)) => {
                let options = Options::of(query, "UpdateOptions", user)?;
                let body = decode_body(request)?;
                let updated = self.update(resource, namespace, name, sub, body, &options);
                Ok(updated.await?.into())
            }
            ("patch", Some(name)) => {
                let options = Options::of(query, "PatchOptions", user)?;
                let format = patch::Format::of(&request.content_type)?;
                let patch = decode_json(&request.body)?;
                Ok(self
                    .patch(resource, namespace, name, sub, format, &patch, &options)
                    .await?
                    .into())
            }
            ("delete", Some(name)) if sub.is_none() => {
                let body = delete_body(request)?;
                let deleted = self.delete(resource, namespace, name, query, &body, user);
                Ok(deleted.await?.into())
            }
            ("deletecollection", None) => {
                let body = delete_body(request)?;
                let deleted = self.delete_collection(resource, namespace, query, &body, user);
                Ok(deleted.await?.into())
            }
            _ => Err(ApiError::method_not_allowed()),
        }
    }

    async fn subresource(
        &self,
        request: &Request,
        verb: &str,
        resource: &'static Resource,
        namespace: &str,
        name: &str,
        sub: Sub,
    ) -> Result<Reply, ApiError> {
        let user = &request.user;
        if verb == "create" {
            let options = Options::of(&request.query, "CreateOptions", user)?;
            return Ok(match sub {
                Sub::Binding => {
                    let binding = decode_body(request)?;
                    self.bind(namespace, name, &binding, &options).await?
                }
                Sub::Eviction => {
                    let eviction = decode_body(request)?;
                    self.evict(namespace, name, eviction, &options).await?
                }
                // Tokens are not stored, so a dry run issues one too, as upstream does.
                Sub::Token => self.issue_token(namespace, name, &decode_body(request)?, user)?,
                _ => return Err(ApiError::method_not_allowed()),
            }
            .into());
        }
        match (sub, verb) {
            (Sub::Scale, "get") => {
                let view = View::of(&request.accept, &request.query)?;
                Ok(Answer::json(self.scale(resource, namespace, name, &view)?).into())
            }
            (Sub::Scale, "update") => {
                let options = Options::of(&request.query, "UpdateOptions", user)?;
                Ok(self
                    .set_scale(
                        resource,
                        namespace,
                        name,
                        &decode_body(request)?,
                        None,
                        &options,
                    )
                    .await?
                    .into())
            }
            (Sub::Scale, "patch") => {
                let options = Options::of(&request.query, "PatchOptions", user)?;
                let format = patch::Format::of(&request.content_type)?;
                Ok(self
                    .set_scale(
                        resource,
                        namespace,
                        name,
                        &decode_json(&request.body)?,
                        Some(format),
                        &options,
                    )
                    .await?
                    .into())
            }
            _ => Err(ApiError::method_not_allowed()),
        }
    }

    /// Replaces an object that has `revision`, without validation.
    pub(super) async fn replace(
        &self,
        resource: &'static Resource,
        namespace: Option<&str>,
        name: &str,
        revision: u64,
        object: Value,
    ) -> Result<(), ApiError> {
        let key = resource.key(namespace, name);
        match self
            .put(resource, key, Expect::Revision(revision), object)
            .await
        {
            Ok(_) => Ok(()),
            Err(WriteError::Conflict(_)) => {
                Err(ApiError::modified(resource.group, resource.plural, name))
            }
            Err(other) => Err(ApiError::internal(other)),
        }
    }

    fn other(&self, request: &Request, path: &str) -> Result<Answer, ApiError> {
        if !matches!(request.method.as_str(), "GET" | "HEAD") {
            return Err(ApiError::method_not_allowed());
        }
        let wants_aggregated = request.accept.contains("as=APIGroupDiscoveryList")
            && request.accept.contains("v=v2;")
                | request.accept.contains("v=v2,")
                | request.accept.ends_with("v=v2");
        let aggregated = |core| Answer::Body {
            code: 200,
            content_type: discovery::AGGREGATED,
            body: render(&discovery::aggregated(core)),
            warnings: vec![],
        };
        let segments: Vec<&str> = path.split('/').skip(1).collect();
        let json = |value: Option<Value>| {
            value
                .map(|v| Answer::json(render(&v)))
                .ok_or_else(ApiError::no_such_resource)
        };
        match segments.as_slice() {
            ["api"] if wants_aggregated => Ok(aggregated(true)),
            ["apis"] if wants_aggregated => Ok(aggregated(false)),
            ["api"] => Ok(Answer::json(render(
                &serde_json::json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}),
            ))),
            ["apis"] => Ok(Answer::json(render(&discovery::group_list()))),
            ["api", version] => json(discovery::resource_list("", version)),
            ["apis", group] => json(discovery::group(group)),
            ["apis", group, version] => json(discovery::resource_list(group, version)),
            ["version"] => Ok(Answer::json(render(&discovery::version()))),
            ["openapi", "v2"] => Ok(openapi_v2(&request.accept)),
            ["openapi", "v3"] => Ok(Answer::json(render(&discovery::openapi_index()))),
            ["openapi", "v3", rest @ ..] => json(discovery::openapi(&rest.join("/"))),
            ["debug", "trail", ..] => match self.recorder.at(path) {
                Some(trail) => Ok(Answer::json(trail)),
                None => Err(ApiError::no_such_resource()),
            },
            [endpoint @ ("healthz" | "livez" | "readyz"), rest @ ..] if rest.len() < 2 => {
                let checks = [("ping", Ok(())), ("store", self.store.check())];
                let one = rest.first().copied();
                health::answer(endpoint, one, &checks, &request.query)
            }
            [] | [""] => {
                let mut paths = vec![
                    "/api".to_owned(),
                    "/api/v1".into(),
                    "/apis".into(),
                    "/healthz".into(),
                    "/livez".into(),
                    "/metrics".into(),
                    "/openapi/v2".into(),
                    "/openapi/v3".into(),
                    "/readyz".into(),
                    "/version".into(),
                ];
                paths.extend(
                    resources::RESOURCES
                        .iter()
                        .filter(|r| !r.group.is_empty())
                        .map(|r| format!("/apis/{}", r.api_version())),
                );
                paths.sort();
                paths.dedup();
                Ok(Answer::json(render(&serde_json::json!({"paths": paths}))))
            }
            _ => Ok(Answer::text(404, "404 page not found\n")),
        }
    }
}

/// OpenAPI v2 in the requested format.
fn openapi_v2(accept: &str) -> Answer {
    if !accept.contains("+protobuf") {
        return Answer::json(render(&discovery::openapi_v2()));
    }
    Answer::Body {
        code: 200,
        content_type: discovery::OPENAPI_V2,
        body: discovery::openapi_v2_protobuf().into(),
        warnings: vec![],
    }
}

fn decode_json(body: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(body).map_err(|e| {
        ApiError::bad_request(format!(
            "the object provided is unrecognized: couldn't get version/kind; json parse error: {e}"
        ))
    })
}

/// Decodes a request body in one of the accepted formats to JSON.
fn decode_body(request: &Request) -> Result<Value, ApiError> {
    match request
        .content_type
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
    {
        "" | "application/json" => decode_json(&request.body),
        "application/yaml" => {
            let text = std::str::from_utf8(&request.body)
                .map_err(|_| ApiError::bad_request("the YAML body is not UTF-8"))?;
            serde_saphyr::from_str(text)
                .map_err(|e| ApiError::bad_request(format!("the YAML body cannot be read: {e}")))
        }
        "application/vnd.kubernetes.protobuf" => {
            schema::decode(&request.body).map_err(|e| ApiError::bad_request(e.to_string()))
        }
        _ => Err(ApiError::unsupported_body()),
    }
}

/// Decodes delete options: optional, in any accepted format, of any kind.
fn delete_body(request: &Request) -> Result<Value, ApiError> {
    if request.body.is_empty() {
        Ok(Value::Null)
    } else {
        decode_body(request)
    }
}
