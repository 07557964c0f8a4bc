//! From sources to workers: merges what the API and the files want, keeps one worker a pod, and hands
//! on what happens to its inbox. It waits for nothing but the next thing to hand on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodSpec};
use kube::ResourceExt as _;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::inbox::Inbox;
use super::relist::{Hint, Seen};
use super::sources::Statics;
use super::worker;
use crate::agent::{Context, Known};
use crate::core::pod;
use crate::core::pod::worker::{Input, Network, Update};
use crate::cri::ListedPod;
use crate::kubeapi::Cache;
use crate::sealed::Keeper;

/// How long the first list of the apiserver is waited for before the sealed pods are used.
const API_SYNC_TIMEOUT: Duration = Duration::from_secs(3);

struct Worker {
    inbox: Inbox,
    update: Update,
    full_name: String,
}

/// What the dispatcher knows of pods, for tasks that clean up after them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Roster {
    /// All sources have been read at least once.
    pub complete: bool,
    /// Uids of pods that have a worker or are in a source.
    pub uids: BTreeSet<String>,
    /// Mirrors whose static pod is gone, as is its worker.
    pub orphaned_mirrors: Vec<Arc<Pod>>,
}

/// What runs while the sources are followed.
pub struct Inputs {
    /// The pods bound to this node; none when there are only static pods.
    pub api: Option<Cache<Pod>>,
    /// Static pods.
    pub statics: watch::Receiver<Statics>,
    /// What may have changed in the runtime.
    pub hints: mpsc::Receiver<Hint>,
    /// What is known from before, for a start without an apiserver.
    pub keeper: Option<Keeper>,
}

struct Dispatcher {
    context: Arc<Context>,
    workers: BTreeMap<String, Worker>,
    seen: Seen,
    finished: mpsc::Sender<String>,
    roster: watch::Sender<Roster>,
    network: Network,
    api: Vec<Arc<Pod>>,
    statics: Vec<Arc<Pod>>,
    ready: bool,
}

