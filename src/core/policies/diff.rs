//! The operations between two rulesets.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::{Chain, Direction, Members, Rule, Ruleset};

/// A change of a packet filter. In the order of [`diff`], no operation refers to a set or chain that does not exist, and none deletes one
/// that is in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Creates a set with its members.
    CreateSet(String, Members),
    /// Adds and removes addresses of a set of pods.
    ChangeSet {
        /// The set.
        name: String,
        /// The set's members after the change.
        now: Members,
        /// The addresses to remove.
        removed: BTreeSet<IpAddr>,
        /// The addresses to add.
        added: BTreeSet<IpAddr>,
    },
    /// Creates a chain without rules.
    CreateChain(String),
    /// Replaces the rules of a chain.
    SetRules(String, Chain),
    /// Ends the restriction of a pod; its chain is given.
    Release(Direction, IpAddr, String),
    /// Restricts a pod by a chain.
    Restrict(Direction, IpAddr, String),
    /// Removes the rules of a chain.
    EmptyChain(String),
    /// Deletes a chain without rules.
    DeleteChain(String),
    /// Deletes a set.
    DeleteSet(String),
}

/// The operations that turn `current` into `desired`.
#[must_use]
pub fn diff(current: &Ruleset, desired: &Ruleset) -> Vec<Operation> {
    let mut operations = vec![];
    sets(current, desired, &mut operations);
    for name in desired.chains.keys() {
        if !current.chains.contains_key(name) {
            operations.push(Operation::CreateChain(name.clone()));
        }
    }
    for (name, chain) in &desired.chains {
        if current.chains.get(name) != Some(chain) {
            operations.push(Operation::SetRules(name.clone(), chain.clone()));
        }
    }
    for ((direction, address), chain) in &current.pods {
        if desired.pods.get(&(*direction, *address)) != Some(chain) {
            operations.push(Operation::Release(*direction, *address, chain.clone()));
        }
    }
    for ((direction, address), chain) in &desired.pods {
        if current.pods.get(&(*direction, *address)) != Some(chain) {
            operations.push(Operation::Restrict(*direction, *address, chain.clone()));
        }
    }
    let dead = || {
        current
            .chains
            .keys()
            .filter(|name| !desired.chains.contains_key(*name))
            .cloned()
    };
    // Chains refer to each other, so all are emptied before one is deleted.
    operations.extend(dead().map(Operation::EmptyChain));
    operations.extend(dead().map(Operation::DeleteChain));
    let dead = current
        .sets
        .keys()
        .filter(|name| !desired.sets.contains_key(*name));
    operations.extend(dead.cloned().map(Operation::DeleteSet));
    operations
}

fn sets(current: &Ruleset, desired: &Ruleset, operations: &mut Vec<Operation>) {
    for (name, members) in &desired.sets {
        match (current.sets.get(name), members) {
            (None, _) => operations.push(Operation::CreateSet(name.clone(), members.clone())),
            (Some(Members::Pods(_, old)), Members::Pods(_, new)) if old != new => {
                operations.push(Operation::ChangeSet {
                    name: name.clone(),
                    now: members.clone(),
                    removed: old.difference(new).copied().collect(),
                    added: new.difference(old).copied().collect(),
                });
            }
            // The names of all other sets are digests of their members.
            (Some(_), _) => {}
        }
    }
}

impl Rule {
    /// The set or chain that the rule refers to, and the set of ports.
    #[cfg(test)]
    pub(super) fn references(&self) -> Vec<&str> {
        match self {
            Rule::Allow { peers, ports } => {
                let peers = peers.as_ref().map(|(_, set)| set.as_str());
                peers.into_iter().chain(ports.as_deref()).collect()
            }
            Rule::Jump(chain) => vec![chain],
            Rule::Drop => vec![],
        }
    }
}
