//! Drivers are registered as they appear and are forgotten as they go (kubelet spec, 9.5 and 14.5).

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::storage::v1::{CSINodeDriver, VolumeNodeResources};
use kube::ResourceExt as _;
use serde_json::json;
use tokio::time::Instant;

use super::Csi;
use super::Registered;
use super::lock;
use crate::agent::{Context, NodeApi};
use crate::core::backoff::Doubling;
use crate::core::volume::csi;
use crate::csi::{Driver, Plugin, Report, ask, tell};
use crate::host::blocking;
use crate::sys::watch::Changes;

/// How often the directory of registrations is looked at in any case.
const LOOK: Duration = Duration::from_secs(60);
/// The pauses before a socket that failed is asked again, and before the API is.
const RETRY: Doubling = Doubling::new(FIRST_RETRY, Duration::from_secs(120));
const FIRST_RETRY: Duration = Duration::from_millis(500);

/// How deep below that directory sockets are looked for.
const DEPTH: u32 = 3;

/// What a socket in the directory of registrations has come to.
struct Socket {
    /// Another file under the same name is another registration.
    identity: (u64, i64),
    name: Option<String>,
    next: Instant,
    retry: Doubling,
}

impl Csi {
    /// What CSINode says of the drivers.
    fn described(&self) -> Vec<CSINodeDriver> {
        let of = |(name, registered): (&String, &Registered)| CSINodeDriver {
            name: name.clone(),
            node_id: registered.info.node_id.clone(),
            topology_keys: Some(registered.info.topology.keys().cloned().collect::<Vec<_>>())
                .filter(|k| !k.is_empty()),
            allocatable: (registered.info.most > 0).then(|| VolumeNodeResources {
                count: i32::try_from(registered.info.most).ok(),
            }),
        };
        lock(&self.drivers).iter().map(of).collect()
    }
}

/// The sockets in the directory of registrations, with what tells one file from the next under its name.
fn sockets(dir: &Path, depth: u32) -> BTreeMap<PathBuf, (u64, i64)> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        let Ok(meta) = entry.metadata() else { continue };
        if !hidden && meta.file_type().is_socket() {
            found.insert(entry.path(), (meta.ino(), meta.ctime_nsec()));
        } else if !hidden && meta.is_dir() && depth > 0 {
            found.extend(sockets(&entry.path(), depth - 1));
        }
    }
    found
}

/// Registers drivers as they appear, until the process ends.
pub async fn run(context: Arc<Context>, nodes: Option<Arc<dyn NodeApi>>) {
    let dir = context.config.root_dir.join("plugins_registry");
    if let Err(error) = std::fs::create_dir(&dir)
        && error.kind() != std::io::ErrorKind::AlreadyExists
    {
        tracing::warn!(%error, dir = %dir.display(), "no driver can be registered: the directory cannot be made");
        return std::future::pending().await;
    }
    let mut known: BTreeMap<PathBuf, Socket> = BTreeMap::new();
    let mut told: Option<Vec<CSINodeDriver>> = None;
    loop {
        // Before the listing: what comes after it ends the wait below.
        let changes = Changes::of(&dir);
        let listed = dir.clone();
        let found = blocking(move || Ok(sockets(&listed, DEPTH)))
            .await
            .unwrap_or_default();
        forget_gone(&context, &mut known, &found);
        register_new(&context, &mut known, found).await;
        let now = context.csi.described();
        if let Some(nodes) = nodes.as_ref().filter(|_| told.as_ref() != Some(&now)) {
            match report(&context, &**nodes, &now).await {
                Ok(()) => told = Some(now.clone()),
                Err(error) => tracing::debug!(error, "the drivers could not be reported yet"),
            }
        }
        let next = known
            .values()
            .filter(|s| s.name.is_none())
            .map(|s| s.next.saturating_duration_since(Instant::now()))
            .min();
        let reported = told.as_ref() == Some(&now) || nodes.is_none();
        changes
            .wait(
                next.unwrap_or(LOOK)
                    .min(if reported { LOOK } else { FIRST_RETRY }),
            )
            .await;
    }
}

