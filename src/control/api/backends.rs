//! `pods/proxy` and `services/proxy`: requests that the apiserver forwards to a server in a pod
//! (`pkg/registry/core/pod/strategy.go`, `pkg/registry/core/service/storage/storage.go`).

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, LazyLock};

use futures::StreamExt as _;
use http_body_util::{BodyExt as _, BodyStream, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{
    ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderValue, LOCATION,
};
use hyper::{Method, Request, Response, StatusCode};
use rustls::pki_types::ServerName;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::Api;
use super::error::ApiError;
use super::links::Prefix;
use super::nodes::{CONNECT_TIMEOUT, Nodes, is_allowed};
use super::object::{list, random_below, text};
use super::resources::Resource;
use super::route::{Requested, requested};
use holdfast_https::{Body, BoxError, Outgoing, forward_request, full, is_upgrade};

/// Maximum size of a page whose links are adapted; a longer one is returned as it is.
const PAGE_LIMIT: usize = 4 << 20;

/// The certificates of servers in pods are not verified, as upstream: no authority of the cluster signs them.
static TLS: LazyLock<Arc<rustls::ClientConfig>> = LazyLock::new(|| {
    let mut config = holdfast_https::unverified_client();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Arc::new(config)
});

fn unavailable(message: impl Into<String>) -> ApiError {
    ApiError::new(503, "ServiceUnavailable", message)
}

/// The address of a pod's server: the port requested, else the first port of its containers, else that of the scheme.
fn of_pod(pod: &Value, asked: &Requested) -> Result<SocketAddr, ApiError> {
    let ip: Option<IpAddr> = text(pod, &["status", "podIP"]).and_then(|ip| ip.parse().ok());
    let Some(ip) = ip.filter(|ip| is_allowed(*ip)) else {
        return Err(ApiError::bad_request("address not allowed"));
    };
    let first = list(pod, &["spec", "containers"])
        .iter()
        .find_map(|container| list(container, &["ports"]).first())
        .and_then(|port| port["containerPort"].as_u64());
    let port = match (asked.port, first) {
        ("", Some(first)) => u16::try_from(first).ok(),
        ("", None) => Some(if asked.is_https { 443 } else { 80 }),
        (port, _) => port.parse().ok(),
    };
    let port = port.filter(|port| *port > 0).ok_or_else(|| {
        ApiError::bad_request(format!("{:?} is not the number of a port", asked.port))
    })?;
    Ok(SocketAddr::new(ip, port))
}

/// The name of the service's port that a request names or numbers.
fn port_name<'a>(service: &'a Value, asked: &Requested<'a>) -> Result<&'a str, ApiError> {
    let Ok(number) = asked.port.parse::<i64>() else {
        return Ok(asked.port);
    };
    let ports = list(service, &["spec", "ports"]);
    let found = ports.iter().find(|port| port["port"] == number);
    let found = found.map(|port| text(port, &["name"]).unwrap_or_default());
    found.ok_or_else(|| {
        unavailable(format!(
            "no service port {number} found for service {:?}",
            asked.name
        ))
    })
}

/// The addresses of a service's ready endpoints behind a port, with the names of their pods.
fn candidates<'a>(endpoints: &'a Value, port: &str) -> Vec<(SocketAddr, &'a str)> {
    let mut found = vec![];
    for subset in list(endpoints, &["subsets"]) {
        let number = list(subset, &["ports"])
            .iter()
            .find(|p| text(p, &["name"]).unwrap_or_default() == port)
            .and_then(|p| u16::try_from(p["port"].as_u64()?).ok());
        let Some(number) = number else {
            continue;
        };
        for address in list(subset, &["addresses"]) {
            let is_pod = text(address, &["targetRef", "kind"]) == Some("Pod");
            let ip = text(address, &["ip"]).and_then(|ip| ip.parse().ok());
            let pod = text(address, &["targetRef", "name"]);
            if let (true, Some(ip), Some(pod)) = (is_pod, ip, pod) {
                found.push((SocketAddr::new(ip, number), pod));
            }
        }
    }
    found
}

/// Whether an address is one of the pod's. Anyone who may write Endpoints could name another machine otherwise.
fn has_address(pod: &Value, ip: IpAddr) -> bool {
    let parsed = |one: &Value| text(one, &["ip"]).and_then(|ip| ip.parse().ok());
    list(pod, &["status", "podIPs"])
        .iter()
        .any(|one| parsed(one) == Some(ip))
}

