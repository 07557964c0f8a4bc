//! Merges the pods of the API and of static sources, runs one worker for each pod, and forwards everything that happens
//! to the worker's inbox. The dispatcher awaits nothing except its inputs. An update costs time in proportion to the
//! pods of the same name, not to all pods of the node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodSpec};
use kube::ResourceExt as _;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::heartbeats::Heartbeats;
use super::inbox::Inbox;
use super::relist::{Hint, ObservedFingerprints};
use super::sources::Statics;
use super::table::{Entry, Known, PodTable};
use super::worker;
use crate::metrics::Metrics;
use crate::node::OwnNode;
use crate::node::ledger::LedgerHandle;
use holdfast_config::Config;
use holdfast_core::node::offline::{self, OfflineStart};
use holdfast_core::pod;
use holdfast_core::pod::desired::Desired;
use holdfast_core::pod::lifecycle::State;
use holdfast_core::pod::worker::{Input, Network, Update, Worker as Decider};
use holdfast_cri::ListedPod;
use holdfast_kubeapi::Cache;
use holdfast_kubeapi::cache::Changes;
use holdfast_sealed::Keeper;
use holdfast_sys::clock::Clock;

/// Maximum time between heartbeats of an idle dispatcher.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(60);

struct Worker {
    inbox: Inbox,
    update: Update,
    full_name: String,
    /// Blocks static pods of the same name until this worker returns: the pod
    /// is static itself, or only the runtime knows it.
    blocks_name: bool,
}

/// The inputs of the dispatcher.
pub struct Inputs {
    /// The pods bound to this node; `None` if there are only static pods.
    pub api: Option<Cache<Pod>>,
    /// Static pods.
    pub statics: watch::Receiver<Statics>,
    /// Possible changes in the runtime.
    pub hints: mpsc::Receiver<Hint>,
    /// State stored for an offline start.
    pub keeper: Option<Keeper>,
    /// The uids whose leftovers are being removed.
    pub clearing: watch::Receiver<BTreeSet<String>>,
}

/// What the dispatcher uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub clock: Clock,
    pub metrics: Arc<Metrics>,
    pub heartbeats: Arc<Heartbeats>,
    pub ledger: LedgerHandle,
    /// The runtime's last reported network state.
    pub network: watch::Receiver<Network>,
    pub node: Arc<OwnNode>,
    pub table: watch::Sender<PodTable>,
    pub workers: Arc<worker::Parts>,
}

struct Dispatcher {
    parts: Parts,
    desired: Desired,
    workers: BTreeMap<String, Worker>,
    /// The worker uids of each full name.
    names: BTreeMap<String, BTreeSet<String>>,
    seen: ObservedFingerprints,
    finished: mpsc::Sender<String>,
    network: Network,
    /// The uids whose leftovers are being removed, and the names of static pods that wait for the removal.
    clearing: watch::Receiver<BTreeSet<String>>,
    uncleared: BTreeSet<String>,
    /// Whether the API has been listed, or there is none.
    has_api: bool,
    has_statics: bool,
    /// The appearance number of each static pod, by uid.
    appearances: BTreeMap<String, u64>,
}

