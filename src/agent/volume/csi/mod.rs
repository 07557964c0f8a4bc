//! Volumes of CSI drivers: stages and publishes them for pods, and unpublishes
//! and unstages them afterwards (`pkg/volume/csi`).

mod attachment;
mod expansion;
pub(crate) mod registry;
pub(crate) mod unstaging;
mod usage;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use holdfast_proto::csi as pb;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::CSIDriver;
use serde_json::{Value, json};
use tokio::sync::{Notify, OwnedMutexGuard, watch};
use tokio::time::Instant;

pub use registry::run;
pub(crate) use usage::figures;

use crate::metrics::{Metrics, VolumeOperation};
use crate::node::OwnNode;
use crate::volume::VolumeSetUp;
use crate::volume::growth;
use crate::volume::reported::Reported;
use holdfast_config::Config;
use holdfast_core::fault::Fault;
use holdfast_core::lock::lock;
use holdfast_core::pod;
use holdfast_core::volume::csi::{self, NodeCapabilities, Volume};
use holdfast_core::volume::expansion::Expansions;
use holdfast_core::volume::resolved::Problem;
use holdfast_csi::{CsiError, Driver, NodeInfo};
use holdfast_host::volume::csi::{CsiDirs, Published, is_mounted, labels_files};
use holdfast_host::{HostError, PodHost, blocking};
use holdfast_kubeapi::pods::{PodApi, TokenFor};
use holdfast_sys::blocking_calls::BlockingCalls;
use holdfast_sys::machine::Machine;

/// Why a volume cannot be released or queried yet.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VolumeError {
    /// The driver is not registered. Its registration wakes the pods that wait for it.
    #[error("driver name {0} not found in the list of registered CSI drivers")]
    NoDriver(String),
    /// The driver rejected the call, or did not answer.
    #[error("{0}: {1}")]
    Driver(&'static str, CsiError),
    /// An error of this machine.
    #[error("{0}")]
    Host(#[from] HostError),
    /// A pod's volume cannot be unpublished.
    #[error("volume {volume} cannot be unpublished: {why}")]
    Published {
        /// The name of the volume's directory.
        volume: String,
        /// The cause.
        why: Box<VolumeError>,
    },
}

impl From<VolumeError> for Problem {
    fn from(error: VolumeError) -> Problem {
        match error {
            VolumeError::Host(error) => error.into(),
            other => Problem::later(other.to_string()),
        }
    }
}

/// A registered driver.
#[derive(Clone)]
struct Registered {
    /// The registration socket.
    socket: PathBuf,
    driver: Driver,
    capabilities: NodeCapabilities,
    info: NodeInfo,
}

/// What publishing and unpublishing CSI volumes uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub api: Arc<dyn PodApi>,
    pub host: Arc<dyn PodHost>,
    pub machine: Arc<Machine>,
    pub metrics: Arc<Metrics>,
    pub node: Arc<OwnNode>,
    pub csi: Arc<Csi>,
    pub expansion: growth::Parts,
}

/// Pod uid and directory name of a published volume.
type VolumeKey = (String, String);

/// The drivers of this node, and their published volumes.
pub struct Csi {
    drivers: Mutex<BTreeMap<String, Registered>>,
    /// All volumes that are or may be published: those recorded on disk when the agent started, and later ones.
    published: Mutex<BTreeMap<VolumeKey, Published>>,
    /// The unique names of volumes that drivers have staged since their registration.
    staged: Mutex<BTreeSet<String>>,
    /// Volumes published since the agent started whose target is not a mount point:
    /// their state is not visible in the mount table.
    unmounted: Mutex<BTreeSet<VolumeKey>>,
    /// Volumes that are still staged, but not used by any pod, by their unique names.
    staged_without_pod: Mutex<BTreeMap<String, Published>>,
    /// Those of them that still need a task to unstage them.
    to_unstage: Mutex<Vec<Published>>,
    unstage_requested: Notify,
    /// Serialises calls for the same volume.
    locks: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    /// The volumes reported in use. Its notification also covers changes of [`Csi::problem`].
    reported: Reported,
    /// Volumes that were expanded on this node, or failed to be; local volumes only after a failure.
    expansions: Arc<Mutex<Expansions>>,
    /// Drivers whose volume limit is outdated and must be queried again.
    outdated: Mutex<BTreeSet<String>>,
    query_requested: Notify,
    /// Why CSINode is not up to date; `None` if it is.
    problem: watch::Sender<Option<String>>,
    dirs: CsiDirs,
    /// Threads for filesystem calls that may hang.
    rooms: BlockingCalls,
}

