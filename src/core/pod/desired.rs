//! The desired pods of this node from all sources, by full name. A change of one object affects one name. Pure.
//!
//! The API has at most one object per name, but several static pods may claim a name. A static pod's mirror is not a
//! separate pod: it is the API object with the static pod's status.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::worker::Update;
use crate::pod;

/// The pods of all sources, by full name (`name_namespace`).
#[derive(Debug, Clone, Default)]
pub struct Desired {
    objects: BTreeMap<String, Arc<Pod>>,
    statics: BTreeMap<String, Vec<Arc<Pod>>>,
}

impl Desired {
    /// Sets the API object with this name, or removes it.
    pub fn set_object(&mut self, name: &str, object: Option<Arc<Pod>>) {
        match object {
            Some(object) => self.objects.insert(name.to_owned(), object),
            None => self.objects.remove(name),
        };
    }

    /// Replaces all API objects. Returns the names of the old and the new ones.
    pub fn replace_objects(&mut self, objects: Vec<Arc<Pod>>) -> BTreeSet<String> {
        let named = objects.into_iter().map(|o| (pod::full_name(&o), o));
        let before = std::mem::replace(&mut self.objects, named.collect());
        before
            .into_keys()
            .chain(self.objects.keys().cloned())
            .collect()
    }

    /// Replaces all static pods. Returns the names of the old and the new ones.
    pub fn replace_statics(&mut self, pods: Vec<Arc<Pod>>) -> BTreeSet<String> {
        let before = std::mem::take(&mut self.statics);
        for pod in pods {
            let name = pod::full_name(&pod);
            self.statics.entry(name).or_default().push(pod);
        }
        before
            .into_keys()
            .chain(self.statics.keys().cloned())
            .collect()
    }

    /// All names.
    #[must_use]
    pub fn names(&self) -> BTreeSet<String> {
        let names = self.objects.keys().chain(self.statics.keys());
        names.cloned().collect()
    }

    /// The pods with this name. The pod of the API comes first.
    #[must_use]
    pub fn of(&self, name: &str) -> Vec<Update> {
        let object = self.objects.get(name);
        let mirror = self.mirror(name);
        let own = object.filter(|o| !pod::is_mirror(o)).map(|pod| Update {
            pod: Arc::clone(pod),
            object: Some(Arc::clone(pod)),
            removed: false,
            starts_again: false,
        });
        let statics = self.statics.get(name).into_iter().flatten();
        let statics = statics.map(|pod| Update {
            pod: Arc::clone(pod),
            object: mirror.cloned(),
            removed: false,
            starts_again: false,
        });
        own.into_iter().chain(statics).collect()
    }

    /// The mirror with this name.
    #[must_use]
    pub fn mirror(&self, name: &str) -> Option<&Arc<Pod>> {
        self.objects.get(name).filter(|o| pod::is_mirror(o))
    }

    /// The uids of the pods with this name, including that of a mirror.
    pub fn uids(&self, name: &str) -> impl Iterator<Item = &str> {
        let statics = self.statics.get(name).into_iter().flatten();
        let pods = self.objects.get(name).into_iter().chain(statics);
        pods.map(|p| pod::uid(p))
    }

    /// Whether a static pod has this name.
    #[must_use]
    pub fn has_static(&self, name: &str) -> bool {
        self.statics.contains_key(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pod(name: u8, uid: u8, mirror: bool) -> Arc<Pod> {
        let mut pod = Pod::default();
        pod.metadata.name = Some(format!("p{name}"));
        pod.metadata.namespace = Some("ns".into());
        pod.metadata.uid = Some(format!("{uid}"));
        if mirror {
            let annotations = [(pod::MIRROR.to_owned(), "hash".to_owned())];
            pod.metadata.annotations = Some(annotations.into());
        }
        Arc::new(pod)
    }

    fn all(desired: &Desired) -> Vec<(String, Option<String>)> {
        let updates = desired.names().into_iter().flat_map(|n| desired.of(&n));
        updates
            .map(|u| {
                let object = u.object.map(|o| pod::uid(&o).to_owned());
                (pod::uid(&u.pod).to_owned(), object)
            })
            .collect()
    }

    #[test]
    fn a_mirror_pod_carries_its_static_pods_status() {
        let mut desired = Desired::default();
        let names = desired.replace_statics(vec![pod(1, 1, false)]);
        assert_eq!(names, ["p1_ns".to_owned()].into());
        assert_eq!(all(&desired), [("1".into(), None)]);
        desired.set_object("p1_ns", Some(pod(1, 2, true)));
        assert_eq!(all(&desired), [("1".into(), Some("2".into()))]);
        assert_eq!(desired.uids("p1_ns").collect::<Vec<_>>(), ["2", "1"]);
        let names = desired.replace_statics(vec![]);
        assert_eq!(
            names,
            ["p1_ns".to_owned()].into(),
            "removed pods are included"
        );
        assert_eq!(all(&desired), [], "a mirror is not a pod");
        assert!(desired.mirror("p1_ns").is_some() && !desired.has_static("p1_ns"));
    }

    proptest! {
        #[test]
        fn single_changes_and_a_relist_lead_to_the_same_state(changes in proptest::collection::vec((0u8..4, 0u8..9, any::<bool>(), any::<bool>()), 0..30)) {
            let mut desired = Desired::default();
            desired.replace_statics(vec![pod(0, 100, false), pod(1, 101, false)]);
            let mut listed = desired.clone();
            let mut objects = BTreeMap::new();
            for (name, uid, mirror, gone) in changes {
                let object = (!gone).then(|| pod(name, uid, mirror));
                let name = format!("p{name}_ns");
                desired.set_object(&name, object.clone());
                match object {
                    Some(object) => objects.insert(name, object),
                    None => objects.remove(&name),
                };
            }
            listed.replace_objects(objects.into_values().collect());
            prop_assert_eq!(all(&desired), all(&listed));
        }
    }
}
