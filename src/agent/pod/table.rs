//! The table of the pods that this node knows: those of all sources, and those whose worker still runs. The dispatcher
//! writes the table; every other task reads the latest version.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

use holdfast_core::pod;

/// A pod of this node, and the API object with its status.
#[derive(Debug, Clone)]
pub(crate) struct Known {
    /// The pod as read from its source.
    pub pod: Arc<Pod>,
    /// The pod itself, or a static pod's mirror.
    pub object: Option<Arc<Pod>>,
    /// When this agent first observed the pod.
    pub seen: Timestamp,
}

impl Known {
    /// The object with the authoritative status.
    pub(crate) fn status_object(&self) -> &Pod {
        self.object.as_ref().unwrap_or(&self.pod)
    }

    /// Whether both are the same version of the same pod.
    fn is_same(&self, other: &Known) -> bool {
        let objects = (&self.object, &other.object);
        Arc::ptr_eq(&self.pod, &other.pod)
            && match objects {
                (Some(own), Some(other)) => Arc::ptr_eq(own, other),
                (own, other) => own.is_none() && other.is_none(),
            }
    }
}

/// The pods of one full name.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    /// The pods of the sources.
    pub pods: Vec<Known>,
    /// The uids of these pods, and of pods that have a worker.
    pub uids: BTreeSet<String>,
    /// The uids of pods that have a worker but are in no source any more.
    pub leaving: BTreeSet<String>,
    /// The mirror pod, if its static pod and the worker of this pod no longer exist.
    pub orphaned_mirror: Option<Arc<Pod>>,
}

/// All pods that the dispatcher knows. The maps are by full name.
#[derive(Debug, Default)]
pub(crate) struct PodTable {
    /// Whether all sources have been read at least once.
    pub complete: bool,
    /// Mirror pods whose static pod and its worker no longer exist.
    pub orphaned_mirrors: BTreeMap<String, Arc<Pod>>,
    pods: BTreeMap<String, Vec<Known>>,
    uids: BTreeMap<String, BTreeSet<String>>,
    /// How many names use a uid: several if manifests specify the same uid.
    names: BTreeMap<String, usize>,
    leaving: BTreeMap<String, BTreeSet<String>>,
}

impl PodTable {
    /// All pods of the sources, in the order of their names.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Known> {
        self.pods.values().flatten()
    }

    /// Whether the pod has a worker or is in a source.
    pub(crate) fn has(&self, uid: &str) -> bool {
        self.names.contains_key(uid)
    }

    /// Whether this node still has anything of pods that are in no source any more.
    pub(crate) fn has_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Replaces the pods of a full name. Returns whether they changed.
    pub(crate) fn set(&mut self, name: &str, entry: Entry) -> bool {
        let mut changed = self.set_pods(name, entry.pods);
        changed |= self.set_uids(name, entry.uids);
        changed |= replace(&mut self.leaving, name, some(entry.leaving));
        changed | replace(&mut self.orphaned_mirrors, name, entry.orphaned_mirror)
    }

    /// A known pod keeps the time of its first observation.
    fn set_pods(&mut self, name: &str, mut pods: Vec<Known>) -> bool {
        let before = self.pods.get(name).map_or(&[][..], Vec::as_slice);
        for known in &mut pods {
            let uid = pod::uid(&known.pod);
            let before = before.iter().filter(|b| pod::uid(&b.pod) == uid);
            known.seen = before.map(|b| b.seen).fold(known.seen, Timestamp::min);
        }
        if before.len() == pods.len() && before.iter().zip(&pods).all(|(b, now)| b.is_same(now)) {
            return false;
        }
        match pods.is_empty() {
            true => _ = self.pods.remove(name),
            false => _ = self.pods.insert(name.to_owned(), pods),
        }
        true
    }

    fn set_uids(&mut self, name: &str, uids: BTreeSet<String>) -> bool {
        for uid in &uids {
            *self.names.entry(uid.clone()).or_default() += 1;
        }
        for uid in self.uids.get(name).into_iter().flatten() {
            match self.names.get_mut(uid) {
                Some(names) if *names > 1 => *names -= 1,
                _ => _ = self.names.remove(uid),
            }
        }
        replace(&mut self.uids, name, some(uids))
    }
}

