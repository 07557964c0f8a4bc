//! Executes the operations of a pod's plan. `core::pod::worker` decides which operations run,
//! and in which order; nothing here decides again.
//!
//! The ten steps of the kubelet's `SyncPod` (`pkg/kubelet/kubelet.go`) are: 1 startup latency and 3 status writer
//! (`agent::pod::worker`), 2 API status (`core::pod::status`), 4 admission (`agent::node::ledger`), 5 pod cgroup and 7
//! directories ([`prepare`]), 6 mirror pod (`agent::pod::mirror`), 8 volumes (`agent::volume`), 9 pull secrets
//! ([`image`]), 10 runtime sync ([`sandbox`], [`start`], [`stop`], [`resize`]). [`observe`] reads the pod's state from
//! the runtime, [`release`] releases the pod's resources.

mod image;
mod observe;
pub(crate) mod prepare;
mod release;
mod resize;
mod sandbox;
pub(crate) mod start;
mod stop;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::asset::{Asset, Assets, Setup};
use super::inbox::Inbox;
use super::journal::Log;
use super::starts::Starts;
use super::status::StatusWriter;
use super::{hooks, mirror};
use crate::events::{Events, Kind};
use crate::metrics::Metrics;
use crate::node::ledger::{Admission, LedgerHandle};
use crate::node::{ClaimManager, OwnNode};
use crate::volume::{self, NotSetUp, SetUp, Volumes};
use holdfast_core::fault::Fault;
use holdfast_core::lock::lock;
use holdfast_core::node::admit::{NODE_AFFINITY, Refusal};
use holdfast_core::pod;
use holdfast_core::pod::journal::{Progress, Step};
use holdfast_core::pod::observed::ObservedPod;
use holdfast_core::pod::resize::Resizing;
use holdfast_core::pod::worker::{Op, Outcome, Update};
use holdfast_core::volume::attachment;
use holdfast_cri::Runtime;
use holdfast_host::PodHost;
use holdfast_kubeapi::pods::PodApi;
use holdfast_sys::clock::Clock;

/// What the operations of all pods use.
pub(crate) struct Parts {
    pub runtime: Arc<dyn Runtime>,
    pub api: Arc<dyn PodApi>,
    pub host: Arc<dyn PodHost>,
    pub clock: Clock,
    pub events: Events,
    pub metrics: Arc<Metrics>,
    pub ledger: LedgerHandle,
    pub node: Arc<OwnNode>,
    pub claims: Arc<ClaimManager>,
    /// Limits how many sandboxes start at the same time.
    pub starts: Arc<Starts>,
    pub settings: prepare::Parts,
    pub containers: start::Parts,
    pub hooks: hooks::Parts,
    pub images: crate::image::Parts,
    pub volumes: Arc<volume::Parts>,
}

/// State shared by all operations of one pod.
pub struct Tools {
    /// What the operations of all pods use.
    pub parts: Arc<Parts>,
    /// Records steps, for `holdfast explain`.
    pub log: Log,
    /// Writes the pod's status.
    pub writer: StatusWriter,
    /// The pod's volumes. One operation at a time uses them.
    pub volumes: tokio::sync::Mutex<Volumes>,
    /// Receives reports of operations and inputs of other tasks.
    pub inbox: Inbox,
    /// Termination messages by container id: the message of an exited container is read once.
    pub messages: Mutex<BTreeMap<String, String>>,
    /// Calls that create and start containers; they may outlive their operation.
    pub starts: TaskTracker,
    /// The settings of the pod's sandbox: the latest of [`Op::Prepare`], or those of a sandbox that an earlier agent
    /// created. A pull that starts earlier waits for them.
    pub setup: watch::Sender<Option<Arc<Setup>>>,
    /// Cancelled when the pod terminates: operations that have not begun are abandoned.
    pub ending: CancellationToken,
    /// Cancelled when the pod was deleted and its end is awaited: patient operations no longer wait.
    pub end_awaited: CancellationToken,
    /// The pending admission, which the dispatcher requested when it started
    /// the worker; the first [`Op::Admit`] takes it.
    pub admission: Mutex<Option<Admission>>,
}

