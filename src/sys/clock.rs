//! The time of day, steered by tests. It may be set, and it goes on while a machine sleeps: how long something takes is
//! measured with tokio's `Instant`, and whoever keeps times to act at asks [`Watch::moved`].

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

/// What is not worth calling a movement: clocks are slewed, and reading two takes a moment.
const UNMOVED: SignedDuration = SignedDuration::from_secs(2);

/// A clock; copies agree.
#[derive(Debug, Clone, Copy)]
pub struct Clock(Source);

#[derive(Debug, Clone, Copy)]
enum Source {
    System,
    /// Moves with tokio's time, which a test can pause and advance, and by milliseconds that a test adds.
    Steered {
        wall: Timestamp,
        at: Instant,
        moved: &'static AtomicI64,
    },
}

impl Clock {
    /// The system's clock.
    #[must_use]
    pub fn system() -> Clock {
        Clock(Source::System)
    }

    /// A clock for a test that starts at `wall`. It stays allocated until the process ends.
    #[must_use]
    pub fn starting_at(wall: Timestamp) -> Clock {
        Clock(Source::Steered {
            wall,
            at: Instant::now(),
            moved: Box::leak(Box::default()),
        })
    }

    /// Sets a test's clock forward or back. The system's is not ours to set.
    pub fn set_by(&self, by: SignedDuration) {
        if let Source::Steered { moved, .. } = self.0 {
            let by = i64::try_from(by.as_millis()).unwrap_or(i64::MAX);
            moved.fetch_add(by, Ordering::Relaxed);
        }
    }

    /// The present time.
    #[must_use]
    #[allow(clippy::disallowed_methods)] // The one place that asks the system for the time.
    pub fn now(&self) -> Timestamp {
        match self.0 {
            Source::System => Timestamp::now(),
            Source::Steered { wall, at, moved } => {
                let elapsed = SignedDuration::try_from(at.elapsed()).unwrap_or_default();
                wall + elapsed + SignedDuration::from_millis(moved.load(Ordering::Relaxed))
            }
        }
    }
}

/// Notices that a clock was set, or that the machine slept.
#[derive(Debug)]
pub struct Watch {
    clock: Clock,
    wall: Timestamp,
    at: Instant,
}

impl Watch {
    /// Watches a clock from now on.
    #[must_use]
    pub fn of(clock: Clock) -> Watch {
        Watch {
            clock,
            wall: clock.now(),
            at: Instant::now(),
        }
    }

    /// By how much the clock has moved otherwise than time has passed, since it was asked last; none if it has not.
    pub fn moved(&mut self) -> Option<SignedDuration> {
        let fresh = Watch::of(self.clock);
        let passed: Duration = fresh.at - self.at;
        let moved = fresh.wall.duration_since(self.wall)
            - SignedDuration::try_from(passed).unwrap_or_default();
        // A clock that is slewed a little between many questions moves in the end.
        (moved.abs() >= UNMOVED).then(|| {
            *self = fresh;
            moved
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_movement_is_told_once_and_the_passing_of_time_is_none() {
        let clock = Clock::starting_at(Timestamp::UNIX_EPOCH);
        let mut watch = Watch::of(clock);
        tokio::time::sleep(Duration::from_secs(3600)).await;
        assert_eq!(watch.moved(), None);
        for by in [
            SignedDuration::from_hours(2),
            SignedDuration::from_mins(-90),
        ] {
            clock.set_by(by);
            assert_eq!((watch.moved(), watch.moved()), (Some(by), None));
        }
        assert_eq!(clock.now().as_second(), 3600 + 7200 - 5400);
        clock.set_by(SignedDuration::from_secs(1));
        assert_eq!(watch.moved(), None, "clocks are slewed");
        clock.set_by(SignedDuration::from_secs(1));
        assert_eq!(watch.moved(), Some(SignedDuration::from_secs(2)));
    }
}
