//! Dynamic resource allocation (KEP-4381; `pkg/kubelet/cm/dra`). Drivers register. They prepare the claims of a pod
//! before its sandbox is created, and unprepare a claim after its last pod has terminated. [`Claims`] decides which
//! driver to call for which claims. No lock is held during a call to a driver.
//!
//! The kubelet's checkpoint records which claims are prepared for which pods, and is written before drivers are called.
//! So after a restart, or a switch from or to the kubelet, everything that was prepared is unprepared eventually.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};
use tokio_util::task::AbortOnDropHandle;

use super::checkpoint::Checkpoint;
use super::claim_metrics;
use super::ledger::LedgerHandle;
use crate::metrics::Metrics;
use crate::pod::relist::Hint;
use crate::pod::table::PodTable;
use holdfast_core::lock::lock;
use holdfast_core::meta;
use holdfast_core::node::claims::checkpoint::{self as format, Device, FILE};
use holdfast_core::node::claims::health::{DeviceReport, DriversHealth};
use holdfast_core::node::claims::{AllocatedClaim, Batches, ClaimError, ClaimId, Claims, Started};
use holdfast_core::node::claims::{check_claim, check_response, references};
use holdfast_core::pod;
use holdfast_core::pod::status::devices::OfPod;
use holdfast_core::repeated::RepeatedFailures;
use holdfast_cri::Runtime;
use holdfast_devices::PluginError;
use holdfast_devices::dra::{Answers, Driver, HealthError, Report};
use holdfast_host::HostError;
use holdfast_kubeapi::pods::{ApiFailure, PodApi};
use holdfast_sys::clock::Clock;
use holdfast_sys::failure::doing;

/// Interval between releases of leftover claims, as in the kubelet.
const RECONCILE_INTERVAL: Duration = Duration::from_secs(60);
/// Timeout for connecting to a local socket.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause between attempts to watch a driver's device health, as in the kubelet.
const HEALTH_RETRY: Duration = Duration::from_secs(5);

/// An instance of a driver. During a rolling update a driver has two.
struct Instance {
    /// The socket of the registration: the driver's own, or one in the registration directory.
    by: PathBuf,
    /// The socket of the driver's service.
    socket: PathBuf,
    driver: Driver,
    /// Watches the health of the driver's devices.
    _listener: AbortOnDropHandle<()>,
}

#[derive(Default)]
struct State {
    claims: Claims,
    health: DriversHealth,
    /// By driver name; the last instance is the newest.
    drivers: BTreeMap<String, Vec<Instance>>,
}

/// The resource claims of this node and their drivers.
pub struct ClaimManager {
    state: Mutex<State>,
    checkpoint: Checkpoint,
    /// The registered drivers.
    registered: watch::Sender<BTreeSet<String>>,
    /// Notified when a driver reports the health of its devices.
    health_changed: watch::Sender<()>,
    begun: tokio::time::Instant,
}

/// What the registration of drivers and the release of claims use.
pub(crate) struct Parts {
    pub runtime: Arc<dyn Runtime>,
    pub clock: Clock,
    pub metrics: Arc<Metrics>,
    pub ledger: LedgerHandle,
    pub manager: Arc<ClaimManager>,
}

fn restored(checkpoint: &Checkpoint) -> Result<Claims, HostError> {
    let unusable = |why: &dyn Display| {
        let path = checkpoint.path().display();
        HostError::failed(format!(
            "{path} cannot be used: {why}; drain the node and delete the file"
        ))
    };
    match checkpoint.read().map_err(|e| unusable(&e))? {
        Some(text) => format::read(&text).map_err(|e| unusable(&e)),
        None => Ok(Claims::default()),
    }
}

/// Requests to drivers whose outcome is not applied yet. Dropping it applies the
/// outcome; a cancelled request counts as failed.
struct PendingCalls<'a> {
    manager: &'a ClaimManager,
    batches: Batches,
    outcome: Outcome,
}

enum Outcome {
    Prepared(BTreeMap<String, Vec<(ClaimId, Vec<Device>)>>),
    GivenBack(bool),
}

