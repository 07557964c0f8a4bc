//! The connections of a client, against a server that counts them: how watches are spread over
//! connections, and how the connections change when the key material changes.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base64::Engine as _;
use futures::StreamExt as _;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::{Request, Response, StatusCode};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::Api;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::broadcast;

use holdfast_https as https;

use holdfast_https::{Body, BoxError, Limits, Peer, Tls};
use holdfast_kubeapi::ApiFailure;
use holdfast_kubeapi::client::{connect, connect_as};
use holdfast_kubeapi::measured::Report;
use holdfast_kubeapi::objects::{OnChange, Watched};
use holdfast_kubeapi::pace::Pace;

/// A certificate authority.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Authority {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::from_ca_cert_pem(&pem, key).unwrap();
        Authority { pem, issuer }
    }

    /// A certificate and its key, PEM.
    fn pair(&self, name: &str) -> (String, String) {
        self.pair_for(name, Duration::from_secs(3600))
    }

    /// The same with a lifetime.
    fn pair_for(&self, name: &str, lives: Duration) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        let now = jiff::Timestamp::now().as_second() - 1_767_225_600;
        let now = rcgen::date_time_ymd(2026, 1, 1) + Duration::from_secs(now.try_into().unwrap());
        (params.not_before, params.not_after) = (now - Duration::from_secs(60), now + lives);
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        (certificate, key.serialize_pem())
    }
}

/// The line that ends all watches.
const END: &str = "end";

/// What a server has observed.
#[derive(Default)]
struct Observed {
    /// The open watches, by connection.
    watches: Mutex<BTreeMap<SocketAddr, usize>>,
    /// The maximum number of them at once.
    peak: AtomicUsize,
    /// All connections that carried a request.
    connections: Mutex<BTreeSet<SocketAddr>>,
    /// For each request its method or `WATCH`, and the common name of its client certificate.
    requests: Mutex<Vec<(String, String)>>,
    /// The number of list requests.
    lists: AtomicUsize,
    /// The number of requests that were rejected because their connection's certificate had expired.
    refused: AtomicUsize,
    /// Rejects reads of single objects as Forbidden, as a node authoriser does.
    forbids: AtomicBool,
    /// The number of requests that were rejected for this reason.
    forbidden: AtomicUsize,
}

impl Observed {
    fn open(&self) -> usize {
        self.watches.lock().unwrap().values().sum()
    }

    /// Registers an open watch. It subscribes before it is counted, so that it receives lines that are sent
    /// after the count.
    fn watch(
        self: &Arc<Observed>,
        lines: &broadcast::Sender<String>,
        from: SocketAddr,
    ) -> (broadcast::Receiver<String>, Open) {
        let receiver = lines.subscribe();
        *self.watches.lock().unwrap().entry(from).or_default() += 1;
        self.peak.fetch_max(self.open(), Ordering::Relaxed);
        (receiver, Open(Arc::clone(self), from))
    }
}

/// An open watch.
struct Open(Arc<Observed>, SocketAddr);

impl Drop for Open {
    fn drop(&mut self) {
        let mut all = self.0.watches.lock().unwrap();
        if let Some(count) = all.get_mut(&self.1) {
            *count -= 1;
        }
    }
}

/// An apiserver that serves every ConfigMap of any name.
struct Server {
    address: SocketAddr,
    seen: Arc<Observed>,
    lines: broadcast::Sender<String>,
    authority: Authority,
}

fn config_map(name: &str, version: u32) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"version": version.to_string()},
           "metadata": {"name": name, "namespace": "n", "uid": "u", "resourceVersion": version.to_string()}})
}

fn answer(value: &Value) -> Response<Body> {
    let mut response = https::text(StatusCode::OK, value.to_string());
    let json = "application/json".parse().unwrap();
    response
        .headers_mut()
        .insert(hyper::header::CONTENT_TYPE, json);
    response
}

impl Server {
    async fn start() -> Server {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let authority = Authority::new();
        let (certificate, key) = authority.pair("server");
        let tls = Tls::fixed(&certificate, &key, &authority.pem).unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (seen, lines) = (Arc::new(Observed::default()), broadcast::channel(64).0);
        let (observed, sender) = (Arc::clone(&seen), lines.clone());
        let limits = Limits {
            connections: 1000,
            evict_unauthenticated: false,
            idle: None,
        };
        tokio::spawn(https::serve(
            listener,
            Some(Arc::new(tls)),
            limits,
            move |peer, request| {
                let answer = Self::answer(&observed, &sender, &peer, &request);
                async move { answer }
            },
        ));
        Server {
            address,
            seen,
            lines,
            authority,
        }
    }

