//! Which service gets an address and port that several services want: the oldest one, and of equally old ones the first in the
//! order of names. The result does not depend on the order in which services arrive.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::rules::Destination;
use crate::network::Family;

/// A service that claims destinations: when it was created, and its name with its namespace.
pub(super) type Rank = (i64, Arc<str>);

/// The claims of all services. The first rank of a destination has it.
#[derive(Debug, Default)]
pub(super) struct Claims(BTreeMap<(Family, Destination), Vec<Rank>>);

/// The claims of one service.
#[derive(Debug, Default)]
pub(super) struct Claim {
    pub rank: Option<Rank>,
    pub destinations: Vec<(Family, Destination)>,
}

impl Claims {
    /// Whether the service has the destination.
    pub(super) fn has(&self, service: &str, family: Family, destination: Destination) -> bool {
        let ranks = self.0.get(&(family, destination));
        ranks.is_some_and(|ranks| {
            ranks
                .first()
                .is_some_and(|(_, name)| name.as_ref() == service)
        })
    }

    /// Replaces the claims of one service. Returns the other services that have gained or lost a destination.
    pub(super) fn replace(&mut self, old: &Claim, new: &Claim) -> Vec<Arc<str>> {
        let mut changed = vec![];
        let mut note = |before: Option<Rank>, after: Option<&Rank>| {
            if before.as_ref() != after {
                changed.extend(before.map(|(_, name)| name));
                changed.extend(after.map(|(_, name)| name.clone()));
            }
        };
        if let Some(rank) = &old.rank {
            for key in &old.destinations {
                let Some(ranks) = self.0.get_mut(key) else {
                    continue;
                };
                let before = ranks.first().cloned();
                ranks.retain(|other| other != rank);
                note(before, ranks.first());
                if ranks.is_empty() {
                    self.0.remove(key);
                }
            }
        }
        if let Some(rank) = &new.rank {
            for key in &new.destinations {
                let ranks = self.0.entry(*key).or_default();
                let before = ranks.first().cloned();
                if let Err(at) = ranks.binary_search(rank) {
                    ranks.insert(at, rank.clone());
                }
                note(before, ranks.first());
            }
        }
        let own = [&old.rank, &new.rank];
        let is_own = |name: &Arc<str>| own.iter().any(|r| r.as_ref().is_some_and(|r| r.1 == *name));
        changed.retain(|name| !is_own(name));
        changed.sort();
        changed.dedup();
        changed
    }
}
