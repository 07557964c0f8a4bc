//! Cleans up after deleted pods: directories and cgroups without a pod, and mirror pods without
//! their static pod. Every removal runs in a separate task, with its own back-off, so that an
//! unresponsive driver or apiserver delays only its own pod.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::mirror;
use super::table::PodTable;
use crate::metrics::Metrics;
use crate::node::ledger::LedgerHandle;
use crate::volume;
use crate::volume::csi::{Csi, VolumeError};
use holdfast_core::backoff::Doubling;
use holdfast_core::fault::Fault;
use holdfast_core::lock::lock;
use holdfast_core::pod;
use holdfast_core::repeated::RepeatedFailures;
use holdfast_cri::{Runtime, RuntimeError};
use holdfast_host::PodHost;
use holdfast_kubeapi::pods::PodApi;
use holdfast_sys::clock::Clock;

/// Interval between searches for directories and cgroups without a pod.
const ORPHAN_SWEEP_INTERVAL: Duration = Duration::from_secs(60);
/// Interval between warnings about a removal that is still running. The removal is not cancelled: if it continued
/// unobserved, it could delete the directories of a static pod that is recreated with the same uid.
const SLOW_REMOVAL_WARNING: Duration = Duration::from_secs(150);
/// Timeout for deleting one mirror pod.
const DELETE_TIMEOUT: Duration = Duration::from_secs(15);
/// Back-off after a failed removal or deletion.
const RETRY: Doubling = Doubling::new(Duration::from_secs(1), Duration::from_secs(60));

/// The state of removals: those in progress, and the retry times of failed ones.
#[derive(Default)]
struct Removals {
    in_progress: BTreeSet<String>,
    failed: BTreeMap<String, (Doubling, Instant)>,
}

impl Removals {
    /// Marks the `orphans` that are due as in progress, and returns them.
    /// Forgets failures of pods that are no longer orphans.
    fn begin(&mut self, orphans: &BTreeSet<String>, now: Instant) -> Vec<String> {
        self.failed.retain(|uid, _| orphans.contains(uid));
        let waits = |uid: &String| self.failed.get(uid).is_some_and(|(_, at)| *at > now);
        let due = orphans
            .iter()
            .filter(|uid| !self.in_progress.contains(*uid) && !waits(uid));
        let due: Vec<String> = due.cloned().collect();
        self.in_progress.extend(due.iter().cloned());
        due
    }

    fn finish(&mut self, uid: &str, has_failed: bool, now: Instant) {
        self.in_progress.remove(uid);
        if has_failed {
            let (pauses, at) = self.failed.entry(uid.to_owned()).or_insert((RETRY, now));
            *at = now + pauses.pause();
        } else {
            self.failed.remove(uid);
        }
    }

    /// The time of the next retry.
    fn next(&self) -> Option<Instant> {
        let waiting = self
            .failed
            .iter()
            .filter(|(uid, _)| !self.in_progress.contains(*uid));
        waiting.map(|(_, (_, at))| *at).min()
    }
}

/// The uids of pods whose leftovers are being removed. A static pod with one of these uids must not start yet, as the
/// removal would delete its directories.
pub(crate) type Clearing = watch::Sender<BTreeSet<String>>;

/// Failed removals or deletions by uid, logged with growing pauses.
type Failures = Arc<Mutex<RepeatedFailures<String>>>;

/// Marks a uid as being cleared until dropped.
struct ClearingGuard {
    clearing: Clearing,
    uid: String,
}

impl ClearingGuard {
    fn begin(clearing: &Clearing, uid: &str) -> ClearingGuard {
        clearing.send_modify(|uids| _ = uids.insert(uid.to_owned()));
        ClearingGuard {
            clearing: clearing.clone(),
            uid: uid.to_owned(),
        }
    }
}

impl Drop for ClearingGuard {
    fn drop(&mut self) {
        self.clearing.send_modify(|uids| _ = uids.remove(&self.uid));
    }
}

/// What the removal of leftovers uses.
pub(crate) struct Parts {
    pub runtime: Arc<dyn Runtime>,
    pub host: Arc<dyn PodHost>,
    pub clock: Clock,
    pub metrics: Arc<Metrics>,
    pub ledger: LedgerHandle,
    pub csi: Arc<Csi>,
    pub volumes: Arc<volume::Parts>,
}

