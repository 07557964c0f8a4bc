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

mod actors;
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

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

pub use actors::Parts;
pub use assembly::build;
pub use events::{Events, Kind};
pub use holdfast_core::pod::worker::Network;
pub use image::Images;
pub use metrics::Metrics;
pub(crate) use node::KubeNodes;
pub use node::ledger;
pub use node::{ClaimManager, DeviceManager, NodeApi, NodeChange, OwnNode};
pub use pod::journal::Journals;
pub use pod::sources::Statics;
pub use pod::starts::Starts;
pub use serving::local::SOCKET;
pub use volume::AttachedDisks;
pub use volume::csi::Csi;

use actors::Actors;
use holdfast_kubeapi::reviews::Reviews;
use holdfast_sealed::Keeper;
use holdfast_sys::logind::Announcer;

/// The agent with all its parts.
pub struct Agent {
    /// What the actors share.
    pub parts: Parts,
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
    /// The receiving end of [`Parts::ledger`].
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
        let stopped = until_drained(stop, sessions.clone(), self.parts.events.clone());
        let (hints, hinted) = tokio::sync::mpsc::channel(1024);
        let seen = pod::relist::ObservedFingerprints::default();
        let actors = Actors::new(self.parts);
        let table = actors.table;
        let devices = Box::pin(node::devices::run(
            actors.devices,
            actors.runtime,
            table.clone(),
            hints.clone(),
        ));
        let claims = Box::pin(node::claims::run(
            actors.claims,
            table.clone(),
            hints.clone(),
        ));
        let (config, own_node, manager) = actors.slices;
        let slices = Box::pin(node::slices::run(config, Arc::clone(&own_node), manager));
        if let Some(keeper) = &self.keeper {
            tokio::spawn(node::store_node(own_node, keeper.clone()));
        }
        let pod_resources = Box::pin(serving::pod_resources::run(actors.pod_resources));
        let clearing = pod::orphans::Clearing::default();
        let inputs = pod::dispatch::Inputs {
            api: self.pods,
            statics: self.statics,
            hints: hinted,
            keeper: self.keeper,
            clearing: clearing.subscribe(),
        };
        let dispatch = Box::pin(pod::dispatch::run(actors.dispatch, inputs, seen.clone()));
        let ledger = node::ledger::run(actors.ledger, self.ledger);
        let sweep = Box::pin(pod::orphans::sweep(actors.orphans, table.clone(), clearing));
        let binding = Box::pin(node::binding::run(actors.binding, table.clone()));
        let (api, clock) = actors.mirrors;
        let mirrors = Box::pin(pod::orphans::delete_mirrors(api, clock, table.clone()));
        let shutdown = node::shutdown::run(actors.shutdown, self.announcer, hints.clone());
        let shutdown = Box::pin(shutdown);
        let relist = pod::relist::run(actors.relist, seen, hints);
        let local = serving::local::run(actors.local);
        let upkeep = node::log_rotation::run(actors.log_rotation);
        let csi = Box::pin(volume::csi::run(actors.plugins));
        let unstaging = Box::pin(volume::csi::unstaging::run(actors.unstaging));
        let limits = Box::pin(volume::storage_limits::run(actors.storage_limits));
        let (serves, shared) = (self.serves.then_some(self.reviews), actors.serving);
        let server = Box::pin(async move {
            match serves {
                Some(reviews) => serving::run(shared, reviews, sessions).await,
                None => std::future::pending().await,
            }
        });
        let collect = Box::pin(image::collect::run(actors.images));
        let dead = Box::pin(pod::dead_containers::run(actors.dead_containers));
        let pressure = Box::pin(node::pressure::run(actors.pressure));
        let (name, events) = actors.oom;
        let oom = Box::pin(node::oom::run(name, events, self.kernel_log));
        let renewal = async move {
            match self.renewal {
                Some(task) => _ = task.await,
                None => std::future::pending().await,
            }
        };
        let node = node::run(actors.node, self.network, table);
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
