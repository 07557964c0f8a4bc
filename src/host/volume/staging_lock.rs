//! Locks for global mounts: each path has one holder at a time, and a hanging device blocks no other path.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::core::lock::lock;
use crate::host::HostError;

/// The locked paths.
static TAKEN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// The lock of a path, held until it is dropped.
pub(in crate::host) struct Turn(PathBuf);

impl Turn {
    /// Locks a path; `None` if it is already locked.
    pub(in crate::host) fn at(place: &Path) -> Option<Turn> {
        let mut all = lock(&TAKEN);
        all.insert(place.into()).then(|| Turn(place.into()))
    }

    /// Like [`Turn::at`], with the error for a pod whose volume is being set up.
    pub(in crate::host) fn of_pod(place: &Path) -> Result<Turn, HostError> {
        let taken = "another pod is mounting or unmounting the volume";
        Turn::at(place).ok_or_else(|| HostError::under_way(taken))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        lock(&TAKEN).remove(&self.0);
    }
}
