//! The agent: tasks and the channels between them. Decisions are in `core`.
//!
//! ```text
//! kubeapi::Cache<Pod> ┐
//! sources (files)     ┴─→ dispatch ─→ worker, one a pod (watch: the newest wish wins)
//!                            ▲            │  sync: the ten steps ─→ runtime, host, API
//! relist (events, audit) ────┴─ hints ───→│  status writer ─→ patches
//!                                         └─ finished ─→ dispatch
//! node: registration, status, lease        events: one queue, posted in the background
//! ```
//!
//! A task that ends unexpectedly ends the process: [`Agent::run`] returns then.

mod assembly;
pub mod check;
mod events;
mod image;
mod metrics;
mod node;
mod pod;
mod serving;
mod volume;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use tokio::sync::{Notify, watch};
use tokio_util::task::AbortOnDropHandle;

pub use assembly::build;
pub use events::{Events, Kind};
pub use image::Images;
pub use metrics::Metrics;
pub use node::{KubeNodes, Network, NodeApi};
pub use pod::journal::Journals;
pub use serving::Known;
pub use serving::local::SOCKET;
pub use volume::csi::Csi;

use crate::config::Config;
use crate::core::node::admit::{self, Refusal};
use crate::core::node::preempt;
use crate::core::pod::dns::Resolver;
use crate::core::pod::resources::Amounts;
use crate::core::pod::status::Verdict;
use crate::core::pod::uid as uid_of;
use crate::core::volume::claims;
use crate::cri::{Features, Runtime};
use crate::host::PodHost;
use crate::kubeapi::pods::PodApi;
use crate::kubeapi::reviews::Reviews;
use crate::probes::Dialer;
use crate::sealed::Keeper;
use crate::sys::clock::Clock;
use crate::sys::machine::Machine;

/// What every worker shares.
pub struct Context {
    /// The configuration.
    pub config: Config,
    /// The runtime.
    pub runtime: Arc<dyn Runtime>,
    /// The API.
    pub api: Arc<dyn PodApi>,
    /// The machine's side of pods.
    pub host: Arc<dyn PodHost>,
    /// The time.
    pub clock: Clock,
    /// Events.
    pub events: Events,
    /// Pulls.
    pub images: Images,
    /// The machine.
    pub machine: Machine,
    /// The node's addresses.
    pub node_ips: Vec<String>,
    /// Name resolution of pods.
    pub resolver: Resolver,
    /// What the runtime last said of its network.
    pub network: watch::Receiver<Network>,
    /// Our own Node object once it is known.
    pub node: watch::Receiver<Option<Arc<Node>>>,
    /// What the runtime can do, as it last said.
    pub features: watch::Sender<Features>,
    /// Pods that have been taken, by uid.
    pub admitted: Mutex<BTreeMap<String, Taken>>,
    /// What is counted as it happens.
    pub metrics: Arc<Metrics>,
    /// The network as probes and hooks use it.
    pub dialer: Arc<dyn Dialer>,
    /// What was done for each pod.
    pub journals: Journals,
    /// Storage drivers.
    pub csi: Csi,
    /// All pods that this node is to have, as the dispatcher last saw them.
    pub roster: watch::Sender<Vec<Known>>,
    /// When this agent started.
    pub started: Timestamp,
}

/// A pod that has been taken.
pub struct Taken {
    pod: Arc<Pod>,
    /// Wakes its worker.
    hint: Arc<Notify>,
    /// This node ends it, for this reason.
    verdict: Option<Verdict>,
    /// It waits for room to grow.
    waits: bool,
    /// Claims that it has alone.
    alone: BTreeSet<(String, String)>,
}

/// What becomes of a pod that wants to run here.
pub enum Admission {
    /// It is taken.
    Taken,
    /// It is taken once others have made room; they have been told.
    Room,
    /// It is not taken.
    Refused(Refusal),
}

impl Context {
    /// What pods may use of this node.
    #[must_use]
    pub fn allocatable(&self) -> Amounts {
        node::allocatable(&self.machine, &self.config)
    }

