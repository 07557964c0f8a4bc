//! The trail of each object: a bounded record of the requests that changed it. Pure.
//!
//! The bundled API keeps it, and `holdfast trace` shows it. The first requests of an object and the last ones are kept, and equal consecutive
//! requests are one entry with a count, so that a status that changes for hours does not displace the object's creation.

use std::collections::{BTreeMap, VecDeque};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The maximum number of entries of one object.
const ENTRIES: usize = 24;
/// The number of entries that are kept from the beginning.
const FIRST: usize = 8;
/// The maximum number of objects. Of the objects beyond, those whose last request is the longest ago are forgotten.
const OBJECTS: usize = 4_096;
/// The maximum length of texts from requests, in bytes.
const TEXT: usize = 256;

/// One request, or several equal ones in succession.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// When the first one was answered.
    pub first: Timestamp,
    /// When the last one was answered.
    pub last: Timestamp,
    /// How many there were.
    pub count: u64,
    /// The request, for instance `patch status`.
    pub request: String,
    /// The user.
    pub user: String,
    /// The client's name for itself (`User-Agent`).
    pub client: String,
    /// The HTTP status of the answer.
    pub code: u16,
    /// Why the API refused the last one; empty if it did not.
    pub refusal: String,
    /// The uid of the object; empty if the answer has none.
    pub uid: String,
    /// The resource version after the last one; empty if the answer has none.
    pub revision: String,
}

/// The trail of one object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trail {
    /// The requests in order.
    pub entries: VecDeque<Entry>,
    /// How many entries between the first and the last ones were dropped.
    pub dropped: u64,
}

/// Shortens a text from outside.
fn bounded(mut text: String) -> String {
    if text.len() > TEXT {
        let end = (0..=TEXT).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
        text.push('…');
    }
    text
}

impl Trail {
    fn add(&mut self, entry: Entry) {
        if let Some(last) = self.entries.back_mut() {
            let is_equal = last.request == entry.request
                && last.user == entry.user
                && last.client == entry.client
                && last.code == entry.code
                && last.uid == entry.uid;
            if is_equal {
                last.count = last.count.saturating_add(entry.count);
                last.last = entry.last;
                last.refusal = entry.refusal;
                last.revision = entry.revision;
                return;
            }
        }
        if self.entries.len() >= ENTRIES {
            self.entries.remove(FIRST);
            self.dropped = self.dropped.saturating_add(1);
        }
        self.entries.push_back(entry);
    }
}

/// The trails of all objects.
#[derive(Debug, Default)]
pub struct Trails {
    /// The trail of each object, with the number of its last request.
    objects: BTreeMap<String, (u64, Trail)>,
    /// The objects by the number of their last request.
    order: BTreeMap<u64, String>,
    next: u64,
}

impl Trails {
    /// Adds a request for the object `key`.
    pub fn add(&mut self, key: &str, entry: Entry) {
        let entry = Entry {
            user: bounded(entry.user),
            client: bounded(entry.client),
            refusal: bounded(entry.refusal),
            ..entry
        };
        let number = self.next;
        self.next = self.next.saturating_add(1);
        let (latest, trail) = self.objects.entry(key.to_owned()).or_default();
        // A new object is in no place yet.
        if !trail.entries.is_empty() {
            self.order.remove(latest);
        }
        *latest = number;
        trail.add(entry);
        self.order.insert(number, key.to_owned());
        while self.objects.len() > OBJECTS {
            let Some((_, oldest)) = self.order.pop_first() else {
                return;
            };
            self.objects.remove(&oldest);
        }
    }

    /// The trail of an object; `None` if it was forgotten, or if there was no request.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Trail> {
        self.objects.get(key).map(|(_, trail)| trail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(second: i64, request: &str) -> Entry {
        let at = Timestamp::from_second(second).expect("a time");
        Entry {
            first: at,
            last: at,
            count: 1,
            request: request.to_owned(),
            user: "u".to_owned(),
            client: "c".to_owned(),
            code: 200,
            refusal: String::new(),
            uid: "1".to_owned(),
            revision: second.to_string(),
        }
    }

    #[test]
    fn equal_requests_are_one_entry_and_the_creation_stays() {
        let mut trails = Trails::default();
        trails.add("pods/d/a", entry(0, "create"));
        for second in 1..1_000 {
            trails.add("pods/d/a", entry(second, "patch status"));
        }
        let trail = trails.get("pods/d/a").expect("a trail");
        let [created, patched] = [&trail.entries[0], &trail.entries[1]];
        assert_eq!((trail.entries.len(), trail.dropped), (2, 0));
        assert_eq!(
            (created.count, patched.count, patched.revision.as_str()),
            (1, 999, "999")
        );
        for second in 1_000..1_100 {
            trails.add(
                "pods/d/a",
                entry(
                    second,
                    if second % 2 == 0 {
                        "update"
                    } else {
                        "patch status"
                    },
                ),
            );
        }
        let trail = trails.get("pods/d/a").expect("a trail");
        assert_eq!((trail.entries.len(), trail.dropped), (ENTRIES, 78));
        assert_eq!(trail.entries[0].request, "create");
        assert_eq!(trail.entries[ENTRIES - 1].revision, "1099");
    }

    #[test]
    fn texts_from_clients_are_bounded() {
        let mut trails = Trails::default();
        let long = Entry {
            client: "ä".repeat(1_000),
            refusal: "x".repeat(10_000),
            ..entry(0, "create")
        };
        trails.add("k", long);
        let entry = &trails.get("k").expect("a trail").entries[0];
        assert!(entry.client.len() <= TEXT + 3 && entry.refusal.len() <= TEXT + 3);
    }

    proptest! {
        #[test]
        fn the_objects_with_the_latest_requests_stay(keys in prop::collection::vec(0_u16..6_000, 0..200), many in any::<bool>()) {
            let mut trails = Trails::default();
            if many {
                for number in 0..5_000 {
                    trails.add(&format!("old/{number}"), entry(0, "create"));
                }
            }
            for key in &keys {
                trails.add(&key.to_string(), entry(1, "update"));
            }
            for key in &keys {
                prop_assert!(trails.get(&key.to_string()).is_some());
            }
            prop_assert!(trails.objects.len() <= OBJECTS);
            prop_assert_eq!(trails.objects.len(), trails.order.len());
        }
    }
}
