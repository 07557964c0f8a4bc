//! The time, steered by tests: wall-clock time moves with tokio's, which a test can pause and advance.

use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

/// A clock; copies agree.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    wall: Timestamp,
    at: Instant,
}

impl Clock {
    /// The system's clock.
    #[must_use]
    #[allow(clippy::disallowed_methods)] // The one place that asks the system for the time.
    pub fn system() -> Clock {
        Clock {
            wall: Timestamp::now(),
            at: Instant::now(),
        }
    }

    /// A clock that starts at `wall`.
    #[must_use]
    pub fn starting_at(wall: Timestamp) -> Clock {
        Clock {
            wall,
            at: Instant::now(),
        }
    }

    /// The present time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.wall + SignedDuration::try_from(self.at.elapsed()).unwrap_or(SignedDuration::ZERO)
    }
}
