//! Health of the committing thread.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A commit that takes longer counts as hanging.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of the committing thread; clones share it.
#[derive(Clone, Default)]
pub(super) struct Health(Arc<Mutex<Commits>>);

#[derive(Default)]
struct Commits {
    /// When the current commit began; `None` between commits.
    since: Option<Instant>,
    /// Why the last commit failed; `None` if it succeeded.
    failure: Option<String>,
}

impl Health {
    fn commits(&self) -> MutexGuard<'_, Commits> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the begin of a commit.
    pub(super) fn begin(&self) {
        self.commits().since = Some(Instant::now());
    }

    /// Records the result of a commit. A commit without writes (`wrote` is false) does not clear a failure.
    pub(super) fn end<E: std::fmt::Display>(&self, result: &Result<(), E>, wrote: bool) {
        let mut commits = self.commits();
        commits.since = None;
        match result {
            Err(error) => commits.failure = Some(error.to_string()),
            Ok(()) if wrote => commits.failure = None,
            Ok(()) => {}
        }
    }

    /// Why commits do not work; `Ok` if they do.
    pub(super) fn check(&self, now: Instant) -> Result<(), String> {
        let commits = self.commits();
        if let Some(failure) = &commits.failure {
            return Err(format!("the last write failed: {failure}"));
        }
        let took = commits
            .since
            .map(|since| now.saturating_duration_since(since));
        match took {
            Some(took) if took > COMMIT_TIMEOUT => Err(format!(
                "a write has not finished after {} s",
                took.as_secs()
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_or_hanging_commit_is_unhealthy() {
        let (health, now) = (Health::default(), Instant::now());
        assert_eq!(health.check(now), Ok(()));
        health.begin();
        assert_eq!(health.check(now + COMMIT_TIMEOUT / 2), Ok(()));
        let hangs = health.check(now + 2 * COMMIT_TIMEOUT);
        assert!(hangs.is_err_and(|e| e.contains("has not finished")));
        health.end(&Err::<(), _>("no space left"), true);
        let failed = Err("the last write failed: no space left".to_owned());
        assert_eq!(health.check(now), failed);
        health.end(&Ok::<_, String>(()), false);
        assert_eq!(
            health.check(now),
            failed,
            "the failure stays until a write succeeds"
        );
        health.end(&Ok::<_, String>(()), true);
        assert_eq!(health.check(now), Ok(()));
    }
}
