//! A cache of the objects of one kind. One task watches the API and writes; any number of readers share the result.
//!
//! A relist collects the new objects separately and then replaces all old ones, so readers never see half a list. After
//! an error, the watch resumes with back-off.

use holdfast_core::backoff::Doubling;
use holdfast_core::lock::lock;
use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::Duration;

use futures::StreamExt as _;
use kube::Resource;
use kube::runtime::watcher;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::api::{Api, Untyped};
use super::failure::chain;
use super::failure::{ApiFailure, watch_failure};

/// Back-off after a failed watch: initial and maximum delay.
const PAUSES: Doubling = Doubling::new(Duration::from_millis(50), Duration::from_secs(5));

/// Namespace and name.
pub type Key = (String, String);
type Map<K> = BTreeMap<Key, Arc<K>>;
/// Changes that a reader has not taken yet, by key.
type Pending<K> = Mutex<BTreeMap<Key, PendingChange<K>>>;
/// The changes that a reader takes in one call, by key.
pub type Changes<K> = BTreeMap<Key, Changed<K>>;

/// The change of one key since the reader last took changes.
#[derive(Debug)]
pub struct Changed<K> {
    /// The object that has the key now.
    pub now: Option<Arc<K>>,
    /// The last state of the object that the reader knew under the key, if that object was deleted or replaced by one
    /// with another uid.
    ///
    /// An apiserver may store the last update of an object and its deletion within a millisecond. The last state may
    /// then hold data that no other change of the key shows: for a pod, its `deletionGracePeriodSeconds`.
    pub deleted: Option<Arc<K>>,
}

/// A change that a reader has not taken yet. It keeps at most two objects, however many were created and deleted
/// meanwhile.
struct PendingChange<K> {
    /// The newest state of the object that the reader knows; after its deletion, its last state.
    known: Option<Arc<K>>,
    now: Option<Arc<K>>,
}

/// Is called with an object before and after a change.
type Observer<K> = Box<dyn Fn(Option<&Arc<K>>, Option<&Arc<K>>) + Send + Sync>;

/// One transition of a key: the last state of the object before it, and the object after it.
struct Step<K> {
    key: Key,
    before: Option<Arc<K>>,
    after: Option<Arc<K>>,
}

/// State shared by the writer and the readers of a cache.
struct Shared<K> {
    map: RwLock<Map<K>>,
    /// Readers that take changes key by key.
    readers: Mutex<Vec<Weak<Pending<K>>>>,
    /// See [`Cache::observe`].
    observers: Mutex<Vec<Observer<K>>>,
    /// See [`Cache::latest_revision`].
    latest_revision: AtomicU64,
}

/// The last known objects of one kind. Clones share the objects; dropping the last clone stops the watch.
pub struct Cache<K> {
    shared: Arc<Shared<K>>,
    /// Number of changes; 0 until the first complete list.
    version: watch::Receiver<u64>,
    _task: Option<Arc<AbortOnDropHandle<()>>>,
}

/// The writing half of a cache. There is only one, so a single task writes.
pub struct Writer<K> {
    shared: Arc<Shared<K>>,
    notifier: watch::Sender<u64>,
}

/// Reads the changes of a cache key by key. A slow reader gets the newest state of each key.
pub struct ChangeReader<K> {
    pending: Arc<Pending<K>>,
    version: watch::Receiver<u64>,
}

impl<K: Resource> ChangeReader<K> {
    /// Waits for changes. The first result holds the first complete list, and is empty if that list is empty.
    /// Cancel-safe.
    pub async fn next(&mut self) -> Changes<K> {
        if self.version.changed().await.is_err() {
            // The writer was dropped: no more changes follow.
            return std::future::pending().await;
        }
        let taken = std::mem::take(&mut *lock(&self.pending));
        let changed = |change: PendingChange<K>| {
            let is_gone = !is_same(change.known.as_deref(), change.now.as_deref());
            Changed {
                deleted: change.known.filter(|_| is_gone),
                now: change.now,
            }
        };
        let changes = taken.into_iter();
        changes.map(|(key, c)| (key, changed(c))).collect()
    }
}

