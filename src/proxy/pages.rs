//! The HTTP servers: `/healthz` and `/livez`, `/metrics`, and the health check ports of Services.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Method, Response, StatusCode};
use jiff::Timestamp;
use serde_json::Value;
use tokio_util::task::AbortOnDropHandle;

use holdfast_core::lock::lock;
use holdfast_core::services::HealthCheck;
use holdfast_https::{Body, Limits, Listeners, full, serve, text};
use holdfast_sys::clock::Clock;

use crate::health::{Eligibility, Health, service_health};
use crate::metrics::Metrics;
use crate::plane::Inbox;

/// The limits of each server: its clients are load balancers and monitoring.
const LIMITS: Limits = Limits {
    connections: 64,
    evict_unauthenticated: true,
    idle: Some(Duration::from_secs(30)),
};
/// The pause before a port that is in use is bound again (`serveHealthz` in `cmd/kube-proxy/app/server.go`).
pub(crate) const REBIND_INTERVAL: Duration = Duration::from_secs(5);

/// What the answers depend on.
pub(crate) struct Facts {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) metrics: Arc<Metrics>,
    /// When the last transaction was committed, and whether the node may receive traffic.
    state: Mutex<(Option<Timestamp>, Eligibility)>,
}

impl Facts {
    pub(crate) fn new(inbox: Arc<Inbox>, metrics: Arc<Metrics>) -> Facts {
        Facts {
            inbox,
            metrics,
            state: Mutex::new((None, Eligibility::Eligible)),
        }
    }

    /// A transaction was committed.
    pub(crate) fn committed(&self, at: Timestamp) {
        lock(&self.state).0 = Some(at);
    }

    /// The Node has changed.
    pub(crate) fn set_eligibility(&self, eligibility: Eligibility) {
        lock(&self.state).1 = eligibility;
    }

    fn health(&self) -> Health {
        let (last_updated, eligibility) = *lock(&self.state);
        Health {
            last_updated,
            waiting: self.inbox.oldest().map(|since| since.elapsed()),
            eligibility,
        }
    }
}

fn json((code, body): (u16, Value)) -> Response<Body> {
    let mut response = Response::new(full(body.to_string()));
    *response.status_mut() =
        StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    let json = HeaderValue::from_static("application/json");
    headers.insert(CONTENT_TYPE, json);
    let nosniff = HeaderValue::from_static("nosniff");
    headers.insert("X-Content-Type-Options", nosniff);
    response
}

fn not_found() -> Response<Body> {
    text(StatusCode::NOT_FOUND, "404 page not found\n")
}

/// The answer of the health server.
fn health_page(facts: &Facts, path: &str) -> Response<Body> {
    let now = Clock::system().now();
    match path {
        "/healthz" => {
            let answer = facts.health().healthz(now);
            facts.metrics.healthz(answer.0);
            json(answer)
        }
        "/livez" => {
            let answer = facts.health().livez(now);
            facts.metrics.livez(answer.0);
            json(answer)
        }
        _ => not_found(),
    }
}

/// The answer of the metrics server.
fn metrics_page(facts: &Facts, path: &str) -> Response<Body> {
    match path {
        "/metrics" => {
            let page = facts.metrics.page(facts.inbox.len());
            text(StatusCode::OK, page)
        }
        "/healthz" => text(StatusCode::OK, "ok"),
        "/proxyMode" => text(StatusCode::OK, "nftables"),
        _ => not_found(),
    }
}

/// A page of one of the two servers.
pub(crate) type Page = fn(&Facts, &str) -> Response<Body>;

/// The pages of `/healthz`.
pub(crate) const HEALTH: Page = health_page;
/// The pages of `/metrics`.
pub(crate) const METRICS: Page = metrics_page;

/// Binds the address of a server.
pub(crate) fn bind(address: SocketAddr) -> std::io::Result<Listeners> {
    let bound = Listeners::bind(&[address.ip()], address.port());
    bound.map_err(|(_, error)| error)
}

/// Serves pages until the process exits.
pub(crate) async fn serve_pages(listeners: Listeners, facts: Arc<Facts>, page: Page) {
    serve(listeners, None, LIMITS, move |_, request| {
        let is_read = [Method::GET, Method::HEAD].contains(request.method());
        let answer = if is_read {
            page(&facts, request.uri().path())
        } else {
            text(StatusCode::METHOD_NOT_ALLOWED, "use GET\n")
        };
        std::future::ready(answer)
    })
    .await;
}

/// An open health check port.
struct OpenPort {
    port: u16,
    local_endpoints: Arc<AtomicUsize>,
    _task: AbortOnDropHandle<()>,
}

/// The health check ports of Services, which listen on all addresses.
#[derive(Default)]
pub(crate) struct ServicePorts {
    open: BTreeMap<(String, String), OpenPort>,
}

