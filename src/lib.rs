//! Holdfast: a node agent for Kubernetes. ARCHITECTURE.md says what lives where and who may import whom.

pub mod control;
pub mod core;
pub mod kubeapi;
