//! The pods that were told to end because the node is short of something: how long they are waited for before another one
//! goes. Times are counted from any fixed moment.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Pressure;
use crate::core::time;

/// How long a pod is waited for after its grace period: stopping its containers and giving back what it holds take time.
const CLEANUP: Duration = Duration::from_secs(30);

/// Pods that were told to end and still hold something, by what the node is short of and their uid.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ending(BTreeMap<(Pressure, String), Told>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Told {
    /// When it was told first.
    at: Duration,
    /// When its grace period is over.
    by: Duration,
}

impl Ending {
    /// A pod was told at `now` to end within `grace` seconds. A grace period only ever shrinks.
    pub fn told(&mut self, pressure: Pressure, uid: &str, now: Duration, grace: i64) {
        let by = now.saturating_add(time::span(grace));
        let key = (pressure, uid.to_owned());
        let told = self.0.entry(key).or_insert(Told { at: now, by });
        told.by = told.by.min(by);
    }

    /// Forgets the pods that hold nothing any more; the answer is when each of them was told.
    pub fn forget(&mut self, holds: impl Fn(&str) -> bool) -> Vec<(String, Duration)> {
        let has_ended = |((_, uid), _): &(&(Pressure, String), &Told)| !holds(uid);
        let ended = self.0.iter().filter(has_ended);
        let ended = ended.map(|((_, uid), told)| (uid.clone(), told.at));
        let ended: Vec<(String, Duration)> = ended.collect();
        self.0.retain(|(_, uid), _| holds(uid));
        ended
    }

    /// Whether there is nobody to wait for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a pod was told, and would end later than if it were told at `now` to end within `grace` seconds.
    #[must_use]
    pub fn is_later(&self, pressure: Pressure, uid: &str, now: Duration, grace: i64) -> bool {
        let told = self.0.get(&(pressure, uid.to_owned()));
        told.is_some_and(|told| told.by > now.saturating_add(time::span(grace)))
    }

    /// How long no other pod goes for the same: one that was told is to end within that time.
    #[must_use]
    pub fn wait(&self, pressure: Pressure, now: Duration) -> Option<Duration> {
        let of = self.0.iter().filter(|((of, _), _)| *of == pressure);
        let left = of.filter_map(|(_, told)| told.by.saturating_add(CLEANUP).checked_sub(now));
        left.filter(|left| !left.is_zero()).max()
    }

    /// Whether a pod was waited for in vain: others go instead.
    #[must_use]
    pub fn is_overdue(&self, pressure: Pressure, uid: &str, now: Duration) -> bool {
        let told = self.0.get(&(pressure, uid.to_owned()));
        told.is_some_and(|told| told.by.saturating_add(CLEANUP) <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Pressure::{Disk, Memory};

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// A soft threshold gives 90 seconds. Whatever is looked at when: the pod that was told is waited for that long and 30
    /// seconds more, and only for what it was told for.
    #[test]
    fn a_pod_is_waited_for_as_long_as_it_may_take() {
        let mut ending = Ending::default();
        ending.told(Memory, "hog", at(10), 90);
        for (now, pressure, wait, overdue) in [
            (10, Memory, Some(120), false),
            (41, Memory, Some(89), false),
            (129, Memory, Some(1), false),
            (130, Memory, None, true),
            (41, Disk, None, false),
        ] {
            assert_eq!(ending.wait(pressure, at(now)), wait.map(at), "at {now}");
            let found = ending.is_overdue(pressure, "hog", at(now));
            assert_eq!(found, overdue, "at {now}");
        }
        assert!(!ending.is_overdue(Memory, "other", at(500)));
        assert_eq!(ending.forget(|_| true), []);
        assert_eq!(ending.forget(|uid| uid != "hog"), [("hog".into(), at(10))]);
        assert!(ending.is_empty() && ending.wait(Memory, at(11)).is_none());
    }

    /// The hard threshold is crossed while it ends: it is to end at once, and is told so once.
    #[test]
    fn a_pod_that_ends_is_told_again_when_it_is_to_end_sooner() {
        let mut ending = Ending::default();
        ending.told(Memory, "hog", at(10), 90);
        let later = |ending: &Ending, pressure, now, grace| {
            assert!(!ending.is_later(pressure, "other", at(now), grace));
            ending.is_later(pressure, "hog", at(now), grace)
        };
        assert!(!later(&ending, Memory, 20, 90) && !later(&ending, Disk, 20, 1));
        assert!(later(&ending, Memory, 20, 1));
        ending.told(Memory, "hog", at(20), 1);
        assert!(!later(&ending, Memory, 20, 1));
        assert_eq!(ending.wait(Memory, at(20)), Some(at(31)));
        // A longer grace period gives it none back, and what is over is over.
        ending.told(Memory, "hog", at(21), 90);
        assert!(!later(&ending, Memory, 40, 1));
        assert!(ending.is_overdue(Memory, "hog", at(51)));
    }
}
