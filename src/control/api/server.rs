//! The HTTPS server of the API: decodes requests and encodes responses.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, USER_AGENT, WARNING};

use super::Answer;
use super::Api;
use super::ApiError;
use super::Query;
use super::Request;
use super::auth;
use super::backends;
use super::impersonate;
use super::nodes;
use super::resources::{Resource, Sub};
use super::route::{self, Target};
use super::warnings;
use holdfast_https::{
    self, Body, BoxError, ConnectionSlot, Limits, Listeners, NotReceived, Peer, Tls, full, guard,
    paced, receive,
};

/// Maximum size of a request body: 3 MiB, as upstream.
const BODY_LIMIT: usize = 3 << 20;
/// Timeouts for receiving a body, and then for handling the request. Watches and streams are not limited.
const REQUEST_TIMEOUTS: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(60));
/// How long a client may stop reading a response before its connection is closed; equal to
/// kube-apiserver's default `--request-timeout`.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Connections have no idle timeout, because clients keep watches and idle connections open.
const LIMITS: Limits = Limits {
    connections: 4096,
    evict_unauthenticated: true,
    idle: None,
};

/// Serves until the process exits.
pub async fn serve(api: Api, listeners: Listeners, tls: Tls) {
    holdfast_https::serve(
        listeners,
        Some(Arc::new(tls)),
        LIMITS,
        move |peer, request| respond(api.clone(), peer, request),
    )
    .await;
}

async fn respond(api: Api, peer: Peer, request: hyper::Request<Incoming>) -> hyper::Response<Body> {
    let slot = request.extensions().get::<ConnectionSlot>().cloned();
    let target = route::target(request.uri().path());
    let deprecation = deprecation(&target);
    let answered = async {
        if let Ok(Target::Objects {
            resource,
            namespace,
            name: Some(name),
            sub: Some(sub),
        }) = target
            && matches!(
                sub,
                Sub::Log | Sub::Exec | Sub::Attach | Sub::PortForward | Sub::Proxy
            )
        {
            let namespace = namespace.as_deref();
            return stream(&api, &peer, request, (resource, sub), namespace, &name).await;
        }
        let request = decode(&api, &peer, request).await?;
        let user = request.user.name.clone();
        let answer = tokio::time::timeout(REQUEST_TIMEOUTS.1, api.answer_offloaded(request))
            .await
            .map_err(|_| timed_out())?;
        within_share(&api, &user, answer, slot.as_ref())
    };
    let answer = match guard(answered).await {
        Ok(answer) => answer,
        Err(panicked) => Err(ApiError::internal(panicked)),
    };
    let answer = answer.unwrap_or_else(|error: ApiError| encode(error.into(), slot.as_ref()));
    warn(answer, deprecation)
}

/// The warning about a target's kind; empty if the kind is not deprecated.
fn deprecation(target: &Result<Target, ApiError>) -> &'static str {
    match target {
        Ok(Target::Objects { resource, .. }) => resource.deprecation,
        _ => "",
    }
}

/// Adds a warning to a response, unless the request was rejected before its kind mattered, or the warning is empty. Watches have it,
/// too (`registerResourceHandlers` in `staging/src/k8s.io/apiserver/pkg/endpoints/installer.go`).
fn warn(mut response: hyper::Response<Body>, warning: &str) -> hyper::Response<Body> {
    if !matches!(response.status().as_u16(), 401 | 403) {
        for header in warnings::headers(&[warning.to_owned()]) {
            if let Ok(value) = header.parse() {
                response.headers_mut().append(WARNING, value);
            }
        }
    }
    response
}

/// 504: the API has not produced a response in time.
fn timed_out() -> ApiError {
    let limit = REQUEST_TIMEOUTS.1.as_secs();
    let message = format!(
        "Timeout: request did not complete within {limit} s; a write may have been applied nevertheless"
    );
    ApiError::new(504, "Timeout", message)
}

