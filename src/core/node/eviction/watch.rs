//! Which thresholds are met and for how long, and the resulting conditions. Times are durations since an arbitrary
//! fixed moment, so changes of the wall clock have no effect.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{Observations, Pressure, Pressures, Resource, Settings, Signal, Threshold};

/// Bytes of memory that a CPU can fill per second. Less than its write rate, because the kernel first clears new pages.
const FILL_BYTES_PER_SECOND: u64 = 1 << 30;
/// Number of CPUs above which memory does not fill faster.
const MAX_FILLING_CPUS: u64 = 8;
/// Minimum and maximum interval between measurements of memory.
const MEASUREMENT_INTERVAL: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(10));

/// State of all thresholds, by their index in the settings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Watch {
    /// Thresholds that are met, and since when.
    met: BTreeMap<usize, Duration>,
    /// Thresholds whose grace period had passed at the last assessment.
    active: BTreeSet<usize>,
    /// When each condition was last observed.
    observed: BTreeMap<Pressure, Duration>,
}

/// Result of an assessment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Assessment {
    /// The active conditions.
    pub pressures: Pressures,
    /// Thresholds that require evictions, in order of processing.
    pub active: Vec<Threshold>,
    /// Time until a grace period or a condition expires, if measurements stay the same.
    pub recheck_after: Option<Duration>,
}

impl Watch {
    /// Evaluates the measurements of `now`.
    pub fn assess(
        &mut self,
        settings: &Settings,
        observations: &Observations,
        now: Duration,
    ) -> Assessment {
        let thresholds = || settings.thresholds.iter().enumerate();
        // A threshold that caused evictions stays met until the minimum reclaim is free.
        let is_met = |(index, threshold): &(usize, &Threshold)| {
            observations.get(&threshold.signal).is_some_and(|amount| {
                threshold.is_met(*amount)
                    || (self.active.contains(index) && threshold.missing(*amount) > 0)
            })
        };
        let before = &self.met;
        let since = |index| before.get(&index).copied().unwrap_or(now);
        let met: BTreeMap<usize, Duration> = thresholds()
            .filter(is_met)
            .map(|(index, _)| (index, since(index)))
            .collect();
        for (index, threshold) in thresholds() {
            if met.contains_key(&index) {
                self.observed.insert(threshold.signal.pressure(), now);
            }
        }
        let elapsed = |since: Duration| now.saturating_sub(since);
        self.observed
            .retain(|_, at| elapsed(*at) < settings.transition);
        self.active = thresholds()
            .filter(|(index, t)| {
                met.get(index)
                    .is_some_and(|since| elapsed(*since) >= t.grace)
            })
            .map(|(index, _)| index)
            .collect();
        let graces = thresholds()
            .filter_map(|(index, t)| t.grace.checked_sub(elapsed(*met.get(&index)?)))
            .filter(|remaining| !remaining.is_zero());
        let transitions = self
            .observed
            .values()
            .map(|at| settings.transition.saturating_sub(elapsed(*at)));
        let recheck_after = graces.chain(transitions).min();
        self.met = met;
        Assessment {
            pressures: self.observed.keys().copied().collect(),
            active: thresholds()
                .filter(|(index, _)| self.active.contains(index))
                .map(|(_, t)| *t)
                .collect(),
            recheck_after,
        }
    }

    /// Whether a memory threshold is met that was not met at the last assessment.
    #[must_use]
    pub fn is_newly_met(&self, settings: &Settings, memory: &Observations) -> bool {
        settings.thresholds.iter().enumerate().any(|(index, t)| {
            t.signal.resource() == Resource::Memory
                && !self.met.contains_key(&index)
                && memory.get(&t.signal).is_some_and(|a| t.is_met(*a))
        })
    }
}

