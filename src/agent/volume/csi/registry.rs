//! Registers plugins as their sockets appear, and removes them as the sockets disappear: CSI drivers, DRA drivers, and
//! device plugins that use the same registration (`pkg/kubelet/pluginmanager`).

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{CSINodeDriver, VolumeNodeResources};
use kube::ResourceExt as _;
use serde_json::json;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::Csi;
use super::Registered;
use super::lock;
use crate::metrics::Metrics;
use crate::node::ledger::LedgerHandle;
use crate::node::{NodeApi, OwnNode, claims, devices};
use holdfast_config::Config;
use holdfast_core::backoff::Doubling;
use holdfast_core::volume::csi::{self, Drivers};
use holdfast_csi::{Driver, Plugin, Report, get_plugin_info, notify_registration_status};
use holdfast_host::blocking;
use holdfast_kubeapi::pods::PodApi;
use holdfast_sys::clock::Clock;
use holdfast_sys::watch::Changes;

/// Maximum time between scans of the registration directory.
const SCAN_INTERVAL: Duration = Duration::from_secs(60);
/// Back-off after a failed registration.
const RETRY: Doubling = Doubling::new(Duration::from_millis(500), Duration::from_secs(120));
/// Back-off between CSINode updates. The node is not ready until the first update succeeds.
const REPORT_RETRY: Doubling = Doubling::new(Duration::from_millis(500), Duration::from_secs(10));

/// The node's annotation with the node ids of drivers.
const NODE_IDS: &str = "csi.volume.kubernetes.io/nodeid";
/// Why a node is not ready before its CSINode exists, in the kubelet's words.
const CSINODE_PENDING: &str = "CSINode is not yet initialized";

/// How many levels below the registration directory are scanned for sockets.
const DEPTH: u32 = 3;

/// A socket in the registration directory.
struct Socket {
    /// Distinguishes files of the same name: a new file is a new registration.
    identity: (u64, i64),
    /// Whether its registration is in progress.
    is_registering: bool,
    name: Option<String>,
    next: Instant,
    retry: Doubling,
}

impl Socket {
    fn waits(&self) -> bool {
        self.name.is_none() && !self.is_registering
    }
}

/// What the registration of plugins uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub api: Arc<dyn PodApi>,
    pub clock: Clock,
    pub metrics: Arc<Metrics>,
    pub node: Arc<OwnNode>,
    pub csi: Arc<Csi>,
    pub ledger: LedgerHandle,
    /// Accepts device plugins.
    pub devices: Arc<devices::Parts>,
    /// Accepts drivers of dynamic resource allocation.
    pub claims: Arc<claims::Parts>,
}

/// The sockets in the registration directory. Each is registered in its own task, so that
/// an unresponsive plugin does not delay others.
#[derive(Default)]
struct Sockets {
    known: BTreeMap<PathBuf, Socket>,
    /// The registrations in progress; each returns its socket and the plugin's name.
    tries: JoinSet<(PathBuf, Result<String, String>)>,
}

impl Sockets {
    /// Starts to register the sockets that are new or due for a retry.
    fn begin(&mut self, parts: &Arc<Parts>, found: BTreeMap<PathBuf, (u64, i64)>) {
        let now = Instant::now();
        for (path, identity) in found {
            self.known.entry(path).or_insert(Socket {
                identity,
                is_registering: false,
                name: None,
                next: now,
                retry: RETRY,
            });
        }
        for (path, socket) in &mut self.known {
            if socket.waits() && socket.next <= now {
                socket.is_registering = true;
                let (parts, path) = (Arc::clone(parts), path.clone());
                self.tries.spawn(async move {
                    let outcome = register(&parts, &path).await;
                    (path, outcome)
                });
            }
        }
    }

    fn record_outcome(&mut self, path: &Path, outcome: Result<String, String>) {
        let Some(socket) = self.known.get_mut(path) else {
            return;
        };
        socket.is_registering = false;
        match outcome {
            Ok(name) => socket.name = Some(name),
            Err(error) => {
                tracing::warn!(error, socket = %path.display(), "registering a plugin failed; retrying");
                socket.next = Instant::now() + socket.retry.pause();
            }
        }
    }

    /// Time until the next registration is due, at most [`SCAN_INTERVAL`].
    fn pause(&self) -> Duration {
        let waiting = self.known.values().filter(|socket| socket.waits());
        let left = waiting.map(|s| s.next.saturating_duration_since(Instant::now()));
        left.min().unwrap_or(SCAN_INTERVAL).min(SCAN_INTERVAL)
    }
}