/// A health check port that cannot be opened.
#[derive(Debug)]
pub(crate) struct Unopened {
    pub(crate) check: HealthCheck,
    pub(crate) why: String,
}

impl ServicePorts {
    /// Opens and closes ports, and sets the numbers of endpoints. Returns the ports that cannot be opened.
    pub(crate) fn set(&mut self, wanted: Vec<HealthCheck>, facts: &Arc<Facts>) -> Vec<Unopened> {
        let key = |check: &HealthCheck| (check.namespace.clone(), check.name.clone());
        let ports: BTreeMap<_, u16> = wanted.iter().map(|c| (key(c), c.port)).collect();
        self.open
            .retain(|service, open| ports.get(service) == Some(&open.port));
        let mut unopened = vec![];
        for check in wanted {
            let service = key(&check);
            if let Some(open) = self.open.get(&service) {
                open.local_endpoints
                    .store(check.local_endpoints, Ordering::Relaxed);
                continue;
            }
            let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), check.port);
            match bind(any) {
                Ok(listeners) => {
                    let open = open_port(listeners, &check, facts);
                    self.open.insert(service, open);
                }
                Err(error) => {
                    let why = error.to_string();
                    unopened.push(Unopened { check, why });
                }
            }
        }
        unopened
    }
}

fn open_port(listeners: Listeners, check: &HealthCheck, facts: &Arc<Facts>) -> OpenPort {
    let local_endpoints = Arc::new(AtomicUsize::new(check.local_endpoints));
    let (count, facts) = (Arc::clone(&local_endpoints), Arc::clone(facts));
    let service: Arc<(String, String)> = Arc::new((check.namespace.clone(), check.name.clone()));
    let serving = serve(listeners, None, LIMITS, move |_, _| {
        let (namespace, name) = &*service;
        let count = count.load(Ordering::Relaxed);
        let is_current = facts.health().is_current();
        let answer = service_health((namespace, name), count, is_current);
        std::future::ready(json(answer))
    });
    OpenPort {
        port: check.port,
        local_endpoints,
        _task: AbortOnDropHandle::new(tokio::spawn(serving)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    fn facts() -> Arc<Facts> {
        Arc::new(Facts::new(Arc::default(), Arc::default()))
    }

    #[tokio::test]
    async fn pages_have_kube_proxys_paths_and_headers() {
        let facts = facts();
        facts.committed(Timestamp::UNIX_EPOCH);
        for (page, path, status, part) in [
            (HEALTH, "/healthz", 200, "\"nodeEligible\":true"),
            (HEALTH, "/livez", 200, "\"currentTime\""),
            (HEALTH, "/metrics", 404, "not found"),
            (
                METRICS,
                "/metrics",
                200,
                "kubeproxy_proxy_healthz_total{code=\"200\"} 1",
            ),
            (METRICS, "/proxyMode", 200, "nftables"),
            (METRICS, "/livez", 404, "not found"),
        ] {
            let answer = page(&facts, path);
            assert_eq!(answer.status(), status, "{path}");
            if page as usize == HEALTH as usize && status == 200 {
                let headers = answer.headers();
                assert_eq!(headers[CONTENT_TYPE], "application/json");
                assert_eq!(headers["x-content-type-options"], "nosniff");
            }
            let body = answer.into_body().collect().await.expect("a body");
            let body = String::from_utf8_lossy(&body.to_bytes()).into_owned();
            assert!(body.contains(part), "{path}: {body}");
        }
        facts.set_eligibility(Eligibility::Leaving);
        assert_eq!(HEALTH(&facts, "/healthz").status(), 503);
        assert_eq!(HEALTH(&facts, "/livez").status(), 200);
    }

    async fn get(port: u16) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
        let request = "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut all = String::new();
        stream.read_to_string(&mut all).await.ok()?;
        Some(all)
    }

    #[tokio::test]
    async fn a_health_check_port_follows_its_service() {
        let (facts, mut ports) = (facts(), ServicePorts::default());
        let free = bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
        let port = free.port().expect("a port");
        let check = |local_endpoints| HealthCheck {
            namespace: "default".into(),
            name: "web".into(),
            port,
            local_endpoints,
        };
        // The port is in use until `free` is dropped.
        let unopened = ports.set(vec![check(1)], &facts);
        assert_eq!(unopened.len(), 1, "{unopened:?}");
        drop(free);
        assert!(ports.set(vec![check(0)], &facts).is_empty());
        let answer = get(port).await.expect("an answer");
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
        assert!(ports.set(vec![check(2)], &facts).is_empty());
        let answer = get(port).await.expect("an answer");
        assert!(
            answer.starts_with("HTTP/1.1 200") && answer.contains("\"localEndpoints\":2"),
            "{answer}"
        );
        ports.set(vec![], &facts);
        // The task ends at its next poll.
        tokio::task::yield_now().await;
        assert_eq!(get(port).await, None);
    }
}
