//! Turns at places where devices are mounted for all pods: each by one at a time, and a device that hangs in the way of
//! no other.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::core::lock::lock;
use crate::host::HostError;

/// The places that somebody is at.
static TAKEN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// A turn at one of them, until it is dropped.
pub(in crate::host) struct Turn(PathBuf);

impl Turn {
    /// None if somebody else has it.
    pub(in crate::host) fn at(place: &Path) -> Option<Turn> {
        let mut all = lock(&TAKEN);
        all.insert(place.into()).then(|| Turn(place.into()))
    }

    /// The same, as whoever sets up a volume is told of it.
    pub(in crate::host) fn of_pod(place: &Path) -> Result<Turn, HostError> {
        let taken = "another pod is mounting or unmounting it just now";
        Turn::at(place).ok_or_else(|| HostError::under_way(taken))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        lock(&TAKEN).remove(&self.0);
    }
}
