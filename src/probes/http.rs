//! An HTTP GET on a new connection.

use std::sync::{Arc, LazyLock};

use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper::header::{HOST, LOCATION};
use hyper::http::uri::Uri;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};

use super::HttpError;
use super::connect;
use holdfast_core::pod::probe::{Http, OUTPUT_LIMIT, Reply, limit_output};
use holdfast_core::serving::query;

/// Maximum number of requests for one probe: the first one, and those to which redirects lead.
const REQUESTS: usize = 10;

/// Accepts every certificate: a probe checks whether a server answers, not its identity.
static TLS: LazyLock<Arc<ClientConfig>> =
    LazyLock::new(|| Arc::new(holdfast_https::unverified_client()));

fn failed(error: impl std::fmt::Display) -> HttpError {
    HttpError::Failed(error.to_string())
}

/// Sends the request and follows redirects that stay on its host.
pub async fn get(request: &Http) -> Result<Reply, HttpError> {
    let mut request = request.clone();
    for _ in 0..REQUESTS {
        let (reply, location) = once(&request).await?;
        let next = match location {
            Some(location) => follow(&request, &location)?,
            None => None,
        };
        let Some(next) = next else {
            return Ok(reply);
        };
        request = next;
    }
    Err(HttpError::Failed(format!(
        "stopped after {REQUESTS} redirects"
    )))
}

