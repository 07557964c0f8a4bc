//! Sessions of exec, attach and port-forward: the runtime serves a stream, and the client's
//! connection is forwarded to it unchanged, as SPDY or WebSocket (`pkg/kubelet/server/server.go`).
//! Commands with input are the exception: see [`exec`].

use std::fmt::Display;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode, Uri};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::Refusal;
use super::Server;
use super::exec::{self, broken, channels_of, running};
use crate::metrics::RequestInFlight;
use holdfast_core::serving::{Endpoint, PodTarget, Streams};
use holdfast_core::{pod, serving::query};
use holdfast_cri::Exec;
use holdfast_https::{
    Body, Outgoing, SocketContent, forward_request, is_upgrade, serve_socket, socket_content, text,
};

/// The requested streams. For attach, the container determines whether there is a terminal.
fn streams(server: &Server, endpoint: &Endpoint, text: &str) -> Result<Streams, Refusal> {
    let tty = match endpoint {
        Endpoint::Attach(place) => server.find(place).and_then(|known| {
            let all = pod::containers(&known.pod);
            let (_, container) = all.iter().find(|(_, c)| c.name == place.container)?;
            Some(container.tty == Some(true))
        }),
        _ => None,
    };
    let streams = match tty {
        Some(tty) => Streams::with_tty(text, tty),
        None => Streams::parse(text),
    };
    streams.map_err(Refusal::of)
}

/// The URL of the runtime's stream for an endpoint.
async fn url(server: &Server, endpoint: &Endpoint, text: &str) -> Result<String, Refusal> {
    let runtime = &server.parts.runtime;
    let values = |key: &str| {
        query::pairs(text)
            .into_iter()
            .filter(|(k, _)| k == key)
            .map(|(_, v)| v)
            .collect::<Vec<_>>()
    };
    match endpoint {
        Endpoint::Exec(place) => {
            let (streams, command) = (streams(server, endpoint, text)?, values("command"));
            if command.is_empty() {
                return Err(Refusal(
                    StatusCode::BAD_REQUEST,
                    "you must specify a command".into(),
                ));
            }
            runtime
                .exec_url(&running(server, place).await?, &command, streams)
                .await
                .map_err(broken)
        }
        Endpoint::Attach(place) => {
            let streams = streams(server, endpoint, text)?;
            runtime
                .attach_url(&running(server, place).await?, streams)
                .await
                .map_err(broken)
        }
        Endpoint::PortForward(place) => {
            let known = server
                .find(place)
                .ok_or_else(|| Refusal(StatusCode::NOT_FOUND, "pod does not exist".into()))?;
            let wrong = |port: &String| {
                Refusal(
                    StatusCode::BAD_REQUEST,
                    format!("invalid port {port:?}: use a number up to 65535"),
                )
            };
            let ports = values("port")
                .iter()
                .map(|p| p.parse::<u16>().map(i32::from).map_err(|_| wrong(p)))
                .collect::<Result<Vec<_>, _>>()?;
            let observed = runtime
                .observe(pod::uid(&known.pod))
                .await
                .map_err(broken)?;
            let sandbox = observed.sandboxes.iter().find(|s| s.ready);
            let sandbox = sandbox.ok_or_else(|| {
                Refusal(
                    StatusCode::NOT_FOUND,
                    format!("the sandbox of pod {:?} is not running", place.pod),
                )
            })?;
            runtime
                .forward_url(&sandbox.id, &ports)
                .await
                .map_err(broken)
        }
        _ => Err(Refusal(StatusCode::NOT_FOUND, "404 page not found".into())),
    }
}