/// Bytes until the nearest unmet threshold of a signal is met; `None` without such a threshold.
fn headroom(thresholds: &[Threshold], memory: &Observations, signal: Signal) -> Option<u64> {
    let amount = memory.get(&signal)?;
    let of = |t: &Threshold| {
        let level = u64::try_from(t.value.of(amount.capacity).units()).unwrap_or(0);
        amount.available.checked_sub(level)
    };
    let own = thresholds.iter().filter(|t| t.signal == signal);
    own.filter_map(of).min()
}

/// Time until the next measurement of memory: no later than a threshold could be met if all CPUs did nothing but fill
/// memory. Kernel notifications may come earlier.
#[must_use]
pub fn next_measurement(thresholds: &[Threshold], memory: &Observations, cpus: u32) -> Duration {
    let (shortest, longest) = MEASUREMENT_INTERVAL;
    let rate = FILL_BYTES_PER_SECOND.saturating_mul(u64::from(cpus).clamp(1, MAX_FILLING_CPUS));
    let (machine, pods) = growth_until_threshold(thresholds, memory);
    match machine.into_iter().chain(pods).min() {
        None => longest,
        Some(bytes) => {
            let filled = bytes.checked_div(rate / 1000).unwrap_or(bytes);
            Duration::from_millis(filled).clamp(shortest, longest)
        }
    }
}

/// Growth in bytes until a threshold is met, for the machine's memory and for the memory of all pods; `None` without
/// such a threshold.
#[must_use]
pub fn growth_until_threshold(
    thresholds: &[Threshold],
    memory: &Observations,
) -> (Option<u64>, Option<u64>) {
    (
        headroom(thresholds, memory, Signal::MemoryAvailable),
        headroom(thresholds, memory, Signal::AllocatableMemoryAvailable),
    )
}

#[cfg(test)]
mod tests {
    use super::super::{Amount, Value};
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    fn settings() -> Settings {
        let threshold = |signal, value: u64, grace, reclaim: u64| Threshold {
            signal,
            value: Value::Absolute(crate::quantity::Quantity::from_bytes(value)),
            grace: Duration::from_secs(grace),
            min_reclaim: (reclaim > 0)
                .then(|| Value::Absolute(crate::quantity::Quantity::from_bytes(reclaim))),
        };
        Settings {
            thresholds: vec![
                threshold(Signal::MemoryAvailable, GIB, 0, GIB / 2),
                threshold(Signal::MemoryAvailable, 2 * GIB, 30, 0),
                threshold(Signal::PidAvailable, 1000, 0, 0),
            ],
            transition: Duration::from_secs(300),
            max_pod_grace: 0,
        }
    }

    fn memory(available: u64) -> Observations {
        let amount = Amount {
            capacity: 8 * GIB,
            available,
        };
        Observations::from([(Signal::MemoryAvailable, amount)])
    }

    fn graces(assessment: &Assessment) -> Vec<u64> {
        assessment
            .active
            .iter()
            .map(|t| t.grace.as_secs())
            .collect()
    }

    #[test]
    fn hard_thresholds_apply_immediately_soft_ones_after_their_grace_and_conditions_last_longer() {
        let (settings, mut watch) = (settings(), Watch::default());
        let pressed = Pressures::from([Pressure::Memory]);
        // Columns: second; available memory in 64ths of a GiB; grace periods of thresholds that require evictions;
        // whether the condition is active; seconds until it expires.
        for (at, available, active, pressure, recheck_after) in [
            (0, 192, vec![], false, None),
            (10, 127, vec![], true, Some(30)),
            (39, 127, vec![], true, Some(1)),
            (40, 127, vec![30], true, Some(300)),
            (50, 63, vec![0, 30], true, Some(300)),
            // Above the threshold, but not by the minimum reclaim.
            (60, 95, vec![0, 30], true, Some(300)),
            (70, 96, vec![30], true, Some(300)),
            (80, 95, vec![30], true, Some(300)),
            (90, 128, vec![], true, Some(300)),
            (379, 192, vec![], true, Some(1)),
            (380, 192, vec![], false, None),
            (400, 127, vec![], true, Some(30)),
        ] {
            let found = watch.assess(
                &settings,
                &memory(available * GIB / 64),
                Duration::from_secs(at),
            );
            assert_eq!(graces(&found), active, "at {at}");
            assert_eq!(found.pressures == pressed, pressure, "at {at}");
            // An active condition is measured again anyway.
            if recheck_after != Some(300) {
                assert_eq!(
                    found.recheck_after,
                    recheck_after.map(Duration::from_secs),
                    "at {at}"
                );
            }
        }
    }