/// Removes leftovers of deleted pods until the process exits. A worker returns only after all resources of its pod are
/// released, so leftovers come from an earlier agent that was stopped or killed.
pub async fn sweep(parts: Arc<Parts>, mut table: watch::Receiver<PodTable>, clearing: Clearing) {
    // The dispatcher runs as long as the process.
    if table.wait_for(|table| table.complete).await.is_err() {
        return;
    }
    // Each removal has its own task: a driver that hangs for one pod does not delay others.
    let mut tasks = JoinSet::<(String, bool)>::new();
    let (mut removals, mut search_backoff) = (Removals::default(), RETRY);
    let failures = Failures::default();
    let mut next_search = Instant::now();
    loop {
        tokio::select! {
            // The order is fixed, so that a simulated run replays exactly.
            biased;
            // Cancel-safe: a finished task is either taken or stays in the set.
            Some(ended) = tasks.join_next() => {
                let now = Instant::now();
                // Tasks are never aborted, and a panic terminates the process.
                if let Ok((uid, has_failed)) = ended {
                    removals.finish(&uid, has_failed, now);
                    next_search = next_search.min(removals.next().unwrap_or(next_search));
                }
                continue;
            }
            () = tokio::time::sleep_until(next_search) => {}
        }
        let found = find_orphans(&parts, &table).await;
        let now = Instant::now();
        match found {
            Ok(orphans) => {
                search_backoff.reset();
                for uid in removals.begin(&orphans, now) {
                    let guard = ClearingGuard::begin(&clearing, &uid);
                    // The pod may have been recreated since the search. The dispatcher publishes its
                    // pods before it reads `clearing`, and this task sets `clearing` before it reads
                    // the table: at least one of them sees the other.
                    if table.borrow().has(&uid) {
                        removals.finish(&uid, false, now);
                    } else {
                        let failures = Arc::clone(&failures);
                        tasks.spawn(remove(Arc::clone(&parts), uid, guard, failures));
                    }
                }
                parts.metrics.orphans(orphans.len(), removals.failed.len());
                next_search = now + ORPHAN_SWEEP_INTERVAL;
                next_search = next_search.min(removals.next().unwrap_or(next_search));
            }
            Err(error) => {
                tracing::debug!(%error, "cannot list the runtime's pods; the search for orphans is delayed");
                next_search = now + search_backoff.pause();
            }
        }
    }
}

/// Returns the uids with leftovers on this node that are unknown to the dispatcher and the runtime.
async fn find_orphans(
    parts: &Parts,
    table: &watch::Receiver<PodTable>,
) -> Result<BTreeSet<String>, RuntimeError> {
    let in_runtime = parts.runtime.list().await?;
    let leftovers = parts.host.leftovers().await;
    let table = table.borrow();
    let is_known = |uid: &String| table.has(uid) || in_runtime.iter().any(|p| p.uid == *uid);
    Ok(leftovers.into_iter().filter(|uid| !is_known(uid)).collect())
}

/// Removes the volumes, cgroups and directories of a deleted pod.
async fn remove_leftovers(parts: &Parts, uid: &str) -> Result<(), VolumeError> {
    let unknown = parts.host.unknown_volumes(uid).await;
    let is_published = parts.csi.has_volumes(uid);
    let taken = volume::tear_down(&parts.volumes, uid).await;
    parts.metrics.force_cleaned(unknown, taken.is_err());
    taken?;
    if is_published {
        // Pods that wait for these volumes can retry immediately.
        parts.ledger.volumes_freed();
    }
    Ok(parts.host.remove_leftovers(uid).await?)
}

/// Removes a pod's leftovers and logs the result. Returns the uid, and whether the removal failed.
async fn remove(
    parts: Arc<Parts>,
    uid: String,
    guard: ClearingGuard,
    failures: Failures,
) -> (String, bool) {
    let begun = Instant::now();
    let removed = {
        let mut removal = std::pin::pin!(remove_leftovers(&parts, &uid));
        loop {
            match tokio::time::timeout(SLOW_REMOVAL_WARNING, &mut removal).await {
                Ok(removed) => break removed,
                Err(_) => {
                    let after = begun.elapsed();
                    tracing::warn!(uid, ?after, "orphaned pod directory is still being removed");
                }
            }
        }
    };
    match &removed {
        Ok(()) => {
            lock(&failures).clear(&uid);
            tracing::info!(uid, "orphaned pod directory removed");
        }
        Err(error) => {
            let (text, now) = (error.to_string(), parts.clock.now());
            if let Some(repetitions) = lock(&failures).record(uid.clone(), &text, now) {
                tracing::warn!(
                    %error,
                    uid,
                    repetitions,
                    "orphaned pod directory cannot be removed, retrying"
                );
            }
        }
    }
    drop(guard);
    (uid, removed.is_err())
}

