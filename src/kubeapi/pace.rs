//! At what pace requests are sent to an apiserver (`kubeAPIQPS`, `kubeAPIBurst`).

use jiff::{SignedDuration, Timestamp};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::core::bucket::Bucket;

/// So many requests a second, and so many at once. Whoever has to wait is served in the order of coming.
pub struct Pace {
    bucket: Mutex<Bucket>,
    /// What the bucket's times are counted from: a machine's clock may be set.
    begun: Instant,
}

impl Pace {
    /// `rate` requests a second (0: any number), at most `burst` at once.
    #[must_use]
    pub fn new((rate, burst): (f64, f64)) -> Pace {
        Pace {
            bucket: Mutex::new(Bucket::new(rate, burst, Timestamp::UNIX_EPOCH)),
            begun: Instant::now(),
        }
    }

    fn now(&self) -> Timestamp {
        let passed = SignedDuration::try_from(self.begun.elapsed()).unwrap_or(SignedDuration::MAX);
        Timestamp::UNIX_EPOCH
            .saturating_add(passed)
            .unwrap_or(Timestamp::MAX)
    }

    /// Waits until one more request may be sent. Dropping it takes nothing.
    pub async fn wait(&self) {
        // Held while it is waited: the others wait behind.
        let mut bucket = self.bucket.lock().await;
        while let Err(left) = bucket.take(self.now()) {
            tokio::time::sleep(left).await;
        }
    }
}

impl Default for Pace {
    /// Any number.
    fn default() -> Pace {
        Pace::new((0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_goes_at_once_and_the_rest_at_the_rate_in_order() {
        let (pace, begun) = (Arc::new(Pace::new((10.0, 5.0))), Instant::now());
        let wait = |number: u64| {
            let pace = Arc::clone(&pace);
            tokio::spawn(async move {
                pace.wait().await;
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
            free.wait().await;
        }
        assert_eq!(begun.elapsed().as_millis() / 100, 10);
    }
}
