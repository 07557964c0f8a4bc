//! From sources to workers: merges what the API and the files want, keeps one worker a pod, and ends
//! what nobody wants any more.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodSpec};
use kube::ResourceExt as _;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use super::mirror;
use super::relist::{Hint, Seen};
use super::sources::Statics;
use super::worker::{self, Desired};
use crate::agent::{Context, Known};
use crate::core::pod;
use crate::cri::ListedPod;
use crate::kubeapi::Cache;
use crate::sealed::Keeper;

/// How long the first list of the apiserver is waited for, before what is known from before is used.
const PATIENCE: Duration = Duration::from_secs(3);

/// How often it is looked for what pods that are gone have left.
const TENDING: Duration = Duration::from_secs(60);

struct Worker {
    desired: watch::Sender<Desired>,
    hint: Arc<Notify>,
    full_name: String,
}

struct Dispatcher {
    context: Arc<Context>,
    workers: BTreeMap<String, Worker>,
    seen: Seen,
    finished: mpsc::Sender<String>,
}

/// Runs until the process ends.
pub async fn run(
    context: Arc<Context>,
    api: Option<Cache<Pod>>,
    mut statics: watch::Receiver<Statics>,
    mut hints: mpsc::Receiver<Hint>,
    seen: Seen,
    keeper: Option<Keeper>,
) {
    let cut_off_at = Instant::now() + PATIENCE;
    let (finished, mut endings) = mpsc::channel(256);
    let mut dispatcher = Dispatcher {
        context,
        workers: BTreeMap::new(),
        seen,
        finished,
    };
    let mut api_changes = api.as_ref().map(Cache::changes);
    let mut next_tending: Option<Instant> = None;
    let mut kept: Option<Vec<Arc<Pod>>> = None;
    loop {
        let wanted_statics = statics.borrow_and_update().pods();
        let ready = api.as_ref().is_none_or(Cache::is_synced) && wanted_statics.is_some();
        if let Some(changes) = &mut api_changes {
            changes.mark_unchanged();
        }
        let api_pods = match (&api, &keeper) {
            (Some(cache), _) if cache.is_synced() => cache.list(),
            // No apiserver since the start: the pods of before go on, and nothing is removed.
            (Some(_), Some(keeper)) if Instant::now() >= cut_off_at => {
                if kept.is_none() {
                    let last = keeper.last_pods().await;
                    keeper.set_cut_off(true);
                    tracing::warn!(
                        pods = last.len(),
                        "no apiserver answers: the pods that were bound here before are started from what was kept"
                    );
                    kept = Some(last);
                }
                kept.clone().unwrap_or_default()
            }
            _ => vec![],
        };
        let static_pods = wanted_statics.unwrap_or_default();
        dispatcher.update(&api_pods, &static_pods, ready).await;
        if ready && next_tending.is_none_or(|at| Instant::now() >= at) {
            dispatcher.clean_up(&api_pods, &static_pods).await;
            next_tending = Some(Instant::now() + TENDING);
        }
        // Wait for the next thing that concerns the sources; everything else is handled here.
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
                Some(hint) = hints.recv() => match hint {
                    Hint::Pod(uid) => dispatcher.nudge(&uid),
                    Hint::Listed(listed) => if ready {
                        dispatcher.adopt_orphans(&listed);
                        if next_tending.is_some_and(|at| Instant::now() >= at) {
                            break;
                        }
                    },
                },
                () = tokio::time::sleep_until(cut_off_at), if !ready && Instant::now() < cut_off_at => break,
                () = api_changed => break,
                _ = statics.changed() => break,
            }
        }
    }
}

impl Dispatcher {
    fn nudge(&self, uid: &str) {
        if let Some(worker) = self.workers.get(uid) {
            worker.hint.notify_one();
        }
    }

    fn ended(&mut self, uid: &str) {
        self.workers.remove(uid);
        self.seen.forget(uid);
        self.context.release(uid);
    }

