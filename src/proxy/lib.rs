//! `holdfast proxy`: services, network policies and DNS of one node, in place of kube-proxy and CoreDNS.
//!
//! Caches by watch (`caches`) mark changed services in an inbox. One thread (`plane`) takes them, hands each service with its
//! slices to the data plane and to the DNS zone, and commits all changes as one transaction. Health and metrics pages are
//! kube-proxy's (`health`, `metrics`). While the apiserver is away, nothing changes: rules and answers stay.

mod address;
mod bridge;
mod caches;
mod config;
mod credentials;
mod enforcement;
mod events;
mod health;
mod metrics;
mod packed;
mod pages;
mod parts;
mod plane;
pub mod policies;
pub mod routes;
mod routing;
mod run;
pub mod services;
mod timetable;
mod tunnel;

pub use config::{Config, ConfigError, Overrides};
pub use run::{RunError, cleanup, run};
