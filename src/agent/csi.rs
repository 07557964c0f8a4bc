//! Volumes of CSI drivers: drivers are registered as they appear, volumes are staged and published for pods, and
//! undone after them (kubelet spec, 9.5 and 14.5).

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_proto::csi as pb;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::{CSINodeDriver, VolumeNodeResources};
use kube::ResourceExt as _;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Context, NodeApi};
use crate::core::csi::{self, Abilities, Volume, VolumeData};
use crate::core::pod;
use crate::csi::{Driver, NodeInfo, Plugin, ask, tell};
use crate::host::blocking;
use crate::host::csi::{CsiDirs, Published, give, is_mounted};
use crate::kubeapi::pods::TokenFor;
use crate::sys::{digest, watch};

/// How often the directory of registrations is looked at in any case, and while something failed.
const LOOK: (Duration, Duration) = (Duration::from_secs(60), Duration::from_millis(500));
/// The pauses before a socket that failed is asked again.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(120));

/// A driver that is registered.
#[derive(Debug, Clone)]
struct Registered {
    driver: Driver,
    abilities: Abilities,
    info: NodeInfo,
}

/// The drivers of this node, and the directories of their volumes.
pub struct Csi {
    drivers: Mutex<BTreeMap<String, Registered>>,
    /// One call at a time for each volume.
    locks: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    dirs: CsiDirs,
}

/// What a socket in the directory of registrations has come to.
struct Socket {
    /// Another file under the same name is another registration.
    identity: (u64, i64),
    name: Option<String>,
    next: Instant,
    pause: Duration,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Csi {
    /// No drivers yet; volumes lie below the agent's root directory.
    #[must_use]
    pub fn new(root: &Path) -> Csi {
        Csi { drivers: Mutex::default(), locks: Mutex::default(), dirs: CsiDirs(root.into()) }
    }

    fn driver(&self, name: &str) -> Result<Registered, String> {
        let found = lock(&self.drivers).get(name).cloned();
        found.ok_or_else(|| format!("driver name {name} not found in the list of registered CSI drivers"))
    }

    fn turn(&self, data: &VolumeData) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = lock(&self.locks);
        locks.retain(|_, held| Arc::strong_count(held) > 1);
        Arc::clone(locks.entry(format!("{}^{}", data.driver_name, data.volume_handle)).or_default())
    }

    /// Where the device of a pod's volume is published.
    pub fn device(&self, uid: &str, name: &str) -> Result<PathBuf, String> {
        self.dirs.device(uid, name)
    }

    /// The volumes that this node has, or is about to have, of those that are attached, as nodes name them.
    #[must_use]
    pub fn in_use(&self) -> Vec<String> {
        if lock(&self.drivers).is_empty() {
            return vec![];
        }
        let of = |v: Published| format!("kubernetes.io/csi/{}^{}", v.data.driver_name, v.data.volume_handle);
        let mut names: Vec<String> = self.dirs.published().into_iter().filter(|v| !v.data.attachment_id.is_empty()).map(of).collect();
        names.sort();
        names.dedup();
        names
    }

    /// What CSINode says of the drivers.
    fn described(&self) -> Vec<CSINodeDriver> {
        let of = |(name, registered): (&String, &Registered)| CSINodeDriver {
            name: name.clone(),
            node_id: registered.info.node_id.clone(),
            topology_keys: Some(registered.info.topology.keys().cloned().collect::<Vec<_>>()).filter(|k| !k.is_empty()),
            allocatable: (registered.info.most > 0).then(|| VolumeNodeResources { count: i32::try_from(registered.info.most).ok() }),
        };
        lock(&self.drivers).iter().map(of).collect()
    }
}

