//! The operations that lead from one plan of a port to another one.

use super::plan::{Objects, PortPlan};
use super::rules::{Operation, Target};

/// Gives wanted targets their places in a pool. Targets keep their places where possible, so that few elements change; the last
/// ones fill the places of removed ones. `wanted` is sorted and has no duplicates.
pub(super) fn assign(current: &[Target], wanted: Vec<Target>) -> Vec<Target> {
    let is_kept = |target: &Target| wanted.binary_search(target).is_ok();
    let kept = current.iter().take(wanted.len());
    let mut places: Vec<Option<Target>> = kept.map(|t| Some(*t).filter(is_kept)).collect();
    places.resize(wanted.len(), None);
    let mut placed: Vec<Target> = places.iter().flatten().copied().collect();
    placed.sort_unstable();
    let mut others = wanted
        .iter()
        .filter(|target| placed.binary_search(target).is_err());
    let filled = places
        .iter()
        .filter_map(|place| place.or_else(|| others.next().copied()));
    filled.collect()
}

/// The targets of a pool, each with its place, and whether they are chains.
fn pool(plan: Option<&PortPlan>, is_local: bool) -> (&[Target], bool) {
    let Some(plan) = plan else {
        return (&[], false);
    };
    let targets = if is_local { &plan.local } else { &plan.cluster };
    (targets, plan.affinity.is_some())
}

fn diff_pool(
    (old, new): (Option<&PortPlan>, Option<&PortPlan>),
    is_local: bool,
    each: &mut impl FnMut(Operation),
) {
    let Some(plan) = new.or(old) else {
        return;
    };
    let number = plan.pool(is_local);
    let ((before, were_chains), (after, are_chains)) = (pool(old, is_local), pool(new, is_local));
    for at in 0..before.len().max(after.len()) {
        let (one, other) = (before.get(at), after.get(at));
        if one == other && were_chains == are_chains {
            continue;
        }
        let place = u32::try_from(at).unwrap_or(u32::MAX);
        match one {
            Some(_) if were_chains => each(Operation::DeleteChoice {
                pool: number,
                place,
            }),
            Some(_) => each(Operation::DeleteTarget {
                pool: number,
                place,
            }),
            None => {}
        }
        match other {
            Some(target) if are_chains => each(Operation::AddChoice {
                pool: number,
                place,
                chain: plan.of_target("endpoint", *target),
            }),
            Some(target) => each(Operation::AddTarget {
                pool: number,
                place,
                target: *target,
            }),
            None => {}
        }
    }
}

/// Passes the operations from one plan to another one of the same number to `each`; addresses are not compared.
pub(super) fn diff(
    old: Option<&PortPlan>,
    new: Option<&PortPlan>,
    each: &mut impl FnMut(Operation),
) {
    let before = old.map_or_else(Objects::default, PortPlan::objects);
    let mut after = new.map_or_else(Objects::default, PortPlan::objects);
    for name in before.affinities.difference(&after.affinities) {
        each(Operation::DeleteAffinity(name.clone()));
    }
    for name in after.affinities.difference(&before.affinities) {
        each(Operation::CreateAffinity(name.clone()));
    }
    for name in before.chains.keys() {
        if !after.chains.contains_key(name) {
            each(Operation::DeleteChain(name.clone()));
        }
    }
    for (key, verdict) in &before.entries {
        if after.entries.get(key) == Some(verdict) {
            after.entries.remove(key);
        } else {
            each(Operation::DeleteEntry(key.0, key.1));
        }
    }
    for is_local in [false, true] {
        diff_pool((old, new), is_local, each);
    }
    for (chain, rules) in after.chains {
        let known = before.chains.get(&chain);
        if known == Some(&rules) {
            continue;
        }
        let is_new = known.is_none();
        if is_new {
            each(Operation::CreateChain(chain.clone()));
        }
        each(Operation::ReplaceRules {
            chain,
            rules,
            is_new,
        });
    }
    for ((map, destination), verdict) in after.entries {
        each(Operation::AddEntry(map, destination, verdict));
    }
}