/// Forgets the sockets that have gone. A driver goes with the socket that it has registered with, unless it has another:
/// a driver that is being replaced has two for a while.
fn forget_gone(
    context: &Context,
    known: &mut BTreeMap<PathBuf, Socket>,
    found: &BTreeMap<PathBuf, (u64, i64)>,
) {
    let mut gone = vec![];
    known.retain(|path, socket| {
        let stays = found.get(path) == Some(&socket.identity);
        if let (false, Some(name)) = (stays, &socket.name) {
            gone.push((path.clone(), name.clone()));
        }
        stays
    });
    for (path, name) in gone {
        {
            let mut drivers = lock(&context.csi.drivers);
            if drivers.get(&name).is_none_or(|d| d.socket != path) {
                continue;
            }
            drivers.remove(&name);
        }
        tracing::info!(driver = name, socket = %path.display(), "a driver has gone");
        for other in known.values_mut() {
            if other.name.as_ref() == Some(&name) {
                (other.name, other.next) = (None, Instant::now());
            }
        }
    }
}

/// Registers the sockets that are new or due for another try, side by side: one that does not answer holds up no other.
async fn register_new(
    context: &Context,
    known: &mut BTreeMap<PathBuf, Socket>,
    found: BTreeMap<PathBuf, (u64, i64)>,
) {
    let now = Instant::now();
    for (path, identity) in found {
        known.entry(path).or_insert(Socket {
            identity,
            name: None,
            next: now,
            retry: RETRY,
        });
    }
    let due = known
        .iter_mut()
        .filter(|(_, socket)| socket.name.is_none() && socket.next <= now);
    let work = due.map(|(path, socket)| async move {
        match register(context, path).await {
            Ok(name) => socket.name = Some(name),
            Err(error) => {
                tracing::warn!(error, socket = %path.display(), "a plugin could not be registered");
                socket.next = Instant::now() + socket.retry.pause();
            }
        }
    });
    futures::future::join_all(work).await;
}

/// Registers who is behind a socket; the answer is the name.
async fn register(context: &Context, path: &Path) -> Result<String, String> {
    let socket = &path.display().to_string();
    let plugin = ask(socket)
        .await
        .map_err(|e| format!("it does not say who it is: {e}"))?;
    let outcome = accept(context, &plugin, socket).await;
    tell(socket, outcome.clone())
        .await
        .map_err(|e| format!("{} could not be told the outcome: {e}", plugin.name))?;
    outcome.map(|()| plugin.name)
}

async fn accept(context: &Context, plugin: &Plugin, socket: &str) -> Result<(), String> {
    if plugin.kind != "CSIPlugin" {
        return Err(format!(
            "plugins of type {:?} are not served by this version: it serves CSIPlugin",
            plugin.kind
        ));
    }
    if !plugin
        .versions
        .iter()
        .any(|v| v.trim_start_matches('v').split('.').next() == Some("1"))
    {
        return Err(format!(
            "driver {} speaks CSI {}, and version 1 is needed",
            plugin.name,
            plugin.versions.join(", ")
        ));
    }
    let endpoint = if plugin.endpoint.is_empty() {
        socket
    } else {
        &plugin.endpoint
    };
    let (metrics, name) = (Arc::clone(&context.metrics), plugin.name.clone());
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
        "a driver is registered"
    );
    // What a driver that was started anew has staged is not known: it is asked to stage again, which it can repeat.
    let own = csi::unique_name(&plugin.name, "");
    lock(&context.csi.staged).retain(|name| !name.starts_with(&own));
    lock(&context.csi.drivers).insert(
        plugin.name.clone(),
        Registered {
            socket: socket.into(),
            driver,
            capabilities,
            info,
        },
    );
    // Pods that waited for it need not wait for their next try.
    context.ledger.drivers_changed().await;
    Ok(())
}

/// Tells the API which drivers there are: in CSINode, and in the node's annotation and labels.
async fn report(
    context: &Context,
    nodes: &dyn NodeApi,
    drivers: &[CSINodeDriver],
) -> Result<(), String> {
    let Some(node) = context.node.borrow().clone() else {
        return Err("the node is not registered yet".into());
    };
    nodes
        .report_drivers(&node, drivers)
        .await
        .map_err(|e| e.to_string())?;
    let ids: BTreeMap<&str, &str> = drivers
        .iter()
        .map(|d| (d.name.as_str(), d.node_id.as_str()))
        .collect();
    let labels: BTreeMap<String, String> = lock(&context.csi.drivers)
        .values()
        .flat_map(|r| r.info.topology.clone())
        .collect();
    let known = node.annotations().get("csi.volume.kubernetes.io/nodeid");
    if drivers.is_empty() && known.is_none() {
        return Ok(());
    }
    let text = serde_json::to_string(&ids).map_err(|e| e.to_string())?;
    let patch = json!({"metadata": {"annotations": {"csi.volume.kubernetes.io/nodeid": text}, "labels": labels}});
    nodes
        .patch(&node.name_any(), &patch)
        .await
        .map(|_| ())
        .map_err(|e| e.to_string())
}
