//! A proxy in front of the real containerd. It makes chosen calls fail, hang, arrive late or lose their
//! response, or closes all connections.
#![allow(dead_code, reason = "each suite needs a part of it")]

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The proxy rejects the call and does not forward it.
    Fail,
    /// The proxy neither forwards nor answers the call.
    Hang,
    /// The proxy forwards the call after a delay.
    Delay,
    /// The proxy forwards the call and drops its response.
    Lose,
    /// The proxy kills the caller before it would forward the call.
    KillBefore,
    /// The proxy forwards the call, and kills the caller before it has the response.
    KillAfter,
}

pub const FAULTS: [Fault; 4] = [Fault::Fail, Fault::Hang, Fault::Delay, Fault::Lose];

/// The active fault, if any: a method's name and the fault of its calls.
type Now = Option<(&'static str, Fault)>;

/// Kills the caller.
type Killer = Arc<Mutex<Box<dyn Fn() + Send>>>;

/// State shared by all connections.
#[derive(Clone)]
struct Shared {
    fault: watch::Receiver<Now>,
    hits: Arc<Mutex<u64>>,
    killer: Killer,
}

pub struct Proxy {
    fault: watch::Sender<Now>,
    hits: Arc<Mutex<u64>>,
    killer: Killer,
    killed: Arc<Mutex<bool>>,
    unreachable: watch::Sender<bool>,
    _runtime: tokio::runtime::Runtime,
}

type Body = BoxBody<Bytes, hyper::Error>;

fn refusal(code: u8) -> Response<Body> {
    let empty = Empty::<Bytes>::new()
        .map_err(|never: Infallible| match never {})
        .boxed();
    Response::builder()
        .header("content-type", "application/grpc")
        .header("grpc-status", code.to_string())
        .header("grpc-message", "injected")
        .body(empty)
        .unwrap()
}

async fn pass_on(
    target: &Path,
    request: Request<Incoming>,
) -> Result<Response<Body>, Box<dyn std::error::Error + Send + Sync>> {
    let stream = UnixStream::connect(target).await?;
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let (mut parts, body) = request.into_parts();
    parts.uri = format!("http://localhost{}", parts.uri.path()).parse()?;
    let answer = sender
        .send_request(Request::from_parts(parts, body))
        .await?;
    Ok(answer.map(|body| body.boxed()))
}

async fn handle(target: PathBuf, shared: Shared, request: Request<Incoming>) -> Response<Body> {
    let Shared {
        mut fault,
        hits,
        killer,
    } = shared;
    let method = request
        .uri()
        .path()
        .rsplit('/')
        .next()
        .unwrap_or_default()
        .to_owned();
    let now = fault
        .borrow_and_update()
        .filter(|(name, _)| *name == method)
        .map(|(_, fault)| fault);
    let first = now.is_some() && {
        let mut hits = hits.lock().unwrap();
        *hits += 1;
        *hits == 1
    };
    match now {
        Some(Fault::Fail) => return refusal(2),
        Some(Fault::Hang) => {
            // Until the fault is lifted; most callers time out before.
            let _ = fault.changed().await;
            return refusal(14);
        }
        Some(Fault::Delay) => tokio::time::sleep(Duration::from_millis(700)).await,
        // Only the first call: the caller's successor must not be killed.
        Some(Fault::KillBefore) if first => {
            killer.lock().unwrap()();
            return refusal(14);
        }
        Some(_) | None => {}
    }
    match pass_on(&target, request).await {
        Ok(answer) if now == Some(Fault::Lose) => {
            // Read the whole response, so that the call has completed.
            let _ = answer.into_body().collect().await;
            refusal(4)
        }
        Ok(answer) if now == Some(Fault::KillAfter) && first => {
            let _ = answer.into_body().collect().await;
            killer.lock().unwrap()();
            refusal(14)
        }
        Ok(answer) => answer,
        Err(_) => refusal(14),
    }
}

impl Proxy {
    /// Listens on `socket` and forwards to `target`, which may be created later.
    pub fn start(socket: PathBuf, target: PathBuf) -> Proxy {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let (fault, faults) = watch::channel(None);
        let hits = Arc::new(Mutex::new(0));
        let killer: Killer = Arc::new(Mutex::new(Box::new(|| {
            panic!("no process to kill was set")
        })));
        let shared = Shared {
            fault: faults,
            hits: Arc::clone(&hits),
            killer: Arc::clone(&killer),
        };
        let listener = runtime.block_on(async { UnixListener::bind(&socket).unwrap() });
        let unreachable = watch::Sender::new(false);
        let is_unreachable = unreachable.subscribe();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let mut is_unreachable = is_unreachable.clone();
                if *is_unreachable.borrow_and_update() {
                    continue;
                }
                let (target, shared) = (target.clone(), shared.clone());
                let service = hyper::service::service_fn(move |request| {
                    let answer = handle(target.clone(), shared.clone(), request);
                    async move { Ok::<_, Infallible>(answer.await) }
                });
                let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service);
                tokio::spawn(async move {
                    tokio::select! {
                        _ = connection => {}
                        _ = is_unreachable.changed() => {}
                    }
                });
            }
        });
        Proxy {
            fault,
            hits,
            killer,
            killed: Arc::default(),
            unreachable,
            _runtime: runtime,
        }
    }

    /// Sets how the caller is killed.
    pub fn kill_with(&self, killer: impl Fn() + Send + 'static) {
        let killed = Arc::clone(&self.killed);
        *self.killer.lock().unwrap() = Box::new(move || {
            killer();
            *killed.lock().unwrap() = true;
        });
    }

    /// Activates a fault.
    pub fn set(&self, method: &'static str, fault: Fault) {
        *self.hits.lock().unwrap() = 0;
        *self.killed.lock().unwrap() = false;
        self.fault.send_replace(Some((method, fault)));
    }

    /// The number of calls that the active fault has affected.
    pub fn hits(&self) -> u64 {
        *self.hits.lock().unwrap()
    }

    /// Whether the active fault has killed the caller.
    pub fn has_killed(&self) -> bool {
        *self.killed.lock().unwrap()
    }

    /// With `true`, closes all connections and accepts no new ones until a call with `false`.
    pub fn set_unreachable(&self, unreachable: bool) {
        self.unreachable.send_replace(unreachable);
    }

    /// Lifts the fault.
    pub fn clear_fault(&self) {
        self.fault.send_replace(None);
    }
}
