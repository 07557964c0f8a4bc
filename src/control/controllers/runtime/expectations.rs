//! Writes of a controller that its caches do not show yet. A decision from older objects would repeat them.
//!
//! The apiserver numbers all changes, and a watch delivers the changes of a kind in this order. A cache therefore shows a
//! write as soon as it has received the write's revision or a later one, even if the object was deleted since (KEP-5647).

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use kube::Resource;
use tokio::time::Instant;

use holdfast_core::lock::lock;
use holdfast_kubeapi::cache::{Key, revision};

/// How long a controller waits to see its own write (upstream's `ExpectationsTimeout`). The cache may have missed it only if
/// its watch was restarted and the object was deleted meanwhile.
const TIMEOUT: Duration = Duration::from_secs(300);

/// The last write of each owner to objects of one kind.
#[derive(Debug, Default)]
pub(in crate::controllers) struct Expectations(Mutex<HashMap<Key, Write>>);

#[derive(Debug)]
struct Write {
    revision: u64,
    until: Instant,
}

impl Expectations {
    /// Records that `object` was written, or marked for deletion, for the owner with this key.
    pub(in crate::controllers) fn record<K: Resource>(&self, owner: &Key, object: &K) {
        let write = Write {
            revision: revision(object),
            until: Instant::now() + TIMEOUT,
        };
        let mut all = lock(&self.0);
        match all.get_mut(owner) {
            Some(last) if last.revision > write.revision => last.until = write.until,
            Some(last) => *last = write,
            None => drop(all.insert(owner.clone(), write)),
        }
    }

    /// The maximum time to wait for the writes of an owner; `None` if a cache that has received the changes up to
    /// `visible` shows all of them. Call before the cache is read.
    pub(in crate::controllers) fn pending(&self, owner: &Key, visible: u64) -> Option<Duration> {
        let (mut all, now) = (lock(&self.0), Instant::now());
        let write = all.get(owner)?;
        let left = write.until.saturating_duration_since(now);
        if write.revision <= visible || left.is_zero() {
            all.remove(owner);
            return None;
        }
        Some(left)
    }

    /// Removes the writes of a deleted owner.
    pub(in crate::controllers) fn forget(&self, owner: &Key) {
        lock(&self.0).remove(owner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::Pod;

    fn pod(revision: u64) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.resource_version = Some(revision.to_string());
        pod
    }

    #[tokio::test(start_paused = true)]
    async fn an_owner_waits_until_its_last_write_is_visible() {
        let owner = |name: &str| ("n".to_owned(), name.to_owned());
        let (expectations, a) = (Expectations::default(), owner("a"));
        assert_eq!(expectations.pending(&a, 0), None);
        expectations.record(&a, &pod(7));
        expectations.record(&a, &pod(5));
        assert_eq!(expectations.pending(&a, 6), Some(TIMEOUT));
        assert_eq!(expectations.pending(&owner("b"), 6), None);
        assert_eq!(expectations.pending(&a, 7), None);
        assert!(lock(&expectations.0).is_empty());
        expectations.record(&a, &pod(9));
        tokio::time::advance(TIMEOUT).await;
        assert_eq!(expectations.pending(&a, 8), None, "the wait has a limit");
        expectations.record(&a, &pod(9));
        expectations.forget(&a);
        assert_eq!(expectations.pending(&a, 0), None);
    }
}
