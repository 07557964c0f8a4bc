//! The plans of all services, and the changes since the kernel had them last.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;

use super::claims::{Claim, Claims};
use super::diff::{assign, diff};
use super::endpoints::{Names, Slices};
use super::facts::{PortFacts, Problems, ServiceFacts};
use super::node::{NodeFacts, PlanSettings};
use super::plan::{Input, MAX_AFFINITY, PortPlan, destinations, label};
use super::rules::{AddressSet, Destination, Operation, Target};
use crate::network::{Family, Protocol};

/// The maximum number of targets of a service, all ports together. The kernel's memory for a target is about 100 bytes.
const MAX_TARGETS: usize = 200_000;

/// A service with its facts and plans.
#[derive(Debug)]
struct Planned {
    facts: ServiceFacts,
    slices: Slices,
    /// What the facts and slices lack, without what other services have.
    skipped: Problems,
    problems: Problems,
    ports: Vec<PortPlan>,
}

/// Flows of UDP whose translation is out of date.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaleFlows {
    /// The family of the addresses.
    pub family: Family,
    /// What the clients have sent to.
    pub destination: Destination,
    /// Flows to these targets stay; in the order of their addresses.
    pub keep: Vec<Target>,
}

/// A service whose load balancer checks whether each node has endpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthCheck {
    /// The namespace of the service.
    pub namespace: String,
    /// The name of the service.
    pub name: String,
    /// `spec.healthCheckNodePort`.
    pub port: u16,
    /// The number of ready endpoints on this node.
    pub local_endpoints: usize,
}

/// Plans services. Decides without looking at the kernel; the caller executes the changes.
#[derive(Debug, Default)]
pub struct Planner {
    settings: PlanSettings,
    node: NodeFacts,
    /// By `namespace/name`.
    services: BTreeMap<Arc<str>, Planned>,
    claims: Claims,
    names: Names,
    /// The plans that the kernel has, of services that have changed since.
    committed: BTreeMap<Arc<str>, Vec<PortPlan>>,
    /// How many ports need an address in a set of the kernel.
    addresses: BTreeMap<(AddressSet, IpAddr), u32>,
    /// The last number of a port.
    last_number: u32,
}

impl Planner {
    /// A planner without services and facts of the node.
    #[must_use]
    pub fn new(settings: PlanSettings) -> Planner {
        Planner {
            settings,
            ..Planner::default()
        }
    }

    /// Sets the facts of this node, and plans all services again if they have changed.
    pub fn set_node(&mut self, node: NodeFacts) {
        if self.node == node {
            return;
        }
        self.node = node;
        let all: Vec<Arc<str>> = self.services.keys().cloned().collect();
        for name in all {
            self.plan(&name);
        }
    }

    /// The facts of this node.
    #[must_use]
    pub fn node(&self) -> &NodeFacts {
        &self.node
    }

    /// Sets a service with all its slices; `None` deletes it. Costs the work for this service, and for those that lose an address
    /// to it or gain one from it.
    pub fn set_service(
        &mut self,
        namespace: &str,
        name: &str,
        service: Option<&Service>,
        slices: &[Arc<EndpointSlice>],
    ) {
        let key: Arc<str> = format!("{namespace}/{name}").into();
        let facts = service.and_then(ServiceFacts::parse);
        let new = facts.map(|facts| {
            let mut problems = facts.problems.clone();
            let slices = Slices::parse(slices, &mut self.names, &mut problems);
            (facts, slices, problems)
        });
        let old = self.services.get(&key);
        if let (Some(old), Some((facts, slices, _))) = (old, &new)
            && old.facts == *facts
            && old.slices == *slices
        {
            return;
        }
        if old.is_none() && new.is_none() {
            return;
        }
        let before = self.claim(&key, old.map(|planned| &planned.facts));
        let after = self.claim(&key, new.as_ref().map(|(facts, ..)| facts));
        let others = self.claims.replace(&before, &after);
        self.keep_committed(&key);
        match new {
            Some((facts, slices, problems)) => {
                let ports = self.services.remove(&key).map(|planned| planned.ports);
                let planned = Planned {
                    facts,
                    slices,
                    problems: Problems::default(),
                    skipped: problems,
                    ports: ports.unwrap_or_default(),
                };
                self.services.insert(key.clone(), planned);
                self.plan(&key);
            }
            None => {
                self.services.remove(&key);
            }
        }
        for other in others {
            self.plan(&other);
        }
    }

    fn claim(&self, key: &Arc<str>, facts: Option<&ServiceFacts>) -> Claim {
        let Some(facts) = facts else {
            return Claim::default();
        };
        let mut claimed = vec![];
        for family in &self.settings.families {
            for port in &facts.ports {
                let of_port = destinations(&self.settings, facts, port, *family);
                claimed.extend(of_port.into_iter().map(|d| (*family, d)));
            }
        }
        Claim {
            rank: Some((facts.created, key.clone())),
            destinations: claimed,
        }
    }

