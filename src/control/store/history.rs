//! The retained changes, separately for each kind, so that renewals of leases do not displace changes of pods.
//!
//! The time to resume a watch should not depend on the load of the cluster, so every change is kept for
//! [`Retention::fresh`]. Older changes are kept within limits per kind. If all kinds together exceed
//! [`Retention::total`] bytes, fresh changes of the largest kind are dropped too.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Compacted, Event};

/// Maximum number of changes per kind that are no longer fresh.
pub(super) const MAX_CHANGES: usize = 2048;
/// Maximum number of bytes per kind that are no longer fresh, including the overhead per
/// change. The newest change of a kind is always kept.
pub(super) const MAX_BYTES: usize = 2 << 20;

/// Retention limits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Retention {
    /// Minimum age before a change is dropped, unless `total` is exceeded (`eventFreshDuration` in
    /// `staging/src/k8s.io/apiserver/pkg/storage/cacher/watch_cache.go`).
    pub fresh: Duration,
    /// Maximum number of bytes of all kinds.
    pub total: usize,
}

impl Default for Retention {
    fn default() -> Retention {
        Retention {
            fresh: Duration::from_secs(75),
            total: 128 << 20,
        }
    }
}

/// Approximate memory use of a change, in bytes.
fn cost(event: &Event) -> usize {
    // The event, its key and two maps that are not empty.
    const CHANGE_OVERHEAD: usize = 512;
    let attrs = &event.record.attrs;
    let labels: usize = attrs
        .labels
        .iter()
        .map(|(k, v)| k.len() + v.len() + 64)
        .sum();
    let fields: usize = attrs.fields.iter().map(|(_, v)| v.len() + 56).sum();
    CHANGE_OVERHEAD + labels + fields + event.record.value.len()
}

/// The kind in a key or prefix: `pods` in `pods/default/web-1`.
pub(super) fn kind(key: &str) -> &str {
    key.split('/').next().unwrap_or_default()
}

#[derive(Default)]
struct Kind {
    /// Oldest first, each with the time when it was added.
    events: VecDeque<(Instant, Arc<Event>)>,
    bytes: usize,
    /// Changes of this kind up to and including this revision were dropped.
    compacted: u64,
}

impl Kind {
    /// Whether the kind exceeds its limits and its oldest change is no longer fresh.
    fn is_over(&self, now: Instant, fresh: Duration) -> bool {
        let over = self.events.len() > MAX_CHANGES || self.bytes > MAX_BYTES;
        over && self.events.len() > 1
            && self
                .events
                .front()
                .is_some_and(|(added, _)| now.saturating_duration_since(*added) >= fresh)
    }

    /// Drops the oldest change. Returns its revision and size.
    fn drop_oldest(&mut self) -> Option<(u64, usize)> {
        let (_, oldest) = self.events.pop_front()?;
        let cost = cost(&oldest);
        self.bytes -= cost;
        self.compacted = oldest.revision;
        // Releases memory after a burst.
        if self.events.capacity() > MAX_CHANGES && self.events.len() < self.events.capacity() / 4 {
            self.events.shrink_to_fit();
        }
        Some((oldest.revision, cost))
    }
}

/// The retained changes of all kinds.
#[derive(Default)]
pub(super) struct History {
    retention: Retention,
    /// Total size of all kinds.
    bytes: usize,
    /// Changes of all kinds up to and including this revision are not available.
    since: u64,
    kinds: BTreeMap<String, Kind>,
}

impl History {
    /// An empty history that begins after `since`. `compacted` names the kinds that begin later.
    pub fn new(since: u64, compacted: &BTreeMap<String, u64>, retention: Retention) -> History {
        let kinds = compacted.iter().map(|(name, &compacted)| {
            let kind = Kind {
                compacted,
                ..Kind::default()
            };
            (name.clone(), kind)
        });
        History {
            retention,
            bytes: 0,
            since,
            kinds: kinds.collect(),
        }
    }

    /// Adds a change, which must be newer than all others. Returns kind and revision of the dropped changes.
    pub fn push(&mut self, event: Arc<Event>, now: Instant) -> Vec<(String, u64)> {
        let cost = cost(&event);
        let kind = self.kinds.entry(kind(&event.key).to_owned()).or_default();
        kind.bytes += cost;
        self.bytes += cost;
        kind.events.push_back((now, event));
        self.make_room(now)
    }

