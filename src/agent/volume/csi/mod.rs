//! Volumes of CSI drivers: staged and published for pods, and undone after them (kubelet spec, 9.5).

mod attachment;
mod expansion;
mod registry;
pub mod unstaging;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_proto::csi as pb;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::CSIDriver;
use serde_json::{Value, json};
use tokio::sync::{Notify, OwnedMutexGuard, watch};
use tokio::time::Instant;

pub use registry::run;

use crate::agent::Context;
use crate::agent::metrics::VolumeOperation;
use crate::agent::serving::VolumeFigures;
use crate::agent::volume::Made;
use crate::agent::volume::reported::Reported;
use crate::core::fault::Fault;
use crate::core::lock::lock;
use crate::core::pod;
use crate::core::volume::csi::{self, NodeCapabilities, Volume};
use crate::core::volume::expansion::Expansions;
use crate::core::volume::resolved::Problem;
use crate::csi::{CsiError, Driver, NodeInfo};
use crate::host::volume::csi::{CsiDirs, Published, is_mounted, labels_files};
use crate::host::{HostError, blocking};
use crate::kubeapi::pods::TokenFor;
use crate::sys::machine::Room;
use crate::sys::patient::Patient;

/// Why a volume is not undone yet, or cannot be asked about.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// Its driver is gone; when it registers, pods that wait for it are told.
    #[error("driver name {0} not found in the list of registered CSI drivers")]
    NoDriver(String),
    /// Its driver has refused, or has not answered.
    #[error("{0}: {1}")]
    Driver(&'static str, CsiError),
    /// What this machine has of it is in the way.
    #[error("{0}")]
    Host(#[from] HostError),
    /// One of a pod's volumes of drivers.
    #[error("volume {volume} cannot be unpublished: {why}")]
    Published {
        /// Its directory's name.
        volume: String,
        /// Why.
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

/// How long a volume's filesystem may take to say how full it is.
const ASKING: Duration = Duration::from_secs(10);

/// A driver that is registered.
#[derive(Clone)]
struct Registered {
    /// The socket that it has registered with.
    socket: PathBuf,
    driver: Driver,
    capabilities: NodeCapabilities,
    info: NodeInfo,
}

/// Pod and directory of a published volume.
type Place = (String, String);

/// The drivers of this node, and what they have published.
pub struct Csi {
    drivers: Mutex<BTreeMap<String, Registered>>,
    /// All that is published or may be: as noted on disk when the agent started, and kept since.
    published: Mutex<BTreeMap<Place, Published>>,
    /// The volumes that drivers have staged since they were registered, as nodes name them.
    staged: Mutex<BTreeSet<String>>,
    /// What drivers have published since the agent started without mounting it: that it is there cannot be seen.
    unmounted: Mutex<BTreeSet<Place>>,
    /// The volumes that no pod has and that are staged still, as nodes name them.
    staying: Mutex<BTreeMap<String, Published>>,
    /// Those of them that nobody has begun to have unstaged.
    left: Mutex<Vec<Published>>,
    leaves: Notify,
    /// One call at a time for each volume.
    locks: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    /// Outdated also where it is another problem for which the node is not ready.
    reported: Reported,
    /// The volumes that have grown here, or could not; local ones only while they could not.
    pub(super) expansions: Mutex<Expansions>,
    /// Drivers that have to say anew how many volumes they serve here.
    outdated: Mutex<BTreeSet<String>>,
    asked: Notify,
    /// Why CSINode does not say what it should, if it does not.
    problem: watch::Sender<Option<String>>,
    dirs: CsiDirs,
    /// Filesystems that are asked for their room.
    rooms: Patient,
}

impl Csi {
    /// No drivers yet; what they published before is read from below the agent's root directory.
    #[must_use]
    pub fn new(root: &Path) -> Csi {
        let dirs = CsiDirs(root.into());
        let published: BTreeMap<Place, Published> =
            dirs.published().into_iter().map(|p| (p.key(), p)).collect();
        // What an agent before this one could not have unstaged.
        let mut left = dirs.staged_volumes();
        left.retain(|staged| !published.values().any(|v| is_same(v, staged)));
        if dirs.count().1 > 0 {
            // One of them may be what a pod has of which that cannot be told.
            left.clear();
        }
        let named = left.iter().map(|v| (unique_name(v), v.clone()));
        let staying = named.collect();
        Csi {
            drivers: Mutex::default(),
            published: Mutex::new(published),
            staged: Mutex::default(),
            unmounted: Mutex::default(),
            staying: Mutex::new(staying),
            left: Mutex::new(left),
            leaves: Notify::new(),
            locks: Mutex::default(),
            reported: Reported::default(),
            expansions: Mutex::default(),
            outdated: Mutex::default(),
            asked: Notify::new(),
            problem: watch::Sender::new(None),
            dirs,
            rooms: Patient::default(),
        }
    }

    fn driver(&self, name: &str) -> Result<Registered, VolumeError> {
        let found = lock(&self.drivers).get(name).cloned();
        found.ok_or_else(|| VolumeError::NoDriver(name.to_owned()))
    }

    /// Whether a driver makes filesystems as large as their volumes have become.
    #[must_use]
    pub fn grows(&self, driver: &str) -> bool {
        lock(&self.drivers)
            .get(driver)
            .is_some_and(|d| d.capabilities.expand)
    }

    fn turn(&self, place: &Published) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = lock(&self.locks);
        locks.retain(|_, held| Arc::strong_count(held) > 1);
        Arc::clone(locks.entry(unique_name(place)).or_default())
    }

    fn note(&self, place: &Published) {
        let before = lock(&self.published).insert(place.key(), place.clone());
        if before.is_none() {
            self.reported.outdated();
        }
    }

    fn forget(&self, place: &Published) {
        lock(&self.unmounted).remove(&place.key());
        lock(&self.published).remove(&place.key());
        self.settle(place);
        self.reported.outdated();
    }

    /// For the next pod a volume that nobody has any more, staged neither, is reported anew: until then a controller may have
    /// begun to detach it.
    fn settle(&self, place: &Published) {
        let name = unique_name(place);
        let published = lock(&self.published);
        let is_there = published.values().any(|v| is_same(v, place));
        if !is_there && !lock(&self.staying).contains_key(&name) {
            self.reported.retain(|other| other != name);
            lock(&self.expansions).forget(&name);
        }
    }

    /// The same volume as other pods have it, or wait for it.
    fn others(&self, place: &Published) -> Vec<Published> {
        let is_other =
            |v: &&Published| is_same(v, place) && (&v.uid, &v.name) != (&place.uid, &place.name);
        let published = lock(&self.published);
        published.values().filter(is_other).cloned().collect()
    }

    /// Whether another pod has the same volume, or waits for it.
    fn is_shared(&self, place: &Published) -> bool {
        !self.others(place).is_empty()
    }

    /// Whether something is published for a pod, or may be.
    #[must_use]
    pub fn has_volumes(&self, uid: &str) -> bool {
        lock(&self.published).values().any(|v| v.uid == uid)
    }

    /// Why the node is not ready on account of its drivers: until its CSINode is there, controllers would take the volumes
    /// that drivers have taken over for another's.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.problem.borrow().clone()
    }

    /// Returns when there is no such reason.
    pub async fn is_ready(&self) {
        let mut problem = self.problem.subscribe();
        // The sender is ours: it is not dropped.
        let _ = problem.wait_for(Option::is_none).await;
    }

    fn set_problem(&self, now: Option<String>) {
        let changed = self.problem.send_if_modified(|known| {
            let changed = *known != now;
            *known = now;
            changed
        });
        if changed {
            self.reported.outdated();
        }
    }

    /// Has a driver asked anew how many volumes it serves here.
    fn outdate(&self, driver: &str) {
        lock(&self.outdated).insert(driver.to_owned());
        self.asked.notify_one();
    }

    /// Where the device of a pod's volume is published.
    pub fn device(&self, uid: &str, name: &str) -> Result<PathBuf, HostError> {
        self.dirs.device(uid, name)
    }

    /// The volumes that this node has, or is about to have, of those that are attached, as nodes name them.
    #[must_use]
    pub fn in_use(&self) -> Vec<String> {
        let published = lock(&self.published);
        self.attached(&published).into_iter().collect()
    }

    /// The node's status says now that these are in use. It counts for those that still are.
    pub fn set_reported(&self, names: &[String]) {
        // Under the lock: what is forgotten meanwhile must not come back.
        let published = lock(&self.published);
        let mut now = self.attached(&published);
        now.retain(|name| names.contains(name));
        self.reported.set(now);
    }

    /// Of volumes that are published or staged, those that are attached, as nodes name them.
    fn attached(&self, published: &BTreeMap<Place, Published>) -> BTreeSet<String> {
        let staying = lock(&self.staying);
        let all = published.values().chain(staying.values());
        let attached = all.filter(|v| !v.data.attachment_id.is_empty());
        attached.map(unique_name).collect()
    }

    /// Returns when that has changed, or [`Csi::problem`].
    pub async fn in_use_changed(&self) {
        self.reported.changed().await;
    }
}

/// As nodes name it.
fn unique_name(volume: &Published) -> String {
    csi::unique_name(&volume.data.driver_name, &volume.data.volume_handle)
}

fn is_same(one: &Published, other: &Published) -> bool {
    one.data.driver_name == other.data.driver_name
        && one.data.volume_handle == other.data.volume_handle
}

/// What is in a secret; nothing where there is none. `field` is the one that refers to it.
async fn secret(
    context: &Context,
    field: &str,
    reference: Option<&(String, String)>,
) -> Result<HashMap<String, String>, Problem> {
    let Some((namespace, name)) = reference else {
        return Ok(HashMap::new());
    };
    let found = context.api.secret(namespace, name).await.map_err(|e| {
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

/// A volume for a pod, with all that is known of it.
struct Wanted<'a> {
    volume: &'a Volume,
    registered: Registered,
    described: Option<CSIDriver>,
    place: Published,
    turn: Turn,
}

/// Whoever has it is the only one who asks a driver about a volume.
type Turn = Arc<OwnedMutexGuard<()>>;

/// Makes a call that is not cut off when its pod ends meanwhile: it keeps the volume's turn until the driver has answered
/// or its time is over. Otherwise a driver that is still staging would be asked to undo it, and mount after that.
async fn to_its_end<T: Send + 'static>(
    turn: &Turn,
    call: impl Future<Output = Result<T, CsiError>> + Send + 'static,
) -> Result<T, CsiError> {
    let held = Arc::clone(turn);
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

/// Stages and publishes a volume for a pod, and makes its filesystem as large as it has become. `is_new` says that the pod
/// had it not yet as far as this agent knows, `waits` that its containers wait for it.
pub(super) async fn publish(
    context: &Context,
    pod: &Pod,
    volume: &Volume,
    is_new: bool,
    waits: bool,
) -> Result<Made, Problem> {
    let described = context
        .api
        .csi_driver(&volume.driver)
        .await
        .map_err(|e| Problem::later(e.to_string()))?;
    let registered = match context.csi.driver(&volume.driver) {
        // What a pod has it keeps while its driver is being replaced, and nothing is asked of that.
        Err(_) if !is_new && !republishes(described.as_ref()) => {
            return Ok(Made {
                labelled: csi::labelled(volume, described.as_ref()).label.is_some(),
                again: None,
            });
        }
        found => found?,
    };
    let volume = &csi::labelled(volume, described.as_ref());
    csi::serves(volume, described.as_ref())?;
    let uid = pod::uid(pod);
    let attaches = csi::wants_attachment(volume, described.as_ref());
    let data = csi::noted(volume, uid, &context.config.node_name, attaches);
    let place = context
        .csi
        .dirs
        .place(uid, data, volume.block, volume.claim.clone())?;
    let turn = context.csi.turn(&place).lock_owned().await;
    let wanted = Wanted {
        volume,
        registered,
        described,
        place,
        turn: Arc::new(turn),
    };
    // As noted on disk, too: another pod's is given back when its driver has said that it is undone, and not before.
    if csi::is_for_one_pod(volume) && context.csi.is_shared(&wanted.place) {
        return Err(Fault::missing(csi::TAKEN).into());
    }
    context.csi.note(&wanted.place);
    // What is mounted was attached before: only a driver that publishes anew has to know how.
    let republishes = republishes(wanted.described.as_ref());
    let is_needed = attaches && (republishes || !there(context, &wanted.place).await?);
    let told = if is_needed {
        let described = wanted.described.as_ref();
        let data = &wanted.place.data;
        let attached = attachment::wait(context, data, described, volume.migrated).await;
        attached.map_err(|failed| Problem::Unattached {
            step: csi::steps(volume)[0],
            why: failed.why,
            is_full: failed.is_full,
        })?
    } else {
        HashMap::new()
    };
    let staging = mount(context, pod, &wanted, told).await?;
    let again = expansion::grow(context, pod, &wanted, staging, waits).await?;
    let labelled = needs_no_labels(context, volume, &wanted.place).await?;
    Ok(Made { labelled, again })
}

/// Whether the runtime is to give a volume's files no labels: it has one, or its files cannot have any.
async fn needs_no_labels(
    context: &Context,
    volume: &Volume,
    place: &Published,
) -> Result<bool, HostError> {
    if volume.label.is_some() || volume.block || context.machine.selinux.is_none() {
        return Ok(volume.label.is_some());
    }
    // The runtime would fail at giving labels to files of NFS, for instance (upstream `hostutil`, `GetSELinuxSupport`).
    let target = place.target.clone();
    Ok(!blocking(move || labels_files(&target)).await?)
}

fn republishes(driver: Option<&CSIDriver>) -> bool {
    driver.is_some_and(|d| d.spec.requires_republish == Some(true))
}

/// Whether a volume is there for its pod: it is mounted, or its driver has published it without that.
async fn there(context: &Context, place: &Published) -> Result<bool, HostError> {
    let target = place.target.clone();
    let is_mounted = blocking(move || is_mounted(&target)).await?;
    Ok(is_mounted || lock(&context.csi.unmounted).contains(&place.key()))
}

/// Has the driver stage and publish, unless it has; the answer is where it is staged, if it is.
async fn mount(
    context: &Context,
    pod: &Pod,
    wanted: &Wanted<'_>,
    told: HashMap<String, String>,
) -> Result<String, Problem> {
    let Wanted {
        volume,
        registered,
        described,
        place,
        turn,
    } = wanted;
    let (described, owner) = (described.as_ref(), pod::ownership(pod));
    let stages = registered.capabilities.stage && !volume.inline;
    let (dirs, own, held) = (context.csi.dirs.clone(), place.clone(), Arc::clone(turn));
    let there = there(context, place).await?;
    let (before, staging) = blocking(move || {
        // Not cut off either: what is noted late would be taken for published.
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
    // A republish concerns the pod's mount alone.
    if stages && !there {
        stage(context, wanted, &told, &staging, capability.clone(), before).await?;
    }
    if !there || republishes(described) {
        let mut volume_context = csi::context(volume, pod, described);
        let mut secrets = secret(
            context,
            "NodePublishSecretRef",
            volume.publish_secret.as_ref(),
        )
        .await?;
        // With a block volume the kubelet sends no tokens.
        let asks = described.filter(|_| !volume.block);
        if let Some(tokens) = tokens(context, pod, asks).await? {
            // Drivers log their context, but not what is in secrets: they may want the tokens there.
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
            publish_context: told,
            staging_target_path: staging.clone(),
            target_path: place.target.display().to_string(),
            volume_capability: Some(capability),
            readonly: volume.read_only,
            secrets,
            volume_context,
        };
        let driver = registered.driver.clone();
        to_its_end(turn, async move { driver.publish(request).await })
            .await
            .map_err(|error| Problem::at(csi::steps(volume)[2], error.to_string()))?;
        let target = place.target.clone();
        if !blocking(move || is_mounted(&target)).await? {
            lock(&context.csi.unmounted).insert(place.key());
        }
    }
    if csi::gives_group(volume, described, registered.capabilities) {
        // An agent that was killed may have left the group half given: its root is given last.
        let owner = pod::Ownership {
            on_mismatch: there || owner.on_mismatch,
            ..owner
        };
        context.host.give_published(place, owner).await?;
    }
    Ok(staging)
}

/// Has the driver stage a volume, unless it has done so since it was registered. `before` says that it may have been
/// staged before this try.
async fn stage(
    context: &Context,
    wanted: &Wanted<'_>,
    told: &HashMap<String, String>,
    staging: &str,
    capability: pb::VolumeCapability,
    before: bool,
) -> Result<(), Problem> {
    let Wanted { volume, place, .. } = wanted;
    let failed = |why: &dyn Display| Problem::at(csi::steps(volume)[1], why.to_string());
    let name = unique_name(place);
    if before && lock(&context.csi.staged).contains(&name) {
        return Ok(());
    }
    let request = pb::NodeStageVolumeRequest {
        volume_id: place.data.volume_handle.clone(),
        publish_context: told.clone(),
        staging_target_path: staging.to_owned(),
        volume_capability: Some(capability),
        secrets: secret(context, "NodeStageSecretRef", volume.stage_secret.as_ref())
            .await
            .map_err(|problem| failed(&problem))?,
        volume_context: volume.attributes.clone().into_iter().collect(),
    };
    let driver = wanted.registered.driver.clone();
    let staging = async move { driver.stage(request).await };
    let Err(error) = to_its_end(&wanted.turn, staging).await else {
        lock(&context.csi.staged).insert(name);
        return Ok(());
    };
    if error.certain && !before {
        // Nothing was staged: its driver need not be asked to undo it, and may be gone when the pod ends.
        let is_last = !is_published_elsewhere(context, place).await?;
        let (dirs, own) = (context.csi.dirs.clone(), place.clone());
        let held = Arc::clone(&wanted.turn);
        blocking(move || {
            let _held = held;
            dirs.unstaged(&own)?;
            dirs.forget(&own, is_last)
        })
        .await?;
    }
    Err(failed(&error))
}

/// The tokens that a driver wants of the pod's service account.
async fn tokens(
    context: &Context,
    pod: &Pod,
    driver: Option<&CSIDriver>,
) -> Result<Option<Value>, Problem> {
    let wanted = driver
        .and_then(|d| d.spec.token_requests.as_ref())
        .filter(|t| !t.is_empty());
    let mut all = serde_json::Map::new();
    for wanted in wanted.into_iter().flatten() {
        let asked = TokenFor {
            pod,
            audience: &wanted.audience,
            seconds: wanted.expiration_seconds.unwrap_or(3600),
            account_uid: None,
        };
        let token = context
            .api
            .token(asked)
            .await
            .map_err(|e| Problem::later(format!("failed to fetch token: {e}")))?;
        all.insert(
            wanted.audience.clone(),
            json!({"token": token.text, "expirationTimestamp": token.expires.to_string()}),
        );
    }
    Ok((!all.is_empty()).then(|| all.into()))
}

/// Undoes all that was published for a pod. Nothing is forgotten before its driver has said that it is undone. One whose
/// driver is gone, or refuses, holds up no other.
pub async fn unpublish(context: &Context, uid: &str) -> Result<(), VolumeError> {
    let of_pod = |place: &&Published| place.uid == uid;
    let all: Vec<Published> = lock(&context.csi.published)
        .values()
        .filter(of_pod)
        .cloned()
        .collect();
    if all.is_empty() {
        return Ok(());
    }
    // A driver cannot unpublish what is still mounted elsewhere in part: its device would be busy.
    context.host.unbind_sub_paths(uid).await?;
    let work = all.iter().map(|place| unpublish_one(context, place));
    let outcomes = futures::future::join_all(work).await;
    outcomes.into_iter().collect()
}

async fn unpublish_one(context: &Context, place: &Published) -> Result<(), VolumeError> {
    // A call that is under way is waited for.
    let turn = context.csi.turn(place);
    let _turn = turn.lock().await;
    let (begun, outcome) = (Instant::now(), one(context, place).await);
    context.metrics.volume(VolumeOperation {
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
        // A privileged pod may have mounted something within it, which is a reason for its driver to find it busy.
        context.host.unmount_within(place).await?;
    }
    outcome.map_err(|why| VolumeError::Published {
        volume: place.name.clone(),
        why: Box::new(why),
    })?;
    context.csi.forget(place);
    Ok(())
}

/// Where a volume is staged, if it is. What is mounted there may hang.
async fn staged(context: &Context, place: &Published) -> Result<Option<PathBuf>, HostError> {
    let (dirs, own) = (context.csi.dirs.clone(), place.clone());
    blocking(move || Ok(dirs.staged(&own))).await
}

/// Whether a driver may have published the same volume for another pod: one that waits for its attachment does not count.
async fn is_published_elsewhere(context: &Context, place: &Published) -> Result<bool, HostError> {
    let (dirs, others) = (context.csi.dirs.clone(), context.csi.others(place));
    blocking(move || Ok(others.iter().any(|other| dirs.is_noted(other)))).await
}

async fn one(context: &Context, place: &Published) -> Result<(), VolumeError> {
    let (dirs, own) = (context.csi.dirs.clone(), place.clone());
    // Of one that waits for its attachment its driver knows nothing, unless it was staged for another pod.
    let is_noted = blocking(move || Ok(dirs.is_noted(&own))).await?;
    if is_noted {
        let registered = context.csi.driver(&place.data.driver_name)?;
        let target = place.target.display().to_string();
        registered
            .driver
            .unpublish(&place.data.volume_handle, &target)
            .await
            .map_err(failed("NodeUnpublishVolume"))?;
    }
    let is_last = !is_published_elsewhere(context, place).await?;
    let is_left = is_last && staged(context, place).await?.is_some();
    let (dirs, own) = (context.csi.dirs.clone(), place.clone());
    // Where it is staged is noted by itself: what is cut off after this is known to the next agent.
    blocking(move || dirs.forget(&own, is_last && !is_left)).await?;
    if is_left {
        context.csi.stays(place);
    }
    Ok(())
}

/// How full the volumes are that drivers have published for a pod: as the driver says, or else as their filesystem does.
pub async fn figures(context: &Context, uid: &str) -> Vec<VolumeFigures> {
    let of_pod = |place: &&Published| place.uid == uid && !place.block;
    let all: Vec<Published> = lock(&context.csi.published)
        .values()
        .filter(of_pod)
        .cloned()
        .collect();
    let mut found = vec![];
    for place in all {
        match full(context, &place).await {
            Ok(figures) => found.push(figures),
            Err(error) => tracing::debug!(
                %error,
                volume = place.name,
                "it cannot be told how full a volume is"
            ),
        }
    }
    found
}

async fn full(context: &Context, place: &Published) -> Result<VolumeFigures, VolumeError> {
    let (namespace, claim) = place.claim.clone().unzip();
    let mut figures = VolumeFigures {
        name: place.name.clone(),
        namespace: namespace.unwrap_or_default(),
        claim,
        ..VolumeFigures::default()
    };
    let registered = context.csi.driver(&place.data.driver_name)?;
    if registered.capabilities.stats {
        let staging = staged(context, place)
            .await?
            .map(|dir| dir.display().to_string())
            .unwrap_or_default();
        let target = place.target.display().to_string();
        let answer = registered
            .driver
            .stats(&place.data.volume_handle, &target, &staging)
            .await
            .map_err(failed("NodeGetVolumeStats"))?;
        let number = |n: i64| u64::try_from(n).unwrap_or(0);
        for usage in &answer.usage {
            let of = (
                number(usage.used),
                number(usage.total),
                number(usage.available),
            );
            match usage.unit() {
                pb::volume_usage::Unit::Bytes => figures.bytes = of,
                pb::volume_usage::Unit::Inodes => figures.inodes = of,
                pb::volume_usage::Unit::Unknown => {}
            }
        }
        figures.abnormal = answer.volume_condition.map(|c| c.abnormal);
        return Ok(figures);
    }
    // A server that is gone pins one thread for each such volume, and none that others need.
    let (key, target) = (place.target.display().to_string(), place.target.clone());
    let ask = move || Room::of(&target).map_err(HostError::from);
    let room = context.csi.rooms.call(&key, ASKING, ask).await?;
    figures.bytes = (
        room.capacity.saturating_sub(room.free),
        room.capacity,
        room.available,
    );
    figures.inodes = (
        room.inodes.saturating_sub(room.inodes_free),
        room.inodes,
        room.inodes_free,
    );
    Ok(figures)
}
