//! What must be ready before containers start: cgroup and directories, volumes, the node's network, the sandbox, and
//! images.
//!
//! The outcomes of these preparations enter, and the state of the node's network. The operations that prepare leave:
//! [`Op::Prepare`] or [`Op::Upkeep`], [`Op::Volumes`] and [`Op::Sandbox`]. `start.rs` reads what is ready.
//!
//! Upstream prepares in the order of `SyncPod` (`pkg/kubelet/kubelet.go`): cgroup, directories, volumes, sandbox,
//! images. Here the sandbox needs only the cgroup and the directories. The volumes and the images are needed for the
//! first container, so they are set up and pulled while the sandbox is created. A pod that has a sandbox repeats the first step as *upkeep*: if it fails, running containers are
//! still restarted and their tokens refreshed.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use super::clock::shift_all;
use super::plan::Plan;
use super::volumes::Volumes;
use super::{Facts, Network, Op, PodEvent, Turn};
use crate::pod;
use crate::pod::actions::PodActions;
use crate::pod::observed::ObservedPod;
use crate::time;

/// If a sandbox was ready for this long, the back-off of its successor is reset.
const SANDBOX_STABLE: SignedDuration = SignedDuration::from_secs(60);

/// What a pod waits for if refreshing its volumes failed. The journal has the error.
const OUTDATED: &str = "refreshing its volumes failed; retrying";

/// What a pod waits for while its cgroup and directories are created.
const PREPARING: &str = "its cgroup and directories are being created";

/// See the module.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Readiness {
    /// When the pod was last prepared for a sandbox.
    prepared_at: Option<Timestamp>,
    /// When its cgroup and directories were last checked.
    upkeep_at: Option<Timestamp>,
    /// When the last sandbox was created.
    sandbox_at: Option<Timestamp>,
    network: Network,
    /// Whether the event about the node's network was emitted.
    network_event_emitted: bool,
    /// Containers whose image is present for the planned start.
    images: BTreeSet<String>,
    pub(super) volumes: Volumes,
}

impl Readiness {
    /// Nothing is prepared.
    pub(super) fn new(network: Network) -> Readiness {
        Readiness {
            prepared_at: None,
            upkeep_at: None,
            sandbox_at: None,
            network,
            network_event_emitted: false,
            images: BTreeSet::new(),
            volumes: Volumes::default(),
        }
    }

    /// The readiness of the node's network has changed.
    pub(super) fn apply_network(&mut self, network: Network) {
        self.network = network;
    }

    /// The pod's spec has changed. A pulled image does not count for a container whose image has changed.
    pub(super) fn apply_spec(&mut self, before: &Pod, after: &Pod) {
        self.images
            .retain(|name| image(before, name) == image(after, name));
    }

    /// The pod was prepared for a sandbox.
    pub(super) fn apply_prepared(&mut self, now: Timestamp) {
        (self.prepared_at, self.upkeep_at) = (Some(now), Some(now));
    }

    /// The cgroup and the directories were checked.
    pub(super) fn apply_upkeep(&mut self, now: Timestamp) {
        self.upkeep_at = Some(now);
    }

    /// A sandbox was created. Returns whether its predecessor was stable. A sandbox that is lost repeatedly is recreated
    /// with increasing back-off.
    pub(super) fn apply_sandbox(&mut self, now: Timestamp) -> bool {
        let before = self.sandbox_at.replace(now);
        before.is_none_or(|before| now.duration_since(before) > SANDBOX_STABLE)
    }

    /// The image of a container is present.
    pub(super) fn apply_image(&mut self, container: String) {
        self.images.insert(container);
    }

    /// A container was started, or could not be started: the next start checks its image again.
    pub(super) fn forget_image(&mut self, container: &str) {
        self.images.remove(container);
    }

    /// Whether the image of a container is present.
    pub(super) fn has_image(&self, container: &str) -> bool {
        self.images.contains(container)
    }

    /// Whether the cgroup and the directories were checked by this agent.
    pub(super) fn has_upkeep(&self) -> bool {
        self.upkeep_at.is_some()
    }