impl Csi {
    /// Creates an instance without drivers. Reads published volumes from below the root directory.
    #[must_use]
    pub fn new(root: &Path) -> Csi {
        let dirs = CsiDirs(root.into());
        let published: BTreeMap<VolumeKey, Published> =
            dirs.published().into_iter().map(|p| (p.key(), p)).collect();
        // Volumes that an earlier agent could not unstage.
        let mut to_unstage = dirs.staged_volumes();
        to_unstage.retain(|staged| !published.values().any(|v| is_same(v, staged)));
        if dirs.count().1 > 0 {
            // A pod's volume could not be identified, and it may be one of the staged ones: keep them all.
            to_unstage.clear();
        }
        let named = to_unstage.iter().map(|v| (unique_name(v), v.clone()));
        let staged_without_pod = named.collect();
        Csi {
            drivers: Mutex::default(),
            published: Mutex::new(published),
            staged: Mutex::default(),
            unmounted: Mutex::default(),
            staged_without_pod: Mutex::new(staged_without_pod),
            to_unstage: Mutex::new(to_unstage),
            unstage_requested: Notify::new(),
            locks: Mutex::default(),
            reported: Reported::default(),
            expansions: Arc::default(),
            outdated: Mutex::default(),
            query_requested: Notify::new(),
            problem: watch::Sender::new(None),
            dirs,
            rooms: BlockingCalls::default(),
        }
    }

    /// The expansions that failed or are due later; those of local volumes are among them.
    pub(crate) fn expansions(&self) -> Arc<Mutex<Expansions>> {
        Arc::clone(&self.expansions)
    }

    fn driver(&self, name: &str) -> Result<Registered, VolumeError> {
        let found = lock(&self.drivers).get(name).cloned();
        found.ok_or_else(|| VolumeError::NoDriver(name.to_owned()))
    }

    /// Whether a driver supports `NodeExpandVolume`.
    #[must_use]
    pub(crate) fn supports_expansion(&self, driver: &str) -> bool {
        lock(&self.drivers)
            .get(driver)
            .is_some_and(|d| d.capabilities.expand)
    }

    fn volume_lock(&self, place: &Published) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = lock(&self.locks);
        locks.retain(|_, held| Arc::strong_count(held) > 1);
        Arc::clone(locks.entry(unique_name(place)).or_default())
    }

    fn record_published(&self, place: &Published) {
        let before = lock(&self.published).insert(place.key(), place.clone());
        if before.is_none() {
            self.reported.request_update();
        }
    }

    fn forget(&self, place: &Published) {
        lock(&self.unmounted).remove(&place.key());
        lock(&self.published).remove(&place.key());
        self.forget_unused(place);
        self.reported.request_update();
    }

    /// After the last use of a volume, published or staged, removes it from the reported ones. For the next pod it must
    /// be reported again: until then the controller may start to detach it.
    fn forget_unused(&self, place: &Published) {
        let name = unique_name(place);
        let published = lock(&self.published);
        let is_there = published.values().any(|v| is_same(v, place));
        if !is_there && !lock(&self.staged_without_pod).contains_key(&name) {
            self.reported.retain(|other| other != name);
            lock(&self.expansions).remove(&name);
        }
    }

    /// The same volume in other pods, including those that wait for it.
    fn in_other_pods(&self, place: &Published) -> Vec<Published> {
        let is_other =
            |v: &&Published| is_same(v, place) && (&v.uid, &v.name) != (&place.uid, &place.name);
        let published = lock(&self.published);
        published.values().filter(is_other).cloned().collect()
    }

    /// Whether another pod uses the same volume, or waits for it.
    fn is_shared(&self, place: &Published) -> bool {
        !self.in_other_pods(place).is_empty()
    }

    /// Whether the pod has volumes that are or may be published.
    #[must_use]
    pub fn has_volumes(&self, uid: &str) -> bool {
        lock(&self.published).values().any(|v| v.uid == uid)
    }

    /// Why the node is not ready because of its drivers. Without an up-to-date CSINode, controllers would treat
    /// migrated volumes as in-tree volumes.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.problem.borrow().clone()
    }

    /// Waits until there is no such problem.
    pub(crate) async fn wait_until_ready(&self) {
        let mut problem = self.problem.subscribe();
        // This object owns the sender, so the wait cannot fail.
        let _ = problem.wait_for(Option::is_none).await;
    }

    fn set_problem(&self, now: Option<String>) {
        let changed = self.problem.send_if_modified(|known| {
            let changed = *known != now;
            *known = now;
            changed
        });
        if changed {
            self.reported.request_update();
        }
    }

    /// Requests a new query of the driver's volume limit.
    fn request_limit_query(&self, driver: &str) {
        lock(&self.outdated).insert(driver.to_owned());
        self.query_requested.notify_one();
    }

    /// The path of a pod's published block device.
    pub fn device(&self, uid: &str, name: &str) -> Result<PathBuf, HostError> {
        self.dirs.device(uid, name)
    }

    /// The unique names of attachable volumes that this node uses or is about to use.
    #[must_use]
    pub fn in_use(&self) -> Vec<String> {
        let published = lock(&self.published);
        self.attached(&published).into_iter().collect()
    }

    /// Records that the node's status reports these volumes in use. Ignores those that are not used any more.
    pub(crate) fn set_reported(&self, names: &[String]) {
        // Under the lock, so that a volume that is forgotten meanwhile is not added again.
        let published = lock(&self.published);
        let mut now = self.attached(&published);
        now.retain(|name| names.contains(name));
        self.reported.set(now);
    }

    /// The unique names of published or staged volumes that have an attachment.
    fn attached(&self, published: &BTreeMap<VolumeKey, Published>) -> BTreeSet<String> {
        let staged_without_pod = lock(&self.staged_without_pod);
        let all = published.values().chain(staged_without_pod.values());
        let attached = all.filter(|v| !v.data.attachment_id.is_empty());
        attached.map(unique_name).collect()
    }

    /// Waits until [`Csi::in_use`] or [`Csi::problem`] has changed.
    pub(crate) async fn in_use_changed(&self) {
        self.reported.changed().await;
    }
}

