//! Heartbeats of the agent: the start of the dispatcher's last turn, and the last listing of the runtime's pods.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::core::lock::lock;

/// The heartbeats of this agent.
#[derive(Debug)]
pub struct Pulse {
    turned: Mutex<Instant>,
    listed: Mutex<Instant>,
}

impl Default for Pulse {
    /// Heartbeats that have not occurred yet count from the creation.
    fn default() -> Pulse {
        let now = Instant::now();
        Pulse {
            turned: Mutex::new(now),
            listed: Mutex::new(now),
        }
    }
}

impl Pulse {
    /// Records the start of a dispatcher turn.
    pub fn turns(&self) {
        *lock(&self.turned) = Instant::now();
    }

    /// Time since the start of the dispatcher's last turn.
    #[must_use]
    pub fn since_turn(&self) -> Duration {
        lock(&self.turned).elapsed()
    }

    /// Records a listing of the runtime's pods.
    pub fn lists(&self) {
        *lock(&self.listed) = Instant::now();
    }

    /// Time since the last listing of the runtime's pods.
    #[must_use]
    pub fn since_listing(&self) -> Duration {
        lock(&self.listed).elapsed()
    }
}
