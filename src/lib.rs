//! Holdfast: a node agent for Kubernetes. ARCHITECTURE.md describes the modules and their permitted imports.

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
