//! The data plane of services: `core::services` plans, and this module programs the kernel.
//!
//! Each family has a table with the name of the cluster. The module changes no other table, and refuses to run next to kube-proxy,
//! which would translate the same connections.
//!
//! A commit is one transaction, so every packet meets either the old or the new rules. If a transaction fails, or an audit finds
//! another state than the planned one, the whole table is replaced, in one transaction as well. Established connections do not
//! depend on the rules: connection tracking has their translation. A table that a killed process has left works until the first
//! commit replaces it.
//!
//! All calls block; one thread owns the [`DataPlane`].

mod affinity;
mod audit;
mod batch;
mod flows;
mod layout;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast_core::network::Family;
use holdfast_core::services::{
    HealthCheck, NodeFacts, Operation, PlanSettings, Planner, Problems, StaleFlows,
};
use holdfast_net::netlink::{BatchError, Message};
use holdfast_net::nft::{self, Nft, Table};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;

use affinity::Clients;
use batch::{Batch, SharedSet};
use flows::Stale;
use layout::Layout;

/// How long a chain without rules stays before it is deleted. Kernels before 6.2 notice only after a moment that a deleted element
/// of a verdict map no longer refers to the chain (`staleChains` in `pkg/proxy/nftables/proxier.go`).
const STALE_CHAIN_AGE: Duration = Duration::from_secs(1);

/// Notes the generation after a transaction, if no other program has changed the tables since `trusted`.
fn trust_next(nft: &mut Nft, trusted: &mut Option<u32>) {
    let expected = trusted.map(|generation| generation.wrapping_add(1));
    *trusted = nft
        .generation()
        .ok()
        .filter(|after| Some(*after) == expected);
}

/// Sends a part of the whole table.
fn send_full(
    nft: &mut Nft,
    layout: &Layout,
    messages: Vec<Message>,
    trusted: &mut Option<u32>,
) -> Result<(), CommitError> {
    nft.commit(messages)
        .map_err(|error| CommitError::Rejected {
            table: layout.name().to_owned(),
            error,
        })?;
    trust_next(nft, trusted);
    Ok(())
}

/// The number of operations after which a transaction ends while empty tables are filled.
const TOGETHER: usize = 40_000;

/// The settings of the data plane. They do not change while the process runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The name of the tables, one in the family `ip` and one in `ip6`.
    pub table: String,
    /// The families that get rules.
    pub families: Vec<Family>,
    /// Which addresses of this node accept node ports: all that are in these networks. Empty: the addresses in the Node's status.
    pub node_port_addresses: Vec<IpNet>,
    /// The networks of pods, in all clusters nodes. Empty: clients from outside are not distinguished, and connections that they
    /// open to cluster addresses keep their source.
    pub cluster_cidrs: Vec<IpNet>,
    /// The ranges of cluster addresses: connections to unused addresses in them are dropped. May be empty.
    pub service_cidrs: Vec<IpNet>,
    /// Cluster addresses at which this process answers itself, such as that of the DNS: services get no rules for them.
    pub own_addresses: Vec<IpAddr>,
    /// Whether all connections to cluster addresses get an address of this node as their source.
    pub masquerade_all: bool,
    /// The bit of a packet's mark, from 0 to 31, by which connections are chosen that get another source. kube-proxy's default is
    /// 14.
    pub masquerade_bit: u32,
}

impl Settings {
    /// The defaults of `holdfast proxy` for a cluster with the name of its table.
    #[must_use]
    pub fn new(table: &str) -> Settings {
        Settings {
            table: table.to_owned(),
            families: Family::ALL.to_vec(),
            node_port_addresses: vec![],
            cluster_cidrs: vec![],
            service_cidrs: vec![],
            own_addresses: vec![],
            masquerade_all: false,
            masquerade_bit: 14,
        }
    }
}