/// The volume's unique name in the Node's status.
fn unique_name(volume: &Published) -> String {
    csi::unique_name(&volume.data.driver_name, &volume.data.volume_handle)
}

fn is_same(one: &Published, other: &Published) -> bool {
    one.data.driver_name == other.data.driver_name
        && one.data.volume_handle == other.data.volume_handle
}

/// The data of a secret; empty without a reference. `field` is the field with the reference, for error messages.
async fn secret(
    parts: &Parts,
    field: &str,
    reference: Option<&(String, String)>,
) -> Result<HashMap<String, String>, Problem> {
    let Some((namespace, name)) = reference else {
        return Ok(HashMap::new());
    };
    let found = parts.api.secret(namespace, name).await.map_err(|e| {
        Problem::later(format!(
            "fetching {field} {namespace}/{name} failed: kubernetes.io/csi: failed to find the secret {name} in the namespace {namespace} with error: {e}"
        ))
    })?;
    Ok(found
        .data
        .iter()
        .flatten()
        .map(|(k, v)| (k.clone(), String::from_utf8_lossy(&v.0).into_owned()))
        .collect())
}

fn failed(call: &'static str) -> impl Fn(CsiError) -> VolumeError {
    move |error| VolumeError::Driver(call, error)
}

/// The inputs for setting up a pod's volume.
struct Wanted<'a> {
    volume: &'a Volume,
    registered: Registered,
    described: Option<CSIDriver>,
    place: Published,
    volume_lock: VolumeLock,
}

/// The right to call a driver about a volume; only one task has it at a time.
type VolumeLock = Arc<OwnedMutexGuard<()>>;

/// Makes a call that continues if its caller is dropped, and keeps the volume's lock until the driver
/// answers or the call times out. Otherwise a driver could be called to unstage a volume that it is
/// still staging, and would mount it afterwards.
async fn run_uncancelled<T: Send + 'static>(
    volume_lock: &VolumeLock,
    call: impl Future<Output = Result<T, CsiError>> + Send + 'static,
) -> Result<T, CsiError> {
    let held = Arc::clone(volume_lock);
    let calling = tokio::spawn(async move {
        let outcome = call.await;
        drop(held);
        outcome
    });
    calling.await.unwrap_or_else(|error| {
        Err(CsiError {
            text: error.to_string(),
            certain: false,
            infeasible: false,
            unready: false,
        })
    })
}

