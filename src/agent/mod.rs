//! The agent: tasks and the channels between them. Decisions are in `core`.
//!
//! ```text
//! kubeapi::Cache<Pod> ┐
//! sources (files)     ┴─→ dispatch ─→ worker, one a pod (inbox → core::pod::worker)
//!                            ▲            │  sync: the ten steps ─→ runtime, host, API
//! relist (events, audit) ────┴─ hints ───→│  status writer ─→ patches
//!                                         └─ finished ─→ dispatch
//! node: registration, status, lease        events: one queue, posted in the background
//! ```
//!
//! A task that ends unexpectedly ends the process: [`Agent::run`] returns then.

mod assembly;

pub mod check;
mod control_plane;
pub mod doctor;
mod events;
mod image;
mod metrics;
mod node;
mod pod;
mod serving;
mod volume;

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{NodeAddress, Pod};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

pub use crate::core::pod::worker::Network;
pub use assembly::build;
pub use events::{Events, Kind};
pub use image::Images;
pub use metrics::Metrics;
pub use node::REGISTER_AGAIN_AFTER;
use node::claims::register as register_resource_driver;
use node::devices::register as register_device_plugin;
pub use node::ledger::{self, LedgerHandle};
pub use node::{ClaimManager, DeviceManager, KubeNodes, NodeApi, NodeChange, OwnNode};
pub use pod::journal::Journals;
pub use pod::pulse::Pulse;
pub use pod::sources::Statics;
pub use pod::starts::Starts;
pub use serving::local::SOCKET;
pub use serving::{Known, KnownPods, Unserved};
pub use volume::AttachedDisks;
pub use volume::csi::Csi;

use crate::config::Config;
use crate::core::node::eviction::Pressures;
use crate::core::pod::dns::Resolver;
use crate::core::pod::resources::Amounts;
use crate::cri::{Features, Runtime};
use crate::host::PodHost;
use crate::kubeapi::pods::PodApi;
use crate::kubeapi::reviews::Reviews;
use crate::probes::Dialer;
use crate::sealed::Keeper;
use crate::sys::clock::Clock;
use crate::sys::logind::Announcer;
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
    /// The node's addresses as they are now.
    pub node_ips: watch::Sender<Vec<String>>,
    /// The names and addresses that the Node reports; until it is registered, those that it will.
    pub node_addresses: watch::Sender<Vec<NodeAddress>>,
    /// Name resolution of pods, by the node's own as it is now.
    pub resolver: watch::Sender<Arc<Resolver>>,
    /// What the runtime last said of its network.
    pub network: watch::Receiver<Network>,
    /// Our own Node object.
    pub node: OwnNode,
    /// What the node is short of.
    pub pressures: watch::Sender<Pressures>,
    /// Whether the machine is being shut down.
    pub shutting_down: watch::Sender<bool>,
    /// Which parts of our own API cannot be served.
    pub unserved: Unserved,
    /// What the runtime can do, as it last said.
    pub features: watch::Sender<Features>,
    /// The actor that owns what the node's pods share.
    pub ledger: LedgerHandle,
    /// What is counted as it happens.
    pub metrics: Arc<Metrics>,
    /// The network as probes and hooks use it.
    pub dialer: Arc<dyn Dialer>,
    /// Whether the dispatcher and the listing of the runtime go on.
    pub pulse: Pulse,
    /// What was done for each pod.
    pub journals: Journals,
    /// What is being started.
    pub starts: Starts,
    /// Storage drivers.
    pub csi: Csi,
    /// The disks that the node attaches by itself.
    pub disks: AttachedDisks,
    /// Device plugins, and which container has which device.
    pub devices: DeviceManager,
    /// Drivers of dynamic resources, and which claims are prepared.
    pub claims: ClaimManager,
    /// All pods that this node is to have, as the dispatcher last saw them.
    pub roster: watch::Sender<KnownPods>,
    /// When this agent started.
    pub started: Timestamp,
}

impl Context {
    /// What pods may use of this node.
    #[must_use]
    pub fn allocatable(&self) -> Amounts {
        node::allocatable(&self.machine, &self.config)
    }

    /// Whether containers may swap: by the configuration, and as far as the kernel can limit it.
    #[must_use]
    pub fn swaps(&self) -> bool {
        self.config.limited_swap && self.machine.cgroup_v2 && self.machine.swap.is_some()
    }
}

/// The agent with everything it is made of.
pub struct Agent {
    /// What workers share.
    pub context: Arc<Context>,
    /// Who says who may use our own API; none when there is nobody to ask.
    pub reviews: Option<Arc<dyn Reviews>>,
    /// Whether our own API is served.
    pub serves: bool,
    /// The pods bound to this node; none when there are only static pods.
    pub pods: Option<crate::kubeapi::Cache<Pod>>,
    /// Static pods, as their sources have them.
    pub statics: watch::Receiver<Statics>,
    /// What is known from before, for a start without an apiserver.
    pub keeper: Option<Keeper>,
    /// Where the runtime's network state is announced.
    pub network: watch::Sender<Network>,
    /// The requests to the actor behind [`Context::ledger`].
    pub ledger: node::ledger::Requests,
    /// The kernel's log, from which it is read that the machine has run out of memory; none where nobody reads it.
    pub kernel_log: Option<std::path::PathBuf>,
    /// Who announces that the machine is shut down; none where nobody waits for that.
    pub announcer: Option<Arc<dyn Announcer>>,
    /// The renewal of the node's own certificate, where it is ours: it ends when there is none to be had any more.
    pub renewal: Option<AbortOnDropHandle<()>>,
}

