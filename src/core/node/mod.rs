//! The node: its size and addresses, its conditions, which pods it admits and preempts, how they end with the machine, what
//! it declares, its devices, and its certificates.

pub mod addresses;
pub mod admit;
pub mod capacity;
pub mod cgroup_tree;
mod checkpoint;
pub mod claims;
pub mod collection;
pub mod conditions;
pub mod cpus;
pub mod devices;
pub mod doctor;
pub mod eviction;
pub mod features;
pub mod hints;
pub mod leases;
pub mod ledger;
pub mod managers;
pub mod memory;
pub mod node_affinity;
pub mod offline;
pub mod oom;
pub mod preempt;
pub mod runtime_health;
pub mod shutdown;
pub mod signing;
pub mod taints;
pub mod topology;
pub mod used;
