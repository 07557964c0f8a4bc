//! The journals of all pods: workers write the steps that they take, `holdfast explain` reads them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::io::{Read as _, Write as _};
use std::sync::{Arc, Mutex, MutexGuard};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::ResourceExt as _;
use tracing::Instrument as _;

use crate::Metrics;
use holdfast_core::json;
use holdfast_core::lock::lock;
use holdfast_core::pod;
use holdfast_core::pod::explain;
use holdfast_core::pod::journal::{Journal, Progress, Step};
use holdfast_core::pod::lifecycle::{Input, State};
use holdfast_core::pod::record::Record;
use holdfast_core::pod::worker::{self, Facts, Turn, Worker};
use holdfast_core::repeated::RepeatedFailures;
use holdfast_sys::clock::Clock;

/// Limit for journals of deleted pods.
const MAX_DELETED: usize = 64;
/// How many of these stay uncompressed. Compressing costs more than the rest of a pod's cleanup, and
/// saves little on a node where few pods are deleted.
const MAX_UNCOMPRESSED: usize = 16;

tokio::task_local! {
    /// The steps of the operation that the current task carries out ([`Op::steps`](worker::Op::steps)).
    static STEPS: &'static [Step];
}

/// Carries out an operation that consists of these steps. In debug builds, another step that the operation writes to the
/// journal is an error.
pub(super) fn within_steps<F: Future>(
    steps: &'static [Step],
    work: F,
) -> impl Future<Output = F::Output> {
    STEPS.scope(steps, work)
}

/// A worker's record, in the form in which it is stored.
#[derive(Default)]
enum Recorded {
    /// The worker has not started.
    #[default]
    Nothing,
    /// The worker is appending.
    Growing(Box<Record>),
    /// The pod was deleted; its record is one JSON text. Thousands of small allocations would fragment the heap.
    Written(Vec<u8>),
    /// The pod was deleted before the last [`MAX_UNCOMPRESSED`] ones: the JSON text compressed to a tenth.
    Packed(Vec<u8>),
}

impl Recorded {
    fn read(&self) -> Option<Record> {
        match self {
            Recorded::Nothing => None,
            Recorded::Growing(record) => Some((**record).clone()),
            Recorded::Written(bytes) => json::read(bytes).ok(),
            Recorded::Packed(bytes) => {
                let mut unpacked = vec![];
                GzDecoder::new(&bytes[..]).read_to_end(&mut unpacked).ok()?;
                json::read(&unpacked).ok()
            }
        }
    }

    /// Converts a growing record to JSON. Leaves a record that cannot be encoded unchanged.
    fn finish(&mut self) {
        if let Recorded::Growing(record) = self
            && let Ok(mut bytes) = serde_json::to_vec(record)
        {
            bytes.shrink_to_fit();
            *self = Recorded::Written(bytes);
        }
    }

    /// Compresses a record that is JSON.
    fn pack(&mut self) {
        let Recorded::Written(json) = self else {
            return;
        };
        let mut encoder = GzEncoder::new(vec![], Compression::fast());
        if encoder.write_all(json).is_ok()
            && let Ok(mut bytes) = encoder.finish()
        {
            bytes.shrink_to_fit();
            *self = Recorded::Packed(bytes);
        }
    }
}

/// One pod's journal; clones share it.
#[derive(Clone)]
pub struct Log {
    journal: Arc<Mutex<Journal>>,
    record: Arc<Mutex<Recorded>>,
    status: Arc<Mutex<Option<Arc<PodStatus>>>>,
    clock: Clock,
    metrics: Arc<Metrics>,
    failures: Arc<Mutex<RepeatedFailures<(Step, String)>>>,
}

/// Marks a step as dropped if its future is dropped before it completes.
struct StepGuard<'a> {
    log: &'a Log,
    step: Step,
    subject: &'a str,
    closed: bool,
}

impl Drop for StepGuard<'_> {
    fn drop(&mut self) {
        if !self.closed {
            self.log.end(self.step, self.subject, Progress::Dropped);
        }
    }
}