/// Stages and publishes a volume for a pod, and expands its filesystem if needed. `is_new` is whether this agent sets
/// up the volume for the pod for the first time; `waits` is whether the pod's containers wait for it.
pub(super) async fn publish(
    parts: &Parts,
    pod: &Pod,
    volume: &Volume,
    is_new: bool,
    waits: bool,
) -> Result<VolumeSetUp, Problem> {
    let described = parts
        .api
        .csi_driver(&volume.driver)
        .await
        .map_err(|e| Problem::later(e.to_string()))?;
    let registered = match parts.csi.driver(&volume.driver) {
        // While a driver is being replaced, its published volumes stay, and the driver is not called.
        Err(_) if !is_new && !republishes(described.as_ref()) => {
            return Ok(VolumeSetUp {
                labelled: csi::labelled(volume, described.as_ref()).label.is_some(),
                again: None,
            });
        }
        found => found?,
    };
    let volume = &csi::labelled(volume, described.as_ref());
    csi::check_lifecycle(volume, described.as_ref())?;
    let uid = pod::uid(pod);
    let attaches = csi::needs_attachment(volume, described.as_ref());
    let data = csi::volume_data(volume, uid, &parts.config.node_name, attaches);
    let place = parts
        .csi
        .dirs
        .place(uid, data, volume.block, volume.claim.clone())?;
    let volume_lock = parts.csi.volume_lock(&place).lock_owned().await;
    let wanted = Wanted {
        volume,
        registered,
        described,
        place,
        volume_lock: Arc::new(volume_lock),
    };
    // Includes volumes recorded on disk: another pod's volume is released only after its driver has unpublished it.
    if csi::is_for_one_pod(volume) && parts.csi.is_shared(&wanted.place) {
        return Err(Fault::missing(csi::ALREADY_IN_USE).into());
    }
    parts.csi.record_published(&wanted.place);
    // A published volume was attached before. Only a driver that republishes needs the attachment's metadata again.
    let republishes = republishes(wanted.described.as_ref());
    let is_needed = attaches && (republishes || !is_published(parts, &wanted.place).await?);
    let publish_context = if is_needed {
        let described = wanted.described.as_ref();
        let data = &wanted.place.data;
        let attached = attachment::wait(parts, data, described, volume.migrated).await;
        attached.map_err(|failed| Problem::Unattached {
            step: csi::steps(volume)[0],
            why: failed.why,
            is_full: failed.is_full,
        })?
    } else {
        HashMap::new()
    };
    let staging = mount(parts, pod, &wanted, publish_context).await?;
    let again = expansion::grow(parts, pod, &wanted, staging, waits).await?;
    let labelled = needs_no_labels(parts, volume, &wanted.place).await?;
    Ok(VolumeSetUp { labelled, again })
}

/// Whether the runtime must not relabel the volume's files: they are mounted with a label, or do not support labels.
async fn needs_no_labels(
    parts: &Parts,
    volume: &Volume,
    place: &Published,
) -> Result<bool, HostError> {
    if volume.label.is_some() || volume.block || parts.machine.selinux.is_none() {
        return Ok(volume.label.is_some());
    }
    // The runtime fails to relabel files on NFS, for example (upstream `hostutil`, `GetSELinuxSupport`).
    let target = place.target.clone();
    Ok(!blocking(move || labels_files(&target)).await?)
}

fn republishes(driver: Option<&CSIDriver>) -> bool {
    driver.is_some_and(|d| d.spec.requires_republish == Some(true))
}

/// Whether a volume is published for its pod: it is mounted, or its driver publishes it without a mount.
async fn is_published(parts: &Parts, place: &Published) -> Result<bool, HostError> {
    let target = place.target.clone();
    let is_mounted = blocking(move || is_mounted(&target)).await?;
    Ok(is_mounted || lock(&parts.csi.unmounted).contains(&place.key()))
}