/// The set, unless it is empty.
fn some(uids: BTreeSet<String>) -> Option<BTreeSet<String>> {
    Some(uids).filter(|uids| !uids.is_empty())
}

/// Sets or removes the value of a name. Returns whether it changed.
fn replace<T: PartialEq>(map: &mut BTreeMap<String, T>, name: &str, value: Option<T>) -> bool {
    if map.get(name) == value.as_ref() {
        return false;
    }
    match value {
        Some(value) => _ = map.insert(name.to_owned(), value),
        None => _ = map.remove(name),
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uids(uid: &str) -> BTreeSet<String> {
        BTreeSet::from([uid.to_owned()])
    }

    fn entry(of: BTreeSet<String>, mirror: Option<&Arc<Pod>>) -> Entry {
        Entry {
            uids: of,
            orphaned_mirror: mirror.cloned(),
            ..Entry::default()
        }
    }

    #[test]
    fn an_event_without_a_change_notifies_nothing() {
        let mut table = PodTable::default();
        let (mirror, mut other) = (Arc::new(Pod::default()), Pod::default());
        assert!(!table.set("p", Entry::default()), "still without a pod");
        assert!(table.set("p", entry(uids("1"), Some(&mirror))));
        assert!(!table.set("p", entry(uids("1"), Some(&Arc::new(Pod::default())))));
        other.metadata.resource_version = Some("2".into());
        assert!(table.set("p", entry(uids("1"), Some(&Arc::new(other)))));
        assert!(table.set("p", entry(uids("2"), None)));
        assert!(table.has("2") && table.orphaned_mirrors.is_empty());
        assert!(table.set("q", entry(uids("2"), None)));
        assert!(table.set("p", Entry::default()));
        assert!(table.has("2"), "another name still has this uid");
        assert!(table.set("q", Entry::default()));
        assert!(!table.has("2") && table.names.is_empty());
    }

    #[test]
    fn a_leaving_pod_is_in_no_source_and_has_a_worker() {
        let mut table = PodTable::default();
        let leaving = || Entry {
            uids: uids("1"),
            leaving: uids("1"),
            ..Entry::default()
        };
        assert!(table.set("p", leaving()) && table.has_leaving());
        assert!(!table.set("p", leaving()));
        assert!(table.set("p", Entry::default()) && !table.has_leaving());
    }

    #[test]
    fn a_new_version_of_a_pod_is_a_change_and_keeps_the_first_seen_time() {
        let pod = |uid: &str| {
            let mut pod = Pod::default();
            pod.metadata.uid = Some(uid.into());
            Arc::new(pod)
        };
        let known = |pod: &Arc<Pod>, second| Entry {
            pods: vec![Known {
                pod: Arc::clone(pod),
                object: None,
                seen: Timestamp::from_second(second).expect("a time"),
            }],
            ..Entry::default()
        };
        let mut table = PodTable::default();
        let seen = |table: &PodTable| table.iter().map(|k| k.seen.as_second()).collect::<Vec<_>>();
        let first = pod("u");
        assert!(table.set("p", known(&first, 10)) && seen(&table) == [10]);
        assert!(!table.set("p", known(&first, 20)));
        assert!(table.set("p", known(&pod("u"), 20)) && seen(&table) == [10]);
        assert!(table.set("p", known(&pod("v"), 30)) && seen(&table) == [30]);
        assert!(table.set("p", known(&pod("u"), 40)) && seen(&table) == [40]);
        assert!(table.set("p", Entry::default()) && seen(&table).is_empty());
    }
}
