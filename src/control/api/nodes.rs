//! Requests that are forwarded to a node's agent: logs, exec, attach, port-forward, and `nodes/proxy`. The connection
//! uses mutual TLS to the address and port in the node's status. Redirects are never followed
//! (`pkg/registry/core/pod/rest/subresources.go`).

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::{Request, Response};
use rustls::pki_types::ServerName;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::Api;
use super::error::ApiError;
use super::object::{at, list, text};
use super::resources::{Resource, Sub};
use super::route::requested;
use holdfast_core::serving::query;
use holdfast_https::{Body, Outgoing, forward_request, is_upgrade};

/// Timeout for connecting to a node, including the TLS handshake.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Address types, in order of preference.
const ADDRESSES: [&str; 5] = [
    "InternalIP",
    "Hostname",
    "InternalDNS",
    "ExternalIP",
    "ExternalDNS",
];

/// Client for the nodes' agents.
#[derive(Clone)]
pub struct Nodes {
    tls: Arc<rustls::ClientConfig>,
    is_ours: Arc<dyn Fn(SocketAddr) -> bool + Send + Sync>,
}

/// The address of a node's agent.
#[derive(Debug, PartialEq, Eq)]
struct Agent {
    host: String,
    port: u16,
}

/// Maximum number of bytes read of a node's error response.
const MAX_ERROR_BYTES: usize = 2048;

/// Converts a node's error response to an API error.
async fn error_of_node(answer: Response<Body>, pod: &str) -> ApiError {
    let code = answer.status().as_u16();
    let (mut body, mut bytes) = (answer.into_body(), vec![]);
    while let (true, Some(Ok(frame))) = (bytes.len() < MAX_ERROR_BYTES, body.frame().await) {
        bytes.extend(frame.into_data().unwrap_or_default());
    }
    bytes.truncate(MAX_ERROR_BYTES);
    let why = String::from_utf8_lossy(&bytes).trim().to_owned();
    match code {
        400 => ApiError::bad_request(why),
        404 => ApiError::new(
            404,
            "NotFound",
            format!("the server could not find the requested resource ( pods/log {pod}): {why}"),
        ),
        500 => ApiError::new(
            500,
            "InternalError",
            format!("Internal error occurred: {why}"),
        ),
        other => ApiError::new(other, "", why),
    }
}

/// Whether an address may belong to a node. Loopback, link-local and similar addresses are rejected. If a node reported
/// one, the apiserver could connect to itself (CVE-2022-3294).
pub(super) fn is_allowed(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => {
            !(ip.is_loopback()
                || ip.is_link_local()
                || ip.is_unspecified()
                || ip.is_multicast()
                || ip.is_broadcast())
        }
        IpAddr::V6(ip) => {
            !(ip.is_loopback()
                || ip.is_unicast_link_local()
                || ip.is_unspecified()
                || ip.is_multicast())
        }
    }
}

fn agent(node: &Value) -> Result<Agent, ApiError> {
    let name = super::object::name(node);
    let refuse = |why: &str| {
        ApiError::new(
            503,
            "ServiceUnavailable",
            format!("the node {name:?} cannot be reached: {why}"),
        )
    };
    let addresses = list(node, &["status", "addresses"]);
    let of = |kind: &&str| {
        addresses
            .iter()
            .find(|a| text(a, &["type"]) == Some(*kind))
            .and_then(|a| text(a, &["address"]))
    };
    let host = ADDRESSES
        .iter()
        .find_map(of)
        .ok_or_else(|| refuse("its status has no address"))?;
    if host.parse().is_ok_and(|ip| !is_allowed(ip)) {
        return Err(ApiError::bad_request("address not allowed"));
    }
    let port = at(
        node,
        &["status", "daemonEndpoints", "kubeletEndpoint", "Port"],
    )
    .and_then(Value::as_u64);
    let port = port
        .and_then(|p| u16::try_from(p).ok())
        .filter(|p| *p > 0)
        .ok_or_else(|| refuse("its status.daemonEndpoints.kubeletEndpoint has no port"))?;
    Ok(Agent {
        host: host.to_owned(),
        port,
    })
}

