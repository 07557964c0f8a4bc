//! The actor that owns resources shared by the node's pods: admission, preemption, eviction, termination at shutdown,
//! resizes, ReadWriteOncePod claims, and exclusive resources. [`Ledger`] and [`Managers`] decide. Decisions go to the
//! inboxes of workers, and a request that waits for room is answered when there is room.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::{mpsc, oneshot, watch};

use super::log_dropped_reply;
use super::{AdmissionNode, DeviceManager, OwnNode, devices, manager_metrics};
use crate::events::{Events, Kind};
use crate::metrics::Metrics;
use crate::pod::inbox::Inbox;
use holdfast_config::Config;
use holdfast_core::node::admit::{self, NodeResources, NodeState, Refusal};
use holdfast_core::node::devices::{Devices, Slot};
use holdfast_core::node::eviction::Pressures;
use holdfast_core::node::ledger::{Decision, Eviction, Ledger, requests_more};
use holdfast_core::node::managers::Managers;
use holdfast_core::pod;
use holdfast_core::pod::lifecycle::Verdict;
use holdfast_core::pod::pinning::Pinning;
use holdfast_core::pod::resources::Amounts;
use holdfast_core::pod::worker::Input;
use holdfast_cri::Features;
use holdfast_sys::machine::Machine;

/// A request to the actor.
enum Request {
    Admit {
        pod: Arc<Pod>,
        inbox: Inbox,
        reply: oneshot::Sender<Result<(), Refusal>>,
    },
    Resize {
        pod: Arc<Pod>,
        has: Arc<Pod>,
        reply: oneshot::Sender<Result<(), Refusal>>,
    },
    CancelResize {
        pod: Arc<Pod>,
        reply: oneshot::Sender<()>,
    },
    AcquireExclusiveClaim {
        uid: String,
        namespace: String,
        claim: String,
        reply: oneshot::Sender<bool>,
    },
    Evict {
        eviction: Eviction,
        reply: oneshot::Sender<bool>,
    },
    Terminate {
        uid: String,
        verdict: Verdict,
        reply: oneshot::Sender<bool>,
    },
    ReleaseRequests {
        uid: String,
        has_stopped: bool,
    },
    Release(String),
    Pods(oneshot::Sender<Vec<Arc<Pod>>>),
    Managers(oneshot::Sender<Managers>),
    VolumesRetried,
}

/// A handle to send requests to the actor; clones share it.
#[derive(Clone)]
pub struct LedgerHandle {
    /// Unbounded: each caller awaits its reply, and requests without a reply occur a few times per pod. Requests are
    /// handled in the order in which they are sent.
    requests: mpsc::UnboundedSender<Request>,
    pinning: watch::Receiver<Arc<Pinning>>,
}

/// The receiving end, for [`run`].
pub struct Requests {
    queue: mpsc::UnboundedReceiver<Request>,
    managers: Managers,
    pinning: watch::Sender<Arc<Pinning>>,
}

/// Creates a handle and the receiving end. `managers` assign exclusive resources to pods.
#[must_use]
pub fn channel(managers: Managers) -> (LedgerHandle, Requests) {
    #[expect(
        clippy::disallowed_methods,
        reason = "the number of pods bounds it, see LedgerHandle"
    )]
    let (sender, queue) = mpsc::unbounded_channel();
    let (pinning, pinned) = watch::channel(Arc::new(managers.pinning()));
    let handle = LedgerHandle {
        requests: sender,
        pinning: pinned,
    };
    let requests = Requests {
        queue,
        managers,
        pinning,
    };
    (handle, requests)
}

/// A pending admission. Dropping it withdraws the request.
#[derive(Debug)]
pub struct Admission(oneshot::Receiver<Result<(), Refusal>>);

impl Admission {
    /// Waits for the decision. A critical pod waits until other pods have been preempted.
    pub async fn answer(self) -> Result<(), Refusal> {
        match self.0.await {
            Ok(answer) => answer,
            // The actor ends only with the process.
            Err(_) => std::future::pending().await,
        }
    }
}

impl LedgerHandle {
    /// Sends a request and waits for the reply. The actor lives as long as the
    /// process; without it, the callers end as well.
    async fn request<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> T {
        let (reply, answer) = oneshot::channel();
        if self.requests.send(request(reply)).is_ok()
            && let Ok(answer) = answer.await
        {
            return answer;
        }
        std::future::pending().await
    }