impl Csi {
    /// The drivers in the format of CSINode.
    fn described(&self) -> Vec<CSINodeDriver> {
        let of = |(name, registered): (&String, &Registered)| CSINodeDriver {
            name: name.clone(),
            node_id: registered.info.node_id.clone(),
            topology_keys: Some(registered.info.topology.keys().cloned().collect::<Vec<_>>())
                .filter(|k| !k.is_empty()),
            allocatable: (registered.info.max_volumes > 0).then(|| VolumeNodeResources {
                count: i32::try_from(registered.info.max_volumes).ok(),
            }),
        };
        lock(&self.drivers).iter().map(of).collect()
    }
}

/// The sockets below the registration directory, each with the identity of its file.
fn sockets_below(dir: &Path, depth: u32) -> BTreeMap<PathBuf, (u64, i64)> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        let Ok(meta) = entry.metadata() else { continue };
        if !hidden && meta.file_type().is_socket() {
            found.insert(entry.path(), (meta.ino(), meta.ctime_nsec()));
        } else if !hidden && meta.is_dir() && depth > 0 {
            found.extend(sockets_below(&entry.path(), depth - 1));
        }
    }
    found
}

/// Registers drivers as they appear, until the process exits.
pub async fn run(parts: Arc<Parts>) {
    let nodes = parts.node.api();
    let dir = parts.config.root_dir.join("plugins_registry");
    if let Err(error) = std::fs::create_dir(&dir)
        && error.kind() != std::io::ErrorKind::AlreadyExists
    {
        tracing::warn!(%error, dir = %dir.display(), "drivers cannot register: creating the directory failed");
        return std::future::pending().await;
    }
    if nodes.is_some() {
        parts.csi.set_problem(Some(CSINODE_PENDING.into()));
    }
    let dirs = parts.csi.dirs.clone();
    let (volumes, unknown) = blocking(move || Ok(dirs.count())).await.unwrap_or_default();
    parts.metrics.reconstructed(volumes, unknown);
    let changed = Notify::new();
    let registering = register_sockets(&parts, &dir, &changed);
    let reporting = report_drivers(&parts, nodes.as_deref(), &changed);
    futures::future::join(registering, reporting).await;
}

/// Registers plugins as their sockets appear, and removes them as the sockets
/// disappear. Waits neither for plugins nor for the API.
async fn register_sockets(parts: &Arc<Parts>, dir: &Path, changed: &Notify) {
    let mut sockets = Sockets::default();
    loop {
        // Watched before the listing: a later change ends the wait below.
        let changes = Changes::of(dir);
        let listed = dir.to_owned();
        let found = blocking(move || Ok(sockets_below(&listed, DEPTH)))
            .await
            .unwrap_or_default();
        if remove_disappeared(parts, &mut sockets.known, &found) {
            changed.notify_one();
        }
        sockets.begin(parts, found);
        let pause = sockets.pause();
        tokio::select! {
            biased;
            // A panic terminates the process.
            Some(Ok((path, outcome))) = sockets.tries.join_next() => {
                sockets.record_outcome(&path, outcome);
                changed.notify_one();
            }
            () = changes.wait(pause) => {}
        }
    }
}

