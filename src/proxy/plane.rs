//! The thread that changes the kernel. It takes changed services from the inbox, hands them to the data plane and to the DNS
//! zone, commits all of them as one transaction, and audits the rules at fixed times.
//!
//! A change waits until the pause after the previous transaction is over. The pause is proportional to the transaction's
//! duration, so that a flood of changes takes a tenth of a processor at most, and a single change is committed at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;

use holdfast_core::lock::lock;
use holdfast_core::services::{HealthCheck, NodeFacts};
use holdfast_kubeapi::cache::Key;

use crate::timetable::{Step, Timetable};

/// The minimum pause after a transaction.
const MIN_PAUSE: Duration = Duration::from_millis(10);
/// The maximum pause after a transaction, however long it took.
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// A transaction's duration is multiplied by this for the pause after it.
const PAUSE_FACTOR: u32 = 9;
/// Maximum number of remembered trigger times between two transactions; more are not measured.
const MAX_TRIGGERS: usize = 10_000;
/// Maximum number of services whose problems are logged.
const MAX_PROBLEMS: usize = 1000;

/// Why outdated flows could not be deleted: connection tracking may be busy, or not available. The rules are in place
/// nevertheless, and the next commit or audit tries again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FlowsLeft(pub(crate) String);

/// What an audit has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Audited {
    /// The repaired differences, as a text; `None` if there were none.
    pub(crate) repaired: Option<String>,
    pub(crate) flows_left: Option<FlowsLeft>,
}

/// The rules in the kernel.
pub(crate) trait Plane {
    /// Sets the facts of this node.
    fn set_node(&mut self, node: NodeFacts);

    /// Sets a service with all its slices; `None` if it was deleted.
    fn set_service(&mut self, key: &Key, service: Option<&Service>, slices: &[Arc<EndpointSlice>]);

    /// Commits all changes since the last commit as one transaction, and deletes outdated flows. An error is about the rules.
    fn commit(&mut self) -> Result<Option<FlowsLeft>, String>;

    /// Commits, compares the rules in the kernel with the desired ones, and repairs them. An error is about the rules.
    fn audit(&mut self) -> Result<Audited, String>;

    /// The health check ports.
    fn health_checks(&self) -> Vec<HealthCheck>;

    /// Which values of a service are invalid and were skipped; `None` if all are valid.
    fn problems(&self, key: &Key) -> Option<String>;
}

/// The records of the DNS server.
pub(crate) trait Records {
    /// Sets a service with all its slices; `None` if it was deleted.
    fn set_service(&self, key: &Key, service: Option<&Service>, slices: &[Arc<EndpointSlice>]);

    /// Sets whether a namespace exists.
    fn set_namespace(&self, name: &str, exists: bool);

    /// All services and namespaces are known.
    fn set_synced(&self);
}

/// Reads the current objects.
pub(crate) trait Objects {
    /// The node's facts.
    fn node(&self) -> NodeFacts;

    /// A service with its slices.
    fn service(&self, key: &Key) -> (Option<Service>, Vec<Arc<EndpointSlice>>);

    /// Whether a namespace exists.
    fn has_namespace(&self, name: &str) -> bool;
}

/// What the thread has done.
#[derive(Debug)]
pub(crate) enum Report {
    /// All changes were committed.
    Committed {
        /// How long the transaction took, with its preparation.
        took: Duration,
        /// When the causes of the changes happened.
        triggers: Vec<Timestamp>,
        /// The health check ports.
        health_checks: Vec<HealthCheck>,
    },
    /// A transaction or an audit failed and is repeated.
    Failed(String),
    /// The rules are in place, but deleting outdated flows failed and is repeated.
    FlowsLeft(String),
    /// An audit has repaired the rules.
    Repaired(String),
}

/// Changes that the thread has not taken yet.
#[derive(Debug, Default)]
struct Pending {
    services: BTreeSet<Key>,
    namespaces: BTreeSet<String>,
    node: bool,
    triggers: Vec<Timestamp>,
    /// When the oldest of these changes arrived.
    since: Option<Instant>,
    /// When the oldest change arrived that the thread is working on.
    working_since: Option<Instant>,
    /// Whether the first complete lists have arrived. Before, nothing is taken: rules of half a list would break
    /// connections to the other half.
    synced: bool,
    /// Whether the first complete list of namespaces has arrived, which only DNS needs.
    has_namespaces: bool,
    stopped: bool,
}

