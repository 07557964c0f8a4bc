//! Publishes the Node object and keeps it up to date. Independent loops run in parallel:
//!
//! | Loop | Purpose |
//! |---|---|
//! | `runtime::poll` | polls the runtime's status |
//! | `runtime::images` | lists the runtime's images |
//! | `runtime::pod_addresses` | sets the runtime's pod CIDR |
//! | `pod_network::run` | lets the CNI configuration of a joined node follow the Node's pod range |
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
//! `binding::run` binds containers to their CPUs and NUMA nodes.
//!
//! The loops exchange the latest values through `watch` channels. Every request has a deadline.

mod api;
pub mod binding;
pub(crate) mod cgroup_tree;
mod checkpoint;
pub(crate) mod claim_metrics;
pub mod claims;
pub mod credentials;
pub mod devices;
pub mod firewall;
pub(crate) mod lease;
mod leases;
pub mod ledger;
pub(crate) mod log_rotation;
pub mod machine;
pub(crate) mod manager_metrics;
pub mod managers;
pub mod network;
pub mod oom;
pub(crate) mod own;
mod own_cgroups;
pub(crate) mod pod_network;
pub mod pressure;
pub(crate) mod registration;
pub(crate) mod runtime;
pub mod shutdown;
pub mod slices;
pub(crate) mod standalone;
pub(crate) mod status;

use std::time::Duration;

use tokio::sync::watch;

pub(crate) use api::KubeNodes;

pub use api::{NodeApi, NodeChange};
pub use claims::ClaimManager;
pub use devices::DeviceManager;
pub use own::OwnNode;
pub(crate) use own::{AdmissionNode, REGISTER_AGAIN_AFTER, store_node};

use super::pod::table::PodTable;
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
fn deadline(config: &Config) -> Duration {
    let lease = u64::try_from(config.lease_seconds).unwrap_or(40);
    config
        .node_status_update
        .min(Duration::from_secs(lease))
        .max(Duration::from_secs(1))
}

/// Whether containers may swap: swap must be enabled in the configuration, and the kernel must be able to limit it.
pub(crate) fn swaps(machine: &Machine, config: &Config) -> bool {
    config.limited_swap && machine.cgroup_v2 && machine.swap.is_some()
}

/// What the node's loops use.
pub(crate) struct Parts {
    pub runtime: runtime::Parts,
    pub pod_network: pod_network::Parts,
    pub status: status::Parts,
    pub lease: lease::Parts,
    pub own: own::Parts,
    pub cgroup_tree: cgroup_tree::Parts,
}

/// Runs until the process exits.
pub async fn run(parts: Parts, network: watch::Sender<Network>, table: watch::Receiver<PodTable>) {
    let (views, view) = watch::channel(RuntimeView::default());
    let (found, images) = watch::channel(None);
    let inputs = status::Inputs { view, images };
    tokio::join!(
        runtime::poll(&parts.runtime, &views, &network),
        runtime::images(&parts.runtime, &found),
        runtime::pod_addresses(&parts.runtime),
        pod_network::run(&parts.pod_network),
        status::run(&parts.status, inputs, table),
        lease::run(&parts.lease),
        own::run(&parts.own),
        cgroup_tree::run(&parts.cgroup_tree),
        own_cgroups::run(&parts.runtime.config.own_cgroups),
        leases::run(
            &*parts.runtime.runtime,
            parts.runtime.config.runtime_timeout
        ),
    );
}

/// Handles a reply whose receiver was dropped.
fn log_dropped_reply<T>(result: Result<(), T>) {
    if result.is_err() {
        tracing::debug!("the requesting worker no longer waits for the answer");
    }
}