/// Why the data plane does not start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// kube-proxy, or its leftover table, would translate the same connections.
    #[error(
        "{found}: kube-proxy runs here or has left its rules; stop kube-proxy and run \"kube-proxy --cleanup\""
    )]
    KubeProxy {
        /// The rules, as the beginning of a sentence.
        found: &'static str,
    },
    /// A setting is invalid.
    #[error("invalid {field} {value:?}: {reason}")]
    Invalid {
        /// The name of the setting.
        field: &'static str,
        /// Its value.
        value: String,
        /// The fault of the value, and a valid value.
        reason: &'static str,
    },
    /// The kernel refuses nftables.
    #[error(
        "reading the nftables tables failed: {0}; the proxy needs CAP_NET_ADMIN and a kernel with nf_tables"
    )]
    Kernel(#[from] io::Error),
}

/// Why the rules could not be committed. The next commit or audit tries to replace the whole table.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// The kernel rejected the whole table.
    #[error("replacing the nftables table {table:?} failed: {error}")]
    Rejected {
        /// The name of the tables.
        table: String,
        /// The kernel's reason.
        error: BatchError,
    },
    /// The tables could not be read.
    #[error("reading nftables failed: {0}")]
    Kernel(#[from] io::Error),
}

/// What a commit has done.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Committed {
    /// The number of netlink messages of the transaction; zero if nothing has changed.
    pub messages: usize,
    /// Whether the whole table was replaced: at the first commit, and after a failed one.
    pub is_full: bool,
    /// The number of deleted flows.
    pub deleted_flows: usize,
    /// Why flows could not be deleted; `None` if none are left. The next commit or audit tries again.
    pub flows_left: Option<String>,
}

/// What an audit has found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Repaired {
    /// The first differences between the kernel's state and the planned one, as sentences. If there are any, the table was
    /// replaced.
    pub differences: Vec<String>,
    /// As [`Committed::flows_left`].
    pub flows_left: Option<String>,
}

/// The rules of all services in the kernel.
pub struct DataPlane {
    layout: Layout,
    planner: Planner,
    nft: Nft,
    /// Whether the kernel has the plans of the last [`Planner::take_changes`].
    is_installed: bool,
    /// The generation of the kernel's tables at which they had the planned state; `None` if it is unknown.
    trusted: Option<u32>,
    /// Chains without rules that are deleted later.
    stale_chains: Vec<(Instant, Family, String)>,
    /// Flows that are not deleted yet.
    stale_flows: Stale,
}

fn table(name: &'static str, family: Family) -> Table {
    Table {
        family: match family {
            Family::V4 => nft::Family::V4,
            Family::V6 => nft::Family::V6,
        },
        name,
    }
}

/// The rules of kube-proxy, in nftables mode or, if iptables writes to nftables, in iptables mode.
fn kube_proxy(nft: &mut Nft, family: Family) -> io::Result<Option<&'static str>> {
    if nft.has_table(table("kube-proxy", family))? {
        return Ok(Some("the nftables table \"kube-proxy\" exists"));
    }
    // The chain of services in iptables mode (`pkg/proxy/iptables/proxier.go`).
    let rules = nft.rules(table("nat", family), "KUBE-SERVICES")?;
    Ok((!rules.is_empty()).then_some("iptables' chain \"KUBE-SERVICES\" has rules"))
}

impl DataPlane {
    /// Opens the kernel's tables. Nothing changes before the first commit, so rules of a killed process stay until then.
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn open(settings: Settings) -> Result<DataPlane, OpenError> {
        let mut nft = Nft::open()?;
        nft.probe()?;
        for family in Family::ALL {
            if let Some(found) = kube_proxy(&mut nft, family)? {
                return Err(OpenError::KubeProxy { found });
            }
        }
        let planner = Planner::new(PlanSettings {
            families: settings.families.clone(),
            cluster_networks: settings.cluster_cidrs.clone(),
            own_addresses: settings.own_addresses.clone(),
        });
        Ok(DataPlane {
            layout: Layout::new(settings)?,
            planner,
            nft,
            is_installed: false,
            trusted: None,
            stale_chains: vec![],
            stale_flows: Stale::default(),
        })
    }

