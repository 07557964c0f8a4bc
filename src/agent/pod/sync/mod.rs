//! The executors: each operation of a pod's plan, carried out. What is to be done, and in which order,
//! `core::pod::worker` decides; nothing here decides it again.
//!
//! The ten steps of the field's pod sync, and where they stand: 1 startup latency and 3 status writer
//! (`agent::pod::worker`), 2 API status (`core::pod::status`), 4 admission (`agent::node::ledger`),
//! 5 pod cgroup and 7 directories ([`prepare`]), 6 mirror pod (`agent::pod::mirror`), 8 volumes
//! (`agent::volume`), 9 pull secrets ([`image`]), 10 runtime sync ([`sandbox`], [`start`], [`stop`],
//! [`resize`]). [`observe`] looks, [`release`] gives back.

mod image;
mod observe;
mod prepare;
mod release;
mod resize;
mod sandbox;
mod start;
mod stop;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use holdfast_proto::cri as pb;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::prepare::Setup;
use super::inbox::Inbox;
use super::journal::Log;
use super::status::StatusWriter;
use super::{hooks, mirror};
use crate::agent::image::Pulled;
use crate::agent::node::ledger::Admission;
use crate::agent::volume::objects::Fetched;
use crate::agent::volume::{NotSetUp, SetUp, Volumes};
use crate::agent::{Context, Kind};
use crate::core::fault::Fault;
use crate::core::lock::lock;
use crate::core::node::admit::{NODE_AFFINITY, Refusal};
use crate::core::pod;
use crate::core::pod::journal::{Progress, Step};
use crate::core::pod::observed::ObservedPod;
use crate::core::pod::resize::Resizing;
use crate::core::pod::worker::{Op, Outcome, Update};
use crate::core::volume::attachment;

/// What an operation made for later ones. The worker's decisions do not depend on what is in it.
pub enum Asset {
    /// Cgroup, runtime handler and user namespace.
    Setup(Arc<Setup>),
    /// Volumes, ConfigMaps and Secrets.
    Fetched(Arc<Fetched>),
    /// A container's images, by its name.
    Pulled(String, Arc<Pulled>),
    /// A sandbox's id and the message it was made from.
    Sandbox(String, Arc<pb::PodSandboxConfig>),
}

/// The newest of each.
#[derive(Clone, Default)]
pub struct Assets {
    setup: Option<Arc<Setup>>,
    fetched: Option<Arc<Fetched>>,
    pulled: BTreeMap<String, Arc<Pulled>>,
    sandbox: Option<(String, Arc<pb::PodSandboxConfig>)>,
}

impl Assets {
    /// The handler of the runtime that the pod is made with; the default one has an empty name.
    pub fn handler(&self) -> &str {
        self.setup.as_ref().map_or("", |setup| &setup.handler)
    }

    /// Keeps what an operation made.
    pub fn keep(&mut self, asset: Asset) {
        match asset {
            Asset::Setup(setup) => self.setup = Some(setup),
            Asset::Fetched(fetched) => self.fetched = Some(fetched),
            Asset::Pulled(name, pulled) => _ = self.pulled.insert(name, pulled),
            Asset::Sandbox(id, config) => self.sandbox = Some((id, config)),
        }
    }
}

/// What stays the same for all operations of one pod.
pub struct Tools {
    /// What all workers share.
    pub context: Arc<Context>,
    /// Where steps are noted, for `explain`.
    pub log: Log,
    /// Writes its status.
    pub writer: StatusWriter,
    /// Its volumes. One operation at a time is about them.
    pub volumes: tokio::sync::Mutex<Volumes>,
    /// Where operations report, and whoever is to tell the worker something.
    pub inbox: Inbox,
    /// Termination messages by container id: an ended container's is read once.
    pub messages: Mutex<BTreeMap<String, String>>,
    /// The runtime's calls that start containers; they outlive their operations.
    pub starts: TaskTracker,
    /// What the pod's sandbox is made with: the newest that [`Op::Prepare`] has found, or what is known of a sandbox that an
    /// earlier agent made. A pull may be begun before, and waits for it.
    pub setup: watch::Sender<Option<Arc<Setup>>>,
    /// The pod ends: what has not been begun is not wanted any more.
    pub ending: CancellationToken,
    /// Somebody waits for the pod's end: what was patient is no more.
    pub awaited: CancellationToken,
    /// The ledger's answer, which was asked for when the worker was started; the first [`Op::Admit`] takes it.
    pub admission: Mutex<Option<Admission>>,
}

/// One operation and what is known when it is begun.
pub struct Job {
    pub tools: Arc<Tools>,
    pub pod: Arc<Pod>,
    pub update: Update,
    pub observed: Arc<ObservedPod>,
    pub resizing: Resizing,
    pub assets: Assets,
    /// A start was cancelled before: what comes of it is waited for before anything is looked at.
    pub cut_off: bool,
    /// Only the pod itself waits for it: it gives way to what is being started.
    pub patient: bool,
}

type Result<T> = std::result::Result<T, Outcome>;

impl Job {
    fn context(&self) -> &Arc<Context> {
        &self.tools.context
    }

    fn log(&self) -> &Log {
        &self.tools.log
    }

    fn say(&self, kind: Kind, reason: &str, message: impl Into<String>) {
        self.context()
            .events
            .pod(&self.pod, None, kind, reason, message);
    }

    /// Warns of a failure, and passes it on with what could not be done before its own words.
    fn warned(&self, reason: &str, what: &str, fault: impl Into<Fault>) -> Fault {
        let fault = fault.into().within(what);
        self.say(Kind::Warning, reason, &fault.message);
        fault
    }

