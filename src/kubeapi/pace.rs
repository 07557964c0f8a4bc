//! Limits the rate of requests to an apiserver (`kubeAPIQPS`, `kubeAPIBurst`).

use std::collections::HashMap;
use std::hash::{Hash as _, Hasher as _};
use std::sync::Mutex;

use jiff::{SignedDuration, Timestamp};
use tokio::sync::oneshot;
use tokio::time::Instant;

use holdfast_core::bucket::Bucket;
use holdfast_core::digest::Fnv64;
use holdfast_core::lock::lock;

/// After this many seconds, a request counts half for the usage of its object.
const HALF_LIFE: f64 = 60.0;
/// A smaller usage is forgotten.
const NEGLIGIBLE: f64 = 0.1;
/// Maximum number of objects with a usage.
const MAX_OBJECTS: usize = 4096;

/// A request that waits for a token.
struct Waiting {
    ticket: u64,
    object: u64,
    granted: oneshot::Sender<()>,
}

/// The number of requests for an object; older requests count less.
#[derive(Clone, Copy)]
struct Usage {
    requests: f64,
    at: Instant,
}

impl Usage {
    fn now(&self) -> f64 {
        let age = self.at.elapsed().as_secs_f64();
        self.requests * (-age / HALF_LIFE).exp2()
    }
}

struct Queue {
    bucket: Bucket,
    /// In order of arrival.
    waiting: Vec<Waiting>,
    usage: HashMap<u64, Usage>,
    tickets: u64,
    /// Whether the last token went to the request that had waited longest.
    was_oldest: bool,
}

impl Queue {
    /// Counts a request for an object.
    fn count(&mut self, object: u64) {
        if self.usage.len() >= MAX_OBJECTS {
            self.usage.retain(|_, usage| usage.now() > NEGLIGIBLE);
            if self.usage.len() >= MAX_OBJECTS {
                self.usage.clear();
            }
        }
        let before = self.usage.get(&object).map_or(0.0, Usage::now);
        let usage = Usage {
            requests: before + 1.0,
            at: Instant::now(),
        };
        self.usage.insert(object, usage);
    }

    /// Grants a token to a waiting request: alternately to the one that has waited longest, and to the one whose object
    /// was used least. So every request is sent eventually, and a request of a healthy pod does not wait for all
    /// retries of other pods.
    fn grant(&mut self) {
        while !self.waiting.is_empty() {
            let oldest = !self.was_oldest;
            let used = |waiting: &Waiting| self.usage.get(&waiting.object).map_or(0.0, Usage::now);
            let least = || {
                let all = self.waiting.iter().map(used).enumerate();
                all.min_by(|(_, a), (_, b)| a.total_cmp(b))
                    .map_or(0, |(at, _)| at)
            };
            let at = if oldest { 0 } else { least() };
            self.was_oldest = oldest;
            let next = self.waiting.remove(at);
            // A caller that has given up consumes no token.
            if next.granted.send(()).is_ok() {
                self.count(next.object);
                return;
            }
        }
    }
}

/// A limit on the requests per second, with a burst.
pub struct Pace {
    queue: Mutex<Queue>,
    /// Locked by the request that waits for the next token; other requests wait for their grant.
    leader: tokio::sync::Mutex<()>,
    is_limited: bool,
    /// Origin of the bucket's times. Monotonic, because a machine's clock may be set.
    begun: Instant,
}

/// Removes a request from the queue when its caller drops it.
struct QueueEntry<'a> {
    pace: &'a Pace,
    ticket: u64,
}

impl Drop for QueueEntry<'_> {
    fn drop(&mut self) {
        let mut queue = lock(&self.pace.queue);
        queue.waiting.retain(|w| w.ticket != self.ticket);
    }
}

impl Pace {
    /// Allows `rate` requests a second (0: any number) and `burst` at once.
    #[must_use]
    pub fn new((rate, burst): (f64, f64)) -> Pace {
        Pace {
            queue: Mutex::new(Queue {
                bucket: Bucket::new(rate, burst, Timestamp::UNIX_EPOCH),
                waiting: vec![],
                usage: HashMap::new(),
                tickets: 0,
                was_oldest: false,
            }),
            leader: tokio::sync::Mutex::default(),
            is_limited: rate > 0.0,
            begun: Instant::now(),
        }
    }

    fn now(&self) -> Timestamp {
        let passed = SignedDuration::try_from(self.begun.elapsed()).unwrap_or(SignedDuration::MAX);
        Timestamp::UNIX_EPOCH
            .saturating_add(passed)
            .unwrap_or(Timestamp::MAX)
    }

