//! Which events are posted anew, which only counted, and which are too many: the correlation that clients
//! of the API are expected to do (kubelet spec, chapter 17). Pure: the clock is an argument.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use jiff::{SignedDuration, Timestamp};

use super::bucket::Bucket;

/// So many different messages of one reason about one object are posted one by one; more are merged.
const SIMILAR: usize = 10;
/// For how long events count as similar.
const WINDOW: SignedDuration = SignedDuration::from_mins(10);
/// How many events one object may have at once, and how often it gets one more.
const BURST: f64 = 25.0;
const RATE: f64 = 1.0 / 300.0;
/// How much is remembered of each sort.
const REMEMBERED: usize = 4096;

/// An event before it is posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Said<'a> {
    /// Identifies the object.
    pub object: &'a str,
    /// The part of the object, a field path; empty for the whole.
    pub part: &'a str,
    /// The type, `Normal` or `Warning`.
    pub kind: &'a str,
    /// The reason.
    pub reason: &'a str,
    /// The message.
    pub message: &'a str,
}

/// Identifies what is said. It is a hash: the texts of thousands of events would stay in memory, each in a page of its own,
/// and by a collision nobody gains more than that an event is counted instead of posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key(u64);

fn key(parts: &[&str]) -> Key {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    Key(hasher.finish())
}

/// What is to be done with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Identifies the event in [`Correlator::posted`].
    pub key: Key,
    /// The message, perhaps merged.
    pub message: String,
    /// When the event was posted that is counted up instead, and to what.
    pub counted: Option<(Timestamp, i32)>,
}

/// Which messages a group has had. Most have one, which needs no memory of its own: thousands of small pieces that outlive
/// their pods would keep a page each.
#[derive(Debug)]
struct Group {
    first: Key,
    /// With the first at most one more than [`SIMILAR`].
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

    /// Adds a message, unless it is there or there are too many; whether there are too many.
    fn add(&mut self, message: Key) -> bool {
        let is_known = self.first == message || self.others.contains(&message);
        if self.others.len() < SIMILAR && !is_known {
            self.others.push(message);
        }
        self.others.len() >= SIMILAR
    }
}

#[derive(Debug)]
struct Known {
    /// When it was posted, which is in its name.
    posted: Timestamp,
    count: i32,
    last: Timestamp,
}

/// Remembers what has been posted.
#[derive(Debug, Default)]
pub struct Correlator {
    groups: HashMap<Key, Group>,
    buckets: HashMap<Key, Bucket>,
    known: HashMap<Key, Known>,
}

/// Evicts old entries when the map is full; all of them if that is not enough.
fn bound<V>(map: &mut HashMap<Key, V>, now: Timestamp, last: impl Fn(&V) -> Timestamp) {
    if map.len() >= REMEMBERED {
        map.retain(|_, value| now.duration_since(last(value)) < WINDOW);
    }
    if map.len() >= REMEMBERED {
        map.clear();
    }
}

impl Correlator {
    /// Decides; `None` if the object has had too many.
    pub fn decide(&mut self, said: Said<'_>, now: Timestamp) -> Option<Verdict> {
        // The parts of an object are merged and limited together (`EventAggregatorByReasonFunc`, `getSpamKey`).
        let group_key = key(&[said.object, said.kind, said.reason]);
        let own_key = key(&[said.object, said.part, said.kind, said.reason, said.message]);
        let message_key = key(&[said.message]);
        bound(&mut self.groups, now, |g| g.last);
        let new = || Group::new(message_key, now);
        let group = self.groups.entry(group_key).or_insert_with(new);
        if now.duration_since(group.last) > WINDOW {
            *group = new();
        }
        group.last = now;
        let (key, message) = if group.add(message_key) {
            let merged = format!("(combined from similar events): {}", said.message);
            (group_key, merged)
        } else {
            (own_key, said.message.to_owned())
        };
        bound(&mut self.buckets, now, Bucket::last);
        self.buckets
            .entry(self::key(&[said.object, said.kind]))
            .or_insert_with(|| Bucket::new(RATE, BURST, now))
            .take(now)
            .ok()?;
        let counted = self.known.get_mut(&key).map(|known| {
            known.count = known.count.saturating_add(1);
            known.last = now;
            (known.posted, known.count)
        });
        Some(Verdict {
            key,
            message,
            counted,
        })
    }

