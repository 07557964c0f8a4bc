//! Whether a container starts now. This is the only place that decides it.
//!
//! `core::pod::actions` says which containers should have another instance, from the pod and the observed state alone:
//! the restart policy, the restart rules, the order of init containers, and whether the pod has a usable sandbox. For
//! each of these containers, [`Worker::decide_start`] checks these conditions in this order, and the first that does not
//! hold decides what happens instead:
//!
//! 1. The container is not being started already.
//! 2. Its last start or image pull has not failed, or the back-off of that failure is over (`operations.rs`).
//! 3. It has not crashed, or its crash-loop back-off is over (`restarts.rs`).
//! 4. Its running instance need not be stopped first.
//! 5. Its image is present; else the image is pulled (`readiness.rs`). Images are pulled in parallel.
//! 6. The pod has a sandbox, and this worker is not stopping it (`stops.rs`).
//! 7. The volumes are up to date (`volumes.rs`).
//! 8. No container before it in the spec is about to start: none is being pulled or started, and none must exit because
//!    its postStart hook has failed. A container does not wait for those in back-off.
//! 9. Nothing prevents changes of the runtime ([`Hold`]): the outcome of every operation is known, not all containers
//!    restart, and the pod is not being stopped.
//!
//! This is step 10 in ARCHITECTURE.md (`SyncPod` in `pkg/kubelet/kuberuntime/kuberuntime_manager.go`). Upstream starts
//! containers one after another in one call, so that a slow image delays the images of later containers.

use std::time::Duration;

use jiff::Timestamp;

use super::plan::{Hold, Plan};
use super::{Facts, Key, Op, PodEvent, Turn, Worker};
use crate::pod;
use crate::pod::actions::{self, PodActions, Start};
use crate::pod::observed::{ObservedPod, Sandbox};
use crate::time;

/// The decision about the start of one container.
enum Decision<'a> {
    /// Nothing begins; a text for users follows the container's name.
    Wait(&'static str),
    /// Nothing begins before this time.
    WaitUntil(Timestamp),
    /// Nothing begins, as its running instance is stopped first.
    Stop,
    /// The image is pulled.
    Pull,
    /// The container is started in this sandbox.
    Start(&'a Sandbox),
    /// The container would be started, but the runtime must not be changed.
    Held,
}

/// What the decisions of one plan share.
struct Situation<'a> {
    facts: &'a Facts,
    actions: &'a PodActions,
    observed: &'a ObservedPod,
    sandbox: Option<&'a Sandbox>,
    /// The names of the pod's containers, in the order of their start.
    order: Vec<String>,
    hold: Option<&'a Hold>,
}

impl Situation<'_> {
    fn place(&self, name: &str) -> Option<usize> {
        self.order.iter().position(|n| n == name)
    }
}

impl Worker {
    /// Plans image pulls in parallel and starts in the order of the spec.
    pub(super) fn plan_starts(
        &mut self,
        facts: &Facts,
        actions: &PodActions,
        observed: &ObservedPod,
        hold: Option<&Hold>,
        turn: &mut Turn,
        plan: &mut Plan,
    ) {
        let id = actions.sandbox.as_ref();
        let situation = Situation {
            facts,
            actions,
            observed,
            sandbox: id.and_then(|id| observed.sandboxes.iter().find(|s| s.id == *id)),
            order: pod::containers(self.pod())
                .iter()
                .map(|(_, c)| c.name.clone())
                .collect(),
            hold,
        };
        // The places of containers that this plan pulls or starts.
        let mut begun = vec![];
        for start in &actions.start {
            let name = &start.container.name;
            let text = match self.decide_start(&situation, start, &begun, turn) {
                Decision::Stop => continue,
                Decision::Wait(text) => text,
                Decision::WaitUntil(until) => {
                    plan.wake.push(until);
                    "waits for its restart"
                }
                Decision::Pull => {
                    begun.push(situation.place(name));
                    plan.ops.push(Op::Pull(start.clone()));
                    "waits for its image"
                }
                Decision::Start(sandbox) => {
                    begun.push(situation.place(name));
                    plan.ops.push(Op::Start {
                        start: start.clone(),
                        sandbox: sandbox.id.clone(),
                        attempt: sandbox.attempt,
                        ips: sandbox.ips.clone(),
                    });
                    "is being started"
                }
                Decision::Held => {
                    begun.push(situation.place(name));
                    "is being started"
                }
            };
            plan.container_waits
                .push(format!("container {name} {text}"));
        }
        self.add_init_waits(observed, actions, plan);
    }