/// The mirror pods that need a DELETE, by uid. Leaves out mirrors whose deletion the API has accepted and which wait
/// for a finalizer. A mirror that a user deletes gracefully still needs the node's DELETE.
fn mirrors_to_delete(orphaned: &BTreeMap<String, Arc<Pod>>) -> BTreeMap<String, Arc<Pod>> {
    let mirrors = orphaned.values();
    mirrors
        .filter(|mirror| mirror.metadata.deletion_grace_period_seconds != Some(0))
        .map(|mirror| (pod::uid(mirror).to_owned(), Arc::clone(mirror)))
        .collect()
}

/// Deletes mirror pods without their static pod, until the process exits. Each mirror has its own task and back-off.
pub(crate) async fn delete_mirrors(
    api: Arc<dyn PodApi>,
    clock: Clock,
    mut table: watch::Receiver<PodTable>,
) {
    let mut tasks = JoinSet::<(String, bool)>::new();
    let mut removals = Removals::default();
    let failures = Failures::default();
    // Deletions that the API has accepted, though the watch may not have reported them yet.
    let mut accepted = BTreeSet::new();
    loop {
        let mirrors = mirrors_to_delete(&table.borrow_and_update().orphaned_mirrors);
        accepted.retain(|uid| mirrors.contains_key(uid));
        let open = mirrors.keys().filter(|uid| !accepted.contains(*uid));
        for uid in removals.begin(&open.cloned().collect(), Instant::now()) {
            tasks.spawn(delete_mirror(
                Arc::clone(&api),
                clock,
                Arc::clone(&mirrors[&uid]),
                Arc::clone(&failures),
            ));
        }
        let again = removals.next();
        tokio::select! {
            // The order is fixed, so that a simulated run replays exactly.
            biased;
            // Cancel-safe: a finished task is either taken or stays in the set,
            // and the loop reads the latest table at its top.
            Some(ended) = tasks.join_next() => {
                // Tasks are never aborted, and a panic terminates the process.
                if let Ok((uid, has_failed)) = ended {
                    removals.finish(&uid, has_failed, Instant::now());
                    if !has_failed {
                        accepted.insert(uid);
                    }
                }
            }
            () = async { match again { Some(at) => tokio::time::sleep_until(at).await, None => std::future::pending().await } } => {}
            changed = table.changed() => if changed.is_err() { return },
        }
    }
}

/// Deletes a mirror pod. Returns its uid, and whether the deletion failed.
async fn delete_mirror(
    api: Arc<dyn PodApi>,
    clock: Clock,
    mirror: Arc<Pod>,
    failures: Failures,
) -> (String, bool) {
    let deletion = mirror::remove(&*api, &mirror);
    let deleted = tokio::time::timeout(DELETE_TIMEOUT, deletion)
        .await
        .unwrap_or_else(|_| Err(Fault::later(format!("no answer after {DELETE_TIMEOUT:?}"))));
    let uid = pod::uid(&mirror).to_owned();
    match &deleted {
        Ok(()) => lock(&failures).clear(&uid),
        Err(error) => {
            let now = clock.now();
            let due = lock(&failures).record(uid, &error.to_string(), now);
            if let Some(repetitions) = due {
                tracing::warn!(%error, pod = %pod::full_name(&mirror), repetitions, "orphaned mirror pod not deleted, retrying");
            }
        }
    }
    (pod::uid(&mirror).to_owned(), deleted.is_err())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_removal_backs_off_and_delays_no_other() {
        let begun = Instant::now();
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        let of = |uids: &[&str]| uids.iter().map(|uid| (*uid).to_owned()).collect();
        let mut removals = Removals::default();
        assert_eq!(removals.begin(&of(&["a", "b"]), at(0)), ["a", "b"]);
        assert_eq!(removals.next(), None);
        removals.finish("a", true, at(0));
        assert_eq!(removals.next(), Some(at(1)));
        assert!(removals.begin(&of(&["a", "b"]), at(0)).is_empty());
        assert_eq!(
            removals.begin(&of(&["a", "b", "c"]), at(1)),
            ["a", "c"],
            "a hanging removal is started once"
        );
        assert_eq!(
            removals.next(),
            None,
            "a removal in progress needs no retry"
        );
        removals.finish("c", false, at(1));
        removals.finish("a", true, at(1));
        assert_eq!(removals.next(), Some(at(3)));
        assert_eq!(removals.begin(&of(&["a", "b"]), at(3)), ["a"]);
        removals.finish("a", false, at(3));
        removals.finish("b", true, at(150));
        assert_eq!(removals.next(), Some(at(151)));
        // Another client has removed the orphan.
        assert!(removals.begin(&of(&[]), at(151)).is_empty());
        assert_eq!(removals.next(), None);
        assert_eq!(removals.begin(&of(&["b"]), at(151)), ["b"]);
        removals.finish("b", true, at(151));
        assert_eq!(removals.next(), Some(at(152)), "the back-off starts again");
    }
}
