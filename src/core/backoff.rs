//! Back-off: doubling delays for retries, the crash-loop back-off of containers
//! (`pkg/kubelet/kuberuntime/kuberuntime_manager.go`), and the back-off of image pulls
//! (`pkg/kubelet/images/image_manager.go`). Pure: the clock is an argument.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::time;

/// A delay that doubles with every failure, up to a maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Doubling {
    first: Duration,
    max: Duration,
    next: Duration,
}

impl Doubling {
    /// Delays from `first` to `max`.
    #[must_use]
    pub const fn new(first: Duration, max: Duration) -> Doubling {
        Doubling {
            first,
            max,
            next: first,
        }
    }

    /// The delay after another failure.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = pause.saturating_mul(2).min(self.max);
        pause
    }

    /// The delay after this many failures, for callers that count them.
    #[must_use]
    pub fn after(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.first.saturating_mul(1 << doublings).min(self.max)
    }

    /// Whether the next delay is the initial one.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.next == self.first
    }

    /// Whether the delay has reached the maximum.
    #[must_use]
    pub fn is_at_maximum(&self) -> bool {
        self.next == self.max
    }

    /// Resets the delay after a success.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

fn doubled(delay: SignedDuration, max: SignedDuration) -> SignedDuration {
    delay.saturating_add(delay).min(max)
}

const INITIAL: SignedDuration = SignedDuration::from_secs(10);
const EXPIRY: SignedDuration = SignedDuration::from_secs(600);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    delay: SignedDuration,
    updated: Timestamp,
}

/// Crash-loop back-off of one pod's containers, by container name and image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backoff(BTreeMap<String, Entry>);

/// A container that must not start yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackoffDelay {
    /// The complete delay.
    pub delay: SignedDuration,
    /// When the delay ends.
    pub until: Timestamp,
}

impl Backoff {
    /// Adjusts all times after the clock was changed by this amount.
    pub(crate) fn adjust_clock(&mut self, by: SignedDuration) {
        for entry in self.0.values_mut() {
            entry.updated = entry.updated.checked_add(by).unwrap_or(entry.updated);
        }
    }

    /// Whether a container that exited at `finished` must wait at `now`. Does not count as a start.
    #[must_use]
    pub fn remaining(
        &self,
        key: &str,
        finished: Timestamp,
        now: Timestamp,
    ) -> Option<BackoffDelay> {
        if finished > now {
            // The clock was set back since, so the time of the exit is unknown.
            return None;
        }
        let entry = self
            .0
            .get(key)
            .filter(|e| finished.duration_since(e.updated) <= EXPIRY)?;
        (now.duration_since(finished) < entry.delay).then(|| BackoffDelay {
            delay: entry.delay,
            until: time::later(finished, entry.delay),
        })
    }

    /// Whether a container that exited at `finished` may start at `now`; if so, the start is counted. The first restart
    /// is immediate; then delays start at 10 s and double. If a container runs for ten minutes, the sequence restarts.
    pub fn start(
        &mut self,
        key: &str,
        finished: Timestamp,
        now: Timestamp,
        maximum: SignedDuration,
    ) -> Result<(), BackoffDelay> {
        let entry = self
            .0
            .get(key)
            .copied()
            .filter(|e| finished.duration_since(e.updated) <= EXPIRY);
        let Some(entry) = entry else {
            self.0.insert(
                key.to_owned(),
                Entry {
                    delay: INITIAL.min(maximum),
                    updated: now,
                },
            );
            return Ok(());
        };
        if finished <= now && now.duration_since(finished) < entry.delay {
            return Err(BackoffDelay {
                delay: entry.delay,
                until: time::later(finished, entry.delay),
            });
        }
        self.0.insert(
            key.to_owned(),
            Entry {
                delay: doubled(entry.delay, maximum),
                updated: now,
            },
        );
        Ok(())
    }
}

/// Maximum back-off of pulls.
const PULL_MAXIMUM: SignedDuration = SignedDuration::from_secs(300);

#[derive(Debug, Clone, PartialEq, Eq)]
struct FailedPull {
    delay: SignedDuration,
    until: Timestamp,
    error: String,
}

/// Back-off of pulls, by pod and image: 10 s, doubling up to five minutes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PullBackoff(BTreeMap<(String, String), FailedPull>);

impl PullBackoff {
    /// When the back-off of a pull ends, and the error of the last attempt; `None` if the pull may start.
    #[must_use]
    pub fn remaining(&self, key: &(String, String), now: Timestamp) -> Option<(Timestamp, String)> {
        self.0
            .get(key)
            // A later end means that the clock was set back.
            .filter(|f| f.until > now && f.until <= time::later(now, f.delay))
            .map(|f| (f.until, f.error.clone()))
    }

