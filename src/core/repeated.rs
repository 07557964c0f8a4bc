//! Rate limit for logging repeated failures. Pure: the time is an argument.

use std::collections::BTreeMap;
use std::hash::{Hash as _, Hasher as _};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::backoff::Doubling;
use super::digest::Fnv64;
use super::varying::masked;

/// Delays after a logged failure before a repetition is logged.
const LOG_INTERVALS: Doubling = Doubling::new(Duration::from_secs(60), Duration::from_secs(3600));
/// Maximum number of remembered failures; beyond it, the failure with the oldest log entry is forgotten.
const MAX_REMEMBERED: usize = 1024;

#[derive(Debug, Clone, Copy)]
struct Logged {
    /// Hash of the text without its varying parts.
    text: u64,
    at: Timestamp,
    times: u32,
    unlogged: u32,
}

/// Repeated failures by key. The first failure is logged immediately, and repetitions after increasing delays.
#[derive(Debug, Clone)]
pub struct RepeatedFailures<K> {
    logged: BTreeMap<K, Logged>,
}

impl<K> Default for RepeatedFailures<K> {
    fn default() -> Self {
        RepeatedFailures {
            logged: BTreeMap::new(),
        }
    }
}

impl<K: Ord + Clone> RepeatedFailures<K> {
    /// Records a failure. If it must be logged, returns the number of repetitions since the last log entry.
    pub fn record(&mut self, key: K, text: &str, now: Timestamp) -> Option<u32> {
        let mut hasher = Fnv64::default();
        masked(text).hash(&mut hasher);
        let text = hasher.finish();
        let known = self.logged.get_mut(&key).filter(|known| known.text == text);
        let (times, unlogged) = match known {
            None => (1, 0),
            Some(known) => {
                let pause = SignedDuration::try_from(LOG_INTERVALS.after(known.times));
                let pause = pause.unwrap_or(SignedDuration::MAX);
                if now.duration_since(known.at) < pause {
                    known.unlogged = known.unlogged.saturating_add(1);
                    return None;
                }
                (known.times.saturating_add(1), known.unlogged)
            }
        };
        if self.logged.len() >= MAX_REMEMBERED && !self.logged.contains_key(&key) {
            self.forget_oldest();
        }
        let logged = Logged {
            text,
            at: now,
            times,
            unlogged: 0,
        };
        self.logged.insert(key, logged);
        Some(unlogged)
    }

    /// Records a success, so that the next failure is logged immediately.
    pub fn clear(&mut self, key: &K) {
        self.logged.remove(key);
    }

    fn forget_oldest(&mut self) {
        let oldest = self.logged.iter().min_by_key(|(_, logged)| logged.at);
        if let Some(key) = oldest.map(|(key, _)| key.clone()) {
            self.logged.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn a_repeated_failure_is_logged_with_growing_pauses() {
        let mut failures = RepeatedFailures::default();
        let mut logged = vec![];
        for second in (0..86_400).step_by(10) {
            let text = format!("device busy for {second}s");
            if let Some(unlogged) = failures.record("v", &text, at(second)) {
                logged.push((second, unlogged));
            }
        }
        assert_eq!(logged[..4], [(0, 0), (60, 5), (180, 11), (420, 23)]);
        assert!(logged.len() < 32, "a day: {}", logged.len());
        // A different error, a different key, or a failure after a success is logged immediately.
        let now = at(86_400);
        assert_eq!(failures.record("v", "no such device", now), Some(0));
        assert_eq!(failures.record("w", "no such device", now), Some(0));
        assert_eq!(failures.record("v", "no such device", now), None);
        failures.clear(&"v");
        assert_eq!(failures.record("v", "no such device", now), Some(0));
    }

    #[test]
    fn any_number_of_keys_takes_bounded_memory() {
        let mut failures = RepeatedFailures::default();
        for key in 0..10_000_i64 {
            assert_eq!(failures.record(key, "x", at(key)), Some(0));
        }
        assert_eq!(failures.logged.len(), MAX_REMEMBERED);
    }
}
