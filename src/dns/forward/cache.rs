//! The forwarder's cache: replies by question, bounded by number and bytes. Expired replies stay until they are evicted, and are
//! served while the upstreams fail (RFC 8767). Positive and negative replies have separate bounds, so that a flood of random
//! names evicts no reply that clients use.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::reply::Reply;

/// How long an expired reply may be served (RFC 8767 section 5 suggests 1 to 3 days).
const MAX_STALE: Duration = Duration::from_secs(24 * 3600);
/// TTL of an expired reply, in seconds (RFC 8767 section 4).
pub(crate) const STALE_TTL: u32 = 30;
/// After a failed refresh, an expired reply is served at once for this time. RFC 8767 section 5 suggests 30 s for authoritative
/// servers; the upstreams here are few and near.
const RETRY: Duration = Duration::from_secs(5);
/// Bytes of an entry besides its key and reply: the map's slot, the queue's slot, two reference counts.
const OVERHEAD: usize = 160;

/// Bounds of one kind of replies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) entries: usize,
    pub(crate) bytes: usize,
}

/// The result of a lookup.
#[derive(Debug, PartialEq)]
pub(crate) enum Hit {
    /// The reply, and its remaining seconds.
    Fresh(Arc<Reply>, u32),
    /// The reply has expired. With `refresh`, the upstreams should be queried first.
    Stale {
        reply: Arc<Reply>,
        refresh: bool,
    },
    Miss,
}

struct Entry {
    reply: Arc<Reply>,
    expires: Instant,
    /// No refresh before this time.
    retry: Instant,
    /// Whether a lookup found the entry since its last turn in the queue.
    used: bool,
}

struct Segment {
    bounds: Bounds,
    entries: HashMap<Arc<[u8]>, Entry>,
    /// The order of eviction. An entry that was used goes to the back once more.
    queue: VecDeque<Arc<[u8]>>,
    bytes: usize,
}

/// The cache. `now` must not decrease between calls.
pub(crate) struct Cache {
    positive: Segment,
    negative: Segment,
}

impl Cache {
    pub(crate) fn new(positive: Bounds, negative: Bounds) -> Cache {
        Cache {
            positive: Segment::new(positive),
            negative: Segment::new(negative),
        }
    }

    pub(crate) fn get(&mut self, key: &[u8], now: Instant) -> Hit {
        let segments = [&mut self.positive, &mut self.negative];
        let mut entries = segments.into_iter().filter_map(|s| s.entries.get_mut(key));
        let Some(entry) = entries.next() else {
            return Hit::Miss;
        };
        let left = entry.expires.saturating_duration_since(now);
        if !left.is_zero() {
            entry.used = true;
            // Rounded up, so that no client gets a TTL of 0.
            let seconds = left.as_secs() + u64::from(left.subsec_nanos() > 0);
            return Hit::Fresh(
                entry.reply.clone(),
                u32::try_from(seconds).unwrap_or(u32::MAX),
            );
        }
        if now.saturating_duration_since(entry.expires) > MAX_STALE {
            return Hit::Miss;
        }
        entry.used = true;
        Hit::Stale {
            reply: entry.reply.clone(),
            refresh: now >= entry.retry,
        }
    }

    /// Keeps a reply for its lifetime, in place of an older one.
    pub(crate) fn insert(&mut self, key: &[u8], reply: Arc<Reply>, now: Instant) {
        let Some(lifetime) = reply.lifetime else {
            return;
        };
        let (own, other) = if reply.is_positive() {
            (&mut self.positive, &mut self.negative)
        } else {
            (&mut self.negative, &mut self.positive)
        };
        other.remove(key);
        let expires = now + Duration::from_secs(u64::from(lifetime));
        own.insert(key, reply, expires);
    }

    /// Notes that a refresh failed. Returns whether there is a reply to serve.
    pub(crate) fn defer(&mut self, key: &[u8], now: Instant) -> bool {
        let segments = [&mut self.positive, &mut self.negative];
        let entry = segments.into_iter().find_map(|s| s.entries.get_mut(key));
        let Some(entry) = entry else { return false };
        entry.retry = now + RETRY;
        entry.reply.is_final()
    }
}

impl Segment {
    fn new(bounds: Bounds) -> Segment {
        Segment {
            bounds,
            entries: HashMap::new(),
            queue: VecDeque::new(),
            bytes: 0,
        }
    }

    fn insert(&mut self, key: &[u8], reply: Arc<Reply>, expires: Instant) {
        let size = size(key, &reply);
        if size > self.bounds.bytes / 8 {
            self.remove(key);
            return;
        }
        self.bytes += size;
        match self.entries.get_mut(key) {
            Some(entry) => {
                self.bytes -= Self::size_of_entry(key, entry);
                (entry.reply, entry.expires, entry.retry) = (reply, expires, expires);
            }
            None => {
                let key: Arc<[u8]> = key.into();
                self.queue.push_back(key.clone());
                let entry = Entry {
                    reply,
                    expires,
                    retry: expires,
                    used: false,
                };
                self.entries.insert(key, entry);
            }
        }
        self.evict();
    }