impl Agent {
    /// Runs until a part of it ends, which none should.
    pub async fn run(self) -> anyhow::Result<()> {
        Box::pin(self.run_until(std::future::pending())).await
    }

    /// Runs until `stop` is ready and the sessions of `kubectl exec` and the like have had time to end, or until a part of
    /// it ends. Pods and their containers stay.
    pub async fn run_until(self, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
        let sessions = serving::Sessions::default();
        let stopped = until_drained(stop, sessions.clone(), self.context.events.clone());
        let (hints, hinted) = tokio::sync::mpsc::channel(1024);
        let seen = pod::relist::Seen::default();
        let context = Arc::clone(&self.context);
        let (roster, known) = watch::channel(pod::dispatch::Roster::default());
        let devices = Box::pin(node::devices::run(
            Arc::clone(&context),
            known.clone(),
            hints.clone(),
        ));
        let claims = Box::pin(node::claims::run(
            Arc::clone(&context),
            known.clone(),
            hints.clone(),
        ));
        let slices = Box::pin(node::slices::run(Arc::clone(&context)));
        if let Some(keeper) = &self.keeper {
            tokio::spawn(node::seal(Arc::clone(&context), keeper.clone()));
        }
        let pod_resources = Box::pin(serving::pod_resources::run(Arc::clone(&context)));
        let clearing = pod::orphans::Clearing::default();
        let inputs = pod::dispatch::Inputs {
            api: self.pods,
            statics: self.statics,
            hints: hinted,
            keeper: self.keeper,
            clearing: clearing.subscribe(),
        };
        let dispatch = Box::pin(pod::dispatch::run(
            Arc::clone(&context),
            inputs,
            seen.clone(),
            roster,
        ));
        let ledger = node::ledger::run(Arc::clone(&context), self.ledger);
        let sweep = Box::pin(pod::orphans::sweep(
            Arc::clone(&context),
            known.clone(),
            clearing,
        ));
        let binding = Box::pin(node::managers::keep(Arc::clone(&context), known.clone()));
        let mirrors = pod::orphans::delete_mirrors(Arc::clone(&context), known.clone());
        let mirrors = Box::pin(mirrors);
        let shutdown = node::shutdown::run(Arc::clone(&context), self.announcer, hints.clone());
        let shutdown = Box::pin(shutdown);
        let relist = pod::relist::run(Arc::clone(&context), seen, hints);
        let local = serving::local::run(Arc::clone(&context));
        let upkeep = node::log_rotation::run(Arc::clone(&context));
        let csi = Box::pin(volume::csi::run(Arc::clone(&context), context.node.api()));
        let unstaging = Box::pin(volume::csi::unstaging::run(Arc::clone(&context)));
        let limits = Box::pin(volume::storage_limits::run(Arc::clone(&context)));
        let (serves, shared) = (self.serves.then_some(self.reviews), Arc::clone(&context));
        let server = Box::pin(async move {
            match serves {
                Some(reviews) => serving::run(shared, reviews, sessions).await,
                None => std::future::pending().await,
            }
        });
        let collect = Box::pin(image::collect::run(Arc::clone(&context)));
        let dead = Box::pin(pod::dead_containers::run(Arc::clone(&context)));
        let pressure = Box::pin(node::pressure::run(Arc::clone(&context)));
        let oom = Box::pin(node::oom::run(Arc::clone(&context), self.kernel_log));
        let renewal = async move {
            match self.renewal {
                Some(task) => _ = task.await,
                None => std::future::pending().await,
            }
        };
        let node = node::run(context, self.network, known);
        tokio::select! {
            // In this order, so that a simulated run replays exactly.
            biased;
            () = stopped => Ok(()),
            () = csi => anyhow::bail!("the registration of drivers ended"),
            () = unstaging => anyhow::bail!("the unstaging of volumes ended"),
            () = devices => anyhow::bail!("the registration of device plugins ended"),
            () = claims => anyhow::bail!("the upkeep of resource claims ended"),
            () = slices => anyhow::bail!("the upkeep of ResourceSlices ended"),
            () = pod_resources => anyhow::bail!("the podresources API ended"),
            () = renewal => anyhow::bail!("the node's client certificate expired and its renewal failed: the next start requests one with --bootstrap-kubeconfig"),
            () = limits => anyhow::bail!("the watch over disk limits ended"),
            () = pressure => anyhow::bail!("the watch over memory, disks and process ids ended"),
            () = oom => anyhow::bail!("the watch over the kernel's log ended"),
            () = shutdown => anyhow::bail!("the watch for the machine's shutdown ended"),
            () = collect => anyhow::bail!("the removal of images ended"),
            () = dead => anyhow::bail!("the removal of dead containers ended"),
            () = server => anyhow::bail!("the agent's HTTP API ended"),
            () = upkeep => anyhow::bail!("the upkeep ended"),
            () = local => anyhow::bail!("the local socket ended"),
            () = ledger => anyhow::bail!("the ledger of admitted pods ended"),
            () = binding => anyhow::bail!("the binding of containers to processors ended"),
            () = sweep => anyhow::bail!("the sweep of orphaned directories ended"),
            () = mirrors => anyhow::bail!("the deletion of orphaned mirror pods ended"),
            () = dispatch => anyhow::bail!("the dispatcher ended"),
            () = relist => anyhow::bail!("the relisting ended"),
            () = node => anyhow::bail!("the node's status loop ended"),
        }
    }
}

/// Waits for `stop`, and until sessions have had time to end and what was said is posted.
async fn until_drained(
    stop: impl Future<Output = ()>,
    sessions: serving::Sessions,
    events: Events,
) {
    stop.await;
    sessions.drain().await;
    events.flush().await;
}
