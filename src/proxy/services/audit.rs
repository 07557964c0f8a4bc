//! Compares the kernel's table with the planned one.
//!
//! Rules are compared by their comments, which name all that a rule does: nftables changes a rule only as a whole. Sets, elements
//! and chains are compared completely. The clients of targets are not, because packets add them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use holdfast_core::network::Family;
use holdfast_core::services::{Operation, Target};
use holdfast_net::nft::element::{Element, single};
use holdfast_net::nft::value::{Data, Value};

use super::DataPlane;
use super::batch::{SharedSet, comments, element};
use super::layout::{BASE_CHAINS, Layout};

/// The maximum number of differences that are described.
const MAX_DIFFERENCES: usize = 20;
/// The maximum number of networks of a set that are read.
const MAX_NETWORKS: usize = 10_000;
/// The maximum number of attempts to read objects that change.
const ATTEMPTS: usize = 10;

/// What a table should have.
#[derive(Default)]
struct Planned {
    /// The comments of the rules of each chain.
    chains: BTreeMap<String, Vec<String>>,
    affinities: BTreeSet<String>,
    /// The elements of the shared sets, without targets.
    elements: BTreeMap<SharedSet, BTreeMap<Vec<Value>, Data>>,
    /// The targets, by pool and place: there are many, so they are kept without the types of elements.
    targets: BTreeMap<(u32, u32), Target>,
}

fn planned(plane: &DataPlane, family: Family) -> Planned {
    let mut planned = Planned::default();
    let base = BASE_CHAINS.iter().map(|(name, ..)| *name);
    for name in base.chain(Layout::CHAINS) {
        planned.chains.insert(name.to_owned(), vec![]);
    }
    for (chain, _, comment) in plane.layout.shared_rules(family) {
        let rules = planned.chains.entry(chain.to_owned()).or_default();
        rules.push(comment.to_owned());
    }
    for (_, of_family, name) in &plane.stale_chains {
        if *of_family == family {
            planned.chains.insert(name.clone(), vec![]);
        }
    }
    plane.planner.for_each_part(family, |part| {
        part.into_iter()
            .for_each(|operation| planned.add(operation));
    });
    planned
}

impl Planned {
    fn add(&mut self, operation: Operation) {
        if let Operation::AddTarget {
            pool,
            place,
            target,
        } = operation
        {
            self.targets.insert((pool, place), target);
            return;
        }
        if let Some((set, Element { key, data, .. })) = element(&operation) {
            self.elements.entry(set).or_default().insert(key, data);
            return;
        }
        match operation {
            Operation::ReplaceRules { chain, rules, .. } => {
                self.chains.insert(chain, comments(&rules));
            }
            Operation::CreateAffinity(name) => {
                self.affinities.insert(name);
            }
            _ => {}
        }
    }
}

/// The differences that have been found, at most [`MAX_DIFFERENCES`].
struct Differences<'a>(&'a mut Vec<String>);

impl Differences<'_> {
    fn add(&mut self, text: String) {
        if self.0.len() < MAX_DIFFERENCES {
            self.0.push(text);
        }
    }
}

/// Repeats `read` until the objects have not changed in between.
fn settled<T>(mut read: impl FnMut() -> io::Result<Option<T>>) -> io::Result<T> {
    for _ in 0..ATTEMPTS {
        if let Some(found) = read()? {
            return Ok(found);
        }
    }
    Err(io::Error::new(
        io::ErrorKind::ResourceBusy,
        format!("the services' table changed during each of {ATTEMPTS} readings"),
    ))
}

/// Compares the table of a family, and describes the differences.
///
/// # Errors
///
/// The table cannot be read.
pub(super) fn compare(
    plane: &mut DataPlane,
    family: Family,
    differences: &mut Vec<String>,
) -> io::Result<()> {
    let mut differences = Differences(differences);
    let table = plane.layout.table(family);
    if !plane.nft.has_table(table)? {
        differences.add(format!("the table {:?} was deleted", table.name));
        return Ok(());
    }
    let planned = planned(plane, family);
    compare_chains(plane, family, &planned, &mut differences)?;
    compare_sets(plane, family, &planned, &mut differences)?;
    if !differences.0.is_empty() {
        // Elements of a table that is replaced anyway need no comparison.
        return Ok(());
    }
    for (set, elements) in plane.layout.network_sets(family, plane.planner.node()) {
        let mut found = plane.nft.elements(table, &set, MAX_NETWORKS)?;
        let mut wanted: Vec<Element> = elements.into_iter().map(single).collect();
        found.sort_by(|one, other| one.key.cmp(&other.key));
        wanted.sort_by(|one, other| one.key.cmp(&other.key));
        if found != wanted {
            differences.add(format!("the set {:?} has other networks", set.name));
        }
    }
    compare_elements(plane, family, &planned, &mut differences)
}

