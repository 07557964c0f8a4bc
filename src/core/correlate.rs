//! Event correlation: which events are posted, which are aggregated or counted, and which are dropped
//! (`staging/src/k8s.io/client-go/tools/record/events_cache.go`). Pure: the clock is an argument.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use jiff::{SignedDuration, Timestamp};

use super::bucket::Bucket;

/// Number of different messages with the same reason and object above which messages are merged.
const MAX_SIMILAR: usize = 10;
/// How long events count as similar.
const WINDOW: SignedDuration = SignedDuration::from_mins(10);
/// Burst of events per object and type, and the rate per second at which further events are allowed.
const BURST: f64 = 25.0;
const RATE: f64 = 1.0 / 300.0;
/// Maximum number of entries per map.
const MAX_ENTRIES: usize = 4096;

/// An event to correlate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PendingEvent<'a> {
    /// Identity of the object.
    pub object: &'a str,
    /// Field path of the part of the object; empty for the whole object.
    pub part: &'a str,
    /// Event type, `Normal` or `Warning`.
    pub kind: &'a str,
    /// The reason.
    pub reason: &'a str,
    /// The message.
    pub message: &'a str,
}

/// Identity of an event. Only a hash is kept, because the texts of thousands of events would occupy much memory. A hash
/// collision merely counts an event instead of posting it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key(u64);

fn key(parts: &[&str]) -> Key {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    Key(hasher.finish())
}

/// How to handle an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Correlation {
    /// Identity of the event for [`Correlator::record_posted`].
    pub key: Key,
    /// The message, merged if there are too many similar ones.
    pub message: String,
    /// If an existing event is counted instead: when that event was posted, and its new count.
    pub counted: Option<(Timestamp, i32)>,
}

/// The messages of a group of similar events. Most groups have one, which needs no separate allocation; thousands of
/// small allocations would fragment the memory.
#[derive(Debug)]
struct Group {
    first: Key,
    /// At most [`MAX_SIMILAR`] messages, in addition to the first.
    others: Vec<Key>,
    last: Timestamp,
}

impl Group {
    fn new(first: Key, last: Timestamp) -> Group {
        Group {
            first,
            others: vec![],
            last,
        }
    }

    /// Adds a message if it is new and there is room; returns whether the group has too many messages.
    fn add(&mut self, message: Key) -> bool {
        let is_known = self.first == message || self.others.contains(&message);
        if self.others.len() < MAX_SIMILAR && !is_known {
            self.others.push(message);
        }
        self.others.len() >= MAX_SIMILAR
    }
}

#[derive(Debug)]
struct Known {
    /// When the event was posted. The event's name contains this time.
    posted: Timestamp,
    count: i32,
    last: Timestamp,
}

/// Records posted events.
#[derive(Debug, Default)]
pub struct Correlator {
    groups: HashMap<Key, Group>,
    buckets: HashMap<Key, Bucket>,
    known: HashMap<Key, Known>,
}

/// Removes old entries when the map is full, or all entries if none are old.
fn evict_old<V>(map: &mut HashMap<Key, V>, now: Timestamp, last: impl Fn(&V) -> Timestamp) {
    if map.len() >= MAX_ENTRIES {
        map.retain(|_, value| now.duration_since(last(value)) < WINDOW);
    }
    if map.len() >= MAX_ENTRIES {
        map.clear();
    }
}

impl Correlator {
    /// Decides how to handle an event; `None` if the object has exceeded its limit.
    pub fn decide(&mut self, event: PendingEvent<'_>, now: Timestamp) -> Option<Correlation> {
        // All parts of an object share aggregation and limit (`EventAggregatorByReasonFunc`, `getSpamKey`).
        let group_key = key(&[event.object, event.kind, event.reason]);
        let own_key = key(&[
            event.object,
            event.part,
            event.kind,
            event.reason,
            event.message,
        ]);
        let message_key = key(&[event.message]);
        evict_old(&mut self.groups, now, |g| g.last);
        let new = || Group::new(message_key, now);
        let group = self.groups.entry(group_key).or_insert_with(new);
        if now.duration_since(group.last) > WINDOW {
            *group = new();
        }
        group.last = now;
        let (key, message) = if group.add(message_key) {
            let merged = format!("(combined from similar events): {}", event.message);
            (group_key, merged)
        } else {
            (own_key, event.message.to_owned())
        };
        evict_old(&mut self.buckets, now, Bucket::last);
        self.buckets
            .entry(self::key(&[event.object, event.kind]))
            .or_insert_with(|| Bucket::new(RATE, BURST, now))
            .take(now)
            .ok()?;
        let counted = self.known.get_mut(&key).map(|known| {
            known.count = known.count.saturating_add(1);
            known.last = now;
            (known.posted, known.count)
        });
        Some(Correlation {
            key,
            message,
            counted,
        })
    }

