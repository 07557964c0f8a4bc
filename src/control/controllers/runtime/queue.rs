//! The queue of the keys of one controller. Pure: the time is an argument.
//!
//! The rules are those of upstream's work queue (`client-go/util/workqueue/queue.go`, `delaying_queue.go`,
//! `default_rate_limiters.go`). A key is in the queue at most once. A key is in work at one worker at most; a change
//! meanwhile queues the key again when that worker finishes. In one point the rules differ: taking a key cancels its
//! timer, because each reconciliation decides again when the next one is due.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::Hash;
use std::time::Duration;

use tokio::time::Instant;

use holdfast_core::backoff::Doubling;

/// Back-off after a failed reconciliation. Upstream's maximum is 1,000 s. Here a retry costs little, because the API is in
/// the same process, and an operator waits for the controller after a repair.
const BACK_OFF: Doubling = Doubling::new(Duration::from_millis(5), Duration::from_secs(60));

/// Limit of all retries of one queue: [`RETRIES_AT_ONCE`] at once, then one per interval.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
const RETRIES_AT_ONCE: u32 = 100;

/// Maximum delay of a key. After a longer delay, a controller decides again.
const MAX_DELAY: Duration = Duration::from_secs(24 * 3600);

/// The result of one reconciliation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::controllers) enum Next {
    /// Waits for the next change.
    Done,
    /// Reconciles again after this time, or at the next change.
    After(Duration),
    /// Reconciles again after a back-off, or at the next change.
    Retry,
}

impl Next {
    /// [`Next::After`] the delay, if there is one.
    pub(in crate::controllers) fn after(delay: Option<Duration>) -> Next {
        delay.map_or(Next::Done, Next::After)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Only a timer or a failure count is kept.
    Idle,
    Ready,
    /// At a worker; `changed` queues the key again afterwards.
    InWork {
        changed: bool,
    },
}

#[derive(Debug)]
struct Entry {
    place: Place,
    timer: Option<Instant>,
    /// Consecutive failed reconciliations.
    failures: u32,
}

/// Keys that wait for a worker, that are in work, or that have a timer.
#[derive(Debug)]
pub(super) struct Queue<K> {
    ready: VecDeque<K>,
    entries: HashMap<K, Entry>,
    /// The timers of all entries, in order of time.
    timers: BTreeSet<(Instant, K)>,
    /// When the retries admitted so far are used up at one per [`RETRY_INTERVAL`].
    retries_until: Option<Instant>,
}

impl<K: Clone + Hash + Ord> Queue<K> {
    pub(super) fn new() -> Queue<K> {
        Queue {
            ready: VecDeque::new(),
            entries: HashMap::new(),
            timers: BTreeSet::new(),
            retries_until: None,
        }
    }

    /// Queues a key. Returns whether a worker can take it now.
    pub(super) fn add(&mut self, key: K) -> bool {
        let entry = self.entries.entry(key.clone()).or_insert(Entry {
            place: Place::Idle,
            timer: None,
            failures: 0,
        });
        match &mut entry.place {
            Place::Idle => {
                entry.place = Place::Ready;
                self.ready.push_back(key);
                true
            }
            Place::Ready => false,
            Place::InWork { changed } => {
                *changed = true;
                false
            }
        }
    }

    /// Takes the key that has waited longest. The caller works on it until [`Queue::finish`].
    pub(super) fn take(&mut self, now: Instant) -> Option<K> {
        while let Some((time, _)) = self.timers.first()
            && *time <= now
            && let Some((_, key)) = self.timers.pop_first()
        {
            if let Some(entry) = self.entries.get_mut(&key) {
                entry.timer = None;
            }
            self.add(key);
        }
        let key = self.ready.pop_front()?;
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.place = Place::InWork { changed: false };
            if let Some(timer) = entry.timer.take() {
                self.timers.remove(&(timer, key.clone()));
            }
        }
        Some(key)
    }