/// Rejects another port than the agent's: other servers of a node are not reached.
fn check_port(agent: &Agent, requested: &str) -> Result<(), ApiError> {
    if requested.is_empty() || requested.parse() == Ok(agent.port) {
        return Ok(());
    }
    let port = agent.port;
    Err(ApiError::bad_request(format!(
        "the port {requested:?} of a node is not served, only that of its agent, {port}"
    )))
}

fn is_true(pairs: &[(String, String)], key: &str) -> bool {
    pairs.iter().any(|(k, v)| k == key && query::is_true(v))
}

/// Chooses the container: the requested one, else the pod's default container, else the only one.
fn container(pod: &Value, requested: Option<&str>) -> Result<String, ApiError> {
    let name = super::object::name(pod);
    let names = |kind: &str| {
        list(pod, &["spec", kind])
            .iter()
            .filter_map(|c| c["name"].as_str())
            .collect::<Vec<_>>()
    };
    let own = names("containers");
    if let Some(requested) = requested.filter(|a| !a.is_empty()) {
        let all = [own, names("initContainers"), names("ephemeralContainers")].concat();
        return if all.contains(&requested) {
            Ok(requested.into())
        } else {
            Err(ApiError::bad_request(format!(
                "container {requested} is not valid for pod {name}"
            )))
        };
    }
    let default = text(
        pod,
        &[
            "metadata",
            "annotations",
            "kubectl.kubernetes.io/default-container",
        ],
    );
    match (default.filter(|d| own.contains(d)), own.as_slice()) {
        (Some(default), _) => Ok(default.into()),
        (None, [one]) => Ok((*one).into()),
        _ => Err(ApiError::bad_request(format!(
            "a container name must be specified for pod {name}, choose one of: [{}]",
            own.join(" ")
        ))),
    }
}

/// The path and query at the node's agent. Pure.
fn target(sub: Sub, pod: &Value, query_text: &str) -> Result<String, ApiError> {
    let pairs = query::pairs(query_text);
    let value = |key: &str| {
        pairs
            .iter()
            .find(|(k, _)| k == key)
            .map(|(_, v)| v.as_str())
    };
    let (namespace, name) = (
        super::object::namespace(pod).unwrap_or_default(),
        super::object::name(pod),
    );
    let mut onward: Vec<(&str, &str)> = vec![];
    let path = match sub {
        Sub::Log => {
            let known = [
                "follow",
                "previous",
                "timestamps",
                "tailLines",
                "sinceSeconds",
                "sinceTime",
                "limitBytes",
                "stream",
            ];
            onward.extend(known.iter().filter_map(|key| Some((*key, value(key)?))));
            format!(
                "/containerLogs/{namespace}/{name}/{}",
                container(pod, value("container"))?
            )
        }
        Sub::Exec | Sub::Attach => {
            let tty = is_true(&pairs, "tty");
            for (here, there) in [
                ("stdin", "input"),
                ("stdout", "output"),
                ("stderr", "error"),
                ("tty", "tty"),
            ] {
                if is_true(&pairs, here) && !(here == "stderr" && tty) {
                    onward.push((there, "1"));
                }
            }
            if !onward.iter().any(|(key, _)| *key != "tty") {
                return Err(ApiError::bad_request(
                    "you must specify at least 1 of stdin, stdout, stderr",
                ));
            }
            onward.extend(
                pairs
                    .iter()
                    .filter(|(key, _)| key == "command")
                    .map(|(_, v)| ("command", v.as_str())),
            );
            let what = if sub == Sub::Exec { "exec" } else { "attach" };
            format!(
                "/{what}/{namespace}/{name}/{}",
                container(pod, value("container"))?
            )
        }
        _ => {
            let ports = pairs
                .iter()
                .filter(|(key, _)| key == "ports")
                .flat_map(|(_, v)| v.split(','));
            onward.extend(ports.map(|port| ("port", port)));
            format!("/portForward/{namespace}/{name}")
        }
    };
    let onward: Vec<String> = onward
        .iter()
        .map(|(key, value)| format!("{key}={}", query::encode(value)))
        .collect();
    Ok(if onward.is_empty() {
        path
    } else {
        format!("{path}?{}", onward.join("&"))
    })
}

