//! The messages of a transaction, in the order in which the kernel accepts them.

use std::collections::BTreeMap;

use holdfast_core::network::{Family, Protocol};
use holdfast_core::services::{
    Address, AddressSet, Destination, Map, Operation, Rule, Target, Verdict as Planned,
};
use holdfast_net::netlink::Message;
use holdfast_net::nft::OwnerMark;
use holdfast_net::nft::element::Element;
use holdfast_net::nft::set::Set;
use holdfast_net::nft::value::{Data, Value};
use holdfast_net::nft::verdict::Verdict;

use super::layout::{Layout, REJECT, SHARDS, known};

/// Elements that are kept before they become a message, so that the memory of a transaction is little more than its messages.
const PENDING: usize = 500;

/// A set that services share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SharedSet {
    Map(Map),
    NodePorts(Map),
    /// A map of targets, with its number.
    Targets(u32),
    /// A map of chains of targets, with its number.
    Choices(u32),
    Addresses(AddressSet),
}

impl SharedSet {
    /// All shared sets.
    pub(super) fn all() -> Vec<SharedSet> {
        let mut all = vec![
            SharedSet::Map(Map::Services),
            SharedSet::Map(Map::NoEndpoints),
            SharedSet::Map(Map::Firewall),
            SharedSet::NodePorts(Map::Services),
            SharedSet::NodePorts(Map::NoEndpoints),
            SharedSet::Addresses(AddressSet::ClusterAddresses),
            SharedSet::Addresses(AddressSet::Hairpin),
        ];
        all.extend((0..SHARDS).map(SharedSet::Targets));
        all.extend((0..SHARDS).map(SharedSet::Choices));
        all
    }

    pub(super) fn set(self, family: Family) -> Set {
        match self {
            SharedSet::Map(map) => Layout::map(family, map),
            SharedSet::NodePorts(map) => Layout::node_port_map(map),
            SharedSet::Targets(shard) => Layout::targets(family, shard),
            SharedSet::Choices(shard) => Layout::choices(shard),
            SharedSet::Addresses(set) => Layout::addresses(family, set),
        }
    }
}

/// The set and key of a destination.
fn destination(map: Map, to: Destination) -> (SharedSet, Vec<Value>) {
    let rest = [
        Value::Protocol(Protocol::number(to.protocol)),
        Value::Port(to.port),
    ];
    match to.address {
        Address::Ip(ip) => {
            let mut key = vec![Value::Address(ip)];
            key.extend(rest);
            (SharedSet::Map(map), key)
        }
        Address::Node => (SharedSet::NodePorts(map), rest.to_vec()),
    }
}

fn verdict(planned: Planned) -> Data {
    Data::Verdict(match planned {
        Planned::Goto(chain) => Verdict::Goto(chain),
        Planned::Drop => Verdict::Drop,
        Planned::Reject => Verdict::goto(REJECT),
    })
}

fn place(pool: u32, place: u32) -> Vec<Value> {
    vec![Value::Mark(pool), Value::Mark(place)]
}

/// The element that an operation adds or deletes; `None` if the operation is about something else.
pub(super) fn element(operation: &Operation) -> Option<(SharedSet, Element)> {
    let (set, key, data) = match operation {
        Operation::AddEntry(map, to, planned) => {
            let (set, key) = destination(*map, *to);
            (set, key, verdict(planned.clone()))
        }
        Operation::DeleteEntry(map, to) => {
            let (set, key) = destination(*map, *to);
            (set, key, Data::None)
        }
        Operation::AddTarget {
            pool,
            place: at,
            target: Target { address, port },
        } => {
            let data = vec![Value::Address(*address), Value::Port(*port)];
            (
                SharedSet::Targets(Layout::shard(*pool)),
                place(*pool, *at),
                Data::Values(data),
            )
        }
        Operation::DeleteTarget { pool, place: at } => (
            SharedSet::Targets(Layout::shard(*pool)),
            place(*pool, *at),
            Data::None,
        ),
        Operation::AddChoice {
            pool,
            place: at,
            chain,
        } => {
            let data = Data::Verdict(Verdict::Goto(chain.clone()));
            (
                SharedSet::Choices(Layout::shard(*pool)),
                place(*pool, *at),
                data,
            )
        }
        Operation::DeleteChoice { pool, place: at } => (
            SharedSet::Choices(Layout::shard(*pool)),
            place(*pool, *at),
            Data::None,
        ),
        Operation::AddAddress(set, address) | Operation::DeleteAddress(set, address) => {
            let key = Layout::address_key(*set, *address);
            (SharedSet::Addresses(*set), key, Data::None)
        }
        Operation::CreateChain(_)
        | Operation::DeleteChain(_)
        | Operation::ReplaceRules { .. }
        | Operation::CreateAffinity(_)
        | Operation::DeleteAffinity(_) => return None,
    };
    Some((set, Element::new(key, data)))
}

