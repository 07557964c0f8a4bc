//! Holdfast: a node agent for Kubernetes. ARCHITECTURE.md says what lives where and who may import whom.

pub mod agent;
pub mod ask;
pub mod cli;
pub mod config;
pub mod control;
pub mod core;
pub mod cri;
pub mod csi;
pub mod devices;
pub mod host;
pub mod https;
pub mod kubeapi;
pub mod logging;
pub mod probes;
pub mod sealed;
pub mod sys;
pub mod up;
