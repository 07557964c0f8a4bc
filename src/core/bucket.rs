//! Token bucket: a rate limit with bursts. Pure: the clock is an argument.

use std::time::Duration;

use jiff::Timestamp;

/// A token bucket, initially full.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bucket {
    rate: f64,
    burst: f64,
    tokens: f64,
    at: Timestamp,
}

impl Bucket {
    /// `rate` tokens per second, at most `burst` at once. A rate of 0 means unlimited.
    #[must_use]
    pub fn new(rate: f64, burst: f64, now: Timestamp) -> Bucket {
        Bucket {
            rate,
            burst,
            tokens: burst,
            at: now,
        }
    }

    /// Takes a token, or returns the time until one is available.
    pub fn take(&mut self, now: Timestamp) -> Result<(), Duration> {
        if self.rate <= 0.0 {
            return Ok(());
        }
        let passed = now.duration_since(self.at).as_secs_f64().max(0.0);
        self.tokens = (self.tokens + passed * self.rate).min(self.burst);
        self.at = now;
        if self.tokens < 1.0 {
            return Err(Duration::try_from_secs_f64((1.0 - self.tokens) / self.rate)
                .unwrap_or(Duration::MAX));
        }
        self.tokens -= 1.0;
        Ok(())
    }

    /// When a token was last requested.
    #[must_use]
    pub fn last(&self) -> Timestamp {
        self.at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_pass_up_to_the_burst_and_then_at_the_rate() {
        let at = |ms: i64| Timestamp::from_millisecond(ms).expect("a time");
        let mut bucket = Bucket::new(2.0, 3.0, at(0));
        assert_eq!((0..5).filter(|_| bucket.take(at(0)).is_ok()).count(), 3);
        assert_eq!(bucket.take(at(0)), Err(Duration::from_millis(500)));
        assert_eq!(
            (bucket.take(at(500)), bucket.take(at(500)).is_err()),
            (Ok(()), true)
        );
        assert_eq!(
            (0..9).filter(|_| bucket.take(at(60_000)).is_ok()).count(),
            3,
            "unused capacity does not accumulate"
        );
        assert!((0..1000).all(|_| Bucket::new(0.0, 0.0, at(0)).take(at(0)).is_ok()));
    }
}
