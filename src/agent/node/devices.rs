//! The device manager: registers device plugins, watches their devices, and requests the devices of
//! containers (`pkg/kubelet/cm/devicemanager`). [`Devices`] decides which pod gets which device. The
//! ledger's actor reserves devices when it admits a pod, and a separate task per pod calls the
//! plugins. No lock is held during a call to a plugin.
//!
//! The devices of containers are written to the kubelet's checkpoint before containers start. So every container keeps
//! its devices after a restart, or a switch from or to the kubelet.

use std::collections::BTreeMap;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::task::AbortOnDropHandle;

use super::checkpoint::Checkpoint;
use super::log_dropped_reply;
use crate::metrics::Metrics;
use crate::pod::relist::Hint;
use crate::pod::table::PodTable;
use holdfast_core::lock::lock;
use holdfast_core::node::admit::Refusal;
use holdfast_core::node::devices::checkpoint as format;
use holdfast_core::node::devices::{DeviceConfig, DeviceError, Devices, Slot, is_resource_name};
use holdfast_core::pod;
use holdfast_core::pod::resources::Amounts;
use holdfast_cri::Runtime;
use holdfast_devices::{
    Options, Plugin, PluginError, Register, Registration, VERSION, serve_registration,
};
use holdfast_host::HostError;
use holdfast_sys::clock::Clock;

/// The name of the registration socket.
const SOCKET: &str = "kubelet.sock";
/// The name of the checkpoint file, in the same directory.
const CHECKPOINT: &str = "kubelet_internal_checkpoint";
/// How long a starting container waits for a plugin that has not registered since the agent started.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a failure to write the checkpoint, or to list the runtime's pods.
const RETRY: Duration = Duration::from_secs(5);

/// A registered plugin.
struct Registered {
    number: u64,
    plugin: Plugin,
    options: Options,
    /// The socket of the registration: the plugin's own, or one in the registration directory.
    by: PathBuf,
    /// Whether its device stream is closed, or its socket was removed.
    is_gone: bool,
    _follower: AbortOnDropHandle<()>,
}

#[derive(Default)]
struct State {
    devices: Devices,
    /// By resource name.
    plugins: BTreeMap<String, Registered>,
    registrations: u64,
}

/// The devices of this node and their plugins.
pub struct DeviceManager {
    dir: PathBuf,
    state: Mutex<State>,
    checkpoint: Checkpoint,
}

fn restored(checkpoint: &Checkpoint, now: Timestamp) -> Devices {
    let read = || match checkpoint.read().map_err(|e| e.to_string())? {
        Some(text) => format::read(&text).map(Some).map_err(|e| e.to_string()),
        None => Ok(None),
    };
    match read() {
        Ok(Some(data)) => Devices::from_checkpoint(data, now),
        Ok(None) => Devices::default(),
        Err(error) => {
            tracing::error!(%error, file = %checkpoint.path().display(), "cannot use the device checkpoint: the devices of running containers are unknown");
            Devices::default()
        }
    }
}

