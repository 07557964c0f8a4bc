//! A cache of one kind, kept by a watch: many readers, one task that writes.
//!
//! A relist builds the new set aside and swaps it in, so readers never see half of one. The watch
//! resumes by itself after errors, with a growing pause.

use crate::core::backoff::Doubling;
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

use super::failure::{ApiFailure, watch_failure};

/// The pauses after a watch that failed, at first and at most.
const PAUSES: Doubling = Doubling::new(Duration::from_millis(50), Duration::from_secs(5));

/// Namespace and name.
pub type Key = (String, String);
type Map<K> = BTreeMap<Key, Arc<K>>;

/// The objects of one kind as last seen. Clones share it; the watch ends with the last clone.
pub struct Cache<K> {
    map: Arc<RwLock<Map<K>>>,
    /// Counts changes; 0 until the first complete list.
    version: watch::Receiver<u64>,
    _task: Option<Arc<AbortOnDropHandle<()>>>,
}

/// The writing half of a cache: there is one, so only one task writes.
pub struct Writer<K> {
    map: Arc<RwLock<Map<K>>>,
    announce: watch::Sender<u64>,
}

impl<K: Resource> Writer<K> {
    fn change(&self, change: impl FnOnce(&mut Map<K>)) {
        change(
            &mut self
                .map
                .write()
                .unwrap_or_else(std::sync::PoisonError::into_inner),
        );
        self.announce.send_modify(|version| *version += 1);
    }

    /// An object is there, or is there in a new version.
    pub fn apply(&self, object: K) {
        self.change(|map| _ = map.insert(key(&object), Arc::new(slim(object))));
    }

    /// An object is gone.
    pub fn delete(&self, object: &K) {
        self.change(|map| _ = map.remove(&key(object)));
    }

    /// A complete list, which replaces everything.
    pub fn replace(&self, objects: Vec<K>) {
        self.change(|map| {
            *map = objects
                .into_iter()
                .map(|o| (key(&o), Arc::new(slim(o))))
                .collect()
        });
    }
}

impl<K> Clone for Cache<K> {
    fn clone(&self) -> Self {
        Cache {
            map: Arc::clone(&self.map),
            version: self.version.clone(),
            _task: self._task.clone(),
        }
    }
}

/// The key of an object.
#[must_use]
pub fn key<K: Resource>(object: &K) -> Key {
    let meta = object.meta();
    (
        meta.namespace.clone().unwrap_or_default(),
        meta.name.clone().unwrap_or_default(),
    )
}

/// The revision of an object as a number.
#[must_use]
pub fn revision<K: Resource>(object: &K) -> u64 {
    object
        .meta()
        .resource_version
        .as_deref()
        .and_then(|v| v.parse().ok())
        .unwrap_or(0)
}

impl<K> Cache<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Default,
{
    /// A cache that is written by hand: for simulations.
    #[must_use]
    pub fn by_hand() -> (Writer<K>, Cache<K>) {
        let map: Arc<RwLock<Map<K>>> = Arc::default();
        let (announce, version) = watch::channel(0);
        (
            Writer {
                map: Arc::clone(&map),
                announce,
            },
            Cache {
                map,
                version,
                _task: None,
            },
        )
    }

    /// Starts watching.
    #[must_use]
    pub fn start(api: Api<K>, config: watcher::Config) -> Cache<K> {
        let (writer, mut cache) = Self::by_hand();
        cache._task = Some(Arc::new(AbortOnDropHandle::new(tokio::spawn(follow(
            api, config, writer,
        )))));
        cache
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
        let map = self
            .map
            .read()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        map.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    /// All objects in key order.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<K>> {
        let map = self
            .map
            .read()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        map.values().cloned().collect()
    }
}

async fn follow<K>(api: Api<K>, config: watcher::Config, writer: Writer<K>)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    K::DynamicType: Default,
{
    let mut events = pin!(watcher(api, config));
    let mut aside = Vec::new();
    let mut pauses = PAUSES;
    let mut refused = false;
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Apply(object)) => writer.apply(object),
            Ok(watcher::Event::Delete(object)) => writer.delete(&object),
            Ok(watcher::Event::Init) => aside.clear(),
            Ok(watcher::Event::InitApply(object)) => aside.push(object),
            Ok(watcher::Event::InitDone) => writer.replace(std::mem::take(&mut aside)),
            Err(error) => {
                let failure = watch_failure(error);
                let kind = K::kind(&K::DynamicType::default()).into_owned();
                tracing::debug!(%failure, kind, "watch interrupted, it resumes by itself");
                // At first and for a while a refusal is expected: an apiserver that has just started knows no roles yet.
                let lasts = pauses.is_longest() && matches!(failure, ApiFailure::Forbidden(_));
                if lasts && !std::mem::replace(&mut refused, true) {
                    tracing::warn!(%failure, kind, "the apiserver lets this node not watch what it needs; it is tried until it does");
                }
                let pause = pauses.pause();
                tokio::time::sleep(failure.retry_after().unwrap_or(pause)).await;
                continue;
            }
        }
        refused = false;
        pauses.reset();
    }
}

/// Drops what nobody here reads.
fn slim<K: Resource>(mut object: K) -> K {
    object.meta_mut().managed_fields = None;
    object
}
