//! Watches single objects, ConfigMaps and Secrets, while pods of this node use them. A node may list and watch only the
//! objects to which its own pods refer, one at a time (`plugin/pkg/auth/authorizer/node/node_authorizer.go`). The
//! kubelet does the same in `pkg/kubelet/util/manager/watch_based_manager.go`.
//!
//! An immutable object has no watch (KEP-1412). Each new user lists it again, because its name may refer to another
//! object by now. All users then read the object that exists, as they do after a mutable object was replaced. The
//! kubelet differs: it keeps the deleted object for new pods as long as another pod refers to its name.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::api::Api;
use super::cache::Key;
use super::failure::ApiFailure;
use holdfast_core::lock::lock;

/// How long an unused object stays watched: the next pod of a Job often needs the same object.
const UNUSED_RETENTION: Duration = Duration::from_secs(5);
/// Maximum time that a reader waits for the first answer.
const FIRST_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Initial and maximum delay after a failed watch.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Maximum delay after a refusal. Refusals are expected for a moment. An apiserver authorises a node for a pod's
/// objects a little after it has bound the pod. After its own start, it does so for all pods a little later.
const MAX_FORBIDDEN_PAUSE: Duration = Duration::from_secs(30);
/// A reader that requests an object ends the delay, but not before this time: with a new pod, the authorisation may
/// have arrived.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// Called when an object has changed. Must not block.
pub type OnChange = Arc<dyn Fn() + Send + Sync>;

/// A kind whose objects can be watched one by one.
pub trait Referable:
    Resource<Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug + Send + Sync + 'static
{
    /// The kind as messages name it, for instance `configmap`.
    const KIND: &'static str;
    /// Whether the object never changes and so needs no watch.
    fn is_immutable(&self) -> bool;
}

impl Referable for ConfigMap {
    const KIND: &'static str = "configmap";
    fn is_immutable(&self) -> bool {
        self.immutable == Some(true)
    }
}

impl Referable for Secret {
    const KIND: &'static str = "secret";
    fn is_immutable(&self) -> bool {
        self.immutable == Some(true)
    }
}

#[derive(Debug, Clone)]
enum Answer<K> {
    Unknown,
    Unreachable(ApiFailure),
    Missing,
    Present(Arc<K>),
}

/// The last answer of the API about an object.
#[derive(Debug, Clone)]
struct View<K> {
    answer: Answer<K>,
    /// Number of registrations before the request for this answer.
    covers: u64,
}

impl<K: Referable> View<K> {
    /// Whether another object may have replaced this one: it has no watch, and a user registered after the request.
    fn is_outdated(&self, registrations: u64) -> bool {
        matches!(&self.answer, Answer::Present(object) if object.is_immutable())
            && self.covers < registrations
    }
}

struct Entry<K> {
    view: watch::Receiver<View<K>>,
    /// Number of users that have registered so far.
    registrations: watch::Sender<u64>,
    /// The callbacks of the users, by token.
    users: Arc<Mutex<BTreeMap<u64, OnChange>>>,
    /// Ends the delay after a failed watch.
    requested: Arc<Notify>,
    /// When the last user stopped using it; `None` while it is in use.
    idle: Option<Instant>,
    _task: AbortOnDropHandle<()>,
}

struct Registry<K> {
    entries: BTreeMap<Key, Entry<K>>,
    next: u64,
}

impl<K> Registry<K> {
    /// Stops the watches that have been unused for a while; returns when the next one is due.
    fn sweep(&mut self) -> Option<Instant> {
        let over = |entry: &Entry<K>| {
            entry
                .idle
                .is_some_and(|since| since.elapsed() >= UNUSED_RETENTION)
        };
        self.entries.retain(|_, entry| !over(entry));
        let idle = self.entries.values().filter_map(|entry| entry.idle);
        idle.min().map(|since| since + UNUSED_RETENTION)
    }
}

/// The watched objects of one kind. Clones share their state.
pub struct Watched<K> {
    client: Client,
    registry: Arc<Mutex<Registry<K>>>,
    /// Notified when a user stops using an object.
    idle: Arc<Notify>,
    _janitor: Arc<AbortOnDropHandle<()>>,
}

impl<K> Clone for Watched<K> {
    fn clone(&self) -> Self {
        Watched {
            client: self.client.clone(),
            registry: Arc::clone(&self.registry),
            idle: Arc::clone(&self.idle),
            _janitor: Arc::clone(&self._janitor),
        }
    }
}

