//! The connections behind one client. Requests share one connection and never use up its streams; watches share as many
//! other connections as they need.
//!
//! A kube-apiserver allows 100 streams on a connection (`--http2-max-streams-per-connection`), and each watch occupies
//! one. On a shared connection, the watches of a few hundred ConfigMaps would leave no stream for a patch. Every
//! request has a deadline. A request that misses it discards its connection, because a peer that was cut off sends
//! nothing.
//!
//! When the key material on disk changes (a renewed certificate, a rewritten kubeconfig), all connections are replaced.
//! An apiserver checks, at every request, the certificate with which the connection was opened. Watches then end
//! between two events, and their owners resume them from the last version that they have seen.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use futures::future::BoxFuture;
use http_body_util::{BodyExt as _, Limited};
use hyper::body::{Bytes, Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_TYPE, RETRY_AFTER};
use hyper::{Request, Response, StatusCode, Uri};
use kube::client::Body;
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep, timeout};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tower::util::BoxCloneSyncService;
use tower::{BoxError, Service, ServiceExt as _};

use super::failure::ClientFailure;
use super::pace::Pace;
use holdfast_core::lock::lock;

/// Maximum number of concurrent requests of one client; an apiserver allows 100 streams.
const MAX_CONCURRENT_REQUESTS: usize = 32;
/// Maximum number of watches on one connection; an apiserver allows 100 streams.
const MAX_WATCHES_PER_CONNECTION: usize = 80;
/// Maximum time until an answer begins, and between two parts of it. A watch may be silent for longer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// If a caller drops a request after this time, the connection is discarded as after a missed deadline, unless it has
/// answered another request meanwhile. A heartbeat, for example, waits for ten seconds only.
const ABANDON_TIMEOUT: Duration = Duration::from_secs(5);
/// Extra time that a watch may last beyond its `timeoutSeconds`. A load balancer keeps a connection open after it has
/// lost the server behind it.
const WATCH_MARGIN: Duration = Duration::from_secs(30);
/// Minimum interval between two checks of the key material before requests.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum interval between two checks: a client whose watches are silent sends no requests.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// A connection that has answered no request for this long may have been closed.
const MAX_IDLE: Duration = Duration::from_secs(60);
/// Maximum number of bytes that are read of a refusal.
const MAX_REFUSAL_BYTES: usize = 4096;

/// A service that sends requests.
pub(super) type Http = BoxCloneSyncService<Request<Body>, Response<Incoming>, BoxError>;

/// The result of reading the key material.
pub(super) struct Material {
    /// Opens a new pool of connections.
    pub(super) open: Box<dyn Fn() -> Http + Send + Sync>,
    /// Adds the headers that all requests have, and passes a request to the pool that it [carries](send_over_pool).
    pub(super) front: Http,
    /// The files from which it was read.
    pub(super) files: Vec<PathBuf>,
}

/// Reads the key material; the error is a sentence.
pub(super) type Read = Box<dyn Fn() -> BoxFuture<'static, Result<Material, String>> + Send + Sync>;

/// The pool over which a request is sent.
#[derive(Clone)]
struct Pool(Http);

/// Sends a request over the pool in its extensions.
pub(super) async fn send_over_pool(
    mut request: Request<Body>,
) -> Result<Response<Incoming>, BoxError> {
    match request.extensions_mut().remove::<Pool>() {
        Some(Pool(http)) => http.oneshot(request).await,
        None => Err("a request was sent without a pool".into()),
    }
}

/// Modification time, inode and size of a file: a change alters one of them. A file renamed to this path has another
/// inode.
type Stamp = Option<(SystemTime, u64, u64)>;

fn stamp(path: &Path) -> Stamp {
    use std::os::unix::fs::MetadataExt as _;
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.modified().ok()?, metadata.ino(), metadata.len()))
}

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    files.iter().map(|file| stamp(file)).collect()
}

/// A pool that should hold one connection. While there may be none, one request goes first and opens it.
struct Lane {
    pool: Pool,
    front: Http,
    /// Number of requests or watches in progress.
    open: AtomicUsize,
    /// When the last answer arrived.
    answered: Mutex<Option<Instant>>,
    first: tokio::sync::Mutex<()>,
}

impl Lane {
    fn open(material: &Material) -> Arc<Lane> {
        Arc::new(Lane {
            pool: Pool((material.open)()),
            front: material.front.clone(),
            open: AtomicUsize::new(0),
            answered: Mutex::default(),
            first: tokio::sync::Mutex::default(),
        })
    }

