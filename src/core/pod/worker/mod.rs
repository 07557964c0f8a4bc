//! One pod's worker: what happened goes in, what is to be done comes out. Pure.
//!
//! [`Worker::turn`] takes one [`Input`], brings the lifecycle forward, computes the status and plans
//! anew from what is known. The plan is a set of operations; those that are under way already go on,
//! those that have become pointless are cancelled. So after every input, and in particular after every
//! observation, everything that can be done is being done, and what waits has either an operation under
//! way, a time to wake at, or a reason that only news can change.
//!
//! The rules: `apply` says what an input changes, `news` which events change anything, `plan` what is to be done (upstream's `pod_workers.go`
//! and `SyncPod`), `stop` in which order containers end.

mod adopt;
mod apply;
mod audit;
mod clock;
mod input;
mod news;
mod plan;
mod stop;
mod stored;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use serde::{Deserialize, Serialize};

pub use input::{Identity, Input, Key, Network, Op, Outcome, PodEvent, Update};

use super::Role;
use super::actions;
use super::lifecycle::{self, Cause, State};
use super::observed::{ContainerState, ObservedPod, RuntimeEvent};
use super::probe::Probed;
use super::resize::{self, Resizing, Sizes};
use super::status::devices::OfPod as DeviceHealth;
use super::status::{self, Problems, Verdict};
use crate::core::backoff::Backoff;
use crate::core::fault::Class;
use crate::core::pod;
use crate::core::time;

/// How long a status waits while more is about to change: that of a pending pod while it is being started, that of a pod
/// whose containers have all ended while its sandbox is stopped.
const STATUS_DELAY: SignedDuration = SignedDuration::from_secs(1);

/// What the configuration says that decisions depend on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rules {
    /// How often volumes are refreshed without a cause.
    pub sync_frequency: SignedDuration,
    /// The longest crash-loop back-off.
    pub max_backoff: SignedDuration,
    /// Whether static pods have mirrors: there is an API.
    pub mirrors: bool,
    /// Whether the pod's runtime can make a mount read-only with all that is mounted below it.
    pub recursive_read_only: bool,
    /// The name of the container runtime, which is part of container ids; empty until it is known.
    #[serde(default)]
    pub runtime: String,
}

/// What is true when an input is looked at.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// The time of day, by which everything is decided that waits for a time.
    pub now: Timestamp,
    /// The addresses of the node, which pods of the host network have, the main one first.
    pub node_ips: Vec<String>,
    /// The step before the first container that fails, as a sentence.
    pub held_up: Option<String>,
    /// What the configuration says.
    pub rules: Rules,
}

/// What a turn leads to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Turn {
    /// Operations to cancel: they have become pointless, or are begun anew.
    pub cancel: Vec<Key>,
    /// Operations to begin.
    pub begin: Vec<Op>,
    /// A status to hand to the writer.
    pub publish: Option<Arc<PodStatus>>,
    /// Events about the pod.
    pub events: Vec<PodEvent>,
    /// Steps of the lifecycle: the state before, the cause, the state after.
    pub decisions: Vec<(State, lifecycle::Input, State)>,
    /// When to come back with [`Input::Tick`] if nothing else happens before.
    pub wake_at: Option<Timestamp>,
    /// Another observation was accepted: probes follow it.
    pub observed: bool,
    /// The pod has left this node, and its worker ends.
    pub gone: bool,
    /// The input changed nothing that decisions are made from, and nothing was due.
    pub unchanged: bool,
}

/// A failed operation that is tried again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Retry {
    key: Key,
    failures: u32,
    /// When it failed last.
    since: Timestamp,
    until: Timestamp,
    class: Class,
}

/// How far the pod's volumes are.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct VolumeState {
    /// When they were set up or refreshed last.
    at: Option<Timestamp>,
    /// What they are made from has changed since.
    stale: bool,
    /// A watched object has changed since the last refresh was begun.
    #[serde(default)]
    changed: bool,
    /// When the last refresh for a change was begun; `None` if there was none yet.
    #[serde(default)]
    changed_at: Option<Timestamp>,
    /// What the files that show the pod itself were made from.
    shape: u64,
    /// They were set up or refreshed for the starts that are planned.
    fresh: bool,
    /// When something of them is to be tried again that holds nothing up.
    #[serde(default)]
    again: Option<Timestamp>,
}