async fn secret(context: &Context, reference: Option<&(String, String)>) -> Result<HashMap<String, String>, String> {
    let Some((namespace, name)) = reference else { return Ok(HashMap::new()) };
    let found =
        context.api.secret(namespace, name).await.map_err(|e| format!("failed to find the secret {name} in the namespace {namespace}: {e}"))?;
    Ok(found.data.iter().flatten().map(|(k, v)| (k.clone(), String::from_utf8_lossy(&v.0).into_owned())).collect())
}

/// Stages and publishes a volume for a pod. `group` is the pod's, with whether it is only set where it differs.
pub async fn publish(context: &Context, pod: &Pod, volume: &Volume, group: Option<(u32, bool)>) -> Result<(), String> {
    let registered = context.csi.driver(&volume.driver)?;
    let described = context.api.csi_driver(&volume.driver).await.map_err(|e| e.to_string())?;
    let described = described.as_ref();
    let uid = pod::uid(pod).to_owned();
    let handle = if volume.inline { format!("csi-{}", digest::sha256(format!("{uid}{}", volume.name).as_bytes())) } else { volume.handle.clone() };
    if volume.inline && !csi::serves_inline(described) {
        return Err(format!("volume mode \"Ephemeral\" not supported by driver {} (no CSIDriver object)", volume.driver));
    }
    let node = &context.config.node_name;
    let mut data = VolumeData {
        spec_vol_id: volume.name.clone(),
        volume_handle: handle.clone(),
        driver_name: volume.driver.clone(),
        node_name: node.clone(),
        attachment_id: String::new(),
        volume_lifecycle_mode: if volume.inline { "Ephemeral" } else { "Persistent" }.into(),
    };
    let mut publish_context = HashMap::new();
    if csi::wants_attachment(volume, described) {
        data.attachment_id = format!("csi-{}", digest::sha256(format!("{handle}{}{node}", volume.driver).as_bytes()));
        let attached = context.api.attached(&data.attachment_id).await.map_err(|e| e.to_string())?;
        publish_context = attached.ok_or_else(|| {
            format!(
                "volume is not attached yet: VolumeAttachment {} of driver {} is awaited; its attacher makes it so",
                data.attachment_id, volume.driver
            )
        })?;
    }
    let turn = context.csi.turn(&data);
    let _turn = turn.lock().await;
    let (dirs, noted, owner, block) = (context.csi.dirs.clone(), data.clone(), uid.clone(), volume.block);
    let (target, there) = blocking(move || {
        let target = dirs.prepare(&owner, &noted, block)?;
        let there = is_mounted(&target)?;
        Ok((target, there))
    })
    .await?;
    let gives = csi::gives_group(volume, described, registered.abilities);
    let again = described.is_some_and(|d| d.spec.requires_republish == Some(true));
    if there && !again {
        // An agent that was killed may have left the group half given: its root is given last.
        return match group.filter(|_| gives) {
            Some((group, _)) => blocking(move || give(&target, group, true)).await,
            None => Ok(()),
        };
    }
    let capability = csi::capability(volume, registered.abilities, group.map(|(group, _)| group));
    let failed = |what: &str| {
        let what = what.to_owned();
        move |e: crate::csi::CsiError| format!("{what}: {e}")
    };
    let mut staging = String::new();
    if registered.abilities.stage && !volume.inline {
        let (dirs, noted) = (context.csi.dirs.clone(), data.clone());
        staging = blocking(move || dirs.stage(&noted, block)).await?.display().to_string();
        let request = pb::NodeStageVolumeRequest {
            volume_id: handle.clone(),
            publish_context: publish_context.clone(),
            staging_target_path: staging.clone(),
            volume_capability: Some(capability.clone()),
            secrets: secret(context, volume.stage_secret.as_ref()).await?,
            volume_context: volume.attributes.clone().into_iter().collect(),
        };
        registered.driver.stage(request).await.map_err(failed("MountVolume.MountDevice failed"))?;
    }
    let mut volume_context = csi::context(volume, pod, described);
    if let Some(tokens) = tokens(context, pod, described).await? {
        volume_context.insert("csi.storage.k8s.io/serviceAccount.tokens".into(), tokens.to_string());
    }
    let request = pb::NodePublishVolumeRequest {
        volume_id: handle,
        publish_context,
        staging_target_path: staging,
        target_path: target.display().to_string(),
        volume_capability: Some(capability),
        readonly: volume.read_only,
        secrets: secret(context, volume.publish_secret.as_ref()).await?,
        volume_context,
    };
    registered.driver.publish(request).await.map_err(failed("MountVolume.SetUp failed"))?;
    match group.filter(|_| gives) {
        Some((group, on_mismatch)) => blocking(move || give(&target, group, on_mismatch)).await,
        None => Ok(()),
    }
}