/// One operation, and the state known when it starts.
pub struct Job {
    pub tools: Arc<Tools>,
    pub pod: Arc<Pod>,
    pub update: Update,
    pub observed: Arc<ObservedPod>,
    pub resizing: Resizing,
    pub assets: Assets,
    /// A start was cancelled earlier: its calls must complete before the pod is observed.
    pub start_cancelled: bool,
    /// Only the pod itself depends on this operation, so container starts of other pods go first.
    pub can_wait: bool,
}

type Result<T> = std::result::Result<T, Outcome>;

impl Job {
    fn parts(&self) -> &Arc<Parts> {
        &self.tools.parts
    }

    fn log(&self) -> &Log {
        &self.tools.log
    }

    fn emit_event(&self, kind: Kind, reason: &str, message: impl Into<String>) {
        self.parts()
            .events
            .pod(&self.pod, None, kind, reason, message);
    }

    /// Emits a warning, and returns the fault with `what` prepended.
    fn emit_warning(&self, reason: &str, what: &str, fault: impl Into<Fault>) -> Fault {
        let fault = fault.into().context(what);
        self.emit_event(Kind::Warning, reason, &fault.message);
        fault
    }

    /// Emits the event `FailedCreatePodSandBox`.
    fn no_sandbox(&self, fault: impl Into<Fault>) -> Fault {
        self.emit_warning(
            "FailedCreatePodSandBox",
            "Failed to create pod sandbox",
            fault,
        )
    }

    /// Executes an operation.
    pub async fn execute(&self, op: &Op) -> (Outcome, Option<Asset>) {
        let result = match op {
            Op::Observe { logs } => self.observe(*logs).await.map(without_asset),
            Op::Admit => Ok(without_asset(self.admit().await)),
            Op::RequestResize => Ok(without_asset(self.request_resize().await)),
            Op::CancelResize => {
                let sizes = Arc::clone(&self.update.pod);
                self.parts().ledger.cancel_resize(sizes).await;
                Ok(without_asset(Outcome::Done))
            }
            Op::Mirror => self.mirror().await.map(without_asset),
            Op::Prepare => self.prepare().await,
            Op::Upkeep => self.upkeep().await,
            Op::Volumes { known } => self.volumes(*known).await,
            Op::Sandbox { attempt } => self.sandbox(*attempt).await,
            Op::Pull(start) => self.pull(start).await,
            Op::Start {
                start,
                sandbox,
                attempt,
                ips,
            } => {
                let place = start::TargetSandbox {
                    sandbox,
                    attempt: *attempt,
                    ips,
                };
                let started = Box::pin(self.start(start, &place));
                let started = self.parts().starts.container(started).await;
                started.map(without_asset)
            }
            Op::PreStop { kill, .. } => {
                self.pre_stop(kill, true).await;
                Ok(without_asset(Outcome::Done))
            }
            Op::Stop { kill, first, until } => {
                self.stop(kill, *first, *until).await.map(without_asset)
            }
            Op::StopSandbox(id) => self.stop_sandbox(id).await.map(without_asset),
            Op::RestartAll(kills) => self.restart_all(kills).await.map(without_asset),
            Op::Resize { names, to } => self.resize(names, to).await.map(without_asset),
            Op::UnprepareClaims => self.release_claims().await.map(without_asset),
            Op::Collect {
                containers,
                sandboxes,
            } => Ok(without_asset(
                self.remove_exited(containers, sandboxes).await,
            )),
            Op::Release { content } => self.release(*content).await.map(without_asset),
            Op::Finalise => self.delete_object().await.map(without_asset),
        };
        result.unwrap_or_else(without_asset)
    }