/// Stages and publishes the volume unless this was done before. Returns the
/// staging path; empty if the volume is not staged.
async fn mount(
    parts: &Parts,
    pod: &Pod,
    wanted: &Wanted<'_>,
    publish_context: HashMap<String, String>,
) -> Result<String, Problem> {
    let Wanted {
        volume,
        registered,
        described,
        place,
        volume_lock,
    } = wanted;
    let (described, owner) = (described.as_ref(), pod::ownership(pod));
    let stages = registered.capabilities.stage && !volume.inline;
    let (dirs, own, held) = (
        parts.csi.dirs.clone(),
        place.clone(),
        Arc::clone(volume_lock),
    );
    let is_published = is_published(parts, place).await?;
    let (before, staging) = blocking(move || {
        // Not cancelled: a record that is written late would look like a published volume.
        let _held = held;
        let before = dirs.staged(&own).is_some();
        dirs.prepare(&own)?;
        let staging = if stages {
            dirs.stage(&own)?.display().to_string()
        } else {
            String::new()
        };
        Ok((before, staging))
    })
    .await?;
    let capability = csi::capability(volume, registered.capabilities, owner.group);
    // Republishing affects only the pod's mount.
    if stages && !is_published {
        stage(
            parts,
            wanted,
            &publish_context,
            &staging,
            capability.clone(),
            before,
        )
        .await?;
    }
    if !is_published || republishes(described) {
        let mut volume_context = csi::context(volume, pod, described);
        let mut secrets = secret(
            parts,
            "NodePublishSecretRef",
            volume.publish_secret.as_ref(),
        )
        .await?;
        // As in the kubelet, block volumes get no tokens.
        let asks = described.filter(|_| !volume.block);
        if let Some(tokens) = tokens(parts, pod, asks).await? {
            // Drivers log the volume context but not secrets, so some require their tokens in secrets.
            let place = if described
                .is_some_and(|d| d.spec.service_account_token_in_secrets == Some(true))
            {
                &mut secrets
            } else {
                &mut volume_context
            };
            place.insert(
                "csi.storage.k8s.io/serviceAccount.tokens".into(),
                tokens.to_string(),
            );
        }
        let request = pb::NodePublishVolumeRequest {
            volume_id: place.data.volume_handle.clone(),
            publish_context,
            staging_target_path: staging.clone(),
            target_path: place.target.display().to_string(),
            volume_capability: Some(capability),
            readonly: volume.read_only,
            secrets,
            volume_context,
        };
        let driver = registered.driver.clone();
        run_uncancelled(volume_lock, async move { driver.publish(request).await })
            .await
            .map_err(|error| Problem::step_failed(csi::steps(volume)[2], error.to_string()))?;
        let target = place.target.clone();
        if !blocking(move || is_mounted(&target)).await? {
            lock(&parts.csi.unmounted).insert(place.key());
        }
    }
    if csi::applies_fs_group(volume, described, registered.capabilities) {
        // An agent that was killed may have changed the group of some files only: the root directory is changed last.
        let owner = pod::Ownership {
            on_mismatch: is_published || owner.on_mismatch,
            ..owner
        };
        parts.host.chown_published(place, owner).await?;
    }
    Ok(staging)
}

/// Stages a volume, unless its driver has staged it since its registration. `before` is
/// whether it may have been staged before this attempt.
async fn stage(
    parts: &Parts,
    wanted: &Wanted<'_>,
    publish_context: &HashMap<String, String>,
    staging: &str,
    capability: pb::VolumeCapability,
    before: bool,
) -> Result<(), Problem> {
    let Wanted { volume, place, .. } = wanted;
    let failed = |why: &dyn Display| Problem::step_failed(csi::steps(volume)[1], why.to_string());
    let name = unique_name(place);
    if before && lock(&parts.csi.staged).contains(&name) {
        return Ok(());
    }
    let request = pb::NodeStageVolumeRequest {
        volume_id: place.data.volume_handle.clone(),
        publish_context: publish_context.clone(),
        staging_target_path: staging.to_owned(),
        volume_capability: Some(capability),
        secrets: secret(parts, "NodeStageSecretRef", volume.stage_secret.as_ref())
            .await
            .map_err(|problem| failed(&problem))?,
        volume_context: volume.attributes.clone().into_iter().collect(),
    };
    let driver = wanted.registered.driver.clone();
    let staging = async move { driver.stage(request).await };
    let Err(error) = run_uncancelled(&wanted.volume_lock, staging).await else {
        lock(&parts.csi.staged).insert(name);
        return Ok(());
    };
    if error.certain && !before {
        // Nothing was staged, so the driver need not unstage it; it may no longer exist when the pod terminates.
        let is_last = !is_published_elsewhere(&parts.csi, place).await?;
        let (dirs, own) = (parts.csi.dirs.clone(), place.clone());
        let held = Arc::clone(&wanted.volume_lock);
        blocking(move || {
            let _held = held;
            dirs.unstaged(&own)?;
            dirs.forget(&own, is_last)
        })
        .await?;
    }
    Err(failed(&error))
}

