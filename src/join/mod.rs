//! Adding machines to a cluster: `holdfast token` on a machine with the administrator's kubeconfig, and the discovery of the
//! cluster by `holdfast join` on the machine that joins. `core::node::join` has the rules; `up::join` starts the node.

pub mod discovery;
pub mod token;