    fn size_of_entry(key: &[u8], entry: &Entry) -> usize {
        size(key, &entry.reply)
    }

    fn evict(&mut self) {
        while self.entries.len() > self.bounds.entries || self.bytes > self.bounds.bytes {
            let Some(key) = self.queue.pop_front() else {
                return;
            };
            let Some(entry) = self.entries.get_mut(&key) else {
                continue;
            };
            if std::mem::take(&mut entry.used) {
                self.queue.push_back(key);
                continue;
            }
            self.bytes -= size(&key, &entry.reply);
            self.entries.remove(&key);
        }
    }

    fn remove(&mut self, key: &[u8]) {
        if let Some(entry) = self.entries.remove(key) {
            self.bytes -= size(key, &entry.reply);
            self.queue.retain(|queued| **queued != *key);
        }
    }
}

fn size(key: &[u8], reply: &Reply) -> usize {
    OVERHEAD + key.len() + reply.bytes().len()
}

#[cfg(test)]
mod tests {
    use super::super::reply::tests::{negative, positive};
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const SMALL: Bounds = Bounds {
        entries: 4,
        bytes: 1 << 20,
    };

    fn after(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn replies_expire_and_are_served_while_refreshes_fail() {
        let start = Instant::now();
        let mut cache = Cache::new(SMALL, SMALL);
        let reply = Arc::new(positive("a.example", 12));
        assert_eq!(cache.get(b"k", start), Hit::Miss);
        assert!(!cache.defer(b"k", start));
        cache.insert(b"k", reply.clone(), start);
        assert_eq!(cache.get(b"k", start), Hit::Fresh(reply.clone(), 12));
        let almost = start + Duration::from_millis(11_900);
        assert_eq!(cache.get(b"k", almost), Hit::Fresh(reply.clone(), 1));
        let stale = |refresh| Hit::Stale {
            reply: reply.clone(),
            refresh,
        };
        assert_eq!(cache.get(b"k", after(start, 12)), stale(true));
        assert!(cache.defer(b"k", after(start, 13)));
        assert_eq!(cache.get(b"k", after(start, 17)), stale(false));
        assert_eq!(cache.get(b"k", after(start, 18)), stale(true));
        assert_eq!(cache.get(b"k", after(start, 12 + 24 * 3600)), stale(true));
        assert_eq!(cache.get(b"k", after(start, 13 + 24 * 3600)), Hit::Miss);
    }

    #[test]
    fn a_flood_of_names_that_do_not_exist_evicts_no_other_reply() {
        let start = Instant::now();
        let mut cache = Cache::new(SMALL, SMALL);
        cache.insert(b"good", Arc::new(positive("a.example", 30)), start);
        for n in 0..100_u8 {
            cache.insert(&[n], Arc::new(negative("x.example", 30)), start);
        }
        assert!(matches!(cache.get(b"good", start), Hit::Fresh(..)));
        assert_eq!(cache.negative.entries.len(), 4);
        assert_eq!(cache.get(&[0], start), Hit::Miss);
        assert!(matches!(cache.get(&[99], start), Hit::Fresh(..)));
    }

    #[test]
    fn used_replies_outlive_unused_ones() {
        let start = Instant::now();
        let mut cache = Cache::new(SMALL, SMALL);
        for n in 0..50_u8 {
            cache.insert(&[n], Arc::new(positive("a.example", 30)), start);
            assert!(matches!(cache.get(&[0], start), Hit::Fresh(..)), "{n}");
        }
    }

    #[test]
    fn a_name_moves_between_positive_and_negative() {
        let start = Instant::now();
        let mut cache = Cache::new(SMALL, SMALL);
        for _ in 0..3 {
            cache.insert(b"k", Arc::new(positive("a.example", 30)), start);
            cache.insert(b"k", Arc::new(negative("a.example", 30)), start);
        }
        assert_eq!((cache.positive.entries.len(), cache.positive.bytes), (0, 0));
        assert_eq!(
            (cache.positive.queue.len(), cache.negative.queue.len()),
            (0, 1)
        );
    }

    proptest! {
        #[test]
        fn bounds_hold_after_each_insertion(steps in vec((0_u8..20, any::<bool>(), any::<bool>()), 0..200)) {
            let start = Instant::now();
            let bounds = Bounds { entries: 5, bytes: 2000 };
            let mut cache = Cache::new(bounds, bounds);
            for (n, is_positive, read) in steps {
                let name = "a.".repeat(usize::from(n) + 1);
                let reply = if is_positive { positive(&name, 30) } else { negative(&name, 30) };
                cache.insert(&[n], Arc::new(reply), start);
                if read { cache.get(&[n / 2], start); }
                for segment in [&cache.positive, &cache.negative] {
                    prop_assert!(segment.entries.len() <= 5 && segment.bytes <= 2000);
                    prop_assert_eq!(segment.queue.len(), segment.entries.len());
                    let bytes: usize = segment.entries.iter().map(|(k, e)| size(k, &e.reply)).sum();
                    prop_assert_eq!(bytes, segment.bytes);
                }
            }
        }
    }
}
