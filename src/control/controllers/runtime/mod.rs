//! The runtime of controllers: keyed queues, workers, and expectations.
//!
//! A controller registers a function for each cache that it depends on ([`Keys::watch`]). The function maps one change, as
//! the object before and after it, to the keys of the objects to reconcile. It is pure and reads no cache, so the cost of a
//! change does not depend on the number of objects. Workers take the keys and read caches and their indexes
//! (`holdfast_kubeapi::Index`). Lookups that a change requires, such as the sets that may adopt a pod, are keys as well.
//!
//! Nothing polls: a key without a change, a timer or a retry costs nothing. The rules are those of upstream's shared
//! informers and work queues (`client-go/tools/cache`, `client-go/util/workqueue`).

mod expectations;
mod queue;

use std::hash::Hash;
use std::sync::{Arc, Mutex};

use kube::Resource;
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

pub(super) use expectations::{Expectations, unseen};
use holdfast_core::lock::lock;
use holdfast_kubeapi::Cache;
pub(super) use queue::Next;
use queue::Queue;

/// The keys of one controller, shared by caches, timers and workers.
pub(super) struct Keys<K> {
    queue: Mutex<Queue<K>>,
    /// Wakes one idle worker.
    available: Notify,
}

impl<K: Clone + Hash + Ord + Send + 'static> Keys<K> {
    pub(super) fn new() -> Arc<Keys<K>> {
        Arc::new(Keys {
            queue: Mutex::new(Queue::new()),
            available: Notify::new(),
        })
    }

    /// Queues a key.
    pub(super) fn add(&self, key: K) {
        if lock(&self.queue).add(key) {
            self.available.notify_one();
        }
    }

    /// Queues the keys that `keys_of` gives for each object in a cache, and from now on for each change: the object
    /// before and after it. `keys_of` must not read caches, because it runs while the cache is locked.
    pub(super) fn watch<O, I>(
        self: &Arc<Self>,
        cache: &Cache<O>,
        keys_of: impl Fn(Option<&O>, Option<&O>) -> I + Send + Sync + 'static,
    ) where
        O: Resource + DeserializeOwned + Send + Sync + 'static,
        O::DynamicType: Default,
        I: IntoIterator<Item = K>,
    {
        let keys = Arc::clone(self);
        cache.observe(move |before, after| {
            for key in keys_of(before.map(|o| &**o), after.map(|o| &**o)) {
                keys.add(key);
            }
        });
    }

    /// Waits for a key that no other worker has.
    async fn next(&self) -> K {
        loop {
            let timer = {
                let mut queue = lock(&self.queue);
                if let Some(key) = queue.take(Instant::now()) {
                    if queue.has_ready() {
                        self.available.notify_one();
                    }
                    return key;
                }
                queue.next_timer()
            };
            // A notification since the queue was read is kept, so the wait returns immediately.
            let available = self.available.notified();
            match timer {
                // Cancel-safe: the queue is read again in either case.
                Some(time) => {
                    let _ = tokio::time::timeout_at(time, available).await;
                }
                None => available.await,
            }
        }
    }

    /// Reconciles keys with this number of concurrent workers, until the future is dropped.
    pub(super) async fn work<F>(&self, workers: usize, reconcile: impl Fn(K) -> F)
    where
        F: Future<Output = Next>,
    {
        let worker = async || loop {
            let key = self.next().await;
            let next = reconcile(key.clone()).await;
            if lock(&self.queue).finish(key, next, Instant::now()) {
                self.available.notify_one();
            }
        };
        futures::future::join_all((0..workers).map(|_| worker())).await;
    }
}

/// A receiver that is notified of those changes of a cache for which `is_relevant` is true, given the object before and
/// after the change. For controllers that read the whole cache at each change.
pub(super) fn relevant_changes<O>(
    cache: &Cache<O>,
    is_relevant: impl Fn(Option<&O>, Option<&O>) -> bool + Send + Sync + 'static,
) -> watch::Receiver<u64>
where
    O: Resource + DeserializeOwned + Send + Sync + 'static,
    O::DynamicType: Default,
{
    let (changed, receiver) = watch::channel(0);
    cache.observe(move |before, after| {
        if is_relevant(before.map(|o| &**o), after.map(|o| &**o)) {
            changed.send_modify(|count: &mut u64| *count = count.wrapping_add(1));
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::*;

    /// Simulated work: each key takes ten seconds, `late` fails twice, and `clock` is due every minute.
    #[tokio::test(start_paused = true)]
    async fn workers_share_keys_and_follow_timers_and_retries() {
        let (keys, start) = (Keys::new(), Instant::now());
        let turns: Mutex<Vec<(&str, u64)>> = Mutex::default();
        let active: Mutex<HashMap<&str, usize>> = Mutex::default();
        let work = keys.work(2, |key: &'static str| {
            let (turns, active) = (&turns, &active);
            async move {
                let turn = {
                    let mut turns = lock(turns);
                    turns.push((key, start.elapsed().as_secs()));
                    turns.iter().filter(|(k, _)| *k == key).count()
                };
                *lock(active).entry(key).or_default() += 1;
                assert_eq!(lock(active)[key], 1, "{key} is at two workers");
                tokio::time::sleep(Duration::from_secs(10)).await;
                *lock(active).entry(key).or_default() -= 1;
                match key {
                    "late" if turn < 3 => Next::Retry,
                    "clock" => Next::After(Duration::from_secs(60)),
                    _ => Next::Done,
                }
            }
        });
        let drive = async {
            for key in ["a", "late", "a", "clock"] {
                keys.add(key);
            }
            tokio::time::sleep(Duration::from_secs(5)).await;
            keys.add("a");
            tokio::time::sleep(Duration::from_secs(115)).await;
        };
        tokio::select! {
            () = work => unreachable!("workers do not end"),
            () = drive => {}
        }
        let mut turns = lock(&turns).clone();
        turns.sort();
        let expected = [
            ("a", 0),
            ("a", 10),
            ("clock", 10),
            ("clock", 80),
            ("late", 0),
            ("late", 20),
            ("late", 30),
        ];
        assert_eq!(turns, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn changes_of_a_cache_become_keys() {
        let pod = |name: &str, node: &str| -> Pod {
            serde_json::from_value(
                json!({"metadata": {"name": name}, "spec": {"nodeName": node, "containers": []}}),
            )
            .expect("a pod")
        };
        let node = |pod: Option<&Pod>| pod?.spec.as_ref()?.node_name.clone();
        let (writer, cache) = Cache::<Pod>::without_watch();
        writer.apply(pod("a", "x"));
        let keys = Keys::new();
        keys.watch(&cache, move |before, after| {
            let (from, to) = (node(before), node(after));
            let moved = from != to;
            from.into_iter().chain(to).filter(move |_| moved)
        });
        let mut moves = relevant_changes(&cache, move |before, after| node(before) != node(after));
        assert_eq!(keys.next().await, "x", "the cache's objects are mapped too");
        moves.mark_unchanged();
        writer.apply(pod("a", "x"));
        assert!(!moves.has_changed().expect("a sender"));
        writer.apply(pod("b", "y"));
        assert!(moves.has_changed().expect("a sender"));
        assert_eq!(keys.next().await, "y");
        writer.delete(pod("b", "y"));
        lock(&keys.queue).finish("y".to_owned(), Next::Done, Instant::now());
        assert_eq!(keys.next().await, "y", "a change during work");
    }
}
