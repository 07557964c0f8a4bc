//! The pod's status: what is known from the API, what this worker has computed, and when the status is published.
//!
//! The status in the API enters, computed statuses, and the reasons why containers wait. The status to publish leaves,
//! and the operation that writes a static pod's mirror.
//!
//! - A new worker adopts the status that an earlier agent wrote, so that times and counts continue. Of a mirror's
//!   status, it adopts only what is about containers that the runtime still has: upstream does not read a static pod's
//!   status from the API (`generateAPIPodStatus` in `pkg/kubelet/kubelet_pods.go`).
//! - A terminal phase in the API is never reverted, whichever client wrote it.
//! - Each publication costs an API request, and every watcher of the pod receives it. While further changes are
//!   imminent, a status is therefore delayed by at most [`STATUS_DELAY`]. Upstream batches in its status manager instead
//!   (`pkg/kubelet/status/status_manager.go`). The first status and changes of a running pod are never delayed.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use serde::{Deserialize, Serialize};

use super::clock::{shift, shift_all};
use super::stored;
use super::{Facts, Identity, Op, Turn, Update};
use crate::pod::actions::Kill;
use crate::pod::observed::{ContainerState, ObservedPod};
use crate::pod::status::{self, Problems, RESTARTING_ALL};
use crate::pod::{self, Role};
use crate::time;
use crate::varying;

/// Maximum delay of a status while further changes are imminent. It applies to a pending pod during its start, and to a
/// pod whose containers have all exited while its sandbox is being stopped.
const STATUS_DELAY: SignedDuration = SignedDuration::from_secs(1);

/// Interval at which a mirror is written again while the API does not have the right one.
const MIRROR_AUDIT: SignedDuration = SignedDuration::from_secs(10);

/// Which part of the status in the API this worker has adopted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Adopted {
    /// Nothing: the API has no object for the status yet.
    Nothing,
    /// The status, or the object had none.
    Status,
    /// The status of a static pod's mirror, which is past Pending. If the runtime has nothing of the pod, the status
    /// belongs to an earlier run.
    RunningMirror,
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Publication {
    /// The current status. It may not have been published yet.
    #[serde(with = "stored::shared")]
    status: Arc<PodStatus>,
    /// The status that was last passed to the status writer.
    #[serde(with = "stored::optional")]
    published: Option<Arc<PodStatus>>,
    /// When a delayed status is published. `None` if none is delayed.
    publish_at: Option<Timestamp>,
    adopted: Adopted,
    /// The terminal status that the API had before this worker published one. It is kept.
    terminal: Option<PodStatus>,
    /// When the mirror was last written, and the identity of the API object at that time.
    mirrored: Option<(Option<Identity>, Timestamp)>,
    /// Why containers are not running.
    problems: Problems,
    /// What the pod waits for, if it is not as specified and no step is running or failing.
    pub(super) waiting: Option<String>,
}

impl Publication {
    /// Nothing is known of the status.
    pub(super) fn new() -> Publication {
        Publication {
            status: Arc::default(),
            published: None,
            publish_at: None,
            adopted: Adopted::Nothing,
            terminal: None,
            mirrored: None,
            problems: Problems::new(),
            waiting: None,
        }
    }

    /// The current status.
    pub(super) fn status(&self) -> &Arc<PodStatus> {
        &self.status
    }

    /// The status that was last passed to the status writer.
    pub(super) fn published(&self) -> Option<&Arc<PodStatus>> {
        self.published.as_ref()
    }

    /// The terminal status that the API had before this worker published one.
    pub(super) fn adopted_terminal_status(&self) -> Option<&PodStatus> {
        self.terminal.as_ref()
    }

    /// Why containers are not running.
    pub(super) fn problems(&self) -> &Problems {
        &self.problems
    }

    /// The API has another object, which needs the complete status.
    pub(super) fn apply_new_object(&mut self) {
        self.published = None;
    }

    /// Adopts the status in the API, so that times and counts continue after a restart. Only the first status counts:
    /// later ones may be echoes of what was written since. Returns whether a status was adopted.
    pub(super) fn adopt_status(&mut self, update: &Update, observed: Option<&ObservedPod>) -> bool {
        if self.adopted != Adopted::Nothing {
            return false;
        }
        let Some(object) = update.status_object() else {
            return false;
        };
        self.adopted = Adopted::Status;
        // A rejected pod has a start time, but no conditions yet.
        let written = |s: &PodStatus| s.conditions.is_some() || s.start_time.is_some();
        let Some(known) = object.status.clone().filter(written) else {
            return false;
        };
        match pod::is_static(&update.pod) {
            true => self.adopt_mirror(known, observed),
            false => self.status = Arc::new(known),
        }
        true
    }