/// Publishes the drivers in the API whenever they change.
async fn report_drivers(parts: &Arc<Parts>, nodes: Option<&dyn NodeApi>, changed: &Notify) {
    let (mut published, mut served) = (
        None::<(Option<String>, Vec<CSINodeDriver>)>,
        BTreeSet::new(),
    );
    let (mut driver_queries, mut retry) = (DriverQueries::default(), REPORT_RETRY);
    loop {
        let due = driver_queries.query_due(parts).await;
        let mut pause = due.unwrap_or(SCAN_INTERVAL).min(SCAN_INTERVAL);
        let now = parts.csi.described();
        served.extend(now.iter().map(|driver| driver.name.clone()));
        let node = parts.node.borrow().clone();
        let registered = node.is_some() || nodes.is_none();
        // A recreated Node needs a new CSINode: the garbage collector deletes that of its predecessor.
        let report = |node: &Node| (node.uid(), now.clone());
        if let Some((nodes, node)) = nodes.zip(node)
            && published.as_ref() != Some(&report(&node))
        {
            if publish_drivers(parts, nodes, &node, (&now, &served)).await {
                (published, retry) = (Some(report(&node)), REPORT_RETRY);
            } else {
                pause = pause.min(retry.pause());
            }
        }
        tokio::select! {
            biased;
            () = changed.notified() => {}
            () = parts.csi.query_requested.notified() => {}
            _ = parts.node.wait_until_present(), if !registered => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Publishes the drivers: those registered `now`, and the removal of other
/// `served` ones. Returns whether this succeeded.
async fn publish_drivers(
    parts: &Parts,
    nodes: &dyn NodeApi,
    node: &Node,
    (now, served): (&[CSINodeDriver], &BTreeSet<String>),
) -> bool {
    let present = |name: &String| now.iter().any(|driver| driver.name == *name);
    let gone = served.iter().filter(|name| !present(name)).cloned();
    let drivers = Drivers {
        present: now.to_vec(),
        unregistered: gone.collect(),
    };
    let published = report(parts, nodes, node, &drivers).await;
    match &published {
        Ok(()) => parts.csi.set_problem(None),
        Err(error) => {
            tracing::debug!(error, "publishing the drivers in the CSINode failed");
            if parts.csi.problem().is_some() {
                let why = format!("failed to initialize CSINode: {error}");
                parts.csi.set_problem(Some(why));
            }
        }
    }
    published.is_ok()
}

/// When each driver was last queried for its information about this node.
#[derive(Default)]
struct DriverQueries {
    last: BTreeMap<String, Instant>,
    /// The queries in progress.
    queries: JoinSet<()>,
}

impl DriverQueries {
    /// Queries drivers whose information is due by their CSIDriver object, or known to be
    /// outdated. Returns the time until the next query.
    async fn query_due(&mut self, parts: &Arc<Parts>) -> Option<Duration> {
        while self.queries.try_join_next().is_some() {}
        let outdated = std::mem::take(&mut *lock(&parts.csi.outdated));
        let drivers: Vec<(String, Registered)> = lock(&parts.csi.drivers)
            .iter()
            .map(|(name, registered)| (name.clone(), registered.clone()))
            .collect();
        self.last
            .retain(|name, _| drivers.iter().any(|(known, _)| known == name));
        let (now, mut next) = (Instant::now(), None::<Duration>);
        for (name, registered) in drivers {
            let described = parts.api.csi_driver(&name).await.ok().flatten();
            let period = csi::refresh_period(described.as_ref());
            let last = *self.last.entry(name.clone()).or_insert(now);
            let is_due = period.is_some_and(|period| last + period <= now);
            if is_due || outdated.contains(&name) {
                self.last.insert(name.clone(), now);
                self.queries
                    .spawn(refresh(Arc::clone(parts), name, registered));
            }
            let left = period.map(|period| match is_due {
                true => period,
                false => (last + period).saturating_duration_since(now),
            });
            next = next.into_iter().chain(left).min();
        }
        next
    }
}

/// Queries a driver. A failed query is repeated when the next one is due.
async fn refresh(parts: Arc<Parts>, name: String, registered: Registered) {
    match registered.driver.info().await {
        Ok(info) => {
            let mut drivers = lock(&parts.csi.drivers);
            if let Some(known) = drivers
                .get_mut(&name)
                .filter(|d| d.socket == registered.socket && d.info != info)
            {
                known.info = info;
                parts.csi.query_requested.notify_one();
            }
        }
        Err(error) => {
            tracing::debug!(%error, driver = name, "cannot read a driver's information about this node")
        }
    }
}

/// Removes sockets that disappeared. A driver is removed with its registration socket, unless it has registered another
/// one: during an update a driver has two. A socket whose registration is in progress is kept until that completes.
/// Returns whether a registered plugin was removed.
fn remove_disappeared(
    parts: &Parts,
    known: &mut BTreeMap<PathBuf, Socket>,
    found: &BTreeMap<PathBuf, (u64, i64)>,
) -> bool {
    let mut disappeared = vec![];
    known.retain(|path, socket| {
        let stays = socket.is_registering || found.get(path) == Some(&socket.identity);
        if let (false, Some(name)) = (stays, &socket.name) {
            disappeared.push((path.clone(), name.clone()));
        }
        stays
    });
    let has_removed = !disappeared.is_empty();
    for (path, name) in disappeared {
        let was_driver = {
            let mut drivers = lock(&parts.csi.drivers);
            drivers.get(&name).is_some_and(|d| d.socket == path) && drivers.remove(&name).is_some()
        };
        let now = parts.clock.now();
        if parts.claims.manager.remove_instance(&name, &path) {
            // Other instances of the driver stay registered.
            tracing::info!(driver = name, socket = %path.display(), "DRA driver unregistered");
            continue;
        }
        if !was_driver && !parts.devices.manager.mark_gone(&name, &path, now) {
            continue;
        }
        tracing::info!(plugin = name, socket = %path.display(), "plugin unregistered");
        for other in known.values_mut() {
            if other.name.as_ref() == Some(&name) {
                (other.name, other.next) = (None, Instant::now());
            }
        }
    }
    has_removed
}

/// Registers the plugin of a socket. Returns its name.
async fn register(parts: &Arc<Parts>, path: &Path) -> Result<String, String> {
    let socket = &path.display().to_string();
    let plugin = get_plugin_info(socket)
        .await
        .map_err(|e| format!("cannot read the plugin's information: {e}"))?;
    let outcome = accept(parts, &plugin, socket).await;
    notify_registration_status(socket, outcome.clone())
        .await
        .map_err(|e| {
            format!(
                "cannot notify {} of the registration's outcome: {e}",
                plugin.name
            )
        })?;
    outcome.map(|()| plugin.name)
}

async fn accept(parts: &Arc<Parts>, plugin: &Plugin, socket: &str) -> Result<(), String> {
    let endpoint = if plugin.endpoint.is_empty() {
        socket
    } else {
        &plugin.endpoint
    };
    match plugin.kind.as_str() {
        "CSIPlugin" => accept_driver(parts, plugin, socket, endpoint).await,
        "DevicePlugin" => {
            let path = endpoint.strip_prefix("unix://").unwrap_or(endpoint);
            let (path, by) = (Path::new(path), Path::new(socket));
            devices::register(&parts.devices, &plugin.name, &plugin.versions, path, by).await
        }
        "DRAPlugin" => {
            let path = endpoint.strip_prefix("unix://").unwrap_or(endpoint);
            let (path, by) = (Path::new(path), Path::new(socket));
            claims::register(&parts.claims, &plugin.name, &plugin.versions, path, by).await
        }
        other => Err(format!(
            "unsupported plugin type {other:?}: this version supports CSIPlugin, DevicePlugin and DRAPlugin"
        )),
    }
}

async fn accept_driver(
    parts: &Parts,
    plugin: &Plugin,
    socket: &str,
    endpoint: &str,
) -> Result<(), String> {
    if !plugin
        .versions
        .iter()
        .any(|v| v.trim_start_matches('v').split('.').next() == Some("1"))
    {
        return Err(format!(
            "driver {} supports CSI {}, but version 1 is required",
            plugin.name,
            plugin.versions.join(", ")
        ));
    }
    let (metrics, name) = (Arc::clone(&parts.metrics), plugin.name.clone());
    let report: Report = Arc::new(move |method, code, took| metrics.csi(&name, method, code, took));
    let driver = Driver::new(endpoint, report).map_err(|e| e.to_string())?;
    let info = driver
        .info()
        .await
        .map_err(|e| format!("NodeGetInfo: {e}"))?;
    let capabilities = driver
        .capabilities()
        .await
        .map_err(|e| format!("NodeGetCapabilities: {e}"))?;
    tracing::info!(
        driver = plugin.name,
        node_id = info.node_id,
        ?capabilities,
        "CSI driver registered"
    );
    // A restarted driver may have lost its staged volumes. They are staged again, which is idempotent.
    let own = csi::unique_name(&plugin.name, "");
    lock(&parts.csi.staged).retain(|name| !name.starts_with(&own));
    lock(&parts.csi.drivers).insert(
        plugin.name.clone(),
        Registered {
            socket: socket.into(),
            driver,
            capabilities,
            info,
        },
    );
    // Pods that wait for the driver can retry immediately.
    parts.ledger.drivers_changed();
    Ok(())
}

/// Publishes the drivers in CSINode, and in the node's annotation and labels.
async fn report(
    parts: &Parts,
    nodes: &dyn NodeApi,
    node: &Node,
    drivers: &Drivers,
) -> Result<(), String> {
    nodes
        .report_drivers(node, drivers)
        .await
        .map_err(|e| e.to_string())?;
    let labels: BTreeMap<String, String> = lock(&parts.csi.drivers)
        .values()
        .flat_map(|r| r.info.topology.clone())
        .collect();
    let known = node.annotations().get(NODE_IDS);
    let text = drivers.node_ids(known.map(String::as_str));
    let named = |(key, value): (&String, &String)| node.labels().get(key) == Some(value);
    if known == text.as_ref() && labels.iter().all(named) {
        return Ok(());
    }
    let patch = json!({"metadata": {"annotations": {NODE_IDS: text}, "labels": labels}});
    nodes
        .patch(&node.name_any(), &patch)
        .await
        .map(|_| ())
        .map_err(|e| e.to_string())
}