/// The registration of a user of objects. Dropping it ends the use.
pub struct Following(Vec<Box<dyn FnOnce() + Send + Sync>>);

impl Following {
    /// Registers for no object.
    #[must_use]
    pub fn nothing() -> Following {
        Following(vec![])
    }

    /// Returns a registration that calls `end` when it is dropped. `end` must not block.
    #[must_use]
    pub fn until(end: impl FnOnce() + Send + Sync + 'static) -> Following {
        Following(vec![Box::new(end)])
    }

    /// Combines two registrations.
    #[must_use]
    pub fn and(mut self, mut other: Following) -> Following {
        self.0.append(&mut other.0);
        self
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|end| end());
    }
}

impl<K: Referable> Watched<K>
where
    K::DynamicType: Default,
{
    /// Creates an empty registry.
    #[must_use]
    pub fn new(client: Client) -> Watched<K> {
        let registry: Arc<Mutex<Registry<K>>> = Arc::new(Mutex::new(Registry {
            entries: BTreeMap::new(),
            next: 0,
        }));
        let (swept, idle) = (Arc::clone(&registry), Arc::new(Notify::new()));
        let woken = Arc::clone(&idle);
        let janitor = tokio::spawn(async move {
            loop {
                woken.notified().await;
                loop {
                    let due = lock(&swept).sweep();
                    let Some(due) = due else { break };
                    tokio::time::sleep_until(due).await;
                }
            }
        });
        Watched {
            client,
            registry,
            idle,
            _janitor: Arc::new(AbortOnDropHandle::new(janitor)),
        }
    }

    fn begin(&self, (namespace, name): &Key) -> Entry<K> {
        let api = Api::namespaced(self.client.clone(), namespace);
        let (sender, view) = watch::channel(View {
            answer: Answer::Unknown,
            covers: 0,
        });
        let registrations = watch::Sender::new(0);
        let users: Arc<Mutex<BTreeMap<u64, OnChange>>> = Arc::default();
        let requested = Arc::new(Notify::new());
        self.idle.notify_one();
        let watcher = Watcher {
            api,
            fields: format!("metadata.name={name}"),
            sender,
            registrations: registrations.subscribe(),
            users: Arc::clone(&users),
        };
        let task = tokio::spawn(follow(watcher, name.clone(), Arc::clone(&requested)));
        Entry {
            view,
            registrations,
            users,
            requested,
            idle: Some(Instant::now()),
            _task: AbortOnDropHandle::new(task),
        }
    }

    /// Watches objects in a namespace and calls `on_change` for every change after the initial list.
    #[must_use]
    pub fn follow<'a>(
        &self,
        namespace: &str,
        names: impl Iterator<Item = &'a String>,
        on_change: &OnChange,
    ) -> Following {
        let mut registry = lock(&self.registry);
        let mut ends: Vec<Box<dyn FnOnce() + Send + Sync>> = vec![];
        for name in names {
            let key = (namespace.to_owned(), name.clone());
            registry.next += 1;
            let token = registry.next;
            let entry = registry
                .entries
                .entry(key.clone())
                .or_insert_with(|| self.begin(&key));
            entry.idle = None;
            entry.requested.notify_one();
            lock(&entry.users).insert(token, Arc::clone(on_change));
            entry.registrations.send_modify(|number| *number += 1);
            let (registry, idle) = (Arc::clone(&self.registry), Arc::clone(&self.idle));
            ends.push(Box::new(move || {
                if let Some(entry) = lock(&registry).entries.get_mut(&key) {
                    let mut users = lock(&entry.users);
                    users.remove(&token);
                    entry.idle = users.is_empty().then(Instant::now);
                    idle.notify_one();
                }
            }));
        }
        Following(ends)
    }

    /// Returns an object as last seen; for a new object, waits for the first answer of the API.
    pub async fn get(&self, namespace: &str, name: &str) -> Result<Arc<K>, ApiFailure> {
        let key = (namespace.to_owned(), name.to_owned());
        let (mut view, registrations) = {
            let mut registry = lock(&self.registry);
            let is_known = registry.entries.contains_key(&key);
            let entry = registry
                .entries
                .entry(key.clone())
                .or_insert_with(|| self.begin(&key));
            if is_known && lock(&entry.users).is_empty() {
                // A reader that has not registered, for instance of a driver's Secret, may belong to a new pod.
                entry.registrations.send_modify(|number| *number += 1);
            }
            // A reader needs the object, so its idle time starts again.
            entry.idle = entry.idle.map(|_| Instant::now());
            if matches!(entry.view.borrow().answer, Answer::Unreachable(_)) {
                entry.requested.notify_one();
            }
            (entry.view.clone(), *entry.registrations.borrow())
        };
        let late = || {
            ApiFailure::Timeout(format!(
                "failed to sync {} cache: timed out waiting for the condition",
                K::KIND
            ))
        };
        // A refusal may be withdrawn in a moment, so wait.
        let is_known = |view: &View<K>| {
            !view.is_outdated(registrations)
                && !matches!(
                    view.answer,
                    Answer::Unknown | Answer::Unreachable(ApiFailure::Forbidden(_))
                )
        };
        let _ = tokio::time::timeout(FIRST_ANSWER_TIMEOUT, view.wait_for(is_known)).await;
        let known = view.borrow().clone();
        if known.is_outdated(registrations) {
            return Err(late());
        }
        match known.answer {
            Answer::Unknown => Err(late()),
            Answer::Unreachable(failure) => Err(failure),
            Answer::Missing => Err(ApiFailure::NotFound(format!(
                "{} {name:?} not found",
                K::KIND
            ))),
            Answer::Present(object) => Ok(object),
        }
    }

    /// Returns the number of watched objects.
    #[must_use]
    pub fn len(&self) -> usize {
        lock(&self.registry).entries.len()
    }

    /// Whether no object is watched.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Watches an object until the task is dropped. Failures go to the callers that request the object, which put them into
