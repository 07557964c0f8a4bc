//! The worker of one pod. Takes a message from its inbox, lets `core::pod::worker` decide, and
//! starts and cancels operations as decided. Then it sleeps until the next message or the time
//! that core returned; there is no periodic tick.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tracing::Instrument as _;

use super::asset::Assets;
use super::inbox::{Inbox, Message, Report};
use super::journal::{Journals, Log, within_steps};
use super::probing::{self, Probing};
use super::relist::ObservedFingerprints;
use super::status::StatusWriter;
use super::sync::{self, Job, Tools};
use crate::events::{Events, Kind};
use crate::metrics::{Metrics, PodStart};
use crate::node::ledger::{Admission, LedgerHandle};
use crate::node::{ClaimManager, DeviceManager};
use crate::volume::Volumes;
use holdfast_config::Config;
use holdfast_core::node::claims::has_claims;
use holdfast_core::pod;
use holdfast_core::pod::exits::Exits;
use holdfast_core::pod::journal::Step;
use holdfast_core::pod::lifecycle::{Cause, State};
use holdfast_core::pod::record::Record;
use holdfast_core::pod::resize;
use holdfast_core::pod::status::devices::OfPod as DeviceHealth;
use holdfast_core::pod::worker::{Facts, Input, Key, Op, Rules, Turn, Update, Worker};
use holdfast_cri::Features;
use holdfast_kubeapi::pods::PodApi;
use holdfast_sys::clock::{Clock, Watch};

/// What all workers use.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub api: Arc<dyn PodApi>,
    pub clock: Clock,
    pub events: Events,
    pub metrics: Arc<Metrics>,
    pub journals: Arc<Journals>,
    pub ledger: LedgerHandle,
    pub devices: Arc<DeviceManager>,
    pub claims: Arc<ClaimManager>,
    /// The features that the runtime last reported.
    pub features: watch::Sender<Features>,
    pub node_ips: watch::Sender<Vec<String>>,
    pub probes: Arc<probing::Parts>,
    pub sync: Arc<sync::Parts>,
}

/// An operation in progress. Dropping it cancels the operation.
struct Running {
    serial: u64,
    begun: Instant,
    _task: AbortOnDropHandle<()>,
}

/// A worker and its connections to the rest of the agent.
struct Shell {
    parts: Arc<Parts>,
    worker: Worker,
    tools: Arc<Tools>,
    seen: ObservedFingerprints,
    probing: Probing,
    assets: Assets,
    running: BTreeMap<Key, Running>,
    /// Whether a start was cancelled since the runtime was last observed.
    start_cancelled: bool,
    serial: u64,
    first_seen: Timestamp,
    clock: Watch,
    /// Whether the pod has been observed running, or was running when this agent started.
    ran: bool,
    /// Whether the ledger has released the pod's requests.
    requests_released: bool,
    exits: Exits,
    turns: u64,
}

fn has_run(worker: &Worker) -> bool {
    let object = worker.update().status_object();
    object.is_some_and(|object| pod::phase(object) != "Pending")
}