/// The tokens that a driver wants of the pod's service account.
async fn tokens(context: &Context, pod: &Pod, driver: Option<&k8s_openapi::api::storage::v1::CSIDriver>) -> Result<Option<Value>, String> {
    let wishes = driver.and_then(|d| d.spec.token_requests.as_ref()).filter(|t| !t.is_empty());
    let mut all = serde_json::Map::new();
    for wish in wishes.into_iter().flatten() {
        let asked = TokenFor { pod, audience: &wish.audience, seconds: wish.expiration_seconds.unwrap_or(3600) };
        let token = context.api.token(asked).await.map_err(|e| format!("failed to fetch token: {e}"))?;
        all.insert(wish.audience.clone(), json!({"token": token.text, "expirationTimestamp": token.expires.to_string()}));
    }
    Ok((!all.is_empty()).then(|| all.into()))
}

/// Undoes all that was published for a pod. Nothing is forgotten before its driver has said that it is undone.
pub async fn unpublish(context: &Context, uid: &str) -> Result<(), String> {
    if !context.csi.dirs.has(uid) {
        return Ok(());
    }
    let dirs = context.csi.dirs.clone();
    let all = blocking(move || Ok(dirs.published())).await?;
    for volume in all.iter().filter(|v| v.uid == uid) {
        let turn = context.csi.turn(&volume.data);
        let _turn = turn.lock().await;
        one(context, volume).await.map_err(|e| format!("volume {} cannot be unpublished: {e}", volume.name))?;
    }
    Ok(())
}

async fn one(context: &Context, volume: &Published) -> Result<(), String> {
    let data = &volume.data;
    let registered = context.csi.driver(&data.driver_name)?;
    let target = volume.target.display().to_string();
    registered.driver.unpublish(&data.volume_handle, &target).await.map_err(|e| format!("NodeUnpublishVolume: {e}"))?;
    // The pod's own note goes last: while it is there, a try that was cut off is made again as a whole.
    let (dirs, own) = (context.csi.dirs.clone(), volume.clone());
    let staged = blocking(move || {
        let same = |v: &Published| v.data.driver_name == own.data.driver_name && v.data.volume_handle == own.data.volume_handle;
        let others = dirs.published().iter().any(|v| same(v) && (&v.uid, &v.name) != (&own.uid, &own.name));
        Ok(dirs.staged(&own).filter(|_| !others))
    })
    .await?;
    if let Some(staged) = &staged {
        let staged = staged.display().to_string();
        registered.driver.unstage(&data.volume_handle, &staged).await.map_err(|e| format!("NodeUnstageVolume: {e}"))?;
    }
    let (dirs, own) = (context.csi.dirs.clone(), volume.clone());
    blocking(move || {
        if staged.is_some() {
            dirs.unstaged(&own)?;
        }
        dirs.forget(&own)
    })
    .await
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
        let found = sockets(&dir, 3);
        known.retain(|path, socket| {
            let stays = found.get(path) == Some(&socket.identity);
            if let (false, Some(name)) = (stays, &socket.name) {
                tracing::info!(driver = name, "a driver has gone");
                lock(&context.csi.drivers).remove(name);
            }
            stays
        });
        for (path, identity) in found {
            let socket = known.entry(path.clone()).or_insert(Socket { identity, name: None, next: Instant::now(), pause: RETRY.0 });
            if socket.name.is_some() || Instant::now() < socket.next {
                continue;
            }
            match register(&context, &path.display().to_string()).await {
                Ok(name) => socket.name = Some(name),
                Err(error) => {
                    tracing::warn!(error, socket = %path.display(), "a plugin could not be registered");
                    socket.next = Instant::now() + socket.pause;
                    socket.pause = (socket.pause * 2).min(RETRY.1);
                }
            }
        }
        let now = context.csi.described();
        if let Some(nodes) = nodes.as_ref().filter(|_| told.as_ref() != Some(&now)) {
            match report(&context, &**nodes, &now).await {
                Ok(()) => told = Some(now),
                Err(error) => tracing::debug!(error, "the drivers could not be reported yet"),
            }
        }
        let settled = known.values().all(|s| s.name.is_some()) && (told.is_some() || nodes.is_none());
        watch::changed(&dir, if settled { LOOK.0 } else { LOOK.1 }).await;
    }
}

