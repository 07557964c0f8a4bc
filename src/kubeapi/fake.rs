//! A fake apiserver for tests of code that lists and watches.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::StreamBody;
use hyper::body::{Bytes, Frame};
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::{broadcast, mpsc};

use holdfast_core::lock::lock;

/// An API with ConfigMaps: the answer to a list, and the lines of its watches.
#[derive(Clone)]
pub(crate) struct Fake {
    pub items: Arc<Mutex<Vec<Value>>>,
    /// The HTTP status with which lists are refused; `None` answers with the items.
    refusal: Arc<Mutex<Option<u16>>>,
    lines: broadcast::Sender<String>,
    watching: Arc<AtomicUsize>,
}

/// Counts a watch while its body lives.
struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A ConfigMap `n/m`.
pub fn map(version: u32, text: &str, immutable: bool) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "immutable": immutable, "data": {"k": text},
           "metadata": {"name": "m", "namespace": "n", "uid": "u", "resourceVersion": version.to_string()}})
}

impl Fake {
    pub fn with(items: Vec<Value>) -> Fake {
        Fake {
            items: Arc::new(Mutex::new(items)),
            refusal: Arc::default(),
            lines: broadcast::channel(8).0,
            watching: Arc::default(),
        }
    }

    /// Sends an event to all watches.
    pub fn send_event(&self, kind: &str, object: &Value) {
        _ = self
            .lines
            .send(json!({"type": kind, "object": object}).to_string());
    }

    /// Refuses lists with this HTTP status; `None` answers with the items again.
    pub(crate) fn fail_lists(&self, status: Option<u16>) {
        *lock(&self.refusal) = status;
    }

    /// Returns the number of open watches.
    pub fn watches(&self) -> usize {
        self.watching.load(Ordering::Relaxed)
    }

    pub fn client(&self) -> Client {
        let fake = self.clone();
        let service = tower::service_fn(move |request: hyper::Request<kube::client::Body>| {
            let fake = fake.clone();
            async move {
                let (sender, receiver) = mpsc::channel::<String>(8);
                let is_watch = request.uri().query().unwrap_or_default().contains("watch=");
                let refusal = lock(&fake.refusal).filter(|_| !is_watch);
                if let Some(code) = refusal {
                    let status = json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "message": "refused",
                                        "reason": if code == 403 { "Forbidden" } else { "ServiceUnavailable" }, "code": code});
                    sender
                        .send(status.to_string())
                        .await
                        .expect("there is room");
                } else if is_watch {
                    fake.watching.fetch_add(1, Ordering::Relaxed);
                    let (open, mut lines) =
                        (Open(Arc::clone(&fake.watching)), fake.lines.subscribe());
                    tokio::spawn(async move {
                        let _open = open;
                        loop {
                            tokio::select! {
                                line = lines.recv() => if sender.send(line.expect("a line")).await.is_err() { return },
                                () = sender.closed() => return,
                            }
                        }
                    });
                } else {
                    let list = json!({"apiVersion": "v1", "kind": "ConfigMapList", "metadata": {"resourceVersion": "1"}, "items": *lock(&fake.items)});
                    sender.send(list.to_string()).await.expect("there is room");
                }
                let stream = futures::stream::unfold(receiver, |mut r| async move {
                    r.recv().await.map(|line| {
                        (
                            Ok::<_, Infallible>(Frame::data(Bytes::from(line + "\n"))),
                            r,
                        )
                    })
                });
                let mut response = hyper::Response::new(StreamBody::new(stream));
                if let Some(code) = refusal {
                    *response.status_mut() = hyper::StatusCode::from_u16(code).expect("a code");
                }
                Ok::<_, Infallible>(response)
            }
        });
        Client::new(service, "n")
    }
}

/// Waits up to ten seconds for the condition.
pub async fn until(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..1000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not in time: {what}");
}
