//! Node-pressure eviction (`pkg/kubelet/eviction`). Measures available memory, disks and process ids, and
//! publishes pressure conditions. When a threshold is met, removes dead containers and unused images, then
//! evicts pods, one at a time, until enough is free.
//!
//! There are two tasks: one for memory, which can run short within a moment, and one for the other resources, whose
//! relief may take minutes. The tasks have disjoint thresholds and conditions, so each observation is handled once.
//!
//! Everything is measured every ten seconds. Memory is also measured as often as it could run short, and
//! whenever the kernel notifies the agent of a threshold. After an eviction, the node waits until the pod has
//! terminated or exceeded its deadline, and measures again before it evicts another pod for the same
//! pressure. So no more pods are evicted than necessary.

mod measure;
mod victims;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::ledger::LedgerHandle;
use crate::events::{Events, Kind};
use crate::image::collect;
use crate::metrics::Metrics;
use crate::pod::dead_containers;
use crate::pod::table::PodTable;
use holdfast_config::Config;
use holdfast_core::node::eviction::{
    Amount, Assessment, Candidate, Observations, PodFigures, Pressure, Pressures, Resource,
    Settings, TerminatingPods, Threshold, Watch, annotations, explain, grace,
    growth_until_threshold, message, next_measurement, rank,
};
use holdfast_core::node::ledger::Eviction;
use holdfast_core::pod;
use holdfast_cri::Runtime;
use holdfast_host::PodHost;
use holdfast_sys::machine::Machine;
use holdfast_sys::memory_notice::MemoryNotices;
use measure::{Filesystems, Measured};

/// The reason of eviction events and of an evicted pod's status.
const EVICTED: &str = "Evicted";
/// Interval between full measurements.
const PERIOD: Duration = Duration::from_secs(10);
/// Interval while memory or process ids are short and no pod could be evicted: a pod may have started.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between checks whether an evicted pod has terminated.
const TERMINATION_POLL: Duration = Duration::from_millis(50);
/// Minimum pause between measurements, even if memory fluctuates around a threshold.
const MIN_PAUSE: Duration = Duration::from_millis(20);
/// Pause after the runtime failed to report the directory of its images.
const IMAGE_DIR_RETRY: Duration = Duration::from_secs(10);

/// What monitoring and evictions use.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub runtime: Arc<dyn Runtime>,
    pub host: Arc<dyn PodHost>,
    pub machine: Arc<Machine>,
    pub events: Events,
    pub metrics: Arc<Metrics>,
    pub ledger: LedgerHandle,
    pub table: watch::Receiver<PodTable>,
    /// The node's current resource pressures.
    pub pressures: watch::Sender<Pressures>,
    pub images: Arc<collect::Parts>,
    pub dead_containers: Arc<dead_containers::Parts>,
}

/// Runs until the process exits. Measures nothing without thresholds.
pub async fn run(parts: Arc<Parts>) {
    let memory = Manager::new(&parts, |resource| resource == Resource::Memory);
    let others = Manager::new(&parts, |resource| resource != Resource::Memory);
    // Memory has its own tokio task, so that it is not delayed by other futures of this one.
    let memory = AbortOnDropHandle::new(tokio::spawn(run_manager(memory)));
    run_manager(others).await;
    drop(memory);
}

/// Runs one manager until the process exits.
async fn run_manager(manager: Option<Manager>) {
    let Some(mut manager) = manager else {
        return std::future::pending().await;
    };
    loop {
        if let Some(most) = manager.measure_and_react().await {
            manager.wait_for_next_pass(most).await;
        }
    }
}

struct Manager {
    parts: Arc<Parts>,
    /// The settings, with the thresholds of this task only.
    settings: Settings,
    watch: Watch,
    /// The origin of this task's times.
    epoch: Instant,
    source: Source,
    ending: TerminatingPods,
    /// The resource and time of the last event `EvictionThresholdMet`.
    last_event: Option<(Resource, Instant)>,
}

/// The resources that a task measures.
enum Source {
    /// Memory, with the kernel's notifications about thresholds.
    Memory(MemoryNotices),
    /// Filesystems and process ids.
    Others {
        /// A directory on the filesystem of images; `None` until the runtime has reported it.
        images: watch::Receiver<Option<PathBuf>>,
        filesystems: Filesystems,
        _search: AbortOnDropHandle<()>,
    },
}