/// The service account tokens that a driver requests for the pod.
async fn tokens(
    parts: &Parts,
    pod: &Pod,
    driver: Option<&CSIDriver>,
) -> Result<Option<Value>, Problem> {
    let wanted = driver
        .and_then(|d| d.spec.token_requests.as_ref())
        .filter(|t| !t.is_empty());
    let mut all = serde_json::Map::new();
    for wanted in wanted.into_iter().flatten() {
        let request = TokenFor {
            pod,
            audience: &wanted.audience,
            seconds: wanted.expiration_seconds.unwrap_or(3600),
            account_uid: None,
        };
        let token = parts
            .api
            .token(request)
            .await
            .map_err(|e| Problem::later(format!("failed to fetch token: {e}")))?;
        all.insert(
            wanted.audience.clone(),
            json!({"token": token.text, "expirationTimestamp": token.expires.to_string()}),
        );
    }
    Ok((!all.is_empty()).then(|| all.into()))
}

/// Unpublishes all volumes of a pod. A volume's record is removed only after its driver has unpublished it. A missing
/// or failing driver does not block the volumes of others.
pub async fn unpublish(parts: &Parts, uid: &str) -> Result<(), VolumeError> {
    let of_pod = |place: &&Published| place.uid == uid;
    let all: Vec<Published> = lock(&parts.csi.published)
        .values()
        .filter(of_pod)
        .cloned()
        .collect();
    if all.is_empty() {
        return Ok(());
    }
    // The driver cannot unpublish a volume whose subPaths are still mounted: its device would be busy.
    parts.host.unbind_sub_paths(uid).await?;
    let work = all.iter().map(|place| unpublish_one(parts, place));
    let outcomes = futures::future::join_all(work).await;
    outcomes.into_iter().collect()
}

async fn unpublish_one(parts: &Parts, place: &Published) -> Result<(), VolumeError> {
    // Waits for a call in progress.
    let volume_lock = parts.csi.volume_lock(place);
    let _guard = volume_lock.lock().await;
    let (begun, outcome) = (Instant::now(), unpublish_volume(parts, place).await);
    parts.metrics.volume(VolumeOperation {
        name: if place.block {
            "unmap_volume"
        } else {
            "volume_unmount"
        },
        plugin: &format!("kubernetes.io/csi:{}", place.data.driver_name),
        is_migrated: false,
        has_failed: outcome.is_err(),
        took: begun.elapsed(),
    });
    if let Err(VolumeError::Driver(..)) = outcome
        && !place.block
    {
        // Mounts that a privileged pod has made below the volume can keep it busy.
        parts.host.unmount_within(place).await?;
    }
    outcome.map_err(|why| VolumeError::Published {
        volume: place.name.clone(),
        why: Box::new(why),
    })?;
    parts.csi.forget(place);
    Ok(())
}

/// The staging path, if the volume is staged. May block on a mount that hangs.
async fn staged(csi: &Csi, place: &Published) -> Result<Option<PathBuf>, HostError> {
    let (dirs, own) = (csi.dirs.clone(), place.clone());
    blocking(move || Ok(dirs.staged(&own))).await
}

/// Whether the driver may have published the volume for another pod. A pod
/// that waits for the attachment does not count.
async fn is_published_elsewhere(csi: &Csi, place: &Published) -> Result<bool, HostError> {
    let (dirs, others) = (csi.dirs.clone(), csi.in_other_pods(place));
    blocking(move || Ok(others.iter().any(|other| dirs.is_recorded(other)))).await
}

async fn unpublish_volume(parts: &Parts, place: &Published) -> Result<(), VolumeError> {
    let (dirs, own) = (parts.csi.dirs.clone(), place.clone());
    // The driver does not know a volume that waits for its attachment, unless another pod has staged it.
    let is_recorded = blocking(move || Ok(dirs.is_recorded(&own))).await?;
    if is_recorded {
        let registered = parts.csi.driver(&place.data.driver_name)?;
        let target = place.target.display().to_string();
        registered
            .driver
            .unpublish(&place.data.volume_handle, &target)
            .await
            .map_err(failed("NodeUnpublishVolume"))?;
    }
    let is_last = !is_published_elsewhere(&parts.csi, place).await?;
    let is_left = is_last && staged(&parts.csi, place).await?.is_some();
    let (dirs, own) = (parts.csi.dirs.clone(), place.clone());
    // The staging path has its own record, so the next agent unstages the volume if this one is stopped here.
    blocking(move || dirs.forget(&own, is_last && !is_left)).await?;
    if is_left {
        parts.csi.mark_staged_without_pod(place);
    }
    Ok(())
}
