//! A cache of one kind, kept by a watch: many readers, one task that writes.
//!
//! A relist builds the new set aside and swaps it in, so readers never see half of one. The watch
//! resumes by itself after errors, with a growing pause.

use crate::core::backoff::Doubling;
use crate::core::lock::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::Duration;

use futures::StreamExt as _;
use kube::Resource;
use kube::runtime::watcher;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::api::{Api, Untyped};
use super::client::chain;
use super::failure::{ApiFailure, watch_failure};

/// The pauses after a watch that failed, at first and at most.
const PAUSES: Doubling = Doubling::new(Duration::from_millis(50), Duration::from_secs(5));

/// Namespace and name.
pub type Key = (String, String);
type Map<K> = BTreeMap<Key, Arc<K>>;
/// The keys that a reader has not been told of yet.
type Pending = Mutex<BTreeSet<Key>>;

/// What the halves of a cache share.
struct Shared<K> {
    map: RwLock<Map<K>>,
    /// Those who read key by key.
    readers: Mutex<Vec<Weak<Pending>>>,
}

/// The objects of one kind as last seen. Clones share it; the watch ends with the last clone.
pub struct Cache<K> {
    shared: Arc<Shared<K>>,
    /// Counts changes; 0 until the first complete list.
    version: watch::Receiver<u64>,
    _task: Option<Arc<AbortOnDropHandle<()>>>,
}

/// The writing half of a cache: there is one, so only one task writes.
pub struct Writer<K> {
    shared: Arc<Shared<K>>,
    announce: watch::Sender<u64>,
}

/// What has changed in a cache, key by key, for one reader.
pub struct ChangedKeys {
    pending: Arc<Pending>,
    version: watch::Receiver<u64>,
}

impl ChangedKeys {
    /// Waits for changes; the answer is the keys of what came, changed or went. It is empty where the first
    /// complete list is empty. Cancel-safe.
    pub async fn next(&mut self) -> BTreeSet<Key> {
        if self.version.changed().await.is_err() {
            // The watch has ended with the process.
            return std::future::pending().await;
        }
        std::mem::take(&mut *lock(&self.pending))
    }
}

impl<K> Shared<K> {
    /// Notes keys for every reader that is still there.
    fn note(&self, keys: &BTreeSet<Key>) {
        let mut readers = lock(&self.readers);
        readers.retain(|reader| {
            let Some(pending) = reader.upgrade() else {
                return false;
            };
            let mut pending = lock(&pending);
            pending.extend(keys.iter().cloned());
            true
        });
    }
}

impl<K: Resource> Writer<K> {
    /// Makes a change, and tells of it with the keys that it concerns.
    fn change(&self, change: impl FnOnce(&mut Map<K>) -> BTreeSet<Key>) {
        let keys = {
            let map = &self.shared.map;
            change(&mut map.write().unwrap_or_else(PoisonError::into_inner))
        };
        self.shared.note(&keys);
        self.announce.send_modify(|version| *version += 1);
    }

    /// An object is there, or is there in a new version.
    pub fn apply(&self, object: K) {
        self.change(|map| {
            let key = key(&object);
            map.insert(key.clone(), Arc::new(slim(object)));
            [key].into()
        });
    }

    /// An object is gone.
    pub fn delete(&self, object: &K) {
        self.remove(key(object));
    }

    fn remove(&self, key: Key) {
        self.change(|map| {
            map.remove(&key);
            [key].into()
        });
    }

    /// A complete list, which replaces everything.
    pub fn replace(&self, objects: Vec<K>) {
        self.replace_readable(objects, vec![]);
    }

    /// A complete list of which some objects could not be read: they are there, so that what was known of them holds on.
    fn replace_readable(&self, objects: Vec<K>, unread: Vec<Unread>) {
        let mut listed: Map<K> = objects
            .into_iter()
            .map(|o| (key(&o), Arc::new(slim(o))))
            .collect();
        self.change(|map| {
            let mut before = std::mem::take(map);
            listed.extend(unread.into_iter().filter_map(|there| {
                let (key, known) = before.remove_entry(&there.key)?;
                (known.meta().uid == there.uid).then_some((key, known))
            }));
            *map = listed;
            before.into_keys().chain(map.keys().cloned()).collect()
        });
    }
}