/// their pod's events; the log would repeat them at each retry.
async fn follow<K: Referable>(mut watcher: Watcher<K>, name: String, requested: Arc<Notify>)
where
    K::DynamicType: Default,
{
    let (mut from, mut pause) = (None, RETRY_PAUSE.0);
    loop {
        let begun = Instant::now();
        match watcher.list_and_watch(&mut from).await {
            // The object cannot change, but the name may refer to another one when the next user registers.
            Ok(WatchEnd::UntilRegistration) => {
                if watcher.next_registration().await.is_err() {
                    return;
                }
                (from, pause) = (None, RETRY_PAUSE.0);
                continue;
            }
            // Servers end watches after some minutes. If a server ends one at once, the next request waits.
            Ok(WatchEnd::ForNow) if begun.elapsed() > RETRY_PAUSE.1 => {
                pause = RETRY_PAUSE.0;
                continue;
            }
            Ok(WatchEnd::ForNow) => {}
            Err(ApiFailure::Expired(_)) if from.take().is_some() => continue,
            Err(failure) => {
                tracing::debug!(%failure, kind = K::KIND, name, "watch interrupted, resuming");
                let most = match failure {
                    ApiFailure::Forbidden(_) => MAX_FORBIDDEN_PAUSE,
                    _ => RETRY_PAUSE.1,
                };
                pause = failure.retry_after().unwrap_or(pause).min(most);
                watcher.unreachable(failure);
            }
        }
        wait_before_retry(pause, &requested).await;
        pause = (pause * 2).min(MAX_FORBIDDEN_PAUSE);
    }
}

/// Waits after a failed watch; a caller that requests the object shortens the delay.
async fn wait_before_retry(pause: Duration, requested: &Notify) {
    let least = pause.min(MIN_PAUSE);
    tokio::time::sleep(least).await;
    let _ = tokio::time::timeout(pause - least, requested.notified()).await;
}

/// Why a watch stopped.
enum WatchEnd {
    /// The server ended it.
    ForNow,
    /// The object is immutable: no request is needed before another user registers.
    UntilRegistration,
}

/// The state needed to watch one object.
struct Watcher<K> {
    api: Api<K>,
    fields: String,
    sender: watch::Sender<View<K>>,
    registrations: watch::Receiver<u64>,
    users: Arc<Mutex<BTreeMap<u64, OnChange>>>,
}

