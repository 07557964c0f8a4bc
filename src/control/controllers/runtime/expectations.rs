//! Writes of a controller that its caches do not show yet. A decision from older objects would repeat them.
//!
//! The apiserver numbers all changes, and a watch delivers the changes of a kind in this order. A cache therefore shows a
//! write as soon as it has received the write's revision or a later one, even if the object was deleted since (KEP-5647).

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use kube::Resource;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use holdfast_core::lock::lock;
use holdfast_kubeapi::cache::{Cache, Key, revision};

/// How long a controller waits to see its own write (upstream's `ExpectationsTimeout`). The cache may have missed it only if
/// its watch was restarted and the object was deleted meanwhile.
const TIMEOUT: Duration = Duration::from_secs(300);

/// The last write of each owner to objects of one kind.
pub(in crate::controllers) struct Expectations {
    writes: Mutex<HashMap<Key, Write>>,
    /// The revision up to which the cache of the kind shows all changes.
    visible: Box<dyn Fn() -> u64 + Send + Sync>,
}

#[derive(Debug)]
struct Write {
    revision: u64,
    until: Instant,
}

/// The maximum time to wait for the writes of an owner to several kinds; `None` if the caches show all of them. Call before
/// the caches are read.
pub(in crate::controllers) fn unseen<const N: usize>(
    kinds: [&Expectations; N],
    owner: &Key,
) -> Option<Duration> {
    kinds.iter().filter_map(|kind| kind.pending(owner)).max()
}

impl Expectations {
    /// Of writes that this cache shows.
    pub(in crate::controllers) fn of<K>(cache: &Cache<K>) -> Expectations
    where
        K: Resource + DeserializeOwned + Send + Sync + 'static,
        K::DynamicType: Default,
    {
        let cache = cache.clone();
        Expectations::new(move || cache.latest_revision())
    }

    fn new(visible: impl Fn() -> u64 + Send + Sync + 'static) -> Expectations {
        Expectations {
            writes: Mutex::default(),
            visible: Box::new(visible),
        }
    }

    /// Records that `object` was written, or marked for deletion, for the owner with this key.
    pub(in crate::controllers) fn record<K: Resource>(&self, owner: &Key, object: &K) {
        let write = Write {
            revision: revision(object),
            until: Instant::now() + TIMEOUT,
        };
        let mut all = lock(&self.writes);
        match all.get_mut(owner) {
            Some(last) if last.revision > write.revision => last.until = write.until,
            Some(last) => *last = write,
            None => drop(all.insert(owner.clone(), write)),
        }
    }

    fn pending(&self, owner: &Key) -> Option<Duration> {
        let (mut all, now) = (lock(&self.writes), Instant::now());
        let write = all.get(owner)?;
        let left = write.until.saturating_duration_since(now);
        if write.revision <= (self.visible)() || left.is_zero() {
            all.remove(owner);
            return None;
        }
        Some(left)
    }

    /// Removes the writes of a deleted owner.
    pub(in crate::controllers) fn forget(&self, owner: &Key) {
        lock(&self.writes).remove(owner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use k8s_openapi::api::core::v1::Pod;

    fn pod(revision: u64) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.resource_version = Some(revision.to_string());
        pod
    }

    #[tokio::test(start_paused = true)]
    async fn an_owner_waits_until_its_last_write_is_visible() {
        let owner = |name: &str| ("n".to_owned(), name.to_owned());
        let visible = Arc::new(AtomicU64::new(0));
        let (seen, a) = (Arc::clone(&visible), owner("a"));
        let expectations = Expectations::new(move || seen.load(Ordering::Relaxed));
        let pending = |owner: &Key, revision| {
            visible.store(revision, Ordering::Relaxed);
            unseen([&expectations], owner)
        };
        assert_eq!(pending(&a, 0), None);
        expectations.record(&a, &pod(7));
        expectations.record(&a, &pod(5));
        assert_eq!(pending(&a, 6), Some(TIMEOUT));
        assert_eq!(pending(&owner("b"), 6), None);
        assert_eq!(pending(&a, 7), None);
        assert!(lock(&expectations.writes).is_empty());
        expectations.record(&a, &pod(9));
        tokio::time::advance(TIMEOUT).await;
        assert_eq!(pending(&a, 8), None, "the wait has a limit");
        expectations.record(&a, &pod(9));
        expectations.forget(&a);
        assert_eq!(pending(&a, 0), None);
    }
}