/// The part of `/api/v1/nodes/NAME/proxy/…` that the node's agent receives, with the query.
fn below_proxy(path: &str, query: &str) -> String {
    let below = path.splitn(7, '/').nth(6).unwrap_or_default();
    let mark = if query.is_empty() { "" } else { "?" };
    format!("/{below}{mark}{query}")
}

/// Paths of a node's agent that run a command in a container or connect to one.
const RUNNING: [&str; 6] = ["exec", "attach", "run", "portForward", "portforward", "cri"];

/// The verb on `nodes/proxy` that a request through a node's proxy needs; `None` if the method is not forwarded. Paths
/// that run a command need `create`, also for GET, which opens a WebSocket (kubernetes/kubernetes PR 136550).
pub(super) fn proxy_verb(method: &str, path: &str, upgrades: bool) -> Option<&'static str> {
    let verb = match method {
        "GET" | "HEAD" => "get",
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => return None,
    };
    // The agent's server resolves `.` and `..` before it routes the request.
    let mut cleaned: Vec<String> = vec![];
    for part in query::decode(&below_proxy(path, "")).split('/') {
        match part {
            "" | "." => {}
            ".." => drop(cleaned.pop()),
            part => cleaned.push(part.to_owned()),
        }
    }
    let runs = cleaned
        .first()
        .is_some_and(|first| RUNNING.contains(&first.as_str()));
    Some(if upgrades || runs { "create" } else { verb })
}

impl Nodes {
    /// Creates the client from the apiserver's certificate and the CA of the nodes' certificates, all PEM. `is_ours`
    /// reports whether this apiserver listens on an address.
    pub fn new(
        certificate: &str,
        key: &str,
        ca: &str,
        is_ours: impl Fn(SocketAddr) -> bool + Send + Sync + 'static,
    ) -> Result<Nodes, holdfast_https::BoxError> {
        Ok(Nodes {
            tls: Arc::new(holdfast_https::client(certificate, key, ca)?),
            is_ours: Arc::new(is_ours),
        })
    }

    /// Whether the apiserver may connect to an address: not to this machine's own, and not to itself.
    pub(super) fn may_dial(&self, address: SocketAddr) -> bool {
        is_allowed(address.ip()) && !(self.is_ours)(address)
    }

    /// Connects to the first resolved address that is allowed. It checks the resolved addresses, so
    /// that a second lookup cannot return another one.
    async fn dial(&self, agent: &Agent) -> Result<TcpStream, String> {
        let found = tokio::net::lookup_host((agent.host.as_str(), agent.port))
            .await
            .map_err(|e| e.to_string())?;
        let mut why = "address not allowed".to_owned();
        for address in found.filter(|a| self.may_dial(*a)) {
            match TcpStream::connect(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => why = error.to_string(),
            }
        }
        Err(why)
    }

