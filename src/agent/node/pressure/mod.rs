//! Node-pressure eviction (kubelet spec, 12.7): what is left of memory, disks and process ids is measured, the node says
//! what is short, images are removed and pods evicted, one at a time, until enough is free again.
//!
//! All is measured every ten seconds, memory as often as it could run short, and whenever the kernel says that it may.
//! After a pod was evicted everything is measured anew once it has ended: no more go than have to.

mod measure;
mod victims;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::agent::image::collect;
use crate::agent::pod::dead_containers;
use crate::agent::{Context, Kind};
use crate::core::node::eviction::{
    Amount, Assessment, Observations, Resource, Settings, Threshold, Watch, annotations, explain,
    grace, message, next_look, notice_after, rank,
};
use crate::core::node::ledger::Eviction;
use crate::core::pod;
use crate::sys::memory_notice::MemoryNotices;
use measure::Measured;

/// The reason of the event about a pod that is evicted.
const EVICTED: &str = "Evicted";
/// How often all is measured.
const PERIOD: Duration = Duration::from_secs(10);
/// How often it is where memory or process ids are short and there was nobody to evict: somebody may have come.
const UNRELIEVED: Duration = Duration::from_secs(1);
/// How long a pod that was evicted is waited for before the next one may go.
const ENDING: Duration = Duration::from_secs(30);
/// How often it is looked whether it has ended.
const LOOK: Duration = Duration::from_millis(50);
/// The shortest rest, also where memory wavers about a threshold.
const BREATH: Duration = Duration::from_millis(20);
/// The pause after the runtime did not say where its images are.
const AGAIN: Duration = Duration::from_secs(10);

/// Runs until the process ends. Without thresholds nothing is measured.
pub async fn run(context: Arc<Context>) {
    if context.config.eviction.thresholds.is_empty() {
        return std::future::pending().await;
    }
    let mut manager = Manager::new(&context);
    loop {
        if let Some(most) = manager.pass().await {
            manager.rest(most).await;
        }
    }
}

struct Manager<'a> {
    context: &'a Arc<Context>,
    settings: &'a Settings,
    watch: Watch,
    /// Times are counted from here.
    begun: Instant,
    notices: MemoryNotices,
    /// A directory on the filesystem with the images, once the runtime has said where they are.
    images: watch::Receiver<Option<PathBuf>>,
    _asking: AbortOnDropHandle<()>,
    /// What the node was last said to be short of, and when.
    told: Option<(Resource, Instant)>,
}

/// Asks the runtime where its images are until it says so. It may hang: nobody else waits for it.
async fn find_images(context: Arc<Context>, found: watch::Sender<Option<PathBuf>>) {
    loop {
        match context.runtime.stock().await {
            Ok(stock) => return found.send_modify(|dir| *dir = Some(stock.mountpoint)),
            Err(error) => {
                tracing::debug!(%error, "the runtime does not say where its images are");
                tokio::time::sleep(AGAIN).await;
            }
        }
    }
}

