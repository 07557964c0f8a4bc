//! The store of the apiserver: an ordered map from key to bytes with a single revision counter.
//!
//! Guarantees, as clients expect from etcd:
//! - revisions strictly increase and are never reused, also after a crash;
//! - a write names the revision that it expects, and fails if another write came first;
//! - a write is durable before it is visible in a response, a list or a watch;
//! - every change after the compaction point can be read in order, with the previous content.
//!
//! A single thread commits. Writes that queue up during a commit form the next one (group commit). Reads use memory
//! only. A watcher reads changes from the bounded history of its kind at its own pace, and is woken by changes of this
//! kind only. If it falls behind the history, it gets [`Compacted`] and never misses a change silently.

mod disk;
mod health;
mod history;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};

use disk::Disk;
pub(crate) use disk::DiskError;
use health::Health;
use history::{History, Retention};
pub use hyper::body::Bytes;

/// Maximum number of writes per commit.
const MAX_BATCH: usize = 128;
/// How long the committing thread waits for further writes; about as long as a sync. It waits only if several clients
/// write concurrently: the last commit had more than one write and was less than [`CONCURRENT_WITHIN`] ago.
const GATHER_DELAY: Duration = Duration::from_millis(2);
const CONCURRENT_WITHIN: Duration = Duration::from_millis(5);

/// Labels and selectable fields of a stored object, so that selectors need not parse its bytes.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Attrs {
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
    /// The kind's selectable fields, for instance `spec.nodeName`, and their values.
    pub fields: Vec<(&'static str, String)>,
}

impl Attrs {
    /// The value of a selectable field.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&str> {
        let field = self.fields.iter().find(|(field, _)| *field == name);
        field.map(|(_, value)| value.as_str())
    }
}

/// One version of one object.
#[derive(Debug, Clone)]
pub struct Record {
    /// The JSON text, including `metadata.resourceVersion`.
    pub value: Bytes,
    /// The attributes that selectors match.
    pub attrs: Arc<Attrs>,
    /// The revision that wrote this version.
    pub revision: u64,
}

/// The kind of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The key was created or replaced.
    Put,
    /// The key was removed.
    Delete,
}

/// One change, as seen by watchers.
#[derive(Debug)]
pub struct Event {
    /// The revision of this change.
    pub revision: u64,
    /// The key that changed.
    pub key: Arc<str>,
    /// The kind of the change.
    pub change: Change,
    /// The new content; for a deletion, the last content with the deletion's revision.
    pub record: Record,
    /// The previous content; `None` if the key was created.
    pub previous: Option<Record>,
}

/// The condition of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// The key does not exist.
    Absent,
    /// The key has exactly this revision.
    Revision(u64),
}

/// Renders the final bytes once the revision is assigned.
pub(crate) type Render = Box<dyn FnOnce(u64) -> Bytes + Send>;

/// A conditional write.
pub struct Write {
    /// The key, for instance `pods/default/web-1`.
    pub key: String,
    /// The condition.
    pub expect: Expect,
    /// Another key and the revision it must still have, such as the namespace of a new object.
    pub requires: Option<(String, u64)>,
    /// Put or delete.
    pub change: Change,
    /// Renders the bytes; for a deletion, the last content.
    pub render: Render,
    /// The attributes of the new content.
    pub attrs: Arc<Attrs>,
}

/// Why a write failed.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// Another write came first. Contains the current version.
    #[error("the key is not at the expected revision")]
    Conflict(Option<Record>),
    /// The key in `requires` has changed.
    #[error("the key in `requires` is not at the expected revision")]
    Superseded,
    /// The disk write failed; the write is not visible.
    #[error("writing to the store failed: {0}")]
    Disk(String),
    /// The store is shutting down.
    #[error("the store is closed")]
    Closed,
}

/// The requested history is no longer available.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("too old resource version: {requested} ({oldest})")]
pub struct Compacted {
    /// The requested revision.
    pub requested: u64,
    /// The oldest revision from which changes are available.
    pub oldest: u64,
}

#[derive(Default)]
struct State {
    map: BTreeMap<Arc<str>, Record>,
    history: History,
    revision: u64,
}

type Request = (Write, oneshot::Sender<Result<Record, WriteError>>);

