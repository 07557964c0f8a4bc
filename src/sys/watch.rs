//! Watches a directory for changes. Events are hints to list the directory again.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use futures::{FutureExt as _, StreamExt as _};
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchMask};

/// The buffer size for events in bytes; further events follow with the next read.
const BUFFER: usize = 4096;

/// Polling interval for a directory whose writes matter, if it cannot be watched. By default,
/// the kernel allows 128 inotify instances per user (`fs.inotify.max_user_instances`).
const UNWATCHED: Duration = Duration::from_millis(100);

/// A directory that is watched from the creation of this value. If it
/// is created before the directory is listed, no change is missed.
pub struct Changes {
    events: Option<EventStream<Vec<u8>>>,
    /// Polling interval without events.
    polling_interval: Duration,
    /// The names of files that were removed or moved away; `None` if they are not collected.
    removed: Option<BTreeSet<OsString>>,
    /// Device and inode of the watched directory.
    place: Option<(u64, u64)>,
}

impl Changes {
    /// Starts to watch for created, removed and completely written
    /// files. A directory that cannot be watched counts as unchanged.
    #[must_use]
    pub fn of(dir: &Path) -> Changes {
        Self::with(dir, WatchMask::empty(), Duration::MAX)
    }

    /// Starts to watch, including every single write.
    #[must_use]
    pub fn with_writes(dir: &Path) -> Changes {
        Self::with(dir, WatchMask::MODIFY, UNWATCHED)
    }

    /// Starts to watch, and collects the names of files that are removed or moved away. Otherwise,
    /// a file that was recreated under the same name would look unchanged in the next listing.
    #[must_use]
    pub fn with_removals(dir: &Path) -> Changes {
        Changes {
            removed: Some(BTreeSet::new()),
            ..Self::of(dir)
        }
    }

    fn with(dir: &Path, more: WatchMask, polling_interval: Duration) -> Changes {
        let mask = WatchMask::CREATE
            | WatchMask::CLOSE_WRITE
            | WatchMask::MOVE
            | WatchMask::DELETE
            | WatchMask::ATTRIB
            | more;
        let stream = Inotify::init().and_then(|inotify| {
            inotify.watches().add(dir, mask)?;
            inotify.into_event_stream(vec![0; BUFFER])
        });
        Changes {
            events: stream.ok(),
            polling_interval,
            removed: None,
            place: place(dir),
        }
    }

    /// Whether events of this directory arrive: it is watched, and no other directory has replaced it.
    #[must_use]
    pub fn is_live(&self, dir: &Path) -> bool {
        self.events.is_some() && self.place.is_some() && self.place == place(dir)
    }

    /// Takes the names of the files that were removed or moved away since the last call.
    pub fn take_removed(&mut self) -> BTreeSet<OsString> {
        self.removed
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    fn record(&mut self, event: EventOwned) {
        if event.mask.contains(EventMask::IGNORED) {
            // The directory was removed; another one may get its inode.
            self.place = None;
        }
        let is_removal = event
            .mask
            .intersects(EventMask::DELETE | EventMask::MOVED_FROM);
        if let (true, Some(removed), Some(name)) = (is_removal, &mut self.removed, event.name) {
            removed.insert(name);
        }
    }

    /// Waits for a change since the creation of this value, or for at most `most`.
    pub async fn wait(mut self, most: Duration) {
        self.next(most).await;
    }

    /// Waits for a change since creation or the last return, or for at most `most`.
    pub async fn next(&mut self, most: Duration) {
        let Some(events) = &mut self.events else {
            return tokio::time::sleep(most.min(self.polling_interval)).await;
        };
        // After a change or the timeout, the caller lists the directory. Take all pending events at once.
        let first = tokio::time::timeout(most, events.next()).await;
        let mut seen: Vec<_> = first.ok().flatten().into_iter().collect();
        while let Some(Some(event)) = events.next().now_or_never() {
            seen.push(event);
        }
        for event in seen.into_iter().flatten() {
            self.record(event);
        }
    }
}

/// The device and inode of a directory.
fn place(dir: &Path) -> Option<(u64, u64)> {
    let metadata = std::fs::metadata(dir).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn changes_between_listing_and_waiting_are_noticed() {
        let dir = tempfile::tempdir().expect("a directory");
        let changes = Changes::of(dir.path());
        std::fs::write(dir.path().join("new"), "").expect("a file");
        let begun = tokio::time::Instant::now();
        changes.wait(Duration::from_secs(60)).await;
        assert!(begun.elapsed() < Duration::from_secs(60));
        Changes::of(dir.path()).wait(Duration::from_secs(60)).await;
        assert!(
            begun.elapsed() >= Duration::from_secs(60),
            "nothing has changed since"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn the_names_of_removed_files_are_collected() {
        let dir = tempfile::tempdir().expect("a directory");
        let watched = dir.path().join("watched");
        std::fs::create_dir(&watched).expect("a directory");
        let write = |name: &str| std::fs::write(watched.join(name), "").expect("a file");
        let rename = |from: &str, to: &str| {
            std::fs::rename(watched.join(from), watched.join(to)).expect("renamed");
        };
        write("rewritten");
        write("moved");
        write("replaced");
        let mut changes = Changes::with_removals(&watched);
        std::fs::remove_file(watched.join("rewritten")).expect("removed");
        write("rewritten");
        rename("moved", "kept");
        write(".new");
        rename(".new", "replaced");
        changes.next(Duration::from_secs(60)).await;
        let expected = [".new", "moved", "rewritten"].map(OsString::from);
        assert_eq!(changes.take_removed(), expected.into());
        assert_eq!(changes.take_removed(), BTreeSet::new());
        assert!(changes.is_live(&watched));
        rename("", "../elsewhere");
        std::fs::create_dir(&watched).expect("a directory");
        assert!(!changes.is_live(&watched), "another directory has its path");
        assert!(!Changes::with_removals(&dir.path().join("none")).is_live(&watched));
    }

    #[tokio::test(start_paused = true)]
    async fn writes_wake_only_watches_that_include_writes() {
        use std::io::Write as _;
        let dir = tempfile::tempdir().expect("a directory");
        let mut file = std::fs::File::create(dir.path().join("log")).expect("a file");
        let (mut all, whole) = (Changes::with_writes(dir.path()), Changes::of(dir.path()));
        for _ in 0..3 {
            file.write_all(b"line\n").expect("written");
            let begun = tokio::time::Instant::now();
            all.next(Duration::from_secs(60)).await;
            assert!(begun.elapsed() < Duration::from_secs(60));
            // Writes before the wait must not wake it.
            all.next(Duration::from_secs(60)).await;
            assert!(begun.elapsed() >= Duration::from_secs(60));
        }
        let begun = tokio::time::Instant::now();
        whole.wait(Duration::from_secs(60)).await;
        assert!(begun.elapsed() >= Duration::from_secs(60));
    }
}