    /// There will be no sandbox for now.
    fn no_sandbox(&self, fault: impl Into<Fault>) -> Fault {
        self.warned(
            "FailedCreatePodSandBox",
            "Failed to create pod sandbox",
            fault,
        )
    }

    /// Carries out an operation.
    pub async fn carry_out(&self, op: &Op) -> (Outcome, Option<Asset>) {
        let result = match op {
            Op::Observe { logs } => self.observe(*logs).await.map(plain),
            Op::Admit => Ok(plain(self.admit().await)),
            Op::Grow => Ok(plain(self.grow().await)),
            Op::Withdraw => {
                let sizes = Arc::clone(&self.update.pod);
                self.context().ledger.withdraw(sizes).await;
                Ok(plain(Outcome::Done))
            }
            Op::Mirror => self.mirror().await.map(plain),
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
                let place = start::Place {
                    sandbox,
                    attempt: *attempt,
                    ips,
                };
                let started = Box::pin(self.start(start, &place));
                let started = self.context().starts.container(started).await;
                started.map(plain)
            }
            Op::PreStop { kill, .. } => {
                self.pre_stop(kill, true).await;
                Ok(plain(Outcome::Done))
            }
            Op::Stop { kill, first, until } => self.stop(kill, *first, *until).await.map(plain),
            Op::StopSandbox(id) => self.stop_sandbox(id).await.map(plain),
            Op::RestartAll(kills) => self.restart_all(kills).await.map(plain),
            Op::Resize { names, to } => self.resize(names, to).await.map(plain),
            Op::ReturnClaims => self.return_claims().await.map(plain),
            Op::Collect {
                containers,
                sandboxes,
            } => Ok(plain(self.collect(containers, sandboxes).await)),
            Op::Release { content } => self.release(*content).await.map(plain),
            Op::Finalise => self.finalise().await.map(plain),
        };
        result.unwrap_or_else(plain)
    }

    /// Counts what is done with the pod's cgroup, where pods have one.
    async fn count_cgroup<T>(&self, operation: &str, work: impl Future<Output = T>) -> T {
        let context = self.context();
        match context.config.enforcement.flat {
            true => work.await,
            false => context.metrics.cgroup(operation, work).await,
        }
    }

    /// Step 4. The node's ledger answers when it has decided.
    async fn admit(&self) -> Outcome {
        let (context, log) = (self.context(), self.log());
        log.begin(Step::Admission, "");
        let (pod, inbox) = (Arc::clone(&self.pod), self.tools.inbox.clone());
        let asked = lock(&self.tools.admission).take();
        let asked = asked.unwrap_or_else(|| context.ledger.admit(pod.clone(), inbox.clone()));
        let mut answer = asked.answer().await;
        // A label may have been set a moment ago, and the scheduler have seen it before us: before the
        // pod is refused for it, the Node is read anew.
        let by_labels = |refusal: &Refusal| refusal.reason == NODE_AFFINITY;
        if answer.as_ref().is_err_and(by_labels) && context.node.refresh().await {
            answer = context.ledger.admit(pod, inbox).answer().await;
        }
        match answer {
            Ok(()) => {
                log.end(Step::Admission, "", Progress::Done);
                Outcome::Admitted
            }
            Err(refusal) => {
                context.metrics.rejected(&refusal.reason);
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

    async fn grow(&self) -> Outcome {
        let desired = Arc::clone(&self.update.pod);
        match self
            .context()
            .ledger
            .grow(desired, Arc::clone(&self.pod))
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
                    self.context().metrics.resize_infeasible(cause);
                }
                Outcome::Deferred { reason, message }
            }
        }
    }

    /// Step 6.
    async fn mirror(&self) -> Result<Outcome> {
        let log = self.log();
        let work = mirror::reconcile(self.context(), &self.update, |reason| {
            log.fail(Step::Mirror, "", reason, None);
        });
        let made = self.log().step(Step::Mirror, "", work).await;
        made?;
        Ok(Outcome::Done)
    }

    /// Step 8, and what environments are made from.
    async fn volumes(&self, known: bool) -> Result<(Outcome, Option<Asset>)> {
        let ips: Vec<String> = self
            .observed
            .sandboxes
            .first()
            .map(|s| s.ips.clone())
            .unwrap_or_default();
        let mut volumes = self.tools.volumes.lock().await;
        let set_up = volumes
            .set_up(self.context(), &self.pod, &ips, known, self.log())
            .await;
        let SetUp {
            fetched,
            outdated,
            again,
        } = set_up.map_err(|problem| match problem {
            NotSetUp::Failed(fault) => fault.into(),
            NotSetUp::LimitExceeded(message) => {
                self.context().metrics.rejected(attachment::LIMIT_EXCEEDED);
                Outcome::Refused {
                    reason: attachment::LIMIT_EXCEEDED.into(),
                    message,
                }
            }
        })?;
        let done = again.map_or(Outcome::Done, Outcome::Again);
        let outcome = outdated.map_or(done, Outcome::Outdated);
        Ok((outcome, Some(Asset::Fetched(Arc::new(fetched)))))
    }
}

fn plain(outcome: Outcome) -> (Outcome, Option<Asset>) {
    (outcome, None)
}

/// The address that hooks of the pod's containers ask; pods on the host's network have none of their own.
fn hook_address<'a>(pod: &Pod, ips: &'a [String]) -> Option<&'a str> {
    ips.first()
        .filter(|_| !pod::host_network(pod))
        .map(String::as_str)
}
