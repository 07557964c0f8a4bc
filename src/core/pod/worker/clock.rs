//! Keeps the worker's timeouts constant when the clock is set or the machine was suspended.

use jiff::{SignedDuration, Timestamp};

use super::{Op, Worker};

impl Worker {
    /// Moves all timers of the worker. Times from elsewhere, such as the exit of a container or the start of the pod,
    /// stay.
    pub(super) fn move_timers(&mut self, by: SignedDuration) {
        let moved = |at: &mut Timestamp| *at = at.checked_add(by).unwrap_or(*at);
        let optional = [
            &mut self.publish_at,
            &mut self.stop_by,
            &mut self.prepared_at,
            &mut self.upkeep_at,
            &mut self.volumes.at,
            &mut self.volumes.retry_at,
            &mut self.volumes.changed_at,
            &mut self.sandbox_at,
            &mut self.wake_at,
            &mut self.audit_at,
        ];
        optional.into_iter().flatten().for_each(moved);
        self.stops.values_mut().for_each(moved);
        for retry in &mut self.retries {
            moved(&mut retry.since);
            moved(&mut retry.until);
        }
        if let Some((_, at)) = &mut self.mirrored {
            moved(at);
        }
        for op in &mut self.in_flight {
            if let Op::Stop { until, .. } | Op::PreStop { until, .. } = op {
                moved(until);
            }
        }
        self.backoff.adjust_clock(by);
    }
}
