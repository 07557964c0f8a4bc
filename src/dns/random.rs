//! Numbers that an attacker cannot guess, for message ids and probe names.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

/// A counter under SipHash with a key from the operating system: without the key, an output reveals nothing about the next one.
pub(crate) struct Random {
    key: RandomState,
    counter: AtomicU64,
}

impl Random {
    pub(crate) fn new() -> Random {
        Random {
            key: RandomState::new(),
            counter: AtomicU64::new(0),
        }
    }

    pub(crate) fn next(&self) -> u64 {
        self.key
            .hash_one(self.counter.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn next_id(&self) -> u16 {
        self.next() as u16
    }
}
