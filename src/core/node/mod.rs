//! The node: its capacity, addresses, conditions and declared features; admission, preemption and graceful shutdown of
//! pods; resource managers and devices; certificates.

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
pub mod join;
pub mod leases;
pub mod ledger;
pub mod managers;
pub mod memory;
pub mod node_affinity;
pub mod offline;
pub mod oom;
pub mod pod_network;
pub mod pod_ranges;
pub mod preempt;
pub mod routes;
pub mod runtime_health;
pub mod shutdown;
pub mod signing;
pub mod taints;
pub mod topology;
pub mod used;
