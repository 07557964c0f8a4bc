//! The changes that can be read back, kept for each kind of its own: renewals of leases do not push out changes of pods.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::{Compacted, Event};

/// The most changes that are kept of one kind.
pub(super) const CHANGES: usize = 8192;
/// The most bytes that are kept of one kind, with what a change costs besides its value; the newest change is kept whatever
/// its size.
const BYTES: usize = 8 << 20;

/// About how many bytes a change takes in memory.
fn cost(event: &Event) -> usize {
    // The event itself, its key and two maps that are not empty.
    const BASE: usize = 512;
    let attrs = &event.record.attrs;
    let labels: usize = attrs
        .labels
        .iter()
        .map(|(k, v)| k.len() + v.len() + 64)
        .sum();
    let fields: usize = attrs.fields.iter().map(|(_, v)| v.len() + 56).sum();
    BASE + labels + fields + event.record.value.len()
}

/// The kind of a key or of a prefix of keys: `pods` of `pods/default/web-1`.
pub(super) fn kind(key: &str) -> &str {
    key.split('/').next().unwrap_or_default()
}

#[derive(Default)]
struct Kind {
    events: VecDeque<Arc<Event>>,
    bytes: usize,
    /// Changes of this kind up to and including this revision cannot be read back.
    compacted: u64,
}

/// The newest changes of all kinds.
#[derive(Default)]
pub(super) struct History {
    /// Changes up to and including this revision cannot be read back, whatever their kind.
    since: u64,
    kinds: BTreeMap<String, Kind>,
}

impl History {
    /// A history without changes, of what happens after `since`. `compacted` says of which kinds it begins later.
    pub fn new(since: u64, compacted: &BTreeMap<String, u64>) -> History {
        let kinds = compacted.iter().map(|(name, &compacted)| {
            let kind = Kind {
                compacted,
                ..Kind::default()
            };
            (name.clone(), kind)
        });
        History {
            since,
            kinds: kinds.collect(),
        }
    }

    /// Adds a change that is newer than all others. Returns kind and revision of those that had to make room.
    pub fn push(&mut self, event: Arc<Event>) -> Vec<(String, u64)> {
        let name = kind(&event.key).to_owned();
        let kind = self.kinds.entry(name.clone()).or_default();
        kind.bytes += cost(&event);
        kind.events.push_back(event);
        let mut dropped = vec![];
        while (kind.events.len() > CHANGES || kind.bytes > BYTES)
            && kind.events.len() > 1
            && let Some(oldest) = kind.events.pop_front()
        {
            kind.bytes -= cost(&oldest);
            kind.compacted = oldest.revision;
            dropped.push((name.clone(), oldest.revision));
        }
        dropped
    }

    /// The revision from which on the changes below `prefix`, which names a kind, can be read back.
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
                asked: after,
                oldest,
            });
        }
        let Some(kind) = self.kinds.get(kind(prefix)) else {
            return Ok(vec![]);
        };
        let from = kind.events.partition_point(|event| event.revision <= after);
        Ok(kind
            .events
            .range(from..)
            .filter(|event| event.key.starts_with(prefix))
            .take(most)
            .cloned()
            .collect())
    }
}