impl Drop for PendingCalls<'_> {
    fn drop(&mut self) {
        let batches = &self.batches;
        self.manager.change(|claims| match &self.outcome {
            Outcome::Prepared(done) => claims.record_prepared(batches, done),
            Outcome::GivenBack(done) => claims.record_unprepared(batches, *done),
        });
    }
}

/// Why a pod's claims could not be prepared or released, in the kubelet's words.
#[derive(Debug, thiserror::Error)]
pub enum ClaimsFailed {
    /// The pod must not use a claim, or the driver rejected the claim.
    #[error("{0}")]
    Claim(#[from] ClaimError),
    /// A claim cannot be read.
    #[error("fetch ResourceClaim {claim}: {why}")]
    Unread {
        /// The claim's name.
        claim: String,
        /// The cause.
        why: ApiFailure,
    },
    /// The driver is not registered. Its registration wakes the pods that wait for it.
    #[error("DRA driver {0} is not registered")]
    NoDriver(String),
    /// A driver did not answer.
    #[error("{call}: {why}")]
    Driver {
        /// The method.
        call: &'static str,
        /// The cause.
        why: PluginError,
    },
    /// The checkpoint cannot be written.
    #[error("checkpoint ResourceClaim state: {0}")]
    Checkpoint(HostError),
}

/// The answers of all drivers of a batch: the successful ones, and the first failure.
type Answered<T> = (BTreeMap<String, T>, Result<(), ClaimsFailed>);

impl ClaimManager {
    /// Creates a manager without drivers. Reads the prepared claims from the checkpoint below the root directory.
    ///
    /// # Errors
    ///
    /// If the checkpoint is unusable: its claims would never be unprepared.
    pub fn new(root: &Path) -> Result<ClaimManager, HostError> {
        let checkpoint = Checkpoint::new(root.join(FILE));
        let state = State {
            claims: restored(&checkpoint)?,
            ..State::default()
        };
        Ok(ClaimManager {
            state: Mutex::new(state),
            checkpoint,
            registered: watch::Sender::default(),
            health_changed: watch::Sender::default(),
            begun: tokio::time::Instant::now(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Reads the claims.
    pub fn read<T>(&self, read: impl FnOnce(&Claims) -> T) -> T {
        read(&self.lock().claims)
    }

    /// The health of the devices that a pod's containers have through claims. `pod` must have the API's status.
    pub fn health(&self, pod: &Pod) -> OfPod {
        let state = self.lock();
        state
            .claims
            .health(pod, &state.health, self.begun.elapsed())
    }

    fn record_health(&self, driver: &str, devices: Vec<DeviceReport>) {
        let now = self.begun.elapsed();
        self.lock().health.record(driver, devices, now);
        self.health_changed.send_replace(());
    }

    fn change<T>(&self, change: impl FnOnce(&mut Claims) -> T) -> T {
        let changed = change(&mut self.lock().claims);
        self.checkpoint.changed();
        changed
    }

    /// Starts an operation on claims as soon as no other operation uses them.
    async fn begin(
        &self,
        mut begin: impl FnMut(&mut Claims) -> Result<Started, ClaimError>,
    ) -> Result<Batches, ClaimError> {
        let mut changes = self.checkpoint.changes();
        loop {
            changes.mark_unchanged();
            let begun = begin(&mut self.lock().claims)?;
            if let Started::Call(batches) = begun {
                self.checkpoint.changed();
                return Ok(batches);
            }
            // This object owns the sender, so the channel is never closed.
            let _ = changes.changed().await;
        }
    }

    /// Writes the checkpoint if it is not up to date.
    async fn save(&self) -> Result<(), ClaimsFailed> {
        let saved = self.checkpoint.save(|| self.read(format::write)).await;
        let path = self.checkpoint.path().display();
        saved
            .map_err(doing(format!("cannot write {path}")))
            .map_err(ClaimsFailed::Checkpoint)
    }

    fn require(&self, driver: &str) -> Result<(), ClaimsFailed> {
        match self.lock().drivers.contains_key(driver) {
            true => Ok(()),
            false => Err(ClaimsFailed::NoDriver(driver.to_owned())),
        }
    }

    /// Returns the newest instance of a driver that accepts connections, or else the newest.
    async fn driver(&self, name: &str) -> Result<Driver, ClaimsFailed> {
        let instances: Vec<(Driver, PathBuf)> = {
            let state = self.lock();
            let newest_first = state.drivers.get(name).into_iter().flatten().rev();
            newest_first
                .map(|i| (i.driver.clone(), i.socket.clone()))
                .collect()
        };
        let newest = instances.first().map(|(driver, _)| driver.clone());
        if instances.len() > 1 {
            for (driver, socket) in instances {
                if accepts_connections(&socket).await {
                    return Ok(driver);
                }
            }
        }
        newest.ok_or_else(|| ClaimsFailed::NoDriver(name.to_owned()))
    }

    /// Whether one of a driver's sockets accepts connections.
    pub(super) async fn is_usable(&self, name: &str) -> bool {
        let sockets: Vec<PathBuf> = {
            let state = self.lock();
            let instances = state.drivers.get(name).into_iter().flatten();
            instances.map(|i| i.socket.clone()).collect()
        };
        for socket in sockets {
            if accepts_connections(&socket).await {
                return true;
            }
        }
        false
    }

    /// Watches the registered drivers.
    pub(super) fn registered(&self) -> watch::Receiver<BTreeSet<String>> {
        self.registered.subscribe()
    }

    /// Calls all drivers of a batch in parallel.
    async fn call_drivers<T>(
        &self,
        batches: &Batches,
        call: impl AsyncFn(Driver, &[ClaimId]) -> Result<T, ClaimsFailed>,
    ) -> Answered<T> {
        let calls = batches.iter().map(|(name, claims)| {
            let call = &call;
            async move {
                let answer = match self.driver(name).await {
                    Ok(driver) => call(driver, claims).await,
                    Err(error) => Err(error),
                };
                (name.clone(), answer)
            }
        });
        let (mut done, mut outcome) = (BTreeMap::new(), Ok(()));
        for (name, answer) in futures::future::join_all(calls).await {
            match answer {
                Ok(answer) => _ = done.insert(name, answer),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        (done, outcome)
    }

    /// Prepares the pod's claims that are not prepared yet. `pod` must have the API's status.
    ///
    /// # Errors
    ///
    /// If the pod must not use one of the claims, or a driver fails to prepare it.
    pub async fn prepare(
        &self,
        api: &dyn PodApi,
        metrics: &Metrics,
        pod: &Pod,
    ) -> Result<(), ClaimsFailed> {
        let begun = Instant::now();
        let outcome = self.prepare_inner(api, pod).await;
        claim_metrics::prepared(metrics, outcome.is_err(), begun.elapsed());
        outcome
    }

    async fn prepare_inner(&self, api: &dyn PodApi, pod: &Pod) -> Result<(), ClaimsFailed> {
        let mut wanted: Vec<AllocatedClaim> = vec![];
        for reference in references(pod)? {
            let (namespace, name) = (meta::namespace(pod), &reference.name);
            let claim = api.device_claim(namespace, name).await;
            let claim = claim.map_err(|why| ClaimsFailed::Unread {
                claim: name.clone(),
                why,
            })?;
            let claim = check_claim(pod, &reference, &claim)?;
            for driver in &claim.drivers {
                self.require(driver)?;
            }
            wanted.push(claim);
        }
        let uid = pod::uid(pod);
        let batches = self.begin(|claims| claims.prepare(uid, &wanted)).await;
        let mut pending = PendingCalls {
            manager: self,
            batches: batches?,
            outcome: Outcome::Prepared(BTreeMap::new()),
        };
        self.save().await?;
        let call = async |driver: Driver, claims: &[ClaimId]| {
            let answer = driver.prepare(claims).await;
            per_claim("NodePrepareResources", claims, answer)
        };
        let (done, outcome) = self.call_drivers(&pending.batches, call).await;
        pending.outcome = Outcome::Prepared(done);
        drop(pending);
        outcome.and(self.save().await)
    }

    /// Releases the claims of a terminated pod. The caller repeats this until it succeeds.
    ///
    /// # Errors
    ///
    /// If a driver cannot be reached, or fails to unprepare a claim.
    pub async fn release(&self, metrics: &Metrics, uid: &str) -> Result<(), ClaimsFailed> {
        if !self.read(|claims| claims.uses(uid)) {
            return Ok(());
        }
        let begun = Instant::now();
        let outcome = self.release_inner(uid).await;
        claim_metrics::released(metrics, outcome.is_err(), begun.elapsed());
        outcome
    }

    async fn release_inner(&self, uid: &str) -> Result<(), ClaimsFailed> {
        let batches = self.begin(|claims| Ok(claims.begin_unprepare(uid))).await;
        let mut pending = PendingCalls {
            manager: self,
            batches: batches?,
            outcome: Outcome::GivenBack(false),
        };
        let call = async |driver: Driver, claims: &[ClaimId]| {
            let answer = driver.unprepare(claims).await;
            per_claim("NodeUnprepareResources", claims, answer)
        };
        let (_, outcome) = self.call_drivers(&pending.batches, call).await;
        pending.outcome = Outcome::GivenBack(outcome.is_ok());
        drop(pending);
        outcome.and(self.save().await)
    }

    /// The CDI devices of a container's claims.
    ///
    /// # Errors
    ///
    /// If the container refers to a claim that is not prepared for the pod.
    pub fn cdi(&self, pod: &Pod, container: &Container) -> Result<Vec<String>, ClaimError> {
        self.read(|claims| claims.cdi(pod, container))
    }

    /// Removes a driver's instance whose registration socket was removed. Returns whether there was one.
    pub fn remove_instance(&self, name: &str, by: &Path) -> bool {
        let mut state = self.lock();
        let Some(instances) = state.drivers.get_mut(name) else {
            return false;
        };
        let before = instances.len();
        instances.retain(|instance| instance.by != by);
        let lost = instances.len() < before;
        if instances.is_empty() {
            state.drivers.remove(name);
        }
        self.publish_registered(&state);
        lost
    }

    fn publish_registered(&self, state: &State) {
        let names = state.drivers.keys().cloned().collect();
        self.registered.send_replace(names);
    }
}

/// Converts a driver's answer to a result for each claim of the call.
fn per_claim<T>(
    call: &'static str,
    requested: &[ClaimId],
    answer: Result<Answers<T>, PluginError>,
) -> Result<Vec<(ClaimId, T)>, ClaimsFailed> {
    let answers = answer.map_err(|why| ClaimsFailed::Driver { call, why })?;
    Ok(check_response(call, requested, answers)?)
}

/// Whether a socket accepts connections.
async fn accepts_connections(socket: &Path) -> bool {
    let connected = tokio::time::timeout(CONNECT_TIMEOUT, UnixStream::connect(socket)).await;
    matches!(connected, Ok(Ok(_)))
}

/// Registers the driver with this socket. `by` is the socket of the registration.
pub async fn register(
    parts: &Arc<Parts>,
    name: &str,
    services: &[String],
    socket: &Path,
    by: &Path,
) -> Result<(), String> {
    let (metrics, own) = (Arc::clone(&parts.metrics), name.to_owned());
    let report: Report = Arc::new(move |method, code, took| {
        claim_metrics::called(&metrics, &own, method, code, took)
    });
    let driver = Driver::new(socket, services, report)?;
    tracing::info!(driver = name, socket = %socket.display(), ?services, "DRA driver registered");
    {
        let mut state = parts.manager.lock();
        let instances = state.drivers.entry(name.to_owned()).or_default();
        instances.retain(|instance| instance.by != by);
        instances.push(Instance {
            by: by.into(),
            socket: socket.into(),
            _listener: AbortOnDropHandle::new(tokio::spawn(watch_health(
                Arc::clone(parts),
                name.to_owned(),
                driver.clone(),
            ))),
            driver,
        });
        parts.manager.publish_registered(&state);
    }
    // Pods that wait for the driver can retry immediately.
    parts.ledger.drivers_changed();
    Ok(())
}

/// Watches the health of a driver's devices. Returns if the driver does not support this. When the stream breaks, as it
/// does when the driver is replaced, the last report stays valid until it expires.
async fn watch_health(parts: Arc<Parts>, name: String, driver: Driver) {
    let watch = async || -> Result<(), HealthError> {
        let mut stream = driver.health().await?;
        while let Some(devices) = stream.next().await? {
            parts.manager.record_health(&name, devices);
        }
        Ok(())
    };
    loop {
        match watch().await {
            Err(HealthError::Unsupported) => return,
            Err(error @ HealthError::Failed(_)) => {
                tracing::debug!(driver = name, %error, "the stream of the driver's device health ended; reconnecting");
            }
            Ok(()) => {}
        }
        tokio::time::sleep(HEALTH_RETRY).await;
    }
}

/// Notifies pods when the health of their devices changes. Runs until the receiver of hints is dropped.
async fn notify_pods(manager: &ClaimManager, hints: mpsc::Sender<Hint>) {
    let (mut prepared, mut health_changed) = (
        manager.checkpoint.changes(),
        manager.health_changed.subscribe(),
    );
    let mut notified = BTreeMap::new();
    loop {
        prepared.mark_unchanged();
        health_changed.mark_unchanged();
        let now = manager.begun.elapsed();
        let (health, expiry) = {
            let State { claims, health, .. } = &*manager.lock();
            (claims.health_by_pod(health, now), health.next_expiry(now))
        };
        for (uid, devices) in &health {
            if notified.get(uid) != Some(devices)
                && hints.send(Hint::Devices(uid.clone())).await.is_err()
            {
                return;
            }
        }
        notified = health;
        let expires = expiry.map_or(Duration::MAX, |at| at.saturating_sub(now));
        tokio::select! {
            biased;
            Ok(()) = prepared.changed() => {}
            Ok(()) = health_changed.changed() => {}
            () = tokio::time::sleep(expires) => {}
        }
    }
}

/// Releases claims of pods that are no longer on this node, and notifies pods
/// of device health. Runs until the process exits.
pub async fn run(parts: Arc<Parts>, table: watch::Receiver<PodTable>, hints: mpsc::Sender<Hint>) {
    tokio::join!(
        release_all(&parts, table),
        notify_pods(&parts.manager, hints)
    );
}

async fn release_all(parts: &Parts, mut table: watch::Receiver<PodTable>) {
    if table.wait_for(|table| table.complete).await.is_err() {
        return std::future::pending().await;
    }
    let mut changes = parts.manager.checkpoint.changes();
    let mut failures = RepeatedFailures::default();
    loop {
        changes.mark_unchanged();
        if parts.manager.read(|claims| claims.pods().is_empty()) {
            let _ = changes.changed().await;
            continue;
        }
        release_orphaned(parts, &table, &mut failures).await;
        tokio::time::sleep(RECONCILE_INTERVAL).await;
    }
}

async fn release_orphaned(
    parts: &Parts,
    table: &watch::Receiver<PodTable>,
    failures: &mut RepeatedFailures<String>,
) {
    // A running pod still uses its devices, even if no source contains it.
    let listed = match parts.runtime.list().await {
        Ok(listed) => listed,
        Err(error) => {
            tracing::debug!(%error, "cannot list the runtime's pods: resource claims of deleted pods are not released yet");
            return;
        }
    };
    let mut left = parts.manager.read(Claims::pods);
    left.retain(|uid| !table.borrow().has(uid) && !listed.iter().any(|p| p.uid == *uid));
    for uid in left {
        match parts.manager.release(&parts.metrics, &uid).await {
            Ok(()) => {
                failures.clear(&uid);
                tracing::info!(pod = uid, "resource claims of a deleted pod released");
            }
            Err(error) => {
                let due = failures.record(uid.clone(), &error.to_string(), parts.clock.now());
                if let Some(repetitions) = due {
                    tracing::warn!(
                        %error,
                        pod = uid,
                        repetitions,
                        "resource claims of a deleted pod not released, retrying"
                    );
                }
            }
        }
    }
}
