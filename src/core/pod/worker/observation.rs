//! What the runtime has of the pod, and how far that can be trusted.
//!
//! Observations, events of the runtime and the results of operations enter. The observed pod leaves, and the operation
//! that observes the pod again. Events carry no state; at most they cause an observation (`event_effect.rs`).
//!
//! A successful operation changes the observed pod directly, so that the next operation begins without another
//! observation. Three rules keep this safe:
//!
//! - Every change of the runtime begins another *epoch*. An observation that began in an earlier epoch is discarded, as
//!   the runtime may have answered it before the change.
//! - If the outcome of an operation is unknown, the runtime is not changed before the next accepted observation. A call
//!   that timed out may have been carried out, or may still be carried out.
//! - Events that a running operation may have caused are postponed until the operation completes. Most are known by
//!   then.
//!
//! Upstream relists the runtime every second, or reads single pods after events (`pkg/kubelet/pleg`), and computes each
//! `SyncPod` from that cache. A stale cache is avoided there by waiting for an entry that is newer than the last sync
//! (`GetNewerThan` in `pkg/kubelet/container/cache.go`).

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Op;
use super::event_effect::{EventEffect, event_effect};
use super::stored;
use crate::pod::observed::{ContainerState, EventKind, ObservedPod, RuntimeEvent};

/// How far the observed pod can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Freshness {
    /// The pod is as observed, or as a completed operation has reported it.
    Confirmed,
    /// The pod contains results of operations that no observation has confirmed.
    Assumed,
    /// The outcome of an operation is unknown. The runtime is not changed before the next observation.
    Unknown {
        /// Whether the pod contains results that no observation has confirmed.
        assumed: bool,
    },
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Observation {
    /// The last observation, updated with the results of later operations. `None` before the first one.
    #[serde(with = "stored::optional")]
    pod: Option<Arc<ObservedPod>>,
    freshness: Freshness,
    /// Whether the pod must be observed, as the runtime may have changes.
    needed: bool,
    /// Counts changes of the runtime.
    epoch: u64,
    /// The epoch when the last observation began.
    observed_epoch: u64,
    /// Events that a running operation may have caused.
    postponed: Vec<RuntimeEvent>,
    /// For containers without instances, the restart counts that follow from their logs, by name.
    logged: BTreeMap<String, u32>,
}

impl Observation {
    /// The state before the first observation.
    pub(super) fn new() -> Observation {
        Observation {
            pod: None,
            freshness: Freshness::Unknown { assumed: false },
            needed: true,
            epoch: 0,
            observed_epoch: 0,
            postponed: vec![],
            logged: BTreeMap::new(),
        }
    }

    /// The observed pod. `None` before the first observation.
    pub(super) fn pod(&self) -> Option<&Arc<ObservedPod>> {
        self.pod.as_ref()
    }

    /// The observed pod, if the outcome of every operation is known.
    pub(super) fn certain_pod(&self) -> Option<&Arc<ObservedPod>> {
        self.pod.as_ref().filter(|_| !self.is_outcome_unknown())
    }

    /// Whether the outcome of an operation is unknown, or the pod was not observed yet.
    pub(super) fn is_outcome_unknown(&self) -> bool {
        matches!(self.freshness, Freshness::Unknown { .. })
    }

    /// Whether the observed pod contains results that no observation has confirmed.
    pub(super) fn is_assumed(&self) -> bool {
        matches!(
            self.freshness,
            Freshness::Assumed | Freshness::Unknown { assumed: true }
        )
    }

    /// Whether the pod must be observed.
    pub(super) fn is_needed(&self) -> bool {
        self.needed
    }

    /// Whether a container may run, or the pod was not observed yet.
    pub(super) fn may_have_live(&self) -> bool {
        self.pod
            .as_ref()
            .is_none_or(|pod| pod.live().next().is_some())
    }