    /// Drops changes beyond the limits, also of kinds that are not written any more.
    fn make_room(&mut self, now: Instant) -> Vec<(String, u64)> {
        let mut dropped = vec![];
        for (name, kind) in &mut self.kinds {
            while kind.is_over(now, self.retention.fresh)
                && let Some((revision, cost)) = kind.drop_oldest()
            {
                self.bytes -= cost;
                dropped.push((name.clone(), revision));
            }
        }
        while self.bytes > self.retention.total {
            let several = self.kinds.iter_mut().filter(|(_, k)| k.events.len() > 1);
            let Some((name, kind)) = several.max_by_key(|(_, kind)| kind.bytes) else {
                break;
            };
            if let Some((revision, cost)) = kind.drop_oldest() {
                self.bytes -= cost;
                dropped.push((name.clone(), revision));
            }
        }
        dropped
    }

    /// The revision after which all changes below `prefix`, which names a kind, are available.
    pub fn oldest(&self, prefix: &str) -> u64 {
        let kind = self.kinds.get(kind(prefix));
        kind.map_or(self.since, |k| k.compacted.max(self.since))
    }

    /// The first `most` changes below `prefix`, which names a kind, that are newer than `after`; oldest first.
    pub fn after(
        &self,
        after: u64,
        prefix: &str,
        most: usize,
    ) -> Result<Vec<Arc<Event>>, Compacted> {
        let oldest = self.oldest(prefix);
        if after < oldest {
            return Err(Compacted {
                requested: after,
                oldest,
            });
        }
        let Some(kind) = self.kinds.get(kind(prefix)) else {
            return Ok(vec![]);
        };
        let from = kind
            .events
            .partition_point(|(_, event)| event.revision <= after);
        Ok(kind
            .events
            .range(from..)
            .map(|(_, event)| event)
            .filter(|event| event.key.starts_with(prefix))
            .take(most)
            .cloned()
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Attrs, Change, Record};
    use super::*;

    fn event(key: &str, revision: u64, bytes: usize) -> Arc<Event> {
        Arc::new(Event {
            revision,
            key: key.into(),
            change: Change::Put,
            record: Record {
                value: vec![b'x'; bytes].into(),
                attrs: Arc::new(Attrs::default()),
                revision,
            },
            previous: None,
        })
    }

    fn kept(history: &History, prefix: &str) -> usize {
        let all = history.after(history.oldest(prefix), prefix, usize::MAX);
        all.expect("changes since the oldest revision").len()
    }

    /// 80 MiB of changes in ten seconds are kept for 75 seconds, and reduced to 2 MiB when another kind changes later.
    #[test]
    fn changes_of_any_size_are_kept_for_the_minimum_time() {
        let mut history = History::default();
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        for i in 0..80 {
            let dropped = history.push(event("pods/n/p", i + 1, 1 << 20), at(i * 125));
            assert_eq!(dropped, []);
        }
        assert_eq!(history.push(event("leases/n/l", 100, 10), at(74_999)), []);
        assert_eq!(kept(&history, "pods/"), 80);
        let dropped = history.push(event("leases/n/l", 101, 10), at(80_000));
        assert!((38..=42).contains(&dropped.len()), "{}", dropped.len());
        history.push(event("leases/n/l", 102, 10), at(90_000));
        assert!(kept(&history, "pods/") <= 2, "{}", kept(&history, "pods/"));
        assert!(history.bytes <= MAX_BYTES + 3000, "{}", history.bytes);
        assert!(history.after(1, "pods/", 1).is_err());
    }

    /// Many small changes are also kept while they are fresh. Later, an idle kind is reduced to [`MAX_CHANGES`].
    #[test]
    fn the_number_of_recent_changes_is_not_limited() {
        let mut history = History::default();
        let start = Instant::now();
        let many = MAX_CHANGES as u64 + 500;
        for i in 0..many {
            history.push(event("leases/n/l", i + 1, 1), start);
        }
        assert_eq!(kept(&history, "leases/"), MAX_CHANGES + 500);
        history.push(
            event("pods/n/p", many + 1, 1),
            start + Duration::from_secs(75),
        );
        assert_eq!(kept(&history, "leases/"), MAX_CHANGES);
    }

    /// If the total is exceeded, the largest kind drops changes, fresh or not, except its newest.
    #[test]
    fn the_total_size_is_limited_and_the_largest_kind_drops_changes() {
        let mut history = History::default();
        let now = Instant::now();
        history.push(event("leases/n/l", 1, 10), now);
        let mut dropped = vec![];
        for i in 0..200 {
            dropped.append(&mut history.push(event("pods/n/p", i + 2, 1 << 20), now));
        }
        let total = Retention::default().total;
        assert!(history.bytes <= total && history.bytes > total / 2);
        assert!(dropped.iter().all(|(kind, _)| kind == "pods") && dropped.len() > 70);
        assert_eq!(kept(&history, "leases/"), 1);
        history.push(event("maps/n/m", 300, 2 * total), now);
        assert_eq!(
            kept(&history, "maps/"),
            1,
            "the newest change is kept whatever its size"
        );
    }
}
