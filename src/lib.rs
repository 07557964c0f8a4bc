//! Holdfast: a node agent for Kubernetes. This package is the program: its commands, its log, the cluster of
//! `holdfast up`, and the client of a running agent. ARCHITECTURE.md describes the crates below it.

pub mod ask;
pub mod cli;
pub mod join;
pub mod logging;
pub mod trace;
pub mod up;