    fn answer(
        seen: &Arc<Observed>,
        lines: &broadcast::Sender<String>,
        peer: &Peer,
        request: &Request<Incoming>,
    ) -> Response<Body> {
        let query = request.uri().query().unwrap_or_default();
        let is_watch = query.contains("watch=true");
        let shown = peer.certificate.as_deref().unwrap();
        let Some(der) = shown.trusted_der() else {
            seen.refused.fetch_add(1, Ordering::Relaxed);
            return https::text(StatusCode::UNAUTHORIZED, "Unauthorized");
        };
        let (who, _) = holdfast_core::node::signing::subject(der).unwrap();
        let what = match is_watch {
            true => "WATCH".to_owned(),
            false => request.method().to_string(),
        };
        // Tests wait for the name and continue immediately, so everything else is counted before it.
        let record = || {
            seen.connections.lock().unwrap().insert(peer.address);
            seen.requests.lock().unwrap().push((what, who));
        };
        if query.contains("metadata.name") && seen.forbids.load(Ordering::Relaxed) {
            record();
            seen.forbidden.fetch_add(1, Ordering::Relaxed);
            let mut refusal = answer(
                &json!({"apiVersion": "v1", "kind": "Status", "status": "Failure",
                "reason": "Forbidden", "code": 403, "message": "no relationship found between node and this object"}),
            );
            *refusal.status_mut() = StatusCode::FORBIDDEN;
            return refusal;
        }
        if is_watch {
            let (receiver, open) = seen.watch(lines, peer.address);
            record();
            let stream = futures::stream::unfold((receiver, open), |mut state| async {
                let line = state.0.recv().await.ok().filter(|line| line != END)?;
                Some((Ok::<_, BoxError>(Frame::data(Bytes::from(line))), state))
            });
            return Response::new(StreamBody::new(stream).boxed_unsync());
        }
        record();
        if let Some(name) = query.split("metadata.name%3D").nth(1) {
            seen.lists.fetch_add(1, Ordering::Relaxed);
            let name = name.split('&').next().unwrap();
            return answer(
                &json!({"apiVersion": "v1", "kind": "ConfigMapList", "metadata": {"resourceVersion": "1"},
                        "items": [config_map(name, 1)]}),
            );
        }
        answer(&json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}))
    }

    /// A kubeconfig that embeds all credentials.
    fn kubeconfig(&self, name: &str) -> String {
        self.kubeconfig_with(self.authority.pair(name))
    }

    fn kubeconfig_with(&self, (certificate, key): (String, String)) -> String {
        let encode = |pem: &str| base64::engine::general_purpose::STANDARD.encode(pem);
        let user = json!({"client-certificate-data": encode(&certificate), "client-key-data": encode(&key)});
        self.kubeconfig_of(user)
    }

    fn kubeconfig_of(&self, user: Value) -> String {
        let authority = base64::engine::general_purpose::STANDARD.encode(&self.authority.pem);
        json!({"apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": format!("https://{}", self.address), "certificate-authority-data": authority}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": user}]})
        .to_string()
    }

    fn send_event(&self, kind: &str, name: &str, version: u32) {
        let event = json!({"type": kind, "object": config_map(name, version)});
        let _ = self.lines.send(format!("{event}\n"));
    }
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Replaces a file as agents do.
fn replace(path: &Path, text: &str) {
    let fresh = path.with_extension("new");
    std::fs::write(&fresh, text).unwrap();
    std::fs::rename(fresh, path).unwrap();
}

fn ignore_changes() -> OnChange {
    Arc::new(|| {})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_have_their_own_connections_and_open_more_as_needed() {
    const OBJECTS: usize = 200;
    let server = Server::start().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    std::fs::write(&path, server.kubeconfig("one")).unwrap();
    let client = connect(&path).await.unwrap();
    let watched: Watched<ConfigMap> = Watched::new(client.clone());
    let names: Vec<String> = (0..OBJECTS).map(|n| format!("m{n}")).collect();
    let following = watched.follow("n", names.iter(), &ignore_changes());
    until("all watches to be open", || server.seen.open() == OBJECTS).await;
    let spread: Vec<usize> = {
        let all = server.seen.watches.lock().unwrap();
        all.values().copied().filter(|n| *n > 0).collect()
    };
    assert!(
        spread.len() == 3 && spread.iter().all(|n| *n <= 80),
        "{spread:?}"
    );
    // Requests use another connection and do not wait for watches.
    let pods: Api<Pod> = Api::namespaced(client, "n");
    let before = server.seen.connections.lock().unwrap().len();
    assert!(before <= 5, "{before} connections for {OBJECTS} objects");
    let slowest = futures::stream::iter(0..50)
        .then(|_| async {
            let begun = Instant::now();
            pods.get("p").await.unwrap();
            begun.elapsed()
        })
        .fold(Duration::ZERO, |most, took| async move { most.max(took) })
        .await;
    assert!(slowest < Duration::from_secs(20), "{slowest:?}");
    assert_eq!(server.seen.connections.lock().unwrap().len(), before);
    // A watch ends with its last user, and no request follows.
    drop(following);
    until("all watches to be closed", || {
        server.seen.open() == 0 && watched.is_empty()
    })
    .await;
}

/// Sends requests until one shows a certificate. The client may have checked the files just before they
/// changed; the next check is a second later.
async fn request_until_certificate(server: &Server, pods: &Api<Pod>, name: &str) {
    let begun = Instant::now();
    loop {
        pods.get("p").await.unwrap();
        let shown = {
            let all = server.seen.requests.lock().unwrap();
            all.iter().any(|(what, who)| what == "GET" && who == name)
        };
        if shown {
            return;
        }
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "{name}: requests do not use the new certificate"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn renewed(server: &Server, path: &Path, renew: impl Fn(&str)) {
    let client = connect(path).await.unwrap();
    let watched: Watched<ConfigMap> = Watched::new(client.clone());
    let _following = watched.follow("n", ["m".to_owned()].iter(), &ignore_changes());
    let pods: Api<Pod> = Api::namespaced(client, "n");
    pods.get("p").await.unwrap();
    until("the watch to be open", || server.seen.open() == 1).await;
    server.send_event("MODIFIED", "m", 2);
    let version = async || {
        let map = watched.get("n", "m").await.unwrap();
        map.data.as_ref().unwrap()["version"].clone()
    };
    while version().await != "2" {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let lists = server.seen.lists.load(Ordering::Relaxed);
    for name in ["two", "three"] {
        renew(name);
        request_until_certificate(server, &pods, name).await;
        let shows = |what: &str| {
            let all = server.seen.requests.lock().unwrap();
            all.iter().any(|(w, who)| w == what && who == name)
        };
        until("the watch to use the new certificate", || shows("WATCH")).await;
        until("the old watch to end", || server.seen.open() == 1).await;
    }
    assert_eq!(
        server.seen.lists.load(Ordering::Relaxed),
        lists,
        "the watch resumed from its last version"
    );
    server.send_event("MODIFIED", "m", 3);
    while version().await != "3" {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rewritten_kubeconfig_reopens_the_connections() {
    let server = Server::start().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    std::fs::write(&path, server.kubeconfig("one")).unwrap();
    renewed(&server, &path, |name| {
        replace(&path, &server.kubeconfig(name));
    })
    .await;
    // An incomplete kubeconfig changes nothing.
    let pods: Api<Pod> = Api::namespaced(connect(&path).await.unwrap(), "n");
    pods.get("p").await.unwrap();
    tokio::time::sleep(Duration::from_millis(1100)).await;
    std::fs::write(&path, "{").unwrap();
    pods.get("p").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewed_certificate_reopens_the_connections() {
    let server = Server::start().await;
    let dir = tempfile::tempdir().unwrap();
    let (path, link) = (dir.path().join("kubeconfig"), dir.path().join("current"));
    let renew = |name: &str| {
        let (certificate, key) = server.authority.pair(name);
        let pair = dir.path().join(name);
        std::fs::write(&pair, certificate + &key).unwrap();
        let fresh = dir.path().join("fresh");
        std::os::unix::fs::symlink(pair, &fresh).unwrap();
        std::fs::rename(fresh, &link).unwrap();
    };
    renew("one");
    let user = json!({"client-certificate": link, "client-key": link});
    std::fs::write(&path, server.kubeconfig_of(user)).unwrap();
    renewed(&server, &path, renew).await;
}

/// A client with idle watches sends no request at which it could check for a new certificate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_client_uses_a_renewed_certificate_before_the_old_one_expires() {
    let server = Server::start().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    let renew = |name: &str| {
        let pair = server.authority.pair_for(name, Duration::from_secs(40));
        replace(&path, &server.kubeconfig_with(pair));
    };
    renew("one");
    let (idle, busy) = (connect(&path).await.unwrap(), connect(&path).await.unwrap());
    let watched: Watched<ConfigMap> = Watched::new(idle.clone());
    let _following = watched.follow("n", ["m".to_owned()].iter(), &ignore_changes());
    until("the watch to be open", || server.seen.open() == 1).await;
    let lists = server.seen.lists.load(Ordering::Relaxed);
    let heartbeat = tokio::spawn(async move {
        let pods: Api<Pod> = Api::namespaced(busy, "n");
        loop {
            pods.get("p").await.unwrap();
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    });
    // Each certificate is renewed before half its lifetime, however late the client found the previous
    // one. None is used after it has expired.
    let mut begun = Instant::now();
    for name in ["two", "three", "four"] {
        tokio::time::sleep_until((begun + Duration::from_secs(15)).into()).await;
        renew(name);
        begun = Instant::now();
        until("the watch to use the new certificate", || {
            let all = server.seen.requests.lock().unwrap();
            all.iter().any(|(what, who)| what == "WATCH" && who == name)
        })
        .await;
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "{:?}",
            begun.elapsed()
        );
    }
    server.send_event("MODIFIED", "m", 7);
    while watched.get("n", "m").await.unwrap().data.as_ref().unwrap()["version"] != "7" {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!heartbeat.is_finished(), "all heartbeats succeeded");
    let pods: Api<Pod> = Api::namespaced(idle, "n");
    pods.get("p").await.unwrap();
    assert_eq!(server.seen.refused.load(Ordering::Relaxed), 0);
    assert_eq!(server.seen.lists.load(Ordering::Relaxed), lists);
}

/// The log output of one test.
#[derive(Clone, Default)]
struct Logged(Arc<Mutex<Vec<u8>>>);

impl Logged {
    /// Captures the log of this thread until the guard is dropped.
    fn here() -> (Logged, tracing::subscriber::DefaultGuard) {
        let logged = Logged::default();
        let writer = logged.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::INFO)
            .with_writer(move || writer.clone())
            .finish();
        (logged, tracing::subscriber::set_default(subscriber))
    }
}

impl std::io::Write for Logged {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A node authoriser grants a pod's objects a little after the pod is bound, and forbids them after the
/// pod is deleted.
#[tokio::test]
async fn forbidden_objects_are_retried_quietly_until_authorised() {
    let (logged, _logging) = Logged::here();
    let server = Server::start().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    std::fs::write(&path, server.kubeconfig("one")).unwrap();
    let watched: Watched<ConfigMap> = Watched::new(connect(&path).await.unwrap());
    let notifications = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&notifications);
    let on_change: OnChange = Arc::new(move || _ = counted.fetch_add(1, Ordering::Relaxed));
    let forbids = |now: bool| server.seen.forbids.store(now, Ordering::Relaxed);
    let forbidden = || server.seen.forbidden.load(Ordering::Relaxed);
    let names = ["m".to_owned()];

    forbids(true);
    let following = watched.follow("n", names.iter(), &on_change);
    // A reader waits for the first response for at most a second.
    until("a forbidden request", || forbidden() > 0).await;
    let refused = watched.get("n", "m").await;
    let is_forbidden = matches!(refused, Err(ApiFailure::Forbidden(_)));
    assert!(is_forbidden, "{refused:?}");
    forbids(false);
    let notified = || notifications.load(Ordering::Relaxed) == 1;
    until("a notification", notified).await;
    assert!(watched.get("n", "m").await.is_ok());

    // The pod is deleted, and with it the authorisation. The object is retried rarely, and its last
    // version stays. The watch begins after the list that notified the users.
    until("the watch to be open", || server.seen.open() == 1).await;
    forbids(true);
    let before = forbidden();
    let _ = server.lines.send(END.to_owned());
    until("the watch to be forbidden", || forbidden() > before).await;
    assert!(watched.get("n", "m").await.is_ok());
    // The next pod that uses the object need not wait for the end of this back-off.
    forbids(false);
    let begun = Instant::now();
    let next = watched.follow("n", names.iter(), &on_change);
    until("the watch to be open again", || server.seen.open() == 1).await;
    assert!(begun.elapsed().as_secs() < 15, "retried only after 30 s");

    // A forbidden watch also ends with its last user.
    forbids(true);
    let before = forbidden();
    let refused = watched.follow("n", ["other".to_owned()].iter(), &on_change);
    until("the second object to be forbidden", || forbidden() > before).await;
    drop((following, next, refused));
    until("all watches to be closed", || watched.is_empty()).await;
    // A request in flight may still arrive.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let last = forbidden();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(forbidden(), last);
    let log = String::from_utf8(logged.0.lock().unwrap().clone()).unwrap();
    assert!(
        !log.contains("WARN") && !log.contains("ERROR") && !log.contains("orbidden"),
        "{log}"
    );
}

/// A proxy that opens tunnels and records the requests for them.
async fn proxy(requests: Arc<Mutex<Vec<String>>>) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut near, _) = listener.accept().await.unwrap();
            let requests = Arc::clone(&requests);
            tokio::spawn(async move {
                let mut head = vec![];
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(near.read_u8().await.unwrap());
                }
                let head = String::from_utf8(head).unwrap();
                let target = head.split(' ').nth(1).unwrap().to_owned();
                requests.lock().unwrap().push(head);
                let mut far = tokio::net::TcpStream::connect(target).await.unwrap();
                near.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            });
        }
    });
    address
}

