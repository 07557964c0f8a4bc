//! Publishes the Node object and keeps it up to date. Independent loops run in parallel:
//!
//! | Loop | Purpose |
//! |---|---|
//! | `runtime::poll` | polls the runtime's status |
//! | `runtime::images` | lists the runtime's images |
//! | `runtime::pod_addresses` | sets the runtime's pod CIDR |
//! | `status::run` | registers the node (`registration`) and patches its status |
//! | `lease::run` | renews the lease |
//! | `own::run` | watches the Node object |
//! | `cgroup_tree::run` | sets the values of the cgroups above pods, and of the system's cgroups |
//! | `leases::run` | releases the addresses of failed sandboxes |
//! | `own_cgroups::run` | moves the agent and system processes to their configured cgroups |
//!
//! Other tasks: `pressure` monitors memory, disks and process ids, and evicts pods; `oom` reports
//! out-of-memory kills; `shutdown` terminates pods when the machine shuts down; `devices::run` registers
//! device plugins; `claims::run` releases leftover resource claims; `slices::run` deletes ResourceSlices of
//! unavailable drivers; `network::run` updates the machine's addresses and resolver configuration;
//! `managers::run` binds containers to their CPUs and NUMA nodes.
//!
//! The loops exchange the latest values through `watch` channels. Every request has a deadline.

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
pub use own::{AdmissionNode, OwnNode, REGISTER_AGAIN_AFTER, store_node};

use super::Context;
use super::pod::roster::Roster;
use holdfast_config::Config;
use holdfast_core::node::capacity::{self, Limits, MachineSize};
use holdfast_core::pod::resources::Amounts;
use holdfast_core::pod::worker::Network;
use holdfast_sys::machine::Machine;
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

/// The resources that pods may use: the machine's capacity minus reservations.
#[must_use]
pub fn allocatable(machine: &Machine, config: &Config) -> Amounts {
    capacity::allocatable(&size(machine), limits(config))
}

/// Timeout of heartbeat requests: a request must complete before the next heartbeat is due.
fn deadline(context: &Context) -> Duration {
    let lease = u64::try_from(context.config.lease_seconds).unwrap_or(40);
    context
        .config
        .node_status_update
        .min(Duration::from_secs(lease))
        .max(Duration::from_secs(1))
}

/// Runs until the process exits.
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
        status::run(&context, inputs, roster),
        lease::run(&context),
        own::run(&context),
        cgroup_tree::run(&context),
        own_cgroups::run(&context),
        leases::run(&context),
    );
}

/// Handles a reply whose receiver was dropped.
fn log_dropped_reply<T>(result: Result<(), T>) {
    if result.is_err() {
        tracing::debug!("the requesting worker no longer waits for the answer");
    }
}