    async fn forward(
        &self,
        agent: &Agent,
        target: String,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, ApiError> {
        let failed = |why: String| {
            ApiError::new(
                502,
                "InternalError",
                format!(
                    "error dialing backend: {}:{}: {why}",
                    agent.host, agent.port
                ),
            )
        };
        let connect = async {
            let stream = self.dial(agent).await?;
            stream.set_nodelay(true).map_err(|e| e.to_string())?;
            let name = ServerName::try_from(agent.host.clone()).map_err(|e| e.to_string())?;
            TlsConnector::from(Arc::clone(&self.tls))
                .connect(name, stream)
                .await
                .map_err(|e| e.to_string())
        };
        let stream = tokio::time::timeout(CONNECT_TIMEOUT, connect)
            .await
            .map_err(|_| failed("no answer".into()))?
            .map_err(failed)?;
        let outgoing = Outgoing {
            host: format!("{}:{}", agent.host, agent.port),
            target,
            forwards_ports: false,
            returns_redirects: false,
        };
        forward_request(request, &outgoing, stream, ())
            .await
            .map_err(|e| failed(e.to_string()))
    }
}

impl Api {
    /// Forwards a request to the pod's node, or for `proxy` to the node named.
    pub(super) async fn forward_to_node(
        &self,
        sub: Sub,
        namespace: Option<&str>,
        name: &str,
        path: &str,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, ApiError> {
        let nodes = self.nodes.as_ref().ok_or_else(|| {
            ApiError::new(
                503,
                "ServiceUnavailable",
                "this apiserver has no client certificate for nodes",
            )
        })?;
        let (kind, query_text) = (
            Resource::of_kind("Node").ok_or_else(ApiError::no_such_resource)?,
            request.uri().query().unwrap_or_default().to_owned(),
        );
        if sub == Sub::Proxy {
            let asked = requested(name, "node")?;
            let (_, node) = self.fetch(kind, None, asked.name)?;
            let agent = agent(&node)?;
            check_port(&agent, asked.port)?;
            let target = below_proxy(path, &query_text);
            return nodes.forward(&agent, target, request).await;
        }
        let pods = Resource::of_kind("Pod").ok_or_else(ApiError::no_such_resource)?;
        let (_, pod) = self.fetch(pods, namespace, name)?;
        let target = target(sub, &pod, &query_text)?;
        let Some(node) = text(&pod, &["spec", "nodeName"]).filter(|n| !n.is_empty()) else {
            // A pod that is not bound yet has no logs.
            return if sub == Sub::Log {
                Ok(holdfast_https::text(hyper::StatusCode::OK, ""))
            } else {
                Err(ApiError::bad_request(format!(
                    "pod {name} does not have a host assigned"
                )))
            };
        };
        if sub != Sub::Log && !is_upgrade(request.headers()) {
            return Err(ApiError::bad_request("Upgrade request required"));
        }
        let (_, node) = self.fetch(kind, None, node)?;
        let answer = nodes.forward(&agent(&node)?, target, request).await?;
        if sub == Sub::Log && !answer.status().is_success() {
            Err(error_of_node(answer, name).await)
        } else {
            Ok(answer)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn pod_subresources_map_to_paths_of_the_node() {
        let pod = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {"containers": [{"name": "c"}], "ephemeralContainers": [{"name": "e"}]}});
        let of = |sub, text: &str| target(sub, &pod, text).map_err(|e| e.message);
        assert_eq!(
            of(Sub::Log, "follow=true&tailLines=3&pretty=1"),
            Ok("/containerLogs/n/p/c?follow=true&tailLines=3".into())
        );
        assert_eq!(
            of(Sub::Log, "container=e"),
            Ok("/containerLogs/n/p/e".into())
        );
        assert_eq!(
            of(Sub::Log, "container=x"),
            Err("container x is not valid for pod p".into())
        );
        assert_eq!(
            of(
                Sub::Exec,
                "command=sh&command=-c&command=a%26b&stdin=true&stdout=true&stderr=true&tty=true"
            ),
            Ok("/exec/n/p/c?input=1&output=1&tty=1&command=sh&command=-c&command=a%26b".into())
        );
        assert_eq!(
            of(Sub::Exec, "command=sh&tty=true"),
            Err("you must specify at least 1 of stdin, stdout, stderr".into())
        );
        assert_eq!(
            of(Sub::Attach, "stdout=true"),
            Ok("/attach/n/p/c?output=1".into())
        );
        assert_eq!(
            of(Sub::PortForward, "ports=80,81"),
            Ok("/portForward/n/p?port=80&port=81".into())
        );
        let two = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {"containers": [{"name": "a"}, {"name": "b"}]}});
        assert_eq!(
            target(Sub::Log, &two, "").map_err(|e| e.message),
            Err("a container name must be specified for pod p, choose one of: [a b]".into())
        );
    }

