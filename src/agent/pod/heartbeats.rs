//! Heartbeats of the agent: the start of the dispatcher's last turn, and the last listing of the runtime's pods.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use holdfast_core::lock::lock;

/// The heartbeats of this agent.
#[derive(Debug)]
pub struct Heartbeats {
    last_turn: Mutex<Instant>,
    last_listing: Mutex<Instant>,
}

impl Default for Heartbeats {
    /// Heartbeats that have not occurred yet count from the creation.
    fn default() -> Heartbeats {
        let now = Instant::now();
        Heartbeats {
            last_turn: Mutex::new(now),
            last_listing: Mutex::new(now),
        }
    }
}

impl Heartbeats {
    /// Records the start of a dispatcher turn.
    pub(crate) fn dispatcher_turned(&self) {
        *lock(&self.last_turn) = Instant::now();
    }

    /// Time since the start of the dispatcher's last turn.
    #[must_use]
    pub(crate) fn since_turn(&self) -> Duration {
        lock(&self.last_turn).elapsed()
    }

    /// Records a listing of the runtime's pods.
    pub(crate) fn runtime_listed(&self) {
        *lock(&self.last_listing) = Instant::now();
    }

    /// Time since the last listing of the runtime's pods.
    #[must_use]
    pub(crate) fn since_listing(&self) -> Duration {
        lock(&self.last_listing).elapsed()
    }
}
