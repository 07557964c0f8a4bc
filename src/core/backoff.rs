//! Crash-loop back-off (kubelet spec, 5.4). Pure: the clock is an argument.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

const INITIAL: SignedDuration = SignedDuration::from_secs(10);
const EXPIRY: SignedDuration = SignedDuration::from_secs(600);
/// The default maximum.
pub const MAXIMUM: SignedDuration = SignedDuration::from_secs(300);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    delay: SignedDuration,
    updated: Timestamp,
}

/// The back-offs of one pod's containers, by container name and image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Backoff(BTreeMap<String, Entry>);

/// A container that may not start yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// The whole delay.
    pub delay: SignedDuration,
    /// When it is over.
    pub until: Timestamp,
}

impl Backoff {
    /// Whether a container that ended at `finished` may start at `now`; if so the start is counted. The
    /// first restart is immediate, then 10 s, doubling; ten minutes of running start it over.
    pub fn start(&mut self, key: &str, finished: Timestamp, now: Timestamp, maximum: SignedDuration) -> Result<(), Held> {
        let entry = self.0.get(key).copied().filter(|e| finished.duration_since(e.updated) <= EXPIRY);
        let Some(entry) = entry else {
            self.0.insert(key.to_owned(), Entry { delay: INITIAL.min(maximum), updated: now });
            return Ok(());
        };
        if now.duration_since(finished) < entry.delay {
            return Err(Held { delay: entry.delay, until: finished + entry.delay });
        }
        self.0.insert(key.to_owned(), Entry { delay: (entry.delay * 2).min(maximum), updated: now });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restarts_wait_longer_and_longer_until_one_lasts() {
        let mut backoff = Backoff::default();
        let at = |s: i64| Timestamp::from_second(s).expect("a time");
        assert_eq!(backoff.start("c", at(100), at(100), MAXIMUM), Ok(()), "the first restart is immediate");
        let held = backoff.start("c", at(101), at(105), MAXIMUM).expect_err("held");
        assert_eq!((held.delay.as_secs(), held.until), (10, at(111)));
        assert_eq!(backoff.start("c", at(101), at(111), MAXIMUM), Ok(()));
        assert_eq!(backoff.start("c", at(112), at(120), MAXIMUM).expect_err("held").delay.as_secs(), 20);
        let mut now = 132;
        for _ in 0..10 {
            assert_eq!(backoff.start("c", at(now), at(now + 300), MAXIMUM), Ok(()));
            now += 301;
        }
        assert_eq!(backoff.start("c", at(now), at(now), MAXIMUM).expect_err("held").delay, MAXIMUM);
        assert_eq!(backoff.start("c", at(now + 1000), at(now + 1000), MAXIMUM), Ok(()), "ran for over ten minutes");
        assert_eq!(backoff.start("other", at(now), at(now), MAXIMUM), Ok(()));
    }
}
