//! Watching a directory for changes: a hint to list it again, never the truth.

use std::path::Path;
use std::time::Duration;

use futures::{FutureExt as _, StreamExt as _};
use inotify::{EventStream, Inotify, WatchMask};

/// Room for the events that one read takes; what does not fit comes with the next one.
const BUFFER: usize = 4096;

/// How often a directory is looked at whose every write counts, where it cannot be watched: the kernel gives a user 128
/// watchers by default (`fs.inotify.max_user_instances`).
const UNWATCHED: Duration = Duration::from_millis(100);

/// A directory that is watched from the moment this is made. Made before the directory is listed, it misses nothing.
pub struct Changes {
    events: Option<EventStream<Vec<u8>>>,
    /// The wait where there are no events.
    blind: Duration,
}

impl Changes {
    /// Begins to watch which files there are, and for those that were written to the end. A directory that cannot be
    /// watched counts as unchanged.
    #[must_use]
    pub fn of(dir: &Path) -> Changes {
        Self::with(dir, WatchMask::empty(), Duration::MAX)
    }

    /// Begins to watch for every write too.
    #[must_use]
    pub fn with_writes(dir: &Path) -> Changes {
        Self::with(dir, WatchMask::MODIFY, UNWATCHED)
    }

    fn with(dir: &Path, more: WatchMask, blind: Duration) -> Changes {
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
            blind,
        }
    }

    /// Returns when something has changed since this was made, or after `most`.
    pub async fn wait(mut self, most: Duration) {
        self.next(most).await;
    }

    /// Returns when something has changed since this was made or returned last, or after `most`.
    pub async fn next(&mut self, most: Duration) {
        let Some(events) = &mut self.events else {
            return tokio::time::sleep(most.min(self.blind)).await;
        };
        // A change or the end of the wait: both mean looking again. All that has come by now is looked at together.
        let _ = tokio::time::timeout(most, events.next()).await;
        while events.next().now_or_never().is_some_and(|e| e.is_some()) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_comes_between_listing_and_waiting_is_noticed() {
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
    async fn every_write_counts_where_it_should() {
        use std::io::Write as _;
        let dir = tempfile::tempdir().expect("a directory");
        let mut file = std::fs::File::create(dir.path().join("log")).expect("a file");
        let (mut all, whole) = (Changes::with_writes(dir.path()), Changes::of(dir.path()));
        for _ in 0..3 {
            file.write_all(b"line\n").expect("written");
            let begun = tokio::time::Instant::now();
            all.next(Duration::from_secs(60)).await;
            assert!(begun.elapsed() < Duration::from_secs(60));
            // What was written before the wait is no news after it.
            all.next(Duration::from_secs(60)).await;
            assert!(begun.elapsed() >= Duration::from_secs(60));
        }
        let begun = tokio::time::Instant::now();
        whole.wait(Duration::from_secs(60)).await;
        assert!(begun.elapsed() >= Duration::from_secs(60));
    }
}