/// Registers who is behind a socket; the answer is the name.
async fn register(context: &Context, socket: &str) -> Result<String, String> {
    let plugin = ask(socket).await.map_err(|e| format!("it does not say who it is: {e}"))?;
    let outcome = accept(context, &plugin, socket).await;
    tell(socket, outcome.clone()).await.map_err(|e| format!("{} could not be told the outcome: {e}", plugin.name))?;
    outcome.map(|()| plugin.name)
}

async fn accept(context: &Context, plugin: &Plugin, socket: &str) -> Result<(), String> {
    if plugin.kind != "CSIPlugin" {
        return Err(format!("plugins of type {:?} are not served by this version: it serves CSIPlugin", plugin.kind));
    }
    if !plugin.versions.iter().any(|v| v.trim_start_matches('v').split('.').next() == Some("1")) {
        return Err(format!("driver {} speaks CSI {}, and version 1 is needed", plugin.name, plugin.versions.join(", ")));
    }
    let endpoint = if plugin.endpoint.is_empty() { socket } else { &plugin.endpoint };
    let driver = Driver::new(endpoint).map_err(|e| e.to_string())?;
    let info = driver.info().await.map_err(|e| format!("NodeGetInfo: {e}"))?;
    let abilities = driver.abilities().await.map_err(|e| format!("NodeGetCapabilities: {e}"))?;
    tracing::info!(driver = plugin.name, node_id = info.node_id, ?abilities, "a driver is registered");
    lock(&context.csi.drivers).insert(plugin.name.clone(), Registered { driver, abilities, info });
    // Pods that waited for it need not wait for their next try.
    context.wake_all();
    Ok(())
}

/// Tells the API which drivers there are: in CSINode, and in the node's annotation and labels.
async fn report(context: &Context, nodes: &dyn NodeApi, drivers: &[CSINodeDriver]) -> Result<(), String> {
    let Some(node) = context.node.borrow().clone() else { return Err("the node is not registered yet".into()) };
    nodes.report_drivers(&node, drivers).await.map_err(|e| e.to_string())?;
    let ids: BTreeMap<&str, &str> = drivers.iter().map(|d| (d.name.as_str(), d.node_id.as_str())).collect();
    let labels: BTreeMap<String, String> = lock(&context.csi.drivers).values().flat_map(|r| r.info.topology.clone()).collect();
    let known = node.annotations().get("csi.volume.kubernetes.io/nodeid");
    if drivers.is_empty() && known.is_none() {
        return Ok(());
    }
    let text = serde_json::to_string(&ids).map_err(|e| e.to_string())?;
    let patch = json!({"metadata": {"annotations": {"csi.volume.kubernetes.io/nodeid": text}, "labels": labels}});
    nodes.patch(&node.name_any(), &patch).await.map(|_| ()).map_err(|e| e.to_string())
}