/// The path up to and including `proxy`, and the rest.
pub(super) fn split(path: &str) -> (&str, &str) {
    // `/api/v1/namespaces/NAMESPACE/pods/NAME/proxy`
    match path.match_indices('/').nth(7) {
        Some((at, _)) => path.split_at(at),
        None => (path, ""),
    }
}

/// The verb that a request through a proxy needs. Like upstream, a method without verb needs a role with all verbs.
pub(super) fn verb(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" | "HEAD" => "get",
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => "",
    }
}

/// A page's relative links need the slash.
fn to_slash(request: &Request<Incoming>) -> Result<Response<Body>, ApiError> {
    let (path, query) = (request.uri().path(), request.uri().query());
    let query = query.map(|query| format!("?{query}")).unwrap_or_default();
    Response::builder()
        .status(StatusCode::MOVED_PERMANENTLY)
        .header(LOCATION, format!("{path}/{query}"))
        .body(full(""))
        .map_err(ApiError::internal)
}

/// Adds headers that say how the client reaches the server. Encoded pages are not requested, because their links are adapted.
fn announce(request: &mut Request<Incoming>, path: &str) {
    // HTTP/2 has no `Host` header.
    let authority = request.uri().authority().map(ToString::to_string);
    let authority = authority.and_then(|host| HeaderValue::from_str(&host).ok());
    let headers = request.headers_mut();
    headers.remove(ACCEPT_ENCODING);
    if let Some(host) = headers.get(HOST).cloned().or(authority) {
        headers.insert("x-forwarded-host", host);
    }
    headers.insert("x-forwarded-proto", HeaderValue::from_static("https"));
    if let Ok(path) = HeaderValue::from_str(path) {
        headers.insert("x-forwarded-uri", path);
    }
}

/// Adapts the links of an answer: `Location`, and those of a page.
async fn adapt(answer: Response<Body>, prefix: Prefix<'_>) -> Result<Response<Body>, BoxError> {
    let (mut head, body) = answer.into_parts();
    let location = head.headers.get(LOCATION).and_then(|v| v.to_str().ok());
    if let Some(link) = location.and_then(|location| prefix.link(location)) {
        head.headers.insert(LOCATION, HeaderValue::from_str(&link)?);
    }
    let kind = head.headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok());
    let kind = kind.and_then(|kind| kind.split(';').next()).map(str::trim);
    if kind != Some("text/html") || head.headers.contains_key(CONTENT_ENCODING) {
        return Ok(Response::from_parts(head, body));
    }
    let (start, rest) = beginning(body).await?;
    let body = match (rest, std::str::from_utf8(&start)) {
        (None, Ok(page)) => {
            let page = prefix.page(page);
            head.headers.insert(CONTENT_LENGTH, page.len().into());
            full(page)
        }
        (None, Err(_)) => full(start),
        (Some(rest), _) => {
            let start = futures::stream::once(async { Ok(Frame::data(start)) });
            StreamBody::new(start.chain(BodyStream::new(rest))).boxed_unsync()
        }
    };
    Ok(Response::from_parts(head, body))
}

/// Reads a body up to [`PAGE_LIMIT`]; returns what was read, and what follows if the body is longer.
async fn beginning(mut body: Body) -> Result<(Bytes, Option<Body>), BoxError> {
    let mut read = vec![];
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            read.extend_from_slice(&data);
        }
        if read.len() > PAGE_LIMIT {
            return Ok((read.into(), Some(body)));
        }
    }
    Ok((read.into(), None))
}