    fn send(&self, request: Request) {
        if self.requests.send(request).is_err() {
            tracing::debug!("the ledger of pods has stopped: the process is exiting");
        }
    }

    /// Requests admission. The request is sent immediately, and pods are admitted in the order of requests.
    pub fn admit(&self, pod: Arc<Pod>, inbox: Inbox) -> Admission {
        let (reply, answer) = oneshot::channel();
        self.send(Request::Admit { pod, inbox, reply });
        Admission(answer)
    }

    /// Requests the sizes in the pod's spec; `has` is the pod with its current sizes. If the request does not fit, the
    /// worker gets [`Input::ResourcesFreed`] when it does.
    pub(crate) async fn request_resize(&self, pod: Arc<Pod>, has: Arc<Pod>) -> Result<(), Refusal> {
        self.request(|reply| Request::Resize { pod, has, reply })
            .await
    }

    /// Withdraws a resize: the pod has the sizes of its spec.
    pub async fn cancel_resize(&self, pod: Arc<Pod>) {
        self.request(|reply| Request::CancelResize { pod, reply })
            .await;
    }

    /// Acquires a claim that only one pod may use at a time (ReadWriteOncePod). Returns whether the pod has it.
    pub async fn acquire_exclusive_claim(&self, pod: &Pod, namespace: &str, claim: &str) -> bool {
        let (uid, namespace, claim) = (
            pod::uid(pod).to_owned(),
            namespace.to_owned(),
            claim.to_owned(),
        );
        self.request(|reply| Request::AcquireExclusiveClaim {
            uid,
            namespace,
            claim,
            reply,
        })
        .await
    }

    /// Evicts a pod. Returns false if the pod is unknown or already terminating.
    pub async fn evict(&self, eviction: Eviction) -> bool {
        self.request(|reply| Request::Evict { eviction, reply })
            .await
    }

    /// Terminates a pod even if it is already terminating: for the machine's shutdown, or to shorten its
    /// grace period. Returns whether the pod exists.
    pub async fn terminate(&self, uid: &str, verdict: Verdict) -> bool {
        let uid = uid.to_owned();
        self.request(|reply| Request::Terminate {
            uid,
            verdict,
            reply,
        })
        .await
    }

    /// Releases the pod's requests for other pods, because the pod has left its source or has no running containers any
    /// more. Sent before the terminal phase is published, because the scheduler then sends the next pod.
    pub fn release_requests(&self, uid: &str, has_stopped: bool) {
        let uid = uid.to_owned();
        self.send(Request::ReleaseRequests { uid, has_stopped });
    }

    /// Removes the pod after all its resources are released.
    pub fn release(&self, uid: &str) {
        self.send(Request::Release(uid.to_owned()));
    }

    /// The admitted pods.
    pub async fn pods(&self) -> Vec<Arc<Pod>> {
        self.request(Request::Pods).await
    }

    /// A copy of the current assignments of exclusive CPUs and memory.
    pub async fn managers(&self) -> Managers {
        self.request(Request::Managers).await
    }

    /// The CPUs and NUMA nodes that containers are bound to, as a watch.
    #[must_use]
    pub fn pinning(&self) -> watch::Receiver<Arc<Pinning>> {
        self.pinning.clone()
    }

    /// Wakes pods that wait for volumes, because a storage driver was registered or removed.
    pub(crate) fn drivers_changed(&self) {
        self.send(Request::VolumesRetried);
    }

    /// Wakes pods that wait for volumes, because a deleted pod has released volumes that only one pod may use.
    pub(crate) fn volumes_freed(&self) {
        self.send(Request::VolumesRetried);
    }
}

/// A pod that waits for admission.
struct Waiting {
    pod: Arc<Pod>,
    inbox: Inbox,
    reply: oneshot::Sender<Result<(), Refusal>>,
}

/// What the ledger uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub machine: Arc<Machine>,
    /// The resources that pods may use on this node.
    pub allocatable: Amounts,
    /// Whether containers may swap.
    pub swaps: bool,
    pub node: Arc<OwnNode>,
    pub events: Events,
    pub metrics: Arc<Metrics>,
    pub devices: Arc<DeviceManager>,
    pub features: watch::Sender<Features>,
    pub pressures: watch::Sender<Pressures>,
    pub shutting_down: watch::Sender<bool>,
    /// Releases the resources of a pod whose devices could not be allocated.
    pub handle: LedgerHandle,
}