/// Runs until the pod has terminated and all its resources are released.
pub async fn run(
    parts: Arc<Parts>,
    worker: Worker,
    admission: Option<Admission>,
    inbox: Inbox,
    seen: ObservedFingerprints,
) {
    let log = parts
        .journals
        .open(&worker.update().pod, parts.clock, &parts.metrics);
    let changed = inbox.clone();
    let volumes = Volumes::new(Arc::new(move || changed.send(Input::VolumesChanged)));
    let (writer, uid) = (
        StatusWriter::start(
            Arc::clone(&parts.api),
            Arc::clone(&parts.metrics),
            parts.clock,
        ),
        pod::uid(worker.pod()).to_owned(),
    );
    let starts = TaskTracker::new();
    // Closed immediately so that `wait()` can be called repeatedly; new tasks may still be tracked.
    starts.close();
    log.start_record(Record::new(
        rules(&parts, &Assets::default()),
        parts.node_ips.borrow().clone(),
        &worker,
    ));
    let mut shell = Shell {
        parts: Arc::clone(&parts),
        probing: Probing::new(inbox.clone(), log.clone()),
        ran: has_run(&worker),
        worker,
        first_seen: parts.clock.now(),
        clock: Watch::of(parts.clock),
        tools: Arc::new(Tools {
            parts: Arc::clone(&parts.sync),
            log,
            writer,
            volumes: tokio::sync::Mutex::new(volumes),
            inbox,
            messages: Mutex::default(),
            starts,
            setup: watch::Sender::default(),
            ending: CancellationToken::new(),
            end_awaited: CancellationToken::new(),
            admission: Mutex::new(admission),
        }),
        seen,
        requests_released: false,
        exits: Exits::default(),
        assets: Assets::default(),
        running: BTreeMap::new(),
        start_cancelled: false,
        serial: 0,
        turns: 0,
    };
    if !shell.device_health().is_empty() {
        // An earlier agent has assigned devices to the pod.
        shell.tools.inbox.send(Input::Devices(BTreeMap::new()));
    }
    let mut input = Input::Tick;
    while let Some(wake_at) = shell.take(input) {
        input = shell.next_input(wake_at).await;
    }
    parts.ledger.release(&uid);
    parts.journals.mark_deleted(&uid);
    parts.metrics.remove_pod(shell.worker.pod());
}

fn rules(parts: &Parts, assets: &Assets) -> Rules {
    let span = |time: Duration| SignedDuration::try_from(time).unwrap_or(SignedDuration::MAX);
    Rules {
        sync_frequency: span(parts.config.sync_frequency),
        max_backoff: span(parts.config.max_backoff),
        mirrors: parts.config.kubeconfig.is_some(),
        recursive_read_only: parts
            .features
            .borrow()
            .handler(assets.handler())
            .recursive_read_only,
        runtime: parts.features.borrow().runtime.clone(),
    }
}

impl Shell {
    fn log(&self) -> &Log {
        &self.tools.log
    }

    /// The health of the devices of the pod's containers.
    fn device_health(&self) -> DeviceHealth {
        let (pod, parts) = (self.worker.pod(), &self.parts);
        let mut health = parts.devices.read(|devices| devices.health(pod::uid(pod)));
        if has_claims(pod) {
            for (container, devices) in parts.claims.health(pod) {
                health.entry(container).or_default().extend(devices);
            }
        }
        health
    }

    /// Returns the next input. Drops results of cancelled operations.
    async fn next_input(&mut self, wake_at: Option<Instant>) -> Input {
        loop {
            match self.tools.inbox.next(wake_at).await {
                // The message may be old: read the current health.
                Message::Input(Input::Devices(_)) => return Input::Devices(self.device_health()),
                Message::Input(input) => return input,
                Message::Done(report) => {
                    if let Some(input) = self.take_report(report) {
                        return input;
                    }
                }
            }
        }
    }

    fn take_report(&mut self, report: Report) -> Option<Input> {
        let current = self
            .running
            .get(&report.key)
            .is_some_and(|r| r.serial == report.serial);
        if !current {
            return None;
        }
        if let Some(running) = self.running.remove(&report.key) {
            let operation = match self.worker.state {
                State::Syncing if self.turns <= 1 => "create",
                State::Syncing => "sync",
                _ => "kill",
            };
            self.parts
                .metrics
                .sync_completed(operation, running.begun.elapsed());
        }
        if let Some(asset) = report.asset {
            self.assets.keep(asset);
        }
        Some(Input::Done {
            key: report.key,
            outcome: report.outcome,
        })
    }

    /// Handles an input. If the clock was changed, this is handled first.
    fn take(&mut self, input: Input) -> Option<Option<Instant>> {
        if let Some(by) = self.clock.moved() {
            tracing::info!(%by, "the clock was set, or this machine was suspended; adjusting deadlines");
            self.turn(Input::ClockMoved(by))?;
        }
        self.turn(input)
    }

