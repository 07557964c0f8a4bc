//! The probes of one pod: one task for each container instance and kind of probe. A changed result goes to the worker's
//! inbox (upstream's `pkg/kubelet/prober/worker.go`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::{CancellationToken, DropGuard};

use kube::ResourceExt as _;

use super::inbox::Inbox;
use super::journal::Log;
use crate::events::{Events, Kind as Severity};
use crate::metrics::{Metrics, Probe};
use holdfast_core::pod::journal::{Progress, Step};
use holdfast_core::pod::observed::{ContainerState, ObservedPod};
use holdfast_core::pod::probe::{self, Answer, Check, Counter, Health, Kind, Timing};
use holdfast_core::pod::worker::{Input, Worker};
use holdfast_core::pod::{self, Role};
use holdfast_cri::{Runtime, RuntimeErrorKind};
use holdfast_probes::Dialer;
use holdfast_sys::clock::Clock;

/// How often a probe is attempted before its result is unknown.
const MAX_ATTEMPTS: usize = 3;
/// A container that started more than this before the agent was already running when the agent started.
const ADOPTED_AFTER: SignedDuration = SignedDuration::from_secs(10);

/// The probe tasks of one container instance. Dropping a guard stops its task after the probe in progress has
/// completed. containerd 2.1 may take long to stop a container while an ExecSync is pending whose client has cancelled.
/// Upstream does not cancel probes either (`worker.stop`).
struct Instance {
    name: String,
    tasks: BTreeMap<Kind, DropGuard>,
    started: Arc<watch::Sender<bool>>,
}

/// A pod's probes. Dropping it stops them.
pub(crate) struct Probing {
    inbox: Inbox,
    instances: BTreeMap<String, Instance>,
    log: Log,
}

/// What probes use.
pub(crate) struct Parts {
    pub runtime: Arc<dyn Runtime>,
    /// Network access.
    pub dialer: Arc<dyn Dialer>,
    pub clock: Clock,
    pub events: Events,
    pub metrics: Arc<Metrics>,
    pub node_ips: watch::Sender<Vec<String>>,
    /// The start time of this agent.
    pub started: Timestamp,
}

/// The state of one probe task.
struct Prober {
    parts: Arc<Parts>,
    pod: Arc<Pod>,
    role: Role,
    container: Container,
    id: String,
    /// The pod's own address. `None` for a pod on the host network, which uses the
    /// node's address; that may change while the pod runs.
    ip: Option<String>,
    kind: Kind,
    timing: Timing,
    first: Instant,
    /// The current result.
    last: Option<bool>,
    inbox: Inbox,
    started: Arc<watch::Sender<bool>>,
    /// Cancelled when the result is no longer needed.
    stop: CancellationToken,
    log: Log,
}

impl Probing {
    /// Creates an instance without probes; results go to `inbox`.
    #[must_use]
    pub fn new(inbox: Inbox, log: Log) -> Probing {
        Probing {
            inbox,
            instances: BTreeMap::new(),
            log,
        }
    }

    /// Starts probes of containers that are running, and stops those of containers that are not. A container whose
    /// start has not completed gets its probes later.
    pub fn reconcile(&mut self, parts: &Arc<Parts>, worker: &Worker, observed: &ObservedPod) {
        let (pod, starting) = (worker.pod(), worker.starting());
        let mut running = vec![];
        for (role, container) in pod::containers(pod) {
            if !matches!(role, Role::Regular | Role::Sidecar)
                || Kind::ALL.iter().all(|kind| kind.of(&container).is_none())
            {
                continue;
            }
            let Some(seen) = observed
                .newest(&container.name)
                .filter(|c| c.state == ContainerState::Running)
            else {
                continue;
            };
            running.push(seen.id.clone());
            if worker.state.is_ending()
                || starting.contains(container.name.as_str())
                || self.instances.contains_key(&seen.id)
            {
                continue;
            }
            let since = seen.started_at.unwrap_or(seen.created_at);
            let sandbox = observed.sandboxes.first();
            let ip = sandbox
                .filter(|_| !pod::host_network(pod))
                .map(|sandbox| sandbox.ips.first().cloned().unwrap_or_default());
            let health = worker.probed().health(&seen.id);
            self.begin(parts, pod, role, &container, (&seen.id, since, ip), health);
        }
        self.instances.retain(|id, instance| {
            let stays = running.contains(id);
            if !stays {
                // Closes the steps of this instance, so that its last results are not reported any more.
                Kind::ALL
                    .into_iter()
                    .for_each(|kind| self.log.close(step(kind), &instance.name));
            }
            stays
        });
    }