/// Runs until the process exits.
pub async fn run(parts: Parts, mut inputs: Inputs, seen: ObservedFingerprints) {
    let (started, offline) = (Instant::now(), parts.config.offline_start);
    let (finished, mut endings) = mpsc::channel(256);
    let mut networks = parts.network.clone();
    let mut dispatcher = Dispatcher {
        network: networks.borrow_and_update().clone(),
        parts,
        desired: Desired::default(),
        workers: BTreeMap::new(),
        names: BTreeMap::new(),
        seen,
        finished,
        clearing: inputs.clearing.clone(),
        uncleared: BTreeSet::new(),
        has_api: inputs.api.is_none(),
        has_statics: false,
        appearances: BTreeMap::new(),
    };
    let mut api = inputs.api.map(|cache| (cache.read_changes(), cache));
    let (stored_sender, mut stored) = watch::channel(None);
    if let (Some((_, cache)), Some(keeper)) = (&api, inputs.keeper.clone()) {
        tokio::spawn(use_stored_pods(
            Arc::clone(&dispatcher.parts.node),
            cache.clone(),
            keeper,
            offline,
            started,
            stored_sender,
        ));
    }
    // Static pods that were read before this point count as a change.
    inputs.statics.mark_changed();
    loop {
        dispatcher.parts.heartbeats.dispatcher_turned();
        let api_changed = async {
            match &mut api {
                Some((reader, _)) => reader.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // The order is fixed, so that a simulated run replays exactly.
            biased;
            // All branches are cancel-safe: receivers and watches keep values that were not taken.
            Some(uid) = endings.recv() => dispatcher.worker_finished(&uid),
            Some(hint) = inputs.hints.recv() => dispatcher.forward(hint),
            Ok(()) = networks.changed() => {
                let network = networks.borrow_and_update().clone();
                dispatcher.set_network(network);
            }
            Ok(()) = inputs.clearing.changed() => {
                let names = std::mem::take(&mut dispatcher.uncleared);
                dispatcher.update(names);
            }
            Ok(()) = stored.changed() => {
                let pods = stored.borrow_and_update().clone().unwrap_or_default();
                dispatcher.set_stored(pods);
            }
            changes = api_changed => dispatcher.objects_changed(changes),
            Ok(()) = inputs.statics.changed() => {
                let statics = inputs.statics.borrow_and_update().clone();
                dispatcher.set_statics(&statics);
            }
            () = tokio::time::sleep(HEARTBEAT_INTERVAL) => {}
        }
    }
}

/// Handles a start without an apiserver: static pods start with stored objects. If the configuration allows it, the
/// pods that were bound here earlier continue. Nothing is removed.
async fn use_stored_pods(
    node: Arc<OwnNode>,
    api: Cache<Pod>,
    keeper: Keeper,
    offline: OfflineStart,
    started: Instant,
    found: watch::Sender<Option<Vec<Arc<Pod>>>>,
) {
    let until = |wait| tokio::time::timeout_at(started + wait, api.synced());
    if until(offline::GRACE).await.is_ok() {
        return;
    }
    keeper.set_offline(true);
    let Some(wait) = offline.pods_after() else {
        tracing::warn!(%offline, "no apiserver answers: starting only static pods, as --offline-start requires");
        return;
    };
    if until(wait).await.is_ok() {
        return;
    }
    let last = keeper.last_pods().await;
    node.assume(keeper.last_node().await);
    tracing::warn!(
        pods = last.len(),
        "no apiserver answers: starting the pods that were bound to this node from their local copy"
    );
    found.send_replace(Some(last));
    // The dispatcher reads `found` until the process exits.
    found.closed().await;
}

impl Dispatcher {
    fn forward(&mut self, hint: Hint) {
        match hint {
            Hint::Pod(uid) => {
                if let Some(worker) = self.workers.get(&uid) {
                    worker.inbox.send(Input::Hint);
                }
            }
            Hint::Event(event) => {
                if let Some(worker) = self.workers.get(&event.pod) {
                    worker.inbox.send(Input::RuntimeEvent(event));
                }
            }
            Hint::Devices(uid) => {
                if let Some(worker) = self.workers.get(&uid) {
                    worker.inbox.send(Input::Devices(BTreeMap::new()));
                }
            }
            Hint::Restart(uid) => self.restart(&uid),
            Hint::RuntimeBack => {
                for worker in self.workers.values() {
                    worker.inbox.send(Input::RuntimeBack);
                }
            }
            Hint::Listed(listed) if self.is_ready() => self.adopt_orphans(&listed),
            Hint::Listed(_) => {}
        }
    }

    fn set_network(&mut self, network: Network) {
        if self.network != network {
            self.network = network;
            for worker in self.workers.values() {
                worker.inbox.send(Input::Network(self.network.clone()));
            }
        }
    }

    fn worker_finished(&mut self, uid: &str) {
        self.seen.forget(uid);
        let Some(worker) = self.workers.remove(uid) else {
            return;
        };
        if let Some(uids) = self.names.get_mut(&worker.full_name) {
            uids.remove(uid);
            if uids.is_empty() {
                self.names.remove(&worker.full_name);
            }
        }
        // A static pod may be waiting for the name.
        self.update([worker.full_name].into());
        if self.workers.contains_key(uid) {
            let is_static = pod::is_static(&worker.update.pod);
            self.parts.metrics.pods_restarted(is_static, 1);
        }
    }

    fn objects_changed(&mut self, changes: Changes<Pod>) {
        if !std::mem::replace(&mut self.has_api, true) {
            // Until now, these were the pods stored for an offline start.
            let listed = changes.into_values().filter_map(|change| change.now);
            let mut names = self.desired.replace_objects(listed.collect());
            names.extend(self.all_names());
            return self.update(names);
        }
        let mut names = BTreeSet::new();
        for ((namespace, name), change) in changes {
            let full_name = pod::full_name_of(&namespace, &name);
            if let Some(last) = change.deleted {
                self.apply_last_state(last);
            }
            self.desired.set_object(&full_name, change.now);
            names.insert(full_name);
        }
        self.update(names);
    }

    /// Applies the last state of a pod that was deleted or replaced, for its grace period. No other update may contain
    /// it, as the apiserver sets the grace period of a forced deletion just before it deletes the object. A pod that is
    /// missing in a list has its last known state (upstream's `calculateEffectiveGracePeriod`).
    fn apply_last_state(&mut self, last: Arc<Pod>) {
        let Some(worker) = self.workers.get_mut(pod::uid(&last)) else {
            return;
        };
        if worker.update.removed {
            return;
        }
        worker.update.object = Some(Arc::clone(&last));
        worker.update.pod = last;
        if !(self.has_api && self.has_statics) {
            // Until all sources have been read no pod is removed, but a known deletion takes effect.
            worker.inbox.send(Input::Update(worker.update.clone()));
        }
    }

    fn set_stored(&mut self, pods: Vec<Arc<Pod>>) {
        if !self.has_api {
            let names = self.desired.replace_objects(pods);
            self.update(names);
        }
    }

    /// Stops a static pod and starts it again afterwards, as its source still contains it.
    fn restart(&mut self, uid: &str) {
        let Some(worker) = self.workers.get_mut(uid) else {
            return;
        };
        if !(worker.update.removed && worker.update.starts_again) {
            worker.update.removed = true;
            worker.update.starts_again = true;
            worker.inbox.send(Input::Update(worker.update.clone()));
        }
    }

    fn set_statics(&mut self, statics: &Statics) {
        let pods = statics.pods();
        let appearances = statics.appearances().clone();
        let before = std::mem::replace(&mut self.appearances, appearances);
        for (uid, at) in statics.appearances() {
            if before.get(uid).is_some_and(|before| before != at) {
                self.restart(uid);
            }
        }
        let is_first = pods.is_some() && !self.has_statics;
        self.has_statics |= is_first;
        let mut names = self.desired.replace_statics(pods.unwrap_or_default());
        if is_first {
            names.extend(self.all_names());
        }
        self.update(names);
    }

    /// Whether all sources have been read, so that pods in none of them can be removed.
    fn is_ready(&self) -> bool {
        self.has_api && self.has_statics
    }

    /// Every name that has a pod or a worker.
    fn all_names(&self) -> BTreeSet<String> {
        let mut names = self.desired.names();
        names.extend(self.names.keys().cloned());
        names
    }

    /// Sends the desired state of some names to their workers. Starts missing workers in the order of admission.
    fn update(&mut self, names: BTreeSet<String>) {
        let (mut wanted, mut entries) = (vec![], vec![]);
        for name in &names {
            let updates = self.desired.of(name);
            if self.is_ready() {
                self.remove_unwanted(name, &updates);
            }
            entries.push((name, self.entry(name, &updates)));
            wanted.extend(updates);
        }
        // Published before any worker starts, so that the cleanup does not take the pod's directories for leftovers.
        self.publish(entries);
        wanted.sort_by_cached_key(Update::admission_order);
        for update in wanted {
            self.apply(update);
        }
    }

    /// The pods of a name, for the table.
    fn entry(&self, name: &str, updates: &[Update]) -> Entry {
        let seen = self.parts.clock.now();
        let known = |update: &Update| Known {
            pod: Arc::clone(&update.pod),
            object: update.object.clone(),
            seen,
        };
        let mut uids = self.names.get(name).cloned().unwrap_or_default();
        let mut leaving = uids.clone();
        leaving.retain(|uid| !self.desired.uids(name).any(|wanted| wanted == uid));
        uids.extend(self.desired.uids(name).map(str::to_owned));
        let is_blocked =
            !self.is_ready() || self.is_name_blocked(name) || self.desired.has_static(name);
        let orphan = self.desired.mirror(name).filter(|_| !is_blocked);
        Entry {
            pods: updates.iter().map(known).collect(),
            uids,
            leaving,
            orphaned_mirror: orphan.cloned(),
        }
    }

    /// Publishes the pods of some names in the table.
    fn publish(&self, entries: Vec<(&String, Entry)>) {
        let complete = self.is_ready();
        // Readers are woken by changes only: most events change no pod.
        self.parts.table.send_if_modified(|table| {
            let mut changed = std::mem::replace(&mut table.complete, complete) != complete;
            for (name, entry) in entries {
                changed |= table.set(name, entry);
            }
            changed
        });
    }

    fn remove_unwanted(&mut self, name: &str, wanted: &[Update]) {
        for uid in self.names.get(name).into_iter().flatten() {
            let Some(worker) = self.workers.get_mut(uid) else {
                continue;
            };
            let is_wanted = wanted.iter().any(|u| pod::uid(&u.pod) == uid);
            if !is_wanted && std::mem::take(&mut worker.update.starts_again) {
                worker.inbox.send(Input::Update(worker.update.clone()));
            }
            if !is_wanted && !worker.update.removed {
                worker.update.removed = true;
                // The scheduler has already reassigned the pod's requests; the
                // pods that follow are admitted after this release.
                self.parts.ledger.release_requests(uid, false);
                worker.inbox.send(Input::Update(worker.update.clone()));
            }
        }
    }

    fn apply(&mut self, update: Update) {
        let uid = pod::uid(&update.pod).to_owned();
        if let Some(worker) = self.workers.get_mut(&uid) {
            // A pod that left its source is not revived with the same uid before it has terminated.
            if !worker.update.removed && differs(&worker.update, &update) {
                worker.update = update.clone();
                worker.inbox.send(Input::Update(update));
            } else if worker.update.removed && pod::is_static(&update.pod) {
                self.restart(&uid);
            }
            return;
        }
        // A static pod waits until the earlier pod of the same name has terminated. A pod of the API does not wait: its
        // predecessor may hang, and was force-deleted so that this one can replace it.
        let full_name = pod::full_name(&update.pod);
        if pod::is_static(&update.pod) {
            if self.is_name_blocked(&full_name) {
                return;
            }
            if self.clearing.borrow().contains(&uid) {
                self.uncleared.insert(full_name);
                return;
            }
        }
        self.start(uid, full_name, update);
    }

    /// Whether static pods of this name have to wait.
    fn is_name_blocked(&self, full_name: &str) -> bool {
        let mut uids = self.names.get(full_name).into_iter().flatten();
        uids.any(|uid| self.workers.get(uid).is_some_and(|w| w.blocks_name))
    }

    fn start(&mut self, uid: String, full_name: String, update: Update) {
        let (inbox, now) = (Inbox::default(), self.parts.clock.now());
        let decider = Decider::new(update.clone(), self.network.clone(), now);
        // Requested here, not in the pod's task: tasks of pods that start
        // together would request admission in random order.
        let admission = (decider.state == State::Syncing).then(|| {
            let pod = Arc::clone(decider.pod());
            self.parts.ledger.admit(pod, inbox.clone())
        });
        let work = worker::run(
            Arc::clone(&self.parts.workers),
            decider,
            admission,
            inbox.clone(),
            self.seen.clone(),
        );
        let (finished, id) = (self.finished.clone(), uid.clone());
        let span = tracing::info_span!("pod", pod = full_name, uid);
        // Boxed: a future that is moved into another one occupies twice its size as long as the pod lives.
        let work = Box::pin(work.instrument(span));
        tokio::spawn(async move {
            work.await;
            if finished.send(id).await.is_err() {
                tracing::debug!("the dispatcher has stopped: the process is exiting");
            }
        });
        let uids = self.names.entry(full_name.clone()).or_default();
        uids.insert(uid.clone());
        let worker = Worker {
            inbox,
            blocks_name: pod::is_static(&update.pod) || update.object.is_none(),
            update,
            full_name,
        };
        self.workers.insert(uid, worker);
    }

    /// Starts workers that stop the pods that only the runtime knows.
    fn adopt_orphans(&mut self, listed: &[ListedPod]) {
        for orphan in listed {
            if self.workers.contains_key(&orphan.uid) {
                continue;
            }
            self.parts.metrics.pods_orphaned(1);
            tracing::info!(
                pod = orphan.name,
                namespace = orphan.namespace,
                uid = orphan.uid,
                "terminating orphaned pod sandbox"
            );
            let mut pod = Pod::default();
            pod.metadata.name = Some(orphan.name.clone());
            pod.metadata.namespace = Some(orphan.namespace.clone());
            pod.metadata.uid = Some(orphan.uid.clone());
            pod.spec = Some(PodSpec {
                termination_grace_period_seconds: Some(1),
                ..PodSpec::default()
            });
            let full_name = pod::full_name(&pod);
            let update = Update {
                pod: Arc::new(pod),
                object: None,
                removed: true,
                starts_again: false,
            };
            self.start(orphan.uid.clone(), full_name, update);
        }
    }
}

/// Whether a worker needs an update. A manifest has no `resourceVersion`, and may keep its uid when it changes.
fn differs(known: &Update, update: &Update) -> bool {
    let version = |u: &Update| {
        let object = u.object.as_ref().map(|o| (o.uid(), o.resource_version()));
        (u.pod.resource_version(), object)
    };
    version(known) != version(update) || (pod::is_static(&update.pod) && known.pod != update.pod)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_manifest_is_an_update_even_with_the_same_uid() {
        let update = |uid: &str, image: &str, version: Option<&str>| {
            let mut pod = Pod::default();
            pod.metadata.uid = Some(uid.into());
            pod.metadata.resource_version = version.map(Into::into);
            if version.is_none() {
                let source = [(pod::SOURCE.to_owned(), "file".to_owned())];
                pod.metadata.annotations = Some(source.into());
            }
            let container = k8s_openapi::api::core::v1::Container {
                image: Some(image.into()),
                ..Default::default()
            };
            pod.spec = Some(PodSpec {
                containers: vec![container],
                ..PodSpec::default()
            });
            Update {
                pod: Arc::new(pod),
                object: None,
                removed: false,
                starts_again: false,
            }
        };
        let manifest = update("own", "i:1", None);
        assert!(pod::is_static(&manifest.pod));
        assert!(differs(&manifest, &update("own", "i:2", None)));
        assert!(!differs(&manifest, &update("own", "i:1", None)));
        let object = update("u", "i:1", Some("1"));
        assert!(differs(&object, &update("u", "i:1", Some("2"))));
        assert!(!differs(&object, &update("u", "i:1", Some("1"))));
    }
}
