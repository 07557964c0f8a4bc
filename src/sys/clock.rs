//! The wall clock, which tests can control. It can be set, and it continues while the machine sleeps. Durations are
//! therefore measured with tokio's `Instant`, and code that schedules by wall-clock time uses [`Watch::moved`].

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

/// Smaller differences do not count as a clock change: clocks are slewed, and reading two clocks takes time.
const UNMOVED: SignedDuration = SignedDuration::from_secs(2);

/// A clock. Copies share their state.
#[derive(Debug, Clone, Copy)]
pub struct Clock(Source);

#[derive(Debug, Clone, Copy)]
enum Source {
    System,
    /// Advances with tokio's time, which a test can pause and advance, plus milliseconds that a test adds.
    Steered {
        wall: Timestamp,
        at: Instant,
        moved: &'static AtomicI64,
    },
}

impl Clock {
    /// The system clock.
    #[must_use]
    pub fn system() -> Clock {
        Clock(Source::System)
    }

    /// A clock for tests that starts at `wall`. It is never deallocated.
    #[must_use]
    pub fn starting_at(wall: Timestamp) -> Clock {
        Clock(Source::Steered {
            wall,
            at: Instant::now(),
            moved: Box::leak(Box::default()),
        })
    }

    /// Sets a test's clock forward or back. Does nothing for the system clock.
    pub fn set_by(&self, by: SignedDuration) {
        if let Source::Steered { moved, .. } = self.0 {
            let by = i64::try_from(by.as_millis()).unwrap_or(i64::MAX);
            moved.fetch_add(by, Ordering::Relaxed);
        }
    }

    /// The current time.
    #[must_use]
    #[allow(clippy::disallowed_methods)] // The only place that reads the system clock.
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

/// Detects that a clock was set, or that the machine slept.
#[derive(Debug)]
pub struct Watch {
    clock: Clock,
    wall: Timestamp,
    at: Instant,
}

impl Watch {
    /// Starts to watch a clock.
    #[must_use]
    pub fn of(clock: Clock) -> Watch {
        Watch {
            clock,
            wall: clock.now(),
            at: Instant::now(),
        }
    }

    /// The difference between the clock's movement and the elapsed
    /// time since the last detected change; `None` if there is none.
    pub fn moved(&mut self) -> Option<SignedDuration> {
        let fresh = Watch::of(self.clock);
        let passed: Duration = fresh.at - self.at;
        let moved = fresh.wall.duration_since(self.wall)
            - SignedDuration::try_from(passed).unwrap_or_default();
        // Keep the old reference point, so that small differences add up.
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
    async fn a_clock_jump_is_reported_once_and_passing_time_is_not_a_jump() {
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
        assert_eq!(watch.moved(), None, "a slewed clock is not a jump");
        clock.set_by(SignedDuration::from_secs(1));
        assert_eq!(watch.moved(), Some(SignedDuration::from_secs(2)));
    }
}
