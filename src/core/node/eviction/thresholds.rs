//! Eviction thresholds in the format of the configuration: `memory.available: 100Mi`, `nodefs.available: 10%`.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Amount, Resource, Signal};
use crate::quantity::Quantity;
use crate::time::duration;

/// Default of `evictionHard`.
pub const DEFAULT_HARD: [(&str, &str); 5] = [
    ("memory.available", "100Mi"),
    ("nodefs.available", "10%"),
    ("nodefs.inodesFree", "5%"),
    ("imagefs.available", "15%"),
    ("imagefs.inodesFree", "5%"),
];

/// Signals that are accepted and ignored. Writable layers are on the image filesystem or on the node's own filesystem,
/// so the thresholds of those apply. The kubelet also ignores settings for these signals.
pub const IGNORED: [&str; 2] = ["containerfs.available", "containerfs.inodesFree"];

/// An amount, or a fraction of the capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value {
    /// An absolute amount.
    Absolute(Quantity),
    /// Fraction of the capacity, from 0 to 1; 32 bits as in the kubelet, so that products are equal.
    Share(f32),
}

/// A threshold is met if less than `value` is available.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Threshold {
    /// The measured signal.
    pub signal: Signal,
    /// The threshold value.
    pub value: Value,
    /// How long the threshold must be met before pods are evicted; zero for a hard threshold.
    pub grace: Duration,
    /// How much above `value` must be available before the threshold counts as cleared.
    pub min_reclaim: Option<Value>,
}

/// Threshold settings of the configuration, each by signal.
#[derive(Debug, Clone, Copy)]
pub struct ThresholdSettings<'a> {
    /// `evictionHard`.
    pub hard: &'a BTreeMap<String, String>,
    /// `evictionSoft`.
    pub soft: &'a BTreeMap<String, String>,
    /// `evictionSoftGracePeriod`.
    pub soft_grace: &'a BTreeMap<String, String>,
    /// `evictionMinimumReclaim`.
    pub min_reclaim: &'a BTreeMap<String, String>,
    /// Whether the memory of all pods together is limited (`enforceNodeAllocatable` includes `pods`). If so, the hard
    /// memory threshold also applies to that limit.
    pub pods_are_limited: bool,
}

/// Why a setting is invalid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    /// The configuration field.
    pub field: &'static str,
    /// The key in that field.
    pub signal: String,
    /// The invalid value.
    pub value: String,
    /// How to correct it.
    pub remedy: &'static str,
}

impl Value {
    /// The absolute value for a capacity. Fractions are rounded down to whole units.
    #[must_use]
    pub fn of(self, capacity: u64) -> Quantity {
        match self {
            Value::Absolute(quantity) => quantity,
            // Computed as in the kubelet; the result is at most the capacity, so the cast is safe.
            Value::Share(share) => {
                Quantity::from_bytes((capacity as f64 * f64::from(share)) as u64)
            }
        }
    }
}

impl Threshold {
    /// Whether pods are evicted immediately.
    #[must_use]
    pub(crate) fn is_hard(&self) -> bool {
        self.grace.is_zero()
    }

    /// Whether the threshold is met.
    #[must_use]
    pub fn is_met(&self, amount: Amount) -> bool {
        self.value.of(amount.capacity) > self.available(amount)
    }

    /// Amount in whole units to be freed until the threshold, including the minimum reclaim, is cleared.
    #[must_use]
    pub fn missing(&self, amount: Amount) -> u64 {
        let reclaim = self.min_reclaim.map(|v| v.of(amount.capacity));
        let goal = self.value.of(amount.capacity) + reclaim.unwrap_or(Quantity::ZERO);
        u64::try_from((goal - self.available(amount)).units()).unwrap_or(0)
    }

    fn available(&self, amount: Amount) -> Quantity {
        self.signal.resource().quantity(amount.available)
    }
}

/// Entries of a map with their signals; ignored signals are omitted.
fn entries<'a>(
    field: &'static str,
    map: &'a BTreeMap<String, String>,
) -> impl Iterator<Item = Result<(Signal, &'a str), Invalid>> {
    let known = map
        .iter()
        .filter(|(name, _)| !IGNORED.contains(&name.as_str()));
    known.map(move |(name, text)| match Signal::named(name) {
        Some(signal) => Ok((signal, text.as_str())),
        None => Err(Invalid {
            field,
            signal: name.clone(),
            value: text.clone(),
            remedy: "no such signal: use memory.available, allocatableMemory.available, nodefs.available, nodefs.inodesFree, imagefs.available, imagefs.inodesFree or pid.available",
        }),
    })
}