impl Api {
    /// Forwards a request to a pod, or to one of the pods of a service.
    pub(super) async fn forward_to_pod(
        &self,
        resource: &Resource,
        namespace: &str,
        id: &str,
        mut request: Request<Incoming>,
    ) -> Result<Response<Body>, ApiError> {
        let nodes = self
            .nodes
            .as_ref()
            .ok_or_else(|| unavailable("this apiserver forwards no requests"))?;
        let asked = requested(id, resource.singular)?;
        let address = match resource.kind {
            "Pod" => of_pod(
                &self.fetch(resource, Some(namespace), asked.name)?.1,
                &asked,
            )?,
            _ => self.endpoint(resource, namespace, id, &asked)?,
        };
        let path = request.uri().path().to_owned();
        let (prefix, below) = split(&path);
        let reads = matches!(*request.method(), Method::GET | Method::HEAD);
        let upgrades = is_upgrade(request.headers());
        if below.is_empty() && reads && !upgrades {
            return to_slash(&request);
        }
        announce(&mut request, &path);
        let query = request.uri().query().map(|query| format!("?{query}"));
        let below = if below.is_empty() { "/" } else { below };
        let outgoing = Outgoing {
            host: address.to_string(),
            target: format!("{below}{}", query.unwrap_or_default()),
            forwards_ports: false,
            returns_redirects: true,
        };
        let is_head = *request.method() == Method::HEAD;
        let failed = |why: String| unavailable(format!("error trying to reach service: {why}"));
        let answer = send(nodes, address, asked.is_https, request, &outgoing);
        let answer = answer.await.map_err(failed)?;
        if is_head || answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(answer);
        }
        let host = outgoing.host.as_str();
        let adapted = adapt(answer, Prefix { path: prefix, host }).await;
        adapted.map_err(|error| failed(error.to_string()))
    }

    /// The address of one of a service's endpoints; only addresses of pods count.
    fn endpoint(
        &self,
        services: &Resource,
        namespace: &str,
        id: &str,
        asked: &Requested,
    ) -> Result<SocketAddr, ApiError> {
        let kind = |kind| Resource::of_kind(kind).ok_or_else(ApiError::no_such_resource);
        let (_, service) = self.fetch(services, Some(namespace), asked.name)?;
        let port = port_name(&service, asked)?;
        let (_, endpoints) = self.fetch(kind("Endpoints")?, Some(namespace), asked.name)?;
        let mut found = candidates(&endpoints, port);
        let pods = kind("Pod")?;
        while !found.is_empty() {
            let (address, pod) = found.swap_remove(random_below(found.len()));
            let is_pod = match self.fetch(pods, Some(namespace), pod) {
                Ok((_, pod)) => has_address(&pod, address.ip()),
                Err(error) if error.code == 404 => false,
                Err(error) => return Err(error),
            };
            if is_pod && is_allowed(address.ip()) {
                return Ok(address);
            }
        }
        Err(unavailable(format!(
            "no endpoints available for service {id:?}"
        )))
    }
}

