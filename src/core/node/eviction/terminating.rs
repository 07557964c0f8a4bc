//! Evicted pods that still terminate, and how long to wait for them before the next eviction. Times are durations since
//! an arbitrary fixed moment.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Pressure;
use crate::time;

/// How long to wait for a pod after its grace period, for stopping containers and releasing resources.
const CLEANUP: Duration = Duration::from_secs(30);

/// Evicted pods that still hold resources, by pressure and pod uid.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TerminatingPods(BTreeMap<(Pressure, String), EvictedPod>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EvictedPod {
    /// Time of the eviction.
    at: Duration,
    /// End of the grace period.
    by: Duration,
}

impl TerminatingPods {
    /// Records that a pod was evicted at `now` with `grace` seconds. A later call can only shorten the grace period.
    pub fn record_eviction(&mut self, pressure: Pressure, uid: &str, now: Duration, grace: i64) {
        let by = now.saturating_add(time::span(grace));
        let key = (pressure, uid.to_owned());
        let evicted = self.0.entry(key).or_insert(EvictedPod { at: now, by });
        evicted.by = evicted.by.min(by);
    }

    /// Removes pods that hold no resources any more; returns each with the time of its eviction.
    pub fn remove_finished(&mut self, holds: impl Fn(&str) -> bool) -> Vec<(String, Duration)> {
        let has_finished = |((_, uid), _): &(&(Pressure, String), &EvictedPod)| !holds(uid);
        let finished = self.0.iter().filter(has_finished);
        let finished = finished.map(|((_, uid), evicted)| (uid.clone(), evicted.at));
        let finished: Vec<(String, Duration)> = finished.collect();
        self.0.retain(|(_, uid), _| holds(uid));
        finished
    }

    /// Whether no evicted pod is terminating.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a pod was evicted already, but a grace period of `grace` seconds from `now` would end sooner.
    #[must_use]
    pub fn would_end_sooner(
        &self,
        pressure: Pressure,
        uid: &str,
        now: Duration,
        grace: i64,
    ) -> bool {
        let evicted = self.0.get(&(pressure, uid.to_owned()));
        evicted.is_some_and(|evicted| evicted.by > now.saturating_add(time::span(grace)))
    }

    /// Remaining time to wait before another pod is evicted for the same pressure; `None` if no wait is needed.
    #[must_use]
    pub fn wait(&self, pressure: Pressure, now: Duration) -> Option<Duration> {
        let of = self.0.iter().filter(|((of, _), _)| *of == pressure);
        let remaining =
            of.filter_map(|(_, evicted)| evicted.by.saturating_add(CLEANUP).checked_sub(now));
        remaining.filter(|remaining| !remaining.is_zero()).max()
    }

    /// Whether a pod has exceeded its grace period and the cleanup time, so that other pods are evicted instead.
    #[must_use]
    pub fn is_overdue(&self, pressure: Pressure, uid: &str, now: Duration) -> bool {
        let evicted = self.0.get(&(pressure, uid.to_owned()));
        evicted.is_some_and(|evicted| evicted.by.saturating_add(CLEANUP) <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Pressure::{Disk, Memory};

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// A soft threshold grants 90 seconds. The wait is these 90 seconds plus 30, and only for the pressure that caused
    /// the eviction.
    #[test]
    fn the_wait_for_an_evicted_pod_covers_its_grace_period() {
        let mut terminating = TerminatingPods::default();
        terminating.record_eviction(Memory, "hog", at(10), 90);
        for (now, pressure, wait, overdue) in [
            (10, Memory, Some(120), false),
            (41, Memory, Some(89), false),
            (129, Memory, Some(1), false),
            (130, Memory, None, true),
            (41, Disk, None, false),
        ] {
            assert_eq!(
                terminating.wait(pressure, at(now)),
                wait.map(at),
                "at {now}"
            );
            let found = terminating.is_overdue(pressure, "hog", at(now));
            assert_eq!(found, overdue, "at {now}");
        }
        assert!(!terminating.is_overdue(Memory, "other", at(500)));
        assert_eq!(terminating.remove_finished(|_| true), []);
        assert_eq!(
            terminating.remove_finished(|uid| uid != "hog"),
            [("hog".into(), at(10))]
        );
        assert!(terminating.is_empty() && terminating.wait(Memory, at(11)).is_none());
    }

    /// If the hard threshold is crossed while the pod terminates, the grace period is shortened once.
    #[test]
    fn a_terminating_pod_is_notified_when_its_grace_period_shortens() {
        let mut terminating = TerminatingPods::default();
        terminating.record_eviction(Memory, "hog", at(10), 90);
        let later = |terminating: &TerminatingPods, pressure, now, grace| {
            assert!(!terminating.would_end_sooner(pressure, "other", at(now), grace));
            terminating.would_end_sooner(pressure, "hog", at(now), grace)
        };
        assert!(!later(&terminating, Memory, 20, 90) && !later(&terminating, Disk, 20, 1));
        assert!(later(&terminating, Memory, 20, 1));
        terminating.record_eviction(Memory, "hog", at(20), 1);
        assert!(!later(&terminating, Memory, 20, 1));
        assert_eq!(terminating.wait(Memory, at(20)), Some(at(31)));
        // A longer grace period does not extend the previous one.
        terminating.record_eviction(Memory, "hog", at(21), 90);
        assert!(!later(&terminating, Memory, 40, 1));
        assert!(terminating.is_overdue(Memory, "hog", at(51)));
    }
}
