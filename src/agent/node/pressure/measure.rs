//! What is left of the node: read from the kernel, in a thread where reading holds up nobody.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::core::node::eviction::{Amount, Observations, Signal};
use crate::core::serving::cgroup_stats::Depth;
use crate::host::blocking;
use crate::sys::machine::Room;
use crate::sys::meter;

/// Everything.
#[derive(Debug, Clone, Default)]
pub(super) struct Measured {
    /// What is left.
    pub left: Observations,
    /// Whether images and containers lie on another filesystem than the root directory.
    pub separate_images: bool,
}

/// What pods have on a filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// All.
    Whole,
    /// Volumes and logs.
    Files,
    /// Writable layers.
    Layers,
}

impl Measured {
    /// What pods have on the filesystem that a signal is about.
    pub fn part(&self, signal: Signal) -> Part {
        match (self.separate_images, signal.is_of_images()) {
            (false, _) => Part::Whole,
            (true, true) => Part::Layers,
            (true, false) => Part::Files,
        }
    }
}

fn read_memory(pods: &str) -> Observations {
    let mut left = Observations::new();
    let (capacity, available) = meter::memory();
    // What cannot be read is not low.
    if capacity > 0 {
        let amount = Amount {
            capacity,
            available,
        };
        left.insert(Signal::MemoryAvailable, amount);
    }
    let all = meter::cgroup(pods, Depth::Memory);
    if let Some((limit, used)) = all.and_then(|u| Some((u.limit?, u.working_set))) {
        let amount = Amount {
            capacity: limit,
            available: limit.saturating_sub(used),
        };
        left.insert(Signal::AllocatableMemoryAvailable, amount);
    }
    left
}

/// Takes in a filesystem. Some have no fixed number of inodes.
fn add_room(left: &mut Observations, dir: &Path, [bytes, inodes]: [Signal; 2]) {
    let room = match Room::of(dir) {
        Ok(room) => room,
        Err(error) => {
            tracing::debug!(%error, dir = %dir.display(), "the filesystem cannot be measured");
            return;
        }
    };
    let mut add = |signal, capacity, available| {
        if capacity > 0 {
            let amount = Amount {
                capacity,
                available,
            };
            left.insert(signal, amount);
        }
    };
    add(bytes, room.capacity, room.available);
    add(inodes, room.inodes, room.inodes_free);
}

fn device(dir: &Path) -> Option<u64> {
    std::fs::metadata(dir).ok().map(|m| m.dev())
}

/// Memory alone: the machine's and that of the cgroup of all pods.
pub(super) async fn memory(pods: String) -> Observations {
    blocking(move || Ok(read_memory(&pods)))
        .await
        .unwrap_or_default()
}

/// The filesystems of the root directory and of the images, and process ids.
pub(super) async fn others(root: PathBuf, images: Option<PathBuf>) -> Measured {
    let read = move || {
        let mut left = Observations::new();
        let node = [Signal::NodeFsAvailable, Signal::NodeFsInodesFree];
        add_room(&mut left, &root, node);
        let mut separate_images = false;
        if let Some(images) = images {
            separate_images = device(&images) != device(&root);
            let of_images = [Signal::ImageFsAvailable, Signal::ImageFsInodesFree];
            add_room(&mut left, &images, of_images);
        }
        let (capacity, used) = meter::processes();
        if capacity > 0 {
            let available = capacity.saturating_sub(used);
            let amount = Amount {
                capacity,
                available,
            };
            left.insert(Signal::PidAvailable, amount);
        }
        Ok(Measured {
            left,
            separate_images,
        })
    };
    blocking(read).await.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn this_machine_is_measured() {
        let root = tempfile::tempdir().expect("a directory");
        let dir = root.path().to_owned();
        let found = others(dir.clone(), Some(dir.clone())).await;
        assert!(!found.separate_images);
        let mut left = found.left;
        left.extend(memory("/no-such-cgroup".into()).await);
        let amount = |signal| left.get(&signal).copied().unwrap_or_default();
        for signal in [
            Signal::MemoryAvailable,
            Signal::NodeFsAvailable,
            Signal::ImageFsAvailable,
            Signal::PidAvailable,
        ] {
            let Amount {
                capacity,
                available,
            } = amount(signal);
            assert!(0 < available && available <= capacity, "{signal:?}");
        }
        let limit = Signal::AllocatableMemoryAvailable;
        assert!(!left.contains_key(&limit));
        let elsewhere = others(dir, Some("/proc".into())).await;
        assert!(elsewhere.separate_images);
        // A filesystem that is made of nothing has no room that could run short.
        assert!(!elsewhere.left.contains_key(&Signal::ImageFsAvailable));
        assert_eq!(elsewhere.part(Signal::NodeFsAvailable), Part::Files);
        assert_eq!(elsewhere.part(Signal::ImageFsInodesFree), Part::Layers);
    }
}