/// Announces the newest revision: to some receivers all revisions, to others only those of one kind.
#[derive(Clone)]
struct ChangeNotifier {
    all: watch::Sender<u64>,
    kinds: Arc<Mutex<HashMap<String, watch::Sender<u64>>>>,
}

impl ChangeNotifier {
    fn new(revision: u64) -> ChangeNotifier {
        ChangeNotifier {
            all: watch::Sender::new(revision),
            kinds: Arc::default(),
        }
    }

    fn of(&self, kind: &str) -> watch::Receiver<u64> {
        let mut kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        let head = kinds.entry(kind.to_owned()).or_default();
        head.subscribe()
    }

    fn notify(&self, revision: u64, changed: &BTreeSet<String>) {
        self.all.send_replace(revision);
        let kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        for head in changed.iter().filter_map(|kind| kinds.get(kind)) {
            head.send_replace(revision);
        }
    }
}

/// A handle to the store; clones share it. The committing thread exits when the last clone is dropped.
#[derive(Clone)]
pub struct Store {
    state: Arc<RwLock<State>>,
    queue: mpsc::Sender<Request>,
    notifier: ChangeNotifier,
    health: Health,
}

impl Store {
    /// Opens or creates the store in `file`. `index` computes the attributes of a key's bytes.
    pub fn open(file: &Path, index: impl Fn(&str, &[u8]) -> Attrs) -> Result<Store, DiskError> {
        let (disk, loaded) = Disk::open(file)?;
        Ok(Self::start(Some(disk), loaded, index, Retention::default()))
    }

    /// A store without a file, for tests.
    #[must_use]
    pub fn in_memory() -> Store {
        Self::start(
            None,
            disk::Loaded::default(),
            |_, _| Attrs::default(),
            Retention::default(),
        )
    }

    /// The same with this minimum retention of changes, for tests.
    #[must_use]
    pub fn in_memory_for(fresh: Duration) -> Store {
        let retention = Retention {
            fresh,
            ..Retention::default()
        };
        let loaded = disk::Loaded::default();
        Self::start(None, loaded, |_, _| Attrs::default(), retention)
    }

    fn start(
        disk: Option<Disk>,
        loaded: disk::Loaded,
        index: impl Fn(&str, &[u8]) -> Attrs,
        retention: Retention,
    ) -> Store {
        let mut state = State {
            revision: loaded.revision,
            ..State::default()
        };
        let record = |key: &str, revision, value: Bytes| Record {
            attrs: Arc::new(index(key, &value)),
            value,
            revision,
        };
        for (key, revision, value) in loaded.entries {
            let record = record(&key, revision, value);
            state.map.insert(key.into(), record);
        }
        let (since, events) = replay(&state.map, loaded.since, loaded.changes, record);
        state.history = History::new(since, &loaded.compacted, retention);
        // The time of old changes is unknown, so they count as new.
        let now = Instant::now();
        let dropped = events
            .into_iter()
            .flat_map(|event| state.history.push(event, now))
            .collect();
        let notifier = ChangeNotifier::new(state.revision);
        let notify = notifier.clone();
        let state = Arc::new(RwLock::new(state));
        let (queue, requests) = mpsc::channel(1024);
        let shared = Arc::clone(&state);
        let health = Health::default();
        let commits = health.clone();
        std::thread::Builder::new()
            .name("store".into())
            .spawn(move || commit_loop(disk, dropped, &shared, requests, &notify, &commits))
            .expect("spawning the store's thread at startup succeeds");
        Store {
            state,
            queue,
            notifier,
            health,
        }
    }