    /// Tells every worker what is wanted now, starts those that are missing, oldest pod first.
    async fn update(&mut self, api: &[Arc<Pod>], statics: &[Arc<Pod>], ready: bool) {
        let mirrors: BTreeMap<String, &Arc<Pod>> = api
            .iter()
            .filter(|p| pod::is_mirror(p))
            .map(|p| (pod::full_name(p), p))
            .collect();
        let mut wanted: Vec<Desired> = Vec::new();
        for pod in api.iter().filter(|p| !pod::is_mirror(p)) {
            wanted.push(Desired {
                pod: Arc::clone(pod),
                object: Some(Arc::clone(pod)),
                removed: false,
            });
        }
        for pod in statics {
            let object = mirrors.get(&pod::full_name(pod)).map(|m| Arc::clone(m));
            wanted.push(Desired {
                pod: Arc::clone(pod),
                object,
                removed: false,
            });
        }
        let roster = wanted
            .iter()
            .map(|d| Known {
                pod: Arc::clone(&d.pod),
                object: d.object.clone(),
            })
            .collect();
        self.context.roster.send_replace(roster);
        wanted.sort_by_key(|d| d.pod.metadata.creation_timestamp.as_ref().map(|t| t.0));
        if ready {
            for (uid, worker) in &self.workers {
                if !wanted.iter().any(|d| pod::uid(&d.pod) == uid) {
                    worker
                        .desired
                        .send_if_modified(|d| !std::mem::replace(&mut d.removed, true));
                }
            }
            for mirror in mirrors.values() {
                let held = self
                    .workers
                    .values()
                    .any(|w| w.full_name == pod::full_name(mirror));
                let of_static = statics
                    .iter()
                    .any(|s| pod::full_name(s) == pod::full_name(mirror));
                if !held
                    && !of_static
                    && let Err(error) = mirror::remove(&self.context, mirror).await
                {
                    tracing::warn!(%error, pod = %pod::full_name(mirror), "an orphaned mirror pod stays for now");
                }
            }
        }
        for desired in wanted {
            self.want(desired);
        }
    }

    fn want(&mut self, desired: Desired) {
        let uid = pod::uid(&desired.pod).to_owned();
        if let Some(worker) = self.workers.get(&uid) {
            worker.desired.send_if_modified(|old| {
                let version = |d: &Desired| {
                    (
                        d.pod.resource_version(),
                        d.object.as_ref().map(|o| (o.uid(), o.resource_version())),
                    )
                };
                // A pod that left its source does not come back under the same uid until it has ended.
                let changed = !old.removed && version(old) != version(&desired);
                if changed {
                    *old = desired;
                }
                changed
            });
            return;
        }
        // A static pod waits until the one before it under the same name has gone.
        let full_name = pod::full_name(&desired.pod);
        if self.workers.values().any(|w| w.full_name == full_name) {
            return;
        }
        self.start(uid, full_name, desired);
    }

    fn start(&mut self, uid: String, full_name: String, desired: Desired) {
        let (sender, receiver) = watch::channel(desired);
        let hint = Arc::new(Notify::new());
        let work = worker::run(
            Arc::clone(&self.context),
            receiver,
            Arc::clone(&hint),
            self.seen.clone(),
        );
        let (finished, id) = (self.finished.clone(), uid.clone());
        let span = tracing::info_span!("pod", pod = full_name, uid);
        let work = tracing::Instrument::instrument(work, span);
        tokio::spawn(async move {
            work.await;
            // The dispatcher lives as long as the process.
            let _ = finished.send(id).await;
        });
        self.workers.insert(
            uid,
            Worker {
                desired: sender,
                hint,
                full_name,
            },
        );
    }

    /// Pods that only the runtime knows are ended.
    fn adopt_orphans(&mut self, listed: &[ListedPod]) {
        for orphan in listed
            .iter()
            .filter(|p| !self.workers.contains_key(&p.uid))
            .collect::<Vec<_>>()
        {
            tracing::info!(
                pod = orphan.name,
                namespace = orphan.namespace,
                uid = orphan.uid,
                "the runtime has a pod that nobody wants; it is removed"
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
            self.start(
                orphan.uid.clone(),
                full_name,
                Desired {
                    pod: Arc::new(pod),
                    object: None,
                    removed: true,
                },
            );
        }
    }

    /// Once all sources are known: directories and cgroups of pods that are in none are removed.
    async fn clean_up(&self, api: &[Arc<Pod>], statics: &[Arc<Pod>]) {
        let mut listed = self.context.runtime.list().await;
        while listed.is_err() {
            tokio::time::sleep(Duration::from_secs(1)).await;
            listed = self.context.runtime.list().await;
        }
        let in_runtime = listed.unwrap_or_default();
        for uid in self.context.host.leftovers().await {
            let wanted = self.workers.contains_key(&uid)
                || api.iter().chain(statics).any(|p| pod::uid(p) == uid);
            let known = wanted || in_runtime.iter().any(|p| p.uid == uid);
            if known {
                continue;
            }
            let removed = async {
                crate::agent::volume::csi::unpublish(&self.context, &uid).await?;
                self.context.host.remove_leftovers(&uid).await
            };
            match removed.await {
                Ok(()) => tracing::info!(uid, "removed what a pod that is gone had left"),
                Err(error) => {
                    tracing::warn!(%error, uid, "what a pod that is gone had left cannot be removed")
                }
            }
        }
    }
}