/// Retries until the runtime reports the directory of its images. Runs in a separate task, as the runtime may hang.
async fn find_images(runtime: Arc<dyn Runtime>, found: watch::Sender<Option<PathBuf>>) {
    loop {
        match runtime.image_inventory().await {
            Ok(stock) => return found.send_modify(|dir| *dir = Some(stock.mountpoint)),
            Err(error) => {
                tracing::debug!(%error, "cannot read the runtime's image filesystem; retrying");
                tokio::time::sleep(IMAGE_DIR_RETRY).await;
            }
        }
    }
}

impl Source {
    /// Creates the source for these thresholds.
    fn of(settings: &Settings, runtime: &Arc<dyn Runtime>) -> Source {
        let mut signals = settings.thresholds.iter().map(|t| t.signal);
        if signals.any(|s| s.resource() == Resource::Memory) {
            return Source::Memory(MemoryNotices::open());
        }
        let (found, images) = watch::channel(None);
        let search = tokio::spawn(find_images(Arc::clone(runtime), found));
        Source::Others {
            images,
            filesystems: Filesystems::default(),
            _search: AbortOnDropHandle::new(search),
        }
    }

    /// Returns with the kernel's next notification.
    async fn next(&mut self) {
        match self {
            Source::Memory(notices) => notices.next().await,
            Source::Others { .. } => std::future::pending().await,
        }
    }

    /// Whether this source determines the condition.
    fn shows(&self, pressure: Pressure) -> bool {
        matches!(self, Source::Memory(_)) == (pressure == Pressure::Memory)
    }
}

impl Manager {
    /// Creates a manager for the thresholds of some resources; `None` if there are none.
    fn new(parts: &Arc<Parts>, is_among: impl Fn(Resource) -> bool) -> Option<Manager> {
        let settings = parts.config.eviction.of(is_among);
        if settings.thresholds.is_empty() {
            return None;
        }
        Some(Manager {
            parts: Arc::clone(parts),
            source: Source::of(&settings, &parts.runtime),
            settings,
            watch: Watch::default(),
            epoch: Instant::now(),
            ending: TerminatingPods::default(),
            last_event: None,
        })
    }

    async fn measure(&self) -> Measured {
        match &self.source {
            Source::Memory(_) => Measured {
                left: measure::memory(self.parts.host.cgroup_of_all()).await,
                separate_images: false,
            },
            Source::Others {
                images,
                filesystems,
                ..
            } => {
                let images = images.borrow().clone();
                measure::others(filesystems, self.parts.config.root_dir.clone(), images).await
            }
        }
    }

    /// Measures everything and reacts. Returns the time until the next measurement, or `None` if it is due immediately.
    async fn measure_and_react(&mut self) -> Option<Duration> {
        let measured = self.measure().await;
        let found = self
            .watch
            .assess(&self.settings, &measured.left, self.epoch.elapsed());
        self.publish(&found, &measured.left);
        self.register_notifications(&measured.left);
        let mut rest = found.recheck_after.unwrap_or(PERIOD).min(PERIOD);
        let mut tried = BTreeSet::new();
        for threshold in &found.active {
            let signal = threshold.signal;
            let Some(amount) = measured.left.get(&signal) else {
                continue;
            };
            self.shorten_grace_periods(threshold, *amount).await;
            let ends = self.ending.wait(signal.pressure(), self.epoch.elapsed());
            if let Some(ends) = ends {
                rest = rest.min(ends);
                continue;
            }
            // Two thresholds on the same resource would evict the same pods.
            let elsewhere = measured.separate_images && signal.is_of_images();
            if tried.insert((signal.resource(), elsewhere))
                && self.reclaim(threshold, *amount, &measured).await
            {
                return None;
            }
        }
        let quick = [Resource::Memory, Resource::Pids];
        match tried.iter().any(|(resource, _)| quick.contains(resource)) {
            true => Some(rest.min(RETRY_INTERVAL)),
            false => Some(rest),
        }
    }

    /// Publishes the node's pressures if they changed.
    fn publish(&self, found: &Assessment, left: &Observations) {
        let mut now = Pressures::new();
        let changed = self.parts.pressures.send_if_modified(|known| {
            let others = known.iter().filter(|p| !self.source.shows(**p));
            now = others.chain(&found.pressures).copied().collect();
            let changed = *known != now;
            known.clone_from(&now);
            changed
        });
        if changed {
            tracing::warn!(
                pressures = ?now, ?left,
                "the node's pressures changed"
            );
        }
    }

    /// Registers kernel notifications for the next threshold of memory.
    fn register_notifications(&mut self, left: &Observations) {
        let Source::Memory(notices) = &mut self.source else {
            return;
        };
        let thresholds = &self.settings.thresholds;
        let (machine, pods) = growth_until_threshold(thresholds, left);
        let of_pods = self.parts.host.cgroup_of_all();
        let cgroups: Vec<(&str, u64)> = machine
            .map(|bytes| ("/", bytes))
            .into_iter()
            .chain(pods.map(|bytes| (of_pods.as_str(), bytes)))
            .collect();
        notices.report_growth(&cgroups);
    }

