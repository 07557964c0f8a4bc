//! Network policies in the kernel: one nftables table of its own per cluster, written by differences.
//!
//! `core::policies` decides; this module writes its sets, chains and verdict maps. Three base chains look up the pod by its
//! address and continue in the pod's chain: `egress` before `ingress` for forwarded packets, also those within one bridge if the
//! bridge passes them to nftables (`nf_call_iptables`), and `egress-to-node` for packets from a pod to this node. What the node itself sends,
//! such as probes, is never restricted (KEP-2091 describes the same rule of the API). Packets of established connections and
//! ICMPv6 neighbour discovery pass first. Services are translated before these chains.
//!
//! The table is separate from that of the services: either can be replaced in one transaction without the other.

mod messages;

use std::collections::BTreeMap;
use std::io;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;

use holdfast_core::policies::{PodFacts, Policy, Ruleset, World, diff};
use holdfast_net::nft::Nft;

use messages::Filter;

/// The largest number of elements that an audit reads of a set. A larger set is written again.
const MOST_ELEMENTS: usize = 1 << 20;

/// Why the kernel's table is not as desired.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The table cannot be read or written.
    #[error("the table inet {table} of network policies cannot be written: {error}")]
    Table {
        /// The table.
        table: String,
        /// The kernel's error.
        error: io::Error,
    },
}

/// The network policies of one node. Calls block until the kernel has answered.
pub struct PolicyPlane {
    nft: Nft,
    filter: Filter,
    node: String,
    world: World,
    /// What the kernel has; `None` if that is unknown.
    current: Option<Ruleset>,
    is_changed: bool,
}

impl PolicyPlane {
    /// Prepares the table `{table}-policy`. An existing one, of a killed process, keeps restricting pods until the first
    /// [`PolicyPlane::commit`] replaces it.
    ///
    /// # Errors
    ///
    /// The kernel has no nftables, or this process may not use it.
    pub fn open(table: &str, node: &str) -> Result<PolicyPlane, PolicyError> {
        let filter = Filter::new(name(table));
        let nft = Nft::open().and_then(|mut nft| nft.probe().map(|()| nft));
        Ok(PolicyPlane {
            nft: nft.map_err(|error| filter.failed(error))?,
            filter,
            node: node.to_owned(),
            world: World::default(),
            current: None,
            is_changed: true,
        })
    }

    /// Deletes the table. A missing table is no error.
    ///
    /// # Errors
    ///
    /// This process may not change tables.
    pub fn remove(table: &str) -> Result<(), PolicyError> {
        let filter = Filter::new(name(table));
        let removed = Nft::clean_up(|nft| Ok(nft.commit(filter.table.destroy().into())?));
        removed.map(drop).map_err(|error| filter.failed(error))
    }

    /// Sets a policy, or removes a deleted one. Nothing reaches the kernel before [`PolicyPlane::commit`].
    pub fn set_policy(&mut self, namespace: &str, name: &str, policy: Option<&NetworkPolicy>) {
        self.is_changed |= self
            .world
            .set_policy(namespace, name, policy.map(Policy::of));
    }

    /// Sets a pod, or removes a deleted one.
    pub fn set_pod(&mut self, namespace: &str, name: &str, pod: Option<&Pod>) {
        let facts = pod.map(|pod| PodFacts::of(pod, &self.node));
        self.is_changed |= self.world.set_pod(namespace, name, facts);
    }

    /// Sets the address of a server that policies select as if it were a pod, such as the cluster's DNS.
    pub fn set_server(&mut self, namespace: &str, name: &str, server: PodFacts) {
        self.is_changed |= self.world.set_pod(namespace, name, Some(server));
    }

    /// Sets the labels of a namespace, or removes a deleted one.
    pub fn set_namespace(&mut self, name: &str, labels: Option<BTreeMap<String, String>>) {
        self.is_changed |= self.world.set_namespace(name, labels);
    }

    /// Writes all changes since the last commit in one transaction. Returns whether there were any.
    ///
    /// # Errors
    ///
    /// The kernel rejects the transaction. The next commit replaces the whole table.
    pub fn commit(&mut self) -> Result<bool, PolicyError> {
        if !self.is_changed {
            return Ok(false);
        }
        let desired = self.world.ruleset();
        let messages = match &self.current {
            Some(current) => self.filter.change(&diff(current, &desired)),
            None => self.filter.replace(&diff(&Ruleset::default(), &desired)),
        };
        let messages = messages.map_err(|error| self.filter.failed(error))?;
        if messages.is_empty() {
            self.is_changed = false;
            return Ok(false);
        }
        // After an error, the state of the kernel is unknown.
        self.current = None;
        self.nft
            .commit(messages)
            .map_err(|error| self.filter.failed(error.into()))?;
        self.current = Some(desired);
        self.is_changed = false;
        Ok(true)
    }

    /// Commits pending changes, reads the table, and replaces it if it differs. Returns whether it differed.
    ///
    /// # Errors
    ///
    /// The table cannot be read or written.
    pub fn audit(&mut self) -> Result<bool, PolicyError> {
        self.commit()?;
        let Some(current) = &self.current else {
            return Ok(false);
        };
        let is_equal = self.filter.is_in(&mut self.nft, current);
        if is_equal.map_err(|error| self.filter.failed(error))? {
            return Ok(false);
        }
        self.current = None;
        self.is_changed = true;
        self.commit()
    }
}

/// The name of the policies' table, next to the services' table.
fn name(table: &str) -> String {
    format!("{table}-policy")
}
