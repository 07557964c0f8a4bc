//! Signs of life: when the dispatcher began its last turn, and when the runtime's pods were listed last.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::core::lock::lock;

/// The signs of life of this agent.
#[derive(Debug)]
pub struct Pulse {
    turned: Mutex<Instant>,
    listed: Mutex<Instant>,
}

impl Default for Pulse {
    /// What has not happened yet counts from now on.
    fn default() -> Pulse {
        let now = Instant::now();
        Pulse {
            turned: Mutex::new(now),
            listed: Mutex::new(now),
        }
    }
}

impl Pulse {
    /// The dispatcher begins a turn.
    pub fn turns(&self) {
        *lock(&self.turned) = Instant::now();
    }

    /// How long ago the dispatcher began its last turn.
    #[must_use]
    pub fn since_turn(&self) -> Duration {
        lock(&self.turned).elapsed()
    }

    /// The runtime's pods were listed.
    pub fn lists(&self) {
        *lock(&self.listed) = Instant::now();
    }

    /// How long ago the runtime's pods were listed last.
    #[must_use]
    pub fn since_listing(&self) -> Duration {
        lock(&self.listed).elapsed()
    }
}