    /// Decides about the start of one container, as the module describes. `begun` has the places of the containers that
    /// this plan pulls or starts.
    fn decide_start<'a>(
        &mut self,
        situation: &Situation<'a>,
        start: &Start,
        begun: &[Option<usize>],
        turn: &mut Turn,
    ) -> Decision<'a> {
        let name = &start.container.name;
        let key = Key::Start(name.clone());
        if self.operations.is_in_flight(&key) {
            return Decision::Wait("is being started");
        }
        if let Some(until) = self.operations.blocked_until(&key, situation.facts.now) {
            return Decision::WaitUntil(until);
        }
        if let Some(until) = self.crash_loop_until(situation, start, turn) {
            return Decision::WaitUntil(until);
        }
        if situation.actions.kill.iter().any(|k| k.name == *name) {
            return Decision::Stop;
        }
        if !self.readiness.has_image(name) {
            return Decision::Pull;
        }
        let abandoned = |sandbox: &&Sandbox| self.is_sandbox_abandoned(&sandbox.id);
        let Some(sandbox) = situation.sandbox.filter(|s| !abandoned(s)) else {
            return Decision::Wait("waits for the pod's sandbox");
        };
        if !self.readiness.volumes.are_fresh() {
            return Decision::Wait("waits for the pod's volumes");
        }
        let is_before = |place: Option<usize>| place < situation.place(name);
        let ops = self.operations.in_flight();
        let in_flight = ops.filter_map(Op::started_container);
        let mut earlier = in_flight.chain(self.restarts.failed_hooks());
        if begun.iter().any(|place| is_before(*place))
            || earlier.any(|other| is_before(situation.place(other)))
        {
            return Decision::Wait("waits for the containers before it");
        }
        if situation.hold.is_some() {
            return Decision::Held;
        }
        Decision::Start(sandbox)
    }

    /// Until when a crashed container waits for its restart. Reports the crash loop in the status and by an event.
    fn crash_loop_until(
        &mut self,
        situation: &Situation<'_>,
        start: &Start,
        turn: &mut Turn,
    ) -> Option<Timestamp> {
        let name = &start.container.name;
        let finished = self.observation.last_exit(name)?;
        let now = situation.facts.now;
        let held = self.restarts.remaining(start, finished, now)?;
        let shown = time::shown(Duration::try_from(held.delay).unwrap_or_default());
        let described = pod::described(self.pod());
        let message =
            format!("back-off {shown} restarting failed container={name} pod={described}");
        self.publication.apply_crash_loop(name, message);
        let attempt = situation.observed.newest(name).map_or(0, |c| c.attempt);
        if self.restarts.apply_waiting(name, attempt) {
            let message = format!("Back-off restarting failed container {name} in pod {described}");
            turn.events.push(PodEvent {
                field_path: Some(start.role.field_path(name)),
                ..PodEvent::warning("BackOff", message)
            });
        }
        Some(held.until)
    }

    /// Whether the worker is stopping the pod's sandbox, or has stopped it and has not observed the runtime since.
    fn is_sandbox_abandoned(&self, sandbox: &str) -> bool {
        let stop = Key::StopSandbox(sandbox.to_owned());
        self.stops.has_stopped_sandbox(sandbox) || self.operations.is_in_flight(&stop)
    }

    /// Reports containers that wait for an init container or a sidecar.
    fn add_init_waits(&self, observed: &ObservedPod, actions: &PodActions, plan: &mut Plan) {
        let Some(sandbox) = actions
            .sandbox
            .as_ref()
            .filter(|_| actions.start.is_empty())
        else {
            return;
        };
        // Instances in an older sandbox do not count: all init containers run again in a new one.
        let in_sandbox = |name: &str| observed.newest(name).is_some_and(|c| c.sandbox == *sandbox);
        let stopped = self.restarts.stopped_to_restart();
        let spec = pod::spec(self.pod());
        let mut regular = spec.containers.iter();
        let missing = regular.find(|c| {
            !in_sandbox(&c.name) && actions::should_start(self.pod(), c, observed, stopped)
        });
        let mut init = spec.init_containers.iter().flatten();
        let before = init.rfind(|c| in_sandbox(&c.name));
        if let (Some(missing), Some(before)) = (missing, before) {
            plan.container_waits.push(format!(
                "container {} waits for init container {} to complete or start",
                missing.name, before.name
            ));
        }
    }
}