/// Whether both are states of the same object.
fn is_same<K: Resource>(a: Option<&K>, b: Option<&K>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a.meta().uid == b.meta().uid,
        (None, None) => true,
        _ => false,
    }
}

impl<K: Resource> PendingChange<K> {
    /// Applies a step. Returns false if nothing remains to report: the object was created and deleted before the reader
    /// saw it.
    fn follow(&mut self, step: &Step<K>) -> bool {
        let known = self.known.as_deref();
        if known.is_some() && is_same(known, step.before.as_deref()) {
            let stays = is_same(known, step.after.as_deref());
            let newest = if stays { &step.after } else { &step.before };
            self.known.clone_from(newest);
        }
        self.now.clone_from(&step.after);
        self.known.is_some() || self.now.is_some()
    }
}

impl<K: Resource> Shared<K> {
    /// Records steps for every reader, and removes the readers that were dropped.
    fn record_steps(&self, steps: &[Step<K>]) {
        let mut readers = lock(&self.readers);
        readers.retain(|reader| {
            let Some(pending) = reader.upgrade() else {
                return false;
            };
            let mut pending = lock(&pending);
            for step in steps {
                let change = pending.entry(step.key.clone());
                let change = change.or_insert_with(|| PendingChange {
                    known: step.before.clone(),
                    now: None,
                });
                if !change.follow(step) {
                    pending.remove(&step.key);
                }
            }
            true
        });
    }

    /// Passes steps to the observers.
    fn notify_observers(&self, steps: &[Step<K>]) {
        let objects = steps
            .iter()
            .filter_map(|s| s.after.as_ref().or(s.before.as_ref()));
        let latest = objects.map(|object| revision(&**object)).max();
        self.latest_revision
            .fetch_max(latest.unwrap_or(0), Ordering::AcqRel);
        for observer in &*lock(&self.observers) {
            for step in steps {
                observer(step.before.as_ref(), step.after.as_ref());
            }
        }
    }
}

impl<K: Resource> Writer<K> {
    /// Applies a change and passes its steps to the readers.
    fn change(&self, change: impl FnOnce(&mut Map<K>) -> Vec<Step<K>>) {
        let map = &self.shared.map;
        let mut map = map.write().unwrap_or_else(PoisonError::into_inner);
        let steps = change(&mut map);
        // Under the map's lock, so that a new reader gets each step exactly once: from the map or from here.
        self.shared.record_steps(&steps);
        self.shared.notify_observers(&steps);
        drop(map);
        self.notifier.send_modify(|version| *version += 1);
    }

    /// Inserts a new object or a new version of one.
    pub fn apply(&self, object: K) {
        self.change(|map| {
            let (key, object) = (key(&object), Arc::new(slim(object)));
            let before = map.insert(key.clone(), Arc::clone(&object));
            let after = Some(object);
            vec![Step { key, before, after }]
        });
    }

    /// Removes a deleted object; `object` is its last state.
    pub fn delete(&self, object: K) {
        self.remove(key(&object), Some(object));
    }

    /// Removes a deleted object; `last` is its last state if it could be decoded.
    fn remove(&self, key: Key, last: Option<K>) {
        self.change(|map| {
            let known = map.remove(&key);
            let last = last.filter(|last| is_same(Some(last), known.as_deref()));
            let Some(last) = last.map(|last| Arc::new(slim(last))) else {
                let (before, after) = (known, None);
                return vec![Step { key, before, after }];
            };
            let marked = Step {
                key: key.clone(),
                before: known,
                after: Some(Arc::clone(&last)),
            };
            let (before, after) = (Some(last), None);
            vec![marked, Step { key, before, after }]
        });
    }

    /// Replaces the contents by a complete list.
    pub fn replace(&self, objects: Vec<K>) {
        self.replace_readable(objects, vec![]);
    }

