//! A cache of one kind, kept by a watch: many readers, one task that writes.
//!
//! A relist builds the new set aside and swaps it in, so readers never see half of one. The watch
//! resumes by itself after errors, with a growing pause.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::pin::pin;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use futures::StreamExt as _;
use kube::runtime::watcher;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

/// Namespace and name.
pub type Key = (String, String);
type Map<K> = BTreeMap<Key, Arc<K>>;

/// The objects of one kind as last seen. Clones share it; the watch ends with the last clone.
pub struct Cache<K> {
    map: Arc<RwLock<Map<K>>>,
    /// Counts changes; 0 until the first complete list.
    version: watch::Receiver<u64>,
    _task: Arc<AbortOnDropHandle<()>>,
}

impl<K> Clone for Cache<K> {
    fn clone(&self) -> Self {
        Cache { map: Arc::clone(&self.map), version: self.version.clone(), _task: Arc::clone(&self._task) }
    }
}

/// The key of an object.
#[must_use]
pub fn key<K: Resource>(object: &K) -> Key {
    let meta = object.meta();
    (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default())
}

/// The revision of an object as a number.
#[must_use]
pub fn revision<K: Resource>(object: &K) -> u64 {
    object.meta().resource_version.as_deref().and_then(|v| v.parse().ok()).unwrap_or(0)
}

impl<K> Cache<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Default,
{
    /// Starts watching.
    #[must_use]
    pub fn start(api: Api<K>, config: watcher::Config) -> Cache<K> {
        let map: Arc<RwLock<Map<K>>> = Arc::default();
        let (announce, version) = watch::channel(0);
        let task = tokio::spawn(follow(api, config, Arc::clone(&map), announce));
        Cache { map, version, _task: Arc::new(AbortOnDropHandle::new(task)) }
    }

    /// Waits for the first complete list.
    pub async fn synced(&self) {
        let mut version = self.version.clone();
        // The sender lives as long as the task, which lives as long as `self`.
        let _ = version.wait_for(|v| *v > 0).await;
    }

    /// Whether the first complete list has come.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        *self.version.borrow() > 0
    }

    /// Tells of changes; take it before reading, so that none is missed.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.version.clone()
    }

    /// One object.
    #[must_use]
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<K>> {
        let map = self.map.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        map.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    /// All objects in key order.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<K>> {
        let map = self.map.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        map.values().cloned().collect()
    }
}

async fn follow<K>(api: Api<K>, config: watcher::Config, map: Arc<RwLock<Map<K>>>, announce: watch::Sender<u64>)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    K::DynamicType: Default,
{
    let mut events = pin!(watcher(api, config));
    let mut aside: Map<K> = BTreeMap::new();
    let mut pause = Duration::from_millis(50);
    while let Some(event) = events.next().await {
        let write = || map.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        match event {
            Ok(watcher::Event::Apply(object)) => {
                let object = slim(object);
                write().insert(key(&object), Arc::new(object));
            }
            Ok(watcher::Event::Delete(object)) => {
                write().remove(&key(&object));
            }
            Ok(watcher::Event::Init) => {
                aside.clear();
                continue;
            }
            Ok(watcher::Event::InitApply(object)) => {
                let object = slim(object);
                aside.insert(key(&object), Arc::new(object));
                continue;
            }
            Ok(watcher::Event::InitDone) => *write() = std::mem::take(&mut aside),
            Err(error) => {
                tracing::debug!(error = %super::client::chain(&error), "watch interrupted, it resumes by itself");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(5));
                continue;
            }
        }
        pause = Duration::from_millis(50);
        announce.send_modify(|version| *version += 1);
    }
}

/// Drops what nobody here reads.
fn slim<K: Resource>(mut object: K) -> K {
    object.meta_mut().managed_fields = None;
    object
}