impl DeviceManager {
    /// Creates a manager without plugins. Reads the assigned devices from the
    /// checkpoint in the directory of plugin sockets.
    #[must_use]
    pub fn new(dir: &Path, now: Timestamp) -> DeviceManager {
        let checkpoint = Checkpoint::new(dir.join(CHECKPOINT));
        let state = State {
            devices: restored(&checkpoint, now),
            ..State::default()
        };
        DeviceManager {
            dir: dir.to_owned(),
            state: Mutex::new(state),
            checkpoint,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Applies `change`, which returns whether it changed the state, and returns the same.
    fn change(&self, change: impl FnOnce(&mut State) -> bool) -> bool {
        let changed = change(&mut self.lock());
        if changed {
            self.checkpoint.changed();
        }
        changed
    }

    /// Reads the devices.
    pub fn read<T>(&self, read: impl FnOnce(&Devices) -> T) -> T {
        read(&self.lock().devices)
    }

    /// Notified of every change.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.checkpoint.changes()
    }

    /// The devices in the Node's status: capacity and allocatable.
    #[must_use]
    pub fn amounts(&self) -> (Amounts, Amounts) {
        self.read(Devices::amounts)
    }

    /// Decides which devices a pod gets. The checkpoint contains them only after the plugins have answered.
    pub(super) fn decide<T>(&self, decide: impl FnOnce(&mut Devices) -> T) -> T {
        decide(&mut self.lock().devices)
    }

    /// Releases a pod's devices.
    pub(super) fn release(&self, uid: &str) {
        self.change(|state| state.devices.release(uid));
    }

    /// The plugin of a resource, if it is registered and alive.
    fn plugin(&self, resource: &str) -> Option<(Plugin, Options)> {
        let state = self.lock();
        let found = state.plugins.get(resource).filter(|p| !p.is_gone)?;
        Some((found.plugin.clone(), found.options))
    }

    /// Calls `Allocate` for the reserved devices of containers, and stores the answers in the checkpoint.
    async fn allocate_reserved(
        &self,
        metrics: &Metrics,
        uid: &str,
        slots: &[Slot],
    ) -> Result<(), DeviceError> {
        for slot in slots {
            let resource = &slot.resource;
            let Some((plugin, options)) = self.plugin(resource) else {
                return Err(DeviceError::NoneHealthy(resource.clone()));
            };
            let failed = |call: &'static str, error: &PluginError| DeviceError::Plugin {
                resource: resource.clone(),
                call,
                why: error.to_string(),
            };
            let offer = self.read(|devices| devices.preference_request(uid, slot));
            if let Some(offer) = offer.filter(|o| options.preference && o.has_choice()) {
                let preferred = plugin.preferred(offer).await;
                let preferred = preferred.map_err(|e| failed("GetPreferredAllocation", &e))?;
                self.lock().devices.apply_preference(uid, slot, &preferred);
            }
            let ids = self.read(|devices| devices.ids(uid, slot));
            let begun = Instant::now();
            let answer = plugin.allocate(ids).await;
            metrics.device_allocated(resource, begun.elapsed());
            let answer = answer.map_err(|e| failed("Allocate", &e))?;
            if !self.change(|state| state.devices.record_response(uid, slot, answer)) {
                tracing::debug!(
                    uid,
                    resource,
                    "the pod was deleted while its devices were allocated"
                );
            }
        }
        let saved = self.save().await;
        saved.map_err(|error| DeviceError::Checkpoint {
            path: self.checkpoint.path().display().to_string(),
            why: error.message,
        })
    }

    /// Writes the checkpoint if it is not up to date.
    async fn save(&self) -> Result<(), HostError> {
        let text = || format::write(self.read(Devices::checkpoint_data));
        self.checkpoint.save(text).await
    }

    /// Returns the settings that a starting container gets for its devices, after `PreStartContainer` of the plugins
    /// that require it. Errors become a `CreateContainerConfigError`.
    pub async fn prepare(&self, uid: &str, container: &str) -> Result<DeviceConfig, String> {
        let awaited =
            |devices: &Devices| devices.unlisted_resource(uid, container).map(str::to_owned);
        let mut changes = self.changes();
        let listed = changes.wait_for(|_| self.read(awaited).is_none());
        let late = tokio::time::timeout(REGISTRATION_TIMEOUT, listed)
            .await
            .is_err();
        if let Some(resource) = self.read(awaited).filter(|_| late) {
            return Err(format!(
                "the device plugin of {resource} has not registered since the agent started: the container's devices may not be available yet"
            ));
        }
        for slot in self.read(|devices| devices.slots(uid, container)) {
            let resource = &slot.resource;
            let (plugin, is_gone) = match self.lock().plugins.get(resource) {
                Some(found) if found.options.pre_start => (found.plugin.clone(), found.is_gone),
                _ => continue,
            };
            let outcome = if is_gone {
                Err("the plugin is not registered".to_owned())
            } else {
                let ids = self.read(|devices| devices.ids(uid, &slot));
                plugin.pre_start(ids).await.map_err(|e| e.to_string())
            };
            outcome.map_err(|why| {
                format!("device plugin of {resource}: PreStartContainer failed: {why}")
            })?;
        }
        Ok(self.read(|devices| devices.config_of(uid, container)))
    }

    /// Marks a plugin as gone because its registration socket was removed. Returns
    /// whether it was the plugin's current registration.
    pub(crate) fn mark_gone(&self, resource: &str, by: &Path, now: Timestamp) -> bool {
        let number = {
            let state = self.lock();
            let found = state.plugins.get(resource);
            found.filter(|p| p.by == by).map(|p| p.number)
        };
        if let Some(number) = number {
            self.mark_registration_gone(resource, number, now);
        }
        number.is_some()
    }

    fn mark_registration_gone(&self, resource: &str, number: u64, now: Timestamp) {
        let lost = self.change(|state| {
            if let Some(found) = state.plugins.get_mut(resource)
                && found.number == number
            {
                found.is_gone = true;
            }
            state.devices.disconnect(resource, number, now)
        });
        if lost {
            tracing::warn!(
                resource,
                "a device plugin is no longer available: its devices are not allocated until it registers again"
            );
        }
    }
}