/// Whether the pod asks for other sizes than it has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Growth {
    /// It has what its spec says.
    #[default]
    Settled,
    /// It has what its spec says again: the node may still book other sizes, or keep them waiting for room.
    Withdrawn,
    /// The node is to be asked.
    Wanted,
    /// The node has said no; when another pod goes it is asked again.
    Deferred,
}

/// One pod's worker. Everything that it knows can be had again from the runtime and the API; nothing in
/// it refers to the world, so that it can be stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// Where the pod stands in its life.
    pub state: State,
    /// The status as it is now; the API may not have it yet.
    #[serde(with = "stored::shared")]
    pub status: Arc<PodStatus>,
    /// What the runtime has, with what was done since.
    #[serde(with = "stored::optional")]
    pub observed: Option<Arc<ObservedPod>>,
    /// What the pod waits for, if it is not as its spec says and nothing is under way or failing.
    pub waiting: Option<String>,
    update: Update,
    /// The pod with the sizes that were granted.
    #[serde(with = "stored::shared")]
    effective: Arc<Pod>,
    granted: Sizes,
    /// The newest generation whose sizes were granted or not.
    #[serde(default)]
    decided: Option<i64>,
    /// What the runtime is to have of that.
    #[serde(default)]
    wanted: Sizes,
    growth: Growth,
    /// Room was made while the node was asked for it.
    #[serde(default)]
    room_freed: bool,
    resizing: Resizing,
    #[serde(default, with = "stored::optional")]
    published: Option<Arc<PodStatus>>,
    publish_at: Option<Timestamp>,
    /// The status goes on from what the API had.
    adopted: bool,
    /// The status is that of a static pod's mirror, and says that the pod has begun. Where the runtime has nothing of it, that was an earlier
    /// life.
    #[serde(default)]
    earlier_life: bool,
    /// The end that the API told before this worker had: it stays as it is.
    #[serde(default)]
    end: Option<PodStatus>,
    admitted: bool,
    /// Something new may be in the runtime.
    look: bool,
    /// Events that may be about what an operation under way does: they are judged when it has ended.
    #[serde(default)]
    events: Vec<RuntimeEvent>,
    /// Something was done whose outcome is not known: nothing more is done before it is.
    unsure: bool,
    /// Counts what was done; an observation that was begun before something was done is void.
    acted: u64,
    observing: u64,
    /// What the runtime has was noted from what was done, and not seen yet.
    provisional: bool,
    logged: BTreeMap<String, u32>,
    counts: BTreeMap<String, u32>,
    probed: Probed,
    /// The health of the devices that containers have.
    #[serde(default)]
    devices: DeviceHealth,
    problems: Problems,
    backoff: Backoff,
    /// Attempts whose back-off was announced, by container.
    announced: BTreeMap<String, u32>,
    retries: Vec<Retry>,
    in_flight: Vec<Op>,
    /// Containers that were told to stop, and when their grace is over, by id.
    stops: BTreeMap<String, Timestamp>,
    /// When the grace period of the whole pod is over.
    stop_by: Option<Timestamp>,
    stopped_sandboxes: BTreeSet<String>,
    /// When the pod was last prepared for a sandbox.
    prepared_at: Option<Timestamp>,
    /// When its cgroup and directories were last brought in order.
    #[serde(default)]
    kept_at: Option<Timestamp>,
    volumes: VolumeState,
    /// Containers whose image is there for the start that is planned.
    images: BTreeSet<String>,
    network: Network,
    /// That the network is not ready was said.
    network_told: bool,
    /// Containers that a stop has ended, as the runtime said; what still runs then is told once more.
    stop_done: BTreeSet<String>,
    /// Ids of containers that this worker stops in order to start them again, whatever their exit code: with `OnFailure` one
    /// that exits with 0 on SIGTERM has not done its work. Not stored anywhere else, as with upstream: the next agent
    /// decides by the exit code alone.
    #[serde(default)]
    stopped_to_restart: BTreeSet<String>,
    /// Containers whose postStart hook failed, by id, with their names: they are stopped, and nothing after them is started
    /// before they have ended.
    #[serde(default)]
    failed_hooks: BTreeMap<String, String>,
    /// When the last sandbox was made.
    sandbox_at: Option<Timestamp>,
    /// The mirror was brought in line, as far as the API has shown it: this object was seen then.
    mirrored: Option<(Option<Identity>, Timestamp)>,
    verdict: Option<Verdict>,
    /// When the plan has more to do.
    wake_at: Option<Timestamp>,
    /// When a pod that ends is audited, if nothing happens to it before.
    #[serde(default)]
    audit_at: Option<Timestamp>,
    /// The containers that the pod is for have come to their end; sidecars may still run.
    completed: bool,
    /// Its resource claims are given back.
    #[serde(default)]
    claims_returned: bool,
    /// After the pod's end: the runtime may have something of it again. A call that was cut off may be carried out late.
    #[serde(default)]
    recheck: bool,
    /// After the pod's end: that was found, and its content is to be released again.
    #[serde(default)]
    leftover: bool,
    finalised: bool,
}