    /// A new event has been posted with this count.
    pub fn posted(&mut self, key: Key, now: Timestamp, count: i32) {
        bound(&mut self.known, now, |k| k.last);
        self.known.insert(
            key,
            Known {
                posted: now,
                count,
                last: now,
            },
        );
    }

    /// The event that was to be counted is not there any more.
    pub fn forget(&mut self, key: Key) {
        self.known.remove(&key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(s: i64) -> Timestamp {
        Timestamp::from_second(s).expect("a time")
    }

    fn say(correlator: &mut Correlator, message: &str, s: i64) -> Option<Verdict> {
        let verdict = correlator.decide(
            Said {
                object: "pod",
                part: "",
                kind: "Warning",
                reason: "BackOff",
                message,
            },
            at(s),
        )?;
        if verdict.counted.is_none() {
            correlator.posted(verdict.key, at(s), 1);
        }
        Some(verdict)
    }

    #[test]
    fn the_same_event_is_counted_and_similar_ones_are_merged() {
        let mut correlator = Correlator::default();
        assert_eq!(say(&mut correlator, "a", 0).and_then(|v| v.counted), None);
        assert_eq!(
            say(&mut correlator, "a", 1).and_then(|v| v.counted),
            Some((at(0), 2))
        );
        for n in 2..11 {
            assert_eq!(
                say(&mut correlator, &format!("m{n}"), n).map(|v| (v.message, v.counted)),
                Some((format!("m{n}"), None))
            );
        }
        let merged = say(&mut correlator, "m11", 11).expect("posted");
        assert_eq!(
            (merged.message.as_str(), merged.counted),
            ("(combined from similar events): m11", None)
        );
        assert_eq!(
            say(&mut correlator, "m12", 12).and_then(|v| v.counted),
            Some((at(11), 2))
        );
        assert_eq!(
            say(&mut correlator, "m13", 5000)
                .map(|v| v.message)
                .as_deref(),
            Some("m13"),
            "later it is a matter of its own"
        );
    }

    #[test]
    fn an_object_that_says_too_much_is_silenced_and_others_are_not() {
        let mut correlator = Correlator::default();
        let posted = (0..100)
            .filter(|_| say(&mut correlator, "x", 0).is_some())
            .count();
        assert_eq!(posted, 25);
        assert!(
            say(&mut correlator, "x", 299).is_none() && say(&mut correlator, "x", 301).is_some()
        );
        assert!(
            correlator
                .decide(
                    Said {
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

    /// As `getSpamKey`: a pod with ten containers has 25 warnings, and as many normal events.
    #[test]
    fn the_parts_of_an_object_have_one_limit_for_each_type() {
        let mut correlator = Correlator::default();
        for kind in ["Warning", "Normal"] {
            let mut posted = 0;
            for n in 0..100 {
                let (part, message) = (format!("spec.containers{{c{}}}", n % 10), n.to_string());
                let said = Said {
                    object: "pod",
                    part: &part,
                    kind,
                    reason: &message,
                    message: &message,
                };
                posted += usize::from(correlator.decide(said, at(0)).is_some());
            }
            assert_eq!(posted, 25, "{kind}");
        }
    }

    #[test]
    fn what_is_remembered_stays_bounded() {
        let mut correlator = Correlator::default();
        for n in 0..20_000 {
            let about = format!("pod{n}");
            if let Some(verdict) = correlator.decide(
                Said {
                    object: &about,
                    part: "",
                    kind: "Warning",
                    reason: "r",
                    message: "m",
                },
                at(n),
            ) {
                correlator.posted(verdict.key, at(n), 1);
            }
        }
        assert!(
            correlator.groups.len() <= REMEMBERED
                && correlator.buckets.len() <= REMEMBERED
                && correlator.known.len() <= REMEMBERED
        );
    }
}
