//! What is left of the node: read from the kernel, in a thread where reading holds up nobody.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::core::node::eviction::{Amount, Observations, Signal};
use crate::core::serving::cgroup_stats::Depth;
use crate::host::{HostError, blocking};
use crate::sys::machine::Room;
use crate::sys::meter;
use crate::sys::patient::Patient;

/// How long a filesystem may take to say what it has.
const PATIENCE: Duration = Duration::from_secs(2);

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

/// What a directory's filesystem has, and its device.
type Found = (Room, u64);

/// Measures filesystems. One that hangs, as a disk behind a network may, is not measured and holds up no other.
pub(super) struct Filesystems {
    calls: Patient,
    read: fn(&Path) -> std::io::Result<Found>,
    /// How long one may take.
    patience: Duration,
}

impl Default for Filesystems {
    fn default() -> Filesystems {
        Filesystems {
            calls: Patient::default(),
            read: |dir| Ok((Room::of(dir)?, std::fs::metadata(dir)?.dev())),
            patience: PATIENCE,
        }
    }
}

impl Filesystems {
    async fn room(&self, dir: PathBuf) -> Option<Found> {
        let (read, key) = (self.read, dir.display().to_string());
        let work = move || read(&dir).map_err(HostError::from);
        let room = self.calls.call(&key, self.patience, work).await;
        room.inspect_err(
            |error| tracing::debug!(%error, dir = key, "the filesystem cannot be measured"),
        )
        .ok()
    }
}

/// Takes in a filesystem. Some have no fixed number of inodes.
fn add_room(left: &mut Observations, room: &Room, [bytes, inodes]: [Signal; 2]) {
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

/// Memory alone: the machine's and that of the cgroup of all pods.
pub(super) async fn memory(pods: String) -> Observations {
    blocking(move || Ok(read_memory(&pods)))
        .await
        .unwrap_or_default()
}

/// Process ids.
fn add_processes(left: &mut Observations) {
    let (capacity, used) = meter::processes();
    if capacity > 0 {
        let available = capacity.saturating_sub(used);
        let amount = Amount {
            capacity,
            available,
        };
        left.insert(Signal::PidAvailable, amount);
    }
}

/// The filesystems of the root directory and of the images, and process ids.
pub(super) async fn others(
    filesystems: &Filesystems,
    root: PathBuf,
    images: Option<PathBuf>,
) -> Measured {
    let elsewhere = images.clone().filter(|dir| *dir != root);
    let of_images = async { filesystems.room(elsewhere.clone()?).await };
    let (own, of_images) = tokio::join!(filesystems.room(root), of_images);
    let of_images = match elsewhere {
        Some(_) => of_images,
        None => own.filter(|_| images.is_some()),
    };
    let mut left = Observations::new();
    if let Some((room, _)) = &own {
        let node = [Signal::NodeFsAvailable, Signal::NodeFsInodesFree];
        add_room(&mut left, room, node);
    }
    if let Some((room, _)) = &of_images {
        let images = [Signal::ImageFsAvailable, Signal::ImageFsInodesFree];
        add_room(&mut left, room, images);
    }
    add_processes(&mut left);
    let device = |found: Option<Found>| found.map(|(_, device)| device);
    Measured {
        left,
        // One that does not answer while the other does is another.
        separate_images: images.is_some() && device(own) != device(of_images),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn this_machine_is_measured() {
        let root = tempfile::tempdir().expect("a directory");
        let dir = root.path().to_owned();
        let filesystems = Filesystems::default();
        let found = others(&filesystems, dir.clone(), Some(dir.clone())).await;
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
        let elsewhere = others(&filesystems, dir, Some("/proc".into())).await;
        assert!(elsewhere.separate_images);
        // A filesystem that is made of nothing has no room that could run short.
        assert!(!elsewhere.left.contains_key(&Signal::ImageFsAvailable));
        assert_eq!(elsewhere.part(Signal::NodeFsAvailable), Part::Files);
        assert_eq!(elsewhere.part(Signal::ImageFsInodesFree), Part::Layers);
    }

    #[tokio::test]
    async fn a_filesystem_that_hangs_holds_up_no_other() {
        let root = tempfile::tempdir().expect("a directory");
        let filesystems = Filesystems {
            read: |dir| {
                if dir.ends_with("hangs") {
                    std::thread::park();
                }
                Ok((Room::of(dir)?, 1))
            },
            patience: Duration::from_secs(1),
            calls: Patient::default(),
        };
        let hangs = root.path().join("hangs");
        for _ in 0..2 {
            let measured = others(&filesystems, root.path().into(), Some(hangs.clone()));
            let found = tokio::time::timeout(Duration::from_secs(10), measured).await;
            let Measured {
                left,
                separate_images,
            } = found.expect("it goes on");
            assert!(left.contains_key(&Signal::NodeFsAvailable));
            assert!(left.contains_key(&Signal::PidAvailable));
            assert!(!left.contains_key(&Signal::ImageFsAvailable));
            assert!(separate_images);
        }
        assert_eq!(filesystems.calls.under_way(), 1, "it is asked once");
    }
}