impl<'a> Manager<'a> {
    fn new(context: &'a Arc<Context>) -> Manager<'a> {
        let (found, images) = watch::channel(None);
        let asking = tokio::spawn(find_images(Arc::clone(context), found));
        Manager {
            context,
            settings: &context.config.eviction,
            watch: Watch::default(),
            begun: Instant::now(),
            notices: MemoryNotices::open(),
            images,
            _asking: AbortOnDropHandle::new(asking),
            told: None,
        }
    }

    async fn measure(&self) -> Measured {
        let images = self.images.borrow().clone();
        let (root, pods) = (
            self.context.config.root_dir.clone(),
            self.context.host.cgroup_of_all(),
        );
        measure::all(root, images, pods).await
    }

    /// Measures everything and does what follows from it. The answer is how long to rest; none where all is to be measured
    /// anew at once.
    async fn pass(&mut self) -> Option<Duration> {
        let measured = self.measure().await;
        let found = self
            .watch
            .assess(self.settings, &measured.left, self.begun.elapsed());
        self.publish(&found, &measured.left);
        self.ask_for_notices(&measured.left);
        let mut tried = BTreeSet::new();
        for threshold in &found.driving {
            let signal = threshold.signal;
            let Some(amount) = measured.left.get(&signal) else {
                continue;
            };
            // Two thresholds of the same thing have the same victims.
            let elsewhere = measured.separate_images && signal.is_of_images();
            if tried.insert((signal.resource(), elsewhere))
                && self.relieve(threshold, *amount, &measured).await
            {
                return None;
            }
        }
        let rest = found.again.unwrap_or(PERIOD).min(PERIOD);
        let quick = [Resource::Memory, Resource::Pids];
        match tried.iter().any(|(resource, _)| quick.contains(resource)) {
            true => Some(rest.min(UNRELIEVED)),
            false => Some(rest),
        }
    }

    /// Says what the node is short of, where that has changed.
    fn publish(&self, found: &Assessment, left: &Observations) {
        let changed = self.context.pressures.send_if_modified(|known| {
            let changed = *known != found.pressures;
            known.clone_from(&found.pressures);
            changed
        });
        if changed {
            tracing::warn!(
                pressures = ?found.pressures, ?left,
                "what the node is short of has changed"
            );
        }
    }

    /// The kernel is to tell when memory has been used up to the next threshold.
    fn ask_for_notices(&mut self, left: &Observations) {
        let thresholds = &self.settings.thresholds;
        let (machine, pods) = notice_after(thresholds, left);
        let of_pods = self.context.host.cgroup_of_all();
        let cgroups: Vec<(&str, u64)> = machine
            .map(|bytes| ("/", bytes))
            .into_iter()
            .chain(pods.map(|bytes| (of_pods.as_str(), bytes)))
            .collect();
        self.notices.tell_growth(&cgroups);
    }

    /// Rests until all is to be measured again, `most` at the longest, or until a threshold of memory is met that was not.
    async fn rest(&mut self, most: Duration) {
        let until = Instant::now() + most;
        let pods = self.context.host.cgroup_of_all();
        tokio::time::sleep(BREATH).await;
        loop {
            let memory = measure::memory(pods.clone()).await;
            if self.watch.is_newly_met(self.settings, &memory) {
                return;
            }
            let cpus = self.context.machine.cpus;
            let look = next_look(&self.settings.thresholds, &memory, cpus);
            let next = until.min(Instant::now() + look);
            tokio::select! {
                biased;
                () = self.notices.next() => {}
                () = tokio::time::sleep_until(next) => {}
            }
            if Instant::now() >= until {
                return;
            }
        }
    }

    /// Makes room: of images where that helps, else by evicting a pod. Whether something was done, so that all is to be
    /// measured anew.
    async fn relieve(
        &mut self,
        threshold: &Threshold,
        amount: Amount,
        measured: &Measured,
    ) -> bool {
        let (context, signal) = (self.context, threshold.signal);
        let resource = signal.resource();
        self.tell(resource);
        let images_help = signal.is_of_images() || !measured.separate_images;
        if self.remove_dead_containers(threshold).await {
            return true;
        }
        if images_help && self.remove_images(threshold, amount).await {
            return true;
        }
        let observed = Instant::now();
        let on = measured.part(signal);
        let ranked = rank(resource, victims::find(context, resource, on).await);
        for victim in &ranked {
            let grace = grace(self.settings, threshold, &victim.pod);
            let text = message(threshold, amount, victim);
            let uid = pod::uid(&victim.pod);
            let eviction = Eviction::under_pressure(uid, signal.name(), text.clone(), grace);
            let notes = annotations(resource, victim, &ranked);
            context.events.annotate(uid, EVICTED, notes);
            if context.ledger.evict(eviction).await {
                context
                    .metrics
                    .eviction_decided(signal.name(), observed.elapsed());
                let ranking = explain(resource, &ranked);
                tracing::warn!(
                    pod = pod::full_name(&victim.pod),
                    message = text,
                    ranking,
                    "the pod is evicted: the node is short of {}",
                    resource.name()
                );
                self.see_end(uid).await;
                return true;
            }
            context.events.annotate(uid, EVICTED, BTreeMap::new());
        }
        tracing::debug!(
            signal = signal.name(),
            "the node is short of something, and there is no pod whose eviction would help"
        );
        false
    }

    /// An event, though not with every look.
    fn tell(&mut self, resource: Resource) {
        let now = Instant::now();
        if self
            .told
            .is_some_and(|(what, at)| what == resource && now - at < PERIOD)
        {
            return;
        }
        self.told = Some((resource, now));
        let text = format!("Attempting to reclaim {}", resource.name());
        let name = &self.context.config.node_name;
        let events = &self.context.events;
        events.node(name, Kind::Warning, "EvictionThresholdMet", text);
    }

    /// Whether a threshold is met no more, with what is to be reclaimed beyond it.
    async fn is_relieved(&self, threshold: &Threshold) -> bool {
        let now = self.measure().await;
        let left = now.left.get(&threshold.signal);
        left.is_some_and(|amount| threshold.missing(*amount) == 0)
    }

    /// Removes containers that have ended, all of those of pods that have finished. Whether that was enough.
    async fn remove_dead_containers(&self, threshold: &Threshold) -> bool {
        match threshold.signal.resource() {
            Resource::EphemeralStorage | Resource::Inodes => {}
            Resource::Memory | Resource::Pids => return false,
        }
        match dead_containers::collect(self.context, true).await {
            Ok(0) => return false,
            Ok(removed) => {
                tracing::info!(removed, "dead containers were removed: the disk is short")
            }
            Err(error) => {
                tracing::warn!(error, "dead containers could not be removed");
                return false;
            }
        }
        self.is_relieved(threshold).await
    }

    /// Removes images that nobody uses. Whether that was enough.
    async fn remove_images(&self, threshold: &Threshold, amount: Amount) -> bool {
        let wanted = match threshold.signal.resource() {
            Resource::EphemeralStorage => threshold.missing(amount),
            // How many an image has is not known.
            Resource::Inodes => u64::MAX,
            Resource::Memory | Resource::Pids => return false,
        };
        match collect::make_room(self.context, wanted).await {
            Ok(0) => return false,
            Ok(freed) => tracing::info!(freed, "unused images were removed: the disk is short"),
            Err(error) => {
                tracing::warn!(error, "unused images could not be removed");
                return false;
            }
        }
        self.is_relieved(threshold).await
    }

    /// Waits until a pod holds nothing any more.
    async fn see_end(&self, uid: &str) {
        let begun = Instant::now();
        while begun.elapsed() < ENDING {
            let pods = self.context.ledger.pods().await;
            if !pods.iter().any(|p| pod::uid(p) == uid) {
                tracing::info!(uid, took = ?begun.elapsed(), "the evicted pod has ended");
                return;
            }
            tokio::time::sleep(LOOK).await;
        }
        tracing::warn!(uid, waited = ?ENDING, "the evicted pod has not ended; another one may have to go");
    }
}
