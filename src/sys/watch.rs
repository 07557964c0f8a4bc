//! Watching a directory for changes: a hint to list it again, never the truth.

use std::path::Path;
use std::time::Duration;

use futures::StreamExt as _;
use inotify::{EventStream, Inotify, WatchMask};

/// Room for the events that one read takes; what does not fit comes with the next one.
const BUFFER: usize = 4096;

/// A directory that is watched from the moment this is made. Made before the directory is listed, it misses nothing.
pub struct Changes(Option<EventStream<Vec<u8>>>);

impl Changes {
    /// Begins to watch. A directory that cannot be watched counts as unchanged.
    #[must_use]
    pub fn of(dir: &Path) -> Changes {
        let mask = WatchMask::CREATE
            | WatchMask::CLOSE_WRITE
            | WatchMask::MOVE
            | WatchMask::DELETE
            | WatchMask::ATTRIB;
        let stream = Inotify::init().and_then(|inotify| {
            inotify.watches().add(dir, mask)?;
            inotify.into_event_stream(vec![0; BUFFER])
        });
        Changes(stream.ok())
    }

    /// Returns when something has changed since this was made, or after `most`.
    pub async fn wait(mut self, most: Duration) {
        match &mut self.0 {
            // A change or the end of the wait: both mean looking again.
            Some(stream) => _ = tokio::time::timeout(most, stream.next()).await,
            None => tokio::time::sleep(most).await,
        }
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
}