    fn begin(
        &mut self,
        parts: &Arc<Parts>,
        pod: &Arc<Pod>,
        role: Role,
        container: &Container,
        (id, since, ip): (&str, Timestamp, Option<String>),
        mut health: Health,
    ) {
        let is_started = container.startup_probe.is_none() || health.started == Some(true);
        let started = Arc::new(watch::Sender::new(is_started));
        let mut tasks = BTreeMap::new();
        for kind in Kind::ALL {
            let runs = kind != Kind::Startup || !is_started;
            let Some(spec) = kind.of(container).filter(|_| runs) else {
                continue;
            };
            let (timing, problem) = Timing::of(pod, &container.name, kind, spec);
            if let Some(problem) = problem {
                parts.events.pod(
                    pod,
                    Some(role.field_path(&container.name)),
                    Severity::Warning,
                    "InvalidProbePeriod",
                    problem,
                );
            }
            let stop = CancellationToken::new();
            let prober = Prober {
                parts: Arc::clone(parts),
                pod: Arc::clone(pod),
                role,
                container: container.clone(),
                id: id.to_owned(),
                ip: ip.clone(),
                kind,
                timing,
                first: Instant::now()
                    + first_probe(parts.started, parts.clock.now(), id, since, &timing),
                inbox: self.inbox.clone(),
                last: *health.of(kind),
                started: Arc::clone(&started),
                stop: stop.clone(),
                log: self.log.clone(),
            };
            // Without a parent: a probe outlives the worker's turn that starts it.
            let span = tracing::info_span!(parent: None, "container", pod = pod::full_name(pod), uid = pod::uid(pod), container = container.name);
            tokio::spawn(tracing::Instrument::instrument(prober.run(), span));
            tasks.insert(kind, stop.drop_guard());
        }
        self.instances.insert(
            id.to_owned(),
            Instance {
                name: container.name.clone(),
                tasks,
                started,
            },
        );
    }

    /// Stops liveness and startup probes of a terminating pod, as no container is restarted any more. Sidecars are no
    /// exception (KEP-4438 would change that). Readiness is still published.
    pub(crate) fn stop_restarting_probes(&mut self, pod: &Pod, observed: &ObservedPod) {
        for (_, container) in pod::containers(pod) {
            if let Some(seen) = observed.newest(&container.name)
                && let Some(instance) = self.instances.get_mut(&seen.id)
            {
                instance.tasks.retain(|kind, _| *kind == Kind::Readiness);
                instance.started.send_replace(true);
            }
        }
    }

    /// Stops all probes.
    pub fn stop(&mut self) {
        for instance in std::mem::take(&mut self.instances).into_values() {
            Kind::ALL
                .into_iter()
                .for_each(|kind| self.log.close(step(kind), &instance.name));
        }
    }
}

/// Time until the first probe of a container that has run since `since`: the rest of
/// `initialDelaySeconds`. Containers that were running when the agent started are also spread over their
/// period, so that a restart of the agent causes no burst.
fn first_probe(
    agent_started: Timestamp,
    now: Timestamp,
    id: &str,
    since: Timestamp,
    timing: &Timing,
) -> Duration {
    let up = Duration::try_from(now.duration_since(since)).unwrap_or_default();
    let rest = timing.delay.saturating_sub(up);
    if agent_started.duration_since(since) <= ADOPTED_AFTER {
        return rest;
    }
    let share = id.bytes().fold(0_u64, |sum, b| {
        sum.wrapping_mul(31).wrapping_add(u64::from(b))
    }) % 1000;
    rest.max(timing.period.mul_f64(share as f64 / 1000.0))
}

fn step(kind: Kind) -> Step {
    match kind {
        Kind::Startup => Step::Startup,
        Kind::Readiness => Step::Readiness,
        Kind::Liveness => Step::Liveness,
    }
}

impl Prober {
    /// Waits for a future; `None` if the probe is stopped first.
    async fn unless_stopped<T>(&self, wait: impl Future<Output = T>) -> Option<T> {
        self.stop.run_until_cancelled(wait).await
    }

    async fn run(mut self) {
        let mut started = self.started.subscribe();
        let begin = async {
            if self.kind != Kind::Startup {
                // This task owns a sender, so the channel cannot close.
                let _ = started.wait_for(|s| *s).await;
            }
            tokio::time::sleep_until(self.first).await;
        };
        if self.unless_stopped(begin).await.is_none() {
            return;
        }
        let mut ticks = tokio::time::interval(self.timing.period);
        // After a slow probe the next one is delayed; probes never accumulate.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut counter = Counter::default();
        if self.kind != Kind::Liveness {
            self.log.begin(step(self.kind), &self.container.name);
        }
        loop {
            if self.unless_stopped(ticks.tick()).await.is_none() {
                return;
            }
            let Some(good) = self.probe().await else {
                continue;
            };
            let result = counter.step(good, &self.timing);
            let changed = result.is_some_and(|result| self.last.replace(result) != Some(result));
            if good {
                // A success also clears failures below the threshold, which never became a result.
                // Liveness counts as successful until it fails.
                let whole = self.last.unwrap_or(self.kind == Kind::Liveness);
                if changed && whole {
                    self.log
                        .end(step(self.kind), &self.container.name, Progress::Done);
                } else {
                    self.log
                        .recover(step(self.kind), &self.container.name, whole);
                }
            }
            let Some(result) = result.filter(|_| changed) else {
                continue;
            };
            if self.kind == Kind::Startup && result {
                self.started.send_replace(true);
            }
            // Liveness starts as successful, so only its failure is a change.
            if self.kind != Kind::Liveness || !result {
                self.inbox.send(Input::Probed {
                    id: self.id.clone(),
                    kind: self.kind,
                    result,
                });
            }
            if self.kind == Kind::Startup || (self.kind == Kind::Liveness && !result) {
                // This probe is finished for this container instance.
                return;
            }
        }
    }

