//! Keeps the worker's timeouts constant when the clock is set or the machine was suspended.

use jiff::{SignedDuration, Timestamp};

use super::Worker;

/// Moves a time.
pub(super) fn shift(at: &mut Timestamp, by: SignedDuration) {
    *at = at.checked_add(by).unwrap_or(*at);
}

/// Moves the times that are set.
pub(super) fn shift_all<const N: usize>(times: [&mut Option<Timestamp>; N], by: SignedDuration) {
    times.into_iter().flatten().for_each(|at| shift(at, by));
}

impl Worker {
    /// Moves all timers of the worker. Times from elsewhere, such as the exit of a container or the start of the pod,
    /// stay.
    pub(super) fn move_timers(&mut self, by: SignedDuration) {
        self.readiness.move_timers(by);
        self.operations.move_timers(by);
        self.restarts.move_timers(by);
        self.stops.move_timers(by);
        self.publication.move_timers(by);
        self.ending.move_timers(by);
        shift_all([&mut self.wake_at], by);
    }
}