    /// Takes a pod, or says why not. A pod that has been taken stays so until it is released. For a
    /// critical pod that lacks only resources others are told to go (kubelet spec, chapter 11).
    pub fn admit(&self, pod: &Arc<Pod>, hint: &Arc<Notify>) -> Admission {
        let mut admitted = self
            .admitted
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let uid = uid_of(pod).to_owned();
        if let Some(taken) = admitted.get_mut(&uid) {
            taken.pod = Arc::clone(pod);
            return Admission::Taken;
        }
        let (node, allocatable) = (self.node.borrow().clone(), self.allocatable());
        let here = admit::Here {
            allocatable: &allocatable,
            node: node.as_deref(),
            unsafe_sysctls: &self.config.unsafe_sysctls,
            kernel: &self.machine.kernel,
            apparmor: self.machine.apparmor,
            strict_groups: self.features.borrow().strict_groups,
        };
        let Err(refusal) = admit::admit(pod, admitted.values().map(|t| &*t.pod), &here) else {
            admitted.insert(
                uid,
                Taken {
                    pod: Arc::clone(pod),
                    hint: Arc::clone(hint),
                    verdict: None,
                    waits: false,
                    alone: BTreeSet::new(),
                },
            );
            return Admission::Taken;
        };
        if refusal.missing.is_empty() || !preempt::is_critical(pod) {
            return Admission::Refused(refusal);
        }
        let others: Vec<&Pod> = admitted.values().map(|t| &*t.pod).collect();
        let Some(victims) = preempt::victims(pod, &others, &refusal.missing) else {
            return Admission::Refused(refusal);
        };
        let signal = refusal.reason.trim_start_matches("OutOf").to_owned();
        for uid in victims {
            self.metrics.preempted(&signal);
            if let Some(taken) = admitted.get_mut(&uid) {
                taken.verdict = Some(Verdict {
                    reason: "Preempting",
                    message: "Preempted in order to admit critical pod".into(),
                    disruption: Some(
                        "Pod was preempted by Kubelet to accommodate a critical pod.".into(),
                    ),
                    grace: None,
                });
                taken.hint.notify_one();
            }
        }
        Admission::Room
    }

    /// Whether a pod that runs may have the sizes that its spec wishes for; the refusal says what is missing.
    /// One that may not is woken when another pod goes.
    pub fn may_grow(&self, pod: &Pod) -> Result<(), Refusal> {
        let mut admitted = self
            .admitted
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let allocatable = self.allocatable();
        let here = admit::Here {
            allocatable: &allocatable,
            node: None,
            unsafe_sysctls: &[],
            kernel: "",
            apparmor: true,
            strict_groups: true,
        };
        let others = admitted
            .iter()
            .filter(|(uid, _)| *uid != uid_of(pod))
            .map(|(_, taken)| &*taken.pod);
        let result = admit::check_resources(pod, others, &here);
        if let Some(own) = admitted.get_mut(uid_of(pod)) {
            own.waits = result.is_err();
        }
        result
    }

    /// Wakes the workers of all pods that have been taken.
    pub fn wake_all(&self) {
        let admitted = self
            .admitted
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        admitted.values().for_each(|t| t.hint.notify_one());
    }

    /// Whether a pod has a claim that only one may have at a time: nobody else got it first, or runs with it since
    /// before this agent started. It has it until it is released.
    #[must_use]
    pub fn holds_alone(&self, pod: &Pod, namespace: &str, claim: &str) -> bool {
        let mut admitted = self
            .admitted
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let (own, key) = (uid_of(pod), (namespace.to_owned(), claim.to_owned()));
        let runs =
            |pod: &Pod| pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running");
        let other_has = |(uid, taken): (&String, &Taken)| {
            uid != own
                && (taken.alone.contains(&key)
                    || (runs(&taken.pod) && claims::uses(&taken.pod, namespace, claim)))
        };
        if admitted.iter().any(other_has) {
            return false;
        }
        let Some(taken) = admitted.get_mut(own) else {
            return false;
        };
        taken.alone.insert(key);
        true
    }

    /// The pods that have been taken.
    #[must_use]
    pub fn pods(&self) -> Vec<Arc<Pod>> {
        let admitted = self
            .admitted
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        admitted.values().map(|t| Arc::clone(&t.pod)).collect()
    }