impl Log {
    fn journal(&self) -> MutexGuard<'_, Journal> {
        lock(&self.journal)
    }

    /// Returns a copy of the journal.
    #[must_use]
    pub fn read(&self) -> Journal {
        self.journal().clone()
    }

    /// Runs a step and records its result; a dropped future is recorded as such.
    pub async fn step<T, E: std::fmt::Display>(
        &self,
        step: Step,
        subject: &str,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        self.begin(step, subject);
        let mut open = StepGuard {
            log: self,
            step,
            subject,
            closed: false,
        };
        let span = tracing::info_span!(target: "trace::step", "step", otel.name = step.name(), subject, otel.status_code = tracing::field::Empty, otel.status_description = tracing::field::Empty);
        let result = work.instrument(span.clone()).await;
        let failure = result.as_ref().err().map(ToString::to_string);
        if let Some(why) = &failure {
            span.record("otel.status_code", "ERROR")
                .record("otel.status_description", why);
        }
        open.closed = true;
        self.end(
            step,
            subject,
            failure.map_or(Progress::Done, Progress::Failed),
        );
        result
    }

    /// Records the start of a step.
    pub fn begin(&self, step: Step, subject: &str) {
        debug_assert!(
            STEPS
                .try_with(|steps| steps.contains(&step))
                .unwrap_or(true),
            "{step:?} is missing in the table of operations"
        );
        self.journal().begin(step, subject, self.clock.now());
    }

    /// Records the result of a step.
    pub fn end(&self, step: Step, subject: &str, progress: Progress) {
        let result = match &progress {
            Progress::Running => "running",
            Progress::Done => {
                lock(&self.failures).clear(&(step, subject.to_owned()));
                "done"
            }
            Progress::Failed(why) => {
                self.log_failure(step, subject, why);
                "failed"
            }
            Progress::Dropped => "dropped",
        };
        let took = self
            .journal()
            .end(step, subject, progress, self.clock.now());
        if let Some(took) = took.and_then(|t| std::time::Duration::try_from(t).ok()) {
            self.metrics.step(step.name(), result, took);
        }
    }

    /// Logs a failure. A repeated failure is logged with growing pauses and the number of repetitions in between.
    pub(super) fn log_failure(&self, step: Step, subject: &str, why: &str) {
        let key = (step, subject.to_owned());
        let due = lock(&self.failures).record(key, why, self.clock.now());
        if let Some(repetitions) = due {
            tracing::warn!(
                step = step.name(),
                subject,
                why,
                repetitions,
                "a step of the pod failed"
            );
        }
    }

    /// The total duration of all steps of a kind.
    #[must_use]
    pub fn took(&self, step: Step) -> std::time::Duration {
        self.journal()
            .total_duration(step)
            .try_into()
            .unwrap_or_default()
    }

    /// Records a failed step that is retried elsewhere; `next` is the time of the retry.
    pub fn fail(&self, step: Step, subject: &str, why: &str, next: Option<Timestamp>) {
        let (mut journal, now) = (self.journal(), self.clock.now());
        journal.begin(step, subject, now);
        journal.end(step, subject, Progress::Failed(why.to_owned()), now);
        if let Some(next) = next {
            journal.set_next(step, subject, next);
        }
    }

    /// Clears a failure without a retry.
    pub fn close(&self, step: Step, subject: &str) {
        self.journal().close(step, subject, self.clock.now());
    }

    /// Clears a failure because its subject has recovered, completely if `whole`.
    pub fn recover(&self, step: Step, subject: &str, whole: bool) {
        self.journal()
            .recover(step, subject, whole, self.clock.now());
    }

    /// The failure that blocks every container of the pod from starting, if there is one.
    #[must_use]
    pub fn blocking_reason(&self) -> Option<String> {
        explain::blocking_reason(&self.journal())
    }

    /// Sets the time of the next retry.
    pub(crate) fn set_retry(&self, next: Timestamp) {
        self.journal().set_next_of_failed(next);
    }

    /// Sets what the pod waits for while no step is running or failing.
    pub(crate) fn set_waiting(&self, waiting: Option<String>) {
        self.journal().waiting = waiting;
    }

    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        lock(&self.record)
    }

    /// Starts recording a new worker's turns.
    pub(crate) fn start_record(&self, record: Record) {
        *self.recorded() = Recorded::Growing(Box::new(record));
    }

    /// The status of a static pod, as its worker computed it. Other pods have their status in the API.
    fn status(&self) -> MutexGuard<'_, Option<Arc<PodStatus>>> {
        lock(&self.status)
    }

    /// Records one turn of the worker.
    pub fn record(&self, facts: &Facts, input: worker::Input, turn: &Turn, worker: &Worker) {
        if pod::is_static(worker.pod()) {
            let mut status = self.status();
            if status.as_ref() != Some(worker.status()) {
                *status = Some(Arc::clone(worker.status()));
            }
        }
        if let Recorded::Growing(record) = &mut *self.recorded() {
            record.add(facts, input, turn, worker);
        }
    }

    /// Returns a copy of the record.
    #[must_use]
    pub(crate) fn read_record(&self) -> Option<Record> {
        self.recorded().read()
    }

    /// Records a transition of the state machine.
    pub fn decided(&self, before: State, input: Input, state: State) {
        self.journal()
            .record_decision(self.clock.now(), before, input, state);
    }
}

struct PodLog {
    namespace: String,
    name: String,
    /// Sequence number: how many journals had been opened when this one was.
    sequence: u64,
    log: Log,
}

#[derive(Default)]
struct PodLogs {
    pods: BTreeMap<String, PodLog>,
    /// Uids of deleted pods, oldest first.
    deleted: VecDeque<String>,
    opened: u64,
}