    /// Measures an operation on the pod's cgroup, if pods have cgroups.
    async fn count_cgroup<T>(&self, operation: &str, work: impl Future<Output = T>) -> T {
        let parts = self.parts();
        match parts.settings.config.enforcement.flat {
            true => work.await,
            false => parts.metrics.cgroup(operation, work).await,
        }
    }

    /// Step 4: waits for the ledger's decision.
    async fn admit(&self) -> Outcome {
        let (parts, log) = (self.parts(), self.log());
        log.begin(Step::Admission, "");
        let (pod, inbox) = (Arc::clone(&self.pod), self.tools.inbox.clone());
        let admission = lock(&self.tools.admission).take();
        let admission = admission.unwrap_or_else(|| parts.ledger.admit(pod.clone(), inbox.clone()));
        let mut answer = admission.answer().await;
        // A label may have been set just now, and the scheduler may have seen it before the agent:
        // read the Node again before the pod is rejected.
        let by_labels = |refusal: &Refusal| refusal.reason == NODE_AFFINITY;
        if answer.as_ref().is_err_and(by_labels) && parts.node.refresh().await {
            answer = parts.ledger.admit(pod, inbox).answer().await;
        }
        match answer {
            Ok(()) => {
                log.end(Step::Admission, "", Progress::Done);
                Outcome::Admitted
            }
            Err(refusal) => {
                parts.metrics.rejected(&refusal.reason);
                log.end(
                    Step::Admission,
                    "",
                    Progress::Failed(refusal.message.clone()),
                );
                Outcome::Refused {
                    reason: refusal.reason,
                    message: refusal.message,
                }
            }
        }
    }

    async fn request_resize(&self) -> Outcome {
        let desired = Arc::clone(&self.update.pod);
        match self
            .parts()
            .ledger
            .request_resize(desired, Arc::clone(&self.pod))
            .await
        {
            Ok(()) => Outcome::Granted,
            Err(Refusal {
                reason,
                message,
                infeasible,
                ..
            }) => {
                if let Some(cause) = infeasible {
                    self.parts().metrics.resize_infeasible(cause);
                }
                Outcome::Deferred { reason, message }
            }
        }
    }

    /// Step 6.
    async fn mirror(&self) -> Result<Outcome> {
        let (parts, log) = (self.parts(), self.log());
        let work = mirror::reconcile(&*parts.api, &parts.node, &self.update, |reason| {
            log.fail(Step::Mirror, "", reason, None);
        });
        let made = self.log().step(Step::Mirror, "", work).await;
        made?;
        Ok(Outcome::Done)
    }

    /// Step 8, and the ConfigMaps and Secrets of environments.
    async fn volumes(&self, known: bool) -> Result<(Outcome, Option<Asset>)> {
        let ips: Vec<String> = self
            .observed
            .sandboxes
            .first()
            .map(|s| s.ips.clone())
            .unwrap_or_default();
        let mut volumes = self.tools.volumes.lock().await;
        let set_up = volumes
            .set_up(&self.parts().volumes, &self.pod, &ips, known, self.log())
            .await;
        let SetUp {
            fetched,
            outdated,
            again,
        } = set_up.map_err(|problem| match problem {
            NotSetUp::Failed(fault) => fault.into(),
            NotSetUp::LimitExceeded(message) => {
                self.parts().metrics.rejected(attachment::LIMIT_EXCEEDED);
                Outcome::Refused {
                    reason: attachment::LIMIT_EXCEEDED.into(),
                    message,
                }
            }
        })?;
        let done = again.map_or(Outcome::Done, Outcome::RetryPart);
        let outcome = outdated.map_or(done, Outcome::Outdated);
        Ok((outcome, Some(Asset::Fetched(Arc::new(fetched)))))
    }
}

fn without_asset(outcome: Outcome) -> (Outcome, Option<Asset>) {
    (outcome, None)
}

/// The address for hooks of the pod's containers; `None` for pods on the host network.
fn hook_address<'a>(pod: &Pod, ips: &'a [String]) -> Option<&'a str> {
    ips.first()
        .filter(|_| !pod::host_network(pod))
        .map(String::as_str)
}