    fn is_warm(&self) -> bool {
        lock(&self.answered).is_some_and(|at| at.elapsed() < MAX_IDLE)
    }

    fn has_answered_since(&self, then: Instant) -> bool {
        lock(&self.answered).is_some_and(|at| at >= then)
    }

    async fn send(&self, mut request: Request<Body>) -> Result<Response<Incoming>, BoxError> {
        request.extensions_mut().insert(self.pool.clone());
        let ahead = if self.is_warm() {
            None
        } else {
            Some(self.first.lock().await).filter(|_| !self.is_warm())
        };
        let answer = self.front.clone().oneshot(request).await;
        if answer.is_ok() {
            *lock(&self.answered) = Some(Instant::now());
        }
        drop(ahead);
        answer
    }
}

/// A slot on a lane, occupied while its request or watch lives.
struct Slot(Arc<Lane>);

impl Slot {
    fn on(lane: &Arc<Lane>) -> Slot {
        lane.open.fetch_add(1, Ordering::Relaxed);
        Slot(Arc::clone(lane))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request that was sent and not answered. If its caller drops it, no other request may find out that the connection
/// is dead.
struct Waiting<'a> {
    generation: &'a Generation,
    lane: Arc<Lane>,
    begun: Instant,
    is_over: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let is_silent = || !self.lane.has_answered_since(self.begun);
        if !self.is_over && self.begun.elapsed() >= ABANDON_TIMEOUT && is_silent() {
            self.generation.discard(&self.lane);
        }
    }
}

/// The connections for one state of the key material.
struct Generation {
    material: Material,
    stamps: Vec<Stamp>,
    requests: Mutex<Arc<Lane>>,
    watches: Mutex<Vec<Arc<Lane>>>,
    ended: CancellationToken,
}

impl Generation {
    fn new(material: Material, stamps: Vec<Stamp>) -> Arc<Generation> {
        Arc::new(Generation {
            requests: Mutex::new(Lane::open(&material)),
            watches: Mutex::default(),
            ended: CancellationToken::new(),
            material,
            stamps,
        })
    }

    /// Returns a slot for a watch: on the first connection with room, otherwise on a new one. Connections without
    /// watches are closed.
    fn watch_slot(&self) -> Slot {
        let mut lanes = lock(&self.watches);
        lanes.retain(|lane| lane.open.load(Ordering::Relaxed) > 0);
        let with_room = lanes
            .iter()
            .find(|lane| lane.open.load(Ordering::Relaxed) < MAX_WATCHES_PER_CONNECTION);
        match with_room {
            Some(lane) => Slot::on(lane),
            None => {
                let lane = Lane::open(&self.material);
                let slot = Slot::on(&lane);
                lanes.push(lane);
                slot
            }
        }
    }

    fn request_slot(&self) -> Slot {
        Slot::on(&lock(&self.requests))
    }

    /// Sends a request; returns `None` if it was not answered within `limit`.
    async fn send_within(
        &self,
        lane: &Arc<Lane>,
        request: Request<Body>,
        limit: Duration,
    ) -> Option<Result<Response<Incoming>, BoxError>> {
        let mut waiting = Waiting {
            generation: self,
            lane: Arc::clone(lane),
            begun: Instant::now(),
            is_over: false,
        };
        let answer = timeout(limit, lane.send(request)).await.ok();
        waiting.is_over = true;
        if answer.is_none() {
            self.discard(lane);
        }
        answer
    }

    /// Discards a connection that did not answer in time: no more requests use it.
    fn discard(&self, lane: &Arc<Lane>) {
        let mut requests = lock(&self.requests);
        if Arc::ptr_eq(&requests, lane) {
            *requests = Lane::open(&self.material);
        }
        lock(&self.watches).retain(|other| !Arc::ptr_eq(other, lane));
    }
}

/// When the key material was checked last, and the state of the files that could not be used.
struct MaterialCheck {
    at: Instant,
    unusable: Vec<Stamp>,
}

struct Shared {
    read: Read,
    pace: Pace,
    permits: Semaphore,
    generation: Mutex<Arc<Generation>>,
    last_check: tokio::sync::Mutex<MaterialCheck>,
}