    /// Whether the store accepts writes. Does not wait for a write.
    ///
    /// # Errors
    ///
    /// Why the last write failed, or that a write hangs.
    pub fn check(&self) -> Result<(), String> {
        if self.queue.is_closed() {
            return Err(WriteError::Closed.to_string());
        }
        self.health.check(Instant::now())
    }

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state
            .read()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The newest revision.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.read().revision
    }

    /// The newest version of `key`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<Record> {
        self.read().map.get(key).cloned()
    }

    /// All keys below `prefix` in order, and the revision of this list.
    #[must_use]
    pub fn list(&self, prefix: &str) -> (Vec<(Arc<str>, Record)>, u64) {
        let state = self.read();
        let items = state
            .map
            .range::<str, _>((
                std::ops::Bound::Included(prefix),
                std::ops::Bound::Unbounded,
            ))
            .take_while(|(key, _)| key.starts_with(prefix))
            .map(|(key, record)| (Arc::clone(key), record.clone()))
            .collect();
        (items, state.revision)
    }

    /// Like [`Store::list`], but at `revision`, computed from the changes since then.
    pub(crate) fn list_at(
        &self,
        prefix: &str,
        revision: u64,
    ) -> Result<Vec<(Arc<str>, Record)>, Compacted> {
        let (items, _) = self.list(prefix);
        let mut then: BTreeMap<Arc<str>, Record> = items.into_iter().collect();
        let (changes, _) = self.changes(revision, prefix, usize::MAX)?;
        for event in changes.into_iter().rev() {
            match &event.previous {
                Some(record) => then.insert(Arc::clone(&event.key), record.clone()),
                None => then.remove(&event.key),
            };
        }
        Ok(then.into_iter().collect())
    }

    /// The first `most` changes below `prefix`, which names a kind, that are newer than `after`, oldest first. Also
    /// returns the revision up to which they are complete.
    pub fn changes(
        &self,
        after: u64,
        prefix: &str,
        most: usize,
    ) -> Result<(Vec<Arc<Event>>, u64), Compacted> {
        let state = self.read();
        let changes = state.history.after(after, prefix, most)?;
        let complete = match changes.last() {
            Some(last) if changes.len() == most => last.revision,
            _ => state.revision,
        };
        Ok((changes, complete))
    }

    /// Receives the newest revision.
    #[must_use]
    pub fn head(&self) -> watch::Receiver<u64> {
        self.notifier.all.subscribe()
    }

    /// Receives the revisions of changes to the kind that `prefix` names. Watchers wait
    /// for it and then call [`Store::changes`].
    #[must_use]
    pub fn head_of(&self, prefix: &str) -> watch::Receiver<u64> {
        self.notifier.of(history::kind(prefix))
    }

    /// Performs a conditional write; it is durable when this function returns.
    pub async fn write(&self, write: Write) -> Result<Record, WriteError> {
        let (reply, answer) = oneshot::channel();
        self.queue
            .send((write, reply))
            .await
            .map_err(|_| WriteError::Closed)?;
        answer.await.map_err(|_| WriteError::Closed)?
    }
}

/// Takes queued writes, decides each against the state after the previous ones, and commits them
/// together. Readers see them only after the commit.
fn commit_loop(
    mut disk: Option<Disk>,
    // Changes to delete from the file: they are no longer in memory.
    mut dropped: Vec<(String, u64)>,
    state: &RwLock<State>,
    mut requests: mpsc::Receiver<Request>,
    notifier: &ChangeNotifier,
    health: &Health,
) {
    let mut last_commit: Option<Instant> = None;
    while let Some(first) = requests.blocking_recv() {
        if disk.is_some() && last_commit.is_some_and(|at| at.elapsed() < CONCURRENT_WITHIN) {
            std::thread::sleep(GATHER_DELAY);
        }
        let mut batch = vec![first];
        while batch.len() < MAX_BATCH
            && let Ok(next) = requests.try_recv()
        {
            batch.push(next);
        }
        let several = batch.len() > 1;
        health.begin();
        let (events, replies) = decide(state, batch);
        let committed = match (&mut disk, events.is_empty()) {
            (Some(disk), false) => disk.commit(&events, &dropped, &readable(state)),
            _ => Ok(()),
        };
        health.end(&committed, !events.is_empty());
        last_commit = several.then(Instant::now);
        match committed {
            Ok(()) => {
                if !events.is_empty() {
                    dropped.clear();
                }
                let changed = events.iter().map(|e| history::kind(&e.key).to_owned());
                let changed = changed.collect();
                dropped.append(&mut publish(state, events));
                notifier.notify(readable(state).revision, &changed);
                for (reply, result) in replies {
                    // The receiver may be dropped; the write is committed nevertheless.
                    let _ = reply.send(result);
                }
            }
            Err(error) => {
                let text = error.to_string();
                tracing::error!(error = %text, "writing to the store failed; the affected requests fail");
                for (reply, result) in replies {
                    let _ = reply.send(result.and_then(|_| Err(WriteError::Disk(text.clone()))));
                }
            }
        }
    }
}