/// Sends the request over a new connection.
async fn send(
    nodes: &Nodes,
    address: SocketAddr,
    is_https: bool,
    request: Request<Incoming>,
    outgoing: &Outgoing,
) -> Result<Response<Body>, String> {
    if !nodes.may_dial(address) {
        return Err("address not allowed".into());
    }
    let connect = async {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    let stream = in_time(connect).await?;
    let answered = if is_https {
        let name = ServerName::from(address.ip());
        let connect = TlsConnector::from(Arc::clone(&TLS)).connect(name, stream);
        forward_request(request, outgoing, in_time(connect).await?, ()).await
    } else {
        forward_request(request, outgoing, stream, ()).await
    };
    answered.map_err(|e| e.to_string())
}

async fn in_time<T>(connect: impl Future<Output = io::Result<T>>) -> Result<T, String> {
    tokio::time::timeout(CONNECT_TIMEOUT, connect)
        .await
        .map_err(|_| "no answer".to_owned())?
        .map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of_id(id: &str) -> Requested<'_> {
        requested(id, "pod").expect(id)
    }

    #[test]
    fn a_pod_is_reached_at_its_address_and_a_port() {
        let pod = |ip: &str| {
            json!({"spec": {"containers": [{"name": "a"}, {"name": "b", "ports": [{"containerPort": 8080}]}]},
                "status": {"podIP": ip}})
        };
        let plain =
            json!({"spec": {"containers": [{"name": "a"}]}, "status": {"podIP": "fd00::1"}});
        for (pod, id, expected) in [
            (pod("10.0.0.1"), "p", Some("10.0.0.1:8080")),
            (pod("10.0.0.1"), "p:81", Some("10.0.0.1:81")),
            (plain.clone(), "p", Some("[fd00::1]:80")),
            (plain, "https:p:", Some("[fd00::1]:443")),
            (pod("10.0.0.1"), "p:web", None),
            (pod("10.0.0.1"), "p:0", None),
            (pod("127.0.0.1"), "p", None),
            (pod("169.254.169.254"), "p", None),
            (pod(""), "p", None),
        ] {
            let found = of_pod(&pod, &of_id(id));
            let found = found.map(|at| at.to_string()).map_err(|error| error.code);
            assert_eq!(found, expected.map(str::to_owned).ok_or(400), "{pod} {id}");
        }
    }

    #[test]
    fn the_number_of_a_services_port_stands_for_its_name() {
        let service = json!({"spec": {"ports": [{"port": 80, "name": "web"}, {"port": 81}]}});
        for (id, expected) in [
            ("s", Ok("")),
            ("s:web", Ok("web")),
            ("s:80", Ok("web")),
            ("s:81", Ok("")),
            ("s:82", Err(503)),
        ] {
            let request = of_id(id);
            let found = port_name(&service, &request).map_err(|error| error.code);
            assert_eq!(found, expected, "{id}");
        }
    }

    #[test]
    fn only_ready_pods_behind_the_port_are_candidates() {
        let pod =
            |name: &str, ip: &str| json!({"ip": ip, "targetRef": {"kind": "Pod", "name": name}});
        let endpoints = json!({"subsets": [
            {"addresses": [pod("a", "10.0.0.1"), {"ip": "10.0.0.9"}], "notReadyAddresses": [pod("b", "10.0.0.2")],
                "ports": [{"name": "web", "port": 8080}, {"name": "other", "port": 1}]},
            {"addresses": [pod("c", "10.0.0.3")], "ports": [{"name": "web", "port": 8081}]},
            {"addresses": [pod("d", "10.0.0.4")], "ports": [{"port": 8082}]}]});
        let of = |port: &str| {
            let found = candidates(&endpoints, port).into_iter();
            found
                .map(|(at, pod)| format!("{pod} {at}"))
                .collect::<Vec<_>>()
        };
        assert_eq!(of("web"), ["a 10.0.0.1:8080", "c 10.0.0.3:8081"]);
        assert_eq!(of(""), ["d 10.0.0.4:8082"]);
        assert!(of("none").is_empty());
        let pod = json!({"status": {"podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]}});
        for (ip, expected) in [("fd00::1", true), ("10.0.0.2", false)] {
            assert_eq!(has_address(&pod, ip.parse().expect(ip)), expected, "{ip}");
        }
    }

    #[test]
    fn the_path_after_proxy_is_that_of_the_server() {
        for (path, prefix, below) in [
            (
                "/api/v1/namespaces/n/pods/p/proxy",
                "/api/v1/namespaces/n/pods/p/proxy",
                "",
            ),
            (
                "/api/v1/namespaces/n/pods/p/proxy/",
                "/api/v1/namespaces/n/pods/p/proxy",
                "/",
            ),
            (
                "/api/v1/namespaces/proxy/services/http:proxy:1/proxy/a%2Fb/proxy/",
                "/api/v1/namespaces/proxy/services/http:proxy:1/proxy",
                "/a%2Fb/proxy/",
            ),
        ] {
            assert_eq!(split(path), (prefix, below));
        }
    }

    #[tokio::test]
    async fn links_of_pages_and_redirects_are_adapted() {
        let prefix = Prefix {
            path: "/p/proxy",
            host: "10.0.0.1:80",
        };
        let page = r#"<a href="/a">"#;
        let long = format!("{page}{}", " ".repeat(PAGE_LIMIT));
        for (kind, encoding, body, expected) in [
            (
                "text/html; charset=utf-8",
                "",
                page,
                r#"<a href="/p/proxy/a">"#,
            ),
            ("text/plain", "", page, page),
            ("text/html", "br", page, page),
            ("text/html", "", long.as_str(), long.as_str()),
        ] {
            let mut answer = Response::builder()
                .header(LOCATION, "http://10.0.0.1:80/b")
                .header(CONTENT_TYPE, kind)
                .header(CONTENT_LENGTH, body.len());
            if !encoding.is_empty() {
                answer = answer.header(CONTENT_ENCODING, encoding);
            }
            let answer = answer.body(full(body.to_owned())).expect("an answer");
            let adapted = adapt(answer, prefix).await.expect("adapted");
            assert_eq!(adapted.headers()[LOCATION], "/p/proxy/b", "{kind}");
            let length = expected.len().to_string();
            assert_eq!(adapted.headers()[CONTENT_LENGTH], length.as_str(), "{kind}");
            let body = adapted.into_body().collect().await.expect("a body");
            assert!(body.to_bytes() == expected.as_bytes(), "{kind} {encoding}");
        }
    }
}