    /// Adopts the part of a mirror's status that is about containers which the runtime still has. The manifest and the
    /// runtime alone decide whether a static pod runs, as with the kubelet. `generateAPIPodStatus` in
    /// `pkg/kubelet/kubelet_pods.go` does not read a static pod's status from the API. `SyncKnownPods` in
    /// `pkg/kubelet/pod_workers.go` restarts a static pod whose manifest came back under its uid.
    ///
    /// A static pod that was rejected, or that terminated and is unknown to the runtime, therefore starts again with
    /// the next agent. If its manifest was removed and came back, its restart counts begin at zero. If the runtime
    /// still has its exited containers, it has terminated.
    fn adopt_mirror(&mut self, known: PodStatus, observed: Option<&ObservedPod>) {
        let has_begun = known.phase.as_deref().is_some_and(|p| p != "Pending");
        let is_own = match observed {
            Some(seen) => has_begun && seen.is_empty(),
            None => *self.status != PodStatus::default(),
        };
        if is_own {
            return;
        }
        let own = Arc::unwrap_or_clone(std::mem::take(&mut self.status));
        self.status = Arc::new(PodStatus {
            phase: own.phase,
            reason: own.reason,
            message: own.message,
            ..known
        });
        match observed {
            Some(seen) => self.keep_known_statuses(seen),
            None if has_begun => self.adopted = Adopted::RunningMirror,
            None => {}
        }
    }

    /// At the first observation of a static pod, drops the mirror's statuses of containers that the runtime does not
    /// have. If the runtime has nothing of the pod, the whole status is dropped.
    pub(super) fn keep_known_statuses(&mut self, seen: &ObservedPod) {
        if self.adopted == Adopted::RunningMirror {
            self.adopted = Adopted::Status;
            if seen.is_empty() {
                self.status = Arc::default();
                return;
            }
        }
        let is_there = |status: &ContainerStatus| {
            let id = status.container_id.as_deref().unwrap_or_default();
            let id = id.rsplit_once("://").map_or(id, |(_, id)| id);
            seen.containers.iter().any(|c| c.id == id)
        };
        let status = Arc::make_mut(&mut self.status);
        for list in [
            &mut status.container_statuses,
            &mut status.init_container_statuses,
            &mut status.ephemeral_container_statuses,
        ] {
            if let Some(statuses) = list {
                statuses.retain(is_there);
            }
            list.take_if(|statuses| statuses.is_empty());
        }
    }

    /// A terminal phase in the API is never reverted, whichever client wrote it and whatever the runtime has. The pod
    /// is not started again, and running containers are stopped. Phase, reason, message and the statuses of terminated
    /// containers are kept (`generateAPIPodStatus` in `pkg/kubelet/kubelet_pods.go`, `UpdatePod` in
    /// `pkg/kubelet/pod_workers.go`). The mirror of a static pod has no such effect.
    ///
    /// If this worker has already published a terminal status, its container statuses are kept. They are newer than
    /// those of the other client, and may have been written already (`status::allowed`).
    pub(super) fn adopt_terminal_status(&mut self, pod: &Pod) {
        let is_final = |terminal: &&PodStatus| pod::is_final(terminal) && !pod::is_static(pod);
        let Some(terminal) = pod.status.as_ref().filter(is_final) else {
            return;
        };
        if self.terminal.is_some() {
            return;
        }
        if self.published.as_deref().is_some_and(pod::is_final) {
            if self.status.phase != terminal.phase {
                let own = Arc::make_mut(&mut self.status);
                own.phase.clone_from(&terminal.phase);
                own.reason.clone_from(&terminal.reason);
                own.message.clone_from(&terminal.message);
            }
            return;
        }
        self.status = Arc::new(terminal.clone());
        self.terminal = Some(terminal.clone());
    }

    /// Sets the status. An equal status keeps its shared copy.
    pub(super) fn apply_status(&mut self, status: PodStatus) {
        if *self.status != status {
            self.status = Arc::new(status);
        }
    }

    /// Records why a container waits. Each change of the status costs an API request. If an error differs from the last
    /// one only in parts that vary with each try, the status therefore stays the same.
    pub(super) fn apply_problem(&mut self, container: String, problem: (String, String)) {
        let (reason, message) = &problem;
        let known = self.problems.get(&container);
        let is_known = known.is_some_and(|(r, m)| r == reason && varying::is_same(m, message));
        if !is_known {
            self.problems.insert(container, problem);
        }
    }