struct Actor {
    parts: Arc<Parts>,
    ledger: Ledger,
    inboxes: BTreeMap<String, Inbox>,
    waiting: Vec<Waiting>,
    /// Pods of the API that wait until the Node is known, in the order of their requests.
    before_node: Vec<Waiting>,
    /// The origin of the ledger's times.
    epoch: tokio::time::Instant,
    managers: Managers,
    pinning: watch::Sender<Arc<Pinning>>,
    /// Whether the checkpoints lack assignments of the managers.
    unsaved: bool,
    /// Admitted pods, with the allocations to request from device plugins. They are notified after the checkpoints are
    /// written: their resources must not be assigned to other pods after a restart.
    granted: Vec<(Waiting, Vec<Slot>)>,
}

/// Handles requests until the process exits.
pub(crate) async fn run(parts: Arc<Parts>, mut requests: Requests) {
    let mut actor = Actor {
        parts,
        ledger: Ledger::default(),
        inboxes: BTreeMap::new(),
        waiting: vec![],
        before_node: vec![],
        epoch: tokio::time::Instant::now(),
        managers: requests.managers,
        pinning: requests.pinning,
        unsaved: false,
        granted: vec![],
    };
    manager_metrics::begin(&actor.parts.metrics, &actor.managers);
    loop {
        tokio::select! {
            // The order is fixed, so that a simulated run replays exactly.
            biased;
            // All branches are cancel-safe.
            request = requests.queue.recv() => match request {
                Some(request) => actor.answer(request),
                None => return,
            },
            () = actor.parts.node.wait_until_known(), if !actor.before_node.is_empty() => actor.admit_after_node(),
            () = actor.preemption_deadline(), if !actor.waiting.is_empty() => actor.stop_waiting_for_overdue(),
        }
        actor.save().await;
        actor.notify_admitted();
    }
}

impl Actor {
    fn answer(&mut self, request: Request) {
        match request {
            Request::Admit { pod, inbox, reply } => self.admit(Waiting { pod, inbox, reply }),
            Request::Resize { pod, has, reply } => {
                let before = self.ledger.pod(pod::uid(&pod));
                self.ledger.set_allocation(&has);
                let result = self.resize(&pod);
                let both = before.zip(self.ledger.pod(pod::uid(&pod)));
                let frees = both.is_some_and(|(before, now)| requests_more(&now, &before));
                log_dropped_reply(reply.send(result));
                if frees {
                    self.retry_resizes("pod_resized");
                }
            }
            Request::CancelResize { pod, reply } => {
                let frees = self.ledger.cancel_resize(&pod);
                log_dropped_reply(reply.send(()));
                if frees {
                    self.retry_resizes("pod_resized");
                }
            }
            Request::AcquireExclusiveClaim {
                uid,
                namespace,
                claim,
                reply,
            } => {
                let ledger = &mut self.ledger;
                let acquired = ledger.acquire_exclusive_claim(&uid, &namespace, &claim);
                log_dropped_reply(reply.send(acquired));
            }
            Request::Evict { eviction, reply } => {
                let accepted = self.ledger.evict(&eviction.uid);
                if accepted {
                    self.parts.metrics.evicted(&eviction.signal);
                    self.notify_worker(&eviction.uid, eviction.verdict);
                }
                log_dropped_reply(reply.send(accepted));
            }
            Request::Terminate {
                uid,
                verdict,
                reply,
            } => {
                let accepted = self.ledger.evict_again(&uid);
                if accepted {
                    self.notify_worker(&uid, verdict);
                }
                log_dropped_reply(reply.send(accepted));
            }
            Request::ReleaseRequests { uid, has_stopped } => {
                self.ledger.release_requests(&uid);
                self.offer_resources(&uid, has_stopped);
            }
            Request::Release(uid) => self.release(&uid),
            Request::Pods(reply) => log_dropped_reply(reply.send(self.ledger.pods())),
            Request::Managers(reply) => log_dropped_reply(reply.send(self.managers.clone())),
            Request::VolumesRetried => self.retry_volumes(),
        }
    }

    /// Admits the pods that waited for the Node, in the order of their requests.
    fn admit_after_node(&mut self) {
        for waiting in std::mem::take(&mut self.before_node) {
            // A dropped reply means that the pod was deleted.
            if !waiting.reply.is_closed() {
                self.admit(waiting);
            }
        }
    }

