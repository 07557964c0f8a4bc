//! The node: which pods it admits and preempts, what it declares, and its certificates.

pub mod admit;
pub mod features;
pub mod ledger;
pub mod node_affinity;
pub mod preempt;
pub mod signing;
pub mod taints;