    /// Proposes the preparation of cgroup, directories and volumes (steps 5, 7 and 8 in ARCHITECTURE.md).
    /// `is_refresh_blocked` says whether a failed refresh waits for its next try.
    pub(super) fn propose(
        &mut self,
        facts: &Facts,
        pod: &Pod,
        observed: &ObservedPod,
        actions: &PodActions,
        is_refresh_blocked: bool,
        plan: &mut Plan,
    ) {
        let every = facts.rules.sync_frequency;
        let creates = actions.create_sandbox.is_some();
        let starts = !actions.start.is_empty() || creates;
        // While a failed refresh waits for its retry, containers start with the existing volumes.
        if !starts && !is_refresh_blocked {
            self.volumes.expire();
        }
        let is_refresh_due = self.volumes.is_refresh_due(facts, pod);
        let next_refresh = self.volumes.next_for_change(pod, facts.now);
        plan.wake.extend(next_refresh);
        plan.wake.extend(self.volumes.wake_times(facts));
        let prepared = match creates {
            true => self.prepared_at,
            false => self.upkeep_at,
        };
        if starts || is_refresh_due {
            plan.wake.extend(prepared.map(|at| time::later(at, every)));
            let is_over = |at| time::later(at, every) <= facts.now;
            if prepared.is_none_or(is_over) {
                // A failing upkeep must not block the token refresh of a running pod, nor the restart of its containers.
                plan.ops.push(match creates {
                    true => Op::Prepare,
                    false => Op::Upkeep,
                });
                if creates || self.adopts_empty_sandbox(observed, actions) {
                    plan.waits.push(PREPARING.into());
                    return;
                }
            }
        }
        if is_refresh_due && is_refresh_blocked && self.volumes.are_set_up() {
            plan.waits.push(OUTDATED.into());
        }
        let is_needed = !actions.start.is_empty() && !self.volumes.are_fresh();
        if (is_refresh_due || is_needed) && next_refresh.is_none() {
            let known = observed.live().next().is_some();
            plan.ops.push(Op::Volumes { known });
        }
    }

    /// Whether the pod's sandbox has no container yet and this worker has not prepared the pod. In this case the call
    /// that created the sandbox was cancelled, and the directories may have been released since. As with a new sandbox,
    /// nothing starts until the upkeep succeeds.
    fn adopts_empty_sandbox(&self, observed: &ObservedPod, actions: &PodActions) -> bool {
        let Some(sandbox) = &actions.sandbox else {
            return false;
        };
        let is_empty = observed.containers.iter().all(|c| c.sandbox != *sandbox);
        is_empty && !self.has_upkeep()
    }

    /// Proposes a sandbox, once the pod is prepared and the node's network is ready.
    pub(super) fn propose_sandbox(
        &mut self,
        facts: &Facts,
        pod: &Pod,
        attempt: u32,
        turn: &mut Turn,
        plan: &mut Plan,
    ) {
        let is_over = |at| time::later(at, facts.rules.sync_frequency) <= facts.now;
        if self.prepared_at.is_none_or(is_over) {
            return;
        }
        if !pod::host_network(pod) {
            match &self.network {
                Network::Ready => self.network_event_emitted = false,
                Network::Unknown => {
                    let why = "waiting for the first network status of the runtime";
                    plan.waits.push(why.into());
                    return;
                }
                Network::NotReady(why) => {
                    let message = format!("network is not ready: {why}");
                    plan.waits.push(format!("the node's {message}"));
                    if !std::mem::replace(&mut self.network_event_emitted, true) {
                        turn.events
                            .push(PodEvent::warning("NetworkNotReady", message));
                    }
                    return;
                }
            }
        }
        plan.ops.push(Op::Sandbox { attempt });
        plan.waits.push("its sandbox is being created".into());
    }

    /// Moves all times after the clock was changed.
    pub(super) fn move_timers(&mut self, by: SignedDuration) {
        let times = [
            &mut self.prepared_at,
            &mut self.upkeep_at,
            &mut self.sandbox_at,
        ];
        shift_all(times, by);
        self.volumes.move_timers(by);
    }
}

/// The image of a container in a pod's spec.
fn image(pod: &Pod, name: &str) -> Option<String> {
    let all = pod::containers(pod);
    let (_, container) = all.iter().find(|(_, c)| c.name == name)?;
    container.image.clone()
}
