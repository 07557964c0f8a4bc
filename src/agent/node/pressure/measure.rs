//! Measures the node's available resources, in threads of their own so that a slow read blocks no other task.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_core::node::eviction::{Amount, Observations, Signal};
use holdfast_core::serving::cgroup_stats::Depth;
use holdfast_host::{HostError, blocking};
use holdfast_sys::blocking_calls::BlockingCalls;
use holdfast_sys::machine::Room;
use holdfast_sys::meter;

/// Timeout for reading a filesystem's usage.
const FILESYSTEM_TIMEOUT: Duration = Duration::from_secs(2);

/// The measurements of one round.
#[derive(Debug, Clone, Default)]
pub(super) struct Measured {
    /// The available amounts.
    pub left: Observations,
    /// Whether images and containers are on a different filesystem from the root directory.
    pub separate_images: bool,
}

/// The parts of a pod's disk usage that are on a filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Volumes, logs and writable layers.
    Whole,
    /// Volumes and logs.
    Files,
    /// Writable layers.
    Layers,
}

impl Measured {
    /// The parts of a pod's disk usage on the signal's filesystem.
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
    // A value that cannot be read does not count as low.
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

/// A filesystem's capacity and usage, and its device number.
type Found = (Room, u64);

/// Measures filesystems. A filesystem that hangs, such as a network disk, is skipped and does not delay the others.
pub(super) struct Filesystems {
    calls: BlockingCalls,
    read: fn(&Path) -> std::io::Result<Found>,
    /// Timeout for one filesystem.
    timeout: Duration,
}

impl Default for Filesystems {
    fn default() -> Filesystems {
        Filesystems {
            calls: BlockingCalls::default(),
            read: |dir| Ok((Room::of(dir)?, std::fs::metadata(dir)?.dev())),
            timeout: FILESYSTEM_TIMEOUT,
        }
    }
}

impl Filesystems {
    async fn room(&self, dir: PathBuf) -> Option<Found> {
        let (read, key) = (self.read, dir.display().to_string());
        let work = move || read(&dir).map_err(HostError::from);
        let room = self.calls.call(&key, self.timeout, work).await;
        room.inspect_err(
            |error| tracing::debug!(%error, dir = key, "cannot measure the filesystem"),
        )
        .ok()
    }
}

/// Adds a filesystem's observations. Some filesystems have no fixed number of inodes.
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

/// Measures memory: of the machine, and of the cgroup of all pods.
pub(super) async fn memory(pods: String) -> Observations {
    blocking(move || Ok(read_memory(&pods)))
        .await
        .unwrap_or_default()
}

/// Measures process ids.
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

/// Measures the filesystems of the root directory and of images, and process ids.
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
        // If only one of the directories can be read, they are on different filesystems.
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
        // A filesystem without a capacity cannot run short.
        assert!(!elsewhere.left.contains_key(&Signal::ImageFsAvailable));
        assert_eq!(elsewhere.part(Signal::NodeFsAvailable), Part::Files);
        assert_eq!(elsewhere.part(Signal::ImageFsInodesFree), Part::Layers);
    }

    #[tokio::test]
    async fn a_hanging_filesystem_delays_no_other() {
        let root = tempfile::tempdir().expect("a directory");
        let filesystems = Filesystems {
            read: |dir| {
                if dir.ends_with("hangs") {
                    std::thread::park();
                }
                Ok((Room::of(dir)?, 1))
            },
            timeout: Duration::from_secs(1),
            calls: BlockingCalls::default(),
        };
        let hangs = root.path().join("hangs");
        for _ in 0..2 {
            let measured = others(&filesystems, root.path().into(), Some(hangs.clone()));
            let found = tokio::time::timeout(Duration::from_secs(10), measured).await;
            let Measured {
                left,
                separate_images,
            } = found.expect("the measurement completes");
            assert!(left.contains_key(&Signal::NodeFsAvailable));
            assert!(left.contains_key(&Signal::PidAvailable));
            assert!(!left.contains_key(&Signal::ImageFsAvailable));
            assert!(separate_images);
        }
        assert_eq!(
            filesystems.calls.pending(),
            1,
            "the hanging filesystem is read once"
        );
    }
}