    /// Waits for the deadline of a preempted pod.
    async fn preemption_deadline(&self) {
        match self.ledger.next_deadline() {
            Some(at) => tokio::time::sleep_until(self.epoch + at).await,
            None => std::future::pending().await,
        }
    }

    /// Stops waiting for preempted pods that exceeded their deadline, and retries the admission of critical pods.
    fn stop_waiting_for_overdue(&mut self) {
        for victim in self.ledger.release_overdue(self.epoch.elapsed()) {
            let message = "Container runtime did not kill the pod within specified grace period.";
            tracing::warn!(
                pod = pod::full_name(&victim),
                "the preempted pod did not terminate in time; the critical pod no longer waits for it"
            );
            let events = &self.parts.events;
            events.pod(&victim, None, Kind::Warning, "ExceededGracePeriod", message);
        }
        self.admit_waiting();
    }

    fn admit_waiting(&mut self) {
        // A dropped reply means that the pod was deleted while it waited.
        self.waiting.retain(|waiting| !waiting.reply.is_closed());
        for waiting in std::mem::take(&mut self.waiting) {
            self.admit(waiting);
        }
        if self.waiting.is_empty() {
            self.ledger.clear_deadlines();
        }
    }

    fn admit(&mut self, waiting: Waiting) {
        let uid = pod::uid(&waiting.pod).to_owned();
        let (parts, now) = (Arc::clone(&self.parts), self.epoch.elapsed());
        let Some(node) = parts.node.node_for_admission(&waiting.pod) else {
            if self.before_node.is_empty() {
                tracing::info!(
                    "pods wait for admission until the apiserver has returned the Node object"
                );
            }
            self.before_node.push(waiting);
            return;
        };
        let decide = |node_state: &NodeState<'_>| self.ledger.admit(&waiting.pod, node_state, now);
        match with_node(&parts, &uid, &node, decide) {
            Decision::Admitted => match self.assign_exclusive(&waiting.pod) {
                Ok(slots) => {
                    let has_own = self.managers.has(&uid);
                    self.inboxes.insert(uid, waiting.inbox.clone());
                    if has_own {
                        self.publish();
                    }
                    self.granted.push((waiting, slots));
                }
                Err(refusal) => {
                    self.release(&uid);
                    log_dropped_reply(waiting.reply.send(Err(refusal)));
                }
            },
            Decision::Refused(refusal) => {
                let read = |devices: &Devices| devices.as_device_rejection(&waiting.pod, refusal);
                log_dropped_reply(waiting.reply.send(Err(parts.devices.read(read))));
            }
            Decision::AwaitingPreemption(evictions) => {
                for eviction in evictions {
                    self.parts.metrics.preempted(&eviction.signal);
                    self.notify_worker(&eviction.uid, eviction.verdict);
                }
                self.waiting.push(waiting);
            }
        }
    }

    /// Notifies admitted pods. If a pod needs devices, these are allocated first.
    fn notify_admitted(&mut self) {
        for (waiting, slots) in std::mem::take(&mut self.granted) {
            if slots.is_empty() {
                log_dropped_reply(waiting.reply.send(Ok(())));
            } else {
                let parts = &self.parts;
                let handle = parts.handle.clone();
                devices::allocate(
                    &parts.devices,
                    &parts.metrics,
                    waiting.pod,
                    slots,
                    waiting.reply,
                    move |uid| handle.release(uid),
                );
            }
        }
    }

    /// Assigns exclusive resources to an admitted pod, either all of them or none. Returns
    /// the allocations to request from device plugins.
    fn assign_exclusive(&mut self, pod: &Pod) -> Result<Vec<Slot>, Refusal> {
        let (parts, managers) = (&self.parts, &mut self.managers);
        let begun = Instant::now();
        let decide = |devices: &mut Devices| managers.admit(pod, devices);
        let admission = parts.devices.decide(decide);
        manager_metrics::admitted(&parts.metrics, &admission.counts, begun.elapsed());
        admission.result
    }