    /// Sets the facts of this node. If they have changed, all services are planned again, and the next commit replaces the tables.
    pub fn set_node(&mut self, node: NodeFacts) {
        if self.planner.node().addresses != node.addresses {
            self.is_installed = false;
        }
        self.planner.set_node(node);
    }

    /// Sets a service with all its slices; `None` deletes it. Nothing reaches the kernel before [`DataPlane::commit`].
    pub fn set_service(
        &mut self,
        namespace: &str,
        name: &str,
        service: Option<&Service>,
        slices: &[Arc<EndpointSlice>],
    ) {
        self.planner.set_service(namespace, name, service, slices);
    }

    /// The invalid values of a service, with reasons; `None` if all are valid.
    #[must_use]
    pub fn problems(&self, namespace: &str, name: &str) -> Option<&Problems> {
        self.planner.problems(namespace, name)
    }

    /// The services that load balancers check, with the number of their ready endpoints on this node.
    #[must_use]
    pub fn health_checks(&self) -> Vec<HealthCheck> {
        self.planner.health_checks()
    }

    /// Commits all changes since the last commit in one transaction, and deletes the flows of UDP endpoints that were removed. If
    /// flows cannot be deleted, the rules are committed nevertheless.
    ///
    /// # Errors
    ///
    /// The kernel rejects the changes, and then also the whole table. The next commit tries again.
    pub fn commit(&mut self) -> Result<Committed, CommitError> {
        let mut committed = Committed::default();
        let flows = if self.is_installed {
            let (count, flows) = self.send();
            committed.messages = count;
            flows
        } else {
            self.planner.take_changes(|_, _| {})
        };
        self.stale_flows.add(flows);
        if !self.is_installed {
            committed.messages = self.replace()?;
            committed.is_full = true;
        }
        self.delete_stale_chains();
        match self.stale_flows.delete() {
            Ok(deleted) => committed.deleted_flows = deleted,
            Err(error) => committed.flows_left = Some(error.to_string()),
        }
        Ok(committed)
    }

    /// Sends the changes of services. If the kernel rejects them, the table has to be replaced.
    fn send(&mut self) -> (usize, Vec<StaleFlows>) {
        let DataPlane {
            layout,
            planner,
            stale_chains,
            ..
        } = self;
        let mut batch = Batch::default();
        let now = Instant::now();
        let mut stale = vec![];
        let flows = planner.take_changes(|family, operation| {
            match &operation {
                // A chain that exists again must not be deleted.
                Operation::CreateChain(created) => {
                    stale_chains.retain(|(_, of, name)| (*of, name) != (family, created));
                }
                Operation::DeleteChain(name) => stale.push((now, family, name.clone())),
                _ => {}
            }
            batch.add(layout, family, operation);
        });
        let messages = batch.messages(&self.layout);
        let count = messages.len();
        if count == 0 {
            return (0, flows);
        }
        let before = self.nft.generation().ok();
        if let Err(error) = self.nft.commit(messages) {
            // Another program has changed the table, or the kernel's answer was lost.
            tracing::warn!("changing the services' table failed, so it is replaced: {error}");
            self.is_installed = false;
            return (0, flows);
        }
        self.stale_chains.extend(stale);
        self.trust(before);
        (count, flows)
    }

    /// Notes the generation after a transaction, if no other program had changed the tables since the last one. `before` is the
    /// generation before the transaction; `None` if it could not be read.
    fn trust(&mut self, before: Option<u32>) {
        if self.trusted != before {
            self.trusted = None;
        }
        trust_next(&mut self.nft, &mut self.trusted);
    }

