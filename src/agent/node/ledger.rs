//! The actor that owns what the node's pods share: admission, preemption, eviction, room to grow, and
//! claims of one pod alone. It decides with [`Ledger`] and tells workers through their inboxes; whoever
//! waits for room is answered when there is some.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::{mpsc, oneshot};

use crate::agent::Context;
use crate::agent::pod::inbox::Inbox;
use crate::core::node::admit::{Here, Refusal};
use crate::core::node::ledger::{Decision, Eviction, Ledger};
use crate::core::pod;
use crate::core::pod::worker::Input;

/// How many requests may wait for the actor.
const QUEUE: usize = 256;

/// A request to the actor.
enum Request {
    Admit {
        pod: Arc<Pod>,
        inbox: Inbox,
        reply: oneshot::Sender<Result<(), Refusal>>,
    },
    Grow {
        pod: Arc<Pod>,
        reply: oneshot::Sender<Result<(), Refusal>>,
    },
    HoldAlone {
        uid: String,
        namespace: String,
        claim: String,
        reply: oneshot::Sender<bool>,
    },
    Evict {
        uid: String,
        signal: String,
        message: String,
    },
    Release(String),
    Pods(oneshot::Sender<Vec<Arc<Pod>>>),
    DriversChanged,
}

/// How to reach the actor; clones reach the same one.
#[derive(Clone)]
pub struct LedgerHandle(mpsc::Sender<Request>);

/// The receiving end, for [`run`].
pub struct Requests(mpsc::Receiver<Request>);

/// A handle and what [`run`] needs to answer it.
#[must_use]
pub fn channel() -> (LedgerHandle, Requests) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    (LedgerHandle(sender), Requests(receiver))
}

impl LedgerHandle {
    /// Sends a request. The actor lives as long as the process: where it is gone, so are the callers.
    async fn ask<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> T {
        let (reply, answer) = oneshot::channel();
        if self.0.send(request(reply)).await.is_ok()
            && let Ok(answer) = answer.await
        {
            return answer;
        }
        std::future::pending().await
    }

    async fn tell(&self, request: Request) {
        if self.0.send(request).await.is_err() {
            tracing::debug!("the ledger of pods has ended with the process");
        }
    }

    /// Admits a pod or says why not; for a critical pod it waits until others have made room.
    pub async fn admit(&self, pod: Arc<Pod>, inbox: Inbox) -> Result<(), Refusal> {
        self.ask(|reply| Request::Admit { pod, inbox, reply }).await
    }

    /// Whether a pod may have the sizes that its spec has. If not, it gets [`Input::RoomFreed`] when
    /// another pod has gone.
    pub async fn grow(&self, pod: Arc<Pod>) -> Result<(), Refusal> {
        self.ask(|reply| Request::Grow { pod, reply }).await
    }

    /// Whether the pod has a claim that only one pod may have at a time.
    pub async fn hold_alone(&self, pod: &Pod, namespace: &str, claim: &str) -> bool {
        let (uid, namespace, claim) = (
            pod::uid(pod).to_owned(),
            namespace.to_owned(),
            claim.to_owned(),
        );
        self.ask(|reply| Request::HoldAlone {
            uid,
            namespace,
            claim,
            reply,
        })
        .await
    }

    /// Ends a pod that uses more of `signal` than it may.
    pub async fn evict(&self, uid: &str, signal: &str, message: String) {
        let (uid, signal) = (uid.to_owned(), signal.to_owned());
        self.tell(Request::Evict {
            uid,
            signal,
            message,
        })
        .await;
    }

    /// The pod holds nothing any more.
    pub async fn release(&self, uid: &str) {
        self.tell(Request::Release(uid.to_owned())).await;
    }

    /// The admitted pods.
    pub async fn pods(&self) -> Vec<Arc<Pod>> {
        self.ask(Request::Pods).await
    }

    /// A storage driver has come or gone.
    pub async fn drivers_changed(&self) {
        self.tell(Request::DriversChanged).await;
    }
}

/// A critical pod that waits for room.
struct Waiting {
    pod: Arc<Pod>,
    inbox: Inbox,
    reply: oneshot::Sender<Result<(), Refusal>>,
}

