//! Locks for global mounts: each path has one holder at a time, and a hanging device blocks no other path.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::HostError;
use holdfast_core::lock::lock;

/// The locked paths.
static LOCKED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// The lock of a path, held until it is dropped.
pub(crate) struct StagingLock(PathBuf);

impl StagingLock {
    /// Locks a path; `None` if it is already locked.
    pub(crate) fn try_lock(place: &Path) -> Option<StagingLock> {
        let mut all = lock(&LOCKED);
        all.insert(place.into()).then(|| StagingLock(place.into()))
    }

    /// Like [`StagingLock::try_lock`], with the error for a pod whose volume is being set up.
    pub(crate) fn lock_for_pod(place: &Path) -> Result<StagingLock, HostError> {
        let taken = "another pod is mounting or unmounting the volume";
        StagingLock::try_lock(place).ok_or_else(|| HostError::under_way(taken))
    }
}

impl Drop for StagingLock {
    fn drop(&mut self) {
        lock(&LOCKED).remove(&self.0);
    }
}