type Reported = Arc<Mutex<Vec<(String, Option<u16>)>>>;

/// A callback for reports, and the reports that it has received.
fn record_reports() -> (Report, Reported) {
    let reported = Reported::default();
    let records = Arc::clone(&reported);
    let report: Report = Arc::new(
        move |method: &str, _: &str, code: Option<u16>, _: Duration| {
            records.lock().unwrap().push((method.to_owned(), code));
        },
    );
    (report, reported)
}

/// Whether one tunnel was requested, with the user in the URL.
fn is_tunnel(requests: &[String], server: SocketAddr) -> bool {
    let wanted = format!("CONNECT {server} HTTP/1.1\r\n");
    let user = "proxy-authorization: basic";
    requests.len() == 1
        && requests[0].starts_with(&wanted)
        && requests[0].to_lowercase().contains(user)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_through_a_proxy_are_paced_reported_and_renewed() {
    let server = Server::start().await;
    let requests: Arc<Mutex<Vec<String>>> = Arc::default();
    let proxy = proxy(Arc::clone(&requests)).await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    let write = |name: &str| {
        let mut file: Value = serde_json::from_str(&server.kubeconfig(name)).unwrap();
        file["clusters"][0]["cluster"]["proxy-url"] = json!(format!("http://u:p@{proxy}"));
        replace(&path, &file.to_string());
    };
    write("one");
    let (report, reported) = record_reports();
    let client = connect_as(&path, None, Some(report), Pace::new((10.0, 1.0)))
        .await
        .unwrap();
    let pods: Api<Pod> = Api::namespaced(client.clone(), "n");
    let begun = Instant::now();
    for _ in 0..6 {
        pods.get("p").await.unwrap();
    }
    assert!(
        begun.elapsed() >= Duration::from_millis(450),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!(
        *reported.lock().unwrap(),
        vec![("GET".to_owned(), Some(200)); 6]
    );
    assert!(is_tunnel(&requests.lock().unwrap(), server.address));
    // Watches and renewed connections use the proxy, too.
    let watched: Watched<ConfigMap> = Watched::new(client);
    let _following = watched.follow("n", ["m".to_owned()].iter(), &ignore_changes());
    until("the watch to be open", || server.seen.open() == 1).await;
    write("two");
    request_until_certificate(&server, &pods, "two").await;
    // A tunnel is requested before anything goes through it.
    until("all connections to be tunnels", || {
        let tunnels = requests.lock().unwrap().len();
        tunnels >= 3 && server.seen.connections.lock().unwrap().len() == tunnels
    })
    .await;
}

/// As with a kube-apiserver: a connection carries 100 requests at once, and one more waits.
#[tokio::test]
async fn a_connection_to_the_bundled_api_carries_a_hundred_requests() {
    use hyper_util::rt::{TokioExecutor, TokioIo};

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let limits = Limits {
        connections: 4,
        evict_unauthenticated: false,
        idle: None,
    };
    let answer = |_: Peer, request: Request<Incoming>| async move {
        match request.uri().path() {
            "/endless" => std::future::pending().await,
            _ => https::text(StatusCode::OK, "done"),
        }
    };
    tokio::spawn(https::serve(listener, None, limits, answer));
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let stream = TokioIo::new(stream);
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream);
    let (sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let send = |path: &str| {
        let request = Request::get(format!("http://x{path}")).body(String::new());
        let mut sender = sender.clone();
        tokio::spawn(async move {
            let answer = sender.send_request(request.unwrap()).await;
            answer.unwrap().status()
        })
    };
    // By then the server has sent its limit.
    assert_eq!(send("/").await.unwrap(), StatusCode::OK);
    let held: Vec<_> = (0..100).map(|_| send("/endless")).collect();
    let mut more = send("/");
    let waited = tokio::time::timeout(Duration::from_secs(1), &mut more).await;
    assert!(waited.is_err(), "one more request waits");
    held[0].abort();
    assert_eq!(more.await.unwrap(), StatusCode::OK);
}