impl Shared {
    /// Returns the connections to use now; replaces them if the key material has changed.
    async fn current(&self) -> Arc<Generation> {
        let generation = Arc::clone(&lock(&self.generation));
        // While another caller checks the files, the existing connections are used.
        let Ok(mut last_check) = self.last_check.try_lock() else {
            return generation;
        };
        if last_check.at.elapsed() < CHECK_INTERVAL {
            return generation;
        }
        last_check.at = Instant::now();
        let found = stamps(&generation.material.files);
        if found == generation.stamps || found == last_check.unusable {
            return generation;
        }
        match (self.read)().await {
            Ok(material) => {
                // Stamps from before the reading: the next check finds what changes meanwhile.
                let fresh = if material.files == generation.material.files {
                    found
                } else {
                    stamps(&material.files)
                };
                let fresh = Generation::new(material, fresh);
                *lock(&self.generation) = Arc::clone(&fresh);
                generation.ended.cancel();
                tracing::info!(
                    "the kubeconfig or a file that it refers to has changed; reconnecting to the apiserver"
                );
                fresh
            }
            Err(error) => {
                tracing::warn!(
                    error,
                    "the changed kubeconfig is invalid; keeping the existing connections"
                );
                last_check.unusable = found;
                generation
            }
        }
    }

    async fn send(&self, request: Request<Body>) -> Result<Response<Answer>, BoxError> {
        let watch = is_watch(request.uri());
        if !watch && !is_event(request.uri()) {
            self.pace.wait(request.uri().path()).await;
        }
        let begun = Instant::now();
        let what = format!("{} {}", request.method(), request.uri().path());
        let late = || ClientFailure::Deadline {
            request: what.clone(),
            after: ANSWER_TIMEOUT,
        };
        // Watches are not limited: each gets a slot at once.
        let permit = match watch {
            true => None,
            false => Some(
                timeout(ANSWER_TIMEOUT, self.permits.acquire())
                    .await
                    .map_err(|_| late())??,
            ),
        };
        let generation = self.current().await;
        let slot = if watch {
            generation.watch_slot()
        } else {
            generation.request_slot()
        };
        let limit = watch_limit(request.uri());
        let left = ANSWER_TIMEOUT.saturating_sub(begun.elapsed());
        let answer = generation.send_within(&slot.0, request, left).await;
        let answer = answer.ok_or_else(late)??;
        drop(permit);
        if answer.status() == StatusCode::TOO_MANY_REQUESTS && !is_json(&answer) {
            return Err(busy_error(answer).await.into());
        }
        let flow = if watch {
            Flow::Watch {
                ended: Box::pin(generation.ended.clone().cancelled_owned()),
                overdue: limit.map(|limit| Box::pin(tokio::time::sleep(limit))),
                is_between: true,
            }
        } else {
            Flow::Answer {
                pause: Box::pin(tokio::time::sleep(ANSWER_TIMEOUT)),
                request: what,
            }
        };
        Ok(answer.map(|inner| Answer {
            inner,
            flow,
            _slot: slot,
        }))
    }
}

fn is_watch(uri: &Uri) -> bool {
    let mut pairs = uri.query().unwrap_or_default().split('&');
    pairs.any(|pair| matches!(pair, "watch=true" | "watch=1"))
}

/// Maximum duration of a watch: its `timeoutSeconds` and a margin.
fn watch_limit(uri: &Uri) -> Option<Duration> {
    let mut pairs = uri.query().unwrap_or_default().split('&');
    let seconds = pairs.find_map(|pair| pair.strip_prefix("timeoutSeconds="))?;
    let seconds = Duration::from_secs(u64::from(seconds.parse::<u32>().ok()?));
    Some(seconds + WATCH_MARGIN)
}

/// Whether a request is about events, which have a rate limit of their own.
fn is_event(uri: &Uri) -> bool {
    uri.path().split('/').any(|part| part == "events")
}