/// A transaction under construction.
#[derive(Default)]
pub(super) struct Batch {
    /// The messages of each phase.
    phases: BTreeMap<u8, Vec<Message>>,
    /// Elements of each phase that are no message yet.
    pending: BTreeMap<(u8, Family, SharedSet), Vec<Element>>,
    operations: usize,
}

/// The phases in which elements are deleted and added.
const DELETIONS: u8 = 1;
const ADDITIONS: u8 = 3;

impl Batch {
    /// The number of operations.
    pub(super) fn operations(&self) -> usize {
        self.operations
    }

    /// Adds an operation on the table of a family.
    pub(super) fn add(&mut self, layout: &Layout, family: Family, operation: Operation) {
        self.operations = self.operations.saturating_add(1);
        let phase = operation.phase();
        if let Some((set, element)) = element(&operation) {
            let key = (phase, family, set);
            let pending = self.pending.entry(key).or_default();
            pending.push(element);
            if pending.len() >= PENDING {
                let full = std::mem::take(pending);
                self.encode(layout, key, &full);
            }
            return;
        }
        let table = layout.table(family);
        let messages = self.phases.entry(phase).or_default();
        match operation {
            Operation::CreateChain(name) => messages.push(table.chain(&name)),
            // The chain itself is deleted later.
            Operation::DeleteChain(name) => messages.push(table.flush(&name)),
            Operation::ReplaceRules {
                chain,
                rules,
                is_new,
            } => {
                if !is_new {
                    messages.push(table.flush(&chain));
                }
                for rule in &rules {
                    let expressions = layout.expressions(family, rule);
                    let comment = rule.to_string();
                    let mark = OwnerMark::Comment(&comment);
                    messages.push(table.append(&chain, &expressions, mark));
                }
            }
            Operation::CreateAffinity(name) => {
                messages.extend(known(table.create_set(&Layout::affinity(family, &name))));
            }
            Operation::DeleteAffinity(name) => messages.push(table.delete_set(&name)),
            _ => {}
        }
    }

    /// Adds clients to the set of a target, which the transaction creates.
    pub(super) fn add_clients(
        &mut self,
        layout: &Layout,
        family: Family,
        set: &str,
        clients: &[Element],
    ) {
        let set = Layout::affinity(family, set);
        let messages = known(layout.table(family).add_elements(&set, clients));
        let phase = self.phases.entry(ADDITIONS).or_default();
        phase.extend(messages.into_iter().flatten());
    }

    fn encode(
        &mut self,
        layout: &Layout,
        (phase, family, set): (u8, Family, SharedSet),
        elements: &[Element],
    ) {
        let table = layout.table(family);
        let set = set.set(family);
        let messages = match phase {
            DELETIONS => table.delete_elements(&set, elements),
            _ => table.add_elements(&set, elements),
        };
        let encoded = known(messages).into_iter().flatten();
        self.phases.entry(phase).or_default().extend(encoded);
    }

    /// All messages, in the order of their phases.
    pub(super) fn messages(mut self, layout: &Layout) -> Vec<Message> {
        for (key, elements) in std::mem::take(&mut self.pending) {
            self.encode(layout, key, &elements);
        }
        self.phases.into_values().flatten().collect()
    }
}

/// The comments of a chain's rules.
pub(super) fn comments(rules: &[Rule]) -> Vec<String> {
    rules.iter().map(Rule::to_string).collect()
}
