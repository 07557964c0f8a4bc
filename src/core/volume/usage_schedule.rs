//! Scheduling of disk usage measurements for pods with storage limits. Pure: times are durations since the agent
//! started to measure.
//!
//! A measurement walks through a pod's files. Each pod has its own interval, proportional to the duration of its walk.
//! So a pod with millions of files neither overloads the node nor delays the limits of other pods.

use std::collections::BTreeMap;
use std::time::Duration;

/// Minimum interval, chosen so that a pod above its limit is evicted within five seconds. Usage of writable layers is
/// as recent as the runtime's statistics (containerd: every 10 s, `stats_collect_period`).
pub const PERIOD: Duration = Duration::from_secs(4);
/// Pods due within this time are measured with those due now, so that all pods stay in step with the rounds.
const DUE_TOLERANCE: Duration = Duration::from_millis(500);
/// Minimum interval of a pod's walks, as a multiple of the duration of its last walk.
const MIN_INTERVAL_FACTOR: u32 = 20;
/// Duration above which a walk is a long one; long walks delay only other long walks.
const LONG_WALK: Duration = Duration::from_secs(1);
/// Maximum number of concurrent short walks.
const MAX_SHORT_WALKS: usize = 4;
/// Maximum number of concurrent walks of pods whose last walk was long.
const MAX_LONG_WALKS: usize = 2;
/// Maximum number of concurrent walks in total. Needed because the walks of new pods may become long.
const MAX_WALKS: usize = 16;

#[derive(Debug, Clone, Copy, Default)]
struct Pod {
    /// Start of the walk in progress.
    started: Option<Duration>,
    /// Duration of the last walk.
    took: Duration,
    /// When the next walk is due.
    due: Duration,
}

impl Pod {
    fn is_long(&self) -> bool {
        self.took > LONG_WALK
    }

    fn counts_as_short(&self, now: Duration) -> bool {
        let is_short_so_far = |begun| now.saturating_sub(begun) <= LONG_WALK;
        !self.is_long() && self.started.is_some_and(is_short_so_far)
    }
}

/// The measured pods, by uid.
#[derive(Debug, Clone, Default)]
pub struct UsageSchedule(BTreeMap<String, Pod>);

