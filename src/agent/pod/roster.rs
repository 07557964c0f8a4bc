//! The pods that this node knows, for the tasks that clean up after pods.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

/// The pods that the dispatcher knows, for tasks that clean up after pods; by full name.
#[derive(Debug, Default)]
pub struct Roster {
    /// Whether all sources have been read at least once.
    pub complete: bool,
    /// Mirror pods whose static pod and its worker no longer exist.
    pub orphaned_mirrors: BTreeMap<String, Arc<Pod>>,
    uids: BTreeMap<String, BTreeSet<String>>,
    /// How many names use a uid: several if manifests specify the same uid.
    names: BTreeMap<String, usize>,
    /// Pods that have a worker but are in no source any more.
    leaving: BTreeMap<String, BTreeSet<String>>,
}

impl Roster {
    /// Whether this node still has anything of pods that are in no source any more.
    #[must_use]
    pub fn has_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Sets the leaving pods of a name. Returns whether they changed.
    pub(super) fn set_leaving(&mut self, name: &str, uids: BTreeSet<String>) -> bool {
        let before = match uids.is_empty() {
            true => self.leaving.remove(name),
            false => self.leaving.insert(name.to_owned(), uids),
        };
        before.as_ref() != self.leaving.get(name)
    }

    /// Whether the pod has a worker or is in a source.
    #[must_use]
    pub fn has(&self, uid: &str) -> bool {
        self.names.contains_key(uid)
    }

    /// Replaces the uids of a name.
    pub(super) fn set_uids(&mut self, name: &str, uids: BTreeSet<String>) {
        for uid in &uids {
            *self.names.entry(uid.clone()).or_default() += 1;
        }
        let before = match uids.is_empty() {
            true => self.uids.remove(name),
            false => self.uids.insert(name.to_owned(), uids),
        };
        for uid in before.into_iter().flatten() {
            match self.names.get_mut(&uid) {
                Some(names) if *names > 1 => *names -= 1,
                _ => _ = self.names.remove(&uid),
            }
        }
    }

    /// Sets the uids and the orphaned mirror of a name. Returns whether they changed.
    pub(super) fn set(
        &mut self,
        name: &str,
        uids: BTreeSet<String>,
        orphan: Option<&Arc<Pod>>,
    ) -> bool {
        let same = match self.uids.get(name) {
            Some(known) => *known == uids,
            None => uids.is_empty(),
        };
        if same && self.orphaned_mirrors.get(name) == orphan {
            return false;
        }
        self.set_uids(name, uids);
        match orphan {
            Some(mirror) => self
                .orphaned_mirrors
                .insert(name.to_owned(), Arc::clone(mirror)),
            None => self.orphaned_mirrors.remove(name),
        };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_without_a_change_notifies_nothing() {
        let mut roster = Roster::default();
        let uids = |uid: &str| BTreeSet::from([uid.to_owned()]);
        let (mirror, mut other) = (Arc::new(Pod::default()), Pod::default());
        assert!(
            !roster.set("p", BTreeSet::new(), None),
            "still without a pod"
        );
        assert!(roster.set("p", uids("1"), Some(&mirror)));
        assert!(!roster.set("p", uids("1"), Some(&Arc::new(Pod::default()))));
        other.metadata.resource_version = Some("2".into());
        assert!(roster.set("p", uids("1"), Some(&Arc::new(other))));
        assert!(roster.set("p", uids("2"), None));
        assert!(roster.has("2") && roster.orphaned_mirrors.is_empty());
        assert!(roster.set("q", uids("2"), None));
        assert!(roster.set("p", BTreeSet::new(), None));
        assert!(roster.has("2"), "another name still has this uid");
        assert!(roster.set("q", BTreeSet::new(), None));
        assert!(!roster.has("2") && roster.names.is_empty());
    }
}