impl PodLogs {
    /// The pods of a name: existing pods first, and the most recently opened one before others.
    fn of(&self, namespace: &str, name: &str) -> Vec<(&String, &PodLog)> {
        let named = |(_, log): &(&String, &PodLog)| log.namespace == namespace && log.name == name;
        let mut logs: Vec<_> = self.pods.iter().filter(named).collect();
        logs.sort_by_key(|(uid, log)| (self.deleted.contains(uid), Reverse(log.sequence)));
        logs
    }
}

/// All journals, by pod uid.
#[derive(Default)]
pub struct Journals(Mutex<PodLogs>);

impl Journals {
    fn lock(&self) -> MutexGuard<'_, PodLogs> {
        lock(&self.0)
    }

    /// Returns the journal of a pod, and creates it if needed.
    pub fn open(&self, pod: &Pod, clock: Clock, metrics: &Arc<Metrics>) -> Log {
        let mut all = self.lock();
        all.deleted.retain(|uid| uid != pod::uid(pod));
        all.opened += 1;
        let sequence = all.opened;
        let fresh = || PodLog {
            namespace: pod.namespace().unwrap_or_default(),
            name: pod.name_any(),
            sequence,
            log: Log {
                journal: Arc::default(),
                record: Arc::default(),
                status: Arc::default(),
                clock,
                metrics: Arc::clone(metrics),
                failures: Arc::default(),
            },
        };
        all.pods
            .entry(pod::uid(pod).to_owned())
            .or_insert_with(fresh)
            .log
            .clone()
    }

    /// Marks a pod as deleted. Its journal is kept until [`MAX_DELETED`] other pods were deleted.
    pub fn mark_deleted(&self, uid: &str) {
        let log = self.lock().pods.get(uid).map(|kept| kept.log.clone());
        if let Some(log) = log {
            *log.status() = None;
            log.recorded().finish();
        }
        let mut all = self.lock();
        all.deleted.push_back(uid.to_owned());
        let aged = all.deleted.len().checked_sub(MAX_UNCOMPRESSED + 1);
        let aged = aged.and_then(|at| all.pods.get(&all.deleted[at]));
        if let Some(log) = aged.map(|kept| kept.log.clone()) {
            drop(all);
            log.recorded().pack();
            all = self.lock();
        }
        while all.deleted.len() > MAX_DELETED {
            if let Some(oldest) = all.deleted.pop_front() {
                all.pods.remove(&oldest);
            }
        }
    }

    /// The status of a static pod; `None` before its worker has computed one.
    #[must_use]
    pub fn status(&self, uid: &str) -> Option<Arc<PodStatus>> {
        let log = self.lock().pods.get(uid).map(|kept| kept.log.clone());
        log.and_then(|log| log.status().clone())
    }

    /// The record of the most recent pod of a name.
    #[must_use]
    pub fn record(&self, namespace: &str, name: &str) -> Option<Record> {
        let all = self.lock();
        let logs = all.of(namespace, name);
        logs.first().and_then(|(_, kept)| kept.log.read_record())
    }

    /// The journals of the pods of a name, with their uids: existing pods first, and the most recent one before others.
    #[must_use]
    pub fn find(&self, namespace: &str, name: &str) -> Vec<(String, Journal)> {
        let all = self.lock();
        let read = |(uid, kept): (&String, &PodLog)| (uid.clone(), kept.log.read());
        all.of(namespace, name).into_iter().map(read).collect()
    }
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;
    use serde_json::json;

    use super::*;
    use holdfast_core::pod::worker::{Network, Rules, Update};

    #[test]
    fn the_record_of_a_deleted_pod_is_compressed_and_reads_as_before() {
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
        let pod: Arc<Pod> = Arc::new(serde_json::from_value(pod).expect("a pod"));
        let journals = Journals::default();
        let log = journals.open(&pod, Clock::system(), &Arc::default());
        let update = Update {
            object: Some(Arc::clone(&pod)),
            pod,
            removed: false,
            starts_again: false,
        };
        let worker = Worker::new(update, Network::Ready, Timestamp::UNIX_EPOCH);
        let rules = Rules {
            sync_frequency: SignedDuration::from_secs(60),
            max_backoff: SignedDuration::from_secs(300),
            mirrors: true,
            recursive_read_only: false,
            runtime: "containerd".into(),
        };
        let record = Record::new(rules, vec!["192.0.2.1".into()], &worker);
        log.start_record(record.clone());
        assert_eq!(journals.record("n", "p"), Some(record.clone()));
        journals.mark_deleted("u");
        assert!(matches!(&*log.recorded(), Recorded::Written(_)));
        assert_eq!(journals.record("n", "p"), Some(record.clone()));
        for other in 0..MAX_UNCOMPRESSED {
            journals.mark_deleted(&other.to_string());
        }
        assert!(matches!(&*log.recorded(), Recorded::Packed(bytes) if bytes.len() < 2_000));
        assert_eq!(journals.record("n", "p"), Some(record.clone()));
        // A new worker of the same pod starts its own record.
        let again = journals.open(worker.pod(), Clock::system(), &Arc::default());
        again.start_record(record);
        assert!(matches!(&*again.recorded(), Recorded::Growing(_)));
    }
}
