//! The operations in progress, and the failed ones that wait for their next try.
//!
//! Operations enter when they begin, and leave when they complete or are cancelled. Failures enter with their class
//! (`core::fault`). What leaves is whether an operation is in progress, and until when a failed one is blocked.
//!
//! A failed operation is blocked for a time that grows with its failures, as upstream's workers are requeued with
//! back-off (`pkg/kubelet/pod_workers.go`). A change that the failure may have waited for ends this time early, except
//! for a minimum pause, as changes may arrive continually. Upstream has no such classes: there, every update of the pod
//! syncs it again, and a change of an object or of the runtime does not.
//!
//! A change may also arrive while an operation is in progress that then fails for want of it. The operation may have
//! read the state before the change. Such an operation is *overtaken*, and its failure ends the same way: the next try
//! follows after the minimum pause.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::clock::shift;
use super::op::BackOff;
use super::{Key, Op};
use crate::backoff::Doubling;
use crate::fault::Class;
use crate::time;

/// Back-off of failed operations.
const RETRY: Doubling = Doubling::new(Duration::from_millis(500), Duration::from_secs(10));
/// Back-off of a container that could not be started, if the failure gives no time for the next try. Only failures of
/// class `Final` increase it. The maximum is short because the cause may be outside of the pod, for example an image
/// that is pushed again under its tag.
const START_RETRY: Doubling = Doubling::new(Duration::from_secs(10), Duration::from_secs(60));

/// An operation in progress.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Running {
    pub(super) op: Op,
    /// Since the operation began, something has changed that ends the pause after failures of these classes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    overtaken: Vec<Class>,
}

/// An operation that has failed, and its next try.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Retry {
    key: Key,
    failures: u32,
    /// When the last failure happened.
    since: Timestamp,
    until: Timestamp,
    class: Class,
}

impl Retry {
    /// Ends the back-off after the minimum pause.
    fn wake(&mut self) {
        self.until = self.until.min(time::later(self.since, RETRY.after(1)));
    }
}

/// Whether the start of a container is retried early. The start needs the result of another volume refresh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(super) struct StartsWoken(pub(super) bool);

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Operations {
    in_flight: Vec<Running>,
    retries: Vec<Retry>,
}

impl Operations {
    /// Whether no operation is in progress.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// The operations in progress.
    pub(super) fn in_flight(&self) -> impl Iterator<Item = &Op> {
        self.in_flight.iter().map(|running| &running.op)
    }

    /// Whether the operation with this key is in progress.
    pub(super) fn is_in_flight(&self, key: &Key) -> bool {
        self.in_flight().any(|op| op.key() == *key)
    }

    /// An operation begins.
    pub(super) fn begin(&mut self, op: Op) {
        self.in_flight.push(Running {
            op,
            overtaken: vec![],
        });
    }

    /// An operation has completed. Returns `None` if it was not in progress.
    pub(super) fn complete(&mut self, key: &Key) -> Option<Running> {
        let at = self.in_flight.iter().position(|r| r.op.key() == *key)?;
        let running = self.in_flight.remove(at);
        if self.in_flight.is_empty() {
            // An idle pod does not keep the memory that its start needed.
            self.in_flight = vec![];
        }
        Some(running)
    }

    /// An operation is cancelled.
    pub(super) fn cancel(&mut self, key: &Key) {
        self.in_flight.retain(|running| running.op.key() != *key);
    }

    /// An operation has succeeded.
    pub(super) fn apply_success(&mut self, op: &Op) {
        let facts = op.facts();
        if facts.back_off == BackOff::Own {
            self.forget(&facts.key);
        }
    }

    /// An operation has failed.
    pub(super) fn apply_failure(
        &mut self,
        now: Timestamp,
        running: &Running,
        class: Class,
    ) -> StartsWoken {
        let key = running.op.facts().failure_key();
        self.block(now, &key, class);
        self.end_pause_if_overtaken(running, &key, class)
    }

    /// A container could not be started, or its image not be pulled. `until` is the time of the next try, if it is
    /// known.
    pub(super) fn apply_failed_start(
        &mut self,
        now: Timestamp,
        running: &Running,
        class: Class,
        until: Option<Timestamp>,
    ) -> StartsWoken {
        let key = running.op.facts().failure_key();
        self.block_until(now, &key, class, |failures| {
            let pause = match class {
                Class::WaitForChange | Class::RetryLater => START_RETRY.after(1),
                Class::Final => START_RETRY.after(failures),
            };
            until.unwrap_or(time::later(now, pause))
        });
        self.end_pause_if_overtaken(running, &key, class)
    }

    fn end_pause_if_overtaken(
        &mut self,
        running: &Running,
        key: &Key,
        class: Class,
    ) -> StartsWoken {
        match running.overtaken.contains(&class) {
            true => self.wake_where(|retry| retry.key == *key),
            false => StartsWoken(false),
        }
    }

    /// Blocks an operation for a time that depends on the number of its failures.
    pub(super) fn block(&mut self, now: Timestamp, key: &Key, class: Class) {
        let pauses = match class {
            Class::RetryLater | Class::WaitForChange => &RETRY,
            Class::Final => &START_RETRY,
        };
        self.block_until(now, key, class, |failures| {
            time::later(now, pauses.after(failures))
        });
    }

    /// Blocks an operation. `until` computes the time of the next try from the number of failures.
    fn block_until(
        &mut self,
        now: Timestamp,
        key: &Key,
        class: Class,
        until: impl FnOnce(u32) -> Timestamp,
    ) {
        let before = self.retries.iter().find(|r| r.key == *key);
        let failures = before.map_or(1, |r| r.failures.saturating_add(1));
        self.forget(key);
        self.retries.push(Retry {
            key: key.clone(),
            failures,
            since: now,
            until: until(failures),
            class,
        });
    }

    /// When a failed operation may be retried. `None` if it need not wait.
    pub(super) fn blocked_until(&self, key: &Key, now: Timestamp) -> Option<Timestamp> {
        let retry = self.retries.iter().find(|retry| retry.key == *key)?;
        (retry.until > now).then_some(retry.until)
    }

    /// Whether the operation has failed and has not succeeded since.
    pub(super) fn has_failed(&self, key: &Key) -> bool {
        self.retries.iter().any(|retry| retry.key == *key)
    }

    /// Something has changed that failures of these classes may have waited for.
    pub(super) fn apply_change(&mut self, classes: &[Class]) -> StartsWoken {
        for running in &mut self.in_flight {
            for class in classes {
                if !running.overtaken.contains(class) {
                    running.overtaken.push(*class);
                }
            }
        }
        self.wake_where(|retry| classes.contains(&retry.class))
    }

    fn wake_where(&mut self, is_due: impl Fn(&Retry) -> bool) -> StartsWoken {
        let mut starts = false;
        for retry in self.retries.iter_mut().filter(|retry| is_due(retry)) {
            retry.wake();
            starts |= matches!(retry.key, Key::Start(_));
        }
        StartsWoken(starts)
    }

    /// Forgets the failures of an operation.
    pub(super) fn forget(&mut self, key: &Key) {
        self.retries.retain(|retry| retry.key != *key);
    }

    /// Forgets all failures.
    pub(super) fn forget_all(&mut self) {
        self.retries.clear();
    }

    /// Moves all times after the clock was changed.
    pub(super) fn move_timers(&mut self, by: SignedDuration) {
        for retry in &mut self.retries {
            shift(&mut retry.since, by);
            shift(&mut retry.until, by);
        }
        let running = self.in_flight.iter_mut();
        for until in running.filter_map(|running| running.op.deadline_mut()) {
            shift(until, by);
        }
    }
}
