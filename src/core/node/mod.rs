//! The node: its size and addresses, its conditions, which pods it admits and preempts, what it declares, and its
//! certificates.

pub mod addresses;
pub mod admit;
pub mod capacity;
pub mod conditions;
pub mod features;
pub mod ledger;
pub mod node_affinity;
pub mod offline;
pub mod preempt;
pub mod runtime_health;
pub mod signing;
pub mod taints;
