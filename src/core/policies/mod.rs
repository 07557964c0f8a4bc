//! Which traffic network policies allow: the sets, chains and verdicts of a packet filter for the pods of one node.
//!
//! What enters: all NetworkPolicies, pods and namespaces of the cluster ([`World`]). What leaves: a [`Ruleset`], and the
//! [`Operation`]s between two of them. The semantics are those of `networking.k8s.io/v1`: a pod that no policy selects in a
//! direction is not restricted in that direction; otherwise only what the rules of its policies allow passes. The packet filter
//! accepts established connections and what the node itself sends, and sees addresses after the translation of services.
//!
//! Sets of pods have names that depend on their selectors only, so pods that come and go change elements, never rules.
//! The names of all other sets depend on their contents: such a set never changes. Names are cryptographic digests, so that no
//! policy can be written whose sets collide with those of another namespace.

mod blocks;
mod diff;
mod facts;
mod plan;
#[cfg(test)]
mod tests;

pub use diff::{Operation, diff};
pub use facts::{PodFacts, Policy, World};

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::network::{Family, Protocol};

/// The direction of a connection from the pod's point of view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// To the pod.
    Ingress,
    /// From the pod.
    Egress,
}

impl Direction {
    /// Both directions.
    pub const BOTH: [Direction; 2] = [Direction::Ingress, Direction::Egress];
}

/// Ports of a transport protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ports {
    /// The protocol.
    pub protocol: Protocol,
    /// The first port.
    pub first: u16,
    /// The last port.
    pub last: u16,
}

/// The elements of a set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Members {
    /// Addresses of pods, all of one version. These sets change.
    Pods(Family, BTreeSet<IpAddr>),
    /// Disjoint ranges of addresses, in order, all of one version.
    Blocks(Family, Vec<(IpAddr, IpAddr)>),
    /// Disjoint ranges of ports, in order.
    Ports(Vec<Ports>),
}

/// A rule of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rule {
    /// Allows a connection if it satisfies both conditions.
    Allow {
        /// The set that has the peer's address; `None` allows every peer.
        peers: Option<(Family, String)>,
        /// The set that has the destination port; `None` allows every protocol.
        ports: Option<String>,
    },
    /// Evaluates another chain.
    Jump(String),
    /// Discards the packet.
    Drop,
}

/// A list of rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// The direction of the connections.
    pub direction: Direction,
    /// The policy, as `namespace/name`; empty for the chain of a pod.
    pub policy: String,
    /// The rules.
    pub rules: Vec<Rule>,
}

/// What a packet filter does with the traffic of the node's pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ruleset {
    /// The sets by name.
    pub sets: BTreeMap<String, Members>,
    /// The chains by name.
    pub chains: BTreeMap<String, Chain>,
    /// The chain of each restricted pod by direction and address.
    pub pods: BTreeMap<(Direction, IpAddr), String>,
}