    /// Records a failed pull; returns when to retry.
    pub fn failed(&mut self, key: (String, String), error: &str, now: Timestamp) -> Timestamp {
        self.0
            .retain(|_, f| now.duration_since(f.until) < PULL_MAXIMUM.saturating_mul(2));
        let delay = self
            .0
            .get(&key)
            .map_or(INITIAL, |f| doubled(f.delay, PULL_MAXIMUM));
        self.0.insert(
            key,
            FailedPull {
                delay,
                until: time::later(now, delay),
                error: error.to_owned(),
            },
        );
        time::later(now, delay)
    }

    /// Records a successful pull.
    pub fn succeeded(&mut self, key: &(String, String)) {
        self.0.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The default maximum of the crash-loop back-off.
    const MAXIMUM: SignedDuration = SignedDuration::from_secs(300);

    #[test]
    fn back_off_doubles_up_to_the_maximum_and_resets() {
        let mut pauses = Doubling::new(Duration::from_secs(2), Duration::from_secs(10));
        let seconds: Vec<u64> = (0..5).map(|_| pauses.pause().as_secs()).collect();
        assert_eq!(seconds, [2, 4, 8, 10, 10]);
        pauses.reset();
        assert_eq!(pauses.pause().as_secs(), 2);
    }

    #[test]
    fn pull_back_off_grows_until_a_pull_succeeds() {
        let mut backoff = PullBackoff::default();
        let at = |s: i64| Timestamp::from_second(s).expect("a time");
        let key = ("uid".to_owned(), "image".to_owned());
        assert_eq!(backoff.remaining(&key, at(0)), None);
        assert_eq!(backoff.failed(key.clone(), "first", at(0)), at(10));
        assert_eq!(
            backoff.remaining(&key, at(9)),
            Some((at(10), "first".into()))
        );
        assert_eq!(backoff.remaining(&key, at(10)), None);
        let delays: Vec<i64> = (0..6)
            .map(|n| backoff.failed(key.clone(), "again", at(n)).as_second() - n)
            .collect();
        assert_eq!(delays, [20, 40, 80, 160, 300, 300]);
        backoff.succeeded(&key);
        assert_eq!(backoff.failed(key, "new", at(100)), at(110));
    }

    #[test]
    fn a_clock_set_back_delays_no_retry() {
        let at = |s: i64| Timestamp::from_second(s).expect("a time");
        let mut pulls = PullBackoff::default();
        let key = ("uid".to_owned(), "image".to_owned());
        pulls.failed(key.clone(), "failed", at(10_000));
        assert_eq!(pulls.remaining(&key, at(6_400)), None);
        let mut backoff = Backoff::default();
        assert_eq!(backoff.start("c", at(10_000), at(10_000), MAXIMUM), Ok(()));
        assert!(backoff.remaining("c", at(10_001), at(10_002)).is_some());
        backoff.adjust_clock(SignedDuration::from_secs(-3_600));
        assert_eq!(backoff.remaining("c", at(10_001), at(6_402)), None);
        assert_eq!(backoff.start("c", at(10_001), at(6_402), MAXIMUM), Ok(()));
        assert!(backoff.remaining("c", at(6_403), at(6_404)).is_some());
    }

    #[test]
    fn restart_back_off_grows_until_a_container_runs_long_enough() {
        let mut backoff = Backoff::default();
        let at = |s: i64| Timestamp::from_second(s).expect("a time");
        assert_eq!(
            backoff.start("c", at(100), at(100), MAXIMUM),
            Ok(()),
            "the first restart is immediate"
        );
        let remaining = backoff
            .start("c", at(101), at(105), MAXIMUM)
            .expect_err("held");
        assert_eq!((remaining.delay.as_secs(), remaining.until), (10, at(111)));
        assert_eq!(backoff.start("c", at(101), at(111), MAXIMUM), Ok(()));
        assert_eq!(
            backoff
                .start("c", at(112), at(120), MAXIMUM)
                .expect_err("held")
                .delay
                .as_secs(),
            20
        );
        let mut now = 132;
        for _ in 0..10 {
            assert_eq!(backoff.start("c", at(now), at(now + 300), MAXIMUM), Ok(()));
            now += 301;
        }
        assert_eq!(
            backoff
                .start("c", at(now), at(now), MAXIMUM)
                .expect_err("held")
                .delay,
            MAXIMUM
        );
        assert_eq!(
            backoff.start("c", at(now + 1000), at(now + 1000), MAXIMUM),
            Ok(()),
            "ran for over ten minutes"
        );
        assert_eq!(backoff.start("other", at(now), at(now), MAXIMUM), Ok(()));
    }
}