impl Worker {
    /// The worker of a pod that has come to this agent at `now`.
    #[must_use]
    pub fn new(update: Update, network: Network, now: Timestamp) -> Worker {
        let granted = resize::known(&update.pod);
        let mut worker = Worker {
            state: State::Syncing,
            status: Arc::default(),
            observed: None,
            waiting: None,
            effective: Arc::clone(&update.pod),
            resizing: Resizing::adopted(&update.pod),
            granted,
            decided: update
                .pod
                .status
                .as_ref()
                .and_then(|s| s.observed_generation),
            wanted: Sizes::default(),
            growth: Growth::Settled,
            room_freed: false,
            published: None,
            publish_at: None,
            adopted: false,
            earlier_life: false,
            end: None,
            admitted: false,
            look: true,
            events: vec![],
            unsure: true,
            acted: 0,
            observing: 0,
            provisional: false,
            logged: BTreeMap::new(),
            counts: BTreeMap::new(),
            probed: Probed::default(),
            devices: DeviceHealth::new(),
            problems: Problems::new(),
            backoff: Backoff::default(),
            announced: BTreeMap::new(),
            retries: vec![],
            in_flight: vec![],
            stops: BTreeMap::new(),
            stop_by: None,
            stopped_sandboxes: BTreeSet::new(),
            prepared_at: None,
            kept_at: None,
            volumes: VolumeState::default(),
            images: BTreeSet::new(),
            network,
            network_told: false,
            stop_done: BTreeSet::new(),
            stopped_to_restart: BTreeSet::new(),
            failed_hooks: BTreeMap::new(),
            sandbox_at: None,
            mirrored: None,
            verdict: None,
            wake_at: None,
            audit_at: None,
            completed: false,
            claims_returned: false,
            recheck: false,
            leftover: false,
            finalised: false,
            update,
        };
        worker.adopt_update();
        let intent = worker.update.intent();
        worker.state = State::Syncing.step(lifecycle::Input::Intent(intent));
        worker.limit_grace(now);
        worker
    }

    /// Takes in what happened, and says what follows.
    pub fn turn(&mut self, facts: &Facts, input: Input) -> Turn {
        let mut turn = Turn::default();
        let resizing = self.is_resizing();
        // An input that changes nothing may come when something else is due.
        let due = self.wake_at.is_some_and(|at| at <= facts.now);
        turn.unchanged = !self.apply(facts, input, &mut turn) && !due;
        if !turn.unchanged {
            self.advance(facts, &mut turn);
            self.replan(facts, &mut turn);
            self.plan_audit(facts, &mut turn);
            self.wake_at = turn.wake_at;
            if resizing && !self.is_resizing() && !self.state.is_ending() {
                let message = format!(
                    "Pod resize completed: {}",
                    resize::described(&self.effective, None)
                );
                turn.events.push(event("ResizeCompleted", message));
            }
        }
        turn.wake_at = self.wake_at.filter(|at| *at > facts.now);
        self.publish(facts, &mut turn);
        turn.gone = self.is_gone();
        debug_assert!(
            turn.gone || !self.is_idle() || !self.has_overlooked_something(facts),
            "a worker sleeps with something left to do: {self:?}"
        );
        turn
    }

