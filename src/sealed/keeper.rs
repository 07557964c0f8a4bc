//! Seals values in the background, while few pods start: pods that start wait for no disk.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::SignedDuration;
use k8s_openapi::api::core::v1::{Node, NodeStatus, Pod, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::Notify;

use super::Kind;
use super::Vault;
use holdfast_core::lock::lock;
use holdfast_core::node::offline::OfflineStart;
use holdfast_core::{
    pod::{self, references},
    volume::{claims, payload},
};
use holdfast_kubeapi::Cache;
use holdfast_sys::clock::Clock;

/// How long no new value must arrive before all are written, and how often this wait is repeated at most. Pods that
/// start have priority at the disk.
const QUIET_PERIOD: Duration = Duration::from_secs(3);
const MAX_QUIET_WAITS: u32 = 20;

/// The name of the list of pods.
const INDEX: &str = "index";
/// The name of our own Node.
const OWN: &str = "own";
/// The name of the time when an apiserver answered last. The interval at which that time is written. The age at which
/// sealed values become invalid.
const APISERVER: &str = "apiserver";
const CONFIRMED_INTERVAL: SignedDuration = SignedDuration::from_hours(1);
const MAX_AGE: SignedDuration = SignedDuration::from_hours(7 * 24);

type Name = (Kind, String);

/// Accepts values to seal. Clones share their state.
#[derive(Clone)]
pub struct Keeper(Arc<Inner>);

struct Inner {
    vault: Vault,
    /// Values to write; `None` removes the value.
    waiting: Mutex<BTreeMap<Name, Option<Vec<u8>>>>,
    /// Digests of accepted values, so that only changes are written.
    accepted: Mutex<BTreeMap<Name, u64>>,
    services: Vec<Arc<Service>>,
    offline: AtomicBool,
    /// Whether values of other pods than static ones are sealed.
    keeps_pods: bool,
    clock: Clock,
    /// When an apiserver answered last, in seconds since 1970; and the time that was written.
    confirmed: AtomicI64,
    confirmed_written: AtomicI64,
    /// For these kinds, only these names are still needed.
    needed: Mutex<Option<BTreeMap<Kind, BTreeSet<String>>>>,
    changed: Notify,
}

fn digest(bytes: &[u8]) -> u64 {
    use std::hash::Hasher as _;
    let mut hasher = std::hash::DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

impl Keeper {
    /// Creates a keeper for a vault, and begins to write.
    #[must_use]
    pub(super) fn start(vault: Vault, offline: OfflineStart, clock: Clock) -> Keeper {
        // A vault without this time is valid from now.
        let now = clock.now().as_second();
        let confirmed = vault.get(Kind::Confirmed, APISERVER).unwrap_or(now);
        let is_old = now - confirmed > MAX_AGE.as_secs();
        if is_old {
            tracing::warn!(
                days = (now - confirmed) / 86_400,
                "no apiserver has confirmed the sealed data for a week; removing what was kept for starts without an apiserver"
            );
        }
        let keeps_pods = offline.pods_after().is_some();
        for kind in Kind::ALL {
            let is_kept = !is_old && (keeps_pods || kind.is_for_static_pods());
            if is_kept {
                continue;
            }
            if let Err(error) = vault.retain(kind, &BTreeSet::new()) {
                tracing::warn!(%error, kind = kind.dir(), "removing sealed data that is no longer to be kept failed");
            }
        }
        let services = vault
            .get::<Vec<Service>>(Kind::Services, "all")
            .unwrap_or_default()
            .into_iter()
            .map(Arc::new)
            .collect();
        let keeper = Keeper(Arc::new(Inner {
            vault,
            waiting: Mutex::default(),
            accepted: Mutex::default(),
            services,
            offline: AtomicBool::new(false),
            keeps_pods,
            clock,
            confirmed: AtomicI64::new(confirmed),
            confirmed_written: AtomicI64::new(0),
            needed: Mutex::default(),
            changed: Notify::new(),
        }));
        tokio::spawn(write(keeper.clone()));
        keeper
    }

    /// Whether the API has not answered since the start.
    #[must_use]
    pub(crate) fn is_offline(&self) -> bool {
        self.0.offline.load(Ordering::Relaxed)
    }

    /// Sets whether the API has not answered since the start.
    pub fn set_offline(&self, offline: bool) {
        self.0.offline.store(offline, Ordering::Relaxed);
    }

    /// Records that an apiserver has answered: the sealed values are up to date.
    pub fn confirm(&self) {
        let now = self.0.clock.now().as_second();
        self.0.confirmed.store(now, Ordering::Relaxed);
        let confirmed_written = self.0.confirmed_written.load(Ordering::Relaxed);
        if (now - confirmed_written).abs() >= CONFIRMED_INTERVAL.as_secs() {
            self.0.confirmed_written.store(now, Ordering::Relaxed);
            self.put(Kind::Confirmed, APISERVER, &now);
        }
    }

    /// Whether the last answer of an apiserver is so old that the sealed values are no longer valid.
    fn is_old(&self) -> bool {
        let confirmed = self.0.confirmed.load(Ordering::Relaxed);
        self.0.clock.now().as_second() - confirmed > MAX_AGE.as_secs()
    }

    fn seals(&self, kind: Kind) -> bool {
        self.0.keeps_pods || kind.is_for_static_pods()
    }

    /// Returns the services from before the start.
    #[must_use]
    pub(crate) fn last_services(&self) -> &[Arc<Service>] {
        &self.0.services
    }

    /// Returns the pods that were bound to this node before the start.
    #[must_use]
    pub async fn last_pods(&self) -> Vec<Arc<Pod>> {
        let inner = Arc::clone(&self.0);
        let unseal = move || -> Vec<Arc<Pod>> {
            let uids: Vec<String> = inner.vault.get(Kind::Pods, INDEX).unwrap_or_default();
            uids.iter()
                .filter_map(|uid| inner.vault.get::<Pod>(Kind::Pods, uid))
                .map(Arc::new)
                .collect()
        };
        tokio::task::spawn_blocking(unseal)
            .await
            .unwrap_or_else(|error| {
                tracing::error!(%error, "the unsealing task failed");
                vec![]
            })
    }

    /// Returns the Node from before the start, with the fields that admission reads.
    #[must_use]
    pub async fn last_node(&self) -> Option<Node> {
        let keeper = self.clone();
        let unseal = move || keeper.get(Kind::Node, OWN);
        tokio::task::spawn_blocking(unseal)
            .await
            .unwrap_or_else(|error| {
                tracing::error!(%error, "the unsealing task failed");
                None
            })
    }

    /// Seals the Node's fields that admission reads: labels, taints and resources. A heartbeat changes none of them.
    pub fn put_node(&self, node: &Node) {
        let status = node.status.as_ref();
        let kept = Node {
            metadata: ObjectMeta {
                name: node.metadata.name.clone(),
                uid: node.metadata.uid.clone(),
                labels: node.metadata.labels.clone(),
                ..ObjectMeta::default()
            },
            spec: node.spec.clone(),
            status: Some(NodeStatus {
                allocatable: status.and_then(|s| s.allocatable.clone()),
                ..NodeStatus::default()
            }),
        };
        self.put(Kind::Node, OWN, &kept);
    }

    /// Seals a value soon, if it has changed.
    pub fn put(&self, kind: Kind, name: &str, value: &impl Serialize) {
        let Some(content) = self
            .seals(kind)
            .then(|| Vault::content(name, value).ok())
            .flatten()
        else {
            return;
        };
        let (name, digest) = ((kind, name.to_owned()), digest(&content));
        let before = lock(&self.0.accepted).insert(name.clone(), digest);
        if before != Some(digest) {
            lock(&self.0.waiting).insert(name, Some(content));
            self.0.changed.notify_one();
        }
    }

    /// Removes the value that was sealed under a name.
    pub fn remove(&self, kind: Kind, name: &str) {
        let name = (kind, name.to_owned());
        if lock(&self.0.accepted).remove(&name).is_some() {
            lock(&self.0.waiting).insert(name, None);
            self.0.changed.notify_one();
        }
    }

    /// Records that for these kinds only these names are still needed.
    fn retain(&self, needed: BTreeMap<Kind, BTreeSet<String>>) {
        let unneeded = |name: &Name| {
            needed
                .get(&name.0)
                .is_some_and(|names| !names.contains(&name.1))
        };
        lock(&self.0.accepted).retain(|name, _| !unneeded(name));
        lock(&self.0.waiting).retain(|name, _| !unneeded(name));
        *lock(&self.0.needed) = Some(needed);
        self.0.changed.notify_one();
    }

    /// Returns the value that was sealed under a name, or is about to be.
    #[must_use]
    pub fn get<T: DeserializeOwned>(&self, kind: Kind, name: &str) -> Option<T> {
        if !self.seals(kind) || self.is_old() {
            return None;
        }
        let waiting = lock(&self.0.waiting).get(&(kind, name.to_owned())).cloned();
        match waiting {
            Some(content) => Vault::value(name, &content?),
            None => self.0.vault.get(kind, name),
        }
    }
}

async fn write(keeper: Keeper) {
    loop {
        keeper.0.changed.notified().await;
        // Waits until a burst is over, with a limit.
        for _ in 0..MAX_QUIET_WAITS {
            if tokio::time::timeout(QUIET_PERIOD, keeper.0.changed.notified())
                .await
                .is_err()
            {
                break;
            }
        }
        let batch = std::mem::take(&mut *lock(&keeper.0.waiting));
        let needed = lock(&keeper.0.needed).take();
        let inner = Arc::clone(&keeper.0);
        let done = tokio::task::spawn_blocking(move || {
            // Removed before the batch is written: the batch may have values of pods that came after the names were
            // collected.
            for (kind, names) in needed.into_iter().flatten() {
                if let Err(error) = inner.vault.retain(kind, &names) {
                    tracing::warn!(%error, kind = kind.dir(), "removing sealed data that no pod needs failed");
                }
            }
            for ((kind, name), value) in batch {
                let written = match value {
                    Some(content) => inner.vault.seal(kind, &name, content),
                    None => inner.vault.remove(kind, &name),
                };
                if let Err(error) = written {
                    tracing::warn!(%error, kind = kind.dir(), "sealing data for a start without an apiserver failed");
                }
            }
        });
        if let Err(error) = done.await {
            tracing::error!(%error, "the sealing task failed");
        }
    }
}

/// Returns the names of the sealed objects that these pods need.
fn needed(pods: &[Arc<Pod>]) -> BTreeMap<Kind, BTreeSet<String>> {
    let mut needed: BTreeMap<Kind, BTreeSet<String>> = [
        Kind::Pods,
        Kind::ConfigMaps,
        Kind::Secrets,
        Kind::Tokens,
        Kind::Claims,
    ]
    .into_iter()
    .map(|kind| (kind, BTreeSet::new()))
    .collect();
    let mut note = |kind: Kind, name: String| _ = needed.entry(kind).or_default().insert(name);
    note(Kind::Pods, INDEX.into());
    for pod in pods {
        let (namespace, uid) = (pod.namespace().unwrap_or_default(), pod::uid(pod));
        let found = references::of(pod);
        note(Kind::Pods, uid.to_owned());
        found
            .config_maps
            .iter()
            .for_each(|name| note(Kind::ConfigMaps, format!("{namespace}/{name}")));
        found
            .secrets
            .iter()
            .chain(&found.pull_secrets)
            .for_each(|name| note(Kind::Secrets, format!("{namespace}/{name}")));
        claims::of_pod(pod)
            .into_iter()
            .for_each(|(_, name)| note(Kind::Claims, format!("{namespace}/{name}")));
        for token in pod::spec(pod)
            .volumes
            .iter()
            .flatten()
            .flat_map(payload::tokens)
        {
            note(Kind::Tokens, format!("{uid}/{}", token.audience));
        }
    }
    needed
}

/// Seals the pods of the cache and the services, and removes what no pod needs any more. Runs until the process exits.
pub async fn follow(
    keeper: Keeper,
    pods: Cache<Pod>,
    services: impl Fn() -> Option<Vec<Arc<Service>>>,
) {
    let mut changes = pods.changes();
    pods.synced().await;
    keeper.set_offline(false);
    let mut known: BTreeMap<String, Option<String>> = BTreeMap::new();
    let mut first = true;
    loop {
        changes.mark_unchanged();
        let bound: Vec<Arc<Pod>> = pods
            .list()
            .into_iter()
            .filter(|p| {
                !pod::is_mirror(p)
                    && !pod::is_terminal(p)
                    && p.metadata.deletion_timestamp.is_none()
            })
            .collect();
        let versions: BTreeMap<String, Option<String>> = bound
            .iter()
            .map(|p| (pod::uid(p).to_owned(), p.resource_version()))
            .collect();
        for pod in bound
            .iter()
            .filter(|p| known.get(pod::uid(p)) != Some(&p.resource_version()))
        {
            keeper.put(Kind::Pods, pod::uid(pod), &**pod);
        }
        if first || !known.keys().eq(versions.keys()) {
            keeper.put(Kind::Pods, INDEX, &versions.keys().collect::<Vec<_>>());
            keeper.retain(needed(&bound));
        }
        if let Some(services) = services() {
            keeper.put(
                Kind::Services,
                "all",
                &services.iter().map(|s| &**s).collect::<Vec<_>>(),
            );
        }
        (known, first) = (versions, false);
        if changes.changed().await.is_err() {
            return std::future::pending().await;
        }
        // Statuses change often while pods start; one pass after that is enough.
        tokio::time::sleep(QUIET_PERIOD).await;
    }
}