fn is_json(answer: &Response<Incoming>) -> bool {
    let kind = answer.headers().get(CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"))
}

/// Reads a refusal of the apiserver's flow control. It has no Status, and its `Retry-After` header says when to retry.
async fn busy_error(answer: Response<Incoming>) -> ClientFailure {
    let seconds = answer
        .headers()
        .get(RETRY_AFTER)
        .and_then(|value| value.to_str().ok()?.parse().ok());
    let body = timeout(
        ANSWER_TIMEOUT,
        Limited::new(answer.into_body(), MAX_REFUSAL_BYTES).collect(),
    );
    let text = body.await.ok().and_then(Result::ok).map(|b| b.to_bytes());
    ClientFailure::Busy {
        message: String::from_utf8_lossy(&text.unwrap_or_default())
            .trim()
            .to_owned(),
        retry_after: seconds.map(Duration::from_secs),
    }
}

/// When a body ends before the server ends it.
enum Flow {
    /// When no data have arrived for a while.
    Answer {
        pause: Pin<Box<Sleep>>,
        request: String,
    },
    /// When its connection is to be replaced and no event is incomplete, or when it lasts longer than its limit.
    Watch {
        ended: Pin<Box<WaitForCancellationFutureOwned>>,
        overdue: Option<Pin<Box<Sleep>>>,
        is_between: bool,
    },
}

/// The body of an answer. It occupies its slot on the connection.
pub(super) struct Answer {
    inner: Incoming,
    flow: Flow,
    _slot: Slot,
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        match &mut this.flow {
            Flow::Watch {
                ended,
                overdue,
                is_between,
            } => {
                let overdue = overdue.as_mut().map(|sleep| sleep.as_mut().poll(cx));
                if overdue.is_some_and(|overdue| overdue.is_ready()) {
                    let cut = || Err("a watch was cut off in the middle of an event".into());
                    return Poll::Ready((!*is_between).then(cut));
                }
                if *is_between && ended.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(None);
                }
                let frame = ready!(Pin::new(&mut this.inner).poll_frame(cx));
                if let Some(data) = frame
                    .as_ref()
                    .and_then(|f| f.as_ref().ok()?.data_ref())
                    .filter(|data| !data.is_empty())
                {
                    *is_between = data.ends_with(b"\n");
                }
                Poll::Ready(frame.map(|f| f.map_err(Into::into)))
            }
            Flow::Answer { pause, request } => match Pin::new(&mut this.inner).poll_frame(cx) {
                Poll::Ready(frame) => {
                    pause.as_mut().reset(Instant::now() + ANSWER_TIMEOUT);
                    Poll::Ready(frame.map(|f| f.map_err(Into::into)))
                }
                Poll::Pending => pause.as_mut().poll(cx).map(|()| {
                    let late = ClientFailure::Deadline {
                        request: std::mem::take(request),
                        after: ANSWER_TIMEOUT,
                    };
                    Some(Err(late.into()))
                }),
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// The service through which a kube client sends its requests.
#[derive(Clone)]
pub(super) struct Connections(Arc<Shared>);

impl Connections {
    /// Reads the key material for the first time. Nothing is sent yet.
    pub(super) async fn new(read: Read, pace: Pace) -> Result<Connections, String> {
        let material = read().await?;
        let stamps = stamps(&material.files);
        let shared = Arc::new(Shared {
            read,
            pace,
            permits: Semaphore::new(MAX_CONCURRENT_REQUESTS),
            generation: Mutex::new(Generation::new(material, stamps)),
            last_check: tokio::sync::Mutex::new(MaterialCheck {
                at: Instant::now(),
                unusable: vec![],
            }),
        });
        let weak = Arc::downgrade(&shared);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(IDLE_CHECK_INTERVAL).await;
                // The client may have been dropped.
                let Some(shared) = weak.upgrade() else {
                    return;
                };
                shared.current().await;
            }
        });
        Ok(Connections(shared))
    }
}

