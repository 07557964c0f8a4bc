//! Restarts of containers: the crash-loop back-off, the restart counts, and containers that are stopped in order to be
//! restarted.
//!
//! Starts, stops and exits of containers enter. Until when a crashed container waits leaves, and which containers must
//! be stopped because their postStart hook has failed. `start.rs` decides about each start.
//!
//! The back-off is that of upstream (`doBackOff` in `pkg/kubelet/kuberuntime/kuberuntime_manager.go`): it doubles from
//! 10 s with each restart, and begins again if the container ran for ten minutes, or with another image or other
//! resources. Unlike a failed operation, a crash waits for no change, so nothing ends this back-off early.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::backoff::{Backoff, BackoffDelay};
use crate::pod::actions::{Kill, Start};
use crate::pod::observed::ObservedPod;

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Restarts {
    backoff: Backoff,
    /// Attempts whose back-off event was emitted, by container.
    backoff_events: BTreeMap<String, u32>,
    /// The restart counts after a restart of all containers, by container.
    counts: BTreeMap<String, u32>,
    /// Ids of containers that this worker stops in order to restart them, whatever their exit code. With `OnFailure`, a
    /// container that exits with 0 on SIGTERM has not finished its work. As upstream, this is stored nowhere else:
    /// after a restart, the agent decides by the exit code alone.
    stopped_to_restart: BTreeSet<String>,
    /// Containers whose postStart hook failed: names by id. They are stopped, and later containers start only after
    /// they have exited.
    failed_hooks: BTreeMap<String, String>,
}

impl Restarts {
    /// Until when a container that exited at `finished` waits. `None` if it may start.
    pub(super) fn remaining(
        &self,
        start: &Start,
        finished: Timestamp,
        now: Timestamp,
    ) -> Option<BackoffDelay> {
        self.backoff.remaining(&backoff_key(start), finished, now)
    }

    /// A container that exited at `finished` is started again.
    pub(super) fn apply_begin_of_start(
        &mut self,
        start: &Start,
        finished: Timestamp,
        now: Timestamp,
        maximum: SignedDuration,
    ) {
        let key = backoff_key(start);
        // Whether the container may start was checked before. This call counts the restart.
        let _ = self.backoff.start(&key, finished, now, maximum);
    }

    /// A container waits after this attempt. Returns whether that is to be reported.
    pub(super) fn apply_waiting(&mut self, container: &str, attempt: u32) -> bool {
        let reported = self.backoff_events.insert(container.to_owned(), attempt);
        reported != Some(attempt)
    }

    /// All containers restart: their restart counts continue, although their instances are removed.
    pub(super) fn apply_restart_of_all(&mut self, kills: &[Kill], observed: Option<&ObservedPod>) {
        let instances = || observed.iter().flat_map(|observed| &observed.containers);
        for kill in kills {
            let attempt = instances().find(|c| c.id == kill.id);
            let attempt = attempt.map_or(0, |c| c.attempt);
            let count = self.counts.entry(kill.name.clone()).or_default();
            *count = (*count).max(attempt.saturating_add(1));
        }
    }

    /// The restart count of a container after a restart of all containers.
    pub(super) fn count(&self, container: &str) -> u32 {
        self.counts.get(container).copied().unwrap_or(0)
    }

    /// A container is stopped in order to be restarted.
    pub(super) fn apply_stop_to_restart(&mut self, id: String) {
        self.stopped_to_restart.insert(id);
    }

    /// Ids of containers that are or were stopped in order to be restarted.
    pub(super) fn stopped_to_restart(&self) -> &BTreeSet<String> {
        &self.stopped_to_restart
    }

    /// The postStart hook of a running container has failed.
    pub(super) fn apply_failed_hook(&mut self, id: String, container: String) {
        self.failed_hooks.insert(id, container);
    }

    /// The names of containers that run although their postStart hook has failed.
    pub(super) fn failed_hooks(&self) -> impl Iterator<Item = &str> {
        self.failed_hooks.values().map(String::as_str)
    }

    /// Adds the containers whose postStart hook has failed to those that must be stopped. They are stopped like any
    /// other, with their preStop hook and their grace period.
    pub(super) fn stop_failed_hooks(&self, kills: &mut Vec<Kill>) {
        for (id, name) in &self.failed_hooks {
            if !kills.iter().any(|kill| kill.id == *id) {
                kills.push(Kill {
                    id: id.clone(),
                    name: name.clone(),
                    message: "FailedPostStartHook".into(),
                    grace: None,
                });
            }
        }
    }

    /// Forgets containers that were removed, or have exited after their hook failed.
    pub(super) fn apply_observed(&mut self, seen: &ObservedPod) {
        let instance = |id: &str| seen.containers.iter().find(|c| c.id == id);
        self.failed_hooks
            .retain(|id, _| instance(id).is_some_and(|c| c.is_running()));
        self.stopped_to_restart.retain(|id| instance(id).is_some());
    }

    /// Moves all times after the clock was changed.
    pub(super) fn move_timers(&mut self, by: SignedDuration) {
        self.backoff.adjust_clock(by);
    }
}

/// The key of a container's crash-loop back-off. Another image or other resources reset the back-off.
fn backoff_key(start: &Start) -> String {
    let container = &start.container;
    format!(
        "{}{:?}{:?}",
        container.name, container.image, container.resources
    )
}