/// Parses the values of a map by signal.
fn read<T>(
    field: &'static str,
    map: &BTreeMap<String, String>,
    parse: impl Fn(&str) -> Result<T, &'static str>,
) -> Result<BTreeMap<Signal, T>, Invalid> {
    let parsed = entries(field, map).map(|entry| {
        let (signal, text) = entry?;
        let invalid = |remedy| Invalid {
            field,
            signal: signal.name().into(),
            value: text.into(),
            remedy,
        };
        Ok((signal, parse(text).map_err(invalid)?))
    });
    parsed.collect()
}

fn share(text: &str) -> Option<Result<f32, &'static str>> {
    let number = text.strip_suffix('%')?;
    let percent: Result<f32, _> = number.trim_end_matches('%').parse();
    let share = percent.map(|p| p / 100.0).ok();
    Some(share.ok_or("use a percentage such as 10%, or a quantity such as 1Gi"))
}

fn parse_value(text: &str) -> Result<Option<Value>, &'static str> {
    match share(text) {
        // Both values disable the threshold.
        Some(_) if text == "0%" || text == "100%" => Ok(None),
        Some(share) => match share? {
            share if (0.0..=1.0).contains(&share) => Ok(Some(Value::Share(share))),
            _ => Err("use a percentage between 0% and 100%"),
        },
        None => match text.parse::<Quantity>() {
            Ok(quantity) if quantity > Quantity::ZERO => Ok(Some(Value::Absolute(quantity))),
            Ok(_) => Err("use a positive quantity; 0% means no threshold"),
            Err(_) => Err("use a quantity such as 100Mi, or a percentage such as 10%"),
        },
    }
}

fn parse_min_reclaim(text: &str) -> Result<Value, &'static str> {
    match share(text) {
        Some(share) => match share? {
            share if share > 0.0 && share.is_finite() => Ok(Value::Share(share)),
            _ => Err("use a positive percentage"),
        },
        None => match text.parse::<Quantity>() {
            Ok(quantity) if quantity >= Quantity::ZERO => Ok(Value::Absolute(quantity)),
            Ok(_) => Err("use a quantity that is not negative"),
            Err(_) => Err("use a quantity such as 500Mi, or a percentage such as 5%"),
        },
    }
}

/// The thresholds in order of processing: by signal, hard ones first.
pub fn parse(settings: ThresholdSettings<'_>) -> Result<Vec<Threshold>, Invalid> {
    let hard = read("evictionHard", settings.hard, parse_value)?;
    let soft = read("evictionSoft", settings.soft, parse_value)?;
    let graces = read("evictionSoftGracePeriod", settings.soft_grace, |text| {
        duration(text).ok_or("use a duration such as 1m30s")
    })?;
    let reclaims = read(
        "evictionMinimumReclaim",
        settings.min_reclaim,
        parse_min_reclaim,
    )?;
    let threshold = |signal, value, grace| Threshold {
        signal,
        value,
        grace,
        min_reclaim: reclaims.get(&signal).copied(),
    };
    let mut all: Vec<Threshold> = vec![];
    for (signal, value) in hard.into_iter().filter_map(|(s, v)| Some((s, v?))) {
        all.push(threshold(signal, value, Duration::ZERO));
        if signal == Signal::MemoryAvailable && settings.pods_are_limited {
            all.push(Threshold {
                signal: Signal::AllocatableMemoryAvailable,
                ..threshold(signal, value, Duration::ZERO)
            });
        }
    }
    for (signal, value) in soft.into_iter().filter_map(|(s, v)| Some((s, v?))) {
        let grace = graces.get(&signal).copied().ok_or_else(|| Invalid {
            field: "evictionSoftGracePeriod",
            signal: signal.name().into(),
            value: String::new(),
            remedy: "set it too: every signal in evictionSoft needs a grace period",
        })?;
        all.push(threshold(signal, value, grace));
    }
    all.sort_by_key(|t| (t.signal, t.grace));
    Ok(all)
}

