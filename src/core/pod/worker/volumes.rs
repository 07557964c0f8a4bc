//! The pod's volumes: when they are set up, and when they are refreshed.
//!
//! Changes of the objects that the volumes depend on enter, and the outcomes of setups and refreshes. The operation
//! that sets up or refreshes all volumes leaves, and whether the volumes are up to date for a start.
//!
//! Upstream mounts volumes once and refreshes those that require it with every sync of the pod
//! (`pkg/kubelet/volumemanager`, `RequiresRemount`). Here, a change of a watched object begins a refresh at once, at
//! most every [`REFRESH_INTERVAL`], and the regular interval of upstream remains as an audit. As upstream, a container
//! starts only after the volumes were set up, or after a refresh that began when the start became due. If the refresh
//! fails, containers start with the existing volumes: a missing object must not stop a pod from restarting its
//! containers.

use std::collections::BTreeMap;
use std::hash::{Hash as _, Hasher as _};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use super::clock::shift_all;
use super::{Facts, Outcome};
use crate::digest::Fnv64;
use crate::pod;
use crate::time;

/// Minimum interval between two volume refreshes that are caused by changes. Upstream refreshes with the pod's next
/// sync.
const REFRESH_INTERVAL: SignedDuration = SignedDuration::from_secs(2);

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Volumes {
    /// When the volumes were last set up or refreshed. `None` if this agent has not set them up.
    at: Option<Timestamp>,
    /// Whether the volumes need a refresh before the regular interval: their sources have changed, or the last refresh
    /// failed.
    stale: bool,
    /// Whether a watched object has changed since the last refresh began.
    changed: bool,
    /// When the last refresh for a change began. `None` if there was none yet.
    changed_at: Option<Timestamp>,
    /// A hash of the pod's fields that its files expose.
    shape: u64,
    /// Whether the volumes are up to date for the planned starts.
    fresh: bool,
    /// When to retry a part of the volumes that blocks nothing.
    retry_at: Option<Timestamp>,
}

impl Volumes {
    /// Whether this agent has set up the volumes.
    pub(super) fn are_set_up(&self) -> bool {
        self.at.is_some()
    }

    /// Whether containers can be started with the volumes.
    pub(super) fn are_fresh(&self) -> bool {
        self.fresh
    }

    /// Whether a change was not applied yet: a refresh is due, or the last one failed.
    pub(super) fn are_stale(&self) -> bool {
        self.stale
    }

    /// An object that the volumes depend on has changed.
    pub(super) fn apply_change(&mut self) {
        (self.stale, self.changed) = (true, true);
    }

    /// The next start needs another refresh.
    pub(super) fn expire(&mut self) {
        self.fresh = false;
    }

    /// A refresh begins. Later changes require another one.
    pub(super) fn apply_begin(&mut self, pod: &Pod, now: Timestamp) {
        let shape = shape(pod);
        if self.at.is_some() && self.changed_since(shape) {
            self.changed_at = Some(now);
        }
        (self.stale, self.changed) = (false, false);
        self.retry_at = None;
        self.shape = shape;
    }

    /// A refresh has completed, perhaps in part. Even if it failed, containers start with the existing volumes.
    pub(super) fn apply_outcome(&mut self, outcome: &Outcome, now: Timestamp) {
        self.at = Some(now);
        self.fresh = true;
        self.stale |= matches!(outcome, Outcome::Outdated(_));
        self.retry_at = match outcome {
            Outcome::RetryPart(at) => Some(*at),
            _ => None,
        };
    }

    /// A refresh has failed and has not applied earlier changes. They do not wait for the next regular refresh.
    pub(super) fn apply_failure(&mut self) {
        self.stale = true;
    }

    /// Whether a refresh is due, whatever starts.
    pub(super) fn is_refresh_due(&self, facts: &Facts, pod: &Pod) -> bool {
        let is_due = |at: Timestamp| at <= facts.now;
        let is_over = |at: Timestamp| is_due(time::later(at, facts.rules.sync_frequency));
        self.stale
            || self.at.is_none_or(is_over)
            || self.retry_at.is_some_and(is_due)
            || self.shape != shape(pod)
    }

    /// When a refresh may become due without another input.
    pub(super) fn wake_times(&self, facts: &Facts) -> impl Iterator<Item = Timestamp> {
        let audit = self
            .at
            .map(|at| time::later(at, facts.rules.sync_frequency));
        [audit, self.retry_at].into_iter().flatten()
    }

    /// When the next refresh for a change may begin. `None` if no change has to wait.
    pub(super) fn next_for_change(&self, pod: &Pod, now: Timestamp) -> Option<Timestamp> {
        let next = self.changed_at?.checked_add(REFRESH_INTERVAL).ok()?;
        (next > now && self.changed_since(shape(pod))).then_some(next)
    }

    /// Whether the sources of the volumes have changed since the last refresh began: a watched object, or fields of the
    /// pod that its files expose.
    fn changed_since(&self, shape: u64) -> bool {
        self.changed || self.shape != shape
    }

    /// Moves all times after the clock was changed.
    pub(super) fn move_timers(&mut self, by: SignedDuration) {
        shift_all([&mut self.at, &mut self.changed_at, &mut self.retry_at], by);
    }
}

/// A hash of the pod's fields that its files expose: labels, annotations and resources.
fn shape(pod: &Pod) -> u64 {
    let mut hasher = Fnv64::default();
    let text = |map: &Option<BTreeMap<String, String>>, hasher: &mut Fnv64| {
        map.iter().flatten().for_each(|entry| entry.hash(hasher));
    };
    text(&pod.metadata.labels, &mut hasher);
    text(&pod.metadata.annotations, &mut hasher);
    for (_, container) in pod::containers(pod) {
        let resources = container.resources.as_ref();
        let sides = [
            resources.and_then(|r| r.requests.as_ref()),
            resources.and_then(|r| r.limits.as_ref()),
        ];
        for (name, quantity) in sides.into_iter().flatten().flatten() {
            (name, &quantity.0).hash(&mut hasher);
        }
    }
    hasher.finish()
}