    /// Replaces the contents by a complete list in which some objects cannot be decoded. Those objects exist, so the
    /// cache keeps their last known state.
    fn replace_readable(&self, objects: Vec<K>, unread: Vec<Unread>) {
        let mut listed: Map<K> = objects
            .into_iter()
            .map(|o| (key(&o), Arc::new(slim(o))))
            .collect();
        self.change(|map| {
            let mut before = std::mem::take(map);
            for there in unread {
                let known = before.get(&there.key);
                if let Some(known) = known.filter(|known| known.meta().uid == there.uid) {
                    listed.insert(there.key, Arc::clone(known));
                }
            }
            *map = listed;
            let mut steps: Vec<Step<K>> = vec![];
            for (key, now) in map.iter() {
                steps.push(Step {
                    key: key.clone(),
                    before: before.remove(key),
                    after: Some(Arc::clone(now)),
                });
            }
            let gone = before.into_iter().map(|(key, before)| Step {
                key,
                before: Some(before),
                after: None,
            });
            steps.extend(gone);
            steps
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

/// Returns the namespace and name of an object.
#[must_use]
pub fn key<K: Resource>(object: &K) -> Key {
    let meta = object.meta();
    (
        meta.namespace.clone().unwrap_or_default(),
        meta.name.clone().unwrap_or_default(),
    )
}

/// Returns the resource version of an object as a number; 0 if it has none.
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
    /// Creates a cache without a watch; simulations write to it.
    #[must_use]
    pub fn without_watch() -> (Writer<K>, Cache<K>) {
        let shared = Arc::new(Shared {
            map: RwLock::default(),
            readers: Mutex::default(),
            observers: Mutex::default(),
            latest_revision: AtomicU64::new(0),
        });
        let (notifier, version) = watch::channel(0);
        (
            Writer {
                shared: Arc::clone(&shared),
                notifier,
            },
            Cache {
                shared,
                version,
                _task: None,
            },
        )
    }

    /// Starts a watch and returns the cache that it fills.
    #[must_use]
    pub fn start(api: Api<K>, config: watcher::Config) -> Cache<K> {
        let (writer, mut cache) = Self::without_watch();
        cache._task = Some(Arc::new(AbortOnDropHandle::new(tokio::spawn(follow(
            api, config, writer,
        )))));
        cache
    }

    /// Waits for the first complete list.
    pub async fn synced(&self) {
        let mut version = self.version.clone();
        // The sender lives as long as the task, and the task as long as `self`.
        let _ = version.wait_for(|v| *v > 0).await;
    }

    /// Whether the first complete list has arrived.
    #[must_use]
    pub(crate) fn is_synced(&self) -> bool {
        *self.version.borrow() > 0
    }

    /// Returns a receiver that is notified of changes. Subscribe before reading, so that no change is missed.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.version.clone()
    }

    /// Returns a reader of changes, which first gets the objects that are in the cache already.
    #[must_use]
    pub fn read_changes(&self) -> ChangeReader<K> {
        let map = &self.shared.map;
        let map = map.read().unwrap_or_else(PoisonError::into_inner);
        let here = |(key, object): (&Key, &Arc<K>)| {
            let now = Some(Arc::clone(object));
            (key.clone(), PendingChange { known: None, now })
        };
        let pending = Arc::new(Mutex::new(map.iter().map(here).collect()));
        lock(&self.shared.readers).push(Arc::downgrade(&pending));
        drop(map);
        // No clone of this receiver has marked a version as seen, so earlier changes wake the new reader as well.
        let version = self.version.clone();
        ChangeReader { pending, version }
    }

    /// Calls `observer` for each object in the cache, and from now on for each change with the object before and after it.
    /// No change is missed, merged or repeated. The cache is locked meanwhile, so `observer` must be quick and must not
    /// read caches. A cache keeps its observers.
    pub fn observe(
        &self,
        observer: impl Fn(Option<&Arc<K>>, Option<&Arc<K>>) + Send + Sync + 'static,
    ) {
        let map = &self.shared.map;
        let map = map.read().unwrap_or_else(PoisonError::into_inner);
        for object in map.values() {
            observer(None, Some(object));
        }
        lock(&self.shared.observers).push(Box::new(observer));
    }

    /// The highest resource version of the objects that the cache has received. A watch delivers the changes of a kind in
    /// this order, so the cache shows every write of this kind up to here.
    #[must_use]
    pub fn latest_revision(&self) -> u64 {
        self.shared.latest_revision.load(Ordering::Acquire)
    }

    /// Calls `read` while no change is being applied, so that an index has all steps of each change.
    pub(super) fn hold<R>(&self, read: impl FnOnce() -> R) -> R {
        let map = &self.shared.map;
        let _map = map.read().unwrap_or_else(PoisonError::into_inner);
        read()
    }

    /// Returns one object.
    #[must_use]
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<K>> {
        let map = self
            .shared
            .map
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        map.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    /// Returns all objects in key order.
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
            Ok(watcher::Event::Delete(object)) => {
                // If the object cannot be decoded, its last known state is reported.
                writer.remove(key(&object), object.read().ok());
            }
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
                tracing::debug!(%failure, kind, "watch interrupted, resuming");
                // A refusal is expected for a while: an apiserver that has just started has not loaded its roles yet.
                let lasts = pauses.is_at_maximum() && matches!(failure, ApiFailure::Forbidden(_));
                if lasts && !std::mem::replace(&mut refused, true) {
                    tracing::warn!(%failure, kind, "the apiserver forbids this node to watch a kind that it needs; retrying");
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

/// An object that exists and cannot be decoded.
struct Unread {
    key: Key,
    uid: Option<String>,
}

/// Decodes an object. An undecodable object is logged and skipped.
fn read<K>(object: Untyped) -> Result<K, Unread>
where
    K: Resource + DeserializeOwned,
    K::DynamicType: Default,
{
    let (key, uid) = (key(&object), object.meta().uid.clone());
    object.read().map_err(|error| {
        let kind = K::kind(&K::DynamicType::default()).into_owned();
        let (error, (namespace, name)) = (chain(&error), &key);
        tracing::warn!(%error, kind, namespace, name, "decoding an API object failed; ignoring the object until it changes");
        Unread { key, uid }
    })
}

/// Removes the managed fields, which no reader uses.
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

    fn names(reader: &mut ChangeReader<Pod>) -> Option<Vec<String>> {
        let keys = reader.next().now_or_never()?;
        Some(keys.into_iter().map(|((_, name), _)| name).collect())
    }

    #[test]
    fn a_reader_gets_the_changed_keys() {
        let (writer, cache) = Cache::<Pod>::without_watch();
        let mut early = cache.read_changes();
        assert_eq!(names(&mut early), None, "nothing has been listed yet");
        writer.replace(vec![]);
        assert_eq!(
            names(&mut early),
            Some(vec![]),
            "an empty list counts as listed"
        );
        writer.replace(vec![pod("a"), pod("b")]);
        writer.apply(pod("c"));
        let mut late = cache.read_changes();
        for reader in [&mut early, &mut late] {
            assert_eq!(
                names(reader),
                Some(vec!["a".into(), "b".into(), "c".into()])
            );
            assert_eq!(names(reader), None);
        }
        writer.delete(pod("b"));
        assert_eq!(names(&mut early), Some(vec!["b".into()]));
        writer.replace(vec![pod("d")]);
        let gone_and_come = vec!["a".into(), "c".into(), "d".into()];
        assert_eq!(names(&mut early), Some(gone_and_come));
        drop(late);
        writer.apply(pod("e"));
        let readers = cache.shared.readers.lock().expect("the readers");
        assert_eq!(readers.len(), 1, "a dropped reader is unregistered");
    }

    /// The pod `p` with this uid and this deletion grace period.
    fn deleted(uid: &str, grace: Option<i64>) -> Pod {
        let mut pod = pod("p");
        pod.metadata.uid = Some(uid.into());
        pod.metadata.deletion_grace_period_seconds = grace;
        pod
    }

    type Shown = (String, Option<i64>);

    /// The change that a reader gets for pod `p`: uid and grace period of the old pod, and of the present pod.
    fn of_p(reader: &mut ChangeReader<Pod>) -> Option<(Option<Shown>, Option<Shown>)> {
        let mut changes = reader.next().now_or_never()?;
        let change = changes.remove(&(String::new(), "p".into()))?;
        let shown = |pod: Option<Arc<Pod>>| {
            let metadata = &pod?.metadata;
            let grace = metadata.deletion_grace_period_seconds;
            Some((metadata.uid.clone()?, grace))
        };
        Some((shown(change.deleted), shown(change.now)))
    }

    /// A test case: its name, the events for the pod `p` with uid `a`, and the change that a reader gets.
    type Case = (
        &'static str,
        fn(&Writer<Pod>),
        (Option<Shown>, Option<Shown>),
    );

    fn of_deletions() -> [Case; 5] {
        let shown = |uid: &str, grace| Some((uid.to_owned(), grace));
        [
            (
                "deleted",
                |w| w.delete(deleted("a", Some(0))),
                (shown("a", Some(0)), None),
            ),
            (
                "marked, deleted",
                |w| {
                    w.apply(deleted("a", Some(0)));
                    w.delete(deleted("a", Some(0)));
                },
                (shown("a", Some(0)), None),
            ),
            (
                "marked, deleted, created again",
                |w| {
                    w.apply(deleted("a", Some(5)));
                    w.delete(deleted("a", Some(0)));
                    w.apply(deleted("b", None));
                },
                (shown("a", Some(0)), shown("b", None)),
            ),
            (
                "many were created and deleted: the reader knew the first",
                |w| {
                    w.delete(deleted("a", Some(0)));
                    for n in 0..1000 {
                        w.apply(deleted(&format!("c{n}"), None));
                        w.delete(deleted(&format!("c{n}"), Some(7)));
                    }
                    w.apply(deleted("b", None));
                    w.apply(deleted("b", Some(3)));
                },
                (shown("a", Some(0)), shown("b", Some(3))),
            ),
            (
                "the watch shows the deletion of another object",
                |w| w.delete(deleted("z", Some(0))),
                (shown("a", None), None),
            ),
        ]
    }

    fn of_lists() -> [Case; 3] {
        let shown = |uid: &str, grace| Some((uid.to_owned(), grace));
        [
            (
                "marked, then missing in a list",
                |w| {
                    w.apply(deleted("a", Some(0)));
                    w.replace(vec![]);
                },
                (shown("a", Some(0)), None),
            ),
            (
                "replaced in a list",
                |w| w.replace(vec![deleted("b", None)]),
                (shown("a", None), shown("b", None)),
            ),
            (
                "changed",
                |w| {
                    w.apply(deleted("a", Some(5)));
                    w.replace(vec![deleted("a", Some(2))]);
                },
                (None, shown("a", Some(2))),
            ),
        ]
    }

    #[test]
    fn a_reader_gets_the_last_state_of_deleted_and_replaced_objects() {
        for (case, change, expected) in of_deletions().into_iter().chain(of_lists()) {
            let (writer, cache) = Cache::<Pod>::without_watch();
            let (mut reader, mut ignorant) = (cache.read_changes(), cache.read_changes());
            writer.replace(vec![deleted("a", None)]);
            let first = Some(("a".to_owned(), None));
            assert_eq!(of_p(&mut reader), Some((None, first)), "{case}");
            change(&writer);
            assert!(lock(&reader.pending).len() <= 1, "{case}");
            assert_eq!(of_p(&mut reader), Some(expected.clone()), "{case}");
            let never_knew = expected.1.map(|now| (None, Some(now)));
            assert_eq!(of_p(&mut ignorant), never_knew, "{case}");
        }
    }

    #[test]
    fn deleted_objects_unknown_to_every_reader_use_no_memory() {
        let (writer, cache) = Cache::<Pod>::without_watch();
        let reader = cache.read_changes();
        writer.replace(vec![]);
        for n in 0..1000 {
            writer.apply(pod(&format!("p{n}")));
            writer.delete(pod(&format!("p{n}")));
        }
        assert_eq!(lock(&reader.pending).len(), 0);
    }

    #[test]
    fn an_observer_gets_each_step_and_the_objects_before_it() {
        let versioned = |uid: &str, version: u64| {
            let mut pod = deleted(uid, None);
            pod.metadata.resource_version = Some(version.to_string());
            pod
        };
        let (writer, cache) = Cache::<Pod>::without_watch();
        writer.apply(versioned("a", 3));
        let steps: Arc<Mutex<Vec<String>>> = Arc::default();
        let seen = Arc::clone(&steps);
        cache.observe(move |before, after| {
            let shown = |pod: Option<&Arc<Pod>>| {
                let metadata = pod.map(|pod| &pod.metadata);
                let text = metadata.map(|m| format!("{:?}{:?}", m.uid, m.resource_version));
                text.unwrap_or_default()
                    .replace(['"', '(', ')'], "")
                    .replace("Some", "")
            };
            lock(&seen).push(format!("{}-{}", shown(before), shown(after)));
        });
        assert_eq!(cache.latest_revision(), 3);
        writer.apply(versioned("a", 4));
        writer.delete(versioned("a", 6));
        assert_eq!(cache.latest_revision(), 6);
        writer.replace(vec![versioned("b", 5)]);
        writer.replace(vec![versioned("c", 9)]);
        assert_eq!(
            *lock(&steps),
            ["-a3", "a3-a4", "a4-a6", "a6-", "-b5", "b5-c9"]
        );
        assert_eq!(cache.latest_revision(), 9);
    }

    /// A ConfigMap with data of the wrong type, which cannot be decoded.
    fn unreadable(name: &str, uid: &str) -> Value {
        let mut object = map(9, "", false);
        object["metadata"]["name"] = json!(name);
        object["metadata"]["uid"] = json!(uid);
        object["data"] = json!(5);
        object
    }

    #[tokio::test(start_paused = true)]
    async fn an_undecodable_object_affects_no_other_and_does_not_count_as_deleted() {
        let fake = Fake::with(vec![unreadable("new", "a"), map(1, "first", false)]);
        let maps = Api::<ConfigMap>::namespaced(fake.client(), "n");
        let cache = Cache::start(maps, watcher::Config::default());
        let text = || Some(cache.get("n", "m")?.data.as_ref()?["k"].clone());
        cache.synced().await;
        assert_eq!(text().as_deref(), Some("first"));
        assert_eq!(cache.list().len(), 1);
        until("the watch", || fake.watches() == 1).await;
        fake.send_event("ADDED", &unreadable("newer", "b"));
        fake.send_event("MODIFIED", &map(2, "second", false));
        until("the next event", || text().as_deref() == Some("second")).await;

        // The watch must restart, and the list has the object in an undecodable form.
        let expired = json!({"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410, "message": "too old"});
        let relist = async |object: Value, version: u64| {
            *lock(&fake.items) = vec![object];
            fake.send_event("ERROR", &expired);
            let listed = || *cache.changes().borrow() > version;
            until("the list", listed).await;
            until("the watch", || fake.watches() == 1).await;
        };
        let version = *cache.changes().borrow();
        relist(unreadable("m", "u"), version).await;
        assert_eq!(
            text().as_deref(),
            Some("second"),
            "the last decodable version stays"
        );
        relist(unreadable("m", "another"), version + 1).await;
        assert_eq!(text(), None, "the undecodable object has another uid");
    }
}