    fn emit_event(&self, reason: &str, message: String) {
        self.parts.events.pod(
            &self.pod,
            Some(self.role.field_path(&self.container.name)),
            Severity::Warning,
            reason,
            message,
        );
    }

    /// Probes once. `None` if the probe could not run, or was stopped meanwhile.
    async fn probe(&self) -> Option<bool> {
        let begun = Instant::now();
        let mut answer = self.run_check().await;
        for _ in 1..MAX_ATTEMPTS {
            if !matches!(answer, Answer::Unknown(_)) || self.stop.is_cancelled() {
                break;
            }
            answer = self.run_check().await;
        }
        if self.stop.is_cancelled() {
            return None;
        }
        let name = self.kind.name();
        let result = match &answer {
            Answer::Success | Answer::Warning(_) => "successful",
            Answer::Failure(_) => "failed",
            Answer::Unknown(_) => "unknown",
        };
        let (namespace, pod) = (
            self.pod.namespace().unwrap_or_default(),
            self.pod.name_any(),
        );
        let of = [
            self.container.name.as_str(),
            &namespace,
            &pod,
            pod::uid(&self.pod),
        ];
        self.parts.metrics.probed(Probe {
            of,
            kind: name,
            result,
            took: begun.elapsed(),
        });
        match answer {
            Answer::Success => Some(true),
            Answer::Warning(output) => {
                self.emit_event("ProbeWarning", format!("{name} probe warning: {output}"));
                Some(true)
            }
            Answer::Failure(output) => {
                self.log.fail(
                    step(self.kind),
                    &self.container.name,
                    &output,
                    Some(self.next()),
                );
                self.emit_event("Unhealthy", format!("{name} probe failed: {output}"));
                Some(false)
            }
            Answer::Unknown(error) => {
                self.log.fail(
                    step(self.kind),
                    &self.container.name,
                    &error,
                    Some(self.next()),
                );
                self.emit_event(
                    "Unhealthy",
                    format!("{name} probe errored and resulted in unknown state: {error}"),
                );
                None
            }
        }
    }

    fn next(&self) -> Timestamp {
        self.parts.clock.now()
            + SignedDuration::try_from(self.timing.period).unwrap_or(SignedDuration::ZERO)
    }

    async fn run_check(&self) -> Answer {
        let Some(spec) = self.kind.of(&self.container) else {
            return Answer::Success;
        };
        let node_ip = || self.parts.node_ips.borrow().first().cloned();
        let ip = self.ip.clone().or_else(node_ip).unwrap_or_default();
        let check = match probe::check(spec, &self.container, &ip) {
            Ok(check) => check,
            Err(error) => return Answer::Unknown(error),
        };
        let (dialer, timeout) = (&self.parts.dialer, self.timing.timeout);
        let failed =
            |result: Result<(), String>| result.map_or_else(Answer::Failure, |()| Answer::Success);
        match check {
            Check::Http(request) => probe::of_http(
                &request,
                dialer
                    .http(&request, timeout)
                    .await
                    .map_err(|e| e.to_string()),
            ),
            Check::Tcp(host, port) => failed(dialer.tcp(&host, port, timeout).await),
            Check::Grpc(host, port, service) => {
                failed(dialer.grpc(&host, port, &service, timeout).await)
            }
            Check::Exec(command) => match self
                .parts
                .runtime
                .exec(&self.id, &command, Some(timeout))
                .await
            {
                Ok(done) if done.code == 0 => Answer::Success,
                Ok(done) => Answer::Failure(probe::limit_output(&done.output)),
                Err(error) if error.kind == RuntimeErrorKind::Timeout => Answer::Failure(format!(
                    "command timed out: {:?} timed out after {}",
                    command.join(" "),
                    holdfast_core::time::shown(timeout)
                )),
                Err(error) => Answer::Unknown(error.to_string()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_probe_waits_for_the_delay_also_after_a_restart_of_the_agent() {
        let timing = Timing {
            delay: Duration::from_secs(300),
            period: Duration::from_secs(10),
            timeout: Duration::from_secs(1),
            successes: 1,
            failures: 3,
        };
        let at = |second| Timestamp::from_second(second).expect("a time");
        // Started by this agent: just now, 50 s ago, and long ago.
        let own = |now| first_probe(at(0), at(now), "c", at(100), &timing);
        assert_eq!(own(100), Duration::from_secs(300));
        assert_eq!(own(150), Duration::from_secs(250));
        assert_eq!(own(1000), Duration::ZERO);
        // Found running: thirty seconds old, and an hour old.
        let found = |now| first_probe(at(now), at(now), "c", at(0), &timing);
        assert_eq!(found(30), Duration::from_secs(270));
        assert!(found(3600) < timing.period);
    }
}