impl UsageSchedule {
    /// Selects the pods of `limited` whose walks start now: those that are due, longest overdue first, within the
    /// limits of concurrency.
    pub fn begin<'a>(
        &mut self,
        limited: impl Iterator<Item = &'a str>,
        now: Duration,
    ) -> Vec<String> {
        let known = std::mem::take(&mut self.0);
        let of = |uid: &str| known.get(uid).copied().unwrap_or_default();
        self.0 = limited.map(|uid| (uid.to_owned(), of(uid))).collect();
        // A walk continues after its pod was deleted.
        let under_way = known.into_iter().filter(|(_, pod)| pod.started.is_some());
        self.0.extend(under_way);
        let count = |counts: &dyn Fn(&Pod) -> bool| self.0.values().filter(|p| counts(p)).count();
        let mut short = MAX_SHORT_WALKS.saturating_sub(count(&|p| p.counts_as_short(now)));
        let mut long =
            MAX_LONG_WALKS.saturating_sub(count(&|p| p.started.is_some() && p.is_long()));
        let all = MAX_WALKS.saturating_sub(count(&|p| p.started.is_some()));
        let is_due =
            |pod: &Pod| pod.started.is_none() && pod.due <= now.saturating_add(DUE_TOLERANCE);
        let mut due: Vec<(&String, &mut Pod)> =
            self.0.iter_mut().filter(|(_, p)| is_due(p)).collect();
        due.sort_by_key(|(_, pod)| pod.due);
        let has_place = |(_, pod): &(&String, &mut Pod)| {
            let places = if pod.is_long() { &mut long } else { &mut short };
            let has = *places > 0;
            *places = places.saturating_sub(usize::from(has));
            has
        };
        let begun = due.into_iter().filter(has_place).take(all);
        let begin = |(uid, pod): (&String, &mut Pod)| {
            pod.started = Some(now);
            uid.clone()
        };
        begun.map(begin).collect()
    }

    /// Records the end of a walk, successful or not.
    pub fn record_end(&mut self, uid: &str, now: Duration) {
        let Some(pod) = self.0.get_mut(uid) else {
            return;
        };
        if let Some(begun) = pod.started.take() {
            pod.took = now.saturating_sub(begun);
            pod.due =
                begun.saturating_add(PERIOD.max(pod.took.saturating_mul(MIN_INTERVAL_FACTOR)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The start times of walks by pod, in milliseconds; `took` is the duration of each pod's walk in milliseconds.
    fn counted(took: &BTreeMap<String, u64>, until: Duration) -> BTreeMap<String, Vec<u64>> {
        let (mut schedule, mut now) = (UsageSchedule::default(), Duration::ZERO);
        let mut ends: BTreeMap<(Duration, String), ()> = BTreeMap::new();
        let mut starts: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        let mut round = Duration::ZERO;
        while now < until {
            for uid in schedule.begin(took.keys().map(String::as_str), now) {
                let end = now + Duration::from_millis(took[&uid]);
                let at = u64::try_from(now.as_millis()).expect("short");
                starts.entry(uid.clone()).or_default().push(at);
                ends.insert((end, uid), ());
            }
            let next = ends.first_key_value().map(|((at, _), ())| *at);
            match next.filter(|at| *at < round + PERIOD) {
                Some(at) => {
                    let ((_, uid), ()) = ends.pop_first().expect("one");
                    now = at;
                    schedule.record_end(&uid, now);
                }
                None => {
                    round += PERIOD;
                    now = round;
                }
            }
        }
        starts
    }

    fn longest_pause(starts: &[u64]) -> u64 {
        let pauses = starts.windows(2).map(|pair| pair[1] - pair[0]);
        pauses.max().unwrap_or(u64::MAX)
    }

    #[test]
    fn a_slow_disk_walk_of_one_pod_delays_no_other() {
        for big in [1, 3, 10] {
            let mut took: BTreeMap<String, u64> =
                (0..40).map(|n| (format!("small-{n}"), 10)).collect();
            took.extend((0..big).map(|n| (format!("big-{n}"), 300_000)));
            let starts = counted(&took, Duration::from_secs(3600));
            for (uid, starts) in starts.iter().filter(|(uid, _)| uid.starts_with("small")) {
                let pause = longest_pause(starts);
                assert!(
                    pause <= 4500,
                    "{big} large volumes: {uid} waited {pause} ms"
                );
            }
        }
    }

    #[test]
    fn disk_walks_take_a_small_share_of_the_time() {
        for (took, pause) in [
            (0, 4_000),
            (150, 4_000),
            (1_000, 20_000),
            (300_000, 6_000_000),
        ] {
            let took = BTreeMap::from([("p".to_owned(), took)]);
            let starts = counted(&took, Duration::from_secs(20_000));
            let pauses = starts["p"].windows(2).map(|pair| pair[1] - pair[0]);
            assert!(
                pauses
                    .clone()
                    .all(|p| (pause - 500..=pause + 4_000).contains(&p))
                    && starts["p"].len() > 2,
                "{took:?}: {:?}",
                pauses.take(3).collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn concurrent_disk_walks_are_few_and_every_pod_gets_a_turn() {
        let uids: Vec<String> = (0..50).map(|n| format!("u{n}")).collect();
        let all = || uids.iter().map(String::as_str);
        let second = Duration::from_secs;
        let mut schedule = UsageSchedule::default();
        let mut under_way = vec![];
        // All pods are new, and no walk completes.
        for now in (0..60).map(|n| second(2 * n)) {
            under_way.extend(schedule.begin(all(), now));
        }
        assert_eq!(under_way.len(), MAX_WALKS);
        for (n, uid) in under_way.iter().enumerate() {
            schedule.record_end(uid, second(200 + n as u64));
        }
        // Pods that have waited come before measured ones; deleted pods are forgotten.
        let next = schedule.begin(all(), second(100_000));
        assert!(next.iter().filter(|uid| under_way.contains(uid)).count() <= MAX_LONG_WALKS);
        assert_eq!(next.len(), MAX_SHORT_WALKS + MAX_LONG_WALKS);
        assert!(
            schedule
                .begin(std::iter::empty(), second(100_000))
                .is_empty()
        );
        assert_eq!(schedule.0.len(), next.len(), "only running walks are kept");
        next.iter()
            .for_each(|uid| schedule.record_end(uid, second(100_001)));
        assert!(
            schedule
                .begin(std::iter::empty(), second(100_000))
                .is_empty()
        );
        assert!(schedule.0.is_empty());
    }
}