    /// A container waits for the end of its crash-loop back-off.
    pub(super) fn apply_crash_loop(&mut self, container: &str, message: String) {
        let problem = ("CrashLoopBackOff".to_owned(), message);
        self.problems.insert(container.to_owned(), problem);
    }

    /// All containers restart.
    pub(super) fn apply_restart_of_all(&mut self, kills: &[Kill]) {
        for kill in kills {
            let problem = (RESTARTING_ALL.into(), String::new());
            self.problems.insert(kill.name.clone(), problem);
        }
    }

    /// A container was started.
    pub(super) fn apply_started(&mut self, container: &str) {
        self.problems.remove(container);
    }

    /// Forgets the problems of containers that have started, except for those whose hook has failed.
    pub(super) fn forget_settled_problems(
        &mut self,
        pod: &Pod,
        observed: &ObservedPod,
        has_failed_hook: impl Fn(&str) -> bool,
    ) {
        self.problems.retain(|name, (reason, _)| {
            has_failed_hook(name) || !is_settled(pod, observed, name, reason)
        });
    }

    /// A mirror was written.
    pub(super) fn apply_mirrored(&mut self, update: &Update, now: Timestamp) {
        self.mirrored = Some((update.identity(), now));
    }

    /// Proposes writing a static pod's mirror until the API has the right one. `Err` is the time of the next audit.
    pub(super) fn propose_mirror(
        &self,
        facts: &Facts,
        update: &Update,
    ) -> Option<Result<Op, Timestamp>> {
        let needs_mirror = facts.rules.mirrors && pod::is_static(&update.pod);
        if !needs_mirror || update.status_object().is_some() {
            return None;
        }
        let written = self.mirrored.as_ref();
        let next = written
            .filter(|(seen, _)| *seen == update.identity())
            .map(|(_, at)| time::later(*at, MIRROR_AUDIT))
            .filter(|next| facts.now < *next);
        Some(next.map_or(Ok(Op::Mirror), Err))
    }

    /// Whether the status differs from the published one. If the pod terminates, its observed generation does not
    /// count: it is published with the terminal status, which follows soon.
    fn is_changed(&self, terminates: bool) -> bool {
        match &self.published {
            None => true,
            Some(published) if terminates => {
                status::substance(published) != status::substance(&self.status)
            }
            Some(published) => *published != self.status,
        }
    }

    /// Whether the published status is that of a pending pod. Changes of a running pod are published at once: others may
    /// depend on them, for example on a lost readiness.
    pub(super) fn is_pending(&self) -> bool {
        let published = self.published.as_ref();
        published.is_some_and(|published| published.phase.as_deref() == Some("Pending"))
    }

    /// Publishes the status if it has changed: at once, or after a delay while further changes are imminent.
    pub(super) fn publish(
        &mut self,
        terminates: bool,
        is_changing: bool,
        now: Timestamp,
        turn: &mut Turn,
    ) {
        if self.status.phase.is_none() {
            // A status that came from a mirror is not published before the runtime was observed.
            return;
        }
        if !self.is_changed(terminates) {
            self.publish_at = None;
            return;
        }
        // The first status never waits: it shows later agents that the pod was admitted and may have containers.
        if self.published.is_some() && is_changing {
            let latest = time::later(now, STATUS_DELAY);
            let is_new = self.publish_at.is_none();
            let at = *self.publish_at.get_or_insert(latest);
            if is_new || at > now {
                turn.wake_at = Some(turn.wake_at.map_or(at, |wake| wake.min(at)));
                return;
            }
        }
        self.publish_at = None;
        self.published = Some(Arc::clone(&self.status));
        turn.publish = Some(Arc::clone(&self.status));
    }

    /// Moves all times after the clock was changed.
    pub(super) fn move_timers(&mut self, by: SignedDuration) {
        shift_all([&mut self.publish_at], by);
        if let Some((_, at)) = &mut self.mirrored {
            shift(at, by);
        }
    }
}

/// Whether a container is running, or is an init container that has succeeded. Then the cause that blocked its start is
/// over, even if the response to its start was lost. A container that restarts together with all others is still to be
/// removed.
fn is_settled(pod: &Pod, observed: &ObservedPod, name: &str, reason: &str) -> bool {
    if reason == RESTARTING_ALL {
        return false;
    }
    let init = pod::containers(pod)
        .iter()
        .any(|(role, c)| *role == Role::Init && c.name == name);
    observed.newest(name).is_some_and(|c| {
        c.is_running() || (init && c.state == ContainerState::Exited && c.exit_code == 0)
    })
}