    /// Replaces the tables by the planned ones, in one transaction. If there are no tables yet, several transactions fill them,
    /// because one for all services takes many megabytes.
    fn replace(&mut self) -> Result<usize, CommitError> {
        let mut messages: Vec<Message> = vec![];
        let mut is_fresh = true;
        for family in Family::ALL {
            let exists = self.nft.has_table(self.layout.table(family))?;
            is_fresh &= !exists;
            if self.layout.families().contains(&family) {
                let shared = SharedSet::all().into_iter();
                let shared: Vec<_> = shared.map(|set| set.set(family)).collect();
                messages.extend(self.layout.create(family, self.planner.node(), &shared));
            } else if exists {
                messages.extend(self.layout.table(family).destroy());
            }
        }
        // The transactions define the whole state, so only a later one of another program can have changed it.
        self.trusted = self.nft.generation().ok();
        let mut count = 0_usize;
        let mut batch = Batch::default();
        for family in self.layout.families().to_vec() {
            // Without the clients of the old table, connections get random endpoints once.
            let clients = Clients::read(&mut self.nft, self.layout.table(family), family);
            let mut clients = clients.unwrap_or_default();
            let DataPlane {
                layout,
                planner,
                nft,
                trusted,
                ..
            } = self;
            let mut failed = None;
            planner.for_each_part(family, |part| {
                for operation in part {
                    if let Operation::CreateAffinity(set) = &operation {
                        batch.add_clients(layout, family, set, &clients.take(set));
                    }
                    batch.add(layout, family, operation);
                }
                if is_fresh && batch.operations() >= TOGETHER && failed.is_none() {
                    messages.extend(std::mem::take(&mut batch).messages(layout));
                    count = count.saturating_add(messages.len());
                    failed = send_full(nft, layout, std::mem::take(&mut messages), trusted).err();
                }
            });
            if let Some(error) = failed {
                return Err(error);
            }
        }
        messages.extend(batch.messages(&self.layout));
        count = count.saturating_add(messages.len());
        send_full(&mut self.nft, &self.layout, messages, &mut self.trusted)?;
        self.stale_chains.clear();
        self.is_installed = true;
        Ok(count)
    }

    /// Deletes chains that have had no rules for a while. A failure leaves them for the next call: they cost nothing.
    fn delete_stale_chains(&mut self) {
        let is_due = |(since, ..): &(Instant, Family, String)| since.elapsed() >= STALE_CHAIN_AGE;
        let due: Vec<_> = self.stale_chains.iter().filter(|c| is_due(c)).collect();
        if due.is_empty() {
            return;
        }
        let messages = due
            .iter()
            .flat_map(|(_, family, name)| self.layout.table(*family).remove(name))
            .collect();
        let before = self.nft.generation().ok();
        if self.nft.commit(messages).is_ok() {
            self.trust(before);
            self.stale_chains.retain(|chain| !is_due(chain));
        }
    }

    /// Compares the kernel's tables with the planned ones, and replaces them if another program has changed them. Commits pending
    /// changes first. Costs one short query if no program has changed any table since the last audit or commit.
    ///
    /// # Errors
    ///
    /// The tables cannot be read or replaced.
    pub fn audit(&mut self) -> Result<Repaired, CommitError> {
        let was_installed = self.is_installed;
        let committed = self.commit()?;
        let flows_left = committed.flows_left;
        if was_installed && committed.is_full {
            return Ok(Repaired {
                differences: vec!["the kernel rejected a change of the table".to_owned()],
                flows_left,
            });
        }
        let generation = self.nft.generation()?;
        let mut differences = vec![];
        if self.trusted == Some(generation) {
            return Ok(Repaired {
                differences,
                flows_left,
            });
        }
        for family in Family::ALL {
            if self.layout.families().contains(&family) {
                audit::compare(self, family, &mut differences)?;
            }
        }
        if differences.is_empty() {
            self.trusted = Some(generation);
        } else {
            // If replacing fails, the next commit tries again.
            self.is_installed = false;
            self.replace()?;
        }
        Ok(Repaired {
            differences,
            flows_left,
        })
    }

    /// Deletes the tables. Missing tables are no error.
    ///
    /// # Errors
    ///
    /// This process may not change the tables.
    pub fn remove(settings: &Settings) -> Result<(), OpenError> {
        let layout = Layout::new(settings.clone())?;
        let messages = Family::ALL.map(|family| layout.table(family).destroy());
        let removed =
            Nft::clean_up(|nft| Ok(nft.commit(messages.into_iter().flatten().collect())?));
        removed.map(drop).map_err(OpenError::from)
    }
}