struct Actor {
    context: Arc<Context>,
    ledger: Ledger,
    inboxes: BTreeMap<String, Inbox>,
    waiting: Vec<Waiting>,
}

/// Answers requests until the process ends.
pub async fn run(context: Arc<Context>, mut requests: Requests) {
    let mut actor = Actor {
        context,
        ledger: Ledger::default(),
        inboxes: BTreeMap::new(),
        waiting: vec![],
    };
    while let Some(request) = requests.0.recv().await {
        actor.answer(request);
    }
}

impl Actor {
    fn answer(&mut self, request: Request) {
        match request {
            Request::Admit { pod, inbox, reply } => self.admit(Waiting { pod, inbox, reply }),
            Request::Grow { pod, reply } => {
                let context = Arc::clone(&self.context);
                let result = with_resources(&context, |here| self.ledger.grow(&pod, here));
                answered(reply.send(result));
            }
            Request::HoldAlone {
                uid,
                namespace,
                claim,
                reply,
            } => answered(reply.send(self.ledger.hold_alone(&uid, &namespace, &claim))),
            Request::Evict {
                uid,
                signal,
                message,
            } => {
                if let Some(eviction) = self.ledger.evict(&uid, &signal, message) {
                    self.context.metrics.evicted(&signal);
                    self.tell(eviction);
                }
            }
            Request::Release(uid) => self.release(&uid),
            Request::Pods(reply) => answered(reply.send(self.ledger.pods())),
            Request::DriversChanged => {
                for inbox in self.inboxes.values() {
                    inbox.send(Input::DriversChanged);
                }
            }
        }
    }

    fn admit(&mut self, waiting: Waiting) {
        let uid = pod::uid(&waiting.pod).to_owned();
        let context = Arc::clone(&self.context);
        match with_node(&context, |here| self.ledger.admit(&waiting.pod, here)) {
            Decision::Admitted => {
                self.inboxes.insert(uid, waiting.inbox);
                answered(waiting.reply.send(Ok(())));
            }
            Decision::Refused(refusal) => answered(waiting.reply.send(Err(refusal))),
            Decision::AwaitingPreemption(evictions) => {
                for eviction in evictions {
                    self.context.metrics.preempted(&eviction.signal);
                    self.tell(eviction);
                }
                self.waiting.push(waiting);
            }
        }
    }

    fn tell(&self, eviction: Eviction) {
        if let Some(inbox) = self.inboxes.get(&eviction.uid) {
            inbox.send(Input::Evicted(eviction.verdict));
        }
    }

    fn release(&mut self, uid: &str) {
        self.inboxes.remove(uid);
        for waits in self.ledger.release(uid) {
            if let Some(inbox) = self.inboxes.get(&waits) {
                inbox.send(Input::RoomFreed);
            }
        }
        // A pod that was deleted while it waited does not wait any more.
        self.waiting.retain(|waiting| !waiting.reply.is_closed());
        for waiting in std::mem::take(&mut self.waiting) {
            self.admit(waiting);
        }
    }
}

/// An answer that nobody waits for any more is dropped.
fn answered<T>(result: Result<(), T>) {
    if result.is_err() {
        tracing::debug!("the worker that asked has turned to something else");
    }
}

fn with_node<T>(context: &Context, decide: impl FnOnce(&Here<'_>) -> T) -> T {
    let (node, allocatable) = (context.node.borrow().clone(), context.allocatable());
    decide(&Here {
        allocatable: &allocatable,
        node: node.as_deref(),
        unsafe_sysctls: &context.config.unsafe_sysctls,
        kernel: &context.machine.kernel,
        apparmor: context.machine.apparmor,
        strict_groups: context.features.borrow().strict_groups,
    })
}

/// For decisions about resources alone.
fn with_resources<T>(context: &Context, decide: impl FnOnce(&Here<'_>) -> T) -> T {
    let allocatable = context.allocatable();
    decide(&Here {
        allocatable: &allocatable,
        node: None,
        unsafe_sysctls: &[],
        kernel: "",
        apparmor: true,
        strict_groups: true,
    })
}