impl Service<Request<Body>> for Connections {
    type Response = Response<Answer>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<Answer>, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let shared = Arc::clone(&self.0);
        Box::pin(async move { shared.send(request).await })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: &str, uri: &str) -> Request<Body> {
        let request = Request::builder().method(method).uri(uri);
        request.body(Body::empty()).expect("a request")
    }

    #[test]
    fn watches_and_requests_are_distinguished() {
        for (uri, expected) in [
            ("/api/v1/pods?watch=true&resourceVersion=1", true),
            ("/api/v1/pods?fieldSelector=a&watch=1", true),
            ("/api/v1/pods?resourceVersion=1", false),
            ("/api/v1/pods?fieldSelector=watch=true", false),
            ("/api/v1/pods", false),
        ] {
            assert_eq!(is_watch(&uri.parse().expect("a URI")), expected, "{uri}");
        }
    }

    /// Connections over the service `send`, and the number of pools opened.
    async fn over(send: Http) -> (Connections, Arc<AtomicUsize>) {
        let opened = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&opened);
        let read: Read = Box::new(move || {
            let (counted, send) = (Arc::clone(&counted), send.clone());
            let open = move || {
                counted.fetch_add(1, Ordering::Relaxed);
                send.clone()
            };
            Box::pin(async move {
                Ok(Material {
                    open: Box::new(open),
                    front: BoxCloneSyncService::new(tower::service_fn(send_over_pool)),
                    files: vec![],
                })
            })
        });
        let connections = Connections::new(read, Pace::default()).await;
        (connections.expect("key material"), opened)
    }

    fn silent() -> Http {
        BoxCloneSyncService::new(tower::service_fn(|_: Request<Body>| {
            std::future::pending::<Result<Response<Incoming>, BoxError>>()
        }))
    }

    #[tokio::test(start_paused = true)]
    async fn cancelling_a_request_closes_its_connection() {
        let (mut connections, opened) = over(silent()).await;
        for (seconds, method, uri, pools) in [
            (4, "PUT", "/apis/coordination.k8s.io/v1/leases/n", 1),
            (9, "PUT", "/apis/coordination.k8s.io/v1/leases/n", 2),
            (4, "GET", "/api/v1/pods?watch=true", 3),
            (9, "GET", "/api/v1/pods?watch=true", 4),
            (4, "GET", "/api/v1/pods?watch=true", 5),
        ] {
            let patience = Duration::from_secs(seconds);
            let answer = timeout(patience, connections.call(request(method, uri))).await;
            assert!(answer.is_err(), "no answer");
            assert_eq!(opened.load(Ordering::Relaxed), pools, "{seconds} {uri}");
        }
    }

    /// Sends over HTTP/1.1 to a server that sends one event of a watch and `rest`, and then nothing.
    fn one_event_then(rest: &'static str) -> Http {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let send = move |request: Request<Body>| async move {
            let (near, mut far) = tokio::io::duplex(4096);
            tokio::spawn(async move {
                let mut asked = vec![0; 4096];
                let _ = far.read(&mut asked).await;
                let text = format!("{{}}\n{rest}");
                let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
                let chunk = format!("{head}{:x}\r\n{text}\r\n", text.len());
                let _ = far.write_all(chunk.as_bytes()).await;
                std::future::pending::<()>().await;
            });
            let io = hyper_util::rt::TokioIo::new(near);
            let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await?;
            tokio::spawn(connection);
            Ok::<_, BoxError>(sender.send_request(request).await?)
        };
        BoxCloneSyncService::new(tower::service_fn(send))
    }

    #[tokio::test(start_paused = true)]
    async fn a_silently_broken_watch_ends_shortly_after_its_timeout() {
        for (rest, is_clean) in [("", true), ("{\"type\":", false)] {
            let (mut connections, _) = over(one_event_then(rest)).await;
            let watch = request("GET", "/api/v1/pods?watch=true&timeoutSeconds=290");
            let answer = connections.call(watch).await.expect("an answer");
            let begun = Instant::now();
            let body = timeout(Duration::from_secs(600), answer.into_body().collect()).await;
            let body = body.expect("an end");
            assert_eq!(begun.elapsed().as_secs(), 320, "{rest:?}");
            assert_eq!(body.is_ok(), is_clean, "{rest:?}");
        }
        let plain = "/api/v1/pods?watch=true".parse().expect("a URI");
        assert_eq!(watch_limit(&plain), None);
    }

    #[tokio::test(start_paused = true)]
    async fn an_unanswered_request_times_out_and_closes_its_connection() {
        let (mut connections, opened) = over(silent()).await;
        for (method, uri, pools) in [
            ("PATCH", "/api/v1/namespaces/n/pods/p/status", 2),
            ("GET", "/api/v1/pods?watch=true", 3),
            ("GET", "/api/v1/pods?watch=true", 4),
        ] {
            let begun = Instant::now();
            let error = connections
                .call(request(method, uri))
                .await
                .err()
                .expect("no answer");
            assert_eq!(begun.elapsed().as_secs(), ANSWER_TIMEOUT.as_secs());
            let text = error.to_string();
            assert!(text.starts_with(method) && text.ends_with("not answered within 20s"));
            assert_eq!(opened.load(Ordering::Relaxed), pools, "{method} {uri}");
        }
    }
}
