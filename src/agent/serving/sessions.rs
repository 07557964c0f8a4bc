//! Open sessions of exec, attach and port-forward. They end with the agent, which waits for them for a limited time.

use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::Refusal;

/// Limit for open sessions, as each uses memory.
const MAX_SESSIONS: usize = 512;
/// Maximum time that a shutdown waits for open sessions.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// The open sessions; clones share them.
#[derive(Debug, Clone)]
pub struct Sessions {
    places: Arc<Semaphore>,
    open: TaskTracker,
}

/// An open session; dropping it closes the session.
#[derive(Debug)]
pub struct Session {
    _place: OwnedSemaphorePermit,
    _open: TaskTrackerToken,
}

impl Default for Sessions {
    fn default() -> Sessions {
        Sessions {
            places: Arc::new(Semaphore::new(MAX_SESSIONS)),
            open: TaskTracker::new(),
        }
    }
}

impl Sessions {
    /// Opens a session. Fails if there are too many, or the agent is stopping.
    pub(super) fn begin(&self) -> Result<Session, Refusal> {
        match Arc::clone(&self.places).try_acquire_owned() {
            Ok(place) => Ok(Session {
                _place: place,
                _open: self.open.token(),
            }),
            Err(TryAcquireError::NoPermits) => Err(Refusal(
                StatusCode::TOO_MANY_REQUESTS,
                "too many streams are open on this node: try again later".into(),
            )),
            Err(TryAcquireError::Closed) => Err(Refusal(
                StatusCode::SERVICE_UNAVAILABLE,
                "the node's agent is stopping: try again after it has restarted".into(),
            )),
        }
    }

    /// Rejects further sessions, and waits for open ones for at most [`DRAIN_TIMEOUT`]. The rest end with the process.
    pub async fn drain(&self) {
        self.places.close();
        self.open.close();
        let open = self.open.len();
        if open > 0 {
            tracing::info!(
                open,
                "the agent stops when the sessions of kubectl are closed, or in {}s",
                DRAIN_TIMEOUT.as_secs()
            );
        }
        if tokio::time::timeout(DRAIN_TIMEOUT, self.open.wait())
            .await
            .is_err()
        {
            tracing::warn!(
                cut_off = self.open.len(),
                "closing sessions that are still open"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;

    #[tokio::test(start_paused = true)]
    async fn a_stop_waits_for_sessions_with_a_timeout() {
        let sessions = Sessions::default();
        let begun = Instant::now();
        sessions.clone().drain().await;
        assert_eq!(
            begun.elapsed(),
            Duration::ZERO,
            "without sessions, nothing delays the stop"
        );
        assert!(
            sessions
                .begin()
                .is_err_and(|r| r.0 == StatusCode::SERVICE_UNAVAILABLE)
        );
        for (lasts, waits) in [(3, 3), (60, 10)] {
            let sessions = Sessions::default();
            let session = sessions.begin().expect("a free slot");
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs(lasts)).await;
                drop(session);
            });
            let begun = Instant::now();
            sessions.drain().await;
            assert_eq!(begun.elapsed().as_secs(), waits, "{lasts}");
        }
        let sessions = Sessions::default();
        let all: Vec<_> = (0..MAX_SESSIONS)
            .map(|_| sessions.begin().expect("room"))
            .collect();
        assert!(
            sessions
                .begin()
                .is_err_and(|r| r.0 == StatusCode::TOO_MANY_REQUESTS)
        );
        drop(all);
        assert!(sessions.begin().is_ok());
    }
}
