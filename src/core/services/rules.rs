//! The words of a plan: destinations, targets, rules, and the operations that change them.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::network::Protocol;

/// Where a connection is translated to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    /// The address of the endpoint.
    pub address: IpAddr,
    /// The port of the endpoint.
    pub port: u16,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::net::SocketAddr::from((self.address, self.port)).fmt(f)
    }
}

/// The address of a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    /// An address of the service itself.
    Ip(IpAddr),
    /// The addresses of this node that accept node ports.
    Node,
}

/// What a client connects to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Destination {
    /// The address.
    pub address: Address,
    /// The protocol.
    pub protocol: Protocol,
    /// The port of the service, or the node port.
    pub port: u16,
}

/// A map of destinations. Each has a second map for node ports in the kernel, except [`Map::Firewall`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Map {
    /// Where connections are translated.
    Services,
    /// Which connections are rejected or dropped because they have no endpoints. Those of [`Map::Services`] are translated first.
    NoEndpoints,
    /// Whose clients are checked before translation.
    Firewall,
}

/// What happens to a connection to a destination.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verdict {
    /// Continues in a chain.
    Goto(String),
    /// Discards the packet.
    Drop,
    /// Discards the packet and notifies the client.
    Reject,
}

/// A set of addresses that several services may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AddressSet {
    /// Cluster addresses of services: their unused ports are rejected.
    ClusterAddresses,
    /// Endpoints on this node: a connection from one to itself gets another source address.
    Hairpin,
}

/// A rule of a chain.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Rule {
    /// Leaves the chain if the client is in a network.
    ReturnFrom(IpNet),
    /// Discards the packet.
    Drop,
    /// Marks the connection: its source becomes an address of this node.
    Masquerade,
    /// As [`Rule::Masquerade`], if the client is this node.
    MasqueradeNode,
    /// Continues in a chain if the client is in the cluster's networks.
    GotoFromCluster(String),
    /// Continues in a chain if the client is this node.
    GotoFromNode(String),
    /// Continues in a chain.
    Goto(String),
    /// Translates to a random target of a pool.
    Translate {
        /// The number of the pool.
        pool: u32,
        /// The number of its targets, at least 1.
        count: u32,
    },
    /// Continues in the chain of a random target of a pool.
    Choose {
        /// The number of the pool.
        pool: u32,
        /// The number of its targets, at least 1.
        count: u32,
    },
    /// Continues in the chain of a target if the client used the target before.
    Known {
        /// The set with the clients of the target.
        affinity: String,
        /// The chain of the target.
        chain: String,
        /// The target.
        target: Target,
    },
    /// Remembers that the client uses the target.
    Remember {
        /// The set with the clients of the target.
        affinity: String,
        /// How long the client is remembered after its last connection, in seconds.
        seconds: u32,
    },
    /// Translates to one target.
    TranslateTo(Target),
}

/// The part of a chain's name that identifies the chain, without the service's name.
fn short(chain: &str) -> &str {
    chain.split('/').next().unwrap_or(chain)
}

impl fmt::Display for Rule {
    /// A comment for the rule of at most 127 bytes. Different rules of a chain have different comments, so that a changed rule is
    /// found by its comment.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rule::ReturnFrom(net) => write!(f, "allow {net}"),
            Rule::Drop => write!(f, "drop other clients"),
            Rule::Masquerade => write!(f, "masquerade"),
            Rule::MasqueradeNode => write!(f, "masquerade this node"),
            Rule::GotoFromCluster(chain) => write!(f, "from the cluster to {}", short(chain)),
            Rule::GotoFromNode(chain) => write!(f, "from this node to {}", short(chain)),
            Rule::Goto(chain) => write!(f, "to {}", short(chain)),
            Rule::Translate { pool, count } => write!(f, "pool {pool}, {count} endpoints"),
            Rule::Choose { pool, count } => write!(f, "chains of pool {pool}, {count} endpoints"),
            Rule::Known { target, .. } => write!(f, "known clients of {target}"),
            Rule::Remember { seconds, .. } => write!(f, "remember the client for {seconds} s"),
            Rule::TranslateTo(target) => write!(f, "to {target}"),
        }
    }
}

/// A change of the kernel's objects of one family. [`Operation::phase`] says in which order operations are possible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Creates an empty chain.
    CreateChain(String),
    /// Deletes all rules of a chain, and the chain.
    DeleteChain(String),
    /// Replaces all rules of a chain.
    ReplaceRules {
        /// The chain.
        chain: String,
        /// Its rules from now on.
        rules: Vec<Rule>,
        /// Whether the chain is created in the same transaction, so that it has no rules yet.
        is_new: bool,
    },
    /// Creates the set of the clients of a target.
    CreateAffinity(String),
    /// Deletes the set of the clients of a target.
    DeleteAffinity(String),
    /// Adds the verdict for a destination.
    AddEntry(Map, Destination, Verdict),
    /// Deletes the verdict for a destination.
    DeleteEntry(Map, Destination),
    /// Adds a target with its place in a pool.
    AddTarget {
        /// The number of the pool.
        pool: u32,
        /// The place, from 0 on.
        place: u32,
        /// The target.
        target: Target,
    },
    /// Deletes a target.
    DeleteTarget {
        /// The number of the pool.
        pool: u32,
        /// The place, from 0 on.
        place: u32,
    },
    /// Adds the chain of a target with its place in a pool.
    AddChoice {
        /// The number of the pool.
        pool: u32,
        /// The place, from 0 on.
        place: u32,
        /// The chain of the target.
        chain: String,
    },
    /// Deletes the chain of a target from a pool.
    DeleteChoice {
        /// The number of the pool.
        pool: u32,
        /// The place, from 0 on.
        place: u32,
    },
    /// Adds an address to a set.
    AddAddress(AddressSet, IpAddr),
    /// Deletes an address from a set.
    DeleteAddress(AddressSet, IpAddr),
}

impl Operation {
    /// The order of operations in a transaction: chains exist before rules and maps name them, an element is deleted before one
    /// with the same key is added, and what rules have named is deleted last.
    #[must_use]
    pub fn phase(&self) -> u8 {
        match self {
            Operation::CreateChain(_) | Operation::CreateAffinity(_) => 0,
            Operation::DeleteEntry(..)
            | Operation::DeleteTarget { .. }
            | Operation::DeleteChoice { .. }
            | Operation::DeleteAddress(..) => 1,
            Operation::ReplaceRules { .. } => 2,
            Operation::AddEntry(..)
            | Operation::AddTarget { .. }
            | Operation::AddChoice { .. }
            | Operation::AddAddress(..) => 3,
            Operation::DeleteChain(_) => 4,
            Operation::DeleteAffinity(_) => 5,
        }
    }
}
