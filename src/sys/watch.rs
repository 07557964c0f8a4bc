//! Watching a directory for changes: a hint to list it again, never the truth.

use std::path::Path;
use std::time::Duration;

use futures::StreamExt as _;
use inotify::{Inotify, WatchMask};

/// Returns when something in `dir` has changed, or after `most`. A directory that cannot be watched
/// counts as unchanged until then.
pub async fn changed(dir: &Path, most: Duration) {
    let mask = WatchMask::CREATE | WatchMask::CLOSE_WRITE | WatchMask::MOVE | WatchMask::DELETE | WatchMask::ATTRIB;
    let stream = Inotify::init().and_then(|inotify| {
        inotify.watches().add(dir, mask)?;
        inotify.into_event_stream(vec![0; 4096])
    });
    match stream {
        // A change or the end of the wait: both mean looking again.
        Ok(mut stream) => _ = tokio::time::timeout(most, stream.next()).await,
        Err(_) => tokio::time::sleep(most).await,
    }
}