    /// Waits until the next measurement is due: for at most `most`, until an evicted pod has
    /// terminated, or until a further memory threshold is met.
    async fn wait_for_next_pass(&mut self, most: Duration) {
        let until = Instant::now() + most;
        tokio::time::sleep(MIN_PAUSE).await;
        loop {
            if self.has_victim_terminated().await {
                return;
            }
            let Some(mut pause) = self.next_memory_read().await else {
                return;
            };
            if !self.ending.is_empty() {
                pause = pause.min(TERMINATION_POLL);
            }
            let next = until.min(Instant::now() + pause);
            tokio::select! {
                biased;
                () = self.source.next() => {}
                () = tokio::time::sleep_until(next) => {}
            }
            if Instant::now() >= until {
                return;
            }
        }
    }

    /// Returns the time until memory has to be read again, or `None` if a further
    /// threshold is met and everything has to be measured.
    async fn next_memory_read(&self) -> Option<Duration> {
        let Source::Memory(_) = self.source else {
            return Some(PERIOD);
        };
        let memory = measure::memory(self.parts.host.cgroup_of_all()).await;
        let cpus = self.parts.machine.cpus;
        let is_met = self.watch.is_newly_met(&self.settings, &memory);
        (!is_met).then(|| next_measurement(&self.settings.thresholds, &memory, cpus))
    }

    /// Whether an evicted pod has terminated and released its resources.
    async fn has_victim_terminated(&mut self) -> bool {
        if self.ending.is_empty() {
            return false;
        }
        let pods = self.parts.ledger.pods().await;
        let here: BTreeSet<&str> = pods.iter().map(|p| pod::uid(p)).collect();
        let ended = self.ending.remove_finished(|uid| here.contains(uid));
        for (uid, evicted_at) in &ended {
            let took = self.epoch.elapsed().saturating_sub(*evicted_at);
            tracing::info!(uid, ?took, "the evicted pod has terminated");
        }
        !ended.is_empty()
    }

    /// Shortens the grace period of pods that are already being evicted, if the
    /// threshold allows less time than they have left.
    async fn shorten_grace_periods(&mut self, threshold: &Threshold, amount: Amount) {
        let now = self.epoch.elapsed();
        let pressure = threshold.signal.pressure();
        if self.ending.wait(pressure, now).is_none() {
            return;
        }
        for pod in self.parts.ledger.pods().await {
            let grace = grace(&self.settings, threshold, &pod);
            let uid = pod::uid(&pod);
            if !self.ending.would_end_sooner(pressure, uid, now, grace) {
                continue;
            }
            let victim = Candidate {
                pod: Arc::clone(&pod),
                figures: PodFigures::default(),
            };
            let text = message(threshold, amount, &victim);
            let name = threshold.signal.name();
            let eviction = Eviction::under_pressure(uid, name, text, grace);
            if self.parts.ledger.terminate(uid, eviction.verdict).await {
                self.ending.record_eviction(pressure, uid, now, grace);
                tracing::warn!(
                    pod = pod::full_name(&pod),
                    grace,
                    "shortening the grace period of the evicted pod: the node has less {} than when the pod was evicted",
                    threshold.signal.resource().name()
                );
            }
        }
    }

    /// Reclaims resources: from dead containers and images where possible, otherwise by evicting a pod. Returns whether
    /// resources were or will be reclaimed, so that everything has to be measured again.
    async fn reclaim(
        &mut self,
        threshold: &Threshold,
        amount: Amount,
        measured: &Measured,
    ) -> bool {
        let signal = threshold.signal;
        let resource = signal.resource();
        self.emit_threshold_met(resource);
        let images_help = signal.is_of_images() || !measured.separate_images;
        if self.remove_dead_containers(threshold).await {
            return true;
        }
        if images_help && self.remove_images(threshold, amount).await {
            return true;
        }
        let observed = Instant::now();
        let on = measured.part(signal);
        let ranked = rank(resource, victims::find(&self.parts, resource, on).await);
        let (now, pressure) = (self.epoch.elapsed(), signal.pressure());
        let overdue = |victim: &&Candidate| {
            let uid = pod::uid(&victim.pod);
            self.ending.is_overdue(pressure, uid, now)
        };
        let without_effect: Vec<String> = ranked.iter().filter(overdue).map(name).collect();
        let victims: Vec<&Candidate> = ranked.iter().filter(|v| !overdue(v)).collect();
        for victim in victims {
            if self
                .evict(threshold, amount, victim, &ranked, observed)
                .await
            {
                if !without_effect.is_empty() {
                    tracing::warn!(
                        pods = without_effect.join(", "),
                        "evicted pods did not terminate in time; evicted another pod"
                    );
                }
                return true;
            }
        }
        tracing::debug!(
            signal = signal.name(),
            "the node is under pressure, but evicting a pod would not help"
        );
        false
    }