    /// Whether something is planned that is neither under way nor waits for a time: then nothing would
    /// ever wake the worker to do it.
    fn has_overlooked_something(&self, facts: &Facts) -> bool {
        let mut probe = self.clone();
        let mut turn = Turn::default();
        probe.replan(facts, &mut turn);
        !turn.begin.is_empty() || !turn.cancel.is_empty()
    }

    /// The pod with the sizes that the node has granted.
    #[must_use]
    pub fn pod(&self) -> &Arc<Pod> {
        &self.effective
    }

    /// The newest desired state.
    #[must_use]
    pub fn update(&self) -> &Update {
        &self.update
    }

    /// What probes have found.
    #[must_use]
    pub fn probed(&self) -> &Probed {
        &self.probed
    }

    /// The status that was handed to the writer last.
    #[must_use]
    pub fn published(&self) -> Option<&Arc<PodStatus>> {
        self.published.as_ref()
    }

    /// How far a resize is.
    #[must_use]
    pub fn resizing(&self) -> &Resizing {
        &self.resizing
    }

    /// Containers that are being started: their postStart hook may still run, or has failed.
    #[must_use]
    pub fn starting(&self) -> BTreeSet<&str> {
        let starting = self.in_flight.iter().filter_map(|op| match op {
            Op::Start { start, .. } => Some(start.container.name.as_str()),
            _ => None,
        });
        let failed = self.failed_hooks.values().map(String::as_str);
        starting.chain(failed).collect()
    }