    #[test]
    fn the_path_after_proxy_is_sent_to_the_node() {
        for (path, below) in [
            ("/api/v1/nodes/n/proxy", "/"),
            ("/api/v1/nodes/n/proxy/", "/"),
            ("/api/v1/nodes/n/proxy/pods", "/pods"),
            ("/api/v1/nodes/proxy1/proxy/pods/proxy", "/pods/proxy"),
            ("/api/v1/nodes/proxy/proxy/a%2Fb", "/a%2Fb"),
        ] {
            assert_eq!(below_proxy(path, ""), below, "{path}");
            assert_eq!(below_proxy(path, "a=b"), format!("{below}?a=b"), "{path}");
        }
    }

    #[test]
    fn exec_and_attach_through_the_node_proxy_need_the_create_verb() {
        let verb = |method: &str, below: &str, upgrades: bool| {
            proxy_verb(method, &format!("/api/v1/nodes/n/proxy{below}"), upgrades)
        };
        for (method, expected) in [
            ("GET", "get"),
            ("HEAD", "get"),
            ("POST", "create"),
            ("PUT", "update"),
            ("PATCH", "patch"),
            ("DELETE", "delete"),
        ] {
            for below in [
                "",
                "/pods",
                "/containerLogs/n/exec/c",
                "/logs/run/x",
                "/exec/../pods",
            ] {
                assert_eq!(
                    verb(method, below, false),
                    Some(expected),
                    "{method} {below}"
                );
            }
            assert_eq!(verb(method, "/pods", true), Some("create"), "{method}");
            for below in [
                "/exec/n/p/c",
                "/attach/n/p/c",
                "/run/n/p/c",
                "/portForward/n/p",
                "/cri/exec/token",
                "//exec/n/p/c",
                "/./exec/n/p/c",
                "/pods/../exec/n/p/c",
                "/%65xec/n/p/c",
                "/pods%2f..%2fexec/n/p/c",
            ] {
                assert_eq!(
                    verb(method, below, false),
                    Some("create"),
                    "{method} {below}"
                );
            }
        }
        assert_eq!(verb("TRACE", "/pods", false), None);
    }

    #[test]
    fn a_nodes_address_must_be_allowed_and_have_a_port() {
        let node = |address: &str, port: Value| {
            json!({"metadata": {"name": "n"}, "status": {"addresses": [{"type": "Hostname", "address": "host"}, {"type": "InternalIP", "address": address}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}})
        };
        assert_eq!(
            agent(&node("192.0.2.1", json!(10250))).ok(),
            Some(Agent {
                host: "192.0.2.1".into(),
                port: 10250
            })
        );
        for (address, port, code) in [
            ("127.0.0.1", json!(1), 400),
            ("169.254.169.254", json!(1), 400),
            ("::1", json!(1), 400),
            ("::ffff:127.0.0.1", json!(1), 400),
            ("192.0.2.1", json!(0), 503),
        ] {
            assert_eq!(
                agent(&node(address, port)).map_err(|e| e.code).err(),
                Some(code),
                "{address}"
            );
        }
    }

    #[test]
    fn only_the_agents_port_of_a_node_is_served() {
        let agent = Agent {
            host: "n".into(),
            port: 10250,
        };
        for (port, expected) in [
            ("", true),
            ("10250", true),
            ("22", false),
            ("x", false),
            ("75786", false),
        ] {
            assert_eq!(check_port(&agent, port).is_ok(), expected, "{port}");
        }
    }

    #[tokio::test]
    async fn the_addresses_of_a_host_name_are_checked_after_resolution() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let key = rcgen::generate_simple_self_signed(["n".into()]).expect("a certificate");
        let (pem, private) = (key.cert.pem(), key.signing_key.serialize_pem());
        let dial = |host: &str, ours: bool| {
            let nodes = Nodes::new(&pem, &private, &pem, move |_| ours).expect("credentials");
            let agent = Agent {
                host: host.into(),
                port,
            };
            async move { nodes.dial(&agent).await.map(|_| ()) }
        };
        let refused = Err("address not allowed".to_owned());
        assert_eq!(
            dial("localhost", false).await,
            refused,
            "a name of this machine"
        );
        assert_eq!(
            dial("192.0.2.1", true).await,
            refused,
            "an address of our own"
        );
    }
}
