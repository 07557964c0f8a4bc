//! When the owner of rules in the kernel writes them and audits them. Pure: the time is an argument.
//!
//! An audit has a deadline that changes do not move: else a busy cluster would delay the repair of foreign changes without limit.
//! A failed write is repeated after a back-off, and changes that arrive meanwhile wait for the same time. A failed audit is
//! repeated after a back-off as well, but delays no changes.

use std::time::{Duration, Instant};

use holdfast_core::backoff::Doubling;

/// Delays before a failed write or audit is repeated.
pub(crate) const RETRIES: Doubling =
    Doubling::new(Duration::from_millis(100), Duration::from_secs(5));

/// The next step of an owner of rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Write the changes.
    Write,
    /// Compare the kernel's state with the desired one, and repair it.
    Audit,
    /// Nothing before this time.
    Wait(Instant),
}

/// The times of writes and audits.
#[derive(Debug)]
pub(crate) struct Timetable {
    audit_interval: Duration,
    /// No write before this time.
    not_before: Instant,
    audit_at: Instant,
    /// Whether the last write succeeded; false before the first one.
    is_written: bool,
    write_retries: Doubling,
    audit_retries: Doubling,
}

impl Timetable {
    /// The first write is due immediately.
    pub(crate) fn new(now: Instant, audit_interval: Duration) -> Timetable {
        Timetable {
            audit_interval,
            not_before: now,
            audit_at: now + audit_interval,
            is_written: false,
            write_retries: RETRIES,
            audit_retries: RETRIES,
        }
    }

    /// The step at `now`. An audit precedes a write, because writes must not displace audits. There is no audit before the first
    /// write, and none between a failed write and its repetition: these writes replace all rules, which is what an audit would do.
    pub(crate) fn step(&self, now: Instant, has_changes: bool) -> Step {
        let audit_at = self.is_written.then_some(self.audit_at);
        let write_at = (has_changes || !self.is_written).then_some(self.not_before);
        if audit_at.is_some_and(|at| at <= now) {
            return Step::Audit;
        }
        if write_at.is_some_and(|at| at <= now) {
            return Step::Write;
        }
        let next = audit_at.into_iter().chain(write_at).min();
        Step::Wait(next.unwrap_or(self.audit_at))
    }

    /// A write succeeded; the next one follows after `pause` at the earliest.
    pub(crate) fn written(&mut self, now: Instant, pause: Duration) {
        if !std::mem::replace(&mut self.is_written, true) {
            self.audited(now);
        }
        self.write_retries.reset();
        self.not_before = now + pause;
    }

    /// A write failed.
    pub(crate) fn write_failed(&mut self, now: Instant) {
        self.is_written = false;
        self.not_before = now + self.write_retries.pause();
    }

    /// An audit succeeded.
    pub(crate) fn audited(&mut self, now: Instant) {
        self.audit_retries.reset();
        self.audit_at = now + self.audit_interval;
    }

    /// A write has left work to the next audit, which is therefore due after a back-off. Further writes do not delay it.
    pub(crate) fn audit_early(&mut self, now: Instant) {
        let mut retries = self.audit_retries;
        self.audit_at = self.audit_at.min(now + retries.pause());
    }

    /// An audit failed.
    pub(crate) fn audit_failed(&mut self, now: Instant) {
        let pause = self.audit_retries.pause();
        self.audit_at = now + pause.min(self.audit_interval);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn audits_have_a_deadline_and_failures_a_back_off() {
        let start = Instant::now();
        let at = |ms| start + MS(ms);
        let times = Timetable::new(start, MS(10));
        assert_eq!(times.step(at(5000), true), Step::Write, "no audit before");
        let mut times = Timetable::new(start, MS(1000));
        assert_eq!(times.step(start, false), Step::Write, "the first one");
        times.written(at(0), MS(10));
        assert_eq!(times.step(start, false), Step::Wait(at(1000)));
        times.written(at(5), MS(10));
        for (now, has_changes, expected) in [
            (6, true, Step::Wait(at(15))),
            (15, true, Step::Write),
            (15, false, Step::Wait(at(1000))),
            (999, false, Step::Wait(at(1000))),
            // The audit is due although changes wait.
            (1000, true, Step::Audit),
            (1000, false, Step::Audit),
        ] {
            assert_eq!(times.step(at(now), has_changes), expected, "{now} ms");
        }
        // A failed audit is repeated soon, and delays no changes.
        times.audit_failed(at(1000));
        assert_eq!(times.step(at(1001), false), Step::Wait(at(1100)));
        assert_eq!(times.step(at(1001), true), Step::Write);
        assert_eq!(times.step(at(1100), true), Step::Audit);
        times.audit_failed(at(1100));
        assert_eq!(times.step(at(1101), false), Step::Wait(at(1300)));
        times.audited(at(1300));
        assert_eq!(times.step(at(1300), false), Step::Wait(at(2300)));
        // A failed write waits, with and without changes, and no audit precedes its repetition.
        times.write_failed(at(2290));
        for has_changes in [false, true] {
            assert_eq!(times.step(at(2310), has_changes), Step::Wait(at(2390)));
            assert_eq!(times.step(at(2390), has_changes), Step::Write);
        }
        times.write_failed(at(2390));
        assert_eq!(times.step(at(2400), true), Step::Wait(at(2590)));
        // The repeated write has replaced all rules.
        times.written(at(2590), MS(0));
        assert_eq!(times.step(at(2590), false), Step::Wait(at(3590)));
        assert_eq!(times.step(at(2590), true), Step::Write);
    }

    #[test]
    fn a_long_pause_between_writes_does_not_delay_audits() {
        let start = Instant::now();
        let mut times = Timetable::new(start, MS(50));
        times.written(start, MS(1000));
        assert_eq!(times.step(start, true), Step::Wait(start + MS(50)));
        assert_eq!(times.step(start + MS(50), true), Step::Audit);
    }

    #[test]
    fn an_early_audit_is_not_delayed_by_further_writes() {
        let start = Instant::now();
        let at = |ms| start + MS(ms);
        let mut times = Timetable::new(start, MS(30_000));
        for now in [0, 50, 99] {
            times.written(at(now), MS(10));
            times.audit_early(at(now));
        }
        assert_eq!(times.step(at(99), false), Step::Wait(at(100)));
        assert_eq!(times.step(at(100), true), Step::Audit);
        // The work is still not done.
        times.audit_failed(at(100));
        times.written(at(150), MS(10));
        times.audit_early(at(150));
        assert_eq!(times.step(at(199), false), Step::Wait(at(200)));
    }

    #[test]
    fn a_failed_audit_never_waits_longer_than_an_interval() {
        let start = Instant::now();
        let mut times = Timetable::new(start, MS(20));
        times.written(start, MS(0));
        times.audit_failed(start);
        assert_eq!(times.step(start, false), Step::Wait(start + MS(20)));
    }
}
