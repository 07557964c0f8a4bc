//! The Node object and what keeps it true (kubelet spec, chapter 12): loops that do not wait for each other.
//!
//! | Loop | What it does |
//! |---|---|
//! | `runtime::poll` | asks the runtime how it is |
//! | `runtime::images` | lists its images |
//! | `runtime::pod_addresses` | tells it the pod CIDR |
//! | `status::keep` | registers the node (`registration`) and patches its status |
//! | `lease::keep` | renews the lease |
//! | `own::follow` | watches the Node object |
//! | `cgroup_tree::keep` | gives the cgroups above pods, and those of the system, their values |
//! | `leases::keep` | releases the addresses that failed sandboxes left |
//! | `own_cgroups::keep` | moves the agent and the system's processes to their cgroups, where they are to have some |
//!
//! Beside them `pressure` watches over memory, disks and process ids, and evicts pods where they run short; `oom` says when the kernel had to kill; `shutdown`
//! ends them in their order with the machine; `devices::run` registers device plugins; `claims::run` gives back what pods have left of dynamic resources, and
//! `slices::run` takes back what drivers that are gone have offered; `network::follow` reads the machine's addresses and its resolver configuration again, and
//! `managers::keep` binds containers to the processors and the memory that they should use.
//!
//! What they tell each other is the newest value in a `watch` channel. Every request has a deadline.

mod api;
mod cgroup_tree;
mod checkpoint;
pub mod claim_metrics;
pub mod claims;
pub mod credentials;
pub mod devices;
pub mod firewall;
mod lease;
mod leases;
pub mod ledger;
pub mod log_rotation;
pub mod machine;
pub mod manager_metrics;
pub mod managers;
pub mod network;
pub mod oom;
mod own;
mod own_cgroups;
pub mod pressure;
mod registration;
mod runtime;
pub mod shutdown;
pub mod slices;
pub mod standalone;
mod status;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

pub use api::{KubeNodes, NodeApi, NodeChange};
pub use claims::ClaimManager;
pub use devices::DeviceManager;
pub use own::{Admitting, OwnNode, REGISTER_AGAIN_AFTER, seal};

use super::Context;
use super::pod::dispatch::Roster;
use crate::config::Config;
use crate::core::node::capacity::{self, Limits, MachineSize};
use crate::core::pod::resources::Amounts;
use crate::core::pod::worker::Network;
use crate::sys::machine::Machine;
use runtime::RuntimeView;

fn size(machine: &Machine) -> MachineSize {
    MachineSize {
        cpus: machine.cpus,
        memory: machine.memory,
        storage: machine.storage,
        huge_pages: machine.huge_pages.clone(),
    }
}

fn limits(config: &Config) -> Limits<'_> {
    Limits {
        pods: config.max_pods,
        pods_per_core: config.pods_per_core,
        ephemeral_storage: config.ephemeral_storage,
        reserved: &config.reserved,
        thresholds: &config.eviction.thresholds,
    }
}

/// What pods may use: the machine's capacity less what is set aside.
#[must_use]
pub fn allocatable(machine: &Machine, config: &Config) -> Amounts {
    capacity::allocatable(&size(machine), limits(config))
}

/// How long a request of the heartbeat may take: when the next is due, it is too late.
fn deadline(context: &Context) -> Duration {
    let lease = u64::try_from(context.config.lease_seconds).unwrap_or(40);
    context
        .config
        .node_status_update
        .min(Duration::from_secs(lease))
        .max(Duration::from_secs(1))
}

/// Runs until the process ends.
pub async fn run(
    context: Arc<Context>,
    network: watch::Sender<Network>,
    roster: watch::Receiver<Roster>,
) {
    let (views, view) = watch::channel(RuntimeView::default());
    let (found, images) = watch::channel(None);
    let inputs = status::Inputs { view, images };
    tokio::join!(
        runtime::poll(&context, &views, &network),
        runtime::images(&context, &found),
        runtime::pod_addresses(&context),
        status::keep(&context, inputs, roster),
        lease::keep(&context),
        own::follow(&context),
        cgroup_tree::keep(&context),
        own_cgroups::keep(&context),
        leases::keep(&context),
    );
}
