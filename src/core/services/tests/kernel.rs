//! A model of the kernel's table: operations must be possible in the order of their phases, as nftables checks it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::*;

#[derive(Debug, Default, Clone, PartialEq)]
pub struct Kernel {
    pub chains: BTreeMap<String, Vec<Rule>>,
    pub affinities: BTreeSet<String>,
    pub entries: BTreeMap<(Map, Destination), Verdict>,
    pub targets: BTreeMap<(u32, u32), Target>,
    pub choices: BTreeMap<(u32, u32), String>,
    pub addresses: BTreeSet<(AddressSet, IpAddr)>,
}

/// The name of a chain without the number of its port.
fn unnumbered(chain: &str) -> String {
    let (kind, rest) = chain.split_once('-').unwrap();
    let (_, label) = rest.split_once('/').unwrap();
    format!("{kind}/{label}")
}

impl Kernel {
    pub fn apply(&mut self, mut operations: Vec<Operation>) {
        operations.sort_by_key(Operation::phase);
        for operation in operations {
            self.execute(operation);
        }
        self.check_references();
    }

    fn execute(&mut self, operation: Operation) {
        let shown = format!("{operation:?}");
        let is_possible = match operation {
            Operation::CreateChain(name) => self.chains.insert(name, vec![]).is_none(),
            Operation::DeleteChain(name) => self.chains.remove(&name).is_some(),
            Operation::ReplaceRules {
                chain,
                rules,
                is_new,
            } => {
                let old = self.chains.insert(chain, rules);
                old.is_some_and(|old| !is_new || old.is_empty())
            }
            Operation::CreateAffinity(name) => self.affinities.insert(name),
            Operation::DeleteAffinity(name) => self.affinities.remove(&name),
            Operation::AddEntry(map, to, verdict) => {
                self.entries.insert((map, to), verdict).is_none()
            }
            Operation::DeleteEntry(map, to) => self.entries.remove(&(map, to)).is_some(),
            Operation::AddTarget {
                pool,
                place,
                target,
            } => self.targets.insert((pool, place), target).is_none(),
            Operation::DeleteTarget { pool, place } => {
                self.targets.remove(&(pool, place)).is_some()
            }
            Operation::AddChoice { pool, place, chain } => {
                self.choices.insert((pool, place), chain).is_none()
            }
            Operation::DeleteChoice { pool, place } => {
                self.choices.remove(&(pool, place)).is_some()
            }
            Operation::AddAddress(set, address) => self.addresses.insert((set, address)),
            Operation::DeleteAddress(set, address) => self.addresses.remove(&(set, address)),
        };
        assert!(is_possible, "{shown}");
    }

    /// The number of elements of a pool, whose places must be complete.
    fn count<T>(elements: &BTreeMap<(u32, u32), T>, pool: u32) -> u32 {
        let places: Vec<u32> = elements
            .range((pool, 0)..=(pool, u32::MAX))
            .map(|((_, place), _)| *place)
            .collect();
        let count = u32::try_from(places.len()).unwrap();
        assert_eq!(places, (0..count).collect::<Vec<_>>(), "pool {pool}");
        count
    }

    fn check_references(&self) {
        let in_maps = self.entries.values().filter_map(|verdict| match verdict {
            Verdict::Goto(chain) => Some(chain),
            Verdict::Drop | Verdict::Reject => None,
        });
        let mut chains: Vec<&String> = in_maps.chain(self.choices.values()).collect();
        let mut used = BTreeSet::new();
        for rule in self.chains.values().flatten() {
            match rule {
                Rule::GotoFromCluster(chain) | Rule::GotoFromNode(chain) | Rule::Goto(chain) => {
                    chains.push(chain);
                }
                Rule::Known {
                    affinity, chain, ..
                } => {
                    chains.push(chain);
                    used.insert(affinity.clone());
                }
                Rule::Remember { affinity, .. } => {
                    used.insert(affinity.clone());
                }
                Rule::Translate { pool, count } => {
                    assert_eq!(Self::count(&self.targets, *pool), *count, "{rule:?}");
                }
                Rule::Choose { pool, count } => {
                    assert_eq!(Self::count(&self.choices, *pool), *count, "{rule:?}");
                }
                _ => {}
            }
            assert!(rule.to_string().len() <= 127, "{rule}");
        }
        for chain in chains {
            assert!(self.chains.contains_key(chain), "{chain} is missing");
            assert!(chain.len() < 255, "{chain} is too long");
        }
        assert_eq!(used, self.affinities);
        for rules in self.chains.values() {
            let comments: BTreeSet<String> = rules.iter().map(Rule::to_string).collect();
            assert_eq!(comments.len(), rules.len(), "{rules:?}");
        }
    }

    /// The targets of a pool, in their order.
    fn pool(&self, pool: u32) -> Vec<String> {
        let targets = self.targets.range((pool, 0)..=(pool, u32::MAX));
        let mut targets: Vec<String> = targets.map(|(_, target)| target.to_string()).collect();
        targets.sort();
        targets
    }

    fn rule(&self, rule: &Rule) -> String {
        match rule {
            Rule::Translate { pool, .. } => format!("translate {}", self.pool(*pool).join(" ")),
            Rule::Choose { pool, .. } => {
                let chains = self.choices.range((*pool, 0)..=(*pool, u32::MAX));
                let mut chains: Vec<String> = chains.map(|(_, c)| unnumbered(c)).collect();
                chains.sort();
                format!("choose {}", chains.join(" "))
            }
            Rule::GotoFromCluster(chain) => format!("cluster: goto {}", unnumbered(chain)),
            Rule::GotoFromNode(chain) => format!("node: goto {}", unnumbered(chain)),
            Rule::Goto(chain) => format!("goto {}", unnumbered(chain)),
            Rule::Known { chain, .. } => format!("known: goto {}", unnumbered(chain)),
            other => other.to_string(),
        }
    }

    /// The chains without numbers: the rules of each, and of rules whose order does not matter, in the order of their texts.
    pub(super) fn shown_chains(&self) -> BTreeMap<String, Vec<String>> {
        let chains = self.chains.iter().map(|(name, rules)| {
            let mut shown: Vec<String> = rules.iter().map(|rule| self.rule(rule)).collect();
            let known = rules.iter().filter(|r| matches!(r, Rule::Known { .. }));
            let known = known.count();
            shown[..known].sort();
            (unnumbered(name), shown)
        });
        chains.collect()
    }

    /// The entries without numbers, such as `Services 10.96.0.20 tcp 80: goto service/default/web/tcp/http`.
    pub(super) fn shown_entries(&self) -> Vec<String> {
        let entries = self.entries.iter().map(|((map, to), verdict)| {
            let verdict = match verdict {
                Verdict::Goto(chain) => format!("goto {}", unnumbered(chain)),
                Verdict::Drop => "drop".to_owned(),
                Verdict::Reject => "reject".to_owned(),
            };
            let address = match to.address {
                Address::Ip(ip) => ip.to_string(),
                Address::Node => "node".to_owned(),
            };
            let (protocol, port) = (to.protocol.name(), to.port);
            format!("{map:?} {address} {protocol} {port}: {verdict}")
        });
        entries.collect()
    }

    /// All that does not depend on numbers and places.
    pub fn shown(&self) -> (BTreeMap<String, Vec<String>>, Vec<String>, Vec<IpAddr>) {
        let addresses = self.addresses.iter().map(|(_, address)| *address);
        (
            self.shown_chains(),
            self.shown_entries(),
            addresses.collect(),
        )
    }
}
