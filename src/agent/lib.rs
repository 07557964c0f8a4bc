//! The agent: tasks and the channels between them. Decisions are in `core`.
//!
//! ```text
//! kubeapi::Cache<Pod> ┐
//! sources (files)     ┴─→ dispatch ─→ worker, one per pod (inbox → core::pod::worker)
//!                            ▲            │  sync: the ten steps ─→ runtime, host, API
//! relist (events, audit) ────┴─ hints ───→│  status writer ─→ patches
//!                                         └─ finished ─→ dispatch
//! node: registration, status, lease        events: one queue, posted in the background
//! ```
//!
//! A task that returns unexpectedly terminates the process: [`Agent::run`] returns an error.

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

pub use assembly::build;
pub use events::{Events, Kind};
pub use holdfast_core::pod::worker::Network;
pub use image::Images;
pub use metrics::Metrics;
pub use node::REGISTER_AGAIN_AFTER;
use node::claims::register as register_resource_driver;
use node::devices::register as register_device_plugin;
pub use node::ledger::{self, LedgerHandle};
pub use node::{ClaimManager, DeviceManager, KubeNodes, NodeApi, NodeChange, OwnNode};
pub use pod::heartbeats::Heartbeats;
pub use pod::journal::Journals;
pub use pod::sources::Statics;
pub use pod::starts::Starts;
pub use serving::local::SOCKET;
pub use serving::{Known, KnownPods, Unserved};
pub use volume::AttachedDisks;
pub use volume::csi::Csi;

use holdfast_config::Config;
use holdfast_core::node::eviction::Pressures;
use holdfast_core::pod::dns::Resolver;
use holdfast_core::pod::resources::Amounts;
use holdfast_cri::{Features, Runtime};
use holdfast_host::PodHost;
use holdfast_kubeapi::pods::PodApi;
use holdfast_kubeapi::reviews::Reviews;
use holdfast_probes::Dialer;
use holdfast_sealed::Keeper;
use holdfast_sys::clock::Clock;
use holdfast_sys::logind::Announcer;
use holdfast_sys::machine::Machine;

/// State that all workers share.
pub struct Context {
    /// The configuration.
    pub config: Config,
    /// The container runtime.
    pub runtime: Arc<dyn Runtime>,
    /// The apiserver, as pod workers use it.
    pub api: Arc<dyn PodApi>,
    /// Cgroups, directories and volumes of pods on this machine.
    pub host: Arc<dyn PodHost>,
    /// The clock.
    pub clock: Clock,
    /// Emits events.
    pub events: Events,
    /// Pulls images.
    pub images: Images,
    /// Facts about the machine.
    pub machine: Machine,
    /// The node's current IP addresses.
    pub node_ips: watch::Sender<Vec<String>>,
    /// The names and addresses in the Node's status; before registration, those that it will have.
    pub node_addresses: watch::Sender<Vec<NodeAddress>>,
    /// DNS settings for pods, derived from the node's current resolver configuration.
    pub resolver: watch::Sender<Arc<Resolver>>,
    /// The runtime's last reported network state.
    pub network: watch::Receiver<Network>,
    /// This node's Node object.
    pub node: OwnNode,
    /// The node's current resource pressures.
    pub pressures: watch::Sender<Pressures>,
    /// Whether the machine is shutting down.
    pub shutting_down: watch::Sender<bool>,
    /// Parts of the agent's HTTP API that cannot be served.
    pub unserved: Unserved,
    /// The features that the runtime last reported.
    pub features: watch::Sender<Features>,
    /// The actor that owns resources shared by the node's pods.
    pub ledger: LedgerHandle,
    /// Metrics, recorded as things happen.
    pub metrics: Arc<Metrics>,
    /// Network access for probes and hooks.
    pub dialer: Arc<dyn Dialer>,
    /// Heartbeats of the dispatcher and of the runtime's listing.
    pub heartbeats: Heartbeats,
    /// The steps taken for each pod.
    pub journals: Journals,
    /// Limits how many sandboxes start at the same time.
    pub starts: Starts,
    /// CSI drivers.
    pub csi: Csi,
    /// Disks that the node attaches without a driver.
    pub disks: AttachedDisks,
    /// Device plugins, and the devices of each container.
    pub devices: DeviceManager,
    /// Drivers of dynamic resource allocation, and prepared claims.
    pub claims: ClaimManager,
    /// All pods assigned to this node, as the dispatcher last merged them.
    pub roster: watch::Sender<KnownPods>,
    /// The start time of this agent.
    pub started: Timestamp,
}