    /// Keeps the plans of a service that the kernel has, before they change.
    fn keep_committed(&mut self, key: &Arc<str>) {
        if !self.committed.contains_key(key) {
            let ports = self.services.get(key).map(|planned| planned.ports.clone());
            self.committed
                .insert(key.clone(), ports.unwrap_or_default());
        }
    }

    /// Plans a service again.
    fn plan(&mut self, key: &Arc<str>) {
        self.keep_committed(key);
        let Some(planned) = self.services.get(key) else {
            return;
        };
        let committed = self.committed.get(key);
        // Different names can have the same label, but each number is that of one port.
        let known = |family: Family, label: &str, used: &BTreeSet<u32>| {
            let all = planned.ports.iter().chain(committed.into_iter().flatten());
            let mut same = all.filter(|p| p.family == family && p.label == label);
            same.find(|p| !used.contains(&p.number)).map(|p| p.number)
        };
        let (mut ports, mut problems) = (vec![], planned.skipped.clone());
        let (mut last_number, mut used) = (self.last_number, BTreeSet::new());
        let mut targets = 0_usize;
        for family in &self.settings.families {
            let has = |d: Destination| self.claims.has(key, *family, d);
            let input = Input {
                settings: &self.settings,
                node: &self.node,
                service: &planned.facts,
                slices: &planned.slices,
                has: &has,
            };
            for port in &planned.facts.ports {
                let label = label(key, port);
                let next = last_number.saturating_add(1);
                let number = known(*family, &label, &used).unwrap_or(next);
                if let Some(plan) = PortPlan::new(&input, port, *family, number, label) {
                    let sum = targets.saturating_add(plan.targets());
                    if sum > MAX_TARGETS {
                        problems.add(too_large(port));
                        continue;
                    }
                    targets = sum;
                    if plan.affinity != planned.facts.affinity {
                        problems.add(no_affinity(port));
                    }
                    last_number = last_number.max(number);
                    used.insert(number);
                    ports.push(plan);
                }
                let claimed = destinations(&self.settings, &planned.facts, port, *family);
                for lost in claimed.into_iter().filter(|d| !has(*d)) {
                    problems.add(format!(
                        "{} is skipped: an older service has the same address and port",
                        shown(lost)
                    ));
                }
            }
        }
        self.last_number = last_number;
        ports.shrink_to_fit();
        if let Some(planned) = self.services.get_mut(key) {
            planned.ports = ports;
            planned.problems = problems;
        }
    }

    /// The invalid values of a service, with reasons; `None` if the service needs no rules or all values are valid.
    #[must_use]
    pub fn problems(&self, namespace: &str, name: &str) -> Option<&Problems> {
        let key = format!("{namespace}/{name}");
        let problems = &self.services.get(key.as_str())?.problems;
        (!problems.is_empty()).then_some(problems)
    }

    /// The services that load balancers check.
    #[must_use]
    pub fn health_checks(&self) -> Vec<HealthCheck> {
        let checks = self.services.iter().filter_map(|(key, planned)| {
            let (namespace, name) = key.split_once('/')?;
            Some(HealthCheck {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                port: planned.facts.health_check_node_port?,
                local_endpoints: planned.slices.local_ready(&self.node.name),
            })
        });
        checks.collect()
    }

    /// Passes the operations that lead from the plans at the last call to the current ones to `each`, with the family of their
    /// table, in no order. Returns the flows to delete afterwards. The caller executes the operations in one transaction, in the
    /// order of [`Operation::phase`]; if this fails, it replaces everything by [`Planner::for_each_part`].
    pub fn take_changes(&mut self, mut each: impl FnMut(Family, Operation)) -> Vec<StaleFlows> {
        let mut flows = BTreeMap::new();
        let mut released = vec![];
        let mut needed = vec![];
        for (key, old) in std::mem::take(&mut self.committed) {
            let new: &mut [PortPlan] = match self.services.get_mut(&key) {
                Some(planned) => &mut planned.ports,
                None => &mut [],
            };
            let old: BTreeMap<u32, &PortPlan> = old.iter().map(|p| (p.number, p)).collect();
            for plan in new.iter_mut() {
                if let Some(old) = old.get(&plan.number) {
                    plan.cluster = assign(&old.cluster, std::mem::take(&mut plan.cluster));
                    plan.local = assign(&old.local, std::mem::take(&mut plan.local));
                }
            }
            let new: BTreeMap<u32, &PortPlan> = new.iter().map(|p| (p.number, p)).collect();
            let numbers: BTreeSet<u32> = old.keys().chain(new.keys()).copied().collect();
            for number in numbers {
                let (old, new) = (old.get(&number).copied(), new.get(&number).copied());
                let Some(family) = new.or(old).map(|plan| plan.family) else {
                    continue;
                };
                diff(old, new, &mut |operation| each(family, operation));
                released.extend(
                    old.into_iter()
                        .flat_map(|plan| plan.addresses.iter().copied()),
                );
                needed.extend(
                    new.into_iter()
                        .flat_map(|plan| plan.addresses.iter().copied()),
                );
                find_stale_flows(old, new, &mut flows);
            }
        }
        self.count_addresses(&needed, &released, each);
        let stale = flows.into_iter();
        stale
            .map(|((family, destination), keep)| StaleFlows {
                family,
                destination,
                keep,
            })
            .collect()
    }