fn compare_chains(
    plane: &mut DataPlane,
    family: Family,
    planned: &Planned,
    differences: &mut Differences<'_>,
) -> io::Result<()> {
    let table = plane.layout.table(family);
    let nft = &mut plane.nft;
    let chains = nft.chains(table)?;
    let hooks: BTreeMap<&str, (u32, i32)> = BASE_CHAINS
        .iter()
        .map(|(name, _, hook, priority)| (*name, (*hook, *priority)))
        .collect();
    for chain in &chains {
        let name = chain.name.as_str();
        if !planned.chains.contains_key(name) {
            differences.add(format!("the chain {name:?} is not planned"));
        }
        if chain.hook != hooks.get(name).copied() {
            differences.add(format!("the chain {name:?} has another hook"));
        }
    }
    let found: BTreeSet<&str> = chains.iter().map(|chain| chain.name.as_str()).collect();
    for name in planned.chains.keys() {
        if !found.contains(name.as_str()) {
            differences.add(format!("the chain {name:?} was deleted"));
        }
    }
    let rules = settled(|| {
        let mut rules: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let is_whole = nft.scan_rules(table, |rule| {
            rules.entry(rule.chain).or_default().push(rule.mark);
        })?;
        Ok(is_whole.then_some(rules))
    })?;
    for (name, wanted) in &planned.chains {
        if rules.get(name).map_or(&[][..], Vec::as_slice) != wanted.as_slice() {
            differences.add(format!("the chain {name:?} has other rules"));
        }
    }
    Ok(())
}

fn compare_sets(
    plane: &mut DataPlane,
    family: Family,
    planned: &Planned,
    differences: &mut Differences<'_>,
) -> io::Result<()> {
    let table = plane.layout.table(family);
    let networks = plane.layout.network_sets(family, plane.planner.node());
    let networks = networks.into_iter().map(|(set, _)| set);
    let shared = SharedSet::all().into_iter().map(|set| set.set(family));
    let affinities = planned
        .affinities
        .iter()
        .map(|name| Layout::affinity(family, name));
    let wanted: BTreeMap<String, _> = networks
        .chain(shared)
        .chain(affinities)
        .map(|set| (set.name.clone(), set))
        .collect();
    // A set of another type cannot be read, and is foreign.
    let found = match plane.nft.sets(table) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            differences.add(format!("a set is not planned: {error}"));
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    let found: BTreeMap<String, _> = found.into_iter().map(|s| (s.name.clone(), s)).collect();
    for (name, set) in &wanted {
        match found.get(name) {
            Some(found) if found == set => {}
            Some(_) => differences.add(format!("the set {name:?} has other types or flags")),
            None => differences.add(format!("the set {name:?} was deleted")),
        }
    }
    for name in found.keys().filter(|name| !wanted.contains_key(*name)) {
        differences.add(format!("the set {name:?} is not planned"));
    }
    Ok(())
}

/// A target of an element.
fn target(element: &Element) -> Option<((u32, u32), Target)> {
    let ([Value::Mark(pool), Value::Mark(place)], Data::Values(data)) =
        (element.key.as_slice(), &element.data)
    else {
        return None;
    };
    let [Value::Address(address), Value::Port(port)] = data.as_slice() else {
        return None;
    };
    let target = Target {
        address: *address,
        port: *port,
    };
    Some(((*pool, *place), target))
}

/// Compares the elements of the shared sets. While the kernel resizes a set, a listing has some elements twice; such a listing is
/// repeated.
fn compare_elements(
    plane: &mut DataPlane,
    family: Family,
    planned: &Planned,
    differences: &mut Differences<'_>,
) -> io::Result<()> {
    let table = plane.layout.table(family);
    let nft = &mut plane.nft;
    let none = BTreeMap::new();
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for (pool, _) in planned.targets.keys() {
        let count = counts.entry(Layout::shard(*pool)).or_default();
        *count = count.saturating_add(1);
    }
    for set in SharedSet::all() {
        let wanted = planned.elements.get(&set).unwrap_or(&none);
        let count = match set {
            SharedSet::Targets(shard) => counts.get(&shard).copied().unwrap_or(0),
            _ => wanted.len(),
        };
        let described = set.set(family);
        let (found, others) = settled(|| {
            let (mut seen, mut others) = (0_usize, 0_usize);
            let mut has_duplicates = false;
            let is_whole = nft.scan_elements(table, &described, |element| {
                seen = seen.saturating_add(1);
                let is_wanted = match set {
                    SharedSet::Targets(_) => target(&element)
                        .is_some_and(|(at, target)| planned.targets.get(&at) == Some(&target)),
                    _ => wanted.get(&element.key) == Some(&element.data),
                };
                if is_wanted {
                    has_duplicates |= seen > count;
                } else {
                    others = others.saturating_add(1);
                }
            })?;
            // More elements than are wanted, all of them wanted: some occur twice.
            has_duplicates &= others == 0;
            Ok((is_whole && !has_duplicates).then_some((seen, others)))
        })?;
        if others > 0 || found != count {
            differences.add(format!(
                "the set {:?} has {found} elements, {others} of them other ones; {count} are planned",
                described.name
            ));
        }
    }
    Ok(())
}