/// Removes `.` and `..` from a path (RFC 3986, 5.2.4).
fn without_dots(path: &str) -> String {
    let mut parts = vec![];
    for part in path.split('/').skip(1) {
        match part {
            "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    if path.ends_with("/.") || path.ends_with("/..") {
        parts.push("");
    }
    format!("/{}", parts.join("/"))
}

/// Resolves a path with a query relative to those of `from` (RFC 3986, 5.2.2).
fn relative(from: &str, to: &str) -> String {
    let (base, base_query) = from.split_at(from.find('?').unwrap_or(from.len()));
    let (path, query) = to.split_at(to.find('?').unwrap_or(to.len()));
    let query = match (path, query) {
        ("", "") => base_query,
        (_, query) => query,
    };
    let path = match path {
        "" => base.to_owned(),
        path if path.starts_with('/') => without_dots(path),
        path => {
            let dir = base.rsplit_once('/').map_or("", |(dir, _)| dir);
            without_dots(&format!("{dir}/{path}"))
        }
    };
    format!("{path}{query}")
}

/// Returns the request to which a redirect leads; `None` if that is another host.
fn follow(from: &Http, location: &str) -> Result<Option<Http>, HttpError> {
    let failed = |why: &dyn std::fmt::Display| {
        HttpError::Failed(format!(
            "failed to parse Location header {location:?}: {why}"
        ))
    };
    let to = query::encode_url(location.split('#').next().unwrap_or_default());
    let mut next = from.clone();
    // A colon before the path and the query ends a scheme.
    let has_scheme = |text: &str| {
        let first = text.split(['/', '?']).next();
        first.is_some_and(|first| first.contains(':'))
    };
    let absolute = match (to.starts_with("//"), from.tls) {
        (true, true) => format!("https:{to}"),
        (true, false) => format!("http:{to}"),
        (false, _) if has_scheme(&to) => to,
        (false, _) => {
            next.path = relative(&from.path, &to);
            return Ok(Some(next));
        }
    };
    let uri = absolute.parse::<Uri>().map_err(|e| failed(&e))?;
    let host = uri.host().ok_or_else(|| failed(&"it has no host"))?;
    if host.trim_start_matches('[').trim_end_matches(']') != from.host {
        return Ok(None);
    }
    next.tls = match uri.scheme_str() {
        Some("https") => true,
        Some("http") => false,
        _ => return Err(failed(&"its scheme is not http or https")),
    };
    next.port = uri.port_u16().unwrap_or(if next.tls { 443 } else { 80 });
    let target = uri.path_and_query().map_or("/", |p| p.as_str());
    next.path = relative("/", target);
    Ok(Some(next))
}

async fn once(request: &Http) -> Result<(Reply, Option<String>), HttpError> {
    let stream = connect(&request.host, request.port)
        .await
        .map_err(HttpError::Failed)?;
    if !request.tls {
        return exchange(stream, request).await;
    }
    let name = ServerName::try_from(request.host.clone()).map_err(failed)?;
    let stream = tokio_rustls::TlsConnector::from(Arc::clone(&TLS))
        .connect(name, stream)
        .await
        .map_err(|error| {
            let plain = error
                .get_ref()
                .and_then(|e| e.downcast_ref::<rustls::Error>())
                .is_some_and(|e| matches!(e, rustls::Error::InvalidMessage(_)));
            if plain {
                HttpError::Plain
            } else {
                failed(error)
            }
        })?;
    exchange(stream, request).await
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: &Http,
) -> Result<(Reply, Option<String>), HttpError> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(failed)?;
    let driver = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(connection));
    let mut message = hyper::Request::get(request.path.as_str());
    let host = if request.host.contains(':') {
        format!("[{}]", request.host)
    } else {
        request.host.clone()
    };
    if !request
        .headers
        .iter()
        .any(|(name, _)| name.eq_ignore_ascii_case("host"))
    {
        message = message.header(HOST, format!("{host}:{}", request.port));
    }
    message = message.header(hyper::header::CONNECTION, "close");
    for (name, value) in &request.headers {
        message = message.header(name.as_str(), value.as_str());
    }
    let message = message.body(Empty::<Bytes>::new()).map_err(failed)?;
    let answer = sender.send_request(message).await.map_err(failed)?;
    let status = answer.status();
    let location = answer
        .headers()
        .get(LOCATION)
        .filter(|_| matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308))
        .and_then(|l| l.to_str().ok())
        .filter(|l| !l.is_empty())
        .map(str::to_owned);
    let mut body = Limited::new(answer.into_body(), OUTPUT_LIMIT);
    let mut bytes = Vec::new();
    // A body that is too long or breaks off is truncated: the status has already decided the result.
    while let Some(Ok(frame)) = body.frame().await {
        bytes.extend(frame.into_data().unwrap_or_default());
    }
    drop(driver);
    Ok((
        Reply {
            status: status.as_u16(),
            body: limit_output(&String::from_utf8_lossy(&bytes)),
        },
        location,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_resolved_relative_to_the_request() {
        let from = Http {
            tls: false,
            host: "10.0.0.1".into(),
            port: 8080,
            path: "/a/b?c=1".into(),
            headers: vec![],
        };
        let here = |path: &str| Some((false, 8080, path.to_owned()));
        for (location, expected) in [
            ("/health", here("/health")),
            ("health", here("/a/health")),
            ("sub/health", here("/a/sub/health")),
            ("./x", here("/a/x")),
            ("../x/.", here("/x/")),
            ("../../../x", here("/x")),
            ("/a/../b", here("/b")),
            ("?d=2", here("/a/b?d=2")),
            ("#part", here("/a/b?c=1")),
            ("x?u=http://other/", here("/a/x?u=http://other/")),
            ("/with space", here("/with%20space")),
            ("//10.0.0.1:81/x", Some((false, 81, "/x".into()))),
            ("http://10.0.0.1", Some((false, 80, "/".into()))),
            ("https://10.0.0.1/x?y", Some((true, 443, "/x?y".into()))),
            ("//other/x", None),
            ("http://other/x", None),
        ] {
            let found = follow(&from, location).expect("a request");
            let found = found.map(|next| (next.tls, next.port, next.path));
            assert_eq!(found, expected, "{location}");
        }
        for wrong in ["ftp://10.0.0.1/x", "http://["] {
            let found = follow(&from, wrong);
            assert!(
                found.is_err_and(|e| e.to_string().contains("failed to parse Location")),
                "{wrong}"
            );
        }
        let six = Http {
            host: "::1".into(),
            ..from
        };
        let found = follow(&six, "http://[::1]:81/x").expect("a request");
        assert_eq!(found.map(|next| next.port), Some(81));
    }
}