/// The way from the caches to the thread.
#[derive(Default)]
pub(crate) struct Inbox {
    pending: Mutex<Pending>,
    wake: Condvar,
}

/// What the thread does next.
#[derive(Debug)]
enum Next {
    Changes(Taken),
    Audit,
    Stop,
}

#[derive(Debug, Default)]
struct Taken {
    services: BTreeSet<Key>,
    namespaces: BTreeSet<String>,
    node: bool,
    has_namespaces: bool,
    triggers: Vec<Timestamp>,
}

impl Inbox {
    fn change(&self, change: impl FnOnce(&mut Pending)) {
        let mut pending = lock(&self.pending);
        change(&mut pending);
        pending.since.get_or_insert_with(Instant::now);
        drop(pending);
        self.wake.notify_one();
    }

    /// A service or one of its slices has changed. `trigger` is when the cause happened.
    pub(crate) fn service_changed(&self, key: Key, trigger: Option<Timestamp>) {
        self.change(|pending| {
            pending.services.insert(key);
            if pending.synced && pending.triggers.len() < MAX_TRIGGERS {
                pending.triggers.extend(trigger);
            }
        });
    }

    /// A namespace was created or deleted.
    pub(crate) fn namespace_changed(&self, name: String) {
        self.change(|pending| {
            pending.namespaces.insert(name);
        });
    }

    /// The facts of the node have changed.
    pub(crate) fn node_changed(&self) {
        self.change(|pending| pending.node = true);
    }

    /// The first complete lists of services, slices and the Node have arrived.
    pub(crate) fn set_synced(&self) {
        self.change(|pending| pending.synced = true);
    }

    /// The first complete list of namespaces has arrived. Services do not wait for it.
    pub(crate) fn set_has_namespaces(&self) {
        self.change(|pending| pending.has_namespaces = true);
    }

    /// Ends the thread after its current work.
    pub(crate) fn stop(&self) {
        self.change(|pending| pending.stopped = true);
    }

    /// When the oldest change arrived that is not committed yet.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        let pending = lock(&self.pending);
        pending.working_since.or(pending.since)
    }

    /// The number of services with changes that are not taken yet.
    pub(crate) fn len(&self) -> usize {
        lock(&self.pending).services.len()
    }

    /// All taken changes are committed.
    fn done(&self) {
        lock(&self.pending).working_since = None;
    }

    /// Waits until a step is due.
    fn next(&self, times: &Timetable) -> Next {
        let mut pending = lock(&self.pending);
        loop {
            let now = Instant::now();
            if pending.stopped {
                return Next::Stop;
            }
            let step = match pending.synced {
                true => times.step(now, pending.since.is_some()),
                // Before the lists have arrived, there is nothing to write, and nothing to compare the rules with.
                false => Step::Wait(now + MAX_PAUSE),
            };
            match step {
                Step::Audit => return Next::Audit,
                Step::Write => {
                    let since = pending.since.take();
                    pending.working_since = pending.working_since.or(since);
                    return Next::Changes(Taken {
                        services: std::mem::take(&mut pending.services),
                        namespaces: std::mem::take(&mut pending.namespaces),
                        node: std::mem::take(&mut pending.node),
                        has_namespaces: std::mem::take(&mut pending.has_namespaces),
                        triggers: std::mem::take(&mut pending.triggers),
                    });
                }
                Step::Wait(until) => {
                    pending = self.wait(pending, until.saturating_duration_since(now));
                }
            }
        }
    }

    fn wait<'a>(
        &self,
        pending: MutexGuard<'a, Pending>,
        timeout: Duration,
    ) -> MutexGuard<'a, Pending> {
        let waited = self.wake.wait_timeout(pending, timeout);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// How fast the thread works.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// The minimum time between two transactions (`minSyncPeriod`).
    pub(crate) min_sync_period: Duration,
    /// The time between two audits.
    pub(crate) audit_interval: Duration,
}