    #[test]
    fn a_threshold_without_a_measurement_is_not_met() {
        let (settings, mut watch) = (settings(), Watch::default());
        let none = watch.assess(&settings, &Observations::new(), Duration::ZERO);
        assert_eq!(none, Assessment::default());
        let pids = Observations::from([(
            Signal::PidAvailable,
            Amount {
                capacity: 32768,
                available: 999,
            },
        )]);
        let short = watch.assess(&settings, &pids, Duration::ZERO);
        assert_eq!(short.pressures, Pressures::from([Pressure::Pid]));
    }

    #[test]
    fn memory_is_measured_more_often_near_a_threshold() {
        let (settings, mut watch) = (settings(), Watch::default());
        for (available, cpus, millis) in [
            (8 * GIB, 2, 3000),
            (8 * GIB, 64, 750),
            (2 * GIB + 1, 2, 100),
            // Below the soft threshold, the hard one is next.
            (2 * GIB - 1, 1, 999),
            (GIB, 1, 100),
            (1, 1, 10_000),
        ] {
            let found =
                next_measurement(&settings.thresholds, &memory(available), cpus).as_millis();
            assert!(found.abs_diff(millis) <= 5, "{available}: {found}");
        }
        assert_eq!(next_measurement(&[], &memory(1), 1), MEASUREMENT_INTERVAL.1);
        assert!(watch.is_newly_met(&settings, &memory(2 * GIB - 1)));
        watch.assess(&settings, &memory(2 * GIB - 1), Duration::ZERO);
        assert!(!watch.is_newly_met(&settings, &memory(2 * GIB - 2)));
        assert!(watch.is_newly_met(&settings, &memory(GIB - 1)));
        assert_eq!(
            growth_until_threshold(&settings.thresholds, &memory(3 * GIB)),
            (Some(GIB), None)
        );
        assert_eq!(
            growth_until_threshold(&settings.thresholds, &memory(1)),
            (None, None)
        );
    }

    proptest! {
        /// For all measurements: evictions require a threshold that is met or not yet cleared. A hard threshold takes
        /// effect immediately. Every threshold that requires evictions has its condition active.
        #[test]
        fn thresholds_that_require_evictions_are_met_and_reported(levels in proptest::collection::vec((0_u64..4 * GIB, 1_u64..60), 1..40)) {
            let (settings, mut watch, mut now) = (settings(), Watch::default(), Duration::ZERO);
            for (available, wait) in levels {
                let seen = memory(available);
                let found = watch.assess(&settings, &seen, now);
                for threshold in &found.active {
                    let amount = seen[&threshold.signal];
                    prop_assert!(threshold.is_met(amount) || threshold.missing(amount) > 0);
                    prop_assert!(found.pressures.contains(&threshold.signal.pressure()));
                }
                let hard = settings.thresholds[0];
                if hard.is_met(seen[&hard.signal]) {
                    prop_assert!(found.active.contains(&hard));
                }
                if settings.thresholds.iter().any(|t| seen.get(&t.signal).is_some_and(|a| t.is_met(*a))) {
                    prop_assert!(!found.pressures.is_empty());
                }
                prop_assert!(found.recheck_after.is_none_or(|recheck_after| recheck_after <= settings.transition));
                now += Duration::from_secs(wait);
            }
        }
    }
}