impl<K: Referable> Watcher<K>
where
    K::DynamicType: Default,
{
    /// Lists the object unless `from` is the version to continue from, and watches it.
    async fn list_and_watch(&self, from: &mut Option<String>) -> Result<WatchEnd, ApiFailure> {
        let version = match from.clone() {
            Some(version) => version,
            None => {
                let covers = self.registered();
                let list = ListParams::default().fields(&self.fields);
                let mut listed = self.api.list(&list).await?;
                if self.publish(listed.items.pop(), covers) {
                    return Ok(WatchEnd::UntilRegistration);
                }
                let version = listed.version.unwrap_or_default();
                from.insert(version).clone()
            }
        };
        let parameters = WatchParams::default().fields(&self.fields);
        let mut events = pin!(self.api.watch(&parameters, &version).await?);
        while let Some(event) = events.next().await {
            let (object, there) = match event? {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => (object, true),
                WatchEvent::Deleted(object) => (object, false),
                WatchEvent::Bookmark(mark) => {
                    *from = Some(mark.metadata.resource_version);
                    continue;
                }
                WatchEvent::Error(status) => return Err((*status).into()),
            };
            from.clone_from(&object.meta().resource_version);
            if self.publish(there.then_some(object), self.registered()) {
                return Ok(WatchEnd::UntilRegistration);
            }
        }
        Ok(WatchEnd::ForNow)
    }

    fn registered(&self) -> u64 {
        *self.registrations.borrow()
    }

    /// Waits until a user registers that the last answer does not cover. Fails if the entry was removed.
    async fn next_registration(&mut self) -> Result<(), watch::error::RecvError> {
        let covers = self.sender.borrow().covers;
        let is_new = |number: &u64| *number > covers;
        self.registrations.wait_for(is_new).await.map(|_| ())
    }

    /// Records a failed request. The last answer stays valid if the apiserver does not answer. If it refuses, an
    /// outdated answer becomes invalid: no pod of this node may read the object any more.
    fn unreachable(&self, failure: ApiFailure) {
        let covers = self.registered();
        self.sender.send_if_modified(|view| {
            let is_blind = matches!(view.answer, Answer::Unknown | Answer::Unreachable(_));
            let is_refused =
                view.is_outdated(covers) && matches!(failure, ApiFailure::Forbidden(_));
            if is_blind || is_refused {
                view.answer = Answer::Unreachable(failure);
            }
            view.covers = covers;
            true
        });
    }

    /// Records the object's state, and calls the users' callbacks on a change after the initial list. Returns whether
    /// the object is immutable.
    fn publish(&self, object: Option<K>, covers: u64) -> bool {
        let now = match object {
            Some(mut object) => {
                object.meta_mut().managed_fields = None;
                Answer::Present(Arc::new(object))
            }
            None => Answer::Missing,
        };
        let over = matches!(&now, Answer::Present(object) if object.is_immutable());
        let version = |answer: &Answer<K>| match answer {
            Answer::Present(object) => object
                .meta()
                .uid
                .clone()
                .zip(object.meta().resource_version.clone()),
            _ => None,
        };
        let mut changed = false;
        self.sender.send_modify(|view| {
            let first = matches!(view.answer, Answer::Unknown);
            changed = !first
                && (version(&view.answer) != version(&now)
                    || matches!(view.answer, Answer::Unreachable(_)));
            *view = View {
                answer: now,
                covers,
            };
        });
        if changed {
            let callbacks: Vec<OnChange> = lock(&self.users).values().cloned().collect();
            callbacks.iter().for_each(|call| call());
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::Value;

    use super::super::fake::{Fake, map, until};
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_object_is_watched_while_it_has_users_and_they_are_notified() {
        let fake = Fake::with(vec![]);
        let watched: Watched<ConfigMap> = Watched::new(fake.client());
        let notified = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&notified);
        let on_change: OnChange = Arc::new(move || _ = counted.fetch_add(1, Ordering::Relaxed));
        let names = ["m".to_owned()];
        let (one, two) = (
            watched.follow("n", names.iter(), &on_change),
            watched.follow("n", names.iter(), &on_change),
        );
        assert!(matches!(
            watched.get("n", "m").await,
            Err(ApiFailure::NotFound(_))
        ));
        until("the watch", || fake.watches() == 1).await;
        assert_eq!(
            notified.load(Ordering::Relaxed),
            0,
            "the initial list is not a change"
        );
        let send_event = |kind: &str, object: Value| fake.send_event(kind, &object);
        send_event("ADDED", map(2, "a", false));
        until("both users are notified", || {
            notified.load(Ordering::Relaxed) == 2
        })
        .await;
        drop(one);
        send_event("MODIFIED", map(3, "b", false));
        until("the other user is notified", || {
            notified.load(Ordering::Relaxed) == 3
        })
        .await;
        assert_eq!(
            watched
                .get("n", "m")
                .await
                .expect("it is there")
                .data
                .as_ref()
                .expect("data")["k"],
            "b"
        );
        drop(two);
        tokio::time::sleep(UNUSED_RETENTION / 2).await;
        assert_eq!(
            watched.len(),
            1,
            "the watch continues for a while without users"
        );
        tokio::time::sleep(UNUSED_RETENTION).await;
        assert!(watched.is_empty());
        until("the watch is closed", || fake.watches() == 0).await;
    }

    #[tokio::test(start_paused = true)]
    async fn immutable_objects_are_not_watched() {
        let fake = Fake::with(vec![map(1, "a", true)]);
        let watched: Watched<ConfigMap> = Watched::new(fake.client());
        assert_eq!(
            watched
                .get("n", "m")
                .await
                .expect("it is there")
                .data
                .as_ref()
                .expect("data")["k"],
            "a"
        );
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(fake.watches(), 0);
        assert!(watched.get("n", "m").await.is_ok());
        // A reader without a registration reads the object that exists.
        *lock(&fake.items) = vec![map(2, "b", true)];
        let read = watched.get("n", "m").await.expect("it is there");
        assert_eq!(read.data.as_ref().expect("data")["k"], "b");
    }

    /// The data that a new user reads, with its registration.
    async fn read_by_new_user(watched: &Watched<ConfigMap>) -> (Option<String>, Following) {
        let on_change: OnChange = Arc::new(|| ());
        let following = watched.follow("n", ["m".to_owned()].iter(), &on_change);
        let read = watched.get("n", "m").await.ok();
        let value = read.and_then(|map| map.data.clone()?.remove("k"));
        (value, following)
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_user_reads_the_replacement_of_an_immutable_object() {
        let fake = Fake::with(vec![map(1, "a", true)]);
        let watched: Watched<ConfigMap> = Watched::new(fake.client());
        let changes = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&changes);
        let on_change: OnChange = Arc::new(move || _ = counted.fetch_add(1, Ordering::Relaxed));
        let old_user = watched.follow("n", ["m".to_owned()].iter(), &on_change);
        let replace = |version: u32, text: &str| {
            let mut replaced = map(version, text, true);
            replaced["metadata"]["uid"] = format!("u{version}").into();
            *lock(&fake.items) = vec![replaced];
        };
        let value = |text: &str| Some(text.to_owned());
        assert_eq!(read_by_new_user(&watched).await.0, value("a"));
        assert_eq!(changes.load(Ordering::Relaxed), 0);
        // Another pod still refers to the name: all read the object that exists, and the old user is notified.
        replace(2, "b");
        let (read, new_user) = read_by_new_user(&watched).await;
        assert_eq!(read, value("b"));
        assert_eq!(changes.load(Ordering::Relaxed), 1);
        // No pod refers to the name any more, and its entry is still cached.
        drop((old_user, new_user));
        replace(3, "c");
        let (read, user) = read_by_new_user(&watched).await;
        assert_eq!((read, watched.len()), (value("c"), 1));
        lock(&fake.items).clear();
        assert_eq!(read_by_new_user(&watched).await.0, None, "deleted");
        // A mutable object in its place is watched.
        until("the watch", || fake.watches() == 1).await;
        *lock(&fake.items) = vec![map(9, "d", false)];
        fake.send_event("ADDED", &map(9, "d", false));
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert_eq!(read_by_new_user(&watched).await.0, value("d"));
        drop(user);
    }

    #[tokio::test(start_paused = true)]
    async fn an_immutable_object_is_readable_during_an_outage_but_not_when_forbidden() {
        let fake = Fake::with(vec![map(1, "a", true)]);
        let watched: Watched<ConfigMap> = Watched::new(fake.client());
        let (_, _user) = read_by_new_user(&watched).await;
        let value = |text: &str| Some(text.to_owned());
        fake.fail_lists(Some(503));
        assert_eq!(read_by_new_user(&watched).await.0, value("a"));
        fake.fail_lists(Some(403));
        let (refused, _second) = read_by_new_user(&watched).await;
        assert_eq!(refused, None, "the apiserver forbids reading the object");
        fake.fail_lists(None);
        tokio::time::sleep(MIN_PAUSE).await;
        assert_eq!(read_by_new_user(&watched).await.0, value("a"));
    }
}