/// What the registration of device plugins uses.
pub(crate) struct Parts {
    pub clock: Clock,
    pub metrics: Arc<Metrics>,
    pub manager: Arc<DeviceManager>,
}

/// Requests the devices of an admitted pod in a separate task, and sends the final decision about its admission.
/// `release` releases all resources of a rejected pod.
pub(super) fn allocate(
    manager: &Arc<DeviceManager>,
    metrics: &Arc<Metrics>,
    pod: Arc<Pod>,
    slots: Vec<Slot>,
    reply: oneshot::Sender<Result<(), Refusal>>,
    release: impl FnOnce(&str) + Send + 'static,
) {
    let (manager, metrics) = (Arc::clone(manager), Arc::clone(metrics));
    tokio::spawn(async move {
        let uid = pod::uid(&pod);
        let allocated = manager.allocate_reserved(&metrics, uid, &slots).await;
        let Err(error) = allocated else {
            return log_dropped_reply(reply.send(Ok(())));
        };
        tracing::warn!(%error, pod = %pod::full_name(&pod), "allocating the devices of a pod failed");
        manager.lock().devices.release_pending(uid);
        // A dropped reply means that the pod is terminating, which releases its resources.
        if !reply.is_closed() {
            release(uid);
        }
        log_dropped_reply(reply.send(Err(error.refusal())));
    });
}

/// Registers the plugin with this socket: requests its options and starts to watch its devices. `by` is the socket of
/// the registration. Errors have the words of upstream's `pkg/kubelet/cm/devicemanager` (`manager.go`,
/// `plugin/v1beta1/api.go`), since operators of plugins search for them.
pub async fn register(
    parts: &Arc<Parts>,
    resource: &str,
    versions: &[String],
    socket: &Path,
    by: &Path,
) -> Result<(), String> {
    parts.metrics.device_plugin_registered(resource);
    if !versions.iter().any(|v| v == VERSION) {
        let versions = versions.join(", ");
        return Err(format!(
            "requested API version {versions:?} is not supported by kubelet. Supported version is [{VERSION:?}]"
        ));
    }
    if !is_resource_name(resource) {
        return Err(format!(
            "the ResourceName {resource:?} is invalid: it must be an extended resource such as example.com/gpu"
        ));
    }
    let plugin = Plugin::new(socket).map_err(|e| e.to_string())?;
    let options = plugin.options().await;
    let options = options.map_err(|e| format!("failed to get device plugin options: {e}"))?;
    tracing::info!(resource, socket = %socket.display(), ?options, "device plugin registered");
    parts.manager.change(|state| {
        state.registrations += 1;
        let number = state.registrations;
        let follow = watch_devices(
            Arc::clone(parts),
            resource.to_owned(),
            number,
            plugin.clone(),
        );
        let registered = Registered {
            number,
            plugin,
            options,
            by: by.into(),
            is_gone: false,
            _follower: AbortOnDropHandle::new(tokio::spawn(follow)),
        };
        state.devices.register(resource, number);
        // Replaces an earlier registration, whose devices are no longer watched.
        state.plugins.insert(resource.to_owned(), registered);
        true
    });
    Ok(())
}

/// Watches a plugin's devices until the stream ends.
async fn watch_devices(parts: Arc<Parts>, resource: String, number: u64, plugin: Plugin) {
    let ended = async {
        let mut listing = plugin.list().await?;
        while let Some(listed) = listing.next().await? {
            let count = listed.len();
            let list = |state: &mut State| state.devices.set_devices(&resource, number, listed);
            if parts.manager.change(list) {
                tracing::info!(
                    resource,
                    devices = count,
                    "a device plugin reported its devices"
                );
            }
        }
        Ok::<_, PluginError>(())
    };
    if let Err(error) = ended.await {
        tracing::debug!(%error, resource, "the stream of a device plugin broke");
    }
    let now = parts.clock.now();
    parts.manager.mark_registration_gone(&resource, number, now);
}

struct Registrar(Arc<Parts>);

#[async_trait]
impl Register for Registrar {
    async fn register(&self, registration: Registration) -> Result<(), String> {
        let name = Path::new(&registration.endpoint);
        let inside = name.is_relative() && !registration.endpoint.contains("..");
        if registration.endpoint.is_empty() || !inside {
            return Err(format!(
                "the endpoint {:?} is not the name of a socket in {}",
                registration.endpoint,
                self.0.manager.dir.display()
            ));
        }
        let socket = self.0.manager.dir.join(name);
        let versions = [registration.version];
        let outcome = register(&self.0, &registration.resource, &versions, &socket, &socket).await;
        if let Err(error) = &outcome {
            tracing::warn!(
                error,
                resource = registration.resource,
                "registering a device plugin failed"
            );
        }
        outcome
    }
}