type Replies = Vec<(
    oneshot::Sender<Result<Record, WriteError>>,
    Result<Record, WriteError>,
)>;

fn readable(state: &RwLock<State>) -> std::sync::RwLockReadGuard<'_, State> {
    let state = state.read();
    state.unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn decide(state: &RwLock<State>, batch: Vec<Request>) -> (Vec<Event>, Replies) {
    let state = readable(state);
    let mut overlay: HashMap<Arc<str>, Option<Record>> = HashMap::new();
    let mut revision = state.revision;
    let mut events = Vec::with_capacity(batch.len());
    let mut replies = Vec::with_capacity(batch.len());
    for (write, reply) in batch {
        let key: Arc<str> = write.key.as_str().into();
        let at = |key: &str| match overlay.get(key) {
            Some(record) => record.clone(),
            None => state.map.get(key).cloned(),
        };
        let now = at(&key);
        if let Some((other, revision)) = &write.requires
            && at(other).map(|record| record.revision) != Some(*revision)
        {
            replies.push((reply, Err(WriteError::Superseded)));
            continue;
        }
        let fits = match (write.expect, &now) {
            (Expect::Absent, None) => true,
            (Expect::Revision(expected), Some(record)) => record.revision == expected,
            _ => false,
        };
        if !fits {
            replies.push((reply, Err(WriteError::Conflict(now))));
            continue;
        }
        revision += 1;
        // Most changes do not affect the attributes, so versions in the history share them.
        let attrs = match &now {
            Some(before) if before.attrs == write.attrs => Arc::clone(&before.attrs),
            _ => write.attrs,
        };
        let record = Record {
            value: (write.render)(revision),
            attrs,
            revision,
        };
        overlay.insert(
            Arc::clone(&key),
            (write.change == Change::Put).then(|| record.clone()),
        );
        events.push(Event {
            revision,
            key,
            change: write.change,
            record: record.clone(),
            previous: now,
        });
        replies.push((reply, Ok(record)));
    }
    (events, replies)
}

/// Publishes committed changes to readers. Returns the changes dropped from the history.
fn publish(state: &RwLock<State>, events: Vec<Event>) -> Vec<(String, u64)> {
    let mut state = state
        .write()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let (mut dropped, now) = (vec![], Instant::now());
    for event in events {
        match event.change {
            Change::Put => state
                .map
                .insert(Arc::clone(&event.key), event.record.clone()),
            Change::Delete => state.map.remove(&event.key),
        };
        state.revision = event.revision;
        dropped.append(&mut state.history.push(Arc::new(event), now));
    }
    dropped
}

/// Reconstructs the changes since `since`, oldest first, backwards from the newest versions in `map`. Also returns the
/// revision after which they are complete.
fn replay(
    map: &BTreeMap<Arc<str>, Record>,
    since: u64,
    changes: Vec<disk::Replaced>,
    record: impl Fn(&str, u64, Bytes) -> Record,
) -> (u64, Vec<Arc<Event>>) {
    // The versions before the changes that are already reconstructed.
    let mut before: HashMap<Arc<str>, Option<Record>> = HashMap::new();
    let mut events = vec![];
    let mut complete = since;
    for change in changes.into_iter().rev() {
        let key: Arc<str> = change.key.as_str().into();
        let now = match before.get(&key) {
            Some(record) => record.clone(),
            None => map.get(&key).cloned(),
        };
        let (what, now) = match (change.last, now) {
            (None, Some(now)) if now.revision == change.revision => (Change::Put, now),
            (Some(last), None) => (Change::Delete, record(&key, change.revision, last)),
            _ => {
                tracing::warn!(
                    revision = change.revision,
                    "the history in the store's file has a gap; older changes are dropped"
                );
                complete = change.revision;
                break;
            }
        };
        let previous = change
            .previous
            .map(|(revision, value)| record(&key, revision, value));
        before.insert(Arc::clone(&key), previous.clone());
        events.push(Arc::new(Event {
            revision: change.revision,
            key,
            change: what,
            record: now,
            previous,
        }));
    }
    events.reverse();
    (complete, events)
}

#[cfg(test)]
mod tests;