    /// Evicts a pod, even if it is terminating already. Returns whether the pod still exists.
    async fn evict(
        &mut self,
        threshold: &Threshold,
        amount: Amount,
        victim: &Candidate,
        ranked: &[Candidate],
        observed: Instant,
    ) -> bool {
        let parts = &self.parts;
        let (signal, uid) = (threshold.signal, pod::uid(&victim.pod));
        let resource = signal.resource();
        let grace = grace(&self.settings, threshold, &victim.pod);
        let text = message(threshold, amount, victim);
        let eviction = Eviction::under_pressure(uid, signal.name(), text.clone(), grace);
        let verdict = eviction.verdict.clone();
        let notes = annotations(resource, victim, ranked);
        parts.events.annotate(uid, EVICTED, notes);
        let is_evicted = parts.ledger.evict(eviction).await;
        if !is_evicted {
            parts.events.annotate(uid, EVICTED, BTreeMap::new());
            if !parts.ledger.terminate(uid, verdict).await {
                return false;
            }
        }
        self.ending
            .record_eviction(signal.pressure(), uid, self.epoch.elapsed(), grace);
        let age = observed.elapsed();
        if is_evicted {
            parts.metrics.eviction_decided(signal.name(), age);
        }
        let ranking = explain(resource, ranked);
        tracing::warn!(
            pod = name(victim),
            message = text,
            ranking,
            ends_already = !is_evicted,
            "evicting the pod: the node is short of {}",
            resource.name()
        );
        true
    }

    /// Emits the event `EvictionThresholdMet`, at most once per [`PERIOD`] for the same resource.
    fn emit_threshold_met(&mut self, resource: Resource) {
        let now = Instant::now();
        if self
            .last_event
            .is_some_and(|(what, at)| what == resource && now - at < PERIOD)
        {
            return;
        }
        self.last_event = Some((resource, now));
        let text = format!("Attempting to reclaim {}", resource.name());
        let name = &self.parts.config.node_name;
        let events = &self.parts.events;
        events.node(name, Kind::Warning, "EvictionThresholdMet", text);
    }

    /// Whether the threshold is no longer met, including its minimum reclaim.
    async fn is_relieved(&self, threshold: &Threshold) -> bool {
        let now = self.measure().await;
        let left = now.left.get(&threshold.signal);
        left.is_some_and(|amount| threshold.missing(*amount) == 0)
    }

    /// Removes dead containers, and all containers of terminated pods. Returns whether this was enough.
    async fn remove_dead_containers(&self, threshold: &Threshold) -> bool {
        match threshold.signal.resource() {
            Resource::EphemeralStorage | Resource::Inodes => {}
            Resource::Memory | Resource::Pids => return false,
        }
        match dead_containers::find_and_remove(&self.parts.dead_containers, true).await {
            Ok((removed, failures)) => {
                for error in failures.values() {
                    tracing::warn!(error, "removing a dead container failed");
                }
                if removed == 0 {
                    return false;
                }
                tracing::info!(
                    removed,
                    "removed dead containers: the node is short of disk space or inodes"
                )
            }
            Err(error) => {
                tracing::warn!(error, "removing dead containers failed");
                return false;
            }
        }
        self.is_relieved(threshold).await
    }

    /// Removes unused images. Returns whether this was enough.
    async fn remove_images(&self, threshold: &Threshold, amount: Amount) -> bool {
        let wanted = match threshold.signal.resource() {
            Resource::EphemeralStorage => threshold.missing(amount),
            // The number of inodes of an image is unknown.
            Resource::Inodes => u64::MAX,
            Resource::Memory | Resource::Pids => return false,
        };
        match collect::make_room(&self.parts.images, wanted).await {
            Ok(0) => return false,
            Ok(freed) => tracing::info!(
                freed,
                "removed unused images: the node is short of disk space or inodes"
            ),
            Err(error) => {
                tracing::warn!(%error, "removing unused images failed");
                return false;
            }
        }
        self.is_relieved(threshold).await
    }
}

fn name(victim: &Candidate) -> String {
    pod::full_name(&victim.pod)
}