    /// The restart count of a container according to its logs.
    pub(super) fn logged_restarts(&self, container: &str) -> u32 {
        self.logged.get(container).copied().unwrap_or(0)
    }

    /// The operation that observes the pod.
    pub(super) fn propose(&self) -> Op {
        Op::Observe {
            logs: self.pod.is_none(),
        }
    }

    /// Requires an observation. The runtime may be changed meanwhile.
    pub(super) fn require(&mut self) {
        self.needed = true;
    }

    /// Requires an observation before the runtime is changed again.
    pub(super) fn require_before_changes(&mut self) {
        self.needed = true;
        self.freshness = Freshness::Unknown {
            assumed: self.is_assumed(),
        };
    }

    /// An operation may have changed the runtime: observations that are in progress do not count.
    pub(super) fn begin_epoch(&mut self) {
        self.epoch = self.epoch.saturating_add(1);
    }

    /// An observation begins.
    pub(super) fn apply_begin(&mut self) {
        self.needed = false;
        self.observed_epoch = self.epoch;
    }

    /// Applies an observation. Returns false if the runtime was changed since the observation began.
    pub(super) fn apply_observed(
        &mut self,
        seen: Arc<ObservedPod>,
        logged: BTreeMap<String, u32>,
    ) -> bool {
        if self.observed_epoch != self.epoch {
            self.needed = true;
            return false;
        }
        self.freshness = Freshness::Confirmed;
        self.logged.extend(logged);
        self.pod = Some(seen);
        true
    }

    /// Applies the result of an operation to the observed pod.
    pub(super) fn apply_change(&mut self, change: impl FnOnce(&mut ObservedPod)) {
        let mut pod = self.pod.as_deref().cloned().unwrap_or_default();
        change(&mut pod);
        pod.sort();
        self.pod = Some(Arc::new(pod));
        self.begin_epoch();
    }

    /// Applies the result of an operation of which the runtime has reported only a part. An observation confirms it.
    pub(super) fn apply_assumption(&mut self, change: impl FnOnce(&mut ObservedPod)) {
        self.apply_change(change);
        self.freshness = match self.freshness {
            Freshness::Confirmed | Freshness::Assumed => Freshness::Assumed,
            Freshness::Unknown { .. } => Freshness::Unknown { assumed: true },
        };
        self.needed = true;
    }

    /// Applies an event of a pod that has not finished. Returns false if it has no effect, now or later.
    pub(super) fn apply_event<'a>(
        &mut self,
        event: RuntimeEvent,
        in_flight: impl Iterator<Item = &'a Op>,
    ) -> bool {
        match event_effect(self.pod.as_deref(), in_flight, &event) {
            EventEffect::Known => return false,
            EventEffect::Defer if self.postponed.contains(&event) => return false,
            EventEffect::Defer => self.postponed.push(event),
            EventEffect::Observe => self.needed = true,
        }
        true
    }

    /// Returns the postponed events.
    pub(super) fn take_postponed(&mut self) -> Vec<RuntimeEvent> {
        std::mem::take(&mut self.postponed)
    }

    /// Whether an event is about the start of a sandbox or a container that is not known yet.
    pub(super) fn is_new(&self, event: &RuntimeEvent) -> bool {
        let known = self.pod.iter().flat_map(|pod| {
            let containers = pod.containers.iter().map(|c| &c.id);
            containers.chain(pod.sandboxes.iter().map(|s| &s.id))
        });
        matches!(event.kind, EventKind::Created | EventKind::Started)
            && !known.into_iter().any(|id| *id == event.id)
    }

    /// When the newest instance of a container exited. `None` if it has not exited.
    pub(super) fn last_exit(&self, container: &str) -> Option<jiff::Timestamp> {
        let newest = self.pod.as_ref()?.newest(container)?;
        (newest.state == ContainerState::Exited)
            .then(|| newest.finished_at.unwrap_or(newest.created_at))
    }
}