/// The pause after a transaction that took `took`.
fn pause_after(took: Duration, min_sync_period: Duration) -> Duration {
    let share = took.saturating_mul(PAUSE_FACTOR);
    share.clamp(MIN_PAUSE, MAX_PAUSE).max(min_sync_period)
}

/// Audits the rules, and sets the time of the next audit. Returns what to report.
fn audit(plane: &mut dyn Plane, times: &mut Timetable) -> Vec<Report> {
    let audited = plane.audit();
    let now = Instant::now();
    match audited {
        Err(why) => {
            times.audit_failed(now);
            vec![Report::Failed(why)]
        }
        Ok(audited) => {
            match audited.flows_left {
                Some(_) => times.audit_failed(now),
                None => times.audited(now),
            }
            let repaired = audited.repaired.map(Report::Repaired);
            let left = audited.flows_left;
            let left = left.map(|FlowsLeft(why)| Report::FlowsLeft(why));
            repaired.into_iter().chain(left).collect()
        }
    }
}

/// Works until the inbox is stopped. `before_commit` prepares the machine; `report` returns false if no receiver is left.
pub(crate) fn work(
    plane: &mut dyn Plane,
    records: Option<&dyn Records>,
    objects: &dyn Objects,
    inbox: &Inbox,
    pace: Pace,
    hooks: (&dyn Fn(), &dyn Fn(Report) -> bool),
) {
    let (before_commit, report) = hooks;
    let mut times = Timetable::new(Instant::now(), pace.audit_interval);
    let (mut is_first, mut triggers) = (true, vec![]);
    let mut problems = BTreeMap::new();
    loop {
        let is_received = match inbox.next(&times) {
            Next::Stop => return,
            Next::Changes(mut taken) => {
                let begun = Instant::now();
                triggers.append(&mut taken.triggers);
                apply(plane, records, objects, &taken, is_first);
                log_problems(plane, &taken.services, &mut problems);
                is_first = false;
                if taken.has_namespaces {
                    records.iter().for_each(|records| records.set_synced());
                }
                before_commit();
                let committed = plane.commit();
                let took = begun.elapsed();
                match committed {
                    Err(why) => {
                        times.write_failed(Instant::now());
                        report(Report::Failed(why))
                    }
                    Ok(flows_left) => {
                        let now = Instant::now();
                        times.written(now, pause_after(took, pace.min_sync_period));
                        if flows_left.is_some() {
                            times.audit_early(now);
                        }
                        inbox.done();
                        let committed = Report::Committed {
                            took,
                            triggers: std::mem::take(&mut triggers),
                            health_checks: plane.health_checks(),
                        };
                        let left = flows_left.map(|FlowsLeft(why)| Report::FlowsLeft(why));
                        report(committed) && left.is_none_or(report)
                    }
                }
            }
            Next::Audit => {
                before_commit();
                let reports = audit(plane, &mut times);
                reports.into_iter().all(report)
            }
        };
        if !is_received {
            return;
        }
    }
}

/// Logs the problems of changed services, each once.
fn log_problems(plane: &dyn Plane, changed: &BTreeSet<Key>, logged: &mut BTreeMap<Key, String>) {
    for key in changed {
        match plane.problems(key) {
            None => {
                logged.remove(key);
            }
            Some(why) if logged.get(key) == Some(&why) || logged.len() >= MAX_PROBLEMS => {}
            Some(why) => {
                let (namespace, name) = key;
                tracing::warn!(namespace, name, why, "parts of a service were skipped");
                logged.insert(key.clone(), why);
            }
        }
    }
}

/// Hands changes to the data plane and to the DNS zone.
fn apply(
    plane: &mut dyn Plane,
    records: Option<&dyn Records>,
    objects: &dyn Objects,
    taken: &Taken,
    is_first: bool,
) {
    if taken.node || is_first {
        plane.set_node(objects.node());
    }
    if let Some(records) = records {
        for name in &taken.namespaces {
            records.set_namespace(name, objects.has_namespace(name));
        }
    }
    for key in &taken.services {
        let (service, slices) = objects.service(key);
        if let Some(records) = records {
            records.set_service(key, service.as_ref(), &slices);
        }
        plane.set_service(key, service.as_ref(), &slices);
    }
}

#[cfg(test)]
#[path = "plane_tests.rs"]
mod tests;