    /// Runs one turn: lets core decide, and starts the resulting operations. Returns the time to
    /// wake up, or `None` if the pod has left this node.
    fn turn(&mut self, input: Input) -> Option<Option<Instant>> {
        self.turns += 1;
        let now = self.parts.clock.now();
        let facts = Facts {
            now,
            node_ips: self.parts.node_ips.borrow().clone(),
            blocking_reason: self.log().blocking_reason(),
            rules: rules(&self.parts, &self.assets),
        };
        let object_before = object_of(self.worker.update());
        let pod_before = Arc::clone(&self.worker.update().pod);
        let was_removed = self.worker.update().removed;
        let kept = input.clone();
        let turn = self.worker.turn(&facts, input);
        self.log().record(&facts, kept, &turn, &self.worker);
        for (before, input, after) in &turn.decisions {
            self.log().decided(*before, *input, *after);
        }
        self.log()
            .set_waiting(self.worker.waiting().map(ToOwned::to_owned));
        self.log_removal(was_removed);
        self.emit_events(&turn);
        let pod_now = &self.worker.update().pod;
        if !Arc::ptr_eq(&pod_before, pod_now) {
            let changes = resize::requested_changes(&pod_before, pod_now);
            self.parts.metrics.record_resize_request(&changes);
        }
        if self.worker.state.is_ending() {
            self.tools.ending.cancel();
        }
        if let State::Terminating { cause, .. } = self.worker.state
            && cause != Cause::Completed
        {
            self.tools.end_awaited.cancel();
        }
        for key in &turn.cancel {
            self.running.remove(key);
            self.start_cancelled |= matches!(key, Key::Start(_));
        }
        self.update_probes(&turn);
        self.release_requests();
        let publish = turn.publish.is_some() || object_before != object_of(self.worker.update());
        if publish {
            self.publish_status();
        }
        for op in turn.begin {
            self.begin(op);
        }
        if turn.left_node {
            return None;
        }
        let wait = turn.wake_at.map(|at| {
            let left = Duration::try_from(at.duration_since(now)).unwrap_or_default();
            Instant::now() + left.max(Duration::from_millis(1))
        });
        if let Some(at) = turn.wake_at {
            self.log().set_retry(at);
        }
        Some(wait)
    }

    /// Logs that a pod was removed from its source while its containers are still being stopped: after a forced
    /// deletion the API no longer shows the pod.
    fn log_removal(&self, was_removed: bool) {
        let is_new = !was_removed && self.worker.update().removed;
        if let (State::Terminating { grace, .. }, true) = (self.worker.state, is_new) {
            tracing::info!(
                grace_seconds = grace,
                "the pod was removed from its source; stopping its containers"
            );
        }
    }

    fn emit_events(&self, turn: &Turn) {
        for event in &turn.events {
            let kind = if event.warning {
                Kind::Warning
            } else {
                Kind::Normal
            };
            self.parts.events.pod(
                self.worker.pod(),
                event.field_path.clone(),
                kind,
                &event.reason,
                event.message.clone(),
            );
        }
        if let Some(why) = self.worker.waiting() {
            tracing::trace!(why, "the pod is waiting");
        }
    }

    /// Updates probes and the known fingerprint after an observation.
    fn update_probes(&mut self, turn: &Turn) {
        let uid = pod::uid(self.worker.pod());
        if let State::Finished { .. } = self.worker.state {
            // A finished worker observes nothing: its exited containers stay
            // listed or are removed, and neither is a change.
            self.seen.forget(uid);
        } else if turn.observed || !turn.decisions.is_empty() || !turn.begin.is_empty() {
            let observed = self.worker.observed();
            self.seen.set(uid, observed.map_or(0, |o| o.fingerprint()));
        }
        self.log_exits(turn);
        match self.worker.state {
            State::Syncing | State::Terminating { .. } => {
                let Some(observed) = self.worker.observed().cloned() else {
                    return;
                };
                let probes = &self.parts.probes;
                self.probing.reconcile(probes, &self.worker, &observed);
                if self.worker.state.is_ending() {
                    self.probing
                        .stop_restarting_probes(self.worker.pod(), &observed);
                }
            }
            State::Terminated { .. } | State::Finished { .. } => self.probing.stop(),
        }
    }

    /// Logs exits of containers, so that the node's log names a crash loop.
    fn log_exits(&mut self, turn: &Turn) {
        let Some(observed) = self.worker.observed().filter(|_| turn.observed) else {
            return;
        };
        let now = self.parts.clock.now();
        for exit in self.exits.exits_to_log(observed, self.first_seen, now) {
            tracing::info!(
                container = exit.container,
                exit_code = exit.code,
                reason = exit.reason,
                restarts = exit.restarts,
                omitted = exit.omitted,
                "a container exited"
            );
        }
    }

