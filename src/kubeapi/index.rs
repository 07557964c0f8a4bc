//! An index of a cache: its objects by a value, such as their owner's uid or their node. A lookup costs as much as its
//! result, however many objects the cache has (`client-go/tools/cache/thread_safe_store.go`).

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock};

use kube::Resource;
use serde::de::DeserializeOwned;

use super::cache::{Cache, Key, key};

/// The objects of each value, in key order.
type Entries<K> = HashMap<String, BTreeMap<Key, Arc<K>>>;

/// The objects of a cache by value. Clones share the index.
pub struct Index<K> {
    cache: Cache<K>,
    entries: Arc<RwLock<Entries<K>>>,
}

impl<K> Clone for Index<K> {
    fn clone(&self) -> Self {
        Index {
            cache: self.cache.clone(),
            entries: Arc::clone(&self.entries),
        }
    }
}

impl<K> Index<K>
where
    K: Resource + DeserializeOwned + Send + Sync + 'static,
    K::DynamicType: Default,
{
    /// Indexes a cache by the values that `values_of` gives for each object.
    #[must_use]
    pub fn new(
        cache: &Cache<K>,
        values_of: impl Fn(&K) -> Vec<String> + Send + Sync + 'static,
    ) -> Index<K> {
        let entries: Arc<RwLock<Entries<K>>> = Arc::default();
        let writer = Arc::clone(&entries);
        cache.observe(move |before, after| {
            let mut entries = writer.write().unwrap_or_else(PoisonError::into_inner);
            let (old, new) = (
                before.map(|o| values_of(o)).unwrap_or_default(),
                after.map(|o| values_of(o)).unwrap_or_default(),
            );
            if let Some(object) = before {
                let stale = old.iter().filter(|value| !new.contains(value));
                stale.for_each(|value| remove(&mut entries, value, &key(&**object)));
            }
            if let Some(object) = after {
                for value in new {
                    let here = entries.entry(value).or_default();
                    here.insert(key(&**object), Arc::clone(object));
                }
            }
        });
        Index {
            cache: cache.clone(),
            entries,
        }
    }

    /// The objects with this value, in key order. Contains at least the changes up to the cache's
    /// [`Cache::latest_revision`] before the call.
    #[must_use]
    pub fn get(&self, value: &str) -> Vec<Arc<K>> {
        self.cache.hold(|| {
            let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
            let here = entries.get(value).into_iter().flat_map(BTreeMap::values);
            here.cloned().collect()
        })
    }
}

fn remove<K>(entries: &mut Entries<K>, value: &str, key: &Key) {
    if let Some(here) = entries.get_mut(value) {
        here.remove(key);
        if here.is_empty() {
            entries.remove(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::Pod;
    use proptest::prelude::*;

    fn pod(name: u8, labels: &[u8]) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.name = Some(name.to_string());
        pod.metadata.labels = Some(
            labels
                .iter()
                .map(|l| (l.to_string(), String::new()))
                .collect(),
        );
        pod
    }

    fn labels(pod: &Pod) -> Vec<String> {
        pod.metadata
            .labels
            .iter()
            .flatten()
            .map(|(label, _)| label.clone())
            .collect()
    }

    #[derive(Debug, Clone)]
    enum Step {
        Apply(u8, Vec<u8>),
        Delete(u8),
        Replace(Vec<(u8, Vec<u8>)>),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let values = || proptest::collection::vec(0..4u8, 0..3);
        let list = proptest::collection::vec((0..6u8, values()), 0..6);
        let step = prop_oneof![
            4 => (0..6u8, values()).prop_map(|(name, values)| Step::Apply(name, values)),
            2 => (0..6u8).prop_map(Step::Delete),
            1 => list.prop_map(Step::Replace),
        ];
        proptest::collection::vec(step, 0..60)
    }

    proptest! {
        /// An index equals a scan of the cache after each change, also if the index was created late.
        #[test]
        fn an_index_equals_a_scan(steps in steps(), late in 0..60usize) {
            let (writer, cache) = Cache::<Pod>::without_watch();
            let mut indexes = vec![Index::new(&cache, labels)];
            for (n, step) in steps.into_iter().enumerate() {
                if n == late {
                    indexes.push(Index::new(&cache, labels));
                }
                match step {
                    Step::Apply(name, labels) => writer.apply(pod(name, &labels)),
                    Step::Delete(name) => writer.delete(pod(name, &[])),
                    Step::Replace(list) => {
                        let pods = list.into_iter().map(|(name, labels)| pod(name, &labels));
                        writer.replace(pods.collect());
                    }
                }
                for index in &indexes {
                    for value in 0..4u8 {
                        let value = value.to_string();
                        let mut scan = cache.list();
                        scan.retain(|pod| labels(pod).contains(&value));
                        prop_assert_eq!(index.get(&value), scan);
                    }
                    let entries = index.entries.read().expect("the entries");
                    prop_assert!(entries.values().all(|here| !here.is_empty()));
                }
            }
        }
    }
}
