//! Read-only views: pods, configuration, status.

use std::sync::Arc;

use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response, StatusCode};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::Refusal;
use super::Server;
use crate::pod::heartbeats::Heartbeats;
use crate::pod::table::Known;
use holdfast_config::Config;
use holdfast_core::pod;
use holdfast_core::pod::explain::explain;
use holdfast_core::serving::PodTarget;
use holdfast_core::serving::health::Health;
use holdfast_https::{Body, text};

pub(super) fn as_json(value: &impl serde::Serialize) -> Response<Body> {
    match serde_json::to_string(value) {
        Ok(text_of) => {
            let mut response = text(StatusCode::OK, text_of);
            response
                .headers_mut()
                .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            response
        }
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

/// `PUT /debug/flags/v`: sets the verbosity of the agent's log.
pub async fn verbosity(request: Request<Incoming>) -> Result<Response<Body>, Refusal> {
    let refuse = |why: String| Refusal(StatusCode::BAD_REQUEST, why);
    let body = Limited::new(request.into_body(), 16)
        .collect()
        .await
        .map_err(|e| refuse(format!("error reading request body: {e}")))?
        .to_bytes();
    let text_of = String::from_utf8_lossy(&body).trim().to_owned();
    let verbosity = text_of.parse::<u8>().map_err(|_| {
        refuse(format!(
            "failed set klog.logging.verbosity {text_of}: use a number from 0 to 255"
        ))
    })?;
    holdfast_sys::verbosity::set(verbosity)
        .map_err(|why| Refusal(StatusCode::INTERNAL_SERVER_ERROR, why))?;
    tracing::info!(verbosity, "the log's verbosity was changed");
    Ok(text(
        StatusCode::OK,
        format!("successfully set klog.logging.verbosity to {verbosity}"),
    ))
}

/// `/healthz`, and the named check below it.
pub fn health(
    config: &Config,
    heartbeats: &Heartbeats,
    check: &str,
    query: &str,
) -> Response<Body> {
    let health = Health {
        since_last_iteration: heartbeats.since_turn(),
        sync_frequency: config.sync_frequency,
    };
    let (code, answer) = health.answer(check, query);
    let code = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    text(code, answer)
}

/// Annotates a pod of the API with its source and the time of its first observation, as the kubelet does
/// (`pkg/kubelet/config/config.go`); the API object is unchanged. Static pods have these annotations already.
fn marked(mut pod: Pod, seen: Timestamp) -> Pod {
    if !pod::is_static(&pod) {
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert(pod::SOURCE.into(), "api".into());
        annotations.insert(pod::SEEN.into(), pod::seen_at(seen));
    }
    pod
}

/// `/pods`: the pods of all sources with their known status. A static pod
/// without a mirror has the status of its worker.
pub fn pods(server: &Arc<Server>) -> Response<Body> {
    let of = |known: &Known| {
        let mut pod = Pod::clone(&known.pod);
        pod.status = match (&known.object, pod::is_static(&pod)) {
            (None, true) => {
                let own = server.parts.journals.status(pod::uid(&pod));
                own.map(Arc::unwrap_or_clone)
            }
            _ => known.status_object().status.clone(),
        };
        marked(pod, known.seen)
    };
    let items: Vec<Pod> = server.parts.table.borrow().iter().map(of).collect();
    as_json(&json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}))
}

/// `/debug/explain/NAMESPACE/NAME`: what the agent did for a pod, for `holdfast trace` on another machine.
pub fn explanation(server: &Server, place: &PodTarget) -> Result<Response<Body>, Refusal> {
    let (namespace, name) = (&place.namespace, &place.pod);
    let known = server.parts.journals.find(namespace, name);
    let Some((uid, journal)) = known.into_iter().next() else {
        let why = format!("the agent knows no pod {namespace}/{name}");
        return Err(Refusal(StatusCode::NOT_FOUND, why));
    };
    Ok(as_json(&explain(namespace, name, &uid, journal, None)))
}

/// `/runningpods/`: the pods of the runtime.
pub async fn running(server: &Arc<Server>) -> Result<Response<Body>, Refusal> {
    let all = server
        .parts
        .runtime
        .running()
        .await
        .map_err(|e| Refusal(StatusCode::INTERNAL_SERVER_ERROR, e.message))?;
    let mut pods: Vec<Value> = vec![];
    for container in all {
        let known = pods
            .iter_mut()
            .find(|p| p["metadata"]["uid"] == container.uid.as_str());
        let entry = json!({"name": container.name, "resources": {}});
        match known.and_then(|pod| pod["spec"]["containers"].as_array_mut()) {
            Some(containers) => containers.push(entry),
            None => pods.push(json!({
                "metadata": {"name": container.pod, "namespace": container.namespace, "uid": container.uid},
                "spec": {"containers": [entry]}, "status": {},
            })),
        }
    }
    Ok(as_json(
        &json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": pods}),
    ))
}

/// `/configz`: the configuration with its defaults.
pub fn config(server: &Arc<Server>) -> Response<Body> {
    as_json(&json!({"kubeletconfig": server.parts.config.effective}))
}

/// `/statusz`.
pub fn status(server: &Arc<Server>) -> Response<Body> {
    let parts = &server.parts;
    let (started, now) = (parts.started, parts.clock.now());
    let up = now.duration_since(started).as_secs();
    let lines = [
        "kubelet statusz".to_owned(),
        "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for debugging purposes only."
            .to_owned(),
        String::new(),
        format!("Started: {started}"),
        format!("Up: {} hr {:02} min {:02} sec", up / 3600, up / 60 % 60, up % 60),
        format!("Binary version: {} (Holdfast {})", holdfast_core::version::REPORTED, env!("CARGO_PKG_VERSION")),
        "Paths: /configz /healthz /metrics".to_owned(),
        String::new(),
    ];
    text(StatusCode::OK, lines.join("\n"))
}

/// `/flagz`: the command line.
pub fn flags() -> Response<Body> {
    let head = "kubelet flags\nWarning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for debugging purposes only.\n\n";
    let own: Vec<String> = std::env::args().skip(1).collect();
    text(StatusCode::OK, format!("{head}{}\n", own.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(uid: &str, annotations: Value) -> Pod {
        let metadata =
            json!({"name": "p", "namespace": "n", "uid": uid, "annotations": annotations});
        serde_json::from_value(json!({"metadata": metadata})).expect("a pod")
    }

    #[test]
    fn pods_of_the_api_are_annotated_with_source_and_first_seen_time() {
        let seen: Timestamp = "2026-01-01T00:00:00.5Z".parse().expect("a time");
        let annotations = |pod: Pod| json!(marked(pod, seen).metadata.annotations);
        assert_eq!(
            annotations(made("u", json!({"a": "b"}))),
            json!({"a": "b", pod::SOURCE: "api", pod::SEEN: "2026-01-01T00:00:00.500000000Z"})
        );
        let own = json!({pod::SOURCE: "file", pod::SEEN: "then", pod::HASH: "h"});
        assert_eq!(annotations(made("u", own.clone())), own);
    }
}