/// Removes the sockets of plugins and creates the registration socket. The removal makes plugins register again.
fn listen(dir: &Path) -> std::io::Result<UnixListener> {
    holdfast_sys::file::make_for_plugins(dir)?;
    let own = dir.join(SOCKET);
    // If another agent is listening, its plugins must keep their sockets.
    holdfast_sys::link::clear(&own)?;
    for entry in std::fs::read_dir(dir)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            std::fs::remove_file(entry.path())?;
        }
    }
    holdfast_sys::link::listen(&own)
}

/// Serves registrations and writes the checkpoint until the process exits.
pub async fn run(
    parts: Arc<Parts>,
    runtime: Arc<dyn Runtime>,
    table: watch::Receiver<PodTable>,
    hints: mpsc::Sender<Hint>,
) {
    let dir = &parts.manager.dir;
    let listener = match listen(dir) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::warn!(%error, dir = %dir.display(), "device plugins cannot register: creating the socket failed");
            return std::future::pending().await;
        }
    };
    let registrar = Arc::new(Registrar(Arc::clone(&parts)));
    tokio::join!(
        serve_registration(listener, registrar),
        maintain_checkpoint(&parts),
        release_deleted(&parts.manager, &*runtime, table),
        notify_pods(&parts.manager, hints),
    );
}

/// Writes the checkpoint after changes, and drops resources whose plugin does not return in time.
async fn maintain_checkpoint(parts: &Parts) {
    let manager = &parts.manager;
    let mut changes = manager.changes();
    loop {
        changes.mark_unchanged();
        let now = parts.clock.now();
        manager.change(|state| state.devices.expire(now));
        let saved = manager.save().await;
        if let Err(error) = &saved {
            tracing::error!(%error, file = %manager.checkpoint.path().display(), "writing the device checkpoint failed; retrying");
        }
        let expiry = manager.read(Devices::next_expiry);
        let expiry =
            expiry.map(|at| Duration::try_from(at.duration_since(now)).unwrap_or_default());
        let retry = saved.is_err().then_some(RETRY);
        let wait = [expiry, retry].into_iter().flatten().min();
        tokio::select! {
            biased;
            Ok(()) = changes.changed() => {}
            () = tokio::time::sleep(wait.unwrap_or(Duration::MAX)) => {}
        }
    }
}

/// Notifies pods when the health of their devices changes. Runs until the receiver of hints is dropped.
async fn notify_pods(manager: &DeviceManager, hints: mpsc::Sender<Hint>) {
    let mut changes = manager.changes();
    let mut notified = BTreeMap::new();
    loop {
        changes.mark_unchanged();
        let now = manager.read(Devices::health_of_all);
        for (uid, health) in &now {
            if notified.get(uid) != Some(health)
                && hints.send(Hint::Devices(uid.clone())).await.is_err()
            {
                return;
            }
        }
        notified = now;
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Releases the devices of pods that were deleted while no agent was running, once all pods are known.
async fn release_deleted(
    manager: &DeviceManager,
    runtime: &dyn Runtime,
    mut table: watch::Receiver<PodTable>,
) {
    if table.wait_for(|table| table.complete).await.is_err() {
        return;
    }
    let listed = loop {
        match runtime.list().await {
            Ok(listed) => break listed,
            Err(error) => {
                tracing::debug!(%error, "cannot list the runtime's pods: devices of deleted pods are not released yet");
                tokio::time::sleep(RETRY).await;
            }
        }
    };
    let exists = |uid: &str| table.borrow().has(uid) || listed.iter().any(|p| p.uid == uid);
    manager.change(|state| state.devices.retain(exists));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn plugin_sockets_are_removed_only_if_no_agent_listens() {
        let dir = tempfile::tempdir().expect("a directory");
        let plugin = dir.path().join("plugin.sock");
        let _plugin = std::os::unix::net::UnixListener::bind(&plugin).expect("a socket");
        std::fs::write(dir.path().join(CHECKPOINT), "{}").expect("a file");
        let first = listen(dir.path()).expect("no agent listens");
        assert!(
            !plugin.exists(),
            "plugins register again when their socket is removed"
        );
        assert!(dir.path().join(CHECKPOINT).exists());
        let _plugin = std::os::unix::net::UnixListener::bind(&plugin).expect("a socket");
        let error = listen(dir.path()).expect_err("an agent listens");
        assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
        assert!(plugin.exists(), "its plugins keep their sockets");
        drop(first);
        listen(dir.path()).expect("the first agent has exited");
        assert!(!plugin.exists());
    }
}