    fn resize(&mut self, pod: &Pod) -> Result<(), Refusal> {
        if let Some(now) = self.ledger.pod(pod::uid(pod)) {
            let possible = admit::check_swap(&now, pod, self.parts.swaps)
                .and_then(|()| self.managers.check_resize(&now, pod));
            if let Err(infeasible) = possible {
                // The pod keeps its current sizes and waits for no others.
                self.ledger.cancel_resize(&now);
                return Err(infeasible);
            }
        }
        let allocatable = allocatable(&self.parts, pod::uid(pod));
        let resources = NodeResources {
            allocatable: &allocatable,
            node: None,
        };
        self.ledger.allocate_resize(pod, resources)
    }

    /// Grants freed resources to pods that wait for a resize, in their order, and
    /// wakes their workers. The others keep waiting.
    fn retry_resizes(&mut self, trigger: &str) {
        let mut waiting = self.ledger.pending_resizes();
        loop {
            let before = waiting.len();
            waiting.retain(|pod| {
                let grows = self.resize(pod).is_ok();
                if grows {
                    self.parts.metrics.deferred_resize_accepted(trigger);
                    if let Some(inbox) = self.inboxes.get(pod::uid(pod)) {
                        inbox.send(Input::ResourcesFreed);
                    }
                }
                !grows
            });
            // A granted resize may reduce another resource, so that an earlier pod in the list fits now.
            if waiting.is_empty() || waiting.len() == before {
                return;
            }
        }
    }

    /// Publishes the binding of containers if it changed. Runs before a pod learns of its admission.
    fn publish(&mut self) {
        let now = self.managers.pinning();
        self.unsaved |= self.pinning.send_if_modified(|pinning| {
            let changed = **pinning != now;
            if changed {
                *pinning = Arc::new(now);
            }
            changed
        });
    }

    /// Writes the checkpoints of the managers. A failure is retried after the next
    /// request; pods start nevertheless, as in the kubelet.
    async fn save(&mut self) {
        if !self.unsaved {
            return;
        }
        let (root, checkpoints) = (
            self.parts.config.root_dir.clone(),
            self.managers.checkpoints(),
        );
        let write = move || super::managers::save(&root, &checkpoints);
        match tokio::task::spawn_blocking(write).await {
            Ok(Ok(())) => self.unsaved = false,
            Ok(Err(error)) => tracing::error!(
                error = format!("{error:#}"),
                "writing the CPU and memory checkpoints failed: after a restart, exclusive CPUs and memory may be allocated twice"
            ),
            Err(error) => tracing::error!(%error, "the task that writes the checkpoints failed"),
        }
    }

    fn notify_worker(&self, uid: &str, verdict: Verdict) {
        if let Some(inbox) = self.inboxes.get(uid) {
            inbox.send(Input::Terminate(verdict));
        }
    }

    /// Wakes all workers, so that they retry failed volumes.
    fn retry_volumes(&self) {
        for inbox in self.inboxes.values() {
            inbox.send(Input::DriversChanged);
        }
    }

    fn release(&mut self, uid: &str) {
        self.inboxes.remove(uid);
        let had_exclusive_claim = self.ledger.has_exclusive_claim(uid);
        self.ledger.release(uid);
        self.offer_resources(uid, true);
        if had_exclusive_claim {
            self.retry_volumes();
        }
    }

    /// Offers a pod's resources to waiting pods; exclusive resources only after the pod has stopped.
    fn offer_resources(&mut self, uid: &str, has_stopped: bool) {
        if has_stopped {
            self.parts.devices.release(uid);
            self.managers.release(uid);
            self.publish();
        }
        self.retry_resizes("pods_removed");
        self.admit_waiting();
    }
}

/// Resources that pods may use, including advertised devices; `uid` is the requesting pod.
fn allocatable(parts: &Parts, uid: &str) -> Amounts {
    let mut amounts = parts.allocatable.clone();
    amounts.extend(parts.devices.read(|d| d.allocatable_for(uid)));
    amounts
}

fn with_node<T>(
    parts: &Parts,
    uid: &str,
    node: &AdmissionNode,
    decide: impl FnOnce(&NodeState<'_>) -> T,
) -> T {
    let allocatable = allocatable(parts, uid);
    decide(&NodeState {
        allocatable: &allocatable,
        node: node.node(),
        unsafe_sysctls: &parts.config.unsafe_sysctls,
        kernel: &parts.machine.kernel,
        apparmor: parts.machine.apparmor,
        strict_groups: parts.features.borrow().strict_groups,
        pressures: &parts.pressures.borrow(),
        shutting_down: *parts.shutting_down.borrow(),
    })
}