    /// Records the result for a key in work. Returns whether to wake a worker: the key can be taken again, or has the next
    /// timer.
    pub(super) fn finish(&mut self, key: K, next: Next, now: Instant) -> bool {
        let Some(entry) = self.entries.get_mut(&key) else {
            return false;
        };
        let changed = entry.place == Place::InWork { changed: true };
        entry.place = Place::Idle;
        let failures = match next {
            Next::Retry => entry.failures.saturating_add(1),
            Next::Done | Next::After(_) => 0,
        };
        entry.failures = failures;
        if changed {
            return self.add(key);
        }
        let delay = match next {
            Next::Done => {
                self.entries.remove(&key);
                return false;
            }
            Next::After(delay) => delay,
            Next::Retry => BACK_OFF.after(failures).max(self.admit_retry(now)),
        };
        let time = now + delay.min(MAX_DELAY);
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.timer = Some(time);
        }
        self.timers.insert((time, key));
        self.next_timer() == Some(time)
    }

    /// The wait until the limit of all retries admits another one.
    fn admit_retry(&mut self, now: Instant) -> Duration {
        let until = self.retries_until.map_or(now, |until| until.max(now)) + RETRY_INTERVAL;
        self.retries_until = Some(until);
        until
            .duration_since(now)
            .saturating_sub(RETRY_INTERVAL * RETRIES_AT_ONCE)
    }

    /// Whether a key waits for a worker.
    pub(super) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// When the next timer fires.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        self.timers.first().map(|(time, _)| *time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn a_key_is_queued_once_and_again_after_a_change_during_work() {
        let (mut queue, now) = (Queue::new(), Instant::now());
        assert!(queue.add("a"));
        assert!(!queue.add("a"), "the key is queued already");
        assert!(queue.add("b"));
        assert_eq!(queue.take(now), Some("a"));
        assert!(!queue.add("a"), "the key is in work");
        assert_eq!(queue.take(now), Some("b"));
        assert_eq!(queue.take(now), None);
        assert!(queue.finish("a", Next::Done, now));
        assert!(!queue.finish("b", Next::Done, now));
        assert_eq!(queue.take(now), Some("a"));
        queue.finish("a", Next::Done, now);
        assert!(queue.entries.is_empty(), "an idle key uses no memory");
    }

    #[test]
    fn a_timer_queues_a_key_and_a_turn_replaces_the_timer() {
        let (mut queue, now) = (Queue::new(), Instant::now());
        let turn = |queue: &mut Queue<&'static str>, next, at| {
            let taken = queue.take(at);
            if let Some(key) = taken {
                queue.finish(key, next, at);
            }
            (taken.is_some(), queue.next_timer())
        };
        let in_five = Some(now + seconds(5));
        queue.add("a");
        let first = turn(&mut queue, Next::After(seconds(5)), now);
        assert_eq!(first, (true, in_five));
        let early = turn(&mut queue, Next::Done, now + seconds(4));
        assert_eq!(early, (false, in_five));
        let later = now + seconds(5);
        let after_long = turn(&mut queue, Next::After(Duration::MAX), later);
        assert_eq!(after_long, (true, Some(later + MAX_DELAY)));
        queue.add("a");
        let taken = queue.take(later);
        assert_eq!((taken, queue.next_timer()), (Some("a"), None));
    }

    #[test]
    fn failures_back_off_per_key_and_all_retries_have_a_limit() {
        let (mut queue, mut now) = (Queue::new(), Instant::now());
        let mut pauses = vec![];
        queue.add(0);
        for _ in 0..16 {
            queue.take(now);
            queue.finish(0, Next::Retry, now);
            let next = queue.next_timer().expect("a timer");
            pauses.push(next.duration_since(now).as_millis());
            now = next;
        }
        assert_eq!(pauses[..4], [5, 10, 20, 40]);
        assert_eq!(pauses[13..], [40_960, 60_000, 60_000]);
        queue.take(now);
        queue.finish(0, Next::Done, now);
        queue.add(0);
        queue.take(now);
        queue.finish(0, Next::Retry, now);
        let first = now + Duration::from_millis(5);
        assert_eq!(queue.next_timer(), Some(first), "a success resets it");
        let (mut queue, count) = (Queue::new(), RETRIES_AT_ONCE + 50);
        for key in 0..count {
            queue.add(key);
            queue.take(now);
            queue.finish(key, Next::Retry, now);
        }
        let last = queue.timers.last().map(|(time, _)| *time);
        assert_eq!(last, Some(now + RETRY_INTERVAL * 50));
    }

    #[derive(Debug, Clone)]
    enum Operation {
        Add(u8),
        Take,
        Finish(u8, Next),
        Wait(u64),
    }

    fn operations() -> impl Strategy<Value = Vec<Operation>> {
        let next = prop_oneof![
            Just(Next::Done),
            (0..3000u64).prop_map(|ms| Next::After(Duration::from_millis(ms))),
            Just(Next::Retry),
        ];
        let one = prop_oneof![
            (0..6u8).prop_map(Operation::Add),
            Just(Operation::Take),
            (0..6u8, next).prop_map(|(key, next)| Operation::Finish(key, next)),
            (0..2000u64).prop_map(Operation::Wait),
        ];
        proptest::collection::vec(one, 0..200)
    }

    proptest! {
        /// No key is lost, no key is at two workers at once, and no key waits twice. The model counts for each key the
        /// changes that no turn has seen yet.
        #[test]
        fn every_change_is_followed_by_one_turn(operations in operations()) {
            let mut now = Instant::now();
            let mut queue = Queue::new();
            let mut unseen: BTreeSet<u8> = BTreeSet::new();
            let mut working: BTreeSet<u8> = BTreeSet::new();
            let mut timers: BTreeMap<u8, Instant> = BTreeMap::new();
            for operation in operations {
                match operation {
                    Operation::Add(key) => {
                        queue.add(key);
                        unseen.insert(key);
                    }
                    Operation::Take => {
                        let taken = queue.take(now);
                        unseen.extend(timers.iter().filter(|(_, t)| **t <= now).map(|(k, _)| *k));
                        timers.retain(|_, time| *time > now);
                        let free = unseen.iter().any(|key| !working.contains(key));
                        prop_assert_eq!(taken.is_some(), free);
                        if let Some(key) = taken {
                            prop_assert!(working.insert(key), "two workers have the key");
                            prop_assert!(unseen.remove(&key), "a turn without a reason");
                            timers.remove(&key);
                        }
                    }
                    Operation::Finish(key, next) => {
                        if !working.remove(&key) {
                            continue;
                        }
                        queue.finish(key, next, now);
                        let timer = queue.entries.get(&key).and_then(|e| e.timer);
                        let delay = timer.map(|time| time.duration_since(now));
                        match next {
                            _ if unseen.contains(&key) => prop_assert_eq!(delay, None),
                            Next::Done => prop_assert_eq!(delay, None),
                            Next::After(wanted) => prop_assert_eq!(delay, Some(wanted)),
                            Next::Retry => {
                                let delay = delay.expect("a retry has a timer");
                                prop_assert!(delay >= Duration::from_millis(5) && delay <= seconds(60));
                            }
                        }
                        timers.extend(timer.map(|time| (key, time)));
                    }
                    Operation::Wait(millis) => now += Duration::from_millis(millis),
                }
                prop_assert_eq!(queue.next_timer(), timers.values().min().copied());
                let waiting: BTreeSet<u8> = queue.ready.iter().copied().collect();
                prop_assert_eq!(waiting.len(), queue.ready.len(), "a key waits twice");
            }
        }
    }
}