impl<K> Clone for Cache<K> {
    fn clone(&self) -> Self {
        Cache {
            shared: Arc::clone(&self.shared),
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
    K: Resource + DeserializeOwned + Send + Sync + 'static,
    K::DynamicType: Default,
{
    /// A cache that is written by hand: for simulations.
    #[must_use]
    pub fn by_hand() -> (Writer<K>, Cache<K>) {
        let shared = Arc::new(Shared {
            map: RwLock::default(),
            readers: Mutex::default(),
        });
        let (announce, version) = watch::channel(0);
        (
            Writer {
                shared: Arc::clone(&shared),
                announce,
            },
            Cache {
                shared,
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

    /// Tells of changes key by key; what is here already comes first.
    #[must_use]
    pub fn changed_keys(&self) -> ChangedKeys {
        let pending = Arc::new(Pending::default());
        let readers = &self.shared.readers;
        lock(readers).push(Arc::downgrade(&pending));
        let map = self
            .shared
            .map
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        lock(&pending).extend(map.keys().cloned());
        drop(map);
        // No clone of this receiver has seen anything: what came before is a change, too.
        let version = self.version.clone();
        ChangedKeys { pending, version }
    }

    /// One object.
    #[must_use]
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<K>> {
        let map = self
            .shared
            .map
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        map.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    /// All objects in key order.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<K>> {
        let map = self
            .shared
            .map
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        map.values().cloned().collect()
    }
}

async fn follow<K>(api: Api<K>, config: watcher::Config, writer: Writer<K>)
where
    K: Resource + DeserializeOwned + Send + 'static,
    K::DynamicType: Default,
{
    let mut events = pin!(api.watcher(config));
    let (mut aside, mut unread) = (Vec::new(), Vec::new());
    let mut pauses = PAUSES;
    let mut refused = false;
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Apply(object)) => {
                if let Ok(object) = read(object) {
                    writer.apply(object);
                }
            }
            Ok(watcher::Event::Delete(object)) => writer.remove(key(&object)),
            Ok(watcher::Event::Init) => {
                aside.clear();
                unread.clear();
            }
            Ok(watcher::Event::InitApply(object)) => match read(object) {
                Ok(object) => aside.push(object),
                Err(object) => unread.push(object),
            },
            Ok(watcher::Event::InitDone) => {
                let unread = std::mem::take(&mut unread);
                writer.replace_readable(std::mem::take(&mut aside), unread);
            }
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

/// An object that is there and cannot be read.
struct Unread {
    key: Key,
    uid: Option<String>,
}

/// Reads an object. One that cannot be read is told to the log, and others are not disturbed by it.
fn read<K>(object: Untyped) -> Result<K, Unread>
where
    K: Resource + DeserializeOwned,
    K::DynamicType: Default,
{
    let (key, uid) = (key(&object), object.meta().uid.clone());
    object.read().map_err(|error| {
        let kind = K::kind(&K::DynamicType::default()).into_owned();
        let (error, (namespace, name)) = (chain(&error), &key);
        tracing::warn!(%error, kind, namespace, name, "an object of the API cannot be read and is ignored until it changes");
        Unread { key, uid }
    })
}

/// Drops what nobody here reads.
fn slim<K: Resource>(mut object: K) -> K {
    object.meta_mut().managed_fields = None;
    object
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;
    use k8s_openapi::api::core::v1::{ConfigMap, Pod};
    use serde_json::{Value, json};

    use super::super::fake::{Fake, map, until};

    fn pod(name: &str) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.name = Some(name.into());
        pod
    }

    fn names(changed: &mut ChangedKeys) -> Option<Vec<String>> {
        let keys = changed.next().now_or_never()?;
        Some(keys.into_iter().map(|(_, name)| name).collect())
    }

    #[test]
    fn a_reader_is_told_the_keys_that_changed() {
        let (writer, cache) = Cache::<Pod>::by_hand();
        let mut early = cache.changed_keys();
        assert_eq!(names(&mut early), None, "nothing has been listed yet");
        writer.replace(vec![]);
        assert_eq!(names(&mut early), Some(vec![]), "an empty list says so");
        writer.replace(vec![pod("a"), pod("b")]);
        writer.apply(pod("c"));
        let mut late = cache.changed_keys();
        for reader in [&mut early, &mut late] {
            assert_eq!(
                names(reader),
                Some(vec!["a".into(), "b".into(), "c".into()])
            );
            assert_eq!(names(reader), None);
        }
        writer.delete(&pod("b"));
        assert_eq!(names(&mut early), Some(vec!["b".into()]));
        writer.replace(vec![pod("d")]);
        let gone_and_come = vec!["a".into(), "c".into(), "d".into()];
        assert_eq!(names(&mut early), Some(gone_and_come));
        drop(late);
        writer.apply(pod("e"));
        let readers = cache.shared.readers.lock().expect("the readers");
        assert_eq!(readers.len(), 1, "a reader that has gone is forgotten");
    }
    /// A ConfigMap that no release of this agent can read.
    fn unreadable(name: &str, uid: &str) -> Value {
        let mut object = map(9, "", false);
        object["metadata"]["name"] = json!(name);
        object["metadata"]["uid"] = json!(uid);
        object["data"] = json!(5);
        object
    }

    #[tokio::test(start_paused = true)]
    async fn an_object_that_cannot_be_read_disturbs_no_other_and_is_not_taken_for_gone() {
        let fake = Fake::with(vec![unreadable("new", "a"), map(1, "first", false)]);
        let maps = Api::<ConfigMap>::namespaced(fake.client(), "n");
        let cache = Cache::start(maps, watcher::Config::default());
        let text = || Some(cache.get("n", "m")?.data.as_ref()?["k"].clone());
        cache.synced().await;
        assert_eq!(text().as_deref(), Some("first"));
        assert_eq!(cache.list().len(), 1);
        until("the watch", || fake.watches() == 1).await;
        fake.say("ADDED", &unreadable("newer", "b"));
        fake.say("MODIFIED", &map(2, "second", false));
        until("the next event", || text().as_deref() == Some("second")).await;

        // The watch has to begin anew, and the list has the object in a form that cannot be read.
        let expired = json!({"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410, "message": "too old"});
        let relist = async |object: Value, version: u64| {
            *lock(&fake.items) = vec![object];
            fake.say("ERROR", &expired);
            let listed = || *cache.changes().borrow() > version;
            until("the list", listed).await;
            until("the watch", || fake.watches() == 1).await;
        };
        let version = *cache.changes().borrow();
        relist(unreadable("m", "u"), version).await;
        assert_eq!(text().as_deref(), Some("second"), "it is still there");
        relist(unreadable("m", "another"), version + 1).await;
        assert_eq!(text(), None, "another has its name");
    }
}
