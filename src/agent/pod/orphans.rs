//! Clearing up after pods that are gone: directories and cgroups that no pod owns, and mirrors without
//! their static pod. Tasks of their own, with deadlines and back-off: a driver or an apiserver that does
//! not answer holds up nothing else.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::dispatch::Roster;
use super::mirror;
use crate::agent::Context;
use crate::core::backoff::Doubling;
use crate::core::pod;

/// How often directories and cgroups without a pod are looked for.
const ORPHAN_SWEEP_INTERVAL: Duration = Duration::from_secs(60);
/// How long removing what one pod has left may take before the next one's turn.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(150);
/// How long deleting one mirror may take.
const DELETE_TIMEOUT: Duration = Duration::from_secs(15);
/// How long a failed deletion waits, doubling up to the longest.
const RETRY: Doubling = Doubling::new(Duration::from_secs(1), Duration::from_secs(60));

/// Removes what pods that are gone have left, until the process ends.
pub async fn sweep(context: Arc<Context>, mut roster: watch::Receiver<Roster>) {
    // The dispatcher lives as long as the process.
    if roster.wait_for(|roster| roster.complete).await.is_err() {
        return;
    }
    loop {
        sweep_once(&context, &roster).await;
        tokio::time::sleep(ORPHAN_SWEEP_INTERVAL).await;
    }
}

async fn sweep_once(context: &Context, roster: &watch::Receiver<Roster>) {
    let in_runtime = match context.runtime.list().await {
        Ok(listed) => listed,
        Err(error) => {
            tracing::debug!(%error, "orphans are not looked for: the runtime cannot say what runs");
            return;
        }
    };
    let is_known =
        |uid: &String| roster.borrow().has(uid) || in_runtime.iter().any(|p| p.uid == *uid);
    let leftovers = context.host.leftovers().await;
    let removals = leftovers.into_iter().filter(|uid| !is_known(uid)).map(|uid| {
        async move {
            let removal = async {
                crate::agent::volume::csi::unpublish(context, &uid).await?;
                context.host.remove_leftovers(&uid).await
            };
            let removed = tokio::time::timeout(REMOVAL_TIMEOUT, removal)
                .await
                .unwrap_or_else(|_| Err(format!("not done after {REMOVAL_TIMEOUT:?}")));
            match removed {
                Ok(()) => tracing::info!(uid, "orphaned pod directory removed"),
                Err(error) => {
                    tracing::warn!(%error, uid, "orphaned pod directory cannot be removed, retrying");
                }
            }
        }
    });
    // Side by side: a driver that hangs for one pod does not hold up the others.
    futures::future::join_all(removals).await;
}

/// Deletes mirrors whose static pod is gone, until the process ends.
pub async fn delete_mirrors(context: Arc<Context>, mut roster: watch::Receiver<Roster>) {
    let mut pauses = RETRY;
    loop {
        let orphaned = roster.borrow_and_update().orphaned_mirrors.clone();
        let mut failed = false;
        for orphan in orphaned.into_values() {
            let deletion = mirror::remove(&context, &orphan);
            let deleted = tokio::time::timeout(DELETE_TIMEOUT, deletion)
                .await
                .unwrap_or_else(|_| Err(format!("no answer after {DELETE_TIMEOUT:?}")));
            if let Err(error) = deleted {
                failed = true;
                tracing::warn!(%error, pod = %pod::full_name(&orphan), "orphaned mirror pod not deleted, retrying");
            }
        }
        if !failed {
            pauses.reset();
        }
        let again = failed.then(|| Instant::now() + pauses.pause());
        tokio::select! {
            // In this order, so that a simulated run replays exactly.
            biased;
            // Cancel-safe: the newest roster is read at the top of the loop.
            () = async { match again { Some(at) => tokio::time::sleep_until(at).await, None => std::future::pending().await } } => {}
            changed = roster.changed(), if !failed => if changed.is_err() { return },
        }
    }
}