    /// Records a new event that was posted with this count.
    pub fn record_posted(&mut self, key: Key, now: Timestamp, count: i32) {
        evict_old(&mut self.known, now, |k| k.last);
        self.known.insert(
            key,
            Known {
                posted: now,
                count,
                last: now,
            },
        );
    }

    /// Removes an event that no longer exists in the API.
    pub fn remove(&mut self, key: Key) {
        self.known.remove(&key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(s: i64) -> Timestamp {
        Timestamp::from_second(s).expect("a time")
    }

    fn emit(correlator: &mut Correlator, message: &str, s: i64) -> Option<Correlation> {
        let correlation = correlator.decide(
            PendingEvent {
                object: "pod",
                part: "",
                kind: "Warning",
                reason: "BackOff",
                message,
            },
            at(s),
        )?;
        if correlation.counted.is_none() {
            correlator.record_posted(correlation.key, at(s), 1);
        }
        Some(correlation)
    }

    #[test]
    fn equal_events_are_counted_and_similar_events_are_combined() {
        let mut correlator = Correlator::default();
        assert_eq!(emit(&mut correlator, "a", 0).and_then(|v| v.counted), None);
        assert_eq!(
            emit(&mut correlator, "a", 1).and_then(|v| v.counted),
            Some((at(0), 2))
        );
        for n in 2..11 {
            assert_eq!(
                emit(&mut correlator, &format!("m{n}"), n).map(|v| (v.message, v.counted)),
                Some((format!("m{n}"), None))
            );
        }
        let merged = emit(&mut correlator, "m11", 11).expect("posted");
        assert_eq!(
            (merged.message.as_str(), merged.counted),
            ("(combined from similar events): m11", None)
        );
        assert_eq!(
            emit(&mut correlator, "m12", 12).and_then(|v| v.counted),
            Some((at(11), 2))
        );
        assert_eq!(
            emit(&mut correlator, "m13", 5000)
                .map(|v| v.message)
                .as_deref(),
            Some("m13"),
            "later it is a separate event"
        );
    }

    #[test]
    fn an_object_with_excess_events_is_limited_and_others_are_not() {
        let mut correlator = Correlator::default();
        let posted = (0..100)
            .filter(|_| emit(&mut correlator, "x", 0).is_some())
            .count();
        assert_eq!(posted, 25);
        assert!(
            emit(&mut correlator, "x", 299).is_none() && emit(&mut correlator, "x", 301).is_some()
        );
        assert!(
            correlator
                .decide(
                    PendingEvent {
                        object: "other",
                        part: "",
                        kind: "Warning",
                        reason: "r",
                        message: "x"
                    },
                    at(0)
                )
                .is_some()
        );
    }

    /// As in `getSpamKey`: a pod with ten containers may emit 25 warnings and 25 normal events.
    #[test]
    fn all_containers_of_a_pod_share_one_event_limit_per_type() {
        let mut correlator = Correlator::default();
        for kind in ["Warning", "Normal"] {
            let mut posted = 0;
            for n in 0..100 {
                let (part, message) = (format!("spec.containers{{c{}}}", n % 10), n.to_string());
                let event = PendingEvent {
                    object: "pod",
                    part: &part,
                    kind,
                    reason: &message,
                    message: &message,
                };
                posted += usize::from(correlator.decide(event, at(0)).is_some());
            }
            assert_eq!(posted, 25, "{kind}");
        }
    }

    #[test]
    fn the_number_of_remembered_events_is_bounded() {
        let mut correlator = Correlator::default();
        for n in 0..20_000 {
            let about = format!("pod{n}");
            if let Some(correlation) = correlator.decide(
                PendingEvent {
                    object: &about,
                    part: "",
                    kind: "Warning",
                    reason: "r",
                    message: "m",
                },
                at(n),
            ) {
                correlator.record_posted(correlation.key, at(n), 1);
            }
        }
        assert!(
            correlator.groups.len() <= MAX_ENTRIES
                && correlator.buckets.len() <= MAX_ENTRIES
                && correlator.known.len() <= MAX_ENTRIES
        );
    }
}
