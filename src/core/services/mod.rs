//! What the kernel does with the traffic of services, in the manner of kube-proxy (`pkg/proxy` of Kubernetes).
//!
//! A [`Planner`] has the facts of this node and of all services. For each service it plans [`plan::PortPlan`]s: what the
//! kernel has for one port and one family of addresses. [`Planner::take_changes`] has the [`Operation`]s that lead from the
//! plans which the kernel has to the current ones. A change of a service costs the work for this service only.
//!
//! - [`facts`] parses a Service, and [`endpoints`] its EndpointSlices; what is invalid is skipped with a reason;
//! - [`topology`] chooses the endpoints, [`plan`] turns them into chains, rules and entries of maps;
//! - [`claims`] decides between services that want the same address and port;
//! - [`diff`] compares plans, and [`planner`] keeps them;
//! - [`rules`] are the words in which plans are written, without netlink.
//!
//! One port of a service, in one family, has these objects in the kernel. `12` is the number of the port:
//!
//! ```text
//! map services       10.96.0.20 . tcp . 80 : goto service-12/default/web/tcp/http
//! map node-ports     tcp . 30080           : goto external-12/default/web/tcp/http
//! map endpoints-12   24 . 0 : 10.244.0.5 . 8080,  24 . 1 : 10.244.1.9 . 8080
//! chain service-12/… dnat to 24 . numgen random mod 2 map @endpoints-12
//! ```
//!
//! Services share the maps, because the kernel finds a map by its name in a list: 10,000 maps would make each change slow.

mod claims;
mod diff;
mod endpoints;
mod facts;
mod node;
mod plan;
mod planner;
mod rules;
mod topology;

pub use facts::Problems;
pub use node::{NodeFacts, PlanSettings};
pub use planner::{HealthCheck, Planner, StaleFlows};
pub use rules::{Address, AddressSet, Destination, Map, Operation, Rule, Target, Verdict};

#[cfg(test)]
mod tests;