/// Runs until the process ends.
pub async fn run(
    context: Arc<Context>,
    mut inputs: Inputs,
    seen: Seen,
    roster: watch::Sender<Roster>,
) {
    let cut_off_at = Instant::now() + API_SYNC_TIMEOUT;
    let (finished, mut endings) = mpsc::channel(256);
    let mut networks = context.network.clone();
    let mut dispatcher = Dispatcher {
        network: networks.borrow_and_update().clone(),
        context,
        workers: BTreeMap::new(),
        seen,
        finished,
        roster,
        api: vec![],
        statics: vec![],
        ready: false,
    };
    let mut api_changes = inputs.api.as_ref().map(Cache::changes);
    let (sealed_pods, mut sealed) = watch::channel(None);
    if let (Some(api), Some(keeper)) = (inputs.api.clone(), inputs.keeper.clone()) {
        tokio::spawn(use_sealed(api, keeper, cut_off_at, sealed_pods));
    }
    loop {
        let statics = inputs.statics.borrow_and_update().pods();
        if let Some(changes) = &mut api_changes {
            changes.mark_unchanged();
        }
        dispatcher.ready = inputs.api.as_ref().is_none_or(Cache::is_synced) && statics.is_some();
        dispatcher.api = match &inputs.api {
            Some(cache) if cache.is_synced() => cache.list(),
            _ => sealed.borrow_and_update().clone().unwrap_or_default(),
        };
        dispatcher.statics = statics.unwrap_or_default();
        dispatcher.update();
        // What concerns one worker alone is handed on here; what concerns the sources goes around.
        loop {
            let api_changed = async {
                match &mut api_changes {
                    Some(changes) => _ = changes.changed().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // In this order, so that a simulated run replays exactly.
                biased;
                // All arms are cancel-safe: receivers and watches keep what has not been taken.
                Some(uid) = endings.recv() => {
                    dispatcher.ended(&uid);
                    break;
                }
                Some(hint) = inputs.hints.recv() => dispatcher.hand_on(hint),
                Ok(()) = networks.changed() => {
                    let network = networks.borrow_and_update().clone();
                    dispatcher.network_is(network);
                }
                Ok(()) = sealed.changed() => break,
                () = api_changed => break,
                _ = inputs.statics.changed() => break,
            }
        }
    }
}

/// No apiserver since the start: the pods of before go on, and nothing is removed.
async fn use_sealed(
    api: Cache<Pod>,
    keeper: Keeper,
    at: Instant,
    found: watch::Sender<Option<Vec<Arc<Pod>>>>,
) {
    if tokio::time::timeout_at(at, api.synced()).await.is_ok() {
        return;
    }
    let last = keeper.last_pods().await;
    keeper.set_cut_off(true);
    tracing::warn!(
        pods = last.len(),
        "no apiserver answers: the pods that were bound here before are started from what was kept"
    );
    found.send_replace(Some(last));
    // The dispatcher follows `found` for as long as the process lives.
    found.closed().await;
}

impl Dispatcher {
    fn hand_on(&mut self, hint: Hint) {
        match hint {
            Hint::Pod(uid) => {
                if let Some(worker) = self.workers.get(&uid) {
                    worker.inbox.send(Input::Hint);
                }
            }
            Hint::Listed(listed) if self.ready => self.adopt_orphans(&listed),
            Hint::Listed(_) => {}
        }
    }

    fn network_is(&mut self, network: Network) {
        if self.network != network {
            self.network = network;
            for worker in self.workers.values() {
                worker.inbox.send(Input::Network(self.network.clone()));
            }
        }
    }

    fn ended(&mut self, uid: &str) {
        self.workers.remove(uid);
        self.seen.forget(uid);
    }

    /// Tells every worker what is wanted now, and starts those that are missing, oldest pod first.
    fn update(&mut self) {
        let mirrors: BTreeMap<String, Arc<Pod>> = self
            .api
            .iter()
            .filter(|p| pod::is_mirror(p))
            .map(|p| (pod::full_name(p), Arc::clone(p)))
            .collect();
        let of_api = self.api.iter().filter(|p| !pod::is_mirror(p));
        let mut wanted: Vec<Update> = of_api
            .map(|pod| Update {
                pod: Arc::clone(pod),
                object: Some(Arc::clone(pod)),
                removed: false,
            })
            .collect();
        wanted.extend(self.statics.iter().map(|pod| Update {
            pod: Arc::clone(pod),
            object: mirrors.get(&pod::full_name(pod)).cloned(),
            removed: false,
        }));
        let roster = wanted
            .iter()
            .map(|update| Known {
                pod: Arc::clone(&update.pod),
                object: update.object.clone(),
            })
            .collect();
        self.context.roster.send_replace(roster);
        wanted.sort_by_key(|u| u.pod.metadata.creation_timestamp.as_ref().map(|t| t.0));
        if self.ready {
            self.remove_unwanted(&wanted);
        }
        for update in wanted {
            self.want(update);
        }
        self.publish_roster(&mirrors);
    }

    fn remove_unwanted(&mut self, wanted: &[Update]) {
        let uids: BTreeSet<&str> = wanted.iter().map(|u| pod::uid(&u.pod)).collect();
        for (uid, worker) in &mut self.workers {
            if !uids.contains(uid.as_str()) && !worker.update.removed {
                worker.update.removed = true;
                worker.inbox.send(Input::Update(worker.update.clone()));
            }
        }
    }

    fn want(&mut self, update: Update) {
        let uid = pod::uid(&update.pod).to_owned();
        if let Some(worker) = self.workers.get_mut(&uid) {
            let version = |u: &Update| {
                let object = u.object.as_ref().map(|o| (o.uid(), o.resource_version()));
                (u.pod.resource_version(), object)
            };
            // A pod that left its source does not come back under the same uid until it has ended.
            if !worker.update.removed && version(&worker.update) != version(&update) {
                worker.update = update.clone();
                worker.inbox.send(Input::Update(update));
            }
            return;
        }
        // A static pod waits until the one before it under the same name has gone.
        let full_name = pod::full_name(&update.pod);
        if self.workers.values().any(|w| w.full_name == full_name) {
            return;
        }
        self.start(uid, full_name, update);
    }

    fn start(&mut self, uid: String, full_name: String, update: Update) {
        let inbox = Inbox::default();
        let work = worker::run(
            Arc::clone(&self.context),
            update.clone(),
            inbox.clone(),
            self.seen.clone(),
            self.network.clone(),
        );
        let (finished, id) = (self.finished.clone(), uid.clone());
        let span = tracing::info_span!("pod", pod = full_name, uid);
        let work = work.instrument(span);
        tokio::spawn(async move {
            work.await;
            if finished.send(id).await.is_err() {
                tracing::debug!("the dispatcher has ended with the process");
            }
        });
        let worker = Worker {
            inbox,
            update,
            full_name,
        };
        self.workers.insert(uid, worker);
    }

    /// Pods that only the runtime knows are ended.
    fn adopt_orphans(&mut self, listed: &[ListedPod]) {
        for orphan in listed {
            if self.workers.contains_key(&orphan.uid) {
                continue;
            }
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
            };
            self.start(orphan.uid.clone(), full_name, update);
        }
    }

    fn publish_roster(&self, mirrors: &BTreeMap<String, Arc<Pod>>) {
        let sources = self.api.iter().chain(&self.statics);
        let held = |name: &str| {
            self.workers.values().any(|w| w.full_name == name)
                || self.statics.iter().any(|s| pod::full_name(s) == name)
        };
        let orphaned = mirrors.iter().filter(|(name, _)| self.ready && !held(name));
        let roster = Roster {
            complete: self.ready,
            uids: sources
                .map(|p| pod::uid(p).to_owned())
                .chain(self.workers.keys().cloned())
                .collect(),
            orphaned_mirrors: orphaned.map(|(_, mirror)| Arc::clone(mirror)).collect(),
        };
        self.roster.send_if_modified(|old| {
            let changed = *old != roster;
            *old = roster;
            changed
        });
    }
}