    /// Counts the ports that need each address. Only the first one adds the address, and the last one deletes it.
    fn count_addresses(
        &mut self,
        needed: &[(AddressSet, IpAddr)],
        released: &[(AddressSet, IpAddr)],
        mut each: impl FnMut(Family, Operation),
    ) {
        let touched: BTreeSet<_> = needed.iter().chain(released).copied().collect();
        let before: BTreeSet<_> = touched
            .iter()
            .filter(|key| self.addresses.contains_key(key))
            .copied()
            .collect();
        for key in needed {
            let count = self.addresses.entry(*key).or_default();
            *count = count.saturating_add(1);
        }
        for key in released {
            if let Some(count) = self.addresses.get_mut(key) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    self.addresses.remove(key);
                }
            }
        }
        for key in touched {
            let (set, address) = key;
            let operation = match (before.contains(&key), self.addresses.contains_key(&key)) {
                (false, true) => Operation::AddAddress(set, address),
                (true, false) => Operation::DeleteAddress(set, address),
                _ => continue,
            };
            each(Family::of(address), operation);
        }
    }

    /// Passes the operations that fill the empty table of a family to `each`, in parts that do not depend on each other: those of
    /// each port, and those of the shared addresses. The operations are as of the last [`Planner::take_changes`]; callers take the
    /// changes first.
    pub fn for_each_part(&self, family: Family, mut each: impl FnMut(Vec<Operation>)) {
        let all = self.services.values().flat_map(|planned| &planned.ports);
        for plan in all.filter(|plan| plan.family == family) {
            let mut operations = vec![];
            diff(None, Some(plan), &mut |operation| {
                operations.push(operation)
            });
            each(operations);
        }
        let shared = self.addresses.keys();
        let shared = shared.filter(|(_, address)| Family::of(*address) == family);
        each(
            shared
                .map(|(set, address)| Operation::AddAddress(*set, *address))
                .collect(),
        );
    }
}

fn too_large(port: &PortFacts) -> String {
    let number = port.port;
    format!(
        "port {number} is skipped: the ports of a service can have {MAX_TARGETS} endpoints together"
    )
}

fn no_affinity(port: &PortFacts) -> String {
    let number = port.port;
    format!(
        "port {number} has no session affinity: only ports with at most {MAX_AFFINITY} endpoints have one"
    )
}

/// A destination for people.
fn shown(destination: Destination) -> String {
    use super::rules::Address;
    let Destination {
        address,
        protocol,
        port,
    } = destination;
    match address {
        Address::Ip(ip) => format!("{}/{}", Target { address: ip, port }, protocol.name()),
        Address::Node => format!("node port {port}/{}", protocol.name()),
    }
}

type Flows = BTreeMap<(Family, Destination), Vec<Target>>;

/// Notes the destinations of a port whose flows may have a removed target, or no target although the port has one now
/// (`CleanStaleEntries` in `pkg/proxy/conntrack/cleanup.go`).
fn find_stale_flows(old: Option<&PortPlan>, new: Option<&PortPlan>, flows: &mut Flows) {
    let is_udp = new.or(old).is_some_and(|p| p.protocol == Protocol::Udp);
    if !is_udp {
        return;
    }
    let keys = |plan: Option<&PortPlan>| -> BTreeSet<(Family, Destination)> {
        let entries = plan.into_iter().flat_map(|plan| &plan.entries);
        entries
            .map(|(_, destination, _)| (new.or(old).map_or(Family::V4, |p| p.family), *destination))
            .collect()
    };
    let serving = |plan: Option<&PortPlan>| plan.map_or(vec![], |plan| plan.serving.clone());
    let (before, after) = (keys(old), keys(new));
    let (served, serving) = (serving(old), serving(new));
    let is_gone = |target: &Target| serving.binary_search(target).is_err();
    let is_first = served.is_empty() && !serving.is_empty();
    let is_stale = is_first || served.iter().any(is_gone);
    for key in &after {
        if is_stale || !before.contains(key) {
            flows.insert(*key, serving.clone());
        }
    }
    for key in before.difference(&after) {
        // Another service may have the destination now.
        flows.entry(*key).or_default();
    }
}