/// The amount that hard thresholds for memory and the node's own disk reserve from pods (`pkg/kubelet/cm/helpers.go`).
#[must_use]
pub(crate) fn reserved_by_thresholds(
    thresholds: &[Threshold],
    resource: Resource,
    capacity: u64,
) -> Quantity {
    let signal = match resource {
        Resource::Memory => Signal::MemoryAvailable,
        Resource::EphemeralStorage => Signal::NodeFsAvailable,
        Resource::Inodes | Resource::Pids => return Quantity::ZERO,
    };
    let hard = thresholds
        .iter()
        .find(|t| t.signal == signal && t.is_hard());
    hard.map_or(Quantity::ZERO, |t| t.value.of(capacity))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    type Pairs<'a> = &'a [(&'a str, &'a str)];

    fn parsed(
        hard: Pairs<'_>,
        soft: Pairs<'_>,
        grace: Pairs<'_>,
        reclaim: Pairs<'_>,
    ) -> Result<Vec<Threshold>, Invalid> {
        parse(ThresholdSettings {
            hard: &map(hard),
            soft: &map(soft),
            soft_grace: &map(grace),
            min_reclaim: &map(reclaim),
            pods_are_limited: true,
        })
    }

    fn absolute(text: &str) -> Value {
        Value::Absolute(text.parse().expect("a quantity"))
    }

    #[test]
    fn quantities_and_percentages_are_parsed_and_memory_has_two_thresholds() {
        let found = parsed(
            &[
                ("memory.available", "100Mi"),
                ("nodefs.available", "10%"),
                ("imagefs.available", "0%"),
                ("imagefs.inodesFree", "100%"),
                ("containerfs.available", "5%"),
            ],
            &[("memory.available", "1Gi")],
            &[("memory.available", "1m30s")],
            &[("memory.available", "500Mi"), ("nodefs.available", "2%")],
        )
        .expect("fine");
        let threshold = |signal, value, seconds, min_reclaim| Threshold {
            signal,
            value,
            grace: Duration::from_secs(seconds),
            min_reclaim: Some(min_reclaim),
        };
        let (memory, more) = (absolute("100Mi"), absolute("500Mi"));
        assert_eq!(
            found,
            [
                threshold(Signal::MemoryAvailable, memory, 0, more),
                threshold(Signal::MemoryAvailable, absolute("1Gi"), 90, more),
                threshold(Signal::AllocatableMemoryAvailable, memory, 0, more),
                threshold(
                    Signal::NodeFsAvailable,
                    Value::Share(0.1),
                    0,
                    Value::Share(0.02)
                ),
            ]
        );
        assert_eq!(parsed(&DEFAULT_HARD, &[], &[], &[]).map(|t| t.len()), Ok(6));
        assert_eq!(parsed(&[], &[], &[], &[]), Ok(vec![]));
    }

    #[test]
    fn invalid_thresholds_are_reported() {
        let of = |key: &str, value: &str| [(key.to_owned(), value.to_owned())];
        let cases = [
            ("hard", of("memory", "1Gi"), "no such signal"),
            ("hard", of("memory.available", "lots"), "use a quantity"),
            ("hard", of("memory.available", "0"), "positive"),
            ("hard", of("memory.available", "-1Gi"), "positive"),
            (
                "hard",
                of("nodefs.available", "101%"),
                "between 0% and 100%",
            ),
            ("hard", of("nodefs.available", "-1%"), "between 0% and 100%"),
            (
                "hard",
                of("nodefs.available", "NaN%"),
                "between 0% and 100%",
            ),
            ("hard", of("nodefs.available", "x%"), "use a percentage"),
            (
                "soft",
                of("memory.available", "1Gi"),
                "needs a grace period",
            ),
            ("grace", of("memory.available", "-1s"), "use a duration"),
            ("grace", of("memory.free", "1s"), "no such signal"),
            ("reclaim", of("memory.available", "-1Mi"), "not negative"),
            ("reclaim", of("memory.available", "0%"), "positive"),
        ];
        for (which, [(key, value)], expected) in cases {
            let given = [(key.as_str(), value.as_str())];
            let only = |name: &str| if which == name { &given[..] } else { &[] };
            let error = parsed(only("hard"), only("soft"), only("grace"), only("reclaim"))
                .expect_err(&value);
            assert!(error.remedy.contains(expected), "{error:?}");
            assert_eq!(error.signal, key);
        }
    }

    #[test]
    fn thresholds_are_met_below_their_level_and_cleared_above_the_minimum_reclaim() {
        let amount = |available| Amount {
            capacity: 1000,
            available,
        };
        let threshold = Threshold {
            signal: Signal::NodeFsAvailable,
            value: Value::Share(0.1),
            grace: Duration::ZERO,
            min_reclaim: Some(Value::Share(0.05)),
        };
        for (available, met, missing) in [
            (99, true, 51),
            (100, false, 50),
            (149, false, 1),
            (150, false, 0),
            (1000, false, 0),
        ] {
            let amount = amount(available);
            let found = (threshold.is_met(amount), threshold.missing(amount));
            assert_eq!(found, (met, missing), "{available}");
        }
        let kept = reserved_by_thresholds(&[threshold], Resource::EphemeralStorage, 1000);
        assert_eq!(kept, Quantity::from_bytes(100));
        assert!(reserved_by_thresholds(&[threshold], Resource::Memory, 1000).is_zero());
    }
}