impl Context {
    /// The resources that pods may use on this node.
    #[must_use]
    pub fn allocatable(&self) -> Amounts {
        node::allocatable(&self.machine, &self.config)
    }

    /// Whether containers may swap: swap must be enabled in the configuration, and the kernel must be able to limit it.
    #[must_use]
    pub fn swaps(&self) -> bool {
        self.config.limited_swap && self.machine.cgroup_v2 && self.machine.swap.is_some()
    }
}

/// The agent with all its parts.
pub struct Agent {
    /// State that workers share.
    pub context: Arc<Context>,
    /// Authenticates and authorizes clients of the agent's HTTP API; `None` without an apiserver.
    pub reviews: Option<Arc<dyn Reviews>>,
    /// Whether the agent's HTTP API is served.
    pub serves: bool,
    /// The pods bound to this node; `None` if there are only static pods.
    pub pods: Option<holdfast_kubeapi::Cache<Pod>>,
    /// Static pods, as read from their sources.
    pub statics: watch::Receiver<Statics>,
    /// State stored for an offline start.
    pub keeper: Option<Keeper>,
    /// Publishes the runtime's network state.
    pub network: watch::Sender<Network>,
    /// The receiving end of [`Context::ledger`].
    pub ledger: node::ledger::Requests,
    /// The kernel log, which reports out-of-memory kills; `None` if it is not watched.
    pub kernel_log: Option<std::path::PathBuf>,
    /// Announces the machine's shutdown; `None` if shutdown is not watched.
    pub announcer: Option<Arc<dyn Announcer>>,
    /// The task that renews the node's client certificate, if the agent manages it. The task returns when the
    /// certificate cannot be renewed any more.
    pub renewal: Option<AbortOnDropHandle<()>>,
}

impl Agent {
    /// Runs until one of the agent's tasks returns, which is always an error.
    pub async fn run(self) -> anyhow::Result<()> {
        Box::pin(self.run_until(std::future::pending())).await
    }

    /// Runs until `stop` is ready and sessions such as `kubectl exec` are drained, or until one of the agent's tasks
    /// returns. Pods and their containers keep running.
    pub async fn run_until(self, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
        let sessions = serving::Sessions::default();
        let stopped = until_drained(stop, sessions.clone(), self.context.events.clone());
        let (hints, hinted) = tokio::sync::mpsc::channel(1024);
        let seen = pod::relist::ObservedFingerprints::default();
        let context = Arc::clone(&self.context);
        let (roster, known) = watch::channel(pod::roster::Roster::default());
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
            tokio::spawn(node::store_node(Arc::clone(&context), keeper.clone()));
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
        let binding = Box::pin(node::managers::run(Arc::clone(&context), known.clone()));
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
            // The order is fixed, so that a simulated run replays exactly.
            biased;
            () = stopped => Ok(()),
            () = csi => anyhow::bail!("the registration of drivers ended"),
            () = unstaging => anyhow::bail!("the unstaging of volumes ended"),
            () = devices => anyhow::bail!("the registration of device plugins ended"),
            () = claims => anyhow::bail!("the resource claim manager ended"),
            () = slices => anyhow::bail!("the deletion of stale ResourceSlices ended"),
            () = pod_resources => anyhow::bail!("the podresources API ended"),
            () = renewal => anyhow::bail!("the node's client certificate expired and its renewal failed: the next start requests one with --bootstrap-kubeconfig"),
            () = limits => anyhow::bail!("the check of disk limits ended"),
            () = pressure => anyhow::bail!("the check of memory, disks and process ids ended"),
            () = oom => anyhow::bail!("the watch of the kernel's log ended"),
            () = shutdown => anyhow::bail!("the watch for machine shutdowns ended"),
            () = collect => anyhow::bail!("the removal of images ended"),
            () = dead => anyhow::bail!("the removal of dead containers ended"),
            () = server => anyhow::bail!("the agent's HTTP API ended"),
            () = upkeep => anyhow::bail!("the rotation of logs ended"),
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

/// Waits for `stop`, then drains sessions and flushes events.
async fn until_drained(
    stop: impl Future<Output = ()>,
    sessions: serving::Sessions,
    events: Events,
) {
    stop.await;
    sessions.drain().await;
    events.flush().await;
}