    /// Waits until a request for the object at this path may be sent. Dropping the future consumes no token.
    pub async fn wait(&self, path: &str) {
        if !self.is_limited {
            return;
        }
        let object = object_of(path);
        let (entry, mut granted) = {
            let mut queue = lock(&self.queue);
            if queue.waiting.is_empty() && queue.bucket.take(self.now()).is_ok() {
                queue.count(object);
                return;
            }
            let (sender, granted) = oneshot::channel();
            queue.tickets += 1;
            let ticket = queue.tickets;
            queue.waiting.push(Waiting {
                ticket,
                object,
                granted: sender,
            });
            (QueueEntry { pace: self, ticket }, granted)
        };
        let lead = async {
            let _leader = self.leader.lock().await;
            // Until this request has been granted a token.
            loop {
                let taken = {
                    let mut queue = lock(&self.queue);
                    if !queue.waiting.iter().any(|w| w.ticket == entry.ticket) {
                        return;
                    }
                    let taken = queue.bucket.take(self.now());
                    if taken.is_ok() {
                        queue.grant();
                    }
                    taken
                };
                if let Err(left) = taken {
                    tokio::time::sleep(left).await;
                }
            }
        };
        tokio::select! {
            // The leader granted this request a token, or this request was the leader.
            _ = &mut granted => {}
            () = lead => {}
        }
    }
}

/// Hashes the object of a request's path, without its subresource.
fn object_of(path: &str) -> u64 {
    let parts = path.split('/').skip_while(|part| *part != "namespaces");
    let mut hasher = Fnv64::default();
    let mut parts = parts.take(4).peekable();
    if parts.peek().is_none() {
        path.hash(&mut hasher);
    }
    parts.for_each(|part| part.hash(&mut hasher));
    hasher.finish()
}

impl Default for Pace {
    /// No limit.
    fn default() -> Pace {
        Pace::new((0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_sent_immediately_and_the_rest_in_order_at_the_rate() {
        let (pace, begun) = (Arc::new(Pace::new((10.0, 5.0))), Instant::now());
        let wait = |number: u64| {
            let pace = Arc::clone(&pace);
            tokio::spawn(async move {
                pace.wait("/api/v1/nodes").await;
                (number, begun.elapsed().as_millis() / 100)
            })
        };
        let waiting: Vec<_> = (0..15).map(wait).collect();
        for (number, task) in (0..15).zip(waiting) {
            let (came, at) = task.await.expect("it ends");
            let due = u128::from(number.max(4_u64) - 4);
            assert!(
                came == number && at.abs_diff(due) <= 1,
                "{number}: {at}, not {due}"
            );
        }
        let free = Pace::default();
        for _ in 0..1000 {
            free.wait("/api/v1/nodes").await;
        }
        assert_eq!(begun.elapsed().as_millis() / 100, 10);
    }

    fn status_of(pod: &str) -> String {
        format!("/api/v1/namespaces/n/pods/{pod}/status")
    }

    /// 500 pods retry continuously and use up the rate.
    #[tokio::test(start_paused = true)]
    async fn a_pods_first_request_precedes_the_retries_of_others() {
        let pace = Arc::new(Pace::new((50.0, 100.0)));
        let retry = |number: u64| {
            let pace = Arc::clone(&pace);
            tokio::spawn(async move {
                loop {
                    pace.wait(&status_of(&format!("broken-{number}"))).await;
                }
            })
        };
        let retries: Vec<_> = (0..500).map(retry).collect();
        tokio::time::sleep(std::time::Duration::from_secs(60)).await;
        for number in 0..10 {
            let begun = Instant::now();
            pace.wait(&status_of(&format!("healthy-{number}"))).await;
            assert!(begun.elapsed().as_millis() <= 60, "{:?}", begun.elapsed());
        }
        // Each retry is sent eventually: for each request before it, at most one other request overtakes it.
        let begun = Instant::now();
        pace.wait(&status_of("broken-7")).await;
        assert!(begun.elapsed().as_secs() <= 21, "{:?}", begun.elapsed());
        // Callers that give up consume nothing.
        retries.iter().for_each(tokio::task::JoinHandle::abort);
        tokio::task::yield_now().await;
        pace.wait(&status_of("broken-7")).await;
        assert!(lock(&pace.queue).waiting.is_empty());
        tokio::time::sleep(std::time::Duration::from_secs(10)).await;
        let begun = Instant::now();
        for _ in 0..100 {
            pace.wait(&status_of("broken-7")).await;
        }
        assert!(begun.elapsed().is_zero(), "the burst is available again");
    }

    #[test]
    fn requests_for_one_object_share_a_limit() {
        let pod = object_of("/api/v1/namespaces/n/pods/p");
        for (path, expected) in [
            ("/api/v1/namespaces/n/pods/p/status", true),
            ("/api/v1/namespaces/n/pods/q", false),
            ("/api/v1/namespaces/m/pods/p", false),
            ("/api/v1/namespaces/n/secrets/p", false),
            ("/api/v1/nodes/n", false),
            ("", false),
        ] {
            assert_eq!(object_of(path) == pod, expected, "{path}");
        }
    }
}