    /// Ends a pod that uses more than it may.
    pub fn evict(&self, uid: &str, signal: &str, message: String) {
        let mut admitted = self
            .admitted
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(taken) = admitted.get_mut(uid).filter(|t| t.verdict.is_none()) {
            self.metrics.evicted(signal);
            taken.verdict = Some(Verdict {
                reason: "Evicted",
                message,
                disruption: None,
                grace: Some(1),
            });
            taken.hint.notify_one();
        }
    }

    /// Why this node ends a pod, if it does.
    #[must_use]
    pub fn verdict(&self, uid: &str) -> Option<Verdict> {
        let admitted = self
            .admitted
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        admitted.get(uid).and_then(|t| t.verdict.clone())
    }

    /// Forgets a pod that takes nothing any more.
    pub fn release(&self, uid: &str) {
        let mut admitted = self
            .admitted
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        admitted.remove(uid);
        admitted
            .values()
            .filter(|t| t.waits)
            .for_each(|t| t.hint.notify_one());
    }
}

/// The agent with everything it is made of.
pub struct Agent {
    /// What workers share.
    pub context: Arc<Context>,
    /// The node's side of the API; none when there are only static pods.
    pub nodes: Option<Arc<dyn NodeApi>>,
    /// Who says who may use our own API; none when there is nobody to ask.
    pub reviews: Option<Arc<dyn Reviews>>,
    /// Whether our own API is served.
    pub serves: bool,
    /// The pods bound to this node; none when there are only static pods.
    pub pods: Option<crate::kubeapi::Cache<Pod>>,
    /// What is known from before, for a start without an apiserver.
    pub keeper: Option<Keeper>,
    /// Where the runtime's network state is announced.
    pub network: watch::Sender<Network>,
    /// Where our own Node object is announced.
    pub node: watch::Sender<Option<Arc<Node>>>,
    /// The renewal of the node's own certificate, where it is ours: it ends when there is none to be had any more.
    pub renewal: Option<AbortOnDropHandle<()>>,
}

impl Agent {
    /// Runs until a part of it ends, which none should.
    pub async fn run(self) -> anyhow::Result<()> {
        let (hints, hinted) = tokio::sync::mpsc::channel(1024);
        let seen = pod::relist::Seen::default();
        let statics = pod::sources::start(&self.context);
        let context = Arc::clone(&self.context);
        let dispatch = pod::dispatch::run(
            Arc::clone(&context),
            self.pods,
            statics,
            hinted,
            seen.clone(),
            self.keeper,
        );
        let relist = pod::relist::run(Arc::clone(&context), seen, hints);
        let local = serving::local::run(Arc::clone(&context));
        let upkeep = node::log_rotation::run(Arc::clone(&context));
        let csi = Box::pin(volume::csi::run(Arc::clone(&context), self.nodes.clone()));
        let limits = Box::pin(volume::storage_limits::run(Arc::clone(&context)));
        let (serves, shared) = (self.serves.then_some(self.reviews), Arc::clone(&context));
        let server = Box::pin(async move {
            match serves {
                Some(reviews) => serving::run(shared, reviews).await,
                None => std::future::pending().await,
            }
        });
        let collect = Box::pin(image::collect::run(Arc::clone(&context)));
        let renewal = async move {
            match self.renewal {
                Some(task) => _ = task.await,
                None => std::future::pending().await,
            }
        };
        let node = node::run(context, self.nodes, self.network, self.node);
        tokio::select! {
            // In this order, so that a simulated run replays exactly.
            biased;
            () = csi => anyhow::bail!("the registration of drivers ended"),
            () = renewal => anyhow::bail!("the node's client certificate has ended, and the apiserver gives it no other: it begins anew with --bootstrap-kubeconfig at the next start"),
            () = limits => anyhow::bail!("the watch over disk limits ended"),
            () = collect => anyhow::bail!("the removal of images ended"),
            () = server => anyhow::bail!("the agent's HTTP API ended"),
            () = upkeep => anyhow::bail!("the upkeep ended"),
            () = local => anyhow::bail!("the local socket ended"),
            () = dispatch => anyhow::bail!("the dispatcher ended"),
            () = relist => anyhow::bail!("the relisting ended"),
            () = node => anyhow::bail!("the node's status loop ended"),
        }
    }
}