    /// Releases the requests of a pod whose containers have stopped and whose terminal status is published: other pods
    /// may use them before the scheduler reassigns them.
    fn release_requests(&mut self) {
        if self.worker.terminal_status_published()
            && !std::mem::replace(&mut self.requests_released, true)
        {
            let uid = pod::uid(self.worker.pod());
            self.parts.ledger.release_requests(uid, true);
        }
    }

    /// Steps 1 and 3: records the startup latency when the pod is first observed
    /// running, and passes the status to the writer.
    fn publish_status(&mut self) {
        let object = self.worker.update().status_object().cloned();
        // Sends the status that is due, not the latest: a delayed status must not be published early.
        if let Some(published) = self.worker.published() {
            self.tools.writer.publish(object, published);
        }
        if self.ran || self.worker.status().phase.as_deref() != Some("Running") {
            return;
        }
        self.ran = true;
        let (parts, pod) = (&self.parts, self.worker.pod());
        let now = parts.clock.now();
        let since = |at: Timestamp| now.duration_since(at).as_secs_f64();
        let created = pod
            .metadata
            .creation_timestamp
            .as_ref()
            .map_or(self.first_seen, |t| t.0);
        let stateful = pod::spec(pod)
            .volumes
            .iter()
            .flatten()
            .any(|v| v.persistent_volume_claim.is_some() || v.ephemeral.is_some());
        parts.metrics.pod_started(PodStart {
            seen: since(self.first_seen),
            created: since(created),
            images: self.log().took(Step::Image).as_secs_f64(),
            stateful,
            network: !pod::host_network(pod),
        });
    }

    /// Starts an operation in its own task, which reports to the inbox.
    fn begin(&mut self, op: Op) {
        if self.serial == 0 {
            let after = self.parts.clock.now().duration_since(self.first_seen);
            let containers = pod::spec(self.worker.pod()).containers.len();
            let metrics = &self.parts.metrics;
            metrics.first_sync(containers, after.as_secs_f64());
        }
        self.serial += 1;
        let (serial, key) = (self.serial, op.key());
        let job = Job {
            tools: Arc::clone(&self.tools),
            pod: Arc::clone(self.worker.pod()),
            update: self.worker.update().clone(),
            observed: self.worker.observed().cloned().unwrap_or_default(),
            resizing: self.worker.resizing().clone(),
            assets: self.assets.clone(),
            start_cancelled: matches!(op, Op::Observe { .. })
                && std::mem::take(&mut self.start_cancelled),
            can_wait: self.worker.is_sandbox_stop_deferrable(),
        };
        let span = span(self.worker.pod(), self.worker.state);
        let (reported, steps) = (key.clone(), op.steps());
        let work = async move {
            let (outcome, asset) = job.execute(&op).await;
            job.tools.inbox.report(Report {
                serial,
                key: reported,
                outcome,
                asset,
            });
        };
        // The worker's span adds the pod to log lines, even without tracing.
        let work = within_steps(steps, work)
            .instrument(span)
            .instrument(tracing::Span::current());
        let task = tokio::spawn(work);
        self.running.insert(
            key,
            Running {
                serial,
                begun: Instant::now(),
                _task: AbortOnDropHandle::new(task),
            },
        );
    }
}

fn object_of(update: &Update) -> Option<(Option<String>, Option<String>)> {
    let object = update.status_object()?;
    let metadata = &object.metadata;
    Some((metadata.uid.clone(), metadata.resource_version.clone()))
}

/// The trace span of an operation.
fn span(pod: &Pod, state: State) -> tracing::Span {
    tracing::info_span!(
        target: "trace::pod",
        "syncPod",
        "k8s.pod.uid" = pod::uid(pod),
        "k8s.pod.name" = pod.metadata.name,
        "k8s.namespace.name" = pod.metadata.namespace,
        "k8s.pod.update_type" = if state == State::Syncing { "sync" } else { "kill" },
    )
}
