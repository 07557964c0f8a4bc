//! Unstages volumes without a pod. A pod's termination waits only for its own unpublishing, as in the kubelet, where
//! `UnmountDevice` is a separate operation. So a driver that fails or does not answer NodeUnstageVolume blocks neither
//! the pod nor other volumes. Until a volume is unstaged, the node reports it in use.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{Csi, VolumeError, failed, unique_name};
use crate::metrics::{Metrics, VolumeOperation};
use holdfast_core::backoff::Doubling;
use holdfast_core::lock::lock;
use holdfast_core::repeated::RepeatedFailures;
use holdfast_host::blocking;
use holdfast_host::volume::csi::Published;
use holdfast_sys::clock::Clock;

/// Back-off between attempts; the maximum is the kubelet's.
const RETRY: Doubling = Doubling::new(Duration::from_millis(500), Duration::from_secs(122));

impl Csi {
    /// Records that a volume is still staged after its last pod has released it.
    pub(super) fn mark_staged_without_pod(&self, place: &Published) {
        if lock(&self.staged_without_pod)
            .insert(unique_name(place), place.clone())
            .is_none()
        {
            lock(&self.to_unstage).push(place.clone());
            self.unstage_requested.notify_one();
        }
    }

    /// Records that a volume is unstaged, or used again.
    fn unmark_staged(&self, place: &Published) {
        lock(&self.staged_without_pod).remove(&unique_name(place));
        self.forget_unused(place);
        self.reported.request_update();
    }
}

/// What unstaging uses.
pub(crate) struct Parts {
    pub clock: Clock,
    pub metrics: Arc<Metrics>,
    pub csi: Arc<Csi>,
}

/// Unstages volumes, each in its own task. Never returns.
pub async fn run(parts: Arc<Parts>) {
    let mut tries = JoinSet::new();
    loop {
        for place in std::mem::take(&mut *lock(&parts.csi.to_unstage)) {
            tries.spawn(unstage_with_retries(Arc::clone(&parts), place));
        }
        tokio::select! {
            () = parts.csi.unstage_requested.notified() => {}
            Some(ended) = tries.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "unstaging a volume ended unexpectedly; the next start of the agent retries it");
                }
            }
        }
    }
}

async fn unstage_with_retries(parts: Arc<Parts>, place: Published) {
    let (mut pauses, mut failures) = (RETRY, RepeatedFailures::default());
    while let Err(error) = unstage(&parts, &place).await {
        let due = failures.record((), &error.to_string(), parts.clock.now());
        if let Some(repetitions) = due {
            tracing::warn!(
                %error,
                volume = place.name,
                driver = place.data.driver_name,
                repetitions,
                "volume without a pod stays staged, retrying"
            );
        }
        tokio::time::sleep(pauses.pause()).await;
    }
}

/// Unstages a volume and removes its record, unless a pod uses it again.
async fn unstage(parts: &Parts, place: &Published) -> Result<(), VolumeError> {
    let volume_lock = parts.csi.volume_lock(place);
    let _guard = volume_lock.lock().await;
    // The pod that uses the volume now unstages it later.
    if super::is_published_elsewhere(&parts.csi, place).await? {
        parts.csi.unmark_staged(place);
        return Ok(());
    }
    if let Some(staged) = super::staged(&parts.csi, place).await? {
        call_unstage(parts, place, &staged).await?;
    }
    // Before the lock is released: the next pod must report the volume again.
    parts.csi.unmark_staged(place);
    Ok(())
}

async fn call_unstage(parts: &Parts, place: &Published, staged: &Path) -> Result<(), VolumeError> {
    let data = &place.data;
    let registered = parts.csi.driver(&data.driver_name)?;
    // Whether the call succeeds or not, the next pod must stage the volume again.
    lock(&parts.csi.staged).remove(&unique_name(place));
    let (begun, staged) = (Instant::now(), staged.display().to_string());
    let unstaged = registered
        .driver
        .unstage(&data.volume_handle, &staged)
        .await;
    parts.metrics.volume(VolumeOperation {
        name: match place.block {
            true => "unmap_device",
            false => "unmount_device",
        },
        plugin: &format!("kubernetes.io/csi:{}", data.driver_name),
        is_migrated: false,
        has_failed: unstaged.is_err(),
        took: begun.elapsed(),
    });
    unstaged.map_err(failed("NodeUnstageVolume"))?;
    let (dirs, own) = (parts.csi.dirs.clone(), place.clone());
    blocking(move || {
        dirs.unstaged(&own)?;
        dirs.forget(&own, true)
    })
    .await?;
    Ok(())
}