/// Forwards a request to the agent of a node, or to a pod.
async fn stream(
    api: &Api,
    peer: &Peer,
    request: hyper::Request<Incoming>,
    (resource, sub): (&'static Resource, Sub),
    namespace: Option<&str>,
    name: &str,
) -> Result<hyper::Response<Body>, ApiError> {
    let user = authenticate(api, peer, request.headers(), request.extensions())?;
    // Streams can run commands, so they need `create` for every HTTP method (since Kubernetes 1.35).
    let verb = match (sub, request.method().as_str()) {
        (Sub::Log, "GET") => Some("get"),
        (Sub::Exec | Sub::Attach | Sub::PortForward, "GET" | "POST") => Some("create"),
        (Sub::Proxy, _) if resource.namespaced => Some(backends::verb(request.method())),
        (Sub::Proxy, method) => {
            let upgrades = holdfast_https::is_upgrade(request.headers());
            nodes::proxy_verb(method, request.uri().path(), upgrades)
        }
        _ => None,
    };
    let verb = verb.ok_or_else(ApiError::method_not_allowed)?;
    let attributes = auth::attributes_of(
        verb,
        resource,
        sub.name(),
        namespace.unwrap_or_default(),
        name,
    );
    if !api.is_allowed(&user, &attributes) {
        return Err(auth::forbidden_error(&user, &attributes));
    }
    let held = api.shares.reserve_stream(&user.name)?;
    let answer = match (sub, namespace) {
        (Sub::Proxy, Some(namespace)) => {
            api.forward_to_pod(resource, namespace, name, request)
                .await?
        }
        _ => {
            let path = request.uri().path().to_owned();
            api.forward_to_node(sub, namespace, name, &path, request)
                .await?
        }
    };
    Ok(holdfast_https::keep_with_body(answer, held))
}

/// Builds the response to a user, subject to the user's limits of concurrent use.
fn within_share(
    api: &Api,
    user: &str,
    answer: Answer,
    slot: Option<&ConnectionSlot>,
) -> Result<hyper::Response<Body>, ApiError> {
    match answer {
        Answer::Watch(_) => {
            let held = api.shares.reserve_stream(user)?;
            Ok(holdfast_https::keep_with_body(encode(answer, slot), held))
        }
        Answer::Body {
            code,
            content_type,
            body,
            warnings,
        } => {
            let body = api.shares.count(user, body)?;
            let answer = Answer::Body {
                code,
                content_type,
                body,
                warnings,
            };
            Ok(encode(answer, slot))
        }
    }
}

fn authenticate(
    api: &Api,
    peer: &Peer,
    headers: &hyper::HeaderMap,
    extensions: &hyper::http::Extensions,
) -> Result<auth::User, ApiError> {
    let authorization = headers.get(AUTHORIZATION).and_then(|v| v.to_str().ok());
    let user = api.authenticate(peer.certificate.as_deref(), authorization)?;
    if let (Some(slot), false) = (
        extensions.get::<ConnectionSlot>(),
        user.is_in("system:unauthenticated"),
    ) {
        slot.mark_authenticated();
    }
    impersonate::effective_user(user, headers, |user, attributes| {
        api.is_allowed(user, attributes)
    })
}

async fn decode(
    api: &Api,
    peer: &Peer,
    request: hyper::Request<Incoming>,
) -> Result<Request, ApiError> {
    let user = authenticate(api, peer, request.headers(), request.extensions())?;
    let mut decoded = Request {
        method: request.method().as_str().to_owned(),
        path: request.uri().path().to_owned(),
        query: Query::parse(request.uri().query().unwrap_or_default()),
        user,
        ..Request::default()
    };
    let reads = matches!(decoded.method.as_str(), "GET" | "HEAD");
    // Unauthenticated clients are authorised before their body is read, so that a body that is
    // rejected anyway does not occupy a connection.
    if !reads && decoded.user.is_in("system:unauthenticated") {
        api.authorize(&decoded, &route::target(&decoded.path)?)?;
    }
    let head = if reads {
        request.into_parts().0
    } else {
        let (head, body) = receive(request, BODY_LIMIT, REQUEST_TIMEOUTS.0).await;
        decoded.body = body.map_err(|error| match error {
            NotReceived::TooLong(_) => ApiError::new(
                413,
                "RequestEntityTooLarge",
                format!("Request entity too large: limit is {BODY_LIMIT}"),
            ),
            NotReceived::TooSlow(_) => ApiError::new(408, "Timeout", error.to_string()),
            NotReceived::Broken(_) => ApiError::bad_request(error.to_string()),
        })?;
        head
    };
    // Several Accept headers are equivalent to one with commas.
    let accept: Vec<&str> = head
        .headers
        .get_all(ACCEPT)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .collect();
    decoded.accept = accept.join(",");
    decoded.client = head
        .headers
        .get(USER_AGENT)
        .and_then(|v| v.to_str().ok())
        .unwrap_or_default()
        .to_owned();
    decoded.content_type = head
        .headers
        .get(CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .unwrap_or_default()
        .to_owned();
    Ok(decoded)
}

fn encode(answer: Answer, slot: Option<&ConnectionSlot>) -> hyper::Response<Body> {
    let response = hyper::Response::builder()
        .header("Cache-Control", "no-cache, private")
        .header("Audit-Id", super::object::new_uid());
    let built = match answer {
        Answer::Body {
            code,
            content_type,
            body,
            warnings,
        } => {
            let mut response = response
                .status(code)
                .header(CONTENT_TYPE, content_type)
                .header("Vary", "Accept");
            if code == 429 {
                response = response.header("Retry-After", "1");
            }
            for warning in warnings::headers(&warnings) {
                response = response.header(WARNING, warning);
            }
            response.body(paced(body, slot, UNREAD_TIMEOUT))
        }
        Answer::Watch(lines) => {
            let lines = futures::stream::unfold(lines, |mut lines| async move {
                lines.recv().await.map(|line| (line, lines))
            });
            let frames = lines.map(|line| Ok::<_, BoxError>(Frame::data(line.bytes())));
            let body = StreamBody::new(frames);
            response
                .header(CONTENT_TYPE, "application/json")
                .body(body.boxed_unsync())
        }
    };
    built.unwrap_or_else(|_| hyper::Response::new(full("internal error")))
}

#[cfg(test)]
mod tests;