    /// Whether nothing is under way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    fn is_in_flight(&self, key: &Key) -> bool {
        self.in_flight.iter().any(|op| op.key() == *key)
    }

    fn is_resizing(&self) -> bool {
        let observed = self.observed.as_ref();
        let runs = |name: &str| observed.is_some_and(|o| o.runs(name));
        self.resizing.is_under_way(&self.wanted, runs)
    }

    /// Whether the worker is not needed any more: its content is released, and the API has no object of
    /// it, or keeps one only for others (a finalizer), of which the source will tell.
    fn is_gone(&self) -> bool {
        let State::Finished { cause } = self.state else {
            return false;
        };
        match cause {
            Cause::Removed => true,
            Cause::Deleted => self.update.removed || self.update.object.is_none(),
            _ => false,
        }
    }

    fn step(&mut self, input: lifecycle::Input, facts: &Facts, turn: &mut Turn) {
        let before = self.state;
        self.state = before.step(input);
        turn.decisions.push((before, input, self.state));
        self.limit_grace(facts.now);
        if before != self.state {
            // What failed in one state says nothing about the next.
            self.retries.clear();
        }
    }

    /// A pod that ends has its grace from now on, unless it has less already.
    fn limit_grace(&mut self, now: Timestamp) {
        if let State::Terminating { grace, .. } = self.state {
            let until = time::in_seconds(now, grace);
            self.stop_by = Some(self.stop_by.map_or(until, |before| before.min(until)));
        }
    }

    /// Brings the lifecycle as far as what is known allows.
    fn advance(&mut self, facts: &Facts, turn: &mut Turn) {
        loop {
            self.compute_status(facts);
            let Some(input) = self.next_step(facts, turn) else {
                break;
            };
            let before = self.state;
            self.step(input, facts, turn);
            if before == self.state {
                break;
            }
        }
    }

    /// The next step of the lifecycle that what is known makes due.
    fn next_step(&mut self, facts: &Facts, turn: &mut Turn) -> Option<lifecycle::Input> {
        let ended = |cause, grace| Some(lifecycle::Input::Ended { cause, grace });
        let own_grace = pod::grace_seconds(&self.effective);
        match self.state {
            State::Syncing => {
                if let Some(verdict) = &self.verdict {
                    return ended(verdict.cause, verdict.grace.unwrap_or(own_grace));
                }
                if self.observed.is_none() || !self.admitted {
                    return None;
                }
                if self.completed || self.plan_actions().give_up {
                    return ended(Cause::Completed, own_grace);
                }
                let until = status::deadline(&self.effective, &self.status)?;
                if until > facts.now {
                    return None;
                }
                let message = "Pod was active on the node longer than the specified deadline";
                turn.events.push(event("DeadlineExceeded", message.into()));
                self.verdict = Some(Verdict {
                    cause: Cause::DeadlineExceeded,
                    reason: "DeadlineExceeded".into(),
                    message: message.into(),
                    disruption: None,
                    grace: None,
                });
                ended(Cause::DeadlineExceeded, own_grace)
            }
            State::Terminating { .. } => {
                (self.has_stopped() && !self.owes_claims()).then_some(lifecycle::Input::Stopped)
            }
            State::Terminated { .. } | State::Finished { .. } => None,
        }
    }

    /// What the runtime is to be brought to.
    fn plan_actions(&self) -> actions::PodActions {
        let Some(observed) = &self.observed else {
            return actions::PodActions::default();
        };
        let health = actions::Health {
            probed: &self.probed,
            wanted: &self.wanted,
            resizing: &self.resizing,
            stopped_to_restart: &self.stopped_to_restart,
        };
        let mut actions = actions::compute(&self.effective, observed, &health, |name| {
            self.restart_count(name)
        });
        if !actions.kill_pod {
            self.stop_failed_hooks(&mut actions.kill);
        }
        actions
    }

    /// The restart count that a container without an instance starts from: what the status says, what
    /// was removed on purpose, what the logs tell (upstream's `calcRestartCountByLogDir`).
    fn restart_count(&self, name: &str) -> u32 {
        let status = &self.status;
        let known = [&status.container_statuses, &status.init_container_statuses]
            .into_iter()
            .flatten()
            .flatten()
            .find(|s| s.name == name)
            .map_or(0, |s| u32::try_from(s.restart_count).unwrap_or(0));
        let logged = self.logged.get(name).copied().unwrap_or(0);
        known
            .max(logged)
            .max(self.counts.get(name).copied().unwrap_or(0))
    }

    /// Whether nothing that is observed can change the status any more: what the runtime had has been removed, or
    /// admission refused the pod before anything of it was made. Its containers are not lost then, also for the next agent:
    /// there were none.
    fn status_stands(&self, observed: &ObservedPod) -> bool {
        if let State::Finished { cause } = self.state
            && cause.removes_content()
        {
            return true;
        }
        let status = &self.status;
        let told = [&status.container_statuses, &status.init_container_statuses];
        status.phase.as_deref() == Some("Failed")
            && self.verdict.is_none()
            && observed.containers.is_empty()
            && told.iter().all(|list| list.is_none())
    }

    fn compute_status(&mut self, facts: &Facts) {
        let Some(observed) = &self.observed else {
            return;
        };
        let ended = self.state.has_stopped();
        if self.status_stands(observed) {
            self.completed = pod::is_final(&self.status);
            return;
        }
        if let Some(told) = self.end.as_ref().filter(|_| !ended) {
            // What still runs of it is told when it has been stopped.
            self.has_status(told.clone());
            self.completed = true;
            return;
        }
        let failed = &self.failed_hooks;
        self.problems.retain(|name, (reason, _)| {
            failed.values().any(|of| of == name)
                || !is_settled(&self.effective, observed, name, reason)
        });
        let mut status = status::compute(&status::Facts {
            pod: &self.effective,
            observed,
            previous: &self.status,
            problems: &self.problems,
            held_up: facts.held_up.clone(),
            probed: &self.probed,
            devices: &self.devices,
            has_volumes: self.has_volumes(observed),
            starting: &self.starting(),
            stopped_to_restart: &self.stopped_to_restart,
            wanted: &self.wanted,
            resize: &self.resizing,
            node_ips: &facts.node_ips,
            recursive_read_only: facts.rules.recursive_read_only,
            runtime: &facts.rules.runtime,
            ended,
            verdict: self.verdict.as_ref(),
            now: facts.now,
        });
        if let Some(told) = &self.end {
            status::keep_end(&mut status, told);
        }
        self.completed = pod::is_final(&status);
        if !ended
            && pod::is_final(&status)
            && !pod::is_final(&self.status)
            && (observed.live().next().is_some() || self.may_begin())
        {
            // A final phase says that nothing runs any more, sidecars included.
            status.phase = Some("Running".into());
        } else if pod::is_final(&status) && !pod::is_final(&self.status) && self.owes_claims() {
            // Nor that its devices are still its own.
            let before = self.status.phase.clone();
            status.phase = before.or_else(|| Some("Pending".into()));
        }
        self.has_status(status);
    }

    /// Whether the volumes are set up, by this agent or by the one that has made a container in the pod's sandbox.
    fn has_volumes(&self, observed: &ObservedPod) -> bool {
        let sandbox = observed.sandboxes.first();
        let mut containers = observed.containers.iter();
        self.volumes.at.is_some() || containers.any(|c| sandbox.is_some_and(|s| s.id == c.sandbox))
    }

    /// The same status stays one copy, with the writer and whoever else has it.
    fn has_status(&mut self, status: PodStatus) {
        if *self.status != status {
            self.status = Arc::new(status);
        }
    }

    /// Hands on the status if it is another one, at once or when the start that is under way has had its
    /// moment.
    fn publish(&mut self, facts: &Facts, turn: &mut Turn) {
        if self.status.phase.is_none() {
            // What a mirror told is not believed before the runtime has been looked at.
            return;
        }
        let differs = match (&self.published, self.state) {
            (None, _) => true,
            // That the deletion was seen is told together with the end, which is near.
            (Some(published), state)
                if matches!(state, State::Terminating { .. }) || self.update.intent().deleted =>
            {
                status::substance(published) != status::substance(&self.status)
            }
            (Some(published), _) => *published != self.status,
        };
        if !differs {
            self.publish_at = None;
            return;
        }
        // Of a pod that runs, a change may be what others wait for: that a container is ready no more.
        let is_pending = self
            .published
            .as_ref()
            .is_some_and(|published| published.phase.as_deref() == Some("Pending"));
        let changing = |op: &Op| match (self.state, op) {
            (State::Syncing, Op::Sandbox { .. } | Op::Pull(_) | Op::Start { .. }) => is_pending,
            // It will say what the start that was noted looks like in full.
            (State::Syncing, Op::Observe { .. }) => self.provisional,
            // Nobody waits for the sandbox of a pod that has completed, and it may wait for others.
            (
                State::Terminating {
                    cause: Cause::Completed,
                    ..
                },
                Op::StopSandbox(_),
            ) => false,
            (State::Terminating { .. }, Op::StopSandbox(_) | Op::Observe { .. }) => {
                let observed = self.observed.as_ref();
                observed.is_some_and(|o| o.live().next().is_none())
            }
            _ => false,
        };
        // The first one does not: by it another agent knows that the pod was admitted and may have containers.
        let waits = self.published.is_some() && self.in_flight.iter().any(changing);
        let due = match (waits, self.publish_at) {
            (false, _) => true,
            (true, Some(at)) => at <= facts.now,
            (true, None) => {
                self.publish_at = Some(time::later(facts.now, STATUS_DELAY));
                false
            }
        };
        if due {
            self.publish_at = None;
            self.published = Some(Arc::clone(&self.status));
            turn.publish = Some(Arc::clone(&self.status));
        } else if let Some(at) = self.publish_at {
            turn.wake_at = Some(turn.wake_at.map_or(at, |wake| wake.min(at)));
        }
    }
}

/// Whether a container runs, or is an init container that has done its work: then whatever kept it from
/// being started is over, also where the answer to its start was lost. One that starts over is still to be removed.
fn is_settled(pod: &Pod, observed: &ObservedPod, name: &str, reason: &str) -> bool {
    if reason == status::RESTARTING_ALL {
        return false;
    }
    let init = pod::containers(pod)
        .iter()
        .any(|(role, c)| *role == Role::Init && c.name == name);
    observed.newest(name).is_some_and(|c| {
        c.state == ContainerState::Running
            || (init && c.state == ContainerState::Exited && c.exit_code == 0)
    })
}

fn event(reason: &str, message: String) -> PodEvent {
    PodEvent {
        field_path: None,
        warning: false,
        reason: reason.into(),
        message,
    }
}

fn warning(reason: &str, message: String) -> PodEvent {
    PodEvent {
        warning: true,
        ..event(reason, message)
    }
}