/// Serves `/exec`, `/attach` and `/portForward`.
pub(crate) async fn serve_stream(
    server: &Arc<Server>,
    endpoint: &Endpoint,
    request: Request<Incoming>,
) -> Result<Response<Body>, Refusal> {
    if !is_upgrade(request.headers()) {
        return Err(Refusal(
            StatusCode::BAD_REQUEST,
            "Upgrade request required".into(),
        ));
    }
    // The session counts as a request in flight until it is closed.
    let in_flight = request.extensions().get::<Arc<RequestInFlight>>().cloned();
    let held = (server.sessions.begin()?, in_flight);
    if let Endpoint::Exec(place) = endpoint
        && let Some(stream) = exec::session(server, place, &request).await?
    {
        let outgoing = Outgoing {
            host: "localhost".into(),
            target: "/exec".into(),
            forwards_ports: false,
            returns_redirects: false,
        };
        return forward(server, endpoint, request, &outgoing, stream, held).await;
    }
    let url = url(server, endpoint, request.uri().query().unwrap_or_default()).await?;
    let uri: Uri = url
        .parse()
        .map_err(|e| failed(format!("invalid URL {url:?}: {e}")))?;
    let (Some("http"), Some(host), Some(target)) =
        (uri.scheme_str(), uri.authority(), uri.path_and_query())
    else {
        return Err(failed(format!(
            "unsupported URL {url:?}: only http is supported, as runtimes serve it on the loopback device"
        )));
    };
    let stream = TcpStream::connect((
        host.host().trim_matches(['[', ']']),
        host.port_u16().unwrap_or(80),
    ))
    .await
    .map_err(failed)?;
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY on a stream; it may be slow");
    }
    let outgoing = Outgoing {
        host: host.to_string(),
        target: target.to_string(),
        forwards_ports: matches!(endpoint, Endpoint::PortForward(_)),
        returns_redirects: false,
    };
    forward(server, endpoint, request, &outgoing, stream, held).await
}

fn failed(what: impl Display) -> Refusal {
    Refusal(
        StatusCode::BAD_GATEWAY,
        format!("cannot connect to the runtime's stream: {what}"),
    )
}

/// Forwards a request's connection to the runtime's stream.
async fn forward(
    server: &Server,
    endpoint: &Endpoint,
    request: Request<Incoming>,
    outgoing: &Outgoing,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    held: impl Send + 'static,
) -> Result<Response<Body>, Refusal> {
    if let Some(socket_content) = socket_content(request.headers()) {
        let what = match endpoint {
            Endpoint::Exec(_) => "exec",
            Endpoint::Attach(_) => "attach",
            _ => "portforward",
        };
        server.parts.metrics.websocket(what);
        let channels = match socket_content {
            SocketContent::Command => {
                streams(server, endpoint, request.uri().query().unwrap_or_default())?
            }
            SocketContent::Ports => Streams::default(),
        };
        return serve_socket(
            request,
            socket_content,
            channels_of(channels),
            outgoing,
            stream,
            held,
        )
        .await
        .map_err(failed);
    }
    forward_request(request, outgoing, stream, held)
        .await
        .map_err(failed)
}

/// `POST /run/…?cmd=`: runs a command and returns its output.
pub async fn run(
    server: &Arc<Server>,
    place: &PodTarget,
    text_of: &str,
) -> Result<Response<Body>, Refusal> {
    let command = query::pairs(text_of)
        .into_iter()
        .find(|(key, _)| key == "cmd")
        .map(|(_, value)| value)
        .unwrap_or_default();
    let command: Vec<String> = command.split(' ').map(Into::into).collect();
    let id = running(server, place).await?;
    let done = server
        .parts
        .runtime
        .exec(&id, &command, None)
        .await
        .map_err(broken)?;
    output_of(&command, done).map(|output| text(StatusCode::OK, output))
}

/// The output of a command that succeeded.
fn output_of(command: &[String], done: Exec) -> Result<String, Refusal> {
    if done.code == 0 {
        return Ok(done.output);
    }
    let (command, Exec { code, output }) = (command.join(" "), done);
    let why = format!("command '{command}' exited with {code}: {output}");
    Err(Refusal(StatusCode::INTERNAL_SERVER_ERROR, why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_cri::{RuntimeError, RuntimeErrorKind};

    #[test]
    fn failed_commands_report_their_exit_code() {
        let command = ["ls".to_owned(), "/x".to_owned()];
        let done = |code| Exec {
            code,
            output: "out".into(),
        };
        assert_eq!(output_of(&command, done(0)), Ok("out".into()));
        let failed = output_of(&command, done(2)).map_err(|refusal| refusal.1);
        assert_eq!(failed, Err("command 'ls /x' exited with 2: out".into()));
    }

    #[test]
    fn errors_of_the_runtime_have_their_http_statuses() {
        for (kind, code, expected) in [
            (RuntimeErrorKind::NotFound, Some("NotFound"), 404),
            (RuntimeErrorKind::Failed, Some("ResourceExhausted"), 429),
            (RuntimeErrorKind::Failed, Some("Unknown"), 500),
            (RuntimeErrorKind::Unavailable, None, 500),
        ] {
            let message = "why".to_owned();
            let refusal = broken(RuntimeError {
                kind,
                code,
                message,
            });
            assert_eq!(refusal.0.as_u16(), expected, "{kind:?}");
        }
    }
}
